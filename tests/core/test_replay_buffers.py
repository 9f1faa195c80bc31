"""Replay buffers: what makes way for new samples, and how often a task is delivered samples for each one inserted."""

import asyncio
import random

import pytest
from digest import digest
from domain_support import ack, asks, new_id, new_write, release, seal, turns, update
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import AdmissionLimitError, InvalidArgumentError
from tq_service.machine.claims import TaskAdvanced
from tq_service.samplers import PlanRunner, ReplaySampler, SequentialSampler
from tq_service.schema import Admission
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import NotYet
from tq_service.serving.status import evicted_by
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import LeaseTerms

DROPS = {"overflow": "drop_lowest", "priority_key": "priority"}
LEASE = LeaseTerms(seconds=60.0)


def buffer(most, **admission):
    catalog = Catalog(PlanRunner())
    return catalog, catalog.create("train", PartitionSettings(admissions=(Admission("t", most, **admission),)))


async def put(catalog, priorities, *, wait=0.0, request_id=None, **arguments):
    """Add samples, each with its priority, as a call does; return their indexes."""
    entries = [{} if priority is None else {"priority": float(priority)} for priority in priorities]
    write = new_write(len(priorities), ("x",), meta=entries, **arguments)
    deadline = asyncio.get_running_loop().time() + wait
    with await catalog.admission_queue("train").enter(request_id or new_id(), write, 0, deadline):
        return [*map(int, catalog.write("train", b"", write).global_indexes)]


async def claim(catalog, *, max_wait=0.0, **arguments):
    return (await catalog.claim("train", b"", asks(**arguments), max_wait)).answer


async def batch(catalog, index, size, *, sampler=None, max_wait=0.0, **bound):
    sampler = sampler or ReplaySampler(fresh=0)
    return await claim(catalog, rank=(0, 1, index), batch_size=size, sampler=sampler, max_wait=max_wait, **bound)


def present(train):
    return train.table.index[train.table.present_positions()].tolist()


def advance(catalog, trained):
    catalog.commit(TaskAdvanced(partition_id="train", task_name="t", trained=trained))


# overflow="drop_lowest"


async def test_new_samples_replace_those_of_the_lowest_priority():
    catalog, train = buffer(4, **DROPS)
    await put(catalog, [5, 1, 3, 2], keys=["a", "b", "c", "d"])
    assert await put(catalog, [0, 9]) == [4, 5], "the new ones stay, whatever their priorities"
    assert present(train) == [0, 2, 4, 5]
    assert (train.tasks["t"].overflow_count, train.tasks["t"].outstanding_count) == (2, 4)
    units = evicted_by(train.tasks["t"], 0, 10).units
    assert [(unit.key, unit.reason, unit.sample_count) for unit in units] == [
        ("b", "overflow", 1),
        ("d", "overflow", 1),
    ]
    with pytest.raises(AdmissionLimitError, match="split the put"):
        await put(catalog, [1] * 5)
    assert present(train) == [0, 2, 4, 5]


@pytest.mark.parametrize("key", ["", "priority"])
async def test_without_priorities_the_oldest_go_first(key):
    catalog, train = buffer(3, overflow="drop_lowest", priority_key=key)
    await put(catalog, [None, None, None])
    await put(catalog, [None, 7])
    assert present(train) == [2, 3, 4]
    await put(catalog, [None])
    assert present(train) == ([3, 4, 5] if not key else [2, 3, 5]), "samples without a value go last"


async def test_changed_priorities_count():
    catalog, train = buffer(2, **DROPS)
    await put(catalog, [1, 2])
    update(catalog, [0], meta=[{"priority": 3.0}])
    await put(catalog, [9])
    assert present(train) == [0, 2]


async def test_what_is_in_use_stays_and_then_puts_wait():
    catalog, train = buffer(4, **DROPS)
    await put(catalog, [1, 2, 3, 4])
    assert set((await batch(catalog, 0, 64)).rows.tolist()) == {0, 1, 2, 3}, "all are in a batch"
    with pytest.raises(AdmissionLimitError, match="would have 5 samples that cannot be dropped"):
        await put(catalog, [9])
    waiting = asyncio.ensure_future(put(catalog, [9], wait=30.0))
    await turns()
    assert not waiting.done()
    advance(catalog, 0)
    assert await waiting == [4]
    assert present(train) == [1, 2, 3, 4]


