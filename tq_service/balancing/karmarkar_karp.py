"""Largest differencing after Karmarkar and Karp: items into k partitions of nearly equal sums.

N. Karmarkar, R. M. Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982; the k-way form is that of
R. E. Korf, "Multi-way number partitioning", IJCAI 2009.

A partial solution has up to k columns, each a set of items with its sum. The two partial solutions with the widest
spread (largest sum minus smallest) are merged, heaviest column with lightest, until one is left. Columns are kept as
sorted numpy sums with the id of one item each; merging two columns points one id at the other, and following the
pointers at the end tells which items share a column. So a merge costs what k columns cost, however many items they
hold.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.balancing.costs import Cost, get_costs
from tq_service.balancing.lengths import Lengths, check_lengths, check_partition_count
from tq_service.balancing.refine import refine_partitions

Int64s = NDArray[np.int64]


def karmarkar_karp(seqlen_list: Lengths, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Split items into partitions of nearly equal total length by largest differencing.

    Args:
        seqlen_list: length of each item, `(n,)`.
        k_partitions: number of partitions.
        equal_size: whether every partition gets `n / k_partitions` items; else sizes are free, at least 1.

    Returns:
        The item positions of each partition, ascending; every position once; the heaviest partition first. The same
        arguments give the same answer.

    Raises:
        ValueError: lengths that are negative, not integers or not one-dimensional, fewer items than partitions,
            `k_partitions` below 1, or with `equal_size` a number of items that does not divide.
    """
    lengths, k = _check(seqlen_list, k_partitions, equal_size)
    return _as_lists(_partition(lengths, k, equal_size))


def get_seqlen_balanced_partitions(
    seqlen_list: Lengths, k_partitions: int, equal_size: bool, *, cost: Cost | None = None
) -> list[list[int]]:
    """Split items into partitions of nearly equal total cost: `karmarkar_karp`, then refined by moves and swaps.

    Arguments, result and errors are those of `karmarkar_karp`, but for the order of the partitions, which is that of
    the sums before the refinement, and `cost`: what is balanced, see `get_costs`; None: the lengths.
    """
    lengths, k = _check(seqlen_list, k_partitions, equal_size)
    costs = get_costs(lengths, cost)
    return _as_lists(refine_partitions(costs, _partition(costs, k, equal_size), equal_size=equal_size))


def get_even_partitions(seqlen_list: Lengths, k_partitions: int) -> list[list[int]]:
    """Split items into partitions of nearly equal total length whose sizes are equal, or differ by at most one.

    Serves any number of items, also fewer than partitions.

    Raises:
        ValueError: as `karmarkar_karp`, without its conditions on the number of items.
    """
    return _padded_partitions(seqlen_list, k_partitions, equal_size=True)


def get_free_partitions(seqlen_list: Lengths, k_partitions: int) -> list[list[int]]:
    """Split items into partitions of nearly equal total length, of any sizes.

    Serves any number of items, also fewer than partitions; partitions may be empty.

    Raises:
        ValueError: as `karmarkar_karp`, without its conditions on the number of items.
    """
    return _padded_partitions(seqlen_list, k_partitions, equal_size=False)


def _padded_partitions(seqlen_list: Lengths, k_partitions: int, *, equal_size: bool) -> list[list[int]]:
    """Fill the number of items up with items of length 0, which are left out of the result.

    With equal sizes no two of them get into one partition.
    """
    lengths, k = check_lengths(seqlen_list), check_partition_count(k_partitions)
    missing = -lengths.size % k if equal_size else max(k - lengths.size, 0)
    padded = np.concatenate([lengths, np.zeros(missing, np.int64)])
    if not padded.size:
        return [[] for _ in range(k)]
    parts = [part[part < lengths.size] for part in _partition(padded, k, equal_size)]
    return _as_lists(refine_partitions(lengths, parts, equal_size=equal_size))


def _check(seqlen_list: Lengths, k_partitions: int, equal_size: bool) -> tuple[Int64s, int]:
    lengths, k = check_lengths(seqlen_list), check_partition_count(k_partitions)
    if lengths.size < k:
        raise ValueError(f"seqlen_list: got {lengths.size} items for {k} partitions, expected at least {k}")
    if equal_size and lengths.size % k:
        raise ValueError(
            f"seqlen_list: got {lengths.size} items for {k} partitions of equal size, expected a multiple of {k}; "
            "drop or add items, or pass equal_size=False"
        )
    return lengths, k


def _as_lists(parts: list[Int64s]) -> list[list[int]]:
    return [np.sort(part).tolist() for part in parts]


def _partition(lengths: Int64s, k: int, equal_size: bool) -> list[Int64s]:
    if k == 1:
        return [np.arange(lengths.size, dtype=np.int64)]
    differencing = _Differencing(lengths, k)
    if equal_size:
        differencing.seed_full_rows()
    final = differencing.run()
    owner = _follow(differencing.parent)
    column_of = np.empty(lengths.size, np.int64)
    column_of[owner[final.ids[::-1]]] = np.arange(k)
    labels = column_of[owner]
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=k))[:-1])


