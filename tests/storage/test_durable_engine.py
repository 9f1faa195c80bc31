import asyncio
import errno
import gc
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import psutil
import pytest
from durable_driver import BOOT, Directory, put, settled
from engine_driver import PARTITION, begin, begin_shared, cells, expire, put_id, read, reconcile, runs, share
from open_files import open_files

from tq_service.errors import (
    CallCancelledError,
    DataLossError,
    DiskFullError,
    PutNotFoundError,
    TqError,
    UnavailableError,
)
from tq_service.storage.blobs import segments
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put import PackedPut
from tq_service.wire import shared_memory

ROWS = 100
BIG = {
    "dense": np.arange(ROWS * 300).reshape(ROWS, 300),
    "jagged": [np.arange(row % 7) for row in range(ROWS)],
    "object": [{"row": row} for row in range(ROWS)],
}
SMALL = {"dense": np.arange(12).reshape(4, 3), "object": ["a", "bb", "", "dddd"]}

needs_memfd = pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path)


async def eventually(condition):
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


def check(engine, number, data, rows=None):
    names = list(data)
    wanted = range(len(data[names[0]])) if rows is None else rows
    back = read(engine, [number], runs(names, *((0, row, 1) for row in wanted)))
    for name, values in data.items():
        for got, row in zip(back[name], wanted, strict=True):
            assert np.array_equal(got, values[row]) if name != "object" else got == values[row]


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=needs_memfd)])
@pytest.mark.parametrize("data", [BIG, SMALL], ids=["big", "small"])
@pytest.mark.parametrize("sync", [False, True])
async def test_puts_come_back_as_they_were(tmp_path, shared, data, sync):
    directory = Directory(tmp_path, sync=sync)
    engine = directory.open()
    await put(engine, 1, data, shared=shared)
    check(engine, 1, data)
    directory.flush()
    used = engine.stat().used_bytes
    for _ in range(2):
        engine = directory.open()
        assert engine.boot_id == BOOT
        assert engine.partition_of(put_id(1)) == PARTITION
        assert engine.stat().put_count == engine.stat().uncommitted_put_count == 1
        await engine.check([put_id(1)])
        check(engine, 1, data)
        assert engine.stat().used_bytes == pytest.approx(used, abs=8192)
        directory.snapshot()
    assert len({StorageEngine(max_bytes=None, boot_id=BOOT).run_id for _ in range(3)}) == 3


async def test_a_record_of_a_packed_put_is_the_one_that_was_written_down(directory):
    engine = directory.open()
    for number, data in enumerate([SMALL, {"x": np.zeros(5)}, {"empty": np.zeros((3, 0))}, SMALL]):
        await put(engine, number, data)
    await put(engine, 4, BIG)
    written = list(directory.records)
    assert sorted(directory.journal.records()) == sorted(written)
    engine = directory.open()  # nothing was durable
    directory.records[:] = written
    directory.flush()
    engine = directory.open()
    assert sorted(directory.journal.records()) == sorted(written)
    assert [isinstance(engine.puts._shard(put_id(n))[put_id(n)], PackedPut) for n in range(5)] == [True] * 4 + [False]


async def test_a_packed_put_that_is_freed_in_part_comes_back_as_it_was_put(directory):
    engine = directory.open()
    await put(engine, 1, SMALL)
    engine.free([cells(1, 0, 2)])
    check(engine, 1, SMALL, [1, 3])
    directory.snapshot()
    engine = directory.open()
    check(engine, 1, SMALL)
    assert reconcile(engine, [cells(1, 1, 3)]).missing_count == 0
    with pytest.raises(PutNotFoundError):
        check(engine, 1, SMALL, [0])
    check(engine, 1, SMALL, [1, 3])
    engine.free([cells(1)])
    directory.snapshot()
    assert (engine.stat().used_bytes, directory.records) == (0, [])


async def test_a_packed_put_takes_few_bytes_with_a_journal(directory):
    engine, data = directory.open(), {"x": np.arange(1)}
    for number in range(1 << 12):  # so that the tables of puts have begun to grow
        await put(engine, number, data)
    directory.flush()
    directory.records.clear()
    tracemalloc.start()
    for number in range(1 << 12, 1 << 13):
        await put(engine, number, data)
        directory.records.clear()
    traced_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert traced_bytes / (1 << 12) < 8 + 400


