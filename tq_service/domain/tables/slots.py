"""Slots of things that come and go, in columns; a slot that was given up is used again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tq_service.domain.plan import Indexes
from tq_service.domain.tables.column import Column, FrozenColumn, grown

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
            self._resize(grown(self._capacity, self.count + 1), self.count)
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
            self._resize(grown(self._capacity, end), self.count)
        slots[reused:] = np.arange(self.count, end)
        self.count = end
        return slots

    def give_up_all(self, slots: Indexes) -> None:
        """Give slots up, each named once, and what the columns have of them."""
        for column in self._columns:
            column.clear(slots)
        self._free += slots.tolist()

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
