"""The inbox reads few messages at a time: counted where handlers get them, and with clients that are slow or silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest

from tq_service.errors import DeadlineError, LimitExceededError
from tq_service.server.rpc.calls import RunningCalls, Services
from tq_service.server.rpc.inbox import MAX_OPEN_REQUEST_BYTES, MAX_WAITING_BYTES, Lane, Turn
from tq_service.server.rpc.methods import Method
from tq_service.wire.connection import LISTENING_OPTIONS, MAX_REQUEST_BYTES, PART_BYTES, in_parts

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
        services = Services(self._server, [RunningCalls()], {method.name: method for method in kinds.values()})
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


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (no event tells of it)
        await asyncio.sleep(0.01)


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


async def test_a_large_request_that_may_wait_keeps_no_other_one_from_being_read() -> None:
    go_on, is_there = asyncio.Event(), asyncio.Event()
    size = 2 * PART_BYTES + 1

    async def waiting(request: bytes, context: Any) -> bytes:
        if request[:1] == b"w":
            is_there.set()
            await go_on.wait()
        return request[:1]

    async with Server(waiting) as server:
        waits = asyncio.ensure_future(server.ask("Waits")(iter(in_parts(b"w" + bytes(size), "test"))))
        await is_there.wait()
        assert await server.ask("Waits")(iter(in_parts(b"x" + bytes(size), "test"))) == b"x"
        go_on.set()
        assert await waits == b"w"
        assert server.inbox.waiting_bytes == server.inbox.large.running == 0


async def test_first_parts_of_large_requests_are_bounded_together() -> None:
    async def first_part_only() -> AsyncIterator[bytes]:
        yield bytes(PART_BYTES)
        await asyncio.Event().wait()

    async with Server(counted) as server:
        calls = [server.ask("Waits")(first_part_only()) for _ in range(MAX_WAITING_BYTES // PART_BYTES)]
        await until(lambda: server.inbox.waiting_bytes == MAX_WAITING_BYTES)
        with pytest.raises(grpc.RpcError) as caught:
            await server.ask("Waits")(first_part_only())
        assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await until(lambda: not server.inbox.waiting_bytes and not server.inbox.large.running)


async def test_streams_that_send_now_and_then_slow_down_no_other_one() -> None:
    ended = []

    async def first_only() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.Event().wait()

    async def again_and_again(method: Any) -> None:
        while True:
            with suppress(grpc.RpcError):
                await method(first_only())
            ended.append(method)

    async with Server(counted) as server:
        methods = [server.ask("Frames") for _ in range(4)]
        slow = [asyncio.ensure_future(again_and_again(method)) for method in methods for _ in range(2)]
        await until(lambda: server.inbox.frames.running == 4)
        frames = [b"x"] * 200
        assert int.from_bytes(await server.ask("Frames")(iter(frames)), "little") == len(frames)
        assert len(ended) < len(frames) / 4  # of those that have to end so that others are read
        for task in slow:
            task.cancel()
        await until(lambda: not server.inbox.frames.running)


def reading(turn: Turn) -> asyncio.Future[Any]:
    """Run a step of a turn that does not end by itself."""
    return asyncio.ensure_future(turn.run(asyncio.Event().wait()))


async def test_a_read_that_nobody_waits_for_may_take_its_time_and_others_end_it() -> None:
    lane = Lane(1, 1, 0.0)
    turn = await lane.enter("slow")
    slow = reading(turn)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not slow.done()
    next_one = asyncio.ensure_future(lane.enter("next"))
    with pytest.raises(DeadlineError):
        await slow
    assert not next_one.done()
    turn.leave()
    (await next_one).leave()
    assert lane.running == 0


async def test_slow_reads_go_on_aside_until_there_are_too_many() -> None:
    lane = Lane(2, 3, 0.0, most_aside=2)
    turns, reads = [], []
    for connection in ("a", "b", "a", "c", "d"):
        turns.append(await asyncio.wait_for(lane.enter(connection), 5.0))
        reads.append(reading(turns[-1]))
        await asyncio.sleep(0)
    await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
    ended = [read for read in reads if read.done()]
    assert ended[0] is reads[0]  # the oldest of the connection that had most
    with pytest.raises(DeadlineError):
        await reads[0]
    assert [turn.is_aside for turn in turns] == [True, True, True, True, False]
    assert len(ended) == 2  # four were slow
    assert lane.running == 1
    for turn, read in zip(turns, reads, strict=True):
        read.cancel()
        turn.leave()
    await asyncio.gather(*reads, return_exceptions=True)
    assert lane.running == 0


async def test_reads_aside_count_for_their_connection() -> None:
    lane = Lane(2, 1, 0.0, most_aside=4)
    held = await lane.enter("held")
    turn = await lane.enter("a")
    slow = reading(turn)
    await asyncio.sleep(0)
    other = await asyncio.wait_for(lane.enter("b"), 5.0)
    assert turn.is_aside
    other.leave()
    waits = asyncio.ensure_future(lane.enter("a"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waits.done()
    slow.cancel()
    held.leave()
    turn.leave()
    (await waits).leave()
    assert lane.running == 0


async def test_connections_take_turns() -> None:
    lane, order = Lane(1, 1, 60.0), []
    first = await lane.enter("first")

    async def take(connection: str) -> None:
        turn = await lane.enter(connection)
        order.append(connection)
        turn.leave()

    turns = [asyncio.ensure_future(take(connection)) for connection in "aaab"]
    await asyncio.sleep(0)
    first.leave()
    await asyncio.gather(*turns)
    assert order == ["a", "b", "a", "a"]
    assert lane.running == 0


async def test_a_wait_that_is_given_up_takes_no_turn() -> None:
    lane = Lane(1, 1, 60.0)
    first = await lane.enter("first")
    gone = asyncio.ensure_future(lane.enter("a"))
    stays = asyncio.ensure_future(lane.enter("b"))
    await asyncio.sleep(0)
    gone.cancel()
    first.leave()
    (await stays).leave()
    await asyncio.gather(gone, return_exceptions=True)
    assert lane.running == 0


async def test_a_connection_has_few_reads_that_wait() -> None:
    lane = Lane(1, 1, 60.0, most_waiting_of_one=1)
    turn = await lane.enter("a")
    waits = asyncio.ensure_future(lane.enter("a"))
    await asyncio.sleep(0)
    with pytest.raises(LimitExceededError):
        await lane.enter("a")
    turn.leave()
    (await waits).leave()
    assert lane.running == 0
