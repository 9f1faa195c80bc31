"""A partition: rows by fields with states, keys, groups and custom_meta, and the tasks that consume it.

Every change of its state is one synchronous method here: checked whole and encoded for the journal (`tell`) before
anything is written, and done on the event loop between awaits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import gcd

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.admission.lowest_version import LowestVersion
from tq_service.domain.changes import (
    UNRECORDED,
    BatchPlanned,
    Change,
    ConsumptionReset,
    EndReached,
    GroupsClosed,
    MetaSet,
    PartitionSealed,
    QueueClaimed,
    SamplesCleared,
    SamplesWritten,
    TaskSeen,
    Tell,
)
from tq_service.domain.claims.end import End
from tq_service.domain.claims.ledger import QueueClaim, TaskLedger, TaskSnapshot
from tq_service.domain.claims.request import BatchSpec, LeaseTerms
from tq_service.domain.plan import Indexes, Plan, RankPlan
from tq_service.domain.resolve import Target, check_write, of_rows, resolve_target
from tq_service.domain.states import CLEARED, FAILED, HELD, LIVE, STATE_CODES
from tq_service.domain.tables.cells import CellTable, FreedCells
from tq_service.domain.tables.groups import GroupTable
from tq_service.domain.tables.meta import CustomMeta
from tq_service.domain.tables.names import Names
from tq_service.domain.tables.table import RowTable, Table, TableSnapshot, distinct, forget_names
from tq_service.domain.writes import PartitionSettings, SampleWrite, Written
from tq_service.errors import (
    InvalidArgumentError,
    NewerVersionError,
    SampleNotFoundError,
    StaleIncarnationError,
    TaskNotFoundError,
    nearest,
)
from tq_service.schema import FieldSpec, MetaColumn, SampleState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFacts:
    """What is known of a partition besides its tables and tasks, in plain values.

    Attributes:
        insert_size_gcd: greatest common divisor of the sizes of all puts of new samples.
        next_index: global index of the next sample.
        sample_count: number of samples, for who has no need of the tables.
        has_groups: whether groups were ever named.
        meta_kinds: for each custom_meta column the kind of its values, see `CustomMeta.kinds`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSnapshot:
    """A partition at one moment: read by another thread, written to a file, and restored from there.

    What follows from other things in it is left out: scan positions, key indexes, free slots, what is left of claims.
    """

    facts: PartitionFacts
    tables: Mapping[str, TableSnapshot]
    tasks: Sequence[TaskSnapshot]


