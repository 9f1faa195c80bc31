"""Changes to partitions (create, seal, clear) and to samples (add, write, clear).

A write identifies existing samples by global index or key. New samples need neither an index nor a key. `check_write`
finds the samples and validates the write against them. The result remains valid until the partition's `mark` changes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import MetaColumn
from tq_service.errors import (
    AlreadyExistsError,
    FieldMismatchError,
    InvalidArgumentError,
    KeyNotFoundError,
    PartitionSealedError,
    PreconditionError,
    nearest,
)
from tq_service.machine.claims import (
    Acked,
    acknowledge,
    check_acked,
    check_claim,
    check_growing,
    finish_prompts,
)
from tq_service.machine.rows import (
    begin_groups,
    clear_rows,
    release_due,
    release_rows,
    seal,
    set_state,
    skip_rest,
    whole_groups,
    with_groups,
)
from tq_service.machine.state_machine import Change, State, Step
from tq_service.schema import START_VERSION, FieldSpec, KeyMode, SampleState
from tq_service.state.cells import ColumnWrite, Field, Put
from tq_service.state.extents import MOST_EXTENTS
from tq_service.state.groups import CheckedGroups
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import Indexes, LeasedClaim
from tq_service.state.table import CLEARED, FAILED, HELD, LIVE, STATE_CODES, distinct

# Marks fields that are validated only when a change is made. They are not logged, so replay cannot validate them.
CHECKED_ONCE = {"is_encoded": False}


class PartitionCreated(Change):
    """A partition was created, either explicitly or by the first put."""

    partition_id: str
    incarnation: bytes
    settings: PartitionSettings

    def prepare(self, state: State) -> Partition:
        """Create the partition object. `apply` adds the object to the state."""
        if self.partition_id in state.partitions:
            raise AlreadyExistsError(
                f"partition {self.partition_id!r} already exists; clear it first",
                metadata={"resource_type": "partition", "resource_name": self.partition_id},
            )
        return Partition(self.partition_id, self.settings, self.incarnation)

    def apply(self, state: State, prepared: Partition, step: Step) -> Partition:
        """Add the partition to the state."""
        state.add_partition(prepared)
        step.created.append(prepared)
        return prepared


class PartitionSealed(Change):
    """A partition was sealed by a request, so it accepts no new samples. A write can also seal its partition."""

    partition_id: str

    def prepare(self, state: State) -> Partition | None:
        """Return the partition, or None if it is already sealed."""
        partition = state.partition(self.partition_id)
        return None if partition.sealed else partition

    def apply(self, state: State, prepared: Partition, step: Step) -> None:
        """Seal the partition."""
        seal(prepared, step)


class PartitionCleared(Change):
    """A partition was removed."""

    partition_id: str

    def prepare(self, state: State) -> Partition:
        """Return the partition. Raise PartitionNotFoundError if the partition does not exist."""
        return state.partition(self.partition_id)

    def apply(self, state: State, prepared: Partition, step: Step) -> int:
        """Remove the partition from the state, and return how many samples it contained."""
        del state.partitions[self.partition_id]
        step.freed += prepared.cells.puts.all()
        step.cleared.append(prepared)
        return prepared.table.present_count


class SnapshotNeeded(Exception):  # noqa: N818  (not an error, and never sent to a client)
    """Raised if the next log entry builds on a newer snapshot than the one that the controller has loaded.

    Attributes:
        number: number of the oldest usable snapshot.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"the log continues from snapshot {number}; load snapshot {number} or a later snapshot")
        self.number = number


