"""Turns for writes that wait for capacity, which protect a large write from being overtaken forever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

PASSED_SECONDS: Final = 10.0
TURN_SECONDS: Final = 5.0


class Waits(Protocol):
    """A write that waits for capacity.

    Attributes:
        since: when its wait began or its last turn ended, on the clock of `AdmissionTurn`.
    """

    since: float


class AdmissionTurn:
    """Gives overtaken writes an occasional turn, during which no other write may overtake them.

    Writes that fit may overtake writes that do not, because the latter may be waiting for samples of later writes. But
    if freed capacity were always taken at once, a large write would never fit. Therefore the longest-waiting write gets
    a turn after being overtaken for 10 seconds, and capacity freed during its turn is reserved for it. A turn ends
    after 5 seconds, because a write that can never fit must not block all others. The others then proceed for 10
    seconds before the next turn.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._holder: Waits | None = None
        self._over_at = clock()  # end of the last turn

    @property
    def over_at(self) -> float | None:
        """End of the current turn, or None between turns."""
        return None if self.holder is None else self._over_at

    @property
    def holder(self) -> Waits | None:
        """The write whose turn it is, or None."""
        if self._holder is not None and self._clock() >= self._over_at:
            self._holder.since = self._over_at
            self._holder = None
        return self._holder

    def begin(self, waiting: Iterable[Waits]) -> Waits | None:
        """Start a turn, if due, for the longest-waiting of the given writes; return the write whose turn it is."""
        longest = min(waiting, key=lambda each: each.since, default=None)
        now = self._clock()
        if self.holder is None and longest is not None and now - max(longest.since, self._over_at) >= PASSED_SECONDS:
            self._holder, self._over_at = longest, now + TURN_SECONDS
        return self._holder

    def leave(self, write: Waits) -> None:
        """Record that a write no longer waits."""
        if self._holder is write:
            self._holder, self._over_at = None, self._clock()
