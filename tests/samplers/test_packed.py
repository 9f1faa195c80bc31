"""`packed`: the plan of `plan_packs` as rows, steps and packs of all ranks."""

import itertools

import numpy as np
import pytest
from fake_view import assert_alike, parts, view_of_groups, view_of_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_service.errors import InvalidArgumentError
from tq_service.samplers import LengthSource, PackedSampler, PlanRequest
from tq_service.samplers.service import check_plan

CAP = 100


def ranked(batch_size, ranks, *, least=1, unit="sample", micro_batch_size=None):
    return PlanRequest(
        batch_size=batch_size, min_size=least, rank_count=ranks, batch_unit=unit, micro_batch_size=micro_batch_size
    )


def packs_in_rows(plan):
    return [[[rank.rows[pack.positions].tolist() for pack in step] for step in rank.steps] for rank in plan.ranks]


def test_each_rank_gets_its_steps_and_packs():
    view = view_of_samples(6, lengths=[90, 80, 30, 25, 15, 10])
    plan = PackedSampler(optimizer_steps=1, pack_max_length=CAP).plan(view, ranked(3, 2, least=6))
    assert parts(plan) == [[1, 2, 4], [0, 3, 5]]
    assert packs_in_rows(plan) == [[[[1, 4], [2]]], [[[0, 5], [3]]]]
    first = plan.ranks[0].steps[0][0]
    assert (first.positions.tolist(), first.lengths.tolist(), first.padding_tokens) == ([0, 2], [80, 15], 5)


def test_ranks_without_samples_get_empty_packs():
    plan = PackedSampler(optimizer_steps=2, pack_max_length=CAP).plan(view_of_samples(1, lengths=[60]), ranked(4, 2))
    assert sorted(packs_in_rows(plan)) == [[[[]], [[]]], [[[0]], [[]]]]
    paddings = [pack.padding_tokens for rank in plan.ranks for step in rank.steps for pack in step]
    assert sorted(paddings) == [40, 100, 100, 100]


def test_it_waits_for_a_full_batch():
    sampler = PackedSampler(optimizer_steps=1, pack_max_length=CAP)
    assert sampler.plan(view_of_samples(3, lengths=[1, 1, 1]), ranked(2, 2, least=4)) is None


def test_a_sample_longer_than_a_pack_is_refused_by_name():
    sampler = PackedSampler(optimizer_steps=1, pack_max_length=CAP)
    with pytest.raises(InvalidArgumentError, match=r"length: got 101 for sample 1, .*pack_max_length \(100\)") as e:
        sampler.plan(view_of_samples(3, lengths=[5, 101, 7]), ranked(2, 2))
    assert (e.value.field, e.value.metadata["column"]) == ("sampler_config", "total_lengths")


def test_a_sample_longer_than_a_pack_is_cut_where_asked():
    sampler = PackedSampler(optimizer_steps=1, pack_max_length=CAP, overlong="truncate")
    plan = sampler.plan(view_of_samples(2, lengths=[250, 7]), ranked(1, 2))
    lengths = [pack.lengths.tolist() for rank in plan.ranks for pack in rank.steps[0]]
    assert sorted(lengths) == [[7], [100]]


def test_a_sample_longer_than_a_pack_is_dropped_where_asked():
    sampler = PackedSampler(optimizer_steps=1, pack_max_length=CAP, overlong="drop", n_samples_per_prompt=2)
    plan = sampler.plan(view_of_samples(4, lengths=[250, 7, 6, 5]), ranked(2, 2))
    assert sorted(parts(plan)) == [[1], [2, 3]]
    assert [part.dropped.tolist() for part in plan.ranks if 1 in part.rows] == [[0]], "it goes with its group"
    assert sorted(packs_in_rows(plan)) == [[[[1]]], [[[2, 3]]]]
    all_dropped = sampler.plan(view_of_samples(2, lengths=[250, 250]), ranked(2, 2))
    assert_alike(check_plan("packed", all_dropped, ranked(2, 2)), all_dropped)
    assert parts(all_dropped) == [[], []]
    assert [part.dropped.tolist() for part in all_dropped.ranks] == [[0, 1], []]
    assert packs_in_rows(all_dropped) == [[[[]]], [[[]]]]


def test_samples_count_rounded_up_and_keep_their_lengths():
    sampler = PackedSampler(optimizer_steps=1, pack_max_length=16, align=8)
    plan = sampler.plan(view_of_samples(4, lengths=[9, 9, 1, 8]), ranked(4, 1))
    assert sorted(packs_in_rows(plan)[0][0]) == [[0], [1], [2, 3]], "9 and 1 do not share a pack of 16"
    packs = plan.ranks[0].steps[0]
    assert [(sorted(pack.lengths.tolist()), pack.padding_tokens) for pack in packs] == [([9], 7), ([9], 7), ([1, 8], 7)]
    cut = PackedSampler(optimizer_steps=1, pack_max_length=16, align=8, overlong="truncate")
    assert cut.plan(view_of_samples(1, lengths=[99]), ranked(1, 1)).ranks[0].steps[0][0].lengths.tolist() == [16]


