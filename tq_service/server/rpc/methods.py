"""The table of methods, and the interface between calls and their middleware.

The protos describe each method in its option `rule` (protos/tq_service/v1/method_rule.proto), which this module reads
from the descriptors. The rules of the standard services, whose protos are not ours, are defined here.

A handler is one coroutine for every shape of method. It takes the request, or an iterator of requests, and the context.
It returns the answer, or writes each answer of a stream to the context.
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

if TYPE_CHECKING:  # the rules are read without the server's packages, too
    from tq_service.server.credential_files import Token

Read: TypeAlias = Callable[[Any], Sequence[Any]]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behavior: TypeAlias = Callable[[Any, Context], Awaitable[Any]]

shown_partitions: Final[ContextVar[Callable[[str], bool]]] = ContextVar(
    "shown_partitions", default=lambda _partition_id: True
)
"""Returns whether the caller may know that a partition exists; methods that list partitions omit the others."""

token_name: Final[ContextVar[str]] = ContextVar("token_name", default="")
"""The name of the token of a call, "" without one."""


def _nothing(_request: Any) -> Sequence[Any]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of a service.

    Attributes:
        name: its full name, such as "/tq_service.v1.ControllerService/Insert".
        roles: one of these is needed, or admin; if empty, nobody may call it.
        is_open: whether everybody may call it without a token (probes).
        has_request_stream: whether its requests are a stream.
        has_response_stream: whether its answers are a stream.
        partitions: returns the partition names in a request, or in the first message of a stream of requests.
        put_ids: returns the puts named there; their partitions count as named. None: its requests do not name puts.
        concerns_all: whether a call concerns all partitions and so needs a token for all.
        is_audited: whether the audit log has a line for each allowed call.
        waits: whether it may wait for samples or capacity.
        fills_disk: whether it is refused while the disk is nearly full.
        is_answer_durable: whether its answers contain only state that is already durable.
        is_batched: whether it may be a call of a CallMany.
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
        """Its name without the service."""
        return self.name.rpartition("/")[2]

    @property
    def is_internal(self) -> bool:
        """Whether only services may call it, with tokens or without."""
        return self.roles == {"service"}

    @property
    def allowed_roles(self) -> frozenset[Role]:
        """Roles that may call it."""
        return self.roles | {"admin"} if self.roles and not self.is_internal else self.roles


def method_of(described: MethodDescriptor) -> Method:
    """Return a method as its proto describes it; nobody may call a method with an incomplete rule.

    Raises:
        ValueError: the rule names a role that tokens cannot have, or a field that the request does not have.
    """
    options: Any = described.GetOptions()
    rule: MethodRule = options.Extensions[method_rule_pb2.rule]
    roles: Any = [method_rule_pb2.Role.Name(role).removeprefix("ROLE_").lower() for role in rule.roles]
    if unknown := set(roles) - set(ROLES):
        raise ValueError(f"the protos name the roles {unknown}, which tokens cannot have; expected roles of {ROLES}")
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
        # A request without any name counts as naming "", which no restricted token covers. Some names may be empty.
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
    """Return a function that reads the value at a path of a message.

    It returns None if a message on the path is absent, or if it gets a message of another type. The path may go through
    a repeated message; the value is then the list of the values of all its elements.

    The decoder of a stream may return a part of a message instead of the message, as those of wire/columns.py do. The
    value is then read from that part.

    Raises:
        ValueError: the message does not have this field.
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
    """Yield the values of a field of all messages at a path; messages on the path may be repeated or absent."""
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
"""All methods that a process of the service may have, by their full names."""


class Refusal(NamedTuple):
    """The reason for refusing calls.

    Attributes:
        make_error: returns the error for one call.
        reason: for the audit log; "" if the refusal is not audited.
    """

    make_error: Callable[[], TqError]
    reason: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Caller:
    """The caller as identified by metadata: one object is shared by all calls with equal credentials.

    Attributes:
        name: name of its token, "" if unknown.
        token: its permissions; None: everything that is not internal.
        refusal: why all its calls are refused before any request is read; None: they are not.
        handlers: handlers of its calls by method, made on first use and dropped with the caller.
    """

    name: str = ""
    token: Token | None = None
    refusal: Refusal | None = None
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = field(default_factory=dict)


class Middleware:
    """One concern of all calls. Overriding a method is optional. Confined to one event loop."""

    def admit(self, method: Method, details: grpc.HandlerCallDetails) -> Caller | None:
        """Return the caller by the metadata of a call, before its request is read; None: leave it to other middleware.

        Runs for each call. A refused call passes only this middleware and those outside it; there its request is an
        iterator that must not be read.
        """
        return None

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return the handler for the calls of a method by a caller; `behavior` is the next handler inward.

        Runs once per method and caller, so a concern that does not apply to a method costs its calls nothing.
        """
        return behavior


class EndableCalls:
    """Running calls that can be ended from outside with an error. Confined to one event loop."""

    def __init__(self) -> None:
        self._owners: dict[asyncio.Task[Any], Any] = {}
        self._errors: dict[asyncio.Task[Any], TqError] = {}  # of ended calls

    def end(self, error_of: Callable[[Any], TqError | None]) -> None:
        """End calls; their changes may persist, as when an answer is lost.

        Args:
            error_of: returns the error for the calls of an owner, or None to let them continue.
        """
        for task, owner in self._owners.items():
            if task not in self._errors and (error := error_of(owner)) is not None:
                self._errors[task] = error
                task.cancel()

    async def run(self, call: Awaitable[Any], owner: Any = None) -> Any:
        """Await a call in the current task and return its result; `end` may end it.

        Raises:
            TqError: `end` ended the call.
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
