"""Puts of new samples that wait for capacity in a partition."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tq_service.admission_turn import AdmissionTurn
from tq_service.errors import CallCancelledError, ResourceExhaustedError, TqError
from tq_service.machine.samples import SampleWrite
from tq_service.planning.readiness import Readiness
from tq_service.serving.bounds import (
    RETRY_AFTER_SECONDS,
    Bound,
    Demand,
    bounds_of,
    demand_of,
    sum_of,
)
from tq_service.serving.planner import Planner
from tq_service.state.partition import Partition
from tq_service.state.request import ClaimRequest
from tq_service.wait_clock import Waiting

_MOST_LOOKED_AT: Final = 256  # of the writes that wait, after each change
_MOST_EXPLAINED: Final = 1 << 16  # rows that a refused put has time to look at


@dataclass(slots=True, eq=False, kw_only=True)
class Admission(contextlib.AbstractContextManager["Admission"]):
    """A write that waits for capacity, and once it is admitted has it: until the end of the `with` in which it is made.

    Attributes:
        demand: what the write takes, None where that is nothing.
        seen: the marks of the queue as of which it takes that: keys and groups may become known while it waits.
        since: when it came, or its last turn was over, see `AdmissionTurn`.
        admitted: done once there is capacity, or none will be.
    """

    queue: AdmissionQueue
    request_id: bytes
    write: SampleWrite
    value_bytes: int
    demand: Demand | None = None
    seen: tuple[bool, int, int] | None = None
    since: float = field(default_factory=time.monotonic)
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __exit__(self, *exception: object) -> None:
        self.queue.leave(self)


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
        self._waiting: OrderedDict[bytes, Admission] = OrderedDict()
        self._admitted: dict[bytes, Admission] = {}
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
        refusing = None if first is None or first.demand is None else self._refusing(first.demand)
        return "" if refusing is None else refusing[0].waits_for(refusing[1]) + self._note(refusing[0], asking)

    async def enter(self, request_id: bytes, write: SampleWrite, value_bytes: int, deadline: float | None) -> Admission:
        """Return capacity for a write, as soon as all that came before have theirs; at once where it takes none.

        Args:
            request_id: the same over retries.
            write: what is to be written.
            value_bytes: bytes of its columns.
            deadline: until when to wait, by `time.monotonic`; None: until the caller is cancelled.

        Raises:
            QuotaExceededError, StalenessLimitError: larger than a bound (at once), or no capacity until the deadline
                (with `retry_after_seconds`).
            PartitionClearedError, UnavailableError: the partition or the service went away meanwhile.
            CallCancelledError: a retry took the place of this call.
            TqError: the partition would refuse the write whatever capacity there is.
        """
        entering = Admission(
            queue=self, request_id=request_id, write=write, value_bytes=value_bytes, since=self._clock()
        )
        self._update_demand(entering)
        if entering.demand is None:
            return entering
        for bound in self._bounds:
            if (share := bound.share(entering.demand)) > bound.limit:
                raise bound.error(share, may_fit_later=False)
        if request_id in self._admitted:
            self._admitted[request_id] = entering
            return entering
        if (earlier := self._waiting.get(request_id)) is not None:
            earlier.admitted.set_exception(CallCancelledError("a retry of this call took its place in the queue"))
            entering.since = earlier.since
            self._turn.leave(earlier)
        self._waiting[request_id] = entering
        self.wake(entering)
        if self._end_error is not None:
            self.end(self._end_error)
        try:
            if not entering.admitted.done():
                timeout = None if deadline is None else max(0.0, deadline - self._clock())
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

    def leave(self, admission: Admission) -> None:
        """Give up the place of a write, or its capacity; a retry that has taken it over keeps it."""
        for places in (self._waiting, self._admitted):
            if places.get(admission.request_id) is admission:
                del places[admission.request_id]
                self._turn.leave(admission)
                self.wake()

    def wake(self, last: Admission | None = None) -> None:
        """Let those in for whom there is capacity now; `last`, if it waits, is looked at however many are before it."""
        admitted, short = sum_of(each.demand for each in self._admitted.values()), list[Admission]()
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

    def _fits(self, waiting: Admission, admitted: Demand, *, may_pass: bool) -> bool:
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

    def _may_take_less(self, waiting: Admission) -> bool:
        """Whether samples of a write may be known by now, their groups begun, or the write be refused."""
        if waiting.demand is None or waiting.seen is None or waiting.seen[0] != self._partition.sealed:
            return True
        added = self._partition.table.next_index - waiting.seen[1]
        if added and waiting.demand.groups:
            return bool((self._partition.groups.slot_of.find(waiting.demand.groups) >= 0).any())
        return added > 0 and waiting.write.keys is not None

    def _update_demand(self, admission: Admission) -> None:
        """Find out what a write takes, where it may be more or less than before."""
        table = self._partition.table
        marks = self._partition.sealed, table.next_index, table.removed_count
        if admission.seen != marks:
            admission.demand = demand_of(self._partition, admission.write, admission.value_bytes)
            admission.seen = marks

    def _refusing(self, demand: Demand, admitted: Demand | None = None) -> tuple[Bound, float] | None:
        """Return the bound that a write would exceed now, and by what total; None where it has capacity."""
        if admitted is None:
            admitted = sum_of(each.demand for each in self._admitted.values())
        for bound in self._bounds:
            if (total := bound.total(demand, admitted)) > bound.limit:
                return bound, total
        return None

    def _too_late(self, late: Admission) -> TqError:
        """Return the error of a write for which there was no capacity in time, or which might not pass another."""
        if late.demand is not None and (refusing := self._refusing(late.demand)) is not None:
            return refusing[0].error(refusing[1], may_fit_later=True, note=self._note(refusing[0]))
        holder = self._turn.holder
        front = holder.demand if isinstance(holder, Admission) and holder is not late else None
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
    cause = f"{ruled_out} samples are ruled out by its where ({', '.join(sorted(names))}); clear these"
    if not waiting:
        return f"for task {task.name!r} {cause}" if ruled_out else ""
    if (pending & ~ready & ~excluded).any():  # held, or a field of them is still to come
        return ""
    return (
        f"this is a deadlock unless samples that fit still come: task {task.name!r} waits for more samples itself, "
        f"{int(np.count_nonzero(pending & ready))} are ready, too few for it{', and ' + cause if ruled_out else ''}"
    )
