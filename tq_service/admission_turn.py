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
    """Lets a write that is passed by smaller ones have a turn from time to time, in which nothing passes it.

    Writes that fit pass those that do not: these may wait for the very samples that come behind them. Where capacity is
    freed and taken all the time a large write would never fit. So the one that has waited longest has a turn once it
    has been passed for 10 seconds, and keeps what is freed meanwhile. A turn is over after 5 seconds, since a write that
    can never fit must not stop all others; these then go on for 10 seconds before the next turn.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._holder: Waits | None = None
        self._over_at = clock()

    @property
    def over_at(self) -> float | None:
        """When the turn is over, or None if there is none."""
        return None if self._holder is None else self._over_at

    def holder(self, waiting: Iterable[Waits]) -> Waits | None:
        """Return which of the writes that wait, and do not fit, has the turn now; None: none has."""
        now, waiting = self._clock(), list(waiting)
        if self._holder is not None and (now >= self._over_at or self._holder not in waiting):
            self._holder.since = self._over_at = min(now, self._over_at)
            self._holder = None
        if self._holder is None and waiting:
            longest = min(waiting, key=lambda each: each.since)
            if now - max(longest.since, self._over_at) >= PASSED_SECONDS:
                self._holder, self._over_at = longest, now + TURN_SECONDS
        return self._holder
