"""The inbox reads few messages at a time: counted where handlers get them, and with clients that are slow or silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from tq_service.errors import DeadlineError, LimitExceededError
from tq_service.server.rpc.adapter import Services
from tq_service.server.rpc.errors import ErrorStatuses
from tq_service.server.rpc.inbox import MAX_OPEN_REQUEST_BYTES, MAX_WAITING_BYTES, Lane
from tq_service.server.rpc.method_table import Method
from tq_service.wire.connection import LISTENING_OPTIONS
from tq_service.wire.parts import MAX_REQUEST_BYTES, PART_BYTES, in_parts

SERVICE = "tq_service.test.Inbox"
CODE = grpc.StatusCode
MIB = 1 << 20


class Server:
    """A server with a method of each kind: `behavior` gets all requests."""

    def __init__(self, behavior: Callable[[Any, Any], Awaitable[bytes]]) -> None:
        self.behavior = behavior

    async def __aenter__(self) -> Server:
        options = [("grpc.max_receive_message_length", 4 * MIB), *LISTENING_OPTIONS]
        self._server = grpc.aio.server(options=options)
        kinds = {
            "Open": Method(name=f"/{SERVICE}/Open", is_open=True),
            "Waits": Method(name=f"/{SERVICE}/Waits", waits=True),
            "Frames": Method(name=f"/{SERVICE}/Frames", has_request_stream=True),
        }
        services = Services(self._server, [ErrorStatuses()], {method.name: method for method in kinds.values()})
        self.inbox = services.inbox
        make = {False: grpc.unary_unary_rpc_method_handler, True: grpc.stream_unary_rpc_method_handler}
        handlers = {name: make[method.has_request_stream](self._call) for name, method in kinds.items()}
        services.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._channels: list[grpc.aio.Channel] = []
        return self

    async def __aexit__(self, *exception: object) -> None:
        for channel in self._channels:
            await channel.close()
        await self._server.stop(None)

    async def _call(self, request: Any, context: Any) -> bytes:
        return await self.behavior(request, context)

    def ask(self, name: str) -> Any:
        """Return a method of a connection of its own; it takes the messages of its call."""
        channel = grpc.aio.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._channels.append(channel)
        return channel.stream_unary(f"/{SERVICE}/{name}")


async def counted(requests: Any, _context: Any) -> bytes:
    count = 0
    if isinstance(requests, bytes):
        return len(requests).to_bytes(8, "little")
    async for message in requests:
        count += len(message)
    return count.to_bytes(8, "little")


async def test_frames_of_many_streams_are_read_a_few_at_a_time() -> None:
    seen = []

    async def noting(requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in requests:
            seen.append(server.inbox.frames.running)
            await asyncio.sleep(0)
        return b""

    async with Server(noting) as server:
        methods = [server.ask("Frames") for _ in range(20)]
        await asyncio.gather(*(method(iter([bytes(MIB)] * 4)) for method in methods))
        assert len(seen) == 80
        assert 0 < max(seen) <= 4
        assert server.inbox.frames.running == server.inbox.requests.running == 0


async def test_a_request_in_parts_arrives_whole() -> None:
    async with Server(counted) as server:
        for size in (0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 7 * MIB):
            parts = in_parts(bytes(size), "test")
            assert all(len(part) == PART_BYTES for part in parts[:-1])
            assert len(parts[-1]) < PART_BYTES
            for name in ("Waits", "Frames"):
                assert int.from_bytes(await server.ask(name)(iter(parts)), "little") == size
        assert server.inbox.large.running == server.inbox.waiting_bytes == 0


async def test_parts_beyond_what_a_request_may_be_are_refused() -> None:
    async with Server(counted) as server:
        parts = [bytes(PART_BYTES)] * (MAX_REQUEST_BYTES // PART_BYTES + 1)
        with pytest.raises(grpc.RpcError):
            await server.ask("Waits")(iter(parts))
        assert await server.ask("Waits")(iter([b"x"]))
        assert server.inbox.large.running == 0


async def test_what_needs_no_token_is_small() -> None:
    async with Server(counted) as server:
        assert await server.ask("Open")(iter([bytes(MAX_OPEN_REQUEST_BYTES)]))
        with pytest.raises(grpc.RpcError) as caught:
            await server.ask("Open")(iter([bytes(MAX_OPEN_REQUEST_BYTES + 1)]))
        assert caught.value.code() is CODE.INVALID_ARGUMENT


async def test_requests_of_waiting_calls_are_bounded_together() -> None:
    go_on, are_there, entered = asyncio.Event(), asyncio.Event(), []
    size = PART_BYTES - 1
    held = MAX_WAITING_BYTES // size

    async def waiting(request: bytes, context: Any) -> bytes:
        entered.append(len(request))
        if len(entered) == held:
            are_there.set()
        await go_on.wait()
        return b"done"

    async with Server(waiting) as server:
        calls = [asyncio.ensure_future(server.ask("Waits")(iter([bytes(size)]))) for _ in range(held)]
        await are_there.wait()
        assert server.inbox.waiting_bytes == held * size
        with pytest.raises(grpc.RpcError) as caught:
            await server.ask("Waits")(iter([bytes(size)]))
        assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
        go_on.set()
        assert await asyncio.gather(*calls) == [b"done"] * held
        assert server.inbox.waiting_bytes == 0


class Silent:
    """The context of a call whose client sends nothing."""

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_read_that_nobody_waits_for_may_take_its_time_and_others_end_it() -> None:
    lane = Lane(1, 1, 0.0)
    await lane.enter("slow")
    silent: Any = Silent()
    slow = asyncio.ensure_future(lane.read(silent))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not slow.done()
    next_one = asyncio.ensure_future(lane.enter("next"))
    with pytest.raises(DeadlineError):
        await slow
    assert not next_one.done()
    lane.leave("slow")
    await next_one
    lane.leave("next")
    assert lane.running == 0


async def test_connections_take_turns() -> None:
    lane, order = Lane(1, 1, 60.0), []
    await lane.enter("first")

    async def turn(connection: str) -> None:
        await lane.enter(connection)
        order.append(connection)
        lane.leave(connection)

    turns = [asyncio.ensure_future(turn(connection)) for connection in "aaab"]
    await asyncio.sleep(0)
    lane.leave("first")
    await asyncio.gather(*turns)
    assert order == ["a", "b", "a", "a"]
    assert lane.running == 0


async def test_a_wait_that_is_given_up_takes_no_turn() -> None:
    lane = Lane(1, 1, 60.0)
    await lane.enter("first")
    gone = asyncio.ensure_future(lane.enter("a"))
    stays = asyncio.ensure_future(lane.enter("b"))
    await asyncio.sleep(0)
    gone.cancel()
    lane.leave("first")
    await stays
    lane.leave("b")
    await asyncio.gather(gone, return_exceptions=True)
    assert lane.running == 0


async def test_a_connection_has_few_reads_that_wait() -> None:
    lane = Lane(1, 1, 60.0, most_waiting_of_one=1)
    await lane.enter("a")
    waits = asyncio.ensure_future(lane.enter("a"))
    await asyncio.sleep(0)
    with pytest.raises(LimitExceededError):
        await lane.enter("a")
    lane.leave("a")
    await waits
