"""Prometheus metrics for a service process, read from the process's current state at each scrape.

The event loop reads the metrics in short time slices. The thread that handles the scrape then converts them to text.
Call metrics and process metrics have few series, whereas partition metrics have one series per group and per task. If a
scrape would exceed `MOST_LINES`, some series are omitted and counted in `tq_service_metrics_dropped_series`. Groups
that still have partitions take precedence, in order of first appearance.

A trainer may create a partition per step (`train@0`, `train@1`, ...). Metrics are therefore summed per partition group,
which is the partition name up to the first "@". These sums include removed partitions. As usual in Prometheus, counters
start at 0 in each process. Counters exclude recovered and restored data, because another process has already counted
this data.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from tq_service.durable.state_store import LogLag
from tq_service.observe.instruments import Histogram, Instruments
from tq_service.results import RecordingStatus
from tq_service.serving.backlogs import Backlogs
from tq_service.serving.catalog import Catalog
from tq_service.serving.sweep import Slices
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.policies import Policies
from tq_service.state.table import FAILED, HELD, LIVE
from tq_service.storage.engine import EngineStat

MOST_LINES: Final = 3_000
_LINES_LEFT: Final = 150  # lines reserved for help texts and the process metrics of prometheus-client
_GROUPS_SHARE: Final = 0.6  # maximum share of lines for group series
_LAG_PERIOD_SECONDS: Final = 0.1
_GROUP: Final = ("partition_group",)
_TASK: Final = ("partition_group", "task")
_METHOD: Final = ("grpc_type", "grpc_service", "grpc_method")
_MOST_POLICIES: Final = 64
_MOST_FORMER: Final = 1024  # maximum number of groups without partitions, plus their tasks

# Metrics of a partition group, and metrics of a task summed over all partitions of a group.
_OF_GROUP: Final = (
    (GaugeMetricFamily, "partitions", "Number of partitions in the group."),
    (GaugeMetricFamily, "partition_bytes", "Bytes of field values stored in the group's partitions."),
    (GaugeMetricFamily, "waiting_puts", "Puts waiting for capacity in their partition."),
    (CounterMetricFamily, "samples_inserted", "Samples inserted."),
    (CounterMetricFamily, "samples_cleared", "Samples cleared, individually or with their partition."),
    (CounterMetricFamily, "samples_released", "Samples released automatically after their tasks finished with them."),
    (CounterMetricFamily, "samples_aged_out", "Samples cleared because they reached the maximum age."),
)
_STATES: Final = (("live", LIVE), ("held", HELD), ("failed", FAILED))
_OF_TASK: Final = (
    (GaugeMetricFamily, "task_pending_samples", "Samples pending for a task, whether ready or not."),
    (GaugeMetricFamily, "task_leased_samples", "Samples leased but not yet acknowledged."),
    (GaugeMetricFamily, "task_waiting_claims", "Claims waiting for samples."),
    (CounterMetricFamily, "samples_delivered", "Samples delivered to a task, including redeliveries."),
    (CounterMetricFamily, "samples_redelivered", "Samples delivered again after their lease expired."),
    (CounterMetricFamily, "leased_samples_expired", "Samples whose leases expired."),
    (CounterMetricFamily, "samples_dead_lettered", "Samples delivered too often without an acknowledgement."),
    (
        CounterMetricFamily,
        "units_evicted_unmatched",
        "Samples and groups evicted because the claim's where condition excluded them.",
    ),
    (CounterMetricFamily, "units_evicted_too_small", "Groups evicted because too few members remained."),
    (CounterMetricFamily, "units_evicted_late", "Unfinished samples and groups evicted before they became too stale."),
    (CounterMetricFamily, "units_evicted_overflow", "Samples and groups cleared to make space for new ones."),
)
_OF_BACKLOG: Final = (
    (
        GaugeMetricFamily,
        "task_ready_samples",
        "Samples that the task could claim now under the conditions of its last claim.",
    ),
    (GaugeMetricFamily, "task_oldest_version", "Lowest version among a task's pending samples."),
    (
        GaugeMetricFamily,
        "task_staleness_versions",
        "Newest version in a partition minus the oldest version among a task's pending samples.",
    ),
)
_TOTALS: Final = (  # fields of `TaskTotals` and the corresponding metrics
    ("delivered", "samples_delivered"),
    ("redelivered", "samples_redelivered"),
    ("expired", "leased_samples_expired"),
    ("dead_lettered", "samples_dead_lettered"),
    ("unmatched", "units_evicted_unmatched"),
    ("too_small", "units_evicted_too_small"),
    ("late", "units_evicted_late"),
    ("overflow", "units_evicted_overflow"),
)
_LINES_OF_GROUP: Final = len(_OF_GROUP) + len(_STATES)
_LINES_OF_TASK: Final = len(_OF_TASK) + len(_OF_BACKLOG)

Numbers: TypeAlias = defaultdict[tuple[str, str], float]
"""Metric values of a partition group. A key consists of a task ("" for the group) and a metric or sample state."""


def group_of(partition_id: str) -> str:
    """Return a partition's group, which is the partition name up to the first "@"."""
    return partition_id.partition("@")[0]


