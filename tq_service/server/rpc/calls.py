"""gRPC handlers and the middleware that adds metrics, error handling, access control and durable responses.

    ObservedCalls -> RunningCalls -> AccessControl -> DurableAnswers -> handler of the method

Each stage is a `Middleware`. The tracing middleware is in traces.py, because it depends on an optional extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeAlias
from urllib.parse import unquote

import grpc
from grpc_status import rpc_status

from tq_service.durable.state_store import StateStore
from tq_service.errors import (
    DiskFullError,
    InternalError,
    NotLeaderError,
    PartitionNotFoundError,
    PermissionDeniedError,
    PreconditionError,
    ResourceExhaustedError,
    TqError,
    UnauthenticatedError,
)
from tq_service.log_message import LogMessage
from tq_service.observe.instruments import Instruments, MethodCounts
from tq_service.server.audit import Audit, AuditLine
from tq_service.server.credential_files import (
    ALL_PARTITIONS,
    INTERNAL_KEY,
    InternalSecret,
    Token,
    TokenFile,
    digest_of,
    make_token,
)
from tq_service.server.rpc.inbox import Inbox, Progress, too_many_calls
from tq_service.server.rpc.methods import (
    METHODS,
    Behavior,
    Caller,
    Context,
    EndableCalls,
    Method,
    Middleware,
    Refusal,
    shown_partitions,
    token_name,
)
from tq_service.version import BUILD, PROTOCOL, USER_AGENT
from tq_service.wait_clock import WaitClock, wait_clock
from tq_service.wire.connection import TOKEN_KEY, TOKEN_SCHEME
from tq_service.wire.error_table import to_status

if TYPE_CHECKING:
    from tq_service.server.cluster_member import ClusterMember

_log = logging.getLogger(__name__)
_grpc_log = logging.getLogger("grpc._cython.cygrpc")
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Names of the status codes in gRPC for Go, indexed by code number.
CODES: Final = (
    "OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "AlreadyExists", "PermissionDenied",
    "ResourceExhausted", "FailedPrecondition", "Aborted", "OutOfRange", "Unimplemented", "Internal", "Unavailable",
    "DataLoss", "Unauthenticated",
)  # fmt: skip
_CODE_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}
# Exceptions that gRPC raises in a handler after an abort, a client disconnect, or a server stop.
_NO_FAULTS: Final = (asyncio.CancelledError, grpc.aio.BaseError)
_RETRY_SECONDS: Final = 1.0


class Services(grpc.GenericRpcHandler):
    """The gRPC services of a server, wrapped in middleware. Generated code receives this object in place of the server.

    Each handler is wrapped once per method and caller. A grpc.aio interceptor would instead add two coroutines to every
    call and could not see the requests.

    Args:
        server: gRPC server that receives the calls.
        middleware: middleware for each call, outermost first. A call is attributed to the first caller that an `admit`
            method returns.
        methods: descriptions of methods by full name. Unlisted methods use the defaults of `Method`.

    Attributes:
        inbox: reader that limits the size and number of requests.
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
        """Add services. This method is called by generated code."""
        self._services += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Do nothing, because generated code also adds these methods with `add_generic_rpc_handlers`."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler for a call, or None if the method is unknown. gRPC calls this method for each call."""
        name = handler_call_details.method
        if name not in self._found:
            found = (service.service(handler_call_details) for service in self._services)
            inner = next((handler for handler in found if handler is not None), None)
            if inner is None:
                return None
            unruled = Method(
                name=name, has_request_stream=inner.request_streaming, has_response_stream=inner.response_streaming
            )
            self._found[name] = self._methods.get(name, unruled), inner
        method, inner = self._found[name]
        for decisive in self._admitting:
            caller = decisive.admit(method, handler_call_details)
            if caller is not None:
                break
        else:
            caller = self._anyone
        if name in caller.handlers:
            return caller.handlers[name]
        # A refused call passes only through the middleware that refused it and through the outer middleware.
        end = len(self._middleware) if caller.refusal is None else self._middleware.index(decisive) + 1
        handler = caller.handlers[name] = self._wrapped(inner, method, caller, self._middleware[:end])
        return handler

    def _wrapped(self, inner: Handler, method: Method, caller: Caller, middleware: Sequence[Middleware]) -> Handler:
        """Wrap a handler in middleware. If the caller is rejected, the handler fails without reading any requests.

        All methods are registered as request-streaming methods so that the inbox can decide when to read messages.
        """
        refusal = caller.refusal
        if refusal is None:
            kinds = (
                "stream" if streams else "unary" for streams in (inner.request_streaming, inner.response_streaming)
            )
            behavior = _as_coroutine(getattr(inner, "_".join(kinds)))
        else:
            behavior = _refusing(refusal)
        for each in reversed(middleware):
            behavior = each.wrap(method, caller, behavior)
        if refusal is not None:
            # Registered as a method with a single response, although the handler always raises an error.
            return grpc.stream_unary_rpc_method_handler(behavior)
        behavior = self.inbox.reads(method, behavior, inner.request_deserializer)
        make = grpc.stream_stream_rpc_method_handler
        if not inner.response_streaming:
            make = grpc.stream_unary_rpc_method_handler
        handler: Handler = make(behavior, None, inner.response_serializer)
        return handler


