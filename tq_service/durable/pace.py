"""Work in Python on a thread beside an event loop, which gives way to it often enough."""

from __future__ import annotations

import time
from typing import Final

_WORK_SECONDS: Final = 0.0005
_REST_SECONDS: Final = 0.0001


class Pace:
    """Lets other threads run every half a millisecond.

    A thread that works in Python is made to do so every 5 ms only, and the loop would wait that long for every step.
    """

    def __init__(self) -> None:
        self._resumed_at = time.perf_counter()

    def step(self) -> None:
        """Rest for a moment where that is due."""
        if time.perf_counter() - self._resumed_at > _WORK_SECONDS:
            time.sleep(_REST_SECONDS)
            self._resumed_at = time.perf_counter()
