"""Derives the live page's rates, curves, wait durations, recent batches and events from successive statuses."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tq_service.results import PartitionDescription, PartitionSummary, PartitionWait, RecentBatch, ServiceStatus
from tq_service.step_times import StepTimes

POINT_COUNT: Final = 90
"""Number of points in each curve of the entire service. With one point every 2 s, a curve covers three minutes."""

ROW_POINT_COUNT: Final = 30
"""Number of points in each curve of a partition or task. With one point every 2 s, a curve covers one minute."""

_SIGNIFICANT_DIGITS: Final = 4
_SMOOTHED_POINTS: Final = 5
_BATCH_COUNT: Final = 16
_MOST_BALANCES: Final = 24

Curve = deque[float | None]
TaskKey = tuple[str, str]


def _row_curve() -> Curve:
    return deque(maxlen=ROW_POINT_COUNT)


@dataclass(slots=True)
class PartitionTrend:
    """The recent history of a partition.

    Attributes:
        changed_at: time when any count last changed, in seconds on the clock used for `Trends.see`.
        seen: the partition's description from the last status.
        present: curve of the number of samples that have not been cleared.
        inserted_per_second: curve of the number of samples inserted per second.
        delivered_per_second: curves of the number of samples delivered per second, by task.
    """

    changed_at: float
    seen: PartitionDescription | None = None
    present: Curve = field(default_factory=_row_curve)
    inserted_per_second: Curve = field(default_factory=_row_curve)
    delivered_per_second: defaultdict[str, Curve] = field(default_factory=lambda: defaultdict(_row_curve))

    def curves(self) -> Iterator[Curve]:
        """Yield all curves of the partition."""
        yield from (self.present, self.inserted_per_second, *self.delivered_per_second.values())


class Trends:
    """Computes curves, recent batches and wait times from successive statuses of a service.

    A curve has one point for each status call. The point is None if the service did not respond.

    Attributes:
        partitions: history of each partition in the last status, by partition name.
        curves: curves of the entire service, by name. "inserted" and "delivered" are rates, in samples per second.
            "present" is the number of samples that have not been cleared. "used" is the number of bytes in use across
            all storage services.
        balances: for each partition group and task, the recent batches with their partition names, oldest first.
        steps: most recent step times of the ranks, by partition group and task.
    """

    def __init__(self) -> None:
        self.partitions: dict[str, PartitionTrend] = {}
        self.curves: dict[str, Curve] = {
            name: deque(maxlen=POINT_COUNT) for name in ("inserted", "delivered", "present", "used")
        }
        self.balances: dict[TaskKey, deque[tuple[str, RecentBatch]]] = {}
        self.steps: dict[TaskKey, StepTimes] = {}
        self._seen_at: float | None = None
        self._waits_since: dict[object, float] = {}
        self._progress: dict[TaskKey, tuple[int, int]] = {}  # (epoch, consumed count) by partition and task

    def see(self, status: ServiceStatus, now: float) -> None:
        """Update all trends with a new status.

        Args:
            status: status read from the service.
            now: time of the read in seconds, on a monotonic clock.
        """
        span = None if self._seen_at is None else max(now - self._seen_at, 1e-3)
        self._seen_at = now
        known, self.partitions = self.partitions, {}
        inserted_count = delivered_count = 0
        for partition in status.partitions:
            name, summary = partition.summary.partition_id, partition.summary
            trend = known.get(name)
            if trend is None or trend.seen is None or trend.seen.summary.incarnation != summary.incarnation:
                trend = PartitionTrend(now)
            before, trend.seen = trend.seen, partition
            self.partitions[name] = trend
            if before is not None and _counts(before) != _counts(partition):
                trend.changed_at = now
            new_count = summary.inserted_count - (0 if before is None else before.summary.inserted_count)
            inserted_count += new_count
            delivered_count += self._follow_tasks(partition, before)
            trend.present.append(summary.present_count)
            trend.inserted_per_second.append(None if span is None else rounded(new_count / span))
            for task in partition.tasks:
                trend.delivered_per_second[task.task_name].append(rounded(task.delivered_per_second))
        # Computed from counts, because the sum of the tasks' rates would drop whenever a partition is cleared.
        self.curves["inserted"].append(None if span is None else rounded(inserted_count / span))
        self.curves["delivered"].append(None if span is None else rounded(delivered_count / span))
        self.curves["present"].append(sum(partition.summary.present_count for partition in status.partitions))
        self.curves["used"].append(sum(storage.used_bytes for storage in status.own_storages))
        self._follow_waits(status, now)

    def miss(self) -> None:
        """Add a gap to every curve to show that the service did not respond."""
        for curve in self.curves.values():
            curve.append(None)
        for trend in self.partitions.values():
            for curve in trend.curves():
                curve.append(None)

    def waits_since(self, wait: PartitionWait) -> float:
        """Return the time when a wait first appeared in a status, which counts as the wait's start."""
        return self._waits_since[_wait_key(wait)]

    def _follow_waits(self, status: ServiceStatus, now: float) -> None:
        """Record when each wait started. A wait counts as new if its task has progressed since the last status."""
        before, self._progress = (
            self._progress,
            {
                (partition.summary.partition_id, task.task_name): (task.epoch, task.consumed_count)
                for partition in status.partitions
                for task in partition.tasks
            },
        )
        known, self._waits_since = self._waits_since, {}
        for wait in status.waits:
            key, task = _wait_key(wait), (wait.partition_id, wait.reason.task_name)
            stays = key in known and before.get(task) == self._progress.get(task)
            self._waits_since[key] = known[key] if stays else now

    def _follow_tasks(self, partition: PartitionDescription, before: PartitionDescription | None) -> int:
        """Record new batches and step times of a partition's tasks, and return the number of newly consumed samples."""
        name, new_count = partition.summary.partition_id, 0
        earlier = {} if before is None else {(task.task_name, task.epoch): task for task in before.tasks}
        for task in partition.tasks:
            last = earlier.get((task.task_name, task.epoch))
            new_count += max(0, task.consumed_count - (0 if last is None else last.consumed_count))
            if task.step_times is not None and (last is None or last.step_times != task.step_times):
                key = group_of(name), task.task_name
                self.steps.pop(key, None)
                self.steps[key] = task.step_times  # newest last
                if len(self.steps) > _MOST_BALANCES:
                    del self.steps[next(iter(self.steps))]
            last_index = last.recent_batches[-1].batch_index if last is not None and last.recent_batches else -1
            if new := [(name, batch) for batch in task.recent_batches if batch.batch_index > last_index]:
                key = group_of(name), task.task_name
                batches = self.balances.pop(key, None) or deque(maxlen=_BATCH_COUNT)
                self.balances[key] = batches  # newest last
                batches.extend(new)
                if len(self.balances) > _MOST_BALANCES:
                    del self.balances[next(iter(self.balances))]
        return new_count


