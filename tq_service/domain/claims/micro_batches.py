"""Plain batches cut into micro-batches."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tq_service.domain.plan import Pack, Plan, RankPlan


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
