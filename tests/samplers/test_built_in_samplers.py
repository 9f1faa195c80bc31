"""The built-in samplers by example."""

import pytest
from fake_view import FakeView, Row, parts, view_of_groups, view_of_samples

from tq_service.errors import InvalidArgumentError
from tq_service.samplers import (
    ChosenSampler,
    GRPOGroupNSampler,
    LengthSource,
    PlanRequest,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)


def ranked(batch_size, ranks, *, min_size=None, unit="sample"):
    least = batch_size * ranks if min_size is None else min_size
    return PlanRequest(batch_size=batch_size, min_size=least, batch_unit=unit, rank_count=ranks)


def queue(batch_size, *, min_size=1, unit="sample"):
    return PlanRequest(batch_size=batch_size, min_size=min_size, batch_unit=unit, ranked=False)


def test_sequential_gives_blocks_of_neighbours():
    assert parts(SequentialSampler().plan(view_of_samples(10), ranked(2, 3))) == [[0, 1], [2, 3], [4, 5]]


def test_sequential_waits_for_a_full_batch_until_the_planner_lowers_the_least():
    view = view_of_samples(5)
    assert SequentialSampler().plan(view, ranked(2, 3)) is None
    assert parts(SequentialSampler().plan(view, ranked(2, 3, min_size=1))) == [[0, 1], [2, 3], [4]]


def test_sequential_short_batch_may_leave_ranks_empty():
    assert parts(SequentialSampler().plan(view_of_samples(1), ranked(4, 3, min_size=1))) == [[0], [], []]


def test_sequential_with_nothing_ready_makes_no_plan():
    assert SequentialSampler().plan(view_of_samples(0), queue(4)) is None


def test_sequential_skips_rows_that_are_not_ready():
    view = FakeView([Row(0), Row(1, ready=False), Row(2, state="held"), Row(3)])
    assert parts(SequentialSampler().plan(view, queue(8))) == [[0, 3]]


def test_sequential_counts_groups():
    plan = SequentialSampler().plan(view_of_groups([2, 3, 1, 2]), ranked(2, 2, unit="group"))
    assert parts(plan) == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_grpo_takes_whole_groups_only():
    rows = [Row(i, group=f"u{i // 4}", ready=i != 5) for i in range(12)]
    view = FakeView(rows, group_sizes={"u0": 4, "u1": 4, "u2": 4})
    assert parts(GRPOGroupNSampler(n_samples_per_prompt=4).plan(view, ranked(4, 2))) == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_grpo_makes_groups_of_consecutive_blocks():
    view = view_of_samples(7)
    assert parts(GRPOGroupNSampler(n_samples_per_prompt=2).plan(view, ranked(2, 3))) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("ready", "size", "expected"),
    [
        ([1, 2, 3, 4], 2, [1, 2, 3, 4]),
        ([0, 1, 3, 4, 6, 7], 3, None),
        ([0, 1, 3, 4, 5, 6, 7, 9, 10, 11], 3, [3, 4, 5, 9, 10, 11]),
        ([0, 2, 3, 4, 5, 6], 3, [2, 3, 4]),
        ([5], 1, [5]),
        ([], 2, None),
    ],
)
def test_grpo_takes_runs_of_ready_samples_wherever_they_begin(ready, size, expected):
    view = FakeView([Row(i, ready=i in ready) for i in range(12)])
    plan = GRPOGroupNSampler(n_samples_per_prompt=size, blocks="anywhere").plan(view, queue(4 * size))
    assert plan == expected if plan is None else parts(plan) == [expected]


def test_runs_are_balanced_whole():
    view = FakeView([Row(i, ready=i not in {0, 3}, length=length) for i, length in enumerate([1, 9, 9, 1, 8, 8, 1, 1])])
    sampler = SeqlenBalancedSampler(n_samples_per_prompt=2, blocks="anywhere")
    assert parts(sampler.plan(view, ranked(4, 2, min_size=1))) == [
        [
            1,
            2,
        ],
        [4, 5, 6, 7],
    ]


def test_names_go_before_runs():
    view = FakeView([Row(i, group="a" if i < 3 else "b") for i in range(6)], group_sizes={"a": 3, "b": 3})
    assert parts(GRPOGroupNSampler(n_samples_per_prompt=2, blocks="anywhere").plan(view, queue(4))) == [[0, 1, 2]]


@pytest.mark.parametrize("options", [{"blocks": "here"}, {"blocks": "anywhere", "incomplete_groups": "take"}])
def test_runs_refuse_what_they_cannot_do(options):
    with pytest.raises(ValueError, match="expected"):
        GRPOGroupNSampler(n_samples_per_prompt=2, **options)


