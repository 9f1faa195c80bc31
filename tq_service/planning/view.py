"""The search for the plan that a claim receives next.

`Readiness` tests whether rows are ready, `Scan` finds the first ready rows, and `PartitionView` presents these rows to
the sampler. `Search` checks the sampler's plan or, at the end of the task, counts the samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError, MissingLengthError, SamplerError
from tq_service.planning.eviction import MOST_EVICTED_AT_ONCE, EvictionSearch
from tq_service.planning.grouping import Grouping, first_in_order, grouping_of, in_order
from tq_service.planning.ratio import check_batch, insert_ratio
from tq_service.planning.staleness import StalenessBound, check_bounded_claim
from tq_service.planning.totals import with_totals
from tq_service.results import Lack
from tq_service.schema import BatchUnit, Blocks, EndCounts, Layout
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import RecordedPlan, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import (
    TOTAL_LENGTHS,
    BatchSpec,
    ClaimRequest,
    Condition,
    Groups,
    Indexes,
    LengthSource,
    MustBeAwaited,
    Order,
    Plan,
)
from tq_service.state.table import CLEARED, FAILED, HELD, LAST_RESERVED, LIVE, STATE_NAMES, UNCLAIMED

_MOST_IN_GROUPS_ON_LOOP = 1 << 15  # maximum number of ready rows to search for complete groups on the event loop
_MOST_NAMED = 3  # maximum number of samples listed in an error

# The properties of a claim that determine its ready rows: data fields, conditions, the sampler's length source, and
# whether it claims held rows. If "excluded" replaces the length source, the key selects the rows that the conditions
# exclude.
ScanKey: TypeAlias = tuple[tuple[str, ...], tuple[Condition, ...], LengthSource | Literal["excluded"] | None, bool]

_AT_ONCE = 1 << 14
_LEAST_CHUNK = 1024
_MOST_SCANNED_ON_LOOP = 1 << 20  # rows; without conditions, a scan takes 3 ms. See `Readiness.at_once`
_MOST_ORDERED_ON_LOOP = 1 << 15  # maximum number of rows to sort on the event loop
_WIDE_GAP = 1024  # number of unready rows between two ready rows that makes a gap wide
_MOST_APART = 1 << 12
_MOST_SCAN_STARTS = 64
_MOST_SCAN_START_BYTES = 2**20
_VALUE_BYTES = 64  # memory per value, not including its text
_LEFT: ScanKey = ((), (), None, False)  # all unconsumed rows; unique, because claims for live rows specify fields

# The global index at which a scan starts, and a few lower indexes of rows that may also be ready, in ascending order.
Start: TypeAlias = tuple[int, Indexes]
_NONE: Final = np.zeros(0, np.int64)
_NO_START: Final = (0, _NONE)

Rows: TypeAlias = slice | Indexes  # a range of table positions, or an array of positions


class Requirement(NamedTuple):
    """A condition that an unconsumed live row must meet to be ready for a task.

    Attributes:
        lack: reason to report for rows that do not meet the condition.
        name: name of the field or column.
        is_met: function that returns which rows meet the condition, as a mask of shape `(n,)`.
    """

    lack: Lack
    name: str
    is_met: Callable[[Rows], NDArray[np.bool_]]


class Readiness:
    """The readiness requirements of one kind of claim, tested against the current rows of a partition.

    While the table is pinned, another thread may also test rows.

    Attributes:
        requirements: conditions that every row of a plan must meet. Explanations count the rows that fail each
            condition.
        bound: staleness bound for plans, or None.
    """

    def __init__(
        self, partition: Partition, task: TaskLedger, batch_spec: BatchSpec, length: LengthSource | None
    ) -> None:
        self.table = partition.table
        self.values_of = partition.meta.typed
        where = partition.resolved(batch_spec.where)
        self.key = (batch_spec.data_fields, where, length, batch_spec.held)
        # If the sampler does not need lengths, batch statistics use the lengths in this column.
        self._length = LengthSource(key=TOTAL_LENGTHS) if length is None else length
        self._state = HELD if batch_spec.held else LIVE
        self._may_hold_later = [condition.may_hold_later(partition.policies) for condition in batch_spec.where]
        self.partition = partition
        self.task = task
        self.bound: StalenessBound | None = None
        self.requirements = [
            Requirement(Lack.FIELD, name, partial(partition.cells.produced, (name,))) for name in batch_spec.data_fields
        ]
        for each in where:
            self.requirements.append(Requirement(Lack.WHERE, each.column, partial(self._holds, each)))
        if length is not None:
            self.requirements.append(Requirement(Lack.LENGTH, length.column, self.has_length))

    @property
    def at_once(self) -> int:
        """Number of rows that the event loop may test in one step. Testing a condition on text takes 0.1 us per row."""
        return _AT_ONCE // max(1, len(self.key[1]))

    def ready(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the ready rows, of shape `(n,)`."""
        return self.ready_but_for(rows)

    def ready_but_for(self, rows: Rows, *lacks: Lack) -> NDArray[np.bool_]:
        """Return a mask of shape `(n,)`: whether each row meets all requirements, ignoring those listed in `lacks`."""
        mask: NDArray[np.bool_] = self.partition.state.data[rows] == self._state
        mask &= self.task.claim.data[rows] == UNCLAIMED
        for each in self.requirements:
            if each.lack not in lacks:
                mask &= each.is_met(rows)
        if self.bound is not None and Lack.OLDER not in lacks:
            mask &= self.bound.allows(rows)
        return mask

    def excluded(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the rows that `where` excludes permanently.

        A row is excluded if its value can never satisfy a condition. A row is also excluded if it has all its data, but
        not the value that a condition tests.
        """
        mask = np.zeros(self.table.index[rows].size, np.bool_)
        for condition, may_hold_later in zip(self.key[1], self._may_hold_later, strict=True):
            holds, present = self.partition.meta.holds(condition, rows)
            is_known = present & (not may_hold_later)
            mask |= ~holds & (is_known | (~present & self.partition.cells.produced(self.key[0], rows)))
        return mask

    def evictable(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask that marks the unconsumed live rows among `rows` that `where` permanently excludes."""
        mask: NDArray[np.bool_] = self.partition.state.data[rows] == LIVE
        mask &= self.task.claim.data[rows] == UNCLAIMED
        return mask & self.excluded(rows) if self.key[1] else np.zeros(mask.size, np.bool_)

    @property
    def lacks_sequences(self) -> bool:
        """Whether all requested fields have data but none of them contains sequences."""
        cells, names = self.partition.cells, self.key[0]
        known = [cells.fields.get(name) for name in names]
        is_put = all(field is not None and field.produced_count for field in known)
        return is_put and not cells.sequence_fields(names)

    def has_length(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the rows that have a length for the sampler, including invalid lengths.

        An invalid token count is an error only for claims that would deliver the row (see `lengths`). If a row has no
        length because it lacks a requested field, only the missing field is reported as a reason.
        """
        source = self._length
        if source.is_longest_sequence and not self.lacks_sequences:
            return np.ones(self.table.index[rows].size, np.bool_)
        has_length = self.values_of(source.column, rows)[1]
        if source.field is not None:
            has_length = has_length | (self.field_lengths(source.field, rows) >= 0)
        texts = self.partition.meta.json_values(source.column, rows)
        return has_length if texts is None else has_length | (texts != None)  # noqa: E711  (elementwise)

    def lengths(self, rows: Rows) -> Indexes:
        """Return the token counts from the sampler's length source. Unknown counts are -1.

        Raises:
            InvalidArgumentError: a row's length is not a valid token count.
        """
        counts, present = self.counts(rows)
        lengths = np.full(present.size, -1) if present.all() else self._row_lengths(rows)
        lengths[present] = counts
        return lengths

    def counts(self, rows: Rows) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the token counts in the length source's column, and a `(n,)` mask that marks the rows with a count.

        Raises:
            InvalidArgumentError: a row's length is not a valid token count.
        """
        column = self._length.column
        values, present = self.values_of(column, rows)
        values = values[present]
        is_count = _is_token_count(values)
        if not is_count.all():
            self._refuse_length(rows, int(np.flatnonzero(present)[~is_count][0]), values[~is_count].tolist()[0])
        texts = self.partition.meta.json_values(column, rows)
        if texts is not None and (found := np.flatnonzero(texts != None)).size:  # noqa: E711  (elementwise)
            self._refuse_length(rows, int(found[0]), texts[found[0]])
        return values, present

    def _row_lengths(self, rows: Rows) -> Indexes:
        """Compute the lengths of rows from their fields. Unknown lengths are -1."""
        if not self._length.is_longest_sequence:
            return self.field_lengths(self._length.field, rows)
        lengths = np.full(self.table.index[rows].size, -1)
        for sequences in self.partition.cells.sequence_fields(self.key[0]):
            np.maximum(lengths, sequences.lengths(rows), out=lengths)
        return lengths

    def _refuse_length(self, rows: Rows, position: int, value: object) -> NoReturn:
        """Raise InvalidArgumentError for a row whose length is not a valid token count."""
        column = self._length.column
        raise InvalidArgumentError(
            f"custom_meta column {column!r} of sample {self.table.index[rows][position]} is {value!r:.80}; expected a "
            f"token count, which is an integer from 0 to 2**63 - 1. Put or set a different value, or clear the sample.",
            field="sampler_config",
            metadata={"column": column},
        )

    def known_lengths(self, rows: Indexes) -> Indexes | None:
        """Return the token counts of the rows, or None if any count is unknown or invalid."""
        with contextlib.suppress(InvalidArgumentError):
            lengths = self.lengths(rows)
            if bool((lengths >= 0).all()):
                return lengths
        return None

    def field_lengths(self, name: str | None, rows: Rows) -> Indexes:
        """Return the lengths of a field's rows (see `Field.lengths`), with -1 for rows without the field."""
        field = None if name is None else self.partition.cells.fields.get(name)
        return np.full(self.table.index[rows].size, -1) if field is None else field.lengths(rows)

    def _holds(self, condition: Condition, rows: Rows) -> NDArray[np.bool_]:
        return self.partition.meta.holds(condition, rows)[0]


def _is_token_count(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the custom_meta values that are token counts. Floats with integral values are accepted."""
    if values.dtype.kind not in "if":
        return np.zeros(values.size, np.bool_)
    is_count: NDArray[np.bool_] = values >= 0
    if values.dtype.kind == "f":
        is_count &= (values < 2.0**63) & (values == np.floor(values))
    return is_count


@dataclass(slots=True, eq=False)
class ScanWatch:
    """Tracks row changes during scans that run off the event loop or take several event-loop steps.

    Attributes:
        found: start positions for later scans, as determined by the watched scans.
        lowest: lowest global index of any row written or reopened during the watched scans. None if no rows changed.
    """

    found: dict[ScanKey, Start] = field(default_factory=dict)
    lowest: int | None = None


class ScanStarts:
    """Positions where scans for a task's ready rows start, by kind of claim. These positions depend only on the rows.

    With start positions, the cost of a claim depends on the size of its batch, not on the size of the partition. A few
    ready rows may lie before a start position, with many unready rows in between. Such rows may be members of a group
    that never becomes complete, or the few rows that satisfy `where`. A write to an earlier row moves the start
    position back to that row. The number of start positions is limited, so positions for unused kinds of claims do not
    accumulate.
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
        """Stop listening to row changes and resets."""
        self._partition.on_rows.remove(self._on_rows)
        self._partition.on_reset.remove(self._on_reset)

    def _on_reset(self, task_name: str) -> None:
        """Restart scans from the first row, because a reset makes rows ready without writing to them."""
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
        """Save the start positions that scans find in the `with` block, so that later scans can use them.

        If rows change during the block, the saved positions are moved back to the first changed row.
        """
        watch = ScanWatch()
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)
            for key, start in watch.found.copy().items():
                self.set(key, start if watch.lowest is None else _lowered(start, watch.lowest))

    def get(self, key: ScanKey) -> Start:
        """Return the start position of a scan, and the earlier rows that the scan must also test."""
        return self._starts.get(key, _NO_START)

    def set(self, key: ScanKey, start: Start) -> None:
        """Set the start position of later scans, and the earlier rows that these scans must also test."""
        if key not in self._starts:
            size = sum(_VALUE_BYTES + len(str(value)) for condition in key[1] for value in condition.values)
            if len(self._starts) >= _MOST_SCAN_STARTS or self._used_bytes + size > _MOST_SCAN_START_BYTES:
                self._clear()
            self._used_bytes += size
        self._starts[key] = start


def _lowered(start: Start, first: int) -> Start:
    """Return a start position, moved back to the row `first` if that row is earlier."""
    return start if first >= start[0] else (first, start[1][: np.searchsorted(start[1], first)])


class Scan:
    """Searches for ready rows, starting at the first ready row of an earlier scan and stopping as early as possible.

    On the event loop, a scan runs in a single step, and raises `MustBeAwaited` if it would take too long. Off the event
    loop, a scan is split into parts and releases the interpreter lock after each part.

    Attributes:
        rows: object that tests whether rows are ready.
        count: number of rows in the table when the scan was created.
        is_on_loop: whether the scan runs in a single event-loop step.
        at_once: number of rows to scan in each part or, on the event loop, the maximum number of rows to scan.
        seen_count: number of ready rows found so far.
        exhausted: whether all rows have been tested.
    """

    def __init__(
        self,
        rows: Readiness,
        starts: ScanStarts,
        orders: tuple[Order, ...] = (),
        *,
        watch: ScanWatch | None = None,
        look_past: int = 0,
        of: Literal["ready", "left", "evictable"] = "ready",
    ) -> None:
        """Prepare a scan.

        Args:
            rows: object that tests whether rows are ready.
            starts: start positions of scans.
            orders: columns that determine the order of the ready rows, most significant first.
            watch: object that records row changes during the scan. None if the scan runs in a single event-loop step.
            look_past: number of ready rows at the start that the scan skips and leaves for other claims.
            of: kind of rows to find. "ready" finds ready rows. "left" finds all unconsumed rows, whether or not they
                are ready. "evictable" finds rows that a claim may evict because `where` excludes them.
        """
        self._key: ScanKey = rows.key
        self._mask: Callable[[Rows], NDArray[np.bool_]] = rows.ready
        # A staleness bound permits different rows after each plan, so a bounded scan starts at the first unconsumed
        # row.
        self._moves_start = of != "ready" or rows.bound is None
        if of == "left" or not self._moves_start:
            self._key = _LEFT
        if of == "left":
            self._mask = rows.task.is_left
        elif of == "evictable":
            self._key, self._mask = (*rows.key[:2], "excluded", False), rows.evictable
        self.rows = rows
        self.orders = orders
        self.count = rows.table.count
        self.is_on_loop = watch is None
        self.at_once = rows.at_once if rows.key[1] else _MOST_SCANNED_ON_LOOP
        self.seen_count = 0
        self.exhausted = False
        self._starts = starts
        self._watch = watch
        self._look_past = look_past
        self._loop_budget = self.at_once

    def has(self, count: int) -> bool:
        """Return whether at least `count` rows are ready. Return False if the test would block the event loop."""
        with contextlib.suppress(MustBeAwaited):
            return any(found.size >= count for found, _ in self.first(count))
        return False

    def first(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Yield ever longer arrays of the first ready rows' positions, in order, each with an "is last" flag.

        Args:
            least: approximate size of the first array. If None, all rows are yielded at once.

        Raises:
            MustBeAwaited: the scan would take too long on the event loop.
        """
        least = None if least is None else least + self._look_past
        for found, is_last in self._first_in_order(least) if self.orders else self._first(least):
            yield found[self._look_past :], is_last

    def _first(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Test growing ranges of rows up to the table's end. After each range, yield all ready rows found so far."""
        found, start = self._first_candidates()
        size = self.count if least is None else max(_LEAST_CHUNK, least)
        while True:
            end = min(self.count, start + size)
            while start < end:
                if self._loop_budget <= 0 and self.is_on_loop:
                    self._move_start(found, start)
                    raise MustBeAwaited
                part_end = min(end, start + self.at_once)
                more = start + self._mask(slice(start, part_end)).nonzero()[0]
                found = np.concatenate([found, more]) if found.size else more
                self._loop_budget -= part_end - start
                start = part_end
            self._move_start(found, end)
            self.seen_count = max(self.seen_count, found.size)
            self.exhausted |= end == self.count
            yield found, end == self.count
            if end == self.count:
                return
            size *= 2

    def _first_in_order(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Find all ready rows, and yield ever longer arrays of the rows that come first in order."""
        if self.is_on_loop and self.count - self._first_candidates()[1] > _MOST_ORDERED_ON_LOOP:
            raise MustBeAwaited
        ((ready, _),) = self._first(None)
        while True:
            found = first_in_order(self.rows.values_of, self.orders, ready, least)
            yield found, found.size == ready.size
            if least is None or found.size == ready.size:
                return
            least *= 4

    def _first_candidates(self) -> tuple[Indexes, int]:
        """Return the positions of the ready rows that precede the scan's start, and the start position."""
        start, apart = self._starts.get(self._key)
        if apart.size:
            apart = self.rows.table.find(apart)
            apart = apart[apart >= 0]
            apart = apart[self._mask(apart)]
        return apart, self.rows.table.position_from(start)

    def _move_start(self, found: Indexes, end: int) -> None:
        """Move the start of later scans to the first ready row, or past a wide gap after the first few ready rows.

        Args:
            found: positions of all ready rows before `end`, in ascending order.
            end: position immediately after the last tested row.
        """
        if not self._moves_start:
            return
        table, start, apart = self.rows.table, int(found[0]) if found.size else end, _NONE
        if end - start - found.size > _WIDE_GAP:
            following = np.append(found[1 : _MOST_APART + 1], end)[:_MOST_APART]
            wide = np.flatnonzero(following - found[: following.size] > _WIDE_GAP)
            if wide.size:
                apart = table.index[found[: wide[-1] + 1]]
                start = int(following[wide[-1]])
        index = int(table.index[start]) if start < table.count else table.next_index
        if self._watch is None:
            self._starts.set(self._key, (index, apart))
        else:
            self._watch.found[self._key] = index, apart

    def stretches(self, size: int, at_once: int) -> Iterator[slice]:
        """Yield consecutive ranges of the table.

        The first range has `size` rows. Later ranges grow to at most `at_once` rows.

        Raises:
            MustBeAwaited: see `first`.
        """
        start = 0
        while start < self.count:
            if self.is_on_loop and start >= at_once:
                raise MustBeAwaited
            end = min(self.count, start + size)
            yield slice(start, end)
            start, size = end, min(at_once, 2 * size)


class PartitionView:
    """The rows of a partition from the perspective of one task. Implements `tq_service.state.plan.View`.

    On the event loop, the view shows the current state, and raises `MustBeAwaited` if a call would take too long. Off
    the event loop, values may change while the sampler uses the view, so each plan is validated again when it is
    recorded. Positions do not change while the table is pinned.

    Attributes:
        scan: scan that finds ready rows.
        no_more: True if no more rows can be inserted. In that case, groups without a declared size count as complete.
        plan_count: see `View`.
        grouping: groups that the sampler requested most recently, or None.
    """

    def __init__(self, new_scan: Callable[..., Scan], *, no_more: bool = False) -> None:
        self._new_scan = new_scan
        self.scan = new_scan()
        self._rows = rows = self.scan.rows
        self.no_more = rows.partition.sealed or no_more
        self.grouping: Grouping | None = None
        self.plan_count = rows.task.serial - LAST_RESERVED

    def ready(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` ready rows (see `View.ready`)."""
        for found, _ in self.scan.first(limit):
            if limit is not None and found.size >= limit:
                break
        found = found[:limit]
        self._check_lengths(found)
        return self._rows.table.index[found]

    def _check_lengths(self, positions: Indexes) -> None:
        """Raise InvalidArgumentError if a row's length is not a valid token count."""
        if self._rows.key[2] is not None:
            self._rows.counts(positions)

    def ready_groups(self, limit: int | None = None, *, unit: BatchUnit = "sample", block_size: int | None = None,
                     take_incomplete: bool = False, blocks: Blocks = "aligned") -> Groups:  # fmt: skip
        """Return complete groups (see `View.ready_groups`).

        Raises:
            MustBeAwaited: the members of a group are so far apart that finding them would block the event loop.
        """
        self.grouping = grouping_of(
            self._rows.partition,
            self._rows.task,
            block_size,
            blocks,
            take_incomplete=take_incomplete,
            unit="rollout" if unit == "rollout" else "group",
        )
        self.grouping.check()
        # Groups that may begin at any index must not depend on the order of rows, so they are formed from all ready
        # rows.
        is_whole_scan = limit is None or (self.grouping.blocks == "anywhere" and bool(self.scan.orders))
        for found, is_last in self.scan.first(None if is_whole_scan else max(_LEAST_CHUNK, limit or 0)):
            if self.scan.is_on_loop and found.size > _MOST_IN_GROUPS_ON_LOOP:
                raise MustBeAwaited
            positions = found
            if self.scan.orders and not is_last:
                members = self.grouping.members(found)
                positions = in_order(self._rows.values_of, self.scan.orders, members[self._rows.ready(members)])
            positions, sizes = self.grouping.whole(positions, no_more=self.no_more)
            if limit is not None and (positions if unit == "sample" else sizes).size >= limit:
                break
        if limit is not None:
            taken = int(np.searchsorted(np.cumsum(sizes), limit, side="right")) if unit == "sample" else limit
            sizes = sizes[:taken]
            positions = positions[: int(sizes.sum())]
        self._check_lengths(positions)
        return Groups(rows=self._rows.table.index[positions], sizes=sizes)

    def left(self, limit: int | None = None) -> Indexes:
        """Return the unconsumed rows that `where` does not exclude (see `View.left`)."""
        for found, _ in self._new_scan(of="left").first(limit):
            left = found[~self._rows.excluded(found)]
            if limit is not None and left.size >= limit:
                break
        return self._rows.table.index[left[:limit]]

    def lengths(self, rows: Indexes) -> Indexes:
        """Return each row's token count (see `View.lengths`)."""
        return self._at(rows, self._rows.lengths, -1)

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return the lengths of a field's rows (see `View.field_lengths`)."""
        return self._at(rows, partial(self._rows.field_lengths, field), -1)

    def values(self, column: str, rows: Indexes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the values of a custom_meta column (see `View.values`)."""
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        values, present = self._rows.values_of(column, positions)
        return values, present & (positions >= 0)

    def group_names(self, rows: Indexes) -> list[str | None]:
        """Return each row's explicit group name (see `View.group_names`)."""
        return self._names(rows, self._rows.partition.groups.names_of)

    def rollout_names(self, rows: Indexes) -> list[str | None]:
        """Return each row's rollout name (see `View.rollout_names`)."""
        return self._names(rows, self._rows.partition.groups.rollout_names_of)

    def _names(self, rows: Indexes, names_of: Callable[[Indexes], list[str | None]]) -> list[str | None]:
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        return [
            name if position >= 0 else None
            for name, position in zip(names_of(positions), positions.tolist(), strict=True)
        ]

    def use_counts(self, rows: Indexes) -> Indexes:
        """Return how often each row was delivered without being consumed (see `View.use_counts`)."""
        return self._at(rows, self._rows.task.uses.data.__getitem__, 0)

    def states(self, rows: Indexes) -> list[str]:
        """Return the state of each row (see `View.states`)."""
        return [STATE_NAMES[code] for code in self._at(rows, self._rows.partition.state.data.__getitem__, CLEARED)]

    def rows(self) -> Indexes:
        """Return all rows that have not been cleared (see `View.rows`)."""
        present = np.flatnonzero(self._rows.partition.state[: self.scan.count] != CLEARED)
        return self._rows.table.index[present]

    def _at(self, rows: Indexes, read: Callable[[Indexes], NDArray[Any]], missing: int) -> Indexes:
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        found = positions >= 0
        result = np.full(positions.size, missing, np.int64)
        result[found] = read(positions[found])
        return result


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that must be either recorded in the event-loop step in which it is returned, or discarded.

    Attributes:
        plan: plan to record.
        positions: current table positions of the rows in `plan.named`.
        grouping: groups that the sampler requested for the plan. None if the sampler did not request groups.
        readiness: requirements that every row of the plan meets.
        evicted: units that the claim evicts when the plan is recorded, or None. The plan contains no rows of these
            units.
        lengths: token counts of the rows in `plan.rows`. None if they are unknown or the claim comes from a queue
            worker.
    """

    plan: RecordedPlan
    positions: Indexes
    grouping: Grouping | None
    readiness: Readiness
    evicted: Evicted | None = None
    lengths: Indexes | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """The result of a search that found no plan. Another search is pointless until the state changes.

    Without a recorded miss, each inserted row and each claim at the end of a partition would trigger another scan.

    Attributes:
        state_version: state version of the partition when the search started.
        row_version: row version that the partition must reach before another search can succeed.
        consumed: numbers of rows that the task had consumed and leased when the search started. None if these numbers
            do not affect whether the task ends.
        leased: number of rows that all tasks together had leased when the search started. None if the claim does not
            evict samples.
    """

    state_version: int = -1
    row_version: int = 0
    consumed: tuple[int, int] | None = None
    leased: int | None = None

    def is_current(self, partition: Partition, task: TaskLedger) -> bool:
        """Return whether so little has changed since this search that a new search would also fail."""
        return (
            partition.state_version == self.state_version
            and partition.row_version < self.row_version
            and self.consumed in (None, (task.consumed_count, task.leased_count))
            and (self.leased is None or self.leased == leased_by_all(partition))
        )


def leased_by_all(partition: Partition) -> int:
    """Return the number of leased rows in a partition. A row leased by several tasks counts once per task."""
    return sum(task.leased_count for task in partition.tasks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFound(Miss):
    """A search result that marks the end of a task's data. No plan can follow unless the state changes."""

    end: EndCounts


Found: TypeAlias = Planned | Miss

NOT_LOOKED = Miss()  # never current: no search was made, or its result has been invalidated


class Search:
    """A single search for a claim's next plan, or for the end of the task's data.

        plan of `view` for `wanted` -> conclude
            |none
        begins_last? -yes-> plan of `view` for `wanted` -> conclude
            |no
        conclude

    If the claim evicts units that its task can never receive, call `look_for_evicted` before `conclude`.

    A search only reads the state, and does not run the sampler itself. If a search takes a single event-loop step, its
    result is consistent. If a search takes several steps, a plan is valid while all its rows are ready. In contrast, an
    end of the data is valid only if the state is unchanged since the search started.

    Attributes:
        view: view of the partition that is passed to the sampler.
        wanted: plan request for the sampler.
        evicted: units that the claim evicts, or None. This attribute is set by `conclude`.
    """

    def __init__(
        self,
        partition: Partition,
        task: TaskLedger,
        starts: ScanStarts,
        request: ClaimRequest,
        length: LengthSource | None,
        *,
        watch: ScanWatch | None = None,
        look_past: int = 0,
    ) -> None:
        """Start a search. `length` is the sampler's length source. For `watch` and `look_past`, see `Scan`."""
        self._partition = partition
        self._task = task
        self._request = request
        self._spec = request.batch_spec
        self._rows = Readiness(partition, task, self._spec, length)
        self._new_scan = partial(Scan, self._rows, starts, self._spec.order_by, watch=watch, look_past=look_past)
        self._new_plain_scan = partial(Scan, self._rows, starts, watch=watch)
        self._candidates = _NONE  # global indexes of candidates for eviction
        self.evicted: Evicted | None = None
        self._begun_at = self._marks
        self._consumed = task.consumed_count, task.leased_count
        self._end: EndFound | None = None
        self.wanted = request.plan_request
        self._ratio = None if task.outstanding is None else insert_ratio(partition, task)
        if self._ratio is not None:
            check_batch(self._ratio, self.wanted.min_size)
        self._bound_staleness(no_more=False)
        self.view = PartitionView(self._new_scan)

    @property
    def _marks(self) -> tuple[int, int, int, int, int]:
        """Versions of all state that affects plans. Equal versions mean that nothing has changed."""
        partition, task = self._partition, self._task
        return *partition.version, task.serial, task.leased_count, task.epoch

    @property
    def is_current(self) -> bool:
        """Whether the state is unchanged since the search started."""
        return self._marks == self._begun_at

    @property
    def exceeds_ratio(self) -> bool:
        """Whether every plan would exceed the number of samples per insert that the task's admission allows."""
        return self._ratio is not None and self._ratio.exceeded_by(self.wanted.min_size)

    @property
    def kept_groups(self) -> int | None:
        """Value of `TaskFacts.kept_groups` for the groups that the sampler requested."""
        return None if self.view.grouping is None else self.view.grouping.kept

    # End of the task

    def begins_last(self) -> bool:
        """Prepare for the last batch, which may be short. Return False if more rows can become ready.

        Raises:
            MustBeAwaited: the check would block the event loop for too long.
        """
        is_closed = self._partition.sealed or (self._spec.finite and self._partition.may_end_finite)
        if not is_closed or not self.is_current:
            return False
        end = self._count_end()
        if end is None:
            return False
        state_version, row_version, *_ = self._begun_at
        self._end = EndFound(state_version, row_version + 1, self._consumed, end=end)
        self.wanted = replace(self.wanted, min_size=self.wanted.total_size if self._spec.drop_last else 1)
        self._bound_staleness(no_more=True)
        self.view = PartitionView(self._new_scan, no_more=True)
        return True

    def _bound_staleness(self, *, no_more: bool) -> None:
        """Limit plans to the rows that the task's staleness bound permits, if the task's admission sets such a bound.

        Raises:
            InvalidArgumentError: the claim's batch size or unit differs from that of the admission.
        """
        outstanding, rows, orders = self._task.outstanding, self._rows, self._spec.order_by
        if outstanding is None or outstanding.admission.max_staleness is None:
            return
        admission = outstanding.admission
        if not no_more:
            check_bounded_claim(self._request, admission)
        rows.bound = StalenessBound(
            self._partition,
            self._task,
            admission,
            left=partial(self._all_of, "left"),
            is_ready=lambda positions: rows.ready_but_for(positions, Lack.OLDER),
            in_order=partial(in_order, rows.values_of, orders) if orders else np.sort,
            no_more=no_more or self._partition.sealed,
        )

    @property
    def _is_plain(self) -> bool:
        """Whether each row becomes ready independently of other rows."""
        return self.view.grouping is None and not self._spec.where and self._rows.bound is None

    @property
    def _unready_count(self) -> int:
        """Number of unconsumed rows that were not ready. The value is valid only after the scan is exhausted."""
        return self._task.backlog + self._task.skipped_count - self.view.scan.seen_count

    def _count_end(self) -> EndCounts | None:
        """Return the sample counts at the end of the task's data, or None if any row can still become ready.

        At this point, no new rows can be inserted, but rows that are still leased may be released.
        """
        partition, task, rows, grouping = self._partition, self._task, self._rows, self.view.grouping
        consumed, inserted = task.consumed_count, partition.inserted_count
        if task.leased_count or (self._is_plain and self.view.scan.exhausted and self._unready_count > 0):
            return None
        if consumed == inserted:
            return EndCounts(consumed_count=consumed, kept_count=task.kept_count)
        failed = excluded = left_count = 0
        ready = [np.zeros(0, np.int64)]
        at_once = self.view.scan.at_once if self._is_plain else rows.at_once
        for some in self.view.scan.stretches(_LEAST_CHUNK, at_once):  # the first range often contains an unready row
            left = some.start + np.flatnonzero(rows.task.is_left(some))
            kept = left[~rows.excluded(left)]
            is_ready = rows.ready_but_for(kept, Lack.OLDER)
            unready = kept[~is_ready]
            if unready.size and (grouping is None or not bool(grouping.is_dead(unready).all())):
                return None
            is_failed = (partition.state[some] == FAILED) & (task.claim[some] == UNCLAIMED)
            failed += int(np.count_nonzero(is_failed))
            excluded += left.size - kept.size
            left_count += kept.size
            ready.append(kept[is_ready])
        left_over = left_count
        if grouping is not None:
            if self.view.scan.is_on_loop and left_count > _MOST_IN_GROUPS_ON_LOOP:
                raise MustBeAwaited
            left_over = grouping.whole(np.concatenate(ready), no_more=True)[0].size
        dead_lettered, dropped = task.dead_lettered_count, task.dropped_count
        return EndCounts(
            consumed_count=consumed,
            cleared_count=inserted - consumed - failed - dead_lettered - dropped - excluded - left_count,
            failed_count=failed,
            dead_lettered_count=dead_lettered,
            excluded_count=excluded,
            in_incomplete_groups_count=left_count - left_over,
            left_over_count=left_over,
            overlong_count=dropped,
            kept_count=task.kept_count,
        )

    # Evictions

    @property
    def _evictions(self) -> EvictionSearch:
        return EvictionSearch(
            self._partition,
            self._task,
            self._rows.evictable,
            self.view.grouping,
            least_members=self._spec.least_members,
            clears=self._spec.unmatched == "clear",
        )

    def look_for_evicted(self) -> None:
        """Find the samples that the claim may evict. Call this method after the sampler has run.

        The order matters, because the groups that the sampler requests may determine which samples to evict.

        Raises:
            MustBeAwaited: finding the samples, or evicting them in a single step, would block the event loop.
        """
        if not self._spec.evicts:
            return
        is_on_loop = self.view.scan.is_on_loop
        found = [self._evictions.small_groups(lambda: self._all_of("left"), is_on_loop=is_on_loop)]
        if self._spec.where:
            found.append(self._all_of("evictable"))
        positions = np.unique(np.concatenate(found))
        if is_on_loop and positions.size > MOST_EVICTED_AT_ONCE:
            raise MustBeAwaited
        self._candidates = self._rows.table.index[positions]

    def _all_of(self, which: Literal["left", "evictable"]) -> Indexes:
        ((found, _),) = self._new_plain_scan(of=which).first(None)
        return found

    # Results

    def conclude(self, plan: Plan | None) -> Found:
        """Return the outcome: a plan to record in this event-loop step, the end of the task's data, or a miss.

        Raises:
            InvalidArgumentError: see `check_batch` and `with_totals`.
            SamplerError: a row in the plan is not ready, although nothing has changed.
            MissingLengthError: see `_check_length_source`.
        """
        if (
            self._candidates.size and self._partition.resolved(self._spec.where) == self._rows.key[1]
        ):  # false if a policy's version was rewound during the search
            self.evicted = self._evictions.units(self._candidates)
        if plan is None:
            if self.evicted is None and self._rows.bound is not None:
                self.evicted = self._rows.bound.late()
            if self._end is None:
                return self._miss()
            return self._end if self.is_current else NOT_LOOKED
        if self._task.epoch != self._begun_at[-1]:  # the search ran in a different epoch
            return NOT_LOOKED
        recorded = RecordedPlan.of(plan, self._spec.micro_batch_size)
        if self._end is None and self._ratio is not None and self._ratio.exceeded_by(recorded.rows.size):
            check_batch(self._ratio, recorded.rows.size)
            return self._miss()
        positions = self._rows.table.find(recorded.named)
        known = Lack.WHERE, Lack.LENGTH, Lack.OLDER
        if bool((positions < 0).any()) or not bool(self._rows.ready_but_for(positions, *known).all()):
            state_version, _, *others = self._begun_at  # ignore the row version, since writes leave ready rows ready
            if (state_version, *others) != (self._marks[0], *self._marks[2:]):
                return NOT_LOOKED
            sampler = self._request.sampler.name
            raise SamplerError(
                f"sampler {sampler!r} returned rows that are not ready for this claim; expected only rows from "
                f"view.ready() or view.ready_groups()",
                metadata={"sampler": sampler},
            )
        bound, name, is_last = self._rows.bound, self._request.sampler.name, self._end is not None
        if bound is not None and not bound.permits(recorded, positions, name, is_last=is_last):
            return NOT_LOOKED  # slots were created during the search
        if self.evicted is not None and bool(np.isin(recorded.named, self.evicted.rows).any()):
            return NOT_LOOKED  # the plan contains rows of a group that is being evicted because it is too small
        if self._spec.max_uses > 1 or recorded.is_reusing:
            recorded = self._task.using_up(recorded, self._spec.max_uses)
            positions = self._rows.table.find(recorded.named)
        recorded, lengths = self._with_totals(recorded, positions)
        return Planned(recorded, positions, self.view.grouping, self._rows, self.evicted, lengths)

    def _with_totals(self, recorded: RecordedPlan, positions: Indexes) -> tuple[RecordedPlan, Indexes | None]:
        """Add totals to a rank batch. Return the batch and its row lengths (None if any length is unknown).

        A plan for a queue worker is returned unchanged.

        Raises:
            InvalidArgumentError: see `with_totals`.
        """
        if self._request.rank is None:
            return recorded, None
        if recorded.is_reusing or recorded.dropped:
            positions = self._rows.table.find(recorded.rows)
        lengths = self._rows.known_lengths(positions)
        return with_totals(recorded, self._partition, positions, lengths, self._spec.totals), lengths

    def _miss(self) -> Miss:
        """Return a miss that states how many rows must be written before another search can succeed."""
        self._check_length_source()
        missing, is_closed = 1, self._partition.sealed or self._spec.finite  # may be closed by the very first sample
        # Read the attribute from the class, because this runs none of the sampler's code.
        needs_min_size = type(self._request.sampler).plans_below_min_size is not True
        if self._spec.evicts or self._rows.bound is not None:  # a single row may be evicted or awaited
            needs_min_size = False
        if needs_min_size and self.view.scan.exhausted and self.wanted.batch_unit == "sample":
            missing = self.wanted.min_size - self.view.scan.seen_count
            if is_closed:  # the last batch may be smaller
                missing = min(missing, self._unready_count) if self._is_plain else 1
        state_version, row_version, *_ = self._begun_at
        return Miss(
            state_version,
            row_version + max(1, missing),
            self._consumed if is_closed else None,
            leased_by_all(self._partition) if self._spec.evicts else None,
        )

    def _check_length_source(self) -> None:
        """Raise MissingLengthError if the fields can never have lengths and no sample has a length in custom_meta.

        In all other cases, the claim waits, because a put or a SetCustomMeta call can still add the missing lengths.
        """
        rows = self._rows
        source = rows.key[2]
        if source is None or self._partition.meta.has(source.column):
            return
        if source.is_longest_sequence:
            if not rows.lacks_sequences:
                return
        else:
            field = self._partition.cells.fields.get(source.field or "")
            if field is None or not field.produced_count or field.has_lengths:
                return
        first = slice(0, min(self.view.scan.count, rows.at_once))
        lacking = np.flatnonzero(rows.ready_but_for(first, Lack.LENGTH) & ~rows.has_length(first))
        if not lacking.size:
            return
        named = ", ".join(map(str, rows.table.index[lacking[:_MOST_NAMED]].tolist()))
        raise MissingLengthError(
            f"{self._why_no_lengths(source)}; expected the lengths of samples {named}"
            f"{' and others' if lacking.size > _MOST_NAMED else ''}, because sampler {self._request.sampler.name!r} "
            f"needs them. Set length_field to a field of tensors, or put the number of tokens into the "
            f"custom_meta column {source.column!r}. A claim with length_key {source.column!r} waits for this column.",
            field="sampler_config",
            metadata={"partition_id": self._partition.partition_id, "column": source.column},
        )

    def _why_no_lengths(self, source: LengthSource) -> str:
        """Return an explanation of why the fields of a length source provide no lengths."""
        if source.is_longest_sequence:
            names = ", ".join(map(repr, self._spec.data_fields)) or "none"
            return f"data_fields is {names}, without a field of one-dimensional rows that may differ in length"
        is_objects = self._partition.cells.fields[source.field or ""].spec.layout is Layout.OBJECT
        return f"length_field is {source.field!r}, which has {'objects' if is_objects else 'scalars'}"
