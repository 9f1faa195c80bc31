"""Where the time of a trainer's step goes: shares of made times, the sentence, the fit, and loaders end to end."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

import tq_service as tq
from tq_service.client_probes import Collected, Span, Stage, collected_here, collecting, probes, timed
from tq_service.observe.clients import instrument
from tq_service.step_times import CallCost, StepTimer, StepTimes, fit_calls

sys.path.insert(0, str(Path(__file__).parent.parent))
from live_server import LiveServer, LoopThread


def note(*values: Any, **named: Any) -> None:
    """Collect a stage as clients do."""
    collected = collected_here.get()
    if collected is not None:
        collected.note(*values, **named)


def note_batch(spans: list[Span], batch_count: int) -> None:
    """Collect a batch as loaders do."""
    collected = collected_here.get()
    assert collected is not None
    collected.add(spans, batch_count)


CAUSES = [stage for stage in Stage if stage not in {Stage.WORK, Stage.LOADER}]


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class MadeLoader:
    """Yields batches that take made times in each stage, a part of which lies behind the trainer's work."""

    def __init__(self, clock: Clock, stages: dict[Stage, float], *, ahead: float = 0.0, micro_batches: int = 1) -> None:
        self._clock = clock
        self._stages = stages
        self._ahead = ahead
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[int]:
        while True:
            began_at, spans = self._clock.now - self._ahead, []
            at = began_at
            for stage, seconds in self._stages.items():
                spans.append(Span(stage, at, at + seconds))
                at += seconds
            self._clock.now = max(self._clock.now, at)
            note_batch(spans, batch_count=1)
            yield from range(self._micro_batches)


def trained(loader: Any, clock: Clock, timer: StepTimer, *, steps: int, work: float) -> StepTimes:
    for number, _ in enumerate(timed(loader, timer)):
        if number == steps:
            break
        clock.now += work
    return timer.report().times


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> StepTimer:
    return StepTimer(clock=clock)


@pytest.mark.parametrize("stage", CAUSES)
def test_a_wait_counts_for_the_stage_that_caused_it(clock: Clock, timer: StepTimer, stage: Stage) -> None:
    times = trained(MadeLoader(clock, {stage: 3.0}), clock, timer, steps=4, work=1.0)
    assert times.batch_count == 5
    # The first batch was waited for without any work before it.
    assert times.seconds == pytest.approx({each: 15.0 if each is stage else 0.0 for each in Stage} | {Stage.WORK: 4.0})
    assert times.shares[stage] == pytest.approx(15 / 19)


def test_stages_of_one_wait_are_told_apart(clock: Clock, timer: StepTimer) -> None:
    stages = {Stage.ROLLOUTS: 4.0, Stage.PLAN: 0.5, Stage.TRANSFER: 2.0, Stage.HOST: 1.0, Stage.DEVICE: 0.5}
    times = trained(MadeLoader(clock, stages), clock, timer, steps=2, work=8.0)
    assert times.seconds == pytest.approx(
        {Stage.WORK: 16.0, Stage.LOADER: 0.0, Stage.PUT: 0.0} | {stage: 3 * each for stage, each in stages.items()}
    )
    assert times.data_plane_share == pytest.approx(12 / 40)


def test_what_was_fetched_during_the_work_costs_nothing(clock: Clock, timer: StepTimer) -> None:
    stages = {Stage.ROLLOUTS: 4.0, Stage.TRANSFER: 2.0}  # the batch is begun 5 s before it is asked for
    times = trained(MadeLoader(clock, stages, ahead=5.0), clock, timer, steps=3, work=10.0)
    assert times.rollouts_seconds == 0
    assert times.transfer_seconds == pytest.approx(4.0)
    assert times.work_seconds == pytest.approx(30.0)


def test_a_wait_that_no_stage_explains_is_the_loaders(clock: Clock, timer: StepTimer) -> None:
    def slow() -> Iterator[int]:
        while True:
            clock.now += 2.0
            note_batch([Span(Stage.TRANSFER, clock.now - 1.5, clock.now - 0.5)], batch_count=1)
            yield 0

    times = trained(slow(), clock, timer, steps=1, work=1.0)
    assert times.seconds == pytest.approx(
        dict.fromkeys(Stage, 0.0) | {Stage.WORK: 1.0, Stage.TRANSFER: 2.0, Stage.LOADER: 2.0}
    )


