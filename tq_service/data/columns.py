"""Represent batches as flat columns, select their rows, and split them into micro-batches.

Torch supports few operations on nested tensors, and some operations convert rows of equal length to a dense tensor.
This module operates on the underlying values and offsets, so jagged fields always stay jagged.

Each micro-batch owns its memory. A trainer can modify a micro-batch in place without affecting other micro-batches or
the batch kept for `reset()`. The batch can be freed while its micro-batches are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection
from typing_extensions import TypeVar

from tq_service.client.batch_meta import BatchMeta, Pack, Step
from tq_service.client.reads import RowPattern, object_stack
from tq_service.wire.encoding import non_tensor_rows
from tq_service.wire.objects import is_image_type

FieldKey = str | tuple[str, ...]
Positions = NDArray[np.int64]

Item = TypeVar("Item", default=tuple[TensorDict, BatchMeta])
"""Type of a loader's items: `(micro_batch, meta)` pairs, unless a dataset option determines another type."""

ProcessBatch = Callable[..., Iterable[Item]]
"""`process_batch_fn(data, meta, micro_batch_size=...)`, which returns the items that the loader yields for a batch."""


class ItemOptions(Generic[Item]):
    """Base class of dataset options from which type checkers infer the item type."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class JaggedColumn:
    """A column whose rows may differ in size, but only in one dimension.

    Attributes:
        values: all rows, concatenated along dimension `ragged_dim - 1`.
        pattern: offsets that split the values into rows. Columns with the same row lengths share a pattern.
        ragged_dim: ragged dimension of the nested tensor, which is 1 if rows differ in their first dimension.
    """

    values: torch.Tensor
    pattern: RowPattern
    ragged_dim: int = 1


FlatColumn = torch.Tensor | JaggedColumn | list[Any]
"""A tensor of n rows of equal shape, a jagged column, or a list of objects or of rows with any other shapes."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch as a mapping of columns, with the same keys as its TensorDict."""

    row_count: int
    columns: Mapping[FieldKey, FlatColumn]

    def parts(self) -> list[torch.Tensor | list[Any]]:
        """Return the tensors of all columns, including offsets. For object columns, return the lists of rows."""
        columns = self.columns.values()
        patterns = dict.fromkeys(column.pattern for column in columns if isinstance(column, JaggedColumn))
        values = (column.values if isinstance(column, JaggedColumn) else column for column in columns)
        return [*(pattern.offsets for pattern in patterns), *values]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of all columns, including offsets and the rows of object columns that hold tensors."""
        return [
            tensor
            for part in self.parts()
            for tensor in ([part] if isinstance(part, torch.Tensor) else part if _is_all(torch.Tensor, part) else [])
        ]

    def replacing(self, kind: type, other: Callable[[Any], Any]) -> FlatBatch:
        """Return a copy of the batch with all tensors, or all placeholders for tensors, replaced.

        Args:
            kind: type of the tensors or placeholders to replace.
            other: function that takes a tensor or placeholder and returns its replacement.
        """
        there: dict[RowPattern, RowPattern] = {}

        def replaced(column: Any) -> Any:
            if isinstance(column, JaggedColumn):
                pattern = column.pattern
                if pattern not in there:
                    there[pattern] = replace(pattern, offsets=other(pattern.offsets))
                return JaggedColumn(other(column.values), there[pattern], column.ragged_dim)
            if isinstance(column, list):
                return list(map(other, column)) if _is_all(kind, column) else column
            return other(column)

        return FlatBatch(self.row_count, {key: replaced(column) for key, column in self.columns.items()})

    @property
    def size_bytes(self) -> int:
        """Size of the tensors and objects in bytes, as computed by `object_bytes`."""
        return object_bytes(self.parts())


def _is_all(kind: type, rows: list[Any]) -> bool:
    return all(isinstance(row, kind) for row in rows)


def flatten(batch: TensorDict) -> FlatBatch:
    """Convert a batch to flat columns.

    Only strided nested tensors and tensors with gaps between rows are copied. As in a put, a strided nested tensor
    becomes a jagged column, or a list of rows if the rows differ in several dimensions.

    Raises:
        ValueError: the batch does not have exactly one batch dimension, or a non-tensor field does not have one item
            per row.
    """
    if len(batch.batch_size) != 1:
        raise ValueError(f"got a TensorDict with batch size {tuple(batch.batch_size)}; expected one dimension, (n,)")
    patterns: list[RowPattern] = []
    columns: dict[FieldKey, FlatColumn] = {}
    for key in batch.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf):
        value = batch.get(key)
        if not isinstance(value, torch.Tensor):
            columns[key] = non_tensor_rows(str(key), value)
        else:
            columns[key] = _flatten_nested(value, patterns) if value.is_nested else value
    return FlatBatch(int(batch.batch_size[0]), columns)


def _is_leaf(kind: type) -> bool:
    """Return whether a TensorDict entry of this type is a column.

    tensordict 0.6 has no public function for this check.
    """
    return not is_tensor_collection(kind) or issubclass(kind, NonTensorData | NonTensorStack)


def build(flat: FlatBatch) -> TensorDict:
    """Build a TensorDict from a flat batch. Nested tensors with the same row lengths share an offsets tensor."""
    fields: dict[FieldKey, Any] = {}
    for key, column in flat.columns.items():
        if isinstance(column, JaggedColumn):
            fields[key] = column.pattern.nested(column.values, column.ragged_dim)
        else:
            fields[key] = object_stack(column) if isinstance(column, list) else column
    return TensorDict(fields, batch_size=[flat.row_count])


def _flatten_nested(nested: Any, patterns: list[RowPattern]) -> FlatColumn:
    """Convert a nested tensor to a column. If `patterns` contains no equal pattern, append a new one."""
    is_jagged = nested.layout is torch.jagged
    if is_jagged and nested.lengths() is None:
        dim = nested._ragged_idx - 1  # torch has no public attribute for this
        values, offsets = nested.values(), nested.offsets()
        known = next((each for each in patterns if each.offsets is offsets), None)
        pattern = RowPattern.of_offsets(offsets) if known is None else known
        first, last = int(pattern.bounds[0]), int(pattern.bounds[-1])
        if first != 0 or last != values.shape[dim]:
            values = values.narrow(dim, first, last - first)
            pattern = RowPattern.of_offsets(pattern.offsets - first, pattern.bounds - first)
    else:
        rows = list(nested.unbind())
        ragged = {dim for row in rows for dim, size in enumerate(row.shape) if size != rows[0].shape[dim]} or {0}
        if len(ragged) > 1:
            return rows
        dim = nested._ragged_idx - 1 if is_jagged else ragged.pop()
        if rows:
            values = torch.cat(rows, dim=dim)
        else:
            values = nested.values().narrow(dim, 0, 0) if is_jagged else nested.new_empty(0)
        lengths = np.array([row.shape[dim] for row in rows], np.int64)
        return JaggedColumn(values, _shared(RowPattern.of_lengths(lengths, beside=values), patterns), dim + 1)
    return JaggedColumn(values, _shared(pattern, patterns), dim + 1)


def _shared(pattern: RowPattern, patterns: list[RowPattern]) -> RowPattern:
    """Return the pattern in `patterns` that equals `pattern`. If there is none, append and return `pattern`."""
    for each in patterns:
        if each.offsets.dtype == pattern.offsets.dtype and np.array_equal(each.bounds, pattern.bounds):
            return each
    patterns.append(pattern)
    return pattern


def object_bytes(value: Any) -> int:
    """Estimate the bytes of the tensors, arrays, strings and PIL images in a value, at any depth of nesting."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return sum(map(object_bytes, value.flat))
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if is_image_type(type(value)):
        return 4 * int(value.width * value.height)  # PIL uses 4 bytes per pixel in most modes
    if isinstance(value, Mapping):
        return sum(map(object_bytes, value.values()))
    return sum(map(object_bytes, value)) if isinstance(value, list | tuple) else 0


