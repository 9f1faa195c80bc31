"""Loads samplers by name, and runs them in a way that protects the service from faulty samplers.

A sampler can be built in, registered, imported from an installed package, or imported from an arbitrary module. If a
sampler raises an exception, hangs or returns an invalid plan, only the request that named the sampler fails.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.metadata
import inspect
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any, Final, TypeVar

import numpy as np

from tq_service.daemon_threads import run_in_daemon_thread, start_daemon_thread
from tq_service.errors import InvalidArgumentError, SamplerError, SamplerTimeoutError, TqError, nearest
from tq_service.results import SamplerDescription
from tq_service.samplers.by_length import PackedSampler, SeqlenBalancedSampler, TokenBudgetSampler
from tq_service.samplers.by_order import ChosenSampler, GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from tq_service.samplers.options import build_sampler, describe_sampler, whole_numbers
from tq_service.samplers.replay import ReplaySampler
from tq_service.schema import MOST_SAMPLES
from tq_service.state.plan import Indexes, LengthSource, MustBeAwaited, Pack, Plan, PlanRequest, RankPlan, Sampler, View

T = TypeVar("T")
ENTRY_POINT_GROUP: Final = "tq_service.samplers"
BUILT_IN: Final[tuple[type[Sampler], ...]] = (
    SequentialSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    TokenBudgetSampler,
    PackedSampler,
    ReplaySampler,
    ChosenSampler,
)
_LARGEST_INT64: Final = 2**63 - 1


class SamplerRegistry:
    """A registry that resolves sampler names to sampler objects and validates their options.

    A name refers to a built-in sampler, a registered sampler, or an entry point in the `tq_service.samplers` group. If
    the service allows imports, a name can also have the form `module:Class`. Third-party samplers are imported in a
    thread on first use. Samplers are stateless, so a single instance serves all requests with the same options. Use a
    registry on only one event loop.
    """

    def __init__(self, *, allow_import: bool = False, max_instances: int = 256) -> None:
        """Create a registry that contains the built-in samplers.

        Args:
            allow_import: whether clients may request any importable sampler as `module:Class`. With this setting,
                clients can make the service import any installed module.
            max_instances: maximum number of sampler objects to cache.
        """
        self._allow_import = allow_import
        self._max_instances = max_instances
        self._classes: dict[str, type[Sampler]] = {kind.name: kind for kind in BUILT_IN}
        self._imported: dict[str, type[Sampler]] = {}
        self._instances: OrderedDict[tuple[str, str], Sampler] = OrderedDict()

    def register(self, name: str, cls: type[Sampler]) -> None:
        """Register a sampler class under a name.

        Raises:
            ValueError: the name is empty, contains a colon or belongs to a different class, or `cls` is not a Sampler.
        """
        if not name or ":" in name:
            raise ValueError(f"name: got {name!r}, expected a non-empty name without a colon")
        if self._classes.get(name, cls) is not cls:
            raise ValueError(
                f"name: {name!r} is already used by {self._classes[name].__qualname__}; choose a different name"
            )
        _check_class(name, cls)
        self._classes[name] = cls

    async def resolve(self, name: str, config: Mapping[str, object] | None = None) -> Sampler:
        """Return the sampler with this name and these options. The sampler is created on first use.

        Raises:
            InvalidArgumentError: the sampler does not exist or cannot be loaded, or an option is unknown, missing or
                invalid.
        """
        config = whole_numbers(dict(config or {}))
        try:
            config_json = json.dumps(config, sort_keys=True)
        except (TypeError, ValueError):  # options that cannot be encoded as JSON cannot be a cache key
            return build_sampler(name, await self._class(name), config)
        return await self.resolve_json(name, config_json)

    async def resolve_json(self, name: str, config_json: str) -> Sampler:
        """Like `resolve`, but takes the options as canonical JSON (with sorted keys)."""
        key = (name, config_json)
        sampler = self._instances.get(key)
        if sampler is None:
            sampler = build_sampler(name, await self._class(name), json.loads(config_json))
            self._instances[key] = sampler
            if len(self._instances) > self._max_instances:
                self._instances.popitem(last=False)
        self._instances.move_to_end(key)
        return sampler

    async def _class(self, name: str) -> type[Sampler]:
        return self._classes.get(name) or self._imported.get(name) or await self._load(name)

    def describe(self) -> list[SamplerDescription]:
        """Describe all samplers, sorted by name. Samplers from installed packages are listed without being imported."""
        infos = {name: describe_sampler(name, kind) for name, kind in (self._imported | self._classes).items()}
        for name, entry_point in self._entry_points.items():
            summary = f"From an installed package: {entry_point.value}."
            infos.setdefault(name, SamplerDescription(name=name, summary=summary, options=()))
        return [infos[name] for name in sorted(infos)]

    @functools.cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        return {entry_point.name: entry_point for entry_point in found}

    async def _load(self, name: str) -> type[Sampler]:
        # If two calls load the same name concurrently, both get the same class, because Python imports a module only
        # once.
        if "_entry_points" not in vars(self):  # slow, because it reads the metadata of all installed packages
            await run_in_daemon_thread(lambda: self._entry_points, thread_name="tq-sampler-entry-points")
        if name in self._entry_points:
            kind = await _import(name, self._entry_points[name].load)
        elif ":" in name and self._allow_import:
            kind = await _import(name, functools.partial(_import_class, name))
        else:
            known = nearest(name, {*self._classes, *self._entry_points}, all_known=True)
            why = "which is unknown"
            if ":" in name:
                why = (
                    "but this server does not import samplers by module:Class; allow this (allow_sampler_import), or "
                    f"install the sampler as an entry point of {ENTRY_POINT_GROUP!r}"
                )
            raise _not_loaded(name, f"sampler: got {name!r}, {why}; {known}")
        self._imported[name] = kind
        return kind


async def _import(name: str, load: Callable[[], Any]) -> type[Sampler]:
    try:
        kind = await run_in_daemon_thread(load, thread_name=f"tq-import-{name}")
        return _check_class(name, kind)
    except asyncio.CancelledError:
        raise
    except ImportError as error:
        raise _not_loaded(
            name,
            f"sampler: the service could not import {name!r}: {type(error).__name__}: {error}; install it "
            "where the service runs, or add it to the service's PYTHONPATH",
        ) from error
    except BaseException as error:  # third-party code may raise any exception, even SystemExit
        raise _not_loaded(
            name, f"sampler: the service could not load {name!r}: {type(error).__name__}: {error}"
        ) from error


def _not_loaded(name: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, field="sampler", reason="UNKNOWN_SAMPLER", metadata={"sampler": name})


def _import_class(name: str) -> Any:
    module_name, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module_name))


def _check_class(name: str, kind: Any) -> type[Sampler]:
    if not inspect.isclass(kind) or not issubclass(kind, Sampler):
        raise ValueError(
            f"sampler {name!r}: got {kind!r}; expected a class that is derived from tq_service.samplers.Sampler and "
            "has a method plan(view, request)"
        )
    return kind


class PlanRunner:
    """Runs the `plan` methods of samplers.

    A plan runs inline if the sampler allows it. An async plan is awaited. All other plans run in threads. Python cannot
    kill a hung thread, so the number of planning threads is limited to `max_threads`. If some threads hang, the
    remaining threads continue to run plans. If all threads hang, plans that need a thread fail immediately. If the plan
    in a hung thread eventually returns, the thread becomes available again. The threads are daemon threads, so a hung
    plan does not prevent the process from exiting. Use a runner on only one event loop.
    """

    def __init__(self, *, max_threads: int = 4, timeout_seconds: float = 30.0) -> None:
        """Create a runner.

        Args:
            max_threads: maximum number of plans that may run in threads at the same time, including hung plans.
            timeout_seconds: maximum duration of a plan, including the time spent waiting for a thread.
        """
        if max_threads < 1:
            raise ValueError(f"max_threads: got {max_threads}, expected at least 1")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds: got {timeout_seconds}, expected a number greater than 0")
        self._timeout_seconds = timeout_seconds
        self._max_threads = max_threads
        self._free_threads = asyncio.Semaphore(max_threads)
        # Sampler name and deadline (in event-loop time) of each plan in a thread. A plan past its deadline counts as
        # hung.
        self._running: list[tuple[str, float]] = []

    @property
    def hung_samplers(self) -> list[str]:
        """Names of the samplers that have exceeded the deadline of a plan, with one name for each hung thread."""
        now = asyncio.get_running_loop().time()
        return sorted(name for name, deadline in self._running if deadline <= now)

    def check(self, sampler: Sampler, request: PlanRequest) -> None:
        """Call the sampler's `check` method with the request.

        Raises:
            TqError: the request does not match the sampler's options.
            SamplerError: the sampler raised any other exception.
        """
        _guarded(sampler, lambda: sampler.check(request))

    def length(self, sampler: Sampler) -> LengthSource | None:
        """Return the source from which a sampler reads token counts, or None if the sampler does not use token counts.

        Raises:
            TqError: an error raised by the sampler.
            SamplerError: the sampler raised any other exception.
        """
        return _guarded(sampler, lambda: sampler.length)

    def run_inline(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Run a sampler inline and return its validated plan, or None if too few samples are ready.

        Raises:
            MustBeAwaited: the sampler cannot run inline, its `plan` is async, or the view raised MustBeAwaited.
            TqError: an error raised by the sampler.
            SamplerError: the sampler raised any other exception or returned an invalid plan.
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
        """Run a sampler and return its validated plan, or None if too few samples are ready.

        `plan` runs in a thread, even if it could run inline. An async `plan` is awaited on the event loop.

        Raises:
            TqError: an error raised by the sampler.
            SamplerError: the sampler raised any other exception or returned an invalid plan.
            SamplerTimeoutError: the sampler took too long, or no planning thread was free in time.
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
        running = (sampler.name, deadline)
        self._running.append(running)

        def free(_: object) -> None:
            self._running.remove(running)
            self._free_threads.release()

        # The thread becomes available when the plan returns, which may be long after the caller's timeout.
        finished = start_daemon_thread(lambda: sampler.plan(view, request), thread_name=f"tq-plan-{sampler.name}")
        finished.add_done_callback(free)
        await self._wait(sampler, finished, deadline)
        return _guarded(sampler, finished.result())

    async def _take_thread(self, sampler: Sampler, deadline: float) -> None:
        hung = self.hung_samplers
        if len(hung) == self._max_threads:
            names = sorted(set(hung))
            raise SamplerTimeoutError(
                f"sampler {sampler.name!r} could not run because all {self._max_threads} planning threads are stuck in "
                f"{', '.join(map(repr, names))}; fix these samplers and restart the server",
                metadata={"sampler": sampler.name, "hung": ",".join(names)},
            )
        try:
            async with asyncio.timeout_at(deadline):
                await self._free_threads.acquire()
        except TimeoutError:
            raise SamplerTimeoutError(
                f"sampler {sampler.name!r} did not get one of the {self._max_threads} planning threads within "
                f"{self._timeout_seconds} s; increase sampler_threads, or request smaller batches",
                metadata={"sampler": sampler.name},
            ) from None

    async def _wait_for(self, sampler: Sampler, plan: Awaitable[Plan | None], deadline: float) -> Plan | None:
        task = asyncio.ensure_future(_guarded_await(sampler, plan))
        task.add_done_callback(_retrieve)
        try:
            await self._wait(sampler, task, deadline)
        finally:
            task.cancel()
        if task.cancelled():  # the sampler cancelled itself; the `task.cancel()` above has no effect on a done task
            raise _failure(sampler, asyncio.CancelledError())
        return task.result()

    async def _wait(self, sampler: Sampler, future: asyncio.Future[T], deadline: float) -> None:
        """Wait until the future is done or the deadline passes.

        A late future is not cancelled here, because a sampler that ignores cancellation would block the caller.
        """
        loop = asyncio.get_running_loop()
        done, _ = await asyncio.wait([future], timeout=max(deadline - loop.time(), 0.0))
        if not done:
            raise SamplerTimeoutError(
                f"sampler {sampler.name!r} has not returned within {self._timeout_seconds} s. No samples were "
                "consumed. Make the sampler faster, or request smaller batches",
                metadata={"sampler": sampler.name},
            )


