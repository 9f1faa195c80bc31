"""The engine over a store without any capability, as on another host: values elsewhere, tables with the index."""

import asyncio
import random

import numpy as np
import pytest
from awaiting_store import AwaitingStore, outage
from engine_driver import PARTITION, begin, begin_shared, cells, put, put_id, runs

from tq_service.errors import (
    CallCancelledError,
    DataLossError,
    InvalidArgumentError,
    PutNotFoundError,
    QuotaExceededError,
    UnavailableError,
)
from tq_service.storage.engine import StorageEngine
from tq_service.wire import shared_memory
from tq_service.wire.decoding import decode_columns
from tq_service.wire.encoding import encode_columns
from tq_service.wire.frames import ColumnReceiver

ROWS = 200
DATA = {
    "wide": np.arange(ROWS * 40, dtype=np.int64).reshape(ROWS, 40),
    "odd": np.arange(ROWS, dtype=np.uint8),
    "jagged": [np.arange(row % 7, dtype=np.float32) for row in range(ROWS)],
    "object": [{"row": row} for row in range(ROWS)],
}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store():
    return AwaitingStore()


@pytest.fixture
def engine(store, clock):
    return StorageEngine(max_bytes=None, blobs=store, clock=clock, put_ttl_seconds=10)


async def received(reading, without=()):
    columns = [header for index, header in enumerate(reading.headers) if index not in without]
    receiver = ColumnReceiver(columns)
    async for part in reading.parts(without):
        for chunk in part:
            receiver.write(chunk)
    return decode_columns(columns, receiver.finish(), as_torch=False)


async def read(engine, puts, *fields):
    with engine.open_read(list(fields), [put_id(number) for number in puts]) as reading:
        return await received(reading)


def check(back, rows):
    assert back["wide"].tolist() == DATA["wide"][rows].tolist()
    assert back["odd"].tolist() == DATA["odd"][rows].tolist()
    assert [values.tolist() for values in back["jagged"]] == [DATA["jagged"][row].tolist() for row in rows]
    assert back["object"] == [DATA["object"][row] for row in rows]


async def test_what_was_put_comes_back(engine, store):
    await put(engine, 1, DATA)
    assert sum(map(len, store.values.values())) < engine.stat().used_bytes  # tables are not there, but counted
    check(await read(engine, [1], runs(DATA, (0, 0, ROWS))), range(ROWS))


@pytest.mark.parametrize("seed", range(5))
async def test_rows_come_in_any_order_from_any_puts(engine, seed):
    rng = random.Random(seed)
    for number in (1, 2, 3):
        await put(engine, number, DATA)
    picked = []
    for _ in range(rng.randint(1, 60)):
        first = rng.randrange(ROWS)
        picked.append((rng.randrange(3), first, rng.randint(1, min(20, ROWS - first))))
    rows = [first + row for _, first, count in picked for row in range(count)]
    check(await read(engine, [1, 2, 3], runs(DATA, *picked)), rows)


async def test_columns_that_are_left_out_are_not_read(engine, store):
    await put(engine, 1, DATA)
    with engine.open_read([runs(["wide", "odd"], (0, 3, 4))], [put_id(1)]) as reading:
        store.failures = [None, outage()]
        assert (await received(reading, {0}))["odd"].tolist() == [3, 4, 5, 6]


async def test_puts_are_freed_whole_and_nothing_is_compacted(engine, store):
    await put(engine, 1, DATA)
    was = engine.stat().used_bytes
    engine.free([cells(1, *range(ROWS - 1))])
    await store.idle()
    assert (engine.stat().used_bytes, len(store.values)) == (was, 1)
    check(await read(engine, [1], runs(DATA, (0, ROWS - 1, 1))), [ROWS - 1])
    with pytest.raises(PutNotFoundError, match="cleared"):
        await read(engine, [1], runs(["odd"], (0, 3, 1)))
    engine.free([cells(1, ROWS - 1)])
    await store.idle()
    assert (engine.stat().used_bytes, engine.stat().put_count, store.values) == (0, 0, {})


async def test_a_put_that_is_not_confirmed_expires(engine, store, clock):
    await put(engine, 1, DATA, confirm=False)
    await put(engine, 2, DATA)
    clock.now = 11
    assert sum(engine.expire()) == 1
    await store.idle()
    assert len(store.values) == 1
    with pytest.raises(PutNotFoundError, match="put it again"):
        engine.check_complete(put_id(1), PARTITION)
    check(await read(engine, [2], runs(DATA, (0, 0, 5))), range(5))


