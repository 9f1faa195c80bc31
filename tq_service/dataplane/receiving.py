"""Receive the response to a get, from frames or shared memory, into memory that backs the caller's tensors.

Columns in shared memory are used in place if they are contiguous and large enough to justify keeping the memory
occupied:

    for the program    on a private mapping, until the program has deleted its tensors
    for a device       on the shared mapping of the region, which is pinned until the columns are copied to the device
    placed             copied to their destination
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Mappings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from tq_service.dataplane.bulk.client import BulkLink
from tq_service.dataplane.shared_memory.client import FdChannel
from tq_service.dataplane.shared_memory.mapped import Lease, Pages
from tq_service.errors import InternalError, InvalidArgumentError, UnavailableError
from tq_service.v1.storage_service_pb2 import BulkTicket, GetHeader, GetRequest, SharedColumn, SharedColumns
from tq_service.wire.columns import ColumnReceiver, ColumnShape, Garbled, ScatteredRows, decode_headers
from tq_service.wire.host_memory import BLOCKS, PINNED
from tq_service.wire.mapping import PAGE_BYTES, Bytes, Mapping
from tq_service.wire.shared_memory import check_sealed, close_all

if TYPE_CHECKING:
    from tq_service.wire.cuda import Device


class Deadline(Protocol):
    """The deadline of a call."""

    def remaining(self) -> float:
        """Return the number of seconds until the deadline, or 0 if the deadline has passed."""
        ...


Received: TypeAlias = tuple[ColumnShape, Bytes]
"""A received column: its header and its bytes."""


class Placement(Protocol):
    """Interface for objects that provide the memory for a get's columns, which the get would otherwise allocate."""

    def device_of(self, column: ColumnShape) -> Device | None:
        """Return the device that a column will be copied to after the get, or None."""
        ...

    def place(self, columns: Sequence[ColumnShape]) -> Sequence[Bytes]:
        """Return host memory for the values of each column."""
        ...


class RowPlacement(Protocol):
    """Interface for objects that provide non-contiguous memory for the rows of a get."""

    def place(self, column: ColumnShape) -> ScatteredRows | None:
        """Return memory for a column's rows, or None if the rows should be placed contiguously."""
        ...


# While an array exists, other puts cannot use its region. An array is therefore created in place only if it uses a
# sufficient part of the region.
_LEAST_SHARE_IN_PLACE: Final = 1 / 64
_MOST_REMEMBERED: Final = 1024


class AnswerSizes:
    """Predicts response sizes from the bytes per row of the last response with the same fields.

    Only the storage service knows the sizes of ragged rows, and which rows are in shared memory. However, the number of
    bytes per row usually varies little between the batches of a task. The first response for a set of fields is assumed
    to be small; if it turns out to be large, the get needs an additional round trip.
    """

    def __init__(self) -> None:
        self._row_bytes: dict[tuple[str, ...], float] = {}

    def expected_bytes(self, request: GetRequest, row_count: int) -> int:
        """Return the predicted total size of the values in the response, in bytes."""
        return int(self._row_bytes.get(_fields(request), 0.0) * row_count)

    def note(self, request: GetRequest, row_count: int, sent_bytes: int) -> None:
        """Record the total size of the values in a response."""
        if len(self._row_bytes) >= _MOST_REMEMBERED:
            self._row_bytes.clear()
        self._row_bytes[_fields(request)] = sent_bytes / max(row_count, 1)


def _fields(request: GetRequest) -> tuple[str, ...]:
    sliced = (name for part in request.slices for name in (*part.field_names, ""))
    return (*(name for run in request.runs for name in run.field_names), "", *sliced)