class StateReplaced(Change):
    """The state was replaced by a snapshot from outside the log, because a checkpoint was restored.

    Attributes:
        snapshot_number: number of the snapshot to which later log entries apply.
    """

    snapshot_number: int

    def prepare(self, state: State) -> State:
        """Return the state.

        Raises:
            SnapshotNeeded: the state was loaded from a snapshot earlier than `snapshot_number`.
        """
        if state.snapshot_number < self.snapshot_number:
            raise SnapshotNeeded(self.snapshot_number)
        return state

    def apply(self, state: State, prepared: State, step: Step) -> None:
        """Do nothing, because the snapshot has already replaced the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWrite:
    """A write of samples, as requested by an Insert or Commit call.

    Attributes:
        row_count: number of samples.
        global_indexes: indexes of existing samples, as an array of shape `(n,)`. None if the samples are new or are
            identified by `keys`.
        keys: unique keys of the samples, in row order.
        groups: group of each sample in row order, or "" for no group. Only new samples are assigned to a group.
        rollouts: rollout of each sample in row order, or "" for no rollout. Only new samples are assigned to a rollout.
        ends_rollouts: whether the write closes the samples' rollouts, which then accept no further samples.
        rows_per_put: number of rows per put if the write combines several puts; 0 for a single put.
        put: put that contains the columns. None if the write sets only metadata or state.
        columns: specs and sizes of the put's columns.
        claim: leased claim that must contain the samples in `global_indexes`. None if the write does not require a
            claim.
        acks: leased claim whose samples the write also acknowledges, or None.
        is_of_slots: whether the write creates slots, which are new held samples.
        start_version: published policy version at the time the slots are created, or None.
        append_at: lengths of the cells before an append, as an array of shape `(n,)`. None if the columns replace the
            cells.

    Raises:
        InvalidArgumentError: the write requires existing samples but specifies no indexes or keys, the number of rows
            is not a multiple of `rows_per_put`, or an append also changes other data.
    """

    row_count: int
    global_indexes: Indexes | None = None
    keys: Sequence[str] | None = None
    key_mode: KeyMode = "upsert"
    groups: Sequence[str] | None = None
    group_size: int = 0
    rollouts: Sequence[str] | None = None
    ends_rollouts: bool = False
    rows_per_put: int = 0
    state: SampleState | None = None
    meta: Sequence[MetaColumn] = ()
    put: Put | None = None
    columns: Sequence[ColumnWrite] = ()
    claim: LeasedClaim | None = field(default=None, metadata=CHECKED_ONCE)
    acks: LeasedClaim | None = None
    is_of_slots: bool = False
    start_version: int | None = None
    append_at: Indexes | None = None

    def __post_init__(self) -> None:
        if (self.claim or self.acks) is not None and self.global_indexes is None:
            raise InvalidArgumentError(
                "claim is set, but global_indexes is not; pass the indexes of the claim's samples", field="claim"
            )
        if self.key_mode == "existing" and self.keys is None and self.global_indexes is None:
            raise InvalidArgumentError(
                "key_mode is 'existing', but neither keys nor global_indexes is set; pass one of them",
                field="key_mode",
            )
        if self.rows_per_put < 0 or (self.rows_per_put and self.row_count % self.rows_per_put):
            raise InvalidArgumentError(
                f"rows_per_put is {self.rows_per_put}; expected 0 or a divisor of {self.row_count}, the number of "
                f"rows. Combine only puts with the same number of rows",
                field="rows_per_put",
            )
        if self.append_at is not None:
            self._check_lengths(self.append_at)

    def _check_lengths(self, lengths: Indexes) -> None:
        problem = ""
        if self.global_indexes is None:
            problem = "without global_indexes; pass the indexes of the samples"
        elif lengths.size != self.row_count:
            problem = f"with {lengths.size} lengths for {self.row_count} samples; pass the current length of each"
        elif self.state is not None or self.acks is not None or self.groups is not None or self.rollouts is not None:
            problem = "with state, ack, groups or rollouts; write these in a separate call"
        elif self.rows_per_put or self.ends_rollouts:
            problem = "with rows_per_put or ends_rollouts; write these in a separate call"
        if problem:
            raise InvalidArgumentError(f"append_at is set {problem}", field="append_at")

    @property
    def all_meta(self) -> Sequence[MetaColumn]:
        """All custom_meta columns to write, including the `start_version` of slots."""
        if self.start_version is None:
            return self.meta
        values = np.full(self.row_count, self.start_version)
        return *self.meta, MetaColumn(name=START_VERSION, values=values, present=np.ones(self.row_count, np.bool_))

    @property
    def may_add_samples(self) -> bool:
        """Whether the write can add samples.

        A write can add samples if it identifies no existing samples, or if its keys need not exist.
        """
        return self.global_indexes is None and (self.keys is None or self.key_mode != "existing")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWrite:
    """A write that has been validated against the current state of a partition.

    Attributes:
        positions: array of shape `(n,)` with the position of each written row, or -1 for a new row. None if all rows
            are new.
        new_count: number of new rows.
        groups: groups and rollouts that the new rows join, or None if the write specifies no groups or rollouts.
        specs: specs of the written fields after the write.
        acked: samples that the write acknowledges, or None if it acknowledges none.
        mark: value of `Partition.mark` at the time when the write was validated. The write need not be validated again
            until the mark changes.
    """

    partition: Partition
    positions: Indexes | None
    new_count: int
    groups: CheckedGroups | None
    specs: Sequence[FieldSpec]
    acked: Acked | None
    mark: tuple[object, ...]

    @property
    def is_current(self) -> bool:
        """Whether the validation still holds.

        The result is always False if the write acknowledges samples, because the mark does not track claims.
        """
        return self.acked is None and self.mark == self.partition.mark

    @property
    def is_new(self) -> slice | NDArray[np.bool_]:
        """Index that selects the entries of new rows from an array with one entry per written row."""
        return slice(None) if self.positions is None else self.positions < 0


FoundRows: TypeAlias = tuple[Partition, Indexes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The result of a write: the partition, the sample indexes, and the specs of the written fields.

    If all samples are new, the indexes are a range.
    """

    partition: Partition
    global_indexes: Indexes | range
    specs: Sequence[FieldSpec] = ()


