"""Operations shared by several changes: setting the states of rows, and updating the affected tasks and groups."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from tq_service.machine.state_machine import Step
from tq_service.schema import BatchUnit
from tq_service.state.ledger import KEPT_ROLLOUTS, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.table import CLEARED, DEAD_LETTERED, FAILED, LIVE, distinct, is_open


def set_state(partition: Partition, code: int, positions: Indexes, step: Step) -> None:
    """Set the state of rows that have not failed. If the new state is LIVE, reset the age of these rows."""
    changed = positions[partition.state[positions] != code]
    if changed.size == 0:
        return
    if code == FAILED:
        step.freed += partition.cells.free_rows(changed)
        for task in partition.tasks.values():
            task.on_rows_closed(changed)
    partition.count_states(changed, -1)
    partition.state.write(changed, code)
    if code == LIVE:
        partition.begin_age(changed, step.at_seconds)
    partition.count_states(changed, 1)
    partition.state_version += 1
    if code == FAILED:
        skip_rest(partition, changed, step)
    release_due(partition, changed, step)


def clear_rows(partition: Partition, positions: Indexes, step: Step) -> None:
    """Remove rows from the partition and from its tasks' ledgers. `positions` must be distinct."""
    step.freed += partition.cells.free_rows(positions)
    keys = None if partition.key.is_blank else partition.key[positions]
    step.removed.append((partition, partition.table.index[positions], keys))
    states = partition.state[positions]
    still_open = positions[is_open(states)]
    for task in partition.tasks.values():
        task.on_rows_closed(still_open)
        task.on_rows_cleared(positions)
    partition.key_index.on_rows_cleared(positions)
    partition.count_states(positions, -1)
    if partition.groups.in_use:
        remove_groups(partition, partition.groups.count_cleared(positions), step)
    partition.state.write(positions, CLEARED)
    skip_rest(partition, positions, step)
    if partition.settings.releasing_tasks and partition.groups.in_use:
        rest = _members_left(partition, positions)
        release_due(partition, rest[partition.state[rest] != CLEARED], step)
    partition.table.remove(positions)
    step.note_change(partition)


def remove_groups(partition: Partition, slots: Indexes, step: Step) -> None:
    """Remove groups and rollouts without members, together with their cells. `slots` must not contain duplicates."""
    step.freed += partition.cells.free_groups(slots)
    partition.groups.remove(slots)


def begin_groups(partition: Partition) -> None:
    """Stop skipping rows, because the first group has been named and blocks of rows no longer count as groups."""
    for task in partition.tasks.values():
        if (taken := task.unskip()).size:
            partition.notify_rows(partition.table.index[taken])


def seal(partition: Partition, step: Step) -> None:
    """Close a partition to new rows, complete its rollouts, and remove groups that never had a row."""
    partition.sealed = True
    if partition.cells.shared:
        remove_groups(partition, partition.groups.without_members(), step)
    if partition.groups.has_rollouts:
        release_due(partition, partition.table.present_positions(), step)
    step.note_change(partition)
    step.tasks.append((partition, None))


def release_due(partition: Partition, rows: slice | Indexes, step: Step) -> None:
    """Schedule rows for release at the end of the change if all releasing tasks are done with them.

    Call this function after each operation that may make rows due for release. For example, a leased sample must be
    checked again when its lease ends, and a sample in an incomplete group when the group becomes complete.
    """
    if partition.settings.releasing_tasks and (indexes := partition.table.index[rows]).size:
        step.pending.append(partial(_release_due, partition, indexes, step))


def _release_due(partition: Partition, rows: Indexes, step: Step) -> None:
    positions = partition.table.find(rows)
    positions = with_groups(partition, distinct(positions[positions >= 0], partition.table.count), are_complete=True)
    is_due = partition.is_done(positions)
    if is_due.any():
        due = whole_groups(partition, positions, is_due & partition.may_release(positions))
        partition.released_count += due.size
        release_rows(partition, due, step)


def release_rows(partition: Partition, positions: Indexes, step: Step) -> None:
    """Clear rows under the partition's release policy, and record this in the ledgers of its tasks."""
    if not positions.size:
        return
    for task in partition.tasks.values():
        task.note_released(positions)
    step.consumed[partition] = None
    clear_rows(partition, positions, step)


