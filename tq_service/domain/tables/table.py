"""Tables: columns of one length, each declared once by name, dtype and fill.

Growth, compaction, snapshots, restoring, what samplers may read and what tests compare go over the declared columns.
So a new column is its declaration and nothing else.

Names of columns. One that every table of its kind has is a plain word without a slash, such as `state`. One of
something that a user named is `KIND/NAME`, such as `cell/tokens`, `meta/reward` or `claim/update_actor`: the kind is a
plain word, and all that follows the first slash is the user's name as it is, slashes included. So no name of a user
can be that of another column.

`RowTable`: rows in order of their global index. A removed row stays as a gap until gaps outnumber rows; then all
columns are compacted into new arrays. Rows are never moved in place, so positions that a reader on another thread took
together with the arrays still fit them.

`SlotTable`: slots of things that come and go; a slot that is no longer used is used again.
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


class Table:
    """Columns that grow together.

    Attributes:
        columns: by name, in the order of their declarations.
        count: rows, or slots, that were ever in use and not compacted away: columns have values for so many.
    """

    __slots__ = ("_capacity", "columns", "count")

    def __init__(self) -> None:
        self.count = 0
        self.columns: dict[str, Column] = {}
        self._capacity = _FIRST_CAPACITY

    def column(self, name: str, dtype: DTypeLike, fill: Any) -> Column:
        """Declare a column, in which every row has `fill` until it is written; for how it is named see the module.

        Raises:
            ValueError: there is a column of this name.
        """
        if name in self.columns:
            raise ValueError(f"column {name!r} is declared twice")
        column = self.columns[name] = Column(dtype, fill, self._capacity)
        return column

    def thaw_column(self, column: Column, frozen: FrozenColumn) -> None:
        """Have the values of another table in one of the columns."""
        column.thaw(frozen, self._capacity)

    def _resize(self, capacity: int, kept: Where | None) -> None:
        for column in self.columns.values():
            column.resize(capacity, kept, self.count)
        self._capacity = capacity


class RowTable(Table):
    """Rows in order of insertion, looked up by global index."""

    __slots__ = ("_present", "index", "next_index", "pin_count", "present_count")

    def __init__(self) -> None:
        super().__init__()
        self.present_count = 0  # rows without the gaps
        self.next_index = 0
        self.pin_count = 0  # readers on other threads that need positions to stay
        self.index = self.column("index", np.int64, 0)
        self._present = self.column("present", np.bool_, False)

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
        for column in self.columns.values():
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


class SlotTable(Table):
    """Hands out slots, for each of which every column has a value."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        super().__init__()
        self._free: list[int] = []

    def take(self) -> int:
        """Return a slot that is not in use."""
        if self._free:
            return self._free.pop()
        if self.count == self._capacity:
            self._resize(grown(self._capacity, self.count + 1), None)
        self.count += 1
        return self.count - 1

    def take_all(self, count: int) -> Indexes:
        """Return so many slots that are not in use."""
        reused = min(count, len(self._free))
        slots = np.empty(count, np.int64)
        if reused:
            slots[:reused] = self._free[-reused:]
            del self._free[-reused:]
        end = self.count + count - reused
        if end > self._capacity:
            self._resize(grown(self._capacity, end), None)
        slots[reused:] = np.arange(self.count, end)
        self.count = end
        return slots

    def give_up_all(self, slots: Indexes) -> None:
        """Give slots up, each named once, and what the columns have of them."""
        for column in self.columns.values():
            column.clear(slots)
        self._free += slots.tolist()

    def give_up(self, slot: int) -> None:
        """Give a slot up, and what the columns have of it."""
        for column in self.columns.values():
            column.write(slot, column.fill)
        self._free.append(slot)

    def thaw(self, count: int) -> None:
        """Have so many slots, whose columns are to be thawed after it; for a table that has none."""
        self._resize(max(_FIRST_CAPACITY, count + count // 4), None)
        self.count = count

    def find_free(self, column: Column) -> None:
        """Give up the slots for which a column of objects has nothing, once it is thawed."""
        self._free = [slot for slot, each in enumerate(column.data[: self.count].tolist()) if each is None]


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
