"""One put: while it is received, and then its columns, which of their cells are still live, and where their bytes are.

The int64 tables that cut jagged and object columns into rows (offsets and extents of these) are memory of the index,
apart from the values, which may be anywhere; the values are one blob, column after column as they came. A blob that
outlives the process begins with the tables, and those are looked at there when the put is first read: one file, one
checksum. Values in memory shared with their client lie as `tq_service.wire.shared_memory` places them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from tq_service.errors import CallCancelledError, FieldNotFoundError, InvalidArgumentError, PutNotFoundError, nearest
from tq_service.schema import FieldSpec, Layout
from tq_service.storage.blobs.base import Blob, BlobStore, Span
from tq_service.storage.cells import Rows
from tq_service.wire.columns import ColumnShape, extent_count, fixed_row_bytes
from tq_service.wire.objects import VERSION as OBJECT_VERSION
from tq_service.wire.runs import expand_runs
from tq_service.wire.shared_memory import close_all, place_columns

Tables = bytearray | memoryview
_NO_TABLES: Final = bytearray()
_MARKED_SHARE: Final = 16  # of the rows of a put, from which on marking rows is quicker than sorting them


class RowSet:
    """Which rows of a put some of its columns still have; shared by columns that were freed alike.

    Attributes:
        base: the first row kept, where the rows kept are neighbours.
        kept: the rows kept in ascending order, None where they are neighbours.
        stored_count: number of rows in memory.
        live: `(stored_count,)`, None where all are live.
        live_count: number of live rows.
    """

    __slots__ = ("base", "kept", "live", "live_count", "stored_count")

    def __init__(self, stored_count: int, base: int = 0, kept: Rows | None = None) -> None:
        self.base = base
        self.kept = kept
        self.stored_count = stored_count
        self.live: NDArray[np.bool_] | None = None
        self.live_count = stored_count

    @classmethod
    def of_rows(cls, rows: Rows) -> RowSet:
        """Return the set of these rows, ascending, at least one."""
        base = int(rows[0])
        neighbours = int(rows[-1]) - base + 1 == len(rows)
        return cls(len(rows), base) if neighbours else cls(len(rows), 0, rows)

    def copy(self) -> RowSet:
        """Return a set that is freed on its own from now on."""
        twin = RowSet(self.stored_count, self.base, self.kept)
        twin.live = None if self.live is None else self.live.copy()
        twin.live_count = self.live_count
        return twin

    def positions(self, firsts: Rows, counts: Rows) -> Rows:
        """Return where runs of rows lie in memory, -1 for each that misses a row."""
        at = firsts - self.base if self.kept is None else np.searchsorted(self.kept, firsts)
        there = (at >= 0) & (at + counts <= self.stored_count)
        safe, last = np.where(there, at, 0), np.where(there, at + counts - 1, 0)
        if self.kept is not None:
            there &= (self.kept[safe] == firsts) & (self.kept[last] == firsts + counts - 1)
        if self.live is not None:
            dead_before = np.zeros(self.stored_count + 1, np.int64)
            np.cumsum(~self.live, out=dead_before[1:])
            there &= dead_before[last + 1] == dead_before[safe]
        return np.where(there, at, -1).astype(np.int64, copy=False)

    def drop(self, rows: Rows) -> Rows:
        """Mark rows dead, those that are not there ignored; return the positions that died."""
        at = rows - self.base if self.kept is None else np.searchsorted(self.kept, rows)
        at = at[(at >= 0) & (at < self.stored_count)] if self.kept is None else self._kept_positions(at, rows)
        if self.live is None:
            self.live = np.ones(self.stored_count, np.bool_)
        at = at[self.live[at]]
        at = _ascending(at, self.stored_count)
        self.live[at] = False
        self.live_count -= int(at.size)
        return at

    def _kept_positions(self, at: NDArray[np.intp], rows: Rows) -> NDArray[np.intp]:
        inside = at < self.stored_count
        at, rows = at[inside], rows[inside]
        return at[self.kept[at] == rows] if self.kept is not None else at

    def live_positions(self) -> Rows:
        """Return the positions of live rows, ascending."""
        if self.live is None:
            return np.arange(self.stored_count, dtype=np.int64)
        return np.flatnonzero(self.live).astype(np.int64, copy=False)

    def rows_at(self, positions: Rows) -> Rows:
        """Return the original numbers of the rows at these positions."""
        return positions + self.base if self.kept is None else self.kept[positions]


def _ascending(positions: NDArray[np.intp], bound: int) -> NDArray[np.intp]:
    """Return each position once, in order; np.unique takes 0.7 s for a million of them."""
    if positions.size < 2 or bool((positions[1:] > positions[:-1]).all()):
        return positions
    if positions.size * _MARKED_SHARE < bound:
        return np.unique(positions)
    marks = np.zeros(bound, np.bool_)
    marks[positions] = True
    return np.flatnonzero(marks)


class StoredColumn:
    """Where a column lies: from `table_at` on in the tables of its put, from `values_at` on in the values' blob."""

    __slots__ = ("row_set", "spec", "table_at", "value_bytes", "values_at")

    def __init__(self, spec: FieldSpec, row_set: RowSet, value_bytes: int) -> None:
        self.spec = spec
        self.row_set = row_set
        self.value_bytes = value_bytes
        self.table_at = self.values_at = 0  # its put says

    def offsets(self, tables: Tables) -> Rows:
        """Return where each row starts in the values, and their end: `(stored + 1,)`. Not for dense columns."""
        return np.frombuffer(tables, np.int64, self.row_set.stored_count + 1, self.table_at)

    def extents(self, tables: Tables) -> Rows:
        """Return the extents of the stored rows, `(stored, extents of a row)`. Not for dense columns."""
        stored, width = self.row_set.stored_count, extent_count(self.spec)
        start = self.table_at + 8 * (stored + 1)
        return np.frombuffer(tables, np.int64, stored * width, start).reshape(stored, width)

    def table(self, tables: Tables) -> Rows:
        """Return the offsets and after them the extents, row by row, in one array. Not for dense columns."""
        stored = self.row_set.stored_count
        return np.frombuffer(tables, np.int64, stored + 1 + stored * extent_count(self.spec), self.table_at)

    def bytes_of(self, put: StoredPut, positions: Rows) -> int:
        """Return the bytes that rows take, their part of the tables included."""
        fixed = fixed_row_bytes(self.spec)
        if fixed is not None:
            return fixed * len(positions)
        offsets = self.offsets(put.tables())
        values = int((offsets[positions + 1] - offsets[positions]).sum())
        return values + len(positions) * table_bytes(self.spec)

    def tables_size(self) -> int:
        """Return the bytes of its tables."""
        return 0 if fixed_row_bytes(self.spec) is not None else self.row_set.stored_count * table_bytes(self.spec) + 8


