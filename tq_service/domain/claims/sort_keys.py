"""Rows as keys whose byte order is the order that `order_by` asks for, and sorted runs of such keys.

A key is a text of bytes of one length: for each column of the order whether the value is missing, and the value as a
number whose bytes compare as it does; then the global index, which decides between equals. So one comparison of bytes
stands for all columns, directions and missing values, and a key says itself which row it is of. numpy sorts and
searches such texts without the interpreter lock, which sorting by several keys or picking by index would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.plan import Indexes
from tq_service.domain.tables.meta import CustomMeta, Order

Keys: TypeAlias = NDArray[np.bytes_]

NO_KEYS: Keys = np.zeros(0, "S1")

_VALUE_BYTES = 9  # whether it is missing, and the value
_INDEX_BYTES = 8
_SIGN = np.uint64(1 << 63)
_MOST_MERGED = 1 << 14
_MERGED_SHARE = 4
_STRETCH = 1 << 16


def key_kinds(meta: CustomMeta, orders: Sequence[Order]) -> str | None:
    """Return of what type each column of an order is, "-" for one unknown yet; None where one holds texts.

    Keys of other types do not compare with each other.
    """
    columns = [meta.arrays(order.column) for order in orders]
    kinds = "".join("-" if arrays is None else arrays[0].dtype.kind for arrays in columns)
    return None if "O" in kinds else kinds


def sort_keys(meta: CustomMeta, orders: Sequence[Order], indexes: Indexes, positions: Indexes) -> Keys:
    """Return the keys `(n,)` of rows by their global indexes, which stand at `positions` of the table."""
    width = _VALUE_BYTES * len(orders) + _INDEX_BYTES
    keys = np.zeros((positions.size, width), np.uint8)
    for number, order in enumerate(orders):
        start = number * _VALUE_BYTES
        arrays = meta.arrays(order.column)
        if arrays is None:
            keys[:, start] = 1
            continue
        values, present = arrays[0][positions], arrays[1][positions]
        codes = _codes(values)
        if order.descending:
            codes = ~codes
        keys[:, start] = ~present
        keys[:, start + 1 : start + _VALUE_BYTES] = _bytes_of(np.where(present, codes, np.uint64(0)))
    keys[:, -_INDEX_BYTES:] = _bytes_of(indexes)
    return keys.view(f"S{width}").ravel()


def indexes_of(keys: Keys) -> Indexes:
    """Return the global indexes of rows by their keys."""
    digits = keys.view(np.uint8).reshape(keys.size, keys.itemsize)[:, -_INDEX_BYTES:]
    return np.ascontiguousarray(digits).view(">i8").ravel().astype(np.int64)


def _codes(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Return numbers without a sign that are in the order of the values; all NaN are equal, and the largest."""
    if values.dtype.kind == "f":
        numbers = np.where(np.isnan(values), np.nan, values + 0.0)  # -0.0 + 0.0 is 0.0
        bits = numbers.view(np.uint64)
        return np.where(bits & _SIGN, ~bits, bits | _SIGN)
    if values.dtype.kind == "b":
        return values.astype(np.uint64)
    return values.astype(np.int64).view(np.uint64) ^ _SIGN


def _bytes_of(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    return numbers.astype(">u8").view(np.uint8).reshape(numbers.size, 8)


class SortedRuns:
    """Keys in order, as several sorted arrays: adding some, or taking the first, costs what these are.

    A key that was added twice comes once where both are taken together. Small runs are merged as they come; large ones
    where the owner has time for it.
    """

    __slots__ = ("runs",)

    def __init__(self, runs: Sequence[Keys] = ()) -> None:
        self.runs = [run for run in runs if run.size]

    def __len__(self) -> int:
        return sum(run.size for run in self.runs)

    def copy(self) -> SortedRuns:
        """Return the same keys; taking from one leaves the other as it is, and nothing is copied."""
        return SortedRuns(self.runs)

    def add(self, keys: Keys) -> None:
        """Add sorted keys."""
        if keys.size == 0:
            return
        runs = self.runs
        runs.append(keys)
        while len(runs) > 1 and runs[-2].size <= _MERGED_SHARE * runs[-1].size:
            if runs[-2].size + runs[-1].size > _MOST_MERGED:
                return
            runs[-2:] = [merged(runs[-2:])]

    def take(self, count: int | None) -> Keys:
        """Remove and return the first keys: not many more than `count`, maybe fewer; all where it is None."""
        runs = self.runs
        if count is not None and len(runs) > 1 and runs[-1][-1] < min(run[0] for run in runs[:-1]):
            # What was put back last is before all others.
            first, runs[-1] = runs[-1][:count], runs[-1][count:]
            if not runs[-1].size:
                runs.pop()
            return first
        heads = [run[:count] for run in runs]
        lasts = [head[-1] for head in heads if head.size == count]
        if not lasts:  # each run is shorter
            self.runs = []
            return merged(runs)
        last = min(lasts)
        taken = [head[: int(np.searchsorted(head, last, side="right"))] for head in heads]
        self.runs = [run[part.size :] for run, part in zip(runs, taken, strict=True) if part.size < run.size]
        return merged(taken)


def merged(runs: Sequence[Keys]) -> Keys:
    """Return the keys of sorted runs in order, each once; that of one run is the run."""
    if len(runs) == 1:
        return runs[0]
    return sorted_keys(runs)


def sorted_keys(parts: Sequence[Keys]) -> Keys:
    """Return keys in order, each once."""
    keys = _joined(parts)
    keys.sort(kind="stable")  # merges what is sorted already
    is_first = np.ones(keys.size, np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    if is_first.all():
        return keys
    return _joined([stretch[is_first[start : start + _STRETCH]] for start, stretch in _stretches(keys)])


def _joined(parts: Sequence[Keys]) -> Keys:
    """Return a new array of all keys.

    They are copied stretch by stretch: a long copy into fresh memory would hold the interpreter lock for tens of
    milliseconds.
    """
    joined = np.empty(sum(part.size for part in parts), max((part.dtype for part in parts), default=NO_KEYS.dtype))
    end = 0
    for part in parts:
        for start, stretch in _stretches(part):
            joined[end + start : end + start + stretch.size] = stretch
        end += part.size
    return joined


def _stretches(keys: Keys) -> Iterator[tuple[int, Keys]]:
    for start in range(0, keys.size, _STRETCH):
        yield start, keys[start : start + _STRETCH]
