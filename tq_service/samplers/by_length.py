"""Samplers that balance, budget or pack samples by their token counts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing import Overlong, PackPlan, get_costs, get_even_partitions, get_free_partitions, plan_packs
from tq_service.balancing.packs import check_overlong, pack_ranks_equally
from tq_service.balancing.partitions import CostName, check_cost_name, check_count
from tq_service.errors import InvalidArgumentError
from tq_service.samplers.by_order import GroupSampler, rows_of_ranks, take_groups
from tq_service.state.plan import Groups, Indexes, LengthSource, Pack, Plan, PlanRequest, RankPlan, View

# Planning takes less than a millisecond up to so many groups that are balanced, or assigned within a budget, and up to
# so many samples that are packed for so many steps of all ranks; larger batches are planned off the event loop.
_QUICK_BALANCED_GROUPS = 128
_QUICK_BUDGET_GROUPS = 32
_QUICK_PACKED_SAMPLES = 32
_QUICK_STEPS = 8
# Of all ranks: a plan has packs for each step, empty ones included, so that a step too many costs as much as any other.
_MOST_STEPS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSampler(GroupSampler):
    """A sampler of whole groups that needs the token count of each sample; samples without one are not ready.

    Attributes:
        length_key: custom_meta column with the token count of a sample.
        length_field: field whose row length stands in where the column has no value; without it a sample
            needs the column.
    """

    length_key: str = "total_lengths"
    length_field: str | None = None

    def __post_init__(self) -> None:
        GroupSampler.__post_init__(self)
        if not self.length_key:
            raise ValueError("length_key: got an empty name, expected a custom_meta column")

    @property
    def length(self) -> LengthSource:
        """The token count of a sample."""
        return LengthSource(key=self.length_key, field=self.length_field)

    def read_lengths(self, view: View, rows: Indexes) -> Indexes:
        """Return the token counts `(n,)` of rows.

        Raises:
            InvalidArgumentError: one is negative.
        """
        lengths = view.lengths(rows)
        if lengths.min(initial=0) < 0:
            position = int(np.argmin(lengths))
            raise InvalidArgumentError(
                f"{self.length_key}: got {lengths[position]} for sample {rows[position]}, expected a token count of at "
                "least 0; correct it with SetCustomMeta",
                field="sampler_config",
                metadata={"column": self.length_key},
            )
        return lengths

    def refuse_micro_batch_size(self, request: PlanRequest, option: str) -> None:
        """Raise InvalidArgumentError where micro-batches are asked for beside those that `option` makes."""
        if request.micro_batch_size is not None:
            raise InvalidArgumentError(
                f"micro_batch_size: got {request.micro_batch_size} for sampler {self.name!r}, which splits "
                f"micro-batches by {option}; leave out one of the two",
                field="micro_batch_size",
            )


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
        group_size = self.n_samples_per_prompt if request.batch_unit == "sample" else 1
        return request.total_size <= _QUICK_BALANCED_GROUPS * (group_size or 1)

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a balanced share for each rank, or None where too few groups are ready.

        Raises:
            InvalidArgumentError: a length is negative.
        """
        self.check(request)
        groups = take_groups(self.ready_groups(view), request)
        if groups is None:
            return None
        lengths = self.read_lengths(view, groups.rows)
        costs = np.add.reduceat(get_costs(lengths, self.cost), groups.starts)
        parts = get_even_partitions(costs, request.rank_count)
        return Plan.of(rows_of_ranks(groups, [np.array(part, dtype=np.int64) for part in parts]))


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
        return self.tokens_per_micro_batch is None and request.total_size <= _QUICK_BUDGET_GROUPS

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return each rank's samples, or None where the budget is not used up and more may come.

        Raises:
            InvalidArgumentError: a length is negative, the first group alone has more samples than a rank may have, or,
                with `overlong="error"`, more tokens than a rank or, in one of its samples, a micro-batch may have.
        """
        self.check(request)
        is_full = True
        groups = take_groups(self.ready_groups(view), replace(request, min_size=request.total_size))
        if groups is None:
            is_full = False
            groups = self.ready_groups(view)(request.total_size, unit=request.batch_unit)
        if not groups.rows.size:
            return None
        unit_count = len(groups) if request.batch_unit == "group" else groups.rows.size
        has_enough = is_full or unit_count >= request.min_size
        lengths = self.read_lengths(view, groups.rows)
        is_dropped = self._is_overlong(groups, lengths)
        group_of = np.repeat(np.arange(len(groups)), groups.sizes)
        kept_ids, sizes = np.unique(group_of[~is_dropped], return_counts=True)
        kept, lengths = Groups(rows=groups.rows[~is_dropped], sizes=sizes), lengths[~is_dropped]
        assignment = self._assign(kept, lengths, request)
        taken_count = sum(part.size for part in assignment)
        has_enough |= taken_count < len(kept) or int(lengths.sum()) >= self.tokens_per_rank * request.rank_count
        if not has_enough:
            return None
        plan = Plan.of(rows_of_ranks(kept, assignment))
        if self.tokens_per_micro_batch is not None and taken_count:
            # The lengths of a rank's samples, in the order of its rows.
            lengths_of_ranks = rows_of_ranks(Groups(rows=lengths, sizes=kept.sizes), assignment)
            plan = _split(plan, lengths_of_ranks, self.tokens_per_micro_batch)
        # Of groups behind the first that does not fit nothing is dropped yet.
        goes = is_dropped & (group_of < kept_ids[taken_count:].min(initial=len(groups)))
        dropped = _dropped_by_rank(groups, group_of, np.flatnonzero(goes), [kept_ids[part] for part in assignment])
        return Plan(ranks=tuple(replace(part, dropped=rows) for part, rows in zip(plan.ranks, dropped, strict=True)))

    def _assign(self, groups: Groups, lengths: Indexes, request: PlanRequest) -> list[Indexes]:
        """Return positions of the groups of each rank, ascending; together the first ones, as many as fit.

        Token totals are as equal as can be. Assigning one by one to the least loaded rank tells how many surely fit.
        Between that number and what the budgets of all ranks together would hold, the largest number is searched that
        still fits when it is balanced.

        Raises:
            InvalidArgumentError: the first group fits no rank.
        """
        if not len(groups):
            return [groups.sizes] * request.rank_count
        tokens = np.add.reduceat(lengths, groups.starts)
        units = np.ones(len(groups), np.int64) if request.batch_unit == "group" else groups.sizes
        too_large = (units > request.batch_size) | (tokens > self.tokens_per_rank)
        if self.tokens_per_micro_batch is not None:
            too_large |= np.maximum.reduceat(lengths, groups.starts) > self.tokens_per_micro_batch
        if too_large[0]:
            raise self._oversized(groups, lengths, request.batch_size)
        if too_large.any():
            tokens, units = tokens[: too_large.argmax()], units[: too_large.argmax()]
        fits = np.cumsum(tokens) <= self.tokens_per_rank * request.rank_count
        fits &= np.cumsum(units) <= request.total_size
        most = int(fits.sum())
        best = self._assign_one_by_one(tokens[:most], units[:most], request)
        least = sum(part.size for part in best)
        best = self._balance(tokens[:least], units[:least], request) or best
        low, high = least + 1, most
        count = most  # nearly always the answer
        while low <= high:
            found = self._balance(tokens[:count], units[:count], request)
            if found is None:
                high = count - 1
            else:
                best, low = found, count + 1
            count = (low + high) // 2
        return best

    def _assign_one_by_one(self, tokens: Indexes, units: Indexes, request: PlanRequest) -> list[Indexes]:
        """Assign each group to the rank with the fewest tokens, until one does not fit there."""
        ranks: list[list[int]] = [[] for _ in range(request.rank_count)]
        loads = [(0, 0, rank) for rank in range(request.rank_count)]
        for position, (size, count) in enumerate(zip(tokens.tolist(), units.tolist(), strict=True)):
            load, used, rank = loads[0]
            if load + size > self.tokens_per_rank or used + count > request.batch_size:
                break
            ranks[rank].append(position)
            heapq.heapreplace(loads, (load + size, used + count, rank))
        return [np.array(part, np.int64) for part in ranks]

    def _balance(self, tokens: Indexes, units: Indexes, request: PlanRequest) -> list[Indexes] | None:
        """Assign all groups, balanced by tokens; None where a rank would get more than it may."""
        for split in (get_free_partitions, get_even_partitions):
            parts = [np.array(part, np.int64) for part in split(tokens, request.rank_count)]
            if all(
                tokens[part].sum() <= self.tokens_per_rank and units[part].sum() <= request.batch_size for part in parts
            ):
                return parts
        return None

    def _is_overlong(self, groups: Groups, lengths: Indexes) -> NDArray[np.bool_]:
        """Return which members of groups are dropped: those too long by themselves, and all of groups that are."""
        if self.overlong == "error":
            return np.zeros(lengths.size, np.bool_)
        is_dropped = lengths > min(self.tokens_per_rank, self.tokens_per_micro_batch or self.tokens_per_rank)
        totals = np.add.reduceat(np.where(is_dropped, 0, lengths), groups.starts)
        dropped: NDArray[np.bool_] = is_dropped | np.repeat(totals > self.tokens_per_rank, groups.sizes)
        return dropped

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


def _dropped_by_rank(
    groups: Groups, group_of: Indexes, dropped: Indexes, groups_of_ranks: list[Indexes]
) -> Iterator[Indexes]:
    """Yield the rows of dropped samples that each rank's part names: they go with their group, or in turn."""
    rank_of = np.arange(len(groups)) % len(groups_of_ranks)
    for rank, own in enumerate(groups_of_ranks):
        rank_of[own] = rank
    rank_of_dropped = rank_of[group_of[dropped]]
    for rank in range(len(groups_of_ranks)):
        yield groups.rows[dropped[rank_of_dropped == rank]]


