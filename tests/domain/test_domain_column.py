"""A column that is read as it was at one moment while it goes on changing."""

import threading

import numpy as np
import pytest

from tq_service.domain.tables.column import Column

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
        lambda column: column.resize(2 * SIZE, None, SIZE),
        lambda column: column.resize(SIZE, np.arange(SIZE) % 2 == 0, SIZE),
    ],
    ids=["all", "edge", "beyond", "some", "grown", "compacted"],
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
