"""The answer to a get, from frames or shared memory, received into the memory that the caller's tensors will share.

Columns in shared memory are where they lie, if they are in one piece that is worth keeping from other puts:

    for the program    on a private mapping, until its tensors are gone
    for a device       on the shared mapping of their region, which is pinned for it, until they have been copied up
    placed             copied to the memory of their place
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Mappings
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from tq_service.dataplane.bulk.client import BulkLink
from tq_service.dataplane.shared_memory.client import FdChannel
from tq_service.dataplane.shared_memory.mapped import Lease, Pages
from tq_service.errors import InternalError, InvalidArgumentError, UnavailableError
from tq_service.v1.storage_service_pb2 import BulkTicket, GetHeader, GetRequest, SharedColumn, SharedColumns
from tq_service.wire.columns import ColumnReceiver, ColumnShape, Garbled, decode_headers
from tq_service.wire.host_memory import BLOCKS, PINNED
from tq_service.wire.mapping import PAGE_BYTES, Bytes, Mapping
from tq_service.wire.shared_memory import check_sealed, close_all

if TYPE_CHECKING:
    from tq_service.wire.cuda import Device


class Deadline(Protocol):
    """When a call must have ended."""

    def remaining(self) -> float:
        """Return the seconds left, 0 when it has passed."""
        ...


Received: TypeAlias = tuple[ColumnShape, Bytes]
"""A column that was got, and its bytes."""


class Placement(Protocol):
    """Where the columns of a get are to be, if not in new memory of the program."""

    def device_of(self, column: ColumnShape) -> Device | None:
        """Return the device that a column is copied to afterwards; None: none."""
        ...

    def place(self, columns: Sequence[ColumnShape]) -> Sequence[Bytes]:
        """Return memory of the host for the values of each of some columns."""
        ...


# Arrays keep all of a region from other puts, and so must be on a part of it that is worth it.
_LEAST_SHARE_IN_PLACE: Final = 1 / 64
_MOST_REMEMBERED: Final = 1024


class AnswerSizes:
    """Expects an answer to be as large, per row, as the last one with the same fields: batches of a task are alike.

    How large ragged rows are, and which are in shared memory, only the storage service knows. The first answer is
    expected to be small; where it is not, the get costs another round trip.
    """

    def __init__(self) -> None:
        self._row_bytes: dict[tuple[str, ...], float] = {}

    def expected_bytes(self, request: GetRequest, row_count: int) -> int:
        """Return how many bytes of values the answer is likely to send."""
        return int(self._row_bytes.get(_fields(request), 0.0) * row_count)

    def note(self, request: GetRequest, row_count: int, sent_bytes: int) -> None:
        """Note how many bytes were sent."""
        if len(self._row_bytes) >= _MOST_REMEMBERED:
            self._row_bytes.clear()
        self._row_bytes[_fields(request)] = sent_bytes / max(row_count, 1)


def _fields(request: GetRequest) -> tuple[str, ...]:
    return tuple(name for run in request.runs for name in run.field_names)


class AnswerReader:
    """Takes the messages of one get: the header, then frames.

    Args:
        row_count: number of rows asked for.
        placement: where the columns are to be; None: in new memory, or where they lie in shared memory.

    Attributes:
        offer: columns in shared memory, to be taken by `receive_shared` before the get can end; else None.
        ticket: of the others, to be received by `receive_bulk` before the get can end; None: they come in frames.
        sent_bytes: bytes of values, those in shared memory apart.

    All methods raise InternalError for what a storage service may not send.
    """

    def __init__(self, row_count: int, placement: Placement | None = None) -> None:
        self._row_count = row_count
        self._placement = placement
        self._columns: Sequence[ColumnShape] = ()
        self._receiver: ColumnReceiver | None = None
        self._shared: dict[int, Bytes] = {}
        self.offer: SharedColumns | None = None
        self.ticket: BulkTicket | None = None
        self.sent_bytes = 0

    @property
    def places_next(self) -> bool:
        """Whether the next message makes it ask for memory, which may take long."""
        return self._placement is not None and self._receiver is None

    def take(self, part: GetHeader | memoryview | Garbled) -> None:
        """Take the next message."""
        if isinstance(part, Garbled):
            raise InternalError(f"a storage service sent what cannot be read: {part.reason}")
        with _agreement():
            if isinstance(part, memoryview):
                self._started().write(part)
            else:
                self._begin(part)

    def _begin(self, header: GetHeader) -> None:
        if header.row_count != self._row_count:
            raise InternalError(f"a storage service sent {header.row_count} rows, expected {self._row_count}")
        self._columns = decode_headers(header.columns, header.row_count, of_get=True)
        in_memory = {column.column_index for column in header.shared.columns}
        sent = [column for index, column in enumerate(self._columns) if index not in in_memory]
        self._receiver = ColumnReceiver(sent, self._places(sent))
        self.sent_bytes = sum(column.value_bytes for column in sent)
        self.offer = header.shared if in_memory else None
        self.ticket = header.bulk if header.HasField("bulk") else None
        if self.ticket is not None and not (
            self.ticket.size_bytes == self.sent_bytes > 0 and self.ticket.range_bytes > 0
        ):
            raise InternalError(
                f"a storage service gave a ticket for {self.ticket.size_bytes} bytes in ranges of "
                f"{self.ticket.range_bytes}; expected one for {self.sent_bytes}"
            )

    def receive_bulk(self, link: BulkLink, deadline: Deadline) -> None:
        """Receive the columns of the ticket.

        Raises:
            UnavailableError: not all of them came.
        """
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            receiver = self._started()
            link.receive(ticket, receiver.buffers, deadline.remaining)
            receiver.end_filling()

    def receive_shared(self, channel: FdChannel | None) -> None:
        """Take the columns that are in shared memory.

        Raises:
            UnavailableError: the session has ended, or this process has no memory or file descriptors left.
        """
        offer, self.offer = self.offer, None
        if offer is None or channel is None:
            raise InternalError("a storage service offered shared memory without a session")
        pages = self._check_offer(offer)
        private: list[Pages | None] = [
            each if self._placement is None or not number else None  # the program gets no arrays on a region then
            for number, each in zip(offer.memories, pages, strict=True)
        ]
        lease, regions = channel.begin_lease(offer.offer_id), channel.regions
        mappings: dict[int, Mapping] = {}
        fds: list[int] = []
        try:
            for index, number in enumerate(offer.memories):
                if number and (mapping := regions.find(lease, number, private[index])) is not None:
                    mappings[index] = mapping
            missing = [index for index in range(len(offer.memories)) if index not in mappings]
            fds = channel.take(offer.offer_id, missing)
            for index, fd in zip(missing, fds, strict=True):
                number = offer.memories[index]
                if not number:
                    with _agreement():
                        check_sealed(fd)
                mappings[index] = regions.map(lease, number, fd, private[index])
        except OSError as error:
            raise UnavailableError(f"shared memory cannot be read: {error}") from None
        finally:
            close_all(fds)
        for column in offer.columns:
            for memory, start, size in _slices(column):
                if start + size > mappings[memory].size:
                    raise InternalError(
                        f"a storage service offered {size} bytes from {start} on of memory of {mappings[memory].size}"
                    )
        self._shared = {
            column.column_index: values
            for column in offer.columns
            if (values := self._in_place(column, mappings, pages, lease)) is not None
        }
        copied = [column for column in offer.columns if column.column_index not in self._shared]
        places = self._places([self._columns[column.column_index] for column in copied])
        for column, values in zip(copied, places, strict=True):
            for (memory, start, size), end in zip(_slices(column), accumulate(column.sizes), strict=True):
                values[end - size : end] = mappings[memory].array(start, size)
            self._shared[column.column_index] = values

    def _places(self, columns: Sequence[ColumnShape]) -> Sequence[Bytes]:
        """Return memory for the values of columns."""
        if self._placement is None:
            return [BLOCKS.take(column.value_bytes) for column in columns]
        return self._placement.place(columns)

    def _in_place(
        self, column: SharedColumn, mappings: Mappings[int, Mapping], pages: Sequence[Pages], lease: Lease
    ) -> Bytes | None:
        """Return the values of a column where they lie; None: they are to be copied."""
        (memory, start, size), *others = _slices(column)
        mapping, least_bytes = mappings[memory], mappings[memory].size * _LEAST_SHARE_IN_PLACE
        if others:
            return None
        if self._placement is None:
            return mapping.array(start, size, lease) if size >= least_bytes else None
        device = self._placement.device_of(self._columns[column.column_index])
        used_bytes = (pages[memory].end - pages[memory].first) * PAGE_BYTES  # it is pinned for all of its columns
        if device is None or not mapping.is_shared or used_bytes < least_bytes:
            return None
        pin = PINNED.pin(mapping, device)
        return None if pin is None else mapping.array(start, size, (lease, pin))

    def _check_offer(self, offer: SharedColumns) -> list[Pages]:
        """Check that the slices of the columns are there, and return the pages of each memory that they are on."""
        ranges: dict[int, Pages] = {}
        for column in offer.columns:
            numbers, starts, sizes = column.memory_indexes, column.starts, column.sizes
            if column.column_index >= len(self._columns) or not len(numbers) == len(starts) == len(sizes) > 0:
                raise InternalError(
                    f"a storage service offered column {column.column_index} of {len(self._columns)} in odd slices"
                )
            shape = self._columns[column.column_index]
            if sum(sizes) != shape.value_bytes:
                raise InternalError(
                    f"a storage service offered {sum(sizes)} bytes of field {shape.spec.name!r}, which has "
                    f"{shape.value_bytes}"
                )
            for number, start, size in zip(numbers, starts, sizes, strict=True):
                if number >= len(offer.memories) or start < 0 or size <= 0:
                    raise InternalError(
                        f"a storage service offered {size} bytes from {start} on of memory {number} of "
                        f"{len(offer.memories)}"
                    )
                first, end = start // PAGE_BYTES, -(-(start + size) // PAGE_BYTES)
                known = ranges.get(number, Pages(first, end))
                ranges[number] = Pages(min(known.first, first), max(known.end, end))
        if len(ranges) != len(offer.memories):
            raise InternalError(f"a storage service offered {len(offer.memories)} memories for {len(ranges)}")
        return [ranges[number] for number in range(len(ranges))]

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


def _slices(column: SharedColumn) -> list[tuple[int, int, int]]:
    return list(zip(column.memory_indexes, column.starts, column.sizes, strict=True))


@contextmanager
def _agreement() -> Iterator[None]:
    try:
        yield
    except InvalidArgumentError as error:
        raise InternalError(f"a storage service sent what does not agree: {error}") from None
