"""Samples assigned round-robin to trainer ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tq_service.errors import InvalidArgumentError
from tq_service.samplers.whole_groups import GroupSampler, assign_round_robin, rows_of_ranks
from tq_service.state.plan import Plan, PlanRequest, View


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAwareSampler(GroupSampler):
    """Assigns ready samples, or whole groups, round-robin to the ranks, so that all get the same mixture of ages.

    Every replica of a rank gets the same samples for a batch_index, other ranks get others. A short last batch is
    spread evenly. For trainer ranks only.

    Attributes:
        n_samples_per_prompt: keep groups of so many samples whole; without it single samples are assigned,
            or explicit groups with batch_unit group.
    """

    name: ClassVar[str] = "rank_aware"

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError for a queue worker, and where `batch_size` does not hold whole groups."""
        if not request.ranked:
            raise InvalidArgumentError(
                f"sampler: got {self.name!r} without dp_rank, expected dp_rank, dp_size and batch_index; queue workers "
                "use 'sequential' or 'grpo_group_n'",
                field="sampler",
            )
        GroupSampler.check(self, request)

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return True: samples are assigned, not searched."""
        return True

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return the share of each rank, or None where too few are ready."""
        self.check(request)
        ranks = request.rank_count
        if self.n_samples_per_prompt is None and request.batch_unit == "sample":
            rows = view.ready(request.total_size)
            return (
                Plan.of([rows[rank::ranks] for rank in range(ranks)]) if rows.size >= max(request.min_size, 1) else None
            )
        groups = self.take_groups(view, request)
        return None if groups is None else Plan.of(rows_of_ranks(groups, assign_round_robin(groups, ranks)))