def tasks_of(numbers: Iterable[tuple[str, str]]) -> list[str]:
    """Return the distinct task names that occur in a group's `Numbers`."""
    return [task for task in dict.fromkeys(task for task, _ in numbers) if task]


def _counts_of(partition: Partition) -> Counter[tuple[str, str]]:
    """Return the current counter values of a partition, by task and metric."""
    table = partition.table
    counts = Counter(
        {
            ("", "samples_inserted"): table.next_index,
            ("", "samples_cleared"): table.removed_count,
            ("", "samples_released"): partition.released_count,
            ("", "samples_aged_out"): partition.expired_count,
        }
    )
    for task in partition.tasks.values():
        for name, metric in _TOTALS:
            counts[task.name, metric] = getattr(task.totals, name)
    return counts


class PartitionGroups:
    """Partition metrics summed per group. Counters also include removed partitions.

    Args:
        catalog: catalog of the partitions.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        # Added to the counters of existing partitions. Contains the counts of removed partitions, minus the initial
        # counts of restored partitions, which another process has counted. Groups are ordered by their last change.
        self._former: OrderedDict[str, Counter[tuple[str, str]]] = OrderedDict()
        self._changes: list[tuple[str, Counter[tuple[str, str]]]] = []  # applied to `_former` once no scrape is running
        self._is_collecting = False
        self._gone_count = 0  # partitions removed since `_bound` last ran
        for partition in catalog.partitions():
            self._follow(partition, "restored")
        catalog.on_partition.append(self._follow)

    def _follow(self, partition: Partition, event: str) -> None:
        counts = _counts_of(partition)
        if event == "restored":
            counts = Counter({key: -count for key, count in counts.items()})
        elif event == "removed":
            counts["", "samples_cleared"] += partition.table.present_count
            self._gone_count += 1
        else:
            return
        self._changes.append((group_of(partition.partition_id), counts))
        if not self._is_collecting:
            self._take_changes()

    def _take_changes(self) -> None:
        for group, counts in self._changes:
            self._former.setdefault(group, Counter()).update(counts)
            self._former.move_to_end(group)
        self._changes.clear()
        if self._gone_count >= _MOST_FORMER:
            self._bound()

    def _bound(self) -> None:
        """If there are too many groups without partitions, forget the oldest ones."""
        self._gone_count = 0
        there = {group_of(name) for name in self._catalog.names()}
        former = [group for group in self._former if group not in there]
        count = sum(1 + len(tasks_of(self._former[group])) for group in former)
        for group in former[:-1]:
            if count <= _MOST_FORMER:
                break
            count -= 1 + len(tasks_of(self._former.pop(group)))

    async def collect(self, slices: Slices) -> dict[str, Numbers]:
        """Return the metric values of all groups. Backlog metrics are added separately by `add_backlogs`.

        Other asyncio tasks can run between time slices. A partition that is removed during collection still counts as
        existing.
        """
        self._bound()
        self._is_collecting = True
        try:
            partitions, groups = self._catalog.partitions(), dict[str, Numbers]()
            for group, former in self._former.items():
                groups[group] = defaultdict(float, former)
                await slices.turn()
            for partition in partitions:
                numbers = groups.setdefault(group_of(partition.partition_id), defaultdict(float))
                await self._add(numbers, partition, slices)
        finally:
            self._is_collecting = False
            self._take_changes()
        return groups

    async def _add(self, numbers: Numbers, partition: Partition, slices: Slices) -> None:
        """Add a partition's current values to the totals of its partition group."""
        for key, count in _counts_of(partition).items():
            numbers[key] += count
        numbers["", "partitions"] += 1
        for name, state in _STATES:
            numbers["", name] += partition.state_counts[state]
        numbers["", "partition_bytes"] += partition.cells.used_bytes
        if partition.settings.is_bounded:
            numbers["", "waiting_puts"] += self._catalog.waiting_put_count(partition.partition_id)
        await slices.turn()
        for task in list(partition.tasks.values()):
            numbers[task.name, "task_pending_samples"] += task.backlog
            numbers[task.name, "task_leased_samples"] += task.leased_count
            numbers[task.name, "task_waiting_claims"] += self._catalog.waiting_count(partition, task.name)
            await slices.turn()

    async def add_backlogs(
        self,
        groups: Mapping[str, Numbers],
        shown: Mapping[str, Collection[str]],
        backlogs: Backlogs,
        slices: Slices,
    ) -> None:
        """For each task in `shown`, add the number of ready samples, the oldest version and the staleness.

        If a task's backlog is not known yet, its number of ready samples is omitted.
        """
        ready, oldest, staleness = (name for _, name, _ in _OF_BACKLOG)
        wanted: list[tuple[Partition, TaskLedger]] = []
        for partition in self._catalog.partitions():
            names = shown.get(group_of(partition.partition_id), ())
            wanted += [(partition, task) for name, task in partition.tasks.items() if task.backlog and name in names]
            await slices.turn()
        await backlogs.refresh(wanted)
        for group, names in shown.items():
            groups[group].update(((name, ready), 0) for name in names)
        for partition, task in wanted:
            name, numbers, backlog = task.name, groups[group_of(partition.partition_id)], backlogs.of(task)
            if backlog is None:
                numbers.pop((name, ready), None)
                continue
            if (name, ready) in numbers:
                numbers[name, ready] += backlog.ready_count or 0
            if (version := backlog.oldest_version) is not None:
                numbers[name, oldest] = min(version, numbers.get((name, oldest), version))
                numbers[name, staleness] = max(backlog.staleness_versions or 0, numbers[name, staleness])
            await slices.turn()


