"""What is known of each method: the roles it needs, which partitions a call concerns, what it changes and waits for.

The protos say it, each method in its option `rule` (protos/tq_service/v1/method_rule.proto); here it is read from the
descriptors. The standard services, whose protos are not ours, have their rules here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from google.protobuf.message_factory import GetMessageClass

from tq_service.internal.v1 import cluster_pb2, storage_control_pb2, storage_registry_pb2
from tq_service.v1 import controller_service_pb2, method_rule_pb2, storage_service_pb2
from tq_service.v1.method_rule_pb2 import PARTITIONS_ALL, PARTITIONS_LISTED, PARTITIONS_UNSPECIFIED, MethodRule
from tq_service.wire.connection import ROLES, Role

Read: TypeAlias = Callable[[Any], Sequence[Any]]


def _nothing(_request: Any) -> Sequence[Any]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of a service.

    Attributes:
        name: its full name, such as "/tq_service.v1.ControllerService/Insert".
        roles: one of these is needed, or admin; none: it is refused to all.
        is_open: whether everybody may call it, without a token, as probes do.
        has_request_stream: whether its requests are a stream.
        has_response_stream: whether its answers are one.
        partitions: returns the names of partitions in a request, or in the first message of a stream of them.
        put_ids: returns the puts that are named there, whose partitions count as named; None: no request names any.
        concerns_all: whether a call concerns all partitions, so that the token must be for all.
        lists_partitions: whether the answer lists partitions, of which only those that the token is for are shown.
        is_audited: whether a call that is let in has its line in the audit log.
        changes_state: whether it changes anything.
        is_idempotent: whether a repeat under the same ids has no further effect.
        waits: whether it may wait for samples or capacity.
        fills_disk: whether it is refused while the disk is nearly full.
        is_answer_durable: whether what it answers was durable before anybody could ask for it.
    """

    name: str
    roles: frozenset[Role] = frozenset()
    is_open: bool = False
    has_request_stream: bool = False
    has_response_stream: bool = False
    partitions: Read = _nothing
    put_ids: Read | None = None
    concerns_all: bool = False
    lists_partitions: bool = False
    is_audited: bool = False
    changes_state: bool = True
    is_idempotent: bool = False
    waits: bool = False
    fills_disk: bool = False
    is_answer_durable: bool = False

    @property
    def short_name(self) -> str:
        """Its name without that of its service."""
        return self.name.rpartition("/")[2]

    @property
    def is_internal(self) -> bool:
        """Whether services alone may call it, with tokens or without."""
        return self.roles == {"service"}

    @cached_property
    def is_for_clients(self) -> bool:
        """Whether somebody else than services may call it."""
        return bool(self.roles - {"service"})

    @property
    def allowed_roles(self) -> frozenset[Role]:
        """One of these is needed."""
        return self.roles | {"admin"} if self.roles and not self.is_internal else self.roles


def method_of(described: MethodDescriptor) -> Method:
    """Return what the protos say of a method; one of which they say too little is refused to all.

    Raises:
        ValueError: they name a field that the request has not.
    """
    options: Any = described.GetOptions()
    rule: MethodRule = options.Extensions[method_rule_pb2.rule]
    is_complete = bool(rule.partitions != PARTITIONS_UNSPECIFIED or rule.partition_fields or rule.put_ids_field)
    return Method(
        name=f"/{described.containing_service.full_name}/{described.name}",
        roles=frozenset(map(_role, rule.roles)) if is_complete else frozenset(),
        has_request_stream=described.client_streaming,
        has_response_stream=described.server_streaming,
        partitions=_partitions_in(rule.partition_fields, described.input_type),
        put_ids=_put_ids_in(rule.put_ids_field, described.input_type),
        concerns_all=rule.partitions == PARTITIONS_ALL,
        lists_partitions=rule.partitions == PARTITIONS_LISTED,
        is_audited=rule.is_audited,
        changes_state=options.idempotency_level != MethodOptions.NO_SIDE_EFFECTS,
        is_idempotent=options.idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN,
        waits=rule.waits,
        fills_disk=rule.fills_disk,
        is_answer_durable=rule.is_answer_durable,
    )


