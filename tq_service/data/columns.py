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
from tensordict import NonTensorStack, TensorDict, is_leaf_nontensor

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
        pattern: which of the batch's `patterns` cuts the values into rows.
        ragged_dim: the ragged dimension of the nested tensor, 1 for rows that differ in their first dimension.
    """

    values: torch.Tensor
    pattern: int
    ragged_dim: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectColumn:
    """Rows that are Python objects, or tensors that differ in several dimensions."""

    rows: list[Any]


Column = DenseColumn | JaggedColumn | ObjectColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """The columns of a batch.

    Attributes:
        row_count: number of rows.
        columns: by the key they have in the TensorDict.
        patterns: offsets `(row_count + 1,)` that jagged columns refer to; fields cut alike share one.
    """

    row_count: int
    columns: Mapping[FieldKey, Column]
    patterns: tuple[torch.Tensor, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors and of the objects, see `object_bytes`."""
        total = sum(offsets.nbytes for offsets in self.patterns)
        for column in self.columns.values():
            if isinstance(column, ObjectColumn):
                total += sum(object_bytes(row) for row in column.rows)
            else:
                total += column.values.nbytes
        return total

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> FlatBatch:
        """Return the batch with `function` applied to every tensor of the columns and every pattern."""

        def convert(column: Column) -> Column:
            if isinstance(column, ObjectColumn):
                return ObjectColumn(
                    rows=[function(row) if isinstance(row, torch.Tensor) else row for row in column.rows]
                )
            return replace(column, values=function(column.values))

        return FlatBatch(
            row_count=self.row_count,
            columns={key: convert(column) for key, column in self.columns.items()},
            patterns=tuple(function(offsets) for offsets in self.patterns),
        )


def flatten(batch: TensorDict) -> FlatBatch:
    """Return the columns of a batch; tensors are not copied, unless a nested one has gaps between its rows.

    Raises:
        TypeError: a nested tensor has the strided layout.
        ValueError: the batch has not exactly one batch dimension.
    """
    if len(batch.batch_size) != 1:
        raise ValueError(f"got a TensorDict of batch size {tuple(batch.batch_size)}; expected one dimension, (n,)")
    patterns = _Patterns()
    columns: dict[FieldKey, Column] = {}
    for key in batch.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor):
        value = batch.get(key)
        if not isinstance(value, torch.Tensor):
            columns[key] = ObjectColumn(rows=list(value.tolist()))
        elif value.layout is torch.jagged:
            values, offsets, ragged_dim = _without_gaps(value)
            columns[key] = JaggedColumn(values=values, pattern=patterns.index(offsets), ragged_dim=ragged_dim)
        elif value.is_nested:
            raise TypeError(f"field {key!r} is a nested tensor of strided layout; build it with layout=torch.jagged")
        else:
            columns[key] = DenseColumn(values=value)
    return FlatBatch(row_count=int(batch.batch_size[0]), columns=columns, patterns=tuple(patterns.offsets))


def build(flat: FlatBatch) -> TensorDict:
    """Return the TensorDict of some columns; nested tensors of one pattern share their offsets tensor."""
    fields: dict[FieldKey, Any] = {}
    for key, column in flat.columns.items():
        if isinstance(column, DenseColumn):
            fields[key] = column.values
        elif isinstance(column, JaggedColumn):
            fields[key] = _nested(column, flat.patterns[column.pattern])
        else:
            fields[key] = object_stack(column.rows)
    return TensorDict(fields, batch_size=[flat.row_count])


def object_stack(rows: list[Any]) -> NonTensorStack:
    """Return rows of objects as TensorDict holds them, none included."""
    return NonTensorStack(*rows) if rows else NonTensorStack.from_list([])


class _Patterns:
    """The different offsets tensors of a batch."""

    def __init__(self) -> None:
        self.offsets: list[torch.Tensor] = []

    def index(self, offsets: torch.Tensor) -> int:
        for position, known in enumerate(self.offsets):
            if known is offsets or torch.equal(known, offsets):
                return position
        self.offsets.append(offsets)
        return len(self.offsets) - 1


def _nested(column: JaggedColumn, offsets: torch.Tensor) -> torch.Tensor:
    # Torch finds the least and greatest length by a reduction, which fails over no rows.
    bound = 0 if offsets.numel() == 1 else None
    return torch.nested.nested_tensor_from_jagged(
        column.values, offsets, jagged_dim=column.ragged_dim, min_seqlen=bound, max_seqlen=bound
    )


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
    """Return the bytes of the tensors, arrays and texts in an object, or in containers of them."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(object_bytes, value.values()))
    return sum(map(object_bytes, value)) if isinstance(value, list | tuple) else 0
