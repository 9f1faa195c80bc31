"""The files in a data directory: file names, durable writes, frames, record files, and log segments.

Log segments, snapshots and checkpoints all consist of frames.

    frame:   header, body
    header:  body size (uint32), frame number (uint64), XXH3 of the body, seeded with the frame number (uint64), XXH32
             of the preceding header bytes (uint32); all numbers are little-endian

A reader knows which frame number to expect, so it detects missing, repeated and misplaced frames.

A record file gets its final name only after it is complete and synced. Each record file consists of the string
"tqrecs02", one frame per record (numbered from 0), and a final frame with an empty body.

The log is a chain of segments. Each frame in a segment contains the records of one group.

    segment: "tqlog004", opening frame, frame ..., closing frame

A new segment begins when the service starts, when the current segment reaches its size limit, and when a snapshot is
taken. A snapshot and the segment that begins with it have the same number. After a snapshot has been loaded, reading
continues with the segment that has the same number. Records are numbered consecutively across segments. The number of a
frame is the number of the frame's first record.

Each boundary between two segments is also assigned a number. The earlier segment ends with a closing frame, which has
an empty body and the boundary's number. The next segment has this number in its file name and in its opening frame. The
opening frame describes how the segment is written. If the process is killed, the current segment consists of complete
frames, followed by at most one partial frame. A power loss may also damage unsynced bytes elsewhere in the segment.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, Self, TypeVar

import numpy as np
import xxhash

from tq_service.errors import DiskFullError, JournalDamagedError, SnapshotDamagedError, UnavailableError
from tq_service.journal.log import NewRecord, Record, packed, unpacked
from tq_service.log_message import LogMessage

_SNAPSHOT: Final = re.compile(r"snapshot-(\d{12,})\.tqs")
PARTIAL_SUFFIX: Final = ".partial"
_HEADER: Final = struct.Struct("<IQQI")
_CHECKED: Final = struct.Struct("<IQQ")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size
RESERVE_BYTES: Final = 4 * 2**20
_RECORDS_MAGIC: Final = b"tqrecs02"
_BUFFER_BYTES: Final = 1 << 20
_SPARE_BYTES: Final = 2 * RESERVE_BYTES
"""Disk space that must stay free for the log and the emergency reserve, in bytes."""
_WORK_SECONDS: Final = 0.0005
_REST_SECONDS: Final = 0.0001
_SEGMENT_MAGIC: Final = b"tqlog004"
_NUMBER_OFFSET: Final = 4
_LEAST_RECORD_BYTES: Final = 5
_SEGMENT: Final = re.compile(r"journal-(\d{12,})\.tqj")
_LOST_SUFFIX: Final = ".lost"
_LOOK_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)
Each = TypeVar("Each")
T = TypeVar("T")


def snapshot_path(directory: Path, number: int) -> Path:
    """Return the path of the snapshot that covers all log records with numbers below `number`."""
    return directory / f"snapshot-{number:012d}.tqs"


def snapshot_numbers(directory: Path) -> list[int]:
    """Return the numbers of all stored snapshots, in ascending order."""
    return numbers_in(directory, _SNAPSHOT)


def numbers_in(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers from all file names that match a pattern, in ascending order."""
    matches = (pattern.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match is not None)


def beside(path: Path, suffix: str) -> Path:
    """Return a path with a suffix appended to the file name."""
    return path.with_name(path.name + suffix)


def quarantine(path: Path, suffix: str) -> None:
    """Exclude a file from later reads by appending a suffix to its name. The new name must not be in use."""
    target = beside(path, suffix)
    for count in range(2, 1000):
        if not target.exists():
            break
        target = beside(path, f"{suffix}-{count}")
    path.rename(target)


