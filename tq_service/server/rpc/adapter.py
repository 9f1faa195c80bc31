"""Where gRPC asks for the handler of each call: that of a service, with the middleware around it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from tq_service.server.rpc.method_table import METHODS, Method
from tq_service.server.rpc.middleware import Behavior, Caller, Context, Middleware, Refusal
from tq_service.wire.frames import Garbled

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Services(grpc.GenericRpcHandler):
    """The services of a server, behind their middleware; generated code adds services to it as if it were the server.

    Handlers are wrapped once for each method and caller. An interceptor of grpc.aio would add two coroutines to every
    call, and see no requests.

    Args:
        server: where calls come in.
        middleware: what each call passes, the outermost first. The caller is that of the first that knows it.
        methods: what is known of methods; of one that is missing, nothing is.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        middleware: Sequence[Middleware],
        methods: Mapping[str, Method] = METHODS,
    ) -> None:
        self._middleware = middleware
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
        handler = caller.handlers[name] = _wrapped(inner, method, caller, self._middleware[:end])
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


def _wrapped(inner: Handler, method: Method, caller: Caller, middleware: Sequence[Middleware]) -> Handler:
    """Return a handler with middleware around it; of a caller that is refused, one that reads nothing."""
    deserialize: Callable[[bytes], Any] | None = None
    serialize: Callable[[Any], bytes] | None = None
    if caller.refusal is None:
        shape = _shape(inner)
        behavior = _as_coroutine(getattr(inner, shape))
        deserialize, serialize = _marking_garbage(inner.request_deserializer), inner.response_serializer
    else:
        # As a method with a stream of requests, none of which is read, whatever it is to others.
        shape, behavior = "stream_unary", _refusing(caller.refusal)
    for each in reversed(middleware):
        behavior = each.wrap(method, caller, behavior)
    handler: Handler = getattr(grpc, f"{shape}_rpc_method_handler")(behavior, deserialize, serialize)
    return handler


def _shape(handler: Handler) -> str:
    kinds = handler.request_streaming, handler.response_streaming
    return "_".join("stream" if is_stream else "unary" for is_stream in kinds)


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
