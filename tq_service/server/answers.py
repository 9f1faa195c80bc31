"""Answers as they are kept for retries: a message of protobuf takes 2 KB in memory, its bytes a few hundred."""

from __future__ import annotations

from google.protobuf.message import Message

Packed = tuple[type[Message], bytes]


def pack(answer: Message) -> Packed:
    """Return what is kept of an answer."""
    return type(answer), answer.SerializeToString()


def weigh(packed: Packed) -> int:
    """Return the bytes of what is kept of an answer."""
    return len(packed[1])


def unpack(packed: Packed) -> Message:
    """Return the answer."""
    kind, data = packed
    return kind.FromString(data)
