"""How slowly the other side of a stream may go."""

import asyncio
import time

import grpc
import numpy as np
import pytest

from tq_service.errors import DeadlineError
from tq_service.server.rpc.inbox import GRACE_SECONDS, LEAST_PROGRESS_BYTES, LeastRate, Progress, received, wait_until

SECONDS = 1000.0


class Clock:
    """The clock of `progress`, which moves by hand."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    async def takes(self, seconds, answer=None):
        await asyncio.sleep(0)  # a turn of the loop, in which a limit that has passed ends the step
        self.now += seconds
        return answer


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tq_service.server.rpc.inbox.time", clock)
    monkeypatch.setattr("tq_service.server.rpc.inbox.time", clock)
    return clock


async def never():
    await asyncio.Event().wait()


async def test_what_moves_enough_may_go_on_for_longer_than_it_may_stall(clock):
    progress = Progress(SECONDS, "nothing came")
    for part in range(4):
        assert await progress.wait_for(clock.takes(SECONDS * 0.9, part)) == part
        progress.moved(LEAST_PROGRESS_BYTES)
    assert clock.now > 3 * SECONDS


async def test_a_drip_does_not_count(clock):
    progress = Progress(SECONDS, "fewer bytes came")
    for _ in range(10):
        await progress.wait_for(clock.takes(SECONDS / 10))
        progress.moved(LEAST_PROGRESS_BYTES // 11)
    with pytest.raises(DeadlineError, match=r"fewer bytes came within 1000 s"):
        await progress.wait_for(never())


async def test_time_in_which_nobody_is_waited_for_does_not_count(clock):
    progress = Progress(SECONDS, "nothing came")
    for _ in range(3):
        clock.now += 10 * SECONDS
        assert await progress.wait_for(clock.takes(SECONDS / 4, "part")) == "part"


async def test_parts_come_in_order_until_their_end():
    async def parts():
        for number in range(3):
            yield number

    assert [part async for part in received(parts(), Progress(SECONDS, ""), lambda _: 1)] == [0, 1, 2]


async def test_parts_that_stop_coming_end_the_stream():
    async def parts():
        yield 1
        await never()

    stream = received(parts(), Progress(0.01, "nothing came"), lambda _: LEAST_PROGRESS_BYTES)
    assert await anext(stream) == 1
    with pytest.raises(DeadlineError):
        await anext(stream)


RATE = 1000


class Stream:
    """A stream whose other side is waited for, in a task of its own."""

    def __init__(self, rates, *, waited, moved):
        self.progress = Progress(SECONDS, "nothing came")
        self._rates, self._waited, self._moved = rates, waited, moved
        self.task = asyncio.create_task(self._run())

    async def _run(self):
        with self._rates.watching(self.progress):
            self.progress._waited_seconds = self._waited
            self.progress.moved(self._moved)
            await self.progress.wait_for(never())

    async def is_ended(self):
        await asyncio.wait([self.task], timeout=0)
        for _ in range(5):
            await asyncio.sleep(0)
        if not self.task.done():
            return False
        with pytest.raises(DeadlineError, match="min_stream_rate_bytes") as ended:
            self.task.result()
        return ended.value.metadata["limit_name"] == "min_stream_rate_bytes"

    def cancel(self):
        self.task.cancel()


@pytest.mark.parametrize(
    ("waited", "moved", "is_slow"),
    [
        (GRACE_SECONDS, 0, False),  # the grace period
        (GRACE_SECONDS + 10, 10 * RATE, False),
        (GRACE_SECONDS + 10, 10 * RATE - 1, True),
        (GRACE_SECONDS + 1, 0, True),
        (900.0, LEAST_PROGRESS_BYTES * 2, True),  # enough for stall_seconds
    ],
)
async def test_a_stream_that_is_slower_than_the_rate_is_ended(clock, waited, moved, is_slow):
    rates = LeastRate(RATE)
    stream = Stream(rates, waited=waited, moved=moved)
    await asyncio.sleep(0)
    rates.enforce()
    assert await stream.is_ended() is is_slow
    stream.cancel()


async def test_streams_share_the_rate(clock):
    rates = LeastRate(RATE)
    fast = Stream(rates, waited=GRACE_SECONDS + 10, moved=10 * RATE // 2)
    slow = Stream(rates, waited=GRACE_SECONDS + 10, moved=10 * RATE // 2 - 1)
    await asyncio.sleep(0)
    rates.enforce()
    assert [await slow.is_ended(), await fast.is_ended()] == [True, False]
    rates.enforce()  # alone now, it must keep to all of it
    assert await fast.is_ended()


async def test_a_stream_that_the_service_does_not_wait_for_is_not_slow(clock):
    rates = LeastRate(RATE)
    progress = Progress(SECONDS, "nothing came")
    with rates.watching(progress):
        await progress.wait_for(clock.takes(SECONDS * 0.9))
        rates.enforce()
    assert await progress.wait_for(clock.takes(1.0, "part")) == "part"
    assert not rates._streams


async def test_a_rate_of_zero_ends_none(clock):
    rates = LeastRate(0)
    stream = Stream(rates, waited=900.0, moved=0)
    await asyncio.sleep(0)
    rates.enforce()
    assert not await stream.is_ended()
    stream.cancel()


class Call:
    def __init__(self, remaining):
        self.remaining = remaining

    def time_remaining(self):
        return self.remaining


def test_a_wait_ends_before_the_call_so_that_its_refusal_arrives(clock):
    clock.now = 100.0
    assert [wait_until(Call(remaining)) for remaining in (None, 40.0, 2.0)] == [
        None,
        pytest.approx(137.6),
        pytest.approx(101.43),
    ]


async def test_a_wait_ends_before_the_timeout_of_the_client_however_grpc_rounds_it():
    limits = []

    async def answer(_request, context):
        now = time.monotonic()
        limits.append(wait_until(context) - now)
        return b""

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", {"b": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    timeouts = np.exp(np.random.default_rng(3).uniform(np.log(2), np.log(100_000), 1000)).tolist()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for timeout in timeouts:
            await channel.unary_unary("/a/b")(b"", timeout=timeout)
    await server.stop(None)
    assert [pair for pair in zip(limits, timeouts, strict=True) if not pair[0] < pair[1]] == []
