"""The storage engine: takes puts under a quota, reads and frees their cells. Knows bytes and rows, nothing of gRPC.

Everything here happens on one event loop between awaits, so there are no locks; only `reserve` ever waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tq_service.errors import InvalidArgumentError, PutNotFoundError, QuotaExceededError
from tq_service.schema import FieldSpec
from tq_service.storage.admission import RETRY_AFTER_SECONDS, Admission
from tq_service.storage.cells import PutCells, ReadRuns
from tq_service.storage.compaction import compact
from tq_service.storage.confirmations import Confirmations
from tq_service.storage.durability import Durability
from tq_service.storage.engine_stat import EngineStat, Kept
from tq_service.storage.keeping import cells_besides, group_cells
from tq_service.storage.kept import KeepsPuts, KeptPut
from tq_service.storage.pending_put import PendingPut
from tq_service.storage.pool import RegionPool
from tq_service.storage.put_table import PutTable
from tq_service.storage.reading import Reading, open_reading
from tq_service.storage.region import Region
from tq_service.storage.segment_checks import check_sound
from tq_service.storage.segments import Segment, SegmentFiles
from tq_service.storage.shared_region import SharedRegion
from tq_service.storage.stored_put import StoredPut, check_put, stored_bytes, tables_size
from tq_service.v1.journal_pb2 import PutKept
from tq_service.wire.columns import ColumnShape
from tq_service.wire.shared_memory import place_columns

_KNOWN_SPECS: Final = 4096


class StorageEngine:
    """Holds puts in memory, or in files that outlive the process.

    A put is reserved, written, settled, finished, then confirmed by its commit; one that is not confirmed in time
    expires. Its cells are freed one by one or all at once, and its memory shrinks with them.

    With `files`, `recover` comes first and then `start_keeping`. That a put is confirmed is not written down: recovered
    puts stay until `keep` tells which of them are known.

    Args:
        max_bytes: quota in bytes; None: no bound.
        put_ttl_seconds: how long a complete put waits for its confirmation.
        reserve_share: share of the quota that only columns for existing rows may use.
        storage_id: name of this storage service.
        clock: what deadlines and expiry are measured with.
        boot_id: of the engine whose puts are recovered; None: a new one.
        files: where puts are kept; None: they end with the process.
        sync: whether kept means on the disk; else with the operating system.

    Attributes:
        boot_id: 16 random bytes: what another boot stored is gone.
        run_id: 16 random bytes, new for every engine.
        storage_id: name of this storage service.
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
        files: SegmentFiles | None = None,
        sync: bool = False,
    ) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise InvalidArgumentError(f"max_bytes is {max_bytes}; expected at least 1, or None", field="max_bytes")
        if not 0 <= reserve_share < 1 or put_ttl_seconds <= 0:
            raise InvalidArgumentError(
                f"reserve_share is {reserve_share}, put_ttl_seconds {put_ttl_seconds}; expected a share of 0 or more "
                "and below 1, and a time above 0"
            )
        self.boot_id = os.urandom(16) if boot_id is None else boot_id
        self.run_id = os.urandom(16)
        self.storage_id = storage_id
        self._clock = clock
        self._admission = Admission(max_bytes, reserve_share, clock, on_shortage=self._squeeze)
        self._pool = RegionPool(on_return=self._admission.release, files=files)
        self._durability = None if files is None else Durability(files, self._pool, sync=sync)
        self._puts = PutTable()
        self._confirmations = Confirmations(put_ttl_seconds, clock)
        self._pending: dict[bytes, PendingPut] = {}
        self._holed: dict[bytes, None] = {}  # puts with dead cells that still take memory
        self._specs: dict[FieldSpec, FieldSpec] = {}
        self._trimmed_at = clock()

    async def reserve(
        self,
        put_id: bytes,
        headers: Sequence[ColumnShape],
        row_count: int,
        *,
        partition_id: str,
        for_existing_rows: bool,
        deadline: float | None,
        shared: bool = False,
    ) -> PendingPut:
        """Reserve room for a put, waiting for it in order of arrival.

        Args:
            put_id: made by the client, the same over retries. An unfinished put of the same id is aborted; where one
                is complete, the result says `already_complete` and takes no bytes.
            headers: the columns.
            row_count: rows of every column.
            partition_id: the partition it is for; its commit must name the same.
            for_existing_rows: whether the put may use the reserve.
            deadline: until when to wait, by the engine's clock; None: for as long as the caller is not cancelled.
            shared: whether the bytes come as shared memory, to be adopted, instead of being written.

        Raises:
            InvalidArgumentError: headers are wrong, or the put is there for another partition.
            QuotaExceededError: larger than the quota (at once), or no room until the deadline (with
                `retry_after_seconds`).
            DiskFullError: the disk has no room.
            CallCancelledError: a retry of the same put took over while this call waited.
        """
        check_put(put_id, headers, row_count)
        if put_id in self._puts:
            self._check_partition(put_id, partition_id)
            return PendingPut.completed(put_id)
        stale = self._pending.pop(put_id, None)
        if stale is not None:
            stale.abort()
        pending = PendingPut(put_id, on_finish=self._finish, on_abort=self._abort)
        self._pending[put_id] = pending
        size = stored_bytes(headers, shared=shared)
        try:
            await self._admission.reserve(size, for_existing_rows=for_existing_rows, deadline=deadline)
        except BaseException:
            pending.abort()
            raise
        fresh = await self._make_room(pending, size, stored_bytes(headers)) if self._durability is not None else None
        if pending.is_aborted:
            self._admission.release(size)
            if fresh is not None:
                self._pool.keep(fresh)
            pending.check_open()
        region = self._take_region(pending, size, headers, fresh, shared=shared)
        self._begin(pending, region, headers, row_count, partition_id)
        return pending

    async def _make_room(self, pending: PendingPut, size: int, kept_bytes: int) -> Segment | None:
        try:
            return None if self._durability is None else await self._durability.make_room(kept_bytes)
        except BaseException:
            self._admission.release(size)
            pending.abort()
            raise

    async def settle(self, pending: PendingPut) -> None:
        """Wait until the bytes of a put are where they outlive this process, before it is finished.

        Raises:
            InvalidArgumentError: bytes are missing.
            CallCancelledError: a retry took over.
            DiskFailedError: they could not be written.
        """
        if self._durability is not None:
            await self._durability.settle(pending)
            pending.check_open()

    def confirm(self, put_id: bytes, partition_id: str) -> None:
        """Make a complete put stay. Idempotent.

        Raises:
            PutNotFoundError: it never completed, expired, or was freed.
            InvalidArgumentError: it was put for another partition.
        """
        if put_id not in self._puts:
            raise PutNotFoundError(
                f"put {put_id.hex()} is not here: never completed, expired without a commit, or cleared; put it again"
            )
        self._check_partition(put_id, partition_id)
        self._confirmations.confirm(put_id)

    def partition_of(self, put_id: bytes) -> str | None:
        """Return the partition that a complete put is for, None where it is not here."""
        put = self._puts.get(put_id)
        return None if put is None else put.partition_id

    def discard(self, put_id: bytes) -> None:
        """Drop a complete put whose commit was refused; one that is confirmed, or not here, stays as it is."""
        if self._confirmations.is_new(put_id):
            self._drop(put_id)

    def drop_confirmed(self) -> int:
        """Drop every put that was confirmed, because whoever knew of them is gone; return how many there were."""
        confirmed = set(self._puts) - self._confirmations.waiting()
        for put_id in confirmed:
            self._drop(put_id)
        return len(confirmed)

    def keep(self, cells: Sequence[PutCells]) -> Kept:
        """Learn which puts are known, and which of their cells: of confirmed puts, all else is dropped.

        Recovered puts that are not among them wait for their commit from now on, as they may have done before.
        """
        known = group_cells(cells)
        here, damaged = set(self._puts), self.damaged
        missing = [put_id for put_id in known if put_id not in here or put_id in damaged]
        if self._durability is not None:
            for put_id in missing:
                self._durability.mark_missing(put_id)
        unknown = here - known.keys() - self._confirmations.waiting()
        for put_id in unknown:
            self._drop(put_id)
        for put_id, parts in known.items():
            self._confirmations.confirm(put_id)
            if parts and put_id in here and put_id not in damaged:
                self.free(cells_besides(put_id, self._puts[put_id], parts))
        self._confirmations.begin_recovered()
        return Kept(missing_put_ids=missing, dropped_count=len(unknown))

    def expire(self) -> int:
        """Drop puts whose confirmation is overdue, and return pooled memory that was not needed; call it regularly.

        Returns:
            How many puts were dropped.
        """
        now = self._clock()
        overdue = self._confirmations.overdue(now)
        for put_id in overdue:
            self._drop(put_id)
        self._pool.trim(max(now - self._trimmed_at, 0.0))
        self._trimmed_at = now
        return len(overdue)

    def free(self, cells: Sequence[PutCells]) -> None:
        """Give cells back; those that are not here are ignored."""
        for some in cells:
            if some.put_id not in self._puts:
                if some.is_whole and self._durability is not None:
                    self._durability.forget_missing(some.put_id)
                continue
            if some.is_whole:
                self._drop(some.put_id)
                continue
            if some.put_id in self.damaged:
                continue
            put = self._puts[some.put_id]
            try:
                put.free(some.field_names, some.first_rows, some.row_counts)
            except OSError as error:  # its segment was damaged while the service was down
                self._needed_durability().mark_unreadable(some.put_id, error)
                continue
            if put.is_empty():
                self._drop(some.put_id)
                continue
            self._holed[some.put_id] = None
            if put.compacted_bytes() * 2 < put.region.size:
                self._compact(some.put_id)
        self._admission.admit()  # holes that are too small to close for themselves may serve those who wait

    def drain(self) -> None:
        """End the waits for room: the service is about to stop."""
        self._admission.drain()

    def open_read(self, runs: Sequence[ReadRuns], put_ids: Sequence[bytes]) -> Reading:
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
        return open_reading(self._pool, self._puts, runs, put_ids)

    @property
    def shared_memory_count(self) -> int:
        """Number of memfds of puts in shared memory."""
        return self._pool.shared_count

    def stat(self) -> EngineStat:
        """Return sizes and counts."""
        return EngineStat(
            max_bytes=self._admission.max_bytes,
            used_bytes=self._admission.used_bytes,
            pooled_bytes=self._pool.pooled_bytes,
            put_count=len(self._puts),
            uncommitted_put_count=self._confirmations.waiting_count,
            damaged_put_count=len(self.damaged),
        )

    # Outliving the process

    def recover(self, messages: Iterable[PutKept]) -> int:
        """Take over the puts that were written down, as they are left; return how many there are."""
        durability = self._needed_durability()
        regions = durability.recover(messages)
        self._puts.add_asleep(regions, durability.wake)
        self._confirmations.add_recovered(regions)
        self._admission.add(sum(region.size for region in regions.values()))
        return len(regions)

    def start_keeping(self, keeps: KeepsPuts) -> None:
        """Write down what becomes of puts from now on; without it, an engine with files takes none."""
        self._needed_durability().start(keeps)

    def kept_puts(self) -> Sequence[KeptPut]:
        """Return what is written down of each put, as of now."""
        return self._needed_durability().records()

    async def check(self, put_ids: Iterable[bytes]) -> None:
        """Look at the bytes of recovered puts, before they are first read."""
        if self._durability is not None:
            await self._durability.check(put_ids)

    async def scrub(self) -> None:
        """Look at the bytes of all recovered puts, slowly."""
        if self._durability is not None:
            await self._durability.scrub()

    @property
    def damaged(self) -> Mapping[bytes, str]:
        """Puts whose bytes are lost, and why; what was not looked at since the start is not known to be."""
        return {} if self._durability is None else self._durability.damaged

    def _needed_durability(self) -> Durability:
        if self._durability is None:
            raise RuntimeError("this engine has no files to keep puts in")
        return self._durability

    # Parts of the above

    def _take_region(
        self, pending: PendingPut, size: int, headers: Sequence[ColumnShape], fresh: Segment | None, *, shared: bool
    ) -> Region:
        try:
            if not shared:
                return self._pool.take(size, fresh)
            values = place_columns(headers)[1]
            return self._pool.take_shared(tables_size(headers), values, stored_bytes(headers), fresh)
        except (OSError, MemoryError) as error:
            self._admission.release(size)
            pending.abort()
            raise QuotaExceededError(
                f"the machine has no memory for {size} bytes ({error}); lower max_bytes below what it has",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            ) from error

    def _begin(
        self, pending: PendingPut, region: Region, headers: Sequence[ColumnShape], row_count: int, partition_id: str
    ) -> None:
        stored = StoredPut.of(region, headers, row_count, partition_id)
        if len(self._specs) >= _KNOWN_SPECS:
            self._specs.clear()
        for column in stored.columns.values():
            if column is not None:
                column.spec = self._specs.setdefault(column.spec, column.spec)
        is_shared = isinstance(region, SharedRegion)
        pending.begin(stored, with_checksum=isinstance(region.backing, Segment) and not is_shared)

    def _finish(self, pending: PendingPut, stored: StoredPut) -> None:
        del self._pending[pending.put_id]
        if self._durability is not None:
            self._durability.keep(pending.put_id, stored, pending.checksum)
        self._puts[pending.put_id] = stored
        self._confirmations.begin(pending.put_id)

    def _abort(self, pending: PendingPut, stored: StoredPut | None) -> None:
        if self._pending.get(pending.put_id) is pending:
            del self._pending[pending.put_id]
        if stored is not None:
            self._pool.release(stored.region)

    def _drop(self, put_id: bytes) -> None:
        region = self._puts.pop(put_id)
        self._confirmations.confirm(put_id)
        self._holed.pop(put_id, None)
        if self._durability is None:
            self._pool.release(region)
        else:
            self._durability.drop(put_id, region)

    def _compact(self, put_id: bytes) -> bool:
        """Move what is live of a put to a smaller region; return whether that is possible now."""
        put = self._puts[put_id]
        if self._durability is not None and not self._durability.may_compact(put_id):
            return False
        try:
            smaller = compact(put, self._pool)
        except OSError:  # the disk is full: what is dead of the put goes with the rest of it
            return False
        self._puts[put_id] = smaller
        self._holed.pop(put_id, None)
        self._admission.add(smaller.region.size)
        if self._durability is None:
            self._pool.release(put.region)
        else:
            self._durability.move(put_id, put.region, smaller)
        return True

    def _check_partition(self, put_id: bytes, partition_id: str) -> None:
        own = self.partition_of(put_id)
        if own != partition_id:
            raise InvalidArgumentError(
                f"put {put_id.hex()} was not put for partition {partition_id!r}; commit it to the partition that its "
                "header named",
                field="partition_id",
            )

    def _squeeze(self, wanted: int) -> None:
        """Compact puts of which an eighth or more is dead, until `wanted` bytes are gained."""
        for put_id in list(self._holed):
            put = self._puts[put_id]
            gain = put.region.size - put.compacted_bytes()
            if gain * 8 >= put.region.size > 0 and self._compact(put_id):
                wanted -= gain
            if wanted <= 0:
                return
