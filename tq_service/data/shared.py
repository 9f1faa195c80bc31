"""Whole batches as bytes, and the memory that a worker process and its parent share for them.

A batch is one stretch of bytes, from a worker to its parent (one copy into a shared buffer, none out of it) and from
the first replica of a rank to the others (a broadcast). The tensors of its columns lie behind one another, and the
receiver's tensors are views of the bytes. All else, the meta and objects with whatever is in them, is pickled; tensors
within objects come out of the pickle with memory of their own, since a micro-batch does not copy them.

A shared buffer is an anonymous file. The worker passes its descriptor once, with the first batch in it, and the parent
keeps it mapped. When the last tensor of the parent that lies in the buffer is gone, the worker learns it with its next
request, and may write another batch into the buffer: pages that are new to a process cost more than the bytes that go
into them.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from tensordict import TensorDict

from tq_service.data.columns import FlatBatch, build, flatten
from tq_service.data.source import FetchedBatch
from tq_service.wire.columns import Bytes, tensor_bytes

_ALIGNMENT: Final = 64
_GRAIN_BYTES: Final = 1 << 20
# A buffer may be this much larger than what is written: batches are of similar size, not of the same.
_MOST_SLACK: Final = 1.5
_KEPT_COUNT: Final = 2
# Populated at once: a fault for each page would take several times as long.
_MAP_FLAGS: Final = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the parts of a batch lie in its bytes.

    Attributes:
        index: its batch_index.
        places: begin and end of each part: the pickle, and then the tensors of the columns.
    """

    index: int
    places: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts, with the gaps between them."""
        return self.places[-1][1]


def lay_out(batch: FetchedBatch) -> tuple[BatchLayout, list[Bytes]]:
    """Return how a batch lies in its bytes, and its parts.

    Raises:
        Exception: whatever the pickling of an object raises.
    """
    content = flatten(batch.data) if isinstance(batch.data, TensorDict) else batch.data
    file = io.BytesIO()
    pickler = _Pickler(file, content.parts() if isinstance(content, FlatBatch) else ())
    pickler.dump((batch.meta, content))
    parts = [np.frombuffer(part, np.uint8) for part in (file.getbuffer(), *(each.raw() for each in pickler.beside))]
    places, end = [], 0
    for part in parts:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + part.nbytes
        places.append((begin, end))
    return BatchLayout(batch.index, tuple(places)), parts


def open_batch(layout: BatchLayout, data: Bytes) -> FetchedBatch:
    """Return the batch; its tensors lie in the bytes, and keep the buffer of these from being written again."""
    pickled, *tensors = (data[begin:end] for begin, end in layout.places)
    meta, content = pickle.loads(pickled.data, buffers=tensors)  # noqa: S301  (of a process of this program)
    return FetchedBatch(
        index=layout.index, data=build(content) if isinstance(content, FlatBatch) else content, meta=meta
    )


class _Pickler(pickle.Pickler):
    """Pickles a batch: the bytes of its columns' tensors beside the pickle, those of tensors within objects in it."""

    def __init__(self, file: io.BytesIO, columns: Iterable[torch.Tensor | list[Any]]) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._is_inside)
        self.beside: list[pickle.PickleBuffer] = []
        self._ids_beside = {id(each) for part in columns for each in (part if isinstance(part, list) else (part,))}

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is not torch.Tensor
            or value.device.type != "cpu"
            or value.layout is not torch.strided
            or value.is_quantized
        ):
            return NotImplemented
        data = tensor_bytes(value)
        if id(value) not in self._ids_beside:
            return _tensor_of, (bytearray(data), value.dtype, tuple(value.shape))
        self.beside.append(pickle.PickleBuffer(data))
        return _tensor_of, (self.beside[-1], value.dtype, tuple(value.shape))

    def _is_inside(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer goes into the pickle, as that of an array does."""
        return not self.beside or buffer is not self.beside[-1]


def _tensor_of(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """A batch in a shared buffer.

    Attributes:
        layout: where its parts lie.
        buffer_id: the buffer's descriptor in the worker.
        buffer_bytes: the buffer's size.
        is_new: whether a descriptor for the parent follows.
        retired: buffers that the worker has closed.
    """

    layout: BatchLayout
    buffer_id: int
    buffer_bytes: int
    is_new: bool
    retired: tuple[int, ...]


class SharedBufferWriter:
    """The buffers of a worker, in the worker; used by its main thread only."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._idle: deque[int] = deque()

    def share(self, batch: FetchedBatch) -> SharedBatch:
        """Write a batch into a buffer.

        Raises:
            OSError: the system has no memory or no descriptor left.
            Exception: whatever the pickling of an object raises.
        """
        layout, parts = lay_out(batch)
        most_bytes = layout.size_bytes * _MOST_SLACK + _GRAIN_BYTES
        fitting = (each for each in self._idle if layout.size_bytes <= self._sizes[each] <= most_bytes)
        buffer = next(fitting, None)
        is_new = buffer is None
        if buffer is None:
            size_bytes = max(1, -(-layout.size_bytes // _GRAIN_BYTES)) * _GRAIN_BYTES
            buffer = _anonymous_file(size_bytes)
            self._sizes[buffer] = size_bytes
        else:
            self._idle.remove(buffer)
        for (begin, _), part in zip(layout.places, parts, strict=True):
            _write(buffer, part, begin)
        retired = tuple(self._idle.pop() for _ in range(len(self._idle) - _KEPT_COUNT))
        for surplus in retired:
            os.close(surplus)
            del self._sizes[surplus]
        return SharedBatch(layout, buffer, self._sizes[buffer], is_new, retired)

    def release(self, buffer_ids: Sequence[int]) -> None:
        """Make buffers writable again that the parent does not use any more; the latest is used first."""
        self._idle.extendleft(buffer_ids)


class SharedBufferReader:
    """The buffers of one worker, in the parent."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}
        # Finalizers append to it, at any point of any thread; a deque needs no lock for that.
        self._released: deque[int] = deque()

    def open(self, shared: SharedBatch, descriptor: int | None) -> Bytes:
        """Return the bytes of a buffer; it is released when neither they nor any view or tensor on them is left.

        Args:
            shared: the batch in the buffer.
            descriptor: of a new buffer; it is closed here.
        """
        # The worker retires only what was released here, so no array lies in these mappings any more.
        for buffer_id in shared.retired:
            del self._mappings[buffer_id]
        if descriptor is not None:
            try:
                self._mappings[shared.buffer_id] = mmap.mmap(descriptor, shared.buffer_bytes, flags=_MAP_FLAGS)
            finally:
                os.close(descriptor)
        array: Bytes = np.frombuffer(self._mappings[shared.buffer_id], np.uint8)
        weakref.finalize(array, self._released.append, shared.buffer_id).atexit = False
        return array

    def take_released(self) -> tuple[int, ...]:
        """Return the buffers that were released since the last call."""
        return tuple(self._released.popleft() for _ in range(len(self._released)))


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
