"""The view of a sampler: what is ready, in which groups and order, scanned no further than needed."""

from functools import partial

import numpy as np
import pytest
from domain_support import (
    asks,
    batch_spec,
    claim_rows,
    clear,
    close_groups,
    dense,
    insert,
    jagged,
    objects,
    partition,
    plan_of,
    release,
    reset,
    seal,
    task_of,
    update,
)

from tq_service.errors import InvalidArgumentError, MissingLengthError, SamplerError
from tq_service.planning.grouping import Grouping
from tq_service.planning.view import NOT_LOOKED, PartitionView, Readiness, Scan, ScanStarts, ScanWatch, Search
from tq_service.samplers import SeqlenBalancedSampler
from tq_service.schema import FieldSpec, Layout
from tq_service.state.plan import Condition, LengthSource, MustBeAwaited, Order, Plan


@pytest.fixture
def train():
    return scanned()


def scanned(**settings):
    train = partition(**settings)
    train.scan_starts = ScanStarts(train, "t")
    return train


def scan_of(train, *, length=None, watch=None, of="ready", **bound):
    spec = batch_spec(**bound)
    rows = Readiness(train, task_of(train, "t"), spec, length)
    return Scan(rows, train.scan_starts, spec.order_by, watch=watch, of=of)


def view_of(train, **bound):
    return PartitionView(partial(scan_of, train, **bound))


def search_of(train, *, length=None, **bound):
    return Search(train, task_of(train, "t"), train.scan_starts, asks(**bound), length)


def start_of(train, key=(("x",), (), None, False)):
    return train.scan_starts.get(key)[0]


def apart(train):
    return train.scan_starts.get((("x",), (), None, False))[1].tolist()


def ready(train, limit=None, **bound):
    return view_of(train, **bound).ready(limit).tolist()


def groups(
    train, limit=None, *, no_more=False, unit="sample", block_size=None, take_incomplete=False, blocks="aligned",
    on_loop=True, **bound
):  # fmt: skip
    view = view_of(train, watch=None if on_loop else ScanWatch(), **bound)
    view.no_more = view.no_more or no_more
    found = view.ready_groups(limit, unit=unit, block_size=block_size, take_incomplete=take_incomplete, blocks=blocks)
    return [part.tolist() for part in np.split(found.rows, found.starts[1:])] if len(found) else []


def consume(train, *indexes):
    task = task_of(train, "t")
    rows = np.array(indexes, np.int64)
    task.deliver(plan_of(rows), train.table.find(rows), request_id=asks().request_id)


# Ready rows


def test_ready_rows_are_live_produced_and_not_consumed(train):
    insert(train, 6, ("x", "y"))
    insert(train, 2, ("x",))
    insert(train, 1, ("x", "y"), state="held")
    update(train, [0], state="failed")
    clear(train, np.array([2]))
    consume(train, 4)
    assert ready(train) == [1, 3, 5, 6, 7]
    assert ready(train, data_fields=("x", "y")) == [1, 3, 5]
    assert ready(train, data_fields=("x", "unknown")) == []
    assert ready(train, 2) == [1, 3]
    assert ready(train, 0) == []


def test_where_needs_a_value_that_passes(train):
    insert(train, 4, meta=[{"v": 1, "w": "a"}, {"v": 2}, {"w": "b"}, {"v": 3, "w": "b"}])
    assert ready(train, where=(Condition("v", ">=", (2,)),)) == [1, 3]
    assert ready(train, where=(Condition("v", ">=", (2,)), Condition("w", "in", ("b",)))) == [3]
    assert ready(train, where=(Condition("none", "!=", (0,)),)) == []


def test_order_by_puts_missing_values_last_and_keeps_ties_in_order(train):
    insert(train, 6, meta=[{"v": 2, "w": "b"}, {"v": 1}, {}, {"v": 2, "w": "a"}, {"v": 1}, {}])
    assert ready(train, order_by=(Order("v"),)) == [1, 4, 0, 3, 2, 5]
    assert ready(train, order_by=(Order("v", descending=True),)) == [0, 3, 1, 4, 2, 5]
    assert ready(train, 3, order_by=(Order("v", descending=True), Order("w"))) == [3, 0, 1]
    assert ready(train, order_by=(Order("none"),)) == [0, 1, 2, 3, 4, 5]


# Groups


