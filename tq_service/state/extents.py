"""Cells that have grown: each is several extents, which a put and appends have stored one after the other.

    cell of a row: GROWN | slot --> last extent -- previous --> the one before -- previous --> ... first extent

A cell that was written once is not in here, and costs nothing. An append adds an extent behind the last one and changes
none; a truncation takes extents from the end, and cuts the one that is the last then.
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
"""Marks a cell that is the slot of its last extent. Cells of puts are less: their slots do not reach 2^30."""

MOST_EXTENTS: Final = 1024
"""Of one cell: a read names each of them."""

_NONE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """The extents of some cells, those of each in order.

    Attributes:
        owners: which of the cells each is of, ascending `(extents,)`.
        slots: where each is in the table, -1 for a cell that has not grown `(extents,)`.
        cells: the row of a put that each is, as cells that have not grown `(extents,)`.
    """

    owners: Indexes
    slots: Indexes
    cells: Indexes

    @property
    def counts(self) -> Indexes:
        """The number of extents of each cell."""
        return np.diff(np.flatnonzero(np.diff(self.owners, prepend=_NONE)), append=self.owners.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """How extents follow each other, by slot: as it is now, or in a snapshot."""

    cell: Indexes
    previous: Indexes
    depth: Indexes

    def counts(self, cells: Indexes) -> Indexes:
        """Return of how many extents cells are."""
        counts = np.ones(cells.size, np.int64)
        has_grown = cells >= GROWN
        counts[has_grown] = self.depth[cells[has_grown] - GROWN]
        return counts

    def resolve(self, cells: Indexes) -> Extents:
        """Return the extents of cells."""
        counts = self.counts(cells)
        owners = np.repeat(np.arange(cells.size), counts)
        slots, found = np.full(owners.size, _NONE), cells[owners]
        has_grown = cells >= GROWN
        places, current = np.cumsum(counts)[has_grown] - 1, cells[has_grown] - GROWN
        while current.size:  # from the last extent of each to the first
            slots[places] = current
            found[places] = self.cell[current]
            current = self.previous[current]
            goes_on = current != _NONE
            places, current = places[goes_on] - 1, current[goes_on]
        return Extents(owners=owners, slots=slots, cells=found)


class ExtentTable(SlotTable):
    """The extents of all cells of a partition that have grown, each a slot that its field occupies."""

    __slots__ = ("_cell", "_depth", "_end", "_previous")

    def __init__(self) -> None:
        super().__init__("field")
        self._cell = self.column("cell", np.int64, _NONE)
        self._previous = self.column("previous", np.int64, _NONE)
        self._end = self.column("end", np.int64, 0)  # length of the cell up to the end of the extent
        self._depth = self.column("depth", np.int64, 0)  # extents up to this one

    @property
    def chains(self) -> Chains:
        """How extents follow each other now."""
        return Chains(cell=self._cell.data, previous=self._previous.data, depth=self._depth.data)

    def has(self, cells: Indexes) -> bool:
        """Whether any of some cells has grown."""
        return not self.is_empty and bool((cells >= GROWN).any())

    def lengths(self, extents: Extents) -> Indexes:
        """Return how much belongs to the cell of each extent, `WHOLE_EXTENT` for cells that have not grown."""
        slots = extents.slots
        previous = self._previous[slots]
        starts = np.where(previous == _NONE, 0, self._end[previous])
        return np.where(slots == _NONE, WHOLE_EXTENT, self._end[slots] - starts)

    def append(self, name: str, cells: Indexes, lengths: Indexes, added: Indexes, ends: Indexes) -> Indexes:
        """Add an extent to each of some cells of a field; return the cells that they are then.

        Args:
            name: the field.
            cells: as they are `(n,)`.
            lengths: of these `(n,)`.
            added: the extents, as cells of a put `(n,)`.
            ends: lengths of the cells with these `(n,)`.
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
        """Cut cells of a field to lengths `(n,)`, 1 or more and less than they have.

        Return the cells that they are then, and the extents that are in none any more, as cells of puts.
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
        """Forget the extents of cells; return all of them, and cells that have not grown as they are."""
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
    """Return which cells there are, and have not grown."""
    return (cells >= 0) & (cells < GROWN)
