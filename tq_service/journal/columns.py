"""Columns of tables as parts of a few ten thousand values each, and back.

A part says in which form its values are, the one that takes the fewest bytes of those that their dtype allows:

- same: (count, value): truth values and integers that are all the same;
- integers: (base, distances): truth values and integers, as unsigned numbers above `base`, of few bytes;
- runs: (firsts, lengths): integers that mostly count on by 1;
- values: (values,): doubles, and objects that are text or None;
- puts: (storages, numbers, put_ids): objects that are a `Put` or None; `numbers` has for each the position of its
  storage in `storages` plus 1, or 0 for None; the ids are those of the puts that are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import NewerVersionError
from tq_service.journal.record_file import gathered
from tq_service.state.cells import Put
from tq_service.state.table import ColumnSnapshot, TableSnapshot

_NUMBERS_A_PART: Final = 1 << 16
_RUN_BYTES: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHeader:
    """What begins a table: how many values each column has, and the dtype of each."""

    size: int
    dtypes: Mapping[str, str]

    @classmethod
    def of(cls, table: TableSnapshot) -> TableHeader:
        """Return the header of a table."""
        return cls(size=table.size, dtypes={name: column.dtype.str for name, column in table.columns.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPart:
    """Values of a column, from where the part before it ended."""

    table: str
    column: str
    form: str
    values: tuple[Any, ...]


def encode_table(name: str, table: TableSnapshot) -> Iterator[ColumnPart]:
    """Yield the parts of all columns of a table."""
    for column_name, column in table.columns.items():
        is_object = column.dtype == np.object_
        parts = gathered(column.blocks(), 1 if is_object else _NUMBERS_A_PART, np.size)
        for values in map(np.concatenate, parts):
            form, encoded = _encode_objects(values) if is_object else _encode_numbers(values)
            yield ColumnPart(table=name, column=column_name, form=form, values=encoded)


class TableReader:
    """Puts the parts of a table together."""

    def __init__(self, header: TableHeader) -> None:
        self._size = header.size
        self._columns = {name: np.empty(header.size, np.dtype(dtype)) for name, dtype in header.dtypes.items()}
        self._ends = dict.fromkeys(header.dtypes, 0)

    def add(self, part: ColumnPart) -> None:
        """Take the next part of a column.

        Raises:
            ValueError, LookupError: it does not belong to the table.
            NewerVersionError: its form is unknown.
        """
        column = self._columns[part.column]
        values = _decode(part, column.dtype)
        start = self._ends[part.column]
        column[start : start + values.size] = values  # raises where there are too many
        self._ends[part.column] += values.size

    def snapshot(self) -> TableSnapshot:
        """Return the table, once it is whole.

        Raises:
            ValueError: it is not.
        """
        for name, end in self._ends.items():
            if end != self._size:
                raise ValueError(f"column {name!r} has {end} values, its table has {self._size} rows")
        columns = {name: ColumnSnapshot(values, self._size) for name, values in self._columns.items()}
        return TableSnapshot(size=self._size, columns=columns)


def _encode_numbers(values: NDArray[Any]) -> tuple[str, tuple[Any, ...]]:
    if values.dtype.kind == "f":
        return "values", (values,)
    numbers = values.view(np.uint8) if values.dtype == np.bool_ else values
    base, top = int(numbers.min()), int(numbers.max())
    if base == top:
        return "same", (numbers.size, base)
    width = next(width for width in (1, 2, 4, 8) if top - base < 1 << (8 * width))
    if width > 1:
        heads = np.flatnonzero(np.diff(numbers) != 1) + 1
        if (heads.size + 1) * _RUN_BYTES < width * numbers.size:
            firsts = numbers[np.r_[0, heads]].astype(np.int64)
            return "runs", (firsts, np.diff(np.r_[0, heads, numbers.size]).astype(np.int32))
    distances = numbers.astype(np.uint64) - np.uint64(base % (1 << 64))
    return "integers", (base, distances.astype(f"u{width}"))


def _encode_objects(values: NDArray[Any]) -> tuple[str, tuple[Any, ...]]:
    present = values != None  # noqa: E711  (of each)
    there = values[present].tolist()
    if not there or not isinstance(there[0], Put):
        return "values", (values,)
    numbers: dict[tuple[str, bytes], int] = {}
    storage_numbers = np.zeros(values.size, np.int32)
    storage_numbers[present] = [numbers.setdefault(put[:2], len(numbers) + 1) for put in there]
    return "puts", (list(numbers), storage_numbers, [put.put_id for put in there])


def _decode(part: ColumnPart, dtype: np.dtype[Any]) -> NDArray[Any]:
    values: NDArray[Any]
    match part.form:
        case "same":
            count, value = part.values
            values = np.full(count, value, np.int64)
        case "integers":
            base, distances = part.values
            values = (distances + np.array([base % (1 << 64)], np.uint64)).astype(np.int64, copy=False)
        case "runs":
            firsts, lengths = part.values
            ends = np.cumsum(lengths, dtype=np.int64)
            values = np.repeat(firsts - (ends - lengths), lengths) + np.arange(ends[-1], dtype=np.int64)
        case "values":
            (values,) = part.values
        case "puts":
            values = _decode_puts(*part.values)
        case _:
            raise NewerVersionError(
                f"column {part.column!r} is in the unknown form {part.form!r}, which a newer version wrote: install "
                f"that one"
            )
    if values.dtype.kind != ("i" if dtype.kind in "iub" else dtype.kind):
        raise ValueError(f"column {part.column!r} has {part.form}, which are no values of type {dtype}")
    return values


def _decode_puts(storages: list[tuple[str, bytes]], numbers: NDArray[Any], put_ids: list[bytes]) -> NDArray[Any]:
    puts = np.full(numbers.size, None, np.object_)
    where = np.flatnonzero(numbers)
    for position, number, put_id in zip(where.tolist(), numbers[where].tolist(), put_ids, strict=True):
        puts[position] = Put._make((*storages[number - 1], put_id))  # one by one: numpy would take tuples for rows
    return puts