async def test_what_was_not_durable_is_gone_and_its_segment_is_used_again(directory):
    engine = directory.open()
    await put(engine, 1, BIG)
    engine = directory.open()
    assert engine.stat().put_count == 0
    assert len(directory.segments()) == 1
    await put(engine, 2, BIG)
    directory.flush()
    assert len(directory.segments()) == 1
    check(engine, 2, BIG)


async def test_a_segment_is_not_used_again_before_the_end_of_its_put_is_durable(directory):
    engine = directory.open()
    await put(engine, 1, BIG)
    directory.flush()
    engine.free([cells(1)])
    await put(engine, 2, BIG)
    assert len(directory.segments()) == 2
    with pytest.raises(PutNotFoundError):
        check(engine, 1, BIG)
    engine = directory.open()  # neither the end of the one nor the other was durable
    await engine.check([put_id(1)])
    check(engine, 1, BIG)
    engine.free([cells(1)])
    used = engine.stat().used_bytes
    directory.flush()
    assert engine.stat().used_bytes < used
    await put(engine, 3, BIG)
    assert len(directory.segments()) == 2


async def test_a_put_is_not_finished_before_it_is_flushed(directory):
    engine = directory.open()
    pending, columns = await begin_shared(engine, 1, BIG)
    await share(pending, columns)
    with pytest.raises(RuntimeError, match="flushed"):
        pending.finish()


async def test_a_retry_may_take_over_while_a_put_is_flushed(directory):
    engine = directory.open()
    first, columns = await begin_shared(engine, 1, BIG)
    await share(first, columns)
    flushing = asyncio.create_task(engine.flush(first))
    await asyncio.sleep(0)
    await put(engine, 1, BIG)
    with pytest.raises(CallCancelledError):
        await flushing
    directory.flush()
    engine = directory.open()
    await engine.check([put_id(1)])
    check(engine, 1, BIG)


async def test_a_compacted_put_comes_back_with_what_was_left(directory):
    engine = directory.open()
    await put(engine, 1, BIG)
    directory.flush()
    engine.free([cells(1, *range(0, 70))])
    engine.free([cells(1, fields=["jagged"])])
    left = {name: BIG[name] for name in ("dense", "object")}
    check(engine, 1, left, range(70, ROWS))
    directory.flush()
    await settled(directory)
    for _ in range(2):
        engine = directory.open()
        await engine.check([put_id(1)])
        check(engine, 1, left, range(70, ROWS))
        with pytest.raises(PutNotFoundError):
            check(engine, 1, left, [3])
        directory.snapshot()


async def test_a_put_may_go_while_it_is_moved(directory):
    engine = directory.open()
    await put(engine, 1, BIG)
    directory.flush()
    engine.free([cells(1, *range(0, 60))])
    assert engine._due
    engine.free([cells(1)])
    await settled(directory)
    assert engine.stat().used_bytes == 0
    engine = directory.open()
    assert engine.stat().put_count == 0


# Damage


def flip(path):
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm", [flip, Path.unlink, lambda path: os.truncate(path, 5000)], ids=["bit", "gone", "short"]
)
async def test_a_damaged_segment_loses_exactly_its_put(directory, harm):
    engine = directory.open()
    for number in range(5):
        await put(engine, number, BIG)
    await put(engine, 5, SMALL)
    directory.flush()
    harm(directory.segments()[3])
    engine = directory.open()
    names = [put_id(number) for number in range(6)]
    await engine.check(names)
    for number in (0, 1, 3, 4):
        check(engine, number, BIG)
    check(engine, 5, SMALL)
    with pytest.raises(DataLossError, match=put_id(2).hex()) as caught:
        read(engine, range(5), runs(["dense"], (2, 0, 1), (4, 0, 1)))
    assert caught.value.metadata["put_ids"] == put_id(2).hex()
    assert engine.stat().damaged_put_count == 1
    kept = reconcile(engine, [cells(number) for number in range(6)])
    assert (kept.missing_put_ids, kept.dropped_count) == ([put_id(2)], 0)
    engine.free([cells(2, 1, 2), cells(2)])
    assert engine.stat().damaged_put_count == 0
    directory.flush()
    await put(engine, 9, BIG)
    check(engine, 9, BIG)
    segments = directory.segments()  # the damaged one is removed in the background
    assert len({path.name for path in segments.values()}) == len(segments)


