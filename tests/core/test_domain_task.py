"""A task: batch specs, replays, epochs, and records that go with their rows."""

import tracemalloc

import numpy as np
import pytest
from domain_support import (
    asks,
    claim_rows,
    clear,
    insert,
    new_id,
    new_write,
    partition,
    plan_of,
    release,
    reset,
    task_of,
    turns,
    update,
)
from planner_bench import Bench

from tq_service.errors import (
    ClaimReleasedError,
    RankDisagreementError,
    SamplesClearedError,
    StaleEpochError,
)
from tq_service.schema import EndCounts
from tq_service.state.ledger import EndedClaims, RecordedPlan
from tq_service.state.plan import Condition, LeaseTerms, Order, RankPlan
from tq_service.state.table import Column


@pytest.fixture
def train():
    train = partition()
    insert(train, 12)
    return train


def record(train, *parts, index=None, **bound):
    task = task_of(train, "t")
    request = asks((0, len(parts), task.next_batch_index), **bound)
    rows = np.array([row for part in parts for row in part], np.int64)
    task.deliver(plan_of(*parts), train.table.find(rows), batch_spec=request.batch_spec)
    return task


def replay(task, dp_rank, dp_size, index, **bound):
    answer = task.recorded(asks((dp_rank, dp_size, index), **bound))
    return answer.rows.tolist() if isinstance(answer, RankPlan) else answer


def test_a_recorded_batch_is_the_answer_for_every_rank_and_again(train):
    task = record(train, [0, 1], [2, 3])
    record(train, [4], [])
    for _ in range(2):
        assert [replay(task, rank, 2, 0) for rank in (0, 1)] == [[0, 1], [2, 3]]
        assert [replay(task, rank, 2, 1) for rank in (0, 1)] == [[4], []]
    assert replay(task, 0, 2, 2) is None
    assert (task.consumed_count, task.backlog, task.dp_size, task.next_batch_index) == (5, 7, 2, 2)


def test_the_end_is_recorded_for_all_that_follows(train):
    task = record(train, [0], [1])
    task.reach_end(2, EndCounts(consumed_count=2, failed_count=10))
    assert replay(task, 1, 2, 0) == [1]
    assert replay(task, 1, 2, 1) == replay(task, 0, 2, 9) == EndCounts(consumed_count=2, failed_count=10)


@pytest.mark.parametrize(
    ("other", "got", "expected"),
    [
        ({"batch_size": 3}, "3", "2"),
        ({"batch_unit": "group"}, "group", "sample"),
        ({"micro_batch_size": 1}, "1", "unset"),
        ({"data_fields": ("x", "y")}, "x, y", "x"),
        ({"drop_last": True}, "true", "false"),
        ({"finite": True}, "true", "false"),
        ({"order_by": (Order("v"), Order("w", descending=True))}, "v, w descending", "none"),
        ({"where": (Condition("v", "in", (1, 2)),)}, "v in 1, 2", "none"),
    ],
)
def test_what_the_first_plan_binds(train, other, got, expected):
    task = record(train, [0], [1])
    with pytest.raises(RankDisagreementError) as caught:
        replay(task, 1, 2, 0, **other)
    assert caught.value.metadata == {"field": next(iter(other)), "got": got, "expected": expected}
    assert replay(task, 1, 2, 1, **other) is None  # a later batch may be asked for otherwise


def test_dp_size_is_bound_for_the_epoch(train):
    task = record(train, [0], [1])
    for index in (0, 1, 7):
        with pytest.raises(RankDisagreementError, match="dp_size"):
            replay(task, 0, 4, index)


def test_a_batch_with_cleared_samples_is_not_given_as_if_whole(train):
    task = record(train, [0, 1], [2, 3])
    clear(train, np.array([1]))
    with pytest.raises(SamplesClearedError) as caught:
        replay(task, 0, 2, 0)
    assert caught.value.metadata["next_batch_index"] == "1"
    assert replay(task, 1, 2, 0) == [2, 3]
    clear(train, np.array([0, 2, 3]))
    with pytest.raises(SamplesClearedError):
        replay(task, 1, 2, 0)


