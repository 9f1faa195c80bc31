"""Finds the plan of one batch: asks the sampler, sees whether nothing more can come, and checks the rows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np

from tq_service.domain.claims.end import End
from tq_service.domain.claims.ledger import TaskLedger
from tq_service.domain.claims.request import ClaimRequest, LeaseTerms
from tq_service.domain.claims.view import PartitionView, ReadyIndex
from tq_service.domain.partition import Partition
from tq_service.domain.plan import (
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
from tq_service.errors import SamplerError, TqError

_MOST_REPLANS = 8

Marks: TypeAlias = tuple[int, int, int, int, int]  # see `PlanSearch.marks`


class RunsPlans(Protocol):
    """Runs samplers so that one that fails, or hangs, harms its own request only."""

    def run_inline(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a well-formed plan or None, at once.

        Raises:
            MustBeAwaited: the plan cannot be had at once.
            TqError: the sampler's fault, or its own.
        """
        ...

    async def run(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a well-formed plan or None, off the event loop and within a time limit; raises TqError only."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that may be recorded in the step of the event loop in which it is returned.

    Attributes:
        plan: with the micro-batches that were asked for.
        positions: of all its rows, in the table of this moment.
        group_block_size: what keeps its groups together, see `LeaseTerms`; None where its sampler took no whole ones.
    """

    plan: Plan
    positions: Indexes
    group_block_size: int | None

    def lease(self, terms: LeaseTerms | None) -> LeaseTerms | None:
        """Return how a queue worker that asks for a lease gets the samples."""
        if terms is None or self.group_block_size is None:
            return terms
        return replace(terms, group_block_size=self.group_block_size)


@dataclass(frozen=True, slots=True)
class FailedPlan:
    """A plan that found too little, and what must change before another one can find more.

    So a partition that fills row by row is not scanned for each of them.

    Attributes:
        state_version: of the partition when the plan was begun.
        row_version: that the partition must reach.
        consumed: rows consumed and leased by the task then, where a change of these may bring the end; else None.
    """

    state_version: int
    row_version: int
    consumed: tuple[int, int] | None

    def cannot_succeed_yet(self, partition: Partition, task: TaskLedger) -> bool:
        """Whether too little has changed for another attempt to be worth while."""
        return (
            partition.state_version == self.state_version
            and partition.row_version < self.row_version
            and self.consumed in (None, (task.consumed_count, task.leased_count))
        )


class PlanSearch:
    """Looks for the plans of one task, for any number of specs at the same time.

    What is recorded of the plans is left to the planner, which counts it in `claim_count`: a plan that is made off the
    event loop may lose its rows to another one that is recorded meanwhile.

    Attributes:
        epoch: whose plans are looked for; none are made for the next one before `start_epoch`.
        claim_count: plans recorded so far.
    """

    def __init__(self, partition: Partition, task: TaskLedger, runner: RunsPlans) -> None:
        self._partition = partition
        self._task = task
        self._runner = runner
        self._ready = ReadyIndex(partition, task.name)
        self.epoch = task.epoch
        self.claim_count = 0

    def start_epoch(self) -> None:
        """Look for plans of the task's epoch of now."""
        self.epoch = self._task.epoch

    @property
    def marks(self) -> Marks:
        """Versions of all that plans depend on; what is equal at two moments has not changed between them."""
        partition, task = self._partition, self._task
        return *partition.version, self.claim_count, task.leased_count, task.epoch

    def plan_inline(self, request: ClaimRequest) -> Planned | End | FailedPlan:
        """Return a plan, the end, or why there is none yet.

        Raises:
            MustBeAwaited: the sampler, or what it needs, does not run on the event loop; `plan` finds the plan.
            TqError: the sampler's fault, or its own.
        """
        runs_inline, length = _needs(request.sampler, request.plan_request)
        if not runs_inline:
            raise MustBeAwaited
        steps = self._steps(request)
        wanted, no_more = next(steps)
        while True:
            view = self._view(request, length, no_more=no_more)
            if view.is_heavy:
                raise MustBeAwaited
            try:
                plan = self._runner.run_inline(request.sampler, view, wanted)
            except TqError:
                if not view.gave_up:
                    raise
            if view.gave_up:
                raise MustBeAwaited
            try:
                wanted, no_more = steps.send((view, plan))
            except StopIteration as stop:
                found: Planned | End | FailedPlan = stop.value  # never None: nothing has changed meanwhile
                return found

    async def plan(self, request: ClaimRequest) -> Planned | End | FailedPlan | None:
        """Return a plan, the end, why there is none yet, or None where another claim was quicker or a reset came.

        There is no await between the check of a plan's rows and the return, so that the caller can record it.
        """
        begun_at = self.claim_count
        for _ in range(_MOST_REPLANS):
            was_heavy = await self._sort_rows(request)
            if self.epoch != self._task.epoch:
                return None
            if was_heavy:
                with contextlib.suppress(MustBeAwaited):
                    return self.plan_inline(request)
            steps = self._steps(request)
            wanted, no_more = next(steps)
            try:
                while True:
                    wanted, no_more = steps.send(await self._run_off_loop(request, wanted, no_more=no_more))
            except StopIteration as stop:
                found: Planned | End | FailedPlan | None = stop.value
            if found is not None or self.claim_count != begun_at:
                return found
        raise SamplerError(
            f"sampler {request.sampler.name!r}: samples of {_MOST_REPLANS} plans in a row were cleared, failed or "
            f"reset while they were planned; ask again"
        )

    def _steps(
        self, request: ClaimRequest
    ) -> Generator[tuple[PlanRequest, bool], tuple[PartitionView, Plan | None], Planned | End | FailedPlan | None]:
        """Yield each run of the sampler, and whether nothing more comes; return what its plans come to.

        None is for a plan of rows that are not ready any more. How a run is made is up to the caller.
        """
        wanted, begun_at = request.plan_request, self.marks
        consumed = self._task.consumed_count, self._task.leased_count
        view, plan = yield wanted, False
        if plan is None:
            is_last = begun_at == self.marks and self._is_closed(request) and view.is_settled()
            if not is_last:
                view.check_lengths()
                return self._failed(request, view, begun_at, consumed)
            least = wanted.total_size if request.batch_spec.drop_last else 1
            view, plan = yield replace(wanted, min_size=least), True
            if plan is None:
                return view.end() if begun_at == self.marks else FailedPlan(begun_at[0], begun_at[1], consumed)
        if self.epoch != self._task.epoch:
            return None
        planned = self._checked(request, view, plan)
        state_version, _, *others = begun_at  # rows that are only written to stay ready
        if planned is None and (state_version, *others) == (self.marks[0], *self.marks[2:]):
            raise _foreign_rows(request.sampler)
        return planned

    def _failed(
        self, request: ClaimRequest, view: PartitionView, begun_at: Marks, consumed: tuple[int, int]
    ) -> FailedPlan:
        """Return how many rows must be written, after the view was made, before there can be more to find."""
        wanted = request.plan_request
        missing, is_closed = 1, self._partition.sealed or request.batch_spec.finite  # or soon closed, by a first sample
        # Of the class, where reading it runs no code of the sampler.
        needs_min_size = type(request.sampler).plans_below_min_size is not True
        if needs_min_size and view.exhausted and wanted.batch_unit == "sample":
            missing = wanted.min_size - view.seen_count
            if is_closed:  # the last, short batch takes less
                missing = min(missing, view.unready_count) if view.is_plain else 1
        state_version, row_version = begun_at[:2]
        return FailedPlan(state_version, row_version + max(1, missing), consumed if is_closed else None)

    def _checked(self, request: ClaimRequest, view: PartitionView, plan: Plan) -> Planned | None:
        """Return the plan with its positions, None where its rows have been changed while it was made."""
        parts = [part.rows for part in plan.ranks]
        positions = view.still_ready(parts[0] if len(parts) == 1 else np.concatenate(parts))
        if positions is None:
            return None
        block_size = None if view.grouping is None else view.grouping[0] or 0
        return Planned(cut_micro_batches(plan, request.batch_spec.micro_batch_size), positions, block_size)

    async def _run_off_loop(
        self, request: ClaimRequest, wanted: PlanRequest, *, no_more: bool
    ) -> tuple[PartitionView, Plan | None]:
        """Run the sampler while the positions of rows stay as they are."""
        view = self._view(request, _needs(request.sampler, wanted)[1], no_more=no_more)
        view.leave_loop()
        table = self._partition.table
        table.pin_count += 1
        try:
            plan = await self._runner.run(request.sampler, view, wanted)
        finally:
            table.pin_count -= 1
        view.come_back()
        return view, plan

    def _view(self, request: ClaimRequest, length: LengthSource | None, *, no_more: bool = False) -> PartitionView:
        view = PartitionView(self._partition, self._task, self._ready, request.batch_spec, length)
        view.no_more = view.no_more or no_more
        return view

    async def _sort_rows(self, request: ClaimRequest) -> bool:
        """Sort the rows of a claim in its order as far as it needs, in short steps; return whether it took any."""
        was_heavy, length = False, _needs(request.sampler, request.plan_request)[1]
        while self.epoch == self._task.epoch and (view := self._view(request, length)).is_heavy:
            view.sort_some()
            was_heavy = True
            await asyncio.sleep(0)
        return was_heavy

    def _is_closed(self, request: ClaimRequest) -> bool:
        return self._partition.sealed or (request.batch_spec.finite and self._partition.inserted_count > 0)


def _needs(sampler: Sampler, wanted: PlanRequest) -> tuple[bool, LengthSource | None]:
    """Return whether a sampler is quick, and the length it needs; the runner guards `plan` only."""
    try:
        return sampler.runs_inline(wanted), sampler.length
    except (TqError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a sampler may raise anything, also SystemExit
        raise SamplerError(
            f"sampler {sampler.name!r} raised {type(error).__name__}: {error}; nothing was consumed",
            metadata={"sampler": sampler.name, "exception": type(error).__name__},
        ) from error


def _foreign_rows(sampler: Sampler) -> SamplerError:
    return SamplerError(
        f"sampler {sampler.name!r} returned rows that were not ready for this claim; return rows of view.ready() or "
        f"view.ready_groups() only"
    )


def cut_micro_batches(plan: Plan, micro_batch_size: int | None) -> Plan:
    """Give plain batches their micro-batches: one step, of as many packs on every rank, empty ones included."""
    if any(part.steps for part in plan.ranks):
        return plan
    largest = max(part.rows.size for part in plan.ranks)
    size = micro_batch_size or max(1, largest)
    return Plan(
        ranks=tuple(RankPlan(rows=part.rows, steps=_one_step(part.rows.size, largest, size)) for part in plan.ranks)
    )


@lru_cache(maxsize=256)
def _one_step(count: int, largest: int, size: int) -> tuple[tuple[Pack, ...], ...]:
    """Return the micro-batches of a rank with `count` rows, where some rank has `largest`.

    Most claims are alike in this. Those that are recorded by the hundred thousand share one.
    """
    positions = np.arange(count)
    positions.flags.writeable = False
    return (tuple(Pack(positions=positions[start : start + size]) for start in range(0, max(1, largest), size)),)
