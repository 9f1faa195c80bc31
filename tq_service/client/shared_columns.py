"""Columns of a get that are in shared memory: mapped where they lie in one piece, copied together where they do not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from tq_service.client.handover import Handover
from tq_service.client.receive_buffers import RECEIVE_BUFFERS
from tq_service.errors import InternalError, InvalidArgumentError, UnavailableError
from tq_service.v1.storage_service_pb2 import SharedColumn, SharedColumns
from tq_service.wire import shared_memory
from tq_service.wire.columns import ColumnShape
from tq_service.wire.dtypes import Bytes

_Piece = tuple[int, int, int, int]

# A mapping keeps whole memfds in memory, cleared or not; so it must be of a part of them that is worth it.
_LEAST_SHARE_MAPPED: Final = 1 / 64


def collect_columns(columns: Sequence[ColumnShape], offer: SharedColumns, handover: Handover) -> dict[int, Bytes]:
    """Return the values of the columns that are offered, by their index.

    Raises:
        UnavailableError: the session has ended, or this process has no memory or file descriptors left.
        InternalError: the offer does not agree with the columns or with the memory.
    """
    fds = handover.collect(offer.offer_id, offer.memory_count)
    try:
        for fd in fds:
            shared_memory.check(fd, os.fstat(fd).st_size)
        return {column.column_index: _values(columns, column, fds) for column in offer.columns}
    except InvalidArgumentError as error:
        raise InternalError(f"a storage service offered memory that cannot be used: {error}") from None
    except OSError as error:
        raise UnavailableError(f"shared memory cannot be read: {error}") from None
    finally:
        shared_memory.close_all(fds)


def _values(columns: Sequence[ColumnShape], column: SharedColumn, fds: Sequence[int]) -> Bytes:
    pieces = _pieces(columns, column, fds)
    if _is_one_piece(pieces):
        return shared_memory.map_private([(fd, start, size) for fd, start, size, _ in pieces])
    values = RECEIVE_BUFFERS.take(columns[column.column_index].value_bytes)
    filled = 0
    for fd, start, size, _ in pieces:
        shared_memory.read_into(fd, start, values[filled : filled + size])
        filled += size
    return values


def _pieces(columns: Sequence[ColumnShape], column: SharedColumn, fds: Sequence[int]) -> list[_Piece]:
    """Return the slices of a column, checked: file descriptor, start and size, and the size of the memfd."""
    numbers, starts, sizes = column.memory_indexes, column.starts, column.sizes
    if column.column_index >= len(columns) or not len(numbers) == len(starts) == len(sizes) > 0:
        raise InternalError(f"a storage service offered column {column.column_index} of {len(columns)} in odd slices")
    shape = columns[column.column_index]
    if sum(sizes) != shape.value_bytes:
        raise InternalError(
            f"a storage service offered {sum(sizes)} bytes of field {shape.spec.name!r}, which has {shape.value_bytes}"
        )
    memory_bytes = [os.fstat(fd).st_size for fd in fds]
    pieces = []
    for number, start, size in zip(numbers, starts, sizes, strict=True):
        if number >= len(fds) or start < 0 or size <= 0 or start + size > memory_bytes[number]:
            raise InternalError(
                f"a storage service offered {size} bytes from {start} on of memfd {number} of {len(fds)}"
            )
        pieces.append((fds[number], start, size, memory_bytes[number]))
    return pieces


def _is_one_piece(pieces: Sequence[_Piece]) -> bool:
    """Whether slices can be mapped next to each other, and are worth the memory that they keep."""
    for (_, start, size, memory_bytes), (_, next_start, _, _) in pairwise(pieces):
        if start + size < memory_bytes or memory_bytes % shared_memory.PAGE_BYTES or next_start:
            return False
    kept_bytes = sum(memory_bytes for _, _, _, memory_bytes in pieces)
    return sum(size for _, _, size, _ in pieces) >= kept_bytes * _LEAST_SHARE_MAPPED
