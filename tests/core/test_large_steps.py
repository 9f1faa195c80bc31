"""What one step of the event loop does to many rows: no line of Python for each, and no copy of those there are.

Counted, not timed: the lines that are run, whether columns stay where they are, and rows between two turns of the loop.
"""

import asyncio
import gc
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from domain_support import clear, is_at_rest, new_write, seal, task_of, turns, write_to
from planner_bench import Bench, finished, rows

from tq_service.custom_meta import MetaColumn
from tq_service.machine.samples import SampleWrite
from tq_service.samplers import GRPOGroupNSampler
from tq_service.schema import MOST_NAMED_PER_WRITE, EndCounts, FieldSpec, Layout
from tq_service.serving.planner import NotYet
from tq_service.state import table as column_memory
from tq_service.state.cells import ColumnWrite, CustomMeta, Put
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import Condition
from tq_service.state.table import RESERVED_FROM, Column

LARGE = 2 * RESERVED_FROM
needs_reserved_memory = pytest.mark.skipif(
    column_memory.reserved_zeros(1, np.int8) is None, reason="this machine does not overcommit memory"
)


def lines_run(step):
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # hypothesis has a callback of each collection, whose lines would be counted
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def scalars(count):
    return {
        "put": Put("storage", bytes(16), bytes(16)),
        "columns": [ColumnWrite(spec=FieldSpec("x", "int32", Layout.DENSE, ()), value_bytes=4 * count)],
    }


def versions(count):
    return {"meta": [MetaColumn(name="version", values=np.arange(count), present=np.ones(count, np.bool_))]}


def names(count):
    return {"keys": [f"key {number}" for number in range(count)]}


def groups(count):
    return {"groups": [f"group {number // 8}" for number in range(count)], "group_size": 8}


