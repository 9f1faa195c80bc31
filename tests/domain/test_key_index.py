"""Rows are found by their keys, however many there are, whatever their hashes, and whatever became of other rows."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tq_service.domain.tables import table as table_module
from tq_service.domain.tables.table import KeyIndex, RowTable, hashes_of

HASHES = {
    "as they are": hash,
    "in few slots": lambda key: hash(key) & 0xFF,
    "all the same": lambda key: 12,
    "two or three the same": lambda key: hash(key) // 3 % 40 << 57,
}


@pytest.fixture(params=HASHES)
def hash_of(request, monkeypatch):
    """Make small indexes do what large ones do, with hashes as they may be."""
    for name, value in {
        "_MANY_KEYS": 8,
        "_FEW_KEYS": 4,
        "_MOST_RECENT_KEYS": 16,
        "_LEAST_MOVED_SLOTS": 4,
        "_REBUILT_KEYS": 32,
    }.items():
        monkeypatch.setattr(table_module, name, value)
    for name, value in {"_AT_ONCE": 64, "_LEAST_GAPS": 16, "_LEAST_CLOSED": 8}.items():
        monkeypatch.setattr(table_module, name, value)
    monkeypatch.setattr(table_module, "hash", HASHES[request.param], raising=False)
    return request.param


class Twin:
    """A key index, and a dict of what it has, changed alike."""

    def __init__(self):
        self.known = {}
        self.open()

    def open(self):
        self.table = RowTable()
        self.index = KeyIndex(self.table)

    def add(self, keys, *, are_hashed):
        keys = [key for key in keys if key not in self.known]
        first = self.table.next_index
        added = self.table.append(len(keys))
        self.index.column.write(added, keys)
        self.index.add(keys, first, hashes_of(keys) if are_hashed else None)
        self.known.update(zip(keys, range(first, first + len(keys)), strict=True))
        self.table.close_gaps(len(keys))

    def make_room(self, count):
        for _ in self.index.make_room(count):
            self.check(["none"])

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
        assert self.index._recent.items() <= self.known.items()
        assert len(self.index) == len(self.known)
        assert sorted(self.index) == sorted(self.known)
        asked = [*self.known, *others]
        expected = [self.known.get(key, -1) for key in asked]
        for hashes in (None, hashes_of(asked)):
            positions = self.index.find(asked, hashes)
            assert np.where(positions < 0, -1, self.table.index.data[positions]).tolist() == expected
        for key in asked[:20]:
            assert (key in self.index) is (key in self.known)


NAMES = [f"key {number}" for number in range(400)]
COUNTS = st.one_of(st.integers(1, 6), st.integers(8, 90))
KEYS = st.builds(lambda start, count: NAMES[start : start + count], st.integers(0, 380), COUNTS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "add hashed", "remove", "make room"]), KEYS),
        st.tuples(st.sampled_from(["remove all", "restore"]), st.just([])),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        elif what == "make room":
            twin.make_room(len(keys))
        else:
            twin.add(keys, are_hashed=what == "add hashed")
        twin.check(NAMES[::7])


def test_keys_come_and_go_for_long(hash_of):
    twin, rng, was_moving, largest = Twin(), np.random.default_rng(3), 0, 0
    for number in range(400):
        count = int(rng.integers(1, 40))
        twin.add([f"{number}-{each}" for each in range(count)], are_hashed=number % 2 == 0)
        was_moving += twin.index._next is not None
        if len(twin.known) > 600:
            oldest = list(twin.known)
            twin.remove(oldest[: int(rng.integers(1, 90))] if number % 50 else oldest)
        largest = max(largest, twin.index._slots.size)
        if number % 20 == 0:
            twin.check(["never", "was there"])
    if hash_of == "as they are":
        assert was_moving > 20
        assert largest <= 16 * 600


def test_a_key_whose_row_is_gone_may_be_given_again(hash_of):
    twin = Twin()
    for _ in range(5):
        twin.add(NAMES[:50], are_hashed=True)
        twin.add(["other"], are_hashed=False)
        twin.check(["none"])
        twin.remove([*NAMES[:50], "other"][1:])  # so that it is not emptied
        twin.check(["none"])
        twin.add(["other"], are_hashed=False)
        twin.check(["none"])
        twin.remove(["other"])


def test_nothing_is_left_of_an_index_without_keys(hash_of):
    twin = Twin()
    twin.add(NAMES, are_hashed=True)
    twin.remove(NAMES)
    assert (len(twin.index), twin.index._recent, twin.index._slots.size) == (0, {}, 1)


def test_a_step_moves_few_entries(monkeypatch):
    """Counted, not timed: what is put into a table with each write, of which most is what it brings."""
    put, moved = table_module._Slots.put, []
    monkeypatch.setattr(
        table_module._Slots,
        "put",
        lambda self, hashes, *rest: (moved.append(hashes.size), put(self, hashes, *rest))[1],
    )
    twin, count = Twin(), 1 << 13
    for number in range(64):
        moved.clear()
        twin.add([f"{number} {each}" for each in range(count)], are_hashed=False)
        assert sum(moved) <= 4 * count
    assert len(twin.index) == 64 * count
    twin.check(["none"])


def test_a_write_that_room_was_made_for_moves_next_to_nothing(monkeypatch):
    put, moved = table_module._Slots.put, []
    monkeypatch.setattr(
        table_module._Slots, "put", lambda self, hashes, *rest: (moved.append(hashes.size), put(self, hashes, *rest))[1]
    )
    twin, count = Twin(), 1 << 13
    twin.add([f"0 {each}" for each in range(count)], are_hashed=False)
    for number in range(1, 40):
        for _ in twin.index.make_room(count):
            pass
        moved.clear()
        twin.add([f"{number} {each}" for each in range(count)], are_hashed=False)
        assert sum(moved) <= count + table_module._LEAST_MOVED_SLOTS
    twin.check(["none"])


def test_a_write_of_many_more_keys_than_there_are_finds_places_for_them():
    twin = Twin()
    for number, count in enumerate((5_000, 300, 200_000)):
        twin.add([f"{number} {each}" for each in range(count)], are_hashed=False)
        assert len(twin.index._recent) <= 10
    twin.check(["none"])


def test_room_for_keys_that_did_not_come_is_no_reason_to_have_too_little_later(monkeypatch):
    monkeypatch.setattr(table_module, "_MOST_MOVED_FOR", 1 << 14)
    monkeypatch.setattr(table_module, "_LEAST_MOVED_SLOTS", 16)
    twin, count = Twin(), 1 << 13
    twin.add([f"first {each}" for each in range(count)], are_hashed=False)
    for _ in range(100):
        for _ in twin.index.make_room(count):
            pass
    for number in range(40):
        twin.add([f"{number} {each}" for each in range(count)], are_hashed=False)
        assert len(twin.index._recent) <= count // 20  # those that find no place: some 60 to 110, by the hashes
    twin.check(["none"])
