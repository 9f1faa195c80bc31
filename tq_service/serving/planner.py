"""Plans the batches of one (partition, task), one at a time, and answers the claims that wait for them.

    claim -> recorded before, or planned at once: answered
          -> waits in the line of the calls that ask alike -> its turn -> planned on the event loop: answered, or a miss
                                                                       -> planned off the loop, one at a time

Lines have their turns in order of arrival, whatever they ask for; one that cannot be served is passed over, and has
another turn once something has changed. A plan that a sampler cannot make on the event loop in no time is made off the
loop, for one line at a time; a plan that takes long yields, so that the next one can begin. Commits, status, replays
and claims that are planned at once never wait for such a plan.

A plan is recorded on the loop in the step in which all its rows are seen to be ready still; one that has lost rows is
made again. So that a slow sampler is not passed by for ever, the next plan of its line looks past as many ready rows
as others are likely to take meanwhile, and lines that came later wait for it if its last plan did not take long.

`WaitQueue` has the lines and says which has the next turn; `Planner` looks for their plans and records them.
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
from tq_service.wait_clock import Waiting, WhileWaiting

_STEPS_A_TURN = 16
_TURN_SECONDS = 0.002
_ANSWERS_WITHOUT_REST = 128
_LINES_A_TURN: Final = 16  # of those that are looked through after a change
_MOST_RANKS: Final = 128  # of which the tokens are kept
_MOST_BATCHES_A_TURN = 64
_MOST_PLAN_SECONDS = 0.25  # of a plan off the loop, before others have their turns and the next one may begin
_CLOSED_AT_ONCE = 1 << 12  # rows that changed, as many as gaps are closed for in a step
_MOST_BATCHES_AHEAD = 256  # loaders ask for prefetch_factor * num_workers; the batches before it are planned as well
_RANGE_SECONDS: Final = 0.004  # of the processor, after which a step plans no further batch of a range
_RATE_SECONDS: Final = 10.0
_PINNED_SECONDS: Final = 0.01  # between two looks whether the last reader has unpinned the table
_FEW_ROWS = 1 << 13  # whose end the event loop looks for by itself


@dataclass(frozen=True, slots=True)
class NotYet:
    """Nothing to deliver within the wait; never recorded."""


Answer = RankPlan | Claim | EndCounts | NotYet


class LoopYielder:
    """Shares the event loop between thousands of waiting calls, whether they are served or not, and everything else.

    The loop turns after every few steps, or one that took long. Once many calls were answered it also rests for as long
    as that took: what costs is sending the answers, and a server that only sends takes up one new call a turn, so that
    calls pile up.
    """

    __slots__ = ("_answer_count", "_last", "_step_count")

    def __init__(self) -> None:
        self._step_count = self._answer_count = 0
        self._last = time.perf_counter()

    async def step(self, *, has_answered: bool = True) -> None:
        """Count a call that was answered, or had its turn without a plan."""
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
    """One call. Its answer is set once, by whatever comes first: a claim, an error, or the end of its wait.

    Attributes:
        is_poll: whether the call waits no longer than until it was its turn once.
        arrival: its number in the queue.
    """

    request: ClaimRequest
    answer: asyncio.Future[Answer]
    is_poll: bool = False
    arrival: int = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the call has no answer yet and has not been cancelled."""
        return not self.answer.done()

    @property
    def has_claim(self) -> bool:
        """Whether the call was answered with a queue claim."""
        ended = self.answer
        is_answered = ended.done() and not (ended.cancelled() or ended.exception())
        return is_answered and isinstance(ended.result(), Claim)

    @property
    def batch_index(self) -> int:
        """The batch that a rank waits for; -1: it is a queue worker."""
        return self.request.batch_index

    def end(self, outcome: Answer | TqError) -> None:
        """Answer the call, or end it with an error, unless it has left."""
        if not self.is_waiting:
            return
        if isinstance(outcome, TqError):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class LineState(Enum):
    """What a line waits for.

    PARKED --something has changed--> QUEUED --its turn--> PARKED, or served and QUEUED again
                                                |must be awaited
                                              HEAVY --no other plan is made--> PLANNING --> PARKED or QUEUED
    """

    PARKED = "a change"
    QUEUED = "its turn"
    HEAVY = "the plan that is made off the event loop to be over, or to have taken long"
    PLANNING = "its own plan, which is made off the event loop"