def test_calls_of_the_trainer_are_not_its_work(clock: Clock, timer: StepTimer) -> None:
    for number, _ in enumerate(timed(MadeLoader(clock, {Stage.PLAN: 1.0}), timer)):
        if number == 2:
            break
        clock.now += 3.0
        note(Stage.PUT, clock.now - 1.0, clock.now, 1000, is_call=True)
    report = timer.report()
    assert (report.times.work_seconds, report.times.put_seconds) == (4.0, 2.0)
    assert [(cost.stage, cost.call_count, cost.mean_bytes) for cost in report.calls] == [(Stage.PUT, 2, 1000)]


def test_stages_at_once_count_once_for_the_last_one(clock: Clock, timer: StepTimer) -> None:
    calls = Collected(spans=[Span(Stage.ROLLOUTS, 0, 8), Span(Stage.TRANSFER, 2, 6), Span(Stage.HOST, 5, 7)])
    timer.add(0.0, 10.0, 10.0, calls=calls, waits=Collected(batch_count=1))
    assert timer.report().times.seconds == pytest.approx(
        dict.fromkeys(Stage, 0.0) | {Stage.ROLLOUTS: 3.0, Stage.TRANSFER: 3.0, Stage.HOST: 2.0, Stage.WORK: 2.0}
    )


@given(
    spans=st.lists(
        st.builds(
            lambda stage, begin, length: Span(stage, begin, begin + length),
            st.sampled_from(CAUSES), st.integers(-5, 25), st.integers(0, 20),
        ),
        max_size=8,
    ),
    asked_at=st.integers(0, 20),
)  # fmt: skip
def test_every_second_counts_once(spans: list[Span], asked_at: int) -> None:
    timer = StepTimer()
    timer.add(0, asked_at, 20, calls=Collected(spans=spans), waits=Collected(spans=spans, batch_count=1))
    seconds = timer.report().times.seconds
    assert sum(seconds.values()) == 20
    covered = {second for second in range(20) for span in spans if span.began_at <= second < span.ended_at}
    assert seconds[Stage.WORK] == len(set(range(asked_at)) - covered)
    assert seconds[Stage.LOADER] == len(set(range(asked_at, 20)) - covered)


def test_micro_batches_belong_to_their_batch(clock: Clock) -> None:
    timer = StepTimer(2, clock=clock)
    times = trained(
        MadeLoader(clock, {Stage.TRANSFER: 1.0}, micro_batches=3), clock, timer, steps=9, work=2.0
    )  # the last two batches: one of three micro-batches, and the first one of another
    assert times.batch_count == 2
    assert (times.transfer_seconds, times.work_seconds) == (2.0, 8.0)


def test_loops_without_a_loader_measure_their_steps(clock: Clock, timer: StepTimer) -> None:
    def call(stage: Stage, seconds: float) -> None:
        clock.now += seconds
        note(stage, clock.now - seconds, clock.now)

    for _ in range(2):
        with timer.step():
            call(Stage.ROLLOUTS, 5.0)
            call(Stage.TRANSFER, 1.0)
            clock.now += 4.0
    with pytest.raises(ValueError, match="not counted"), timer.step():
        clock.now += 50.0
        raise ValueError("not counted")
    clock.now += 50.0  # between steps
    assert timer.report().times.seconds == pytest.approx(
        dict.fromkeys(Stage, 0.0) | {Stage.ROLLOUTS: 10.0, Stage.TRANSFER: 2.0, Stage.WORK: 8.0}
    )
    timer.reset()
    assert str(timer) == "no steps were measured"


def test_nothing_is_collected_where_nobody_asks() -> None:
    note(Stage.TRANSFER, 0.0, 1.0)
    with collecting() as outer:
        note(Stage.PLAN, 0.0, 1.0)
        with collecting() as inner:
            note(Stage.HOST, 0.0, 1.0)
    note(Stage.TRANSFER, 0.0, 1.0)
    assert [span.stage for span in (*outer.spans, *inner.spans)] == [Stage.PLAN, Stage.HOST]
    with collecting() as endless:
        for _ in range(10_000):
            note(Stage.PUT, 0.0, 1.0)
    assert len(endless.spans) == 4096


