"""Which rows are ready for one kind of claim, and the scan that finds the first of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.planning.ordering import first_in_order
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import BatchSpec, Condition, Indexes, LengthSource, MustBeAwaited, Order
from tq_service.state.table import LIVE, UNCLAIMED, is_open

# What decides which rows are ready for a kind of claim: data fields, conditions, and the length that its sampler needs.
ScanKey: TypeAlias = tuple[tuple[str, ...], tuple[Condition, ...], LengthSource | None]

_AT_ONCE = 1 << 14
_LEAST_CHUNK = 1024
_MOST_SCANNED_ON_LOOP = 1 << 20  # rows, in 3 ms; with conditions see `Readiness.at_once`
_MOST_ORDERED_ON_LOOP = 1 << 15  # rows among which the event loop looks for the first ones in an order
_WIDE_GAP = 1024  # rows that are not ready between two that are
_MOST_APART = 1 << 12
_MOST_SCAN_STARTS = 64
_MOST_SCAN_START_BYTES = 2**20
_VALUE_BYTES = 64  # of a value beside its text
_LEFT: ScanKey = ((), (), None)  # of the rows that are left, ready or not; no kind of claim has no fields

# A global index, and the few rows below it that may be ready, in order.
Start: TypeAlias = tuple[int, Indexes]
_NONE: Final = np.zeros(0, np.int64)
_NO_START: Final = (0, _NONE)

Rows: TypeAlias = slice | Indexes  # a stretch of the table, or some positions


class Readiness:
    """The conditions of one kind of claim, over the rows of a partition as they are when they are looked at.

    Another thread may look as well, while the table is pinned.
    """

    def __init__(
        self, partition: Partition, task: TaskLedger, batch_spec: BatchSpec, length: LengthSource | None
    ) -> None:
        self.table = partition.table
        self.values_of = partition.meta.typed
        self.key: ScanKey = (batch_spec.data_fields, batch_spec.where, length)
        self._partition = partition
        self._task = task

    @property
    def at_once(self) -> int:
        """How many rows the event loop has time for in one step: conditions on text take 0.1 us a row."""
        return _AT_ONCE // max(1, len(self.key[1]))

    def ready(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows are ready `(n,)`."""
        _, where, length = self.key
        mask = self.has_data(rows)
        if where:
            mask &= self.allowed(rows)
        if length is not None:
            mask &= self.has_length(rows)
        return mask

    def has_data(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows are live, not consumed by the task, and have all data fields."""
        mask: NDArray[np.bool_] = self._partition.state.data[rows] == LIVE
        mask &= self._task.claim.data[rows] == UNCLAIMED
        mask &= self._produced(rows)
        return mask

    def allowed(self, rows: Rows) -> NDArray[np.bool_]:
        """Return where `where` holds; a row without a value does not pass."""
        mask = np.ones(self.table.index.data[rows].size, np.bool_)
        for condition in self.key[1]:
            mask &= self._partition.meta.holds(condition, rows)[0]
        return mask

    def excluded(self, rows: Rows) -> NDArray[np.bool_]:
        """Return the rows that `where` rules out for good: by a value, or for lack of one when their data is there."""
        mask = np.zeros(self.table.index.data[rows].size, np.bool_)
        for condition in self.key[1]:
            holds, present = self._partition.meta.holds(condition, rows)
            mask |= ~holds & (present | self._produced(rows))
        return mask

    def has_length(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows have a length for the sampler, be it that its value is not a token count.

        That is an error of the claims that would deliver the row, see `lengths`, and of no others.
        """
        source = self.key[2] or LengthSource()
        has_length = self.values_of(source.key, rows)[1]
        if source.field is not None:
            has_length = has_length | (self.field_lengths(source.field, rows) >= 0)
        texts = self._partition.meta.json_values(source.key, rows)
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
        texts = self._partition.meta.json_values(source.key, rows)
        if texts is not None and (found := np.flatnonzero(texts != None)).size:  # noqa: E711  (of each)
            self._refuse_length(rows, int(found[0]), texts[found[0]])
        lengths[present] = values
        return lengths

    def _refuse_length(self, rows: Rows, position: int, value: object) -> NoReturn:
        """Refuse the value that one of some rows has for its length."""
        column = (self.key[2] or LengthSource()).key
        raise InvalidArgumentError(
            f"custom_meta column {column!r} of sample {self.table.index.data[rows][position]} is {value!r:.80}; "
            f"expected a token count, a whole number from 0 to 2**63 - 1. Put or set another value, or clear the "
            f"sample.",
            field="sampler_config",
            metadata={"column": column},
        )

    def known_lengths(self, rows: Indexes) -> Indexes | None:
        """Return token counts, None where one of them is not known or is no token count."""
        source = self.key[2] or LengthSource()
        arrays = self._partition.meta.arrays(source.key)
        if arrays is None and source.field is None:
            return None
        if arrays is not None and arrays[0].dtype.kind == "i" and arrays[1][rows].all():  # as mostly
            values: Indexes = arrays[0][rows]
            return values if values.min(initial=0) >= 0 else None
        try:
            lengths = self.lengths(rows)
        except InvalidArgumentError:
            return None
        return lengths if bool((lengths >= 0).all()) else None

    def field_lengths(self, name: str | None, rows: Rows) -> Indexes:
        """Return the row lengths of a field, see `Field.lengths`; -1 where there is none."""
        field = None if name is None else self._partition.cells.fields.get(name)
        return np.full(self.table.index.data[rows].size, -1) if field is None else field.lengths(rows)

    def is_left(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows are left for the task, ready or not, `where` apart."""
        mask: NDArray[np.bool_] = is_open(self._partition.state.data[rows])
        mask &= self._task.claim.data[rows] == UNCLAIMED
        return mask

    def _produced(self, rows: Rows) -> NDArray[np.bool_]:
        return self._partition.cells.produced(self.key[0], rows)


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
        of_left: bool = False,
    ) -> None:
        """Begin.

        Args:
            rows: which rows are ready.
            starts: where scans start.
            orders: the columns by which ready rows are ordered, the most significant first.
            watch: of scans that may go on while rows change; None: it is of one step of the event loop.
            look_past: so many of the first ready rows are left to others.
            of_left: whether it is for all rows that are left for the task, ready or not.
        """
        self._key, self._mask = (_LEFT, rows.is_left) if of_left else (rows.key, rows.ready)
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
                found = np.concatenate([found, start + np.flatnonzero(self._mask(slice(start, part_end)))])
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
        table, start, apart = self.rows.table, int(found[0]) if found.size else end, _NONE
        if end - start - found.size > _WIDE_GAP:
            following = np.append(found[1 : _MOST_APART + 1], end)[:_MOST_APART]
            wide = np.flatnonzero(following - found[: following.size] > _WIDE_GAP)
            if wide.size:
                apart = table.index.data[found[: wide[-1] + 1]]
                start = int(following[wide[-1]])
        index = int(table.index.data[start]) if start < table.count else table.next_index
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
