"""Cells: where cells are, and what becomes of those that are overwritten or cleared."""

import numpy as np
import pytest
from domain_support import clear, commit, dense, insert, jagged, new_write, partition, update
from hypothesis import given
from hypothesis import strategies as st

from tq_service.errors import FieldMismatchError
from tq_service.machine.samples import SamplesWritten
from tq_service.schema import FieldSpec, Layout, SampleState
from tq_service.state.cells import ColumnWrite, live_cells

D, J, OBJECT = Layout.DENSE, Layout.JAGGED, Layout.OBJECT


def test_the_default_layout_holds_for_fields_nobody_declared():
    train = partition(default_layout=J, fields=(FieldSpec("d", layout=D),))
    insert(train, 2, [dense("x", 5), dense("d", 5)])
    assert (train.cells.fields["x"].spec.layout, train.cells.fields["x"].spec.row_shape) == (J, (5,))
    insert(train, 1, [dense("x", 6)])
    assert train.cells.fields["x"].spec.row_shape == (-1,)
    assert train.cells.fields["d"].spec.row_shape == (5,)
    text = ColumnWrite(spec=FieldSpec("text", layout=OBJECT, row_shape=()))
    update(train, [0], [text])
    assert train.cells.fields["text"].spec.layout is OBJECT
    update(train, [0], [dense("reward")])  # a scalar has no side that could be ragged
    assert train.cells.fields["reward"].spec.layout is D


def test_a_refused_column_leaves_nothing():
    train = partition()
    insert(train, 2, [dense("x", 3)])
    with pytest.raises(FieldMismatchError):
        insert(train, 2, [dense("new", 3), dense("x", 4, 1)])
    assert list(train.cells.fields) == ["x"]
    assert train.inserted_count == 2


# Where cells are


def where(train, names, indexes):
    """Return (fields, [(put, first row, count), ...]) of each set of runs."""
    runs = train.cells.locate(names, train.table.find(np.array(indexes)))
    return [
        (
            each.field_names,
            [
                (each.puts[put].put_id[-1], first, count)
                for put, first, count in zip(each.put_indexes, each.first_rows, each.row_counts, strict=True)
            ],
        )
        for each in runs
    ]


def put(train, number, count, fields, **arguments):
    write = new_write(count, fields, **arguments)
    write = type(write)(**{**{name: getattr(write, name) for name in write.__slots__}, "put": _put(number)})
    return commit(train, SamplesWritten(partition_id=train.partition_id, write=write))[1]


def _put(number):
    return type(new_write(1, ("x",)).put)("s0", b"b" * 16, bytes(15) + bytes([number]))


def test_cells_are_runs_of_neighbouring_rows():
    train = partition()
    put(train, 1, 4, ("x", "y"))
    put(train, 2, 4, ("x",))
    put(train, 3, 4, ("y",), indexes=[4, 5, 7, 6])
    assert where(train, ["x", "y"], [0, 1, 2, 3]) == [(("x", "y"), [(1, 0, 4)])]
    assert where(train, ["x", "y"], range(8)) == [
        (("x",), [(1, 0, 4), (2, 0, 4)]),
        (("y",), [(1, 0, 4), (3, 0, 2), (3, 3, 1), (3, 2, 1)]),
    ]
    assert where(train, ["x"], [3, 4, 1, 2]) == [(("x",), [(1, 3, 1), (2, 0, 1), (1, 1, 2)])]
    assert where(train, ["x"], []) == []


def test_fields_that_some_rows_lack_are_left_out():
    train = partition()
    put(train, 1, 2, ("x", "y"))
    put(train, 2, 1, ("x",))
    assert where(train, ["x", "y"], [0, 1, 2]) == [(("x",), [(1, 0, 2), (2, 0, 1)])]


# Cells that go


def freed(cells):
    return sorted(
        (each.put.put_id[-1], sorted(each.field_names), None if each.rows is None else each.rows.tolist())
        for each in cells
    )


