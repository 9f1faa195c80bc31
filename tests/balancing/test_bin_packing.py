"""Bins: every item once, none too full, near the fewest there can be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_service.balancing.packs import best_fit_decreasing, count_bins_at_least, pack_into

CAPACITY = 20
item_sizes = st.lists(st.integers(0, CAPACITY), max_size=40)
few_sizes = st.lists(st.integers(1, CAPACITY), max_size=7)


def check(bins, sizes):
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    assert all(found and sum(sizes[item] for item in found) <= CAPACITY for found in bins)


def fewest_bins(sizes) -> int:
    """Return the smallest possible number of bins, by trying every place for every item."""
    best = len(sizes)

    def place(at, free):
        nonlocal best
        if len(free) >= best:
            return
        if at == len(sizes):
            best = len(free)
            return
        for chosen in range(len(free)):
            if free[chosen] >= sizes[at]:
                place(at + 1, [left - sizes[at] * (index == chosen) for index, left in enumerate(free)])
        place(at + 1, [*free, CAPACITY - sizes[at]])

    place(0, [])
    return best


@settings(deadline=None)
@given(sizes=item_sizes)
def test_best_fit_packs_every_item_once(sizes):
    check(best_fit_decreasing(np.array(sizes, np.int64), CAPACITY), sizes)


@settings(deadline=None)
@given(sizes=few_sizes)
def test_the_lower_bound_holds_and_the_search_finds_the_fewest(sizes):
    items, fewest = np.array(sizes, np.int64), fewest_bins(sizes)
    assert count_bins_at_least(items, CAPACITY) <= fewest <= len(best_fit_decreasing(items, CAPACITY))
    if sizes:
        check(pack_into(items, CAPACITY, fewest), sizes)
        assert pack_into(items, CAPACITY, fewest - 1) is None


@settings(deadline=None)
@given(sizes=item_sizes.filter(any), fewer=st.integers(0, 3))
def test_what_the_search_finds_is_a_packing(sizes, fewer):
    items = np.array(sizes, np.int64)
    wanted = len(best_fit_decreasing(items, CAPACITY)) - fewer
    found = pack_into(items, CAPACITY, wanted)
    if found is not None:
        check(found, sizes)
        assert len(found) <= wanted


@pytest.mark.parametrize(
    ("sizes", "fewest"),
    [
        ([9, 7, 7, 6, 6, 5], 2),  # best fit decreasing takes 3: 9 7, 7 6 6, 5
        ([11] * 5, 5),  # no two together, though 3 bins would hold the sum
        ([14, 14, 8, 8, 6, 6, 4], 3),
    ],
)
def test_one_bin_less_than_best_fit(sizes, fewest):
    items = np.array(sizes)
    found = pack_into(items, CAPACITY, fewest)
    check(found, sizes)
    assert len(found) == count_bins_at_least(items, CAPACITY) == fewest


def test_no_items_need_no_bins():
    nothing = np.zeros(0, np.int64)
    assert best_fit_decreasing(nothing, CAPACITY) == []
    assert count_bins_at_least(nothing, CAPACITY) == 0
