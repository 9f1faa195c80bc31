"""The answer to a get, from frames or shared memory, received into the memory that the caller's tensors will share.

Memory is used again when the tensors in it are gone: pages that are new to a process cost the system more than the
bytes cost to receive. Gets of 256 MiB were seen to vary from 0.5 to 2.2 GB/s, all of the difference being system time.
A training loop gets batches of like size and drops them, so a few blocks are enough for all of them.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as Mappings
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Final, Protocol, TypeAlias

import numpy as np

from tq_service.dataplane.bulk.client import BulkLink
from tq_service.dataplane.shared_memory.client import FdChannel
from tq_service.dataplane.shared_memory.mapped import Lease, Pages
from tq_service.errors import InternalError, InvalidArgumentError, UnavailableError
from tq_service.v1.storage_service_pb2 import BulkTicket, GetHeader, GetRequest, SharedColumn, SharedColumns
from tq_service.wire.columns import Bytes, ColumnReceiver, ColumnShape, Garbled, decode_headers
from tq_service.wire.shared_memory import PAGE_BYTES, Mapping, check_sealed, close_all


class Deadline(Protocol):
    """When a call must have ended."""

    def remaining(self) -> float:
        """Return the seconds left, 0 when it has passed."""
        ...


Received: TypeAlias = tuple[ColumnShape, Bytes]
"""A column that was got, and its bytes."""

Place: TypeAlias = Callable[[Sequence[ColumnShape]], Sequence[Bytes]]
"""Returns memory for the values of each of some columns."""

# Below this malloc reuses memory well enough, see `keep_frame_buffers`.
_SMALL_BYTES: Final = 4 << 20
_GRAIN_BYTES: Final = 2 << 20  # a huge page
# For batches of a GiB; a process that gets smaller ones keeps the few blocks that it had in the last minute.
_KEPT_BYTES: Final = 2 << 30
_KEPT_SECONDS: Final = 60.0
# A block may be this much larger than what is asked for: batches are of like size, not of the same.
_MOST_SLACK: Final = 1.25
# Arrays keep all of a region from other puts, and so must be on a part of it that is worth it.
_LEAST_SHARE_MAPPED: Final = 1 / 64
_MOST_REMEMBERED: Final = 1024


class ReceiveBuffers:
    """Hands out arrays; their memory comes back by itself when neither they nor any view or tensor on them is left.

    Unused blocks are kept up to `kept_bytes` together and for `kept_seconds` each, checked whenever one is asked for or
    comes back. May be used by several threads: all state is in a deque, since a block can come back at any point of any
    thread, in the middle of these methods too.

    Args:
        kept_bytes: most bytes of unused blocks.
        kept_seconds: how long an unused block is kept.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES, kept_seconds: float = _KEPT_SECONDS) -> None:
        self._kept_bytes = kept_bytes
        self._kept_seconds = kept_seconds
        self._unused: deque[tuple[float, mmap.mmap]] = deque()

    def take(self, size: int) -> Bytes:
        """Return an array of `size` bytes; what they are is not defined."""
        if size < _SMALL_BYTES:
            return np.empty(size, np.uint8)
        block = self._reused(size)
        if block is None:
            new_bytes = -(-size // _GRAIN_BYTES) * _GRAIN_BYTES
            block = mmap.mmap(-1, new_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
        array: Bytes = np.frombuffer(block, np.uint8, size)
        # Views and tensors keep this array alive, not the block.
        weakref.finalize(array, self._return, block).atexit = False
        return array

    def _reused(self, size: int) -> mmap.mmap | None:
        """Return an unused block that fits; a thread that asks meanwhile finds none."""
        most = size * _MOST_SLACK + _GRAIN_BYTES
        blocks = self._take_all()
        found = next((each for each in blocks if size <= len(each[1]) <= most), None)
        self._keep(each for each in blocks if each is not found)
        return None if found is None else found[1]

    def _return(self, block: mmap.mmap) -> None:
        self._keep([(time.monotonic(), block), *self._take_all()])

    def _take_all(self) -> list[tuple[float, mmap.mmap]]:
        """Take the unused blocks, the latest first."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._unused.pop())
        return taken

    def _keep(self, blocks: Iterable[tuple[float, mmap.mmap]]) -> None:
        """Keep blocks, the latest first, as far as the limits allow; the system gets the others back."""
        oldest = time.monotonic() - self._kept_seconds
        remaining = self._kept_bytes
        for since, block in blocks:
            if since >= oldest and len(block) <= remaining:
                remaining -= len(block)
                self._unused.appendleft((since, block))


# Of this process: clients come and go, and batches outlive them.
RECEIVE_BUFFERS: Final = ReceiveBuffers()


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
        place: gives the memory that all values are copied to; None: into new memory, and shared memory is mapped.

    Attributes:
        offer: columns in shared memory, to be taken by `receive_shared` before the get can end; else None.
        ticket: of the others, to be received by `receive_bulk` before the get can end; None: they come in frames.
        sent_bytes: bytes of values, those in shared memory apart.

    All methods raise InternalError for what a storage service may not send.
    """

    def __init__(self, row_count: int, place: Place | None = None) -> None:
        self._row_count = row_count
        self._place = place
        self._places: Sequence[Bytes] | None = None
        self._columns: Sequence[ColumnShape] = ()
        self._receiver: ColumnReceiver | None = None
        self._shared: dict[int, Bytes] = {}
        self.offer: SharedColumns | None = None
        self.ticket: BulkTicket | None = None
        self.sent_bytes = 0

    @property
    def places_next(self) -> bool:
        """Whether the next message makes it ask for memory, which may take long."""
        return self._place is not None and self._receiver is None

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
        allocate: Callable[[int], Bytes] = RECEIVE_BUFFERS.take
        if self._place is not None:
            places = self._places = self._place(self._columns)
            of_sent = iter([places[index] for index in range(len(places)) if index not in in_memory])
            allocate = lambda _size: next(of_sent)  # noqa: E731  (in the order of what is sent)
        self._receiver = ColumnReceiver(sent, allocate)
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
        lease, regions = channel.regions.begin_lease(offer.offer_id), channel.regions
        mappings: dict[int, Mapping] = {}
        fds: list[int] = []
        try:
            for index, number in enumerate(offer.memories):
                if number and (mapping := regions.reuse(lease, number, pages[index])) is not None:
                    mappings[index] = mapping
            missing = [index for index in range(len(offer.memories)) if index not in mappings]
            fds = channel.take(offer.offer_id, missing)
            for index, fd in zip(missing, fds, strict=True):
                number = offer.memories[index]
                if not number:
                    with _agreement():
                        check_sealed(fd)
                mappings[index] = regions.map(lease, number, fd, pages[index])
        except OSError as error:
            raise UnavailableError(f"shared memory cannot be read: {error}") from None
        finally:
            close_all(fds)
        for index, mapping in mappings.items():
            if pages[index].end * PAGE_BYTES > -(-mapping.size // PAGE_BYTES) * PAGE_BYTES:
                raise InternalError(
                    f"a storage service offered bytes up to page {pages[index].end} of memory of {mapping.size} bytes"
                )
        self._shared = {column.column_index: self._shared_values(column, mappings, lease) for column in offer.columns}

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

    def _shared_values(self, column: SharedColumn, mappings: Mappings[int, Mapping], lease: Lease) -> Bytes:
        """Return the values of a column: where they lie if that is one piece worth keeping and allowed, else a copy."""
        first, *others = slices = list(zip(column.memory_indexes, column.starts, column.sizes, strict=True))
        number, start, size = first
        if self._places is not None:
            values = self._places[column.column_index]
        elif not others and size >= mappings[number].size * _LEAST_SHARE_MAPPED:
            return mappings[number].array(start, size, lease)
        else:
            values = RECEIVE_BUFFERS.take(sum(column.sizes))
        sources = {number: mapping.array(0, mapping.size) for number, mapping in mappings.items()}
        ends = accumulate(column.sizes)
        for (number, start, size), end in zip(slices, ends, strict=True):
            values[end - size : end] = sources[number][start : start + size]
        return values

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
