"""Samplers that use token counts to balance ranks, fill token budgets, or pack samples."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing import Overlong, PackPlan, get_costs, get_even_partitions, get_free_partitions, plan_packs
from tq_service.balancing.packs import check_overlong, pack_ranks_equally
from tq_service.balancing.partitions import CostName, check_cost_name, check_count
from tq_service.errors import InvalidArgumentError
from tq_service.samplers.by_order import GroupSampler, rows_of_ranks, take_groups
from tq_service.state.plan import Groups, Indexes, LengthSource, Pack, Plan, PlanRequest, RankPlan, View

# Batches within these limits take less than a millisecond to plan, so they are planned on the event loop. The limits
# apply to the number of groups to balance, groups to assign within a budget, samples to pack, and optimizer steps over
# all ranks.
_QUICK_BALANCED_GROUPS = 128
_QUICK_BUDGET_GROUPS = 32
_QUICK_PACKED_SAMPLES = 32
_QUICK_STEPS = 8
# Maximum number of packs in a plan, over all ranks. Empty packs count, because they cost as much as full packs.
_MOST_PACKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSampler(GroupSampler):
    """A group sampler that uses token counts. A sample is not ready until its token count is known.

    Attributes:
        length_key: custom_meta column that contains each sample's token count. A sample without a value in this column
            is ready only if `length_field` is also set. null: `total_lengths` is used for samples that have a value in
            that column.
        length_field: field that provides the token counts of samples without a value in the `length_key` column. A
            sample's token count is the length of its row. null: the length of the longest one-dimensional row in
            `data_fields`, ignoring fields declared as dense. With null, a sample must have a value in the column if
            `length_key` is set.
        align: each sample's token count is rounded up to a multiple of this number, as it is with
            `PackOptions(align=)`.
        cost: quantity to balance across the ranks: "tokens", or "attention", which is 24576 L + L**2 for L tokens.
    """

    length_key: str | None = None
    length_field: str | None = None
    align: int = 1
    cost: CostName = "tokens"

    def __post_init__(self) -> None:
        GroupSampler.__post_init__(self)
        if self.length_key == "":
            raise ValueError("length_key: got an empty name, expected the name of a custom_meta column")
        check_count("align", self.align)
        check_cost_name(self.cost)

    @property
    def length(self) -> LengthSource:
        """Source of the samples' token counts."""
        return LengthSource(key=self.length_key, field=self.length_field)

    def read_lengths(self, view: View, rows: Indexes) -> Indexes:
        """Return the token counts of the rows as an array of shape `(n,)`.

        Raises:
            InvalidArgumentError: a token count is negative.
        """
        lengths = view.lengths(rows)
        if lengths.min(initial=0) < 0:
            position = int(np.argmin(lengths))
            raise InvalidArgumentError(
                f"length: got {lengths[position]} for sample {rows[position]}, expected a token count of at least 0; "
                f"correct the custom_meta column {self.length.column!r} with SetCustomMeta",
                field="sampler_config",
                metadata={"column": self.length.column},
            )
        return lengths

    def aligned(self, lengths: Indexes) -> Indexes:
        """Round token counts up to multiples of `align`."""
        return -(-lengths // self.align) * self.align

    def check_aligned(self, name: str, value: int) -> None:
        """Raise ValueError if an option's value is not a multiple of `align`."""
        if value % self.align:
            raise ValueError(f"{name}: got {value}; expected a multiple of align, which is {self.align}")

    def refuse_micro_batch_size(self, request: PlanRequest, option: str) -> None:
        """Raise InvalidArgumentError if the request sets micro_batch_size, which conflicts with `option`."""
        if request.micro_batch_size is not None:
            raise InvalidArgumentError(
                f"micro_batch_size: got {request.micro_batch_size} for sampler {self.name!r}, which forms "
                f"micro-batches based on {option}; omit micro_batch_size or {option}",
                field="micro_batch_size",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqlenBalancedSampler(LengthSampler):
    """Takes complete groups and balances token totals across the ranks.

    The sampler takes a single batch for all ranks, choosing groups in the order of their first members. The
    Karmarkar-Karp algorithm splits the batch by the token totals of the groups, and swaps refine the result. The number
    of groups per rank differs by at most one. If all groups have the same size, each rank gets `batch_size` samples.
    Groups on the same rank keep their order.
    """

    name: ClassVar[str] = "seqlen_balanced"

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return whether the batch has few enough groups to be balanced on the event loop."""
        group_size = self.n_samples_per_prompt if request.batch_unit == "sample" else 1
        return request.total_size <= _QUICK_BALANCED_GROUPS * (group_size or 1)

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a balanced share of the batch for each rank, or None if too few groups are ready.

        Raises:
            InvalidArgumentError: a token count is negative.
        """
        self.check(request)
        groups = take_groups(self.ready_groups(view), request)
        if groups is None:
            return None
        lengths = self.aligned(self.read_lengths(view, groups.rows))
        costs = np.add.reduceat(get_costs(lengths, self.cost), groups.starts)
        parts = get_even_partitions(costs, request.rank_count)
        return Plan.of(rows_of_ranks(groups, [np.array(part, dtype=np.int64) for part in parts]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetSampler(LengthSampler):
    """Fills each rank's token budget with ready samples, in complete groups.

    Groups are taken in the order of their first members, until a group does not fit. Token totals (or costs) are
    balanced across the ranks. If costs are balanced instead of tokens, the ranks' token totals differ, so fewer groups
    fit. `batch_size` is the maximum number of samples (or groups) per rank. The sampler waits until the next ready
    group would exceed the budget, `batch_size` is reached, or no more samples can arrive.

    Attributes:
        tokens_per_rank: maximum number of tokens per rank.
        tokens_per_micro_batch: maximum number of tokens per micro-batch. The samples of each rank are split evenly into
            micro-batches, and all ranks have the same number of micro-batches. null: micro_batch_size determines the
            micro-batches.
        packs_multiple_of: the number of micro-batches of each rank must be a multiple of this number. Requires
            `tokens_per_micro_batch`.
        overlong: how to handle samples that exceed the token limit for a rank or micro-batch, and groups that exceed
            the limit for a rank. "error" rejects the batch. "truncate" includes only the first `tokens_per_micro_batch`
            tokens of each sample in the plan, but still rejects the batch if a group is too long. "drop" permanently
            excludes the sample or group. Dropped samples are listed in `RankPlan.dropped`. They count as skipped and
            also count toward `batch_size`.
    """

    name: ClassVar[str] = "token_budget"
    plans_below_min_size: ClassVar[bool] = True

    tokens_per_rank: int
    tokens_per_micro_batch: int | None = None
    packs_multiple_of: int = 1
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
        check_count("tokens_per_rank", self.tokens_per_rank)
        if self.tokens_per_micro_batch is not None:
            check_count("tokens_per_micro_batch", self.tokens_per_micro_batch)
        check_count("packs_multiple_of", self.packs_multiple_of)
        check_overlong(self.overlong)
        LengthSampler.__post_init__(self)
        is_cut = self.overlong == "truncate"
        needing = "packs_multiple_of" if self.packs_multiple_of > 1 else "overlong" if is_cut else ""
        if needing and self.tokens_per_micro_batch is None:
            raise ValueError(
                f"{needing}: got {getattr(self, needing)!r} without tokens_per_micro_batch; expected both options. "
                "Without tokens_per_micro_batch, micro-batches are split by micro_batch_size"
            )
        if is_cut:
            self.check_aligned("tokens_per_micro_batch", self.tokens_per_micro_batch or 0)

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError if samples and tokens both limit micro-batches, or if there are too many packs."""
        if self.tokens_per_micro_batch is not None:
            self.refuse_micro_batch_size(request, "tokens_per_micro_batch")
        _check_pack_count(request, self.packs_multiple_of)

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return whether planning is quick: the batch is not split by tokens, and few groups must be assigned."""
        return self.tokens_per_micro_batch is None and request.total_size <= _QUICK_BUDGET_GROUPS

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return the samples for each rank, or None if the budget is not exhausted and more samples may arrive.

        Raises:
            InvalidArgumentError: a token count is negative, or the first group has more than `batch_size` samples. With
                `overlong="error"`, this error is also raised if the first group has more than `tokens_per_rank` tokens,
                or any of its samples has more than `tokens_per_micro_batch` tokens.
        """
        self.check(request)
        is_full = True
        groups = take_groups(self.ready_groups(view), replace(request, min_size=request.total_size))
        if groups is None:
            is_full = False
            groups = self.ready_groups(view)(request.total_size, unit=request.batch_unit)
        if not groups.rows.size:
            return None
        unit_count = groups.rows.size if request.batch_unit == "sample" else len(groups)
        has_enough = is_full or unit_count >= request.min_size
        true_lengths = self.read_lengths(view, groups.rows)
        if self.overlong == "truncate":
            true_lengths = np.minimum(true_lengths, self.tokens_per_micro_batch or 0)
        lengths = self.aligned(true_lengths)
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
        if self.tokens_per_micro_batch is not None:
            # Token counts of each rank's samples, in the order of the rank's rows.
            lengths_of_ranks = rows_of_ranks(Groups(rows=true_lengths[~is_dropped], sizes=kept.sizes), assignment)
            plan = self._split(plan, lengths_of_ranks, self.tokens_per_micro_batch)
        # Overlong samples after the first group that did not fit stay in the partition. A later batch drops them.
        goes = is_dropped & (group_of < kept_ids[taken_count:].min(initial=len(groups)))
        dropped = _dropped_by_rank(groups, group_of, np.flatnonzero(goes), [kept_ids[part] for part in assignment])
        return Plan(ranks=tuple(replace(part, dropped=rows) for part, rows in zip(plan.ranks, dropped, strict=True)))

    def _assign(self, groups: Groups, lengths: Indexes, request: PlanRequest) -> list[Indexes]:
        """Assign the groups to ranks in order until no more groups fit, and return the group positions on each rank.

        Tokens (or costs) are balanced. Assigning groups one by one to the least loaded rank yields a lower bound on the
        number of groups that fit. Comparing the groups with the total budget of all ranks yields an upper bound.
        Between these bounds, a binary search finds the largest number of groups that fit after balancing.

        Raises:
            InvalidArgumentError: the first group does not fit on any rank.
        """
        if not len(groups):
            return [groups.sizes] * request.rank_count
        tokens = np.add.reduceat(lengths, groups.starts)
        costs = np.add.reduceat(get_costs(lengths, self.cost), groups.starts)
        units = groups.sizes if request.batch_unit == "sample" else np.ones(len(groups), np.int64)
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
        best = self._assign_one_by_one(costs[:most], tokens[:most], units[:most], request)
        least = sum(part.size for part in best)
        best = self._balance(costs[:least], tokens, units, request) or best
        low, high = least + 1, most
        count = most  # try the upper bound first, since it is almost always the result
        while low <= high:
            found = self._balance(costs[:count], tokens, units, request)
            if found is None:
                high = count - 1
            else:
                best, low = found, count + 1
            count = (low + high) // 2
        return best

    def _assign_one_by_one(
        self, costs: Indexes, tokens: Indexes, units: Indexes, request: PlanRequest
    ) -> list[Indexes]:
        """Assign groups in order, each to the rank with the lowest cost, up to the first group that does not fit."""
        ranks: list[list[int]] = [[] for _ in range(request.rank_count)]
        loads = [(0, 0, 0, rank) for rank in range(request.rank_count)]
        for position, (cost, size, count) in enumerate(
            zip(costs.tolist(), tokens.tolist(), units.tolist(), strict=True)
        ):
            load, held, used, rank = loads[0]
            if held + size > self.tokens_per_rank or used + count > request.batch_size:
                break
            ranks[rank].append(position)
            heapq.heapreplace(loads, (load + cost, held + size, used + count, rank))
        return [np.array(part, np.int64) for part in ranks]

    def _balance(self, costs: Indexes, tokens: Indexes, units: Indexes, request: PlanRequest) -> list[Indexes] | None:
        """Balance the first `costs.size` groups across the ranks, or return None if a rank would exceed its limits."""
        for split in (get_free_partitions, get_even_partitions):
            parts = [np.array(part, np.int64) for part in split(costs, request.rank_count)]
            if all(
                tokens[part].sum() <= self.tokens_per_rank and units[part].sum() <= request.batch_size for part in parts
            ):
                return parts
        return None

    def _is_overlong(self, groups: Groups, lengths: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the samples to drop: overlong samples, and all members of overlong groups."""
        if self.overlong != "drop":
            return np.zeros(lengths.size, np.bool_)
        is_dropped = lengths > min(self.tokens_per_rank, self.tokens_per_micro_batch or self.tokens_per_rank)
        totals = np.add.reduceat(np.where(is_dropped, 0, lengths), groups.starts)
        dropped: NDArray[np.bool_] = is_dropped | np.repeat(totals > self.tokens_per_rank, groups.sizes)
        return dropped

    def _oversized(self, groups: Groups, lengths: Indexes, batch_size: int) -> InvalidArgumentError:
        """Return the error to raise when the first group does not fit on any rank."""
        size = int(groups.sizes[0])
        total, longest = int(lengths[:size].sum()), int(lengths[:size].max())
        within_tokens = total <= self.tokens_per_rank and longest <= (self.tokens_per_micro_batch or longest)
        if within_tokens:
            return InvalidArgumentError(
                f"batch_size: got {batch_size} samples; expected at least {size}, the size of the group with sample "
                f"{groups.rows[0]}, because groups are not split. Increase batch_size, or set batch_unit to 'group'",
                field="batch_size",
            )
        if total > self.tokens_per_rank:
            what = f"got {total} tokens in the group of" if size > 1 else f"got {total} tokens for"
            limit = f"tokens_per_rank ({self.tokens_per_rank})"
        else:
            what = f"got {longest} tokens for a sample in the group of" if size > 1 else f"got {longest} tokens for"
            limit = f"tokens_per_micro_batch ({self.tokens_per_micro_batch})"
        rounded = f", each sample rounded up to a multiple of {self.align}" if self.align > 1 else ""
        return InvalidArgumentError(
            f"length: {what} sample {groups.rows[0]}{rounded}, expected at most {limit}; increase the "
            "limit, clear the sample, or set overlong to 'drop'",
            field="sampler_config",
            metadata={"column": self.length.column},
        )

    def _split(self, plan: Plan, lengths_of_ranks: list[Indexes], tokens_per_micro_batch: int) -> Plan:
        """Split each rank's samples into micro-batches, with the same number of micro-batches on every rank."""
        packed = pack_ranks_equally(
            [self.aligned(lengths) for lengths in lengths_of_ranks],
            tokens_per_micro_batch,
            multiple_of=self.packs_multiple_of,
            spread=True,
        )
        ranks = []
        for part, lengths, bins in zip(plan.ranks, lengths_of_ranks, packed, strict=True):
            positions = (np.array(sorted(items), np.int64) for items in bins)
            packs = tuple(Pack(positions=members, lengths=lengths[members]) for members in positions)
            ranks.append(RankPlan(rows=part.rows, steps=(packs,)))
        return Plan(ranks=tuple(ranks))


def _dropped_by_rank(
    groups: Groups, group_of: Indexes, dropped: Indexes, groups_of_ranks: list[Indexes]
) -> Iterator[Indexes]:
    """Yield the dropped rows of each rank.

    If other members of a row's group are assigned to a rank, that rank reports the row. Otherwise, rows are distributed
    round-robin by group.
    """
    rank_of = np.arange(len(groups)) % len(groups_of_ranks)
    for rank, own in enumerate(groups_of_ranks):
        rank_of[own] = rank
    rank_of_dropped = rank_of[group_of[dropped]]
    for rank in range(len(groups_of_ranks)):
        yield groups.rows[dropped[rank_of_dropped == rank]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSampler(LengthSampler):
    """Divides a batch among the ranks and their optimizer steps, and packs the samples of each step.

    Each rank gets `optimizer_steps` steps, whose packs contain up to `pack_max_length` tokens. The groups of a batch
    are taken in the order of their first members. Groups are distributed evenly across the ranks, and each rank's
    samples are distributed across the steps by token count. The samples for each step are then packed into bins. In
    each step, every rank has the same number of packs, which is at least one. Packs that contain only padding make up
    the difference. A group is assigned to one rank but may be split across steps. With `batch_unit` "group" or
    "rollout", each rollout is assigned to a single step. `tq_service.balancing.plan_packs` implements the algorithm.

    Attributes:
        optimizer_steps: exact number of optimizer steps per batch.
        pack_max_length: number of tokens per pack, which must be a multiple of `align`. `Pack.padding_tokens` fills
            each pack up to this length.
        overlong: how to handle samples with more than `pack_max_length` tokens. "error" rejects the batch. "truncate"
            plans only the first `pack_max_length` tokens, and `Pack.lengths` contains the truncated length. "drop"
            permanently excludes the sample, which is listed in `RankPlan.dropped` and counts as skipped.
        even_steps: whether to balance the token totals of each rank's steps. If false, as few packs as possible are
            used. The numbers of packs in any two steps then differ by at most one, or by at most `packs_multiple_of`.
        packs_multiple_of: each step's number of packs must be a multiple of this number.
    """

    name: ClassVar[str] = "packed"

    optimizer_steps: int
    pack_max_length: int
    overlong: Overlong = "error"
    even_steps: bool = True
    packs_multiple_of: int = 1

    def __post_init__(self) -> None:
        check_count("optimizer_steps", self.optimizer_steps)
        check_count("pack_max_length", self.pack_max_length)
        check_count("packs_multiple_of", self.packs_multiple_of)
        LengthSampler.__post_init__(self)
        self.check_aligned("pack_max_length", self.pack_max_length)
        check_overlong(self.overlong)

    def check(self, request: PlanRequest) -> None:
        """Validate a request against the sampler's options.

        Raises:
            InvalidArgumentError: `batch_size` is not a multiple of the group size, `micro_batch_size` is set, or the
                plan would have too many packs across all ranks.
        """
        LengthSampler.check(self, request)
        self.refuse_micro_batch_size(request, "pack_max_length")
        _check_pack_count(request, self.packs_multiple_of, self.optimizer_steps)

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return whether the batch has few enough samples and optimizer steps to be packed on the event loop."""
        group_size = 1 if request.batch_unit == "sample" else self.n_samples_per_prompt
        if group_size is None or self.optimizer_steps * self.packs_multiple_of * request.rank_count > _QUICK_STEPS:
            return False
        return request.total_size * group_size <= _QUICK_PACKED_SAMPLES

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return the steps and packs for each rank, or None if too few groups are ready.

        Raises:
            InvalidArgumentError: a token count is negative or, with `overlong="error"`, exceeds `pack_max_length`.
        """
        self.check(request)
        groups = take_groups(self.ready_groups(view), request)
        if groups is None:
            return None
        lengths = self.read_lengths(view, groups.rows)
        self._refuse_overlong(groups.rows, lengths)
        group_of = np.repeat(np.arange(len(groups)), groups.sizes)
        rollouts = None if request.batch_unit == "sample" else view.rollout_names(groups.rows)
        packs = plan_packs(
            self.aligned(lengths),
            dp_size=request.rank_count,
            optimizer_steps=self.optimizer_steps,
            pack_max_length=self.pack_max_length,
            groups=group_of.tolist(),
            rollouts=rollouts,
            overlong=self.overlong,
            cost=self.cost,
            even_steps=self.even_steps,
            packs_multiple_of=self.packs_multiple_of,
        )
        return _as_plan(groups, group_of, np.minimum(lengths, self.pack_max_length), packs)

    def _refuse_overlong(self, rows: Indexes, lengths: Indexes) -> None:
        if self.overlong != "error" or lengths.max(initial=0) <= self.pack_max_length:
            return
        first = int(np.argmax(lengths > self.pack_max_length))
        raise InvalidArgumentError(
            f"length: got {lengths[first]} for sample {rows[first]}, expected at most pack_max_length "
            f"({self.pack_max_length}); increase pack_max_length, clear the sample, or set "
            "overlong to 'truncate' or 'drop'",
            field="sampler_config",
            metadata={"column": self.length.column},
        )


def _as_plan(groups: Groups, group_of: Indexes, lengths: Indexes, packs: PackPlan) -> Plan:
    """Convert packs of sample indexes to a plan that contains rows and the token counts of each pack."""
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
                steps=tuple(
                    tuple(_as_pack(samples, pack, lengths, packs.pack_max_length) for pack in step) for step in steps
                ),
            )
            for samples, rows, steps in zip(samples_of_ranks, dropped, packs.packs, strict=True)
        )
    )


def _as_pack(samples: Indexes, pack: list[int], lengths: Indexes, pack_max_length: int) -> Pack:
    members = np.array(pack, np.int64)
    return Pack(
        positions=samples.searchsorted(members),
        lengths=lengths[members],
        padding_tokens=pack_max_length - int(lengths[members].sum()),
    )


def _check_pack_count(request: PlanRequest, packs_multiple_of: int, optimizer_steps: int = 1) -> None:
    """Raise InvalidArgumentError if a plan may need too many packs across all ranks, including empty packs."""
    pack_count = optimizer_steps * packs_multiple_of * request.rank_count
    if pack_count > _MOST_PACKS:
        option = "packs_multiple_of" if optimizer_steps == 1 else "optimizer_steps"
        got = packs_multiple_of if optimizer_steps == 1 else optimizer_steps
        raise InvalidArgumentError(
            f"{option}: got {got} for {request.rank_count} rank(s), which makes {pack_count} packs in total; expected "
            f"at most {_MOST_PACKS}. Plan fewer packs per batch",
            field="sampler_config",
            metadata={"option": option},
        )
