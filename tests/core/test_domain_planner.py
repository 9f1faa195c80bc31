"""The planner: who waits, who is served, and when the end comes."""

import asyncio

import numpy as np
import pytest
from domain_support import DrawingSampler, SlowSampler, asks, clear, new_id, plan_of, reset, seal, turns, update
from planner_bench import Bench, Whenever, finished, rows

from tq_service.errors import (
    InvalidArgumentError,
    RankDisagreementError,
    StaleEpochError,
)
from tq_service.samplers import (
    GRPOGroupNSampler,
    SequentialSampler,
)
from tq_service.schema import EndCounts
from tq_service.serving.planner import NotYet
from tq_service.serving.status import consumption_of
from tq_service.state.ledger import RecordedPlan
from tq_service.state.plan import Condition, Plan


@pytest.fixture
async def bench():
    return Bench()


# Waiting


async def test_all_ranks_get_their_parts_of_one_plan_and_the_same_again(bench):
    calls = [bench.ask((rank, 2, 0)) for rank in (1, 0, 1)]
    await turns()
    assert not any(call.done() for call in calls)
    bench.insert(4)
    await turns()
    assert [rows(call) for call in calls] == [[2, 3], [0, 1], [2, 3]]
    assert rows(await finished(bench.ask((1, 2, 0), wait=0))) == [2, 3]


async def test_who_asks_ahead_causes_the_batches_before_to_be_planned(bench):
    bench.insert(6)
    assert rows(await finished(bench.ask((0, 1, 2)))) == [4, 5]
    assert rows(await finished(bench.ask((0, 1, 0)))) == [0, 1]
    assert rows(await finished(bench.ask((0, 1, 1)))) == [2, 3]


@pytest.mark.parametrize("sampler", [SequentialSampler(), DrawingSampler()])
async def test_a_rank_that_miscounts_consumes_nothing(bench, sampler):
    """The batches before the one it asks for would all be planned."""
    bench.insert(10_000)
    for index in (257, 1000, 2**40):
        call = await finished(bench.ask((0, 2, index), batch_size=1, sampler=sampler))
        assert isinstance(call.exception(), InvalidArgumentError)
        assert f"batch_index is {index}; expected at most 256" in str(call.exception())
    assert (bench.task.consumed_count, bench.task.next_batch_index) == (0, 0)
    assert not isinstance((await finished(bench.ask((0, 2, 256), batch_size=1, sampler=sampler))).result(), NotYet)


async def test_a_rank_that_waits_is_refused_once_a_reset_has_it_far_ahead(bench):
    bench.insert(300)
    await finished(bench.ask((0, 1, 200), batch_size=1))
    waiting = bench.ask((0, 1, 400), batch_size=1)
    await turns()
    assert not waiting.done()
    reset(bench.catalog, bench.task, keep_consumed=False)
    await finished(waiting)
    assert isinstance(waiting.exception(), InvalidArgumentError)
    assert bench.task.consumed_count == 0


def dispatch_count():
    return sum(task.get_coro().__name__ == "_dispatch" for task in asyncio.all_tasks())


async def test_a_batch_that_is_ready_is_claimed_without_the_dispatch_loop(bench):
    bench.insert(8)
    claims = [asks((1, 2, 0)), asks((0, 2, 0)), asks((0, 2, 1)), asks((1, 2, 1))]
    for claim, expected in zip(claims, ([2, 3], [0, 1], [4, 5], [6, 7]), strict=True):
        assert run_to_its_end(bench.planner.claim(claim, 1)).rows.tolist() == expected
    bench.insert(2)
    assert run_to_its_end(bench.planner.claim(asks(), 1)).rows.tolist() == [8, 9]
    assert dispatch_count() == 0


def run_to_its_end(call):
    """Return what a coroutine returns that never waits."""
    with pytest.raises(StopIteration) as stopped:
        call.send(None)
    return stopped.value.value


