"""The engine over a store that is not memory of the process: writes and reads wait for threads, and others go on."""

import asyncio
import errno
import os
import random

import numpy as np
import pytest
from durable_driver import Directory, put
from engine_driver import begin, cells, put_id, runs

from tq_service.client.reads import decode_columns
from tq_service.errors import CallCancelledError, InvalidArgumentError, UnavailableError
from tq_service.storage.blobs import segments
from tq_service.wire.columns import ColumnReceiver

ROWS = 200
DATA = {
    "wide": np.arange(ROWS * 80, dtype=np.int64).reshape(ROWS, 80),
    "odd": np.arange(ROWS, dtype=np.uint8),
    "jagged": [np.arange(row % 7, dtype=np.float32) for row in range(ROWS)],
    "object": [{"row": row} for row in range(ROWS)],
}


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path)


@pytest.fixture
def engine(directory):
    return directory.open()


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


async def test_columns_that_are_left_out_are_not_read(engine, monkeypatch):
    await put(engine, 1, DATA)
    sizes, read_into = [], segments.read_into

    def counted(fd, target, start):
        sizes.append(len(target))
        read_into(fd, target, start)

    monkeypatch.setattr(segments, "read_into", counted)
    with engine.open_read([runs(["wide", "odd"], (0, 3, 4))], [put_id(1)]) as reading:
        assert (await received(reading, {0}))["odd"].tolist() == [3, 4, 5, 6]
    assert sum(sizes) == 4


async def test_who_waits_for_capacity_gets_it_when_the_end_of_a_put_is_durable(tmp_path):
    directory = Directory(tmp_path, max_bytes=1 << 19, reserve_share=0)
    engine = directory.open()
    for number in (1, 2):
        await put(engine, number, DATA)
    full = {"x": np.zeros((1 << 19) - engine.stat().used_bytes, np.uint8)}
    waiting = asyncio.create_task(put(engine, 3, {"x": np.zeros(len(full["x"]) + 1000, np.uint8)}))
    await asyncio.sleep(0)
    directory.flush()
    engine.free([cells(1)])
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    directory.flush()
    await asyncio.wait_for(waiting, 10)


async def test_readers_keep_what_is_freed_meanwhile(directory, engine):
    await put(engine, 1, DATA)
    directory.flush()
    with engine.open_read([runs(DATA, (0, 0, ROWS))], [put_id(1)]) as reading:
        engine.free([cells(1)])
        directory.flush()
        check(await received(reading), range(ROWS))
        assert engine.stat().used_bytes > 0
    assert engine.stat().used_bytes == 0


@pytest.mark.parametrize("turns", range(8))
async def test_a_put_that_is_cancelled_in_the_middle_leaves_nothing(engine, turns):
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
    await asyncio.gather(task, return_exceptions=True)
    while engine.stat().used_bytes:  # noqa: ASYNC110  (until a thread has ended with what it was given)
        await asyncio.sleep(0)
    await put(engine, 1, DATA)
    check(await read(engine, [1], runs(DATA, (0, 0, ROWS))), range(ROWS))


async def test_a_retry_takes_over_from_one_that_is_writing(engine):
    pending, chunks = await begin(engine, 1, DATA)
    writing = asyncio.create_task(pending.write(chunks[0]))
    await asyncio.sleep(0)
    await put(engine, 1, DATA)
    with pytest.raises(CallCancelledError, match="has taken over"):
        await writing
    pending.abort()
    check(await read(engine, [1], runs(DATA, (0, 0, ROWS))), range(ROWS))


async def test_a_shortage_in_the_middle_of_a_put_is_the_end_of_it(engine, monkeypatch):
    pending, chunks = await begin(engine, 1, DATA)
    await pending.write(chunks[0])

    def fail(fd, data, start):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "pwrite", fail)
        with pytest.raises(UnavailableError, match="could not store"):
            await pending.write(chunks[1])
    with pytest.raises(InvalidArgumentError, match="short of the size declared in its header"):
        pending.finish()
    pending.abort()
    assert engine.stat().used_bytes == 0
