"""A column that is read as it was at one moment while it goes on changing."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.state import table as column_memory
from tq_service.state.table import BLOCK_ROWS, Column

SIZE = 10_000


def column_of(values, capacity=None):
    column = Column(values.dtype, 0 if values.dtype != object else None, capacity or values.size)
    column.write(slice(0, values.size), values)
    return column


@pytest.mark.parametrize("kind", [np.int64, np.float64, np.bool_, object])
@pytest.mark.parametrize(
    "change",
    [
        lambda column: column.write(slice(0, SIZE), 1),
        lambda column: column.write(slice(4095, 4097), 1),
        lambda column: column.write(slice(SIZE - 1, SIZE + 50), 1),
        lambda column: column.write(np.array([9_999, 0, 5_000, SIZE + 3]), 1),
        lambda column: column.resize(2 * SIZE),
        lambda column: column.resize(SIZE // 2),
    ],
    ids=["all", "edge", "beyond", "some", "grown", "shrunk"],
)
def test_a_snapshot_stays_whatever_is_changed(kind, change):
    values = (np.arange(SIZE) % 7).astype(kind)
    column = column_of(values, SIZE + 100)
    early, late = column.snapshot(SIZE), column.snapshot(SIZE - 5)
    change(column)
    column.write(np.array([17]), 5)
    assert early.values().tolist() == values.tolist()
    assert late.values().tolist() == values[:-5].tolist()
    assert bool(column.data[17])


def test_changes_between_two_blocks_are_not_seen_either():
    column = column_of(np.zeros(SIZE, np.int64))
    snapshot, read = column.snapshot(SIZE), []
    for block in snapshot.blocks():
        column.write(slice(0, SIZE), column.data[0] + 1)
        read.append(block)
    assert np.concatenate(read).tolist() == [0] * SIZE
    assert column.data.tolist() == [3] * SIZE


def test_snapshots_stay_where_sums_are_added():
    column = column_of(np.zeros(SIZE, np.int64))
    snapshot = column.snapshot(SIZE)
    column.add(np.array([3, 3, 9_000]), 2)
    assert (column.data[3], column.data[9_000]) == (4, 2)
    assert not snapshot.values().any()


def test_a_column_is_written_through_its_methods_only():
    column = column_of(np.arange(3))
    with pytest.raises(ValueError, match="read-only"):
        column.data[0] = 5


def test_nothing_is_kept_for_readers_that_are_done_or_gone():
    column = column_of(np.arange(SIZE))
    done, gone = column.snapshot(SIZE), column.snapshot(SIZE)
    done.values()
    del gone
    column.write(slice(0, SIZE), 0)
    assert not done._kept
    assert [reference() for reference in column._snapshots] == [done]


def test_a_thread_reads_one_moment_while_another_writes():
    size = 1 << 18
    column = column_of(np.zeros(size, np.int64))
    snapshot, seen = column.snapshot(size), []
    reader = threading.Thread(target=lambda: seen.append(snapshot.values()))
    reader.start()
    value = 0
    while reader.is_alive() or value < 3:
        value += 1
        column.write(slice(0, size), value)
    reader.join()
    assert not seen[0].any()


OBJECTS = 5 << 16
POSITIONS = st.one_of(
    st.integers(0, OBJECTS - 1),
    st.builds(lambda start, size: slice(start, start + size), st.integers(0, OBJECTS), st.integers(0, 1 << 17)),
    st.lists(st.integers(0, OBJECTS - 1), max_size=40, unique=True).map(lambda values: np.array(values, np.int64)),
    st.builds(
        lambda start, size: np.arange(start, start + size), st.integers(0, OBJECTS // 2), st.integers(0, 1 << 17)
    ),
)


def as_given(where, values, count):
    return values[:count] if not isinstance(where, int) else values[0]


@examples(60)
@given(st.lists(st.tuples(POSITIONS, st.sampled_from(["one", "none", "all"])), max_size=8))
def test_objects_in_chunks_are_read_like_an_array_of_them(changes):
    column, plain = Column(np.object_, None, OBJECTS), np.full(OBJECTS, None, object)
    names = [f"name {number}" for number in range(1 << 17)]
    for where, what in changes:
        count = np.atleast_1d(plain[where]).size
        values = {"one": "x", "none": None, "all": as_given(where, names, count)}[what]
        plain[where] = values
        column.write(where, values)
        assert np.array_equal(np.atleast_1d(column.data[where]), np.atleast_1d(plain[where]))
    assert column.data.size == OBJECTS
    assert column.data[:].tolist() == plain.tolist()
    assert column.data[plain != None].tolist() == plain[plain != None].tolist()  # noqa: E711
    assert column.data[3:OBJECTS:70_000].tolist() == plain[3:OBJECTS:70_000].tolist()


def test_a_long_column_of_objects_grows_without_a_copy_and_takes_memory_where_it_is_written():
    column = Column(np.object_, None, OBJECTS)
    assert not column.data._chunks
    column.write(slice(10, 20), "x")
    (chunk,) = column.data._chunks.values()
    column.resize(4 * OBJECTS)
    assert list(column.data._chunks.values()) == [chunk]
    assert column.data[9:21].tolist() == [None, *"xxxxxxxxxx", None]
    assert column.data[4 * OBJECTS - 1] is None
    column.clear(slice(0, 2 * OBJECTS))
    assert not column.data._chunks
    with pytest.raises(TypeError):
        column.data[0] = "x"


@pytest.mark.parametrize("can_reserve", [True, False])
@pytest.mark.parametrize(("dtype", "fill"), [(np.int64, 0), (np.int64, -1), (np.object_, None)])
def test_a_column_that_shrank_has_its_fill_behind(monkeypatch, can_reserve, dtype, fill):
    if not can_reserve:
        monkeypatch.setattr(column_memory, "reserved_zeros", lambda count, dtype: None)
    column = Column(dtype, fill, OBJECTS)
    column.write(slice(0, OBJECTS), 5)
    snapshot = column.snapshot(OBJECTS)
    column.write(slice(70_001, OBJECTS), fill)
    before = column.data
    column.resize(100_000)
    assert (dtype == np.object_ or np.shares_memory(before, column.data)) is (can_reserve or dtype == np.object_)
    assert column.data.size == 100_000
    assert column.data[:].tolist() == [5] * 70_001 + [fill] * 29_999
    column.resize(OBJECTS)
    assert column.data[70_001:OBJECTS].tolist() == [fill] * (OBJECTS - 70_001)
    assert snapshot.values().tolist() == [5] * OBJECTS


ROWS = 1 << 16  # from which on a column of objects is in chunks


def test_a_snapshot_of_objects_is_read_by_another_thread_while_they_change():
    strings = [f"key-{number}" for number in range(ROWS)]
    for _ in range(10):
        column = Column(np.object_, None, ROWS)
        column.write(slice(0, ROWS), strings)
        snapshot, read = column.snapshot(ROWS), []
        reader = threading.Thread(target=lambda: read.extend(snapshot.values().tolist()))  # noqa: B023
        reader.start()
        for place in range(ROWS - 1, 0, -BLOCK_ROWS):
            assert column.data[place] == strings[place]
            column.write(np.array([place]), None)
        reader.join()
        assert read == strings
