"""The runner: faults of a sampler become errors of its own request."""

import asyncio
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fake_view import parts, view_of_samples

from tq_service.errors import InvalidArgumentError, SamplerError, SamplerTimeoutError
from tq_service.journal.codec import decoder, encode, unpack
from tq_service.samplers import Pack, Plan, PlanRequest, PlanRunner, RankPlan, Sampler, SequentialSampler
from tq_service.state.ledger import RecordedPlan
from tq_service.state.plan import MustBeAwaited

REQUEST = PlanRequest(batch_size=2, min_size=1, rank_count=2)
QUEUE = PlanRequest(batch_size=2, min_size=1, ranked=False)


class Answers(Sampler):
    """Returns, or raises, what it is told, inline or in a thread."""

    name = "answers"

    def __init__(self, answer, *, quick):
        self.answer = answer
        self.quick = quick
        self.threads = []

    def runs_inline(self, request):
        return self.quick

    def plan(self, view, request):
        self.threads.append(threading.current_thread())
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Hangs(Sampler):
    """Does not return until released."""

    name = "hangs"

    def __init__(self):
        self.started, self.released = threading.Event(), threading.Event()
        self.thread = None

    def plan(self, view, request):
        self.thread = threading.current_thread()
        self.started.set()
        self.released.wait(60)
        return Plan.of([view.ready(request.batch_size)])


class AsyncSampler(Sampler):
    name = "async"

    def __init__(self, behave):
        self.behave = behave

    async def plan(self, view, request):
        return await self.behave(view)


@pytest.fixture
def hangs():
    sampler = Hangs()
    yield sampler
    sampler.released.set()


def rows(*values):
    return np.array(values, dtype=np.int64)


def one_rank(*steps, count=2):
    return Plan(ranks=(RankPlan(rows=np.arange(count), steps=steps),))


async def plan_of(runner, sampler, view, request):
    """Return the plan of a sampler that runs inline, or in a thread."""
    return runner.run_inline(sampler, view, request) if sampler.quick else await runner.run(sampler, view, request)


async def test_samplers_run_inline_or_in_a_daemon_thread():
    quick, heavy = (Answers(Plan.of([[1], [2]]), quick=quick) for quick in (True, False))
    for sampler in (quick, heavy):
        assert parts(await plan_of(PlanRunner(), sampler, view_of_samples(4), REQUEST)) == [[1], [2]]
    assert quick.threads == [threading.main_thread()]
    assert heavy.threads[0] is not threading.main_thread()
    assert heavy.threads[0].daemon


async def test_a_sampler_that_may_run_inline_runs_in_a_thread_too():
    """Where its view takes too long for the event loop."""
    quick = Answers(Plan.of([[1], [2]]), quick=True)
    assert parts(await PlanRunner().run(quick, view_of_samples(4), REQUEST)) == [[1], [2]]
    assert quick.threads[0] is not threading.main_thread()


@pytest.mark.parametrize("quick", [True, False])
async def test_no_plan_is_an_answer(quick):
    assert await plan_of(PlanRunner(), Answers(None, quick=quick), view_of_samples(0), REQUEST) is None


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("error", [KeyError("length"), StopIteration(3), SystemExit(1), asyncio.CancelledError("own")])
async def test_what_a_sampler_raises_becomes_a_sampler_error(quick, error):
    with pytest.raises(
        SamplerError, match=f"'answers' raised {type(error).__name__}: .*no samples were consumed"
    ) as caught:
        await plan_of(PlanRunner(), Answers(error, quick=quick), view_of_samples(4), REQUEST)
    assert caught.value.__cause__ is error
    assert caught.value.metadata == {"sampler": "answers", "exception": type(error).__name__}


@pytest.mark.parametrize("quick", [True, False])
async def test_errors_of_the_service_pass_through(quick):
    error = InvalidArgumentError("no lengths", field="total_lengths")
    with pytest.raises(InvalidArgumentError) as caught:
        await plan_of(PlanRunner(), Answers(error, quick=quick), view_of_samples(4), REQUEST)
    assert caught.value is error
    assert caught.value.__cause__ is None


