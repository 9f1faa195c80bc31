"""Changes of partitions and samples: partitions made, sealed, cleared; samples added, written to, cleared.

A write names its samples by index, by key, or not at all where they are new. `check_write` finds them and sees whether
they take what is written. What it found holds until the mark of the partition is another one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TypeAlias

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
from tq_service.machine.rows import clear_rows, set_state, skip_rest
from tq_service.machine.state_machine import Change, State, Step
from tq_service.schema import START_VERSION, FieldSpec, KeyMode, SampleState
from tq_service.state.cells import ColumnWrite, Put
from tq_service.state.extents import MOST_EXTENTS
from tq_service.state.groups import CheckedGroups
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import Indexes, LeasedClaim
from tq_service.state.table import FAILED, HELD, LIVE, STATE_CODES, distinct

# A write was checked against its claim when it was made; the log need not know of it.
_CHECKED_ONCE = {"is_encoded": False}


class PartitionCreated(Change):
    """A partition was made, by itself or by its first samples."""

    partition_id: str
    incarnation: bytes
    settings: PartitionSettings

    def prepare(self, state: State) -> Partition:
        """Make the partition; it is not in the state yet."""
        if self.partition_id in state.partitions:
            raise AlreadyExistsError(
                f"partition {self.partition_id!r} is there; clear it first",
                metadata={"resource_type": "partition", "resource_name": self.partition_id},
            )
        return Partition(self.partition_id, self.settings, self.incarnation)

    def apply(self, state: State, prepared: Partition, step: Step) -> Partition:
        """Have it in the state."""
        state.add_partition(prepared)
        step.created.append(prepared)
        return prepared


class PartitionSealed(Change):
    """No new samples come. A write that seals the partition says so itself."""

    partition_id: str

    def prepare(self, state: State) -> Partition | None:
        """Find the partition, unless it is sealed."""
        partition = state.partition(self.partition_id)
        return None if partition.sealed else partition

    def apply(self, state: State, prepared: Partition, step: Step) -> None:
        """Seal it."""
        prepared.sealed = True
        step.note_change(prepared)
        step.tasks.append((prepared, None))


class PartitionCleared(Change):
    """A partition was removed."""

    partition_id: str

    def prepare(self, state: State) -> Partition:
        """Find the partition."""
        return state.partition(self.partition_id)

    def apply(self, state: State, prepared: Partition, step: Step) -> int:
        """Remove it; return how many samples it had."""
        del state.partitions[self.partition_id]
        step.freed += prepared.cells.puts.all()
        step.cleared.append(prepared)
        return prepared.table.present_count


class SnapshotNeeded(Exception):  # noqa: N818  (no fault, and none that a client sees)
    """What comes next in the log goes on from a snapshot that this controller has not.

    Attributes:
        number: the least number of a snapshot that it goes on from.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"the state was replaced: a snapshot of number {number} or more is needed")
        self.number = number


