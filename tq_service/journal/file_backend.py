"""A log in the files of one directory, as a chain of segments.

A new segment begins at each start, when one is long, and with each snapshot. The snapshot has the number of its
segment, and later records are read from that segment on.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

from tq_service.errors import DiskFailedError, DiskFullError, TqError
from tq_service.journal.files import free_bytes, sync_path
from tq_service.journal.log import NewRecord, Record
from tq_service.journal.reader import LogReader
from tq_service.journal.segment import SegmentWriter, segment_numbers, segment_path
from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 1.0
RESERVE_BYTES: Final = 4 * 2**20

T = TypeVar("T")


class FileBackend:
    """Writes each group as one frame of a segment.

    Without `sync`, durable means handed to the operating system, which survives any end of the process. A loss of power
    may take the last records, never one before a record that it leaves. The event loop writes such frames, since a
    thread takes longer. With `sync`, durable means on the disk.

    Args:
        directory: where its files are; it exists, and no other process writes there.
        sync: whether each write is synced.
        accept_loss: whether `read` continues without the records that follow a damaged one, instead of raising.
    """

    group_bytes = 8 * 2**20
    segment_bytes: float = 32 * 2**20
    patience_seconds = 0.0

    def __init__(self, directory: Path, *, sync: bool, accept_loss: bool = False) -> None:
        self.is_blocking = sync
        self._directory = directory
        self._reader = LogReader(directory, accept_loss=accept_loss)
        self._reserve = EmergencyDiskReserve(directory / "reserve")
        self._reserve.fill()
        self._look_at = 0.0
        self._segment: SegmentWriter | None = None
        self._failure: DiskFailedError | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="tq-log")

    @property
    def last_number(self) -> int:
        """Last number in use, once `read` is exhausted."""
        return self._reader.last_number

    def read(self, number: int) -> Iterator[Record]:
        """Yield all records since a rotation, 0 for all of them.

        Raises:
            JournalDamagedError: a written record is damaged or missing.
            DiskFullError: a file cannot be read now.
        """
        return self._reader.records(number)

    def write(self, number: int, records: Sequence[NewRecord]) -> None:
        """Write a frame, or without records begin a segment.

        Raises:
            DiskFullError: no space is left; a retry may succeed.
            DiskFailedError: a sync failed, so that it is unknown which records are on the disk.
        """
        if self._failure is not None:
            raise self._failure
        segment = self._segment
        try:
            if segment is None or not records:
                self._begin_segment(number)
                return
            self._with_reserve(lambda: segment.append(number, records))
        except OSError as error:
            path = segment_path(self._directory, number) if segment is None else segment.path
            raise _write_error(error, path) from error
        if self.is_blocking:
            self._sync_or_fail(segment)

    def _begin_segment(self, number: int) -> None:
        before, is_first = self._segment, self._segment is None
        if is_first:
            for each in segment_numbers(self._directory) if self.is_blocking else ():  # a run without sync wrote them
                sync_path(segment_path(self._directory, each))
            if (found := self._reader.last_segment) is not None:
                before = SegmentWriter.reopen(found.path, found.end)
        try:
            self._segment = self._with_reserve(lambda: self._create(number, before, sync=is_first or self.is_blocking))
        finally:
            if before is not None and is_first:
                _close_segment(before)
        if before is not None and not is_first:
            self._background.submit(_close_segment, before)

    def _create(self, number: int, before: SegmentWriter | None, *, sync: bool) -> SegmentWriter:
        """Begin a segment and end its predecessor, or neither."""
        segment = SegmentWriter.create(self._directory, number, is_synced=self.is_blocking)
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

    def _sync_or_fail(self, segment: SegmentWriter) -> None:
        """Sync once: after a failed sync, the system considers written what never reached the disk."""
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
        """Write, and retry once if that fails and reserved space could be released."""
        try:
            return write()
        except OSError:
            if not self._reserve.release():
                raise
            return write()

    @property
    def is_disk_low(self) -> bool:
        """Whether the disk was full and has hardly any space yet, so that only records that free space still fit."""
        if self._reserve.is_filled:
            return False
        if time.monotonic() >= self._look_at and self._segment is not None:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._background.submit(self._reserve.fill)
        return True

    def sync_rotated(self, number: int) -> None:
        """Return once a new segment survives a loss of power."""
        sync_path(segment_path(self._directory, number))
        sync_path(self._directory)

    def truncate_before(self, number: int) -> None:
        """Remove segments whose records all have lower numbers."""
        for each, following in pairwise(segment_numbers(self._directory)):
            if following <= number:
                segment_path(self._directory, each).unlink()

    def close(self) -> None:
        """Close the segment."""
        segment, self._segment = self._segment, None
        self._background.shutdown()
        if segment is not None:
            _close_segment(segment)


def _close_segment(segment: SegmentWriter) -> None:
    try:
        segment.close(sync=True)
    except OSError as error:
        _log.warning(LogMessage("a closed segment may not be whole on the disk", file=segment.path.name, error=error))


def _write_error(error: OSError, path: Path) -> TqError:
    reason = "is full" if error.errno == errno.ENOSPC else f"does not take what is written ({error})"
    return DiskFullError(
        f"the disk of the data dir {reason}: {path.name} cannot grow; nothing that was acknowledged is lost; free "
        "space, the service goes on by itself",
        retry_after_seconds=_RETRY_SECONDS,
        metadata={"path": str(path)},
    )


class EmergencyDiskReserve:
    """A file that only takes up disk space, removed when the disk is full so that clears can still be recorded.

    May be used by any thread.

    Attributes:
        is_filled: whether the space is reserved.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.is_filled = path.exists() and path.stat().st_size == RESERVE_BYTES

    def fill(self) -> None:
        """Reserve the space if as much again stays free."""
        with self._lock:
            try:
                if self.is_filled or free_bytes(self._path.parent) < 2 * RESERVE_BYTES:
                    return
                with self._path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            except OSError as error:
                _log.warning(LogMessage("no space can be reserved in the data directory", error=error))
                self._path.unlink(missing_ok=True)
            else:
                self.is_filled = True

    def release(self) -> bool:
        """Free the space; return whether any was reserved."""
        with self._lock:
            was_filled, self.is_filled = self.is_filled, False
            self._path.unlink(missing_ok=True)
        if was_filled:
            _log.error(
                LogMessage(
                    "the disk of the data directory is full, free space; the reserve is released, so that clears can "
                    "still be written",
                    released_mib=RESERVE_BYTES >> 20,
                )
            )
        return was_filled
