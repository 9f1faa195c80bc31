"""The table of gRPC methods, and the interface for middleware that handles their calls.

The option `rule` in the protos describes each method (protos/tq_service/v1/method_rule.proto). This module reads the
rules from the descriptors. For gRPC's standard services, whose protos have no such option, this module defines the
rules itself.

For every kind of method, a handler is a coroutine function. It receives the request (or an iterator over the requests)
and the context. It returns the answer, or writes the answers of a stream to the context.
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
"""Returns whether the current caller may see a partition. Methods that list partitions omit the hidden ones."""

token_name: Final[ContextVar[str]] = ContextVar("token_name", default="")
"""Name of the current call's token; "" without a token."""


def _nothing(_request: Any) -> Sequence[Any]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A gRPC method, with the rules that middleware applies to its calls.

    Attributes:
        name: full name, such as "/tq_service.v1.ControllerService/Insert".
        roles: roles, one of which the caller needs unless it has role admin; if empty, all calls are refused.
        is_open: whether everyone may call the method without a token (health probes).
        has_request_stream: whether the method's requests are a stream.
        has_response_stream: whether the method's answers are a stream.
        partitions: returns the partitions named in a request; for a stream, in its first message.
        put_ids: returns the puts named in a request; their partitions also count as named. None if requests name no
            puts.
        concerns_all: whether calls concern all partitions and therefore require a token for all partitions.
        is_audited: whether each allowed call is written to the audit log.
        waits: whether calls may wait for samples or capacity.
        fills_disk: whether calls are refused while the disk is nearly full.
        is_answer_durable: whether answers contain only state that is already durable.
        is_batched: whether the method may be called within a CallMany.
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
        """Method name without the service name."""
        return self.name.rpartition("/")[2]

    @property
    def is_internal(self) -> bool:
        """Whether only services may call the method, even if tokens are not required."""
        return self.roles == {"service"}

    @property
    def allowed_roles(self) -> frozenset[Role]:
        """Roles that may call the method."""
        return self.roles | {"admin"} if self.roles and not self.is_internal else self.roles


def method_of(described: MethodDescriptor) -> Method:
    """Return a method as its proto describes it. If the rule is incomplete, no one may call the method.

    Raises:
        ValueError: the rule names a role that tokens cannot have, or a field that the request lacks.
    """
    options: Any = described.GetOptions()
    rule: MethodRule = options.Extensions[method_rule_pb2.rule]
    roles: Any = [method_rule_pb2.Role.Name(role).removeprefix("ROLE_").lower() for role in rule.roles]
    if unknown := set(roles) - set(ROLES):
        raise ValueError(f"the protos name the roles {unknown}, which tokens cannot have; expected some of {ROLES}")
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
        # A request that names no partition counts as naming "", which no restricted token covers.
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

    The function returns None if a message on the path is absent, or if its argument is a message of another type. If a
    message on the path is repeated, the value is a list of the values in all elements.

    The decoder of a stream may return a part of a message, as the decoders in wire/columns.py do. The function then
    reads the value from that part.

    Raises:
        ValueError: the message has no such field.
    """
    *parents, last = path.split(".")
    ways, is_repeated = {GetMessageClass(message): parents}, False
    for depth, name in enumerate(parents):
        parent = message.fields_by_name.get(name)
        if parent is None or parent.message_type is None:
            raise ValueError(f"{message.full_name} does not have a message {name!r}; correct {path!r} in its rule")
        message = parent.message_type
        is_repeated |= parent.default_value == []
        if depth == 0:
            ways[GetMessageClass(message)] = parents[1:]
    value = message.fields_by_name.get(last)
    if value is None or value.type != kind:
        raise ValueError(f"{message.full_name} does not have a suitable field {last!r}; correct {path!r} in its rule")

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
    """Yield the values of a field in all messages at a path. Messages on the path may be repeated or absent."""
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
"""All methods that this package can serve, by full name."""


class Refusal(NamedTuple):
    """A reason to refuse calls.

    Attributes:
        make_error: returns the error for a refused call.
        reason: reason shown in the audit log; "" if refusals are not audited.
    """

    make_error: Callable[[], TqError]
    reason: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Caller:
    """A caller identified by the metadata of its calls. All calls with equal credentials share one object.

    Attributes:
        name: name of the caller's token; "" if unknown.
        token: the caller's token, which contains its permissions; None if the caller may make all calls except internal
            ones.
        refusal: the reason, if all of the caller's calls are refused before their requests are read; otherwise None.
        handlers: handlers for the caller's calls by method name, created on first use.
    """

    name: str = ""
    token: Token | None = None
    refusal: Refusal | None = None
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = field(default_factory=dict)


class Middleware:
    """A concern that applies to all calls. Subclasses override one or both methods. Confined to one event loop."""

    def admit(self, method: Method, details: grpc.HandlerCallDetails) -> Caller | None:
        """Return a call's caller, identified by the call's metadata, or None to let other middleware decide.

        This method runs for each call, before the request is read. A refused call passes only through this middleware
        and the middleware outside it; there, the request is an iterator that must not be read.
        """
        return None

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Wrap `behavior`, the next handler inward, for a caller's calls to a method.

        This method runs once per method and caller, so middleware that does not apply to a method adds no cost to its
        calls.
        """
        return behavior


class EndableCalls:
    """Running calls that other code can end with an error. Confined to one event loop."""

    def __init__(self) -> None:
        self._owners: dict[asyncio.Task[Any], Any] = {}
        self._errors: dict[asyncio.Task[Any], TqError] = {}  # errors of ended calls

    def end(self, error_of: Callable[[Any], TqError | None]) -> None:
        """End calls with an error. Their changes may still take effect, as after a lost answer.

        Args:
            error_of: returns the error for all calls of an owner, or None to let them continue.
        """
        for task, owner in self._owners.items():
            if task not in self._errors and (error := error_of(owner)) is not None:
                self._errors[task] = error
                task.cancel()

    async def run(self, call: Awaitable[Any], owner: Any = None) -> Any:
        """Await a call in the current task and return its result. While it runs, `end` can end it.

        Raises:
            TqError: `end` ended the call.
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
