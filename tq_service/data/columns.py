"""A batch as flat columns: dense tensors, jagged values with offsets, and rows of objects.

Torch's operations on nested tensors are few, and some turn rows of equal length into a dense tensor. Everything here
works on the values and offsets themselves, so that a jagged field stays jagged whatever is done with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from tq_service.wire.decoding import RowPattern, object_stack
from tq_service.wire.encoding import non_tensor_rows
from tq_service.wire.objects import is_image_type

FieldKey = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseColumn:
    """Rows of one shape: `values` is `(n, ...)`."""

    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class JaggedColumn:
    """Rows that differ in one dimension.

    Attributes:
        values: the rows one after the other along dimension `ragged_dim - 1`.
        pattern: which of the batch's `patterns` splits the values into rows.
        ragged_dim: the ragged dimension of the nested tensor, 1 for rows that differ in their first dimension.
    """

    values: torch.Tensor
    pattern: int
    ragged_dim: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectColumn:
    """Rows that are Python objects, or tensors that differ in several dimensions."""

    rows: list[Any]


FlatColumn = DenseColumn | JaggedColumn | ObjectColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """The columns of a batch.

    Attributes:
        row_count: number of rows.
        columns: by the key they have in the TensorDict.
        patterns: the row lengths that jagged columns refer to; fields with the same row lengths share one.
    """

    row_count: int
    columns: Mapping[FieldKey, FlatColumn]
    patterns: tuple[RowPattern, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors and of the objects, see `object_bytes`."""
        total = sum(pattern.offsets.nbytes for pattern in self.patterns)
        for column in self.columns.values():
            if isinstance(column, ObjectColumn):
                total += sum(object_bytes(row) for row in column.rows)
            else:
                total += column.values.nbytes
        return total

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> FlatBatch:
        """Return the batch with `function` applied to every tensor of the columns and all offsets."""

        def convert(column: FlatColumn) -> FlatColumn:
            if isinstance(column, ObjectColumn):
                return ObjectColumn(
                    rows=[function(row) if isinstance(row, torch.Tensor) else row for row in column.rows]
                )
            return replace(column, values=function(column.values))

        return FlatBatch(
            row_count=self.row_count,
            columns={key: convert(column) for key, column in self.columns.items()},
            patterns=tuple(pattern.map_offsets(function) for pattern in self.patterns),
        )


def flatten(batch: TensorDict) -> FlatBatch:
    """Return the columns of a batch; only nested tensors that are strided or have gaps between rows are copied.

    A strided nested tensor becomes what a put makes of it: a jagged column, or rows where several dimensions differ.

    Raises:
        ValueError: the batch has not exactly one batch dimension, or non-tensor data has another number of items.
    """
    if len(batch.batch_size) != 1:
        raise ValueError(f"got a TensorDict of batch size {tuple(batch.batch_size)}; expected one dimension, (n,)")
    patterns = _Patterns()
    columns: dict[FieldKey, FlatColumn] = {}
    for key in batch.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf):
        value = batch.get(key)
        if not isinstance(value, torch.Tensor):
            columns[key] = ObjectColumn(rows=non_tensor_rows(str(key), value))
        elif value.is_nested:
            columns[key] = _flatten_nested(value, patterns)
        else:
            columns[key] = DenseColumn(values=value)
    return FlatBatch(row_count=int(batch.batch_size[0]), columns=columns, patterns=tuple(patterns.known))


def _is_leaf(kind: type) -> bool:
    """Whether an entry of a TensorDict is a column; tensordict 0.6 has no public function for it."""
    return not is_tensor_collection(kind) or issubclass(kind, NonTensorData | NonTensorStack)


def build(flat: FlatBatch) -> TensorDict:
    """Return the TensorDict of some columns; nested tensors of one pattern share their offsets tensor."""
    fields: dict[FieldKey, Any] = {}
    for key, column in flat.columns.items():
        if isinstance(column, DenseColumn):
            fields[key] = column.values
        elif isinstance(column, JaggedColumn):
            fields[key] = flat.patterns[column.pattern].nested(column.values, column.ragged_dim)
        else:
            fields[key] = object_stack(column.rows)
    return TensorDict(fields, batch_size=[flat.row_count])


class _Patterns:
    """The different row lengths of a batch."""

    def __init__(self) -> None:
        self.known: list[RowPattern] = []

    def index(self, offsets: torch.Tensor) -> int:
        for position, known in enumerate(self.known):
            if known.offsets is offsets or torch.equal(known.offsets, offsets):
                return position
        self.known.append(RowPattern.of_offsets(offsets))
        return len(self.known) - 1


def _flatten_nested(nested: torch.Tensor, patterns: _Patterns) -> FlatColumn:
    if nested.layout is not torch.jagged:
        rows = list(nested.unbind())
        ragged = {dim for row in rows for dim, size in enumerate(row.shape) if size != rows[0].shape[dim]} or {0}
        if len(ragged) > 1:
            return ObjectColumn(rows=rows)
        nested = _jagged(rows, nested, ragged.pop())
    values, offsets, ragged_dim = _without_gaps(nested)
    return JaggedColumn(values=values, pattern=patterns.index(offsets), ragged_dim=ragged_dim)


def _jagged(rows: list[torch.Tensor], nested: torch.Tensor, ragged_dim: int) -> torch.Tensor:
    lengths = np.array([row.shape[ragged_dim] for row in rows], np.int64)
    values = torch.cat(rows, dim=ragged_dim) if rows else nested.new_empty(0)
    return RowPattern.of_lengths(lengths, device=values.device).nested(values, ragged_dim + 1)


def _without_gaps(nested: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return values, offsets and the ragged dimension of a jagged tensor, compacted if its rows have gaps."""
    ragged_dim: int = nested._ragged_idx  # torch has no public name for it
    values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()
    if lengths is not None:
        rows = [values.narrow(ragged_dim - 1, int(at), int(size)) for at, size in zip(offsets, lengths, strict=False)]
        values = torch.cat(rows, dim=ragged_dim - 1) if rows else values.narrow(ragged_dim - 1, 0, 0)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return values, offsets, ragged_dim
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != values.shape[ragged_dim - 1]:
        values, offsets = values.narrow(ragged_dim - 1, first, last - first), offsets - first
    return values, offsets, ragged_dim


def object_bytes(value: Any) -> int:
    """Return the bytes of the tensors, arrays, texts and images of PIL in an object, or in containers of them."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return sum(map(object_bytes, value.flat))
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if is_image_type(type(value)):
        return 4 * int(value.width * value.height)  # what PIL takes for a pixel of most modes
    if isinstance(value, Mapping):
        return sum(map(object_bytes, value.values()))
    return sum(map(object_bytes, value)) if isinstance(value, list | tuple) else 0
