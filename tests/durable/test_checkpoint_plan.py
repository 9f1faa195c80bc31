"""Which cells a checkpoint copies together: each cell once, of one storage service a block, and no block too large."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

sys.path.append(str(Path(__file__).parent.parent / "core"))

from domain_support import clear, commit, new_id, new_write, partition, write_to

from tq_service.durable import checkpoint
from tq_service.durable.checkpoint import PartitionPlan, relocate
from tq_service.machine.group_cells import GroupsWritten
from tq_service.schema import FieldSpec
from tq_service.state.cells import Put
from tq_service.state.partition import Partition
from tq_service.wire.metadata import expand_runs

MOST_ROWS, MOST_PUTS, BLOCK_BYTES, CELL_BYTES = 6, 3, 40, 4
FIELDS = st.sampled_from([("x",), ("x", "y"), ("y", "z"), ("z",)])
STORAGES = st.sampled_from(["s0", "s1"])
ROWS = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(1, 9), FIELDS, STORAGES),
        st.tuples(st.just("update"), ROWS, FIELDS, STORAGES),
        st.tuples(st.just("clear"), ROWS),
    ),
    max_size=12,
)


def lived_in(steps):
    """Return a partition after some steps, with cells in puts of two storage services."""
    train = partition()
    for kind, rows, *where in steps:
        if kind == "insert":
            fields, storage_id = where
            write_to(train, sized(new_write(rows, fields), storage_id))
            continue
        left = [index for index in rows if index in samples(train)]
        if left and kind == "clear":
            clear(train, np.array(left))
        elif left:
            fields, storage_id = where
            write_to(train, sized(new_write(len(left), fields, indexes=left), storage_id))
    return train


def samples(train):
    """Return the positions of the samples that are there, by their indexes."""
    positions = train.table.present_positions()
    return dict(zip(train.table.index.data[positions].tolist(), positions.tolist(), strict=True))


def sized(write, storage_id):
    columns = [replace(column, value_bytes=write.row_count * CELL_BYTES) for column in write.columns]
    return replace(write, columns=columns, put=Put(storage_id, b"b" * 16, new_id()))


def column_bytes(block):
    return dict.fromkeys(block.runs.field_names, block.global_indexes.size * CELL_BYTES)


def cells_of(runs, puts, indexes):
    """Return where the cells of samples are, each as (put, row), by sample and field."""
    owners = [puts[number] for number in np.repeat(runs.put_indexes, runs.row_counts)]
    rows = expand_runs(np.asarray(runs.first_rows), np.asarray(runs.row_counts)).tolist()
    return {
        (index, name): (put, row)
        for name in runs.field_names
        for index, put, row in zip(indexes, owners, rows, strict=True)
    }


def all_cells(train):
    """Return where each cell of a partition is that was produced."""
    found = {}
    for index, position in samples(train).items():
        for name in train.cells.fields:
            for runs in train.cells.locate([name], np.array([position])):
                found |= cells_of(runs, runs.puts, [index])
    return found


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(checkpoint, "_MOST_ROWS", MOST_ROWS)
    monkeypatch.setattr(checkpoint, "_MOST_PUTS", MOST_PUTS)
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", BLOCK_BYTES)


@examples(60)
@given(steps=STEPS)
def test_each_cell_is_in_one_block_and_comes_back_in_its_put(steps):
    train = lived_in(steps)
    expected = all_cells(train)
    plan = PartitionPlan(train.snapshot())
    copied = {}
    for block in plan.blocks:
        assert len({put[:2] for put in block.puts}) == 1
        assert 0 < block.global_indexes.size <= MOST_ROWS
        assert len(block.puts) <= MOST_PUTS
        cells = cells_of(block.runs, block.puts, block.global_indexes.tolist())
        assert len(cells) * CELL_BYTES < BLOCK_BYTES + CELL_BYTES * len(block.runs.field_names)
        assert not copied.keys() & cells.keys()
        copied |= cells
        block.column_bytes = column_bytes(block)
    assert copied == expected
    puts = [Put("elsewhere", b"c" * 16, new_id()) for _ in plan.blocks]
    restored = Partition.restore(plan.partition())
    relocate([restored], puts)
    assert restored.cells.used_bytes == len(expected) * CELL_BYTES
    assert all_cells(restored) == {
        (index, name): (put, row)
        for put, block in zip(puts, plan.blocks, strict=True)
        for name in block.runs.field_names
        for row, index in enumerate(block.global_indexes.tolist())
    }


GROUPS = ("a", "b", "c", "d", "e")
SHARED_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(st.sampled_from((*GROUPS, "")), min_size=1, max_size=6)),
        st.tuples(st.just("put"), st.lists(st.sampled_from(GROUPS), min_size=1, unique=True), FIELDS, STORAGES),
        st.tuples(st.just("clear"), ROWS),
    ),
    max_size=12,
)


@examples(60)
@given(steps=SHARED_STEPS)
def test_what_groups_share_is_in_one_block_and_comes_back_for_all_samples(steps):
    train = partition(fields=tuple(FieldSpec(name, scope="group") for name in "xyz"))
    for kind, what, *where in steps:
        if kind == "insert":
            write_to(train, new_write(len(what), (), groups=what))
        elif kind == "put":
            fields, storage_id = where
            write = sized(new_write(len(what), fields), storage_id)
            commit(train, GroupsWritten(partition_id="train", names=what, put=write.put, columns=write.columns))
        elif left := [index for index in what if index in samples(train)]:
            clear(train, np.array(left))
    expected = all_cells(train)
    shared_count = sum(field.produced_count for field in train.cells.fields.values())
    plan = PartitionPlan(train.snapshot())
    became = {}
    for number, block in enumerate(plan.blocks):
        assert block.is_shared
        block.column_bytes = column_bytes(block)
        cells = cells_of(block.runs, block.puts, range(block.global_indexes.size))
        became |= {(name, *cell): (number, place) for (place, name), cell in cells.items()}
    assert len(became) == shared_count  # each once, however many samples have it
    puts = [Put("elsewhere", b"c" * 16, new_id()) for _ in plan.blocks]
    restored = Partition.restore(plan.partition())
    relocate([restored], puts)
    assert restored.cells.used_bytes == shared_count * CELL_BYTES
    assert [field.spec for field in restored.cells.fields.values()] == [
        field.spec for field in train.cells.fields.values()
    ]
    assert sorted(restored.groups.slot_of) == sorted(train.groups.slot_of)
    moved = {key: became[(key[1], *cell)] for key, cell in expected.items()}
    assert all_cells(restored) == {key: (puts[number], place) for key, (number, place) in moved.items()}