class SamplesWritten(Change):
    """Samples were added, or existing samples were updated."""

    partition_id: str
    write: SampleWrite

    def prepare(self, state: State) -> CheckedWrite:
        """Find the rows to write, and validate the write against them."""
        return check_write(state.partition(self.partition_id), self.write)

    def apply(self, state: State, prepared: CheckedWrite, step: Step) -> Written:
        """Acknowledge samples, add the new rows, and write the state, cells and custom_meta of all rows."""
        partition, positions = prepared.partition, prepared.positions
        write, table = self.write, partition.table
        if prepared.acked is not None:
            acknowledge(partition, prepared.acked, step)
        rows: slice | Indexes
        rows = added = _add_rows(write, prepared, step)
        indexes: Indexes | range = range(table.next_index - prepared.new_count, table.next_index)
        if positions is not None:
            if write.state is not None:
                set_state(partition, STATE_CODES[write.state], positions[positions >= 0], step)
            elif write.acks is not None:  # held samples are now finished
                set_state(partition, LIVE, positions[partition.state[positions] == HELD], step)
            if prepared.acked is not None:
                finish_prompts(partition, prepared.acked, step)
            positions[positions < 0] = np.arange(added.start, added.stop)
            rows, indexes = positions, table.index[positions]
        if write.state is SampleState.FAILED and write.put is not None:
            step.freed.append(write.put)  # values of failed rows are not needed
        elif write.put is not None and write.append_at is not None and positions is not None:
            step.freed += partition.cells.append(write.put, write.columns, prepared.specs, positions, write.append_at)
        elif write.put is not None:
            cells = partition.cells
            step.freed += cells.write(write.put, write.columns, prepared.specs, rows, write.row_count)
            if partition.state_counts[FAILED] and positions is not None:
                failed = positions[partition.state[positions] == FAILED]
                step.freed += cells.free(failed, [cells.fields[spec.name] for spec in prepared.specs])
        partition.meta.write(write.all_meta, rows)
        if write.ends_rollouts:
            partition.groups.close_rollouts_of(rows)
            release_due(partition, rows, step)
            step.note_change(partition)
        expected = partition.settings.expected_samples
        if expected is not None and partition.inserted_count >= expected and not partition.sealed:
            seal(partition, step)
        elif write.state is SampleState.FAILED:
            step.tasks.append((partition, None))
        partition.notify_rows(indexes)
        step.written.append((partition, indexes))
        step.changed[partition] = None
        table.close_gaps(write.row_count)
        return Written(partition=partition, global_indexes=indexes, specs=prepared.specs)


class MetaSet(Change):
    """The custom_meta of existing samples was updated."""

    partition_id: str
    global_indexes: Indexes
    columns: Sequence[MetaColumn]
    claim: LeasedClaim | None = field(default=None, metadata=CHECKED_ONCE)

    def prepare(self, state: State) -> FoundRows:
        """Find the samples, and validate the new values."""
        partition = state.partition(self.partition_id)
        if self.global_indexes.size == 0:
            raise InvalidArgumentError("global_indexes is empty; pass at least one sample", field="global_indexes")
        check_claim(partition, self.claim, self.global_indexes)
        _check_start_version(partition, self.columns)
        positions = partition.positions_of(self.global_indexes)
        partition.meta.check(self.columns, positions.size)
        return partition, positions

    def apply(self, state: State, prepared: FoundRows, step: Step) -> None:
        """Write the custom_meta values."""
        partition, positions = prepared
        partition.meta.write(self.columns, positions)
        partition.notify_rows(self.global_indexes)
        step.written.append((partition, self.global_indexes))
        step.note_change(partition)


