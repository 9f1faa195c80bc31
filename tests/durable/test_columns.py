"""Columns come back from a snapshot as they were, to the last bit; what is no column of their type is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tq_service.durable.snapshot import ColumnPart, PartitionHeader, TableHeader, read_state
from tq_service.errors import NewerVersionError
from tq_service.journal import codec
from tq_service.journal.record_file import decode_part, encode_column
from tq_service.state.cells import Put
from tq_service.state.partition import PartitionFacts, PartitionSettings

SIZES = [1, 7, 1 << 16, (1 << 16) + 1]
PUTS = [Put("one", b"b" * 16, bytes([at] * 16)) for at in range(3)] + [Put("two", b"c" * 16, b"p" * 16), None]


def encoded(values):
    return list(encode_column(values.dtype, np.array_split(values, 3)))


def restored(values, parts):
    return np.concatenate([decode_part(part, values.dtype, Put._make) for part in parts])


def round_trip(values):
    return restored(values, encoded(values))


@given(arrays.arrays(st.sampled_from(["?", "u1", "<i4", "<i8", "<f8"]), st.integers(1, 40)))
def test_numbers_come_back_bit_by_bit(values):
    again = round_trip(values)
    assert again.dtype == values.dtype
    assert again.tobytes() == values.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_columns_of_many_parts_come_back(size):
    values = np.arange(size) * 3 - 5
    assert round_trip(values).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("values", "most_bytes"),
    [
        (((np.arange(1 << 16) // 64) << 32) + np.arange(1 << 16) % 64, 1 << 14),  # cells of puts of 64 rows
        (np.arange(1 << 16) % 200 + (1 << 40), 1 << 16),
        (np.full(1 << 16, 2, np.uint8), 100),
    ],
)
def test_integers_take_few_bytes(values, most_bytes):
    (part,) = encoded(values)
    assert len(codec.encode(part)) < most_bytes + 200
    assert restored(values, [part]).tolist() == values.tolist()


@pytest.mark.parametrize("values", [["a", None, "ä" * 9], [None, None], [*PUTS, *PUTS]])
def test_objects_come_back(values):
    column = np.empty(len(values), np.object_)
    for at, value in enumerate(values):
        column[at] = value
    assert round_trip(column).tolist() == values
    assert [type(value) for value in round_trip(column)] == [type(value) for value in values]


def test_what_is_no_column_of_the_type_is_refused():
    numbers = np.arange(9)
    (part,) = encoded(numbers)
    doubles, (_, content) = np.linspace(0, 1, 9), part
    for column, wrong in [
        (numbers, *encoded(doubles)),
        (numbers, ("values", (np.full(9, None),))),
        (np.full(9, None), part),
    ]:
        with pytest.raises(ValueError, match=f"expected values of {column.dtype}"):
            restored(column, [wrong])
    with pytest.raises(NewerVersionError, match="'squares'"):
        restored(numbers, [("squares", content)])


@pytest.mark.parametrize("count", [3, 10])
def test_a_snapshot_whose_columns_have_not_as_many_values_as_their_table_is_refused(count):
    facts = PartitionFacts(partition_id="train", incarnation=b"i" * 16, settings=PartitionSettings())
    header = PartitionHeader(facts=facts, tables={"rows": TableHeader(size=9, dtypes={"c": "<i8"})})
    parts = encoded(np.arange(count))
    with pytest.raises(ValueError, match=r"its table has 9 rows|could not broadcast"):
        read_state([header, *(ColumnPart(table="rows", column="c", part=part) for part in parts)])
