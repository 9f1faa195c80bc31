"""Puts and gets at a storage service: over gRPC, each call in the way that suits its size.

Inline: one message, for up to `INLINE_BYTES`. Stream: a header, then frames. Shared memory, with a
service of the same host: a stream whose bytes are file descriptors, sent over a Unix socket; gets take them with inline
answers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from tq_service.dataplane.concurrency import AsyncPutCall, async_in_thread
from tq_service.dataplane.messages import AnswerReader
from tq_service.dataplane.parties import Deadline, Received
from tq_service.dataplane.shared_memory.client import FdChannel, HostLink
from tq_service.errors import LimitExceededError, TqError
from tq_service.v1.storage_service_pb2 import (
    GetInlineRequest,
    GetRequest,
    PutHeader,
    PutInlineRequest,
    PutResponse,
    StatRequest,
)
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub
from tq_service.wire.columns import (
    INLINE_BYTES,
    SEND_AS_FDS,
    WAITING_BYTES,
    Column,
    decode_get_response,
    encode_part,
    iter_frames,
    keep_frame_buffers,
)
from tq_service.wire.connection import Metadata
from tq_service.wire.messages import PART_BYTES, in_parts

if TYPE_CHECKING:
    from tq_service.dataplane.concurrency import AsyncStorageStub

_SERVICE: Final = "/tq_service.v1.StorageService/"
_ASK_SECONDS: Final = 5.0
_MOST_REMEMBERED: Final = 1024

SHARED_FROM_BYTES: Final = 1 << 20
"""A smaller put does not ask whether the service is on this host: sending it takes as long, and no file descriptor."""


class AsyncDriver(Protocol):
    """Puts bytes at one place, and gets them back."""

    async def put(self, header: PutHeader, columns: Sequence[Column], deadline: Deadline) -> PutResponse:
        """Store a put, which is to be committed. Idempotent under the put_id of the header.

        Args:
            header: describes the columns.
            columns: with their bytes.
            deadline: until when it may wait for capacity and take.

        Raises:
            InvalidArgumentError: header and columns do not agree.
            QuotaExceededError: there is no capacity.
            UnavailableError: it cannot be reached, or was broken off; it may be tried again.
        """
        ...

    async def get(
        self, request: GetRequest, row_count: int, deadline: Deadline, size_bytes: int | None = None
    ) -> list[Received]:
        """Return columns with their bytes, in memory that is the caller's, in the order of the request.

        Args:
            request: the cells.
            row_count: rows asked for of each column.
            deadline: until when it may take.
            size_bytes: of all values; None where that is not known.

        Raises:
            DataLossError: another boot of the service took the puts.
            PutNotFoundError: a put, or a cell of it, is not there.
            UnavailableError: it cannot be reached, or was broken off; it may be tried again.
        """
        ...


class AsyncGrpcDriver:
    """The calls of a storage service on one channel: puts and gets, and its unary calls as `storage`.

    Args:
        channel: to the storage service.
        metadata: returns what carries the token.
        errors: makes TqError of what calls within its `with` raise.
        link: shares memory with a service of this host; None: bytes go over the wire.
    """

    def __init__(
        self,
        channel: Any,
        *,
        metadata: Callable[[], Metadata | None],
        errors: Callable[[Deadline], AbstractContextManager[None]],
        link: HostLink | None = None,
    ) -> None:
        stub: Any = StorageServiceStub(channel)
        self.storage: AsyncStorageStub = stub
        self._put = channel.stream_unary(
            _SERVICE + "Put",
            request_serializer=encode_part,
            response_deserializer=PutResponse.FromString,
        )
        self._get = channel.unary_stream(_SERVICE + "Get", response_deserializer=decode_get_response)
        self._get_in_parts = channel.stream_stream(_SERVICE + "Get", response_deserializer=decode_get_response)
        self._metadata = metadata
        self._errors = errors
        self._link = link or HostLink(is_enabled=False)
        self._sent_row_bytes: dict[tuple[str, ...], float] = {}

    async def put(self, header: PutHeader, columns: Sequence[Column], deadline: Deadline) -> PutResponse:
        """Store a put, see `AsyncDriver`."""
        keep_frame_buffers()
        if header.size_bytes <= INLINE_BYTES:
            values = b"".join(chunk for column in columns for chunk in column.chunks)
            request = PutInlineRequest(header=header, values=values)
            if request.ByteSize() < PART_BYTES:
                try:
                    return await self._put_inline(request, deadline)
                except LimitExceededError as error:  # a stream keeps its values until there is capacity
                    if error.metadata.get("limit_name") != WAITING_BYTES:
                        raise
        if header.size_bytes >= SHARED_FROM_BYTES:
            await self._find_on_host(deadline)
        with self._link.session() as session, self._errors(deadline):
            header.shared_memory_session = b"" if session is None else session.session_id
            return await self._stream(header, columns, session, deadline)

    async def _put_inline(self, request: PutInlineRequest, deadline: Deadline) -> PutResponse:
        with self._errors(deadline):
            answer = await self.storage.PutInline(request, timeout=deadline.remaining(), metadata=self._metadata())
        return answer.put

    async def _stream(
        self, header: PutHeader, columns: Sequence[Column], session: FdChannel | None, deadline: Deadline
    ) -> PutResponse:
        call = AsyncPutCall(self._put, deadline.remaining(), self._metadata())
        try:
            send_as = await call.start(header)
            if send_as == SEND_AS_FDS and session is not None:
                await async_in_thread(session.send_fds, header.put_id, columns)
            elif send_as is not None:  # else it is refused, or there already
                await call.send(iter_frames(chunk for column in columns for chunk in column.chunks))
            return await call.answer()
        finally:
            call.cancel()

    async def get(
        self, request: GetRequest, row_count: int, deadline: Deadline, size_bytes: int | None = None
    ) -> list[Received]:
        """Return columns with their bytes, see `AsyncDriver`."""
        keep_frame_buffers()
        await self._find_on_host(deadline)
        fields = tuple(name for run in request.runs for name in run.field_names)
        reader = AnswerReader(row_count)
        with self._link.session() as session, self._errors(deadline):
            request.shared_memory_session = b"" if session is None else session.session_id
            if session is not None or size_bytes is None:
                size_bytes = self._expected_bytes(fields, row_count)
            if size_bytes > INLINE_BYTES or not await self._get_inline(request, reader, session, deadline):
                await self._get_stream(request, reader, session, deadline)
        self._note_sent(fields, row_count, reader.sent_bytes)
        return reader.finish()

    def _expected_bytes(self, fields: tuple[str, ...], row_count: int) -> int:
        """Return how many bytes of values an answer is likely to send.

        What is in shared memory, and how large ragged rows are, only the service knows. Batches of one task are of like
        size, so the last answer for these fields tells. The first is tried inline, which costs a round trip where it is
        too large.
        """
        return int(self._sent_row_bytes.get(fields, 0.0) * row_count)

    def _note_sent(self, fields: tuple[str, ...], row_count: int, sent_bytes: int) -> None:
        if len(self._sent_row_bytes) >= _MOST_REMEMBERED:
            self._sent_row_bytes.clear()
        self._sent_row_bytes[fields] = sent_bytes / max(row_count, 1)

    async def _get_inline(
        self, request: GetRequest, reader: AnswerReader, session: FdChannel | None, deadline: Deadline
    ) -> bool:
        """Get in one message; return False where the answer is too large for that."""
        inline = GetInlineRequest(get=request)
        if inline.ByteSize() >= PART_BYTES:
            return False
        answer = await self.storage.GetInline(inline, timeout=deadline.remaining(), metadata=self._metadata())
        if not answer.HasField("header"):
            return False
        reader.take(answer.header)
        if reader.offer is not None:
            await async_in_thread(reader.receive_shared, session)
        reader.take(memoryview(answer.values))
        return True

    async def _get_stream(
        self, request: GetRequest, reader: AnswerReader, session: FdChannel | None, deadline: Deadline
    ) -> None:
        parts, options = in_parts(request.SerializeToString(), "get"), {"timeout": deadline.remaining()}
        asked = self._get_in_parts(iter(parts), metadata=self._metadata(), **options) if len(parts) > 1 else None
        stream = asked or self._get(parts[0], metadata=self._metadata(), **options)
        try:
            async for part in stream:
                reader.take(part)
                if reader.offer is not None:
                    await async_in_thread(reader.receive_shared, session)
        finally:
            stream.cancel()

    async def _find_on_host(self, deadline: Deadline) -> None:
        """Ask a storage service for its socket when that is due, and open a session if it is on this host."""
        if not self._link.is_due():
            return
        try:
            with self._errors(deadline):
                stat = await self.storage.Stat(
                    StatRequest(), timeout=min(deadline.remaining(), _ASK_SECONDS), metadata=self._metadata()
                )
        except TqError:  # the call that is about to be made will say what is wrong
            self._link.postpone()
            return
        # It waits twice at most, for other threads and for the service: half of the time is left for the call itself.
        await async_in_thread(self._link.open, stat, deadline.remaining() / 4)
