"""Streams of calls, turn by turn of the loop: others have their turns, and waits for durability are shared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc.status_pb2 import Status

from tq_service.errors import NotLeaderError, UnavailableError
from tq_service.server.rpc import batches
from tq_service.server.rpc.batches import Batches
from tq_service.server.rpc.calls import DurableAnswers, RunningCalls, Services
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.error_table import from_rpc_error

NAME = "/tq_service.v1.ControllerService/GetMeta"


class Server:
    def add_generic_rpc_handlers(self, handlers: Any) -> None: ...


class Disk:
    """A state store that counts how often it is waited for."""

    def __init__(self) -> None:
        self.has_unflushed, self.is_failing, self.is_disk_low = True, False, False
        self.wait_count = 0
        self.is_durable = asyncio.Event()

    async def wait_durable(self) -> None:
        self.wait_count += 1
        await self.is_durable.wait()


class Member:
    """A controller in a cluster."""

    may_answer, leader_address, epoch = True, "b:1", 7


class Stream:
    """The context of a stream, which keeps what is written."""

    def __init__(self) -> None:
        self.answers: list[list[pb.BatchedAnswer]] = []

    def invocation_metadata(self) -> Any:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, message: pb.CallManyResponse) -> None:
        self.answers.append(list(message.answers))


def services_of(behavior: Any, *middleware: Any) -> Services:
    server: Any = Server()
    services = Services(server, [*middleware, RunningCalls()])
    handler = grpc.unary_unary_rpc_method_handler(
        behavior, pb.GetMetaRequest.FromString, pb.GetMetaResponse.SerializeToString
    )
    services.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tq_service.v1.ControllerService", {"GetMeta": handler}),)
    )
    return services


async def message_of(count: int, *, stays_open: bool = False) -> AsyncIterator[pb.CallManyRequest]:
    yield pb.CallManyRequest(calls=[pb.BatchedCall(call_id=number, method="GetMeta") for number in range(count)])
    if stays_open:
        await asyncio.Event().wait()


async def test_others_have_their_turn_after_16_calls() -> None:
    made, between = [0], [0]

    async def answer(request: Any, context: Any) -> pb.GetMetaResponse:
        made[0] += 1
        return pb.GetMetaResponse()

    async def watch() -> None:
        while True:
            before = made[0]
            await asyncio.sleep(0)
            between.append(made[0] - before)

    watching = asyncio.ensure_future(watch())
    stream: Any = Stream()
    await Batches(services_of(answer), 60.0).run(message_of(256), stream)
    watching.cancel()
    assert made == [256]
    assert max(between) == batches._CALLS_A_TURN
    assert sorted(answer.call_id for some in stream.answers for answer in some) == list(range(256))
    assert max(len(some) for some in stream.answers) > 8


async def test_answers_of_calls_that_wait_for_one_flush_go_in_one_message() -> None:
    disk: Any = Disk()

    async def answer(request: Any, context: Any) -> pb.GetMetaResponse:
        return pb.GetMetaResponse()

    stream: Any = Stream()
    run = asyncio.ensure_future(Batches(services_of(answer, DurableAnswers(disk)), 60.0).run(message_of(64), stream))
    for _ in range(50):
        await asyncio.sleep(0)
    assert disk.wait_count == 64
    assert stream.answers == []
    disk.is_durable.set()
    await run
    assert [len(some) for some in stream.answers] == [64]


async def test_calls_end_with_the_leadership() -> None:
    disk, member = Disk(), Member()
    kept: Any = DurableAnswers(disk, member)  # type: ignore[arg-type]

    async def wait(request: Any, context: Any) -> None:
        await asyncio.Event().wait()

    stream: Any = Stream()
    services = services_of(wait, kept)
    services._middleware = services._middleware[::-1]  # type: ignore[assignment]  # errors become statuses outside
    run = asyncio.ensure_future(Batches(services, 60.0).run(message_of(3, stays_open=True), stream))
    for _ in range(20):
        await asyncio.sleep(0)
    member.may_answer = False
    kept.end_calls()
    for _ in range(20):
        await asyncio.sleep(0)
    errors = [Status.FromString(answer.status) for some in stream.answers for answer in some]
    assert len(errors) == 3
    found = [from_rpc_error(grpc.StatusCode.UNAVAILABLE, None, error) for error in errors]
    assert {(type(error), error.metadata["leader_address"]) for error in found} == {(NotLeaderError, "b:1")}
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_a_stream_that_drains_waits_for_calls_that_are_open() -> None:
    may_answer = asyncio.Event()

    async def answer(request: Any, context: Any) -> pb.GetMetaResponse:
        await may_answer.wait()
        return pb.GetMetaResponse()

    stream: Any = Stream()
    streams = Batches(services_of(answer), 60.0)
    run = asyncio.ensure_future(streams.run(message_of(2, stays_open=True), stream))
    await asyncio.sleep(0.01)
    streams.drain()
    await asyncio.sleep(0.01)
    assert not run.done()
    may_answer.set()
    with pytest.raises(UnavailableError, match="shutting down"):
        await run
    assert [len(some) for some in stream.answers] == [2]


async def test_a_fault_of_a_handler_ends_the_stream_with_it() -> None:
    async def answer(request: Any, context: Any) -> str:
        return "no message"

    stream: Any = Stream()
    with pytest.raises(TypeError):
        await Batches(services_of(answer), 60.0).run(message_of(2, stays_open=True), stream)
    assert stream.answers == []
