"""The log of a service on the disk of its host: what it did, so that a start can do it again.

Segments follow each other (see `segment`). A new one is begun by each start, when one is long, and for each snapshot:
the snapshot has the number that `rotate` returned, and what follows it is read from that number on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

from tq_service.durable.files import free_bytes, sync_path
from tq_service.durable.log.log import Record, Stream
from tq_service.durable.log.reader import LogReader
from tq_service.durable.log.segment import FoundSegment, Parts, SegmentWriter, segment_numbers, segment_path
from tq_service.errors import DiskFailedError, DiskFullError, PreconditionError, TqError
from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)
_SEGMENT_BYTES: Final = 32 * 2**20
_FRAME_BYTES: Final = 8 * 2**20
_LOOK_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 1.0
RESERVE_BYTES: Final = 4 * 2**20

T = TypeVar("T")


class SegmentLog:
    """A `Log` in files of one directory, both streams in the same ones.

    Without `sync`, what is durable is with the operating system, and survives any end of any process; a loss of power
    may take the last records, never one before a record that it leaves. The event loop writes it, once for all that one
    of its steps appended, since handing that to a thread takes longer. With `sync`, it is on the disk: a thread writes
    and syncs, all together that came during its last sync.

    What one step of the loop appends is one frame, or a part of one: a change without the answer that its retry is to
    get would be applied again. Nothing is written before somebody asks for it to be durable; what cannot be written
    stays in memory, in order, and is tried again when somebody asks again.
    """

    def __init__(self, directory: Path, *, sync: bool, accept_loss: bool = False) -> None:
        """Open the log of a directory that no other process has open; it takes records once `read` is exhausted.

        Args:
            directory: where its files are; there.
            sync: whether durable means on the disk.
            accept_loss: whether `read` goes on without what follows a damaged record, instead of raising.
        """
        self._directory = directory
        self._sync = sync
        self._reader = LogReader(directory, accept_loss=accept_loss)
        self._reserve = EmergencyDiskReserve(directory / "reserve")
        self._reserve.fill()
        self._look_at = 0.0
        self._appended = self._durable = 0
        self._group: list[Parts] = []  # appended in this step of the loop
        self._group_bytes = 0
        self._segment_bytes = 0  # of groups since the last rotation
        self._waiting = DurabilityWaiters()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._abandoned: TqError | None = None
        # The loop adds groups to the queue, and an empty one where the next segment begins. The committer, the loop or
        # with `sync` the worker, takes them, and alone uses the segment and the number of what it has committed.
        self._queue: deque[tuple[list[Parts], int]] = deque()  # each with its bytes
        self._committing: Future[None] | None = None
        self._segment: SegmentWriter | None = None
        self._committed = 0
        self._failure: DiskFailedError | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tq-log")

    # Reading

    def read(self, number: int) -> Iterator[Record]:
        """Yield all since a snapshot; see `Log.read`.

        Raises:
            JournalDamagedError: a record that had been written is damaged or missing.
            DiskFullError: there is no space for a segment.
        """
        if self._segment is None:
            yield from self._reader.records(number)
            self._start()

    async def follow(self, stream: Stream, number: int) -> AsyncIterator[Record]:
        """Yield durable records of a stream, and wait for more; see `Log.follow`."""
        try:
            before = [each for each in segment_numbers(self._directory) if each <= number]
            segment = FoundSegment(self._directory, max(before, default=number))
            while True:
                until = self._durable
                for record in await asyncio.to_thread(list, segment.records(until)):
                    if record.stream is stream and record.number >= number:
                        yield record
                if segment.is_closed:
                    segment = FoundSegment(self._directory, segment.last_number + 1)
                    continue
                while self._durable == until:
                    with contextlib.suppress(DiskFullError):  # there may be space later
                        await self._commit_of(until + 1)
        except FileNotFoundError as error:
            raise PreconditionError(
                f"what follows record {number} was given up for a snapshot that holds it ({error}); begin with that one"
            ) from error

    def _start(self) -> None:
        """Begin a segment, and end the one before; both are on the disk then, with `sync` as all that was read."""
        number, found = self._reader.last_number + 1, self._reader.last_segment
        before: SegmentWriter | None = None
        try:
            for each in segment_numbers(self._directory) if self._sync else ():  # a run without may have written them
                sync_path(segment_path(self._directory, each))
            if found is not None:
                before = SegmentWriter.reopen(found.path, found.end)
            self._segment = self._with_reserve(lambda: self._create(number, before, sync=True))
        except OSError as error:
            raise self._write_error(error, segment_path(self._directory, number)) from error
        finally:
            if before is not None:
                self._close_segment(before)
        self._appended = self._durable = self._committed = number

    # Appending

    @property
    def has_unflushed(self) -> bool:
        """Whether something was appended that is not durable yet, or never will be."""
        return self._durable != self._appended or self._abandoned is not None

    @property
    def unflushed_count(self) -> int:
        """Number of records that were appended and are not durable yet."""
        return self._appended - self._durable

    def append(self, stream: Stream, *parts: bytes | bytearray) -> int:
        """Add a record, which becomes durable together with all that is added in the same step of the loop.

        Returns:
            Its number.

        Raises:
            RuntimeError: what is there was not read, or the log is closed.
            TqError: the log was abandoned.
        """
        self._check_open()
        if self._segment_bytes >= _SEGMENT_BYTES and not self._group:
            self.rotate()
        self._group.append((stream, parts))
        self._group_bytes += sum(map(len, parts))
        self._appended += 1
        return self._appended

    def rotate(self) -> int:
        """Go on in a new segment, and return its number; see `Log.rotate`."""
        self._check_open()
        self._end_group()
        self._segment_bytes = 0
        self._appended += 1
        self._queue.append(([], 0))  # as an empty frame is the end of a segment
        return self._appended

    def sync_rotated(self, number: int) -> None:
        """Return when a segment that was begun survives a loss of power."""
        sync_path(segment_path(self._directory, number))
        sync_path(self._directory)

    def truncate_before(self, number: int) -> None:
        """Remove the segments that have nothing from a number on."""
        for each, following in pairwise(segment_numbers(self._directory)):
            if following <= number:
                segment_path(self._directory, each).unlink()

    def abandon(self, error: TqError) -> None:
        """Write nothing more; see `Log.abandon`. Groups that were to be written before are whole, and may still be."""
        if self._abandoned is None:
            self._abandoned = error
            self._group.clear()
            self._waiting.drop_callbacks()
            self._settle(error)

    def close(self) -> None:
        """Make durable what was appended, and end the thread; see `Log.close`."""
        try:
            if self._segment is not None and self.has_unflushed and self._abandoned is None:
                self.flush()
        finally:
            self._worker.shutdown()
            segment, self._segment = self._segment, None
            if segment is not None:
                self._close_segment(segment)

    def _check_open(self) -> SegmentWriter:
        if self._abandoned is not None:
            raise self._abandoned
        if self._segment is None:
            raise RuntimeError("the journal takes no records: exhaust read() first, and append before close()")
        return self._segment

    def _end_group(self) -> None:
        if self._group:
            self._queue.append((self._group, self._group_bytes))
            self._segment_bytes += self._group_bytes
            self._group, self._group_bytes = [], 0

    # Waiting

    @property
    def is_disk_low(self) -> bool:
        """Whether the disk has been full, and has hardly any space still: what adds to the state had better be refused.

        There is space for some more records then, so that what frees space can be written down.
        """
        if self._reserve.is_there:
            return False
        if time.monotonic() >= self._look_at and self._segment is not None:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._worker.submit(self._reserve.fill)
        return True

    async def wait_durable(self, number: int | None = None) -> None:
        """Return once a record is durable, and all before it.

        Args:
            number: of the record; None: of the last that was appended.

        Raises:
            DiskFullError: there is no space; all stays as it is, and the next call tries again.
            DiskFailedError: the disk fails.
            TqError: the log was abandoned.
        """
        number = self._appended if number is None else number
        if self._durable < number or self._abandoned is not None:
            self._loop = asyncio.get_running_loop()  # before the worker has something to notify it of
            if self._commit_soon() is not None:
                await self._commit_of(number)

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call something once all that was appended before is durable; see `Log.after_durable`."""
        if not self.has_unflushed:
            callback()
        elif self._abandoned is None:
            self._waiting.add_callback(self._appended, callback)

    def flush(self) -> None:
        """Return once all that was appended is durable; with `sync`, that blocks.

        Raises:
            DiskFullError, DiskFailedError, TqError: see `wait_durable`.
        """
        committing = self._commit_soon()
        if committing is not None:
            try:
                committing.result()
            finally:
                self._settle()

    async def _commit_of(self, number: int) -> None:
        """Return once a record that is not durable yet is so, or raise why the next commit failed."""
        if self._abandoned is not None:
            raise self._abandoned
        await self._waiting.future(number)

    def _settle(self, error: BaseException | None = None) -> None:
        """Notify the waiters, on the loop, of what was committed, or why nothing was."""
        self._durable = self._committed
        self._waiting.settle(self._durable, error)

    # Committing: on the loop, or with `sync` on the worker

    def _commit_soon(self) -> Future[None] | None:
        """Commit all that was appended; with `sync` the worker does so, and the future is done when it has."""
        self._check_open()
        self._end_group()
        if not self._sync:
            self._commit_queue()
            return None
        job = self._committing
        if job is None or job.running() or job.done():  # else it has not looked into the queue yet
            job = self._committing = self._worker.submit(self._commit_queue)
        return job

    def _commit_queue(self) -> None:
        while self._queue:
            taken = self._take_groups()
            try:
                self._commit_next(taken[0])
            except BaseException as error:
                self._queue.appendleft(taken)  # in its place, to be tried again
                self._notify(error)
                raise
            self._committed += len(taken[0]) or 1
            self._notify()

    def _notify(self, error: BaseException | None = None) -> None:
        if not self._sync:
            self._settle(error)
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, error)

    def _take_groups(self) -> tuple[list[Parts], int]:
        """Take the groups that are to be one frame, as one, or the empty one that begins a segment."""
        records, size = self._queue.popleft()
        while records and size < _FRAME_BYTES and self._queue and self._queue[0][0]:
            group, group_bytes = self._queue.popleft()
            records += group
            size += group_bytes
        return records, size

    def _commit_next(self, records: list[Parts]) -> None:
        """Write a frame, or for none enter the next segment."""
        if self._failure is not None:
            raise self._failure
        segment, number = self._check_open(), self._committed + 1
        try:
            if records:
                self._with_reserve(lambda: segment.append(number, records))
            else:
                self._segment = self._with_reserve(lambda: self._create(number, segment, sync=self._sync))
                self._worker.submit(self._close_segment, segment)
        except OSError as error:
            raise self._write_error(error, segment.path) from error
        if self._sync and records:
            self._sync_or_fail(segment)

    def _create(self, number: int, before: SegmentWriter | None, *, sync: bool) -> SegmentWriter:
        """Begin a segment and end the one before it, or neither."""
        segment = SegmentWriter.create(self._directory, number, is_synced=self._sync)
        try:
            if sync:
                self.sync_rotated(number)
            if before is not None:
                before.append(number, ())
        except BaseException:
            segment.close(sync=False)
            segment.path.unlink()
            raise
        return segment

    def _close_segment(self, segment: SegmentWriter) -> None:
        try:
            segment.close(sync=True)
        except OSError as error:
            _log.warning(
                LogMessage("a closed segment may not be whole on the disk", file=segment.path.name, error=error)
            )

    def _sync_or_fail(self, segment: SegmentWriter) -> None:
        """Sync, once: after a sync that failed, the system takes what never reached the disk for written."""
        try:
            segment.sync()
        except OSError as error:
            self._failure = DiskFailedError(
                f"the disk of the data dir failed to sync {segment.path.name} ({error}): what was not acknowledged may "
                "be lost; check the disk, then start the service again",
                metadata={"path": str(segment.path)},
            )
            raise self._failure from error

    def _with_reserve(self, write: Callable[[], T]) -> T:
        """Write, and once more where that fails and there was reserved space."""
        try:
            return write()
        except OSError:
            if not self._reserve.release():
                raise
            return write()

    def _write_error(self, error: OSError, path: Path) -> TqError:
        reason = "is full" if error.errno == errno.ENOSPC else f"does not take what is written ({error})"
        return DiskFullError(
            f"the disk of the data dir {reason}: {path.name} cannot grow; nothing that was acknowledged is lost; free "
            "space, the service goes on by itself",
            retry_after_seconds=_RETRY_SECONDS,
            metadata={"path": str(path)},
        )


