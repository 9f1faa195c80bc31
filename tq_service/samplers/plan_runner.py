"""Running samplers so that one that raises, hangs or answers nonsense harms its own request only."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tq_service.daemon_threads import start_daemon_thread
from tq_service.errors import SamplerError, SamplerTimeoutError, TqError
from tq_service.schema import MOST_SAMPLES
from tq_service.state.plan import (
    Indexes,
    LengthSource,
    MustBeAwaited,
    Pack,
    Plan,
    PlanRequest,
    RankPlan,
    Sampler,
    View,
)

T = TypeVar("T")
_LARGEST_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Running:
    """A plan in a thread; hung once the loop's clock has passed its deadline."""

    sampler: str
    deadline: float


class PlanRunner:
    """Runs `plan` of samplers: those that say so inline, others in threads, async ones on the event loop.

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

    def check(self, sampler: Sampler, request: PlanRequest) -> None:
        """Let the sampler check the request.

        Raises:
            TqError: the sampler's own, where the request does not fit its options.
            SamplerError: it raised anything else.
        """
        _guarded(sampler, lambda: sampler.check(request))

    def length(self, sampler: Sampler) -> LengthSource | None:
        """Return the length that a sampler needs.

        Raises:
            TqError: the sampler's own.
            SamplerError: it raised anything else.
        """
        return _guarded(sampler, lambda: sampler.length)

    def run_inline(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return the plan of a sampler that runs inline, well formed, or None where not enough is ready.

        Raises:
            MustBeAwaited: it does not run inline, its plan is a coroutine, or the view says so.
            TqError: the sampler's own.
            SamplerError: it raised anything else, or returned what is no plan for this request.
        """
        runs_inline = _guarded(sampler, lambda: sampler.runs_inline(request))
        if not runs_inline or inspect.iscoroutinefunction(sampler.plan):
            raise MustBeAwaited
        outcome = _guarded(sampler, lambda: sampler.plan(view, request))
        if inspect.isawaitable(outcome):
            asyncio.ensure_future(outcome).cancel()
            raise MustBeAwaited
        return _guarded(sampler, lambda: check_plan(sampler.name, outcome, request))

    async def run(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return the sampler's plan, well formed, or None where not enough is ready.

        It runs in a thread, whether or not it may run inline; a coroutine is awaited on the event loop.

        Raises:
            TqError: the sampler's own.
            SamplerError: it raised anything else, or returned what is no plan for this request.
            SamplerTimeoutError: it took too long, or all threads are taken by hung samplers.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        if inspect.iscoroutinefunction(sampler.plan):
            outcome = _guarded(sampler, lambda: sampler.plan(view, request))
        else:
            outcome = await self._run_in_thread(sampler, view, request, deadline)
        if inspect.isawaitable(outcome):
            outcome = await self._wait_for(sampler, outcome, deadline)
        return _guarded(sampler, lambda: check_plan(sampler.name, outcome, request))

    async def _run_in_thread(
        self, sampler: Sampler, view: View, request: PlanRequest, deadline: float
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

    async def _take_thread(self, sampler: Sampler, deadline: float) -> None:
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

    async def _wait_for(self, sampler: Sampler, plan: Awaitable[Plan | None], deadline: float) -> Plan | None:
        task = asyncio.ensure_future(_guarded_await(sampler, plan))
        task.add_done_callback(_retrieve)
        try:
            await self._wait(sampler, task, deadline)
        finally:
            task.cancel()
        if task.cancelled():  # by the sampler itself: a task that is done cannot be cancelled
            raise _failure(sampler, asyncio.CancelledError())
        return task.result()

    async def _wait(self, sampler: Sampler, future: asyncio.Future[T], deadline: float) -> None:
        """Wait until the future is done, without cancelling it: a sampler may ignore a cancellation."""
        loop = asyncio.get_running_loop()
        done, _ = await asyncio.wait([future], timeout=max(deadline - loop.time(), 0.0))
        if not done:
            raise SamplerTimeoutError(
                f"sampler {sampler.name!r} has not returned within {self._timeout_seconds} s; nothing was consumed; "
                "make it faster, or ask for smaller batches",
                metadata={"sampler": sampler.name},
            )


def _guarded(sampler: Sampler, call: Callable[[], T]) -> T:
    try:
        return call()
    except (TqError, KeyboardInterrupt, MustBeAwaited):
        raise
    except BaseException as error:  # a sampler may raise anything, also SystemExit
        raise _failure(sampler, error) from error


async def _guarded_await(sampler: Sampler, plan: Awaitable[T]) -> T:
    try:
        return await plan
    except (TqError, KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _failure(sampler, error) from error


def _retrieve(task: asyncio.Future[T]) -> None:
    """Retrieve the exception of a task that is not awaited, lest asyncio logs it as never retrieved."""
    if not task.cancelled():
        task.exception()


def _failure(sampler: Sampler, error: BaseException) -> SamplerError:
    return SamplerError(
        f"sampler {sampler.name!r} raised {type(error).__name__}: {error}; nothing was consumed",
        metadata={"sampler": sampler.name, "exception": type(error).__name__},
    )


# Checks of what a sampler returned, before anything is recorded of it


def check_plan(sampler: str, plan: object, request: PlanRequest) -> Plan | None:
    """Return the plan if it is well formed; whether its rows are ready is for the planner to see.

    The plan that is returned can be written down and sent: that must not fail once its rows are consumed. It has plain
    integers for those of numpy, and objects of `tq_service.state.plan` for those of subclasses.

    Raises:
        SamplerError: it is no plan, has not one part for each rank, has no rows, a row twice although it does not say
            which it consumes, positions outside a rank's rows or twice, numbers of steps or packs that differ between
            ranks, or anything that is not of the type `tq_service.state.plan` says.
    """
    if plan is None:
        return None
    if not isinstance(plan, Plan):
        raise _fault(sampler, f"a {type(plan).__name__}", "a Plan or None")
    if not isinstance(plan.ranks, tuple) or not all(isinstance(rank, RankPlan) for rank in plan.ranks):
        raise _fault(sampler, f"ranks of {plan.ranks!r:.80}", "a tuple of RankPlan; Plan.of(parts) makes it")
    if len(plan.ranks) != request.rank_count:
        raise _fault(sampler, f"parts for {len(plan.ranks)} ranks", f"one for each of {request.rank_count}")
    for rank, part in enumerate(plan.ranks):
        _check_array(sampler, f"rows of rank {rank}", part.rows)
        _check_array(sampler, f"dropped rows of rank {rank}", part.dropped)
    rows = np.concatenate([part.rows for part in plan.ranks])
    dropped = np.concatenate([part.dropped for part in plan.ranks])
    if not rows.size and not dropped.size:
        raise _fault(sampler, "a plan without rows", "at least one row, or None where not enough is ready")
    if plan.consumed is None:
        remedy = "every row at most once over all ranks, or `consumed` beside them"
        _check_unique(sampler, "row", rows, remedy)
    else:
        _check_array(sampler, "consumed", plan.consumed)
        _check_unique(sampler, "consumed row", plan.consumed.copy(), "every row at most once")
        rows = np.union1d(rows, plan.consumed)
        if rows.size > MOST_SAMPLES:  # of which each may come as often as a sampler likes
            raise _fault(sampler, f"{rows.size} rows", f"at most {MOST_SAMPLES} over all ranks")
    if dropped.size:
        remedy = "every row at most once, and none that is delivered or consumed"
        _check_unique(sampler, "dropped row", np.concatenate([np.unique(rows), dropped]), remedy)
    _check_shape_of_steps(sampler, plan)
    for rank, part in enumerate(plan.ranks):
        _check_packs(sampler, rank, part)
    return Plan(ranks=tuple(map(_plain_part, plan.ranks)), consumed=plan.consumed)


def _plain_part(part: RankPlan) -> RankPlan:
    steps = tuple(tuple(map(_plain_pack, step)) for step in part.steps)
    return RankPlan(rows=part.rows, steps=steps, dropped=part.dropped)


def _plain_pack(pack: Pack) -> Pack:
    return Pack(positions=pack.positions, lengths=pack.lengths, padding_tokens=int(pack.padding_tokens))


def _check_unique(sampler: str, what: str, rows: Indexes, remedy: str) -> None:
    """Refuse rows of which one comes twice; sorts them."""
    rows.sort()
    is_repeated = rows[1:] == rows[:-1]
    if is_repeated.any():
        raise _fault(sampler, f"{what} {rows[is_repeated.argmax()]} more than once", remedy)


def _check_shape_of_steps(sampler: str, plan: Plan) -> None:
    for rank, part in enumerate(plan.ranks):
        if not isinstance(part.steps, tuple) or not all(isinstance(step, tuple) for step in part.steps):
            raise _fault(
                sampler, f"steps of rank {rank} as {part.steps!r:.80}", "a tuple of steps, each a tuple of Pack"
            )
    shapes = [[len(step) for step in part.steps] for part in plan.ranks]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise _fault(
                sampler,
                f"packs by step {shapes[0]} for rank 0 and {shape} for rank {rank}",
                "the same numbers of steps and packs for every rank; fill up with empty packs",
            )


def _check_packs(sampler: str, rank: int, part: RankPlan) -> None:
    packs = [pack for step in part.steps for pack in step]
    for pack in packs:
        if not isinstance(pack, Pack):
            raise _fault(sampler, f"a {type(pack).__name__} among the packs of rank {rank}", "Pack objects")
        _check_array(sampler, f"positions of rank {rank}", pack.positions)
        if pack.lengths is not None:
            _check_array(sampler, f"lengths of rank {rank}", pack.lengths)
            if pack.lengths.shape != pack.positions.shape:
                raise _fault(
                    sampler, f"{pack.lengths.size} lengths for {pack.positions.size} positions", "one for each"
                )
            if pack.lengths.min(initial=0) < 0:
                raise _fault(sampler, f"a length of {pack.lengths.min()} for rank {rank}", "lengths of 0 or more")
        _check_count(sampler, "padding_tokens", pack.padding_tokens)
    if not packs:
        return
    positions = np.concatenate([pack.positions for pack in packs])
    if positions.size and (positions.min() < 0 or positions.max() >= part.rows.size):
        raise _fault(
            sampler,
            f"positions {positions.min()} to {positions.max()} for rank {rank}",
            f"positions in [0, {part.rows.size}), which index the rank's rows",
        )
    if np.bincount(positions).max(initial=0) > 1:
        raise _fault(sampler, f"position {np.bincount(positions).argmax()} of rank {rank} in two packs", "one at most")


def _check_array(sampler: str, what: str, array: Any) -> None:
    if type(array) is not np.ndarray:  # one with masked values is of another class, and cannot be sent
        raise _fault(sampler, f"{what} as {type(array).__name__}", "a numpy array of int64; Plan.of(parts) converts")
    if array.ndim != 1 or array.dtype != np.int64:
        raise _fault(sampler, f"{what} as {array.dtype} of shape {array.shape}", "one dimension of int64")


def _check_count(sampler: str, what: str, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise _fault(sampler, f"{what} as {type(count).__name__}", "an int")
    if not 0 <= count <= _LARGEST_INT64:
        raise _fault(sampler, f"{what} of {count}", "an int of 0 to 2**63 - 1")


def _fault(sampler: str, got: str, expected: str) -> SamplerError:
    return SamplerError(
        f"sampler {sampler!r} returned {got}, expected {expected}; nothing was consumed", metadata={"sampler": sampler}
    )
