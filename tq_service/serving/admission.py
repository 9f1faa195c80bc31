"""Writes of new samples that wait for capacity in a partition, and the bounds that make them wait.

A partition bounds the bytes of its cells, and how much work may be outstanding for its tasks. All that is counted is
part of the state, so that it is the same after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

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
from tq_service.planning.view import Readiness
from tq_service.schema import Admission, GivenBack, SampleState
from tq_service.serving.planner import Planner
from tq_service.state.groups import NO_GROUP
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest
from tq_service.wait_clock import Waiting

_MOST_LOOKED_AT: Final = 256  # of the writes that wait, after each change
_MOST_EXPLAINED: Final = 1 << 16  # rows that a refused put has time to look at

RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the new samples of a write take.

    Attributes:
        sample_count: how many they are.
        group_count: how many groups they begin; samples without a group are one each.
        value_bytes: bytes of their cells.
        held_sample_count: how many of the samples are held.
        held_group_count: how many of the groups they begin are.
        groups: names of groups of the samples; of groups that have begun its members take nothing.
    """

    sample_count: int = 0
    group_count: int = 0
    value_bytes: int = 0
    held_sample_count: int = 0
    held_group_count: int = 0
    groups: tuple[str, ...] = ()


def sum_of(demands: Iterable[Demand | None]) -> Demand:
    """Return what several writes take together, None for nothing."""
    total = Demand()
    for demand in filter(None, demands):
        total = Demand(
            sample_count=total.sample_count + demand.sample_count,
            group_count=total.group_count + demand.group_count,
            value_bytes=total.value_bytes + demand.value_bytes,
            held_sample_count=total.held_sample_count + demand.held_sample_count,
            held_group_count=total.held_group_count + demand.held_group_count,
        )
    return total


_REMEDIES: Final[Mapping[GivenBack, str]] = {
    "delivered": "the task has to consume some first",
    "trained": "the task has to consume and train some first, and say so (Advance, or AckClaim)",
    "published": "the task has to consume and train some first, and publish the version (PublishVersion)",
}


