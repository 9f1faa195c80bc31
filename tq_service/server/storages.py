"""The storage services a controller knows: where puts go, and how it confirms puts and frees cells there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import grpc
import numpy as np

from tq_service.domain.cells import FreedCells, Put
from tq_service.errors import AlreadyExistsError, DataLossError, QuotaExceededError, TqError, UnavailableError
from tq_service.server.peer import Peer
from tq_service.storage.cells import PutCells
from tq_service.storage.engine import StorageEngine
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub
from tq_service.wire.credentials import Credentials
from tq_service.wire.error_table import from_rpc_error, status_from_trailers

if TYPE_CHECKING:
    from tq_service.v1.storage_service_pb2_grpc import StorageServiceAsyncStub  # exists for type checkers only

_log = logging.getLogger(__name__)
_CALL_SECONDS = 10.0
_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 10.0
_MOST_CELLS_A_CALL = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of a storage service: its quota (None: no bound) and what is used."""

    max_bytes: int | None
    used_bytes: int

    @property
    def free_bytes(self) -> float:
        """Bytes that are free, as many as can be where there is no bound."""
        return float("inf") if self.max_bytes is None else self.max_bytes - self.used_bytes


class Storage(Protocol):
    """A storage service as the controller uses it; another engine can take its place behind this."""

    storage_id: str
    boot_id: bytes
    address: str

    def room(self) -> Room | None:
        """Return its bytes, None where it should get no puts now."""
        ...

    def expect(self, size_bytes: int) -> None:
        """Count a put that is about to come."""
        ...

    async def confirm(self, put_id: bytes, partition_id: str) -> None:
        """Make an uncommitted put of a partition stay."""
        ...

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back, now or as soon as it can be reached."""
        ...

    async def close(self) -> None:
        """End what runs in the background."""
        ...


class EmbeddedStorage:
    """The engine in the controller's own process."""

    address = ""

    def __init__(self, engine: StorageEngine, address: str = "") -> None:
        self.storage_id = engine.storage_id
        self.boot_id = engine.boot_id
        self.address = address
        self._engine = engine

    def room(self) -> Room:
        """Return its bytes."""
        stat = self._engine.stat()
        return Room(max_bytes=stat.max_bytes, used_bytes=stat.used_bytes)

    def expect(self, size_bytes: int) -> None:
        """Do nothing: the room is always that of the moment."""

    async def confirm(self, put_id: bytes, partition_id: str) -> None:
        """Make an uncommitted put of a partition stay."""
        self._engine.confirm(put_id, partition_id)

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back."""
        self._engine.free(cells)

    async def close(self) -> None:
        """Do nothing: the engine's owner closes it."""


