import asyncio

import numpy as np
import pytest
from engine_driver import PARTITION, begin, cells, put

from tq_service.admission_turn import PASSED_SECONDS, TURN_SECONDS
from tq_service.errors import CallCancelledError, QuotaExceededError, UnavailableError
from tq_service.storage.engine import StorageEngine


def rows(size):
    return {"x": np.zeros((size // 10, 10), np.uint8)}


@pytest.fixture
def engine():
    return StorageEngine(max_bytes=1000)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_put_larger_than_the_quota_fails_at_once(engine):
    for size, existing, limit in ((1010, True, 1000), (910, False, 900)):
        with pytest.raises(QuotaExceededError) as caught:
            await put(engine, 1, rows(size), existing=existing)
        assert caught.value.retry_after_seconds is None
        assert caught.value.metadata == {"limit_name": "max_bytes", "got": str(size), "limit": str(limit)}
    await put(engine, 1, rows(1000), existing=True)
    assert engine.stat().used_bytes == 1000


async def test_new_rows_leave_the_reserve_to_existing_ones(engine):
    await put(engine, 1, rows(900))
    waiting = asyncio.create_task(put(engine, 2, rows(50)))
    await settle()
    assert not waiting.done()
    await put(engine, 3, rows(100), existing=True)
    engine.free([cells(1)])
    await waiting
    assert engine.stat().used_bytes == 150


async def test_the_deadline_ends_the_wait_with_a_hint(engine):
    await put(engine, 1, rows(900))
    with pytest.raises(QuotaExceededError, match="900 of 1000") as caught:
        await put(engine, 2, rows(500), deadline=engine._clock() + 0.01)
    assert caught.value.retry_after_seconds
    assert caught.value.metadata == {"limit_name": "max_bytes", "got": "1400", "limit": "900"}
    engine.free([cells(1)])
    assert engine.stat().used_bytes == 0


async def test_a_wait_whose_deadline_is_past_ends_at_once(engine):
    await put(engine, 1, rows(900))
    with pytest.raises(QuotaExceededError):
        await put(engine, 2, rows(10), deadline=engine._clock() - 5)
    await put(engine, 3, rows(10), existing=True, deadline=engine._clock() - 5)


class Clock:
    """A clock that is set by hand; a timer of the loop is as good as never."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


async def later(engine, order, number, size, *, partition_id=PARTITION):
    await put(engine, number, rows(size), partition_id=partition_id)
    order.append(number)


async def test_a_put_that_fits_passes_those_that_do_not_whosever_they_are():
    engine = StorageEngine(max_bytes=1000)
    await put(engine, 1, rows(400))
    order = []
    for number, partition_id in ((2, "b"), (3, PARTITION)):
        big = asyncio.create_task(later(engine, order, number, 700, partition_id=partition_id))
        await settle()
        await later(engine, order, number + 10, 10, partition_id="c")
        await later(engine, order, number + 20, 10, partition_id=partition_id)
        big.cancel()
        await asyncio.wait([big])
    assert order == [12, 22, 13, 23]


async def test_a_large_put_has_a_turn_in_which_nothing_passes_it_and_no_longer():
    clock = Clock()
    engine = StorageEngine(max_bytes=1000, clock=clock)
    await put(engine, 1, rows(400))
    await put(engine, 2, rows(200))
    order = []
    big = asyncio.create_task(later(engine, order, 3, 800, partition_id="big"))
    await settle()
    clock.now += PASSED_SECONDS - 1
    await later(engine, order, 4, 100)
    clock.now += 1
    small = asyncio.create_task(later(engine, order, 5, 10))  # the turn of the big one begins
    await settle()
    engine.free([cells(2)])
    await settle()
    assert order == [4]
    with pytest.raises(QuotaExceededError, match="a put of 800 bytes to another partition, which has waited longest"):
        await put(engine, 6, rows(10), deadline=clock.now)
    clock.now += TURN_SECONDS  # and is over, so that one that never fits does not stop the others
    engine._admission.admit()
    await small
    clock.now += PASSED_SECONDS
    small = asyncio.create_task(later(engine, order, 7, 10))
    await settle()
    assert order == [4, 5]
    engine.free([cells(1), cells(4)])
    await asyncio.gather(big, small)
    assert order == [4, 5, 3, 7]


async def test_partitions_have_turns_however_many_puts_one_has(engine):
    await put(engine, 1, rows(900))
    order, calls = [], []
    for number in range(2, 8):
        calls.append(asyncio.create_task(later(engine, order, number, 300, partition_id="many")))
        await settle()
    calls.append(asyncio.create_task(later(engine, order, 8, 300, partition_id="one")))
    await settle()
    engine.free([cells(1)])
    await settle()
    assert sorted(order) == [2, 3, 8]
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


async def test_tokens_have_turns_however_many_partitions_one_has(engine):
    await put(engine, 1, rows(900))
    order, calls = [], []

    async def one_put(number, token, partition_id):
        pending, _ = await begin(engine, number, rows(300), partition_id=partition_id, token=token)
        order.append(number)
        pending.abort()

    puts = [(number, "many", f"partition_{number}") for number in range(2, 8)]
    for each in (*puts, (8, "one", "single"), (9, "one", "single")):
        calls.append(asyncio.create_task(one_put(*each)))
        await settle()
    engine.free([cells(1)])
    await asyncio.wait(calls)
    assert order == [2, 8, 3, 9, 4, 5, 6, 7]


async def test_what_is_freed_in_parts_has_no_look_at_each_put_that_waits(engine, monkeypatch):
    for number in range(1, 91):
        await put(engine, number, rows(10))
    calls = [asyncio.create_task(put(engine, number, rows(600))) for number in range(100, 200)]
    await settle()
    looked_at, waiters = [], engine._admission._waiters
    monkeypatch.setattr(engine._admission, "_waiters", lambda: looked_at.append(1) or waiters())
    for number in range(1, 60):  # none fits before 60 are gone
        engine.free([cells(number)])
    assert not looked_at
    engine.free([cells(60)])
    await settle()
    assert sum(call.done() for call in calls) == 1
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


async def test_existing_rows_go_before_new_ones(engine):
    await put(engine, 1, rows(900))
    new = asyncio.create_task(put(engine, 2, rows(100)))
    await settle()
    existing = asyncio.create_task(put(engine, 3, rows(900), existing=True))
    await settle()
    engine.free([cells(1)])
    await existing
    assert not new.done()
    engine.free([cells(3)])
    await new


async def test_cancelled_waiters_leave_no_trace(engine):
    await put(engine, 1, rows(900))
    first = asyncio.create_task(put(engine, 2, rows(900)))
    await settle()
    second = asyncio.create_task(put(engine, 3, rows(100)))
    await settle()
    first.cancel()
    engine.free([cells(1)])
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert engine.stat().used_bytes == 100


async def test_a_waiter_cancelled_when_capacity_was_just_granted_gives_it_back(engine):
    await put(engine, 1, rows(900))
    waiting = asyncio.create_task(put(engine, 2, rows(500)))
    await settle()
    engine.free([cells(1)])
    assert engine.stat().used_bytes == 500
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.stat().used_bytes == 0
    assert not engine._pending


async def test_a_waiting_put_is_replaced_by_its_retry(engine):
    await put(engine, 1, rows(900))
    first = asyncio.create_task(put(engine, 2, rows(500)))
    await settle()
    second = asyncio.create_task(put(engine, 2, rows(500)))
    await settle()
    engine.free([cells(1)])
    with pytest.raises(CallCancelledError):
        await first
    await second
    assert engine.stat().used_bytes == 500
    assert engine.stat().put_count == 1


async def test_an_aborted_put_frees_capacity(engine):
    pending, _ = await begin(engine, 1, rows(900))
    waiting = asyncio.create_task(put(engine, 2, rows(100)))
    await settle()
    pending.abort()
    await waiting
    assert engine.stat().used_bytes == 100


async def test_holes_are_closed_for_those_who_wait():
    engine = StorageEngine(max_bytes=100_000)
    await put(engine, 1, {"x": np.zeros((90, 1000), np.uint8)})
    waiting = asyncio.create_task(put(engine, 2, {"x": np.zeros((20, 1000), np.uint8)}))
    await settle()
    engine.free([cells(1, *range(0, 60, 3))])
    await settle()
    assert not waiting.done() or engine.stat().used_bytes <= 90_000
    engine.free([cells(1, 1)])
    await waiting
    assert engine.stat().used_bytes <= 90_000
    late = asyncio.create_task(put(engine, 3, {"x": np.zeros((5, 1000), np.uint8)}))
    await settle()
    engine.free([cells(1, *range(40, 60))])
    await late


async def test_without_quota_nothing_waits():
    engine = StorageEngine(max_bytes=None)
    for number in range(20):
        await put(engine, number, rows(1000))
    assert engine.stat().max_bytes is None
    assert engine.stat().used_bytes == 20_000


async def test_a_drain_ends_the_waits_and_takes_what_fits(engine):
    await put(engine, 1, rows(900))
    waiting = [asyncio.create_task(put(engine, number, rows(200), existing=number == 2)) for number in (2, 3)]
    await settle()
    engine.drain()
    for task in [*waiting, asyncio.create_task(put(engine, 4, rows(300)))]:
        with pytest.raises(UnavailableError, match="draining"):
            await task
    assert engine.stat().used_bytes == 900
    await put(engine, 5, rows(100), existing=True)
    engine.free([cells(1)])
    await put(engine, 6, rows(700))
    assert engine.stat().used_bytes == 800
