"""What has changed since a revision: partitions, their samples and tasks, for calls that watch them.

A revision counts groups of changes of this instance of the service. What is kept of a change is where it was: which
rows, which tasks, and when. What is there now is read from the partitions when a watcher asks, so a watcher is one
number, and one that comes late gets the latest state of what has changed, once.

    changes  ..  5: rows 0-9 of "a"  ..  7: rows 3, 4  ..  9: rows 10-19  ..  12: partition "b" is gone
    a watcher at 6 asks: rows 3, 4, 10-19 of "a" as they are now, and that "b" is gone; it is at 12 then

Rows that are removed and partitions that are gone cannot be read any more, so their names are kept. What is kept is
bounded: beyond that the oldest is forgotten, and a watcher that has not come so far has to start over (CompactedError).
More is kept while watchers need it than for those that may come back. Nothing is written down: after a restart there is
another history, since a revision of before would need every row's revision on disk.

Without a watcher, changes are put aside as they come, which costs a claim nothing, and are looked at some dozens at
a time, or when a revision is asked for.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import CompactedError, InvalidArgumentError
from tq_service.machine.state_machine import ChangedTask, State, Step, WrittenRows
from tq_service.results import Revision
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes

KEPT_ROWS: Final = 1 << 18  # for watchers that may come back; a key counts as several
MOST_ROWS: Final = 1 << 22  # while a watcher needs them
_RECORD_ROWS: Final = 8  # what a record takes besides its rows, in rows
_KEY_ROWS: Final = 8
_CLEARED_ROWS: Final = 32  # a partition that is gone
ROWS_OF_A_PART: Final = 1 << 12
_ROWS_AT_ONCE: Final = 1 << 16  # in which each comes once
MOST_UNREAD: Final = 64  # groups of changes
MOST_UNREAD_ROWS: Final = 1 << 12  # rows in no range, of one such group: more are noted at once, and then bounded
_UNKNOWN: Final = 1  # when partitions were made that were there before the history


@dataclass(slots=True, eq=False)
class _Rows:
    """Rows of a partition that were written, or removed, in the changes up to a revision."""

    revision: int
    indexes: Indexes | range
    is_removed: bool = False
    keys: NDArray[Any] | None = None

    @property
    def weight(self) -> int:
        count = 1 if isinstance(self.indexes, range) else len(self.indexes)
        return _RECORD_ROWS + count + (0 if self.keys is None else _KEY_ROWS * len(self.keys))


@dataclass(slots=True, eq=False)
class _Past:
    """When what has changed in a partition that is there.

    Attributes:
        made_at: it is new to watchers that were here before.
        changed_at: anything.
        rows_at: rows were written or removed.
        facts_at: what its summary says.
        tasks_at: a task.
        all_tasks_at: something that the status of each task depends on.
        task_at: when each task has changed.
        rows: which rows, in order.
        forgotten_at: the last of those that were forgotten.
    """

    made_at: int
    changed_at: int
    rows_at: int = 0
    facts_at: int = 0
    tasks_at: int = 0
    all_tasks_at: int = 0
    task_at: dict[str, int] = field(default_factory=dict)
    rows: deque[_Rows] = field(default_factory=deque)
    forgotten_at: int = 0


@dataclass(frozen=True, slots=True)
class _Cleared:
    """A partition that is gone."""

    revision: int
    made_at: int
    partition_id: str
    incarnation: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is watched.

    Attributes:
        prefix: how the names of its partitions begin.
        is_shown: whether the caller may know of a partition.
        has_samples: whether samples are.
        has_tasks: whether tasks are.
    """

    prefix: str
    is_shown: Callable[[str], bool]
    has_samples: bool = True
    has_tasks: bool = True

    def covers(self, partition_id: str) -> bool:
        """Whether a partition is watched."""
        return partition_id.startswith(self.prefix) and self.is_shown(partition_id)