def _refusing(refusal: Refusal) -> Behavior:
    async def refuse(_requests: Any, _context: Context) -> NoReturn:
        raise refusal.make_error()

    return refuse


def _as_coroutine(behavior: Callable[..., Any]) -> Behavior:
    """Convert a handler to a coroutine function that writes the responses of an async generator to the context."""
    if not inspect.isasyncgenfunction(behavior):
        return behavior

    async def write_all(request: Any, context: Context) -> None:
        async with contextlib.aclosing(behavior(request, context)) as answers:
            async for answer in answers:
                await context.write(answer)

    return write_all


class ObservedCalls(Middleware):
    """Logs calls at debug level and updates call metrics.

    This stage is the outermost one so that it sees the status of each call. The metrics have the same names as in
    go-grpc-middleware. Waiting time is measured separately, so that long polls do not dominate the handling time.

    Args:
        instruments: metrics to update, or None if metrics are off.
    """

    def __init__(self, instruments: Instruments | None = None) -> None:
        self._calls = None if instruments is None else instruments.calls

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Wrap a handler to observe its calls. If debug logs and metrics are both off, return the handler unchanged."""
        logs, counts = _log.isEnabledFor(logging.DEBUG), None
        if self._calls is not None:
            counts = self._calls.get(method.name)
            if counts is None:
                counts = self._calls[method.name] = _counts_of(method)
        elif not logs:
            return behavior

        async def call(request: Any, context: Context) -> Any:
            clock = WaitClock()
            if counts is not None:
                counts.started += 1
                if method.waits:
                    wait_clock.set(clock)  # affects only this call, because gRPC runs each call in a separate task
            began_at, code = time.perf_counter(), 0
            try:
                return await behavior(request, context)
            except BaseException as error:
                code = code_of(error, context)
                raise
            finally:
                seconds = time.perf_counter() - began_at
                if counts is not None:
                    counts.handled[CODES[code]] += 1
                    counts.handling.observe(seconds - clock.seconds)
                    if counts.waits is not None:
                        counts.waits.observe(clock.seconds)
                if logs:
                    _log_end(method, caller, request, context, code=code, seconds=seconds)

        return call


def _counts_of(method: Method) -> MethodCounts:
    service, _, name = method.name.lstrip("/").rpartition("/")
    shapes = ("unary", "server_stream", "client_stream", "bidi_stream")
    shape = shapes[2 * method.has_request_stream + method.has_response_stream]
    return MethodCounts(service, name, shape, may_wait=method.waits)


def code_of(error: BaseException, context: Context) -> int:
    """Return the numeric status code that a connected client receives for a failed call."""
    if isinstance(error, asyncio.CancelledError):
        remaining = context.time_remaining()
        late = remaining is not None and remaining <= 0
        return CODES.index("DeadlineExceeded" if late else "Canceled")
    is_aborted = isinstance(error, grpc.aio.AbortError)
    if isinstance(error, grpc.aio.BaseError) and not is_aborted:  # a response could not be sent, or the server stopped
        return CODES.index("Canceled")
    code: Any = context.code() if is_aborted else None
    if code is None:
        return CODES.index("Internal")
    number: int = code if isinstance(code, int) else code.value[0]
    return number


def _log_end(method: Method, caller: Caller, request: Any, context: Context, *, code: int, seconds: float) -> None:
    message = getattr(request, "first", None)
    names = [] if message is None else [name for name in method.partitions(message) if name]
    _log.debug(
        LogMessage(
            "call",
            method=method.short_name,
            partition=" ".join(dict.fromkeys(names)) or None,
            task=getattr(message, "task_name", "") or None,
            outcome=_CODE_NAMES.get(code, "UNKNOWN"),
            ms=round(seconds * 1e3, 3),
            request_id=_request_id(message),
            caller=caller.name or None,
            peer=context.peer(),
        )
    )


def _request_id(message: Any) -> bytes | None:
    """Return the id that a call shares with its retries: its request_id, its commit's request_id, or its put_id."""
    header = getattr(message, "header", message)
    for part in (message, getattr(message, "commit", None), header, getattr(header, "commit", None)):
        if request_id := getattr(part, "request_id", b""):
            return bytes(request_id)
    return bytes(getattr(header, "put_id", b"")) or None