class ServiceMetrics:
    """Collects the metrics of a process. Use the collector only on the service's event loop.

    Args:
        instruments: measurements recorded while the service runs.
        facts: labels of the metric `tq_service_build_info`, such as version and role.
        running_count: function that returns the number of running calls.
        waiting_count: function that returns the number of waiting calls.

    Attributes:
        parts: functions, such as `of_storage`, that each return the metrics of a component.
        leads: function that returns whether this controller leads its cluster. Only the leader exposes shared state
            such as partitions, so that sums over all controllers do not count the state more than once.
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
        self._partitions: tuple[PartitionGroups, Backlogs] | None = None
        self.parts: list[Callable[[], Iterable[Metric]]] = [self._of_process, self._of_calls, self._of_batches]
        self.leads: Callable[[], bool] = lambda: True
        # Groups and their tasks, both in order of first appearance.
        self._seen: dict[str, dict[str, None]] = {}
        self._scraping = asyncio.Lock()

    def add_partitions(self, catalog: Catalog, backlogs: Backlogs) -> None:
        """Add the metrics of a controller: partitions, policies, and task backlogs."""
        self._partitions = PartitionGroups(catalog), backlogs
        self.parts.append(lambda: of_policies(catalog.policies) if self.leads() else ())
        imbalance, padding = self._instruments.imbalance, self._instruments.padding

        def count(sampler: str, batch: Any) -> None:
            if batch.tokens_per_rank:
                imbalance.of(sampler).observe(batch.imbalance)
                padding.of(sampler).observe(batch.padding_share)

        catalog.on_batch.append(count)

    async def measure_loop(self) -> None:
        """Measure the event loop's lag periodically until cancelled."""
        observe = self._instruments.loop_lag.observe
        while True:
            began_at = time.perf_counter()
            await asyncio.sleep(_LAG_PERIOD_SECONDS)
            observe(max(0.0, time.perf_counter() - began_at - _LAG_PERIOD_SECONDS))

    # Scraping

    async def collect(self) -> list[Metric]:
        """Collect and return the current metrics."""
        async with self._scraping:
            slices = Slices()
            metrics = []
            for part in self.parts:
                for metric in part():
                    metrics.append(metric)
                    await slices.turn()
            if self._partitions is not None and self.leads():
                left = MOST_LINES - _LINES_LEFT - sum(len(metric.samples) + 2 for metric in metrics)
                metrics += await self._of_partitions(*self._partitions, left, slices)
            return metrics

    def _of_process(self) -> Iterator[Metric]:
        yield InfoMetricFamily("tq_service_build", "Versions and role of the process.", value=self._info)
        yield _gauge("running_calls", "Running calls, including waiting calls.", self._running_count())
        yield _gauge("waiting_calls", "Calls waiting for samples or capacity.", self._waiting_count())
        text = "How late the event loop starts a task that is due, in seconds."
        yield _histogram("tq_service_loop_lag_seconds", text, (), {(): self._instruments.loop_lag})

    def _of_calls(self) -> Iterator[Metric]:
        calls = {(each.shape, each.service, each.method): each for each in self._instruments.calls.values()}
        started = CounterMetricFamily("grpc_server_started", "Number of calls received.", labels=_METHOD)
        handled = CounterMetricFamily(
            "grpc_server_handled", "Number of completed calls.", labels=(*_METHOD, "grpc_code")
        )
        for method, counts in calls.items():
            started.add_metric(method, counts.started)
            for code, count in sorted(counts.handled.items()):
                handled.add_metric((*method, code), count)
        yield from (started, handled)
        text = "Duration of calls, excluding the time spent waiting for samples or capacity."
        handling = {method: counts.handling for method, counts in calls.items()}
        yield _histogram("grpc_server_handling_seconds", text, _METHOD, handling)
        text = "Time that calls spent waiting for samples or capacity."
        waits = {method: counts.waits for method, counts in calls.items() if counts.waits is not None}
        yield _histogram("tq_service_wait_seconds", text, _METHOD, waits)

    def _of_batches(self) -> Iterator[Metric]:
        for name, text, histograms in (
            ("plan_seconds", "Time spent planning a batch.", self._instruments.plan_seconds),
            (
                "batch_imbalance_ratio",
                "Tokens on a batch's heaviest rank divided by the mean over all ranks, minus 1.",
                self._instruments.imbalance,
            ),
            ("batch_padding_ratio", "Share of padding in a planned batch.", self._instruments.padding),
        ):
            by_sampler = {(sampler,): histogram for sampler, histogram in histograms.by_name.items()}
            yield _histogram(f"tq_service_{name}", text, ("sampler",), by_sampler)

    async def _of_partitions(
        self, parts: PartitionGroups, backlogs: Backlogs, most_lines: int, slices: Slices
    ) -> list[Metric]:
        groups = await parts.collect(slices)
        shown, dropped_count = await self._choose(groups, most_lines, slices)
        await parts.add_backlogs(groups, shown, backlogs, slices)
        text = f"Series of partition groups and tasks omitted to limit a scrape to {MOST_LINES} lines."
        states = {(group, state): groups[group]["", state] for group in shown for state, _ in _STATES}
        metrics = [
            _gauge("metrics_dropped_series", text, dropped_count),
            _gauge("samples", "Stored samples by state.", states, (*_GROUP, "state")),
        ]
        of_groups = [(group, "") for group in shown]
        of_tasks = [(group, task) for group, tasks in shown.items() for task in tasks]
        for labels, rows, table, missing in (
            (_GROUP, of_groups, _OF_GROUP, 0),
            (_TASK, of_tasks, _OF_TASK, 0),
            (_TASK, of_tasks, _OF_BACKLOG, None),
        ):
            for family, name, text in table:
                metric = family(f"tq_service_{name}", text, labels=labels)
                for group, task in rows:
                    if (value := groups[group].get((task, name), missing)) is not None:
                        metric.add_metric((group, task)[: len(labels)], value)
                    await slices.turn()
                metrics.append(metric)
        return metrics

    async def _choose(
        self, groups: Mapping[str, Numbers], most_lines: int, slices: Slices
    ) -> tuple[dict[str, list[str]], int]:
        """Choose the groups and tasks to expose, and return each group's tasks and the number of omitted series.

        Groups that have partitions take precedence. Groups and tasks are ordered by first appearance, so new groups do
        not displace series from earlier scrapes.
        """
        self._seen = {group: self._seen.get(group, {}) for group in (*self._seen, *groups) if group in groups}
        order = sorted(self._seen, key=lambda group: not groups[group]["", "partitions"])
        tasks = {}
        for group in order:
            there = dict.fromkeys(tasks_of(groups[group]))
            self._seen[group] = {task: None for task in (*self._seen[group], *there) if task in there}
            tasks[group] = list(self._seen[group])
            await slices.turn()
        most_groups = int(most_lines * _GROUPS_SHARE) // _LINES_OF_GROUP
        total_count = _LINES_OF_GROUP * len(order) + _LINES_OF_TASK * sum(map(len, tasks.values()))
        if total_count <= most_lines:
            most_groups = len(order)
        shown: dict[str, list[str]] = {}
        left = (most_lines - _LINES_OF_GROUP * min(len(order), most_groups)) // _LINES_OF_TASK
        for group in order[:most_groups]:
            shown[group] = tasks[group][: max(0, left)]
            left -= len(shown[group])
        shown_count = _LINES_OF_GROUP * len(shown) + _LINES_OF_TASK * sum(map(len, shown.values()))
        return shown, total_count - shown_count


