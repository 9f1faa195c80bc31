"""Time breakdown of a trainer's steps.

`StepTimer` measures the stages of each step. `StepReport` shows each stage's share of the step time and gives advice.

A step ends when the trainer receives its next data. The step time consists of the trainer's own work and the stages
that it waited for. Fetching a batch while the trainer works does not prolong the step. A stage is therefore counted
only while the trainer waits for it::

    trainer   ── work ─────────────────────┐   waits   ┌── work ──
    loader        rollouts ── plan ── transfer ── host ┘
                                           └───────────┘ counted: the rest of transfer, and host
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any, Final

from tq_service.client_probes import Collected, Span, Stage, collecting, probes, step_report
from tq_service.errors import InvalidArgumentError

_BATCHES: Final = 64
_CALLS: Final = 256  # maximum number of calls per kind that are used to estimate their costs
_REPORT_SECONDS: Final = 2.0  # refresh interval of the live page

# Two parameters can only be fitted if the calls differ in size.
_LEAST_CALLS: Final = 8
_LEAST_RATIO: Final = 1.5  # minimum ratio between the sizes of large calls and small calls
_FIT_ROUNDS: Final = 30
_HUBER: Final = 1.345  # standard deviations up to which residuals have full weight; 95 % as efficient as least squares
_SIGMA_OF_MEDIAN: Final = 1.4826  # ratio of standard deviation to median absolute deviation, for normal distributions

_LITTLE: Final = 0.05  # share of the step time below which a stage is not worth optimizing


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds that trainer ranks spent on their latest batches, by stage. All stages except the first are waiting time.

    Attributes:
        work_seconds: time spent on the trainer's own work.
        rollouts_seconds: time spent waiting for the batch to become ready. The claim waited for samples, a version, a
            staleness limit or capacity (see `explain`).
        plan_seconds: time spent on calls to the controller, including planning and the network round trip.
        transfer_seconds: time spent transferring bytes from storage services.
        host_seconds: time spent decoding, copying, splitting and packing on the host.
        device_seconds: time that the host spent waiting for data to be copied to a device.
        loader_seconds: time that the loader spent on anything else, such as waiting for the replica that fetches
            batches for this rank.
        put_seconds: time spent on puts made by the trainer itself.
        batch_count: number of batches that were measured.
        rank_count: number of ranks over which the times are summed.
    """

    work_seconds: float = 0.0
    rollouts_seconds: float = 0.0
    plan_seconds: float = 0.0
    transfer_seconds: float = 0.0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    loader_seconds: float = 0.0
    put_seconds: float = 0.0
    batch_count: int = 0
    rank_count: int = 1

    @classmethod
    def of(cls, seconds: Mapping[Stage, float], batch_count: int) -> StepTimes:
        """Build the times of a single rank from the seconds that it spent on each stage."""
        values: dict[str, Any] = {f"{stage}_seconds": each for stage, each in seconds.items()}
        return cls(batch_count=batch_count, **values)

    @classmethod
    def sum(cls, ranks: Iterable[StepTimes]) -> StepTimes | None:
        """Return the sum of the times of all ranks, or None if there are no ranks."""
        found = list(ranks)
        if not found:
            return None
        return cls(**{name: sum(getattr(each, name) for each in found) for name in cls.__slots__})

    @property
    def seconds(self) -> dict[Stage, float]:
        """Seconds per stage."""
        return {stage: getattr(self, f"{stage}_seconds") for stage in Stage}

    @property
    def total_seconds(self) -> float:
        """Total seconds across all stages."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[Stage, float]:
        """Each stage's share of the total time, from 0 to 1. All shares are 0 if nothing was measured."""
        total = self.total_seconds
        return {stage: each / total if total else 0.0 for stage, each in self.seconds.items()}

    @property
    def data_plane_share(self) -> float:
        """Combined share of all stages except the trainer's own work and the wait for rollouts."""
        shares = self.shares
        return sum(share for stage, share in shares.items() if stage not in {Stage.WORK, Stage.ROLLOUTS})

    @property
    def advice(self) -> str:
        """A sentence that names the most expensive stage and suggests how to reduce its cost."""
        return advice_for(self)

    def __str__(self) -> str:
        if not self.total_seconds:
            return "no steps were measured"
        shares = sorted(self.shares.items(), key=lambda each: -each[1])
        text = ", ".join(f"{stage} {percent(share)}" for stage, share in shares if share)
        return f"{_seconds(self.total_seconds / max(1, self.batch_count))} per batch: {text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """Cost of calls of one kind, measured by the caller. Calls that the trainer did not wait for are included.

    Attributes:
        stage: kind of call. `plan` denotes claims; `transfer` and `host` denote the two parts of `get_data`.
        call_count: number of calls on which the costs are based. At most the latest 256 calls are included.
        mean_seconds: mean duration of a call.
        mean_bytes: mean number of bytes per call, or 0 for claims.
        fixed_seconds: the part of a call's duration that does not depend on the call's size. The value is None if the
            sizes vary too little for an estimate.
        bytes_per_second: throughput during the part of a call's duration that depends on its size. The value is None if
            the sizes vary too little for an estimate.
    """

    stage: Stage
    call_count: int
    mean_seconds: float
    mean_bytes: float = 0.0
    fixed_seconds: float | None = None
    bytes_per_second: float | None = None

    @classmethod
    def of(cls, stage: Stage, calls: Sequence[tuple[int, float]]) -> CallCost:
        """Calculate the cost of calls from each call's size in bytes and its duration in seconds."""
        sizes, seconds = zip(*calls, strict=True)
        fixed, rate = fit_calls(sizes, seconds) or (None, None)
        return cls(
            stage=stage,
            call_count=len(calls),
            mean_seconds=sum(seconds) / len(calls),
            mean_bytes=sum(sizes) / len(calls),
            fixed_seconds=fixed,
            bytes_per_second=rate,
        )

    def __str__(self) -> str:
        text = f"{self.stage}: {self.call_count} calls of {_seconds(self.mean_seconds)}"
        if self.mean_bytes:
            text += f" and {_bytes(self.mean_bytes)}"
        if self.fixed_seconds is not None and self.bytes_per_second is not None:
            text += f"; {_seconds(self.fixed_seconds)} fixed per call, the rest at {_bytes(self.bytes_per_second)}/s"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A `StepTimer`'s measurements of the latest batches. `str()` formats the report for display.

    Attributes:
        times: seconds by stage.
        calls: costs by kind of call.
    """

    times: StepTimes
    calls: tuple[CallCost, ...] = ()

    @property
    def advice(self) -> str:
        """A sentence that names the most expensive stage and suggests how to reduce its cost."""
        return advice_for(self.times, self.calls)

    def __str__(self) -> str:
        if not self.times.total_seconds:
            return str(self.times)
        return "\n".join([str(self.times), self.advice, *map(str, self.calls)])


class StepTimer:
    """A timer that breaks down a trainer's step time by stage.

    Each loader has a timer. Code that does not use a loader creates a timer itself.

    ::

        timer = tq.StepTimer()
        for _ in range(steps):
            with timer.step():
                meta = client.claim(...)
                train(client.get_data(meta))
        print(timer.report())

    Args:
        batch_count: number of recent batches covered by a report.
        clock: function that returns the time in seconds, on a clock shared by all processes on the host.

    Raises:
        InvalidArgumentError: `batch_count` is less than 1.
    """

    def __init__(self, batch_count: int = _BATCHES, *, clock: Callable[[], float] = time.perf_counter) -> None:
        if batch_count < 1:
            raise InvalidArgumentError(f"batch_count is {batch_count}; expected at least 1", field="batch_count")
        self.clock = clock
        self._lock = Lock()  # the fetching thread reports measurements made by the training thread
        self._batches: deque[dict[Stage, float]] = deque(maxlen=batch_count)
        self._calls: dict[Stage, deque[tuple[int, float]]] = {}
        self._reported_at: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step. Time in client calls counts as waiting, and all other time as the trainer's own work.

        Calls count only if they are made in the block's thread or in an asyncio task that the block starts. A step that
        raises an exception is not counted.
        """
        reported = step_report.set(self.take_report)
        began_at = self.clock()
        try:
            with collecting() as calls:
                yield
        finally:
            step_report.reset(reported)
        ended_at = self.clock()
        self.add(began_at, ended_at, ended_at, calls=calls, waits=Collected(batch_count=1))

    def add(self, began_at: float, asked_at: float, ended_at: float, *, calls: Collected, waits: Collected) -> None:
        """Add a complete or partial step. The trainer worked until `asked_at`, then waited until `ended_at`.

        Args:
            began_at: time when the trainer received its previous data.
            asked_at: time when the trainer requested more data.
            ended_at: time when the trainer received the requested data.
            calls: calls made by the trainer while it worked.
            waits: stages of the awaited batch, and the number of batches that start in this part of the step.
        """
        seconds = dict.fromkeys(Stage, 0.0)
        _split(seconds, began_at, asked_at, calls.spans, Stage.WORK)
        _split(seconds, asked_at, ended_at, waits.spans, Stage.LOADER)
        with self._lock:
            for span in (*calls.spans, *waits.spans):
                if span.is_call:
                    calls_of_stage = self._calls.setdefault(span.stage, deque(maxlen=_CALLS))
                    calls_of_stage.append((span.size_bytes, span.ended_at - span.began_at))
            if waits.batch_count or not self._batches:
                self._batches.append(seconds)
            else:
                batch = self._batches[-1]
                for stage, each in seconds.items():
                    batch[stage] += each
        for probe in probes:
            probe.stepped(tuple((stage.value, each) for stage, each in seconds.items() if each))

    def report(self) -> StepReport:
        """Return the measurements of the latest batches."""
        with self._lock:
            calls = {stage: list(each) for stage, each in self._calls.items()}
        return StepReport(times=self._times(), calls=tuple(CallCost.of(stage, each) for stage, each in calls.items()))

    def take_report(self) -> StepTimes | None:
        """Return the times to report to the service, or None if no report is due."""
        now = self.clock()
        if not self._batches or (self._reported_at is not None and now - self._reported_at < _REPORT_SECONDS):
            return None
        self._reported_at = now
        return self._times()

    def reset(self) -> None:
        """Discard all measurements, for example to exclude the first batches of a run."""
        with self._lock:
            self._batches.clear()
            self._calls.clear()

    def _times(self) -> StepTimes:
        with self._lock:
            batches = list(self._batches)
            return StepTimes.of({stage: sum(batch[stage] for batch in batches) for stage in Stage}, len(batches))

    def __str__(self) -> str:
        return str(self.report())


