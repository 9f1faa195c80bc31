"""custom_meta: types, merging, conditions and orders."""

import itertools
import operator
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from domain_support import clear, insert, meta, partition
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.custom_meta import JSON_NULL, MetaColumn
from tq_service.errors import InvalidArgumentError
from tq_service.state.cells import CustomMeta
from tq_service.state.plan import Condition
from tq_service.state.table import RowTable

NOTHING = object()


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
    return column.objects()[0] if column is not None and column.has_value[0] else NOTHING


@pytest.mark.parametrize("values", [(1, -(2**63)), (0.5, float("inf")), (True, False), ("", "a\u00e9\x00b")])
def test_each_type_comes_back_as_it_was(table, values):
    custom = CustomMeta(table)
    write(custom, [{"v": each} for each in values], [0, 2])
    assert [value(custom, "v", position) for position in range(4)] == [values[0], NOTHING, values[1], NOTHING]
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
    assert custom.kinds == {"v": "f"}
    write(custom, [{"v": 2**53 + 1}], [3])
    assert (value(custom, "v", 3), custom.kinds) == (2**53 + 1, {"v": "fJ"})
    exact = CustomMeta(four_rows())
    write(exact, [{"v": 2**53 + 1}], [0])
    write(exact, [{"v": 0.5}], [1])
    assert ([value(exact, "v", position) for position in (0, 1)], exact.kinds) == ([2**53 + 1, 0.5], {"v": "iJ"})


OTHERS = [None, [], [1, [2.5, None]], {}, {"a": {"b": [True]}}, 2**70]


@pytest.mark.parametrize(("kind", "first"), [("i", 1), ("f", 1.5), ("b", True), ("O", "a")])
@pytest.mark.parametrize("second", [1, 1.5, True, "a", *OTHERS])
def test_values_of_another_type_are_kept_as_json_beside(table, kind, first, second):
    custom = CustomMeta(table)
    write(custom, [{"v": first}, {"v": JSON_NULL if second is None else second}], [0, 1])
    typed = {"i": (int, float), "f": (int, float), "b": bool, "O": str}[kind]
    is_typed = isinstance(second, typed) and (not isinstance(second, bool) or kind == "b") and second != 2**70
    assert [value(custom, "v", position) for position in (0, 1)] == [first, second]
    assert custom.arrays("v")[1][:2].tolist() == [True, is_typed]
    assert custom.kinds == {"v": "f" if second == 1.5 and kind == "i" else kind + "J" * (not is_typed)}
    write(custom, [{"v": first}], [1])
    write(custom, [{"v": None}], [0])
    assert [value(custom, "v", position) for position in (0, 1)] == [NOTHING, first]
    assert custom.arrays("v")[1][:2].tolist() == [False, True]


def test_the_first_typed_value_decides_whatever_json_was_there_before(table):
    custom = CustomMeta(table)
    write(custom, [{"v": JSON_NULL}, {"v": [1]}], [0, 1])
    assert (custom.kinds, custom.arrays("v"), custom.has("v")) == ({"v": "J"}, None, False)
    write(custom, [{"v": 3}], [0])
    assert (custom.kinds, custom.has("v")) == ({"v": "iJ"}, True)
    assert [value(custom, "v", position) for position in (0, 1)] == [3, [1]]


@pytest.mark.parametrize("texts", [["3", "null"], ["null", "3"]])
def test_the_form_in_which_a_client_sends_a_value_does_not_matter(texts):
    custom = CustomMeta(four_rows())
    column = MetaColumn(name="v", values=np.zeros(2, bool), present=np.zeros(2, bool), json=np.array(texts, object))
    custom.check([column], 2)
    custom.write([column], rows(0, 1))
    custom.write([replace(column, json=np.array(["4", None], object))], rows(2, 3))
    assert custom.kinds == {"v": "iJ"}
    assert custom.arrays("v")[0][:3].tolist() == [3 * (texts[0] == "3"), 3 * (texts[1] == "3"), 4]


def test_numbers_that_json_does_not_have_are_refused_beside_text(table):
    custom = CustomMeta(table)
    write(custom, [{"v": float("nan")}, {"v": [1]}], [0, 1])
    assert (np.isnan(value(custom, "v", 0)), value(custom, "v", 1)) == (True, [1])
    write(custom, [{"w": "a"}], [0])
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match=r"custom_meta\[0\]\['w'\] is .*in a column of string values"):
            custom.check(meta([{"w": wrong}]), 1)


ANY_VALUE = st.sampled_from(
    [0, 1, -3, 2**60, 0.5, -0.0, float("inf"), True, False, "", "a", None, JSON_NULL, [], [1], {"a": 1}]
)


@examples(200)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), ANY_VALUE), min_size=1, max_size=5), max_size=12))
def test_values_are_those_written_last_whatever_their_types(writes):
    table = RowTable()
    table.append(6)
    custom, expected = CustomMeta(table), {}
    for one in writes:
        entries = dict(one)
        try:
            columns = meta([{"v": value} for value in entries.values()])
            custom.check(columns, len(entries))
        except InvalidArgumentError as error:
            assert "inf" in error.message
            continue
        custom.write(columns, rows(*entries))
        expected.update(entries)
    for position, last in expected.items():
        got = value(custom, "v", position)
        assert got == (NOTHING if last is None else None if last is JSON_NULL else last)
        assert (type(got) is bool) == (type(last) is bool)
    typed = custom.arrays("v")
    present = np.zeros(6, bool) if typed is None else typed[1][:6]
    column = custom.read("v", np.arange(6))
    has_json = np.zeros(6, bool) if column is None else column.has_json
    assert not (present & has_json).any()
    again = RowTable()
    restored = CustomMeta(again)
    restored.declare(custom.kinds)
    again.restore(table.snapshot())
    assert [value(restored, "v", position) for position in range(6)] == [value(custom, "v", p) for p in range(6)]


def test_counts_and_names_are_checked(table):
    custom = CustomMeta(table)
    with pytest.raises(InvalidArgumentError, match="2 values for 3 samples"):
        custom.check(meta([{"v": 1}, {"v": 2}]), 3)
    with pytest.raises(InvalidArgumentError, match="duplicate columns"):
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


NUMBERS = [
    0, 1, -1, 0.5, -0.0, 2.5, 2**53 - 1, 2**53, 2**53 + 1, 2.0**53, -(2**53) - 1, 2**63 - 1, -(2**63), 2.0**63,
    -(2.0**63), 2**62 + 1, 1e300, float("inf"), -float("inf"), float("nan"), True, False, 2**1100, 2**63,
]  # fmt: skip
COMPARED = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.bool_])
def test_numbers_are_compared_as_the_numbers_they_are(dtype):
    """As Python compares them, which converts neither; so an integer is not that which a float rounds it to."""
    of_dtype = {np.int64: int, np.float64: float, np.bool_: bool}[dtype]
    known = [each for each in NUMBERS if isinstance(each, of_dtype) and (dtype != np.int64 or -(2**63) <= each < 2**63)]
    data = np.array(known, dtype)
    for name, compare in COMPARED.items():
        for value in NUMBERS:
            expected = [bool(compare(each, value)) for each in known]
            assert Condition("v", name, (value,)).holds(data).tolist() == expected, (name, value)
    for values in itertools.combinations(NUMBERS, 2):
        expected = [any(each == value for value in values) for each in known]
        assert Condition("v", "in", values).holds(data).tolist() == expected, values
    assert not Condition("v", "in", ()).holds(data).any()
