"""Answers as they are kept for retries: a message of protobuf takes 2 KB in memory, its bytes a few hundred."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from tq_service.v1 import controller_service_pb2

Packed = tuple[str, bytes]


def pack(answer: Message) -> Packed:
    """Return what is kept of an answer: the name of its message, and its bytes."""
    return answer.DESCRIPTOR.name, answer.SerializeToString()


def weigh(packed: Packed) -> int:
    """Return the bytes of what is kept of an answer."""
    return len(packed[1])


def unpack(packed: Packed) -> Message:
    """Return the answer."""
    name, data = packed
    kind: Any = getattr(controller_service_pb2, name)
    message: Message = kind.FromString(data)
    return message
