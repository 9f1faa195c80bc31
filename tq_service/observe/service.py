"""What one process of the service shows to Prometheus, read from where it is at the moment of a scrape.

All of it is read on the event loop, in slices; what becomes text does so on the thread of the scrape. The series of
calls and of the process are few. Those of partitions are by their group, and by task: of so many that a scrape would
have more lines than `MOST_LINES`, those that came first are shown, for as long as they have partitions, and the rest is
counted in `tq_service_metrics_dropped_series`.

A trainer may make a partition for each step (`train@0`, `train@1`, ...): so all of a group, a name up to its first "@",
are one series, and counts of those that are gone stay in it. They begin with 0 at each start, as counts in Prometheus
may: what was recovered, or restored from a checkpoint, was counted by the process that did it.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Final
from weakref import WeakKeyDictionary

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from tq_service.durable.state_store import LogLag
from tq_service.observe.instruments import Histogram, Instruments
from tq_service.serving.backlogs import Backlog, Backlogs
from tq_service.serving.catalog import Catalog
from tq_service.serving.sweep import Slices
from tq_service.state.ledger import TaskLedger, TaskTotals
from tq_service.state.partition import Partition
from tq_service.state.table import FAILED, HELD, LIVE
from tq_service.storage.engine import EngineStat

MOST_LINES: Final = 3_000
_LINES_LEFT: Final = 150  # for what Python's client says of the process, and for lines of help
_GROUPS_SHARE: Final = 0.6  # of the lines of partitions that are for groups at most
_LAG_PERIOD_SECONDS: Final = 0.1
_GROUP: Final = ("partition_group",)
_TASK: Final = ("partition_group", "task")
_METHOD: Final = ("grpc_type", "grpc_service", "grpc_method")
_MOST_FORMER: Final = 1024  # groups of which partitions are gone, and their tasks
_TOTALS: Final = tuple(each.name for each in fields(TaskTotals))
_NO_TOTALS: Final = TaskTotals()


def group_of(partition_id: str) -> str:
    """Return the group of a partition."""
    return partition_id.partition("@")[0]


def _as_gauge(name: str, text: str, default: float | None = 0) -> Any:
    """Return a field that is shown as a gauge, None as nothing."""
    return field(default=default, metadata={"kind": GaugeMetricFamily, "name": f"tq_service_{name}", "text": text})


def _as_counter(name: str, text: str) -> Any:
    """Return a field that is shown as a counter; it counts since the start."""
    return field(default=0, metadata={"kind": CounterMetricFamily, "name": f"tq_service_{name}", "text": text})


@dataclass(slots=True, kw_only=True, eq=False)
class TaskNumbers:
    """One task in all partitions of a group, with the metric that shows each number.

    The counters are those of `TaskTotals`.
    """

    pending: int = _as_gauge("task_pending_samples", "Samples that are left for a task, ready or not.")
    ready: int | None = _as_gauge(
        "task_ready_samples", "Samples that claims like the task's last one could get.", default=None
    )
    leased: int = _as_gauge("task_leased_samples", "Samples that are leased and not acknowledged.")
    waiting: int = _as_gauge("task_waiting_claims", "Calls that wait for a claim.")
    oldest_version: float | None = _as_gauge(
        "task_oldest_version", "The lowest version of a sample that is left for a task.", default=None
    )
    staleness: float | None = _as_gauge(
        "task_staleness_versions",
        "How far the newest version of a partition is above the oldest that is left for a task.",
        default=None,
    )
    delivered: int = _as_counter("samples_delivered", "Samples delivered to a task, each as often as it was.")
    redelivered: int = _as_counter("samples_redelivered", "Samples delivered again since a lease on them ran out.")
    expired: int = _as_counter("leased_samples_expired", "Samples whose leases ran out.")
    dead_lettered: int = _as_counter("samples_dead_lettered", "Samples delivered too often without being acknowledged.")

    def add_backlog(self, backlog: Backlog | None) -> None:
        """Add the backlog of one partition; None: it is not known."""
        if backlog is None or self.ready is None:
            self.ready = None
            return
        self.ready += backlog.ready_count or 0
        if (oldest := backlog.oldest_version) is None:
            return
        self.oldest_version = oldest if self.oldest_version is None else min(oldest, self.oldest_version)
        self.staleness = max(backlog.staleness_versions or 0.0, self.staleness or 0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class GroupNumbers:
    """All partitions of a group, with the metric that shows each number.

    Attributes:
        states: samples that are there, by the name of their state.
        tasks: by name.
    """

    partitions: int = _as_gauge("partitions", "Partitions.")
    value_bytes: int = _as_gauge("partition_bytes", "Bytes of the values of samples.")
    waiting_puts: int = _as_gauge("waiting_puts", "Puts that wait for capacity in their partition.")
    inserted: int = _as_counter("samples_inserted", "Samples inserted.")
    cleared: int = _as_counter("samples_cleared", "Samples cleared, alone or with their partition.")
    states: dict[str, int] = field(default_factory=lambda: {"live": 0, "held": 0, "failed": 0})
    tasks: defaultdict[str, TaskNumbers] = field(default_factory=lambda: defaultdict(TaskNumbers))


_GAUGES: Final[dict[type[object], list[tuple[str, Any]]]] = {
    kind: [(each.name, each.default) for each in fields(kind) if each.metadata.get("kind") is GaugeMetricFamily]
    for kind in (GroupNumbers, TaskNumbers)
}


class PartitionGroups:
    """Counts by group, from the partitions there are and from those that are gone.

    Args:
        catalog: has the partitions.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._groups: OrderedDict[str, GroupNumbers] = OrderedDict()  # those that a partition went from last are last
        # Counts of each partition that its group includes already: samples inserted, cleared, and totals by task.
        self._counted: WeakKeyDictionary[Partition, tuple[int, int, dict[str, TaskTotals]]] = WeakKeyDictionary()
        self._gone_count = 0  # partitions that have gone since the groups were bounded
        for partition in catalog.partitions():
            self._follow(partition, "restored")
        catalog.on_partition.append(self._follow)

    def _follow(self, partition: Partition, event: str) -> None:
        if event == "restored":
            totals = {task.name: replace(task.totals) for task in partition.tasks.values()}
            self._counted[partition] = partition.table.next_index, partition.table.removed_count, totals
        elif event == "removed":
            self._count(partition).cleared += partition.table.present_count
            self._groups.move_to_end(group_of(partition.partition_id))
            self._gone_count += 1
            if self._gone_count >= _MOST_FORMER:
                self._bound()

    def _count(self, partition: Partition) -> GroupNumbers:
        """Add the new counts of a partition to its group since the last look, and return the group."""
        numbers = self._groups.setdefault(group_of(partition.partition_id), GroupNumbers())
        inserted, cleared, totals = self._counted.get(partition, (0, 0, {}))
        table = partition.table
        numbers.inserted += table.next_index - inserted
        numbers.cleared += table.removed_count - cleared
        for task in partition.tasks.values():
            if (before := totals.get(task.name, _NO_TOTALS)) != task.totals:
                own = numbers.tasks[task.name]
                for name in _TOTALS:
                    setattr(own, name, getattr(own, name) + getattr(task.totals, name) - getattr(before, name))
                totals[task.name] = replace(task.totals)
        self._counted[partition] = table.next_index, table.removed_count, totals
        return numbers

    def _bound(self) -> None:
        """Drop the oldest groups without partitions, if there are too many."""
        self._gone_count = 0
        there = {group_of(partition.partition_id) for partition in self._catalog.partitions()}
        former = [group for group in self._groups if group not in there]
        count = sum(1 + len(self._groups[group].tasks) for group in former)
        for group in former[:-1]:
            if count <= _MOST_FORMER:
                break
            count -= 1 + len(self._groups.pop(group).tasks)

    async def collect(self, slices: Slices) -> dict[str, GroupNumbers]:
        """Return the numbers of all groups, but for what is ready and how old it is.

        Other work has its turns between slices.
        """
        self._bound()
        for numbers in list(self._groups.values()):
            numbers.states = dict.fromkeys(numbers.states, 0)
            for each in (numbers, *numbers.tasks.values()):
                for name, default in _GAUGES[type(each)]:
                    setattr(each, name, default)
            await slices.turn()
        for partition in self._catalog.partitions():
            if self._catalog.find(partition.partition_id, missing_ok=True) is partition:
                await self._add(self._count(partition), partition, slices)
        return dict(self._groups)

    async def _add(self, numbers: GroupNumbers, partition: Partition, slices: Slices) -> None:
        """Add how a partition is now."""
        numbers.partitions += 1
        for name, state in (("live", LIVE), ("held", HELD), ("failed", FAILED)):
            numbers.states[name] += partition.state_counts[state]
        numbers.value_bytes += partition.cells.used_bytes
        if partition.settings.is_bounded:
            numbers.waiting_puts += self._catalog.waiting_put_count(partition.partition_id)
        await slices.turn()
        for task in list(partition.tasks.values()):
            of_task = numbers.tasks[task.name]
            of_task.pending += task.backlog
            of_task.leased += task.leased_count
            of_task.waiting += self._catalog.waiting_count(partition, task.name)
            await slices.turn()

    async def add_backlogs(
        self,
        groups: Mapping[str, GroupNumbers],
        shown: Mapping[str, Collection[str]],
        backlogs: Backlogs,
        slices: Slices,
    ) -> None:
        """Add what is ready and how old it is, for the tasks that are shown, by group.

        Where a task was not looked at yet, it is left out how much is ready.
        """
        wanted: list[tuple[Partition, TaskLedger]] = []
        for partition in self._catalog.partitions():
            names = shown.get(group_of(partition.partition_id), ())
            wanted += [(partition, task) for name, task in partition.tasks.items() if task.backlog and name in names]
            await slices.turn()
        await backlogs.refresh(wanted)
        for group, names in shown.items():
            for name in names:
                groups[group].tasks[name].ready = 0
        for partition, task in wanted:
            numbers = groups[group_of(partition.partition_id)].tasks.get(task.name)
            if numbers is not None:  # else it is new
                numbers.add_backlog(backlogs.of(task))
            await slices.turn()


