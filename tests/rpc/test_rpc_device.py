"""Tensors of a device through the service, on each way that bytes take, with a stand-in for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live_server import AnyClient, ClientKind, LiveServer, StartServer
from stand_in_device import StandIn, standing_in

from tq_service.dataplane import driver
from tq_service.errors import UnavailableError
from tq_service.wire import device

WAYS = {
    "inline or frames": {"shared_memory": "off", "bulk": "off"},
    "bulk": {"shared_memory": "off"},
    "shared memory": {"shared_memory": "on"},
}
FIRST = torch.arange(1 << 19).reshape(4, -1)  # 4 MiB


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture(params=WAYS)
def client(start_server: StartServer, client_kind: ClientKind, request: pytest.FixtureRequest) -> AnyClient:
    """A client of either kind that has found the way."""
    server: LiveServer = start_server(**WAYS[request.param], max_bytes=1 << 30)
    client = server.client(client_kind)
    client.put({"x": FIRST}, partition_id="first")
    client.get_data(client.lookup_samples("first")[0])
    while request.param == "bulk" and not is_bulk_up(client):
        time.sleep(0.01)
    return client


def is_bulk_up(client: AnyClient) -> bool:
    homes = client.real._calls._channels.values()
    return any(endpoint.driver._bulk.is_up for endpoints in homes for endpoint in endpoints.values())


@pytest.mark.parametrize("rows", [4, 4000], ids=["small", "large"])
def test_a_put_from_the_device_is_a_put_from_the_host(client: AnyClient, stand_in: StandIn, rows: int) -> None:
    wide = torch.arange(rows * 512).reshape(rows, 512)
    ragged = [torch.full((number % 7,), number, dtype=torch.float32) for number in range(rows)]
    on_device = {
        "wide": stand_in.later(wide),
        "host": wide.to(torch.int32),
        "nested": stand_in.nested(ragged),
        "list": [stand_in.put(row) for row in ragged],
        "objects": [{"number": number} for number in range(rows)],
    }
    meta = client.put(on_device, partition_id="p")
    back = client.get_data(meta)
    assert torch.equal(back["wide"], wide)
    assert torch.equal(back["host"], wide.to(torch.int32))
    for name in ("nested", "list"):
        assert all(map(torch.equal, back[name].unbind(), ragged))
    assert back["objects"][-1] == {"number": rows - 1}
    assert device.PINNED.pinned_bytes <= 64 << 20
    assert not [tensor for tensor in device.PINNED._in_use if tensor]  # nothing of the caller is kept


def test_a_put_that_was_broken_off_is_copied_down_again(
    client: AnyClient, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    putting, tries = driver._GrpcSteps._putting, []

    def broken_off_once(*args: Any) -> Any:
        tries.append(args)
        answer = yield from putting(*args)
        if len(tries) == 1:
            raise UnavailableError("broken off")
        return answer

    monkeypatch.setattr(driver._GrpcSteps, "_putting", broken_off_once)
    values = torch.arange(4 << 20).reshape(4, -1)  # 32 MiB
    meta = client.put({"x": stand_in.later(values)}, partition_id="p")
    assert len(tries) == 2
    assert torch.equal(client.get_data(meta)["x"], values)
