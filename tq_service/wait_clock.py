"""Measures the time that a call waits for samples or capacity, separately from its processing time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Final, TypeAlias


class WaitClock:
    """Adds up the waits of one call.

    Attributes:
        seconds: total wait time.
    """

    seconds: float = 0.0


wait_clock: Final[ContextVar[WaitClock | None]] = ContextVar("wait_clock", default=None)
"""The clock of the current call; None if its waits are not measured."""


WhileWaiting: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Returns a context manager that is active while a call waits, for example to count waiting calls."""


class Waiting:
    """Counts the time of a `with` block as a wait of the current call. Such blocks must not overlap in one call."""

    __slots__ = ("_began_at", "_clock")

    def __enter__(self) -> None:
        self._clock = wait_clock.get()
        if self._clock is not None:
            self._began_at = time.perf_counter()

    def __exit__(self, *_exception: object) -> None:
        if self._clock is not None:
            self._clock.seconds += time.perf_counter() - self._began_at