class StateReplaced(Change):
    """A checkpoint was restored: a snapshot, which is not in the log, has the state since.

    Attributes:
        snapshot_number: of that snapshot; what the log has since then is of that state.
    """

    snapshot_number: int

    def prepare(self, state: State) -> State:
        """Return the state.

        Raises:
            SnapshotNeeded: it is not of that snapshot.
        """
        if state.snapshot_number < self.snapshot_number:
            raise SnapshotNeeded(self.snapshot_number)
        return state

    def apply(self, state: State, prepared: State, step: Step) -> None:
        """Change nothing: the snapshot has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWrite:
    """What Insert and Commit write.

    Attributes:
        row_count: number of samples.
        global_indexes: existing samples `(n,)`; None: new ones, or those of `keys`.
        keys: unique names, in order.
        groups: groups of new samples in order, "" for none.
        rows_per_put: rows of each of several puts that were gathered into this one; 0: it is one put.
        put: where the columns are, None for metadata and state only.
        columns: the columns of the put.
        claim: the leased claim that the samples of `global_indexes` are of; None: the write is not checked against one.
        acks: the same, where they are acknowledged in the same change; None: they are not.
        is_of_slots: whether it makes slots: new samples that are held.
        start_version: of slots: the version that is published; None: they have none.
        append_at: the lengths that the cells of the samples have before the columns are added to them `(n,)`; None:
            the columns replace cells.

    Raises:
        InvalidArgumentError: no sample is named where they must be existing ones, the rows are not those of whole
            puts, or an append changes something else, too.
    """

    row_count: int
    global_indexes: Indexes | None = None
    keys: Sequence[str] | None = None
    key_mode: KeyMode = "upsert"
    groups: Sequence[str] | None = None
    group_size: int = 0
    rows_per_put: int = 0
    state: SampleState | None = None
    meta: Sequence[MetaColumn] = ()
    put: Put | None = None
    columns: Sequence[ColumnWrite] = ()
    claim: LeasedClaim | None = field(default=None, metadata=_CHECKED_ONCE)
    acks: LeasedClaim | None = None
    is_of_slots: bool = False
    start_version: int | None = None
    append_at: Indexes | None = None

    def __post_init__(self) -> None:
        if (self.claim or self.acks) is not None and self.global_indexes is None:
            raise InvalidArgumentError(
                "claim is given without global_indexes; name the samples of the claim by their indexes", field="claim"
            )
        if self.key_mode == "existing" and self.keys is None and self.global_indexes is None:
            raise InvalidArgumentError(
                "key_mode is existing, but neither keys nor global_indexes name the samples; give one of them",
                field="key_mode",
            )
        if self.rows_per_put < 0 or (self.rows_per_put and self.row_count % self.rows_per_put):
            raise InvalidArgumentError(
                f"rows_per_put is {self.rows_per_put}, expected 0 or a divisor of the {self.row_count} rows; gather "
                f"puts of as many rows each",
                field="rows_per_put",
            )
        if self.append_at is not None:
            self._check_lengths(self.append_at)

    def _check_lengths(self, lengths: Indexes) -> None:
        problem = ""
        if self.global_indexes is None:
            problem = "without global_indexes; name the samples by their indexes"
        elif lengths.size != self.row_count:
            problem = f"with {lengths.size} lengths for {self.row_count} samples; give the length of each before"
        elif self.state is not None or self.acks is not None or self.groups is not None or self.rows_per_put:
            problem = "with state, ack, groups or rows_per_put; write these by a call of their own"
        if problem:
            raise InvalidArgumentError(f"append_at is given {problem}", field="append_at")

    @property
    def all_meta(self) -> Sequence[MetaColumn]:
        """The custom_meta that is written, with the `start_version` of slots."""
        if self.start_version is None:
            return self.meta
        values = np.full(self.row_count, self.start_version)
        return *self.meta, MetaColumn(name=START_VERSION, values=values, present=np.ones(self.row_count, np.bool_))

    @property
    def may_add_samples(self) -> bool:
        """Whether it may have new samples: it names none, or keys that need not be known."""
        return self.global_indexes is None and (self.keys is None or self.key_mode != "existing")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWrite:
    """A write that a partition takes as it is now.

    Attributes:
        positions: of its rows `(n,)` in order, -1 for new ones; None: all are new.
        new_count: how many are.
        groups: the groups of the new ones, None where the write names none.
        specs: those that the written fields have afterwards.
        acked: what it acknowledges; None: nothing.
        mark: of the partition; it holds until that is another one.
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
        """Whether it still holds; what is acknowledged may have been by another call, which changes no mark."""
        return self.acked is None and self.mark == self.partition.mark

    @property
    def is_new(self) -> slice | NDArray[np.bool_]:
        """What is of new rows, in an array in the order of the write."""
        return slice(None) if self.positions is None else self.positions < 0


