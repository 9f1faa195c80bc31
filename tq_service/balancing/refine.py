"""Refinement of a partition: moves and swaps from the heaviest set to lighter ones until none helps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

# The heaviest set is tried against so many of the lightest sets, one by one, before it is tried against all others at
# once. The latter compares every pair of items; where these are more than this, the others too are tried one by one.
_LIGHTEST_FIRST = 32
_MOST_PAIRS = 1_000_000
# A heaviest set within this share of the lower bound meets it: the last few tokens of a million cost most of the time.
_TOLERANCE = 1e-5


def refine_partitions(lengths: Int64s, partitions: list[Int64s], *, equal_size: bool) -> list[Int64s]:
    """Exchange items until none relieves the heaviest set, or that set meets the lower bound to 0.001 %.

    The bound is max(mean, longest item); with `equal_size` it counts the shortest items that must go with the longest.
    An exchange gives one item of the heaviest set for a shorter one of another set, or, where sizes are free, for
    nothing; it is made where both sets end below the old maximum. So the sorted sums fall with each exchange, and their
    number is limited besides, to four for each set.

    Args:
        lengths: length of each item, `(n,)`.
        partitions: item positions of each set; a set may be empty.
        equal_size: whether the sets keep their sizes.

    Returns:
        The sets in the given order.
    """
    sets = _Sets(lengths, partitions, keep_sizes=equal_size)
    for _ in range(4 * len(partitions)):
        if not sets.relieve_heaviest():
            break
    return sets.items


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Item at place `given` of the heaviest set for that at place `returned` of `other`; None: for nothing."""

    other: int
    given: int
    returned: int | None


class _Sets:
    """Sets of items with their sums; `values[s]` are the lengths of `items[s]`."""

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
        """Make the best exchange of the heaviest set; tell whether there was one to make."""
        heaviest = int(np.argmax(self._sums))
        if self._sums[heaviest] <= self._good_enough:
            return False
        others = self._sums.argsort(kind="stable")
        others = others[self._sums[others] < self._sums[heaviest] - 1]
        exchange = self._first_exchange(heaviest, others[:_LIGHTEST_FIRST]) or self._any_exchange(
            heaviest, others[_LIGHTEST_FIRST:]
        )
        if exchange is not None:
            self._make(heaviest, exchange)
        return exchange is not None

    def _offered(self, heaviest: int, other: int) -> Int64s:
        """Return the lengths the other set can give back, last a 0 for nothing where sizes are free."""
        if self._keep_sizes or self.items[heaviest].size < 2:
            return self._values[other]
        return np.append(self._values[other], np.int64(0))

    def _first_exchange(self, heaviest: int, others: Int64s) -> _Exchange | None:
        """Return the best exchange with the first of the other sets that offers one."""
        given = self._values[heaviest]
        for other in others.tolist():
            offered = self._offered(heaviest, other)
            if not offered.size:
                continue
            gap = int(self._sums[heaviest] - self._sums[other])
            order = offered.argsort(kind="stable")
            # The nearest lengths on both sides of those that would make the two sets equal.
            above = (2 * offered[order]).searchsorted(2 * given - gap).clip(max=order.size - 1)
            places = order[np.concatenate([above, (above - 1).clip(min=0)])]
            moved = np.concatenate([given, given]) - offered[places]
            best = int(np.abs(2 * moved - gap).argmin())
            if 0 < moved[best] < gap:
                place = int(places[best])
                return _Exchange(other, best % given.size, place if place < self.items[other].size else None)
        return None

    def _any_exchange(self, heaviest: int, others: Int64s) -> _Exchange | None:
        """Return the best exchange with any of the other sets: that after which the heavier of the two is lightest."""
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
        place = flat - int((owners == other).argmax())
        return _Exchange(other, given_place, place if place < self.items[other].size else None)

    def _make(self, heaviest: int, exchange: _Exchange) -> None:
        other, given, returned = exchange.other, exchange.given, exchange.returned
        moved = int(self._values[heaviest][given])
        for columns in (self.items, self._values):
            heavy, light = columns[heaviest], columns[other]
            if returned is None:
                columns[heaviest], columns[other] = np.delete(heavy, given), np.append(light, heavy[given])
            else:
                heavy[given], light[returned] = light[returned], heavy[given]
        if returned is not None:
            moved -= int(self._values[heaviest][given])
        self._sums[heaviest] -= moved
        self._sums[other] += moved
