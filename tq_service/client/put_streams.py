"""Streaming a put, for asyncio and for threads: the same call in two forms.

grpc's asyncio calls lose the status of a call that is refused while they write: it becomes INTERNAL, "Internal error
from Core". So a put waits until the storage service says that it has room, before its first frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from tq_service.client.retry import Deadline
from tq_service.errors import UnavailableError
from tq_service.v1.storage_service_pb2 import PutDeposited, PutHeader, PutResponse
from tq_service.wire.credentials import Metadata
from tq_service.wire.frames import SEND_AS_FDS, SEND_AS_KEY, FrameParts

_LOST_STATUS = "Internal error from Core"

Deposit = Callable[[], None]


async def async_send_put(
    call: Any,
    header: PutHeader,
    frames: Iterable[FrameParts],
    deadline: Deadline,
    *,
    deposit: Deposit | None = None,
    metadata: Metadata | None = None,
) -> PutResponse:
    """Stream a put and return its answer.

    Args:
        call: the method of the channel.
        header: the first message.
        frames: the bytes.
        deadline: of the call.
        deposit: hands the bytes over as shared memory, for headers with a session; the service decides.
        metadata: of the call.

    Raises:
        grpc.RpcError: the call failed.
        UnavailableError: it ended while frames were sent, and why is lost; another attempt will tell.
    """
    stream = call(timeout=deadline.remaining(), metadata=metadata)
    try:
        await _write(stream, header, frames, deposit)
        answer: PutResponse = await stream
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST_STATUS:
            raise UnavailableError("the put was broken off by the service or the network") from None
        raise
    finally:
        stream.cancel()
    return answer


async def _write(stream: Any, header: PutHeader, frames: Iterable[FrameParts], deposit: Deposit | None) -> None:
    try:
        await _write_header(stream, header)
        # Older versions of grpcio have keys() of pairs, which dict() would look up; so it gets an iterator.
        room = dict(iter(await stream.initial_metadata())).get(SEND_AS_KEY)
        if room is None:
            return  # it is refused, or there already
        if room == SEND_AS_FDS and deposit is not None:
            await asyncio.to_thread(deposit)
            await stream.write(PutDeposited())
        else:
            for frame in frames:
                await stream.write(frame)
        await stream.done_writing()
    except asyncio.InvalidStateError:
        return  # the call has ended, and awaiting it says how


async def _write_header(stream: Any, header: PutHeader) -> None:
    """Write the first message, which grpc waits with for ever where a call ends before it has begun: by a close."""
    writing = asyncio.ensure_future(stream.write(header))
    stream.add_done_callback(lambda _: writing.cancel())
    try:
        await writing
    except asyncio.CancelledError:
        if not stream.done():
            raise
        raise asyncio.InvalidStateError from None  # awaiting it says how it ended, also where the caller is cancelled


def send_put(
    call: Any,
    header: PutHeader,
    frames: Iterable[FrameParts],
    deadline: Deadline,
    *,
    deposit: Deposit | None = None,
    metadata: Metadata | None = None,
) -> PutResponse:
    """Stream a put and return its answer; see `async_send_put`.

    Raises:
        grpc.RpcError: the call failed.
    """
    if deposit is not None:
        return _send_after_room(call, header, frames, deadline, deposit=deposit, metadata=metadata)
    answer: PutResponse = call(_messages(header, frames), timeout=deadline.remaining(), metadata=metadata)
    return answer


def _send_after_room(
    call: Any,
    header: PutHeader,
    frames: Iterable[FrameParts],
    deadline: Deadline,
    *,
    deposit: Deposit,
    metadata: Metadata | None,
) -> PutResponse:
    """Send the header, wait for what the service answers, then hand the bytes over or send them."""
    outbox: SimpleQueue[PutHeader | PutDeposited | FrameParts | None] = SimpleQueue()
    stream = call.future(iter(outbox.get, None), timeout=deadline.remaining(), metadata=metadata)
    try:
        outbox.put(header)
        room = dict(stream.initial_metadata()).get(SEND_AS_KEY)
        if room == SEND_AS_FDS:
            deposit()
            outbox.put(PutDeposited())
        elif room is not None:  # else it is refused, or there already
            for frame in frames:
                outbox.put(frame)
        outbox.put(None)
        answer: PutResponse = stream.result()
    finally:
        outbox.put(None)
        stream.cancel()
    return answer


def _messages(header: PutHeader, frames: Iterable[FrameParts]) -> Iterator[PutHeader | FrameParts]:
    yield header
    yield from frames
