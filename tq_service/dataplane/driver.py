"""Puts and gets between a client and a storage service over gRPC, each with the transport that best suits its size.

- Inline, for up to `INLINE_BYTES`: the call is a single message that contains the bytes.
- Shared memory, if the service is on the same host: the bytes of a streaming call are placed in shared memory, whose
  file descriptors are sent over a Unix socket. Gets with an inline response also use shared memory.
- Bulk, for `BULK_BYTES` or more: the bytes of a streaming call are sent over separate connections.
- Stream, if no other transport is available: the call sends a header, followed by frames.

The asyncio driver and the synchronous driver share the steps of each operation. As in psycopg, the steps are generators
that yield the calls to make, and `async_run` or `run` makes these calls. Only the code that differs between the drivers
is written twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import grpc

from tq_service.dataplane.bulk.client import BulkLink
from tq_service.dataplane.receiving import AnswerReader, AnswerSizes, Deadline, Placement, Received, RowPlacement
from tq_service.dataplane.shared_memory.client import FdChannel, HostLink
from tq_service.dataplane.shared_memory.mapped import Lease
from tq_service.errors import LimitExceededError, TqError, UnavailableError
from tq_service.v1.storage_service_pb2 import (
    BulkTicket,
    GetInlineRequest,
    GetRequest,
    PutHeader,
    PutInlineRequest,
    PutResponse,
    RegionOffer,
    StatRequest,
)
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub
from tq_service.wire.columns import (
    BULK_BYTES,
    INLINE_BYTES,
    REGION_KEY,
    SEND_AS_BULK,
    SEND_AS_FD,
    SEND_AS_FRAMES,
    SEND_AS_KEY,
    SEND_AS_REGION,
    TICKET_KEY,
    WAITING_BYTES,
    Column,
    FrameParts,
    SourceColumn,
    columns_on_host,
    decode_get_response,
    encode_part,
    is_on_host,
    iter_frames,
    keep_frame_buffers,
)
from tq_service.wire.connection import PART_BYTES, Metadata, in_parts
from tq_service.wire.mapping import Mapping

T = TypeVar("T")
Steps: TypeAlias = Generator[Callable[[], Any], Any, T]
"""A generator that yields the calls to make, is sent the result of each call, and returns the overall result."""

_SERVICE: Final = "/tq_service.v1.StorageService/"
_LOST_STATUS: Final = "Internal error from Core"
_ASK_SECONDS: Final = 5.0
_INLINE_TAG_BYTES: Final = 8  # size added by wrapping a GetRequest in a GetInlineRequest

SHARED_FROM_BYTES: Final = 1 << 20
"""Minimum size in bytes for puts over shared memory. For smaller puts, the network is just as fast."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time limit that applies to each call separately."""

    seconds: float

    def remaining(self) -> float:
        """Return the time allowed for each call, in seconds."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class Allocated:
    """An allocated put. The client must fill the put's memory and then commit the put.

    Attributes:
        put: response of the storage service.
        mapping: memory for the put's bytes, with the columns laid out by `place_columns`.
        lease: lease on the memory. The client may use the memory as long as this lease exists.
    """

    put: PutResponse
    mapping: Mapping
    lease: Lease


class AsyncDriver(Protocol):
    """Interface for storing bytes in a storage service and reading them back."""

    async def put(self, header: PutHeader, columns: Sequence[Column], deadline: Deadline) -> PutResponse:
        """Store a put. The caller must then commit the put.

        Calls with the same put_id are idempotent.

        Args:
            header: description of the columns.
            columns: columns to store, with their bytes.
            deadline: time by which the call must finish, including any wait for capacity.

        Raises:
            InvalidArgumentError: the header does not match the columns.
            QuotaExceededError: the service does not have enough capacity.
            UnavailableError: the service is unreachable, or the call was interrupted. The put can be retried.
        """
        ...

    async def get(
        self, request: GetRequest, row_count: int, deadline: Deadline, size_bytes: int | None = None
    ) -> list[Received]:
        """Return the requested columns in the requested order. The caller owns the memory that contains the bytes.

        Args:
            request: request that lists the cells to get.
            row_count: number of requested rows in each column.
            deadline: time by which the call must finish.
            size_bytes: total size of all values in bytes, or None if unknown.

        Raises:
            DataLossError: the puts were stored by another instance of the service and are lost.
            PutNotFoundError: a put, or a cell in a put, does not exist.
            UnavailableError: the service is unreachable, or the call was interrupted. The get can be retried.
        """
        ...


async def async_run(steps: Steps[T]) -> T:
    """Await each call that the steps yield, and return the steps' result. A call's errors are raised in the steps."""
    try:
        call = next(steps)
        while True:
            try:
                answer = await call()
            except BaseException as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def run(steps: Steps[T]) -> T:
    """Make each call that the steps yield. Return the result of the steps. If a call fails, they get its error."""
    try:
        call = next(steps)
        while True:
            try:
                answer = call()
            except BaseException as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def _call_here(call: Callable[..., T], *arguments: Any) -> T:
    """Make a possibly blocking call in the current thread, and return its result."""
    return call(*arguments)


@dataclass(frozen=True, slots=True)
class SendAs:
    """The transport that sends the bytes of a put, with the bulk ticket or the region to fill."""

    way: str
    ticket: BulkTicket | None = None
    region: RegionOffer | None = None


def _send_as(metadata: Any) -> SendAs | None:
    # In older grpcio versions, keys() returns pairs, and dict() would use the pairs as keys. Pass an iterator instead.
    values = dict(iter(metadata))
    if (way := values.get(SEND_AS_KEY)) is None:
        return None
    return SendAs(
        way,
        BulkTicket.FromString(values[TICKET_KEY]) if way == SEND_AS_BULK else None,
        RegionOffer.FromString(values[REGION_KEY]) if way == SEND_AS_REGION else None,
    )


class AsyncPutCall:
    """A put on an asyncio channel.

    If the service rejects a call during a write, grpc's asyncio API loses the call's status and reports INTERNAL,
    "Internal error from Core" instead. The first frame is therefore sent only after the service has granted capacity.

    Args:
        call: channel method that starts a put.
        timeout: timeout for the call in seconds.
        metadata: key-value pairs to send with the call, such as the token.
    """

    def __init__(self, call: Any, timeout: float, metadata: Metadata | None) -> None:
        self._stream = call(timeout=timeout, metadata=metadata)

    async def start(self, header: PutHeader) -> SendAs | None:
        """Send the header. Return how to send the bytes, or None if the call has ended (see `answer`)."""
        # If the channel is closed before a call has begun, the call ends but grpc never completes the first write.
        parts = in_parts(encode_part(header), "put")
        writing = asyncio.ensure_future(self._stream.write(parts[0]))
        self._stream.add_done_callback(lambda _: writing.cancel())
        try:
            await writing
            for part in parts[1:]:
                await self._stream.write(part)
            return _send_as(await self._stream.initial_metadata())
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return None
        except asyncio.CancelledError:
            if not self._stream.done():
                raise
            return None

    async def send(self, frames: Iterable[FrameParts]) -> None:
        """Send frames until none are left or the call ends. Call `answer` to get the result or the error."""
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            for frame in frames:
                await self._stream.write(frame)

    async def answer(self) -> PutResponse:
        """Finish sending and return the service's response.

        Raises:
            grpc.RpcError: the call failed.
            UnavailableError: the call ended for an unknown reason while frames were being sent; a retry will show the
                reason.
        """
        try:
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await self._stream.done_writing()
            answer: PutResponse = await self._stream
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST_STATUS:
                raise UnavailableError("the put was interrupted by the service or the network") from None
            raise
        return answer

    def cancel(self) -> None:
        """Cancel the call if it is still running."""
        self._stream.cancel()


class PutCall:
    """A put on a synchronous channel. See `AsyncPutCall`."""

    def __init__(self, call: Any, timeout: float, metadata: Metadata | None) -> None:
        self._call = call
        self._options: dict[str, Any] = {"timeout": timeout, "metadata": metadata}
        self._messages: SimpleQueue[bytes | FrameParts | None] = SimpleQueue()
        self._stream: Any = None

    def start(self, header: PutHeader) -> SendAs | None:
        """Send the header, and return the chosen transport. If only frames can be used, do not wait for capacity."""
        for part in in_parts(encode_part(header), "put"):
            self._messages.put(part)
        if not header.shared_memory_session and not header.takes_bulk:
            return SendAs(SEND_AS_FRAMES)
        self._stream = self._call.future(iter(self._messages.get, None), **self._options)
        return _send_as(self._stream.initial_metadata())

    def send(self, frames: Iterable[FrameParts]) -> None:
        """Send frames."""
        for frame in frames:
            self._messages.put(frame)

    def answer(self) -> PutResponse:
        """Finish sending and return the service's response.

        Raises:
            grpc.RpcError: the call failed.
        """
        self._messages.put(None)
        # If no stream was opened, send everything now. The call is faster if this thread handles its events.
        at_once = self._stream is None
        answer: PutResponse = (
            self._call(iter(self._messages.get, None), **self._options) if at_once else self._stream.result()
        )
        return answer

    def cancel(self) -> None:
        """Cancel the call if it is still running."""
        self._messages.put(None)
        if self._stream is not None:
            self._stream.cancel()


def _chunks_of(columns: Sequence[Column]) -> Iterator[memoryview]:
    return (chunk for column in columns for chunk in column.chunks)


class _GrpcSteps:
    """Performs the steps of puts and gets on a channel. The attribute `storage` is the service's stub for unary calls.

    Args:
        channel: channel to the storage service.
        metadata: function that returns the metadata to send with each call, such as the token.
        errors: function that returns a context manager for calls. The context manager converts their exceptions to
            TqError.
        link: link for sharing memory with a service on this host, or None to send all bytes over the network.
        bulk: link to the service's bulk port, or None to use no bulk connections.
    """

    # Set by subclasses: the class for put calls, the wrapper for blocking calls, and iter and next for streams.
    _put_call: Any
    _in_thread: Any
    _iter: Any
    _next: Any

    def __init__(
        self,
        channel: Any,
        *,
        metadata: Callable[[], Metadata | None],
        errors: Callable[[Any], AbstractContextManager[None]],
        link: HostLink | None = None,
        bulk: BulkLink | None = None,
    ) -> None:
        self.storage: Any = StorageServiceStub(channel)
        self._put = channel.stream_unary(
            _SERVICE + "Put", request_serializer=encode_part, response_deserializer=PutResponse.FromString
        )
        self._get = channel.unary_stream(_SERVICE + "Get", response_deserializer=decode_get_response)
        self._get_in_parts = channel.stream_stream(_SERVICE + "Get", response_deserializer=decode_get_response)
        self._metadata = metadata
        self._errors = errors
        self._link = link or HostLink(is_enabled=False)
        self._bulk = bulk or BulkLink("", is_enabled=False)
        self._sizes = AnswerSizes()

    def close(self) -> None:
        """End the session, close the bulk connections, and prevent new sessions and connections."""
        self._link.close()
        self._bulk.close()

    def _putting(self, header: PutHeader, columns: Sequence[SourceColumn], deadline: Deadline) -> Steps[PutResponse]:
        keep_frame_buffers()
        if header.size_bytes <= INLINE_BYTES:
            values = b"".join(_chunks_of((yield from self._on_host(columns))))
            request = PutInlineRequest(header=header, values=values)
            if request.ByteSize() < PART_BYTES:
                try:
                    with self._errors(deadline):
                        answer = yield self._unary(self.storage.PutInline, request, deadline.remaining())
                    put: PutResponse = answer.put
                    return put
                except LimitExceededError as error:  # retry as a stream, which waits for capacity before sending
                    if error.metadata.get("limit_name") != WAITING_BYTES:
                        raise
        if header.size_bytes >= SHARED_FROM_BYTES:
            yield from self._find_ways(deadline, is_large=header.size_bytes >= BULK_BYTES)
        with self._link.session() as session, self._errors(deadline):
            header.shared_memory_session = b"" if session is None else session.session_id
            header.takes_bulk = header.size_bytes >= BULK_BYTES and self._bulk.is_up
            call = self._put_call(self._put, deadline.remaining(), self._metadata())
            try:
                send_as = yield partial(call.start, header)
                if send_as is None:  # the service has rejected the put or has already stored it
                    pass
                elif send_as.region is not None and session is not None:
                    yield partial(self._in_thread, session.fill, send_as.region, columns)
                elif send_as.way == SEND_AS_FD and session is not None:
                    yield partial(self._in_thread, session.send_sealed, header.put_id, columns)
                elif send_as.ticket is not None:
                    yield partial(self._in_thread, self._bulk.send, send_as.ticket, columns, deadline.remaining)
                else:
                    host_columns = yield from self._on_host(columns)
                    yield partial(call.send, iter_frames(_chunks_of(host_columns)))
                put = yield call.answer
                return put
            finally:
                call.cancel()

    def _allocating(self, header: PutHeader, deadline: Deadline) -> Steps[Allocated | None]:
        if header.size_bytes < SHARED_FROM_BYTES:
            return None
        yield from self._find_ways(deadline)
        with self._link.session() as session, self._errors(deadline):
            if session is None or not session.can_allocate:
                return None
            header.shared_memory_session, header.allocates = session.session_id, True
            request = PutInlineRequest(header=header)
            if request.ByteSize() >= PART_BYTES:
                return None
            answer = yield self._unary(self.storage.PutInline, request, deadline.remaining())
            if not answer.HasField("region"):  # this call is a retry of a call whose response was lost
                return None
            mapping, lease = yield partial(self._in_thread, session.allocate, answer.region)
        return Allocated(answer.put, mapping, lease)

    def _on_host(self, columns: Sequence[SourceColumn]) -> Steps[Sequence[Column]]:
        if is_on_host(columns):
            return columns
        copied: list[Column] = yield partial(self._in_thread, columns_on_host, columns)
        return copied

    def _getting(
        self,
        request: GetRequest,
        row_count: int,
        deadline: Deadline,
        size_bytes: int | None,
        placement: Placement | None,
        *,
        rows: RowPlacement | None,
    ) -> Steps[list[Received]]:
        keep_frame_buffers()
        yield from self._find_ways(deadline)
        reader = AnswerReader(row_count, placement, rows)
        with self._link.session() as session, self._errors(deadline):
            request.shared_memory_session = b"" if session is None else session.session_id
            if session is not None or size_bytes is None:
                size_bytes = self._sizes.expected_bytes(request, row_count)
            answer = None
            if size_bytes <= INLINE_BYTES and request.ByteSize() < PART_BYTES - _INLINE_TAG_BYTES:
                answer = yield self._unary(self.storage.GetInline, GetInlineRequest(get=request), deadline.remaining())
            if answer is None or not answer.HasField("header"):  # the values do not fit in one message
                yield from self._get_stream(request, reader, session, deadline)
            else:
                yield from self._take(answer.header, reader, session, deadline)
                yield from self._take(memoryview(answer.values), reader, session, deadline)
        self._sizes.note(request, row_count, reader.sent_bytes)
        return reader.finish()

    def _get_stream(
        self, request: GetRequest, reader: AnswerReader, session: FdChannel | None, deadline: Deadline
    ) -> Steps[None]:
        yield from self._find_ways(deadline, is_large=True)
        request.takes_bulk = self._bulk.is_up
        parts = in_parts(request.SerializeToString(), "get")
        ask, request_parts = (self._get, parts[0]) if len(parts) == 1 else (self._get_in_parts, iter(parts))
        stream = ask(request_parts, timeout=deadline.remaining(), metadata=self._metadata())
        answers = self._iter(stream)
        try:
            while (part := (yield partial(self._next, answers, None))) is not None:
                yield from self._take(part, reader, session, deadline)
        finally:
            stream.cancel()

    def _take(self, part: Any, reader: AnswerReader, session: FdChannel | None, deadline: Deadline) -> Steps[None]:
        if reader.places_next:
            yield partial(self._in_thread, reader.take, part)
        else:
            reader.take(part)
        if reader.offer is not None:
            yield partial(self._in_thread, reader.receive_shared, session)
        if reader.ticket is not None:
            yield partial(self._in_thread, reader.receive_bulk, self._bulk, deadline)

    def _find_ways(self, deadline: Deadline, *, is_large: bool = False) -> Steps[None]:
        """When a check is due, ask the storage service for its socket and, before large transfers, its bulk port.

        If the service is on this host, open a session. A background thread probes the bulk port.
        """
        if not self._link.is_due() and not (is_large and self._bulk.is_due()):
            return
        try:
            with self._errors(deadline):
                stat = yield self._unary(self.storage.Stat, StatRequest(), min(deadline.remaining(), _ASK_SECONDS))
        except TqError:  # the subsequent put or get reports the problem
            self._link.postpone()
            self._bulk.postpone()
            return
        if self._bulk.is_due():
            self._bulk.probe(stat)
        if self._link.is_due():
            # Opening a session may wait twice: for other threads, and for the service. At least half of the remaining
            # time is left for the call.
            yield partial(self._in_thread, self._link.open, stat, deadline.remaining() / 4)

    def _unary(self, method: Any, request: Any, timeout: float) -> Callable[[], Any]:
        return partial(method, request, timeout=timeout, metadata=self._metadata())


class AsyncGrpcDriver(_GrpcSteps):
    """An `AsyncDriver` for a storage service on an asyncio channel."""

    _put_call = AsyncPutCall
    _in_thread = staticmethod(asyncio.to_thread)
    _iter = staticmethod(aiter)
    _next = staticmethod(anext)

    async def put(self, header: PutHeader, columns: Sequence[SourceColumn], deadline: Deadline) -> PutResponse:
        """Store a put. See `AsyncDriver`."""
        return await async_run(self._putting(header, columns, deadline))

    async def allocate(self, header: PutHeader, deadline: Deadline) -> Allocated | None:
        """Reserve service memory that the client fills before the commit, or return None if memory cannot be shared.

        Raises the same errors as `put`.
        """
        return await async_run(self._allocating(header, deadline))

    async def get(
        self,
        request: GetRequest,
        row_count: int,
        deadline: Deadline,
        size_bytes: int | None = None,
        placement: Placement | None = None,
        *,
        rows: RowPlacement | None = None,
    ) -> list[Received]:
        """Return the requested columns. See `AsyncDriver`.

        If given, `placement` and `rows` provide the memory for the columns.
        """
        return await async_run(self._getting(request, row_count, deadline, size_bytes, placement, rows=rows))


class GrpcDriver(_GrpcSteps):
    """A synchronous driver for a storage service. See `AsyncDriver`."""

    _put_call = PutCall
    _in_thread = staticmethod(_call_here)
    _iter = staticmethod(iter)
    _next = staticmethod(next)

    def put(self, header: PutHeader, columns: Sequence[SourceColumn], deadline: Deadline) -> PutResponse:
        """Store a put. See `AsyncDriver`."""
        return run(self._putting(header, columns, deadline))

    def allocate(self, header: PutHeader, deadline: Deadline) -> Allocated | None:
        """Reserve service memory for a put. See `AsyncGrpcDriver.allocate`."""
        return run(self._allocating(header, deadline))

    def get(
        self,
        request: GetRequest,
        row_count: int,
        deadline: Deadline,
        size_bytes: int | None = None,
        placement: Placement | None = None,
        *,
        rows: RowPlacement | None = None,
    ) -> list[Received]:
        """Return the requested columns. See `AsyncDriver`.

        If given, `placement` and `rows` provide the memory for the columns.
        """
        return run(self._getting(request, row_count, deadline, size_bytes, placement, rows=rows))
