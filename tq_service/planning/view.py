"""What a sampler sees of the ready rows of a partition: scanned no further than needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import MissingLengthError
from tq_service.planning.grouping import Grouping, grouping_of
from tq_service.planning.ordering import first_in_order, in_order
from tq_service.planning.readiness import Readiness, ScanKey
from tq_service.schema import BatchUnit, Blocks, EndCounts, Layout
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Groups, Indexes, LengthSource, MustBeAwaited
from tq_service.state.request import BatchSpec
from tq_service.state.states import CLEARED, FAILED, LAST_RESERVED, STATE_NAMES, UNCLAIMED, is_open

_LEAST_CHUNK = 1024
_MOST_SCANNED_ON_LOOP = 1 << 20  # rows, in 3 ms; with conditions see `Readiness.at_once`
_MOST_ORDERED_ON_LOOP = 1 << 15  # rows among which the event loop looks for the first ones in an order
_MOST_IN_GROUPS_ON_LOOP = 1 << 15  # ready rows among which the event loop looks for whole groups
_WIDE_GAP = 1024  # rows that are not ready between two that are
_MOST_APART = 1 << 12
_MOST_NAMED = 3  # samples, in an error
_MOST_SCAN_STARTS = 64
_MOST_SCAN_START_BYTES = 2**20
_VALUE_BYTES = 64  # of a value beside its text
_LEFT: ScanKey = ((), (), None)  # of the rows that are left, ready or not; no kind of claim has no fields

# A global index, and the few rows below it that may be ready, in order.
Start: TypeAlias = tuple[int, Indexes]
_NONE: Final = np.zeros(0, np.int64)
_NO_START: Final = (0, _NONE)


@dataclass(slots=True, eq=False)
class ScanWatch:
    """What becomes of the rows while scans go on off the event loop, or over several of its turns.

    Attributes:
        found: where later scans may start by what these have seen.
        lowest: global index of the first row that was written to or reopened meanwhile; None: none was.
    """

    found: dict[ScanKey, Start] = field(default_factory=dict)
    lowest: int | None = None


class ScanStarts:
    """Where scans for the ready rows of a task start, for each kind of claim; all of it follows from the rows.

    So a claim costs what its batch costs. Below the start there are a few ready rows at most: those with many other
    rows behind them, such as members of a group that is never whole, or the few that pass `where`. A write to a row
    moves the start back to it. Of kinds of claims that nobody makes any more few are kept.
    """

    def __init__(self, partition: Partition, task_name: str) -> None:
        self._partition = partition
        self._task_name = task_name
        self._starts: dict[ScanKey, Start] = {}
        self._used_bytes = 0
        self._watches: list[ScanWatch] = []
        partition.on_rows.append(self._on_rows)
        partition.on_reset.append(self._on_reset)

    def close(self) -> None:
        """Hear of no changes any more."""
        self._partition.on_rows.remove(self._on_rows)
        self._partition.on_reset.remove(self._on_reset)

    def _on_reset(self, task_name: str) -> None:
        """Start at the first row again: rows that were not written to may be ready."""
        if task_name == self._task_name:
            self._clear()
            self._lower(0)

    def _on_rows(self, indexes: Indexes | range) -> None:
        self._lower(indexes.start if isinstance(indexes, range) else int(indexes.min()))

    def _lower(self, first: int) -> None:
        for key, start in self._starts.items():
            self._starts[key] = _lowered(start, first)
        for watch in self._watches:
            watch.lowest = first if watch.lowest is None else min(first, watch.lowest)

    def _clear(self) -> None:
        self._starts.clear()
        self._used_bytes = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[ScanWatch]:
        """Keep at the end of the `with` what scans have found that went on while rows changed."""
        watch = ScanWatch()
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)
            for key, start in watch.found.copy().items():
                self.set(key, start if watch.lowest is None else _lowered(start, watch.lowest))

    def get(self, key: ScanKey) -> Start:
        """Return where a scan may start, and the rows before that it looks at as well."""
        return self._starts.get(key, _NO_START)

    def set(self, key: ScanKey, start: Start) -> None:
        """Have later scans start there."""
        if key not in self._starts:
            size = sum(_VALUE_BYTES + len(str(value)) for condition in key[1] for value in condition.values)
            if len(self._starts) >= _MOST_SCAN_STARTS or self._used_bytes + size > _MOST_SCAN_START_BYTES:
                self._clear()
            self._used_bytes += size
        self._starts[key] = start


def _lowered(start: Start, first: int) -> Start:
    """Return a start that is not behind a row."""
    return start if first >= start[0] else (first, start[1][: np.searchsorted(start[1], first)])


class PartitionView:
    """The rows of a partition as one task sees them; implements `tq_service.state.plan.View`.

    On the event loop it shows the present, and what would take long ends with `MustBeAwaited`. Elsewhere values may
    change under it, though positions do not while the table is pinned; which is why a plan is checked again when it is
    recorded.

    Attributes:
        no_more: whether no new rows come: groups that declared no size are complete then.
        seen_count: ready rows seen by the largest scan.
        exhausted: whether a scan went over all rows.
        plan_count: see `View`.
        grouping: the groups that were asked for last; None: none were.
    """

    def __init__(
        self,
        partition: Partition,
        task: TaskLedger,
        starts: ScanStarts,
        batch_spec: BatchSpec,
        length: LengthSource | None,
        *,
        watch: ScanWatch | None = None,
        no_more: bool = False,
        look_past: int = 0,
    ) -> None:
        """Look at the rows of this moment.

        Args:
            partition: that of the task.
            task: its ledger.
            starts: where scans start.
            batch_spec: what is asked for.
            length: what the sampler needs of each sample.
            watch: of scans that may go on while rows change; None: it is read on the event loop in this step.
            no_more: whether no new rows come.
            look_past: so many of the first ready rows are left to others.
        """
        self._partition = partition
        self._task = task
        self._starts = starts
        self._rows = Readiness(partition, task, batch_spec, length)
        self._orders = batch_spec.order_by
        self._count = partition.table.count
        self._watch = watch
        self._look_past = look_past
        # Rows at once: the interpreter lock is held meanwhile. On the event loop these are all.
        self._at_once = self._rows.at_once if batch_spec.where else _MOST_SCANNED_ON_LOOP
        self._loop_budget = self._at_once
        self.no_more = partition.sealed or no_more
        self.seen_count = 0
        self.exhausted = False
        self.grouping: Grouping | None = None
        self.plan_count = task.serial - LAST_RESERVED

    @property
    def _is_on_loop(self) -> bool:
        return self._watch is None

    def has_ready(self, count: int) -> bool:
        """Whether so many rows are ready, as far as the event loop has time to see."""
        with contextlib.suppress(MustBeAwaited):
            return any(found.size >= count for found, _ in self._scan(count))
        return False

    # Ready rows

    def ready(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` ready rows, see `View.ready`."""
        for found, _ in self._scan(limit):
            if limit is not None and found.size >= limit:
                break
        found = found[:limit]
        self._check_lengths(found)
        first: Indexes = self._rows.table.index.data[found]
        return first

    def _check_lengths(self, positions: Indexes) -> None:
        """Refuse to deliver rows whose length is not a token count."""
        if self._rows.key[2] is not None:
            self._rows.lengths(positions)

    def ready_groups(self, limit: int | None = None, *, unit: BatchUnit = "sample", block_size: int | None = None,
                     take_incomplete: bool = False, blocks: Blocks = "aligned") -> Groups:  # fmt: skip
        """Return whole groups, see `View.ready_groups`.

        Raises:
            MustBeAwaited: the members of groups lie so far apart that they are to be looked for off the event loop.
        """
        self.grouping = grouping_of(self._partition, self._task, block_size, blocks, take_incomplete=take_incomplete)
        self.grouping.check()
        # Among which rows a run is found must not depend on the order.
        is_whole_scan = limit is None or (self.grouping.blocks == "anywhere" and bool(self._orders))
        for found, is_last in self._scan(None if is_whole_scan else max(_LEAST_CHUNK, limit or 0)):
            if self._is_on_loop and found.size > _MOST_IN_GROUPS_ON_LOOP:
                raise MustBeAwaited
            positions = found
            if self._orders and not is_last:
                members = self.grouping.members(found)
                positions = in_order(self._rows, self._orders, members[self._rows.ready(members)])
            positions, sizes = self.grouping.whole(positions, no_more=self.no_more)
            if limit is not None and (positions if unit == "sample" else sizes).size >= limit:
                break
        if limit is not None:
            taken = int(np.searchsorted(np.cumsum(sizes), limit, side="right")) if unit == "sample" else limit
            sizes = sizes[:taken]
            positions = positions[: int(sizes.sum())]
        self._check_lengths(positions)
        return Groups(rows=self._rows.table.index.data[positions], sizes=sizes)

    def _scan(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Yield the positions of the first ready rows in order, more and more of them, and whether this was the last.

        Args:
            least: about how many are wanted at first; None: all.
        """
        least = None if least is None else least + self._look_past
        for found, is_last in self._scan_in_order(least) if self._orders else self._scan_table(least):
            yield found[self._look_past :], is_last

    def _scan_table(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Look at growing stretches of the table, the last time at all that is left of it.

        Raises:
            MustBeAwaited: more must be looked at than the event loop has time for in one step; what was found is kept.
        """
        found, start = self._first_candidates()
        size = self._count if least is None else max(_LEAST_CHUNK, least)
        while True:
            end = min(self._count, start + size)
            while start < end:
                if self._is_on_loop and self._loop_budget <= 0:
                    self._move_start(found, start)
                    raise MustBeAwaited
                part_end = min(end, start + self._at_once)
                found = np.concatenate([found, start + np.flatnonzero(self._rows.ready(slice(start, part_end)))])
                self._loop_budget -= part_end - start
                start = part_end
            self._move_start(found, end)
            self.seen_count = max(self.seen_count, found.size)
            self.exhausted |= end == self._count
            yield found, end == self._count
            if end == self._count:
                return
            size *= 2

    def _scan_in_order(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Look at all ready rows, and put more and more of them in order.

        Raises:
            MustBeAwaited: so many must be looked at that it is done off the event loop.
        """
        if self._is_on_loop and self._count - self._first_candidates()[1] > _MOST_ORDERED_ON_LOOP:
            raise MustBeAwaited
        ((ready, _),) = self._scan_table(None)
        while True:
            found = first_in_order(self._rows, self._orders, ready, least)
            yield found, found.size == ready.size
            if least is None or found.size == ready.size:
                return
            least *= 4

    def _first_candidates(self) -> tuple[Indexes, int]:
        """Return the positions of the ready rows before the start of a scan, and the position where it starts."""
        table = self._rows.table
        start, apart = self._starts.get(self._rows.key)
        if apart.size:
            apart = table.find(apart)
            apart = apart[apart >= 0]
            apart = apart[self._rows.ready(apart)]
        return apart, table.position_from(start)

    def _move_start(self, found: Indexes, end: int) -> None:
        """Have later scans start at the first ready row, or behind the last wide gap after one of the first few.

        Args:
            found: positions of all ready rows before `end`, in order.
            end: position up to which was looked.
        """
        start, apart = int(found[0]) if found.size else end, _NONE
        if end - start - found.size > _WIDE_GAP:
            following = np.append(found[1 : _MOST_APART + 1], end)[:_MOST_APART]
            wide = np.flatnonzero(following - found[: following.size] > _WIDE_GAP)
            if wide.size:
                apart = self._rows.table.index.data[found[: wide[-1] + 1]]
                start = int(following[wide[-1]])
        self._set_start(self._rows.key, start, apart)

    def _set_start(self, key: ScanKey, position: int, apart: Indexes = _NONE) -> None:
        table = self._rows.table
        start = int(table.index.data[position]) if position < table.count else table.next_index, apart
        if self._watch is None:
            self._starts.set(key, start)
        else:
            self._watch.found[key] = start

    # Anything else about rows

    def left(self, limit: int | None = None) -> Indexes:
        """Return rows that are left for the task, see `View.left`.

        Raises:
            MustBeAwaited: see `_scan_table`.
        """
        found, start = [_NONE], self._rows.table.position_from(self._starts.get(_LEFT)[0])
        found_count, first = 0, None
        size = self._count if limit is None else max(_LEAST_CHUNK, limit)
        while start < self._count and (limit is None or found_count < limit):
            if self._is_on_loop and self._loop_budget <= 0:
                raise MustBeAwaited
            end = min(self._count, start + min(self._at_once, size))
            open_rows, is_excluded = self._open_rows(start, end)
            if first is None:
                first = int(open_rows[0]) if open_rows.size else None
                self._set_start(_LEFT, end if first is None else first)
            found.append(open_rows[~is_excluded])
            found_count += found[-1].size
            self._loop_budget -= end - start
            start, size = end, 2 * size
        rows: Indexes = self._rows.table.index.data[np.concatenate(found)[:limit]]
        return rows

    def lengths(self, rows: Indexes) -> Indexes:
        """Return token counts, see `View.lengths`."""
        return self._at(rows, self._rows.lengths, -1)

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return row lengths of a field, see `View.field_lengths`."""
        return self._at(rows, partial(self._rows.field_lengths, field), -1)

    def values(self, column: str, rows: Indexes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return a custom_meta column, see `View.values`."""
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        values, present = self._rows.meta(column, positions)
        return values, present & (positions >= 0)

    def group_names(self, rows: Indexes) -> list[str | None]:
        """Return the explicit group of each row, see `View.group_names`."""
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        names = self._partition.groups.names_of(positions)
        return [name if position >= 0 else None for name, position in zip(names, positions.tolist(), strict=True)]

    def use_counts(self, rows: Indexes) -> Indexes:
        """Return how often rows were delivered and not consumed, see `View.use_counts`."""
        return self._at(rows, self._task.uses.data.__getitem__, 0)

    def states(self, rows: Indexes) -> list[str]:
        """Return the state of each row, see `View.states`."""
        return [STATE_NAMES[code] for code in self._at(rows, self._partition.state.data.__getitem__, CLEARED)]

    def rows(self) -> Indexes:
        """Return all rows that are not cleared, see `View.rows`."""
        present = np.flatnonzero(self._partition.state.data[: self._count] != CLEARED)
        rows: Indexes = self._rows.table.index.data[present]
        return rows

    def _at(self, rows: Indexes, read: Callable[[Indexes], NDArray[Any]], missing: int) -> Indexes:
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        found = positions >= 0
        result = np.full(positions.size, missing, np.int64)
        result[found] = read(positions[found])
        return result

    # For the planner

    @property
    def kept_groups(self) -> int | None:
        """How groups that were asked for are kept whole, see `TaskFacts`."""
        return None if self.grouping is None else self.grouping.kept

    @property
    def is_plain(self) -> bool:
        """Whether rows become ready one by one, without groups or conditions that could rule them out."""
        return self.grouping is None and not self._rows.key[1]

    @property
    def unready_count(self) -> int:
        """Rows left for the task that were not ready, once a scan was exhausted."""
        return self._task.backlog + self._task.skipped_count - self.seen_count

    def may_become_ready(self) -> bool:
        """Whether rows may become ready that are not, given that no new ones come and nothing else has changed.

        What is leased may be released.

        Raises:
            MustBeAwaited: see `_stretches`.
        """
        if self._task.leased_count:
            return True
        if self.is_plain and self.exhausted:
            return self.unready_count > 0
        for start, end in self._stretches(_LEAST_CHUNK, self._rows.at_once):  # mostly the first unready row tells
            open_rows, is_excluded = self._open_rows(start, end)
            kept = open_rows[~is_excluded]
            unready = kept[~self._rows.ready(kept)]
            if unready.size and not (self.grouping is not None and bool(self.grouping.is_dead(unready).all())):
                return True
        return False

    def end(self) -> EndCounts:
        """Count the end, given that the sampler planned nothing of this view; see `may_become_ready`."""
        consumed, inserted = self._task.consumed_count, self._partition.inserted_count
        kept_count = self._task.kept_count
        if consumed == inserted:
            return EndCounts(consumed_count=consumed, kept_count=kept_count)
        failed = excluded = open_count = 0
        ready = [_NONE]
        at_once = _MOST_SCANNED_ON_LOOP if self.is_plain else self._rows.at_once
        for start, end in self._stretches(at_once, at_once):
            unclaimed = self._unclaimed(start, end)
            failed += int(np.count_nonzero(self._partition.state.data[unclaimed] == FAILED))
            open_rows, is_excluded = self._open_rows(start, end)
            kept = open_rows[~is_excluded]
            excluded += open_rows.size - kept.size
            open_count += kept.size
            if self.grouping is not None:
                ready.append(kept[self._rows.ready(kept)])
        left_over = open_count
        if self.grouping is not None:
            rows = np.concatenate(ready)
            if self._is_on_loop and rows.size > _MOST_IN_GROUPS_ON_LOOP:
                raise MustBeAwaited
            left_over = self.grouping.whole(rows, no_more=self.no_more)[0].size
        dead_lettered, dropped = self._task.dead_lettered_count, self._task.dropped_count
        return EndCounts(
            consumed_count=consumed,
            cleared_count=inserted - consumed - failed - dead_lettered - dropped - excluded - open_count,
            failed_count=failed,
            dead_lettered_count=dead_lettered,
            excluded_count=excluded,
            in_incomplete_groups_count=open_count - left_over,
            left_over_count=left_over,
            overlong_count=dropped,
            kept_count=kept_count,
        )

    def _stretches(self, size: int, at_once: int) -> Iterator[tuple[int, int]]:
        """Yield where stretches of the table start and end, the first of `size` rows, the others up to `at_once`.

        Raises:
            MustBeAwaited: more of them must be looked at than the event loop has time for in one step.
        """
        start = 0
        while start < self._count:
            if self._is_on_loop and start >= at_once:
                raise MustBeAwaited
            end = min(self._count, start + size)
            yield start, end
            start, size = end, min(at_once, 2 * size)

    def _open_rows(self, start: int, end: int) -> tuple[Indexes, NDArray[np.bool_]]:
        """Return the positions of the rows between two that are left for the task, and which `where` rules out."""
        positions = self._unclaimed(start, end)
        positions = positions[is_open(self._partition.state.data[positions])]
        return positions, self._rows.excluded(positions)

    def _unclaimed(self, start: int, end: int) -> Indexes:
        return start + np.flatnonzero(self._task.claim.data[start:end] == UNCLAIMED)

    def check_length_field(self) -> None:
        """Refuse to wait for lengths of a field that never has any, where no sample has one in custom_meta either.

        Lengths that are missing can come as long as there are samples, by a put or by SetCustomMeta; so claims wait.
        """
        source, fields = self._rows.key[2], self._partition.cells.fields
        field = None if source is None or source.field is None else fields.get(source.field)
        if source is None or field is None or not field.produced_count or field.has_lengths:
            return
        if self._partition.meta.has(source.key):
            return
        rows = slice(0, min(self._count, self._rows.at_once))
        lacking = np.flatnonzero(self._rows.has_data(rows) & self._rows.allowed(rows) & ~self._rows.has_length(rows))
        if not lacking.size:
            return
        kind = "objects" if field.spec.layout is Layout.OBJECT else "scalars"
        named = ", ".join(map(str, self._rows.table.index.data[lacking[:_MOST_NAMED]].tolist()))
        raise MissingLengthError(
            f"length_field is {source.field!r}, which has {kind}; expected a field of tensors with a length, for "
            f"samples {named}{' and others' if lacking.size > _MOST_NAMED else ''}. Name another field, or put the "
            f"number of tokens into the custom_meta column {source.key!r}.",
            field="sampler_config",
            metadata={"partition_id": self._partition.partition_id, "column": source.key},
        )

    def still_ready(self, rows: Indexes) -> Indexes | None:
        """Return the positions of planned rows in the table of now, None where one of them is not ready."""
        positions = self._rows.table.find(rows)
        return positions if bool((positions >= 0).all()) and bool(self._rows.has_data(positions).all()) else None
