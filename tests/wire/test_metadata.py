"""Specs, states and custom_meta come back as they were sent, and malformed ones are refused."""

import copy
import json
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tq_service as tq
from tq_service.custom_meta import MetaColumn
from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldSpec, Layout, SampleState
from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.metadata import (
    BATCH_UNITS,
    KEY_MODES,
    LAYOUTS,
    OPERATORS,
    STATES,
    check_json,
    decode_meta_columns,
    decode_produced,
    decode_spec,
    encode_meta_columns,
    encode_produced,
    encode_spec,
    meta_columns_to_rows,
    rows_to_meta_columns,
)

TRUE = pb.BoolValues(values=[True])
VALUES = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(st.characters(exclude_categories=["Cs"])),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | VALUES["string"],
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(VALUES["string"], inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.fixed_dictionaries({}, optional=VALUES), max_size=20)
MIXED_ROWS = st.lists(st.fixed_dictionaries({}, optional={"v": JSON, "w": JSON}), max_size=8)


@pytest.mark.parametrize(
    "spec",
    [
        FieldSpec("a"),
        FieldSpec("b", dtype="bfloat16", layout=Layout.JAGGED, row_shape=(-1, 3)),
        FieldSpec("c", dtype="int64", layout=Layout.DENSE, row_shape=()),
        FieldSpec("d", layout=Layout.OBJECT),
    ],
)
def test_spec_round_trip(spec):
    assert decode_spec(pb.FieldSpec.FromString(encode_spec(spec).SerializeToString())) == spec


def test_enums_round_trip():
    words = {LAYOUTS: [*Layout], STATES: [*SampleState], KEY_MODES: ["upsert", "new", "existing"]}
    words |= {BATCH_UNITS: ["sample", "group"], OPERATORS: ["==", "!=", "<", "<=", ">", ">=", "in"]}
    for enum, expected in words.items():
        assert [enum.decode(enum.encode(word)) for word in (*expected, None)] == [*expected, None]
        assert len({enum.encode(word) for word in (*expected, None)}) == len(expected) + 1
        with pytest.raises(InvalidArgumentError, match="77"):
            enum.decode(77)
        with pytest.raises(InvalidArgumentError, match=f"mode is 'other'; expected one of {expected[0]}, ") as info:
            enum.encode("other", "mode")
        assert info.value.field == "mode"


@settings(deadline=None)
@given(ROWS)
def test_rows_round_trip(rows):
    messages = [
        pb.MetaColumn.FromString(m.SerializeToString()) for m in encode_meta_columns(rows_to_meta_columns(rows))
    ]
    back = meta_columns_to_rows(decode_meta_columns(messages, len(rows)), len(rows))
    assert back == rows
    assert [{name: type(value) for name, value in row.items()} for row in back] == [
        {name: type(value) for name, value in row.items()} for row in rows
    ]


@settings(deadline=None)
@given(MIXED_ROWS)
def test_rows_of_any_json_round_trip(rows):
    given_rows = [{name: tq.JSON_NULL if value is None else value for name, value in row.items()} for row in rows]
    messages = encode_meta_columns(rows_to_meta_columns(given_rows))
    back = meta_columns_to_rows(check_json(decode_meta_columns(messages, len(rows))), len(rows))
    assert back == rows


def test_scalars_of_numpy_and_torch_are_taken():
    rows = [{"n": np.int32(3), "x": torch.tensor(0.5), "b": np.bool_(True), "s": np.str_("a")}, {"n": torch.tensor(4)}]
    back = meta_columns_to_rows(rows_to_meta_columns(rows), 2)
    assert back == [{"n": 3, "x": 0.5, "b": True, "s": "a"}, {"n": 4}]
    assert [type(value) for value in back[0].values()] == [int, float, bool, str]


def test_integers_among_floats_become_floats():
    (column,) = rows_to_meta_columns([{"x": 1}, {"x": 2.5}, {}])
    assert column.values.dtype == np.float64
    assert column.values[:2].tolist() == [1.0, 2.5]
    assert column.present.tolist() == [True, True, False]


def nested(depth):
    return [nested(depth - 1)] if depth else 1


class Reading(Mapping):
    """A mapping that is no dict."""

    def __getitem__(self, name):
        return {"k": 1}[name]

    def __iter__(self):
        return iter(["k"])

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    "rows",
    [
        [{"k": 1, "l": "a"}, {"l": "b", "k": 2}],
        [{"k": 1}, {"l": 2}],
        [{"k": 1}, Reading(), OrderedDict(k=3)],
        [{}, {}],
    ],
)
def test_rows_may_differ_in_names_and_type(rows):
    assert meta_columns_to_rows(rows_to_meta_columns(rows), len(rows)) == [dict(row) for row in rows]


