"""Look-ups that wait until a number of samples satisfy their conditions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from tq_service.errors import TqError
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.selection import Selection
from tq_service.wait_clock import Waiting

_LOOKED_AT_ONCE: Final = 16_384  # rows
_MOST_UNSEEN: Final = 65_536  # rows, one written several times counted as often: memory is bounded by what is stored


class LookupWait:
    """Waits for one look-up, in a `with`.

    Nothing is polled: it takes note of rows as they are written, and looks at those once they are so many that, if all
    of them were found, the number would be reached. So a partition that is filled row by row has a few looks at some
    rows, not one look at all of them for each row. That rows were cleared is found out where the number seems reached.

    Args:
        partition: where the samples are.
        selection: which they are.
        min_count: how many are waited for.
    """

    def __init__(self, partition: Partition, selection: Selection, min_count: int) -> None:
        self._partition = partition
        self._selection = selection
        self._min_count = min_count
        self._found: set[int] = set()  # global indexes; some may have been cleared since
        stored: Indexes = partition.table.index.data[partition.table.present_positions()]
        self._unseen: deque[Indexes | range] = deque([stored])
        self._unseen_count = self._partition.table.present_count
        self._is_due = asyncio.Event()
        self._end_error: Callable[[], TqError] | None = None

    def __enter__(self) -> LookupWait:
        self._partition.on_rows.append(self._note)
        self._partition.on_change.append(self._wake)
        return self

    def __exit__(self, *exception: object) -> None:
        for listeners, listener in ((self._partition.on_rows, self._note), (self._partition.on_change, self._wake)):
            if listener in listeners:  # else the partition was cleared
                listeners.remove(listener)

    def end(self, error: Callable[[], TqError]) -> None:
        """End the wait with an error."""
        self._end_error = error
        self._is_due.set()

    async def until_enough(self, deadline: float) -> bool:
        """Return True once there are enough samples, or there never will be; False at a time of the event loop.

        The samples that are stored when it is called are looked at however long that takes, those that are written
        later until the deadline.

        Raises:
            TqError: the wait was ended.
            InvalidArgumentError: a condition does not fit its column.
        """
        loop, stored_count = asyncio.get_running_loop(), self._unseen_count
        while True:
            self._is_due.clear()
            while self._unseen and (stored_count > 0 or loop.time() < deadline):
                stored_count -= self._look()
                await asyncio.sleep(0)
                if self._has_enough():
                    break
            if self._end_error is not None:
                raise self._end_error()
            if self._has_enough() or self._is_in_vain:
                return True
            if loop.time() >= deadline:
                return False
            try:
                with Waiting():
                    async with asyncio.timeout_at(deadline):
                        await self._is_due.wait()
            except TimeoutError:
                return False

    def _note(self, indexes: Indexes | range) -> None:
        self._unseen.append(indexes)
        self._unseen_count += len(indexes)

    def _wake(self) -> None:
        if self._unseen_count >= min(self._min_count - len(self._found), _MOST_UNSEEN) or self._is_in_vain:
            self._is_due.set()

    @property
    def _is_in_vain(self) -> bool:
        """Whether there are fewer samples than are waited for, and no others come."""
        count = self._partition.table.present_count
        if self._selection.is_named:
            count = min(count, self._selection.named_count)
        return self._partition.sealed and count < self._min_count

    def _look(self) -> int:
        """Look at some rows that were written, the first ones first; return how many."""
        if self._selection.is_named:
            count, self._unseen_count = self._unseen_count, 0
            self._unseen.clear()
            part = self._selection.part(self._partition, 0, self._selection.named_count)
            self._found = set(self._partition.table.index.data[part.positions].tolist())
            return count
        taken: list[Indexes | range] = []
        left = _LOOKED_AT_ONCE
        while self._unseen and left:
            rows = self._unseen.popleft()
            if len(rows) > left:
                self._unseen.appendleft(rows[left:])
                rows = rows[:left]
            taken.append(rows)
            left -= len(rows)
        indexes = np.concatenate([np.asarray(rows, np.int64) for rows in taken])
        self._unseen_count -= indexes.size
        positions = self._partition.table.find(indexes)
        found = self._selection.among(self._partition, positions[positions >= 0])
        self._found.difference_update(indexes.tolist())
        self._found.update(self._partition.table.index.data[found].tolist())
        if len(self._found) > self._partition.table.present_count + _MOST_UNSEEN:
            self._forget_cleared()
        return indexes.size

    def _has_enough(self) -> bool:
        """Whether there are enough samples, whatever is found out of those that were written to since."""
        least = self._min_count + sum(len(rows) for rows in self._unseen if not isinstance(rows, range))
        if len(self._found) >= least:
            self._forget_cleared()
        return len(self._found) >= least

    def _forget_cleared(self) -> None:
        indexes = np.fromiter(self._found, np.int64, len(self._found))
        self._found = set(indexes[self._partition.table.find(indexes) >= 0].tolist())
