"""The change history, which tells watching clients what has changed in partitions, samples and tasks since a revision.

A revision number identifies a state of this service instance that clients may have seen. Each change belongs to the
next revision. The history stores the revision at which each row and each task last changed. A column contains the
revisions of the rows. For example:

    revision 7 is issued
    rows 3 and 4 of "a" are written, a task of "b" claims samples: recorded under revision 8
    revision 8 is issued
    row 4 of "a" is written: recorded under revision 9
    a watcher at revision 7 receives rows 3 and 4 of "a" in their current state and the task of "b", and is now at 9

The state of a watcher is therefore a single number. A watcher that has fallen behind receives each changed item only
once, in the item's latest state. The search for changed rows skips blocks of rows that have not changed.

Removed rows and partitions can no longer be read, so they are recorded in a log of limited size. If the log has dropped
the entry of a removed row before a watcher has seen it, the watcher receives the entire partition again. If the log has
dropped the entry of a removed partition, watchers at revisions before the removal get a CompactedError and must start
over. The history is not persisted, so each restart begins a new history. No changes are recorded before the first
revision is issued.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import CompactedError, InvalidArgumentError
from tq_service.machine.state_machine import State, Step
from tq_service.results import Revision
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.table import CLEARED, RowTable, distinct

MOST_GONE_ROWS: Final = 1 << 20  # maximum number of rows in the log of removed rows
ROWS_OF_A_PART: Final = 1 << 12
_GONE_ROWS: Final = 8  # overhead of a log entry, as a number of rows
_BLOCK_SHIFT: Final = 13  # a block has 8,192 rows
_FIRST: Final = 1
_COLUMN: Final = "revision"

Removed: TypeAlias = tuple[Indexes, NDArray[Any] | None]
"""Global indexes and keys of removed rows. None replaces the keys if no row had a key."""


@dataclass(slots=True, eq=False)
class _Past:
    """The revisions at which a partition and its parts last changed.

    Attributes:
        made_at: revision at which the partition was created. Watchers at earlier revisions have not yet seen the
            partition.
        rows_at: revision of the last change to any row or to the summary.
        block_at: revision of the last write to each block of rows, keyed by block number (index >> 13).
        tasks_at: revision of the last change to any task.
        task_at: revision of the last change to each task, by task name. The key None stands for changes to all tasks.
        forgotten_at: latest revision for which the log no longer lists the removed rows.
    """

    partition_id: str
    incarnation: bytes
    made_at: int = _FIRST
    rows_at: int = _FIRST
    block_at: dict[int, int] = field(default_factory=dict)
    tasks_at: int = _FIRST
    task_at: dict[str | None, int] = field(default_factory=dict)
    forgotten_at: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Gone:
    """A log entry for removed rows or a removed partition."""

    revision: int
    past: _Past
    removed: Removed | None = None

    @property
    def row_count(self) -> int:
        return _GONE_ROWS + (0 if self.removed is None else len(self.removed[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The partitions and the kinds of items that a watch covers.

    Attributes:
        prefix: name prefix of the watched partitions.
        is_shown: function that returns whether the caller may see a partition.
        has_samples: whether the watch includes samples.
        has_tasks: whether the watch includes tasks.
    """

    prefix: str
    is_shown: Callable[[str], bool]
    has_samples: bool = True
    has_tasks: bool = True

    def covers(self, partition_id: str) -> bool:
        """Whether the watch includes a partition."""
        return partition_id.startswith(self.prefix) and self.is_shown(partition_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChanges:
    """The changes to a partition since a revision.

    Attributes:
        partition: the partition, or None if this incarnation no longer exists.
        removed: removed rows.
        since: revision. Only rows written after this revision are included. 0 includes all rows.
        blocks: numbers of the blocks that may contain included rows, or None for all blocks.
        task_names: names of changed tasks.
    """

    partition_id: str
    incarnation: bytes
    partition: Partition | None = None
    removed: Sequence[Removed] = ()
    since: int = 0
    blocks: Sequence[int] | None = ()
    task_names: Collection[str] = ()

    def written(self) -> Iterator[Indexes]:
        """Yield the global indexes of the written rows, in arrays of up to 4,096 indexes."""
        if self.partition is None:
            return
        table, found = self.partition.table, np.zeros(0, np.int64)
        for rows in table.slices(1 << _BLOCK_SHIFT) if self.blocks is None else _slices_of(table, self.blocks):
            is_found = table.state.data[rows] != CLEARED
            if self.since:
                is_found &= table.columns[_COLUMN].data[rows] > self.since
            found = np.concatenate((found, table.index.data[rows][is_found]))
            while found.size >= ROWS_OF_A_PART:
                yield found[:ROWS_OF_A_PART]
                found = found[ROWS_OF_A_PART:]
        if found.size:
            yield found


class ChangeHistory:
    """The change history of one service instance. Use the history only on the instance's event loop.

    Args:
        state: state of the service, including all of its partitions.

    Attributes:
        instance_id: 16 random bytes that identify this history.
        number: revision of the last change.
        given_out: last issued revision, or 0 if no revision has been issued. Until one has been issued, no changes are
            recorded.
        forgotten_at: latest revision for which the log no longer lists the removed partitions.
        on_change: function called after each recorded group of changes.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.instance_id = os.urandom(16)
        self.number = _FIRST
        self.on_change: Callable[[], None] = lambda: None
        self.given_out = 0
        self._pasts: dict[Partition, _Past] = {}  # ordered by last change
        self._gone: deque[_Gone] = deque()
        self._gone_row_count = 0
        self.forgotten_at = 0

    # Changes

    def note(self, step: Step) -> None:
        """Record a group of changes under the next revision number."""
        number = self.number = self.given_out + 1
        for partition in step.created:
            self._past(partition, made_at=number).rows_at = number
        for partition, rows in step.written:
            past = self._past(partition)
            past.rows_at = number
            past.block_at.update(dict.fromkeys(_write_revision(partition.table, rows, number), number))
        for partition, task_name in step.tasks:
            past = self._past(partition)
            past.tasks_at = number
            if task_name is None:
                past.rows_at = past.task_at[None] = number
            elif task_name in partition.tasks:
                past.task_at[task_name] = number
            else:
                past.task_at.pop(task_name, None)  # the task no longer exists
        for partition, rows, keys in step.removed:
            past = self._past(partition)
            past.rows_at = past.tasks_at = past.task_at[None] = number
            self._add(_Gone(number, past, (rows, keys)))
        for partition in step.cleared:
            past = self._past(partition)
            past.task_at.clear()
            past.block_at.clear()
            del self._pasts[partition]
            self._add(_Gone(number, past))
        self.on_change()

    def _past(self, partition: Partition, made_at: int = _FIRST) -> _Past:
        """Return the revisions of a partition, and mark it as the most recently changed partition."""
        past = self._pasts.pop(partition, None) or _Past(partition.partition_id, partition.incarnation, made_at)
        self._pasts[partition] = past
        return past

    def _add(self, gone: _Gone) -> None:
        self._gone.append(gone)
        self._gone_row_count += gone.row_count
        while self._gone_row_count > MOST_GONE_ROWS:
            oldest = self._gone.popleft()
            self._gone_row_count -= oldest.row_count
            if oldest.removed is None:
                self.forgotten_at = oldest.revision
            else:
                oldest.past.forgotten_at = oldest.revision

    # Revisions

    def mark(self) -> int:
        """Mark the current revision as issued and return its number."""
        self.given_out = self.number
        return self.number

    def revision(self) -> Revision:
        """Issue and return the current revision."""
        return Revision(instance_id=self.instance_id, number=self.mark())

    def number_of(self, revision: Revision) -> int:
        """Check a revision received from a client and return its number.

        Raises:
            CompactedError: the revision was issued by another service instance.
            InvalidArgumentError: the revision is malformed or was not issued by this instance.
        """
        if revision.instance_id != self.instance_id and len(revision.instance_id) == len(self.instance_id):
            raise CompactedError(
                "the revision is from another instance of the service, which has since restarted. List again, or "
                "watch without a revision to start with the full state",
                metadata={"got": str(revision.number), "oldest": str(self.number)},
            )
        if revision.instance_id != self.instance_id or not 1 <= revision.number <= self.given_out:
            raise InvalidArgumentError(
                f"revision has an instance_id of {len(revision.instance_id)} bytes and the number {revision.number}; "
                f"expected {len(self.instance_id)} bytes and 1 to {self.given_out}. Send a revision exactly as it "
                f"was returned, or omit the revision to start with the full state.",
                field="revision",
            )
        return revision.number

    def since(self, since: int, selection: Watched) -> list[PartitionChanges]:
        """Return all changes since a revision, with removed partitions first. If `since` is 0, return the full state.

        Raises:
            CompactedError: the log no longer contains some of the requested changes.
        """
        if not since:
            there = [(name, each) for name, each in self._state.partitions.items() if selection.covers(name)]
            pasts = [self._pasts.get(each) or _Past(name, each.incarnation) for name, each in there]
            return [_changes_of(each, past, 0, selection) for (_, each), past in zip(there, pasts, strict=True)]
        if self.forgotten_at > since:
            raise CompactedError(
                f"revision {since} is too old, because changes up to {self.forgotten_at} were dropped. List "
                f"again, or watch without a revision to start with the full state",
                metadata={"got": str(since), "oldest": str(self.forgotten_at)},
            )
        gone: list[_Past] = []
        removed = defaultdict[_Past, list[Removed]](list)
        for each in reversed(self._gone):
            if each.revision <= since:
                break
            if each.removed is not None:
                removed[each.past].append(each.removed)
            elif each.past.made_at <= since and selection.covers(each.past.partition_id):
                gone.append(each.past)
        changed: list[PartitionChanges] = []
        for partition, past in reversed(self._pasts.items()):
            if max(past.rows_at, past.tasks_at) <= since:
                break
            if not selection.covers(partition.partition_id) or not (past.rows_at > since or selection.has_tasks):
                continue
            if selection.has_samples and past.forgotten_at > since >= past.made_at:
                gone.append(past)
            changed.append(_changes_of(partition, past, since, selection, removed[past][::-1]))
        cleared = [PartitionChanges(partition_id=past.partition_id, incarnation=past.incarnation) for past in gone]
        return [*cleared, *reversed(changed)]

    def is_there(self, partition: Partition) -> bool:
        """Return whether a partition still exists. If not, a later change will report the partition's removal."""
        return self._state.partitions.get(partition.partition_id) is partition


def _changes_of(
    partition: Partition, past: _Past, since: int, selection: Watched, removed: Sequence[Removed] = ()
) -> PartitionChanges:
    """Return the changes to a partition, or its full state if the watcher has not seen it."""
    blocks: list[int] | None = []
    if selection.has_samples and past.rows_at > since:
        blocks = sorted(block for block, at in past.block_at.items() if at > since)
    if past.made_at > since or (selection.has_samples and past.forgotten_at > since):
        since, removed, blocks = 0, (), None
    all_tasks_at = past.task_at.get(None, _FIRST)
    names = [name for name in partition.tasks if max(all_tasks_at, past.task_at.get(name, 0)) > since]
    return PartitionChanges(
        partition_id=past.partition_id,
        incarnation=past.incarnation,
        partition=partition,
        removed=removed if selection.has_samples else (),
        since=since,
        blocks=blocks if selection.has_samples else (),
        task_names=names if selection.has_tasks else (),
    )


def _write_revision(table: RowTable, rows: Indexes | range, number: int) -> Iterable[int]:
    """Set the revision of the given rows that still exist. Return the numbers of the blocks that contain the rows."""
    revisions = table.columns.get(_COLUMN) or table.unsaved_column(_COLUMN, np.int64, 0)
    if isinstance(rows, range):
        revisions.write(slice(table.position_from(rows.start), table.position_from(rows.stop)), number)
        return range(rows.start >> _BLOCK_SHIFT, (rows.stop - 1 >> _BLOCK_SHIFT) + 1)
    positions = table.find(rows)
    revisions.write(positions[positions >= 0], number)
    blocks: list[int] = distinct(rows >> _BLOCK_SHIFT, (table.next_index >> _BLOCK_SHIFT) + 1).tolist()
    return blocks


def _slices_of(table: RowTable, blocks: Iterable[int]) -> Iterator[slice]:
    """Lazily compute and yield the range of table positions of each block."""
    for block in blocks:
        yield slice(table.position_from(block << _BLOCK_SHIFT), table.position_from((block + 1) << _BLOCK_SHIFT))
