"""Leases: which samples of a task are with a worker that has yet to acknowledge them, and which are set aside.

One column, the `claim` of a task, says of each row what became of it:

- 0: it can be claimed;
- 1: consumed in an earlier epoch;
- n from 2 on: consumed for good by the claim with serial n: handed out without a lease, or acknowledged;
- -n: leased to the claim with serial n;
- -1: set aside, having been handed out too often without being acknowledged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.frozen import FrozenLeases
from tq_service.domain.plan import Indexes
from tq_service.domain.tables.column import Column
from tq_service.domain.tables.table import RowTable, count_values

UNCLAIMED = 0  # so that a new task costs the same however many rows there are
KEPT = 1
SET_ASIDE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """How samples are leased to a queue worker.

    Attributes:
        seconds: what is not acknowledged within so many seconds can be claimed by others.
        max_deliveries: a sample that was handed out so often without being acknowledged is set aside; None: no bound.
        group_block_size: where the claim is of whole groups, which then are acknowledged, given back and handed out
            again whole: 0 for named groups, else the length of the blocks of consecutive indexes that stand in for
            them; None: samples come and go one by one.
    """

    seconds: float
    max_deliveries: int | None = None
    group_block_size: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """The lease of one claim, also once nothing is left of it.

    Attributes:
        request_id: names the claim.
        serial: its number in the task.
        rows: global indexes of its samples.
        delivery_counts: for each of them how often it was handed out, this time included.
        left_count: samples that are leased: neither acknowledged, failed, cleared nor given back.
        deadline: when it runs out, by the clock of the event loop.
    """

    request_id: bytes
    serial: int
    rows: Indexes
    terms: LeaseTerms
    delivery_counts: NDArray[np.int32]
    left_count: int
    deadline: float = math.inf

    def extend(self, seconds: float) -> None:
        """Change how long it lasts, also where it starts anew after a restart."""
        self.terms = replace(self.terms, seconds=seconds)

    def remaining_seconds(self, now: float) -> float:
        """Return how long what is left of it stays with the worker; 0 where nothing is left."""
        return max(0.0, self.deadline - now) if self.left_count else 0.0


class Leases:
    """The leases of one task. What they change in the `claim` column is changed here only.

    Attributes:
        live: leases with samples left, by their serial.
        count: samples that are leased.
        set_aside_count: samples set aside in this epoch, cleared ones included.
    """

    def __init__(self, task_name: str, table: RowTable, claim: Column) -> None:
        self.live: dict[int, Lease] = {}
        self.count = 0
        self.set_aside_count = 0
        self._task_name = task_name
        self._table = table
        self._claim = claim
        self._deliveries: Column | None = None

    @property
    def deliveries(self) -> Column:
        """How often each row was handed out under a lease in this epoch; made on first use, most tasks need none."""
        if self._deliveries is None:
            self._deliveries = self._table.column(f"deliveries/{self._task_name}", np.int32, 0)
        return self._deliveries

    def freeze(self) -> FrozenLeases:
        """Return what is known of rows as it is now; the leases themselves are frozen with their claims."""
        deliveries = None if self._deliveries is None else self._deliveries.freeze(self._table.count)
        return FrozenLeases(deliveries=deliveries, set_aside_count=self.set_aside_count)

    def thaw(self, frozen: FrozenLeases) -> None:
        """Have what is known of the rows of another table; for one that has no leases, before they are resumed."""
        self.set_aside_count = frozen.set_aside_count
        if frozen.deliveries is not None:
            self._table.thaw_column(self.deliveries, frozen.deliveries)

    def resume(self, lease: Lease, left_count: int) -> None:
        """Have a lease of which so many rows are leased; its time begins anew."""
        lease.left_count = left_count
        if left_count:
            self.live[lease.serial] = lease
            self.count += left_count

    def start(self, request_id: bytes, serial: int, rows: Indexes, positions: Indexes, terms: LeaseTerms) -> Lease:
        """Lease rows to the claim with this serial."""
        counts = self.deliveries.data[positions] + np.int32(1)
        self.deliveries.write(positions, counts)
        self._claim.write(positions, -serial)
        lease = Lease(
            request_id=request_id, serial=serial, rows=rows, terms=terms, delivery_counts=counts,
            left_count=positions.size,
        )  # fmt: skip
        self.count += positions.size
        self.live[serial] = lease
        return lease

    def left(self, lease: Lease) -> Indexes:
        """Return the positions of the rows that are still leased."""
        positions = self._table.find(lease.rows)
        positions = positions[positions >= 0]
        left: Indexes = positions[self._claim.data[positions] == -lease.serial]
        return left

    def settle(self, lease: Lease, positions: Indexes) -> None:
        """Have leased rows consumed for good."""
        self._claim.write(positions, lease.serial)
        self._leave(lease, positions.size)

    def give_back(self, lease: Lease, positions: Indexes) -> None:
        """Make leased rows claimable again, as if they had not been handed out."""
        self.deliveries.write(positions, self.deliveries.data[positions] - np.int32(1))
        self._claim.write(positions, UNCLAIMED)
        self._leave(lease, positions.size)

    def expire(self, lease: Lease) -> tuple[Indexes, Indexes]:
        """Take all that is left; return the positions that can be claimed again, and of those set aside."""
        left, most = self.left(lease), lease.terms.max_deliveries
        is_spent = self.deliveries.data[left] >= (np.iinfo(np.int32).max if most is None else most)
        back, aside = left[~is_spent], left[is_spent]
        self._claim.write(back, UNCLAIMED)
        self._claim.write(aside, SET_ASIDE)
        self.set_aside_count += aside.size
        self._leave(lease, left.size)
        return back, aside

    def close(self, positions: Indexes) -> None:
        """Have those of some rows that are leased consumed for good: they are being cleared, or have failed."""
        claims = self._claim.data[positions]
        leased = positions[claims < SET_ASIDE]
        serials, counts = count_values(-claims[claims < SET_ASIDE])
        self._claim.write(leased, -self._claim.data[leased])
        for serial, count in zip(serials.tolist(), counts.tolist(), strict=True):
            self._leave(self.live[serial], count)

    def set_aside(self) -> Indexes:
        """Return the positions of the rows that are set aside and not cleared."""
        if self.set_aside_count == 0:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self._claim.data[: self._table.count] == SET_ASIDE)

    def reset(self) -> Indexes:
        """Forget all leases, deliveries and what is set aside; return the positions that can be claimed again."""
        if self._deliveries is None:
            return np.zeros(0, np.int64)
        reopened = np.flatnonzero(self._claim.data[: self._table.count] < UNCLAIMED)
        self._claim.write(reopened, UNCLAIMED)
        self.deliveries.write(slice(0, self._table.count), 0)
        self.live.clear()
        self.count = self.set_aside_count = 0
        return reopened

    def _leave(self, lease: Lease, count: int) -> None:
        self.count -= count
        lease.left_count -= count
        if lease.left_count == 0:
            self.live.pop(lease.serial, None)
