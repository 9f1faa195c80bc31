"""Calls that wait for claims of one task: lines of those that ask alike, which have their turns in order of arrival."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from tq_service.errors import TqError
from tq_service.planning.view import Miss
from tq_service.schema import EndCounts
from tq_service.state.ledger import QueueClaim
from tq_service.state.plan import RankPlan
from tq_service.state.request import ClaimRequest, ClaimSpec


@dataclass(frozen=True, slots=True)
class NotYet:
    """Nothing to deliver within the wait; never recorded."""


Answer = RankPlan | QueueClaim | EndCounts | NotYet

_STEPS_A_TURN = 16
_TURN_SECONDS = 0.002
_ANSWERS_WITHOUT_REST = 128
_LINES_A_TURN: Final = 16  # of those that are looked through after a change


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
        return is_answered and isinstance(ended.result(), QueueClaim)

    @property
    def batch_index(self) -> int:
        """The batch that a rank waits for; -1: it is a queue worker."""
        return -1 if self.request.rank is None else self.request.rank.batch_index

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
        is_short: whether its last plan off the event loop took so little time that lines which came later wait for the
            next one.
        look_past: ready rows that such a plan leaves to others, who were quicker before.
    """

    spec: ClaimSpec
    last_miss: Miss
    state: LineState = LineState.PARKED
    is_short: bool = False
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
        self._turns: list[tuple[float, Line]] = []  # heaps; no two lines have the same order
        self._heavy: list[tuple[float, Line]] = []
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
        """Add a waiter, for which there was no plan, and return its line; `leave` is called once for it."""
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

    def leave(self, line: Line, waiter: Waiter) -> None:
        """Remove a waiter from its line."""
        line.remove(waiter)
        self.drop_if_unused(line)

    def drop_if_unused(self, line: Line) -> None:
        """Forget a line in which no claim waits and for which no plan is made."""
        if not line and line.state is not LineState.PLANNING and self.by_spec.get(line.spec) is line:
            del self.by_spec[line.spec]

    # Turns

    def put(self, line: Line) -> None:
        """Let a parked line have a turn, unless no claim waits in it."""
        if line.state is LineState.PARKED:
            self._push(self._turns, line, LineState.QUEUED)

    def put_heavy(self, line: Line) -> None:
        """Let a line have a plan made off the event loop."""
        self._push(self._heavy, line, LineState.HEAVY)

    def _push(self, heap: list[tuple[float, Line]], line: Line, state: LineState) -> None:
        order = line.order
        line.state = LineState.PARKED if order == math.inf else state
        if line.state is state:
            heapq.heappush(heap, (order, line))

    @property
    def holder(self) -> Line | None:
        """The line whose plan those that came later wait for."""
        return self.planning if self.planning is not None and self.planning.is_short else None

    @property
    def has_turn(self) -> bool:
        """Whether a line may have a turn now."""
        return bool(self._turns) and (self.holder is None or self._turns[0][0] < self.holder.order)

    def next(self, may_be_served: Callable[[Line], bool]) -> Line | None:
        """Return the line whose turn it is, which is parked then; None if no line has one."""
        if self.is_stale and (self._turns_left <= 0 or not self.has_turn):
            self.is_stale = False
            for line in self.by_spec.values():
                if line.state is LineState.PARKED and may_be_served(line):
                    self.put(line)
            self._turns_left = max(len(self._turns), len(self.by_spec) // _LINES_A_TURN)
        while self.has_turn:
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
        if self.planning is not None:
            return None
        while self._heavy:
            line = heapq.heappop(self._heavy)[1]
            if line.state is LineState.HEAVY:
                line.state = LineState.PARKED if line.first() is None else LineState.PLANNING
                if line.state is LineState.PLANNING:
                    self.planning = line
                    break
        return self.planning

    def defer(self, line: Line) -> None:
        """Let all claims that wait now have their turn before a line."""
        first = line.first()
        if first is not None:
            self._give_number(first)
