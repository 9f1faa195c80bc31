"""Calls of one task that ask in different ways: a slow or hanging sampler of one holds up none of the others."""

import asyncio
import threading

import numpy as np
import pytest
from domain_support import SlowSampler, ack, asks, clear, is_at_rest, reset, seal, turns, update
from planner_bench import Bench, Whenever, finished, rows
from test_domain_planner import run_to_its_end

from tq_service.errors import (
    PartitionClearedError,
    RankDisagreementError,
    SamplerTimeoutError,
    StaleEpochError,
)
from tq_service.samplers import Sampler, SequentialSampler
from tq_service.schema import EndCounts
from tq_service.serving import planner as planner_module
from tq_service.serving.planner import NotYet
from tq_service.state.plan import LeaseTerms, Order

MANY = 8192
RANK = (0, 1, 0)


@pytest.fixture
async def bench():
    return Bench()


class Hangs(Sampler):
    """Does not return before it is let go, on a thread."""

    name = "hangs"

    def __init__(self):
        self.started, self.go = threading.Event(), threading.Event()

    def plan(self, view, request):
        self.started.set()
        self.go.wait(60)
        return SequentialSampler().plan(view, request)


@pytest.fixture
def on_thread():
    sampler = Hangs()
    yield sampler
    sampler.go.set()


@pytest.fixture(params=["async", "thread"])
def hanging(request, on_thread):
    return on_thread if request.param == "thread" else SlowSampler(SequentialSampler())


async def under_way(sampler):
    """Return once a sampler has started to plan."""
    if isinstance(sampler.started, asyncio.Event):
        await sampler.started.wait()
    else:
        await asyncio.to_thread(sampler.started.wait)


# One that hangs


@pytest.mark.parametrize("rank", [None, RANK])
@pytest.mark.parametrize("other", [None, RANK])
async def test_a_sampler_that_hangs_holds_up_nobody_who_asks_in_another_way(bench, hanging, rank, other):
    hung = bench.ask(rank, sampler=hanging)
    await under_way(hanging)
    waiting = bench.ask(other)
    await turns(20)
    assert not waiting.done()
    bench.insert(2)
    await turns(20)
    assert rows(waiting) == [0, 1]
    if rank and other:
        assert isinstance(hung.exception(), RankDisagreementError)
    else:
        assert not hung.done()
    hung.cancel()


@pytest.mark.parametrize("rank", [None, RANK])
@pytest.mark.parametrize("other", [None, RANK])
async def test_beside_a_sampler_that_hangs_a_batch_that_is_ready_is_claimed_at_once(bench, hanging, rank, other):
    bench.insert(8)
    hung = bench.ask(rank, sampler=hanging)
    await under_way(hanging)
    for index in range(4):
        claim = asks(None if other is None else (0, 1, index))
        assert run_to_its_end(bench.planner.claim(claim, 1)).rows.tolist() == [2 * index, 2 * index + 1]
        await turns()  # ranks that asked for the same batch in the other way are refused meanwhile
    hung.cancel()


@pytest.mark.parametrize("rank", [None, RANK])
async def test_beside_a_sampler_that_hangs_another_slow_one_plans(bench, hanging, rank):
    bench.insert(4)
    hung = bench.ask(None, sampler=hanging)
    await under_way(hanging)
    slow = bench.ask(rank, sampler=SlowSampler(SequentialSampler(), turns=3), micro_batch_size=1)
    on_thread = bench.ask(
        rank and (0, 1, 1), sampler=Whenever(SequentialSampler().plan, quick=False), micro_batch_size=1
    )
    await asyncio.wait([slow, on_thread], timeout=30)
    assert sorted(rows(slow) + rows(on_thread)) == [0, 1, 2, 3]
    assert not hung.done()
    hung.cancel()


async def test_a_poll_does_not_wait_for_a_sampler_that_hangs_in_another_line(bench, hanging):
    hung = bench.ask(sampler=hanging)
    await under_way(hanging)
    for rank in (None, RANK):
        assert run_to_its_end(bench.planner.claim(asks(rank), 0)) == NotYet()
    hung.cancel()