async def test_a_quick_plan_is_made_at_once():
    runner = PlanRunner()
    quick = Answers(Plan.of([[1], [2]]), quick=True)
    assert parts(runner.run_inline(quick, view_of_samples(4), REQUEST)) == [[1], [2]]
    assert runner.run_inline(Answers(None, quick=True), view_of_samples(4), REQUEST) is None
    with pytest.raises(SamplerError, match="'answers' raised KeyError"):
        runner.run_inline(Answers(KeyError("x"), quick=True), view_of_samples(4), REQUEST)
    with pytest.raises(SamplerError, match="parts for 1 ranks"):
        runner.run_inline(Answers(Plan.of([[1]]), quick=True), view_of_samples(4), REQUEST)


async def test_what_must_be_awaited_is_not_made_at_once():
    async def plan(view):
        raise AssertionError("nobody awaits it")

    class Returns(Sampler):
        name = "returns"

        def plan(self, view, request):
            return plan(view)

    for sampler in (AsyncSampler(plan), Returns()):
        with pytest.raises(MustBeAwaited):
            PlanRunner().run_inline(sampler, view_of_samples(4), REQUEST)
    await asyncio.sleep(0)


async def test_a_failing_check_is_an_error_of_the_sampler():
    class Fails(SequentialSampler):
        def check(self, request):
            raise KeyError("x")

    with pytest.raises(SamplerError, match="'sequential' raised KeyError"):
        PlanRunner().check(Fails(), REQUEST)


async def test_a_hung_sampler_times_out_and_the_others_go_on(hangs):
    runner = PlanRunner(max_threads=2, timeout_seconds=0.02)
    with pytest.raises(SamplerTimeoutError, match=r"'hangs' has not returned within 0.02 s"):
        await runner.run(hangs, view_of_samples(4), QUEUE)
    assert runner.hung_samplers == ["hangs"]
    healthy = Answers(Plan.of([[1]]), quick=True)
    assert parts(await plan_of(runner, healthy, view_of_samples(4), QUEUE)) == [[1]]
    assert parts(await runner.run(healthy, view_of_samples(4), QUEUE)) == [[1]]


async def test_heavy_plans_are_refused_while_all_threads_hang(hangs):
    runner = PlanRunner(max_threads=1, timeout_seconds=0.02)
    with pytest.raises(SamplerTimeoutError):
        await runner.run(hangs, view_of_samples(4), QUEUE)
    heavy = Answers(Plan.of([[1]]), quick=False)
    with pytest.raises(SamplerTimeoutError, match="could not run because all 1 planning threads are stuck in 'hangs'"):
        await runner.run(heavy, view_of_samples(4), QUEUE)
    assert not heavy.threads
    quick = Answers(Plan.of([[1]]), quick=True)
    assert parts(runner.run_inline(quick, view_of_samples(4), QUEUE)) == [[1]]

    hangs.released.set()
    hangs.thread.join()
    for _ in range(3):  # the thread's end, its future and the future's callback each take a turn of the loop
        await asyncio.sleep(0)
    assert runner.hung_samplers == []
    assert parts(await runner.run(heavy, view_of_samples(4), QUEUE)) == [[1]]


async def test_plans_wait_for_a_thread(hangs):
    runner = PlanRunner(max_threads=1, timeout_seconds=30)
    first = asyncio.ensure_future(runner.run(hangs, view_of_samples(4), QUEUE))
    second = asyncio.ensure_future(runner.run(Answers(Plan.of([[3]]), quick=False), view_of_samples(4), QUEUE))
    await asyncio.to_thread(hangs.started.wait)
    assert not second.done()
    hangs.released.set()
    assert parts(await first) == [[0, 1]]
    assert parts(await second) == [[3]]


async def test_waiting_for_a_thread_has_an_end(hangs):
    runner = PlanRunner(max_threads=1, timeout_seconds=0.05)
    both = [
        runner.run(hangs, view_of_samples(4), QUEUE),
        runner.run(Answers(None, quick=False), view_of_samples(4), QUEUE),
    ]
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, SamplerTimeoutError)
    assert isinstance(second, SamplerTimeoutError)
    assert "did not get one of the 1 planning threads" in str(second)


async def test_a_caller_that_leaves_keeps_the_thread_counted(hangs):
    runner = PlanRunner(max_threads=1, timeout_seconds=30)
    leaving = asyncio.ensure_future(runner.run(hangs, view_of_samples(4), QUEUE))
    await asyncio.to_thread(hangs.started.wait)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    waiting = asyncio.ensure_future(runner.run(Answers(Plan.of([[3]]), quick=False), view_of_samples(4), QUEUE))
    await asyncio.sleep(0)
    assert not waiting.done()
    hangs.released.set()
    assert parts(await waiting) == [[3]]