class FileWriter:
    """Writes a file that gets its final name only when it is complete and synced.

    To finish the file, call `commit`, or use the writer in a `with` block that ends without an error.

    Attributes:
        file: file object to write the content to.
    """

    def __init__(self, path: Path, buffering: int = -1) -> None:
        self._path = path
        self._partial = beside(path, PARTIAL_SUFFIX)
        self.file = self._partial.open("wb", buffering)

    def commit(self) -> None:
        """Sync the file and rename it to its final name, replacing any existing file."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        self._partial.rename(self._path)
        sync_path(self._path.parent)

    def abort(self) -> None:
        """Remove the incomplete file. After `commit`, this method has no effect."""
        with contextlib.suppress(OSError):  # buffered bytes may not fit on a full disk
            self.file.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its missing parents so that they survive a power loss.

    Args:
        path: path of the new directory.
        mode: permissions of the new directory. New parent directories receive the default permissions.

    Raises:
        OSError: the directory could not be created.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for directory in missing:
        sync_path(directory.parent)


def sync_path(path: Path) -> None:
    """Sync a file's contents or a directory's entries so that they survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(directory: Path) -> int:
    """Return the free space on the disk that contains a directory, in bytes."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


class Break(Exception):  # noqa: N818  (caught by the reader, which raises an error or logs the problem)
    """The expected frame is missing or damaged.

    Attributes:
        is_torn: whether the damage could result from the process being killed during a write.
    """

    def __init__(self, problem: str, *, is_torn: bool = False) -> None:
        super().__init__(problem)
        self.is_torn = is_torn


def frame(number: int, parts: Iterable[bytes | bytearray | memoryview]) -> tuple[bytes, bytes]:
    """Create a frame whose body consists of the given parts, and return its header and body."""
    body = b"".join(parts)
    checked = _CHECKED.pack(len(body), number, xxhash.xxh3_64_intdigest(body, number))
    return checked + _CHECKSUM.pack(xxhash.xxh32_intdigest(checked)), body


def read_frame(file: BinaryIO, number: int) -> bytes:
    """Return the body of a file's next frame. Raise Break if the frame is damaged or has an unexpected number."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise Break("ends within a frame", is_torn=True)
    size, found, checksum, header_checksum = _HEADER.unpack(header)
    if xxhash.xxh32_intdigest(header[: _CHECKED.size]) != header_checksum:
        raise Break("has a frame whose header does not match its checksum")
    body = file.read(size)
    if len(body) < size:
        raise Break("ends within a frame", is_torn=True)
    if xxhash.xxh3_64_intdigest(body, found) != checksum:
        raise Break("has a frame that does not match its checksum")
    if found != number:
        raise Break(f"has record {found} where record {number} was expected")
    return body


class Pace:
    """Pauses a thread briefly after every half millisecond of running Python code so that the event loop can run.

    Without these pauses, the interpreter would switch threads only every 5 ms, which would delay each step of the event
    loop.
    """

    def __init__(self) -> None:
        self._resumed_at = time.perf_counter()

    def step(self) -> None:
        """Sleep briefly if the thread has run for half a millisecond."""
        if time.perf_counter() - self._resumed_at > _WORK_SECONDS:
            time.sleep(_REST_SECONDS)
            self._resumed_at = time.perf_counter()