async def test_a_claim_at_once_does_not_leave_those_behind_who_disagree(bench):
    too_much = bench.ask((0, 1, 0), batch_size=4)
    await turns()
    bench.insert(2)
    await turns()
    assert not too_much.done()
    assert rows(await finished(bench.ask((0, 1, 0), batch_size=2))) == [0, 1]
    await turns()
    assert isinstance(too_much.exception(), RankDisagreementError)


async def test_a_claim_at_once_of_the_last_samples_brings_the_end_to_those_who_wait(bench):
    bench.insert(2)
    seal(bench.catalog)
    waiting = bench.ask(data_fields=("y",))
    await turns()
    assert not waiting.done()
    assert rows(await finished(bench.ask(batch_size=2))) == [0, 1]
    await turns()
    assert waiting.result() == EndCounts(consumed_count=2)


async def test_nobody_is_served_at_once_while_others_are_being_served(bench):
    first = bench.ask()
    await turns()
    bench.insert(2)
    second = bench.ask()
    await turns()
    assert rows(first) == [0, 1]
    assert not second.done()
    second.cancel()


async def test_the_deadline_ends_a_wait_with_not_yet_and_leaves_nothing(bench):
    for wait in (0, 0.001):
        assert await bench.ask((0, 1, 0), wait=wait) == NotYet()
        assert await bench.ask(wait=wait) == NotYet()
    assert bench.planner.waiting_count == 0
    bench.insert(2)
    await turns()
    assert bench.task.consumed_count == 0


async def test_one_look_takes_what_is_ready(bench):
    bench.insert(2)
    assert rows(await finished(bench.ask(wait=0))) == [0, 1]


async def test_those_who_leave_leave_nothing_claimed(bench):
    calls = [bench.ask() for _ in range(50)]
    await turns()
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert bench.planner.waiting_count == 0
    bench.insert(100)
    await turns()
    assert bench.task.consumed_count == 0


async def test_a_worker_that_leaves_as_its_answer_comes_gives_it_back(bench):
    call = bench.ask()
    await turns()
    bench.insert(2)
    await bench.until_consumed(2)
    assert not call.done()
    call.cancel()
    await asyncio.wait([call])
    assert (bench.task.consumed_count, bench.task.backlog) == (0, 2)
    assert rows(await finished(bench.ask())) == [0, 1]


async def test_a_retry_keeps_the_claim_of_a_call_that_left(bench):
    request_id = new_id()
    first, second = bench.ask(request_id=request_id), bench.ask(request_id=request_id)
    await turns()
    bench.insert(4)
    await bench.until_consumed(2)
    first.cancel()
    await asyncio.wait([first, second])
    assert rows(second) == [0, 1]
    assert bench.task.consumed_count == 2


async def test_a_call_that_got_not_yet_takes_nothing_back_when_it_leaves(bench):
    request_id = new_id()
    first = bench.ask(request_id=request_id)
    await turns()
    (waiter,) = bench.planner._queue
    waiter.end(NotYet())
    bench.insert(2)
    second = asks(request_id=request_id)
    bench.task.deliver(plan_of([0, 1]), np.array([0, 1]), request_id=request_id)
    first.cancel()
    await asyncio.wait([first])
    assert bench.task.recorded(second).rows.tolist() == [0, 1]


async def test_queue_workers_are_served_in_order_of_arrival_and_none_twice(bench):
    calls = [bench.ask(batch_size=1) for _ in range(5000)]
    await turns()
    bench.insert(3000)
    await asyncio.wait(calls[:3000])
    bench.insert(2500)
    await asyncio.wait(calls)
    assert [rows(call) for call in calls] == [[index] for index in range(5000)]
    assert bench.planner.waiting_count == 0


async def test_the_loop_turns_while_many_are_served(bench):
    calls = [bench.ask(batch_size=1) for _ in range(200)]
    await turns()
    bench.insert(200)
    served = []
    while not calls[-1].done():
        await turns(1)
        served.append(sum(call.done() for call in calls))
    assert len(set(served)) > 8


