"""Memory that processes on the same host share through memfds, whose file descriptors are sent over Unix sockets.

The columns of a put are stored consecutively in a single memfd, each aligned to 64 bytes. Two kinds of memory are used:

- A *region* is created by the storage service, written by clients that run as the same user, and reused for later puts.
  The size of a region is fixed. Clients are trusted to write only during their own puts (see
  `dataplane.shared_memory`).
- *Sealed memory* is created and written once by a client that runs as another user, and then sealed. After sealing, no
  process, including the client, can write, shrink or grow the memory.

Programs that receive the bytes map both kinds of memory privately, so their writes do not affect other processes.
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

_PIECE_BYTES: Final = 16 << 20  # number of bytes per copying thread; smaller copies are not worth a second thread
_MOST_THREADS: Final = 4
_MOST_BUFFERS_OF_A_WRITE: Final = 1024  # IOV_MAX on Linux
_STAT_BLOCK_BYTES: Final = 512  # unit of st_blocks, regardless of the file system

if sys.platform == "linux":
    import fcntl

    _FIXED_SIZE: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    _SEALS: Final = _FIXED_SIZE | fcntl.F_SEAL_WRITE


def is_supported() -> bool:
    """Return whether this system supports sealed memfds and the transfer of file descriptors over sockets."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "recv_fds")


def check_supported() -> None:
    """Check that this system supports shared memory.

    Raises:
        OSError: the system does not support shared memory.
    """
    if not is_supported():
        raise OSError("this system does not support sealed memfds, which shared memory requires")


def map_over(memory: mmap.mmap, fd: int, size: int, *, is_writable: bool) -> None:
    """Map a file over an anonymous mapping. The file remains mapped while the anonymous mapping exists.

    Args:
        memory: anonymous mapping to replace.
        fd: file descriptor of the file, which may be closed afterward.
        size: number of bytes to map, starting at the beginning of the file.
        is_writable: whether writes to the mapping modify the file. If False, the mapping is read-only.

    Raises:
        OSError: the operating system refused the mapping.
    """
    whole = (ctypes.c_char * len(memory)).from_buffer(memory)
    protection, kind = (_READ_WRITE, mmap.MAP_SHARED) if is_writable else (mmap.PROT_READ, mmap.MAP_PRIVATE)
    map_memory(fd, size, protection, kind | _MAP_FIXED, ctypes.addressof(whole))
    if is_writable and hasattr(mmap, "MADV_HUGEPAGE"):
        # If `shmem_enabled` is set to `advise`, the kernel converts the pages to huge pages in the background.
        with suppress(OSError):
            advise(ctypes.addressof(whole), size, mmap.MADV_HUGEPAGE)


# Creating and filling memory


def new_region(size: int) -> int:
    """Create memory of `size` bytes that no process can resize, and return its file descriptor.

    The kernel allocates all pages immediately, and charges them to the control group of this process. Therefore, later
    writes to the memory cannot fail.

    Raises:
        OSError: the system is out of file descriptors or memory.
    """
    fd = os.memfd_create("tq_service", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)  # only the service's user may reopen the memory through /proc
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def free_pages(memory: mmap.mmap) -> None:
    """Return the pages of a region's writable mapping to the system, even if other processes still map the region."""
    # Python's madvise would hold the GIL, for 0.2 s in the case of a region of 256 MiB.
    whole = (ctypes.c_char * len(memory)).from_buffer(memory)
    advise(ctypes.addressof(whole), len(memory), mmap.MADV_REMOVE)


def _placed(columns: Sequence[SourceColumn]) -> Iterator[Chunk]:
    """Yield the bytes of columns, and the padding between columns, in the layout of `place_columns`.

    The padding must also be written. Otherwise, a sealed file would contain holes, which `check_sealed` rejects, and a
    region would retain old bytes.
    """
    for column in columns:
        yield from column.chunks
        yield memoryview(bytes(-column.value_bytes % ALIGNMENT_BYTES))


def fill(target: Bytes, columns: Sequence[SourceColumn]) -> None:
    """Copy columns into memory in the layout of `place_columns`, using several threads for large columns."""
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
    """Write columns to a memfd in the layout of `place_columns`, avoiding the page faults of a new mapping.

    Raises:
        OSError: the system is out of memory.
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
    """Write columns to new sealed memory in the layout of `place_columns`, and return its file descriptor.

    Raises:
        OSError: the system is out of memory or file descriptors.
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
    """Check that a file descriptor refers to fully allocated memory that can no longer change.

    Args:
        fd: file descriptor received from another process.
        size: required size in bytes. None allows any size.

    Raises:
        InvalidArgumentError: the memory is not sealed, has a different size, or is incomplete.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise InvalidArgumentError(
            f"got a file descriptor with seals {seals:#x}; expected a memfd sealed against writing, shrinking, "
            f"growing and further seals ({_SEALS:#x})"
        )
    status = os.fstat(fd)
    if size is None:
        size = status.st_size
    if status.st_size != size:
        raise InvalidArgumentError(f"got shared memory of {status.st_size} bytes; expected {size} bytes")
    if status.st_blocks * _STAT_BLOCK_BYTES < size:
        # Reading a hole allocates memory on behalf of the reading process, which may have no memory left.
        raise InvalidArgumentError(
            f"got shared memory of {size} bytes with only {status.st_blocks * _STAT_BLOCK_BYTES} bytes allocated. "
            "Write all bytes before sealing the memory"
        )


def read_into(fd: int, target: memoryview, start: int) -> None:
    """Fill `target` with the bytes of a file or shared memory, starting at offset `start`.

    Raises:
        OSError: the bytes cannot be read, or the file is too short.
    """
    while target:
        count = os.preadv(fd, [target], start)
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {start}, {len(target)} bytes before the requested end")
        start, target = start + count, target[count:]


def close_all(fds: Iterable[int]) -> None:
    """Close file descriptors. Memory is freed once neither a file descriptor nor a mapping refers to it."""
    for fd in fds:
        os.close(fd)
