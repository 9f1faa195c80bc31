"""Finds the plan of one batch: asks the sampler, sees whether nothing more can come, and checks the rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np

from tq_service.domain.claims.attempts import Attempts
from tq_service.domain.claims.end import End
from tq_service.domain.claims.ledger import TaskLedger
from tq_service.domain.claims.request import ClaimRequest, LeaseTerms
from tq_service.domain.claims.view import PartitionView
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes, LengthSource, Plan, PlanRequest, PlansBatches, View
from tq_service.errors import SamplerError, TqError

_MOST_REPLANS = 8


class RunsPlans(Protocol):
    """Runs a sampler where it harms nobody: inline when quick, else on a thread with a time limit."""

    def run_at_once(self, sampler: PlansBatches, view: View, request: PlanRequest) -> Plan | None:
        """Return a well-formed plan of a quick sampler, None where there is none or it must wait; raises TqError."""
        ...

    async def run(self, sampler: PlansBatches, view: View, request: PlanRequest) -> Plan | None:
        """Return a well-formed plan or None; raises TqError only."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that may be recorded now.

    Attributes:
        positions: of all its rows, in the table of this moment.
        lease: how a queue worker gets it.
    """

    plan: Plan
    positions: Indexes
    lease: LeaseTerms | None = None


class PlanSearch:
    """Looks for the plans of one task."""

    def __init__(self, partition: Partition, task: TaskLedger, runner: RunsPlans) -> None:
        self._partition = partition
        self._task = task
        self._runner = runner
        self.attempts = Attempts(partition, task)
        self.epoch = task.epoch

    def start_epoch(self) -> None:
        """Look for plans of the task's epoch of now; until this is called there are none for a new epoch."""
        self.epoch = self._task.epoch
        self.attempts.clear()

    def at_once(self, request: ClaimRequest) -> Planned | None:
        """Return a plan that a quick sampler makes now; None where it does not, for whatever reason."""
        if self.epoch != self._task.epoch or self.attempts.cannot_succeed_yet(request):
            return None
        wanted = request.plan_request
        runs_inline, length = _needs(request.sampler, wanted)
        if not runs_inline:
            return None
        view = self._view(request, length)
        if view.is_heavy:
            return None
        try:
            plan = self._runner.run_at_once(request.sampler, view, wanted)
        except TqError:
            if view.gave_up:
                return None
            raise
        return None if plan is None or view.gave_up else self._checked(request, view, plan)

    async def plan(self, request: ClaimRequest) -> Planned | End | None:
        """Return a plan, the end, or None where too little is ready.

        There is no await between the check of a plan's rows and the return, so that the caller can record it.
        """
        if self.attempts.cannot_succeed_yet(request):
            return None
        wanted = request.plan_request
        for _ in range(_MOST_REPLANS):
            if self.epoch != self._task.epoch:
                return None  # the pump looks again, once it has ended the calls of the old epoch
            if request.batch_spec.order_by:
                await self._sort_rows(request)
                if self.epoch != self._task.epoch:
                    return None
            counts = self._partition.version
            view, plan = await self._run_sampler(request, wanted)
            if plan is None:
                if not self._nothing_more_comes(request, view, counts):
                    view.check_lengths()
                    self.attempts.remember(request, wanted, view, counts)
                    return None
                least = wanted.total_size if request.batch_spec.drop_last else 1
                view, plan = await self._run_sampler(request, replace(wanted, min_size=least), no_more=True)
            has_changed = counts != self._partition.version
            if plan is None:  # after a change the pump looks again
                return None if has_changed else view.end()
            if self.epoch == self._task.epoch:
                planned = self._checked(request, view, plan)
                if planned is not None:
                    return planned
        raise SamplerError(
            f"sampler {request.sampler.name!r}: samples of {_MOST_REPLANS} plans in a row were cleared, failed or "
            f"reset while they were planned; ask again"
        )

    def _checked(self, request: ClaimRequest, view: PartitionView, plan: Plan) -> Planned | None:
        """Return the plan with its positions, None where its rows have been changed while it was made."""
        parts = [part.rows for part in plan.ranks]
        positions = view.still_ready(parts[0] if len(parts) == 1 else np.concatenate(parts))
        if positions is not None:
            return Planned(plan, positions, None if request.lease is None else _lease_of_groups(request.lease, view))
        if view.made_at[0] == self._partition.state_version:
            raise _foreign_rows(request.sampler)
        return None

    async def _run_sampler(
        self, request: ClaimRequest, wanted: PlanRequest, *, no_more: bool = False
    ) -> tuple[PartitionView, Plan | None]:
        runs_inline, length = _needs(request.sampler, wanted)
        view = self._view(request, length, no_more=no_more)
        if runs_inline:
            try:
                plan = await self._run_pinned(request.sampler, view, wanted)
            except TqError:
                if not view.gave_up:
                    raise
            if not view.gave_up:
                return view, plan
            view = self._view(request, length, no_more=no_more)
        view.leave_loop()
        plan = await self._run_pinned(_OffLoop(request.sampler) if runs_inline else request.sampler, view, wanted)
        view.come_back()
        return view, plan

    def _view(self, request: ClaimRequest, length: LengthSource | None, *, no_more: bool = False) -> PartitionView:
        view = PartitionView(self._partition, self._task, request.batch_spec, length, remembers=True)
        view.no_more = view.no_more or no_more
        return view

    async def _run_pinned(self, sampler: PlansBatches, view: PartitionView, wanted: PlanRequest) -> Plan | None:
        """Run a sampler while the positions of rows stay as they are."""
        table = self._partition.table
        table.pin_count += 1
        try:
            return await self._runner.run(sampler, view, wanted)
        finally:
            table.pin_count -= 1

    async def _sort_rows(self, request: ClaimRequest) -> None:
        """Have the rows of a claim sorted in its order as far as it needs, in short steps."""
        _, length = _needs(request.sampler, request.plan_request)
        while self.epoch == self._task.epoch and (view := self._view(request, length)).is_heavy:
            view.sort_some()
            await asyncio.sleep(0)

    def _nothing_more_comes(self, request: ClaimRequest, view: PartitionView, counts: tuple[int, int]) -> bool:
        """Whether what is ready now is all there will be: the partition is at its end, and no row can become ready.

        Not so where it has changed since the view was made, at `counts`.
        """
        return counts == self._partition.version and self._is_closed(request) and view.is_settled()

    def _is_closed(self, request: ClaimRequest) -> bool:
        return self._partition.sealed or (request.batch_spec.finite and self._partition.inserted_count > 0)