async def test_the_scrub_finds_damage_that_nobody_read(directory):
    engine = directory.open()
    for number in range(4):
        await put(engine, number, BIG)
    directory.flush()
    flip(directory.segments()[2])
    engine = directory.open()
    assert engine.stat().damaged_put_count == 0
    await engine.scrub()
    assert list(engine.damaged) == [put_id(1)]


async def test_a_number_that_a_put_refers_to_is_not_given_out_again(directory):
    engine = directory.open()
    for number in range(3):
        await put(engine, number, BIG)
    directory.flush()
    directory.segments()[3].unlink()
    engine = directory.open()
    await put(engine, 7, BIG)
    assert max(directory.segments()) == 4


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=needs_memfd)])
async def test_no_segment_is_mapped(directory, shared):
    engine = directory.open()
    await put(engine, 1, BIG, shared=shared)
    engine.free([cells(1, 3)])
    check(engine, 1, BIG, [5])
    directory.flush()
    engine = directory.open()
    await engine.check([put_id(1)])
    check(engine, 1, BIG, [5])
    engine.free([cells(1, *range(60))])
    await settled(directory)
    check(engine, 1, BIG, [70])
    mapped = [each.path for each in psutil.Process().memory_maps(grouped=False)]
    assert not [path for path in mapped if path.startswith(str(directory.path))]


async def received(engine, number, field):
    """Read a field of a put as the service does."""
    with await engine.open_long_read([runs([field], (0, 0, ROWS))], [put_id(number)]) as reading:
        return b"".join([bytes(chunk) async for part in reading.parts() for chunk in part])


@pytest.mark.parametrize("is_recovered", [False, True])
async def test_a_segment_that_is_cut_short_is_an_error_of_its_reads(directory, is_recovered):
    engine = directory.open()
    for number in (1, 2):
        await put(engine, number, BIG)
    directory.flush()
    if is_recovered:
        engine = directory.open()
        await engine.check([put_id(1), put_id(2)])
    os.truncate(directory.segments()[1], 5000)
    with pytest.raises(DataLossError, match=r"its bytes cannot be read: .*the file ends at byte 5000"):
        await received(engine, 1, "dense")
    assert list(engine.damaged) == [put_id(1)]
    with pytest.raises(DataLossError, match=put_id(1).hex()):
        await received(engine, 1, "object")
    assert await received(engine, 2, "dense") == BIG["dense"].tobytes()
    engine.free([cells(1)])
    directory.flush()
    await put(engine, 3, BIG)
    assert await received(engine, 3, "dense") == BIG["dense"].tobytes()


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
async def test_a_read_that_fails_is_data_loss_or_is_tried_again(directory, monkeypatch, code):
    engine = directory.open()
    await put(engine, 1, BIG)

    def fail(fd, target, start):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(segments, "read_into", fail)
        expected = DataLossError if code == errno.EIO else UnavailableError
        with pytest.raises(expected, match=os.strerror(code)):
            await received(engine, 1, "dense")
    if code == errno.EMFILE:
        assert await received(engine, 1, "dense") == BIG["dense"].tobytes()
    assert len(engine.damaged) == (code == errno.EIO)


async def test_a_put_whose_bytes_cannot_be_read_is_not_compacted(directory):
    engine = directory.open()
    await put(engine, 1, BIG)
    directory.flush()
    os.truncate(directory.segments()[1], 5000)
    engine.free([cells(1, *range(60))])
    await settled(directory)
    assert list(engine.damaged) == [put_id(1)]
    engine.free([cells(1)])
    directory.flush()
    assert engine.stat().used_bytes == 0


@pytest.mark.parametrize(("code", "reason"), [(errno.EIO, "DISK_FAILED"), (errno.ENOSPC, "DISK_FULL")])
async def test_a_write_that_fails_is_an_error_of_that_put(directory, monkeypatch, code, reason):
    engine = directory.open()

    def fail(fd, data, start):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "pwrite", fail)
        with pytest.raises(TqError, match=os.strerror(code), check=lambda error: error.reason == reason):
            await put(engine, 1, BIG)
    await put(engine, 2, BIG)
    assert await received(engine, 2, "dense") == BIG["dense"].tobytes()


