"""Futures and callbacks that wait until records of a log are durable. Confined to one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)


class DurabilityWaiters:
    """Futures and callbacks of a log in the order of the records that they wait for."""

    def __init__(self) -> None:
        self._callbacks: deque[tuple[int, Callable[[], None]]] = deque()  # each with the number that it waits for
        self._futures: deque[tuple[int, asyncio.Future[None]]] = deque()

    def future(self, number: int) -> asyncio.Future[None]:
        """Return what is done once a record is durable, or fails as the next commit does."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.append((number, done))
        return done

    def add_callback(self, number: int, callback: Callable[[], None]) -> None:
        """Call something once a record is durable."""
        self._callbacks.append((number, callback))

    def drop_callbacks(self) -> None:
        """Call nothing any more, since memory may differ from the log."""
        self._callbacks.clear()

    def settle(self, durable: int, error: BaseException | None = None) -> None:
        """Notify what waits for records up to one that is durable; with an error, all other futures too."""
        while self._futures and (error is not None or self._futures[0][0] <= durable):
            _, done = self._futures.popleft()
            if done.done():
                continue  # the caller that awaited it was cancelled
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        while self._callbacks and self._callbacks[0][0] <= durable:
            _, callback = self._callbacks.popleft()
            try:
                callback()
            except Exception:
                _log.exception(LogMessage("a callback failed after its changes were durable"))
