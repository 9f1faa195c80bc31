"""The table of rows: growth, gaps, compaction, and finding rows whatever became of the others."""

import numpy as np
import pytest

from tq_service.state import table as table_module
from tq_service.state.table import CLEARED, RowTable


def table_of(count):
    table = RowTable()
    mark = table.column("mark", np.int64, -1)
    added = table.append(count)
    mark.write(added, np.arange(count) * 10)
    return table, mark


def found(table, indexes):
    return table.find(np.array(indexes, np.int64)).tolist()


@pytest.mark.parametrize("steps", [[1] * 200, [64, 1], [65], [0, 500, 0, 3]])
def test_columns_grow_together_and_keep_their_values(steps):
    table = RowTable()
    mark = table.column("mark", np.int64, -7)
    for step in steps:
        added = table.append(step)
        assert mark.data[added].tolist() == [-7] * step
        mark.write(added, table.index.data[added])
    total = sum(steps)
    assert (table.count, table.present_count, table.next_index) == (total, total, total)
    assert mark.data[:total].tolist() == list(range(total))
    late = table.column("late", np.bool_, True)
    assert late.data.size == mark.data.size
    assert late.data.all()


def test_removed_rows_stay_as_gaps_until_gaps_outnumber_rows():
    table, mark = table_of(3000)
    table.remove(np.arange(0, 1000))
    assert (table.count, table.present_count) == (3000, 2000)
    assert mark.data[:1000].tolist() == [-1] * 1000
    assert found(table, [0, 999, 1000, 2999, 3000, -1]) == [-1, -1, 1000, 2999, -1, -1]
    table.remove(np.arange(1000, 1501))
    assert (table.count, table.present_count) == (1499, 1499)
    assert found(table, [0, 1500, 1501, 2999, 3000]) == [-1, -1, 0, 1498, -1]
    assert mark.data[: table.count].tolist() == [index * 10 for index in range(1501, 3000)]


def test_few_gaps_are_left_alone():
    table, _ = table_of(100)
    table.remove(np.arange(99))
    assert table.count == 100
    assert table.present_positions().tolist() == [99]


def test_indexes_go_on_after_everything_was_removed():
    table, _ = table_of(2000)
    table.remove(np.arange(2000))
    assert (table.count, table.present_count, table.next_index) == (0, 0, 2000)
    assert found(table, [0, 2000]) == [-1, -1]
    assert table.position_from(5) == 0
    table.append(2)
    assert found(table, [1999, 2000, 2001, 2002]) == [-1, 0, 1, -1]
    assert found(table, []) == []


def test_rows_are_found_between_closed_gaps():
    table, mark = table_of(4000)
    odd = np.arange(1, 4000, 2)
    table.remove(odd)
    table.remove(np.array([0]))  # one more, and gaps outnumber rows
    assert table.count == table.present_count == 1999
    assert found(table, [0, 1, 2, 3, 4, 3998, 3999]) == [-1, -1, 0, -1, 1, 1998, -1]
    table.append(3)
    assert found(table, [4000, 4002, 2, 4003]) == [1999, 2001, 0, -1]
    assert mark.data[:3].tolist() == [20, 40, 60]


def test_positions_stay_while_a_reader_needs_them():
    table, _ = table_of(3000)
    with table.pinned():
        table.remove(np.arange(2500))
        assert table.count == 3000
    table.remove(np.array([2500]))
    assert table.count == table.present_count == 499


def test_slices_have_each_row_once_while_rows_are_added_removed_and_moved():
    table, _ = table_of(40_000)
    seen = []
    for rows in table.slices(1000):
        seen += table.index.data[rows][table.state.data[rows] != CLEARED].tolist()
        removed = [index for index in range(max(0, seen[-1] - 900), seen[-1] + 1) if found(table, [index]) != [-1]]
        table.remove(table.find(np.array(removed, np.int64)))  # behind the slice, so that those ahead are moved
        table.append(100)
    assert seen == list(range(40_000))
    assert table.count < 40_000
    assert list(table_of(0)[0].slices(10)) == []


