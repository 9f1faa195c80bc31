"""Runs the background tasks of a service and shuts down the service after a fatal failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

from tq_service.errors import ServiceFailedError, TqError
from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)
# Exit code of a failed service, from sysexits.h (EX_SOFTWARE).
FAILED_EXIT_CODE: Final = 70


class Supervisor:
    """Runs background tasks and stops the service after a fatal failure. Use a supervisor from a single event loop.

    running -> `fatal` -> callbacks registered with `on_fatal`, in order -> the owner stops the service

    Attributes:
        failure: error that describes why the service failed, or None if the service has not failed.
    """

    def __init__(self) -> None:
        self.failure: ServiceFailedError | None = None
        self._on_fatal: list[Callable[[ServiceFailedError], object]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def on_fatal(self, callback: Callable[[ServiceFailedError], object]) -> None:
        """Register a callback to be run as soon as a fatal failure occurs. The callback must not block."""
        self._on_fatal.append(callback)

    def start(self, name: str, work: Coroutine[Any, Any, None], *, may_end: bool = False) -> asyncio.Task[None]:
        """Run a background task until `stop` is called. An exception raised by the task is a fatal failure.

        Args:
            name: description of the task in log messages.
            work: coroutine to run as the task.
            may_end: whether the task may end before `stop` is called. If False, an early end is a fatal failure.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, may_end=may_end))
        return task

    def _ended(self, task: asyncio.Task[None], *, may_end: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # cancelled by its owner or by `stop`
            return
        error = task.exception()
        if error is not None:
            self.fatal(f"{task.get_name()} ended by {type(error).__name__}: {error}", error)
        elif not may_end and not self._is_stopping:
            self.fatal(f"{task.get_name()} has ended")

    def fatal(self, reason: str, cause: BaseException | None = None) -> None:
        """Report a fatal failure. Only the first failure is logged and takes effect.

        Args:
            reason: reason for the failure, shown in the log and in `failure`.
            cause: exception that caused the failure, or None if there is none.
        """
        if self.failure is not None:
            return
        self.failure = ServiceFailedError(
            f"the service has failed and is stopping: {reason}; restart it", metadata={"cause": reason}
        )
        self.failure.__cause__ = cause
        # The message of a `TqError` is sufficient, but other exceptions need their traceback.
        trace = None if isinstance(cause, TqError) else cause
        _log.critical(LogMessage("the service has failed and is stopping", reason=reason), exc_info=trace)
        for callback in self._on_fatal:
            try:
                callback(self.failure)
            except Exception:
                name = getattr(callback, "__qualname__", callback)
                _log.exception(LogMessage("a callback failed while the service was stopping", callback=name))

    def raise_failure(self) -> None:
        """Raise the recorded failure if the service has failed.

        Raises:
            ServiceFailedError: the service has failed.
        """
        if self.failure is not None:
            raise ServiceFailedError(self.failure.message, metadata=self.failure.metadata) from self.failure.__cause__

    async def stop(self) -> None:
        """Cancel all background tasks and wait for them to end."""
        self._is_stopping = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def failing_with(supervisor: Supervisor) -> AsyncIterator[None]:
    """Cancel the body of an `async with` block when the service fails, and raise the failure when the block ends.

    If the block is also cancelled from outside, the cancellation takes precedence over the failure.

    Raises:
        ServiceFailedError: the service has failed.
    """
    scope = asyncio.timeout(None)

    def expire(_failure: ServiceFailedError) -> None:
        with contextlib.suppress(RuntimeError):  # the block has ended
            scope.reschedule(asyncio.get_running_loop().time())

    supervisor.on_fatal(expire)
    try:
        async with scope:
            yield
    except Exception:
        supervisor.raise_failure()
        raise
    supervisor.raise_failure()


async def regularly(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Call a coroutine function at regular intervals until cancelled.

    If a call raises an error, the error is logged, and the next call still runs.
    """
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:
            name = getattr(work, "__qualname__", work)
            _log.exception(LogMessage("periodic work failed and will be retried", work=name, retry_seconds=seconds))