@dataclass(slots=True, eq=False, repr=False)
class Line:
    """The calls that ask with one spec, in order of arrival: a plan for one is a plan for any of them.

    It lasts as long as a call waits in it or a plan is made for it. So what is kept of searches in vain needs no limit
    of its own: the calls that wait hold their requests anyway, and are counted.

    Attributes:
        last_miss: why there was no plan when one was last looked for.
        polls: those of its calls that are polls.
        is_waited_for: whether lines which came later wait for its next plan off the event loop, since its last one took
            little time.
        look_past: ready rows that such a plan leaves to others, who were quicker before.
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
        """Return the calls of this moment."""
        return iter(list(self._waiters))

    @property
    def is_ranked(self) -> bool:
        """Whether ranks wait in it, as opposed to queue workers."""
        return self.spec.dp_size is not None

    @property
    def order(self) -> float:
        """Place among the lines: the arrival of its first call."""
        first = self.first()
        return math.inf if first is None else first.arrival

    @property
    def batch_index(self) -> int:
        """The lowest that its ranks wait for."""
        return min((waiter.batch_index for waiter in self._waiters), default=-1)

    def first(self) -> Waiter | None:
        """Return the first that still waits."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            if waiter.is_waiting:
                return waiter
            self.remove(waiter)
        return None

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at the end."""
        self._waiters[waiter] = None
        if waiter.is_poll:
            self.polls[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter, if it is there."""
        self._waiters.pop(waiter, None)
        self.polls.pop(waiter, None)

    def expire(self, polls: Iterable[Waiter]) -> None:
        """End the wait of polls."""
        for poll in polls:
            poll.end(NotYet())
            self.remove(poll)


class WaitQueue:
    """The lines of waiting claims, and which of them has the next turn: in order of arrival of their first calls.

    After a change, which is `is_stale`, lines that it may be of use to are queued again, also those that were passed
    over before. Where changes come all the time, all lines are looked through once for as many turns as were due at
    least, so that many lines cost each turn little.

    Attributes:
        by_spec: the lines; a call that is answered at once joins none.
        planning: the line for which a plan is made off the event loop, and not for long yet.
        is_stale: whether something has changed since all lines were looked through.
    """

    def __init__(self) -> None:
        self.by_spec: dict[ClaimSpec, Line] = {}
        self.planning: Line | None = None
        self.is_stale = False
        self._last_arrival = 0
        self._turns: list[tuple[float, Line]] = []  # a heap; no two lines have the same order
        self._heavy: dict[Line, None] = {}
        self._turns_left = 0

    def __len__(self) -> int:
        return sum(map(len, self.by_spec.values()))

    def __iter__(self) -> Iterator[Waiter]:
        """Return all waiters of the moment of the call."""
        return iter([waiter for line in self.by_spec.values() for waiter in line])

    @property
    def ranked_lines(self) -> list[Line]:
        """The lines of ranks."""
        return [line for line in self.by_spec.values() if line.is_ranked]

    def join(self, waiter: Waiter, miss: Miss) -> Line:
        """Add a waiter, for which there was no plan, and return its line."""
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
        """Forget a line in which no claim waits and for which no plan is made."""
        if not line and line.state is not LineState.PLANNING and self.by_spec.get(line.spec) is line:
            del self.by_spec[line.spec]

    # Turns

    def put(self, line: Line) -> None:
        """Let a parked line have a turn, unless no claim waits in it."""
        if line.state is LineState.PARKED and line.first() is not None:
            line.state = LineState.QUEUED
            heapq.heappush(self._turns, (line.order, line))

    def put_heavy(self, line: Line) -> None:
        """Let a line have a plan made off the event loop."""
        line.state = LineState.HEAVY
        self._heavy[line] = None

    @property
    def holder(self) -> Line | None:
        """The line whose plan those that came later wait for."""
        return self.planning if self.planning is not None and self.planning.is_waited_for else None

    @property
    def has_turn(self) -> bool:
        """Whether a line may have a turn now."""
        return bool(self._turns) and (self.holder is None or self._turns[0][0] < self.holder.order)

    def next(self, may_be_served: Callable[[Line], bool]) -> Line | None:
        """Return the line whose turn it is, which is parked then; None if no line has one, and nothing is stale."""
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
                self.put(line)  # those before it have left; claims in other lines may have come first
        return None

    def next_heavy(self) -> Line | None:
        """Begin to plan for a line off the event loop and return it, None if there is none or one is planned for."""
        if self.planning is not None or not self._heavy:
            return None
        line = min(self._heavy, key=lambda each: each.order)
        del self._heavy[line]
        line.state = LineState.PARKED if line.first() is None else LineState.PLANNING
        if line.state is LineState.PLANNING:
            self.planning = line
        return self.planning

    def defer(self, line: Line) -> None:
        """Let all claims that wait now have their turn before a line."""
        first = line.first()
        if first is not None:
            self._give_number(first)