class RecordWriter(FileWriter):
    """Writes records in order, pausing the writing thread regularly so that the event loop can run.

    Raises:
        OSError: the file could not be written, or too little disk space would remain free.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, _BUFFER_BYTES)
        self.file.write(_RECORDS_MAGIC)
        self.count = 0
        self._pace = Pace()
        self._unchecked_bytes = 0  # bytes written since the last check of free space

    def write(self, *parts: bytes | memoryview) -> None:
        """Append a record that consists of one or more parts."""
        head, body = frame(self.count, parts)
        self.file.write(head)
        self.file.write(body)
        self.count += 1
        self._unchecked_bytes += len(body)
        if self._unchecked_bytes >= _BUFFER_BYTES:
            self._unchecked_bytes = 0
            free = free_bytes(self._partial.parent)
            if free < _SPARE_BYTES:
                raise OSError(errno.ENOSPC, f"the disk has only {free} bytes free; {_SPARE_BYTES} must stay free")
        self._pace.step()

    def commit(self) -> None:
        """Write the final frame and give the file its final name."""
        self.file.writelines(frame(self.count, ()))
        super().commit()


class Found(NamedTuple):
    """A record with its number and its byte position in the file."""

    at: int
    number: int
    data: bytes


def read_records(path: Path, at: int = 0, number: int = 0) -> Iterator[Found]:
    """Yield the records in a record file.

    Args:
        path: path of the segment file.
        at: byte position of the first record to read, or 0 for the start of the file.
        number: number of the first record to read.

    Raises:
        SnapshotDamagedError: the file is damaged.
        OSError: the file could not be read.
    """
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        try:
            if file.read(len(_RECORDS_MAGIC)) != _RECORDS_MAGIC:
                raise Break("does not begin with the signature of a record file")
            at = at or len(_RECORDS_MAGIC)
            file.seek(at)
            while body := read_frame(file, number):
                yield Found(at, number, body)
                at += HEADER_BYTES + len(body)
                number += 1
            if file.read(1):
                raise Break("has extra bytes after the final frame")
        except Break as flaw:
            raise damaged(path, at, f"it {flaw}") from None


def gathered(values: Iterable[Each], least: int, size_of: Callable[[Each], int] = lambda _: 1) -> Iterator[list[Each]]:
    """Group values into lists, each with a total size of at least `least`. The last list may be smaller."""
    some: list[Each] = []
    size = 0
    for value in values:
        some.append(value)
        size += size_of(value)
        if size >= least:
            yield some
            some, size = [], 0
    if some:
        yield some


def damaged(path: Path, at: int, problem: str) -> SnapshotDamagedError:
    """Create the error that reports damage at a byte position in a file."""
    return SnapshotDamagedError(
        f"{path} is damaged at byte {at}: {problem}. Use an older file, or restore a checkpoint.",
        metadata={"path": str(path), "byte": str(at)},
    )


# The log


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of the segment with this number."""
    return directory / f"journal-{number:012d}.tqj"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of all segments in a directory, in ascending order."""
    return numbers_in(directory, _SEGMENT)


@cache
def machine_boot_id() -> str:
    """Return an id that changes when the machine reboots, or "" if the id is unknown.

    Only a reboot can lose unsynced bytes.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class SegmentWriter:
    """A segment that is open for writing. Only one thread at a time may use it. Methods raise OSError if they fail.

    Args:
        path: path of the segment file.
        flags: additional flags for `os.open`.
        end: number of bytes to keep; the rest of the file is truncated.
    """

    def __init__(self, path: Path, flags: int = 0, end: int = 0) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
        self._end = end
        os.ftruncate(self._descriptor, end)

    def append(self, number: int, records: Sequence[NewRecord]) -> None:
        """Write a frame, or a closing frame if `records` is empty, in one system call.

        If the call fails, undo any partial write.
        """
        self.write(*frame(number, packed(records)))

    def write(self, head: bytes, body: bytes) -> None:
        """Write bytes in one system call. If the call fails, undo any partial write."""
        size = len(head) + len(body)
        try:
            written = os.pwritev(self._descriptor, [head, body], self._end)
            if written < size:  # the disk is full, or the data is too large for one call
                rest = memoryview(head + body)
                while written < size:
                    written += os.pwrite(self._descriptor, rest[written:], self._end + written)
        except BaseException:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += size

    def sync(self) -> None:
        """Sync all written bytes to disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close the file. Log errors instead of raising them."""
        try:
            try:
                self.sync()
            finally:
                os.close(self._descriptor)
        except OSError as error:
            _log.warning(LogMessage("could not sync a segment while closing it", file=self.path.name, error=error))


