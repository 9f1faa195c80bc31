"""Columns of a get that are in shared memory: mapped where they lie in one piece, copied together where they do not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from tq_service.client.handover import Handover
from tq_service.client.receive_buffers import RECEIVE_BUFFERS
from tq_service.errors import InternalError, InvalidArgumentError, UnavailableError
from tq_service.v1.storage_service_pb2 import SharedColumn, SharedColumns
from tq_service.wire import handover as sockets
from tq_service.wire import shared_memory
from tq_service.wire.columns import ColumnShape
from tq_service.wire.dtypes import Bytes

# A mapping keeps the whole put in memory, cleared or not; so it must be of a part of it that is worth it.
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
        sockets.close_all(fds)


def _values(columns: Sequence[ColumnShape], column: SharedColumn, fds: Sequence[int]) -> Bytes:
    numbers, starts, sizes = column.memory_indexes, column.starts, column.sizes
    if not 0 <= column.column_index < len(columns) or not len(numbers) == len(starts) == len(sizes) > 0:
        raise InternalError(f"a storage service offered column {column.column_index} of {len(columns)} in odd slices")
    shape = columns[column.column_index]
    memory_sizes = [os.fstat(fd).st_size for fd in fds]
    for number, start, size in zip(numbers, starts, sizes, strict=True):
        if number >= len(fds) or start < 0 or size <= 0 or start + size > memory_sizes[number]:
            raise InternalError(f"a storage service offered {size} bytes from {start} on of memory {number}")
    if sum(sizes) != shape.value_bytes:
        raise InternalError(
            f"a storage service offered {sum(sizes)} bytes of {shape.spec.name!r}, not {shape.value_bytes}"
        )
    if len(sizes) == 1 and sizes[0] >= memory_sizes[numbers[0]] * _LEAST_SHARE_MAPPED:
        return shared_memory.map_private(fds[numbers[0]], starts[0], sizes[0])
    values = RECEIVE_BUFFERS.take(shape.value_bytes)
    ends = np.cumsum(np.fromiter(sizes, np.int64, len(sizes))).tolist()
    for number, start, size, end in zip(numbers, starts, sizes, ends, strict=True):
        shared_memory.read_into(fds[number], start, values[end - size : end])
    return values
