"""Which rows are ready for one way of asking, and what a sampler sees of them: scanned no further than needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.claims.ledger import TaskLedger
from tq_service.domain.claims.ordered_rows import OrderedRows
from tq_service.domain.claims.request import BatchSpec
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Groups, Indexes, LengthSource
from tq_service.domain.states import CLEARED, FAILED, HELD, LIVE, STATE_NAMES, UNCLAIMED
from tq_service.domain.tables.groups import group_ids
from tq_service.domain.tables.meta import Condition, Order
from tq_service.errors import InvalidArgumentError, MissingLengthError
from tq_service.schema import BatchUnit, EndCounts

_LEAST_CHUNK = 1024
_MOST_ON_LOOP = 1 << 13  # rows that a claim with an order looks at on the event loop; most look at a few dozen
_MOST_SCAN_STARTS = 64
_MOST_SCAN_START_BYTES = 2**20
_VALUE_BYTES = 64  # of a value beside its text
_MOST_ORDERS = 4

# What decides which rows are ready for a way of asking: data fields, conditions, and the length that its sampler needs.
ScanKey: TypeAlias = tuple[tuple[str, ...], tuple[Condition, ...], LengthSource | None]


class Readiness:
    """The conditions of one way of asking over the rows of a partition, in the arrays of the moment it was made."""

    def __init__(
        self, partition: Partition, task: TaskLedger, batch_spec: BatchSpec, length: LengthSource | None
    ) -> None:
        self._partition = partition
        self.table = partition.table
        self._batch_spec = batch_spec
        self._length = length
        self.count = self.table.count
        self.index: NDArray[np.int64] = self.table.index.data
        self.state: NDArray[np.uint8] = partition.state.data
        self.claim: NDArray[np.int64] = task.claim.data

    def find(self, indexes: Indexes) -> Indexes:
        """Return the positions of rows by their global indexes, of those that are there."""
        positions = self.table.find(indexes)
        found = positions >= 0
        return positions if found.all() else positions[found]

    def ready_of(self, positions: Indexes) -> Indexes:
        """Return those positions whose rows are ready."""
        ready: Indexes = positions[self.ready_mask(positions)]
        return ready

    def ready_mask(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which rows of a stretch, or at some positions, are ready `(n,)`."""
        mask = self.open_mask(rows)
        mask &= self.produced(rows)
        if self._batch_spec.where:
            mask &= self.allowed(rows)
        if self._length is not None:
            mask &= self.known_lengths(rows) >= 0
        return mask

    def open_mask(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which rows are live and not consumed by the task."""
        mask: NDArray[np.bool_] = self.state[rows] == LIVE
        mask &= self.claim[rows] == UNCLAIMED
        return mask

    def produced(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return which rows have all data fields."""
        return self._partition.cells.produced(self._batch_spec.data_fields, rows)

    def allowed(self, rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return where `where` holds; a row without a value does not pass."""
        mask = np.ones(self.index[rows].size, np.bool_)
        for condition in self._batch_spec.where:
            holds, present = self.condition(condition, rows)
            mask &= holds & present
        return mask

    def condition(self, condition: Condition, rows: slice | Indexes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return where a condition holds, and where the row has a value to compare."""
        values, present = self.meta(condition.column, rows)
        holds = np.zeros(present.size, np.bool_)
        if present.any():
            holds[present] = condition.holds(values[present])
        return holds, present

    def known_lengths(self, rows: slice | Indexes) -> Indexes:
        """Return token counts by the sampler's length source, -1 where unknown."""
        source = self._length or LengthSource()
        values, present = self.meta(source.key, rows)
        lengths = np.full(present.size, -1, np.int64)
        if source.field is not None:
            field = self._partition.cells.fields.get(source.field)
            if field is not None:
                lengths = field.lengths(rows)
        lengths[present] = _token_counts(source.key, values[present])
        return lengths

    def meta(self, column: str, rows: slice | Indexes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the values of a custom_meta column, and which rows have one."""
        arrays = self._partition.meta.arrays(column)
        if arrays is None:
            count = self.index[rows].size
            return np.zeros(count), np.zeros(count, np.bool_)
        return arrays[0][rows], arrays[1][rows]


class ReadyIndex:
    """Where the ready rows of a task are, for each way of asking; all of it follows from the rows.

    Without an order it is a global index below which no row is ready, at which scans start, so that a claim costs what
    its batch costs. With one it is the rows in this order. Of ways in which nobody asks any more few are kept, and
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

    A scan starts where this way of asking last found its first ready row, so that it costs what the batch costs. Only
    a view on the event loop (`remembers`) that nothing has changed since may move that start: another could step over a
    row made ready meanwhile.

    Where an order is asked for, rows are read off `OrderedRows`; what is heavy of that is done before, see
    `sort_some`, or on a sampler's thread.
    """

    def __init__(self, partition: Partition, task: TaskLedger, index: ReadyIndex, batch_spec: BatchSpec,
                 length: LengthSource | None, *, remembers: bool = True) -> None:  # fmt: skip
        self._partition = partition
        self._task = task
        self._batch_spec = batch_spec
        self._length = length
        self._signature = (batch_spec.data_fields, batch_spec.where, length)
        self.remembers = remembers
        self.made_at = partition.version  # what the partition had seen then
        self._rows = Readiness(partition, task, batch_spec, length)
        self._index = index
        self._ordered = index.ordered(self._signature, batch_spec.order_by) if batch_spec.order_by else None
        self._lender = self._ordered  # of which `_ordered` is a copy on another thread
        self._first = 0 if self._ordered else partition.table.position_from(index.start(self._signature))
        self.no_more = partition.sealed  # no new rows come: groups that declared no size are complete
        self.seen_count = 0  # ready rows seen by the largest scan
        self.exhausted = False  # whether a scan went over all rows
        self.grouping: tuple[int | None, bool] | None = None  # (block_size, take_incomplete) of the last ready_groups
        self.gave_up = False  # whether so much had to be looked at that it must be done again off the event loop
        self._left_to_look_at: int | None = _MOST_ON_LOOP

    @property
    def is_heavy(self) -> bool:
        """Whether more rows must be sorted before this view is read than the event loop has time for in one step."""
        return self._ordered is not None and self._ordered.is_heavy(self._partition.table.count)

    def sort_some(self) -> None:
        """Do a step of that, right after the view was made."""
        if self._ordered is not None:
            self._ordered.sort_some(self._rows)

    def leave_loop(self) -> None:
        """Be read by another thread from now on, and as far as it likes."""
        if self._ordered is not None:
            self._ordered = self._ordered.lend(self._rows)
            self._left_to_look_at = None
        else:  # move the start of the scan here, where it may be moved
            self.ready(1)
        self.remembers = False

    def come_back(self) -> None:
        """Keep what was found out on the other thread, which has ended."""
        if self._lender is not None and self._ordered is not None:
            self._lender.take_back(self._ordered)

    # Ready rows

    def ready(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` ready rows, see `View.ready`."""
        if self._ordered is not None:
            ordered: Indexes = self._rows.index[self._first_ordered(self._ordered, limit)[:limit]]
            return ordered
        positions = np.zeros(0, np.int64)
        for positions in self._scan(limit):
            if limit is not None and positions.size >= limit:
                break
        first: Indexes = self._rows.index[positions[:limit]]
        return first

    def ready_groups(self, limit: int | None = None, *, unit: BatchUnit = "sample", block_size: int | None = None,
                     take_incomplete: bool = False) -> Groups:  # fmt: skip
        """Return whole groups, see `View.ready_groups`."""
        self.grouping = (block_size, take_incomplete)
        self._check_blocks(block_size)
        positions, sizes = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for scanned in self._scan_for_groups(limit, block_size):
            positions, sizes = self._whole_groups(scanned, block_size, take_incomplete)
            if limit is not None and (int(sizes.sum()) if unit == "sample" else sizes.size) > limit:
                break
        if limit is not None:
            taken = int(np.searchsorted(np.cumsum(sizes), limit, side="right")) if unit == "sample" else limit
            sizes = sizes[:taken]
            positions = positions[: int(sizes.sum())]
        return Groups(rows=self._rows.index[positions], sizes=sizes)

    def _scan(self, limit: int | None) -> Iterator[Indexes]:
        """Yield the positions of ready rows over growing stretches of the table, the last time over all of it."""
        chunk = max(_LEAST_CHUNK, 2 * (limit or 0))
        positions = np.zeros(0, np.int64)
        start = self._first
        while True:
            end = self._rows.count if limit is None else min(self._rows.count, start + chunk)
            found = start + np.flatnonzero(self._rows.ready_mask(slice(start, end)))
            if positions.size == 0:
                self._remember(found, end)
            positions = np.concatenate([positions, found])
            self.seen_count = max(self.seen_count, positions.size)
            if end == self._rows.count:
                self.exhausted = True
            yield positions
            if end == self._rows.count:
                return
            start, chunk = end, chunk * 2

    def _first_ordered(self, ordered: OrderedRows, count: int | None) -> Indexes:
        """Return the positions of the first ready rows in order, at least `count` unless there are fewer."""
        if self.remembers and self._rows.count != self._partition.table.count:
            self._rows = Readiness(self._partition, self._task, self._batch_spec, self._length)
        positions, looked_at, is_all = ordered.first(self._rows, count, self._left_to_look_at)
        if self._left_to_look_at is not None:
            self._left_to_look_at = max(0, self._left_to_look_at - looked_at)
        self.gave_up |= not is_all and (count is None or positions.size < count)
        self.seen_count = max(self.seen_count, positions.size)
        self.exhausted |= is_all
        return positions

    def _scan_for_groups(self, limit: int | None, block_size: int | None) -> Iterator[Indexes]:
        """Yield the positions of ready rows in order, of more and more groups, with all that are ready of each."""
        if self._ordered is None:
            yield from self._scan(limit)
            return
        count = None if limit is None else max(_LEAST_CHUNK, 2 * limit)
        while True:
            first = self._first_ordered(self._ordered, count)
            is_last = count is None or first.size < count or self.gave_up
            yield first if is_last else self._with_members(self._ordered, first, block_size)
            if is_last:
                return
            count = None if count is None else 2 * count

    def _with_members(self, ordered: OrderedRows, positions: Indexes, block_size: int | None) -> Indexes:
        """Return ready rows, and all others that are ready of their groups, in order."""
        groups = self._partition.groups
        if groups.in_use:
            slots = groups.of_rows[: self._rows.count]
            is_met = np.zeros(int(slots.max()) + 2, np.bool_)  # the last one for rows without a group
            is_met[slots[positions]] = True
            is_met[-1] = False
            members = self._rows.ready_of(np.flatnonzero(is_met[slots]))
            positions = np.concatenate([positions[slots[positions] < 0], members])
        elif block_size is not None:
            blocks = np.unique(self._rows.index[positions] // block_size)
            indexes = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
            positions = self._rows.ready_of(self._rows.find(indexes))
        return ordered.in_order(self._rows, positions)

    def _remember(self, ready: Indexes, end: int) -> None:
        """Have later scans start at the first ready row, or at the end of a stretch that has none."""
        if not self.remembers or self.made_at != self._partition.version:
            return
        self._first = int(ready[0]) if ready.size else end
        first = (
            int(self._rows.index[self._first]) if self._first < self._rows.count else self._partition.table.next_index
        )
        self._index.set_start(self._signature, first)

    # Groups

    def _check_blocks(self, block_size: int | None) -> None:
        if block_size is None or self._partition.groups.in_use:
            return
        step = self._partition.insert_size_gcd
        if step % block_size:
            raise InvalidArgumentError(
                f"n_samples_per_prompt is {block_size}, but samples were put in steps of {step}: blocks of consecutive "
                f"indexes are not groups; put multiples of {block_size}, or name the groups with groups=",
                field="n_samples_per_prompt",
            )

    def _group_ids(self, positions: Indexes, block_size: int | None) -> Indexes:
        """Return one id a group; a row outside of any group is a group of one."""
        return group_ids(self._partition.groups, self._rows.index[positions], positions, block_size)

    def _whole_groups(self, positions: Indexes, block_size: int | None, take: bool) -> tuple[Indexes, Indexes]:
        """Return the ready rows of whole groups, group by group in the order of first members, and group sizes."""
        if positions.size == 0:
            return positions, np.zeros(0, np.int64)
        ids, first, group_of, counts = np.unique(
            self._group_ids(positions, block_size), return_index=True, return_inverse=True, return_counts=True
        )
        whole = counts == self._needed_counts(ids, block_size, take)
        by_first = np.argsort(first, kind="stable")
        rank = np.empty_like(by_first)
        rank[by_first] = np.arange(by_first.size)
        chosen = whole[group_of]
        order = np.argsort(rank[group_of[chosen]], kind="stable")
        return positions[chosen][order], counts[by_first][whole[by_first]]

    def _needed_counts(self, ids: Indexes, block_size: int | None, take: bool) -> Indexes:
        """Return how many members must be ready for each group to be handed out; -1: it cannot be."""
        groups = self._partition.groups
        if groups.in_use:
            explicit = ids >= 0
            slots = np.where(explicit, ids, 0)
            aside = self._dead_lettered_counts(ids, block_size)
            left = groups.members[slots] - groups.failed[slots] - groups.cleared[slots] - aside
            is_broken = left != groups.members[slots]
            can = groups.is_complete(slots, block_size, no_more=self.no_more) & (take | ~is_broken)
            return np.where(explicit, np.where(can, left, -1), 1)
        if block_size is None:
            return np.ones(ids.size, np.int64)
        if not take:
            return np.full(ids.size, block_size, np.int64)
        return self._partition.block_counts(ids, block_size) - self._dead_lettered_counts(ids, block_size)

    def _dead_lettered_counts(self, ids: Indexes, block_size: int | None) -> Indexes:
        """Return how many members of groups the task has dead-lettered.

        To the task they are failed members; those that failed or were cleared since are not counted here.
        """
        positions = self._task.dead_lettered()
        state = self._rows.state[positions]
        return self._count_by_group(ids, positions[(state == LIVE) | (state == HELD)], block_size)

    def _count_by_group(self, ids: Indexes, positions: Indexes, block_size: int | None) -> Indexes:
        counts = np.zeros(ids.size, np.int64)
        if positions.size:
            found, number = np.unique(self._group_ids(positions, block_size), return_counts=True)
            where = np.minimum(np.searchsorted(found, ids), found.size - 1)
            counts = np.where(found[where] == ids, number[where], 0)
        return counts

    # Anything else about rows

    def lengths(self, rows: Indexes) -> Indexes:
        """Return token counts, see `View.lengths`."""
        return self._at(rows, self._rows.known_lengths, -1)

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return row lengths of a jagged field, see `View.field_lengths`."""
        stored = self._partition.cells.fields.get(field)
        return np.full(len(rows), -1, np.int64) if stored is None else self._at(rows, stored.lengths, -1)

    def values(self, column: str, rows: Indexes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return a custom_meta column, see `View.values`."""
        arrays = self._partition.meta.arrays(column)
        positions = self._partition.table.find(np.asarray(rows, np.int64))
        if arrays is None:
            return np.zeros(positions.size, np.float64), np.zeros(positions.size, np.bool_)
        return arrays[0][positions], arrays[1][positions] & (positions >= 0)

    def group_names(self, rows: Indexes) -> list[str | None]:
        """Return the explicit group of each row, see `View.group_names`."""
        positions = self._partition.table.find(np.asarray(rows, np.int64))
        names = self._partition.groups.names_of(positions)
        return [name if position >= 0 else None for name, position in zip(names, positions.tolist(), strict=True)]

    def states(self, rows: Indexes) -> list[str]:
        """Return the state of each row, see `View.states`."""
        return [STATE_NAMES[code] for code in self._at(rows, lambda positions: self._rows.state[positions], CLEARED)]

    def rows(self) -> Indexes:
        """Return all rows that are not cleared, see `View.rows`."""
        present: Indexes = self._rows.index[: self._rows.count][self._rows.state[: self._rows.count] != CLEARED]
        return present

    def _at(self, rows: Indexes, read: Callable[[Indexes], NDArray[Any]], missing: int) -> Indexes:
        positions = self._partition.table.find(np.asarray(rows, np.int64))
        found = positions >= 0
        result = np.full(positions.size, missing, np.int64)
        result[found] = read(positions[found])
        return result

    # For the planner

    def is_settled(self) -> bool:
        """Whether no row can become ready any more, given that no new rows come. What is leased may come back."""
        if self._task.leased_count:
            return False
        if self.is_plain and self.exhausted:
            return self.unready_count == 0
        rows = slice(0, self._rows.count)
        state, open_rows = self._rows.state[rows], self._rows.claim[rows] == UNCLAIMED
        pending = open_rows & ((state == LIVE) | (state == HELD)) & ~self._rows.ready_mask(rows)
        if not pending.any():
            return True
        positions = np.flatnonzero(pending)
        pending[positions[self._is_dead_group(positions)]] = False
        pending &= ~self._excluded(rows)
        return not pending.any()

    def _excluded(self, rows: slice) -> NDArray[np.bool_]:
        """Return the rows that `where` rules out: by a value, or for lack of one when their data is there."""
        excluded = np.zeros(self._rows.count, np.bool_)
        produced = self._rows.produced(rows)
        for condition in self._batch_spec.where:
            holds, present = self._rows.condition(condition, rows)
            excluded |= np.where(present, ~holds, produced)
        return excluded

    def _is_dead_group(self, positions: Indexes) -> NDArray[np.bool_]:
        """Return for each row whether its group can no longer be whole, given that no new rows come."""
        if self.grouping is None or positions.size == 0:
            return np.zeros(positions.size, np.bool_)
        block_size, take = self.grouping
        ids = self._group_ids(positions, block_size)
        groups = self._partition.groups
        if groups.in_use:
            slots = np.where(ids >= 0, ids, 0)
            aside = self._dead_lettered_counts(ids, block_size)
            is_broken = (groups.failed[slots] + groups.cleared[slots] + aside) > 0
            is_short = ~groups.is_complete(slots, block_size, no_more=True)
            dead: NDArray[np.bool_] = (ids >= 0) & (is_short | (is_broken & (not take)))
            return dead
        if block_size is None or take:
            return np.zeros(positions.size, np.bool_)
        blocks, group_of = np.unique(ids, return_inverse=True)
        aside = self._dead_lettered_counts(blocks, block_size)
        is_broken = self._partition.block_counts(blocks, block_size) - aside < block_size
        return np.asarray(is_broken[group_of], np.bool_)

    @property
    def is_plain(self) -> bool:
        """Whether rows become ready one by one, without groups or conditions that could rule them out."""
        return self.grouping is None and not self._batch_spec.where

    @property
    def unready_count(self) -> int:
        """Rows left for the task that were not ready, once a scan was exhausted."""
        return self._task.backlog - self.seen_count

    def end(self) -> EndCounts:
        """Return the end; nothing may have changed since the view was made, of which the sampler planned nothing."""
        consumed, inserted = self._task.consumed_count, self._partition.inserted_count
        if consumed == inserted:
            return EndCounts(consumed=consumed)
        rows = slice(0, self._rows.count)
        state, unclaimed = self._rows.state[rows], self._rows.claim[rows] == UNCLAIMED
        failed = int(np.count_nonzero(unclaimed & (state == FAILED)))
        is_open = unclaimed & ((state == LIVE) | (state == HELD))
        is_excluded = is_open & self._excluded(rows)
        excluded = int(np.count_nonzero(is_excluded))
        kept = int(np.count_nonzero(is_open)) - excluded
        left_over = kept if self.grouping is None else self._count_in_whole_groups(self.grouping)
        dead_lettered = self._task.dead_lettered_count
        return EndCounts(
            consumed=consumed,
            cleared=inserted - consumed - failed - dead_lettered - excluded - kept,
            failed=failed,
            dead_lettered=dead_lettered,
            excluded=excluded,
            in_incomplete_groups=kept - left_over,
            left_over=left_over,
        )

    def _count_in_whole_groups(self, grouping: tuple[int | None, bool]) -> int:
        """Return how many ready rows are of groups that can be delivered."""
        ready = np.flatnonzero(self._rows.ready_mask(slice(0, self._rows.count)))
        ids, counts = np.unique(self._group_ids(ready, grouping[0]), return_counts=True)
        return int(counts[counts == self._needed_counts(ids, *grouping)].sum())

    def check_lengths(self) -> None:
        """Refuse to wait where rows are ready but for a length, and no sample of the partition has one."""
        source = self._length
        if source is None or self._partition.meta.has(source.key):
            return
        field = self._partition.cells.fields.get(source.field) if source.field else None
        if field is not None and field.length is not None and not field.length.is_blank:
            return
        rows = slice(0, self._rows.count)
        if (self._rows.open_mask(rows) & self._rows.produced(rows) & self._rows.allowed(rows)).any():
            raise MissingLengthError(
                f"no sample has custom_meta[{source.key!r}], which the sampler needs: put "
                f"custom_meta=[{{{source.key!r}: number of tokens}}, ...] with the samples, or name a "
                f"jagged field as length_field",
                field=source.key,
            )

    def still_ready(self, rows: Indexes) -> Indexes | None:
        """Return the positions of planned rows in the table of now, None where one of them is not ready."""
        positions = self._partition.table.find(rows)
        if bool((positions < 0).any()):
            return None
        now = Readiness(self._partition, self._task, self._batch_spec, self._length)
        return positions if bool((now.open_mask(positions) & now.produced(positions)).all()) else None


def _token_counts(column: str, values: NDArray[Any]) -> Indexes:
    """Return the values of a custom_meta column as token counts; whole numbers do as doubles too."""
    is_number = values.dtype.kind in "if"
    wrong = ~(values >= 0) if is_number else np.ones(values.size, np.bool_)
    if values.dtype.kind == "f":
        wrong |= ~np.isfinite(values) | (values != np.floor(values))
    if wrong.any():
        raise InvalidArgumentError(
            f"custom_meta column {column!r} holds {values[wrong][0]!r}; a token count is a whole number of 0 or more: "
            f"put or set another value, or clear the sample",
            field=column,
        )
    return values.astype(np.int64)
