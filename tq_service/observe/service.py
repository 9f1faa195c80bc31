"""What one process of the service shows to Prometheus, read from where it is at the moment of a scrape.

All of it is read on the event loop, in slices; what becomes text does so on the thread of the scrape. The series of
calls and of the process are few. Those of partitions are by their group, and by task: of so many that a scrape would
have more lines than `MOST_LINES`, those that came first are shown, for as long as they have partitions, and the rest is
counted in `tq_service_metrics_dropped_series`.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from tq_service.durable.state_store import LogLag
from tq_service.observe.groups import GroupNumbers, PartitionGroups, TaskNumbers
from tq_service.observe.instruments import Histogram, HistogramByName, Instruments, MethodCounts
from tq_service.serving.backlogs import Backlogs
from tq_service.serving.catalog import Catalog
from tq_service.serving.sweep import Slices
from tq_service.storage.engine import EngineStat

MOST_LINES: Final = 3_000
_LINES_LEFT: Final = 150  # for what Python's client says of the process, and for lines of help
_GROUPS_SHARE: Final = 0.6  # of the lines of partitions that are for groups at most
_LAG_PERIOD_SECONDS: Final = 0.1
_GROUP: Final = ("partition_group",)
_TASK: Final = ("partition_group", "task")
_METHOD: Final = ("grpc_type", "grpc_service", "grpc_method")

_GROUP_GAUGES: Final[Sequence[tuple[str, str, Callable[[GroupNumbers], float]]]] = (
    ("tq_service_partitions", "Partitions.", lambda group: group.partitions),
    ("tq_service_partition_bytes", "Bytes of the values of samples.", lambda group: group.value_bytes),
    ("tq_service_waiting_puts", "Puts that wait for capacity in their partition.", lambda group: group.waiting_puts),
)
_GROUP_COUNTERS: Final[Sequence[tuple[str, str, Callable[[GroupNumbers], float]]]] = (
    ("tq_service_samples_inserted", "Samples inserted.", lambda group: group.inserted),
    ("tq_service_samples_cleared", "Samples cleared, alone or with their partition.", lambda group: group.cleared),
)
_TASK_GAUGES: Final[Sequence[tuple[str, str, Callable[[TaskNumbers], float | None]]]] = (
    ("tq_service_task_pending_samples", "Samples that are left for a task, ready or not.", lambda task: task.pending),
    (
        "tq_service_task_ready_samples",
        "Samples that claims like the task's last one could get.",
        lambda task: task.ready,
    ),
    ("tq_service_task_leased_samples", "Samples that are leased and not acknowledged.", lambda task: task.leased),
    ("tq_service_task_waiting_claims", "Calls that wait for a claim.", lambda task: task.waiting),
    (
        "tq_service_task_oldest_version",
        "The lowest version of a sample that is left for a task.",
        lambda task: task.oldest_version,
    ),
    (
        "tq_service_task_staleness_versions",
        "How far the newest version of a partition is above the oldest that is left for a task.",
        lambda task: task.staleness,
    ),
)
_TASK_COUNTERS: Final[Sequence[tuple[str, str, Callable[[TaskNumbers], float]]]] = (
    (
        "tq_service_samples_delivered",
        "Samples delivered to a task, each as often as it was.",
        lambda task: task.totals.delivered,
    ),
    (
        "tq_service_samples_redelivered",
        "Samples delivered again since a lease on them ran out.",
        lambda task: task.totals.redelivered,
    ),
    ("tq_service_leased_samples_expired", "Samples whose leases ran out.", lambda task: task.totals.expired),
    (
        "tq_service_samples_dead_lettered",
        "Samples delivered too often without being acknowledged.",
        lambda task: task.totals.dead_lettered,
    ),
)
_LINES_OF_GROUP: Final = len(_GROUP_GAUGES) + len(_GROUP_COUNTERS) + 3
_LINES_OF_TASK: Final = len(_TASK_GAUGES) + len(_TASK_COUNTERS)


class ServiceMetrics:
    """Collects what a process shows. Confined to the event loop of the service.

    Args:
        instruments: what is counted while things happen.
        facts: of the process, such as its version and role, for `tq_service_build_info`.
        running_count: returns the number of calls that are handled.
        waiting_count: returns the number of calls that wait.
    """

    def __init__(
        self,
        instruments: Instruments,
        *,
        facts: dict[str, str],
        running_count: Callable[[], int],
        waiting_count: Callable[[], int],
    ) -> None:
        self._instruments = instruments
        self._info = {**facts, "python": platform.python_version()}
        self._running_count = running_count
        self._waiting_count = waiting_count
        self._groups: PartitionGroups | None = None
        self._backlogs: Backlogs | None = None
        self._storage_counts: Callable[[], Mapping[str, int]] = dict
        self._cluster: tuple[str, Callable[[], bool], Callable[[], Mapping[str, int]]] | None = None
        self._adoption_counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._storage: tuple[str, Callable[[], EngineStat], Callable[[], Sequence[EngineStat]]] | None = None
        self._lag: Callable[[], LogLag] | None = None
        self._seen: dict[str, float] = {}  # groups, and since when
        self._scraping = asyncio.Lock()

    # What the process has

    def add_controller(
        self,
        catalog: Catalog,
        backlogs: Backlogs,
        storage_counts: Callable[[], Mapping[str, int]],
        adoption_counts: Callable[[], tuple[int, int]],
    ) -> None:
        """Show a controller.

        Args:
            catalog: its partitions, those that were recovered.
            backlogs: what its tasks have left.
            storage_counts: returns how many storage services there are, by state.
            adoption_counts: returns how often storage services with a mirror were lost, and how often taken over.
        """
        self._groups, self._backlogs = PartitionGroups(catalog), backlogs
        self._storage_counts, self._adoption_counts = storage_counts, adoption_counts
        imbalance, padding = self._instruments.imbalance, self._instruments.padding

        def count(sampler: str, batch: Any) -> None:
            if batch.tokens_per_rank:
                imbalance.of(sampler).observe(batch.imbalance)
                padding.of(sampler).observe(batch.padding_share)

        catalog.on_batch.append(count)

    def add_cluster(self, name: str, leads: Callable[[], bool], lags: Callable[[], Mapping[str, int]]) -> None:
        """Show the cluster of controllers that the controller is of.

        What several controllers know alike, such as the partitions, is shown by the one that leads alone: sums over all
        of them would count it more than once.

        Args:
            name: of the cluster.
            leads: returns whether this controller leads, and may answer.
            lags: returns how many records the others are behind, by their names; asked while this one leads.
        """
        self._cluster = name, leads, lags

    def add_storage(
        self, storage_id: str, stat: Callable[[], EngineStat], adopted: Callable[[], Sequence[EngineStat]]
    ) -> None:
        """Show a storage service.

        Args:
            storage_id: its name.
            stat: returns sizes and counts of its own puts.
            adopted: returns those of what it has taken over from others.
        """
        self._storage = storage_id, stat, adopted

    def add_log(self, lag: Callable[[], LogLag]) -> None:
        """Show the log."""
        self._lag = lag

    async def measure_loop(self) -> None:
        """Measure how late the event loop gets to what is due, until cancelled."""
        observe = self._instruments.loop_lag.observe
        while True:
            began_at = time.perf_counter()
            await asyncio.sleep(_LAG_PERIOD_SECONDS)
            observe(max(0.0, time.perf_counter() - began_at - _LAG_PERIOD_SECONDS))

    # A scrape

    async def collect(self) -> list[Metric]:
        """Return all metrics of this moment."""
        async with self._scraping:
            slices = Slices()
            metrics = [*self._of_process()]
            for family in (self._of_calls(), self._of_batches()):
                for metric in family:
                    metrics.append(metric)
                    await slices.turn()
            if self._groups is not None and self._backlogs is not None and self._leads:
                left = MOST_LINES - _LINES_LEFT - sum(len(metric.samples) + 2 for metric in metrics)
                metrics += await self._of_partitions(self._groups, self._backlogs, left, slices)
            return metrics

    @property
    def _leads(self) -> bool:
        return self._cluster is None or self._cluster[1]()

    def _of_process(self) -> Iterator[Metric]:
        yield InfoMetricFamily("tq_service_build", "Versions, and what the process is.", value=self._info)
        yield GaugeMetricFamily(
            "tq_service_running_calls", "Calls that are handled, waits included.", self._running_count()
        )
        yield GaugeMetricFamily(
            "tq_service_waiting_calls", "Calls that wait for samples or capacity.", self._waiting_count()
        )
        lag = HistogramMetricFamily(
            "tq_service_loop_lag_seconds", "How much later than it was due the event loop got to something.", labels=()
        )
        _add(lag, (), self._instruments.loop_lag)
        yield lag
        if self._cluster is not None:
            yield from self._of_cluster(*self._cluster)
        if self._groups is not None and self._leads:
            storages = GaugeMetricFamily(
                "tq_service_storages", "Storage services that the controller knows.", labels=["state"]
            )
            for state, count in self._storage_counts().items():
                storages.add_metric([state], count)
            yield storages
            lost, taken_over = self._adoption_counts()
            yield CounterMetricFamily(
                "tq_service_storages_lost", "Storage services with a mirror that were lost.", lost
            )
            yield CounterMetricFamily(
                "tq_service_storages_taken_over", "Of them, those whose puts another one has taken over.", taken_over
            )
        if self._storage is not None:
            storage_id, stat, adopted = self._storage
            own = stat()
            yield from _of_storage(storage_id, own)
            yield from _of_mirror(storage_id, own, adopted())
        if self._lag is not None:
            yield from _of_log(self._lag())

    def _of_cluster(
        self, name: str, leads: Callable[[], bool], lags: Callable[[], Mapping[str, int]]
    ) -> Iterator[Metric]:
        leading = GaugeMetricFamily(
            "tq_service_controller_leads", "1: this controller leads its cluster.", labels=["cluster"]
        )
        leading.add_metric([name], float(leads()))
        yield leading
        if leads():
            behind = GaugeMetricFamily(
                "tq_service_standby_lag_records",
                "How many records of the journal a standby has not applied yet, as the leader sees it.",
                labels=["cluster", "controller"],
            )
            for controller, count in lags().items():
                behind.add_metric([name, controller], count)
            yield behind

    def _of_calls(self) -> Iterator[Metric]:
        calls = list(self._instruments.calls.values())
        started = CounterMetricFamily("grpc_server_started", "Calls that came.", labels=_METHOD)
        handled = CounterMetricFamily("grpc_server_handled", "Calls that are over.", labels=(*_METHOD, "grpc_code"))
        handling = HistogramMetricFamily(
            "grpc_server_handling_seconds", "How long calls took, without their waits.", labels=_METHOD
        )
        waits = HistogramMetricFamily(
            "tq_service_wait_seconds",
            "For how long each call of a method that may wait has waited, for samples or for capacity.",
            labels=_METHOD,
        )
        for each in calls:
            labels = _labels_of(each)
            started.add_metric(labels, each.started)
            for code, count in sorted(each.handled.items()):
                handled.add_metric((*labels, code), count)
            _add(handling, labels, each.handling)
            if each.waits is not None:
                _add(waits, labels, each.waits)
        yield from (started, handled, handling, waits)

    def _of_batches(self) -> Iterator[Metric]:
        yield _by_sampler(
            "tq_service_plan_seconds", "How long plans took that came to a batch.", self._instruments.plan_seconds
        )
        yield _by_sampler(
            "tq_service_batch_imbalance_ratio",
            "By how much the heaviest rank of a batch has more tokens than the mean.",
            self._instruments.imbalance,
        )
        yield _by_sampler(
            "tq_service_batch_padding_ratio", "The share of padding of a batch.", self._instruments.padding
        )

    async def _of_partitions(
        self, parts: PartitionGroups, backlogs: Backlogs, most_lines: int, slices: Slices
    ) -> list[Metric]:
        groups = await parts.collect(slices)
        shown, dropped_count = await self._choose(groups, most_lines, slices)
        await parts.add_backlogs(groups, shown, backlogs, slices)
        dropped = GaugeMetricFamily(
            "tq_service_metrics_dropped_series",
            f"Series of partition groups and tasks that are left out, since there are at most {MOST_LINES} lines.",
            dropped_count,
        )
        return [dropped, *[metric async for metric in _families(groups, shown, slices)]]

    async def _choose(
        self, groups: Mapping[str, GroupNumbers], most_lines: int, slices: Slices
    ) -> tuple[dict[str, list[str]], int]:
        """Return the groups that have series, with the tasks that do, and how many series are left out.

        Those with partitions come first, of these those that were seen first, so that series last.
        """
        self._seen = {group: self._seen.get(group, time.monotonic()) for group in groups}
        order = sorted(groups, key=lambda group: (not groups[group].partitions, self._seen[group]))
        most_groups = int(most_lines * _GROUPS_SHARE) // _LINES_OF_GROUP
        total_count = _LINES_OF_GROUP * len(groups) + _LINES_OF_TASK * sum(len(each.tasks) for each in groups.values())
        if total_count <= most_lines:
            most_groups = len(groups)
        shown: dict[str, list[str]] = {}
        left = (most_lines - _LINES_OF_GROUP * min(len(order), most_groups)) // _LINES_OF_TASK
        for group in order[:most_groups]:
            shown[group] = list(groups[group].tasks)[: max(0, left)]
            left -= len(shown[group])
            await slices.turn()
        shown_count = _LINES_OF_GROUP * len(shown) + _LINES_OF_TASK * sum(map(len, shown.values()))
        return shown, total_count - shown_count


async def _families(
    groups: Mapping[str, GroupNumbers], shown: Mapping[str, Sequence[str]], slices: Slices
) -> AsyncIterator[Metric]:
    """Yield the metrics of groups and tasks."""
    samples = GaugeMetricFamily("tq_service_samples", "Samples that are there.", labels=(*_GROUP, "state"))
    for group in shown:
        numbers = groups[group]
        for state, count in (("live", numbers.live), ("held", numbers.held), ("failed", numbers.failed)):
            samples.add_metric((group, state), count)
        await slices.turn()
    yield samples
    kinds: tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], ...] = (GaugeMetricFamily, CounterMetricFamily)
    for kind, of_group, of_task in zip(
        kinds, (_GROUP_GAUGES, _GROUP_COUNTERS), (_TASK_GAUGES, _TASK_COUNTERS), strict=True
    ):
        for name, text, read_group in of_group:
            metric = kind(name, text, labels=_GROUP)
            for group in shown:
                metric.add_metric((group,), read_group(groups[group]))
                await slices.turn()
            yield metric
        for name, text, read_task in of_task:
            metric = kind(name, text, labels=_TASK)
            for group, tasks in shown.items():
                for task in tasks:
                    value = read_task(groups[group].tasks[task])
                    if value is not None:
                        metric.add_metric((group, task), value)
                    await slices.turn()
            yield metric


def _storage_gauge(storage_id: str, name: str, text: str, value: float) -> Metric:
    metric = GaugeMetricFamily(f"tq_service_storage_{name}", text, labels=("storage",))
    metric.add_metric((storage_id,), value)
    return metric


def _of_mirror(storage_id: str, own: EngineStat, adopted: Sequence[EngineStat]) -> Iterator[Metric]:
    """Yield what is shown of a mirror, nothing where there is none.

    What was taken over counts with the rest, since the service may have the old name itself, and a name has one series.
    """
    mirrors = [stat.mirror for stat in (own, *adopted) if stat.mirror is not None]
    if not mirrors:
        return
    answers = [mirror.is_reachable for mirror in mirrors if mirror.is_reachable is not None]
    if answers:
        text = "1: the mirror answered the last call; absent before the first one."
        yield _storage_gauge(storage_id, "mirror_answers", text, float(all(answers)))
    for name, text, value in (
        (
            "unmirrored_bytes",
            "Bytes of puts that do not have the copies required yet.",
            sum(mirror.unmirrored_bytes for mirror in mirrors),
        ),
        (
            "short_puts",
            "Puts with the copies required, and fewer than asked for.",
            sum(mirror.short_put_count for mirror in mirrors),
        ),
        ("adopted_puts", "Puts taken over from other storage services.", sum(stat.put_count for stat in adopted)),
        (
            "unfetched_puts",
            "Of them, those whose bytes were not fetched yet.",
            sum(mirror.unfetched_put_count for mirror in mirrors),
        ),
        (
            "spilled_bytes",
            "Bytes that count as used and are in the mirror alone.",
            sum(mirror.spilled_bytes for mirror in mirrors),
        ),
    ):
        yield _storage_gauge(storage_id, f"mirror_{name}", text, value)


def _of_storage(storage_id: str, stat: EngineStat) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: float) -> Metric:
        return _storage_gauge(storage_id, name, text, value)

    def counter(name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"tq_service_storage_{name}", text, labels=("storage",))
        metric.add_metric((storage_id,), value)
        return metric

    yield gauge("used_bytes", "Bytes stored and reserved.", stat.used_bytes)
    if stat.max_bytes is not None:
        yield gauge("quota_bytes", "The most bytes that may be stored; absent where there is no quota.", stat.max_bytes)
    yield gauge("pooled_bytes", "Bytes of memory held for reuse, besides those used.", stat.pooled_bytes)
    yield gauge("puts", "Puts stored.", stat.put_count)
    yield gauge("uncommitted_puts", "Puts that wait for their commit.", stat.uncommitted_put_count)
    yield gauge("damaged_puts", "Puts whose bytes are lost, as far as is known.", stat.damaged_put_count)
    yield counter("written_bytes", "Bytes of puts that were completed.", stat.written_bytes)
    yield counter("read_bytes", "Bytes of reads that were begun.", stat.read_bytes)


def _of_log(lag: LogLag) -> Iterator[Metric]:
    for name, text, value in (
        ("unflushed_records", "Records of the log that are not durable yet.", lag.unflushed_count),
        ("replay_seconds", "For how long a start would apply the log again, as estimated.", lag.replay_seconds),
        ("snapshot_age_seconds", "Time since the last snapshot, or since the start.", lag.snapshot_age_seconds),
        ("failing", "1: nothing could be written when it was last tried.", lag.is_failing),
        ("disk_low", "1: the disk has hardly any space left, and puts are refused.", lag.is_disk_low),
    ):
        yield GaugeMetricFamily(f"tq_service_log_{name}", text, float(value))


def _labels_of(counts: MethodCounts) -> tuple[str, str, str]:
    return counts.shape, counts.service, counts.method


def _by_sampler(name: str, text: str, histograms: HistogramByName) -> Metric:
    metric = HistogramMetricFamily(name, text, labels=("sampler",))
    for sampler, histogram in histograms.by_name.items():
        _add(metric, (sampler,), histogram)
    return metric


def _add(metric: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    metric.add_metric(labels, buckets=histogram.buckets(), sum_value=histogram.sum)
