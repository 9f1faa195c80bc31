"""Calls that run in daemon threads and are awaited on the event loop.

The interpreter joins executor threads when it exits, so a single hung call would keep the process from exiting. The
interpreter does not join daemon threads. Starting a thread is cheap compared to the calls made through this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def start_daemon_thread(call: Callable[[], T], *, thread_name: str) -> asyncio.Future[Callable[[], T]]:
    """Run `call` in a new daemon thread.

    Returns:
        A future whose result is the function that `outcome_of` returns. The outcome is wrapped in a function because a
        future cannot hold every exception. Cancelling the future does not stop the thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Callable[[], T]] = loop.create_future()

    def deliver(outcome: Callable[[], T]) -> None:
        if not future.done():  # the caller that awaits the future may have been cancelled
            future.set_result(outcome)

    def run() -> None:
        outcome = outcome_of(call)
        with contextlib.suppress(RuntimeError):  # if the loop is closed, nothing awaits the result
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=run, name=thread_name, daemon=True).start()
    return future


async def run_in_daemon_thread(call: Callable[[], T], *, thread_name: str) -> T:
    """Run `call` in a new daemon thread and return its result."""
    outcome = await start_daemon_thread(call, thread_name=thread_name)
    return outcome()


def outcome_of(call: Callable[[], T]) -> Callable[[], T]:
    """Make a call, and return a function that returns the call's result or raises its exception."""
    try:
        result = call()
    except BaseException as error:  # raised again in the caller that awaits the call
        raised = error

        def reraise() -> T:
            raise raised

        return reraise
    return lambda: result
