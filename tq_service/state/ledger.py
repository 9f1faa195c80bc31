"""The ledger of one task. The ledger records which of the partition's samples the task has consumed, leased or lost.

The `claim` column stores the status of each row:

- 0: the row is claimable.
- 1: the row was consumed in an earlier epoch.
- n (3 or more): the claim with serial n consumed the row. Either the claim had no lease, or the row's delivery was
  acknowledged.
- -n: the claim with serial n has leased the row, and the delivery has not been acknowledged.
- -1: the row is dead-lettered because it was delivered too many times without being acknowledged.
- -2: the row is dropped because a plan permanently excluded it.

For tasks that accept only complete groups, the `skipped` column marks the claimable rows (0) of groups that have
permanently lost a member. Skipped rows are not pending. Samplers still see skipped rows, so a task that accepts
incomplete groups can claim them.

    0 --deliver----------------------------------------------> n    (nack of a claim without a lease: back to 0)
    0 --deliver with a lease--------> -n --ack, row closed---> n
                                      -n --nack, expire------> 0    (expire after too many deliveries: -1)
    -1 --requeue--> 0
    0 --deliver, dropped by the plan-------------------------> -2   (under a lease: -n, and -2 when acknowledged)
    any --reset--> 0, or 1 for a consumed row that stays consumed

A plan can deliver a sample without consuming it (`RecordedPlan.consumed`). The status of the sample stays 0, or returns
to 0 when its lease is acknowledged. The `uses` column counts the deliveries that did not consume the sample. A row's
status does not show which claims delivered the row without consuming it, so these claims are recorded separately. The
ledger limits the number of separate records and drops the oldest ones first.

Methods that change the ledger neither validate their arguments nor read a clock. Callers resolve and validate the
arguments beforehand, so a claim has the same effect when it is replayed from the log. The service instance that serves
the partition runs the lease timers. When a lease expires, this instance commits a change that updates the ledger.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain, islice, takewhile
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import (
    BatchForgottenError,
    ClaimReleasedError,
    InvalidArgumentError,
    LeaseExpiredError,
    PreconditionError,
    RankDisagreementError,
    SamplesClearedError,
    StaleEpochError,
    TqError,
)
from tq_service.results import EvictedUnit, RecentBatch
from tq_service.schema import EndCounts, RefillOutcome
from tq_service.state.outstanding import Outstanding
from tq_service.state.plan import (
    BatchSpec,
    ClaimRequest,
    Indexes,
    LeaseTerms,
    Pack,
    Plan,
    RankPlan,
    TotalsOfStep,
    shown,
)
from tq_service.state.table import (
    CONSUMED_EARLIER,
    DEAD_LETTERED,
    DROPPED,
    FAILED,
    LAST_RESERVED,
    UNCLAIMED,
    Column,
    RowTable,
    count_values,
    distinct,
    is_open,
)

_ENDED_SECONDS = 900.0
_MOST_ENDED = 131_072
_DERIVED = {"is_encoded": False}  # rebuilt from the columns, or specific to this service instance
_MOST_REMEMBERED_ROWS, _MOST_REMEMBERED_PACKS = 1 << 13, 512  # per rank; 256 cached steps use about 40 MB
_MOST_RECENT: Final = 16
_MOST_BATCHES_WITHOUT_ROWS = 16  # an epoch rarely ends with more than one short batch
_MOST_REUSING, _MOST_REUSING_ROWS = 1 << 10, 1 << 22  # limits for plans that may not consume their samples
_NO_ROWS: Final = np.zeros(0, np.int64)
_NOT_FOLLOWED: Final = nullcontext()
_OTHER_DP_SIZE: Final = ". To change the number of ranks, restart the ranks (docs/asynchronous_rl.md)"

KEPT_ROLLOUTS: Final = -1
"""Value of `kept_groups` for a task or claim that keeps rollouts together instead of groups."""
MOST_EVICTED: Final = 65_536
"""Maximum number of evicted units that a task records. When the limit is exceeded, the oldest records are dropped."""
MOST_PAST_NAMES: Final = 65_536
"""Maximum number of past claim names that a task records. When the limit is exceeded, the oldest names are dropped."""

Loss: TypeAlias = Literal["cleared", "released", "expired", "forgotten"]
_LOSSES: Final[Mapping[Loss, tuple[type[TqError], str]]] = {
    "released": (
        ClaimReleasedError,
        "this claim of task {task!r} was released. Claim again with a new request_id or claim_name",
    ),
    "expired": (
        LeaseExpiredError,
        "the lease of this claim of task {task!r} expired, and other workers may have claimed its samples. Claim "
        "again with a new request_id or claim_name",
    ),
    "cleared": (
        SamplesClearedError,
        "samples of this planned batch or claim of task {task!r} have been cleared. Continue with a later "
        "batch_index (the next one to be planned is {next}) or, as a queue worker, with a new request_id or "
        "claim_name",
    ),
    "forgotten": (
        BatchForgottenError,
        "the record of this batch or claim of task {task!r} was dropped, since records are kept only for the last "
        "{most} plans that deliver samples without consuming them. Continue with a later batch_index (the next one "
        "to be planned is {next}) or, as a queue worker, with another claim_name",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PastName:
    """The record of a claim name that has no claim.

    Either the call with this claim name reported the end of the data, or the claim with this name was lost.

    Attributes:
        end: sample counts returned by the call that reported the end of the data, or None if the call returned a claim.
        loss: the reason the claim was lost, or None if the call reported the end of the data.
    """

    end: EndCounts | None = None
    loss: Loss | None = None


Steps: TypeAlias = tuple[tuple[Pack, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """The compact record of a plan.

    A ledger may store hundreds of thousands of plans, so a record omits values that can be derived.

    Attributes:
        rows: global indexes of all ranks' samples, in rank order, as an array of shape `(sum(sizes),)`.
        sizes: number of rows per rank.
        steps: steps of each rank (see `RankPlan`), or empty if the sampler returned none.
        micro_batch_size: number of samples per micro-batch in a plan without steps, or None for one micro-batch per
            rank.
        consumed: global indexes of the consumed samples (see `Plan`). None if the plan consumes all its samples.
        dropped: for each rank, global indexes of the dropped samples (see `RankPlan`), or empty if no samples are
            dropped.
        totals: each step's totals over all ranks, or empty for a queue worker's plan.
        summed: names of the columns that are summed in `totals`.
    """

    rows: Indexes
    sizes: tuple[int, ...]
    steps: tuple[Steps, ...] = ()
    micro_batch_size: int | None = None
    consumed: Indexes | None = None
    dropped: tuple[Indexes, ...] = ()
    totals: tuple[TotalsOfStep, ...] = ()
    summed: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, micro_batch_size: int | None = None) -> RecordedPlan:
        """Create a plan's record, leaving `totals` empty."""
        steps = tuple(part.steps for part in plan.ranks)
        dropped = tuple(part.dropped for part in plan.ranks)
        return cls(
            rows=np.concatenate([part.rows for part in plan.ranks]),
            sizes=tuple(part.rows.size for part in plan.ranks),
            steps=steps if any(steps) else (),
            micro_batch_size=micro_batch_size,
            consumed=plan.consumed,
            dropped=dropped if any(map(len, dropped)) else (),
        )

    @property
    def is_reusing(self) -> bool:
        """Whether the plan may deliver samples without consuming them."""
        return self.consumed is not None

    @property
    def used(self) -> Indexes:
        """Global indexes of the samples that the plan delivers or consumes, without duplicates."""
        return self.rows if self.consumed is None else np.union1d(self.rows, self.consumed)

    @property
    def named(self) -> Indexes:
        """Global indexes of all samples in the plan: first the samples in `used`, followed by the dropped samples."""
        return np.concatenate([self.used, *self.dropped]) if self.dropped else self.used

    @property
    def dropped_count(self) -> int:
        """Number of samples that the plan drops."""
        return sum(map(len, self.dropped))

    def drops(self, rows: Indexes) -> NDArray[np.bool_]:
        """Return an `(n,)` mask of the samples in `rows` that the plan drops."""
        return np.isin(rows, np.concatenate(self.dropped)) if self.dropped else np.zeros(rows.size, np.bool_)

    def consumes(self, rows: Indexes) -> NDArray[np.bool_]:
        """Return an `(n,)` mask of the samples in `rows` that the plan consumes."""
        return np.ones(rows.size, np.bool_) if self.consumed is None else np.isin(rows, self.consumed)

    def part(self, dp_rank: int = 0) -> RankPlan:
        """Return one rank's part of the plan.

        If the plan has no steps, the rank's rows are split into micro-batches. All ranks have the same number of
        micro-batches, so some micro-batches may be empty.
        """
        start, size = sum(self.sizes[:dp_rank]), self.sizes[dp_rank]
        if self.steps:
            steps = self.steps[dp_rank]
        else:
            largest, count = max(self.sizes), self.micro_batch_size
            is_large = largest > _MOST_REMEMBERED_ROWS or largest > _MOST_REMEMBERED_PACKS * (count or largest)
            steps = (_one_step if is_large else _remembered_step)(size, largest, count)
        dropped = self.dropped[dp_rank] if self.dropped else _NO_ROWS
        rows = self.rows[start : start + size]
        return RankPlan(rows=rows, steps=steps, dropped=dropped, totals=self.totals, summed=self.summed)


