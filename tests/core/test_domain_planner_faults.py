"""The planner while a plan is made: changes meanwhile, samplers that misbehave, rows that go."""

import asyncio
import math
import threading

import numpy as np
import pytest
from domain_support import SlowSampler, clear, clear_fields, meta, new_id, release, seal, set_meta, turns, update
from planner_bench import Bench, Whenever, finished, rows

from tq_service.errors import (
    ClaimReleasedError,
    InvalidArgumentError,
    MissingLengthError,
    PartitionClearedError,
    SamplerError,
    SamplerTimeoutError,
    SamplesClearedError,
)
from tq_service.samplers import (
    GRPOGroupNSampler,
    RankAwareSampler,
    Sampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from tq_service.serving import planner as planner_module
from tq_service.state.plan import Plan


@pytest.fixture
async def bench():
    return Bench()


# Samplers off the loop, and those that misbehave


async def test_a_row_put_while_a_plan_is_made_wakes_its_waiter(bench):
    """The plan saw nothing; that it is to be made again must not be forgotten with it."""
    slow = SlowSampler(SequentialSampler())
    call = bench.ask((0, 1, 0), sampler=slow)
    await slow.started.wait()
    bench.insert(2)
    slow.go.set()
    await turns(20)
    assert rows(call) == [0, 1]


async def test_rows_put_while_a_plan_is_made_make_no_short_batch(bench):
    """Grouped, so that the end is judged by rows and not by counts."""
    slow = SlowSampler(GRPOGroupNSampler(n_samples_per_prompt=2))
    bench.insert(2, groups=["a"] * 2, group_size=2)
    call = bench.ask((0, 1, 0), sampler=slow, batch_size=4)
    await slow.started.wait()
    bench.insert(2, (), groups=["b"] * 2, group_size=2)
    seal(bench.catalog)
    slow.go.set()
    await turns(20)
    assert not call.done()
    update(bench.catalog, [2, 3], ("x",))
    await turns(20)
    assert rows(call) == [0, 1, 2, 3]


async def test_an_async_sampler_that_calls_itself_quick_steps_over_no_row(bench):
    class Quick(SlowSampler):
        def runs_inline(self, request):
            return True

        async def plan(self, view, request):
            if not self.go.is_set():
                self.started.set()
                await self.go.wait()
            return self.inner.plan(view, request)

    quick = Quick(SequentialSampler())
    call = bench.ask((0, 1, 0), sampler=quick)
    await quick.started.wait()
    bench.insert(2)
    quick.go.set()
    await turns(20)
    assert rows(call) == [0, 1]


async def test_rows_cleared_while_they_are_planned_are_planned_again(bench):
    slow = SlowSampler(SequentialSampler())
    bench.insert(6)
    call = bench.ask((0, 1, 0), sampler=slow)
    await slow.started.wait()
    clear(bench.catalog, np.array([1]))
    slow.go.set()
    assert rows(await finished(call)) == [0, 2]
    assert slow.call_count == 2


async def test_rows_that_lose_a_field_while_they_are_planned_are_planned_again(bench):
    slow = SlowSampler(SequentialSampler())
    bench.insert(6)
    call = bench.ask((0, 1, 0), sampler=slow)
    await slow.started.wait()
    clear_fields(bench.catalog, ["x"], [1])
    slow.go.set()
    assert rows(await finished(call)) == [0, 2]
    assert slow.call_count == 2


async def test_rows_that_lose_a_field_while_the_end_is_looked_for_keep_the_task_waiting(bench):
    slow = SlowSampler(SequentialSampler())
    bench.insert(1)
    seal(bench.catalog)
    call = bench.ask((0, 1, 0), sampler=slow)
    await slow.started.wait()
    clear_fields(bench.catalog, ["x"], [0])
    slow.go.set()
    await turns(20)
    assert not call.done()
    update(bench.catalog, [0], ("x",))
    assert rows(await finished(call)) == [0]


async def test_commits_and_replays_go_on_while_a_plan_is_made_on_a_thread(bench):
    started, go = threading.Event(), threading.Event()

    def plan(view, request):
        started.set()
        go.wait(30)
        return SequentialSampler().plan(view, request)

    bench.insert(4)
    await bench.ask((0, 1, 0))
    call = bench.ask((0, 1, 1), sampler=Whenever(plan, quick=False))
    await asyncio.to_thread(started.wait)
    try:
        bench.insert(2000)
        assert rows(await finished(bench.ask((0, 1, 0)))) == [0, 1]
        clear(bench.catalog, np.arange(100, 2004))
        assert not call.done()
    finally:
        go.set()
    assert rows(await finished(call)) == [2, 3]
    assert bench.partition.table.pin_count == 0


@pytest.mark.parametrize("where", ["ranks", "queue"])
async def test_a_sampler_that_raises_harms_its_own_request_only(bench, where):
    def fail(view, request):
        raise RuntimeError("no luck")

    rank = (0, 1, 0) if where == "ranks" else None
    bench.insert(2)
    bad, good = bench.ask(rank, sampler=Whenever(fail)), bench.ask(rank)
    await asyncio.wait([bad, good])
    assert isinstance(bad.exception(), SamplerError)
    assert rows(good) == [0, 1]


class RaisesBeforePlanning(Sampler):
    """Raises where the planner asks what it needs."""

    name = "raises_before_planning"

    def __init__(self, error, where):
        self.error = error
        self.where = where

    def runs_inline(self, request):
        self._raise("runs_inline")
        return True

    @property
    def length(self):
        self._raise("length")

    def _raise(self, where):
        if self.where == where:
            raise self.error

    def plan(self, view, request):
        raise AssertionError("is not reached")


@pytest.mark.parametrize("where", ["runs_inline", "length"])
@pytest.mark.parametrize("error", [RuntimeError("no luck"), SystemExit(3)], ids=["error", "exit"])
@pytest.mark.parametrize("rank", [None, (0, 1, 0)], ids=["queue", "ranks"])
async def test_a_sampler_that_raises_before_it_plans_harms_its_own_request_only(bench, where, error, rank):
    waiting = bench.ask(rank)
    bad = await finished(bench.ask(rank, sampler=RaisesBeforePlanning(error, where)))
    assert isinstance(bad.exception(), SamplerError)
    assert "raises_before_planning" in str(bad.exception())
    assert not waiting.done()
    bench.insert(2)
    assert rows(await finished(waiting)) == [0, 1]


@pytest.mark.parametrize("foreign", [[0, 7], [0, 1], [0, -1]])
async def test_a_sampler_that_returns_rows_it_was_not_given_consumes_nothing(bench, foreign):
    bench.insert(1)
    bench.insert(1, state="held")
    call = await finished(bench.ask(sampler=Whenever(lambda view, request: Plan.of([np.array(foreign)]))))
    assert isinstance(call.exception(), SamplerError)
    assert "not ready" in str(call.exception())
    assert bench.task.consumed_count == 0


async def test_a_sampler_that_hangs_ends_with_its_time(bench):
    bench = Bench(timeout=0.01)
    bench.insert(2)
    call = await finished(bench.ask((0, 1, 0), sampler=SlowSampler(SequentialSampler())))
    assert isinstance(call.exception(), SamplerTimeoutError)
    assert rows(await finished(bench.ask((0, 1, 0)))) == [0, 1]


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("rank", [(0, 1, 0), None])
async def test_lengths_that_come_later_are_waited_for(bench, rank, is_sealed):
    """Whether or not a sample has one yet: set_custom_meta gives them to samples of a sealed partition too."""
    sampler = SeqlenBalancedSampler(length_key="total_lengths")
    call = bench.ask(rank, sampler=sampler, batch_size=1)
    bench.insert(2)
    if is_sealed:
        seal(bench.catalog)
    await turns()
    assert not call.done()
    set_meta(bench.catalog, np.array([1]), meta([{"total_lengths": 3}]))
    assert rows(await finished(call)) == [1]
    last = bench.ask(rank and (0, 1, 1), sampler=sampler, batch_size=1)
    await turns()
    assert not last.done()
    update(bench.catalog, [0], meta=[{"total_lengths": 4}])
    assert rows(await finished(last)) == [0]


@pytest.mark.parametrize("field", ["x", None])
async def test_lengths_that_a_field_never_has_are_an_error(bench, field):
    sampler = SeqlenBalancedSampler(length_field=field)
    call = bench.ask((0, 1, 0), sampler=sampler, batch_size=1)
    bench.insert(1)
    await turns()
    assert isinstance(call.exception(), MissingLengthError)
    assert bench.task.consumed_count == 0


@pytest.mark.parametrize("state", ["failed", "held", None])
async def test_a_length_that_is_none_stops_no_one_but_those_who_would_get_it(bench, state):
    sampler = SeqlenBalancedSampler()
    bench.insert(1, () if state == "failed" else ("x",), state=state or "live", meta=[{"total_lengths": -1}])
    if state is None:
        assert rows(await finished(bench.ask((0, 1, 0), batch_size=1))) == [0]
    bench.insert(2, meta=[{"total_lengths": 7}] * 2)
    index = bench.task.next_batch_index
    assert rows(await finished(bench.ask((0, 1, index), sampler=sampler))) == [1, 2]
    bench.insert(1, meta=[{"total_lengths": 1e300}])
    call = await finished(bench.ask((0, 1, index + 1), sampler=sampler, batch_size=1))
    assert isinstance(call.exception(), InvalidArgumentError)


# Claims whose rows go


async def test_a_claim_released_while_it_is_planned_is_not_given(bench):
    slow, request_id = SlowSampler(SequentialSampler()), new_id()
    bench.insert(2)
    call = bench.ask(sampler=slow, request_id=request_id)
    await slow.started.wait()
    assert release(bench.catalog, bench.task, request_id) == 0
    slow.go.set()
    await asyncio.wait([call])
    assert isinstance(call.exception(), ClaimReleasedError)
    assert bench.task.consumed_count == 0


async def test_rows_cleared_before_the_answer_arrives_are_not_given(bench, monkeypatch):
    monkeypatch.setattr(planner_module, "_TURN_SECONDS", math.inf)  # both are served in one turn of the loop
    call, rank = bench.ask(), bench.ask((0, 1, 0), sampler=RankAwareSampler())
    await turns()
    bench.insert(4)
    await bench.until_consumed(4)
    clear(bench.catalog, np.array([0, 2]))
    await asyncio.wait([call, rank])
    assert isinstance(call.exception(), SamplesClearedError)
    assert isinstance(rank.exception(), SamplesClearedError)
    assert not bench.task.claims  # the rest of it is claimable again
    assert bench.task.backlog == 1


async def test_waits_end_when_the_partition_is_cleared(bench):
    calls = [bench.ask(), bench.ask((0, 1, 0))]
    await turns()
    bench.planner.end(lambda: PartitionClearedError("gone"))
    await asyncio.wait(calls)
    assert all(isinstance(call.exception(), PartitionClearedError) for call in calls)
    with pytest.raises(PartitionClearedError):
        await bench.ask()
