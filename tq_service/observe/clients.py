"""Prometheus metrics for the clients and loaders in a process, enabled by `tq.instrument`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tq_service.client_probes import probes
from tq_service.errors import InvalidArgumentError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_FETCH_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CLAIM_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


def instrument(registry: CollectorRegistry | None = None) -> None:
    """Measure fetches, puts, claims and waiting times of all clients and loaders in this process.

    docs/operations.md lists the metrics. The process that contains a loader also counts the fetches made by the
    loader's worker processes. A second call with the same registry has no effect.

    Args:
        registry: prometheus-client registry to add the metrics to, or None for the default registry.

    Raises:
        InvalidArgumentError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import REGISTRY  # noqa: PLC0415  (an optional dependency)
    except ModuleNotFoundError:
        raise InvalidArgumentError(
            "tq.instrument requires prometheus-client, which is not installed; install tq-service[metrics]"
        ) from None
    registry = REGISTRY if registry is None else registry
    if not any(isinstance(probe, PrometheusProbe) and probe.registry is registry for probe in probes):
        probes.append(PrometheusProbe(registry))


class PrometheusProbe:
    """A `Probe` that records measurements as prometheus-client metrics.

    Args:
        registry: registry to add the metrics to.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Histogram  # noqa: PLC0415  (an optional dependency)

        def histogram(name: str, text: str, bounds: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"tq_service_{name}", text, labels, buckets=bounds, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"tq_service_{name}", text, registry=registry)

        self.registry = registry
        self._fetches = histogram("client_fetch_seconds", "Duration of get_data calls.", _FETCH_SECONDS)
        self._fetched = counter("client_fetched_bytes", "Bytes received from storage services.")
        self._puts = histogram("client_put_seconds", "Duration of put calls that send columns.", _FETCH_SECONDS)
        self._put = counter("client_put_bytes", "Bytes of columns sent by puts.")
        self._claims = histogram(
            "client_claim_seconds", "Duration of claim calls, including waiting.", _CLAIM_SECONDS, ("status",)
        )
        self._waited = counter("loader_wait_seconds", "Time that training loops waited for their loaders.")
        self._worked = counter(
            "loader_work_seconds", "Time between receiving a micro-batch and requesting the next one."
        )
        self._loaded = counter("loader_micro_batches", "Micro-batches delivered by loaders.")
        self._steps = Counter(
            "tq_service_step_seconds", "Time spent in each stage of training steps.", ["stage"], registry=registry
        )

    def fetched(self, seconds: float) -> None:
        """Record the duration of a get_data call."""
        self._fetches.observe(seconds)

    def received(self, size_bytes: int) -> None:
        """Add the number of bytes received from storage services."""
        self._fetched.inc(size_bytes)

    def put(self, seconds: float, size_bytes: int) -> None:
        """Record the duration and size of a put."""
        self._puts.observe(seconds)
        self._put.inc(size_bytes)

    def claimed(self, seconds: float, status: str) -> None:
        """Record the duration of a claim call, labeled with the returned status."""
        self._claims.labels(status).observe(seconds)

    def loaded(self, wait_seconds: float, work_seconds: float) -> None:
        """Record the time spent waiting for a micro-batch, and the time spent processing the previous one."""
        self._waited.inc(wait_seconds)
        self._worked.inc(work_seconds)
        self._loaded.inc()

    def stepped(self, seconds: tuple[tuple[str, float], ...]) -> None:
        """Add the time that a training step spent in each stage."""
        for stage, each in seconds:
            self._steps.labels(stage).inc(each)
