"""A partition: rows by fields with states, keys, groups and custom_meta, and the tasks that consume it.

Every change of its state is one synchronous method here: checked whole and encoded for the journal (`tell`) before
anything is written, and done on the event loop between awaits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
from tq_service.domain.claims.ledger import QueueClaim, TaskLedger
from tq_service.domain.claims.request import BatchSpec, LeaseTerms
from tq_service.domain.frozen import FrozenPartition
from tq_service.domain.plan import Indexes, Plan, RankPlan
from tq_service.domain.resolve import Target, check_write, of_rows, resolve_target
from tq_service.domain.states import CLEARED, FAILED, HELD, LIVE, STATE_CODES
from tq_service.domain.tables.cells import CellTable, FreedCells
from tq_service.domain.tables.groups import GroupTable
from tq_service.domain.tables.meta import CustomMeta
from tq_service.domain.tables.names import Names
from tq_service.domain.tables.table import RowTable, distinct, forget_names
from tq_service.domain.writes import PartitionSettings, SampleWrite, Written
from tq_service.errors import (
    InvalidArgumentError,
    SampleNotFoundError,
    StaleIncarnationError,
    TaskNotFoundError,
    nearest,
)
from tq_service.schema import FieldSpec, MetaColumn, SampleState


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

    # Freezing

    def freeze(self) -> FrozenPartition:
        """Return the partition as it is now; it costs the same however many samples there are."""
        puts, fields = self.cells.freeze()
        return FrozenPartition(
            partition_id=self.partition_id,
            incarnation=self.incarnation,
            settings=self.settings,
            sealed=self.sealed,
            insert_size_gcd=self.insert_size_gcd,
            table=self.table.freeze(),
            state=self.state.freeze(self.table.count),
            key=self.key.freeze(self.table.count),
            groups=self.groups.freeze(),
            meta=self.meta.freeze(),
            puts=puts,
            fields=fields,
            tasks=[task.freeze() for task in self.tasks.values()],
        )

    @classmethod
    def thaw(cls, frozen: FrozenPartition) -> Partition:
        """Return the partition that was frozen; what is frozen cannot be used again."""
        partition = cls(frozen.partition_id, frozen.settings, frozen.incarnation)
        table = partition.table
        table.thaw(frozen.table)
        table.thaw_column(partition.state, frozen.state)
        table.thaw_column(partition.key, frozen.key)
        partition.groups.thaw(frozen.groups)
        partition.meta.thaw(frozen.meta)
        partition.cells.thaw(frozen.puts, frozen.fields)
        partition.tasks = {task.name: TaskLedger.thaw(task, table, partition.state) for task in frozen.tasks}
        partition.sealed = frozen.sealed
        partition.insert_size_gcd = frozen.insert_size_gcd
        states = partition.state[table.present_positions()]
        partition.state_counts = np.bincount(states, minlength=4).tolist()
        keys = partition.key[: table.count]
        named = np.flatnonzero(keys != None)  # noqa: E711  (of each)
        partition.key_index = dict(zip(keys[named].tolist(), table.index[named].tolist(), strict=True))
        return partition

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
