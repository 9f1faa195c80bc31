"""Ready rows in the order of `order_by`, sorted no further than claims have come, while rows come, change and go.

There is one `OrderedRows` for each kind of claim of a task with an order. It holds the rows that were ready when they
were last written to: a claim enters those that were written since, takes what it needs from the front, and drops what
is not ready there any more. All of it follows from the rows, and is rebuilt after a restart.

A row is there as its key: for each column of the order the value and whether there is none, then the global index,
which decides between equals. A text is a reference to the one that the table has. Keys lie in buckets, each of which
has keys that come before those of the next; a bucket is sorted when a claim comes to it, and split before where it is
large. No step does this for more than a few thousand keys, which holds the event loop, or the interpreter lock of a
sampler's thread, for a few milliseconds. (Incremental sorting, R. Paredes and G. Navarro, ALENEX 2006, with the many
pivots of a samplesort.)
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.planning.readiness import Readiness
from tq_service.state.meta import Order
from tq_service.state.plan import Indexes
from tq_service.state.table import RowTable, distinct

Keys: TypeAlias = NDArray[np.void]

_SLICE = 4096  # keys that one step makes, sorts, or puts into buckets
_FIRST_BUCKET = 128  # keys of the first bucket, all of which a claim looks at
_MOST_NOTED = 1 << 20  # new rows of one write; where they are more, all rows are looked for again
_MOST_STALE = 1024  # keys of rows that are gone, or stand elsewhere, beside as many as there are rows
_MOST_SPLITTERS = 511
_MOST_PARTS = 1 << 17  # of all buckets, before they are sorted
_SAMPLES = 8  # keys looked at for each splitter
_SIGN = np.uint64(1 << 63)


class OrderedRows:
    """The rows of one kind of claim, of one task.

    Used on the event loop, or as a copy by one thread. A row that becomes ready is written to, or reopened, in the same
    step, and noted; one that stops being ready, or stands elsewhere now, is found out when it is taken.

    Attributes:
        kinds: of what type each column is, "-" for one unknown yet; keys of other types do not compare with each other.
        is_in_use: whether it has all rows that are ready, or notes of them; else they are looked for when asked for.
    """

    def __init__(self, orders: Sequence[Order], kinds: str) -> None:
        self.kinds = kinds
        self._columns = [order for order, kind in zip(orders, kinds, strict=True) if kind != "-"]
        fields: list[tuple[str, str]] = []  # from the one that is compared first to the last
        for number, kind in enumerate(kinds.replace("-", "")):
            fields += [(f"missing{number}", "?"), (f"value{number}", "O" if kind == "O" else "u8")]
        self._dtype = np.dtype([*fields, ("index", "i8")], align=True)
        values = [f"value{number}" for number, order in enumerate(self._columns) if order.descending]
        self._backwards = frozenset(name for name in values if self._dtype[name].kind == "O")
        self.discard()

    def discard(self) -> None:
        """Forget all rows; they are looked for again when somebody asks."""
        self.is_in_use = False
        self._keys = _BucketedKeys(self._dtype, self._backwards)
        self._noted = _Parts()  # global indexes of rows that may have become ready, or have other values
        self._noted_since_asked = 0
        self._next_index = 0  # of the first row that cannot have a key yet
        self._may_stand_elsewhere = False  # whether a row that may have a key was written to
        self._fork: tuple[OrderedRows, int] | None = None  # a copy, if nothing was done here since, and what it notes

    def note(self, indexes: Indexes | range, first: int, table: RowTable) -> None:
        """Note rows that may have become ready, or have other values; `first` has the lowest global index of them."""
        if not self.is_in_use:
            return
        if isinstance(indexes, range):
            if len(indexes) > _MOST_NOTED:
                self.discard()
                return
            indexes = np.arange(indexes.start, indexes.stop)
        self._noted.add(indexes)
        self._may_stand_elsewhere |= first < self._next_index
        self._next_index = table.next_index
        self._noted_since_asked += indexes.size
        if self._noted_since_asked > table.count + _SLICE:  # no claims of this kind come any more
            self.discard()

    def fork(self, rows: Readiness) -> OrderedRows:
        """Return a copy for another thread; positions of rows must not change while it is used."""
        self._begin(rows)
        fork = copy.copy(self)
        fork._keys, fork._noted, fork._fork = self._keys.copy(), self._noted.copy(), None
        self._fork = fork, len(self._noted.parts)
        return fork

    def merge(self, fork: OrderedRows) -> None:
        """Go on with what a copy has sorted and dropped, unless something was done here since it was made."""
        if self._fork is not None and self._fork[0] is fork:
            for part in self._noted.parts[self._fork[1] :]:
                fork._noted.add(part)
            self._keys, self._noted, self._fork = fork._keys, fork._noted, None
            self.is_in_use = fork.is_in_use

    # Sorting

    def is_heavy(self, row_count: int) -> bool:
        """Whether more must be done before rows can be taken than the event loop has time for in one step."""
        if self._keys.count > 2 * row_count + _MOST_STALE:  # of rows that were written to again and again, or are gone
            self.discard()
        return (self._noted.size if self.is_in_use else row_count) > _SLICE or self._keys.is_heavy()

    def sort_some(self, rows: Readiness) -> None:
        """Do a step of what is heavy."""
        self._begin(rows)
        if self._noted.size:
            self._enter(rows)
        else:
            self._keys.sort_some()

    def _begin(self, rows: Readiness) -> None:
        self._fork = None
        self._noted_since_asked = 0
        if not self.is_in_use:
            self.is_in_use = True
            self._next_index = rows.table.next_index
            self._noted.add(rows.table.index.data[: rows.table.count])

    def _enter(self, rows: Readiness) -> None:
        """Enter rows that were noted, a slice of them."""
        indexes = distinct(self._noted.take(_SLICE), rows.table.next_index)
        try:
            positions = rows.table.find(indexes)
            positions = positions[positions >= 0]
            self._keys.add(self._keys_of(rows, positions[rows.ready(positions)]))
        except BaseException:  # such as for a length that is none
            self.discard()
            raise

    # Taking

    def first(self, rows: Readiness, count: int | None, most: int | None) -> tuple[Indexes, int, bool]:
        """Return the positions of the first ready rows, at least `count` unless there are fewer; None: all.

        They stay; what is not ready is dropped. Return also how many rows were looked at, which are few more than
        `most`, and whether there are no others. Without `most` what is heavy is done here.
        """
        self._begin(rows)
        while self._noted.size:
            self._enter(rows)
        found = [np.zeros(0, np.int64)]
        found_count = seen_count = number = 0
        while (count is None or found_count < count) and (most is None or seen_count < most):
            wanted = _SLICE if count is None else max(_FIRST_BUCKET, count - found_count, seen_count)
            keys = self._keys.bucket(number, wanted, may_be_heavy=most is None)
            if keys is None:
                break
            positions, left = self._still_ready(rows, keys)
            self._keys.replace(number, left)
            seen_count += keys.size
            found_count += positions.size
            found.append(positions)
            number += 1
        is_all = self._keys.join(number)
        return found[1] if len(found) == 2 else np.concatenate(found), seen_count, is_all

    def in_order(self, rows: Readiness, positions: Indexes) -> Indexes:
        """Return positions in the order that is asked for."""
        return positions[self._keys.order_of(self._keys_of(rows, positions))]

    def _still_ready(self, rows: Readiness, keys: Keys) -> tuple[Indexes, Keys]:
        """Return the positions and keys of rows that are ready, and that have these keys still, where they may not."""
        positions = rows.table.find(keys["index"])
        found = positions >= 0
        if not found.all():
            positions, keys = positions[found], keys[found]
        mask = rows.ready(positions)
        if self._may_stand_elsewhere:
            mask &= self._keys_of(rows, positions) == keys
        return (positions, keys) if mask.all() else (positions[mask], keys[mask])

    def _keys_of(self, rows: Readiness, positions: Indexes) -> Keys:
        keys: Keys = np.zeros(positions.size, self._dtype)  # quicker than empty ones where texts are of it
        keys["index"] = rows.table.index.data[positions]
        for number, order in enumerate(self._columns):
            values, present = rows.meta(order.column, positions)
            if values.dtype.kind == "O":
                keys[f"value{number}"] = values if present.all() else np.where(present, values, "")
            else:
                codes = _codes(values)
                keys[f"value{number}"] = np.where(present, ~codes if order.descending else codes, np.uint64(0))
            keys[f"missing{number}"] = ~present
        return keys


def _codes(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Return numbers without a sign that are in the order of the values; all NaN are equal, and the largest."""
    if values.dtype.kind == "f":
        numbers = np.where(np.isnan(values), np.nan, values + 0.0)  # -0.0 + 0.0 is 0.0
        bits = numbers.view(np.uint64)
        return np.where(bits & _SIGN, ~bits, bits | _SIGN)
    if values.dtype.kind == "b":
        return values.astype(np.uint64)
    return values.astype(np.int64).view(np.uint64) ^ _SIGN


