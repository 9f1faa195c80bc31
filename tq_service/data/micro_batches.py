"""Splits a batch into micro-batches.

A micro-batch owns its memory: a trainer that changes it in place changes neither the batch kept for `reset()` nor
another micro-batch, and the batch can be freed while micro-batches of it are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tq_service.client.batch_meta import BatchMeta, Pack, Step
from tq_service.data.columns import DenseColumn, FlatBatch, FlatColumn, JaggedColumn, ObjectColumn, build, flatten
from tq_service.wire.decoding import RowPattern

ProcessBatch = Callable[..., Iterable[Any]]
"""`process_batch_fn(data, meta, micro_batch_size=...)`: returns what the loader yields for one batch."""

Positions = NDArray[np.int64]


def split_micro_batches(
    data: TensorDict, meta: BatchMeta, micro_batch_size: int | None = None
) -> Iterator[tuple[TensorDict, BatchMeta]]:
    """Yield the micro-batches of a batch, each with its part of the meta.

    They are those of the plan, `meta.steps`: one micro-batch for each pack of each step, in order, so that every
    rank gets the same number of them, empty ones included. The meta of a micro-batch has its pack as its only step. A
    meta without steps is split by `micro_batch_size`.

    Args:
        data: the batch, `meta.size` rows.
        meta: the samples of `data`.
        micro_batch_size: samples a micro-batch where the meta has no steps; None: the batch is one micro-batch.

    Raises:
        ValueError: the batch has another number of rows than the meta.
    """
    flat = flatten(data)
    if flat.row_count != meta.size:
        raise ValueError(
            f"the batch has {flat.row_count} rows and its meta {meta.size} samples; fetch_batch_fn returns both alike, "
            "or process_batch_fn splits them"
        )
    for step in steps_of(meta, micro_batch_size):
        for pack in step.packs:
            yield build(select_rows(flat, np.asarray(pack.positions, dtype=np.int64))), part_of(meta, pack)


def steps_of(meta: BatchMeta, micro_batch_size: int | None) -> tuple[Step, ...]:
    """Return the steps of a batch; where its plan has none, one of micro-batches of `micro_batch_size` samples."""
    if meta.steps:
        return meta.steps
    size = micro_batch_size or max(meta.size, 1)
    starts = range(0, max(meta.size, 1), size)
    return (Step(packs=tuple(Pack(positions=tuple(range(at, min(at + size, meta.size)))) for at in starts)),)


def micro_batch_count(meta: BatchMeta, micro_batch_size: int | None) -> int:
    """Return how many micro-batches, or packs, a batch is split into."""
    return sum(len(step.packs) for step in steps_of(meta, micro_batch_size))


def part_of(meta: BatchMeta, pack: Pack) -> BatchMeta:
    """Return the meta of the samples of one pack, with the pack as its only step."""
    whole = replace(pack, positions=tuple(range(len(pack.positions))))
    # The steps go first: selecting from all of them for each pack would cost the square of their number.
    return replace(replace(meta, steps=()).select_samples(pack.positions), steps=(Step(packs=(whole,)),))


def take_rows(data: TensorDict, positions: Sequence[int] | Positions) -> TensorDict:
    """Return a batch of the rows at `positions`, in this order, jagged fields jagged; for use in process_batch_fn."""
    return build(select_rows(flatten(data), np.asarray(positions, dtype=np.int64)))


def select_rows(flat: FlatBatch, positions: Positions) -> FlatBatch:
    """Return a copy of some rows in the order of `positions` `(m,)`.

    Raises:
        IndexError: a position is outside the batch.
    """
    check_positions(flat, positions)
    rows = _Picker(positions, positions + 1)
    jagged = [_jagged_picker(pattern, positions) for pattern in flat.patterns]

    def pick(column: FlatColumn) -> FlatColumn:
        if isinstance(column, DenseColumn):
            return DenseColumn(values=rows.pick(column.values, 0))
        if isinstance(column, JaggedColumn):
            values = jagged[column.pattern][0].pick(column.values, column.ragged_dim - 1)
            return JaggedColumn(values=values, pattern=column.pattern, ragged_dim=column.ragged_dim)
        return ObjectColumn(rows=[_own(column.rows[position]) for position in positions])

    return FlatBatch(
        row_count=int(positions.size),
        columns={key: pick(column) for key, column in flat.columns.items()},
        patterns=tuple(pattern for _, pattern in jagged),
    )


def check_positions(flat: FlatBatch, positions: Positions) -> None:
    """Raise IndexError where one of the positions `(m,)` is outside the batch."""
    if positions.size and (positions.min() < 0 or positions.max() >= flat.row_count):
        raise IndexError(
            f"got positions {positions.min()} to {positions.max()} of a batch of {flat.row_count} rows; "
            f"expected 0 to {flat.row_count - 1}"
        )


class _Picker:
    """Copies ranges of tensors, one after the other.

    In this thread and by numpy: torch shares a copy out over its pool of threads, which takes longer than the copy of a
    micro-batch, and much longer where the CPUs are busy.
    """

    def __init__(self, starts: Positions, stops: Positions) -> None:
        # Neighbours are copied together.
        firsts = np.flatnonzero(np.concatenate([[True], starts[1:] != stops[:-1]])) if starts.size else _NOTHING
        lasts = np.concatenate([firsts[1:] - 1, [starts.size - 1]]) if starts.size else _NOTHING
        self._ranges: list[tuple[int, int]] = list(
            zip(starts[firsts].tolist(), stops[lasts].tolist(), strict=True)
        ) or [(0, 0)]

    def pick(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        array = _array_of(values)
        if array is None:
            return torch.cat([values.narrow(dim, start, stop - start) for start, stop in self._ranges], dim=dim)
        before = (slice(None),) * dim
        parts = [array[(*before, slice(start, stop))] for start, stop in self._ranges]
        picked = parts[0].copy() if len(parts) == 1 else np.concatenate(parts, axis=dim)
        return torch.from_numpy(np.ascontiguousarray(picked)).view(values.dtype)


_NOTHING = np.zeros(0, np.int64)
# Of each size one that numpy has as well, which lacks bfloat16 and others.
_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _array_of(values: torch.Tensor) -> NDArray[Any] | None:
    """Return the memory of a tensor as an array, of a dtype of the same size; None where it is not plain memory."""
    if values.device.type != "cpu" or values.requires_grad or values.is_conj() or values.is_neg():
        return None
    array: NDArray[Any] = values.view(_STAND_INS[values.dtype.itemsize]).numpy()
    return array


def _jagged_picker(pattern: RowPattern, positions: Positions) -> tuple[_Picker, RowPattern]:
    """Return what picks the values of some rows, and the pattern of what it picks."""
    offsets = pattern.offsets
    bounds = offsets.detach().cpu().numpy().astype(np.int64, copy=False)
    starts, stops = bounds[:-1][positions], bounds[1:][positions]
    return _Picker(starts, stops), RowPattern.of_lengths(stops - starts, dtype=offsets.dtype, device=offsets.device)


def _own(row: Any) -> Any:
    return row.clone() if isinstance(row, torch.Tensor) else row
