"""Samplers that take ready samples or complete groups in order, and the base class of group samplers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing.partitions import check_count
from tq_service.errors import InvalidArgumentError
from tq_service.schema import Blocks
from tq_service.state.plan import Groups, Indexes, Plan, PlanRequest, Sampler, View

IncompleteGroups = Literal["skip", "take"]

# For each rank, the positions of its groups within a `Groups` object.
Assignment = Sequence[NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSampler(Sampler):
    """Takes ready samples in index order or in the order set by `order_by`.

    Each rank gets a block of `batch_size` consecutive samples. If the last batch is short, its samples are distributed
    as evenly as possible across the ranks. With `batch_unit="group"`, blocks consist of complete groups. With
    `batch_unit="rollout"`, blocks consist of complete rollouts.
    """

    name: ClassVar[str] = "sequential"

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return True, because slicing the ready samples is fast enough for the event loop."""
        return True

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a block of consecutive samples for each rank, or None if fewer than `request.min_size` are ready."""
        if request.batch_unit != "sample":
            groups = take_groups(view.ready_groups, request)
            if groups is None:
                return None
            return Plan.of(rows_of_ranks(groups, assign_blocks(groups, request.rank_count)))
        rows = view.ready(request.total_size)
        return Plan.of(even_blocks(rows, request.rank_count)) if rows.size >= max(request.min_size, 1) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSampler(Sampler):
    """A sampler that takes complete groups, in the order of their first members.

    Attributes:
        n_samples_per_prompt: number of samples in each group whose size was not declared. In a partition without named
            groups, every block of this many consecutive indexes is a group. null: use the named groups, or individual
            samples if there are no named groups.
        incomplete_groups: how to handle a group with failed or cleared samples: "skip" the group, or "take" its
            remaining samples.
        blocks: positions at which groups of consecutive indexes may begin. "aligned": only multiples of
            `n_samples_per_prompt`. "anywhere": any index, so any `n_samples_per_prompt` ready samples with consecutive
            indexes form a group.
    """

    n_samples_per_prompt: int | None = None
    incomplete_groups: IncompleteGroups = "skip"
    blocks: Blocks = "aligned"

    # With `slots=True`, a bare `super()` would refer to the replaced class. Subclasses therefore call this method
    # through the class.
    def __post_init__(self) -> None:
        if self.n_samples_per_prompt is not None:
            check_count("n_samples_per_prompt", self.n_samples_per_prompt)
        if self.incomplete_groups not in ("skip", "take"):
            raise ValueError(f"incomplete_groups: got {self.incomplete_groups!r}, expected 'skip' or 'take'")
        if self.blocks not in ("aligned", "anywhere"):
            raise ValueError(f"blocks: got {self.blocks!r}, expected 'aligned' or 'anywhere'")
        if self.blocks == "anywhere" and self.incomplete_groups == "take":
            raise ValueError(
                "incomplete_groups: got 'take' with blocks 'anywhere'; expected 'skip', because such blocks contain "
                "only ready samples. To take incomplete groups, name the groups, or set blocks to 'aligned'"
            )

    def check(self, request: PlanRequest) -> None:
        """Validate a request against the sampler's options.

        Raises:
            InvalidArgumentError: `batch_size` counts samples but is not a multiple of `n_samples_per_prompt`, or
                `n_samples_per_prompt` is set although `batch_unit` is "rollout".
        """
        group_size = self.n_samples_per_prompt
        if request.batch_unit == "rollout" and group_size is not None:
            raise InvalidArgumentError(
                f"n_samples_per_prompt: got {group_size} for sampler {self.name!r} with batch_unit 'rollout'; expected "
                f"none, because rollouts are taken regardless of their groups. Omit this option, or set batch_unit to "
                f"'group'",
                field="sampler_config",
                metadata={"option": "n_samples_per_prompt"},
            )
        if request.batch_unit == "group" or group_size is None or request.batch_size % group_size == 0:
            return
        raise InvalidArgumentError(
            f"batch_size: got {request.batch_size} samples for sampler {self.name!r}; expected a multiple of "
            f"n_samples_per_prompt ({group_size}), because groups are not split. Change batch_size, or set "
            f"batch_unit to 'group'",
            field="batch_size",
        )

    def ready_groups(self, view: View) -> Callable[..., Groups]:
        """Return `view.ready_groups` with the sampler's options bound; callers pass only the limit and its unit."""
        return partial(
            view.ready_groups,
            block_size=self.n_samples_per_prompt,
            take_incomplete=self.incomplete_groups == "take",
            blocks=self.blocks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOGroupNSampler(GroupSampler):
    """Takes complete groups of `n_samples_per_prompt` samples, in the order of their first members.

    If all groups have the same size, each rank gets consecutive groups with exactly `batch_size` samples. Group sizes
    can differ if groups were closed early, or if `incomplete_groups` is "take". If group sizes differ, samples are
    distributed as evenly as possible without splitting groups.

    Attributes:
        n_samples_per_prompt: number of samples in each group whose size was not declared. In a partition without named
            groups, every block of this many consecutive indexes is a group. Required.
    """

    name: ClassVar[str] = "grpo_group_n"

    n_samples_per_prompt: int

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return True, because assigning groups is fast."""
        return True

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return complete groups for each rank, or None if too few groups are ready."""
        self.check(request)
        groups = take_groups(self.ready_groups(view), request)
        if groups is None:
            return None
        if (groups.sizes == groups.sizes[:1]).all():
            assignment = assign_blocks(groups, request.rank_count)
        elif request.batch_unit != "sample":
            assignment = assign_round_robin(groups, request.rank_count, largest_first=True)
        else:
            assignment = assign_to_least_loaded(groups, request.rank_count)
        return Plan.of(rows_of_ranks(groups, assignment))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAwareSampler(GroupSampler):
    """Assigns ready samples or complete groups round-robin, giving every rank both older and newer samples.

    For each batch_index, all replicas of a rank get the same samples, and no sample is assigned to two ranks. A short
    last batch is distributed evenly. Only trainer ranks can use this sampler.

    Attributes:
        n_samples_per_prompt: number of samples in a group. Groups are not split. null: assign individual samples or,
            with batch_unit "group", named groups.
    """

    name: ClassVar[str] = "rank_aware"

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError for a queue worker, or if `batch_size` is not a multiple of the group size."""
        if not request.ranked:
            raise InvalidArgumentError(
                f"sampler: got {self.name!r} without dp_rank; expected dp_rank, dp_size and batch_index. For queue "
                "workers, use 'sequential' or 'grpo_group_n'",
                field="sampler",
            )
        GroupSampler.check(self, request)

    def runs_inline(self, request: PlanRequest) -> bool:
        """Return True, because assigning samples is fast."""
        return True

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return the samples for each rank, or None if too few samples are ready."""
        self.check(request)
        ranks = request.rank_count
        if self.n_samples_per_prompt is None and request.batch_unit == "sample":
            rows = view.ready(request.total_size)
            is_enough = rows.size >= max(request.min_size, 1)
            return Plan.of([rows[rank::ranks] for rank in range(ranks)]) if is_enough else None
        groups = take_groups(self.ready_groups(view), request)
        return None if groups is None else Plan.of(rows_of_ranks(groups, assign_round_robin(groups, ranks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSampler(Sampler):
    """Takes the samples listed in the `rows` option, in that order, once all of these samples are ready.

    This sampler is intended for queue workers that look up samples and then claim some of them. If another worker has
    claimed any of these samples, the sampler does not return a batch.

    Attributes:
        rows: distinct global indexes of the samples to claim. `batch_size` must equal the number of indexes.
    """

    name: ClassVar[str] = "chosen"

    rows: Sequence[int]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows: got an empty list, expected at least one global index")
        if len(set(self.rows)) != len(self.rows):
            raise ValueError("rows: got duplicate global indexes, expected distinct ones")

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError if the request is for ranks or groups, or if `batch_size` is not the row count."""
        if request.ranked or request.batch_unit != "sample":
            raise InvalidArgumentError(
                f"sampler: got {self.name!r} for {'trainer ranks' if request.ranked else 'groups'}; expected a queue "
                "worker that requests samples",
                field="sampler",
            )
        if request.batch_size != len(self.rows):
            raise InvalidArgumentError(
                f"batch_size: got {request.batch_size}; expected {len(self.rows)}, the number of rows in "
                "sampler_config",
                field="batch_size",
            )

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return a plan with the listed rows, or None if any of these rows is not ready."""
        self.check(request)
        rows = np.array(self.rows, np.int64)
        return Plan.of([rows]) if np.isin(rows, view.ready()).all() else None


def take_groups(ready_groups: Callable[..., Groups], request: PlanRequest) -> Groups | None:
    """Return the next complete groups, up to the batch size, or None if too few groups are ready.

    The ready groups suffice if their total size is at least `request.min_size`. They also suffice if adding the next
    ready group would exceed `request.total_size`, because waiting would not help. To detect this, the function reads
    one more group than it returns.

    Args:
        ready_groups: function that returns ready groups up to a limit, which is counted in a given unit.
            `View.ready_groups` is such a function.
        request: plan request, which specifies the batch's size, ranks and unit.

    Raises:
        InvalidArgumentError: the first group is larger than the entire batch, so it can never be part of a plan.
    """
    unit, total = request.batch_unit, request.total_size
    groups = ready_groups(total, unit=unit)
    size = groups.rows.size if unit == "sample" else len(groups)
    if len(groups) and size >= request.min_size:
        return groups
    if unit != "sample":
        return None  # every group counts as one unit, so the batch is not full yet
    more = ready_groups(len(groups) + 1, unit="group")
    ends = np.cumsum(more.sizes)
    count = int(np.searchsorted(ends, total, side="right"))
    fitting = Groups(rows=more.rows[: int(ends[count - 1]) if count else 0], sizes=more.sizes[:count])
    if count == len(more):
        # All groups fit. Compare with the minimum again, because groups may have become ready since the first call.
        return fitting if count and fitting.rows.size >= request.min_size else None
    if not count:
        raise InvalidArgumentError(
            f"batch_size: got {request.batch_size} samples for {request.rank_count} rank(s), {total} in total; "
            f"expected at least {int(more.sizes[0])}, the size of the group with sample {int(more.rows[0])}, because "
            "groups are not split. Increase batch_size, or set batch_unit to 'group'",
            field="batch_size",
        )
    return fitting


def rows_of_ranks(groups: Groups, assignment: Assignment) -> list[Indexes]:
    """Return each rank's rows: the members of its groups, in the order in which the groups were assigned."""
    members = np.split(groups.rows, groups.starts[1:])
    empty = np.zeros(0, np.int64)
    return [np.concatenate([empty, *(members[position] for position in part.tolist())]) for part in assignment]


def assign_blocks(groups: Groups, rank_count: int) -> Assignment:
    """Assign a block of consecutive groups to each rank. The group counts of any two ranks differ by at most one."""
    return even_blocks(np.arange(len(groups)), rank_count)


def even_blocks(values: Indexes, count: int) -> list[Indexes]:
    """Split values into `count` consecutive blocks, as `np.array_split` does.

    The block sizes differ by at most one, and larger blocks come first.
    """
    size, longer = divmod(values.size, count)
    ends = [size * block + min(block, longer) for block in range(count + 1)]
    return [values[start:end] for start, end in pairwise(ends)]


def assign_to_least_loaded(groups: Groups, rank_count: int) -> Assignment:
    """Assign the groups in descending order of size, each to the rank with the fewest samples so far."""
    loads = [(0, rank) for rank in range(rank_count)]
    rank_of = np.empty(len(groups), np.int64)
    sizes = groups.sizes.tolist()
    for position in np.argsort(-groups.sizes, kind="stable").tolist():
        load, rank = loads[0]
        rank_of[position] = rank
        heapq.heapreplace(loads, (load + sizes[position], rank))
    return _positions_by_rank(rank_of, rank_count)


def assign_round_robin(groups: Groups, rank_count: int, *, largest_first: bool = False) -> Assignment:
    """Assign groups in rounds of one group per rank, so the numbers of groups per rank differ by at most one.

    Rounds take groups in the order passed or, with `largest_first`, by descending size. Within a round, the largest
    groups are assigned to the ranks with the fewest samples. Groups of equal size are assigned round-robin.
    """
    order = np.argsort(-groups.sizes, kind="stable") if largest_first else np.arange(len(groups))
    loads = np.zeros(rank_count, np.int64)
    rank_of = np.empty(len(groups), np.int64)
    for first in range(0, len(groups), rank_count):
        taken = order[first : first + rank_count]
        taken = taken[np.argsort(-groups.sizes[taken], kind="stable")]
        ranks = np.argsort(loads, kind="stable")[: taken.size]
        rank_of[taken] = ranks
        loads[ranks] += groups.sizes[taken]
    return _positions_by_rank(rank_of, rank_count)


def _positions_by_rank(rank_of: NDArray[np.int64], rank_count: int) -> Assignment:
    order = np.argsort(rank_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(rank_of, minlength=rank_count))[:-1])