def take_rows(data: TensorDict, positions: Sequence[int] | Positions) -> TensorDict:
    """Return a batch with the rows at `positions`, in that order. Jagged fields stay jagged.

    Use this function in a process_batch_fn.
    """
    return build(select_rows(flatten(data), np.asarray(positions, dtype=np.int64)))


def select_rows(flat: FlatBatch, positions: Positions) -> FlatBatch:
    """Return a copy of the rows at `positions`, in that order. `positions` has shape `(m,)`.

    Raises:
        IndexError: a position is outside the batch.
    """
    check_positions(flat.row_count, positions)
    ranges = _ranges(positions, positions + 1)
    jagged: dict[RowPattern, tuple[list[tuple[int, int]], RowPattern]] = {}

    def pick(column: FlatColumn) -> FlatColumn:
        if isinstance(column, list):
            picked = (column[position] for position in positions)
            return [row.clone() if isinstance(row, torch.Tensor) else row for row in picked]
        if isinstance(column, torch.Tensor):
            return _copied(column, 0, ranges)
        if column.pattern not in jagged:
            bounds, offsets = column.pattern.bounds, column.pattern.offsets
            starts, stops = bounds[:-1][positions], bounds[1:][positions]
            pattern = RowPattern.of_lengths(stops - starts, dtype=offsets.dtype, beside=offsets)
            jagged[column.pattern] = _ranges(starts, stops), pattern
        ranges_of_rows, pattern = jagged[column.pattern]
        return JaggedColumn(_copied(column.values, column.ragged_dim - 1, ranges_of_rows), pattern, column.ragged_dim)

    return FlatBatch(int(positions.size), {key: pick(column) for key, column in flat.columns.items()})


