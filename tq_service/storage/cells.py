"""How callers name cells of one put."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.wire.runs import expand_runs, runs_of

Rows = NDArray[np.int64]


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

    @classmethod
    def of_rows(cls, put_id: bytes, field_names: tuple[str, ...], rows: Rows) -> PutCells:
        """Return cells of these rows, ascending, at least one."""
        firsts, counts = runs_of(rows)
        return cls(put_id=put_id, field_names=field_names, first_rows=firsts, row_counts=counts)

    def rows(self, row_count: int) -> Rows:
        """Return the rows one by one, those left out that a put of `row_count` rows has not."""
        if self.first_rows is None or self.row_counts is None:
            return np.arange(row_count, dtype=np.int64)
        starts = np.clip(self.first_rows, 0, row_count)
        ends = np.clip(self.first_rows + np.clip(self.row_counts, 0, row_count), starts, row_count)
        return expand_runs(starts, ends - starts)

    @property
    def is_whole(self) -> bool:
        """Whether these are all cells of the put."""
        return self.first_rows is None and not self.field_names
