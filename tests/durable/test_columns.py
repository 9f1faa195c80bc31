"""Columns come back from a snapshot as they were, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tq_service.durable.snapshot import ColumnPart, PartitionHeader, TableHeader, read_state
from tq_service.journal import codec
from tq_service.state.cells import Put
from tq_service.state.partition import PartitionFacts, PartitionSettings

SIZES = [1, 7, 1 << 16, (1 << 16) + 1]
PUTS = [Put("one", b"b" * 16, bytes([at] * 16)) for at in range(3)] + [Put("two", b"c" * 16, b"p" * 16), None]


def encoded(values):
    halves = [part for part in np.array_split(values, 2) if part.size]
    return [codec.encode(codec.compact(part)) for part in halves]


def round_trip(values):
    return np.concatenate([codec.unpack(part) for part in encoded(values)])


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
    data = codec.encode(codec.compact(values))
    assert len(data) < most_bytes + 200
    assert codec.unpack(data).tolist() == values.tolist()


def partition(*columns, size=9):
    facts = PartitionFacts(partition_id="train", incarnation=b"i" * 16, settings=PartitionSettings())
    header = PartitionHeader(facts=facts, tables={"rows": TableHeader(size=size, columns=("c",))})
    return [header, *(ColumnPart(table="rows", column="c", values=values) for values in columns)]


@pytest.mark.parametrize("values", [["a", None, "ä" * 9], [None, None], [*PUTS, *PUTS]])
def test_objects_come_back(values):
    column = np.fromiter(values, np.object_, len(values))
    parts = [codec.unpack(part) for part in encoded(column)]
    (restored,) = read_state(partition(*parts, size=len(values))).partitions
    again = restored.tables["rows"].columns["c"].values().tolist()
    assert again == values
    assert [type(value) for value in again] == [type(value) for value in values]
    assert len({id(each.storage_id) for each in again if isinstance(each, Put)}) <= 2


@pytest.mark.parametrize("count", [3, 10])
def test_a_snapshot_whose_columns_have_not_as_many_values_as_their_table_is_refused(count):
    parts = [codec.unpack(part) for part in encoded(np.arange(count))]
    with pytest.raises(ValueError, match="its table has 9 rows"):
        read_state(partition(*parts))
