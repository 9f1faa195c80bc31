"""One put: while it is received, and then its columns, which of their cells are still live, and where their bytes are.

The int64 tables that cut jagged and object columns into rows (offsets and extents of these) are memory of the index,
apart from the values, which may be anywhere; the values are one blob, column after column as they came. A blob that
outlives the process begins with a copy of the tables, from which a recovered put has them: one file, one checksum.
Values in memory shared with their client lie as `tq_service.wire.shared_memory` places them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from tq_service.errors import (
    CallCancelledError,
    FieldNotFoundError,
    InvalidArgumentError,
    PutNotFoundError,
    UnavailableError,
    nearest,
)
from tq_service.schema import Encoding, FieldSpec
from tq_service.storage.blobs.base import Blob, BlobStore, Span
from tq_service.storage.cells import PutCells, Rows
from tq_service.storage.index.text_check import PIECE_BYTES, TextCheck, wrong_row
from tq_service.wire.columns import ColumnShape, extent_count, fixed_row_bytes
from tq_service.wire.shared_memory import close_all, place_columns

Tables = bytearray | memoryview
_NO_TABLES: Final = bytearray()
_MARKED_SHARE: Final = 16  # of the rows of a put, from which on marking rows is quicker than sorting them


class RowSet:
    """Which rows of a put some of its columns still have; shared by columns that were freed alike.

    Attributes:
        rows: the rows in memory in ascending order, None where these are all of the put.
        stored_count: number of rows in memory.
        live: `(stored_count,)`, None where all are live.
        live_count: number of live rows.
    """

    __slots__ = ("live", "live_count", "rows", "stored_count")

    def __init__(self, stored_count: int, rows: Rows | None = None) -> None:
        self.rows = rows
        self.stored_count = stored_count
        self.live: NDArray[np.bool_] | None = None
        self.live_count = stored_count

    def copy(self) -> RowSet:
        """Return a set that is freed on its own from now on."""
        twin = RowSet(self.stored_count, self.rows)
        twin.live = None if self.live is None else self.live.copy()
        twin.live_count = self.live_count
        return twin

    def compacted(self) -> RowSet:
        """Return the set of the live rows, at least one."""
        if self.live is None:
            return RowSet(self.stored_count, self.rows)
        live = self.live_positions()
        return RowSet(self.live_count, live if self.rows is None else self.rows[live])

    def positions(self, firsts: Rows, counts: Rows) -> Rows:
        """Return where runs of rows that the put had lie in memory, -1 for each that misses a row."""
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
        """Mark rows that the put had dead, those that are not there ignored; return the positions that died."""
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
        """Return the positions of live rows, ascending."""
        if self.live is None:
            return np.arange(self.stored_count, dtype=np.int64)
        return np.flatnonzero(self.live).astype(np.int64, copy=False)


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

    def check_object_sizes(self, tables: Tables) -> None:
        """Check that no row of msgpack is empty.

        Raises:
            InvalidArgumentError: some row is.
        """
        if self.spec.encoding is Encoding.MSGPACK:
            offsets = self.offsets(tables)
            is_empty = offsets[1:] == offsets[:-1]
            if is_empty.any():
                raise wrong_row(self.spec.name, int(is_empty.argmax()), "has no bytes; expected one msgpack value")

    def tables_size(self) -> int:
        """Return the bytes of its tables."""
        return 0 if fixed_row_bytes(self.spec) is not None else self.row_set.stored_count * table_bytes(self.spec) + 8


def table_bytes(spec: FieldSpec) -> int:
    """Return the bytes of tables that one row of a field takes."""
    return 0 if fixed_row_bytes(spec) is not None else 8 * (extent_count(spec) + 1)


class StoredPut:
    """The cells of one put: the tables of its columns one after the other, and so their values.

    Attributes:
        values: the blob of its values, once it is placed.
        tables_bytes: size of its tables.
        columns: its columns by name; None for one that was freed whole.
        row_count: number of rows it was put with.
        partition_id: the partition it is for.
        live_bytes: bytes of live cells, with their part of the tables.
        for_existing_rows: whether it was reserved as columns for existing rows; no new ones may be made of it.
        owner: the controller that owns it.
    """

    __slots__ = (
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
        self.row_count = row_count
        self.partition_id = partition_id
        self.for_existing_rows = for_existing_rows
        self.owner = owner

    @classmethod
    def of(
        cls, columns: Sequence[ColumnShape], partition_id: str, *, for_existing_rows: bool, owner: bytes
    ) -> StoredPut:
        """Return a put of these columns, at least one."""
        row_set = RowSet(columns[0].row_count)
        stored: dict[str, StoredColumn | None] = {
            column.spec.name: StoredColumn(column.spec, row_set, column.value_bytes) for column in columns
        }
        return cls(stored, row_set.stored_count, partition_id, for_existing_rows=for_existing_rows, owner=owner)

    def charge_in(self, store: BlobStore) -> int:
        """Return what its tables and values take, with what lies between columns in shared memory."""
        return self.tables_bytes + self._place_values(store)[1]

    def blob_bytes(self, store: BlobStore) -> int:
        """Return the size of the blob of its values, and of its tables where it begins with them."""
        return self.charge_in(store) - (0 if store.has_tables else self.tables_bytes)

    def place(self, values: Blob, shapes: Sequence[ColumnShape] = (), *, is_recovered: bool = False) -> None:
        """Lay it out in a blob of `blob_bytes`.

        Args:
            values: the blob; its `charge` is that of the put.
            shapes: of a new put, whose tables are made from them; none where these are there, or follow.
            is_recovered: whether the blob has its tables already.

        Raises:
            InvalidArgumentError: a row of msgpack is empty.
        """
        self.values = values
        self.live_bytes = values.charge
        if not values.store.has_tables or not (is_recovered or values.is_local):
            values.tables = bytearray(self.tables_bytes) if self.tables_bytes else _NO_TABLES
        placed = [column for column in self.columns.values() if column is not None]
        for column, start in zip(placed, self._place_values(values.store)[0], strict=True):
            column.values_at = self.values_at + start
        for column, shape in zip(placed, shapes, strict=False):
            if shape.extents is not None:
                tables = self.tables()
                column.offsets(tables)[:] = shape.row_offsets()
                column.extents(tables)[:] = shape.extents
                column.check_object_sizes(tables)

    def _place_values(self, store: BlobStore) -> tuple[list[int], int]:
        """Return where the values of each column start among the values, and where they end."""
        sizes = [column.value_bytes for column in self.columns.values() if column is not None]
        if store.maps_fds:
            return place_columns(sizes)
        *starts, end = accumulate(sizes, initial=0)
        return starts, end

    @property
    def values_at(self) -> int:
        """Where the values start in their blob."""
        return self.tables_bytes if self.values.store.has_tables else 0

    def tables(self) -> Tables:
        """Return what cuts its columns into rows.

        Raises:
            UnavailableError: it is in a file that has not been read since the start.
        """
        values = self.values
        if values.tables is not None:
            return values.tables
        if values.is_local:
            return values.view()
        raise UnavailableError(f"segment {values.number} has not been read since the start; try again")

    def table_views(self) -> list[memoryview]:
        """Return the tables of the columns that are left: one after the other they are those of a copy."""
        if not self.tables_bytes:
            return []
        tables = memoryview(self.tables())
        return [
            tables[column.table_at : column.table_at + column.tables_size()]
            for column in self.columns.values()
            if column is not None and fixed_row_bytes(column.spec) is None
        ]

    def shapes(self) -> list[ColumnShape]:
        """Return its columns as they were put, as far as nothing of them was freed."""
        return [
            ColumnShape(
                spec=column.spec,
                row_count=column.row_set.stored_count,
                extents=None if fixed_row_bytes(column.spec) is not None else column.extents(self.tables()),
                value_bytes=column.value_bytes,
            )
            for column in self.columns.values()
            if column is not None
        ]

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
                f"field {name!r} of put {put_id.hex()} was cleared or overwritten; get the rows again",
                metadata={"put_id": put_id.hex(), "field_name": name},
            )
        raise FieldNotFoundError(
            f"put {put_id.hex()} has no field {name!r}; {nearest(name, self.columns)}",
            metadata={"put_id": put_id.hex(), "field_name": name},
        )

    def free(self, cells: PutCells) -> None:
        """Free cells of it; those that are not there are ignored."""
        names = {name for name in (cells.field_names or self.columns) if self.columns.get(name) is not None}
        if cells.rows is None:
            self._free_columns(names)
            return
        rows = cells.rows_of(self.row_count)
        for row_set in self._split(names):
            members = self.members(row_set)
            died = row_set.free(rows)
            for column in members.values():
                self.live_bytes -= column.bytes_of(self, died)
            if not row_set.live_count:
                self._free_columns(set(members))

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

    def snapshot(self) -> StoredPut:
        """Return it as it is now, for a thread to look at while cells of it are freed; its bytes never change."""
        twin = copy(self)
        row_sets = {id(row_set): row_set.copy() for row_set in self.row_sets()}
        twin.columns = {}
        for name, column in self.columns.items():
            twin.columns[name] = own = None if column is None else copy(column)
            if own is not None:
                own.row_set = row_sets[id(own.row_set)]
        return twin

    def row_sets(self) -> list[RowSet]:
        """Return the sets of rows that its columns have."""
        return list({id(column.row_set): column.row_set for column in self.columns.values() if column}.values())

    def value_spans(self) -> list[Span]:
        """Return where the values of its columns are in their blob: one after the other they are those of a copy."""
        return [(column.values_at, column.value_bytes) for column in self.columns.values() if column is not None]

    def members(self, row_set: RowSet) -> dict[str, StoredColumn]:
        """Return the columns that have these rows."""
        return {name: column for name, column in self.columns.items() if column and column.row_set is row_set}

    def _split(self, names: set[str]) -> list[RowSet]:
        """Return the row sets of some columns, parted from those of other columns."""
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


class PendingPut:
    """Takes the bytes of a put: `write` as they come, or `map_fds` of all at once; then `finish`, or `abort`.

    Waiting for capacity → open → done, or aborted from any but done. The call that reserved it aborts it unless it
    finished; an older stream of the same put is aborted by the newer one and learns it from its next call.

    Args:
        put_id: the put.
        on_finish: called with the put when all bytes are there.
        on_abort: called once with what is stored so far, None where it has no memory yet.

    Attributes:
        already_complete: whether the put was there before.
        is_aborted: whether it was aborted, by its owner or by a retry.
        checksum: of all its bytes, once they are in a segment.
    """

    __slots__ = (
        "_digest",
        "_filled",
        "_is_done",
        "_on_abort",
        "_on_finish",
        "_stored",
        "_text_checks",
        "_view",
        "already_complete",
        "checksum",
        "is_aborted",
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
        self.already_complete = self.is_aborted = self._is_done = False
        self._on_finish = on_finish
        self._on_abort = on_abort
        self._stored: StoredPut | None = None  # as long as it is open
        self._view = memoryview(b"")
        self._filled = 0
        self._digest: xxh3_64 | None = None
        self._text_checks: Sequence[TextCheck] = ()
        self.checksum: int | None = None

    @classmethod
    def completed(cls, put_id: bytes) -> PendingPut:
        """Return a put that is there already: it takes no bytes, and finishing or aborting it changes nothing."""
        pending = cls(put_id, on_finish=lambda *_: None, on_abort=lambda *_: None)
        pending.already_complete = pending._is_done = True
        return pending

    def begin(self, stored: StoredPut) -> None:
        """Give it the put that it fills: its tables are written, its values are to come."""
        self._stored = stored
        self._filled = stored.values_at
        self._text_checks = [
            TextCheck(column.spec.name, column.offsets(stored.tables()), column.values_at)
            for column in stored.columns.values()
            if column is not None and column.spec.encoding is Encoding.TEXT
        ]
        if stored.values.is_local:
            self._view = stored.values.view()
        if stored.values.number:
            self._digest = xxh3_64(stored.tables())

    async def write(self, data: memoryview | bytes) -> None:
        """Append bytes of the values; ignored where the put is complete already.

        Raises:
            InvalidArgumentError: there are more bytes than were declared, or a row of text is not UTF-8.
            CallCancelledError: a retry took over.
        """
        if self.already_complete:
            return
        stored = self.require_open()
        blob, start, end = stored.values, self._filled, self._filled + len(data)
        if blob.store.maps_fds:
            raise InvalidArgumentError("frames came for a put whose bytes are in shared memory", field="frame")
        if end > blob.size:
            raise InvalidArgumentError(
                f"the stream has at least {end - blob.size} bytes more than its header declared", field="frame"
            )
        for check in self._text_checks:
            check.look_at(data, start)
        if blob.is_local:
            self._view[start:end] = data
        else:
            blob.pin()  # it stays if the put is aborted meanwhile
            try:
                await blob.store.write(blob, start, data)
            finally:
                blob.unpin()
            self.require_open()
        if self._digest is not None:
            self._digest.update(data)
        self._filled = end

    async def map_fds(self, fds: Sequence[int]) -> None:
        """Take all bytes at once, as file descriptors of shared memory, which are closed when they are not needed.

        Raises:
            InvalidArgumentError: they are not sealed memory of the size declared, the put is not to be shared, or a row
                of text is not UTF-8.
            CallCancelledError: a retry took over.
            OSError: the system refuses to map them.
        """
        if self._stored is None or not self._stored.values.store.maps_fds:
            close_all(fds)
            self.require_open()
            raise InvalidArgumentError(
                "shared memory came for a put whose bytes are to come in frames", field="send_fds"
            )
        self._stored.values.map_fds(fds)
        for check in self._text_checks:
            while check.next < check.end:
                check.look_at(self._view[check.next : check.next + PIECE_BYTES], check.next)
                await asyncio.sleep(0)
                self.require_open()
        self._filled = self.require_open().values.size

    def require_complete(self) -> StoredPut | None:
        """Return what is stored, None where the put was there already.

        Raises:
            InvalidArgumentError: bytes are missing.
            CallCancelledError: a retry took over.
        """
        if self._is_done:
            return None
        stored = self.require_open()
        if self._filled < stored.values.size:
            raise InvalidArgumentError(
                f"the stream ended {stored.values.size - self._filled} bytes before what its header declared",
                field="frame",
            )
        if self._digest is not None:
            self.checksum = self._digest.intdigest()
        return stored

    def finish(self) -> None:
        """Make the put complete; where it is to outlive this process, `StorageEngine.flush` comes before.

        Raises:
            InvalidArgumentError: bytes are missing.
            CallCancelledError: a retry took over.
        """
        stored = self.require_complete()
        if stored is None:
            return
        self._stored, self._view = None, memoryview(b"")
        self._is_done = True
        self._on_finish(self, stored)

    def abort(self) -> None:
        """Give everything back unless it is done; a second call does nothing."""
        if self._is_done or self.is_aborted:
            return
        stored, self._stored, self._view = self._stored, None, memoryview(b"")
        self.is_aborted = True
        self._on_abort(self, stored)

    def require_open(self) -> StoredPut:
        """Return the put that it fills.

        Raises:
            CallCancelledError: it was aborted.
        """
        if self._stored is None:
            raise CallCancelledError(
                f"put {self.put_id.hex()} is no longer received here: another attempt at the same put took over",
                metadata={"put_id": self.put_id.hex()},
            )
        return self._stored