def test_a_loader_leaves_the_collector_around_it(clock: Clock, timer: StepTimer) -> None:
    with collecting() as outer:
        assert list(timed(range(3), timer)) == [0, 1, 2]
        for _ in timed(range(3), timer):
            break
        note(Stage.PUT, 0.0, 1.0)
    assert [span.stage for span in outer.spans] == [Stage.PUT]


def test_reports_for_the_service_are_apart(clock: Clock, timer: StepTimer) -> None:
    assert timer.take_report() is None  # nothing yet
    timer.add(0.0, 1.0, 2.0, calls=Collected(), waits=Collected(batch_count=1))
    report = timer.take_report()
    assert report is not None
    assert report.work_seconds == 1.0
    assert timer.take_report() is None
    clock.now += 2.0
    assert timer.take_report() == report


@pytest.mark.parametrize("count", [0, -1])
def test_a_timer_needs_a_batch(count: int) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match="batch_count is"):
        StepTimer(count)


# The sentence


@pytest.mark.parametrize(
    ("stage", "begin"),
    [
        (Stage.ROLLOUTS, "waiting for rollouts takes 62 % of the step: add rollout workers, or raise max_staleness"),
        (Stage.PLAN, "waiting for plans takes 62 % of the step: fetch further ahead"),
        (Stage.TRANSFER, "waiting for bytes takes 62 % of the step: request fewer data_fields"),
        (Stage.HOST, "decoding and copying on the host takes 62 % of the step: use num_workers"),
        (Stage.DEVICE, "copies to the device take 62 % of the step: set device"),
        (Stage.LOADER, "the loader itself takes 62 % of the step: check process_batch_fn"),
        (Stage.PUT, "the trainer's puts take 62 % of the step: put all columns in one call"),
    ],
)
def test_the_sentence_names_the_worst_stage(stage: Stage, begin: str) -> None:
    times = StepTimes.of({stage: 62.0, Stage.WORK: 35.0} | ({Stage.PLAN: 3.0} if stage is not Stage.PLAN else {}), 1)
    if stage is Stage.PLAN:
        times = StepTimes.of({stage: 62.0, Stage.WORK: 38.0}, 1)
    assert times.advice.startswith(begin)
    if stage is Stage.ROLLOUTS:
        assert times.advice.endswith("the data plane takes 3.0 %")


def test_the_sentence_says_when_nothing_is_to_be_done() -> None:
    times = StepTimes.of({Stage.WORK: 96.0, Stage.ROLLOUTS: 3.0, Stage.TRANSFER: 1.0}, 1)
    assert times.advice == (
        "the trainer's own work takes 96 % of the step: neither rollouts (3.0 %) nor the data plane (1.0 %) slow it "
        "down"
    )
    assert StepTimes().advice == "no steps were measured"
    assert str(times) == "100.00 s per batch: work 96 %, rollouts 3.0 %, transfer 1.0 %"


def test_the_sentence_says_where_calls_are_too_small() -> None:
    calls = [(size, 0.010 + size / 1e9) for size in range(1000, 100_000, 5000)]
    timer = StepTimer()
    waits = Collected(batch_count=1)
    at = 0.0
    for size, seconds in calls:
        waits.add([Span(Stage.TRANSFER, at, at + seconds, size, is_call=True)])
        at += seconds
    timer.add(0.0, 0.0, at, calls=Collected(), waits=waits)
    report = timer.report()
    assert report.advice.endswith("Most of this is the fixed cost of 10.0 ms per call: fewer, larger calls cost less")
    text = str(report).splitlines()
    assert text[1] == report.advice
    assert text[2] == "transfer: 20 calls of 10.0 ms and 48.5 kB; 10.0 ms fixed per call, the rest at 1 GB/s"