def _follow(parent: Int64s) -> Int64s:
    """Return the end of each chain of pointers."""
    while True:
        grandparent = parent[parent]
        if np.array_equal(grandparent, parent):
            return parent
        parent = grandparent


@dataclass(frozen=True, slots=True)
class _Partial:
    """Up to k columns: their sums, ascending, and the id of each column; columns not there are empty."""

    sums: Int64s
    ids: Int64s


class _Differencing:
    """The run of the algorithm: partial solutions in a heap, single items beside it in descending order.

    Singles are partial solutions of one column, with a spread of their length. Keeping them out of the heap lets runs
    of them be taken at once, which is where most of the merges of the free-size method are.
    """

    def __init__(self, lengths: Int64s, k: int) -> None:
        self.parent: Int64s = np.arange(lengths.size, dtype=np.int64)
        self._k = k
        self._heap: list[tuple[int, int, _Partial]] = []
        self._pushed = 0
        self._single_ids: Int64s = np.argsort(-lengths, kind="stable")
        self._single_lengths: Int64s = lengths[self._single_ids]
        self._negated: Int64s = -self._single_lengths
        self._next = 0

    def seed_full_rows(self) -> None:
        """Make rows of k consecutive items each, so that every partition gets one item of every row."""
        rows = zip(self._single_lengths.reshape(-1, self._k), self._single_ids.reshape(-1, self._k), strict=True)
        for sums, ids in rows:
            self._push(_Partial(sums[::-1], ids[::-1]))
        self._next = self._single_ids.size

    def run(self) -> _Partial:
        """Merge the two partial solutions of the widest spread until one is left."""
        while True:
            top = self._pop()
            singles = self._singles_ahead()
            if singles and top.sums.size < self._k:
                self._push(self._fill(top, min(singles, self._k - top.sums.size)))
            elif singles:
                self._push(self._absorb(top))
            elif self._heap:
                self._push(self._merge(top, self._pop()))
            else:
                return top

    def _push(self, partial: _Partial) -> None:
        lowest = int(partial.sums[0]) if partial.sums.size == self._k else 0
        heapq.heappush(self._heap, (lowest - int(partial.sums[-1]), self._pushed, partial))
        self._pushed += 1

    def _pop(self) -> _Partial:
        if self._singles_ahead():
            at, self._next = self._next, self._next + 1
            return _Partial(self._single_lengths[at : at + 1], self._single_ids[at : at + 1])
        return heapq.heappop(self._heap)[2]

    def _singles_ahead(self) -> int:
        """Count the singles that come before the partial solutions in the heap."""
        end = self._negated.size if not self._heap else self._negated.searchsorted(self._heap[0][0], side="right")
        return max(int(end) - self._next, 0)

    def _fill(self, partial: _Partial, count: int) -> _Partial:
        """Merge with `count` singles that go into empty columns; until all are taken the spread stays the widest."""
        taken = slice(self._next, self._next + count)
        self._next += count
        sums = np.concatenate([partial.sums, self._single_lengths[taken]])
        return _ordered(sums, np.concatenate([partial.ids, self._single_ids[taken]]))

    def _absorb(self, partial: _Partial) -> _Partial:
        """Merge with singles, each into the lightest column, for as long as these are the two of the widest spread."""
        columns = list(zip(partial.sums.tolist(), partial.ids.tolist(), strict=True))  # ascending, so a heap already
        heaviest, widest_in_heap = columns[-1][0], -self._heap[0][0] if self._heap else 0
        lengths, ids = self._single_lengths, self._single_ids
        while self._next < ids.size:
            length = int(lengths[self._next])
            if length < widest_in_heap or heaviest - columns[0][0] < length:
                break
            total, column = columns[0]
            heapq.heapreplace(columns, (total + length, column))
            heaviest = max(heaviest, total + length)
            self.parent[ids[self._next]] = column
            self._next += 1
        return _ordered(np.array([total for total, _ in columns]), np.array([column for _, column in columns]))

    def _merge(self, first: _Partial, second: _Partial) -> _Partial:
        """Merge heaviest with lightest columns; a column that is merged with an empty one stays as it is."""
        shared = max(first.sums.size + second.sums.size - self._k, 0)
        self.parent[second.ids[:shared]] = first.ids[:shared][::-1]
        sums = np.concatenate(
            [first.sums[:shared] + second.sums[:shared][::-1], first.sums[shared:], second.sums[shared:]]
        )
        return _ordered(sums, np.concatenate([first.ids, second.ids[shared:]]))


def _ordered(sums: Int64s, ids: Int64s) -> _Partial:
    order = np.argsort(sums, kind="stable")
    return _Partial(sums[order], ids[order])