def _one_step(count: int, largest: int, micro_batch_size: int | None) -> Steps:
    """Split a rank's rows into the micro-batches of a single step.

    Args:
        count: number of rows assigned to the rank.
        largest: largest number of rows assigned to any rank.
        micro_batch_size: number of rows per micro-batch. None means one micro-batch per rank.
    """
    positions = np.arange(count)
    positions.flags.writeable = False
    size = micro_batch_size or max(1, largest)
    return (tuple(Pack(positions=positions[start : start + size]) for start in range(0, max(1, largest), size)),)


_remembered_step = lru_cache(maxsize=256)(_one_step)


@dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """The delivery of one plan to all ranks (as a batch) or to one queue worker.

    Attributes:
        serial: number of the claim within its task.
        plan: record of the delivered plan.
        request_id: id of the queue worker's request, or empty for a batch.
        batch_index: index of the batch, or -1 for a queue worker.
        name: claim name that the queue worker passed, or empty for an unnamed claim.
        batch_spec: arguments that must be equal in the requests of all ranks, or in all calls with this claim name.
            None for an unnamed claim.
        lease: terms of the lease, even if the lease has ended. None means that the delivery requires no
            acknowledgement.
        delivery_counts: number of times that each sample has been delivered with a lease, including this delivery. None
            if the claim has no lease.
        returned: global indexes of the samples that were acknowledged without being consumed, or None if there are
            none.
        remaining: number of samples in the claim that are neither cleared nor released. If the claim has no lease and
            its plan may deliver samples without consuming them, `remaining` is the number of consumed samples.
        leased_count: number of samples that are still leased. Acknowledged, failed, cleared and released samples are no
            longer leased.
        deadline: time at which the lease expires, on the event loop's clock. The lease timer sets the deadline, except
            during replay.
        delivered_at: time on the event loop's clock when the lease first began in this service instance. The lease
            timer sets `delivered_at`.
        answer_count: number of calls to which this service instance returned the claim. If the client disconnects
            before it receives the response, and no retry has received the same response, the service releases the
            claim.
    """

    serial: int
    plan: RecordedPlan
    request_id: bytes = b""
    batch_index: int = -1
    name: str = ""
    batch_spec: BatchSpec | None = None
    lease: LeaseTerms | None = None
    delivery_counts: NDArray[np.int32] | None = None
    returned: Indexes | None = None
    remaining: int = field(default=0, metadata=_DERIVED)
    leased_count: int = field(default=0, metadata=_DERIVED)
    delivered_at: float = field(default=math.inf, metadata=_DERIVED)
    deadline: float = field(default=math.inf, metadata=_DERIVED)
    answer_count: int = field(default=0, metadata=_DERIVED)

    @property
    def rows(self) -> Indexes:
        """Global indexes of the claim's samples."""
        return self.plan.rows

    @property
    def goes_with_rows(self) -> bool:
        """Whether rows of the claim are marked with the claim's serial number.

        If true, the ledger drops the claim when its last row is removed.
        """
        return self.lease is not None or not self.plan.is_reusing

    @property
    def may_change(self) -> bool:
        """Whether the claim's encoded attributes can still change."""
        return self.lease is not None or self.plan.is_reusing

    @property
    def mark(self) -> int:
        """Value that a delivery writes to the `claim` column for the claim's samples."""
        return self.serial if self.lease is None else -self.serial

    def leased_seconds(self, now: float) -> float:
        """Return the number of seconds until the lease expires, or 0 if the claim has no leased samples."""
        return max(0.0, self.deadline - now) if self.leased_count else 0.0


class EndedClaims(OrderedDict[bytes, tuple[float, bool]]):
    """Request ids of released and expired claims, oldest first. Late GetMeta calls with these ids are rejected.

    Each value is a tuple of the claim's end time and a flag, which is True if the lease on any of the claim's samples
    expired.
    """

    def add(self, request_id: bytes, at_seconds: float, *, is_expired: bool) -> None:
        """Add the request id of a claim that ended at `at_seconds`, and remove old ids.

        `at_seconds` must never decrease between calls.
        """
        self[request_id] = (at_seconds, is_expired or self.has_expired(request_id))
        self.move_to_end(request_id)
        while len(self) > _MOST_ENDED or next(iter(self.values()))[0] < at_seconds - _ENDED_SECONDS:
            self.popitem(last=False)

    def has_expired(self, request_id: bytes) -> bool:
        """Return whether the lease on any sample of the claim has expired."""
        return request_id in self and self[request_id][1]


