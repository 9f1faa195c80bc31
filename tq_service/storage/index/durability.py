"""What lets the puts of an engine outlive its process: their bytes in segments, and a record of each written down.

    bytes are written to a segment -> (copied, synced) -> record written down -> the put is complete
    the put is dropped -> that is written down -> when it cannot be lost any more: the segment is used again

A small put has its bytes in its record. Those of a put in shared memory are copied to a segment before it is complete,
and go on being read from the shared memory as long as the process lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from xxhash import xxh3_64_intdigest

from tq_service.errors import DiskFailedError, DiskFullError, UnavailableError
from tq_service.storage.blobs.pool import SMALL_BYTES, RegionPool, size_class
from tq_service.storage.blobs.region import Region
from tq_service.storage.blobs.segment_checks import SegmentChecks
from tq_service.storage.blobs.segment_threads import SegmentThreads
from tq_service.storage.blobs.segments import Segment, SegmentFiles, is_passing
from tq_service.storage.blobs.shared_region import SharedRegion
from tq_service.storage.index.pending_put import PendingPut
from tq_service.storage.index.put_records import (
    EncodedPut,
    PutDropped,
    PutLog,
    PutStored,
    describe_put,
    left_puts,
    restore_put,
)
from tq_service.storage.index.stored_put import StoredPut

_log = logging.getLogger(__name__)
_RETRY_AFTER_SECONDS: Final = 1.0


class Durability:
    """The part of an engine that keeps its puts. Confined to the engine's event loop.

    Args:
        files: the folder of segments.
        pool: the engine's.
        sync: whether kept means on the disk; else with the operating system.
    """

    def __init__(self, files: SegmentFiles, pool: RegionPool, *, sync: bool) -> None:
        self._files = files
        self._pool = pool
        self._sync = sync
        self._log: PutLog | None = None
        self._threads = SegmentThreads(pool)
        self._checks = SegmentChecks(self._threads)
        self._records: dict[bytes, EncodedPut] = {}
        self._moving: dict[bytes, asyncio.Task[None]] = {}
        self._left_behind: dict[bytes, Region] = {}  # regions of puts whose move could not be written down

    @property
    def damaged(self) -> Mapping[bytes, str]:
        """Puts whose bytes are not as they were put, and why."""
        return self._checks.damaged

    async def check(self, put_ids: Iterable[bytes]) -> None:
        """Look at the bytes of recovered puts that were not looked at yet."""
        await self._checks.check(put_ids)

    async def scrub(self) -> None:
        """Look at the bytes of all recovered puts, slowly."""
        await self._checks.scrub()

    def mark_missing(self, put_id: bytes) -> None:
        """Take note of a put that is known elsewhere, but not here."""
        if put_id not in self._checks.damaged:
            self._checks.mark_damaged(put_id, "it is not here")

    def mark_unreadable(self, put_id: bytes, error: OSError) -> None:
        """Take note of a put whose segment cannot be used, other than for the moment."""
        if is_passing(error):
            _log.warning("cells of put %s are not freed before the last of them: %s", put_id.hex(), error)
        else:
            self._checks.mark_damaged(put_id, str(error))

    def forget_missing(self, put_id: bytes) -> None:
        """Forget a put that was not here."""
        if put_id not in self._records:
            self._checks.forget(put_id)

    # Taking puts

    async def make_room(self, size: int) -> Segment | None:
        """Return a new file where a put of so many bytes needs one; None where it does not, or one is kept for reuse.

        Raises:
            DiskFullError: there is no room on the disk.
            UnavailableError: this process lacks files or memory now.
        """
        try:
            if not self._pool.needs_file(size):
                if size < SMALL_BYTES:
                    self._files.check_room(size)
                return None
            try:
                return await self._create(size_class(size))
            except OSError as error:
                unused = [] if is_passing(error) else self._pool.take_all_kept()
                if not unused:
                    raise
                await self._threads.run(_remove_all, unused)
                return await self._create(size_class(size))
        except OSError as error:
            if is_passing(error):
                raise UnavailableError(f"a put of {size} bytes cannot be kept now: {error}; try again") from error
            raise DiskFullError(
                f"a put of {size} bytes cannot be kept: {error}; clear consumed samples, or give the data folder a "
                "larger disk",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            ) from error

    async def _create(self, capacity: int) -> Segment:
        created = self._threads.run(self._files.create, capacity)
        try:
            return await asyncio.shield(created)
        except asyncio.CancelledError:
            created.add_done_callback(self._keep_unused)
            raise

    def _keep_unused(self, created: asyncio.Future[Segment]) -> None:
        if created.exception() is None:
            self._pool.keep(created.result())

    async def flush(self, pending: PendingPut) -> None:
        """Wait until the bytes of a put are where they outlive this process; see `StorageEngine.flush`."""
        stored = pending.whole()
        if stored is None:
            return
        region = stored.region
        shared = region if isinstance(region, SharedRegion) else None
        if not isinstance(region.backing, Segment) or not (shared is not None or self._sync):
            return
        spans = stored.plain_spans()
        try:
            work = self._threads.run(_bring_to_rest, region.backing, shared, spans, self._sync, pinned=region)
            checksum = await asyncio.shield(work)
        except OSError as error:
            raise DiskFailedError(f"the bytes of a put could not be written: {error}; put it again") from error
        if checksum is not None:
            pending.checksum = checksum

    def record(self, put_id: bytes, stored: StoredPut, checksum: int | None) -> None:
        """Write down that a put is complete."""
        backing = stored.region.backing
        if isinstance(backing, Segment):
            if checksum is None:
                raise RuntimeError(f"put {put_id.hex()} was finished before it was flushed")
            size = sum(size for _, size in stored.plain_spans())
            self._write(describe_put(put_id, stored, size, segment=backing.number, checksum=checksum))
        else:
            self._write_small(put_id, stored)

    def _write(self, record: PutStored, values: bytes | bytearray = b"") -> None:
        encoded = self._records[record.put_id] = self._needed_log.encode_put(record), values
        self._needed_log.append_put(*encoded)

    def _write_small(self, put_id: bytes, put: StoredPut) -> None:
        """Write down a put whose bytes follow its record."""
        region, values = put.region, put.region.memory()
        if isinstance(region, SharedRegion):
            view = region.view()
            values = b"".join(view[start : start + size] for start, size in put.plain_spans())
        self._write(describe_put(put_id, put, len(values)), values if isinstance(values, bytearray) else bytes(values))

    @property
    def _needed_log(self) -> PutLog:
        if self._log is None:
            raise RuntimeError("puts came before it was said where they are to be written down")
        return self._log

    # Giving them back

    def drop(self, put_id: bytes, region: Region) -> None:
        """Write down that a put is gone, and give its memory back once that cannot be lost any more."""
        self._records.pop(put_id, None)
        region.is_damaged = self._checks.forget(put_id)
        self._needed_log.append_put(self._needed_log.encode_put(PutDropped(put_id=put_id)))
        self._release_later(region)
        left = self._left_behind.pop(put_id, None)
        if left is not None:
            self._release_later(left)

    def may_compact(self, put_id: bytes) -> bool:
        """Whether a put may be moved now."""
        return put_id not in self._moving and put_id not in self._left_behind and self._checks.is_sound(put_id)

    def move(self, put_id: bytes, old: Region, moved: StoredPut) -> None:
        """Write down a put that was compacted, and give its old region back once that cannot be lost any more."""
        backing = moved.region.backing
        if not isinstance(backing, Segment):
            self._write_small(put_id, moved)
            self._release_later(old)
            return
        record = describe_put(put_id, moved, moved.region.size, segment=backing.number)
        checksum = self._threads.run(_checksum_and_sync, moved.region, backing, self._sync, pinned=moved.region)
        finish = self._finish_move(record, self._records[put_id], old, checksum)
        task = self._moving[put_id] = asyncio.get_running_loop().create_task(finish)
        task.add_done_callback(self._fail_if_broken)

    def _fail_if_broken(self, moving: asyncio.Task[None]) -> None:
        if not moving.cancelled() and (error := moving.exception()) is not None:
            self._needed_log.fatal("a put was moved and could not be written down", error)

    async def _finish_move(
        self, record: PutStored, before: EncodedPut, old: Region, checksum: asyncio.Future[int]
    ) -> None:
        put_id = record.put_id
        try:
            record = replace(record, checksum=await checksum)
        except OSError as error:
            _log.error("put %s cannot be moved to a smaller segment: %s", put_id.hex(), error)
            if put_id in self._records:
                self._left_behind[put_id] = old  # it is what a restart would find
                return
        finally:
            self._moving.pop(put_id, None)
        if self._records.get(put_id) is before:  # else it was dropped meanwhile
            self._write(record)
        self._release_later(old)

    def _release_later(self, region: Region) -> None:
        self._needed_log.after_durable(partial(self._pool.release, region))

    def records(self) -> Sequence[EncodedPut]:
        """Return what is written down of each put now."""
        return list(self._records.values())

    # After a restart

    def recover(self, records: Iterable[bytes], log: PutLog) -> dict[bytes, Region]:
        """Find the bytes of puts that were written down, and write down what becomes of puts from now on.

        A put whose segment is missing is damaged. What is in the segments is not looked at yet; those that no put has
        are kept for reuse.

        Returns:
            The region of each put.
        """
        self._log = log
        found = self._files.found()
        regions = {}
        left = left_puts(records, log.decode_put)
        self._records = {put_id: encoded for put_id, (_, encoded) in left.items()}
        # Newest first: where the end of a put was lost with a part of the journal, its segment may have the bytes of a
        # later one.
        for put_id, (record, (_, values)) in reversed(left.items()):
            number, size = record.segment, record.size_bytes
            if not number:
                regions[put_id] = Region(values, len(values))
            elif number in found:
                found.discard(number)
                regions[put_id] = region = self._pool.take_kept(size, self._files.take(number, size_class(size)))
                self._checks.expect(put_id, region, record.checksum)
            else:
                self._files.number_after(number)
                self._checks.mark_damaged(put_id, f"segment {number} is missing")
                regions[put_id] = Region(b"", size)
        for number in found:
            segment = self._files.take(number)
            if segment.capacity:
                self._pool.keep(segment)
            else:  # the process ended before it was made as large as it was to be
                self._files.drop(segment)
        return regions

    def wake(self, put_id: bytes, region: Region) -> StoredPut:
        """Return a recovered put."""
        record, _ = self._needed_log.decode_put(self._records[put_id][0])
        if not isinstance(record, PutStored):
            raise TypeError(f"put {put_id.hex()} was written down as {type(record).__name__}")
        return restore_put(record, region)


def _bring_to_rest(
    segment: Segment, shared: SharedRegion | None, spans: Sequence[tuple[int, int]], sync: bool
) -> int | None:
    """Copy spans of shared memory to a segment, where there is any, and wait for the disk; return their checksum."""
    checksum = None if shared is None else segment.fill(spans, shared.read_into)
    if sync:
        segment.sync()
    return checksum


def _checksum_and_sync(region: Region, segment: Segment, sync: bool) -> int:
    checksum = xxh3_64_intdigest(region.view())
    if sync:
        segment.sync()
    return checksum


def _remove_all(segments: Iterable[Segment]) -> None:
    for segment in segments:
        segment.remove()
