"""Counters and timers of negligible cost. Confined to one thread, in which scrapes also read them."""

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
    """A histogram that counts each value in the bucket with the lowest bound not below the value.

    Attributes:
        sum: sum of all observed values.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return the bounds as text, each with the number of values less than or equal to it."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return buckets


class HistogramByName:
    """One histogram for each of the first few names; all other names share a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.by_name: dict[str, Histogram] = {}

    def of(self, name: str) -> Histogram:
        """Return the histogram for a name."""
        histogram = self.by_name.get(name)
        if histogram is None:
            name = name if len(self.by_name) < _MOST_NAMES else OTHERS
            histogram = self.by_name.setdefault(name, Histogram(self._bounds))
        return histogram


class MethodCounts:
    """Call counts and durations of one method.

    Attributes:
        service: the method's service, such as "tq_service.v1.ControllerService".
        method: the method's name within the service.
        shape: "unary", "client_stream", "server_stream" or "bidi_stream".
        started: number of calls received.
        handled: number of completed calls, by status code such as "OK".
        handling: duration of calls, excluding the time that they wait.
        waits: waiting time of calls; None if calls of this method never wait.
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
    """Measurements recorded during operation. A scrape reads all other metrics from the live state.

    Attributes:
        calls: counts for each method called so far.
        plan_seconds: planning time, by sampler.
        imbalance: each batch's token count on the heaviest rank relative to the mean, minus 1, by sampler.
        padding: share of padding in each batch, by sampler.
        loop_lag: delay between the due time of an event-loop task and its start.
    """

    def __init__(self) -> None:
        self.calls: dict[str, MethodCounts] = {}
        self.plan_seconds = HistogramByName(PLAN_SECONDS)
        self.imbalance = HistogramByName(SHARES)
        self.padding = HistogramByName(SHARES)
        self.loop_lag = Histogram(LAG_SECONDS)


class TimedRunner:
    """Wraps a runner of samplers and times the runs that return a plan.

    Args:
        runner: the wrapped runner.
        seconds: histograms of the run times, by sampler name. Times of runs off the event loop include the wait for a
            thread.
    """

    def __init__(self, runner: RunsPlans, seconds: HistogramByName) -> None:
        self._runner = runner
        self._seconds = seconds

    def length(self, sampler: Sampler) -> LengthSource | None:
        """Return the length source that a sampler needs; see `RunsPlans`."""
        return self._runner.length(sampler)

    def run_inline(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a plan or None; see `RunsPlans`."""
        began_at = time.perf_counter()
        plan = self._runner.run_inline(sampler, view, request)
        if plan is not None:
            self._seconds.of(sampler.name).observe(time.perf_counter() - began_at)
        return plan

    async def run(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a plan or None; see `RunsPlans`."""
        began_at = time.perf_counter()
        plan = await self._runner.run(sampler, view, request)
        if plan is not None:
            self._seconds.of(sampler.name).observe(time.perf_counter() - began_at)
        return plan
