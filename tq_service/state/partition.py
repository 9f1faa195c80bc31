"""A partition: rows by fields with states, keys, groups and custom_meta, and the tasks that consume it.

The changes of a partition are in `machine/`; here is its state, and how it is read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    check_name,
    check_passed_on,
    check_range,
    check_unique,
)
from tq_service.state.cells import CellTable, CustomMeta
from tq_service.state.groups import GroupCount, GroupTable, KeyIndex
from tq_service.state.ledger import TaskLedger, TaskSnapshot, task_columns
from tq_service.state.outstanding import Outstanding
from tq_service.state.plan import Condition, Indexes, differences, shown
from tq_service.state.policies import Policies
from tq_service.state.table import DROPPED, FAILED, HELD, LIVE, RowTable, Table, TableSnapshot, distinct

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSettings:
    """What CreatePartition fixes.

    Attributes:
        default_layout: of tensor fields that have none in `fields`.
        fields: fields that are declared, in the order of their names, so that the same ones compare equal.
        max_bytes: most bytes that its cells may take before new samples wait; None: no bound.
        admissions: how much work may be outstanding for its tasks, in the order of these, so that the same ones
            compare equal.
        tasks: all that may consume it, in order; empty: any.
        samples_per_round: of how many samples a round is that is whole without a seal; None: there are no rounds.

    Raises:
        InvalidArgumentError: a number is out of its range, a field or a task comes twice, a limit is of another task
            than those, or the default layout is none of tensors.
    """

    expected_samples: int | None = None
    default_layout: Layout = Layout.AUTO
    fields: tuple[FieldSpec, ...] = ()
    max_bytes: int | None = None
    admissions: tuple[Admission, ...] = ()
    tasks: tuple[str, ...] = ()
    samples_per_round: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("expected_samples", 0), ("samples_per_round", 1), ("max_bytes", 1)):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, least, hint=", or leave it out")
        if self.default_layout is Layout.OBJECT:
            raise InvalidArgumentError(
                "default_layout is 'object', which holds for no tensor; give 'auto', 'dense' or 'jagged', and declare "
                "object fields in fields",
                field="default_layout",
            )
        check_unique("fields", [spec.name for spec in self.fields])
        object.__setattr__(self, "fields", tuple(sorted(self.fields, key=attrgetter("name"))))
        for spec in self.fields:
            if spec.layout is Layout.OBJECT and (spec.dtype or spec.row_shape):
                raise InvalidArgumentError(
                    f"field {spec.name!r} is declared with objects, which have neither dtype nor row shape; leave them "
                    f"out",
                    field="dtype" if spec.dtype else "row_shape",
                    metadata={"field_name": spec.name},
                )
        admissions = sorted(self.admissions, key=attrgetter("task_name"))
        check_unique("admissions", [admission.task_name for admission in admissions])
        if (bounded := [each.task_name for each in admissions if each.max_staleness is not None])[1:]:
            raise InvalidArgumentError(
                f"admissions bound the staleness of {len(bounded)} tasks ({', '.join(bounded)}), expected one at most: "
                f"samples have one start_version",
                field="admissions",
            )
        object.__setattr__(self, "admissions", tuple(admissions))
        for name in self.tasks:
            check_name("tasks", name)
        check_unique("tasks", self.tasks)
        for name in [each.task_name for each in admissions if self.tasks and each.task_name not in self.tasks]:
            raise InvalidArgumentError(
                f"admissions has task {name!r}, which is not one of tasks; {nearest(name, self.tasks)}",
                field="admissions",
            )
        object.__setattr__(self, "tasks", tuple(sorted(self.tasks)))

    def describe_difference(self, other: PartitionSettings) -> str:
        """Return what differs, as messages have it."""
        return ", ".join(f"{name} is {shown(own)}, got {shown(got)}" for name, own, got in differences(self, other))

    @property
    def bounded_admission(self) -> Admission | None:
        """The admission with a `max_staleness`, None where there is none."""
        return next((each for each in self.admissions if each.max_staleness is not None), None)

    @property
    def is_bounded(self) -> bool:
        """Whether new samples may have to wait."""
        return self.max_bytes is not None or bool(self.admissions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFacts:
    """What is known of a partition besides its tables and tasks, in plain values.

    Attributes:
        insert_size_gcd: greatest common divisor of the sizes of all puts of new samples.
        next_index: global index of the next sample.
        sample_count: number of samples, for callers that do not need the tables.
        has_groups: whether groups were ever named.
        meta_kinds: for each custom_meta column the kinds of its values, see `CustomMeta.kinds`.
        fields: what they are now.
        former_fields: what fields were that are as declared again, or not there; see `CellTable.former_specs`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSnapshot:
    """A partition at one moment: read by another thread, written to a file, and restored from there.

    What follows from other things in it is left out: scan positions, key indexes, free slots, what is left of claims.
    """

    facts: PartitionFacts
    tables: Mapping[str, TableSnapshot]
    tasks: Sequence[TaskSnapshot]


