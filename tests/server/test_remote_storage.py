"""A storage service in another process: what is given back there is not confirmed again meanwhile."""

import asyncio
import logging
from types import SimpleNamespace

import grpc
import pytest

from tq_service.errors import UnavailableError
from tq_service.server.known_puts import KnownPuts
from tq_service.server.remote_storage import Announced, RemoteStorage, Room
from tq_service.storage.cells import PutCells
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.wire.credentials import Credentials

PUT_ID = b"p" * 16


class Unheard:
    """A call of KeepPuts that comes to nothing."""

    async def write(self, _):
        await asyncio.Event().wait()

    def cancel(self):
        pass


class Stub:
    """Answers as a storage service whose answers to frees get lost until the test says otherwise."""

    def __init__(self):
        self.calls = []
        self.is_answering = asyncio.Event()

    def KeepPuts(self, **_):  # noqa: N802  (the name of the rpc)
        return Unheard()

    async def ConfirmPut(self, request, **_):  # noqa: N802
        self.calls.append(("confirm", request.put_id))
        return pb.ConfirmPutResponse()

    async def FreeCells(self, request, **_):  # noqa: N802
        await self.is_answering.wait()
        self.calls += [("free", cells.put_id) for cells in request.cells]


@pytest.fixture
async def storage():
    announced = Announced(
        endpoint=metadata_pb2.StorageEndpoint(storage_id="s", boot_id=b"b" * 16, kind="grpc", address="127.0.0.1:1"),
        run_id=b"r" * 16,
        room=Room(max_bytes=None, used_bytes=0),
    )
    storage = RemoteStorage(
        announced, lambda: KnownPuts(storage_id="s", boot_id=b"b" * 16), 6.0, Credentials(None, None, None)
    )
    storage._peer.stub = Stub()
    yield storage
    await storage.close()


async def test_a_put_is_not_confirmed_while_it_is_being_given_back(storage):
    """A free that is late, as one that is tried again, would take the cells of samples that have them by then."""
    stub = storage._peer.stub
    storage.free([PutCells(put_id=PUT_ID)])
    with pytest.raises(UnavailableError, match="is being given back"):
        await storage.confirm(PUT_ID, "train")
    assert stub.calls == []
    await storage.confirm(b"q" * 16, "train")
    stub.is_answering.set()
    await storage._freeing
    await storage.confirm(PUT_ID, "train")
    assert stub.calls == [("confirm", b"q" * 16), ("free", PUT_ID), ("confirm", PUT_ID)]


async def test_a_put_of_which_cells_are_given_back_is_confirmed(storage):
    storage.free([PutCells(put_id=PUT_ID, field_names=("x",))])
    await storage.confirm(PUT_ID, "train")
    assert storage._peer.stub.calls == [("confirm", PUT_ID)]


async def test_frees_are_told_again_until_they_are_heard_and_the_log_says_so_once(storage, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tq_service.server")
    monkeypatch.setattr("tq_service.server.remote_storage._FIRST_RETRY_SECONDS", 0.0)
    failures = [None] * 5
    stub = storage._peer.stub
    free = stub.FreeCells

    async def at_first_lost(request, **_):
        if failures:
            failures.pop()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, SimpleNamespace(), SimpleNamespace())
        await free(request)

    stub.FreeCells = at_first_lost
    stub.is_answering.set()
    storage.free([PutCells(put_id=PUT_ID)])
    await storage._freeing
    assert stub.calls == [("free", PUT_ID)]
    warning, end = caplog.messages
    assert warning == "storage 's' at 127.0.0.1:1 cannot be told to free cells: UNAVAILABLE"
    assert end.startswith("storage 's' at 127.0.0.1:1 answers again, after ")