def test_overwriting_frees_the_cells_it_replaces():
    train = partition()
    put(train, 1, 3, ("x", "y"))
    assert freed(put(train, 2, 2, ("x",), indexes=[2, 0])) == [(1, ["x"], [0, 2])]
    assert freed(put(train, 3, 2, ("x", "y"), indexes=[0, 1])) == [
        (1, ["x"], [1]), (1, ["y"], [0, 1]), (2, ["x"], [1]),
    ]  # fmt: skip
    assert freed(put(train, 4, 3, ("y",), indexes=[0, 1, 2])) == [(1, [], None), (3, ["y"], [0, 1])]
    assert where(train, ["x", "y"], [0, 1, 2]) == [(("x",), [(3, 0, 2), (2, 0, 1)]), (("y",), [(4, 0, 3)])]
    assert [train.cells.fields[name].produced_count for name in "xy"] == [3, 3]


def live(train):
    return list(live_cells(train.cells.snapshot()))


def test_live_cells_are_those_that_were_not_freed():
    train = partition()
    put(train, 1, 3, ("x", "y"))
    put(train, 2, 2, ("x",), indexes=[2, 0])
    put(train, 3, 2, ("x",))
    assert freed(live(train)) == [(1, ["x"], [1]), (1, ["y"], [0, 1, 2]), (2, [], None), (3, [], None)]
    clear(train, np.array([0, 4]))
    assert freed(live(train)) == [(1, ["x"], [1]), (1, ["y"], [1, 2]), (2, ["x"], [0]), (3, ["x"], [0])]
    clear(train, np.array([1, 2, 3]))
    assert live(train) == []


def test_live_cells_are_those_of_the_moment_put_by_put_however_many_there_are():
    train = partition()
    for number in range(1, 6):
        put(train, number, 2_000, ("x", "y"))
    put(train, 6, 2, ("y",), indexes=[1, 2_001])
    snapshot = train.cells.snapshot()
    clear(train, np.arange(0, 10_000, 3))
    put(train, 7, 2, ("x",))
    found = list(live_cells(snapshot))
    assert [each.put.put_id[-1] for each in found] == [3, 4, 5, 6, 1, 1, 2, 2]
    assert freed(found)[0] == (1, ["x"], list(range(2_000)))
    assert freed(found)[1] == (1, ["y"], [0, *range(2, 2_000)])
    now = {}
    for each in live(train):
        for name in each.field_names:
            now[each.put.put_id[-1], name] = each.rows.tolist()
    assert sorted(now) == [(number, name) for number in range(1, 6) for name in "xy"] + [(6, "y")]
    assert now[1, "x"] == [row for row in range(2_000) if row % 3]
    assert now[1, "y"] == [row for row in range(2_000) if row % 3 and row != 1]
    assert now[5, "x"] == [row for row in range(2_000) if (8_000 + row) % 3]


def test_clearing_frees_cells_and_whole_puts():
    train = partition()
    put(train, 1, 2, ("x", "y"))
    put(train, 2, 2, ("x",))
    count, cells = clear(train, np.array([3, 1, 1, 99]))
    assert (count, freed(cells)) == (2, [(1, ["x", "y"], [1]), (2, ["x"], [1])])
    assert freed(clear(train, np.array([0, 2]))[1]) == [(1, [], None), (2, [], None)]
    assert clear(train, np.array([0, 2])) == (0, [])
    assert not train.cells.fields
    assert train.cells.puts.all() == []


def test_failing_frees_cells_and_takes_no_new_ones():
    train = partition()
    put(train, 1, 3, ("x",))
    assert freed(update(train, [0, 2], state="failed")) == [(1, ["x"], [0, 2])]
    assert freed(put(train, 2, 2, ("x", "y"), indexes=[1, 2])) == [(1, [], None), (2, ["x", "y"], [1])]
    assert freed(put(train, 3, 2, ("x",), indexes=[0, 2])) == [(3, [], None)]
    assert freed(put(train, 4, 1, ("x",), state="failed")) == [(4, [], None)]
    assert where(train, ["x", "y"], [1]) == [(("x", "y"), [(2, 0, 1)])]
    assert [put.put_id[-1] for put in train.cells.puts.all()] == [2]


