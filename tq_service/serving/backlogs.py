"""What tasks have left: how much of it is ready, and how old it is. A look is a pass over the rows of a partition."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from tq_service.errors import TqError
from tq_service.planning.view import Readiness
from tq_service.serving.admission import version_range
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import RunsPlans
from tq_service.serving.slices import Slices
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.table import LIVE

_SLICE_ROWS: Final = 16_384
_SHARE_OF_TIME: Final = 0.02
_WAIT_SECONDS: Final = 0.03
_FIRST_WAIT_SECONDS: Final = 0.25
_MOST_AGE_SECONDS: Final = 300.0
_DEFAULT_COLUMN: Final = "version"

Marks: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What a task had left when that was last looked at.

    Attributes:
        ready_count: samples that claims like the last one could get; None: no claim was seen.
        oldest_version: the lowest version of a sample that is left; None: none has one.
        newest_version: the highest version of a sample that is there; None: none has one.
    """

    ready_count: int | None
    oldest_version: float | None
    newest_version: float | None

    @property
    def staleness_versions(self) -> float | None:
        """How far the newest version is above the oldest that is left; None: none that is left has one."""
        if self.oldest_version is None:
            return None
        return 0.0 if self.newest_version is None else max(0.0, self.newest_version - self.oldest_version)


NO_BACKLOG: Final = Backlog(ready_count=None, oldest_version=None, newest_version=None)


@dataclass(slots=True, kw_only=True, eq=False)
class _Known:
    """What is known of a task, as of which marks, and from when on it may be looked at again."""

    backlog: Backlog
    marks: Marks
    next_at: float


class Backlogs:
    """Keeps what was last seen of the backlogs of tasks, and looks again where something has changed.

    Metrics and the status share the looks. A look at a large partition takes long, so a refresh waits for 30 ms at
    most, for 250 ms where a backlog was not seen yet, and looks go on after it. Each backlog is looked at again once
    fifty times as long has passed as the look took.

    Args:
        catalog: has the partitions.
        runner: knows what a sampler needs of each sample.
    """

    def __init__(self, catalog: Catalog, runner: RunsPlans) -> None:
        self._catalog = catalog
        self._runner = runner
        self._known: WeakKeyDictionary[TaskLedger, _Known] = WeakKeyDictionary()  # partitions go when they are cleared
        # Tasks that are to be looked at, in order, and futures of refreshes, resolved when their turn comes.
        self._queue: deque[TaskLedger | asyncio.Future[None]] = deque()
        self._queued: dict[TaskLedger, Partition] = {}
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False

    def of(self, task: TaskLedger) -> Backlog | None:
        """Return what was last seen of a task, None where it was not looked at yet."""
        known = self._known.get(task)
        return None if known is None else known.backlog

    async def refresh(self, wanted: Iterable[tuple[Partition, TaskLedger]]) -> None:
        """Look again at backlogs; it may go on after this returns."""
        slices, now = Slices(), asyncio.get_running_loop().time()
        unseen, due = list[tuple[Partition, TaskLedger]](), list[tuple[Partition, TaskLedger]]()
        for partition, task in wanted:
            if self._is_due(partition, task, now):
                known = self._known.get(task)
                if known is not None and known.next_at < now - _MOST_AGE_SECONDS:  # too old to show
                    del self._known[task]
                (unseen if task not in self._known else due).append((partition, task))
            await slices.turn()
        if self._is_closed or not (unseen or due):
            return
        for partition, task in (*unseen, *due):
            if task not in self._queued:
                self._queued[task] = partition
                self._queue.append(task)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(done)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_at_all())
        await asyncio.wait((done,), timeout=_FIRST_WAIT_SECONDS if unseen else _WAIT_SECONDS)

    async def close(self) -> None:
        """Look no more."""
        self._is_closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))

    async def _look_at_all(self) -> None:
        """Look at what is in the queue, until it is empty."""
        slices, loop = Slices(), asyncio.get_running_loop()
        try:
            while self._queue:
                if isinstance(task := self._queue.popleft(), asyncio.Future):
                    _resolve(task)
                    continue
                partition = self._queued.pop(task)
                is_there = self._catalog.find(partition.partition_id, missing_ok=True) is partition
                is_there = is_there and partition.tasks.get(task.name) is task
                if is_there and self._is_due(partition, task, loop.time()):
                    marks = self._marks(partition, task)
                    backlog, work_seconds = await self._look(partition, task, slices)
                    next_at = loop.time() + work_seconds / _SHARE_OF_TIME
                    self._known[task] = _Known(backlog=backlog, marks=marks, next_at=next_at)
                await slices.turn()
        finally:
            self._looking = None
            for each in self._queue:
                if isinstance(each, asyncio.Future):
                    _resolve(each)
            self._queue.clear()
            self._queued.clear()

    def _is_due(self, partition: Partition, task: TaskLedger, now: float) -> bool:
        """Whether a task is to be looked at: something has changed, and the last look was long enough ago."""
        known = self._known.get(task)
        return known is None or (known.next_at <= now and known.marks != self._marks(partition, task))

    def _marks(self, partition: Partition, task: TaskLedger) -> Marks:
        """Return what is equal at two moments where the backlog is the same."""
        request = self._catalog.last_request(partition, task.name)
        kind = None if request is None else request.spec
        removed_count = partition.table.removed_count
        return *partition.version, task.serial, task.leased_count, task.epoch, removed_count, kind

    async def _look(self, partition: Partition, task: TaskLedger, slices: Slices) -> tuple[Backlog, float]:
        """Return a backlog, and for how long the loop was used."""
        readiness, used_seconds = self._readiness(partition, task), 0.0
        look = _Look(partition, task, readiness)
        size = _SLICE_ROWS if readiness is None else min(_SLICE_ROWS, readiness.at_once)
        loop = asyncio.get_running_loop()
        for rows in partition.table.slices(size):
            began_at = loop.time()
            look.look(rows)
            used_seconds += loop.time() - began_at
            await slices.turn()
        return look.backlog(), used_seconds

    def _readiness(self, partition: Partition, task: TaskLedger) -> Readiness | None:
        request = self._catalog.last_request(partition, task.name)
        if request is None:
            return None
        try:
            return Readiness(partition, task, request.batch_spec, self._runner.length(request.sampler))
        except TqError:
            return None