class EmergencyDiskReserve:
    """A file that only takes up space on the disk: removed when the disk is full, so that clears can be written down.

    May be used by any thread.

    Attributes:
        is_there: whether the space is reserved.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is reserved yet; see `fill`."""
        self._path = path
        self._lock = threading.Lock()
        self.is_there = path.exists() and path.stat().st_size == RESERVE_BYTES

    def fill(self) -> None:
        """Set space aside where as much again stays free."""
        with self._lock:
            try:
                if self.is_there or free_bytes(self._path.parent) < 2 * RESERVE_BYTES:
                    return
                with self._path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            except OSError as error:
                _log.warning(LogMessage("no space can be reserved in the data directory", error=error))
                self._path.unlink(missing_ok=True)
            else:
                self.is_there = True

    def release(self) -> bool:
        """Free the space; return whether there was some."""
        with self._lock:
            was_there, self.is_there = self.is_there, False
            self._path.unlink(missing_ok=True)
        if was_there:
            _log.error(
                LogMessage(
                    "the disk of the data directory is full, free space; the reserve is released, so that clears can "
                    "still be written",
                    released_mib=RESERVE_BYTES >> 20,
                )
            )
        return was_there


class DurabilityWaiters:
    """Futures and callbacks that wait until records of a log are durable, in the order of these; every log has them."""

    def __init__(self) -> None:
        self._callbacks: deque[tuple[int, Callable[[], None]]] = deque()  # each with the number that it waits for
        self._futures: deque[tuple[int, asyncio.Future[None]]] = deque()

    def future(self, number: int) -> asyncio.Future[None]:
        """Return what is done once a record is durable, or fails as the next commit does."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.append((number, done))
        return done

    def add_callback(self, number: int, callback: Callable[[], None]) -> None:
        """Call something once a record is durable."""
        self._callbacks.append((number, callback))

    def drop_callbacks(self) -> None:
        """Call nothing any more, since memory may differ from the log."""
        self._callbacks.clear()

    def settle(self, durable: int, error: BaseException | None = None) -> None:
        """Notify what waits for records up to one that is durable; with an error, all other futures too."""
        while self._futures and (error is not None or self._futures[0][0] <= durable):
            _, done = self._futures.popleft()
            if done.done():
                continue  # the caller that awaited it was cancelled
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        while self._callbacks and self._callbacks[0][0] <= durable:
            _, callback = self._callbacks.popleft()
            try:
                callback()
            except Exception:
                _log.exception(LogMessage("a callback failed after its changes were durable"))
