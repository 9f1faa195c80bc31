"""Sweeps, which scan all rows in a partition in short slices that leave time for other work.

One sweep can answer several questions. The table is not pinned, so rows can be added, removed and moved between slices.
Each slice is examined in the state that it has at that moment. A row that exists throughout the sweep is examined
exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Protocol

from tq_service.state.table import RowTable

_SLICE_SECONDS: Final = 0.001
_SLICE_ROWS: Final = 1 << 14  # rows per slice for a single question of cost 1
_LEAST_ROWS: Final = 1 << 10


class Slices:
    """Yields to the event loop about once per millisecond."""

    __slots__ = ("_began_at",)

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    async def turn(self) -> None:
        """Yield to the event loop if a millisecond has passed. Call this method after each small unit of work."""
        if time.perf_counter() - self._began_at >= _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began_at = time.perf_counter()


class Question(Protocol):
    """A question about rows, answered by a sweep.

    Attributes:
        cost: cost of answering the question, relative to a simple one. For example, evaluating a condition on text
            takes 0.1 us per row.
    """

    cost: int

    def look(self, rows: slice) -> None:
        """Examine the rows of a slice in their current state."""
        ...


async def sweep(table: RowTable, questions: Sequence[Question], slices: Slices) -> float:
    """Answer questions about all rows in a table, and return the event-loop time used, in seconds."""
    used_seconds = 0.0
    size = max(_LEAST_ROWS, _SLICE_ROWS // max(1, sum(question.cost for question in questions)))
    for rows in table.slices(size) if questions else ():
        began_at = time.perf_counter()
        for question in questions:
            question.look(rows)
        used_seconds += time.perf_counter() - began_at
        await slices.turn()
    return used_seconds
