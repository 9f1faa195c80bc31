"""A partition: samples with their fields, states, keys, groups and custom_meta, and the tasks that consume them.

This module contains the state of a partition and the code that reads the state. The `machine` package changes the
state.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import (
    InvalidArgumentError,
    NewerVersionError,
    SampleNotFoundError,
    StaleIncarnationError,
    TaskNotFoundError,
    nearest,
)
from tq_service.log_message import LogMessage
from tq_service.schema import (
    Admission,
    BatchUnit,
    FieldSpec,
    Layout,
    Release,
    check_name,
    check_passed_on,
    check_range,
    check_unique,
)
from tq_service.state.cells import CellTable, CustomMeta
from tq_service.state.groups import GroupTable, KeyIndex, UnitCount
from tq_service.state.ledger import TaskLedger, TaskSnapshot, task_columns
from tq_service.state.outstanding import Outstanding
from tq_service.state.plan import Condition, Indexes, differences, shown
from tq_service.state.policies import Policies
from tq_service.state.table import DROPPED, FAILED, HELD, LIVE, RowTable, Table, TableSnapshot, distinct

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSettings:
    """The settings of a partition. They cannot change after the partition has been created.

    Attributes:
        default_layout: layout of tensor fields whose layout is not declared in `fields`.
        fields: declared fields. The fields are sorted by name, so equal sets of fields compare equal.
        max_bytes: maximum total size of all cells in bytes. While the limit is exceeded, puts of new samples wait. None
            means no limit.
        admissions: limits on the outstanding work of tasks. The limits are sorted by task, so equal sets of limits
            compare equal.
        tasks: sorted names of the tasks that may consume the partition. An empty tuple permits all tasks.
        samples_per_round: number of samples that complete a round, even if the partition is not sealed. If None, there
            are no rounds.
        release: policy for releasing samples automatically, or None. If a release policy depends on tasks but does not
            name any, it waits for all `tasks`.

    Raises:
        InvalidArgumentError: a number is out of range, a field or task is repeated, or the default layout is not a
            tensor layout. This error is also raised if an admission or release names a task outside `tasks`. The same
            applies if a release does not specify which tasks to wait for.
    """

    expected_samples: int | None = None
    default_layout: Layout = Layout.AUTO
    fields: tuple[FieldSpec, ...] = ()
    max_bytes: int | None = None
    admissions: tuple[Admission, ...] = ()
    tasks: tuple[str, ...] = ()
    samples_per_round: int | None = None
    release: Release | None = None

    def __post_init__(self) -> None:
        for name, least in (("expected_samples", 0), ("samples_per_round", 1), ("max_bytes", 1)):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, least, hint=", or no value")
        if self.default_layout is Layout.OBJECT:
            raise InvalidArgumentError(
                "default_layout is 'object'; expected 'auto', 'dense' or 'jagged', because the default applies only to "
                "tensors. Declare object fields in fields.",
                field="default_layout",
            )
        check_unique("fields", [spec.name for spec in self.fields])
        object.__setattr__(self, "fields", tuple(sorted(self.fields, key=attrgetter("name"))))
        for spec in self.fields:
            if spec.layout is Layout.OBJECT and (spec.dtype or spec.row_shape):
                raise InvalidArgumentError(
                    f"field {spec.name!r} is declared as an object field, which has neither a dtype nor a row shape. "
                    f"Omit both.",
                    field="dtype" if spec.dtype else "row_shape",
                    metadata={"field_name": spec.name},
                )
        admissions = sorted(self.admissions, key=attrgetter("task_name"))
        check_unique("admissions", [admission.task_name for admission in admissions])
        if (bounded := [each.task_name for each in admissions if each.max_staleness is not None])[1:]:
            raise InvalidArgumentError(
                f"admissions limit the staleness of {len(bounded)} tasks ({', '.join(bounded)}); expected at most "
                f"one, because a sample has only one start_version",
                field="admissions",
            )
        object.__setattr__(self, "admissions", tuple(admissions))
        for name in self.tasks:
            check_name("tasks", name)
        check_unique("tasks", self.tasks)
        for name in [each.task_name for each in admissions if self.tasks and each.task_name not in self.tasks]:
            raise InvalidArgumentError(
                f"admissions names task {name!r}, which is not among tasks; {nearest(name, self.tasks)}",
                field="admissions",
            )
        object.__setattr__(self, "tasks", tuple(sorted(self.tasks)))
        if self.release is not None and self.release.when is not None:
            self._set_release(self.release)

    def _set_release(self, release: Release) -> None:
        """Store the release policy and check its tasks. A policy that names no tasks waits for all tasks."""
        release = release if release.tasks else replace(release, tasks=self.tasks)
        object.__setattr__(self, "release", release)
        if not release.tasks:
            raise InvalidArgumentError(
                f"release.when is {release.when!r}, but release names no tasks. Specify tasks in release, or declare "
                f"the partition's tasks",
                field="release",
            )
        for name in [name for name in release.tasks if self.tasks and name not in self.tasks]:
            raise InvalidArgumentError(
                f"release names task {name!r}, which is not among tasks; {nearest(name, self.tasks)}", field="release"
            )

    @property
    def known_tasks(self) -> Iterable[str]:
        """Names of all tasks in the settings. Known tasks exist from the start and therefore track every sample."""
        admitted = (admission.task_name for admission in self.admissions)
        return dict.fromkeys((*self.tasks, *admitted, *self.releasing_tasks))

    @property
    def releasing_tasks(self) -> Sequence[str]:
        """Tasks that must be done with a sample before it is released. Empty if releases do not depend on tasks."""
        return () if self.release is None else self.release.tasks

    @property
    def keeps_until_saved(self) -> bool:
        """Whether samples are kept until a trainer checkpoint covers their batch."""
        return self.release is not None and self.release.when == "saved"

    def describe_difference(self, other: PartitionSettings) -> str:
        """Describe the differences from `other` for an error message."""
        return ", ".join(f"{name} is {shown(own)}, got {shown(got)}" for name, own, got in differences(self, other))

    @property
    def bounded_admission(self) -> Admission | None:
        """The admission that sets `max_staleness`, or None if no admission does."""
        return next((each for each in self.admissions if each.max_staleness is not None), None)

    @property
    def is_bounded(self) -> bool:
        """Whether a limit can make puts of new samples wait."""
        return self.max_bytes is not None or bool(self.admissions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFacts:
    """Scalar values and specs of a partition. The partition's tables and tasks are not included.

    Attributes:
        insert_size_gcd: greatest common divisor of the numbers of samples added by each put.
        next_index: global index of the next new sample.
        sample_count: number of stored samples, for readers that do not load the tables.
        has_groups: whether any group or rollout has ever been named.
        meta_kinds: kind of each custom_meta column (see `CustomMeta.kinds`).
        fields: current specs of the fields.
        former_fields: last known specs of fields that no longer have any cells (see `CellTable.former_specs`).
        released_count: number of samples released because all releasing tasks had finished with them.
        expired_count: number of samples released because of their age.
    """

    partition_id: str
    incarnation: bytes
    settings: PartitionSettings
    sealed: bool = False
    insert_size_gcd: int = 0
    next_index: int = 0
    sample_count: int = 0
    has_groups: bool = False
    meta_kinds: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[FieldSpec, ...] = ()
    former_fields: tuple[FieldSpec, ...] = ()
    released_count: int = 0
    expired_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSnapshot:
    """A snapshot of a partition, which can be written to a file by another thread and restored later.

    A snapshot omits derived state, such as scan positions, key indexes, free slots, and the number of remaining rows of
    each claim.
    """

    facts: PartitionFacts
    tables: Mapping[str, TableSnapshot]
    tasks: Sequence[TaskSnapshot]


class Listeners(list[Callable[..., object]]):
    """An event's callbacks, in the order in which they were added."""

    def __call__(self, *what: Any) -> None:
        """Call each callback with the arguments of the event."""
        for notify in self:
            notify(*what)

    def discard(self, listener: Callable[..., object]) -> None:
        """Remove a callback if it is present."""
        if listener in self:
            self.remove(listener)


