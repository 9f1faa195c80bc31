"""What every engine promises (`tq_service/objects/base.py`), on each engine that there is here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tq_service.errors import AlreadyExistsError, DataLossError, InvalidArgumentError, UnavailableError
from tq_service.objects.base import LARGEST_OBJECT_BYTES, ObjectMissingError, ObjectStore
from tq_service.objects.names import ObjectName, instance_prefix
from tq_service.objects.registry import make_object_store

NAME = ObjectName(cluster="c", storage_id="storage-0", instance="0a", put_id="01")


@pytest.fixture(params=["memory", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    urls = {"memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/objects"}
    store = make_object_store(urls[request.param])
    await store.open("node-0", 0)
    yield store
    await store.aclose()


async def read(store: ObjectStore, name: ObjectName, size: int, start: int = 0) -> bytes:
    into = bytearray(size)
    await store.read(str(name), memoryview(into), start)
    return bytes(into)


@pytest.mark.parametrize("size", [0, 1, 100_000, LARGEST_OBJECT_BYTES])
async def test_an_object_is_read_as_it_was_put(store: ObjectStore, size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    half = size // 2
    assert await store.put(str(NAME), [data[:half], memoryview(data)[half:]], copies=1) == 1
    assert await store.size(str(NAME)) == size
    assert await store.copies([str(NAME)]) == [1]
    assert await read(store, NAME, size) == data


async def test_ranges_are_read(store: ObjectStore) -> None:
    data = bytes(range(256)) * 1000
    await store.put(str(NAME), [data], copies=1)
    for start, size in ((0, 1), (0, 255_999), (1, 255_999), (255_999, 1), (1000, 5000), (256_000, 0)):
        assert await read(store, NAME, size, start) == data[start : start + size]
    for start, size in ((0, 256_001), (255_999, 2), (300_000, 1)):
        with pytest.raises(DataLossError, match="has 256000 bytes"):
            await read(store, NAME, size, start)


async def test_what_is_not_there_is_missing(store: ObjectStore) -> None:
    await store.put(str(NAME), [b"bytes"], copies=1)
    other = str(NAME.retried())
    with pytest.raises(ObjectMissingError):
        await store.read(other, memoryview(bytearray(5)))
    with pytest.raises(ObjectMissingError):
        await store.size(other)
    assert await store.copies([other, str(NAME)]) == [0, 1]
    assert await store.copies([]) == []


async def test_a_name_is_never_used_twice(store: ObjectStore) -> None:
    await store.put(str(NAME), [b"first"], copies=1)
    with pytest.raises(AlreadyExistsError):
        await store.put(str(NAME), [b"other"], copies=1)
    assert await read(store, NAME, 5) == b"first"


async def test_an_object_that_is_too_large_is_refused(store: ObjectStore) -> None:
    with pytest.raises(InvalidArgumentError, match="cut it into pieces"):
        await store.put(str(NAME), [bytes(store.abilities.largest_object_bytes + 1)], copies=1)
    assert await store.copies([str(NAME)]) == [0]


async def test_removed_objects_are_gone_and_others_stay(store: ObjectStore) -> None:
    names = [str(ObjectName(cluster="c", storage_id="s", instance="0", put_id=f"{n:02x}")) for n in range(20)]
    for name in names:
        await store.put(name, [name.encode()], copies=1)
    assert await store.remove([*names[:10], "c/s/0/never/0.0"]) == []
    assert await store.remove(names[:10]) == []
    assert await store.copies(names) == [0] * 10 + [1] * 10
    with pytest.raises(ObjectMissingError):
        await store.size(names[0])
    assert await store.size(names[10]) == len(names[10])


async def test_names_are_listed_and_removed_by_their_beginning(store: ObjectStore) -> None:
    async def listed(prefix: str) -> set[str]:
        return {name async for page in store.list_names(prefix) for name in page}

    names = [
        ObjectName(cluster="c", storage_id=storage, instance=instance, put_id=put, piece=piece)
        for storage in ("s", "s2")
        for instance in ("0", "1")
        for put in ("a", "b")
        for piece in (0, 1)
    ]
    for name in names:
        await store.put(str(name), [b""], copies=1)
    assert await listed("") == set(map(str, names))
    of_instance = {str(name) for name in names if name.storage_id == "s" and name.instance == "1"}
    assert await listed(instance_prefix("c", "s", "1")) == of_instance
    assert await listed(names[0].put_prefix) == {str(name) for name in names[:2]}
    assert await listed("c/none/") == set()
    assert await store.remove_below(instance_prefix("c", "s", "1"))
    assert await listed("") == set(map(str, names)) - of_instance


async def test_capacity_counts_what_is_held(store: ObjectStore) -> None:
    before = await store.capacity()
    assert before.total_bytes is None or before.free_bytes is not None
    await store.put(str(NAME), [bytes(1 << 20)], copies=1)
    after = await store.capacity()
    assert after.total_bytes == before.total_bytes


async def test_a_closed_engine_says_so(store: ObjectStore) -> None:
    await store.aclose()
    await store.aclose()
    with pytest.raises(UnavailableError):
        await store.put(str(NAME), [b""], copies=1)
    with pytest.raises(UnavailableError):
        await store.copies([str(NAME)])
