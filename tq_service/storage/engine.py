"""The storage engine: takes puts under a quota, reads and frees their cells. Knows bytes and rows, nothing of gRPC.

It ties the two floors: the index (which puts there are, their rows, the quota, what was confirmed) and the store of
blobs beneath, which has the bytes. Everything here happens on one event loop between awaits, so there are no locks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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
from tq_service.wire.columns import ColumnShape
from tq_service.wire.metadata import CellRuns

_log = logging.getLogger(__name__)
_MOST_WORK: Final = 4096  # puts that are looked at before others have their turn; some milliseconds
_LOOKED_AT_ONCE: Final = 256  # puts with dead cells, before others have their turn
_DROP_WORK: Final = 8  # what to drop one costs, in puts looked at
_FILLED_AT_ONCE: Final = 1 << 15  # rows whose tables the loop makes; a thread those of more
# One at a time: the copies that there are beside the quota are those of one put.
_COPIER: Final = ThreadPoolExecutor(1, thread_name_prefix="tq-compact")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStat:
    """Sizes and counts of an engine.

    Attributes:
        max_bytes: the quota; None: no bound.
        used_bytes: bytes stored and reserved: values, and the extents of jagged and object rows.
        pooled_bytes: bytes of memory held for reuse, besides `used_bytes`.
        put_count: complete puts held.
        uncommitted_put_count: those of them that are not confirmed yet.
        damaged_put_count: those whose bytes are lost, as far as that is known.
        written_bytes: bytes of all puts that were completed since the start.
        read_bytes: bytes of all reads that were begun since the start.
        mirror: how its mirror is; None: it has none.
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


