"""The storage services a controller knows: where puts go, and how it confirms puts and frees cells there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from tq_service.dataplane._async.drivers import AsyncDriver
from tq_service.errors import (
    AlreadyExistsError,
    DataLossError,
    InvalidArgumentError,
    LimitExceededError,
    PreconditionError,
    QuotaExceededError,
    TqError,
    UnavailableError,
)
from tq_service.internal.v1.put_receipt_pb2 import PutReceipt
from tq_service.internal.v1.storage_registry_pb2 import RegisterStorageRequest, RegisterStorageResponse
from tq_service.log_message import LogMessage
from tq_service.results import StorageStatus
from tq_service.server.adoption import Adoptions
from tq_service.server.known_puts import KnownPuts, put_cells
from tq_service.server.remote_storage import Capacity, RemoteStorage, report_reconciled
from tq_service.server.supervisor import Supervisor
from tq_service.state.cells import CellSet, CellsSnapshot, Freed, Put, freed_cells, live_cells
from tq_service.storage.cells import PutCells
from tq_service.storage.engine import StorageEngine
from tq_service.v1.controller_service_pb2 import PlacePutResponse
from tq_service.v1.metadata_pb2 import StorageEndpoint
from tq_service.version import BUILD
from tq_service.wire.columns import ColumnShape, columns_digest
from tq_service.wire.credentials import Credentials
from tq_service.wire.durations import to_duration

_log = logging.getLogger(__name__)
_MOST_STORAGES = 1024
_GRANT_SECONDS: Final = 5.0
_MOST_GRANTED: Final = 16  # storage services
_GRANTED_SHARE: Final = 64  # of what is free, so that services fill evenly
_GRANTED_PUT_BYTES: Final = 1 << 20
_UNBOUNDED_BYTES: Final = 1 << 62
_FREED_A_TURN: Final = 128  # puts, or parts of some, that are given back before others have their turns: a millisecond


class EmbeddedStorage:
    """The engine in the controller's own process.

    Args:
        engine: the engine; its owner closes it.
        endpoint: how clients reach it.
        driver: what puts and gets its bytes.
        controller_id: of the controller.
    """

    def __init__(
        self, engine: StorageEngine, endpoint: StorageEndpoint, driver: AsyncDriver, controller_id: bytes = b""
    ) -> None:
        self.storage_id = engine.storage_id
        self.boot_id = engine.boot_id
        self.endpoint = endpoint
        self.driver = driver
        self._engine = engine
        self._controller_id = controller_id

    def capacity(self) -> Capacity:
        """Return its bytes."""
        stat = self._engine.stat()
        return Capacity(max_bytes=stat.max_bytes, used_bytes=stat.used_bytes)

    def status(self) -> StorageStatus:
        """Return what is known of it."""
        stat = self._engine.stat()
        return StorageStatus(
            storage_id=self.storage_id,
            address=self.endpoint.address,
            used_bytes=stat.used_bytes,
            max_bytes=stat.max_bytes,
            put_count=stat.put_count,
            version=BUILD,
            heard_ago_seconds=None,
            is_silent=False,
        )

    def note_placement(self, size_bytes: int) -> None:
        """Do nothing: the capacity is always that of the moment."""

    def open_receipt(self, put_id: bytes, partition_id: str, receipt: bytes) -> PutReceipt:
        """Return what a receipt would say: the put itself is here to be looked at.

        Raises:
            InvalidArgumentError: there is one, which this storage service did not give.
            PutNotFoundError: the put is not here.
        """
        if receipt:
            raise InvalidArgumentError(
                f"the receipt of put {put_id.hex()} is not of this storage service, which gives none; send what Put "
                "answered, as it is",
                field="receipt",
            )
        self._engine.check_complete(put_id, partition_id)
        return PutReceipt(
            for_existing_rows=self._engine.is_for_existing_rows(put_id),
            columns_digest=columns_digest(self._engine.columns_of(put_id)),
        )

    def check_held(self, put_id: bytes, partition_id: str) -> None:
        """Check that a put is still here."""
        self._engine.check_complete(put_id, partition_id)

    def spend(self, receipt: PutReceipt) -> None:
        """Do nothing: a put that is freed is gone at once."""

    def confirm(self, put_id: bytes) -> None:
        """Make a put stay; one is not here if all its samples have failed, and its commit freed it."""
        self._engine.confirm(put_id)

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back."""
        self._engine.free(cells)

    def reconcile(self, cells: Iterable[PutCells]) -> None:
        """Say which cells samples have, before anybody is served."""
        state = self._engine.begin_reconciliation(self._controller_id)
        self._engine.reconcile(state, cells=cells)
        for _ in self._engine.finish_reconciliation(state):
            pass
        report_reconciled(self.storage_id, state.missing_put_ids, state.missing_count, state.dropped_count)

    async def close(self) -> None:
        """Do nothing: the engine's owner closes it."""


