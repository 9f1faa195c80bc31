"""What differs between asyncio and threads: each thing in two forms with one interface, see `scripts/unasync.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import grpc

from tq_service.errors import UnavailableError
from tq_service.v1.storage_service_pb2 import PutHeader, PutResponse
from tq_service.wire.columns import SEND_AS_FRAMES, SEND_AS_KEY, FrameParts, encode_part
from tq_service.wire.connection import Metadata
from tq_service.wire.messages import in_parts

if TYPE_CHECKING:
    from tq_service.v1.storage_service_pb2_grpc import StorageServiceAsyncStub, StorageServiceStub

    AsyncStorageStub = StorageServiceAsyncStub
    StorageStub = StorageServiceStub

T = TypeVar("T")
P = ParamSpec("P")

_LOST_STATUS = "Internal error from Core"


async def async_in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a call returns that blocks for a while."""
    return await asyncio.to_thread(call, *args, **kwargs)


def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a call returns: the caller's thread may block."""
    return call(*args, **kwargs)


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
        if self._stream is None:  # all at once: this thread handles the call's events itself, which is faster
            answer: PutResponse = self._call(iter(self._messages.get, None), **self._options)
        else:
            answer = self._stream.result()
        return answer

    def cancel(self) -> None:
        """End the call, if it has not ended."""
        self._messages.put(None)
        if self._stream is not None:
            self._stream.cancel()
