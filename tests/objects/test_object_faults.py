"""What engines do when things go wrong around them: killed writers, full, slow, unreachable and restarted stores."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from object_engines import ENGINES, Engine, MooncakeEngine, ObjectName, StandInEngine, new_name

from tq_service.errors import AlreadyExistsError, InvalidArgumentError, QuotaExceededError, TqError, UnavailableError
from tq_service.objects.base import ObjectMissingError, ObjectStore, make_object_store
from tq_service.objects.remover import Remover

MIB = 1 << 20

WRITER = textwrap.dedent(
    """
    import asyncio, sys
    from tq_service.objects.base import make_object_store

    async def main():
        store = make_object_store(sys.argv[1])
        await store.open("127.0.0.1", 0)
        data = bytes(range(256)) * (16 << 12)
        number = 0
        while True:
            name = f"{sys.argv[2]}.{number}"
            print(name, flush=True)
            await store.put(name, [data], copies=1)
            number += 1

    asyncio.run(main())
    """
)


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.nightly] * (name not in {"file", "s3_stand_in"})) for name in ENGINES]
)
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
    return new_name()


async def remove(store: ObjectStore, names: list[str]) -> None:
    """Ask until they are gone, as the service does."""
    while names := await store.remove(names):  # noqa: ASYNC110  (nothing is set when a lease ends)
        await asyncio.sleep(0.1)


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
        first = name._replace(put=f"p{round_number}")
        attempted = await asyncio.to_thread(killed_writer, engine.url, first, after=2 + round_number)
        whole = [await is_whole(store, each) for each in attempted]
        assert [count > 0 for count in await store.copies(attempted)] == whole
        attempted.append(f"{attempted[-1]}.again")
        assert await store.put(attempted[-1], [b"again"], copies=1) >= 1
        into = bytearray(5)
        await store.read(attempted[-1], memoryview(into))
        assert into == b"again"
        await remove(store, attempted)
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
            name = name.next()
    assert full.value.retry_after_seconds is not None
    assert written
    assert all(await store.copies(written)), "nothing is evicted"
    assert await store.copies([str(name)]) == [0]
    await remove(store, written)
    assert await store.put(str(name.next()), [bytes(MIB)], copies=1) == 1
    await store.aclose()


async def test_fewer_copies_than_asked_for_are_counted(engine: Engine, store: ObjectStore, name: ObjectName) -> None:
    made = await store.put(str(name), [b"bytes"], copies=5)
    fixed = store.abilities.fixed_copies
    assert made == (2 if engine.counts_nodes else fixed)
    assert await store.copies([str(name)]) == [made]


async def test_a_store_that_does_not_answer_is_unavailable_and_the_loop_goes_on(
    engine: Engine, store: ObjectStore, name: ObjectName
) -> None:
    if not engine.processes and not isinstance(engine, StandInEngine):
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
            impatient.put(str(name.next()), [bytes(MIB)], copies=1),
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
    assert await other.put(str(name.next()), [data], copies=1) >= 1
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
        mine = name._replace(piece=round_number)
        other = mine._replace(put="02")
        await store.put(str(mine), [b"\xaa" * size], copies=1)
        into = bytearray(size)
        reading = asyncio.create_task(store.read(str(mine), memoryview(into)))
        remover = Remover(store, interval_seconds=0.05)
        remover.remove([str(mine)])
        removing = asyncio.create_task(remover.run())
        await store.put(str(other), [b"\xbb" * size], copies=1)
        try:
            await reading
            outcomes["whole"] += 1
            assert into == b"\xaa" * size
        except ObjectMissingError:
            outcomes["missing"] += 1
        remover.remove([str(other)])
        while remover.pending_count:  # noqa: ASYNC110  (nothing is set when it happens)
            await asyncio.sleep(0.01)
        removing.cancel()
    assert sum(outcomes.values()) == 6


async def test_settings_that_are_wrong_are_refused(engine: Engine) -> None:
    separator = "&" if "?" in engine.url else "?"
    with pytest.raises(InvalidArgumentError, match="unknown settings nonsense"):
        make_object_store(f"{engine.url}{separator}nonsense=1")


async def test_a_file_is_synced_before_it_has_its_name_and_the_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`obstore` 0.12 syncs nothing, so that an acknowledged object could be empty after a loss of power."""
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def synced(fd: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().relative_to(tmp_path)}")
        fsync(fd)

    def linked(part: Path, path: Path) -> None:
        done.append("link")
        link(part, path)

    store = make_object_store(f"file://{tmp_path}/d?survives=power")
    await store.open("node", 0)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    await store.put("tq/s/p", [b"bytes"], copies=1)
    await store.aclose()
    assert done == ["sync d/tq/s/p#0", "link", "sync d/tq/s", "sync d/tq", "sync d"]


async def test_half_a_file_has_its_name_taken_and_goes_with_it(tmp_path: Path) -> None:
    store = make_object_store(f"file://{tmp_path}/d")
    await store.open("node", 0)
    (tmp_path / "d/tq").mkdir()
    (tmp_path / "d/tq/p#0").write_bytes(b"half")
    with pytest.raises(AlreadyExistsError):
        await store.put("tq/p", [b"bytes"], copies=1)
    assert [each async for each in store.list_names("tq/")] == []
    assert await store.copies(["tq/p"]) == [0]
    assert await store.remove(["tq/p"]) == []
    assert not list((tmp_path / "d/tq").iterdir())
    for name in ("../p", "/p", "a//p", "a/../../p", "p#0"):
        with pytest.raises(InvalidArgumentError, match="expected letters"):
            await store.put(name, [b""], copies=1)
    await store.aclose()