class Bound(Protocol):
    """The most there may be of something in a partition.

    Attributes:
        limit: see the class.
        task_name: of the task that has to consume first; empty: none has.
    """

    limit: int
    task_name: str

    def share(self, demand: Demand) -> int:
        """Return how much there would be of a write in an empty partition."""
        ...

    def used(self) -> int:
        """Return how much there is."""
        ...

    def waits_for(self, got: int) -> str:
        """Return why a write waits with which there would be so much."""
        ...

    def error(self, got: int, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Return the error of a write with which there would be so much, at once or after it has waited."""
        ...


class ByteBound:
    """The most bytes of cells in a partition; see `Bound`."""

    task_name = ""

    def __init__(self, partition: Partition, limit: int) -> None:
        self._partition = partition
        self.limit = limit

    def share(self, demand: Demand) -> int:
        """Return the bytes of a write."""
        return demand.value_bytes

    def used(self) -> int:
        """Return the bytes of the cells there are."""
        return self._partition.cells.used_bytes

    def waits_for(self, got: int) -> str:
        """Return why a write waits."""
        return f"partition {self._partition.partition_id!r} would have {got} bytes, its max_bytes is {self.limit}"

    def error(self, got: int, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Return the error of a write."""
        remedy = _outcome("clear consumed samples, or raise max_bytes", note) if may_fit_later else _SPLIT
        return QuotaExceededError(
            f"{self.waits_for(got)}{remedy}",
            retry_after_seconds=RETRY_AFTER_SECONDS if may_fit_later else None,
            metadata={"limit_name": "max_bytes", "got": str(got), "limit": str(self.limit)},
        )


class AdmissionBound:
    """The most that may be outstanding for a task; see `Bound`."""

    def __init__(self, partition: Partition, admission: Admission) -> None:
        self._partition = partition
        self._admission = admission
        self.limit = admission.most
        self.task_name = admission.task_name

    def share(self, demand: Demand) -> int:
        """Return the units of a write."""
        return demand.group_count if self._admission.unit == "group" else demand.sample_count

    def used(self) -> int:
        """Return the units that are outstanding."""
        return self._partition.tasks[self.task_name].outstanding_count or 0

    def waits_for(self, got: int) -> str:
        """Return why a write waits."""
        admission, task = self._admission, self._partition.tasks[self.task_name]
        delivered = sum(task.delivered_units) + task.done_units
        parts = f", {delivered} of them delivered and not {admission.given_back} yet" if delivered else ""
        return (
            f"partition {self._partition.partition_id!r} would have {got} {admission.unit}s outstanding for task "
            f"{self.task_name!r}{parts}, its admission has most {self.limit}"
        )

    def error(self, got: int, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Return the error of a write."""
        remedy = _outcome(_REMEDIES[self._admission.given_back], note) if may_fit_later else _SPLIT
        return AdmissionLimitError(
            f"{self.waits_for(got)}{remedy}",
            retry_after_seconds=RETRY_AFTER_SECONDS if may_fit_later else None,
            metadata={
                "limit_name": "most",
                "got": str(got),
                "limit": str(self.limit),
                "task_name": self.task_name,
                "unit": self._admission.unit,
            },
        )


class RunningBound:
    """The most units that may be held, which are being generated; see `Bound`."""

    task_name = ""

    def __init__(self, partition: Partition, admission: Admission) -> None:
        self._partition = partition
        self._unit = admission.unit
        self.limit = admission.most_running

    def share(self, demand: Demand) -> int:
        """Return the units of a write that are held."""
        return demand.held_group_count if self._unit == "group" else demand.held_sample_count

    def used(self) -> int:
        """Return the units that are held."""
        return self._partition.held_count(self._unit)

    def waits_for(self, got: int) -> str:
        """Return why a write waits."""
        return (
            f"partition {self._partition.partition_id!r} would have {got} {self._unit}s held, which are being "
            f"generated, its admission has most_running {self.limit}"
        )

    def error(self, got: int, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Return the error of a write."""
        remedy = _outcome("rollout workers have to finish some first", note) if may_fit_later else _SPLIT
        return AdmissionLimitError(
            f"{self.waits_for(got)}{remedy}",
            retry_after_seconds=RETRY_AFTER_SECONDS if may_fit_later else None,
            metadata={
                "limit_name": "most_running",
                "got": str(got),
                "limit": str(self.limit),
                "task_name": "",
                "unit": self._unit,
            },
        )


_SPLIT: Final = "; split the put"


def _outcome(remedy: str, note: str) -> str:
    return f" and it stayed so until the deadline; {remedy}{note}"


def bounds_of(partition: Partition) -> list[Bound]:
    """Return the bounds that the settings of a partition have."""
    settings = partition.settings
    bounds: list[Bound] = [] if settings.max_bytes is None else [ByteBound(partition, settings.max_bytes)]
    bounds += [AdmissionBound(partition, admission) for admission in settings.admissions]
    return [*bounds, *(RunningBound(partition, each) for each in settings.admissions if each.most_running)]


def demand_of(partition: Partition, write: SampleWrite, value_bytes: int) -> Demand | None:
    """Return what the new samples of a write take, None if it has none that last or all are in groups that have begun.

    Raises:
        TqError: the partition would refuse the write whatever capacity there is.
    """
    checked = check_write(partition, write)
    if checked.new_count == 0 or write.state is SampleState.FAILED:
        return None
    count = group_count = checked.new_count
    groups: tuple[str, ...] = ()
    if checked.groups is not None:
        has_begun = checked.groups.slots >= 0
        groups = tuple(itertools.compress(checked.groups.names, ~has_begun))
        is_counted = ~np.append(has_begun, False)[checked.groups.codes]  # the last: without a group
        count = int(np.count_nonzero(is_counted))
        if count == 0:
            return None
        group_count = len(groups) + int(np.count_nonzero(checked.groups.codes == NO_GROUP))
    is_held = write.state is SampleState.HELD
    return Demand(
        sample_count=count,
        group_count=group_count,
        value_bytes=value_bytes * count // write.row_count,
        held_sample_count=count if is_held else 0,
        held_group_count=group_count if is_held else 0,
        groups=groups,
    )


def demand_of_slots(partition: Partition, prompt_count: int, slot_count: int) -> Demand:
    """Return what the slots of new prompts take, whichever these are.

    Raises:
        PartitionSealedError: the partition takes no new samples.
    """
    count = prompt_count * slot_count
    write = SampleWrite(row_count=count, state=SampleState.HELD, is_of_slots=True)
    check_write(partition, write)
    return Demand(sample_count=count, group_count=prompt_count, held_sample_count=count, held_group_count=prompt_count)


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingWrite(contextlib.AbstractContextManager["WaitingWrite"]):
    """A write that waits for capacity, and once it is admitted has it: until the end of the `with` in which it is made.

    Attributes:
        look: returns what the write takes now, None where that is nothing; raises if the partition would refuse it.
        names_keys: whether its samples may become known while it waits.
        demand: what the write takes, None where that is nothing.
        seen: the marks of the queue as of which it takes that: keys and groups may become known while it waits.
        since: when it came, or its last turn was over, see `AdmissionTurn`.
        admitted: done once there is capacity, or none will be.
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
        """Whether the capacity is its own still; a retry of the call may have taken it over."""
        return self.queue.has_admitted(self)


class AdmissionQueue:
    """Lets writes with new samples into one partition as its bounds allow, in order of arrival.

    A write that fits passes those that do not, for it may be what lets them in: the sample that completes the batch for
    which a trainer waits, say. That a large put is not put off for ever see `AdmissionTurn`. Members of groups of which
    the partition has some already take no capacity: their groups have passed the bounds.

    The first writes of those that wait are looked at, and only when something has changed. A retry takes the place of
    the call that it repeats, in the queue or after it. Confined to the event loop of its partition.
    """

    def __init__(
        self,
        partition: Partition,
        deadlock: Callable[[str, ClaimRequest | None], str] = lambda task_name, asking: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a queue in which nothing waits.

        Args:
            partition: what is written to.
            deadlock: returns, for the task that has to consume first, or "" for whichever, why it cannot; "" if it can.
                It gets a claim that is known to wait, if there is one.
            clock: of deadlines and turns.
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
        """Number of writes that wait."""
        return len(self._waiting)

    def first_waits_for(self, asking: ClaimRequest | None = None) -> str:
        """Return why the first write that waits has no capacity, beside a claim that waits; empty if none waits."""
        first = next(iter(self._waiting.values()), None)
        return "" if first is None or first.demand is None else self.waits_for(first.demand, asking)

    def waits_for(self, demand: Demand, asking: ClaimRequest | None = None) -> str:
        """Return why there is no capacity for what a write would take, beside a claim that waits; empty: there is."""
        refusing = self._refusing(demand)
        return "" if refusing is None else refusing[0].waits_for(refusing[1]) + self._note(refusing[0], asking)

    async def enter(
        self, request_id: bytes, write: SampleWrite, value_bytes: int, deadline: float | None
    ) -> WaitingWrite:
        """Return capacity for a write, as soon as all that came before have theirs; at once where it takes none.

        Args:
            request_id: the same over retries.
            write: what is to be written.
            value_bytes: bytes of its columns.
            deadline: until when to wait, by `time.monotonic`; None: until the caller is cancelled.

        Raises:
            QuotaExceededError, AdmissionLimitError: larger than a bound (at once), or no capacity until the deadline
                (with `retry_after_seconds`).
            PartitionClearedError, UnavailableError: the partition or the service went away meanwhile.
            CallCancelledError: a retry took the place of this call.
            TqError: the partition would refuse the write whatever capacity there is.
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
        """Return capacity for what `look` returns; see `enter` and `WaitingWrite`."""
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
        except BaseException:  # a cancellation may come in the turn in which capacity did
            self.leave(entering)
            raise
        finally:
            del entering  # through which an error would hold this frame, and with it the partition

    def enter_now(self, request_id: bytes, look: Callable[[], Demand | None]) -> WaitingWrite:
        """Return capacity if there is some in this step, after all that wait; raises as `enter` does at a deadline."""
        entering = self._join(request_id, look, names_keys=False)
        if not entering.admitted.done():
            error = self._too_late(entering)
            self.leave(entering)
            raise error
        entering.admitted.result()
        return entering

    def _join(self, request_id: bytes, look: Callable[[], Demand | None], *, names_keys: bool) -> WaitingWrite:
        """Have a write wait, unless there is capacity for it, or it takes none."""
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
        """Whether a write has capacity that it has not left."""
        return self._admitted.get(admission.request_id) is admission

    def leave(self, admission: WaitingWrite) -> None:
        """Give up the place of a write, or its capacity; a retry that has taken it over keeps it."""
        for places in (self._waiting, self._admitted):
            if places.get(admission.request_id) is admission:
                del places[admission.request_id]
                self._turn.leave(admission)
                self.wake()

    def wake(self, last: WaitingWrite | None = None) -> None:
        """Let those in for whom there is capacity now; `last`, if it waits, is looked at however many are before it."""
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
        """End all waits, and those to come, with an error."""
        self._end_error = error
        self._deadlock = lambda task_name, asking: ""  # lest the queue and its owner reference each other
        for admission in self._waiting.values():
            admission.admitted.set_exception(error())
            self._turn.leave(admission)
        self._waiting.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        """Have the others looked at when a turn is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (over_at := self._turn.over_at) is not None:
            seconds = max(0.0, over_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(seconds, self.wake)

    def _fits(self, waiting: WaitingWrite, admitted: Demand, *, may_pass: bool) -> bool:
        """Whether a write takes nothing, or there is capacity for it beside what is admitted and it may pass others.

        What it takes is found out again only where it may be less than before, or once it fits: a large put that waits
        must not cost each small clear a look at all of its keys.
        """
        if self._may_take_less(waiting):
            self._update_demand(waiting)
        if waiting.demand is None:
            return True
        if not may_pass or self._refusing(waiting.demand, admitted) is not None:
            return False
        self._update_demand(waiting)  # rows were removed since, so their keys may be new again
        return waiting.demand is None or self._refusing(waiting.demand, admitted) is None

    def _may_take_less(self, waiting: WaitingWrite) -> bool:
        """Whether samples of a write may be known by now, their groups begun, or the write be refused."""
        if waiting.demand is None or waiting.seen is None or waiting.seen[0] != self._partition.sealed:
            return True
        added = self._partition.table.next_index - waiting.seen[1]
        if added and waiting.demand.groups:
            return bool((self._partition.groups.slot_of.find(waiting.demand.groups) >= 0).any())
        return added > 0 and waiting.names_keys

    def _update_demand(self, admission: WaitingWrite) -> None:
        """Find out what a write takes, where it may be more or less than before."""
        table = self._partition.table
        marks = self._partition.sealed, table.next_index, table.removed_count
        if admission.seen != marks:
            admission.demand = admission.look()
            admission.seen = marks

    def _refusing(self, demand: Demand, admitted: Demand | None = None) -> tuple[Bound, int] | None:
        """Return the bound that a write would exceed now, and by what total; None where it has capacity."""
        if admitted is None:
            admitted = sum_of(each.demand for each in self._admitted.values())
        for bound in self._bounds:
            share = bound.share(demand)  # a write that adds nothing never waits
            if share and (total := bound.used() + share + bound.share(admitted)) > bound.limit:
                return bound, total
        return None

    def _too_late(self, late: WaitingWrite) -> TqError:
        """Return the error of a write for which there was no capacity in time, or which might not pass another."""
        if late.demand is not None and (refusing := self._refusing(late.demand)) is not None:
            return refusing[0].error(refusing[1], may_fit_later=True, note=self._note(refusing[0]))
        holder = self._turn.holder
        front = holder.demand if isinstance(holder, WaitingWrite) and holder is not late else None
        if front is not None and (refusing := self._refusing(front)) is not None:
            note = f"; that is with a put of {front.sample_count} samples in front, which has waited longest"
            return refusing[0].error(refusing[1], may_fit_later=True, note=note)
        return ResourceExhaustedError(
            "there was no capacity until the deadline", retry_after_seconds=RETRY_AFTER_SECONDS
        )

    def _note(self, bound: Bound, asking: ClaimRequest | None = None) -> str:
        """Return what else keeps a write waiting that a bound refuses: puts in front of it, or a deadlock."""
        if self._admitted:
            return f"; {len(self._admitted)} puts in front were let in and are not stored yet"
        deadlock = self._deadlock(bound.task_name, asking)
        return f"; {deadlock}" if deadlock else ""


def starvation(partition: Partition, planner: Planner, asking: ClaimRequest | None = None) -> str:
    """Return, in words, why a task consumes nothing of what it has left; "" if that is unknown or it may.

    Either a claim waits which only new samples can serve, or conditions rule out samples, which stay pending.

    Args:
        partition: that of the task.
        planner: serves its claims.
        asking: a claim that is known to wait, if it is of this task.
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
        f"{ruled_out} samples are ruled out by its where ({', '.join(sorted(names))}); clear these, or have claims "
        f"evict them with unmatched"
    )
    if not waiting:
        return f"for task {task.name!r} {cause}" if ruled_out else ""
    if (pending & ~ready & ~excluded).any():  # held, or a field of them is still to come
        return ""
    return (
        f"this is a deadlock unless samples that fit still come: task {task.name!r} waits for more samples itself, "
        f"{int(np.count_nonzero(pending & ready))} are ready, too few for it{', and ' + cause if ruled_out else ''}"
    )
