"""The table of a partition's rows: columns that grow together, looked up by global index.

Rows stand in order of their global index. A removed row stays as a gap until gaps outnumber rows; then all columns are
compacted into new arrays. Rows are never moved in place, so positions that a reader on another thread took together
with the arrays still fit them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tq_service.domain.frozen import FrozenTable
from tq_service.domain.plan import Indexes
from tq_service.domain.tables.column import Column, FrozenColumn, Where, grown

_FIRST_CAPACITY = 64
_LEAST_GAPS = 1024
_FEW = 64
_MARKED_SHARE = 16


def distinct(values: Indexes, bound: int) -> Indexes:
    """Return each of some integers of 0 to `bound` - 1 once, in ascending order.

    Marking them costs a step for each possible value, sorting many more for each that is given.
    """
    if values.size < 2 or bool((values[1:] > values[:-1]).all()):
        return values
    if values.size * _MARKED_SHARE > bound:
        marks = np.zeros(bound, np.bool_)
        marks[values] = True
        return np.flatnonzero(marks)
    ordered = np.sort(values)
    return ordered[np.r_[True, ordered[1:] != ordered[:-1]]]


def count_values(values: Indexes) -> tuple[Indexes, Indexes]:
    """Return each value once, in ascending order, and how often it is there; neighbours are mostly alike."""
    if values.size == 0:
        return values, values
    heads = np.r_[0, np.flatnonzero(np.diff(values)) + 1]
    lengths = np.diff(heads, append=values.size)
    order = np.argsort(values[heads], kind="stable")
    ordered = values[heads[order]]
    firsts = np.r_[0, np.flatnonzero(np.diff(ordered)) + 1]
    return ordered[firsts], np.add.reduceat(lengths[order], firsts)


def forget_names(index_of: dict[str, int], names: Sequence[str]) -> None:
    """Remove names that are there, without a step in Python for each."""
    if len(names) == len(index_of):
        index_of.clear()
    else:
        deque(map(index_of.pop, names), maxlen=0)


def as_slice(positions: Indexes) -> Where:
    """Return positions as a slice where they are many and follow each other: numpy then copies instead of picking."""
    size = positions.size
    if size <= _FEW or int(positions[-1]) - int(positions[0]) != size - 1:
        return positions
    is_ascending = bool((positions[1:] > positions[:-1]).all())
    return slice(int(positions[0]), int(positions[0]) + size) if is_ascending else positions


class RowTable:
    """Rows in order of insertion, with any number of columns."""

    __slots__ = ("_capacity", "_columns", "_present", "count", "index", "next_index", "pin_count", "present_count")

    def __init__(self) -> None:
        self._capacity = _FIRST_CAPACITY
        self._columns: list[Column] = []
        self.count = 0  # positions in use, gaps included
        self.present_count = 0
        self.next_index = 0
        self.pin_count = 0  # readers on other threads that need positions to stay
        self.index = self.add_column(np.int64, 0)
        self._present = self.add_column(np.bool_, False)

    def add_column(self, dtype: DTypeLike, fill: Any) -> Column:
        """Add a column in which every row has `fill`."""
        column = Column(dtype, fill, self._capacity)
        self._columns.append(column)
        return column

    def drop_column(self, column: Column) -> None:
        """Remove a column."""
        self._columns.remove(column)

    def freeze(self) -> FrozenTable:
        """Return the rows as they are now; columns are frozen by who uses them."""
        return FrozenTable(
            next_index=self.next_index,
            present_count=self.present_count,
            index=self.index.freeze(self.count),
            present=self._present.freeze(self.count),
        )

    def thaw(self, frozen: FrozenTable) -> None:
        """Have the rows of another table; for a table that has none and whose columns are to be thawed after it."""
        self.count = frozen.index.size
        self.next_index = frozen.next_index
        self.present_count = frozen.present_count
        self._capacity = max(_FIRST_CAPACITY, self.count + self.count // 4)
        self.thaw_column(self.index, frozen.index)
        self.thaw_column(self._present, frozen.present)

    def thaw_column(self, column: Column, frozen: FrozenColumn) -> None:
        """Have the values of another table in one of the columns."""
        column.thaw(frozen, self._capacity)

    def append(self, count: int) -> slice:
        """Add rows and return their positions."""
        end = self.count + count
        if end > self._capacity:
            self._resize(grown(self._capacity, end), None)
        added = slice(self.count, end)
        self.index.write(added, np.arange(self.next_index, self.next_index + count))
        self._present.write(added, True)
        self.count = end
        self.next_index += count
        self.present_count += count
        return added

    def remove(self, positions: Indexes) -> None:
        """Remove rows, each given once. Positions of other rows change when the gaps are closed."""
        where = as_slice(positions)
        for column in self._columns:
            if column is not self.index:
                column.clear(where)
        self.present_count -= positions.size
        gaps = self.count - self.present_count
        if gaps >= _LEAST_GAPS and gaps > self.present_count and not self.pin_count:
            self._resize(max(_FIRST_CAPACITY, self.present_count * 3 // 2), as_slice(self.present_positions()))
            self.count = self.present_count

    def find(self, indexes: Indexes) -> Indexes:
        """Return the position `(n,)` of each global index, -1 for one that is not there."""
        if self.count == 0 or indexes.size == 0:
            return np.full(indexes.size, -1, np.int64)
        if self._is_gapless:
            positions: Indexes = indexes - self.index.data[0]
            if positions.view(np.uint64).max() < self.count:  # negative ones are huge when taken as unsigned
                if self.present_count == self.count:
                    return positions
                found = self._present.data[positions]
                return positions if found.all() else np.where(found, positions, -1)
        positions = np.minimum(np.searchsorted(self.index.data[: self.count], indexes), self.count - 1)
        found = (self.index.data[positions] == indexes) & self._present.data[positions]
        return positions if found.all() else np.where(found, positions, -1)

    @property
    def _is_gapless(self) -> bool:
        """Whether no gap was ever closed between the first row and the last: positions follow from indexes."""
        return self.next_index - int(self.index.data[0]) == self.count

    @property
    def removed_count(self) -> int:
        """Number of rows that were ever removed."""
        return self.next_index - self.present_count

    def position_from(self, index: int) -> int:
        """Return the position of the first row whose global index is at least `index`."""
        if self.count == 0 or index <= self.index.data[0]:
            return 0
        if index >= self.next_index:
            return self.count
        if self._is_gapless:
            return index - int(self.index.data[0])
        return int(np.searchsorted(self.index.data[: self.count], index))

    def present_positions(self) -> Indexes:
        """Return the positions of all rows."""
        return np.flatnonzero(self._present.data[: self.count])

    def present_from(self, index: int, count: int) -> Indexes:
        """Return the positions of the first `count` rows from a global index on, or of all there are."""
        start = self.position_from(index)
        found: list[Indexes] = []
        while count > 0 and start < self.count:
            end = min(self.count, start + max(count, _LEAST_GAPS))
            some = start + np.flatnonzero(self._present.data[start:end])[:count]
            found.append(some)
            count, start = count - some.size, end
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _resize(self, capacity: int, kept: Where | None) -> None:
        for column in self._columns:
            column.resize(capacity, kept, self.count)
        self._capacity = capacity