class RunningCalls(Middleware):
    """Counts and limits running calls, and reports failures to clients as a `google.rpc.Status`.

    Calls beyond the limit are rejected before their requests are read. Health probes do not count toward the limit,
    because callers without a token can send them and must not displace other calls. Calls between services are also
    exempt from the limit, because a service whose heartbeats are rejected would be considered lost.

    If a call fails with a `TqError`, the client receives the error's message. Any other exception is a bug, so its
    traceback is logged, and the client receives INTERNAL without the exception's message.

    Args:
        most: maximum number of running calls.

    Attributes:
        count: number of running calls.
        rejected: number of calls rejected since the last report, by name of the limit or quota.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self._most = most
        self._one_too_many = Caller(refusal=Refusal(lambda: too_many_calls("max_calls", self.count + 1, self._most)))
        self.count = 0
        self.rejected: Counter[str] = Counter()
        _grpc_log.addFilter(_UNTAKEN_ANSWERS)  # no effect if another service in this process has added it

    def admit(self, method: Method, details: grpc.HandlerCallDetails) -> Caller | None:
        """Return a `Caller` with a refusal if too many calls are running, or None otherwise."""
        is_one_too_many = self.count >= self._most and not (method.is_open or method.is_internal)
        return self._one_too_many if is_one_too_many else None

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Wrap a handler to count running calls and to end failed calls with a status that describes the error."""
        weight = 0 if method.is_open or method.is_internal or caller is self._one_too_many else 1
        reads_one = caller.refusal is None and not method.has_request_stream

        async def call(request: Any, context: Context) -> Any:
            self.count += weight
            try:
                return await behavior(await request.only() if reads_one else request, context)
            except _NO_FAULTS:
                raise
            except Exception as error:
                failure = error
            finally:
                self.count -= weight
            # Outside the `except` block, so an exception raised here does not keep a reference to the failure.
            if isinstance(failure, ResourceExhaustedError):
                self.rejected[failure.metadata.get("limit_name", failure.reason)] += 1
            return await _end(context, failure, method, getattr(request, "first", None))

        return call

    def report(self) -> None:
        """Log the number of calls rejected since the last report, for each limit or quota."""
        if self.rejected:
            _log.warning(LogMessage("rejected calls that exceeded limits", **dict(self.rejected.most_common())))
            self.rejected.clear()


async def _end(context: Context, error: Exception, method: Method, message: Any) -> None:
    """End a call with the status that corresponds to its error.

    If the error is unexpected (not a `TqError`), include the call's request_id in the status.
    """
    failed = error
    if not isinstance(error, TqError):
        request_id = _request_id(message)
        _log.error(LogMessage("a call failed", method=method.name, request_id=request_id), exc_info=error)
        facts = {} if request_id is None else {"request_id": request_id.hex()}
        error = InternalError(
            "the call failed with an internal error; see the service's log for details", metadata=facts
        )
    # gRPC keeps the call's state until a garbage collection, and the traceback's frames refer to the request's bytes.
    traceback.clear_frames(failed.__traceback__)
    del failed
    await context.abort_with_status(rpc_status.to_status(to_status(error, method=method.name)))


