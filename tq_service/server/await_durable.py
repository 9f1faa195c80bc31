"""Answers that wait until what they say is durable, so that nobody has seen what a crash can take back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from tq_service.errors import DiskFullError

_RETRY_SECONDS: Final = 1.0
Behavior = Callable[[Any, Any], Awaitable[Any]]


class DurableState(Protocol):
    """What is written down, and how far."""

    @property
    def has_unflushed(self) -> bool:
        """Whether something was written down that is not durable yet."""
        ...

    @property
    def is_failing(self) -> bool:
        """Whether nothing could be written when it was last tried."""
        ...

    @property
    def is_disk_low(self) -> bool:
        """Whether there is hardly any room left to write to."""
        ...

    async def wait_durable(self) -> None:
        """Return once all that was written down so far is durable; raises TqError where that cannot be now."""
        ...


def await_durable(behavior: Behavior, state: DurableState, *, fills_disk: bool = False) -> Behavior:
    """Return a handler whose answers and errors wait for the state; while it is stuck, calls are refused unmade.

    Calls that fill the disk are refused already when it is short: what is left is for those that make room.
    """

    async def call(request: Any, context: Any) -> Any:
        if state.is_failing:
            await state.wait_durable()
        if fills_disk and state.is_disk_low:
            raise DiskFullError(
                "the disk of the data dir has hardly any room left, so nothing is taken in; clear samples or "
                "free space, the service goes on by itself",
                retry_after_seconds=_RETRY_SECONDS,
            )
        try:
            answer = await behavior(request, context)
        except asyncio.CancelledError:
            raise
        except Exception:  # it may tell of a change, such as a key that is known by now
            if state.has_unflushed:
                await state.wait_durable()
            raise
        if state.has_unflushed:
            await state.wait_durable()
        return answer

    return call