def test_whole_groups_come_in_the_order_of_their_first_member(train):
    insert(train, 5, groups=["a", "b", "a", "b", "c"], group_size=2)
    insert(train, 2, ("y",), groups=["c", "d"], group_size=2)
    insert(train, 1)
    assert groups(train) == [[0, 2], [1, 3], [7]]
    update(train, [5], ("x",))
    assert groups(train) == [[0, 2], [1, 3], [4, 5], [7]]
    assert groups(train, 5) == [[0, 2], [1, 3]]
    assert groups(train, 3, unit="group") == [[0, 2], [1, 3], [4, 5]]
    assert groups(train, order_by=(Order("v"),)) == [[0, 2], [1, 3], [4, 5], [7]]


def test_a_group_with_a_held_failed_or_cleared_member_is_skipped(train):
    insert(train, 8, groups=list("aabbccdd"), group_size=2)
    update(train, [1], state="held")
    update(train, [3], state="failed")
    clear(train, np.array([5]))
    assert groups(train) == [[6, 7]]
    assert groups(train, take_incomplete=True) == [[2], [4], [6, 7]]
    update(train, [1], state="live")
    assert groups(train) == [[0, 1], [6, 7]]


def test_a_group_of_which_a_member_is_consumed_or_excluded_is_not_whole(train):
    insert(train, 6, groups=list("aabbcc"), meta=[{"v": 1}] * 5 + [{"v": 0}])
    consume(train, 0)
    assert groups(train, block_size=2, where=(Condition("v", "==", (1,)),)) == [[2, 3]]


def test_groups_of_unknown_size(train):
    insert(train, 3, groups=["a", "a", "b"])
    assert groups(train) == []
    assert groups(train, block_size=2) == [[0, 1]]
    assert groups(train, no_more=True) == [[0, 1], [2]]
    close_groups(train, ["b"])
    assert groups(train) == [[2]]
    seal(train)
    assert groups(train) == [[0, 1], [2]]


def test_blocks_stand_in_where_there_are_no_groups(train):
    insert(train, 8)
    update(train, [2], state="held")
    update(train, [5], state="failed")
    assert groups(train) == [[index] for index in (0, 1, 3, 4, 6, 7)]
    assert groups(train, block_size=2) == [[0, 1], [6, 7]]
    assert groups(train, block_size=2, take_incomplete=True) == [[0, 1], [4], [6, 7]]
    clear(train, np.array([6]))
    assert groups(train, block_size=2, take_incomplete=True) == [[0, 1], [4], [7]]
    assert groups(train, block_size=4) == []
    with pytest.raises(InvalidArgumentError, match="multiples of 8") as caught:
        groups(train, block_size=3)
    assert caught.value.metadata["option"] == "n_samples_per_prompt"


def test_runs_begin_anywhere(train):
    insert(train, 1)
    insert(train, 7, meta=[{"v": v} for v in (0, 0, 1, 1, 2, 2, 3)])
    consume(train, 0)
    runs = {"block_size": 2, "blocks": "anywhere"}
    assert groups(train, **runs) == [[1, 2], [3, 4], [5, 6]]
    update(train, [2], state="held")
    assert groups(train, **runs) == [[3, 4], [5, 6]]
    assert groups(train, 3, **runs) == [[3, 4]]
    assert groups(train, 1, unit="group", **runs) == [[3, 4]]
    assert groups(train, 1, unit="group", on_loop=False, **runs) == [[3, 4]]
    assert groups(train, where=(Condition("v", ">=", (1,)),), **runs) == [[3, 4], [5, 6]]
    assert groups(train, where=(Condition("v", ">", (1,)),), **runs) == [[5, 6]]
    newest_first = {"order_by": (Order("v", descending=True),)}
    assert groups(train, 4, **runs, **newest_first) == [[5, 6], [3, 4]]
    assert groups(train, block_size=9, blocks="anywhere") == []


def test_an_order_does_not_change_what_a_run_is(train):
    insert(train, 3000, meta=[{"v": i % 7} for i in range(3000)])
    consume(train, 0)
    plain = groups(train, block_size=3, blocks="anywhere")
    ordered = groups(train, 6, block_size=3, blocks="anywhere", on_loop=False, order_by=(Order("v", descending=True),))
    assert {tuple(sorted(each)) for each in ordered} <= {tuple(each) for each in plain}
    assert [max(index % 7 for index in each) for each in ordered] == [6, 6]


