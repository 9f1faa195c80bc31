"""Limits on what clients can make the controller keep by naming things: partitions, fields, tasks, names, custom_meta.

They are compared when a request comes, never when a change is made again: what was let in under higher limits stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import MetaColumn
from tq_service.errors import InvalidArgumentError, LimitExceededError
from tq_service.machine.samples import SampleWrite
from tq_service.state.partition import Partition, PartitionSettings

_NUMBER_BYTES = 8
# What is named in a partition, by argument: the limit of its number, what it is called, and what to do instead.
_NAMED = {
    "fields": ("max_fields", "fields", "put what differs from sample to sample as an object field"),
    "custom_meta": ("max_meta_columns", "custom_meta columns", "use one column for values of one kind"),
    "task_name": ("max_tasks", "tasks", "name tasks by what they do, not by process or step"),
    "tasks": ("max_tasks", "tasks", "name tasks by what they do, not by process or step"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one controller; each has the name of its setting.

    Attributes:
        max_partitions: partitions there may be.
        max_samples: samples there may be in all of them.
        max_fields: fields of one partition.
        max_tasks: tasks of one partition.
        max_meta_columns: custom_meta columns of one partition.
        max_sample_meta_bytes: custom_meta that is written for one sample at once, its texts and JSON in UTF-8.
        max_name_length: characters of a key, or of the name of a group, field, task or custom_meta column.
    """

    max_partitions: int = 10_000
    max_samples: int = 50_000_000
    max_fields: int = 1_024
    max_tasks: int = 256
    max_meta_columns: int = 256
    max_sample_meta_bytes: int = 16 * 1024
    max_name_length: int = 512

    def check_create(self, partition_id: str, settings: PartitionSettings, partition_count: int) -> None:
        """Refuse a new partition that is one too many, or declares too much."""
        self._check_count("max_partitions", "partitions", partition_count + 1, "clear some that are done")
        self._check_new("fields", partition_id, (), [spec.name for spec in settings.fields])
        self._check_new("tasks", partition_id, (), settings.tasks)

    def check_samples(self, count: int) -> None:
        """Refuse samples of which there would be so many in all partitions."""
        self._check_count("max_samples", "samples in all partitions", count, "clear those that are done")

    def check_write(self, partition: Partition, write: SampleWrite) -> None:
        """Refuse a write that names too much; its partition may be one that it makes."""
        self._check_longest("keys", _longest(write.keys or ()))
        self._check_longest("groups", _longest(write.groups or ()))
        fields = [column.spec.name for column in write.columns]
        self._check_new("fields", partition.partition_id, partition.cells.fields, fields)
        if write.meta:
            self.check_meta(partition, write.meta)

    def check_meta(self, partition: Partition, columns: Sequence[MetaColumn]) -> None:
        """Refuse custom_meta of too many columns, or too large for one sample."""
        names = [column.name for column in columns]
        self._check_new("custom_meta", partition.partition_id, partition.meta.names(), names)
        texts = [column for column in columns if column.values.dtype.kind == "O" or column.json is not None]
        if not texts and len(columns) * _NUMBER_BYTES <= self.max_sample_meta_bytes:
            return
        sizes = sum(map(_value_bytes, texts), np.zeros(columns[0].values.size, np.int64))
        largest = int(sizes.max(initial=0)) + (len(columns) - len(texts)) * _NUMBER_BYTES
        if largest > self.max_sample_meta_bytes:
            raise InvalidArgumentError(
                f"custom_meta of sample {int(sizes.argmax())} of the write has {largest} bytes, at most "
                f"{self.max_sample_meta_bytes} expected (max_sample_meta_bytes); put large values as an object field",
                field="custom_meta",
                metadata=self._metadata("max_sample_meta_bytes", largest),
            )

    def check_task(self, partition: Partition, task_name: str) -> None:
        """Refuse a task that is not there yet and one too many."""
        self._check_new("task_name", partition.partition_id, partition.tasks, (task_name,))

    def _check_new(self, what: str, partition_id: str, known: Collection[str], names: Iterable[str]) -> None:
        """Refuse names that are new to a partition where they are too long, or too many beside those it knows."""
        if new := [name for name in names if name not in known]:
            self._check_longest("name" if what == "fields" else what, _longest(new))
            limit_name, plural, remedy = _NAMED[what]
            self._check_count(limit_name, f"{plural} in partition {partition_id!r}", len(known) + len(new), remedy)

    def _check_longest(self, what: str, longest: int) -> None:
        if longest > self.max_name_length:
            raise InvalidArgumentError(
                f"{'a field' if what == 'name' else what} has a name of {longest} characters, at most "
                f"{self.max_name_length} expected (max_name_length)",
                field=what,
                metadata=self._metadata("max_name_length", longest),
            )

    def _check_count(self, limit_name: str, what: str, got: int, remedy: str) -> None:
        limit = getattr(self, limit_name)
        if got > limit:
            raise LimitExceededError(
                f"there would be {got} {what}, at most {limit} expected ({limit_name}); {remedy}, or raise "
                f"{limit_name}",
                metadata=self._metadata(limit_name, got),
            )

    def _metadata(self, limit_name: str, got: int) -> dict[str, str]:
        return {"limit_name": limit_name, "got": str(got), "limit": str(getattr(self, limit_name))}


def _longest(names: Iterable[str]) -> int:
    return max(map(len, names), default=0)


def _value_bytes(column: MetaColumn) -> NDArray[np.int64]:
    """Return the bytes of each value, of texts in UTF-8; 0 for one that is not there."""
    sizes = column.present * _NUMBER_BYTES
    if column.values.dtype.kind == "O":
        sizes = _text_bytes(column.values, column.present)
    return sizes if column.json is None else sizes + _text_bytes(column.json, column.has_json)


def _text_bytes(texts: NDArray[Any], present: NDArray[np.bool_]) -> NDArray[np.int64]:
    pairs = zip(texts.tolist(), present.tolist(), strict=True)
    return np.fromiter((len(text.encode()) if is_there else 0 for text, is_there in pairs), np.int64, texts.size)
