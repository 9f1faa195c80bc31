"""Samplers that plan below `min_size`: a rank that waits is served by the row that fills the budget."""

import asyncio

import pytest
from domain_support import seal, turns
from planner_bench import Bench, finished, rows

from tq_service.samplers import PackedSampler, TokenBudgetSampler
from tq_service.schema import EndCounts

BUDGET = TokenBudgetSampler(tokens_per_rank=100)


@pytest.fixture
async def bench():
    return Bench()


def put(bench, *lengths):
    bench.insert(len(lengths), meta=[{"total_lengths": length} for length in lengths])


async def test_the_row_that_fills_the_budget_wakes_the_ranks(bench):
    calls = [bench.ask((rank, 2, 0), sampler=BUDGET, batch_size=1000) for rank in range(2)]
    await turns()
    put(bench, 60)
    await turns()
    for length in (50, 40, 30):
        put(bench, length)
        await turns()
        assert not any(call.done() for call in calls)
    put(bench, 40)
    await asyncio.wait(calls)
    assert [rows(call) for call in calls] == [[0, 3], [1, 2]]


async def test_what_is_left_comes_at_the_end_and_is_left_out_by_drop_last(bench):
    put(bench, 60, 50, 40)
    kept = bench.ask((0, 1, 0), sampler=BUDGET, batch_size=1000)
    assert rows(await finished(kept)) == [0]
    last = bench.ask((0, 1, 1), sampler=BUDGET, batch_size=1000)
    await turns()
    assert not last.done()
    seal(bench.catalog)
    assert rows(await finished(last)) == [1, 2]
    end = await finished(bench.ask((0, 1, 2), sampler=BUDGET, batch_size=1000))
    assert isinstance(end.result(), EndCounts)


async def test_drop_last_leaves_out_what_does_not_fill_the_budget(bench):
    put(bench, 60, 50, 40)
    seal(bench.catalog)
    first = bench.ask((0, 1, 0), sampler=BUDGET, batch_size=1000, drop_last=True)
    assert rows(await finished(first)) == [0]
    end = await finished(bench.ask((0, 1, 1), sampler=BUDGET, batch_size=1000, drop_last=True))
    assert end.result() == EndCounts(consumed_count=1, left_over_count=2)


async def test_every_rank_gets_its_packs_also_of_padding_only(bench):
    sampler = PackedSampler(optimizer_steps=2, pack_max_length=100, overlong="drop")
    put(bench, 70, 300)
    seal(bench.catalog)
    calls = [bench.ask((rank, 3, 0), sampler=sampler, batch_size=4) for rank in range(3)]
    await asyncio.wait(calls)
    assert sorted(row for call in calls for row in rows(call)) == [0]
    assert [[len(step) for step in call.result().steps] for call in calls] == [[1, 1]] * 3
    padding = [pack.padding_tokens for call in calls for step in call.result().steps for pack in step]
    assert sorted(padding) == [30, 100, 100, 100, 100, 100]
    end = await finished(bench.ask((0, 3, 1), sampler=sampler, batch_size=4))
    assert end.result() == EndCounts(consumed_count=1, overlong_count=1)
