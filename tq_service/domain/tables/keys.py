"""Where the row of each key is.

Keys of small writes are in a dict. Once they are many they go to a hash table in numpy, as those of larger writes do at
once: it takes in thousands in the time that a large dict needs for hundreds, a third of its memory, and no step of it
is long, since it grows by moving a few thousand entries with each write.

An entry is a hint: which row may have a key of this hash. What counts is the key that the row has, so that nothing is
to be done here as rows are removed: an entry whose row is gone is as good as none, and is left behind when others move.
Python's hash of a text is used, which is another one in each process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.plan import Indexes
from tq_service.domain.tables.column_memory import RESERVED_FROM, reserved_zeros
from tq_service.domain.tables.table import RowTable

_MANY: Final = 1 << 12  # keys of a write that begins a hash table, or in the dict beside one
_MOST_RECENT: Final = 1 << 17  # keys in the dict where there is no hash table
_FEW: Final = 128  # keys of a write that go to the dict, and are looked for one by one
_EMPTY: Final = 0
_HASH_BITS: Final = 63
_MOST: Final = (1 << _HASH_BITS) - 1
_MOST_PROBES: Final = 64
_LEAST_MOVED: Final = 1 << 12
_REBUILT_AT_ONCE: Final = 1 << 16


def hashes_of(keys: Sequence[str]) -> Indexes:
    """Return a number for each key `(n,)` of which all bits but the first and the last are random."""
    return np.fromiter(map(hash, keys), np.int64, len(keys)) & _MOST | 1


class _Slots:
    """Global indexes of rows by hash: in the slot that the first bits of the hash name, or in one of the next.

    So those of neighbouring slots are moved to neighbouring slots of a larger table. No entry is ever taken out.

    Attributes:
        used_count: slots that are in use, at most.
    """

    def __init__(self, bits: int) -> None:
        self.size = 1 << bits
        self.shift = _HASH_BITS - bits
        self.used_count = 0
        count = 2 * (self.size + _MOST_PROBES)
        memory = reserved_zeros(count, np.int64) if count >= RESERVED_FROM else None
        entries = np.zeros(count, np.int64) if memory is None else memory
        self.hashes, self.indexes = entries.reshape(-1, 2).T
        self._entries: memoryview[int] = entries.data  # of which one is read sooner than of an array

    def slots_of(self, hashes: Indexes) -> Indexes:
        """Return the slot of each hash, or the free one where it would be; another's where there is none."""
        slots = hashes >> self.shift
        left = np.arange(slots.size)
        for _ in range(_MOST_PROBES - 1):
            found = self.hashes[slots[left]]
            left = left[(found != _EMPTY) & (found != hashes[left])]
            if not left.size:
                break
            slots[left] += 1
        return slots

    def find(self, hashes: Indexes) -> Indexes:
        """Return the index of the row that may have a hash `(n,)`, -1 where there is none."""
        slots = self.slots_of(hashes)
        return np.where(self.hashes[slots] == hashes, self.indexes[slots], -1)

    def find_few(self, hashes: Iterable[int]) -> list[int]:
        """Return the same for few hashes, in a fraction of the time."""
        entries, shift, found = self._entries, self.shift, []
        for hashed in hashes:
            place = 2 * (hashed >> shift)
            while (other := entries[place]) != hashed and other != _EMPTY:  # as the last one is
                place += 2
            found.append(entries[place + 1] if other else -1)
        return found

    def put(self, hashes: Indexes, indexes: Indexes, are_there: Callable[[Indexes], NDArray[np.bool_]]) -> Indexes:
        """Enter rows; return which find no place: no slot is free near theirs, or a row that is there has the hash."""
        self.used_count += hashes.size
        left, refused = np.arange(hashes.size), [np.zeros(0, np.int64)]
        while left.size:
            slots = self.slots_of(hashes[left])
            found = self.hashes[slots]
            may_write = found == _EMPTY
            taken = np.flatnonzero(~may_write)
            if taken.size:
                may_write[taken] = (found == hashes[left])[taken] & ~are_there(self.indexes[slots[taken]])
                refused.append(left[~may_write])
                left, slots = left[may_write], slots[may_write]
            self.hashes[slots] = hashes[left]
            self.indexes[slots] = indexes[left]
            left = left[self.indexes[slots] != indexes[left]]  # of two that would have the same slot, one has it
        return np.concatenate(refused)