_OF_GROUP: Final = [each for each in fields(GroupNumbers) if each.metadata]
_OF_TASK: Final = fields(TaskNumbers)
_LINES_OF_GROUP: Final = len(_OF_GROUP) + 3
_LINES_OF_TASK: Final = len(_OF_TASK)


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
        self._partitions: tuple[PartitionGroups, Backlogs] | None = None
        self._parts: list[Callable[[], Iterable[Metric]]] = [self._of_process]
        self._leads: Callable[[], bool] = lambda: True
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
        self._partitions = PartitionGroups(catalog), backlogs
        self._parts.append(lambda: _of_storages(storage_counts(), *adoption_counts()) if self._leads() else ())
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
        self._leads = leads
        self._parts.append(lambda: _of_cluster(name, lags() if leads() else None))

    def add_storage(
        self, storage_id: str, stat: Callable[[], EngineStat], adopted: Callable[[], Sequence[EngineStat]]
    ) -> None:
        """Show a storage service.

        Args:
            storage_id: its name.
            stat: returns sizes and counts of its own puts.
            adopted: returns those of what it has taken over from others.
        """
        self._parts.append(lambda: _of_storage(storage_id, stat(), adopted()))

    def add_log(self, lag: Callable[[], LogLag]) -> None:
        """Show the log."""
        self._parts.append(lambda: _of_log(lag()))

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
            metrics = []
            for part in (*self._parts, self._of_calls, self._of_batches):
                for metric in part():
                    metrics.append(metric)
                    await slices.turn()
            if self._partitions is not None and self._leads():
                left = MOST_LINES - _LINES_LEFT - sum(len(metric.samples) + 2 for metric in metrics)
                metrics += await self._of_partitions(*self._partitions, left, slices)
            return metrics

    def _of_process(self) -> Iterator[Metric]:
        yield InfoMetricFamily("tq_service_build", "Versions, and what the process is.", value=self._info)
        yield _gauge("running_calls", "Calls that are handled, waits included.", self._running_count())
        yield _gauge("waiting_calls", "Calls that wait for samples or capacity.", self._waiting_count())
        text = "How much later than it was due the event loop got to something."
        yield _histogram("tq_service_loop_lag_seconds", text, (), {(): self._instruments.loop_lag})

    def _of_calls(self) -> Iterator[Metric]:
        calls = {(each.shape, each.service, each.method): each for each in self._instruments.calls.values()}
        started = CounterMetricFamily("grpc_server_started", "Calls that came.", labels=_METHOD)
        handled = CounterMetricFamily("grpc_server_handled", "Calls that are over.", labels=(*_METHOD, "grpc_code"))
        for method, counts in calls.items():
            started.add_metric(method, counts.started)
            for code, count in sorted(counts.handled.items()):
                handled.add_metric((*method, code), count)
        yield from (started, handled)
        text = "How long calls took, without their waits."
        handling = {method: counts.handling for method, counts in calls.items()}
        yield _histogram("grpc_server_handling_seconds", text, _METHOD, handling)
        text = "For how long each call of a method that may wait has waited, for samples or for capacity."
        waits = {method: counts.waits for method, counts in calls.items() if counts.waits is not None}
        yield _histogram("tq_service_wait_seconds", text, _METHOD, waits)

    def _of_batches(self) -> Iterator[Metric]:
        for name, text, histograms in (
            ("plan_seconds", "How long plans took that came to a batch.", self._instruments.plan_seconds),
            (
                "batch_imbalance_ratio",
                "By how much the heaviest rank of a batch has more tokens than the mean.",
                self._instruments.imbalance,
            ),
            ("batch_padding_ratio", "The share of padding of a batch.", self._instruments.padding),
        ):
            by_sampler = {(sampler,): histogram for sampler, histogram in histograms.by_name.items()}
            yield _histogram(f"tq_service_{name}", text, ("sampler",), by_sampler)

    async def _of_partitions(
        self, parts: PartitionGroups, backlogs: Backlogs, most_lines: int, slices: Slices
    ) -> list[Metric]:
        groups = await parts.collect(slices)
        shown, dropped_count = await self._choose(groups, most_lines, slices)
        await parts.add_backlogs(groups, shown, backlogs, slices)
        text = f"Series of partition groups and tasks that are left out, since there are at most {MOST_LINES} lines."
        states = {(group, state): count for group in shown for state, count in groups[group].states.items()}
        metrics = [
            _gauge("metrics_dropped_series", text, dropped_count),
            _gauge("samples", "Samples that are there.", states, (*_GROUP, "state")),
        ]
        of_groups = {(group,): groups[group] for group in shown}
        of_tasks = {(group, task): groups[group].tasks[task] for group, tasks in shown.items() for task in tasks}
        wanted: list[tuple[Sequence[str], Mapping[Any, object], Field[Any]]] = [
            *((_GROUP, of_groups, each) for each in _OF_GROUP),
            *((_TASK, of_tasks, each) for each in _OF_TASK),
        ]
        for labels, numbers, each in wanted:
            metric = each.metadata["kind"](each.metadata["name"], each.metadata["text"], labels=labels)
            for values, counted in numbers.items():
                if (value := getattr(counted, each.name)) is not None:
                    metric.add_metric(values, value)
                await slices.turn()
            metrics.append(metric)
        return metrics

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


