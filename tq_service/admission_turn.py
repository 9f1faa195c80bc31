"""When a write that waits for capacity may be overtaken by others that fit, and when it may not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

PASSED_SECONDS: Final = 10.0
TURN_SECONDS: Final = 5.0


class Waits(Protocol):
    """A write that waits.

    Attributes:
        since: start of its wait, or end of its last turn, by the clock of the turn.
    """

    since: float


class AdmissionTurn:
    """Gives a write that is overtaken by others a turn from time to time, during which nothing overtakes it.

    Writes that fit overtake those that do not, because these may wait for samples of later writes. If freed capacity
    were always taken at once, a large write would never fit. Therefore the write that has waited longest gets a turn
    after being overtaken for 10 seconds, and keeps the capacity freed during it. A turn ends after 5 seconds, because a
    write that can never fit must not block all others; these then proceed for 10 seconds before the next turn.
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
        """Give the turn, if one is due, to the write that has waited longest among writes that do not fit."""
        longest = min(waiting, key=lambda each: each.since, default=None)
        now = self._clock()
        if self.holder is None and longest is not None and now - max(longest.since, self._over_at) >= PASSED_SECONDS:
            self._holder, self._over_at = longest, now + TURN_SECONDS
        return self._holder

    def leave(self, write: Waits) -> None:
        """Record that a write no longer waits."""
        if self._holder is write:
            self._holder, self._over_at = None, self._clock()