@dataclass(slots=True, kw_only=True)
class TaskTotals:
    """A task's counters, accumulated over all epochs since this process started.

    The counters never decrease, and snapshots do not include them.

    Attributes:
        delivered: number of sample deliveries, including redeliveries.
        redelivered: number of deliveries of samples that had already been delivered under an earlier lease.
        expired: number of samples whose lease expired.
        dead_lettered: number of samples that were dead-lettered when their lease expired.
        unmatched: number of units evicted because a claim's `where` condition excluded them.
        too_small: number of groups evicted because they had too few members left.
        late: number of samples and groups evicted because they would have become too stale.
        overflow: number of samples and groups cleared to make room for new ones.
    """

    delivered: int = 0
    redelivered: int = 0
    expired: int = 0
    dead_lettered: int = 0
    unmatched: int = 0
    too_small: int = 0
    late: int = 0
    overflow: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class TaskFacts:
    """Scalar values of a task. Snapshots store these values unchanged, separately from the task's columns and records.

    Attributes:
        end: sample counts at the end of the data, or None if the task has not reached the end in this epoch.
        consumed_count: number of rows consumed in this epoch, including leased rows and rows that have been cleared
            since.
        kept_count: number of rows that were consumed in earlier epochs and remained consumed after the last reset.
        backlog: number of live or held rows that are not consumed, dead-lettered, dropped or skipped.
        skipped_count: number of live or held rows that are skipped.
        kept_groups: what the last request kept together. The value is `KEPT_ROLLOUTS` for rollouts, 0 for named groups,
            or the block length if blocks of rows replace named groups. The value is None if the request accepted single
            samples or incomplete groups, or if no request has been made in this epoch.
        dead_lettered_count: number of rows dead-lettered in this epoch, including rows that have been cleared since.
        dropped_count: number of rows dropped by plans in this epoch, including rows that have been cleared since.
        last_forgotten: highest batch_index for which the record was dropped before the rows were removed, or -1 if
            there is none.
        serial: serial number of the latest claim.
        trained: batch_index of the last batch that has been trained on, or -1 if there is none. All earlier batches
            have been trained on as well.
        saved: batch_index of the last batch covered by a trainer checkpoint, or -1 if no batch is covered. The
            checkpoint also covers all earlier batches.
        delivered_units: for each of the latest batches that still occupy capacity, the number of its units. The tuple
            is empty if the admission frees capacity on delivery.
        done_units: number of units that occupy capacity until the next publication. These are acknowledged units, and
            units delivered to queue workers without a lease.
        unmatched_count: total number of units, across all epochs, that were evicted because a claim's `where` condition
            excluded them.
        too_small_count: number of groups evicted because too few members were left, summed over all epochs.
        late_count: total number of samples and groups, across all epochs, that were evicted because they would have
            become too stale.
        overflow_count: number of samples and groups that were cleared in all epochs to make space for new ones.
        delivered_count: number of sample deliveries in all epochs. Redeliveries are included, but deliveries that were
            released are not.
        refilled_count: how often, in all epochs, the task made a row claimable again to replace an evicted unit.
        released: last batch_index in this epoch whose samples may have been released, or -1 if there is none.
    """

    name: str
    epoch: int = 0
    dp_size: int | None = None
    next_batch_index: int = 0
    end: EndCounts | None = None
    consumed_count: int = 0
    kept_count: int = 0
    backlog: int = 0
    skipped_count: int = 0
    kept_groups: int | None = None
    dead_lettered_count: int = 0
    dropped_count: int = 0
    last_forgotten: int = -1
    serial: int = LAST_RESERVED
    trained: int = -1
    saved: int = -1
    delivered_units: tuple[int, ...] = ()
    done_units: int = 0
    unmatched_count: int = 0
    too_small_count: int = 0
    late_count: int = 0
    overflow_count: int = 0
    delivered_count: int = 0
    refilled_count: int = 0
    released: int = -1

    @property
    def evicted_count(self) -> int:
        """Total number of units evicted across all epochs."""
        return self.unmatched_count + self.too_small_count + self.late_count + self.overflow_count


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSnapshot:
    """A task's snapshot, which excludes the task's columns.

    `TaskLedger.restore` recounts the remaining rows of each claim.
    """

    facts: TaskFacts
    batches: list[Claim] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    names: list[tuple[str, bytes]] = field(default_factory=list)
    past_names: list[tuple[str, PastName]] = field(default_factory=list)
    reusing: list[int] = field(default_factory=list)  # serials of claims with reusable rows, oldest first
    ended: list[tuple[bytes, tuple[float, bool]]] = field(default_factory=list)
    evicted: list[EvictedUnit] = field(default_factory=list)


