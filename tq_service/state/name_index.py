"""Numbers by names, such as rows by their keys, found as in a dict however many names there are."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from tq_service.state.plan import Indexes
from tq_service.state.table import RowTable

_MOST_IN_ONE_DICT: Final = 1 << 15  # names; moving them to other dicts takes some 10 ms
_PART_COUNT: Final = 256
_HASH_MASK: Final = (1 << 16) - 1
# Parts by the last bits of a hash: the last part has twice as many names as the first, and those between grow evenly.
_PART_OF: Final = (_PART_COUNT * np.log2(1 + np.arange(_HASH_MASK + 1) / (_HASH_MASK + 1))).astype(np.uint8)
_FEW: Final = 1 << 10  # names up to which arrays cost more than they save
_GAPS_FROM_BYTES: Final = 1 << 12
_MOST_BYTES_PER_NAME: Final = 1 << 8  # of a dict; one that has just grown has up to 90

Part: TypeAlias = tuple[dict[str, int], Collection[str], Any]


class NameIndex(Collection[str]):
    """Numbers by name.

    A full dict moves all its names at once. So many names are in many dicts, each for some hashes, and of unequal
    sizes, so that each is full at another time.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[str, int]] = [{}]
        self._looked_at = 0  # the one that was last looked at for gaps

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self.find((name,))[0] >= 0)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(*self._dicts)

    def find(self, names: Sequence[str]) -> Indexes:
        """Return the number of each name `(n,)`, -1 for an unknown one."""
        numbers = np.full(len(names), -1, np.int64)
        for known, some, positions in self._parts(names):
            if not known.keys().isdisjoint(some):  # as new names are, in half the time
                numbers[positions] = list(map(known.get, some, itertools.repeat(-1)))
        return numbers

    def add(self, names: Sequence[str], numbers: Indexes) -> None:
        """Enter unknown names and their numbers `(n,)`."""
        if len(self._dicts) == 1 and len(self._dicts[0]) + len(names) > _MOST_IN_ONE_DICT:
            (known,) = self._dicts
            self._dicts = [{} for _ in range(_PART_COUNT)]
            self.add(list(known), np.fromiter(known.values(), np.int64, len(known)))
        for known, some, positions in self._parts(names):
            known.update(zip(some, numbers[positions].tolist(), strict=True))

    def remove(self, names: Sequence[str]) -> None:
        """Forget names, and give back some memory of earlier ones; unknown names are ignored."""
        for known, some, _ in self._parts(names):
            deque(map(known.pop, some, itertools.repeat(None)), maxlen=0)
        if not self:
            self._dicts = [{}]
        self._looked_at = number = (self._looked_at + 1) % len(self._dicts)
        known = self._dicts[number]
        if sys.getsizeof(known) > _GAPS_FROM_BYTES + _MOST_BYTES_PER_NAME * len(known):
            self._dicts[number] = dict(known)  # a dict keeps the gaps of removed names, its copy has none

    def free(self) -> Iterator[None]:
        """Forget all names in steps."""
        for known in self._dicts:
            known.clear()
            yield

    def _parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield each dict that names belong to, with these names and their positions."""
        if len(self._dicts) == 1:
            yield self._dicts[0], names, slice(None)
        elif len(names) <= _FEW:
            for position, name in enumerate(names):
                yield self._dicts[_PART_OF[hash(name) & _HASH_MASK]], (name,), slice(position, position + 1)
        else:
            part_of = _PART_OF[np.fromiter(map(hash, names), np.int64, len(names)) & _HASH_MASK]
            order = np.argsort(part_of, kind="stable")
            starts = np.flatnonzero(np.diff(part_of[order], prepend=_PART_COUNT))
            for positions in np.split(order, starts[1:]):
                some = list(map(names.__getitem__, positions.tolist()))
                yield self._dicts[part_of[positions[0]]], some, positions


class KeyIndex(NameIndex):
    """The global indexes of rows by their keys, which are in the column `key` of the table.

    Attributes:
        column: the key of each row, None for one without.
    """

    def __init__(self, table: RowTable) -> None:
        super().__init__()
        self.column = table.column("key", np.object_, None)
        self._table = table

    def positions_of(self, keys: Sequence[str]) -> Indexes:
        """Return the positions of the rows that have keys `(n,)`, -1 for an unknown key."""
        positions = self.find(keys)
        is_known = positions >= 0
        if is_known.any():
            positions[is_known] = self._table.find(positions[is_known])
        return positions

    def on_rows_cleared(self, positions: Indexes) -> None:
        """Forget the keys of rows that are still in the table."""
        if self:
            keys = self.column.data[positions]
            self.remove(keys[keys != None].tolist())  # noqa: E711  (of each)

    def rebuild(self) -> None:
        """Enter the keys of restored rows."""
        keys, indexes = self.column.data[: self._table.count], self._table.index.data[: self._table.count]
        is_there = keys != None  # noqa: E711  (of each)
        if not is_there.all():
            keys, indexes = keys[is_there], indexes[is_there]
        self.add(keys.tolist(), indexes)
