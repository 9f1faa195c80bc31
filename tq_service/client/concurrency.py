"""What differs between asyncio and threads: each thing in two forms with one interface.

`scripts/unasync.py` makes the sync client of the async one by putting the second form in the place of the first.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, Protocol, TypeVar

import grpc
import numpy as np

from tq_service.errors import ForkedClientError, TqError
from tq_service.log_message import LogMessage
from tq_service.wire.columns import is_tensor

T = TypeVar("T")

_log = logging.getLogger(__name__)
_MOST_VALUES: Final = 128  # looked at, and encoded, in about the time that a thread takes to begin
_BYTES_A_VALUE: Final = 4096  # copied in about the time that a value takes

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
        futures = [pool.submit(contextvars.copy_context().run, call) for call in calls]
        return [future.result() for future in futures]


async def async_unless_light(work: Callable[[], T], *inputs: Any) -> T:
    """Return what some work returns: a thread does it, so that the event loop goes on, unless its inputs are light."""
    return work() if are_light(inputs) else await asyncio.to_thread(work)


def unless_light(work: Callable[[], T], *_inputs: Any) -> T:
    """Return what some work returns: the caller's thread does it."""
    return work()


def are_light(values: Iterable[Any]) -> bool:
    """Whether little is to be done for values, of which only a few are looked at."""
    return _left_after(values, _MOST_VALUES) > 0


def answer_weight(value_count: int, value_bytes: int) -> range:
    """Return what weighs as much as values of so many bytes that were received; more if a library is imported first."""
    is_ready = "tensordict" in sys.modules or not _is_installed("tensordict")
    return range(value_count + value_bytes // _BYTES_A_VALUE if is_ready else _MOST_VALUES)


@cache
def _is_installed(name: str) -> bool:
    return find_spec(name) is not None


def _left_after(values: Iterable[Any], left: int) -> int:
    """Return how many values more may be looked at after these; 0 or less if there are too many."""
    for value in values:
        left -= 1 + _copied_bytes(value) // _BYTES_A_VALUE
        if left > 0 and hasattr(value, "batch_size"):  # of tensordict: columns, or one value for each row
            is_columns = type(value).__name__ == "TensorDict"
            left = _left_after(value.values(), left) if is_columns else left - math.prod(value.batch_size)
        elif left > 0 and isinstance(value, Mapping):
            left = _left_after(value.values(), left - len(value) // 2)
        elif left > 0 and _is_list(value):
            left = _left_after(value, left) if len(value) < left else 0
        if left <= 0:
            break
    return left


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes | bytearray | memoryview)


def _copied_bytes(value: Any) -> int:
    """Return the bytes of a value that are copied to encode it, at least; those on a device are waited for."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, np.ndarray):
        is_view = value.flags.c_contiguous and value.dtype.kind not in "OUST"
        return 0 if is_view else value.size * max(value.itemsize, _BYTES_A_VALUE if value.dtype.kind in "OUST" else 1)
    if not is_tensor(value):
        return 0
    if value.device.type != "cpu":
        return _MOST_VALUES * _BYTES_A_VALUE
    return 0 if not value.is_nested and value.is_contiguous() else value.numel() * value.element_size()


def async_is_of_closing(error: BaseException) -> bool:
    """Whether grpc ends a call in this way where its channel has been closed; not where its caller is cancelled."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return isinstance(error, grpc.aio.UsageError)


def is_of_closing(error: BaseException) -> bool:
    """Whether grpc refuses a call in this way where its channel has been closed."""
    return isinstance(error, ValueError) and not isinstance(error, TqError)


async def async_next_answer(call: Any) -> Any | None:
    """Return the next answer of a stream, None at its end, and where it was cancelled by this process."""
    try:
        answer = await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return None
    return None if answer is grpc.aio.EOF else answer


def next_answer(call: Any) -> Any | None:
    """Return the next answer of a stream, None at its end, and where it was cancelled by this process."""
    try:
        return next(call, None)
    except grpc.RpcError:
        if call.cancelled():
            return None
        raise


class AsyncBackgroundCalls:
    """Calls that go on when their caller has returned: tasks that `drain` waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, call: Callable[[], Awaitable[None]]) -> None:
        """Start a call; its failure is logged."""
        for task in self._tasks.copy():
            if task.get_loop().is_closed():  # it will not be done
                self._tasks.discard(task)
        task = asyncio.get_running_loop().create_task(self._logged(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait for the calls of this loop that are still running."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._tasks.copy() if task.get_loop() is loop))

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


class AsyncClosable(Protocol):
    """What is closed by the event loop that it is of."""

    async def aclose(self) -> None:
        """Close it."""
        ...

    def drop(self) -> None:
        """Close what needs no event loop."""
        ...


class AsyncHome:
    """The process that asyncio channels belong to, and the event loops in it: a channel works in its own loop only."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def place(self) -> asyncio.AbstractEventLoop:
        """Return where channels that are used now must have been opened: the running loop.

        Raises:
            ForkedClientError: this is a forked child.
        """
        global _has_async_channel  # noqa: PLW0603  (a fact about the process)
        if self._pid != os.getpid() or _inherited_async_channel:
            raise ForkedClientError(
                "an AsyncClient cannot be used in a process forked from one that has used it: gRPC's asyncio channels "
                "hang there. Start the process by spawn (multiprocessing.get_context('spawn')), or use tq.Client",
                metadata={"cause": "fork"},
            )
        _has_async_channel = True
        return asyncio.get_running_loop()

    @staticmethod
    def is_over(place: asyncio.AbstractEventLoop) -> bool:
        """Whether channels of a loop will not be used any more, so that they need not be kept."""
        return place.is_closed()

    @staticmethod
    def leave(place: asyncio.AbstractEventLoop, channels: AsyncClosable) -> None:
        """Close channels of another loop: by that loop where it runs, else they go by themselves.

        It is not waited for, since that loop may be waiting for this one.
        """
        if place.is_running():
            place.call_soon_threadsafe(lambda: place.create_task(channels.aclose()))
        else:
            channels.drop()


# Channels of a parent process: closing them in a forked child would hang, and so may their destructors.
_ABANDONED: Final[list[object]] = []


class Home:
    """The process that channels belong to: a forked child needs channels of its own."""

    @staticmethod
    def place() -> int:
        """Return where channels that are used now must have been opened: this process."""
        return os.getpid()

    @staticmethod
    def is_over(place: int) -> bool:
        """Whether channels are those of a parent process."""
        return place != os.getpid()

    @staticmethod
    def leave(place: int, channels: object) -> None:
        """Leave channels of a parent process as they are."""
        _ABANDONED.append(channels)