def describe_batch(batch_index: int, plan: RecordedPlan, lengths: Indexes | None) -> RecentBatch:
    """Return a batch in numbers.

    Args:
        batch_index: its number.
        plan: what was recorded of it.
        lengths: token counts of `plan.rows` `(n,)`; None: they are not known.
    """
    if lengths is None or not lengths.size:
        return RecentBatch(batch_index=batch_index)
    ends, sums = np.cumsum(plan.sizes), np.append(0, np.cumsum(lengths))
    tokens, total = np.diff(sums[ends], prepend=0).tolist(), int(sums[-1])
    if plan.steps:
        padding = sum(pack.padding_tokens for steps in plan.steps for packs in steps for pack in packs)
    else:  # all samples of a micro-batch to the longest of them
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
    """A sum of deliveries to a task, each of which counts for less as it gets older, by a factor e every 10 seconds.

    It takes the same memory and time however many there were. Times are in seconds on one clock, and never go back.
    """

    __slots__ = ("_at_seconds", "_count")

    def __init__(self) -> None:
        self._count = self._at_seconds = 0.0

    def add(self, count: int, at_seconds: float) -> None:
        """Count samples that were delivered."""
        self._count = self._left(at_seconds) + count
        self._at_seconds = at_seconds

    def per_second(self, at_seconds: float) -> float:
        """Return how many are delivered a second, lately."""
        return self._left(at_seconds) / _RATE_SECONDS

    def _left(self, at_seconds: float) -> float:
        return self._count * math.exp((self._at_seconds - at_seconds) / _RATE_SECONDS) if self._count else 0.0


_log = logging.getLogger(__name__)


