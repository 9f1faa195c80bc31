"""A put that is being received or is stored: its columns, its live cells, and the location of its bytes.

The index stores the offsets and extents, which are int64 tables that divide jagged and object columns into rows. The
values are stored separately in a single blob, column by column, as received. A blob that outlives the process begins
with a copy of the tables, so a recovered put has a single file and a single checksum. `place_columns` lays out values
in memory that is shared with a client.

Text rows are validated as UTF-8 when they are received. Msgpack rows are not validated, because validation would
require a Python call per row, and readers decode the rows anyway.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from sys import intern
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import (
    CallCancelledError,
    FieldNotFoundError,
    InvalidArgumentError,
    PutNotFoundError,
    UnavailableError,
    nearest,
)
from tq_service.schema import Encoding, FieldSpec
from tq_service.storage.blobs.memory import Blob, BlobStore, Span, in_thread
from tq_service.storage.blobs.shared import MemfdBlob
from tq_service.wire.columns import ColumnShape, extent_count, fixed_row_bytes
from tq_service.wire.host_memory import place_columns
from tq_service.wire.shared_memory import close_all

Rows = NDArray[np.int64]
Tables = bytearray | memoryview
_NO_TABLES: Final = bytearray()
_CONTINUES: Final = 0x80  # the two highest bits of a UTF-8 continuation byte
_HIGHEST_BITS: Final = 0xC0
_SIZE_BYTES: Final = 4  # bytes per value size in a packed put
_MARKED_SHARE: Final = 16  # if at least a sixteenth of the rows are selected, marking is faster than sorting


@dataclass(frozen=True, slots=True, kw_only=True)
class PutCells:
    """A selection of cells from a single put.

    Attributes:
        put_id: id of the put.
        field_names: names of the fields. If empty, all fields are selected.
        rows: row indices within the put, or None to select all rows. Indices outside the put are ignored.
    """

    put_id: bytes
    field_names: tuple[str, ...] = ()
    rows: Rows | None = None

    def rows_of(self, row_count: int) -> Rows:
        """Return the selected row indices that exist in a put of `row_count` rows."""
        if self.rows is None:
            return np.arange(row_count, dtype=np.int64)
        return self.rows[(self.rows >= 0) & (self.rows < row_count)]

    @property
    def is_whole(self) -> bool:
        """Whether all cells of the put are selected."""
        return self.rows is None and not self.field_names


class RowSet:
    """The rows stored for a put's columns. Columns in which the same rows were freed share a row set.

    Attributes:
        rows: indices of the stored rows in ascending order, or None if all rows of the put are stored.
        stored_count: number of stored rows.
        live: mask of shape `(stored_count,)` that selects the live rows, or None if all rows are live.
        live_count: number of live rows.
    """

    __slots__ = ("live", "live_count", "rows", "stored_count")

    def __init__(self, stored_count: int, rows: Rows | None = None) -> None:
        self.rows = rows
        self.stored_count = stored_count
        self.live: NDArray[np.bool_] | None = None
        self.live_count = stored_count

    def copy(self) -> RowSet:
        """Return a copy from which rows can be freed independently."""
        twin = RowSet(self.stored_count, self.rows)
        twin.live = None if self.live is None else self.live.copy()
        twin.live_count = self.live_count
        return twin

    def compacted(self) -> RowSet:
        """Return a row set that contains only the live rows. At least one row must be live."""
        if self.live is None:
            return RowSet(self.stored_count, self.rows)
        live = self.live_positions()
        return RowSet(self.live_count, live if self.rows is None else self.rows[live])

    def positions(self, firsts: Rows, counts: Rows) -> Rows:
        """Return the position of each run among the stored rows, or -1 if any row of the run is missing."""
        if self.rows is None:
            at, there = firsts, np.ones(len(firsts), np.bool_)
        else:
            at = np.searchsorted(self.rows, firsts)
            there = at + counts <= self.stored_count
        safe, last = np.where(there, at, 0), np.where(there, at + counts - 1, 0)
        if self.rows is not None:
            there &= (self.rows[safe] == firsts) & (self.rows[last] == firsts + counts - 1)
        if self.live is not None:
            dead_before = np.zeros(self.stored_count + 1, np.int64)
            np.cumsum(~self.live, out=dead_before[1:])
            there &= dead_before[last + 1] == dead_before[safe]
        return np.where(there, at, -1).astype(np.int64, copy=False)

    def free(self, rows: Rows) -> Rows:
        """Mark rows as dead, and return the positions of newly marked rows. Missing rows are ignored."""
        at = rows
        if self.rows is not None:
            at = np.minimum(np.searchsorted(self.rows, rows), self.stored_count - 1)
            at = at[self.rows[at] == rows]
        if self.live is None:
            self.live = np.ones(self.stored_count, np.bool_)
        at = _ascending(at[self.live[at]], self.stored_count)
        self.live[at] = False
        self.live_count -= int(at.size)
        return at

    def live_positions(self) -> Rows:
        """Return the positions of live rows in ascending order."""
        if self.live is None:
            return np.arange(self.stored_count, dtype=np.int64)
        return np.flatnonzero(self.live).astype(np.int64, copy=False)


def _ascending(positions: NDArray[np.intp], bound: int) -> NDArray[np.intp]:
    """Return the distinct positions in ascending order. np.unique would take 0.7 s for a million positions."""
    if positions.size < 2 or bool((positions[1:] > positions[:-1]).all()):
        return positions
    if positions.size * _MARKED_SHARE < bound:
        return np.unique(positions)
    marks = np.zeros(bound, np.bool_)
    marks[positions] = True
    return np.flatnonzero(marks)


class StoredColumn:
    """A stored column, whose table and values begin at `table_at` and `values_at` in the put."""

    __slots__ = ("row_set", "spec", "table_at", "value_bytes", "values_at")

    def __init__(self, spec: FieldSpec, row_set: RowSet, value_bytes: int) -> None:
        self.spec = spec
        self.row_set = row_set
        self.value_bytes = value_bytes
        self.table_at = self.values_at = 0  # set by the put

    def table(self, tables: Tables) -> Rows:
        """Return one array with the row offsets followed by the row extents. Not applicable to dense columns."""
        stored = self.row_set.stored_count
        return np.frombuffer(tables, np.int64, stored + 1 + stored * extent_count(self.spec), self.table_at)

    def offsets(self, tables: Tables) -> Rows:
        """Return the row starts and the last row's end as a `(stored + 1,)` array. Not applicable to dense columns."""
        return self.table(tables)[: self.row_set.stored_count + 1]

    def extents(self, tables: Tables) -> Rows:
        """Return the stored rows' extents as a `(stored, extents per row)` array. Not applicable to dense columns."""
        stored = self.row_set.stored_count
        return self.table(tables)[stored + 1 :].reshape(stored, extent_count(self.spec))

    def bytes_of(self, put: StoredPut, positions: Rows) -> int:
        """Return the number of bytes used by the given rows, including their share of the tables."""
        fixed = fixed_row_bytes(self.spec)
        if fixed is not None:
            return fixed * len(positions)
        offsets = self.offsets(put.tables())
        values = int((offsets[positions + 1] - offsets[positions]).sum())
        return values + len(positions) * table_bytes(self.spec)

    def tables_size(self) -> int:
        """Return the size of the column's table in bytes."""
        return 0 if fixed_row_bytes(self.spec) is not None else self.row_set.stored_count * table_bytes(self.spec) + 8


