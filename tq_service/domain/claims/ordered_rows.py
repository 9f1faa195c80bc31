"""Ready rows in the order of `order_by`, kept sorted while rows come, change and go.

A task has one `OrderedRows` for each way of asking with an order by numbers. It holds the rows that were ready when
they were last written to, so it is worked on as rows are written: a claim enters these, takes what it needs from the
front, and drops what is not ready there any more. All of it follows from the rows, and is made anew after a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tq_service.domain.claims.scan_starts import ScanKey
from tq_service.domain.claims.sort_keys import NO_KEYS, Keys, SortedRuns, merged, sorted_keys
from tq_service.domain.plan import Indexes, LengthSource
from tq_service.domain.tables.meta import Order

if TYPE_CHECKING:
    from tq_service.domain.claims.readiness import Readiness
    from tq_service.domain.claims.request import BatchSpec
    from tq_service.domain.tables.table import RowTable

OrderKey: TypeAlias = tuple[ScanKey, tuple[Order, ...]]
Work: TypeAlias = Callable[[], Callable[[], None]]

_MOST_ORDERS = 4
_MOST_ON_LOOP = 4096  # rows that are entered on the event loop in one step
_MOST_RUNS = 12
_STRETCH = 1 << 16
_LEAST_TAKEN = 64
_MOST_TAKEN = 4096


def order_key(batch_spec: BatchSpec, length: LengthSource | None) -> OrderKey:
    """Return what decides which rows are ready for a claim, and in which order."""
    return (batch_spec.data_fields, batch_spec.where, length), batch_spec.order_by


class OrderedRows:
    """The rows of one way of asking, of one task.

    Used on the event loop, or as a copy by one thread. A row that becomes ready is written to, or reopened, in the same
    step, and noted; one that stops being ready, or stands elsewhere now, is found out when it is taken.

    Attributes:
        kinds: see `key_kinds`.
        is_built: whether it holds all rows that are ready, those apart that are noted.
    """

    def __init__(self, kinds: str, next_index: int) -> None:
        self.kinds = kinds
        self._next_index = next_index  # of the first row that cannot have a key yet
        self._may_stand_elsewhere = False  # whether a row that may have a key was written to
        self.is_built = False
        self._sorted = SortedRuns()
        self._noted: list[Indexes] = []
        self._noted_count = 0
        self._discard_count = 0

    def note(self, indexes: Indexes, first: int, table: RowTable) -> None:
        """Note rows that may have become ready, or have other values; `first` has the lowest global index of them."""
        self._noted.append(indexes)
        self._may_stand_elsewhere |= first < self._next_index
        self._next_index = table.next_index
        self._noted_count += indexes.size
        if self._noted_count > table.count + _STRETCH:  # nobody asks in this way any more
            self.discard()

    def discard(self) -> None:
        """Forget all rows; they are looked for again when somebody asks."""
        self.is_built = False
        self._sorted = SortedRuns()
        self._noted, self._noted_count = [], 0
        self._discard_count += 1

    def copy(self, rows: Readiness) -> OrderedRows:
        """Return the rows of now, to be taken on another thread."""
        self.enter(rows)
        copy = OrderedRows(self.kinds, self._next_index)
        copy.is_built = True
        copy._may_stand_elsewhere = self._may_stand_elsewhere
        copy._sorted = self._sorted.copy()
        return copy

    def adopt(self, copy: OrderedRows) -> None:
        """Drop what was found not to be ready in a copy, made since the rows here were last taken."""
        if self.is_built:
            self._sorted = copy._sorted

    # Entering

    def is_heavy(self, row_count: int) -> bool:
        """Whether more must be done before rows can be taken than the event loop has time for."""
        if len(self._sorted) > 2 * row_count + _STRETCH:  # rows were written to again and again
            self.discard()
        if not self.is_built:
            return row_count > _MOST_ON_LOOP
        return self._noted_count > _MOST_ON_LOOP or len(self._sorted.runs) > _MOST_RUNS

    def heavy_work(self, rows: Readiness) -> Work:
        """Return what must be done; it is called on a thread, and returns what is then to be called on the loop.

        Positions of rows must not change meanwhile. Rows may be written to: they are noted. One that fails must be
        followed by `discard`.
        """
        if not self.is_built:
            self._noted, self._noted_count = [], 0
            self._may_stand_elsewhere = False
            return self._later(lambda: _keys_of_all(rows), is_all=True)
        if self._noted_count > _MOST_ON_LOOP:
            noted, self._noted, self._noted_count = self._noted, [], 0
            return self._later(lambda: _keys_of(rows, noted), is_all=False)
        runs = self._sorted.runs
        return self._later(lambda: merged(runs), is_all=True)

    def _later(self, make_keys: Callable[[], Keys], *, is_all: bool) -> Work:
        discard_count = self._discard_count

        def work() -> Callable[[], None]:
            keys = make_keys()
            return lambda: self._install(keys, is_all=is_all, discard_count=discard_count)

        return work

    def _install(self, keys: Keys, *, is_all: bool, discard_count: int) -> None:
        if discard_count != self._discard_count:  # rows were noted that nobody has any more
            return
        if is_all:
            self._sorted = SortedRuns([keys])
            self.is_built = True
        else:
            self._sorted.add(keys)

    def enter(self, rows: Readiness) -> None:
        """Enter the rows that were noted."""
        if not self.is_built:
            self._noted, self._noted_count = [], 0
            self._may_stand_elsewhere = False
            self._sorted = SortedRuns([_keys_of_all(rows)])
            self.is_built = True
        elif self._noted:
            keys = _keys_of(rows, self._noted)
            self._noted, self._noted_count = [], 0
            self._sorted.add(keys)

    # Taking

    def first(self, rows: Readiness, count: int | None, most: int | None) -> tuple[Indexes, int, bool]:
        """Return the positions of the first ready rows, at least `count` unless there are fewer; None: all.

        They stay; what is not ready is dropped. Return also how many rows were looked at, which are few more than
        `most`, and whether there are no others.
        """
        self.enter(rows)
        found, positions = [], []
        found_count = seen_count = 0
        chunk = None if most is None and count is None else max(_LEAST_TAKEN, count or _MOST_TAKEN)
        while self._sorted.runs and (count is None or found_count < count) and (most is None or seen_count < most):
            taken = self._sorted.take(chunk)
            at, keys = rows.still_ready(taken, may_stand_elsewhere=self._may_stand_elsewhere)
            seen_count += taken.size
            found_count += keys.size
            found.append(keys)
            positions.append(at)
            if chunk is not None and 2 * keys.size < taken.size:
                chunk = min(_MOST_TAKEN, 2 * chunk)
        is_all = not self._sorted.runs
        if len(found) == 1:
            self._sorted.add(found[0])
            return positions[0], seen_count, is_all
        self._sorted.add(np.concatenate([NO_KEYS, *found]))
        return np.concatenate([np.zeros(0, np.int64), *positions]), seen_count, is_all


class OrdersOfTask:
    """The ordered rows of a task, for the ways of asking that were used last."""

    def __init__(self) -> None:
        self._orders: OrderedDict[OrderKey, OrderedRows] = OrderedDict()

    def __len__(self) -> int:
        return len(self._orders)

    def use(self, key: OrderKey, kinds: str, next_index: int) -> OrderedRows:
        """Return the rows of one way of asking, which are kept from now on; others once columns have other types."""
        ordered = self._orders.get(key)
        if ordered is None or ordered.kinds != kinds:
            ordered = self._orders[key] = OrderedRows(kinds, next_index)
        self._orders.move_to_end(key)
        if len(self._orders) > _MOST_ORDERS:
            self._orders.popitem(last=False)
        return ordered

    def note(self, indexes: Indexes, first: int, table: RowTable) -> None:
        """Say that rows may have become ready, or have other values."""
        for ordered in self._orders.values():
            ordered.note(indexes, first, table)

    def clear(self) -> None:
        """Forget all of them."""
        self._orders.clear()


def _keys_of_all(rows: Readiness) -> Keys:
    parts = []
    for start in range(0, rows.count, _STRETCH):
        stretch = slice(start, min(start + _STRETCH, rows.count))
        parts.append(rows.sort_keys(start + np.flatnonzero(rows.ready_mask(stretch))))
    return sorted_keys(parts)


def _keys_of(rows: Readiness, indexes: list[Indexes]) -> Keys:
    parts = []
    for part in indexes:
        for start in range(0, part.size, _STRETCH):
            positions = rows.ready_of(rows.find(part[start : start + _STRETCH]))
            parts.append(rows.sort_keys(positions))
    return sorted_keys(parts)
