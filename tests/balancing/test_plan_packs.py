"""Plans of packs: what trainers rely on, whatever the lengths, and the figures a plan carries."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_settings import examples

from tq_service.balancing import get_costs, plan_packs

CAP = 100
shapes = st.fixed_dictionaries(
    {
        "dp_size": st.integers(1, 5),
        "optimizer_steps": st.integers(1, 4),
        "even_steps": st.booleans(),
        "packs_multiple_of": st.sampled_from([1, 2, 3]),
    }
)
lengths_lists = st.lists(st.integers(0, CAP), max_size=60)


def samples_of(steps) -> list[int]:
    return list(itertools.chain(*itertools.chain(*steps)))


def check(plan, lengths, kept=None):
    """Assert what every plan keeps."""
    samples = [sample for steps in plan.packs for sample in samples_of(steps)]
    assert sorted(samples) == list(range(len(lengths)) if kept is None else kept)
    counts = [[len(step) for step in steps] for steps in plan.packs]
    assert counts == [plan.packs_by_step] * plan.dp_size
    assert min(plan.packs_by_step) >= 1
    totals = [sum(lengths[sample] for sample in pack) for steps in plan.packs for step in steps for pack in step]
    assert max(totals) <= plan.pack_max_length
    assert plan.pack_count == len(totals) >= plan.pack_count_lower_bound
    assert plan.pack_count * plan.pack_max_length == int(plan.tokens.sum()) + plan.padding_tokens
    assert int(plan.tokens.sum()) == sum(totals)
    assert all(type(sample) is int for sample in samples)


@settings(deadline=None)
@given(lengths=lengths_lists, shape=shapes)
def test_every_sample_once_no_pack_too_full_and_as_many_packs_on_every_rank(lengths, shape):
    plan = plan_packs(lengths, pack_max_length=CAP, **shape)
    check(plan, lengths)
    assert len(plan.packs) == shape["dp_size"]
    assert not any(count % shape["packs_multiple_of"] for count in plan.packs_by_step)
    if not shape["even_steps"]:
        assert max(plan.packs_by_step) - min(plan.packs_by_step) <= shape["packs_multiple_of"]
    assert all(len(steps) == shape["optimizer_steps"] for steps in plan.packs)
    assert plan.tokens.shape == (shape["dp_size"], shape["optimizer_steps"])
    counts = [len(samples_of(steps)) for steps in plan.packs]
    assert max(counts) - min(counts) <= 1
    again = plan_packs(np.array(lengths, np.int64), pack_max_length=CAP, **shape)
    assert again.packs == plan.packs


@settings(deadline=None)
@given(lengths=lengths_lists, shape=shapes, data=st.data())
def test_groups_stay_on_one_rank(lengths, shape, data):
    names = st.sampled_from(["a", "b", 3, 4, None])
    groups = data.draw(st.lists(names, min_size=len(lengths), max_size=len(lengths)))
    plan = plan_packs(lengths, pack_max_length=CAP, groups=groups, **shape)
    check(plan, lengths)
    for group in set(groups) - {None}:
        members = {index for index, name in enumerate(groups) if name == group}
        assert sum(bool(members & set(samples_of(steps))) for steps in plan.packs) == 1


@settings(deadline=None)
@given(lengths=lengths_lists, shape=shapes, data=st.data(), has_groups=st.booleans())
def test_rollouts_stay_in_one_step_of_one_rank(lengths, shape, data, has_groups):
    numbers = st.integers(0, 9) | st.none()
    rollouts = data.draw(st.lists(numbers, min_size=len(lengths), max_size=len(lengths)))
    groups = [None if rollout is None else rollout // 3 for rollout in rollouts] if has_groups else None
    plan = plan_packs(lengths, pack_max_length=CAP, rollouts=rollouts, groups=groups, **shape)
    check(plan, lengths)
    steps = [{rollouts[sample] for pack in step for sample in pack} - {None} for steps in plan.packs for step in steps]
    assert sum(map(len, steps)) == len(set(rollouts) - {None})


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 2 * CAP), max_size=40), shape=shapes)
def test_samples_over_the_cap_are_refused_cut_or_left_out(lengths, shape):
    too_long = [index for index, length in enumerate(lengths) if length > CAP]
    cut = plan_packs(lengths, pack_max_length=CAP, overlong="truncate", **shape)
    check(cut, [min(length, CAP) for length in lengths])
    assert cut.truncated.tolist() == too_long
    assert cut.lengths.tolist() == [min(length, CAP) for length in lengths]
    left = plan_packs(lengths, pack_max_length=CAP, overlong="drop", **shape)
    check(left, lengths, kept=[index for index in range(len(lengths)) if index not in too_long])
    assert left.dropped.tolist() == too_long
    assert left.truncated.tolist() == cut.dropped.tolist() == []
    if too_long:
        with pytest.raises(ValueError, match=rf"got {lengths[too_long[0]]} tokens for sample {too_long[0]}, expected"):
            plan_packs(lengths, pack_max_length=CAP, **shape)


@examples(30)
@given(lengths=lengths_lists, shape=shapes)
def test_any_cost_gives_a_valid_plan(lengths, shape):
    for cost in ("tokens", "attention", np.sqrt):
        plan = plan_packs(lengths, pack_max_length=CAP, cost=cost, **shape)
        check(plan, lengths)
        assert plan.rank_costs.sum() == get_costs(np.array(lengths, np.int64), cost).sum()


@pytest.mark.parametrize(
    ("lengths", "ranks", "steps", "padding"),
    [
        ([1500, 1000, 2800, 3000, 1500, 2000, 2100, 1000, 800], 2, 2, 8_876),
        ([500], 2, 1, 5_644),
        ([100, 200, 2500, 3000, 50, 400, 1000, 1500], 2, 4, 15_826),
    ],
)
def test_padding_of_known_batches(lengths, ranks, steps, padding):
    plan = plan_packs(lengths, dp_size=ranks, optimizer_steps=steps, pack_max_length=3_072)
    check(plan, lengths)
    assert plan.padding_tokens <= padding


@pytest.mark.parametrize(("lengths", "cap"), [([2, 2, 2], 3), ([7] * 8, 8)])
def test_samples_that_cannot_share_a_pack_get_one_each(lengths, cap):
    """Their total would fit into fewer packs, which is where balancing by totals alone goes over the cap."""
    plan = plan_packs(lengths, dp_size=1, optimizer_steps=1, pack_max_length=cap)
    assert plan.packs == [[[[index] for index in range(len(lengths))]]]
    assert plan.pack_count_lower_bound == len(lengths)


def test_ranks_without_samples_get_packs_of_padding():
    plan = plan_packs([60, 60], dp_size=3, optimizer_steps=2, pack_max_length=CAP)
    assert sorted(plan.packs) == [[[[]], [[]]], [[[0]], [[]]], [[[1]], [[]]]]
    assert plan.padding_tokens == 6 * CAP - 120
    assert plan.tokens.sum(axis=1).tolist().count(0) == 1


def test_the_figures_of_a_plan():
    plan = plan_packs([60, 50, 40, 30], dp_size=2, optimizer_steps=1, pack_max_length=CAP)
    assert plan.packs == [[[[0, 3]]], [[[1, 2]]]]
    assert plan.tokens.tolist() == [[90], [90]]
    assert (plan.padding_tokens, plan.fill_ratio) == (20, 0.9)
    assert (plan.imbalance, plan.step_imbalance) == (0.0, 0.0)
    assert (plan.pack_count, plan.packs_by_step, plan.pack_count_lower_bound) == (2, [1], 2)
    assert plan.seconds > 0
    uneven = plan_packs([90, 30], dp_size=2, optimizer_steps=1, pack_max_length=CAP)
    assert uneven.imbalance == uneven.step_imbalance == pytest.approx(0.5)


def test_packs_are_filled_up_to_a_multiple_for_each_step():
    lengths, shape = [90, 80, 70, 60, 50], {"dp_size": 1, "optimizer_steps": 2, "pack_max_length": 100}
    even = plan_packs(lengths, packs_multiple_of=4, **shape)
    assert [[len(pack) for pack in step] for step in even.packs[0]] == [[1, 1, 1, 0], [1, 1, 0, 0]]
    uneven = plan_packs(lengths, packs_multiple_of=2, even_steps=False, **shape)
    assert [sorted(map(len, step)) for step in uneven.packs[0]] == [[0, 1, 1, 1], [1, 1]]
    assert plan_packs([60] * 5, packs_multiple_of=4, dp_size=1, optimizer_steps=1, pack_max_length=100).pack_count == 8
    assert plan_packs([50] * 8, packs_multiple_of=4, dp_size=1, optimizer_steps=1, pack_max_length=100).pack_count == 4


def test_nothing_is_a_plan_of_padding():
    plan = plan_packs([], dp_size=2, optimizer_steps=3, pack_max_length=CAP)
    assert plan.packs == [[[[]]] * 3] * 2
    assert plan.padding_tokens == 6 * CAP
    assert plan.fill_ratio == plan.imbalance == plan.step_imbalance == 0.0


def test_uneven_steps_take_no_more_packs_than_the_tokens_need():
    """Tokens for 2.2 packs in each step of each rank: 3 packs where steps are even, else 9 for a rank's 4 steps."""
    lengths = np.random.default_rng(2).integers(1, 40, 400)
    lengths = lengths[: int(np.searchsorted(lengths.cumsum(), 220 * 4 * 8))]
    shape = {"dp_size": 8, "optimizer_steps": 4, "pack_max_length": CAP}
    even, uneven = plan_packs(lengths, **shape), plan_packs(lengths, even_steps=False, **shape)
    assert even.packs_by_step == [3, 3, 3, 3]
    assert uneven.packs_by_step == [3, 2, 2, 2]
    assert uneven.pack_count == uneven.pack_count_lower_bound
    check(uneven, lengths.tolist())