def table_bytes(spec: FieldSpec) -> int:
    """Return the number of bytes that each row of a field occupies in the table."""
    return 0 if fixed_row_bytes(spec) is not None else 8 * (extent_count(spec) + 1)


class StoredPut:
    """The stored cells of a single put, as the concatenated tables and concatenated values of the put's columns.

    Attributes:
        values: blob that contains the values, set when the put is placed.
        tables_bytes: size of the tables in bytes.
        columns: columns by name. The value of a freed column is None. Similar puts share one dict, but a put with freed
            cells has its own.
        row_count: original number of rows.
        partition_id: partition of the put.
        live_bytes: size of the live cells in bytes, including their share of the tables.
        for_existing_rows: whether capacity was reserved for columns of existing rows. If true, the put must not create
            rows.
        owner: controller that owns the put.
    """

    __slots__ = (
        "_has_shared_columns",
        "columns",
        "for_existing_rows",
        "live_bytes",
        "owner",
        "partition_id",
        "row_count",
        "tables_bytes",
        "values",
    )

    values: Blob

    def __init__(
        self,
        columns: dict[str, StoredColumn | None],
        row_count: int,
        partition_id: str,
        *,
        for_existing_rows: bool,
        owner: bytes,
    ) -> None:
        size = 0
        for column in columns.values():
            if column is not None:
                column.table_at = size
                size += column.tables_size()
        self.tables_bytes = size
        self.columns = columns
        self._has_shared_columns = False
        self.row_count = row_count
        self.partition_id = intern(partition_id)
        self.for_existing_rows = for_existing_rows
        self.owner = _one_of(owner)

    def charge_in(self, store: BlobStore) -> int:
        """Return the size of the tables and values in bytes, including gaps between columns in shared memory."""
        return self.tables_bytes + self._place_values(store)[1]

    def blob_bytes(self, store: BlobStore) -> int:
        """Return the size of the put's blob in bytes. If the store is durable, the size includes the tables."""
        return self.charge_in(store) - (0 if store.is_durable else self.tables_bytes)

    def place(self, values: Blob, *, is_recovered: bool = False) -> None:
        """Place the put in a blob of size `blob_bytes`. The blob's `charge` must equal the put's charge.

        The caller must then fill the tables, unless the put is recovered. The blob of a recovered put already contains
        its tables.
        """
        self._own_columns()
        self.values = values
        self.live_bytes = values.charge
        if not values.store.is_durable or not (is_recovered or values.is_local):
            values.tables = bytearray(self.tables_bytes) if self.tables_bytes else _NO_TABLES
        for column, start in zip(self.left_columns(), self._place_values(values.store)[0], strict=True):
            column.values_at = self.values_at + start

    def share_columns(self) -> None:
        """Share column objects with similar puts, because a small put is smaller than its own objects would be."""
        columns = self.left_columns()
        key = [(each.spec, each.value_bytes, each.table_at, each.values_at) for each in columns]
        self.columns = _shared_columns(self.row_count, *key)
        self._has_shared_columns = True

    def take_shared(self, values: Blob) -> None:
        """Place the put in a blob. Its columns must already have been laid out and shared with other puts."""
        self.values = values
        self.live_bytes = values.charge
        self._has_shared_columns = True

    @property
    def may_be_packed(self) -> bool:
        """Whether the put is small, is stored on Python's heap, and has no freed cells."""
        return self._has_shared_columns and self.values.backing is None and self.values.copy is None

    def packed(self) -> PackedPut | None:
        """Return the put in packed form, or None if it cannot be packed."""
        if not self.may_be_packed:
            return None
        columns, values = self.left_columns(), self.values
        specs = tuple(column.spec for column in columns)
        kind = _kind(specs, self.row_count, self.partition_id, self.for_existing_rows, self.owner)
        sizes = _sizes(len(columns)).pack(*(column.value_bytes for column in columns))
        tables = _NO_TABLES if values.store.is_durable else self.tables()
        return PackedPut(kind, b"".join((sizes, tables, values.view())))

    def _own_columns(self) -> None:
        """Replace shared columns with copies that can be modified."""
        if self._has_shared_columns:
            self.columns = self.snapshot().columns
            self._has_shared_columns = False

    def fill_tables(self, shapes: Sequence[ColumnShape]) -> None:
        """Fill in the tables of a placed put. Safe to call in any thread.

        Raises:
            InvalidArgumentError: a msgpack row is empty.
        """
        for column, shape in zip(self.left_columns(), shapes, strict=True):
            if shape.extents is not None:
                tables = self.tables()
                column.offsets(tables)[:] = shape.row_offsets()
                column.extents(tables)[:] = shape.extents
                if shape.spec.encoding is Encoding.MSGPACK and (empty := shape.row_bytes() == 0).any():
                    raise _wrong_row(shape.spec.name, int(empty.argmax()), "has no bytes; expected one msgpack value")

    def _place_values(self, store: BlobStore) -> tuple[list[int], int]:
        """Return the start of each column within the values, and the end of the last column."""
        sizes = [column.value_bytes for column in self.left_columns()]
        if store.is_shared:
            return place_columns(sizes)
        *starts, end = accumulate(sizes, initial=0)
        return starts, end

    @property
    def values_at(self) -> int:
        """Start position of the values in the blob."""
        return self.tables_bytes if self.values.store.is_durable else 0

    def tables(self) -> Tables:
        """Return the stored tables, which divide the columns into rows.

        Raises:
            UnavailableError: the tables are in a file that has not been read since the service started.
        """
        values = self.values
        if values.tables is not None:
            return values.tables
        if values.is_local:
            return values.view()
        raise UnavailableError(f"segment {values.number} has not been read since the service started; try again")

    def table_views(self) -> list[memoryview]:
        """Return the tables of each remaining column, in the order used by copies of the put."""
        tables = memoryview(self.tables())
        return [tables[column.table_at :][: column.tables_size()] for column in self.left_columns()]

    def value_spans(self) -> list[Span]:
        """Return the value span of each remaining column, in the order used by copies of the put."""
        return [(column.values_at, column.value_bytes) for column in self.left_columns()]

    def left_columns(self) -> list[StoredColumn]:
        """Return the columns that have not been freed."""
        return [column for column in self.columns.values() if column is not None]

    def shapes(self) -> list[ColumnShape]:
        """Return the original shapes of the columns. Call this only if no cells have been freed."""
        return [
            ColumnShape(
                spec=column.spec,
                row_count=column.row_set.stored_count,
                extents=None if fixed_row_bytes(column.spec) is not None else column.extents(self.tables()),
                value_bytes=column.value_bytes,
            )
            for column in self.left_columns()
        ]

    def column(self, name: str, put_id: bytes) -> StoredColumn:
        """Return a column by name.

        Raises:
            FieldNotFoundError: the put has never had the column.
            PutNotFoundError: the column was freed.
        """
        column = self.columns.get(name)
        if column is not None:
            return column
        if name in self.columns:
            raise PutNotFoundError(
                f"field {name!r} of put {put_id.hex()} was cleared or overwritten; get the rows again",
                metadata={"put_id": put_id.hex(), "field_name": name},
            )
        raise FieldNotFoundError(
            f"put {put_id.hex()} has no field {name!r}; {nearest(name, self.columns)}",
            metadata={"put_id": put_id.hex(), "field_name": name},
        )

    def free(self, cells: PutCells) -> bool:
        """Free cells, ignoring missing cells. Return whether any cells of the put remain."""
        self._own_columns()
        names = {name for name in (cells.field_names or self.columns) if self.columns.get(name) is not None}
        if cells.rows is None:
            self._free_columns(names)
        else:
            rows = cells.rows_of(self.row_count)
            for row_set in self._split(names):
                members = self.members(row_set)
                died = row_set.free(rows)
                for column in members.values():
                    self.live_bytes -= column.bytes_of(self, died)
                if not row_set.live_count:
                    self._free_columns(set(members))
        return any(self.columns.values())

    def is_whole(self) -> bool:
        """Return whether all cells of the put still exist."""
        return all(column and column.row_set.live_count == self.row_count for column in self.columns.values())

    def dead_bytes(self) -> int:
        """Return a lower bound on the number of bytes that compaction would free."""
        tables = sum(fixed_row_bytes(column.spec) is None for column in self.left_columns())
        live_bytes = self.live_bytes + 8 * (tables + sum(row_set.live_count for row_set in self.row_sets()))
        return self.values.charge - live_bytes

    def is_mostly_dead(self) -> bool:
        """Return whether compaction would free more than half of the put's bytes."""
        return self.dead_bytes() * 2 > self.values.charge

    def snapshot(self) -> StoredPut:
        """Return an immutable snapshot, which a thread can read while cells are freed."""
        twin = copy(self)
        row_sets = {id(row_set): row_set.copy() for row_set in self.row_sets()}
        twin.columns = {}
        for name, column in self.columns.items():
            twin.columns[name] = own = None if column is None else copy(column)
            if own is not None:
                own.row_set = row_sets[id(own.row_set)]
        return twin

    def row_sets(self) -> list[RowSet]:
        """Return the distinct row sets of the columns."""
        return list({id(column.row_set): column.row_set for column in self.left_columns()}.values())

    def members(self, row_set: RowSet) -> dict[str, StoredColumn]:
        """Return the columns that use a row set, keyed by name."""
        return {name: column for name, column in self.columns.items() if column and column.row_set is row_set}

    def _split(self, names: set[str]) -> list[RowSet]:
        """Return the row sets used by the given columns. Row sets that other columns also use are copied first."""
        touched = []
        for row_set in self.row_sets():
            members = self.members(row_set)
            inside = names & members.keys()
            if not inside:
                continue
            own = row_set
            if len(inside) < len(members):
                own = row_set.copy()
                for name in inside:
                    members[name].row_set = own
            touched.append(own)
        return touched

    def _free_columns(self, names: set[str]) -> None:
        for name in names:
            column = self.columns[name]
            if column is not None:
                self.live_bytes -= column.bytes_of(self, column.row_set.live_positions())
                self.columns[name] = None


