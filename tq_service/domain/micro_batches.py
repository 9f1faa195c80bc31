"""Plain batches cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tq_service.domain.plan import Pack, Plan


def cut_micro_batches(plan: Plan, micro_batch_size: int | None) -> Plan:
    """Give plain batches their micro-batches: one step, of as many packs on every rank, empty ones included."""
    if any(part.steps for part in plan.ranks):
        return plan
    largest = max(part.rows.size for part in plan.ranks)
    size = micro_batch_size or max(1, largest)
    starts = range(0, max(1, largest), size)
    ranks = []
    for part in plan.ranks:
        positions = np.arange(part.rows.size)
        packs = tuple(Pack(positions=positions[start : start + size]) for start in starts)
        ranks.append(replace(part, steps=(packs,)))
    return Plan(ranks=tuple(ranks))
