"""A storage service that came back is told which puts are known: in pieces, while other calls go on."""

import asyncio
import contextlib
import itertools
import os

import numpy as np
import pytest
from split_driver import split_service

from tq_service.errors import CallCancelledError, InvalidArgumentError, PutNotFoundError
from tq_service.internal.v1 import storage_control_pb2
from tq_service.machine.samples import SamplesCleared
from tq_service.schema import FieldSpec
from tq_service.server.puts import KnownPuts
from tq_service.state.cells import CellSet, CellsSnapshot, ColumnWrite, Put, PutTable
from tq_service.state.extents import ExtentTable
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put import PutCells
from tq_service.wire.encoding import encode_columns
from tq_service.wire.metadata import CellRuns

BOOT = b"b" * 16


@pytest.fixture
async def split(monkeypatch):
    monkeypatch.setattr("tq_service.server.puts._MOST_PUTS", 3)
    async with split_service(monkeypatch) as service:
        yield service


async def commit_many(split, count):
    """Commit puts, and one more of which a sample is cleared."""
    for _ in range(count):
        await split.commit(await split.store())
    await split.commit(await split.store(partition_id="q", rows=3))
    indexes = [1]
    split.catalog.commit(SamplesCleared(partition_id="q", global_indexes=np.array(indexes)))


def snapshot_of(puts):
    """Return what a partition knows that has these puts whole."""
    table = PutTable()
    for put in puts:
        table.add(put, 1, [ColumnWrite(spec=FieldSpec("x"), value_bytes=8)])
    return CellsSnapshot(puts=table.snapshot(), cells={}, extents=ExtentTable().snapshot())


def test_what_is_said_of_very_many_puts_takes_many_small_messages_made_one_by_one():
    """A million puts: a message of all of them was 20 MB, made in one step; 12 times as many were refused."""
    puts = [Put("s" if number % 4 else "other", BOOT, number.to_bytes(16, "big")) for number in range(200_000)]
    pieces = KnownPuts(
        storage_id="s", boot_id=BOOT, cells=[snapshot_of(puts)], uncommitted=[Put("s", BOOT, b"u" * 16)]
    ).pieces()
    listed = 0
    for piece in pieces:
        assert piece.ByteSize() <= 64 * 1024
        listed += len(piece.cells)
    assert piece.is_last
    assert listed == 150_000


def test_a_put_of_which_very_many_rows_are_left_here_and_there_takes_many_messages():
    rows = np.arange(0, 200_000, 2)

    class Scattered(KnownPuts):
        def parts(self):
            yield PutCells(put_id=b"p" * 16, field_names=("x",), rows=rows)
            yield PutCells(put_id=b"p" * 16, field_names=("y",))

    pieces = list(Scattered(storage_id="s", boot_id=BOOT).pieces())
    assert max(piece.ByteSize() for piece in pieces) <= 64 * 1024
    first_rows = [row for piece in pieces for cells in piece.cells for row in cells.first_rows]
    assert first_rows == rows.tolist()
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_put_of_which_cells_are_about_to_be_freed_stays_as_it_is():
    kept, whole, part, elsewhere = (Put("s", BOOT, bytes([number]) * 16) for number in range(4))
    elsewhere = elsewhere._replace(storage_id="other")
    leaving = [whole, CellSet(put=part, field_names=("x",), rows=np.array([3])), elsewhere]
    known = KnownPuts(storage_id="s", boot_id=BOOT, cells=[snapshot_of([kept, part])], leaving=leaving)
    assert known.staying() == {whole.put_id, part.put_id}
    assert [cells.put_id for cells in known.parts()] == [kept.put_id]
    listed = [put_id for piece in known.pieces() for put_id in piece.staying_put_ids]
    assert set(listed) == known.staying()


async def test_other_calls_have_their_turn_between_the_pieces(split):
    await commit_many(split, 60)
    heartbeats = []
    kept = split.storage.ReconcilePuts

    async def counted(parts, context):
        async def counting():
            async for part in parts:
                heartbeats.append(split.to_controller.calls.count("RegisterStorage"))
                yield part

        return await kept(counting(), context)

    split.storage.ReconcilePuts = counted
    answer = await split.reconciled()
    assert (answer.missing_count, answer.dropped_count) == (0, 0)
    assert all(len(part.cells) <= 3 for part in split.link.streams[-1].written)
    assert len(heartbeats) > 20
    assert len(set(heartbeats)) > 10
    assert split.lost_puts() == []


async def test_puts_that_come_and_go_between_the_pieces_are_neither_lost_nor_missing(split):
    await commit_many(split, 30)
    count = len(split.link.streams)
    stray = await split.store()
    split.engine.confirm(stray.placement.put_id)
    split.begin_reconciling()
    await split.until(lambda: len(split.link.streams) > count and len(split.link.streams[-1].written) > 3)
    await split.commit(await split.store(partition_id="new"))
    split.catalog.commit(SamplesCleared(partition_id="p", global_indexes=np.arange(20)))
    await split.clear("q")
    answer = await split.link.streams[-1]
    assert (answer.missing_count, answer.dropped_count) == (0, 1)
    assert await split.settled() == 21
    assert split.lost_puts() == []


