"""Batches measured in tokens: each rank gets as many ready samples as its budget holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing.plan_packs import check_count
from tq_service.balancing.rank_packing import pack_ranks_equally
from tq_service.balancing.token_budget import RankBudget, assign_within
from tq_service.errors import InvalidArgumentError
from tq_service.samplers.token_lengths import LengthSampler
from tq_service.samplers.whole_groups import rows_of_ranks
from tq_service.state.plan import Groups, Indexes, Pack, Plan, PlanRequest, RankPlan, View

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
        overlong: what to do with a sample of more tokens than a rank or a micro-batch may have, and with a group of
            more than a rank may have: error refuses the batch, drop leaves it out of the batch for good: it is in
            `RankPlan.dropped` and counts as skipped. What is dropped counts for `batch_size`.
    """

    name: ClassVar[str] = "token_budget"
    plans_below_min_size: ClassVar[bool] = True

    tokens_per_rank: int
    tokens_per_micro_batch: int | None = None
    overlong: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        check_count("tokens_per_rank", self.tokens_per_rank)
        if self.tokens_per_micro_batch is not None:
            check_count("tokens_per_micro_batch", self.tokens_per_micro_batch)
        if self.overlong not in ("error", "drop"):
            raise ValueError(f"overlong: got {self.overlong!r}, expected 'error' or 'drop'")
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
            InvalidArgumentError: a length is negative, the first group alone has more samples than a rank may have, or,
                with `overlong="error"`, more tokens than a rank or, in one of its samples, a micro-batch may have.
        """
        self.check(request)
        groups, is_full = self._take(view, request)
        if not groups.rows.size:
            return None
        lengths = self.read_lengths(view, groups.rows)
        if self.overlong == "drop" and (is_dropped := self._is_overlong(groups, lengths)).any():
            return self._plan_without(groups, lengths, is_dropped, is_full, request)
        return self._plan_all(groups, lengths, is_full, request)

    def _plan_all(self, groups: Groups, lengths: Indexes, is_full: bool, request: PlanRequest) -> Plan | None:
        """Return the plan of as many of some groups as fit."""
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

    def _plan_without(
        self, groups: Groups, lengths: Indexes, is_dropped: NDArray[np.bool_], is_full: bool, request: PlanRequest
    ) -> Plan | None:
        """Return the plan of the members of groups that are not dropped; what is dropped goes with them, or in turn.

        Of groups behind the first that does not fit nothing is dropped yet.
        """
        group_of = np.repeat(np.arange(len(groups)), groups.sizes)
        kept_ids, kept_sizes = np.unique(group_of[~is_dropped], return_counts=True)
        units = len(groups) if request.batch_unit == "group" else groups.rows.size
        kept = Groups(rows=groups.rows[~is_dropped], sizes=kept_sizes)
        plan: Plan | None = Plan.of([groups.rows[:0]] * request.rank_count)
        if len(kept):
            has_enough = is_full or units >= request.min_size
            plan = self._plan_all(kept, lengths[~is_dropped], has_enough, request)
        elif not is_full and units < request.min_size:
            return None
        if plan is None:
            return None
        rank_of = np.arange(len(groups)) % request.rank_count
        group_of_row = dict(zip(groups.rows.tolist(), group_of.tolist(), strict=True))
        taken = [[group_of_row[row] for row in part.rows.tolist()] for part in plan.ranks]
        for rank, ids in enumerate(taken):
            rank_of[ids] = rank
        left = np.setdiff1d(kept_ids, [group for ids in taken for group in ids])
        goes = is_dropped & (group_of < left.min(initial=len(groups)))
        dropped = (groups.rows[goes & (rank_of[group_of] == rank)] for rank in range(request.rank_count))
        return Plan(ranks=tuple(replace(part, dropped=rows) for part, rows in zip(plan.ranks, dropped, strict=True)))

    def _is_overlong(self, groups: Groups, lengths: Indexes) -> NDArray[np.bool_]:
        """Return which members of groups are dropped: those too long by themselves, and all of groups that are."""
        is_dropped = lengths > min(self.tokens_per_rank, self.tokens_per_micro_batch or self.tokens_per_rank)
        totals = np.add.reduceat(np.where(is_dropped, 0, lengths), groups.starts)
        dropped: NDArray[np.bool_] = is_dropped | np.repeat(totals > self.tokens_per_rank, groups.sizes)
        return dropped

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
            f"{self.length_key}: {what} sample {groups.rows[0]}, expected at most {limit}; raise it, clear the "
            "sample, or choose overlong 'drop'",
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
