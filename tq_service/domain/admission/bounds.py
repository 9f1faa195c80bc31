"""What a partition has room for: its bytes, and how far new samples may run ahead of the tasks that consume them.

All that is counted here follows from the rows and puts of the partition, so that it is the same after a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.admission.lowest_version import LowestVersion
from tq_service.domain.changes.samples import SampleWrite, resolve_target
from tq_service.domain.partition import Partition
from tq_service.errors import InvalidArgumentError, QuotaExceededError, ResourceExhaustedError, RunAheadError
from tq_service.schema import MetaColumn, RunAhead, SampleState

RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the new samples of a write take.

    Attributes:
        sample_count: how many they are.
        value_bytes: bytes of their cells.
        versions: by column, the lowest and the highest version of those that have one.
    """

    sample_count: int
    value_bytes: int
    versions: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitViolation:
    """A bound that a write would go beyond.

    Attributes:
        bound: "max_bytes", "max_samples" or "max_versions".
        got: what there would be with the write.
        limit: the most there may be.
        task_name: the task that the bound is for; empty for bytes.
        remedy: what makes room.
    """

    bound: str
    got: float
    limit: int
    task_name: str = ""
    remedy: str

    def error(self, partition_id: str, waited: str, *, may_fit_later: bool) -> ResourceExhaustedError:
        """Return the error of a write that is refused for it; `waited` says what it waited for, empty if it did not."""
        kind = QuotaExceededError if self.bound == "max_bytes" else RunAheadError
        what = {
            "max_bytes": "bytes",
            "max_samples": f"samples for task {self.task_name!r} to consume",
            "max_versions": f"versions between new samples and the oldest that task {self.task_name!r} has to consume",
        }[self.bound]
        got = f"{self.got:g}" if self.bound == "max_versions" else str(int(self.got))
        metadata = {"bound": self.bound, "got": got, "limit": str(self.limit), "task_name": self.task_name}
        return kind(
            f"partition {partition_id!r} would have {got} {what}, its {self.bound} is {self.limit}{waited}; "
            f"{self.remedy}",
            retry_after_seconds=RETRY_AFTER_SECONDS if may_fit_later else None,
            metadata={name: value for name, value in metadata.items() if value},
        )


class AdmissionLimits:
    """The bounds of one partition, compared with what it holds."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.lowest_versions = {
            limit.task_name: LowestVersion(partition, limit.task_name, limit.version_column)
            for limit in partition.settings.run_ahead
            if limit.max_versions is not None
        }
        self._version_columns = {lowest.column for lowest in self.lowest_versions.values()}

    def demand(self, write: SampleWrite, value_bytes: int) -> Demand | None:
        """Return what the new samples of a write take, None where it has none that last.

        Raises:
            TqError: the partition would refuse the write whatever room there is.
        """
        target = resolve_target(self._partition, write)
        self._partition.meta.check(write.meta, write.row_count)
        count = int(np.count_nonzero(target.is_new))
        if count == 0 or write.state is SampleState.FAILED:
            return None
        return Demand(
            sample_count=count,
            value_bytes=value_bytes * count // write.row_count,
            versions=_versions(
                (column for column in write.meta if column.name in self._version_columns), target.is_new
            ),
        )

    def check_possible(self, demand: Demand) -> None:
        """Refuse what would not fit an empty partition either.

        Raises:
            QuotaExceededError, RunAheadError: it is larger than a bound; without `retry_after_seconds`.
        """
        settings, violation = self._partition.settings, None
        if settings.max_bytes is not None and demand.value_bytes > settings.max_bytes:
            violation = _too_many_bytes(demand.value_bytes, settings.max_bytes, "split the put")
        for limit in settings.run_ahead:
            if limit.max_samples is not None and demand.sample_count > limit.max_samples:
                violation = _too_many_samples(demand.sample_count, limit.max_samples, limit, "split the put")
        if violation is not None:
            raise violation.error(self._partition.partition_id, "", may_fit_later=False)

    def violation(self, demand: Demand, others: Iterable[Demand]) -> LimitViolation | None:
        """Return a bound that a write would go beyond, None where there is room for it.

        Args:
            demand: what it takes.
            others: what writes take that were let in and are not made yet.
        """
        settings, others = self._partition.settings, tuple(others)
        used = self._partition.cells.used_bytes + sum(other.value_bytes for other in others) + demand.value_bytes
        if settings.max_bytes is not None and demand.value_bytes and used > settings.max_bytes:
            return _too_many_bytes(used, settings.max_bytes, "clear consumed samples, or raise max_bytes")
        for limit in settings.run_ahead:
            left = self.backlog(limit.task_name) + sum(other.sample_count for other in others) + demand.sample_count
            if limit.max_samples is not None and left > limit.max_samples:
                return _too_many_samples(left, limit.max_samples, limit, "the task has to consume some first")
            if limit.max_versions is not None:
                distance = self._distance(limit, demand, others)
                if distance > limit.max_versions:
                    return LimitViolation(
                        bound="max_versions",
                        got=distance,
                        limit=limit.max_versions,
                        task_name=limit.task_name,
                        remedy="the task has to consume, or somebody to clear, the oldest first",
                    )
        return None

    def backlog(self, task_name: str) -> int:
        """Return how many samples a task has left to consume, all of them where it has not asked yet."""
        task = self._partition.tasks.get(task_name)
        return self._partition.open_count if task is None else task.backlog

    def _distance(self, limit: RunAhead, demand: Demand, others: Iterable[Demand]) -> float:
        """Return how far the versions of a write are above the lowest that is left; 0 where there is none."""
        column = limit.version_column
        if column not in demand.versions:
            return 0
        lowest = self.lowest_versions[limit.task_name].find()
        versions = [other.versions[column][0] for other in others if column in other.versions]
        versions += [] if lowest is None else [lowest]
        return demand.versions[column][1] - min(versions) if versions else 0


def _too_many_bytes(got: int, limit: int, remedy: str) -> LimitViolation:
    return LimitViolation(bound="max_bytes", got=got, limit=limit, remedy=remedy)


def _too_many_samples(got: int, max_samples: int, limit: RunAhead, remedy: str) -> LimitViolation:
    return LimitViolation(bound="max_samples", got=got, limit=max_samples, task_name=limit.task_name, remedy=remedy)


def _versions(columns: Iterable[MetaColumn], is_new: NDArray[np.bool_]) -> dict[str, tuple[float, float]]:
    versions = {}
    for column in columns:
        if column.values.dtype.kind not in "if":
            raise InvalidArgumentError(
                f"custom_meta column {column.name!r} bounds how far producers run ahead, so it holds numbers; got "
                f"values of type {column.values.dtype}",
                field="custom_meta",
            )
        values = column.values[is_new & column.present]
        values = values[~np.isnan(values)]  # not a number: no version
        if values.size:
            versions[column.name] = (values.min().item(), values.max().item())
    return versions