def test_grpo_waits_for_the_member_that_is_missing():
    rows = [Row(i, group="u0", ready=i != 3) for i in range(4)]
    view = FakeView(rows, group_sizes={"u0": 4})
    sampler = GRPOGroupNSampler(n_samples_per_prompt=4)
    assert sampler.plan(view, ranked(4, 1)) is None
    view.all_rows[3].ready = True
    assert parts(sampler.plan(view, ranked(4, 1))) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("incomplete_groups", "expected"), [("skip", [[4, 5, 6, 7]]), ("take", [[0, 2, 3, 4, 5, 6, 7]])]
)
def test_grpo_with_a_failed_member(incomplete_groups, expected):
    rows = [Row(i, group=f"u{i // 4}", state="failed" if i == 1 else "live") for i in range(8)]
    view = FakeView(rows, group_sizes={"u0": 4, "u1": 4})
    sampler = GRPOGroupNSampler(n_samples_per_prompt=4, incomplete_groups=incomplete_groups)
    assert parts(sampler.plan(view, queue(8))) == expected


def test_grpo_refuses_a_batch_size_that_cuts_groups():
    sampler = GRPOGroupNSampler(n_samples_per_prompt=4)
    with pytest.raises(
        InvalidArgumentError, match=r"batch_size: got 6 .*multiple of n_samples_per_prompt \(4\)"
    ) as error:
        sampler.check(ranked(6, 2))
    assert error.value.field == "batch_size"
    sampler.check(ranked(6, 2, unit="group"))


def test_groups_of_many_sizes_are_assigned_evenly():
    plan = GRPOGroupNSampler(n_samples_per_prompt=4).plan(view_of_groups([4, 3, 4, 1, 2, 2]), ranked(8, 2))
    assert [len(part) for part in parts(plan)] == [8, 8]


def test_grpo_counts_groups_of_many_sizes():
    plan = GRPOGroupNSampler(n_samples_per_prompt=4).plan(view_of_groups([4, 1, 3, 2]), ranked(2, 2, unit="group"))
    assert sorted(len(part) for part in parts(plan)) == [5, 5]


def test_a_short_batch_is_planned_when_the_next_group_does_not_fit():
    """Six of eight samples and no waiting: the third group of four would never fit."""
    view = view_of_groups([3, 3, 4])
    plan = GRPOGroupNSampler(n_samples_per_prompt=4).plan(view, ranked(4, 2))
    assert parts(plan) == [[0, 1, 2], [3, 4, 5]]


def test_a_short_batch_waits_when_no_further_group_is_ready():
    assert GRPOGroupNSampler(n_samples_per_prompt=4).plan(view_of_groups([3, 3]), ranked(4, 2)) is None


def test_a_group_larger_than_the_batch_is_an_error_and_no_deadlock():
    with pytest.raises(InvalidArgumentError, match=r"at least 9, the size of the group with sample 0"):
        GRPOGroupNSampler(n_samples_per_prompt=4).plan(view_of_groups([9, 4]), ranked(4, 2))


def test_rank_aware_deals_round_robin():
    assert parts(RankAwareSampler().plan(view_of_samples(7), ranked(2, 3))) == [[0, 3], [1, 4], [2, 5]]


def test_rank_aware_spreads_a_short_batch():
    assert parts(RankAwareSampler().plan(view_of_samples(5), ranked(4, 3, min_size=1))) == [[0, 3], [1, 4], [2]]


def test_rank_aware_assigns_whole_groups():
    sampler = RankAwareSampler(n_samples_per_prompt=2)
    assert parts(sampler.plan(view_of_samples(8), ranked(4, 2))) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_rank_aware_evens_out_groups_of_many_sizes():
    plan = RankAwareSampler(n_samples_per_prompt=4).plan(view_of_groups([4, 2, 4, 2]), ranked(2, 2, unit="group"))
    assert parts(plan) == [[0, 1, 2, 3, 10, 11], [4, 5, 6, 7, 8, 9]]


def test_rank_aware_is_for_ranks():
    with pytest.raises(InvalidArgumentError, match="without dp_rank") as error:
        RankAwareSampler().check(queue(4))
    assert error.value.field == "sampler"


def test_seqlen_balanced_evens_out_tokens():
    view = view_of_samples(4, lengths=[100, 90, 10, 20])
    assert parts(SeqlenBalancedSampler().plan(view, ranked(2, 2))) == [[0, 2], [1, 3]]