def test_slots_of_puts_that_are_gone_are_used_again():
    train = partition()
    for number in range(1, 100):
        put(train, number, 2, ("x", "y"))
        clear(train, np.array([2 * number - 2, 2 * number - 1]))
    for number in range(100, 150):  # a column overwritten again and again
        put(train, number, 1, ("x",), **({"indexes": [198]} if number > 100 else {}))
    assert train.cells.puts.count <= 2
    assert len(list(train.cells.puts.all())) == 1
    with pytest.raises(LookupError):
        train.cells.puts.get(1 - (train.cells.fields["x"].cell.data[train.table.find(np.array([198]))][0] >> 32))


# Lengths of rows


def lengths(train, name="x"):
    return train.cells.fields[name].lengths(slice(0, train.table.count)).tolist()


def test_lengths_of_jagged_rows_follow_their_cells():
    train = partition(fields=(FieldSpec("x", layout=J),))
    insert(train, 3, [jagged("x", [4, 0, 9])])
    insert(train, 2, [dense("x", 5, dtype="int64")])
    update(train, [1, 3], [jagged("x", [7, 8])])
    assert lengths(train) == [4, 7, 9, 8, 5]
    update(train, [0], state="failed")
    update(train, [0, 2], [jagged("x", [1, 2])])
    assert lengths(train) == [-1, 7, 2, 8, 5]


def test_lengths_are_those_of_the_first_dimension_that_differs():
    """Also of rows that were there before it did, for which it is written once."""
    train = partition()

    def ragged(shape, *sizes):
        spec = FieldSpec("x", dtype="int64", layout=J, row_shape=shape)
        return ColumnWrite(spec=spec, extents=np.array(sizes))

    insert(train, 2, [dense("x", 3, 5, dtype="int64")])
    insert(train, 1, ["other"])
    assert lengths(train) == [3, 3, -1]
    insert(train, 1, [dense("x", 3, 7, dtype="int64")])
    assert lengths(train) == [5, 5, -1, 7]
    insert(train, 2, [ragged((3, -1), [6], [8])])
    insert(train, 1, [dense("x", 3, 9, dtype="int64")])
    assert lengths(train) == [5, 5, -1, 7, 6, 8, 9]
    insert(train, 2, [ragged((-1, 4), [1], [2])])
    insert(train, 2, [ragged((3, -1), [5], [6])])
    assert train.cells.fields["x"].spec.row_shape == (-1, -1)
    assert lengths(train) == [3, 3, -1, 3, 3, 3, 3, 1, 2, 3, 3]
    update(train, [2, 0], [ragged((-1, 4), [2], [7])])
    assert lengths(train)[:3] == [7, 3, 2]


def test_rows_without_a_size_have_no_length():
    train = partition(fields=(FieldSpec("declared", layout=J),))
    insert(train, 2, [dense("x"), ColumnWrite(spec=FieldSpec("text", layout=OBJECT, row_shape=()))])
    assert [lengths(train, name) for name in ("x", "text", "declared")] == [[-1, -1]] * 3
    assert not any(field.has_lengths for field in train.cells.fields.values())


# Fields that are forgotten


def test_a_field_goes_with_its_last_cell():
    train = partition(fields=(FieldSpec("declared", layout=J),))
    insert(train, 3, [jagged("x", [1, 2, 3]), dense("declared", 4), dense("y")])
    clear(train, np.array([0, 2]))
    assert list(train.cells.fields) == ["declared", "x", "y"]
    columns = set(train.table.columns)
    update(train, [1], state="failed")
    assert list(train.cells.fields) == ["declared"]
    assert train.cells.fields["declared"].spec == FieldSpec("declared", layout=J)
    assert columns - set(train.table.columns) == {"cell/x", "length/x", "cell/y"}
    assert [train.cells.last_spec(name).row_shape for name in ("x", "declared", "y")] == [(-1,), (4,), ()]
    assert train.cells.last_spec("unknown") is None
    insert(train, 2, [dense("x", 7, dtype="int8"), dense("declared", 2, 2)])
    assert lengths(train)[-2:] == [7, 7]
    assert train.cells.fields["declared"].spec.row_shape == (2, 2)
    assert list(train.cells.former_specs) == ["y"]