def _no_object(name: str, row: int, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"row {row} of field {name!r} {what}; an object is byte 0x{OBJECT_VERSION:02x}, the version of its encoding, "
        "and msgpack after it",
        field="columns",
        metadata={"row": str(row), "field_name": name},
    )


def table_bytes(spec: FieldSpec) -> int:
    """Return the bytes of tables that one row of a field takes."""
    return 0 if fixed_row_bytes(spec) is not None else 8 * (extent_count(spec) + 1)


def check_put(put_id: bytes, headers: Sequence[ColumnShape], row_count: int) -> None:
    """Check what a put says of itself.

    Raises:
        InvalidArgumentError: its id is no id, it has no columns, or they do not fit its number of rows.
    """
    if not 1 <= len(put_id) <= 64:
        raise InvalidArgumentError(f"put_id has {len(put_id)} bytes; expected 16 random bytes", field="put_id")
    names = [header.spec.name for header in headers]
    if not names or len(set(names)) != len(names):
        raise InvalidArgumentError(f"expected at least one column, each name once; got {names}", field="columns")
    for header in headers:
        header.validate()
        if header.row_count != row_count:
            raise InvalidArgumentError(
                f"field {header.spec.name!r} has {header.row_count} rows, the put says {row_count}", field="row_count"
            )


def values_size(columns: Sequence[ColumnShape], store: BlobStore) -> int:
    """Return the bytes of the values of a put, with what lies between them in shared memory."""
    return place_columns(columns)[1] if store.adopts else sum(column.value_bytes for column in columns)


def tables_size(columns: Sequence[ColumnShape]) -> int:
    """Return the bytes of the tables that cut columns into rows."""
    return sum(
        column.row_count * table_bytes(column.spec) + 8 for column in columns if fixed_row_bytes(column.spec) is None
    )


