"""What bounds the writes of new samples to a partition: its bytes, and how far they may be ahead of its tasks.

All that is counted here follows from the rows and puts of the partition, so that it is the same after a restart.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import MetaColumn
from tq_service.errors import InvalidArgumentError, QuotaExceededError, ResourceExhaustedError, StalenessLimitError
from tq_service.machine.samples import SampleWrite, check_write
from tq_service.schema import SampleState
from tq_service.state.lowest_version import NO_VERSIONS, LowestVersion, version_range
from tq_service.state.partition import Partition

RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the new samples of a write take.

    Attributes:
        sample_count: how many they are.
        value_bytes: bytes of their cells.
        versions: by column, the lowest and the highest version of the samples.
        groups: names of groups of the samples; of groups that have begun its members take nothing.
    """

    sample_count: int = 0
    value_bytes: int = 0
    versions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    groups: tuple[str, ...] = ()


def sum_of(demands: Iterable[Demand | None]) -> Demand:
    """Return what several writes take together, None for nothing."""
    count = size = 0
    versions: dict[str, tuple[float, float]] = {}
    for demand in filter(None, demands):
        count, size = count + demand.sample_count, size + demand.value_bytes
        for name, (lowest, highest) in demand.versions.items():
            known = versions.get(name, NO_VERSIONS)
            versions[name] = min(known[0], lowest), max(known[1], highest)
    return Demand(sample_count=count, value_bytes=size, versions=versions)


class Bound(ABC):
    """The most there may be of something in a partition.

    Attributes:
        name: of the setting.
        what: what is counted, with a place for the name of the task.
        remedy: what makes capacity.
        error_kind: of the error of a write that is refused for it.
        limit: the most there may be.
        task_name: of the task that has to consume first; empty: none has.
    """

    name: ClassVar[str]
    what: ClassVar[str]
    remedy: ClassVar[str]
    error_kind: ClassVar[type[ResourceExhaustedError]] = StalenessLimitError

    def __init__(self, partition: Partition, limit: int, task_name: str = "") -> None:
        self._partition = partition
        self.limit = limit
        self.task_name = task_name

    @abstractmethod
    def share(self, demand: Demand) -> float:
        """Return how much there would be of a write in an empty partition."""

    @abstractmethod
    def total(self, demand: Demand, others: Demand) -> float:
        """Return how much there would be with a write, and others that were let in and are not made yet."""

    def waits_for(self, got: float) -> str:
        """Return why a write waits with which there would be so much."""
        counted, limited = _shown(got), self.what.format(self.task_name)
        name = self._partition.partition_id
        return f"partition {name!r} would have {counted} {limited}, its {self.name} is {self.limit}"

    def error(self, got: float, *, may_fit_later: bool, note: str = "") -> ResourceExhaustedError:
        """Return the error of a write with which there would be so much, at once or after it has waited."""
        names = {"limit_name": self.name, "got": _shown(got), "limit": str(self.limit), "task_name": self.task_name}
        metadata = {name: value for name, value in names.items() if value}
        outcome = f" and it stayed so until the deadline; {self.remedy}{note}" if may_fit_later else "; split the put"
        return self.error_kind(
            f"{self.waits_for(got)}{outcome}",
            retry_after_seconds=RETRY_AFTER_SECONDS if may_fit_later else None,
            metadata=metadata,
        )