def test_seqlen_balanced_keeps_groups_whole_and_counts_equal():
    view = view_of_groups([2, 2, 2, 2], lengths=[50, 50, 1, 1, 40, 40, 10, 10])
    plan = SeqlenBalancedSampler(n_samples_per_prompt=2).plan(view, ranked(4, 2))
    assert parts(plan) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_seqlen_balanced_group_counts_differ_by_at_most_one():
    view = view_of_samples(5, lengths=[100, 1, 1, 1, 1])
    plan = SeqlenBalancedSampler().plan(view, ranked(4, 2, min_size=1))
    assert sorted(len(part) for part in parts(plan)) == [2, 3]


def test_seqlen_balanced_with_fewer_groups_than_ranks():
    plan = SeqlenBalancedSampler().plan(view_of_samples(2, lengths=[7, 9]), ranked(4, 3, min_size=1))
    assert sorted(parts(plan)) == [[], [0], [1]]


def test_seqlen_balanced_serves_queue_workers():
    plan = SeqlenBalancedSampler().plan(view_of_samples(5, lengths=[5, 4, 3, 2, 1]), queue(3))
    assert parts(plan) == [[0, 1, 2]]


def test_seqlen_balanced_refuses_negative_lengths():
    with pytest.raises(InvalidArgumentError, match=r"length: got -3 for sample 1, expected a token"):
        SeqlenBalancedSampler().plan(view_of_samples(2, lengths=[5, -3]), ranked(1, 2))


def test_seqlen_balanced_by_attention_gives_the_longest_less_company():
    view = view_of_groups([1, 4, 1, 4], lengths=[40_000, *[10_000] * 4, 20_000, *[6_000] * 4])
    request = ranked(2, 2, unit="group")
    assert sorted(parts(SeqlenBalancedSampler().plan(view, request))) == [[0, 5], [1, 2, 3, 4, 6, 7, 8, 9]]
    by_attention = parts(SeqlenBalancedSampler(cost="attention").plan(view, request))
    assert sorted(by_attention) == [[0, 6, 7, 8, 9], [1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="cost: got 'flops', expected one of 'tokens', 'attention'"):
        SeqlenBalancedSampler(cost="flops")


def test_seqlen_balanced_names_its_length():
    sampler = SeqlenBalancedSampler(length_key="tokens", length_field="input_ids")
    assert sampler.length == LengthSource(key="tokens", field="input_ids")
    assert SeqlenBalancedSampler().length == LengthSource()
    assert SequentialSampler().length is None


def test_quick_plans_may_run_on_the_loop():
    assert SequentialSampler().runs_inline(ranked(4096, 64))
    assert SeqlenBalancedSampler().runs_inline(ranked(16, 8))
    assert not SeqlenBalancedSampler().runs_inline(ranked(64, 8))
    assert SeqlenBalancedSampler(n_samples_per_prompt=8).runs_inline(ranked(64, 8))
    assert not SeqlenBalancedSampler(n_samples_per_prompt=8).runs_inline(ranked(64, 8, unit="group"))


@pytest.mark.parametrize("kind", [GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler])
def test_options_that_mean_nothing_are_refused(kind):
    with pytest.raises(ValueError, match="n_samples_per_prompt: got 0, expected an integer of at least 1"):
        kind(n_samples_per_prompt=0)
    with pytest.raises(ValueError, match="incomplete_groups: got 'drop'"):
        kind(n_samples_per_prompt=2, incomplete_groups="drop")


def test_chosen_samples_come_in_the_order_in_which_they_are_named():
    view = FakeView([Row(index, ready=index != 3) for index in range(6)])
    chosen = ChosenSampler(rows=[4, 0, 5])
    assert parts(chosen.plan(view, queue(3))) == [[4, 0, 5]]
    assert ChosenSampler(rows=[4, 3]).plan(view, queue(2)) is None
    assert ChosenSampler(rows=[4, 9]).plan(view, queue(2)) is None


@pytest.mark.parametrize("rows", [[], [1, 1]])
def test_what_is_no_choice(rows):
    with pytest.raises(ValueError, match="rows: "):
        ChosenSampler(rows=rows)


def test_chosen_samples_are_for_queue_workers_that_ask_for_as_many():
    chosen = ChosenSampler(rows=[1, 2])
    for request, name in (
        (ranked(2, 1), "trainer ranks"),
        (queue(2, unit="group"), "groups"),
        (queue(3), "the number of rows"),
    ):
        with pytest.raises(InvalidArgumentError, match=name):
            chosen.check(request)