async def test_cells_of_a_put_that_was_not_looked_at_are_freed_once_it_was(directory):
    engine = directory.open()
    for number in range(3):
        await put(engine, number, BIG)
    directory.flush()
    engine = directory.open()
    used = engine.stat().used_bytes
    reads = []
    checksum = segments.Segment.checksum

    def noted(segment, size):
        reads.append((segment.number, threading.get_ident()))
        return checksum(segment, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments.Segment, "checksum", noted)
        engine.free([cells(2, *range(60))])
        assert reads == []
        scrubbing = asyncio.create_task(engine.scrub())
        await eventually(lambda: put_id(2) not in engine._when_fetched)
        assert reads[0][0] == 3
        assert reads[0][1] != threading.get_ident()
        await settled(directory)
        assert engine.stat().used_bytes < used
        await scrubbing
    with pytest.raises(PutNotFoundError):
        check(engine, 2, BIG, [3])
    check(engine, 2, BIG, range(60, ROWS))


# Disk full


async def test_a_full_disk_refuses_one_put_and_nothing_else(directory, monkeypatch):
    engine = directory.open()
    await put(engine, 1, BIG)

    def full(fd, start, size):
        os.pwrite(fd, b"x", 0)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "posix_fallocate", full)
        with pytest.raises(DiskFullError, match="could not store") as caught:
            await put(engine, 2, BIG)
        assert caught.value.retry_after_seconds
        await put(engine, 3, SMALL)
        check(engine, 1, BIG)
        engine.free([cells(1)])
        directory.flush()
        await put(engine, 4, BIG)  # into the segment that was freed
    assert len(directory.segments()) == 1
    await put(engine, 2, BIG)
    assert sorted(directory.engine.puts) == [put_id(number) for number in (2, 3, 4)]
    engine.free([cells(number) for number in (2, 3, 4)])
    directory.flush()
    assert engine.stat().used_bytes == 0


async def test_space_is_left_for_clears(directory, monkeypatch):
    directory.min_free_bytes = 1 << 60
    engine = directory.open()
    for data in (BIG, SMALL):
        with pytest.raises(DiskFullError):
            await put(engine, 1, data)
    assert engine.stat().used_bytes == 0
    assert directory.segments() == {}


async def test_segments_that_wait_for_reuse_free_space(directory, monkeypatch):
    engine = directory.open()
    await put(engine, 1, BIG)
    engine.free([cells(1)])
    directory.flush()
    real, calls = os.posix_fallocate, []

    def full_at_first(fd, start, size):
        calls.append(size)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, start, size)

    monkeypatch.setattr(segments.os, "posix_fallocate", full_at_first)
    await put(engine, 2, {"dense": np.arange(400_000)})
    assert len(calls) == 2
    assert list(directory.segments()) == [3]


