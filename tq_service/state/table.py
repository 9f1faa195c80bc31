"""Tables whose columns have equal length. Each column is declared once, with its name, dtype and fill value.

Growth, compaction, snapshots, restores and test comparisons iterate over the declared columns, so a new column only
needs to be declared.

A column that exists in every table of a given kind has a plain name without a slash, such as `state`. A column for a
user-named object is named `KIND/NAME`, such as `cell/tokens`, `meta/reward` or `claim/update_actor`. KIND is a plain
word. NAME is the name chosen by the user, unchanged, and may contain slashes. User-chosen names therefore cannot
collide with other column names.

Taking a column snapshot does not copy any values. While a snapshot is being read, each change to the column first saves
the blocks that it modifies. A block contains a few thousand values, regardless of the length of the column.

A `RowTable` contains rows ordered by global index. Removing a row leaves a gap. When there are more gaps than rows,
each step that adds or removes rows also closes some gaps by moving rows forward. Such a step examines 16,384 positions
or twice the number of added or removed rows, whichever is larger. Every step is therefore short, and the gaps are
closed before they make the table much longer. A gap keeps the index of the removed row, so binary search still finds
the rows around the gap. The index at a moved row's old position is set to -1. A reader in another thread can pin the
rows (`pinned`) to keep them from moving while it reads. If there are many gaps (`has_many_gaps`), a new reader first
waits until all current readers have finished. Otherwise, overlapping readers could prevent gaps from ever being closed.
A reader that yields control between slices does not pin the table (`slices`).

Large numbers of rows are added in two phases. First, `reserve_capacity` reserves capacity and creates the columns for
the new rows. The reservation is split into several steps, so other work can run in between. Finally, a single step adds
the rows, for which it only needs to write their values.

A `SlotTable` allocates slots for transient objects and reuses free slots.

Long columns grow in place without copying. Numbers are stored in reserved memory, whose pages Linux allocates when they
are first written. A reservation itself uses only address space, so it can be far larger than needed. Views of a column
remain valid when the column grows. NumPy cannot reserve memory for objects, so a long column of objects is stored in
chunks (`ObjectChunks`) and grows by adding chunks.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias, cast, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tq_service.errors import NewerVersionError
from tq_service.schema import SampleState
from tq_service.state.plan import Indexes

CLEARED, LIVE, HELD, FAILED = 0, 1, 2, 3
STATE_NAMES = ("cleared", "live", "held", "failed")
# Reserved values in the `claim` column of a task. All other values are serials of claims (see `ledger.py`).
UNCLAIMED = 0  # zero, so that the time to add a task does not depend on the number of rows
CONSUMED_EARLIER = 1
DEAD_LETTERED = -1
DROPPED = -2
LAST_RESERVED = 2  # serials are larger, so negated serials (leased rows) are the lowest values
_GROWTH: Final = 1 << 14  # minimum growth of a long column, in values
_CAPACITY_STEP: Final = 1 << 16  # rows for which capacity is reserved per step
_FIRST_CAPACITY = 64
_LEAST_GAPS = 1024
_MANY_GAPS = 1 << 13  # there are many gaps if their number exceeds this value plus two per row
_FEW = 64
_MARKED_SHARE = 16
_NO_INDEX = -1  # index of a position vacated while gaps are being closed
_LEAST_CLOSED = 1 << 14  # minimum number of positions examined per step
_CLOSED_SHARE = 2  # number of positions examined per row that the step adds or removes

BLOCK_SHIFT: Final = 12
BLOCK_ROWS: Final = 1 << BLOCK_SHIFT
"""Number of column values per block. Snapshots save values in blocks."""
RESERVED_FROM: Final = 1 << 16  # minimum number of values in a column that grows in place
_RESERVED: Final = 1 << 26  # number of values to reserve memory for; a longer column reserves four times its length
_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_NEVER: Final = "2"
_MAP_NORESERVE: Final = 0x4000  # the value on Linux; missing in the mmap module of Python 3.11
_HUGE_PAGE_BYTES: Final = 2 << 20
_HUGE_PAGES_FROM: Final = 4 << 20  # above this size, the unused part of a huge page is relatively small
_offsets = itertools.count(0, 83)  # in pages; columns that grow together then need huge pages at different times
_CHUNK_SHIFT: Final = 16
_CHUNK_MASK: Final = (1 << _CHUNK_SHIFT) - 1
Where = slice | Indexes | int


class ObjectChunks:
    """An array of objects stored in chunks, which are allocated on first write. Growth does not move any objects.

    Attributes:
        size: number of elements. Elements that have not been written contain the fill value.
    """

    __slots__ = ("_chunks", "_fill", "size")
    dtype: Final = np.dtype(np.object_)

    def __init__(self, size: int, fill: Any) -> None:
        self.size = size
        self._fill = fill
        self._chunks: dict[int, NDArray[Any]] = {}

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, int | np.integer):
            chunk = self._chunks.get(int(where) >> _CHUNK_SHIFT)
            return self._fill if chunk is None else chunk[int(where) & _CHUNK_MASK]
        count, parts = self._parts(where)
        found = np.full(count, self._fill, np.object_)
        for number, here, there in parts:
            chunk = self._chunks.get(number)
            if chunk is not None:
                found[here] = chunk[there]
        return found

    def assign(self, where: Where, values: Any) -> None:
        """Write one object to each position. If `values` is a single object, write it to all positions."""
        if isinstance(where, int | np.integer):
            self._chunk(int(where) >> _CHUNK_SHIFT)[int(where) & _CHUNK_MASK] = values
            return
        is_one = not isinstance(values, list | np.ndarray)
        count, parts = self._parts(where)
        if not is_one:
            given = np.empty(count, np.object_)
            given[:] = values
        for number, here, there in parts:
            if is_one and values is self._fill:
                self._reset(number, there)
            else:
                self._chunk(number)[there] = values if is_one else given[here]

    def _reset(self, number: int, there: Any) -> None:
        """Reset elements of a chunk to the fill value. If all elements are reset, free the chunk."""
        if isinstance(there, slice) and there.stop - there.start > _CHUNK_MASK:
            self._chunks.pop(number, None)
        elif number in self._chunks:
            self._chunks[number][there] = self._fill

    def _chunk(self, number: int) -> NDArray[Any]:
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = np.full(1 << _CHUNK_SHIFT, self._fill, np.object_)
        return chunk

    def _parts(self, where: Any) -> tuple[int, Iterable[tuple[int, Any, Any]]]:
        """Return the number of selected positions, and the positions grouped by chunk.

        For each chunk, the iterable yields the chunk number, the offsets within the selection, and the offsets within
        the chunk.
        """
        if isinstance(where, slice):
            start, stop, step = where.indices(self.size)
            if step == 1:
                return max(0, stop - start), _parts_of_slice(start, stop)
        positions = np.arange(self.size)[where] if isinstance(where, slice) or where.dtype == np.bool_ else where
        return positions.size, _parts_of_positions(positions)


def blocks_of(where: Where, size: int) -> Iterable[int]:
    """Return the numbers of the blocks that contain the selected positions below `size`."""
    if isinstance(where, int | np.integer):
        return (int(where) >> BLOCK_SHIFT,) if where < size else ()
    if not isinstance(where, slice):
        positions = np.flatnonzero(where) if where.dtype == np.bool_ else where
        return set((positions[positions < size] >> BLOCK_SHIFT).tolist())
    start, stop, _ = where.indices(size)
    return range(start >> BLOCK_SHIFT, -(-stop // BLOCK_ROWS)) if start < stop else ()


def _parts_of_slice(start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    at = start
    while at < stop:
        end = min(stop, (at | _CHUNK_MASK) + 1)
        first = at & _CHUNK_MASK
        yield at >> _CHUNK_SHIFT, slice(at - start, end - start), slice(first, first + end - at)
        at = end


def _parts_of_positions(positions: Indexes) -> Iterator[tuple[int, Any, Indexes]]:
    if positions.size == 0:
        return
    numbers = positions >> _CHUNK_SHIFT
    first = int(numbers[0])
    if bool((numbers == first).all()):  # the common case: samples of one put
        yield first, slice(None), positions & _CHUNK_MASK
        return
    order = np.argsort(numbers, kind="stable")
    for here in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        yield int(numbers[here[0]]), here, positions[here] & _CHUNK_MASK


def zeros(count: int, dtype: np.dtype[Any], fill: Any) -> NDArray[Any] | ObjectChunks:
    """Allocate an array of at least `count` zeros without touching its memory.

    If the dtype is object, the values are None or the fill value instead.
    """
    if count < RESERVED_FROM:
        return np.zeros(count, dtype) if dtype.kind != "O" else np.empty(count, dtype)
    if dtype.kind == "O":
        return ObjectChunks(count, fill)
    reserved = reserved_zeros(_RESERVED if count <= _RESERVED else 4 * count, dtype)
    return np.zeros(2 * count, dtype) if reserved is None else reserved


def reserved_zeros(count: int, dtype: DTypeLike) -> NDArray[Any] | None:
    """Return `count` zeros that use memory only after they are written, or None if memory cannot be reserved.

    The memory is freed together with the last array that refers to it.
    """
    if not _can_reserve():
        return None
    offset = next(_offsets) * mmap.PAGESIZE % _HUGE_PAGE_BYTES
    try:
        memory = mmap.mmap(
            -1,
            offset + count * np.dtype(dtype).itemsize,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        )
    except (OSError, ValueError, OverflowError):  # the size exceeds a limit of the process or machine
        return None
    if len(memory) > _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel does not support huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_PAGES_FROM)
    return np.frombuffer(memory, dtype, count, offset)


def reserved_memory(values: NDArray[Any] | ObjectChunks) -> mmap.mmap | None:
    """Return the reserved memory that contains the values, or None if they are in ordinary memory."""
    base: Any = getattr(values, "base", None)
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, mmap.mmap) else None


def release_pages(values: NDArray[Any], memory: mmap.mmap, start: int, stop: int) -> None:
    """Release the memory pages that contain only values from `start` to `stop`. Values in these pages become zero."""
    offset = values.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
    first = -(-(offset + start * values.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = offset + stop * values.itemsize
    if first < end:
        memory.madvise(mmap.MADV_DONTNEED, first, end - first)


@cache
def _can_reserve() -> bool:
    """Return whether the system lets a process reserve memory without counting it as used.

    If the system never overcommits memory, it counts reserved memory as used.
    """
    if sys.platform != "linux":
        return False
    try:
        return _OVERCOMMIT.read_text().strip() != _NEVER
    except OSError:
        return True


STATE_CODES = {SampleState.LIVE: LIVE, SampleState.HELD: HELD, SampleState.FAILED: FAILED}


def is_open(states: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return a mask of the states that are live or held. Rows in these states can be claimed now or later."""
    mask: NDArray[np.bool_] = states == LIVE
    mask |= states == HELD
    return mask


