"""Changes of samples: added, written to, cleared; their custom_meta set, their groups closed.

A write names its samples by index, by key, or not at all where they are new. `resolve_target` finds them and
`check_write` sees whether they take what is written; neither changes anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.changes.state_machine import Change, State, Step
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes
from tq_service.domain.states import FAILED, HELD, LIVE, STATE_CODES
from tq_service.domain.tables.cells import CellSet, ColumnWrite, Put
from tq_service.domain.tables.names import GroupNames, Names
from tq_service.domain.tables.table import distinct, forget_names
from tq_service.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    KeyNotFoundError,
    PartitionSealedError,
    SampleFailedError,
    nearest,
)
from tq_service.schema import FieldSpec, KeyMode, MetaColumn, SampleState


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWrite:
    """What Insert and Commit write.

    Attributes:
        row_count: number of samples.
        global_indexes: existing samples `(n,)`; None: new ones, or those of `keys`.
        keys: unique names, in order.
        groups: groups of new samples in order, "" for none.
        names: what is known of keys and groups already; None: nothing.
        put: where the columns are, None for metadata and state only.
        columns: the columns of the put.
    """

    row_count: int
    global_indexes: Indexes | None = None
    keys: Sequence[str] | None = None
    key_mode: KeyMode = "upsert"
    groups: Sequence[str] | None = None
    names: Names | None = field(default=None, metadata={"is_encoded": False})
    group_size: int = 0
    state: SampleState | None = None
    meta: Sequence[MetaColumn] = ()
    put: Put | None = None
    columns: Sequence[ColumnWrite] = ()

    def group_names(self) -> GroupNames | None:
        """Return the groups that the samples name, None where the write has none."""
        if self.groups is None:
            return None
        known = None if self.names is None else self.names.group_names
        return GroupNames.of(self.groups) if known is None else known


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The rows of a write, in its order: `positions` `(n,)` of existing rows, -1 where `is_new` `(n,)`."""

    positions: Indexes
    is_new: NDArray[np.bool_]


