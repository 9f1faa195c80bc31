"""Columns of values, and how one is read by another thread as it was at one moment while it goes on changing.

A long column of numbers lies in reserved memory and grows where it is: nothing is copied, however long it is. A short
one moves to an array of at least twice its size. Linux backs an anonymous mapping with pages as they are first written
to, so reserving far more than is needed costs address space only, and views that readers have keep their memory. Of
objects numpy cannot do the same: a long column of them is in chunks, of which growing adds one.

A snapshot of a column copies nothing. A change of the column afterwards first keeps the blocks it is about to touch: it
costs a copy of a few thousand values at most, however long the column is, and only while somebody still reads.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import sys
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tq_service.domain.plan import Indexes

RESERVED_FROM: Final = 1 << 16  # values from which on a column grows where it is
_RESERVED: Final = 1 << 26  # values for which it has room then; as many again, four times over, beyond that
_GROWTH: Final = 1 << 14  # values by which it grows at least
_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_NEVER: Final = "2"
_MAP_NORESERVE: Final = 0x4000  # Linux; the mmap module of Python 3.11 does not have it
_HUGE_PAGE_BYTES: Final = 2 << 20
_HUGE_PAGES_FROM: Final = 4 << 20  # where a huge page of which little is used is a small share
_offsets = itertools.count(0, 83)  # so that columns that grow together do not all take their next huge page at once
_CHUNK_SHIFT: Final = 16
_CHUNK_MASK: Final = (1 << _CHUNK_SHIFT) - 1
_BLOCK_SHIFT = 12
_BLOCK_ROWS = 1 << _BLOCK_SHIFT
Where = slice | Indexes | int


class ObjectChunks:
    """Objects in chunks that are made as they are written to, so that growing moves none; read like an array of them.

    Attributes:
        size: number of objects; those that were never written are `fill`.
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
        """Write objects: one for each position, or one for all."""
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
                self._forget(number, there)
            else:
                self._chunk(number)[there] = values if is_one else given[here]

    def _forget(self, number: int, there: Any) -> None:
        """Have the fill again; a chunk that has nothing else takes no memory."""
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
        """Return the number of positions, and by chunk which of them are there, and where in the chunk."""
        if isinstance(where, slice):
            start, stop, step = where.indices(self.size)
            if step == 1:
                return max(0, stop - start), _parts_of_slice(start, stop)
        positions = np.arange(self.size)[where] if isinstance(where, slice) or where.dtype == np.bool_ else where
        return positions.size, _parts_of_positions(positions)


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
    if bool((numbers == first).all()):  # most reads: samples that were put together
        yield first, slice(None), positions & _CHUNK_MASK
        return
    order = np.argsort(numbers, kind="stable")
    for here in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        yield int(numbers[here[0]]), here, positions[here] & _CHUNK_MASK


