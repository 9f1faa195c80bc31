"""Claims in the order of numbers and texts: that of a plain sort, at a look at each ready row, few on the loop."""

import asyncio
import math
import os
import random
import threading
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from domain_support import (
    batch_spec,
    claim_rows,
    clear,
    insert,
    meta,
    new_write,
    partition,
    release,
    reset,
    seal,
    set_meta,
    task_of,
    turns,
    update,
    write_to,
)
from planner_bench import Bench, Whenever, rows

from tq_service.custom_meta import JSON_NULL, MetaColumn
from tq_service.planning import grouping as ordering
from tq_service.planning import view as readiness
from tq_service.planning.view import PartitionView, Readiness, Scan
from tq_service.samplers import GRPOGroupNSampler, SequentialSampler
from tq_service.state.plan import Condition, MustBeAwaited, Order, Plan

EXAMPLES = int(os.environ.get("TQ_ORDER_EXAMPLES", "15"))
VALUES = {
    "int": [-(2**63), -5, -1, 0, 1, 3, 2**63 - 1],
    "double": [-math.inf, -1.5, -0.0, 0.0, 5e-324, 2.0, math.inf, math.nan],
    "bool": [False, True],
    "text": [
        "",
        "\0",
        "a",
        "a\0",
        "a\0\0",
        "ab",
        "b" * 40,
        "b" * 40 + "a",
        "é",
        "\ud800",
        "\udfff",
        "\uffff",
        "😀",
        "😀a",
    ],
}


def column(name, values):
    """Return a custom_meta column of values, None where there is none."""
    present = np.array([value is not None for value in values])
    filler = next((value for value in values if value is not None), 0)
    dtype = np.object_ if isinstance(filler, str) else None
    array = np.array([filler if value is None else value for value in values], dtype=dtype)
    return MetaColumn(name=name, values=array, present=present)


def scanned_partition():
    target = partition()
    target.scan_starts = readiness.ScanStarts(target, "t")
    return target


def view_of(target, task, orders, watch=None):
    rows = Readiness(target, task, batch_spec(order_by=orders), None)
    return PartitionView(partial(Scan, rows, target.scan_starts, orders, watch=watch))


