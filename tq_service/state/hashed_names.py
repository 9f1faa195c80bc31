"""Numbers by the hashes of names, for names that come by the thousands.

Each write of many names is a run of its own: their hashes in ascending order, which were sorted before the step that
adds them, and their numbers. So adding them costs nothing for each name, and a name is looked for by halving each run.
Runs of alike sizes are merged, so that there are few; one that is large is merged no more, so that no step takes long.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tq_service.state.plan import Indexes
from tq_service.texts import Hashes

_REMOVED: Final = -1
_MOST_MERGED: Final = 1 << 19  # names of two runs that are merged: it takes some 10 ms
_LEAST_SHARE: Final = 4  # of a run that must be left, else what is gone is closed up


class HashedNames:
    """Numbers by the hashes of names; a hash has one number.

    Attributes:
        count: number of names.
    """

    __slots__ = ("_runs", "count")

    def __init__(self) -> None:
        self.count = 0
        self._runs: list[_Run] = []

    def find(self, hashes: Hashes) -> Indexes:
        """Return the number of each hash `(n,)`, -1 where there is none; it is quicker for ascending ones."""
        found = np.full(hashes.size, _REMOVED, np.int64)
        for run in self._runs:
            at = run.places(hashes)
            is_it = run.hashes[at] == hashes
            if is_it.any():
                found[is_it] = np.maximum(found[is_it], run.numbers[at[is_it]])
        return found

    def find_one(self, one: int) -> int:
        """Return the number of one hash, -1 where there is none."""
        value = np.uint64(one)
        for run in self._runs:
            at = int(run.hashes.searchsorted(value))
            if at < run.hashes.size and run.hashes[at] == value and run.numbers[at] >= 0:
                return int(run.numbers[at])
        return _REMOVED

    def add(self, hashes: Hashes, numbers: Indexes) -> None:
        """Enter hashes, in ascending order, none of which is there."""
        if not hashes.size:
            return
        self._runs.append(_Run(hashes, numbers))
        self.count += hashes.size
        while len(self._runs) > 1:
            one, other = self._runs[-2:]
            if one.left > 2 * other.left or one.left + other.left > _MOST_MERGED:
                break
            self._runs[-2:] = [_merged(one, other)]

    def remove(self, hashes: Hashes) -> None:
        """Forget hashes; those that are not there are ignored."""
        for run in self._runs:
            self.count -= run.remove(hashes)
        self._runs = [run if _LEAST_SHARE * run.left >= run.hashes.size else run.closed_up() for run in self._runs]
        self._runs = [run for run in self._runs if run.left]

    def numbers(self) -> Indexes:
        """Return all numbers."""
        found = [run.numbers[run.numbers >= 0] for run in self._runs]
        return np.concatenate(found) if found else np.zeros(0, np.int64)


class _Run:
    """Names that were added together.

    Attributes:
        hashes: in ascending order.
        numbers: of each, -1 of one that was removed.
        left: how many were not.
    """

    __slots__ = ("hashes", "left", "numbers")

    def __init__(self, hashes: Hashes, numbers: Indexes) -> None:
        self.hashes = hashes
        self.numbers = numbers
        self.left = hashes.size

    def places(self, hashes: Hashes) -> Indexes:
        """Return where each hash is, if it is there."""
        return np.minimum(np.searchsorted(self.hashes, hashes), self.hashes.size - 1)

    def remove(self, hashes: Hashes) -> int:
        """Take the numbers of hashes away; return how many had one."""
        at = self.places(hashes)
        at = at[(self.hashes[at] == hashes) & (self.numbers[at] >= 0)]
        self.numbers[at] = _REMOVED
        count = int(at.size)
        self.left -= count
        return count

    def closed_up(self) -> _Run:
        """Return what is left of it."""
        if self.left == self.hashes.size:
            return self
        is_left = self.numbers >= 0
        return _Run(self.hashes[is_left], self.numbers[is_left])


def _merged(one: _Run, other: _Run) -> _Run:
    """Return what is left of two runs as one."""
    one, other = one.closed_up(), other.closed_up()
    hashes = np.concatenate((one.hashes, other.hashes))
    order = np.argsort(hashes, kind="stable")  # which takes what is in order as it is
    return _Run(hashes[order], np.concatenate((one.numbers, other.numbers))[order])
