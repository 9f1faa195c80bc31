"""What a storage engine writes down of its puts, so that they are there again after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from tq_service.schema import FieldSpec
from tq_service.storage.blobs.base import Blob
from tq_service.storage.cells import Rows
from tq_service.storage.index.put import RowSet, StoredColumn, StoredPut

_spec: Final = lru_cache(maxsize=1024)(FieldSpec)  # every put brings the same few


class ColumnRecord(NamedTuple):
    """A column of a put: its spec, and the bytes of all its values."""

    name: str
    dtype: str
    layout: str
    row_shape: tuple[int, ...]
    value_bytes: int
    encoding: str


class LeftRows(NamedTuple):
    """The rows in the put that are left of some of its columns, ascending; none: these columns are gone."""

    names: tuple[str, ...]
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PutStored:
    """A put is complete, or this is what is left of it from now on.

    Attributes:
        put_id: its name.
        partition_id: the partition it is for.
        row_count: number of rows that it was put with.
        columns: those that are left.
        size_bytes: size of its tables and values.
        segment: number of the file with these; 0: they follow the record, and nothing else does.
        checksum: XXH3 of what is in the file.
        left_rows: of the columns that do not have all rows.
        for_existing_rows: whether no new samples may be made of it.
        owner: the controller that owns it.
    """

    put_id: bytes
    partition_id: str
    row_count: int
    columns: tuple[ColumnRecord, ...]
    size_bytes: int
    segment: int = 0
    checksum: int = 0
    left_rows: tuple[LeftRows, ...] = ()
    for_existing_rows: bool = False
    owner: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutDropped:
    """A put is gone."""

    put_id: bytes


PutRecord: TypeAlias = PutStored | PutDropped
EncodedPut: TypeAlias = tuple[bytes, bytes | bytearray]
"""The bytes of a record, and of a small put the values that follow them; neither ever changes."""


class PutLog(Protocol):
    """Where an engine writes down what becomes of its puts."""

    @property
    def fatal(self) -> Callable[[str, BaseException], None]:
        """Called with a reason and its cause where what is written down may not be what is in memory."""
        ...

    def encode_put(self, record: PutRecord) -> bytes:
        """Return the bytes of a record."""
        ...

    def decode_put(self, data: bytes) -> tuple[PutRecord, EncodedPut]:
        """Return a record that was appended, and its bytes apart from the values that follow them."""
        ...

    def append_put(self, record: bytes, values: bytes | bytearray = b"") -> None:
        """Take a record into memory; it becomes durable in order. The values must not change from now on."""
        ...

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call something once all that was appended before cannot be lost any more."""
        ...


def left_puts(
    records: Iterable[bytes], decode: Callable[[bytes], tuple[PutRecord, EncodedPut]]
) -> dict[bytes, tuple[PutStored, EncodedPut]]:
    """Return the puts that records leave, in the order in which they were last written down."""
    left: dict[bytes, tuple[PutStored, EncodedPut]] = {}
    for data in records:
        record, encoded = decode(data)
        left.pop(record.put_id, None)
        if isinstance(record, PutStored):
            left[record.put_id] = record, encoded
    return left


def describe_put(put_id: bytes, put: StoredPut, *, checksum: int = 0) -> PutStored:
    """Return the record of a put as it is now.

    Args:
        put_id: its name.
        put: the put.
        checksum: of what is in the file of its bytes, where they are in one.
    """
    blob = put.values.copy or put.values
    columns = [(column.spec, column.value_bytes) for column in put.columns.values() if column is not None]
    return PutStored(
        put_id=put_id,
        partition_id=put.partition_id,
        row_count=put.row_count,
        columns=tuple(
            ColumnRecord(
                spec.name, spec.dtype, spec.layout or "", spec.row_shape or (), value_bytes, spec.encoding or ""
            )
            for spec, value_bytes in columns
        ),
        size_bytes=blob.size,
        segment=blob.number,
        checksum=checksum,
        left_rows=_left_rows(put),
        for_existing_rows=put.for_existing_rows,
        owner=put.owner,
    )


def restore_put(record: PutStored, blob: Blob) -> StoredPut:
    """Return the put of a record; the blob has its tables and after them its values."""
    row_sets: dict[str, RowSet] = {}
    columns: dict[str, StoredColumn | None] = {}
    for names, left in record.left_rows:
        if left.size:
            row_sets |= dict.fromkeys(names, RowSet(left.size, left))
        else:
            columns |= dict.fromkeys(names)
    whole = RowSet(record.row_count)
    for name, dtype, layout, row_shape, value_bytes, encoding in record.columns:
        spec = _spec(name, dtype, layout, row_shape, encoding or None)
        columns[name] = StoredColumn(spec, row_sets.get(name, whole), value_bytes)
    put = StoredPut(
        columns,
        record.row_count,
        record.partition_id,
        for_existing_rows=record.for_existing_rows,
        owner=record.owner,
    )
    put.place(blob)
    return put


def _left_rows(put: StoredPut) -> tuple[LeftRows, ...]:
    gone = tuple(name for name, column in put.columns.items() if column is None)
    left = [LeftRows(gone, np.zeros(0, np.int64))] if gone else []
    left += [
        LeftRows(tuple(put.members(row_set)), row_set.rows) for row_set in put.row_sets() if row_set.rows is not None
    ]
    return tuple(left)