class Partition:
    """One life of a named set of samples."""

    def __init__(self, partition_id: str, settings: PartitionSettings, incarnation: bytes = b"") -> None:
        self.partition_id = partition_id
        self.incarnation = incarnation or os.urandom(16)
        self.settings = settings
        self.sealed = settings.expected_samples == 0
        self.table = RowTable()
        self.state = self.table.column("state", np.uint8, CLEARED)
        self.key = self.table.column("key", np.object_, None)
        self.key_index: dict[str, int] = {}
        self.groups = GroupTable(self.table)
        self.meta = CustomMeta(self.table)
        self.cells = CellTable(self.table, settings.default_layout)
        self.tasks: dict[str, TaskLedger] = {}
        self.state_counts = [0, 0, 0, 0]  # of rows in the table, by state code
        self.insert_size_gcd = 0  # greatest common divisor of the sizes of all puts of new rows
        self.row_version = 0  # rows written so far, for those who wait for a number of them
        self.state_version = 0  # other changes that may matter to those who wait
        self.on_change: list[Callable[[], None]] = []
        self.on_consumed: list[Callable[[], None]] = []  # called where a task has fewer samples left to consume
        self.lowest_versions = {
            limit.task_name: LowestVersion(limit.task_name, limit.version_column)
            for limit in settings.run_ahead
            if limit.max_versions is not None
        }
        self.tell: Tell | None = None
        for spec in settings.fields:
            self.cells.declare(spec)

    @property
    def inserted_count(self) -> int:
        """Samples ever inserted."""
        return self.table.next_index

    def check_incarnation(self, incarnation: bytes) -> None:
        """Refuse a caller that means an earlier life of the name; empty means whichever."""
        if incarnation and incarnation != self.incarnation:
            raise StaleIncarnationError(
                f"partition {self.partition_id!r} was cleared and made anew: got incarnation {incarnation.hex()}, it "
                f"is {self.incarnation.hex()} now; drop what you hold of the old one",
                metadata={"got": incarnation.hex(), "expected": self.incarnation.hex()},
            )

    def recording(self, change: Change) -> AbstractContextManager[object]:
        """Encode a change; return what it is to be made in, which writes it down (see `Tell`)."""
        return UNRECORDED if self.tell is None else self.tell(change)

    # Writing

    def write(self, write: SampleWrite) -> Written:
        """Add samples or write to existing ones, in one step or not at all."""
        target = resolve_target(self, write)
        specs = check_write(self, write, target)
        with self.recording(SamplesWritten(partition_id=self.partition_id, write=write)):
            return self._write(write, target, specs)

    def _write(self, write: SampleWrite, target: Target, specs: Sequence[FieldSpec]) -> Written:
        new_positions = self._add_rows(write, target)
        positions = np.arange(new_positions.start, new_positions.stop)
        are_new = positions.size == write.row_count
        if not are_new:
            target.positions[target.is_new] = positions
            positions = target.positions
        freed = self._write_cells(write, specs, positions, are_new=are_new)
        self.meta.write(write.meta, positions)
        if write.state is not None:
            freed += self._set_state(STATE_CODES[write.state], positions[~target.is_new])
        indexes = self.table.index.data[positions] if not are_new else self.table.index.data[new_positions].copy()
        if self.settings.expected_samples is not None and self.inserted_count >= self.settings.expected_samples:
            self._seal()
        self._touched(indexes)
        return Written(global_indexes=indexes, specs=tuple(specs), freed=freed)

    def _add_rows(self, write: SampleWrite, target: Target) -> slice:
        count = int(np.count_nonzero(target.is_new))
        code = STATE_CODES[write.state or SampleState.LIVE]
        added = self.table.append(count)
        if count == 0:
            return added
        self.state.write(added, code)
        self.state_counts[code] += count
        self.insert_size_gcd = gcd(self.insert_size_gcd, count)
        if write.keys is not None:
            names = of_rows(write.keys, target.is_new)
            self.key.write(added, names)
            self._add_keys(names, write.names, self.table.next_index - count)
        if (groups := write.group_names()) is not None:
            groups = groups if count == write.row_count else groups.of_samples(target.is_new)
            positions = np.arange(added.start, added.stop)
            self.groups.add(groups, write.group_size, positions, held=code == HELD, failed=code == FAILED)
        if code != FAILED:
            for task in self.tasks.values():
                task.on_rows_added(count)
        return added

    def _add_keys(self, keys: Sequence[str], known: Names | None, first_index: int) -> None:
        if known is None or len(known.index_of) != len(keys) or known.first_index != first_index:
            self.key_index.update(zip(keys, range(first_index, first_index + len(keys)), strict=True))
        elif len(self.key_index) < len(keys):  # the larger one takes in the smaller
            known.index_of.update(self.key_index)
            self.key_index = known.index_of
        else:
            self.key_index.update(known.index_of)

    def _write_cells(self, write: SampleWrite, specs: Sequence[FieldSpec], positions: Indexes, *, are_new: bool
                     ) -> list[FreedCells]:  # fmt: skip
        if write.put is None:
            return []
        if write.state is SampleState.FAILED:  # the bytes of failed samples are not kept
            return [FreedCells(put=write.put)]
        size = sum(column.value_bytes for column in write.columns)
        if are_new:
            rows = np.arange(positions.size)
            return self.cells.write(write.put, write.columns, specs, positions, rows, value_bytes=size, are_new=True)
        kept = self.state.data[positions] != FAILED
        if not kept.any():
            return [FreedCells(put=write.put)]
        rows = np.flatnonzero(kept)
        size = size * rows.size // positions.size
        freed = self.cells.write(
            write.put, write.columns, specs, positions[kept], rows, value_bytes=size, are_new=False
        )
        if rows.size < positions.size:
            names = tuple(column.spec.name for column in write.columns)
            freed.append(FreedCells(put=write.put, field_names=names, rows=np.flatnonzero(~kept)))
        return freed

    def _set_state(self, code: int, positions: Indexes) -> list[FreedCells]:
        changed = positions[self.state.data[positions] != code]
        if changed.size == 0:
            return []
        freed = []
        was_held = changed[self.state.data[changed] == HELD]
        self.groups.count(self.groups.held, was_held, -1)
        if code == HELD:
            self.groups.count(self.groups.held, changed, 1)
        if code == FAILED:
            freed = self.cells.forget(changed, self.cells.fields.values())
            self.groups.count(self.groups.failed, changed, 1)
            for task in self.tasks.values():
                task.on_rows_closed(changed)
        self._count_states(changed, -1)
        self.state.write(changed, code)
        self._count_states(changed, 1)
        self.state_version += 1
        return freed

    def _count_states(self, positions: Indexes, by: int) -> None:
        for code, count in enumerate(np.bincount(self.state.data[positions], minlength=4).tolist()):
            self.state_counts[code] += by * count

    def set_meta(self, indexes: Indexes, columns: Sequence[MetaColumn]) -> None:
        """Write custom_meta of existing samples."""
        positions = self.positions_of(indexes)
        self.meta.check(columns, positions.size)
        with self.recording(MetaSet(partition_id=self.partition_id, global_indexes=indexes, columns=columns)):
            self.meta.write(columns, positions)
            self.state_version += 1
            self._touched(indexes)

    def seal(self) -> None:
        """Say that no new samples come."""
        with self.recording(PartitionSealed(partition_id=self.partition_id)):
            self._seal()
            self.changed()

    def _seal(self) -> None:
        if not self.sealed:
            self.sealed = True
            self.state_version += 1

    def close_groups(self, names: Sequence[str]) -> None:
        """Say that no further members of groups come."""
        with self.recording(GroupsClosed(partition_id=self.partition_id, names=names)):
            self.groups.close(names)
            self.state_version += 1
            self.changed()

    def clear(self, indexes: Indexes) -> tuple[int, list[FreedCells]]:
        """Remove samples; return how many were there, and their cells."""
        positions = self.table.find(indexes)
        positions = distinct(positions[positions >= 0], self.table.count)
        if positions.size == 0:
            return 0, []
        with self.recording(SamplesCleared(partition_id=self.partition_id, global_indexes=indexes)):
            return positions.size, self._clear(positions)

    def _clear(self, positions: Indexes) -> list[FreedCells]:
        freed = self.cells.forget(positions, self.cells.fields.values())
        states = self.state.data[positions]
        still_open = positions[(states == LIVE) | (states == HELD)]
        for task in self.tasks.values():
            task.on_rows_closed(still_open)
            task.on_rows_cleared(positions)
        if positions.size == self.table.present_count:
            self.key_index.clear()
        elif self.key_index:
            keys = self.key.data[positions]
            forget_names(self.key_index, keys[keys != None].tolist())  # noqa: E711  (of each)
        self._forget_members(positions, states)
        self._count_states(positions, -1)
        self.table.remove(positions)
        self.state_version += 1
        self.changed()
        return freed

    def _forget_members(self, positions: Indexes, states: NDArray[np.uint8]) -> None:
        groups = self.groups
        if not groups.in_use:
            return
        groups.count(groups.held, positions[states == HELD], -1)
        groups.count(groups.failed, positions[states == FAILED], -1)
        groups.count(groups.cleared, positions, 1)
        groups.forget_empty(groups.of_rows[positions])

    # Tasks

    def task(self, name: str) -> TaskLedger:
        """Return a task, made on its first use."""
        task = self.tasks.get(name)
        if task is None:
            with self.recording(TaskSeen(partition_id=self.partition_id, task_name=name)):
                task = self.tasks[name] = TaskLedger(name, self.table, self.state, backlog=self.open_count)
        return task

    def known_task(self, name: str) -> TaskLedger:
        """Return a task that has asked before."""
        if name not in self.tasks:
            raise TaskNotFoundError(
                f"no task {name!r} has asked for samples of partition {self.partition_id!r}; "
                f"{nearest(name, self.tasks)}"
            )
        return self.tasks[name]

    @property
    def version(self) -> tuple[int, int]:
        """Counts that differ whenever something has changed that may matter to those who wait."""
        return self.state_version, self.row_version

    @property
    def open_count(self) -> int:
        """Samples that are live or held."""
        return self.state_counts[LIVE] + self.state_counts[HELD]

    def record_batch(self, task: TaskLedger, batch_spec: BatchSpec, plan: Plan, positions: Indexes) -> None:
        """Record the plan of a task's next batch_index and mark its rows at `positions` consumed."""
        change = BatchPlanned(partition_id=self.partition_id, task_name=task.name, batch_spec=batch_spec, plan=plan)
        with self.recording(change):
            task.claim_batch(batch_spec, plan, positions)
            self._consumed()

    def record_end(self, task: TaskLedger, dp_size: int, end: End) -> None:
        """Record that no batch follows, for all ranks and batch indexes from the next on."""
        change = EndReached(partition_id=self.partition_id, task_name=task.name, dp_size=dp_size, end=end)
        with self.recording(change):
            task.reach_end(dp_size, end)

    def record_queue_claim(
        self, task: TaskLedger, request_id: bytes, part: RankPlan, positions: Indexes, terms: LeaseTerms | None = None
    ) -> QueueClaim:
        """Record what a queue worker gets, leased where `terms` are given."""
        change = QueueClaimed(
            partition_id=self.partition_id,
            task_name=task.name,
            request_id=request_id,
            part=part,
            lease_seconds=None if terms is None else terms.seconds,
            max_deliveries=None if terms is None else terms.max_deliveries,
            group_block_size=None if terms is None else terms.group_block_size,
        )
        with self.recording(change):
            claim = task.claim_samples(request_id, part, positions, terms)
            self._consumed()
        return claim

    def on_reopened(self, positions: Indexes) -> int:
        """Notify those who wait of rows that a task has released; return how many are live."""
        if positions.size:
            self.state_version += 1
            self._touched(self.table.index.data[positions])
        return int(np.count_nonzero(self.state.data[positions] == LIVE))

    def reset(self, task: TaskLedger, *, keep_consumed: bool) -> int:
        """Start the next epoch of a task and return it."""
        change = ConsumptionReset(partition_id=self.partition_id, task_name=task.name, keep_consumed=keep_consumed)
        with self.recording(change):
            reopened = task.reset(keep_consumed=keep_consumed, open_count=self.open_count)
            if keep_consumed:
                self.on_reopened(reopened)
            elif (lowest := self.lowest_versions.get(task.name)) is not None:
                lowest.forget()
            self.state_version += 1
            self.changed()
        return task.epoch

    # Reading

    def positions_of(self, indexes: Indexes) -> Indexes:
        """Return the positions of samples that must be there, each named once."""
        positions = self.table.find(indexes)
        if bool((positions < 0).any()):
            missing = indexes[positions < 0]
            raise SampleNotFoundError(
                f"partition {self.partition_id!r} has no sample {int(missing[0])} ({missing.size} of {indexes.size} "
                f"are missing); it has {self.table.present_count} of {self.inserted_count} inserted, "
                f"the others were cleared"
            )
        if distinct(positions, self.table.count).size != positions.size:
            raise InvalidArgumentError("a sample is named twice; name each once", field="global_indexes")
        return positions

    def block_counts(self, blocks: Indexes, block_size: int) -> Indexes:
        """Return for blocks of consecutive indexes how many of their rows are live or held."""
        indexes = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
        positions = self.table.find(indexes)
        states = np.where(positions >= 0, self.state.data[positions], CLEARED)
        is_open = (states == LIVE) | (states == HELD)
        counts: Indexes = is_open.reshape(blocks.size, block_size).sum(axis=1)
        return counts

    def produced_mask(self, names: Sequence[str], positions: Indexes) -> NDArray[np.bool_]:
        """Return which rows have all of some known fields."""
        mask = np.ones(positions.size, np.bool_)
        for name in names:
            mask &= self.cells.fields[name].cell.data[positions] >= 0
        return mask

    # Snapshots

    @property
    def tables(self) -> dict[str, Table]:
        """All tables of the partition by name."""
        return {"rows": self.table, "groups": self.groups.slots, "puts": self.cells.puts}

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
        for task in snapshot.tasks:
            name = task.facts.name
            partition.tasks[name] = TaskLedger(name, partition.table, partition.state, backlog=0)
        partition._restore_tables(snapshot.tables)
        partition._rebuild(facts)
        for task in snapshot.tasks:
            partition.tasks[task.facts.name].restore(task)
        return partition

    def _restore_tables(self, snapshots: Mapping[str, TableSnapshot]) -> None:
        tables = self.tables
        for name, snapshot in snapshots.items():
            if name not in tables:
                raise _newer(self.partition_id, f"it has the unknown table {name!r}")
            try:
                missing = tables[name].restore(snapshot)
            except NewerVersionError as error:
                raise _newer(self.partition_id, f"its table {name!r} has {error}") from error
            for column in missing:
                _log.warning(
                    "partition %r was written before there was a column %r of its table %r, which has %r in all rows "
                    "that there are",
                    self.partition_id, column, name, tables[name].columns[column].fill,
                )  # fmt: skip

    def _rebuild(self, facts: PartitionFacts) -> None:
        """Find out what follows from restored tables."""
        self.table.rebuild(facts.next_index)
        self.groups.rebuild(in_use=facts.has_groups)
        self.cells.rebuild()
        self.state_counts = np.bincount(self.state[self.table.present_positions()], minlength=4).tolist()
        keys = self.key[: self.table.count]
        named = np.flatnonzero(keys != None)  # noqa: E711  (of each)
        self.key_index = dict(zip(keys[named].tolist(), self.table.index[named].tolist(), strict=True))

    # Change notices

    def _touched(self, indexes: Indexes) -> None:
        self.row_version += indexes.size
        for lowest in self.lowest_versions.values():
            lowest.touched(indexes)
        first = int(indexes.min())
        for task in self.tasks.values():
            task.on_rows_changed(indexes, first)
        self.changed()

    def changed(self) -> None:
        """Have those who wait look again."""
        for notify in self.on_change:
            notify()

    def _consumed(self) -> None:
        for notify in self.on_consumed:
            notify()


def _newer(partition_id: str, what: str) -> NewerVersionError:
    return NewerVersionError(
        f"partition {partition_id!r} was written by a newer version: {what}; install that version, or restore a "
        f"checkpoint of this one into an empty data folder"
    )
