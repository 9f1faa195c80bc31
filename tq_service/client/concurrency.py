"""What differs between asyncio and threads: each thing in two forms with one interface.

`scripts/unasync.py` makes the sync client of the async one by putting the second form in the place of the first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from tq_service.errors import ForkedClientError, TqError
from tq_service.log_message import LogMessage

T = TypeVar("T")

_log = logging.getLogger(__name__)

async_sleep = asyncio.sleep
sleep = time.sleep


async def async_gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run calls at the same time; the first failure cancels the others and is raised."""
    if len(calls) == 1:
        return [await calls[0]()]
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def gather(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run calls at the same time, each in a thread; the first failure is raised when all have ended."""
    if len(calls) == 1:
        return [calls[0]()]
    with ThreadPoolExecutor(max_workers=max(1, len(calls)), thread_name_prefix="tq-client") as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def async_is_of_closing(error: BaseException) -> bool:
    """Whether grpc ends a call in this way where its channel has been closed; not where its caller is cancelled."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return isinstance(error, grpc.aio.UsageError)


def is_of_closing(error: BaseException) -> bool:
    """Whether grpc refuses a call in this way where its channel has been closed."""
    return isinstance(error, ValueError) and not isinstance(error, TqError)


class AsyncBackgroundCalls:
    """Calls that go on when their caller has returned: tasks that `drain` waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, call: Callable[[], Awaitable[None]]) -> None:
        """Start a call; its failure is logged."""
        task = asyncio.get_running_loop().create_task(self._logged(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait for the calls that are still running."""
        if self._tasks:
            await asyncio.gather(*self._tasks)

    @staticmethod
    async def _logged(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except TqError as error:
            _log.warning(LogMessage("a background call failed", error=error))


class BackgroundCalls:
    """Calls that are made before their caller returns: at once."""

    def run(self, call: Callable[[], None]) -> None:
        """Make a call; its failure is logged."""
        try:
            call()
        except TqError as error:
            _log.warning(LogMessage("a background call failed", error=error))

    def drain(self) -> None:
        """Do nothing: all calls have been made."""


# Whether this process was forked from one that had an asyncio channel: another one hangs or aborts here.
_inherited_async_channel = False
_has_async_channel = False


def _note_fork() -> None:
    global _inherited_async_channel  # noqa: PLW0603  (a fact about the process)
    _inherited_async_channel = _inherited_async_channel or _has_async_channel


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class AsyncHome:
    """The process and event loop that asyncio channels belong to; they work nowhere else."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None

    def moved(self) -> bool:
        """Return False: the channels can be used here.

        Raises:
            ForkedClientError: this is a forked child, or another event loop.
        """
        global _has_async_channel
        if self._pid != os.getpid() or _inherited_async_channel:
            raise ForkedClientError(
                "an AsyncClient cannot be used in a process forked from one that has used it: gRPC's asyncio channels "
                "hang there. Start the process by spawn (multiprocessing.get_context('spawn')), or use tq.Client",
                metadata={"cause": "fork"},
            )
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, _has_async_channel = loop, True
        if self._loop is not loop:
            raise ForkedClientError(
                "an AsyncClient belongs to the event loop of its first call, and this is another one; make a client "
                "for each loop, and in other processes (started by spawn) a client for each process",
                metadata={"cause": "event loop"},
            )
        return False


class Home:
    """The process that channels belong to."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def moved(self) -> bool:
        """Whether this is a forked child of the process that the channels belong to, so that new ones are needed."""
        return self._pid != os.getpid()
