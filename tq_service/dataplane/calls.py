"""What the driver of a storage service shares between its two forms, and each thing in which these differ, in both.

`scripts/unasync.py` makes the form for threads of that for asyncio by putting the second in the place of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import grpc

from tq_service.dataplane.receiving import AnswerSizes, Received
from tq_service.dataplane.shared_memory.client import HostLink
from tq_service.errors import UnavailableError
from tq_service.v1.storage_service_pb2 import GetRequest, PutHeader, PutResponse
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub
from tq_service.wire.columns import SEND_AS_FRAMES, SEND_AS_KEY, Column, FrameParts, decode_get_response, encode_part
from tq_service.wire.connection import Metadata
from tq_service.wire.messages import in_parts

T = TypeVar("T")

_SERVICE = "/tq_service.v1.StorageService/"
_LOST_STATUS = "Internal error from Core"


class Deadline(Protocol):
    """When a call must have ended."""

    def remaining(self) -> float:
        """Return the seconds left, 0 when it has passed."""
        ...


@dataclass(frozen=True, slots=True)
class Seconds:
    """A deadline that begins with each call."""

    seconds: float

    def remaining(self) -> float:
        """Return the seconds that each call has."""
        return self.seconds


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


class StorageCalls:
    """The methods of a storage service on one channel, of either form: unary ones as `storage`, puts and gets apart.

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
        errors: Callable[[Any], AbstractContextManager[None]],
        link: HostLink | None = None,
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
        self._sizes = AnswerSizes()


async_in_thread = asyncio.to_thread


def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Return what a call returns: the caller's thread may block."""
    return call(*arguments)


class AsyncPutCall:
    """One put, of an asyncio channel.

    grpc's asyncio calls lose the status of a call that is refused while they write: it becomes INTERNAL, "Internal
    error from Core". So a put waits until the storage service says that there is capacity, before its first frame.

    Args:
        call: the method of the channel.
        timeout: seconds until the call ends.
        metadata: of the call.
    """

    def __init__(self, call: Any, timeout: float, metadata: Metadata | None) -> None:
        self._stream = call(timeout=timeout, metadata=metadata)

    async def start(self, header: PutHeader) -> str | None:
        """Send the header; return how the bytes are to be sent, None where the call has ended: `answer` says how."""
        # Where a call ends before it has begun, by a close of its channel, grpc waits for ever with its first message.
        parts = in_parts(encode_part(header), "put")
        writing = asyncio.ensure_future(self._stream.write(parts[0]))
        self._stream.add_done_callback(lambda _: writing.cancel())
        try:
            await writing
            for part in parts[1:]:
                await self._stream.write(part)
            # Older versions of grpcio have keys() of pairs, which dict() would look up; so it gets an iterator.
            return dict(iter(await self._stream.initial_metadata())).get(SEND_AS_KEY)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return None
        except asyncio.CancelledError:
            if not self._stream.done():
                raise
            return None

    async def send(self, frames: Iterable[FrameParts]) -> None:
        """Send frames, as long as the call has not ended: `answer` says how."""
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            for frame in frames:
                await self._stream.write(frame)

    async def answer(self) -> PutResponse:
        """Send no more, and return the answer.

        Raises:
            grpc.RpcError: the call failed.
            UnavailableError: it ended while frames were sent, and why is lost; another attempt will tell.
        """
        try:
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await self._stream.done_writing()
            answer: PutResponse = await self._stream
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST_STATUS:
                raise UnavailableError("the put was broken off by the service or the network") from None
            raise
        return answer

    def cancel(self) -> None:
        """End the call, if it has not ended."""
        self._stream.cancel()


class PutCall:
    """One put, of a channel for threads; see `AsyncPutCall`."""

    def __init__(self, call: Any, timeout: float, metadata: Metadata | None) -> None:
        self._call = call
        self._options: dict[str, Any] = {"timeout": timeout, "metadata": metadata}
        self._messages: SimpleQueue[bytes | FrameParts | None] = SimpleQueue()
        self._stream: Any = None

    def start(self, header: PutHeader) -> str | None:
        """Send the header; return how the bytes are to be sent: without a session frames may follow at once."""
        for part in in_parts(encode_part(header), "put"):
            self._messages.put(part)
        if not header.shared_memory_session:
            return SEND_AS_FRAMES
        self._stream = self._call.future(iter(self._messages.get, None), **self._options)
        return dict(self._stream.initial_metadata()).get(SEND_AS_KEY)

    def send(self, frames: Iterable[FrameParts]) -> None:
        """Send frames."""
        for frame in frames:
            self._messages.put(frame)

    def answer(self) -> PutResponse:
        """Send no more, and return the answer.

        Raises:
            grpc.RpcError: the call failed.
        """
        self._messages.put(None)
        # Without a stream all at once: this thread handles the call's events itself, which is faster.
        at_once = self._stream is None
        answer: PutResponse = (
            self._call(iter(self._messages.get, None), **self._options) if at_once else self._stream.result()
        )
        return answer

    def cancel(self) -> None:
        """End the call, if it has not ended."""
        self._messages.put(None)
        if self._stream is not None:
            self._stream.cancel()
