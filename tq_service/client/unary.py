"""Unary calls on one channel: each by itself, or in a stream with others of the same event loop.

A call of a method that may be batched goes in a stream if another such call is under way at that moment, which costs
both sides a third of a call by itself. One alone goes by itself, as do all calls where the service refuses streams.

    alone, or no place -> by itself
    in a stream -> answered | failed, with its own status
                -> the stream breaks: as UNAVAILABLE, so the caller tries it again under the same id
                -> the stream is refused: by itself, at once

Threads share no stream: it would take two more threads, and gain little (docs/adr/0046).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from tq_service.client.transport import Deadline, Method, method_of
from tq_service.client_probes import carriers
from tq_service.v1.controller_service_pb2 import BatchedAnswer, CallManyRequest, CallManyResponse
from tq_service.wire.connection import (
    MOST_BATCHED_CALLS,
    MOST_BATCHED_METADATA_BYTES,
    MOST_BATCHED_REQUEST_BYTES,
    Metadata,
    in_parts,
)
from tq_service.wire.error_table import STATUS_TRAILER
from tq_service.wire.messages import to_duration

Response = TypeVar("Response", bound=Message)

_IDLE_SECONDS: Final = 5.0
_REFUSED_SECONDS: Final = 10.0
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_BROKEN: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def carried() -> Metadata:
    """Return what tells the trace of a call, nothing where calls are not traced."""
    return tuple(pair for carry in carriers for pair in carry()) if carriers else ()


def metadata_of(token: Metadata | None, trace: Metadata) -> Metadata | None:
    """Return the metadata of a call by itself."""
    return (*(token or ()), *trace) if trace else token


class _Calls:
    """What both forms share.

    Args:
        channel: on which calls are made.
        token: returns the metadata that says whose calls they are.
    """

    def __init__(self, channel: Any, token: Callable[[], Metadata | None]) -> None:
        self._channel = channel
        self._token = token
        self._opened: dict[tuple[type[Message], bool], Any] = {}

    def _alone(self, kind: type[Response], request: bytes, deadline: Deadline) -> Any:
        """Begin a call by itself, of a serialized request, and return it; in parts if it is large."""
        name = method_of(kind.DESCRIPTOR).name
        first, *others = in_parts(request, name)
        key = kind, bool(others)
        call = self._opened.get(key)
        if call is None:
            make = self._channel.stream_unary if others else self._channel.unary_unary
            call = self._opened[key] = make(name, response_deserializer=kind.FromString)
        metadata = metadata_of(self._token(), carried())
        return call(iter((first, *others)) if others else first, timeout=deadline.remaining(), metadata=metadata)


class UnaryCalls(_Calls):
    """Calls of threads."""

    def make(self, kind: type[Response], request: bytes, deadline: Deadline) -> Response:
        """Return the answer to a serialized request.

        Raises:
            grpc.RpcError: the call has failed.
            InvalidArgumentError: the request is larger than a service takes.
        """
        answer: Response = self._alone(kind, request, deadline)
        return answer

    def close(self) -> None:
        """Do nothing: all calls are on the channel."""


class AsyncUnaryCalls(_Calls):
    """Calls of one event loop."""

    def __init__(self, channel: Any, token: Callable[[], Metadata | None]) -> None:
        super().__init__(channel, token)
        self._streams: list[_Stream] = []  # the last one takes calls; others, with older tokens, end with their calls
        self._under_way = 0  # calls that may be batched
        self._alone_until = 0.0

    async def make(self, kind: type[Response], request: bytes, deadline: Deadline) -> Response:
        """Return the answer to a serialized request.

        Raises:
            grpc.RpcError: the call has failed.
            InvalidArgumentError: the request is larger than a service takes.
        """
        method = method_of(kind.DESCRIPTOR)
        if method.is_batched:
            self._under_way += 1
        try:
            if method.is_batched and self._under_way > 1 and len(request) <= MOST_BATCHED_REQUEST_BYTES:
                trace, stream = carried(), self._stream()
                if stream is not None and _size_of(trace) <= MOST_BATCHED_METADATA_BYTES:
                    with suppress(_RefusedError):
                        return kind.FromString(await stream.make(method, request, deadline, trace))
            answer: Response = await self._alone(kind, request, deadline)
            return answer
        finally:
            if method.is_batched:
                self._under_way -= 1

    def _stream(self) -> _Stream | None:
        """Return the stream that takes another call, None if there is none."""
        token, stream = self._token(), self._streams[-1] if self._streams else None
        if stream is not None and not stream.is_over and stream.token == token:
            return stream if stream.has_place else None
        if stream is not None and stream.is_refused:
            self._alone_until = stream.ended_at + _REFUSED_SECONDS
        if time.monotonic() < self._alone_until:
            return None
        stream = _Stream(self._channel, token)
        self._streams = [*(each for each in self._streams if not each.is_over), stream]
        return stream

    def close(self) -> None:
        """Cancel the calls in streams."""
        for stream in self._streams:
            stream.close()


class _RefusedError(Exception):
    """The stream was refused, or ended without being broken: its calls go by themselves."""


class _Stream:
    """Calls that go together.

    Args:
        channel: on which it is opened.
        token: metadata that says whose calls they are.

    Attributes:
        token: as given.
        is_over: whether it takes no more calls.
        is_refused: whether the service has ended it with an error that is not a matter of time.
        ended_at: when it did, by `time.monotonic`.
    """

    def __init__(self, channel: Any, token: Metadata | None) -> None:
        self.token = token
        self.is_over = self.is_refused = False
        self.ended_at = 0.0
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._next = CallManyRequest()  # what was not sent yet
        self._has_more = asyncio.Event()
        self._used_at = time.monotonic()
        make = channel.stream_stream(
            method_of(CallManyResponse.DESCRIPTOR).name,
            request_serializer=CallManyRequest.SerializeToString,
            response_deserializer=CallManyResponse.FromString,
        )
        self._call = make(metadata=token)
        self._loop = asyncio.get_running_loop()
        self._writer = self._loop.create_task(self._write_all())
        self._reader = self._loop.create_task(self._read_all())
        self._timer = self._loop.call_later(_IDLE_SECONDS, self._end_if_idle)

    @property
    def has_place(self) -> bool:
        """Whether another call may be under way."""
        return len(self._waiting) < MOST_BATCHED_CALLS

    async def make(self, method: Method, request: bytes, deadline: Deadline, trace: Metadata) -> bytes:
        """Return the serialized answer of a call.

        Raises:
            grpc.RpcError: the call has failed, or the stream was broken.
            _RefusedError: it was not made here.
        """
        call_id, remaining = next(self._ids), deadline.remaining()
        answered = self._waiting[call_id] = self._loop.create_future()
        asked = self._next.calls.add(
            call_id=call_id, method=method.short_name, request=request, timeout=to_duration(remaining)
        )
        if trace:
            asked.metadata.update(trace)
        self._has_more.set()
        timer = self._loop.call_later(remaining, _expire, answered)
        try:
            data: bytes = await answered
            return data
        finally:
            timer.cancel()
            if self._waiting.pop(call_id, None) is not None and not self.is_over:
                self._drop(call_id)
            self._used_at = time.monotonic()

    def _drop(self, call_id: int) -> None:
        """Have a call not made, or cancelled if it was sent."""
        for place, asked in enumerate(self._next.calls):
            if asked.call_id == call_id:
                del self._next.calls[place]
                return
        self._next.cancelled_call_ids.append(call_id)
        self._has_more.set()

    async def _write_all(self) -> None:
        with suppress(grpc.RpcError, asyncio.InvalidStateError):  # of a call that is over: its reader knows why
            while not self.is_over:
                await self._has_more.wait()
                self._has_more.clear()
                message, self._next = self._next, CallManyRequest()
                if message.calls or message.cancelled_call_ids:
                    await self._call.write(message)
            await self._call.done_writing()

    async def _read_all(self) -> None:
        failure: grpc.aio.AioRpcError | None = None
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                for answer in message.answers:
                    self._take(answer)
        except grpc.aio.AioRpcError as error:
            failure = error
        except asyncio.CancelledError:
            self._end(asyncio.Future.cancel)
            raise
        if failure is not None and failure.code() in _BROKEN:
            broken = failure
            self._end(lambda answered: answered.set_exception(_copied(broken)))
        else:
            self.is_refused = failure is not None
            self._end(lambda answered: answered.set_exception(_RefusedError()))

    def _take(self, answer: BatchedAnswer) -> None:
        answered = self._waiting.get(answer.call_id)
        if answered is None or answered.done():  # it was cancelled, or is late
            return
        del self._waiting[answer.call_id]
        if not answer.status:
            answered.set_result(answer.answer)
            return
        status = Status.FromString(answer.status)
        trailers = grpc.aio.Metadata((STATUS_TRAILER, answer.status))
        code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        answered.set_exception(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details=status.message))

    def _end(self, end: Callable[[asyncio.Future[bytes]], object]) -> None:
        """End all calls, each in this way."""
        self.is_over, self.ended_at = True, time.monotonic()
        self._writer.cancel()
        self._timer.cancel()
        for answered in self._waiting.values():
            if not answered.done():
                end(answered)

    def _end_if_idle(self) -> None:
        """Have the stream end if it was not used for long."""
        left = self._used_at + _IDLE_SECONDS - time.monotonic()
        if self._waiting or left > 0:
            self._timer = self._loop.call_later(max(left, _IDLE_SECONDS / 2), self._end_if_idle)
        else:
            self.is_over = True
            self._has_more.set()

    def close(self) -> None:
        """Cancel all calls."""
        self._end(asyncio.Future.cancel)
        self._reader.cancel()
        self._call.cancel()


def _expire(answered: asyncio.Future[bytes]) -> None:
    if not answered.done():
        none, code = grpc.aio.Metadata(), grpc.StatusCode.DEADLINE_EXCEEDED
        answered.set_exception(grpc.aio.AioRpcError(code, none, none, details="Deadline Exceeded"))


def _copied(failure: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """Return an error for one of several calls, each of which adds its frames."""
    return grpc.aio.AioRpcError(
        failure.code(),
        failure.initial_metadata(),
        failure.trailing_metadata(),
        details=failure.details(),
        debug_error_string=failure.debug_error_string(),
    )


def _size_of(metadata: Sequence[tuple[str, str]]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in metadata)
