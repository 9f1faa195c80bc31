"""Segments: files that hold the bytes of one put each, and are used again.

A file is as large as its capacity from the start, and all of it is allocated: a full disk is an error of the one put
for which a file was to be made. Threads read and write files, and nothing maps them: a page that cannot be read, or a
file that was cut short, is an error of one read, where a mapping would end the process by SIGBUS. The tables of puts
are in memory besides. Files are named by numbers of this service, never by anything that a client chose.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import xxhash

from tq_service.errors import DiskFullError, TqError, UnavailableError
from tq_service.storage.blobs.memory import (
    PIECE_BYTES,
    RETRY_AFTER_SECONDS,
    SMALL_BYTES,
    Blob,
    Buffer,
    Span,
    ThreadedStore,
    in_thread,
    is_temporary,
    size_class,
)
from tq_service.wire.shared_memory import read_into

_THREAD_COUNT: Final = 2
MIN_FREE_BYTES: Final = 256 << 20
"""What is left free of the disk, so that clears can still be written down."""

_READ_BYTES: Final = 4 << 20
_COPY_BYTES: Final = 1 << 20
_FILL_BYTES: Final = 128 << 10  # of each connection that fills a segment, in memory that no quota counts
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NAME: Final = re.compile(r"(?:\d{8}|[1-9]\d{8,})\.seg")
# The system takes about 0.1 ms a MiB to drop a file: too long for the event loop.
_BACKGROUND: Final = ThreadPoolExecutor(1, thread_name_prefix="tq-segment-drop")


class Segment:
    """One file.

    Attributes:
        number: its name.
        capacity: its size in bytes.
        is_new: whether its name is not known to be on the disk yet.
    """

    __slots__ = ("_directory", "capacity", "is_new", "number")

    def __init__(self, directory: Path, number: int, capacity: int) -> None:
        self._directory = directory
        self.number = number
        self.capacity = capacity
        self.is_new = True

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._directory / _name(self.number)

    @contextmanager
    def open(self) -> Iterator[int]:
        """Give a file descriptor of it within the `with`."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def checksum(self, size: int) -> int:
        """Return the checksum of its first `size` bytes.

        Raises:
            OSError: they cannot be read, or the file is shorter.
        """
        digest = xxhash.xxh3_64()
        buffer = memoryview(bytearray(min(size, _READ_BYTES)))
        with self.open() as fd:
            for at in range(0, size, _READ_BYTES):
                part = buffer[: size - at]
                read_into(fd, part, at)
                digest.update(part)
        return digest.intdigest()

    def sync(self) -> None:
        """Wait until what was written is on the disk, the name of the file included."""
        with self.open() as fd:
            os.fdatasync(fd)
        if self.is_new:
            sync_directory(self._directory)
            self.is_new = False

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


class SegmentBlob(Blob):
    """A blob in a file."""

    __slots__ = ("_digest", "number")

    is_local = False

    def __init__(self, store: SegmentBlobs, size: int, segment: Segment) -> None:
        super().__init__(store, size, backing=segment)
        self.number = segment.number
        self._digest = xxhash.xxh3_64()

    @property
    def checksum(self) -> int:  # type: ignore[override]
        return self._digest.intdigest()

    def view(self) -> memoryview:
        raise TypeError("a blob in a segment has no local view")

    def read_into(self, target: memoryview, start: int) -> None:
        self.read_slices([(start, target)])

    def read_slices(self, slices: Iterable[tuple[int, memoryview]]) -> None:
        with self.backing.open() as fd:
            for start, target in slices:
                read_into(fd, target, start)

    def write_from(self, data: Buffer, start: int) -> None:
        self._digest.update(data)
        with self.backing.open() as fd:
            _write(fd, memoryview(data), start)

    def fill(self, start: int, end: int, receive: Callable[[memoryview], None]) -> None:
        buffer = memoryview(bytearray(min(end - start, _FILL_BYTES)))
        with self.backing.open() as fd:
            for at in range(start, end, _FILL_BYTES):
                part = buffer[: end - at]
                receive(part)
                try:
                    _write(fd, part, at)
                except OSError as error:
                    raise self.refusal(error) from error

    def read_back(self, start: int) -> Iterator[tuple[int, memoryview]]:
        buffer = memoryview(bytearray(min(self.size - start, PIECE_BYTES)))
        with self.backing.open() as fd:
            for at in range(start, self.size, PIECE_BYTES):
                part = buffer[: self.size - at]
                try:
                    read_into(fd, part, at)
                except OSError as error:
                    raise self.refusal(error) from error
                self._digest.update(part)
                yield at, part

    def refusal(self, error: OSError) -> TqError:
        """Return the error of a put whose bytes cannot be written; the file may not be used again after most."""
        self.is_damaged |= not is_temporary(error)
        return _refusal(self.size, error)


