"""Taking whole groups from a view, and dealing them to ranks: shared by the samplers that keep groups whole."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.plan import Groups, Indexes, PlanRequest, View
from tq_service.errors import InvalidArgumentError

IncompleteGroups = Literal["skip", "take"]

# Of each rank, the positions of its groups.
Deal = Sequence[NDArray[np.int64]]


def check_group_options(n_samples_per_prompt: int | None, incomplete_groups: str) -> None:
    """Raise ValueError where the options that samplers of groups share have values that mean nothing."""
    if n_samples_per_prompt is not None and n_samples_per_prompt < 1:
        raise ValueError(f"n_samples_per_prompt: got {n_samples_per_prompt}, expected at least 1")
    if incomplete_groups not in ("skip", "take"):
        raise ValueError(f"incomplete_groups: got {incomplete_groups!r}, expected 'skip' or 'take'")


def check_holds_whole_groups(sampler: str, request: PlanRequest, n_samples_per_prompt: int | None) -> None:
    """Raise InvalidArgumentError where `batch_size` counts samples and is not a multiple of the group size."""
    if request.batch_unit == "group" or n_samples_per_prompt is None or request.batch_size % n_samples_per_prompt == 0:
        return
    raise InvalidArgumentError(
        f"batch_size: got {request.batch_size} samples for sampler {sampler!r}, expected a multiple of "
        f"n_samples_per_prompt ({n_samples_per_prompt}), since groups stay whole; or count groups with "
        "batch_unit='group'",
        field="batch_size",
    )


def take_groups(
    view: View, request: PlanRequest, *, block_size: int | None = None, incomplete_groups: IncompleteGroups = "skip"
) -> Groups | None:
    """Return the next whole groups, as many as the request holds, or None where too few are ready.

    Enough is what reaches `request.min_size`, and also what the next ready group would carry over
    `request.total_size`: then waiting would not bring more. To tell that from "no further group is ready yet", the view
    is asked for one group more than fit.

    Raises:
        InvalidArgumentError: the first group alone is larger than the whole batch, so that no plan can ever take it.
    """
    take_incomplete = incomplete_groups == "take"
    unit, total = request.batch_unit, request.total_size
    groups = view.ready_groups(total, unit=unit, block_size=block_size, take_incomplete=take_incomplete)
    if len(groups) and _size(groups, request) >= request.min_size:
        return groups
    if unit == "group":
        return None  # groups count one each: a group more always fits
    more = view.ready_groups(len(groups) + 1, unit="group", block_size=block_size, take_incomplete=take_incomplete)
    fitting = _prefix(more, total)
    if len(fitting) == len(more):
        # Groups may have become ready between the two questions.
        return fitting if len(fitting) and fitting.rows.size >= request.min_size else None
    if not len(fitting):
        raise InvalidArgumentError(
            f"batch_size: got {request.batch_size} samples for {request.rank_count} rank(s), {total} together, "
            f"expected at least {int(more.sizes[0])}: the group of sample {int(more.rows[0])} has so many and stays "
            "whole; raise batch_size or count groups with batch_unit='group'",
            field="batch_size",
        )
    return fitting


def rows_of_ranks(groups: Groups, deal: Deal) -> list[Indexes]:
    """Return the rows of each rank: the members of its groups, in the order of the deal."""
    members = np.split(groups.rows, groups.starts[1:])
    empty = np.zeros(0, np.int64)
    return [np.concatenate([empty, *(members[position] for position in part.tolist())]) for part in deal]


def deal_blocks(groups: Groups, rank_count: int) -> Deal:
    """Deal neighbouring groups to each rank, counts equal or differing by at most one."""
    return np.array_split(np.arange(len(groups)), rank_count)


def deal_to_emptiest(groups: Groups, rank_count: int) -> Deal:
    """Deal group after group, largest first, to the rank with the fewest samples."""
    loads = [(0, rank) for rank in range(rank_count)]
    rank_of = np.empty(len(groups), np.int64)
    sizes = groups.sizes.tolist()
    for position in np.argsort(-groups.sizes, kind="stable").tolist():
        load, rank = loads[0]
        rank_of[position] = rank
        heapq.heapreplace(loads, (load + sizes[position], rank))
    return _positions_by_rank(rank_of, rank_count)


def deal_in_rounds(groups: Groups, rank_count: int, *, largest_first: bool = False) -> Deal:
    """Deal one group to each rank in every round, so that counts are equal or differ by at most one.

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


def _positions_by_rank(rank_of: NDArray[np.int64], rank_count: int) -> Deal:
    order = np.argsort(rank_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(rank_of, minlength=rank_count))[:-1])


def _prefix(groups: Groups, limit: int) -> Groups:
    """Return the first groups, up to `limit` samples."""
    ends = np.cumsum(groups.sizes)
    count = int(np.searchsorted(ends, limit, side="right"))
    return Groups(rows=groups.rows[: int(ends[count - 1]) if count else 0], sizes=groups.sizes[:count])


def _size(groups: Groups, request: PlanRequest) -> int:
    return len(groups) if request.batch_unit == "group" else int(groups.rows.size)
