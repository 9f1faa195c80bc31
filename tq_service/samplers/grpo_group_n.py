"""Whole groups, as GRPO needs them: the responses to one prompt are compared with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tq_service.samplers.whole_groups import (
    Assignment,
    GroupSampler,
    are_uniform,
    assign_blocks,
    assign_round_robin,
    assign_to_least_loaded,
    rows_of_ranks,
)
from tq_service.state.plan import Groups, Plan, PlanRequest, View


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOGroupNSampler(GroupSampler):
    """Takes whole groups of `n_samples_per_prompt` samples, in the order of their first member.

    Groups of equal size are assigned in blocks of neighbours, so that each rank gets exactly `batch_size` samples.
    Where sizes differ (closed groups, `incomplete_groups="take"`), groups stay whole and the ranks' shares are as even
    as that allows.

    Attributes:
        n_samples_per_prompt: members of a group that declared no size, and without explicit groups the length of the
            blocks of consecutive indexes; it must be given.
    """

    name: ClassVar[str] = "grpo_group_n"

    n_samples_per_prompt: int

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return True: groups are assigned, not searched."""
        return True

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return whole groups for each rank, or None where too few are ready."""
        self.check(request)
        groups = self.take_groups(view, request)
        return None if groups is None else Plan.of(rows_of_ranks(groups, _assign(groups, request)))


def _assign(groups: Groups, request: PlanRequest) -> Assignment:
    if are_uniform(groups):
        return assign_blocks(groups, request.rank_count)
    if request.batch_unit == "group":
        return assign_round_robin(groups, request.rank_count, largest_first=True)
    return assign_to_least_loaded(groups, request.rank_count)