async def test_one_claim_spec_does_not_hold_up_another(bench):
    large = bench.ask(batch_size=8)
    small = bench.ask(batch_size=2)
    bench.insert(3)
    await turns()
    assert rows(small) == [0, 1]
    assert not large.done()
    bench.insert(7)
    await turns()
    assert rows(large) == list(range(2, 10))


# Disagreement and epochs


@pytest.mark.parametrize(
    ("field", "other", "got"),
    [
        ("batch_size", 4, "4"),
        ("batch_unit", "group", "group"),
        ("micro_batch_size", 2, "2"),
        ("sampler_config", '{"a": 1}', '{"a": 1}'),
        ("where", (Condition("v", ">=", (1,)),), "v >= 1"),
        ("data_fields", ("y",), "y"),
        ("drop_last", True, "true"),
        ("finite", True, "true"),
    ],
)
async def test_a_rank_that_disagrees_changes_nothing(bench, field, other, got):
    bench.insert(8)
    first = rows(await finished(bench.ask((0, 2, 0))))
    call = await finished(bench.ask((1, 2, 0), **{field: other}))
    error = call.exception()
    assert isinstance(error, RankDisagreementError)
    assert error.metadata["field"] == field
    assert error.metadata["got"] == got
    assert (bench.task.consumed_count, bench.task.next_batch_index) == (4, 1)
    assert rows(await finished(bench.ask((0, 2, 0)))) == first


async def test_a_rank_that_asks_for_too_much_does_not_keep_others_waiting(bench):
    greedy = bench.ask((0, 2, 0), batch_size=100)
    modest = bench.ask((1, 2, 0))
    bench.insert(4)
    await turns()
    assert rows(modest) == [2, 3]
    assert isinstance(greedy.exception(), RankDisagreementError)


async def test_dp_size_holds_for_the_epoch(bench):
    bench.insert(8)
    await bench.ask((0, 2, 0))
    with pytest.raises(RankDisagreementError, match="dp_size"):
        await bench.ask((0, 3, 1))
    reset(bench.catalog, bench.task, keep_consumed=True)
    assert rows(await finished(bench.ask((1, 4, 0), batch_size=1))) == [5]


async def test_calls_of_an_old_epoch_end_with_a_reset(bench):
    stale, whichever = bench.ask((0, 1, 0), epoch=0), bench.ask((0, 1, 0))
    await turns()
    reset(bench.catalog, bench.task, keep_consumed=False)
    await turns()
    assert isinstance(stale.exception(), StaleEpochError)
    assert not whichever.done()
    bench.insert(2)
    await turns()
    assert rows(whichever) == [0, 1]


async def test_a_reset_while_a_plan_is_made_ends_the_calls_of_the_old_epoch(bench):
    slow = SlowSampler(SequentialSampler())
    bench.insert(2)
    stale, whichever = bench.ask((0, 1, 0), sampler=slow, epoch=0), bench.ask((0, 1, 0), sampler=slow)
    await slow.started.wait()
    reset(bench.catalog, bench.task, keep_consumed=False)
    slow.go.set()
    await asyncio.wait([stale, whichever])
    assert isinstance(stale.exception(), StaleEpochError)
    assert rows(whichever) == [0, 1]


# The end


async def test_the_end_counts_the_skipped_and_is_the_same_for_all_ranks(bench):
    bench.insert(5)
    bench.insert(1, state="failed")
    seal(bench.catalog)
    assert rows(await finished(bench.ask((0, 2, 0)))) == [0, 1]
    short = [bench.ask((rank, 2, 1)) for rank in (1, 0)]
    await turns()
    assert [rows(call) for call in short] == [[], [4]]
    assert [len(call.result().steps[0]) for call in short] == [1, 1]
    for index in (2, 5):
        assert await bench.ask((1, 2, index)) == EndCounts(consumed_count=5, failed_count=1)
    assert await bench.ask(batch_size=2) == EndCounts(consumed_count=5, failed_count=1)


