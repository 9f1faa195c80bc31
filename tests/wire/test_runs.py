"""Integers of messages; the samples of a batch travel as ranges where that is shorter, and come back as they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_service.client import BatchMeta
from tq_service.errors import InvalidArgumentError
from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.metadata import CellRuns, decode_integers, expand_runs, read_indexes, runs_of, set_indexes

STRETCHES = st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(1, 200)), max_size=12)


def sent(indexes):
    message = pb.BatchMeta()
    set_indexes(message, indexes)
    return pb.BatchMeta.FromString(message.SerializeToString())


def ranges(firsts, counts, listed=()):
    return pb.BatchMeta(global_indexes=listed, index_ranges=pb.IndexRanges(first_indexes=firsts, index_counts=counts))


@pytest.mark.parametrize("count", [0, 3, 64, 65, 1000])
def test_integers_of_a_repeated_field(count):
    values = [(-1) ** i * i * 2**40 for i in range(count)]
    array = decode_integers(pb.Int64Values(values=values).values)
    assert array.dtype == np.int64
    assert array.tolist() == values
    array[:] = 0  # memory of its own


@given(STRETCHES)
def test_samples_come_back_in_their_order(stretches):
    parts = [np.arange(first, first + count) for first, count in stretches]
    indexes = np.concatenate([np.zeros(0, np.int64), *parts])
    assert read_indexes(sent(indexes)).tolist() == indexes.tolist()


@given(st.lists(st.integers(-(2**40), 2**40), max_size=200))
def test_samples_in_no_order_come_back_too(indexes):
    assert read_indexes(sent(np.array(indexes, np.int64))).tolist() == indexes


def test_a_million_samples_that_follow_each_other_take_a_few_bytes():
    message = sent(np.arange(5, 5 + (1 << 20)))
    assert message.ByteSize() < 32
    meta = BatchMeta.from_proto(message)
    assert meta.size == 1 << 20
    assert (meta.global_indexes[0], meta.global_indexes[-1]) == (5, 4 + (1 << 20))


def test_a_range_of_samples_is_sent_without_an_array_of_them():
    assert read_indexes(sent(range(7, 1007))).tolist() == list(range(7, 1007))
    assert list(sent(range(3)).global_indexes) == [0, 1, 2]
    assert sent(range(1 << 50)).ByteSize() < 32


@pytest.mark.parametrize("count", [0, 3, 1000])
def test_runs_of_cells_travel_as_they_lie_in_memory(count):
    order = np.random.default_rng(0).permutation(count)
    runs = CellRuns(field_names=("x",), put_indexes=order % 3, first_rows=order << 7, row_counts=order + 1)
    message = pb.CellRuns.FromString(runs.to_proto().SerializeToString())
    back = CellRuns.from_proto(message)
    assert back.field_names == ("x",)
    for name in ("put_indexes", "first_rows", "row_counts"):
        assert getattr(back, name).tolist() == getattr(runs, name).tolist()
    assert 12 * count <= message.ByteSize() <= 12 * count + 32


def test_a_few_samples_are_listed():
    assert list(sent(np.arange(8)).global_indexes) == list(range(8))


@pytest.mark.parametrize(
    "message",
    [
        ranges([0, 5], [1]),
        ranges([0], [0]),
        ranges([0], [-3]),
        ranges([0], [2], listed=[7]),
        ranges([0], [2**62]),
        ranges([0, 0], [2**62, 2**62]),
    ],
    ids=["counts lack", "empty", "negative", "both forms", "too many", "too many together"],
)
def test_ranges_that_are_none_are_refused(message):
    with pytest.raises(InvalidArgumentError, match="index_ranges"):
        read_indexes(message)


@given(st.lists(st.integers(0, 60), max_size=60, unique=True))
def test_runs_are_those_of_neighbours_and_expand_again(values):
    values = np.array(sorted(values), np.int64)
    firsts, counts = runs_of(values)
    assert expand_runs(firsts, counts).tolist() == values.tolist()
    assert (firsts[1:] > (firsts + counts)[:-1]).all()
