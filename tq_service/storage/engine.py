"""The storage engine stores puts within a quota, and reads and frees their cells. The engine does not depend on gRPC.

The engine has two layers. The index tracks puts, rows, the quota and confirmations. Below the index, the blob store
holds the bytes. All engine state is changed on one event loop, and no change spans an await, so no locks are needed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from tq_service.errors import (
    CallCancelledError,
    InvalidArgumentError,
    PutNotFoundError,
    TqError,
    UnavailableError,
)
from tq_service.log_message import LogMessage
from tq_service.results import MirrorStatus
from tq_service.storage.blobs.memory import (
    Blob,
    BlobStore,
    Buffer,
    MemoryBlobs,
    in_thread,
    is_temporary,
)
from tq_service.storage.blobs.shared import MemfdBlobs, RegionBlobs, SharedStore
from tq_service.storage.index.admission import Admission
from tq_service.storage.index.put import PackedPut, PendingPut, PutCells, RowSet, StoredColumn, StoredPut
from tq_service.storage.index.put_table import (
    Backing,
    Overdue,
    PutState,
    PutStored,
    PutTable,
    Reconciliation,
    RecoveredPut,
    Residents,
    cells_besides,
    check_sound,
    describe_put,
    lost_error,
    put_of,
)
from tq_service.storage.index.reading import (
    Move,
    Reading,
    UnreadableError,
    is_light_read,
    open_reading,
    open_reading_in_thread,
)
from tq_service.v1.storage_service_pb2 import RowSlice
from tq_service.wire.columns import ColumnShape
from tq_service.wire.metadata import CellRuns

_log = logging.getLogger(__name__)
_MOST_WORK: Final = 4096  # number of puts to examine (a few milliseconds) before yielding to other tasks
_LOOKED_AT_ONCE: Final = 256  # number of puts with dead cells to examine before yielding to other tasks
_DROP_WORK: Final = 8  # cost of dropping a put, relative to examining a put
_FILLED_AT_ONCE: Final = 1 << 15  # tables of puts with fewer rows are filled on the event loop instead of in a thread
# A single thread compacts one put at a time, so usage exceeds the quota by at most one copy.
_COPIER: Final = ThreadPoolExecutor(1, thread_name_prefix="tq-compact")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStat:
    """Statistics of a storage engine.

    Attributes:
        max_bytes: quota in bytes, or None if unlimited.
        used_bytes: number of bytes stored and reserved, including the extents of jagged and object rows.
        pooled_bytes: number of bytes of memory kept for reuse. `used_bytes` does not include them.
        put_count: number of complete puts.
        uncommitted_put_count: number of complete puts whose commit has not been confirmed.
        damaged_put_count: number of puts whose bytes are known to be lost.
        written_bytes: total size of all puts completed since the engine started.
        read_bytes: total size of all reads opened since the engine started.
        mirror: status of the engine's mirror, or None if the engine has no mirror.
    """

    max_bytes: int | None
    used_bytes: int
    pooled_bytes: int
    put_count: int
    uncommitted_put_count: int
    damaged_put_count: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    mirror: MirrorStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPut:
    """A put that is pinned for a recording. The bytes do not change before `release`, even if the put is freed.

    Attributes:
        record: layout of the tables and values. The record's checksum is 0 unless the tables and values are in a file.
        file: immutable file that begins with the tables and values, or None if they are in `parts`.
        parts: the tables and values, if they are in memory; otherwise empty.
        blob: the pinned blob that contains the values.
    """

    record: PutStored
    file: Path | None = None
    parts: Sequence[Buffer] = ()
    blob: Blob

    def release(self) -> None:
        """Unpin the bytes. Other hard links to the file are not affected."""
        self.blob.unpin()


class StorageEngine:
    """Keeps track of puts, and stores their bytes in its backing's blob store.

    A put is first reserved, then written, flushed and finished. The put is confirmed after its commit, and expires if
    it is not confirmed in time. Cells can be freed individually or all at once, and the put's memory shrinks
    accordingly.

    Each put has an owner, which is the controller that commits the put. Only the owner can confirm the put or report it
    as unknown.

    A new engine contains the puts recovered by its backing. Confirmations are not persisted, so the engine keeps
    recovered puts until their owner reports which of them it knows.

    Args:
        max_bytes: quota in bytes, or None if unlimited.
        put_ttl_seconds: how long a complete put waits for its confirmation.
        reserve_share: share of the quota that is reserved for columns of existing rows.
        storage_id: name of this storage service.
        clock: time source for deadlines and expiry.
        boot_id: instance id of the engine whose puts are recovered. By default, a new id is generated.
        backing: object that owns the blob store and preserves puts after the process ends. By default, puts are lost
            when the process ends.
        quota_of: engine whose quota and memory limit this engine shares. By default, limits are not shared.
        memory_bytes: memory limit in bytes, excluding puts that are being received or read. If the limit is exceeded,
            the least recently used puts are removed from memory. A put is removed only if it has no freed cells and the
            mirror has copies of it. A read of a removed put fetches it again. The quota still covers all puts. By
            default, all puts stay in memory.

    Attributes:
        puts: the complete puts, keyed by id.
        regions, memfds: stores for puts whose memory is shared with clients on this host.
        boot_id: instance id, which consists of 16 random bytes. Puts stored under a different instance id no longer
            exist.
        run_id: random 16-byte id of this engine.
        storage_id: name of this storage service.
        put_ttl_seconds: how long a complete put waits for its confirmation.
    """

    def __init__(
        self,
        *,
        max_bytes: int | None,
        put_ttl_seconds: float = 300.0,
        reserve_share: float = 0.10,
        storage_id: str = "storage-0",
        clock: Callable[[], float] = time.monotonic,
        boot_id: bytes | None = None,
        backing: Backing[Any] | None = None,
        quota_of: StorageEngine | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self.boot_id = os.urandom(16) if boot_id is None else boot_id
        self.run_id = os.urandom(16)
        self.storage_id = storage_id
        self.put_ttl_seconds = put_ttl_seconds
        self._clock = clock
        # Puts taken over from a lost storage service may exceed the quota. The mirror preserves them if this process
        # fails.
        self._admission: Admission = (
            Admission(
                max_bytes, reserve_share, clock, self._relieve, max_bytes if memory_bytes is None else memory_bytes
            )
            if quota_of is None
            else quota_of._admission
        )
        can_spill = memory_bytes is not None or quota_of is not None
        self._residents = Residents(clock, can_spill=can_spill)
        self._spilled_bytes = 0
        self._backing: Backing[Any] = Backing(MemoryBlobs()) if backing is None else backing
        self._backing.may_fetch = self._admission.has_memory
        self._backing.on_recovered = self._on_recovered
        self._backing.on_fetched = self._on_fetched
        self._backing.on_looked_at = self._end_deferral
        self._store = self._backing.store
        self.regions = RegionBlobs(max_bytes)
        self.memfds = MemfdBlobs()
        for store in (self._store, self.regions, self.memfds):
            store.on_freed = self._admission.release
        self.puts = PutTable(put_ttl_seconds, clock, self._backing)
        self._pending: dict[bytes, PendingPut] = {}
        self._holed: dict[bytes, None] = {}  # puts with at least one eighth of dead bytes
        self._due: dict[bytes, None] = {}  # puts to compact next
        self._move: Move | None = None  # the compaction in progress
        self._compaction: asyncio.Task[None] | None = None
        self._is_closed = False
        self._trimmed_at = clock()
        self._written_bytes = self._read_bytes = 0
        self._reconciliations: dict[bytes, Reconciliation] = {}  # by owner
        self._when_fetched: dict[bytes, list[Callable[[], None]]] = {}  # actions deferred until a put is fetched

    async def reserve(
        self,
        put_id: bytes,
        columns: Sequence[ColumnShape],
        *,
        partition_id: str,
        for_existing_rows: bool,
        deadline: float | None,
        owner: bytes = b"",
        token: str = "",
        store: BlobStore | None = None,
    ) -> PendingPut | None:
        """Reserve capacity for a put, waiting if necessary. Return None if the put is already complete.

        See `Admission` for the order in which puts are admitted.

        Args:
            put_id: id chosen by the client, which uses the same id for retries. An unfinished put with this id is
                aborted.
            columns: the put's columns, as validated by `decode_headers`.
            partition_id: partition of the put. The commit must name the same partition.
            for_existing_rows: whether the put may use the reserved share. If true, the put's commit must not create
                rows.
            deadline: when to stop waiting, on the engine's clock. None means no deadline.
            owner: controller that will commit the put.
            token: name of the producer's token, used to alternate between producers.
            store: store for the put's bytes: `regions` or `memfds`. The default is the backing's store.

        Raises:
            InvalidArgumentError: a msgpack row is empty, or the put already exists for another partition or owner.
            QuotaExceededError: the put is larger than the quota, or no capacity became available by the deadline.
                `retry_after_seconds` is set only if the call waited.
            DiskFullError: the disk is full.
            CallCancelledError: while this call was waiting, a retry of the put superseded it.
        """
        if put_id in self.puts:
            self._check_partition(put_id, partition_id)
            if (known := self.puts.owner_of(put_id)) != owner:
                raise InvalidArgumentError(
                    f"put {put_id.hex()} already belongs to controller {known.hex()}, not {owner.hex()}; put "
                    "the data under another put_id",
                    field="controller_id",
                )
            return None
        if (stale := self._pending.pop(put_id, None)) is not None:
            stale.abort()
        pending = self._pending[put_id] = PendingPut(put_id, self._finish, self._abort)
        rows = RowSet(columns[0].row_count)
        stored = StoredPut(
            {column.spec.name: StoredColumn(column.spec, rows, column.value_bytes) for column in columns},
            rows.stored_count,
            partition_id,
            for_existing_rows=for_existing_rows,
            owner=owner,
        )
        store = store or self._store
        charge = stored.charge_in(store)
        try:
            await self._admission.reserve(
                charge, producer=(token, partition_id), for_existing_rows=for_existing_rows, deadline=deadline
            )
            await self._allocate(stored, columns, store, charge)
            pending.begin(stored)
        except BaseException:
            pending.abort()
            raise
        return pending

    async def _allocate(self, stored: StoredPut, columns: Sequence[ColumnShape], store: BlobStore, charge: int) -> None:
        """Allocate the blob and tables of a new put. On failure, release the put's charge."""
        blob = None
        try:
            blob = await store.allocate(stored.blob_bytes(store))
            blob.charge = charge
            self._bound_pools()
            stored.place(blob)
            if stored.row_count < _FILLED_AT_ONCE:
                stored.fill_tables(columns)
            else:
                await in_thread(None, stored.fill_tables, columns, pinned=[blob])
            if stored.values_at and not blob.is_local:
                await store.write(blob, 0, stored.tables())
        except BaseException:
            if blob is None:
                self._admission.release(charge)
            else:
                blob.release()
            raise

    @property
    def is_volatile(self) -> bool:
        """Whether puts are lost when the storage service's process ends."""
        return self._backing.is_volatile

    def shared_store(self, *, is_own_user: bool) -> SharedStore:
        """Return the store for shared puts, which depends on whether the client runs as the service's user."""
        return self.regions if is_own_user else self.memfds

    def _bound_pools(self) -> None:
        """Release pooled regions until stored and pooled bytes together fit within the quota."""
        if (most := self._admission.max_bytes) is not None:
            pooled_bytes = self._store.pooled_bytes + self.regions.pooled_bytes
            self.regions.give_up(self._admission.used_bytes + pooled_bytes - most)

    async def flush(self, pending: PendingPut, deadline: float | None = None) -> None:
        """Wait until a put's bytes would survive a crash of this process. Call this before finishing the put.

        Args:
            pending: put whose bytes have all been written.
            deadline: time on the engine's clock at which to stop waiting for a mirror. None means no deadline.

        Raises:
            InvalidArgumentError: bytes are missing.
            CallCancelledError: a retry of this put superseded this call.
            UnavailableError: the bytes could not be written.
            QuotaExceededError: the mirror did not have the required copies by the deadline. The error sets
                `retry_after_seconds`.
        """
        await self._backing.flush(pending, deadline)
        pending.require_open()

    def confirm(self, put_id: bytes) -> bool:
        """Record that a complete put is committed and must be kept. Return whether the put exists. Idempotent."""
        if put_id not in self.puts:
            return False
        # A put that is already committed is either on its owner's list or about to be freed.
        if self.puts.state_of(put_id) is not PutState.COMMITTED:
            if (state := self._reconciliations.get(self.puts.owner_of(put_id))) is not None:
                state.staying.add(put_id)
            self.puts.confirm(put_id)
            self.puts.pack(put_id)
        self._spill()
        return True

    def complete_put(self, put_id: bytes, partition_id: str) -> StoredPut:
        """Check that a complete put can be committed to a partition, and return the put.

        Raises:
            PutNotFoundError: the put was never completed, has expired, or was freed.
            InvalidArgumentError: the put belongs to another partition.
            DataLossError: the put's bytes are damaged.
        """
        if put_id not in self.puts:
            raise PutNotFoundError(
                f"put {put_id.hex()} does not exist: it was never completed, expired without a commit, or was "
                "cleared; put the data again under another put_id",
                metadata={"put_id": put_id.hex()},
            )
        self._check_partition(put_id, partition_id)
        check_sound([put_id], self.damaged, self.storage_id)
        return self.puts[put_id]

    def receipt_time(self, put_id: bytes) -> float | None:
        """Return the timestamp for a complete put's receipt, or None if the put is committed and needs no receipt.

        Raises:
            PutNotFoundError: some of the put's cells were freed, so the put must have been committed earlier. The
                controller may have since restarted and lost track of the put.
        """
        given_at = self.puts.receipt_time(put_id)
        was_freed = put_id in self._when_fetched or not (put_id in self.damaged or self.puts[put_id].is_whole())
        if given_at is not None and was_freed:
            raise PutNotFoundError(
                f"put {put_id.hex()} was already committed, and some of its cells have since been cleared; put the "
                "data again under another put_id",
                metadata={"put_id": put_id.hex()},
            )
        return given_at

    def on_answer(self, asked: Overdue, unknown: Iterable[bytes]) -> int:
        """Drop overdue puts that a controller does not know, and return how many were dropped.

        Args:
            asked: the overdue puts about which the controller was asked, as returned by `PutTable.overdue`.
            unknown: ids of puts that are not committed and never will be. All other puts are committed or may still be
                committed.
        """
        dropped = self.puts.on_answer(asked, frozenset(unknown))
        for put_id in dropped:
            self._delete(put_id)
        return len(dropped)

    def delete_owned(self, owner: bytes) -> Iterator[int]:
        """Drop all puts of a lost owner, one slice at a time, and yield the number of puts dropped from each slice."""
        for put_ids in self.puts.slices():
            own = [put_id for put_id in put_ids if self.puts.owner_of(put_id) == owner]
            for put_id in own:
                self._delete(put_id)
            yield len(own)

    def release_all(self) -> None:
        """Free the memory of all puts, but keep their copies in the mirror. Call this after `close`."""
        for put_ids in self.puts.slices():
            for put_id in put_ids:
                put = self.puts.pop(put_id)
                self._note_replaced(put)
                put.values.release()

    def partition_of(self, put_id: bytes) -> str | None:
        """Return the partition of a complete put, or None if the put does not exist."""
        if (partition_id := self._backing.partition_of(put_id)) is not None:
            return partition_id
        put = self.puts.get(put_id)
        return None if put is None else put.partition_id

    def delete_waiting(self, put_id: bytes) -> None:
        """Drop a complete put whose commit was refused. Puts that are confirmed or do not exist are ignored."""
        if put_id in self.puts and self.puts.state_of(put_id) is PutState.WAITING:
            self._delete(put_id)

    # Reconciliation with a controller's list of known puts

    def begin_reconciliation(self, owner: bytes = b"") -> Reconciliation:
        """Start comparing an owner's stored puts with the list of puts that the owner knows.

        Any unfinished reconciliation of the same owner is abandoned. After this call, call `reconcile` for each part of
        the owner's list and finally `finish_reconciliation`. Other calls may run in between. The owner lists its puts
        after this call. Puts that are confirmed during the reconciliation are kept even if the list does not contain
        them.
        """
        state = self._reconciliations[owner] = Reconciliation(owner)
        return state

    def reconcile(
        self,
        state: Reconciliation,
        *,
        cells: Iterable[PutCells] = (),
        staying: Iterable[bytes] = (),
    ) -> None:
        """Process one part of the owner's list of known puts.

        Args:
            state: the result of `begin_reconciliation`.
            cells: known cells. Unlisted cells of the same puts are freed. The cells of each put must be listed
                consecutively.
            staying: puts to keep unchanged.

        Raises:
            CallCancelledError: another reconciliation has started.
            InvalidArgumentError: the cells of a put are not consecutive.
        """
        self._check_current(state)
        state.staying.update(staying)
        for some in cells:
            if some.put_id != state.put_id:
                self._free_others(state)
                if some.put_id in state.partial:
                    raise InvalidArgumentError(
                        f"cells of put {some.put_id.hex()} are not consecutive; list all cells of a put together",
                        field="cells",
                    )
                state.put_id = some.put_id
                if not some.is_whole:
                    state.partial.add(some.put_id)
                self._know(state, some.put_id)
            state.parts.append(some)

    def finish_reconciliation(self, state: Reconciliation) -> Iterator[None]:
        """Drop the owner's confirmed puts that were not listed. Yield between slices so that other tasks can run.

        Recovered puts that are not listed start waiting for a commit, because they may not have been committed before
        the restart.

        Raises:
            CallCancelledError: another reconciliation has started.
        """
        self._check_current(state)
        self._free_others(state)
        work = 0
        for put_ids in self.puts.slices():
            for put_id in put_ids:
                if self.puts.owner_of(put_id) != state.owner:
                    continue
                put_state = self.puts.state_of(put_id)
                if put_state is PutState.RECOVERED:
                    self.puts.wait(put_id)
                elif put_state is PutState.COMMITTED and put_id not in state.staying:
                    self._delete(put_id)
                    state.dropped_count += 1
                    work += _DROP_WORK
            work += len(put_ids)
            if work >= _MOST_WORK:
                work = 0
                yield
                self._check_current(state)
        self.end_reconciliation(state)

    def end_reconciliation(self, state: Reconciliation) -> None:
        """Discard a finished or unfinished reconciliation."""
        if self._reconciliations.get(state.owner) is state:
            del self._reconciliations[state.owner]

    def _check_current(self, state: Reconciliation) -> None:
        if self._reconciliations.get(state.owner) is not state:
            raise CallCancelledError("another reconciliation of this owner's puts has begun; this one is abandoned")

    def _know(self, state: Reconciliation, put_id: bytes) -> None:
        if put_id in state.freed:  # the listed put no longer exists; a put with this id was stored later
            return
        state.staying.add(put_id)
        if self._has(state, put_id):
            self.puts.confirm(put_id)
            if put_id not in self.damaged:
                return
        state.miss(put_id)
        if put_id not in self.puts:
            self._backing.mark_damaged(put_id, "the put does not exist")

    def _has(self, state: Reconciliation, put_id: bytes) -> bool:
        return put_id in self.puts and self.puts.owner_of(put_id) == state.owner

    def _free_others(self, state: Reconciliation) -> None:
        """Free those cells of the most recently listed put that the list does not contain."""
        put_id, parts = state.put_id, state.parts
        state.put_id, state.parts = b"", []
        if not parts or any(part.is_whole for part in parts) or not self._has(state, put_id) or put_id in self.damaged:
            return
        if put_id not in state.freed:
            self._when_here(put_id, lambda: self.free(cells_besides(put_id, self.puts[put_id], parts)))

    # Freeing

    def trim(self) -> None:
        """Return unused pooled memory to the operating system. Call this method regularly."""
        now = self._clock()
        self._spill()
        for store in (self._store, self.regions):
            store.trim(max(now - self._trimmed_at, 0.0))
        self._trimmed_at = now

    def free(self, cells: Sequence[PutCells]) -> None:
        """Free cells. Cells that do not exist are ignored."""
        for some in cells:
            if some.is_whole:
                self._note_freed(some.put_id)
            if some.put_id not in self.puts:
                if some.is_whole:
                    self._backing.clear_damage(some.put_id)
                continue
            if some.is_whole:
                self._delete(some.put_id)
                continue
            if some.put_id in self.damaged:
                continue
            self._when_here(some.put_id, partial(self._free_some, some))
        self._admission.admit()  # if puts are waiting, this also compacts puts with only a few dead cells

    def _free_some(self, cells: PutCells) -> None:
        """Free some cells of a put whose tables are in memory."""
        put_id = cells.put_id
        if not self.puts.unpack(put_id).free(cells):
            self._delete(put_id)
        elif self._move is not None and self._move.put_id == put_id:
            self._move.freed.append(cells)
        else:
            self._note_hole(put_id)

    def keep(self, put_id: bytes) -> KeptPut | None:
        """Pin a put's bytes until a recording releases them. Return None if the put is missing or damaged.

        No bytes are copied. The put's memory stays pinned, and its file is not reused for another put.
        """
        if put_id not in self.puts or put_id in self.damaged:
            return None
        put = self.puts[put_id]
        outliving = put.values.copy or put.values
        put.values.pin()
        if (file := outliving.keep_file()) is not None:
            return KeptPut(record=self._backing.record_of(put_id), file=file, blob=put.values)
        view = put.values.view()
        parts = [*put.table_views(), *(view[start : start + size] for start, size in put.value_spans() if size)]
        size_bytes = sum(map(len, parts))
        record = replace(describe_put(put_id, put), segment=0, checksum=0, size_bytes=size_bytes)
        return KeptPut(record=record, parts=parts, blob=put.values)

    @property
    def has_waiting_puts(self) -> bool:
        """Whether puts are waiting for capacity."""
        return self._admission.has_waiting

    def drain(self) -> None:
        """End all waits for capacity with an error because the service is about to stop."""
        self._admission.drain()

    async def close(self) -> None:
        """Stop the background tasks of the engine and its stores. Puts can still be dropped later."""
        self._is_closed = True
        self._give_up_move()
        if self._compaction is not None:
            await asyncio.wait([self._compaction])
        await self._backing.close()
        for store in (self._store, self.regions, self.memfds):
            await store.close()

    def open_read(self, runs: Sequence[CellRuns], put_ids: Sequence[bytes], slices: Sequence[RowSlice] = ()) -> Reading:
        """Find cells and pin them until the returned context manager (a `Reading`) is closed.

        Args:
            runs: runs of the requested cells by field, in the requested order.
            put_ids: ids of the requested puts. `runs` contains indices into `put_ids`.
            slices: requested parts of rows, for fields that are not read in full.

        Raises:
            PutNotFoundError: a put or one of its cells was freed or never existed.
            FieldNotFoundError: a put has never contained the requested field.
            InvalidArgumentError: rows are outside a put, row counts differ between fields, or a slice is invalid.
            DataLossError: the bytes of a put are damaged.
        """
        check_sound(put_ids, self.damaged, self.storage_id)
        return self._begun(open_reading(self.puts, runs, put_ids, self._on_unreadable, slices), put_ids)

    async def open_long_read(
        self, runs: Sequence[CellRuns], put_ids: Sequence[bytes], slices: Sequence[RowSlice] = ()
    ) -> Reading:
        """Like `open_read`, but locate the cells of a large read in a thread to avoid blocking the event loop."""
        if is_light_read(runs, slices):
            return self.open_read(runs, put_ids, slices)
        check_sound(put_ids, self.damaged, self.storage_id)
        reading = await open_reading_in_thread(self.puts, runs, put_ids, self._on_unreadable, slices)
        return self._begun(reading, put_ids)

    def _begun(self, reading: Reading, put_ids: Sequence[bytes]) -> Reading:
        self._residents.use(put_ids)
        self._read_bytes += sum(column.value_bytes for column in reading.headers)
        return reading

    def _on_unreadable(self, put_id: bytes, blob: Blob, error: OSError) -> TqError:
        """Handle a failure to read a put's blob, and return the error for the reader.

        The put is marked as damaged unless the failure is temporary.
        """
        if is_temporary(error):
            return UnavailableError(f"put {put_id.hex()} cannot be read now ({error}); try again")
        reason = f"its bytes cannot be read: {error}"
        put = self.puts.get(put_id)
        if put is not None and put.values is blob:
            self._backing.mark_damaged(put_id, reason)
        return lost_error([put_id], reason, self.storage_id)

    @property
    def shared_memory_count(self) -> int:
        """Number of puts in shared memory."""
        return self.regions.blob_count + self.memfds.blob_count

    def stat(self) -> EngineStat:
        """Return the engine's statistics."""
        return EngineStat(
            max_bytes=self._admission.max_bytes,
            used_bytes=self._admission.used_bytes,
            pooled_bytes=self._store.pooled_bytes + self.regions.pooled_bytes,
            put_count=len(self.puts),
            uncommitted_put_count=self.puts.uncommitted_count,
            damaged_put_count=len(self.damaged),
            written_bytes=self._written_bytes,
            read_bytes=self._read_bytes,
            mirror=self._backing.stat(self._spilled_bytes),
        )

    # Recovery and spilling

    def _on_recovered(self, puts: Mapping[bytes, RecoveredPut | PackedPut]) -> None:
        """Add puts recovered from an earlier process or a lost engine."""
        self.puts.recover(puts)
        self._admission.add(sum(put.charge for put in puts.values()))

    async def check(self, put_ids: Collection[bytes]) -> None:
        """Load recovered and spilled puts before they are read, and verify the bytes of recovered puts."""
        self._residents.use(put_ids)  # keep these puts in memory while missing puts are fetched
        await self._backing.check(put_ids)

    async def scrub(self) -> None:
        """Load and verify the bytes of all recovered puts at a limited rate."""
        await self._backing.scrub()

    def _on_fetched(self, record: PutStored, data: memoryview) -> StoredPut | None:
        """Place a fetched put in memory, except for cells that were freed during the fetch."""
        put = put_of(record)
        values = data[put.tables_bytes :]
        blob = Blob(self._store, len(values), values)
        blob.charge = put.charge_in(self._store)
        self._admission.add(blob.charge)
        put.place(blob)
        put.tables()[:] = data[: put.tables_bytes]
        unfetched = self.puts.replace(record.put_id, put)
        self._note_replaced(unfetched)
        unfetched.values.release()
        self._residents.add(record.put_id)
        self._residents.use([record.put_id])
        self._end_deferral(record.put_id)
        return self.puts.get(record.put_id)

    def _end_deferral(self, put_id: bytes) -> None:
        """Run all actions that were deferred until this put was fetched."""
        for action in self._when_fetched.pop(put_id, ()):
            if put_id in self.puts and put_id not in self.damaged:
                action()
        self._admission.admit()

    def _when_here(self, put_id: bytes, action: Callable[[], None]) -> None:
        """Run an action that needs a put's tables. If the put is not yet fetched, fetch it and run the action later."""
        if self._backing.is_unfetched(put_id):
            self._when_fetched.setdefault(put_id, []).append(action)
            self._backing.fetch_to_free(put_id)
        else:
            action()

    # Memory

    def _spill(self) -> None:
        """Remove mirrored puts from memory, least recently used first, until memory usage is below the limit."""
        excess = self._admission.to_spill()
        if not excess:
            return
        for put_id in self._residents.coldest():
            is_committed = self.puts.state_of(put_id) is PutState.COMMITTED
            if not (is_committed and self.puts[put_id].is_whole() and self._backing.spill(put_id)):
                self._residents.put_off(put_id)
                continue
            values = self.puts[put_id].values
            blob = Blob(self._store, 0)
            blob.charge = values.charge
            self._admission.add(blob.charge)  # charge the spilled put before releasing the charge of its memory
            self.puts.replace(put_id, RecoveredPut(blob, self.puts.owner_of(put_id), spilled_bytes=blob.charge))
            self._residents.remove(put_id)
            self._count_spilled(blob.charge)
            values.release()
            excess -= blob.charge
            if excess <= 0:
                return

    def _note_replaced(self, put: StoredPut | RecoveredPut) -> None:
        """Update the number of spilled bytes after a put has been removed from the table or loaded into memory."""
        if isinstance(put, RecoveredPut):
            self._count_spilled(-put.spilled_bytes)

    def _count_spilled(self, size: int) -> None:
        self._spilled_bytes += size
        self._admission.spilled_bytes += size

    @property
    def damaged(self) -> Mapping[bytes, str]:
        """Ids of damaged puts, each mapped to a reason. Puts not yet verified since startup may also be damaged."""
        return self._backing.damaged

    # Helpers

    def _finish(self, pending: PendingPut, stored: StoredPut) -> None:
        del self._pending[pending.put_id]
        stored.share_columns()
        self._backing.record(pending.put_id, stored)
        self.puts.add(pending.put_id, stored)
        self._written_bytes += stored.values.charge
        self._residents.add(pending.put_id)
        self._spill()

    def _abort(self, pending: PendingPut, stored: StoredPut | None) -> None:
        if self._pending.get(pending.put_id) is pending:
            del self._pending[pending.put_id]
        if stored is not None:
            stored.values.release()

    def _delete(self, put_id: bytes) -> None:
        self._note_freed(put_id)
        put = self.puts.pop(put_id)
        self._residents.remove(put_id)
        self._note_replaced(put)
        self._holed.pop(put_id, None)
        self._due.pop(put_id, None)
        if self._move is not None and self._move.put_id == put_id:
            self._give_up_move()
        self._when_fetched.pop(put_id, None)
        self._backing.delete(put_id, put.values)

    def _note_freed(self, put_id: bytes) -> None:
        for state in self._reconciliations.values():
            state.freed.add(put_id)

    def _check_partition(self, put_id: bytes, partition_id: str) -> None:
        own = self.partition_of(put_id)
        if own != partition_id:
            raise InvalidArgumentError(
                f"put {put_id.hex()} does not belong to partition {partition_id!r}; commit it to the partition named "
                "in its header",
                field="partition_id",
            )

    # Compaction

    def _note_hole(self, put_id: bytes) -> None:
        """Schedule a put for compaction: immediately if it is mostly dead, otherwise once other puts need capacity."""
        put = self.puts[put_id]
        if put.dead_bytes() * 8 < put.values.charge:
            return
        self._holed[put_id] = None
        if put.is_mostly_dead():
            self._due[put_id] = None
            self._start_compaction()

    def _relieve(self) -> None:
        """Compact all puts that have enough dead cells, to make room for waiting puts."""
        if not self._due:
            self._due.update(self._holed)
        self._start_compaction()

    def _start_compaction(self) -> None:
        if self._due and self._compaction is None and not self._is_closed:
            self._compaction = asyncio.get_running_loop().create_task(self._compact_all())
            self._compaction.add_done_callback(self._end_compaction)

    def _end_compaction(self, compaction: asyncio.Task[None]) -> None:
        self._compaction = None
        if not compaction.cancelled() and (error := compaction.exception()) is not None:
            _log.error(LogMessage("could not compact puts", error=error), exc_info=error)
        self._start_compaction()  # compact puts that became due after the last check

    def _give_up_move(self) -> None:
        if self._move is not None:
            self._move.is_given_up, self._move = True, None

    async def _compact_all(self) -> None:
        for number in itertools.count(1):
            if number % _LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if not self._due or self._is_closed:
                return
            put_id = next(iter(self._due))
            del self._due[put_id]
            if put_id in self._holed and self._backing.may_compact(put_id):
                put = self.puts[put_id]
                if put.is_mostly_dead() or self._admission.has_waiting:
                    del self._holed[put_id]  # if moving fails, it is retried after more cells of the put are freed
                    await self._compact(put_id, put)

    async def _compact(self, put_id: bytes, put: StoredPut) -> None:
        """Move the live cells of a put to a smaller blob if possible. The put may be read and freed concurrently.

        A thread copies the cells. Cells freed during the copy are freed immediately in the old blob, and in the new
        blob after the copy.
        """
        move = self._move = Move(put_id, put)
        old, blob = put.values, None
        old.pin()
        try:
            smaller = await in_thread(_COPIER, move.plan, pinned=[old])
            if move.is_given_up:
                return
            blob = await self._store.allocate(smaller.blob_bytes(self._store))
            blob.charge = smaller.charge_in(self._store)
            self._admission.add(blob.charge)
            smaller.place(blob)
            await in_thread(_COPIER, move.copy, smaller, pinned=[old, blob])
            await self._store.flush(blob)
            if not move.is_given_up:
                blob = None
                self.puts.replace(put_id, smaller)
                self._backing.move(put_id, old, smaller)
                for cells in move.freed:
                    smaller.free(cells)
                self._note_hole(put_id)
        except UnreadableError as error:
            _log.warning(LogMessage("could not compact a put", put_id=put_id, error=error.cause))
            self._on_unreadable(put_id, error.blob, error.cause)
        except (OSError, TqError) as error:  # such as a full disk; dead cells remain until the put is freed
            _log.debug(LogMessage("could not compact a put", put_id=put_id, error=error))
            if blob is not None:
                blob.is_damaged = True
        finally:
            old.unpin()
            if self._move is move:
                self._move = None
            if blob is not None:
                blob.release()
