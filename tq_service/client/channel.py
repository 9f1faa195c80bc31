"""Channels: their options, the address, and the stub of the controller on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import ChannelOptions

from tq_service.addresses import DEFAULT_ADDRESS, parse_address
from tq_service.v1 import controller_service_pb2, storage_service_pb2
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub
from tq_service.wire.connection import CONNECTION_OPTIONS, cluster_options

if TYPE_CHECKING:
    from tq_service.v1.controller_service_pb2_grpc import ControllerServiceAsyncStub

    AsyncControllerStub = ControllerServiceAsyncStub
    ControllerStub = ControllerServiceStub

ADDRESS_VARIABLE: Final = "TQ_ADDRESS"
MAX_MESSAGE_BYTES: Final = 256 << 20

CONTROLLER_STUB: Final[Any] = ControllerServiceStub
"""The calls of the controller on a channel, sync or asyncio."""

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *CONNECTION_OPTIONS,
    # Connections of a parent process must not serve its forked children.
    ("grpc.use_local_subchannel_pool", 1),
    # A get of the sync client reads its stream in its own thread instead of being woken by another one.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
)


CLUSTER_CHANNEL_OPTIONS: Final = cluster_options(CHANNEL_OPTIONS)
"""Of channels to controllers of a cluster: another one takes over while one that is paused still holds its calls."""


@cache
def _methods() -> dict[str, tuple[str, Callable[[bytes], Any]]]:
    """Return the full name of each method, and what reads its answer, by the name of its request."""
    return {
        method.input_type.full_name: (
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.output_type).FromString,
        )
        for module in (controller_service_pb2, storage_service_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def method_for(request: Message) -> tuple[str, Callable[[bytes], Any]]:
    """Return the full name of the method that takes a request, and what reads its answer."""
    return _methods()[request.DESCRIPTOR.full_name]


def resolve_address(address: str | Sequence[str] | None) -> str:
    """Return the address to use: the given one, or several with commas between, `TQ_ADDRESS`, or localhost:50051.

    Raises:
        InvalidArgumentError: nothing can be reached at such an address.
    """
    if address is not None:
        if not isinstance(address, str) and isinstance(address, Sequence):
            address = ",".join(map(parse_address, address))
        return parse_address(address)
    return parse_address(os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS, name=ADDRESS_VARIABLE)