CheckedWrite: TypeAlias = tuple[Partition, Target, Sequence[FieldSpec]]
FoundRows: TypeAlias = tuple[Partition, Indexes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a write did: the samples, and the specs of the fields written."""

    partition: Partition
    global_indexes: Indexes
    specs: Sequence[FieldSpec] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesWritten(Change):
    """Samples were added, or written to."""

    partition_id: str
    write: SampleWrite

    def prepare(self, state: State) -> CheckedWrite:
        """Find the rows of the write and see whether they take it."""
        return self.prepare_in(state.partition(self.partition_id))

    def prepare_in(self, partition: Partition) -> CheckedWrite:
        """Prepare for a partition that may not be in the state yet."""
        target = resolve_target(partition, self.write)
        return partition, target, check_write(partition, self.write, target)

    def apply(self, state: State, prepared: CheckedWrite, step: Step) -> Written:
        """Add the rows that are new, then write cells, custom_meta and state."""
        partition, target, specs = prepared
        write, table = self.write, partition.table
        added = _add_rows(partition, write, target)
        positions = np.arange(added.start, added.stop)
        are_new = positions.size == write.row_count
        if not are_new:
            target.positions[target.is_new] = positions
            positions = target.positions
        step.freed += _write_cells(partition, write, specs, positions, are_new=are_new)
        partition.meta.write(write.meta, positions)
        if write.state is not None:
            step.freed += _set_state(partition, STATE_CODES[write.state], positions[~target.is_new])
        indexes = table.index.data[added].copy() if are_new else table.index.data[positions]
        expected = partition.settings.expected_samples
        if expected is not None and partition.inserted_count >= expected:
            partition.seal()
        partition.touched(indexes)
        step.changed[partition] = None
        table.close_gaps(positions.size)
        return Written(partition=partition, global_indexes=indexes, specs=specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaSet(Change):
    """custom_meta of existing samples was written."""

    partition_id: str
    global_indexes: Indexes
    columns: Sequence[MetaColumn]

    def prepare(self, state: State) -> FoundRows:
        """Find the samples and see whether the columns take the values."""
        partition = state.partition(self.partition_id)
        if self.global_indexes.size == 0:
            raise InvalidArgumentError("global_indexes is empty; name at least one sample", field="global_indexes")
        positions = partition.positions_of(self.global_indexes)
        partition.meta.check(self.columns, positions.size)
        return partition, positions

    def apply(self, state: State, prepared: FoundRows, step: Step) -> None:
        """Write the values."""
        partition, positions = prepared
        partition.meta.write(self.columns, positions)
        partition.state_version += 1
        partition.touched(self.global_indexes)
        step.changed[partition] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsClosed(Change):
    """Groups get no further members."""

    partition_id: str
    names: Sequence[str]

    def prepare(self, state: State) -> FoundRows:
        """Find the groups."""
        partition = state.partition(self.partition_id)
        return partition, partition.groups.slots_of(self.names)

    def apply(self, state: State, prepared: FoundRows, step: Step) -> None:
        """Close them."""
        partition, slots = prepared
        partition.groups.close(slots)
        partition.state_version += 1
        step.changed[partition] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesCleared(Change):
    """Samples were removed; those that were not there are named too."""

    partition_id: str
    global_indexes: Indexes

    def prepare(self, state: State) -> FoundRows | None:
        """Find those that are there."""
        partition = state.partition(self.partition_id)
        positions = partition.table.find(self.global_indexes)
        positions = distinct(positions[positions >= 0], partition.table.count)
        return (partition, positions) if positions.size else None

    def apply(self, state: State, prepared: FoundRows, step: Step) -> int:
        """Remove them from all that knows of them; return how many they were."""
        partition, positions = prepared
        step.freed += partition.cells.forget(positions, partition.cells.fields.values())
        states = partition.state.data[positions]
        still_open = positions[(states == LIVE) | (states == HELD)]
        for task in partition.tasks.values():
            task.on_rows_closed(still_open)
            task.on_rows_cleared(positions)
        if positions.size == partition.table.present_count:
            partition.key_index.clear()
        elif partition.key_index:
            keys = partition.key.data[positions]
            forget_names(partition.key_index, keys[keys != None].tolist())  # noqa: E711  (of each)
        _forget_members(partition, positions, states)
        partition.count_states(positions, -1)
        partition.table.remove(positions)
        partition.state_version += 1
        step.changed[partition] = None
        return positions.size


# What a write does


def _add_rows(partition: Partition, write: SampleWrite, target: Target) -> slice:
    count = int(np.count_nonzero(target.is_new))
    code = STATE_CODES[write.state or SampleState.LIVE]
    added = partition.table.append(count)
    if count == 0:
        return added
    partition.state.write(added, code)
    partition.state_counts[code] += count
    partition.insert_size_gcd = gcd(partition.insert_size_gcd, count)
    if write.keys is not None:
        names = of_rows(write.keys, target.is_new)
        partition.key.write(added, names)
        _add_keys(partition, names, write.names, partition.table.next_index - count)
    if (groups := write.group_names()) is not None:
        groups = groups if count == write.row_count else groups.of_samples(target.is_new)
        positions = np.arange(added.start, added.stop)
        partition.groups.add(groups, write.group_size, positions, failed=code == FAILED)
    if code != FAILED:
        for task in partition.tasks.values():
            task.on_rows_added(count)
    return added


def _add_keys(partition: Partition, keys: Sequence[str], known: Names | None, first_index: int) -> None:
    if known is None or len(known.index_of) != len(keys) or known.first_index != first_index:
        partition.key_index.update(zip(keys, range(first_index, first_index + len(keys)), strict=True))
    elif len(partition.key_index) < len(keys):  # the larger one takes in the smaller
        known.index_of.update(partition.key_index)
        partition.key_index = known.index_of
    else:
        partition.key_index.update(known.index_of)


def _write_cells(
    partition: Partition, write: SampleWrite, specs: Sequence[FieldSpec], positions: Indexes, *, are_new: bool
) -> list[CellSet]:
    if write.put is None:
        return []
    if write.state is SampleState.FAILED:  # the bytes of failed samples are not kept
        return [CellSet(put=write.put)]
    size = sum(column.value_bytes for column in write.columns)
    cells = partition.cells
    if are_new:
        rows = np.arange(positions.size)
        return cells.write(write.put, write.columns, specs, positions, rows, value_bytes=size, are_new=True)
    kept = partition.state.data[positions] != FAILED
    if not kept.any():
        return [CellSet(put=write.put)]
    rows = np.flatnonzero(kept)
    size = size * rows.size // positions.size
    freed = cells.write(write.put, write.columns, specs, positions[kept], rows, value_bytes=size, are_new=False)
    if rows.size < positions.size:
        names = tuple(column.spec.name for column in write.columns)
        freed.append(CellSet(put=write.put, field_names=names, rows=np.flatnonzero(~kept)))
    return freed


def _set_state(partition: Partition, code: int, positions: Indexes) -> list[CellSet]:
    changed = positions[partition.state.data[positions] != code]
    if changed.size == 0:
        return []
    freed = []
    if code == FAILED:
        freed = partition.cells.forget(changed, partition.cells.fields.values())
        partition.groups.count(partition.groups.failed, changed, 1)
        for task in partition.tasks.values():
            task.on_rows_closed(changed)
    partition.count_states(changed, -1)
    partition.state.write(changed, code)
    partition.count_states(changed, 1)
    partition.state_version += 1
    return freed


def _forget_members(partition: Partition, positions: Indexes, states: NDArray[np.uint8]) -> None:
    groups = partition.groups
    if not groups.in_use:
        return
    groups.count(groups.failed, positions[states == FAILED], -1)
    groups.count(groups.cleared, positions, 1)
    groups.forget_empty(groups.of_rows[positions])


# What a write means, and whether its rows take it


def resolve_target(partition: Partition, write: SampleWrite) -> Target:
    """Find the rows of a write; raises before anything is changed."""
    _check_counts(write)
    if write.global_indexes is not None:
        if write.keys is not None:
            raise InvalidArgumentError("a write names its samples by index or by key, not by both", field="keys")
        positions = partition.positions_of(write.global_indexes)
    elif write.keys is not None:
        positions = _by_key(partition, write)
    else:
        positions = np.full(write.row_count, -1, np.int64)
    is_new = positions < 0
    if partition.sealed and is_new.any():
        raise PartitionSealedError(
            f"partition {partition.partition_id!r} is sealed with {partition.inserted_count} samples, got "
            f"{int(is_new.sum())} new ones; put columns of existing samples with metadata= or key_mode='existing', "
            f"remove it with clear_partition to begin anew, or use another partition"
        )
    return Target(positions=positions, is_new=is_new)


def check_write(partition: Partition, write: SampleWrite, target: Target) -> list[FieldSpec]:
    """Return the specs that the written fields have afterwards; raises where the rows do not take what is written."""
    specs = partition.cells.merged_specs(write.columns)
    partition.meta.check(write.meta, write.row_count)
    if write.groups is not None:
        _check_groups(partition, write, target)
    if write.state is not None and write.state is not SampleState.FAILED:
        _check_not_failed(partition, target.positions[~target.is_new])
    return specs


def of_rows(names: Sequence[str], which: NDArray[np.bool_]) -> Sequence[str]:
    """Return the names of some rows of a write; usually all of them are meant."""
    return names if which.all() else [names[i] for i in np.flatnonzero(which).tolist()]


def _check_groups(partition: Partition, write: SampleWrite, target: Target) -> None:
    groups = write.groups or ()
    old = np.flatnonzero(~target.is_new)
    for where, known in zip(old.tolist(), partition.groups.names_of(target.positions[old]), strict=True):
        if groups[where] and groups[where] != known:
            raise InvalidArgumentError(
                f"sample {int(partition.table.index.data[target.positions[where]])} is in group {known!r}, got "
                f"{groups[where]!r}; groups are given when a sample is inserted and stay",
                field="groups",
            )
    names = write.group_names()
    if names is not None:
        partition.groups.check(names if target.is_new.all() else names.of_samples(target.is_new), write.group_size)


def _check_not_failed(partition: Partition, positions: Indexes) -> None:
    failed = positions[partition.state.data[positions] == FAILED]
    if failed.size:
        raise SampleFailedError(
            f"sample {int(partition.table.index.data[failed[0]])} of partition {partition.partition_id!r} has failed, "
            f"which is final; insert a new sample in its place"
        )


def _check_counts(write: SampleWrite) -> None:
    if write.row_count <= 0:
        raise InvalidArgumentError("an empty put: got 0 samples; put at least one", field="row_count")
    counts = {"keys": write.keys, "groups": write.groups, "global_indexes": write.global_indexes}
    for name, values in counts.items():
        if values is not None and len(values) != write.row_count:
            raise InvalidArgumentError(
                f"got {len(values)} {name} for {write.row_count} samples; give one a sample", field=name
            )
    if write.keys is not None:
        unique = set(write.keys) if write.names is None else write.names.index_of.keys()
        if len(unique) != len(write.keys):
            seen: set[str] = set()
            twice = next(key for key in write.keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidArgumentError(f"key {twice!r} is given twice in one put; keys are unique", field="keys")
        if "" in unique:
            raise InvalidArgumentError("a key is empty; give every sample of the put a key", field="keys")


def _by_key(partition: Partition, write: SampleWrite) -> Indexes:
    keys = write.keys or ()
    index_of = partition.key_index
    known = np.full(len(keys), -1, np.int64)
    # Of two large sets it is quicker to see that nothing is in both than where each is.
    if index_of and not (write.names is not None and write.names.index_of.keys().isdisjoint(index_of.keys())):
        known = np.fromiter(map(index_of.get, keys, itertools.repeat(-1)), np.int64, len(keys))
    if write.key_mode == "new" and bool((known >= 0).any()):
        key = keys[int(np.argmax(known >= 0))]
        raise AlreadyExistsError(
            f"key {key!r} is known in partition {partition.partition_id!r}; use key_mode='upsert' to write to it"
        )
    if write.key_mode == "existing" and bool((known < 0).any()):
        key = keys[int(np.argmax(known < 0))]
        raise KeyNotFoundError(
            f"partition {partition.partition_id!r} has no key {key!r}; {nearest(key, index_of)}; use "
            f"key_mode='upsert' to add it"
        )
    positions = np.full(known.size, -1, np.int64)
    is_known = known >= 0
    positions[is_known] = partition.table.find(known[is_known])
    return positions
