"""Stores the bytes of puts in segments: reusable files that each hold one put.

A file is created with its full capacity allocated. If the disk is full, only puts that need a new file fail. Threads
read and write the files, which are never mapped. If a file is truncated or a page is unreadable, only a single read
fails. If the file were mapped, the process would be killed (SIGBUS). The tables of puts are also kept in memory. File
names are numbers assigned by this service, never text chosen by a client.
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
"""Minimum free disk space in bytes. The reserve allows freed puts to be recorded even when the disk is full."""

_READ_BYTES: Final = 4 << 20
_COPY_BYTES: Final = 1 << 20
_FILL_BYTES: Final = 128 << 10  # size of a buffer for each connection that fills a segment; not part of any quota
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NAME: Final = re.compile(r"(?:\d{8}|[1-9]\d{8,})\.seg")
# The system takes about 0.1 ms per MiB to delete a file. This is too long for the event loop.
_BACKGROUND: Final = ThreadPoolExecutor(1, thread_name_prefix="tq-segment-drop")


class Segment:
    """A segment file.

    Attributes:
        number: number of the segment, as in its file name.
        capacity: size of the file in bytes.
        is_new: whether the file's directory entry might not have been synced yet.
        is_kept: whether a recording has linked the file under another name, so its bytes must never change.
    """

    __slots__ = ("_directory", "capacity", "is_kept", "is_new", "number")

    def __init__(self, directory: Path, number: int, capacity: int) -> None:
        self._directory = directory
        self.number = number
        self.capacity = capacity
        self.is_new = True
        self.is_kept = False

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._directory / _name(self.number)

    @contextmanager
    def open(self) -> Iterator[int]:
        """Open the file, and yield a file descriptor that is valid inside the `with` block."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def checksum(self, size: int) -> int:
        """Return the checksum of the first `size` bytes of the file.

        Raises:
            OSError: the bytes cannot be read, or the file is shorter than `size`.
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
        """Wait until the written bytes and the file's directory entry are on disk."""
        with self.open() as fd:
            os.fdatasync(fd)
        if self.is_new:
            sync_directory(self._directory)
            self.is_new = False

    def remove(self) -> None:
        """Remove the file if it exists."""
        self.path.unlink(missing_ok=True)


class SegmentBlob(Blob):
    """A blob that is stored in a segment file."""

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
        raise TypeError("a blob in a segment file cannot be viewed in memory; call read_into")

    def keep_file(self) -> Path:
        self.backing.is_kept = True
        path: Path = self.backing.path
        return path

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
        """Return the error for a put that cannot be written. After a permanent error, the file is not reused."""
        self.is_damaged |= not is_temporary(error)
        return _refusal(self.size, error)


