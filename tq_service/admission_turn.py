"""Prevents smaller writes from indefinitely overtaking large writes that wait for capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

PASSED_SECONDS: Final = 10.0
TURN_SECONDS: Final = 5.0


class Waits(Protocol):
    """A write that is waiting for capacity.

    Attributes:
        since: time at which the write started waiting or its last turn ended, according to the clock of
            `AdmissionTurn`.
    """

    since: float


class AdmissionTurn:
    """A scheduler that occasionally gives an overtaken write a turn, during which no other write can overtake it.

    A write that fits may overtake writes that do not, because samples from later writes may be needed before capacity
    is freed. However, a large write would never fit if other writes always took freed capacity immediately. Therefore,
    after 10 seconds of waiting, the longest-waiting write gets a turn, and all capacity freed during the turn is
    reserved for it. A turn ends after 5 seconds, so a write that can never fit does not block all others. After a turn,
    other writes may overtake the waiting write for another 10 seconds before the next turn starts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._holder: Waits | None = None
        self._over_at = clock()  # end of the most recent turn

    @property
    def over_at(self) -> float | None:
        """End time of the current turn, or None if no write has a turn."""
        return None if self.holder is None else self._over_at

    @property
    def holder(self) -> Waits | None:
        """The write that has the current turn, or None if no write has a turn."""
        if self._holder is not None and self._clock() >= self._over_at:
            self._holder.since = self._over_at
            self._holder = None
        return self._holder

    def begin(self, waiting: Iterable[Waits]) -> Waits | None:
        """If a turn is due, give it to the write that has waited longest.

        Return the write that has the current turn, or None if no write has a turn.
        """
        longest = min(waiting, key=lambda each: each.since, default=None)
        now = self._clock()
        if self.holder is None and longest is not None and now - max(longest.since, self._over_at) >= PASSED_SECONDS:
            self._holder, self._over_at = longest, now + TURN_SECONDS
        return self._holder

    def leave(self, write: Waits) -> None:
        """End the current turn if it belongs to `write`. Call this method when the write stops waiting."""
        if self._holder is write:
            self._holder, self._over_at = None, self._clock()