def of_policies(policies: Policies) -> Iterator[Metric]:
    """Yield the metrics of the first `_MOST_POLICIES` policies."""
    versions = {(name,): policy.version for name, policy in islice(policies.items(), _MOST_POLICIES)}
    yield _gauge("policy_version", "Published version of a policy.", versions, ("policy",))


def of_storages(counts: Mapping[str, int], lost: int, taken_over: int) -> Iterator[Metric]:
    """Yield metrics that count known storage services by state, as well as lost and adopted storage services."""
    by_state = {(state,): count for state, count in counts.items()}
    yield _gauge("storages", "Storage services known to the controller.", by_state, ("state",))
    yield _counter("storages_lost", "Lost storage services that had a mirror.", lost)
    yield _counter("storages_taken_over", "Lost storage services whose puts another service took over.", taken_over)


def of_cluster(name: str, lags: Mapping[str, int] | None) -> Iterator[Metric]:
    """Yield the metrics of a controller cluster, including the standbys' lags if this controller leads."""
    text = "1 if this controller leads its cluster, otherwise 0."
    yield _gauge("controller_leads", text, {(name,): lags is not None}, ("cluster",))
    if lags is not None:
        text = "Journal records that a standby has not applied yet, as seen by the leader."
        behind = {(name, controller): count for controller, count in lags.items()}
        yield _gauge("standby_lag_records", text, behind, ("cluster", "controller"))


