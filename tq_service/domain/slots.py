"""Slots of things that come and go, in columns; a slot that was given up is used again."""

from __future__ import annotations

from typing import Any

from numpy.typing import DTypeLike

from tq_service.domain.column import Column, FrozenColumn

_FIRST_CAPACITY = 64


class SlotTable:
    """Hands out slots, for each of which every column has a value.

    Attributes:
        count: slots that were ever in use: columns have values for so many.
    """

    __slots__ = ("_capacity", "_columns", "_free", "count")

    def __init__(self) -> None:
        self.count = 0
        self._capacity = _FIRST_CAPACITY
        self._columns: list[Column] = []
        self._free: list[int] = []

    def add_column(self, dtype: DTypeLike, fill: Any) -> Column:
        """Add a column in which every slot has `fill`."""
        column = Column(dtype, fill, self._capacity)
        self._columns.append(column)
        return column

    def take(self) -> int:
        """Return a slot that is not in use."""
        if self._free:
            return self._free.pop()
        if self.count == self._capacity:
            self._resize(2 * self._capacity, self.count)
        self.count += 1
        return self.count - 1

    def give_up(self, slot: int) -> None:
        """Give a slot up, and what the columns have of it."""
        for column in self._columns:
            column.write(slot, column.fill)
        self._free.append(slot)

    def thaw(self, count: int) -> None:
        """Have so many slots, whose columns are to be thawed after it; for a table that has none."""
        self.count = count
        self._resize(max(_FIRST_CAPACITY, count + count // 4), 0)

    def thaw_column(self, column: Column, frozen: FrozenColumn) -> None:
        """Have the values of another table in one of the columns."""
        column.thaw(frozen, self._capacity)

    def find_free(self, column: Column) -> None:
        """Give up the slots for which a column of objects has nothing, once it is thawed."""
        self._free = [slot for slot, each in enumerate(column.data[: self.count].tolist()) if each is None]

    def _resize(self, capacity: int, used: int) -> None:
        self._capacity = capacity
        for column in self._columns:
            column.resize(capacity, None, used)
