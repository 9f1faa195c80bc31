"""A storage service that runs in another process, as its controller uses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import grpc

from tq_service.errors import TqError, UnavailableError
from tq_service.server.bulk_calls import BulkCalls, TakesCells, typed
from tq_service.server.known_puts import KnownPuts, encode_cells
from tq_service.server.outages import PeerOutage
from tq_service.server.peer import Peer
from tq_service.server.supervisor import StartsTasks, Supervisor
from tq_service.storage.cells import PutCells, ReadRuns
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub
from tq_service.wire.columns import ColumnShape
from tq_service.wire.credentials import Credentials

if TYPE_CHECKING:
    from tq_service.v1.storage_service_pb2_grpc import StorageServiceAsyncStub  # exists for type checkers only

_log = logging.getLogger(__name__)
_CALL_SECONDS = 10.0
_KEEP_SECONDS = 1800.0
_RECONCILE_SECONDS = 3600.0
_BULK_SECONDS = 120.0
_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 10.0
_MOST_CELLS_A_CALL = 4096
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of a storage service: its quota (None: no bound) and what is used."""

    max_bytes: int | None
    used_bytes: int

    @property
    def free_bytes(self) -> float:
        """Bytes that are free, as many as can be where there is no bound."""
        return float("inf") if self.max_bytes is None else self.max_bytes - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """What a storage service tells of itself.

    Attributes:
        endpoint: its name, boot and address.
        run_id: new at every start of its process, also where the boot stays.
        room: its bytes.
    """

    endpoint: metadata_pb2.StorageEndpoint
    run_id: bytes
    room: Room