def test_packs_of_a_step_are_a_multiple():
    sampler = PackedSampler(optimizer_steps=2, pack_max_length=CAP, packs_multiple_of=4)
    plan = sampler.plan(view_of_samples(4, lengths=[90, 80, 70, 60]), ranked(2, 2))
    assert [[len(step) for step in rank.steps] for rank in plan.ranks] == [[4, 4], [4, 4]]
    assert_alike(check_plan("packed", plan, ranked(2, 2)), plan)
    with pytest.raises(InvalidArgumentError, match=r"packs_multiple_of: got 65537 for 1 rank.*at most 65536"):
        PackedSampler(optimizer_steps=1, pack_max_length=CAP, packs_multiple_of=65_537).check(ranked(2, 1))


def test_requests_that_do_not_fit_are_refused():
    sampler = PackedSampler(optimizer_steps=1, pack_max_length=CAP, n_samples_per_prompt=4)
    with pytest.raises(InvalidArgumentError, match=r"micro_batch_size: got 2 for sampler 'packed'"):
        sampler.check(ranked(8, 2, micro_batch_size=2))
    with pytest.raises(InvalidArgumentError, match=r"batch_size: got 6 .*multiple of n_samples_per_prompt"):
        sampler.check(ranked(6, 2))


@pytest.mark.parametrize(("steps", "ranks"), [(1 << 30, 1), (1 << 15, 3)])
def test_more_steps_than_a_plan_has_are_refused_before_they_take_memory(steps, ranks):
    sampler = PackedSampler(optimizer_steps=steps, pack_max_length=CAP)
    with pytest.raises(InvalidArgumentError, match=rf"optimizer_steps: got {steps} for {ranks} rank.*at most 65536"):
        sampler.plan(view_of_samples(2), ranked(2, ranks))
    PackedSampler(optimizer_steps=1 << 15, pack_max_length=CAP).check(ranked(2, 2))


def test_it_names_its_length():
    sampler = PackedSampler(optimizer_steps=1, pack_max_length=CAP, length_key="tokens", length_field="input_ids")
    assert sampler.length == LengthSource(key="tokens", field="input_ids")


def test_only_plans_known_to_be_small_run_on_the_loop():
    sampler = PackedSampler(optimizer_steps=2, pack_max_length=CAP)
    assert sampler.runs_inline(ranked(8, 4))
    assert not sampler.runs_inline(ranked(64, 4))
    assert not sampler.runs_inline(ranked(4, 8))
    assert not sampler.runs_inline(ranked(1, 2, unit="group"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_steps": 0}, "optimizer_steps: got 0"),
        ({"pack_max_length": 0}, "pack_max_length: got 0"),
        ({"overlong": "cut"}, "overlong: got 'cut'"),
        ({"cost": "flops"}, "cost: got 'flops'"),
        ({"length_key": ""}, "length_key: got an empty name"),
        ({"n_samples_per_prompt": 0}, "n_samples_per_prompt: got 0"),
        ({"align": 0}, "align: got 0"),
        ({"align": 2}, "pack_max_length: got 1; expected a multiple of align, which is 2"),
        ({"packs_multiple_of": 0}, "packs_multiple_of: got 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PackedSampler(**{"optimizer_steps": 1, "pack_max_length": 1, **options})


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=16),
    ranks=st.integers(1, 4),
    steps=st.integers(1, 3),
    overlong=st.sampled_from(["truncate", "drop"]),
    cost=st.sampled_from(["tokens", "attention"]),
    even=st.booleans(),
    data=st.data(),
)
def test_ranks_agree_groups_stay_whole_and_packs_hold(*, sizes, ranks, steps, overlong, cost, even, data):
    lengths = data.draw(st.lists(st.integers(0, 130), min_size=sum(sizes), max_size=sum(sizes)))
    view, request = view_of_groups(sizes, lengths=lengths), ranked(16, ranks, unit="group")
    sampler = PackedSampler(optimizer_steps=steps, pack_max_length=CAP, overlong=overlong, cost=cost, even_steps=even)
    plan = check_plan(sampler.name, sampler.plan(view, request), request)
    left_out = [rank.dropped.tolist() for rank in plan.ranks]
    too_long = [row for row in range(sum(sizes)) if lengths[row] > CAP]
    assert sorted(itertools.chain(*left_out)) == (too_long if overlong == "drop" else [])
    assert sorted(itertools.chain(*parts(plan), *left_out)) == list(range(sum(sizes)))
    for rank in plan.ranks:
        names = [name for name, _ in itertools.groupby(view.all_rows[row].group for row in rank.rows.tolist())]
        of_rank = {*rank.rows.tolist(), *rank.dropped.tolist()}
        assert len(names) == len(set(names)), "the members of a group follow each other"
        for name in names:
            assert {row.index for row in view.all_rows.values() if row.group == name} <= of_rank
        assert len(rank.steps) == steps
        packed = [pack for step in rank.steps for pack in step]
        positions = np.sort(np.concatenate([pack.positions for pack in packed]))
        assert positions.tolist() == list(range(rank.rows.size))
        for pack in packed:
            assert pack.lengths.tolist() == [min(lengths[row], CAP) for row in rank.rows[pack.positions]]
            assert int(pack.lengths.sum()) + pack.padding_tokens == CAP
    assert packs_in_rows(sampler.plan(view, request)) == packs_in_rows(plan)
