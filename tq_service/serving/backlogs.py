"""Task backlogs: the number of ready samples and their versions, computed by scanning a partition's rows."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import TqError
from tq_service.planning.view import Readiness
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import RunsPlans
from tq_service.serving.sweep import Slices, sweep
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest
from tq_service.state.table import LIVE

_SHARE_OF_TIME: Final = 0.02
_WAIT_SECONDS: Final = 0.03
_FIRST_WAIT_SECONDS: Final = 0.25
_MOST_AGE_SECONDS: Final = 300.0
_VERSION_COLUMN: Final = "version"
_NO_VERSIONS: Final = (math.inf, -math.inf)

Marks: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """A task's backlog as of the last scan.

    Attributes:
        ready_count: number of samples that a claim like the task's last one could receive, or None if there is no last
            claim.
        oldest_version: lowest version among the samples left for the task, or None if none of them has a version.
        newest_version: highest version among all stored samples, or None if no sample has a version.
    """

    ready_count: int | None
    oldest_version: float | None
    newest_version: float | None

    @property
    def staleness_versions(self) -> float | None:
        """Staleness, in versions, of the oldest sample left for the task, or None if those samples have no versions."""
        if self.oldest_version is None:
            return None
        return 0.0 if self.newest_version is None else max(0.0, self.newest_version - self.oldest_version)


NO_BACKLOG: Final = Backlog(ready_count=None, oldest_version=None, newest_version=None)


@dataclass(slots=True, kw_only=True, eq=False)
class _Known:
    """A task's last backlog, the marks that identify the scanned state, and the earliest time of the next scan."""

    backlog: Backlog
    marks: Marks
    next_at: float


class Backlogs:
    """Caches task backlogs and recomputes them after changes.

    Metrics and status responses report the same cached backlogs. A single scan covers all tasks of a partition.
    Scanning a large partition takes a long time, so `refresh` waits at most 30 ms for the scan, or 250 ms if a backlog
    is unknown. Longer scans continue in the background. After a scan, the scanned backlogs are not recomputed until
    fifty times the scan's duration has passed. Scans therefore take at most 2 % of the time.

    Args:
        catalog: the controller's partitions.
        runner: plan runner that provides the length source of each sampler.
    """

    def __init__(self, catalog: Catalog, runner: RunsPlans) -> None:
        self._catalog = catalog
        self._runner = runner
        self._known: WeakKeyDictionary[TaskLedger, _Known] = WeakKeyDictionary()  # weak, to free cleared partitions
        self._looks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # held by the scan in progress
        self._is_closed = False

    def of(self, task: TaskLedger) -> Backlog | None:
        """Return the last known backlog of a task, or None if the backlog is unknown."""
        known = self._known.get(task)
        return None if known is None else known.backlog

    async def refresh(self, wanted: Iterable[tuple[Partition, TaskLedger]]) -> None:
        """Recompute those of the given backlogs that are due. A long scan may continue after this method returns."""
        slices, loop, wait_seconds = Slices(), asyncio.get_running_loop(), _WAIT_SECONDS
        due = defaultdict[Partition, list[TaskLedger]](list)
        for partition, task in wanted:
            if self._is_due(partition, task):
                due[partition].append(task)
                known = self._known.get(task)
                if known is None or known.next_at < loop.time() - _MOST_AGE_SECONDS:
                    self._known.pop(task, None)  # too old to report
                    wait_seconds = _FIRST_WAIT_SECONDS
            await slices.turn()
        if due and not self._is_closed:
            look = loop.create_task(self._look_at(due, slices))
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)
            await asyncio.wait((look,), timeout=wait_seconds)

    async def close(self) -> None:
        """Cancel all scans and prevent new ones."""
        self._is_closed = True
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)

    async def _look_at(self, wanted: Mapping[Partition, Sequence[TaskLedger]], slices: Slices) -> None:
        async with self._turn:
            for partition, tasks in wanted.items():
                is_there = self._catalog.find(partition.partition_id, missing_ok=True) is partition
                due = [task for task in tasks if is_there and self._is_due(partition, task)]
                marks = [self._marks(partition, task) for task in due]
                looks = [_Look(partition, task, self._readiness(partition, task)) for task in due]
                used_seconds = await sweep(partition.table, looks, slices)
                next_at = asyncio.get_running_loop().time() + used_seconds / _SHARE_OF_TIME
                for task, of_task, look in zip(due, marks, looks, strict=True):
                    self._known[task] = _Known(backlog=look.backlog(), marks=of_task, next_at=next_at)
                await slices.turn()

    def _is_due(self, partition: Partition, task: TaskLedger) -> bool:
        """Return whether a task's backlog may have changed and enough time has passed since its last scan."""
        known, now = self._known.get(task), asyncio.get_running_loop().time()
        return known is None or (known.next_at <= now and known.marks != self._marks(partition, task))

    def _marks(self, partition: Partition, task: TaskLedger) -> Marks:
        """Return a value that changes whenever the backlog may have changed."""
        request = self._last_request(partition, task)
        kind = None if request is None else (request.spec, partition.resolved(request.batch_spec.where))
        removed_count = partition.table.removed_count
        return *partition.version, task.serial, task.leased_count, task.epoch, removed_count, kind

    def _last_request(self, partition: Partition, task: TaskLedger) -> ClaimRequest | None:
        planner = self._catalog.known_planner(partition, task.name)
        return None if planner is None else planner.last_request

    def _readiness(self, partition: Partition, task: TaskLedger) -> Readiness | None:
        request = self._last_request(partition, task)
        if request is None:
            return None
        try:
            return Readiness(partition, task, request.batch_spec, self._runner.length(request.sampler))
        except TqError:
            return None


