"""Thousands who wait: nobody is lost, others have the event loop meanwhile, and what wakes nobody costs nothing."""

import asyncio
import gc
import itertools
import math
import tracemalloc

import numpy as np
import pytest
from domain_support import SlowSampler, asks, is_at_rest, new_write, reset, seal, turns
from planner_bench import Bench, Whenever, rows

from tq_service.errors import InvalidArgumentError, PartitionClearedError, StaleEpochError
from tq_service.machine.policies import VersionPublished
from tq_service.planning.view import NOT_LOOKED
from tq_service.samplers import PlanRunner, SequentialSampler
from tq_service.schema import EndCounts, Published
from tq_service.serving import planner
from tq_service.serving import planner as waiters
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import LineState, LoopYielder, NotYet, Waiter, WaitQueue
from tq_service.state.ledger import Claim
from tq_service.state.partition import PartitionSettings
from tq_service.state.plan import Condition

MANY = 400
MOST_A_TURN = 32


@pytest.fixture
async def bench():
    return Bench()


@pytest.fixture
def far_ahead(monkeypatch):
    """Let ranks ask for batches further ahead than they may."""
    monkeypatch.setattr(planner, "_MOST_BATCHES_AHEAD", 1 << 20)


@pytest.fixture
async def catalog():
    return Catalog(PlanRunner())


async def most_done_in_a_turn(calls):
    """Let the loop turn until all calls are done; return the most that were in one turn."""
    counts = [0]
    while counts[-1] < len(calls):
        await turns(1)
        counts.append(sum(call.done() for call in calls))
    return max(later - sooner for sooner, later in itertools.pairwise(counts))


async def until_some_are_done(calls):
    """Let the loop turn until some of the calls are done, and check that not all are."""
    while not any(call.done() for call in calls):
        await turns(1)
    assert not all(call.done() for call in calls)


async def test_the_loop_turns_every_few_steps(monkeypatch):
    monkeypatch.setattr(waiters, "_TURN_SECONDS", math.inf)
    turn_count = 0

    async def count():
        nonlocal turn_count
        while True:
            turn_count += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    pace = LoopYielder()
    for _ in range(15):
        await pace.step()
    assert turn_count == 0
    for _ in range(100):
        await pace.step()
    assert turn_count >= 6
    counting.cancel()


async def test_the_loop_turns_after_a_step_that_took_long(monkeypatch):
    monkeypatch.setattr(waiters, "_TURN_SECONDS", 0.0)
    other = asyncio.ensure_future(asyncio.sleep(0))
    await LoopYielder().step()
    await LoopYielder().step()
    assert other.done()


async def test_a_line_skips_those_who_have_left():
    queue, loop = WaitQueue(), asyncio.get_running_loop()
    waiters = [Waiter(asks(), loop.create_future()) for _ in range(3)]
    (line,) = {queue.join(waiter, NOT_LOOKED) for waiter in waiters}
    waiters[0].end(NotYet())
    waiters[1].answer.cancel()
    assert line.first() is waiters[2]
    for waiter in waiters:
        line.remove(waiter)
        queue.forget_if_unused(line)
    assert line.first() is None
    assert not queue


async def test_lines_that_came_later_have_no_turn_while_a_line_holds_them():
    queue, loop = WaitQueue(), asyncio.get_running_loop()
    waiters = [Waiter(asks(batch_size=size), loop.create_future()) for size in (1, 2, 3)]
    first, second, third = (queue.join(waiter, NOT_LOOKED) for waiter in waiters)
    queue.planning, second.is_waited_for = second, True
    for line in (third, first):
        queue.put(line)
    assert (next_of(queue), next_of(queue)) == (first, None)
    waiters[1].end(NotYet())  # nobody is there any more whom the plan could serve
    assert next_of(queue) is third


async def test_a_turn_of_a_line_that_all_have_left_does_not_cost_the_others_theirs():
    """What has changed meanwhile is looked at in the same round: no other may come for long."""
    queue, loop = WaitQueue(), asyncio.get_running_loop()
    waiters = [Waiter(asks(batch_size=size), loop.create_future()) for size in (1, 2)]
    left, waiting = (queue.join(waiter, NOT_LOOKED) for waiter in waiters)
    queue.is_stale = True
    assert next_of(queue) is left  # of two turns that are due
    assert queue.next(lambda line: line is left) is waiting
    queue.put(left)
    waiters[0].end(NotYet())
    queue.is_stale, queue._turns_left = True, 1
    assert next_of(queue) is waiting
    assert (next_of(queue), queue.is_stale) == (None, False)


