"""Batches of which every rank gets as many tokens as the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tq_service.balancing import get_even_partitions
from tq_service.balancing.costs import CostName, check_cost_name
from tq_service.samplers.token_lengths import LengthSampler, group_costs
from tq_service.samplers.whole_groups import rows_of_ranks
from tq_service.state.plan import Plan, PlanRequest, View

# Balancing up to so many groups takes less than a millisecond; larger batches are planned off the event loop.
_QUICK_GROUPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqlenBalancedSampler(LengthSampler):
    """Takes whole groups and spreads them over the ranks so that token totals are as equal as can be.

    One batch for all ranks is taken in the order of the groups' first members, then split by Karmarkar-Karp on the
    groups' token totals and refined by swaps. Group counts are equal, or differ by at most one where they do not
    divide; so with groups of one size each rank gets `batch_size` samples. Within a rank, groups keep their order.

    Attributes:
        cost: what is balanced: tokens, or what they cost with attention, 24576 L + L**2 for a sample of L tokens.
    """

    name: ClassVar[str] = "seqlen_balanced"

    cost: CostName = "tokens"

    def __post_init__(self) -> None:
        LengthSampler.__post_init__(self)
        check_cost_name(self.cost)

    def runs_inline(self, request: PlanRequest) -> bool:
        """Whether few groups are to be balanced."""
        group_size = (self.n_samples_per_prompt or 1) if request.batch_unit == "sample" else 1
        return request.total_size <= _QUICK_GROUPS * group_size

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a balanced share for each rank, or None where too few groups are ready.

        Raises:
            InvalidArgumentError: a length is negative.
        """
        self.check(request)
        groups = self.take_groups(view, request)
        if groups is None:
            return None
        lengths = self.read_lengths(view, groups.rows)
        parts = get_even_partitions(group_costs(groups, lengths, self.cost), request.rank_count)
        return Plan.of(rows_of_ranks(groups, [np.array(part, dtype=np.int64) for part in parts]))
