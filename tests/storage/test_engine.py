import asyncio
import gc
import threading
import tracemalloc

import numpy as np
import psutil
import pytest
from engine_driver import (
    PARTITION,
    begin,
    cells,
    compacted,
    expire,
    indexes,
    put,
    put_id,
    read,
    receive,
    reconcile,
    runs,
)

from tq_service.client.reads import decode_columns
from tq_service.errors import (
    CallCancelledError,
    FieldMismatchError,
    FieldNotFoundError,
    InvalidArgumentError,
    PutNotFoundError,
)
from tq_service.schema import CONTROLLER_NAME_BYTES, FieldSpec, Layout
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index import reading as reading_module
from tq_service.storage.index.put import PackedPut, PutCells
from tq_service.storage.index.put_table import Overdue
from tq_service.wire.columns import ColumnReceiver, ColumnShape, iter_frames
from tq_service.wire.encoding import encode_columns

DATA = {
    "dense": np.arange(12, dtype=np.float32).reshape(4, 3),
    "jagged": [np.arange(n) for n in (2, 0, 3, 1)],
    "object": ["a", {"b": 1}, None, "d"],
}
SMALL = {"x": np.zeros(100, np.uint8)}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def engine():
    return StorageEngine(max_bytes=None)


def same(got, expected):
    return all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


async def test_cells_come_back_in_the_order_asked(engine):
    await put(engine, 1, DATA)
    back = read(engine, [1], runs(DATA, (0, 3, 1), (0, 0, 2), (0, 3, 1)))
    order = [3, 0, 1, 3]
    assert back["dense"].tolist() == DATA["dense"][order].tolist()
    assert same(back["jagged"], [DATA["jagged"][row] for row in order])
    assert back["object"] == [DATA["object"][row] for row in order]


async def test_columns_of_several_puts_are_mixed(engine):
    await put(engine, 1, DATA)
    await put(engine, 2, {"extra": np.arange(4), "dense": -DATA["dense"]})
    back = read(engine, [1, 2], runs(["dense"], (1, 2, 1), (0, 0, 1), (1, 0, 2)), runs(["extra"], (1, 0, 4)))
    assert list(back) == ["dense", "extra"]
    assert back["dense"].tolist() == [
        *(-DATA["dense"][2:3]).tolist(),
        *DATA["dense"][:1].tolist(),
        *(-DATA["dense"][:2]).tolist(),
    ]
    assert back["extra"].tolist() == [0, 1, 2, 3]


async def test_jagged_rows_of_puts_with_other_fixed_sizes_are_widened(engine):
    await put(engine, 1, {"x": [np.ones((2, 3)), np.ones((1, 3))]})
    await put(engine, 2, {"x": [np.ones((2, 5))]})
    with engine.open_read([runs(["x"], (0, 0, 1), (1, 0, 1), (0, 1, 1))], [put_id(1), put_id(2)]) as reading:
        assert reading.headers[0].spec.row_shape == (-1, -1)
        assert [row.shape for row in receive(reading)["x"]] == [(2, 3), (2, 5), (1, 3)]


async def test_dense_rows_of_other_shapes_are_of_a_jagged_field(engine):
    await put(engine, 1, {"x": np.zeros((1, 3))})
    await put(engine, 2, {"x": np.zeros((1, 4))})
    with engine.open_read([runs(["x"], (0, 0, 1), (1, 0, 1))], [put_id(1), put_id(2)]) as reading:
        assert reading.headers[0].spec.row_shape == (-1,)
        assert [row.shape for row in receive(reading)["x"]] == [(3,), (4,)]


async def test_puts_that_disagree_about_a_field_are_not_mixed(engine):
    await put(engine, 1, {"x": np.zeros((1, 3))})
    await put(engine, 2, {"x": np.zeros((1, 3, 1))})
    with pytest.raises(FieldMismatchError):
        read(engine, [1, 2], runs(["x"], (0, 0, 1), (1, 0, 1)))


@pytest.mark.parametrize("width", [1, 3, 400])
async def test_scattered_rows_of_two_puts(engine, width):
    one, two = np.random.default_rng(0).integers(0, 256, (2, 500, width)).astype(np.uint8)
    lists = [np.arange(n % 7) for n in range(500)]
    await put(engine, 1, {"pad": np.zeros(500, np.uint8), "x": one, "j": lists})
    await put(engine, 2, {"x": two, "j": lists[::-1]})
    rows = np.random.default_rng(1).permutation(500)
    triples = [(0, int(row), 1) for row in rows[:250]] + [(1, int(row), 1) for row in rows]
    back = read(engine, [1, 2], runs(["x", "j"], *triples))
    assert np.array_equal(back["x"], np.concatenate([one[rows[:250]], two[rows]]))
    assert same(back["j"], [lists[row] for row in rows[:250]] + [lists[499 - row] for row in rows])
    back = read(engine, [1, 2], runs(["x"], *((row % 2, row, 1) for row in range(500))))
    assert np.array_equal(back["x"], np.where(np.arange(500)[:, None] % 2, two, one))


