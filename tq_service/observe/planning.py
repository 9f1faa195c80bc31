"""Times the plans of samplers."""

from __future__ import annotations

import time

from tq_service.observe.instruments import HistogramByName
from tq_service.serving.planner import RunsPlans
from tq_service.state.plan import LengthSource, Plan, PlanRequest, Sampler, View


class TimedRunner:
    """Runs samplers as another runner does, and times those that came to a plan.

    Args:
        runner: runs them.
        seconds: where the times go, by the name of the sampler; off the event loop the wait for a thread is in them.
    """

    def __init__(self, runner: RunsPlans, seconds: HistogramByName) -> None:
        self._runner = runner
        self._seconds = seconds

    def length(self, sampler: Sampler) -> LengthSource | None:
        """Return the length that a sampler needs, see `RunsPlans`."""
        return self._runner.length(sampler)

    def run_inline(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a plan or None, see `RunsPlans`."""
        began_at = time.perf_counter()
        plan = self._runner.run_inline(sampler, view, request)
        if plan is not None:
            self._seconds.of(sampler.name).observe(time.perf_counter() - began_at)
        return plan

    async def run(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a plan or None, see `RunsPlans`."""
        began_at = time.perf_counter()
        plan = await self._runner.run(sampler, view, request)
        if plan is not None:
            self._seconds.of(sampler.name).observe(time.perf_counter() - began_at)
        return plan