class SegmentBlobs(ThreadedStore[Segment]):
    """A directory of segments. Small blobs stay in memory and are persisted in the records of their puts.

    Each blob begins with the tables of its put, so one number and one checksum cover the entire put. Threads write the
    files, so the event loop never waits for the disk.

    Args:
        directory: directory that contains the files. The directory is created if it does not exist.
        sync: whether a flush waits for the disk. If false, the operating system may still buffer flushed blobs.
        min_free_bytes: free disk space that must remain, in bytes.
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
        """Create a file of `capacity` bytes. Safe to call from any thread.

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
        """Remove a file in the background."""
        _BACKGROUND.submit(backing.remove)

    def recycle(self, backing: Segment, capacity: int) -> None:
        if backing.is_kept:
            self._drop(backing)
        else:
            super().recycle(backing, capacity)

    def _check_capacity(self, size: int) -> None:
        """Check that the disk has space for `size` bytes in addition to the space that must remain free.

        Raises:
            OSError: the disk does not have enough space.
        """
        stat = os.statvfs(self._directory)
        free_bytes = stat.f_bavail * stat.f_frsize
        if free_bytes - size < self._min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the disk that holds {self._directory} has {free_bytes} bytes free; at least "
                f"{self._min_free_bytes} must stay free",
            )

    # Durability

    async def flush(self, blob: Blob) -> None:
        """Wait until a blob is on disk, or return immediately if `sync` is not set.

        The sync continues even if the caller is cancelled.
        """
        if isinstance(blob, SegmentBlob) and self._sync:
            await in_thread(self._executor, blob.backing.sync, pinned=[blob])

    async def copy(self, target: Blob, head: memoryview, source: Blob, spans: Sequence[Span]) -> None:
        """Write `head` and then the byte ranges `spans` of the `source` blob to `target`.

        Raises:
            OSError: the bytes cannot be read or written.
        """
        await in_thread(self._executor, _copy, target, head, source, spans, pinned=[target, source])

    async def checksum(self, blob: Blob, tables_bytes: int) -> int:
        """Load the tables of a recovered blob into memory, and return the checksum of the stored bytes.

        Args:
            blob: a blob in a segment.
            tables_bytes: size in bytes of the tables at the start of the blob.

        Raises:
            OSError: the bytes cannot be read.
        """
        if not isinstance(blob, SegmentBlob):
            raise TypeError("only blobs in segments have a checksum")
        checksum, tables = await in_thread(self._executor, _look_at, blob, tables_bytes, pinned=[blob])
        blob.tables = tables
        return checksum

    async def take_files(self, paths: Sequence[Path]) -> None:
        """Move files of a recording into the store's directory, where they can be reused for other puts.

        A file is left in place if it has another hard link, was truncated, or is on a different file system.
        """
        for segment in await in_thread(self._executor, self._taken, paths):
            self.recycle(segment, segment.capacity)  # the next put or `trim` drops excess files

    def _taken(self, paths: Sequence[Path]) -> list[Segment]:
        taken = []
        for path in paths:
            try:
                found = path.stat()
                if found.st_nlink > 1 or found.st_size < SMALL_BYTES or found.st_size != size_class(found.st_size):
                    continue
                with self._numbering:
                    self._last_number += 1
                    number = self._last_number
                path.rename(self._directory / _name(number))
            except OSError:
                continue
            taken.append(Segment(self._directory, number, found.st_size))
        return taken

    def recover(self, blobs: Iterable[tuple[int, int]]) -> list[Blob | None]:
        """Recover the blobs of an earlier process, and pool unlisted files for reuse.

        Args:
            blobs: file number and size of each blob. If several blobs share a number, the file goes to the first of
                them.

        Returns:
            The blobs in order, with None for each missing blob.
        """
        with os.scandir(self._directory) as entries:
            found = {int(entry.name[:-4]) for entry in entries if _NAME.fullmatch(entry.name)}
        recovered: list[Blob | None] = []
        for number, size in blobs:
            self._last_number = max(self._last_number, number)  # a new file must not reuse the number of a missing file
            if number in found:
                found.discard(number)
                segment = Segment(self._directory, number, size_class(size))
                segment.is_kept = segment.path.stat().st_nlink > 1
                recovered.append(SegmentBlob(self, size, segment))
                self.used_bytes += segment.capacity
            else:
                recovered.append(None)
        self._last_number = max(self._last_number, *found, 0)
        for number in found:
            segment = Segment(self._directory, number, 0)
            found_file = segment.path.stat()
            segment.capacity, segment.is_kept = found_file.st_size, found_file.st_nlink > 1
            if segment.capacity:
                self.recycle(segment, segment.capacity)
            else:  # the earlier process ended before it allocated the file
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
            target.write_from(part, at)  # write immediately, while the bytes are still in the CPU cache
            at += len(part)


def _look_at(blob: SegmentBlob, tables_bytes: int) -> tuple[int, bytearray]:
    """Return the checksum of a blob, and the tables at the start of the blob."""
    checksum, tables = blob.backing.checksum(blob.size), bytearray(tables_bytes)
    blob.read_into(memoryview(tables), 0)
    return checksum, tables


def _refusal(size: int, error: OSError) -> TqError:
    """Return the error for a put whose bytes could not be stored."""
    if is_temporary(error):
        return UnavailableError(f"could not store a put of {size} bytes: {error}; try again")
    if error.errno in _FULL:
        return DiskFullError(
            f"could not store a put of {size} bytes: {error}; clear consumed samples, or use a larger disk for the "
            "data directory",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
    return UnavailableError(f"could not write the bytes of a put: {error}; put the data again", reason="DISK_FAILED")


def _name(number: int) -> str:
    return f"{number:08d}.seg"


def sync_directory(directory: Path) -> None:
    """Wait until the entries of a directory are on disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
