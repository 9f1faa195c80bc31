"""Memory shared between a worker process and its parent: written by the worker, mapped by the parent, used again.

A shared buffer is an anonymous file. The worker passes its descriptor once, with the first batch in it, and the parent
keeps it mapped. When the last tensor of the parent that lies in the buffer is gone, the worker learns it with its next
request, and may write another batch into the buffer: pages that are new to a process cost more than the bytes that go
into them.
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

from tq_service.wire.columns import Bytes

_GRAIN_BYTES: Final = 1 << 20
# A buffer may be this much larger than what is written: batches are of similar size, not of the same.
_MOST_SLACK: Final = 1.5
_KEPT_COUNT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBufferRef:
    """Names a buffer that has a batch for the parent.

    Attributes:
        buffer_id: its number, of those of one worker.
        size_bytes: its size.
        is_new: whether its descriptor follows.
        retired: buffers that the worker has closed.
    """

    buffer_id: int
    size_bytes: int
    is_new: bool
    retired: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedBuffer:
    buffer_id: int
    size_bytes: int
    descriptor: int


class SharedBufferWriter:
    """The buffers of a worker, in the worker; used by its main thread only."""

    def __init__(self) -> None:
        self._buffers: dict[int, _SharedBuffer] = {}
        self._idle: deque[_SharedBuffer] = deque()
        self._next_id = 0

    def write(self, parts: Sequence[tuple[int, Bytes]], size_bytes: int) -> SharedBufferRef:
        """Write `(offset, bytes)` parts into a buffer of at least `size_bytes`.

        Raises:
            OSError: the system has no memory or no descriptor left.
        """
        buffer = self._reuse(size_bytes)
        is_new = buffer is None
        if buffer is None:
            buffer = self._create(size_bytes)
        for offset, part in parts:
            _write(buffer.descriptor, part, offset)
        return SharedBufferRef(
            buffer_id=buffer.buffer_id, size_bytes=buffer.size_bytes, is_new=is_new, retired=self._retire_surplus()
        )

    def descriptor(self, ref: SharedBufferRef) -> int:
        """Return the file descriptor of a buffer, which stays open here."""
        return self._buffers[ref.buffer_id].descriptor

    def release(self, buffer_ids: Sequence[int]) -> None:
        """Make buffers writable again that the parent does not use any more; the latest is used first."""
        self._idle.extendleft(self._buffers[buffer_id] for buffer_id in buffer_ids)

    def _reuse(self, size_bytes: int) -> _SharedBuffer | None:
        most = size_bytes * _MOST_SLACK + _GRAIN_BYTES
        for buffer in self._idle:
            if size_bytes <= buffer.size_bytes <= most:
                self._idle.remove(buffer)
                return buffer
        return None

    def _create(self, size_bytes: int) -> _SharedBuffer:
        size_bytes = max(1, -(-size_bytes // _GRAIN_BYTES)) * _GRAIN_BYTES
        buffer = _SharedBuffer(buffer_id=self._next_id, size_bytes=size_bytes, descriptor=_anonymous_file(size_bytes))
        self._next_id += 1
        self._buffers[buffer.buffer_id] = buffer
        return buffer

    def _retire_surplus(self) -> tuple[int, ...]:
        surplus = [self._idle.pop() for _ in range(len(self._idle) - _KEPT_COUNT)]
        for buffer in surplus:
            os.close(self._buffers.pop(buffer.buffer_id).descriptor)
        return tuple(buffer.buffer_id for buffer in surplus)


class SharedBufferReader:
    """The buffers of one worker, in the parent."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}
        # Finalizers append to it, at any point of any thread; a deque needs no lock for that.
        self._released: deque[int] = deque()

    def open(self, ref: SharedBufferRef, descriptor: int | None) -> Bytes:
        """Return the bytes of a buffer; it is released when neither they nor any view or tensor on them is left.

        Args:
            ref: the buffer.
            descriptor: of a new buffer; it is closed here.
        """
        # The worker retires only what was released here, so no array lies in these mappings any more.
        for buffer_id in ref.retired:
            del self._mappings[buffer_id]
        if descriptor is not None:
            try:
                self._mappings[ref.buffer_id] = mmap.mmap(descriptor, ref.size_bytes, flags=_MAP_FLAGS)
            finally:
                os.close(descriptor)
        array: Bytes = np.frombuffer(self._mappings[ref.buffer_id], np.uint8)
        weakref.finalize(array, self._released.append, ref.buffer_id).atexit = False
        return array

    def take_released(self) -> tuple[int, ...]:
        """Return the buffers that were released since the last call."""
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
