"""The last batches of a ranked task in numbers."""

import numpy as np
import pytest
from domain_support import clear, insert, reset
from planner_bench import Bench, finished

from tq_service.results import RecentBatch
from tq_service.samplers import PackedSampler, SequentialSampler
from tq_service.serving.planner import describe_batch
from tq_service.state.ledger import RecordedPlan
from tq_service.state.plan import Pack


@pytest.fixture
async def bench():
    return Bench()


def recorded(sizes, *, micro_batch_size=None, steps=()):
    rows = np.arange(sum(sizes))
    return RecordedPlan(rows=rows, sizes=tuple(sizes), steps=steps, micro_batch_size=micro_batch_size)


def described(sizes, lengths, **options):
    batch = describe_batch(3, recorded(sizes, **options), np.array(lengths, np.int64))
    return batch.tokens_per_rank, pytest.approx(batch.imbalance), pytest.approx(batch.padding_share)


def with_lengths(bench, *lengths):
    return bench.insert(len(lengths), meta=[{"total_lengths": length} for length in lengths])


def test_tokens_imbalance_and_padding_of_micro_batches():
    assert described([2, 2], [30, 10, 10, 10]) == ((40, 20), 1 / 3, 20 / 80)
    assert described([2, 2], [30, 10, 10, 10], micro_batch_size=1) == ((40, 20), 1 / 3, 0)
    assert described([3, 0, 1], [5, 5, 5, 6], micro_batch_size=2) == ((15, 0, 6), 15 / 7 - 1, 0)
    assert described([2], [0, 0]) == ((0, 0)[:1], 0, 0)


def test_padding_of_packs_is_what_the_sampler_planned():
    pack = Pack(positions=np.array([0]), lengths=np.array([6]), padding_tokens=2)
    empty = Pack(positions=np.array([], np.int64), lengths=np.array([], np.int64), padding_tokens=8)
    steps = (((pack,),), ((pack, empty),))
    assert described([1, 1], [6, 6], steps=steps) == ((6, 6), 0, 12 / 24)


def test_what_is_not_known_is_left_out():
    assert describe_batch(1, recorded([2, 2]), None) == RecentBatch(batch_index=1)
    assert describe_batch(1, recorded([0, 0]), np.zeros(0, np.int64)) == RecentBatch(batch_index=1)


def test_of_many_ranks_the_first_are_kept_and_all_counted():
    batch = describe_batch(0, recorded([1] * 200), np.append(np.ones(199, np.int64), 201))
    assert (len(batch.tokens_per_rank), set(batch.tokens_per_rank)) == (128, {1})
    assert batch.imbalance == pytest.approx(201 / 2 - 1)


async def test_planned_batches_are_kept_for_the_epoch(bench):
    seen = []
    bench.catalog.on_batch.append(lambda sampler, batch: seen.append((sampler, batch)))
    with_lengths(bench, 1, 3, 2, 2)
    for rank in (0, 1):
        for batch_index in (0, 1):
            await finished(bench.ask((rank, 2, batch_index), batch_size=1))
    batches = bench.task.recent_batches
    assert [(each.batch_index, each.tokens_per_rank, each.imbalance) for each in batches] == [
        (0, (1, 3), 0.5),
        (1, (2, 2), 0.0),
    ]
    assert seen == [("sequential", each) for each in batches]
    reset(bench.catalog, bench.task, keep_consumed=False)
    assert not bench.task.recent_batches
    await finished(bench.ask((0, 1, 0), batch_size=4))
    assert [each.tokens_per_rank for each in bench.task.recent_batches] == [(8,)]


async def test_only_the_last_are_kept(bench):
    with_lengths(bench, *range(1, 21))
    await finished(bench.ask((0, 1, 19), batch_size=1))
    batches = bench.task.recent_batches
    assert [each.batch_index for each in batches] == list(range(20))[-16:]
    assert batches[-1].tokens_per_rank == (20,)


@pytest.mark.parametrize("values", [(5, None), ("long", "short"), (5, -1)])
async def test_lengths_that_are_missing_or_none_are_not_known(bench, values):
    entries = [{} if value is None else {"total_lengths": value} for value in values]
    insert(bench.catalog, 2, ("x",), meta=entries)
    await finished(bench.ask((0, 1, 0), sampler=SequentialSampler()))
    assert list(bench.task.recent_batches) == [RecentBatch(batch_index=0)]


async def test_a_sampler_has_its_own_lengths(bench):
    insert(bench.catalog, 2, ("x",), meta=[{"tokens": 3}, {"tokens": 5}])
    sampler = PackedSampler(optimizer_steps=1, pack_max_length=8, length_key="tokens")
    await finished(bench.ask((0, 1, 0), batch_size=2, sampler=sampler))
    (batch,) = bench.task.recent_batches
    assert (batch.tokens_per_rank, batch.padding_share) == ((8,), 0.0)


async def test_a_partition_that_was_cleared_has_none(bench):
    with_lengths(bench, 1, 1)
    await finished(bench.ask((0, 1, 0), batch_size=2))
    clear(bench.catalog, np.array([0, 1]))
    assert len(bench.task.recent_batches) == 1
    bench.catalog.remove("train", b"")
    assert bench.catalog.known_planner(bench.partition, "t") is None
