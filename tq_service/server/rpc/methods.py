"""The table of gRPC methods and the interface for middleware.

In the protos, the option `rule` describes each method (protos/tq_service/v1/method_rule.proto). This module reads the
rules from the descriptors. The module also defines rules for gRPC's standard services, whose protos do not have this
option.

All handlers are coroutine functions, for unary and streaming methods alike. A handler receives the request (or an
iterator over the requests) and the context. The handler either returns the response or writes a stream of responses to
the context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from tq_service.errors import TqError
from tq_service.internal.v1 import cluster_pb2, storage_control_pb2, storage_registry_pb2
from tq_service.v1 import controller_service_pb2, method_rule_pb2, storage_service_pb2
from tq_service.v1.method_rule_pb2 import PARTITIONS_ALL, PARTITIONS_UNSPECIFIED, MethodRule
from tq_service.wire.connection import ROLES, Role

if TYPE_CHECKING:  # some programs read the rules without the server's packages
    from tq_service.server.credential_files import Token

Read: TypeAlias = Callable[[Any], Sequence[Any]]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behavior: TypeAlias = Callable[[Any, Context], Awaitable[Any]]

shown_partitions: Final[ContextVar[Callable[[str], bool]]] = ContextVar(
    "shown_partitions", default=lambda _partition_id: True
)
"""Function that returns whether the current caller may see a partition. Hidden partitions are omitted from lists."""

token_name: Final[ContextVar[str]] = ContextVar("token_name", default="")
"""Name of the token used in the current call, or "" if the call has no token."""


def _nothing(_request: Any) -> Sequence[Any]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A gRPC method and the rules that middleware applies to its calls.

    Attributes:
        name: full name of the method, such as "/tq_service.v1.ControllerService/Insert".
        roles: roles that may call the method, in addition to the admin role. If empty, all calls are rejected.
        is_open: whether anyone may call the method without a token, as for health probes.
        has_request_stream: whether requests are streamed.
        has_response_stream: whether responses are streamed.
        partitions: function that returns the partitions named in a request or in the first message of a stream.
        put_ids: function that returns the ids of puts in a request, or None if requests contain no put ids. The caller
            must also be allowed to access the partitions of these puts.
        concerns_all: whether calls concern all partitions and therefore require a token for all partitions.
        is_audited: whether each allowed call is written to the audit log.
        waits: whether calls may wait for samples or capacity.
        fills_disk: whether calls are rejected while the disk is nearly full.
        is_answer_durable: whether responses contain only state that is already durable.
        is_batched: whether the method may be called in a CallMany stream.
    """

    name: str
    roles: frozenset[Role] = frozenset()
    is_open: bool = False
    has_request_stream: bool = False
    has_response_stream: bool = False
    partitions: Read = _nothing
    put_ids: Read | None = None
    concerns_all: bool = False
    is_audited: bool = False
    waits: bool = False
    fills_disk: bool = False
    is_answer_durable: bool = False
    is_batched: bool = False

    @property
    def short_name(self) -> str:
        """Name of the method without the service name."""
        return self.name.rpartition("/")[2]

    @property
    def is_internal(self) -> bool:
        """Whether only services may call the method, even if tokens are not required."""
        return self.roles == {"service"}

    @property
    def allowed_roles(self) -> frozenset[Role]:
        """All roles that may call the method. The admin role is included unless the method is internal."""
        return self.roles | {"admin"} if self.roles and not self.is_internal else self.roles


def method_of(described: MethodDescriptor) -> Method:
    """Create a method from its proto descriptor. If its rule is incomplete, all calls to the method are rejected.

    Raises:
        ValueError: the rule names a role that tokens cannot have or a field that the request does not have.
    """
    options: Any = described.GetOptions()
    rule: MethodRule = options.Extensions[method_rule_pb2.rule]
    roles: Any = [method_rule_pb2.Role.Name(role).removeprefix("ROLE_").lower() for role in rule.roles]
    if unknown := set(roles) - set(ROLES):
        raise ValueError(f"the protos list roles {unknown}, which tokens cannot have; expected only roles from {ROLES}")
    is_complete = bool(rule.partitions != PARTITIONS_UNSPECIFIED or rule.partition_fields or rule.put_ids_field)
    names = [_reader(path, described.input_type, FieldDescriptor.TYPE_STRING) for path in rule.partition_fields]
    put_ids = None
    if rule.put_ids_field:
        put_ids = _reader(rule.put_ids_field, described.input_type, FieldDescriptor.TYPE_BYTES)

    def partitions(request: Any) -> Sequence[str]:
        found: list[str] = []
        for read in names:
            value = read(request)
            if isinstance(value, str):
                found.append(value)
            else:
                found += value or ()
        # A request without a partition is treated as naming "", which no restricted token covers.
        return list(filter(None, found)) or [""]

    return Method(
        name=f"/{described.containing_service.full_name}/{described.name}",
        roles=frozenset(roles) if is_complete else frozenset(),
        has_request_stream=described.client_streaming,
        has_response_stream=described.server_streaming,
        partitions=partitions if names else _nothing,
        put_ids=None if put_ids is None else lambda request: put_ids(request) or (),
        concerns_all=rule.partitions == PARTITIONS_ALL,
        is_audited=rule.is_audited,
        waits=rule.waits,
        fills_disk=rule.fills_disk,
        is_answer_durable=rule.is_answer_durable,
        is_batched=rule.is_batched,
    )


