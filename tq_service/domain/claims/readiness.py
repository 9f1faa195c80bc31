"""Which rows are ready for one kind of claim."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.claims.ledger import TaskLedger
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes, LengthSource
from tq_service.domain.states import LIVE, UNCLAIMED
from tq_service.domain.tables.meta import Condition
from tq_service.errors import InvalidArgumentError

# What decides which rows are ready for a kind of claim: data fields, conditions, and the length that its sampler needs.
ScanKey: TypeAlias = tuple[tuple[str, ...], tuple[Condition, ...], LengthSource | None]

Rows: TypeAlias = slice | Indexes  # a stretch of the table, or some positions


class Readiness:
    """The conditions of one kind of claim, over the rows of a partition as they are when they are looked at.

    Another thread may look as well, while the table is pinned.
    """

    def __init__(
        self, partition: Partition, task: TaskLedger, batch_spec: BatchSpec, length: LengthSource | None
    ) -> None:
        self.table = partition.table
        self.key: ScanKey = (batch_spec.data_fields, batch_spec.where, length)
        self._partition = partition
        self._task = task

    def ready(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows are ready `(n,)`."""
        _, where, length = self.key
        mask = self.has_data(rows)
        if where:
            mask &= self.allowed(rows)
        if length is not None:
            mask &= self.lengths(rows) >= 0
        return mask

    def has_data(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows are live, not consumed by the task, and have all data fields."""
        mask: NDArray[np.bool_] = self._partition.state.data[rows] == LIVE
        mask &= self._task.claim.data[rows] == UNCLAIMED
        mask &= self._produced(rows)
        return mask

    def allowed(self, rows: Rows) -> NDArray[np.bool_]:
        """Return where `where` holds; a row without a value does not pass."""
        mask = np.ones(self.table.index.data[rows].size, np.bool_)
        for condition in self.key[1]:
            mask &= self._partition.meta.holds(condition, rows)[0]
        return mask

    def excluded(self, rows: Rows) -> NDArray[np.bool_]:
        """Return the rows that `where` rules out for good: by a value, or for lack of one when their data is there."""
        mask = np.zeros(self.table.index.data[rows].size, np.bool_)
        for condition in self.key[1]:
            holds, present = self._partition.meta.holds(condition, rows)
            mask |= ~holds & (present | self._produced(rows))
        return mask

    def lengths(self, rows: Rows) -> Indexes:
        """Return token counts by the sampler's length source, -1 where unknown."""
        source = self.key[2] or LengthSource()
        lengths = self.field_lengths(source.field, rows)
        values, present = self.meta(source.key, rows)
        lengths[present] = _token_counts(source.key, values[present])
        return lengths

    def known_lengths(self, rows: Indexes) -> Indexes | None:
        """Return token counts, None where one of them is not known or is no token count."""
        source = self.key[2] or LengthSource()
        arrays = self._partition.meta.arrays(source.key)
        if arrays is None and source.field is None:
            return None
        if arrays is not None and arrays[0].dtype.kind == "i" and arrays[1][rows].all():  # as mostly
            values: Indexes = arrays[0][rows]
            return values if values.min(initial=0) >= 0 else None
        try:
            lengths = self.lengths(rows)
        except InvalidArgumentError:
            return None
        return lengths if bool((lengths >= 0).all()) else None

    def field_lengths(self, name: str | None, rows: Rows) -> Indexes:
        """Return the row lengths of a field, see `Field.lengths`; -1 where there is none."""
        field = None if name is None else self._partition.cells.fields.get(name)
        return np.full(self.table.index.data[rows].size, -1) if field is None else field.lengths(rows)

    def meta(self, column: str, rows: Rows) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the values of a custom_meta column, and which rows have one."""
        arrays = self._partition.meta.arrays(column)
        if arrays is None:
            count = self.table.index.data[rows].size
            return np.zeros(count), np.zeros(count, np.bool_)
        return arrays[0][rows], arrays[1][rows]

    def _produced(self, rows: Rows) -> NDArray[np.bool_]:
        return self._partition.cells.produced(self.key[0], rows)


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
            field="sampler_config",
            metadata={"column": column},
        )
    return values.astype(np.int64)