class Partition:
    """One incarnation of a partition.

    Attributes:
        on_change: callbacks for changes that may allow a waiting claim to proceed.
        on_consumed: callbacks for changes that reduce the number of samples left for any task.
        on_rows: callbacks for rows that were written or can be claimed again. The callbacks are called with the rows'
            global indexes while a change is being applied. If all rows are new, the indexes are a range.
        on_reset: callbacks for resets, after which a task can claim all rows again. The callbacks are called with the
            task's name while a change is being applied.
        policies: all policies of the service. Conditions compare values with the policies' published versions. `State`
            sets `policies`.
        all_partitions: all partitions of the service, for claims that share a lease across partitions. `State` sets
            `all_partitions`.
    """

    def __init__(self, partition_id: str, settings: PartitionSettings, incarnation: bytes = b"") -> None:
        self.partition_id = partition_id
        self.incarnation = incarnation or os.urandom(16)
        self.settings = settings
        self.sealed = settings.expected_samples == 0
        self.table = RowTable()
        self.state = self.table.state
        self.key_index = KeyIndex(self.table)
        self.key = self.key_index.column
        self.groups = GroupTable(self.table)
        self.meta = CustomMeta(self.table)
        self.cells = CellTable(self.table, settings.fields, settings.default_layout, groups=self.groups)
        self.tasks: dict[str, TaskLedger] = {}
        self.state_counts = [0, 0, 0, 0]  # number of rows in the table, by state code
        self._held_units = {
            each.unit: UnitCount(self.groups, each.unit)
            for each in settings.admissions
            if each.most_running and each.unit != "sample"
        }
        self.since = self.table.column("since", np.float64, 0.0)  # time when each row was put or became live
        self.released_count = self.expired_count = 0
        self.insert_size_gcd = 0  # greatest common divisor of the number of new rows in each put
        self.row_version = 0  # number of row writes so far; used by claims that wait for a number of rows
        self.state_version = 0  # number of other changes that may allow a waiting claim to proceed
        self.on_change = Listeners()
        self.on_consumed = Listeners()
        self.on_rows = Listeners()
        self.on_reset = Listeners()
        self.policies: Policies = {}
        self.all_partitions: Mapping[str, Partition] = {}
        for name in settings.known_tasks:
            self.open_task(name)

    @property
    def inserted_count(self) -> int:
        """Total number of samples that have been inserted."""
        return self.table.next_index

    def check_incarnation(self, incarnation: bytes) -> None:
        """Raise StaleIncarnationError unless `incarnation` is empty or matches the partition's current incarnation."""
        if incarnation and incarnation != self.incarnation:
            check_passed_on("incarnation", incarnation)
            raise StaleIncarnationError(
                f"partition {self.partition_id!r} was cleared and created again: got incarnation {incarnation.hex()}, "
                f"but the current incarnation is {self.incarnation.hex()}. Discard all metadata of the old incarnation",
                metadata={
                    "partition_id": self.partition_id,
                    "got": incarnation.hex(),
                    "expected": self.incarnation.hex(),
                },
            )

    def count_states(self, rows: slice | Indexes, by: int) -> None:
        """Add rows to the partition's and its groups' counts by state. If `by` is -1, subtract the rows instead."""
        states = self.state[rows]
        counts = np.bincount(states, minlength=len(self.state_counts)).tolist()
        self.state_counts = [known + by * count for known, count in zip(self.state_counts, counts, strict=True)]
        if counts[FAILED]:
            self.groups.count_failed(_in_state(rows, states, FAILED), by)
        if counts[HELD]:
            for held in self._held_units.values():
                held.add(_in_state(rows, states, HELD), by)

    def begin_age(self, rows: slice | Indexes, at_seconds: float) -> None:
        """If the partition releases samples by age, record `at_seconds` as the time from which the rows' ages count."""
        if self.settings.release is not None and self.settings.release.ttl_seconds is not None:
            self.since.write(rows, at_seconds)

    # Tasks

    def open_task(self, name: str) -> TaskLedger:
        """Create the ledger of a new task."""
        admission = next((each for each in self.settings.admissions if each.task_name == name), None)
        outstanding = None if admission is None else Outstanding(admission, self.groups)
        task = self.tasks[name] = TaskLedger(
            name, self.table, self.state, backlog=self.open_count, outstanding=outstanding
        )
        return task

    def forget_task(self, name: str) -> None:
        """Remove a task that has no records, along with its columns."""
        del self.tasks[name]
        for column in task_columns(name):
            self.table.remove_column(column)

    def check_task(self, name: str) -> None:
        """Raise TaskNotFoundError if the partition declares its tasks and `name` is not among them."""
        if self.settings.tasks and name not in self.settings.tasks:
            raise TaskNotFoundError(
                f"partition {self.partition_id!r} was not created for task {name!r}; "
                f"{nearest(name, self.settings.tasks)}",
                metadata={"partition_id": self.partition_id, "task_name": name},
            )

    def known_task(self, name: str) -> TaskLedger:
        """Return the ledger of a task.

        Raises:
            TaskNotFoundError: the task is not among the declared tasks, or has not made a request yet.
        """
        self.check_task(name)
        if name not in self.tasks:
            raise TaskNotFoundError(
                f"no task {name!r} has requested samples from partition {self.partition_id!r}; "
                f"{nearest(name, self.tasks)}",
                metadata={"partition_id": self.partition_id, "task_name": name},
            )
        return self.tasks[name]

    @property
    def version(self) -> tuple[int, int]:
        """Two counters. Each change that may allow a waiting claim to proceed increases at least one counter."""
        return self.state_version, self.row_version

    @property
    def mark(self) -> tuple[object, ...]:
        """A value that changes with the version or row layout. A checked write stays valid until the mark changes."""
        return *self.version, self.table.layout

    @property
    def expected_count(self) -> int | None:
        """Number of samples expected in all rounds started so far, or None if the partition has no rounds.

        If no round has started, the result is the size of the first round.
        """
        size = self.settings.samples_per_round
        return None if size is None else max(1, -(-self.inserted_count // size)) * size

    @property
    def is_whole(self) -> bool:
        """Whether the partition is sealed, or the last round to begin is complete."""
        return self.sealed or self.inserted_count == self.expected_count

    @property
    def may_end_finite(self) -> bool:
        """Whether `finite` claims may end now: at least one sample has been inserted, and no round is incomplete."""
        return self.inserted_count > 0 and (self.settings.samples_per_round is None or self.is_whole)

    @property
    def open_count(self) -> int:
        """Number of live or held samples."""
        return self.state_counts[LIVE] + self.state_counts[HELD]

    def held_count(self, unit: BatchUnit) -> int:
        """Return the number of held samples, or of groups or rollouts that contain a held sample.

        If no admission sets `most_running` for this unit, return the number of held samples.
        """
        return self._held_units[unit].count if unit in self._held_units else self.state_counts[HELD]

    # Reading

    def resolved(self, where: Sequence[Condition]) -> tuple[Condition, ...]:
        """Return the conditions with the currently published policy versions filled in."""
        return tuple(condition.resolved(self.policies) for condition in where)

    def is_leased(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that are leased to a worker of any task."""
        is_leased = np.zeros(positions.size, np.bool_)
        for task in self.tasks.values():
            if task.leased_count:
                is_leased |= task.claim[positions] < DROPPED
        return is_leased

    def in_use(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that are held, leased to a worker of any task, or in an untrained batch."""
        planned = [batch.rows for task in self.tasks.values() for batch in task.untrained()]
        in_use: NDArray[np.bool_] = (self.state[positions] == HELD) | self.is_leased(positions)
        return in_use | np.isin(self.table.index[positions], np.concatenate(planned)) if planned else in_use

    def in_use_count(self, task: TaskLedger, unit: BatchUnit) -> int:
        """Return an upper bound on how many of a task's outstanding units are in use (see `in_use`).

        Incomplete groups and rollouts also count as in use, as do delivered units that still occupy capacity.
        """
        count = self.held_count(unit) + sum(task.delivered_units) + task.done_units
        for each in self.tasks.values():
            planned = (batch for batch in each.untrained() if each is not task or batch.plan.is_reusing)
            count += each.leased_count + sum(batch.rows.size for batch in planned)
        if unit != "sample":
            slots = self.groups.slots_of_unit(unit)
            count += int(np.count_nonzero(~self.groups.is_complete(slots, None, no_more=self.sealed)))
        return count

    def is_done(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that all releasing tasks are done with (see `TaskLedger.is_done`)."""
        is_done = np.ones(positions.size, np.bool_)
        for name in self.settings.releasing_tasks:
            is_done &= self.tasks[name].is_done(positions)
        return is_done

    def may_release(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that can be released without affecting a worker or a batch.

        A row qualifies if it is neither held nor leased, and if none of its batches still needs to be trained or saved.
        """
        is_needed = self.is_leased(positions)
        is_needed |= self.state[positions] == HELD
        until_saved = self.settings.keeps_until_saved
        for name in self.settings.releasing_tasks:
            is_needed |= self.tasks[name].is_under_way(positions, until_saved=until_saved)
        return ~is_needed

    def positions_of(self, indexes: Indexes, *, may_repeat: bool = False) -> Indexes:
        """Return the positions of the samples with the given global indexes.

        Raises:
            SampleNotFoundError: a sample does not exist.
            InvalidArgumentError: a sample is listed twice, and `may_repeat` is not set.
        """
        positions = self.table.find(indexes)
        if bool((positions < 0).any()):
            missing = indexes[positions < 0]
            raise SampleNotFoundError(
                f"partition {self.partition_id!r} has no sample {int(missing[0])} ({missing.size} of {indexes.size} "
                f"are missing); {self.table.present_count} of its {self.inserted_count} inserted samples remain, and "
                f"the others were cleared",
                metadata={"partition_id": self.partition_id, "global_index": str(missing[0])},
            )
        if not may_repeat and distinct(positions, self.table.count).size != positions.size:
            raise InvalidArgumentError("a sample is listed twice. List each sample only once.", field="global_indexes")
        return positions

    # Snapshots

    @property
    def tables(self) -> dict[str, Table]:
        """Tables of the partition, by name."""
        return {
            "rows": self.table,
            "groups": self.groups.slots,
            "puts": self.cells.puts,
            "extents": self.cells.extents,
        }

    @property
    def facts(self) -> PartitionFacts:
        """A copy of the partition's scalar values and specs."""
        return PartitionFacts(
            partition_id=self.partition_id,
            incarnation=self.incarnation,
            settings=self.settings,
            sealed=self.sealed,
            insert_size_gcd=self.insert_size_gcd,
            next_index=self.table.next_index,
            sample_count=self.table.present_count,
            has_groups=self.groups.in_use,
            meta_kinds=self.meta.kinds,
            fields=tuple(field.spec for field in self.cells.fields.values()),
            former_fields=tuple(self.cells.former_specs.values()),
            released_count=self.released_count,
            expired_count=self.expired_count,
        )

    def snapshot(self) -> PartitionSnapshot:
        """Return a snapshot of the partition. The time required does not depend on the number of samples."""
        return PartitionSnapshot(
            facts=self.facts,
            tables={name: table.snapshot() for name, table in self.tables.items()},
            tasks=[task.snapshot() for task in self.tasks.values()],
        )

    @classmethod
    def restore(cls, snapshot: PartitionSnapshot) -> Partition:
        """Create a partition from a snapshot. The snapshot cannot be used again.

        Raises:
            NewerVersionError: the snapshot contains a table or column that this version does not support.
        """
        facts = snapshot.facts
        partition = cls(facts.partition_id, facts.settings, facts.incarnation)
        partition.sealed = facts.sealed
        partition.insert_size_gcd = facts.insert_size_gcd
        partition.released_count, partition.expired_count = facts.released_count, facts.expired_count
        partition.meta.declare(facts.meta_kinds)
        for spec in facts.fields:
            partition.cells.declare(spec)
        partition.cells.former_specs.update((spec.name, spec) for spec in facts.former_fields)
        for task in snapshot.tasks:
            if task.facts.name not in partition.tasks:
                partition.open_task(task.facts.name)
        partition._restore_tables(snapshot.tables)
        partition.table.rebuild(facts.next_index)
        partition.groups.rebuild(in_use=facts.has_groups)
        partition.cells.rebuild()
        present = partition.table.present_positions()
        states = partition.state[present]
        partition.state_counts = np.bincount(states, minlength=4).tolist()
        for held in partition._held_units.values():
            held.add(present[states == HELD], 1)
        partition.key_index.rebuild()
        for task in snapshot.tasks:
            partition.tasks[task.facts.name].restore(task)
        return partition

    def _restore_tables(self, snapshots: Mapping[str, TableSnapshot]) -> None:
        tables = self.tables
        for unknown in snapshots.keys() - tables.keys():
            raise _newer(self.partition_id, f"the snapshot contains the unknown table {unknown!r}")
        for name, table in tables.items():
            try:
                missing = table.restore(snapshots.get(name, TableSnapshot(size=0, columns={})))
            except NewerVersionError as error:
                raise _newer(self.partition_id, f"table {name!r} differs ({error})") from error
            for column in missing:
                _log.warning(
                    LogMessage(
                        "a column is missing from the snapshot; using its default value",
                        partition=self.partition_id,
                        table=name,
                        column=column,
                        default=repr(table.columns[column].fill),
                    )
                )

    def free(self) -> Iterator[None]:
        """Free the names and objects of a removed partition in steps. Existing snapshots remain readable."""
        for names in (self.key_index, self.groups.slot_of, self.groups.rollout_slot_of):
            yield from names.free()
        for table in self.tables.values():
            yield from table.free_objects()

    # Change notices

    def notify_rows(self, indexes: Indexes | range) -> None:
        """Record that rows were written or can be claimed again, and call the `on_rows` callbacks."""
        self.row_version += len(indexes)
        self.on_rows(indexes)

    def forget_listeners(self) -> None:
        """Remove all callbacks, which would otherwise keep the partition in memory until a full garbage collection."""
        for listeners in (self.on_change, self.on_consumed, self.on_rows, self.on_reset):
            listeners.clear()


def _in_state(rows: slice | Indexes, states: NDArray[np.uint8], code: int) -> Indexes:
    """Return the positions of the rows whose state in `states` is `code`."""
    positions: Indexes = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    found: Indexes = positions[states == code]
    return found


def _newer(partition_id: str, what: str) -> NewerVersionError:
    return NewerVersionError(
        f"partition {partition_id!r} was written by a newer version: {what}. Install that version, or restore a "
        f"checkpoint written by this version into an empty data directory."
    )
