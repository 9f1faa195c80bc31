"""Puts rows into the order of `order_by`: the first of them by selection, all of them by a sort.

Nothing is kept between claims. Rows are taken in slices, so that a thread holds the interpreter lock briefly: numpy
compares and sorts texts, unlike numbers, without releasing it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.planning.readiness import Readiness
from tq_service.state.meta import Order
from tq_service.state.plan import Indexes

_SLICE: Final = 1 << 14  # rows
_FIRST_SLICE: Final = 1 << 10
_TEXTS_AT_ONCE: Final = 1 << 12  # sorted in some milliseconds
_SIGN: Final = np.uint64(1 << 63)


def first_in_order(rows: Readiness, orders: tuple[Order, ...], positions: Indexes, count: int | None) -> Indexes:
    """Return the first `count` of some rows in an order, all of them if `count` is None.

    Rows without a value come last, and rows that are equal in all columns in the order of their indexes.

    Args:
        rows: the values of the rows.
        orders: the columns, the most significant first.
        positions: the rows, in the order of their indexes.
        count: how many are wanted.
    """
    if count is None:
        return in_order(rows, orders, positions)
    best, last = positions[:0], None
    start, end = 0, max(_FIRST_SLICE, 2 * count)
    while start < positions.size:
        some = positions[start:end]
        if last is not None:
            some = some[_may_precede(rows, orders, some, last)]
        best = np.concatenate([best, some])
        if best.size > 2 * count + _FIRST_SLICE:  # so that each row is sorted about once
            best = in_order(rows, orders, best)[:count]
            last = best[-1:]
        start, end = end, end + _SLICE
    return in_order(rows, orders, best)[:count]


def in_order(rows: Readiness, orders: tuple[Order, ...], positions: Indexes) -> Indexes:
    """Return some rows in an order."""
    keys: list[NDArray[Any]] = [positions]  # the least significant first
    for order in reversed(orders):
        values, present = rows.meta(order.column, positions)
        codes = _text_codes(np.where(present, values, "")) if values.dtype.kind == "O" else _codes(values)
        keys += [np.where(present, ~codes if order.descending else codes, np.uint64(0)), ~present]
    ordered: Indexes = positions[np.lexsort(keys)]
    return ordered


_AFTER: Final[dict[tuple[bool, bool], Callable[[Any, Any], Any]]] = {  # by (descending, equal ones come after)
    (False, True): operator.ge, (False, False): operator.gt,
    (True, True): operator.le, (True, False): operator.lt,
}  # fmt: skip


def _may_precede(rows: Readiness, orders: tuple[Order, ...], positions: Indexes, last: Indexes) -> NDArray[np.bool_]:
    """Return which rows may come before a row with a lower index, by the first column alone; of NaN it cannot tell."""
    order = orders[0]
    (bound,), is_present = rows.meta(order.column, last)
    values, present = rows.meta(order.column, positions)
    if not is_present[0]:
        return np.ones(positions.size, np.bool_)
    may_precede = present.copy()
    is_after = _AFTER[order.descending, len(orders) == 1]
    # The bound of texts is an array too: in one of text, each value would take the space of the longest.
    may_precede[present] = ~is_after(values[present], np.array(bound, dtype=values.dtype)).astype(np.bool_)
    return may_precede


def _codes(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Return numbers without a sign that are in the order of the values; all NaN are equal, and the largest."""
    if values.dtype.kind == "f":
        numbers = np.where(np.isnan(values), np.nan, values + 0.0)  # -0.0 + 0.0 is 0.0
        bits = numbers.view(np.uint64)
        return np.where(bits & _SIGN, ~bits, bits | _SIGN)
    if values.dtype.kind == "b":
        return values.astype(np.uint64)
    return values.astype(np.int64).view(np.uint64) ^ _SIGN


def _text_codes(texts: NDArray[np.object_]) -> NDArray[np.uint64]:
    """Return numbers that are in the order of texts; many are spread over buckets, each of which is sorted alone."""
    bucket_of, size = np.zeros(texts.size, np.int64), _TEXTS_AT_ONCE
    if texts.size > size:
        splitters = np.array(sorted(texts[:: size // 8].tolist()), np.object_)
        slices = (texts[start : start + size] for start in range(0, texts.size, size))
        bucket_of = np.concatenate([np.searchsorted(splitters, some) for some in slices])
    by_bucket = np.argsort(bucket_of, kind="stable")
    codes = np.zeros(texts.size, np.uint64)
    first_code = 0
    for members in np.split(by_bucket, np.flatnonzero(np.diff(bucket_of[by_bucket])) + 1):
        found = texts[members].tolist()  # a list is sorted faster than an array, above all a sorted one
        ordered = members[sorted(range(members.size), key=found.__getitem__)]
        codes[ordered[1:]] = np.cumsum(texts[ordered[1:]] != texts[ordered[:-1]])
        codes[ordered] += np.uint64(first_code)
        first_code += members.size
    return codes