def _split(seconds: dict[Stage, float], begin: float, end: float, spans: Sequence[Span], rest: Stage) -> None:
    """Attribute the time from `begin` to `end` to the active stages, or to `rest` while no stage is active.

    While several stages are active, the time is attributed to the active stage that comes last in `Stage`.
    """
    if end <= begin:
        return
    within = [span for span in spans if span.ended_at > begin and span.began_at < end]
    if not within:
        seconds[rest] += end - begin
        return
    times = sorted({begin, end, *(time for span in within for time in span[1:3] if begin < time < end)})
    for since, until in pairwise(times):
        stages = [span.stage for span in within if span.began_at <= since and span.ended_at >= until]
        seconds[max(stages, key=_ORDER.__getitem__, default=rest)] += until - since


_ORDER: Final = {stage: number for number, stage in enumerate(Stage)}


def fit_calls(size_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float] | None:
    """Fit `seconds = fixed + bytes / rate` to calls by least squares, with reduced weights for outliers.

    The weights are Huber's (Robust Estimation of a Location Parameter, 1964) and are computed iteratively.

    Returns:
        The fixed time per call in seconds, and the rate in bytes per second. None if there are too few calls, if call
        sizes vary too little, or if larger calls do not take longer.
    """
    import numpy as np  # noqa: PLC0415  (the command line reads results without numpy)

    sizes, times = np.asarray(size_bytes, np.float64), np.asarray(seconds, np.float64)
    if sizes.size < _LEAST_CALLS:
        return None
    small, large = np.percentile(sizes, (10, 90))
    if large <= 0 or large < _LEAST_RATIO * small:
        return None
    weights = np.ones_like(times)
    fixed = slope = 0.0
    for _ in range(_FIT_ROUNDS):
        total = weights.sum()
        mean_size, mean_time = (weights * sizes).sum() / total, (weights * times).sum() / total
        spread = sizes - mean_size
        variance = (weights * spread * spread).sum()
        if variance <= 0:
            return None
        slope = float((weights * spread * (times - mean_time)).sum() / variance)
        fixed = float(mean_time - slope * mean_size)
        residuals = np.abs(times - fixed - slope * sizes)
        limit = _HUBER * _SIGMA_OF_MEDIAN * float(np.median(residuals))
        if limit <= 0:
            break
        weights = np.minimum(1.0, limit / np.maximum(residuals, limit * 1e-9))
    if slope <= 0:
        return None
    return max(fixed, 0.0), 1 / slope


