"""The storage services a controller knows: where puts go, and how it confirms puts and frees cells there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tq_service.dataplane._async.kinds import AsyncDriver
from tq_service.domain.tables.cells import CellSet, CellsSnapshot, Put, live_cells
from tq_service.errors import (
    AlreadyExistsError,
    DataLossError,
    LimitExceededError,
    QuotaExceededError,
    UnavailableError,
)
from tq_service.server.embedded_storage import EmbeddedStorage
from tq_service.server.known_puts import KnownPuts, put_cells
from tq_service.server.remote_storage import Announced, RemoteStorage, Room
from tq_service.server.supervisor import StartsTasks, Supervisor
from tq_service.storage.cells import PutCells
from tq_service.v1.metadata_pb2 import StorageEndpoint
from tq_service.wire.credentials import Credentials

_log = logging.getLogger(__name__)
_MOST_STORAGES = 1024


class Storage(Protocol):
    """A storage service as the controller uses it; another engine can take its place behind this."""

    storage_id: str
    boot_id: bytes
    endpoint: StorageEndpoint

    @property
    def driver(self) -> AsyncDriver:
        """What puts and gets its bytes; a put stays where `confirm` follows."""
        ...

    def room(self) -> Room | None:
        """Return its bytes, None where it should get no puts now."""
        ...

    def expect(self, size_bytes: int) -> None:
        """Count a put that is about to come."""
        ...

    async def confirm(self, put_id: bytes, partition_id: str) -> bool:
        """Make an uncommitted put of a partition stay; return whether it is for existing rows only."""
        ...

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back, now or as soon as it can be reached."""
        ...

    async def close(self) -> None:
        """End what runs in the background."""
        ...