async def test_a_put_that_is_given_up_while_its_file_is_made_leaves_nothing(directory, monkeypatch):
    engine = directory.open()
    real = os.posix_fallocate
    begun, may_end = threading.Event(), threading.Event()

    def slow(fd, start, size):
        begun.set()
        assert may_end.wait(60)
        real(fd, start, size)

    monkeypatch.setattr(segments.os, "posix_fallocate", slow)
    making = asyncio.create_task(begin(engine, 1, BIG))
    await eventually(begun.is_set)
    making.cancel()
    asyncio.get_running_loop().call_soon(may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await making
    assert engine.stat().used_bytes == 0
    await eventually(lambda: engine.stat().pooled_bytes)
    await put(engine, 2, BIG)
    assert len(directory.segments()) == 1


# Bounds


async def test_disk_files_and_mappings_stay_flat(directory):
    engine = directory.open()
    process = psutil.Process()

    async def cycle(number, size):
        await put(engine, number, {"dense": np.zeros((1, 100_000 + size), np.uint8)})
        engine.free([cells(number)])
        if len(directory.records) > 500:
            directory.snapshot()
        else:
            directory.flush()

    async def cycles(start):
        for number in range(start, start + 1000):
            await cycle(number, number // 50 % 7 * 20_000)

    def held():
        """Return the open files and the files of the directory, of which none is mapped: other tests have theirs."""
        gc.collect()
        below = f"{directory.path}/"
        open_count = sum(target.startswith(below) for _, target, _ in open_files())
        assert not any(each.path.startswith(below) for each in process.memory_maps(grouped=False))
        return open_count, len(directory.segments())

    await cycles(0)
    before = held()
    assert before[1] > 0
    await cycles(1000)
    after = held()
    assert all(late <= early + 8 for late, early in zip(after, before, strict=True)), (before, after)
    assert len(directory.segments()) <= 4


async def test_segments_that_are_not_needed_any_more_are_removed(tmp_path):
    now = [0.0]
    directory = Directory(tmp_path, clock=lambda: now[0])
    engine = directory.open()
    for number in range(8):
        await put(engine, number, BIG)
    engine.free([cells(number) for number in range(8)])
    directory.flush()
    assert len(directory.segments()) == 8
    engine = directory.open()
    assert engine.stat().pooled_bytes
    for _ in range(20):
        now[0] += 60
        engine.trim()
    await eventually(lambda: not directory.segments())
    assert engine.stat().pooled_bytes == 0


# Who knows what


async def test_recovered_puts_wait_for_what_the_controller_knows(tmp_path):
    now = [0.0]
    directory = Directory(tmp_path, clock=lambda: now[0], put_ttl_seconds=10)
    engine = directory.open()
    for number in range(4):
        await put(engine, number, BIG)
    directory.flush()
    engine = directory.open()
    now[0] += 1000
    assert expire(engine) == 0
    await put(engine, 4, SMALL)
    await put(engine, 5, SMALL, confirm=False)
    kept = reconcile(engine, [cells(0), cells(1, 0, 1, 2), cells(1, fields=["dense"]), cells(8)])
    assert (kept.missing_put_ids, kept.dropped_count) == ([put_id(8)], 1)  # 4 was confirmed, but is not known
    await engine.check([put_id(0), put_id(1)])
    check(engine, 0, BIG)
    check(engine, 1, BIG, range(3))
    check(engine, 1, {"dense": BIG["dense"]})
    with pytest.raises(PutNotFoundError):
        check(engine, 1, {"object": BIG["object"]}, [3])
    assert engine.stat().uncommitted_put_count == 3
    with pytest.raises(DataLossError, match="the put does not exist"):
        read(engine, [8], runs(["dense"], (0, 0, 1)))
    now[0] += 11
    assert expire(engine) == 3
    assert engine.stat().put_count == 2
    assert reconcile(engine, [cells(0)]).dropped_count == 1
    engine.free([cells(8)])
    assert engine.stat().damaged_put_count == 0


async def test_a_put_for_existing_rows_is_one_after_a_restart_too(directory):
    engine = directory.open()
    for number in (1, 2):
        pending, chunks = await begin(engine, number, SMALL, existing=number == 1)
        await pending.write(b"".join(chunks))
        await engine.flush(pending)
        pending.finish()
    directory.flush()
    engine = directory.open()
    assert [engine.puts[put_id(number)].for_existing_rows for number in (1, 2)] == [True, False]


async def test_a_confirm_that_comes_before_is_not_forgotten(directory):
    engine = directory.open()
    await put(engine, 1, BIG, confirm=False)
    directory.flush()
    engine = directory.open()
    engine.confirm(put_id(1))
    assert engine.stat().uncommitted_put_count == 0
    assert reconcile(engine, []).dropped_count == 1


async def test_of_two_puts_that_name_one_segment_the_later_one_has_it(directory):
    """As where a part of the journal is lost, and with it the end of the first put."""
    engine = directory.open()
    await put(engine, 1, BIG)
    directory.flush()
    first = list(directory.records)
    engine.free([cells(1)])
    directory.flush()
    await put(engine, 2, {name: values[::-1] for name, values in BIG.items()})
    directory.flush()
    assert len(directory.segments()) == 1
    directory.records = [*first, directory.records[-1]]
    directory.durable_count = 2
    engine = directory.open()
    await engine.check([put_id(1), put_id(2)])
    assert list(engine.damaged) == [put_id(1)]
    check(engine, 2, {name: values[::-1] for name, values in BIG.items()})
    directory.snapshot()  # nor is that forgotten by the next start
    engine = directory.open()
    await engine.check([put_id(1), put_id(2)])
    assert list(engine.damaged) == [put_id(1)]
