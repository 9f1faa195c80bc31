"""What every built-in sampler keeps, whatever the groups, sizes and lengths."""

import itertools

from fake_view import parts, view_of_groups
from hypothesis import given
from hypothesis import strategies as st

from tq_service.errors import InvalidArgumentError
from tq_service.samplers import (
    GRPOGroupNSampler,
    PlanRequest,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)

N = 4
GROUP_SAMPLERS = [
    GRPOGroupNSampler(n_samples_per_prompt=N),
    RankAwareSampler(n_samples_per_prompt=N),
    SeqlenBalancedSampler(n_samples_per_prompt=N),
]
sizes_lists = st.lists(st.integers(1, N), max_size=24)
requests = st.builds(
    lambda groups, ranks, unit, full, least: PlanRequest(
        batch_size=groups if unit == "group" else groups * N,
        rank_count=ranks,
        batch_unit=unit,
        min_size=(groups if unit == "group" else groups * N) * ranks if full else min(least, ranks * groups),
    ),
    groups=st.integers(1, 4), ranks=st.integers(1, 4), unit=st.sampled_from(["sample", "group"]), full=st.booleans(),
    least=st.integers(1, 4),
)  # fmt: skip


def groups_of(view, part):
    """Return the group names of a rank in order, each once, and check that each is whole."""
    names = [name for name, _ in itertools.groupby(view.all_rows[row].group for row in part)]
    assert len(names) == len(set(names))
    whole = [row.index for name in names for row in view.all_rows.values() if row.group == name]
    assert whole == list(part)
    return names


@given(sizes=sizes_lists, request=requests, sampler=st.sampled_from(GROUP_SAMPLERS), data=st.data())
def test_groups_stay_whole_and_come_once(sizes, request, sampler, data):
    lengths = data.draw(st.lists(st.integers(0, 5000), min_size=sum(sizes), max_size=sum(sizes)))
    view = view_of_groups(sizes, lengths=lengths)
    plan = sampler.plan(view, request)
    if plan is None:
        return
    assert len(plan.ranks) == request.rank_count
    groups = [groups_of(view, part) for part in parts(plan)]
    taken = [name for names in groups for name in names]
    assert len(taken) == len(set(taken))
    assert set(taken) == {f"g{number}" for number in range(len(taken))}, "the oldest groups come first"
    units = len(taken) if request.batch_unit == "group" else sum(len(part) for part in parts(plan))
    assert 0 < units <= request.total_size
    next_size = 1 if request.batch_unit == "group" else [*sizes, N][len(taken)]
    all_taken = len(taken) == len(sizes)
    assert units >= request.min_size or (not all_taken and units + next_size > request.total_size)
    assert parts(sampler.plan(view, request)) == parts(plan), "the same view gives the same plan"
    if request.batch_unit == "group" or not isinstance(sampler, GRPOGroupNSampler):
        counts = [len(names) for names in groups]
        assert max(counts) - min(counts) <= 1


@given(sizes=sizes_lists, request=requests, sampler=st.sampled_from(GROUP_SAMPLERS))
def test_no_plan_means_that_waiting_helps(sizes, request, sampler):
    """None only where more groups would still fit: a sampler never waits for what cannot come."""
    if sampler.plan(view_of_groups(sizes), request) is None:
        assert (len(sizes) if request.batch_unit == "group" else sum(sizes)) < request.min_size


@given(count=st.integers(0, 40), ranks=st.integers(1, 5), batch=st.integers(1, 4), data=st.data())
def test_full_batches_give_every_rank_its_batch_size(count, ranks, batch, data):
    sampler = data.draw(st.sampled_from(GROUP_SAMPLERS))
    request = PlanRequest(batch_size=batch * N, min_size=batch * N * ranks, rank_count=ranks)
    plan = sampler.plan(view_of_groups([N] * count), request)
    assert (plan is not None) == (count >= batch * ranks)
    if plan is not None:
        assert [len(part) for part in parts(plan)] == [batch * N] * ranks


@given(sizes=sizes_lists, ranks=st.integers(1, 4), batch=st.integers(N, 20), grouped=st.booleans())
def test_single_samples_are_spread_evenly_and_in_order(sizes, ranks, batch, grouped):
    view = view_of_groups(sizes)
    request = PlanRequest(batch_size=batch, min_size=1, rank_count=ranks)
    for sampler in (SequentialSampler(), RankAwareSampler()):
        plan = sampler.plan(view, request)
        if plan is None:
            assert not sizes
            continue
        assigned = parts(plan)
        assert sorted(itertools.chain(*assigned)) == list(range(min(sum(sizes), batch * ranks)))
        assert max(map(len, assigned)) - min(map(len, assigned)) <= 1
        assert all(part == sorted(part) for part in assigned)


@given(sizes=st.lists(st.integers(1, N), min_size=1, max_size=24), ranks=st.integers(1, 4))
def test_groups_of_many_sizes_are_assigned_within_one_group(sizes, ranks):
    request = PlanRequest(batch_size=24 * N, min_size=1, rank_count=ranks)
    for sampler in (GRPOGroupNSampler(n_samples_per_prompt=N), RankAwareSampler(n_samples_per_prompt=N)):
        assigned = [len(part) for part in parts(sampler.plan(view_of_groups(sizes), request))]
        assert sum(assigned) == sum(sizes)
        if len(set(sizes)) > 1:
            assert max(assigned) - min(assigned) <= N


@given(size=st.integers(5, 12), ranks=st.integers(1, 2))
def test_a_group_that_never_fits_is_an_error(size, ranks):
    request = PlanRequest(batch_size=N, min_size=1, rank_count=ranks)
    for sampler in GROUP_SAMPLERS:
        try:
            plan = sampler.plan(view_of_groups([size]), request)
        except InvalidArgumentError:
            assert size > request.total_size
        else:
            assert size <= request.total_size
            assert sum(len(part) for part in parts(plan)) == size
