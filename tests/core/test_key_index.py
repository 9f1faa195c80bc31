"""Rows are found by their keys, however many there are, whatever their hashes, and whatever became of other rows."""

import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_settings import examples

from tq_service.state import groups as name_index
from tq_service.state import table as table_module
from tq_service.state.groups import KeyIndex, NameIndex
from tq_service.state.table import RowTable

HASHES = {
    "as they are": hash,
    "in few parts": lambda key: hash(key) & 0xFF,
    "all the same": lambda key: 12,
    "negative": lambda key: -abs(hash(key)),
}


@pytest.fixture(params=HASHES)
def hash_of(request, monkeypatch):
    """Make small indexes do what large ones do, with hashes as they may be."""
    for name, value in {"_MOST_IN_ONE_DICT": 16, "_FEW": 8, "_GAPS_FROM_BYTES": 0}.items():
        monkeypatch.setattr(name_index, name, value)
    for name, value in {"_LEAST_GAPS": 16, "_LEAST_CLOSED": 8}.items():
        monkeypatch.setattr(table_module, name, value)
    monkeypatch.setattr(name_index, "hash", HASHES[request.param], raising=False)
    return request.param


class Twin:
    """A key index, and a dict of what it has, changed alike."""

    def __init__(self):
        self.known = {}
        self.open()

    def open(self):
        self.table = RowTable()
        self.index = KeyIndex(self.table)

    def add(self, keys):
        keys = [key for key in keys if key not in self.known]
        first = self.table.next_index
        added = self.table.append(len(keys))
        self.index.column.write(added, keys)
        self.index.add(keys, np.arange(first, first + len(keys)))
        self.known.update(zip(keys, range(first, first + len(keys)), strict=True))
        self.table.close_gaps(len(keys))

    def remove(self, keys):
        gone = [key for key in keys if key in self.known]
        positions = self.table.find(np.array([self.known.pop(key) for key in gone], np.int64))
        self.index.on_rows_cleared(np.sort(positions))
        self.table.remove(np.sort(positions))

    def restore(self):
        snapshot, next_index = self.table.snapshot(), self.table.next_index
        self.open()
        self.table.restore(snapshot)
        self.table.rebuild(next_index)
        self.index.rebuild()

    def check(self, others):
        assert len(self.index) == len(self.known)
        assert sorted(self.index) == sorted(self.known)
        asked = [*self.known, *others]
        expected = [self.known.get(key, -1) for key in asked]
        assert self.index.find(asked).tolist() == expected
        positions = self.index.positions_of(asked)
        assert np.where(positions < 0, -1, self.table.index.data[positions]).tolist() == expected
        for key in asked[:20]:
            assert self.index.find([key]).tolist() == [self.known.get(key, -1)]
            assert (key in self.index) is (key in self.known)
        assert [self.index.column.data[int(at)] for at in positions[: len(self.known)][:20]] == list(self.known)[:20]


NAMES = [f"key {number}" for number in range(400)]
COUNTS = st.one_of(st.integers(1, 6), st.integers(8, 90))
KEYS = st.builds(lambda start, count: NAMES[start : start + count], st.integers(0, 380), COUNTS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "remove"]), KEYS),
        st.tuples(st.sampled_from(["remove all", "restore"]), st.just([])),
    ),
    max_size=40,
)


@settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_keys_are_found_as_in_a_dict(hash_of, steps):
    twin = Twin()
    for what, keys in steps:
        if what == "remove":
            twin.remove(keys)
        elif what == "remove all":
            twin.remove(list(twin.known))
        elif what == "restore":
            twin.restore()
        else:
            twin.add(keys)
        twin.check(NAMES[::7])


def test_keys_come_and_go_for_long(hash_of):
    twin, rng = Twin(), np.random.default_rng(3)
    for number in range(400):
        twin.add([f"{number}-{each}" for each in range(int(rng.integers(1, 40)))])
        if len(twin.known) > 600:
            oldest = list(twin.known)
            twin.remove(oldest[: int(rng.integers(1, 90))] if number % 50 else oldest)
        if number % 20 == 0:
            twin.check(["never", "was there"])


def test_a_key_whose_row_is_gone_may_be_given_again(hash_of):
    twin = Twin()
    for _ in range(5):
        twin.add(NAMES[:50])
        twin.add(["other"])
        twin.check(["none"])
        twin.remove([*NAMES[:50], "other"][1:])  # so that it is not emptied
        twin.check(["none"])
        twin.add(["other"])
        twin.check(["none"])
        twin.remove(["other"])


def test_nothing_is_left_of_an_index_without_keys(hash_of):
    twin = Twin()
    twin.add(NAMES)
    twin.remove(NAMES)
    assert (len(twin.index), twin.index._dicts) == (0, [{}])


def test_it_is_freed_in_steps(hash_of):
    twin = Twin()
    twin.add(NAMES[:10])
    twin.add(NAMES)
    left = list(twin.known)
    for some, _ in zip([list(each) for each in twin.index._dicts], twin.index.free(), strict=True):
        left = [key for key in left if key not in some]
        assert sorted(twin.index) == sorted(left)
    assert not left


def dict_bytes(index):
    return sum(map(sys.getsizeof, index._dicts))


def test_what_names_took_that_are_gone_is_given_back_step_by_step(monkeypatch):
    monkeypatch.setattr(name_index, "_MOST_IN_ONE_DICT", 1 << 10)
    index, names = NameIndex(), [f"name {number}" for number in range(1 << 16)]
    index.add(names[:1000], np.arange(1000))
    index.add(names[1000:], np.arange(1000, 1 << 16))
    full = dict_bytes(index)
    index.remove(names[:-300])
    before, copied = list(index._dicts), []
    for name in names[-300:-10]:
        index.remove([name])
        copied.append(sum(old is not new for old, new in zip(before, index._dicts, strict=True)))
        before = list(index._dicts)
    assert max(copied) == 1
    assert dict_bytes(index) < full / 8
    assert index.find(names[-11:]).tolist() == [-1, *range((1 << 16) - 10, 1 << 16)]


def test_a_name_more_makes_one_small_dict_of_many_larger(monkeypatch):
    """What is moved at once, as dicts grow, is a small share of all names."""
    monkeypatch.setattr(name_index, "_MOST_IN_ONE_DICT", 1 << 10)
    index, step, grown = NameIndex(), 1 << 9, []
    for start in range(0, 1 << 18, step):
        sizes = list(map(sys.getsizeof, index._dicts))
        index.add([f"name {number}" for number in range(start, start + step)], np.arange(start, start + step))
        moved = [len(some) for some, size in zip(index._dicts, sizes, strict=False) if sys.getsizeof(some) != size]
        grown.append(sum(moved) / len(index))
    assert max(grown[len(grown) // 8 :]) < 0.1


def test_parts_are_of_sizes_between_one_and_two():
    counts = np.bincount(name_index._PART_OF)
    assert (counts.size, counts.sum()) == (256, 1 << 16)
    assert counts.max() / counts.min() == pytest.approx(2, rel=0.02)
    assert np.unique(counts).size > 128
