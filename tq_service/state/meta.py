"""custom_meta of a partition, and the conditions and orders that claims put on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import DTYPES, KIND_NAMES, MetaColumn, fitted
from tq_service.errors import InvalidArgumentError
from tq_service.results import MetaColumnStatus
from tq_service.schema import LARGEST_EXACT
from tq_service.state.plan import Condition, Indexes
from tq_service.state.table import Column, RowTable, as_slice

_JSON: Final = "J"
_FILLS: dict[str, Any] = {"i": 0, "f": 0.0, "b": False, "O": None}


@dataclass(slots=True)
class _Stored:
    """A column: its typed values, once it has one, and its JSON values, once it has one."""

    values: Column | None = None
    present: Column | None = None
    json: Column | None = None

    @property
    def kind(self) -> str:
        """The kind of the typed values, "" without any."""
        return "" if self.values is None else self.values.data.dtype.kind


class CustomMeta:
    """The custom_meta columns of a partition, see `tq_service.custom_meta`."""

    __slots__ = ("_columns", "_table")

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._columns: dict[str, _Stored] = {}

    @property
    def kinds(self) -> dict[str, str]:
        """For each column the kind of its typed values (`i`, `f`, `b` or `O`), if any, and `J` where some are JSON.

        In order of their first use.
        """
        return {name: stored.kind + _JSON * (stored.json is not None) for name, stored in self._columns.items()}

    @property
    def statuses(self) -> tuple[MetaColumnStatus, ...]:
        """What is shown of the columns."""
        return tuple(
            MetaColumnStatus(name=name, kind=KIND_NAMES.get(stored.kind, ""), has_json=stored.json is not None)
            for name, stored in self._columns.items()
        )

    def declare(self, kinds: Mapping[str, str]) -> None:
        """Declare columns by their kinds, before they are restored."""
        for name, kind in kinds.items():
            stored = self._columns[name] = _Stored()
            if typed := kind.removesuffix(_JSON):
                self._declare_typed(name, stored, typed)
            if typed != kind:
                self._declare_json(name, stored)

    def _declare_typed(self, name: str, stored: _Stored, kind: str) -> None:
        stored.values = self._table.column(f"meta/{name}", DTYPES[kind], _FILLS[kind])
        stored.present = self._table.column(f"meta_present/{name}", np.bool_, False)

    def _declare_json(self, name: str, stored: _Stored) -> None:
        stored.json = self._table.column(f"meta_json/{name}", np.object_, None)

    def names(self) -> list[str]:
        """Return the names of the columns in order of their first use."""
        return list(self._columns)

    def has(self, name: str) -> bool:
        """Whether any sample ever had a typed value for `name`."""
        return name in self._columns and self._columns[name].values is not None

    def check(self, columns: Sequence[MetaColumn], count: int) -> None:
        """Refuse columns that do not fit, before anything is written."""
        names = [column.name for column in columns]
        if len(set(names)) != len(names):
            raise InvalidArgumentError(f"custom_meta names a column twice: {names}", field="custom_meta")
        for column in columns:
            if column.values.size != count:
                raise InvalidArgumentError(
                    f"custom_meta column {column.name!r} has {column.values.size} values for {count} samples; give one "
                    f"entry a sample",
                    field="custom_meta",
                )
            _fitted(column, self._columns.get(column.name))

    def write(self, columns: Sequence[MetaColumn], rows: slice | Indexes) -> None:
        """Write values of samples, or remove them; samples of which a column says nothing keep theirs."""
        for given in columns:
            stored = self._columns.get(given.name)
            column, kind = _fitted(given, stored)
            has_typed = bool(column.present.any())
            if stored is None:
                if not has_typed and column.json is None:
                    continue
                stored = self._columns[given.name] = _Stored()
            if has_typed and stored.values is None:
                self._declare_typed(column.name, stored, kind)
            elif has_typed and stored.values is not None and stored.kind != kind:
                stored.values.convert(DTYPES[kind])
            if column.json is not None and stored.json is None:
                self._declare_json(column.name, stored)
            is_written = column.is_written
            where = as_slice(rows) if is_written.all() else _chosen(rows, is_written)
            if stored.values is not None and stored.present is not None:
                values = np.where(column.present, column.values, stored.values.fill)
                stored.values.write(where, values[is_written])
                stored.present.write(where, column.present[is_written])
            if stored.json is not None:
                stored.json.write(where, None if column.json is None else column.json[is_written])

    def read(self, name: str, positions: Indexes) -> MetaColumn | None:
        """Return one column at `positions`, None where no sample ever had a value."""
        stored = self._columns.get(name)
        if stored is None:
            return None
        if stored.values is None or stored.present is None:
            values = present = np.zeros(positions.size, np.bool_)
        else:
            values, present = stored.values[positions], stored.present[positions]
        texts = None if stored.json is None else stored.json[positions]
        if texts is not None and not (texts != None).any():  # noqa: E711  (of each)
            texts = None
        return MetaColumn(name=name, values=values, present=present, json=texts)

    def read_all(self, positions: Indexes) -> list[MetaColumn]:
        """Return all columns that have a value at `positions`."""
        columns = (self.read(name, positions) for name in self._columns)
        return [column for column in columns if column is not None and column.has_value.any()]

    def holds(self, condition: Condition, rows: slice | Indexes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return of rows where a condition holds, and where there is a value to compare."""
        values, present = self.typed(condition.column, rows)
        holds = np.zeros(present.size, np.bool_)
        if present.any():
            holds[present] = condition.holds(values[present])
        return holds, present

    def typed(self, name: str, rows: slice | Indexes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the typed values of a column, and which rows have one."""
        arrays = self.arrays(name)
        if arrays is None:
            count = self._table.index[rows].size
            return np.zeros(count), np.zeros(count, np.bool_)
        return arrays[0][rows], arrays[1][rows]

    def json_values(self, name: str, rows: slice | Indexes) -> NDArray[np.object_] | None:
        """Return the JSON of a column at some rows, None for each without any or with null; None if it has no JSON."""
        stored = self._columns.get(name)
        if stored is None or stored.json is None:
            return None
        texts: NDArray[np.object_] = stored.json[rows].copy()
        texts[texts == "null"] = None
        return texts

    def arrays(self, name: str) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
        """Return typed values and presence as they lie in the table, None for a column without any."""
        stored = self._columns.get(name)
        if stored is None or stored.values is None or stored.present is None:
            return None
        return stored.values.data, stored.present.data


def _chosen(rows: slice | Indexes, mask: NDArray[np.bool_]) -> slice | Indexes:
    """Return those of some rows that a mask over them has."""
    return as_slice(np.flatnonzero(mask) + rows.start if isinstance(rows, slice) else rows[mask])


def _fitted(column: MetaColumn, stored: _Stored | None) -> tuple[MetaColumn, str]:
    """Return a column with the values typed that are of the kind of the stored ones from then on, and this kind."""
    new: str = column.values.dtype.kind
    if stored is None or stored.values is None:
        column = column if column.json is None else fitted(column, new if column.present.any() else None)
        return column, column.values.dtype.kind
    kind: str = stored.kind
    if new != kind and not column.present.any():
        new = kind
    elif {new, kind} == {"i", "f"}:
        integers = stored.values.data if kind == "i" else column.values
        if integers.size == 0 or int(np.abs(integers).max()) <= LARGEST_EXACT:
            new = kind = "f"
    return (column if new == kind and column.json is None else fitted(column, kind)), kind
