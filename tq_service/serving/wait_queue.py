"""Calls that wait for a claim: one queue in order of arrival, over ranks and queue workers, whatever they ask for."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tq_service.errors import TqError
from tq_service.schema import EndCounts
from tq_service.state.ledger import QueueClaim, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import RankPlan
from tq_service.state.request import ClaimRequest, ClaimSpec


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
class NoPlan:
    """What was found where there is no plan, and what must change before something else can be found.

    So a partition that fills row by row is not scanned for each of them, nor at its end for each waiting claim.

    Attributes:
        state_version: of the partition when the search was begun.
        row_version: that the partition must reach.
        consumed: rows consumed and leased by the task then, where a change of these may bring the end, or is after it;
            else None.
    """

    state_version: int = -1
    row_version: int = 0
    consumed: tuple[int, int] | None = None

    def holds(self, partition: Partition, task: TaskLedger) -> bool:
        """Whether too little has changed for another search to be worth while."""
        return (
            partition.state_version == self.state_version
            and partition.row_version < self.row_version
            and self.consumed in (None, (task.consumed_count, task.leased_count))
        )


NOT_LOOKED = NoPlan()  # which never holds


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFound(NoPlan):
    """No plan follows, unless something changes."""

    end: EndCounts


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
    def batch_index(self) -> int:
        """What a rank waits for; -1: it is a queue worker."""
        return -1 if self.request.rank is None else self.request.rank.batch_index

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

    It lasts as long as a call waits in it or a plan is made for it. So what is kept of searches in vain needs no limit
    of its own: the calls that wait hold their requests anyway, and are counted.

    Attributes:
        found: why there was no plan when one was last looked for.
        is_queued: whether the line is to have a turn.
        seen: number of the last call that had come when it last had a turn.
        planning: makes a plan off the event loop.
        head_start_seconds: for how long such a plan goes before claims of calls that came later.
        look_past: ready rows that it leaves to others, who were quicker before.
        loss_count: such plans in a row that lost their rows to others.
    """

    spec: ClaimSpec
    found: NoPlan
    is_queued: bool = False
    seen: int = 0
    planning: asyncio.Task[None] | None = None
    head_start_seconds: float = 0.0
    look_past: int = 0
    loss_count: int = 0
    _waiters: OrderedDict[Waiter, None] = field(default_factory=OrderedDict)
    _polls: dict[Waiter, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiters)

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
    def waiters(self) -> list[Waiter]:
        """The calls of this moment."""
        return list(self._waiters)

    @property
    def batch_index(self) -> int:
        """The lowest that its ranks wait for."""
        return min((waiter.batch_index for waiter in self._waiters), default=-1)

    def first(self) -> Waiter | None:
        """Return the first that still waits."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            if not waiter.answer.done():
                return waiter
            self.remove(waiter)
        return None

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at the end."""
        self._waiters[waiter] = None
        if waiter.is_poll:
            self._polls[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter, if it is there."""
        self._waiters.pop(waiter, None)
        self._polls.pop(waiter, None)

    def expire_polls(self, batch_index: int = -1) -> bool:
        """End the wait of the polls that had come when the line had its turn; return whether these were all.

        Args:
            batch_index: of ranks, only those that wait for this one or a later one.
        """
        for poll in [each for each in self._polls if each.arrival <= self.seen and each.batch_index >= batch_index]:
            poll.expire()
            self.remove(poll)
        return not self._polls


class WaitQueue:
    """The lines of waiting claims, and which of them are to have a turn, in order of arrival of their first waiters.

    Joining, leaving and having a turn cost the same however many wait, but for a logarithm of the number of lines.

    Attributes:
        by_spec: the lines; a call that is answered at once joins none.
        last_arrival: the last number that was given to a call.
        head_starts: lines whose plans off the loop go before those of lines that come after them, and what ends that.
    """

    def __init__(self) -> None:
        self.by_spec: dict[ClaimSpec, Line] = {}
        self._turns: list[tuple[float, Line]] = []  # a heap; no two lines have the same order
        self.last_arrival = 0
        self.head_starts: dict[Line, asyncio.TimerHandle] = {}
        self._by_name: dict[str, dict[Waiter, None]] = {}  # those that ask for a claim by name

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

    def join(self, waiter: Waiter, found: NoPlan) -> Line:
        """Add a waiter, for which this was found, and return its line; `leave` is called once for it."""
        self._give_number(waiter)
        spec = waiter.request.spec
        line = self.by_spec.get(spec)
        if line is None:
            line = self.by_spec[spec] = Line(spec, found)
        line.add(waiter)
        if name := waiter.request.claim_name:
            self._by_name.setdefault(name, {})[waiter] = None
        return line

    def named(self, name: str) -> list[Waiter]:
        """Return the waiters that ask for the claim of a name."""
        return list(self._by_name.get(name, ()))

    def _give_number(self, waiter: Waiter) -> None:
        self.last_arrival += 1
        waiter.arrival = self.last_arrival

    def leave(self, line: Line, waiter: Waiter) -> None:
        """Remove a waiter from its line."""
        line.remove(waiter)
        if name := waiter.request.claim_name:
            self._by_name[name].pop(waiter, None)
            if not self._by_name[name]:
                del self._by_name[name]
        self.drop_if_unused(line)

    def drop_if_unused(self, line: Line) -> None:
        """Forget a line in which no claim waits and for which no plan is made."""
        if not line and line.planning is None and self.by_spec.get(line.spec) is line:
            del self.by_spec[line.spec]

    # Turns

    def put(self, line: Line) -> None:
        """Let a line have a turn, unless no claim waits in it or a plan is made for it."""
        order = line.order
        if not line.is_queued and line.planning is None and order < math.inf:
            line.is_queued = True
            heapq.heappush(self._turns, (order, line))

    @property
    def turn_count(self) -> int:
        """Number of turns that lines are to have."""
        return len(self._turns)

    @property
    def has_turn(self) -> bool:
        """Whether a line may have a turn now."""
        if not self._turns:
            return False
        return self._turns[0][0] < min((line.order for line in self.head_starts), default=math.inf)

    def pop(self) -> Line | None:
        """Return the line whose turn it is, None where no line has one."""
        while self.has_turn:
            order, line = heapq.heappop(self._turns)
            if line.is_queued:
                line.is_queued = False
                if line.order <= order:
                    return line
                self.put(line)  # those before it have left; claims in other lines may have come first
        return None

    def defer(self, line: Line) -> None:
        """Let all claims that wait now have their turn before a line."""
        first = line.first()
        if first is not None:
            self._give_number(first)

    def first_ranks(self, line: Line) -> Line:
        """Return the line of the ranks that wait for the lowest batch_index, of this one and those to be served."""
        others = [each for each in self.ranked_lines if each.first() and (each.is_queued or each.planning)]
        return min([line, *others], key=lambda each: each.batch_index)