class RemoteStorage:
    """A storage service reached over gRPC; it announces itself again and again.

    First of all it is told which puts are known, in pieces, while puts are confirmed and freed.

    Args:
        announced: what it told of itself.
        known: returns which of its puts are known at the moment of the call.
        silence_seconds: how long it may be silent before it gets no more puts.
        credentials: what this controller shows.
        start_task: runs a background task; None: under a supervisor of its own.
    """

    def __init__(
        self,
        announced: Announced,
        known: Callable[[], KnownPuts],
        silence_seconds: float,
        credentials: Credentials,
        start_task: StartsTasks | None = None,
    ) -> None:
        self._start_task = start_task or Supervisor().start
        self.storage_id = announced.endpoint.storage_id
        self.boot_id = announced.endpoint.boot_id
        self.address = announced.endpoint.address
        self._run_id = announced.run_id
        self._known = known
        self._silence_seconds = silence_seconds
        self._room = announced.room
        self._placed_bytes = 0  # sent there since it last told of its room
        self._heard_at = time.monotonic()
        self._credentials = credentials
        self._peer = Peer(self.address, credentials, _stub)
        self._outage = PeerOutage(_log, f"storage {self.storage_id!r} at {self.address}")
        self._bulk: Peer[BulkCalls] | None = None  # apart, lest confirmations wait behind bytes
        self._to_free: list[PutCells] = []
        self._leaving: set[bytes] = set()  # puts that are to be freed whole
        self._freeing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._reconciling = self._start_task(
            f"reconciling storage {self.storage_id}", self._reconcile_always(), may_end=True
        )

    def is_same(self, announced: Announced) -> bool:
        """Whether it is this run of this service at this address that announces itself."""
        return (self.boot_id, self._run_id, self.address) == (
            announced.endpoint.boot_id,
            announced.run_id,
            announced.endpoint.address,
        )

    def hear(self, room: Room) -> None:
        """Take note of a heartbeat."""
        self._room = room
        self._placed_bytes = 0
        self._heard_at = time.monotonic()

    def expect(self, size_bytes: int) -> None:
        """Count a put that is about to come, so that those of one heartbeat don't all go to one service."""
        self._placed_bytes += size_bytes

    def room(self) -> Room | None:
        """Return the bytes it last told of, None when it has been silent for too long."""
        is_silent = time.monotonic() - self._heard_at > self._silence_seconds
        return None if is_silent else replace(self._room, used_bytes=self._room.used_bytes + self._placed_bytes)

    async def confirm(self, put_id: bytes, partition_id: str) -> bool:
        """Make an uncommitted put of a partition stay; return whether it is for existing rows only."""
        if put_id in self._leaving:  # it may be told late, or twice, and would take what is committed by then
            raise UnavailableError(
                f"put {put_id.hex()} is being given back to storage service {self.storage_id!r}; put it again"
            )
        request = pb.ConfirmPutRequest(boot_id=self.boot_id, put_id=put_id, partition_id=partition_id)
        try:
            with _closing_is_an_error():
                answer = await self._peer.stub.ConfirmPut(
                    request, timeout=_CALL_SECONDS, metadata=self._peer.metadata()
                )
        except grpc.aio.AioRpcError as error:
            self._peer.follow_files()
            raise typed(error) from error
        return answer.for_existing_rows

    async def read(self, put_ids: Sequence[bytes], runs: ReadRuns, into: TakesCells) -> None:
        """Read cells."""
        bulk = self._bulk_peer()
        await bulk.stub.read(self.boot_id, put_ids, runs, into, seconds=_BULK_SECONDS, metadata=bulk.metadata())

    async def put(
        self, put_id: bytes, partition_id: str, columns: Sequence[ColumnShape], values: AsyncIterator[bytes]
    ) -> None:
        """Store a put and make it stay."""
        bulk = self._bulk_peer()
        await bulk.stub.put(put_id, partition_id, columns, values, seconds=_BULK_SECONDS, metadata=bulk.metadata())
        await self.confirm(put_id, partition_id)

    def _bulk_peer(self) -> Peer[BulkCalls]:
        if self._bulk is None:
            self._bulk = Peer(self.address, self._credentials, BulkCalls)
        self._bulk.follow_files()
        return self._bulk

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back as soon as the service can be reached."""
        if self._is_closed:  # it is told with all that is known, once this controller has started anew
            return
        cells = [each for each in cells if each.put_id not in self._leaving]
        self._to_free += cells
        self._leaving.update(each.put_id for each in cells if each.is_whole)
        if self._freeing is None or self._freeing.done():
            self._freeing = self._start_task(
                f"freeing cells of storage {self.storage_id}", self._free_all(), may_end=True
            )

    async def _reconcile_always(self) -> None:
        """Say which puts are known, until that has come to its end, and then again now and then."""
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                with _closing_is_an_error():
                    answer = await self._reconcile()
            except (grpc.aio.AioRpcError, TqError) as error:
                # Where it has another boot by now, it will announce that.
                if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DATA_LOSS:
                    return
                self._outage.lasts("cannot be told which puts are known", error)
                self._peer.follow_files()
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY_SECONDS)
                continue
            self._outage.is_over()
            delay = _FIRST_RETRY_SECONDS
            report_kept(self.storage_id, answer.missing_put_ids, answer.missing_count, answer.dropped_count)
            await asyncio.sleep(_RECONCILE_SECONDS)

    async def _reconcile(self) -> pb.KeepPutsResponse:
        call = self._peer.stub.KeepPuts(timeout=_KEEP_SECONDS, metadata=self._peer.metadata())
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended the call, by an error
                await call.write(pb.KeepPutsRequest(boot_id=self.boot_id))
                await call.initial_metadata()  # what is confirmed from now on stays there, so look at what is known
                pieces = self._known().pieces()
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    await call.write(piece)
                await call.done_writing()
            return await call
        finally:
            call.cancel()

    async def _free_all(self) -> None:
        delay = _FIRST_RETRY_SECONDS
        while self._to_free:
            cells = self._to_free[:_MOST_CELLS_A_CALL]
            request = pb.FreeCellsRequest(boot_id=self.boot_id, cells=map(encode_cells, cells))
            try:
                with _closing_is_an_error():
                    await self._peer.stub.FreeCells(request, timeout=_CALL_SECONDS, metadata=self._peer.metadata())
            except (grpc.aio.AioRpcError, TqError) as error:
                self._outage.lasts("cannot be told to free cells", error)
                self._peer.follow_files()
                await asyncio.sleep(delay)  # it may come back in the same life; in another there is nothing to free
                delay = min(2 * delay, _LAST_RETRY_SECONDS)
                continue
            self._outage.is_over()
            del self._to_free[: len(cells)]
            self._leaving.difference_update(each.put_id for each in cells if each.is_whole)
            delay = _FIRST_RETRY_SECONDS

    async def close(self) -> None:
        """Stop what runs in the background and close the channel."""
        self._is_closed = True
        self._reconciling.cancel()
        if self._freeing is not None:
            self._freeing.cancel()
        await self._peer.aclose()
        if self._bulk is not None:
            await self._bulk.aclose()


@contextlib.contextmanager
def _closing_is_an_error() -> Iterator[None]:
    """Raise UnavailableError where a call ends because its channel is closed.

    gRPC raises CancelledError then too, which would end a task that nobody has cancelled: a commit without an answer,
    or the loop that frees cells.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UnavailableError("the connection to the storage service was closed during the call; try again") from None


def _stub(channel: grpc.aio.Channel) -> StorageServiceAsyncStub:
    return cast("StorageServiceAsyncStub", StorageServiceStub(channel))


def report_kept(storage_id: str, missing_put_ids: Sequence[bytes], missing_count: int, dropped_count: int) -> None:
    """Log what came of telling a storage service which puts are known."""
    if missing_count:
        names = ", ".join(put_id.hex() for put_id in missing_put_ids[:_MOST_NAMED])
        _log.error("storage %s has lost %d puts that samples need: %s", storage_id, missing_count, names)
    if dropped_count:
        _log.warning("storage %s dropped %d puts that no sample needs", storage_id, dropped_count)
