"""Memory that gets are received into, used again when the tensors in it are gone.

Pages that are new to a process cost the system more than the bytes cost to receive: gets of 256 MiB were seen to vary
from 0.5 to 2.2 GB/s, all of the difference being system time. A training loop gets batches of like size and drops them,
so a few blocks are enough for all of them.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import Final

import numpy as np

from tq_service.wire.columns import Bytes

# Below this malloc reuses memory well enough, see `keep_frame_buffers`.
_SMALL_BYTES: Final = 4 << 20
_GRAIN_BYTES: Final = 2 << 20  # a huge page
# For batches of a GiB; a process that gets smaller ones keeps the few blocks that it had in the last minute.
_KEPT_BYTES: Final = 2 << 30
_KEPT_SECONDS: Final = 60.0
# A block may be this much larger than what is asked for: batches are of like size, not of the same.
_MOST_SLACK: Final = 1.25


class ReceiveBuffers:
    """Hands out arrays; their memory comes back by itself when neither they nor any view or tensor on them is left.

    Unused blocks are kept up to `kept_bytes` together and for `kept_seconds` each, checked whenever one is asked for or
    comes back. May be used by several threads: all state is in a deque, since a block can come back at any point of any
    thread, in the middle of these methods too.

    Args:
        kept_bytes: most bytes of unused blocks.
        kept_seconds: how long an unused block is kept.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES, kept_seconds: float = _KEPT_SECONDS) -> None:
        self._kept_bytes = kept_bytes
        self._kept_seconds = kept_seconds
        self._unused: deque[tuple[float, mmap.mmap]] = deque()

    @property
    def unused_bytes(self) -> int:
        """Bytes of the blocks that are kept."""
        return sum(len(block) for _, block in list(self._unused))

    def take(self, size: int) -> Bytes:
        """Return an array of `size` bytes; what they are is not defined."""
        if size < _SMALL_BYTES:
            return np.empty(size, np.uint8)
        block = self._reuse(size)
        if block is None:
            block = _map(-(-size // _GRAIN_BYTES) * _GRAIN_BYTES)
        array: Bytes = np.frombuffer(block, np.uint8, size)
        # Views and tensors keep this array alive, not the block.
        weakref.finalize(array, self._return, block).atexit = False
        return array

    def _reuse(self, size: int) -> mmap.mmap | None:
        most = size * _MOST_SLACK + _GRAIN_BYTES
        found = None
        kept = []
        for since, block in self._take_all():
            if found is None and size <= len(block) <= most:
                found = block
            else:
                kept.append((since, block))
        self._keep(kept)
        return found

    def _return(self, block: mmap.mmap) -> None:
        self._keep([(time.monotonic(), block), *self._take_all()])

    def _take_all(self) -> list[tuple[float, mmap.mmap]]:
        """Take the unused blocks, the latest first; a thread that asks meanwhile finds none and maps a new one."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._unused.pop())
        return taken

    def _keep(self, blocks: list[tuple[float, mmap.mmap]]) -> None:
        """Keep blocks, the latest first, as far as the limits allow; the system gets the others back."""
        oldest = time.monotonic() - self._kept_seconds
        remaining = self._kept_bytes
        for since, block in blocks:
            if since < oldest or len(block) > remaining:
                continue
            remaining -= len(block)
            self._unused.appendleft((since, block))


def _map(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


# Of this process: clients come and go, and batches outlive them.
RECEIVE_BUFFERS: Final = ReceiveBuffers()
