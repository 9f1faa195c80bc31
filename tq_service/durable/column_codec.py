"""Columns of tables as parts of a few ten thousand values each, and back.

A part says in which form its values are, the one that takes the fewest bytes of those that their dtype allows:

- integers: (count, base, width, data): truth values and integers, as unsigned numbers of `width` bytes above `base`;
- runs: (firsts, lengths): integers that mostly count on by 1;
- doubles: (data,);
- texts: (present, values): objects that are text or None; `present` has a byte for each, none where all are there;
- puts: (storages, numbers, put_ids): objects that are a `Put` or None; `numbers` has for each the position of its
  storage in `storages` plus 1, or 0 for None; the ids are those of the puts that are there.

All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.tables.cells import Put
from tq_service.domain.tables.table import ColumnSnapshot, TableSnapshot
from tq_service.errors import NewerVersionError

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
        for values in column.blocks() if is_object else _joined(column.blocks(), _NUMBERS_A_PART):
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
        return "doubles", (values.astype("<f8", copy=False).tobytes(),)
    numbers = values.view(np.uint8) if values.dtype == np.bool_ else values
    base, top = int(numbers.min()), int(numbers.max())
    width = next(width for width in (0, 1, 2, 4, 8) if top - base < 1 << (8 * width))
    if width == 0:
        return "integers", (numbers.size, base, 0, b"")
    if width > 1:
        heads = np.flatnonzero(np.diff(numbers) != 1) + 1
        if (heads.size + 1) * _RUN_BYTES < width * numbers.size:
            firsts = numbers[np.r_[0, heads]].astype("<i8").tobytes()
            return "runs", (firsts, np.diff(np.r_[0, heads, numbers.size]).astype("<i4").tobytes())
    distances = numbers.astype(np.uint64) - np.uint64(base % (1 << 64))
    return "integers", (numbers.size, base, width, distances.astype(f"<u{width}").tobytes())


def _encode_objects(values: NDArray[Any]) -> tuple[str, tuple[Any, ...]]:
    present = values != None  # noqa: E711  (of each)
    there = values[present].tolist()
    if not there or not isinstance(there[0], Put):
        return "texts", (b"" if present.all() else present.tobytes(), there)
    numbers: dict[tuple[str, bytes], int] = {}
    storage_numbers = np.zeros(values.size, "<i4")
    storage_numbers[present] = [numbers.setdefault(put[:2], len(numbers) + 1) for put in there]
    return "puts", (list(numbers), storage_numbers.tobytes(), [put.put_id for put in there])


def _decode(part: ColumnPart, dtype: np.dtype[Any]) -> NDArray[Any]:
    match part.form:
        case "integers" if dtype.kind in "iub":
            return _decode_integers(*part.values).astype(dtype, copy=False)
        case "runs" if dtype.kind in "iu":
            return _decode_runs(*part.values)
        case "doubles" if dtype.kind == "f":
            return np.frombuffer(part.values[0], "<f8")
        case "texts" if dtype.kind == "O":
            return _decode_texts(*part.values)
        case "puts" if dtype.kind == "O":
            return _decode_puts(*part.values)
        case "integers" | "runs" | "doubles" | "texts" | "puts":
            raise ValueError(f"column {part.column!r} has {part.form}, which are no values of type {dtype}")
    raise NewerVersionError(
        f"column {part.column!r} is in the unknown form {part.form!r}, which a newer version wrote: install that one"
    )


def _decode_integers(count: int, base: int, width: int, data: bytes) -> NDArray[Any]:
    if width == 0:
        return np.full(count, base, np.int64)
    distances = np.frombuffer(data, f"<u{width}")
    return (distances + np.array([base % (1 << 64)], np.uint64)).astype(np.int64, copy=False)


def _decode_runs(first_bytes: bytes, length_bytes: bytes) -> NDArray[np.int64]:
    firsts, lengths = np.frombuffer(first_bytes, "<i8"), np.frombuffer(length_bytes, "<i4").astype(np.int64)
    ends = np.cumsum(lengths)
    return np.repeat(firsts - (ends - lengths), lengths) + np.arange(ends[-1], dtype=np.int64)


def _decode_texts(present_bytes: bytes, values: list[str]) -> NDArray[Any]:
    present = np.frombuffer(present_bytes, np.bool_) if present_bytes else np.ones(len(values), np.bool_)
    there = np.empty(len(values), np.object_)
    there[:] = values
    return _spread(there, present)


def _decode_puts(storages: list[tuple[str, bytes]], number_bytes: bytes, put_ids: list[bytes]) -> NDArray[Any]:
    numbers = np.frombuffer(number_bytes, "<i4")
    present = numbers > 0
    taken = numbers[present].tolist()
    there = np.empty(len(taken), np.object_)
    for position, (number, put_id) in enumerate(zip(taken, put_ids, strict=True)):  # numpy would take tuples for rows
        there[position] = Put(storages[number - 1][0], storages[number - 1][1], put_id)
    return _spread(there, present)


def _spread(there: NDArray[Any], present: NDArray[np.bool_]) -> NDArray[Any]:
    """Return objects where they are present, None elsewhere."""
    spread = np.full(present.size, None, np.object_)
    spread[present] = there
    return spread


def _joined(blocks: Iterable[NDArray[Any]], least: int) -> Iterator[NDArray[Any]]:
    """Yield the values of blocks in arrays of at least so many, the last one apart."""
    some: list[NDArray[Any]] = []
    size = 0
    for block in blocks:
        some.append(block)
        size += block.size
        if size >= least:
            yield np.concatenate(some)
            some, size = [], 0
    if some:
        yield np.concatenate(some)
