"""A process that lacks files or memory for a moment: nothing is taken for damaged, and what can be done is done."""

import asyncio
import errno

import numpy as np
import pytest
from durable_driver import Directory, put, settled
from engine_driver import begin, cells, put_id, read, reconcile, runs

from tq_service.errors import UnavailableError
from tq_service.storage.blobs.segments import Segment, SegmentBlobs
from tq_service.storage.index import put_table

ROWS = 1000
DATA = {
    "x": np.arange(ROWS * 1000, dtype=np.uint8).reshape(ROWS, 1000),
    "jagged": [np.arange(row % 7) for row in range(ROWS)],
}


async def reopened(path, **settings):
    """Return a directory whose engine has recovered a put that nobody has looked at."""
    directory = Directory(path, **settings)
    await put(directory.open(), 1, DATA)
    directory.flush()
    directory.open()
    return directory


def row(engine, number, index):
    return read(engine, [number], runs(["x"], (0, index, 1)))["x"][0]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
async def test_a_put_is_not_damaged_because_its_file_cannot_be_opened_now(tmp_path, monkeypatch, code):
    directory = await reopened(tmp_path)
    engine = directory.engine

    def refused(segment):
        raise OSError(code, "not now")

    with monkeypatch.context() as short:
        short.setattr(Segment, "open", refused)
        with pytest.raises(UnavailableError, match=r"cannot be read now .*not now.*try again"):
            await engine.check([put_id(1)])
        assert not engine.damaged
        assert reconcile(engine, [cells(1)]).missing_put_ids == []
        engine.free([cells(1, 3)])
        assert not engine.damaged
    await engine.check([put_id(1)])
    assert np.array_equal(row(engine, 1, 5), DATA["x"][5])


async def test_the_scrub_goes_on_when_files_can_be_opened_again(tmp_path, monkeypatch):
    monkeypatch.setattr(put_table, "_RETRY_SECONDS", 0.0)
    engine = (await reopened(tmp_path)).engine
    refusals = []
    checksum = Segment.checksum

    def at_first_refused(segment, size):
        if len(refusals) < 3:
            refusals.append(size)
            raise OSError(errno.EMFILE, "not now")
        return checksum(segment, size)

    monkeypatch.setattr(Segment, "checksum", at_first_refused)
    async with asyncio.timeout(30):
        await engine.scrub()
    assert len(refusals) == 3
    assert not engine.damaged
    assert engine._backing.may_compact(put_id(1))


async def test_a_put_that_cannot_be_compacted_yet_keeps_no_capacity_from_others(tmp_path):
    directory = await reopened(tmp_path, max_bytes=3_200_000)
    engine = directory.engine
    await put(engine, 2, DATA)
    for number in (1, 2):
        engine.free([cells(number, *range(200))])  # more than an eighth, less than a half
    assert not engine._backing.may_compact(put_id(1))
    waiting = asyncio.create_task(begin(engine, 3, {"x": DATA["x"][:950]}))
    await asyncio.sleep(0)
    assert not waiting.done()
    await settled(directory)
    pending, _ = await asyncio.wait_for(waiting, 10)
    pending.abort()
    assert np.array_equal(row(engine, 2, 500), DATA["x"][500])


async def test_a_put_whose_file_cannot_be_made_now_may_be_sent_again_and_costs_no_files(tmp_path, monkeypatch):
    directory = Directory(tmp_path)
    engine = directory.open()
    await put(engine, 1, DATA)
    engine.free([cells(1)])
    directory.flush()
    before = engine.stat().pooled_bytes
    assert before > 0

    def refused(files, capacity):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as short:
        short.setattr(SegmentBlobs, "_make", refused)
        with pytest.raises(UnavailableError, match=r"could not store .*Too many open files.*try again"):
            await put(engine, 2, {"x": DATA["x"][:500]})
    stat = engine.stat()
    assert (stat.used_bytes, stat.pooled_bytes) == (0, before)
    await put(engine, 2, {"x": DATA["x"][:500]})
    assert np.array_equal(row(engine, 2, 5), DATA["x"][5])