def test_a_queue_claim_with_cleared_samples_is_not_given_as_if_whole(train):
    task, request = task_of(train, "t"), asks()
    task.deliver(plan_of([0, 1]), np.array([0, 1]), request_id=request.request_id)
    assert task.recorded(request).rows.tolist() == [0, 1]
    clear(train, np.array([1]))
    with pytest.raises(SamplesClearedError):
        task.recorded(request)


def test_a_failed_sample_stays_in_its_batch(train):
    task = record(train, [0, 1], [2, 3])
    update(train, [1], state="failed")
    assert replay(task, 0, 2, 0) == [0, 1]


def test_records_go_with_the_last_of_their_rows(train):
    task = record(train, [0, 1], [2, 3])
    record(train, [4], [5])
    request_id = new_id()
    task.deliver(plan_of([6, 7]), np.array([6, 7]), request_id=request_id)
    assert len(task._by_serial) == 3
    clear(train, np.array([0, 1, 2, 4, 6]))
    assert len(task._by_serial) == 3
    clear(train, np.array([3, 5]))
    assert len(task._by_serial) == 1
    clear(train, np.array([7]))
    assert not task._by_serial
    assert not (task.batches or task.claims)
    assert release(train, task, request_id) == 0
    assert task.consumed_count == 8


@pytest.mark.parametrize("keep_consumed", [False, True])
def test_a_reset_starts_an_epoch(train, keep_consumed):
    task = record(train, [0, 1], [2, 3])
    task.deliver(plan_of([4]), np.array([4]), request_id=new_id())
    task.reach_end(2, EndCounts(consumed_count=5, cleared_count=7))
    assert reset(train, task, keep_consumed=keep_consumed) == 1
    task.check_epoch(1)
    task.check_epoch(None)
    with pytest.raises(StaleEpochError) as caught:
        task.check_epoch(0)
    assert caught.value.metadata == {"task_name": "t", "got": "0", "expected": "1"}
    assert replay(task, 0, 4, 0) is None
    assert not task._by_serial
    assert (task.consumed_count, task.backlog) == ((5, 7) if keep_consumed else (0, 12))
    clear(train, np.array([0, 5]))
    assert task.backlog == (6 if keep_consumed else 10)


def test_a_released_claim_is_claimable_again_and_refused(train):
    task, request = task_of(train, "t"), asks()
    task.deliver(plan_of([3, 4]), np.array([3, 4]), request_id=request.request_id)
    assert release(train, task, request.request_id) == 2
    assert (task.consumed_count, task.backlog) == (0, 12)
    with pytest.raises(ClaimReleasedError):
        task.recorded(request)
    assert release(train, task, new_id()) == 0


async def test_a_claim_is_retracted_only_when_no_retry_has_it():
    bench, request = Bench(), asks(batch_size=1)
    bench.insert(12)
    for _ in range(2):  # a retry is given the same
        assert (await bench.planner.claim(request, 0)).rows.tolist() == [0]
    bench.planner.retract(request.request_id)
    assert bench.task.consumed_count == 1
    bench.planner.retract(request.request_id)
    bench.planner.retract(request.request_id)
    assert bench.task.consumed_count == 0
    assert bench.task.recorded(request) is None  # not refused: the client may ask again
    assert (await bench.planner.claim(request, 0)).rows.tolist() == [0]


async def test_a_claim_with_a_name_stays_whatever_becomes_of_its_call():
    bench = Bench()
    waiting = bench.ask(batch_size=1, name="a")
    await turns()
    bench.insert(12)
    await bench.until_consumed(1)
    waiting.cancel()
    await turns()
    assert bench.task.consumed_count == 1
    for _ in range(2):
        assert (await bench.ask(batch_size=1, name="a", wait=0)).rows.tolist() == [0]
    bench.planner.retract(bench.task.names["a"])
    assert bench.task.consumed_count == 1


