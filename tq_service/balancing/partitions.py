"""Partition items into k sets of nearly equal cost by Karmarkar-Karp differencing followed by refinement.

References: N. Karmarkar, R. M. Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982. The k-way
    form is described in R. E. Korf, "Multi-way number partitioning", IJCAI 2009.

A partial solution consists of up to k columns, each a set of items. The spread of a partial solution is the difference
between its largest and smallest column sums. The algorithm repeatedly merges the two partial solutions with the widest
spreads, until only one partial solution is left. A merge combines the heaviest column of one solution with the lightest
column of the other, the second heaviest with the second lightest, and so on.

The algorithm represents each column by its sum, stored in a sorted numpy array, and by an id. The id is the index of
one of the column's items. To combine two columns, the algorithm makes the id of one column point to the id of the
other. After the last merge, following the pointers from an item leads to its column. The cost of a merge therefore
depends on k, but not on the number of items. Finally, the refinement moves or swaps items between the heaviest set and
lighter sets until no exchange lowers the largest sum.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Lengths = Sequence[int] | NDArray[np.integer]
CostName = Literal["tokens", "attention"]
Cost = CostName | Callable[[Int64s], NDArray[Any]]

# Limit on the sum of all lengths, and on the sum of all costs. Sums below this limit are exact in int64.
_LARGEST_TOTAL = 2**62
# Non-integer costs are rounded to multiples of the largest cost divided by this number.
_STEPS = 2**40
# The refinement first looks for an exchange between the heaviest set and each of this many lightest sets, one by one.
# It then considers all pairs of items from the heaviest set and the remaining sets at once. If there are more than
# `_MOST_PAIRS` pairs, it also goes through the remaining sets one by one.
_LIGHTEST_FIRST = 32
_MOST_PAIRS = 1_000_000
# The refinement stops when the heaviest set exceeds the lower bound by less than this fraction. Otherwise, most of the
# time would be spent on the last few of a million tokens.
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """Cost of a sequence with L tokens: `linear * L + quadratic * L**2`.

    The linear term models matrix products, whose cost per token is constant. The quadratic term models attention, in
    which each token attends to earlier tokens. With the default ratio, the two terms are equal at 24,576 tokens. This
    ratio is common in balancing code for a hidden size of 4,096.

    Attributes:
        linear: cost per token.
        quadratic: cost per token pair; a sequence of L tokens has `L**2` pairs.
    """

    linear: float = 24_576
    quadratic: float = 1

    def __post_init__(self) -> None:
        if not (self.linear >= 0 and self.quadratic >= 0 and 0 < self.linear + self.quadratic < float("inf")):
            raise ValueError(
                f"got linear={self.linear} and quadratic={self.quadratic}; expected finite, non-negative numbers, "
                "not both 0"
            )

    def __call__(self, lengths: Int64s) -> NDArray[np.float64]:
        """Return the costs of sequences with the given lengths, as an array of shape `(n,)`."""
        exact = lengths.astype(np.float64)
        return np.asarray(exact * (self.linear + self.quadratic * exact), np.float64)


_ATTENTION: Final = AttentionCost()


def get_costs(lengths: Int64s, cost: Cost | None = None) -> Int64s:
    """Compute an integer cost for each sample from its length.

    Args:
        lengths: token count of each sample, as an array of shape `(n,)`.
        cost: "tokens", "attention" (`AttentionCost` with default values), or a function that maps an array of lengths
            to an array of costs. The costs may be integers or floats. If `cost` is None, the token counts are the
            costs.

    Returns:
        Costs as an int64 array of shape `(n,)`. Floating-point costs are scaled to a maximum of 2**40 and then rounded.

    Raises:
        ValueError: `cost` is an unknown name, or a function that returns an array of the wrong shape or with invalid
            values. Costs must be finite, non-negative numbers whose total is below 2**62.
    """
    if isinstance(cost, str):
        check_cost_name(cost)
        cost = None if cost == "tokens" else _ATTENTION
    elif cost is not None and not callable(cost):
        raise ValueError(f"cost: got {cost!r}, expected a name or a function of lengths")
    costs = lengths if cost is None else np.asarray(cost(lengths))
    if costs.shape != lengths.shape:
        raise ValueError(
            f"cost: got an array of shape {costs.shape} for {lengths.size} lengths, expected one cost per length"
        )
    if costs.dtype.kind not in "iuf":
        raise ValueError(f"cost: got values of dtype {costs.dtype}, expected integers or floats")
    if not costs.size:
        return np.zeros(0, np.int64)
    is_bad = ~np.isfinite(costs) | (costs < 0)
    if is_bad.any():
        at = int(is_bad.argmax())
        raise ValueError(f"cost: got {costs[at]} for a length of {lengths[at]}, expected a finite, non-negative number")
    if costs.dtype.kind == "f":
        largest = float(costs.max())
        costs = np.rint(costs * (_STEPS / largest)) if largest > 0 else costs
    if float(costs.sum(dtype=np.float64)) >= _LARGEST_TOTAL:
        raise ValueError(
            f"cost: got a total of at least 2**62 (largest cost: {costs.max()}), expected a total below 2**62"
        )
    return costs.astype(np.int64)


def check_cost_name(cost: str) -> None:
    """Raise ValueError if `cost` is not the name of a cost function."""
    if cost not in get_args(CostName):
        raise ValueError(f"cost: got {cost!r}, expected one of {', '.join(map(repr, get_args(CostName)))}")


def check_lengths(seqlen_list: Lengths) -> NDArray[np.int64]:
    """Validate lengths and convert them to an int64 array of shape `(n,)`.

    Raises:
        ValueError: the lengths are not a one-dimensional sequence of non-negative integers, or their total is 2**62 or
            more.
    """
    try:
        lengths = np.asarray(seqlen_list)
    except ValueError as error:
        raise ValueError(
            f"seqlen_list: got nested lists of different lengths; expected a flat list of integers ({error})"
        ) from error
    if lengths.ndim != 1:
        raise ValueError(f"seqlen_list: got an array of shape {lengths.shape}, expected one dimension")
    if lengths.size == 0:
        return np.zeros(0, np.int64)
    if lengths.dtype.kind not in "iu":
        raise ValueError(
            f"seqlen_list: got {_first_non_integer(lengths)} (dtype {lengths.dtype}), expected integers; "
            "convert lengths with int() first"
        )
    if lengths.min() < 0:
        position = int(np.argmax(lengths < 0))
        raise ValueError(f"seqlen_list: got {lengths[position]} at position {position}, expected a non-negative length")
    if float(lengths.sum(dtype=np.float64)) >= _LARGEST_TOTAL:
        raise ValueError(
            f"seqlen_list: got a total of at least 2**62 (largest length: {lengths.max()}), "
            "expected a total below 2**62"
        )
    return lengths.astype(np.int64)


def check_count(name: str, value: int) -> int:
    """Validate a count, such as a number of ranks or tokens, and convert it to an int.

    Raises:
        ValueError: `value` is not an integer or is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least 1")
    return int(value)


