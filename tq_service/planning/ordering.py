"""Puts rows into the order of `order_by`: the first of them by selection, all of them by a sort.

Nothing is kept between claims. Texts are compared a few thousand at once, since numpy and Python, unlike for numbers,
hold the interpreter lock meanwhile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.state.plan import Indexes, Order

# Returns the values of a column at some positions, and which of these have one.
ValuesOf: TypeAlias = Callable[[str, Indexes], tuple[NDArray[Any], NDArray[np.bool_]]]

_SLICE: Final = 1 << 14  # rows
_FEW: Final = 1 << 9
_TEXTS_AT_ONCE: Final = 1 << 12  # sorted in some milliseconds


def first_in_order(values_of: ValuesOf, orders: tuple[Order, ...], positions: Indexes, count: int | None) -> Indexes:
    """Return the first `count` of some rows in an order, all of them if `count` is None.

    Rows without a value come last, and rows that are equal in all columns in the order of their indexes.

    Args:
        values_of: returns what is compared.
        orders: the columns, the most significant first.
        positions: the rows, in the order of their indexes.
        count: how many are wanted.
    """
    if count is None:
        return in_order(values_of, orders, positions)
    best, last = positions[:0], None
    start, end = 0, 2 * max(_FEW, count)
    while start < positions.size:
        some = positions[start:end]
        best = np.concatenate([best, some if last is None else some[_may_precede(values_of, orders, some, last)]])
        if best.size > count + max(_FEW, count):
            best = in_order(values_of, orders, best)[:count]
            last = best[-1:]
        start, end = end, end + _SLICE
    return in_order(values_of, orders, best)[:count]


def in_order(values_of: ValuesOf, orders: tuple[Order, ...], positions: Indexes) -> Indexes:
    """Return some rows in an order."""
    positions = np.sort(positions)
    for order in reversed(orders):  # each sort leaves rows that are equal in their order
        values, present = values_of(order.column, positions)
        found = positions[present]
        positions = np.concatenate([found[_order_of(values[present], order.descending)], positions[~present]])
    return positions


def _may_precede(
    values_of: ValuesOf, orders: tuple[Order, ...], positions: Indexes, last: Indexes
) -> NDArray[np.bool_]:
    """Return which rows may come before one with a lower index, by the first column alone; of NaN it cannot tell."""
    column, is_descending = orders[0].column, orders[0].descending
    bound, is_bounded = values_of(column, last)
    values, present = values_of(column, positions)
    if not is_bounded.all():
        return np.ones(positions.size, np.bool_)
    if len(orders) == 1:  # equal ones come after it
        is_after = operator.le if is_descending else operator.ge
    else:
        is_after = operator.lt if is_descending else operator.gt
    may_precede = present.copy()
    may_precede[present] = ~is_after(values[present], bound)
    return may_precede


def _order_of(values: NDArray[Any], descending: bool) -> Indexes:
    """Return the positions that values have in order, equal ones as they come; NaN is the largest."""
    if descending:
        backwards: Indexes = values.size - 1 - _order_of(values[::-1], descending=False)
        return backwards[::-1]
    if values.dtype.kind != "O":
        return np.argsort(values, kind="stable")
    buckets = [np.arange(values.size)]
    if values.size > _TEXTS_AT_ONCE:  # spread over buckets, those of one before those of the next
        splitters = np.array(sorted(values[:: _TEXTS_AT_ONCE // 8].tolist()), np.object_)
        slices = (values[start : start + _TEXTS_AT_ONCE] for start in range(0, values.size, _TEXTS_AT_ONCE))
        bucket_of = np.concatenate([np.searchsorted(splitters, some) for some in slices])
        by_bucket = np.argsort(bucket_of, kind="stable")
        buckets = np.split(by_bucket, np.flatnonzero(np.diff(bucket_of[by_bucket])) + 1)
    texts = values.tolist()  # a list is sorted faster than an array, above all a sorted one
    return np.concatenate([np.array(sorted(each.tolist(), key=texts.__getitem__), np.int64) for each in buckets])
