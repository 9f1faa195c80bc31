"""Calls with a deadline, tried again while the service is unavailable, their errors typed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc

from tq_service.client._async.channels import AsyncChannels, AsyncEndpoint
from tq_service.client.concurrency import async_in_thread, async_is_of_closing, async_sleep
from tq_service.client.heap import keep_frame_buffers
from tq_service.client.put_streams import async_send_put
from tq_service.client.reads import AnswerReader, Received
from tq_service.client.retry import Backoff, Deadline, error_of
from tq_service.dataplane.shared_memory.client import SHARED_FROM_BYTES
from tq_service.errors import CallCancelledError, TqError, UnavailableError
from tq_service.v1.storage_service_pb2 import (
    GetInlineRequest,
    GetRequest,
    PutHeader,
    PutInlineRequest,
    PutResponse,
    StatRequest,
)
from tq_service.wire.columns import Column
from tq_service.wire.credentials import Credentials
from tq_service.wire.error_table import status_from_trailers
from tq_service.wire.frames import INLINE_BYTES, iter_frames

T = TypeVar("T")

_ASK_SECONDS: Final = 5.0

if TYPE_CHECKING:
    Request = TypeVar("Request")
    Response = TypeVar("Response")
    Picks = Callable[[AsyncEndpoint], grpc.aio.UnaryUnaryMultiCallable[Request, Response]]


class AsyncCalls:
    """Makes the calls of one client. An address that is empty is the client's own."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.channels = AsyncChannels(address, credentials)

    async def retried(self, attempt: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        """Return what `attempt` returns, trying again with back-off while it fails with UnavailableError."""
        backoff = Backoff(deadline)
        while True:
            try:
                return await attempt()
            except TqError as failure:
                pause = backoff.after(failure)
            await async_sleep(pause)

    async def unary(
        self, pick: Picks[Request, Response], request: Request, deadline: Deadline, address: str = ""
    ) -> Response:
        """Make a unary call, tried again until the deadline."""
        return await self.retried(lambda: self.unary_once(pick, request, deadline, address), deadline)

    async def unary_once(
        self,
        pick: Picks[Request, Response],
        request: Request,
        deadline: Deadline,
        address: str = "",
        *,
        is_retried: bool = True,
    ) -> Response:
        """Make a unary call; `is_retried` tells whether the caller tries again while the service is unavailable."""
        endpoint = self.channels.endpoint(address)
        with self._errors_of(endpoint, deadline, is_retried=is_retried):
            return await pick(endpoint)(request, timeout=deadline.remaining(), metadata=endpoint.metadata())

    @contextmanager
    def _errors_of(self, endpoint: AsyncEndpoint, deadline: Deadline, *, is_retried: bool = True) -> Iterator[None]:
        """Give what a call on a channel raises as TqError, and keep account of whether its service is reached."""
        began = time.monotonic()
        try:
            yield
            endpoint.outage.is_over()
        except grpc.RpcError as error:
            failure = error_of(error, endpoint.address)
            if isinstance(failure, UnavailableError):
                self.channels.follow_files()
                if is_retried:
                    endpoint.outage.lasts(began, failure, deadline.remaining())
            elif status_from_trailers(error.trailing_metadata()) is not None:
                endpoint.outage.is_over()
            raise failure from None
        except BaseException as error:
            if self.channels.closed and async_is_of_closing(error):
                raise CallCancelledError(f"the client was closed during a call (calling {endpoint.address})") from None
            raise

    async def put_once(
        self, header: PutHeader, columns: Sequence[Column], deadline: Deadline, address: str
    ) -> PutResponse:
        """Send a put: in one message where it is small, else as a stream."""
        keep_frame_buffers()
        chunks = (chunk for column in columns for chunk in column.chunks)
        if header.size_bytes <= INLINE_BYTES:
            request = PutInlineRequest(header=header, values=b"".join(chunks))
            answer = await self.unary_once(lambda to: to.storage.PutInline, request, deadline, address)
            return answer.put
        endpoint = self.channels.endpoint(address)
        if header.size_bytes >= SHARED_FROM_BYTES:
            await self._find_on_host(endpoint, deadline)
        with endpoint.link.session() as fd_channel, self._errors_of(endpoint, deadline):
            deposit = None if fd_channel is None else partial(fd_channel.send_fds, header.put_id, columns)
            header.shared_memory_session = b"" if fd_channel is None else fd_channel.session_id
            return await async_send_put(
                endpoint.put, header, iter_frames(chunks), deadline, deposit=deposit, metadata=endpoint.metadata()
            )

    async def get(
        self, request: GetRequest, row_count: int, deadline: Deadline, address: str, patience: Deadline
    ) -> list[Received]:
        """Read cells into fresh memory, from the start again where the service is unavailable in the middle.

        Args:
            request: the cells.
            row_count: number of rows asked for.
            deadline: until when an answer may take.
            address: the storage service.
            patience: until when the service is tried while it is unavailable.
        """
        return await self.retried(lambda: self._get_once(request, row_count, deadline, address), patience)

    async def _get_once(self, request: GetRequest, row_count: int, deadline: Deadline, address: str) -> list[Received]:
        keep_frame_buffers()
        endpoint = self.channels.endpoint(address)
        await self._find_on_host(endpoint, deadline)
        with endpoint.link.session() as fd_channel:
            request.shared_memory_session = b"" if fd_channel is None else fd_channel.session_id
            reader = AnswerReader(row_count, fd_channel)
            with self._errors_of(endpoint, deadline):
                is_sent = endpoint.sent_sizes.is_small(request, row_count) and await self._get_small(
                    endpoint, request, reader, deadline
                )
                if not is_sent:
                    await self._get_stream(endpoint, request, reader, deadline)
            endpoint.sent_sizes.note(request, row_count, reader.sent_bytes)
            return reader.finish()

    async def _get_small(
        self, endpoint: AsyncEndpoint, request: GetRequest, reader: AnswerReader, deadline: Deadline
    ) -> bool:
        """Get in one message; return False where the answer is too large for that."""
        small = GetInlineRequest(get=request)
        answer = await endpoint.storage.GetInline(small, timeout=deadline.remaining(), metadata=endpoint.metadata())
        if not answer.HasField("header"):
            return False
        reader.take(answer.header)
        if reader.has_offer:
            await async_in_thread(reader.receive_shared)
        reader.take(memoryview(answer.values))
        return True

    async def _get_stream(
        self, endpoint: AsyncEndpoint, request: GetRequest, reader: AnswerReader, deadline: Deadline
    ) -> None:
        stream: Any = endpoint.get(request, timeout=deadline.remaining(), metadata=endpoint.metadata())
        try:
            async for part in stream:
                reader.take(part)
                if reader.has_offer:
                    await async_in_thread(reader.receive_shared)
        finally:
            stream.cancel()

    async def _find_on_host(self, endpoint: AsyncEndpoint, deadline: Deadline) -> None:
        """Ask a storage service for its socket for shared memory when that is due, and open a channel there."""
        if not endpoint.link.is_due():
            return
        try:
            with self._errors_of(endpoint, deadline):
                stat = await endpoint.storage.Stat(
                    StatRequest(), timeout=min(deadline.remaining(), _ASK_SECONDS), metadata=endpoint.metadata()
                )
        except TqError:  # the call that is about to be made will say what is wrong
            endpoint.link.postpone()
            return
        await async_in_thread(endpoint.link.open, stat)
