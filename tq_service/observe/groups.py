"""Partitions and their tasks in numbers, by the group of partitions: a name up to its first "@".

A trainer may make a partition for each step (`train@0`, `train@1`, ...): so all of a group are one series, and counts
of those that are gone stay in it. They begin with 0 at each start, as counts in Prometheus may: what was recovered, or
restored from a checkpoint, was counted by the process that did it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final
from weakref import WeakKeyDictionary

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from tq_service.serving.backlogs import Backlog, Backlogs
from tq_service.serving.catalog import Catalog
from tq_service.serving.sweep import Slices
from tq_service.state.ledger import TaskLedger, TaskTotals
from tq_service.state.partition import Partition
from tq_service.state.table import FAILED, HELD, LIVE

_MOST_FORMER: Final = 1024  # groups of which partitions are gone, and their tasks
_TOTALS: Final = tuple(each.name for each in fields(TaskTotals))
_NO_TOTALS: Final = TaskTotals()


def group_of(partition_id: str) -> str:
    """Return the group of a partition."""
    return partition_id.partition("@")[0]


def _gauge(name: str, text: str, default: float | None = 0) -> Any:
    """Return a field that is shown as a gauge, None as nothing."""
    return field(default=default, metadata={"kind": GaugeMetricFamily, "name": f"tq_service_{name}", "text": text})


def _counter(name: str, text: str) -> Any:
    """Return a field that is shown as a counter; it counts since the start."""
    return field(default=0, metadata={"kind": CounterMetricFamily, "name": f"tq_service_{name}", "text": text})


@dataclass(slots=True, kw_only=True, eq=False)
class TaskNumbers:
    """One task in all partitions of a group, with the metric that shows each number.

    The counters are those of `TaskTotals`.
    """

    pending: int = _gauge("task_pending_samples", "Samples that are left for a task, ready or not.")
    ready: int | None = _gauge(
        "task_ready_samples", "Samples that claims like the task's last one could get.", default=None
    )
    leased: int = _gauge("task_leased_samples", "Samples that are leased and not acknowledged.")
    waiting: int = _gauge("task_waiting_claims", "Calls that wait for a claim.")
    oldest_version: float | None = _gauge(
        "task_oldest_version", "The lowest version of a sample that is left for a task.", default=None
    )
    staleness: float | None = _gauge(
        "task_staleness_versions",
        "How far the newest version of a partition is above the oldest that is left for a task.",
        default=None,
    )
    delivered: int = _counter("samples_delivered", "Samples delivered to a task, each as often as it was.")
    redelivered: int = _counter("samples_redelivered", "Samples delivered again since a lease on them ran out.")
    expired: int = _counter("leased_samples_expired", "Samples whose leases ran out.")
    dead_lettered: int = _counter("samples_dead_lettered", "Samples delivered too often without being acknowledged.")

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

    partitions: int = _gauge("partitions", "Partitions.")
    value_bytes: int = _gauge("partition_bytes", "Bytes of the values of samples.")
    waiting_puts: int = _gauge("waiting_puts", "Puts that wait for capacity in their partition.")
    inserted: int = _counter("samples_inserted", "Samples inserted.")
    cleared: int = _counter("samples_cleared", "Samples cleared, alone or with their partition.")
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
