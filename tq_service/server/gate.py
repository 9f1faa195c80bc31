"""What calls of one method with one token pass, or don't."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Literal, NoReturn, TypeAlias

import grpc

from tq_service.errors import PartitionNotFoundError, PermissionDeniedError, TqError, UnauthenticatedError
from tq_service.server.audit import Audit, AuditLine, shown_peer
from tq_service.server.permissions import Rule
from tq_service.server.progress import Progress
from tq_service.server.tokens import ALL_PARTITIONS, Token

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Gate:
    """What the calls of one method with one token pass, or don't.

    Args:
        method: its full name.
        audit: where refusals and administrative calls are written.
        rule: what a call needs.
        token: what the caller may do; None: everything.
        refusal: the error of all calls, where they are refused whatever they ask for.
        reason: why they are, for the audit log.
        token_name: whose token it is, where that is known.
        stall_seconds: how long the first message of a stream may take, by which it is let in or not.
    """

    def __init__(
        self,
        method: str,
        audit: Audit,
        *,
        rule: Rule | None = None,
        token: Token | None = None,
        refusal: TqError | None = None,
        reason: str = "",
        token_name: str = "",
        stall_seconds: float = 60.0,
    ) -> None:
        self._method = method
        self._audit = audit
        self._rule = rule
        self._token = token
        self._refusal = refusal
        self._reason = reason
        self._token_name = token_name
        self._stall_seconds = stall_seconds

    def guard(self, handler: Handler) -> Handler:
        """Return a handler that makes each call pass here first."""
        if isinstance(self._refusal, UnauthenticatedError):
            # As a method with a stream of requests, none of which is read, whatever it is to others.
            return grpc.stream_unary_rpc_method_handler(self._refuse_unread)
        deserialize, serialize = handler.request_deserializer, handler.response_serializer
        behavior: Any
        wrap: Callable[[Any], Any]
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary), deserialize, serialize)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._parts(handler.stream_unary), deserialize, serialize)
        if handler.unary_stream is not None:
            # One that writes through its context is awaited like a unary one.
            behavior = handler.unary_stream
            wrap = self._streaming if inspect.isasyncgenfunction(behavior) else self._unary
            return grpc.unary_stream_rpc_method_handler(wrap(behavior), deserialize, serialize)
        if handler.stream_stream is not None:
            behavior = handler.stream_stream
            wrap = self._streaming_parts if inspect.isasyncgenfunction(behavior) else self._parts
            return grpc.stream_stream_rpc_method_handler(wrap(behavior), deserialize, serialize)
        raise TypeError(f"{self._method} has a handler of an unknown shape, {handler!r}")

    def enter(self, request: Any, context: Context) -> None:
        """Let a call in.

        Args:
            request: the request, or the first message of its stream.
            context: the call.

        Raises:
            UnauthenticatedError: it has no valid token.
            PermissionDeniedError: its token has not the role, or is not for the partition.
        """
        rule, token = self._rule, self._token
        named = () if rule is None else rule.partitions(request)
        if self._refusal is not None:
            self._refuse(self._refusal, self._reason, context, named)
        if token is not None:
            for partition_id in named:
                if not token.covers(partition_id):
                    self._refuse(_outside(token, partition_id), "outside its prefixes", context, (partition_id,))
        if rule is not None and rule.is_audited:
            self._audit.note(self._line("allowed", context, rule.partitions(request)))

    def shown(self, answer: Any) -> Any:
        """Return what the caller may see of an answer."""
        token = self._token
        if self._rule is not None and self._rule.lists_partitions and token is not None:
            covered = [summary for summary in answer.partitions if token.covers(summary.partition_id)]
            del answer.partitions[:]
            answer.partitions.extend(covered)
        return answer

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell of errors what the caller may know: the text of one names partitions like the one that was asked for."""
        try:
            yield
        except PartitionNotFoundError:
            if self._token is None or ALL_PARTITIONS in self._token.prefixes:
                raise
            raise PartitionNotFoundError(
                "there is no such partition; list_partitions shows those this token is for"
            ) from None

    def _refuse(self, refusal: TqError, reason: str, context: Context, named: Iterable[str]) -> NoReturn:
        self._audit.note(self._line("refused", context, named, reason))
        raise type(refusal)(refusal.message, metadata=refusal.metadata)

    def _line(
        self, decision: Literal["refused", "allowed"], context: Context, named: Iterable[str], reason: str = ""
    ) -> AuditLine:
        certificate = next(iter(context.auth_context().get("x509_common_name", ())), b"")
        return AuditLine(
            decision=decision,
            method=self._method,
            peer=shown_peer(context.peer()),
            certificate=certificate.decode("utf-8", "replace"),
            token=self._token_name,
            partition=next(iter(named), ""),
            reason=reason,
        )

    async def _refuse_unread(self, _requests: AsyncIterator[Any], context: Context) -> NoReturn:
        self.enter(None, context)
        raise AssertionError("a gate that is shut let a call in")

    def _unary(self, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Context) -> Any:
            self.enter(request, context)
            with self._telling():
                return self.shown(await behavior(request, context))

        return call

    def _streaming(self, behavior: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            self.enter(request, context)
            async with self._answers(behavior(request, context)) as answers:
                async for answer in answers:
                    yield self.shown(answer)

        return call

    def _parts(self, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(parts: AsyncIterator[Any], context: Context) -> Any:
            entered = await self._enter_by_first(parts, context)
            with self._telling():
                return await behavior(entered, context)

        return call

    def _streaming_parts(self, behavior: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def call(parts: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            entered = await self._enter_by_first(parts, context)
            async with self._answers(behavior(entered, context)) as answers:
                async for answer in answers:
                    yield self.shown(answer)

        return call

    async def _enter_by_first(self, parts: AsyncIterator[Any], context: Context) -> _Resumed:
        """Let a call in by the first message of its stream; return the stream from that message on."""
        waiting = Progress(self._stall_seconds, "the first message of the stream did not come")
        first = await waiting.wait_for(anext(parts, None))
        self.enter(first, context)
        return _Resumed(first, parts)

    @contextlib.asynccontextmanager
    async def _answers(self, answers: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """Close the generator of a handler at the end, and say of its errors what the caller may know."""
        with self._telling():
            async with contextlib.aclosing(answers):
                yield answers


class _Resumed:
    """A stream whose first message was read, from that message on; may be iterated in several parts."""

    def __init__(self, first: Any, rest: AsyncIterator[Any]) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> _Resumed:
        return self

    async def __anext__(self) -> Any:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first


def _outside(token: Token, partition_id: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"token {token.name!r} is for partitions whose names begin with {listed(token.prefixes)}; got "
        f"{partition_id[:64]!r}",
        metadata={"token": token.name, "partition_id": partition_id[:64]},
    )


def listed(prefixes: Iterable[str]) -> str:
    """Return prefixes for a message."""
    return ", ".join(map(repr, prefixes))


def short_name(method: str) -> str:
    """Return the name of a method without its service."""
    return method.rpartition("/")[2]