@dataclass(slots=True, eq=False)
class Reader:
    """A watcher: it has all changes up to its revision."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChanges:
    """What has changed in a partition.

    Attributes:
        removed: rows that were removed, with their keys where they had some.
        written: rows that were written, as the ranges and arrays in which that was done; None: all that are there.
        end_index: global index of the next sample when this was found out.
        task_names: tasks that have changed.
    """

    partition: Partition
    removed: Sequence[tuple[Indexes | range, NDArray[Any] | None]] = ()
    written: Sequence[Indexes | range] | None = ()
    end_index: int = 0
    task_names: Collection[str] = ()

    def written_in_parts(self) -> Iterator[Indexes]:
        """Yield the global indexes of written rows that are still there, some thousands at a time, each about once."""
        return self._all() if self.written is None else self._some(list(self.written))

    def _all(self) -> Iterator[Indexes]:
        table, start = self.partition.table, 0
        while start < self.end_index:
            rows = table.index.data[table.present_from(start, ROWS_OF_A_PART)]
            rows = rows[rows < self.end_index]
            if not rows.size:
                return
            yield rows
            start = int(rows[-1]) + 1

    def _some(self, pieces: list[Indexes | range]) -> Iterator[Indexes]:
        while pieces:
            taken: list[Indexes] = []
            left = _ROWS_AT_ONCE
            while pieces and left:
                piece = pieces.pop()
                if len(piece) > left:
                    pieces.append(piece[left:])
                    piece = piece[:left]
                taken.append(np.asarray(piece, np.int64))
                left -= len(piece)
            rows = np.unique(np.concatenate(taken))
            for start in range(0, rows.size, ROWS_OF_A_PART):
                yield rows[start : start + ROWS_OF_A_PART]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What brings a watcher to a revision.

    Attributes:
        revision: where it is then.
        cleared: name and incarnation of each partition that is gone.
        partitions: what has changed in others.
    """

    revision: int
    cleared: Sequence[tuple[str, bytes]]
    partitions: Sequence[PartitionChanges]