NewColumn: TypeAlias = tuple[str, DTypeLike, Any]
"""Name, dtype and fill value of a column to declare."""


class ColumnSnapshot:
    """A column's first `size` values at snapshot time. Any thread can read the values, but only once, in order.

    The thread that owns the column saves each block before changing it. The reader first copies the block from the
    column and only then looks for a saved block. If no saved block exists, the owner had not started to change the
    block when the reader copied it.
    """

    __slots__ = ("__weakref__", "_array", "_kept", "_next_block", "size")

    def __init__(self, array: NDArray[Any] | ObjectChunks, size: int) -> None:
        self.size = size
        self._array = array
        self._kept: dict[int, NDArray[Any]] = {}
        self._next_block = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of the values."""
        return self._array.dtype

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the values in blocks of a few thousand."""
        for number in range(-(-self.size // BLOCK_ROWS)):
            block = self._block(number)
            self._next_block = number + 1
            yield self._kept.pop(number, block)
        self._next_block = self.size + 1

    def values(self) -> NDArray[Any]:
        """Return a copy of all values."""
        values = np.empty(self.size, self.dtype)
        start = 0
        for block in self.blocks():
            values[start : start + block.size] = block
            start += block.size
        return values

    def keep(self, where: Where) -> None:
        """Save the unread blocks that a write to `where` will change.

        The column calls this method before each write.
        """
        for number in blocks_of(where, self.size):
            if number >= self._next_block and number not in self._kept:
                self._kept[number] = self._block(number)

    def _block(self, number: int) -> NDArray[Any]:
        start, stop = number << BLOCK_SHIFT, min((number + 1) << BLOCK_SHIFT, self.size)
        values: NDArray[Any] = self._array[start:stop]
        return values if isinstance(self._array, ObjectChunks) else values.copy()  # reading chunks copies


class Column:
    """A column of a table, with one value per row or slot.

    Attributes:
        data: read-only array of all values up to the capacity. The array is replaced when the column grows or is
            compacted. An array obtained earlier still refers to the column's memory, unless the column has since moved
            to new memory.
        fill: value of positions that have not been written.
        is_blank: whether the column has never been written. All values of a blank column equal the fill value.
    """

    __slots__ = ("_array", "_memory", "_snapshots", "data", "fill", "is_blank")

    def __init__(self, dtype: DTypeLike, fill: Any, capacity: int) -> None:
        self.fill = fill
        self._snapshots: list[weakref.ref[ColumnSnapshot]] = []
        self._move(capacity, np.dtype(dtype))

    @overload
    def __getitem__(self, where: slice | NDArray[Any]) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, where: int) -> Any: ...

    def __getitem__(self, where: Any) -> Any:
        return self.data[where]

    def write(self, where: Where, values: Any) -> None:
        """Write values to positions, which must be unique and non-negative."""
        if self._snapshots:
            self._keep(where)
        if isinstance(self._memory, ObjectChunks):
            self._memory.assign(where, values)
        else:
            self._array[where] = values
        self.is_blank = False

    def clear(self, where: Where) -> None:
        """Reset the values at the given positions to the fill value."""
        if not self.is_blank:
            self.write(where, self.fill)

    def add(self, where: Indexes, by: int) -> None:
        """Add `by` to the values at the given positions. A position that occurs several times is counted each time."""
        if self._snapshots:
            self._keep(where)
        np.add.at(self._array, where, by)
        self.is_blank = False

    def resize(self, capacity: int) -> None:
        """Grow or shrink the column to `capacity` values.

        New values equal the fill value. Values to be removed must already equal the fill value. Values are not copied
        if the column's memory is large enough or, when shrinking, if it is reserved memory.
        """
        memory, size = self._memory, self.data.size
        reserved = reserved_memory(memory)
        if capacity < size and reserved is not None:
            if self._snapshots:
                self._keep(slice(capacity, None))
            release_pages(self._array, reserved, capacity, size)
        elif not isinstance(memory, ObjectChunks) and not size <= capacity <= memory.size:
            old, is_blank = self.data[:capacity], self.is_blank
            self._move(capacity, old.dtype)
            if not is_blank:
                self.write(slice(0, old.size), old)
            return
        self._use(min(size, capacity), capacity)

    def convert(self, dtype: DTypeLike) -> None:
        """Convert all values to another data type."""
        old = self.data
        self._move(old.size, np.dtype(dtype))
        self.write(slice(0, old.size), old)

    def snapshot(self, size: int) -> ColumnSnapshot:
        """Return a snapshot of the first `size` values. A snapshot is taken in constant time."""
        snapshot = ColumnSnapshot(self._array, size)
        self._snapshots.append(weakref.ref(snapshot))
        return snapshot

    def restore(self, snapshot: ColumnSnapshot) -> None:
        """Copy the values of a snapshot into the column.

        If the column has never been written, blocks that contain only the fill value are skipped.
        """
        start, is_new = 0, self.is_blank
        for block in snapshot.blocks():
            if not is_new or block.dtype.kind in "fO" or not bool((block == self.fill).all()):  # -0.0 == 0.0
                self.write(slice(start, start + block.size), block)
            start += block.size

    def _keep(self, where: Where) -> None:
        readers = [snapshot for reference in self._snapshots if (snapshot := reference()) is not None]
        for snapshot in readers:
            snapshot.keep(where)
        if len(readers) < len(self._snapshots):
            self._snapshots = [weakref.ref(snapshot) for snapshot in readers]

    def _move(self, capacity: int, dtype: np.dtype[Any]) -> None:
        """Switch to new memory for `capacity` values. Existing snapshots continue to use the old memory."""
        self._memory = zeros(capacity, dtype, self.fill)
        self._snapshots = []
        self.is_blank = True
        self._use(0, capacity)

    def _use(self, start: int, capacity: int) -> None:
        """Set the column's capacity, and set all values from `start` onward to the fill value."""
        self.data: NDArray[Any]
        if isinstance(self._memory, ObjectChunks):
            self._memory.size = capacity
            self._array = self.data = cast("NDArray[Any]", self._memory)  # chunks are read like an array
            return
        self._array = self._memory[:capacity]
        if self.fill is not None and self.fill != 0:
            self._array[start:] = self.fill
        self.data = self._array.view()
        self.data.flags.writeable = False


def grown(capacity: int, least: int) -> int:
    """Return the capacity to which a column must grow to hold at least `least` values.

    Because large columns grow in place, their capacity can increase in small steps.
    """
    if least < RESERVED_FROM:
        return max(least, 2 * capacity, _FIRST_CAPACITY)
    return -(-least // _GROWTH) * _GROWTH


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """A snapshot of a table, which contains a snapshot of the first `size` values of each column, by column name."""

    size: int
    columns: Mapping[str, ColumnSnapshot]


class Table:
    """A set of columns that have equal length and grow together.

    Attributes:
        columns: the table's columns, keyed by name, in order of declaration.
        count: length of each column, that is, the number of rows or slots, including gaps and free slots.
    """

    __slots__ = ("_capacity", "_spare", "_unsaved", "columns", "count")

    def __init__(self) -> None:
        self.count = 0
        self.columns: dict[str, Column] = {}
        self._spare: dict[str, Column] = {}  # columns created in advance but not yet declared
        self._unsaved: set[str] = set()  # names of columns that snapshots omit
        self._capacity = _FIRST_CAPACITY

    def column(self, name: str, dtype: DTypeLike, fill: Any) -> Column:
        """Declare a column whose values equal `fill` until they are written. See the module docstring for naming rules.

        Raises:
            ValueError: a column with this name already exists.
        """
        if name in self.columns:
            raise ValueError(f"column {name!r} is declared twice")
        column = self._spare.pop(name, None) or Column(dtype, fill, self._capacity)
        column.resize(self._capacity)
        self.columns[name] = column
        return column

    def unsaved_column(self, name: str, dtype: DTypeLike, fill: Any) -> Column:
        """Declare a column that snapshots omit because its values are specific to this process."""
        self._unsaved.add(name)
        return self.column(name, dtype, fill)

    def remove_column(self, name: str) -> None:
        """Remove a column from the table. Existing readers of the column and of its snapshots are not affected."""
        del self.columns[name]

    def snapshot(self) -> TableSnapshot:
        """Return a snapshot of all columns. The time required does not depend on the number of rows."""
        saved = (item for item in self.columns.items() if item[0] not in self._unsaved)
        columns = {name: column.snapshot(self.count) for name, column in saved}
        return TableSnapshot(size=self.count, columns=columns)

    def restore(self, snapshot: TableSnapshot) -> Sequence[str]:
        """Copy the rows of a snapshot into an empty table. Columns are matched by name.

        Return the names of the columns that are missing from the snapshot. The missing columns contain their fill
        values.

        Raises:
            NewerVersionError: a column in the snapshot is not declared or has a different dtype.
        """
        unknown = snapshot.columns.keys() - self.columns.keys()
        if unknown:
            raise NewerVersionError(f"unknown columns {', '.join(map(repr, sorted(unknown)))}")
        self._resize(grown(0, snapshot.size))
        self.count = snapshot.size
        for name, values in snapshot.columns.items():
            column = self.columns[name]
            if values.dtype != column.data.dtype:
                raise NewerVersionError(
                    f"column {name!r} is {values.dtype} in the snapshot, but this version expects {column.data.dtype}"
                )
            column.restore(values)
        return [name for name in self.columns if name not in snapshot.columns]

    def free_objects(self) -> Iterator[None]:
        """Release all objects in steps. Afterward, only the table's snapshots may be read."""
        for column in self.columns.values():
            if column.data.dtype.hasobject:
                for start in range(0, self.count, _CAPACITY_STEP):
                    column.clear(slice(start, min(start + _CAPACITY_STEP, self.count)))
                    yield

    def _resize(self, capacity: int) -> None:
        for column in self.columns.values():
            column.resize(capacity)
        self._capacity = capacity


class RowTable(Table):
    """A table of rows in insertion order, with lookup by global index.

    Attributes:
        index: global index of each row, including future rows within the capacity.
        state: state of each row, or `CLEARED` for a gap.
    """

    __slots__ = (
        "_closing", "index", "next_index", "pin_count", "present_count", "state",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.present_count = 0  # number of rows, without gaps
        self.next_index = 0
        self.pin_count = 0  # number of readers on other threads that need stable positions
        self._closing: tuple[int, int] | None = None  # next target position, and next position to examine
        self.index = self.column("index", np.int64, _NO_INDEX)
        self.state = self.column("state", np.uint8, CLEARED)
        self._number(0)

    def rebuild(self, next_index: int) -> None:
        """Recompute the counters after the columns have been restored.

        Args:
            next_index: global index of the next row to be added.
        """
        self.next_index = next_index
        self.present_count = int(np.count_nonzero(self.state[: self.count]))
        left = np.flatnonzero(self.index[: self.count] == _NO_INDEX)
        if left.size:
            self._closing = (int(left[0]), int(left[-1]) + 1)
        self._number(self.count)

    def append(self, count: int, state: int = LIVE) -> slice:
        """Add `count` rows. Return their positions."""
        end = self.count + count
        if end > self._capacity:
            self._grow(end)
        added = slice(self.count, end)
        self.state.write(added, state)
        self.count = end
        self.next_index += count
        self.present_count += count
        return added

    def reserve_capacity(self, count: int, columns: Iterable[NewColumn] = ()) -> Iterator[None]:
        """Reserve capacity for `count` more rows in several steps. The table can be modified between the steps.

        The steps also write the indexes of the new rows, and create the given columns in advance, so declaring these
        columns with `column` is fast.
        """
        while (end := self.count + count) > self._capacity:
            self._grow(min(end, self._capacity + _CAPACITY_STEP))
            yield
        for name, dtype, fill in columns:
            spare = self._spare.setdefault(name, Column(dtype, fill, 0))
            while spare.data.size < self._capacity:
                spare.resize(min(self._capacity, spare.data.size + _CAPACITY_STEP))
                yield

    def return_capacity(self) -> None:
        """Free unused memory that was reserved for rows."""
        self._spare.clear()
        if self._capacity > 2 * self.count + _CAPACITY_STEP:
            self._resize(grown(0, self.count))

    def _grow(self, least: int) -> None:
        start = self._capacity
        self._resize(grown(start, least))
        self._number(start)

    def _number(self, start: int) -> None:
        """Write the global indexes of future rows, from position `start` up to the capacity."""
        first = self.next_index - self.count
        self.index.write(slice(start, self._capacity), np.arange(first + start, first + self._capacity))

    def remove(self, positions: Indexes) -> None:
        """Remove the rows at the given positions, which must be distinct. Remaining rows may move to close gaps."""
        where = as_slice(positions)
        for column in self.columns.values():
            if column is not self.index:
                column.clear(where)
        self.present_count -= positions.size
        self.close_gaps(positions.size)

    def close_gaps(self, changed_count: int) -> None:
        """If there are many gaps, close some of them. The amount of work is proportional to `changed_count`.

        Rows may move to new positions, so call this method only when the current step no longer uses positions.
        `remove` calls this method automatically.

        Args:
            changed_count: number of rows that the step added or removed.
        """
        if self.pin_count:
            return
        gaps = self.gap_count
        if self._closing is None and (gaps < _LEAST_GAPS or gaps <= self.present_count):
            return
        to, start = self._closing or (0, 0)
        end = min(self.count, start + max(_LEAST_CLOSED, _CLOSED_SHARE * changed_count))
        if self.present_count:
            to = self._move_rows(start, end, to)
        else:
            to, end = 0, self.count
        self._closing = (to, end)
        if end == self.count:
            self._closing, self.count = None, to
            self._resize(grown(0, to))
            self._number(to)

    def _move_rows(self, start: int, end: int, to: int) -> int:
        """Move the rows between `start` and `end` to the positions starting at `to`. Return the next free position."""
        rows = start + np.flatnonzero(self.state[start:end] != CLEARED)
        end_of_moved = to + rows.size
        if end_of_moved == end:  # no gap before this position
            return end
        source, moved, left = as_slice(rows), slice(to, end_of_moved), slice(max(end_of_moved, start), end)
        for column in self.columns.values():
            if not column.is_blank:
                column.write(moved, column[source])
                column.write(left, column.fill)
        return end_of_moved

    @property
    def gap_count(self) -> int:
        """Number of positions that no row occupies."""
        return self.count - self.present_count

    @property
    def has_many_gaps(self) -> bool:
        """Whether there are so many gaps that new readers must wait before pinning the table."""
        return self.gap_count > _MANY_GAPS + 2 * self.present_count

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep all rows in place during the `with` block, so that another thread can read them."""
        self.pin_count += 1
        try:
            yield
        finally:
            self.pin_count -= 1

    def slices(self, count: int) -> Iterator[slice]:
        """Yield slices of at most `count` positions that together contain all present rows in order.

        Use each slice before yielding control, because rows may then be added, removed or moved.
        """
        end_index, index = self.next_index, 0
        while (start := self.position_from(index)) < (end := self.position_from(end_index)):
            stop = min(start + count, end)
            index = int(self.index[start:stop].max()) + 1
            yield slice(start, stop)

    def find(self, indexes: Indexes) -> Indexes:
        """Return an array of shape `(n,)` with the position of each global index, or -1 if the row does not exist."""
        if self.count == 0 or indexes.size == 0:
            return np.full(indexes.size, -1, np.int64)
        if self._is_gapless:
            positions: Indexes = indexes - self.index.data[0]
            if positions.view(np.uint64).max() < self.count:  # negative positions are huge as unsigned integers
                if self.present_count == self.count:
                    return positions
                found = self.state.data[positions] != CLEARED
                return positions if found.all() else np.where(found, positions, -1)
        positions = np.minimum(self._search(indexes), self.count - 1)
        found = (self.index[positions] == indexes) & (self.state[positions] != CLEARED)
        return positions if found.all() else np.where(found, positions, -1)

    @property
    def _is_gapless(self) -> bool:
        """Whether every gap between the first and last rows is still open, so an index determines a row's position."""
        return self._closing is None and self.next_index - int(self.index.data[0]) == self.count

    @property
    def layout(self) -> tuple[object, ...]:
        """A value that changes whenever rows move."""
        return self.count, self._closing

    @property
    def removed_count(self) -> int:
        """Total number of rows that have been removed."""
        return self.next_index - self.present_count

    def position_from(self, index: int) -> int:
        """Return the position of the first row whose global index is at least `index`."""
        if self.count == 0:
            return 0
        if index >= self.next_index:
            return self.count
        if self._is_gapless:
            return max(0, index - int(self.index[0]))
        return int(self._search(np.array([index]))[0])

    def _search(self, indexes: Indexes) -> Indexes:
        """For each index, return the position of the first row or gap whose index is at least as large."""
        index = self.index.data
        if self._closing is None:
            return np.searchsorted(index[: self.count], indexes)
        to, start = self._closing
        moved = np.searchsorted(index[:to], indexes)
        return np.where(moved < to, moved, start + np.searchsorted(index[start : self.count], indexes))

    def present_positions(self) -> Indexes:
        """Return the positions of all present rows."""
        return np.flatnonzero(self.state[: self.count] != CLEARED)

    def present_from(self, index: int, count: int) -> Indexes:
        """Return the positions of up to `count` rows whose global index is at least `index`, in order."""
        start = self.position_from(index)
        found: list[Indexes] = []
        while count > 0 and start < self.count:
            end = min(self.count, start + max(count, _LEAST_GAPS))
            some = start + np.flatnonzero(self.state[start:end] != CLEARED)[:count]
            found.append(some)
            count, start = count - some.size, end
        return np.concatenate(found) if found else np.zeros(0, np.int64)


class SlotTable(Table):
    """A table of slots that can be allocated and freed. Each column has one value per slot.

    Attributes:
        occupants: column with the object that occupies each slot, or None for a free slot.
    """

    __slots__ = ("_free", "occupants")

    def __init__(self, occupants: str) -> None:
        super().__init__()
        self.occupants = self.column(occupants, np.object_, None)
        self._free: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether all slots are free."""
        return self.count == len(self._free)

    def allocate(self, count: int) -> Sequence[int]:
        """Allocate `count` slots. `count` must be at least 1."""
        slots = self._free[-count:]
        del self._free[-count:]
        first, self.count = self.count, self.count + count - len(slots)
        if self.count > self._capacity:
            self._resize(grown(self._capacity, self.count))
        new = range(first, self.count)
        return [*slots, *new] if slots else new

    def free_slots(self, slots: Indexes) -> None:
        """Free the given slots, which must be distinct, and reset their values in all columns."""
        for column in self.columns.values():
            column.clear(slots)
        self._free += slots.tolist()

    def rebuild(self) -> None:
        """Rebuild the list of free slots from the restored columns."""
        self._free = [slot for slot, each in enumerate(self.occupants.data[: self.count].tolist()) if each is None]


def distinct(values: Indexes, bound: int) -> Indexes:
    """Return the distinct values in ascending order. All values must be between 0 and `bound` - 1.

    If `values` is large compared with `bound`, the values are marked in an array of size `bound`. Otherwise, the values
    are sorted.
    """
    if values.size < 2 or bool((values[1:] > values[:-1]).all()):
        return values
    if values.size * _MARKED_SHARE > bound:
        marks = np.zeros(bound, np.bool_)
        marks[values] = True
        return np.flatnonzero(marks)
    ordered = np.sort(values)
    return ordered[np.r_[True, ordered[1:] != ordered[:-1]]]


def count_values(values: Indexes) -> tuple[Indexes, Indexes]:
    """Return the distinct values in ascending order and the count of each value.

    The function is fast if most adjacent values are equal.
    """
    if values.size == 0:
        return values, values
    heads = np.r_[0, np.flatnonzero(np.diff(values)) + 1]
    lengths = np.diff(heads, append=values.size)
    order = np.argsort(values[heads], kind="stable")
    ordered = values[heads[order]]
    firsts = np.r_[0, np.flatnonzero(np.diff(ordered)) + 1]
    return ordered[firsts], np.add.reduceat(lengths[order], firsts)


def as_slice(positions: slice | Indexes) -> slice | Indexes:
    """Convert a long run of positions to a slice, because NumPy copies a slice faster than it gathers single values.

    All other positions are returned unchanged.
    """
    if isinstance(positions, slice):
        return positions
    size = positions.size
    if size <= _FEW or int(positions[-1]) - int(positions[0]) != size - 1:
        return positions
    is_ascending = bool((positions[1:] > positions[:-1]).all())
    return slice(int(positions[0]), int(positions[0]) + size) if is_ascending else positions