async def test_who_waits_for_capacity_gets_it_when_the_store_has_freed_it(store):
    engine = StorageEngine(max_bytes=1 << 16, reserve_share=0, blobs=store)
    data = {"x": np.zeros((30, 1024), np.uint8)}
    for number in (1, 2):
        await put(engine, number, data)
    waiting = asyncio.create_task(put(engine, 3, data))
    await asyncio.sleep(0)
    engine.free([cells(1)])
    assert engine.stat().used_bytes == 2 * 30 * 1024  # not free before the store says so
    await asyncio.wait_for(waiting, 10)
    with pytest.raises(QuotaExceededError, match="until the deadline"):
        await begin(engine, 4, data, deadline=0)
    assert engine.stat().used_bytes == 2 * 30 * 1024


async def test_readers_keep_what_is_freed_meanwhile(engine, store):
    await put(engine, 1, DATA)
    with engine.open_read([runs(DATA, (0, 0, ROWS))], [put_id(1)]) as reading:
        engine.free([cells(1)])
        await asyncio.sleep(0)
        check(await received(reading), range(ROWS))
        assert engine.stat().used_bytes > 0
    await store.idle()
    assert (engine.stat().used_bytes, store.values) == (0, {})


@pytest.mark.parametrize("turns", range(8))
async def test_a_put_that_is_cancelled_in_the_middle_leaves_nothing(engine, store, turns):
    async def whole():
        pending, chunks = await begin(engine, 1, DATA)
        try:
            for chunk in chunks:
                await pending.write(chunk)
        except BaseException:
            pending.abort()
            raise

    task = asyncio.create_task(whole())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.idle()
    assert (engine.stat().used_bytes, store.values) == (0, {})
    await put(engine, 1, DATA)
    check(await read(engine, [1], runs(DATA, (0, 0, ROWS))), range(ROWS))


async def test_a_retry_takes_over_from_one_that_is_writing(engine, store):
    pending, chunks = await begin(engine, 1, DATA)
    writing = asyncio.create_task(pending.write(chunks[0]))
    await asyncio.sleep(0)
    await put(engine, 1, DATA)
    with pytest.raises(CallCancelledError, match="took over"):
        await writing
    pending.abort()
    await store.idle()
    assert len(store.values) == 1
    check(await read(engine, [1], runs(DATA, (0, 0, ROWS))), range(ROWS))


async def test_an_outage_in_the_middle_of_a_put_is_the_end_of_it(engine, store):
    pending, chunks = await begin(engine, 1, DATA)
    await pending.write(chunks[0])
    store.failures = [outage()]
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await pending.write(chunks[1])
    with pytest.raises(InvalidArgumentError, match="before what its header declared"):
        pending.finish()
    pending.abort()
    await store.idle()
    assert (engine.stat().used_bytes, store.values) == (0, {})


async def test_an_outage_in_the_middle_of_a_read_is_an_error_of_that_read(engine, store):
    await put(engine, 1, DATA)
    store.failures = [None, None, outage()]
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await read(engine, [1], runs(DATA, (0, 0, ROWS)))
    check(await read(engine, [1], runs(DATA, (0, 0, ROWS))), range(ROWS))
    store.values.clear()
    with pytest.raises(DataLossError, match="gone"):
        await read(engine, [1], runs(["wide"], (0, 0, 1)))


async def test_too_many_bytes_are_refused_and_too_few(engine):
    pending, chunks = await begin(engine, 1, {"x": np.zeros(100, np.uint8)})
    await pending.write(chunks[0][:50])
    with pytest.raises(InvalidArgumentError, match="ended 50 bytes before"):
        pending.finish()
    with pytest.raises(InvalidArgumentError, match="1 bytes more"):
        await pending.write(bytes(51))
    await pending.write(chunks[0][50:])
    pending.finish()
    assert (await read(engine, [1], runs(["x"], (0, 0, 100))))["x"].tolist() == [0] * 100


@pytest.mark.parametrize("piece", [1, 7, 10_000])
@pytest.mark.parametrize("row", [0, 3, ROWS - 1])
async def test_rows_that_are_no_text_are_refused_however_they_are_cut(engine, row, piece):
    put_data = {"odd": DATA["odd"], "text": [f"text {number}" for number in range(ROWS)], "after": DATA["odd"]}
    pending, chunks = await begin(engine, 1, put_data)
    data = bytearray(b"".join(chunks))
    text = next(column for column in encode_columns(put_data) if column.spec.name == "text")
    data[ROWS + int(text.row_offsets()[row]) + 2] = 0xFF
    with pytest.raises(InvalidArgumentError, match=f"row {row} of field 'text' is not UTF-8 from its byte 2 on"):
        for start in range(0, len(data), piece):
            await pending.write(bytes(data[start : start + piece]))
    pending.abort()


@pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")
async def test_shared_memory_of_clients_stays_here_and_is_read_together_with_the_rest(engine):
    pending, columns = await begin_shared(engine, 2, DATA)
    await pending.adopt(shared_memory.write_columns(columns))
    pending.finish()
    await put(engine, 1, DATA)
    back = await read(engine, [1, 2], runs(DATA, (1, 3, 1), (0, 4, 2), (1, 5, 1)))
    check(back, [3, 4, 5, 5])