async def test_neighbouring_rows_are_one_chunk(engine):
    await put(engine, 1, {"x": np.zeros((100, 8)), "j": [np.ones(3)] * 100})
    with engine.open_read([runs(["x", "j"], *((0, row, 1) for row in range(10, 60)))], [put_id(1)]) as reading:
        assert [len(chunk) for chunk in reading.chunks()] == [50 * 64, 50 * 24]


async def test_reads_of_what_is_not_there(engine):
    await put(engine, 1, DATA)
    with pytest.raises(PutNotFoundError, match=put_id(9).hex()):
        read(engine, [9], runs(["dense"], (0, 0, 1)))
    with pytest.raises(FieldNotFoundError, match="'jagged'"):
        read(engine, [1], runs(["jaged"], (0, 0, 1)))
    engine.free([cells(1, 2), cells(1, fields=["object"])])
    with pytest.raises(PutNotFoundError, match="rows within 1-3"):
        read(engine, [1], runs(["dense"], (0, 0, 1), (0, 1, 3)))
    with pytest.raises(PutNotFoundError, match="'object'"):
        read(engine, [1], runs(["object"], (0, 0, 1)))


@pytest.mark.parametrize(
    "asked",
    [
        [], [runs(["dense"])], [runs([], (0, 0, 1))], [runs(["dense"], (0, 0, 0))], [runs(["dense"], (0, 0, -1))],
        [runs(["dense"], (0, -1, 1))], [runs(["dense"], (0, 3, 2))], [runs(["dense"], (0, 2**63 - 1, 1))],
        [runs(["dense"], (0, 0, 2**63 - 1))], [runs(["dense"], (1, 0, 1))], [runs(["dense"], (-1, 0, 1))],
        [runs(["dense"], (0, 0, 1)), runs(["jagged"], (0, 0, 2))],
        [runs(["dense"], (0, 0, 1)), runs(["dense"], (0, 1, 1))],
        [runs(["dense"], *[(0, 0, 1 << 24)] * 2)],
    ],
)  # fmt: skip
async def test_wrong_reads_are_refused(engine, asked):
    await put(engine, 1, DATA)
    with pytest.raises(InvalidArgumentError):
        engine.open_read(asked, [put_id(1)])
    assert same([read(engine, [1], runs(["dense"], (0, 0, 4)))["dense"]], [DATA["dense"]])


async def test_puts_of_wrong_size_leave_nothing(engine):
    pending, _ = await begin(engine, 1, SMALL)
    await pending.write(bytes(60))
    with pytest.raises(InvalidArgumentError, match="ended 40 bytes short of"):
        pending.finish()
    with pytest.raises(InvalidArgumentError, match="2 more bytes"):
        await pending.write(bytes(42))
    assert engine.stat().used_bytes == 100
    pending.abort()
    pending.abort()
    assert engine.stat().used_bytes == 0
    with pytest.raises(CallCancelledError):
        await pending.write(b"x")
    with pytest.raises(CallCancelledError):
        pending.finish()
    assert not engine.confirm(put_id(1))


async def test_a_put_is_for_the_partition_that_its_header_named(engine):
    await put(engine, 1, {"x": np.arange(4)}, confirm=False)
    assert engine.partition_of(put_id(1)) == PARTITION
    assert engine.partition_of(put_id(2)) is None
    columns = encode_columns({"x": np.arange(4)})
    with pytest.raises(InvalidArgumentError, match="does not belong to partition 'other'"):
        await engine.reserve(put_id(1), columns, partition_id="other", for_existing_rows=False, deadline=None)
    with pytest.raises(InvalidArgumentError, match="does not belong to partition 'other'"):
        engine.complete_put(put_id(1), "other")
    with pytest.raises(InvalidArgumentError, match=r"belongs to controller .*, not"):
        await engine.reserve(
            put_id(1), columns, partition_id=PARTITION, for_existing_rows=False, deadline=None, owner=b"o" * 16
        )
    assert engine.stat().uncommitted_put_count == 1
    engine.confirm(put_id(1))
    assert engine.stat().uncommitted_put_count == 0


async def test_a_retry_of_a_complete_put_changes_nothing(engine):
    await put(engine, 1, SMALL)
    again, _ = await begin(engine, 1, SMALL)
    assert again is None
    assert engine.stat().put_count == 1
    assert engine.stat().used_bytes == 100


async def test_a_retry_takes_over_from_a_broken_stream(engine):
    older, _ = await begin(engine, 1, SMALL)
    await older.write(b"garbage")
    await put(engine, 1, {"x": np.full(100, 7, np.uint8)})
    with pytest.raises(CallCancelledError):
        await older.write(b"more")
    older.abort()
    assert engine.stat().used_bytes == 100
    assert set(read(engine, [1], runs(["x"], (0, 0, 100)))["x"].tolist()) == {7}


