"""Samples dealt round-robin to trainer ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tq_service.errors import InvalidArgumentError
from tq_service.samplers.base import Plan, PlanRequest, Sampler, View
from tq_service.samplers.whole_groups import (
    IncompleteGroups,
    check_group_options,
    check_holds_whole_groups,
    deal_in_rounds,
    rows_of_ranks,
    take_groups,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAwareSampler(Sampler):
    """Deals ready samples, or whole groups, round-robin to the ranks, so that all get the same mixture of ages.

    Every replica of a rank gets the same samples for a batch_index, other ranks get others. A short last batch is
    spread evenly. For trainer ranks only.

    Attributes:
        n_samples_per_prompt: keep groups of so many samples whole; None deals single samples.
        incomplete_groups: what to do with a group of which members failed or were cleared: "skip" it, or "take" the
            rest.
    """

    name: ClassVar[str] = "rank_aware"

    n_samples_per_prompt: int | None = None
    incomplete_groups: IncompleteGroups = "skip"

    def __post_init__(self) -> None:
        check_group_options(self.n_samples_per_prompt, self.incomplete_groups)

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError for a queue worker, and where `batch_size` does not hold whole groups."""
        if not request.ranked:
            raise InvalidArgumentError(
                f"sampler: got {self.name!r} without dp_rank, expected dp_rank, dp_size and batch_index; queue workers "
                "use 'sequential' or 'grpo_group_n'",
                field="sampler",
            )
        check_holds_whole_groups(self.name, request, self.n_samples_per_prompt)

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return True: samples are dealt, not searched."""
        return True

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a hand for each rank, or None where too few are ready."""
        self.check(request)
        ranks = request.rank_count
        if self.n_samples_per_prompt is None and request.batch_unit == "sample":
            rows = view.ready(request.total_size)
            return (
                Plan.of([rows[rank::ranks] for rank in range(ranks)]) if rows.size >= max(request.min_size, 1) else None
            )
        groups = take_groups(
            view, request, block_size=self.n_samples_per_prompt, incomplete_groups=self.incomplete_groups
        )
        return None if groups is None else Plan.of(rows_of_ranks(groups, deal_in_rounds(groups, ranks)))
