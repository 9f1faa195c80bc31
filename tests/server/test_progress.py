"""How slowly the other side of a stream may go."""

import asyncio

import pytest

from tq_service.errors import DeadlineError
from tq_service.server.progress import LEAST_PROGRESS_BYTES, Progress, received, wait_until

SECONDS = 0.2


async def test_what_moves_enough_may_go_on_for_longer_than_it_may_stall():
    progress = Progress(SECONDS, "nothing came")
    for _ in range(4):
        await progress.wait_for(asyncio.sleep(SECONDS / 2))
        progress.moved(LEAST_PROGRESS_BYTES)


async def test_a_drip_does_not_count():
    progress = Progress(SECONDS, "fewer bytes came")
    with pytest.raises(DeadlineError, match=r"fewer bytes came within 0\.2 s"):
        for _ in range(100):
            await progress.wait_for(asyncio.sleep(SECONDS / 10))
            progress.moved(1)


async def test_time_in_which_nobody_is_waited_for_does_not_count():
    progress = Progress(SECONDS, "nothing came")
    for _ in range(3):
        await asyncio.sleep(SECONDS)
        assert await progress.wait_for(asyncio.sleep(0, "part")) == "part"


async def test_parts_come_in_order_until_their_end():
    async def parts():
        for number in range(3):
            yield number

    assert [part async for part in received(parts(), SECONDS, lambda _: 1)] == [0, 1, 2]


async def test_parts_that_stop_coming_end_the_stream():
    async def parts():
        yield 1
        await asyncio.Event().wait()

    stream = received(parts(), SECONDS, lambda _: LEAST_PROGRESS_BYTES)
    assert await anext(stream) == 1
    with pytest.raises(DeadlineError):
        await anext(stream)


class Call:
    def __init__(self, remaining):
        self.remaining = remaining

    def time_remaining(self):
        return self.remaining


def test_a_wait_ends_before_the_call_so_that_its_refusal_arrives(monkeypatch):
    monkeypatch.setattr("tq_service.server.progress.time.monotonic", lambda: 100.0)
    assert [wait_until(Call(remaining)) for remaining in (None, 40.0, 2.0)] == [None, 139.0, 101.5]
