"""Karmarkar-Karp: every item once, sizes as asked, sums near the best there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_service.balancing import (
    get_even_partitions,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    refine_partitions,
)

METHODS = [karmarkar_karp, get_seqlen_balanced_partitions]
lengths_and_k = st.tuples(st.lists(st.integers(0, 40_000), min_size=1, max_size=80), st.integers(1, 12))


def heaviest(lengths, partitions) -> int:
    return max(sum(lengths[item] for item in part) for part in partitions)


def best_heaviest(lengths, k, *, equal_size) -> int:
    """Return the smallest possible heaviest sum, by trying every assignment."""
    best = sum(lengths)
    for assignment in itertools.product(range(k), repeat=len(lengths)):
        sizes = [assignment.count(part) for part in range(k)]
        if min(sizes) == 0 or (equal_size and len(set(sizes)) > 1):
            continue
        sums = [sum(n for n, part in zip(lengths, assignment, strict=True) if part == p) for p in range(k)]
        best = min(best, max(sums))
    return best


@pytest.mark.parametrize("method", METHODS)
@given(case=lengths_and_k)
def test_free_size_gives_every_item_once_and_no_empty_partition(method, case):
    lengths, k = case
    lengths = lengths + [1] * max(0, k - len(lengths))
    partitions = method(lengths, k, False)
    assert len(partitions) == k
    assert sorted(itertools.chain(*partitions)) == list(range(len(lengths)))
    assert all(part and part == sorted(part) for part in partitions)
    assert method(lengths, k, False) == partitions


@pytest.mark.parametrize("method", METHODS)
@given(case=lengths_and_k)
def test_equal_size_gives_every_item_once_in_equal_partitions(method, case):
    lengths, k = case
    lengths = lengths + [1] * (-len(lengths) % k)
    partitions = method(lengths, k, True)
    assert sorted(itertools.chain(*partitions)) == list(range(len(lengths)))
    assert {len(part) for part in partitions} == {len(lengths) // k}
    assert all(part == sorted(part) for part in partitions)
    assert method(lengths, k, True) == partitions


@given(lengths=st.lists(st.integers(0, 60), min_size=3, max_size=7), k=st.integers(2, 3))
def test_small_cases_come_near_the_optimum(lengths, k):
    """Largest differencing is within a third of the optimum for free sizes; a swap never leaves more than it found."""
    best = best_heaviest(lengths, k, equal_size=False)
    assert best <= heaviest(lengths, get_seqlen_balanced_partitions(lengths, k, False)) <= best * 4 / 3


@given(lengths=st.lists(st.integers(0, 60), min_size=6, max_size=6), k=st.integers(2, 3))
def test_small_equal_size_cases_stay_below_the_mean_and_the_longest(lengths, k):
    result = heaviest(lengths, get_seqlen_balanced_partitions(lengths, k, True))
    assert best_heaviest(lengths, k, equal_size=True) <= result <= sum(lengths) / k + max(lengths)


@given(case=lengths_and_k, equal_size=st.booleans())
def test_refinement_never_makes_the_heaviest_heavier(case, equal_size):
    lengths, k = case
    lengths = lengths + [1] * (-len(lengths) % k)
    before = karmarkar_karp(lengths, k, equal_size)
    after = get_seqlen_balanced_partitions(lengths, k, equal_size)
    assert heaviest(lengths, after) <= heaviest(lengths, before)


@given(case=lengths_and_k)
def test_even_partitions_differ_by_at_most_one_item(case):
    lengths, k = case
    partitions = get_even_partitions(lengths, k)
    sizes = [len(part) for part in partitions]
    assert len(sizes) == k
    assert max(sizes) - min(sizes) <= 1
    assert sorted(itertools.chain(*partitions)) == list(range(len(lengths)))


def test_even_partitions_of_nothing():
    assert get_even_partitions([], 3) == [[], [], []]


def test_the_textbook_example():
    """Differencing of 8, 7, 6, 5, 4 into two leaves a difference of 2: 16 and 14."""
    partitions = karmarkar_karp([8, 7, 6, 5, 4], 2, False)
    assert sorted(sum([8, 7, 6, 5, 4][item] for item in part) for part in partitions) == [14, 16]


def test_refinement_reaches_what_differencing_misses():
    """8 + 7 against 6 + 5 + 4 is the optimum."""
    refined = refine_partitions(np.array([8, 7, 6, 5, 4]), [np.array([0, 1, 4]), np.array([2, 3])], equal_size=False)
    assert [part.tolist() for part in refined] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize(("count", "k"), [(4096, 64), (2048, 16)])
def test_large_lognormal_batches_are_balanced_to_a_thousandth(equal_size, count, k):
    rng = np.random.default_rng(7)
    lengths = np.minimum(rng.lognormal(7.5, 1.0, count), 32_768).astype(np.int64)
    bound = max(lengths.sum() / k, lengths.max())
    assert heaviest(lengths, get_seqlen_balanced_partitions(lengths, k, equal_size)) <= 1.001 * bound


def test_many_items_of_one_length_in_any_integer_type():
    for dtype in (np.int32, np.uint8, np.uint64):
        assert karmarkar_karp(np.full(6, 3, dtype), 3, True) == karmarkar_karp([3] * 6, 3, True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("lengths", "k", "equal_size", "message"),
    [
        ([1, 2], 3, False, r"got 2 items for 3 partitions, expected at least 3"),
        ([], 1, False, r"got 0 items for 1 partitions, expected at least 1"),
        ([1, 2, 3], 2, True, r"got 3 items for 2 partitions of equal size, expected a multiple of 2"),
        ([1, 2], 0, False, r"k_partitions: got 0, expected an integer of at least 1"),
        ([1, 2], -1, True, r"k_partitions: got -1, expected an integer of at least 1"),
        ([1, 2], 1.5, True, r"k_partitions: got 1.5, expected an integer"),
        ([1, 2], True, True, r"k_partitions: got True, expected an integer"),
        ([1, -2, 3], 2, False, r"got -2 at position 1, expected a non-negative length"),
        ([1, 2.5], 2, False, r"got 1.0 at position 0 .*expected integers"),
        ([1, float("nan")], 2, False, r"expected integers"),
        ([True, False], 2, False, r"got True at position 0"),
        (["a", "b"], 2, False, r"got 'a' at position 0"),
        ([1, 2**70], 2, False, r"at position 1 .*expected integers"),
        ([1, None], 2, False, r"got None at position 1"),
        ([2**62, 2**62], 2, False, r"total of at least 2\*\*62"),
        ([[1, 2], [3, 4]], 2, False, r"shape \(2, 2\), expected one dimension"),
        ([[1, 2], [3]], 2, False, r"nested lists of different lengths"),
        (5, 2, False, r"shape \(\), expected one dimension"),
    ],
)
def test_bad_arguments_say_what_was_got_and_expected(method, lengths, k, equal_size, message):
    with pytest.raises(ValueError, match=message):
        method(lengths, k, equal_size)
