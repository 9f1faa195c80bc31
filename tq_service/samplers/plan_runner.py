"""Running samplers so that one that raises, hangs or answers nonsense harms its own request only."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tq_service.domain.plan import Plan, PlanRequest, PlansBatches, View
from tq_service.errors import SamplerError, SamplerTimeoutError, TqError
from tq_service.samplers.daemon_threads import start_daemon_thread
from tq_service.samplers.plan_check import check_plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Running:
    """A plan in a thread; hung once the loop's clock has passed its deadline."""

    sampler: str
    deadline: float


class PlanRunner:
    """Runs `plan` of samplers: quick ones inline, heavy ones in threads, async ones on the event loop.

    A hung thread cannot be killed, so heavy plans have threads of their own, at most `max_threads`. While some of them
    hang the others serve; while all hang, heavy plans are refused at once. A thread that ends after all is free again.
    Threads are daemons and do not keep the process from exiting. Belongs to one event loop.
    """

    def __init__(self, *, max_threads: int = 4, timeout_seconds: float = 30.0) -> None:
        """Make a runner.

        Args:
            max_threads: how many heavy plans may run at the same time, hung ones included.
            timeout_seconds: how long a plan may take, the wait for a thread included.
        """
        if max_threads < 1:
            raise ValueError(f"max_threads: got {max_threads}, expected at least 1")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds: got {timeout_seconds}, expected more than 0")
        self._timeout_seconds = timeout_seconds
        self._max_threads = max_threads
        self._free_threads = asyncio.Semaphore(max_threads)
        self._running: set[_Running] = set()

    @property
    def hung_samplers(self) -> list[str]:
        """Names of the samplers whose threads are past their deadline, one for each thread."""
        now = asyncio.get_running_loop().time()
        return sorted(running.sampler for running in self._running if running.deadline <= now)

    def check(self, sampler: PlansBatches, request: PlanRequest) -> None:
        """Let the sampler check the request.

        Raises:
            TqError: the sampler's own, where the request does not fit its options.
            SamplerError: it raised anything else.
        """
        _guarded(sampler, lambda: sampler.check(request))

    def run_at_once(self, sampler: PlansBatches, view: View, request: PlanRequest) -> Plan | None:
        """Return the plan of a quick sampler, well formed; None where not enough is ready, or it must be awaited.

        Raises:
            TqError: the sampler's own.
            SamplerError: it raised anything else, or returned what is no plan for this request.
        """
        if inspect.iscoroutinefunction(sampler.plan):
            return None
        outcome = _guarded(sampler, lambda: sampler.plan(view, request))
        if inspect.isawaitable(outcome):
            asyncio.ensure_future(outcome).cancel()
            return None
        return _guarded(sampler, lambda: check_plan(sampler.name, outcome, request))

    async def run(self, sampler: PlansBatches, view: View, request: PlanRequest) -> Plan | None:
        """Return the sampler's plan, well formed, or None where not enough is ready.

        Raises:
            TqError: the sampler's own.
            SamplerError: it raised anything else, or returned what is no plan for this request.
            SamplerTimeoutError: it took too long, or all threads are taken by hung samplers.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        if inspect.iscoroutinefunction(sampler.plan) or _guarded(sampler, lambda: sampler.runs_inline(request)):
            outcome = _guarded(sampler, lambda: sampler.plan(view, request))
        else:
            outcome = await self._run_in_thread(sampler, view, request, deadline)
        if inspect.isawaitable(outcome):
            outcome = await self._wait_for(sampler, outcome, deadline)
        return _guarded(sampler, lambda: check_plan(sampler.name, outcome, request))

    async def _run_in_thread(
        self, sampler: PlansBatches, view: View, request: PlanRequest, deadline: float
    ) -> Plan | Awaitable[Plan | None] | None:
        await self._take_thread(sampler, deadline)
        running = _Running(sampler.name, deadline)
        self._running.add(running)

        def free(_: object) -> None:
            self._running.discard(running)
            self._free_threads.release()

        # The thread is free when it ends, which may be long after its caller has gone.
        finished = start_daemon_thread(lambda: sampler.plan(view, request), thread_name=f"tq-plan-{sampler.name}")
        finished.add_done_callback(free)
        await self._wait(sampler, finished, deadline)
        return _guarded(sampler, finished.result())

    async def _take_thread(self, sampler: PlansBatches, deadline: float) -> None:
        hung = self.hung_samplers
        if len(hung) == self._max_threads:
            raise SamplerTimeoutError(
                f"sampler {sampler.name!r} cannot run: all {self._max_threads} threads for planning hang in "
                f"{', '.join(map(repr, sorted(set(hung))))}; fix these samplers and restart the server",
                metadata={"sampler": sampler.name, "hung": ",".join(sorted(set(hung)))},
            )
        try:
            async with asyncio.timeout_at(deadline):
                await self._free_threads.acquire()
        except TimeoutError:
            raise SamplerTimeoutError(
                f"sampler {sampler.name!r} got none of the {self._max_threads} threads for planning within "
                f"{self._timeout_seconds} s; allow more threads, or plan smaller batches",
                metadata={"sampler": sampler.name},
            ) from None

    async def _wait_for(self, sampler: PlansBatches, plan: Awaitable[Plan | None], deadline: float) -> Plan | None:
        task = asyncio.ensure_future(_guarded_await(sampler, plan))
        task.add_done_callback(_retrieve)
        try:
            await self._wait(sampler, task, deadline)
        finally:
            task.cancel()
        if task.cancelled():  # by the sampler itself: a task that is done cannot be cancelled
            raise _failure(sampler, asyncio.CancelledError())
        return task.result()

    async def _wait(self, sampler: PlansBatches, future: asyncio.Future[T], deadline: float) -> None:
        """Wait until the future is done, without cancelling it: a sampler may ignore a cancellation."""
        loop = asyncio.get_running_loop()
        done, _ = await asyncio.wait([future], timeout=max(deadline - loop.time(), 0.0))
        if not done:
            raise SamplerTimeoutError(
                f"sampler {sampler.name!r} has not returned within {self._timeout_seconds} s; nothing was consumed; "
                "make it faster, or ask for smaller batches",
                metadata={"sampler": sampler.name},
            )


def _guarded(sampler: PlansBatches, call: Callable[[], T]) -> T:
    try:
        return call()
    except (TqError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a sampler may raise anything, also SystemExit
        raise _failure(sampler, error) from error


async def _guarded_await(sampler: PlansBatches, plan: Awaitable[T]) -> T:
    try:
        return await plan
    except (TqError, KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _failure(sampler, error) from error


def _retrieve(task: asyncio.Future[T]) -> None:
    """Look at the exception of a task that nobody waits for, lest asyncio complains about it."""
    if not task.cancelled():
        task.exception()


def _failure(sampler: PlansBatches, error: BaseException) -> SamplerError:
    return SamplerError(
        f"sampler {sampler.name!r} raised {type(error).__name__}: {error}; nothing was consumed",
        metadata={"sampler": sampler.name, "exception": type(error).__name__},
    )
