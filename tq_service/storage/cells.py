"""How callers name cells of one put."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

    @property
    def is_whole(self) -> bool:
        """Whether these are all cells of the put."""
        return self.first_rows is None and not self.field_names