async def test_leased_and_held_samples_stay():
    catalog, train = buffer(4, **DROPS)
    await put(catalog, [0], state="held")
    await put(catalog, [1, 2, 3])
    leased = await claim(catalog, task="other", batch_size=1, lease=LEASE)
    assert leased.rows.tolist() == [1]
    await put(catalog, [4])
    assert present(train) == [0, 1, 3, 4]
    release(catalog, train.tasks["other"], leased.request_id)
    await put(catalog, [5])
    assert present(train) == [0, 3, 4, 5]


async def test_groups_go_whole_by_their_mean_priority_and_free_their_names():
    catalog, train = buffer(3, unit="group", **DROPS)
    for name, priorities in {"a": [0, 9], "b": [4, 4], "c": [1, 2]}.items():
        await put(catalog, priorities, groups=[name] * 2, group_size=2)
    update(catalog, [5], state="failed")
    await put(catalog, [0], groups=["d"], group_size=2)
    assert present(train) == [0, 1, 2, 3, 6], "the failed sample goes with its group"
    await put(catalog, [5, 5], groups=["e"] * 2, group_size=2)
    assert present(train) == [0, 1, 6, 7, 8], "d is not complete"
    units = evicted_by(train.tasks["t"], 0, 10).units
    assert [(unit.unit, unit.group, unit.sample_count) for unit in units] == [("group", "c", 2), ("group", "b", 2)]
    await put(catalog, [9, 9], groups=["b"] * 2, group_size=2)
    assert present(train) == [6, 7, 8, 9, 10]


async def test_rollouts_go_whole_once_they_are_closed():
    catalog, train = buffer(2, unit="rollout", **DROPS)
    await put(catalog, [1, 1], rollouts=["a", "a"], groups=["g", "g"], group_size=3)
    await put(catalog, [5], rollouts=["b"], groups=["g"], ends_rollouts=True)
    await put(catalog, [9], rollouts=["c"], ends_rollouts=True)
    assert present(train) == [0, 1, 3], "a is lower, but open"
    with pytest.raises(AdmissionLimitError, match="3 rollouts that cannot be dropped"):
        await put(catalog, [9, 9], rollouts=["d", "e"])
    update(catalog, [1], ends_rollouts=True)
    await put(catalog, [9, 9], rollouts=["d", "e"], ends_rollouts=True)
    assert present(train) == [4, 5]
    units = evicted_by(train.tasks["t"], 0, 10).units
    assert [(unit.unit, unit.rollout, unit.sample_count) for unit in units] == [
        ("rollout", "b", 1), ("rollout", "a", 2), ("rollout", "c", 1),
    ]  # fmt: skip


async def test_rollouts_are_drawn_whole():
    catalog, _ = buffer(1 << 20)
    await put(catalog, [1] * 6, rollouts=[*"abbccc"], ends_rollouts=True)
    rollouts = {0: [0], 1: [1, 2], 3: [3, 4, 5]}
    for index in range(8):
        rows, drawn = (await batch(catalog, index, 4, batch_unit="rollout")).rows.tolist(), []
        while rows:
            drawn.append(rollouts[rows[0]])
            assert rows[: len(drawn[-1])] == drawn[-1]
            rows = rows[len(drawn[-1]) :]
        assert len(drawn) == 4


@examples(60)
@given(st.integers(0, 2**32))
def test_a_buffer_never_exceeds_its_size_and_drops_the_lowest(seed):
    task, most = asyncio.run(_fill_at_random(random.Random(seed)))
    assert task.outstanding_count <= most