async def test_a_line_has_one_state_and_leaves_it_by_what_it_waits_for():
    queue, waiter = WaitQueue(), Waiter(asks(), asyncio.get_running_loop().create_future())
    line = queue.join(waiter, NOT_LOOKED)
    assert line.state is LineState.PARKED
    for _ in range(2):
        queue.put(line)
        assert line.state is LineState.QUEUED
    assert (next_of(queue), line.state) == (line, LineState.PARKED)
    queue.put_heavy(line)
    queue.put(line)
    assert (next_of(queue), line.state) == (None, LineState.HEAVY)
    assert (queue.next_heavy(), line.state) == (line, LineState.PLANNING)
    queue.put(line)
    assert (next_of(queue), queue.next_heavy()) == (None, None)
    queue.planning, line.state, queue.is_stale = None, LineState.PARKED, True
    assert next_of(queue) is line
    assert (next_of(queue), queue.next_heavy(), line.state) == (None, None, LineState.PARKED)


def next_of(queue):
    return queue.next(lambda line: True)


async def test_ranks_of_one_plan_are_answered_a_few_a_turn(bench):
    calls = [bench.ask((rank, MANY, 0), batch_size=1) for rank in range(MANY)]
    await turns()
    bench.insert(MANY)
    assert await most_done_in_a_turn(calls) <= MOST_A_TURN
    assert [rows(call) for call in calls] == [[rank] for rank in range(MANY)]


async def test_ranks_that_ask_alike_wait_in_one_line(bench):
    """So that a write that completes no batch looks at one of them, however many there are."""
    calls = [bench.ask((rank, MANY, index), batch_size=1) for rank in range(MANY) for index in (0, 1)]
    await turns()
    assert len(bench.planner._queue.by_spec) == 1
    assert bench.planner.waiting_count == len(calls)
    bench.insert(2 * MANY)
    await asyncio.wait(calls)
    assert sorted(row for call in calls for row in rows(call)) == list(range(2 * MANY))


@pytest.mark.parametrize("rank", [None, (0, 1, 0)])
async def test_those_who_ask_in_different_ways_are_looked_after_a_few_a_turn(bench, rank):
    looks = 0

    def look(view, request):
        nonlocal looks
        looks += 1

    sampler = Whenever(look)
    calls = [bench.ask(rank, batch_size=size, sampler=sampler) for size in range(1, MANY + 1)]
    await turns()
    while not is_at_rest(bench.planner):
        await turns(1)
    looks, most = 0, 0
    bench.insert(1)
    while not is_at_rest(bench.planner):
        before = looks
        await turns(1)
        most = max(most, looks - before)
    assert 0 < most <= MOST_A_TURN
    assert looks >= 1
    for call in calls:
        call.cancel()


async def test_a_claim_spec_that_waits_in_vain_is_not_tried_again(bench):
    """However many others there are: trying all of them for each that arrives would take for ever."""
    looks = 0

    def look(view, request):
        nonlocal looks
        looks += 1

    sampler = Whenever(look)
    calls = [bench.ask(batch_size=size, sampler=sampler) for size in range(1, MANY + 1)]
    await turns()
    while not is_at_rest(bench.planner):
        await turns(1)
    first, looks = looks, 0
    calls.append(bench.ask(batch_size=MANY + 1, sampler=sampler))
    await turns()
    while not is_at_rest(bench.planner):
        await turns(1)
    assert first >= MANY
    assert 1 <= looks <= 2  # at once, and by the dispatch loop
    for call in calls:
        call.cancel()


async def test_those_who_come_back_at_once_leave_something_for_those_who_ask_in_another_way(bench):
    async def work():
        while True:
            await bench.planner.claim(asks(batch_size=1), 1e6)

    workers = [asyncio.ensure_future(work()) for _ in range(MOST_A_TURN)]
    other = bench.ask(batch_size=2)
    await turns()
    bench.insert(10 * MANY)
    while bench.task.consumed_count < 5 * MANY:
        await turns(1)
    assert other.done()
    for worker in workers:
        worker.cancel()


async def test_workers_of_all_ways_of_asking_get_what_comes_in_order_of_arrival(bench):
    calls = [bench.ask(batch_size=1, micro_batch_size=number % 3 + 1) for number in range(12)]
    await turns()
    for number in range(12):
        bench.insert(1)
        await turns(20)
        assert [call.done() for call in calls] == [other <= number for other in range(12)]


