"""Heartbeats, which call a method periodically while its object exists, in an asyncio task or in a thread.

Neither form keeps the object alive; otherwise, the loop of a failed worker would continue to extend leases.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from weakref import WeakMethod

from tq_service.client.transport import logging_failure


class AsyncHeartbeat:
    """A task in the running event loop that awaits a bound method every `interval_seconds` and logs its errors.

    Args:
        beat: the bound method to call; only a weak reference to its object is kept.
        interval_seconds: seconds between calls.
    """

    def __init__(self, beat: Callable[[], Awaitable[None]], interval_seconds: float) -> None:
        self._task = asyncio.get_running_loop().create_task(_beat_async(WeakMethod(beat), interval_seconds))

    def stop(self) -> None:
        """Stop calling the method, and cancel a call in progress."""
        if not self._task.get_loop().is_closed():
            self._task.cancel()


async def _beat_async(method: WeakMethod[Callable[[], Awaitable[None]]], interval_seconds: float) -> None:
    while True:
        await asyncio.sleep(interval_seconds)
        if (beat := method()) is None:
            return
        with logging_failure():
            await beat()
        del beat


class Heartbeat:
    """A daemon thread that calls a bound method every `interval_seconds` and logs its errors.

    Args:
        beat: the bound method to call; only a weak reference to its object is kept.
        interval_seconds: seconds between calls.
    """

    def __init__(self, beat: Callable[[], None], interval_seconds: float) -> None:
        self._stopped = threading.Event()
        arguments = (WeakMethod(beat), interval_seconds, self._stopped)
        threading.Thread(target=_beat, args=arguments, name="tq-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Stop calling the method, without interrupting a call in progress."""
        self._stopped.set()


def _beat(method: WeakMethod[Callable[[], None]], interval_seconds: float, stopped: threading.Event) -> None:
    while not stopped.wait(interval_seconds):
        if (beat := method()) is None:
            return
        with logging_failure():
            beat()
        del beat
