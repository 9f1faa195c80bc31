"""Partitions and their tasks in numbers, by the group of partitions: a name up to its first "@".

A trainer may make a partition for each step (`train@0`, `train@1`, ...): so all of a group are one series, and counts
of those that are gone stay in it. They begin with 0 at each start, as counts in Prometheus may: what was recovered, or
restored from a checkpoint, was counted by the process that did it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Final
from weakref import WeakKeyDictionary

from tq_service.serving.backlogs import Backlog, Backlogs
from tq_service.serving.catalog import Catalog
from tq_service.serving.sweep import Slices
from tq_service.state.ledger import TaskLedger, TaskTotals
from tq_service.state.partition import Partition
from tq_service.state.table import FAILED, HELD, LIVE

_MOST_FORMER: Final = 1024  # groups of which partitions are gone, and their tasks
_TOTALS: Final = tuple(each.name for each in fields(TaskTotals))


def group_of(partition_id: str) -> str:
    """Return the group of a partition."""
    return partition_id.partition("@")[0]


@dataclass(slots=True, kw_only=True, eq=False)
class TaskNumbers:
    """One task in all partitions of a group.

    Attributes:
        totals: what has become of its samples since the start.
        pending: samples that are left for it: live or held, neither consumed nor dead-lettered.
        leased: samples that are leased.
        waiting: calls that wait for a claim.
        ready: samples that claims like its last one could get, as far as was looked.
        oldest_version: the lowest version of a sample that is left for it.
        staleness: how far the highest version of a sample is above it, at most, in one partition.
    """

    totals: TaskTotals = field(default_factory=TaskTotals)
    pending: int = 0
    leased: int = 0
    waiting: int = 0
    ready: int | None = None
    oldest_version: float | None = None
    staleness: float | None = None

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
    """All partitions of a group.

    Attributes:
        inserted: samples inserted since the start.
        cleared: samples cleared since the start.
        tasks: by name.
        partitions: how many there are.
        live: samples that are live; held, failed: in these states.
        value_bytes: bytes of the values of their samples.
        waiting_puts: puts of new samples that wait for capacity.
    """

    inserted: int = 0
    cleared: int = 0
    tasks: dict[str, TaskNumbers] = field(default_factory=dict)
    partitions: int = 0
    live: int = 0
    held: int = 0
    failed: int = 0
    value_bytes: int = 0
    waiting_puts: int = 0

    def task(self, name: str) -> TaskNumbers:
        """Return a task, made on first use."""
        numbers = self.tasks.get(name)
        if numbers is None:
            numbers = self.tasks[name] = TaskNumbers()
        return numbers


@dataclass(slots=True, kw_only=True, eq=False)
class _Baseline:
    """What a partition had when counting began."""

    inserted: int = 0
    cleared: int = 0
    tasks: dict[str, TaskTotals] = field(default_factory=dict)


class PartitionGroups:
    """Counts by group, from the partitions there are and from those that are gone.

    Args:
        catalog: has the partitions.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._former: OrderedDict[str, GroupNumbers] = OrderedDict()  # totals of partitions that are gone
        self._collecting: tuple[dict[str, GroupNumbers], set[Partition]] | None = None  # so far, and of which
        self._baselines: WeakKeyDictionary[Partition, _Baseline] = WeakKeyDictionary()
        for partition in catalog.partitions():
            self._follow(partition, "restored")
        catalog.on_partition.append(self._follow)

    def _follow(self, partition: Partition, event: str) -> None:
        if event == "restored":
            tasks = {name: _copy(task.totals) for name, task in partition.tasks.items()}
            table = partition.table
            self._baselines[partition] = _Baseline(inserted=table.next_index, cleared=table.removed_count, tasks=tasks)
        elif event == "removed":
            group = group_of(partition.partition_id)
            self._add_removed(self._former.setdefault(group, GroupNumbers()), partition)
            self._former.move_to_end(group)
            while len(self._former) > 1 and sum(1 + len(each.tasks) for each in self._former.values()) > _MOST_FORMER:
                self._former.popitem(last=False)
            if self._collecting is not None and partition not in self._collecting[1]:
                self._add_removed(self._collecting[0].setdefault(group, GroupNumbers()), partition)

    def _add_removed(self, numbers: GroupNumbers, partition: Partition) -> None:
        self._add_totals(numbers, partition)
        numbers.cleared += partition.table.present_count

    def _add_totals(self, numbers: GroupNumbers, partition: Partition) -> None:
        before = self._baselines.get(partition)
        table = partition.table
        numbers.inserted += table.next_index - (0 if before is None else before.inserted)
        numbers.cleared += table.removed_count - (0 if before is None else before.cleared)
        for name, task in partition.tasks.items():
            _add(numbers.task(name).totals, task.totals, 1)
            if before is not None and name in before.tasks:
                _add(numbers.task(name).totals, before.tasks[name], -1)

    async def collect(self, slices: Slices) -> dict[str, GroupNumbers]:
        """Return the numbers of all groups, but for what is ready and how old it is.

        Other work has its turns meanwhile; a partition that is removed is counted once all the same, lest a count that
        falls for one scrape is taken for that of a new process.
        """
        groups = {group: _copy_of_gone(former) for group, former in self._former.items()}
        done: set[Partition] = set()
        self._collecting = groups, done
        try:
            await self._collect(groups, done, slices)
        finally:
            self._collecting = None
        return groups

    async def _collect(self, groups: dict[str, GroupNumbers], done: set[Partition], slices: Slices) -> None:
        for partition in self._catalog.partitions():
            if self._catalog.find(partition.partition_id, missing_ok=True) is not partition:
                continue
            done.add(partition)
            numbers = groups.setdefault(group_of(partition.partition_id), GroupNumbers())
            self._add_totals(numbers, partition)
            states = partition.state_counts
            numbers.partitions += 1
            numbers.live += states[LIVE]
            numbers.held += states[HELD]
            numbers.failed += states[FAILED]
            numbers.value_bytes += partition.cells.used_bytes
            if partition.settings.is_bounded:
                numbers.waiting_puts += self._catalog.waiting_put_count(partition.partition_id)
            await slices.turn()
            for task in list(partition.tasks.values()):
                of_task = numbers.task(task.name)
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


def _copy_of_gone(former: GroupNumbers) -> GroupNumbers:
    copied = GroupNumbers(inserted=former.inserted, cleared=former.cleared)
    for name, gone in former.tasks.items():
        _add(copied.task(name).totals, gone.totals, 1)
    return copied


def _copy(totals: TaskTotals) -> TaskTotals:
    copied = TaskTotals()
    _add(copied, totals, 1)
    return copied


def _add(totals: TaskTotals, others: TaskTotals, sign: int) -> None:
    for name in _TOTALS:
        setattr(totals, name, getattr(totals, name) + sign * getattr(others, name))
