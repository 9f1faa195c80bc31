"""Runs: samples whose indexes follow each other without a gap, wherever the first of them is."""

from __future__ import annotations

import numpy as np

from tq_service.state.plan import Indexes


def run_lengths(indexes: Indexes) -> tuple[Indexes, Indexes]:
    """Return for each of ascending indexes `(n,)` its place in its run, from 0, and how many indexes the run has."""
    places = np.arange(indexes.size)
    is_first = np.ones(indexes.size, np.bool_)
    is_first[1:] = np.diff(indexes) != 1
    starts = places[is_first]
    run_of = np.cumsum(is_first) - 1
    lengths = np.diff(starts, append=indexes.size)
    return places - starts[run_of], lengths[run_of]


def groups_in_runs(indexes: Indexes, size: int) -> Indexes:
    """Return for each of ascending indexes `(n,)` the first index of its group, -1 where it is in none.

    Groups are of `size` indexes that follow each other, each as early as can be: those of 1, 2, 3, 5, 6 with size 2
    are 1, 2 and 5, 6. What a group is does not change with indexes that come after it.
    """
    place, length = run_lengths(indexes)
    start = place - place % size
    return np.where(start + size <= length, indexes - place % size, -1)