class _UntakenAnswers(logging.Filter):
    """A log filter that replaces gRPC's error and traceback for an undelivered response with a single INFO line.

    gRPC does not log why a response could not be delivered. The client may have disconnected or cancelled the call
    while the response was in transit. The client may also have rejected the response because it was too large; the
    client's call then fails with RESOURCE_EXHAUSTED.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, grpc.aio.InternalError):
            return True
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        error_text = record.getMessage()
        record.args = ()
        record.msg = LogMessage(
            "could not deliver a response: the client disconnected, or rejected the message as too large",
            error=error_text,
        )
        record.exc_info = record.exc_text = None
        return _grpc_log.isEnabledFor(logging.INFO)


_UNTAKEN_ANSWERS = _UntakenAnswers()


class DurableAnswers(Middleware):
    """Delays responses and errors until the state is durable, so clients never see changes that a crash could undo.

    While the state cannot be persisted, calls are rejected before they run. While disk space is low, calls that store
    data are rejected, because the remaining space is reserved for calls that free space.

    In a cluster, the middleware also rejects calls to a standby and withholds the responses of a leader that may have
    been superseded. A process that was paused for longer than its lease therefore never responds with outdated state.
    `end_calls` ends calls that are waiting for samples or for etcd, so their clients retry with the leader. Use this
    class from a single event loop.

    Args:
        state: state that must be durable before a response is sent, or None if no state is persisted.
        member: this controller's cluster membership, or None if it is the only controller.
    """

    def __init__(self, state: StateStore | None, member: ClusterMember | None = None) -> None:
        self._state = state
        self._member = member
        self._running = EndableCalls()

    def end_calls(self) -> None:
        """Fail running calls with `NotLeaderError`. Changes that these calls made may still take effect."""
        self._running.end(lambda _owner: self._refusal())

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Wrap a handler to delay its responses until the state is durable.

        If the method needs neither a delay nor a leader check, return the handler unchanged.
        """
        state, member = self._state, self._member
        if state is None or (method.is_answer_durable and (method.is_open or member is None)):
            return behavior
        waits = not method.is_answer_durable

        async def durable(answer: Any = None) -> Any:
            if waits and state.has_unflushed:
                await state.wait_durable()
            if member is not None and not member.may_answer:
                raise self._refusal()
            return answer

        async def call(request: Any, context: Any) -> Any:
            if member is not None and not member.may_answer:
                raise self._refusal()
            if method.has_response_stream:
                context = _DurableContext(context, durable)
            if state.is_failing:
                await state.wait_durable()
            if method.fills_disk and state.is_disk_low:
                raise DiskFullError(
                    "the data directory's disk is nearly full, so new data is rejected. Clear samples or free disk "
                    "space. The service resumes once space is available.",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            try:
                answer = await behavior(request, context)
            except asyncio.CancelledError:
                raise
            except Exception:  # the error may reveal a change that is not durable yet, such as a new key
                await durable()
                raise
            return await durable(answer)

        if member is None:
            return call
        return lambda request, context: self._running.run(call(request, context))

    def takes_changes(self) -> bool:
        """Return whether calls that change state are currently accepted."""
        leads = self._member is None or self._member.may_answer
        return leads and (self._state is None or not self._state.is_failing)

    def epoch(self) -> int:
        """Return the epoch of the cluster's leader, or 0 if there is no cluster or no known leader."""
        return 0 if self._member is None else self._member.epoch

    def _refusal(self) -> NotLeaderError:
        address = "" if self._member is None else self._member.leader_address
        where = f"the leader is at {address}" if address else "no leader is known yet"
        return NotLeaderError(
            f"this controller is not the leader of its cluster ({where}); retry at the leader with the same request_id",
            metadata={"leader_address": address, "epoch": str(self.epoch())},
        )


class _DurableContext:
    """A call context whose `write` waits until the state is durable before it sends a response."""

    def __init__(self, context: Context, durable: Callable[[Any], Awaitable[Any]]) -> None:
        self._context = context
        self._durable = durable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, answer: Any) -> None:
        """Send a response once the state is durable."""
        await self._context.write(await self._durable(answer))