Storage: TypeAlias = EmbeddedStorage | RemoteStorage
"""A storage service as the controller uses it: both have the same methods."""


@dataclass(slots=True)
class _Commits:
    """The calls that are about to commit one put.

    Attributes:
        call_count: how many there are.
        is_answered: whether one of them has come to an answer, not just to its end.
        is_freed: whether the put was committed, and freed, meanwhile.
        receipts: what they brought, and the call that opened it.
    """

    call_count: int = 0
    is_answered: bool = False
    is_freed: bool = False
    receipts: list[tuple[Storage, PutReceipt]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeemed:
    """A put that a call is about to commit.

    Attributes:
        for_existing_rows: whether it may have taken the reserve, so that no samples are made of it.
        check: raises where it was freed since.
    """

    for_existing_rows: bool
    check: Callable[[], None]


class StorageRegistry:
    """All storage services of a controller by name.

    Args:
        embedded: the one in this process.
        heartbeat_seconds: how often the others register.
        credentials: what this controller shows them.
        snapshot_cells: returns the cells that samples have now, by partition.
        controller_id: of this controller, the owner of its puts, the same over restarts; None: a new one.
        epoch: returns which controller of a cluster this one is, 0 where it is alone.
        after_durable: calls something once all that has changed here so far cannot be lost any more.
        takes_heartbeats: whether heartbeats are taken now, and not refused before they come here.
        supervisor: runs the background tasks; None: one of its own.
    """

    def __init__(
        self,
        embedded: EmbeddedStorage | None,
        heartbeat_seconds: float,
        credentials: Credentials,
        *,
        snapshot_cells: Callable[[], Sequence[CellsSnapshot]] = tuple,
        controller_id: bytes | None = None,
        epoch: Callable[[], int] = lambda: 0,
        after_durable: Callable[[Callable[[], None]], None] = lambda callback: callback(),
        takes_heartbeats: Callable[[], bool] = lambda: True,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.controller_id = os.urandom(16) if controller_id is None else controller_id
        self._epoch = epoch
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
        self._held: list[Freed] = []
        self._freed: deque[Freed] = deque()  # that are being given back; their puts are committed until then
        self._giving_back: asyncio.Task[None] | None = None
        self._after_durable = after_durable
        self._supervisor = supervisor or Supervisor()
        self.adoptions = Adoptions(self._storages, heartbeat_seconds, self._supervisor, takes_heartbeats)
        self._leaving: deque[Sequence[Freed]] = deque()  # freed as soon as their removal is durable
        self._has_puts_elsewhere = False
        self._is_closed = False

    @property
    def count(self) -> int:
        """Number of storage services that have registered, silent ones included."""
        return len(self._storages)

    def statuses(self) -> list[StorageStatus]:
        """Return what is known of each, in the order of their names."""
        storages = [*self._storages.values(), *self.adoptions.taken.values()]
        return [storage.status() for storage in sorted(storages, key=lambda each: each.storage_id)]

    def counts(self) -> dict[str, int]:
        """Return how many storage services can be used, have registered and are silent, or are lost and not taken over.

        One that is lost may still count as silent.
        """
        there = sum(storage.capacity() is not None for storage in self._storages.values())
        return {"available": there, "silent": len(self._storages) - there, "lost": self.adoptions.waiting_count}

    def adoption_counts(self) -> tuple[int, int]:
        """Return how often storage services with a mirror were lost, and how often their puts were taken over."""
        return self.adoptions.lost_count, self.adoptions.taken_over_count

    def endpoint_of(self, storage_id: str, boot_id: bytes) -> StorageEndpoint | None:
        """Return how clients reach an instance of a storage service, None where that is not known at present.

        One that is gone with its puts is where the name is now: that says so to its readers.
        """
        if self.adoptions.is_awaited((storage_id, boot_id)):
            return None
        storage = self._find(storage_id, boot_id) or self._storages.get(storage_id)
        return None if storage is None else storage.endpoint

    def _find(self, storage_id: str, boot_id: bytes) -> Storage | None:
        """Return an instance of a storage service, or what has taken it over."""
        storage = self._storages.get(storage_id)
        if storage is None or storage.boot_id != boot_id:
            return self.adoptions.taken.get((storage_id, boot_id))
        return storage

    def recover(self) -> None:
        """Learn which puts are committed, and tell the embedded storage, once the samples are there again."""
        self._committed = {cells.put for each in self._snapshot_cells() for cells in live_cells(each)}
        own = None if self.embedded is None else self.embedded.storage_id
        elsewhere = {put[:2] for put in self._committed if put.storage_id != own}
        self._has_puts_elsewhere = bool(elsewhere)
        self.adoptions.expect(elsewhere)
        if self.embedded is not None:
            self.embedded.reconcile(self._known(self.embedded.storage_id, self.embedded.boot_id).parts())

    def on_heartbeat(self, request: RegisterStorageRequest) -> RegisterStorageResponse:
        """Register a storage service, and say which of its overdue puts are committed.

        A new run takes the place of the old one. What is said to be unknown stays so: its receipt is void. What it says
        of the puts of another controller is not looked at.

        Raises:
            AlreadyExistsError: the embedded storage has its name, or one that has registered since and is alive.
            LimitExceededError: there are too many that send heartbeats, or hold samples.
            PreconditionError: its puts were taken over.
        """
        if request.controller_id != self.controller_id:
            request.ClearField("receipts_from")
            request.ClearField("overdue_put_ids")
        endpoint = request.storage
        instance = endpoint.storage_id, endpoint.boot_id
        if request.is_adopted:
            storage: Storage | None = self.adoptions.taken.get(instance)
            if not (isinstance(storage, RemoteStorage) and storage.is_same(request)):
                self.adoptions.check_heir(instance, endpoint.address, request.run_id)
        else:
            self.adoptions.check_not_taken(instance)
            storage = self._storages.get(endpoint.storage_id)
        if isinstance(storage, RemoteStorage) and storage.is_same(request):
            storage.on_heartbeat(request)
            if request.is_adopted:
                self.adoptions.take(instance, storage)
            else:
                self.adoptions.on_registered(instance)
        elif request.is_adopted:
            storage = self._register_heir(request)
        else:
            storage = self._register(request)
        answer = RegisterStorageResponse(
            heartbeat_interval=to_duration(self.heartbeat_seconds),
            controller_id=self.controller_id,
            receipt_key=storage.receipt_key,
            epoch=self._epoch(),
        )
        for put_id in request.overdue_put_ids:
            put = Put(endpoint.storage_id, endpoint.boot_id, put_id)
            if put not in self._committed:
                is_under_way = put in self._committing or put in self._placed
                (answer.undecided_put_ids if is_under_way else answer.unknown_put_ids).append(put_id)
        return answer

    def _register_heir(self, request: RegisterStorageRequest) -> RemoteStorage:
        """Register a storage service for the puts that it has taken over."""
        instance = request.storage.storage_id, request.storage.boot_id
        replaced = self._find(*instance)
        if replaced is not None and replaced.capacity() is not None and not self.adoptions.is_lost(instance):
            raise PreconditionError(
                f"the puts of storage service {instance[0]!r} under boot {instance[1].hex()} are at "
                f"{replaced.endpoint.address}, and that is alive; let go of them"
            )
        storage = self._make(request, replaced if isinstance(replaced, RemoteStorage) else None)
        if replaced is not None:
            self._close(replaced)
        if replaced is not None and self._storages.get(instance[0]) is replaced:
            del self._storages[instance[0]]
        self.adoptions.take(instance, storage)
        self._has_puts_elsewhere = True
        return storage

    def _make(self, request: RegisterStorageRequest, replaces: RemoteStorage | None) -> RemoteStorage:
        return RemoteStorage(
            request,
            partial(self._known, request.storage.storage_id, request.storage.boot_id),
            3 * self.heartbeat_seconds,
            self._credentials,
            controller_id=self.controller_id,
            epoch=self._epoch(),
            supervisor=self._supervisor,
            replaces=replaces,
        )

    def _register(self, request: RegisterStorageRequest) -> RemoteStorage:
        endpoint = request.storage
        known = self._storages.get(endpoint.storage_id)
        if known is not None and known is self.embedded:
            raise AlreadyExistsError(
                f"the storage service in the controller's process has the name {endpoint.storage_id!r}; give each "
                "another storage_id",
                metadata={"resource_type": "storage", "resource_name": endpoint.storage_id},
            )
        replaced = known if isinstance(known, RemoteStorage) else None
        if replaced is not None and replaced.has_replaced(request) and replaced.capacity() is not None:
            raise AlreadyExistsError(
                f"another storage service has the name {endpoint.storage_id!r}, at {replaced.endpoint.address}, and "
                f"has registered since this one at {endpoint.address} did; give each another storage_id",
                metadata={"resource_type": "storage", "resource_name": endpoint.storage_id},
            )
        if known is None and len(self._storages) >= _MOST_STORAGES:
            self._forget_lost()
        storage = self._make(request, replaced)
        if replaced is not None:
            self._close(replaced)
            if replaced.has_restarted(request):
                self.adoptions.lose_held_at(replaced.endpoint.address)
            if replaced.boot_id != storage.boot_id and replaced.mirror is not None:
                self.adoptions.lose((replaced.storage_id, replaced.boot_id), replaced.mirror.url)
        self.adoptions.on_registered((storage.storage_id, storage.boot_id))
        if storage.mirror is None:
            self.adoptions.forget_expected(storage.storage_id)
        _log.info(LogMessage("storage registered", storage=endpoint.storage_id, address=endpoint.address))
        self._storages[endpoint.storage_id] = storage
        self._has_puts_elsewhere = True
        return storage

    def _forget_lost(self) -> None:
        """Forget storage services that are silent and hold no samples, such as those of pods that are no more."""
        holders = {put.storage_id for put in self._committed}
        lost = [each for each in self._storages.values() if each.capacity() is None and each.storage_id not in holders]
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
            leaving=(tuple(self._held), tuple(self._freed), *self._leaving),
            uncommitted=[put.put_id for put in (*self._committing, *self._placed) if put[:2] == owner],
        )

    def place(self, size_bytes: int) -> PlacePutResponse:
        """Return where a put is to go: to the most free bytes, where so many could ever be; and the next ones.

        Raises:
            UnavailableError: there is no storage service.
            QuotaExceededError: all are too small.
        """
        known = [(each, capacity) for each in self._storages.values() if (capacity := each.capacity()) is not None]
        if not known:
            raise UnavailableError("no storage service has registered; start one with --role storage")
        fitting = [each for each in known if each[1].max_bytes is None or size_bytes <= each[1].max_bytes]
        if not fitting:
            largest = max(capacity.max_bytes or 0 for _, capacity in known)
            raise QuotaExceededError(
                f"a put of {size_bytes} bytes is larger than the largest quota, {largest} bytes; split it, or raise "
                f"max_bytes",
                metadata={"limit_name": "max_bytes", "got": str(size_bytes), "limit": str(largest)},
            )
        fitting.sort(key=lambda each: (each[1].free_bytes, -each[1].used_bytes), reverse=True)
        first, free_bytes = fitting[0][0], fitting[0][1].free_bytes
        first.note_placement(size_bytes)
        granted, granted_bytes, largest_put = [first], _UNBOUNDED_BYTES, _GRANTED_PUT_BYTES
        if self.count == 1:
            largest_put = _UNBOUNDED_BYTES
        elif first is not self.embedded:
            alike = [each for each in fitting if each[0] is not self.embedded and 2 * each[1].free_bytes >= free_bytes]
            granted = [storage for storage, _ in alike[:_MOST_GRANTED]]
            least_free = alike[:_MOST_GRANTED][-1][1].free_bytes
            granted_bytes = int(min(_UNBOUNDED_BYTES, max(0, least_free) / _GRANTED_SHARE))
        return PlacePutResponse(
            storages=[storage.endpoint for storage in granted],
            embedded=first is self.embedded,
            controller_id=self.controller_id,
            grant_duration=to_duration(_GRANT_SECONDS),
            grant_bytes=granted_bytes,
            max_granted_put_bytes=largest_put,
        )

    @contextlib.contextmanager
    def redeemed(
        self, put: Put, columns: Sequence[ColumnShape], partition_id: str, receipt: bytes
    ) -> Iterator[Redeemed]:
        """Take the receipt of an uncommitted put of a partition, for the `with` to commit it.

        Several calls may commit one put at once, such as a retry beside the call that was given up. A put that none of
        them has committed is freed by the last one, if it was refused; while it may be committed, its storage service
        is answered that it is undecided. Where all calls were cancelled, or the service was unavailable, a retry may
        still commit it.

        Raises:
            UnavailableError: the storage service has not registered, or the put is being freed.
            PutNotFoundError: it is not there: never completed, expired, or cleared.
            InvalidArgumentError: it was put for another partition, or with other columns, or its receipt is not valid.
            DataLossError: the storage service has restarted.
        """
        storage = self._find(put.storage_id, put.boot_id)
        if storage is None and put.storage_id not in self._storages:
            raise UnavailableError(f"storage service {put.storage_id!r} has not registered here yet; try again")
        if storage is None:
            raise DataLossError(
                f"storage service {put.storage_id!r} has restarted since the put; put the data again",
                metadata={"storage_id": put.storage_id},
            )
        self.check_not_lost(put)
        opened = storage.open_receipt(put.put_id, partition_id, receipt)
        if opened.columns_digest != columns_digest(columns):
            got = ", ".join(f"{column.spec.name} ({column.spec.describe()})" for column in columns)
            raise InvalidArgumentError(
                f"the commit has other columns than put {put.put_id.hex()}, got {got or 'none'}; send those of its "
                "header as they are",
                field="columns",
            )

        def check() -> None:
            if commits.is_freed:
                raise UnavailableError(f"put {put.put_id.hex()} was freed while it was committed again; put it again")
            self.check_not_lost(put)
            storage.check_held(put.put_id, partition_id)

        commits = self._committing.setdefault(put, _Commits())
        commits.call_count += 1
        commits.receipts.append((storage, opened))
        try:
            yield Redeemed(for_existing_rows=opened.for_existing_rows, check=check)
            commits.is_answered = True
        except TqError as error:
            commits.is_answered |= not isinstance(error, UnavailableError)
            raise
        finally:
            commits.call_count -= 1
            if not commits.call_count:
                del self._committing[put]
                self._end_commits(put, commits)

    def _end_commits(self, put: Put, commits: _Commits) -> None:
        if commits.is_answered or commits.is_freed:
            for storage, receipt in commits.receipts:
                storage.spend(receipt)
        if commits.is_answered and not commits.is_freed and put not in self._committed:
            self.discard([put])

    def check_not_lost(self, put: Put) -> None:
        """Refuse a put whose storage service is lost to this controller, though it may live and take puts.

        Another one may have looked into the mirror before the put was written to it. A put that was committed before
        its storage service was seen to be lost is found there, where it had to have a copy.

        Raises:
            DataLossError: it is.
        """
        if self.adoptions.takes_no_puts(put[:2]):
            raise DataLossError(
                f"storage service {put.storage_id!r} was lost since the put, and another one takes its puts over; put "
                "the data again",
                metadata={"storage_id": put.storage_id},
            )

    def is_committed(self, put: Put) -> bool:
        """Whether some samples have their cells in this put."""
        return put in self._committed

    def check_uncommitted(self, put: Put) -> None:
        """Refuse a second commit of a put: its cells would be freed with the samples of either."""
        if put in self._committed:
            raise AlreadyExistsError(
                f"put {put.put_id.hex()} is committed already under another request_id; put data once for each commit",
                metadata={"resource_type": "put", "resource_name": put.put_id.hex()},
            )

    @contextlib.contextmanager
    def committing(self, put: Put) -> Iterator[None]:
        """Take note that a put is committed by what is done in the `with`, unless it raises; it stays from now on."""
        self._committed.add(put)
        try:
            yield
        except BaseException:
            self._committed.discard(put)
            raise
        self._confirm(put)

    def _confirm(self, put: Put) -> None:
        """Have the storage service of a committed put confirm it, once the commit cannot be lost any more.

        The embedded one does so at once: it comes back from the journal together with the samples.
        """

        def confirm() -> None:
            storage = self._find(put.storage_id, put.boot_id)
            if storage is not None and put in self._committed:
                storage.confirm(put.put_id)

        if self.embedded is not None and put.storage_id == self.embedded.storage_id:
            confirm()
        else:
            self._after_durable(confirm)

    def driver(self, storage_id: str, boot_id: bytes) -> AsyncDriver:
        """Return what puts and gets bytes at a storage service; a put stays where `adopt` follows.

        Raises:
            DataLossError: it is not there under this boot.
        """
        if self.adoptions.is_awaited((storage_id, boot_id)):
            raise UnavailableError(f"the puts of storage service {storage_id!r} are being taken over; try again")
        storage = self._find(storage_id, boot_id)
        if storage is None:
            raise DataLossError(f"storage service {storage_id!r} is gone, or came back empty")
        return storage.driver

    @contextlib.contextmanager
    def placing(self, put: Put) -> Iterator[None]:
        """Have a put that is being made here known to its storage service, unless the `with` raises."""
        self._placed.add(put)
        try:
            yield
        except BaseException:
            self.discard([put])
            raise

    def adopt(self, puts: Iterable[Put]) -> None:
        """Take note that puts made here are committed by now."""
        puts = list(puts)
        self._committed.update(puts)
        self._placed.difference_update(puts)
        for put in puts:
            self._confirm(put)

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
                self.free(held)

    def discard(self, puts: Iterable[Put]) -> None:
        """Give back puts that were not committed at once: they may be sent again, and must be gone by then."""
        self._free(CellSet(put=put) for put in puts)

    def free(self, freed: Sequence[Freed]) -> None:
        """Give cells that samples had back, in order, once a crash of this controller cannot bring the samples back.

        A controller with an embedded storage alone does so at once: that writes to the journal of the controller, after
        what the controller wrote.
        """
        if self._holder_count:
            self._held += freed
        elif self._has_puts_elsewhere:
            self._leaving.append(freed)
            self._after_durable(lambda: self._give_back(self._leaving.popleft()))
        else:
            self._give_back(freed)

    def _give_back(self, freed: Sequence[Freed]) -> None:
        """Free a few cells now; the rest of many, such as all of a partition, in small steps with turns for others.

        What is left when this process ends is unknown to the process that starts after it, and goes as such.
        """
        if self._is_closed:
            return
        has_more = bool(self._freed)
        self._freed += freed
        if not has_more:
            self._free_some()
        if self._freed and (self._giving_back is None or self._giving_back.done()):
            self._giving_back = self._supervisor.start("giving cells back", self._free_all(), may_end=True)

    async def _free_all(self) -> None:
        while self._freed:
            await asyncio.sleep(0)
            self._free_some()

    def _free_some(self) -> None:
        count = min(len(self._freed), _FREED_A_TURN)
        self._free([freed_cells(self._freed.popleft()) for _ in range(count)])

    def _free(self, freed: Iterable[CellSet]) -> None:
        """Give cells back, each to the storage service that holds it; a boot that is over has nothing to free."""
        cells_of: dict[tuple[str, bytes], list[PutCells]] = {}
        for each in freed:
            if each.rows is None:
                self._committed.discard(each.put)
                self._placed.discard(each.put)
                if (commits := self._committing.get(each.put)) is not None:
                    commits.is_freed = True
            cells_of.setdefault(each.put[:2], []).append(put_cells(each))
        for instance, cells in cells_of.items():
            if (storage := self._find(*instance)) is not None:
                storage.free(cells)

    async def close(self) -> None:
        """Give back what may be, and end what runs in the background."""
        self._is_closed = True
        if self._giving_back is not None:
            self._giving_back.cancel()
        await self._free_all()
        storages = [*self._storages.values(), *self.adoptions.taken.values()]
        await asyncio.gather(*(storage.close() for storage in storages), *self._closing)
