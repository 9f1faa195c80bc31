"""Mappings that keep no file descriptor open. Those of Python do, each its own: a process has not that many."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final

_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE


def map_memory(
    fd: int,
    start: int,
    size: int,
    *,
    protection: int,
    address: int | None = None,
    shared: bool = False,
    anonymous: bool = False,
) -> int:
    """Map a part of a file and return its address.

    Args:
        fd: the file; -1 with `anonymous`.
        start: where the part starts in it, a multiple of a page.
        size: bytes.
        protection: of `mmap.PROT_*`.
        address: what it takes the place of; None: where the system likes.
        shared: whether what is written goes to the file, instead of being this process's own.
        anonymous: whether it is memory instead of a file.

    Raises:
        OSError: the system refuses it.
    """
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | _MAP_NORESERVE
    flags |= (mmap.MAP_ANONYMOUS if anonymous else 0) | (0 if address is None else _MAP_FIXED)
    found: int | None = _libc().mmap(address, size, protection, flags, fd, start)
    if found is None or found == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"{size} bytes cannot be mapped: {os.strerror(error)}")
    return found


def map_over(memory: mmap.mmap, start: int, fd: int, size: int, *, writable: bool = False) -> None:
    """Put a file in the place of the part of an anonymous mapping that begins at `start`, a multiple of a page.

    It is unmapped with the rest.

    Args:
        memory: the anonymous mapping.
        start: where in it the file goes.
        fd: the file, which may be closed afterwards.
        size: bytes of the file, from its beginning.
        writable: whether what is written there goes to the file; else that part can only be read from then on.

    Raises:
        OSError: the system refuses the mapping.
    """
    whole = (ctypes.c_char * len(memory)).from_buffer(memory)
    protection = READ_WRITE if writable else mmap.PROT_READ
    map_memory(fd, 0, size, protection=protection, address=ctypes.addressof(whole) + start, shared=writable)


def unmapper() -> Callable[[int, int], int]:
    """Return what unmaps memory at an address, of a size; what calls it at the end of the process keeps it."""
    unmap: Callable[[int, int], int] = _libc().munmap
    return unmap


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
