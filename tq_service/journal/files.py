"""Files of a data directory: their names, writes that survive a loss of power, frames, and files of records.

A segment of the log, a snapshot and a checkpoint consist of frames.

    frame:   header, body
    header:  size of the body (uint32), number of the frame (uint64), XXH3 of the body, seeded with that number
             (uint64), XXH32 of the header so far (uint32); all numbers are little-endian

A reader knows the next number, and finds a frame that is missing, repeated or misplaced.

A file of records appears under its name once it is complete and on the disk: "tqrecs02", then the records in a frame
each, numbered from 0 on, and a frame without a body.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, Self, TypeVar

import xxhash

from tq_service.errors import SnapshotDamagedError

_SNAPSHOT: Final = re.compile(r"snapshot-(\d{12,})\.tqs")
PARTIAL_SUFFIX: Final = ".partial"
_HEADER: Final = struct.Struct("<IQQI")
_CHECKED: Final = struct.Struct("<IQQ")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size
RESERVE_BYTES: Final = 4 * 2**20
_MAGIC: Final = b"tqrecs02"
_BUFFER_BYTES: Final = 1 << 20
_SPARE_BYTES: Final = 2 * RESERVE_BYTES
"""Disk space left free for the log, and for its reserve."""
_WORK_SECONDS: Final = 0.0005
_REST_SECONDS: Final = 0.0001
Each = TypeVar("Each")


def snapshot_path(directory: Path, number: int) -> Path:
    """Return the path of the snapshot that holds all records before a number of the log."""
    return directory / f"snapshot-{number:012d}.tqs"


def snapshot_numbers(directory: Path) -> list[int]:
    """Return the numbers of the stored snapshots, ascending."""
    return numbers_in(directory, _SNAPSHOT)


def numbers_in(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers in the file names that match a pattern, ascending."""
    matches = (pattern.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match is not None)


def beside(path: Path, suffix: str) -> Path:
    """Return the path with a suffix added to its name."""
    return path.with_name(path.name + suffix)


def quarantine(path: Path, suffix: str) -> None:
    """Rename a file to a free name, so that it is not read again."""
    target = beside(path, suffix)
    for count in range(2, 1000):
        if not target.exists():
            break
        target = beside(path, f"{suffix}-{count}")
    path.rename(target)


class FileWriter:
    """Writes a file that appears under its name once it is complete and on the disk, or when its `with` succeeds.

    Attributes:
        file: takes the content.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, buffering: int = -1) -> None:
        self._path = path
        self._partial = beside(path, PARTIAL_SUFFIX)
        self.file = self._partial.open("wb", buffering)

    def commit(self) -> None:
        """Give the file its name, in place of a file of this name."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        self._partial.rename(self._path)
        sync_path(self._path.parent)

    def abort(self) -> None:
        """Remove the partial file; does nothing after `commit`."""
        with contextlib.suppress(OSError):  # the disk has no space for buffered bytes
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
    """Make a directory and its missing parents; their names survive a loss of power.

    Args:
        path: of the directory.
        mode: its rights; parents get the usual ones.

    Raises:
        OSError: it cannot be made.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for directory in missing:
        sync_path(directory.parent)


def sync_path(path: Path) -> None:
    """Return once the bytes of a file, or the names in a directory, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(directory: Path) -> int:
    """Return the bytes that may still be written to the disk of a directory."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


class Break(Exception):  # noqa: N818  (a finding, which the reader turns into an error or a line of the log)
    """The expected frame is missing or not intact.

    Attributes:
        is_torn: whether the file ends here in the way of a kill during a write.
    """

    def __init__(self, problem: str, *, is_torn: bool = False) -> None:
        super().__init__(problem)
        self.is_torn = is_torn


def frame(number: int, parts: Iterable[bytes | bytearray | memoryview]) -> tuple[bytes, bytes]:
    """Return header and body of a frame; its bytes are copied once, here."""
    body = b"".join(parts)
    checked = _CHECKED.pack(len(body), number, xxhash.xxh3_64_intdigest(body, number))
    return checked + _CHECKSUM.pack(xxhash.xxh32_intdigest(checked)), body


def read_frame(file: BinaryIO, number: int) -> bytes:
    """Return the body of the next frame in a file; raises Break unless it is intact and has this number."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise Break("ends within a frame", is_torn=True)
    size, found, checksum, header_checksum = _HEADER.unpack(header)
    if xxhash.xxh32_intdigest(header[: _CHECKED.size]) != header_checksum:
        raise Break("has a frame whose header does not fit its checksum")
    body = file.read(size)
    if len(body) < size:
        raise Break("ends within a frame", is_torn=True)
    if xxhash.xxh3_64_intdigest(body, found) != checksum:
        raise Break("has a frame that does not fit its checksum")
    if found != number:
        raise Break(f"has record {found} where record {number} should be")
    return body


class Pace:
    """Makes Python code in a thread rest every half a millisecond, so that the event loop runs.

    The interpreter alone switches threads every 5 ms, a delay for each step of the loop.
    """

    def __init__(self) -> None:
        self._resumed_at = time.perf_counter()

    def step(self) -> None:
        """Rest for a moment if it is time."""
        if time.perf_counter() - self._resumed_at > _WORK_SECONDS:
            time.sleep(_REST_SECONDS)
            self._resumed_at = time.perf_counter()


class RecordWriter(FileWriter):
    """Writes records in order, in a thread that leaves time to an event loop.

    Raises:
        OSError: the file cannot be written, or would leave hardly any space on the disk.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, _BUFFER_BYTES)
        self.file.write(_MAGIC)
        self.count = 0
        self._pace = Pace()
        self._unchecked_bytes = 0  # written since free space was last looked up

    def write(self, *parts: bytes | memoryview) -> None:
        """Append a record, whose bytes may come in parts."""
        head, body = frame(self.count, parts)
        self.file.write(head)
        self.file.write(body)
        self.count += 1
        self._unchecked_bytes += len(body)
        if self._unchecked_bytes >= _BUFFER_BYTES:
            self._unchecked_bytes = 0
            free = free_bytes(self._partial.parent)
            if free < _SPARE_BYTES:
                raise OSError(errno.ENOSPC, f"the disk has {free} bytes free, of which {_SPARE_BYTES} stay so")
        self._pace.step()

    def commit(self) -> None:
        """End the file, and give it its name."""
        self.file.writelines(frame(self.count, ()))
        super().commit()


class Found(NamedTuple):
    """A record, its number, and its position in the file."""

    at: int
    number: int
    data: bytes


def read_records(path: Path, at: int = 0, number: int = 0) -> Iterator[Found]:
    """Yield the records of a file.

    Args:
        path: the file.
        at: position of the first one to read; 0 for the first of all.
        number: of that record.

    Raises:
        SnapshotDamagedError: the file differs from the written one.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        try:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise Break("does not begin like a file of records")
            at = at or len(_MAGIC)
            file.seek(at)
            while body := read_frame(file, number):
                yield Found(at, number, body)
                at += HEADER_BYTES + len(body)
                number += 1
            if file.read(1):
                raise Break("continues after its end")
        except Break as flaw:
            raise damaged(path, at, f"it {flaw}") from None


def gathered(values: Iterable[Each], least: int, size_of: Callable[[Each], int] = lambda _: 1) -> Iterator[list[Each]]:
    """Yield values in lists of at least this size together; the last list may be smaller."""
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
    """Return the error for damage at a position of a file."""
    return SnapshotDamagedError(
        f"{path} is damaged at byte {at}: {problem}; go on with an older one, or restore a checkpoint",
        metadata={"path": str(path), "byte": str(at)},
    )
