"""The change by which a claim gives up what its task never gets, and has it made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from tq_service.machine.rows import clear_rows, reopen, set_state
from tq_service.machine.state_machine import Change, State, Step
from tq_service.results import EvictedUnit
from tq_service.schema import EvictionCode, EvictionReason, RefillOutcome
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes, Refill
from tq_service.state.table import FAILED

_REASONS: dict[int, EvictionReason] = dict(zip(EvictionCode, get_args(EvictionReason), strict=True))


class UnitsEvicted(Change):
    """Samples and groups that a task never gets were failed or cleared, for all tasks.

    Attributes:
        partition_id: where they are.
        task_name: the task whose claim evicts them.
        action: what becomes of them.
        version: that is published, for the record; None: of no policy.
        refill: the task that makes them again; None: none.
    """

    partition_id: str
    task_name: str
    evicted: Evicted
    action: Literal["fail", "clear"]
    version: int | None = None
    refill: Refill | None = None

    def prepare(self, state: State) -> tuple[Partition, TaskLedger, Indexes]:
        """Find the samples."""
        partition = state.partition(self.partition_id)
        return partition, partition.known_task(self.task_name), partition.positions_of(self.evicted.rows)

    def apply(self, state: State, prepared: tuple[Partition, TaskLedger, Indexes], step: Step) -> int:
        """Fail or clear them, have them made again, and record what they were; return how many units they are."""
        partition, task, positions = prepared
        first = positions[np.cumsum(self.evicted.sizes) - self.evicted.sizes]
        groups, keys = partition.groups.names_of(first), partition.key[first].tolist()
        if self.action == "clear":
            clear_rows(partition, positions, step)
        else:
            set_state(partition, FAILED, positions, step)
            partition.notify_rows(self.evicted.rows)
            step.written.append((partition, self.evicted.rows))
            step.tasks.append((partition, None))
            step.note_change(partition)
        step.tasks.append((partition, self.task_name))
        is_group = self.evicted.is_group.tolist()
        names = [
            group if is_whole and group else key for is_whole, group, key in zip(is_group, groups, keys, strict=True)
        ]
        outcomes = self._refill(state, names, step)
        columns = zip(
            is_group, groups, keys, self.evicted.reasons.tolist(), self.evicted.sizes.tolist(), outcomes, strict=True
        )
        task.note_evicted(
            [
                EvictedUnit(
                    serial=serial,
                    unit="group" if is_whole else "sample",
                    group=group,
                    key=key,
                    reason=_REASONS[reason],
                    version=self.version,
                    sample_count=size,
                    refill=outcome,
                )
                for serial, (is_whole, group, key, reason, size, outcome) in enumerate(columns, task.evicted_count + 1)
            ]
        )
        return self.evicted.sizes.size

    def _refill(self, state: State, names: list[str | None], step: Step) -> Sequence[RefillOutcome | None]:
        """Have the samples with these keys claimable again for the task that makes units; return what came of each."""
        if self.refill is None:
            return [None] * len(names)
        partition = state.partitions.get(self.refill.partition_id)
        if partition is None:
            return ["unknown"] * len(names)
        positions = partition.key_index.positions_of([name or "" for name in names])
        task = partition.tasks.get(self.refill.task_name)
        if task is None:  # it has not claimed yet, so all is left for it
            return ["unknown" if position < 0 else "pending" for position in positions.tolist()]
        outcomes, reopened = task.refill(positions, self.refill.max_refills)
        reopen(partition, task, reopened, reopened, step)
        step.tasks.append((partition, task.name))
        return outcomes