_SCRAPE: Final = Method(name="GET /metrics", roles=frozenset({"read"}), concerns_all=True)
_NO_TOKEN: Final = "this service requires a bearer token, but the call has none; send it as authorization metadata"  # noqa: S105
# Unknown and expired tokens get the same message, so a stranger cannot learn whether a token was ever valid.
_BAD_TOKEN: Final = "the call's token is invalid: it is unknown here or has expired; request a new token"  # noqa: S105
_NO_PROOF: Final = (
    "this call is reserved for the services of a deployment, but lacks proof of their internal secret; clients must "
    "use other calls. Set the same internal_secret_file for all services"
)
_WRONG_PROOF: Final = (
    "the caller's internal secret differs from this service's; set the same internal_secret_file for all "
    "services of a deployment"
)
_AGENT: Final = re.compile(r"tq-service/(\S+) \(protocol (\d+)\)")
_SERVICE: Final = make_token(name="internal-secret", sha256="0" * 64, roles=["service"], prefixes=[ALL_PARTITIONS])
"""Token with the `service` role, used for callers that present the internal secret."""


class AccessControl(Middleware):
    """Identifies the caller of each call and rejects calls that the caller is not allowed to make.

    A call without a valid token is rejected before its request is read. A call to an internal method without the
    internal secret is also rejected before its request is read. If the token lacks a required role or does not cover a
    partition in the request, the call is rejected after its request has been read.

    Args:
        audit: log of rejected calls and administrative calls.
        tokens: valid tokens, or None if all methods except internal ones may be called without a token.
        secret: secret shared by the services of this deployment, or None if services are identified only by tokens.
        stall_seconds: maximum time to wait for a stream's first message. This message determines whether the call is
            allowed.

    Attributes:
        partition_of: function that returns the partition of a complete put in this process's storage service. The
            function returns None for an unknown put. `partition_of` is None if this process does not run a storage
            service.
        admitted_at: for each connection, keyed by peer, the `time.monotonic` time of the first admitted call. If tokens
            are required, health probes are not recorded, because they need no token. `Connections` removes the entries
            of closed connections.
    """

    def __init__(
        self,
        audit: Audit,
        tokens: TokenFile | None = None,
        *,
        secret: InternalSecret | None = None,
        stall_seconds: float = 60.0,
    ) -> None:
        self._audit = audit
        self._tokens = tokens
        self._secret = secret
        self._stall_seconds = stall_seconds
        self._anyone = Caller()
        self._service = Caller(name=_SERVICE.name, token=_SERVICE)
        self._no_proof = _stranger(_NO_PROOF, "no internal secret")
        self._wrong_proof = _stranger(_WRONG_PROOF, "another internal secret")
        self._no_token = _stranger(_NO_TOKEN, "no token")
        self._unknown_token = _stranger(_BAD_TOKEN, "unknown token")
        self._known: Mapping[str, Token] = {}
        self._callers: dict[str, Caller] = {}
        self._lasting = EndableCalls()
        self.admitted_at: dict[str, float] = {}
        self.partition_of: Callable[[bytes], str | None] | None = None

    def end_revoked(self) -> None:
        """End waiting and streaming calls whose token has expired, been removed, or changed."""
        if self._tokens is None:
            return
        known = self._tokens.tokens

        def error_of(token: Token) -> UnauthenticatedError | None:
            is_valid = known.get(token.sha256) == token and not token.is_expired()
            return None if is_valid else UnauthenticatedError(_BAD_TOKEN)

        self._lasting.end(error_of)

    def admit(self, method: Method, details: grpc.HandlerCallDetails) -> Caller:
        """Identify the caller from the call's metadata. If the call is not allowed, the result's `refusal` is set."""
        if method.is_open:
            return self._anyone
        metadata = dict(details.invocation_metadata or ())
        agent = _text(metadata.get("user-agent"))
        if not agent.startswith(USER_AGENT) and (other := _other_protocol(agent)) is not None:
            return other
        if self._tokens is None and method.roles - {"service"}:
            return self._anyone
        bearer, proof = _bearer(_text(metadata.get(TOKEN_KEY))), _text(metadata.get(INTERNAL_KEY))
        if self._secret is not None and proof and self._secret.accepts(proof):
            return self._service
        if self._tokens is None:
            return self._wrong_proof if proof else self._no_proof
        if bearer is None:
            return self._wrong_proof if proof else self._no_token
        return self._holder(self._tokens, bearer)

    def _holder(self, tokens: TokenFile, secret: str) -> Caller:
        if tokens.tokens is not self._known:  # the file was reloaded
            self._known, self._callers = tokens.tokens, {}
        digest = digest_of(secret)
        token = self._known.get(digest)
        if token is None:
            return self._unknown_token
        if token.is_expired():
            return _expired(token)
        caller = self._callers.get(digest)
        if caller is None:
            caller = self._callers[digest] = Caller(name=token.name, token=token)
        return caller

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Wrap a handler in a check of whether the caller may call the method.

        If the check depends on the request, the wrapper first reads the request, or the first message of a request
        stream.
        """
        token, refusal = caller.token, caller.refusal
        is_known = refusal is None
        if token is not None:
            refusal = _lack(method, token)
        restricted = None if token is None or ALL_PARTITIONS in token.prefixes else token
        if restricted is not None:
            behavior = _showing_its_own(restricted, behavior)
        # Without tokens, audit only calls that concern all partitions, because clearing a single partition is routine.
        is_noted = method.is_audited and (token is not None or method.concerns_all)
        # If the caller has a token, wait for the stream's first message, and end the call if none arrives.
        begins = token is not None and method.has_request_stream
        looks_at_request = is_known and (refusal is not None or restricted is not None or is_noted or begins)
        marks_peer = not (method.is_open and self._tokens is not None)

        async def call(request: Any, context: Context) -> Any:
            named: list[str] = []
            if looks_at_request:
                message = request
                if method.has_request_stream:
                    waiting = Progress(self._stall_seconds, "the stream's first message did not arrive")
                    message = await waiting.wait_for(request.begin())
                named = self._named_by(method, message)
            if refusal is not None:
                self._note("refused", method, caller, context, named=named, reason=refusal.reason)
                raise refusal.make_error()
            if restricted is not None:
                for outside in itertools.filterfalse(restricted.covers, named):
                    self._note("refused", method, caller, context, named=[outside], reason="outside its prefixes")
                    raise _outside(restricted, outside)
            if is_noted:
                self._note("allowed", method, caller, context, named=named)
            if marks_peer and (peer := context.peer()) not in self.admitted_at:
                self.admitted_at[peer] = time.monotonic()
            if caller.name:  # affects only this call, because gRPC runs each call in a separate task
                token_name.set(caller.name)
            return await behavior(request, context)

        lasts = method.waits or method.has_request_stream or method.has_response_stream
        if token is None or token is _SERVICE or not lasts:
            return call
        return lambda request, context: self._lasting.run(call(request, context), token)

    def refused_scrape(self, loop: asyncio.AbstractEventLoop, authorization: str, peer: str) -> str | None:
        """Return the reason to reject a metrics scrape with this authorization header, or None to allow it.

        Thread-safe.
        """
        if self._tokens is None:
            return None
        token, refusal = None, self._no_token.refusal
        if secret := _bearer(authorization):
            token, refusal = self._tokens.tokens.get(digest_of(secret)), self._unknown_token.refusal
        if token is not None:
            refusal = _expired(token).refusal if token.is_expired() else _lack(_SCRAPE, token)
        if refusal is None:
            return None
        name = "" if token is None else token.name
        line = AuditLine(decision="refused", method=_SCRAPE.name, peer=peer, token=name, reason=refusal.reason)
        loop.call_soon_threadsafe(self._audit.note, line)
        return f"{refusal.reason}; a scrape requires a token with the role read for all partitions"

    def _named_by(self, method: Method, request: Any) -> list[str]:
        """Return the partitions that a request refers to, either by name or through puts."""
        named = list(method.partitions(request))
        if method.put_ids is not None and self.partition_of is not None:
            found = map(self.partition_of, method.put_ids(request))
            # A call that refers to an unknown put fails anyway, so it needs no permission check.
            named += [partition_id for partition_id in found if partition_id is not None]
        return named

    def _note(
        self,
        decision: Literal["refused", "allowed"],
        method: Method,
        caller: Caller,
        context: Context,
        *,
        named: list[str],
        reason: str = "",
    ) -> None:
        certificate = next(iter(context.auth_context().get("x509_common_name", ())), b"")
        self._audit.note(
            AuditLine(
                decision=decision,
                method=method.name,
                peer=unquote(context.peer()),
                certificate=certificate.decode("utf-8", "replace"),
                token=caller.name,
                partition=named[0] if named else "",
                reason=reason,
            )
        )


def _showing_its_own(token: Token, behavior: Behavior) -> Behavior:
    """Wrap a handler so that lists and error messages omit partitions that the token does not cover."""

    async def call(request: Any, context: Context) -> Any:
        shown_partitions.set(token.covers)
        try:
            return await behavior(request, context)
        except PartitionNotFoundError as error:  # the original message suggests similar partition names
            raise PartitionNotFoundError(
                "the partition does not exist. Call ListPartitions to list the partitions that this token can access",
                metadata=error.metadata,
            ) from None

    return call


def _expired(token: Token) -> Caller:
    return _stranger(_BAD_TOKEN, "token has expired", token.name)


def _stranger(message: str, reason: str, name: str = "") -> Caller:
    return Caller(name=name, refusal=Refusal(lambda: UnauthenticatedError(message), reason))


def _other_protocol(agent: str) -> Caller | None:
    """Return a rejected caller if the user agent specifies a different protocol version, otherwise None.

    Clients written in other languages do not send a protocol version.
    """
    if (match := _AGENT.match(agent)) is None or int(match[2]) == PROTOCOL:
        return None
    build, protocol = match.groups()

    def make_error() -> PreconditionError:
        return PreconditionError(
            f"the caller is tq-service {build} with protocol {protocol}; expected protocol {PROTOCOL}, as in this "
            f"service's tq-service {BUILD}. Install the same version on both sides.",
            reason="PROTOCOL_MISMATCH",
            metadata={"got": protocol, "expected": str(PROTOCOL), "version": BUILD},
        )

    return Caller(refusal=Refusal(make_error, "another protocol"))


def _lack(method: Method, token: Token) -> Refusal | None:
    """Return a refusal if the token permits no call to the method, otherwise None."""
    if not method.roles:
        return _denied(
            "no rule for the method", f"{method.short_name} has no access rule in its proto, so all calls are refused"
        )
    if not token.roles & method.allowed_roles:
        needed = ", ".join(sorted(method.allowed_roles))
        return _denied(
            f"none of the roles {needed}",
            f"{method.short_name} needs one of the roles {needed}; token {token.name!r} has "
            f"{', '.join(sorted(token.roles))}",
            token=token.name,
            needed_roles=needed,
        )
    if method.concerns_all and ALL_PARTITIONS not in token.prefixes:
        return _denied(
            "not for all partitions",
            f"{method.short_name} concerns all partitions, so it requires a token with the prefix ''; token "
            f"{token.name!r} has only the prefixes {_listed(token.prefixes)}",
            token=token.name,
            needed_prefix=ALL_PARTITIONS,
        )
    return None


def _denied(reason: str, message: str, **metadata: str) -> Refusal:
    return Refusal(lambda: PermissionDeniedError(message, metadata=metadata), reason)


def _outside(token: Token, partition_id: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"token {token.name!r} is valid only for partitions whose names begin with {_listed(token.prefixes)}; got "
        f"{partition_id[:64]!r}",
        metadata={"token": token.name, "partition_id": partition_id[:64]},
    )


def _listed(prefixes: Iterable[str]) -> str:
    return ", ".join(map(repr, prefixes))


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def _bearer(authorization: str) -> str | None:
    """Return the bearer token from an authorization header, or None if the header uses another scheme."""
    scheme, _, secret = authorization.partition(" ")
    return secret.strip() if scheme.lower() == TOKEN_SCHEME.strip().lower() else None
