"""Memory that processes of one host share: memfds, whose file descriptors are sent over a Unix socket.

A put's columns lie one after the other in one memfd, each from a multiple of 64 bytes on. There are two kinds:

- A *region* is made by the storage service, written by clients of its user, and used again for other puts. It cannot
  change its size; who may write to it is a matter of trust and of turns, see `dataplane.shared_memory`.
- *Sealed memory* is made by a client of another user, written once, and then sealed: no process can write, shrink or
  grow it any more, its writer included.

Readers map both privately: what they write changes no other process's view. Mappings here keep no file descriptor
open. Those of Python do, each its own: a process has not that many.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.wire.columns import Bytes, SourceColumn, iter_frames
from tq_service.wire.device import Chunk, on_host

_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE

PAGE_BYTES: Final = mmap.PAGESIZE

_ALIGNMENT_BYTES: Final = 64
_PIECE_BYTES: Final = 16 << 20  # that one thread copies; smaller memory is not worth a second one
_MOST_THREADS: Final = 4
_LARGE_CHUNK_BYTES: Final = 64 << 10  # worth a copy during which other threads of Python run
_MOST_BUFFERS_OF_A_WRITE: Final = 1024  # IOV_MAX of Linux
_STAT_BLOCK_BYTES: Final = 512  # the unit of st_blocks, whatever the file system
_FILE_PAGE: Final = np.uint64(1 << 61)  # in /proc/self/pagemap: a page of the file, not a copy of this process
_IN_USE: Final = np.uint64(3 << 62)  # there: a page in memory or in the swap

if sys.platform == "linux":
    import fcntl

    _FIXED_SIZE: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    _SEALS: Final = _FIXED_SIZE | fcntl.F_SEAL_WRITE


def is_supported() -> bool:
    """Whether this system has memfds with seals, and sockets that carry file descriptors."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "recv_fds")


def check_supported() -> None:
    """Check that this system can share memory.

    Raises:
        OSError: it cannot.
    """
    if not is_supported():
        raise OSError("this system has no sealed memfds")


