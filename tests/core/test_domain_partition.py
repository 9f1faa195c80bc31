"""A partition: states, what held and failed rows may become, sealing, and counters that agree with a recount."""

from dataclasses import replace

import numpy as np
import pytest
from digest import keys_of
from domain_support import (
    clear,
    close_groups,
    insert,
    new_id,
    new_write,
    partition,
    plan_of,
    release,
    reset,
    seal,
    set_meta,
    task_of,
    update,
)

from tq_service.errors import (
    InvalidArgumentError,
    PartitionSealedError,
    PreconditionError,
    SampleNotFoundError,
    StaleIncarnationError,
    TaskNotFoundError,
)
from tq_service.schema import Admission, FieldSpec
from tq_service.state.partition import PartitionSettings
from tq_service.state.table import CLEARED, FAILED, HELD, LIVE, UNCLAIMED


def recount(train):
    states = train.state.data[train.table.present_positions()]
    return [int((states == code).sum()) for code in (CLEARED, LIVE, HELD, FAILED)]


def open_rows(train, task):
    states = train.state.data[: train.table.count]
    return int((((states == LIVE) | (states == HELD)) & (task.claim.data[: train.table.count] == UNCLAIMED)).sum())


def claim(train, task, indexes, request_id=None):
    rows = np.array(indexes, np.int64)
    request_id = request_id or new_id()
    task.deliver(plan_of(rows), train.table.find(rows), request_id=request_id)
    return request_id


def test_states_and_their_counts():
    train = partition()
    insert(train, 3)
    insert(train, 2, state="held")
    insert(train, 1, state="failed")
    assert train.state_counts == recount(train) == [0, 3, 2, 1]
    update(train, [3], state="live")
    update(train, [0, 1], state="held")
    update(train, [1, 2], state="failed")
    assert train.state_counts == recount(train) == [0, 1, 2, 3]
    assert train.open_count == 3
    clear(train, np.array([0, 1, 5]))
    assert train.state_counts == recount(train) == [0, 1, 1, 1]
    assert (train.inserted_count, train.table.present_count) == (6, 3)


def test_a_failed_sample_cannot_come_back():
    train = partition()
    insert(train, 2)
    update(train, [1], state="failed")
    before = train.version
    for state in ("live", "held"):
        with pytest.raises(PreconditionError, match="sample 1 ", check=lambda error: error.reason == "SAMPLE_FAILED"):
            update(train, [0, 1], state=state, meta=[{"v": 1}, {"v": 2}])
    assert train.version == before
    assert not train.meta.has("v")
    update(train, [1], state="failed")


def test_open_rows_of_a_task_are_counted_through_all_that_happens():
    train = partition()
    insert(train, 4)
    task = task_of(train, "t")
    assert task.backlog == open_rows(train, task) == 4
    insert(train, 4, state="held")
    insert(train, 2, state="failed")
    first = claim(train, task, [0, 1, 2])
    second = claim(train, task, [3])
    late = task_of(train, "late")
    for change in (
        lambda: update(train, [0, 4], state="failed"),  # one consumed, one open
        lambda: update(train, [1, 5], state="held"),
        lambda: clear(train, np.array([1, 5, 9])),
        lambda: release(train, task, first),
        lambda: clear(train, np.array([2, 0])),
        lambda: release(train, task, second),
        lambda: release(train, task, second),
        lambda: claim(train, task, [3]),
        lambda: reset(train, task, keep_consumed=True),
        lambda: reset(train, task, keep_consumed=False),
    ):
        change()
        assert task.backlog == open_rows(train, task)
        assert late.backlog == open_rows(train, late) == train.open_count
    assert (task.epoch, task.consumed_count) == (2, 0)


def test_releasing_counts_the_samples_that_are_claimable_again():
    train = partition()
    insert(train, 4)
    task = task_of(train, "t")
    request_id = claim(train, task, [0, 1, 2, 3])
    update(train, [1], state="failed")
    update(train, [2], state="held")
    clear(train, np.array([3]))
    assert release(train, task, request_id) == 1
    assert (task.consumed_count, task.backlog) == (0, 2)
    assert request_id in task.ended


@pytest.mark.parametrize("expected", [0, 3])
def test_reaching_the_expected_number_seals(expected):
    train = partition(expected_samples=expected)
    assert train.sealed == (expected == 0)
    if expected:
        insert(train, 2)
        assert not train.sealed
        insert(train, 2)
    assert train.sealed
    with pytest.raises(PartitionSealedError):
        insert(train, 1)


def test_cleared_samples_count_as_inserted():
    train = partition(expected_samples=3)
    insert(train, 2)
    clear(train, np.array([0, 1]))
    assert insert(train, 1) == [2]
    assert train.sealed


