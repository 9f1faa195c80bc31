"""custom_meta: types, merging, conditions and orders."""

import tracemalloc

import numpy as np
import pytest
from domain_support import clear, insert, meta, partition

from tq_service.domain.tables.meta import Condition, CustomMeta
from tq_service.domain.tables.table import RowTable
from tq_service.errors import InvalidArgumentError
from tq_service.schema import MetaColumn


def four_rows():
    table = RowTable()
    table.append(4)
    return table


@pytest.fixture
def table():
    return four_rows()


def rows(*positions):
    return np.array(positions, np.int64)


def write(custom, entries, positions):
    columns = meta(entries)
    custom.check(columns, len(entries))
    custom.write(columns, rows(*positions))


def value(custom, name, position):
    column = custom.read(name, rows(position))
    return column.values.tolist()[0] if column.present[0] else None


@pytest.mark.parametrize("values", [(1, -(2**63)), (0.5, float("inf")), (True, False), ("", "a\u00e9\x00b")])
def test_each_type_comes_back_as_it_was(table, values):
    custom = CustomMeta(table)
    write(custom, [{"v": each} for each in values], [0, 2])
    assert [value(custom, "v", position) for position in range(4)] == [values[0], None, values[1], None]
    assert type(value(custom, "v", 0)) is type(values[0])


def test_writes_merge(table):
    custom = CustomMeta(table)
    write(custom, [{"a": 1, "b": "x"}, {"a": 2}], [0, 1])
    write(custom, [{"a": 3}, {"b": "y"}], [0, 1])
    assert [value(custom, "a", position) for position in (0, 1)] == [3, 2]
    assert [value(custom, "b", position) for position in (0, 1)] == ["x", "y"]
    assert custom.names() == ["a", "b"]
    assert [column.name for column in custom.read_all(rows(2, 3))] == []
    assert [column.name for column in custom.read_all(rows(0))] == ["a", "b"]
    assert custom.read("c", rows(0)) is None
    assert custom.arrays("c") is None


def test_integers_become_doubles_where_that_loses_nothing(table):
    custom = CustomMeta(table)
    write(custom, [{"v": 2**53}], [0])
    write(custom, [{"v": 0.5}], [1])
    write(custom, [{"v": 7}], [2])
    assert [value(custom, "v", position) for position in range(3)] == [2.0**53, 0.5, 7.0]
    with pytest.raises(InvalidArgumentError, match="holds double values, got int64"):
        custom.check(meta([{"v": 2**53 + 1}]), 1)
    exact = CustomMeta(four_rows())
    write(exact, [{"v": 2**53 + 1}], [0])
    with pytest.raises(InvalidArgumentError, match="holds int64 values, got double"):
        exact.check(meta([{"v": 0.5}]), 1)


@pytest.mark.parametrize(("first", "second"), [(1, "a"), ("a", 1), (True, 1), (1.5, True), ("a", 1.5)])
def test_other_types_are_refused(table, first, second):
    custom = CustomMeta(table)
    write(custom, [{"v": first}], [0])
    with pytest.raises(InvalidArgumentError, match="one type a column"):
        custom.check(meta([{"v": second}]), 1)


def test_counts_and_names_are_checked(table):
    custom = CustomMeta(table)
    with pytest.raises(InvalidArgumentError, match="2 values for 3 samples"):
        custom.check(meta([{"v": 1}, {"v": 2}]), 3)
    with pytest.raises(InvalidArgumentError, match="twice"):
        custom.check(meta([{"v": 1}]) * 2, 1)


def test_a_column_without_any_value_is_not_made(table):
    custom = CustomMeta(table)
    custom.write([MetaColumn(name="v", values=np.zeros(1, np.int64), present=np.zeros(1, np.bool_))], rows(0))
    assert not custom.has("v")


@pytest.mark.parametrize(
    ("operator", "values", "expected"),
    [
        ("==", (2,), [1]), ("!=", (2,), [0, 2]), ("<", (2,), [0]), ("<=", (2,), [0, 1]), (">", (2,), [2]),
        (">=", (2,), [1, 2]), ("in", (1, 3, 9), [0, 2]), ("in", (), []), (">", (1.5,), [1, 2]), ("==", (True,), [0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_conditions_on_numbers(operator, values, expected, dtype):
    data = np.array([1, 2, 3], dtype)
    assert np.flatnonzero(Condition("v", operator, values).holds(data)).tolist() == expected


@pytest.mark.parametrize(
    ("operator", "values", "expected"),
    [
        ("==", ("b",), [1]), ("!=", ("b",), [0, 2, 3]), ("<", ("b",), [0]), ("<=", ("b",), [0, 1]),
        (">", ("b",), [2, 3]), (">=", ("b",), [1, 2, 3]), ("in", ("a", "c"), [0, 3]), ("in", (), []),
        ("==", ("b\0",), [2]), ("in", ("b\0",), [2]),
    ],
)  # fmt: skip
def test_conditions_on_text(operator, values, expected):
    data = np.array(["a", "b", "b\0", "c"], object)
    holds = Condition("v", operator, values).holds(data)
    assert holds.dtype == np.bool_
    assert np.flatnonzero(holds).tolist() == expected


@pytest.mark.parametrize("operator", ["==", "!=", "<", "<=", ">", ">=", "in"])
def test_one_long_text_costs_no_memory_for_the_others(operator):
    data = np.array(["a"] * 5000 + ["x" * 16_000], object)
    condition = Condition("v", operator, ("a",))
    tracemalloc.start()
    try:
        condition.holds(data)
        assert tracemalloc.get_traced_memory()[1] < 100 * data.size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("data", "given"), [(np.array([1]), "a"), (np.array(["a"], object), 1)])
def test_a_condition_of_another_type_is_refused(data, given):
    with pytest.raises(InvalidArgumentError, match="compare it with"):
        Condition("v", "==", (given,)).holds(data)


def test_values_go_with_their_rows():
    kept = partition()
    insert(kept, 3000, meta=[{"v": index} for index in range(3000)])
    clear(kept, np.arange(2000))
    insert(kept, 1)
    positions = kept.table.find(rows(2000, 2999, 3000))
    column = kept.meta.read("v", positions)
    assert column.values[:2].tolist() == [2000, 2999]
    assert column.present.tolist() == [True, True, False]
