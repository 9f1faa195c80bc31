"""Memory that is reserved whole and used little by little, so that an array in it can grow where it is.

Linux backs an anonymous mapping with pages as they are first written to. Reserving far more than is needed costs
address space only, and growing costs neither a copy nor a new array: views that readers have keep their memory.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_NEVER: Final = "2"
_MAP_NORESERVE: Final = 0x4000  # Linux; the mmap module of Python 3.11 does not have it
_HUGE_PAGES_FROM: Final = 4 << 20  # where a page of 2 MiB of which little is used is a small share


def reserved_zeros(count: int, dtype: DTypeLike) -> NDArray[Any] | None:
    """Return `count` zeros that take memory only as they are written; None where that cannot be had.

    The memory is given back with the last array over it.
    """
    if not _can_reserve():
        return None
    try:
        memory = mmap.mmap(
            -1,
            count * np.dtype(dtype).itemsize,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        )
    except (OSError, ValueError, OverflowError):  # a limit of the process or of the machine
        return None
    if len(memory) > _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_PAGES_FROM)
    return np.frombuffer(memory, dtype)


@cache
def _can_reserve() -> bool:
    """Whether what is only reserved counts for nothing; a machine that never overcommits counts it as used."""
    if sys.platform != "linux":
        return False
    try:
        return _OVERCOMMIT.read_text().strip() != _NEVER
    except OSError:
        return True
