"""A partition's columns: its fields, the location of each cell, and custom_meta.

Storage services store the field values. A cell is the location of one value: one row of a put or, after an append,
several rows (see `extents.py`). The controller itself stores custom_meta values.

The cells of a field normally belong to rows. If the samples of a group share a field, the field's cells belong to group
slots, and each row finds the cell through its group. A row that joins a group can therefore use the shared cell
immediately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tq_service.custom_meta import DTYPES, KIND_NAMES, MetaColumn, fitted
from tq_service.errors import FieldMismatchError, InvalidArgumentError
from tq_service.results import MetaColumnStatus
from tq_service.schema import LARGEST_EXACT, Encoding, FieldScope, FieldSpec, Layout
from tq_service.state.extents import Extents, ExtentTable, plain
from tq_service.state.groups import GroupTable
from tq_service.state.plan import Condition, Indexes
from tq_service.state.table import (
    Column,
    ColumnSnapshot,
    NewColumn,
    RowTable,
    SlotTable,
    Table,
    TableSnapshot,
    as_slice,
)

NOT_PRODUCED = -1
CELL_COLUMN = "cell/"  # name prefix of a column that contains the cells of a field
CELL_BYTES_COLUMN = "cell_bytes/"  # name prefix of a column in the put table with a field's mean cell sizes
_SLOT_SHIFT = 32  # a cell is (slot of its put << 32 | row in the put), so a put's consecutive cells differ by 1
_ROW_MASK = (1 << _SLOT_SHIFT) - 1
_ROW_BYTES = 8
_MOST_FORMER_SPECS = 1024
_TENSORS = frozenset({Layout.DENSE, Layout.JAGGED})
_JSON: Final = "J"
_FILLS: dict[str, Any] = {"i": 0, "f": 0.0, "b": False, "O": None}


class Put(NamedTuple):
    """The identity of a put and of the storage service instance that received it."""

    storage_id: str
    boot_id: bytes
    put_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnWrite:
    """One column of a put.

    Attributes:
        spec: dtype, layout and row shape of the column.
        extents: array of shape `(n, ragged dims)` with the size of each row in each ragged dimension of `spec`. None if
            the column is not jagged.
        value_bytes: total size of the values in bytes.
    """

    spec: FieldSpec
    extents: Indexes | None = None
    value_bytes: int = 0

    @property
    def fitting_shape(self) -> tuple[int, ...]:
        """The row shape. A dimension is -1 only if row sizes in this put differ in that dimension."""
        shape = list(self.spec.row_shape or ())
        if self.extents is not None and self.extents.size:
            for column, dim in enumerate(self.spec.ragged_dims):
                sizes = self.extents[:, column]
                if sizes.min() == sizes.max():
                    shape[dim] = int(sizes[0])
        return tuple(shape)

    def sizes(self, dim: int) -> Indexes | int:
        """Return the row sizes in one dimension as an `(n,)` array, or as an integer if all sizes are equal."""
        if self.extents is not None and dim in self.spec.ragged_dims:
            return self.extents[:, self.spec.ragged_dims.index(dim)]
        return (self.spec.row_shape or ())[dim]


def cells_of(slot: int, row_count: int) -> Indexes:
    """Return the cell numbers of the rows of the put that occupies `slot`."""
    first = slot << _SLOT_SHIFT
    return np.arange(first, first + row_count)


def slots_and_rows(cells: Indexes) -> tuple[Indexes, Indexes]:
    """Split cell numbers into put slots and row numbers within the puts."""
    return cells >> _SLOT_SHIFT, cells & _ROW_MASK


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRuns:
    """Cell locations in sample order, as runs of consecutive rows. Fields with the same locations share one instance.

    Attributes:
        field_names: names of the fields whose cells have these locations.
        puts: puts that contain the cells.
        put_indexes: for each run, the index of its put in `puts`.
        first_rows: for each run, the index of its first row within the put.
        row_counts: for each run, the number of rows.
        extent_counts: number of extents in each cell, or empty if no cell has grown. Each extent is one row of a put.
        extent_lengths: for each extent, the length of the part that belongs to the cell, or `WHOLE_EXTENT` if the cell
            has not grown.
        sample_counts: for a field shared within groups, the number of consecutive samples that share each row. The
            sequence is empty for other fields.
    """

    field_names: tuple[str, ...]
    puts: tuple[Put, ...]
    put_indexes: Sequence[int]
    first_rows: Sequence[int]
    row_counts: Sequence[int]
    extent_counts: Sequence[int] = ()
    extent_lengths: Sequence[int] = ()
    sample_counts: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSet:
    """A set of cells in one put.

    The set contains the cells of the fields `field_names` in each row of `rows`. `rows` is in ascending order. If
    `rows` is None, the set contains all cells that the put originally contained.
    """

    put: Put
    field_names: tuple[str, ...] = ()
    rows: Indexes | None = None


Freed: TypeAlias = CellSet | Put
"""Cells that no longer belong to any sample. A `Put` means that all of the put's cells have been freed."""


def freed_cells(freed: Freed) -> CellSet:
    """Convert freed cells to a `CellSet`."""
    return CellSet(put=freed) if isinstance(freed, Put) else freed


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsSnapshot:
    """A snapshot of a partition's puts, of the cells of each field, and of the extents of grown cells."""

    puts: TableSnapshot
    cells: Mapping[str, ColumnSnapshot]
    extents: TableSnapshot


