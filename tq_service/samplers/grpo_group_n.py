"""Whole groups, as GRPO needs them: the responses to one prompt are compared with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tq_service.samplers.base import Groups, Plan, PlanRequest, Sampler, View
from tq_service.samplers.whole_groups import (
    Deal,
    IncompleteGroups,
    are_uniform,
    check_group_options,
    check_holds_whole_groups,
    deal_blocks,
    deal_in_rounds,
    deal_to_emptiest,
    rows_of_ranks,
    take_groups,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOGroupNSampler(Sampler):
    """Takes whole groups of `n_samples_per_prompt` samples, in the order of their first member.

    Groups of equal size are dealt in blocks of neighbours, so that each rank gets exactly `batch_size` samples. Where
    sizes differ (closed groups, `incomplete_groups="take"`), groups stay whole and the ranks' shares are as even as
    that allows.

    Attributes:
        n_samples_per_prompt: members of a group that declared no size, and without explicit groups the length of the
            blocks of consecutive indexes.
        incomplete_groups: what to do with a group of which members failed or were cleared: "skip" it, or "take" the
            rest.
    """

    name: ClassVar[str] = "grpo_group_n"

    n_samples_per_prompt: int
    incomplete_groups: IncompleteGroups = "skip"

    def __post_init__(self) -> None:
        check_group_options(self.n_samples_per_prompt, self.incomplete_groups)

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError where `batch_size` does not hold whole groups."""
        check_holds_whole_groups(self.name, request, self.n_samples_per_prompt)

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return True: groups are dealt, not searched."""
        return True

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return whole groups for each rank, or None where too few are ready."""
        self.check(request)
        groups = take_groups(
            view, request, block_size=self.n_samples_per_prompt, incomplete_groups=self.incomplete_groups
        )
        return None if groups is None else Plan.of(rows_of_ranks(groups, _deal(groups, request)))


def _deal(groups: Groups, request: PlanRequest) -> Deal:
    if are_uniform(groups):
        return deal_blocks(groups, request.rank_count)
    if request.batch_unit == "group":
        return deal_in_rounds(groups, request.rank_count, largest_first=True)
    return deal_to_emptiest(groups, request.rank_count)