class ColumnSnapshot:
    """The first `size` values of a column as they were when it was made; to be read once, in order, by any thread.

    The column keeps a block before it changes it (on its own thread), and the reader looks for a kept block after it
    has copied the one of the column: what it copied then began to change only afterwards.
    """

    __slots__ = ("__weakref__", "_array", "_kept", "_next_block", "size")

    def __init__(self, array: NDArray[Any], size: int) -> None:
        self.size = size
        self._array = array
        self._kept: dict[int, NDArray[Any]] = {}
        self._next_block = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self._array.dtype

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the values, a few thousand at a time."""
        for number in range(-(-self.size // _BLOCK_ROWS)):
            block = self._block(number)
            self._next_block = number + 1
            yield self._kept.pop(number, block)
        self._next_block = self.size + 1

    def values(self) -> NDArray[Any]:
        """Return all values; a column of many takes as long as its copy."""
        values = np.empty(self.size, self.dtype)
        start = 0
        for block in self.blocks():
            values[start : start + block.size] = block
            start += block.size
        return values

    def keep(self, where: Where) -> None:
        """Keep what is about to change, as far as it is still to be read; called by the column."""
        for number in self._touched(where):
            if number >= self._next_block and number not in self._kept:
                self._kept[number] = self._block(number)

    def _touched(self, where: Where) -> Iterable[int]:
        if isinstance(where, int):
            return (where >> _BLOCK_SHIFT,) if where < self.size else ()
        if not isinstance(where, slice):
            return set((where[where < self.size] >> _BLOCK_SHIFT).tolist())
        start, stop, _ = where.indices(self.size)
        return range(start >> _BLOCK_SHIFT, -(-stop // _BLOCK_ROWS)) if start < stop else ()

    def _block(self, number: int) -> NDArray[Any]:
        return self._array[number << _BLOCK_SHIFT : min((number + 1) << _BLOCK_SHIFT, self.size)].copy()


class Column:
    """One fact per row, or per slot.

    Attributes:
        data: the values, and more up to the capacity; read-only, and replaced whenever the column grows or is
            compacted. What a reader took before is the same memory, unless the column moved.
        fill: what stands where nothing was written.
        is_blank: whether nothing was ever written, so that it has nothing but the fill.
    """

    __slots__ = ("_array", "_memory", "_room", "_snapshots", "data", "fill", "is_blank")

    def __init__(self, dtype: DTypeLike, fill: Any, capacity: int) -> None:
        self.fill = fill
        self._snapshots: list[weakref.ref[ColumnSnapshot]] = []
        self._move(capacity, capacity, np.dtype(dtype))

    def __getitem__(self, where: Any) -> Any:
        return self.data[where]

    def write(self, where: Where, values: Any) -> None:
        """Change values; positions are 0 or more, and each is given once."""
        if self._snapshots:
            self._keep(where)
        if isinstance(self._memory, ObjectChunks):
            self._memory.assign(where, values)
        else:
            self._array[where] = values
        self.is_blank = False

    def clear(self, where: Where) -> None:
        """Have the fill where something may be written."""
        if not self.is_blank:
            self.write(where, self.fill)

    def add(self, where: Indexes, by: int) -> None:
        """Add to values, as often as their positions are given."""
        if self._snapshots:
            self._keep(where)
        np.add.at(self._array, where, by)
        self.is_blank = False

    def resize(self, capacity: int, kept: NDArray[np.bool_] | Where | None, used: int) -> None:
        """Have room for `capacity` values, of which the first `used` stay, or those `kept` of them.

        Growing copies nothing where the memory has room behind the column.
        """
        if kept is None and self._array.size <= capacity <= self._room:
            self._use(self._array.size, capacity)
            return
        old, is_blank = self.data, self.is_blank
        self._move(capacity, capacity if kept is not None else max(capacity, 2 * self._array.size), old.dtype)
        if not is_blank:
            values = old[:used] if kept is None else old[:used][kept]
            self.write(slice(0, values.size), values)

    def shrink(self, capacity: int, used: int) -> None:
        """Have room for `capacity` values only, of which the first `used` stay; there is the fill beyond these.

        It copies nothing where the memory behind can be given back.
        """
        memory = self._memory
        if isinstance(memory, ObjectChunks):
            memory.size = capacity
        elif (reserved := _reserved_memory(memory)) is not None:
            if self._snapshots:
                self._keep(slice(capacity, None))
            _give_back(memory, reserved, capacity, self._array.size)
            self._use(capacity, capacity)
        else:
            self.resize(capacity, slice(0, used), used)

    def convert(self, dtype: DTypeLike) -> None:
        """Change the type of all values."""
        old = self.data
        self._move(old.size, self._memory.size, np.dtype(dtype))
        self.write(slice(0, old.size), old)

    def snapshot(self, size: int) -> ColumnSnapshot:
        """Return the first `size` values as they are now; it costs the same however many there are."""
        snapshot = ColumnSnapshot(self._array, size)
        self._snapshots.append(weakref.ref(snapshot))
        return snapshot

    def restore(self, snapshot: ColumnSnapshot) -> None:
        """Take over the values of a snapshot; memory for blocks of nothing but the fill is left untouched."""
        start = 0
        for block in snapshot.blocks():
            if block.dtype.kind in "fO" or not bool((block == self.fill).all()):  # -0.0 is equal to 0.0
                self.write(slice(start, start + block.size), block)
            start += block.size

    def _keep(self, where: Where) -> None:
        readers = [snapshot for reference in self._snapshots if (snapshot := reference()) is not None]
        for snapshot in readers:
            snapshot.keep(where)
        if len(readers) < len(self._snapshots):
            self._snapshots = [weakref.ref(snapshot) for snapshot in readers]

    def _move(self, capacity: int, room: int, dtype: np.dtype[Any]) -> None:
        """Go on in other memory that has room for so many values; snapshots have the old one for themselves."""
        self._memory = _zeros(room, dtype, self.fill)
        self._room = sys.maxsize if isinstance(self._memory, ObjectChunks) else self._memory.size
        self._snapshots = []
        self.is_blank = True
        self._use(0, capacity)

    def _use(self, start: int, capacity: int) -> None:
        """Have `capacity` values, those from `start` on for the first time."""
        self.data: NDArray[Any]
        if isinstance(self._memory, ObjectChunks):
            self._memory.size = capacity
            self._array = self.data = cast("NDArray[Any]", self._memory)  # it is read like one
            return
        self._array = self._memory[:capacity]
        if self.fill is not None and self.fill != 0:
            self._array[start:] = self.fill
        self.data = self._array.view()
        self.data.flags.writeable = False


def grown(capacity: int, least: int) -> int:
    """Return the capacity for at least so many values; large columns grow where they are, and so by little."""
    if least < RESERVED_FROM:
        return max(least, 2 * capacity)
    return -(-least // _GROWTH) * _GROWTH


def _zeros(room: int, dtype: np.dtype[Any], fill: Any) -> NDArray[Any] | ObjectChunks:
    """Return zeros, or for objects None or the fill, of memory that is not touched yet."""
    if dtype.kind == "O":
        return ObjectChunks(room, fill) if room >= RESERVED_FROM else np.empty(room, dtype)
    if room >= RESERVED_FROM:
        reserved = reserved_zeros(_RESERVED if room <= _RESERVED else 4 * room, dtype)
        if reserved is not None:
            return reserved
    return np.zeros(room, dtype)


def reserved_zeros(count: int, dtype: DTypeLike) -> NDArray[Any] | None:
    """Return `count` zeros that take memory only as they are written; None where that cannot be had.

    The memory is given back with the last array over it.
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
    except (OSError, ValueError, OverflowError):  # a limit of the process or of the machine
        return None
    if len(memory) > _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_PAGES_FROM)
    return np.frombuffer(memory, dtype, count, offset)


def _reserved_memory(values: NDArray[Any]) -> mmap.mmap | None:
    """Return the memory that values were reserved in, None for others."""
    base: Any = values.base
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, mmap.mmap) else None


def _give_back(values: NDArray[Any], memory: mmap.mmap, start: int, stop: int) -> None:
    """Have the kernel take back the whole pages of values in memory; they are zeros then."""
    offset = values.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
    first = -(-(offset + start * values.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = offset + stop * values.itemsize
    if first < end:
        memory.madvise(mmap.MADV_DONTNEED, first, end - first)


@cache
def _can_reserve() -> bool:
    """Whether what is only reserved counts for nothing; a machine that never overcommits counts it as used."""
    if sys.platform != "linux":
        return False
    try:
        return _OVERCOMMIT.read_text().strip() != _NEVER
    except OSError:
        return True
