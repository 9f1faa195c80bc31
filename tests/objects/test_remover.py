"""The remover: asks again for what is leased, survives an engine that is away, leaves nothing behind."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest

from tq_service.errors import UnavailableError
from tq_service.objects.memory import MemoryObjects, MemoryPool, memory_pool
from tq_service.objects.names import ObjectName, instance_prefix
from tq_service.objects.remover import Remover


@pytest.fixture
def pool() -> MemoryPool:
    return memory_pool(uuid.uuid4().hex)


@pytest.fixture
async def objects(pool: MemoryPool) -> MemoryObjects:
    made = MemoryObjects(pool)
    await made.open("node-0", 0)
    return made


@pytest.fixture
async def remover(objects: MemoryObjects) -> AsyncIterator[Remover]:
    made = Remover(objects, interval_seconds=0.001)
    made.start()
    yield made
    await made.aclose()


NAMES = [str(ObjectName(cluster="c", storage_id="s", instance="0", put_id=f"{number:x}")) for number in range(4)]


async def test_leased_and_half_written_objects_go_later(
    pool: MemoryPool, objects: MemoryObjects, remover: Remover
) -> None:
    for name in NAMES[:3]:
        await objects.put(name, [b"x"], copies=1)
    pool.half_written.add(NAMES[3])
    pool.leased.add(NAMES[0])
    remover.remove(NAMES)
    while remover.pending_count > 1:  # noqa: ASYNC110  (nothing is set when it happens)
        await asyncio.sleep(0)
    assert list(pool.objects) == [NAMES[0]]
    pool.leased.clear()
    await remover.wait_empty()
    assert (dict(pool.objects), pool.half_written) == ({}, set())


async def test_an_engine_that_is_away_is_asked_again(
    pool: MemoryPool, objects: MemoryObjects, remover: Remover
) -> None:
    await objects.put(NAMES[0], [b"x"], copies=1)
    pool.refusal = UnavailableError("away")
    remover.remove(NAMES[:1])
    remover.remove_below(instance_prefix("c", "s", "0"))
    while remover.last_error is None:  # noqa: ASYNC110  (the same)
        await asyncio.sleep(0)
    assert remover.pending_count == 2
    pool.refusal = None
    await remover.wait_empty()
    assert remover.last_error is None
    assert not pool.objects


async def test_names_that_cannot_be_removed_keep_no_others_from_it(
    pool: MemoryPool, objects: MemoryObjects, remover: Remover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_service.objects.remover._NAMES_A_CALL", 1)
    stuck, remove = NAMES[0], objects.remove

    async def refuses_one(names: Sequence[str]) -> list[str]:
        if stuck in names:
            raise UnavailableError("permission denied")
        return await remove(names)

    monkeypatch.setattr(objects, "remove", refuses_one)
    for name in NAMES:
        await objects.put(name, [b"x"], copies=1)
    remover.remove(NAMES)
    while remover.pending_count > 1:  # noqa: ASYNC110  (the same)
        await asyncio.sleep(0)
    assert list(pool.objects) == [stuck]
    assert remover.last_error is not None
    monkeypatch.setattr(objects, "remove", remove)
    await remover.wait_empty()
    assert not pool.objects
    assert remover.last_error is None


async def test_what_is_pending_stays_when_it_is_closed(pool: MemoryPool, objects: MemoryObjects) -> None:
    await objects.put(NAMES[0], [b"x"], copies=1)
    pool.leased.add(NAMES[0])
    closed = Remover(objects, interval_seconds=0.001)
    closed.start()
    closed.remove(NAMES[:1])
    await closed.aclose()
    assert closed.pending_count == 1
    assert list(pool.objects) == [NAMES[0]]