async def test_unconfirmed_puts_expire_and_confirmed_ones_stay():
    clock = Clock()
    engine = StorageEngine(max_bytes=None, put_ttl_seconds=10, clock=clock)
    await put(engine, 1, SMALL, confirm=False)
    clock.now += 5
    await put(engine, 2, SMALL, confirm=False)
    await put(engine, 3, SMALL)
    assert engine.stat().uncommitted_put_count == 2
    clock.now += 5
    assert expire(engine) == 1
    with pytest.raises(PutNotFoundError):
        engine.complete_put(put_id(1), PARTITION)
    assert not engine.confirm(put_id(1))
    assert engine.confirm(put_id(2))
    assert engine.confirm(put_id(2))
    clock.now += 100
    assert expire(engine) == 0
    assert engine.stat().put_count == 2


async def test_an_overdue_put_goes_where_its_controller_does_not_know_it_and_no_other():
    clock = Clock()
    engine = StorageEngine(max_bytes=None, put_ttl_seconds=10, clock=clock)
    began_at = clock.now
    for number in range(6):
        await put(engine, number, SMALL, confirm=False)
        assert engine.receipt_time(put_id(number)) == began_at
    assert engine.puts.overdue(b"", 9) == Overdue(put_ids=[], valid_from=began_at)
    clock.now += 10
    await put(engine, 6, SMALL, confirm=False)
    assert engine.receipt_time(put_id(6)) == began_at + 10
    asked = engine.puts.overdue(b"", 5)
    assert asked == Overdue(put_ids=[put_id(number) for number in range(5)], valid_from=began_at + 10)
    engine.free([cells(4)])
    engine.confirm(put_id(0))
    assert engine.on_answer(asked, unknown=[put_id(0), put_id(1), put_id(4)]) == 1
    assert engine.stat().uncommitted_put_count == 4  # 0 is committed, 1 and 4 are gone
    assert engine.puts.overdue(b"", 9).put_ids == [put_id(5)]  # the others later
    assert engine.receipt_time(put_id(0)) is None
    assert engine.receipt_time(put_id(2)) == began_at + 10  # the one before is void
    clock.now += 10
    assert engine.puts.overdue(b"", 9).put_ids == [put_id(number) for number in (5, 6, 2, 3)]
    with pytest.raises(PutNotFoundError):
        engine.complete_put(put_id(1), PARTITION)


async def test_a_put_that_gets_another_receipt_while_it_is_asked_for_stays():
    clock = Clock()
    engine = StorageEngine(max_bytes=None, put_ttl_seconds=10, clock=clock)
    await put(engine, 1, SMALL, confirm=False)
    began_at = clock.now
    assert engine.receipt_time(put_id(1)) == began_at
    clock.now += 10
    asked = engine.puts.overdue(b"", 9)
    assert engine.receipt_time(put_id(1)) == began_at + 10
    assert engine.on_answer(asked, unknown=[put_id(1)]) == 0
    assert engine.puts.overdue(b"", 9) == Overdue(put_ids=[], valid_from=began_at + 10)


async def test_a_put_that_its_controller_knows_outlasts_a_reconciliation_of_before():
    clock = Clock()
    engine = StorageEngine(max_bytes=None, put_ttl_seconds=10, clock=clock)
    await put(engine, 1, SMALL, confirm=False)
    clock.now += 10
    state = engine.begin_reconciliation()
    asked = engine.puts.overdue(b"", 9)
    engine.on_answer(asked, unknown=())  # it was committed after the controller looked at its puts
    for _ in engine.finish_reconciliation(state):
        pass
    assert engine.stat().put_count == 1


async def test_a_put_that_is_put_again_keeps_its_receipt_and_waits_anew_after_half_of_its_time():
    clock = Clock()
    engine = StorageEngine(max_bytes=None, put_ttl_seconds=10, clock=clock)
    await put(engine, 1, SMALL, confirm=False)
    await put(engine, 2, SMALL, confirm=False)
    began_at = clock.now
    clock.now += 4
    assert engine.receipt_time(put_id(1)) == began_at
    assert engine.puts.valid_from == began_at
    clock.now += 5
    assert engine.receipt_time(put_id(1)) == clock.now
    clock.now += 1
    assert engine.puts.overdue(b"").put_ids == [put_id(2)]
    clock.now += 9
    assert engine.puts.overdue(b"").put_ids == [put_id(2), put_id(1)]


async def test_of_owners_that_are_no_controller_all_goes_in_time_and_of_others_nothing():
    clock = Clock()
    engine = StorageEngine(max_bytes=None, put_ttl_seconds=10, clock=clock)
    for number, owner in enumerate([b"a", b"a", b"b", b"b"]):
        await put(engine, number, SMALL, confirm=number % 2 == 0, owner=owner)
    assert engine.puts.absent_owners([b"b"]) == []
    clock.now += 5
    assert engine.puts.absent_owners([b"a", b"b"]) == []  # it came back
    assert engine.puts.absent_owners([b"b"]) == []
    clock.now += 9
    assert engine.puts.absent_owners([b"b"]) == []
    clock.now += 1
    assert engine.puts.absent_owners([b"b"]) == [b"a"]
    assert sum(engine.delete_owned(b"a")) == 2
    assert engine.puts.absent_owners([b"b"]) == []
    assert (engine.stat().put_count, engine.stat().uncommitted_put_count) == (2, 1)