# Mappings


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def _map(fd: int, size: int, protection: int, flags: int, address: int | None = None) -> int:
    found: int | None = _libc().mmap(address, size, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        raise _system_error(f"{size} bytes cannot be mapped")
    return found


def _system_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def map_over(memory: mmap.mmap, fd: int, size: int, *, is_writable: bool) -> None:
    """Map a file over an anonymous mapping, until that is unmapped.

    Args:
        memory: the anonymous mapping.
        fd: the file, which may be closed afterwards.
        size: bytes of the file, from its beginning.
        is_writable: whether writes go to the file; else it can only be read.

    Raises:
        OSError: the system refuses the mapping.
    """
    whole = (ctypes.c_char * len(memory)).from_buffer(memory)
    protection, kind = (_READ_WRITE, mmap.MAP_SHARED) if is_writable else (mmap.PROT_READ, mmap.MAP_PRIVATE)
    _map(fd, size, protection, kind | _MAP_FIXED, ctypes.addressof(whole))


class Mapping:
    """All of a memfd, mapped in this process until the last reference to this object is gone.

    Args:
        fd: the memfd, which may be closed afterwards.
        is_shared: whether writes go to the memfd; else they change only this mapping. Forked children do not inherit
            a shared one: they could write to it when the memfd has bytes of another put.

    Attributes:
        address, size: its first byte in memory, and its number of bytes.

    Raises:
        OSError: the system refuses it.
    """

    def __init__(self, fd: int, *, is_shared: bool) -> None:
        self.size = os.fstat(fd).st_size
        self._unmap = _libc().munmap  # kept for the end of the process
        kind = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
        self.address = _map(fd, self.size, _READ_WRITE, kind)
        if is_shared:
            _advise(self.address, self.size, mmap.MADV_DONTFORK)

    def array(self, start: int, size: int, owner: object = None) -> Bytes:
        """Return an array on a part of it, which keeps it, and `owner`, as long as the array or a view of it."""
        return np.asarray(_Part(self, start, size, owner))

    def discard_changes(self, first_page: int, end_page: int) -> None:
        """Drop the pages of a range that were written to, of a mapping that is not shared: it has the memfd's again."""
        page, count = self.address // PAGE_BYTES + first_page, end_page - first_page
        changed = _changed_pages(page, count)
        if changed is None:
            _advise(page * PAGE_BYTES, count * PAGE_BYTES, mmap.MADV_DONTNEED)
        elif changed.size:
            for run in np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1):
                _advise((page + int(run[0])) * PAGE_BYTES, len(run) * PAGE_BYTES, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._unmap(self.address, self.size)


class _Part:
    """The base of an array on a mapping."""

    def __init__(self, mapping: Mapping, start: int, size: int, owner: object) -> None:
        self._kept = mapping, owner
        self.__array_interface__ = {
            "data": (mapping.address + start, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _changed_pages(first_page: int, count: int) -> NDArray[np.intp] | None:
    """Return which pages of a private mapping are this process's own; None if the system does not tell."""
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * count, 8 * first_page), np.uint64)
    except OSError:
        return None
    return np.flatnonzero((entries & _IN_USE != 0) & (entries & _FILE_PAGE == 0)) if len(entries) == count else None


# Making and filling memory


def new_region(size: int) -> int:
    """Return the file descriptor of new memory of `size` bytes, which no process can make longer or shorter.

    The system allocates all of its pages now, and charges them to the control group of this process: no write to it
    can fail later.

    Raises:
        OSError: the system lacks file descriptors, or memory.
    """
    fd = os.memfd_create("tq_service", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)  # it is the service's user alone that may open it again below /proc
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def free_pages(memory: mmap.mmap) -> None:
    """Give the pages of a region that is mapped writable back to the system, whoever else maps it."""
    # Python's own madvise keeps the GIL: for 0.2 s with a region of 256 MiB.
    whole = (ctypes.c_char * len(memory)).from_buffer(memory)
    _advise(ctypes.addressof(whole), len(memory), mmap.MADV_REMOVE)


def _advise(address: int, size: int, advice: int) -> None:
    if _libc().madvise(address, size, advice):
        raise _system_error(f"the mapping of {size} bytes cannot be advised ({advice})")


def place_columns(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where columns of so many bytes start in the memory of a put, and the size of that memory in bytes."""
    *starts, end = accumulate((-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes), initial=0)
    return starts, end


def _placed(columns: Sequence[SourceColumn]) -> Iterator[Chunk]:
    """Yield the bytes of columns and, as `place_columns` says, what is between them.

    All is written: a file that is made longer has a hole, which `check` refuses, and a region has older bytes.
    """
    for column in columns:
        yield from column.chunks
        yield memoryview(bytes(-column.value_bytes % _ALIGNMENT_BYTES))


def fill(target: Bytes, columns: Sequence[SourceColumn]) -> None:
    """Copy columns into memory as `place_columns` says, in several threads if they are large."""
    pieces = list(iter_frames(_placed(columns), _PIECE_BYTES, None))
    thread_count = min(len(pieces), _MOST_THREADS, len(os.sched_getaffinity(0)))
    targets = [target[number * _PIECE_BYTES :][:_PIECE_BYTES] for number in range(len(pieces))]
    if thread_count <= 1:
        for each, parts in zip(targets, pieces, strict=True):
            _copy(each, parts)
        return
    with ThreadPoolExecutor(thread_count, thread_name_prefix="tq-fill") as pool:
        for _ in pool.map(_copy, targets, pieces):
            pass


def _copy(target: Bytes, parts: Sequence[Chunk]) -> None:
    view, at = target.data, 0
    for views in on_host(parts):
        for part in views:
            end = at + len(part)
            if len(part) < _LARGE_CHUNK_BYTES:
                view[at:end] = part
            else:
                target[at:end] = np.frombuffer(part, np.uint8)
            at = end


def write(fd: int, columns: Sequence[SourceColumn]) -> None:
    """Write columns into a memfd as `place_columns` says: without a mapping, whose first use costs page faults.

    Raises:
        OSError: the system lacks memory.
    """
    at = 0
    for views in on_host(_placed(columns)):
        waiting, first = list(views), 0
        while first < len(waiting):
            written = os.pwritev(fd, waiting[first : first + _MOST_BUFFERS_OF_A_WRITE], at)
            at += written
            while first < len(waiting) and written >= len(waiting[first]):
                written -= len(waiting[first])
                first += 1
            if written:
                waiting[first] = waiting[first][written:]


def write_sealed(columns: Sequence[SourceColumn]) -> int:
    """Return the file descriptor of new, sealed memory that has the columns as `place_columns` says.

    Raises:
        OSError: the system lacks memory or file descriptors.
    """
    fd = os.memfd_create("tq_service", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write(fd, columns)
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def check_sealed(fd: int, size: int | None = None) -> None:
    """Check that a file descriptor is memory that is complete and cannot change.

    Args:
        fd: the file descriptor.
        size: bytes that it must have; None: any number.

    Raises:
        InvalidArgumentError: it is something else.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise InvalidArgumentError(
            f"a file descriptor with seals {seals:#x} was sent; expected a memfd sealed against writing, "
            f"shrinking, growing and further seals ({_SEALS:#x})"
        )
    status = os.fstat(fd)
    if size is None:
        size = status.st_size
    if status.st_size != size:
        raise InvalidArgumentError(f"shared memory of {status.st_size} bytes was sent; expected {size}")
    if status.st_blocks * _STAT_BLOCK_BYTES < size:
        # A hole takes memory of the process that reads it first, which may have none left.
        raise InvalidArgumentError(
            f"shared memory of {size} bytes was sent, of which {status.st_blocks * _STAT_BLOCK_BYTES} are "
            "there; write all of it before it is sealed"
        )


def read_into(fd: int, target: memoryview, start: int) -> None:
    """Copy bytes of a file, which shared memory is too, from `start` on until `target` is full.

    Raises:
        OSError: they cannot be read, or the file ends before.
    """
    while target:
        count = os.preadv(fd, [target], start)
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {start}, {len(target)} bytes before what was asked for")
        start, target = start + count, target[count:]


def close_all(fds: Iterable[int]) -> None:
    """Close file descriptors; the memory goes with its last one and its last mapping."""
    for fd in fds:
        os.close(fd)
