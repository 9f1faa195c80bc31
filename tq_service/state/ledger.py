"""The ledger of one task: which samples of a partition its claims have consumed, hold under a lease, or lost.

One column, `claim`, says of each row what became of it, and only the ledger writes it:

- 0: it can be claimed;
- 1: consumed in an earlier epoch;
- n from 3 on: consumed for good by the claim with serial n: delivered without a lease, or acknowledged;
- -n: leased to the claim with serial n, which has yet to acknowledge it;
- -1: dead-lettered: delivered too often without being acknowledged;
- -2: dropped: a plan left it out of its batch, for good.

Another column, `skipped`, marks rows at 0 that are in a group which lost a member for good, while the task keeps groups
whole: they are not pending. Samplers see them as before, so a task that takes the rest of such groups can have them.

    0 --deliver----------------------------------------------> n    (nack of a claim without a lease: back to 0)
    0 --deliver with a lease--------> -n --ack, row is gone--> n
                                      -n --nack, expire------> 0    (expire of one delivered too often: -1)
    -1 --requeue--> 0
    0 --deliver, of what the plan drops----------------------> -2   (under a lease: -n, and -2 with its ack)
    any --reset--> 0, or 1 what was consumed and is kept so

A plan may consume other samples than it delivers (`RecordedPlan.consumed`). What it only delivers stays at 0, or under
a lease returns to 0 with its acknowledgement, and counts in another column, `uses`. No row says then which records it
is in, so these are not dropped with their rows: the last of them are kept.

What changes the ledger checks nothing and reads no clock: it is given what was looked up and checked before, and does
the same whether a claim is made now or is made again from the log. When a lease expires is decided by the timer of the
instance that serves the partition, and comes back to the ledger as a change.
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
from itertools import chain, islice
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
from tq_service.state.plan import BatchSpec, ClaimRequest, Indexes, LeaseTerms, Pack, Plan, RankPlan, shown
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
    is_open,
)

_ENDED_SECONDS = 900.0
_MOST_ENDED = 131_072
_DERIVED = {"is_encoded": False}  # rebuilt from the columns, or of this instance of the service alone
_MOST_REMEMBERED_ROWS, _MOST_REMEMBERED_PACKS = 1 << 13, 512  # of a rank; 256 steps of so many take some 40 MB
_MOST_RECENT: Final = 16
_MOST_BATCHES_WITHOUT_ROWS = 16  # short batches come at the end of an epoch, so there is rarely more than one
_MOST_REUSING, _MOST_REUSING_ROWS = 1 << 10, 1 << 22  # records of plans that deliver what they do not consume
_NO_ROWS: Final = np.zeros(0, np.int64)
_NOT_FOLLOWED: Final = nullcontext()
_OTHER_DP_SIZE: Final = ". To continue with another number of ranks, restart the ranks (docs/asynchronous_rl.md)"

MOST_EVICTED: Final = 65_536
"""Most units that claims of a task have evicted and that are remembered; the oldest ones are forgotten."""
MOST_PAST_NAMES: Final = 65_536
"""Most names of a task that stand for no claim any more and are remembered; the oldest ones are forgotten."""

Loss: TypeAlias = Literal["cleared", "released", "expired", "forgotten"]
_LOSSES: Final[Mapping[Loss, tuple[type[TqError], str]]] = {
    "released": (
        ClaimReleasedError,
        "this claim of task {task!r} was released; ask again under a new request_id, or another claim_name",
    ),
    "expired": (
        LeaseExpiredError,
        "the lease of this claim of task {task!r} ran out, and others may have its samples; ask again under a new "
        "request_id, or another claim_name",
    ),
    "cleared": (
        SamplesClearedError,
        "what task {task!r} was to get here was planned, but samples of it have been cleared since; go on with a later "
        "batch_index (the next to be planned is {next}), a queue worker under a new request_id, or another claim_name",
    ),
    "forgotten": (
        BatchForgottenError,
        "what task {task!r} was to get here was planned, and is not on record any more: of plans that deliver samples "
        "without consuming them the last {most} are kept; go on with a later batch_index (the next to be "
        "planned is {next}), a queue worker under another claim_name",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PastName:
    """What a name stands for that stands for no claim: the end, or one that is no more what it was.

    Attributes:
        end: None: it stood for a claim.
        loss: what became of samples of the claim.
    """

    end: EndCounts | None = None
    loss: Loss | None = None


Steps: TypeAlias = tuple[tuple[Pack, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """A plan as it is recorded, by the hundred thousand: in few objects, and without what follows from the rest.

    Attributes:
        rows: global indexes of all ranks `(sum(sizes),)`, those of rank 0 first.
        sizes: number of rows of each rank.
        steps: of each rank, see `RankPlan`; empty where the sampler made none.
        micro_batch_size: samples a micro-batch, or None; for a plan without steps.
        consumed: global indexes of what is consumed, see `Plan`; None: of all rows, none of which comes twice.
        dropped: global indexes of what each rank's part leaves out, see `RankPlan`; empty where nothing is left out.
    """

    rows: Indexes
    sizes: tuple[int, ...]
    steps: tuple[Steps, ...] = ()
    micro_batch_size: int | None = None
    consumed: Indexes | None = None
    dropped: tuple[Indexes, ...] = ()

    @classmethod
    def of(cls, plan: Plan, micro_batch_size: int | None = None) -> RecordedPlan:
        """Return what is recorded of a plan."""
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
        """Whether it may deliver what it does not consume."""
        return self.consumed is not None

    @property
    def used(self) -> Indexes:
        """The samples that it delivers or consumes, each once."""
        return self.rows if self.consumed is None else np.union1d(self.rows, self.consumed)

    @property
    def named(self) -> Indexes:
        """The samples that it delivers or consumes, and then those that it drops, each once."""
        return np.concatenate([self.used, *self.dropped]) if self.dropped else self.used

    @property
    def dropped_count(self) -> int:
        """How many samples it drops."""
        return sum(map(len, self.dropped))

    def drops(self, rows: Indexes) -> NDArray[np.bool_]:
        """Return which samples it drops."""
        return np.isin(rows, np.concatenate(self.dropped)) if self.dropped else np.zeros(rows.size, np.bool_)

    def consumes(self, rows: Indexes) -> NDArray[np.bool_]:
        """Return which samples it consumes."""
        return np.ones(rows.size, np.bool_) if self.consumed is None else np.isin(rows, self.consumed)

    def part(self, dp_rank: int = 0) -> RankPlan:
        """Return the part of a rank; without steps it has micro-batches, as many on every rank, empty ones included."""
        start, size = sum(self.sizes[:dp_rank]), self.sizes[dp_rank]
        if self.steps:
            steps = self.steps[dp_rank]
        else:
            largest, count = max(self.sizes), self.micro_batch_size
            is_large = largest > _MOST_REMEMBERED_ROWS or largest > _MOST_REMEMBERED_PACKS * (count or largest)
            steps = (_one_step if is_large else _remembered_step)(size, largest, count)
        dropped = self.dropped[dp_rank] if self.dropped else _NO_ROWS
        return RankPlan(rows=self.rows[start : start + size], steps=steps, dropped=dropped)


def _one_step(count: int, largest: int, micro_batch_size: int | None) -> Steps:
    """Return the micro-batches of a rank with `count` rows, where some rank has `largest`."""
    positions = np.arange(count)
    positions.flags.writeable = False
    size = micro_batch_size or max(1, largest)
    return (tuple(Pack(positions=positions[start : start + size]) for start in range(0, max(1, largest), size)),)


_remembered_step = lru_cache(maxsize=256)(_one_step)


@dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """What a plan delivered: to all ranks as a batch, or to a queue worker.

    Attributes:
        serial: its number in the task.
        plan: the samples, and how they are used.
        request_id: of the call of a queue worker; empty: it is a batch.
        batch_index: of a batch; -1: it is of a queue worker.
        name: what the caller of a queue worker calls it; empty: it has no name.
        batch_spec: what all ranks, or all calls under its name, have to ask for alike; None: it is of a queue worker
            and has no name.
        lease: the terms, also once nothing is leased any more; None: its samples were done when they were delivered.
        delivery_counts: for each sample of a claim with a lease how often it was delivered, this time included.
        returned: samples of a claim with a lease that it acknowledged and did not consume; None: there are none.
        remaining: its samples that are neither cleared nor released; of a plan that may deliver what it does not
            consume those that it consumed, if it leased none.
        leased_count: its samples that are leased: neither acknowledged, failed, cleared nor released.
        deadline: when these expire, by the clock of the event loop; set by the lease timer, which no replay has.
        delivered_at: when its lease first began in this instance of the service, by the same clock; set likewise.
        answer_count: calls that were answered with it by this instance of the service: a call that disconnects before
            its answer was sent releases the claim only if no retry was given the same.
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
        """Global indexes of its samples."""
        return self.plan.rows

    @property
    def goes_with_rows(self) -> bool:
        """Whether its rows say that they are its own, so that it goes with the last of them."""
        return self.lease is not None or not self.plan.is_reusing

    @property
    def may_change(self) -> bool:
        """Whether more of it may change than what is derived: its terms, and what of it was returned or is reused."""
        return self.lease is not None or self.plan.is_reusing

    @property
    def mark(self) -> int:
        """What stands in the `claim` column for the samples it has been given and holds."""
        return self.serial if self.lease is None else -self.serial

    def leased_seconds(self, now: float) -> float:
        """Return how long what is leased stays with the worker; 0 where nothing is."""
        return max(0.0, self.deadline - now) if self.leased_count else 0.0


