"""What a service does beside its calls, and the end of a service that cannot go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

from tq_service.errors import ServiceFailedError, TqError
from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)
# Of a service that ended by a failure; sysexits.h has it for internal errors of software.
FAILED_EXIT_CODE: Final = 70


class Supervisor:
    """Runs background tasks; the first fault that the service cannot go on from ends it. Confined to one event loop.

    start ... fatal -> what was registered with `on_fatal`, in order -> the owner of the service stops it

    Attributes:
        failure: why the service cannot go on; None: it can.
    """

    def __init__(self) -> None:
        self.failure: ServiceFailedError | None = None
        self._on_fatal: list[Callable[[ServiceFailedError], object]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def on_fatal(self, callback: Callable[[ServiceFailedError], object]) -> None:
        """Call something in the step of the loop in which the service fails: it must neither wait nor take long."""
        self._on_fatal.append(callback)

    def start(self, name: str, work: Coroutine[Any, Any, None], *, may_end: bool = False) -> asyncio.Task[None]:
        """Run a background task until `stop`; it is fatal where it ends by an exception.

        Args:
            name: what it does, for the log.
            work: the task.
            may_end: whether it may end by itself; else that is fatal too.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, may_end=may_end))
        return task

    def _ended(self, task: asyncio.Task[None], *, may_end: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # by its owner, which needs it no more
            return
        error = task.exception()
        if error is not None:
            self.fatal(f"{task.get_name()} ended by {type(error).__name__}: {error}", error)
        elif not may_end and not self._is_stopping:
            self.fatal(f"{task.get_name()} has ended")

    def fatal(self, reason: str, cause: BaseException | None = None) -> None:
        """End the service: it cannot go on. The first call counts, and is logged; later ones do nothing.

        Args:
            reason: why, for the log and the owner.
            cause: the error behind it.
        """
        if self.failure is not None:
            return
        self.failure = ServiceFailedError(
            f"the service has failed and ends: {reason}; start it again", metadata={"cause": reason}
        )
        self.failure.__cause__ = cause
        # An error of ours says all of it in its text; where anything else was raised, the place matters.
        trace = None if isinstance(cause, TqError) else cause
        _log.critical(LogMessage("the service has failed and stops", reason=reason), exc_info=trace)
        for callback in self._on_fatal:
            try:
                callback(self.failure)
            except Exception:
                name = getattr(callback, "__qualname__", callback)
                _log.exception(LogMessage("a callback failed while the service stops", callback=name))

    def raise_failure(self) -> None:
        """Do nothing while the service can go on.

        Raises:
            ServiceFailedError: it has failed.
        """
        if self.failure is not None:
            raise ServiceFailedError(self.failure.message, metadata=self.failure.metadata) from self.failure.__cause__

    async def stop(self) -> None:
        """End all background tasks."""
        self._is_stopping = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def failing_with(supervisor: Supervisor) -> AsyncIterator[None]:
    """Cancel the task in an `async with` when a service fails, and raise the failure there instead.

    A cancellation that comes from outside stays one.

    Raises:
        ServiceFailedError: the service failed meanwhile.
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
    """Do some work every so many seconds until cancelled; a failure is logged, and the next time comes all the same."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:
            name = getattr(work, "__qualname__", work)
            _log.exception(LogMessage("periodic work failed and is tried again", work=name, retry_seconds=seconds))
