"""The view of a list: what it answers, and that every built-in sampler plans it to its end."""

from typing import get_args

import pytest
from fake_view import FakeView, Row

from tq_service.samplers import (
    GRPOGroupNSampler,
    ListView,
    PackedSampler,
    Plan,
    PlanRequest,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)
from tq_service.schema import Blocks

SAMPLERS = [
    SequentialSampler(),
    RankAwareSampler(),
    SeqlenBalancedSampler(),
    GRPOGroupNSampler(n_samples_per_prompt=2),
    TokenBudgetSampler(tokens_per_rank=20),
    PackedSampler(optimizer_steps=1, pack_max_length=20),
]
LENGTHS = [9, 8, 3, 2, 1, 1, 7, 5]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
@pytest.mark.parametrize("group_size", [None, 2])
def test_every_built_in_sampler_consumes_it_whole(sampler, group_size):
    view = ListView(LENGTHS, group_size=group_size)
    planned = []
    while view.ready().size:
        plan = sampler.plan(view, PlanRequest(batch_size=4, min_size=1, batch_unit="sample", rank_count=2))
        for part in plan.ranks:
            view.consume(part.rows)
            planned += part.rows.tolist()
    assert sorted(planned) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("unit", ["sample", "group"])
@pytest.mark.parametrize("limit", [None, 0, 1, 3, 4])
@pytest.mark.parametrize("options", [{}, *({"block_size": n, "blocks": b} for n in (2, 3) for b in get_args(Blocks))])
@pytest.mark.parametrize("group_size", [None, 3])
@pytest.mark.parametrize("unproduced", [(), (0,), (3, 4)])
def test_its_groups_are_those_of_a_partition(unit, limit, options, group_size, unproduced):
    view = ListView(LENGTHS, group_size=group_size, unproduced=unproduced)
    names = [str(i // 3) if group_size else None for i in range(8)]
    rows = [Row(i, group=names[i], ready=i not in unproduced) for i in range(8)]
    reference = FakeView(rows, closed={"0", "1", "2"})
    found = view.ready_groups(limit, unit=unit, **options)
    expected = reference.ready_groups(limit, unit=unit, **options)
    assert found.rows.tolist() == expected.rows.tolist()
    assert found.sizes.tolist() == expected.sizes.tolist()


def test_a_group_with_a_consumed_sample_is_not_ready():
    view = ListView([1, 1, 1, 1], group_size=2)
    view.consume(view.rows()[1:2])
    assert view.ready().tolist() == [0, 2, 3]
    assert view.ready_groups().rows.tolist() == [2, 3]


def test_what_is_left_is_produced_or_not():
    view = ListView([1, 1, 1, 1], unproduced=[1, 2])
    view.consume(view.rows()[:1])
    assert view.left().tolist() == [1, 2, 3]
    assert view.left(2).tolist() == [1, 2]
    assert view.ready().tolist() == [3]
    view.produce(view.rows()[2:])
    assert view.ready().tolist() == [2, 3]


def test_a_plan_that_is_recorded_is_consumed():
    view = ListView([1, 1, 1, 1])
    view.record(Plan.of([[0]]))
    assert (view.ready().tolist(), view.plan_count) == ([1, 2, 3], 1)
    view.record(Plan.of([[1, 1], [2]], consumed=[3]))
    assert (view.ready().tolist(), view.plan_count) == ([1, 2], 2)
    assert view.use_counts(view.rows()).tolist() == [0, 2, 1, 0], "deliveries that consume nothing"
    view.record(Plan.of([[1, 2]]), max_uses=3)
    assert view.ready().tolist() == [2]


def test_meta_and_names():
    view = ListView([5, 6, 7], group_size=2, meta={"version": [3, 4, 5]})
    values, present = view.values("version", view.rows()[1:])
    assert (values.tolist(), present.tolist()) == ([4, 5], [True, True])
    assert not view.values("other", view.rows())[1].any()
    assert view.group_names(view.rows()) == ["0", "0", "1"]
    assert view.field_lengths("tokens", view.rows()).tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"group_size": 0}, "expected at least 1"), ({"meta": {"a": [1]}}, "got 1 values for column .a.; expected 2")],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ListView([1, 2], **arguments)