class AnswerReader:
    """Reads the messages of the response to a get: a header followed by frames.

    Args:
        row_count: number of rows requested.
        placement: provider of memory for columns. If None, columns use new memory, or stay in shared memory.
        rows: provider of memory for received or copied rows. If None, all rows are placed contiguously.

    Attributes:
        offer: the columns that the service offers in shared memory, or None. If there is an offer, the caller must call
            `receive_shared` before `finish`.
        ticket: bulk ticket for the columns that are not in shared memory, or None if these columns arrive in frames. If
            there is a ticket, the caller must call `receive_bulk` before `finish`.
        sent_bytes: total size in bytes of the values that the service sends, excluding values in shared memory.

    All methods raise InternalError if the storage service violates the protocol.
    """

    def __init__(self, row_count: int, placement: Placement | None = None, rows: RowPlacement | None = None) -> None:
        self._row_count = row_count
        self._placement = placement
        self._rows = rows
        self._columns: Sequence[ColumnShape] = ()
        self._receiver: ColumnReceiver | None = None
        self._shared: dict[int, Bytes] = {}
        self.offer: SharedColumns | None = None
        self.ticket: BulkTicket | None = None
        self.sent_bytes = 0

    @property
    def places_next(self) -> bool:
        """Whether the next message needs memory from the placement, which may take some time to provide it."""
        return self._placement is not None and self._receiver is None

    def take(self, part: GetHeader | memoryview | Garbled) -> None:
        """Process the next message of the response."""
        if isinstance(part, Garbled):
            raise InternalError(f"a storage service sent an unreadable message: {part.reason}")
        with _agreement():
            if isinstance(part, memoryview):
                self._started().write(part)
            else:
                self._begin(part)

    def _begin(self, header: GetHeader) -> None:
        if header.row_count != self._row_count:
            raise InternalError(f"a storage service sent {header.row_count} rows; expected {self._row_count}")
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
                f"a storage service sent a ticket for {self.ticket.size_bytes} bytes in ranges of "
                f"{self.ticket.range_bytes} bytes; expected {self.sent_bytes} bytes in total"
            )

    def receive_bulk(self, link: BulkLink, deadline: Deadline) -> None:
        """Receive the columns covered by the bulk ticket.

        Raises:
            UnavailableError: some bytes did not arrive.
        """
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            receiver = self._started()
            link.receive(ticket, receiver.views, deadline.remaining)
            receiver.end_filling()

    def receive_shared(self, channel: FdChannel | None) -> None:
        """Receive the columns that are in shared memory.

        Raises:
            UnavailableError: the session has ended, or this process has run out of memory or file descriptors.
        """
        offer, self.offer = self.offer, None
        if offer is None or channel is None:
            raise InternalError("a storage service offered shared memory without a session")
        pages = self._check_offer(offer)
        private: list[Pages | None] = [
            each if self._placement is None or not number else None  # a placement copies from the shared mapping
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
            raise UnavailableError(f"could not read shared memory: {error}") from None
        finally:
            close_all(fds)
        for column in offer.columns:
            for memory, start, size in _slices(column):
                if start + size > mappings[memory].size:
                    raise InternalError(
                        f"a storage service offered {size} bytes starting at byte {start}, but the memory has "
                        f"{mappings[memory].size} bytes"
                    )
        self._shared = {
            column.column_index: values
            for column in offer.columns
            if (values := self._in_place(column, mappings, pages, lease)) is not None
        }
        copied = [column for column in offer.columns if column.column_index not in self._shared]
        shapes = [self._columns[column.column_index] for column in copied]
        for column, shape, place in zip(copied, shapes, self._places(shapes), strict=True):
            receiver = ColumnReceiver([shape], [place])
            for memory, start, size in _slices(column):
                receiver.write(mappings[memory].array(start, size).data)
            (self._shared[column.column_index],) = receiver.finish()

    def _places(self, columns: Sequence[ColumnShape]) -> Sequence[Bytes | ScatteredRows]:
        """Return the memory that receives each column's values."""
        scattered = [None if self._rows is None else self._rows.place(column) for column in columns]
        others = [column for column, found in zip(columns, scattered, strict=True) if found is None]
        if self._placement is None:
            places = iter([BLOCKS.take(column.value_bytes) for column in others])
        else:
            places = iter(self._placement.place(others))
        return [next(places) if found is None else found for found in scattered]

    def _in_place(
        self, column: SharedColumn, mappings: Mappings[int, Mapping], pages: Sequence[Pages], lease: Lease
    ) -> Bytes | None:
        """Return a column's values in shared memory, or None if the column must be copied."""
        (memory, start, size), *others = _slices(column)
        mapping, least_bytes = mappings[memory], mappings[memory].size * _LEAST_SHARE_IN_PLACE
        if others:
            return None
        if self._placement is None:
            return mapping.array(start, size, lease) if size >= least_bytes else None
        device = self._placement.device_of(self._columns[column.column_index])
        used_bytes = (pages[memory].end - pages[memory].first) * PAGE_BYTES  # used by all columns in this block
        if device is None or not mapping.is_shared or used_bytes < least_bytes:
            return None
        pin = PINNED.pin(mapping, device)
        return None if pin is None else mapping.array(start, size, (lease, pin))

    def _check_offer(self, offer: SharedColumns) -> list[Pages]:
        """Validate the slices of the offered columns, and return the page range that they use in each memory block."""
        ranges: dict[int, Pages] = {}
        for column in offer.columns:
            numbers, starts, sizes = column.memory_indexes, column.starts, column.sizes
            if column.column_index >= len(self._columns) or not len(numbers) == len(starts) == len(sizes) > 0:
                raise InternalError(
                    f"a storage service offered invalid slices for column {column.column_index} of {len(self._columns)}"
                )
            shape = self._columns[column.column_index]
            if sum(sizes) != shape.value_bytes:
                raise InternalError(
                    f"a storage service offered {sum(sizes)} bytes of field {shape.spec.name!r}; expected "
                    f"{shape.value_bytes} bytes"
                )
            for number, start, size in zip(numbers, starts, sizes, strict=True):
                if number >= len(offer.memories) or start < 0 or size <= 0:
                    raise InternalError(
                        f"a storage service offered {size} bytes starting at byte {start} of memory block {number}; "
                        f"expected a non-empty range in one of {len(offer.memories)} blocks, numbered from 0"
                    )
                first, end = start // PAGE_BYTES, -(-(start + size) // PAGE_BYTES)
                known = ranges.get(number, Pages(first, end))
                ranges[number] = Pages(min(known.first, first), max(known.end, end))
        if len(ranges) != len(offer.memories):
            raise InternalError(
                f"a storage service offered {len(offer.memories)} memory blocks, but the offered columns use only "
                f"{len(ranges)} of them"
            )
        return [ranges[number] for number in range(len(ranges))]

    def finish(self) -> list[Received]:
        """Return the columns with their bytes, in the requested order."""
        with _agreement():
            sent = iter(self._started().finish())
        return [
            (column, self._shared[index] if index in self._shared else next(sent))
            for index, column in enumerate(self._columns)
        ]

    def _started(self) -> ColumnReceiver:
        if self._receiver is None:
            raise InternalError("a storage service sent data without a header")
        return self._receiver


def _slices(column: SharedColumn) -> list[tuple[int, int, int]]:
    return list(zip(column.memory_indexes, column.starts, column.sizes, strict=True))


@contextmanager
def _agreement() -> Iterator[None]:
    try:
        yield
    except InvalidArgumentError as error:
        raise InternalError(f"a storage service sent inconsistent data: {error}") from None
