"""The change by which a claim gives up what its task never gets."""

from __future__ import annotations

from typing import Literal

from tq_service.machine.claims import TaskChange
from tq_service.machine.rows import clear_rows, set_state
from tq_service.machine.state_machine import Step
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.table import FAILED


class UnitsEvicted(TaskChange):
    """Samples and groups that the task never gets were failed or cleared, for all tasks.

    Attributes:
        action: which of the two.
    """

    evicted: Evicted
    action: Literal["fail", "clear"]

    def check(self, partition: Partition, task: TaskLedger) -> Indexes:
        """Find the samples."""
        return partition.positions_of(self.evicted.rows)

    def make(self, partition: Partition, task: TaskLedger, found: Indexes, step: Step) -> None:
        """Count them, then fail or clear them."""
        task.note_evicted(self.evicted)
        if self.action == "clear":
            clear_rows(partition, found, step)
        else:
            set_state(partition, FAILED, found, step)
            partition.notify_rows(self.evicted.rows)
            step.written.append((partition, self.evicted.rows))
            step.tasks.append((partition, None))
            step.note_change(partition)
