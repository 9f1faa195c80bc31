"""Segments: files that hold the bytes of one put each, mapped and used again.

A file is as large as its capacity from the start, and all of it is allocated: a full disk is an error of the one put
for which a file was to be made, never a signal at a write into a mapping. Files are named by numbers of this service,
never by anything that a client chose.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

from tq_service.wire.mapping import map_over

MIN_FREE_BYTES: Final = 256 << 20
"""What is left free of the disk, so that clears can still be written down."""

_READ_BYTES: Final = 4 << 20
_COPY_BYTES: Final = 1 << 20
_ROOM_KNOWN_SECONDS: Final = 0.05
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
_NAME: Final = re.compile(r"(?:\d{8}|[1-9]\d{8,})\.seg")
# The system takes about 0.1 ms a MiB to drop a file: too long for the event loop.
_ASIDE: Final = ThreadPoolExecutor(1, thread_name_prefix="tq-segment-drop")


class Segment:
    """One file.

    Attributes:
        number: its name.
        capacity: its size in bytes.
        is_new: whether its name is not known to be on the disk yet.
    """

    __slots__ = ("_folder", "_memory", "capacity", "is_new", "number")

    def __init__(self, folder: Path, number: int, capacity: int) -> None:
        self._folder = folder
        self._memory: mmap.mmap | None = None
        self.number = number
        self.capacity = capacity
        self.is_new = True

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._folder / _name(self.number)

    def open(self) -> int:
        """Return a file descriptor of it, to be closed by the caller."""
        return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def map(self) -> mmap.mmap:
        """Return its memory, mapped when it is first asked for; no file descriptor stays open.

        Raises:
            OSError: the file cannot be opened, is shorter, or the system refuses the mapping.
        """
        if self._memory is None:
            fd = self.open()
            try:
                size = os.fstat(fd).st_size
                if size < self.capacity:  # what is not there cannot be mapped: to touch it ends the process
                    raise OSError(errno.EIO, f"segment {self.number} has {size} of {self.capacity} bytes")
                memory = mmap.mmap(-1, self.capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                map_over(memory, 0, fd, self.capacity, writable=True)
            finally:
                os.close(fd)
            self._memory = memory
        return self._memory

    def checksum(self, size: int) -> int:
        """Return the checksum of its first `size` bytes, read as a file: a bad disk is an error then, not a signal.

        Raises:
            OSError: they cannot be read, or the file is shorter.
        """
        fd = self.open()
        try:
            return _checksum(fd, size)
        finally:
            os.close(fd)

    def fill(self, spans: Iterable[tuple[int, int]], read: Callable[[memoryview, int], None]) -> int:
        """Copy spans (start and size) of something into it, one after the other; return the checksum of all.

        Args:
            spans: where they start there, and their sizes.
            read: copies from a start into memory until that is full.

        Raises:
            OSError: it cannot be mapped, or what `read` raises.
        """
        memory, at, digest = memoryview(self.map()), 0, xxhash.xxh3_64()
        for start, size in spans:
            for done in range(0, size, _COPY_BYTES):
                part = memory[at : at + min(_COPY_BYTES, size - done)]
                read(part, start + done)
                digest.update(part)  # while it is in the cache
                at += len(part)
        return digest.intdigest()

    def sync(self) -> None:
        """Wait until what was written is on the disk, the name of the file included."""
        fd = self.open()
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if self.is_new:
            sync_folder(self._folder)
            self.is_new = False

    def remove(self) -> None:
        """Remove the file; a mapping that is left keeps its bytes."""
        self._memory = None
        self.path.unlink(missing_ok=True)


class SegmentFiles:
    """The folder of segments.

    Args:
        folder: made where it is not there.
        min_free_bytes: what is left free of the disk.
    """

    def __init__(self, folder: Path, *, min_free_bytes: int = MIN_FREE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._last_number = 0
        self._numbering = threading.Lock()
        self._free_bytes = 0
        self._free_known_until = float("-inf")

    def create(self, capacity: int) -> Segment:
        """Make a file of so many bytes; any thread may.

        Raises:
            OSError: there is no room on the disk.
        """
        self.check_room(capacity)
        with self._numbering:
            self._last_number += 1
            number = self._last_number
        path = self._folder / _name(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, capacity)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self._free_known_until = float("-inf")
        return Segment(self._folder, number, capacity)

    def check_room(self, size: int) -> None:
        """Check that the disk has room for so many bytes besides what is left free.

        Raises:
            OSError: it has not.
        """
        now = time.monotonic()
        if now >= self._free_known_until:
            stat = os.statvfs(self._folder)
            self._free_bytes = stat.f_bavail * stat.f_frsize
            self._free_known_until = now + _ROOM_KNOWN_SECONDS
        if self._free_bytes - size < self._min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the disk of {self._folder} has {self._free_bytes} bytes free; {self._min_free_bytes} stay so",
            )

    def drop(self, segment: Segment) -> None:
        """Remove a file, soon."""
        _ASIDE.submit(segment.remove)

    def found(self) -> set[int]:
        """Return the numbers of the files that are there; new ones are numbered after them."""
        with os.scandir(self._folder) as entries:
            numbers = {int(entry.name[:-4]) for entry in entries if _NAME.fullmatch(entry.name)}
        self.number_after(max(numbers, default=0))
        return numbers

    def take(self, number: int, capacity: int | None = None) -> Segment:
        """Return a file that is there.

        Args:
            number: its name.
            capacity: its size, which is not looked at before it is used; None: what it is.
        """
        segment = Segment(self._folder, number, 0)
        segment.capacity = segment.path.stat().st_size if capacity is None else capacity
        return segment

    def number_after(self, number: int) -> None:
        """Give no new file a number up to this one, such as one that is missing but that a put has its bytes in."""
        self._last_number = max(self._last_number, number)


def is_passing(error: OSError) -> bool:
    """Whether an error says that the process lacks files or memory now, and nothing of what is on the disk."""
    return error.errno in _PASSING


def _name(number: int) -> str:
    return f"{number:08d}.seg"


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(fd: int, size: int) -> int:
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    at = 0
    while at < size:
        count = os.preadv(fd, [buffer[: min(size - at, _READ_BYTES)]], at)
        if not count:
            raise OSError(errno.EIO, f"the file ends after {at} bytes, {size} were written")
        digest.update(buffer[:count])
        at += count
    return digest.intdigest()
