"""Answers that wait until what they say is durable, so that nobody has seen what a crash can take back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

Behavior = Callable[[Any, Any], Awaitable[Any]]


class State(Protocol):
    """What is written down, and how far."""

    @property
    def is_behind(self) -> bool:
        """Whether something was written down that is not durable yet."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether nothing could be written when it was last tried."""
        ...

    async def durable(self) -> None:
        """Return once all that was written down so far is durable; raises TqError where that cannot be now."""
        ...


def settled(behavior: Behavior, state: State) -> Behavior:
    """Return a handler whose answers and errors wait for the state; while it is stuck, calls are refused unmade."""

    async def call(request: Any, context: Any) -> Any:
        if state.is_stuck:
            await state.durable()
        try:
            answer = await behavior(request, context)
        except asyncio.CancelledError:
            raise
        except Exception:  # it may tell of a change, such as a key that is known by now
            if state.is_behind:
                await state.durable()
            raise
        if state.is_behind:
            await state.durable()
        return answer

    return call