async def test_a_worker_that_asks_in_another_way_gets_its_share_of_what_is_scarce(bench):
    counts = {1: 0, 2: 0}

    async def work(micro_batch_size):
        while True:
            await bench.planner.claim(asks(batch_size=1, micro_batch_size=micro_batch_size), 1e6)
            counts[micro_batch_size] += 1

    workers = [asyncio.ensure_future(work(micro_batch_size)) for micro_batch_size in (1, 1, 1, 2)]
    for _ in range(100):
        await turns(12)
        bench.insert(1)
    await turns(12)
    assert counts == {1: 75, 2: 25}
    for worker in workers:
        worker.cancel()


async def test_a_worker_that_cannot_be_served_holds_nobody_up_and_is_the_first_once_it_can(bench):
    first = bench.ask(batch_size=3)
    others = [bench.ask(batch_size=1) for _ in range(3)]
    await turns()
    bench.insert(2)
    await turns(20)
    assert [call.done() for call in (first, *others)] == [False, True, True, False]
    bench.insert(3)
    await turns(20)
    assert rows(first) == [2, 3, 4]
    assert not others[2].done()
    others[2].cancel()


async def test_a_worker_that_can_be_served_meanwhile_does_not_wait_for_all_that_came_later(bench):
    first = bench.ask(batch_size=4)
    others = [bench.ask(batch_size=1, sampler=SlowSampler(SequentialSampler(), turns=3)) for _ in range(MANY)]
    await turns()
    bench.insert(1)
    for _ in range(MANY):
        await turns(2)
        bench.insert(1)
        if first.done():
            break
    assert sum(call.done() for call in others) < MANY // 10
    for call in others:
        call.cancel()


@pytest.mark.usefixtures("far_ahead")
async def test_a_claim_far_ahead_is_planned_a_few_batches_a_turn(bench):
    bench.insert(5 * MANY)
    call = bench.ask((0, 1, 5 * MANY - 1), batch_size=1)
    most = planned_count = 0
    while not call.done():
        await turns(1)
        most = max(most, bench.task.next_batch_index - planned_count)
        planned_count = bench.task.next_batch_index
    assert rows(call) == [5 * MANY - 1]
    assert most <= MOST_A_TURN


@pytest.mark.usefixtures("far_ahead")
async def test_a_claim_far_ahead_ends_with_its_time_and_the_next_one_goes_on(bench):
    bench.insert(20 * MANY)
    index = 20 * MANY - 1
    assert await bench.ask((0, 1, index), batch_size=1, wait=0.001) == NotYet()
    planned_count = bench.task.next_batch_index
    assert 0 < planned_count < index
    await turns(20)
    assert bench.task.next_batch_index <= planned_count + MOST_A_TURN
    answer = NotYet()
    while answer == NotYet():
        answer = await bench.ask((0, 1, index), batch_size=1, wait=0.0)
        assert bench.task.next_batch_index > planned_count
        planned_count = bench.task.next_batch_index
    assert answer.rows.tolist() == [index]


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("count", [0, 64, 128])
async def test_a_poll_gets_what_is_found_just_before_others_have_their_turns(bench, count, slow):
    def poll(index):
        sampler = SlowSampler(SequentialSampler(), turns=1) if slow else SequentialSampler()
        return bench.ask((0, 1, index), batch_size=1, sampler=sampler, wait=0.0)

    if count:
        bench.insert(count)
    seal(bench.catalog)
    if count > 64:
        assert await poll(count - 1) == NotYet()
    if count:
        assert (await poll(count - 1)).rows.tolist() == [count - 1]
    assert await poll(count) == EndCounts(consumed_count=count)


@pytest.mark.usefixtures("far_ahead")
async def test_a_claim_far_ahead_leaves_their_turn_to_others_of_its_task(bench):
    bench.insert(6 * MANY)
    far = bench.ask((0, 1, 5 * MANY), batch_size=1)
    await turns()
    worker, look = bench.ask(batch_size=1), bench.ask(batch_size=1, wait=0.0)
    replay = bench.ask((0, 1, 0), batch_size=1)
    while not all(call.done() for call in (worker, look, replay)):
        await turns(1)
    assert not far.done()
    assert isinstance(look.result(), Claim)
    assert rows(replay) == [0]
    await far


@pytest.mark.usefixtures("far_ahead")
async def test_a_claim_far_ahead_plans_no_more_once_the_partition_is_removed(catalog):
    partition = catalog.write("train", b"", new_write(5 * MANY, ("x",))).partition
    call = asyncio.ensure_future(catalog.claim("train", b"", asks((0, 1, 5 * MANY - 1), batch_size=1), 1e6))
    await turns()
    catalog.remove("train", b"")
    planned_count = partition.tasks["t"].next_batch_index
    await asyncio.wait([call])
    await turns(20)
    assert isinstance(call.exception(), PartitionClearedError)
    assert partition.tasks["t"].next_batch_index == planned_count