class ChangeHistory:
    """The revisions of one instance of the service. Confined to its event loop.

    Args:
        state: the partitions that are there.

    Attributes:
        instance_id: names the history, 16 random bytes.
        unread: changes that were put aside, as partitions created, rows written, and tasks; see `Step`.
        readers: those that watch.
        is_awaited: whether the next change is to be noted as it comes, and `on_change` to be called.
        on_change: has it be known that there is a change.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.instance_id = os.urandom(16)
        self.unread: list[tuple[list[Partition], list[WrittenRows], list[ChangedTask]]] = []
        self.is_awaited = False
        self._number = _UNKNOWN  # of the last revision
        self.readers: set[Reader] = set()
        self.on_change: Callable[[], None] = lambda: None
        self._pasts: dict[Partition, _Past] = {}  # in the order of their last changes
        self._cleared: deque[_Cleared] = deque()
        self._order: OrderedDict[_Rows, _Past] = OrderedDict()  # all rows that are kept, the oldest first
        self._weight = 0
        self._trimmed_from = KEPT_ROWS  # weight from which on to look whether something can be forgotten
        self._forgotten_at = 0  # the last of the partitions that are gone and forgotten
        self._read_at = 0  # the last revision that was given out

    # Changes

    def note(self, step: Step) -> None:
        """Take note of a group of changes that were made, and of those that were put aside."""
        self.unread.append((step.created, step.written, step.tasks))
        number = self.catch_up()
        for partition, rows, keys in step.removed:
            past = self._past(partition)
            past.all_tasks_at = past.tasks_at = number
            self._add(past, _Rows(number, rows, is_removed=True, keys=keys))
        for partition in step.cleared:
            self._forget(partition)
        self._after_changes()

    def catch_up(self) -> int:
        """Take note of the changes that were put aside; return the number of the last revision."""
        for created, written, tasks in self.unread:
            self._number = number = self._number + 1
            for partition in created:
                self._pasts[partition] = _Past(number, number)
            for partition, rows in written:
                self._add(self._past(partition), _Rows(number, rows))
            for partition, task_name in tasks:
                past = self._past(partition)
                past.tasks_at = number
                if task_name is None:
                    past.all_tasks_at = past.facts_at = number
                elif task_name in partition.tasks:
                    past.task_at[task_name] = number
                else:
                    past.task_at.pop(task_name, None)  # it was forgotten
        self.unread.clear()
        if self._weight >= self._trimmed_from:
            self._trim()
        return self._number

    def note_replaced(self, gone: Iterable[Partition], restored: Iterable[Partition]) -> None:
        """Take note of partitions that took the place of others in one step."""
        self._number = number = self.catch_up() + 1
        for partition in gone:
            self._forget(partition)
        for partition in restored:
            self._pasts[partition] = _Past(number, number)
        self._after_changes()

    def _after_changes(self) -> None:
        if self._weight >= self._trimmed_from:
            self._trim()
        if self.is_awaited:
            self.on_change()

    def _past(self, partition: Partition) -> _Past:
        """Return the past of a partition, which changes now."""
        past = self._pasts.pop(partition, None) or _Past(_UNKNOWN, _UNKNOWN)
        self._pasts[partition] = past
        past.changed_at = self._number
        return past

    def _add(self, past: _Past, rows: _Rows) -> None:
        past.rows_at = past.facts_at = self._number
        last = past.rows[-1] if past.rows else None
        if (
            last is not None and last.revision > self._read_at and _continue(last, rows)
        ):  # no watcher is between the two
            return
        past.rows.append(rows)
        self._order[rows] = past
        self._weight += rows.weight

    def _forget(self, partition: Partition) -> None:
        """Keep of a partition only that it is gone."""
        past = self._pasts.pop(partition, None) or _Past(_UNKNOWN, _UNKNOWN)
        self._weight += _CLEARED_ROWS
        for rows in past.rows:
            self._weight -= rows.weight
            del self._order[rows]
        gone = _Cleared(self._number, past.made_at, partition.partition_id, partition.incarnation)
        self._cleared.append(gone)

    def _trim(self) -> None:
        """Forget the oldest changes until few enough are kept: those that no reader needs, or any if they are many."""
        needed_from = min((reader.revision for reader in self.readers), default=self._number) + 1
        while self._weight > KEPT_ROWS:
            oldest = next(iter(self._order)).revision if self._order else self._number + 1
            oldest = min(oldest, self._cleared[0].revision if self._cleared else oldest)
            if oldest > self._number or (oldest >= needed_from and self._weight <= MOST_ROWS):
                break
            if self._cleared and self._cleared[0].revision == oldest:
                self._cleared.popleft()
                self._forgotten_at = oldest
                self._weight -= _CLEARED_ROWS
                continue
            rows, past = self._order.popitem(last=False)
            past.rows.popleft()
            past.forgotten_at = rows.revision
            self._weight -= rows.weight
        self._trimmed_from = max(KEPT_ROWS, self._weight + KEPT_ROWS // 4)

    # Revisions

    def mark(self) -> int:
        """Return the number of the revision of now, to be given out."""
        self._read_at = self.catch_up()
        return self._read_at

    def revision(self) -> Revision:
        """Return the revision of now."""
        return Revision(instance_id=self.instance_id, number=self.mark())

    def number_of(self, revision: Revision) -> int:
        """Return the number of a revision that a client has.

        Raises:
            CompactedError: it is of another instance of the service.
            InvalidArgumentError: it is none.
        """
        if len(revision.instance_id) != 16 or revision.number < 1:
            raise InvalidArgumentError(
                f"revision has an instance_id of {len(revision.instance_id)} bytes and the number {revision.number}; "
                f"send one as it was answered, or none to begin with the whole state",
                field="revision",
            )
        last = self.catch_up()
        if revision.instance_id != self.instance_id:
            raise CompactedError(
                "the revision is of another instance of the service, which has been started since; list again, or "
                "watch without a revision, which begins with the whole state",
                metadata={"got": str(revision.number), "oldest": str(last)},
            )
        if revision.number > last:
            raise InvalidArgumentError(
                f"revision is {revision.number}, the last one is {last}; send one as it was answered",
                field="revision",
            )
        return revision.number

    def has_changed(self, since: int, selection: Selection) -> bool:
        """Whether anything that is watched has changed since a revision."""
        self.catch_up()
        for partition, past in reversed(self._pasts.items()):
            if past.changed_at <= since:
                break
            at = max(past.made_at, past.facts_at, past.tasks_at if selection.has_tasks else 0)
            if at > since and selection.covers(partition.partition_id):
                return True
        for gone in reversed(self._cleared):
            if gone.revision <= since:
                break
            if gone.made_at <= since and selection.covers(gone.partition_id):
                return True
        return self._forgotten_at > since

    def since(self, since: int, selection: Selection) -> Changes:
        """Return what has changed since a revision; of 0: all that is there.

        Raises:
            CompactedError: some of it is not known any more.
        """
        number = self.mark()
        if not since:
            partitions = [
                self._all_of(partition, selection)
                for name, partition in self._state.partitions.items()
                if selection.covers(name)
            ]
            return Changes(revision=number, cleared=(), partitions=partitions)
        if self._forgotten_at > since:
            raise _too_old(since, self._forgotten_at)
        cleared = [
            (gone.partition_id, gone.incarnation)
            for gone in self._later(self._cleared, since)
            if gone.made_at <= since and selection.covers(gone.partition_id)
        ]
        changed: list[PartitionChanges] = []
        for partition, past in reversed(self._pasts.items()):
            if past.changed_at <= since:
                break
            if not selection.covers(partition.partition_id):
                continue
            if past.made_at > since:
                changed.append(self._all_of(partition, selection))
            elif past.facts_at > since or (selection.has_tasks and past.tasks_at > since):
                changed.append(self._changes_of(partition, past, since, selection))
        return Changes(revision=number, cleared=cleared, partitions=changed[::-1])

    def is_there(self, partition: Partition) -> bool:
        """Whether a partition is there still; else that it is gone is another change."""
        return self._state.partitions.get(partition.partition_id) is partition

    def _all_of(self, partition: Partition, selection: Selection) -> PartitionChanges:
        return PartitionChanges(
            partition=partition,
            written=None if selection.has_samples else (),
            end_index=partition.inserted_count,
            task_names=list(partition.tasks) if selection.has_tasks else (),
        )

    def _changes_of(self, partition: Partition, past: _Past, since: int, selection: Selection) -> PartitionChanges:
        removed, written, names = [], [], list[str]()
        if selection.has_samples and past.rows_at > since:
            if past.forgotten_at > since:
                raise _too_old(since, past.forgotten_at)
            for rows in self._later(past.rows, since):
                if rows.is_removed:
                    removed.append((rows.indexes, rows.keys))
                else:
                    written.append(rows.indexes)
        if selection.has_tasks and past.all_tasks_at > since:
            names = list(partition.tasks)
        elif selection.has_tasks and past.tasks_at > since:
            names = [name for name, at in past.task_at.items() if at > since]
        return PartitionChanges(
            partition=partition,
            removed=removed,
            written=written,
            end_index=partition.inserted_count,
            task_names=names,
        )

    @staticmethod
    def _later(records: deque[Any], since: int) -> list[Any]:
        """Return the last records, those after a revision, in order."""
        found = []
        for record in reversed(records):
            if record.revision <= since:
                break
            found.append(record)
        return found[::-1]


def _continue(last: _Rows, rows: _Rows) -> bool:
    """Have new rows be in the same record as those before them; return whether they are."""
    if last.is_removed or rows.is_removed:
        return False
    before, after = last.indexes, rows.indexes
    if not (isinstance(before, range) and isinstance(after, range) and before.stop == after.start):
        return False
    last.indexes, last.revision = range(before.start, after.stop), rows.revision
    return True


def _too_old(since: int, forgotten_at: int) -> CompactedError:
    return CompactedError(
        f"the revision {since} is too old: what has changed up to {forgotten_at} is not known any more; list again, or "
        f"watch without a revision, which begins with the whole state",
        metadata={"got": str(since), "oldest": str(forgotten_at)},
    )
