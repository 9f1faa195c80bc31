"""What a sampler sees of the ready rows of a partition: scanned no further than needed."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import MissingLengthError
from tq_service.planning.grouping import Grouping, grouping_of
from tq_service.planning.ordered_rows import OrderedRows
from tq_service.planning.readiness import Readiness, ScanKey
from tq_service.schema import BatchUnit, Blocks, EndCounts, Layout
from tq_service.state.ledger import TaskLedger
from tq_service.state.meta import Order
from tq_service.state.partition import Partition
from tq_service.state.plan import Groups, Indexes, LengthSource, MustBeAwaited
from tq_service.state.request import BatchSpec
from tq_service.state.states import CLEARED, FAILED, LAST_RESERVED, STATE_NAMES, UNCLAIMED, is_open

T = TypeVar("T")
_LEAST_CHUNK = 1024
_MOST_ON_LOOP = 1 << 13  # rows that a claim with an order looks at on the event loop; most look at a few dozen
_MOST_SCANNED_ON_LOOP = 1 << 20  # rows that others look at there, in 3 ms; with conditions see `Readiness.at_once`
_WIDE_GAP = 1024  # rows that are not ready between two that are
_MOST_APART = 1 << 12
_MOST_IN_GROUPS_ON_LOOP = 1 << 15  # ready rows among which the event loop looks for whole groups
_MOST_NAMED = 3  # samples, in an error
_MOST_SCAN_STARTS = 64
_MOST_SCAN_START_BYTES = 2**20
_VALUE_BYTES = 64  # of a value beside its text
_MOST_ORDERS = 4
Steps: TypeAlias = Generator[Callable[[], None] | None, None, T]  # what another thread does next; None: the loop turns
_LEFT: ScanKey = ((), (), None)  # of the rows that are left, ready or not; no kind of claim has no fields

_NONE: Final = np.zeros(0, np.int64)
_NO_START: Final = (0, _NONE)


class ReadyIndex:
    """Where the ready rows of a task are, for each kind of claim; all of it follows from the rows.

    Without an order it is a global index at which scans start, so that a claim costs what its batch costs, and the few
    ready rows below it: those with many other rows behind them, such as members of a group that is never whole, or the
    few that pass `where`. With an order it is the rows in this order. Of kinds that are not asked for any more few are
    kept, and little of what they compare with.
    """

    def __init__(self, partition: Partition, task_name: str) -> None:
        self._partition = partition
        self._task_name = task_name
        self._orders: OrderedDict[tuple[ScanKey, tuple[Order, ...]], OrderedRows] = OrderedDict()
        self._starts: dict[ScanKey, tuple[int, Indexes]] = {}
        self._used_bytes = 0
        partition.on_rows.append(self._note)
        partition.on_reset.append(self._forget)

    def close(self) -> None:
        """Hear of no changes any more."""
        self._partition.on_rows.remove(self._note)
        self._partition.on_reset.remove(self._forget)

    def _forget(self, task_name: str) -> None:
        """Forget all: rows that were not written to may be ready again."""
        if task_name == self._task_name:
            self._orders.clear()
            self._forget_starts()

    def _forget_starts(self) -> None:
        self._starts.clear()
        self._used_bytes = 0

    def _note(self, indexes: Indexes | range) -> None:
        first = indexes.start if isinstance(indexes, range) else int(indexes.min())
        for key, (start, apart) in self._starts.items():
            if first < start:
                self._starts[key] = first, apart[: np.searchsorted(apart, first)]
        for ordered in self._orders.values():
            ordered.note(indexes, first, self._partition.table)

    def start(self, key: ScanKey) -> int:
        """Return the global index at which a scan may start, once it has looked at the rows `apart`."""
        return self._starts.get(key, _NO_START)[0]

    def apart(self, key: ScanKey) -> Indexes:
        """Return the global indexes below the start, in order, of all rows that may be ready."""
        return self._starts.get(key, _NO_START)[1]

    def has_start(self, key: ScanKey) -> bool:
        """Whether scans of a kind have a start that is kept."""
        return key in self._starts

    def set_start(self, key: ScanKey, index: int, apart: Indexes = _NONE) -> None:
        """Have later scans start at a global index, and look at some rows below it."""
        if key not in self._starts:
            size = sum(_VALUE_BYTES + len(str(value)) for condition in key[1] for value in condition.values)
            if len(self._starts) >= _MOST_SCAN_STARTS or self._used_bytes + size > _MOST_SCAN_START_BYTES:
                self._forget_starts()
            self._used_bytes += size
        self._starts[key] = index, apart

    def ordered(self, key: ScanKey, orders: tuple[Order, ...]) -> OrderedRows:
        """Return the rows in an order, which are kept from now on; others once columns have other types."""
        columns = [self._partition.meta.arrays(order.column) for order in orders]
        kinds = "".join("-" if arrays is None else arrays[0].dtype.kind for arrays in columns)
        ordered = self._orders.pop((key, orders), None)
        if ordered is None or ordered.kinds != kinds:
            ordered = OrderedRows(orders, kinds)
        self._orders[key, orders] = ordered
        if len(self._orders) > _MOST_ORDERS:
            self._orders.popitem(last=False)
        return ordered


class PartitionView:
    """The rows of a partition as one task sees them; implements `tq_service.state.plan.View`.

    On the event loop it shows the present. On a sampler's thread values may change under it, though positions do not
    while the table is pinned; which is why a plan is checked again when it is recorded.

    A scan starts where this kind of claim last found its first ready row, so that it costs what the batch costs. Only
    a view on the event loop that nothing has changed since may move that start: another could step over a row made
    ready meanwhile. On the event loop a scan ends with `MustBeAwaited` after so many rows; the start is moved as far.

    Where an order is asked for, rows are read off `OrderedRows`. Heavy work is done before in steps, see
    `prepare_some`, or on a sampler's thread.

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
        index: ReadyIndex,
        batch_spec: BatchSpec,
        length: LengthSource | None,
        *,
        no_more: bool = False,
        look_past: int = 0,
    ) -> None:
        self._partition = partition
        self._task = task
        self._rows = Readiness(partition, task, batch_spec, length)
        self._count = partition.table.count
        self._version = partition.version
        self._index = index
        self._ordered = index.ordered(self._rows.key, batch_spec.order_by) if batch_spec.order_by else None
        self._origin = self._ordered  # of which `_ordered` is a copy on another thread
        # Rows left to look at; None off the loop, where there is no bound.
        self._loop_budget: int | None = _MOST_ON_LOOP if batch_spec.order_by else self._most_scanned
        self._look_past = look_past  # so many of the first ready rows
        self.no_more = partition.sealed or no_more
        self.seen_count = 0
        self.exhausted = False
        self.grouping: Grouping | None = None
        self._has_read_left = False
        self.plan_count = task.serial - LAST_RESERVED

    @property
    def is_heavy(self) -> bool:
        """Whether more rows must be sorted before this view is read than the event loop has time for in one step."""
        return self._ordered is not None and self._ordered.is_heavy(self._count)

    def prepare_some(self) -> bool:
        """Do a step of sorting, or of skipping rows that are not ready, right after the view was made.

        Return whether there may be more to do.
        """
        if self._ordered is not None:
            is_heavy = self.is_heavy
            if is_heavy:
                self._ordered.sort_some(self._rows)
            return is_heavy
        key = self._rows.key
        found, start = self._first_candidates()
        end = min(self._count, start + _MOST_ON_LOOP)
        self._move_start(np.concatenate([found, self._ready_between(start, end)]), end)
        return self._rows.table.position_from(self._index.start(key)) == end < self._count

    @property
    def _most_scanned(self) -> int:
        return self._rows.at_once if self._rows.key[1] else _MOST_SCANNED_ON_LOOP

    def leave_loop(self) -> None:
        """Be read by another thread from now on, and as far as it likes."""
        if self._ordered is not None:
            self._ordered = self._ordered.fork(self._rows)
        else:  # move the start of the scan here, where it may be moved
            self.prepare_some()
        if self._index.has_start(_LEFT):
            self._skip_closed()
        self._loop_budget = None

    def has_ready(self, count: int) -> bool:
        """Whether so many rows are ready, as far as the event loop has time to see; right after the view was made."""
        with contextlib.suppress(MustBeAwaited):
            return any(found.size >= count for found, _ in self._scan(count))
        return False

    def rejoin_loop(self) -> None:
        """Keep what was found out on the other thread, which has ended."""
        if self._has_read_left:  # have the next view move the start before it leaves
            self._index.set_start(_LEFT, self._index.start(_LEFT))
        if self._origin is not None and self._ordered is not None:
            self._origin.merge(self._ordered)

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
        is_whole_scan = limit is None or (self.grouping.blocks == "anywhere" and self._ordered is not None)
        for found, is_last in self._scan(None if is_whole_scan else max(_LEAST_CHUNK, limit or 0)):
            if self._loop_budget is not None and found.size > _MOST_IN_GROUPS_ON_LOOP:
                raise MustBeAwaited
            positions = found
            if self._ordered is not None and not is_last:
                members = self.grouping.members(found)
                positions = self._ordered.in_order(self._rows, members[self._rows.ready(members)])
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
        scan = self._scan_table(least) if self._ordered is None else self._scan_order(self._ordered, least)
        for found, is_last in scan:
            self.seen_count = max(self.seen_count, found.size)
            self.exhausted |= is_last
            yield found[self._look_past :], is_last

    def _scan_table(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Look at growing stretches of the table, the last time at all that is left of it.

        Raises:
            MustBeAwaited: more must be looked at than the event loop has time for in one step.
        """
        found, start = self._first_candidates()
        size = self._count if least is None else max(_LEAST_CHUNK, least)
        while True:
            end = min(self._count, start + size)
            while start < end:  # in parts, lest the interpreter lock is held for long
                part_end = min(end, start + (self._loop_budget or self._most_scanned))
                found = np.concatenate([found, self._ready_between(start, part_end)])
                self._spend(part_end - start, found, part_end)
                start = part_end
            self._move_start(found, end)
            yield found, end == self._count
            if end == self._count:
                return
            size *= 2

    def _first_candidates(self) -> tuple[Indexes, int]:
        """Return the positions of the ready rows before the start of a scan, and the position where it starts."""
        table, key = self._rows.table, self._rows.key
        apart, start = self._index.apart(key), self._index.start(key)
        if apart.size:
            apart = table.find(apart)
            apart = apart[apart >= 0]
            apart = apart[self._rows.ready(apart)]
        return apart, table.position_from(start)

    def _ready_between(self, start: int, end: int) -> Indexes:
        return start + np.flatnonzero(self._rows.ready(slice(start, end)))

    def _spend(self, row_count: int, found: Indexes, end: int) -> None:
        """Count rows that were looked at on the event loop; keep what was found where they were too many."""
        if self._loop_budget is None:
            return
        self._loop_budget -= row_count
        if self._loop_budget <= 0 and end < self._count:
            self._move_start(found, end)
            raise MustBeAwaited

    def _move_start(self, found: Indexes, end: int) -> None:
        """Have later scans start at the first ready row, or behind the last wide gap after one of the first few.

        Args:
            found: positions of all ready rows before `end`, in order.
            end: position up to which was looked.
        """
        if self._loop_budget is None or self._version != self._partition.version:
            return  # a row may have become ready that was not seen
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
        index = int(table.index.data[position]) if position < table.count else table.next_index
        self._index.set_start(key, index, apart)

    def _scan_order(self, ordered: OrderedRows, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Look at more and more rows in their order, but not at many on the event loop.

        Raises:
            MustBeAwaited: so much had to be looked at that it must be done again off the event loop.
        """
        while True:
            found, looked_at, is_all = ordered.first(self._rows, least, self._loop_budget)
            if self._loop_budget is not None:
                self._loop_budget -= looked_at
            if not is_all and (least is None or found.size < least):
                raise MustBeAwaited
            yield found, is_all
            if is_all or least is None:
                return
            least *= 2

    # Anything else about rows

    def left(self, limit: int | None = None) -> Indexes:
        """Return rows that are left for the task, see `View.left`.

        Raises:
            MustBeAwaited: see `_scan_table`.
        """
        self._has_read_left = True
        self._skip_closed()
        found, start = np.zeros(0, np.int64), self._rows.table.position_from(self._index.start(_LEFT))
        size = min(self._most_scanned, self._count if limit is None else max(_LEAST_CHUNK, limit))
        while start < self._count and (limit is None or found.size < limit):
            open_rows, is_excluded = self._open_rows(start, start + size)
            found = np.concatenate([found, open_rows[~is_excluded]])
            if self._loop_budget is not None:
                self._loop_budget -= size
                if self._loop_budget <= 0 and start + size < self._count:
                    raise MustBeAwaited
            start, size = start + size, min(self._most_scanned, 2 * size)
        rows: Indexes = self._rows.table.index.data[found[:limit]]
        return rows

    def _skip_closed(self) -> None:
        """Have later looks at what is left start at the first row that is, or as far as may be looked in one step."""
        if self._loop_budget is None or self._version != self._partition.version:
            return
        start = first = self._rows.table.position_from(self._index.start(_LEFT))
        size, is_left = _LEAST_CHUNK, False
        while not is_left and start < min(self._count, first + _MOST_SCANNED_ON_LOOP):
            open_rows = self._open_between(start, start + size)
            is_left = open_rows.size > 0
            start = int(open_rows[0]) if is_left else min(self._count, start + size)
            size *= 2
        self._set_start(_LEFT, start)

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

    def no_more_can_become_ready(self) -> Steps[bool]:
        """Find out whether no row can become ready any more, given that no new rows come, in steps.

        What is leased may be released. Positions of rows must not change, and the answer holds only if nothing else
        has changed either.
        """
        if self._task.leased_count:
            return False
        if self.is_plain and self.exhausted:
            return self.unready_count == 0
        start, size = 0, _LEAST_CHUNK
        while start < self._count:  # mostly the first unready row tells
            open_rows, is_excluded = self._open_rows(start, start + size)
            kept = open_rows[~is_excluded]
            unready = kept[~self._rows.ready(kept)]
            if unready.size and not (self.grouping is not None and bool(self.grouping.is_dead(unready).all())):
                return False
            start, size = start + size, min(self._rows.at_once, 2 * size)
            if start + size > self._rows.at_once:
                yield None
        return True

    @property
    def is_plain(self) -> bool:
        """Whether rows become ready one by one, without groups or conditions that could rule them out."""
        return self.grouping is None and not self._rows.key[1]

    @property
    def unready_count(self) -> int:
        """Rows left for the task that were not ready, once a scan was exhausted."""
        return self._task.backlog + self._task.skipped_count - self.seen_count

    def _open_rows(self, start: int, end: int) -> tuple[Indexes, NDArray[np.bool_]]:
        """Return the positions of the rows between two that are left for the task, and which `where` rules out."""
        positions = self._open_between(start, end)
        return positions, self._rows.excluded(positions)

    def _open_between(self, start: int, end: int) -> Indexes:
        positions = self._unclaimed(start, end)
        return positions[is_open(self._partition.state.data[positions])]

    def _unclaimed(self, start: int, end: int) -> Indexes:
        return start + np.flatnonzero(self._task.claim.data[start : min(end, self._count)] == UNCLAIMED)

    def end(self) -> Steps[EndCounts]:
        """Count the end, in steps; see `no_more_can_become_ready`. The sampler planned nothing of this view."""
        consumed, inserted = self._task.consumed_count, self._partition.inserted_count
        kept_count = self._task.kept_count
        if consumed == inserted:
            return EndCounts(consumed_count=consumed, kept_count=kept_count)
        failed = excluded = left_over = 0
        ready = [np.zeros(0, np.int64)]
        size = _MOST_SCANNED_ON_LOOP if self.is_plain else self._rows.at_once
        for start in range(0, self._count, size):
            if start:
                yield None
            unclaimed = self._unclaimed(start, start + size)
            failed += int(np.count_nonzero(self._partition.state.data[unclaimed] == FAILED))
            open_rows, is_excluded = self._open_rows(start, start + size)
            kept = open_rows[~is_excluded]
            excluded += open_rows.size - kept.size
            left_over += kept.size
            if self.grouping is not None:
                ready.append(kept[self._rows.ready(kept)])
        open_count = left_over
        if (grouping := self.grouping) is not None:
            rows, left = np.concatenate(ready), list[int]()

            def count_whole() -> None:
                left.append(grouping.whole(rows, no_more=self.no_more)[0].size)

            if rows.size > _MOST_IN_GROUPS_ON_LOOP:
                yield count_whole
            else:
                count_whole()
            left_over = left[0]
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
