"""A whole batch as one stretch of bytes, for its way to another process of the same program.

From a worker process to its parent it is one copy into a shared buffer, and none out of it; between replicas of a rank
it is broadcast. The tensors of the columns lie one after the other, and the receiver's tensors are views of the bytes.
All else, the meta and objects with whatever is in them, is pickled; tensors within objects come out of the pickle with
memory of their own, since a micro-batch does not copy them.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from tensordict import TensorDict

from tq_service.data.batch import FetchedBatch
from tq_service.data.columns import FlatBatch, build, flatten
from tq_service.data.shared_buffers import SharedBufferRef, SharedBufferWriter
from tq_service.wire.columns import Bytes, tensor_bytes

_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A contiguous tensor in a buffer, `offset` bytes after its start."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Where the parts of a batch lie in its bytes.

    Attributes:
        index: its batch_index.
        size_bytes: bytes of the tensors and of the pickle.
        pickle_bytes: bytes of the pickle, at the start.
        places: the tensors of the columns.
    """

    index: int
    size_bytes: int
    pickle_bytes: int
    places: tuple[TensorPlace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBatch:
    """A batch in a shared buffer."""

    layout: BatchLayout
    buffer: SharedBufferRef


def share_batch(batch: FetchedBatch, buffers: SharedBufferWriter) -> SharedBatch:
    """Write a batch into a shared buffer.

    Raises:
        Exception: whatever the pickling of an object raises.
    """
    layout, parts = lay_out(batch)
    return SharedBatch(layout=layout, buffer=buffers.write(parts, layout.size_bytes))


def lay_out(batch: FetchedBatch) -> tuple[BatchLayout, list[tuple[int, Bytes]]]:
    """Return how a batch lies in its bytes, and the bytes: arrays, each with its offset, and anything in between.

    Raises:
        Exception: whatever the pickling of an object raises.
    """
    tensors: list[torch.Tensor] = []
    content = flatten(batch.data).map_tensors(_collector(tensors)) if isinstance(batch.data, TensorDict) else batch.data
    pickled = _pickled((batch.meta, content), tensors)
    parts: list[tuple[int, Bytes]] = [(0, pickled)]
    places = []
    end = pickled.nbytes
    for tensor in tensors:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(TensorPlace(offset=offset, dtype=tensor.dtype, shape=tuple(tensor.shape)))
        parts.append((offset, np.frombuffer(tensor_bytes(tensor), np.uint8)))
        end = offset + tensor.nbytes
    layout = BatchLayout(index=batch.index, size_bytes=end, pickle_bytes=pickled.nbytes, places=tuple(places))
    return layout, parts


def open_batch(layout: BatchLayout, buffer: Bytes) -> FetchedBatch:
    """Return the batch; its tensors lie in the buffer, and keep it from being written again."""
    tensors = [_tensor_at(place, buffer) for place in layout.places]
    meta, content = _Unpickler(io.BytesIO(buffer[: layout.pickle_bytes].data), tensors).load()
    return FetchedBatch(
        index=layout.index, data=build(content) if isinstance(content, FlatBatch) else content, meta=meta
    )


def _collector(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that collects tensors which can lie in a buffer, and leaves others to the pickle."""

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_plain(tensor):
            return tensor
        tensors.append(tensor.detach())
        return tensors[-1]

    return collect


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized


def _tensor_at(place: TensorPlace, buffer: Bytes) -> torch.Tensor:
    size_bytes = math.prod(place.shape) * place.dtype.itemsize
    if not size_bytes:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.from_numpy(buffer[place.offset : place.offset + size_bytes]).view(place.dtype).reshape(place.shape)


def _tensor_of(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return _tensor_at(TensorPlace(offset=0, dtype=dtype, shape=shape), np.frombuffer(data, np.uint8))


def _pickled(content: Any, tensors: Sequence[torch.Tensor]) -> Bytes:
    file = io.BytesIO()
    _Pickler(file, tensors).dump(content)
    return np.frombuffer(file.getbuffer(), np.uint8)


class _Pickler(pickle.Pickler):
    """Pickles all but the tensors in the buffer, which it numbers; other tensors as their bytes."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def persistent_id(self, value: Any) -> int | None:
        return self._numbers.get(id(value)) if type(value) is torch.Tensor else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_plain(value):
            return _tensor_of, (pickle.PickleBuffer(tensor_bytes(value)), value.dtype, tuple(value.shape))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]
