"""Calls in threads: bounded in number and time, and without a way to the caller's memory after that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from tq_service.errors import UnavailableError
from tq_service.objects import base
from tq_service.objects.base import Abilities, BlockingObjectStore, EngineUrl, Landing, seal


class Scripted(BlockingObjectStore):
    """An engine whose client does in `copies` what a test says, and must not be closed before."""

    engine = "scripted"

    def __init__(self, *, threads: int = 1, timeout_seconds: float = 20.0) -> None:
        super().__init__(EngineUrl("scripted://here"), threads=threads, timeout_seconds=timeout_seconds)
        self.call: Callable[[], int] = lambda: 1
        self.reads: Callable[[Landing], None] = lambda landing: None
        self.is_closed = False

    @property
    def abilities(self) -> Abilities:
        return Abilities(survives="process")

    def _copies(self, names: Sequence[str]) -> list[int]:
        return [self.call()]

    def _read(self, name: str, landing: Landing) -> None:
        self.reads(landing)

    def _close(self) -> None:
        self.is_closed = True

    def _connect(self, node: str, offered_bytes: int) -> None: ...
    def _put(self, name: str, sealed: Sequence[memoryview], copies: int) -> int: ...
    def _size(self, name: str) -> int: ...
    def _remove(self, names: Sequence[str]) -> list[str]: ...


async def opened(**given: float) -> Scripted:
    store = Scripted(**given)
    await store.open("node", 0)
    return store


async def test_calls_run_beside_each_other_up_to_the_bound() -> None:
    store = await opened(threads=2)
    both = threading.Barrier(3)
    begun = threading.Semaphore(0)

    def call_with_others() -> int:
        begun.release()
        return both.wait(10)

    def call_last() -> int:
        begun.release()
        return 3

    store.call = call_with_others
    running = [asyncio.create_task(store.copies(["a"])) for _ in range(2)]
    for _ in running:
        assert await asyncio.to_thread(begun.acquire, timeout=10)
    store.call = call_last
    third = asyncio.create_task(store.copies(["a"]))
    assert not await asyncio.to_thread(begun.acquire, timeout=0.1)
    assert not third.done()
    await asyncio.to_thread(both.wait, 10)
    assert await third == [3]
    await asyncio.gather(*running)


async def test_a_call_that_hangs_costs_its_thread_and_writes_nothing_any_more() -> None:
    store = await opened(timeout_seconds=0.05)
    ends, ended = threading.Event(), threading.Event()
    memory = bytearray(4)

    def reads(landing: Landing) -> None:
        ends.wait(30)
        header, data = seal("a", [b"late"])
        landing.write(header, data)
        ended.set()

    store.reads = reads
    with pytest.raises(UnavailableError, match="the call is still running in its thread"):
        await store.read("a", memoryview(memory))
    with pytest.raises(UnavailableError, match="no thread became available"):
        await store.copies(["a"])
    ends.set()
    await asyncio.to_thread(ended.wait, 10)
    assert memory == bytes(4)
    store.timeout_seconds = 20.0
    assert await store.copies(["a"]) == [1]


async def test_a_cancelled_caller_waits_for_its_call() -> None:
    store = await opened()
    begun, ends, done = threading.Event(), threading.Event(), []

    def call() -> int:
        begun.set()
        ends.wait(10)
        done.append(1)
        return 1

    store.call = call
    caller = asyncio.create_task(store.copies(["a"]))
    await asyncio.to_thread(begun.wait, 10)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    ends.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == [1]


async def test_an_exception_of_the_client_says_where_it_was() -> None:
    store = await opened()
    store.call = lambda: 1 // 0
    with pytest.raises(UnavailableError, match="scripted at scripted://here: ZeroDivisionError"):
        await store.copies(["a"])


@pytest.mark.parametrize("ends", [True, False])
async def test_a_client_is_closed_after_its_last_call_only(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_CLOSE_SECONDS", 30.0 if ends else 0.0)
    store = await opened(threads=2, timeout_seconds=0.05)
    may_end, in_use = threading.Event(), [0]

    def call() -> int:
        in_use[0] += 1
        may_end.wait(30)
        in_use[0] -= 1
        return 1

    store.call = call
    with pytest.raises(UnavailableError, match="the call is still running in its thread"):
        await store.copies(["name"])
    store.timeout_seconds = 20.0
    closing = asyncio.create_task(store.aclose())
    await asyncio.sleep(0)
    if ends:
        may_end.set()
    await closing
    assert store.is_closed == ends
    assert in_use[0] == (0 if ends else 1)
    may_end.set()
