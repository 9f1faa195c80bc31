"""The ratio of a task's deliveries to inserted samples, bounded in both directions.

The ratio counts the samples inserted into a partition after the first `min_size_to_sample`. The task should receive
`samples_per_insert` deliveries per insert, and may be `error_buffer` deliveries ahead or behind. This is Reverb's
`SampleToInsertRatio` (https://github.com/google-deepmind/reverb), for batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tq_service.errors import InvalidArgumentError
from tq_service.schema import Admission
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition


@dataclass(frozen=True, slots=True)
class InsertRatio:
    """The current ratio of one task."""

    partition: Partition
    task: TaskLedger
    admission: Admission

    def exceeded_by(self, count: int) -> bool:
        """Whether `count` more deliveries are too many; never in a sealed partition, which receives no new samples."""
        if self.partition.sealed:
            return False
        admission, counted = self.admission, self.partition.inserted_count - self.admission.min_size_to_sample
        most = admission.samples_per_insert * counted + admission.error_buffer
        return counted < 0 or self.task.delivered_count + count > most

    def inserts_left(self) -> int:
        """Return the number of samples that may be inserted before the next delivery; negative after too many."""
        admission, delivered = self.admission, self.task.delivered_count
        if self.partition.inserted_count < admission.min_size_to_sample:  # batches wait for these inserts
            return self.most_at_once
        most = admission.min_size_to_sample + (delivered + admission.error_buffer) / admission.samples_per_insert
        return math.floor(most) - self.partition.inserted_count

    @property
    def most_at_once(self) -> int:
        """The maximum number of samples that may ever be inserted at once."""
        admission = self.admission
        return admission.min_size_to_sample + math.floor(2 * admission.error_buffer / admission.samples_per_insert)

    @property
    def waits_for(self) -> str:
        """A clause that explains why batches or puts wait."""
        admission = self.admission
        return (
            f"task {self.task.name!r} received {self.task.delivered_count} samples, and "
            f"{self.partition.inserted_count} were inserted into partition {self.partition.partition_id!r}; the "
            f"admission has samples_per_insert {admission.samples_per_insert:g} after {admission.min_size_to_sample} "
            f"samples, with an error_buffer of {admission.error_buffer}"
        )


def insert_ratio(partition: Partition, task: TaskLedger) -> InsertRatio | None:
    """Return the ratio of a task, or None if its admission does not set one."""
    admission = None if task.outstanding is None else task.outstanding.admission
    return InsertRatio(partition, task, admission) if admission is not None and admission.samples_per_insert else None


def check_batch(ratio: InsertRatio, count: int) -> None:
    """Reject batches that can never be delivered; their ranks and producers would wait forever.

    Raises:
        InvalidArgumentError: `count` is more than twice `error_buffer`.
    """
    most = 2 * ratio.admission.error_buffer
    if count > most:
        raise InvalidArgumentError(
            f"batch_size yields {count} samples over all ranks; at most {most} (twice the error_buffer of task "
            f"{ratio.task.name!r}) are allowed. Request fewer, or create the partition with a larger error_buffer",
            field="batch_size",
            metadata={"got": str(count), "expected": f"1 to {most}"},
        )