async def test_a_poll_that_comes_while_a_plan_is_made_ends_with_the_next_one(bench):
    slow = SlowSampler(SequentialSampler())
    call = bench.ask(sampler=slow)
    await slow.started.wait()
    poll = bench.ask(sampler=slow, wait=0.0)
    await turns()
    assert not poll.done()
    slow.go.set()
    await turns(20)
    assert poll.result() == NotYet()
    assert not call.done()
    call.cancel()


async def test_a_poll_sees_what_was_written_before_it_came_though_a_plan_was_under_way(bench):
    slow = SlowSampler(SequentialSampler())
    call = bench.ask(sampler=slow)
    await slow.started.wait()
    bench.insert(4)
    poll = bench.ask(sampler=slow, wait=0.0)
    await turns()
    slow.go.set()
    assert rows(await finished(poll)) == [2, 3]
    assert rows(call) == [0, 1]


async def test_those_behind_a_hanging_sampler_fail_one_after_the_other_and_others_go_on():
    bench = Bench(timeout=0.05)
    bench.insert(4)
    calls = [bench.ask(sampler=SlowSampler(SequentialSampler())) for _ in range(2)]
    assert rows(await finished(bench.ask())) == [0, 1]
    await asyncio.wait(calls)
    assert all(isinstance(call.exception(), SamplerTimeoutError) for call in calls)
    assert rows(await finished(bench.ask())) == [2, 3]


async def test_a_call_that_comes_again_does_not_start_a_second_plan_beside_one_that_hangs(bench, hanging):
    for _ in range(3):
        call = bench.ask(sampler=hanging)
        await under_way(hanging)
        assert bench.partition.table.pin_count == 1
        call.cancel()
        await asyncio.wait([call])
    bench.insert(2)
    last = bench.ask(sampler=hanging)
    hanging.go.set()
    assert rows(await finished(last)) == [0, 1]
    await turns(20)
    assert bench.partition.table.pin_count == 0
    assert not bench.planner._queue


async def test_gaps_are_closed_though_plans_overlap_all_the_time(bench):
    """Each of two samplers looks at the rows while the other one does, for as long as samples come and go."""
    calls = [
        bench.ask(sampler=SlowSampler(SequentialSampler(), turns=number), batch_size=1000, micro_batch_size=number)
        for number in (5, 8)
    ]
    most = 0
    for _ in range(1000):
        clear(bench.partition, np.array(bench.insert(100)))
        await turns(1)
        most = max(most, bench.partition.table.count)
    assert bench.partition.table.present_count == 0
    assert most < 12_000
    for call in calls:
        call.cancel()


async def test_a_plan_waits_for_others_to_close_many_gaps(bench, hanging):
    hung = bench.ask(sampler=hanging)
    await under_way(hanging)
    table = bench.partition.table
    for _ in range(10):
        clear(bench.partition, np.array(bench.insert(1000)))
    assert (table.count, table.pin_count) == (10_000, 1)
    slow = SlowSampler(SequentialSampler(), turns=1)
    call = bench.ask(sampler=slow, batch_size=1, micro_batch_size=1)
    await turns(20)
    bench.insert(1)
    assert slow.call_count == 0
    assert rows(await finished(bench.ask(batch_size=1))) == [10_000]  # one that plans at once waits for nothing
    hung.cancel()
    await asyncio.wait([hung])
    hanging.go.set()
    bench.insert(1)
    assert rows(await finished(call)) == [10_001]
    assert table.count < 10


async def test_the_end_of_a_planner_ends_its_plans(bench, hanging):
    calls = [bench.ask(rank, sampler=hanging) for rank in (None, RANK)]
    await under_way(hanging)
    await turns(20)
    bench.planner.end(lambda: PartitionClearedError("gone"))
    await asyncio.wait(calls)
    assert all(isinstance(call.exception(), PartitionClearedError) for call in calls)
    await turns(5)
    assert bench.partition.table.pin_count == 0
    assert not bench.planner._queue


