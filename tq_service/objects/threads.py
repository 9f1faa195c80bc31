"""Calls that block, in a bounded number of daemon threads that are kept.

Threads of an executor are joined when the interpreter exits, so one hung call of an engine would keep a process alive
for ever. These are not; and a call that does not end in time is left to itself: its thread is lost to later calls until
it ends, the caller gets an error, and what it reads has no way to the caller's memory any more (`Landing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from tq_service.daemon_threads import outcome_of
from tq_service.errors import UnavailableError
from tq_service.objects.base import Buffer
from tq_service.objects.sealed import fill

T = TypeVar("T")


class Landing:
    """Memory of a caller that a call in a thread fills, for as long as the caller waits for it.

    Attributes:
        view: the memory, to be read only.
    """

    def __init__(self, into: memoryview) -> None:
        self.view = into
        self._lock = threading.Lock()
        self._is_closed = False

    def write(self, start: int, data: Buffer) -> None:
        """Copy bytes to it, unless the caller has gone on."""
        with self._lock:
            if not self._is_closed:
                fill(self.view[start : start + len(data)], (memoryview(data),))

    def close(self) -> None:
        """Let nothing be written any more; waits for a copy under way."""
        with self._lock:
            self._is_closed = True


class CallThreads:
    """At most `count` threads for one event loop; calls beyond them wait in order."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._busy_count = 0
        self._idle = asyncio.Event()
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._free = asyncio.Semaphore(count)
        self._is_closed = False

    async def run(self, call: Callable[[], T], *, timeout_seconds: float, landing: Landing | None = None) -> T:
        """Return what a call returns in one of the threads.

        A caller that is cancelled waits for its call to end, or for the time that it has: the call reads memory of the
        caller.

        Args:
            call: what to run.
            timeout_seconds: how long it may wait for a thread and run.
            landing: where the call writes to, closed when the caller goes on without its end.

        Raises:
            UnavailableError: it did not end in time, or no thread was free in time, or `close` was called.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_seconds
        try:
            async with asyncio.timeout_at(until):
                await self._free.acquire()
        except TimeoutError:
            raise self._late(timeout_seconds, "no thread was free") from None
        if self._is_closed:
            self._free.release()
            raise UnavailableError(f"{self._name} is closed; open another one")
        future: asyncio.Future[Callable[[], T]] = loop.create_future()

        def deliver(outcome: Callable[[], T]) -> None:
            self._busy_count -= 1
            self._free.release()
            if not self._busy_count:
                self._idle.set()
            if not future.done():
                future.set_result(outcome)

        def work() -> None:
            outcome = outcome_of(call)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing awaits the result any more
                loop.call_soon_threadsafe(deliver, outcome)

        self._start(work)
        try:
            return await self._await(future, until, timeout_seconds)
        finally:
            if landing is not None:
                landing.close()

    async def _await(self, future: asyncio.Future[Callable[[], T]], until: float, timeout_seconds: float) -> T:
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            remaining = until - asyncio.get_running_loop().time()
            if remaining <= 0:
                break
            try:
                await asyncio.wait((future,), timeout=remaining)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if not future.done():
            future.cancel()
            raise self._late(timeout_seconds, "the call goes on by itself")
        return future.result()()

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Return whether all calls have ended, those too whose callers have gone on, in so much time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._busy_count:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the threads when their calls have ended; does not wait."""
        if not self._is_closed:
            self._is_closed = True
            for _ in self._threads:
                self._calls.put(None)

    def _start(self, work: Callable[[], None]) -> None:
        self._busy_count += 1
        if self._busy_count > len(self._threads):
            name = f"tq-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._loop, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._calls.put(work)

    def _loop(self) -> None:
        while (work := self._calls.get()) is not None:
            work()

    def _late(self, timeout_seconds: float, detail: str) -> UnavailableError:
        return UnavailableError(f"{self._name} did not answer within {timeout_seconds:g} s ({detail})")
