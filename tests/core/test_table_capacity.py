"""Capacity for many rows is made in steps, between which all that can be done to a partition is done."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from digest import digest
from domain_support import BOOT, clear, insert, jagged, new_write, partition, write_to
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import PartitionSealedError
from tq_service.machine.samples import PartitionSealed, SamplesCleared
from tq_service.serving import catalog as catalog_module
from tq_service.serving.catalog import Catalog
from tq_service.state import table as table_module
from tq_service.state.cells import Put
from tq_service.state.partition import PartitionSettings

COUNT = 1 << 12
INCARNATION = bytes(16)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Have small tables grow as large ones do."""
    monkeypatch.setattr(table_module, "RESERVED_FROM", 1)
    monkeypatch.setattr(table_module, "_GROWTH", 64)
    monkeypatch.setattr(table_module, "_CAPACITY_STEP", 256)
    monkeypatch.setattr(table_module, "_LEAST_GAPS", 64)
    monkeypatch.setattr(table_module, "_LEAST_CLOSED", 64)


FIELDS = ["x", jagged("tokens", range(COUNT))]
CHANGES = st.one_of(
    st.tuples(st.just("insert"), st.integers(1, 3000)),
    st.tuples(st.just("insert with cells"), st.integers(1, 300)),
    st.tuples(st.just("clear"), st.integers(1, 3000)),
    st.tuples(st.just("clear all"), st.just(0)),
    st.tuples(st.just("snapshot"), st.just(0)),
    st.tuples(st.just("return capacity"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)


def change(target, what, count, snapshots):
    """Do something to a partition; a snapshot goes with what it must have."""
    table = target.table
    if what == "insert":
        insert(target, count, ())
    elif what == "insert with cells":
        write = new_write(count, ["x", jagged("tokens", range(count))])
        write_to(target, replace(write, put=Put("s0", BOOT, table.next_index.to_bytes(16))))
    elif what in ("clear", "clear all") and table.present_count:
        left = table.index.data[table.present_positions()]
        clear(target, left[: count or left.size])
    elif what == "snapshot":
        snapshots.append((table.snapshot(), {name: column[: table.count].copy() for name, column in columns_of(table)}))
    elif what == "return capacity":
        table.return_capacity()


def reserve(target, write):
    specs = target.cells.merged_specs(write.columns, None)
    return target.table.reserve_capacity(write.row_count, target.cells.new_columns(specs))


def columns_of(table):
    return table.columns.items()


@pytest.mark.timeout(600)  # 8 s on a machine without other work
@examples(150)
@given(st.lists(CHANGES, max_size=30), st.integers(1, 4000), st.booleans())
def test_whatever_is_done_between_the_steps_rows_come_out_as_without_them(changes, count, has_cells):
    write = new_write(count, ["x", jagged("tokens", range(count))] if has_cells else ())
    plain, stepped, snapshots = partition(), partition(), []
    for what, number in changes:
        if what != "return capacity":
            change(plain, what, number, [])
    write_to(plain, write)
    capacity, rest = reserve(stepped, write), iter(changes)
    for what, number in rest:
        for _ in range(number if what == "wait" else 1):
            next(capacity, None)
        change(stepped, what, number, snapshots)
    for _ in reserve(stepped, write):
        pass
    assert stepped.table._capacity >= stepped.table.count + count
    write_to(stepped, write)
    stepped.table.return_capacity()
    assert not stepped.table._spare
    plain.incarnation = stepped.incarnation
    assert digest(plain) == digest(stepped)
    table = stepped.table
    indexes = table.index.data[table.present_positions()]
    assert table.find(indexes).tolist() == table.present_positions().tolist()
    assert indexes[-count:].tolist() == list(range(table.next_index - count, table.next_index))
    for snapshot, expected in snapshots:
        for name, values in expected.items():
            assert snapshot.columns[name].values().tolist() == values.tolist()


def test_a_step_reserves_capacity_for_few_rows_and_the_last_one_leaves_little_to_do(monkeypatch):
    monkeypatch.setattr(table_module, "RESERVED_FROM", 1)  # so that columns grow where they are
    target, written = partition(), []
    insert(target, 10, ())
    monkeypatch.setattr(
        table_module.Column,
        "write",
        lambda self, where, values, write=table_module.Column.write: (
            written.append(np.asarray(values).size),
            write(self, where, values),
        ),
    )
    for _ in target.table.reserve_capacity(COUNT):
        assert max(written) <= 256
    written.clear()
    write_to(target, new_write(COUNT))
    assert set(written) == {1}  # its state, and nothing that differs from row to row


def test_columns_of_new_fields_are_made_in_steps_too(monkeypatch):
    """The step that writes to them finds memory that was written to, and adds nothing but their cells."""
    monkeypatch.setattr(table_module, "RESERVED_FROM", 1)
    target, filled = partition(), []
    use = table_module.Column._use
    monkeypatch.setattr(
        table_module.Column,
        "_use",
        lambda self, start, capacity: (filled.append(capacity - start), use(self, start, capacity)),
    )
    write = new_write(COUNT, FIELDS)
    for _ in reserve(target, write):
        assert max(filled) <= 256 + 64
    filled.clear()
    write_to(target, write)
    assert set(filled) == {0, 64}  # 64: the table of puts, which has a column for each field
    field = target.cells.fields["tokens"]
    assert field.lengths(slice(0, COUNT)).tolist() == list(range(COUNT))


async def _capacity(catalog, write, between, partition_id="train"):
    """Reserve capacity for a write and make it, and do something after the third step; return what was written."""
    steps, sleep = 0, asyncio.sleep

    async def counted(seconds):
        nonlocal steps
        steps += 1
        if steps == 3:
            between()
        await sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", counted)
        async with catalog.capacity_for(partition_id, b"", write) as made:
            patch.undo()
            return catalog.write(partition_id, b"", write, made)


def run(catalog, between, write=None):
    return asyncio.run(_capacity(catalog, write or new_write(COUNT), between))


def test_the_first_write_makes_the_partition_that_has_the_capacity():
    catalog = Catalog(None)
    written = run(catalog, lambda: None)
    assert catalog.get("train") is written.partition
    assert written.global_indexes == range(COUNT)


def test_a_partition_that_another_made_meanwhile_gets_the_rows():
    catalog = Catalog(None)
    written = run(catalog, lambda: catalog.write("train", b"", new_write(7)))
    assert catalog.get("train") is written.partition
    assert written.global_indexes == range(7, 7 + COUNT)


def test_a_partition_that_was_cleared_meanwhile_is_made_again():
    catalog = Catalog(None)
    before = catalog.write("train", b"", new_write(7)).partition
    written = run(catalog, lambda: catalog.remove("train", b""))
    assert written.partition is catalog.get("train") is not before
    assert written.global_indexes == range(COUNT)


def test_a_partition_that_was_cleared_and_made_again_meanwhile_gets_the_rows():
    catalog = Catalog(None)
    catalog.write("train", b"", new_write(7))

    def between():
        catalog.remove("train", b"")
        catalog.create("train", PartitionSettings(expected_samples=2 * COUNT))

    written = run(catalog, between)
    assert (written.partition.settings.expected_samples, written.global_indexes) == (2 * COUNT, range(COUNT))


def refused(catalog, error, between=lambda: None, **arguments):
    with pytest.raises(error):
        run(catalog, between, new_write(COUNT, **arguments))


def memory_of(catalog):
    return {name: [column.data.size for column in catalog.get(name).table.columns.values()] for name in catalog.names()}


@pytest.fixture
def returns_all(monkeypatch):
    """Return memory of a few rows too."""
    monkeypatch.setattr(table_module, "_CAPACITY_STEP", 16)


@pytest.mark.usefixtures("returns_all")
def test_a_write_that_is_refused_as_it_comes_takes_no_memory():
    catalog = Catalog(None)
    catalog.create("train", PartitionSettings(expected_samples=0))
    before = memory_of(catalog)
    refused(catalog, PartitionSealedError, lambda: pytest.fail("it reserved capacity"))
    assert memory_of(catalog) == before


@pytest.mark.usefixtures("returns_all")
def test_a_write_that_is_refused_once_it_has_capacity_changes_nothing():
    catalog = Catalog(None)
    catalog.write("train", b"", new_write(7))
    before, size = digest(catalog.get("train")), catalog.get("train").table.index.data.size
    refused(catalog, PartitionSealedError, lambda: catalog.commit(PartitionSealed(partition_id="train")))
    assert digest(catalog.get("train")) == before | {"facts": before["facts"] | {"sealed": True}}
    assert catalog.get("train").table.index.data.size <= size + 16


@pytest.mark.usefixtures("returns_all")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_write_that_is_given_up_changes_nothing(is_there):
    catalog = Catalog(None)
    if is_there:
        catalog.write("train", b"", new_write(7))
    before = {name: digest(catalog.get(name)) for name in catalog.names()}

    def give_up():
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(catalog, give_up)
    assert {name: digest(catalog.get(name)) for name in catalog.names()} == before
    assert all(size <= 64 + 16 for sizes in memory_of(catalog).values() for size in sizes)
    written = run(catalog, lambda: None)
    assert len(written.global_indexes) == COUNT


def test_two_writes_that_reserve_capacity_at_the_same_time_both_have_it(monkeypatch):
    catalog, grown = Catalog(None), []
    grow = table_module.RowTable._grow
    monkeypatch.setattr(table_module.RowTable, "_grow", lambda self, least: (grown.append(least), grow(self, least)))

    async def write(count):
        async with catalog.capacity_for("train", b"", new_write(count)) as made:
            grown.clear()
            written = catalog.write("train", b"", new_write(count), made)
            assert not grown
            return written.global_indexes

    async def both():
        catalog.create("train", PartitionSettings())
        return await asyncio.gather(write(COUNT), write(3 * COUNT), write(COUNT))

    ranges = sorted(asyncio.run(both()), key=lambda each: each.start)
    assert [index for each in ranges for index in each] == list(range(5 * COUNT))


def test_rows_that_were_cleared_while_capacity_was_reserved_stay_so():
    catalog = Catalog(None)
    catalog.write("train", b"", new_write(2000))

    def between():
        catalog.commit(SamplesCleared(partition_id="train", global_indexes=np.arange(1900)))

    written = run(catalog, between)
    table = written.partition.table
    assert table.index.data[table.present_positions()].tolist() == [*range(1900, 2000), *range(2000, 2000 + COUNT)]


def test_what_a_large_partition_had_is_freed_in_steps_once_it_is_cleared_but_for_those_who_read_it(monkeypatch):
    monkeypatch.setattr(catalog_module, "_FREED_AT_ONCE", 1000)
    keys = [f"key {number}" for number in range(2000)]

    async def clear_while_it_is_read():
        catalog = Catalog(None)
        gone = catalog.write("train", b"", new_write(2000, keys=keys, groups=keys)).partition
        snapshot, left = gone.snapshot(), []
        catalog.remove("train", b"")
        catalog.write("train", b"", new_write(3, keys=keys[:3]))
        for _ in range(20):
            await asyncio.sleep(0)
            left.append(np.count_nonzero(gone.key.data[:2000] != None))  # noqa: E711
        return catalog, snapshot, gone, left

    catalog, snapshot, gone, left = asyncio.run(clear_while_it_is_read())
    assert (max(np.diff(-np.array(left))) <= 256, left[-1]) == (True, 0)
    assert (len(gone.key_index), len(gone.groups)) == (0, 0)
    assert snapshot.tables["rows"].columns["key"].values().tolist() == keys
    assert list(catalog.get("train").key_index) == keys[:3]