def test_of_a_block_is_left_what_is_live_or_held(train):
    insert(train, 9)
    update(train, [0], state="failed")
    update(train, [3], state="held")
    clear(train, np.array([7, 8]))
    blocks, task = np.array([2, 0, 1, 3]), task_of(train, "t")
    assert Grouping(train, task, 3, take_incomplete=True).needed(blocks, no_more=True).tolist() == [1, 2, 3, 0]
    assert Grouping(train, task, 3).needed(blocks, no_more=True).tolist() == [3, 3, 3, 3]
    assert Grouping(train, task, 3).is_dead(np.array([1, 4, 6])).tolist() == [True, False, True]


# Scanning


def test_rows_far_behind_are_found_over_growing_stretches(train):
    insert(train, 120_000, ())
    insert(train, 10)
    insert(train, 100_000, ())
    insert(train, 10)
    first = scan_of(train)
    assert next(found.tolist() for found, _ in first.first(10) if found.size) == list(range(120_000, 120_010))
    assert not first.exhausted
    assert ready(train, 10) == list(range(120_000, 120_010))
    assert ready(train, 12) == [*range(120_000, 120_010), 220_010, 220_011]
    last = scan_of(train)
    assert [found.size for found, _ in last.first(12)][-1] == 20
    assert last.exhausted


def test_groups_are_whole_across_stretches(train):
    names = [f"g{index % 60_000}" for index in range(120_000)]
    insert(train, 120_000, groups=names, group_size=2)
    with pytest.raises(MustBeAwaited):
        groups(train, 4)
    assert groups(train, 4, on_loop=False) == [[0, 60_000], [1, 60_001]]
    consume(train, *range(59_999), *range(60_000, 119_999))
    assert groups(train, 4) == [[59_999, 119_999]]


def test_a_scan_starts_at_the_first_row_that_may_be_ready(train):
    insert(train, 5000, ())
    insert(train, 3)
    assert ready(train, 1) == [5000]
    assert start_of(train) == 5000  # also past stretches that have nothing at all
    consume(train, 5000, 5001)
    assert ready(train, 1) == [5002]
    assert start_of(train) == 5002
    consume(train, 5002)
    assert ready(train, 1) == []
    assert start_of(train) == 5003


def test_the_start_is_lowered_when_an_early_row_becomes_ready(train):
    insert(train, 3000, ())
    task = task_of(train, "t")
    where = (Condition("v", "==", (1,)),)
    for change, expected in [
        (lambda: update(train, [2000], ("x",), meta=[{"v": 1}]), [2000]),
        (lambda: update(train, [1000], ("x",), meta=[{"v": 1}], state="held"), [2000]),
        (lambda: update(train, [1000], state="live"), [1000, 2000]),
        (lambda: update(train, [500], ("x",)), [1000, 2000]),
        (lambda: update(train, [500], meta=[{"v": 1}]), [500, 1000, 2000]),
        (lambda: consume(train, 500, 1000), [2000]),
        (lambda: reset(train, task, keep_consumed=True), [2000]),
        (lambda: reset(train, task, keep_consumed=False), [500, 1000, 2000]),
        (lambda: clear(train, np.arange(400, 2000)), [2000]),
        (lambda: insert(train, 1, meta=[{"v": 1}]), [2000, 3000]),
    ]:
        change()
        for _ in range(2):
            assert ready(train, 8, where=where) == expected


def test_a_released_claim_is_found_again(train):
    insert(train, 4)
    request, task = asks(), task_of(train, "t")
    task.deliver(plan_of([0, 1]), np.array([0, 1]), request_id=request.request_id)
    assert ready(train, 1) == [2]
    release(train, task, request.request_id)
    assert ready(train) == [0, 1, 2, 3]


def test_a_scan_during_which_rows_change_moves_the_start_no_further_than_to_these(train):
    insert(train, 4000, ())
    insert(train, 1)
    with train.scan_starts.watched() as watch:
        view = view_of(train, watch=watch)
        assert view.ready(1).tolist() == [4000]
        assert start_of(train) == 0
        update(train, [3000], ("x",))
    assert start_of(train) == 3000
    assert ready(train) == [3000, 4000]
    with train.scan_starts.watched() as watch:
        consume(train, 3000)
        assert view_of(train, watch=watch).ready(1).tolist() == [4000]
        reset(train, task_of(train, "t"), keep_consumed=False)
    assert ready(train) == [3000, 4000]