class Listeners(list[Callable[..., object]]):
    """Callbacks for when something has happened, called in the order in which they were added."""

    def __call__(self, *what: Any) -> None:
        """Call all of them."""
        for notify in self:
            notify(*what)

    def discard(self, listener: Callable[..., object]) -> None:
        """Call one no more, if it is there."""
        if listener in self:
            self.remove(listener)


class Partition:
    """One incarnation of a named set of samples.

    Attributes:
        on_change: called once something has changed that may matter to waiting claims.
        on_consumed: called once a task has fewer samples left to consume.
        on_rows: called, while a change is applied, with the global indexes of rows that were written, or reopened, as a
            range where all of them are new.
        on_reset: called, while a change is applied, with the name of a task that starts from all rows again.
        policies: those of the service, for conditions that compare with a published version; set by its owner.
        all_partitions: those of the service, for claims that share a lease with one of another; set by its owner.
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
        self.cells = CellTable(self.table, settings.fields, settings.default_layout)
        self.tasks: dict[str, TaskLedger] = {}
        self.state_counts = [0, 0, 0, 0]  # of rows in the table, by state code
        counts_groups = any(each.most_running and each.unit == "group" for each in settings.admissions)
        self._held_groups = GroupCount(self.groups) if counts_groups else None
        self.insert_size_gcd = 0  # greatest common divisor of the sizes of all puts of new rows
        self.row_version = 0  # rows written so far, for claims that wait for a number of them
        self.state_version = 0  # other changes that may matter to waiting claims
        self.on_change = Listeners()
        self.on_consumed = Listeners()
        self.on_rows = Listeners()
        self.on_reset = Listeners()
        self.policies: Policies = {}
        self.all_partitions: Mapping[str, Partition] = {}
        # A task with an admission is known from the start, so that its count begins with the first sample.
        for name in dict.fromkeys((*settings.tasks, *(each.task_name for each in settings.admissions))):
            self.open_task(name)

    @property
    def inserted_count(self) -> int:
        """Samples ever inserted."""
        return self.table.next_index

    def check_incarnation(self, incarnation: bytes) -> None:
        """Refuse a caller that means an earlier incarnation of the name; empty means whichever."""
        if incarnation and incarnation != self.incarnation:
            check_passed_on("incarnation", incarnation)
            raise StaleIncarnationError(
                f"partition {self.partition_id!r} was cleared and created again: got incarnation {incarnation.hex()}, "
                f"it is {self.incarnation.hex()} now; drop what you hold of the old one",
                metadata={
                    "partition_id": self.partition_id,
                    "got": incarnation.hex(),
                    "expected": self.incarnation.hex(),
                },
            )

    def count_states(self, rows: slice | Indexes, by: int) -> None:
        """Count rows in, or out, of the partition and of their groups by the states they have now."""
        states = self.state[rows]
        counts = np.bincount(states, minlength=len(self.state_counts)).tolist()
        self.state_counts = [known + by * count for known, count in zip(self.state_counts, counts, strict=True)]
        if counts[FAILED]:
            slots = self.groups.of_rows[rows][states == FAILED]
            self.groups.failed.add(slots[slots >= 0], by)
        if counts[HELD] and self._held_groups is not None:
            positions = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            self._held_groups.add(positions[states == HELD], by)

    # Tasks

    def open_task(self, name: str) -> TaskLedger:
        """Open the ledger of a task that has none."""
        admission = next((each for each in self.settings.admissions if each.task_name == name), None)
        outstanding = None if admission is None else Outstanding(admission, self.groups)
        task = self.tasks[name] = TaskLedger(
            name, self.table, self.state, backlog=self.open_count, outstanding=outstanding
        )
        return task

    def forget_task(self, name: str) -> None:
        """Have no task of this name any more; nothing may be on record of it."""
        del self.tasks[name]
        for column in task_columns(name):
            self.table.remove_column(column)

    def check_task(self, name: str) -> None:
        """Refuse a task that is not one of those that were declared."""
        if self.settings.tasks and name not in self.settings.tasks:
            raise TaskNotFoundError(
                f"partition {self.partition_id!r} was created for other tasks than {name!r}; "
                f"{nearest(name, self.settings.tasks)}",
                metadata={"partition_id": self.partition_id, "task_name": name},
            )

    def known_task(self, name: str) -> TaskLedger:
        """Return a task that was declared, or has asked before."""
        self.check_task(name)
        if name not in self.tasks:
            raise TaskNotFoundError(
                f"no task {name!r} has asked for samples of partition {self.partition_id!r}; "
                f"{nearest(name, self.tasks)}",
                metadata={"partition_id": self.partition_id, "task_name": name},
            )
        return self.tasks[name]

    @property
    def version(self) -> tuple[int, int]:
        """Counts that differ whenever something has changed that may matter to waiting claims."""
        return self.state_version, self.row_version

    @property
    def mark(self) -> tuple[object, ...]:
        """The version, and where rows are: as long as it stays, so does what was found out of a write."""
        return *self.version, self.table.layout

    @property
    def expected_count(self) -> int | None:
        """Samples in all rounds that have begun, the first one included; None where there are no rounds."""
        size = self.settings.samples_per_round
        return None if size is None else max(1, -(-self.inserted_count // size)) * size

    @property
    def is_whole(self) -> bool:
        """Whether no new samples will come, or none before the next round."""
        return self.sealed or self.inserted_count == self.expected_count

    @property
    def may_end_finite(self) -> bool:
        """Whether claims that ask with `finite` may be at their end: not before a first sample, nor within a round."""
        return self.inserted_count > 0 and (self.settings.samples_per_round is None or self.is_whole)

    @property
    def open_count(self) -> int:
        """Samples that are live or held."""
        return self.state_counts[LIVE] + self.state_counts[HELD]

    def held_count(self, unit: BatchUnit) -> int:
        """Return how many samples are held, or how many groups with such a one, as an admission counts units.

        Groups are counted where an admission has `most_running` for them.
        """
        if unit == "group" and self._held_groups is not None:
            return self._held_groups.count
        return self.state_counts[HELD]

    # Reading

    def resolved(self, where: Sequence[Condition]) -> tuple[Condition, ...]:
        """Return conditions that compare with the versions that are published now."""
        return tuple(condition.resolved(self.policies) for condition in where)

    def is_leased(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return which of some rows are leased to a worker of any task."""
        is_leased = np.zeros(positions.size, np.bool_)
        for task in self.tasks.values():
            if task.leased_count:
                is_leased |= task.claim[positions] < DROPPED
        return is_leased

    def positions_of(self, indexes: Indexes, *, may_repeat: bool = False) -> Indexes:
        """Return the positions of samples that must be there; each is named once, unless it `may_repeat`."""
        positions = self.table.find(indexes)
        if bool((positions < 0).any()):
            missing = indexes[positions < 0]
            raise SampleNotFoundError(
                f"partition {self.partition_id!r} has no sample {int(missing[0])} ({missing.size} of {indexes.size} "
                f"are missing); it has {self.table.present_count} of {self.inserted_count} inserted, "
                f"the others were cleared",
                metadata={"partition_id": self.partition_id, "global_index": str(missing[0])},
            )
        if not may_repeat and distinct(positions, self.table.count).size != positions.size:
            raise InvalidArgumentError("a sample is named twice; name each once", field="global_indexes")
        return positions

    # Snapshots

    @property
    def tables(self) -> dict[str, Table]:
        """All tables of the partition by name."""
        return {
            "rows": self.table,
            "groups": self.groups.slots,
            "puts": self.cells.puts,
            "extents": self.cells.extents,
        }

    @property
    def facts(self) -> PartitionFacts:
        """What is known of the partition besides its tables and tasks."""
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
        )

    def snapshot(self) -> PartitionSnapshot:
        """Return the partition as it is now; it costs the same however many samples there are."""
        return PartitionSnapshot(
            facts=self.facts,
            tables={name: table.snapshot() for name, table in self.tables.items()},
            tasks=[task.snapshot() for task in self.tasks.values()],
        )

    @classmethod
    def restore(cls, snapshot: PartitionSnapshot) -> Partition:
        """Return the partition of a snapshot, which cannot be used again.

        Raises:
            NewerVersionError: the snapshot has a table or a column that this version does not have.
        """
        facts = snapshot.facts
        partition = cls(facts.partition_id, facts.settings, facts.incarnation)
        partition.sealed = facts.sealed
        partition.insert_size_gcd = facts.insert_size_gcd
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
        if partition._held_groups is not None:
            partition._held_groups.add(present[states == HELD], 1)
        partition.key_index.rebuild()
        for task in snapshot.tasks:
            partition.tasks[task.facts.name].restore(task)
        return partition

    def _restore_tables(self, snapshots: Mapping[str, TableSnapshot]) -> None:
        tables = self.tables
        for unknown in snapshots.keys() - tables.keys():
            raise _newer(self.partition_id, f"it has the unknown table {unknown!r}")
        for name, table in tables.items():
            try:
                missing = table.restore(snapshots.get(name, TableSnapshot(size=0, columns={})))
            except NewerVersionError as error:
                raise _newer(self.partition_id, f"its table {name!r} has {error}") from error
            for column in missing:
                _log.warning(
                    LogMessage(
                        "a snapshot has no such column, all its rows get the default",
                        partition=self.partition_id,
                        table=name,
                        column=column,
                        default=repr(table.columns[column].fill),
                    )
                )

    def free(self) -> Iterator[None]:
        """Have no names and no objects any more, in steps; for a partition that was removed, but for its snapshots."""
        for names in (self.key_index, self.groups.slot_of):
            yield from names.free()
        for table in self.tables.values():
            yield from table.free_objects()

    # Change notices

    def notify_rows(self, indexes: Indexes | range) -> None:
        """Count rows that were written, or are claimable again, and call the listeners."""
        self.row_version += len(indexes)
        self.on_rows(indexes)

    def forget_listeners(self) -> None:
        """Drop the listeners, lest they and the partition reference each other until a full garbage collection."""
        for listeners in (self.on_change, self.on_consumed, self.on_rows, self.on_reset):
            listeners.clear()


def _newer(partition_id: str, what: str) -> NewerVersionError:
    return NewerVersionError(
        f"partition {partition_id!r} was written by a newer version: {what}; install that version, or restore a "
        f"checkpoint of this one into an empty data directory"
    )