class SamplesTruncated(Change):
    """Cells of held samples were truncated."""

    partition_id: str
    global_indexes: Indexes
    lengths: Indexes
    field_names: Sequence[str]
    claim: LeasedClaim | None = field(default=None, metadata=CHECKED_ONCE)

    def prepare(self, state: State) -> FoundRows | None:
        """Return the rows to truncate, or None if no cell would change."""
        partition = state.partition(self.partition_id)
        if self.global_indexes.size == 0 or self.lengths.size != self.global_indexes.size or self.lengths.min() < 0:
            raise InvalidArgumentError(
                f"got {self.lengths.size} lengths for {self.global_indexes.size} samples; expected one non-negative "
                f"length per sample, and at least one sample",
                field="lengths",
            )
        if not self.field_names:
            raise InvalidArgumentError("data_fields is empty; pass the fields to truncate", field="data_fields")
        check_claim(partition, self.claim, self.global_indexes)
        positions = partition.positions_of(self.global_indexes)
        check_growing(partition, self.claim, positions)
        is_changed = False
        for name in self.field_names:
            _check_ragged(partition, name)
            lengths = _check_lengths(partition, name, positions, self.lengths, at_least=True)
            is_there = partition.cells.produced([name], positions)
            is_changed |= bool((is_there & ((lengths > self.lengths) | (self.lengths == 0))).any())
        return (partition, positions) if is_changed else None

    def apply(self, state: State, prepared: FoundRows, step: Step) -> None:
        """Truncate the cells."""
        partition, positions = prepared
        step.freed += partition.cells.truncate(self.field_names, positions, self.lengths)
        partition.notify_rows(self.global_indexes)
        step.written.append((partition, self.global_indexes))
        step.note_change(partition)


class GroupsClosed(Change):
    """Groups and rollouts were closed, so they accept no further members."""

    partition_id: str
    names: Sequence[str]
    rollouts: Sequence[str] = ()

    def prepare(self, state: State) -> FoundRows:
        """Return the partition, and the slots of the groups and rollouts to close."""
        partition = state.partition(self.partition_id)
        return partition, partition.groups.slots_of(self.names, self.rollouts)

    def apply(self, state: State, prepared: FoundRows, step: Step) -> None:
        """Close the groups and rollouts."""
        partition, slots = prepared
        partition.groups.close(slots)
        groups = partition.groups.outermost(slots)
        release_due(partition, partition.groups.members_of(groups, partition.table), step)
        step.note_change(partition)


class SamplesCleared(Change):
    """Samples were removed. Indexes of samples that do not exist are ignored."""

    partition_id: str
    global_indexes: Indexes
    claim: LeasedClaim | None = field(default=None, metadata=CHECKED_ONCE)

    def prepare(self, state: State) -> FoundRows | None:
        """Find the samples that still exist, or return None if all samples have been removed."""
        partition = state.partition(self.partition_id)
        check_claim(partition, self.claim, self.global_indexes)
        positions = partition.table.find(self.global_indexes)
        positions = distinct(positions[positions >= 0], partition.table.count)
        return (partition, positions) if positions.size else None

    def apply(self, state: State, prepared: FoundRows, step: Step) -> int:
        """Remove the samples from all tables, and return how many were removed."""
        partition, positions = prepared
        clear_rows(partition, positions, step)
        return positions.size


class FoundCells(NamedTuple):
    """The rows and groups whose cells will be cleared. Each row or group has a cell in at least one of the fields.

    Attributes:
        fields: fields to clear that store a cell per row.
        rows: positions of the rows that have a cell to clear.
        shared: fields to clear that store a cell per group.
        slots: slots of the groups that have a cell to clear.
    """

    partition: Partition
    fields: Sequence[Field]
    rows: Indexes
    shared: Sequence[Field]
    slots: Indexes


class CellsCleared(Change):
    """The cells of some fields were cleared, but no samples or groups were removed.

    Fields, samples and groups that do not exist are ignored.

    Attributes:
        field_names: names of the fields, without duplicates.
        global_indexes: samples whose own cells were cleared.
        groups: groups whose shared cells were cleared.
    """

    partition_id: str
    field_names: Sequence[str]
    global_indexes: Indexes
    groups: Sequence[str] = ()
    claim: LeasedClaim | None = field(default=None, metadata=CHECKED_ONCE)

    def prepare(self, state: State) -> FoundCells | None:
        """Return the cells to clear, or None if there are none."""
        partition = state.partition(self.partition_id)
        check_claim(partition, self.claim, self.global_indexes)
        known = [each for name in self.field_names if (each := partition.cells.fields.get(name)) is not None]
        own, shared = [each for each in known if not each.is_shared], [each for each in known if each.is_shared]
        rows = _owners(own, partition.table.find(self.global_indexes), partition.table.count)
        slots = _owners(shared, partition.groups.slot_of.find(self.groups), partition.groups.slots.count)
        return FoundCells(partition, own, rows, shared, slots) if rows.size or slots.size else None

    def apply(self, state: State, prepared: FoundCells, step: Step) -> int:
        """Free the cells, and return how many were freed."""
        partition, own, rows, shared, slots = prepared
        count = _cell_count((*own, *shared))
        step.freed += partition.cells.free(rows, own)
        step.freed += partition.cells.free(slots, shared)
        members = partition.groups.members_of(slots[partition.groups.members[slots] > 0], partition.table)
        step.written.append((partition, partition.table.index[np.union1d(rows, members)]))
        step.note_change(partition)  # plans and writes in progress may rely on these cells, so check them again
        return count - _cell_count((*own, *shared))