async def test_what_an_earlier_start_of_a_controller_put_goes_at_once():
    engine = StorageEngine(max_bytes=None, put_ttl_seconds=10, clock=Clock())
    starts = ((b"n", b"1"), (b"n", b"2"), (b"o", b"1"))
    before, now, other = (name * CONTROLLER_NAME_BYTES + start for name, start in starts)
    for number, owner in enumerate([before, now, other]):
        await put(engine, number, SMALL, owner=owner)
    assert engine.puts.absent_owners([now]) == [before]
    assert sum(engine.delete_owned(before)) == 1
    assert engine.puts.absent_owners([now]) == []
    assert engine.stat().put_count == 2


async def test_a_put_that_comes_while_those_of_its_owner_are_dropped_goes_the_next_time():
    clock = Clock()
    engine = StorageEngine(max_bytes=None, put_ttl_seconds=10, clock=clock)
    await put(engine, 0, SMALL, owner=b"a")
    dropping = engine.delete_owned(b"a")
    dropped = sum(next(dropping) for _ in range(512))
    for number in range(1, 32):
        await put(engine, number, SMALL, confirm=False, owner=b"a")  # into slices to come, and into those that are over
    dropped += sum(dropping)
    assert 0 < engine.stat().put_count == engine.stat().uncommitted_put_count == 32 - dropped
    assert engine.puts.absent_owners([b"b"]) == []
    clock.now += 10
    assert engine.puts.absent_owners([b"b"]) == [b"a"]
    sum(engine.delete_owned(b"a"))
    assert engine.stat().put_count == engine.stat().used_bytes == 0
    assert engine.puts.absent_owners([b"b"]) == []


async def test_reconciliation_touches_the_puts_of_its_owner_alone(engine):
    for number, owner in enumerate([b"a", b"a", b"b"]):
        await put(engine, number, DATA, owner=owner)
    outcome = reconcile(engine, [cells(0), cells(2, 0)], owner=b"a")
    assert (outcome.missing_put_ids, outcome.dropped_count) == ([put_id(2)], 1)
    assert read(engine, [2], runs(["dense"], (0, 0, 4)))["dense"].tolist() == DATA["dense"].tolist()
    other = engine.begin_reconciliation(b"b")
    engine.begin_reconciliation(b"a")
    engine.reconcile(other, cells=[cells(2)])  # that of another owner goes on
    for _ in engine.finish_reconciliation(other):
        pass
    assert engine.stat().put_count == 2


async def test_puts_whose_commit_is_under_way_stay_as_they_are(engine):
    for number in range(3):
        await put(engine, number, SMALL, confirm=False)
    for number in range(2):
        engine.confirm(put_id(number))
    kept = reconcile(engine, [cells(0)], staying=[put_id(1), put_id(2), put_id(3)])
    assert (kept.missing_put_ids, kept.dropped_count) == ([], 0)
    assert engine.stat().put_count == 3
    assert engine.stat().uncommitted_put_count == 1


@pytest.mark.parametrize(
    "listed", [(cells(1, 0),), (cells(1),), (cells(1, 0), cells(2))], ids=["part", "whole", "next"]
)
@pytest.mark.parametrize("is_begun", [False, True], ids=["freed before it is listed", "while it is listed"])
async def test_what_was_listed_of_a_freed_put_says_nothing_of_one_stored_under_its_id(engine, listed, is_begun):
    await put(engine, 1, DATA)
    await put(engine, 2, SMALL)
    state = engine.begin_reconciliation()
    if is_begun:
        engine.reconcile(state, cells=listed[:1])
    engine.free([cells(1, 0, 1), cells(1, 2, 3)])  # by which all of it is gone
    await put(engine, 1, DATA, confirm=False)
    engine.reconcile(state, cells=[*listed[is_begun:], cells(2)])
    for _ in engine.finish_reconciliation(state):
        pass
    assert engine.stat().uncommitted_put_count == 1
    assert read(engine, [1], runs(["dense"], (0, 0, 4)))["dense"].tolist() == DATA["dense"].tolist()


async def test_unknown_cells_are_ignored(engine):
    await put(engine, 1, DATA)
    before = engine.stat()
    wild = PutCells(put_id=put_id(1), rows=indexes(-5, -4, *range(4, 13), 2**62))
    engine.free([cells(9), cells(1, fields=["unknown"]), cells(1, 1, fields=["unknown"]), wild])
    assert engine.stat() == before
    assert read(engine, [1], runs(DATA, (0, 0, 4)))["object"] == DATA["object"]