def _ranks(texts: NDArray[np.object_]) -> Indexes:
    """Return numbers that are in the order of texts; a list is sorted faster than an array, above all a sorted one."""
    order = np.array(sorted(range(texts.size), key=texts.tolist().__getitem__), np.int64)
    texts = texts[order]
    ranks = np.zeros(texts.size, np.int64)
    ranks[order[1:]] = np.cumsum(texts[1:] != texts[:-1])
    return ranks


class _Parts:
    """Values in several arrays, which are not written to."""

    __slots__ = ("is_sorted", "parts", "size")

    def __init__(self, *parts: NDArray[Any], is_sorted: bool = False) -> None:
        self.parts = list(parts)
        self.size = sum(part.size for part in parts)
        self.is_sorted = is_sorted  # whether it is one part, in order, of which each value is there once

    def copy(self) -> _Parts:
        """Return the same values."""
        same = _Parts()
        same.parts, same.size, same.is_sorted = self.parts.copy(), self.size, self.is_sorted
        return same

    def add(self, part: NDArray[Any]) -> None:
        """Add values."""
        if part.size:
            self.parts.append(part)
            self.size += part.size
            self.is_sorted = False

    def take(self, count: int) -> NDArray[Any]:
        """Remove and return some values: so many, or all there are, at least one."""
        taken = []
        while self.parts and count:
            part = self.parts.pop()
            if part.size > count:
                self.parts.append(part[count:])
            taken.append(part[:count])
            count -= taken[-1].size
            self.size -= taken[-1].size
        return taken[0] if len(taken) == 1 else np.concatenate(taken, dtype=taken[0].dtype)


