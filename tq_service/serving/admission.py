"""The queue of writes that wait for capacity in a partition, and the bounds on that capacity.

A partition limits the total size of its cells and the outstanding units of its tasks. The amounts in use are persisted,
so they survive a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, get_args

import numpy as np

from tq_service.admission_turn import AdmissionTurn
from tq_service.errors import (
    AdmissionLimitError,
    CallCancelledError,
    QuotaExceededError,
    ResourceExhaustedError,
    TqError,
)
from tq_service.machine.samples import SampleWrite, check_write
from tq_service.planning.ratio import InsertRatio, insert_ratio
from tq_service.planning.view import Readiness
from tq_service.schema import Admission, BatchUnit, GivenBack, SampleState
from tq_service.serving.planner import Planner
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest, shown
from tq_service.wait_clock import Waiting

_MOST_LOOKED_AT: Final = 256  # maximum number of waiting writes to examine after a change
_UNITS: Final[tuple[BatchUnit, ...]] = get_args(BatchUnit)
_MOST_EXPLAINED: Final = 1 << 16  # maximum number of rows to search for the reason why a write waits

RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The capacity needed for the new samples of a write.

    Attributes:
        counts: number of new units of each kind; see `CheckedGroups.count_units`.
        value_bytes: total size of the new samples' cells, in bytes.
        held_counts: number of new held units of each kind, that is, units that are still being generated.
        groups: names of new groups. New samples of existing groups need no capacity.
        rollouts: names of new rollouts. New samples of existing rollouts need no capacity.
    """

    counts: Counter[BatchUnit] = field(default_factory=Counter)
    value_bytes: int = 0
    held_counts: Counter[BatchUnit] = field(default_factory=Counter)
    groups: tuple[str, ...] = ()
    rollouts: tuple[str, ...] = ()

    @property
    def sample_count(self) -> int:
        """Number of new samples."""
        return self.counts["sample"]


def sum_of(demands: Iterable[Demand | None]) -> Demand:
    """Return the total demand of several writes, ignoring writes whose demand is None."""
    total = Demand()
    for demand in filter(None, demands):
        total = Demand(
            counts=total.counts + demand.counts,
            value_bytes=total.value_bytes + demand.value_bytes,
            held_counts=total.held_counts + demand.held_counts,
        )
    return total


_REMEDIES: Final[Mapping[GivenBack, str]] = {
    "delivered": "the task must consume samples first",
    "trained": "the task must consume and train samples first, and report the progress (Advance or AckClaim)",
    "published": "the task must consume and train samples first, and publish the version (PublishVersion)",
}