def test_a_mapping_that_makes_up_values_is_not_asked_to():
    rows = [defaultdict(int, k=1), defaultdict(int, l=2)]
    assert meta_columns_to_rows(rows_to_meta_columns(rows), 2) == [{"k": 1}, {"l": 2}]
    assert [len(row) for row in rows] == [1, 1]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{}, {"k": {1}}], r"custom_meta\[1\]\['k'\] has type set"),
        ([{}, {"k": [0, {"a": b"b"}]}], r"custom_meta\[1\]\['k'\]\[1\]\['a'\] has type bytes; expected a JSON value"),
        ([{"k": {"a": {3: 1}}}], r"custom_meta\[0\]\['k'\]\['a'\] has the key 3; expected a string"),
        ([{"k": [float("nan")]}], r"custom_meta\[0\]\['k'\] is \[nan\], which cannot be encoded as JSON"),
        ([{"k": "a"}, {"k": float("inf")}], r"custom_meta\[1\]\['k'\] is inf, in a column of string values"),
        ([{"k": ["\ud800"]}], r"custom_meta\[0\]\['k'\] is .* which cannot be encoded as JSON"),
        ([{"k": nested(33)}], r"custom_meta\[0\]\['k'\] nests more than 32 lists and objects"),
        ([{1: 2}], "key 1"),
        ([{"k": 1}, 5], r"custom_meta\[1\] has type int"),
    ],
)
def test_wrong_values_are_refused_by_row_and_key(rows, words):
    with pytest.raises(InvalidArgumentError, match=words):
        rows_to_meta_columns(rows)


@pytest.mark.parametrize("integer", [(1 << 53) + 1, -(1 << 53) - 1, 1 << 60, 1 << 63, 10**400])
def test_integers_that_floats_do_not_hold_are_kept_beside_floats(integer):
    (column,) = rows_to_meta_columns([{"id": 0.5}, {}, {"id": integer}])
    assert (column.values.dtype, column.present.tolist()) == (np.float64, [True, False, False])
    assert column.json.tolist() == [None, None, str(integer)]
    (column,) = rows_to_meta_columns([{"id": 0.5}, {"id": 1 << 53}, {"id": -(1 << 53)}])
    assert column.values.tolist() == [0.5, 2.0**53, -(2.0**53)]


@pytest.mark.parametrize(
    ("values", "kind", "typed"),
    [
        ([1, "a", 2], "i", [0, 2]), (["a", 1, None], "O", [0]), ([True, 1, False], "b", [0, 2]), ([[1], 2], "i", [1]),
        ([2**60, 0.5], "i", [0]), ([0.5, True, float("nan")], "f", [0, 2]), ([2**70, 1], "i", [1]),
    ],
)  # fmt: skip
def test_the_first_scalar_decides_the_type_of_a_column(values, kind, typed):
    (column,) = rows_to_meta_columns([{"v": value} for value in values])
    assert (column.values.dtype.kind, np.flatnonzero(column.present).tolist()) == (kind, typed)
    (again,) = check_json(decode_meta_columns(encode_meta_columns([column]), len(values)))
    (mine, theirs) = (meta_columns_to_rows([one], len(values)) for one in (column, again))
    assert str(mine) == str(theirs) == str([{} if value is None else {"v": value} for value in values])


def test_what_json_has_is_taken_as_numpy_and_torch_have_it():
    given = {"a": np.arange(3), "b": (torch.tensor([0.5]), {"c": np.str_("x")}), "d": tq.JSON_NULL, "e": {"f": None}}
    rows = [given, {"a": None, "d": 1, "e": OrderedDict(g=np.bool_(True))}]
    (back, other) = meta_columns_to_rows(decode_meta_columns(encode_meta_columns(rows_to_meta_columns(rows)), 2), 2)
    assert back == {"a": [0, 1, 2], "b": [[0.5], {"c": "x"}], "d": None, "e": {"f": None}}
    assert other == {"d": 1, "e": {"g": True}}