class _BucketedKeys:
    """Keys of which the first can be read in order.

    The splitters are the least keys that each bucket but the first can have. Keys that come are only compared with the
    first splitter, and put into buckets later, many at once. A key may be there twice, and is then read once.

    Attributes:
        count: number of keys, of those that are there twice both.
    """

    def __init__(self, dtype: np.dtype[Any], backwards: Set[str]) -> None:
        self._names = dtype.names or ()
        self._backwards = backwards  # texts in descending order; numbers are inverted
        self._splitters: Keys = np.empty(0, dtype)
        self._buckets = [_Parts()]
        self._after_first = _Parts()  # that are of any bucket but the first
        self._of_any = _Parts()
        self.count = 0

    def copy(self) -> _BucketedKeys:
        """Return the same keys."""
        same = copy.copy(self)
        same._buckets = [bucket.copy() for bucket in self._buckets]
        same._after_first, same._of_any = self._after_first.copy(), self._of_any.copy()
        return same

    def add(self, keys: Keys) -> None:
        """Add keys, each once, in any order; what may be heavy is left to be done."""
        self.count += keys.size
        first, *others = self._split(keys, self._splitters[:1])
        self._buckets[0].add(first)
        for part in others:
            self._after_first.add(part)

    # Reading

    def bucket(self, number: int, wanted: int, *, may_be_heavy: bool) -> Keys | None:
        """Return the keys of a bucket, in order and not many more than are wanted, if there are.

        None where there is no such bucket, or where it is heavy and may not be. Buckets are read from the first on.
        """
        if number == len(self._buckets):
            return None
        if number and self._after_first.size:
            self._of_any = _Parts(*self._of_any.parts, *self._after_first.parts)
            self._after_first = _Parts()
        while self._of_any.size or self.is_heavy(number):
            if self.is_heavy(number) and not may_be_heavy:
                return None
            self.sort_some(number)
        keys = self._sort(number)
        if keys.size <= 2 * wanted:
            return keys
        self._buckets[number : number + 1] = [_Parts(part, is_sorted=True) for part in (keys[:wanted], keys[wanted:])]
        self._insert_splitters(number, keys[wanted : wanted + 1])
        return keys[:wanted]

    def replace(self, number: int, keys: Keys) -> None:
        """Have some of the keys of a bucket that was read, in order, instead of all."""
        self.count -= self._buckets[number].size - keys.size
        self._buckets[number] = _Parts(keys, is_sorted=True)

    def join(self, number: int) -> bool:
        """Make one bucket of those that were read, the first so many, unless it is large; return whether they are all.

        Else each claim would read several, where few keys are left of each.
        """
        is_all = number == len(self._buckets)
        read = self._buckets[:number]
        if number > 1 and sum(bucket.size for bucket in read) <= _SLICE:
            keys = self._joined(part for bucket in read for part in bucket.parts)
            self._buckets[:number] = [_Parts(keys, is_sorted=True)]
            self._splitters = self._splitters[number - 1 :]
        return is_all

    def _split(self, keys: Keys, splitters: Keys) -> Iterator[Keys]:
        """Yield the keys before the first splitter, those from there to the next, and so on."""
        if not splitters.size:
            yield keys
            return
        both = self._joined((splitters, keys))  # a key that is a splitter comes after it
        order = self.order_of(both)
        both = both[order]
        ends = np.flatnonzero(order < splitters.size).tolist()
        for start, end in zip([-1, *ends], [*ends, both.size], strict=True):
            yield both[start + 1 : end]

    def order_of(self, keys: Keys) -> Indexes:
        """Return the order of keys, of equal ones that in which they are."""
        columns = []
        for name in reversed(self._names):
            values = keys[name]
            if values.dtype.kind == "O":
                values = -_ranks(values) if name in self._backwards else _ranks(values)
            columns.append(values)
        return np.lexsort(columns)

    # Sorting

    def is_heavy(self, number: int = 0) -> bool:
        """Whether more must be done before a bucket can be read than in one step."""
        return self._of_any.size > _SLICE or self._buckets[number].size > _SLICE

    def sort_some(self, number: int = 0) -> None:
        """Do a step of what is heavy."""
        if not self._of_any.size:
            self._spread(number)
            return
        for bucket, keys in zip(self._buckets, self._split(self._of_any.take(_SLICE), self._splitters), strict=True):
            bucket.add(keys)

    def _sort(self, number: int) -> Keys:
        bucket = self._buckets[number]
        if not bucket.is_sorted:
            self.replace(number, self._in_order(self._joined(bucket.parts)))
        return self._buckets[number].parts[0]

    def _joined(self, parts: Iterable[Keys]) -> Keys:
        return np.concatenate([self._splitters[:0], *parts], dtype=self._splitters.dtype)

    def _in_order(self, keys: Keys) -> Keys:
        """Return keys in order, each once."""
        keys = keys[self.order_of(keys)]
        indexes = keys["index"]
        if not (indexes[1:] == indexes[:-1]).any():
            return keys
        return keys[np.r_[True, keys[1:] != keys[:-1]]]  # of one row may also be what it was before it was written to

    def _spread(self, number: int) -> None:
        """Have the keys of a bucket be put into several buckets that take its place."""
        bucket = self._buckets[number]
        count = min(_MOST_SPLITTERS, 2 * bucket.size // _SLICE, max(2, _MOST_PARTS * _SLICE // bucket.size))
        stride = max(1, bucket.size // (_SAMPLES * (count + 1)))
        samples, start = [], 0
        for part in bucket.parts:
            samples.append(part[start::stride])
            start = (start - part.size) % stride
        splitters = self._in_order(self._joined(samples))[_SAMPLES::_SAMPLES]
        if not splitters.size:  # nearly all keys are the same
            self._sort(number)
            return
        self._of_any = bucket
        self._buckets[number : number + 1] = [_Parts() for _ in range(splitters.size + 1)]
        self._insert_splitters(number, splitters)

    def _insert_splitters(self, number: int, splitters: Keys) -> None:
        self._splitters = self._joined((self._splitters[:number], splitters, self._splitters[number:]))
