"""Memory for one put."""

from __future__ import annotations

import mmap
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.storage.blobs.segments import Segment

Backing: TypeAlias = mmap.mmap | Segment
"""What a pool keeps for reuse: anonymous memory, or a file."""


class Region:
    """Memory for one put.

    A region is pinned by those who read it and returns to its pool when it is released and no longer pinned.

    Args:
        memory: what it holds; None: that of its backing, a segment, which is mapped when it is first needed.
        size: bytes asked for.
        backing: what goes back to the pool with it; None where nothing does.

    Attributes:
        size: bytes asked for.
        backing: what goes back to the pool with it. The bytes of a put may also be elsewhere: a put in shared memory is
            copied to a segment.
        is_damaged: whether its backing is not to be used again.
    """

    __slots__ = ("_memory", "_pin_count", "_released", "backing", "is_damaged", "size")

    def __init__(self, memory: bytes | bytearray | mmap.mmap | None, size: int, backing: Backing | None = None) -> None:
        self._memory = memory
        self.size = size
        self.backing = backing
        self.is_damaged = False
        self._pin_count = 0
        self._released = False

    @property
    def capacity(self) -> int:
        """Bytes of its backing."""
        match self.backing:
            case None:
                return 0
            case Segment() as segment:
                return segment.capacity
            case memory:
                return len(memory)

    def memory(self) -> bytes | bytearray | mmap.mmap:
        """Return what it holds.

        Raises:
            OSError: a segment cannot be mapped.
        """
        if self._memory is None:
            self._memory = self.backing.map() if isinstance(self.backing, Segment) else b""
        return self._memory

    def view(self) -> memoryview:
        """Return its `size` bytes, writable while its put is received."""
        return memoryview(self.memory())[: self.size]

    def array(self) -> NDArray[np.uint8]:
        """Return its `size` bytes as an array, writable while its put is received."""
        return np.frombuffer(self.memory(), np.uint8, self.size)

    def words(self, start: int, count: int) -> NDArray[np.int64]:
        """Return `count` int64 from byte `start` on, writable while its put is received."""
        return np.frombuffer(self.memory(), np.int64, count, start)

    def close(self) -> None:
        """Let go of the memory; views that are left keep it."""
        self._memory = b""
        self.backing = None