def cell_columns(table: TableSnapshot) -> dict[str, ColumnSnapshot]:
    """Return the cell columns in a snapshot of the row or group table, by field name."""
    columns = table.columns.items()
    return {name.removeprefix(CELL_COLUMN): column for name, column in columns if name.startswith(CELL_COLUMN)}


class Field:
    """A field of a partition, together with its cells.

    Args:
        spec: initial spec of the field.
        table: row table, which stores the field's cells.

    Attributes:
        is_shared: whether the field's cells belong to groups rather than rows.
        spec: spec that fits all of the field's cells, or the declared spec if the field is empty.
        length: size of each cell in the first ragged dimension, or None if no dimension is ragged.
        produced_count: number of cells in the field.
    """

    __slots__ = ("_table", "cell", "length", "produced_count", "spec")
    is_shared = False

    def __init__(self, spec: FieldSpec, table: Table) -> None:
        self._table = table
        self.cell: Column = table.column(*_cell_column(spec.name))
        self.length: Column | None = None
        self.produced_count = 0
        self.spec = spec
        self.widen(spec)

    @property
    def has_lengths(self) -> bool:
        """Whether the field has any cells and these cells have lengths (tensors with at least one dimension)."""
        return self.produced_count > 0 and bool(self.spec.row_shape)

    @property
    def row_count(self) -> int:
        """Number of rows that have a cell for the field."""
        return self.produced_count

    def cells_of(self, rows: slice | Indexes) -> Indexes:
        """Return the cell of each row as an `(n,)` array, with `NOT_PRODUCED` for a row without a cell.

        This method can be called from any thread.
        """
        cells: Indexes = self.cell.data[rows]
        return cells

    def snapshot(self) -> ColumnSnapshot:
        """Return a snapshot of all cells in the field."""
        return self.cell.snapshot(self._table.count)

    def lengths(self, rows: slice | Indexes) -> Indexes:
        """Return each row's cell size in the first ragged dimension, or in dimension 0 if no dimension is ragged.

        The size is -1 for missing cells, scalars and objects. This method can be called from any thread.
        """
        spec, length = self.spec, self.length  # read `spec` first, because `widen` writes `length` first
        is_there = self.cell[rows] >= 0
        if spec.ragged_dims:
            return np.where(is_there, -1 if length is None else length[rows], -1)
        return np.where(is_there, (spec.row_shape or (-1,))[0], -1)

    def widen(self, spec: FieldSpec) -> None:
        """Replace the field's spec with a wider spec that fits all existing cells. The field name does not change."""
        known, first = self.spec, spec.ragged_dims[:1]
        if first and self.length is None:
            self.length = self._table.column(*_length_column(spec.name))
        if self.length is not None and self.produced_count and first != known.ragged_dims[:1]:
            # This dimension has not been the first ragged dimension until now, so all existing cells have the same
            # size in it.
            self.length.write(slice(0, self._table.count), (known.row_shape or ())[first[0]])
        self.spec = spec
        if not first and self.length is not None:
            self.length = None
            self._table.remove_column(_length_column(spec.name)[0])


class SharedField(Field):
    """A field in which the samples of a group share a cell. Methods that write cells expect group slots, not rows.

    Args:
        spec: initial spec of the field.
        groups: groups of the partition.
    """

    __slots__ = ("_groups",)
    is_shared = True

    def __init__(self, spec: FieldSpec, groups: GroupTable) -> None:
        super().__init__(spec, groups.slots)
        self._groups = groups

    @property
    def row_count(self) -> int:
        """Number of rows whose group has a cell in the field. Failed rows are not counted."""
        groups, slots = self._groups, np.flatnonzero(self.cell[: self._groups.slots.count] >= 0)
        return int((groups.members[slots] - groups.cleared[slots] - groups.failed[slots]).sum())

    def cells_of(self, rows: slice | Indexes) -> Indexes:
        """Return the cell of each row's group as an `(n,)` array, with `NOT_PRODUCED` for a group without a cell.

        This method can be called from any thread.
        """
        slots = self._groups.of_rows[rows]
        return np.where(slots < 0, NOT_PRODUCED, self.cell.data[slots])

    def lengths(self, rows: slice | Indexes) -> Indexes:
        """Return the size of each row's shared cell (see `Field.lengths`)."""
        slots = self._groups.of_rows[rows]
        return np.where(slots < 0, -1, super().lengths(slots))


def _cell_column(name: str) -> NewColumn:
    return CELL_COLUMN + name, np.int64, NOT_PRODUCED


def _length_column(name: str) -> NewColumn:
    return f"length/{name}", np.int64, -1