async def test_one_plan_is_made_at_a_time_and_one_that_takes_long_is_not_waited_for(bench, monkeypatch):
    monkeypatch.setattr(planner_module, "_MOST_PLAN_SECONDS", 0.05)
    bench.insert(20)
    hanging, under_way, most = SlowSampler(SequentialSampler()), 0, 0

    class Counted(SlowSampler):
        async def plan(self, view, request):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            try:
                return await super().plan(view, request)
            finally:
                under_way -= 1

    hung = [bench.ask(batch_size=1, micro_batch_size=number, sampler=hanging) for number in range(21, 27)]
    counted = Counted(SequentialSampler(), turns=3)
    calls = [bench.ask(batch_size=1, micro_batch_size=number, sampler=counted) for number in range(1, 21)]
    await asyncio.wait(calls, timeout=30)
    assert sorted(row for call in calls for row in rows(call)) == list(range(20))
    assert most == 1
    assert not any(call.done() for call in hung)
    for call in hung:
        call.cancel()


async def test_ranks_that_waited_to_plan_plan_nothing_once_their_batch_is_recorded(bench):
    hanging, slow = SlowSampler(SequentialSampler()), SlowSampler(SequentialSampler(), turns=1)
    hung = [bench.ask(micro_batch_size=number, sampler=hanging) for number in range(1, 5)]
    await turns()
    waiting = bench.ask(RANK, sampler=slow)
    await turns()
    bench.insert(20)
    assert rows(await finished(bench.ask(RANK))) == [0, 1]
    hanging.go.set()
    await asyncio.wait([waiting, *hung])
    await turns(20)
    assert isinstance(waiting.exception(), RankDisagreementError)
    assert (bench.task.next_batch_index, slow.call_count) == (1, 0)


# A slow one and a quick one


@pytest.mark.parametrize("rank", [None, RANK])
async def test_a_slow_sampler_is_not_stepped_over_for_ever_by_those_who_come_later(bench, rank):
    served_count = 0

    async def work():
        nonlocal served_count
        while True:
            await bench.planner.claim(asks(batch_size=1), 1e6)
            served_count += 1

    slow = bench.ask(rank, batch_size=4, sampler=SlowSampler(SequentialSampler(), turns=8))
    workers = [asyncio.ensure_future(work()) for _ in range(4)]
    while not slow.done():
        bench.insert(4)
        await turns(2)
        assert served_count < 1000
    assert len(rows(slow)) == 4
    for worker in workers:
        worker.cancel()


async def test_a_slow_sampler_that_has_waited_gets_what_comes_before_those_who_came_later(bench, monkeypatch):
    """That its plans do not take long is known then, and so long those who came later have no turn."""
    monkeypatch.setattr(planner_module, "_MOST_PLAN_SECONDS", 60.0)  # until its plan is there, on any machine
    slow = bench.ask(batch_size=1, sampler=SlowSampler(SequentialSampler(), turns=3, turns_before=3))
    await turns(40)
    quick = [bench.ask(batch_size=1), bench.ask(RANK, batch_size=1)]
    await turns(40)
    for number, call in enumerate([slow, *quick]):
        bench.insert(1)
        await turns(60)
        assert rows(call) == [number]


async def test_a_long_plan_does_not_stall_quick_claims_and_is_served(bench, monkeypatch):
    """Once it has lost its rows it leaves as many to others as they are likely to take."""
    loop = asyncio.get_running_loop()
    real_time, skipped_seconds = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real_time() + skipped_seconds)
    bench.insert(40)
    slow = SlowSampler(SequentialSampler())
    call = bench.ask(batch_size=4, sampler=slow)
    await slow.started.wait()
    assert rows(await finished(bench.ask(batch_size=4))) == [0, 1, 2, 3]
    skipped_seconds = 100.0
    slow.started.clear()
    slow.go.set()
    slow.go.clear()
    await slow.started.wait()
    skipped_seconds += 1.0
    assert rows(await finished(bench.ask(batch_size=4))) == [4, 5, 6, 7]
    assert rows(await finished(bench.ask(batch_size=4))) == [8, 9, 10, 11]
    slow.go.set()
    assert rows(await finished(call)) == [12, 13, 14, 15]
    assert slow.call_count == 2


