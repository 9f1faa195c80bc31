"""On a GPU: what the tests of the stand-in assert, with the streams, events and pinned memory of CUDA."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from live_server import AnyClient, ClientKind, StartServer
from tensordict import TensorDict

from tq_service.client.batch_meta import BatchMeta
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.wire import cuda, host_memory

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
LONG = 2_000_000_000  # cycles: about a second


def rows(count: int) -> dict[str, torch.Tensor]:
    lengths = [number % 7 for number in range(count)]
    return {
        "wide": torch.arange(count * 512, device="cuda").reshape(count, 512),
        "ragged": torch.nested.as_nested_tensor(
            [torch.full((length,), length, dtype=torch.bfloat16, device="cuda") for length in lengths],
            layout=torch.jagged,
        ),
    }


def equal(left: Any, right: Any) -> bool:
    if left.is_nested:
        return torch.equal(left.values(), right.values()) and torch.equal(left.offsets(), right.offsets())
    return torch.equal(left, right)


@pytest.mark.parametrize("count", [4, 4000])
def test_tensors_go_into_the_service_and_back_as_they_are(client: AnyClient, count: int) -> None:
    data = rows(count)
    meta = client.put("p", data)
    for got in (client.get_data(meta, device="cuda"), client.get_data(meta, device="cuda:0")):
        for name, tensor in data.items():
            assert got[name].device == tensor.device
            assert equal(got[name], tensor)
    out = {"wide": torch.empty_like(data["wide"])}
    assert client.get_data(meta, out=out)["wide"] is not None
    assert equal(out["wide"], data["wide"])


def test_a_put_waits_for_the_callers_stream_and_for_no_other(client: AnyClient) -> None:
    values = torch.zeros(1 << 20, device="cuda")
    busy, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(4 * LONG)
        later = busy.record_event()
    if client.kind == "sync":  # the async client runs in another thread, whose stream is the default one
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG // 10)
            values.fill_(7)
            meta = client.put("p", {"x": values.reshape(4, -1)})
    else:
        torch.cuda._sleep(LONG // 10)
        values.fill_(7)
        meta = client.put("p", {"x": values.reshape(4, -1)})
    assert not later.query()
    got = client.get_data(meta, device="cuda")["x"]
    assert not later.query()
    assert bool((got == 7).all())
    later.synchronize()


def test_memory_is_flat_over_many_gets(client: AnyClient) -> None:
    meta = client.put("p", rows(4000))
    seen = []
    for number in range(300):
        got = client.get_data(meta, device="cuda")
        if number in (50, 299):
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_reserved(), host_memory.PINNED.pinned_bytes))
        del got
    assert seen[0] == seen[1]


def test_regions_are_pinned_and_copied_to_and_from_as_they_are(
    start_server: StartServer, client_kind: ClientKind
) -> None:
    client = start_server(shared_memory="on", max_bytes=1 << 30).client(client_kind)
    for number in range(6):
        values = torch.full((64, 1 << 16), number, device="cuda")  # 32 MiB
        meta = client.put("p", {"x": values})
        got = client.get_data(meta, device="cuda")["x"]
        client.clear_partition("p")  # the next put must not reach what is still on its way up
        assert torch.equal(got, values)
        assert bool((client.get_data(client.put("p", {"x": got}))["x"] == number).all())
        client.clear_partition("p")
    assert any(pinned.is_shared for pinned in host_memory.PINNED._pinned.values())
    assert host_memory.PINNED.pinned_bytes <= 1 << 30


def test_what_the_driver_refuses_to_pin_leaves_no_error_behind() -> None:
    array = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    there = torch.device("cuda", 0)
    assert cuda.register(array.ctypes.data, array.size, there)
    assert not cuda.register(array.ctypes.data, array.size, there)  # it is pinned already
    assert torch.ones(3, device="cuda").sum().item() == 3
    cuda.unregister(array.ctypes.data, there)


def fetch(*, batch_index: int, **_: Any) -> Any:
    if batch_index >= 50:
        return None, BatchMeta(status="end")
    return TensorDict({"x": torch.full((64, 1 << 12), batch_index)}, [64]), BatchMeta(indexes=np.arange(64))


class NoClient:
    def close(self) -> None:
        pass


def no_client(_address: Any) -> NoClient:
    return NoClient()


@pytest.fixture(params=[0, 2], ids=["thread", "workers"])
def loader(request: pytest.FixtureRequest) -> Iterator[StreamingDataLoader]:
    dataset = StreamingDataset(
        "localhost:1", batch_size=64, micro_batch_size=16, data_fields=["x"], partition_id="p", task_name="t",
        fetch_batch_fn=fetch, client_factory=no_client,
    )  # fmt: skip
    with StreamingDataLoader(dataset, request.param, device="cuda") as loader:
        yield loader


def test_a_loader_gives_each_micro_batch_to_the_stream_that_asks(loader: StreamingDataLoader) -> None:
    side, seen = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        for micro_batch, _ in loader:
            torch.cuda._sleep(LONG // 1000)
            seen.append(micro_batch["x"].float().mean())
            micro_batch["x"].fill_(-1)  # its own memory
        means = torch.stack(seen).tolist()
    assert means == [number // 4 for number in range(200)]