async def test_async_samplers_are_awaited():
    async def behave(view):
        await asyncio.sleep(0)
        return Plan.of([view.ready(2)])

    assert parts(await PlanRunner().run(AsyncSampler(behave), view_of_samples(4), QUEUE)) == [[0, 1]]


@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("own"), SystemExit(1), asyncio.CancelledError()])
async def test_async_samplers_that_raise(error):
    async def behave(view):
        raise error

    with pytest.raises(SamplerError, match=f"'async' raised {type(error).__name__}"):
        await PlanRunner().run(AsyncSampler(behave), view_of_samples(4), QUEUE)


async def test_async_samplers_that_hang_and_ignore_cancellation():
    gone, cancelled = asyncio.Event(), asyncio.Event()

    async def behave(view):
        try:
            await gone.wait()
        except asyncio.CancelledError:
            cancelled.set()
            await gone.wait()
            raise KeyError("too late for anybody") from None

    with pytest.raises(SamplerTimeoutError, match="'async' has not returned"):
        await PlanRunner(timeout_seconds=0.02).run(AsyncSampler(behave), view_of_samples(4), QUEUE)
    await cancelled.wait()
    gone.set()


async def test_async_samplers_are_cancelled_with_their_caller():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def behave(view):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    leaving = asyncio.ensure_future(PlanRunner().run(AsyncSampler(behave), view_of_samples(4), QUEUE))
    await started.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await cancelled.wait()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([[1], [2]], "a list; expected a Plan or None"),
        (Plan(ranks=[rows(1), rows(2)]), "expected a tuple of RankPlan"),
        (Plan.of([[1]]), "parts for 1 ranks; expected one part for each of 2"),
        (Plan.of([[], []]), "a plan without rows"),
        (Plan.of([[1, 2], [3, 1]]), "row 1 more than once"),
        (Plan.of([[1, 1], [3]]), "row 1 more than once"),
        (Plan.of([[[1]], [[3]]]), r"rows of rank 0 as an array of int64 with shape \(1, 1\)"),
        (
            Plan(ranks=(RankPlan(rows=rows(1).astype(np.int32)), RankPlan(rows=rows(2)))),
            "rows of rank 0 as an array of int32",
        ),
        (Plan(ranks=(RankPlan(rows=[1]), RankPlan(rows=rows(2)))), "rows of rank 0 as a list"),
        (
            Plan(
                ranks=(
                    RankPlan(rows=rows(1), steps=((Pack(positions=rows(0)),),)),
                    RankPlan(rows=rows(2), steps=()),
                )
            ),
            r"\[1\] packs per step for rank 0 and \[\] for rank 1",
        ),
    ],
)
async def test_plans_that_are_none(plan, message):
    with pytest.raises(SamplerError, match=message):
        await plan_of(PlanRunner(), Answers(plan, quick=True), view_of_samples(4), REQUEST)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (one_rank((Pack(positions=rows(0, 2)),)), r"positions 0 to 2 for rank 0; expected positions in \[0, 2\)"),
        (one_rank((Pack(positions=rows(-1)),)), "positions -1 to -1"),
        (one_rank((Pack(positions=rows(0)), Pack(positions=rows(0)))), "position 0 of rank 0 in two packs"),
        (one_rank((Pack(positions=rows(0, 1), lengths=rows(5)),)), "1 lengths for 2 positions"),
        (
            one_rank((Pack(positions=rows(0, 1), lengths=np.array([1.5, 2.5])),)),
            "lengths of rank 0 as an array of float64",
        ),
        (
            one_rank((Pack(positions=rows(0, 1), lengths=np.array([True, False])),)),
            "lengths of rank 0 as an array of bool",
        ),
        (
            one_rank((Pack(positions=rows(0, 1), lengths=np.array([1, None])),)),
            "lengths of rank 0 as an array of object",
        ),
        (one_rank((Pack(positions=rows(0, 1), lengths=[3, 4]),)), "lengths of rank 0 as a list"),
        (one_rank((Pack(positions=rows(0, 1), lengths=rows(3, 4)[:, None]),)), r"lengths of rank 0 .*shape \(2, 1\)"),
        (one_rank((Pack(positions=rows(0, 1), lengths=rows(3, -4)),)), "a length of -4 for rank 0"),
        (one_rank((Pack(positions=np.ma.masked_equal(rows(0, 1), 1)),)), "positions of rank 0 as a MaskedArray"),
        (one_rank((Pack(positions=rows(0), padding_tokens=-1),)), "padding_tokens of -1"),
        (one_rank((Pack(positions=rows(0), padding_tokens=1.0),)), "padding_tokens as a float"),
        (one_rank((Pack(positions=rows(0), padding_tokens=np.float64(1)),)), "padding_tokens as a float64"),
        (one_rank((Pack(positions=rows(0), padding_tokens=np.bool_(True)),)), "padding_tokens as a bool"),
        (one_rank((Pack(positions=rows(0), padding_tokens=True),)), "padding_tokens as a bool"),
        (one_rank((Pack(positions=rows(0), padding_tokens=2**63),)), "padding_tokens of 9223372036854775808"),
        (one_rank([Pack(positions=rows(0))]), "as the steps of rank 0"),
        (one_rank(("pack",)), "a str among the packs"),
        (one_rank((Pack(positions=[0]),)), "positions of rank 0 as a list"),
        (Plan(ranks=(RankPlan(rows=rows(1), steps=3),)), "3 as the steps of rank 0"),
    ],
)
async def test_packs_that_are_none(plan, message):
    with pytest.raises(SamplerError, match=message):
        await plan_of(PlanRunner(), Answers(plan, quick=True), view_of_samples(4), QUEUE)


