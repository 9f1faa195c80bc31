"""The view of a list: what it answers, and that every built-in sampler plans it to its end."""

import pytest
from fake_view import FakeView, Row, view_of_samples

from tq_service.samplers import (
    GRPOGroupNSampler,
    ListView,
    PackedSampler,
    PlanRequest,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)

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
@pytest.mark.parametrize("block_size", [None, 2, 3])
@pytest.mark.parametrize("group_size", [None, 3])
def test_its_groups_are_those_of_a_partition(unit, limit, block_size, group_size):
    view = ListView(LENGTHS, group_size=group_size)
    reference = view_of_samples(8)
    if group_size:
        rows = [Row(i, group=str(i // 3)) for i in range(8)]
        reference = FakeView(rows, closed={"0", "1", "2"})
    found = view.ready_groups(limit, unit=unit, block_size=block_size)
    expected = reference.ready_groups(limit, unit=unit, block_size=block_size)
    assert found.rows.tolist() == expected.rows.tolist()
    assert found.sizes.tolist() == expected.sizes.tolist()


def test_a_group_with_a_consumed_sample_is_not_ready():
    view = ListView([1, 1, 1, 1], group_size=2)
    view.consume(view.rows()[1:2])
    assert view.ready().tolist() == [0, 2, 3]
    assert view.ready_groups().rows.tolist() == [2, 3]


def test_meta_and_names():
    view = ListView([5, 6, 7], group_size=2, meta={"version": [3, 4, 5]})
    values, present = view.values("version", view.rows()[1:])
    assert (values.tolist(), present.tolist()) == ([4, 5], [True, True])
    assert not view.values("other", view.rows())[1].any()
    assert view.group_names(view.rows()) == ["0", "0", "1"]
    assert view.field_lengths("tokens", view.rows()).tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"group_size": 0}, "expected at least 1"), ({"meta": {"a": [1]}}, "expected one value for each of 2 samples")],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ListView([1, 2], **arguments)