async def _fill_at_random(rng):
    most = rng.randint(2, 8)
    catalog, train = buffer(most, **DROPS)
    task, priorities, index, trained, held = train.tasks["t"], {}, 0, -1, {}
    for _ in range(60):
        action = rng.choice(["put", "put", "batch", "advance", "lease", "end", "priority"])
        if action == "put":
            values = [rng.randint(0, 5) for _ in range(rng.randint(1, most))]
            in_use = {row for claim in task.untrained() for row in claim.rows.tolist()}
            in_use |= {row for claim in held.values() for row in claim.rows.tolist()}
            before, dropped_before = present(train), task.overflow_count
            try:
                new = await put(catalog, values)
            except AdmissionLimitError:
                assert present(train) == before, "a refused put changes nothing"
                assert len(values) + task.outstanding_count > most
                continue
            priorities |= dict(zip(new, values, strict=True))
            gone = sorted(set(before) - set(present(train)))
            free = sorted((row for row in before if row not in in_use), key=lambda row: (priorities[row], row))
            assert sorted(free[: len(gone)]) == gone
            assert len(gone) == task.overflow_count - dropped_before == max(0, len(before) + len(values) - most)
        elif action == "batch" and present(train):
            await batch(catalog, index, rng.randint(1, 3), sampler=ReplaySampler(fresh=0, priority_key="priority"))
            index = task.next_batch_index
        elif action == "advance" and index > trained + 1:
            trained = rng.randint(trained + 1, index - 1)
            advance(catalog, trained)
        elif action == "lease" and len(held) < 2:
            answer = await claim(catalog, task="other", batch_size=1, lease=LEASE)
            if not isinstance(answer, NotYet):
                held[answer.request_id] = answer
        elif action == "end" and held:
            request_id, _ = held.popitem()
            rng.choice([ack, release])(catalog, train.tasks["other"], request_id)
        elif action == "priority" and present(train):
            row = rng.choice(present(train))
            priorities[row] = rng.randint(0, 5)
            update(catalog, [row], meta=[{"priority": float(priorities[row])}])
        assert task.outstanding_count <= most
        restored = Partition.restore(train.snapshot()) if rng.random() < 0.1 else train
        assert digest(restored) == digest(train)
    return task, most


# samples_per_insert


async def test_batches_wait_for_inserts_and_puts_for_deliveries():
    catalog, train = buffer(1000, samples_per_insert=2.0, min_size_to_sample=4, error_buffer=4)
    await put(catalog, [1] * 3)
    assert isinstance(await batch(catalog, 0, 2), NotYet), "fewer than min_size_to_sample"
    await put(catalog, [1] * 3)  # 2 * (6 - 4) = 4 deliveries are due, at most 4 behind
    with pytest.raises(
        AdmissionLimitError, match=r"task 't' received 0 samples, and 6 were inserted into partition 'train'"
    ):
        await put(catalog, [1])
    for index in range(4):  # 8 deliveries, at most 4 ahead
        assert (await batch(catalog, index, 2)).rows.size == 2
    assert isinstance(await batch(catalog, 4, 2), NotYet)
    waiting = asyncio.ensure_future(batch(catalog, 4, 2, max_wait=30.0))
    await turns()
    assert not waiting.done()
    await put(catalog, [1])
    assert (await waiting).rows.size == 2
    assert train.tasks["t"].delivered_count == 10


async def test_a_put_that_waits_is_let_in_by_a_batch():
    catalog, _ = buffer(1000, samples_per_insert=1.0, error_buffer=2)
    await put(catalog, [1] * 3)
    waiting = asyncio.ensure_future(put(catalog, [1], wait=30.0))
    await turns()
    assert not waiting.done()
    await batch(catalog, 0, 1)
    assert await waiting == [3]


async def test_a_sealed_partition_has_no_ratio():
    catalog, _ = buffer(1000, samples_per_insert=1.0, error_buffer=1)
    await put(catalog, [1])
    assert (await batch(catalog, 0, 1)).rows.size == 1
    assert isinstance(await batch(catalog, 1, 1), NotYet)
    seal(catalog)
    assert (await batch(catalog, 1, 1)).rows.size == 1


