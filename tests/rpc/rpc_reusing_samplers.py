"""Samplers that consume other samples than they deliver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tq_service.samplers import Pack, Plan, PlanRequest, RankPlan, Sampler, View


@dataclass(frozen=True, kw_only=True)
class WithReplacement(Sampler):
    """Draws each sample of a batch from all that are ready, and consumes none."""

    seed: int = 0

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a full batch of whatever is ready."""
        ready = view.ready()
        if ready.size < min(request.min_size, 2):
            return None
        rng = np.random.default_rng((self.seed, view.plan_count))
        return Plan.of(np.array_split(rng.choice(ready, request.total_size), request.rank_count), ready[:0])


class Twice(Sampler):
    """Delivers the first ready sample twice, with the next one between, in packs; consumes both and drops a third."""

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a batch of three positions for one rank."""
        rows = view.ready(3)
        if rows.size < 3:
            return None
        packs = tuple(Pack(positions=np.array(positions, np.int64)) for positions in ([2], [0, 1]))
        return Plan(ranks=(RankPlan(rows=rows[[0, 1, 0]], steps=(packs,)),), consumed=rows)


class RepeatsWithoutSayingSo(Sampler):
    """Delivers a row twice and does not say which it consumes."""

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a plan that is refused."""
        return Plan.of([view.ready()[[0, 0]]])


class ConsumesTwice(Sampler):
    """Consumes a row twice."""

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a plan that is refused."""
        return Plan.of([view.ready()[:1]], view.ready()[[0, 0]])


class ConsumesWhatIsNotReady(Sampler):
    """Consumes a row that was consumed before."""

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a plan that is refused."""
        return Plan.of([view.ready()[:1]], np.array([0]))