class FoundSegment:
    """A segment written by an earlier process.

    Attributes:
        number: segment number from the file name.
        path: path of the segment file.
        size: file size in bytes.
        end: number of intact bytes read so far, not including the closing frame.
        last_number: number of the last record before `end`.
        is_closed: whether the segment has a closing frame at `end`.
        flaw: problem found at byte `end`, or None if there is none.
        is_synced: whether each frame of the segment was synced when it was written.
        machine_boot_id: result of `machine_boot_id()` when the segment was created.
    """

    def __init__(self, directory: Path, number: int) -> None:
        """Read the opening frame. Raise OSError if the file cannot be read."""
        self.number = self.last_number = number
        self.path = segment_path(directory, number)
        self.size = self.path.stat().st_size
        self.end = 0
        self.flaw: Break | None = None
        self.is_synced = self.is_closed = False
        self.machine_boot_id = ""
        try:
            with self._opened(0) as file:
                magic = file.read(len(_SEGMENT_MAGIC))
                if magic != _SEGMENT_MAGIC:
                    is_torn = _SEGMENT_MAGIC.startswith(magic)
                    raise Break("does not begin with the signature of a journal file", is_torn=is_torn)
                opening = read_frame(file, number)
                self.is_synced, self.machine_boot_id, self.end = bool(opening[0]), opening[1:].decode(), file.tell()
        except Break as flaw:
            self.flaw = flaw

    @property
    def is_begun(self) -> bool:
        """Whether the opening frame is intact."""
        return self.end > 0

    @property
    def may_lose_tail(self) -> bool:
        """Whether a power loss may have destroyed unsynced bytes anywhere in the file, not just at its end."""
        return self.is_begun and not self.is_synced and self.machine_boot_id != machine_boot_id()

    @property
    def was_being_made(self) -> bool:
        """Whether the process was killed before it finished writing the opening frame."""
        return not self.is_begun and self.flaw is not None and self.flaw.is_torn

    @property
    def is_damaged(self) -> bool:
        """Whether neither a killed process nor a power loss can have caused the flaw."""
        if self.flaw is None or self.flaw.is_torn or self.may_lose_tail:
            return False
        # A power loss may destroy any unsynced bytes, all of which belong to the last commit.
        return self.machine_boot_id == machine_boot_id() or self.has_frame_after_flaw()

    def records(self) -> Iterator[Record]:
        """Yield the records up to the closing frame, a flaw, or the end of the file.

        Raises:
            OSError: the file could not be read.
        """
        try:
            with self._opened(self.end) as file:
                while file.peek(1):
                    body = read_frame(file, self.last_number + 1)
                    if not body:
                        self.is_closed = True
                        if file.peek(1):
                            raise Break("has extra bytes after the closing frame")
                        return
                    self.end += HEADER_BYTES + len(body)
                    for record in unpacked(body, self.last_number + 1):
                        self.last_number = record.number
                        yield record
        except Break as flaw:
            self.flaw = flaw

    def has_frame_after_flaw(self) -> bool:
        """Whether an intact frame follows the flaw, which proves that the damaged bytes had been synced."""
        data = self.path.read_bytes()[self.end + 1 :]
        file = io.BytesIO(data)
        # For each byte, the number of a frame that would begin there. The padding allows frames that begin at the last
        # bytes.
        numbers = np.ndarray(len(data), "<u8", data + bytes(HEADER_BYTES), _NUMBER_OFFSET, (1,))
        most = self.last_number + 2 + len(data) // _LEAST_RECORD_BYTES
        for at in np.flatnonzero((numbers > self.last_number) & (numbers < most)).tolist():
            file.seek(at)
            with contextlib.suppress(Break):
                read_frame(file, int(numbers[at]))
                return True
        return False

    @contextlib.contextmanager
    def _opened(self, start: int) -> Iterator[io.BufferedReader]:
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                yield file
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise Break(f"cannot be read ({error})") from error


