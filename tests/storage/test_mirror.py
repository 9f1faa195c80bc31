"""A mirror that is slow, full, short of copies or damaged, and what of it is removed."""

import asyncio
import time

import numpy as np
import pytest
from engine_driver import cells, put_id, read, reconcile, runs
from mirror_driver import Nodes, put, turns_until

from tq_service.config import ServeSettings
from tq_service.errors import DataLossError, QuotaExceededError, UnavailableError

LARGE = {"x": np.arange(1 << 16).reshape(4, -1)}


def small(number):
    return {"x": np.full((4, 8), number)}


async def test_a_put_without_its_copies_ends_at_its_deadline_and_reads_go_on():
    nodes = Nodes()
    engine = await nodes.start()
    await put(engine, 1, small(1))
    nodes.pool.refusal = UnavailableError("the engine is away")
    with pytest.raises(QuotaExceededError, match="the engine is away") as caught:
        await put(engine, 2, LARGE, deadline=time.monotonic() + 0.01)
    assert caught.value.retry_after_seconds == 1.0
    assert caught.value.metadata == {"limit_name": "mirror_required", "got": "0", "limit": "1"}
    assert read(engine, [1], runs(["x"], (0, 0, 4)))["x"][0, 0] == 1
    stat = engine.stat()
    assert (stat.put_count, stat.mirror.is_reachable) == (1, False)
    nodes.pool.refusal = None
    await put(engine, 2, LARGE)
    await turns_until(lambda: not engine.stat().mirror.unmirrored_bytes)
    assert engine.stat().mirror.is_reachable
    await nodes.kill()


async def test_puts_that_come_while_a_list_is_written_go_on_once_it_is():
    """They ask for another list meanwhile, which is not due once they may be numbered."""
    nodes = Nodes()
    engine = await nodes.start()
    written, write = asyncio.Event(), nodes.writer.objects.put

    async def write_later(name, parts, *, copies):
        await written.wait()
        return await write(name, parts, copies=copies)

    nodes.writer.objects.put = write_later
    putting = [asyncio.create_task(put(engine, number, LARGE)) for number in (1, 2)]
    await turns_until(nodes.writer._list_due.is_set)
    written.set()
    await asyncio.gather(*putting)
    assert engine.stat().put_count == 2
    assert not nodes._running.done()  # it would be, had it gone in a circle until the time of the test was over
    await nodes.kill()


async def test_a_full_engine_makes_puts_wait_until_objects_are_removed():
    nodes = Nodes(node_count=1)
    engine = await nodes.start()
    await put(engine, 1, LARGE)
    nodes.pool.nodes.update(dict.fromkeys(nodes.pool.nodes, nodes.pool.used_bytes("node-0")))
    putting = asyncio.create_task(put(engine, 2, LARGE))
    await turns_until(lambda: engine.stat().mirror.is_reachable is False)
    assert not putting.done()
    engine.free([cells(1)])
    await putting
    assert engine.stat().put_count == 1
    await nodes.kill()


@pytest.mark.parametrize(("required", "is_refused"), [(1, False), (2, True)])
async def test_fewer_copies_than_asked_for_are_counted_and_fewer_than_required_are_refused(required, is_refused):
    nodes = Nodes(copies=2, required=required, node_count=2)
    engine = await nodes.start()
    await put(engine, 1, LARGE)
    nodes.pool.lose_node("node-1")
    if is_refused:
        with pytest.raises(QuotaExceededError, match="1 copies; at least 2 are required") as caught:
            await put(engine, 2, LARGE, deadline=time.monotonic() + 0.01)
        assert "had only 1 of the 2 copies required" in caught.value.message
        assert caught.value.metadata == {"limit_name": "mirror_required", "got": "1", "limit": "2"}
        assert engine.stat().put_count == 1
    else:
        await put(engine, 2, LARGE)
        assert engine.stat().mirror.short_put_count == 1
        engine.free([cells(2)])
        assert engine.stat().mirror.short_put_count == 0
    await nodes.kill()


async def test_with_none_required_a_put_is_complete_at_once_and_mirrored_after():
    nodes = Nodes(required=0)
    engine = await nodes.start()
    nodes.pool.gate = asyncio.Event()
    await put(engine, 1, LARGE)
    assert engine.stat().mirror.unmirrored_bytes == LARGE["x"].nbytes
    nodes.pool.gate.set()
    await turns_until(lambda: not engine.stat().mirror.unmirrored_bytes)
    await nodes.kill()
    successor = await nodes.take_over()
    await successor.check([put_id(1)])
    assert np.array_equal(read(successor, [1], runs(["x"], (0, 0, 4)))["x"], LARGE["x"])
    await nodes.kill()


