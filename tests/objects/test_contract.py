"""What every engine promises (`tq_service/objects/base.py`), on each engine that there is here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from object_engines import ENGINES, Engine, MooncakeEngine, ObjectName, new_name

from tq_service.errors import AlreadyExistsError, DataLossError, InvalidArgumentError, UnavailableError
from tq_service.objects.base import LARGEST_OBJECT_BYTES, ObjectMissingError, ObjectStore, make_object_store


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = ENGINES[request.param](tmp_path_factory.mktemp(request.param))
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
async def beside(engine: Engine) -> AsyncIterator[ObjectStore]:
    """The store of a process on the first node of the engine, which has the copies of others in its own memory."""
    if not isinstance(engine, MooncakeEngine):
        pytest.skip("this engine keeps no copies with those that use it")
    store = make_object_store(engine.url)
    await store.open("127.0.0.2", 0)
    yield store
    await store.aclose()


@pytest.fixture
def name() -> ObjectName:
    return new_name()


async def test_a_copy_on_the_own_node_counts_for_a_successor_and_not_for_a_writer(
    store: ObjectStore, beside: ObjectStore, name: ObjectName
) -> None:
    assert await store.put(str(name), [b"of another node"], copies=2) == 2
    assert await beside.copies([str(name)]) == [2]
    own = name.next()
    assert await beside.put(str(own), [b"of this node"], copies=2) == 1
    assert await store.copies([str(own)]) >= [1]
    await remove(store, [str(name), str(own)])


async def read(store: ObjectStore, name: ObjectName, size: int) -> bytes:
    into = bytearray(size)
    await store.read(str(name), memoryview(into))
    return bytes(into)


async def remove(store: ObjectStore, names: list[str]) -> None:
    """Ask until they are gone, as the service does: an engine may have a lease on what was looked at."""
    while names := await store.remove(names):  # noqa: ASYNC110  (nothing is set when a lease ends)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("size", [0, 1, 100_000, LARGEST_OBJECT_BYTES])
async def test_an_object_is_read_as_it_was_put(store: ObjectStore, name: ObjectName, size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    half = size // 2
    assert await store.put(str(name), [data[:half], memoryview(data)[half:]], copies=1) == 1
    assert await store.size(str(name)) == size
    assert (await store.copies([str(name)]))[0] >= 1
    assert await read(store, name, size) == data


async def test_beginnings_are_read(store: ObjectStore, name: ObjectName) -> None:
    data = bytes(range(256)) * 1000
    await store.put(str(name), [data], copies=1)
    for size in (0, 1, 5000, 255_999, 256_000):
        assert await read(store, name, size) == data[:size]
    with pytest.raises(DataLossError, match="has 256000 bytes"):
        await read(store, name, 256_001)


async def test_what_is_not_there_is_missing(store: ObjectStore, name: ObjectName) -> None:
    await store.put(str(name), [b"bytes"], copies=1)
    other = str(name.next())
    with pytest.raises(ObjectMissingError):
        await store.read(other, memoryview(bytearray(5)))
    with pytest.raises(ObjectMissingError):
        await store.size(other)
    missing, there = await store.copies([other, str(name)])
    assert (missing, there > 0) == (0, True)
    assert await store.copies([]) == []


async def test_a_name_is_never_used_twice(store: ObjectStore, name: ObjectName) -> None:
    await store.put(str(name), [b"first"], copies=1)
    with pytest.raises(AlreadyExistsError):
        await store.put(str(name), [b"other"], copies=1)
    assert await read(store, name, 5) == b"first"


async def test_an_object_that_is_too_large_is_refused(store: ObjectStore, name: ObjectName) -> None:
    with pytest.raises(InvalidArgumentError, match="Split the data into several objects"):
        await store.put(str(name), [bytes(LARGEST_OBJECT_BYTES + 1)], copies=1)
    assert await store.copies([str(name)]) == [0]


async def test_removed_objects_are_gone_and_others_stay(store: ObjectStore, name: ObjectName) -> None:
    names = [str(name._replace(put=f"{n:02x}")) for n in range(20)]
    for each in names:
        await store.put(each, [each.encode()], copies=1)
    await remove(store, [*names[:10], str(name.next())])
    await remove(store, names[:10])
    assert [count > 0 for count in await store.copies(names)] == [False] * 10 + [True] * 10
    with pytest.raises(ObjectMissingError):
        await store.size(names[0])
    assert await store.size(names[10]) == len(names[10])


async def test_names_are_listed_by_their_beginning(store: ObjectStore, name: ObjectName) -> None:
    if not store.abilities.lists_names:
        pytest.skip("this engine does not list names")

    async def listed(prefix: str) -> set[str]:
        return {name async for name in store.list_names(prefix)}

    names = [
        ObjectName(storage, instance, put, piece)
        for storage in (name.storage, f"{name.storage}2")
        for instance in ("0", "1")
        for put in ("a", "b")
        for piece in (0, 1)
    ]
    for each in names:
        await store.put(str(each), [b""], copies=1)
    of_instance = {str(each) for each in names if each.storage == name.storage and each.instance == "1"}
    assert await listed(f"tq/{name.storage}") == set(map(str, names))
    assert await listed(names[4].instance_prefix) == of_instance
    assert await listed(f"tq/{name.storage}/none/") == set()
    await remove(store, sorted(of_instance))
    assert await listed(f"tq/{name.storage}") == set(map(str, names)) - of_instance


async def test_a_closed_engine_says_so(store: ObjectStore, name: ObjectName) -> None:
    await store.aclose()
    await store.aclose()
    with pytest.raises(UnavailableError):
        await store.put(str(name), [b""], copies=1)
    with pytest.raises(UnavailableError):
        await store.copies([str(name)])
