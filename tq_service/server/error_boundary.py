"""The one place where errors become statuses, for every method of every service."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from tq_service.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, TqError
from tq_service.server.await_durable import DurableState, await_durable
from tq_service.server.call_limits import RunningCalls
from tq_service.server.door import Door, Entry
from tq_service.server.permissions import OPEN_METHODS
from tq_service.server.untaken_answers import log_untaken_answers_in_one_line
from tq_service.wire.error_table import to_status
from tq_service.wire.frames import Garbled

_log = logging.getLogger(__name__)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# The last is raised where a message cannot be written since nobody takes it any more.
_NO_FAULTS = (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.InternalError)
# What these tell was durable before anybody could ask for it, or has nothing to do with what is written down.
_WAIT_FOR_NOTHING = OPEN_METHODS | {"/tq_service.v1.StorageService/GetSmall", "/tq_service.v1.StorageService/Stat"}
# What fills a disk; all else may make room, or is small.
_FILL_THE_DISK = frozenset(
    {
        "/tq_service.v1.StorageService/Put",
        "/tq_service.v1.StorageService/PutSmall",
        "/tq_service.v1.ControllerService/CreatePartition",
        "/tq_service.v1.ControllerService/Insert",
        "/tq_service.v1.ControllerService/Commit",
    }
)


class ErrorBoundary:
    """Stands for a server where services are added to it: their errors become `google.rpc.Status`.

    Errors of the hierarchy travel with their text; anything else is a fault of ours, logged whole and sent as INTERNAL
    without its text. Bytes that are no message become INVALID_ARGUMENT.

    Each handler is wrapped once. An interceptor of grpc.aio does the same by two more coroutines for every call.

    Attributes:
        state: what answers wait for to be durable; None: for nothing. To be set before services are added.
        door: what lets calls in; None: all come in. To be set before services are added.
        unserved: methods of the services that are added which this one does not have. To be set before that.
        calls: counts the calls there are, but for those of health checks.
    """

    def __init__(self, server: grpc.aio.Server, calls: RunningCalls | None = None) -> None:
        self._server = server
        log_untaken_answers_in_one_line()
        self.calls = calls or RunningCalls()
        self.state: DurableState | None = None
        self.door: Door | None = None
        self.unserved: frozenset[str] = frozenset()

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Add services; generated code calls this."""
        self._server.add_generic_rpc_handlers(
            [_Guarded(handler, self.state, self.door, self.calls, self.unserved) for handler in handlers]
        )

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Do nothing; generated code calls this too, for methods that were added above."""


class _Guarded(grpc.GenericRpcHandler):
    """A service whose handlers are wrapped, each when its method is first called, with each token anew."""

    def __init__(
        self,
        service: grpc.GenericRpcHandler,
        state: DurableState | None,
        door: Door | None,
        calls: RunningCalls,
        unserved: frozenset[str],
    ) -> None:
        self._service = service
        self._state = state
        self._door = door
        self._calls = calls
        self._unserved = unserved
        self._full: Handler = grpc.stream_unary_rpc_method_handler(self._refuse_unread)
        self._open = Entry()
        self._handlers: dict[str, Handler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of a method, None where this service does not have it."""
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is None:
            handler = None if method in self._unserved else self._service.service(handler_call_details)
            if handler is None:
                return None
            # Inside the door, so that who is not let in neither waits for a disk nor learns how it is.
            handler = self._handlers[method] = _with_durability(handler, method, self._state)
        if self._calls.is_full and method not in OPEN_METHODS:
            return self._full
        entry = self._open if self._door is None else self._door.entry(handler_call_details)
        wrapped = entry.handlers.get(method)
        if wrapped is None:
            wrapped = entry.handlers[method] = _wrap(entry.guard(handler, method), method, self._calls)
        return wrapped

    async def _refuse_unread(self, requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Refuse a call as a method with a stream of requests, none of which is read, whatever it is to others."""
        await _abort(context, self._calls.refusal(), "", self._calls)


def _with_durability(handler: Handler, method: str, state: DurableState | None) -> Handler:
    """Return a handler whose answers wait until they are durable.

    What streams of answers tell is that bytes are there, which was answered before; so they wait for nothing.
    """
    if state is None or method in _WAIT_FOR_NOTHING:
        return handler
    deserialize, serialize = handler.request_deserializer, handler.response_serializer
    fills_disk = method in _FILL_THE_DISK
    if handler.unary_unary is not None:
        behavior = await_durable(handler.unary_unary, state, fills_disk=fills_disk)
        return grpc.unary_unary_rpc_method_handler(behavior, deserialize, serialize)
    if handler.stream_unary is not None:
        behavior = await_durable(handler.stream_unary, state, fills_disk=fills_disk)
        return grpc.stream_unary_rpc_method_handler(behavior, deserialize, serialize)
    return handler


def _wrap(handler: Handler, method: str, calls: RunningCalls) -> Handler:
    deserialize, serialize = _marking_garbage(handler.request_deserializer), handler.response_serializer
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, method, calls), deserialize, serialize)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(_unary(handler.stream_unary, method, calls), deserialize, serialize)
    if handler.unary_stream is not None:
        # A handler that writes through its context, such as Get of the storage service, is awaited like a unary one.
        wrap = _streaming if inspect.isasyncgenfunction(handler.unary_stream) else _unary
        return grpc.unary_stream_rpc_method_handler(wrap(handler.unary_stream, method, calls), deserialize, serialize)
    if handler.stream_stream is not None:
        wrap = _streaming if inspect.isasyncgenfunction(handler.stream_stream) else _unary
        behavior = wrap(_reading(handler.stream_stream), method, calls)
        return grpc.stream_stream_rpc_method_handler(behavior, deserialize, serialize)
    raise TypeError(f"{method} has a handler of an unknown shape, {handler!r}")


def _marking_garbage(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a deserializer that marks garbage: gRPC answers an exception in one with a bare INTERNAL."""
    if deserialize is None:
        return None

    def marked(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Garbled(f"{len(data)} bytes that are no message of this method")

    return marked


def _reading(behavior: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler of streams both ways to which garbage is an error of its stream of requests."""

    async def readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            _refuse_garbage(request)
            yield request

    return lambda requests, context: behavior(readable(requests), context)


def _unary(behavior: Callable[..., Any], method: str, calls: RunningCalls) -> Callable[..., Awaitable[Any]]:
    weight = _weight(method)

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        calls.count += weight
        try:
            _refuse_garbage(request)
            return await behavior(request, context)
        except _NO_FAULTS:
            raise
        except Exception as error:
            return await _abort(context, error, method, calls)
        finally:
            calls.count -= weight

    return call


def _streaming(behavior: Callable[..., Any], method: str, calls: RunningCalls) -> Callable[..., AsyncIterator[Any]]:
    weight = _weight(method)

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        calls.count += weight
        try:
            _refuse_garbage(request)
            async with contextlib.aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except _NO_FAULTS:
            raise
        except Exception as error:
            await _abort(context, error, method, calls)
        finally:
            calls.count -= weight

    return call


def _weight(method: str) -> int:
    """Return what a call counts: probes need no token, so they must not be able to fill the place of others."""
    return 0 if method in OPEN_METHODS else 1


def _refuse_garbage(request: Any) -> None:
    if isinstance(request, Garbled):
        raise InvalidArgumentError(f"the request cannot be read: {request.reason}; send what the protos say")


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str, calls: RunningCalls
) -> None:
    if isinstance(error, ResourceExhaustedError):
        calls.count_refusal(error)
    if not isinstance(error, TqError):
        _log.error("%s failed", method, exc_info=error)
        error = InternalError("the service failed; its log has the details")
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
