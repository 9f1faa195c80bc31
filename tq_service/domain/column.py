"""Columns of values, and how one is read by another thread as it was at one moment while it goes on changing.

Freezing a column copies nothing. Who changes it afterwards first keeps the blocks he is about to touch, so that a
change costs a copy of a few thousand values at most, however long the column is, and only while somebody still reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tq_service.domain.plan import Indexes

_BLOCK_SHIFT = 12
_BLOCK_ROWS = 1 << _BLOCK_SHIFT
Where = slice | Indexes | int


class FrozenColumn:
    """The first `size` values of a column as they were when it was frozen; to be read once, in order, by any thread.

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
        data: the values, and room for more; read-only, and replaced whenever the column grows or is compacted.
        fill: what stands where nothing was written.
    """

    __slots__ = ("_array", "_frozen", "data", "fill")

    def __init__(self, dtype: DTypeLike, fill: Any, capacity: int) -> None:
        self.fill = fill
        self._frozen: list[weakref.ref[FrozenColumn]] = []
        self._replace(_filled(capacity, fill, dtype))

    def __getitem__(self, where: Any) -> Any:
        return self.data[where]

    def write(self, where: Where, values: Any) -> None:
        """Change values; positions are 0 or more, and each is given once."""
        if self._frozen:
            self._keep(where)
        self._array[where] = values

    def add(self, where: Indexes, by: int) -> None:
        """Add to values, as often as their positions are given."""
        if self._frozen:
            self._keep(where)
        np.add.at(self._array, where, by)

    def resize(self, capacity: int, kept: NDArray[np.bool_] | None, used: int) -> None:
        """Move the first `used` values, or those `kept` of them, to a new array."""
        old = self.data[:used] if kept is None else self.data[:used][kept]
        array = _filled(capacity, self.fill, old.dtype)
        array[: old.size] = old
        self._replace(array)

    def convert(self, dtype: DTypeLike) -> None:
        """Change the type of all values."""
        self._replace(self.data.astype(dtype))

    def thaw(self, frozen: FrozenColumn, capacity: int) -> None:
        """Take over the values of a frozen column, with room for more."""
        array = _filled(capacity, self.fill, frozen.dtype)
        start = 0
        for block in frozen.blocks():
            array[start : start + block.size] = block
            start += block.size
        self._replace(array)

    def freeze(self, size: int) -> FrozenColumn:
        """Return the first `size` values as they are now; it costs the same however many there are."""
        frozen = FrozenColumn(self._array, size)
        self._frozen.append(weakref.ref(frozen))
        return frozen

    def _keep(self, where: Where) -> None:
        readers = [frozen for reference in self._frozen if (frozen := reference()) is not None]
        for frozen in readers:
            frozen.keep(where)
        if len(readers) < len(self._frozen):
            self._frozen = [weakref.ref(frozen) for frozen in readers]

    def _replace(self, array: NDArray[Any]) -> None:
        """Go on with another array; what is frozen has the old one for itself."""
        self._array = array
        self._frozen = []
        self.data: NDArray[Any] = array.view()
        self.data.flags.writeable = False


def _filled(capacity: int, fill: Any, dtype: DTypeLike) -> NDArray[Any]:
    """Return a new array; one of zeros costs nothing before it is touched, however many rows there are."""
    return np.full(capacity, fill, dtype) if fill is None or fill != 0 else np.zeros(capacity, dtype)
