"""The parts of a Put stream in the order in which they must come: a header, then frames or the note of a deposit.

What is out of order raises InvalidArgumentError.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeAlias

from tq_service.errors import InvalidArgumentError
from tq_service.server.progress import LEAST_PROGRESS_BYTES
from tq_service.v1 import storage_service_pb2 as pb

Part: TypeAlias = pb.PutHeader | pb.PutDeposited | memoryview


async def read_header(parts: AsyncIterator[Part]) -> pb.PutHeader:
    """Return the first part, which must be the header."""
    async for part in parts:
        if isinstance(part, pb.PutHeader):
            return part
        raise InvalidArgumentError(f"a put must begin with its header, got {_name(part)}")
    raise InvalidArgumentError("a put must begin with its header, got an empty stream")


async def read_deposited(parts: AsyncIterator[Part]) -> None:
    """Wait for the note that the bytes were handed over."""
    async for part in parts:
        if isinstance(part, pb.PutDeposited):
            return
        raise InvalidArgumentError(f"this put has room for a deposit; expected the note of it, got {_name(part)}")
    raise InvalidArgumentError("this put has room for a deposit; expected the note of it, got the end of the stream")


def progress_bytes(part: Part) -> int:
    """Return the bytes of a frame; what is no frame comes once."""
    return len(part) if isinstance(part, memoryview) else LEAST_PROGRESS_BYTES


def frame_of(part: Part) -> memoryview:
    """Return a part that must be a frame."""
    if isinstance(part, memoryview):
        return part
    raise InvalidArgumentError(f"after the header of a put come frames, got {_name(part)}")


def _name(part: Part) -> str:
    match part:
        case pb.PutHeader():
            return "a second header"
        case pb.PutDeposited():
            return "the note of a deposit, for which this put has no session"
    return f"a frame of {len(part)} bytes"