def of_storage(storage_id: str, own: EngineStat, adopted: Sequence[EngineStat]) -> Iterator[Metric]:
    """Yield the metrics of a storage service and its mirror.

    Puts adopted from a lost service are counted under the adopting service's name, because the two services may have
    the same name and each name can have only one series.
    """
    rows: list[tuple[Callable[..., Metric], str, str, float | None]] = [
        (_gauge, "used_bytes", "Bytes stored or reserved in the storage service.", own.used_bytes),
        (_gauge, "quota_bytes", "Maximum number of bytes to store; absent without a quota.", own.max_bytes),
        (_gauge, "pooled_bytes", "Bytes of unused memory kept for reuse.", own.pooled_bytes),
        (_gauge, "puts", "Number of stored puts.", own.put_count),
        (_gauge, "uncommitted_puts", "Puts waiting to be committed.", own.uncommitted_put_count),
        (_gauge, "damaged_puts", "Puts known to have lost bytes.", own.damaged_put_count),
        (_counter, "written_bytes", "Bytes written by completed puts.", own.written_bytes),
        (_counter, "read_bytes", "Bytes requested by reads.", own.read_bytes),
    ]
    mirrors = [stat.mirror for stat in (own, *adopted) if stat.mirror is not None]
    if mirrors:
        answers = [mirror.is_reachable for mirror in mirrors if mirror.is_reachable is not None]
        text = "1 if the mirror answered the last call, otherwise 0; absent before the first call."
        rows.append((_gauge, "mirror_answers", text, all(answers) if answers else None))
        text = "Puts taken over from lost storage services."
        rows.append((_gauge, "mirror_adopted_puts", text, sum(stat.put_count for stat in adopted)))
        for name, attribute, text in (
            ("unmirrored_bytes", "unmirrored_bytes", "Bytes of puts that lack the required copies."),
            ("short_puts", "short_put_count", "Puts with the required number of copies, but fewer than requested."),
            (
                "unfetched_puts",
                "unfetched_put_count",
                "Puts taken over whose bytes were not fetched from the mirror yet.",
            ),
            ("spilled_bytes", "spilled_bytes", "Bytes stored only in the mirror."),
        ):
            rows.append((_gauge, f"mirror_{name}", text, sum(getattr(mirror, attribute) for mirror in mirrors)))
    for family, name, text, value in rows:
        if value is not None:
            yield family(f"storage_{name}", text, {(storage_id,): value}, ("storage",))


