"""custom_meta in typed columns, and the conditions and orders that claims put on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq_service.domain.plan import Indexes
from tq_service.domain.tables.table import Column, RowTable, as_slice
from tq_service.errors import InvalidArgumentError
from tq_service.schema import MetaColumn, MetaValue, Operator

_LARGEST_EXACT_DOUBLE = 2**53
_KIND_NAMES = {"i": "int64", "f": "double", "b": "bool", "O": "string"}
_DTYPES: dict[str, Any] = {"i": np.int64, "f": np.float64, "b": np.bool_, "O": np.object_}
_FILLS: dict[str, Any] = {"i": 0, "f": 0.0, "b": False, "O": None}


@dataclass(frozen=True, slots=True)
class Condition:
    """What a sample must satisfy; one without a value does not.

    Raises:
        InvalidArgumentError: something is missing, values are of several types, or more than the operator takes.
    """

    column: str
    operator: Operator
    values: tuple[MetaValue, ...]

    def __post_init__(self) -> None:
        if not self.operator or not self.column:
            raise InvalidArgumentError(
                f"where: got column {self.column!r} and operator {self.operator!r}; give both", field="where"
            )
        given = [value for value in self.values if value is not None]
        if len(given) != len(self.values) or (self.operator != "in" and len(given) != 1):
            raise InvalidArgumentError(
                f"where: column {self.column!r} {self.operator} got {len(given)} values; give one, or any number with "
                f"'in'",
                field="where",
            )
        if len({isinstance(value, str) for value in given}) > 1:
            raise InvalidArgumentError(
                f"where: column {self.column!r} is compared with text and numbers; use one type", field="where"
            )

    def holds(self, data: NDArray[Any]) -> NDArray[np.bool_]:
        """Return where the condition holds `(n,)`, for values that are present."""
        kind = data.dtype.kind
        for value in self.values:
            is_text = isinstance(value, str)
            if is_text != (kind == "O"):
                raise InvalidArgumentError(
                    f"where: column {self.column!r} holds {_KIND_NAMES[kind]} values, got {value!r}; compare it with a "
                    f"{_KIND_NAMES[kind]}",
                    field="where",
                )
        if self.operator == "in":
            if kind == "O":  # isin compares each text with each value
                return np.fromiter(map(frozenset(self.values).__contains__, data), np.bool_, data.size)
            return np.isin(data, np.array(self.values))
        # Texts are compared as they are: in an array of text, each would take the space of the longest.
        other = np.array(self.values[0], dtype=np.object_) if kind == "O" else self.values[0]
        return np.asarray(_COMPARE[self.operator](data, other), dtype=np.bool_)


_COMPARE: dict[str, Any] = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Order:
    """A column by which ready samples are ordered; samples without a value come last."""

    column: str
    descending: bool = False


@dataclass(slots=True)
class _Stored:
    values: Column
    present: Column


class CustomMeta:
    """The custom_meta columns of a partition."""

    __slots__ = ("_columns", "_table")

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._columns: dict[str, _Stored] = {}

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of the values (`i`, `f`, `b` or `O`) of each column, in order of their first use."""
        return {name: stored.values.data.dtype.kind for name, stored in self._columns.items()}

    def declare(self, kinds: Mapping[str, str]) -> None:
        """Declare columns by their kinds, before they are restored."""
        for name, kind in kinds.items():
            self._declare(name, kind)

    def names(self) -> list[str]:
        """Return the names of the columns in order of their first use."""
        return list(self._columns)

    def has(self, name: str) -> bool:
        """Whether any sample ever had a value for `name`."""
        return name in self._columns

    def check(self, columns: Sequence[MetaColumn], count: int) -> None:
        """Refuse columns that do not fit, before anything is written."""
        names = [column.name for column in columns]
        if len(set(names)) != len(names):
            raise InvalidArgumentError(f"custom_meta names a column twice: {names}", field="custom_meta")
        for column in columns:
            if column.name in self._table.readable:
                raise InvalidArgumentError(
                    f"custom_meta names {column.name!r}, which samples have beside their custom_meta; use another name",
                    field="custom_meta",
                )
            if column.values.size != count:
                raise InvalidArgumentError(
                    f"custom_meta column {column.name!r} has {column.values.size} values for {count} samples; give one "
                    f"entry a sample",
                    field="custom_meta",
                )
            stored = self._columns.get(column.name)
            if stored is not None:
                _common_kind(column, stored.values.data)

    def write(self, columns: Sequence[MetaColumn], rows: slice | Indexes) -> None:
        """Write values of samples; samples without a value keep theirs."""
        for column in columns:
            if not column.present.any():
                continue
            stored = self._columns.get(column.name)
            if stored is None:
                stored = self._declare(column.name, column.values.dtype.kind)
            elif _common_kind(column, stored.values.data) == "f" and stored.values.data.dtype.kind == "i":
                stored.values.convert(np.float64)
            is_complete = bool(column.present.all())
            where = rows
            if not is_complete:
                where = np.flatnonzero(column.present) + rows.start if isinstance(rows, slice) else rows[column.present]
            where = as_slice(where)
            stored.values.write(where, column.values if is_complete else column.values[column.present])
            stored.present.write(where, True)

    def _declare(self, name: str, kind: str) -> _Stored:
        stored = self._columns[name] = _Stored(
            self._table.column(f"meta/{name}", _DTYPES[kind], _FILLS[kind]),
            self._table.column(f"meta_present/{name}", np.bool_, False),
        )
        return stored

    def read(self, name: str, positions: Indexes) -> MetaColumn | None:
        """Return one column at `positions`, None where no sample ever had a value."""
        stored = self._columns.get(name)
        if stored is None:
            return None
        return MetaColumn(name=name, values=stored.values.data[positions], present=stored.present.data[positions])

    def read_all(self, positions: Indexes) -> list[MetaColumn]:
        """Return all columns that have a value at `positions`."""
        columns = (self.read(name, positions) for name in self._columns)
        return [column for column in columns if column is not None and bool(column.present.any())]

    def holds(self, condition: Condition, rows: slice | Indexes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return of rows where a condition holds, and where there is a value to compare."""
        arrays = self.arrays(condition.column)
        if arrays is None:
            none = np.zeros(self._table.index.data[rows].size, np.bool_)
            return none, none
        values, present = arrays[0][rows], arrays[1][rows]
        holds = np.zeros(present.size, np.bool_)
        if present.any():
            holds[present] = condition.holds(values[present])
        return holds, present

    def arrays(self, name: str) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
        """Return values and presence as they lie in the table, None for an unknown column.

        A readable column of the table is found in the same way.
        """
        stored = self._columns.get(name)
        if stored is not None:
            return stored.values.data, stored.present.data
        column = self._table.readable.get(name)
        return None if column is None else (column.data, np.broadcast_to(True, column.data.shape))


def _common_kind(column: MetaColumn, stored: NDArray[Any]) -> str:
    """Return the kind that holds both; integers become doubles where that loses nothing."""
    new, old = column.values.dtype.kind, stored.dtype.kind
    if new == old:
        return new
    if {new, old} == {"i", "f"}:
        integers = stored if old == "i" else column.values
        if integers.size == 0 or int(np.abs(integers).max()) <= _LARGEST_EXACT_DOUBLE:
            return "f"
    raise InvalidArgumentError(
        f"custom_meta column {column.name!r} holds {_KIND_NAMES[old]} values, got {_KIND_NAMES[new]}; use one type a "
        f"column",
        field="custom_meta",
    )