class SegmentBlobs(ThreadedStore[Segment]):
    """A directory of segments; small blobs are memory, to be written down with the records of their puts.

    Blobs begin with the tables of their puts, so that one number and one checksum stand for all of a put.
    A few threads write files, so that the event loop does not wait for a disk.

    Args:
        directory: made where it is not there.
        sync: whether a flushed blob is on the disk; else with the operating system.
        min_free_bytes: what is left free of the disk.
    """

    is_durable = True

    def __init__(self, directory: Path, *, sync: bool = False, min_free_bytes: int = MIN_FREE_BYTES) -> None:
        super().__init__()
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._sync = sync
        self._min_free_bytes = min_free_bytes
        self._last_number = 0
        self._numbering = threading.Lock()
        self._executor = ThreadPoolExecutor(_THREAD_COUNT, thread_name_prefix="tq-segment")

    async def allocate(self, size: int) -> Blob:
        try:
            if size < SMALL_BYTES:
                self._check_capacity(size)
                return self.allocate_now(size)
            return self._use(await self._backing(size_class(size)), size)
        except OSError as error:
            raise _refusal(size, error) from error

    async def write(self, blob: Blob, start: int, data: Buffer) -> None:
        if not isinstance(blob, SegmentBlob):
            blob.write_from(data, start)
            return
        try:
            await in_thread(self._executor, blob.write_from, data, start, pinned=[blob])
        except OSError as error:
            raise blob.refusal(error) from error

    def _may_help(self, error: OSError) -> bool:
        return not is_temporary(error)

    def _make(self, capacity: int) -> Segment:
        """Make a file of so many bytes; any thread may.

        Raises:
            OSError: the disk is full.
        """
        self._check_capacity(capacity)
        with self._numbering:
            self._last_number += 1
            number = self._last_number
        path = self._directory / _name(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, capacity)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        return Segment(self._directory, number, capacity)

    def _wrap(self, backing: Segment, size: int) -> SegmentBlob:
        return SegmentBlob(self, size, backing)

    def _drop(self, backing: Segment) -> None:
        """Remove a file, soon."""
        _BACKGROUND.submit(backing.remove)

    def _check_capacity(self, size: int) -> None:
        """Check that the disk has space for so many bytes besides what is left free.

        Raises:
            OSError: it has not.
        """
        stat = os.statvfs(self._directory)
        free_bytes = stat.f_bavail * stat.f_frsize
        if free_bytes - size < self._min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the disk of {self._directory} has {free_bytes} bytes free; {self._min_free_bytes} stay so",
            )

    # What outlives the process

    async def flush(self, blob: Blob) -> None:
        """Wait until all that was written is on the disk, where that was asked for; it goes on without the caller."""
        if isinstance(blob, SegmentBlob) and self._sync:
            await in_thread(self._executor, blob.backing.sync, pinned=[blob])

    async def copy(self, target: Blob, head: memoryview, source: Blob, spans: Sequence[Span]) -> None:
        """Write a beginning, and after it spans of another blob.

        Raises:
            OSError: they cannot be read or written.
        """
        await in_thread(self._executor, _copy, target, head, source, spans, pinned=[target, source])

    async def checksum(self, blob: Blob, tables_bytes: int) -> int:
        """Return the checksum of a recovered blob as it is stored, and have its tables in memory from now on.

        Args:
            blob: one that has a number.
            tables_bytes: size of the tables that it begins with.

        Raises:
            OSError: they cannot be read.
        """
        if not isinstance(blob, SegmentBlob):
            raise TypeError("only blobs in segments have a checksum")
        checksum, tables = await in_thread(self._executor, _look_at, blob, tables_bytes, pinned=[blob])
        blob.tables = tables
        return checksum

    def recover(self, blobs: Iterable[tuple[int, int]]) -> list[Blob | None]:
        """Take over the blobs of an earlier process; those that are not listed are there for reuse.

        Args:
            blobs: the number and size of each. Of those that have one number the first has the bytes.

        Returns:
            The blobs; None for one that is missing.
        """
        with os.scandir(self._directory) as entries:
            found = {int(entry.name[:-4]) for entry in entries if _NAME.fullmatch(entry.name)}
        recovered: list[Blob | None] = []
        for number, size in blobs:
            self._last_number = max(self._last_number, number)  # no new file takes the number of a missing one
            if number in found:
                found.discard(number)
                segment = Segment(self._directory, number, size_class(size))
                recovered.append(SegmentBlob(self, size, segment))
                self.used_bytes += segment.capacity
            else:
                recovered.append(None)
        self._last_number = max(self._last_number, *found, 0)
        for number in found:
            segment = Segment(self._directory, number, 0)
            segment.capacity = segment.path.stat().st_size
            if segment.capacity:
                self.recycle(segment, segment.capacity)
            else:  # the process ended before it was made as large as it was to be
                self._drop(segment)
        self._high_water_bytes = self.used_bytes + self.pooled_bytes
        return recovered


def _write(fd: int, left: memoryview, start: int) -> None:
    while left:
        written = os.pwrite(fd, left, start)
        start, left = start + written, left[written:]


def _copy(target: Blob, head: memoryview, source: Blob, spans: Sequence[Span]) -> None:
    target.write_from(head, 0)
    at = len(head)
    buffer = memoryview(bytearray(min(_COPY_BYTES, max((size for _, size in spans), default=0))))
    for start, size in spans:
        for done in range(0, size, _COPY_BYTES):
            part = buffer[: size - done]
            source.read_into(part, start + done)
            target.write_from(part, at)  # while it is in the cache
            at += len(part)


def _look_at(blob: SegmentBlob, tables_bytes: int) -> tuple[int, bytearray]:
    """Return the checksum of a blob, and the tables that it begins with."""
    checksum, tables = blob.backing.checksum(blob.size), bytearray(tables_bytes)
    blob.read_into(memoryview(tables), 0)
    return checksum, tables


def _refusal(size: int, error: OSError) -> TqError:
    """Return the error of a put whose bytes could not be kept."""
    if is_temporary(error):
        return UnavailableError(f"a put of {size} bytes cannot be kept now: {error}; try again")
    if error.errno in _FULL:
        return DiskFullError(
            f"a put of {size} bytes cannot be kept: {error}; clear consumed samples, or give the data directory a "
            "larger disk",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
    return UnavailableError(f"the bytes of a put could not be written: {error}; put it again", reason="DISK_FAILED")


def _name(number: int) -> str:
    return f"{number:08d}.seg"


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
