"""What the samplers that keep groups whole share: their options, taking groups from a view, assigning them to ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import BatchUnit, Blocks
from tq_service.state.plan import Groups, Indexes, PlanRequest, Sampler, View

IncompleteGroups = Literal["skip", "take"]

# For each rank, the positions of its groups.
Assignment = Sequence[NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSampler(Sampler):
    """A sampler that takes whole groups, in the order of their first members.

    Attributes:
        n_samples_per_prompt: members of a group that declared no size, and without explicit groups the length of the
            blocks of consecutive indexes; without it: explicit groups, or else single samples.
        incomplete_groups: what to do with a group of which members failed or were cleared: skip it, or take the
            rest.
        blocks: where blocks of consecutive indexes begin: aligned to multiples of their length, or anywhere: any so
            many ready samples whose indexes follow each other are a group.
    """

    n_samples_per_prompt: int | None = None
    incomplete_groups: IncompleteGroups = "skip"
    blocks: Blocks = "aligned"

    # Subclasses that check more call this by its class: `super()` means a class that `slots=True` has replaced.
    def __post_init__(self) -> None:
        if self.n_samples_per_prompt is not None and self.n_samples_per_prompt < 1:
            raise ValueError(f"n_samples_per_prompt: got {self.n_samples_per_prompt}, expected at least 1")
        if self.incomplete_groups not in ("skip", "take"):
            raise ValueError(f"incomplete_groups: got {self.incomplete_groups!r}, expected 'skip' or 'take'")
        if self.blocks not in ("aligned", "anywhere"):
            raise ValueError(f"blocks: got {self.blocks!r}, expected 'aligned' or 'anywhere'")
        if self.blocks == "anywhere" and self.incomplete_groups == "take":
            raise ValueError(
                "incomplete_groups: got 'take' with blocks 'anywhere', expected 'skip', since such groups are found "
                "among the ready samples; name the groups to take the rest of them"
            )

    def check(self, request: PlanRequest) -> None:
        """Raise InvalidArgumentError where `batch_size` counts samples and is not a multiple of the group size."""
        group_size = self.n_samples_per_prompt
        if request.batch_unit == "group" or group_size is None or request.batch_size % group_size == 0:
            return
        raise InvalidArgumentError(
            f"batch_size: got {request.batch_size} samples for sampler {self.name!r}, expected a multiple of "
            f"n_samples_per_prompt ({group_size}), since groups stay whole; or count groups with batch_unit group",
            field="batch_size",
        )

    def take_groups(self, view: View, request: PlanRequest) -> Groups | None:
        """Return the next whole groups for this request, or None where too few are ready; see `take_groups`."""
        return take_groups(view, request, self.ready_groups)

    def ready_groups(self, view: View, limit: int, unit: BatchUnit) -> Groups:
        """Return the next whole groups, as many as so many units hold."""
        return view.ready_groups(
            limit,
            unit=unit,
            block_size=self.n_samples_per_prompt,
            take_incomplete=self.incomplete_groups == "take",
            blocks=self.blocks,
        )


def named_groups(view: View, limit: int, unit: BatchUnit) -> Groups:
    """Return the next whole groups that have names, as many as so many units hold; single samples without names."""
    return view.ready_groups(limit, unit=unit)


def take_groups(
    view: View, request: PlanRequest, ready_groups: Callable[[View, int, BatchUnit], Groups] = named_groups
) -> Groups | None:
    """Return the next whole groups, as many as the request holds, or None where too few are ready.

    They are enough where they reach `request.min_size`, or where the next ready group would exceed
    `request.total_size`: waiting would bring nothing more then. To tell that from "no further group is ready yet", the
    view is asked for one group more than fit.

    Raises:
        InvalidArgumentError: the first group alone is larger than the whole batch, so that no plan can ever take it.
    """
    unit, total = request.batch_unit, request.total_size
    groups = ready_groups(view, total, unit)
    if len(groups) and _size(groups, request) >= request.min_size:
        return groups
    if unit == "group":
        return None  # groups count one each: a group more always fits
    more = ready_groups(view, len(groups) + 1, "group")
    fitting = _prefix(more, total)
    if len(fitting) == len(more):
        # Groups may have become ready between the two questions.
        return fitting if len(fitting) and fitting.rows.size >= request.min_size else None
    if not len(fitting):
        raise InvalidArgumentError(
            f"batch_size: got {request.batch_size} samples for {request.rank_count} rank(s), {total} together, "
            f"expected at least {int(more.sizes[0])}: the group of sample {int(more.rows[0])} has so many and stays "
            "whole; raise batch_size or count groups with batch_unit group",
            field="batch_size",
        )
    return fitting


def rows_of_ranks(groups: Groups, assignment: Assignment) -> list[Indexes]:
    """Return the rows of each rank: the members of its groups, in the order of the assignment."""
    members = np.split(groups.rows, groups.starts[1:])
    empty = np.zeros(0, np.int64)
    return [np.concatenate([empty, *(members[position] for position in part.tolist())]) for part in assignment]


def assign_blocks(groups: Groups, rank_count: int) -> Assignment:
    """Assign neighbouring groups to each rank, counts equal or differing by at most one."""
    return np.array_split(np.arange(len(groups)), rank_count)


def assign_to_least_loaded(groups: Groups, rank_count: int) -> Assignment:
    """Assign group after group, largest first, to the rank with the fewest samples."""
    loads = [(0, rank) for rank in range(rank_count)]
    rank_of = np.empty(len(groups), np.int64)
    sizes = groups.sizes.tolist()
    for position in np.argsort(-groups.sizes, kind="stable").tolist():
        load, rank = loads[0]
        rank_of[position] = rank
        heapq.heapreplace(loads, (load + sizes[position], rank))
    return _positions_by_rank(rank_of, rank_count)


def assign_round_robin(groups: Groups, rank_count: int, *, largest_first: bool = False) -> Assignment:
    """Assign one group to each rank in every round, so that counts are equal or differ by at most one.

    Groups of one round follow each other in order of arrival (or of size). Within a round the larger groups go to the
    ranks that have fewer samples; groups of equal size go round-robin.
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


def are_uniform(groups: Groups) -> bool:
    """Whether all groups have the same size."""
    return not groups.sizes.size or bool((groups.sizes == groups.sizes[0]).all())


def _positions_by_rank(rank_of: NDArray[np.int64], rank_count: int) -> Assignment:
    order = np.argsort(rank_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(rank_of, minlength=rank_count))[:-1])


def _prefix(groups: Groups, limit: int) -> Groups:
    """Return the first groups, up to `limit` samples."""
    ends = np.cumsum(groups.sizes)
    count = int(np.searchsorted(ends, limit, side="right"))
    return Groups(rows=groups.rows[: int(ends[count - 1]) if count else 0], sizes=groups.sizes[:count])


def _size(groups: Groups, request: PlanRequest) -> int:
    return len(groups) if request.batch_unit == "group" else int(groups.rows.size)
