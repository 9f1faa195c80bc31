"""Columns about the samples of a batch: custom_meta, keys and groups selected, joined, merged and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import MetaColumn

Value = TypeVar("Value")


def select(values: tuple[Value, ...], positions: NDArray[np.int64]) -> tuple[Value, ...]:
    """Return the values of the samples at `positions`, where there is one for each sample."""
    return tuple(values[position] for position in positions.tolist()) if values else ()


def select_columns(columns: Sequence[MetaColumn], positions: NDArray[np.int64]) -> tuple[MetaColumn, ...]:
    """Return the columns of the samples at `positions`."""
    return tuple(
        MetaColumn(name=column.name, values=column.values[positions], present=column.present[positions])
        for column in columns
    )


def concat_names(parts: Sequence[tuple[str, ...]], sizes: Sequence[int]) -> tuple[str, ...]:
    """Return keys or groups of several batches; a batch of which none has one gives "" for each sample."""
    if not any(parts):
        return ()
    return tuple(name for part, size in zip(parts, sizes, strict=True) for name in (part or ("",) * size))


def concat_columns(parts: Sequence[Sequence[MetaColumn]], sizes: Sequence[int]) -> tuple[MetaColumn, ...]:
    """Return the custom_meta of several batches; a batch without a column has no values in it.

    Columns without any value are left out.

    Raises:
        InvalidArgumentError: a column has text in one batch and numbers in another.
    """
    by_name = [{column.name: column for column in part if column.present.any()} for part in parts]
    names = dict.fromkeys(name for columns in by_name for name in columns)
    return tuple(_concat_column(name, [columns.get(name) for columns in by_name], sizes) for name in names)


def _concat_column(name: str, parts: Sequence[MetaColumn | None], sizes: Sequence[int]) -> MetaColumn:
    """Return the column of several batches; None is a batch without a value of it."""
    dtypes = {part.values.dtype for part in parts if part is not None}
    if len(dtypes) > 1 and not dtypes <= {np.dtype(np.int64), np.dtype(np.float64)}:
        raise InvalidArgumentError(
            f"custom_meta column {name!r} has values of {' and of '.join(sorted(map(str, dtypes)))}; one kind expected",
            field="parts",
        )
    dtype = np.result_type(*dtypes)
    no_value = "" if dtype.hasobject else 0
    columns = [
        MetaColumn(name=name, values=np.full(size, no_value, dtype), present=np.zeros(size, np.bool_))
        if part is None
        else part
        for part, size in zip(parts, sizes, strict=True)
    ]
    return MetaColumn(
        name=name,
        values=np.concatenate([column.values for column in columns]),
        present=np.concatenate([column.present for column in columns]),
    )


def merge_columns(old: Sequence[MetaColumn], new: Sequence[MetaColumn]) -> tuple[MetaColumn, ...]:
    """Return the custom_meta of samples after a write: new values over old ones, of the new ones' type."""
    merged = {column.name: column for column in old}
    for column in new:
        before = merged.get(column.name)
        if before is not None and not column.present.all():
            dtype = np.result_type(before.values.dtype, column.values.dtype)
            values = before.values.astype(dtype)
            values[column.present] = column.values[column.present]
            column = MetaColumn(name=column.name, values=values, present=before.present | column.present)  # noqa: PLW2901  (the merged column takes its place)
        merged[column.name] = column
    return tuple(merged.values())


def same_columns(one: Sequence[MetaColumn], other: Sequence[MetaColumn]) -> bool:
    """Whether two batches have the same custom_meta; columns without any value do not count, nor their order."""
    left, right = ({column.name: column for column in side if column.present.any()} for side in (one, other))
    return left.keys() == right.keys() and all(_same_column(column, right[name]) for name, column in left.items())


def _same_column(one: MetaColumn, other: MetaColumn) -> bool:
    if one.values.dtype != other.values.dtype or not np.array_equal(one.present, other.present):
        return False
    mine, theirs = one.values[one.present], other.values[other.present]
    return np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f")