@dataclass(slots=True)
class _Commits:
    """The calls that are about to commit one put.

    Attributes:
        call_count: how many there are.
        is_confirmed: whether the storage service has answered one of them.
        is_freed: whether the put was committed, and freed, meanwhile.
    """

    call_count: int = 0
    is_confirmed: bool = False
    is_freed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a storage service asked about: puts that are not committed, and those that may still be."""

    unknown: Sequence[bytes] = ()
    undecided: Sequence[bytes] = ()


class StorageDirectory:
    """All storage services of a controller by name.

    Args:
        embedded: the one in this process.
        heartbeat_seconds: how often the others announce themselves.
        credentials: what this controller shows them.
        snapshot_cells: returns the cells that samples have now, by partition.
        boot_id: of this controller, the same over restarts where it keeps its state; None: a new one.
        after_durable: calls something once all that has changed here so far cannot be lost any more.
        start_task: runs a background task; None: under a supervisor of its own.
    """

    def __init__(
        self,
        embedded: EmbeddedStorage | None,
        heartbeat_seconds: float,
        credentials: Credentials,
        *,
        snapshot_cells: Callable[[], Sequence[CellsSnapshot]] = tuple,
        boot_id: bytes | None = None,
        after_durable: Callable[[Callable[[], None]], None] = lambda callback: callback(),
        start_task: StartsTasks | None = None,
    ) -> None:
        self.boot_id = os.urandom(16) if boot_id is None else boot_id
        self.embedded = embedded
        self._snapshot_cells = snapshot_cells
        self.heartbeat_seconds = heartbeat_seconds
        self._credentials = credentials
        self._storages: dict[str, Storage] = {} if embedded is None else {embedded.storage_id: embedded}
        self._closing: set[asyncio.Task[None]] = set()
        self._committed: set[Put] = set()
        self._committing: dict[Put, _Commits] = {}
        self._placed: set[Put] = set()  # made here for a restore that is under way
        self._holder_count = 0
        self._held: list[CellSet] = []
        self._after_durable = after_durable
        self._start_task = start_task or Supervisor().start
        self._leaving: deque[Sequence[CellSet]] = deque()  # given back as soon as that nobody needs them is durable

    @property
    def count(self) -> int:
        """Number of storage services that have announced themselves, silent ones included."""
        return len(self._storages)

    @property
    def endpoints(self) -> dict[str, StorageEndpoint]:
        """How clients reach each storage service."""
        return {storage_id: storage.endpoint for storage_id, storage in self._storages.items()}

    def recover(self) -> None:
        """Learn which puts are committed, and tell the embedded storage, once the samples are there again."""
        self._committed = {cells.put for each in self._snapshot_cells() for cells in live_cells(each)}
        if self.embedded is not None:
            self.embedded.keep(self._known(self.embedded.storage_id, self.embedded.boot_id).parts())

    def register(self, announced: Announced) -> None:
        """Take note of a storage service that announces itself; a new run takes the place of the old one.

        Raises:
            AlreadyExistsError: the embedded storage has its name.
            LimitExceededError: there are too many that are heard of, or hold samples.
        """
        endpoint = announced.endpoint
        known = self._storages.get(endpoint.storage_id)
        if isinstance(known, RemoteStorage) and known.is_same(announced):
            known.hear(announced.room)
            return
        if self.embedded is not None and endpoint.storage_id == self.embedded.storage_id:
            raise AlreadyExistsError(
                f"the storage service in the controller's process has the name {endpoint.storage_id!r}; give each "
                "another storage_id"
            )
        if known is None and len(self._storages) >= _MOST_STORAGES:
            self._forget_lost()
        known_puts = partial(self._known, endpoint.storage_id, endpoint.boot_id)
        silence_seconds = 3 * self.heartbeat_seconds
        storage = RemoteStorage(announced, known_puts, silence_seconds, self._credentials, self._start_task)
        if isinstance(known, RemoteStorage):
            self._close(known)
        _log.info("storage %s is at %s", endpoint.storage_id, endpoint.address)
        self._storages[endpoint.storage_id] = storage

    def _forget_lost(self) -> None:
        """Forget storage services that are silent and hold no samples, such as those of pods that are no more."""
        holders = {put.storage_id for put in self._committed}
        lost = [each for each in self._storages.values() if each.room() is None and each.storage_id not in holders]
        if not lost:
            raise LimitExceededError(
                f"there would be {len(self._storages) + 1} storage services, at most {_MOST_STORAGES} expected",
                metadata={
                    "limit_name": "storage services",
                    "got": str(len(self._storages) + 1),
                    "limit": str(_MOST_STORAGES),
                },
            )
        for storage in lost:
            del self._storages[storage.storage_id]
            self._close(storage)

    def _close(self, storage: Storage) -> None:  # not supervised: nothing depends on what it does
        closing = asyncio.get_running_loop().create_task(storage.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _known(self, storage_id: str, boot_id: bytes) -> KnownPuts:
        """Return the puts of a storage service that samples have, or may have again, as of now."""
        owner = (storage_id, boot_id)
        return KnownPuts(
            storage_id=storage_id,
            boot_id=boot_id,
            cells=self._snapshot_cells(),
            leaving=(tuple(self._held), *self._leaving),
            uncommitted=[put.put_id for put in (*self._committing, *self._placed) if put[:2] == owner],
        )

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

    @contextlib.asynccontextmanager
    async def confirmed(self, put: Put, partition_id: str) -> AsyncIterator[bool]:
        """Make an uncommitted put of a partition stay, for the `with` to commit it.

        Yields whether it is for existing rows only.

        Several calls may commit one put at once, such as a retry beside the call that was given up. A put that none of
        them has committed is freed by the last one; where a confirmation may have been made and its answer did not come
        it is left to its storage service, which asks for it (`verify`), and a retry may still commit it.

        Raises:
            UnavailableError: the storage service does not answer, or the put is being freed.
            PutNotFoundError: it is not there: never completed, expired, or cleared.
            InvalidArgumentError: it was put for another partition.
            DataLossError: the storage service has restarted.
        """
        storage = self._storages.get(put.storage_id)
        if storage is None:
            raise UnavailableError(f"storage service {put.storage_id!r} has not announced itself here yet; try again")
        if storage.boot_id != put.boot_id:
            raise DataLossError(f"storage service {put.storage_id!r} has restarted since the put; put the data again")
        commits = self._committing.setdefault(put, _Commits())
        commits.call_count += 1
        try:
            for_existing_rows = await storage.confirm(put.put_id, partition_id)
            commits.is_confirmed = True
            if commits.is_freed:
                raise UnavailableError(f"put {put.put_id.hex()} was freed while it was committed again; put it again")
            yield for_existing_rows
        finally:
            commits.call_count -= 1
            if not commits.call_count:
                del self._committing[put]
                if commits.is_confirmed and not commits.is_freed and put not in self._committed:
                    self.free([CellSet(put=put)])

    def verify(self, storage_id: str, boot_id: bytes, put_ids: Iterable[bytes]) -> Verified:
        """Say which confirmed puts of a storage service are not committed."""
        puts = [Put(storage_id, boot_id, put_id) for put_id in put_ids]
        uncommitted = [put for put in puts if put not in self._committed]
        return Verified(
            unknown=[put.put_id for put in uncommitted if not self._is_under_way(put)],
            undecided=[put.put_id for put in uncommitted if self._is_under_way(put)],
        )

    def _is_under_way(self, put: Put) -> bool:
        return put in self._committing or put in self._placed

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

    def get(self, storage_id: str, boot_id: bytes) -> Storage | None:
        """Return a storage service in one of its lives, None where that is over or unknown."""
        storage = self._storages.get(storage_id)
        return storage if storage is not None and storage.boot_id == boot_id else None

    @contextlib.contextmanager
    def placing(self, put: Put) -> Iterator[None]:
        """Have a put that is being made here known to its storage service, unless the `with` raises."""
        self._placed.add(put)
        try:
            yield
        except BaseException:
            self.free([CellSet(put=put)])
            raise

    def adopt(self, puts: Iterable[Put]) -> None:
        """Take note that puts made here are committed by now."""
        self._committed.update(puts)
        self._placed.difference_update(puts)

    @contextlib.contextmanager
    def holding_frees(self) -> Iterator[None]:
        """Give no cells back until the end of the `with`, so that those of its beginning can be read."""
        self._holder_count += 1
        try:
            yield
        finally:
            self._holder_count -= 1
            if not self._holder_count:
                held, self._held = self._held, []
                self._give_back(held)

    def free(self, freed: Iterable[CellSet]) -> None:
        """Give cells back, each to the storage service that holds it; a life that is over has nothing to free."""
        freed = list(freed)
        if self._holder_count:  # a put that was not committed may be sent again, and must be gone by then
            self._held += [each for each in freed if each.put in self._committed]
            freed = [each for each in freed if each.put not in self._committed]
        self._give_back(freed)

    def _give_back(self, freed: Sequence[CellSet]) -> None:
        """Free cells, elsewhere once a crash of this controller cannot bring back samples that have them.

        The embedded storage writes to the journal of the controller, after what the controller wrote.
        """
        own = None if self.embedded is None else self.embedded.storage_id
        at_once: list[CellSet] = []
        late: list[CellSet] = []
        for each in freed:
            may_come_back = each.put in self._committed and each.put.storage_id != own
            (late if may_come_back else at_once).append(each)
        self._free(at_once)
        if late:
            self._leaving.append(late)
            self._after_durable(lambda: self._free(self._leaving.popleft()))

    def _free(self, freed: Iterable[CellSet]) -> None:
        cells_of: dict[str, list[PutCells]] = {}
        for each in freed:
            if each.rows is None:
                self._committed.discard(each.put)
                self._placed.discard(each.put)
                if (commits := self._committing.get(each.put)) is not None:
                    commits.is_freed = True
            storage = self._storages.get(each.put.storage_id)
            if storage is not None and storage.boot_id == each.put.boot_id:
                cells_of.setdefault(each.put.storage_id, []).append(put_cells(each))
        for storage_id, cells in cells_of.items():
            self._storages[storage_id].free(cells)

    async def close(self) -> None:
        """End what runs in the background."""
        await asyncio.gather(*(storage.close() for storage in self._storages.values()), *self._closing)