def _first_non_integer(lengths: NDArray[np.generic]) -> str:
    for position, value in enumerate(lengths.tolist()):
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
            return f"{value!r} at position {position}"
    return "other values"


def karmarkar_karp(seqlen_list: Lengths, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Split items into partitions of nearly equal total length by the largest differencing method.

    Args:
        seqlen_list: length of each item, as a list or an array of shape `(n,)`.
        k_partitions: number of partitions.
        equal_size: whether every partition must have exactly `n / k_partitions` items. If False, every partition has at
            least one item.

    Returns:
        For each partition, the positions of its items in ascending order. The heaviest partition comes first. Each item
        is in exactly one partition. The result depends only on the arguments.

    Raises:
        ValueError: `seqlen_list` is not a one-dimensional sequence of non-negative integers, there are fewer items than
            partitions, or `k_partitions` is below 1. With `equal_size`, the error is also raised if the number of items
            is not a multiple of `k_partitions`.
    """
    lengths, k = _check(seqlen_list, k_partitions, equal_size)
    return _as_lists(_partition(lengths, k, equal_size))


def get_seqlen_balanced_partitions(
    seqlen_list: Lengths, k_partitions: int, equal_size: bool, *, cost: Cost | None = None
) -> list[list[int]]:
    """Split items into partitions of nearly equal total cost, by `karmarkar_karp` followed by moves and swaps.

    See `karmarkar_karp` for the arguments, result and errors. The partitions are sorted by sum before the refinement,
    which changes the sums. The first partition in the result is therefore not necessarily the heaviest. `cost` is the
    quantity to balance; see `get_costs`. None: lengths.
    """
    lengths, k = _check(seqlen_list, k_partitions, equal_size)
    costs = get_costs(lengths, cost)
    return _as_lists(refine_partitions(costs, _partition(costs, k, equal_size), equal_size=equal_size))


def get_even_partitions(seqlen_list: Lengths, k_partitions: int) -> list[list[int]]:
    """Split items into partitions of nearly equal total length, with nearly equal numbers of items.

    The number of items per partition differs by at most one. There may be fewer items than partitions.

    Raises:
        ValueError: an argument is invalid. The rules are those of `karmarkar_karp`, except that any number of items is
            allowed.
    """
    return _padded_partitions(seqlen_list, k_partitions, equal_size=True)


def get_free_partitions(seqlen_list: Lengths, k_partitions: int) -> list[list[int]]:
    """Split items into partitions of nearly equal total length, with any number of items per partition.

    There may be fewer items than partitions. Partitions may be empty.

    Raises:
        ValueError: an argument is invalid. The rules are those of `karmarkar_karp`, except that any number of items is
            allowed.
    """
    return _padded_partitions(seqlen_list, k_partitions, equal_size=False)


def _padded_partitions(seqlen_list: Lengths, k_partitions: int, *, equal_size: bool) -> list[list[int]]:
    """Pad the list to a valid size with items of length 0, partition the items, and remove the padding items.

    With `equal_size`, each partition contains at most one padding item.
    """
    lengths, k = check_lengths(seqlen_list), check_count("k_partitions", k_partitions)
    missing = -lengths.size % k if equal_size else max(k - lengths.size, 0)
    padded = np.concatenate([lengths, np.zeros(missing, np.int64)])
    if not padded.size:
        return [[] for _ in range(k)]
    parts = [part[part < lengths.size] for part in _partition(padded, k, equal_size)]
    return _as_lists(refine_partitions(lengths, parts, equal_size=equal_size))


def _check(seqlen_list: Lengths, k_partitions: int, equal_size: bool) -> tuple[Int64s, int]:
    lengths, k = check_lengths(seqlen_list), check_count("k_partitions", k_partitions)
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
    owner = differencing.parent
    while not np.array_equal(owner[owner], owner):  # follow each chain of pointers to its end
        owner = owner[owner]
    column_of = np.empty(lengths.size, np.int64)
    column_of[owner[final.ids[::-1]]] = np.arange(k)
    labels = column_of[owner]
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=k))[:-1])


class _Partial(NamedTuple):
    """A partial solution, stored as the sums and ids of its non-empty columns in ascending order of sum."""

    sums: Int64s
    ids: Int64s


class _Differencing:
    """One run of the differencing algorithm.

    Merged partial solutions are stored in a heap. A single item counts as a partial solution with one column, whose
    spread is the item's length. Single items are stored in a separate array, in descending order of length, so that
    several items can be merged at once. Without `equal_size`, most merges combine single items.
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
        """Create a partial solution from each block of k consecutive items, with one item per column."""
        rows = zip(self._single_lengths.reshape(-1, self._k), self._single_ids.reshape(-1, self._k), strict=True)
        for sums, ids in rows:
            self._push(_Partial(sums[::-1], ids[::-1]))
        self._next = self._single_ids.size

    def run(self) -> _Partial:
        """Repeatedly merge the two partial solutions with the widest spreads, and return the final solution."""
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
        """Return how many of the remaining single items have a spread at least as wide as every spread in the heap."""
        end = self._negated.size if not self._heap else self._negated.searchsorted(self._heap[0][0], side="right")
        return max(int(end) - self._next, 0)

    def _fill(self, partial: _Partial, count: int) -> _Partial:
        """Merge the next `count` single items into empty columns. The merged solution still has the widest spread."""
        taken = slice(self._next, self._next + count)
        self._next += count
        sums = np.concatenate([partial.sums, self._single_lengths[taken]])
        return _ordered(sums, np.concatenate([partial.ids, self._single_ids[taken]]))

    def _absorb(self, partial: _Partial) -> _Partial:
        """Merge single items into the lightest column while `partial` and the next item have the widest spreads."""
        columns = list(
            zip(partial.sums.tolist(), partial.ids.tolist(), strict=True)
        )  # ascending order, therefore already a heap
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
        """Combine two partial solutions by merging the heaviest columns of each with the lightest of the other.

        Merging a column with an empty column leaves the column unchanged.
        """
        shared = max(first.sums.size + second.sums.size - self._k, 0)
        self.parent[second.ids[:shared]] = first.ids[:shared][::-1]
        sums = np.concatenate(
            [first.sums[:shared] + second.sums[:shared][::-1], first.sums[shared:], second.sums[shared:]]
        )
        return _ordered(sums, np.concatenate([first.ids, second.ids[shared:]]))


def _ordered(sums: Int64s, ids: Int64s) -> _Partial:
    order = np.argsort(sums, kind="stable")
    return _Partial(sums[order], ids[order])


def refine_partitions(lengths: Int64s, partitions: list[Int64s], *, equal_size: bool) -> list[Int64s]:
    """Exchange items until no exchange lightens the heaviest set, or the set's sum is within 0.001% of a lower bound.

    The lower bound is the larger of the mean sum and the longest item's length. With `equal_size`, the longest item
    must share its set with other items, so the bound includes the lengths of the shortest items that can complete this
    set. An exchange swaps an item in the heaviest set for a shorter item in another set. Without `equal_size`, an
    exchange may also move an item to another set. An exchange is made only if the sums of both sets end up below the
    previous maximum, so the maximum never increases. The number of exchanges is at most four times the number of sets.

    Args:
        lengths: length of each item, as an array of shape `(n,)`.
        partitions: for each set, the positions of its items. A set may be empty.
        equal_size: whether the number of items in each set must stay the same.

    Returns:
        The positions of each set's items after the exchanges, in the order of `partitions`.
    """
    sets = _Sets(lengths, partitions, keep_sizes=equal_size)
    for _ in range(4 * len(partitions)):
        if not sets.relieve_heaviest():
            break
    return sets.items


class _Sets:
    """Sets of items and the sum of each set. `_values[s]` contains the length of each item in `items[s]`."""

    def __init__(self, lengths: Int64s, partitions: list[Int64s], *, keep_sizes: bool) -> None:
        self.items = [part.copy() for part in partitions]
        self._values = [lengths[part] for part in partitions]
        self._sums: Int64s = np.array([values.sum() for values in self._values], dtype=np.int64)
        self._keep_sizes = keep_sizes
        mean = -(-int(self._sums.sum()) // max(len(partitions), 1))
        companions = min((part.size for part in partitions if part.size), default=1) - 1 if keep_sizes else 0
        ascending = np.sort(lengths)
        lower_bound = max(mean, int(ascending[:companions].sum() + ascending[-1:].sum()))
        self._good_enough = lower_bound + int(lower_bound * _TOLERANCE)

    def relieve_heaviest(self) -> bool:
        """Make the best exchange that reduces the heaviest sum, or return False if no exchange does."""
        heaviest = int(np.argmax(self._sums))
        if self._sums[heaviest] <= self._good_enough:
            return False
        others = self._sums.argsort(kind="stable")
        others = others[self._sums[others] < self._sums[heaviest] - 1]
        exchange = self._first_exchange(heaviest, others[:_LIGHTEST_FIRST]) or self._any_exchange(
            heaviest, others[_LIGHTEST_FIRST:]
        )
        if exchange is None:
            return False
        self._make(heaviest, *exchange)
        return True

    def _offered(self, heaviest: int, other: int) -> Int64s:
        """Return the lengths of the items that `other` can offer in an exchange with the heaviest set.

        If set sizes may change, a 0 is appended, which represents a move without an item in return.
        """
        if self._keep_sizes or self.items[heaviest].size < 2:
            return self._values[other]
        return np.append(self._values[other], np.int64(0))

    def _first_exchange(self, heaviest: int, others: Int64s) -> tuple[int, int, int] | None:
        """Return the best exchange with the first set in `others` that allows a useful one, or None if no set does."""
        given = self._values[heaviest]
        for other in others.tolist():
            offered = self._offered(heaviest, other)
            if not offered.size:
                continue
            gap = int(self._sums[heaviest] - self._sums[other])
            order = offered.argsort(kind="stable")
            # The offered lengths just above and just below the length that would make the two sums equal.
            above = (2 * offered[order]).searchsorted(2 * given - gap).clip(max=order.size - 1)
            places = order[np.concatenate([above, (above - 1).clip(min=0)])]
            moved = np.concatenate([given, given]) - offered[places]
            best = int(np.abs(2 * moved - gap).argmin())
            if 0 < moved[best] < gap:
                return other, best % given.size, int(places[best])
        return None

    def _any_exchange(self, heaviest: int, others: Int64s) -> tuple[int, int, int] | None:
        """Return the exchange with any set in `others` that minimizes the larger of the two resulting sums, or None.

        If there are more than `_MOST_PAIRS` possible exchanges, return the one that `_first_exchange` finds.
        """
        given = self._values[heaviest]
        offered = [self._offered(heaviest, other) for other in others.tolist()]
        owners = np.repeat(others, [values.size for values in offered]) if offered else others
        if not owners.size:
            return None
        if given.size * owners.size > _MOST_PAIRS:
            return self._first_exchange(heaviest, others)
        moved = given[:, None] - np.concatenate(offered)[None, :]
        heavier = np.maximum(self._sums[heaviest] - moved, self._sums[owners][None, :] + moved)
        given_place, flat = divmod(int(heavier.argmin()), owners.size)
        if heavier[given_place, flat] >= self._sums[heaviest]:
            return None
        other = int(owners[flat])
        return other, given_place, flat - int((owners == other).argmax())

    def _make(self, heaviest: int, other: int, given: int, returned: int) -> None:
        """Swap the heaviest set's item at position `given` with the other set's item at position `returned`.

        If `returned` is past the end of the other set, move item `given` without a swap.
        """
        is_swap = returned < self.items[other].size
        moved = int(self._values[heaviest][given])
        for columns in (self.items, self._values):
            heavy, light = columns[heaviest], columns[other]
            if not is_swap:
                columns[heaviest], columns[other] = np.delete(heavy, given), np.append(light, heavy[given])
            else:
                heavy[given], light[returned] = light[returned], heavy[given]
        if is_swap:
            moved -= int(self._values[heaviest][given])
        self._sums[heaviest] -= moved
        self._sums[other] += moved