@dataclass(frozen=True, slots=True, eq=False)
class PutKind:
    """Properties shared by puts with the same columns and partition. Instances are cached and compared by identity."""

    specs: tuple[FieldSpec, ...]
    row_count: int
    partition_id: str
    for_existing_rows: bool
    owner: bytes


_kind: Final = lru_cache(maxsize=256)(PutKind)


@dataclass(slots=True, eq=False)  # a named tuple needs 16 bytes more, and a frozen dataclass is slower to create
class PackedPut:
    """A small put without freed cells, stored compactly and unpacked on each access. Packing saves 75 % of the memory.

    Attributes:
        kind: the put's specs, partition and other properties, which several puts can share.
        content: the size of each column's values (int32), followed by the tables and the values.
    """

    kind: PutKind
    content: bytes

    @property
    def owner(self) -> bytes:
        """Controller that owns the put."""
        return self.kind.owner

    @property
    def charge(self) -> int:
        """Number of quota bytes that the put uses."""
        return len(self.content) - _SIZE_BYTES * len(self.kind.specs)

    def parts(self) -> tuple[bytes, bytes]:
        """Return the two parts of the content: packed value sizes by column, and the bytes of tables and values."""
        start = _SIZE_BYTES * len(self.kind.specs)
        return self.content[:start], self.content[start:]

    def unpacked(self, store: BlobStore) -> StoredPut:
        """Return an unpacked version of the put, whose blob belongs to `store`."""
        kind, (sizes, content) = self.kind, self.parts()
        columns = _packed_columns(kind, sizes, is_durable=store.is_durable)
        put = StoredPut(
            columns, kind.row_count, kind.partition_id, for_existing_rows=kind.for_existing_rows, owner=kind.owner
        )
        if store.is_durable:
            blob = Blob(store, len(content), content)
        else:
            values = content[put.tables_bytes :]
            blob = Blob(store, len(values), values)
            blob.charge = self.charge
            blob.tables = bytearray(content[: put.tables_bytes]) if put.tables_bytes else _NO_TABLES
        put.take_shared(blob)
        return put


