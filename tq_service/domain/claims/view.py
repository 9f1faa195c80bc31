"""What a sampler sees of the ready rows of a partition: scanned no further than needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.claims.grouping import Grouping, grouping_of
from tq_service.domain.claims.ledger import TaskLedger
from tq_service.domain.claims.ordered_rows import OrderedRows
from tq_service.domain.claims.readiness import Readiness, ScanKey
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Groups, Indexes, LengthSource, MustBeAwaited
from tq_service.domain.states import CLEARED, FAILED, LAST_RESERVED, STATE_NAMES, UNCLAIMED, is_open
from tq_service.domain.tables.meta import Order
from tq_service.errors import MissingLengthError
from tq_service.schema import BatchUnit, Blocks, EndCounts

_LEAST_CHUNK = 1024
_MOST_ON_LOOP = 1 << 13  # rows that a claim with an order looks at on the event loop; most look at a few dozen
_MOST_IN_GROUPS_ON_LOOP = 1 << 15  # ready rows among which the event loop looks for whole groups
_MOST_SCAN_STARTS = 64
_MOST_SCAN_START_BYTES = 2**20
_VALUE_BYTES = 64  # of a value beside its text
_MOST_ORDERS = 4
_LEFT: ScanKey = ((), (), None)  # of the rows that are left, ready or not; no kind of claim has no fields


class ReadyIndex:
    """Where the ready rows of a task are, for each kind of claim; all of it follows from the rows.

    Without an order it is a global index below which no row is ready, at which scans start, so that a claim costs what
    its batch costs. With one it is the rows in this order. Of kinds that are not asked for any more few are kept, and
    little of what they compare with.
    """

    def __init__(self, partition: Partition, task_name: str) -> None:
        self._partition = partition
        self._task_name = task_name
        self._orders: OrderedDict[tuple[ScanKey, tuple[Order, ...]], OrderedRows] = OrderedDict()
        self._starts: dict[ScanKey, int] = {}
        self._used_bytes = 0
        partition.on_rows.append(self._note)
        partition.on_reset.append(self._forget)

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
        for key, start in self._starts.items():
            if first < start:
                self._starts[key] = first
        for ordered in self._orders.values():
            ordered.note(indexes, first, self._partition.table)

    def start(self, key: ScanKey) -> int:
        """Return the global index at which a scan may start."""
        return self._starts.get(key, 0)

    def has_start(self, key: ScanKey) -> bool:
        """Whether scans of a kind have a start that is kept."""
        return key in self._starts

    def set_start(self, key: ScanKey, index: int) -> None:
        """Have later scans start at a global index."""
        if key not in self._starts:
            size = sum(_VALUE_BYTES + len(str(value)) for condition in key[1] for value in condition.values)
            if len(self._starts) >= _MOST_SCAN_STARTS or self._used_bytes + size > _MOST_SCAN_START_BYTES:
                self._forget_starts()
            self._used_bytes += size
        self._starts[key] = index

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
    """The rows of a partition as one task sees them; implements `tq_service.domain.plan.View`.

    On the event loop it shows the present. On a sampler's thread values may change under it, though positions do not
    while the table is pinned; which is why a plan is checked again when it is recorded.

    A scan starts where this kind of claim last found its first ready row, so that it costs what the batch costs. Only
    a view on the event loop that nothing has changed since may move that start: another could step over a row made
    ready meanwhile.

    Where an order is asked for, rows are read off `OrderedRows`; what is heavy of that is done before, see
    `sort_some`, or on a sampler's thread.

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
    ) -> None:
        self._partition = partition
        self._task = task
        self._rows = Readiness(partition, task, batch_spec, length)
        self._count = partition.table.count
        self._version = partition.version
        self._index = index
        self._ordered = index.ordered(self._rows.key, batch_spec.order_by) if batch_spec.order_by else None
        self._origin = self._ordered  # of which `_ordered` is a copy on another thread
        self._loop_budget: int | None = (
            _MOST_ON_LOOP  # rows left to look at; None off the loop, where there is no bound
        )
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

    def sort_some(self) -> None:
        """Do a step of that, right after the view was made."""
        if self._ordered is not None:
            self._ordered.sort_some(self._rows)

    def leave_loop(self) -> None:
        """Be read by another thread from now on, and as far as it likes."""
        if self._ordered is not None:
            self._ordered = self._ordered.fork(self._rows)
        else:  # move the start of the scan here, where it may be moved
            self.ready(1)
        if self._index.has_start(_LEFT):
            self.left(1)
        self._loop_budget = None

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
        first: Indexes = self._rows.table.index.data[found[:limit]]
        return first

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
        return Groups(rows=self._rows.table.index.data[positions], sizes=sizes)

    def _scan(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Yield the positions of the first ready rows in order, more and more of them, and whether this was the last.

        Args:
            least: about how many are wanted at first; None: all.
        """
        scan = self._scan_table(least) if self._ordered is None else self._scan_order(self._ordered, least)
        for found, is_last in scan:
            self.seen_count = max(self.seen_count, found.size)
            self.exhausted |= is_last
            yield found, is_last

    def _scan_table(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Look at growing stretches of the table, the last time at all that is left of it."""
        found, start = np.zeros(0, np.int64), self._rows.table.position_from(self._index.start(self._rows.key))
        size = self._count if least is None else max(_LEAST_CHUNK, least)
        while True:
            end = min(self._count, start + size)
            found = np.concatenate([found, start + np.flatnonzero(self._rows.ready(slice(start, end)))])
            self._move_start(self._rows.key, int(found[0]) if found.size else end)
            yield found, end == self._count
            if end == self._count:
                return
            start, size = end, 2 * size

    def _move_start(self, key: ScanKey, position: int) -> None:
        """Have later scans start at a position before which no row is ready, unless one may have become so."""
        table = self._rows.table
        if self._loop_budget is not None and self._version == self._partition.version:
            index = int(table.index.data[position]) if position < table.count else table.next_index
            self._index.set_start(key, index)

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
        """Return rows that are left for the task, see `View.left`."""
        self._has_read_left = True
        found, start = np.zeros(0, np.int64), self._rows.table.position_from(self._index.start(_LEFT))
        size, first = self._count if limit is None else max(_LEAST_CHUNK, limit), None
        while start < self._count and (limit is None or found.size < limit):
            open_rows, is_excluded = self._open_rows(start, start + size)
            if first is None and open_rows.size:
                first = int(open_rows[0])
            found = np.concatenate([found, open_rows[~is_excluded]])
            start, size = start + size, 2 * size
        self._move_start(_LEFT, min(start, self._count) if first is None else first)
        rows: Indexes = self._rows.table.index.data[found[:limit]]
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

    def no_more_can_become_ready(self) -> bool:
        """Whether no row can become ready any more, given that no new rows come. What is leased may be released."""
        if self._task.leased_count:
            return False
        if self.is_plain and self.exhausted:
            return self.unready_count == 0
        start, size = 0, _LEAST_CHUNK
        while start < self._count:  # mostly the first unready row tells
            open_rows, is_excluded = self._open_rows(start, start + size)
            unready = open_rows[~(is_excluded | self._rows.ready(open_rows))]
            if unready.size and not (self.grouping is not None and bool(self.grouping.is_dead(unready).all())):
                return False
            start, size = start + size, 2 * size
        return True

    @property
    def is_plain(self) -> bool:
        """Whether rows become ready one by one, without groups or conditions that could rule them out."""
        return self.grouping is None and not self._rows.key[1]

    @property
    def unready_count(self) -> int:
        """Rows left for the task that were not ready, once a scan was exhausted."""
        return self._task.backlog + self._task.skipped_count - self.seen_count

    def _open_rows(self, start: int = 0, end: int | None = None) -> tuple[Indexes, NDArray[np.bool_]]:
        """Return the positions of the rows that are left for the task, ready or not, and which `where` rules out.

        Of those between two positions, or of all.
        """
        positions = self._unclaimed(start, end)
        positions = positions[is_open(self._partition.state.data[positions])]
        return positions, self._rows.excluded(positions)

    def _unclaimed(self, start: int = 0, end: int | None = None) -> Indexes:
        claims = self._task.claim.data[start : self._count if end is None else min(end, self._count)]
        return start + np.flatnonzero(claims == UNCLAIMED)

    def end(self) -> EndCounts:
        """Return the end; nothing may have changed since the view was made, of which the sampler planned nothing."""
        consumed, inserted = self._task.consumed_count, self._partition.inserted_count
        kept_count = self._task.kept_count
        if consumed == inserted:
            return EndCounts(consumed_count=consumed, kept_count=kept_count)
        open_rows, is_excluded = self._open_rows()
        kept = open_rows[~is_excluded]
        excluded = open_rows.size - kept.size
        failed = int(np.count_nonzero(self._partition.state.data[self._unclaimed()] == FAILED))
        left_over = kept.size
        if self.grouping is not None:
            left_over = self.grouping.whole(kept[self._rows.ready(kept)], no_more=self.no_more)[0].size
        dead_lettered, dropped = self._task.dead_lettered_count, self._task.dropped_count
        return EndCounts(
            consumed_count=consumed,
            cleared_count=inserted - consumed - failed - dead_lettered - dropped - excluded - kept.size,
            failed_count=failed,
            dead_lettered_count=dead_lettered,
            excluded_count=excluded,
            in_incomplete_groups_count=kept.size - left_over,
            left_over_count=left_over,
            overlong_count=dropped,
            kept_count=kept_count,
        )

    def check_lengths(self) -> None:
        """Refuse to wait where rows are ready but for a length, and no sample of the partition has one."""
        source = self._rows.key[2]
        if source is None or self._partition.meta.has(source.key):
            return
        field = self._partition.cells.fields.get(source.field) if source.field else None
        if field is not None and field.has_lengths:
            return
        rows = slice(0, self._count)
        if (self._rows.has_data(rows) & self._rows.allowed(rows)).any():
            raise MissingLengthError(
                f"no sample has a value in the custom_meta column {source.key!r}, which the sampler needs: put the "
                f"number of tokens there, or name a field of the tokens as length_field",
                field="sampler_config",
                metadata={"partition_id": self._partition.partition_id, "column": source.key},
            )

    def still_ready(self, rows: Indexes) -> Indexes | None:
        """Return the positions of planned rows in the table of now, None where one of them is not ready."""
        positions = self._rows.table.find(rows)
        return positions if bool((positions >= 0).all()) and bool(self._rows.has_data(positions).all()) else None
