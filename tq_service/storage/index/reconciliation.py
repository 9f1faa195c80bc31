"""What a controller says of the puts it knows, in pieces, and which cells of them are not known any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tq_service.storage.cells import PutCells
from tq_service.storage.index.put import StoredPut

_MOST_NAMED: Final = 16


@dataclass(slots=True, eq=False)
class Reconciliation:
    """How far it is said which puts are known. From its begin to its end other calls confirm and free puts.

    Attributes:
        owner: the controller that says so.
        staying: puts that are known, or were confirmed meanwhile: whatever else is confirmed is dropped at the end.
        freed: puts that were freed meanwhile: they may be listed, and are not missing. A put that is stored later under
            the id of one of them is another put, of which the list says nothing.
        partial: puts of which cells were listed.
        put_id: the one whose cells are being listed.
        parts: what was listed of it so far.
        missing_put_ids: some of the known puts that are not here, or damaged.
        missing_count: number of all of them.
        dropped_count: number of confirmed puts that are not known, and were dropped.
    """

    owner: bytes = b""
    staying: set[bytes] = field(default_factory=set)
    freed: set[bytes] = field(default_factory=set)
    partial: set[bytes] = field(default_factory=set)
    put_id: bytes = b""
    parts: list[PutCells] = field(default_factory=list)
    missing_put_ids: list[bytes] = field(default_factory=list)
    missing_count: int = 0
    dropped_count: int = 0

    def miss(self, put_id: bytes) -> None:
        """Count a put that is known, but not here."""
        self.missing_count += 1
        if len(self.missing_put_ids) < _MOST_NAMED:
            self.missing_put_ids.append(put_id)


def cells_besides(put_id: bytes, put: StoredPut, parts: Sequence[PutCells]) -> list[PutCells]:
    """Return the cells of a put that are in none of the parts."""
    kept: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {
        name: np.zeros(put.row_count, np.bool_) for name, column in put.columns.items() if column is not None
    }
    for part in parts:
        rows = part.rows_of(put.row_count)
        for name in part.field_names or kept:
            if name in kept:
                kept[name][rows] = True
    alike: dict[bytes, list[str]] = {}
    for name, mask in kept.items():
        if not mask.all():
            alike.setdefault(mask.tobytes(), []).append(name)
    return [
        PutCells(put_id=put_id, field_names=tuple(names), rows=np.flatnonzero(~kept[names[0]]))
        for names in alike.values()
    ]