async def test_small_puts_share_an_object_that_goes_with_the_last_of_them():
    nodes = Nodes()
    engine = await nodes.start()
    await asyncio.gather(*(put(engine, number, small(number)) for number in range(10)))
    assert len(nodes.put_objects()) == 1
    engine.free([cells(number) for number in range(9)])
    await nodes.removed()
    assert len(nodes.put_objects()) == 1
    engine.free([cells(9)])
    await nodes.removed()
    assert nodes.put_objects() == []
    await nodes.kill()


async def test_one_that_may_be_taken_for_lost_removes_nothing():
    nodes = Nodes()
    engine = await nodes.start()
    await put(engine, 1, LARGE)
    nodes.may_remove = False
    engine.free([cells(1)])
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(nodes.put_objects()) == 1
    await nodes.kill()


async def test_what_a_lost_one_puts_that_goes_on_is_found_by_the_next_successor():
    """It was cut off from the controller, taken over, heard of again by another controller, and lost for good then."""
    nodes = Nodes()
    await put(await nodes.start(), 1, small(1))
    first = nodes.successor()
    await put(await first.take_over(), 2, small(2))
    await first.listed()
    await put(nodes.engine, 3, small(3))  # after the list of the generation that is later than its own
    await first.kill()
    await nodes.kill()
    second = nodes.successor()
    successor = await second.take_over()
    await successor.check([put_id(number) for number in (1, 2, 3)])
    for number in (1, 2, 3):
        assert read(successor, [number], runs(["x"], (0, 0, 4)))["x"][0, 0] == number
    await second.kill()


async def test_a_put_that_a_successor_has_dropped_is_not_brought_back_by_an_older_list():
    nodes = Nodes()
    engine = await nodes.start()
    await asyncio.gather(put(engine, 1, small(1)), put(engine, 2, small(2)))  # one object
    await nodes.listed()
    await nodes.kill()
    first = nodes.successor()
    (await first.take_over()).free([cells(1)])
    await first.listed()
    await first.kill()
    left = await nodes.left()
    assert [each.put_ids for each in left.objects] == [{put_id(2)}]


async def test_what_is_damaged_in_the_mirror_is_lost_and_nothing_else():
    nodes = Nodes()
    engine = await nodes.start()
    for number in (1, 2):
        await put(engine, number, LARGE)
    await nodes.kill()
    held = nodes.pool.objects[nodes.put_objects()[0]]
    held.data = held.data[:-1] + bytes([held.data[-1] ^ 1])
    successor = await nodes.take_over()
    kept = reconcile(successor, [cells(1), cells(2)])
    assert kept.missing_count == 0
    await successor.check([put_id(1), put_id(2)])
    with pytest.raises(DataLossError, match="do not match their checksum"):
        read(successor, [1], runs(["x"], (0, 0, 4)))
    assert np.array_equal(read(successor, [2], runs(["x"], (0, 0, 4)))["x"], LARGE["x"])
    await nodes.kill()


async def test_a_read_of_a_put_that_cannot_be_fetched_now_is_to_be_tried_again():
    nodes = Nodes()
    engine = await nodes.start()
    await put(engine, 1, LARGE)
    await nodes.kill()
    successor = await nodes.take_over()
    nodes.pool.refusal = UnavailableError("not now")
    with pytest.raises(UnavailableError, match="not now"):
        await successor.check([put_id(1)])
    nodes.pool.refusal = None
    await successor.check([put_id(1)])
    assert np.array_equal(read(successor, [1], runs(["x"], (0, 0, 4)))["x"], LARGE["x"])
    await nodes.kill()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mirror_copies": 2}, "mirror_copies set, but mirror is not"),
        ({"mirror": "file:///m"}, "mirror is set, but role is"),
        (
            {"mirror": "file:///m", "role": "storage", "controller": "c", "data_dir": "/d"},
            "set only one of them",
        ),
        ({"mirror": "m", "role": "storage", "controller": "c"}, "mirror is not a URL"),
        (
            {"mirror": "file:///m", "role": "storage", "controller": "c", "mirror_required": 2},
            "no put could ever complete",
        ),
    ],
)
def test_settings_of_a_mirror_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ServeSettings(**settings)


async def test_what_the_mirror_has_not_yet_it_gets_before_a_stop_if_there_is_time():
    nodes = Nodes(required=0)
    engine = await nodes.start()
    await put(engine, 1, small(1))
    await turns_until(lambda: not engine.stat().mirror.unmirrored_bytes)
    nodes.pool.gate = asyncio.Event()
    await put(engine, 2, small(2))
    await put(engine, 3, LARGE)
    assert await nodes.mirror.flush_all(0.01) == engine.stat().mirror.unmirrored_bytes > LARGE["x"].nbytes
    asyncio.get_running_loop().call_later(0.01, nodes.pool.gate.set)
    assert await nodes.mirror.flush_all(60.0) == 0
    names = nodes.put_objects()
    assert len(names) == 3
    await nodes.kill()
    await put(engine, 4, small(4))
    await asyncio.sleep(0.05)
    assert nodes.put_objects() == names