async def test_a_claim_of_a_partition_that_was_cleared_is_not_retracted_from_the_next_of_its_name():
    bench, request = Bench(), asks(batch_size=1)
    bench.insert(2)
    await bench.planner.claim(request, 0)
    bench.catalog.remove("train", b"")
    bench.catalog.write("train", b"", new_write(2, ("x",)))
    again = bench.catalog.get("train")
    await bench.catalog.claim("train", b"", request, 0)
    bench.planner.retract(request.request_id)
    bench.catalog.retract(bench.partition, "t", request.request_id)
    assert again.tasks["t"].consumed_count == 1


@pytest.mark.parametrize("lease", [None, LeaseTerms(seconds=10.0)])
def test_a_claim_writes_what_became_of_its_rows_once(train, monkeypatch, lease):
    written, write = [], Column.write

    def noted(column, where, values):
        written.append(column)
        write(column, where, values)

    monkeypatch.setattr(Column, "write", noted)
    task = task_of(train, "t")
    first, second = (claim_rows(train, task, rows, lease=lease) for rows in ([0, 1], [2, 3]))
    assert [column is task.claim for column in written].count(True) == 2
    assert second.serial == first.serial + 1


def test_ids_of_released_claims_are_forgotten_in_time():
    released, old, young = EndedClaims(), new_id(), new_id()
    released.add(old, 0.0, is_expired=False)
    released.add(young, 800.0, is_expired=False)
    assert old in released
    released.add(new_id(), 1000.0, is_expired=False)
    assert old not in released
    assert young in released


@pytest.mark.parametrize("micro_batch_size", [None, 1, 7])
def test_what_was_answered_about_large_claims_of_all_sizes_is_not_kept(micro_batch_size):
    tracemalloc.start()
    try:
        for size in range(20_000, 20_020):
            plan = RecordedPlan(rows=np.arange(size), sizes=(size,), micro_batch_size=micro_batch_size)
            (packs,) = plan.part().steps
            assert sum(pack.positions.size for pack in packs) == size
        del plan, packs
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1 << 20


def test_a_rank_request_counts_units_over_all_ranks():
    request = asks((0, 3, 0), batch_size=4, batch_unit="group").plan_request
    assert (request.total_size, request.min_size, request.rank_count, request.ranked) == (12, 12, 3, True)
    request = asks(batch_size=4, least=1).plan_request
    assert (request.total_size, request.min_size, request.rank_count, request.ranked) == (4, 1, 1, False)


def test_a_rank_without_rows_gets_its_empty_batch_when_the_rows_of_the_others_are_cleared(train):
    task = record(train, [0, 1], [])
    clear(train, np.array([0, 1]))
    assert replay(task, 1, 2, 0) == []
    with pytest.raises(SamplesClearedError):
        replay(task, 0, 2, 0)


def test_few_batches_are_kept_without_rows(train):
    task = task_of(train, "trainer")
    for step in range(40):
        rows = np.array(insert(train, 1))
        batch_spec = asks((0, 2, step), task="trainer").batch_spec
        task.deliver(plan_of(rows, rows[:0]), train.table.find(rows), batch_spec=batch_spec)
        clear(train, rows)
    assert len(task.batches) == 16
    assert min(task.batches) == 24


def test_of_batches_without_rows_those_of_the_latest_indexes_are_kept_whatever_went_first(train):
    task = task_of(train, "trainer")
    batches = [np.array(insert(train, 1)) for _ in range(40)]
    for step, rows in enumerate(batches):
        task.deliver(
            plan_of(rows, rows[:0]), train.table.find(rows), batch_spec=asks((0, 2, step), task="trainer").batch_spec
        )
    for rows in reversed(batches):
        clear(train, rows)
    assert list(task.batches) == [*range(24, 40)]
    assert len(task._by_serial) == 16


def test_what_a_sampler_does_to_its_rows_once_they_are_recorded_changes_no_answer(train):
    given = np.array([0, 1])
    plan = plan_of(given)
    given[:] = 7
    assert plan.part().rows.tolist() == [0, 1]
