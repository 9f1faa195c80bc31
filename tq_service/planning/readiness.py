"""Which rows are ready for one kind of claim."""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.state.ledger import TaskLedger
from tq_service.state.meta import Condition
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes, LengthSource
from tq_service.state.request import BatchSpec
from tq_service.state.states import LIVE, UNCLAIMED

# What decides which rows are ready for a kind of claim: data fields, conditions, and the length that its sampler needs.
ScanKey: TypeAlias = tuple[tuple[str, ...], tuple[Condition, ...], LengthSource | None]

_AT_ONCE = 1 << 14

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

    @property
    def at_once(self) -> int:
        """How many rows the event loop has time for in one step: conditions on text take 0.1 us a row."""
        return _AT_ONCE // max(1, len(self.key[1]))

    def ready(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows are ready `(n,)`."""
        _, where, length = self.key
        mask = self.has_data(rows)
        if where:
            mask &= self.allowed(rows)
        if length is not None:
            mask &= self.has_length(rows)
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

    def has_length(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows have a length for the sampler, be it that its value is not a token count.

        That is an error of the claims that would deliver the row, see `lengths`, and of no others.
        """
        source = self.key[2] or LengthSource()
        has_length = self.meta(source.key, rows)[1]
        if source.field is not None:
            has_length = has_length | (self.field_lengths(source.field, rows) >= 0)
        texts = self._partition.meta.json_values(source.key, rows)
        return has_length if texts is None else has_length | (texts != None)  # noqa: E711  (of each)

    def lengths(self, rows: Rows) -> Indexes:
        """Return token counts by the sampler's length source, -1 where unknown.

        Raises:
            InvalidArgumentError: the value of a row is not a token count.
        """
        source = self.key[2] or LengthSource()
        lengths = self.field_lengths(source.field, rows)
        values, present = self.meta(source.key, rows)
        values = values[present]
        is_count = _is_token_count(values)
        if not is_count.all():
            self._refuse_length(rows, int(np.flatnonzero(present)[~is_count][0]), values[~is_count].tolist()[0])
        texts = self._partition.meta.json_values(source.key, rows)
        if texts is not None and (found := np.flatnonzero(texts != None)).size:  # noqa: E711  (of each)
            self._refuse_length(rows, int(found[0]), texts[found[0]])
        lengths[present] = values
        return lengths

    def _refuse_length(self, rows: Rows, position: int, value: object) -> NoReturn:
        """Refuse the value that one of some rows has for its length."""
        column = (self.key[2] or LengthSource()).key
        raise InvalidArgumentError(
            f"custom_meta column {column!r} of sample {self.table.index.data[rows][position]} is {value!r:.80}; "
            f"expected a token count, a whole number from 0 to 2**63 - 1. Put or set another value, or clear the "
            f"sample.",
            field="sampler_config",
            metadata={"column": column},
        )

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


def _is_token_count(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values of a custom_meta column are token counts; whole numbers do as doubles too."""
    if values.dtype.kind not in "if":
        return np.zeros(values.size, np.bool_)
    is_count: NDArray[np.bool_] = values >= 0
    if values.dtype.kind == "f":
        is_count &= (values < 2.0**63) & (values == np.floor(values))
    return is_count