class Rows:
    """A partition and its rows in plain Python."""

    def __init__(self, rng, orders):
        self.rng = rng
        self.orders = orders
        self.partition = scanned_partition()
        self.task = task_of(self.partition, "t")
        self.rewrites = rng.random() < 0.5
        self.values = {}  # by global index, of live and produced rows that are not consumed: what each column has
        self.hidden = {}  # of those that cannot be claimed now
        self.claims = []

    def entry(self):
        return {name: self.rng.choice([*VALUES[name], None]) for name in VALUES}

    def columns(self, entries):
        columns = {name: [entry[name] for entry in entries] for name in VALUES}
        return [column(name, values) for name, values in columns.items() if any(value is not None for value in values)]

    def insert(self):
        count = self.rng.randint(1, 6)
        fields = self.rng.choice([("x",), ("x",), ()])
        entries = [self.entry() for _ in range(count)]
        write = new_write(count, fields)
        if not self.rewrites or self.rng.random() < 0.5:
            write = replace(write, meta=self.columns(entries))
        indexes = list(write_to(self.partition, write).global_indexes)
        if not write.meta and self.columns(entries):
            set_meta(self.partition, np.array(indexes), self.columns(entries))
        (self.values if fields else self.hidden).update(zip(indexes, entries, strict=True))

    def pick(self, of):
        return self.rng.sample(sorted(of), min(len(of), self.rng.randint(1, 4)))

    def set_meta(self):
        indexes = self.pick(self.values)
        if indexes and self.rewrites:
            entries = [self.entry() for _ in indexes]
            set_meta(self.partition, np.array(indexes), self.columns(entries))
            for index, entry in zip(indexes, entries, strict=True):
                self.values[index] |= {name: value for name, value in entry.items() if value is not None}

    def remove_value(self):
        indexes, name = self.pick(self.values), self.rng.choice([*VALUES])
        if indexes:
            other = self.rng.choice([None, JSON_NULL, [1]])
            set_meta(self.partition, np.array(indexes), meta([{name: other}] * len(indexes)))
            for index in indexes:
                self.values[index] = {**self.values[index], name: None}

    def show(self):
        for index in self.pick(self.hidden):
            update(self.partition, [index], ("x",), state="live")
            self.values[index] = self.hidden.pop(index)

    def hold(self):
        for index in self.pick(self.values):
            update(self.partition, [index], state="held")
            self.hidden[index] = self.values.pop(index)

    def clear(self):
        indexes = self.pick(self.values)
        clear(self.partition, np.array(indexes, np.int64))
        for index in indexes:
            del self.values[index]

    def claim(self):
        ready = self.ready(self.rng.randint(1, 5))
        assert ready.tolist() == self.expected()[: ready.size]
        if ready.size:
            given = claim_rows(self.partition, self.task, ready)
            self.claims.append((given.request_id, {index: self.values.pop(index) for index in ready.tolist()}))

    def give_back(self):
        if self.claims:
            request_id, entries = self.claims.pop(self.rng.randrange(len(self.claims)))
            release(self.partition, self.task, request_id)
            self.values |= entries

    def ready(self, limit):
        """Return ready rows, read by another thread where the event loop has no time for that."""
        try:
            return view_of(self.partition, self.task, self.orders).ready(limit)
        except MustBeAwaited:
            return self.ready_elsewhere(limit)

    def ready_elsewhere(self, limit):
        with self.partition.scan_starts.watched() as watch:
            return view_of(self.partition, self.task, self.orders, watch).ready(limit)

    def plan_elsewhere(self):
        """Have another thread read, while rows change or others read here."""
        with self.partition.scan_starts.watched() as watch:
            made = view_of(self.partition, self.task, self.orders, watch)
            if self.rng.random() < 0.5:
                made.ready(self.rng.choice([None, 1, 3]))
            with self.partition.table.pinned():
                for _ in range(self.rng.randint(0, 2)):
                    getattr(self, self.rng.choice(STEPS))()

    def expected(self):
        def key(index):
            parts = []
            for order in self.orders:
                value = self.values[index].get(order.column)
                if value is None:
                    parts.append((1, 0, 0))
                    continue
                is_nan = isinstance(value, float) and math.isnan(value)
                sign = -1 if order.descending else 1
                if isinstance(value, str):  # in order of code points; one that goes on comes after one that has ended
                    points = [sign * ord(letter) for letter in value] + [sign * -1]
                    parts.append((0, points, 0))
                else:
                    parts.append((0, sign * is_nan, 0 if is_nan else sign * value))
            return (*parts, index)

        return sorted(self.values, key=key)

    def check(self):
        for limit in (None, 1, 3):
            assert self.ready(limit).tolist() == self.expected()[:limit]
            assert self.ready_elsewhere(limit).tolist() == self.expected()[:limit]


STEPS = ["insert", "insert", "set_meta", "set_meta", "remove_value", "show", "hold", "clear", "claim", "claim",
         "give_back", "check", "plan_elsewhere"]  # fmt: skip
ORDERS = [
    (Order("int"),), (Order("int", descending=True),), (Order("double"),), (Order("double", descending=True),),
    (Order("bool"), Order("int", descending=True)), (Order("bool", descending=True), Order("double"), Order("int")),
    (Order("none"), Order("int")), (Order("text"),), (Order("text", descending=True),),
    (Order("bool"), Order("text", descending=True), Order("int")), (Order("text"), Order("double", descending=True)),
]  # fmt: skip


