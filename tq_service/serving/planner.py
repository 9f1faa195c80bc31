"""The planner of a task in one partition, which plans batches one at a time and answers waiting claims.

    claim -> already recorded, or can be planned at once: answered
          -> otherwise joins the line of claims with the same spec
             -> on its turn, planned on the event loop: answered, or a miss
                -> if that is impossible, planned off the loop, one plan at a time

Lines take turns in order of arrival, regardless of what their claims request. If a line cannot be served, it is skipped
and gets another turn after the next change. If a sampler cannot plan immediately on the event loop, it runs off the
loop, for one line at a time. An off-loop plan that exceeds its time limit yields to the next plan. Commits, status
requests, replays, and claims that can be planned immediately never wait for off-loop plans.

In a single step, the loop checks that all rows in a plan are still ready and records the plan. If a row is no longer
ready, the planner makes a new plan for the line. Faster lines could therefore overtake the line of a slow sampler
indefinitely. To prevent this, the slow line's next plan skips as many ready rows as other lines are likely to claim in
the meantime. If the slow line's previous plan was quick, the lines behind the slow line wait for its next plan.

`WaitQueue` stores the lines and selects the next line to serve. `Planner` makes plans for the lines and records them.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from tq_service.errors import (
    InternalError,
    InvalidArgumentError,
    LeaseExpiredError,
    SamplerError,
    SamplesClearedError,
    TqError,
)
from tq_service.log_message import LogMessage
from tq_service.machine.claims import (
    ClaimReleased,
    EndReached,
    GroupsKept,
    SamplesClaimed,
)
from tq_service.machine.evictions import UnitsEvicted
from tq_service.machine.state_machine import Change
from tq_service.planning.view import NOT_LOOKED, EndFound, Found, Miss, Planned, ScanStarts, Search
from tq_service.results import RecentBatch
from tq_service.schema import EndCounts
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import Claim, RecordedPlan, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import (
    ClaimRequest,
    ClaimSpec,
    Indexes,
    LengthSource,
    MustBeAwaited,
    Plan,
    PlanRequest,
    RankPlan,
    Sampler,
    View,
)
from tq_service.step_times import StepTimes
from tq_service.wait_clock import Waiting, WhileWaiting

_STEPS_A_TURN = 16
_TURN_SECONDS = 0.002
_ANSWERS_WITHOUT_REST = 128
_LINES_A_TURN: Final = 16  # maximum number of lines scanned per turn; see `WaitQueue`
_MOST_RANKS: Final = 128  # maximum number of ranks for which a batch reports token counts
_MOST_BATCHES_A_TURN = 64
_MOST_PLAN_SECONDS = 0.25  # seconds after which an off-loop plan stops blocking other lines and the next off-loop plan
_CLOSED_AT_ONCE = 1 << 12  # maximum number of rows changed per step while closing gaps
_MOST_BATCHES_AHEAD = 256  # loaders claim prefetch_factor * num_workers batches ahead
_RANGE_SECONDS: Final = 0.004  # CPU seconds per step for planning the remaining batches of a range
_RATE_SECONDS: Final = 10.0
_PINNED_SECONDS: Final = 0.01  # seconds between checks of whether the table is still pinned
_FEW_ROWS = 1 << 13  # maximum number of rows to search on the event loop for the end of a task


@dataclass(frozen=True, slots=True)
class NotYet:
    """The answer to a claim that timed out before any samples could be delivered. This answer is never recorded."""


Answer = RankPlan | Claim | EndCounts | NotYet


class LoopYielder:
    """Divides event-loop time fairly between thousands of waiting calls and all other work.

    The yielder yields to the loop after a few steps, or earlier if a step was slow. After many answers, each yield also
    includes a pause as long as the steps before it, because sending answers takes most of the time. While the server is
    busy sending, it accepts only one new call per loop iteration. Without the pauses, a backlog of new calls would
    therefore build up.
    """

    __slots__ = ("_answer_count", "_last", "_step_count")

    def __init__(self) -> None:
        self._step_count = self._answer_count = 0
        self._last = time.perf_counter()

    async def step(self, *, has_answered: bool = True) -> None:
        """Count an answered call, or a turn that produced no plan, and periodically yield to the event loop."""
        self._step_count += 1
        self._answer_count += has_answered
        if self._step_count % _STEPS_A_TURN and time.perf_counter() - self._last < _TURN_SECONDS:
            return
        await asyncio.sleep(0)
        if self._answer_count >= _ANSWERS_WITHOUT_REST:
            await asyncio.sleep(time.perf_counter() - self._last)
        self._last = time.perf_counter()


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting call, which ends with a claim, an error, or a timeout.

    Attributes:
        is_poll: whether the call ends after its first turn instead of waiting for changes.
        arrival: the call's sequence number in the order of arrival.
    """

    request: ClaimRequest
    answer: asyncio.Future[Answer]
    is_poll: bool = False
    arrival: int = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the call is still waiting, that is, neither answered nor cancelled."""
        return not self.answer.done()

    @property
    def has_claim(self) -> bool:
        """Whether the call was answered with a queue claim."""
        ended = self.answer
        is_answered = ended.done() and not (ended.cancelled() or ended.exception())
        return is_answered and isinstance(ended.result(), Claim)

    @property
    def batch_index(self) -> int:
        """Index of the batch that the rank is waiting for, or -1 for a queue worker."""
        return self.request.batch_index

    def end(self, outcome: Answer | TqError) -> None:
        """Complete the call with an answer or an error, unless the call has already ended."""
        if not self.is_waiting:
            return
        if isinstance(outcome, TqError):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class LineState(Enum):
    """The states of a line. The value of each state describes what a line in that state waits for.

    PARKED --something has changed--> QUEUED --its turn--> PARKED, or served and QUEUED again
                                                |must be awaited
                                              HEAVY --no other plan is made--> PLANNING --> PARKED or QUEUED
    """

    PARKED = "a change"
    QUEUED = "its turn"
    HEAVY = "the current plan off the event loop to end or to yield"
    PLANNING = "its own plan, which is made off the event loop"


@dataclass(slots=True, eq=False, repr=False)
class Line:
    """Waiting calls with the same claim spec, in order of arrival. Each plan can serve any call in the line.

    A line exists while it contains a waiting call or while one of its plans is in progress. The limit on waiting calls
    also limits the number of lines.

    Attributes:
        last_miss: reason why the last search found no plan.
        polls: waiting calls that end after their first turn.
        is_waited_for: whether the lines behind this line wait for its next off-loop plan. They do if its last plan was
            quick.
        look_past: number of ready rows that the next off-loop plan leaves to faster lines.
    """

    spec: ClaimSpec
    last_miss: Miss
    state: LineState = LineState.PARKED
    is_waited_for: bool = False
    look_past: int = 0
    polls: dict[Waiter, None] = field(default_factory=dict)
    _waiters: OrderedDict[Waiter, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        """Iterate over a snapshot of the waiting calls."""
        return iter(list(self._waiters))

    @property
    def is_ranked(self) -> bool:
        """Whether the waiting calls come from ranks rather than queue workers."""
        return self.spec.dp_size is not None

    @property
    def order(self) -> float:
        """Arrival number of the line's first call, or infinity if the line is empty.

        The arrival number determines the line's place in the queue.
        """
        first = self.first()
        return math.inf if first is None else first.arrival

    @property
    def batch_index(self) -> int:
        """Lowest batch index that a rank in this line waits for, or -1 if the line is empty or is for queue workers."""
        return min((waiter.batch_index for waiter in self._waiters), default=-1)

    def first(self) -> Waiter | None:
        """Return the first call that is still waiting, or None if no call is waiting."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            if waiter.is_waiting:
                return waiter
            self.remove(waiter)
        return None

    def add(self, waiter: Waiter) -> None:
        """Append a call to the line."""
        self._waiters[waiter] = None
        if waiter.is_poll:
            self.polls[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        """Remove a call from the line if it is there."""
        self._waiters.pop(waiter, None)
        self.polls.pop(waiter, None)

    def expire(self, polls: Iterable[Waiter]) -> None:
        """Answer the given polls with `NotYet`."""
        for poll in polls:
            poll.end(NotYet())
            self.remove(poll)


class WaitQueue:
    """The lines of waiting claims, served in the order in which their first calls arrived.

    After a change (`is_stale`), a scan queues every line that can now be served, including lines that were skipped
    earlier. Even under constant changes, a new scan runs only after at least as many turns as were queued at the
    previous scan. The cost per turn therefore stays low even with many lines.

    Attributes:
        by_spec: lines by claim spec. A call that is answered immediately does not join a line.
        planning: line that is running an off-loop plan and has not yielded its turn, or None.
        is_stale: whether anything has changed since the last scan of all lines.
    """

    def __init__(self) -> None:
        self.by_spec: dict[ClaimSpec, Line] = {}
        self.planning: Line | None = None
        self.is_stale = False
        self._last_arrival = 0
        self._turns: list[tuple[float, Line]] = []  # a heap; each line has a distinct order
        self._heavy: dict[Line, None] = {}
        self._turns_left = 0

    def __len__(self) -> int:
        return sum(map(len, self.by_spec.values()))

    def __iter__(self) -> Iterator[Waiter]:
        """Iterate over a snapshot of the calls in all waiting lines."""
        return iter([waiter for line in self.by_spec.values() for waiter in line])

    @property
    def ranked_lines(self) -> list[Line]:
        """The lines whose calls come from ranks rather than queue workers."""
        return [line for line in self.by_spec.values() if line.is_ranked]

    def join(self, waiter: Waiter, miss: Miss) -> Line:
        """Add a call to the line for its spec after a search has found no plan, and return that line."""
        spec = waiter.request.spec
        line = self.by_spec.get(spec)
        if line is None:
            line = self.by_spec[spec] = Line(spec, miss)
        line.add(waiter)
        self._give_number(waiter)
        return line

    def _give_number(self, waiter: Waiter) -> None:
        self._last_arrival += 1
        waiter.arrival = self._last_arrival

    def forget_if_unused(self, line: Line) -> None:
        """Remove a line if no call is waiting in it and none of its plans is in progress."""
        if not line and line.state is not LineState.PLANNING and self.by_spec.get(line.spec) is line:
            del self.by_spec[line.spec]

    # Turns

    def put(self, line: Line) -> None:
        """If a line is parked but contains a waiting call, schedule the line for a turn."""
        if line.state is LineState.PARKED and line.first() is not None:
            line.state = LineState.QUEUED
            heapq.heappush(self._turns, (line.order, line))

    def put_heavy(self, line: Line) -> None:
        """Queue a line whose plan must be made off the event loop."""
        line.state = LineState.HEAVY
        self._heavy[line] = None

    @property
    def holder(self) -> Line | None:
        """The line whose off-loop plan blocks all later lines, or None."""
        return self.planning if self.planning is not None and self.planning.is_waited_for else None

    @property
    def has_turn(self) -> bool:
        """Whether the first queued line may take its turn now."""
        return bool(self._turns) and (self.holder is None or self._turns[0][0] < self.holder.order)

    def next(self, may_be_served: Callable[[Line], bool]) -> Line | None:
        """Park the next line to serve and return it, or return None if no line is queued and nothing has changed."""
        while self.is_stale or self.has_turn:
            if self.is_stale and (self._turns_left <= 0 or not self.has_turn):
                self.is_stale = False
                for line in self.by_spec.values():
                    if line.state is LineState.PARKED and may_be_served(line):
                        self.put(line)
                self._turns_left = max(len(self._turns), len(self.by_spec) // _LINES_A_TURN)
                continue
            order, line = heapq.heappop(self._turns)
            if line.state is LineState.QUEUED:
                line.state = LineState.PARKED
                if line.order <= order:
                    self._turns_left -= 1
                    return line
                self.put(line)  # this line's next call may have arrived after calls in other lines
        return None

    def next_heavy(self) -> Line | None:
        """Return the next line to plan off the loop, or None if there is no such line or a plan is in progress."""
        if self.planning is not None or not self._heavy:
            return None
        line = min(self._heavy, key=lambda each: each.order)
        del self._heavy[line]
        line.state = LineState.PARKED if line.first() is None else LineState.PLANNING
        if line.state is LineState.PLANNING:
            self.planning = line
        return self.planning

    def defer(self, line: Line) -> None:
        """Move a line behind all claims that are already waiting."""
        first = line.first()
        if first is not None:
            self._give_number(first)


def describe_batch(batch_index: int, plan: RecordedPlan, lengths: Indexes | None) -> RecentBatch:
    """Return statistics for a planned batch: token counts, imbalance, and padding.

    Args:
        batch_index: index of the batch.
        plan: recorded plan of the batch.
        lengths: token counts of `plan.rows`, of shape `(n,)`, or None if unknown.
    """
    if lengths is None or not lengths.size:
        return RecentBatch(batch_index=batch_index)
    ends, sums = np.cumsum(plan.sizes), np.append(0, np.cumsum(lengths))
    tokens, total = np.diff(sums[ends], prepend=0).tolist(), int(sums[-1])
    if plan.steps:
        padding = sum(pack.padding_tokens for steps in plan.steps for packs in steps for pack in packs)
    else:  # each sample is padded to the length of the longest sample in its micro-batch
        largest, ranks = plan.micro_batch_size or max(plan.sizes), zip(plan.sizes, ends, strict=True)
        starts = np.concatenate([np.arange(end - size, end, largest) for size, end in ranks])
        padding = int(np.maximum.reduceat(lengths, starts) @ np.diff(starts, append=lengths.size)) - total
    return RecentBatch(
        batch_index=batch_index,
        tokens_per_rank=tuple(tokens[:_MOST_RANKS]),
        imbalance=max(tokens) * len(tokens) / total - 1 if total else 0.0,
        padding_share=padding / (padding + total) if padding else 0.0,
    )


class DeliveryRate:
    """The delivery rate of a task, in which past deliveries decay by a factor of e every 10 seconds.

    Memory use and time per call are constant. All times are in seconds and come from a single monotonic clock.
    """

    __slots__ = ("_at_seconds", "_count")

    def __init__(self) -> None:
        self._count = self._at_seconds = 0.0

    def add(self, count: int, at_seconds: float) -> None:
        """Record that `count` samples were delivered at `at_seconds`."""
        self._count = self._left(at_seconds) + count
        self._at_seconds = at_seconds

    def per_second(self, at_seconds: float) -> float:
        """Return the recent delivery rate, in samples per second, as of `at_seconds`."""
        return self._left(at_seconds) / _RATE_SECONDS

    def _left(self, at_seconds: float) -> float:
        return self._count * math.exp((self._at_seconds - at_seconds) / _RATE_SECONDS) if self._count else 0.0


_log = logging.getLogger(__name__)


class RunsPlans(Protocol):
    """Runs samplers in isolation so that a failing or hanging sampler affects only the claim being planned."""

    def length(self, sampler: Sampler) -> LengthSource | None:
        """Return a sampler's length source, or None if the sampler needs no lengths. Raises only TqError."""
        ...

    def run_inline(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Run a sampler on the event loop. Return the validated plan, or None if there is none.

        Raises:
            MustBeAwaited: the sampler cannot run on the event loop.
            TqError: the sampler raised this error or failed in another way.
        """
        ...

    async def run(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Run a sampler within a time limit. Return the validated plan, or None if there is none.

        A sampler runs in a thread, unless its `plan` is a coroutine function. Raises only TqError.
        """
        ...


class Planner:
    """Plans batches for one task and answers the task's claims.

    Attributes:
        task: the task's ledger.
        last_request: last claim that this process received, or None if there was none.
        deliveries: rate at which this process delivers samples, in samples per second.
        step_times: time breakdown of the trainer's latest steps, by rank.
    """

    def __init__(
        self,
        partition: Partition,
        task: TaskLedger,
        runner: RunsPlans,
        *,
        commit: Callable[[Change, Any], Any],
        group: Callable[[], AbstractContextManager[None]],
        on_batch: Callable[[str, RecentBatch], None],
    ) -> None:
        """Create the planner of a task.

        Args:
            partition: partition that contains the task.
            task: the task's ledger.
            runner: runs the samplers that plan batches.
            commit: function that applies a change to the partition unless the partition has been cleared. The second
                argument is the result of the change's `prepare`, or None.
            group: function that returns a context manager. All changes made inside its `with` block form one group; see
                `StateMachine.group`.
            on_batch: function called with the sampler name and the batch statistics whenever a batch is recorded for
                ranks.
        """
        self._partition = partition
        self.task = task
        self._runner = runner
        self._commit = commit
        self._group = group
        self._on_batch = on_batch
        self.last_request: ClaimRequest | None = None
        self.deliveries = DeliveryRate()
        self.step_times: dict[int, StepTimes] = {}
        self._names: dict[str, Any] = {"partition_id": partition.partition_id, "task_name": task.name}
        self._starts = ScanStarts(partition, task.name)
        self._epoch = task.epoch  # epoch of the waiting calls
        self._queue = WaitQueue()
        self._to_answer: deque[tuple[Waiter, TqError | None]] = deque()  # calls to answer, each with an error or None
        self._dispatching: asyncio.Task[None] | None = None
        self._plans: set[asyncio.Task[Any] | None] = set()  # all off-loop plans in progress
        self._gone: Callable[[], TqError] | None = None

    @property
    def waiting_count(self) -> int:
        """Number of waiting calls."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """True if no calls are waiting and no plan is in progress."""
        return not self._queue.by_spec

    def close(self) -> None:
        """Stop listening to row changes. The planner must be idle."""
        self._starts.close()

    def waiting_claims(self) -> list[tuple[ClaimRequest, int]]:
        """Return the first claim and the number of claims of each line; lines are in order of arrival."""
        lines = sorted(self._queue.by_spec.values(), key=lambda line: line.order)
        return [(first.request, len(line)) for line in lines if (first := line.first()) is not None]

    def compares_with(self, policy: str) -> bool:
        """Return whether publishing a version of `policy` affects which samples a waiting or planned claim receives."""
        specs, outstanding = self._queue.by_spec, self.task.outstanding
        if specs and outstanding is not None and outstanding.bounds_staleness_by(policy):
            return True
        conditions = (each.published for spec in specs for each in spec.batch_spec.where)
        return any(published is not None and published.policy == policy for published in conditions)

    def wake(self) -> None:
        """Retry all waiting claims after a change. The partition calls this method only while claims are waiting."""
        if self._epoch != self.task.epoch:  # the waiting calls may belong to the previous epoch
            self._epoch = self.task.epoch
            self._enqueue_answers(self._queue)
        self._queue.is_stale = True
        self._advance()

    def end(self, error: Callable[[], TqError]) -> None:
        """Fail all waiting and future calls with the error returned by `error`."""
        self._gone = error
        for plan in filter(None, self._plans):
            plan.cancel()
        self._enqueue_answers(self._queue)
        self._advance()

    # Calls

    async def claim(
        self, request: ClaimRequest, max_wait_seconds: float, while_waiting: WhileWaiting = nullcontext
    ) -> Answer:
        """Return the recorded answer to a claim, or wait until the claim can be answered.

        The call waits inside `while_waiting()`, and returns `NotYet` if it times out.
        """
        self.last_request = request
        recorded = self._recorded(request)
        if recorded is not None:
            return recorded
        if self._gone is not None:
            raise self._gone()
        if request.batch_index > self.task.next_batch_index or self._has_turns(request.spec):
            with while_waiting():
                return await self._wait(request, NOT_LOOKED, max_wait_seconds)
        found = self._find_at_once(request)
        if isinstance(found, Planned | EndFound):
            with self._group():
                answer = self._record(request, found)
                self._plan_following(request)
            self._advance()
            return answer
        if found is not None and max_wait_seconds <= 0:
            return NotYet()
        with while_waiting():
            return await self._wait(request, found, max_wait_seconds)

    def following(self, request: ClaimRequest, *, may_plan: bool) -> list[RankPlan | EndCounts]:
        """Return the answers for the rest of a range, after its first batch.

        The list ends before the first batch that is not ready or whose claim is rejected. With `may_plan`, the planner
        first plans as many of these batches as possible. It plans them in this event-loop step, as one group of
        changes.
        """
        if may_plan and self._gone is None and not self._has_turns(request.spec):
            with self._group():
                self._plan_following(request)
            self._advance()
        answers: list[RankPlan | EndCounts] = []
        with suppress(TqError):  # the error is raised to the client that claims this batch
            for each in request.following():
                answer = self._recorded(each)
                if isinstance(answer, RankPlan | EndCounts):
                    answers.append(answer)
                if not isinstance(answer, RankPlan):
                    break
        return answers

    def _plan_following(self, request: ClaimRequest) -> None:
        """Plan the remaining batches of a range, stopping at the first batch that cannot be planned immediately.

        This method must be called within a group of changes.
        """
        task, last = self.task, request.batch_index + request.batch_count - 1
        began_at = time.thread_time()  # CPU time, because waiting for a CPU does not block other calls
        while request.batch_index < (batch_index := task.next_batch_index) <= last and task.end is None:
            try:
                found = self._find_at_once(request)
                if not isinstance(found, Planned | EndFound):
                    return
                self._record(request, found)
            except TqError:  # the error is raised to the client that claims this batch
                return
            is_late = time.thread_time() - began_at > _RANGE_SECONDS
            if is_late or task.next_batch_index == batch_index:  # the task has ended or the partition was cleared
                return

    def _has_turns(self, spec: ClaimSpec) -> bool:
        """Return whether a call must join a line because lines are being served or claims with the same spec wait.

        If the call need not join a line, all waiting claims are waiting for a change. Serving the call immediately
        therefore does not delay these claims.
        """
        is_serving = self._dispatching is not None or self._queue.holder is not None
        return is_serving or spec in self._queue.by_spec

    async def _wait(self, request: ClaimRequest, miss: Miss | None, max_wait_seconds: float) -> Answer:
        """Wait for the answer to a claim.

        Args:
            request: the claim.
            miss: reason why the search found no plan, or None if the claim must be planned off the loop.
            max_wait_seconds: maximum time to wait, in seconds. If 0 or less, the call is a poll.
        """
        loop = asyncio.get_running_loop()
        removed_count = self._partition.table.removed_count
        if self.is_idle:
            self._epoch = self.task.epoch
            self._partition.on_change.append(self.wake)
        waiter = Waiter(request, loop.create_future(), is_poll=max_wait_seconds <= 0)
        line = self._queue.join(waiter, miss or NOT_LOOKED)
        timer = None
        try:
            if miss is None:
                self._queue.put_heavy(line)
            elif self._may_be_served(line) or waiter.is_poll:
                self._queue.put(line)
            self._advance()
            if not waiter.is_poll:
                timer = loop.call_later(max_wait_seconds, waiter.end, NotYet())
            with Waiting():
                answer = await waiter.answer
            if isinstance(answer, RankPlan | Claim) and self._partition.table.removed_count != removed_count:
                self.task.check_present(answer.rows)
            if (
                isinstance(answer, Claim) and answer.lease and self.task.claims.get(answer.request_id) is not answer
            ):  # the claim was recorded but ended before this event-loop step
                self.task.recorded(request)  # raises an error if the claim was released or has expired
                raise LeaseExpiredError(
                    f"the lease of this claim for task {self.task.name!r} ended before the answer was sent. Claim "
                    f"again with a new request_id",
                    metadata={"task_name": self.task.name},
                )
            return answer
        except (asyncio.CancelledError, SamplesClearedError):
            if waiter.has_claim:
                self.retract(request.request_id)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            line.remove(waiter)
            self._forget_if_unused(line)
            del waiter  # otherwise, an exception's traceback would keep this frame and the partition alive

    def _forget_if_unused(self, line: Line) -> None:
        """Remove a line that is no longer needed, and stop listening to changes if no lines remain."""
        self._queue.forget_if_unused(line)
        if self.is_idle:
            self._partition.on_change.discard(self.wake)

    def has_planned(self, request: ClaimRequest) -> bool:
        """Whether the task has ended, or the batch that a rank claims has been planned."""
        is_planned = request.rank is not None and request.rank.batch_index < self.task.next_batch_index
        return is_planned or self.task.end is not None

    def retract(self, request_id: bytes) -> None:
        """Release a queue claim whose answer did not reach the client, unless a retry of the call received the answer.

        The client may still retry with the same request_id. Named claims are not released, because several workers
        share them.
        """
        claim = self.task.claims.get(request_id)
        if claim is None or claim.name:
            return
        claim.answer_count -= 1
        if claim.answer_count == 0:
            self._commit(ClaimReleased(**self._names, request_id=request_id, is_final=False), None)

    def _recorded(self, request: ClaimRequest) -> RankPlan | Claim | EndCounts | None:
        """Return a call's recorded answer, or None if there is none. For a queue claim, increment the answer count.

        Raises:
            TqError: the call was rejected.
        """
        self.task.check_epoch(request.epoch)
        recorded = self.task.recorded(request)
        most = self.task.next_batch_index + _MOST_BATCHES_AHEAD
        if recorded is None and request.rank is not None and request.rank.batch_index > most:
            # A rank that counts its batches correctly never sends such an index. To serve it, the planner would have to
            # plan and consume all earlier batches.
            raise InvalidArgumentError(
                f"batch_index is {request.rank.batch_index}; expected at most {most}, which is {_MOST_BATCHES_AHEAD} "
                f"more than the next batch_index of task {self.task.name!r} in partition "
                f"{self._partition.partition_id!r} ({self.task.next_batch_index}). Count batches from 0 in each "
                f"partition and epoch.",
                field="batch_index",
                metadata={"got": str(request.rank.batch_index), "expected": f"0 to {most}"},
            )
        if isinstance(recorded, Claim):
            recorded.answer_count += 1
        return recorded

    # Turns

    def _advance(self) -> None:
        """Start the dispatcher if there is work for it, and start the next off-loop plan if a line needs one."""
        queue = self._queue
        if (heavy := queue.next_heavy()) is not None:
            asyncio.get_running_loop().create_task(self._plan_off_loop(heavy))
        has_work = queue.by_spec and (queue.is_stale or self._to_answer or queue.has_turn)
        if has_work and self._dispatching is None:
            self._dispatching = asyncio.get_running_loop().create_task(self._dispatch())

    async def _dispatch(self) -> None:
        yielder = LoopYielder()
        first: Waiter | None
        try:
            while True:
                if self._to_answer:
                    first, error = self._to_answer.popleft()
                    self._answer(first, error)
                elif (line := self._queue.next(self._may_be_served)) is not None and (first := line.first()):
                    self._look(line, first)
                else:
                    return
                await yielder.step(has_answered=not first.is_waiting)
        except Exception:
            self._to_answer.clear()
            self._fail_all(self._queue)
        finally:
            self._dispatching = None

    def _may_be_served(self, line: Line) -> bool:
        """Whether a new search may succeed because the state has changed since the line's last search."""
        return not line.last_miss.is_current(self._partition, self.task)

    def _enqueue_answers(self, waiters: Iterable[Waiter], error: TqError | None = None) -> None:
        """Queue calls to be completed later with `error`, or with their recorded answer or rejection."""
        self._to_answer.extend((waiter, error) for waiter in waiters)

    def _answer(self, waiter: Waiter, error: TqError | None = None) -> bool:
        """Complete a call with `error` or with its recorded answer or rejection. Return whether the call has ended."""
        if self._gone is not None:
            error = self._gone()
        if waiter.is_waiting:
            try:
                outcome = error or self._recorded(waiter.request)
            except TqError as refusal:
                waiter.end(refusal)
            else:
                if outcome is not None:
                    waiter.end(outcome)
        return not waiter.is_waiting

    def _look(self, line: Line, first: Waiter) -> None:
        """Answer a line's first call with a plan made on the event loop, or queue the line for an off-loop plan."""
        if self._answer(first):
            self._queue.put(line)
            return
        earlier = line
        if first.batch_index > self.task.next_batch_index:  # other lines may first need plans for earlier batches
            others = [each for each in self._queue.ranked_lines if each.state is not LineState.PARKED and each.first()]
            earlier = min([line, *others], key=lambda each: each.batch_index)
        if earlier is not line:
            line.last_miss = NOT_LOOKED
            if earlier.state is LineState.QUEUED and (waiter := earlier.first()) is not None:
                earlier.state = LineState.PARKED
                self._look(earlier, waiter)
                self._queue.put(line)
            return
        polls = list(line.polls)
        try:
            found = self._find_at_once(first.request) if self._may_be_served(line) else line.last_miss
        except TqError as error:
            self._fail(line, error)
        else:
            if found is not None:
                self._conclude(line, first, found, polls)
                return
            self._queue.put_heavy(line)
            self._advance()

    def _conclude(self, line: Line, first: Waiter, found: Found, polls: Iterable[Waiter]) -> None:
        """Serve a line with the result of a search from the current event-loop step, or park the line.

        If a rank is waiting for a much later batch, the rank's line may need many plans. After every 64 batches, the
        line therefore moves behind the other lines, and its polls end.

        Args:
            line: line to serve.
            first: the call at the head of the line.
            found: result of the search.
            polls: calls that were in the line when the search started and that do not wait for changes.
        """
        if isinstance(found, Planned | EndFound):
            try:
                with self._group():
                    answer = self._record(first.request, found)
            except TqError as error:  # slots could not be created
                self._fail(line, error)
                return
            next_index = self.task.next_batch_index
            if not line.is_ranked:
                first.end(answer)
            elif isinstance(found, Planned) and next_index % _MOST_BATCHES_A_TURN == 0:
                line.expire([poll for poll in line.polls if poll.batch_index >= next_index])
                self._queue.defer(line)
            self._queue.put(line)
            return
        line.last_miss = found
        line.expire(polls)
        if line.polls:  # these polls arrived while the plan was being made
            self._queue.put(line)
        # Changes made during the search are handled in the next round, after the other lines have had their turns.
        self._queue.is_stale |= self._may_be_served(line)

    def _fail(self, line: Line, error: TqError) -> None:
        """Fail the calls to which an error applies.

        For queue workers, the error applies to the line's first call. For ranks, the error applies to all calls for the
        line's lowest batch index.
        """
        first, batch_index = line.first(), line.batch_index
        if line.is_ranked:
            self._enqueue_answers((each for each in line if each.batch_index == batch_index), error)
        elif first is not None:
            first.end(error)
        self._queue.put(line)

    def _fail_all(self, waiters: Iterable[Waiter]) -> None:
        _log.exception(LogMessage("planning failed", task=self.task.name))
        for waiter in waiters:
            waiter.end(InternalError("planning failed; see the server's log for details"))

    # Recording

    def _record(self, request: ClaimRequest, found: Planned | EndFound) -> Answer:
        """Record the result of a search, including evictions. Return the answer to the claim that triggered the search.

        This method must be called within a group of changes. Once a batch or the end of the task has been recorded, it
        applies to all ranks. All claims waiting for the batch are therefore answered, and claims with a different
        `dp_size` are rejected.
        """
        self._queue.is_stale = True  # other lines may also have reached the end of the task
        if request.rank is None:
            return self._record_for_worker(request, found)
        task, spec, batch_index, is_end = self.task, request.spec, self.task.next_batch_index, False
        answer: Answer
        if isinstance(found, EndFound):
            end = EndReached(**self._names, dp_size=request.rank.dp_size, end=found.end)
            self._commit(end, (self._partition, task, True))
            answer, is_end = found.end, True
        else:
            batch = SamplesClaimed(**self._names, batch_spec=spec.batch_spec, plan=found.plan)
            self._commit(batch, (self._partition, task, found.positions))
            answer = found.plan.part(request.rank.dp_rank)
            if task.next_batch_index != batch_index:  # unchanged if the partition was already cleared
                self.deliveries.add(found.plan.rows.size, time.monotonic())
                described = describe_batch(batch_index, found.plan, found.lengths)
                if found.readiness.bound is not None:
                    positions = self._partition.table.find(found.plan.rows)
                    described = replace(described, staleness=found.readiness.bound.staleness_of(positions))
                task.recent_batches.append(described)
                self._on_batch(spec.batch_spec.sampler, described)
            self._evict(request, found.evicted)  # evict last, because evictions change row positions
        for line in self._queue.ranked_lines:
            disagrees = line.spec.dp_size != spec.dp_size
            self._enqueue_answers(each for each in line if each.batch_index == batch_index or is_end or disagrees)
        return answer

    def _record_for_worker(self, request: ClaimRequest, found: Planned | EndFound) -> Claim | EndCounts:
        """Record the response sent to a queue worker.

        If the task has ended, the answer applies to all workers with the same claim name, or only to this worker if it
        has no claim name.

        Raises:
            TqError: slots for the prompts could not be created, so the prompts were not claimed.
        """
        name = request.claim_name
        if name:
            self._enqueue_answers(waiter for waiter in self._queue if waiter.request.claim_name == name)
        if isinstance(found, EndFound):
            if name:
                self._commit(
                    EndReached(**self._names, claim_name=name, end=found.end), (self._partition, self.task, True)
                )
            return found.end
        terms, grouping = request.lease, found.grouping
        if request.make_slots is not None:
            if grouping is not None or found.plan.is_reusing or found.plan.dropped:
                raise SamplerError(
                    f"sampler {request.batch_spec.sampler!r} delivers groups, drops samples or reuses samples; "
                    f"expected a sampler that delivers prompts one by one, because admit creates slots for each "
                    f"prompt. Use 'sequential'",
                    metadata={"sampler": request.batch_spec.sampler},
                )
            request.make_slots(found.plan.rows)
        if terms is not None and grouping is not None:
            terms = replace(terms, group_block_size=grouping.code, blocks=grouping.blocks)
        change = SamplesClaimed(
            **self._names,
            request_id=request.request_id,
            plan=found.plan,
            lease=terms,
            claim_name=name,
            batch_spec=request.batch_spec if name else None,
        )
        claim: Claim = self._commit(change, (self._partition, self.task, found.positions))
        self._evict(request, found.evicted)
        self.deliveries.add(found.plan.rows.size, time.monotonic())
        claim.answer_count = 1
        return claim

    def _evict(self, request: ClaimRequest, evicted: Evicted | None) -> bool:
        """Fail or clear the samples that a claim evicts, and return whether any were evicted."""
        if evicted is None:
            return False
        spec, bounded = request.batch_spec, self._partition.settings.bounded_admission
        policy = self._partition.policies.get(request.policy or ("" if bounded is None else bounded.policy))
        change = UnitsEvicted(
            **self._names,
            evicted=evicted,
            action="clear" if spec.unmatched == "clear" else "fail",
            version=None if policy is None else policy.version,
            refill=spec.refill,
        )
        return bool(self._commit(change, None))

    # Planning

    def length(self, request: ClaimRequest) -> LengthSource | None:
        """Return the source of the lengths that a claim's sampler needs, or None if the sampler needs no lengths."""
        return self._runner.length(request.sampler)

    def _find_at_once(self, request: ClaimRequest) -> Found | None:
        """Search for a plan or the task's end in this event-loop step. Return None if the search must run off-loop."""
        sampler = request.sampler
        while True:
            search = Search(self._partition, self.task, self._starts, request, self.length(request))
            try:
                plan = None if search.exceeds_ratio else self._runner.run_inline(sampler, search.view, search.wanted)
                if plan is None and search.begins_last():
                    plan = self._runner.run_inline(sampler, search.view, search.wanted)
                search.look_for_evicted()
            except MustBeAwaited:
                return None
            found = self._keep_groups(search, search.conclude(plan))
            # Search again, because evictions may make a plan possible or end the task.
            if isinstance(found, Planned) or not self._evict(request, search.evicted):
                return found

    async def _find_off_loop(self, request: ClaimRequest, look_past: int) -> Found:
        """While the table is pinned, search for a plan, or for the end of the task, off the event loop.

        After checking the plan's rows, this method awaits nothing, so the caller can safely record the plan.
        """
        sampler = request.sampler
        new_search = partial(Search, self._partition, self.task, self._starts, request, self.length(request))
        look_past *= look_past and new_search().view.scan.has(look_past + request.plan_request.total_size)
        with self._starts.watched() as watch, self._partition.table.pinned():
            search = new_search(watch=watch, look_past=look_past)
            plan = None if search.exceeds_ratio else await self._runner.run(sampler, search.view, search.wanted)
            is_small = self._partition.table.count <= _FEW_ROWS
            if plan is None and not look_past:
                is_last = search.begins_last() if is_small else await asyncio.to_thread(search.begins_last)
                if is_last and search.is_current:
                    plan = await self._runner.run(sampler, search.view, search.wanted)
            if request.batch_spec.evicts and is_small:
                search.look_for_evicted()
            elif request.batch_spec.evicts:
                await asyncio.to_thread(search.look_for_evicted)
        if plan is None and look_past:
            return NOT_LOOKED
        found = self._keep_groups(search, search.conclude(plan))
        if isinstance(found, Planned) or not self._evict(request, search.evicted):
            return found
        return NOT_LOOKED

    def _keep_groups(self, search: Search, found: Found) -> Found:
        """Return `found`. If the task now keeps a different kind of groups complete, record this change."""
        task, kept = self.task, search.kept_groups
        is_of_use = isinstance(found, Planned | EndFound)
        # A miss must not change the recorded kind of groups. Otherwise, two waiting claims that need different kinds
        # would wake each other forever.
        if (is_of_use or (task.kept_groups is None and found != NOT_LOOKED)) and kept != task.kept_groups:
            self._commit(GroupsKept(**self._names, kept_groups=kept), (self._partition, task, True))
        return found

    async def _plan_off_loop(self, line: Line) -> None:
        """Make an off-loop plan for a line. A single event-loop step records the plan for the line's first claim."""
        loop, task, plan = asyncio.get_running_loop(), self.task, asyncio.current_task()
        self._plans.add(plan)
        timer = loop.call_later(_MOST_PLAN_SECONDS, self._yield_turn, line)
        try:
            try:
                await self._close_gaps()
                polls, batch_index = list(line.polls), task.next_batch_index
                found: Found = NOT_LOOKED
                started_at, consumed_count = loop.time(), task.consumed_count
                if (first := line.first()) is not None and not self._answer(first):
                    found = await self._find_off_loop(first.request, line.look_past)
                # Skip twice the number of rows that other lines have claimed, because the next plan may take longer.
                line.look_past = 2 * max(0, task.consumed_count - consumed_count)
                line.is_waited_for = loop.time() - started_at < _MOST_PLAN_SECONDS
            finally:
                line.state = LineState.PARKED
            first, is_late = line.first(), line.is_ranked and task.next_batch_index != batch_index
            if found == NOT_LOOKED or is_late or first is None or self._answer(first):
                self._queue.put(line)
            else:
                self._conclude(line, first, found, polls)
        except TqError as error:
            self._fail(line, error)
        except Exception:
            self._fail_all(line)
        finally:
            self._plans.discard(plan)
            timer.cancel()
            self._queue.is_stale |= line.is_ranked  # other lines of ranks may have been waiting for this batch
            self._forget_if_unused(line)
            self._yield_turn(line)
            self._advance()

    def _yield_turn(self, line: Line) -> None:
        """Let other lines take their turns, even if a plan for this line is still in progress."""
        if self._queue.planning is line:
            self._queue.planning = None
            self._advance()

    async def _close_gaps(self) -> None:
        """If the table has many gaps, close them in short steps. While running plans pin the table, wait.

        Without this wait, overlapping plans could keep the table pinned, and the table would grow without bound. The
        wait always ends, because plans have a time limit.
        """
        table = self._partition.table
        while table.has_many_gaps:
            table.close_gaps(_CLOSED_AT_ONCE)  # has no effect while the table is pinned
            await asyncio.sleep(_PINNED_SECONDS if table.pin_count else 0)