def test_the_insert_step_divides_every_put_of_new_rows():
    train = partition()
    assert train.insert_size_gcd == 0
    insert(train, 8, keys=[f"k{i}" for i in range(8)])
    insert(train, 12)
    assert train.insert_size_gcd == 4
    insert(train, 4, keys=["k0", "k1", "new", "newer"])
    assert train.insert_size_gcd == 2
    update(train, [0])
    assert train.insert_size_gcd == 2


def test_keys_go_with_their_samples():
    train = partition()
    insert(train, 3, keys=["a", "b", "c"])
    clear(train, np.array([1]))
    assert keys_of(train) == {"a": 0, "c": 2}
    assert insert(train, 1, keys=["b"]) == [3]


def test_samples_are_named_once_and_must_be_there():
    train = partition()
    insert(train, 3)
    clear(train, np.array([1]))
    assert train.positions_of(np.array([2, 0])).tolist() == [2, 0]
    with pytest.raises(SampleNotFoundError, match=r"no sample 1 \(2 of 3 are missing\)"):
        train.positions_of(np.array([0, 1, 7]))
    with pytest.raises(InvalidArgumentError, match="twice"):
        train.positions_of(np.array([0, 0]))


def test_set_meta_writes_all_or_nothing():
    train = partition()
    insert(train, 2)
    columns = new_write(2, meta=[{"v": 1}, {"v": 2}]).meta
    set_meta(train, np.array([1, 0]), columns)
    assert train.meta.read("v", np.array([0, 1])).values.tolist() == [2, 1]
    with pytest.raises(SampleNotFoundError):
        set_meta(train, np.array([1, 5]), columns)
    with pytest.raises(InvalidArgumentError):
        set_meta(train, np.array([0, 1]), [replace(columns[0], name="state")] * 2)
    assert train.meta.read("v", np.array([0, 1])).values.tolist() == [2, 1]


def test_every_change_is_told_and_counted():
    train = partition()
    told = []
    train.on_change.append(lambda: told.append(train.version))
    insert(train, 2, groups=["a", "a"])
    task = task_of(train, "t")
    request_id = claim(train, task, [0])
    changes = [
        lambda: update(train, [0]),
        lambda: update(train, [0], state="held"),
        lambda: set_meta(train, np.array([0]), new_write(1, meta=[{"v": 1}]).meta),
        lambda: close_groups(train, ["a"]),
        lambda: release(train, task, request_id),
        lambda: reset(train, task, keep_consumed=True),
        lambda: seal(train),
        lambda: clear(train, np.array([0])),
    ]
    for change in changes:
        before, count = train.version, len(told)
        change()
        assert len(told) == count + 1
        assert told[-1] == train.version != before
    clear(train, np.array([0]))
    seal(train)
    assert train.version == told[-1]


def test_lives_and_tasks_are_told_apart():
    train, other = partition(), partition()
    train.check_incarnation(b"")
    train.check_incarnation(train.incarnation)
    with pytest.raises(StaleIncarnationError) as caught:
        train.check_incarnation(other.incarnation)
    assert caught.value.metadata["got"] == other.incarnation.hex()
    task_of(train, "update_actor")
    with pytest.raises(TaskNotFoundError, match="update_actor"):
        train.known_task("update_actr")


def test_a_partition_that_lives_for_weeks_stays_small():
    """Puts, claims by ranks and by workers, and clears, again and again: nothing grows but the counters."""
    from domain_support import asks

    train = partition()
    trainer, reward = task_of(train, "trainer"), task_of(train, "reward")
    for step in range(300):
        keys, groups = [f"{step}/{i}" for i in range(16)], [f"{step}"] * 16
        fresh = insert(train, 16, ("x", "y"), keys=keys, groups=groups, group_size=16, meta=[{"v": step}] * 16)
        rows = np.array(fresh)
        claim(train, reward, fresh)
        request = asks((0, 1, step), task="trainer")
        trainer.deliver(plan_of(rows), train.table.find(rows), batch_spec=request.batch_spec)
        clear(train, rows)
    assert train.inserted_count == 4800
    assert train.table.index.data.size <= 2400
    assert (keys_of(train), len(train.groups), list(train.cells.puts.all())) == ({}, 0, [])
    for task in (trainer, reward):
        assert not (task._by_serial or task.batches or task.claims)
        assert (task.consumed_count, task.backlog) == (4800, 0)


def test_settings_are_the_same_in_any_order():
    one, two = FieldSpec("a", dtype="int64"), FieldSpec("b", dtype="float32")
    limits = [Admission(name, 1) for name in "st"]
    settings = [
        PartitionSettings(fields=fields, tasks=tasks, admissions=tuple(bounds))
        for fields, tasks, bounds in [((one, two), ("s", "t"), limits), ((two, one), ("t", "s"), limits[::-1])]
    ]
    assert settings[0] == settings[1]
    assert not settings[0].describe_difference(settings[1])
