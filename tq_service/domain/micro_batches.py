"""Plain batches cut into micro-batches."""

from __future__ import annotations

import numpy as np

from tq_service.domain.plan import Pack, Plan, RankPlan


def cut_micro_batches(plan: Plan, micro_batch_size: int | None) -> Plan:
    """Give plain batches their micro-batches: one step, of as many packs on every rank, empty ones included."""
    if any(part.steps for part in plan.ranks):
        return plan
    largest = max(part.rows.size for part in plan.ranks)
    size = micro_batch_size or max(1, largest)
    starts = range(0, max(1, largest), size)
    steps_by_count: dict[int, tuple[tuple[Pack, ...], ...]] = {}  # most ranks have as many rows
    for count in {part.rows.size for part in plan.ranks}:
        positions = np.arange(count)
        steps_by_count[count] = (tuple(Pack(positions=positions[start : start + size]) for start in starts),)
    return Plan(ranks=tuple(RankPlan(rows=part.rows, steps=steps_by_count[part.rows.size]) for part in plan.ranks))