async def test_freeing_halves_gives_bytes_back(engine):
    x = np.random.default_rng(0).random((1000, 16))
    await put(engine, 1, {"x": x, "j": [np.arange(n % 5) for n in range(1000)]})
    full = engine.stat().used_bytes
    order = np.random.default_rng(1).permutation(1000).tolist()
    for count, row in enumerate(order[:-3], 1):
        engine.free([cells(1, row)])
        await compacted(engine)
        assert engine.stat().used_bytes <= 2.2 * full * (1000 - count) / 1000 + 600
    left = sorted(order[-3:])
    back = read(engine, [1], runs(["x", "j"], *((0, row, 1) for row in left)))
    assert np.array_equal(back["x"], x[left])
    assert [len(row) for row in back["j"]] == [row % 5 for row in left]
    engine.free([cells(1, *left)])
    assert engine.stat().used_bytes == 0
    assert engine.stat().put_count == 0


async def test_freeing_a_field_gives_its_bytes_back(engine):
    await put(engine, 1, {"big": np.zeros((10, 1000)), "small": np.arange(10)})
    engine.free([cells(1, fields=["big"])])
    await compacted(engine)
    assert engine.stat().used_bytes <= 200
    assert read(engine, [1], runs(["small"], (0, 0, 10)))["small"].tolist() == list(range(10))
    engine.free([cells(1, *range(10), fields=["small"])])
    assert engine.stat().put_count == 0


async def test_readers_keep_what_they_read_through_free_and_reuse(engine):
    x = np.arange(300_000)
    await put(engine, 1, {"x": x})
    reading = engine.open_read([runs(["x"], (0, 0, 300_000))], [put_id(1)])
    chunks = reading.chunks()
    engine.free([cells(1)])
    assert engine.stat().used_bytes == x.nbytes
    await put(engine, 2, {"x": -x})
    assert np.array_equal(np.frombuffer(b"".join(chunks), np.int64), x)
    reading.close()
    reading.close()
    assert engine.stat().used_bytes == x.nbytes
    assert np.array_equal(read(engine, [2], runs(["x"], (0, 0, 300_000)))["x"], -x)


async def test_readers_keep_what_they_read_through_compaction(engine):
    x = np.arange(100_000)
    await put(engine, 1, {"x": x.reshape(-1, 10)})
    with engine.open_read([runs(["x"], (0, 0, 10_000))], [put_id(1)]) as reading:
        engine.free([cells(1, *range(9_000))])
        await compacted(engine)
        assert np.array_equal(read(engine, [1], runs(["x"], (0, 9_000, 1_000)))["x"].reshape(-1), x[90_000:])
        await put(engine, 2, {"x": -x})
        assert np.array_equal(np.frombuffer(b"".join(reading.chunks()), np.int64), x)
    assert engine.stat().used_bytes < x.nbytes * 1.2


async def test_a_loop_of_put_and_clear_keeps_memory_flat():
    engine = StorageEngine(max_bytes=64 << 20)
    x = np.ones((1000, 4000), np.float32)
    rss = []
    for number in range(60):
        await put(engine, number, {"x": x[: 800 + number % 3 * 100], "j": [x[0], x[1]] * 400}
                  if number % 3 == 0 else {"x": x[: 800 + number % 3 * 100]})  # fmt: skip
        engine.free([cells(number)])
        stat = engine.stat()
        assert stat.used_bytes == 0
        assert stat.pooled_bytes <= 36 << 20
        rss.append(psutil.Process().memory_info().rss)
    assert max(rss[30:]) - max(rss[:30]) < 64 << 20  # a put is 13 MB or more; other threads allocate, too


async def test_pooled_memory_is_given_back_in_time():
    clock = Clock()
    engine = StorageEngine(max_bytes=None, clock=clock)
    await put(engine, 1, {"x": np.ones(4 << 20, np.uint8)})
    engine.free([cells(1)])
    assert engine.stat().pooled_bytes == 4 << 20
    clock.now += 3600
    engine.trim()
    assert engine.stat().pooled_bytes == 0


async def test_one_row_puts_are_small(engine):
    data = {"a": np.zeros((1, 8), np.float32), "b": [np.zeros(5)], "c": np.zeros(1), "d": ["xyz"]}
    gc.collect()
    before = psutil.Process().memory_info().rss
    for number in range(5000):
        await put(engine, number, data)
    assert psutil.Process().memory_info().rss - before < 5000 * 1200
    assert engine.stat().put_count == 5000