def test_a_snapshot_has_the_rows_that_were_removed_and_moved_since():
    table, mark = table_of(3000)
    snapshot = table.snapshot()
    table.remove(np.arange(0, 3000, 2))
    table.remove(np.array([1]))
    assert (table.count, mark.data[0]) == (1499, 30)
    assert snapshot.columns["mark"].values().tolist() == list(range(0, 30_000, 10))
    assert snapshot.columns["index"].values().tolist() == list(range(3000))


def test_position_from_gives_the_first_row_at_or_after_an_index():
    table, _ = table_of(3000)
    assert [table.position_from(index) for index in (-5, 0, 7, 2999, 3000, 9999)] == [0, 0, 7, 2999, 3000, 3000]
    table.remove(np.arange(0, 3000, 2))
    table.remove(np.array([1]))
    assert table.count == 1499
    assert [table.position_from(index) for index in (0, 3, 4, 5, 2999, 3000)] == [0, 0, 1, 1, 1498, 1499]


def test_a_column_of_another_type():
    table, mark = table_of(3)
    mark.convert(np.float64)
    table.append(100)
    assert mark.data[:4].tolist() == [0.0, 10.0, 20.0, -1.0]


def test_a_name_is_declared_once():
    table, _ = table_of(3)
    with pytest.raises(ValueError, match="'mark' is declared twice"):
        table.column("mark", np.int64, 0)


@pytest.fixture(params=[False, True], ids=["at once", "step by step"])
def closes_step_by_step(request, monkeypatch):
    """Whether gaps of tables of this size are closed in many steps, as those of large ones are."""
    if request.param:
        monkeypatch.setattr(table_module, "_LEAST_GAPS", 16)
        monkeypatch.setattr(table_module, "_LEAST_CLOSED", 4)
    return request.param


class Twin:
    """A table and a dict of what is in it, changed alike."""

    def __init__(self, rng):
        self.rng = rng
        self.kept = {}
        self.was_closing = False
        self.open()

    def open(self):
        self.table = RowTable()
        self.mark = self.table.column("mark", np.int64, -1)
        self.text = self.table.column("text", np.object_, None)
        self.blank = self.table.column("blank", np.int64, 7)

    def add(self, count):
        added = self.table.append(count)
        self.mark.write(added, self.rng.integers(0, 1 << 40, count))
        self.text.write(added, [str(value) for value in self.mark.data[added].tolist()])
        self.kept.update(zip(self.table.index.data[added].tolist(), self.mark.data[added].tolist(), strict=True))
        self.table.close_gaps(count)

    def remove(self, indexes):
        self.table.remove(self.table.find(indexes))
        for index in indexes.tolist():
            del self.kept[index]
        self.was_closing |= self.table._closing is not None

    def restore(self):
        snapshot, next_index = self.table.snapshot(), self.table.next_index
        self.open()
        self.table.restore(snapshot)
        self.table.rebuild(next_index)

    def check(self):
        table, indexes = self.table, sorted(self.kept)
        every = np.arange(-1, table.next_index + 1)
        positions = table.find(every)
        assert every[positions >= 0].tolist() == indexes
        there = positions[positions >= 0]
        assert self.mark.data[there].tolist() == [self.kept[index] for index in indexes]
        assert self.text.data[there].tolist() == [str(self.kept[index]) for index in indexes]
        assert table.present_positions().tolist() == there.tolist()
        assert table.present_count == len(indexes)
        gaps = np.setdiff1d(np.arange(table.count), there)
        assert set(self.mark.data[gaps].tolist()) <= {-1}
        assert set(self.text.data[gaps].tolist()) <= {None}
        assert set(self.blank.data.tolist()) == {7}
        assert (self.mark.data[table.count :] == -1).all()
        for index in self.rng.integers(-1, table.next_index + 2, 5).tolist():
            start = table.position_from(index)
            assert [position for position in there if position >= start] == table.find(
                np.array([each for each in indexes if each >= index], np.int64)
            ).tolist()
            assert (
                table.present_from(index, 3).tolist()
                == table.find(np.array([each for each in indexes if each >= index][:3], np.int64)).tolist()
            )


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_against_a_dict(closes_step_by_step, seed):
    twin = Twin(np.random.default_rng(seed))
    rng = twin.rng
    for step in range(150):
        twin.add(int(rng.integers(0, 60)))
        every = np.array(list(twin.kept), np.int64)
        gone = rng.permutation(every) if step % 3 else every  # the oldest first, as they are mostly cleared
        if step % 40 == 39:
            twin.remove(gone)
        else:
            twin.remove(gone[: int(rng.integers(0, 75))])
        if step % 10 == 7:
            twin.restore()
        twin.check()
        if not closes_step_by_step:
            assert twin.table.count <= max(2 * len(twin.kept), len(twin.kept) + 1024)
    assert twin.was_closing is closes_step_by_step


