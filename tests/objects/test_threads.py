"""Calls in threads: bounded in number and time, and without a way to the caller's memory after that."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tq_service.errors import UnavailableError
from tq_service.objects.threads import CallThreads, Landing


async def test_calls_run_beside_each_other_up_to_the_bound() -> None:
    threads = CallThreads("engine", 2)
    both = threading.Barrier(3)
    running = [asyncio.create_task(threads.run(lambda: both.wait(10), timeout_seconds=20)) for _ in range(2)]
    third = asyncio.create_task(threads.run(lambda: "third", timeout_seconds=20))
    await asyncio.to_thread(both.wait, 10)
    assert await third == "third"
    await asyncio.gather(*running)
    assert len([each for each in threading.enumerate() if each.name.startswith("tq-engine-")]) == 2
    threads.close()


async def test_a_call_that_hangs_costs_its_thread_and_writes_nothing_any_more() -> None:
    threads = CallThreads("engine", 1)
    ends = threading.Event()
    ended = threading.Event()
    memory = bytearray(4)
    landing = Landing(memoryview(memory))

    def call() -> None:
        ends.wait(30)
        landing.write(0, b"late")
        ended.set()

    with pytest.raises(UnavailableError, match="the call goes on by itself"):
        await threads.run(call, timeout_seconds=0.05, landing=landing)
    with pytest.raises(UnavailableError, match="no thread was free"):
        await threads.run(lambda: None, timeout_seconds=0.05)
    ends.set()
    await asyncio.to_thread(ended.wait, 10)
    assert memory == bytes(4)
    assert await threads.run(lambda: "free again", timeout_seconds=10) == "free again"
    threads.close()


async def test_a_cancelled_caller_waits_for_its_call() -> None:
    threads = CallThreads("engine", 1)
    begun, ends, done = threading.Event(), threading.Event(), []

    def call() -> None:
        begun.set()
        ends.wait(10)
        done.append(1)

    caller = asyncio.create_task(threads.run(call, timeout_seconds=20))
    await asyncio.to_thread(begun.wait, 10)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    ends.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == [1]
    threads.close()


async def test_what_a_call_raises_is_raised_and_a_closed_one_runs_nothing() -> None:
    threads = CallThreads("engine", 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, timeout_seconds=10)
    threads.close()
    threads.close()
    with pytest.raises(UnavailableError, match="is closed"):
        await threads.run(lambda: None, timeout_seconds=10)