async def test_released_deliveries_count_no_more():
    catalog, train = buffer(1000, samples_per_insert=1.0, error_buffer=2)
    await put(catalog, [1, 1, 1])
    taken = await claim(catalog, batch_size=3, least=1, lease=LEASE, sampler=SequentialSampler())
    assert train.tasks["t"].delivered_count == taken.rows.size == 3
    release(catalog, train.tasks["t"], taken.request_id)
    assert train.tasks["t"].delivered_count == 0
    assert Partition.restore(train.snapshot()).tasks["t"].delivered_count == 0


async def test_batches_that_never_fit_are_refused():
    catalog, _ = buffer(1000, samples_per_insert=1.0, error_buffer=2)
    with pytest.raises(InvalidArgumentError, match=r"batch_size asks for 5 samples across all ranks; .* at most 4"):
        await batch(catalog, 0, 5)
    await put(catalog, [1] * 5, groups=["a"] * 5, group_size=5)
    await batch(catalog, 0, 1, batch_unit="group")
    with pytest.raises(InvalidArgumentError, match="asks for 5 samples"):
        await batch(catalog, 1, 1, batch_unit="group")
    with pytest.raises(AdmissionLimitError, match="split the put"):
        await put(catalog, [1] * 6)


@examples(40)
@given(
    ratio=st.sampled_from([0.5, 1.0, 2.5, 4.0]),
    least=st.integers(1, 6),
    batch_size=st.integers(1, 6),
    put_size=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_the_ratio_holds_in_both_directions_and_nobody_waits_for_ever(*, ratio, least, batch_size, put_size, seed):
    error_buffer, behind = asyncio.run(_exchange(ratio, least, batch_size, put_size, random.Random(seed)))
    assert -error_buffer - 1e-9 <= min(behind, default=0)
    assert max(behind, default=0) <= max(error_buffer, ratio * put_size) + 1e-9


async def _exchange(ratio, least, batch_size, put_size, rng):
    size = max(1.0, ratio, (batch_size + ratio * put_size) / 2)
    error_buffer = int(-(-size // 1))
    catalog, train = buffer(1 << 20, samples_per_insert=ratio, min_size_to_sample=least, error_buffer=error_buffer)
    task, index, failures, found = train.tasks["t"], 0, 0, []
    while index < 20 and failures < 8:
        behind = ratio * (train.inserted_count - least) - task.delivered_count
        if rng.random() < 0.5:
            fits = train.inserted_count < least or behind + ratio * put_size <= error_buffer + 1e-9
            try:
                await put(catalog, [1] * put_size)
                assert fits
                failures = 0
            except AdmissionLimitError:
                assert not fits
                failures += 1
        else:
            fits = train.inserted_count >= least and behind - batch_size >= -error_buffer - 1e-9
            answer = await batch(catalog, index, batch_size)
            assert isinstance(answer, NotYet) != fits
            index, failures = (index, failures + 1) if isinstance(answer, NotYet) else (index + 1, 0)
        behind = ratio * (train.inserted_count - least) - task.delivered_count
        may_put = train.inserted_count < least or behind + ratio * put_size <= error_buffer + 1e-9
        may_draw = train.inserted_count >= least and behind - batch_size >= -error_buffer - 1e-9
        assert may_put or may_draw, "one of them can go on"
        found += [behind] if train.inserted_count >= least else []
    return error_buffer, found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overflow": "drop"}, "overflow in the admission of task 't' is 'drop'"),
        ({"priority_key": "p"}, "priority_key .* expected no value unless overflow is 'drop_lowest'"),
        ({"samples_per_insert": -1.0}, "samples_per_insert .* is -1.0; expected a positive"),
        ({"samples_per_insert": 2.0}, "error_buffer .* is 0; expected 2 or more with samples_per_insert 2"),
        ({"error_buffer": 2}, "samples_per_insert .* expected a number above 0 with error_buffer"),
        ({"samples_per_insert": 1.0, "error_buffer": 1, "min_size_to_sample": -1}, "min_size_to_sample .* is -1"),
        (
            {"most": 0, "max_staleness": 1, "global_batch": 1, "overflow": "drop_lowest"},
            "max_staleness .* expected no value",
        ),
    ],
)
def test_admissions_that_mean_nothing_are_refused(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Admission("t", **{"most": 5, **arguments})
