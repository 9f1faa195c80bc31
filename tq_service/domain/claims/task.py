"""What one task has consumed of a partition: its plans, claims, epoch and end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tq_service.domain.aging_log import AgingLog
from tq_service.domain.claims.claim_records import Batch, QueueClaim
from tq_service.domain.claims.end import End
from tq_service.domain.claims.leases import KEPT, UNCLAIMED, Lease, Leases, LeaseTerms
from tq_service.domain.claims.ordered_rows import OrdersOfTask
from tq_service.domain.claims.request import BatchSpec, ClaimRequest
from tq_service.domain.claims.scan_starts import ScanStarts
from tq_service.domain.claims.serial_map import SerialMap
from tq_service.domain.frozen import FrozenTask
from tq_service.domain.plan import Indexes, Plan, RankPlan
from tq_service.domain.tables.table import RowTable, count_values
from tq_service.errors import (
    ClaimReleasedError,
    LeaseExpiredError,
    PreconditionError,
    RankDisagreementError,
    SamplesClearedError,
    StaleEpochError,
)

_REFUSED_SECONDS = 900.0
_MOST_REFUSED = 65_536
_MOST_BATCHES_WITHOUT_ROWS = 16  # short batches come at the end of an epoch, so there is rarely more than one


@dataclass(slots=True)
class Refused:
    """Request ids of claims that are no more, remembered long enough for a late GetMeta to be refused."""

    log: AgingLog[None] = field(default_factory=AgingLog)

    def add(self, request_id: bytes) -> None:
        """Remember one, forget those that are too old to matter."""
        now = time.monotonic()
        self.log.add(request_id, now, None)
        self.log.drop_before(now - _REFUSED_SECONDS)
        while len(self.log) > _MOST_REFUSED:
            self.log.drop_oldest()

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self.log


class Task:
    """Consumption of one partition by one named consumer.

    `claim` says of each row what became of it, see `leases`. Records of claims are dropped with the last of their rows,
    so what a task keeps is bounded by what is stored. A short batch in which some ranks have no rows outlives those of
    the others, since these ranks may come late.

    Attributes:
        consumed_count: rows consumed in this epoch, leased and cleared ones included.
        open_count: rows that are live or held, and neither consumed nor set aside.
    """

    def __init__(self, name: str, table: RowTable, *, open_count: int) -> None:
        self.name = name
        self.epoch = 0
        self.dp_size: int | None = None
        self.next_batch_index = 0
        self.end: End | None = None
        self.consumed_count = 0
        self.open_count = open_count
        self.claim = table.column(f"claim/{name}", np.int64, UNCLAIMED)
        self.leases = Leases(name, table, self.claim)
        self.scan_starts = ScanStarts()
        self.orders = OrdersOfTask()
        self.released = Refused()
        self.expired = Refused()
        self._table = table
        self._serial = KEPT
        self._batches: dict[int, Batch] = {}
        self._queue_claims: dict[bytes, QueueClaim] = {}
        self._by_serial: SerialMap[Batch | QueueClaim] = SerialMap()
        self._batches_without_rows: deque[int] = deque()  # batches kept though their rows are gone

    # Freezing

    def freeze(self) -> FrozenTask:
        """Return all that the task has on record, as it is now."""
        return FrozenTask(
            name=self.name,
            epoch=self.epoch,
            dp_size=self.dp_size,
            next_batch_index=self.next_batch_index,
            end=self.end,
            consumed_count=self.consumed_count,
            open_count=self.open_count,
            serial=self._serial,
            claim=self.claim.freeze(self._table.count),
            records=self._by_serial.freeze(),
            batches_without_rows=[self._batches[batch_index] for batch_index in self._batches_without_rows],
            leases=self.leases.freeze(),
            released=self.released.log.freeze(),
            expired=self.expired.log.freeze(),
        )

    @classmethod
    def thaw(cls, frozen: FrozenTask, table: RowTable) -> Task:
        """Return the task that was frozen, with the records of `frozen` for its own; `table` has its rows."""
        task = cls(frozen.name, table, open_count=frozen.open_count)
        task.epoch, task.dp_size = frozen.epoch, frozen.dp_size
        task.next_batch_index = frozen.next_batch_index
        task.end = frozen.end
        task.consumed_count = frozen.consumed_count
        task._serial = frozen.serial
        table.thaw_column(task.claim, frozen.claim)
        task.leases.thaw(frozen.leases)
        task.released.log.thaw(frozen.released)
        task.expired.log.thaw(frozen.expired)
        task._resume_records(frozen)
        return task

    def _resume_records(self, frozen: FrozenTask) -> None:
        serials, counts = count_values(self.claim[: self._table.count])
        rows_of = dict(zip(serials.tolist(), counts.tolist(), strict=True))
        for block in frozen.records:
            self._by_serial.update(block)
            for serial, record in block.items():
                record.remaining = rows_of.get(serial, 0) + rows_of.get(-serial, 0)
                if isinstance(record, Batch):
                    self._batches[record.batch_index] = record
                    continue
                self._queue_claims[record.request_id] = record
                if record.lease is not None:
                    self.leases.resume(record.lease, rows_of.get(-serial, 0))
        for batch in frozen.batches_without_rows:
            self._batches[batch.batch_index] = batch
            self._batches_without_rows.append(batch.batch_index)

    # Replays

    def check_epoch(self, epoch: int | None) -> None:
        """Refuse a caller that means another epoch."""
        if epoch is not None and epoch != self.epoch:
            raise StaleEpochError(
                f"task {self.name!r} is at epoch {self.epoch}, got epoch {epoch}; its consumption was reset since: "
                f"take the epoch of check_consumption",
                metadata={"got": str(epoch), "expected": str(self.epoch)},
            )

    def recorded(self, request: ClaimRequest) -> RankPlan | End | None:
        """Return the recorded answer to a request, None where there is none yet."""
        if request.rank is None:
            return self._recorded_queue(request)
        rank = request.rank
        if self.dp_size is not None and rank.dp_size != self.dp_size:
            raise _disagreement("dp_size", rank.dp_size, self.dp_size, f"this epoch of task {self.name!r}")
        if rank.batch_index >= self.next_batch_index:
            return self.end
        batch = self._batches.get(rank.batch_index)
        if batch is None:
            raise self._cleared()
        differs = request.batch_spec.disagreement(batch.batch_spec)
        if differs is not None:
            raise _disagreement(*differs, f"batch_index {rank.batch_index} of task {self.name!r}")
        part = batch.plan.ranks[rank.dp_rank]
        if batch.remaining < batch.size:
            self.check_present(part)
        return part

    def _recorded_queue(self, request: ClaimRequest) -> RankPlan | End | None:
        request_id = request.request_id
        if request_id in self.released:
            raise ClaimReleasedError(f"this claim of task {self.name!r} was released; ask again under a new request_id")
        if request_id in self.expired:
            raise LeaseExpiredError(
                f"the lease of this claim of task {self.name!r} ran out, and others may have its samples; ask again "
                f"under a new request_id"
            )
        claim = self._queue_claims.get(request_id)
        if claim is None:
            return None
        if claim.remaining < claim.part.rows.size:
            self.check_present(claim.part)
        claim.given_count += 1
        return claim.part

    def check_present(self, part: RankPlan) -> None:
        """Refuse an answer of which samples have been cleared since it was planned."""
        if bool((self._table.find(part.rows) < 0).any()):
            raise self._cleared()

    def _cleared(self) -> SamplesClearedError:
        return SamplesClearedError(
            f"what task {self.name!r} was to get here was planned, but samples of it have been cleared since; go on "
            f"with a later batch_index (the next to be planned is {self.next_batch_index}), a queue worker under a new "
            f"request_id",
            metadata={"next_batch_index": str(self.next_batch_index)},
        )

    # Records

    def record_batch(self, batch_spec: BatchSpec, plan: Plan, positions: Indexes) -> None:
        """Record the plan of the next batch_index and mark its rows at `positions` consumed."""
        batch = Batch(
            batch_spec=batch_spec,
            plan=plan,
            batch_index=self.next_batch_index,
            size=positions.size,
            remaining=positions.size,
        )
        self._batches[self.next_batch_index] = batch
        self.next_batch_index += 1
        self.dp_size = len(plan.ranks)
        self._consume(batch, positions)

    def record_end(self, dp_size: int, end: End) -> None:
        """Record that no batch follows, for all ranks and batch indexes from the next on."""
        self.dp_size = dp_size
        self.end = end

    def record_queue_claim(
        self, request_id: bytes, part: RankPlan, positions: Indexes, terms: LeaseTerms | None = None
    ) -> QueueClaim:
        """Record what a queue worker gets, leased where `terms` are given."""
        claim = QueueClaim(request_id=request_id, serial=self._serial + 1, part=part, remaining=positions.size)
        self._queue_claims[request_id] = claim
        self._consume(claim, positions)
        if terms is not None:
            claim.lease = self.leases.start(request_id, claim.serial, part.rows, positions, terms)
        return claim

    def queue_claim(self, request_id: bytes) -> QueueClaim | None:
        """Return a recorded claim of a queue worker, None where there is none."""
        return self._queue_claims.get(request_id)

    def _consume(self, record: Batch | QueueClaim, positions: Indexes) -> None:
        self._serial += 1
        self._by_serial.add(self._serial, record)
        self.claim.write(positions, self._serial)
        self.consumed_count += positions.size
        self.open_count -= positions.size

    def forget_callers(self, request_id: bytes) -> None:
        """Say that no call waits for the answer of a claim, since it was made in an earlier life of the service."""
        self._queue_claims[request_id].given_count = 0

    def is_given_once(self, request_id: bytes) -> bool:
        """Count off one call that was answered with a claim; return whether it was the only one."""
        claim = self._queue_claims.get(request_id)
        if claim is None:
            return False
        claim.given_count -= 1
        return claim.given_count == 0

    def release(self, claim: QueueClaim, rows: Indexes | None = None) -> Indexes:
        """Give back what is left of a queue claim, of a leased one maybe `rows` only; return their positions `(n,)`."""
        if claim.lease is None:
            positions = self._table.find(claim.part.rows)
            positions = positions[positions >= 0]
            self.claim.write(positions, UNCLAIMED)
            self.consumed_count -= claim.part.rows.size
            self._forget_queue_claim(claim)
            return positions
        positions = self.leases.left(claim.lease)
        if rows is not None:
            positions = positions[np.isin(self._table.index.data[positions], rows)]
        self.leases.give_back(claim.lease, positions)
        self._lose(claim, positions.size)
        return positions

    def expire(self, claim: QueueClaim, lease: Lease) -> Indexes:
        """Take what is left of a leased claim; return the positions that can be claimed again, not those set aside."""
        back, aside = self.leases.expire(lease)
        self._lose(claim, back.size + aside.size)
        self.expired.add(claim.request_id)
        return back

    def _lose(self, claim: QueueClaim, count: int) -> None:
        """Count off rows that are no longer consumed by a claim."""
        self.consumed_count -= count
        claim.remaining -= count
        if claim.remaining == 0:
            self._forget_queue_claim(claim)

    def _forget_queue_claim(self, claim: QueueClaim) -> None:
        self._by_serial.pop(claim.serial)
        del self._queue_claims[claim.request_id]

    def reset(self, *, keep_consumed: bool) -> Indexes:
        """Start the next epoch; the partition counts `open_count` anew unless `keep_consumed`.

        Return the positions of rows that were leased or set aside: they were not done, and are claimable in any case.
        """
        self.epoch += 1
        self.consumed_count -= self.leases.count
        reopened = self.leases.reset()
        self.dp_size = None
        self.next_batch_index = 0
        self.end = None
        self.scan_starts.clear()
        self.orders.clear()
        self._batches.clear()
        self._batches_without_rows.clear()
        self._queue_claims.clear()
        self._by_serial.clear()
        if keep_consumed:
            self.claim.write(np.flatnonzero(self.claim.data[: self._table.count] != UNCLAIMED), KEPT)
        else:
            self.claim.write(slice(0, self._table.count), UNCLAIMED)
            self.consumed_count = 0
        return reopened

    # Rows that come and go

    def touched(self, indexes: Indexes, first: int) -> None:
        """Say that rows, of which `first` has the lowest global index, may have become ready."""
        self.scan_starts.touched(first)
        self.orders.note(indexes, first, self._table)

    def closes(self, positions: Indexes) -> None:
        """Say that open rows at `positions` are being cleared, or have failed."""
        self.open_count -= int(np.count_nonzero(self.claim.data[positions] == UNCLAIMED))
        if self.leases.live:
            self.leases.close(positions)

    def forget(self, positions: Indexes) -> None:
        """Drop the records whose last rows are being cleared."""
        serials, counts = count_values(self.claim.data[positions])
        for serial, count in zip(serials.tolist(), counts.tolist(), strict=True):
            record = self._by_serial.get(serial)
            if record is None:
                continue
            record.remaining -= count
            if record.remaining == 0:
                if isinstance(record, Batch):
                    self._by_serial.pop(serial)
                    self._forget_batch(record)
                else:
                    self._forget_queue_claim(record)

    def _forget_batch(self, batch: Batch) -> None:
        """Drop a batch whose rows are gone, but for the last few in which a rank had none: it still gets its answer."""
        if any(part.rows.size == 0 for part in batch.plan.ranks):
            self._batches_without_rows.append(batch.batch_index)
            if len(self._batches_without_rows) <= _MOST_BATCHES_WITHOUT_ROWS:
                return
            del self._batches[self._batches_without_rows.popleft()]
        else:
            del self._batches[batch.batch_index]

    def records(self) -> Iterator[Batch | QueueClaim]:
        """Return what is recorded."""
        return self._by_serial.values()


def _disagreement(name: str, got: object, expected: object, what: str) -> PreconditionError:
    return RankDisagreementError(
        f"{name} of {what} is {expected!r}, got {got!r}; all ranks must ask with the same arguments",
        metadata={"field": name, "got": repr(got)[:512], "expected": repr(expected)[:512]},
    )
