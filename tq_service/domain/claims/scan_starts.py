"""Where scans for ready rows start, so that a claim costs what its batch costs."""

from __future__ import annotations

from typing import TypeAlias

from tq_service.domain.plan import LengthSource
from tq_service.domain.tables.meta import Condition

_MOST_SCAN_STARTS = 64
_MOST_SCAN_START_BYTES = 2**20
_VALUE_BYTES = 64  # of a value beside its text

# What decides which rows are ready for a way of asking: data fields, conditions, and the length that its sampler needs.
ScanKey: TypeAlias = tuple[tuple[str, ...], tuple[Condition, ...], LengthSource | None]


class ScanStarts:
    """For each way of asking, a global index below which no row is ready.

    Of ways that nobody asks in any more so many are kept at most, and so much of what they compare with.
    """

    def __init__(self) -> None:
        self._first: dict[ScanKey, int] = {}
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._first)

    def get(self, key: ScanKey) -> int:
        """Return where a scan may start."""
        return self._first.get(key, 0)

    def set(self, key: ScanKey, index: int) -> None:
        """Have later scans start at a global index."""
        if key not in self._first:
            size = sum(_VALUE_BYTES + len(str(value)) for condition in key[1] for value in condition.values)
            if len(self._first) >= _MOST_SCAN_STARTS or self._used_bytes + size > _MOST_SCAN_START_BYTES:
                self.clear()
            self._used_bytes += size
        self._first[key] = index

    def clear(self) -> None:
        """Have all scans start at the first row."""
        self._first.clear()
        self._used_bytes = 0

    def touched(self, index: int) -> None:
        """Say that rows from a global index on may have become ready."""
        for key, first in self._first.items():
            if index < first:
                self._first[key] = index