def test_ranks_are_summed() -> None:
    ranks = [StepTimes.of({Stage.WORK: 1.0, Stage.ROLLOUTS: each}, 4) for each in (1.0, 3.0)]
    assert StepTimes.sum(ranks) == StepTimes(work_seconds=2.0, rollouts_seconds=4.0, batch_count=8, rank_count=2)
    assert StepTimes.sum([]) is None


# The fit


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_finds_both_numbers_among_outliers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(1e5, 5e7, 200)
    seconds = 0.002 + sizes / 2e9 + rng.normal(0, 1e-4, 200)
    seconds[rng.choice(200, 20, replace=False)] += rng.uniform(0.05, 0.5, 20)  # a pause of some kind
    fixed, rate = fit_calls(list(sizes), list(seconds)) or (0.0, 0.0)
    assert fixed == pytest.approx(0.002, rel=0.1)
    assert rate == pytest.approx(2e9, rel=0.1)


@given(fixed=st.floats(1e-5, 1.0), rate=st.floats(1e6, 1e11), count=st.integers(8, 60))
def test_the_fit_of_exact_calls_is_exact(fixed: float, rate: float, count: int) -> None:
    sizes = [1e6 * (1 + each) for each in range(count)]
    found = fit_calls(sizes, [fixed + size / rate for size in sizes])
    assert found is not None
    assert found[0] + sizes[0] / found[1] == pytest.approx(fixed + sizes[0] / rate, rel=1e-6)
    assert found[0] + sizes[-1] / found[1] == pytest.approx(fixed + sizes[-1] / rate, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([1000.0] * 50, [0.01] * 50),
        ([1000.0, 1200.0] * 25, [0.01, 0.012] * 25),
        ([0.0] * 50, [0.01] * 50),
        (list(range(1000, 51_000, 1000)), [1.0 - each / 100 for each in range(50)]),
    ],
    ids=["few calls", "one size", "like sizes", "no bytes", "larger is quicker"],
)
def test_no_fit_is_made_up(sizes: list[float], seconds: list[float]) -> None:
    assert fit_calls(sizes, seconds) is None
    cost = CallCost.of(Stage.TRANSFER, [(int(size), each) for size, each in zip(sizes, seconds, strict=True)])
    assert (cost.fixed_seconds, cost.bytes_per_second) == (None, None)
    assert "fixed" not in str(cost)


# Clients and loaders


@pytest.fixture(scope="module")
def live(loop_thread: LoopThread) -> Iterator[LiveServer]:
    with LiveServer(loop_thread) as started:
        yield started


@contextmanager
def filled_soon(live: LiveServer, partition_id: str, waiting_for: str = "t") -> Iterator[None]:
    """Put the samples of a partition once a claim has waited for them."""
    client = live.client()

    def fill() -> None:
        while not any(reason.waiting_count for reason in client.explain(partition_id, waiting_for)):
            time.sleep(0.01)
        client.put(partition_id, {"x": np.arange(80_000, dtype=np.int64).reshape(8, -1)})
        client.seal_partition(partition_id)

    filling = threading.Thread(target=fill)
    filling.start()
    yield
    filling.join()


def test_a_call_says_how_long_it_waited(live: LiveServer) -> None:
    client, timer = tq.Client(live.address), StepTimer()
    with client, filled_soon(live, "waited"), timer.step():
        asks = {"partition_id": "waited", "task_name": "t", "data_fields": ["x"], "batch_size": 8}
        meta = client.get_meta(**asks, max_wait=60.0)
        client.get_data(meta)
        client.put(meta, {"y": np.arange(8)})
    report = timer.report()
    seconds = report.times.seconds
    stages = (Stage.ROLLOUTS, Stage.PLAN, Stage.TRANSFER, Stage.HOST, Stage.PUT)
    assert all(seconds[stage] > 0 for stage in stages)
    costs = {cost.stage: cost for cost in report.calls}
    assert {stage: cost.call_count for stage, cost in costs.items()} == dict.fromkeys(stages[1:], 1)
    assert costs[Stage.TRANSFER].mean_bytes == costs[Stage.HOST].mean_bytes == 640_000
    assert costs[Stage.PUT].mean_bytes == 64