def check_positions(row_count: int, positions: Positions) -> None:
    """Raise IndexError if a position is outside a batch of `row_count` rows."""
    if positions.size and (positions.min() < 0 or positions.max() >= row_count):
        raise IndexError(
            f"got positions {positions.min()} to {positions.max()} for a batch of {row_count} rows; "
            f"expected 0 to {row_count - 1}"
        )


def _ranges(starts: Positions, stops: Positions) -> list[tuple[int, int]]:
    """Merge adjacent row ranges. If no ranges are given, return one empty range."""
    if not starts.size:
        return [(0, 0)]
    begins = np.append(True, starts[1:] != stops[:-1])
    ends = np.append(begins[1:], True)
    return list(zip(starts[begins].tolist(), stops[ends].tolist(), strict=True))


# NumPy lacks some torch dtypes, such as bfloat16. Use a dtype of the same item size that NumPy supports.
_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _copied(values: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Copy ranges of a tensor and concatenate the copies.

    NumPy copies CPU tensors in the current thread. Torch would distribute the copy across its thread pool, which takes
    longer than the copy itself, and much longer if the CPUs are busy.
    """
    if values.device.type != "cpu" or values.requires_grad or values.is_conj() or values.is_neg():
        return torch.cat([values.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)
    array = values.view(_STAND_INS[values.dtype.itemsize]).numpy()
    before = (slice(None),) * dim
    parts = [array[(*before, slice(start, stop))] for start, stop in ranges]
    picked = parts[0].copy() if len(parts) == 1 else np.concatenate(parts, axis=dim)
    return torch.from_numpy(np.ascontiguousarray(picked)).view(values.dtype)


def split_micro_batches(
    data: TensorDict, meta: BatchMeta, micro_batch_size: int | None = None
) -> Iterator[tuple[TensorDict, BatchMeta]]:
    """Yield the micro-batches of a batch, each with the meta of its samples.

    The plan in `meta.steps` determines the micro-batches. Each pack of each step becomes one micro-batch, so all ranks
    have the same number of micro-batches. Some micro-batches may be empty. The meta of each micro-batch has a single
    step with a single pack. If the meta has no steps, the batch is split into micro-batches of `micro_batch_size`
    samples.

    Args:
        data: the batch, with `meta.size` rows.
        meta: metadata of the samples in `data`.
        micro_batch_size: number of samples per micro-batch if the meta has no steps. By default, such a batch is a
            single micro-batch.

    Raises:
        ValueError: the batch and the meta differ in size.
    """
    flat = flatten(data)
    if flat.row_count != meta.size:
        raise ValueError(
            f"the batch has {flat.row_count} rows, but its meta has {meta.size} samples; fetch_batch_fn must return "
            "the data and meta of the same samples, or process_batch_fn must split the batch"
        )
    for step_index, step in enumerate(steps_of(meta, micro_batch_size)):
        for pack in step.packs:
            yield build(select_rows(flat, np.asarray(pack.positions, dtype=np.int64))), part_of(meta, pack, step_index)


def steps_of(meta: BatchMeta, micro_batch_size: int | None) -> tuple[Step, ...]:
    """Return the planned steps of a batch. Without a plan, return one step with packs of `micro_batch_size` samples."""
    if meta.steps:
        return meta.steps
    size = micro_batch_size or max(meta.size, 1)
    starts = range(0, max(meta.size, 1), size)
    return (Step(packs=tuple(Pack(positions=tuple(range(at, min(at + size, meta.size)))) for at in starts)),)


def micro_batch_count(meta: BatchMeta, micro_batch_size: int | None) -> int:
    """Return the number of micro-batches, or packs, into which a batch is split."""
    return sum(len(step.packs) for step in steps_of(meta, micro_batch_size))


def part_of(meta: BatchMeta, pack: Pack, step_index: int) -> BatchMeta:
    """Return a `BatchMeta` that contains only a pack's samples.

    The returned meta has one step, which contains only this pack. The totals are those of the step to which the pack
    originally belonged.
    """
    whole = replace(pack, positions=tuple(range(len(pack.positions))))
    # Drop the steps first. Selecting from all steps for every pack would take quadratic time.
    samples = replace(meta, steps=(), totals=()).select_samples(pack.positions)
    return replace(samples, steps=(Step(packs=(whole,)),), totals=meta.totals[step_index : step_index + 1])
