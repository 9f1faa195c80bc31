"""Where gRPC asks for the handler of each call: that of a service, with the middleware around it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from tq_service.server.rpc.inbox import Inbox
from tq_service.server.rpc.method_table import METHODS, Method
from tq_service.server.rpc.middleware import Behavior, Caller, Context, Middleware, Refusal
from tq_service.wire.columns import Garbled

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Services(grpc.GenericRpcHandler):
    """The services of a server, behind their middleware; generated code adds services to it as if it were the server.

    Handlers are wrapped once for each method and caller. An interceptor of grpc.aio would add two coroutines to every
    call, and see no requests.

    Args:
        server: where calls come in.
        middleware: what each call passes, the outermost first. The caller is that of the first that knows it.
        methods: what is known of methods; of one that is missing, nothing is.

    Attributes:
        inbox: reads the requests.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        middleware: Sequence[Middleware],
        methods: Mapping[str, Method] = METHODS,
    ) -> None:
        self._middleware = middleware
        self.inbox = Inbox()
        self._methods = methods
        self._admitting = [each for each in middleware if type(each).admit is not Middleware.admit]
        self._anyone = Caller()
        self._services: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, tuple[Method, Handler]] = {}
        server.add_generic_rpc_handlers((self,))

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Add services; generated code calls this."""
        self._services += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Do nothing; generated code calls this too, for methods that were added above."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of a call, None where no service has its method; gRPC calls this for each call."""
        name = handler_call_details.method
        if name not in self._found and not self._find(handler_call_details):
            return None
        method, inner = self._found[name]
        for decisive in self._admitting:
            caller = decisive.admit(method, handler_call_details)
            if caller is not None:
                break
        else:
            caller = self._anyone
        if name in caller.handlers:
            return caller.handlers[name]
        # A refusal passes the middleware that made it and what is around that.
        end = len(self._middleware) if caller.refusal is None else self._middleware.index(decisive) + 1
        handler = caller.handlers[name] = self._wrapped(inner, method, caller, self._middleware[:end])
        return handler

    def _wrapped(self, inner: Handler, method: Method, caller: Caller, middleware: Sequence[Middleware]) -> Handler:
        """Return a handler with middleware around it; of a caller that is refused, one that reads nothing.

        To gRPC all are methods with a stream of requests, so that nothing is read before the inbox reads it.
        """
        serialize: Callable[[Any], bytes] | None = None
        if caller.refusal is None:
            has_response_stream = inner.response_streaming
            shape = f"{'stream' if inner.request_streaming else 'unary'}_{'stream' if has_response_stream else 'unary'}"
            behavior, serialize = _as_coroutine(getattr(inner, shape)), inner.response_serializer
        else:
            # As a method with one answer, which never comes, whatever it is to others.
            has_response_stream, behavior = False, _refusing(caller.refusal)
        for each in reversed(middleware):
            behavior = each.wrap(method, caller, behavior)
        if caller.refusal is None:
            deserialize = _marking_garbage(inner.request_deserializer)
            behavior = self.inbox.reads(method, inner.request_streaming, behavior, deserialize)
        make = grpc.stream_stream_rpc_method_handler if has_response_stream else grpc.stream_unary_rpc_method_handler
        handler: Handler = make(behavior, None, serialize)
        return handler

    def _find(self, details: grpc.HandlerCallDetails) -> bool:
        """Find the handler of a method; return whether there is one."""
        name = details.method
        for service in self._services:
            handler = service.service(details)
            if handler is not None:
                self._found[name] = self._methods.get(name) or Method(name=name), handler
                return True
        return False


def _as_coroutine(behavior: Callable[..., Any]) -> Behavior:
    """Return a handler that is a coroutine, also of one that generates its answers."""
    if not inspect.isasyncgenfunction(behavior):
        return behavior

    async def write_all(request: Any, context: Context) -> None:
        async with contextlib.aclosing(behavior(request, context)) as answers:
            async for answer in answers:
                await context.write(answer)

    return write_all


def _refusing(refusal: Refusal) -> Behavior:
    async def refuse(_requests: Any, _context: Context) -> NoReturn:
        raise refusal.make_error()

    return refuse


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
