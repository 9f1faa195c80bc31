"""`token_budget`: as many samples as a rank's tokens allow, and no batch before they are used up."""

import itertools

import numpy as np
import pytest
from fake_view import assert_alike, parts, view_of_groups, view_of_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_service.balancing import get_costs
from tq_service.errors import InvalidArgumentError
from tq_service.samplers import PlanRequest, TokenBudgetSampler
from tq_service.samplers.service import check_plan

BUDGET = 100


def ranked(batch_size, ranks, *, final=False, unit="sample", micro_batch_size=None):
    return PlanRequest(
        batch_size=batch_size,
        min_size=1 if final else batch_size * ranks,
        batch_unit=unit,
        rank_count=ranks,
        micro_batch_size=micro_batch_size,
    )


def tokens_by_rank(plan, lengths):
    return [sum(lengths[row] for row in part) for part in parts(plan)]


def test_a_batch_is_made_when_the_next_sample_does_not_fit():
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET)
    lengths = [60, 50, 40, 30, 40]
    assert parts(sampler.plan(view_of_samples(5, lengths=lengths), ranked(64, 2))) == [[0, 3], [1, 2]]
    assert sampler.plan(view_of_samples(4, lengths=lengths[:4]), ranked(64, 2)) is None
    last = sampler.plan(view_of_samples(4, lengths=lengths[:4]), ranked(64, 2, final=True))
    assert parts(last) == [[0, 3], [1, 2]]


def test_a_batch_is_made_when_the_budget_is_used_to_the_last_token():
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET)
    assert parts(sampler.plan(view_of_samples(4, lengths=[50] * 4), ranked(64, 2))) == [[1, 2], [0, 3]]


def test_batch_size_is_the_most_that_a_rank_gets():
    plan = TokenBudgetSampler(tokens_per_rank=BUDGET).plan(view_of_samples(9, lengths=[50] + [1] * 8), ranked(3, 2))
    assert sorted(len(part) for part in parts(plan)) == [3, 3]


def test_a_queue_worker_gets_what_is_ready():
    request = PlanRequest(batch_size=8, min_size=2, ranked=False)
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET)
    assert sampler.plan(view_of_samples(1, lengths=[10]), request) is None
    assert parts(sampler.plan(view_of_samples(2, lengths=[10, 10]), request)) == [[0, 1]]
    assert parts(sampler.plan(view_of_samples(3, lengths=[90, 20, 10]), request)) == [[0]]


def test_nothing_ready_makes_no_plan():
    assert TokenBudgetSampler(tokens_per_rank=BUDGET).plan(view_of_samples(0), ranked(4, 2, final=True)) is None


def test_micro_batches_are_as_many_for_every_rank_and_evenly_filled():
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET, tokens_per_micro_batch=60)
    plan = sampler.plan(view_of_samples(5, lengths=[60, 20, 20, 20, 40]), ranked(64, 2, final=True))
    packs = [[sorted(pack.lengths.tolist()) for pack in rank.steps[0]] for rank in plan.ranks]
    assert sorted(packs) == [[[40], [20, 20]], [[60], [20]]]
    assert all(pack.padding_tokens == 0 for rank in plan.ranks for pack in rank.steps[0])


def test_without_micro_batches_the_planner_cuts_them():
    plan = TokenBudgetSampler(tokens_per_rank=BUDGET).plan(view_of_samples(3, lengths=[60, 60, 60]), ranked(9, 2))
    assert [rank.steps for rank in plan.ranks] == [(), ()]


@pytest.mark.parametrize(
    ("sizes", "lengths", "batch_size", "message"),
    [
        ([1], [101], 8, r"length: got 101 tokens for sample 0, expected at most tokens_per_rank \(100\)"),
        ([2], [60, 60], 8, r"got 120 tokens in the group of sample 0, expected at most tokens_per_rank"),
        ([1], [70], 8, r"got 70 tokens for sample 0, expected at most tokens_per_micro_batch \(60\)"),
        ([2], [70, 1], 8, r"got 70 tokens for a sample in the group of sample 0, .*tokens_per_micro_batch"),
        ([4], [1] * 4, 3, r"batch_size: got 3 samples; expected at least 4, the size of the group with sample 0"),
        ([1], [-5], 8, r"length: got -5 for sample 0"),
    ],
)
def test_what_no_rank_can_ever_have_is_an_error(sizes, lengths, batch_size, message):
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET, tokens_per_micro_batch=60)
    with pytest.raises(InvalidArgumentError, match=message):
        sampler.plan(view_of_groups(sizes, lengths=lengths), ranked(batch_size, 2))


def test_what_comes_before_an_oversized_sample_is_handed_out():
    plan = TokenBudgetSampler(tokens_per_rank=BUDGET).plan(view_of_samples(3, lengths=[5, 6, 101]), ranked(8, 2))
    assert sorted(parts(plan)) == [[0], [1]]