def test_null_stays_itself():
    for again in (pickle.loads(pickle.dumps(tq.JSON_NULL)), copy.deepcopy([tq.JSON_NULL])[0]):
        assert again is tq.JSON_NULL
    assert repr(tq.JSON_NULL) == "tq.JSON_NULL"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (' [1 , "\\u00e9", {"b":1,"a":1e0}]', '[1,"é",{"b":1,"a":1.0}]'), ("null", "null"),
        ("\n{}", "{}"), (json.dumps("[" * 50), '"' + "[" * 50 + '"'), ("[" * 32 + "]" * 32, "[" * 32 + "]" * 32),
        ("9" * 400, "9" * 400),
    ],
)  # fmt: skip
def test_json_is_kept_in_one_form(text, kept):
    (column,) = check_json(decode_meta_columns([pb.MetaColumn(name="k", json_values=[text, text])], 2))
    assert column.json.tolist() == [kept, kept]


@pytest.mark.parametrize(
    "text",
    ["", "nul", "{'a': 1}", "[1,]", "NaN", "[-Infinity]", "1e999", '"\\ud800"', "[" * 33 + "]" * 33, "[" * 9999,
     '{"a":' * 33 + "1" + "}" * 33, "1 2", "9" * 9999],
)  # fmt: skip
def test_what_is_no_json_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="custom_meta column 'k'") as caught:
        check_json(
            decode_meta_columns([pb.MetaColumn(name="k", kinds=b"\1\2", bool_values=TRUE, json_values=[text])], 2)
        )
    assert caught.value.field == "custom_meta"


@pytest.mark.parametrize("row", [{"tag": "\ud800"}, {"\ud800": 1}])
def test_text_that_is_not_unicode_is_refused_by_its_column(row):
    with pytest.raises(InvalidArgumentError, match=r"custom_meta column .*valid Unicode"):
        encode_meta_columns(rows_to_meta_columns([row]))


def test_absent_strings_decode_to_empty_text():
    columns = rows_to_meta_columns([{"s": "a"}, {}])
    (back,) = decode_meta_columns(encode_meta_columns(columns), 2)
    assert back.values.tolist() == ["a", ""]
    assert back.present.tolist() == [True, False]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([pb.MetaColumn(name="k", int64_values=pb.Int64Values(values=[1]))], "1 values; expected 2"),
        (
            [pb.MetaColumn(name="k", kinds=b"\1", int64_values=pb.Int64Values(values=[1]))],
            "1 kinds up to 1; expected 2",
        ),
        ([pb.MetaColumn(name="k", kinds=b"\1\4", int64_values=pb.Int64Values(values=[1]))], "2 kinds up to 4"),
        ([pb.MetaColumn(name="k", kinds=b"\1\2", bool_values=TRUE)], "0 json_values; expected 1"),
        ([pb.MetaColumn(name="k", json_values=["1"])], "1 json_values; expected 2"),
        ([pb.MetaColumn(name="k", kinds=b"\1\0", int64_values=pb.Int64Values())], "0 values; expected 1"),
        ([pb.MetaColumn(name="k", kinds=b"\0\0")], "has no values"),
        ([pb.MetaColumn(int64_values=pb.Int64Values(values=[1, 2]))], "no name"),
        ([pb.MetaColumn(name="k", bool_values=pb.BoolValues(values=[True, False]))] * 2, "appears twice"),
    ],
)
def test_malformed_columns_are_refused(messages, words):
    with pytest.raises(InvalidArgumentError, match=words):
        decode_meta_columns(messages, 2)


def test_a_column_without_any_value_keeps_its_type():
    column = MetaColumn(name="k", values=np.zeros(2), present=np.zeros(2, np.bool_))
    (back,) = decode_meta_columns(encode_meta_columns([column]), 2)
    assert back.values.dtype == np.float64
    assert not back.present.any()


@given(st.integers(0, 20).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), max_size=3)))
def test_which_samples_have_a_field_comes_back(rows):
    row_count = len(rows[0]) if rows else 5
    messages = encode_produced([np.array(row, np.bool_) for row in rows])
    assert [len(message) for message in messages] == [0 if all(row) else -(-row_count // 8) for row in rows]
    assert [mask.tolist() for mask in decode_produced(messages, row_count)] == rows


@pytest.mark.parametrize(("message", "row_count"), [(b"1", 9), (b"12", 8), (b"1", 0)])
def test_more_or_fewer_bits_than_samples_are_refused(message, row_count):
    with pytest.raises(InvalidArgumentError, match=f"{len(message)} bytes for {row_count} samples"):
        decode_produced([message], row_count)