class TaskLedger(TaskFacts):
    """The progress of one task: its claims, leases, current epoch and end of data.

    The ledger drops a claim's record once the last of the claim's rows is removed, so memory use is bounded by the
    number of stored samples. Two kinds of records are kept longer. If a rank received no samples in a short batch, the
    batch's record is kept because the rank may still request the batch. A claim's record is also kept if the claim's
    rows can be delivered again to other claims. The number of records of each kind is limited.

    Other modules may read the attributes of the ledger and of `TaskFacts`, but must not change them.

    Attributes:
        claim: for each row, its status in this task (see the module docstring).
        deliveries: for each row, the number of leased deliveries in this epoch since the row was last acknowledged.
        uses: number of times each row was delivered without being consumed. A leased delivery is counted when it is
            acknowledged.
        skipped: for each row, whether it is skipped (see the module docstring).
        refills: for each row, the number of times in this epoch that the row was made claimable again to replace an
            evicted unit. A negative value means that the row is leased and becomes claimable only when its worker
            acknowledges it.
        batches: mapping from batch_index to recorded batch, in ascending order. The mapping includes a limited number
            of batches without rows.
        claims: claims of queue workers, by request_id.
        leases: claims of queue workers that still have leased samples, by request_id and in delivery order.
        names: request_id of each named claim, by claim name.
        past_names: claim names without a claim (see `PastName`), oldest first.
        ended: request ids of released and expired claims.
        evicted: units most recently evicted by the task's claims, in any epoch, oldest first.
        totals: counters for all epochs since this process started.
        recent_batches: statistics of the most recent batches that this process planned in this epoch.
        state: state of each row. The partition updates the `state` column.
        outstanding: counter of the task's outstanding units, or None if the task has no admission.
    """

    def __init__(
        self, name: str, table: RowTable, state: Column, *, backlog: int, outstanding: Outstanding | None = None
    ) -> None:
        super().__init__(name=name, backlog=backlog)
        self.outstanding = outstanding
        self.leased_count = self.redelivered_count = 0
        claim, deliveries, uses, skipped, refills = task_columns(name)
        self.claim = table.column(claim, np.int64, UNCLAIMED)
        self.deliveries = table.column(deliveries, np.int32, 0)
        self.uses = table.column(uses, np.int32, 0)
        self.skipped = table.column(skipped, np.bool_, False)
        self.refills = table.column(refills, np.int32, 0)
        self.evicted: deque[EvictedUnit] = deque(maxlen=MOST_EVICTED)
        self.ended = EndedClaims()
        self.totals = TaskTotals()
        self._table = table
        self.state = state
        self._forget_records()
        if outstanding is not None:
            outstanding.recount(self, table.count)

    def _forget_records(self) -> None:
        """Drop all records of batches and claims at the start of an epoch."""
        self.batches: dict[int, Claim] = {}
        self.claims: dict[bytes, Claim] = {}
        self.leases: dict[bytes, Claim] = {}
        self.names: dict[str, bytes] = {}
        self.past_names: OrderedDict[str, PastName] = OrderedDict()
        self._without_rows: list[int] = []  # batch indexes, ascending
        self._reusing: dict[int, Claim] = {}  # by serial; claims with reusable rows but without leased rows
        self._reusing_row_count = 0
        self._by_serial: dict[int, Claim] = {}
        self.recent_batches: deque[RecentBatch] = deque(maxlen=_MOST_RECENT)

    @property
    def is_unused(self) -> bool:
        """Whether the task has no history, that is, no claims, recorded end, resets, releases or evictions."""
        is_first = self.epoch == 0 and self.serial == LAST_RESERVED and not self.evicted_count
        return is_first and self.end is None and not (self.ended or self.past_names)

    # Snapshots

    @property
    def facts(self) -> TaskFacts:
        """A copy of the task's scalar values."""
        return TaskFacts(**{each.name: getattr(self, each.name) for each in fields(TaskFacts)})

    def snapshot(self) -> TaskSnapshot:
        """Return a snapshot of the task, without its columns.

        Records that may change are copied; all other records are shared with the ledger. The columns are part of the
        table's snapshot.
        """
        return TaskSnapshot(
            facts=self.facts,
            batches=list(self.batches.values()),
            claims=[copy(claim) if claim.may_change else claim for claim in self.claims.values()],
            names=list(self.names.items()),
            past_names=list(self.past_names.items()),
            reusing=list(self._reusing),
            ended=list(self.ended.items()),
            evicted=list(self.evicted),
        )

    def restore(self, snapshot: TaskSnapshot) -> None:
        """Restore a new task's facts and records from a snapshot. The columns must have been restored already."""
        for each in fields(TaskFacts):
            setattr(self, each.name, getattr(snapshot.facts, each.name))
        self.ended.update(snapshot.ended)
        self.evicted.extend(snapshot.evicted)
        self.names.update(snapshot.names)
        self.past_names.update(snapshot.past_names)
        specs: dict[BatchSpec | None, BatchSpec | None] = {}  # thousands of claims share a few batch specs
        serials, counts = count_values(self.claim[: self._table.count])
        rows_of = dict(zip(serials.tolist(), counts.tolist(), strict=True))
        self.redelivered_count = int(np.count_nonzero(self.deliveries[: self._table.count] > 1))
        for claim in chain(snapshot.batches, snapshot.claims):
            claim.batch_spec = specs.setdefault(claim.batch_spec, claim.batch_spec)
            self._add(claim)
            claim.leased_count = 0  # an unencoded snapshot contains the count of another ledger
            self._count_leased(claim, rows_of.get(-claim.serial, 0))
            claim.remaining = rows_of.get(claim.serial, 0) + claim.leased_count
            if claim.plan.consumed is not None and claim.lease is None:
                claim.remaining = claim.plan.consumed.size
            elif not (claim.request_id or claim.remaining):
                self._without_rows.append(claim.batch_index)
        if self.outstanding is not None:
            self.outstanding.recount(self, self._table.count)
        by_serial = {claim.serial: claim for claim in chain(self.batches.values(), self.claims.values())}
        self._reusing = {serial: by_serial[serial] for serial in snapshot.reusing}
        self._reusing_row_count = sum(claim.rows.size for claim in self._reusing.values())

    # Recorded responses

    def check_epoch(self, epoch: int | None) -> None:
        """Raise StaleEpochError if `epoch` is not the task's current epoch. None matches any epoch."""
        check_epoch(self.name, self.epoch, epoch)

    def recorded(self, request: ClaimRequest) -> RankPlan | Claim | EndCounts | None:
        """Return the recorded response to a request, or None if there is none."""
        if request.rank is None:
            return self._recorded_claim(request)
        rank = request.rank
        if self.dp_size is not None and rank.dp_size != self.dp_size:
            raise _disagreement(
                "dp_size", rank.dp_size, self.dp_size, f"this epoch of task {self.name!r}", remedy=_OTHER_DP_SIZE
            )
        if rank.batch_index >= self.next_batch_index:
            return self.end
        batch = self.batches.get(rank.batch_index)
        if batch is None:
            self.check_not_released(rank.batch_index)
            raise self._loss_error("forgotten" if rank.batch_index <= self.last_forgotten else "cleared")
        if rank.dp_size != len(batch.plan.sizes):
            what = f"batch_index {rank.batch_index}, which was planned before the ranks of task {self.name!r} restarted"
            raise _disagreement("dp_size", rank.dp_size, len(batch.plan.sizes), what)
        self._check_alike(request, batch, f"batch_index {rank.batch_index}")
        part = batch.plan.part(rank.dp_rank)
        if batch.plan.is_reusing or batch.remaining < batch.rows.size:  # some samples may have been cleared
            if (self._table.find(part.rows) < 0).any():
                self.check_not_released(rank.batch_index)
            self.check_present(part.rows)
        return part

    def _recorded_claim(self, request: ClaimRequest) -> Claim | EndCounts | None:
        name, request_id = request.claim_name, request.request_id
        if (past := self.past_names.get(name)) is not None:
            if past.loss is not None:
                raise self._loss_error(past.loss)
            return past.end
        named = self.names.get(name)
        if named is None and request_id in self.ended:
            raise self._loss_error("expired" if self.ended.has_expired(request_id) else "released")
        claim = self.claims.get(named or request_id)
        if claim is None:
            return None
        if named is not None:
            self._check_alike(request, claim, f"claim_name {name!r}")
        elif name:
            raise InvalidArgumentError(
                f"request_id {request_id.hex()} belongs to another claim of task {self.name!r}, not to claim_name "
                f"{name!r}. Use a new request_id for each claim_name",
                field="request_id",
            )
        self.check_present(claim.rows)
        return claim

    def _check_alike(self, request: ClaimRequest, claim: Claim, what: str) -> None:
        """Raise an error if the request's arguments differ from the arguments recorded with the claim."""
        differs = None if claim.batch_spec is None else request.batch_spec.disagreement(claim.batch_spec)
        if differs is not None:
            raise _disagreement(*differs, f"{what} of task {self.name!r}")

    def check_present(self, rows: Indexes) -> None:
        """Raise SamplesClearedError if any of the samples in `rows` have been cleared."""
        if bool((self._table.find(rows) < 0).any()):
            raise self._loss_error("cleared")

    def check_not_released(self, batch_index: int) -> None:
        """Raise SamplesClearedError if samples of this batch or a later batch may have been released."""
        if batch_index <= self.released:
            raise SamplesClearedError(
                f"batch_index is {batch_index}; expected {self.released + 1} or more, since samples of earlier "
                f"batches of task {self.name!r} have been released. Resume from a checkpoint that covers batch "
                f"{self.released}; to keep samples for older checkpoints, delay reporting batches as trained or saved "
                f"(docs/resuming.md)",
                metadata={
                    "task_name": self.name,
                    "next_batch_index": str(self.next_batch_index),
                    "got": str(batch_index),
                    "expected": str(self.released + 1),
                },
            )

    def _loss_error(self, loss: Loss) -> TqError:
        kind, text = _LOSSES[loss]
        return kind(
            text.format(task=self.name, next=self.next_batch_index, most=_MOST_REUSING),
            metadata={"task_name": self.name, "next_batch_index": str(self.next_batch_index)},
        )

    # Claims

    def using_up(self, plan: RecordedPlan, max_uses: int) -> RecordedPlan:
        """Return a copy of the plan that consumes each sample that reaches `max_uses` uses with this plan.

        The copy also consumes the samples that the sampler listed as consumed. If `max_uses` is 1, the copy consumes
        only the listed samples or, if there is no list, all samples.
        """
        if max_uses == 1:
            spent = plan.rows if plan.consumed is None else plan.consumed
        else:
            spent, counts = np.unique(plan.rows, return_counts=True)
            spent = spent[self.uses[self._table.find(spent)] + counts >= max_uses]
        consumed = np.unique(spent) if plan.consumed is None else np.union1d(spent, plan.consumed)
        is_all = np.array_equal(np.sort(plan.rows), consumed)
        return replace(plan, consumed=None if is_all else consumed)

    def deliver(
        self,
        plan: RecordedPlan,
        positions: Indexes,
        *,
        request_id: bytes = b"",
        batch_spec: BatchSpec | None = None,
        lease: LeaseTerms | None = None,
        name: str = "",
    ) -> Claim:
        """Record the delivery of a plan, and consume or lease its samples. Return the new claim.

        Without a `request_id`, the plan is delivered to the ranks as the next batch.

        Args:
            plan: plan to record.
            positions: table position of each row in `plan.named`.
            request_id: id of the queue worker's request, or empty for a batch.
            batch_spec: arguments of the request for a batch or a named claim.
            lease: terms of the lease. None means that the delivery requires no acknowledgement.
            name: claim name, or empty for an unnamed claim.
        """
        self.serial += 1
        claim = Claim(
            serial=self.serial, plan=plan, request_id=request_id, name=name, batch_spec=batch_spec, lease=lease
        )
        if not request_id:
            claim.batch_index = self.next_batch_index
            self.next_batch_index += 1
            self.dp_size = len(plan.sizes)
        elif name:
            self.names[name] = request_id
        self._add(claim)
        self.totals.delivered += plan.rows.size
        self.delivered_count += plan.rows.size
        used_count = positions.size - plan.dropped_count
        used, dropped = positions[:used_count], positions[used_count:]
        if lease is not None:
            claim.remaining = positions.size
            with self._followed(positions):
                self._lease(claim, used, dropped)
            return claim
        consumed = used[plan.consumes(plan.used)] if plan.is_reusing else used
        with self._followed(positions):
            self._consume(dropped, DROPPED)
            self._consume(consumed, claim.serial)
        if self.outstanding is not None:
            self._count_delivered(self.outstanding, consumed, is_batch=not request_id)
        claim.remaining = consumed.size
        if plan.is_reusing:
            self._count_uses(plan.rows, 1)
        if plan.is_reusing or (request_id and not consumed.size):
            self._keep_reusing(claim)
        else:
            self._on_fewer_rows(claim)
        return claim

    def _add(self, claim: Claim) -> None:
        if claim.request_id:
            self.claims[claim.request_id] = claim
        else:
            self.batches[claim.batch_index] = claim
        if claim.goes_with_rows:
            self._by_serial[claim.serial] = claim

    @property
    def outstanding_count(self) -> int | None:
        """Number of outstanding units, or None if the task has no admission."""
        return None if self.outstanding is None else self.outstanding.count(self)

    def _followed(self, positions: Indexes) -> AbstractContextManager[None]:
        """Return a context manager that updates `outstanding_count` if the `with` block changes the given rows."""
        return _NOT_FOLLOWED if self.outstanding is None else self.outstanding.following(self, positions)

    def _count_delivered(self, outstanding: Outstanding, positions: Indexes, *, is_batch: bool) -> None:
        """Count the capacity that delivered rows occupy until the admission frees it."""
        admission, given_back = outstanding.admission, outstanding.admission.given_back
        if given_back != "delivered" and is_batch:
            # If staleness is bounded, a short batch occupies as much capacity as a full global batch.
            count = outstanding.units_of(positions) if admission.max_staleness is None else admission.global_batch
            self.delivered_units = (*self.delivered_units, count)
        elif given_back == "published":
            self.done_units += outstanding.units_of(positions)

    def reach_end(self, dp_size: int, end: EndCounts) -> None:
        """Record that all ranks have reached the end of the data at the next batch index."""
        self.dp_size = dp_size
        self.end = end

    def _lease(self, claim: Claim, positions: Indexes, dropped: Indexes) -> None:
        """Lease the samples that the claim delivers or drops, and consume the claim's remaining samples immediately."""
        delivered = positions
        if claim.plan.is_reusing:
            is_delivered = np.isin(claim.plan.used, claim.rows)
            self._consume(positions[~is_delivered], claim.serial)
            delivered = positions[is_delivered]
        claim.delivery_counts = self.deliveries[delivered] + np.int32(1)
        self.totals.redelivered += int(np.count_nonzero(claim.delivery_counts > 1))
        self._write_deliveries(delivered, claim.delivery_counts)
        if claim.plan.is_reusing:  # a sample may occur twice in the plan
            claim.delivery_counts = self.deliveries[self._table.find(claim.rows)]
        if dropped.size:
            self._write_deliveries(dropped, self.deliveries[dropped] + np.int32(1))
            delivered = np.concatenate([delivered, dropped])
        self._count_leased(claim, delivered.size)
        self._consume(delivered, claim.mark)

    def _write_deliveries(self, positions: Indexes, counts: NDArray[np.int32]) -> None:
        """Write the delivery counts of rows and update `redelivered_count`."""
        before = self.deliveries[positions]
        self.redelivered_count += int(np.count_nonzero(counts > 1)) - int(np.count_nonzero(before > 1))
        self.deliveries.write(positions, counts)

    def _count_uses(self, rows: Indexes, by: int) -> None:
        """Add `by` to the use count of each row. Rows that no longer exist are ignored.

        A row that occurs several times in `rows` is counted each time.
        """
        positions = self._table.find(rows)
        self.uses.add(positions[positions >= 0], by)

    def reach_named_end(self, name: str, end: EndCounts) -> None:
        """Record that the call with this claim name reported the end of the data."""
        self._remember(name, PastName(end=end))

    def _lose_name(self, claim: Claim, loss: Loss) -> None:
        """If the claim's name still refers to the claim, record that the claim was lost."""
        if self.names.get(claim.name) == claim.request_id:
            del self.names[claim.name]
            self._remember(claim.name, PastName(loss=loss))

    def _remember(self, name: str, past: PastName) -> None:
        """Record a claim name that no longer refers to a claim. If the limit is exceeded, drop the oldest record."""
        self.past_names[name] = past
        if len(self.past_names) > MOST_PAST_NAMES:
            self.past_names.popitem(last=False)

    def _consume(self, positions: Indexes, mark: int) -> None:
        """Write a mark to the `claim` column of the given rows, and count these rows as consumed.

        If the mark is `DROPPED`, the rows are counted as dropped instead.
        """
        if not positions.size:
            return
        self.claim.write(positions, mark)
        self.backlog -= positions.size - self._unmark(positions)
        if mark == DROPPED:
            self.dropped_count += positions.size
        else:
            self.consumed_count += positions.size

    def _keep_reusing(self, claim: Claim) -> None:
        """Keep the record of a claim whose rows can be reused. If a limit is exceeded, drop the oldest records."""
        self._reusing[claim.serial] = claim
        self._reusing_row_count += claim.rows.size
        while len(self._reusing) > 1 and (
            len(self._reusing) > _MOST_REUSING or self._reusing_row_count > _MOST_REUSING_ROWS
        ):
            oldest = next(iter(self._reusing.values()))
            if not oldest.request_id:
                self.last_forgotten = oldest.batch_index
            self._forget(oldest, "forgotten")

    def advance(self, trained: int, saved: int) -> None:
        """Record the trainer's progress, which never moves backward. Saved batches also count as trained."""
        self.trained, self.saved = max(self.trained, trained, saved), max(self.saved, saved)
        if self.outstanding is not None and self.outstanding.admission.given_back == "trained":
            self._give_back_trained()

    def give_back_published(self) -> None:
        """When a version is published, free the capacity of the trained and acknowledged units."""
        self._give_back_trained()
        self.done_units = 0

    def unpublished_count(self, trained: int = -1) -> int:
        """Return the number of trained batches that still occupy capacity.

        Batches up to `trained` count as trained, even if the ledger has not recorded this yet.
        """
        first_index = self.next_batch_index - len(self.delivered_units)
        return min(max(0, max(self.trained, trained) + 1 - first_index), len(self.delivered_units))

    def untrained(self) -> list[Claim]:
        """Return the recorded batches that have not been reported as trained, latest first."""
        return list(takewhile(lambda batch: batch.batch_index > self.trained, reversed(self.batches.values())))

    def _give_back_trained(self) -> None:
        self.delivered_units = self.delivered_units[self.unpublished_count() :]

    # Acknowledgement, release and expiry

    def left(self, claim: Claim) -> Indexes:
        """Return the positions of a claim's samples that are still leased.

        If the claim has no lease, return the positions of its samples that have not been cleared.
        """
        rows = claim.plan.named
        positions = self._table.find(rows)
        is_held = (positions >= 0) & (self.claim[positions] == claim.mark)
        if claim.lease is None and claim.plan.dropped:
            is_held |= (positions >= 0) & claim.plan.drops(rows)
        held: Indexes = positions[is_held]
        return held

    def ack(self, claim: Claim, positions: Indexes) -> Indexes:
        """Acknowledge leased rows. Return the rows that can be claimed again.

        An acknowledgement either consumes a row, drops it, or only counts its use.
        """
        with self._followed(positions):
            consumed, returned = self._ack(claim, positions)
        if self.outstanding is not None:
            self._count_delivered(self.outstanding, consumed, is_batch=False)
        return returned

    def _ack(self, claim: Claim, positions: Indexes) -> tuple[Indexes, Indexes]:
        """Acknowledge leased rows. Return the consumed rows and the rows that can be claimed again."""
        plan, dropped = claim.plan, positions[:0]
        if plan.dropped:
            is_dropped = plan.drops(self._table.index[positions])
            positions, dropped = positions[~is_dropped], positions[is_dropped]
            self.claim.write(dropped, DROPPED)
            self.dropped_count += dropped.size
        consumed, returned = positions, positions[:0]
        if plan.is_reusing:
            rows = self._table.index[positions]
            is_consumed = plan.consumes(rows)
            consumed, returned = positions[is_consumed], positions[~is_consumed]
            self._count_uses(plan.rows[np.isin(plan.rows, rows)], 1)
        if not self.refills.is_blank:
            is_due = self.refills[consumed] < 0
            consumed, returned = consumed[~is_due], np.concatenate([returned, consumed[is_due]])
        self.claim.write(consumed, claim.serial)
        self._count_leased(claim, -consumed.size)
        if returned.size:
            self._write_deliveries(returned, np.zeros(returned.size, np.int32))
            before = returned[:0] if claim.returned is None else claim.returned
            claim.returned = np.concatenate([before, self._table.index[returned]])
            self._reopen(returned)
        self._lose(claim, returned.size + dropped.size)
        return consumed, returned

    def nack(self, claim: Claim, positions: Indexes) -> None:
        """Undo the delivery of a claim's rows. For a claim without a lease, pass all remaining rows."""
        count = positions.size
        self._lose_name(claim, "released")
        if claim.lease is None:  # count rows cleared after delivery as if cleared before delivery
            count = claim.remaining = claim.rows.size if claim.plan.consumed is None else claim.plan.consumed.size
            self.dropped_count -= claim.plan.dropped_count
            self.delivered_count -= claim.rows.size
            if claim.plan.is_reusing:
                self._count_uses(claim.rows, -1)
        else:
            self.delivered_count -= int(positions.size)
            self._write_deliveries(positions, self.deliveries[positions] - np.int32(1))
        with self._followed(positions):
            self._reopen(positions)
        self._lose(claim, count)

    def expire(self, claim: Claim, positions: Indexes, at_seconds: float) -> Indexes:
        """End the expired lease on rows of a claim. Return the rows that can be claimed again.

        Rows that have reached the maximum number of deliveries are dead-lettered.
        """
        most = None if claim.lease is None else claim.lease.max_deliveries
        is_spent = self.deliveries[positions] >= (np.iinfo(np.int32).max if most is None else most)
        reopened, spent = positions[~is_spent], positions[is_spent]
        self._lose_name(claim, "expired")
        with self._followed(positions):
            self._reopen(reopened)
            self.claim.write(spent, DEAD_LETTERED)
        self.dead_lettered_count += spent.size
        self.totals.expired += positions.size
        self.totals.dead_lettered += spent.size
        self._lose(claim, positions.size)
        self.ended.add(claim.request_id, at_seconds, is_expired=True)
        return reopened

    def _reopen(self, positions: Indexes) -> None:
        self.claim.write(positions, UNCLAIMED)
        if not self.refills.is_blank:
            self.refills.write(positions, np.abs(self.refills[positions]))
        states = self.state[positions]
        self.backlog += int(np.count_nonzero(is_open(states)))

    def _count_leased(self, claim: Claim, count: int) -> None:
        """Add `count`, which may be negative, to the numbers of rows leased by the task and by the claim."""
        self.leased_count += count
        claim.leased_count += count
        if not claim.leased_count:
            self.leases.pop(claim.request_id, None)
        elif count > 0:
            self.leases[claim.request_id] = claim

    def _lose(self, claim: Claim, count: int) -> None:
        """Update the counts of the task and a claim after the claim gives up `count` consumed or leased rows."""
        if claim.lease is not None:
            self._count_leased(claim, -count)
        self.consumed_count -= count
        claim.remaining -= count
        self._on_fewer_rows(claim)

    def _on_fewer_rows(self, claim: Claim) -> None:
        """Drop a claim's record if no rows remain, unless the claim's rows can be delivered again.

        Even a rank that received no samples in a batch may request its part of the batch. The ledger therefore keeps
        the records of the latest batches in which a rank received no samples.
        """
        if claim.remaining == 0 and claim.returned is None:
            if not claim.request_id and 0 in claim.plan.sizes:
                insort(self._without_rows, claim.batch_index)
                if len(self._without_rows) <= _MOST_BATCHES_WITHOUT_ROWS:
                    return
                claim = self.batches[self._without_rows.pop(0)]
            self._forget(claim, "cleared")
        elif (
            (claim.plan.is_reusing or claim.returned is not None)
            and not claim.leased_count
            and claim.serial not in self._reusing
        ):
            self._keep_reusing(claim)

    def _forget(self, claim: Claim, loss: Loss) -> None:
        self._by_serial.pop(claim.serial, None)
        if self._reusing.pop(claim.serial, None) is not None:
            self._reusing_row_count -= claim.rows.size
        if claim.request_id:
            self._lose_name(claim, loss)
            del self.claims[claim.request_id]
        else:
            del self.batches[claim.batch_index]

    def dead_lettered(self) -> Indexes:
        """Return the positions of dead-lettered rows that have not been cleared."""
        if self.dead_lettered_count == 0:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.claim[: self._table.count] == DEAD_LETTERED)

    def requeue(self, positions: Indexes) -> None:
        """Make dead-lettered rows claimable again and reset their delivery counts."""
        self._write_deliveries(positions, np.zeros(positions.size, np.int32))
        self.dead_lettered_count -= positions.size
        with self._followed(positions):
            self._reopen(positions)

    # Evicted rows

    def note_evicted(self, units: Sequence[EvictedUnit]) -> None:
        """Record units evicted by one of the task's claims. If the limit is exceeded, drop the oldest records."""
        for unit in units:
            count = f"{unit.reason}_count"
            setattr(self, count, getattr(self, count) + 1)
            setattr(self.totals, unit.reason, getattr(self.totals, unit.reason) + 1)
        self.evicted.extend(units)

    def evicted_after(self, serial: int, most: int) -> list[EvictedUnit]:
        """Return up to `most` recorded evicted units with sequence numbers above `serial`, oldest first."""
        forgotten_count = self.evicted_count - len(self.evicted)
        start = max(0, serial - forgotten_count)
        return list(islice(self.evicted, start, start + most))

    def refill(self, positions: Indexes, most: int) -> tuple[list[RefillOutcome], Indexes]:
        """Make rows claimable again to replace evicted units.

        Return the outcome for each row, and the positions of the rows that are now claimable.

        Args:
            positions: table position of each row, or -1 for a row that does not exist.
            most: maximum number of refills per row and epoch.
        """
        outcomes: list[RefillOutcome] = []
        done: dict[int, None] = {}
        for position in positions.tolist():
            if position < 0:
                outcomes.append("unknown")
                continue
            outcomes.append("pending" if position in done else self._refill(position, most))
            if outcomes[-1] == "refilled" and self.claim[position] > UNCLAIMED:
                done[position] = None
        self.refilled_count += outcomes.count("refilled")
        reopened = np.array([*done], np.int64)
        if not reopened.size:
            return outcomes, reopened
        serials, counts = count_values(self.claim[reopened])
        with self._followed(reopened):
            self._reopen(reopened)
        self._write_deliveries(reopened, np.zeros(reopened.size, np.int32))
        if not self.uses.is_blank:
            self.uses.write(reopened, 0)
        self.consumed_count -= reopened.size
        for serial, count in zip(serials.tolist(), counts.tolist(), strict=True):
            if serial == CONSUMED_EARLIER:
                self.kept_count -= count
            elif (claim := self._by_serial.get(serial)) is not None:
                self._lose_name(claim, "released")
                claim.remaining -= count
                self._on_fewer_rows(claim)
        return outcomes, reopened

    def _refill(self, position: int, most: int) -> RefillOutcome:
        """Count a refill of a row if the row can be refilled and has not reached the limit. Return the outcome."""
        mark, count = int(self.claim[position]), int(self.refills[position])
        is_skipped = mark == UNCLAIMED and bool(self.skipped[position])
        is_lost = not is_open(self.state[position]) or mark in {DEAD_LETTERED, DROPPED} or is_skipped
        if is_lost or self.end is not None:
            return "given_up"
        if mark == UNCLAIMED or count < 0:
            return "pending"
        if count >= most:
            return "used_up"
        self.refills.write(position, count + 1 if mark > UNCLAIMED else -count - 1)
        return "refilled"

    # Skipped rows

    def skip(self, positions: Indexes) -> int:
        """Mark the pending rows among `positions` as skipped. Return the number of marked rows."""
        skipped = positions[self.is_pending(positions)]
        with self._followed(skipped):
            self.skipped.write(skipped, True)
            self.skipped_count += skipped.size
        self.backlog -= skipped.size
        return int(skipped.size)

    def unskip(self) -> Indexes:
        """Clear all "skipped" marks. Return the positions of the rows that were marked."""
        if not self.skipped_count:
            return np.zeros(0, np.int64)
        positions = np.flatnonzero(self.skipped[: self._table.count])
        with self._followed(positions):
            self.backlog += self._unmark(positions)
        return positions

    def _unmark(self, positions: Indexes) -> int:
        """Clear the "skipped" mark of rows without adding them to the backlog. Return the number of cleared marks."""
        if not self.skipped_count:
            return 0
        marked = positions[self.skipped[positions]]
        self.skipped.write(marked, False)
        self.skipped_count -= marked.size
        return int(marked.size)

    def is_left(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that are unclaimed and either live or held. Skipped rows are included."""
        left = is_open(self.state[rows])
        left &= self.claim[rows] == UNCLAIMED
        return left

    def is_pending(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return a mask of the live or held rows that are neither claimed nor skipped."""
        pending = self.is_left(rows)
        if self.skipped_count:
            pending &= ~self.skipped[rows]
        return pending

    def is_lost(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that the task can no longer receive.

        A row is lost to the task if it failed before it was claimed, or is dead-lettered, dropped or skipped.
        """
        claims = self.claim[positions]
        is_failed = (self.state[positions] == FAILED) & (claims == UNCLAIMED)
        is_given_up = (claims == DEAD_LETTERED) | (claims == DROPPED)
        lost: NDArray[np.bool_] = is_failed | is_given_up | self.skipped[positions]
        return lost

    # Released rows

    def _batches_after(self, index: int) -> list[Claim]:
        """Return the recorded batches whose batch_index is above `index`, latest first."""
        found = []
        for batch_index, batch in reversed(self.batches.items()):
            if batch_index <= index:
                break
            found.append(batch)
        return found

    def rows_of_batches(self, index: int, last: int) -> Indexes:
        """Return the positions of the stored samples in the batches from `index + 1` to `last`, inclusive.

        The result includes dropped samples. A sample that occurs in several batches is returned only once.
        """
        batches = [batch for batch in self._batches_after(index) if batch.batch_index <= last]
        positions = self._table.find(np.concatenate([_NO_ROWS, *(batch.plan.named for batch in batches)]))
        return distinct(positions[positions >= 0], self._table.count)

    def is_under_way(self, positions: Indexes, *, until_saved: bool) -> NDArray[np.bool_]:
        """Return a mask of the rows that are in untrained batches (or in unsaved batches if `until_saved` is set)."""
        claims = self.claim[positions]
        batches = self._batches_after(self.saved if until_saved else self.trained)
        is_under_way = np.isin(claims, [batch.serial for batch in batches])
        for batch in batches:
            if batch.plan.is_reusing or batch.plan.dropped:  # the marks of the rows may not identify the batch
                is_under_way |= np.isin(self._table.index[positions], batch.plan.named)
        return is_under_way

    def is_done(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that are consumed, dropped, failed or skipped. Dead-lettered rows are excluded."""
        claims = self.claim[positions]
        is_done: NDArray[np.bool_] = (claims > UNCLAIMED) | (claims == DROPPED)
        is_done |= (self.state[positions] == FAILED) | self.skipped[positions]
        return is_done

    def note_released(self, positions: Indexes) -> None:
        """Record the last batch that contains any of the rows to be released.

        Ranks can no longer resume at this batch or an earlier one.
        """
        last = int(self.claim[positions].max(initial=UNCLAIMED))
        for batch in reversed(self.batches.values()) if last > LAST_RESERVED else ():
            if batch.serial <= last:
                self.released = max(self.released, batch.batch_index)
                break

    def reset(self, *, keep_consumed: bool, open_count: int) -> Indexes:
        """Start the next epoch. Return the positions of the rows that were leased, dead-lettered, dropped or skipped.

        The returned rows become claimable. If `keep_consumed` is false, all other rows also become claimable. The
        backlog is then set to `open_count`, the number of live or held rows.
        """
        self.epoch += 1
        self.dp_size = None
        self.next_batch_index = 0
        self.end = None
        self.consumed_count -= self.leased_count
        self.kept_groups = None
        reopened = self.unskip()
        if self.dropped_count or not self.deliveries.is_blank:
            lost = np.flatnonzero(self.claim[: self._table.count] < UNCLAIMED)
            self._reopen(lost)
            reopened = np.concatenate([reopened, lost])
            self.deliveries.write(slice(0, self._table.count), 0)
        for each in (self.uses, self.refills):
            if not keep_consumed and not each.is_blank:
                each.write(slice(0, self._table.count), 0)
        self.leased_count = self.redelivered_count = self.dead_lettered_count = self.dropped_count = 0
        self.last_forgotten = self.trained = self.saved = self.released = -1
        self.delivered_units, self.done_units = (), 0
        self._forget_records()
        if keep_consumed:
            claims = self.claim[: self._table.count]
            self.claim.write(np.flatnonzero(claims != UNCLAIMED), CONSUMED_EARLIER)
        else:
            self.claim.write(slice(0, self._table.count), UNCLAIMED)
            self.consumed_count, self.backlog = 0, open_count
        self.kept_count = self.consumed_count
        if self.outstanding is not None:
            self.outstanding.recount(self, self._table.count)
        return reopened

    def restart_ranks(self, dp_size: int, trained: int) -> Indexes:
        """Start the next epoch for restarted ranks and undo all batches after `trained`.

        Return the positions of the rows in the undone batches.

        Args:
            dp_size: new number of ranks.
            trained: batch_index of the last trained batch. The next planned batch gets the index `trained + 1`.
        """
        reopened, dropped_count = [np.zeros(0, np.int64)], self.next_batch_index - trained - 1
        for index in range(trained + 1, self.next_batch_index):
            if (batch := self.batches.get(index)) is not None:
                reopened.append(self.left(batch))
                self.nack(batch, reopened[-1])
                if index in self.batches:  # the batch has no rows left, but its record was kept
                    self._forget(batch, "cleared")
        self._without_rows = [index for index in self._without_rows if index <= trained]
        recent = [batch for batch in self.recent_batches if batch.batch_index <= trained]
        self.recent_batches = deque(recent, maxlen=_MOST_RECENT)
        self.epoch += 1
        self.dp_size, self.next_batch_index, self.end = dp_size, trained + 1, None
        self.trained, self.saved = trained, min(self.saved, trained)
        self.delivered_units = self.delivered_units[: max(0, len(self.delivered_units) - dropped_count)]
        self.last_forgotten = min(self.last_forgotten, trained)
        return np.concatenate(reopened)

    # Added and removed rows

    def on_rows_added(self, added: slice) -> None:
        """Count new live or held rows toward the backlog and the outstanding units."""
        self.backlog += added.stop - added.start
        if self.outstanding is not None:
            self.outstanding.add(np.arange(added.start, added.stop), 1)

    def on_rows_closed(self, positions: Indexes) -> None:
        """Update the counts when live or held rows fail or are cleared.

        Leased rows count as permanently consumed because no other worker will process them.
        """
        claims = self.claim[positions]
        if self.outstanding is not None:
            self.outstanding.add(positions[self.outstanding.is_held(self, positions)], -1)
        self.backlog -= int(np.count_nonzero(claims == UNCLAIMED)) - self._unmark(positions)
        if not self.leased_count:
            return
        is_leased = claims < DROPPED
        serials, counts = count_values(-claims[is_leased])
        self.claim.write(positions[is_leased], -claims[is_leased])
        for serial, count in zip(serials.tolist(), counts.tolist(), strict=True):
            claim = self._by_serial[serial]
            self._count_leased(claim, -count)
            self._on_fewer_rows(claim)

    def on_rows_cleared(self, positions: Indexes) -> None:
        """Drop the records of claims whose last rows are being cleared."""
        if self.redelivered_count:
            self._write_deliveries(positions, np.zeros(positions.size, np.int32))
        serials, counts = count_values(self.claim[positions])
        for serial, count in zip(serials.tolist(), counts.tolist(), strict=True):
            if (claim := self._by_serial.get(serial)) is not None:
                claim.remaining -= count
                self._on_fewer_rows(claim)


def task_columns(name: str) -> tuple[str, str, str, str, str]:
    """Return the full names of a task's `claim`, `deliveries`, `uses`, `skipped` and `refills` columns."""
    return f"claim/{name}", f"deliveries/{name}", f"uses/{name}", f"skipped/{name}", f"refills/{name}"


def check_epoch(name: str, epoch: int, got: int | None) -> None:
    """Raise StaleEpochError if the caller's epoch `got` is not the task's current epoch. None matches any epoch."""
    if got is not None and got != epoch:
        raise StaleEpochError(
            f"task {name!r} is at epoch {epoch}, got epoch {got}; the task's consumption was reset. Use the epoch "
            f"that CheckConsumption returns",
            metadata={"task_name": name, "got": str(got), "expected": str(epoch)},
        )


def _disagreement(name: str, got: object, expected: object, what: str, remedy: str = "") -> PreconditionError:
    return RankDisagreementError(
        f"{name} of {what} is {shown(expected)}, got {shown(got)}; all calls must pass the same arguments{remedy}",
        metadata={"field": name, "got": shown(got)[:512], "expected": shown(expected)[:512]},
    )