async def test_drop_last_leaves_the_rest(bench):
    bench.insert(5)
    seal(bench.catalog)
    assert rows(await finished(bench.ask((0, 2, 0), drop_last=True))) == [0, 1]
    assert await bench.ask((0, 2, 1), drop_last=True) == EndCounts(consumed_count=4, left_over_count=1)


async def test_held_rows_block_the_end(bench):
    bench.insert(2)
    bench.insert(1, state="held")
    seal(bench.catalog)
    await bench.ask((0, 1, 0))
    last = bench.ask((0, 1, 1))
    await turns()
    assert not last.done()
    update(bench.catalog, [2], state="live")
    await turns()
    assert rows(last) == [2]


@pytest.mark.parametrize("change", ["clear", "fail"])
async def test_the_end_comes_when_the_last_row_is_gone(bench, change):
    bench.insert(1, ())
    seal(bench.catalog)
    calls = [bench.ask((0, 1, 0)), bench.ask()]
    await turns()
    assert not any(call.done() for call in calls)
    if change == "clear":
        clear(bench.catalog, np.array([0]))
    else:
        update(bench.catalog, [0], state="failed")
    await turns()
    assert [call.result() for call in calls] == [
        EndCounts(consumed_count=0, cleared_count=change == "clear", failed_count=change == "fail")
    ] * 2


async def test_what_another_claim_spec_consumes_may_bring_the_end(bench):
    """Who waits for a second column sees the end when those who need only one take the rows."""
    bench.insert(2)
    seal(bench.catalog)
    waiting = bench.ask(data_fields=("x", "y"))
    await turns()
    assert not waiting.done()
    assert rows(await finished(bench.ask(data_fields=("x",)))) == [0, 1]
    await turns()
    assert waiting.result() == EndCounts(consumed_count=2)


@pytest.mark.parametrize("rank", [(0, 1, 1), None])
async def test_finite_ends_with_a_round_and_not_within_one(rank):
    bench = Bench(samples_per_round=8)
    bench.insert(4)
    first = bench.ask(rank and (0, 1, 0), batch_size=4, finite=True)
    assert rows(await finished(first)) == [0, 1, 2, 3]
    second = bench.ask(rank, batch_size=4, finite=True)
    await turns(20)
    assert not second.done()
    assert not consumption_of(bench.partition, "t").complete
    bench.insert(4)
    assert rows(await finished(second)) == [4, 5, 6, 7]
    end = await finished(bench.ask(rank and (0, 1, 2), batch_size=4, finite=True))
    assert end.result() == EndCounts(consumed_count=8)
    assert consumption_of(bench.partition, "t").complete
    bench.insert(4)
    assert not consumption_of(bench.partition, "t").complete
    bench.insert(4)
    assert not consumption_of(bench.partition, "t").complete
    reset(bench.catalog, bench.task, keep_consumed=True)
    assert rows(await finished(bench.ask(rank and (0, 1, 0), batch_size=8, finite=True))) == [*range(8, 16)]


async def test_finite_waits_for_a_first_sample_and_ends_with_what_there_is(bench):
    call = bench.ask((0, 1, 0), batch_size=8, finite=True)
    await turns()
    assert not call.done()
    bench.insert(3)
    await turns()
    assert rows(call) == [0, 1, 2]
    assert await bench.ask((0, 1, 1), batch_size=8, finite=True) == EndCounts(consumed_count=3)
    bench.insert(3)
    assert await bench.ask((0, 1, 1), batch_size=8, finite=True) == EndCounts(
        consumed_count=3
    )  # decided once for all ranks


