"""Puts that leave memory for the mirror, and come back: the quota is about all of them."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from engine_driver import begin, cells, put_id, read, receive, runs
from mirror_driver import Nodes, put, turns_until

from tq_service.config import ServeSettings
from tq_service.errors import InvalidArgumentError, QuotaExceededError
from tq_service.server.app import _open_mirroring
from tq_service.server.supervisor import Supervisor
from tq_service.storage.engine import StorageEngine
from tq_service.v1.storage_service_pb2 import RowSlice
from tq_service.wire import shared_memory

ROWS, PUT_BYTES = 4, 4 << 14


def rows(number):
    return {"x": np.full((ROWS, PUT_BYTES // ROWS // 8), number)}


def value(engine, number):
    back = read(engine, [number], runs(["x"], (0, 0, ROWS)))["x"]
    assert np.array_equal(back, rows(number)["x"])
    return True


@pytest.fixture
def clock():
    return SimpleNamespace(now=1000.0)


@pytest.fixture
async def nodes(clock):
    """An engine with memory for four puts and a quota for twelve."""
    nodes = Nodes(memory_bytes=4 * PUT_BYTES, max_bytes=12 * PUT_BYTES, reserve_share=0.0, clock=lambda: clock.now)
    await nodes.start()
    yield nodes
    await nodes.kill()


def in_memory(nodes, count):
    return [number for number in range(count) if not nodes.mirror.is_unfetched(put_id(number))]


@pytest.mark.parametrize("shared", [False, True])
async def test_what_was_put_first_leaves_memory_and_comes_back_when_it_is_read(nodes, clock, shared):
    if shared and not shared_memory.is_supported():
        pytest.skip("this system shares no memory")
    engine = nodes.engine
    for number in range(10):
        await put(engine, number, rows(number), shared=shared)
    stat = engine.stat()
    kept = in_memory(nodes, 10)
    assert kept == list(range(10 - len(kept), 10))
    assert 1 <= len(kept) <= 4
    assert stat.mirror.spilled_bytes == (10 - len(kept)) * PUT_BYTES
    assert (stat.used_bytes, stat.put_count) == (10 * PUT_BYTES, 10)  # all of it counts
    for number in range(10):
        await engine.check([put_id(number)])
        assert value(engine, number)
        clock.now += 11
        engine.trim()
    assert engine.stat().used_bytes == 10 * PUT_BYTES
    assert len(in_memory(nodes, 10)) <= 4
    assert 9 in in_memory(nodes, 10)  # that which was read last


async def test_the_quota_is_of_all_puts_and_a_put_beyond_it_waits(nodes, clock):
    for number in range(12):
        await put(nodes.engine, number, rows(number))
    with pytest.raises(QuotaExceededError):
        await begin(nodes.engine, 12, rows(12), deadline=clock.now)
    nodes.engine.free([cells(0)])  # which is in the mirror alone
    await put(nodes.engine, 12, rows(12))
    assert nodes.engine.stat().used_bytes == 12 * PUT_BYTES


async def test_all_parts_of_a_read_are_there_at_once_though_they_are_more_than_the_memory(nodes, clock):
    engine = nodes.engine
    for number in range(10):
        await put(engine, number, rows(number))
    await engine.check([put_id(number) for number in range(10)])
    engine.trim()
    back = read(engine, range(10), runs(["x"], *((number, 0, ROWS) for number in range(10))))["x"]
    assert np.array_equal(back, np.concatenate([rows(number)["x"] for number in range(10)]))
    clock.now += 11
    engine.trim()
    assert len(in_memory(nodes, 10)) <= 4


async def test_parts_of_rows_are_read_of_puts_that_were_fetched_from_the_mirror(nodes, clock):
    engine = nodes.engine
    for number in range(10):
        await put(engine, number, {"x": np.arange(PUT_BYTES // 8).reshape(ROWS, -1) + number})
    assert 0 not in in_memory(nodes, 10)
    await engine.check([put_id(0), put_id(9)])
    part = RowSlice(field_names=["x"], starts=[1, -2], stops=[3, 2**63 - 1])
    before = engine.stat().read_bytes
    with engine.open_read([runs(["x"], (0, 1, 1), (1, 3, 1))], [put_id(0), put_id(9)], [part]) as reading:
        width = PUT_BYTES // ROWS // 8
        expected = [
            [row * width + at + number for at in (1, 2, width - 2, width - 1)] for number, row in ((0, 1), (9, 3))
        ]
        assert receive(reading)["x"].tolist() == expected
    assert engine.stat().read_bytes - before == 2 * 4 * 8


async def test_puts_that_are_not_committed_or_have_too_few_copies_stay(nodes):
    engine = nodes.engine
    for number in range(6):
        await put(engine, number, rows(number), confirm=False)
    assert in_memory(nodes, 6) == list(range(6))
    engine.confirm(put_id(2))
    assert in_memory(nodes, 6) == [0, 1, 3, 4, 5]
    few = Nodes(memory_bytes=1, copies=2, node_count=1)
    await few.start()
    await put(few.engine, 0, rows(0))
    few.engine.trim()
    assert few.engine.stat().mirror.short_put_count == 1
    assert in_memory(few, 1) == [0]
    await few.kill()


async def test_freed_cells_of_a_spilled_put_go_once_it_is_fetched_in_the_background(nodes):
    engine = nodes.engine
    for number in range(10):
        await put(engine, number, rows(number))
    assert nodes.mirror.is_unfetched(put_id(0))
    engine.free([cells(0, 1, 2)])
    await turns_until(lambda: not nodes.mirror.is_unfetched(put_id(0)))
    back = read(engine, [0], runs(["x"], (0, 0, 1), (0, 3, 1)))["x"]
    assert np.array_equal(back, rows(0)["x"][:2])
    engine.free([cells(1, *range(ROWS))])  # row by row, so that nothing of it is left
    await turns_until(lambda: engine.stat().put_count == 9)
    engine.free([cells(number) for number in range(10)])
    await turns_until(lambda: not engine.stat().used_bytes)
    assert engine.stat().mirror.spilled_bytes == 0
    await nodes.removed()
    assert nodes.put_objects() == []


async def test_a_put_that_is_spilled_while_the_rest_of_its_object_is_fetched_is_fetched_too():
    nodes = Nodes(memory_bytes=1)
    engine = await nodes.start()
    await asyncio.gather(*(put(engine, number, {"x": np.full((4, 8), number)}, confirm=False) for number in (0, 1)))
    assert len(nodes.put_objects()) == 1
    engine.confirm(put_id(1))
    assert in_memory(nodes, 2) == [0]
    checks, wake = [], nodes.mirror._wake

    def spill_what_was_passed(stored, record, data):
        wake(stored, record, data)
        if not checks:  # the first of the object, which is in memory
            engine.confirm(put_id(0))
            checks.append(asyncio.create_task(engine.check([put_id(0)])))

    nodes.mirror._wake = spill_what_was_passed
    await engine.check([put_id(1)])
    await asyncio.gather(*checks)
    assert len(checks) == 1
    for number in (0, 1):
        assert read(engine, [number], runs(["x"], (0, 0, 4)))["x"][0, 0] == number
    await nodes.kill()


async def test_a_put_that_is_being_read_has_its_memory_until_the_end(nodes, clock):
    engine = nodes.engine
    await put(engine, 0, rows(0))
    with engine.open_read([runs(["x"], (0, 0, ROWS))], [put_id(0)]) as reading:
        clock.now += 11
        for number in range(1, 6):
            await put(engine, number, rows(number))
        assert nodes.mirror.is_unfetched(put_id(0))
        assert b"".join(bytes(part) for part in reading.chunks())[-8:] == bytes(8)
    assert engine.stat().used_bytes == 6 * PUT_BYTES


async def test_what_a_successor_took_over_leaves_memory_again_beyond_its_quota(clock):
    """Also where its own puts never leave it: those have no other place that is sure."""
    lost = Nodes(max_bytes=8 * PUT_BYTES, reserve_share=0.0, clock=lambda: clock.now)
    await lost.start()
    for number in range(6):
        await put(lost.engine, number, rows(number))
    await lost.listed()
    await lost.kill()
    own = StorageEngine(max_bytes=8 * PUT_BYTES, reserve_share=0.0, clock=lambda: clock.now)
    for number in range(10, 16):
        await put(own, number, rows(number))
    lost.settings = {"max_bytes": None, "quota_of": own, "clock": lambda: clock.now}
    successor = await lost.take_over()
    for number in range(6):
        await successor.check([put_id(number)])
        assert value(successor, number)
        successor.confirm(put_id(number))
    assert own.stat().used_bytes == 12 * PUT_BYTES
    assert len(in_memory(lost, 6)) == 6  # they were read just now
    clock.now += 11
    successor.trim()
    assert len(in_memory(lost, 6)) <= 2
    assert own.stat().used_bytes == 12 * PUT_BYTES
    assert successor.stat().mirror.spilled_bytes >= 4 * PUT_BYTES
    for number in range(6):
        await successor.check([put_id(number)])
        assert value(successor, number)
    for number in range(10, 16):
        assert value(own, number)
    successor.free([cells(number) for number in range(6)])
    await turns_until(lambda: own.stat().used_bytes == 6 * PUT_BYTES)
    await lost.kill()


async def test_a_successor_fetches_no_more_than_there_is_memory_for(nodes):
    for number in range(10):
        await put(nodes.engine, number, rows(number))
    await nodes.listed()
    await nodes.kill()
    successor = await nodes.take_over()
    scrubbing = asyncio.create_task(successor.scrub())
    await turns_until(lambda: successor.stat().used_bytes >= 4 * PUT_BYTES)
    for _ in range(200):
        await asyncio.sleep(0)
    assert successor.stat().used_bytes <= 5 * PUT_BYTES
    for number in range(10):
        await successor.check([put_id(number)])
        assert value(successor, number)
    scrubbing.cancel()
    await asyncio.gather(scrubbing, return_exceptions=True)


@pytest.mark.parametrize("url", ["file:///tmp", "valkey://localhost:1"])
def test_engines_that_keep_objects_in_memory_are_refused(url):
    if url.startswith("valkey"):
        pytest.importorskip("redis")
    settings = ServeSettings(role="storage", controller="localhost:1", mirror=url, mirror_memory_bytes=1 << 20)
    with pytest.raises(InvalidArgumentError, match=r"mirror_memory_bytes requires an object store .* survives=power"):
        _open_mirroring(settings, 1, Supervisor())


def test_more_memory_than_quota_is_refused():
    with pytest.raises(ValueError, match="mirror_memory_bytes is 2097152, but max_bytes is 1048576"):
        ServeSettings(
            role="storage", controller="localhost:1", mirror="file:///tmp?survives=power", max_bytes=1 << 20,
            mirror_memory_bytes=2 << 20,
        )  # fmt: skip


async def test_cells_freed_of_what_was_taken_over_do_not_bring_it_into_memory_before_there_is_some(nodes):
    for number in range(10):
        await put(nodes.engine, number, rows(number))
    await nodes.listed()
    await nodes.kill()
    successor = await nodes.take_over()
    successor.free([cells(number, 1, 2) for number in range(10)])
    scrubbing = asyncio.create_task(successor.scrub())
    await turns_until(lambda: successor.stat().used_bytes >= 2 * PUT_BYTES)
    for _ in range(300):
        await asyncio.sleep(0)
    assert successor.stat().used_bytes <= 5 * PUT_BYTES
    await successor.check([put_id(9)])
    assert np.array_equal(read(successor, [9], runs(["x"], (0, 0, 1), (0, 3, 1)))["x"], rows(9)["x"][:2])
    scrubbing.cancel()
    await asyncio.gather(scrubbing, return_exceptions=True)