def test_a_scan_that_is_over_on_another_thread_moves_the_start_for_later_ones(train):
    insert(train, 4000, ())
    insert(train, 1)
    insert(train, 4000, ())
    insert(train, 1)
    with train.scan_starts.watched() as watch:
        assert view_of(train, watch=watch).ready().tolist() == [4000, 8001]
        insert(train, 1)
    assert (start_of(train), apart(train)) == (8001, [4000])
    assert ready(train) == [4000, 8001, 8002]


def test_ways_of_asking_that_are_forgotten_cost_no_memory(train):
    insert(train, 1)
    keys = [(("x",), (Condition("v", "==", (number,)),), None, False) for number in range(500)]
    for key in keys:
        ready(train, where=key[1])
    assert 0 < sum(start_of(train, key) > 0 for key in keys) <= 64
    keys = [(("x",), (Condition("v", "==", (f"{number:0100000}",)),), None, False) for number in range(64)]
    for key in keys:
        train.scan_starts.set(key, (1, np.zeros(0, np.int64)))
    assert 0 < sum(start_of(train, key) > 0 for key in keys) <= 10


def test_consumed_rows_are_compacted_away_under_a_running_task(train):
    taken = []
    for _ in range(50):
        insert(train, 100)
        rows = ready(train, 100)
        consume(train, *rows)
        taken += rows
        clear(train, np.array(rows[:90]))
    assert taken == list(range(5000))
    assert train.table.count < 2500


def test_ready_rows_that_no_claim_takes_are_not_in_the_way_of_others(train):
    """Each scan would go over all consumed rows behind them."""
    insert(train, 1, groups=["never"], group_size=4)
    insert(train, 50_000, groups=[f"g{row // 4}" for row in range(50_000)], group_size=4)
    insert(train, 1, groups=["nor this"], group_size=4)
    consume(train, *range(1, 40_001))
    for first in range(40_001, 40_061, 4):
        assert groups(train, 4) == [[*range(first, first + 4)]]
        assert start_of(train) >= first
        assert apart(train) == [0]
        consume(train, *range(first, first + 4))
    insert(train, 3, groups=["never"] * 3, group_size=4)
    consume(train, *range(40_061, 50_001))
    assert groups(train, 4) == [[0, 50_002, 50_003, 50_004]]
    consume(train, 0)
    groups(train, 4)
    assert not apart(train)


def test_rows_apart_come_back_when_they_are_written_to_or_released(train):
    insert(train, 1)
    insert(train, 9000, ())
    insert(train, 1)
    assert ready(train, 1) == [0]
    assert ready(train) == [0, 9001]
    task = task_of(train, "t")
    request = asks()
    claim_rows(train, task, np.array([0]), request.request_id)
    assert ready(train) == [9001]
    release(train, task, request.request_id)
    assert ready(train) == [0, 9001]
    update(train, [3, 5000], ("x",))
    assert ready(train) == [0, 3, 5000, 9001]
    update(train, [0], state="held")
    assert ready(train) == [3, 5000, 9001]
    update(train, [0], state="live")
    assert ready(train) == [0, 3, 5000, 9001]
    clear(train, np.array([0, 5000]))
    assert ready(train) == [3, 9001]


def test_groups_that_are_added_while_another_thread_looks_do_no_harm(train, monkeypatch):
    insert(train, 2, groups=["a", "a"])
    insert(train, 2)  # rows are there before their groups are
    real_zeros = np.zeros

    def zeros(*arguments, **options):
        monkeypatch.undo()
        train.groups.add(train.groups.check(["b", "c"], 0), 0, slice(2, 4))
        return real_zeros(*arguments, **options)

    grouping = Grouping(train, task_of(train, "t"), None)
    monkeypatch.setattr(np, "zeros", zeros)
    assert grouping.members(np.array([0])).tolist() == [0, 1]


# Lengths and the rest


def test_lengths_come_from_custom_meta_or_a_jagged_field(train):
    insert(train, 3, [dense("x"), jagged("ids", [4, 5, 6])], meta=[{"n": 40}, {}, {}])
    insert(train, 1, [dense("x")])
    source = LengthSource(key="n", field="ids")
    view = view_of(train, length=source)
    assert view.lengths(np.array([3, 0, 1, 99])).tolist() == [-1, 40, 5, -1]
    assert view.field_lengths("ids", np.array([0, 2, 3, 99])).tolist() == [4, 6, -1, -1]
    assert view.field_lengths("x", np.array([0])).tolist() == view.field_lengths("none", np.array([0])).tolist() == [-1]
    assert ready(train, length=source) == [0, 1, 2]
    assert ready(train, length=LengthSource(key="n")) == [0]


