"""Specs, states and custom_meta come back as they were sent, and malformed ones are refused."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_service.errors import InvalidArgumentError
from tq_service.schema import FieldSpec, Layout, MetaColumn, SampleState
from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.metadata import (
    BATCH_UNITS,
    KEY_MODES,
    LAYOUTS,
    OPERATORS,
    STATES,
    decode_meta_columns,
    decode_spec,
    encode_meta_columns,
    encode_spec,
    meta_columns_to_rows,
    rows_to_meta_columns,
)

VALUES = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(st.characters(exclude_categories=["Cs"])),
}
ROWS = st.lists(st.fixed_dictionaries({}, optional=VALUES), max_size=20)


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
        with pytest.raises(InvalidArgumentError, match=f"mode is 'other', expected one of {expected[0]}, ") as info:
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
        ([{"k": 1}, {}, {"k": "a"}], r"custom_meta\[2\]\['k'\] is str.*int"),
        ([{"k": True}, {"k": 1}], r"custom_meta\[1\]\['k'\] is int.*bool"),
        ([{}, {"k": [1]}], r"custom_meta\[1\]\['k'\] is list"),
        ([{"k": None}], r"custom_meta\[0\]\['k'\] is NoneType"),
        ([{"k": np.zeros(2)}], r"custom_meta\[0\]\['k'\] is ndarray"),
        ([{}, {"k": 2**63}], r"custom_meta\[1\]\['k'\] is 9223372036854775808.*64 bits"),
        ([{"k": 0.5}, {"k": 2**70}], r"custom_meta\[1\]\['k'\] is 1180591620717411303424, expected .* 64 bits"),
        ([{"k": 0.5}, {"k": 10**400}], r"custom_meta\[1\]\['k'\] is 10+, expected an integer of 64 bits"),
        ([{1: 2}], "key 1"),
        ([{"k": 1}, 5], r"custom_meta\[1\] is int"),
    ],
)
def test_wrong_values_are_refused_by_row_and_key(rows, words):
    with pytest.raises(InvalidArgumentError, match=words):
        rows_to_meta_columns(rows)


@pytest.mark.parametrize("integer", [(1 << 53) + 1, -(1 << 53) - 1, 1 << 60])
def test_integers_that_floats_do_not_hold_are_refused_among_floats(integer):
    with pytest.raises(InvalidArgumentError, match=rf"custom_meta\[2\]\['id'\] is {integer}, while .* floats"):
        rows_to_meta_columns([{"id": 0.5}, {}, {"id": integer}])
    (column,) = rows_to_meta_columns([{"id": 0.5}, {"id": 1 << 53}, {"id": -(1 << 53)}])
    assert column.values.tolist() == [0.5, 2.0**53, -(2.0**53)]


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
        ([pb.MetaColumn(name="k", int64_values=pb.Int64Values(values=[1]))], "1 values, expected 2"),
        ([pb.MetaColumn(name="k", present=b"\1", int64_values=pb.Int64Values(values=[1]))], "1 samples.*expected 2"),
        ([pb.MetaColumn(name="k", present=b"\1\0", int64_values=pb.Int64Values())], "0 values, expected 1"),
        ([pb.MetaColumn(name="k", present=b"\0\0")], "has no values"),
        ([pb.MetaColumn(int64_values=pb.Int64Values(values=[1, 2]))], "no name"),
        ([pb.MetaColumn(name="k", bool_values=pb.BoolValues(values=[True, False]))] * 2, "comes twice"),
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