async def test_steps_and_packs_that_are_right():
    plan = one_rank((Pack(positions=rows(1), lengths=rows(7)), Pack(positions=rows())), (Pack(positions=rows(0)),))
    ran = await PlanRunner().run(Answers(plan, quick=False), view_of_samples(4), QUEUE)
    assert parts(ran) == parts(plan)
    shapes = [[(pack.positions.tolist(), pack.padding_tokens) for pack in step] for step in ran.ranks[0].steps]
    assert shapes == [[([1], 0), ([], 0)], [([0], 0)]]
    assert ran.ranks[0].steps[0][0].lengths.tolist() == [7]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedPack(Pack):
    """A pack of a user, who notes something on it."""

    note: str = "mine"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedPlan(Plan):
    """A plan of a user."""

    note: str = "mine"


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("padding", [np.int64(7), np.uint8(7), np.int16(7), 7])
async def test_a_plan_that_passes_is_of_plain_values(padding, quick):
    """The journal, and the version that reads it, know the integers and classes of plans, and no others."""
    pack = NotedPack(positions=rows(1, 0), lengths=rows(3, 4), padding_tokens=padding)
    plan = NotedPlan(ranks=one_rank((pack,)).ranks, consumed=rows(0))
    ran = await plan_of(PlanRunner(), Answers(plan, quick=quick), view_of_samples(4), QUEUE)
    kept = ran.ranks[0].steps[0][0]
    assert (type(ran), type(ran.ranks[0]), type(kept), type(kept.padding_tokens)) == (Plan, RankPlan, Pack, int)
    assert kept.padding_tokens == 7
    recorded = RecordedPlan.of(ran)
    read = decoder(RecordedPlan)(unpack(encode(recorded)))
    assert read.steps[0][0][0].padding_tokens == 7
    assert (read.rows.tolist(), read.consumed.tolist()) == (recorded.rows.tolist(), [0])


def test_bad_settings():
    with pytest.raises(ValueError, match="max_threads: got 0"):
        PlanRunner(max_threads=0)
    with pytest.raises(ValueError, match="timeout_seconds: got 0"):
        PlanRunner(timeout_seconds=0)


def test_a_hung_sampler_does_not_keep_the_process_from_exiting():
    program = """
import asyncio, threading
from tq_service.errors import SamplerTimeoutError
from tq_service.samplers import PlanRequest, PlanRunner, Sampler

class Hangs(Sampler):
    name = "hangs"
    def plan(self, view, request):
        threading.Event().wait()

async def main():
    try:
        await PlanRunner(timeout_seconds=0.01).run(Hangs(), None, PlanRequest(batch_size=1, min_size=1))
    except SamplerTimeoutError:
        print("timed out")

asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout == "timed out\n"