FoundRows: TypeAlias = tuple[Partition, Indexes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a write did: the samples, a range where all are new, and the specs of the fields written."""

    partition: Partition
    global_indexes: Indexes | range
    specs: Sequence[FieldSpec] = ()


class SamplesWritten(Change):
    """Samples were added, or written to."""

    partition_id: str
    write: SampleWrite

    def prepare(self, state: State) -> CheckedWrite:
        """Find the rows of the write and see whether they take it."""
        return check_write(state.partition(self.partition_id), self.write)

    def apply(self, state: State, prepared: CheckedWrite, step: Step) -> Written:
        """Acknowledge samples, and add the rows that are new; then write their state, cells and custom_meta."""
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
            elif write.acks is not None:  # what was held is finished
                set_state(partition, LIVE, positions[partition.state[positions] == HELD], step)
            if prepared.acked is not None:
                finish_prompts(partition, prepared.acked, step)
            positions[positions < 0] = np.arange(added.start, added.stop)
            rows, indexes = positions, table.index[positions]
        if write.state is SampleState.FAILED and write.put is not None:
            step.freed.append(write.put)  # bytes of failed rows are not kept
        elif write.put is not None and write.append_at is not None and positions is not None:
            step.freed += partition.cells.append(write.put, write.columns, prepared.specs, positions, write.append_at)
        elif write.put is not None:
            cells = partition.cells
            step.freed += cells.write(write.put, write.columns, prepared.specs, rows, write.row_count)
            if partition.state_counts[FAILED] and positions is not None:
                failed = positions[partition.state[positions] == FAILED]
                step.freed += cells.free(failed, [cells.fields[spec.name] for spec in prepared.specs])
        partition.meta.write(write.all_meta, rows)
        expected = partition.settings.expected_samples
        if expected is not None and partition.inserted_count >= expected and not partition.sealed:
            partition.sealed = True
            step.note_change(partition)
            step.tasks.append((partition, None))
        elif write.state is SampleState.FAILED:
            step.tasks.append((partition, None))
        partition.notify_rows(indexes)
        step.written.append((partition, indexes))
        step.changed[partition] = None
        table.close_gaps(write.row_count)
        return Written(partition=partition, global_indexes=indexes, specs=prepared.specs)


class MetaSet(Change):
    """custom_meta of existing samples was written."""

    partition_id: str
    global_indexes: Indexes
    columns: Sequence[MetaColumn]
    claim: LeasedClaim | None = field(default=None, metadata=_CHECKED_ONCE)

    def prepare(self, state: State) -> FoundRows:
        """Find the samples and see whether the columns take the values."""
        partition = state.partition(self.partition_id)
        if self.global_indexes.size == 0:
            raise InvalidArgumentError("global_indexes is empty; name at least one sample", field="global_indexes")
        check_claim(partition, self.claim, self.global_indexes)
        _check_start_version(partition, self.columns)
        positions = partition.positions_of(self.global_indexes)
        partition.meta.check(self.columns, positions.size)
        return partition, positions

    def apply(self, state: State, prepared: FoundRows, step: Step) -> None:
        """Write the values."""
        partition, positions = prepared
        partition.meta.write(self.columns, positions)
        partition.notify_rows(self.global_indexes)
        step.written.append((partition, self.global_indexes))
        step.note_change(partition)


class SamplesTruncated(Change):
    """Cells of held samples were cut to lengths."""

    partition_id: str
    global_indexes: Indexes
    lengths: Indexes
    field_names: Sequence[str]
    claim: LeasedClaim | None = field(default=None, metadata=_CHECKED_ONCE)

    def prepare(self, state: State) -> FoundRows | None:
        """Find the samples, unless all cells have the lengths already."""
        partition = state.partition(self.partition_id)
        if self.global_indexes.size == 0 or self.lengths.size != self.global_indexes.size or self.lengths.min() < 0:
            raise InvalidArgumentError(
                f"got {self.lengths.size} lengths for {self.global_indexes.size} samples; expected one for each, 0 or "
                f"more, and at least one sample",
                field="lengths",
            )
        if not self.field_names:
            raise InvalidArgumentError("data_fields is empty; name the fields to cut", field="data_fields")
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
        """Cut them."""
        partition, positions = prepared
        step.freed += partition.cells.truncate(self.field_names, positions, self.lengths)
        partition.notify_rows(self.global_indexes)
        step.written.append((partition, self.global_indexes))
        step.note_change(partition)


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
        step.note_change(partition)


class SamplesCleared(Change):
    """Samples were removed; those that were not there are named too."""

    partition_id: str
    global_indexes: Indexes
    claim: LeasedClaim | None = field(default=None, metadata=_CHECKED_ONCE)

    def prepare(self, state: State) -> FoundRows | None:
        """Find those that are there."""
        partition = state.partition(self.partition_id)
        check_claim(partition, self.claim, self.global_indexes)
        positions = partition.table.find(self.global_indexes)
        positions = distinct(positions[positions >= 0], partition.table.count)
        return (partition, positions) if positions.size else None

    def apply(self, state: State, prepared: FoundRows, step: Step) -> int:
        """Remove them from all that knows of them; return how many they were."""
        partition, positions = prepared
        clear_rows(partition, positions, step)
        return positions.size


# What a write does


def _add_rows(write: SampleWrite, checked: CheckedWrite, step: Step) -> slice:
    """Add the new rows of a write; return their positions."""
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
    partition.count_states(added, 1)
    if code != FAILED:
        for task in partition.tasks.values():
            task.on_rows_added(added)
    if partition.groups.in_use and not had_groups:  # blocks of unnamed rows are no groups any more
        for task in partition.tasks.values():
            if (taken := task.unskip()).size:
                partition.notify_rows(partition.table.index[taken])
    if any(task.kept_groups is not None for task in partition.tasks.values()):
        skip_rest(partition, np.arange(added.start, added.stop), step)
    return added


def _new_counts(write: SampleWrite, checked: CheckedWrite) -> list[int]:
    """Return how many new rows each of the puts has that a write is of."""
    if not write.rows_per_put:
        return [checked.new_count]
    if checked.positions is None:
        return [write.rows_per_put] * (write.row_count // write.rows_per_put)
    counts: list[int] = np.count_nonzero(checked.positions.reshape(-1, write.rows_per_put) < 0, axis=1).tolist()
    return counts


# What a write means, and whether its rows take it


def check_write(partition: Partition, write: SampleWrite) -> CheckedWrite:
    """Find the rows of a write and what it does to them; raises where they do not take it, and changes nothing."""
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
            f"partition {partition.partition_id!r} is sealed with {partition.inserted_count} samples, got "
            f"{new_count} new ones; put columns of existing samples by their indexes, or by keys with key_mode "
            f"existing; clear the partition to start over, or use another one",
            metadata={"partition_id": partition.partition_id},
        )
    if partition.sealed and write.keys is not None and write.key_mode == "upsert" and positions is not None:
        for column in write.columns:  # which looks like another run under the same name
            is_there = partition.cells.produced([column.spec.name], positions)
            if is_there.any():
                raise PartitionSealedError(
                    f"partition {partition.partition_id!r} is sealed, and key "
                    f"{write.keys[int(np.argmax(is_there))]!r} has field {column.spec.name!r} already, perhaps from "
                    f"another run; clear the partition to start over, or use another one, or a namespace for each run; "
                    f"put with key_mode existing to overwrite it",
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
                f"sample {int(failed[0])} of partition {partition.partition_id!r} has failed, which is final; insert a "
                f"new sample in its place",
                reason="SAMPLE_FAILED",
                metadata={"partition_id": partition.partition_id, "global_index": str(failed[0])},
            )
    groups = None if write.groups is None else _check_groups(partition, write, write.groups, positions)
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
                f"partition {partition.partition_id!r} would be sealed with {count} samples before the last of the "
                f"puts that were gathered, its expected_samples is {expected}; send each put by itself",
                metadata={"partition_id": partition.partition_id},
            )
    return checked


def _check_columns(partition: Partition, write: SampleWrite, positions: Indexes | None) -> list[FieldSpec]:
    """Refuse columns that samples at `positions`, None if all are new, do not take; return what fields are then."""
    if write.append_at is not None and positions is not None:
        return _check_append(partition, write, positions, write.append_at)
    if positions is not None and partition.cells.write_once:
        _check_write_once(partition, write, positions[positions >= 0])
    return partition.cells.merged_specs(write.columns, positions)


def _check_append(partition: Partition, write: SampleWrite, positions: Indexes, before: Indexes) -> list[FieldSpec]:
    """Refuse to add to cells of another length, or of samples that do not grow; return what the fields are then."""
    check_growing(partition, write.claim, positions)
    specs = partition.cells.appended_specs(write.columns)
    for spec in specs:
        _check_lengths(partition, spec.name, positions, before)
        counts = partition.cells.extent_counts(spec.name, positions)
        if counts.max() >= MOST_EXTENTS:
            index = int(partition.table.index[positions[int(counts.argmax())]])
            raise PreconditionError(
                f"field {spec.name!r} of sample {index} of partition {partition.partition_id!r} has "
                f"{int(counts.max())} extents, expected fewer than {MOST_EXTENTS} before an append; put the field "
                f"whole, which makes it one, and append in larger steps",
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
    """Refuse to cut a field that cannot grow."""
    known = partition.cells.fields.get(name)
    if known is not None and known.produced_count and known.spec.ragged_dims[:1] != (0,):
        raise FieldMismatchError(
            f"field {name!r} is {known.spec.describe()}, expected one whose rows differ in their first dimension; put "
            f"it whole instead",
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
    """Refuse cells that have other lengths, or smaller ones, than a caller expects; return their lengths."""
    lengths = partition.cells.lengths(name, positions)
    fits = lengths >= expected if at_least else lengths == expected
    if fits.all():
        return lengths
    first = int(np.argmin(fits))
    index, got = int(partition.table.index[positions[first]]), int(lengths[first])
    raise PreconditionError(
        f"field {name!r} of sample {index} of partition {partition.partition_id!r} has length {got}, expected "
        f"{int(expected[first])} ({np.count_nonzero(~fits)} of {fits.size} samples differ); continue at its length, or "
        f"truncate it",
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
    """Refuse a write that could evade the bound on staleness of the partition, if it has one."""
    _check_start_version(partition, write.meta)
    bounded = partition.settings.bounded_admission
    if bounded is not None and new_count:
        raise PreconditionError(
            f"partition {partition.partition_id!r} bounds the staleness of task {bounded.task_name!r} to "
            f"{bounded.max_staleness} versions, which are counted from the slot of a sample on, got {new_count} new "
            f"samples without a slot; make slots before they are generated (Acquire), and put their data into these",
            reason="STALENESS_BOUNDED",
            metadata={"partition_id": partition.partition_id, "task_name": bounded.task_name},
        )


def _check_start_version(partition: Partition, columns: Sequence[MetaColumn]) -> None:
    bounded = partition.settings.bounded_admission
    if bounded is not None and any(column.name == START_VERSION for column in columns):
        raise InvalidArgumentError(
            f"custom_meta has {START_VERSION!r}, which says in partition {partition.partition_id!r} when the slot of a "
            f"sample was made, for the max_staleness of task {bounded.task_name!r}; use another name",
            field="custom_meta",
        )


def _check_groups(
    partition: Partition, write: SampleWrite, groups: Sequence[str], positions: Indexes | None
) -> CheckedGroups:
    """Return the groups of the new samples; raises where they, or those of the others, cannot be what is given."""
    if positions is not None:
        is_new = positions < 0
        old = positions[~is_new]
        for position, group, known in zip(
            old.tolist(), itertools.compress(groups, ~is_new), partition.groups.names_of(old), strict=True
        ):
            if group and group != known:
                raise InvalidArgumentError(
                    f"sample {int(partition.table.index[position])} is in group {known!r}, got {group!r}; groups "
                    f"are given when a sample is inserted and stay",
                    field="groups",
                )
        groups = list(itertools.compress(groups, is_new))
    return partition.groups.check(groups, write.group_size)


def _check_write_once(partition: Partition, write: SampleWrite, positions: Indexes) -> None:
    """Refuse a second value of samples, at `positions`, for a field that takes one only."""
    for name in partition.cells.write_once.intersection(column.spec.name for column in write.columns):
        is_there = partition.cells.produced([name], positions)
        if is_there.any():
            index = int(partition.table.index[positions[np.argmax(is_there)]])
            raise AlreadyExistsError(
                f"field {name!r} is write-once, got a second value for sample {index} of partition "
                f"{partition.partition_id!r} ({np.count_nonzero(is_there)} of {positions.size} have one), expected "
                f"samples without a value; leave them out, or clear them to put them again",
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
        raise InvalidArgumentError("an empty put: got 0 samples; put at least one", field="row_count")
    counts = {"keys": write.keys, "groups": write.groups, "global_indexes": write.global_indexes}
    for name, values in counts.items():
        if values is not None and len(values) != write.row_count:
            raise InvalidArgumentError(
                f"got {len(values)} {name} for {write.row_count} samples; give one a sample", field=name
            )
    if write.keys is not None:
        unique = set(write.keys)
        if len(unique) != len(write.keys):
            ((twice, _),) = Counter(write.keys).most_common(1)
            raise InvalidArgumentError(f"key {twice!r} is given twice in one put; keys are unique", field="keys")
        if "" in unique:
            raise InvalidArgumentError("a key is empty; give every sample of the put a key", field="keys")


def _find_rows(partition: Partition, write: SampleWrite) -> Indexes | None:
    """Return the positions of the samples of a write, -1 for new ones; None: all are new."""
    if write.global_indexes is not None:
        if write.keys is not None:
            raise InvalidArgumentError("a write names its samples by index or by key, not by both", field="keys")
        check_claim(partition, write.claim, write.global_indexes)
        return partition.positions_of(write.global_indexes)
    keys, index = write.keys, partition.key_index
    if keys is None:
        return None
    positions = index.positions_of(keys)
    is_known = positions >= 0
    if write.key_mode == "new" and is_known.any():
        key = keys[int(np.argmax(is_known))]
        remedy = "make slots with other keys" if write.is_of_slots else "use key_mode upsert to write to it"
        raise AlreadyExistsError(
            f"key {key!r} is known in partition {partition.partition_id!r}; {remedy}",
            metadata={"resource_type": "key", "resource_name": key, "partition_id": partition.partition_id},
        )
    if write.key_mode == "existing" and not is_known.all():
        key = keys[int(np.argmin(is_known))]
        raise KeyNotFoundError(
            f"partition {partition.partition_id!r} has no key {key!r}; {nearest(key, index)}; use "
            f"key_mode upsert to add it",
            metadata={"partition_id": partition.partition_id, "key": key},
        )
    return positions