class EndedClaims(OrderedDict[bytes, tuple[float, bool]]):
    """Request ids of claims that were released or have expired, the oldest first: for a late GetMeta to be refused.

    Of each it is known since when, and whether it has expired, be it that it was released as well.
    """

    def add(self, request_id: bytes, at_seconds: float, *, is_expired: bool) -> None:
        """Remember one from a time that is not before that of any other; forget those that are too old to matter."""
        self[request_id] = (at_seconds, is_expired or self.has_expired(request_id))
        self.move_to_end(request_id)
        while len(self) > _MOST_ENDED or next(iter(self.values()))[0] < at_seconds - _ENDED_SECONDS:
            self.popitem(last=False)

    def has_expired(self, request_id: bytes) -> bool:
        """Whether samples of the claim were not acknowledged in time."""
        return request_id in self and self[request_id][1]


@dataclass(slots=True, kw_only=True)
class TaskTotals:
    """What has become of the samples of a task, over all epochs, as far as this process has applied it.

    None of it ever falls, and none of it is in a snapshot.

    Attributes:
        delivered: samples delivered, each as often as it was.
        redelivered: those of them that were delivered under a lease before, which ran out.
        expired: samples whose leases ran out.
        dead_lettered: those of them that are not delivered again.
        unmatched: units that its claims evicted since their `where` excludes them.
        too_small: groups that its claims evicted since too few members were left.
        late: samples and groups that its claims evicted since they would have become too stale.
    """

    delivered: int = 0
    redelivered: int = 0
    expired: int = 0
    dead_lettered: int = 0
    unmatched: int = 0
    too_small: int = 0
    late: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class TaskFacts:
    """What is known of a task besides its columns and records, in plain values: part of a snapshot as it stands here.

    Attributes:
        end: None: it is not at its end.
        consumed_count: rows consumed in this epoch, leased and cleared ones included.
        kept_count: those of them that were consumed in earlier epochs, and that the last reset left so.
        backlog: rows that are live or held, and neither consumed, dead-lettered, dropped nor skipped.
        skipped_count: rows that are live or held and skipped; those cleared since are not counted.
        kept_groups: how the last request kept groups whole: 0 for named groups, else the length of the blocks that
            stand in for them where no group is named; None: it took samples one by one, or the rest of incomplete
            groups, or has not asked in this epoch.
        dead_lettered_count: rows dead-lettered in this epoch, cleared ones included.
        dropped_count: rows that plans of this epoch left out, cleared ones included.
        last_forgotten: the last batch_index whose record was dropped although its rows are there; -1: none was.
        serial: the last one given to a claim.
        trained: the last batch_index up to which batches were trained; -1: none was.
        saved: the last batch_index up to which a checkpoint of the trainer covers batches; -1: none does.
        delivered_units: of a task with an admission that gives places back later: the units of each of the last
            batches, those that have not given their places back.
        done_units: units that were acknowledged, or delivered to queue workers without a lease, and give their places
            back with the next publication.
        unmatched_count: units that its claims evicted since their `where` excludes them, in all epochs.
        too_small_count: groups that its claims evicted since too few members were left, in all epochs.
        late_count: samples and groups that they evicted since they would have become too stale.
        refilled_count: rows that were made claimable again for it by evictions, in all epochs.
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
    refilled_count: int = 0

    @property
    def evicted_count(self) -> int:
        """Units that claims of the task evicted, in all epochs."""
        return self.unmatched_count + self.too_small_count + self.late_count


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSnapshot:
    """A task at one moment, but for its columns, from which follows how many rows are left of each record."""

    facts: TaskFacts
    batches: list[Claim] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    names: list[tuple[str, bytes]] = field(default_factory=list)
    past_names: list[tuple[str, PastName]] = field(default_factory=list)
    reusing: list[int] = field(default_factory=list)  # serials of records, the oldest first
    ended: list[tuple[bytes, tuple[float, bool]]] = field(default_factory=list)
    evicted: list[EvictedUnit] = field(default_factory=list)


class TaskLedger(TaskFacts):
    """What one named consumer has consumed of a partition: its claims, leases, epoch and end.

    Records of claims are dropped with the last of their rows, so what a task keeps is bounded by what is stored. A
    short batch in which some ranks have no rows outlives those of the others, since these ranks may come late. Of
    records whose rows others may get too, the last are kept, whether or not the rows are there.

    Attributes, and those of `TaskFacts`, are read by everybody and changed here only:
        claim: what became of each row, see the module.
        deliveries: how often each row was delivered under a lease in this epoch, and not acknowledged.
        uses: how often each row was delivered, under a lease also acknowledged, and not consumed.
        skipped: which rows are skipped, see the module.
        refills: how often each row was made claimable again by an eviction in this epoch; as a negative number, which
            is to be claimable once the worker that has it acknowledges it.
        leased_count: rows that are leased.
        redelivered_count: rows that were delivered more than once in this epoch, see `deliveries`.
        batches: recorded batches by batch_index, in the order of these; also the few kept without rows.
        claims: claims of queue workers by their request_id.
        leases: those of them that lease samples, in the order of their delivery.
        names: the request_id of the queue claim that each name stands for which callers gave.
        past_names: names that stand for no claim any more, the oldest first.
        ended: ids of claims that were released or have expired.
        evicted: the last units that its claims have evicted, in all epochs, in order.
        totals: counts that are not of the epoch, but of this process.
        recent_batches: the last batches of this epoch in numbers, as far as this process has planned them.
        state: of each row; the partition writes it.
        outstanding: counts what is outstanding for it; None: it has no admission.
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
        """Have no records, as at the beginning of an epoch."""
        self.batches: dict[int, Claim] = {}
        self.claims: dict[bytes, Claim] = {}
        self.leases: dict[bytes, Claim] = {}
        self.names: dict[str, bytes] = {}
        self.past_names: OrderedDict[str, PastName] = OrderedDict()
        self._without_rows: list[int] = []  # batch indexes, the lowest first
        self._reusing: dict[int, Claim] = {}  # those that lease nothing, by serial
        self._reusing_row_count = 0
        self._by_serial: dict[int, Claim] = {}
        self.recent_batches: deque[RecentBatch] = deque(maxlen=_MOST_RECENT)

    @property
    def is_unused(self) -> bool:
        """Whether nothing is on record: no claim, end, epoch, release or eviction."""
        is_first = self.epoch == 0 and self.serial == LAST_RESERVED and not self.evicted_count
        return is_first and self.end is None and not (self.ended or self.past_names)

    # Snapshots

    @property
    def facts(self) -> TaskFacts:
        """What is known of the task besides its columns and records."""
        return TaskFacts(**{each.name: getattr(self, each.name) for each in fields(TaskFacts)})

    def snapshot(self) -> TaskSnapshot:
        """Return all that the task has on record, as it is now: pointers to its records, copies of those that change.

        Its columns are in the snapshot of the table.
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
        """Have the facts and records of a snapshot for its own; for a new task whose columns are restored."""
        for each in fields(TaskFacts):
            setattr(self, each.name, getattr(snapshot.facts, each.name))
        self.ended.update(snapshot.ended)
        self.evicted.extend(snapshot.evicted)
        self.names.update(snapshot.names)
        self.past_names.update(snapshot.past_names)
        specs: dict[BatchSpec | None, BatchSpec | None] = {}  # thousands of claims share a few
        serials, counts = count_values(self.claim[: self._table.count])
        rows_of = dict(zip(serials.tolist(), counts.tolist(), strict=True))
        self.redelivered_count = int(np.count_nonzero(self.deliveries[: self._table.count] > 1))
        for claim in chain(snapshot.batches, snapshot.claims):
            claim.batch_spec = specs.setdefault(claim.batch_spec, claim.batch_spec)
            self._add(claim)
            claim.leased_count = 0  # a snapshot that was not written down has what another ledger counted
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

    # Recorded answers

    def check_epoch(self, epoch: int | None) -> None:
        """Refuse a caller that means another epoch."""
        check_epoch(self.name, self.epoch, epoch)

    def recorded(self, request: ClaimRequest) -> RankPlan | Claim | EndCounts | None:
        """Return the recorded answer to a request, None where there is none yet."""
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
            raise self._loss_error("forgotten" if rank.batch_index <= self.last_forgotten else "cleared")
        if rank.dp_size != len(batch.plan.sizes):
            what = f"batch_index {rank.batch_index}, which was planned before the ranks of task {self.name!r} restarted"
            raise _disagreement("dp_size", rank.dp_size, len(batch.plan.sizes), what)
        self._check_alike(request, batch, f"batch_index {rank.batch_index}")
        part = batch.plan.part(rank.dp_rank)
        if batch.plan.is_reusing or batch.remaining < batch.rows.size:  # some of its samples may have been cleared
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
                f"request_id {request_id.hex()} is that of another claim of task {self.name!r} than {name!r}; make one "
                f"for each claim_name",
                field="request_id",
            )
        self.check_present(claim.rows)
        return claim

    def _check_alike(self, request: ClaimRequest, claim: Claim, what: str) -> None:
        """Refuse a call that asks for something else than the one for which its answer was recorded."""
        differs = None if claim.batch_spec is None else request.batch_spec.disagreement(claim.batch_spec)
        if differs is not None:
            raise _disagreement(*differs, f"{what} of task {self.name!r}")

    def check_present(self, rows: Indexes) -> None:
        """Refuse an answer of which samples have been cleared since it was planned."""
        if bool((self._table.find(rows) < 0).any()):
            raise self._loss_error("cleared")

    def _loss_error(self, loss: Loss) -> TqError:
        kind, text = _LOSSES[loss]
        return kind(
            text.format(task=self.name, next=self.next_batch_index, most=_MOST_REUSING),
            metadata={"task_name": self.name, "next_batch_index": str(self.next_batch_index)},
        )

    # Claims

    def using_up(self, plan: RecordedPlan, max_uses: int) -> RecordedPlan:
        """Return a plan that consumes what it delivers for the last time, and beside it what its sampler said.

        Without `max_uses`, only rows that the sampler names are consumed, or all.
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
        """Record what a plan delivers, as the next batch of the ranks or to a queue worker, and what it consumes.

        Args:
            plan: the plan.
            positions: those of `plan.named`.
            request_id: of the call of a queue worker; empty: it is a batch.
            batch_spec: of a batch, or a claim with a name: what was asked for.
            lease: how its samples are leased; None: they are done.
            name: that of the claim; empty: it has none.
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
        """Units that are outstanding, as the admission counts them; None: it has none."""
        return None if self.outstanding is None else self.outstanding.count(self)

    def _followed(self, positions: Indexes) -> AbstractContextManager[None]:
        """Have what becomes of rows in the `with` counted by the admission, if there is one."""
        return _NOT_FOLLOWED if self.outstanding is None else self.outstanding.following(self, positions)

    def _count_delivered(self, outstanding: Outstanding, positions: Indexes, *, is_batch: bool) -> None:
        """Count rows that were delivered for good, until they give their places back."""
        admission, given_back = outstanding.admission, outstanding.admission.given_back
        if given_back != "delivered" and is_batch:
            # Where staleness is bounded a batch takes as many places as it stands for versions, whatever it lacks.
            count = outstanding.units_of(positions) if admission.max_staleness is None else admission.global_batch
            self.delivered_units = (*self.delivered_units, count)
        elif given_back == "published":
            self.done_units += outstanding.units_of(positions)

    def reach_end(self, dp_size: int, end: EndCounts) -> None:
        """Record that no batch follows, for all ranks and batch indexes from the next on."""
        self.dp_size = dp_size
        self.end = end

    def _lease(self, claim: Claim, positions: Indexes, dropped: Indexes) -> None:
        """Lease what a claim delivers and what it drops; what it consumes without delivering it is done."""
        delivered = positions
        if claim.plan.is_reusing:
            is_delivered = np.isin(claim.plan.used, claim.rows)
            self._consume(positions[~is_delivered], claim.serial)
            delivered = positions[is_delivered]
        claim.delivery_counts = self.deliveries[delivered] + np.int32(1)
        self.totals.redelivered += int(np.count_nonzero(claim.delivery_counts > 1))
        self._write_deliveries(delivered, claim.delivery_counts)
        if claim.plan.is_reusing:  # in which a sample may come twice
            claim.delivery_counts = self.deliveries[self._table.find(claim.rows)]
        if dropped.size:
            self._write_deliveries(dropped, self.deliveries[dropped] + np.int32(1))
            delivered = np.concatenate([delivered, dropped])
        self._count_leased(claim, delivered.size)
        self._consume(delivered, claim.mark)

    def _write_deliveries(self, positions: Indexes, counts: NDArray[np.int32]) -> None:
        """Write how often rows were delivered, and count those that were more than once."""
        before = self.deliveries[positions]
        self.redelivered_count += int(np.count_nonzero(counts > 1)) - int(np.count_nonzero(before > 1))
        self.deliveries.write(positions, counts)

    def _count_uses(self, rows: Indexes, by: int) -> None:
        """Count deliveries of rows, as often as they are given and as far as they are there."""
        positions = self._table.find(rows)
        self.uses.add(positions[positions >= 0], by)

    def reach_named_end(self, name: str, end: EndCounts) -> None:
        """Record that the call under a name was answered with the end."""
        self._remember(name, PastName(end=end))

    def _lose_name(self, claim: Claim, loss: Loss) -> None:
        """Detach the name of a claim from it, if it stands for it."""
        if self.names.get(claim.name) == claim.request_id:
            del self.names[claim.name]
            self._remember(claim.name, PastName(loss=loss))

    def _remember(self, name: str, past: PastName) -> None:
        """Have a name stand for no claim any more."""
        self.past_names[name] = past
        if len(self.past_names) > MOST_PAST_NAMES:
            self.past_names.popitem(last=False)

    def _consume(self, positions: Indexes, mark: int) -> None:
        """Have rows consumed, or pending no more without being consumed where the mark says that they are dropped."""
        if not positions.size:
            return
        self.claim.write(positions, mark)
        self.backlog -= positions.size - self._unmark(positions)
        if mark == DROPPED:
            self.dropped_count += positions.size
        else:
            self.consumed_count += positions.size

    def _keep_reusing(self, claim: Claim) -> None:
        """Keep a claim whose rows others may get too, and drop the oldest of those where they are many."""
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
        """Record how far the trainer has come; marks that are not higher than before stay."""
        self.trained, self.saved = max(self.trained, trained), max(self.saved, saved)
        if self.outstanding is not None and self.outstanding.admission.given_back == "trained":
            self._give_back_trained()

    def give_back_published(self) -> None:
        """Have all that was trained or acknowledged give its place back: the version that it made is published."""
        self._give_back_trained()
        self.done_units = 0

    def unpublished_count(self, trained: int = -1) -> int:
        """Return how many batches were trained that take their places still, up to `trained` at least."""
        first_index = self.next_batch_index - len(self.delivered_units)
        return min(max(0, max(self.trained, trained) + 1 - first_index), len(self.delivered_units))

    def _give_back_trained(self) -> None:
        self.delivered_units = self.delivered_units[self.unpublished_count() :]

    # What becomes of a claim

    def left(self, claim: Claim) -> Indexes:
        """Return the positions of the samples that a claim holds: leased ones, without a lease those not cleared."""
        rows = claim.plan.named
        positions = self._table.find(rows)
        is_held = (positions >= 0) & (self.claim[positions] == claim.mark)
        if claim.lease is None and claim.plan.dropped:
            is_held |= (positions >= 0) & claim.plan.drops(rows)
        held: Indexes = positions[is_held]
        return held

    def ack(self, claim: Claim, positions: Indexes) -> Indexes:
        """Have leased rows consumed or dropped for good, or used once more; return those that can be claimed again."""
        with self._followed(positions):
            consumed, returned = self._ack(claim, positions)
        if self.outstanding is not None:
            self._count_delivered(self.outstanding, consumed, is_batch=False)
        return returned

    def _ack(self, claim: Claim, positions: Indexes) -> tuple[Indexes, Indexes]:
        """Return what `ack` has consumed, and what can be claimed again."""
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
        """Release rows of a claim as if they had not been delivered; all that are left where it has no lease."""
        count = positions.size
        self._lose_name(claim, "released")
        if claim.lease is None:  # those cleared meanwhile are counted as cleared before the task took them
            count = claim.remaining = claim.rows.size if claim.plan.consumed is None else claim.plan.consumed.size
            self.dropped_count -= claim.plan.dropped_count
            if claim.plan.is_reusing:
                self._count_uses(claim.rows, -1)
        else:
            self._write_deliveries(positions, self.deliveries[positions] - np.int32(1))
        with self._followed(positions):
            self._reopen(positions)
        self._lose(claim, count)

    def expire(self, claim: Claim, positions: Indexes, at_seconds: float) -> Indexes:
        """Take all that is leased; return the positions that can be claimed again, not the dead-lettered."""
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
        """Count rows that are leased from now on; fewer than 0: not any more."""
        self.leased_count += count
        claim.leased_count += count
        if not claim.leased_count:
            self.leases.pop(claim.request_id, None)
        elif count > 0:
            self.leases[claim.request_id] = claim

    def _lose(self, claim: Claim, count: int) -> None:
        """Count off rows that are no longer consumed by a claim, nor leased to it."""
        if claim.lease is not None:
            self._count_leased(claim, -count)
        self.consumed_count -= count
        claim.remaining -= count
        self._on_fewer_rows(claim)

    def _on_fewer_rows(self, claim: Claim) -> None:
        """Drop a claim that has no rows left; one that returned some is kept with those whose rows others may get.

        Of the batches in which a rank had no rows the last few are kept: it still gets its answer.
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
        """Return the positions of the rows that are dead-lettered and not cleared."""
        if self.dead_lettered_count == 0:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.claim[: self._table.count] == DEAD_LETTERED)

    def requeue(self, positions: Indexes) -> None:
        """Have dead-lettered rows claimable, as if they had never been delivered."""
        self._write_deliveries(positions, np.zeros(positions.size, np.int32))
        self.dead_lettered_count -= positions.size
        with self._followed(positions):
            self._reopen(positions)

    # Evicted rows

    def note_evicted(self, units: Sequence[EvictedUnit]) -> None:
        """Record what a claim of the task has evicted; the oldest units on record are forgotten where they are many."""
        for unit in units:
            count = f"{unit.reason}_count"
            setattr(self, count, getattr(self, count) + 1)
            setattr(self.totals, unit.reason, getattr(self.totals, unit.reason) + 1)
        self.evicted.extend(units)

    def evicted_after(self, serial: int, most: int) -> list[EvictedUnit]:
        """Return the first units on record whose serials are above one."""
        forgotten_count = self.evicted_count - len(self.evicted)
        start = max(0, serial - forgotten_count)
        return list(islice(self.evicted, start, start + most))

    def refill(self, positions: Indexes, most: int) -> tuple[list[RefillOutcome], Indexes]:
        """Have rows claimable again that make evicted units once more; return what came of each, and which are now.

        Args:
            positions: of the rows, -1 for one that is not there.
            most: how often a row is refilled in an epoch.
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
        """Count a refill of a row, if it can have one; return what comes of it."""
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
        """Skip those of some rows that are pending; return how many they are."""
        skipped = positions[self.is_pending(positions)]
        with self._followed(skipped):
            self.skipped.write(skipped, True)
            self.skipped_count += skipped.size
        self.backlog -= skipped.size
        return int(skipped.size)

    def unskip(self) -> Indexes:
        """Have no row skipped any more; return the positions of those that were."""
        if not self.skipped_count:
            return np.zeros(0, np.int64)
        positions = np.flatnonzero(self.skipped[: self._table.count])
        with self._followed(positions):
            self.backlog += self._unmark(positions)
        return positions

    def _unmark(self, positions: Indexes) -> int:
        """Count off those of some rows that are skipped, without counting them as pending; return how many."""
        if not self.skipped_count:
            return 0
        marked = positions[self.skipped[positions]]
        self.skipped.write(marked, False)
        self.skipped_count -= marked.size
        return int(marked.size)

    def is_left(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which rows are left, skipped or not: live or held, and neither claimed, dead-lettered nor dropped."""
        left = is_open(self.state[rows])
        left &= self.claim[rows] == UNCLAIMED
        return left

    def is_pending(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which rows are left and not skipped."""
        pending = self.is_left(rows)
        if self.skipped_count:
            pending &= ~self.skipped[rows]
        return pending

    def is_lost(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return which of some rows it never gets: failed before it took them, dead-lettered, dropped, or skipped."""
        claims = self.claim[positions]
        is_failed = (self.state[positions] == FAILED) & (claims == UNCLAIMED)
        is_given_up = (claims == DEAD_LETTERED) | (claims == DROPPED)
        lost: NDArray[np.bool_] = is_failed | is_given_up | self.skipped[positions]
        return lost

    def reset(self, *, keep_consumed: bool, open_count: int) -> Indexes:
        """Start the next epoch; return the positions of rows that were leased, dead-lettered, dropped or skipped.

        They were not done, and are claimable in any case. All others are unless `keep_consumed`: the backlog is then
        `open_count`, the rows that are live or held.
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
        self.last_forgotten = self.trained = self.saved = -1
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
        """Start the next epoch for other ranks, in which what was trained stays; return the positions of reopened rows.

        Args:
            dp_size: their number.
            trained: the last batch_index that was trained; those behind it are planned anew, from the next index on.
        """
        reopened, dropped_count = [np.zeros(0, np.int64)], self.next_batch_index - trained - 1
        for index in range(trained + 1, self.next_batch_index):
            if (batch := self.batches.get(index)) is not None:
                reopened.append(self.left(batch))
                self.nack(batch, reopened[-1])
                if index in self.batches:  # a record that is kept though its rows are gone
                    self._forget(batch, "cleared")
        self._without_rows = [index for index in self._without_rows if index <= trained]
        recent = [batch for batch in self.recent_batches if batch.batch_index <= trained]
        self.recent_batches = deque(recent, maxlen=_MOST_RECENT)
        self.epoch += 1
        self.dp_size, self.next_batch_index, self.end = dp_size, trained + 1, None
        self.trained, self.saved = trained, min(self.saved, trained)
        self.delivered_units = self.delivered_units[: len(self.delivered_units) - dropped_count]
        self.last_forgotten = min(self.last_forgotten, trained)
        return np.concatenate(reopened)

    # Rows that come and go

    def on_rows_added(self, added: slice) -> None:
        """Count new rows that are live or held."""
        self.backlog += added.stop - added.start
        if self.outstanding is not None:
            self.outstanding.add(np.arange(added.start, added.stop), 1)

    def on_rows_closed(self, positions: Indexes) -> None:
        """Count off rows that were live or held and are being cleared, or have failed.

        Those that are leased are consumed for good: no other worker will process them.
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
        """Drop the records whose last rows are being cleared."""
        if self.redelivered_count:
            self._write_deliveries(positions, np.zeros(positions.size, np.int32))
        serials, counts = count_values(self.claim[positions])
        for serial, count in zip(serials.tolist(), counts.tolist(), strict=True):
            if (claim := self._by_serial.get(serial)) is not None:
                claim.remaining -= count
                self._on_fewer_rows(claim)


def task_columns(name: str) -> tuple[str, str, str, str, str]:
    """Return the names of the columns of a task: `claim`, `deliveries`, `uses`, `skipped` and `refills`."""
    return f"claim/{name}", f"deliveries/{name}", f"uses/{name}", f"skipped/{name}", f"refills/{name}"


def check_epoch(name: str, epoch: int, got: int | None) -> None:
    """Refuse a caller that means another epoch than that of a task; None: whichever it is."""
    if got is not None and got != epoch:
        raise StaleEpochError(
            f"task {name!r} is at epoch {epoch}, got epoch {got}; its consumption was reset since: take the epoch of "
            f"CheckConsumption",
            metadata={"task_name": name, "got": str(got), "expected": str(epoch)},
        )


def _disagreement(name: str, got: object, expected: object, what: str, remedy: str = "") -> PreconditionError:
    return RankDisagreementError(
        f"{name} of {what} is {shown(expected)}, got {shown(got)}; all must ask with the same arguments{remedy}",
        metadata={"field": name, "got": shown(got)[:512], "expected": shown(expected)[:512]},
    )
