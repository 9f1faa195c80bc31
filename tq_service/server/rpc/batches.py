"""Streams of unary calls (CallMany). Each call in a stream is handled as if it were made separately.

    read stream -> run each call in a task, with all middleware -> collect responses -> write responses

A stream grants no extra permissions. `Services` uses the stream's metadata to find each call's handler, as it does for
separate calls. The handler receives a context with a single request and a separate deadline. Streams avoid gRPC's
per-call overhead, which dominates the cost of small calls.

A call is open until its response has been written. If a stream has too many open calls, the service stops reading from
the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import grpc

from tq_service.errors import DeadlineError, InvalidArgumentError, TqError, UnavailableError
from tq_service.schema import check_range
from tq_service.server.rpc.calls import Handler, Services
from tq_service.server.rpc.inbox import WaitingCalls, needs_no_turn
from tq_service.server.rpc.methods import METHODS, Context, EndableCalls
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.connection import (
    MOST_BATCHED_CALLS,
    MOST_BATCHED_METADATA_BYTES,
    MOST_BATCHED_REQUEST_BYTES,
)
from tq_service.wire.error_table import to_status
from tq_service.wire.messages import read_seconds

_MOST_UNWRITTEN_BYTES: Final = 1 << 20
"""Maximum size, in bytes, of a stream's unwritten responses, and of a message that contains several responses."""

_MOST_STREAMS: Final = 256  # each stream may keep an incomplete message in memory
_MOST_STREAMS_OF_ONE: Final = 2  # a client with a new token opens a second stream while the first stream has open calls
_CALLS_A_TURN: Final = 16
_LAST_WRITE_SECONDS: Final = 1.0
_NAMES: Final = {method.short_name: method.name for method in METHODS.values() if method.is_batched}


class _Details(NamedTuple):
    """A replacement for gRPC's `HandlerCallDetails` that holds the details known before the request is read."""

    method: str
    invocation_metadata: Any