class _OffLoop:
    """A quick sampler that is run on a thread, since its view is of too many rows."""

    plans_below_min_size: ClassVar[bool] = True  # the planner looks at the sampler itself

    def __init__(self, sampler: PlansBatches) -> None:
        self._sampler = sampler
        self.name = sampler.name
        self.length = sampler.length

    def check(self, request: PlanRequest) -> None:
        """Check as the sampler does."""
        self._sampler.check(request)

    def plan(self, view: View, request: PlanRequest) -> Plan | Awaitable[Plan | None] | None:
        """Plan as the sampler does."""
        return self._sampler.plan(view, request)

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return False."""
        return False


def _needs(sampler: PlansBatches, wanted: PlanRequest) -> tuple[bool, LengthSource | None]:
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


def _lease_of_groups(terms: LeaseTerms, view: PartitionView) -> LeaseTerms:
    """Return the terms with what keeps the groups of a plan together, where its sampler took whole ones."""
    return terms if view.grouping is None else replace(terms, group_block_size=view.grouping[0] or 0)


def _foreign_rows(sampler: PlansBatches) -> SamplerError:
    return SamplerError(
        f"sampler {sampler.name!r} returned rows that were not ready for this claim; return rows of view.ready() or "
        f"view.ready_groups() only"
    )
