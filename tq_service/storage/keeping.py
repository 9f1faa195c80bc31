"""What is told of known puts, turned round: which cells of them are not known any more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tq_service.storage.cells import PutCells, Rows, expand_runs
from tq_service.storage.stored_put import StoredPut


def group_cells(cells: Sequence[PutCells]) -> dict[bytes, Sequence[PutCells]]:
    """Return the parts of each put that are named, none where all of it is."""
    parts: dict[bytes, list[PutCells]] = {}
    whole: dict[bytes, Sequence[PutCells]] = {}
    for some in cells:
        if some.is_whole:
            whole[some.put_id] = ()
        else:
            parts.setdefault(some.put_id, []).append(some)
    return parts | whole


def cells_besides(put_id: bytes, put: StoredPut, parts: Sequence[PutCells]) -> list[PutCells]:
    """Return the cells of a put that are in none of the parts."""
    kept: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {
        name: np.zeros(put.row_count, np.bool_) for name, column in put.columns.items() if column is not None
    }
    for part in parts:
        rows = _rows(part, put.row_count)
        for name in part.field_names or kept:
            if name in kept:
                kept[name][rows] = True
    alike: dict[bytes, list[str]] = {}
    for name, mask in kept.items():
        if not mask.all():
            alike.setdefault(mask.tobytes(), []).append(name)
    return [_others(put_id, names, kept[names[0]]) for names in alike.values()]


def _rows(part: PutCells, row_count: int) -> Rows:
    if part.first_rows is None or part.row_counts is None:
        return np.arange(row_count, dtype=np.int64)
    starts = np.clip(part.first_rows, 0, row_count)
    ends = np.clip(part.first_rows + np.clip(part.row_counts, 0, row_count), starts, row_count)
    return expand_runs(starts, ends - starts)


def _others(put_id: bytes, names: Sequence[str], kept: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> PutCells:
    rows = np.flatnonzero(~kept).astype(np.int64)
    starts = np.r_[0, np.flatnonzero(np.diff(rows) != 1) + 1]
    return PutCells(
        put_id=put_id,
        field_names=tuple(names),
        first_rows=rows[starts],
        row_counts=np.diff(np.r_[starts, rows.size]),
    )