async def test_others_are_held_for_a_moment_though_the_sampler_hangs_now(bench):
    slow = SlowSampler(SequentialSampler())
    slow.go.set()
    first = bench.ask(batch_size=1, sampler=slow)
    await turns(40)
    slow.go.clear()
    bench.insert(1)
    await turns(5)
    assert slow.call_count == 2
    assert rows(await finished(bench.ask(batch_size=1))) == [0]
    slow.go.set()
    await turns(20)
    assert not first.done()
    bench.insert(1)
    assert rows(await finished(first)) == [1]


async def test_of_two_plans_for_the_same_rows_the_second_is_made_again(bench, monkeypatch):
    monkeypatch.setattr(planner_module, "_MOST_PLAN_SECONDS", 0.01)
    samplers = [SlowSampler(SequentialSampler()) for _ in range(2)]
    bench.insert(4)
    calls = [bench.ask(sampler=sampler, micro_batch_size=n) for n, sampler in enumerate(samplers, 1)]
    for sampler in samplers:
        await sampler.started.wait()
    assert bench.partition.table.pin_count == 2
    samplers[1].go.set()
    assert rows(await finished(calls[1])) == [0, 1]
    samplers[0].go.set()
    assert rows(await finished(calls[0])) == [2, 3]
    assert [sampler.call_count for sampler in samplers] == [2, 1]
    assert bench.partition.table.pin_count == 0


async def test_a_plan_that_loses_its_rows_often_is_no_error(bench, monkeypatch):
    monkeypatch.setattr(planner_module, "_MOST_PLAN_SECONDS", 0.0)
    plans = asyncio.Queue()

    class Stepwise(Sampler):
        async def plan(self, view, request):
            plan = SequentialSampler().plan(view, request)
            returns = asyncio.Event()
            plans.put_nowait(returns)
            await returns.wait()
            return plan

    bench.insert(1)
    call = bench.ask(batch_size=1, sampler=Stepwise())
    for number in range(9):
        returns = await plans.get()
        assert rows(await finished(bench.ask(batch_size=1))) == [number]
        bench.insert(1)
        returns.set()
    (await plans.get()).set()
    assert rows(await finished(call)) == [9]


async def test_a_plan_serves_whoever_is_the_first_when_it_is_ready(bench):
    slow = SlowSampler(SequentialSampler())
    bench.insert(2)
    calls = [bench.ask(sampler=slow) for _ in range(2)]
    await slow.started.wait()
    calls[0].cancel()
    await turns()
    slow.go.set()
    assert rows(await finished(calls[1])) == [0, 1]
    assert slow.call_count == 1


@pytest.mark.parametrize("wait", [0.0, 1e6])
async def test_plans_under_way_in_one_order_keep_what_is_written_meanwhile(bench, wait):
    def put(*values):
        bench.insert(len(values), meta=[{"v": value} for value in values])

    order = {"order_by": (Order("v"),), "batch_size": 1}
    slow = SlowSampler(SequentialSampler())
    put(5, 3, 8)
    first = bench.ask(sampler=slow, **order)
    await slow.started.wait()
    put(1, 4)
    assert rows(await finished(bench.ask(**order, wait=wait))) == [3]
    put(2)
    slow.go.set()
    assert rows(await finished(first)) == [1]
    assert [rows(await finished(bench.ask(**order))) for _ in range(4)] == [[5], [4], [0], [2]]


# Resets, clears and ends while plans are under way