def with_groups(partition: Partition, positions: Indexes, *, are_complete: bool) -> Indexes:
    """Return the given rows that have no group, and all members of the other rows' groups.

    Args:
        partition: partition that contains the rows.
        positions: distinct positions of the rows.
        are_complete: whether to exclude groups that can still gain members, given their declared size or rollouts.
    """
    groups = partition.groups
    if not groups.in_use:
        return positions
    slots = groups.of_rows[positions]
    named = distinct(slots[slots >= 0], groups.slots.count)
    if are_complete:
        is_unsized = (groups.declared[named] == 0) & (groups.parent[named] < 0) & (groups.open_rollouts[named] == 0)
        named = named[is_unsized | groups.is_complete(named, None, no_more=partition.sealed)]
    return np.concatenate([positions[slots < 0], groups.members_of(named, partition.table)])


def whole_groups(partition: Partition, positions: Indexes, is_chosen: NDArray[np.bool_]) -> Indexes:
    """Return the chosen rows, excluding those whose group also contains rows that were not chosen.

    `positions` must contain all members of each group.
    """
    if not partition.groups.in_use:
        return positions[is_chosen]
    slots = partition.groups.of_rows[positions]
    is_broken = np.zeros(partition.groups.slots.count + 1, np.bool_)  # the last element is for rows without a group
    is_broken[slots[~is_chosen]] = True
    return positions[is_chosen & ((slots < 0) | ~is_broken[slots])]


def skip_rest(partition: Partition, positions: Indexes, step: Step) -> None:
    """For each task, if a group of the given rows has lost a member, skip the group's remaining members."""
    for task in partition.tasks.values():
        skip_lost_groups(partition, task, positions, step)


def skip_lost_groups(partition: Partition, task: TaskLedger, positions: Indexes | None, step: Step) -> None:
    """If the task keeps groups together, skip the pending members of groups that have permanently lost a member.

    A member counts as lost if it has failed, has been cleared, or has been dead-lettered by the task. Rows that are
    being cleared already have the state CLEARED, but their values in all other columns still exist.

    Args:
        partition: partition that contains the rows.
        task: the task's ledger.
        positions: positions of rows whose groups may have lost or gained a member. If None, all rows are checked.
        step: current step.
    """
    if task.kept_groups is None:
        return
    if positions is None:
        if not (partition.table.removed_count or partition.state_counts[FAILED] or task.dead_lettered_count):
            return
        positions = partition.table.present_positions()
    if partition.groups.in_use:
        rest = _rest_of_named(partition, task, positions, "rollout" if task.kept_groups == KEPT_ROLLOUTS else "group")
    elif task.kept_groups > 0:
        rest = _rest_of_blocks(partition, task, positions, task.kept_groups)
    else:
        return
    if task.skip(rest):
        release_due(partition, rest, step)
        step.consumed[partition] = None  # skipped rows free capacity for waiting writes
        step.tasks.append((partition, task.name))


def _groups_left(partition: Partition, positions: Indexes, unit: BatchUnit = "group") -> Indexes:
    """Return the slots of the rows' groups (or rollouts), except for those without remaining members."""
    groups = partition.groups
    slots = groups.of_unit(unit, positions)
    slots = distinct(slots[slots >= 0], groups.slots.count)
    return slots[groups.cleared[slots] < groups.members[slots]]


def _members_left(partition: Partition, positions: Indexes) -> Indexes:
    return partition.groups.members_of(_groups_left(partition, positions), partition.table)


def _rest_of_named(partition: Partition, task: TaskLedger, positions: Indexes, unit: BatchUnit) -> Indexes:
    groups = partition.groups
    slots = _groups_left(partition, positions, unit)
    has_lost = groups.failed[slots] + groups.cleared[slots] > 0
    if not task.dead_lettered_count:
        return groups.members_of(slots[has_lost], partition.table, unit)
    members = groups.members_of(slots, partition.table, unit)
    is_lost = np.zeros(groups.slots.count, np.bool_)
    is_lost[slots[has_lost]] = True
    is_lost[groups.of_unit(unit, members[task.claim[members] == DEAD_LETTERED])] = True
    return members[is_lost[groups.of_unit(unit, members)]]


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
    """Notify waiting claims of rows that have become claimable again, and call `skip_lost_groups` with `changed`."""
    if positions.size:
        partition.notify_rows(partition.table.index[positions])
        step.note_change(partition)
    skip_lost_groups(partition, task, changed, step)
