"""Puts that hold cells of a partition, counted by cells and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tq_service.domain.tables.table import SlotTable


class Put(NamedTuple):
    """A put in the life of the storage service that took it."""

    storage_id: str
    boot_id: bytes
    put_id: bytes


class PutTable(SlotTable):
    """The puts that hold cells of a partition, each counted by its cells and bytes; slots are used again.

    Attributes:
        used_bytes: bytes of all cells. Those of a put go with its cells: all with the last, of parts an equal share for
            each cell, since sizes of single cells are known to the storage service only.
    """

    __slots__ = ("_bytes", "_cells", "_made", "used_bytes")

    def __init__(self) -> None:
        super().__init__("put")
        self._cells = self.column("cells", np.int64, 0)
        self._made = self.column("made", np.int64, 0)
        self._bytes = self.column("bytes", np.int64, 0)
        self.used_bytes = 0

    def add(self, put: Put, cells: int, value_bytes: int) -> int:
        """Enter a put with so many cells of so many bytes together, and return its slot."""
        self.used_bytes += value_bytes
        slot = self.take()
        self.occupants.write(slot, put)
        self._cells.write(slot, cells)
        self._made.write(slot, cells)
        self._bytes.write(slot, value_bytes)
        return slot

    def get(self, slot: int) -> Put:
        """Return the put of a slot in use."""
        put: Put | None = self.occupants[slot]
        if put is None:
            raise LookupError(f"put slot {slot} is free")
        return put

    def drop(self, slot: int, cells: int) -> bool:
        """Count cells off; return whether the put has none left, and forget it then."""
        cells_left, bytes_left = int(self._cells[slot]), int(self._bytes[slot])
        gone_bytes = bytes_left * cells // cells_left
        self.used_bytes -= gone_bytes
        if cells_left > cells:
            self._cells.write(slot, cells_left - cells)
            self._bytes.write(slot, bytes_left - gone_bytes)
            return False
        self.give_up(slot)
        return True

    def all(self) -> Iterable[Put]:
        """Return all puts in use."""
        return [put for put in self.occupants[: self.count] if put is not None]

    def rebuild(self) -> None:
        """Find out what follows from restored columns."""
        super().rebuild()
        self.used_bytes = int(self._bytes.data.sum())
