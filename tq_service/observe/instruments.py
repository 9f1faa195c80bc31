"""Counters and timers with negligible overhead. They are not thread-safe; use them only on the event loop."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tq_service.serving.planner import RunsPlans
    from tq_service.state.plan import LengthSource, Plan, PlanRequest, Sampler, View

HANDLING_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
WAIT_SECONDS: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PLAN_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
SHARES: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
LAG_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_MOST_NAMES: Final = 8
OTHERS: Final = "others"


class Histogram:
    """A histogram that counts each value in the lowest bucket whose upper bound is at least the value.

    Attributes:
        sum: sum of all observed values.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value to the histogram."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """For each bucket, return its upper bound as text and the number of observed values up to that bound."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return buckets


class HistogramByName:
    """Histograms by name. The first `_MOST_NAMES` names have separate histograms. All others share one."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.by_name: dict[str, Histogram] = {}

    def of(self, name: str) -> Histogram:
        """Return the histogram for a name, creating it if necessary."""
        histogram = self.by_name.get(name)
        if histogram is None:
            name = name if len(self.by_name) < _MOST_NAMES else OTHERS
            histogram = self.by_name.setdefault(name, Histogram(self._bounds))
        return histogram


class MethodCounts:
    """Counts and durations of calls to a gRPC method.

    Attributes:
        service: full name of the gRPC service, such as "tq_service.v1.ControllerService".
        method: name of the method within the service.
        shape: "unary", "client_stream", "server_stream" or "bidi_stream".
        started: number of calls received.
        handled: number of completed calls, by status code such as "OK".
        handling: histogram of call durations in seconds, excluding time spent waiting for samples or capacity.
        waits: histogram of waiting times in seconds, or None if calls to this method never wait.
    """

    __slots__ = ("handled", "handling", "method", "service", "shape", "started", "waits")

    def __init__(self, service: str, method: str, shape: str, *, may_wait: bool) -> None:
        self.service = service
        self.method = method
        self.shape = shape
        self.started = 0
        self.handled: Counter[str] = Counter()
        self.handling = Histogram(HANDLING_SECONDS)
        self.waits = Histogram(WAIT_SECONDS) if may_wait else None


class Instruments:
    """Metrics recorded as events occur. All other metrics are read from the current state at each scrape.

    Attributes:
        calls: counts and durations of all methods called so far.
        plan_seconds: histograms of planning times in seconds, by sampler.
        imbalance: for each sampler, a histogram of batch imbalance (tokens on the heaviest rank divided by the mean,
            minus 1).
        padding: histograms of the share of padding in a batch, by sampler.
        loop_lag: histogram of the delay, in seconds, with which the event loop starts due tasks.
    """

    def __init__(self) -> None:
        self.calls: dict[str, MethodCounts] = {}
        self.plan_seconds = HistogramByName(PLAN_SECONDS)
        self.imbalance = HistogramByName(SHARES)
        self.padding = HistogramByName(SHARES)
        self.loop_lag = Histogram(LAG_SECONDS)


class TimedRunner:
    """Wraps a sampler runner and measures the duration of each run that returns a plan.

    Args:
        runner: runner to wrap.
        seconds: histograms of run durations, by sampler name. The duration of a run in a thread includes the wait for
            the thread.
    """

    def __init__(self, runner: RunsPlans, seconds: HistogramByName) -> None:
        self._runner = runner
        self._seconds = seconds

    def length(self, sampler: Sampler) -> LengthSource | None:
        """Return the source of the token counts that a sampler needs. See `RunsPlans`."""
        return self._runner.length(sampler)

    def run_inline(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Run a sampler inline and return its plan, or None if too few samples are ready. See `RunsPlans`."""
        began_at = time.perf_counter()
        plan = self._runner.run_inline(sampler, view, request)
        if plan is not None:
            self._seconds.of(sampler.name).observe(time.perf_counter() - began_at)
        return plan

    async def run(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Run a sampler, if necessary in a thread, and return its plan or None. See `RunsPlans`."""
        began_at = time.perf_counter()
        plan = await self._runner.run(sampler, view, request)
        if plan is not None:
            self._seconds.of(sampler.name).observe(time.perf_counter() - began_at)
        return plan
