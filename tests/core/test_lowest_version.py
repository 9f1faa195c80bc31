"""The lowest version that a task has left, against a look at every row."""

import math

import numpy as np
import pytest
from domain_support import claim_rows, clear, insert, meta, release, reset, set_meta, task_of
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.custom_meta import JSON_NULL, MetaColumn
from tq_service.schema import StalenessLimit
from tq_service.serving import admission
from tq_service.serving.admission import LowestVersion
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.table import HELD, LIVE, UNCLAIMED

BOUNDED = PartitionSettings(staleness_limits=(StalenessLimit(task_name="t", max_versions=1),))


def versions(values):
    return [MetaColumn(name="version", values=np.array(values), present=np.ones(len(values), bool))]


def looked_at_one_by_one(partition):
    arrays = partition.meta.arrays("version")
    if arrays is None:
        return math.inf
    positions = partition.table.present_positions()
    left = np.isin(partition.state.data[positions], (LIVE, HELD)) & arrays[1][positions]
    if "t" in partition.tasks:
        left &= partition.tasks["t"].claim.data[positions] == UNCLAIMED
    values = arrays[0][positions][left]
    return values.min() if values.size else math.inf


def consume(partition, indexes):
    return claim_rows(partition, task_of(partition, "t"), indexes).request_id


def lowest_of(partition):
    return LowestVersion(partition, "t", "version")


class Rows:
    def __init__(self):
        self.partition = Partition("p", BOUNDED)
        self.lowest = lowest_of(self.partition)
        self.claims = []

    def add(self, count, version):
        entries = [{"version": version + row % 2} for row in range(count)]
        insert(self.partition, count, meta=entries, state="held" if version == 3 else "live")

    def add_without(self, count, _):
        insert(self.partition, count)

    def some(self, first, count, *, left):
        positions = self.partition.table.present_positions()
        if left:
            positions = positions[np.isin(self.partition.state.data[positions], (LIVE, HELD))]
            positions = positions[task_of(self.partition, "t").claim.data[positions] == UNCLAIMED]
        indexes = self.partition.table.index.data[positions]
        return indexes[first * 7 % max(1, indexes.size) :][:count]

    def consume(self, first, count):
        rows = self.some(count // 5, first * 3, left=True)
        if rows.size:
            self.claims.append(consume(self.partition, rows))

    def release(self, which, _):
        if self.claims:
            release(self.partition, task_of(self.partition, "t"), self.claims.pop(which % len(self.claims)))

    def clear(self, first, count):
        clear(self.partition, self.some(first, 40 * count, left=False))

    def set_version(self, first, count):
        rows = self.some(first, count, left=False)
        if rows.size:
            set_meta(self.partition, rows, versions([first % 5] * rows.size))

    def remove_version(self, first, count):
        rows = self.some(first, count, left=False)
        if rows.size:
            set_meta(self.partition, rows, meta([{"version": [None, JSON_NULL][first % 2]}] * rows.size))

    def reset(self, keep, _):
        reset(self.partition, task_of(self.partition, "t"), keep_consumed=keep % 2 == 0)
        self.claims.clear()


ACTIONS = st.tuples(
    st.sampled_from(
        [
            "add",
            "add",
            "add_without",
            "consume",
            "consume",
            "release",
            "clear",
            "set_version",
            "remove_version",
            "reset",
        ]
    ),
    st.integers(0, 12),
    st.integers(0, 9),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(admission, "_BLOCK_ROWS", 4)


@examples(80)
@given(st.lists(ACTIONS, max_size=30), st.randoms(use_true_random=False))
def test_it_is_that_of_all_rows_that_are_left(actions, random):
    rows = Rows()
    for name, first, second in actions:
        getattr(rows, name)(first + name.startswith("add"), second)
        if random.random() < 0.6:  # not after each, so that changes pile up
            lowest = rows.lowest.find()
            assert lowest == looked_at_one_by_one(rows.partition)


def test_a_reset_brings_the_lowest_back():
    train = Partition("p", BOUNDED)
    insert(train, 8, meta=[{"version": version} for version in range(8)])
    find = lowest_of(train).find
    assert find() == 0
    consume(train, range(6))
    assert find() == 6
    reset(train, task_of(train, "t"), keep_consumed=True)
    assert find() == 6
    reset(train, task_of(train, "t"), keep_consumed=False)
    assert find() == 0


def test_a_search_looks_at_few_blocks_however_many_there_are(monkeypatch):
    looked_at = []
    look = LowestVersion._lowest_of
    monkeypatch.setattr(
        LowestVersion,
        "_lowest_of",
        lambda self, block: looked_at.append(block) or look(self, block),
    )
    train = Partition("p", BOUNDED)
    insert(train, 4000, meta=[{"version": row // 400} for row in range(4000)])
    find = lowest_of(train).find
    assert find() == 0
    looked_at.clear()
    for batch in range(900):
        consume(train, range(4 * batch, 4 * batch + 4))
        insert(train, 4, meta=[{"version": 10}] * 4)
        assert find() == (4 * batch + 4) // 400
    assert len(looked_at) <= 4 * 900


def test_text_and_what_is_no_number_is_no_version():
    train = Partition("p", BOUNDED)
    insert(train, 2, meta=[{"version": float("nan")}, {"version": 2.5}])
    assert lowest_of(train).find() == 2.5
    words = Partition("p", BOUNDED)
    insert(words, 1, meta=[{"version": "three"}])
    assert lowest_of(words).find() == math.inf


def test_what_is_known_of_rows_that_were_cleared_is_forgotten():
    train = Partition("p", BOUNDED)
    lowest, sizes = lowest_of(train), []
    for batch in range(400):
        clear(train, np.array(insert(train, 50, meta=[{"version": batch}] * 50)) - 2000)
        assert lowest.find() == max(0, batch - 39)
        sizes.append(lowest._bounds.size)
    assert max(sizes) < 1500  # of 5000 blocks of 4 rows
    assert lowest_of(train).find() == lowest.find()


def test_a_search_begins_in_a_partition_of_which_all_rows_were_cleared():
    train = Partition("p", BOUNDED)
    clear(train, np.array(insert(train, 5000, meta=[{"version": 1}] * 5000)))
    lowest = lowest_of(train)
    assert lowest.find() == math.inf
    insert(train, 2, meta=[{"version": 3}, {"version": 2}])
    assert lowest.find() == 2


def test_versions_that_no_double_has_are_told_as_they_are():
    train = Partition("p", BOUNDED)
    insert(train, 1, meta=[{"version": 2**60 + 1}])
    find = lowest_of(train).find
    assert [find(), find()] == [2**60 + 1] * 2
