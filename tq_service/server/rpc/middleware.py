"""What a concern of all calls, such as access control, has to do with one: the same for methods of all shapes.

A handler is one coroutine, whatever the shape of its method: it takes the request, or an iterator of them, and the
context; it returns the answer, or writes each of a stream of them to the context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import grpc

from tq_service.errors import TqError
from tq_service.server.rpc.method_table import Method
from tq_service.server.tokens import Token

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behavior: TypeAlias = Callable[[Any, Context], Awaitable[Any]]

shown_partitions: Final[ContextVar[Callable[[str], bool]]] = ContextVar(
    "shown_partitions", default=lambda _partition_id: True
)
"""Says of a partition whether the caller of a method that lists partitions may know that it exists."""

token_name: Final[ContextVar[str]] = ContextVar("token_name", default="")
"""The name of the token of a call, "" without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why calls are refused.

    Attributes:
        make_error: returns the error of one of them.
        reason: for the audit log; "" where it does not concern that.
    """

    make_error: Callable[[], TqError]
    reason: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Caller:
    """The caller, as far as metadata says: one object for all calls that differ in nothing else.

    Attributes:
        name: of its token, "" where that is not known.
        token: what it may do; None: everything that is not internal.
        refusal: why all its calls are refused, before anything of a request is read.
        handlers: those of its calls, by method, made when they are first needed; they go with the caller.
    """

    name: str = ""
    token: Token | None = None
    refusal: Refusal | None = None
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = field(default_factory=dict)


class Middleware:
    """One concern of all calls. Both methods may be left as they are here. Confined to one event loop."""

    def admit(self, method: Method, details: grpc.HandlerCallDetails) -> Caller | None:
        """Return the caller of a call by its metadata, before its request is read; None: another middleware knows it.

        Runs for each call. One that is refused passes the middleware around this one, this one, and no other; there its
        request is an iterator, which is not to be read.
        """
        return None

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return what handles the calls of a method by a caller; `behavior` is what comes after this middleware.

        Runs once for each method and caller, so that what has nothing to do for a method costs its calls nothing.
        """
        return behavior


class EndableCalls:
    """Calls that are under way and can be ended from outside, with an error. Confined to one event loop."""

    def __init__(self) -> None:
        self._owners: dict[asyncio.Task[Any], Any] = {}
        self._errors: dict[asyncio.Task[Any], TqError] = {}  # of those that were ended

    def end(self, error_of: Callable[[Any], TqError | None]) -> None:
        """End calls; what they have changed may stay, as where an answer is lost.

        Args:
            error_of: returns the error of a call by its owner, None for one that goes on.
        """
        for task, owner in self._owners.items():
            if task not in self._errors and (error := error_of(owner)) is not None:
                self._errors[task] = error
                task.cancel()

    async def run(self, call: Awaitable[Any], owner: Any = None) -> Any:
        """Return what a call of the current task returns, which `end` may end meanwhile.

        Raises:
            TqError: it was ended.
        """
        task: Any = asyncio.current_task()
        self._owners[task] = owner
        try:
            return await call
        except asyncio.CancelledError:
            if task not in self._errors or task.uncancel():  # by the caller, which has left
                raise
            raise self._errors[task] from None
        finally:
            del self._owners[task]
            self._errors.pop(task, None)


def passing_answers(method: Method, behavior: Behavior, each: Callable[[Any], Awaitable[Any]]) -> Behavior:
    """Return a handler whose answers go out as a function returns them, each of a stream or the only one."""

    async def stream(request: Any, context: Context) -> Any:
        passing: Any = _PassingContext(context, each)
        return await behavior(request, passing)

    async def one(request: Any, context: Context) -> Any:
        return await each(await behavior(request, context))

    return stream if method.has_response_stream else one


class _PassingContext:
    """A context whose written answers pass a function first."""

    def __init__(self, context: Context, each: Callable[[Any], Awaitable[Any]]) -> None:
        self._context = context
        self._each = each

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, answer: Any) -> None:
        """Send an answer."""
        await self._context.write(await self._each(answer))