async def test_a_sampler_that_looks_at_rows_by_itself_comes_to_an_end(bench):
    """It never asks what is ready, so no scan tells that nothing is."""

    def first_live(view, request):
        live = [row for row in view.rows().tolist() if view.states([row]) == ["live"] and row not in taken]
        taken.extend(live[:1])
        return Plan.of([np.array(live[:1])]) if live else None

    taken = []
    bench.insert(2)
    seal(bench.catalog)
    sampler = Whenever(first_live)
    assert [rows(await finished(bench.ask(batch_size=1, sampler=sampler))) for _ in range(2)] == [[0], [1]]
    assert await bench.ask(batch_size=1, sampler=sampler) == EndCounts(consumed_count=2)


# Groups


async def test_groups_all_cleared_leave_the_partition_one_of_groups(bench):
    """Rows put one by one are no blocks; while no group is there, who asks for groups waits."""
    for _ in range(2):
        bench.insert(1, groups=["a"], group_size=2)
    sampler = GRPOGroupNSampler(n_samples_per_prompt=2)
    assert rows(await finished(bench.ask((0, 1, 0), sampler=sampler))) == [0, 1]
    clear(bench.catalog, np.array([0, 1]))
    call = bench.ask((0, 1, 1), sampler=sampler)
    await turns()
    assert not call.done()
    for _ in range(2):
        bench.insert(1, groups=["b"], group_size=2)
    await turns()
    assert rows(call) == [2, 3]


async def test_a_group_that_can_no_longer_be_whole_does_not_block_the_end(bench):
    bench.insert(3, groups=["a"] * 3, group_size=3)
    bench.insert(2, groups=["b"] * 2, group_size=3)
    update(bench.catalog, [1], state="failed")
    sampler = GRPOGroupNSampler(n_samples_per_prompt=3)
    call = bench.ask((0, 1, 0), sampler=sampler, batch_size=3)
    await turns()
    assert not call.done()
    seal(bench.catalog)
    await turns()
    assert call.result() == EndCounts(consumed_count=0, failed_count=1, in_incomplete_groups_count=4)


async def test_the_rest_of_a_broken_group_is_taken_where_the_task_says_so(bench):
    bench.insert(3, groups=["a"] * 3, group_size=3)
    update(bench.catalog, [1], state="failed")
    seal(bench.catalog)
    sampler = GRPOGroupNSampler(n_samples_per_prompt=3, incomplete_groups="take")
    assert rows(await finished(bench.ask((0, 1, 0), sampler=sampler, batch_size=3))) == [0, 2]
    assert await bench.ask((0, 1, 1), sampler=sampler, batch_size=3) == EndCounts(consumed_count=2, failed_count=1)


async def test_blocks_are_refused_where_puts_do_not_fit_them(bench):
    bench.insert(4)
    sampler = GRPOGroupNSampler(n_samples_per_prompt=2)
    assert rows(await finished(bench.ask((0, 1, 0), sampler=sampler))) == [0, 1]
    bench.insert(3)
    with pytest.raises(InvalidArgumentError, match="multiples of 1"):
        await bench.ask((0, 1, 1), sampler=sampler)


# Micro-batches


def test_micro_batches_are_as_many_on_every_rank():
    recorded = RecordedPlan.of(Plan.of([np.arange(5), np.arange(5, 7), np.zeros(0, np.int64)]), 2)
    plan = Plan(ranks=tuple(map(recorded.part, range(3))))
    assert [part.rows.tolist() for part in plan.ranks] == [[0, 1, 2, 3, 4], [5, 6], []]
    packs = [[pack.positions.tolist() for pack in part.steps[0]] for part in plan.ranks]
    assert packs == [[[0, 1], [2, 3], [4]], [[0, 1], [], []], [[], [], []]]
    again = RecordedPlan.of(plan, 1)
    assert [again.part(rank).steps for rank in range(3)] == [part.steps for part in plan.ranks]
    assert [pack.positions.tolist() for pack in plan_of(range(3)).part().steps[0]] == [[0, 1, 2]]
