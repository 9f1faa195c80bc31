"""Measure the time a call spends waiting for samples or capacity, separately from its processing time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Final, TypeAlias


class WaitClock:
    """A clock that measures the total wait time of a single call.

    Attributes:
        seconds: total wait time in seconds.
    """

    seconds: float = 0.0


wait_clock: Final[ContextVar[WaitClock | None]] = ContextVar("wait_clock", default=None)
"""The clock of the current call, or None if the call's wait time is not measured."""


WhileWaiting: TypeAlias = Callable[[], AbstractContextManager[None]]
"""A function that returns a context manager to enter while a call waits, for example to count waiting calls."""


class Waiting:
    """Context manager that adds the duration of its `with` block to the current call's wait time.

    Within one call, these `with` blocks must not overlap.
    """

    __slots__ = ("_began_at", "_clock")

    def __enter__(self) -> None:
        self._clock = wait_clock.get()
        if self._clock is not None:
            self._began_at = time.perf_counter()

    def __exit__(self, *_exception: object) -> None:
        if self._clock is not None:
            self._clock.seconds += time.perf_counter() - self._began_at
