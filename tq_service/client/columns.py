"""Columns about the samples of a batch: custom_meta, keys and groups selected, joined and merged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import MetaColumn, fitted, laid_over

_NUMBERS: Final = {np.dtype(np.int64), np.dtype(np.float64)}
Value = TypeVar("Value")


def select(values: tuple[Value, ...], positions: NDArray[np.int64]) -> tuple[Value, ...]:
    """Return the values of the samples at `positions`, where there is one for each sample."""
    return tuple(values[position] for position in positions.tolist()) if values else ()


def concat_names(parts: Sequence[tuple[str, ...]], sizes: Sequence[int]) -> tuple[str, ...]:
    """Return keys or groups of several batches; a batch of which none has one gives "" for each sample."""
    if not any(parts):
        return ()
    return tuple(chain.from_iterable(part or ("",) * size for part, size in zip(parts, sizes, strict=True)))


def concat_columns(parts: Sequence[Sequence[MetaColumn]], sizes: Sequence[int]) -> tuple[MetaColumn, ...]:
    """Return the custom_meta of several batches; a batch without a column has no values in it.

    Columns without any value are left out.
    """
    by_name = [{column.name: column for column in part if column.has_value.any()} for part in parts]
    names = dict.fromkeys(name for columns in by_name for name in columns)
    return tuple(_concat_column(name, [columns.get(name) for columns in by_name], sizes) for name in names)


def _concat_column(name: str, parts: Sequence[MetaColumn | None], sizes: Sequence[int]) -> MetaColumn:
    """Return the column of several batches; None is a batch without a value of it."""
    typed = [part.values.dtype for part in parts if part is not None and part.present.any()]
    dtype = np.result_type(*typed) if set(typed) <= _NUMBERS and typed else (typed or [np.dtype(np.bool_)])[0]
    columns = [_as_typed(name, part, size, dtype) for part, size in zip(parts, sizes, strict=True)]
    texts = [np.full(each.present.size, None) if each.json is None else each.json for each in columns]
    return MetaColumn(
        name=name,
        values=np.concatenate([column.values for column in columns]),
        present=np.concatenate([column.present for column in columns]),
        json=np.concatenate(texts) if any(column.json is not None for column in columns) else None,
    )


def _as_typed(name: str, column: MetaColumn | None, size: int, dtype: np.dtype[Any]) -> MetaColumn:
    """Return a column with its values of a dtype, and others as JSON."""
    if column is None or not column.present.any():
        values = np.full(size, "" if dtype.hasobject else 0, dtype)
        json = None if column is None else column.json
        return MetaColumn(name=name, values=values, present=np.zeros(size, np.bool_), json=json)
    if column.values.dtype == dtype or {column.values.dtype, dtype} == _NUMBERS:
        return column
    return fitted(column, dtype.kind)


def merge_columns(old: Sequence[MetaColumn], new: Sequence[MetaColumn]) -> tuple[MetaColumn, ...]:
    """Return the custom_meta of samples after a write: new values over old ones, and none where they are removed."""
    merged = {column.name: column for column in old}
    for column in new:
        before = merged.get(column.name)
        merged[column.name] = column if before is None or column.present.all() else laid_over(before, column)
    return tuple(merged.values())