class _Call:
    """A call in a stream. The call object also serves as the gRPC context passed to the handler.

    A call ends once its response has been written. A cancelled call ends without a response.

    Attributes:
        call_id: id chosen by the client.
        task: task that runs the handler.
        answer: the handler's serialized response.
        status: serialized status of a failed call, or empty if the call has not failed.
        is_late: whether the call's deadline has passed.
        is_unwanted: whether the call was cancelled.
        is_begun: whether the task has started running.
        is_answered: whether the handler has returned or failed.
    """

    __slots__ = (
        "_callbacks", "_code", "_ends_at", "_metadata", "_request", "_stream", "answer", "call_id", "is_answered",
        "is_begun", "is_late", "is_unwanted", "status", "task", "timer",
    )  # fmt: skip

    def __init__(self, stream: Context, asked: pb.BatchedCall) -> None:
        self._stream = stream
        self._request: bytes | None = asked.request
        self._metadata = tuple(asked.metadata.items())
        self._callbacks: list[Callable[[Any], object]] = []
        self._code: grpc.StatusCode | None = None
        self._ends_at: float | None = None
        if asked.HasField("timeout"):
            seconds = read_seconds("timeout", asked.timeout)
            check_range("timeout", seconds, 0)
            self._ends_at = time.monotonic() + seconds
        self.call_id = asked.call_id
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.answer = self.status = b""
        self.is_late = self.is_unwanted = self.is_begun = self.is_answered = False

    # Methods of a gRPC context, used by handlers and middleware

    async def read(self) -> Any:
        """Return the request on the first call and EOF on later calls."""
        request, self._request = self._request, None
        return grpc.aio.EOF if request is None else request

    def peer(self) -> str:
        """Return the name by which gRPC identifies the client."""
        return self._stream.peer()

    def auth_context(self) -> Any:
        """Return the properties of the client's TLS certificate."""
        return self._stream.auth_context()

    def invocation_metadata(self) -> Any:
        """Return the call's own metadata, such as the trace context. The token is in the stream's metadata."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Return the number of seconds until the call's deadline, or None if the call has no deadline."""
        if self._ends_at is None:
            return None
        return 0.0 if self.is_late else max(0.0, self._ends_at - time.monotonic())

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` with this context when the call ends."""
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Return whether the call was cancelled. The response to a cancelled call is not written."""
        return self.is_unwanted

    def code(self) -> grpc.StatusCode | None:
        """Return the status code of an aborted call, or None if the call was not aborted."""
        return self._code

    async def abort_with_status(self, status: grpc.Status) -> None:
        """Abort the call with a status. Always raises `AbortError`."""
        self._code = status.code
        trailers: Any = status.trailing_metadata
        ((_, self.status),) = trailers
        raise grpc.aio.AbortError

    # Methods that the stream calls

    def expire(self) -> None:
        """Cancel the handler because the call's deadline has passed."""
        self.is_late = True
        if self.task is not None:
            self.task.cancel()

    def end(self) -> None:
        """Run the callbacks registered with `add_done_callback`."""
        if self.timer is not None:
            self.timer.cancel()
        for callback in self._callbacks:
            callback(self)


class _Stream:
    """An open stream of calls.

    Args:
        services: gRPC services that provide the handlers for the calls.
        context: gRPC context of the stream.
    """

    def __init__(self, services: Services, context: Context) -> None:
        self._services = services
        self._context = context
        self._metadata = context.invocation_metadata()
        self._open: dict[int, _Call] = {}
        self._answered: list[_Call] = []  # open calls whose response has not been written yet
        self._unwritten_bytes = 0
        self._is_closing = self._is_stopped = False
        self._has_answers = asyncio.Event()
        self._has_place = asyncio.Event()
        self._is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle_since = time.monotonic()  # valid while the stream has no open calls
        self._writing_since: float | None = None

    async def run(self, requests: Any) -> None:
        """Handle calls until the stream ends.

        Raises:
            InvalidArgumentError: the client sent an invalid message.
            UnavailableError: the service is draining.
        """
        reader = asyncio.ensure_future(self._read_all(requests))
        writer = asyncio.ensure_future(self._write_all())
        try:
            await asyncio.wait((reader, writer, self._is_over), return_when=asyncio.FIRST_COMPLETED)
            for part in (reader, writer, self._is_over):
                if part.done():
                    part.result()
            reader.cancel()
            self._is_closing = True
            self._has_answers.set()
            await writer
            if self._is_over.done():
                self._is_over.result()
                raise UnavailableError("the service is shutting down and accepts no further calls; retry later")
        finally:
            reader.cancel()
            self._is_over.cancel()
            # Give a write time to finish, because gRPC loses the stream's status if the write is cancelled. Responses
            # that are being written may still arrive, so their claims must not be released.
            self._is_stopped = True
            self._has_answers.set()
            await asyncio.wait((writer,), timeout=_LAST_WRITE_SECONDS)
            writer.cancel()
            for call in list(self._open.values()):
                self._cancel(call)
            await asyncio.gather(reader, writer, self._is_over, return_exceptions=True)

    def close(self) -> None:
        """End the stream once all open calls have received a response."""
        if not self._is_over.done():
            self._is_over.set_result(None)

    def stall(self, most_seconds: float) -> DeadlineError | None:
        """Return an error if the client was idle or left a response unread for `most_seconds`, otherwise None."""
        since = self._writing_since
        if since is None and not self._open:
            since = self._idle_since
        if since is None or time.monotonic() - since < most_seconds:
            return None
        return DeadlineError(
            f"the client sent no call or read no response within {most_seconds:g} s (stall_seconds). Open a new "
            "stream for the next call",
            metadata={"limit_name": "stall_seconds", "limit": f"{most_seconds:g}"},
        )

    async def _read_all(self, requests: Any) -> None:
        needs_no_turn.set(True)
        async for message in requests:
            if len(message.calls) > MOST_BATCHED_CALLS:
                raise InvalidArgumentError(
                    f"a message contains {len(message.calls)} calls; expected at most {MOST_BATCHED_CALLS}",
                    field="calls",
                )
            for call_id in message.cancelled_call_ids:
                if (call := self._open.get(call_id)) is not None:
                    self._cancel(call)
            for number, asked in enumerate(message.calls, 1):
                while len(self._open) >= MOST_BATCHED_CALLS or self._unwritten_bytes >= _MOST_UNWRITTEN_BYTES:
                    self._has_place.clear()
                    await self._has_place.wait()
                self._start(asked)
                if number % _CALLS_A_TURN == 0:
                    await asyncio.sleep(0)  # yield to other calls of the service

    def _start(self, asked: pb.BatchedCall) -> None:
        name = _NAMES.get(asked.method)
        if name is None:
            raise InvalidArgumentError(
                f"method is {asked.method[:64]!r}; expected one of {', '.join(_NAMES)}", field="calls.method"
            )
        if asked.call_id in self._open:
            raise InvalidArgumentError(
                f"call_id {asked.call_id} is already used by another open call in this stream; use a unique call_id",
                field="calls.call_id",
            )
        call = _Call(self._context, asked)
        _check_size("request", len(asked.request), MOST_BATCHED_REQUEST_BYTES)
        size = sum(len(key.encode()) + len(value.encode()) for key, value in call.invocation_metadata())
        _check_size("metadata", size, MOST_BATCHED_METADATA_BYTES)
        details: Any = _Details(name, self._metadata)
        handler: Any = self._services.service(details)
        loop = asyncio.get_running_loop()
        self._open[call.call_id] = call
        call.task = loop.create_task(self._handle(call, handler))
        remaining = call.time_remaining()
        if remaining is not None:
            call.timer = loop.call_later(remaining, call.expire)

    async def _handle(self, call: _Call, handler: Handler) -> None:
        """Run a call's handler and queue the response for writing."""
        made: Any = handler
        call.is_begun = True
        try:
            call.answer = made.response_serializer(await made.stream_unary(None, call))
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            call.is_unwanted |= not call.is_late
            call.status = to_status(DeadlineError("the call's deadline has passed")).SerializeToString()
        except Exception as error:
            if not self._is_over.done():
                self._is_over.set_exception(error)
            call.is_unwanted = True
        call.is_answered = True
        if call.is_unwanted:
            self._end(call)
            return
        self._answered.append(call)
        self._unwritten_bytes += len(call.answer)
        self._has_answers.set()

    def _cancel(self, call: _Call) -> None:
        """Cancel a call. If the call's task has already started, the task ends the call later."""
        if call.is_unwanted:
            return
        call.is_unwanted = True
        if call.task is not None and not call.is_answered:
            call.task.cancel()
        if call.is_answered or not call.is_begun:
            self._end(call)

    def _end(self, call: _Call) -> None:
        del self._open[call.call_id]
        if not self._open:
            self._idle_since = time.monotonic()
        call.end()
        self._has_place.set()
        self._has_answers.set()  # wakes the writer, which returns after the last call of a closing stream

    async def _write_all(self) -> None:
        """Write responses as they become ready, until the stream is closing and has no more open calls."""
        while not self._is_stopped and (self._open or not self._is_closing):
            await self._has_answers.wait()
            self._has_answers.clear()
            while self._answered and not self._is_stopped:
                await self._write(self._taken())

    def _taken(self) -> list[_Call]:
        """Remove and return the completed calls whose responses fit into the next message."""
        size = count = 0
        for call in self._answered:
            size += len(call.answer)
            if count and size > _MOST_UNWRITTEN_BYTES:
                break
            count += 1
        taken, self._answered = self._answered[:count], self._answered[count:]
        return taken

    async def _write(self, calls: list[_Call]) -> None:
        message = pb.CallManyResponse()
        add = message.answers.add
        for call in calls:
            self._unwritten_bytes -= len(call.answer)
            if not call.is_unwanted:
                add(call_id=call.call_id, answer=call.answer, status=call.status)
        self._has_place.set()
        if message.answers:
            self._writing_since = time.monotonic()
            await self._context.write(message)
            self._writing_since = None
        for call in calls:
            if not call.is_unwanted:
                self._end(call)


def _check_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise InvalidArgumentError(
            f"the {name} of a call is {size} bytes; expected at most {most}. Make this call outside the stream.",
            field=f"calls.{name}",
        )


class Batches:
    """Handles the `CallMany` streams of a server. Use this class only on the server's event loop.

    Args:
        services: gRPC services that provide the handlers for the calls.
        stall_seconds: time after which a stream is ended if the client neither sends calls nor reads responses.
    """

    def __init__(self, services: Services, stall_seconds: float) -> None:
        self._services = services
        self._stall_seconds = stall_seconds
        self._places = WaitingCalls(_MOST_STREAMS, _MOST_STREAMS_OF_ONE, "call_streams")
        self._streams: set[_Stream] = set()
        self._running = EndableCalls()

    async def run(self, requests: Any, context: Context) -> None:
        """Handle the calls in a stream until the stream ends.

        Raises:
            LimitExceededError: too many streams are open.
            TqError: see `CallMany`.
        """
        with self._places.one(context):
            stream = _Stream(self._services, context)
            self._streams.add(stream)
            try:
                await self._running.run(stream.run(requests), stream)
            finally:
                self._streams.discard(stream)

    def end_stalled(self) -> None:
        """End stalled streams. Call this method about once per second."""

        def error_of(stream: _Stream) -> TqError | None:
            return stream.stall(self._stall_seconds)

        self._running.end(error_of)

    def drain(self) -> None:
        """End each stream once all its open calls have received a response."""
        for stream in self._streams:
            stream.close()
