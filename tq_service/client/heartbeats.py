"""Heartbeats, which call a method periodically from an asyncio task or a thread while the method's object exists.

A heartbeat does not keep the object alive. If it did, the heartbeat of a failed worker would continue to extend leases.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from weakref import WeakMethod

from tq_service.client.transport import logging_failure


class AsyncHeartbeat:
    """A task in the running event loop that awaits a bound method every `interval_seconds` seconds and logs any errors.

    Args:
        beat: the bound method to call. The heartbeat holds only a weak reference to the method's object.
        interval_seconds: number of seconds between calls.
    """

    def __init__(self, beat: Callable[[], Awaitable[None]], interval_seconds: float) -> None:
        self._task = asyncio.get_running_loop().create_task(_beat_async(WeakMethod(beat), interval_seconds))

    def stop(self) -> None:
        """Stop calling the method, and cancel any running call."""
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
    """A daemon thread that calls a bound method every `interval_seconds` seconds and logs any errors.

    Args:
        beat: the bound method to call. The heartbeat holds only a weak reference to the method's object.
        interval_seconds: number of seconds between calls.
    """

    def __init__(self, beat: Callable[[], None], interval_seconds: float) -> None:
        self._stopped = threading.Event()
        arguments = (WeakMethod(beat), interval_seconds, self._stopped)
        threading.Thread(target=_beat, args=arguments, name="tq-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Stop calling the method. A running call is not interrupted."""
        self._stopped.set()


def _beat(method: WeakMethod[Callable[[], None]], interval_seconds: float, stopped: threading.Event) -> None:
    while not stopped.wait(interval_seconds):
        if (beat := method()) is None:
            return
        with logging_failure():
            beat()
        del beat
