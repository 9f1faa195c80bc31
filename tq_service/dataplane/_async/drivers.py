"""Puts and gets at a storage service: over gRPC, each call in the way that suits its size.

Inline: one message, for up to `INLINE_BYTES`. Stream: a header, then frames. Shared memory, with a
service of the same host: a stream whose bytes are file descriptors, sent over a Unix socket; gets take them with inline
answers, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tq_service.dataplane.calls import AsyncPutCall, Deadline, StorageCalls, async_in_thread
from tq_service.dataplane.receiving import AnswerReader, Received
from tq_service.dataplane.shared_memory.client import FdChannel
from tq_service.errors import LimitExceededError, TqError
from tq_service.v1.storage_service_pb2 import (
    GetInlineRequest,
    GetRequest,
    PutHeader,
    PutInlineRequest,
    PutInlineResponse,
    PutResponse,
    StatRequest,
)
from tq_service.wire.columns import Column
from tq_service.wire.frames import INLINE_BYTES, SEND_AS_FDS, WAITING_BYTES, iter_frames, keep_frame_buffers
from tq_service.wire.parts import PART_BYTES, in_parts

_ASK_SECONDS: Final = 5.0
_INLINE_TAG_BYTES: Final = 8  # in which GetInlineRequest wraps a GetRequest

SHARED_FROM_BYTES: Final = 1 << 20
"""A smaller put does not ask whether the service is on this host: sending it takes as long, and no file descriptor."""


class AsyncGrpcDriver(StorageCalls):
    """An `AsyncDriver` for the storage service on a channel."""

    async def put(self, header: PutHeader, columns: Sequence[Column], deadline: Deadline) -> PutResponse:
        """Store a put, see `AsyncDriver`."""
        keep_frame_buffers()
        if header.size_bytes <= INLINE_BYTES:
            values = b"".join(chunk for column in columns for chunk in column.chunks)
            request = PutInlineRequest(header=header, values=values)
            if request.ByteSize() < PART_BYTES:
                try:
                    with self._errors(deadline):
                        answer: PutInlineResponse = await self.storage.PutInline(
                            request, timeout=deadline.remaining(), metadata=self._metadata()
                        )
                    return answer.put
                except LimitExceededError as error:  # a stream keeps its values until there is capacity
                    if error.metadata.get("limit_name") != WAITING_BYTES:
                        raise
        if header.size_bytes >= SHARED_FROM_BYTES:
            await self._find_on_host(deadline)
        with self._link.session() as session, self._errors(deadline):
            header.shared_memory_session = b"" if session is None else session.session_id
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
        reader = AnswerReader(row_count)
        with self._link.session() as session, self._errors(deadline):
            request.shared_memory_session = b"" if session is None else session.session_id
            if session is not None or size_bytes is None:
                size_bytes = self._sizes.expected_bytes(request, row_count)
            answer = None
            if size_bytes <= INLINE_BYTES and request.ByteSize() < PART_BYTES - _INLINE_TAG_BYTES:
                inline = GetInlineRequest(get=request)
                answer = await self.storage.GetInline(inline, timeout=deadline.remaining(), metadata=self._metadata())
            if answer is None or not answer.HasField("header"):  # it is too large for one message
                await self._get_stream(request, reader, session, deadline)
            else:
                reader.take(answer.header)
                if reader.offer is not None:
                    await async_in_thread(reader.receive_shared, session)
                reader.take(memoryview(answer.values))
        self._sizes.note(request, row_count, reader.sent_bytes)
        return reader.finish()

    async def _get_stream(
        self, request: GetRequest, reader: AnswerReader, session: FdChannel | None, deadline: Deadline
    ) -> None:
        parts = in_parts(request.SerializeToString(), "get")
        ask, request_parts = (self._get, parts[0]) if len(parts) == 1 else (self._get_in_parts, iter(parts))
        stream = ask(request_parts, timeout=deadline.remaining(), metadata=self._metadata())
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