_REMEDIES: Final = {
    Stage.ROLLOUTS: "waiting for rollouts takes {share} of the step: add rollout workers, or raise max_staleness; the "
    "data plane takes {plane}",
    Stage.PLAN: "waiting for plans takes {share} of the step: fetch further ahead (prefetch_factor), or use larger "
    "batches; samplers that balance or pack cost most",
    Stage.TRANSFER: "waiting for bytes takes {share} of the step: request fewer data_fields, fetch further ahead "
    "(prefetch_factor, num_workers), or add storage services",
    Stage.HOST: "decoding and copying on the host takes {share} of the step: use num_workers in the loader, and "
    "tensors instead of objects",
    Stage.DEVICE: "copies to the device take {share} of the step: set device and prefetch_factor of the loader, so "
    "batches are copied in advance",
    Stage.LOADER: "the loader itself takes {share} of the step: check process_batch_fn and fetch_batch_fn; if this "
    "rank receives its batches from a replica, see the replica's report",
    Stage.PUT: "the trainer's puts take {share} of the step: put all columns in one call, or put from another thread",
}


def advice_for(times: StepTimes, calls: Sequence[CallCost] = ()) -> str:
    """Return a sentence that names the most expensive stage and suggests how to reduce its cost."""
    shares = times.shares
    if not times.total_seconds:
        return "no steps were measured"
    worst = max(_REMEDIES, key=lambda stage: shares[stage])
    if shares[worst] < _LITTLE:
        return (
            f"the trainer's own work takes {percent(shares[Stage.WORK])} of the step: neither rollouts "
            f"({percent(shares[Stage.ROLLOUTS])}) nor the data plane ({percent(times.data_plane_share)}) slow it down"
        )
    text = _REMEDIES[worst].format(share=percent(shares[worst]), plane=percent(times.data_plane_share))
    cost = next((each for each in calls if each.stage is worst and each.fixed_seconds is not None), None)
    if cost is not None and cost.fixed_seconds is not None and cost.fixed_seconds > cost.mean_seconds / 2:
        text += (
            f". Most of this is the fixed cost of {_seconds(cost.fixed_seconds)} per call: fewer, larger calls cost "
            "less"
        )
    return text


def percent(share: float) -> str:
    """Format a share as a percentage, such as "62 %"."""
    return f"{share * 100:.1f} %" if 0 < share < _LITTLE else f"{share * 100:.0f} %"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
