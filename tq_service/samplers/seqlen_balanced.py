"""Batches of which every rank gets as many tokens as the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tq_service.balancing import get_even_partitions
from tq_service.balancing.costs import check_cost_name
from tq_service.samplers.base import LengthSource, Plan, PlanRequest, Sampler, View
from tq_service.samplers.token_lengths import CostName, check_length_key, group_costs, read_lengths
from tq_service.samplers.whole_groups import (
    IncompleteGroups,
    check_group_options,
    check_holds_whole_groups,
    rows_of_ranks,
    take_groups,
)

# Balancing up to so many groups takes less than a millisecond; larger batches are planned off the event loop.
_QUICK_GROUPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqlenBalancedSampler(Sampler):
    """Takes whole groups and spreads them over the ranks so that token totals are as equal as can be.

    One batch for all ranks is taken in the order of the groups' first members, then split by Karmarkar-Karp on the
    groups' token totals and refined by swaps. Group counts are equal, or differ by at most one where they do not
    divide; so with groups of one size each rank gets `batch_size` samples. Within a rank, groups keep their order.

    Attributes:
        n_samples_per_prompt: members of a group that declared no size, and without explicit groups the length of the
            blocks of consecutive indexes; None: explicit groups, or else single samples.
        length_key: custom_meta column with the token count of a sample.
        length_field: jagged field whose row length stands in where the column has no value.
        incomplete_groups: what to do with a group of which members failed or were cleared: "skip" it, or "take" the
            rest.
        cost: what is evened out: "tokens", or their cost with "attention", 24576 L + L**2 for a sample of L tokens.
    """

    name: ClassVar[str] = "seqlen_balanced"

    n_samples_per_prompt: int | None = None
    length_key: str = "total_lengths"
    length_field: str | None = None
    incomplete_groups: IncompleteGroups = "skip"
    cost: CostName = "tokens"

    def __post_init__(self) -> None:
        check_group_options(self.n_samples_per_prompt, self.incomplete_groups)
        check_length_key(self.length_key)
        check_cost_name(self.cost)

    @property
    def length(self) -> LengthSource:
        """The token count of a sample."""
        return LengthSource(key=self.length_key, field=self.length_field)

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError where `batch_size` does not hold whole groups."""
        check_holds_whole_groups(self.name, request, self.n_samples_per_prompt)

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
        groups = take_groups(
            view, request, block_size=self.n_samples_per_prompt, incomplete_groups=self.incomplete_groups
        )
        if groups is None:
            return None
        lengths = read_lengths(view, groups.rows, self.length_key)
        deal = get_even_partitions(group_costs(groups, lengths, self.cost), request.rank_count)
        return Plan.of(rows_of_ranks(groups, [np.array(part, dtype=np.int64) for part in deal]))