def of_bulk(storage_id: str, connection_count: int, moved_bytes: int) -> Iterator[Metric]:
    """Yield the metrics of a storage service's bulk port."""
    text = "Client connections to the bulk port that have transferred data."
    yield _gauge("storage_bulk_connections", text, {(storage_id,): connection_count}, ("storage",))
    text = "Bytes of puts and gets transferred over bulk connections."
    yield _counter("storage_bulk_bytes", text, {(storage_id,): moved_bytes}, ("storage",))


def of_log(lag: LogLag) -> Iterator[Metric]:
    """Yield the metrics of the controller's log of state changes."""
    for name, text, value in (
        ("unflushed_records", "Log records that are not durable yet.", lag.unflushed_count),
        ("replay_seconds", "Estimated time to replay the log at startup.", lag.replay_seconds),
        (
            "snapshot_age_seconds",
            "Time since the last snapshot, or since startup if no snapshot was written.",
            lag.snapshot_age_seconds,
        ),
        ("failing", "1 if the last write to the log failed, otherwise 0.", lag.is_failing),
        ("disk_low", "1 if puts are refused because the disk is almost full, otherwise 0.", lag.is_disk_low),
    ):
        yield _gauge(f"log_{name}", text, value)


def of_recording(status: RecordingStatus) -> Iterator[Metric]:
    """Yield the metrics of batch recording."""
    for family, name, text, value in (
        (
            _gauge,
            "up",
            "1 while steps are recorded, 0 after an error stopped the recording.",
            float(status.is_recording),
        ),
        (_gauge, "steps", "Number of steps in the recording.", status.step_count),
        (_gauge, "stored_bytes", "Bytes stored for the recording's steps.", status.stored_bytes),
        (_gauge, "pending_bytes", "Bytes in memory waiting to be recorded.", status.pending_bytes),
        (_counter, "recorded_steps", "Number of recorded steps.", status.recorded_step_count),
        (_counter, "skipped_steps", "Steps that could not be recorded.", status.skipped_step_count),
        (_counter, "removed_steps", "Old steps removed to make space for new steps.", status.removed_step_count),
        (_counter, "copied_bytes", "Bytes of puts recorded by copying.", status.copied_bytes),
        (_counter, "linked_bytes", "Bytes of puts recorded by linking their files.", status.linked_bytes),
        (_counter, "processor_seconds", "Processor time spent on recording.", status.processor_seconds),
    ):
        yield family(f"recording_{name}", text, value)


_Values = Mapping[Any, float]  # metric values by label values


def _gauge(name: str, text: str, value: float | _Values, labels: Sequence[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"tq_service_{name}", text, labels=labels), value)


def _counter(name: str, text: str, value: float | _Values, labels: Sequence[str] = ()) -> Metric:
    return _filled(CounterMetricFamily(f"tq_service_{name}", text, labels=labels), value)


def _filled(metric: GaugeMetricFamily | CounterMetricFamily, value: float | _Values) -> Metric:
    for labels, each in value.items() if isinstance(value, Mapping) else (((), value),):
        metric.add_metric(labels, float(each))
    return metric


def _histogram(name: str, text: str, labels: Sequence[str], histograms: Mapping[Any, Histogram]) -> Metric:
    metric = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in histograms.items():
        metric.add_metric(values, buckets=histogram.buckets(), sum_value=histogram.sum)
    return metric
