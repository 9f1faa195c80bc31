"""Multiplexes the calls of one event loop on a single stream.

    sent -> answered or failed, each call with a separate status
         -> the stream breaks: UNAVAILABLE, so that the caller retries with the same request id
         -> the stream is refused: `RefusedError`, so that the caller makes a separate call at once

If a call is cancelled or reaches its deadline before it is sent, it is dropped. If the call has already been sent, it
is cancelled at the service. A stream ends after a few seconds without calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import grpc
from google.rpc.status_pb2 import Status

from tq_service.v1.controller_service_pb2 import BatchedAnswer, CallManyRequest, CallManyResponse
from tq_service.wire.connection import MOST_BATCHED_CALLS, Metadata
from tq_service.wire.error_table import STATUS_TRAILER
from tq_service.wire.messages import to_duration

_IDLE_SECONDS: Final = 5.0
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_BROKEN: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


class RefusedError(Exception):
    """The stream was rejected or ended normally, so its calls must be made separately."""


class CallStream:
    """A stream of multiplexed calls.

    Args:
        channel: the channel on which to open the stream.
        name: full name of the method `CallMany`.
        token: authorization metadata sent with the calls.

    Attributes:
        token: authorization metadata sent with the calls.
        is_over: whether the stream has ended and accepts no more calls.
        is_refused: whether the service ended the stream with a permanent error.
        ended_at: time when the stream ended, on the `time.monotonic` clock.
    """

    def __init__(self, channel: Any, name: str, token: Metadata | None) -> None:
        self.token = token
        self.is_over = self.is_refused = False
        self.ended_at = 0.0
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._next = CallManyRequest()  # not sent yet
        self._has_more = asyncio.Event()
        self._used_at = time.monotonic()
        make = channel.stream_stream(
            name,
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
        """Whether another call can be added to the stream."""
        return len(self._waiting) < MOST_BATCHED_CALLS

    async def make(self, method: str, request: bytes, seconds: float, trace: Metadata) -> bytes:
        """Make a call on the stream, and return the serialized response.

        Args:
            method: name of the method, such as "GetMeta".
            request: the serialized request.
            seconds: timeout of the call in seconds.
            trace: metadata that contains the call's trace context.

        Raises:
            grpc.RpcError: the call failed, or the stream broke.
            RefusedError: the call was not made on this stream.
        """
        call_id = next(self._ids)
        answered = self._waiting[call_id] = self._loop.create_future()
        asked = self._next.calls.add(call_id=call_id, method=method, request=request, timeout=to_duration(seconds))
        if trace:
            asked.metadata.update(trace)
        self._has_more.set()
        timer = self._loop.call_later(seconds, _expire, answered)
        try:
            data: bytes = await answered
            return data
        finally:
            timer.cancel()
            if self._waiting.pop(call_id, None) is not None and not self.is_over:
                self._drop(call_id)
            self._used_at = time.monotonic()

    def _drop(self, call_id: int) -> None:
        """Remove a call if it has not been sent yet. Otherwise, cancel it at the service."""
        for place, asked in enumerate(self._next.calls):
            if asked.call_id == call_id:
                del self._next.calls[place]
                return
        self._next.cancelled_call_ids.append(call_id)
        self._has_more.set()

    async def _write_all(self) -> None:
        with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the stream has ended; the reader reports why
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
            self._end(lambda answered: answered.set_exception(RefusedError()))

    def _take(self, answer: BatchedAnswer) -> None:
        answered = self._waiting.get(answer.call_id)
        if answered is None or answered.done():  # cancelled, or late
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
        """End the stream, and pass the future of each waiting call to `end`."""
        self.is_over, self.ended_at = True, time.monotonic()
        self._writer.cancel()
        self._timer.cancel()
        for answered in self._waiting.values():
            if not answered.done():
                end(answered)

    def _end_if_idle(self) -> None:
        """End the stream if it has been idle for `_IDLE_SECONDS`. Otherwise, schedule another check."""
        left = self._used_at + _IDLE_SECONDS - time.monotonic()
        if self._waiting or left > 0:
            self._timer = self._loop.call_later(max(left, _IDLE_SECONDS / 2), self._end_if_idle)
        else:
            self.is_over = True
            self._has_more.set()

    def close(self) -> None:
        """End the stream and cancel all of its calls."""
        self._end(asyncio.Future.cancel)
        self._reader.cancel()
        self._call.cancel()


def _expire(answered: asyncio.Future[bytes]) -> None:
    if not answered.done():
        none, code = grpc.aio.Metadata(), grpc.StatusCode.DEADLINE_EXCEEDED
        answered.set_exception(grpc.aio.AioRpcError(code, none, none, details="Deadline Exceeded"))


def _copied(failure: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """Return a copy of an error. Each call needs its own copy, because raising an error adds a traceback."""
    return grpc.aio.AioRpcError(
        failure.code(),
        failure.initial_metadata(),
        failure.trailing_metadata(),
        details=failure.details(),
        debug_error_string=failure.debug_error_string(),
    )
