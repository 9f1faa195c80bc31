"""Columns of values, and how one is read by another thread as it was at one moment while it goes on changing.

A long column of numbers lies in reserved memory and grows where it is: nothing is copied, however long it is. A short
one, or one of objects, moves to an array of at least twice its size. Linux backs an anonymous mapping with pages as
they are first written to, so reserving far more than is needed costs address space only, and views that readers have
keep their memory.

A snapshot of a column copies nothing. A change of the column afterwards first keeps the blocks it is about to touch: it
costs a copy of a few thousand values at most, however long the column is, and only while somebody still reads.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tq_service.domain.plan import Indexes

RESERVED_FROM: Final = 1 << 16  # values from which on a column of numbers grows where it is
_RESERVED: Final = 1 << 26  # values for which it has room then; as many again, four times over, beyond that
_GROWTH: Final = 1 << 14  # values by which it grows at least
_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_NEVER: Final = "2"
_MAP_NORESERVE: Final = 0x4000  # Linux; the mmap module of Python 3.11 does not have it
_HUGE_PAGES_FROM: Final = 4 << 20  # where a page of 2 MiB of which little is used is a small share
_BLOCK_SHIFT = 12
_BLOCK_ROWS = 1 << _BLOCK_SHIFT
Where = slice | Indexes | int


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

    __slots__ = ("_array", "_memory", "_snapshots", "data", "fill", "is_blank")

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
        if kept is None and self._array.size <= capacity <= self._memory.size:
            self._use(self._array.size, capacity)
            return
        old, is_blank = self.data[:used], self.is_blank
        self._move(capacity, capacity if kept is not None else max(capacity, 2 * self._array.size), old.dtype)
        if not is_blank:
            values = old if kept is None else old[kept]
            self.write(slice(0, values.size), values)

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
        self._memory = _zeros(room, dtype)
        self._snapshots = []
        self.is_blank = True
        self._use(0, capacity)

    def _use(self, start: int, capacity: int) -> None:
        """Have `capacity` values, those from `start` on for the first time."""
        self._array = self._memory[:capacity]
        if self.fill is not None and self.fill != 0:
            self._array[start:] = self.fill
        self.data: NDArray[Any] = self._array.view()
        self.data.flags.writeable = False


def grown(capacity: int, least: int) -> int:
    """Return the capacity for at least so many values; large columns grow where they are, and so by little."""
    if least < RESERVED_FROM:
        return max(least, 2 * capacity)
    return -(-least // _GROWTH) * _GROWTH


def _zeros(room: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros, or for objects None, of memory that is not touched yet."""
    if dtype.kind == "O":
        return np.empty(room, dtype)
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
    try:
        memory = mmap.mmap(
            -1,
            count * np.dtype(dtype).itemsize,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        )
    except (OSError, ValueError, OverflowError):  # a limit of the process or of the machine
        return None
    if len(memory) > _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_PAGES_FROM)
    return np.frombuffer(memory, dtype)


@cache
def _can_reserve() -> bool:
    """Whether what is only reserved counts for nothing; a machine that never overcommits counts it as used."""
    if sys.platform != "linux":
        return False
    try:
        return _OVERCOMMIT.read_text().strip() != _NEVER
    except OSError:
        return True
