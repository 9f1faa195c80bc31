"""What puts ask, and the answer to a get, taken into the memory that the caller's tensors will share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tq_service.dataplane.parties import Received
from tq_service.dataplane.receive_buffers import RECEIVE_BUFFERS
from tq_service.dataplane.shared_memory.client import FdChannel, receive_columns
from tq_service.errors import InternalError, InvalidArgumentError
from tq_service.v1.storage_service_pb2 import GetHeader, PutHeader, SharedColumns
from tq_service.wire.columns import Bytes, ColumnReceiver, ColumnShape, Garbled, decode_headers, encode_header


def put_header(put_id: bytes, columns: Sequence[ColumnShape], **more: Any) -> PutHeader:
    """Return the header of a put of these columns; `more` are its other fields, such as the partition."""
    return PutHeader(
        put_id=put_id,
        row_count=columns[0].row_count,
        columns=map(encode_header, columns),
        size_bytes=sum(column.value_bytes for column in columns),
        **more,
    )


class AnswerReader:
    """Takes the messages of one get: the header, then frames.

    Args:
        row_count: number of rows asked for.

    Attributes:
        offer: columns in shared memory, to be taken by `receive_shared` before the get can end; else None.
        sent_bytes: bytes of values that come in frames, those in shared memory apart.

    All methods raise InternalError for what a storage service may not send.
    """

    def __init__(self, row_count: int) -> None:
        self._row_count = row_count
        self._columns: Sequence[ColumnShape] = ()
        self._receiver: ColumnReceiver | None = None
        self._shared: dict[int, Bytes] = {}
        self.offer: SharedColumns | None = None
        self.sent_bytes = 0

    def take(self, part: GetHeader | memoryview | Garbled) -> None:
        """Take the next message."""
        if isinstance(part, memoryview):
            with _agreement():
                self._started().write(part)
        elif isinstance(part, Garbled):
            raise InternalError(f"a storage service sent what cannot be read: {part.reason}")
        else:
            self._begin(part)

    def _begin(self, header: GetHeader) -> None:
        if header.row_count != self._row_count:
            raise InternalError(f"a storage service sent {header.row_count} rows, expected {self._row_count}")
        with _agreement():
            self._columns = decode_headers(header.columns, header.row_count, of_get=True)
        in_memory = {column.column_index for column in header.shared.columns}
        sent = [column for index, column in enumerate(self._columns) if index not in in_memory]
        self._receiver = ColumnReceiver(sent, RECEIVE_BUFFERS.take)
        self.sent_bytes = sum(column.value_bytes for column in sent)
        self.offer = header.shared if in_memory else None

    def receive_shared(self, channel: FdChannel | None) -> None:
        """Take the columns that are in shared memory.

        Raises:
            UnavailableError: the channel has ended.
        """
        if self.offer is None or channel is None:
            raise InternalError("a storage service offered shared memory without a session")
        self._shared = receive_columns(self._columns, self.offer, channel)
        self.offer = None

    def finish(self) -> list[Received]:
        """Return the columns with their bytes, in the order of the request."""
        with _agreement():
            sent = iter(self._started().finish())
        return [
            (column, self._shared[index] if index in self._shared else next(sent))
            for index, column in enumerate(self._columns)
        ]

    def _started(self) -> ColumnReceiver:
        if self._receiver is None:
            raise InternalError("a storage service sent no header")
        return self._receiver


@contextmanager
def _agreement() -> Iterator[None]:
    try:
        yield
    except InvalidArgumentError as error:
        raise InternalError(f"a storage service sent what does not agree: {error}") from None
