"""Calls in threads: bounded in number and time, and without a way to the caller's memory after that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from tq_service.errors import UnavailableError
from tq_service.objects import threaded
from tq_service.objects.base import Abilities, Capacity
from tq_service.objects.threaded import ThreadedObjects
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


class Slow(ThreadedObjects):
    """An engine whose client answers `copies` once it may, and must not be closed before."""

    engine = "slow"

    def __init__(self) -> None:
        super().__init__("here", threads=2, timeout_seconds=0.05)
        self.may_end = threading.Event()
        self.in_use = self.closed_in_use = 0
        self.is_closed = False

    @property
    def abilities(self) -> Abilities:
        return Abilities(survives="process")

    def _copies(self, names: Sequence[str]) -> list[int]:
        self.in_use += 1
        self.may_end.wait(30)
        self.in_use -= 1
        return [1 for _ in names]

    def _list(self, prefix: str) -> list[str]:
        return []

    def _close(self) -> None:
        self.is_closed, self.closed_in_use = True, self.in_use

    def _connect(self, node: str, offered_bytes: int) -> None: ...
    def _put(self, name: str, header: bytes, views: Sequence[memoryview], copies: int) -> int: ...
    def _read(self, name: str, landing: Landing, start: int) -> None: ...
    def _size(self, name: str) -> int: ...
    def _remove(self, names: Sequence[str]) -> list[str]: ...
    def _capacity(self) -> Capacity: ...


@pytest.mark.parametrize("ends", [True, False])
async def test_a_client_is_closed_after_its_last_call_only(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded, "_CLOSE_SECONDS", 30.0 if ends else 0.0)
    store = Slow()
    await store.open("node", 0)
    with pytest.raises(UnavailableError, match="the call goes on by itself"):
        await store.copies(["name"])
    closing = asyncio.create_task(store.aclose())
    await asyncio.sleep(0)
    if ends:
        store.may_end.set()
    await closing
    assert store.is_closed == ends
    assert not store.closed_in_use
    store.may_end.set()