NO_COUNTS = [-1, 0.5, float("inf"), -float("inf"), float("nan"), 1e300, 2.0**63, 2**63, "long", True, [3], {"n": 3}]


@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
@pytest.mark.parametrize("order", [(), (Order("n"),)], ids=["unordered", "ordered"])
def test_lengths_must_be_counts(train, value, order):
    insert(train, 1, groups=["a"], group_size=1, meta=[{"n": value}])
    for read in (ready, groups):
        with pytest.raises(InvalidArgumentError, match=r"'n' of sample 0 is .*; expected a token count"):
            read(train, length=LengthSource(key="n"), order_by=order)
    with pytest.raises(InvalidArgumentError, match="token count"):
        view_of(train, length=LengthSource(key="n")).lengths(np.array([0]))


@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
@pytest.mark.parametrize("order", [(), (Order("n"),)], ids=["unordered", "ordered"])
def test_the_length_of_a_row_that_cannot_be_claimed_does_not_matter(train, value, order):
    """It is failed, held, consumed, lacks a field, does not pass `where`, or its group is not whole."""
    wrong = {"n": value, "kind": "bad"}
    insert(train, 3, groups=["good"] * 3, group_size=3, meta=[{"n": 4, "kind": "good"}] * 3)
    insert(train, 1, state="failed", meta=[wrong])
    insert(train, 1, state="held", meta=[wrong])
    insert(train, 2, meta=[wrong] * 2)
    consume(train, 5)
    clear(train, np.array([6]))
    insert(train, 1, (), meta=[wrong])
    insert(train, 1, groups=["begun"], group_size=2, meta=[wrong])
    insert(train, 2, groups=["lost", "lost"], group_size=2, meta=[wrong, {}])
    update(train, [10], state="failed")
    asked = {"length": LengthSource(key="n"), "order_by": order}
    assert groups(train, **asked) == [[0, 1, 2]]
    assert groups(train, on_loop=False, **asked) == [[0, 1, 2]]
    assert ready(train, where=(Condition("kind", "==", ("good",)),), **asked) == [0, 1, 2]


def test_the_largest_counts(train):
    insert(train, 2, meta=[{"n": 0}, {"n": 2**63 - 1}])
    insert(train, 1, meta=[{"m": float(2**63 - 1024)}])
    assert view_of(train, length=LengthSource(key="n")).lengths(np.array([0, 1])).tolist() == [0, 2**63 - 1]
    assert view_of(train, length=LengthSource(key="m")).lengths(np.array([2])).tolist() == [2**63 - 1024]


def test_whole_numbers_do_as_doubles(train):
    insert(train, 2, ("x",), meta=[{"n": 3.0}, {"n": 4.0}])
    assert view_of(train, length=LengthSource(key="n")).lengths(np.array([0, 1])).tolist() == [3, 4]


@pytest.mark.parametrize(("column", "kind"), [(dense("ids"), "scalars"), (objects("ids"), "objects")])
def test_a_length_field_without_lengths_is_an_error_once_rows_wait_for_nothing_else(train, column, kind):
    length = LengthSource(key="n", field="ids")

    def look(length):
        search_of(train, length=length).conclude(None)

    insert(train, 1, ())
    look(length)  # no sample has the field, so lengths may come
    insert(train, 1, [column])
    look(length)  # both lack data too
    insert(train, 4, [dense("x"), column])
    look(LengthSource(key="n"))
    with pytest.raises(MissingLengthError, match=f"'ids', which has {kind}; .* of samples 2, 3, 4 and others"):
        look(length)
    consume(train, 2, 3, 4, 5)
    look(length)
    insert(train, 1, meta=[{"n": 3}])
    insert(train, 1)
    look(length)


def lengths_of(train, *names):
    """Return the lengths of all rows for a sampler that names no source."""
    view = view_of(train, length=LengthSource(), data_fields=names)
    assert view.ready().tolist() == view.rows().tolist()
    return view.lengths(view.rows()).tolist()


