"""Batches measured in tokens: each rank gets as many ready samples as its budget holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing.plan_packs import check_count
from tq_service.balancing.rank_packing import pack_ranks_equally
from tq_service.balancing.token_budget import RankBudget, assign_within
from tq_service.domain.plan import Groups, Indexes, Pack, Plan, PlanRequest, RankPlan, View
from tq_service.errors import InvalidArgumentError
from tq_service.samplers.token_lengths import LengthSampler
from tq_service.samplers.whole_groups import rows_of_ranks

# Assigning up to so many groups takes less than a millisecond; larger batches are planned off the event loop.
_QUICK_GROUPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetSampler(LengthSampler):
    """Gives each rank as many ready samples, in whole groups, as its token budget holds.

    Groups are taken in the order of their first members, up to the first that no longer fits beside the others, and
    spread so that token totals are as equal as can be. `batch_size` is the most samples (or groups) that a rank gets. A
    batch is made when the next ready group would not fit, or `batch_size` is reached, or nothing more can come; until
    then the sampler waits for more.

    Attributes:
        tokens_per_rank: the most tokens that a rank gets.
        tokens_per_micro_batch: split each rank's part into micro-batches of at most so many tokens, as many for every
            rank, and spread it evenly over them; without it: by micro_batch_size.
    """

    name: ClassVar[str] = "token_budget"
    plans_below_min_size: ClassVar[bool] = True

    tokens_per_rank: int
    tokens_per_micro_batch: int | None = None

    def __post_init__(self) -> None:
        check_count("tokens_per_rank", self.tokens_per_rank)
        if self.tokens_per_micro_batch is not None:
            check_count("tokens_per_micro_batch", self.tokens_per_micro_batch)
        LengthSampler.__post_init__(self)

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError where micro-batches are limited by samples and by tokens."""
        if self.tokens_per_micro_batch is not None:
            self.refuse_micro_batch_size(request, "tokens_per_micro_batch")

    def runs_inline(self, request: PlanRequest) -> bool:
        """Whether few groups are to be assigned."""
        return self.tokens_per_micro_batch is None and request.total_size <= _QUICK_GROUPS

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return each rank's samples, or None where the budget is not used up and more may come.

        Raises:
            InvalidArgumentError: a length is negative, or the first group alone is more than a rank or, in one of its
                samples, a micro-batch may have.
        """
        self.check(request)
        groups, is_full = self._take(view, request)
        if not groups.rows.size:
            return None
        lengths = self.read_lengths(view, groups.rows)
        units = np.ones(len(groups), np.int64) if request.batch_unit == "group" else groups.sizes
        fitting = self._fitting_count(groups, lengths, units <= request.batch_size)
        if not fitting:
            raise self._oversized(groups, lengths, request.batch_size)
        budget = RankBudget(rank_count=request.rank_count, tokens=self.tokens_per_rank, units=request.batch_size)
        assignment = assign_within(budget, np.add.reduceat(lengths, groups.starts)[:fitting], units[:fitting])
        is_full |= sum(part.size for part in assignment) < len(groups)
        is_full |= int(lengths.sum()) >= self.tokens_per_rank * request.rank_count
        if not is_full and int(units.sum()) < request.min_size:
            return None
        plan = Plan.of(rows_of_ranks(groups, assignment))
        if self.tokens_per_micro_batch is None:
            return plan
        return _split(plan, [lengths[_members(groups, part)] for part in assignment], self.tokens_per_micro_batch)

    def _take(self, view: View, request: PlanRequest) -> tuple[Groups, bool]:
        """Return the next whole groups, and whether they are all that `batch_size` allows."""
        full = self.take_groups(view, replace(request, min_size=request.total_size))
        if full is not None:
            return full, True
        return self.ready_groups(view, request.total_size, request.batch_unit), False

    def _fitting_count(self, groups: Groups, lengths: Indexes, is_few: NDArray[np.bool_]) -> int:
        """Return how many groups come before the first that fits no rank, or whose samples fit no micro-batch."""
        too_large = ~is_few | (np.add.reduceat(lengths, groups.starts) > self.tokens_per_rank)
        if self.tokens_per_micro_batch is not None:
            too_large |= np.maximum.reduceat(lengths, groups.starts) > self.tokens_per_micro_batch
        return int(too_large.argmax()) if too_large.any() else len(groups)

    def _oversized(self, groups: Groups, lengths: Indexes, batch_size: int) -> InvalidArgumentError:
        """Return the error of a first group that no rank can have."""
        size = int(groups.sizes[0])
        total, longest = int(lengths[:size].sum()), int(lengths[:size].max())
        within_tokens = total <= self.tokens_per_rank and longest <= (self.tokens_per_micro_batch or longest)
        if within_tokens:
            return InvalidArgumentError(
                f"batch_size: got {batch_size} samples, expected at least {size}: the group of sample {groups.rows[0]} "
                "has so many and stays whole; raise batch_size or count groups with batch_unit group",
                field="batch_size",
            )
        if total > self.tokens_per_rank:
            what = f"got {total} tokens in the group of" if size > 1 else f"got {total} tokens for"
            limit = f"tokens_per_rank ({self.tokens_per_rank})"
        else:
            what = f"got {longest} tokens for a sample in the group of" if size > 1 else f"got {longest} tokens for"
            limit = f"tokens_per_micro_batch ({self.tokens_per_micro_batch})"
        return InvalidArgumentError(
            f"{self.length_key}: {what} sample {groups.rows[0]}, expected at most {limit}; raise it, or clear the "
            "sample",
            field="sampler_config",
            metadata={"column": self.length_key},
        )


def _members(groups: Groups, part: Indexes) -> Indexes:
    """Return the positions in `groups.rows` of the members of these groups."""
    starts = groups.starts
    empty = np.zeros(0, np.int64)
    members = (np.arange(starts[at], starts[at] + groups.sizes[at]) for at in part.tolist())
    return np.concatenate([empty, *members])


def _split(plan: Plan, lengths_of_ranks: list[Indexes], tokens_per_micro_batch: int) -> Plan:
    packed = pack_ranks_equally(lengths_of_ranks, tokens_per_micro_batch, spread=True)
    ranks = []
    for part, lengths, bins in zip(plan.ranks, lengths_of_ranks, packed, strict=True):
        positions = (np.array(sorted(items), np.int64) for items in bins)
        packs = tuple(Pack(positions=members, lengths=lengths[members]) for members in positions)
        ranks.append(RankPlan(rows=part.rows, steps=(packs,)))
    return Plan(ranks=tuple(ranks))