class FileBackend:
    """A log backend that writes each group of records as one frame to a segment file.

    Without `sync`, a record is durable once the operating system has received it, so the record survives any
    termination of the process. A power loss may destroy the last records, but never a record that precedes a surviving
    record. The event loop writes the frames itself, because passing them to a thread would take longer. With `sync`, a
    record is durable once it is on disk.

    Args:
        directory: existing directory that contains the segments. No other process may write to this directory.
        sync: whether to sync each write.
        accept_loss: whether `read` discards a damaged record and all later records instead of raising an error.

    Attributes:
        last_number: number of the last record or opening frame read. The next record to be written receives the number
            after `last_number`.
    """

    group_bytes = 8 * 2**20
    segment_bytes: float = 32 * 2**20
    patience_seconds = 0.0

    def __init__(self, directory: Path, *, sync: bool, accept_loss: bool = False) -> None:
        self.is_blocking = sync
        self._directory = directory
        self._accept_loss = accept_loss
        self.last_number = 0
        self._last_found: FoundSegment | None = None  # the last segment, still to be closed; None if the log is empty
        self._reserve = EmergencyDiskReserve(directory / "reserve")
        self._reserve.fill()
        self._look_at = 0.0
        self._segment: SegmentWriter | None = None
        self._failure: UnavailableError | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="tq-log")

    def read(self, number: int) -> Iterator[Record]:
        """Yield the records from segment `number` onward, or all records if `number` is 0.

        Raises:
            JournalDamagedError: a record is damaged or missing.
            DiskFullError: a file could not be read because a system resource is exhausted.
        """
        try:
            found = [FoundSegment(self._directory, each) for each in segment_numbers(self._directory) if each >= number]
            if not self._has_beginning(found, number):
                self._lose(found)
                self.last_number = max(number, 1) - 1  # continue numbering after the snapshot
                return
            for index, segment in enumerate(found):
                self.last_number, self._last_found = segment.number, segment
                for record in segment.records():
                    self.last_number = record.number
                    yield record
                following = found[index + 1 :]
                if not self._continues(segment, following):
                    self._lose(following)
                    return
        except OSError as error:
            # Accepting the loss here would discard intact records that are only temporarily unreadable.
            raise DiskFullError(
                f"{error.filename or self._directory} could not be read ({error}): the disk of the data directory is "
                "full, or this process lacks file descriptors or permissions. No data is lost. Fix the cause and "
                "restart the service.",
                metadata={"path": str(error.filename or self._directory)},
            ) from error

    def _has_beginning(self, found: Sequence[FoundSegment], number: int) -> bool:
        """Whether the beginning of the log is complete.

        Raises:
            JournalDamagedError: records are missing, and only damage can explain the loss.
        """
        first = found[0] if found else None
        if first is None or first.number != (number or 1):
            if number:
                path = segment_path(self._directory, number)
                self._report(path, 0, "is missing, but the snapshot before it exists")
            elif first is not None:
                self._report(
                    first.path, 0, f"begins with number {first.number}, but no snapshot contains the earlier records"
                )
            return first is None and not number
        if not first.is_begun and (number or len(found) > 1 or not first.was_being_made):
            self._report(first.path, 0, f"{first.flaw}")
        return first.is_begun

    def _continues(self, segment: FoundSegment, following: Sequence[FoundSegment]) -> bool:
        """Return whether the next segment begins where this one ends.

        Raises:
            JournalDamagedError: records are missing, and only damage can explain the loss.
        """
        number = segment.last_number + 1
        continues = bool(following) and following[0].is_begun and following[0].number == number
        if segment.flaw is not None:
            if not continues and segment.is_damaged:
                self._report(segment.path, segment.end, f"{segment.flaw}")
                try:  # copy the file before it is truncated, so that an operator can inspect it
                    shutil.copyfile(segment.path, beside(segment.path, _LOST_SUFFIX))
                except OSError as error:
                    name = segment.path.name
                    _log.warning(LogMessage("could not copy a damaged segment", file=name, error=error))
                return False
            _log.warning(
                LogMessage(
                    "truncated a record that was left incomplete when the service or the machine stopped",
                    file=segment.path.name,
                    bytes=segment.size - segment.end,
                    after_record=segment.last_number,
                )
            )
        # After a reboot, a process creates its segment only after it has found which bytes the power loss destroyed.
        is_of_later_run = bool(following) and following[0].machine_boot_id not in ("", segment.machine_boot_id)
        if continues or (segment.may_lose_tail and not is_of_later_run):
            return continues
        if not following:
            if segment.is_closed:
                path = segment_path(self._directory, number)
                self._report(path, 0, f"is missing, but {segment.path.name} announces it")
        elif following[0].number != number:
            self._report(
                segment.path,
                segment.end,
                f"ends with record {number - 1}, but the next file begins with number {following[0].number}",
            )
        elif segment.is_closed or len(following) > 1 or not following[0].was_being_made:
            self._report(following[0].path, 0, f"{following[0].flaw}")
        return False

    def _lose(self, segments: Sequence[FoundSegment]) -> None:
        for segment in reversed(segments):  # in reverse order, so that a kill during the loop does not move the gap
            if segment.was_being_made:
                _log.warning(LogMessage("removed a segment without records", file=segment.path.name))
                segment.path.unlink()
            else:
                _log.warning(LogMessage("quarantined a segment that follows lost records", file=segment.path.name))
                quarantine(segment.path, _LOST_SUFFIX)

    def _report(self, path: Path, at: int, problem: str) -> None:
        """Raise JournalDamagedError, or only log the damage if lost records are acceptable."""
        place = f"{path}, byte {at}," if at else f"{path}"
        if not self._accept_loss:
            raise JournalDamagedError(
                f"the journal is damaged: {place} {problem}. Restore a checkpoint, or start with "
                "--accept-journal-loss to keep the records before the damage and lose all later ones.",
                metadata={"file": path.name, "byte": str(at), "after_record": str(self.last_number)},
            )
        _log.error(
            LogMessage(
                "lost records because the journal is damaged, as permitted", file=path, byte=at or None, problem=problem
            )
        )

    # Writing

    def write(self, number: int, records: Sequence[NewRecord]) -> None:
        """Write a frame that contains the given records. If `records` is empty, begin a new segment.

        Raises:
            DiskFullError: the disk is full. A retry may succeed.
            UnavailableError: a sync failed, so unsynced records may be lost.
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
            reason = "is full" if error.errno == errno.ENOSPC else f"does not accept writes ({error})"
            path = segment_path(self._directory, number) if segment is None else segment.path
            raise DiskFullError(
                f"the disk of the data directory {reason}: {path.name} cannot grow. No acknowledged data is lost. "
                "Free some space so that the service can resume",
                retry_after_seconds=_RETRY_SECONDS,
                metadata={"path": str(path)},
            ) from error
        if not self.is_blocking:
            return
        try:  # do not retry, because after a failed sync the system treats the lost bytes as written
            segment.sync()
        except OSError as error:
            self._failure = UnavailableError(
                f"the disk of the data directory failed to sync {segment.path.name} ({error}), so unacknowledged data "
                "may be lost. Check the disk, then restart the service.",
                reason="DISK_FAILED",
                metadata={"path": str(segment.path)},
            )
            raise self._failure from error

    def _begin_segment(self, number: int) -> None:
        before, is_first = self._segment, self._segment is None
        if is_first:
            for each in segment_numbers(self._directory) if self.is_blocking else ():  # a run without sync wrote them
                sync_path(segment_path(self._directory, each))
            if (found := self._last_found) is not None:
                before = SegmentWriter(found.path, end=found.end)
        try:
            self._segment = self._with_reserve(lambda: self._create(number, before, sync=is_first or self.is_blocking))
        finally:
            if before is not None and is_first:
                before.close()
        if before is not None and not is_first:
            self._background.submit(before.close)

    def _create(self, number: int, before: SegmentWriter | None, *, sync: bool) -> SegmentWriter:
        """Create a segment and close its predecessor. If either step fails, undo both."""
        segment = SegmentWriter(segment_path(self._directory, number), os.O_CREAT | os.O_EXCL)
        try:
            head, body = frame(number, (bytes([self.is_blocking]), machine_boot_id().encode()))
            segment.write(_SEGMENT_MAGIC + head, body)
            if sync:
                self.sync_rotated(number)
            if before is not None:
                before.append(number, ())
        except BaseException:
            segment.path.unlink()
            segment.close()
            raise
        return segment

    def _with_reserve(self, write: Callable[[], T]) -> T:
        """Call `write`. If `write` fails, release the reserved space and call `write` again."""
        try:
            return write()
        except OSError:
            if not self._reserve.release():
                raise
            return write()

    @property
    def is_disk_low(self) -> bool:
        """Whether the disk has filled up and has not recovered.

        If so, the remaining space is reserved for records that free space.
        """
        if self._reserve.is_filled:
            return False
        if time.monotonic() >= self._look_at and self._segment is not None:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._background.submit(self._reserve.fill)
        return True

    def sync_rotated(self, number: int) -> None:
        """Sync a new segment and its directory so that the segment survives a power loss."""
        sync_path(segment_path(self._directory, number))
        sync_path(self._directory)

    def truncate_before(self, number: int) -> None:
        """Remove all segments that contain only records with numbers below `number`."""
        for each, following in pairwise(segment_numbers(self._directory)):
            if following <= number:
                segment_path(self._directory, each).unlink()

    def close(self) -> None:
        """Close the current segment."""
        segment, self._segment = self._segment, None
        self._background.shutdown()
        if segment is not None:
            segment.close()


class EmergencyDiskReserve:
    """A file that reserves disk space. When the disk is full, the file is removed to make room for recording clears.

    This class is thread-safe.

    Attributes:
        is_filled: whether the file exists and reserves the space.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.is_filled = path.exists() and path.stat().st_size == RESERVE_BYTES

    def fill(self) -> None:
        """Reserve disk space, unless too little would remain free."""
        with self._lock:
            try:
                if self.is_filled or free_bytes(self._path.parent) < 2 * RESERVE_BYTES:
                    return
                with self._path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            except OSError as error:
                _log.warning(LogMessage("could not reserve space in the data directory", error=error))
                self._path.unlink(missing_ok=True)
            else:
                self.is_filled = True

    def release(self) -> bool:
        """Release the reserved space. Return whether any space was reserved."""
        with self._lock:
            was_filled, self.is_filled = self.is_filled, False
            self._path.unlink(missing_ok=True)
        if was_filled:
            _log.error(
                LogMessage(
                    "the disk of the data directory is full. The reserve was released, so clears can still be "
                    "written. Free some space",
                    released_mib=RESERVE_BYTES >> 20,
                )
            )
        return was_filled
