"""Memory of long columns, which grow where they are: nothing is copied, however long they are.

A long column of numbers lies in reserved memory. Linux backs an anonymous mapping with pages as they are first written
to, so reserving far more than is needed costs address space only, and views that readers have keep their memory. Of
objects numpy cannot do the same: a long column of them is in chunks, of which growing adds one.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tq_service.state.plan import Indexes

BLOCK_SHIFT: Final = 12
BLOCK_ROWS: Final = 1 << BLOCK_SHIFT
"""Values of a column that are kept for snapshots together."""
RESERVED_FROM: Final = 1 << 16  # values from which on a column grows where it is
_RESERVED: Final = 1 << 26  # values that memory is reserved for then; as many again, four times over, beyond that
_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_NEVER: Final = "2"
_MAP_NORESERVE: Final = 0x4000  # Linux; the mmap module of Python 3.11 does not have it
_HUGE_PAGE_BYTES: Final = 2 << 20
_HUGE_PAGES_FROM: Final = 4 << 20  # where a huge page of which little is used is a small share
_offsets = itertools.count(0, 83)  # so that columns that grow together do not all take their next huge page at once
_CHUNK_SHIFT: Final = 16
_CHUNK_MASK: Final = (1 << _CHUNK_SHIFT) - 1
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


def blocks_of(where: Where, size: int) -> Iterable[int]:
    """Return the blocks of the first `size` rows that some positions, or a mask over the rows, are in."""
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
    if bool((numbers == first).all()):  # most reads: samples that were put together
        yield first, slice(None), positions & _CHUNK_MASK
        return
    order = np.argsort(numbers, kind="stable")
    for here in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        yield int(numbers[here[0]]), here, positions[here] & _CHUNK_MASK


def zeros(count: int, dtype: np.dtype[Any], fill: Any) -> NDArray[Any] | ObjectChunks:
    """Return zeros, or for objects None or the fill, of memory that is not touched yet; more than `count` if many."""
    if count < RESERVED_FROM:
        return np.zeros(count, dtype) if dtype.kind != "O" else np.empty(count, dtype)
    if dtype.kind == "O":
        return ObjectChunks(count, fill)
    reserved = reserved_zeros(_RESERVED if count <= _RESERVED else 4 * count, dtype)
    return np.zeros(2 * count, dtype) if reserved is None else reserved


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


def reserved_memory(values: NDArray[Any] | ObjectChunks) -> mmap.mmap | None:
    """Return the memory that values were reserved in, None for others."""
    base: Any = getattr(values, "base", None)
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, mmap.mmap) else None


def give_back(values: NDArray[Any], memory: mmap.mmap, start: int, stop: int) -> None:
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
