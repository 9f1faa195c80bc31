"""Puts as they are written down, so that they are there again after a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from tq_service.storage.region import Region
from tq_service.storage.stored_put import RowSet, StoredColumn, StoredPut, table_bytes
from tq_service.v1 import journal_pb2 as pb
from tq_service.v1 import metadata_pb2
from tq_service.wire.columns import fixed_row_bytes
from tq_service.wire.frames import encode_varint
from tq_service.wire.metadata import decode_spec, encode_spec

_DATA_TAG: Final = bytes((pb.PutKept.DATA_FIELD_NUMBER << 3 | 2,))  # 2: a length and so many bytes


class KeepsPuts(Protocol):
    """Where an engine writes down what becomes of its puts."""

    def keep(self, put: KeptPut) -> None:
        """Write down that a put is complete, or that this is now what is left of it."""
        ...

    def drop(self, put_id: bytes) -> None:
        """Write down that a put is gone."""
        ...

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call something once all that was written down so far cannot be lost any more."""
        ...


class KeptPut:
    """What is written down of a put. It never changes: later frees of parts of the put are told again by `keep`.

    Attributes:
        head: the message without the bytes of a small put.
        data: the bytes of a small put; those of others are in a segment.
    """

    __slots__ = ("data", "head")

    def __init__(self, head: bytes, data: bytes | bytearray | None) -> None:
        self.head = head
        self.data = data

    @classmethod
    def of(cls, message: pb.PutKept, data: bytes | bytearray | None) -> KeptPut:
        """Return what is written down by a message and the bytes that it leaves out."""
        return cls(message.SerializeToString(), data)

    def parts(self) -> list[bytes | bytearray]:
        """Return the serialized message with its bytes, in parts: fields of a message may stand in any order."""
        if self.data is None:
            return [self.head]
        return [self.head, _DATA_TAG + encode_varint(len(self.data)), self.data]


def describe_put(put_id: bytes, put: StoredPut, segment: int, size: int) -> pb.PutKept:
    """Return what is to be written down of a put that is complete, or was compacted; the checksum is to come.

    Args:
        put_id: its name.
        put: the put as it is now.
        segment: the file with its bytes; 0: none.
        size: number of its bytes.
    """
    return pb.PutKept(
        put_id=put_id,
        partition_id=put.partition_id,
        row_count=put.row_count,
        columns=[
            metadata_pb2.ColumnHeader(spec=encode_spec(column.spec), value_bytes=column.value_bytes)
            for column in put.columns.values()
            if column is not None
        ],
        segment=segment,
        size_bytes=size,
        kept_rows=_encode_rows(put),
        for_existing_rows=put.for_existing_rows,
    )


def restore_put(message: pb.PutKept, region: Region) -> StoredPut:
    """Return the put that was written down, its tables and values in the region as they were."""
    row_sets, gone = _decode_rows(message)
    whole = RowSet(message.row_count)
    specs = [decode_spec(column.spec) for column in message.columns]
    sets = [row_sets.get(spec.name, whole) for spec in specs]
    tables = [
        0 if fixed_row_bytes(spec) is not None else rows.stored_count * table_bytes(spec) + 8
        for spec, rows in zip(specs, sets, strict=True)
    ]
    table_at, values_at = 0, sum(tables)
    columns: dict[str, StoredColumn | None] = dict.fromkeys(gone)
    for spec, rows, table, header in zip(specs, sets, tables, message.columns, strict=True):
        columns[spec.name] = StoredColumn(spec, rows, table_at, values_at, header.value_bytes)
        table_at, values_at = table_at + table, values_at + header.value_bytes
    return StoredPut(
        region,
        columns,
        message.row_count,
        message.partition_id,
        region.size,
        for_existing_rows=message.for_existing_rows,
    )


def _encode_rows(put: StoredPut) -> list[pb.KeptRows]:
    gone = [name for name, column in put.columns.items() if column is None]
    kept = [pb.KeptRows(field_names=gone)] if gone else []
    for row_set in put.row_sets():
        if row_set.stored_count < put.row_count:
            rows = row_set.rows_at(np.arange(row_set.stored_count, dtype=np.int64))
            kept.append(pb.KeptRows(field_names=put.members(row_set), rows=rows.astype("<i8").tobytes()))
    return kept


def _decode_rows(message: pb.PutKept) -> tuple[dict[str, RowSet], Sequence[str]]:
    """Return the rows that columns still have, where those are not all, and the columns that have none."""
    row_sets: dict[str, RowSet] = {}
    gone: list[str] = []
    for kept in message.kept_rows:
        rows = np.frombuffer(kept.rows, "<i8").astype(np.int64)
        if rows.size:
            row_sets |= dict.fromkeys(kept.field_names, RowSet.of_rows(rows))
        else:
            gone += kept.field_names
    return row_sets, gone
