"""How slowly the other side of a stream may go."""

import asyncio

import pytest

from tq_service.errors import DeadlineError
from tq_service.server.progress import LEAST_PROGRESS_BYTES, Progress, received
from tq_service.server.rpc.limits import wait_until

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
    monkeypatch.setattr("tq_service.server.progress.time", clock)
    monkeypatch.setattr("tq_service.server.rpc.limits.time", clock)
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

    assert [part async for part in received(parts(), SECONDS, lambda _: 1)] == [0, 1, 2]


async def test_parts_that_stop_coming_end_the_stream():
    async def parts():
        yield 1
        await never()

    stream = received(parts(), 0.01, lambda _: LEAST_PROGRESS_BYTES)
    assert await anext(stream) == 1
    with pytest.raises(DeadlineError):
        await anext(stream)


class Call:
    def __init__(self, remaining):
        self.remaining = remaining

    def time_remaining(self):
        return self.remaining


def test_a_wait_ends_before_the_call_so_that_its_refusal_arrives(clock):
    clock.now = 100.0
    assert [wait_until(Call(remaining)) for remaining in (None, 40.0, 2.0)] == [None, 139.0, 101.5]
