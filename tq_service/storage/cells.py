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
        rows: the rows in the put; None: all. Those that the put does not have are ignored.
    """

    put_id: bytes
    field_names: tuple[str, ...] = ()
    rows: Rows | None = None

    def rows_of(self, row_count: int) -> Rows:
        """Return the rows as far as a put of `row_count` rows has them."""
        if self.rows is None:
            return np.arange(row_count, dtype=np.int64)
        return self.rows[(self.rows >= 0) & (self.rows < row_count)]

    @property
    def is_whole(self) -> bool:
        """Whether these are all cells of the put."""
        return self.rows is None and not self.field_names
