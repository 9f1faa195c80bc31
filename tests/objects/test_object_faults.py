"""What engines do when things go wrong around them: killed writers, full, slow, unreachable and restarted stores."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from object_engines import ENGINES, Engine, MooncakeEngine, S3StandInEngine

from tq_service.errors import InvalidArgumentError, QuotaExceededError, TqError, UnavailableError
from tq_service.objects.base import ObjectMissingError, ObjectStore
from tq_service.objects.names import ObjectName
from tq_service.objects.registry import make_object_store
from tq_service.objects.remover import Remover

MIB = 1 << 20

WRITER = textwrap.dedent(
    """
    import asyncio, sys
    from tq_service.objects.names import ObjectName
    from tq_service.objects.registry import make_object_store

    async def main():
        store = make_object_store(sys.argv[1])
        await store.open("127.0.0.1", 0)
        data = bytes(range(256)) * (16 << 12)
        name = ObjectName.parse(sys.argv[2])
        while True:
            print(name, flush=True)
            await store.put(str(name), [data], copies=1)
            name = name.retried()

    asyncio.run(main())
    """
)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = ENGINES[request.param](tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
async def store(engine: Engine) -> AsyncIterator[ObjectStore]:
    store = make_object_store(engine.url)
    await store.open("127.0.0.1", 0)
    yield store
    await store.aclose()


@pytest.fixture
def name() -> ObjectName:
    return ObjectName(cluster=f"c{uuid.uuid4().hex}", storage_id="storage-0", instance="0a", put_id="01")


def killed_writer(url: str, name: ObjectName, *, after: int) -> list[str]:
    """Kill a process that puts objects one after the other; return the names that it began, the last one under way."""
    command = [sys.executable, "-c", WRITER, url, str(name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        begun = [writer.stdout.readline().strip() for _ in range(after)]
        writer.kill()
        return begun + writer.stdout.read().split()


async def is_whole(store: ObjectStore, name: str) -> bool:
    """Read an object, which must be what the writer put or not be there."""
    try:
        data = bytearray(await store.size(name))
        await store.read(name, memoryview(data))
    except ObjectMissingError:
        return False
    assert data == bytes(range(256)) * (len(data) // 256)
    assert len(data) == 16 * MIB
    return True


async def test_a_killed_writer_leaves_whole_objects_or_none_and_a_name_for_the_next(
    engine: Engine, store: ObjectStore, name: ObjectName
) -> None:
    if not engine.is_shared:
        pytest.skip("objects of this engine are in one process")
    for round_number in range(2):
        first = replace(name, piece=round_number)
        attempted = await asyncio.to_thread(killed_writer, engine.url, first, after=2 + round_number)
        last = ObjectName.parse(attempted[-1])
        whole = [await is_whole(store, each) for each in attempted]
        assert [count > 0 for count in await store.copies(attempted)] == whole
        assert await store.put(str(last.retried()), [b"again"], copies=1) >= 1
        attempted.append(str(last.retried()))
        into = bytearray(5)
        await store.read(attempted[-1], memoryview(into))
        assert into == b"again"
        remover = Remover(store, interval_seconds=0.1)
        remover.start()
        remover.remove(attempted)
        await remover.wait_empty()
        await remover.aclose()
        assert await store.copies(attempted) == [0] * len(attempted)


async def test_a_full_store_says_so_and_takes_more_once_there_is_space(engine: Engine, name: ObjectName) -> None:
    if isinstance(engine, MooncakeEngine):
        engine.start_full()
    if not engine.full_url:
        pytest.skip("this engine has no limit that a test could set")
    store = make_object_store(engine.full_url)
    await store.open("127.0.0.1", 0)
    written: list[str] = []
    with pytest.raises(QuotaExceededError) as full:
        for _ in range(64):
            await store.put(str(name), [bytes(MIB)], copies=1)
            written.append(str(name))
            name = name.retried()
    assert full.value.retry_after_seconds is not None
    assert written
    assert all(await store.copies(written)), "nothing is evicted"
    assert await store.copies([str(name)]) == [0]
    remover = Remover(store, interval_seconds=0.1)
    remover.start()
    remover.remove(written)
    await remover.wait_empty()
    await remover.aclose()
    assert await store.put(str(name.retried()), [bytes(MIB)], copies=1) == 1
    await store.aclose()


async def test_fewer_copies_than_asked_for_are_counted(engine: Engine, store: ObjectStore, name: ObjectName) -> None:
    made = await store.put(str(name), [b"bytes"], copies=5)
    fixed = store.abilities.fixed_copies
    assert made == (2 if engine.counts_nodes else fixed)
    assert await store.copies([str(name)]) == [made]


async def test_a_store_that_does_not_answer_is_unavailable_and_the_loop_goes_on(
    engine: Engine, store: ObjectStore, name: ObjectName
) -> None:
    if not engine.processes and not isinstance(engine, S3StandInEngine):
        pytest.skip("this engine has no server")
    url = f"{engine.url.partition('&timeout_seconds')[0].partition('?timeout_seconds')[0]}"
    await store.put(str(name), [b"bytes"], copies=1)  # patiently: a server that has just started makes its first volume
    impatient = make_object_store(f"{url}{'&' if '?' in url else '?'}timeout_seconds=4")
    await impatient.open("127.0.0.1", 0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    counter = asyncio.create_task(count())
    with engine.paused():
        before = turns
        calls = (
            impatient.put(str(name.retried()), [bytes(MIB)], copies=1),
            impatient.size(str(name)),
            impatient.copies([str(name)]),
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [UnavailableError] * 3
        assert turns - before > 20, "the loop stood still"
    counter.cancel()
    await impatient.aclose()


async def test_what_a_restart_leaves(engine: Engine, store: ObjectStore, name: ObjectName) -> None:
    data = bytes(range(256)) * 1000
    await store.put(str(name), [data], copies=1)
    await asyncio.to_thread(engine.restart)
    other = make_object_store(engine.url)
    await until_it_answers(other)
    into = bytearray(len(data))
    if engine.keeps_over_restart:
        for attempt in range(100):
            try:
                await other.read(str(name), memoryview(into))
                break
            except UnavailableError:  # it listens, and its parts find each other
                await asyncio.sleep(0.01 * attempt)
        assert into == data
    else:
        assert await other.copies([str(name)]) == [0]
        with pytest.raises(ObjectMissingError):
            await other.read(str(name), memoryview(into))
    assert await other.put(str(name.retried()), [data], copies=1) >= 1
    await other.aclose()


async def until_it_answers(store: ObjectStore) -> None:
    for attempt in range(100):
        try:
            await store.open("127.0.0.1", 0)
            return
        except TqError:
            await asyncio.sleep(0.01 * attempt)
    raise AssertionError("the engine does not come back")


async def test_a_reader_during_removal_reads_the_object_or_an_error(
    engine: Engine, store: ObjectStore, name: ObjectName
) -> None:
    """Removal and a put of other bytes while it is read: never a mixture."""
    size = 8 * MIB
    outcomes = {"whole": 0, "missing": 0}
    for round_number in range(6):
        mine = replace(name, piece=round_number)
        other = replace(mine, put_id="02")
        await store.put(str(mine), [b"\xaa" * size], copies=1)
        into = bytearray(size)
        reading = asyncio.create_task(store.read(str(mine), memoryview(into)))
        remover = Remover(store, interval_seconds=0.05)
        remover.start()
        remover.remove([str(mine)])
        await store.put(str(other), [b"\xbb" * size], copies=1)
        try:
            await reading
            outcomes["whole"] += 1
            assert into == b"\xaa" * size
        except ObjectMissingError:
            outcomes["missing"] += 1
        remover.remove([str(other)])
        await remover.wait_empty()
        await remover.aclose()
    assert sum(outcomes.values()) == 6


async def test_settings_that_are_wrong_are_refused(engine: Engine) -> None:
    separator = "&" if "?" in engine.url else "?"
    with pytest.raises(InvalidArgumentError, match="got the settings nonsense"):
        make_object_store(f"{engine.url}{separator}nonsense=1")