async def test_a_stream_that_breaks_off_drops_nothing(split):
    await commit_many(split, 10)
    before = split.engine.stat().put_count
    for parts in (
        [],
        [storage_control_pb2.ReconcilePutsRequest(boot_id=split.engine.boot_id, key_id=b"k" * 8)],
        [storage_control_pb2.ReconcilePutsRequest(boot_id=BOOT)],
    ):

        async def broken(parts=parts):
            for part in parts:
                yield part

        with pytest.raises(Exception, match=r"last message|restarted"):
            await split.storage.ReconcilePuts(broken(), Context())
    assert split.engine.stat().put_count == before
    split.link.add("ReconcilePuts", lose_answer=True)
    split.link.add("ReconcilePuts", lose_request=True)
    assert (await split.reconciled()).dropped_count == 0
    assert split.lost_puts() == []


class Context:
    async def send_initial_metadata(self, _):
        pass


# The engine's part


async def engine_of(count, confirm=True):
    engine = StorageEngine(max_bytes=None)
    columns = encode_columns({"x": np.arange(4)})
    for number in range(count):
        put_id = number.to_bytes(16, "big")
        pending = await engine.reserve(put_id, columns, partition_id="p", for_existing_rows=False, deadline=None)
        await pending.write(np.arange(4).tobytes())
        pending.finish()
        if confirm:
            engine.confirm(put_id)
    return engine


def ids(*numbers):
    return [number.to_bytes(16, "big") for number in numbers]


def whole(*numbers):
    return [PutCells(put_id=put_id) for put_id in ids(*numbers)]


async def test_what_is_unknown_is_dropped_in_slices():
    engine = await engine_of(5000)
    state = engine.begin_reconciliation()
    engine.reconcile(state, cells=whole(*range(0, 5000, 5)))
    left = [5000]
    for _ in engine.finish_reconciliation(state):
        left.append(engine.stat().put_count)
        engine.free([PutCells(put_id=os.urandom(16))])
    assert engine.stat().put_count == 1000
    assert max(before - after for before, after in itertools.pairwise(left)) <= 1024
    assert len(left) > 4
    assert state.dropped_count == 4000


async def test_what_is_confirmed_after_the_begin_stays_and_what_waits_goes_on_waiting():
    engine = await engine_of(6, confirm=False)
    for put_id in ids(0, 1, 2):
        engine.confirm(put_id)
    state = engine.begin_reconciliation()
    engine.confirm(ids(3)[0])
    engine.reconcile(state, cells=whole(0), staying=ids(1, 9))
    engine.confirm(ids(4)[0])
    for _ in engine.finish_reconciliation(state):
        pass
    assert [number for number in range(6) if engine.partition_of(ids(number)[0])] == [0, 1, 3, 4, 5]
    assert engine.stat().uncommitted_put_count == 1
    assert state.missing_count == 0


async def test_a_put_that_was_freed_meanwhile_is_not_missing():
    engine = await engine_of(3)
    state = engine.begin_reconciliation()
    engine.free([PutCells(put_id=ids(1)[0])])
    engine.reconcile(
        state,
        cells=[*whole(0, 1, 7), PutCells(put_id=ids(2)[0], rows=np.array([1]))],
    )
    for _ in engine.finish_reconciliation(state):
        pass
    kept = state
    assert (kept.missing_put_ids, kept.missing_count, kept.dropped_count) == (ids(7), 1, 0)
    assert not engine.confirm(ids(1)[0])


async def test_of_two_that_say_what_is_known_the_later_one_counts():
    engine = await engine_of(3)
    old = engine.begin_reconciliation()
    engine.reconcile(old, cells=whole(0))
    new = engine.begin_reconciliation()
    with pytest.raises(CallCancelledError):
        engine.reconcile(old, cells=whole(1))
    with pytest.raises(CallCancelledError):
        next(engine.finish_reconciliation(old), None)
    engine.end_reconciliation(old)
    engine.reconcile(new, cells=whole(0, 1, 2))
    for _ in engine.finish_reconciliation(new):
        pass
    assert engine.stat().put_count == 3


async def test_cells_of_a_put_that_come_apart_are_refused():
    engine = await engine_of(2)
    state = engine.begin_reconciliation()
    first, second = (PutCells(put_id=put_id, rows=np.array([0, 1])) for put_id in ids(0, 1))
    engine.reconcile(state, cells=[first])
    engine.reconcile(state, cells=[second])
    with pytest.raises(InvalidArgumentError, match="together"):
        engine.reconcile(state, cells=[first])


async def test_cells_of_a_put_may_come_in_several_pieces():
    engine = await engine_of(1)
    state = engine.begin_reconciliation()
    for row in (0, 3):
        cells = PutCells(put_id=ids(0)[0], rows=np.array([row]))
        engine.reconcile(state, cells=[cells])
        await asyncio.sleep(0)
    for _ in engine.finish_reconciliation(state):
        pass
    there = []
    for row in range(4):
        run = CellRuns(
            field_names=("x",), put_indexes=np.array([0]), first_rows=np.array([row]), row_counts=np.array([1])
        )
        with contextlib.suppress(PutNotFoundError), engine.open_read([run], ids(0)):
            there.append(row)
    assert there == [0, 3]