async def test_a_reset_and_a_claim_of_another_while_a_plan_is_made(bench):
    slow = SlowSampler(SequentialSampler())
    bench.insert(2)
    stale, whichever = bench.ask((0, 1, 0), sampler=slow, epoch=0), bench.ask((0, 1, 0), sampler=slow)
    await slow.started.wait()
    reset(bench.catalog, bench.task, keep_consumed=False)
    other = bench.ask()
    await turns(20)
    assert rows(other) == [0, 1]
    assert isinstance(stale.exception(), StaleEpochError)
    slow.go.set()
    await turns(20)
    assert not whichever.done()
    bench.insert(2)
    assert rows(await finished(whichever)) == [2, 3]


@pytest.mark.parametrize("rank", [None, RANK])
async def test_a_plan_that_ends_while_stale_calls_are_ended_serves_none_of_them(bench, rank):
    slow = SlowSampler(SequentialSampler(), turns=10, turns_before=2)
    bench.insert(1)
    stale = [bench.ask(rank, batch_size=1, sampler=slow, epoch=0) for _ in range(400)]
    await slow.started.wait()
    reset(bench.catalog, bench.task, keep_consumed=False)
    await asyncio.wait(stale)
    assert all(isinstance(call.exception(), StaleEpochError) for call in stale)
    await turns(20)
    assert bench.task.consumed_count == 0


async def test_a_short_last_plan_is_not_recorded_in_the_next_epoch(bench):
    bench.insert(3)
    seal(bench.catalog)
    assert rows(await finished(bench.ask((0, 1, 0)))) == [0, 1]
    slow = SlowSampler(SequentialSampler())
    last = bench.ask(sampler=slow)
    await slow.started.wait()
    slow.go.set()  # there are too few; now it plans the last, short batch
    await turns(2)
    slow.go.clear()
    while slow.call_count < 2:
        await turns(1)
    reset(bench.catalog, bench.task, keep_consumed=False)
    await turns(20)
    slow.go.set()
    assert rows(await finished(last)) == [0, 1]


async def test_what_another_way_leases_while_an_end_is_looked_for_is_waited_for(bench):
    bench.insert(2)
    seal(bench.catalog)
    slow = SlowSampler(SequentialSampler(), turns=4, turns_before=4)
    waiting = bench.ask(data_fields=("x", "y"), sampler=slow)
    while not slow.started.is_set():
        await turns(1)
    lease = LeaseTerms(seconds=1000.0)
    claim = asks(lease=lease)
    assert run_to_its_end(bench.planner.claim(claim, 1)).rows.tolist() == [0, 1]
    await turns(60)
    assert not waiting.done()
    ack(bench.catalog, bench.task, claim.request_id)
    assert (await finished(waiting)).result() == EndCounts(consumed_count=2)


async def test_rows_cleared_and_claimed_by_others_while_they_are_planned_are_planned_again(bench):
    slow = SlowSampler(SequentialSampler())
    bench.insert(6)
    call = bench.ask(sampler=slow)
    await slow.started.wait()
    clear(bench.catalog, np.array([1]))
    assert rows(await finished(bench.ask())) == [0, 2]
    slow.go.set()
    assert rows(await finished(call)) == [3, 4]


# Ranks


async def test_ranks_that_wait_for_a_later_batch_index_do_not_bind_the_one_before(bench):
    """Though they came first: the batch before is planned for those who ask for it, while they may have it."""
    later = bench.ask((0, 1, 1), batch_size=1)
    earlier = bench.ask((0, 1, 0), batch_size=2)
    await turns()
    bench.insert(3)
    await turns(20)
    assert (rows(earlier), rows(later)) == ([0, 1], [2])


async def test_ranks_await_a_plan_for_the_batch_index_before(bench):
    slow = SlowSampler(SequentialSampler())
    bench.insert(3)
    earlier = bench.ask((0, 1, 0), batch_size=2, sampler=slow)
    await slow.started.wait()
    later = bench.ask((0, 1, 1), batch_size=1)
    await turns(20)
    assert not later.done()
    slow.go.set()
    await turns(20)
    assert (rows(earlier), rows(later)) == ([0, 1], [2])