def test_samples_count_rounded_up_and_keep_their_lengths():
    sampler = TokenBudgetSampler(tokens_per_rank=64, tokens_per_micro_batch=32, align=16, packs_multiple_of=3)
    plan = sampler.plan(view_of_samples(4, lengths=[17, 1, 9, 16]), ranked(8, 1))
    assert parts(plan) == [[0, 1, 2]], "32, 16 and 16 use the budget"
    assert [sorted(pack.lengths.tolist()) for pack in plan.ranks[0].steps[0]] == [[17], [9], [1]]
    with pytest.raises(InvalidArgumentError, match=r"got 80 tokens for sample 0, each sample rounded up to a multiple"):
        sampler.plan(view_of_samples(1, lengths=[65]), ranked(8, 1))


def test_a_sample_longer_than_a_micro_batch_is_cut_where_asked():
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET, tokens_per_micro_batch=48, overlong="truncate", align=16)
    plan = sampler.plan(view_of_samples(3, lengths=[500, 20, 7]), ranked(3, 1))
    assert parts(plan) == [[0, 1, 2]]
    assert [pack.lengths.tolist() for pack in plan.ranks[0].steps[0]] == [[48], [20, 7]]


def test_costs_are_balanced_within_the_budget():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(7.5, 1.0, 2_000).astype(int) + 1, 20_000).tolist()
    above = {}
    for cost in ("tokens", "attention"):
        sampler = TokenBudgetSampler(tokens_per_rank=100_000, cost=cost)
        plan = sampler.plan(view_of_samples(len(lengths), lengths=lengths), ranked(2_000, 8))
        assert max(tokens_by_rank(plan, lengths)) <= 100_000
        costs = [get_costs(np.array(lengths), "attention")[part].sum() for part in parts(plan)]
        above[cost] = max(costs) / np.mean(costs) - 1, sum(map(len, parts(plan)))
    assert above["attention"][0] < 0.001
    assert above["tokens"][0] > 0.02
    assert 0.8 * above["tokens"][1] < above["attention"][1] < above["tokens"][1]


def test_micro_batches_by_samples_and_by_tokens_exclude_each_other():
    request = ranked(8, 2, micro_batch_size=2)
    TokenBudgetSampler(tokens_per_rank=BUDGET).check(request)
    with pytest.raises(InvalidArgumentError, match="micro_batch_size: got 2 for sampler 'token_budget'") as error:
        TokenBudgetSampler(tokens_per_rank=BUDGET, tokens_per_micro_batch=50).check(request)
    assert error.value.field == "micro_batch_size"


def test_small_plans_may_run_on_the_loop():
    assert TokenBudgetSampler(tokens_per_rank=BUDGET).runs_inline(ranked(8, 4))
    assert not TokenBudgetSampler(tokens_per_rank=BUDGET).runs_inline(ranked(64, 4))
    assert not TokenBudgetSampler(tokens_per_rank=BUDGET, tokens_per_micro_batch=50).runs_inline(ranked(8, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_rank": 0}, "tokens_per_rank: got 0"),
        ({"tokens_per_rank": 5, "tokens_per_micro_batch": 0}, "tokens_per_micro_batch: got 0"),
        ({"tokens_per_rank": 5, "cost": "flops"}, "cost: got 'flops'"),
        ({"tokens_per_rank": 5, "packs_multiple_of": 2}, "packs_multiple_of: got 2 without tokens_per_micro_batch"),
        ({"tokens_per_rank": 5, "overlong": "truncate"}, "overlong: got 'truncate' without tokens_per_micro_batch"),
        ({"tokens_per_rank": 5, "overlong": "cut"}, "overlong: got 'cut', expected"),
        (
            {"tokens_per_rank": 9, "tokens_per_micro_batch": 5, "overlong": "truncate", "align": 2},
            r"got 5; expected a multiple of align, which is 2$",
        ),
        ({"tokens_per_rank": 5, "length_key": ""}, "length_key: got an empty name"),
        ({"tokens_per_rank": 5, "incomplete_groups": "drop"}, "incomplete_groups: got 'drop'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TokenBudgetSampler(**options)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), max_size=24),
    ranks=st.integers(1, 4),
    batch=st.integers(4, 24),
    unit=st.sampled_from(["sample", "group"]),
    micro=st.sampled_from([None, 25, 60]),
    final=st.booleans(),
    cost=st.sampled_from(["tokens", "attention"]),
    data=st.data(),
)
def test_budgets_hold_groups_stay_whole_and_ranks_agree(*, sizes, ranks, batch, unit, micro, final, cost, data):
    lengths = data.draw(st.lists(st.integers(0, 25), min_size=sum(sizes), max_size=sum(sizes)))
    view = view_of_groups(sizes, lengths=lengths)
    sampler = TokenBudgetSampler(
        tokens_per_rank=BUDGET, tokens_per_micro_batch=micro, n_samples_per_prompt=4, cost=cost
    )
    request = ranked(batch, ranks, final=final, unit=unit)
    plan = check_plan(sampler.name, sampler.plan(view, request), request)
    ends = [0, *itertools.accumulate(sizes)]
    if plan is None:
        assert not sizes or (not final and sum(lengths) < BUDGET * ranks)
        return
    taken = sorted(itertools.chain(*parts(plan)))
    assert taken == list(range(len(taken))), "the oldest come first"
    assert len(taken) in ends
    for start, end in itertools.pairwise(ends[: ends.index(len(taken)) + 1]):
        assert sum(start in part for part in parts(plan)) == 1
        assert all(set(range(start, end)) <= set(part) for part in parts(plan) if start in part)
    assert max(tokens_by_rank(plan, lengths)) <= BUDGET
    for part in parts(plan):
        assert (len(part) if unit == "sample" else sum(end - 1 in part for end in ends[1:])) <= batch
    if micro is not None:
        for rank in plan.ranks:
            packs = [pack.positions for pack in rank.steps[0]]
            assert sorted(np.concatenate(packs).tolist()) == list(range(rank.rows.size))
            assert all(sum(lengths[row] for row in rank.rows[pack]) <= micro for pack in packs)
            assert all(pack.lengths.tolist() == [lengths[row] for row in rank.rows[pack.positions]]
                       for pack in rank.steps[0])  # fmt: skip
    again = sampler.plan(view, request)
    assert parts(again) == parts(plan)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=30, max_size=60), ranks=st.integers(1, 4))
