"""Items into as few bins of one size as can be found quickly: best fit decreasing, then a search for one bin less.

S. Martello, P. Toth, "Knapsack Problems", chapter 8, 1990 (bounds, branch and bound); J. N. D. Gupta, J. C. Ho, "A new
heuristic algorithm for the one-dimensional bin-packing problem", 1999 (filling bin after bin as full as can be).
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Bins = list[list[int]]

# Effort of the search for one bin less: bits of the tables of reachable sums, and nodes of the search tree.
_MOST_BITS = 2**24
_MOST_FILL_ITEMS = 192
_MOST_NODES = 4_000
_MOST_TREE_ITEMS = 48


def count_bins_at_least(sizes: Int64s, capacity: int) -> int:
    """Return a lower bound of the bins that items need.

    No two items above half the capacity share a bin; and for every threshold t, those above `capacity - t` share one
    with no item of at least t, so that the items from t to half the capacity need bins of their own beside what the
    others leave free.
    """
    if not sizes.size:
        return 0
    ascending = np.sort(sizes)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(ascending)])
    bound = max(-(-int(total[-1]) // capacity), 1)
    half = int(np.searchsorted(2 * ascending, capacity, side="right"))  # items from here on are above half
    thresholds = np.unique(ascending[:half])
    thresholds = thresholds[thresholds > 0]
    large_from = np.searchsorted(ascending, capacity - thresholds, side="right")  # these leave less than t
    small_from = np.searchsorted(ascending, thresholds, side="left")
    middle_free = (large_from - half) * capacity - (total[large_from] - total[half])
    missing = np.maximum(total[half] - total[small_from] - middle_free, 0)
    return max(bound, ascending.size - half + int((-(-missing // capacity)).max(initial=0)))


def best_fit_decreasing(sizes: Int64s, capacity: int) -> Bins:
    """Return bins, made by putting item after item, largest first, into the fullest bin that it fits into."""
    bins: Bins = []
    free: list[tuple[int, int]] = []  # (free capacity, bin), ascending
    listed = sizes.tolist()
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = listed[item]
        at = bisect.bisect_left(free, (size, -1))
        if at == len(free):
            bins.append([item])
            bisect.insort(free, (capacity - size, len(bins) - 1))
        else:
            left, chosen = free.pop(at)
            bins[chosen].append(item)
            bisect.insort(free, (left - size, chosen))
    return bins


def pack_into(sizes: Int64s, capacity: int, bin_count: int) -> Bins | None:
    """Look for a way to pack items into so many bins, with bounded effort.

    Returns:
        At most `bin_count` bins, or None where none was found, which does not mean that there is none.
    """
    if count_bins_at_least(sizes, capacity) > bin_count:
        return None
    bins = _fill_one_by_one(sizes, capacity, bin_count)
    if bins is None and sizes.size <= _MOST_TREE_ITEMS:
        bins = _TreeSearch(sizes, capacity, bin_count).run()
    return bins


def _fill_one_by_one(sizes: Int64s, capacity: int, bin_count: int) -> Bins | None:
    """Fill bin after bin: the largest item left, then those of the largest sum that fits beside it."""
    listed = sizes.tolist()
    left = np.argsort(-sizes, kind="stable").tolist()
    most_items = min(_MOST_FILL_ITEMS, max(8, _MOST_BITS // (capacity + 1)))
    spare = bin_count * capacity - int(sizes.sum())
    bins: Bins = []
    while left:
        if len(bins) == bin_count:
            return None
        largest = left[0]
        others = [item for item in left[1:] if listed[item] <= capacity - listed[largest]]
        chosen = [largest, *_fullest_subset(others[:most_items], listed, capacity - listed[largest])]
        spare -= capacity - sum(listed[item] for item in chosen)
        if spare < 0:
            return None
        taken = set(chosen)
        left = [item for item in left if item not in taken]
        bins.append(chosen)
    return bins


def _fullest_subset(items: list[int], listed: list[int], capacity: int) -> list[int]:
    """Return items whose sum comes nearest to `capacity` from below; bit s of a table: sum s can be made."""
    window = (1 << (capacity + 1)) - 1
    tables = [1]
    for item in items:
        tables.append((tables[-1] | (tables[-1] << listed[item])) & window)
        if tables[-1] >> capacity:
            break
    rest = tables[-1].bit_length() - 1
    chosen = []
    for place in range(len(tables) - 2, -1, -1):
        if not tables[place] >> rest & 1:  # this sum needs the item
            chosen.append(items[place])
            rest -= listed[items[place]]
    return chosen


class _TreeSearch:
    """Depth-first search over the bins of each item, largest item first, fullest bin first."""

    def __init__(self, sizes: Int64s, capacity: int, bin_count: int) -> None:
        self._order: list[int] = np.argsort(-sizes, kind="stable").tolist()
        self._sizes: list[int] = sizes[self._order].tolist()
        self._capacity = capacity
        self._free = [capacity] * bin_count
        self._bins: Bins = [[] for _ in range(bin_count)]
        self._spare = bin_count * capacity - int(sizes.sum())
        self._nodes = 0

    def run(self) -> Bins | None:
        """Return the bins that have items, or None where the effort was spent."""
        return [found for found in self._bins if found] if self._place(0) else None

    def _place(self, at: int) -> bool:
        if at == len(self._order):
            return True
        self._nodes += 1
        if self._nodes > _MOST_NODES or self._wasted(at) > self._spare:
            return False
        size = self._sizes[at]
        tried = set()
        for chosen in sorted(range(len(self._free)), key=self._free.__getitem__):
            free = self._free[chosen]
            if free < size or free in tried:
                continue
            tried.add(free)
            self._free[chosen] -= size
            self._bins[chosen].append(self._order[at])
            if self._place(at + 1):
                return True
            self._free[chosen] += size
            self._bins[chosen].pop()
            if free == size:  # no other bin can do better with this item
                return False
        return False

    def _wasted(self, at: int) -> int:
        """Return the free capacity of the bins that are too full for the smallest item left."""
        smallest = self._sizes[-1]
        return sum(free for free in self._free if free < smallest) if at < len(self._sizes) else 0