class KeyIndex(Collection[str]):
    """Finds rows by their keys, which are in the column `key` of the table; as a collection, the keys there are.

    Attributes:
        column: the key of each row, None for one without.
    """

    def __init__(self, table: RowTable) -> None:
        self.column = table.column("key", np.object_, None)
        self._table = table
        self.clear()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self.find([key])[0] >= 0)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in order of their rows, some at a time: few are asked for."""
        for start in range(0, self._table.count, _MANY):
            keys = self.column.data[start : min(start + _MANY, self._table.count)]
            yield from keys[keys != None].tolist()  # noqa: E711  (of each)

    def clear(self) -> None:
        """Forget all keys, as no row is left."""
        self._count = 0
        self._recent: dict[str, int] = {}  # global indexes
        self._most_recent = _MOST_RECENT
        self._slots = _Slots(0)
        self._next: _Slots | None = None  # where the entries of the first slots are moved to
        self._moved = 0  # slots whose entries were moved; the last of them is empty, so none of them is in a later one

    def find(self, keys: Sequence[str], hashes: Indexes | None = None) -> Indexes:
        """Return the positions of the rows that have keys `(n,)`, -1 where there is none."""
        positions = np.fromiter(map(self._recent.get, keys, itertools.repeat(-1)), np.int64, len(keys))
        which = np.flatnonzero(positions >= 0)
        if which.size:
            positions[which] = self._table.find(positions[which])
        if self._slots.used_count:
            hints = self._hints(keys, hashes)
            which = np.flatnonzero(hints >= 0)
            if which.size:
                found = self._table.find(hints[which])
                which, found = which[found >= 0], found[found >= 0]
                is_same = self.column.data[found] == np.array([keys[each] for each in which.tolist()], np.object_)
                positions[which[is_same]] = found[is_same]
        return positions

    def _hints(self, keys: Sequence[str], hashes: Indexes | None) -> Indexes:
        """Return the indexes of the rows that may have keys in the hash table `(n,)`, -1 where there is none."""
        if hashes is None and len(keys) <= _FEW:
            few = [hash(key) & _MOST | 1 for key in keys]
            if self._next is None:
                return np.array(self._slots.find_few(few))
            end = self._moved << self._slots.shift
            return np.array([(self._slots if each >= end else self._next).find_few((each,))[0] for each in few])
        hashes = hashes_of(keys) if hashes is None else hashes
        hints = np.empty(len(keys), np.int64)
        for slots, part in self._parts(hashes):
            hints[part] = slots.find(hashes[part])
        return hints

    def add(self, keys: Sequence[str], first_index: int, hashes: Indexes | None = None) -> None:
        """Enter the keys of new rows, which no other row has."""
        self._count += len(keys)
        indexes = range(first_index, first_index + len(keys))
        if len(keys) > (_FEW if self._slots.used_count else _MANY):
            self._enter(keys, np.arange(indexes.start, indexes.stop), hashes)
        else:
            self._recent.update(zip(keys, indexes, strict=True))
        if len(self._recent) > self._most_recent:
            oldest = list(itertools.islice(self._recent, _MANY))
            known = map(self._recent.pop, oldest)
            self._enter(oldest, np.fromiter(known, np.int64, len(oldest)))

    def on_rows_cleared(self, positions: Indexes) -> None:
        """Count keys off, of rows that are still there."""
        if self._count:
            self._count -= int(np.count_nonzero(self.column.data[positions] != None))  # noqa: E711  (of each)
        if self._count == 0:
            self.clear()
        elif self._slots.used_count:
            self._move_some(positions.size)

    def rebuild(self) -> None:
        """Enter the keys of restored rows."""
        keys = self.column.data[: self._table.count]
        rows = np.flatnonzero(keys != None)  # noqa: E711  (of each)
        self._count = rows.size
        for start in range(0, rows.size, _REBUILT_AT_ONCE):
            some = rows[start : start + _REBUILT_AT_ONCE]
            self._enter(keys[some].tolist(), self._table.index.data[some])

    def _enter(self, keys: Sequence[str], indexes: Indexes, hashes: Indexes | None = None) -> None:
        """Enter keys into the hash table, and those that find no place there into the dict."""
        if not self._slots.used_count:
            self._most_recent = _MANY
        self._move_some(len(keys))
        hashes = hashes_of(keys) if hashes is None else hashes
        for slots, part in self._parts(hashes):
            refused = part[slots.put(hashes[part], indexes[part], self._are_there)].tolist()
            self._recent.update((keys[each], int(indexes[each])) for each in refused)
            self._most_recent += 2 * len(refused)  # they come back again and again

    def _are_there(self, indexes: Indexes) -> NDArray[np.bool_]:
        return self._table.find(indexes) >= 0

    def _parts(self, hashes: Indexes) -> Iterator[tuple[_Slots, Indexes]]:
        """Yield the tables with which of the hashes belong to each."""
        if self._next is None:
            yield self._slots, np.arange(hashes.size)
        else:
            is_moved = hashes >> self._slots.shift < self._moved
            yield self._next, np.flatnonzero(is_moved)
            yield self._slots, np.flatnonzero(~is_moved)

    # Growing

    def _move_some(self, changed_count: int) -> None:
        """Move entries to another table where the size of this one is wrong, as far as a step may that changes so many.

        The other one is not half full before all entries are there.
        """
        slots = self._slots
        if self._next is None:
            live_count = min(slots.used_count + changed_count, self._count)
            if slots.used_count + changed_count <= slots.size // 2 and slots.size <= max(_MANY, 64 * live_count):
                return
            self._next = _Slots((3 * live_count).bit_length())
        end = self._moved + max(_LEAST_MOVED, 8 * changed_count * slots.size // self._next.size)
        while end < slots.size and slots.hashes[end - 1] != _EMPTY:
            end += 1
        end = end if end < slots.size else slots.hashes.size
        moving = self._moved + np.flatnonzero(slots.hashes[self._moved : end])
        positions = self._table.find(slots.indexes[moving])
        moving, positions = moving[positions >= 0], positions[positions >= 0]
        refused = self._next.put(slots.hashes[moving], slots.indexes[moving], self._are_there)
        keys = self.column.data[positions[refused]].tolist()
        self._recent.update(zip(keys, slots.indexes[moving[refused]].tolist(), strict=True))
        self._moved = end
        if end == slots.hashes.size:
            self._slots, self._next, self._moved = self._next, None, 0