class SamplesExpired(Change):
    """Samples were released because they exceeded the maximum age set in the partition's release policy.

    Attributes:
        before: time in seconds (see `Step.at_seconds`). Samples that were put or became live before this time are
            released.
    """

    partition_id: str
    before: float

    def prepare(self, state: State) -> FoundRows | None:
        """Find the samples to release, or return None if there are none. A group is released only as a whole."""
        partition = state.partition(self.partition_id)
        table = partition.table
        is_old = (partition.since[: table.count] < self.before) & (partition.state[: table.count] != CLEARED)
        positions = with_groups(partition, np.flatnonzero(is_old), are_complete=False)
        old = whole_groups(partition, positions, is_old[positions] & partition.may_release(positions))
        return (partition, old) if old.size else None

    def apply(self, state: State, prepared: FoundRows, step: Step) -> int:
        """Release the samples, and return how many were released."""
        partition, positions = prepared
        partition.expired_count += positions.size
        release_rows(partition, positions, step)
        return positions.size


def _owners(fields: Sequence[Field], owners: Indexes, bound: int) -> Indexes:
    """Return the distinct rows or group slots in `owners` that have a cell in at least one of the fields."""
    owners = distinct(owners[owners >= 0], bound)
    has_cell = np.zeros(owners.size, np.bool_)
    for each in fields:
        has_cell |= each.cell[owners] >= 0
    return owners[has_cell]


def _cell_count(fields: Sequence[Field]) -> int:
    return sum(each.produced_count for each in fields)


# Applying a write


def _add_rows(write: SampleWrite, checked: CheckedWrite, step: Step) -> slice:
    """Add the new rows of a write to the partition, and return their positions."""
    partition, count = checked.partition, checked.new_count
    code = STATE_CODES[write.state or SampleState.LIVE]
    added = partition.table.append(count, code)
    if count == 0:
        return added
    had_groups = partition.groups.in_use
    partition.insert_size_gcd = gcd(partition.insert_size_gcd, *_new_counts(write, checked))
    if write.keys is not None:
        keys = write.keys
        if checked.positions is not None:
            keys = list(itertools.compress(keys, checked.positions < 0))
        partition.key.write(added, keys)
        partition.key_index.add(keys, partition.table.index[added])
    if checked.groups is not None:
        partition.groups.add(checked.groups, write.group_size, added)
    partition.begin_age(added, step.at_seconds)
    partition.count_states(added, 1)
    if code != FAILED:
        for task in partition.tasks.values():
            task.on_rows_added(added)
    if partition.groups.in_use and not had_groups:
        begin_groups(partition)
    if any(task.kept_groups is not None for task in partition.tasks.values()):
        skip_rest(partition, np.arange(added.start, added.stop), step)
    return added