async def test_one_slow_plan_serves_all_ranks_and_those_who_ask_ahead(bench):
    slow = SlowSampler(SequentialSampler(), turns=3)
    calls = [bench.ask((rank, 4, index), batch_size=1, sampler=slow) for index in (1, 0) for rank in range(4)]
    await turns(40)
    slow.call_count = 0
    bench.insert(8)
    await asyncio.wait(calls)
    assert [rows(call) for call in calls] == [[row] for row in (4, 5, 6, 7, 0, 1, 2, 3)]
    assert slow.call_count == 2


async def test_ranks_that_wait_with_another_dp_size_are_refused_once_it_is_bound(bench):
    waiting = bench.ask((0, 3, 1), batch_size=1)
    await turns()
    bench.insert(2)
    assert rows(await finished(bench.ask((0, 2, 0), batch_size=1))) == [0]
    bench.insert(3)
    await turns(20)
    assert isinstance(waiting.exception(), RankDisagreementError)
    assert (bench.task.dp_size, bench.task.next_batch_index) == (2, 1)


# Order of arrival


async def test_ranks_and_workers_of_three_ways_get_what_is_scarce_in_order_of_arrival(bench):
    calls = []
    for number in range(12):
        match number % 3:
            case 0:
                calls.append(bench.ask(batch_size=1))
            case 1:
                calls.append(bench.ask((0, 1, number // 3), batch_size=1))
            case _:
                calls.append(bench.ask(batch_size=1, micro_batch_size=1))
    await turns()
    for number in range(12):
        bench.insert(1)
        await turns(20)
        assert [call.done() for call in calls] == [other <= number for other in range(12)]
        assert rows(calls[number]) == [number]


async def test_thousands_of_ways_are_served_in_order_of_arrival_beside_one_that_hangs(bench, hanging):
    hung = bench.ask(sampler=hanging)
    await under_way(hanging)
    calls = [
        bench.ask(RANK, batch_size=1) if number == MANY // 2 else bench.ask(batch_size=1, micro_batch_size=number + 1)
        for number in range(MANY)
    ]
    await turns()
    bench.insert(100)
    while bench.planner._dispatching is not None:
        await turns(1)
    bench.insert(MANY)
    await asyncio.wait(calls)
    assert [rows(call) for call in calls] == [[number] for number in range(MANY)]
    assert bench.planner.waiting_count == 1
    assert not hung.done()
    hung.cancel()


async def test_thousands_of_ways_have_one_turn_each_after_a_change(bench, monkeypatch):
    """Also when plans off the loop end meanwhile: each of them is a turn for its own line only."""
    look_count = turn_count = 0
    queue = bench.planner._queue
    next_line = queue.next

    def look(view, request):
        nonlocal look_count
        look_count += 1

    def counted_next(may_be_served):
        nonlocal turn_count
        line = next_line(may_be_served)
        turn_count += line is not None
        return line

    monkeypatch.setattr(queue, "next", counted_next)
    slow_count, sampler, slow = 64, Whenever(look), SlowSampler(Whenever(look), turns=2)
    calls = [bench.ask(batch_size=2, micro_batch_size=number + 1, sampler=sampler) for number in range(MANY)]
    calls += [bench.ask(batch_size=2, micro_batch_size=number + 1, sampler=slow) for number in range(slow_count)]
    await turns()
    for _ in range(2):
        while not is_at_rest(bench.planner):
            await turns(1)
        look_count = turn_count = 0
        update(bench.catalog, bench.insert(1), state="held")
        await turns()
    while not is_at_rest(bench.planner):
        await turns(1)
    assert look_count == MANY + slow_count
    assert look_count <= turn_count <= MANY + 2 * slow_count
    for call in calls:
        call.cancel()
