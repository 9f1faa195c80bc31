"""The remover: asks again for what is leased, survives an engine that is away, leaves nothing behind."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest
from memory_pool import MemoryPool, PoolObjects, memory_pool

from tq_service.errors import UnavailableError
from tq_service.objects.remover import Remover

NAMES = [f"tq/s/0/{number:x}/0" for number in range(4)]


@pytest.fixture
def pool() -> MemoryPool:
    return memory_pool(uuid.uuid4().hex)


@pytest.fixture
async def objects(pool: MemoryPool) -> PoolObjects:
    made = PoolObjects(pool)
    await made.open("node-0", 0)
    return made


@pytest.fixture
async def remover(objects: PoolObjects) -> AsyncIterator[Remover]:
    made = Remover(objects, interval_seconds=0.001)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def until_pending(remover: Remover, count: int) -> None:
    while remover.pending_count > count:  # noqa: ASYNC110  (nothing is set when it happens)
        await asyncio.sleep(0)


async def test_leased_and_half_written_objects_go_later(
    pool: MemoryPool, objects: PoolObjects, remover: Remover
) -> None:
    for name in NAMES[:3]:
        await objects.put(name, [b"x"], copies=1)
    pool.half_written.add(NAMES[3])
    pool.leased.add(NAMES[0])
    remover.remove(NAMES)
    await until_pending(remover, 1)
    assert list(pool.objects) == [NAMES[0]]
    pool.leased.clear()
    await until_pending(remover, 0)
    assert (dict(pool.objects), pool.half_written) == ({}, set())


async def test_an_engine_that_is_away_is_asked_again(
    pool: MemoryPool, objects: PoolObjects, remover: Remover, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, remove = 0, objects.remove

    async def counted(names: Sequence[str]) -> list[str]:
        nonlocal calls
        calls += 1
        return await remove(names)

    monkeypatch.setattr(objects, "remove", counted)
    await objects.put(NAMES[0], [b"x"], copies=1)
    pool.refusal = UnavailableError("away")
    remover.remove(NAMES[:1])
    while calls < 2:  # noqa: ASYNC110  (the same)
        await asyncio.sleep(0)
    assert remover.pending_count == 1
    pool.refusal = None
    await until_pending(remover, 0)
    assert not pool.objects


async def test_names_that_cannot_be_removed_keep_no_others_from_it(
    pool: MemoryPool, objects: PoolObjects, remover: Remover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_service.objects.remover._NAMES_PER_CALL", 1)
    stuck, remove = NAMES[0], objects.remove

    async def refuses_one(names: Sequence[str]) -> list[str]:
        if stuck in names:
            raise UnavailableError("permission denied")
        return await remove(names)

    monkeypatch.setattr(objects, "remove", refuses_one)
    for name in NAMES:
        await objects.put(name, [b"x"], copies=1)
    remover.remove(NAMES)
    await until_pending(remover, 1)
    assert list(pool.objects) == [stuck]
    monkeypatch.setattr(objects, "remove", remove)
    await until_pending(remover, 0)
    assert not pool.objects


async def test_nothing_is_removed_while_it_may_not(pool: MemoryPool, objects: PoolObjects) -> None:
    await objects.put(NAMES[0], [b"x"], copies=1)
    answers = iter([False, False, True])
    asked = Remover(objects, interval_seconds=0.001, may_remove=lambda: next(answers))
    asked.remove(NAMES[:1])
    running = asyncio.create_task(asked.run())
    await until_pending(asked, 0)
    running.cancel()
    assert not pool.objects
    assert next(answers, None) is None
