"""A change that evicts units that a task can never consume, and requests replacements for these units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from tq_service.machine.rows import clear_rows, reopen, set_state
from tq_service.machine.state_machine import Change, State, Step
from tq_service.results import EvictedUnit
from tq_service.schema import BatchUnit, EvictionCode, EvictionReason, RefillOutcome
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes, Refill
from tq_service.state.table import FAILED

_REASONS: dict[int, EvictionReason] = dict(zip(EvictionCode, get_args(EvictionReason), strict=True))


class UnitsEvicted(Change):
    """Samples, rollouts or groups that a task can never consume were cleared or marked as failed for all tasks.

    Attributes:
        partition_id: partition that contains the units.
        task_name: name of the task whose claim evicted the units.
        evicted: evicted units, each with the reason for its eviction.
        action: whether the samples were marked as failed or cleared.
        version: policy version at the time of the eviction, or None if there is no policy. The version is recorded with
            each unit.
        refill: task that regenerates the units, or None.
    """

    partition_id: str
    task_name: str
    evicted: Evicted
    action: Literal["fail", "clear"]
    version: int | None = None
    refill: Refill | None = None

    def prepare(self, state: State) -> tuple[Partition, TaskLedger, Indexes]:
        """Return the partition, the task's ledger, and the positions of the samples to evict."""
        partition = state.partition(self.partition_id)
        return partition, partition.known_task(self.task_name), partition.positions_of(self.evicted.rows)

    def apply(self, state: State, prepared: tuple[Partition, TaskLedger, Indexes], step: Step) -> int:
        """Fail or clear the samples, request replacements, and record the evicted units.

        Return the number of evicted units.
        """
        partition, task, positions = prepared
        first = positions[np.cumsum(self.evicted.sizes) - self.evicted.sizes]
        groups, rollouts = partition.groups.names_of(first), partition.groups.rollout_names_of(first)
        keys = partition.key[first].tolist()
        if self.action == "clear":
            clear_rows(partition, positions, step)
        else:
            set_state(partition, FAILED, positions, step)
            partition.notify_rows(self.evicted.rows)
            step.written.append((partition, self.evicted.rows))
            step.tasks.append((partition, None))
            step.note_change(partition)
        step.tasks.append((partition, self.task_name))
        units = list(map(self._unit, self.evicted.is_group.tolist(), groups, rollouts))
        names = [
            {"group": group, "rollout": rollout, "sample": None}[unit] or key
            for unit, group, rollout, key in zip(units, groups, rollouts, keys, strict=True)
        ]
        outcomes = self._refill(state, names, step)
        reasons, sizes = self.evicted.reasons.tolist(), self.evicted.sizes.tolist()
        columns = zip(units, groups, rollouts, keys, reasons, sizes, outcomes, strict=True)
        task.note_evicted(
            [
                EvictedUnit(
                    serial=serial,
                    unit=unit,
                    group=group,
                    rollout=rollout,
                    key=key,
                    reason=_REASONS[reason],
                    version=self.version,
                    sample_count=size,
                    refill=outcome,
                )
                for serial, (unit, group, rollout, key, reason, size, outcome) in enumerate(
                    columns, task.evicted_count + 1
                )
            ]
        )
        return self.evicted.sizes.size

    def _unit(self, is_whole: bool, group: str | None, rollout: str | None) -> BatchUnit:
        """Return whether an evicted unit is a sample, rollout or group. A rollout without a group counts as a group."""
        if not is_whole:
            return "sample"
        return "rollout" if rollout and (self.evicted.unit == "rollout" or not group) else "group"

    def _refill(self, state: State, names: list[str | None], step: Step) -> Sequence[RefillOutcome | None]:
        """Make the samples with the given keys claimable again for the task in `refill`, and return the outcomes."""
        if self.refill is None:
            return [None] * len(names)
        partition = state.partitions.get(self.refill.partition_id)
        if partition is None:
            return ["unknown"] * len(names)
        positions = partition.key_index.positions_of([name or "" for name in names])
        task = partition.tasks.get(self.refill.task_name)
        if task is None:  # the task has not made a claim yet, so all its samples are pending
            return ["unknown" if position < 0 else "pending" for position in positions.tolist()]
        outcomes, reopened = task.refill(positions, self.refill.max_refills)
        reopen(partition, task, reopened, reopened, step)
        step.tasks.append((partition, task.name))
        return outcomes