async def test_puts_that_share_their_columns_are_freed_by_themselves(engine):
    data = {"x": np.arange(4), "t": ["a", "b", "c", "d"]}
    for number in (1, 2, 3, 4):
        await put(engine, number, data)
    first, *others = (engine.puts[put_id(number)] for number in (1, 2, 3, 4))
    assert all(other.columns is first.columns for other in others)
    engine.free([cells(2, 1), cells(3, fields=["t"])])
    assert read(engine, [1], runs(data, (0, 0, 4)))["t"] == data["t"]
    assert read(engine, [2], runs(data, (0, 0, 1), (0, 2, 2)))["x"].tolist() == [0, 2, 3]
    assert read(engine, [3], runs(["x"], (0, 0, 4)))["x"].tolist() == [0, 1, 2, 3]
    for number, field in ((2, runs(data, (0, 1, 1))), (3, runs(["t"], (0, 0, 1)))):
        with pytest.raises(PutNotFoundError):
            read(engine, [number], field)
    engine.free([cells(number) for number in (2, 3, 4)])
    assert read(engine, [1], runs(data, (0, 0, 4)))["x"].tolist() == [0, 1, 2, 3]


async def test_rows_beyond_4_gib_are_found(engine):
    """The region is mapped, but only its ends are touched."""
    row_bytes = 1 << 30
    column = ColumnShape(
        spec=FieldSpec("x", "uint8", Layout.DENSE, (row_bytes,)), row_count=6, extents=None, value_bytes=6 * row_bytes
    )
    jagged = ColumnShape(
        spec=FieldSpec("j", "uint8", Layout.JAGGED, (-1,)), row_count=6, extents=np.full((6, 1), row_bytes),
        value_bytes=6 * row_bytes,
    )  # fmt: skip
    pending = await engine.reserve(
        put_id(1), [column, jagged], partition_id=PARTITION, for_existing_rows=False, deadline=None
    )
    pending._filled += 12 * row_bytes - 3  # as if written
    await pending.write(b"end")
    pending.finish()
    with engine.open_read([runs(["x", "j"], (0, 5, 1))], [put_id(1)]) as reading:
        first, last = reading.chunks()
        assert len(first) == len(last) == row_bytes
        assert bytes(last[-3:]) == b"end"
        assert [header.value_bytes for header in reading.headers] == [row_bytes, row_bytes]
    assert engine.stat().used_bytes > 12 * row_bytes


async def test_concurrent_puts_and_readers(engine):
    async def produce(number):
        await put(engine, number, {"x": np.full((100, 50), number)})
        await asyncio.sleep(0)
        with engine.open_read([runs(["x"], (0, 10, 80))], [put_id(number)]) as reading:
            engine.free([cells(number)])
            await asyncio.sleep(0)
            assert (receive(reading)["x"] == number).all()

    await asyncio.gather(*map(produce, range(50)))
    assert engine.stat().used_bytes == 0


# Compaction beside other calls


class _Copies:
    """Counts the bytes that compaction copies, by whether the event loop copies them, and may hold its thread up."""

    def __init__(self, monkeypatch):
        self.loop_bytes, self.thread_bytes, self.largest_bytes = 0, 0, 0
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        loop_thread, gather, copy = threading.get_ident(), reading_module.gather, reading_module.Move.copy
        compacting = threading.local()

        def copied(move, smaller):
            compacting.now = True
            try:
                return copy(move, smaller)
            finally:
                compacting.now = False

        def counted(blob, starts, sizes, target, unit):
            if not getattr(compacting, "now", False):  # it is a read
                gather(blob, starts, sizes, target, unit)
                return
            if threading.get_ident() == loop_thread:
                self.loop_bytes += target.size
            else:
                self.thread_bytes += target.size
                self.begun.set()
                assert self.may_go_on.wait(60)
            self.largest_bytes = max(self.largest_bytes, target.size)
            gather(blob, starts, sizes, target, unit)

        monkeypatch.setattr(reading_module, "gather", counted)
        monkeypatch.setattr(reading_module.Move, "copy", copied)

    async def hold(self):
        """Wait until a put is being copied, which does not go on before `release`."""
        await asyncio.to_thread(self.begun.wait, 60)

    def release(self):
        self.may_go_on.set()


WIDE = {
    "x": np.arange(4000 * 100).reshape(4000, 100),
    "j": [np.arange(row % 90) for row in range(4000)],
    "t": [f"row {row}" for row in range(4000)],
}


def check_wide(engine, rows):
    back = read(engine, [1], runs(WIDE, *((0, row, 1) for row in rows)))
    assert np.array_equal(back["x"], WIDE["x"][rows])
    assert all(np.array_equal(got, WIDE["j"][row]) for got, row in zip(back["j"], rows, strict=True))
    assert back["t"] == [WIDE["t"][row] for row in rows]


async def test_the_event_loop_copies_nothing_to_compact_a_put(engine, monkeypatch):
    copies = _Copies(monkeypatch)
    await put(engine, 1, WIDE)
    engine.free([cells(1, *range(0, 4000, 2)), cells(1, *range(1, 400, 2))])
    await compacted(engine)
    assert engine.stat().used_bytes < sum(column.value_bytes for column in encode_columns(WIDE)) * 0.6
    assert copies.thread_bytes > 1_500_000
    assert copies.largest_bytes <= 1 << 20
    check_wide(engine, list(range(401, 4000, 2)))
    await put(engine, 2, {"x": WIDE["x"][:20]})
    used_bytes = engine.stat().used_bytes
    engine.free([cells(2, *range(15))])
    await compacted(engine)
    assert engine.stat().used_bytes == used_bytes - 15 * 800
    assert copies.loop_bytes == 0


