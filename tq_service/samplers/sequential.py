"""Ready samples in order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from tq_service.samplers.whole_groups import assign_blocks, rows_of_ranks, take_groups
from tq_service.state.plan import Indexes, Plan, PlanRequest, Sampler, View


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSampler(Sampler):
    """Takes ready samples in index order, or in the order of `order_by`.

    Each rank gets a block of neighbours: `batch_size` of them, and of a short last batch as even a share as can be.
    With `batch_unit="group"` the blocks are of whole groups.
    """

    name: ClassVar[str] = "sequential"

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return True: the plan is a slice."""
        return True

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return blocks of neighbours, or None where fewer than `request.min_size` are ready."""
        if request.batch_unit == "group":
            groups = take_groups(view, request)
            if groups is None:
                return None
            return Plan.of(rows_of_ranks(groups, assign_blocks(groups, request.rank_count)))
        rows = view.ready(request.total_size)
        return Plan.of(_even_blocks(rows, request.rank_count)) if rows.size >= max(request.min_size, 1) else None


def _even_blocks(rows: Indexes, count: int) -> list[Indexes]:
    """Return blocks of neighbours, the first ones longer by one where the rows do not divide."""
    size, longer = divmod(rows.size, count)
    ends = [size * block + min(block, longer) for block in range(count + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(ends)]
