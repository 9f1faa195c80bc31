"""What one status does not say, since it takes several: rates, curves, since when a call waits, the last batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tq_service.results import PartitionDescription, PartitionWait, RecentBatch, ServiceStatus, TaskStatus

POINT_COUNT: Final = 90
"""Points of a curve of the whole service: three minutes of one every 2 s."""

ROW_POINT_COUNT: Final = 30
"""Points of a curve of a partition or task."""

_SIGNIFICANT_DIGITS: Final = 4
_SMOOTHED_POINTS: Final = 5
_BATCH_COUNT: Final = 16
_MOST_BALANCES: Final = 24

Curve = deque[float | None]
TaskKey = tuple[str, str]


def _curve() -> Curve:
    return deque(maxlen=POINT_COUNT)


def _row_curve() -> Curve:
    return deque(maxlen=ROW_POINT_COUNT)


@dataclass(slots=True)
class PartitionTrend:
    """How a partition moves.

    Attributes:
        incarnation: of the partition that the others are about.
        inserted_count: samples ever inserted, when it was last seen.
        counts: what is compared to see whether anything has changed.
        changed_at: when it last had, in seconds of the clock of `Trends.see`.
        consumed: epoch of each task, and what it had consumed then.
        present: samples not cleared, over time.
        inserted_per_second: over time.
        delivered_per_second: of each task, over time.
    """

    incarnation: bytes
    inserted_count: int
    counts: tuple[object, ...]
    changed_at: float
    consumed: dict[str, tuple[int, int]] = field(default_factory=dict)
    present: Curve = field(default_factory=_row_curve)
    inserted_per_second: Curve = field(default_factory=_row_curve)
    delivered_per_second: dict[str, Curve] = field(default_factory=dict)


@dataclass(slots=True)
class Balance:
    """The last batches of a task in all partitions of one group, the oldest first.

    Attributes:
        batches: each with the partition it is of.
        seen_at: when the last of them was first seen.
    """

    batches: deque[tuple[str, RecentBatch]] = field(default_factory=lambda: deque(maxlen=_BATCH_COUNT))
    seen_at: float = 0.0


class Trends:
    """Follows a service from status to status. The curves have one point for each, None while it was away.

    Attributes:
        partitions: by name, those of the last status.
        inserted_per_second: of all partitions, over time.
        delivered_per_second: to all tasks, over time.
        present: samples not cleared, over time.
        used_bytes: of all storage services, over time.
        balances: by group of partitions and task.
    """

    def __init__(self) -> None:
        self.partitions: dict[str, PartitionTrend] = {}
        self.inserted_per_second: Curve = _curve()
        self.delivered_per_second: Curve = _curve()
        self.present: Curve = _curve()
        self.used_bytes: Curve = _curve()
        self.balances: dict[TaskKey, Balance] = {}
        self._seen_at: float | None = None
        self._waits_since: dict[object, tuple[float, object]] = {}
        self._batches_seen: dict[tuple[str, str], tuple[bytes, int, int]] = {}

    def see(self, status: ServiceStatus, now: float) -> None:
        """Take a status in.

        Args:
            status: the state of the service.
            now: seconds of a clock that only goes forward.
        """
        span = None if self._seen_at is None else max(now - self._seen_at, 1e-3)
        self._seen_at = now
        known, self.partitions = self.partitions, {}
        inserted_count = delivered_count = 0
        for partition in status.partitions:
            name = partition.summary.partition_id
            trend, new_count = self._followed(partition, known.get(name), span, now)
            self.partitions[name] = trend
            inserted_count += new_count
            delivered_count += _newly_consumed(partition, trend)
            for task in partition.tasks:
                self._take_batches(partition, task, now)
        # Not the sum of the tasks' own rates, which goes down with each partition that is cleared.
        self.inserted_per_second.append(None if span is None else rounded(inserted_count / span))
        self.delivered_per_second.append(None if span is None else rounded(delivered_count / span))
        self.present.append(sum(partition.summary.present_count for partition in status.partitions))
        self.used_bytes.append(sum(storage.used_bytes for storage in status.own_storages))
        self._forget(status)
        self._follow_waits(status, now)

    def miss(self) -> None:
        """Note that there was no status to take in: the curves have a gap."""
        for curve in (self.inserted_per_second, self.delivered_per_second, self.present, self.used_bytes):
            curve.append(None)
        for trend in self.partitions.values():
            for curve in (trend.present, trend.inserted_per_second, *trend.delivered_per_second.values()):
                curve.append(None)

    def waits_since(self, wait: PartitionWait) -> float:
        """Return when a wait of the last status was first seen, from when on it was in each."""
        return self._waits_since[_wait_key(wait)][0]

    def _follow_waits(self, status: ServiceStatus, now: float) -> None:
        """Note since when each wait has been there; one whose task goes on begins again."""
        consumed = {
            (partition.summary.partition_id, task.task_name): (task.epoch, task.consumed_count)
            for partition in status.partitions
            for task in partition.tasks
        }
        before, self._waits_since = self._waits_since, {}
        for wait in status.waits:
            key, progress = _wait_key(wait), consumed.get((wait.partition_id, wait.reason.task_name))
            since, last_progress = before.get(key, (now, progress))
            self._waits_since[key] = since if progress == last_progress else now, progress

    def _followed(
        self, partition: PartitionDescription, before: PartitionTrend | None, span: float | None, now: float
    ) -> tuple[PartitionTrend, int]:
        """Return the trend of a partition, and how many samples are new in it."""
        summary, counts = partition.summary, _counts(partition)
        if before is None or before.incarnation != summary.incarnation:
            trend, new_count = PartitionTrend(summary.incarnation, 0, counts, now), summary.inserted_count
        else:
            trend, new_count = before, summary.inserted_count - before.inserted_count
        if counts != trend.counts:
            trend.counts, trend.changed_at = counts, now
        trend.inserted_count = summary.inserted_count
        trend.present.append(summary.present_count)
        trend.inserted_per_second.append(None if span is None else rounded(new_count / span))
        curves = trend.delivered_per_second
        trend.delivered_per_second = {
            task.task_name: curves.get(task.task_name) or _row_curve() for task in partition.tasks
        }
        for task in partition.tasks:
            trend.delivered_per_second[task.task_name].append(rounded(task.delivered_per_second))
        return trend, new_count

    def _take_batches(self, partition: PartitionDescription, task: TaskStatus, now: float) -> None:
        if not task.recent_batches:
            return
        summary = partition.summary
        incarnation, epoch, last_index = self._batches_seen.get((summary.partition_id, task.task_name), (b"", 0, -1))
        if (incarnation, epoch) != (summary.incarnation, task.epoch):
            last_index = -1
        new = [batch for batch in task.recent_batches if batch.batch_index > last_index]
        if not new:
            return
        last = (summary.incarnation, task.epoch, new[-1].batch_index)
        self._batches_seen[summary.partition_id, task.task_name] = last
        balance = self.balances.setdefault((group_of(summary.partition_id), task.task_name), Balance())
        balance.batches.extend((summary.partition_id, batch) for batch in new)
        balance.seen_at = now

    def _forget(self, status: ServiceStatus) -> None:
        """Let go of what nothing of the status is about, but for the newest balances."""
        tasks = {(each.summary.partition_id, task.task_name) for each in status.partitions for task in each.tasks}
        for key in self._batches_seen.keys() - tasks:
            del self._batches_seen[key]
        newest = sorted(self.balances, key=lambda key: self.balances[key].seen_at, reverse=True)
        for balance_key in newest[_MOST_BALANCES:]:
            del self.balances[balance_key]


def _newly_consumed(partition: PartitionDescription, trend: PartitionTrend) -> int:
    """Return how many samples were delivered to all tasks since the last status; released ones do not count."""
    before, trend.consumed = trend.consumed, {}
    new_count = 0
    for task in partition.tasks:
        epoch, consumed_count = before.get(task.task_name, (task.epoch, 0))
        trend.consumed[task.task_name] = task.epoch, task.consumed_count
        new_count += max(0, task.consumed_count - (consumed_count if epoch == task.epoch else 0))
    return new_count


def group_of(partition_id: str) -> str:
    """Return the name up to "@", which the partitions of all steps have in common."""
    return partition_id.partition("@")[0]


def recent_mean(curve: Iterable[float | None]) -> float | None:
    """Return the mean of the last few points of a curve; None where there is none."""
    points = [point for point in list(curve)[-_SMOOTHED_POINTS:] if point is not None]
    return rounded(sum(points) / len(points)) if points else None


def rounded(value: float) -> float:
    """Return a number in few digits, which keep a frame small."""
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def _wait_key(wait: PartitionWait) -> object:
    return wait.partition_id, wait.reason.task_name, wait.reason.code, wait.reason.data_fields


def _counts(partition: PartitionDescription) -> tuple[object, ...]:
    produced = sum(each.produced_count for each in partition.fields)
    tasks = tuple((task.task_name, task.epoch, task.consumed_count, task.leased_count) for task in partition.tasks)
    return partition.summary, partition.held_count, partition.failed_count, produced, tasks