def _guarded(sampler: Sampler, call: Callable[[], T]) -> T:
    try:
        return call()
    except (TqError, KeyboardInterrupt, MustBeAwaited):
        raise
    except BaseException as error:  # a sampler may raise any exception, even SystemExit
        raise _failure(sampler, error) from error


async def _guarded_await(sampler: Sampler, plan: Awaitable[T]) -> T:
    try:
        return await plan
    except (TqError, KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _failure(sampler, error) from error


def _retrieve(task: asyncio.Future[T]) -> None:
    """Retrieve a task's exception to prevent asyncio from logging "exception was never retrieved" after a timeout."""
    if not task.cancelled():
        task.exception()


def _failure(sampler: Sampler, error: BaseException) -> SamplerError:
    return SamplerError(
        f"sampler {sampler.name!r} raised {type(error).__name__}: {error}; no samples were consumed",
        metadata={"sampler": sampler.name, "exception": type(error).__name__},
    )


# Validation of returned plans, before anything is recorded


def check_plan(sampler: str, plan: object, request: PlanRequest) -> Plan | None:
    """Validate and normalize the plan returned by a sampler. The planner checks whether the rows are ready.

    A normalized plan can always be journaled and sent, so no later error can cause the loss of rows that the plan
    consumes. NumPy integers are converted to Python integers, and instances of subclasses are converted to the
    corresponding classes in `tq_service.state.plan`.

    Raises:
        SamplerError: `plan` is not a Plan, does not have one part per rank, or contains no rows. Also raised if a row
            is repeated without `consumed`, or if a rank's positions are repeated or out of range. Also raised if the
            ranks have different numbers of steps or packs, or if a value does not have the type declared in
            `tq_service.state.plan`.
    """
    try:
        return None if plan is None else _checked(plan, request)
    except _MalformedPlanError as error:
        got, expected = error.args
        raise SamplerError(
            f"sampler {sampler!r} returned {got}; expected {expected}. No samples were consumed",
            metadata={"sampler": sampler},
        ) from None


class _MalformedPlanError(Exception):
    """An error in a plan. `args` describes the returned value and the expected value."""


def _checked(plan: object, request: PlanRequest) -> Plan:
    if not isinstance(plan, Plan):
        raise _MalformedPlanError(f"a {type(plan).__name__}", "a Plan or None")
    if not isinstance(plan.ranks, tuple) or not all(isinstance(rank, RankPlan) for rank in plan.ranks):
        raise _MalformedPlanError(f"ranks of {plan.ranks!r:.80}", "a tuple of RankPlan, as created by Plan.of(parts)")
    if len(plan.ranks) != request.rank_count:
        raise _MalformedPlanError(f"parts for {len(plan.ranks)} ranks", f"one part for each of {request.rank_count}")
    for rank, part in enumerate(plan.ranks):
        _check_array(f"rows of rank {rank}", part.rows)
        _check_array(f"dropped rows of rank {rank}", part.dropped)
    rows = np.concatenate([part.rows for part in plan.ranks])
    dropped = np.concatenate([part.dropped for part in plan.ranks])
    if not rows.size and not dropped.size:
        raise _MalformedPlanError("a plan without rows", "at least one row, or None if too few are ready")
    if plan.consumed is None:
        remedy = "every row at most once across all ranks, unless `consumed` is set"
        _check_unique("row", rows, remedy)
    else:
        _check_array("consumed", plan.consumed)
        _check_unique("consumed row", plan.consumed.copy(), "every row at most once")
        rows = np.union1d(rows, plan.consumed)
        if rows.size > MOST_SAMPLES:  # the limit applies to distinct rows, which may be repeated any number of times
            raise _MalformedPlanError(f"{rows.size} rows", f"at most {MOST_SAMPLES} across all ranks")
    if dropped.size:
        remedy = "every row at most once, and only rows that are neither delivered nor consumed"
        _check_unique("dropped row", np.concatenate([np.unique(rows), dropped]), remedy)
    _check_shape_of_steps(plan)
    for rank, part in enumerate(plan.ranks):
        _check_packs(rank, part)
    return Plan(ranks=tuple(map(_plain, plan.ranks)), consumed=plan.consumed)


def _plain(part: RankPlan) -> RankPlan:
    steps = tuple(
        tuple(
            Pack(positions=pack.positions, lengths=pack.lengths, padding_tokens=int(pack.padding_tokens))
            for pack in step
        )
        for step in part.steps
    )
    return RankPlan(rows=part.rows, steps=steps, dropped=part.dropped)


def _check_unique(what: str, rows: Indexes, remedy: str) -> None:
    """Raise _MalformedPlanError if a row is repeated. `rows` is sorted in place."""
    rows.sort()
    is_repeated = rows[1:] == rows[:-1]
    if is_repeated.any():
        raise _MalformedPlanError(f"{what} {rows[is_repeated.argmax()]} more than once", remedy)


def _check_shape_of_steps(plan: Plan) -> None:
    for rank, part in enumerate(plan.ranks):
        if not isinstance(part.steps, tuple) or not all(isinstance(step, tuple) for step in part.steps):
            raise _MalformedPlanError(
                f"{part.steps!r:.80} as the steps of rank {rank}", "a tuple of steps, each a tuple of Pack"
            )
    shapes = [[len(step) for step in part.steps] for part in plan.ranks]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise _MalformedPlanError(
                f"{shapes[0]} packs per step for rank 0 and {shape} for rank {rank}",
                "the same numbers of steps and packs for every rank; add empty packs",
            )


def _check_packs(rank: int, part: RankPlan) -> None:
    packs = [pack for step in part.steps for pack in step]
    for pack in packs:
        if not isinstance(pack, Pack):
            raise _MalformedPlanError(f"a {type(pack).__name__} among the packs of rank {rank}", "Pack objects")
        _check_array(f"positions of rank {rank}", pack.positions)
        if pack.lengths is not None:
            _check_array(f"lengths of rank {rank}", pack.lengths)
            if pack.lengths.shape != pack.positions.shape:
                raise _MalformedPlanError(
                    f"{pack.lengths.size} lengths for {pack.positions.size} positions", "one length for each position"
                )
            if pack.lengths.min(initial=0) < 0:
                raise _MalformedPlanError(f"a length of {pack.lengths.min()} for rank {rank}", "lengths of at least 0")
        padding: Any = pack.padding_tokens
        if isinstance(padding, bool) or not isinstance(padding, int | np.integer):
            raise _MalformedPlanError(f"padding_tokens as a {type(padding).__name__}", "an int")
        if not 0 <= padding <= _LARGEST_INT64:
            raise _MalformedPlanError(f"padding_tokens of {padding}", "an int from 0 to 2**63 - 1")
    if not packs:
        return
    positions = np.concatenate([pack.positions for pack in packs])
    if positions.size and (positions.min() < 0 or positions.max() >= part.rows.size):
        raise _MalformedPlanError(
            f"positions {positions.min()} to {positions.max()} for rank {rank}",
            f"positions in [0, {part.rows.size}), the number of the rank's rows",
        )
    if np.bincount(positions).max(initial=0) > 1:
        raise _MalformedPlanError(
            f"position {np.bincount(positions).argmax()} of rank {rank} in two packs", "each position at most once"
        )


def _check_array(what: str, array: Any) -> None:
    if type(array) is not np.ndarray:  # masked arrays are instances of a subclass and cannot be sent
        raise _MalformedPlanError(
            f"{what} as a {type(array).__name__}", "a numpy array of int64, as created by Plan.of(parts)"
        )
    if array.ndim != 1 or array.dtype != np.int64:
        raise _MalformedPlanError(
            f"{what} as an array of {array.dtype} with shape {array.shape}", "a one-dimensional array of int64"
        )
