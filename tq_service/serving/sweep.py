"""Sweeps over all rows of a partition to answer questions, in slices between which other work runs.

Questions asked together share the slices. Nothing is pinned, so rows may be added, removed and moved between two
slices, and counts are as of the time of each slice. A row that remains is neither missed nor counted twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Protocol

from tq_service.state.table import RowTable

_SLICE_SECONDS: Final = 0.001
_SLICE_ROWS: Final = 1 << 14  # for one question of cost 1
_LEAST_ROWS: Final = 1 << 10


class Slices:
    """Yields to the event loop about once a millisecond."""

    __slots__ = ("_began_at",)

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    async def turn(self) -> None:
        """End the slice if it has lasted long enough; call this after each small unit of work."""
        if time.perf_counter() - self._began_at >= _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began_at = time.perf_counter()


class Question(Protocol):
    """A question about rows.

    Attributes:
        cost: duration relative to most questions; conditions on text take 0.1 us per row.
    """

    cost: int

    def look(self, rows: slice) -> None:
        """Examine the rows of a slice, as they are now."""
        ...


async def sweep(table: RowTable, questions: Sequence[Question], slices: Slices) -> float:
    """Ask questions about all rows; return the seconds of event loop time used."""
    used_seconds = 0.0
    size = max(_LEAST_ROWS, _SLICE_ROWS // max(1, sum(question.cost for question in questions)))
    for rows in table.slices(size) if questions else ():
        began_at = time.perf_counter()
        for question in questions:
            question.look(rows)
        used_seconds += time.perf_counter() - began_at
        await slices.turn()
    return used_seconds
