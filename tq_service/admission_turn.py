"""When a write that waits for capacity may be passed by others that fit, and when it may not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

PASSED_SECONDS: Final = 10.0
TURN_SECONDS: Final = 5.0


class Waits(Protocol):
    """A write that waits.

    Attributes:
        since: when its wait began, or its last turn was over, by the clock of the turn.
    """

    since: float


class AdmissionTurn:
    """Gives a write that others pass a turn from time to time, in which nothing passes it.

    Writes that fit pass those that do not, since these may wait for samples that come behind them. If capacity is
    freed and taken all the time, a large write would never fit. So the one that has waited longest gets a turn once
    it has been passed for 10 seconds, and keeps what is freed meanwhile. A turn is over after 5 seconds, since a write
    that can never fit must not stop all others; these then go on for 10 seconds before the next turn.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._holder: Waits | None = None
        self._over_at = clock()  # of the last turn

    @property
    def over_at(self) -> float | None:
        """When the turn is over, or None if there is none."""
        return None if self.holder is None else self._over_at

    @property
    def holder(self) -> Waits | None:
        """The write that has the turn now, or None if none has."""
        if self._holder is not None and self._clock() >= self._over_at:
            self._holder.since = self._over_at
            self._holder = None
        return self._holder

    def begin(self, waiting: Iterable[Waits]) -> Waits | None:
        """Give the turn to the one of some writes that do not fit that has waited longest, where it is due for it."""
        longest = min(waiting, key=lambda each: each.since, default=None)
        now = self._clock()
        if self.holder is None and longest is not None and now - max(longest.since, self._over_at) >= PASSED_SECONDS:
            self._holder, self._over_at = longest, now + TURN_SECONDS
        return self._holder

    def leave(self, write: Waits) -> None:
        """Take note of a write that no longer waits."""
        if self._holder is write:
            self._holder, self._over_at = None, self._clock()
