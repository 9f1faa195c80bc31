"""What becomes of rows, and what follows from it for tasks and groups: steps that several changes are made of."""

from __future__ import annotations

import numpy as np

from tq_service.machine.state_machine import Step
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.table import CLEARED, DEAD_LETTERED, FAILED, distinct, is_open


def set_state(partition: Partition, code: int, positions: Indexes, step: Step) -> None:
    """Give rows that have not failed a state."""
    changed = positions[partition.state[positions] != code]
    if changed.size == 0:
        return
    if code == FAILED:
        step.freed += partition.cells.free(changed, partition.cells.fields.values())
        for task in partition.tasks.values():
            task.on_rows_closed(changed)
    partition.count_states(changed, -1)
    partition.state.write(changed, code)
    partition.count_states(changed, 1)
    partition.state_version += 1
    if code == FAILED:
        skip_rest(partition, changed, step)


def clear_rows(partition: Partition, positions: Indexes, step: Step) -> None:
    """Remove rows from all that knows of them; each is named once."""
    step.freed += partition.cells.free(positions, partition.cells.fields.values())
    keys = None if partition.key.is_blank else partition.key[positions]
    step.removed.append((partition, partition.table.index[positions], keys))
    states = partition.state[positions]
    still_open = positions[is_open(states)]
    for task in partition.tasks.values():
        task.on_rows_closed(still_open)
        task.on_rows_cleared(positions)
    partition.key_index.on_rows_cleared(positions)
    partition.count_states(positions, -1)
    partition.groups.count_cleared(positions)
    partition.state.write(positions, CLEARED)
    skip_rest(partition, positions, step)
    partition.table.remove(positions)
    step.note_change(partition)


def skip_rest(partition: Partition, positions: Indexes, step: Step) -> None:
    """Skip, for tasks that keep groups whole, the rest of those that lost one of these rows, or got it too late."""
    for task in partition.tasks.values():
        skip_lost_groups(partition, task, positions, step)


def skip_lost_groups(partition: Partition, task: TaskLedger, positions: Indexes | None, step: Step) -> None:
    """Skip what is pending of groups that lost a member for good, where the task keeps groups whole.

    A member is lost that failed, was cleared, or was dead-lettered by the task. Of cleared rows the state says so, and
    the rest of the table does not yet.

    Args:
        partition: that of the task.
        task: the task.
        positions: rows whose groups may have lost a member, or got one; None: any may have.
        step: what it is a part of.
    """
    if task.kept_groups is None:
        return
    if positions is None:
        if not (partition.table.removed_count or partition.state_counts[FAILED] or task.dead_lettered_count):
            return
        positions = partition.table.present_positions()
    if partition.groups.in_use:
        rest = _rest_of_named(partition, task, positions)
    elif task.kept_groups:
        rest = _rest_of_blocks(partition, task, positions, task.kept_groups)
    else:
        return
    if task.skip(rest):
        step.consumed[partition] = None  # writes may have capacity for it
        step.tasks.append((partition, task.name))


def _rest_of_named(partition: Partition, task: TaskLedger, positions: Indexes) -> Indexes:
    groups = partition.groups
    slots = groups.of_rows[positions]
    slots = distinct(slots[slots >= 0], groups.slots.count)
    slots = slots[groups.cleared[slots] < groups.members[slots]]
    has_lost = groups.failed[slots] + groups.cleared[slots] > 0
    if not task.dead_lettered_count:
        return groups.members_of(slots[has_lost], partition.table)
    members = groups.members_of(slots, partition.table)
    is_lost = np.zeros(groups.slots.count, np.bool_)
    is_lost[slots[has_lost]] = True
    is_lost[groups.of_rows[members[task.claim[members] == DEAD_LETTERED]]] = True
    return members[is_lost[groups.of_rows[members]]]


def _rest_of_blocks(partition: Partition, task: TaskLedger, positions: Indexes, size: int) -> Indexes:
    table = partition.table
    indexes = np.unique(table.index[positions] // size)[:, None] * size + np.arange(size)
    members = table.find(indexes.ravel()).reshape(indexes.shape)
    is_there = (members >= 0) & is_open(partition.state[members])
    is_there &= task.claim[members] != DEAD_LETTERED
    has_lost = ((indexes < table.next_index) & ~is_there).any(axis=1)
    rest = members[has_lost]
    return rest[rest >= 0]


def reopen(partition: Partition, task: TaskLedger, positions: Indexes, changed: Indexes | None, step: Step) -> None:
    """Have waiting claims look again at rows that can be claimed again, and skip the rest of lost groups.

    For `changed` see `skip_lost_groups`.
    """
    if positions.size:
        partition.notify_rows(partition.table.index[positions])
        step.note_change(partition)
    skip_lost_groups(partition, task, changed, step)