def test_a_large_batch_is_packed_tightly_and_evenly():
    lengths = np.minimum(np.random.default_rng(5).lognormal(7.5, 1.0, 4_096), 16_384).astype(np.int64)
    plan = plan_packs(lengths, dp_size=8, optimizer_steps=4, pack_max_length=16_384)
    check(plan, lengths.tolist())
    whole_packs = -(-int(plan.tokens.max()) // 16_384)
    assert plan.packs_by_step == [whole_packs] * 4, "no more than the tokens of a step need"
    assert plan.imbalance < 1e-4
    assert plan.step_imbalance < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_size": 0}, r"dp_size: got 0, expected an integer of at least 1"),
        ({"optimizer_steps": 1.5}, r"optimizer_steps: got 1.5"),
        ({"pack_max_length": True}, r"pack_max_length: got True"),
        ({"overlong": "cut"}, r"overlong: got 'cut', expected 'error', 'truncate' or 'drop'"),
        ({"groups": ["a"]}, r"groups: got 1 for 3 samples"),
        ({"rollouts": ["a"]}, r"rollouts: got 1 for 3 samples"),
        ({"cost": "flops"}, r"cost: got 'flops'"),
        ({"seqlens": [1, -1]}, r"got -1 at position 1"),
        ({"pack_max_length": 2}, r"got 3 tokens for sample 2, .* 1 of 3 samples are longer; raise pack_max_length"),
    ],
)
def test_bad_arguments_say_what_was_got_and_expected(options, message):
    arguments = {"seqlens": [1, 2, 3], "dp_size": 1, "optimizer_steps": 1, "pack_max_length": 9, **options}
    with pytest.raises(ValueError, match=message):
        plan_packs(arguments.pop("seqlens"), **arguments)
