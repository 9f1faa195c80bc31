"""One look for the next plan of a claim: the ready rows, the view of them for its sampler, and the checked result.

`Readiness` tests which rows are ready, `Scan` finds the first of them, `PartitionView` shows them to the sampler, and
`Search` checks the plan that the sampler returns, or counts the end.
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
from tq_service.planning.staleness import StalenessBound, check_bounded_claim
from tq_service.results import Lack
from tq_service.schema import BatchUnit, Blocks, EndCounts, Layout
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import RecordedPlan, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import (
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

_MOST_IN_GROUPS_ON_LOOP = 1 << 15  # ready rows among which the event loop looks for whole groups
_MOST_NAMED = 3  # samples, in an error

# What decides which rows are ready for a kind of claim: data fields, conditions, the length that its sampler needs, and
# whether they are held ones; or, instead of the length, that the rows are wanted which the conditions exclude.
ScanKey: TypeAlias = tuple[tuple[str, ...], tuple[Condition, ...], LengthSource | Literal["excluded"] | None, bool]

_AT_ONCE = 1 << 14
_LEAST_CHUNK = 1024
_MOST_SCANNED_ON_LOOP = 1 << 20  # rows, in 3 ms; with conditions see `Readiness.at_once`
_MOST_ORDERED_ON_LOOP = 1 << 15  # rows among which the event loop looks for the first ones in an order
_WIDE_GAP = 1024  # rows that are not ready between two that are
_MOST_APART = 1 << 12
_MOST_SCAN_STARTS = 64
_MOST_SCAN_START_BYTES = 2**20
_VALUE_BYTES = 64  # of a value beside its text
_LEFT: ScanKey = ((), (), None, False)  # of the rows that are left, ready or not; no claim of live rows has no fields

# A global index, and the few rows below it that may be ready, in order.
Start: TypeAlias = tuple[int, Indexes]
_NONE: Final = np.zeros(0, np.int64)
_NO_START: Final = (0, _NONE)

Rows: TypeAlias = slice | Indexes  # a stretch of the table, or some positions


class Requirement(NamedTuple):
    """A condition that live rows, which the task has not consumed, must meet to be ready.

    Attributes:
        lack: the reason that is given for rows that do not meet it.
        name: of the field or column.
        is_met: returns which of some rows meet it `(n,)`.
    """

    lack: Lack
    name: str
    is_met: Callable[[Rows], NDArray[np.bool_]]


class Readiness:
    """The requirements of one kind of claim, over the rows of a partition as they are when they are looked at.

    Another thread may look as well, while the table is pinned.

    Attributes:
        requirements: plans take rows that meet all of them, and explanations count the others.
        bound: what staleness allows plans to take besides; None: all.
    """

    def __init__(
        self, partition: Partition, task: TaskLedger, batch_spec: BatchSpec, length: LengthSource | None
    ) -> None:
        self.table = partition.table
        self.values_of = partition.meta.typed
        where = partition.resolved(batch_spec.where)
        self.key = (batch_spec.data_fields, where, length, batch_spec.held)
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
            self.requirements.append(Requirement(Lack.LENGTH, length.key, self.has_length))

    @property
    def at_once(self) -> int:
        """How many rows the event loop has time for in one step: conditions on text take 0.1 us a row."""
        return _AT_ONCE // max(1, len(self.key[1]))

    def ready(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows are ready `(n,)`."""
        return self.ready_but_for(rows)

    def ready_but_for(self, rows: Rows, *lacks: Lack) -> NDArray[np.bool_]:
        """Return which rows are ready, or would be if they did not lack some things `(n,)`."""
        mask: NDArray[np.bool_] = self.partition.state.data[rows] == self._state
        mask &= self.task.claim.data[rows] == UNCLAIMED
        for each in self.requirements:
            if each.lack not in lacks:
                mask &= each.is_met(rows)
        if self.bound is not None and Lack.OLDER not in lacks:
            mask &= self.bound.allows(rows)
        return mask

    def excluded(self, rows: Rows) -> NDArray[np.bool_]:
        """Return the rows that `where` rules out for good: by a value, or for lack of one when their data is there."""
        mask = np.zeros(self.table.index[rows].size, np.bool_)
        for condition, may_hold_later in zip(self.key[1], self._may_hold_later, strict=True):
            holds, present = self.partition.meta.holds(condition, rows)
            is_known = present & (not may_hold_later)
            mask |= ~holds & (is_known | (~present & self.partition.cells.produced(self.key[0], rows)))
        return mask

    def evictable(self, rows: Rows) -> NDArray[np.bool_]:
        """Return the live rows that the task has not consumed and `where` rules out for good."""
        mask: NDArray[np.bool_] = self.partition.state.data[rows] == LIVE
        mask &= self.task.claim.data[rows] == UNCLAIMED
        return mask & self.excluded(rows) if self.key[1] else np.zeros(mask.size, np.bool_)

    def has_length(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows have a length for the sampler, be it that its value is not a token count.

        That is an error of the claims that would deliver the row, see `lengths`, and of no others.
        """
        source = self.key[2] or LengthSource()
        has_length = self.values_of(source.key, rows)[1]
        if source.field is not None:
            has_length = has_length | (self.field_lengths(source.field, rows) >= 0)
        texts = self.partition.meta.json_values(source.key, rows)
        return has_length if texts is None else has_length | (texts != None)  # noqa: E711  (of each)

    def lengths(self, rows: Rows) -> Indexes:
        """Return token counts by the sampler's length source, -1 where unknown.

        Raises:
            InvalidArgumentError: the value of a row is not a token count.
        """
        source = self.key[2] or LengthSource()
        lengths = self.field_lengths(source.field, rows)
        values, present = self.values_of(source.key, rows)
        values = values[present]
        is_count = _is_token_count(values)
        if not is_count.all():
            self._refuse_length(rows, int(np.flatnonzero(present)[~is_count][0]), values[~is_count].tolist()[0])
        texts = self.partition.meta.json_values(source.key, rows)
        if texts is not None and (found := np.flatnonzero(texts != None)).size:  # noqa: E711  (of each)
            self._refuse_length(rows, int(found[0]), texts[found[0]])
        lengths[present] = values
        return lengths

    def _refuse_length(self, rows: Rows, position: int, value: object) -> NoReturn:
        """Refuse the value that one of some rows has for its length."""
        column = (self.key[2] or LengthSource()).key
        raise InvalidArgumentError(
            f"custom_meta column {column!r} of sample {self.table.index[rows][position]} is {value!r:.80}; "
            f"expected a token count, a whole number from 0 to 2**63 - 1. Put or set another value, or clear the "
            f"sample.",
            field="sampler_config",
            metadata={"column": column},
        )

    def known_lengths(self, rows: Indexes) -> Indexes | None:
        """Return token counts, or None if one is unknown or not a token count."""
        with contextlib.suppress(InvalidArgumentError):
            lengths = self.lengths(rows)
            if bool((lengths >= 0).all()):
                return lengths
        return None

    def field_lengths(self, name: str | None, rows: Rows) -> Indexes:
        """Return the row lengths of a field, see `Field.lengths`; -1 if it has none."""
        field = None if name is None else self.partition.cells.fields.get(name)
        return np.full(self.table.index[rows].size, -1) if field is None else field.lengths(rows)

    def _holds(self, condition: Condition, rows: Rows) -> NDArray[np.bool_]:
        return self.partition.meta.holds(condition, rows)[0]


def _is_token_count(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values of a custom_meta column are token counts; whole numbers do as doubles too."""
    if values.dtype.kind not in "if":
        return np.zeros(values.size, np.bool_)
    is_count: NDArray[np.bool_] = values >= 0
    if values.dtype.kind == "f":
        is_count &= (values < 2.0**63) & (values == np.floor(values))
    return is_count


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


class Scan:
    """A look for ready rows, no further than needed, which starts where the one before found the first of them.

    On the event loop it is of one step, and ends with `MustBeAwaited` when it takes long. Elsewhere it takes rows in
    parts, since the interpreter lock is held meanwhile.

    Attributes:
        rows: which rows are ready.
        count: of the table, when it was begun.
        is_on_loop: whether it is of one step of the event loop.
        at_once: rows of a part; on the event loop these are all.
        seen_count: ready rows that were seen.
        exhausted: whether all rows were looked at.
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
        """Begin.

        Args:
            rows: which rows are ready.
            starts: where scans start.
            orders: the columns by which ready rows are ordered, the most significant first.
            watch: of scans that may go on while rows change; None: it is of one step of the event loop.
            look_past: so many of the first ready rows are left to others.
            of: which rows are looked for: those that are ready, all that are left for the task, ready or not, or those
                that claims may evict since `where` excludes them.
        """
        self._key: ScanKey = rows.key
        self._mask: Callable[[Rows], NDArray[np.bool_]] = rows.ready
        # What a bound allows changes from plan to plan, so the rows that are left say where to start.
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
        """Whether so many rows are ready, as far as there is time to see."""
        with contextlib.suppress(MustBeAwaited):
            return any(found.size >= count for found, _ in self.first(count))
        return False

    def first(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Yield the positions of the first ready rows in order, more and more of them, and whether this was the last.

        Args:
            least: about how many are wanted at first; None: all.

        Raises:
            MustBeAwaited: the event loop has no time for so many rows.
        """
        least = None if least is None else least + self._look_past
        for found, is_last in self._first_in_order(least) if self.orders else self._first(least):
            yield found[self._look_past :], is_last

    def _first(self, least: int | None) -> Iterator[tuple[Indexes, bool]]:
        """Look at growing stretches of the table, the last time at all that is left of it."""
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
        """Look at all ready rows, and put more and more of them in order."""
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
        """Return the positions of the ready rows before the start of a scan, and the position where it starts."""
        start, apart = self._starts.get(self._key)
        if apart.size:
            apart = self.rows.table.find(apart)
            apart = apart[apart >= 0]
            apart = apart[self._mask(apart)]
        return apart, self.rows.table.position_from(start)

    def _move_start(self, found: Indexes, end: int) -> None:
        """Have later scans start at the first ready row, or behind the last wide gap after one of the first few.

        Args:
            found: positions of all ready rows before `end`, in order.
            end: position up to which was looked.
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
        """Yield stretches of the table, the first of `size` rows, the others up to `at_once`.

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
    """The rows of a partition as one task sees them; implements `tq_service.state.plan.View`.

    On the event loop it shows the present, and what would take long ends with `MustBeAwaited`. Elsewhere values may
    change under it, though positions do not while the table is pinned; which is why a plan is checked again when it is
    recorded.

    Attributes:
        scan: for the ready rows.
        no_more: whether no new rows come: groups that declared no size are complete then.
        plan_count: see `View`.
        grouping: the groups that were asked for last; None: none were.
    """

    def __init__(self, new_scan: Callable[..., Scan], *, no_more: bool = False) -> None:
        self._new_scan = new_scan
        self.scan = new_scan()
        self._rows = rows = self.scan.rows
        self.no_more = rows.partition.sealed or no_more
        self.grouping: Grouping | None = None
        self.plan_count = rows.task.serial - LAST_RESERVED

    def ready(self, limit: int | None = None) -> Indexes:
        """Return up to `limit` ready rows, see `View.ready`."""
        for found, _ in self.scan.first(limit):
            if limit is not None and found.size >= limit:
                break
        found = found[:limit]
        self._check_lengths(found)
        return self._rows.table.index[found]

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
        self.grouping = grouping_of(
            self._rows.partition, self._rows.task, block_size, blocks, take_incomplete=take_incomplete
        )
        self.grouping.check()
        # Among which rows a run is found must not depend on the order.
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
        """Return rows that are left for the task, see `View.left`."""
        for found, _ in self._new_scan(of="left").first(limit):
            left = found[~self._rows.excluded(found)]
            if limit is not None and left.size >= limit:
                break
        return self._rows.table.index[left[:limit]]

    def lengths(self, rows: Indexes) -> Indexes:
        """Return token counts, see `View.lengths`."""
        return self._at(rows, self._rows.lengths, -1)

    def field_lengths(self, field: str, rows: Indexes) -> Indexes:
        """Return row lengths of a field, see `View.field_lengths`."""
        return self._at(rows, partial(self._rows.field_lengths, field), -1)

    def values(self, column: str, rows: Indexes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return a custom_meta column, see `View.values`."""
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        values, present = self._rows.values_of(column, positions)
        return values, present & (positions >= 0)

    def group_names(self, rows: Indexes) -> list[str | None]:
        """Return the explicit group of each row, see `View.group_names`."""
        positions = self._rows.table.find(np.asarray(rows, np.int64))
        names = self._rows.partition.groups.names_of(positions)
        return [name if position >= 0 else None for name, position in zip(names, positions.tolist(), strict=True)]

    def use_counts(self, rows: Indexes) -> Indexes:
        """Return how often rows were delivered and not consumed, see `View.use_counts`."""
        return self._at(rows, self._rows.task.uses.data.__getitem__, 0)

    def states(self, rows: Indexes) -> list[str]:
        """Return the state of each row, see `View.states`."""
        return [STATE_NAMES[code] for code in self._at(rows, self._rows.partition.state.data.__getitem__, CLEARED)]

    def rows(self) -> Indexes:
        """Return all rows that are not cleared, see `View.rows`."""
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
    """A plan that may be recorded in the step of the event loop in which it is returned.

    Attributes:
        plan: as it is recorded.
        positions: of `plan.named`, in the table of this moment.
        grouping: what its groups are; None where its sampler took no whole ones.
        readiness: has the requirements that its rows met.
        evicted: what the claim evicts in the same change; none of its rows. None: nothing.
    """

    plan: RecordedPlan
    positions: Indexes
    grouping: Grouping | None
    readiness: Readiness
    evicted: Evicted | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """A plan could not be made, and another look is useless before something has changed.

    So a partition that fills row by row is not scanned for each of them, nor at its end for each waiting claim.

    Attributes:
        state_version: of the partition when the search was begun.
        row_version: that the partition must reach.
        consumed: rows consumed and leased by the task then, where a change of these may bring the end, or is after it;
            else None.
        leased: rows leased by all tasks then, where one of them may be evicted once it no longer is; else None.
    """

    state_version: int = -1
    row_version: int = 0
    consumed: tuple[int, int] | None = None
    leased: int | None = None

    def is_current(self, partition: Partition, task: TaskLedger) -> bool:
        """Whether too little has changed for another look to be worth while."""
        return (
            partition.state_version == self.state_version
            and partition.row_version < self.row_version
            and self.consumed in (None, (task.consumed_count, task.leased_count))
            and (self.leased is None or self.leased == leased_by_all(partition))
        )


def leased_by_all(partition: Partition) -> int:
    """Return how many rows of a partition are leased, one to workers of several tasks counted as often."""
    return sum(task.leased_count for task in partition.tasks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFound(Miss):
    """No plan follows, unless something changes."""

    end: EndCounts


Found: TypeAlias = Planned | Miss

NOT_LOOKED = Miss()  # is never current; or other claims, or changes, were quicker


class Search:
    """Looks once for the next plan of a claim, or for the end of its task.

        plan of `view` for `wanted` -> conclude
            |none
        begins_last? -yes-> plan of `view` for `wanted` -> conclude
            |no
        conclude

    Before it concludes, `look_for_evicted` is called where the claim evicts what it never gets.

    It reads only, and runs no sampler. In one step of the event loop it is of one moment; over several of them, a plan
    is of use if its rows are ready still, and an end if nothing has changed.

    Attributes:
        view: what the sampler sees.
        wanted: what it is asked for.
        evicted: once it has concluded, what the claim evicts; None: nothing.
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
        """Begin, with the length that the sampler needs of each sample; for `watch` and `look_past` see `Scan`."""
        self._partition = partition
        self._task = task
        self._request = request
        self._spec = request.batch_spec
        self._rows = Readiness(partition, task, self._spec, length)
        self._new_scan = partial(Scan, self._rows, starts, self._spec.order_by, watch=watch, look_past=look_past)
        self._new_plain_scan = partial(Scan, self._rows, starts, watch=watch)
        self._candidates = _NONE  # for eviction, by global index
        self.evicted: Evicted | None = None
        self._begun_at = self._marks
        self._consumed = task.consumed_count, task.leased_count
        self._end: EndFound | None = None
        self.wanted = request.plan_request
        self._bound_staleness(no_more=False)
        self.view = PartitionView(self._new_scan)

    @property
    def _marks(self) -> tuple[int, int, int, int, int]:
        """Versions of all that plans depend on; they are equal at two moments if nothing has changed between."""
        partition, task = self._partition, self._task
        return *partition.version, task.serial, task.leased_count, task.epoch

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed since the search was begun."""
        return self._marks == self._begun_at

    @property
    def kept_groups(self) -> int | None:
        """How groups that the sampler asked for are kept whole, see `TaskFacts`."""
        return None if self.view.grouping is None else self.view.grouping.kept

    # The end

    def begins_last(self) -> bool:
        """Have the last, short batch planned if no more rows can become ready; return whether that is so.

        Raises:
            MustBeAwaited: the event loop has no time to see.
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
        """Have plans take what the admission of the task allows, if it bounds staleness.

        Raises:
            InvalidArgumentError: the claim is not for batches of its size.
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
        """Whether rows become ready one by one: nothing but they themselves keeps any of them from a plan."""
        return self.view.grouping is None and not self._spec.where and self._rows.bound is None

    @property
    def _unready_count(self) -> int:
        """Rows left for the task that were not ready, once a scan was exhausted."""
        return self._task.backlog + self._task.skipped_count - self.view.scan.seen_count

    def _count_end(self) -> EndCounts | None:
        """Count the end, in which nothing more is planned; None where rows may become ready that are not.

        No new rows come, but those that are leased may be released.
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
        for some in self.view.scan.stretches(_LEAST_CHUNK, at_once):  # mostly the first unready row tells
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

    # What is evicted

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
        """Look for what the claim may evict, once its sampler has asked for groups, or not.

        Raises:
            MustBeAwaited: the event loop has no time to look, or to evict so much in one step.
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

    # What a plan comes to

    def conclude(self, plan: Plan | None) -> Found:
        """Return a plan as it may be recorded in this step of the event loop, the end, or why there is neither.

        Raises:
            SamplerError: its rows were not ready although nothing has changed.
            MissingLengthError: see `_check_length_field`.
        """
        if (
            self._candidates.size and self._partition.resolved(self._spec.where) == self._rows.key[1]
        ):  # else a version went back
            self.evicted = self._evictions.units(self._candidates)
        if plan is None:
            if self.evicted is None and self._rows.bound is not None:
                self.evicted = self._rows.bound.late()
            if self._end is None:
                return self._miss()
            return self._end if self.is_current else NOT_LOOKED
        if self._task.epoch != self._begun_at[-1]:  # what was left in it is not what there is now
            return NOT_LOOKED
        recorded = RecordedPlan.of(plan, self._spec.micro_batch_size)
        positions = self._rows.table.find(recorded.named)
        known = Lack.WHERE, Lack.LENGTH, Lack.OLDER
        if bool((positions < 0).any()) or not bool(self._rows.ready_but_for(positions, *known).all()):
            state_version, _, *others = self._begun_at  # rows that are only written to stay ready
            if (state_version, *others) != (self._marks[0], *self._marks[2:]):
                return NOT_LOOKED
            sampler = self._request.sampler.name
            raise SamplerError(
                f"sampler {sampler!r} returned rows that were not ready for this claim; return rows of view.ready() or "
                f"view.ready_groups() only",
                metadata={"sampler": sampler},
            )
        bound, name, is_last = self._rows.bound, self._request.sampler.name, self._end is not None
        if bound is not None and not bound.permits(recorded, positions, name, is_last=is_last):
            return NOT_LOOKED  # slots were made meanwhile
        if self.evicted is not None and bool(np.isin(recorded.named, self.evicted.rows).any()):
            return NOT_LOOKED  # the rest of a group of which too few members are left
        if self._spec.max_uses > 1 or recorded.is_reusing:
            recorded = self._task.using_up(recorded, self._spec.max_uses)
            positions = self._rows.table.find(recorded.named)
        return Planned(recorded, positions, self.view.grouping, self._rows, self.evicted)

    def _miss(self) -> Miss:
        """Return how many rows must be written, after the search was begun, before there can be more to find."""
        self._check_length_field()
        missing, is_closed = 1, self._partition.sealed or self._spec.finite  # or soon closed, by a first sample
        # Of the class: reading it runs no code of the sampler.
        needs_min_size = type(self._request.sampler).plans_below_min_size is not True
        if self._spec.evicts or self._rows.bound is not None:  # a single row may have to go, or be awaited
            needs_min_size = False
        if needs_min_size and self.view.scan.exhausted and self.wanted.batch_unit == "sample":
            missing = self.wanted.min_size - self.view.scan.seen_count
            if is_closed:  # the last, short batch takes less
                missing = min(missing, self._unready_count) if self._is_plain else 1
        state_version, row_version, *_ = self._begun_at
        return Miss(
            state_version,
            row_version + max(1, missing),
            self._consumed if is_closed else None,
            leased_by_all(self._partition) if self._spec.evicts else None,
        )

    def _check_length_field(self) -> None:
        """Refuse to wait for lengths of a field that never has any, where no sample has one in custom_meta either.

        Lengths that are missing can come as long as there are samples, by a put or by SetCustomMeta; so claims wait.
        """
        rows = self._rows
        source = rows.key[2]
        field = None if source is None else self._partition.cells.fields.get(source.field or "")
        if source is None or field is None or not field.produced_count or field.has_lengths:
            return
        if self._partition.meta.has(source.key):
            return
        first = slice(0, min(self.view.scan.count, rows.at_once))
        lacking = np.flatnonzero(rows.ready_but_for(first, Lack.LENGTH) & ~rows.has_length(first))
        if not lacking.size:
            return
        kind = "objects" if field.spec.layout is Layout.OBJECT else "scalars"
        named = ", ".join(map(str, rows.table.index[lacking[:_MOST_NAMED]].tolist()))
        raise MissingLengthError(
            f"length_field is {source.field!r}, which has {kind}; expected a field of tensors with a length, for "
            f"samples {named}{' and others' if lacking.size > _MOST_NAMED else ''}. Name another field, or put the "
            f"number of tokens into the custom_meta column {source.key!r}.",
            field="sampler_config",
            metadata={"partition_id": self._partition.partition_id, "column": source.key},
        )
