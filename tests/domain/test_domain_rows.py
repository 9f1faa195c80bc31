"""The table of rows: growth, gaps, compaction, and finding rows whatever became of the others."""

import numpy as np
import pytest

from tq_service.domain.tables.table import RowTable


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
    table.pin_count += 1
    table.remove(np.arange(2500))
    assert table.count == 3000
    table.pin_count -= 1
    table.remove(np.array([2500]))
    assert table.count == table.present_count == 499


def test_old_arrays_are_left_to_their_readers():
    table, mark = table_of(3000)
    before = mark.data
    table.remove(np.arange(1000, 3000))
    assert mark.data is not before
    assert before[:3].tolist() == [0, 10, 20]
    assert before.size >= 3000


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


def test_random_changes_against_a_dict():
    rng = np.random.default_rng(0)
    table = RowTable()
    mark = table.column("mark", np.int64, -1)
    kept = {}
    for _ in range(300):
        added = table.append(int(rng.integers(0, 60)))
        mark.write(added, rng.integers(0, 1 << 40, added.stop - added.start))
        kept.update(zip(table.index.data[added].tolist(), mark.data[added].tolist(), strict=True))
        gone = rng.permutation(np.array(list(kept), np.int64))[: int(rng.integers(0, 60))]
        table.remove(table.find(gone))
        for index in gone.tolist():
            del kept[index]
    every = np.arange(table.next_index)
    positions = table.find(every)
    assert np.flatnonzero(positions >= 0).tolist() == sorted(kept)
    assert mark.data[positions[positions >= 0]].tolist() == [kept[index] for index in sorted(kept)]
    assert table.present_count == len(kept)
    assert table.count <= max(2 * len(kept), len(kept) + 1024)
