"""How a whole batch travels from a worker process to its parent.

Tensors go through torch's shared memory, one segment and one file descriptor each. So what travels is few flat tensors:
values and offsets for nested ones (which the worker queues of torch do not carry reliably), one tensor of values for
rows of several ragged dimensions, one tensor of bytes for objects with tensors in them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tq_service.data.batch import Batch
from tq_service.data.columns import FieldKey, FlatBatch, ObjectColumn, build, flatten
from tq_service.errors import UnsupportedObjectError
from tq_service.wire.objects import decode_object, encode_object

_PLAIN = (str, bytes, int, float, bool, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRows:
    """Tensor rows of one dtype: `values` `(total,)` one after the other, `shapes` `(n, dims)` of each."""

    values: torch.Tensor
    shapes: NDArray[np.int64]

    def rows(self) -> list[torch.Tensor]:
        """Return the rows; they share the memory of `values`."""
        parts = torch.split(self.values, [int(size) for size in self.shapes.prod(axis=1)])
        return [part.view(tuple(shape)) for part, shape in zip(parts, self.shapes.tolist(), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Objects as bytes: `blob` `(total,)` uint8, `ends` `(n,)` where each object ends."""

    blob: torch.Tensor
    ends: NDArray[np.int64]

    def rows(self) -> list[Any]:
        """Return the objects; tensors in them have memory of their own."""
        data: memoryview = self.blob.numpy().data
        starts = [0, *self.ends.tolist()]
        return [decode_object(bytes(data[start:end])) for start, end in itertools.pairwise(starts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A batch on its way.

    Attributes:
        index: its batch_index.
        meta: what it is.
        flat: its dense and jagged columns, and object columns of plain rows; None where the data is no TensorDict.
        packed: the other object columns.
        order: all keys in their order.
        data: what fetch_batch_fn returned, where that is no TensorDict.
    """

    index: int
    meta: Any
    flat: FlatBatch | None = None
    packed: dict[FieldKey, TensorRows | EncodedRows] | None = None
    order: tuple[FieldKey, ...] = ()
    data: Any = None


def pack(batch: Batch) -> Parcel:
    """Return what travels; whatever no column can hold is left to the worker queue as it is."""
    if not isinstance(batch.data, TensorDict):
        return Parcel(index=batch.index, meta=batch.meta, data=batch.data)
    flat = flatten(batch.data)
    packed: dict[FieldKey, TensorRows | EncodedRows] = {}
    for key, column in flat.columns.items():
        if isinstance(column, ObjectColumn):
            rows = _pack_rows(column.rows)
            if rows is not None:
                packed[key] = rows
    kept = {key: column for key, column in flat.columns.items() if key not in packed}
    return Parcel(
        index=batch.index,
        meta=batch.meta,
        flat=FlatBatch(row_count=flat.row_count, columns=kept, patterns=flat.patterns).map_tensors(_detached),
        packed=packed,
        order=tuple(flat.columns),
    )


def unpack(parcel: Parcel) -> Batch:
    """Return the batch, its tensors in the memory shared with the worker."""
    if parcel.flat is None:
        return Batch(index=parcel.index, data=parcel.data, meta=parcel.meta)
    columns = dict(parcel.flat.columns)
    for key, rows in (parcel.packed or {}).items():
        columns[key] = ObjectColumn(rows=rows.rows())
    flat = FlatBatch(
        row_count=parcel.flat.row_count,
        columns={key: columns[key] for key in parcel.order},
        patterns=parcel.flat.patterns,
    )
    return Batch(index=parcel.index, data=build(flat), meta=parcel.meta, borrowed=True)


def _pack_rows(rows: list[Any]) -> TensorRows | EncodedRows | None:
    if all(isinstance(row, _PLAIN) for row in rows):
        return None
    if all(isinstance(row, torch.Tensor) and row.layout is torch.strided for row in rows):
        return _pack_tensors(rows)
    try:
        blobs = [encode_object(row) for row in rows]
    except UnsupportedObjectError:
        return None
    blob = np.frombuffer(bytearray().join(blobs), dtype=np.uint8)
    return EncodedRows(blob=torch.from_numpy(blob), ends=np.cumsum([len(blob) for blob in blobs], dtype=np.int64))


def _pack_tensors(rows: list[torch.Tensor]) -> TensorRows | None:
    if len({(row.dtype, row.ndim, row.device) for row in rows}) != 1:
        return None
    return TensorRows(
        values=torch.cat([row.detach().reshape(-1) for row in rows]),
        shapes=np.array([tuple(row.shape) for row in rows], dtype=np.int64).reshape(len(rows), rows[0].ndim),
    )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # A view would take the whole storage it is a view of along.
    plain = tensor.detach()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()
