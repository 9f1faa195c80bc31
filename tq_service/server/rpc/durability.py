"""Answers that wait until what they say is durable, so that no client has seen what a crash can undo."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from tq_service.durable.state_store import StateStore
from tq_service.errors import DiskFullError
from tq_service.server.rpc.method_table import Method
from tq_service.server.rpc.middleware import Behavior, Caller, Context, Middleware, passing_answers

_RETRY_SECONDS: Final = 1.0


class DurableAnswers(Middleware):
    """Makes answers and errors wait for the state; while that is stuck, calls are refused unmade.

    Calls that fill the disk are refused already when space is short: the rest of it is for those that free some.

    Args:
        state: what answers wait for.
    """

    def __init__(self, state: StateStore) -> None:
        self._state = state

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return what makes the answers of a method wait, unless they say nothing that is not durable yet."""

        async def durable(answer: Any) -> Any:
            if state.has_unflushed:
                await state.wait_durable()
            return answer

        async def call(request: Any, context: Context) -> Any:
            if state.is_failing:
                await state.wait_durable()
            if fills_disk and state.is_disk_low:
                raise DiskFullError(
                    "the disk of the data dir has hardly any space left, so nothing is taken in; clear samples or "
                    "free space, the service goes on by itself",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            try:
                answer = await behavior(request, context)
            except asyncio.CancelledError:
                raise
            except Exception:  # it may reveal a change, such as a key that is known by now
                if state.has_unflushed:
                    await state.wait_durable()
                raise
            if state.has_unflushed:
                await state.wait_durable()
            return answer

        if method.is_answer_durable:
            return behavior
        state, fills_disk = self._state, method.fills_disk
        if method.has_response_stream:
            behavior = passing_answers(method, behavior, durable)
        return call