def test_a_length_is_that_of_the_longest_requested_sequence_unless_custom_meta_has_one(train):
    """Scalars, objects and rows of several dimensions have none, and other samples do not matter."""
    columns = [
        dense("x"),
        objects("text"),
        dense("image", 90, 90),
        jagged("ids", [4, 5, 6]),
        jagged("answer", [1, 9, 2]),
    ]
    insert(train, 3, columns, meta=[{"total_lengths": 40}, {}, {"tokens": 70}])
    names = [column.spec.name for column in columns]
    assert lengths_of(train, *names) == lengths_of(train, *reversed(names)) == [40, 9, 6]
    assert lengths_of(train, "image", "ids") == [40, 5, 6]
    assert ready(train, length=LengthSource(), data_fields=("x", "image")) == [0]
    assert ready(train, length=LengthSource(key="total_lengths"), data_fields=("ids",)) == [0]
    assert view_of(train, length=LengthSource(field="ids"), data_fields=("answer",)).lengths(np.arange(3)).tolist() == [
        40,
        5,
        6,
    ]


def test_lengths_stay_the_same_when_the_first_row_of_another_length_is_put(train):
    insert(train, 2, [dense("ids", 7), jagged("answer", [2, 3])])
    assert lengths_of(train, "answer", "ids") == [7, 7]
    assert not train.cells.fields["ids"].spec.ragged_dims
    insert(train, 1, [dense("ids", 5), jagged("answer", [6])])
    assert train.cells.fields["ids"].spec.ragged_dims
    assert lengths_of(train, "answer", "ids") == [7, 7, 6]


@pytest.mark.parametrize(
    "settings",
    [{"default_layout": Layout.DENSE}, {"fields": (FieldSpec("vector", layout=Layout.DENSE),)}],
    ids=["default_layout", "fields"],
)
def test_fields_declared_dense_have_no_lengths(settings):
    train = scanned(**settings)
    insert(train, 1, [dense("vector", 9), dense("x")])
    with pytest.raises(MissingLengthError):
        search_of(train, length=LengthSource(), data_fields=("vector",)).conclude(None)
    if settings.get("fields"):
        insert(train, 1, [dense("vector", 9), dense("ids", 3)])
        assert ready(train, length=LengthSource(), data_fields=("ids", "vector")) == [1]
        assert view_of(train, length=LengthSource(), data_fields=("ids", "vector")).lengths(np.array([1])).tolist() == [
            3
        ]


def test_fields_without_sequences_are_an_error_once_rows_wait_for_nothing_else(train):
    def look():
        search_of(train, length=LengthSource(), data_fields=("x", "text"), sampler=SeqlenBalancedSampler()).conclude(
            None
        )

    insert(train, 2, ("x",))
    look()  # no sample has the text, which may be a tensor
    insert(train, 4, [dense("x"), objects("text")])
    with pytest.raises(
        MissingLengthError,
        match=r"data_fields is 'x', 'text', without a field .* of samples 2, 3, 4 and others, because sampler "
        r"'seqlen_balanced' needs them\. Set length_field .* custom_meta column 'total_lengths'",
    ):
        look()
    consume(train, 2, 3, 4, 5)
    look()
    insert(train, 1, [dense("x"), objects("text")], meta=[{"total_lengths": 3}])
    insert(train, 1, [dense("x"), objects("text")])
    look()  # it may get a length as well


def test_anything_else_about_rows(train):
    insert(train, 2, groups=["a", ""], meta=[{"v": 7, "s": "t"}, {}])
    insert(train, 2, state="held")
    update(train, [1], state="failed")
    clear(train, np.array([3]))
    view = view_of(train)
    every = np.array([0, 1, 2, 3, 9])
    assert view.states(every) == ["live", "failed", "held", "cleared", "cleared"]
    assert view.group_names(every) == ["a", None, None, None, None]
    assert view.rows().tolist() == [0, 1, 2]
    values, present = view.values("v", every)
    assert present.tolist() == [True, False, False, False, False]
    assert values[0] == 7
    assert not view.values("none", every)[1].any()


# What can still become ready


def all_is_ready(train, *, call="ready", **bound):
    """Whether a sealed partition would have no other rows ready than it has."""
    search, is_sealed = search_of(train, **bound), train.sealed
    if call == "ready":
        search.view.ready()
    else:
        search.view.ready_groups(block_size=2, blocks="anywhere" if call == "runs" else "aligned")
    train.sealed = True
    is_last = search.begins_last()
    train.sealed = is_sealed
    return is_last


