"""`replay`: draws follow priority^exponent / Σ, a share of each batch is fresh, and `max_uses` is exact."""

from collections import Counter

import numpy as np
import pytest
from fake_view import parts
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import InvalidArgumentError
from tq_service.samplers import ListView, PlanRequest, ReplaySampler
from tq_service.samplers.service import check_plan

PRIORITIES = [0.0, 0.25, 0.5, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 40.0]


def ranked(batch_size, ranks=1, *, final=False, unit="sample"):
    return PlanRequest(
        batch_size=batch_size, min_size=1 if final else batch_size * ranks, rank_count=ranks, batch_unit=unit
    )


def batches(view, sampler, request, count):
    """Plan and record batches; return the rows of each."""
    planned = []
    for _ in range(count):
        plan = check_plan("replay", sampler.plan(view, request), request)
        if plan is None:
            break
        view.record(plan)
        planned.append(parts(plan))
    return planned


def chi_square(counts, weights):
    expected = np.asarray(weights) / np.sum(weights) * np.sum(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def most_likely(degrees):
    """Return the value that chi-square exceeds with a probability of 0.001 (Wilson and Hilferty, 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.0902 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_draws_are_in_proportion_to_priorities(exponent, seed):
    view = ListView([1] * len(PRIORITIES), meta={"priority": PRIORITIES})
    sampler = ReplaySampler(fresh=0, priority_key="priority", exponent=exponent, seed=seed)
    drawn = np.array(batches(view, sampler, ranked(500, 4), 10)).ravel()
    counts = np.bincount(drawn, minlength=len(PRIORITIES))
    assert drawn.size == 20_000
    assert counts[0] == 0, "priority 0 is never drawn, not even with exponent 0"
    weights = np.array(PRIORITIES[1:]) ** exponent
    assert chi_square(counts[1:], weights) < most_likely(weights.size - 1)
    assert chi_square(counts[1:], weights[::-1]) > most_likely(weights.size - 1) or exponent == 0


@pytest.mark.parametrize("meta", [{}, {"priority": [0.0] * 40}])
def test_without_priorities_draws_are_uniform(meta):
    view = ListView([1] * 40, meta=meta)
    sampler = ReplaySampler(fresh=0, priority_key="priority" if meta else None, seed=3)
    counts = np.bincount(np.array(batches(view, sampler, ranked(400), 50)).ravel(), minlength=40)
    assert chi_square(counts, np.ones(40)) < most_likely(39)


def test_half_of_a_batch_is_fresh_and_the_rest_was_delivered_before():
    view = ListView([1] * 14, unproduced=range(4, 14))
    sampler, planned = ReplaySampler(fresh=0.5), []
    for first in range(4, 14, 2):
        planned += batches(view, sampler, ranked(2, 2), 1)
        assert sampler.plan(view, ranked(2, 2)) is None, "it waits for fresh ones"
        view.produce(np.arange(first, first + 2))
    assert sorted(planned[0][0] + planned[0][1]) == [0, 1, 2, 3], "nothing can be drawn yet"
    for number, ranks in enumerate(planned[1:]):
        assert [part[0] for part in ranks] == [4 + 2 * number, 5 + 2 * number], "each rank has its fresh share"
        assert all(part[1] < 4 + 2 * number for part in ranks)


def test_the_end_comes_with_the_last_fresh_sample():
    view = ListView([1] * 7)
    sampler = ReplaySampler(fresh=0.5)
    assert [len(part) for (part,) in batches(view, sampler, ranked(4), 9)] == [4, 4]
    assert sampler.plan(view, ranked(4)) is None
    last = sampler.plan(view, ranked(4, final=True))
    assert len(parts(last)[0]) == 2, "one fresh, one drawn"
    view.record(last)
    assert sampler.plan(view, ranked(4, final=True)) is None


def test_changed_priorities_and_another_seed_change_draws():
    def drawn(seed, priorities, earlier=0):
        view = ListView([1] * 64, meta={"priority": priorities})
        view.plan_count = earlier
        return parts(ReplaySampler(fresh=0, priority_key="priority", seed=seed).plan(view, ranked(32)))[0]

    alike = [1.0] * 64
    assert drawn(0, alike) == drawn(0, alike)
    assert drawn(0, alike) != drawn(1, alike)
    assert drawn(0, alike) != drawn(0, alike, earlier=1)
    assert set(drawn(0, [0.0] * 63 + [5.0])) == {63}


def test_groups_are_drawn_whole_by_their_mean_priority():
    priorities = np.repeat([1.0, 4.0, 0.0, 3.0], 3) * np.tile([0.0, 1.0, 2.0], 4)
    view = ListView([1] * 12, group_size=3, meta={"priority": priorities})
    sampler = ReplaySampler(fresh=0, priority_key="priority")
    drawn = np.array(batches(view, sampler, ranked(250, 2, unit="group"), 8)).reshape(-1, 3)
    assert (drawn == drawn[:, :1] + np.arange(3)).all()
    counts = np.bincount(drawn[:, 0] // 3, minlength=4)
    assert counts[2] == 0
    assert chi_square(counts[[0, 1, 3]], [1.0, 4.0, 3.0]) < most_likely(2)


@examples(60)
@given(
    count=st.integers(1, 30),
    max_uses=st.integers(1, 4),
    fresh=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    batch=st.integers(1, 8),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_no_sample_is_used_more_often_than_it_may(*, count, max_uses, fresh, batch, ranks, seed):
    view = ListView([1] * count, meta={"priority": list(range(count))})
    sampler = ReplaySampler(fresh=fresh, priority_key="priority", max_uses=max_uses, seed=seed)
    planned = batches(view, sampler, ranked(batch, ranks), 500)
    for ranks_of_batch in planned:
        assert [len(part) for part in ranks_of_batch] == [batch] * ranks
    planned += batches(view, sampler, ranked(batch, ranks, final=True), 500)
    uses = Counter(row for ranks_of_batch in planned for part in ranks_of_batch for row in part)
    assert max(uses.values()) <= max_uses
    assert view.ready().tolist() == [row for row in range(count) if uses[row] < max_uses]
    if fresh:
        assert set(uses) == set(range(count)), "all fresh ones come"
    else:
        assert view.ready().size == 0, "all is used up"


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_what_is_no_priority_is_an_error_that_names_the_sample(bad):
    view = ListView([1] * 3, meta={"priority": [1.0, bad, 1.0]})
    with pytest.raises(
        InvalidArgumentError, match=r"priority: got .* for sample 1; expected a finite number of at least 0"
    ) as error:
        ReplaySampler(fresh=0, priority_key="priority").plan(view, ranked(2))
    assert (error.value.field, error.value.metadata["column"]) == ("sampler_config", "priority")
    with pytest.raises(InvalidArgumentError, match="got 'high' for sample 0"):
        ReplaySampler(fresh=0, priority_key="p").plan(ListView([1], meta={"p": ["high"]}), ranked(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fresh": 1.5}, "fresh: got 1.5"),
        ({"exponent": -1.0}, "exponent: got -1.0"),
        ({"seed": -1}, "seed: got -1"),
        ({"max_uses": 0}, "max_uses: got 0"),
        ({"priority_key": ""}, "priority_key: got an empty name"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ReplaySampler(**options)