def tasks_with_versions(partition: Partition) -> list[tuple[Partition, TaskLedger]]:
    """Return a partition's tasks that have samples left. The result is empty if versions are not numbers."""
    return [(partition, task) for task in partition.tasks.values() if task.backlog and _versions(partition) is not None]


def _versions(partition: Partition) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    """Return the versions of all rows and a mask of the rows with a version, or None if versions are not numbers."""
    arrays = partition.meta.arrays(_VERSION_COLUMN)
    return None if arrays is None or arrays[0].dtype.kind not in "if" else arrays


def _version_range(versions: NDArray[Any]) -> tuple[float, float]:
    """Return the lowest and the highest version, ignoring NaN."""
    versions = versions[~np.isnan(versions)]  # NaN marks rows without a version
    return (versions.min().item(), versions.max().item()) if versions.size else _NO_VERSIONS


class _Look:
    """Computes a task's backlog from one slice of rows at a time."""

    def __init__(self, partition: Partition, task: TaskLedger, readiness: Readiness | None) -> None:
        self.cost = 1 if readiness is None else max(1, len(readiness.key[1]))
        self._partition = partition
        self._task = task
        self._readiness = readiness
        self._ready_count = 0
        self._oldest, self._newest = math.inf, -math.inf

    def look(self, rows: slice) -> None:
        """Count the ready rows of a slice and update the version range."""
        if self._readiness is not None:
            try:
                ready = self._readiness.ready(rows)
                self._ready_count += int(np.count_nonzero(ready & ~self._task.skipped.data[rows]))
            except TqError:  # for example, a condition does not fit the type of its column
                self._readiness = None
        if (versions := _versions(self._partition)) is None:
            return
        values, present = versions[0][rows], versions[1][rows]
        is_there = present & (self._partition.state.data[rows] >= LIVE)
        is_left = present & self._task.is_pending(rows)
        self._newest = max(self._newest, _version_range(values[is_there])[1])
        self._oldest = min(self._oldest, _version_range(values[is_left])[0])

    def backlog(self) -> Backlog:
        """Return the backlog of the rows examined so far."""
        return Backlog(
            ready_count=None if self._readiness is None else self._ready_count,
            oldest_version=float(self._oldest) if math.isfinite(self._oldest) else None,
            newest_version=float(self._newest) if math.isfinite(self._newest) else None,
        )
