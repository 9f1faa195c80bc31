"""Memory shared between a worker process and its parent: written by the worker, mapped by the parent, used again.

A block is an anonymous file. The worker passes its descriptor once, with the first batch in it, and the parent keeps
it mapped. When no tensor of the parent lies in the block any more, the worker is told and writes the next batch into
it: pages that are new to a process cost more than the bytes that go into them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tq_service.wire.dtypes import Bytes

_GRAIN_BYTES: Final = 1 << 20
# A block may be this much larger than what is written: batches are of like size, not of the same.
_MOST_SLACK: Final = 1.5
_KEPT_COUNT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRef:
    """Names a block that has something for the parent.

    Attributes:
        block_id: its number, of those of one worker.
        size_bytes: how large it is.
        is_new: whether its descriptor comes with it.
        retired: blocks that the worker has given up.
    """

    block_id: int
    size_bytes: int
    is_new: bool
    retired: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    block_id: int
    size_bytes: int
    descriptor: int


class BlockWriter:
    """The blocks of a worker, in the worker."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._idle: deque[_Block] = deque()
        self._next_id = 0

    def write(self, parts: Sequence[tuple[int, Bytes]], size_bytes: int) -> BlockRef:
        """Write `(offset, bytes)` parts into a block of at least `size_bytes`.

        Raises:
            OSError: the system has no memory or no descriptor left.
        """
        block = self._reuse(size_bytes)
        is_new = block is None
        if block is None:
            block = self._create(size_bytes)
        for offset, part in parts:
            _write(block.descriptor, part, offset)
        return BlockRef(
            block_id=block.block_id, size_bytes=block.size_bytes, is_new=is_new, retired=self._retire_surplus()
        )

    def descriptor(self, ref: BlockRef) -> int:
        """Return the file descriptor of a block."""
        return self._blocks[ref.block_id].descriptor

    def release(self, block_ids: Sequence[int]) -> None:
        """Take blocks back that the parent does not use any more; the latest is used first."""
        self._idle.extendleft(self._blocks[block_id] for block_id in block_ids)

    def _reuse(self, size_bytes: int) -> _Block | None:
        most = size_bytes * _MOST_SLACK + _GRAIN_BYTES
        for block in self._idle:
            if size_bytes <= block.size_bytes <= most:
                self._idle.remove(block)
                return block
        return None

    def _create(self, size_bytes: int) -> _Block:
        size_bytes = max(1, -(-size_bytes // _GRAIN_BYTES)) * _GRAIN_BYTES
        block = _Block(block_id=self._next_id, size_bytes=size_bytes, descriptor=_anonymous_file(size_bytes))
        self._next_id += 1
        self._blocks[block.block_id] = block
        return block

    def _retire_surplus(self) -> tuple[int, ...]:
        surplus = [self._idle.pop() for _ in range(len(self._idle) - _KEPT_COUNT)]
        for block in surplus:
            os.close(self._blocks.pop(block.block_id).descriptor)
        return tuple(block.block_id for block in surplus)


class BlockReader:
    """The blocks of one worker, in the parent."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}
        # Blocks may come back at any point of any thread.
        self._released: deque[int] = deque()

    def open(self, ref: BlockRef, descriptor: int | None) -> Bytes:
        """Return the bytes of a block; it is released when neither they nor any view or tensor on them is left.

        Args:
            ref: the block.
            descriptor: of a new block, which is closed here.
        """
        for block_id in ref.retired:
            del self._mappings[block_id]
        if descriptor is not None:
            try:
                self._mappings[ref.block_id] = mmap.mmap(descriptor, ref.size_bytes, flags=_MAP_FLAGS)
            finally:
                os.close(descriptor)
        array: Bytes = np.frombuffer(self._mappings[ref.block_id], np.uint8)
        weakref.finalize(array, self._released.append, ref.block_id).atexit = False
        return array

    def take_released(self) -> tuple[int, ...]:
        """Return the blocks that were released since the last call."""
        return tuple(self._released.popleft() for _ in range(len(self._released)))


# Populated at once: a fault for each page would take several times as long.
_MAP_FLAGS: Final = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


def _anonymous_file(size_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tq-batch", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _write(descriptor: int, part: Bytes, offset: int) -> None:
    view: memoryview = part.data
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