@pytest.fixture
def few_at_once(monkeypatch):
    """Have few rows be many, so that all ways of large partitions are gone."""
    for name, count in {"_SLICE": 5, "_FEW": 2, "_TEXTS_AT_ONCE": 8}.items():
        monkeypatch.setattr(ordering, name, count)
    monkeypatch.setattr(readiness, "_MOST_ORDERED_ON_LOOP", 12)


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.usefixtures("few_at_once")
def test_rows_come_in_order_whatever_becomes_of_them(orders):
    for seed in range(EXAMPLES):
        rng = random.Random(seed)
        target = Rows(rng, orders)
        for _ in range(60):
            getattr(target, rng.choice(STEPS))()
        target.check()


def test_keys_of_all_values_are_in_their_order():
    for name, values in VALUES.items():
        target = Rows(random.Random(0), (Order(name), *([Order("int")] if name != "int" else [])))
        indexes = insert(target.partition, 2 * len(values) + 1)
        others = {"int": 0, "double": 0.0, "bool": False, "text": ""}
        entries = [{**others, name: value} for value in [*values, *values[::-1], None]]
        set_meta(target.partition, np.array(indexes), target.columns(entries))
        target.values = dict(zip(indexes, entries, strict=True))
        target.check()


def test_integers_that_become_doubles_keep_their_order():
    target = Rows(random.Random(0), (Order("v"),))
    insert(target.partition, 3, meta=[{"v": 3}, {"v": -1}, {"v": 2}])
    assert target.ready(None).tolist() == [1, 2, 0]
    insert(target.partition, 1, meta=[{"v": 2.5}])
    assert target.ready(None).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_groups_come_in_the_order_of_their_first_members_however_far_apart_they_are(named, is_text):
    rng = np.random.default_rng(0)
    target = scanned_partition()
    group_count, size = 3000, 4
    names = np.repeat([f"g{number}" for number in range(group_count)], size)
    values = [f"{value:06d}" if is_text else value for value in rng.integers(0, 50_000, names.size).tolist()]
    for start in range(0, names.size, 1000 * size):
        some = slice(start, start + 1000 * size)
        named_so = {"groups": names[some].tolist(), "group_size": size} if named else {}
        insert(target, 1000 * size, meta=[{"v": value} for value in values[some]], **named_so)
    held = rng.choice(names.size, 500, replace=False)
    update(target, held, state="held")
    task, orders = task_of(target, "t"), (Order("v"),)
    whole = np.setdiff1d(np.arange(group_count), held // size)
    members = [sorted(range(size * group, size * (group + 1)), key=values.__getitem__) for group in whole.tolist()]
    expected = sorted(members, key=lambda group: (values[group[0]], group[0]))

    for limit in (1, 8, 300, None):
        with target.scan_starts.watched() as watch:
            made = view_of(target, task, orders, watch if limit is None else None)
            found = made.ready_groups(limit, unit="group", block_size=None if named else size)
        groups = [found.rows[start : start + size].tolist() for start in found.starts.tolist()]
        assert groups == expected[:limit]


# Through the planner


class Looks:
    """Counts the rows that the event loop looks at, and those of other threads."""

    def __init__(self, monkeypatch):
        self.on_loop = self.elsewhere = self.in_one_step = self.most_in_one_step = 0
        inner = Readiness.ready

        def ready(*arguments):
            mask = inner(*arguments)
            if threading.current_thread() is threading.main_thread():
                self.on_loop += mask.size
                self.in_one_step += mask.size
                self.most_in_one_step = max(self.most_in_one_step, self.in_one_step)
            else:
                self.elsewhere += mask.size
            return mask

        monkeypatch.setattr(Readiness, "ready", ready)

    async def watch(self):
        while True:
            self.in_one_step = 0
            await asyncio.sleep(0)

    def take(self):
        """Return how many rows the loop looked at, in one step at most, and how many others did."""
        counts = self.on_loop, self.most_in_one_step, self.elsewhere
        self.on_loop = self.elsewhere = self.most_in_one_step = 0
        return counts


FEW = 20_000
MANY = 100_000
MOST_IN_ONE_STEP = 1 << 15
ORDER = (Order("v", descending=True), Order("w"))


@pytest.fixture
async def bench():
    return Bench()


@pytest.fixture
async def looks(monkeypatch):
    looks = Looks(monkeypatch)
    watching = asyncio.create_task(looks.watch())
    yield looks
    watching.cancel()


@pytest.fixture(params=[int, lambda number: f"{10**8 + number:09d}"], ids=["numbers", "texts"])
def value(request):
    """What stands in a column for a number, in the order of the numbers."""
    return request.param


def put(bench, value, count, *, first=0):
    """Insert rows whose order is that of their indexes, but for every other."""
    numbers = np.arange(first, first + count)
    bench.insert(count)
    values = [value(-(number // 2)) for number in numbers.tolist()]
    set_meta(bench.catalog, numbers, [column("v", values), column("w", -(numbers % 2.0))])


async def next_call(bench, rank=None, **arguments):
    call = bench.ask(rank, **{"batch_size": 2, "order_by": ORDER, **arguments})
    await asyncio.wait([call])
    return call


@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize("count", [FEW, MANY])
async def test_a_claim_looks_at_each_ready_row_once_off_the_loop_where_these_are_many(
    bench, looks, value, ranked, count
):
    put(bench, value, count)
    for number in range(10):
        call = await next_call(bench, (0, 1, number) if ranked else None, batch_size=8)
        assert sorted(rows(call)) == list(range(8 * number, 8 * number + 8))
        on_loop, in_one_step, elsewhere = looks.take()
        left = count - 8 * max(0, number - 1)  # a scan begins where the one before found its first row
        assert (on_loop, elsewhere) == ((left, 0) if count == FEW else (0, left))
        assert in_one_step <= MOST_IN_ONE_STEP


async def test_rows_that_come_are_in_the_order_of_the_next_claim(bench, looks, value):
    put(bench, value, MANY)
    for number in range(10):
        indexes = bench.insert(5, meta=[{"v": value(10 + number), "w": 0.0}] * 5)
        assert rows(await next_call(bench)) == indexes[:2]
        assert looks.take()[0] == 0


async def test_many_that_are_gone_from_the_front_are_not_looked_at_again(bench, looks, value):
    put(bench, value, MANY)
    await next_call(bench)
    await bench.ask(batch_size=MANY - 100)  # in the order of the indexes, which is the same
    looks.take()
    assert sorted(rows(await next_call(bench))) == [MANY - 98, MANY - 97]
    assert sum(looks.take()) <= 2 * MANY
    assert sorted(rows(await next_call(bench))) == [MANY - 96, MANY - 95]
    on_loop, _, elsewhere = looks.take()
    assert (on_loop, elsewhere) == (98, 0)


async def test_a_sampler_on_a_thread_takes_all_rows_in_order_too(bench, looks, value):
    put(bench, value, MANY)
    slow = Whenever(lambda view, request: Plan.of([view.ready()[: request.batch_size]]), quick=False)
    for number in range(3):
        call = await next_call(bench, batch_size=4, sampler=slow)
        assert sorted(rows(call)) == list(range(4 * number, 4 * number + 4))
        assert looks.take() == (0, 0, MANY - 4 * max(0, number - 1))


async def test_others_have_the_loop_while_rows_are_sorted(bench, monkeypatch, value):
    """Puts and claims in another way go on, and what they change is in the order: rows that were lost are replaced."""
    put(bench, value, MANY)
    is_begun, may_go_on = threading.Event(), threading.Event()

    def first_in_order(*arguments):
        is_begun.set()
        may_go_on.wait(60)
        return ordering.first_in_order(*arguments)

    monkeypatch.setattr(readiness, "first_in_order", first_in_order)
    call = bench.ask(batch_size=2, order_by=ORDER)
    await asyncio.to_thread(is_begun.wait)
    first = bench.insert(1, meta=[{"v": value(5), "w": 0.0}])
    set_meta(bench.catalog, np.array([7]), [column("v", [value(3)])])
    clear(bench.catalog, np.array([0]))
    assert rows(await bench_claim(bench, batch_size=1)) == [1]
    may_go_on.set()
    await asyncio.wait([call])
    assert rows(call) == [*first, 7]
    assert rows(await next_call(bench)) == [3, 2]  # w goes from -1.0 up
    reset(bench.catalog, bench.task, keep_consumed=False)
    assert rows(await next_call(bench)) == [*first, 7]


async def bench_claim(bench, **arguments):
    call = bench.ask(**arguments)
    await asyncio.wait([call])
    return call


async def test_a_reset_while_rows_are_sorted_leaves_nobody_behind(bench, value):
    put(bench, value, MANY)
    call = bench.ask((0, 1, 0), batch_size=2, order_by=ORDER)
    await turns()
    reset(bench.catalog, bench.task, keep_consumed=False)
    await asyncio.wait([call])
    assert sorted(rows(call)) == [0, 1]
    assert (bench.task.epoch, bench.task.next_batch_index) == (1, 1)


async def test_orders_of_rows_that_pass_different_conditions(bench):
    put(bench, int, 100)
    for number in range(50):
        where, order = (Condition("v", ">=", (-number,)),), (Order("v"), Order("w", descending=True))
        call = await next_call(bench, batch_size=1, order_by=order, where=where)
        assert rows(call) == [2 * number]


@pytest.mark.parametrize("sampler", [SequentialSampler(), GRPOGroupNSampler(n_samples_per_prompt=2)])
async def test_the_last_in_order_come_at_the_end(bench, value, sampler):
    put(bench, value, 10)
    calls = [bench.ask((0, 1, index), batch_size=4, order_by=ORDER, sampler=sampler) for index in range(4)]
    await turns(20)
    assert [call.done() for call in calls] == [True, True, False, False]
    seal(bench.catalog)
    await asyncio.wait(calls)
    assert [sorted(rows(call)) for call in calls[:3]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert calls[3].result().skipped_count == 0


# Cost


@pytest.mark.parametrize("limit", [8, 2_000, None])
def test_texts_are_compared_in_short_runs_for_which_the_interpreter_lock_is_held(monkeypatch, limit):
    target = scanned_partition()
    values = [f"{number:06d}" for number in np.random.default_rng(0).permutation(MANY).tolist()]
    insert(target, MANY, meta=[{"v": value} for value in values])
    longest = 0

    def sorted_run(some, **options):
        nonlocal longest
        longest = max(longest, len(some))
        return sorted(some, **options)

    monkeypatch.setattr(ordering, "sorted", sorted_run, raising=False)
    with target.scan_starts.watched() as watch:
        found = view_of(target, task_of(target, "t"), (Order("v"),), watch).ready(limit).tolist()
    assert found == sorted(range(MANY), key=values.__getitem__)[:limit]
    assert longest <= 1 << 13


async def test_one_long_text_takes_no_memory_for_other_samples(bench):
    entries = [{"v": f"{number:05d}"} for number in range(20_000)]
    entries[7]["v"] = "0" * 16_000
    bench.insert(20_000, meta=entries)
    tracemalloc.start()
    try:
        call = await next_call(bench, order_by=(Order("v"),))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows(call) == [0, 7]
    assert peak < 200 * 20_000


async def test_texts_of_samples_that_are_gone_are_let_go(bench):
    """Also those that no claim in this order ever comes to."""
    bench.insert(100, meta=[{"v": "a"}] * 100)
    tracemalloc.start()
    try:
        for number in range(40):
            indexes = bench.insert(1_000, meta=[{"v": f"{index:01000d}"} for index in range(1_000)])
            call = await next_call(bench, batch_size=1, order_by=(Order("v", descending=True),))
            assert rows(call) == [number]
            clear(bench.catalog, np.array(indexes))
        assert tracemalloc.get_traced_memory()[0] < 12_000_000  # of 40 million
    finally:
        tracemalloc.stop()