@pytest.mark.parametrize("rank", [None, (0, 1, 0)])
@pytest.mark.parametrize("wait", [0.0, 1e6])
async def test_failed_attempts_are_kept_no_longer_than_somebody_waits(bench, rank, wait):
    bench.insert(1, meta=[{"uid": "a"}])

    async def ask(number):
        where = (Condition("uid", "==", (f"{number}".ljust(100_000, "x"),)),)
        call = bench.ask(rank, where=where, wait=wait)
        await turns(10)
        call.cancel()
        await asyncio.wait([call])

    await ask(0)
    tracemalloc.start()
    try:
        for number in range(100):
            await ask(number)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()


class Hopeful(SlowSampler):
    """Is asked again after every change."""

    plans_below_min_size = True


async def test_one_look_ends_though_there_is_always_something_new_to_look_at(bench):
    async def produce():
        while True:
            bench.insert(1)
            await turns(1)

    waiting = bench.ask(batch_size=10**6, sampler=Hopeful(Whenever(lambda view, request: None), turns=3))
    producing = asyncio.ensure_future(produce())
    await turns(10)
    look = bench.ask(batch_size=10**6, wait=0.0)
    await turns(100)
    assert look.done()
    assert isinstance(look.result(), NotYet)
    for task in (producing, waiting):
        task.cancel()


async def test_a_reset_between_answers_leaves_no_rank_behind(bench):
    calls = [bench.ask((rank, MANY, 0), batch_size=1) for rank in range(MANY)]
    await turns()
    bench.insert(MANY)
    await until_some_are_done(calls)
    reset(bench.catalog, bench.task, keep_consumed=False)
    await asyncio.wait(calls)  # the others get the same rows, of the first batch of the new epoch
    assert [rows(call) for call in calls] == [[rank] for rank in range(MANY)]
    assert (bench.task.epoch, bench.task.next_batch_index) == (1, 1)


async def test_stale_calls_end_a_few_a_turn(bench):
    calls = [bench.ask((rank, MANY, 0), epoch=0) for rank in range(MANY)]
    await turns()
    reset(bench.catalog, bench.task, keep_consumed=False)
    assert await most_done_in_a_turn(calls) <= MOST_A_TURN
    assert all(isinstance(call.exception(), StaleEpochError) for call in calls)


async def test_ranks_that_ask_alike_fail_alike_and_a_few_a_turn(bench):
    def refuse(view, request):
        if view.ready(1).size:
            raise InvalidArgumentError("no")

    sampler = Whenever(refuse)
    calls = [bench.ask((rank, MANY, 0), batch_size=1, sampler=sampler) for rank in range(MANY)]
    await turns()
    bench.insert(MANY)
    assert await most_done_in_a_turn(calls) <= MOST_A_TURN
    assert all(isinstance(call.exception(), InvalidArgumentError) for call in calls)


async def test_the_end_reaches_queue_workers_a_few_a_turn(bench):
    calls = [bench.ask(batch_size=1) for _ in range(MANY)]
    await turns()
    seal(bench.catalog)
    assert await most_done_in_a_turn(calls) <= MOST_A_TURN
    assert {call.result() for call in calls} == {EndCounts(consumed_count=0)}


async def test_an_end_that_no_longer_holds_reaches_nobody_else(bench):
    calls = [bench.ask(batch_size=1, finite=True) for _ in range(MANY)]
    await turns()
    bench.insert(1)  # all that was inserted is consumed by the first, so the others are at their end
    await until_some_are_done(calls)
    while sum(call.done() for call in calls) < 2:
        await turns(1)
    bench.insert(1)
    await asyncio.wait(calls)
    claimed = [call.result().rows.tolist() for call in calls if not isinstance(call.result(), EndCounts)]
    assert claimed == [[0], [1]]


@pytest.mark.parametrize("ranked", [True, False])
async def test_a_removed_partition_ends_all_who_wait_a_few_a_turn(catalog, ranked):
    catalog.create("train", PartitionSettings())
    calls = [
        asyncio.ensure_future(catalog.claim("train", b"", asks((rank, MANY, 0) if ranked else None), 1e6))
        for rank in range(MANY)
    ]
    await turns()
    catalog.remove("train", b"")
    assert await most_done_in_a_turn(calls) <= MOST_A_TURN
    assert all(isinstance(call.exception(), PartitionClearedError) for call in calls)