class RunsPlans(Protocol):
    """Runs samplers so that one that fails, or hangs, harms its own request only."""

    def length(self, sampler: Sampler) -> LengthSource | None:
        """Return the length that a sampler needs; raises TqError only."""
        ...

    def run_inline(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a well-formed plan or None, at once.

        Raises:
            MustBeAwaited: the sampler does not run on the event loop.
            TqError: the sampler's fault, or its own.
        """
        ...

    async def run(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a well-formed plan or None, off the event loop and within a time limit; raises TqError only."""
        ...


class Planner:
    """Serves the claims of one task.

    Attributes:
        task: its ledger.
        last_request: the claim that was made last, None where this process has seen none.
        deliveries: the rate of samples that this process has delivered.
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
        """Serve a task from now on.

        Args:
            partition: that of the task.
            task: its ledger.
            runner: runs samplers.
            commit: makes a change of the partition, given what its `prepare` would return, or None; without effect
                once the partition was cleared.
            group: has the changes of a `with` block in one group; see `StateMachine.group`.
            on_batch: called with the name of the sampler and each batch that was recorded for ranks.
        """
        self._partition = partition
        self.task = task
        self._runner = runner
        self._commit = commit
        self._group = group
        self._on_batch = on_batch
        self.last_request: ClaimRequest | None = None
        self.deliveries = DeliveryRate()
        self._names: dict[str, Any] = {"partition_id": partition.partition_id, "task_name": task.name}
        self._starts = ScanStarts(partition, task.name)
        self._epoch = task.epoch  # of which calls wait
        self._queue = WaitQueue()
        self._to_answer: deque[tuple[Waiter, TqError | None]] = deque()  # calls that may be over, and why
        self._dispatching: asyncio.Task[None] | None = None
        self._plans: set[asyncio.Task[Any] | None] = set()  # all that are made off the loop
        self._gone: Callable[[], TqError] | None = None

    @property
    def waiting_count(self) -> int:
        """Number of calls that wait."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether no call waits, and no plan is made."""
        return not self._queue.by_spec

    def close(self) -> None:
        """Serve no calls any more, while it is idle."""
        self._starts.close()

    def waiting_claims(self) -> list[tuple[ClaimRequest, int]]:
        """Return the first of the claims of each line, and how many wait in it, in order of arrival of the first."""
        lines = sorted(self._queue.by_spec.values(), key=lambda line: line.order)
        return [(first.request, len(line)) for line in lines if (first := line.first()) is not None]

    def compares_with(self, policy: str) -> bool:
        """Whether a claim waits, or is planned, whose batch depends on the published version of a policy."""
        specs, outstanding = self._queue.by_spec, self.task.outstanding
        if specs and outstanding is not None and outstanding.bounds_staleness_by(policy):
            return True
        conditions = (each.published for spec in specs for each in spec.batch_spec.where)
        return any(published is not None and published.policy == policy for published in conditions)

    def wake(self) -> None:
        """Look at all waiting claims again: something has changed, of which a planner hears while claims wait."""
        if self._epoch != self.task.epoch:  # calls may mean the epoch before
            self._epoch = self.task.epoch
            self._enqueue_answers(self._queue)
        self._queue.is_stale = True
        self._advance()

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waiting calls, and those to come, with an error."""
        self._gone = error
        for plan in filter(None, self._plans):
            plan.cancel()
        self._enqueue_answers(self._queue)
        self._advance()

    # A call

    async def claim(
        self, request: ClaimRequest, max_wait_seconds: float, while_waiting: WhileWaiting = nullcontext
    ) -> Answer:
        """Return the recorded answer, or wait for one inside `while_waiting()`; `NotYet` when the time is over."""
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
        """Return the answers of a range behind its first, up to one that is not ready or is refused.

        Where it may be planned, those that can be had in this step of the event loop are planned in it, in one group of
        changes.
        """
        if may_plan and self._gone is None and not self._has_turns(request.spec):
            with self._group():
                self._plan_following(request)
            self._advance()
        answers: list[RankPlan | EndCounts] = []
        with suppress(TqError):  # of a call for that batch
            for each in request.following():
                answer = self._recorded(each)
                if isinstance(answer, RankPlan | EndCounts):
                    answers.append(answer)
                if not isinstance(answer, RankPlan):
                    break
        return answers

    def _plan_following(self, request: ClaimRequest) -> None:
        """Plan the batches of a range behind its first, as far as nothing is to be waited for; within a group."""
        task, last = self.task, request.batch_index + request.batch_count - 1
        began_at = time.thread_time()  # a process that has to wait for a processor keeps nobody waiting by planning
        while request.batch_index < (batch_index := task.next_batch_index) <= last and task.end is None:
            try:
                found = self._find_at_once(request)
                if not isinstance(found, Planned | EndFound):
                    return
                self._record(request, found)
            except TqError:  # of a call for that batch
                return
            is_late = time.thread_time() - began_at > _RANGE_SECONDS
            if is_late or task.next_batch_index == batch_index:  # the end, or the partition was cleared
                return

    def _has_turns(self, spec: ClaimSpec) -> bool:
        """Whether a call must have its turn in a line: others have theirs now, or wait and ask alike.

        Otherwise all waiting claims wait for a change, so that no turn is taken away.
        """
        is_serving = self._dispatching is not None or self._queue.holder is not None
        return is_serving or spec in self._queue.by_spec

    async def _wait(self, request: ClaimRequest, miss: Miss | None, max_wait_seconds: float) -> Answer:
        """Wait for an answer, given why there is none yet; None: it must be planned off the loop."""
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
            ):  # it ended after its record was made, in a turn of the loop before this one
                self.task.recorded(request)  # raises if it was released or has expired
                raise LeaseExpiredError(
                    f"the lease of this claim of task {self.task.name!r} ended before its answer was sent; ask again "
                    f"under a new request_id",
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
            del waiter  # through which an error would hold this frame, and with it the partition

    def _forget_if_unused(self, line: Line) -> None:
        """Forget a line that is of no use any more, and hear of no changes without any line."""
        self._queue.forget_if_unused(line)
        if self.is_idle:
            self._partition.on_change.discard(self.wake)

    def has_planned(self, request: ClaimRequest) -> bool:
        """Whether the batch that a rank asks for was planned, or none will be any more."""
        is_planned = request.rank is not None and request.rank.batch_index < self.task.next_batch_index
        return is_planned or self.task.end is not None

    def retract(self, request_id: bytes) -> None:
        """Release a queue claim whose answer did not reach its client, unless a retry was given the same.

        The client may ask again under the same request_id. A claim with a name stays: others ask for it too.
        """
        claim = self.task.claims.get(request_id)
        if claim is None or claim.name:
            return
        claim.answer_count -= 1
        if claim.answer_count == 0:
            self._commit(ClaimReleased(**self._names, request_id=request_id, is_final=False), None)

    def _recorded(self, request: ClaimRequest) -> RankPlan | Claim | EndCounts | None:
        """Return the recorded answer of a call, or None; a queue claim counts the calls it answers.

        Raises:
            TqError: the call can have no answer.
        """
        self.task.check_epoch(request.epoch)
        recorded = self.task.recorded(request)
        most = self.task.next_batch_index + _MOST_BATCHES_AHEAD
        if recorded is None and request.rank is not None and request.rank.batch_index > most:
            # No rank reaches it by counting, and all batches before it would be planned, and consumed.
            raise InvalidArgumentError(
                f"batch_index is {request.rank.batch_index}; expected at most {most}, which is {_MOST_BATCHES_AHEAD} "
                f"more than the next batch of task {self.task.name!r} in partition {self._partition.partition_id!r}, "
                f"{self.task.next_batch_index}. Count batches from 0 in each partition and epoch.",
                field="batch_index",
                metadata={"got": str(request.rank.batch_index), "expected": f"0 to {most}"},
            )
        if isinstance(recorded, Claim):
            recorded.answer_count += 1
        return recorded

    # Turns of lines

    def _advance(self) -> None:
        """Have plans made, on the loop for lines that have a turn, and off the loop for the next that needs it."""
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
        """Whether it is worth while to look for a plan."""
        return not line.last_miss.is_current(self._partition, self.task)

    def _enqueue_answers(self, waiters: Iterable[Waiter], error: TqError | None = None) -> None:
        """Have calls answered, a few at a time: with an error, what is recorded, or why they can have nothing."""
        self._to_answer.extend((waiter, error) for waiter in waiters)

    def _answer(self, waiter: Waiter, error: TqError | None = None) -> bool:
        """End a call with an error, or what is recorded for it, or its refusal; return whether it is over."""
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
        """Give a line its turn: plan for its first call, or have it planned for off the loop."""
        if self._answer(first):
            self._queue.put(line)
            return
        earlier = line
        if first.batch_index > self.task.next_batch_index:  # the batches before it are for others to bind, or planned
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
        """Serve a line with what was found for it, in the step in which it was found, or pass it over.

        A rank may wait for a batch far ahead. So after many batches its line lets others have their turns, and those
        end that wait no longer than for theirs.

        Args:
            line: the line.
            first: its first call.
            found: for it.
            polls: those of its calls that had come when it was begun to look.
        """
        if isinstance(found, Planned | EndFound):
            try:
                with self._group():
                    answer = self._record(first.request, found)
            except TqError as error:  # no slots can be made
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
        if line.polls:  # which came while the plan was made
            self._queue.put(line)
        # What has changed while the plan was made is for the next round: the others have their turns before.
        self._queue.is_stale |= self._may_be_served(line)

    def _fail(self, line: Line, error: TqError) -> None:
        """End the first queue worker of a line; of ranks all that wait for the same batch, which would fail alike."""
        first, batch_index = line.first(), line.batch_index
        if line.is_ranked:
            self._enqueue_answers((each for each in line if each.batch_index == batch_index), error)
        elif first is not None:
            first.end(error)
        self._queue.put(line)

    def _fail_all(self, waiters: Iterable[Waiter]) -> None:
        _log.exception(LogMessage("planning failed", task=self.task.name))
        for waiter in waiters:
            waiter.end(InternalError("planning failed; the server's log has the details"))

    # What is recorded

    def _record(self, request: ClaimRequest, found: Planned | EndFound) -> Answer:
        """Record what was found, with what it evicts, and return what it is for the call that caused it.

        It is called in a group. A batch, or the end, is of all ranks: the claims that wait for it are answered, and
        those that disagree refused.
        """
        self._queue.is_stale = True  # the end of others may have come
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
            if task.next_batch_index != batch_index:  # else the partition was cleared before
                self.deliveries.add(found.plan.rows.size, time.monotonic())
                is_plain = not (found.plan.is_reusing or found.plan.dropped)
                positions = found.positions if is_plain else self._partition.table.find(found.plan.rows)
                described = describe_batch(batch_index, found.plan, found.readiness.known_lengths(positions))
                if found.readiness.bound is not None:
                    described = replace(described, staleness=found.readiness.bound.staleness_of(positions))
                task.recent_batches.append(described)
                self._on_batch(spec.batch_spec.sampler, described)
            self._evict(request, found.evicted)  # last, since positions change
        for line in self._queue.ranked_lines:
            disagrees = line.spec.dp_size != spec.dp_size
            self._enqueue_answers(each for each in line if each.batch_index == batch_index or is_end or disagrees)
        return answer

    def _record_for_worker(self, request: ClaimRequest, found: Planned | EndFound) -> Claim | EndCounts:
        """Record what a queue worker gets; an end is of this one only, or of all that ask under its name.

        Raises:
            TqError: slots of prompts cannot be made, so these are not claimed.
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
                    f"sampler {request.batch_spec.sampler!r} delivers groups, drops samples or uses them again, "
                    f"expected one that delivers prompts one by one: admit makes slots for each. Use 'sequential'",
                    metadata={"sampler": request.batch_spec.sampler},
                )
            request.make_slots(found.plan.rows)
        if terms is not None and grouping is not None:
            terms = replace(terms, group_block_size=grouping.block_size or 0, blocks=grouping.blocks)
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
        """Fail or clear what a claim evicts; return whether it did, which it does not once the partition is gone."""
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

    # Plans

    def length(self, request: ClaimRequest) -> LengthSource | None:
        """Return the length that the sampler of a claim needs."""
        return self._runner.length(request.sampler)

    def _find_at_once(self, request: ClaimRequest) -> Found | None:
        """Look for a plan, or the end, in this step of the event loop; None: it must be looked for off the loop."""
        sampler = request.sampler
        while True:
            search = Search(self._partition, self.task, self._starts, request, self.length(request))
            try:
                plan = self._runner.run_inline(sampler, search.view, search.wanted)
                if plan is None and search.begins_last():
                    plan = self._runner.run_inline(sampler, search.view, search.wanted)
                search.look_for_evicted()
            except MustBeAwaited:
                return None
            found = self._keep_groups(search, search.conclude(plan))
            # Once what it evicts is gone there may be a plan, or the end.
            if isinstance(found, Planned) or not self._evict(request, search.evicted):
                return found

    async def _find_off_loop(self, request: ClaimRequest, look_past: int) -> Found:
        """Look for a plan, or the end, while positions of rows stay as they are.

        There is no await between the check of a plan's rows and the return, so that the caller can record it.
        """
        sampler = request.sampler
        new_search = partial(Search, self._partition, self.task, self._starts, request, self.length(request))
        look_past *= look_past and new_search().view.scan.has(look_past + request.plan_request.total_size)
        with self._starts.watched() as watch, self._partition.table.pinned():
            search = new_search(watch=watch, look_past=look_past)
            plan = await self._runner.run(sampler, search.view, search.wanted)
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
        """Record how the task keeps groups whole, if it did so in another way before; return what was found."""
        task, kept = self.task, search.kept_groups
        is_of_use = isinstance(found, Planned | EndFound)
        # Once it is known, a miss does not change it: two that wait and differ would wake each other for ever.
        if (is_of_use or (task.kept_groups is None and found != NOT_LOOKED)) and kept != task.kept_groups:
            self._commit(GroupsKept(**self._names, kept_groups=kept), (self._partition, task, True))
        return found

    async def _plan_off_loop(self, line: Line) -> None:
        """Plan for a line and record the plan, in one step of the event loop, for the claim that is its first then."""
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
                # Twice what others took, so that the next one is not late though it takes longer.
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
            self._queue.is_stale |= line.is_ranked  # other ranks may have awaited it
            self._forget_if_unused(line)
            self._yield_turn(line)
            self._advance()

    def _yield_turn(self, line: Line) -> None:
        """Have other lines wait no longer for the plan of this one, which may not be over."""
        if self._queue.planning is line:
            self._queue.planning = None
            self._advance()

    async def _close_gaps(self) -> None:
        """Close gaps of the table if these are many, in short steps, once all plans of the partition are over.

        Else plans that overlap all the time would have the table grow without end. Plans have a time limit.
        """
        table = self._partition.table
        while table.has_many_gaps:
            table.close_gaps(_CLOSED_AT_ONCE)  # nothing while it is pinned
            await asyncio.sleep(_PINNED_SECONDS if table.pin_count else 0)