class StoredPut:
    """The cells of one put: the tables of its columns one after the other, and so their values.

    Attributes:
        values: the blob of its values.
        columns: its columns by name; None for one that was freed whole.
        row_count: number of rows it was put with.
        partition_id: the partition it is for.
        live_bytes: bytes of live cells, with their part of the tables.
        for_existing_rows: whether it was reserved as columns for existing rows; no new ones may be made of it.
        owner: the controller that owns it.
    """

    __slots__ = (
        "_tables",
        "columns",
        "for_existing_rows",
        "live_bytes",
        "owner",
        "partition_id",
        "row_count",
        "values",
    )

    def __init__(
        self,
        values: Blob,
        columns: dict[str, StoredColumn | None],
        row_count: int,
        partition_id: str,
        *,
        for_existing_rows: bool,
        owner: bytes,
    ) -> None:
        placed = [column for column in columns.values() if column is not None]
        size = 0
        for column in placed:
            column.table_at = size
            size += column.tables_size()
        values_at = size if values.store.has_tables else 0
        for column in placed:
            column.values_at = values_at
            values_at += column.value_bytes
        self.values = values
        # None: the values' blob begins with them
        self._tables = None if values.store.has_tables else bytearray(size) if size else _NO_TABLES
        self.columns = columns
        self.row_count = row_count
        self.partition_id = partition_id
        self.live_bytes = values.charge
        self.for_existing_rows = for_existing_rows
        self.owner = owner

    @classmethod
    def of(
        cls,
        values: Blob,
        columns: Sequence[ColumnShape],
        row_count: int,
        partition_id: str,
        *,
        for_existing_rows: bool,
        owner: bytes,
    ) -> StoredPut:
        """Lay out a put: its tables are written, its values are to come.

        Args:
            values: the blob of its values, of `values_size`; where it begins with the tables, `tables_size` larger.
            columns: what it has.
            row_count: number of rows.
            partition_id: the partition it is for.
            for_existing_rows: whether it was reserved as columns for existing rows.
            owner: the controller that owns it.
        """
        row_set = RowSet(row_count)
        placed = [StoredColumn(column.spec, row_set, column.value_bytes) for column in columns]
        stored: dict[str, StoredColumn | None] = {column.spec.name: column for column in placed}
        put = cls(values, stored, row_count, partition_id, for_existing_rows=for_existing_rows, owner=owner)
        for column, shape in zip(placed, columns, strict=True):
            if shape.extents is not None:
                tables = put.tables()
                column.offsets(tables)[:] = shape.row_offsets()
                column.extents(tables)[:] = shape.extents
        if values.store.adopts:
            for column, start in zip(placed, place_columns(columns)[0], strict=True):
                column.values_at = start
        return put

    def tables(self) -> Tables:
        """Return what cuts its columns into rows.

        Raises:
            OSError: it is in a file that cannot be mapped.
        """
        return self.values.view() if self._tables is None else self._tables

    @property
    def values_at(self) -> int:
        """Where the values start in the blob of a new put."""
        return min(column.values_at for column in self.columns.values() if column is not None)

    def column(self, name: str, put_id: bytes) -> StoredColumn:
        """Return a column.

        Raises:
            FieldNotFoundError: the put never had it.
            PutNotFoundError: it was freed.
        """
        column = self.columns.get(name)
        if column is not None:
            return column
        if name in self.columns:
            raise PutNotFoundError(
                f"field {name!r} of put {put_id.hex()} was cleared or overwritten; get the rows again"
            )
        raise FieldNotFoundError(f"put {put_id.hex()} has no field {name!r}; {nearest(name, self.columns)}")

    def free(self, field_names: Sequence[str], firsts: Rows | None, counts: Rows | None) -> None:
        """Free cells; those that are not there are ignored.

        Args:
            field_names: the fields, empty for all.
            firsts: first rows of runs, None for all rows.
            counts: numbers of rows of the runs.
        """
        names = {name for name in (field_names or self.columns) if self.columns.get(name) is not None}
        if firsts is None or counts is None:
            self._forget(names)
            return
        starts = np.clip(firsts, 0, self.row_count)
        ends = np.clip(firsts + np.clip(counts, 0, self.row_count), starts, self.row_count)
        rows = expand_runs(starts, ends - starts)
        for row_set in self._split(names):
            members = self._members(row_set)
            died = row_set.drop(rows)
            for column in members.values():
                self.live_bytes -= column.bytes_of(self, died)
            if not row_set.live_count:
                self._forget(set(members))

    def check_object_sizes(self) -> None:
        """Check that no row of an object column is empty.

        Raises:
            InvalidArgumentError: some row is.
        """
        for name, offsets, _ in self._objects():
            is_empty = offsets[1:] == offsets[:-1]
            if is_empty.any():
                raise _no_object(name, int(is_empty.argmax()), "has no bytes")

    def check_objects(self, data: memoryview | bytes, at: int) -> None:
        """Check that rows of object columns begin with the version of the encoding.

        What is behind that byte is not read: decoding it costs a step in Python for each row.

        Args:
            data: a part of the blob of the values.
            at: where it starts in it.

        Raises:
            InvalidArgumentError: a row that begins in this part begins with another byte.
        """
        for name, offsets, values_at in self._objects():
            first, end = np.searchsorted(offsets[:-1], (at - values_at, at - values_at + len(data))).tolist()
            versions = np.frombuffer(data, np.uint8)[offsets[first:end] + (values_at - at)]
            is_wrong = versions != OBJECT_VERSION
            if is_wrong.any():
                row = int(is_wrong.argmax())
                raise _no_object(name, first + row, f"begins with byte 0x{int(versions[row]):02x}")

    def _objects(self) -> Iterator[tuple[str, Rows, int]]:
        """Yield the name of each object column, where its rows start, and where its values do."""
        for name, column in self.columns.items():
            if column is not None and column.spec.layout is Layout.OBJECT:
                yield name, column.offsets(self.tables()), column.values_at

    def is_whole(self) -> bool:
        """Whether no cell was freed."""
        return all(column and column.row_set.live_count == self.row_count for column in self.columns.values())

    def is_empty(self) -> bool:
        """Whether no cell is left."""
        return not any(self.columns.values())

    def compacted_bytes(self) -> int:
        """Return at most how many bytes it takes after compaction."""
        row_sets = self.row_sets()
        tables = sum(8 for column in self.columns.values() if column and fixed_row_bytes(column.spec) is None)
        return self.live_bytes + tables + sum(8 * row_set.live_count for row_set in row_sets)

    def row_sets(self) -> list[RowSet]:
        """Return the sets of rows that its columns have."""
        return list({id(column.row_set): column.row_set for column in self.columns.values() if column}.values())

    def value_spans(self) -> list[Span]:
        """Return where the values of its columns are in their blob: one after the other they are those of a copy."""
        return [(column.values_at, column.value_bytes) for column in self.columns.values() if column is not None]

    def members(self, row_set: RowSet) -> list[str]:
        """Return the columns that have these rows."""
        return list(self._members(row_set))

    def _members(self, row_set: RowSet) -> dict[str, StoredColumn]:
        return {name: column for name, column in self.columns.items() if column and column.row_set is row_set}

    def _split(self, names: set[str]) -> list[RowSet]:
        """Return the row sets of some columns, parted from those of other columns."""
        touched = []
        for row_set in self.row_sets():
            members = self._members(row_set)
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

    def _forget(self, names: set[str]) -> None:
        for name in names:
            column = self.columns[name]
            if column is not None:
                self.live_bytes -= column.bytes_of(self, column.row_set.live_positions())
                self.columns[name] = None


