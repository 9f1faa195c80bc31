"""Grown cells. A grown cell consists of several extents: the first was stored by a put, and each append added another.

    cell of a row: GROWN | slot --> last extent -- previous --> extent before it -- previous --> ... first extent

A cell that has been written only once has no entry in the extent table. An append adds an extent to the end of a cell
without changing earlier extents. A truncation removes extents from the end of a cell and shortens the last remaining
extent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.schema import WHOLE_EXTENT
from tq_service.state.plan import Indexes
from tq_service.state.table import SlotTable

GROWN: Final = 1 << 62
"""Flag bit of a grown cell. The other bits hold the slot of the cell's last extent. Other cells have lower numbers."""

MOST_EXTENTS: Final = 1024
"""Maximum number of extents per cell. The limit exists because a read must list every extent of each cell."""

_NONE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """The extents of several cells, sorted by cell and then by offset. Each array has shape `(extents,)`.

    Attributes:
        owners: for each extent, the position of its cell in the array of cells. The positions are in ascending order.
        slots: slot of each extent in the extent table, or -1 for the only extent of a cell that has not grown.
        cells: put and row of each extent, encoded like a cell that has not grown.
    """

    owners: Indexes
    slots: Indexes
    cells: Indexes

    @property
    def counts(self) -> Indexes:
        """Number of extents in each cell."""
        return np.diff(np.flatnonzero(np.diff(self.owners, prepend=_NONE)), append=self.owners.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """The columns that link each extent to the previous one, taken from the current table or from a snapshot."""

    cell: Indexes
    previous: Indexes
    depth: Indexes

    def counts(self, cells: Indexes) -> Indexes:
        """Return the number of extents in each cell."""
        counts = np.ones(cells.size, np.int64)
        has_grown = cells >= GROWN
        counts[has_grown] = self.depth[cells[has_grown] - GROWN]
        return counts

    def resolve(self, cells: Indexes) -> Extents:
        """Return all extents of the given cells."""
        counts = self.counts(cells)
        owners = np.repeat(np.arange(cells.size), counts)
        slots, found = np.full(owners.size, _NONE), cells[owners]
        has_grown = cells >= GROWN
        places, current = np.cumsum(counts)[has_grown] - 1, cells[has_grown] - GROWN
        while current.size:  # iterate from the last extent of each cell to the first
            slots[places] = current
            found[places] = self.cell[current]
            current = self.previous[current]
            goes_on = current != _NONE
            places, current = places[goes_on] - 1, current[goes_on]
        return Extents(owners=owners, slots=slots, cells=found)


class ExtentTable(SlotTable):
    """The extents of all grown cells in a partition. Each extent occupies a slot, which also stores the field name."""

    __slots__ = ("_cell", "_depth", "_end", "_previous")

    def __init__(self) -> None:
        super().__init__("field")
        self._cell = self.column("cell", np.int64, _NONE)
        self._previous = self.column("previous", np.int64, _NONE)
        self._end = self.column("end", np.int64, 0)  # length of the cell up to the end of this extent
        self._depth = self.column("depth", np.int64, 0)  # number of extents in the cell up to and including this extent

    @property
    def chains(self) -> Chains:
        """The current links between extents."""
        return Chains(cell=self._cell.data, previous=self._previous.data, depth=self._depth.data)

    def has(self, cells: Indexes) -> bool:
        """Return whether any of the cells has grown."""
        return not self.is_empty and bool((cells >= GROWN).any())

    def lengths(self, extents: Extents) -> Indexes:
        """Return the length of each extent, or `WHOLE_EXTENT` for the extent of a cell that has not grown."""
        slots = extents.slots
        previous = self._previous[slots]
        starts = np.where(previous == _NONE, 0, self._end[previous])
        return np.where(slots == _NONE, WHOLE_EXTENT, self._end[slots] - starts)

    def append(self, name: str, cells: Indexes, lengths: Indexes, added: Indexes, ends: Indexes) -> Indexes:
        """Add an extent to each of the given cells of a field. Return the new cell numbers.

        Args:
            name: field name.
            cells: current cell numbers, as an array of shape `(n,)`.
            lengths: current length of each cell.
            added: extent to add to each cell, encoded as a cell in a put.
            ends: length of each cell after the append.
        """
        previous = cells - GROWN
        is_first = previous < 0
        if is_first.any():
            previous[is_first] = self._add(name, cells[is_first], _NONE, lengths[is_first], 1)
        return GROWN + self._add(name, added, previous, ends, self._depth[previous] + 1)

    def _add(self, name: str, cells: Indexes, previous: Indexes | int, ends: Indexes, depth: Indexes | int) -> Indexes:
        slots = np.array(self.allocate(cells.size))
        names = np.empty(slots.size, np.object_)
        names[:] = name
        self.occupants.write(slots, names)
        self._cell.write(slots, cells)
        self._previous.write(slots, previous)
        self._end.write(slots, ends)
        self._depth.write(slots, depth)
        return slots

    def truncate(self, name: str, cells: Indexes, lengths: Indexes) -> tuple[Indexes, Indexes]:
        """Truncate cells of a field. Return the new cell numbers, and the removed extents encoded as cells in puts.

        Each length must be at least 1 and less than the current length of its cell.
        """
        last = cells - GROWN
        is_first = last < 0
        dropped = []
        rest = np.flatnonzero(~is_first)
        while rest.size:
            previous = self._previous[last[rest]]
            is_over = (previous != _NONE) & (self._end[previous] >= lengths[rest])
            rest = rest[is_over]
            dropped.append(last[rest])
            last[rest] = previous[is_over]
        self._end.write(last[~is_first], lengths[~is_first])
        freed = self._drop(np.concatenate(dropped)) if dropped else cells[:0]
        if is_first.any():
            last[is_first] = self._add(name, cells[is_first], _NONE, lengths[is_first], 1)
        return GROWN + last, freed

    def release(self, cells: Indexes) -> Indexes:
        """Remove the extents of grown cells, and return each as a cell in a put. Return other cells unchanged."""
        if not self.has(cells):
            return cells
        extents = self.chains.resolve(cells)
        self._drop(extents.slots[extents.slots != _NONE])
        return extents.cells

    def _drop(self, slots: Indexes) -> Indexes:
        cells: Indexes = self._cell[slots]
        if slots.size:
            self.free_slots(slots)
        return cells


def plain(cells: Indexes) -> NDArray[np.bool_]:
    """Return a mask of the cells that exist and have not grown."""
    return (cells >= 0) & (cells < GROWN)