async def test_rows_are_freed_and_read_while_their_put_is_compacted(engine, monkeypatch):
    copies = _Copies(monkeypatch)
    copies.may_go_on.clear()
    await put(engine, 1, WIDE)
    engine.free([cells(1, *range(2500))])
    await copies.hold()
    with engine.open_read([runs(["x"], (0, 2500, 1500))], [put_id(1)]) as reading:
        engine.free([cells(1, *range(2500, 2600)), cells(1, 3999, fields=["j"]), cells(1, 2700, 2800)])
        with pytest.raises(PutNotFoundError, match="rows within 2550 were cleared"):
            read(engine, [1], runs(["x"], (0, 2550, 1)))
        check_wide(engine, [2600, 3000])
        copies.release()
        await compacted(engine)
        assert b"".join(reading.chunks()) == WIDE["x"][2500:].tobytes()
    left = [row for row in range(2600, 3999) if row not in {2700, 2800}]
    check_wide(engine, left)
    assert read(engine, [1], runs(["x", "t"], (0, 3999, 1)))["t"] == ["row 3999"]
    for fields, row in ((["x"], 2550), (["j"], 3999), (["t"], 2700)):
        with pytest.raises(PutNotFoundError, match="were cleared"):
            read(engine, [1], runs(fields, (0, row, 1)))
    engine.free([cells(1)])
    assert engine.stat().used_bytes == 0


@pytest.mark.parametrize("ends", ["freed", "closed"])
async def test_a_move_that_is_given_up_is_not_copied_to_its_end(engine, monkeypatch, ends):
    copies = _Copies(monkeypatch)
    copies.may_go_on.clear()
    await put(engine, 1, WIDE)
    engine.free([cells(1, *range(2500))])
    await copies.hold()
    ending = asyncio.ensure_future(engine.close()) if ends == "closed" else None
    if ending is None:
        engine.free([cells(1)])
    await asyncio.sleep(0)
    copies.release()
    await compacted(engine)
    assert copies.thread_bytes <= 1 << 20  # of 1.2 MB of x alone: the piece that was under way
    if ending is not None:
        await ending
    else:
        assert engine.stat().used_bytes == 0


async def test_a_put_may_go_and_come_again_while_it_is_compacted(engine, monkeypatch):
    copies = _Copies(monkeypatch)
    copies.may_go_on.clear()
    await put(engine, 1, WIDE)
    engine.free([cells(1, *range(2500))])
    await copies.hold()
    engine.free([cells(1)])
    await put(engine, 1, {"x": np.arange(3)})
    copies.release()
    await compacted(engine)
    assert read(engine, [1], runs(["x"], (0, 0, 3)))["x"].tolist() == [0, 1, 2]
    assert engine.stat().used_bytes == 24


async def test_an_engine_that_closes_waits_for_the_copy_and_keeps_the_put(engine, monkeypatch):
    copies = _Copies(monkeypatch)
    copies.may_go_on.clear()
    await put(engine, 1, WIDE)
    engine.free([cells(1, *range(2500))])
    await copies.hold()
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    assert not closing.done()
    copies.release()
    await closing
    check_wide(engine, list(range(2500, 4000)))


async def test_capacity_for_a_put_that_waits_is_made_without_copies_on_the_loop(monkeypatch):
    copies = _Copies(monkeypatch)
    engine = StorageEngine(max_bytes=10_000_000, reserve_share=0)
    for number in range(4):
        await put(engine, number, {"x": np.zeros((1000, 2500), np.uint8)})
        engine.free([cells(number, *range(300))])
    assert copies.thread_bytes == 0  # less than a half of each is dead
    await asyncio.wait_for(put(engine, 4, {"x": np.ones((800, 2500), np.uint8)}), 30)
    await compacted(engine)
    assert copies.loop_bytes == 0
    assert 3_000_000 <= copies.thread_bytes <= 6_000_000  # of as many puts as were needed
    assert engine.stat().used_bytes <= 10_000_000


# Reads of many small rows


def scattered(count):
    return {
        "text": [f"x{row % 1000}" for row in range(count)],
        "jagged": [np.arange(row % 3, dtype=np.int16) for row in range(count)],
        "dense": np.arange(count, dtype=np.int16),
        "wide": np.arange(count * 40, dtype=np.int32).reshape(count, 40),
    }


