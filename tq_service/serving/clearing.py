"""Clearing of samples in parts, between which other calls have their turn."""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np

from tq_service.machine.claims import check_claim
from tq_service.machine.samples import SamplesCleared
from tq_service.serving.catalog import Catalog
from tq_service.state.plan import Indexes
from tq_service.state.request import LeasedClaim
from tq_service.state.selection import Selection

_CLEARED_AT_ONCE: Final = 1 << 15  # samples
_PUTS_CLEARED_AT_ONCE: Final = 128  # that have cells of these: a few milliseconds, where each sample has its own


class Clearing:
    """Clears samples in parts; those that are not there are ignored.

    Whether a sample satisfies the conditions of the selection, or is skipped, is decided in the step that clears it.

    Args:
        catalog: where their partition is.
        partition_id: the partition.
        incarnation: that is meant; empty: whichever there is at the first part.
        selection: the samples.
        claim: the leased claim that they are of, all of which it must hold before any is cleared, and those of each
            part in the step that clears it; None: no claim is asked about.
        missing_ok: whether there is nothing to clear where the partition is not there, or not any more.
    """

    def __init__(
        self,
        catalog: Catalog,
        partition_id: str,
        incarnation: bytes,
        selection: Selection,
        *,
        claim: LeasedClaim | None = None,
        missing_ok: bool = False,
    ) -> None:
        self._catalog = catalog
        self._partition_id = partition_id
        self._incarnation = incarnation
        self._selection = selection
        self._claim = claim
        self._missing_ok = missing_ok
        self._place: int | None = 0  # where the next part begins
        self._part = self._last = selection.indexes[:0]
        self._cleared_count = 0

    async def begin(self) -> None:
        """Clear all but the last part.

        Raises:
            LeaseExpiredError, InvalidArgumentError: see `check_claim`.
        """
        partition = self._catalog.find(self._partition_id, self._incarnation, missing_ok=self._missing_ok)
        if partition is not None and self._claim is not None:
            check_claim(partition, self._claim, self._selection.indexes)
        self._last = self._take()
        while self._part.size or self._place is not None:
            self._clear()
            await asyncio.sleep(0)
            self._last = self._take()

    def finish(self) -> int:
        """Clear the last part; return how many samples were cleared in all."""
        self._clear()
        return self._cleared_count

    def _clear(self) -> None:
        if self._last.size:
            change = SamplesCleared(partition_id=self._partition_id, global_indexes=self._last, claim=self._claim)
            self._cleared_count += self._catalog.commit(change) or 0

    def _take(self) -> Indexes:
        """Return the next samples, no more than a step may clear."""
        partition = self._catalog.find(self._partition_id, self._incarnation, missing_ok=self._missing_ok)
        if partition is None:
            self._place, self._part = None, self._part[:0]
            return self._part
        self._incarnation = partition.incarnation  # what comes under the name meanwhile is another
        table = partition.table
        if not self._part.size and self._place is not None:
            part = self._selection.part(partition, self._place, _CLEARED_AT_ONCE).first(_CLEARED_AT_ONCE)
            self._place = part.next_place
            self._part = np.sort(table.index.data[part.positions])  # so that those of one put are neighbours
        positions = table.find(self._part)
        count = partition.cells.count_of_runs(positions, _PUTS_CLEARED_AT_ONCE)
        taken, positions, self._part = self._part[:count], positions[:count], self._part[count:]
        if not (self._selection.where or self._selection.skipped_by):
            return taken
        satisfying: Indexes = table.index.data[self._selection.satisfying(partition, positions[positions >= 0])]
        return satisfying
