"""The table of a partition's rows: columns that grow together, looked up by global index.

Rows stand in order of their global index. A removed row stays as a gap until gaps outnumber rows; then all columns are
compacted into new arrays. Arrays are replaced, never moved in place, so a reader on another thread that took them
earlier still sees a consistent past.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tq_service.domain.column import Column, FrozenColumn
from tq_service.domain.frozen import FrozenTable
from tq_service.domain.plan import Indexes

_FIRST_CAPACITY = 64
_LEAST_GAPS = 1024


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
            self._resize(max(end, self._capacity * 2), None)
        added = slice(self.count, end)
        self.index.write(added, np.arange(self.next_index, self.next_index + count))
        self._present.write(added, True)
        self.count = end
        self.next_index += count
        self.present_count += count
        return added

    def remove(self, positions: Indexes) -> None:
        """Remove rows, each given once. Positions of other rows change when the gaps are closed."""
        for column in self._columns:
            if column is not self.index:
                column.write(positions, column.fill)
        self.present_count -= positions.size
        gaps = self.count - self.present_count
        if gaps >= _LEAST_GAPS and gaps > self.present_count and not self.pin_count:
            self._resize(max(_FIRST_CAPACITY, self.present_count * 3 // 2), self._present.data[: self.count])
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

    def _resize(self, capacity: int, kept: NDArray[np.bool_] | None) -> None:
        kept = None if kept is None else kept.copy()
        for column in self._columns:
            column.resize(capacity, kept, self.count)
        self._capacity = capacity