class RemoteStorage:
    """A storage service reached over gRPC; it announces itself again and again."""

    def __init__(
        self,
        endpoint: metadata_pb2.StorageEndpoint,
        room: Room,
        silence_seconds: float,
        credentials: Credentials,
    ) -> None:
        self.storage_id = endpoint.storage_id
        self.boot_id = endpoint.boot_id
        self.address = endpoint.address
        self._silence_seconds = silence_seconds
        self._room = room
        self._placed_bytes = 0  # sent there since it last told of its room
        self._heard_at = time.monotonic()
        self._peer = Peer(endpoint.address, credentials, _stub)
        self._to_free: list[PutCells] = []
        self._freeing: asyncio.Task[None] | None = None

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

    async def confirm(self, put_id: bytes, partition_id: str) -> None:
        """Make an uncommitted put of a partition stay."""
        request = pb.ConfirmPutRequest(boot_id=self.boot_id, put_id=put_id, partition_id=partition_id)
        try:
            await self._peer.stub.ConfirmPut(request, timeout=_CALL_SECONDS, metadata=self._peer.metadata())
        except grpc.aio.AioRpcError as error:
            self._peer.follow_files()
            status = status_from_trailers(error.trailing_metadata())
            raise from_rpc_error(error.code(), error.details(), status) from error

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back as soon as the service can be reached."""
        self._to_free.extend(cells)
        if self._freeing is None or self._freeing.done():
            self._freeing = asyncio.get_running_loop().create_task(self._free_all())

    async def _free_all(self) -> None:
        delay = _FIRST_RETRY_SECONDS
        while self._to_free:
            cells = self._to_free[:_MOST_CELLS_A_CALL]
            request = pb.FreeCellsRequest(boot_id=self.boot_id, cells=map(_encode_cells, cells))
            try:
                await self._peer.stub.FreeCells(request, timeout=_CALL_SECONDS, metadata=self._peer.metadata())
            except (grpc.aio.AioRpcError, TqError) as error:
                reason = error.code() if isinstance(error, grpc.aio.AioRpcError) else error
                _log.warning("storage %s cannot be told to free cells: %s", self.storage_id, reason)
                self._peer.follow_files()
                await asyncio.sleep(delay)  # it may come back in the same life; in another there is nothing to free
                delay = min(2 * delay, _LAST_RETRY_SECONDS)
                continue
            del self._to_free[: len(cells)]
            delay = _FIRST_RETRY_SECONDS

    async def close(self) -> None:
        """Stop freeing and close the channel."""
        if self._freeing is not None:
            self._freeing.cancel()
        await self._peer.aclose()


class StorageDirectory:
    """All storage services of a controller by name."""

    def __init__(self, embedded: EmbeddedStorage | None, heartbeat_seconds: float, credentials: Credentials) -> None:
        self.boot_id = os.urandom(16)
        self.embedded = embedded
        self.heartbeat_seconds = heartbeat_seconds
        self._credentials = credentials
        self._storages: dict[str, Storage] = {} if embedded is None else {embedded.storage_id: embedded}
        self._closing: set[asyncio.Task[None]] = set()
        self._committed: set[Put] = set()

    @property
    def count(self) -> int:
        """Number of storage services that have announced themselves, silent ones included."""
        return len(self._storages)

    @property
    def addresses(self) -> dict[str, str]:
        """Where clients reach each storage service."""
        return {storage_id: storage.address for storage_id, storage in self._storages.items()}

    def register(self, endpoint: metadata_pb2.StorageEndpoint, room: Room) -> None:
        """Take note of a storage service that announces itself; a new life takes the place of the old one."""
        known = self._storages.get(endpoint.storage_id)
        if isinstance(known, RemoteStorage) and known.boot_id == endpoint.boot_id and known.address == endpoint.address:
            known.hear(room)
            return
        storage = RemoteStorage(endpoint, room, 3 * self.heartbeat_seconds, self._credentials)
        if isinstance(known, RemoteStorage):
            closing = asyncio.get_running_loop().create_task(known.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        _log.info("storage %s is at %s", endpoint.storage_id, endpoint.address)
        self._storages[endpoint.storage_id] = storage

    def place(self, size_bytes: int) -> Storage:
        """Return the storage service with the most free bytes that could ever take so many."""
        rooms = [(storage, room) for storage in self._storages.values() if (room := storage.room()) is not None]
        if not rooms:
            raise UnavailableError("no storage service has announced itself; start one with --role storage")
        fitting = [each for each in rooms if each[1].max_bytes is None or size_bytes <= each[1].max_bytes]
        if not fitting:
            largest = max(room.max_bytes or 0 for _, room in rooms)
            raise QuotaExceededError(
                f"a put of {size_bytes} bytes is larger than the largest quota, {largest} bytes; split it, or raise "
                f"max_bytes"
            )
        storage, _ = max(fitting, key=lambda each: (each[1].free_bytes, -each[1].used_bytes))
        storage.expect(size_bytes)
        return storage

    async def confirm(self, put: Put, partition_id: str) -> None:
        """Make an uncommitted put of a partition stay."""
        storage = self._storages.get(put.storage_id)
        if storage is None:
            raise UnavailableError(f"storage service {put.storage_id!r} has not announced itself here yet; try again")
        if storage.boot_id != put.boot_id:
            raise DataLossError(f"storage service {put.storage_id!r} has restarted since the put; put the data again")
        await storage.confirm(put.put_id, partition_id)

    def is_committed(self, put: Put) -> bool:
        """Whether some samples have their cells in this put."""
        return put in self._committed

    def check_uncommitted(self, put: Put) -> None:
        """Refuse a second commit of a put: its cells would be freed with the samples of either."""
        if put in self._committed:
            raise AlreadyExistsError(
                f"put {put.put_id.hex()} is committed already under another request_id; put data once for each commit"
            )

    @contextlib.contextmanager
    def committing(self, put: Put) -> Iterator[None]:
        """Take note that a put is committed by what is done in the `with`, unless it raises."""
        self._committed.add(put)
        try:
            yield
        except BaseException:
            self._committed.discard(put)
            raise

    def free(self, freed: Iterable[FreedCells]) -> None:
        """Give cells back, each to the storage service that holds it; a life that is over has nothing to free."""
        cells_of: dict[str, list[PutCells]] = {}
        for each in freed:
            if each.rows is None:
                self._committed.discard(each.put)
            storage = self._storages.get(each.put.storage_id)
            if storage is not None and storage.boot_id == each.put.boot_id:
                cells_of.setdefault(each.put.storage_id, []).append(_put_cells(each))
        for storage_id, cells in cells_of.items():
            self._storages[storage_id].free(cells)

    async def close(self) -> None:
        """End what runs in the background."""
        await asyncio.gather(*(storage.close() for storage in self._storages.values()), *self._closing)


def _stub(channel: grpc.aio.Channel) -> StorageServiceAsyncStub:
    return cast("StorageServiceAsyncStub", StorageServiceStub(channel))


def _put_cells(cells: FreedCells) -> PutCells:
    if cells.rows is None:
        return PutCells(put_id=cells.put.put_id)
    rows = np.sort(cells.rows)
    starts = np.r_[0, np.flatnonzero(np.diff(rows) != 1) + 1]
    return PutCells(
        put_id=cells.put.put_id,
        field_names=cells.field_names,
        first_rows=rows[starts],
        row_counts=np.diff(np.r_[starts, rows.size]),
    )


def _encode_cells(cells: PutCells) -> pb.PutCells:
    return pb.PutCells(
        put_id=cells.put_id,
        field_names=cells.field_names,
        first_rows=() if cells.first_rows is None else cells.first_rows.tolist(),
        row_counts=() if cells.row_counts is None else cells.row_counts.tolist(),
    )