async def test_nothing_is_handed_out_of_a_partition_removed_while_many_are_served(catalog):
    partition = catalog.write("train", b"", new_write(1, ("y",))).partition
    calls = [asyncio.ensure_future(catalog.claim("train", b"", asks(batch_size=1), 1e6)) for _ in range(MANY)]
    await turns()
    catalog.write("train", b"", new_write(MANY, ("x",)))
    await until_some_are_done(calls)
    catalog.remove("train", b"")
    served_count = partition.tasks["t"].consumed_count
    await asyncio.wait(calls)
    assert partition.tasks["t"].consumed_count == served_count
    assert [isinstance(call.exception(), PartitionClearedError) for call in calls] == [
        call >= served_count for call in range(MANY)
    ]


async def test_a_plan_under_way_hands_out_nothing_of_a_removed_partition(catalog):
    slow = SlowSampler(SequentialSampler())
    partition = catalog.write("train", b"", new_write(2, ("x",))).partition
    call = asyncio.ensure_future(catalog.claim("train", b"", asks(sampler=slow), 1e6))
    await slow.started.wait()
    catalog.remove("train", b"")
    slow.go.set()
    await asyncio.wait([call])
    assert isinstance(call.exception(), PartitionClearedError)
    await turns()
    assert partition.tasks["t"].consumed_count == 0


async def test_those_who_wait_for_a_partition_join_in_order_a_few_a_turn(catalog):
    calls = [asyncio.ensure_future(catalog.claim("train", b"", asks(batch_size=1), 1e6)) for _ in range(MANY)]
    await turns()
    partition = catalog.create("train", PartitionSettings())
    counts = [0]
    while counts[-1] < MANY:
        await turns(1)
        counts.append(catalog.waiting_count(partition, "t"))
    assert max(np.diff(counts)) <= MOST_A_TURN
    catalog.write("train", b"", new_write(MANY, ("x",)))
    await asyncio.wait(calls)
    assert [call.result().answer.rows.tolist() for call in calls] == [[row] for row in range(MANY)]


async def test_a_partition_that_is_gone_before_all_have_joined_is_waited_for_again(catalog):
    calls = [asyncio.ensure_future(catalog.claim("train", b"", asks(batch_size=1), 1e6)) for _ in range(MANY)]
    await turns()
    first = catalog.create("train", PartitionSettings())
    while not catalog.waiting_count(first, "t"):
        await turns(1)
    joined_count = catalog.waiting_count(first, "t")
    assert joined_count < MANY
    catalog.remove("train", b"")
    await asyncio.wait(calls[:joined_count])
    await turns()
    catalog.write("train", b"", new_write(MANY, ("x",)))
    await asyncio.wait(calls)
    refused = [call for call in calls if isinstance(call.exception(), PartitionClearedError)]
    claimed = [call.result().answer.rows.tolist() for call in calls if call not in refused]
    assert refused
    assert sorted(claimed) == [[row] for row in range(MANY - len(refused))]


def fresh(policy):
    """Return a condition: a version not older than the published one."""
    return (Condition("version", ">=", published=Published(policy)),)


async def test_a_version_wakes_those_alone_whose_conditions_compare_with_it(catalog):
    """One training job publishes often; the claims of the others must not look at their samples again each time."""
    looks, calls = [], []
    for name, where in (("a", fresh("actor")), ("b", fresh("critic")), ("c", ())):
        catalog.write(name, b"", new_write(2, ("x",), meta=[{"version": 1}] * 2))
        sampler = Whenever(lambda view, request, name=name: looks.append(name))
        calls.append(asyncio.ensure_future(catalog.claim(name, b"", asks(sampler=sampler, where=where), 1e6)))
    await turns()
    looks.clear()
    catalog.publish(VersionPublished(policy="actor", version=1), ())
    await turns()
    assert looks == ["a"]
    catalog.drain()
    await asyncio.wait(calls)


async def test_a_version_that_comes_while_a_plan_is_made_counts(catalog):
    catalog.write("train", b"", new_write(2, ("x",), meta=[{"version": 1}] * 2))
    slow = SlowSampler(SequentialSampler())
    call = asyncio.ensure_future(catalog.claim("train", b"", asks(sampler=slow, where=fresh("actor")), 1e6))
    await slow.started.wait()  # it has seen that nobody has published
    catalog.publish(VersionPublished(policy="actor", version=1), ())
    slow.go.set()
    await asyncio.wait([call], timeout=30)
    assert call.result().answer.rows.tolist() == [0, 1]