def _new_counts(write: SampleWrite, checked: CheckedWrite) -> list[int]:
    """Return, for each put in a write, how many of its rows are new."""
    if not write.rows_per_put:
        return [checked.new_count]
    if checked.positions is None:
        return [write.rows_per_put] * (write.row_count // write.rows_per_put)
    counts: list[int] = np.count_nonzero(checked.positions.reshape(-1, write.rows_per_put) < 0, axis=1).tolist()
    return counts


# Validating a write


def check_write(partition: Partition, write: SampleWrite) -> CheckedWrite:
    """Find the rows of a write and validate the write without changing the partition.

    Raises:
        TqError: the write is invalid.
    """
    _check_counts(write)
    acked = None
    if write.acks is not None and write.global_indexes is not None:
        is_gathered = write.rows_per_put > 0
        acked = check_acked(partition, write.acks, write.global_indexes, is_gathered=is_gathered)
    positions = _find_rows(partition, write)
    new_count = write.row_count if positions is None else int(np.count_nonzero(positions < 0))
    if new_count == write.row_count:
        positions = None
    if partition.sealed and new_count:
        raise PartitionSealedError(
            f"partition {partition.partition_id!r} is sealed with {partition.inserted_count} samples, but the put has "
            f"{new_count} new samples. Put columns for existing samples by index, or by key with key_mode existing. "
            "For new samples, clear the partition to start over, or use another partition",
            metadata={"partition_id": partition.partition_id},
        )
    if partition.sealed and write.keys is not None and write.key_mode == "upsert" and positions is not None:
        for column in write.columns:  # an overwrite suggests that another run uses this partition
            is_there = partition.cells.produced([column.spec.name], positions)
            if is_there.any():
                raise PartitionSealedError(
                    f"partition {partition.partition_id!r} is sealed, and key "
                    f"{write.keys[int(np.argmax(is_there))]!r} already has field {column.spec.name!r}, perhaps from "
                    f"another run. Clear the partition to start over, or use another partition or one namespace per "
                    f"run. To overwrite the field, put with key_mode existing",
                    metadata={"partition_id": partition.partition_id},
                )
    if not write.is_of_slots:
        _check_not_bounded(partition, write, new_count)
    specs = _check_columns(partition, write, positions)
    partition.meta.check(write.all_meta, write.row_count)
    if positions is not None and write.state is not None and write.state is not SampleState.FAILED:
        known = positions[positions >= 0]
        if (failed := partition.table.index[known[partition.state[known] == FAILED]]).size:
            raise PreconditionError(
                f"sample {int(failed[0])} of partition {partition.partition_id!r} has failed, which cannot be undone. "
                f"Insert a new sample instead",
                reason="SAMPLE_FAILED",
                metadata={"partition_id": partition.partition_id, "global_index": str(failed[0])},
            )
    groups = _check_groups(partition, write, positions)
    _check_closes(partition, write, positions)
    checked = CheckedWrite(
        partition=partition,
        positions=positions,
        new_count=new_count,
        groups=groups,
        specs=specs,
        acked=acked,
        mark=partition.mark,
    )
    expected = partition.settings.expected_samples
    if write.rows_per_put and expected is not None and new_count:
        count = partition.inserted_count + sum(_new_counts(write, checked)[:-1])
        if count >= expected:
            raise PartitionSealedError(
                f"partition {partition.partition_id!r} has expected_samples {expected}, so it would be sealed with "
                f"{count} samples before the last of the combined puts is added. Send each put separately",
                metadata={"partition_id": partition.partition_id},
            )
    return checked


def _check_columns(partition: Partition, write: SampleWrite, positions: Indexes | None) -> list[FieldSpec]:
    """Validate the columns of a write, and return the field specs after the write.

    Args:
        partition: partition that contains the samples.
        write: the write.
        positions: positions of the samples. None if all samples are new.
    """
    for name in partition.cells.shared.intersection(column.spec.name for column in write.columns):
        raise InvalidArgumentError(
            f"field {name!r} of partition {partition.partition_id!r} has group scope, but the put has a value for "
            f"each of {write.row_count} samples. Instead, pass one value per group in a put of groups",
            field="columns",
            metadata={"field_name": name},
        )
    if write.append_at is not None and positions is not None:
        return _check_append(partition, write, positions, write.append_at)
    if positions is not None and partition.cells.write_once:
        _check_write_once(partition, write, positions[positions >= 0])
    return partition.cells.merged_specs(write.columns, positions)


def _check_append(partition: Partition, write: SampleWrite, positions: Indexes, before: Indexes) -> list[FieldSpec]:
    """Validate an append to held samples whose cells have the lengths `before`. Return the resulting field specs."""
    check_growing(partition, write.claim, positions)
    specs = partition.cells.appended_specs(write.columns)
    for spec in specs:
        _check_lengths(partition, spec.name, positions, before)
        counts = partition.cells.extent_counts(spec.name, positions)
        if counts.max() >= MOST_EXTENTS:
            index = int(partition.table.index[positions[int(counts.argmax())]])
            raise PreconditionError(
                f"field {spec.name!r} of sample {index} of partition {partition.partition_id!r} has "
                f"{int(counts.max())} extents; expected fewer than {MOST_EXTENTS} before an append. Put the entire "
                f"field to merge the extents into one, and append in larger steps",
                reason="TOO_MANY_EXTENTS",
                metadata={
                    "partition_id": partition.partition_id,
                    "field_name": spec.name,
                    "global_index": str(index),
                    "got": str(int(counts.max())),
                    "limit": str(MOST_EXTENTS),
                },
            )
    return specs


def _check_ragged(partition: Partition, name: str) -> None:
    """Raise an error if a field cannot be truncated.

    A field cannot be truncated if it has group scope, or if all its rows have the same size in dimension 0.
    """
    if name in partition.cells.shared:
        raise InvalidArgumentError(
            f"field {name!r} has group scope; expected a field with one value per sample. Put the entire field in a "
            "put of groups instead",
            field="data_fields",
            metadata={"field_name": name},
        )
    known = partition.cells.fields.get(name)
    if known is not None and known.produced_count and known.spec.ragged_dims[:1] != (0,):
        raise FieldMismatchError(
            f"field {name!r} is {known.spec.describe()}; expected a field whose rows differ in their first dimension. "
            f"Put the entire field instead",
            field="data_fields",
            metadata={
                "field_name": name,
                "got": known.spec.describe(),
                "expected": "jagged in the first dimension",
            },
        )


def _check_lengths(
    partition: Partition, name: str, positions: Indexes, expected: Indexes, *, at_least: bool = False
) -> Indexes:
    """Return the lengths of the cells, or raise PreconditionError if they differ from the expected lengths.

    If `at_least` is True, cells may also be longer than expected.
    """
    lengths = partition.cells.lengths(name, positions)
    fits = lengths >= expected if at_least else lengths == expected
    if fits.all():
        return lengths
    first = int(np.argmin(fits))
    index, got = int(partition.table.index[positions[first]]), int(lengths[first])
    raise PreconditionError(
        f"field {name!r} of sample {index} of partition {partition.partition_id!r} has length {got}; expected "
        f"{int(expected[first])} ({np.count_nonzero(~fits)} of {fits.size} samples differ). Append at the "
        f"current length, or truncate the field",
        reason="LENGTH_MISMATCH",
        metadata={
            "partition_id": partition.partition_id,
            "field_name": name,
            "global_index": str(index),
            "got": str(got),
            "expected": str(int(expected[first])),
        },
    )


def _check_not_bounded(partition: Partition, write: SampleWrite, new_count: int) -> None:
    """If staleness is bounded, raise an error for a write that adds samples without slots or sets start versions."""
    _check_start_version(partition, write.meta)
    bounded = partition.settings.bounded_admission
    if bounded is not None and new_count:
        raise PreconditionError(
            f"partition {partition.partition_id!r} limits the staleness of task {bounded.task_name!r} to "
            f"{bounded.max_staleness} versions, counted from the creation of a sample's slot, but the put has "
            f"{new_count} new samples without slots. Create slots before generation starts (Acquire), and put the "
            "data into these slots",
            reason="STALENESS_BOUNDED",
            metadata={"partition_id": partition.partition_id, "task_name": bounded.task_name},
        )


def _check_start_version(partition: Partition, columns: Sequence[MetaColumn]) -> None:
    bounded = partition.settings.bounded_admission
    if bounded is not None and any(column.name == START_VERSION for column in columns):
        raise InvalidArgumentError(
            f"custom_meta contains {START_VERSION!r}, but partition {partition.partition_id!r} reserves this column "
            f"for the version of each sample's slot, which the max_staleness of task {bounded.task_name!r} "
            "requires. Use another name",
            field="custom_meta",
        )


def _check_groups(partition: Partition, write: SampleWrite, positions: Indexes | None) -> CheckedGroups | None:
    """Return the groups and rollouts of the new samples, or None if the write specifies neither.

    Raises:
        TqError: a new sample cannot join its group or rollout, or an existing sample belongs to a different one.
    """
    groups, rollouts = write.groups, write.rollouts
    if groups is None and rollouts is None:
        return None
    if positions is not None:
        is_new = positions < 0
        old = positions[~is_new]
        for what, given, known in (
            ("group", groups, partition.groups.names_of(old)),
            ("rollout", rollouts, partition.groups.rollout_names_of(old)),
        ):
            of_old = [""] * old.size if given is None else itertools.compress(given, ~is_new)
            for position, name, expected in zip(old.tolist(), of_old, known, strict=True):
                if name and name != expected:
                    raise InvalidArgumentError(
                        f"sample {int(partition.table.index[position])} is in {what} {expected!r}, but the put "
                        f"has {what} {name!r}. The {what} of a sample is set on insertion and cannot change",
                        field=f"{what}s",
                    )
        groups = None if groups is None else list(itertools.compress(groups, is_new))
        rollouts = None if rollouts is None else list(itertools.compress(rollouts, is_new))
    return partition.groups.check(groups or [""] * len(rollouts or ()), write.group_size, rollouts or ())


def _check_closes(partition: Partition, write: SampleWrite, positions: Indexes | None) -> None:
    """Raise an error if one put of a write would close a rollout to which a later put of the write adds samples.

    Failed samples also close their rollouts. If `ends_rollouts` is True, each put must contain a sample that belongs to
    a rollout.
    """
    if not write.ends_rollouts and (write.state is not SampleState.FAILED or not write.rows_per_put):
        return
    names: list[str | None] = list(write.rollouts or [""] * write.row_count)
    if positions is not None:
        known = np.flatnonzero(positions >= 0)
        for row, name in zip(known.tolist(), partition.groups.rollout_names_of(positions[known]), strict=True):
            names[row] = name
    size = write.rows_per_put or write.row_count
    puts = [set(filter(None, names[first : first + size])) for first in range(0, len(names), size)]
    if write.ends_rollouts and not all(puts):
        raise InvalidArgumentError(
            f"ends_rollouts is set, but none of the {size} samples is in a rollout; pass the rollouts of new samples, "
            f"or omit ends_rollouts",
            field="ends_rollouts",
        )
    for name, count in Counter(itertools.chain.from_iterable(puts)).items():
        if count > 1:
            raise PreconditionError(
                f"rollout {name!r} is in {count} of the combined puts, but the first of these puts would close the "
                f"rollout. Send each put separately",
                metadata={"group": name},
            )


def _check_write_once(partition: Partition, write: SampleWrite, positions: Indexes) -> None:
    """Raise AlreadyExistsError if the write would overwrite a write-once value of a sample at `positions`."""
    for name in partition.cells.write_once.intersection(column.spec.name for column in write.columns):
        is_there = partition.cells.produced([name], positions)
        if is_there.any():
            index = int(partition.table.index[positions[np.argmax(is_there)]])
            raise AlreadyExistsError(
                f"field {name!r} is write-once, but sample {index} of partition {partition.partition_id!r} already "
                f"has a value ({np.count_nonzero(is_there)} of {positions.size} samples have one). Omit these "
                f"samples, or clear the field to put it again",
                metadata={
                    "resource_type": "cell",
                    "resource_name": f"{name} of sample {index}",
                    "partition_id": partition.partition_id,
                    "field_name": name,
                    "global_index": str(index),
                },
            )


def _check_counts(write: SampleWrite) -> None:
    if write.row_count <= 0:
        raise InvalidArgumentError("the put contains 0 samples; expected at least one", field="row_count")
    counts = {
        "keys": write.keys,
        "groups": write.groups,
        "rollouts": write.rollouts,
        "global_indexes": write.global_indexes,
    }
    for name, values in counts.items():
        if values is not None and len(values) != write.row_count:
            raise InvalidArgumentError(
                f"{name} has {len(values)} values for {write.row_count} samples; pass one per sample", field=name
            )
    if write.keys is not None:
        unique = set(write.keys)
        if len(unique) != len(write.keys):
            ((twice, _),) = Counter(write.keys).most_common(1)
            raise InvalidArgumentError(f"key {twice!r} occurs twice in one put; pass each key only once", field="keys")
        if "" in unique:
            raise InvalidArgumentError("a key is empty; pass a key for every sample in the put", field="keys")


def _find_rows(partition: Partition, write: SampleWrite) -> Indexes | None:
    """Return the positions of a write's samples, with -1 for new samples, or None if all samples are new."""
    if write.global_indexes is not None:
        if write.keys is not None:
            raise InvalidArgumentError("both global_indexes and keys are set; pass only one of them", field="keys")
        check_claim(partition, write.claim, write.global_indexes)
        return partition.positions_of(write.global_indexes)
    keys, index = write.keys, partition.key_index
    if keys is None:
        return None
    positions = index.positions_of(keys)
    is_known = positions >= 0
    if write.key_mode == "new" and is_known.any():
        key = keys[int(np.argmax(is_known))]
        remedy = "create slots with other keys" if write.is_of_slots else "use key_mode upsert to write to this sample"
        raise AlreadyExistsError(
            f"key {key!r} already exists in partition {partition.partition_id!r}; {remedy}",
            metadata={"resource_type": "key", "resource_name": key, "partition_id": partition.partition_id},
        )
    if write.key_mode == "existing" and not is_known.all():
        key = keys[int(np.argmin(is_known))]
        raise KeyNotFoundError(
            f"partition {partition.partition_id!r} has no key {key!r}; {nearest(key, index)}. Use "
            f"key_mode upsert to add the key",
            metadata={"partition_id": partition.partition_id, "key": key},
        )
    return positions
