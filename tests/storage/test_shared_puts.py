"""Puts whose bytes came as shared memory: stored, read, freed and compacted like any other."""

import asyncio
import gc

import numpy as np
import pytest
from engine_driver import PARTITION, begin_shared, cells, compacted, put, put_id, put_shared, read, runs
from open_files import open_files

from tq_service.errors import CallCancelledError, InvalidArgumentError, QuotaExceededError
from tq_service.storage.blobs.memory import BACKGROUND
from tq_service.storage.engine import StorageEngine
from tq_service.wire import shared_memory
from tq_service.wire.encoding import encode_columns

pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")

DATA = {
    "odd": np.arange(1001, dtype=np.uint8),
    "jagged": [np.arange(row % 7, dtype=np.float32) for row in range(1001)],
    "object": [{"row": row} for row in range(1001)],
    "wide": np.arange(1001 * 40, dtype=np.int64).reshape(1001, 40),
}


@pytest.fixture(params=["regions", "sealed"])
def own(request):
    """Whether the client is of the service's user."""
    return {"is_own_user": request.param == "regions"}


@pytest.fixture
def engine():
    return StorageEngine(max_bytes=None)


async def dropped(engine):
    """Have what is pooled dropped."""
    engine.regions.trim(1e9)
    await asyncio.to_thread(BACKGROUND.submit(int).result)


def check(back, rows):
    assert back["odd"].tolist() == DATA["odd"][rows].tolist()
    assert back["wide"].tolist() == DATA["wide"][rows].tolist()
    assert back["object"] == [DATA["object"][row] for row in rows]
    assert [values.tolist() for values in back["jagged"]] == [DATA["jagged"][row].tolist() for row in rows]


async def test_it_is_read_like_any_other(engine, own):
    await put_shared(engine, 1, DATA, **own)
    check(read(engine, [1], runs(DATA, (0, 0, 1001))), range(1001))
    check(read(engine, [1], runs(DATA, (0, 900, 3), (0, 5, 1))), [900, 901, 902, 5])


async def test_rows_of_both_kinds_of_puts_are_mixed(engine, own):
    await put_shared(engine, 1, DATA, **own)
    await put(engine, 2, DATA)
    check(read(engine, [1, 2], runs(DATA, (1, 3, 1), (0, 4, 2), (1, 5, 1))), [3, 4, 5, 5])


async def test_its_memory_and_file_descriptor_go_when_it_is_freed(engine, own):
    before = open_files()
    await put_shared(engine, 1, DATA, **own)
    assert engine.shared_memory_count == 1
    assert len(open_files() - before) == 1
    assert engine.stat().used_bytes >= sum(column.value_bytes for column in encode_columns(DATA))
    engine.free([cells(1)])
    assert (engine.shared_memory_count, engine.stat().used_bytes) == (0, 0)
    assert bool(engine.stat().pooled_bytes) == own["is_own_user"]
    await dropped(engine)
    assert engine.stat().pooled_bytes == 0
    assert open_files() <= before


async def test_a_service_that_goes_takes_its_puts_along(own):
    before = open_files()
    engine = StorageEngine(max_bytes=None)
    await put_shared(engine, 1, DATA, **own)
    assert len(open_files() - before) == 1
    await engine.regions.close()  # ends threads, of which one may still be leaving the call that made the region
    del engine
    await asyncio.sleep(0)  # the loop's last references to what has made the region
    gc.collect()
    assert open_files() <= before


async def test_large_memory_is_freed_aside(engine, own):
    before = open_files()
    await put_shared(engine, 1, {"x": np.zeros((16, 1 << 20), np.uint8)}, **own)
    engine.free([cells(1)])
    assert engine.stat().used_bytes == 0
    await dropped(engine)
    assert open_files() <= before


async def test_what_is_being_read_stays(engine, own):
    before = open_files()
    await put_shared(engine, 1, DATA, **own)
    with engine.open_read([runs(["odd"], (0, 0, 1001))], [put_id(1)]) as reading:
        engine.free([cells(1)])
        assert b"".join(bytes(chunk) for chunk in reading.chunks()) == DATA["odd"].tobytes()
        assert engine.stat().used_bytes > 0
    del reading
    gc.collect()
    assert engine.stat().used_bytes == 0
    await dropped(engine)
    assert open_files() <= before


async def test_compaction_moves_it_into_memory_of_the_service(engine, own):
    await put_shared(engine, 1, DATA, **own)
    was = engine.stat().used_bytes
    engine.free([cells(1, *range(600))])
    await compacted(engine)
    assert engine.shared_memory_count == 0
    assert engine.stat().used_bytes < was / 2
    check(read(engine, [1], runs(DATA, (0, 600, 401))), range(600, 1001))


async def test_the_quota_counts_it_before_it_comes(own):
    engine = StorageEngine(max_bytes=1 << 20)
    big = {"x": np.zeros((100, 8192), np.uint8)}
    pending, _ = await begin_shared(engine, 1, big, **own)
    assert engine.stat().used_bytes >= 100 * 8192
    with pytest.raises(QuotaExceededError, match="no capacity"):
        await begin_shared(engine, 2, big, deadline=0, **own)
    pending.abort()
    assert engine.stat().used_bytes == 0
    await put_shared(engine, 2, big, **own)
    assert np.array_equal(read(engine, [2], runs(["x"], (0, 0, 100)))["x"], big["x"])


async def test_memory_of_another_size_is_refused_and_closed(engine):
    before = open_files()
    pending, columns = await begin_shared(engine, 1, DATA, is_own_user=False)
    with pytest.raises(InvalidArgumentError, match=r"got shared memory of .* bytes; expected"):
        await pending.map_fd(shared_memory.write_sealed(columns[:2]))
    with pytest.raises(InvalidArgumentError, match="short of the size declared in its header"):
        pending.finish()
    pending.abort()
    assert open_files() <= before
    assert engine.stat().used_bytes == 0


async def test_frames_for_a_shared_put_are_refused(engine, own):
    pending, _ = await begin_shared(engine, 1, DATA, **own)
    with pytest.raises(InvalidArgumentError, match="shared memory"):
        await pending.write(b"x")
    pending.abort()


async def test_sealed_memory_for_other_puts_is_refused_and_closed(engine):
    columns = encode_columns(DATA)
    for store in (None, engine.regions):
        pending = await engine.reserve(
            put_id(1), columns, partition_id=PARTITION, for_existing_rows=False, deadline=None, store=store
        )
        before = open_files()
        with pytest.raises(InvalidArgumentError, match="in another way"):
            await pending.map_fd(shared_memory.write_sealed(columns))
        pending.abort()
        with pytest.raises(CallCancelledError):
            await pending.map_fd(shared_memory.write_sealed(columns))
        assert open_files() <= before
