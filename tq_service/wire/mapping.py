"""Mappings of entire memfds or of new anonymous memory, which this process can pin for a device.

The mappings in this module do not keep file descriptors open. In contrast, Python's `mmap` keeps a file descriptor open
for each mapping, and the number of file descriptors is limited.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_PAGE_BYTES: Final = 2 << 20

_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MAP_NORESERVE: Final = 0x4000
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_FILE_PAGE: Final = np.uint64(1 << 61)  # bit in /proc/self/pagemap: the page belongs to the file and is not a copy
_IN_USE: Final = np.uint64(3 << 62)  # bits in /proc/self/pagemap: the page is in memory or in swap


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


def map_memory(fd: int, size: int, protection: int, flags: int, address: int | None = None) -> int:
    """Map memory with mmap(2), and return the address of the mapping.

    Raises:
        OSError: the operating system refused the mapping.
    """
    found: int | None = _libc().mmap(address, size, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        raise _system_error(f"could not map {size} bytes")
    return found


def advise(address: int, size: int, advice: int) -> None:
    """Advise the kernel about memory with madvise(2). Other Python threads can run during the call.

    Raises:
        OSError: the kernel rejected the advice.
    """
    if _libc().madvise(address, size, advice):
        raise _system_error(f"could not apply madvise({advice}) to a mapping of {size} bytes")


def _system_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


class Mapping:
    """Memory that remains mapped in this process until the last reference to this object is deleted.

    Args:
        fd: file descriptor of a memfd, which is mapped in full. The descriptor may be closed afterward.
        is_shared: whether writes modify the memfd. If False, writes modify only this mapping.
        is_inherited: whether forked child processes inherit the mapping.
        is_populated: whether all pages are mapped immediately instead of on first use.

    Attributes:
        address, size: address of the first byte, and size in bytes.
        is_shared, is_inherited: values of the constructor arguments.
        on_unmap: list with at most one function, which must be called before the memory is unmapped. The caller must
            remove the function from the list before calling it.

    Raises:
        OSError: the operating system refused the mapping.
    """

    _is_finalizing = staticmethod(sys.is_finalizing)  # bound here, because modules are cleared when Python exits

    def __init__(self, fd: int, *, is_shared: bool, is_inherited: bool = True, is_populated: bool = False) -> None:
        flags = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
        flags |= getattr(mmap, "MAP_POPULATE", 0) if is_populated else 0
        self._map(fd, os.fstat(fd).st_size, flags, is_inherited=is_inherited)

    def _map(self, fd: int, size: int, flags: int, *, is_inherited: bool) -> None:
        self.size = size
        self.is_shared = bool(flags & mmap.MAP_SHARED)
        self.is_inherited = is_inherited or not hasattr(mmap, "MADV_DONTFORK")
        self.on_unmap: list[Callable[[], None]] = []
        self._process_id = os.getpid()
        self.address = map_memory(fd, size, _READ_WRITE, flags)
        if not self.is_inherited:
            advise(self.address, self.size, mmap.MADV_DONTFORK)

    @classmethod
    def anonymous(cls, size: int, *, is_inherited: bool) -> Mapping:
        """Map new memory of at least `size` bytes, in huge pages if possible.

        Args:
            size: minimum number of bytes.
            is_inherited: whether forked child processes inherit the memory. Pinned memory must not be inherited,
                because the first write to a page after a fork replaces the page with an unpinned copy.
        """
        mapping = cls.__new__(cls)
        rounded = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        mapping._map(-1, rounded, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, is_inherited=is_inherited)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # raised if the system does not support huge pages
                advise(mapping.address, rounded, mmap.MADV_HUGEPAGE)
        return mapping

    @property
    def is_own(self) -> bool:
        """Whether this process created the mapping, rather than inheriting it through a fork."""
        return self._process_id == os.getpid()

    def array(self, start: int, size: int, owner: object = None) -> Bytes:
        """Return an array backed by part of the mapping.

        The array and its views keep references to the mapping and to `owner`.
        """
        return np.asarray(_Part(self, start, size, owner))

    def discard_changes(self, first_page: int, end_page: int) -> None:
        """Restore the memfd's pages in a range of a private mapping by discarding the modified pages."""
        page, count = self.address // PAGE_BYTES + first_page, end_page - first_page
        changed = _changed_pages(page, count)
        if changed is None:
            advise(page * PAGE_BYTES, count * PAGE_BYTES, mmap.MADV_DONTNEED)
        elif changed.size:
            for run in np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1):
                advise((page + int(run[0])) * PAGE_BYTES, len(run) * PAGE_BYTES, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        if self._is_finalizing() or not hasattr(self, "address"):
            return
        if self.is_own:
            with suppress(IndexError):
                self.on_unmap.pop()()
        if self.is_own or self.is_inherited:  # otherwise, the child may have mapped other memory at this address
            _libc().munmap(self.address, self.size)


class _Part:
    """The base object of an array in a mapping, which keeps references to the mapping and an owner."""

    def __init__(self, mapping: Mapping, start: int, size: int, owner: object) -> None:
        self._kept = mapping, owner
        self.__array_interface__ = {
            "data": (mapping.address + start, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _changed_pages(first_page: int, count: int) -> NDArray[np.intp] | None:
    """Return the pages that this process has modified in a private mapping, or None if they are unknown."""
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * count, 8 * first_page), np.uint64)
    except OSError:
        return None
    return np.flatnonzero((entries & _IN_USE != 0) & (entries & _FILE_PAGE == 0)) if len(entries) == count else None