@pytest.mark.parametrize("put_count", [1, 7])
async def test_no_frame_is_made_up_of_many_slices(engine, put_count):
    count = 40_000
    data = scattered(count)
    for number in range(put_count):
        await put(engine, number, data)
    order = np.random.default_rng(0).permutation(count)
    asked = [runs([name], *((row % put_count, row, 1) for row in order.tolist())) for name in data]
    reading = await engine.open_long_read(asked, [put_id(number) for number in range(put_count)])
    receiver, largest = ColumnReceiver(reading.headers), 0
    with reading:
        async for part in reading.parts():
            for frame in iter_frames(part):
                largest = max(largest, len(frame))
                receiver.write_all(frame)
    assert largest <= 64
    back = decode_columns(reading.headers, receiver.finish(), as_torch=False)
    assert back["text"] == [data["text"][row] for row in order]
    assert np.array_equal(back["dense"], data["dense"][order])
    assert np.array_equal(back["wide"], data["wide"][order])
    assert all(np.array_equal(got, data["jagged"][row]) for got, row in zip(back["jagged"], order, strict=True))


async def test_many_cells_are_found_in_a_thread_as_they_were(engine, monkeypatch):
    threads, find, begun = [], reading_module._find_spans, threading.Event()

    def noted(*args):
        threads.append(threading.get_ident())
        begun.set()
        return find(*args)

    monkeypatch.setattr(reading_module, "_find_spans", noted)
    await put(engine, 1, {"x": np.arange(100_000)})
    everything = runs(["x"], (0, 0, 100_000))
    opening = asyncio.create_task(engine.open_long_read([everything], [put_id(1)]))
    await asyncio.to_thread(begun.wait, 60)
    engine.free([cells(1)])
    with await opening as reading:
        assert threads != [threading.get_ident()]
        assert b"".join([chunk async for part in reading.parts() for chunk in part]) == np.arange(100_000).tobytes()
        assert engine.stat().used_bytes > 0
    assert engine.stat().used_bytes == 0
    with pytest.raises(PutNotFoundError):
        await engine.open_long_read([everything], [put_id(1)])


def is_packed(engine, number):
    return isinstance(engine.puts._shard(put_id(number))[put_id(number)], PackedPut)


@pytest.mark.parametrize("data", [SMALL, DATA, {"empty": np.zeros((3, 0))}], ids=["one", "all layouts", "no bytes"])
async def test_a_small_put_is_packed_once_it_is_confirmed_and_stays_so_while_it_is_read(engine, data):
    for number in (1, 2):
        await put(engine, number, data, confirm=False)
    asked = runs(data, (0, 0, len(next(iter(data.values())))))
    before, used_bytes = read(engine, [1], asked), engine.stat().used_bytes
    engine.confirm(put_id(1))
    engine.confirm(put_id(2))
    assert is_packed(engine, 2)
    assert (engine.stat().used_bytes, engine.stat().put_count) == (used_bytes, 2)
    after = read(engine, [1], asked)
    assert after.keys() == before.keys() == data.keys()
    assert all(same(after[name], before[name]) if name != "object" else after[name] == before[name] for name in data)
    assert is_packed(engine, 1)
    for number in (1, 2):
        engine.free([PutCells(put_id=put_id(number))])
    assert (engine.stat().used_bytes, engine.stat().put_count) == (0, 0)


async def test_cells_of_a_packed_put_are_freed_one_by_one(engine):
    await put(engine, 1, DATA)
    assert is_packed(engine, 1)
    engine.free([PutCells(put_id=put_id(1), rows=np.array([0, 2]))])
    assert not is_packed(engine, 1)
    back = read(engine, [1], runs(["dense", "jagged"], (0, 1, 1)))
    assert back["dense"].tolist() == DATA["dense"][1:2].tolist()
    assert same(back["jagged"], DATA["jagged"][1:2])
    engine.free([PutCells(put_id=put_id(1), rows=np.array([1, 3]))])
    assert engine.stat().used_bytes == 0


async def test_a_packed_put_that_is_freed_while_it_is_read_is_read_to_its_end(engine):
    for number in (1, 2):
        await put(engine, number, {"x": np.arange(6)})
    with engine.open_read([runs(["x"], (0, 1, 4), (1, 0, 2))], [put_id(1), put_id(2)]) as reading:
        engine.free([cells(1), PutCells(put_id=put_id(2), rows=np.arange(5))])
        assert b"".join([chunk async for part in reading.parts() for chunk in part]) == (
            np.array([1, 2, 3, 4, 0, 1]).tobytes()
        )
    engine.free([cells(2)])
    assert (engine.stat().used_bytes, engine.stat().put_count) == (0, 0)


async def test_a_put_that_is_large_is_not_packed(engine):
    await put(engine, 1, {"x": np.zeros(1 << 17, np.uint8)})
    assert not is_packed(engine, 1)


async def test_a_packed_put_takes_few_bytes_beside_its_own(engine):
    for number in range(1 << 12):  # so that the tables of puts have begun to grow
        await put(engine, number, SMALL)
    tracemalloc.start()
    for number in range(1 << 12, 1 << 13):
        await put(engine, number, SMALL)
    traced_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert traced_bytes / (1 << 12) < 100 + 300