def packed_put(
    columns: Sequence[tuple[FieldSpec, int]],
    content: bytes,
    row_count: int,
    partition_id: str,
    *,
    for_existing_rows: bool,
    owner: bytes,
) -> PackedPut:
    """Create a packed put from each column's spec and value size, and from the concatenated tables and values."""
    specs = tuple(spec for spec, _ in columns)
    kind = _kind(specs, row_count, intern(partition_id), for_existing_rows, _one_of(owner))
    return PackedPut(kind, _sizes(len(columns)).pack(*(size for _, size in columns)) + content)


def unpack_sizes(sizes: bytes) -> tuple[int, ...]:
    """Decode the size in bytes of each column's values in a packed put."""
    return _sizes(len(sizes) // _SIZE_BYTES).unpack(sizes)


@cache
def _sizes(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")


@lru_cache(maxsize=256)
def _packed_columns(kind: PutKind, sizes: bytes, *, is_durable: bool) -> dict[str, StoredColumn | None]:
    """Return the columns shared by all packed puts that have the given kind and sizes.

    In a durable store, the values follow the tables in the blob.
    """
    row_set, columns = RowSet(kind.row_count), list[StoredColumn]()
    for spec, value_bytes in zip(kind.specs, unpack_sizes(sizes), strict=True):
        columns.append(StoredColumn(spec, row_set, value_bytes))
    at = sum(column.tables_size() for column in columns) if is_durable else 0
    for column in columns:
        column.values_at = at
        at += column.value_bytes
    return {column.spec.name: column for column in columns}


@lru_cache(maxsize=64)
def _one_of(owner: bytes) -> bytes:
    """Return the same bytes object for all puts of an owner."""
    return owner


@lru_cache(maxsize=256)
def _shared_columns(row_count: int, *columns: tuple[FieldSpec, int, int, int]) -> dict[str, StoredColumn | None]:
    """Create a put's columns from each column's spec, value size, table position and value position."""
    row_set, shared = RowSet(row_count), dict[str, StoredColumn | None]()
    for spec, value_bytes, table_at, values_at in columns:
        shared[spec.name] = column = StoredColumn(spec, row_set, value_bytes)
        column.table_at, column.values_at = table_at, values_at
    return shared


class TextCheck:
    """Incremental UTF-8 validation of a text column.

    Args:
        name: name of the field.
        offsets: array of shape `(n + 1,)` with the start of each row in the column's values and the end of the last
            row.
        values_at: position of the column's values in the put's blob.

    Attributes:
        next: position in the blob up to which the column has been checked.
        end: position in the blob at which the column ends.
    """

    __slots__ = ("_name", "_offsets", "_rest", "_values_at", "end", "next")

    def __init__(self, name: str, offsets: Rows, values_at: int) -> None:
        self._name = name
        self._offsets = offsets
        self._values_at = values_at
        self._rest = b""  # start of an incomplete character, which the next part completes
        self.next = values_at
        self.end = values_at + int(offsets[-1])

    def look_at(self, data: memoryview | bytes, at: int) -> None:
        """Validate the part of the column's bytes that `data` contains. `data` starts at position `at` of the blob.

        Raises:
            InvalidArgumentError: a row is not valid UTF-8. The error names the first invalid row.
        """
        end = min(at + len(data), self.end)
        if self.next >= end:
            return
        part, start = memoryview(data)[self.next - at : end - at], self.next - self._values_at
        first, last = np.searchsorted(self._offsets[:-1], (start, start + len(part))).tolist()
        rows = self._offsets[first:last]
        rows = rows[self._offsets[first + 1 : last + 1] > rows]  # skip empty rows, which have no first byte
        inside = (np.frombuffer(part, np.uint8)[rows - start] & _HIGHEST_BITS) == _CONTINUES
        piece, piece_start = (self._rest + part, start - len(self._rest)) if self._rest else (part, start)
        # A row that begins inside a character is invalid, unless the previous row, which contains the lead byte, is
        # already invalid.
        wrong_at = int(rows[int(inside.argmax())]) if inside.any() else None
        looked_at = piece if wrong_at is None else piece[: wrong_at - piece_start]
        try:
            _, used = codecs.utf_8_decode(looked_at, "strict", wrong_at is not None or end == self.end)
        except UnicodeDecodeError as error:
            raise self._wrong(piece_start + error.start) from None
        if wrong_at is not None:
            raise self._wrong(wrong_at)
        self._rest = bytes(piece[used:])
        self.next = end

    def _wrong(self, at: int) -> InvalidArgumentError:
        row = int(np.searchsorted(self._offsets, at, "right")) - 1
        return _wrong_row(
            self._name,
            row,
            f"has invalid UTF-8 at byte {at - int(self._offsets[row])}; encode text as UTF-8, or put the field with "
            "encoding 'bytes'",
        )


def _wrong_row(name: str, row: int, what: str) -> InvalidArgumentError:
    """Return the error for an object row that does not conform to its encoding."""
    return InvalidArgumentError(
        f"row {row} of field {name!r} {what}", field="columns", metadata={"row": str(row), "field_name": name}
    )


class PendingPut:
    """A put whose bytes are being received, until `finish` or `abort` is called.

    There are three ways to provide the bytes. `write` appends bytes in order. `map_fd` provides all bytes at once.
    Threads or other processes may also write to the blob directly and then call `end_filling`.

    A put passes through three states: waiting for capacity, open, and done. A put can be aborted in any state except
    done. The call that reserved a put aborts it unless the put is done. When a newer stream for the same put starts,
    the older stream is aborted, and its next call raises an error.

    Args:
        put_id: id of the put.
        on_finish: function called with the put when all bytes have been received.
        on_abort: function called once with the partially received put, or with None if no memory has been allocated.

    Attributes:
        put_id: id of the put.
        end_transfer: function called on abort to stop transfers that are still writing to the blob.
    """

    __slots__ = (
        "_filled",
        "_is_ended",
        "_on_abort",
        "_on_finish",
        "_stored",
        "_text_checks",
        "end_transfer",
        "put_id",
    )

    def __init__(
        self,
        put_id: bytes,
        on_finish: Callable[[PendingPut, StoredPut], None],
        on_abort: Callable[[PendingPut, StoredPut | None], None],
    ) -> None:
        self.put_id = put_id
        self._is_ended = False  # done or aborted
        self._on_finish = on_finish
        self._on_abort = on_abort
        self._stored: StoredPut | None = None  # set while the put is open
        self._filled = 0
        self._text_checks: Sequence[TextCheck] = ()
        self.end_transfer: Callable[[], object] = lambda: None

    def begin(self, stored: StoredPut) -> None:
        """Start receiving the values of a put whose tables are already filled.

        Raises:
            CallCancelledError: a retry of this put superseded this call while it was waiting. The blob is released.
        """
        if self._is_ended:
            stored.values.release()
            self.require_open()
        self._stored = stored
        self._filled = stored.values_at
        self._text_checks = [
            TextCheck(column.spec.name, column.offsets(stored.tables()), column.values_at)
            for column in stored.left_columns()
            if column.spec.encoding is Encoding.TEXT
        ]

    async def write(self, data: memoryview | bytes) -> None:
        """Append bytes to the values.

        Raises:
            InvalidArgumentError: more bytes were sent than declared, or a text row is not valid UTF-8.
            CallCancelledError: a retry of the put superseded this call.
        """
        stored = self.require_open()
        blob, start, end = stored.values, self._filled, self._filled + len(data)
        if blob.store.is_shared:
            raise InvalidArgumentError("frames were sent for a put whose bytes are in shared memory", field="frame")
        if end > blob.size:
            raise InvalidArgumentError(
                f"the stream has at least {end - blob.size} more bytes than its header declared", field="frame"
            )
        for check in self._text_checks:
            check.look_at(data, start)
        blob.pin()  # keep the memory allocated even if the put is aborted during the write
        try:
            await blob.store.write(blob, start, data)
        finally:
            blob.unpin()
        self.require_open()
        self._filled = end

    async def map_fd(self, fd: int) -> None:
        """Receive all bytes at once as a file descriptor for sealed memory. Take ownership of the descriptor.

        Raises:
            InvalidArgumentError: the descriptor does not refer to sealed memory of the declared size, the put does not
                use sealed memory, or a text row is not valid UTF-8.
            CallCancelledError: a retry of the put superseded this call.
            OSError: the operating system refused to map the memory.
        """
        values = None if self._stored is None else self._stored.values
        if not isinstance(values, MemfdBlob):
            close_all([fd])
            self.require_open()
            raise InvalidArgumentError(
                "sealed memory was sent for a put that does not use sealed memory; send the bytes in another way",
                field="send_fd",
            )
        values.map_fd(fd)
        await self.end_filling()

    async def end_filling(self) -> None:
        """Record that all values have been written to the blob.

        Raises:
            InvalidArgumentError: a text row is not valid UTF-8.
            UnavailableError: the written bytes cannot be read.
            CallCancelledError: a retry of the put superseded this call.
        """
        stored = self.require_open()
        if self._text_checks or not stored.values.is_local:
            await in_thread(None, self._check_filled, stored.values, stored.values_at, pinned=[stored.values])
        self._filled = self.require_open().values.size

    def _check_filled(self, blob: Blob, start: int) -> None:
        for at, piece in blob.read_back(start):
            for check in self._text_checks:
                check.look_at(piece, at)

    def require_complete(self) -> StoredPut:
        """Check that all bytes have been received, and return the put.

        Raises:
            InvalidArgumentError: bytes are missing.
            CallCancelledError: a retry of the put superseded this call.
        """
        stored = self.require_open()
        if self._filled < stored.values.size:
            raise InvalidArgumentError(
                f"the stream ended {stored.values.size - self._filled} bytes short of the size declared in its header",
                field="frame",
            )
        return stored

    def finish(self) -> None:
        """Complete the put. If the put must outlive this process, call `StorageEngine.flush` first.

        Raises:
            InvalidArgumentError: bytes are missing.
            CallCancelledError: a retry of the put superseded this call.
        """
        stored = self.require_complete()
        self._end()
        self._on_finish(self, stored)

    def abort(self) -> None:
        """Abort the put and release its resources, unless the put is done. Idempotent."""
        if not self._is_ended:
            stored = self._stored
            self._end()
            self.end_transfer()
            self._on_abort(self, stored)

    def _end(self) -> None:
        self._is_ended = True
        self._stored = None

    def require_open(self) -> StoredPut:
        """Return the put that is being received.

        Raises:
            CallCancelledError: the put has been aborted.
        """
        if self._stored is None:
            raise CallCancelledError(
                f"this call no longer receives put {self.put_id.hex()}, because a newer attempt has taken over",
                metadata={"put_id": self.put_id.hex()},
            )
        return self._stored
