"""Calls that wait for a claim, in order of arrival."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tq_service.domain.claims.end import End
from tq_service.domain.claims.ledger import QueueClaim
from tq_service.domain.claims.request import ClaimRequest
from tq_service.domain.plan import RankPlan
from tq_service.errors import TqError


@dataclass(frozen=True, slots=True)
class NotYet:
    """Nothing to hand out within the wait; never recorded."""


Answer = RankPlan | QueueClaim | End | NotYet
Key = TypeVar("Key")

_STEPS_A_TURN = 16
_TURN_SECONDS = 0.002
_STEPS_WITHOUT_REST = 128


class LoopYielder:
    """Shares the event loop between those who are served, or looked after in vain, in their thousands and all others.

    The loop turns after every few steps, or one that took long. Once there have been many it also rests for as long as
    they took: what costs is sending their answers, and a server that only sends takes up one new call a turn, so that
    calls pile up.
    """

    __slots__ = ("_last", "_step_count")

    def __init__(self) -> None:
        self._step_count = 0
        self._last = time.perf_counter()

    async def step(self) -> None:
        """Count one that has been looked after."""
        self._step_count += 1
        if self._step_count % _STEPS_A_TURN and time.perf_counter() - self._last < _TURN_SECONDS:
            return
        await asyncio.sleep(0)
        if self._step_count >= _STEPS_WITHOUT_REST:
            await asyncio.sleep(time.perf_counter() - self._last)
        self._last = time.perf_counter()


@dataclass(slots=True, eq=False)
class Waiter:
    """One call; its answer is set once, whoever comes first: a claim, an error, or the end of its time."""

    request: ClaimRequest
    answer: asyncio.Future[Answer]

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


class WaitQueue(Generic[Key]):
    """Waiters by what they wait for. Adding, removing and taking the first cost the same however many wait."""

    def __init__(self) -> None:
        self._lines: dict[Key, OrderedDict[Waiter, int]] = {}  # with the number of each waiter's arrival
        self.arrival_count = 0  # of all that ever came; the number of the last one

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Waiter]:
        """Return all waiters, at the moment of the call."""
        return iter([waiter for line in self._lines.values() for waiter in line])

    def names(self) -> list[Key]:
        """Return what is waited for, in order of the first arrival."""
        return list(self._lines)

    def heads(self) -> list[tuple[int, Key]]:
        """Return for each line the number of its first arrival, and what it waits for."""
        return [(next(iter(line.values())), key) for key, line in self._lines.items()]

    def add(self, key: Key, waiter: Waiter) -> None:
        """Enter a waiter at the end of its line."""
        self.arrival_count += 1
        self._lines.setdefault(key, OrderedDict())[waiter] = self.arrival_count

    def remove(self, key: Key, waiter: Waiter) -> None:
        """Take a waiter out, if it is in."""
        line = self._lines.get(key)
        if line is not None and line.pop(waiter, None) is not None and not line:
            del self._lines[key]

    def first(self, key: Key) -> Waiter | None:
        """Return the first of a line that still waits."""
        head = self.head(key)
        return None if head is None else head[1]

    def head(self, key: Key) -> tuple[int, Waiter] | None:
        """Return the first of a line that still waits, with the number of its arrival."""
        line = self._lines.get(key)
        while line:
            waiter, arrival = next(iter(line.items()))
            if waiter.is_waiting:
                return arrival, waiter
            self.remove(key, waiter)
        return None