def _role(number: Any) -> Role:
    name = method_rule_pb2.Role.Name(number).removeprefix("ROLE_").lower()
    if name not in ROLES:
        raise ValueError(f"the protos name the role {name!r}, which no token can have; expected one of {ROLES}")
    return name


def _partitions_in(paths: Sequence[str], request: Descriptor) -> Read:
    """Return what reads the names of partitions; a request that has none of the messages they are in names ""."""
    if not paths:
        return _nothing
    fields = [_FieldPath(path, request, FieldDescriptor.TYPE_STRING) for path in paths]

    def read(message: Any) -> Sequence[str]:
        names = [field.read(message) for field in fields]
        return [name for name in names if name is not None] or [""] if None in names else names

    return read


@cache
def listed_names(answer: Descriptor) -> Mapping[str, Callable[[Any], str | None]]:
    """Return by list of an answer what reads the name of the partition that a member is about; others have none."""
    found: dict[str, Callable[[Any], str | None]] = {}
    for field in answer.fields:
        if field.message_type is None or field.default_value != []:
            continue
        for path in ("partition_id", "summary.partition_id"):
            with contextlib.suppress(ValueError):
                found[field.name] = _FieldPath(path, field.message_type, FieldDescriptor.TYPE_STRING).read
                break
    return found


def _put_ids_in(path: str, request: Descriptor) -> Read | None:
    if not path:
        return None
    field = _FieldPath(path, request, FieldDescriptor.TYPE_BYTES)
    return lambda message: field.read(message) or ()


class _FieldPath:
    """Where a message has a value.

    The decoder of a stream may return a part of a message instead of the message, as those of wire/frames.py do; the
    value is then looked for in that part.
    """

    def __init__(self, path: str, message: Descriptor, kind: int) -> None:
        *parents, last = path.split(".")
        self._last = last
        self._parents = {GetMessageClass(message): parents}
        for depth, name in enumerate(parents):
            field = message.fields_by_name.get(name)
            if field is None or field.message_type is None:
                raise ValueError(f"{message.full_name} has no message {name!r}; correct {path!r} in its rule")
            message = field.message_type
            if depth == 0:
                self._parents[GetMessageClass(message)] = parents[1:]
        field = message.fields_by_name.get(last)
        if field is None or field.type != kind:
            raise ValueError(f"{message.full_name} has no such field as {last!r}; correct {path!r} in its rule")

    def read(self, message: Any) -> Any:
        """Return the value, None where a message on the way to it is absent, or this is another message."""
        parents = self._parents.get(type(message))
        if parents is None:
            return None
        for name in parents:
            if not message.HasField(name):
                return None
            message = getattr(message, name)
        return getattr(message, self._last)


def _standard_methods() -> Iterator[Method]:
    """Yield the methods of the standard services, which have no rules in their protos."""
    for name in ("Check", "Watch", "List"):
        yield Method(
            name=f"/grpc.health.v1.Health/{name}",
            is_open=True,
            has_response_stream=name == "Watch",
            changes_state=False,
            is_idempotent=True,
            is_answer_durable=True,
        )
    yield Method(
        name="/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        roles=frozenset(ROLES),
        has_request_stream=True,
        has_response_stream=True,
        changes_state=False,
        is_idempotent=True,
        is_answer_durable=True,
    )


def _own_methods() -> Iterator[Method]:
    for file in (controller_service_pb2, storage_service_pb2, storage_registry_pb2, storage_control_pb2, cluster_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from map(method_of, service.methods)


METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {method.name: method for method in (*_own_methods(), *_standard_methods())}
)
"""All methods that a process of the service may have, by their full names."""