class CellTable:
    """The fields of a partition and the locations of their cells.

    A field exists as long as it is declared or has cells. When a declared field loses its last cell, it reverts to its
    declared spec. An undeclared field that loses its last cell is removed.

    Args:
        table: row table of the partition.
        declared: specs of the declared fields.
        default_layout: layout of tensor fields that are undeclared or declared without a layout.
        groups: groups of the partition. Groups own the cells of fields declared with scope "group".

    Attributes:
        fields: the partition's fields, keyed by name.
        extents: extents of grown cells.
        write_once: names of fields whose cells can be written only once.
        shared: names of fields whose cells belong to groups. All shared fields are declared.
        former_specs: specs of the fields that most recently lost all of their cells. If a rank requests a batch whose
            cells have been cleared, `former_specs` describes the batch's fields.
    """

    __slots__ = (
        "_declared", "_default_layout", "_groups", "_table", "extents", "fields", "former_specs", "puts", "shared",
        "write_once",
    )  # fmt: skip

    def __init__(
        self,
        table: RowTable,
        declared: Iterable[FieldSpec] = (),
        default_layout: Layout = Layout.AUTO,
        *,
        groups: GroupTable,
    ) -> None:
        self._table = table
        self._groups = groups
        self._declared = {spec.name: spec for spec in declared}
        self.shared = frozenset(spec.name for spec in self._declared.values() if spec.scope is FieldScope.GROUP)
        self.write_once = frozenset(spec.name for spec in self._declared.values() if spec.write_once)
        self._default_layout = default_layout
        self.puts = PutTable()
        self.extents = ExtentTable()
        self.fields: dict[str, Field] = {}
        self.former_specs: dict[str, FieldSpec] = {}
        for spec in self._declared.values():
            self.declare(spec)

    @property
    def used_bytes(self) -> int:
        """Total size of all cell values in bytes. The sizes of partially freed puts are estimates (see `PutTable`)."""
        return self.puts.used_bytes

    def snapshot(self) -> CellsSnapshot:
        """Return a snapshot of all cells. Pass the snapshot to `live_cells` to read the cells."""
        cells = {name: field.snapshot() for name, field in self.fields.items()}
        return CellsSnapshot(puts=self.puts.snapshot(), cells=cells, extents=self.extents.snapshot())

    def rebuild(self) -> None:
        """Recompute the derived state after the columns have been restored."""
        self.puts.rebuild()
        self.extents.rebuild()
        for field in self.fields.values():
            field.produced_count = int(np.count_nonzero(field.cell.data >= 0))

    def declare(self, spec: FieldSpec) -> Field:
        """Create the field for a spec, or widen the existing field to fit the spec. Return the field."""
        field = self.fields.get(spec.name)
        if field is None:
            is_shared = spec.scope is FieldScope.GROUP
            field = SharedField(spec, self._groups) if is_shared else Field(spec, self._table)
            self.fields[spec.name] = field
            self.puts.declare(spec.name)
        elif field.spec != spec:
            field.widen(spec)
        return field

    def last_spec(self, name: str) -> FieldSpec | None:
        """Return a field's current spec or, if the field has lost all its cells, its last known spec.

        Return None if the field is unknown.
        """
        field = self.fields.get(name)
        return self.former_specs.get(name) or (None if field is None else field.spec)

    def sequence_fields(self, names: Iterable[str]) -> list[Field]:
        """Return those of the given fields that contain one-dimensional tensors and are not declared as dense.

        A field may be dense only because all its cells currently have equal lengths. Such fields are also returned, so
        writing a cell of a different length does not change the result.
        """
        found = []
        for name in names:
            field, declared = self.fields.get(name), self._declared.get(name)
            layout = (None if declared is None else declared.layout) or self._default_layout
            if field is not None and len(field.spec.row_shape or ()) == 1 and layout is not Layout.DENSE:
                found.append(field)
        return found

    def produced(self, names: Sequence[str], rows: slice | Indexes) -> NDArray[np.bool_]:
        """Return a mask of the rows that have a cell in every named field. An unknown field has no cells."""
        fields = [self.fields.get(name) for name in names]
        masks = [field.cells_of(rows) >= 0 for field in fields if field is not None]
        if len(masks) < len(fields) or not masks:
            return np.full(self._table.index[rows].size, not fields)
        for mask in masks[1:]:
            masks[0] &= mask
        return masks[0]

    def produced_by(self, positions: Indexes) -> dict[str, NDArray[np.bool_]]:
        """For each field with a cell in any of the given rows, return a mask of the rows that have a cell."""
        all_of_them = np.ones(positions.size, np.bool_)
        found: dict[str, NDArray[np.bool_]] = {}
        for name, field in self.fields.items():
            is_complete = field.produced_count == self._table.present_count and not field.is_shared
            mask = all_of_them if is_complete else field.cells_of(positions) >= 0
            if mask.any():
                found[name] = mask
        return found

    def merged_specs(self, columns: Sequence[ColumnWrite], positions: Indexes | None) -> list[FieldSpec]:
        """Return the specs that result from writing `columns`. Raise FieldMismatchError if a column does not fit.

        Args:
            columns: columns to write.
            positions: rows or group slots to write to. A position of -1 denotes a new row or slot; None means that all
                rows or slots are new.
        """
        merged = []
        for column in columns:
            new = column.spec
            field = self.fields.get(new.name)
            if field is not None and field.spec == new:  # the common case
                merged.append(field.spec)
                continue
            known = declared = self._declared.get(new.name) or FieldSpec(new.name)
            if field is not None and (positions is None or not _replaces_all(field, positions)):
                known = field.spec
            layout = declared.layout
            if layout is None:  # scalars have no dimension that could be ragged
                is_scalar = new.layout is Layout.DENSE and not new.row_shape
                layout = Layout.AUTO if new.layout is Layout.OBJECT or is_scalar else self._default_layout
            merged.append(merge_specs(known, column, layout))
        return merged

    def appended_specs(self, columns: Sequence[ColumnWrite]) -> list[FieldSpec]:
        """Return the specs that result from appending `columns`. Raise FieldMismatchError if a column does not fit."""
        specs = []
        for column, merged in zip(columns, self.merged_specs(columns, None), strict=True):
            spec = replace(merged, layout=Layout.JAGGED, row_shape=(-1, *(merged.row_shape or ())[1:]))
            if column.spec.ragged_dims != (0,) or spec.ragged_dims != (0,):
                field = self.fields.get(spec.name)
                raise _mismatch(
                    FieldSpec(spec.name) if field is None else field.spec,
                    column.spec,
                    "append only to fields whose rows differ only in the first dimension. For other fields, put the "
                    "full values again",
                )
            specs.append(spec)
        return specs

    def lengths(self, name: str, positions: Indexes) -> Indexes:
        """Return the length of each row's cell in a field (see `Field.lengths`), or 0 for a missing cell."""
        field = self.fields.get(name)
        return np.zeros(positions.size, np.int64) if field is None else np.maximum(field.lengths(positions), 0)

    def extent_counts(self, name: str, positions: Indexes) -> Indexes:
        """Return how many extents each row's cell in a field has, with 0 for a missing cell."""
        field = self.fields.get(name)
        if field is None:
            return np.zeros(positions.size, np.int64)
        cells = field.cell[positions]
        return np.where(cells < 0, 0, self.extents.chains.counts(cells))

    def new_columns(self, specs: Iterable[FieldSpec]) -> list[NewColumn]:
        """Return the table columns that must be declared before fields with these specs can be written."""
        columns = []
        for spec in specs:
            field = self.fields.get(spec.name)
            if field is None:
                columns.append(_cell_column(spec.name))
            if spec.ragged_dims and (field is None or field.length is None):
                columns.append(_length_column(spec.name))
        return columns

    def write(self, put: Put, columns: Sequence[ColumnWrite], specs: Sequence[FieldSpec], positions: slice | Indexes,
              row_count: int) -> list[Freed]:  # fmt: skip
        """Make the cells at `positions` refer to the rows of a put, in order. Return the replaced cells.

        If the rows are new, `positions` is a slice. For fields shared within groups, `positions` contains group slots.
        A single write must not mix shared fields with other fields.
        """
        slot = self.puts.add(put, row_count, columns)
        freed: list[Freed] = []
        if not isinstance(positions, slice):
            known = (self.fields.get(spec.name) for spec in specs)
            freed = self._free_cells(positions, [field for field in known if field is not None])
        cells = cells_of(slot, row_count)
        where = as_slice(positions)
        for column, spec in zip(columns, specs, strict=True):
            self.former_specs.pop(spec.name, None)
            field = self.declare(spec)
            field.cell.write(where, cells)
            field.produced_count += row_count
            if field.length is not None:
                field.length.write(where, column.sizes(spec.ragged_dims[0]))
        return freed

    def append(
        self, put: Put, columns: Sequence[ColumnWrite], specs: Sequence[FieldSpec], positions: Indexes, lengths: Indexes
    ) -> list[Freed]:
        """Append the rows of a put to the cells at `positions`, in order. Return the rows that were not appended.

        An empty row is not appended to an existing cell.

        Args:
            put: put that contains the rows.
            columns: columns of the put.
            specs: specs of the fields after the append.
            positions: table position of each cell, in the order of the put's rows.
            lengths: current lengths of the cells.
        """
        slot = self.puts.add(put, positions.size, columns)
        rows = cells_of(slot, positions.size)
        unused: list[tuple[str, Indexes]] = []
        for column, spec in zip(columns, specs, strict=True):
            self.former_specs.pop(spec.name, None)
            field, ends = self.declare(spec), lengths + column.sizes(0)
            cells = field.cell[positions]
            is_new = cells < 0
            grows = ~is_new & (ends > lengths)
            cells[is_new] = rows[is_new]
            if grows.any():
                before = lengths[grows]
                cells[grows] = self.extents.append(spec.name, cells[grows], before, rows[grows], ends[grows])
            field.cell.write(positions, cells)
            field.produced_count += int(np.count_nonzero(is_new))
            if field.length is not None:
                field.length.write(positions, ends)
            unused.append((spec.name, rows[~is_new & ~grows]))
        return self._count_off(unused)

    def truncate(self, names: Iterable[str], positions: Indexes, lengths: Indexes) -> list[Freed]:
        """Truncate the cells at `positions` to the given `lengths`, and return the freed cells.

        A new length must not exceed the current length. A cell that is truncated to length 0 is removed.
        """
        fields = [field for name in dict.fromkeys(names) if (field := self.fields.get(name)) is not None]
        freed: list[Freed] = []
        for field in fields:
            is_cut = (lengths > 0) & (field.lengths(positions) > lengths)
            where, to = positions[is_cut], lengths[is_cut]
            if where.size:
                cells, dropped = self.extents.truncate(field.spec.name, field.cell[where], to)
                field.cell.write(where, cells)
                if field.length is not None:
                    field.length.write(where, to)
                freed += self._count_off([(field.spec.name, dropped)])
        return freed + self.free(positions[lengths == 0], fields)

    def free_rows(self, positions: Indexes) -> list[Freed]:
        """Remove all cells that belong to the given rows, and return the removed cells (see `free`)."""
        return self.free(positions, (field for field in self.fields.values() if not field.is_shared))

    def free_groups(self, slots: Indexes) -> list[Freed]:
        """Remove all cells that belong to the given groups, and return the removed cells (see `free`)."""
        if not self.shared or not slots.size:
            return []
        return self.free(slots, (field for field in self.fields.values() if field.is_shared))

    def free(self, positions: Indexes, fields: Iterable[Field]) -> list[Freed]:
        """Remove the cells at `positions` in `fields`, and return the removed cells.

        A declared field that loses its last cell reverts to its declared spec. An undeclared field that loses its last
        cell is removed.
        """
        looked_at = list(fields)
        freed = self._free_cells(positions, looked_at)
        for field in looked_at:  # a field without cells reverts to its declared spec, or is removed
            name = field.spec.name
            declared = self._declared.get(name)
            if field.produced_count or field.spec == declared:
                continue
            self.former_specs[name] = field.spec
            if len(self.former_specs) > _MOST_FORMER_SPECS:
                del self.former_specs[next(iter(self.former_specs))]
            if declared is None:
                del self.fields[name]
                self.puts.forget(name)
                self._table.remove_column(_cell_column(name)[0])
                if field.length is not None:
                    self._table.remove_column(_length_column(name)[0])
            else:
                field.widen(declared)
        return freed

    def _free_cells(self, positions: Indexes, fields: Iterable[Field]) -> list[Freed]:
        forgotten: list[tuple[str, Indexes]] = []
        for field in fields:
            produced = positions[field.cell[positions] >= 0]
            if produced.size:
                forgotten.append((field.spec.name, self.extents.release(field.cell[produced])))
                field.cell.write(as_slice(produced), NOT_PRODUCED)
                field.produced_count -= produced.size
        return self._count_off(forgotten)

    def _count_off(self, forgotten: Iterable[tuple[str, Indexes]]) -> list[Freed]:
        """Decrease the cell counts of the puts that contain the given cells. Return these cells, grouped by put."""
        freed: list[Freed] = []
        for slot, alike in _by_put(forgotten).items():
            put = self.puts.get(slot)
            counts = [(name, len(rows) // _ROW_BYTES) for rows, names in alike.items() for name in names]
            freed += [put] if self.puts.count_off(slot, counts) else _cell_sets(put, alike)
        return freed

    def count_of_runs(self, positions: Indexes, most: int) -> int:
        """Return how many leading rows can be covered with at most `most` runs per field.

        A run consists of consecutive rows in one put. Position -1 denotes a missing row.
        """
        breaks = np.zeros(max(0, positions.size - 1), np.int64)
        for field in self.fields.values():
            cells = np.where(positions < 0, NOT_PRODUCED, field.cells_of(positions))
            slots = cells >> _SLOT_SHIFT
            counts = self.extents.chains.counts(cells)[1:] if self.extents.has(cells) else 1
            np.maximum(breaks, np.where(slots[1:] != slots[:-1], counts, counts - 1), out=breaks)
        heads = breaks.cumsum()
        return min(positions.size, int(np.searchsorted(heads, most)) + 1)

    def locate(self, names: Sequence[str], positions: Indexes) -> list[CellRuns]:
        """Return the cell locations of the named fields. Fields with the same locations share one entry.

        A field is omitted unless every row has a cell in that field.
        """
        alike: dict[bytes, tuple[Indexes, Extents | None, list[str]]] = {}
        for name in names:
            cells, extents = self.fields[name].cells_of(positions), None
            key = cells.tobytes()
            if not self.extents.is_empty and self.extents.has(cells):  # grown cells are numbered by field
                extents = self.extents.chains.resolve(cells)
                key = b"".join(
                    each.tobytes() for each in (extents.cells, extents.counts, self.extents.lengths(extents))
                )
            alike.setdefault(key, (cells, extents, []))[2].append(name)
        return [
            self._located(tuple(fields), cells, extents)
            for cells, extents, fields in alike.values()
            if cells.size and int(cells.min()) != NOT_PRODUCED
        ]

    def _located(self, names: tuple[str, ...], cells: Indexes, extents: Extents | None) -> CellRuns:
        if extents is not None:
            return self._grown_runs(names, extents)
        if names[0] not in self.shared:  # shared and unshared fields have different locations
            return self._runs(names, cells)
        heads = [0, *((cells[1:] != cells[:-1]).nonzero()[0] + 1).tolist()]
        counts = [end - start for start, end in pairwise((*heads, cells.size))]
        return self._runs(names, cells[heads], sample_counts=counts)

    def _grown_runs(self, names: tuple[str, ...], extents: Extents) -> CellRuns:
        return replace(
            self._runs(names, extents.cells),
            extent_counts=extents.counts.tolist(),
            extent_lengths=self.extents.lengths(extents).tolist(),
        )

    def _runs(self, names: tuple[str, ...], cells: Indexes, sample_counts: Sequence[int] = ()) -> CellRuns:
        breaks = (cells[1:] - cells[:-1] != 1).nonzero()[0]
        if not breaks.size:  # the common case: all samples are in one put
            first = int(cells[0])
            return CellRuns(
                field_names=names,
                puts=(self.puts.get(first >> _SLOT_SHIFT),),
                put_indexes=(0,),
                first_rows=(first & _ROW_MASK,),
                row_counts=(cells.size,),
                sample_counts=sample_counts,
            )
        starts = np.concatenate(([0], breaks + 1))
        used: dict[int, int] = {}
        put_indexes = tuple(used.setdefault(slot, len(used)) for slot in (cells[starts] >> _SLOT_SHIFT).tolist())
        return CellRuns(
            field_names=names,
            puts=tuple(map(self.puts.get, used)),
            put_indexes=put_indexes,
            first_rows=(cells[starts] & _ROW_MASK).tolist(),
            row_counts=np.diff(starts, append=cells.size).tolist(),
            sample_counts=sample_counts,
        )


def live_cells(snapshot: CellsSnapshot) -> Iterator[CellSet]:
    """Yield the cells that belonged to samples when the snapshot was taken, grouped by put.

    Iteration may take a long time and can run in any thread. Each step processes a few thousand slots or cells.
    """
    partial: dict[int, Put] = {}
    masks: list[NDArray[np.bool_]] = []
    start = 0
    puts = snapshot.puts.columns
    blocks = zip(puts["put"].blocks(), puts["cells"].blocks(), puts["made"].blocks(), strict=True)
    for some, counts, made in blocks:
        for put in some[(counts == made) & (counts > 0)].tolist():
            yield CellSet(put=put)
        is_part = (counts < made) & (counts > 0)
        masks.append(is_part)
        where = np.flatnonzero(is_part)
        partial |= zip((where + start).tolist(), some[where].tolist(), strict=True)
        start += some.size
    if partial:
        is_partial = np.concatenate(masks)
        cells = {
            name: [_of_puts(block, is_partial) for block in column.blocks()] for name, column in snapshot.cells.items()
        }
        extents = snapshot.extents.columns
        for names, some in zip(extents["field"].blocks(), extents["cell"].blocks(), strict=True):
            for name in set(names.tolist()) - {None}:
                cells[name].append(_of_puts(some[names == name], is_partial))
        in_order = ((name, np.concatenate(blocks)) for name, blocks in cells.items())
        for slot, alike in _by_put(in_order).items():
            yield from _cell_sets(partial[slot], alike)


def _of_puts(cells: Indexes, is_meant: NDArray[np.bool_]) -> Indexes:
    """Return the cells that have not grown and are in put slots selected by the mask."""
    cells = cells[plain(cells)]
    meant: Indexes = cells[is_meant[cells >> _SLOT_SHIFT]]
    return meant


def _by_put(cells_of_fields: Iterable[tuple[str, Indexes]]) -> dict[int, dict[bytes, list[str]]]:
    """Group fields by put slot and by the set of rows that their cells occupy in the put.

    Each set of rows maps to the names of fields whose cells occupy exactly these rows of the put.
    """
    found: dict[int, dict[bytes, list[str]]] = {}
    for name, cells in cells_of_fields:
        slots, rows = slots_and_rows(np.sort(cells, kind="stable"))  # the cells are usually sorted already
        starts = np.flatnonzero(np.diff(slots, prepend=-1))
        for slot, in_put in zip(slots[starts].tolist(), np.split(rows, starts[1:]), strict=False):
            found.setdefault(slot, {}).setdefault(in_put.tobytes(), []).append(name)
    return found


def _cell_sets(put: Put, alike: Mapping[bytes, Sequence[str]]) -> Iterator[CellSet]:
    for rows, names in alike.items():
        yield CellSet(put=put, field_names=tuple(names), rows=np.frombuffer(rows, np.int64))


class PutTable(SlotTable):
    """The puts that contain a partition's cells. The table records the number and total size of each put's cells.

    Attributes:
        used_bytes: approximate size of all cells in bytes. Only the storage service records the size of each cell. When
            a cell is freed, the table therefore subtracts the mean size of the field's cells in that put. When a put's
            last cell is freed, the table subtracts the put's remaining bytes.
    """

    __slots__ = ("_bytes", "_cell_bytes", "_cells", "_made", "used_bytes")

    def __init__(self) -> None:
        super().__init__("put")
        self._cells = self.column("cells", np.int64, 0)
        self._made = self.column("made", np.int64, 0)
        self._bytes = self.column("bytes", np.int64, 0)
        self._cell_bytes: dict[str, Column] = {}  # mean cell size of each field, by put
        self.used_bytes = 0

    def declare(self, field_name: str) -> None:
        """Declare a field so that puts can contain its cells."""
        if field_name not in self._cell_bytes:
            self._cell_bytes[field_name] = self.column(CELL_BYTES_COLUMN + field_name, np.float64, 0.0)

    def forget(self, field_name: str) -> None:
        """Remove a field that has no cells."""
        del self._cell_bytes[field_name]
        self.remove_column(CELL_BYTES_COLUMN + field_name)

    def add(self, put: Put, row_count: int, columns: Sequence[ColumnWrite]) -> int:
        """Add a put and its columns. Return the put's slot."""
        cells, value_bytes = len(columns) * row_count, sum(column.value_bytes for column in columns)
        self.used_bytes += value_bytes
        (slot,) = self.allocate(1)
        self.occupants.write(slot, put)
        self._cells.write(slot, cells)
        self._made.write(slot, cells)
        self._bytes.write(slot, value_bytes)
        for column in columns:
            self.declare(column.spec.name)
            self._cell_bytes[column.spec.name].write(slot, column.value_bytes / row_count)
        return slot

    def get(self, slot: int) -> Put:
        """Return the put in a slot. Raise LookupError if the slot is free."""
        put: Put | None = self.occupants[slot]
        if put is None:
            raise LookupError(f"put slot {slot} is free")
        return put

    def count_off(self, slot: int, counts: Iterable[tuple[str, int]]) -> bool:
        """Subtract the fields' freed cells from a put's cell count and size. Return whether the put is now empty."""
        cells_left, bytes_left, gone_bytes = int(self._cells[slot]), int(self._bytes[slot]), 0.0
        for field_name, count in counts:
            cells_left -= count
            gone_bytes += count * self._cell_bytes[field_name][slot]
        gone = min(bytes_left, round(gone_bytes)) if cells_left else bytes_left
        self.used_bytes -= gone
        if cells_left:
            self._cells.write(slot, cells_left)
            self._bytes.write(slot, bytes_left - gone)
            return False
        self.free_slots(np.array([slot]))
        return True

    def all(self) -> Iterable[Put]:
        """Return all puts in the table."""
        return [put for put in self.occupants[: self.count] if put is not None]

    def rebuild(self) -> None:
        """Recompute the derived state after the columns have been restored."""
        super().rebuild()
        self.used_bytes = int(self._bytes.data.sum())


def _replaces_all(field: Field, positions: Indexes) -> bool:
    """Return whether a write to the given rows replaces every cell of a field."""
    count = field.produced_count
    return count <= positions.size and count == np.count_nonzero(field.cell[positions[positions >= 0]] >= 0)


def merge_specs(known: FieldSpec, column: ColumnWrite, layout: Layout) -> FieldSpec:
    """Widen a field's spec to fit the rows of a column. Raise FieldMismatchError if this is impossible.

    Args:
        known: current spec of the field, or the declared spec if the field is empty.
        column: column that contains the new rows.
        layout: declared layout of the field. A jagged field also accepts rows of equal shape. An "auto" field becomes
            jagged when a row of a different shape or a jagged column is written.
    """
    new = column.spec
    if new.row_shape is None:
        raise _mismatch(known, new, "specify the row shape of every column")
    is_of_tensors = bool(known.dtype) or not _TENSORS.isdisjoint((layout, known.layout))
    if is_of_tensors and new.layout is Layout.OBJECT:
        hint = "the field contains tensors: put tensors, arrays or lists of numbers, or first declare it as object"
        raise _mismatch(known, new, hint)
    if new.layout is not Layout.OBJECT and Layout.OBJECT in (layout, known.layout):
        hint = "the field contains objects: put its rows as a list, or first declare it as dense or jagged"
        raise _mismatch(known, new, hint)
    if new.layout is Layout.OBJECT:
        if known.encoding in {Encoding.TEXT, Encoding.BYTES} and new.encoding is not known.encoding:
            hint = f"put {known.encoding} in every row, or declare the field without an encoding"
            raise _mismatch(known, new, hint)
        return replace(new, encoding=known.encoding, write_once=known.write_once, scope=known.scope)
    if known.dtype and known.dtype != new.dtype:
        raise _mismatch(known, new, "convert the rows to the field's dtype, or put them into another field")
    given = column.fitting_shape
    shape = given if known.row_shape is None else known.row_shape
    if len(shape) != len(given):
        hint = "put rows with the same number of dimensions in every put: only scalars (n,), or only rows (n, 1)"
        raise _mismatch(known, new, hint)
    if layout is Layout.JAGGED and not shape:
        raise _mismatch(known, new, "put rows of one or more dimensions, or declare the field as dense to put scalars")
    widened = tuple(a if a == b else -1 for a, b in zip(shape, given, strict=True))
    if layout is Layout.DENSE and (new.layout is Layout.JAGGED or widened != given):
        raise _mismatch(known, new, "put rows of one shape, or declare the field as auto or jagged")
    is_jagged = -1 in widened or Layout.JAGGED in (layout, known.layout, new.layout)
    if -1 not in widened and new.layout is Layout.JAGGED:  # all rows so far have the same shape
        # torch marks the first dimension as ragged even if all rows have the same shape. Ignore this mark for rows with
        # more than one dimension.
        first = 0 if len(widened) == 1 else 1
        widened = (*widened[:first], *new.row_shape[first:])
    taken = Layout.JAGGED if is_jagged else Layout.DENSE
    return replace(new, layout=taken, row_shape=widened, write_once=known.write_once, scope=known.scope)


def _mismatch(known: FieldSpec, new: FieldSpec, hint: str) -> FieldMismatchError:
    return FieldMismatchError(
        f"field {known.name!r} is {known.describe()}, got {new.describe()}; {hint}",
        field="columns",
        metadata={"field_name": known.name, "got": new.describe(), "expected": known.describe()},
    )


# custom_meta


@dataclass(slots=True)
class _MetaStore:
    """The typed and JSON values of a custom_meta column. An attribute is None until a value of its type is written."""

    values: Column | None = None
    present: Column | None = None
    json: Column | None = None

    @property
    def kind(self) -> str:
        """NumPy kind of the column's typed values (`i`, `f`, `b` or `O`), or an empty string if there are none."""
        return "" if self.values is None else self.values.data.dtype.kind


class CustomMeta:
    """The custom_meta columns of a partition (see `tq_service.custom_meta`)."""

    __slots__ = ("_columns", "_table")

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._columns: dict[str, _MetaStore] = {}

    @property
    def kinds(self) -> dict[str, str]:
        """Kinds of the custom_meta columns, by column name and in order of first use.

        If a column has typed values, its kind is their NumPy kind (`i`, `f`, `b` or `O`). The suffix `J` is added if
        some values are JSON.
        """
        return {name: stored.kind + _JSON * (stored.json is not None) for name, stored in self._columns.items()}

    @property
    def statuses(self) -> tuple[MetaColumnStatus, ...]:
        """Status of each custom_meta column, in order of first use."""
        return tuple(
            MetaColumnStatus(name=name, kind=KIND_NAMES.get(stored.kind, ""), has_json=stored.json is not None)
            for name, stored in self._columns.items()
        )

    def declare(self, kinds: Mapping[str, str]) -> None:
        """Declare columns of the given `kinds` before their values are restored."""
        for name, kind in kinds.items():
            stored = self._columns[name] = _MetaStore()
            if typed := kind.removesuffix(_JSON):
                self._declare_typed(name, stored, typed)
            if typed != kind:
                self._declare_json(name, stored)

    def _declare_typed(self, name: str, stored: _MetaStore, kind: str) -> None:
        stored.values = self._table.column(f"meta/{name}", DTYPES[kind], _FILLS[kind])
        stored.present = self._table.column(f"meta_present/{name}", np.bool_, False)

    def _declare_json(self, name: str, stored: _MetaStore) -> None:
        stored.json = self._table.column(f"meta_json/{name}", np.object_, None)

    def names(self) -> list[str]:
        """Return the names of the custom_meta columns in order of first use."""
        return list(self._columns)

    def has(self, name: str) -> bool:
        """Return whether the column `name` has ever contained a typed value."""
        return name in self._columns and self._columns[name].values is not None

    def check(self, columns: Sequence[MetaColumn], count: int) -> None:
        """Raise InvalidArgumentError if `columns` do not match the stored columns or the number of samples."""
        names = [column.name for column in columns]
        if len(set(names)) != len(names):
            raise InvalidArgumentError(
                f"custom_meta contains duplicate columns: {names}. Pass each column once.", field="custom_meta"
            )
        for column in columns:
            if column.values.size != count:
                raise InvalidArgumentError(
                    f"custom_meta column {column.name!r} has {column.values.size} values for {count} samples. Pass "
                    f"one value per sample.",
                    field="custom_meta",
                )
            _fitted(column, self._columns.get(column.name))

    def write(self, columns: Sequence[MetaColumn], rows: slice | Indexes) -> None:
        """Write or remove values. A sample without an entry in a column keeps its current value in that column."""
        for given in columns:
            stored = self._columns.get(given.name)
            column, kind = _fitted(given, stored)
            has_typed = bool(column.present.any())
            if stored is None:
                if not has_typed and column.json is None:
                    continue
                stored = self._columns[given.name] = _MetaStore()
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
        """Return the values of a column at `positions`, or None if the column has never contained a value."""
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
        """Return all columns in which at least one of the rows at `positions` has a value."""
        columns = (self.read(name, positions) for name in self._columns)
        return [column for column in columns if column is not None and column.has_value.any()]

    def holds(self, condition: Condition, rows: slice | Indexes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return a mask of the rows that satisfy a condition, and one of the rows with a typed value in its column."""
        values, present = self.typed(condition.column, rows)
        holds = np.zeros(present.size, np.bool_)
        if present.any():
            holds[present] = condition.holds(values[present])
        return holds, present

    def typed(self, name: str, rows: slice | Indexes) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the typed values of a column, and a mask of the rows that have a typed value."""
        arrays = self.arrays(name)
        if arrays is None:
            count = self._table.index[rows].size
            return np.zeros(count), np.zeros(count, np.bool_)
        return arrays[0][rows], arrays[1][rows]

    def json_values(self, name: str, rows: slice | Indexes) -> NDArray[np.object_] | None:
        """Return the JSON text of each value in a column, or None if no value is JSON.

        If a row's value is missing or null, its entry is None.
        """
        stored = self._columns.get(name)
        if stored is None or stored.json is None:
            return None
        texts: NDArray[np.object_] = stored.json[rows].copy()
        texts[texts == "null"] = None
        return texts

    def arrays(self, name: str) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
        """Return a column's typed values and presence flags as arrays, or None if the column has no typed values."""
        stored = self._columns.get(name)
        if stored is None or stored.values is None or stored.present is None:
            return None
        return stored.values.data, stored.present.data


def _chosen(rows: slice | Indexes, mask: NDArray[np.bool_]) -> slice | Indexes:
    """Return the entries of `rows` that the mask selects."""
    return as_slice(np.flatnonzero(mask) + rows.start if isinstance(rows, slice) else rows[mask])


def _fitted(column: MetaColumn, stored: _MetaStore | None) -> tuple[MetaColumn, str]:
    """Convert a column's typed values to the kind used for storage. Return the converted column and the kind."""
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
