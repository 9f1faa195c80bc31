"""Calls that wait for a claim: one queue in order of arrival, over ranks and queue workers, whatever they ask for."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tq_service.domain.claims.ledger import QueueClaim, TaskLedger
from tq_service.domain.claims.request import ClaimRequest, ClaimSpec
from tq_service.domain.partition import Partition
from tq_service.domain.plan import RankPlan
from tq_service.errors import TqError
from tq_service.schema import EndCounts


@dataclass(frozen=True, slots=True)
class NotYet:
    """Nothing to deliver within the wait; never recorded."""


Answer = RankPlan | QueueClaim | EndCounts | NotYet

_STEPS_A_TURN = 16
_TURN_SECONDS = 0.002
_ANSWERS_WITHOUT_REST = 128


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


@dataclass(frozen=True, slots=True)
class FailedPlan:
    """A plan that found too little, and what must change before another one can find more.

    So a partition that fills row by row is not scanned for each of them.

    Attributes:
        state_version: of the partition when the plan was begun.
        row_version: that the partition must reach.
        consumed: rows consumed and leased by the task then, where a change of these may bring the end; else None.
    """

    state_version: int
    row_version: int
    consumed: tuple[int, int] | None

    def cannot_succeed_yet(self, partition: Partition, task: TaskLedger) -> bool:
        """Whether too little has changed for another attempt to be worth while."""
        return (
            partition.state_version == self.state_version
            and partition.row_version < self.row_version
            and self.consumed in (None, (task.consumed_count, task.leased_count))
        )


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

    def resolve(self, answer: Answer) -> None:
        """Answer the call, unless it has left."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: TqError) -> None:
        """End the call with an error, unless it has left."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def expire(self) -> None:
        """End the call's wait."""
        self.resolve(NotYet())


