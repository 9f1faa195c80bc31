"""Passes over the rows of a partition for those who ask about all of them, in slices, with turns for others between.

What is asked together is asked of the same slices. Nothing is pinned: rows may be added, removed and moved between two
slices, so what is counted is of the moments at which the slices were looked at. No row that stays is missed, or met
twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Protocol

from tq_service.state.table import RowTable

_SLICE_SECONDS: Final = 0.001
_SLICE_ROWS: Final = 1 << 14  # that one question is asked of at once
_LEAST_ROWS: Final = 1 << 10


class Slices:
    """Gives everything else on the event loop its turn about once a millisecond."""

    __slots__ = ("_began_at",)

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    async def turn(self) -> None:
        """End the slice where it has lasted long enough; called after each small piece of work."""
        if time.perf_counter() - self._began_at >= _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began_at = time.perf_counter()


class Question(Protocol):
    """Something that is asked of rows.

    Attributes:
        cost: how long it takes, as a multiple of what most take: conditions on text take 0.1 us a row.
    """

    cost: int

    def look(self, rows: slice) -> None:
        """Look at the rows of a slice, as they are now."""
        ...


async def sweep(table: RowTable, questions: Sequence[Question], slices: Slices) -> float:
    """Ask questions of all rows; return for how many seconds the event loop was used."""
    used_seconds = 0.0
    size = max(_LEAST_ROWS, _SLICE_ROWS // max(1, sum(question.cost for question in questions)))
    for rows in table.slices(size) if questions else ():
        began_at = time.perf_counter()
        for question in questions:
            question.look(rows)
        used_seconds += time.perf_counter() - began_at
        await slices.turn()
    return used_seconds
