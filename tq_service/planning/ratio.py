"""Upper and lower bounds on a task's ratio of deliveries to inserts.

The first `min_size_to_sample` inserted samples are not counted. The target is `samples_per_insert` delivered samples
per inserted sample. The task may be at most `error_buffer` deliveries ahead of or behind this target. This bound
corresponds to Reverb's `SampleToInsertRatio` (https://github.com/google-deepmind/reverb), applied to batches.
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
    """The current ratio of a task's deliveries to inserts."""

    partition: Partition
    task: TaskLedger
    admission: Admission

    def exceeded_by(self, count: int) -> bool:
        """Return whether `count` more deliveries would exceed the bound. The result is False for a sealed partition."""
        if self.partition.sealed:
            return False
        admission, counted = self.admission, self.partition.inserted_count - self.admission.min_size_to_sample
        most = admission.samples_per_insert * counted + admission.error_buffer
        return counted < 0 or self.task.delivered_count + count > most

    def inserts_left(self) -> int:
        """Return how many samples may be inserted before the next delivery.

        A negative result means that too many samples were inserted.
        """
        admission, delivered = self.admission, self.task.delivered_count
        if self.partition.inserted_count < admission.min_size_to_sample:  # no batch is delivered before these inserts
            return self.most_at_once
        most = admission.min_size_to_sample + (delivered + admission.error_buffer) / admission.samples_per_insert
        return math.floor(most) - self.partition.inserted_count

    @property
    def most_at_once(self) -> int:
        """Maximum number of samples that can be inserted between two deliveries."""
        admission = self.admission
        return admission.min_size_to_sample + math.floor(2 * admission.error_buffer / admission.samples_per_insert)

    @property
    def waits_for(self) -> str:
        """A clause that explains why the ratio makes batches or puts wait."""
        admission = self.admission
        return (
            f"task {self.task.name!r} received {self.task.delivered_count} samples, and "
            f"{self.partition.inserted_count} were inserted into partition {self.partition.partition_id!r}; the "
            f"admission sets samples_per_insert to {admission.samples_per_insert:g} after "
            f"{admission.min_size_to_sample} samples, and error_buffer to {admission.error_buffer}"
        )


def insert_ratio(partition: Partition, task: TaskLedger) -> InsertRatio | None:
    """Return a task's ratio of deliveries to inserts, or None if the task's admission does not limit this ratio."""
    admission = None if task.outstanding is None else task.outstanding.admission
    return InsertRatio(partition, task, admission) if admission is not None and admission.samples_per_insert else None


def check_batch(ratio: InsertRatio, count: int) -> None:
    """Reject a batch size that would make ranks and producers wait for each other forever.

    Raises:
        InvalidArgumentError: `count` is more than twice `error_buffer`.
    """
    most = 2 * ratio.admission.error_buffer
    if count > most:
        raise InvalidArgumentError(
            f"batch_size asks for {count} samples across all ranks; expected at most {most}, twice the error_buffer of "
            f"task {ratio.task.name!r}. Request fewer samples, or create the partition with a larger error_buffer.",
            field="batch_size",
            metadata={"got": str(count), "expected": f"1 to {most}"},
        )