@dataclass(slots=True, eq=False, repr=False)
class Line:
    """The calls that ask with one spec, in order of arrival: a plan for one is a plan for any of them.

    It lasts as long as a call waits in it or a plan is made for it. So what is kept of failed plans needs no limit of
    its own: the calls that wait hold their requests anyway, and are counted.

    Attributes:
        is_queued: whether the line is to have a turn.
        deferred_to: it has none before the calls with lower numbers.
        turn_size: batches planned in the turn it has.
        seen: number of the last call that had come when it last had a turn.
        failed: why there was no plan then.
        end: the end that was found, and the marks at which it holds.
        planning: makes a plan off the event loop.
        head_start_seconds: for how long such a plan goes before claims of calls that came later.
    """

    spec: ClaimSpec
    is_queued: bool = False
    deferred_to: int = 0
    turn_size: int = 0
    seen: int = 0
    failed: FailedPlan | None = None
    end: tuple[tuple[int, ...], EndCounts] | None = None
    planning: asyncio.Task[None] | None = None
    head_start_seconds: float = 0.0
    _waiters: OrderedDict[Waiter, None] = field(default_factory=OrderedDict)
    _by_batch: dict[int, OrderedDict[Waiter, None]] = field(default_factory=dict)  # ranks only
    _polls: dict[Waiter, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def is_ranked(self) -> bool:
        """Whether ranks wait in it, as opposed to queue workers."""
        return self.spec.dp_size is not None

    @property
    def order(self) -> int:
        """Place among the lines: the arrival of its first call, unless it is deferred."""
        first = self.first()
        return self.deferred_to if first is None else max(first.arrival, self.deferred_to)

    @property
    def waiters(self) -> list[Waiter]:
        """The calls of this moment."""
        return list(self._waiters)

    @property
    def batch_indexes(self) -> list[int]:
        """What its ranks wait for."""
        return list(self._by_batch)

    @property
    def lowest_batch_index(self) -> int:
        """The first of these."""
        return min(self._by_batch)

    def first(self, batch_index: int | None = None) -> Waiter | None:
        """Return the first that still waits, of those that wait for a `batch_index` where one is given."""
        while waiters := self._waiters if batch_index is None else self._by_batch.get(batch_index):
            waiter = next(iter(waiters))
            if waiter.is_waiting:
                return waiter
            self.remove(waiter)
        return None

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at the end."""
        self._waiters[waiter] = None
        if waiter.request.rank is not None:
            self._by_batch.setdefault(waiter.request.rank.batch_index, OrderedDict())[waiter] = None
        if waiter.is_poll:
            self._polls[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter, if it is there."""
        if waiter not in self._waiters:
            return
        del self._waiters[waiter]
        self._polls.pop(waiter, None)
        rank = waiter.request.rank
        if rank is not None:
            del self._by_batch[rank.batch_index][waiter]
            if not self._by_batch[rank.batch_index]:
                del self._by_batch[rank.batch_index]

    def expire_polls(self) -> bool:
        """End the wait of the polls that had come when the line had its turn; return whether these were all."""
        for poll in [each for each in self._polls if each.arrival <= self.seen]:
            poll.expire()
            self.remove(poll)
        return not self._polls


class WaitQueue:
    """The lines of those who wait, and which of them are to have a turn, in order of arrival of their first waiters.

    Joining, leaving and having a turn cost the same however many wait, but for a logarithm of the number of lines.

    Attributes:
        by_spec: the lines; a call that is answered at once joins none.
        last_arrival: number of the last call that joined one.
        before: lines with an order from this on have no turn now.
    """

    def __init__(self) -> None:
        self.by_spec: dict[ClaimSpec, Line] = {}
        self._turns: list[tuple[int, int, Line]] = []  # a heap: order, a number that no two have, and whose turn it is
        self._turn_count = 0
        self.last_arrival = 0
        self.before = math.inf

    def __len__(self) -> int:
        return sum(map(len, self.by_spec.values()))

    def __bool__(self) -> bool:
        return bool(self.by_spec)

    def __iter__(self) -> Iterator[Waiter]:
        """Return all waiters of the moment of the call."""
        return iter([waiter for line in self.by_spec.values() for waiter in line.waiters])

    @property
    def lines(self) -> list[Line]:
        """All lines of this moment."""
        return list(self.by_spec.values())

    @property
    def ranked_lines(self) -> list[Line]:
        """The lines of ranks."""
        return [line for line in self.by_spec.values() if line.is_ranked]

    def join(self, waiter: Waiter) -> Line:
        """Add a waiter and return its line; `leave` is called once for it."""
        self.last_arrival += 1
        waiter.arrival = self.last_arrival
        spec = waiter.request.spec
        line = self.by_spec.get(spec)
        if line is None:
            line = self.by_spec[spec] = Line(spec)
        line.add(waiter)
        return line

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        line = self.by_spec.get(waiter.request.spec)
        if line is not None:  # else it went with the others, those that are answered apart
            line.remove(waiter)
            self.drop_if_unused(line)

    def drop_if_unused(self, line: Line) -> None:
        """Forget a line in which nobody waits and for which no plan is made."""
        if not line and line.planning is None and self.by_spec.get(line.spec) is line:
            del self.by_spec[line.spec]

    # Turns

    def put(self, line: Line) -> None:
        """Let a line have a turn, unless nobody waits in it or a plan is made for it."""
        if not line.is_queued and line.planning is None and line.first() is not None:
            line.is_queued = True
            heapq.heappush(self._turns, self._turn(line))

    @property
    def turn_count(self) -> int:
        """Number of turns that lines are to have."""
        return len(self._turns)

    @property
    def has_turn(self) -> bool:
        """Whether a line may have a turn now."""
        return bool(self._turns) and self._turns[0][0] < self.before

    def pop(self) -> Line | None:
        """Return the line whose turn it is, None where no line has one."""
        while self.has_turn:
            order, _, line = heapq.heappop(self._turns)
            if not line.is_queued or line.first() is None:
                line.is_queued = False
            elif line.order > order:  # those before it have left; who waits in other lines may have come first
                heapq.heappush(self._turns, self._turn(line))
            else:
                line.is_queued = False
                return line
        return None

    def defer(self, line: Line) -> None:
        """Let all who wait now have their turn before the line."""
        self.last_arrival += 1
        line.deferred_to = self.last_arrival

    def ranks_before(self, line: Line) -> Line | None:
        """Return a line of ranks that wait for an earlier batch_index, and may be served; see `Planner`."""
        others = [other for other in self.ranked_lines if other.is_queued or other.planning is not None]
        first = min(
            (other for other in others if other.first()), key=lambda other: other.lowest_batch_index, default=line
        )
        return first if first.lowest_batch_index < line.lowest_batch_index else None

    def _turn(self, line: Line) -> tuple[int, int, Line]:
        self._turn_count += 1
        return line.order, self._turn_count, line
