"""Streaming a put, for asyncio and for threads: the same call in two forms.

grpc's asyncio calls lose the status of a call that is refused while they write: it becomes INTERNAL, "Internal error
from Core". So a put waits until the storage service says that it has room, before its first frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import grpc

from tq_service.client.retry import Deadline
from tq_service.errors import UnavailableError
from tq_service.v1.storage_service_pb2 import PutHeader, PutResponse
from tq_service.wire.frames import ROOM_KEY, FrameParts

_LOST_STATUS = "Internal error from Core"


async def async_send_put(call: Any, header: PutHeader, frames: Iterable[FrameParts], deadline: Deadline) -> PutResponse:
    """Stream a put and return its answer.

    Raises:
        grpc.RpcError: the call failed.
        UnavailableError: it ended while frames were sent, and why is lost; another attempt will tell.
    """
    stream = call(timeout=deadline.remaining())
    try:
        await _write(stream, header, frames)
        answer: PutResponse = await stream
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST_STATUS:
            raise UnavailableError("the put was broken off by the service or the network") from None
        raise
    finally:
        stream.cancel()
    return answer


async def _write(stream: Any, header: PutHeader, frames: Iterable[FrameParts]) -> None:
    try:
        await stream.write(header)
        if ROOM_KEY not in dict(await stream.initial_metadata()):
            return  # it is refused, or there already
        for frame in frames:
            await stream.write(frame)
        await stream.done_writing()
    except asyncio.InvalidStateError:
        return  # the call has ended, and awaiting it says how


def send_put(call: Any, header: PutHeader, frames: Iterable[FrameParts], deadline: Deadline) -> PutResponse:
    """Stream a put and return its answer.

    Raises:
        grpc.RpcError: the call failed.
    """
    answer: PutResponse = call(_messages(header, frames), timeout=deadline.remaining())
    return answer


def _messages(header: PutHeader, frames: Iterable[FrameParts]) -> Iterator[PutHeader | FrameParts]:
    yield header
    yield from frames
