"""Memory shared by processes of one host: memfds, whose file descriptors are sent over a Unix socket.

A put's columns are stored in one memfd, one after another, each aligned to 64 bytes. There are two kinds:

- A *region* is created by the storage service, written by clients of its user, and reused for other puts. Its size is
  fixed. Write access is a matter of trust and of turns, see `dataplane.shared_memory`.
- *Sealed memory* is created by a client of another user, written once, and then sealed: no process can write, shrink or
  grow it any more, including its writer.

Both are mapped privately for readers whose program gets the bytes: their writes do not change other processes' views.
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
from contextlib import suppress
from typing import Final

from tq_service.errors import InvalidArgumentError
from tq_service.wire.columns import SourceColumn, iter_frames
from tq_service.wire.device import Chunk, copy_to_host, on_host
from tq_service.wire.host_memory import ALIGNMENT_BYTES
from tq_service.wire.mapping import Bytes, advise, map_memory

_MAP_FIXED: Final = 0x10
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE

_PIECE_BYTES: Final = 16 << 20  # copied by one thread; smaller memory is not worth a second thread
_MOST_THREADS: Final = 4
_MOST_BUFFERS_OF_A_WRITE: Final = 1024  # IOV_MAX of Linux
_STAT_BLOCK_BYTES: Final = 512  # the unit of st_blocks, whatever the file system

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
    map_memory(fd, size, protection, kind | _MAP_FIXED, ctypes.addressof(whole))
    if is_writable and hasattr(mmap, "MADV_HUGEPAGE"):
        # Where `shmem_enabled` is `advise`, the system then makes its pages huge, in the background.
        with suppress(OSError):
            advise(ctypes.addressof(whole), size, mmap.MADV_HUGEPAGE)


# Making and filling memory


def new_region(size: int) -> int:
    """Return the file descriptor of new memory of `size` bytes, whose size no process can change.

    The system allocates all of its pages now, and charges them to the control group of this process: no write to it
    can fail later.

    Raises:
        OSError: the system lacks file descriptors, or memory.
    """
    fd = os.memfd_create("tq_service", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)  # only the service's user may reopen it through /proc
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def free_pages(memory: mmap.mmap) -> None:
    """Return the pages of a writable mapping of a region to the system, even if other processes map it."""
    # Python's own madvise keeps the GIL: for 0.2 s with a region of 256 MiB.
    whole = (ctypes.c_char * len(memory)).from_buffer(memory)
    advise(ctypes.addressof(whole), len(memory), mmap.MADV_REMOVE)


def _placed(columns: Sequence[SourceColumn]) -> Iterator[Chunk]:
    """Yield the bytes of columns with the padding between them, laid out by `place_columns`.

    The padding is written, too: extending a file leaves a hole, which `check_sealed` refuses; a region has old bytes.
    """
    for column in columns:
        yield from column.chunks
        yield memoryview(bytes(-column.value_bytes % ALIGNMENT_BYTES))


def fill(target: Bytes, columns: Sequence[SourceColumn]) -> None:
    """Copy columns into memory, laid out by `place_columns`, with several threads if they are large."""
    pieces = list(iter_frames(_placed(columns), _PIECE_BYTES, None))
    thread_count = min(len(pieces), _MOST_THREADS, len(os.sched_getaffinity(0)))
    targets = [target[number * _PIECE_BYTES :][:_PIECE_BYTES] for number in range(len(pieces))]
    if thread_count <= 1:
        for each, parts in zip(targets, pieces, strict=True):
            copy_to_host(each, parts)
        return
    with ThreadPoolExecutor(thread_count, thread_name_prefix="tq-fill") as pool:
        for _ in pool.map(copy_to_host, targets, pieces):
            pass


def write(fd: int, columns: Sequence[SourceColumn]) -> None:
    """Write columns into a memfd, laid out by `place_columns`; without a mapping, whose first use costs page faults.

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
    """Return the file descriptor of new, sealed memory with the columns, laid out by `place_columns`.

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
        size: required size in bytes; None: any.

    Raises:
        InvalidArgumentError: it is not.
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
        # Reading a hole allocates memory in the reading process, which may have none left.
        raise InvalidArgumentError(
            f"shared memory of {size} bytes was sent with only {status.st_blocks * _STAT_BLOCK_BYTES} bytes "
            "allocated; write all of it before it is sealed"
        )


def read_into(fd: int, target: memoryview, start: int) -> None:
    """Fill `target` with the bytes of a file or of shared memory from `start`.

    Raises:
        OSError: they cannot be read, or the file ends before.
    """
    while target:
        count = os.preadv(fd, [target], start)
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {start}, {len(target)} bytes before the requested end")
        start, target = start + count, target[count:]


def close_all(fds: Iterable[int]) -> None:
    """Close file descriptors; the memory is freed with its last one and its last mapping."""
    for fd in fds:
        os.close(fd)