def _shown(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


class SumBound(Bound):
    """Bounds what writes add to; a write that adds nothing to it never waits for it."""

    @abstractmethod
    def used(self) -> int:
        """Return how much there is."""

    def total(self, demand: Demand, others: Demand) -> float:
        """Return the sum of what there is and of what is added."""
        share = self.share(demand)
        return self.used() + share + self.share(others) if share else 0


class ByteBound(SumBound):
    """Bounds the bytes of all cells."""

    name = "max_bytes"
    what = "bytes"
    remedy = "clear consumed samples, or raise max_bytes"
    error_kind = QuotaExceededError

    def used(self) -> int:
        """Return the bytes of the cells there are."""
        return self._partition.cells.used_bytes

    def share(self, demand: Demand) -> int:
        """Return the bytes of its cells."""
        return demand.value_bytes


class BacklogBound(SumBound):
    """Bounds the samples that a task has left to consume."""

    name = "max_samples"
    what = "samples for task {!r} to consume"
    remedy = "the task has to consume some first"

    def used(self) -> int:
        """Return how many samples the task has left, all of them where it has not asked yet."""
        task = self._partition.tasks.get(self.task_name)
        return self._partition.open_count if task is None else task.backlog

    def share(self, demand: Demand) -> int:
        """Return the number of its samples."""
        return demand.sample_count


class VersionBound(Bound):
    """Bounds how far versions of new samples are above the lowest that a task has left to consume."""

    name = "max_versions"
    what = "versions between new samples and the oldest that task {!r} has to consume"
    remedy = "the task has to consume, or somebody has to clear, the oldest first"

    def __init__(self, partition: Partition, limit: int, task_name: str, column: str) -> None:
        super().__init__(partition, limit, task_name)
        self._column = column
        self._lowest = LowestVersion(partition, task_name, column)

    def share(self, demand: Demand) -> float:
        """Return 0: in an empty partition any version may come."""
        return 0

    def total(self, demand: Demand, others: Demand) -> float:
        """Return how far the highest version of a write is above the lowest of all others."""
        highest, lowest = (each.versions.get(self._column, NO_VERSIONS)[at] for each, at in ((demand, 1), (others, 0)))
        return highest - min(self._lowest.find(), lowest)


def bounds_of(partition: Partition) -> list[Bound]:
    """Return the bounds that the settings of a partition have."""
    settings = partition.settings
    bounds: list[Bound] = [] if settings.max_bytes is None else [ByteBound(partition, settings.max_bytes)]
    for limit in settings.staleness_limits:
        if limit.max_samples is not None:
            bounds.append(BacklogBound(partition, limit.max_samples, limit.task_name))
        if limit.max_versions is not None:
            bounds.append(VersionBound(partition, limit.max_versions, limit.task_name, limit.version_column))
    return bounds


def demand_of(partition: Partition, write: SampleWrite, value_bytes: int) -> Demand | None:
    """Return what the new samples of a write take, None if it has none that last or all are in groups that have begun.

    Raises:
        TqError: the partition would refuse the write whatever capacity there is.
    """
    checked = check_write(partition, write)
    if checked.new_count == 0 or write.state is SampleState.FAILED:
        return None
    count, is_counted = checked.new_count, checked.is_new
    groups: tuple[str, ...] = ()
    if checked.groups is not None:
        has_begun = checked.groups.slots >= 0
        groups = tuple(itertools.compress(checked.groups.names, ~has_begun))
        if has_begun.any():
            is_counted = np.zeros(write.row_count, np.bool_)
            is_counted[checked.is_new] = ~np.append(has_begun, False)[checked.groups.codes]  # the last: without a group
            count = int(np.count_nonzero(is_counted))
            if count == 0:
                return None
    bounding = {limit.version_column for limit in partition.settings.staleness_limits if limit.max_versions is not None}
    return Demand(
        sample_count=count,
        value_bytes=value_bytes * count // write.row_count,
        versions={each.name: _version_range(each, is_counted) for each in write.meta if each.name in bounding},
        groups=groups,
    )


def _version_range(column: MetaColumn, which: slice | NDArray[np.bool_]) -> tuple[float, float]:
    others = set() if column.json is None else {*column.json.tolist()} - {None, "null"}
    if others or (column.values.dtype.kind not in "if" and column.present.any()):
        got = f"the JSON value {min(others):.200}" if others else f"values of type {column.values.dtype}"
        raise InvalidArgumentError(
            f"custom_meta column {column.name!r} has the versions of a staleness limit, so it holds numbers; got {got}",
            field="custom_meta",
        )
    if not column.present.any():
        return NO_VERSIONS
    return version_range(column.values[which][column.present[which]])
