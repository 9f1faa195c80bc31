"""A small put to a storage service of its own is two calls of the client, and the services make none for it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import torch
from live_server import AnyClient, ClientKind, LoopThread, StartServer

from tq_service.server import remote_storage
from tq_service.server.rpc.calls import Services

PUT_COUNT = 20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the methods that any server of this process is called by, in order."""
    made: list[str] = []
    find = Services.service

    def noted(services: Services, details: grpc.HandlerCallDetails) -> Any:
        made.append(details.method.rpartition("/")[2])
        return find(services, details)

    monkeypatch.setattr(Services, "service", noted)
    return made


def test_a_small_put_is_two_calls_of_the_client_and_none_between_services(
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    start_server: StartServer,
    client_kind: ClientKind,
    loop_thread: LoopThread,
) -> None:
    # Confirmations follow in batches, which are not part of a put: here they don't follow at all.
    monkeypatch.setattr(remote_storage, "_CONFIRM_SECONDS", 3600.0)
    controller = start_server(role="controller")
    storage = start_server(role="storage", controller=controller.address, shared_memory="off")
    client = AnyClient(client_kind, controller.address, loop_thread)
    try:
        client.put("train", {"x": torch.arange(4)})  # it learns where puts may go
        calls.clear()
        metas = [client.put("train", {"x": torch.arange(4) + 4 * index}) for index in range(PUT_COUNT)]
        made = [name for name in calls if name != "RegisterStorage"]  # heartbeats come whether there are puts or not
        assert [name for name in made if name != "PlacePut"] == ["PutInline", "Commit"] * PUT_COUNT
        assert made.count("PlacePut") < PUT_COUNT  # a grant holds for some seconds
        assert client.get_data(metas[-1])["x"].tolist() == [4 * PUT_COUNT - 4 + row for row in range(4)]
        assert client.storage_stat(storage.address).uncommitted_put_count == PUT_COUNT + 1
    finally:
        client.close()