def _split(plan: Plan, lengths_of_ranks: list[Indexes], tokens_per_micro_batch: int) -> Plan:
    packed = pack_ranks_equally(lengths_of_ranks, tokens_per_micro_batch, spread=True)
    ranks = []
    for part, lengths, bins in zip(plan.ranks, lengths_of_ranks, packed, strict=True):
        positions = (np.array(sorted(items), np.int64) for items in bins)
        packs = tuple(Pack(positions=members, lengths=lengths[members]) for members in positions)
        ranks.append(RankPlan(rows=part.rows, steps=(packs,)))
    return Plan(ranks=tuple(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSampler(LengthSampler):
    """Packs whole batches: each rank gets `optimizer_steps` steps of packs of at most `pack_max_length` tokens.

    A batch is taken in the order of the groups' first members, its groups are spread evenly over the ranks, the samples
    of a rank over the steps by their tokens, and each rank's step is bin packed. Every rank has the same number of
    packs in a step, at least one, completed by packs of padding only. Groups stay on one rank, though not in one
    step. All in `tq_service.balancing.plan_packs`.

    Attributes:
        optimizer_steps: optimizer steps of a batch, always exactly so many.
        pack_max_length: tokens of a pack; its samples have at most so many, `Pack.padding_tokens` fill it up.
        overlong: what to do with a sample of more tokens than a pack holds: error refuses the batch, truncate plans
            for its first `pack_max_length` tokens (`Pack.lengths` says so), drop leaves it out of the batch for good:
            it is in `RankPlan.dropped` and counts as skipped.
        cost: balanced over the ranks: tokens, or their cost with attention.
        even_steps: whether the steps of a rank get as equal numbers of tokens as can be; else the fewest packs, whose
            numbers differ by at most one between steps.
    """

    name: ClassVar[str] = "packed"

    optimizer_steps: int
    pack_max_length: int
    overlong: Overlong = "error"
    cost: CostName = "tokens"
    even_steps: bool = True

    def __post_init__(self) -> None:
        check_count("optimizer_steps", self.optimizer_steps)
        check_count("pack_max_length", self.pack_max_length)
        LengthSampler.__post_init__(self)
        check_overlong(self.overlong)
        check_cost_name(self.cost)

    def check(self, request: PlanRequest) -> None:
        """Refuse a request that the options do not fit.

        Raises:
            InvalidArgumentError: `batch_size` does not hold whole groups, a micro-batch size is given, or the steps of
                all ranks are more than one plan has.
        """
        LengthSampler.check(self, request)
        self.refuse_micro_batch_size(request, "pack_max_length")
        step_count = self.optimizer_steps * request.rank_count
        if step_count > _MOST_STEPS:
            raise InvalidArgumentError(
                f"optimizer_steps: got {self.optimizer_steps} for {request.rank_count} rank(s), {step_count} steps "
                f"together, expected at most {_MOST_STEPS}; plan fewer steps with a batch",
                field="sampler_config",
                metadata={"option": "optimizer_steps"},
            )

    def runs_inline(self, request: PlanRequest) -> bool:
        """Whether few samples are to be packed for few steps."""
        group_size = self.n_samples_per_prompt if request.batch_unit == "group" else 1
        if group_size is None or self.optimizer_steps * request.rank_count > _QUICK_STEPS:
            return False
        return request.total_size * group_size <= _QUICK_PACKED_SAMPLES

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return steps and packs for each rank, or None where too few groups are ready.

        Raises:
            InvalidArgumentError: a length is negative, or, with `overlong="error"`, more than a pack holds.
        """
        self.check(request)
        groups = take_groups(self.ready_groups(view), request)
        if groups is None:
            return None
        lengths = self.read_lengths(view, groups.rows)
        self._refuse_overlong(groups.rows, lengths)
        group_of = np.repeat(np.arange(len(groups)), groups.sizes)
        packs = plan_packs(
            lengths,
            dp_size=request.rank_count,
            optimizer_steps=self.optimizer_steps,
            pack_max_length=self.pack_max_length,
            groups=group_of.tolist(),
            overlong=self.overlong,
            cost=self.cost,
            even_steps=self.even_steps,
        )
        return _as_plan(groups, group_of, packs)

    def _refuse_overlong(self, rows: Indexes, lengths: Indexes) -> None:
        if self.overlong != "error" or lengths.max(initial=0) <= self.pack_max_length:
            return
        first = int(np.argmax(lengths > self.pack_max_length))
        raise InvalidArgumentError(
            f"{self.length_key}: got {lengths[first]} for sample {rows[first]}, expected at most pack_max_length "
            f"({self.pack_max_length}); raise pack_max_length, clear the sample, or choose "
            "overlong 'truncate' or 'drop'",
            field="sampler_config",
            metadata={"column": self.length_key},
        )


def _as_plan(groups: Groups, group_of: Indexes, packs: PackPlan) -> Plan:
    """Return the plan in rows."""
    samples_of_ranks = [
        np.array(sorted(sample for step in steps for pack in step for sample in pack), np.int64)
        for steps in packs.packs
    ]
    dropped = _dropped_by_rank(groups, group_of, packs.dropped, [group_of[samples] for samples in samples_of_ranks])
    return Plan(
        ranks=tuple(
            RankPlan(
                rows=groups.rows[samples],
                dropped=rows,
                steps=tuple(tuple(_as_pack(samples, pack, packs) for pack in step) for step in steps),
            )
            for samples, rows, steps in zip(samples_of_ranks, dropped, packs.packs, strict=True)
        )
    )


def _as_pack(samples: Indexes, pack: list[int], packs: PackPlan) -> Pack:
    members = np.array(pack, np.int64)
    lengths = packs.lengths[members]
    return Pack(
        positions=samples.searchsorted(members),
        lengths=lengths,
        padding_tokens=packs.pack_max_length - int(lengths.sum()),
    )