def test_an_async_loop_measures_what_it_awaits(live: LiveServer, loop_thread: LoopThread) -> None:
    timer = StepTimer()

    async def train() -> None:
        async with tq.AsyncClient(live.address) as client:
            with timer.step():
                await asyncio.gather(*(client.put(f"async-{n}", {"x": np.arange(4)}) for n in range(2)))

    loop_thread.run(train())
    assert [(cost.stage, cost.call_count) for cost in timer.report().calls] == [(Stage.PUT, 2)]


@pytest.mark.parametrize(
    "options", [{}, {"prefetch_factor": 0}, {"num_workers": 1}], ids=["ahead", "inline", "worker process"]
)
def test_a_loader_reports_to_the_service(live: LiveServer, options: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    from tq_service.data import StreamingDataLoader, StreamingDataset

    name, registry = f"loaded-{options}", CollectorRegistry()
    instrument(registry)
    try:
        dataset = StreamingDataset(
            live.address, batch_size=4, micro_batch_size=2, data_fields=["x"], partition_id=name, task_name="t",
            dp_rank=0, dp_size=1,
        )  # fmt: skip
        with StreamingDataLoader(dataset, **options) as loader:
            with filled_soon(live, name):
                assert len(list(loader)) == 4
            measured = loader.step_timer.report()
            live.client().put(f"{name}-next", {"x": np.arange(80_000, dtype=np.int64).reshape(8, -1)})
            live.client().seal_partition(f"{name}-next")
            assert measured.times == loader.step_timer.report().times  # time between two iterators does not count
            loader.step(f"{name}-next")
            assert len(list(loader)) == 4
        assert measured.times.batch_count == 2
        assert measured.times.rollouts_seconds > 0
        assert measured.times.work_seconds > 0
        assert measured.times.data_plane_share > 0
        costs = {cost.stage: cost for cost in measured.calls}
        assert costs[Stage.TRANSFER].call_count == costs[Stage.HOST].call_count == 2
        assert costs[Stage.TRANSFER].mean_bytes == 320_000
        shown = [
            task.step_times
            for partition in (name, f"{name}-next")
            for task in live.client().describe_partition(partition).tasks
        ]
        # The first claim of all had nothing to say, and how many of the others come at least 2 s later varies.
        assert any(times is not None and times.batch_count and times.rank_count == 1 for times in shown)
        assert registry.get_sample_value("tq_service_step_seconds_total", {"stage": "rollouts"}) == pytest.approx(
            measured.times.rollouts_seconds, rel=0.5, abs=1.0
        )
    finally:
        probes.clear()


def test_times_of_ranks_that_are_gone_are_not_summed(live: LiveServer) -> None:
    timers = [StepTimer() for _ in range(2)]
    client = live.client()
    client.put("ranks", {"x": np.arange(8)})
    for rank, timer in enumerate(timers):
        timer.add(0.0, 1.0 + rank, 3.0, calls=Collected(), waits=Collected(batch_count=1))
        with tq.Client(live.address) as own, timer.step():
            own.get_meta(
                partition_id="ranks", task_name="t", data_fields=["x"], batch_size=2, batch_index=0, dp_rank=rank,
                dp_size=2,
            )  # fmt: skip
    (task,) = client.describe_partition("ranks").tasks
    assert task.step_times is not None
    assert (task.step_times.work_seconds, task.step_times.loader_seconds) == (3.0, 3.0)
    assert (task.step_times.batch_count, task.step_times.rank_count) == (2, 2)


def test_the_service_refuses_times_that_cannot_be(live: LiveServer) -> None:
    timer = StepTimer()
    timer.add(0.0, -1.0, 0.0, calls=Collected(), waits=Collected(batch_count=1))
    timer._batches[0][Stage.WORK] = -1.0
    with (
        tq.Client(live.address) as client,
        timer.step(),
        pytest.raises(tq.errors.InvalidArgumentError, match="work_seconds"),
    ):
        client.get_meta(
            partition_id="none", task_name="t", data_fields=["x"], batch_size=2, batch_index=0, dp_rank=0, dp_size=1,
            max_wait=0.0,
        )  # fmt: skip