KINDS = {
    "bare": lambda count: {},
    "scalars": scalars,
    "custom_meta": versions,
    "keys": names,
    "groups": groups,
    "all": lambda count: scalars(count) | versions(count) | names(count) | groups(count),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def partition_of(kind, count):
    partition = Partition("train", PartitionSettings())
    write_to(partition, SampleWrite(row_count=count, **kind(count)))
    task_of(partition, "update_actor")
    return partition


def lines_to_clear(kind, count, indexes):
    partition = partition_of(kind, count)
    return lines_run(lambda: clear(partition, indexes))


@kinds
@pytest.mark.parametrize(
    "which",
    [
        np.arange,
        lambda count: np.arange(0, count, 2),
        lambda count: np.arange(count)[::-1],
        lambda count: [*range(count // 2)] * 2,
    ],
    ids=["all", "every other one", "all backwards", "half of them twice"],
)
def test_samples_are_cleared_without_a_line_for_each(kind, which):
    few, many = (lines_to_clear(kind, count, np.array(which(count))) for count in (2048, 16_384))
    assert many <= few + 16


def lines_to_write(kind, count):
    partition, write = Partition("train", PartitionSettings()), SampleWrite(row_count=count, **kind(count))
    return lines_run(lambda: write_to(partition, write))


@kinds
def test_samples_are_written_without_a_line_for_each(kind):
    assert lines_to_write(kind, MOST_NAMED_PER_WRITE) <= 2 * lines_to_write(kind, MOST_NAMED_PER_WRITE // 8)


def columns_of(partition):
    found = [partition.table.index, partition.state, partition.meta.arrays("version")[0], partition.groups.of_rows]
    found += [field.cell for field in partition.cells.fields.values()]
    found += [task.claim for task in partition.tasks.values()]
    return [getattr(each, "data", each) if isinstance(each, Column) else each for each in found]


@needs_reserved_memory
def test_rows_are_added_to_a_large_partition_without_a_copy_of_those_there_are():
    def rows(count):
        return SampleWrite(row_count=count, **scalars(count), **versions(count))

    partition = partition_of(lambda count: scalars(count) | versions(count), LARGE)
    before, seen = columns_of(partition), []
    for _ in range(4):
        write_to(partition, rows(LARGE))
        seen.append([np.shares_memory(old, new) for old, new in zip(before, columns_of(partition), strict=True)])
    assert np.all(seen)
    assert partition.table.index.data[: 5 * LARGE].tolist() == list(range(5 * LARGE))
    assert partition.meta.arrays("version")[0][: 5 * LARGE].tolist() == list(range(LARGE)) * 5
    assert partition.groups.of_rows[partition.table.count - 1] == -1


@pytest.mark.parametrize("can_reserve", [pytest.param(True, marks=needs_reserved_memory), False])
@pytest.mark.parametrize("fill", [0, -1])
def test_a_large_column_grows_whether_memory_can_be_reserved_or_not(can_reserve, fill, monkeypatch):
    if not can_reserve:
        monkeypatch.setattr(column_memory, "reserved_zeros", lambda count, dtype: None)
    column = Column(np.int64, fill, LARGE)
    column.write(slice(0, LARGE), np.arange(LARGE))
    snapshot = column.snapshot(LARGE)
    column.resize(LARGE + 1000)
    assert column.data[LARGE:].tolist() == [fill] * 1000
    column.write(slice(0, LARGE), 5)
    assert snapshot.values().tolist() == list(range(LARGE))
    column.resize(10 * LARGE)
    assert column.data.size == 10 * LARGE
    assert (column.data[:LARGE] == 5).all()
    assert (column.data[LARGE + 1000 :] == fill).all()


@needs_reserved_memory
def test_a_snapshot_made_before_a_column_grew_where_it_is_stays():
    column = Column(np.int64, 0, LARGE)
    snapshot = column.snapshot(LARGE)
    column.resize(2 * LARGE)
    column.write(np.array([3, LARGE - 1]), 7)
    assert not snapshot.values().any()


class LookedAt:
    """The most rows that conditions are compared with on the event loop between two of its turns."""

    def __init__(self, monkeypatch):
        self.most = self._count = 0
        monkeypatch.setattr(CustomMeta, "holds", self._counted(CustomMeta.holds))

    def _counted(self, inner):
        def counted(meta, condition, rows):
            found = inner(meta, condition, rows)
            if threading.current_thread() is threading.main_thread():
                self._count += found[0].size
                self.most = max(self.most, self._count)
            return found

        return counted

    async def watch(self, call):
        """Wait for a call; return its answer."""
        while not call.done():
            self._count = 0
            await asyncio.sleep(0)
        return call.result()


SOME = 200_000
TEXTS = [
    Condition("source", "==", ("none",)),
    Condition("source", "in", tuple(f"no-{number}" for number in range(100))),
    Condition("v", "in", (7, 9)),
    Condition("v", "==", (7,)),
]


@pytest.mark.parametrize("condition", TEXTS, ids=["text", "texts", "numbers", "number"])
@pytest.mark.parametrize("grouped", [False, True])
async def test_conditions_look_at_few_rows_a_turn_also_at_the_end(monkeypatch, condition, grouped):
    bench, looked_at = Bench(), LookedAt(monkeypatch)
    present = np.ones(SOME, np.bool_)
    source = MetaColumn(name="source", values=np.array(["a", "b"] * (SOME // 2), object), present=present)
    columns = (source, MetaColumn(name="v", values=np.zeros(SOME, np.int64), present=present))
    write = replace(new_write(SOME, ("x",)), meta=columns)
    bench.catalog.write("train", b"", write)
    asked = {"where": (condition,), "sampler": GRPOGroupNSampler(n_samples_per_prompt=2) if grouped else None}
    assert await looked_at.watch(bench.ask(wait=0.0, **asked)) == NotYet()
    assert await looked_at.watch(bench.ask((0, 1, 0), wait=0.0, **asked)) == NotYet()
    seal(bench.catalog)
    end = await looked_at.watch(bench.ask((0, 1, 0), **asked))
    assert end == EndCounts(excluded_count=SOME)
    assert looked_at.most <= 1 << 16


async def test_what_conditions_ruled_out_is_not_looked_at_again(monkeypatch):
    """Also where a few rows that pass come before the others, and are too few for a batch."""
    bench, looked_at = Bench(), LookedAt(monkeypatch)
    bench.insert(1, meta=[{"v": 7}])
    bench.insert(SOME, meta=[{"v": 0}] * SOME)
    call = bench.ask(where=(Condition("v", "==", (7,)),), batch_size=3)
    for _ in range(2):
        await turns()
        while not is_at_rest(bench.planner):
            await turns(1)
        looked_at.most = looked_at._count = 0
        assert not call.done()
        bench.insert(1, meta=[{"v": 7}])
        await turns(20)
        assert looked_at.most <= 4096
    await finished(call)  # a thread may plan it
    assert rows(call) == [0, SOME + 1, SOME + 2]