class StorageEngine:
    """Holds puts: knows which there are, and has their bytes in the store of its backing.

    A put is reserved, written, flushed, finished, then confirmed by its commit; one that is not confirmed in time
    expires. Its cells are freed one by one or all at once, and its memory shrinks with them.

    Each put has an owner, the controller that commits it: only that confirms it, and says that it is not known.

    Puts that its backing recovers come first. That a put is confirmed is not written down: recovered puts stay until
    their owner says which of them are known.

    Args:
        max_bytes: quota in bytes; None: no bound.
        put_ttl_seconds: how long a complete put waits for its confirmation.
        reserve_share: share of the quota that only columns for existing rows may use.
        storage_id: name of this storage service.
        clock: what deadlines and expiry are measured with.
        boot_id: of the engine whose puts are recovered; None: a new one.
        backing: has the store of its blobs, and keeps puts beyond the process; None: memory of this process alone.
        quota_of: the engine whose quota and memory it shares; None: it has its own.
        memory_bytes: most bytes in memory, but for those that come and are read at this moment: puts of which nothing
            was freed leave it, those used longest ago first, once the mirror has their copies, and are fetched when
            they are read. The quota is about all puts. None: all stay in memory.

    Attributes:
        puts: the complete ones.
        regions, memfds: stores of puts in memory shared with clients of this host.
        boot_id: 16 random bytes: what another boot stored is gone.
        run_id: 16 random bytes, new for every engine.
        storage_id: name of this storage service.
        put_ttl_seconds: as above.
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
        # What is taken over may exceed the quota, and is in the mirror whatever becomes of this process.
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
        self._holed: dict[bytes, None] = {}  # puts that are dead by an eighth or more
        self._due: dict[bytes, None] = {}  # those of them that are to be compacted next
        self._move: Move | None = None  # of the put that is being compacted
        self._compaction: asyncio.Task[None] | None = None
        self._is_closed = False
        self._trimmed_at = clock()
        self._written_bytes = self._read_bytes = 0
        self._reconciliations: dict[bytes, Reconciliation] = {}  # by owner
        self._when_fetched: dict[bytes, list[Callable[[], None]]] = {}  # what waits for a put that is unfetched

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
        """Reserve capacity for a put, waiting for it, see `Admission`; return None where it is complete already.

        Args:
            put_id: made by the client, the same over retries. An unfinished put of the same id is aborted.
            columns: what it has, checked as `decode_headers` does.
            partition_id: the partition it is for; its commit must name the same.
            for_existing_rows: whether the put may use the reserve; no new rows may be made of it.
            deadline: until when to wait, by the engine's clock; None: for as long as the caller is not cancelled.
            owner: the controller that is to commit it.
            token: the name of the producer's, which takes turns with others.
            store: where its bytes go, `regions` or `memfds`; None: the store of its backing.

        Raises:
            InvalidArgumentError: a row of msgpack is empty, or the put is there for another partition or of another
                owner.
            QuotaExceededError: larger than the quota (at once), or no capacity until the deadline (with
                `retry_after_seconds`).
            DiskFullError: the disk is full.
            CallCancelledError: a retry of the same put took over while this call waited.
        """
        if put_id in self.puts:
            self._check_partition(put_id, partition_id)
            if (known := self.puts.owner_of(put_id)) != owner:
                raise InvalidArgumentError(
                    f"put {put_id.hex()} is here for controller {known.hex()}, not {owner.hex()}; put "
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
        """Give a put that is to be written its blob, with its tables; the charge is counted, or given back."""
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
        """Whether nothing keeps its puts beyond this process."""
        return self._backing.is_volatile

    def shared_store(self, *, is_own_user: bool) -> SharedStore:
        """Return the store of puts in memory shared with a client of this process's user, or of another."""
        return self.regions if is_own_user else self.memfds

    def _bound_pools(self) -> None:
        """Keep what is stored and what is held for reuse within the quota, whichever store had it before."""
        if (most := self._admission.max_bytes) is not None:
            pooled_bytes = self._store.pooled_bytes + self.regions.pooled_bytes
            self.regions.give_up(self._admission.used_bytes + pooled_bytes - most)

    async def flush(self, pending: PendingPut, deadline: float | None = None) -> None:
        """Wait until the bytes of a put are where they outlive this process, before it is finished.

        Args:
            pending: all of it is written.
            deadline: until when a mirror is waited for, by the engine's clock; None: for as long as the caller is not
                cancelled.

        Raises:
            InvalidArgumentError: bytes are missing.
            CallCancelledError: a retry took over.
            UnavailableError: they could not be written.
            QuotaExceededError: the mirror has not the copies required until the deadline (with `retry_after_seconds`).
        """
        await self._backing.flush(pending, deadline)
        pending.require_open()

    def confirm(self, put_id: bytes) -> bool:
        """Make a complete put stay: its commit is made. Idempotent; return whether it is here."""
        if put_id not in self.puts:
            return False
        if self.puts.state_of(put_id) is not PutState.COMMITTED:  # else it is listed, unless it is about to go
            if (state := self._reconciliations.get(self.puts.owner_of(put_id))) is not None:
                state.staying.add(put_id)
            self.puts.confirm(put_id)
            self.puts.pack(put_id)
        self._spill()
        return True

    def complete_put(self, put_id: bytes, partition_id: str) -> StoredPut:
        """Return a put that can be committed to a partition.

        Raises:
            PutNotFoundError: it never completed, expired, or was freed.
            InvalidArgumentError: it was put for another partition.
            DataLossError: its bytes are damaged.
        """
        if put_id not in self.puts:
            raise PutNotFoundError(
                f"put {put_id.hex()} is not here: never completed, expired without a commit, or cleared; put the data "
                "again under another put_id",
                metadata={"put_id": put_id.hex()},
            )
        self._check_partition(put_id, partition_id)
        check_sound([put_id], self.damaged, self.storage_id)
        return self.puts[put_id]

    def receipt_time(self, put_id: bytes) -> float | None:
        """Return the time for the receipt of a complete put, None where it needs none: it is committed.

        Raises:
            PutNotFoundError: some of its cells were freed, so that it was committed before, maybe with a controller
                that has restarted since and knows nothing of it.
        """
        given_at = self.puts.receipt_time(put_id)
        was_freed = put_id in self._when_fetched or not (put_id in self.damaged or self.puts[put_id].is_whole())
        if given_at is not None and was_freed:
            raise PutNotFoundError(
                f"put {put_id.hex()} was committed before, and some of its cells were cleared since; put the data "
                "again under another put_id",
                metadata={"put_id": put_id.hex()},
            )
        return given_at

    def on_answer(self, asked: Overdue, unknown: Iterable[bytes]) -> int:
        """Drop overdue puts that a controller does not know, and return how many these are.

        Args:
            asked: what `PutTable.overdue` returned before it was asked.
            unknown: those of them that are neither committed nor can be any more; all others are, or may be.
        """
        dropped = self.puts.on_answer(asked, frozenset(unknown))
        for put_id in dropped:
            self._delete(put_id)
        return len(dropped)

    def delete_owned(self, owner: bytes) -> Iterator[int]:
        """Drop all puts of an owner that is gone, in slices, of each of which the size is yielded."""
        for put_ids in self.puts.slices():
            own = [put_id for put_id in put_ids if self.puts.owner_of(put_id) == owner]
            for put_id in own:
                self._delete(put_id)
            yield len(own)

    def release_all(self) -> None:
        """Free the memory of all puts, and leave what the mirror has of them; call it after `close`."""
        for put_ids in self.puts.slices():
            for put_id in put_ids:
                put = self.puts.pop(put_id)
                self._note_replaced(put)
                put.values.release()

    def partition_of(self, put_id: bytes) -> str | None:
        """Return the partition that a complete put is for, None where it is not here."""
        if (partition_id := self._backing.partition_of(put_id)) is not None:
            return partition_id
        put = self.puts.get(put_id)
        return None if put is None else put.partition_id

    def delete_waiting(self, put_id: bytes) -> None:
        """Drop a complete put whose commit was refused; one that is confirmed, or not here, stays as it is."""
        if put_id in self.puts and self.puts.state_of(put_id) is PutState.WAITING:
            self._delete(put_id)

    # Learning which puts are known

    def begin_reconciliation(self, owner: bytes = b"") -> Reconciliation:
        """Begin to learn which puts of an owner are known; one that has not come to its end is given up.

        `reconcile` follows, piece by piece, and then `finish_reconciliation`, while other calls go on. The owner looks
        at what it knows after this call: puts that are confirmed from now on stay, listed or not.
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
        """Learn of some puts that are known.

        Args:
            state: what `begin_reconciliation` returned.
            cells: known cells; all else of their puts is freed. Those of one put follow each other.
            staying: puts that stay as they are.

        Raises:
            CallCancelledError: another one has begun.
            InvalidArgumentError: cells of a put came apart from each other.
        """
        self._check_current(state)
        state.staying.update(staying)
        for some in cells:
            if some.put_id != state.put_id:
                self._free_others(state)
                if some.put_id in state.partial:
                    raise InvalidArgumentError(
                        f"cells of put {some.put_id.hex()} came apart from each other; list those of a put in a row",
                        field="cells",
                    )
                state.put_id = some.put_id
                if not some.is_whole:
                    state.partial.add(some.put_id)
                self._know(state, some.put_id)
            state.parts.append(some)

    def finish_reconciliation(self, state: Reconciliation) -> Iterator[None]:
        """Drop what is confirmed and not known of the owner's puts, in slices: others have a turn at each yield.

        Recovered puts that are not known wait for their commit from now on, as they may have done before.

        Raises:
            CallCancelledError: another one has begun.
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
        """Forget what was said of known puts, whether or not it came to its end."""
        if self._reconciliations.get(state.owner) is state:
            del self._reconciliations[state.owner]

    def _check_current(self, state: Reconciliation) -> None:
        if self._reconciliations.get(state.owner) is not state:
            raise CallCancelledError("it is being said again which puts are known; what was said before is given up")

    def _know(self, state: Reconciliation, put_id: bytes) -> None:
        if put_id in state.freed:  # what is listed is gone; a put of this id that is here was stored again
            return
        state.staying.add(put_id)
        if self._has(state, put_id):
            self.puts.confirm(put_id)
            if put_id not in self.damaged:
                return
        state.miss(put_id)
        if put_id not in self.puts:
            self._backing.mark_damaged(put_id, "it is not here")

    def _has(self, state: Reconciliation, put_id: bytes) -> bool:
        return put_id in self.puts and self.puts.owner_of(put_id) == state.owner

    def _free_others(self, state: Reconciliation) -> None:
        """Free all cells of the put listed last but those that were listed."""
        put_id, parts = state.put_id, state.parts
        state.put_id, state.parts = b"", []
        if not parts or any(part.is_whole for part in parts) or not self._has(state, put_id) or put_id in self.damaged:
            return
        if put_id not in state.freed:
            self._when_here(put_id, lambda: self.free(cells_besides(put_id, self.puts[put_id], parts)))

    # Giving back

    def trim(self) -> None:
        """Return pooled memory that was not needed; call it regularly."""
        now = self._clock()
        self._spill()
        for store in (self._store, self.regions):
            store.trim(max(now - self._trimmed_at, 0.0))
        self._trimmed_at = now

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back; those that are not here are ignored."""
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
        self._admission.admit()  # holes that are too small to close for themselves may serve puts that wait

    def _free_some(self, cells: PutCells) -> None:
        """Free some cells of a put whose tables are here."""
        put_id = cells.put_id
        if not self.puts.unpack(put_id).free(cells):
            self._delete(put_id)
        elif self._move is not None and self._move.put_id == put_id:
            self._move.freed.append(cells)
        else:
            self._note_hole(put_id)

    @property
    def has_waiting_puts(self) -> bool:
        """Whether puts wait for capacity."""
        return self._admission.has_waiting

    def drain(self) -> None:
        """End the waits for capacity: the service is about to stop."""
        self._admission.drain()

    async def close(self) -> None:
        """End what it and its stores have in the background; puts may still be dropped."""
        self._is_closed = True
        self._give_up_move()
        if self._compaction is not None:
            await asyncio.wait([self._compaction])
        await self._backing.close()
        for store in (self._store, self.regions, self.memfds):
            await store.close()

    def open_read(self, runs: Sequence[CellRuns], put_ids: Sequence[bytes]) -> Reading:
        """Find cells and keep them as they are until the result is closed; use it in a `with`.

        Args:
            runs: the cells, field by field in the order wanted.
            put_ids: the puts that `runs` index.

        Raises:
            PutNotFoundError: a put, or a cell of it, was freed or never there.
            FieldNotFoundError: a put never had the field.
            InvalidArgumentError: rows outside a put, or row counts that differ between fields.
            DataLossError: the bytes of a put are damaged.
        """
        check_sound(put_ids, self.damaged, self.storage_id)
        return self._begun(open_reading(self.puts, runs, put_ids, self._on_unreadable), put_ids)

    async def open_long_read(self, runs: Sequence[CellRuns], put_ids: Sequence[bytes]) -> Reading:
        """Do the same, with turns for others where the cells are many."""
        if is_light_read(runs):
            return self.open_read(runs, put_ids)
        check_sound(put_ids, self.damaged, self.storage_id)
        reading = await open_reading_in_thread(self.puts, runs, put_ids, self._on_unreadable)
        return self._begun(reading, put_ids)

    def _begun(self, reading: Reading, put_ids: Sequence[bytes]) -> Reading:
        self._residents.use(put_ids)
        self._read_bytes += sum(column.value_bytes for column in reading.headers)
        return reading

    def _on_unreadable(self, put_id: bytes, blob: Blob, error: OSError) -> TqError:
        """Take note that the blob of a put cannot be read, and return the error of the read."""
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
        """Return sizes and counts."""
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

    # Outliving the process

    def _on_recovered(self, puts: Mapping[bytes, RecoveredPut | PackedPut]) -> None:
        """Take over puts of an earlier process, or of an engine that is gone."""
        self.puts.recover(puts)
        self._admission.add(sum(put.charge for put in puts.values()))

    async def check(self, put_ids: Collection[bytes]) -> None:
        """Have the bytes of recovered and spilled puts here, and look at those of the first, before they are read."""
        self._residents.use(put_ids)  # those that are here stay, while the others are fetched
        await self._backing.check(put_ids)

    async def scrub(self) -> None:
        """Have the bytes of all recovered puts here, and look at them, slowly."""
        await self._backing.scrub()

    def _on_fetched(self, record: PutStored, data: memoryview) -> StoredPut | None:
        """Have a put that was unfetched in memory, without the cells that were freed meanwhile."""
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
        """Do what waited for the bytes of a put."""
        for action in self._when_fetched.pop(put_id, ()):
            if put_id in self.puts and put_id not in self.damaged:
                action()
        self._admission.admit()

    def _when_here(self, put_id: bytes, action: Callable[[], None]) -> None:
        """Do something with the tables of a put, once it is fetched."""
        if self._backing.is_unfetched(put_id):
            self._when_fetched.setdefault(put_id, []).append(action)
            self._backing.fetch_to_free(put_id)
        else:
            action()

    # Memory

    def _spill(self) -> None:
        """Have puts leave memory that the mirror has, those used longest ago first, as far as there are too many."""
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
            self._admission.add(blob.charge)  # before those of the memory are given back: the quota is about all puts
            self.puts.replace(put_id, RecoveredPut(blob, self.puts.owner_of(put_id), spilled_bytes=blob.charge))
            self._residents.remove(put_id)
            self._count_spilled(blob.charge)
            values.release()
            excess -= blob.charge
            if excess <= 0:
                return

    def _note_replaced(self, put: StoredPut | RecoveredPut) -> None:
        """Take note that a put is gone, or in memory again."""
        if isinstance(put, RecoveredPut):
            self._count_spilled(-put.spilled_bytes)

    def _count_spilled(self, size: int) -> None:
        self._spilled_bytes += size
        self._admission.spilled_bytes += size

    @property
    def damaged(self) -> Mapping[bytes, str]:
        """Puts whose bytes are lost, and why; what was not looked at since the start is not known to be."""
        return self._backing.damaged

    # Parts of the above

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
                f"put {put_id.hex()} was not put for partition {partition_id!r}; commit it to the partition that its "
                "header named",
                field="partition_id",
            )

    # Compaction

    def _note_hole(self, put_id: bytes) -> None:
        """Have a put with dead cells compacted once more than half of it is dead, or puts wait for capacity."""
        put = self.puts[put_id]
        if put.dead_bytes() * 8 < put.values.charge:
            return
        self._holed[put_id] = None
        if put.is_mostly_dead():
            self._due[put_id] = None
            self._start_compaction()

    def _relieve(self) -> None:
        """Compact all puts with dead cells that are worth it, for as long as puts wait for capacity."""
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
            _log.error(LogMessage("the compaction of puts failed", error=error), exc_info=error)
        self._start_compaction()  # of what came after its last look

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
                    del self._holed[put_id]  # one that cannot be moved is tried again once more of it is dead
                    await self._compact(put_id, put)

    async def _compact(self, put_id: bytes, put: StoredPut) -> None:
        """Move the live cells of a put to a smaller blob, where that is possible, while it is read and freed.

        A thread copies. Cells freed during the copy are freed in the old blob at once, and in the new one at the end.
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
        except (OSError, TqError) as error:  # such as a full disk: its dead cells go with the rest
            _log.debug(LogMessage("could not compact a put", put_id=put_id, error=error))
            if blob is not None:
                blob.is_damaged = True
        finally:
            old.unpin()
            if self._move is move:
                self._move = None
            if blob is not None:
                blob.release()
