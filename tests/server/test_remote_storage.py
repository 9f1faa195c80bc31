"""A storage service in another process: what is given back there is not committed again meanwhile."""

import asyncio
import logging
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from tq_service.errors import PutNotFoundError, UnavailableError
from tq_service.internal.v1 import storage_control_pb2
from tq_service.internal.v1.put_receipt_pb2 import PutReceipt
from tq_service.internal.v1.storage_registry_pb2 import RegisterStorageRequest
from tq_service.server.puts import KnownPuts
from tq_service.server.receipts import ReceiptKeys
from tq_service.server.remote_storage import RemoteStorage, _typed_errors
from tq_service.storage.index.put import PutCells
from tq_service.v1 import metadata_pb2
from tq_service.wire.connection import Credentials

PUT_ID = b"p" * 16


class Unheard:
    """A call of ReconcilePuts that comes to nothing."""

    async def write(self, _):
        await asyncio.Event().wait()

    def cancel(self):
        pass


class Stub:
    """Answers as a storage service whose answers to frees get lost until the test says otherwise."""

    def __init__(self):
        self.calls = []
        self.is_answering = asyncio.Event()

    def ReconcilePuts(self, **_):  # noqa: N802  (the name of the rpc)
        return Unheard()

    async def UpdatePuts(self, request, **_):  # noqa: N802
        if request.freed:
            await self.is_answering.wait()
        if request.committed_put_ids:
            self.calls.append(("confirm", list(request.committed_put_ids)))
        self.calls += [("free", cells.put_id) for cells in request.freed]
        return storage_control_pb2.UpdatePutsResponse(freed_at=1.0)


@pytest.fixture
async def storage():
    registration = RegisterStorageRequest(
        storage=metadata_pb2.StorageEndpoint(storage_id="s", boot_id=b"b" * 16, address="127.0.0.1:1"),
        run_id=b"r" * 16,
    )
    storage = RemoteStorage(
        registration, lambda: KnownPuts(storage_id="s", boot_id=b"b" * 16), 6.0, Credentials(None, None, None)
    )
    storage._peer.stub = Stub()
    yield storage
    await storage.close()


def receipt_of(storage, put_id=PUT_ID, partition_id="train", given_at=1.0):
    keys = ReceiptKeys()
    keys.renew(b"c", storage.receipt_key)
    return keys.seal(b"c", PutReceipt(put_id=put_id, partition_id=partition_id, given_at=given_at))


async def test_the_receipt_of_a_put_is_not_taken_once_it_is_to_be_given_back(storage):
    """A free that is late, as one that is tried again, would take the cells of samples that have them by then."""
    stub = storage._peer.stub
    storage.free([PutCells(put_id=PUT_ID)])
    with pytest.raises(PutNotFoundError, match="was freed"):
        storage.open_receipt(PUT_ID, "train", receipt_of(storage))
    other = b"q" * 16
    assert storage.open_receipt(other, "train", receipt_of(storage, other)).put_id == other
    stub.is_answering.set()
    await storage._delivering
    for given_at in (1.0, 2.0):  # the second one of bytes that were put again under its id
        with pytest.raises(PutNotFoundError, match="was freed"):
            storage.open_receipt(PUT_ID, "train", receipt_of(storage, given_at=given_at))
    assert stub.calls == [("free", PUT_ID)]


async def test_the_receipt_of_a_put_of_which_cells_are_given_back_is_taken(storage):
    storage.free([PutCells(put_id=PUT_ID, field_names=("x",))])
    assert storage.open_receipt(PUT_ID, "train", receipt_of(storage)).put_id == PUT_ID


async def test_confirmations_go_together_and_before_their_puts_are_freed(storage):
    stub = storage._peer.stub
    for number in range(5):
        storage.confirm(bytes([number]) * 16)
    storage.free([PutCells(put_id=bytes([3]) * 16)])
    stub.is_answering.set()
    await storage._delivering
    assert stub.calls == [("confirm", [bytes([number]) * 16 for number in range(5)]), ("free", bytes([3]) * 16)]


async def test_many_puts_and_scattered_rows_are_freed_in_calls_of_some_milliseconds_each(storage, monkeypatch):
    requests = []

    async def take(request, **_):
        requests.append(request)
        return storage_control_pb2.UpdatePutsResponse()

    monkeypatch.setattr(storage._peer.stub, "UpdatePuts", take)
    scattered = [
        PutCells(put_id=bytes([number]) * 16, rows=np.arange(count) * 2)
        for number, count in enumerate([1, 10_000, 3_000, 3_000])
    ]
    storage.free([*scattered, *(PutCells(put_id=PUT_ID) for _ in range(5_000))])
    await storage._delivering
    assert max(sum(len(cells.first_rows) for cells in request.freed) for request in requests) <= 4096
    assert max(len(request.freed) for request in requests) <= 1024
    assert len(requests) <= 10
    rows = {}
    for cells in (cells for request in requests for cells in request.freed if cells.first_rows):
        rows.setdefault(cells.put_id, []).extend(cells.first_rows)
    assert rows == {cells.put_id: cells.rows.tolist() for cells in scattered}
    assert sum(not cells.first_rows for request in requests for cells in request.freed) == 5_000


async def test_frees_are_told_again_until_they_are_heard_and_the_log_says_so_once(storage, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tq_service.server")
    monkeypatch.setattr("tq_service.server.remote_storage._FIRST_RETRY_SECONDS", 0.0)
    failures = [None] * 5
    stub = storage._peer.stub
    free = stub.UpdatePuts

    async def at_first_lost(request, **_):
        if failures:
            failures.pop()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, SimpleNamespace(), SimpleNamespace())
        return await free(request)

    stub.UpdatePuts = at_first_lost
    stub.is_answering.set()
    storage.free([PutCells(put_id=PUT_ID)])
    await storage._delivering
    assert stub.calls == [("free", PUT_ID)]
    warning, end = caplog.messages
    assert warning == "storage service does not accept updates of puts storage=s address=127.0.0.1:1 error=UNAVAILABLE"
    assert end.startswith("storage service is responding again storage=s address=127.0.0.1:1 after_seconds=")


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
def test_a_refusal_of_the_controller_is_no_fault_of_the_client(code):
    refusal = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "not you")
    with pytest.raises(UnavailableError, match="rejected its controller: not you"), _typed_errors():
        raise refusal