def _of_storages(counts: Mapping[str, int], lost: int, taken_over: int) -> Iterator[Metric]:
    by_state = {(state,): count for state, count in counts.items()}
    yield _gauge("storages", "Storage services that the controller knows.", by_state, ("state",))
    yield _counter("storages_lost", "Storage services with a mirror that were lost.", lost)
    yield _counter("storages_taken_over", "Of them, those whose puts another one has taken over.", taken_over)


def _of_cluster(name: str, lags: Mapping[str, int] | None) -> Iterator[Metric]:
    """Yield the metrics of a cluster; lags of standbys only if this controller leads and knows them."""
    text = "1: this controller leads its cluster."
    yield _gauge("controller_leads", text, {(name,): lags is not None}, ("cluster",))
    if lags is not None:
        text = "How many records of the journal a standby has not applied yet, as the leader sees it."
        behind = {(name, controller): count for controller, count in lags.items()}
        yield _gauge("standby_lag_records", text, behind, ("cluster", "controller"))


def _of_storage(storage_id: str, own: EngineStat, adopted: Sequence[EngineStat]) -> Iterator[Metric]:
    """Yield the metrics of a storage service and its mirror.

    What was taken over counts with the rest, since the service may have the old name itself, and a name has one series.
    """
    rows: list[tuple[Callable[..., Metric], str, str, float | None]] = [
        (_gauge, "used_bytes", "Bytes stored and reserved.", own.used_bytes),
        (_gauge, "quota_bytes", "The most bytes that may be stored; absent where there is no quota.", own.max_bytes),
        (_gauge, "pooled_bytes", "Bytes of memory held for reuse, besides those used.", own.pooled_bytes),
        (_gauge, "puts", "Puts stored.", own.put_count),
        (_gauge, "uncommitted_puts", "Puts that wait for their commit.", own.uncommitted_put_count),
        (_gauge, "damaged_puts", "Puts whose bytes are lost, as far as is known.", own.damaged_put_count),
        (_counter, "written_bytes", "Bytes of puts that were completed.", own.written_bytes),
        (_counter, "read_bytes", "Bytes of reads that were begun.", own.read_bytes),
    ]
    mirrors = [stat.mirror for stat in (own, *adopted) if stat.mirror is not None]
    if mirrors:
        answers = [mirror.is_reachable for mirror in mirrors if mirror.is_reachable is not None]
        text = "1: the mirror answered the last call; absent before the first one."
        rows.append((_gauge, "mirror_answers", text, all(answers) if answers else None))
        text = "Puts taken over from other storage services."
        rows.append((_gauge, "mirror_adopted_puts", text, sum(stat.put_count for stat in adopted)))
        for name, attribute, text in (
            ("unmirrored_bytes", "unmirrored_bytes", "Bytes of puts that do not have the copies required yet."),
            ("short_puts", "short_put_count", "Puts with the copies required, and fewer than asked for."),
            ("unfetched_puts", "unfetched_put_count", "Of them, those whose bytes were not fetched yet."),
            ("spilled_bytes", "spilled_bytes", "Bytes that count as used and are in the mirror alone."),
        ):
            rows.append((_gauge, f"mirror_{name}", text, sum(getattr(mirror, attribute) for mirror in mirrors)))
    for family, name, text, value in rows:
        if value is not None:
            yield family(f"storage_{name}", text, {(storage_id,): value}, ("storage",))


def _of_log(lag: LogLag) -> Iterator[Metric]:
    for name, text, value in (
        ("unflushed_records", "Records of the log that are not durable yet.", lag.unflushed_count),
        ("replay_seconds", "For how long a start would apply the log again, as estimated.", lag.replay_seconds),
        ("snapshot_age_seconds", "Time since the last snapshot, or since the start.", lag.snapshot_age_seconds),
        ("failing", "1: nothing could be written when it was last tried.", lag.is_failing),
        ("disk_low", "1: the disk has hardly any space left, and puts are refused.", lag.is_disk_low),
    ):
        yield _gauge(f"log_{name}", text, value)


_Values = Mapping[Any, float]  # by the values of the labels


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
