"""Memory shared by processes of one host: sealed memfds, whose file descriptors are sent over a Unix socket.

A put's columns lie one after the other, each from a multiple of 64 bytes on, in one memfd or in several of equal size.
Once written it is sealed: no process, its writer included, can write, shrink or grow it any more, so readers may map it
without being harmed by others, and a private mapping may be written to without changing what others see. The kernel
frees the memory with the last file descriptor and mapping, however their processes end.

The memory is filled by `write`, not through a mapping: whole pages are then neither zeroed nor faulted in first.
Mappings here keep no file descriptor open. Those of Python do, each its own: a process has not that many.
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
from typing import Any, Final, TypeAlias

import numpy as np

from tq_service.errors import InvalidArgumentError
from tq_service.wire.columns import Bytes, SourceColumn, iter_frames
from tq_service.wire.device import Chunk, on_host

_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE


def _map(fd: int | None, start: int, size: int, *, protection: int, address: int | None = None) -> int:
    """Map a part of a file and return its address.

    Args:
        fd: the file; None: memory instead of one.
        start: where the part starts in it, a multiple of a page.
        size: bytes.
        protection: of `mmap.PROT_*`.
        address: what it takes the place of; None: where the system likes.

    Raises:
        OSError: the system refuses it.
    """
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    flags |= (mmap.MAP_ANONYMOUS if fd is None else 0) | (0 if address is None else _MAP_FIXED)
    found: int | None = _libc().mmap(address, size, protection, flags, -1 if fd is None else fd, start)
    if found is None or found == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"{size} bytes cannot be mapped: {os.strerror(error)}")
    return found


def map_over(memory: mmap.mmap, start: int, fd: int, size: int) -> None:
    """Put a file in the place of the part of an anonymous mapping that begins at `start`, a multiple of a page.

    It can only be read from then on, and is unmapped with the rest.

    Args:
        memory: the anonymous mapping.
        start: where in it the file goes.
        fd: the file, which may be closed afterwards.
        size: bytes of the file, from its beginning.

    Raises:
        OSError: the system refuses the mapping.
    """
    whole = (ctypes.c_char * len(memory)).from_buffer(memory)
    _map(fd, 0, size, protection=mmap.PROT_READ, address=ctypes.addressof(whole) + start)


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
    return library


if sys.platform == "linux":
    import fcntl

    _SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

PAGE_BYTES: Final = mmap.PAGESIZE

Piece: TypeAlias = tuple[int, int, int]
"""A part of shared memory: file descriptor, where it starts, its size in bytes."""

_ALIGNMENT_BYTES: Final = 64
_GRAIN_BYTES: Final = 2 << 20  # a huge page
_SEGMENT_BYTES: Final = 32 << 20
_MOST_SEGMENTS: Final = 64
_MOST_THREADS: Final = 4
_MOST_BUFFERS_OF_A_WRITE: Final = 1024  # IOV_MAX of Linux
_STAT_BLOCK_BYTES: Final = 512  # the unit of st_blocks, whatever the file system


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


def place_columns(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where columns of so many bytes start in the memory of a put, and the size of that memory in bytes."""
    *starts, end = accumulate((-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes), initial=0)
    return starts, end


def segment_sizes(size: int) -> list[int]:
    """Return the sizes of the memfds that make up `size` bytes of memory: equal ones, and a last one of at most that.

    Several, so that several threads can fill them: the system lets one thread at a time write to a memfd.
    """
    each = segment_bytes(size)
    return [min(each, size - start) for start in range(0, size, each)]


def segment_bytes(size: int) -> int:
    """Return the size of all memfds but the last one of `size` bytes of memory."""
    return max(_SEGMENT_BYTES, -(-size // (_MOST_SEGMENTS * _GRAIN_BYTES)) * _GRAIN_BYTES)


def write_columns(columns: Sequence[SourceColumn]) -> list[int]:
    """Return the file descriptors of new, sealed memory that has the columns as `place_columns` says.

    Raises:
        OSError: the system has no memory, or no file descriptors, left.
    """
    _, size = place_columns(column.value_bytes for column in columns)
    segments = list(iter_frames(_placed(columns), segment_bytes(size), None))
    thread_count = min(len(segments), _MOST_THREADS, len(os.sched_getaffinity(0)))
    fds: list[int] = []
    try:
        for _ in segments:
            fds.append(os.memfd_create("tq_service", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))  # noqa: PERF401  (all are closed)
        if thread_count <= 1:
            for fd, parts in zip(fds, segments, strict=True):
                _fill(fd, parts)
        else:
            with ThreadPoolExecutor(thread_count, thread_name_prefix="tq-fill") as pool:
                for _ in pool.map(_fill, fds, segments):
                    pass
    except BaseException:
        close_all(fds)
        raise
    return fds


def _placed(columns: Sequence[SourceColumn]) -> Iterator[Chunk]:
    """Yield the bytes of columns and, as `place_columns` says, what is between them.

    All is written: a file that is made longer has a hole, which `check` refuses.
    """
    for column in columns:
        yield from column.chunks
        yield memoryview(bytes(-column.value_bytes % _ALIGNMENT_BYTES))


def _fill(fd: int, parts: Sequence[Chunk]) -> None:
    """Write a memfd and seal it."""
    for views in on_host(parts):
        _write(fd, views)
    _seal(fd)


def _write(fd: int, views: Sequence[memoryview]) -> None:
    waiting, first = list(views), 0
    while first < len(waiting):
        written = os.writev(fd, waiting[first : first + _MOST_BUFFERS_OF_A_WRITE])
        while first < len(waiting) and written >= len(waiting[first]):
            written -= len(waiting[first])
            first += 1
        if written:
            waiting[first] = waiting[first][written:]


def _seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def check(fd: int, size: int) -> None:
    """Check that a file descriptor is memory of `size` bytes that cannot change and that is there to be read.

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
    if status.st_size != size:
        raise InvalidArgumentError(f"shared memory of {status.st_size} bytes was sent; expected {size}")
    if status.st_blocks * _STAT_BLOCK_BYTES < size:
        # A hole takes memory of the process that reads it first, which may have none left.
        raise InvalidArgumentError(
            f"shared memory of {size} bytes was sent, of which {status.st_blocks * _STAT_BLOCK_BYTES} are "
            "there; write all of it before it is sealed"
        )


def map_private(pieces: Sequence[Piece]) -> Bytes:
    """Return pieces of shared memory one after the other, without a copy.

    Writing to the array changes only this process's view. The memory lives as long as the array or a tensor on it; the
    file descriptors are not needed any more.

    Args:
        pieces: all but the first start at 0, and all but the last end at a multiple of a page.

    Raises:
        OSError: the system refuses the mapping.
    """
    return np.asarray(_PrivateMapping(pieces))


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


class _PrivateMapping:
    """Pieces of memfds, mapped next to each other until the last array on them is gone.

    Python's own mmap objects keep a file descriptor open each; a process that keeps thousands of tensors has not that
    many.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        _, start, _ = pieces[0]
        before = start % PAGE_BYTES
        size = sum(size for _, _, size in pieces)
        self._size = before + size
        self._unmap = _libc().munmap  # kept for the end of the process
        # The whole range first, for the pieces to take the place of its parts.
        self._address: int | None = _map(None, 0, self._size, protection=0)
        at = self._address
        for fd, first, length in pieces:
            inside = first % PAGE_BYTES
            _map(fd, first - inside, inside + length, protection=_READ_WRITE, address=at)
            at += inside + length
        self.__array_interface__ = {
            "data": (self._address + before, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        address = getattr(self, "_address", None)
        if address is not None:
            self._unmap(address, self._size)