class _Stage(Enum):
    WAITING = auto()
    OPEN = auto()
    DONE = auto()
    ABORTED = auto()


class PendingPut:
    """Takes the bytes of a put: `write` as they come, or `adopt` of all at once; then `finish`, or `abort`.

    Waiting for capacity → open → done, or aborted from any but done. Whoever reserved it aborts it unless it finished;
    an older stream of the same put is aborted by the newer one and learns it from its next call.

    Args:
        put_id: the put.
        on_finish: called with the put when all bytes are there.
        on_abort: called once with what is stored so far, None where it has no memory yet.

    Attributes:
        already_complete: whether the put was there before.
        checksum: of all its bytes, once they are in a segment.
    """

    __slots__ = (
        "_digest",
        "_filled",
        "_is_checked",
        "_on_abort",
        "_on_finish",
        "_size",
        "_stage",
        "_stored",
        "_view",
        "already_complete",
        "checksum",
        "put_id",
    )

    def __init__(
        self,
        put_id: bytes,
        *,
        on_finish: Callable[[PendingPut, StoredPut], None],
        on_abort: Callable[[PendingPut, StoredPut | None], None],
    ) -> None:
        self.put_id = put_id
        self.already_complete = False
        self._on_finish = on_finish
        self._on_abort = on_abort
        self._stage = _Stage.WAITING
        self._stored: StoredPut | None = None
        self._view = memoryview(b"")
        self._filled = self._size = 0
        self._is_checked = False
        self._digest: xxh3_64 | None = None
        self.checksum: int | None = None

    @classmethod
    def completed(cls, put_id: bytes) -> PendingPut:
        """Return a put that is there already: it takes no bytes, and finishing or aborting it changes nothing."""
        pending = cls(put_id, on_finish=lambda *_: None, on_abort=lambda *_: None)
        pending.already_complete = True
        pending._stage = _Stage.DONE
        return pending

    @property
    def is_aborted(self) -> bool:
        """Whether it was aborted, by its owner or by a retry."""
        return self._stage is _Stage.ABORTED

    def begin(self, stored: StoredPut) -> None:
        """Give it the put that it fills: its tables are written, its values are to come."""
        self._stored = stored
        self._size = stored.values.size
        self._filled = stored.values_at
        self._stage = _Stage.OPEN
        if stored.values.store.local_view:
            self._view = stored.values.view()
        if stored.values.number:
            self._digest = xxh3_64(self._view[: self._filled])

    async def write(self, data: memoryview | bytes) -> None:
        """Append bytes of the values; ignored where the put is complete already.

        Raises:
            InvalidArgumentError: there are more bytes than were declared.
            CallCancelledError: a retry took over.
        """
        if self.already_complete:
            return
        stored = self._open()
        if self.is_shared:
            raise InvalidArgumentError("frames came for a put whose bytes are in shared memory", field="frame")
        start, end = self._filled, self._filled + len(data)
        if end > self._size:
            raise InvalidArgumentError(
                f"the stream has at least {end - self._size} bytes more than its header declared", field="frame"
            )
        if stored.values.store.local_view:
            self._view[start:end] = data
        else:
            await self._write_elsewhere(stored, start, data)
        if self._digest is not None:
            self._digest.update(data)
        self._filled = end

    async def _write_elsewhere(self, stored: StoredPut, start: int, data: memoryview | bytes) -> None:
        """Write bytes that cannot be looked at again; the blob stays if the put is aborted meanwhile."""
        stored.check_objects(data, start)
        stored.values.pin()
        try:
            await stored.values.store.write(stored.values, start, data)
        finally:
            stored.values.unpin()
        self.check_open()

    @property
    def is_shared(self) -> bool:
        """Whether its bytes are to come as shared memory."""
        return self._stored is not None and self._stored.values.store.adopts

    def adopt(self, fds: Sequence[int]) -> None:
        """Take all bytes at once, as file descriptors of shared memory, which are closed when they are not needed.

        Raises:
            InvalidArgumentError: they are not sealed memory of the size declared, or the put is not to be shared.
            CallCancelledError: a retry took over.
            OSError: the system refuses to map them.
        """
        if self._stored is None or not self.is_shared:
            close_all(fds)
            self.check_open()
            raise InvalidArgumentError(
                "shared memory came for a put whose bytes are to come in frames", field="send_fds"
            )
        self._stored.values.adopt(fds)
        self._filled = self._size

    def whole(self) -> StoredPut | None:
        """Return what is stored, None where the put was there already.

        Raises:
            InvalidArgumentError: bytes are missing, or rows of objects are none.
            CallCancelledError: a retry took over.
        """
        if self._stage is _Stage.DONE:
            return None
        stored = self._open()
        if self._filled < self._size:
            raise InvalidArgumentError(
                f"the stream ended {self._size - self._filled} bytes before what its header declared", field="frame"
            )
        if not self._is_checked:
            stored.check_object_sizes()
            stored.check_objects(self._view, 0)
            self._is_checked = True
        if self._digest is not None:
            self.checksum = self._digest.intdigest()
        return stored

    def finish(self) -> None:
        """Make the put complete; where it is to outlive this process, `StorageEngine.flush` comes before.

        Raises:
            InvalidArgumentError: bytes are missing.
            CallCancelledError: a retry took over.
        """
        stored = self.whole()
        if stored is None:
            return
        self._stored, self._view = None, memoryview(b"")
        self._stage = _Stage.DONE
        self._on_finish(self, stored)

    def abort(self) -> None:
        """Give everything back unless it is done; a second call does nothing."""
        if self._stage in {_Stage.DONE, _Stage.ABORTED}:
            return
        stored, self._stored, self._view = self._stored, None, memoryview(b"")
        self._stage = _Stage.ABORTED
        self._on_abort(self, stored)

    def check_open(self) -> None:
        """Raise CallCancelledError where it was aborted."""
        self._open()

    def _open(self) -> StoredPut:
        if self._stage is not _Stage.OPEN or self._stored is None:
            raise CallCancelledError(
                f"put {self.put_id.hex()} is no longer received here: another attempt at the same put took over"
            )
        return self._stored
