"""Which rows are ready for one way of asking: a few vectorised comparisons over a stretch of the table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.claims.ledger import TaskLedger
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes, LengthSource
from tq_service.domain.states import LIVE, UNCLAIMED
from tq_service.domain.tables.meta import Condition
from tq_service.errors import InvalidArgumentError


class Readiness:
    """The conditions of one way of asking over the rows of a partition, in the arrays of the moment it was made."""

    def __init__(
        self, partition: Partition, task: TaskLedger, batch_spec: BatchSpec, length: LengthSource | None
    ) -> None:
        self._partition = partition
        self.table = partition.table
        self._batch_spec = batch_spec
        self._length = length
        self.count = self.table.count
        self.index: NDArray[np.int64] = self.table.index.data
        self.state: NDArray[np.uint8] = partition.state.data
        self.claim: NDArray[np.int64] = task.claim.data

    def find(self, indexes: Indexes) -> Indexes:
        """Return the positions of rows by their global indexes, of those that are there."""
        positions = self.table.find(indexes)
        found = positions >= 0
        return positions if found.all() else positions[found]

    def ready_of(self, positions: Indexes) -> Indexes:
        """Return those positions whose rows are ready."""
        ready: Indexes = positions[self.ready_mask(positions)]
        return ready

    def ready_mask(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which rows of a stretch, or at some positions, are ready `(n,)`."""
        mask = self.open_mask(rows)
        mask &= self.produced(rows)
        if self._batch_spec.where:
            mask &= self.allowed(rows)
        if self._length is not None:
            mask &= self.known_lengths(rows) >= 0
        return mask

    def open_mask(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which rows are live and not consumed by the task."""
        mask: NDArray[np.bool_] = self.state[rows] == LIVE
        mask &= self.claim[rows] == UNCLAIMED
        return mask

    def produced(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which rows have all data fields."""
        fields = [self._partition.cells.fields.get(name) for name in self._batch_spec.data_fields]
        masks = [field.cell.data[rows] >= 0 for field in fields if field is not None]
        if len(masks) < len(fields) or not masks:
            return np.full(self.index[rows].size, not fields)
        for mask in masks[1:]:
            masks[0] &= mask
        return masks[0]

    def allowed(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return where `where` holds; a row without a value does not pass."""
        mask = np.ones(self.index[rows].size, np.bool_)
        for condition in self._batch_spec.where:
            holds, present = self.condition(condition, rows)
            mask &= holds & present
        return mask

    def condition(self, condition: Condition, rows: slice | Indexes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return where a condition holds, and where the row has a value to compare."""
        values, present = self.meta(condition.column, rows)
        holds = np.zeros(present.size, np.bool_)
        if present.any():
            holds[present] = condition.holds(values[present])
        return holds, present

    def known_lengths(self, rows: slice | Indexes) -> Indexes:
        """Return token counts by the sampler's length source, -1 where unknown."""
        source = self._length or LengthSource()
        values, present = self.meta(source.key, rows)
        lengths = np.full(present.size, -1, np.int64)
        if source.field is not None:
            field = self._partition.cells.fields.get(source.field)
            if field is not None and field.length is not None:
                lengths = np.where(field.cell.data[rows] >= 0, field.length.data[rows], -1)
        lengths[present] = _token_counts(source.key, values[present])
        return lengths

    def meta(self, column: str, rows: slice | Indexes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the values of a custom_meta column, and which rows have one."""
        arrays = self._partition.meta.arrays(column)
        if arrays is None:
            count = self.index[rows].size
            return np.zeros(count), np.zeros(count, np.bool_)
        return arrays[0][rows], arrays[1][rows]


def _token_counts(column: str, values: NDArray[Any]) -> Indexes:
    """Return the values of a custom_meta column as token counts; whole numbers do as doubles too."""
    is_number = values.dtype.kind in "if"
    wrong = ~(values >= 0) if is_number else np.ones(values.size, np.bool_)
    if values.dtype.kind == "f":
        wrong |= ~np.isfinite(values) | (values != np.floor(values))
    if wrong.any():
        raise InvalidArgumentError(
            f"custom_meta column {column!r} holds {values[wrong][0]!r}; a token count is a whole number of 0 or more: "
            f"put or set another value, or clear the sample",
            field=column,
        )
    return values.astype(np.int64)
