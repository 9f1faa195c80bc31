"""All methods of the service, and calls of them by name: tests that walk the table of methods need no lists."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from google.protobuf.message import Message

from tq_service.internal.v1 import storage_control_pb2, storage_registry_pb2
from tq_service.server.rpc.methods import METHODS
from tq_service.v1 import controller_service_pb2, method_rule_pb2, storage_service_pb2

CONTROLLER = "/tq_service.v1.ControllerService/"
STORAGE = "/tq_service.v1.StorageService/"
REGISTRY = "/tq_service.internal.v1.StorageRegistryService/"
CONTROL = "/tq_service.internal.v1.StorageControlService/"
DESCRIBED: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (controller_service_pb2, storage_service_pb2, storage_registry_pb2, storage_control_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""The methods of our own protos, by their full names; read again, so that none can be missing in the table."""
LISTING = {
    name
    for name, described in DESCRIBED.items()
    if described.GetOptions().Extensions[method_rule_pb2.rule].partitions == method_rule_pb2.PARTITIONS_LISTED
}
"""Those that answer the partitions that a token is for."""
INTERNAL = [name for name in DESCRIBED if METHODS[name].is_internal]
SERVED = [name for name in DESCRIBED if name not in INTERNAL or name.startswith(REGISTRY)]
"""What a service for all has: its storage service is embedded, and needs no calls between services."""


def names_in(message: Descriptor) -> set[str]:
    """Return the names of all fields of a message, and of the messages in it: what an error may call wrong."""
    nested = (field.message_type for field in message.fields if field.message_type is not None)
    inner = (names_in(each) for each in nested if each.file.package.startswith("tq_service"))
    return {field.name for field in message.fields}.union(*inner)


def is_idempotent(described: MethodDescriptor) -> bool:
    """Whether its proto says that a repeat under the same ids has no further effect."""
    return described.GetOptions().idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN


def changes_state(described: MethodDescriptor) -> bool:
    """Whether it may change anything, as its proto says."""
    return described.GetOptions().idempotency_level != MethodOptions.NO_SIDE_EFFECTS


def shape_of(described: MethodDescriptor) -> str:
    """Return the name of a method's shape, such as "stream_unary"."""
    kinds = described.client_streaming, described.server_streaming
    return "_".join("stream" if is_stream else "unary" for is_stream in kinds)


def call(channel: grpc.Channel, name: str, request: Message, metadata: Any = None) -> Any:
    """Make a call and return its answer, or the list of them: of a watch, which has no end, the first."""
    described = DESCRIBED[name]
    make = getattr(channel, shape_of(described))(
        name,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=described.output_type._concrete_class.FromString,
    )
    answer = make(iter([request]) if described.client_streaming else request, timeout=20, metadata=metadata)
    if name.endswith("/Watch"):
        first = next(answer)
        answer.cancel()
        return [first]
    return list(answer) if described.server_streaming else answer
