"""Cost functions: named ones, those of users, and what is refused."""

import numpy as np
import pytest

from tq_service.balancing import AttentionCost, get_costs, get_seqlen_balanced_partitions


def test_tokens_cost_their_number():
    assert get_costs(np.array([3, 0, 7])).tolist() == [3, 0, 7]
    assert get_costs(np.array([3, 0, 7]), "tokens").tolist() == [3, 0, 7]


def test_attention_costs_a_linear_and_a_quadratic_part():
    lengths = np.array([0, 1, 1_000, 24_576, 32_768])
    assert AttentionCost()(lengths).tolist() == [24_576 * n + n * n for n in lengths.tolist()]
    assert AttentionCost(linear=2, quadratic=3)(np.array([5])).tolist() == [85]


def test_costs_that_are_no_integers_keep_their_ratios():
    costs = get_costs(np.array([1, 2, 4]), lambda lengths: lengths / 8)
    assert costs.tolist() == [2**38, 2**39, 2**40]
    assert get_costs(np.array([1, 2]), lambda lengths: lengths * 0.0).tolist() == [0, 0]
    assert get_costs(np.zeros(0, np.int64), "attention").tolist() == []


def test_balancing_by_attention_parts_long_sequences_from_each_other():
    """By tokens the longest leaves capacity for others; by pairs of tokens it costs more than all others together."""
    lengths = [8_000, 4_000, 4_000, 2_000, 2_000, 2_000]

    def quadratic(lengths):
        return lengths * lengths

    parts = get_seqlen_balanced_partitions(lengths, 2, False, cost=quadratic)
    assert sorted(parts) == [[0], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("equal_size", [True, False])
def test_attention_costs_are_balanced_to_a_thousandth(equal_size):
    lengths = np.minimum(np.random.default_rng(3).lognormal(7.5, 1.0, 4_096), 32_768).astype(np.int64)
    costs = AttentionCost()(lengths)
    parts = get_seqlen_balanced_partitions(lengths, 64, equal_size, cost="attention")
    assert max(costs[part].sum() for part in parts) <= 1.001 * max(costs.sum() / 64, costs.max())


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ("flops", r"cost: got 'flops', expected one of 'tokens', 'attention'"),
        (7, r"cost: got 7, expected a name or a function"),
        (lambda lengths: lengths[:1], r"shape \(1,\) for 2 lengths"),
        (lambda lengths: lengths - 2, r"got -1 for a length of 1, expected a finite, non-negative number"),
        (lambda lengths: lengths * float("nan"), r"got nan for a length of 1"),
        (lambda lengths: lengths > 1, r"got values of dtype bool"),
        (lambda lengths: lengths * 2**61, r"total of at least 2\*\*62"),
    ],
)
def test_bad_costs_say_what_was_got_and_expected(cost, message):
    with pytest.raises(ValueError, match=message):
        get_costs(np.array([1, 2]), cost)


@pytest.mark.parametrize("options", [{"linear": -1}, {"quadratic": float("nan")}, {"linear": 0, "quadratic": 0}])
def test_attention_factors_that_mean_nothing_are_refused(options):
    with pytest.raises(ValueError, match="expected finite, non-negative numbers"):
        AttentionCost(**options)
