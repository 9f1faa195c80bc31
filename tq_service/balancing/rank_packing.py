"""Bin packing of several ranks at once: all ranks get the same number of bins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing.bin_packing import Bins, best_fit_decreasing, count_bins_at_least, pack_into
from tq_service.balancing.karmarkar_karp import get_free_partitions

Int64s = NDArray[np.int64]


def pack_ranks_equally(sizes_of_ranks: Sequence[Int64s], capacity: int, *, spread: bool = False) -> list[Bins]:
    """Pack the items of every rank into as few bins as can be found, the same number for every rank.

    Best fit decreasing gives a first number of bins for each rank. The ranks with the most bins are then packed into
    one bin less, by a search of bounded effort, for as long as that succeeds for all of them.

    Args:
        sizes_of_ranks: for each rank the sizes of its items, none above `capacity`.
        capacity: what a bin holds.
        spread: whether to spread the items of a rank evenly over its bins instead of filling some and leaving the
            others empty.

    Returns:
        For each rank its bins, at least one, the fullest first; what is missing are empty bins at the end.
    """
    packed = [best_fit_decreasing(sizes, capacity) for sizes in sizes_of_ranks]
    at_least = max([1, *(count_bins_at_least(sizes, capacity) for sizes in sizes_of_ranks)])
    _try_fewer(packed, sizes_of_ranks, capacity, at_least)
    count = max([1, *map(len, packed)])
    if spread:
        packed = [_spread(sizes, bins, capacity, count) for sizes, bins in zip(sizes_of_ranks, packed, strict=True)]
    fullest_first = (
        sorted(bins, key=lambda items: -int(sizes[items].sum()))
        for sizes, bins in zip(sizes_of_ranks, packed, strict=True)
    )
    return [bins + [[] for _ in range(count - len(bins))] for bins in fullest_first]


def _try_fewer(packed: list[Bins], sizes_of_ranks: Sequence[Int64s], capacity: int, at_least: int) -> None:
    while (count := max(map(len, packed), default=0)) > at_least:
        fewer: dict[int, Bins] = {}
        for rank, bins in enumerate(packed):
            if len(bins) == count:
                better = pack_into(sizes_of_ranks[rank], capacity, count - 1)
                if better is None:
                    return
                fewer[rank] = better
        for rank, better in fewer.items():
            packed[rank] = better


def _spread(sizes: Int64s, bins: Bins, capacity: int, count: int) -> Bins:
    """Return the items in so many bins of nearly equal sums, or the bins as they are where one would overflow."""
    even = [part for part in get_free_partitions(sizes, count) if part]
    return even if all(int(sizes[part].sum()) <= capacity for part in even) else bins