def test_budgets_are_used_well(lengths, ranks):
    """What is left of all budgets together is less than two samples a rank."""
    plan = TokenBudgetSampler(tokens_per_rank=60).plan(
        view_of_samples(len(lengths), lengths=lengths), ranked(60, ranks)
    )
    if plan is not None:
        used = tokens_by_rank(plan, lengths)
        following = lengths[sum(len(part) for part in parts(plan)) :]
        assert not following or sum(used) + following[0] > 60 * ranks - 20 * ranks


def dropped(plan):
    return [part.dropped.tolist() for part in plan.ranks]


def test_a_sample_beyond_the_limits_is_dropped_where_asked():
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET, tokens_per_micro_batch=50, overlong="drop")
    plan = sampler.plan(view_of_samples(4, lengths=[60, 50, 300, 40]), ranked(4, 2, final=True))
    assert_alike(check_plan("token_budget", plan, ranked(4, 2)), plan)
    assert sorted(parts(plan)) == [[1], [3]]
    assert sorted(row for rows in dropped(plan) for row in rows) == [0, 2]
    packs = [[pack.positions.size for step in part.steps for pack in step] for part in plan.ranks]
    assert packs == [[1], [1]]


def test_what_is_dropped_counts_for_the_batch_and_waits_with_it():
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET, overlong="drop")
    assert sampler.plan(view_of_samples(3, lengths=[200, 10, 10]), ranked(2, 2)) is None
    assert dropped(sampler.plan(view_of_samples(4, lengths=[200, 10, 10, 10]), ranked(2, 2))) == [[0], []]


def test_a_batch_may_drop_all_its_samples():
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET, tokens_per_micro_batch=50, overlong="drop")
    assert sampler.plan(view_of_samples(2, lengths=[200, 300]), ranked(2, 2)) is None
    plan = sampler.plan(view_of_samples(2, lengths=[200, 300]), ranked(2, 2, final=True))
    assert_alike(check_plan("token_budget", plan, ranked(2, 2)), plan)
    assert (parts(plan), dropped(plan)) == ([[], []], [[0], [1]])


def test_a_group_is_dropped_whole_where_a_rank_cannot_have_it_and_in_part_where_a_member_is_too_long():
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET, n_samples_per_prompt=2, overlong="drop")
    plan = sampler.plan(view_of_samples(6, lengths=[60, 60, 150, 30, 20, 20]), ranked(3, 2, final=True, unit="group"))
    assert sorted(parts(plan)) == [[3], [4, 5]]
    assert sorted(row for rows in dropped(plan) for row in rows) == [0, 1, 2]


def test_nothing_is_dropped_behind_the_first_group_that_does_not_fit():
    sampler = TokenBudgetSampler(tokens_per_rank=BUDGET, n_samples_per_prompt=2, overlong="drop")
    plan = sampler.plan(view_of_samples(6, lengths=[50, 50, 90, 200, 200, 200]), ranked(8, 1))
    assert (parts(plan), dropped(plan)) == ([[0, 1]], [[]])