def tasks_with_versions(partition: Partition) -> Iterator[tuple[Partition, TaskLedger]]:
    """Yield the tasks of a partition that have samples left whose versions may be known."""
    for task in partition.tasks.values():
        if task.backlog and _has_versions(partition, _version_column(partition, task.name)):
            yield partition, task


def _version_column(partition: Partition, task_name: str) -> str:
    """Return where a task's staleness limit has versions, "version" where there is none."""
    limits = {limit.task_name: limit.version_column for limit in partition.settings.staleness_limits}
    return limits.get(task_name) or _DEFAULT_COLUMN


def _has_versions(partition: Partition, column: str) -> bool:
    arrays = partition.meta.arrays(column)
    return arrays is not None and arrays[0].dtype.kind in "if"


class _Look:
    """One pass over the rows of a partition."""

    def __init__(self, partition: Partition, task: TaskLedger, readiness: Readiness | None) -> None:
        self._partition = partition
        self._task = task
        self._readiness = readiness
        self._ready_count = 0
        self._oldest, self._newest = math.inf, -math.inf
        self._column = _version_column(partition, task.name)

    def look(self, rows: slice) -> None:
        """Look at a stretch of rows."""
        if self._readiness is not None:
            try:
                ready = self._readiness.ready(rows)
                self._ready_count += int(np.count_nonzero(ready & ~self._task.skipped.data[rows]))
            except TqError:  # a condition does not fit its column, say: claims of this kind get the error
                self._readiness = None
        arrays = self._partition.meta.arrays(self._column)
        if arrays is None or arrays[0].dtype.kind not in "if":
            return
        values, present = arrays[0][rows], arrays[1][rows]
        states = self._partition.state.data[rows]
        is_there = present & (states >= LIVE)
        is_left = present & self._task.is_pending(rows)
        self._newest = max(self._newest, version_range(values[is_there])[1])
        self._oldest = min(self._oldest, version_range(values[is_left])[0])

    def backlog(self) -> Backlog:
        """Return what was seen."""
        return Backlog(
            ready_count=None if self._readiness is None else self._ready_count,
            oldest_version=_finite(self._oldest),
            newest_version=_finite(self._newest),
        )


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _finite(version: float) -> float | None:
    return float(version) if math.isfinite(version) else None