def test_no_plain_row_can_become_ready_when_all_are_ready_or_done(train):
    insert(train, 4)
    insert(train, 1, ())
    assert not all_is_ready(train)
    update(train, [4], state="failed")
    consume(train, 0)
    assert all_is_ready(train)
    update(train, [1], state="held")
    assert not all_is_ready(train)
    clear(train, np.array([1]))
    assert all_is_ready(train)


def test_excluded_rows_cannot_become_ready(train):
    where = (Condition("v", ">=", (2,)),)
    insert(train, 1, (), meta=[{"v": 1}])
    insert(train, 1)  # all its data is there, and no value
    assert all_is_ready(train, where=where)
    insert(train, 1, ())
    assert not all_is_ready(train, where=where)
    update(train, [2], ("x",))
    assert all_is_ready(train, where=where)
    insert(train, 1, (), meta=[{"v": 2}])
    assert not all_is_ready(train, where=where)


def test_no_row_of_a_group_that_can_never_be_whole_can_become_ready(train):
    insert(train, 2, groups=["a", "a"], group_size=2)
    insert(train, 1, (), groups=["short"], group_size=2)
    assert all_is_ready(train, call="groups")
    insert(train, 2, (), groups=["b", "b"], group_size=2)
    assert not all_is_ready(train, call="groups")
    update(train, [4], state="failed")
    assert all_is_ready(train, call="groups")


def test_no_row_of_a_block_that_can_never_be_whole_can_become_ready(train):
    insert(train, 4)
    insert(train, 2, ())
    assert not all_is_ready(train, call="groups")
    clear(train, np.array([5]))
    assert all_is_ready(train, call="groups")


def test_no_row_without_enough_rows_beside_it_can_become_ready_in_a_run(train):
    insert(train, 1)
    insert(train, 3, ())
    assert not all_is_ready(train, call="runs")
    update(train, [2], state="failed")
    assert not all_is_ready(train, call="runs")
    consume(train, 0)
    assert all_is_ready(train, call="runs")


# What is left


def test_what_is_left_is_neither_consumed_nor_failed_nor_excluded(train):
    insert(train, 2, ())
    insert(train, 6, meta=[{"v": v} for v in (1, 1, 1, 0, 1, 1)])
    consume(train, 2)
    update(train, [3], state="held")
    update(train, [4], state="failed")
    clear(train, np.array([7]))
    assert view_of(train).left().tolist() == [0, 1, 3, 5, 6]
    assert view_of(train).left(2).tolist() == [0, 1]
    assert view_of(train, where=(Condition("v", "==", (1,)),)).left().tolist() == [0, 1, 3, 6]


@pytest.mark.parametrize("on_loop", [True, False])
def test_a_row_that_comes_back_is_left_again(train, on_loop):
    def left(limit=1, **bound):
        with train.scan_starts.watched() as watch:
            return view_of(train, watch=None if on_loop else watch, **bound).left(limit).tolist()

    insert(train, 2000)
    task = task_of(train, "t")
    claim = claim_rows(train, task, np.arange(1500))
    for _ in range(3):  # the start of the scan is moved
        assert left() == [1500]
        assert left(where=(Condition("v", "==", (1,)),)) == []
    release(train, task, claim.request_id)
    assert left() == [0]
    consume(train, 0)
    assert left(3) == [1, 2, 3]
    reset(train, task, keep_consumed=False)
    assert left() == [0]


def test_planned_rows_are_looked_at_again(train):
    insert(train, 3, ("x", "y"))
    search = search_of(train, data_fields=("x", "y"))

    def conclude(*rows):
        return search.conclude(Plan.of([rows]))

    assert conclude(2, 0).positions.tolist() == [2, 0]
    for made, rows in ((search, [2, 9]), (search_of(train, data_fields=("z",)), [0])):
        with pytest.raises(SamplerError, match="not ready"):
            made.conclude(Plan.of([rows]))
    consume(train, 0)
    update(train, [1], state="held")
    assert conclude(0) is NOT_LOOKED
    assert conclude(1) is NOT_LOOKED
    assert conclude(2).positions.tolist() == [2]
    assert Plan.of([[2]]).ranks[0].rows.dtype == np.int64