def test_a_field_whose_cells_all_are_replaced_may_be_another():
    train = partition()
    insert(train, 3, [jagged("x", [1, 2, 3])])
    update(train, [2, 0], [jagged("x", [5, 5])])
    assert lengths(train) == [5, 2, 5]
    with pytest.raises(FieldMismatchError):
        update(train, [2, 0], [dense("x", 4, dtype="int8")])
    update(train, [2, 0, 1], [dense("x", 4, dtype="int8")])
    assert train.cells.fields["x"].spec == FieldSpec("x", dtype="int8", layout=D, row_shape=(4,))
    assert "length/x" not in train.table.columns
    assert lengths(train) == [4, 4, 4]
    insert(train, 1, [dense("x", 6, dtype="int8")])
    assert lengths(train) == [4, 4, 4, 6]


def test_failed_rows_leave_no_field():
    train = partition()
    insert(train, 2, ["x"], state="failed")
    update(train, [0], ["y"])
    assert not train.cells.fields
    assert train.cells.puts.all() == []


def test_former_fields_are_bounded():
    train = partition()
    (row,) = insert(train, 1, ())
    for number in range(1_100):
        update(train, [row], [dense(f"x{number}")])
        (row,), _ = insert(train, 1, ()), clear(train, np.array([row]))
    assert len(train.cells.former_specs) == 1024
    assert next(iter(train.cells.former_specs)) == "x76"
    assert not [name for name in train.table.columns if "/" in name]


def test_rows_of_one_size_fit_a_field_that_is_fixed_in_that_dimension():
    train = partition(fields=(FieldSpec("ids", layout=J, row_shape=(3, -1)),))
    first = ColumnWrite(spec=FieldSpec("ids", dtype="int64", layout=J, row_shape=(-1, 4)), extents=np.array([[3]]))
    second = ColumnWrite(spec=FieldSpec("ids", dtype="int64", layout=J, row_shape=(-1, 7)), extents=np.array([[3]]))
    insert(train, 1, [first])
    insert(train, 1, [second])
    assert train.cells.fields["ids"].spec.row_shape == (3, -1)
    assert lengths(train, "ids") == [4, 7]
    other = ColumnWrite(spec=FieldSpec("ids", dtype="int64", layout=J, row_shape=(-1, 7)), extents=np.array([[2]]))
    insert(train, 1, [other])
    assert train.cells.fields["ids"].spec.row_shape == (-1, -1)


FIELDS = ["a", "b", "c"]
WRITES = st.tuples(st.sampled_from(["insert", "update", "clear", "fail"]), st.sets(st.sampled_from(FIELDS)),
                   st.sets(st.integers(0, 11), min_size=1))  # fmt: skip


@given(st.lists(WRITES, max_size=12), st.lists(st.integers(0, 11), unique=True))
def test_rows_have_the_fields_that_were_written_to_them(writes, asked):
    train, has, failed = partition(), {}, set()
    for kind, fields, indexes in writes:
        there = sorted(index for index in indexes if index in has)
        if kind == "insert" and len(has) < 12:
            for index in insert(train, len(indexes), [dense(name) for name in sorted(fields)]):
                has[index] = set(fields)
        elif kind == "update" and there and fields:
            update(train, there, [dense(name) for name in sorted(fields)])
            for index in there:
                has[index] |= set() if index in failed else fields
        elif kind == "clear" and there:
            clear(train, np.array(there))
            failed -= set(there)
            for index in there:
                del has[index]
        elif kind == "fail" and there:
            update(train, there, state=SampleState.FAILED)
            failed |= set(there)
            for index in there:
                has[index] = set()
    rows = [index for index in asked if index in has]
    found = train.cells.produced_by(train.table.find(np.array(rows, np.int64)))
    assert {name: mask.tolist() for name, mask in found.items()} == {
        name: [name in has[row] for row in rows] for name in train.cells.fields if any(name in has[row] for row in rows)
    }
