"""How callers name cells: runs of rows of puts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRuns:
    """The cells of some fields that are read, as runs of neighbouring rows in the order wanted.

    Attributes:
        field_names: fields that share these runs.
        put_indexes: for each run, the index of its put in the list of the read.
        first_rows: for each run, its first row in the put.
        row_counts: for each run, its number of rows.
    """

    field_names: tuple[str, ...]
    put_indexes: Rows
    first_rows: Rows
    row_counts: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PutCells:
    """Cells of one put.

    Attributes:
        put_id: the put.
        field_names: the fields; empty: all.
        first_rows: first row of each run of rows; None: all rows.
        row_counts: number of rows of each run.
    """

    put_id: bytes
    field_names: tuple[str, ...] = ()
    first_rows: Rows | None = None
    row_counts: Rows | None = None

    @property
    def is_whole(self) -> bool:
        """Whether these are all cells of the put."""
        return self.first_rows is None and not self.field_names


def expand_runs(firsts: Rows, counts: Rows) -> Rows:
    """Return every row of runs, run after run: firsts (3, 8), counts (2, 1) give (3, 4, 8)."""
    if len(firsts) == 1:
        return np.arange(firsts[0], firsts[0] + counts[0], dtype=np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(firsts - (ends - counts), counts) + np.arange(total, dtype=np.int64)
