"""Memory for one put."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray


class Region:
    """Memory for one put.

    A region is pinned by those who read it and returns to its pool when it is released and no longer pinned.

    Attributes:
        size: bytes asked for.
        capacity: bytes held; 0 where they are not the pool's to keep.
    """

    __slots__ = ("_memory", "_pin_count", "_released", "capacity", "size")

    def __init__(self, memory: bytearray | mmap.mmap, size: int, capacity: int) -> None:
        self._memory = memory
        self.size = size
        self.capacity = capacity
        self._pin_count = 0
        self._released = False

    def view(self) -> memoryview:
        """Return its `size` bytes, writable."""
        return memoryview(self._memory)[: self.size]

    def array(self) -> NDArray[np.uint8]:
        """Return its `size` bytes as an array, writable."""
        return np.frombuffer(self._memory, np.uint8, self.size)

    def words(self, start: int, count: int) -> NDArray[np.int64]:
        """Return `count` int64 from byte `start` on, writable."""
        return np.frombuffer(self._memory, np.int64, count, start)

    def close(self) -> None:
        """Let go of the memory; views that are left keep it."""
        self._memory = bytearray()