@pytest.mark.parametrize("added_for_removed", [0, 1, 3])
def test_a_table_whose_gaps_are_closed_step_by_step_stays_of_a_size(monkeypatch, added_for_removed):
    monkeypatch.setattr(table_module, "_LEAST_CLOSED", 1)
    twin = Twin(np.random.default_rng(5))
    twin.add(20_000)
    most = 0
    for _ in range(200):
        twin.remove(np.array(list(twin.kept), np.int64)[:90])
        twin.add(90 * added_for_removed)
        most = max(most, twin.table.count - 3 * len(twin.kept))
    assert most <= 0 or added_for_removed == 0
    twin.check()


def test_no_row_is_moved_while_a_reader_needs_positions(monkeypatch):
    monkeypatch.setattr(table_module, "_LEAST_CLOSED", 64)
    table, mark = table_of(5000)
    table.remove(np.arange(2400))
    table.remove(np.arange(2400, 2520))
    before = table._closing
    assert before is not None
    table.pin_count += 1
    table.remove(np.arange(2520, 2600))
    assert table._closing == before
    assert mark.data[3000] == 30_000
    table.pin_count -= 1
    table.remove(np.arange(2600, 2610))
    assert table._closing != before


def test_a_small_part_of_a_large_table_is_moved_in_a_step(monkeypatch):
    count, moved = 1 << 18, []
    table, mark = table_of(count)
    monkeypatch.setattr(
        table_module.Column,
        "write",
        lambda self, where, values, write=table_module.Column.write: (
            moved.append(np.arange(count)[where].size),
            write(self, where, values),
        ),
    )
    for start in range(0, count - 1000, 1000):
        table.remove(np.arange(start, start + 1000))
        most = 2 * (table_module._LEAST_CLOSED + 1000)  # written once where they go, once where they were
        assert sum(moved) <= 3 * most + table_module._GROWTH  # and the indexes of rows that are still to come
        moved.clear()
    assert table.count <= count // 2
    assert mark.data[table.find(np.array([count - 1]))].tolist() == [10 * (count - 1)]


def test_rows_are_found_after_a_restore_that_begins_with_what_moved_rows_left_behind(monkeypatch):
    monkeypatch.setattr(table_module, "_LEAST_CLOSED", 1 << 13)
    monkeypatch.setattr(table_module, "_CLOSED_SHARE", 0)
    table, _ = table_of(20_000)
    table.remove(np.arange(12_000))
    assert table._closing == (0, 1 << 13)
    restored = RowTable()
    restored.column("mark", np.int64, -1)
    restored.restore(table.snapshot())
    restored.rebuild(table.next_index)
    every = np.arange(-1, 20_002)
    assert restored._closing == table._closing
    assert restored.find(every).tolist() == table.find(every).tolist()
    assert restored.append(3) == slice(20_000, 20_003)
    assert found(restored, [19_999, 20_000, 20_002, 20_003]) == [19_999, 20_000, 20_002, -1]