def _reader(path: str, message: Descriptor, kind: int) -> Callable[[Any], Any]:
    """Return a function that reads the value at a path in a message.

    The function returns None if a message on the path is absent or if the function's argument has an unexpected type.
    If a message on the path is repeated, the function returns the values of all its elements as a list.

    A stream decoder, such as those in wire/columns.py, may return a submessage instead of the entire message. The
    function then reads the value from the submessage.

    Raises:
        ValueError: the field does not exist.
    """
    *parents, last = path.split(".")
    ways, is_repeated = {GetMessageClass(message): parents}, False
    for depth, name in enumerate(parents):
        parent = message.fields_by_name.get(name)
        if parent is None or parent.message_type is None:
            raise ValueError(f"{message.full_name} has no message field {name!r}; correct {path!r} in its rule")
        message = parent.message_type
        is_repeated |= parent.default_value == []
        if depth == 0:
            ways[GetMessageClass(message)] = parents[1:]
    value = message.fields_by_name.get(last)
    if value is None or value.type != kind:
        raise ValueError(f"{message.full_name} has no suitable field {last!r}; correct {path!r} in its rule")

    if is_repeated:
        return lambda request: list(_values(request, parents, last))

    def read(request: Any) -> Any:
        way = ways.get(type(request))
        if way is None:
            return None
        for name in way:
            if not request.HasField(name):
                return None
            request = getattr(request, name)
        return getattr(request, last)

    return read


def _values(message: Any, parents: Sequence[str], last: str) -> Iterator[Any]:
    """Yield the field's value from each message at a path. Any message on the path may be repeated or absent."""
    if not parents:
        yield getattr(message, last)
        return
    name, *rest = parents
    below = getattr(message, name)
    if message.DESCRIPTOR.fields_by_name[name].default_value == []:
        for each in below:
            yield from _values(each, rest, last)
    elif message.HasField(name):
        yield from _values(below, rest, last)


_OWN: Final = (controller_service_pb2, storage_service_pb2, storage_registry_pb2, storage_control_pb2, cluster_pb2)
_STANDARD: Final = (
    *(
        Method(
            name=f"/grpc.health.v1.Health/{name}",
            is_open=True,
            has_response_stream=name == "Watch",
            is_answer_durable=True,
        )
        for name in ("Check", "Watch", "List")
    ),
    Method(
        name="/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        roles=frozenset(ROLES),
        has_request_stream=True,
        has_response_stream=True,
        is_answer_durable=True,
    ),
)
METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {method.name: method for method in _STANDARD}
    | {
        method.name: method
        for file in _OWN
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in map(method_of, service.methods)
    }
)
"""All methods implemented by this package, by full name."""


class Refusal(NamedTuple):
    """A reason for rejecting calls.

    Attributes:
        make_error: function that creates the error for a rejected call.
        reason: text that explains the rejection in the audit log, or "" if rejections are not audited.
    """

    make_error: Callable[[], TqError]
    reason: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Caller:
    """A caller identified by call metadata. All calls with the same credentials share a `Caller`.

    Attributes:
        name: name of the caller's token, or "" if unknown.
        token: token with the caller's permissions, or None if the caller may make all calls except internal ones.
        refusal: reason for rejecting all calls by this caller before their requests are read, or None if calls are
            accepted.
        handlers: handlers for the caller's calls, by method name. Handlers are created on first use.
    """

    name: str = ""
    token: Token | None = None
    refusal: Refusal | None = None
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = field(default_factory=dict)


class Middleware:
    """Base class of middleware. Subclasses override one or both methods. Use each instance from a single event loop."""

    def admit(self, method: Method, details: grpc.HandlerCallDetails) -> Caller | None:
        """Identify the caller from a call's metadata. Return None to let other middleware decide.

        This method runs for each call, before the request is read. A rejected call passes only through this middleware
        and the outer middleware. None of them may read the request.
        """
        return None

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Wrap the inner handler `behavior` for a caller's calls to a method.

        This method runs once per method and caller, so middleware adds no cost to calls to which it does not apply.
        """
        return behavior


class EndableCalls:
    """Tracks running calls so that other code can end them with an error. Use this class from a single event loop."""

    def __init__(self) -> None:
        self._owners: dict[asyncio.Task[Any], Any] = {}
        self._errors: dict[asyncio.Task[Any], TqError] = {}  # errors of ended calls

    def end(self, error_of: Callable[[Any], TqError | None]) -> None:
        """Fail calls with an error. Changes already made by these calls can still take effect.

        Args:
            error_of: function that returns the error for an owner's calls, or None to let these calls continue.
        """
        for task, owner in self._owners.items():
            if task not in self._errors and (error := error_of(owner)) is not None:
                self._errors[task] = error
                task.cancel()

    async def run(self, call: Awaitable[Any], owner: Any = None) -> Any:
        """Await a call in the current task and return its result. Other code can end the call with `end`.

        Raises:
            TqError: the call was ended with `end`.
        """
        task: Any = asyncio.current_task()
        self._owners[task] = owner
        try:
            return await call
        except asyncio.CancelledError:
            if task not in self._errors or task.uncancel():  # cancelled by the caller
                raise
            raise self._errors[task] from None
        finally:
            del self._owners[task]
            self._errors.pop(task, None)