class Bound(Protocol):
    """An upper bound on bytes, samples or units in a partition.

    Attributes:
        limit: maximum amount.
        task_name: name of the task that must consume samples to make room for a waiting write, or "" if the bound does
            not depend on a task.
    """

    limit: int
    task_name: str

    def share(self, demand: Demand) -> int:
        """Return how much a write with this demand adds to the amount in use."""
        ...

    def used(self) -> int:
        """Return the amount currently in use."""
        ...

    def waits_for(self, got: int) -> str:
        """Return an explanation of why a write that would raise the total to `got` must wait."""
        ...

    def error(self, got: int, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Create the error for a write that would raise the total to `got`.

        With `may_fit_later`, the error states that no capacity became available in time. Otherwise, the error states
        that the write can never fit.
        """
        ...


class ByteBound:
    """A bound on the total size of a partition's cells, in bytes. See `Bound`."""

    task_name = ""

    def __init__(self, partition: Partition, limit: int) -> None:
        self._partition = partition
        self.limit = limit

    def share(self, demand: Demand) -> int:
        """Return the number of bytes that a write adds."""
        return demand.value_bytes

    def used(self) -> int:
        """Return the total size of all stored cells, in bytes."""
        return self._partition.cells.used_bytes

    def waits_for(self, got: int) -> str:
        """Explain why a write must wait until bytes are freed."""
        text = f"partition {self._partition.partition_id!r} would have {got} bytes, but its max_bytes is {self.limit}"
        release = self._partition.settings.release
        return text if release is None else f"{text}, and samples are released once {shown(release)}"

    def error(self, got: int, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Create the error for a write that exceeds the byte limit."""
        remedy = _outcome("clear consumed samples, or raise max_bytes", note) if may_fit_later else _SPLIT
        return QuotaExceededError(
            f"{self.waits_for(got)}{remedy}",
            retry_after_seconds=RETRY_AFTER_SECONDS if may_fit_later else None,
            metadata={"limit_name": "max_bytes", "got": str(got), "limit": str(self.limit)},
        )


class AdmissionBound:
    """A bound on a task's outstanding units. See `Bound`."""

    def __init__(self, partition: Partition, admission: Admission) -> None:
        self._partition = partition
        self._admission = admission
        self.limit = admission.most
        self.task_name = admission.task_name

    def share(self, demand: Demand) -> int:
        """Return the number of units that a write adds."""
        return demand.counts[self._admission.unit]

    def used(self) -> int:
        """Return the number of outstanding units.

        If the admission drops units beyond its limit, count only units that cannot be dropped.
        """
        task = self._partition.tasks[self.task_name]
        outstanding = task.outstanding_count or 0
        if self._admission.overflow == "wait":
            return outstanding
        return min(outstanding, self._partition.in_use_count(task, self._admission.unit))

    def waits_for(self, got: int) -> str:
        """Return an explanation of why a write must wait for the task."""
        admission, task = self._admission, self._partition.tasks[self.task_name]
        delivered = sum(task.delivered_units) + task.done_units
        parts = f", {delivered} of them delivered but not yet {admission.given_back}" if delivered else ""
        what = "outstanding"
        if admission.overflow == "drop_lowest":
            what = "that cannot be dropped (new, held, leased, incomplete or in untrained batches)"
        return (
            f"partition {self._partition.partition_id!r} would have {got} {admission.unit}s {what} for task "
            f"{self.task_name!r}{parts}; the admission allows at most {self.limit}"
        )

    def error(self, got: int, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Create the error for a write that exceeds the admission's limit."""
        remedy = _REMEDIES[self._admission.given_back]
        return _limit_error(
            self, got, "most", self._admission.unit, remedy=remedy, may_fit_later=may_fit_later, note=note
        )


class RatioBound:
    """A bound on the number of samples that can be inserted before the task receives more samples. See `Bound`."""

    def __init__(self, ratio: InsertRatio) -> None:
        self._ratio = ratio
        self.limit = ratio.most_at_once
        self.task_name = ratio.task.name

    def share(self, demand: Demand) -> int:
        """Return the number of samples that a write adds."""
        return demand.sample_count

    def used(self) -> int:
        """Return the used part of the limit, calculated from the number of samples that can still be inserted."""
        return self.limit - self._ratio.inserts_left()

    def waits_for(self, got: int) -> str:
        """Return an explanation of why a write must wait for deliveries."""
        return self._ratio.waits_for

    def error(self, got: int, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Create the error for a write that exceeds the permitted ratio of inserts to deliveries."""
        remedy = "more samples must be delivered to the task first"
        return _limit_error(
            self, got, "samples_per_insert", "sample", remedy=remedy, may_fit_later=may_fit_later, note=note
        )


class RunningBound:
    """A bound on the number of held units, that is, units still being generated. See `Bound`."""

    task_name = ""

    def __init__(self, partition: Partition, admission: Admission) -> None:
        self._partition = partition
        self._unit = admission.unit
        self.limit = admission.most_running

    def share(self, demand: Demand) -> int:
        """Return the number of held units that a write adds."""
        return demand.held_counts[self._unit]

    def used(self) -> int:
        """Return the number of held units in the partition."""
        return self._partition.held_count(self._unit)

    def waits_for(self, got: int) -> str:
        """Return the reason why a write must wait for rollouts in progress."""
        return (
            f"partition {self._partition.partition_id!r} would have {got} held {self._unit}s, which are still being "
            f"generated; its admission sets most_running to {self.limit}"
        )

    def error(self, got: int, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Create the error for a write that exceeds the limit on held units."""
        remedy = "rollout workers must finish some of them first"
        return _limit_error(
            self, got, "most_running", self._unit, remedy=remedy, may_fit_later=may_fit_later, note=note
        )


_SPLIT: Final = "; split the put"


def _outcome(remedy: str, note: str) -> str:
    return f", and no capacity became available before the deadline; {remedy}{note}"


def _limit_error(
    bound: Bound, got: int, limit_name: str, unit: BatchUnit, *, remedy: str, may_fit_later: bool, note: str
) -> AdmissionLimitError:
    return AdmissionLimitError(
        f"{bound.waits_for(got)}{_outcome(remedy, note) if may_fit_later else _SPLIT}",
        retry_after_seconds=RETRY_AFTER_SECONDS if may_fit_later else None,
        metadata={
            "limit_name": limit_name,
            "got": str(got),
            "limit": str(bound.limit),
            "task_name": bound.task_name,
            "unit": unit,
        },
    )


def bounds_of(partition: Partition) -> list[Bound]:
    """Return all bounds that a partition's settings define."""
    settings = partition.settings
    bounds: list[Bound] = [] if settings.max_bytes is None else [ByteBound(partition, settings.max_bytes)]
    bounds += [AdmissionBound(partition, admission) for admission in settings.admissions]
    ratios = (insert_ratio(partition, task) for task in partition.tasks.values())
    bounds += [RatioBound(ratio) for ratio in ratios if ratio is not None]
    return [*bounds, *(RunningBound(partition, each) for each in settings.admissions if each.most_running)]


def demand_of(partition: Partition, write: SampleWrite, value_bytes: int) -> Demand | None:
    """Return the capacity that a write's new samples need, or None if the write needs no capacity.

    A write needs no capacity if it stores no new samples or begins no units.

    Raises:
        TqError: the partition would reject the write even if it had enough capacity.
    """
    checked = check_write(partition, write)
    if checked.new_count == 0 or write.state is SampleState.FAILED:
        return None
    groups, rollouts = list[str](), list[str]()
    if checked.groups is None:
        counts = Counter(dict.fromkeys(_UNITS, checked.new_count))
    else:
        beginning = np.flatnonzero(checked.groups.begins)
        if not beginning.size:
            return None
        groups = checked.groups.groups.names_without_members
        rollouts = [] if checked.groups.rollouts is None else checked.groups.rollouts.new_names
        counts = Counter({unit: checked.groups.count_units(unit, beginning) for unit in _UNITS})
    return Demand(
        counts=counts,
        value_bytes=value_bytes * counts["sample"] // write.row_count,
        held_counts=counts if write.state is SampleState.HELD else Counter(),
        groups=tuple(groups),
        rollouts=tuple(rollouts),
    )


def demand_of_slots(partition: Partition, prompt_count: int, slot_count: int) -> Demand:
    """Return the demand of `prompt_count` new prompts with `slot_count` slots each.

    Raises:
        PartitionSealedError: the partition does not accept new samples.
    """
    count = prompt_count * slot_count
    write = SampleWrite(row_count=count, state=SampleState.HELD, is_of_slots=True)
    check_write(partition, write)
    counts: Counter[BatchUnit] = Counter({"sample": count, "rollout": count, "group": prompt_count})
    return Demand(counts=counts, held_counts=counts)


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingWrite(contextlib.AbstractContextManager["WaitingWrite"]):
    """A write that waits for capacity. After admission, the capacity stays reserved until the `with` block ends.

    Attributes:
        look: function that returns the write's current demand, or None if the write needs no capacity. The function
            raises an error if the partition would reject the write.
        names_keys: whether the write specifies keys. Other writes may add samples with the same keys during the wait.
        demand: last known demand of the write, or None if the write needs no capacity.
        seen: state of the partition when `demand` was determined. Other writes may have added keys and groups since
            then.
        since: time at which the write arrived or its last turn ended; see `AdmissionTurn`.
        admitted: future that completes when the write receives capacity, or fails if the write can never receive any.
    """

    queue: AdmissionQueue
    request_id: bytes
    look: Callable[[], Demand | None]
    names_keys: bool
    demand: Demand | None = None
    seen: tuple[bool, int, int] | None = None
    since: float = field(default_factory=time.monotonic)
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __exit__(self, *exception: object) -> None:
        self.queue.leave(self)

    @property
    def has_capacity(self) -> bool:
        """Whether the reserved capacity still belongs to this write and not to a retry of the call."""
        return self.queue.has_admitted(self)


class AdmissionQueue:
    """Admits writes that add samples to one partition, in order of arrival and within the partition's bounds.

    A write that fits overtakes writes that do not fit. The overtaking write may even free capacity for the others, for
    example by completing the batch that a trainer is waiting for. `AdmissionTurn` ensures that large puts are not
    delayed forever. New members of existing groups need no capacity, because their groups have already been admitted.

    Only the first waiting writes are examined, and only after a change. A retry replaces the original call, whether the
    original call is queued or already admitted. The queue must be used from the partition's event loop.
    """

    def __init__(
        self,
        partition: Partition,
        deadlock: Callable[[str, ClaimRequest | None], str] = lambda task_name, asking: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty queue.

        Args:
            partition: partition that receives the writes.
            deadlock: function that returns the reason why a task cannot consume samples, or "" if there is none. The
                first argument is the name of the task, or "" for any task. The second argument is a claim that is
                already waiting, or None.
            clock: function that returns the time in seconds, used for deadlines and turns.
        """
        self._partition = partition
        self._deadlock = deadlock
        self._clock = clock
        self._bounds = bounds_of(partition)
        self._waiting: OrderedDict[bytes, WaitingWrite] = OrderedDict()
        self._admitted: dict[bytes, WaitingWrite] = {}
        self._turn = AdmissionTurn(clock)
        self._timer: asyncio.TimerHandle | None = None
        self._end_error: Callable[[], TqError] | None = None
        partition.on_change.append(self.wake)
        partition.on_consumed.append(self.wake)

    @property
    def waiting_count(self) -> int:
        """Number of waiting writes."""
        return len(self._waiting)

    def first_waits_for(self, asking: ClaimRequest | None = None) -> str:
        """Return an explanation of why the first write in the queue is waiting, or "" if the queue is empty.

        The reason takes `asking`, a claim that is also waiting, into account.
        """
        first = next(iter(self._waiting.values()), None)
        return "" if first is None or first.demand is None else self.waits_for(first.demand, asking)

    def waits_for(self, demand: Demand, asking: ClaimRequest | None = None) -> str:
        """Return an explanation of why a demand exceeds the free capacity, or "" if the demand fits.

        The reason takes `asking`, a claim that is also waiting, into account.
        """
        refusing = self._refusing(demand)
        return "" if refusing is None else refusing[0].waits_for(refusing[1]) + self._note(refusing[0], asking)

    async def enter(
        self, request_id: bytes, write: SampleWrite, value_bytes: int, deadline: float | None
    ) -> WaitingWrite:
        """Wait in line until capacity for a write is available, or return immediately if it needs none.

        Args:
            request_id: id shared by the call and its retries.
            write: write to admit.
            value_bytes: total size of all columns in the write, in bytes.
            deadline: end of the wait, in `time.monotonic` seconds, or None to wait until the caller is cancelled.

        Raises:
            QuotaExceededError, AdmissionLimitError: the write alone exceeds a bound, or no capacity became available
                before the deadline. In the first case, the error is raised immediately; in the second case, it has
                `retry_after_seconds`.
            PartitionClearedError: the partition was cleared during the wait.
            UnavailableError: the service shut down during the wait.
            CallCancelledError: a retry replaced this call.
            TqError: the partition would reject the write even if it had enough capacity.
        """
        look = partial(demand_of, self._partition, write, value_bytes)
        return await self.enter_with(request_id, look, deadline, names_keys=write.keys is not None)

    async def enter_with(
        self,
        request_id: bytes,
        look: Callable[[], Demand | None],
        deadline: float | None,
        *,
        names_keys: bool = False,
    ) -> WaitingWrite:
        """Wait until there is enough capacity for the demand that `look` returns. See `enter` and `WaitingWrite`."""
        entering = self._join(request_id, look, names_keys=names_keys)
        try:
            timeout = None if deadline is None else deadline - self._clock()
            if not entering.admitted.done() and (timeout is None or timeout > 0):
                with Waiting():
                    await asyncio.wait((entering.admitted,), timeout=timeout)
            if not entering.admitted.done():
                raise self._too_late(entering)
            entering.admitted.result()
            return entering
        except BaseException:  # a cancellation may arrive in the loop iteration that grants the capacity
            self.leave(entering)
            raise
        finally:
            del entering  # otherwise, an exception's traceback would keep this frame and the partition alive

    def enter_now(self, request_id: bytes, look: Callable[[], Demand | None]) -> WaitingWrite:
        """Reserve capacity without waiting if enough is left after serving all waiting writes.

        If too little capacity is left, raise the same error as when `enter` times out.
        """
        entering = self._join(request_id, look, names_keys=False)
        if not entering.admitted.done():
            error = self._too_late(entering)
            self.leave(entering)
            raise error
        entering.admitted.result()
        return entering

    def _join(self, request_id: bytes, look: Callable[[], Demand | None], *, names_keys: bool) -> WaitingWrite:
        """Add a write to the queue, unless the write needs no capacity or has already been granted capacity."""
        entering = WaitingWrite(
            queue=self, request_id=request_id, look=look, names_keys=names_keys, since=self._clock()
        )
        self._update_demand(entering)
        if entering.demand is None:
            entering.admitted.set_result(None)
            return entering
        for bound in self._bounds:
            if (share := bound.share(entering.demand)) > bound.limit:
                raise bound.error(share, may_fit_later=False)
        before = self._admitted.get(request_id)
        if before is not None and before.demand == entering.demand:
            self._admitted[request_id] = entering
            entering.admitted.set_result(None)
            return entering
        if (earlier := self._waiting.get(request_id)) is not None:
            earlier.admitted.set_exception(CallCancelledError("a retry of this call took its place in the queue"))
            entering.since = earlier.since
            self._turn.leave(earlier)
        self._waiting[request_id] = entering
        self.wake(entering)
        if self._end_error is not None:
            self.end(self._end_error)
        return entering

    def has_admitted(self, admission: WaitingWrite) -> bool:
        """Return whether capacity is still reserved for a write."""
        return self._admitted.get(admission.request_id) is admission

    def leave(self, admission: WaitingWrite) -> None:
        """Remove a write from the queue or release its capacity, unless a retry has taken its place."""
        for places in (self._waiting, self._admitted):
            if places.get(admission.request_id) is admission:
                del places[admission.request_id]
                self._turn.leave(admission)
                self.wake()

    def wake(self, last: WaitingWrite | None = None) -> None:
        """Examine waiting writes and admit those that fit now. If `last` is waiting, it is always examined."""
        admitted, short = sum_of(each.demand for each in self._admitted.values()), list[WaitingWrite]()
        looked_at = dict(itertools.islice(self._waiting.items(), _MOST_LOOKED_AT))
        if last is not None and last.request_id in self._waiting:
            looked_at[last.request_id] = last
        for request_id, waiting in looked_at.items():
            holder = self._turn.holder
            try:
                fits = self._fits(waiting, admitted, may_pass=holder is None or holder is waiting)
            except TqError as error:
                waiting.admitted.set_exception(error)
            else:
                if not fits or (waiting.demand is not None and self._turn.begin(short) not in (None, waiting)):
                    short.append(waiting)
                    continue
                if waiting.demand is not None:
                    self._admitted[request_id] = waiting
                    admitted = sum_of((admitted, waiting.demand))
                waiting.admitted.set_result(None)
            del self._waiting[request_id]
            self._turn.leave(waiting)
        self._set_timer()

    def end(self, error: Callable[[], TqError]) -> None:
        """Fail all current and future waits with errors created by `error`."""
        self._end_error = error
        self._deadlock = lambda task_name, asking: ""  # break the reference cycle between the queue and its owner
        for admission in self._waiting.values():
            admission.admitted.set_exception(error())
            self._turn.leave(admission)
        self._waiting.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        """Set a timer that examines the waiting writes when the current turn ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (over_at := self._turn.over_at) is not None:
            seconds = max(0.0, over_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(seconds, self.wake)

    def _fits(self, waiting: WaitingWrite, admitted: Demand, *, may_pass: bool) -> bool:
        """Whether a write can be admitted.

        A write can be admitted if it needs no capacity, or if it may pass other writes and fits alongside the admitted
        writes. The demand is recomputed only if it may have decreased or if the write fits with the demand computed
        last. Clearing a few samples therefore does not cause all keys of a large waiting put to be looked up.
        """
        if self._may_take_less(waiting):
            self._update_demand(waiting)
        if waiting.demand is None:
            return True
        if not may_pass or self._refusing(waiting.demand, admitted) is not None:
            return False
        self._update_demand(waiting)  # keys of removed rows are new again
        return waiting.demand is None or self._refusing(waiting.demand, admitted) is None

    def _may_take_less(self, waiting: WaitingWrite) -> bool:
        """Return whether a write's demand may have changed.

        The demand may change if the write's samples or groups now exist, or if the write is now rejected.
        """
        if waiting.demand is None or waiting.seen is None or waiting.seen[0] != self._partition.sealed:
            return True
        added = self._partition.table.next_index - waiting.seen[1]
        if added and (waiting.demand.groups or waiting.demand.rollouts):
            slots = self._partition.groups.find(waiting.demand.groups, waiting.demand.rollouts)
            return bool((slots >= 0).any())
        return added > 0 and waiting.names_keys

    def _update_demand(self, admission: WaitingWrite) -> None:
        """Recompute a write's demand if rows have since been added or removed, or the partition has been sealed."""
        table = self._partition.table
        marks = self._partition.sealed, table.next_index, table.removed_count
        if admission.seen != marks:
            admission.demand = admission.look()
            admission.seen = marks

    def _refusing(self, demand: Demand, admitted: Demand | None = None) -> tuple[Bound, int] | None:
        """If a write would now exceed a bound, return this bound and the resulting total; otherwise, return None."""
        if admitted is None:
            admitted = sum_of(each.demand for each in self._admitted.values())
        for bound in self._bounds:
            share = bound.share(demand)  # a write that adds nothing to the bounded amount never waits
            if share and (total := bound.used() + share + bound.share(admitted)) > bound.limit:
                return bound, total
        return None

    def _too_late(self, late: WaitingWrite) -> TqError:
        """Create the error for a write that received no capacity in time or could not overtake another write."""
        if late.demand is not None and (refusing := self._refusing(late.demand)) is not None:
            return refusing[0].error(refusing[1], may_fit_later=True, note=self._note(refusing[0]))
        holder = self._turn.holder
        front = holder.demand if isinstance(holder, WaitingWrite) and holder is not late else None
        if front is not None and (refusing := self._refusing(front)) is not None:
            note = f"; this includes an earlier put of {front.sample_count} samples, which has waited longest"
            return refusing[0].error(refusing[1], may_fit_later=True, note=note)
        return ResourceExhaustedError(
            "no capacity became available before the deadline; retry the put", retry_after_seconds=RETRY_AFTER_SECONDS
        )

    def _note(self, bound: Bound, asking: ClaimRequest | None = None) -> str:
        """Return a note on whether writes wait for a bound because of earlier puts or because of a deadlock.

        Return "" if the reason is unknown.
        """
        if self._admitted:
            return f"; {len(self._admitted)} earlier puts have reserved capacity but are not stored yet"
        deadlock = self._deadlock(bound.task_name, asking)
        return f"; {deadlock}" if deadlock else ""


def starvation(partition: Partition, planner: Planner, asking: ClaimRequest | None = None) -> str:
    """Return a note on why a task cannot consume its remaining samples.

    The result is "" if the task can consume samples or if the reason is unknown. There are two possible reasons: a
    waiting claim needs new samples, or the claim's conditions exclude the pending samples.

    Args:
        partition: partition that contains the task.
        planner: planner that answers the task's claims.
        asking: claim that is already waiting. A claim on a different task is ignored.
    """
    task, waiting = planner.task, [request for request, _ in planner.waiting_claims()]
    if asking is not None and asking.task_name == task.name:
        waiting.insert(0, asking)
    request, rows = waiting[0] if waiting else planner.last_request, slice(0, partition.table.count)
    if request is None or task.leased_count or rows.stop > _MOST_EXPLAINED:
        return ""
    try:
        readiness = Readiness(partition, task, request.batch_spec, planner.length(request))
        pending, ready = task.is_pending(rows), readiness.ready(rows)
        excluded = pending & readiness.excluded(rows)
    except TqError:
        return ""
    ruled_out, names = int(np.count_nonzero(excluded)), {each.column for each in request.batch_spec.where}
    cause = (
        f"{ruled_out} samples are excluded by the conditions in where ({', '.join(sorted(names))}); clear "
        f"these samples, or let claims evict them by setting unmatched"
    )
    if not waiting:
        return f"for task {task.name!r} {cause}" if ruled_out else ""
    if (pending & ~ready & ~excluded).any():  # some samples are held or lack a field
        return ""
    return (
        f"this is a deadlock unless samples that fit are still put: task {task.name!r} also waits for more "
        f"samples, because its {int(np.count_nonzero(pending & ready))} ready samples are too "
        f"few{', and ' + cause if ruled_out else ''}"
    )