def group_of(partition_id: str) -> str:
    """Return a partition's group, which is its name up to the first "@". All steps of a training run share a group."""
    return partition_id.partition("@")[0]


def recent_mean(curve: Iterable[float | None]) -> float | None:
    """Return the mean of a curve's last few points, ignoring gaps, or None if all points are gaps."""
    points = [point for point in list(curve)[-_SMOOTHED_POINTS:] if point is not None]
    return rounded(sum(points) / len(points)) if points else None


def rounded(value: float) -> float:
    """Round a number to a few significant digits to keep frames small."""
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def _wait_key(wait: PartitionWait) -> object:
    return wait.partition_id, wait.reason.task_name, wait.reason.code, wait.reason.data_fields


def _counts(partition: PartitionDescription) -> tuple[object, ...]:
    produced = sum(each.produced_count for each in partition.fields)
    tasks = tuple((task.task_name, task.epoch, task.consumed_count, task.leased_count) for task in partition.tasks)
    return partition.summary, partition.held_count, partition.failed_count, produced, tasks


_EVENT_COUNT: Final = 100  # maximum number of partition events, and of service events, to keep


class EventLog:
    """The most recent events in the service, in chronological order.

    Events are numbered consecutively, starting from 1. The kinds of partition events are "made", "sealed" and
    "cleared". The kinds of service events are "away", "refused", "back" and "restarted". The kinds of storage service
    events are "silent" (heartbeats stopped) and "heard" (heartbeats resumed). An event also contains the name of the
    partition or storage service that it concerns (empty for the service itself). The page shows the name followed by
    the event's text.
    """

    def __init__(self) -> None:
        # Use two queues so that events of many short-lived partitions do not displace service events.
        self._of_services: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_EVENT_COUNT)
        self._of_partitions: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_EVENT_COUNT)
        self._count = 0

    def shown(self, now: float) -> list[dict[str, Any]]:
        """Return all recorded events as JSON objects, each with the event's age in seconds."""
        events = sorted([*self._of_services, *self._of_partitions], key=lambda noted: noted[1]["number"])
        return [{**event, "seconds": round(now - at, 1)} for at, event in events]

    def note(self, at: float, kind: str, text: str, *, name: str = "") -> None:
        """Record an event. `name` is the name of the partition or storage service that the event concerns."""
        log = self._of_partitions if kind in {"made", "sealed", "cleared"} else self._of_services
        self._count += 1
        log.append((at, {"number": self._count, "kind": kind, "name": name, "text": text}))

    def compare(self, before: ServiceStatus, status: ServiceStatus, now: float) -> None:
        """Record an event for each difference between two successive statuses."""
        if before.service.instance_id != status.service.instance_id:
            what = _counted(len(status.partitions), "partition")
            self.note(now, "restarted", f"the service was restarted with {what}")
        # Skip adopted storages, because a lost service may have the name of a live service.
        silent = {storage.storage_id: storage.is_silent for storage in before.own_storages}
        for storage in status.own_storages:
            if storage.is_silent and not silent.get(storage.storage_id):
                self.note(now, "silent", "sends no heartbeats to its controller", name=storage.storage_id)
            elif not storage.is_silent and silent.get(storage.storage_id):
                self.note(now, "heard", "sends heartbeats again", name=storage.storage_id)
        known, there = (
            {each.summary.partition_id: each.summary for each in some.partitions} for some in (before, status)
        )
        for name in known | there:
            self._note_change(name, known.get(name), there.get(name), now)

    def _note_change(
        self, name: str, before: PartitionSummary | None, after: PartitionSummary | None, now: float
    ) -> None:
        if before is not None and (after is None or after.incarnation != before.incarnation):
            self.note(now, "cleared", f"cleared ({_counted(before.inserted_count, 'sample')})", name=name)
            before = None
        if after is None:
            return
        if before is None:
            self.note(now, "made", "created", name=name)
        if after.sealed and not (before is not None and before.sealed):
            self.note(now, "sealed", f"sealed ({_counted(after.inserted_count, 'sample')})", name=name)


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"
