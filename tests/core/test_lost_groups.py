"""Groups that lost a member for good: their rest is skipped at once by tasks that keep groups whole."""

import asyncio
import time

import numpy as np
import pytest
from digest import digest
from domain_support import (
    ack,
    asks,
    claim_rows,
    clear,
    expire,
    insert,
    new_id,
    new_write,
    release,
    reset,
    seal,
    turns,
    update,
    write_to,
)
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.machine.claims import DeadLettersRequeued, GroupsKept
from tq_service.planning.grouping import Grouping
from tq_service.samplers import GRPOGroupNSampler, PlanRunner
from tq_service.schema import Admission
from tq_service.serving.catalog import Catalog
from tq_service.serving.lookup import Clearing, Selection
from tq_service.serving.planner import NotYet
from tq_service.serving.status import consumption_of
from tq_service.state.ledger import KEPT_ROLLOUTS
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import LeaseTerms
from tq_service.state.table import DEAD_LETTERED, UNCLAIMED, is_open

SKIPPING = GRPOGroupNSampler(n_samples_per_prompt=4)
TAKING = GRPOGroupNSampler(n_samples_per_prompt=4, incomplete_groups="take")
LEASE = LeaseTerms(seconds=60.0, max_deliveries=1)


def catalog_of(**settings):
    catalog = Catalog(PlanRunner())
    return catalog, catalog.create("train", PartitionSettings(**settings))


def add_group(catalog, name, count=4, size=4, **arguments):
    if name is None:
        return insert(catalog, count, **arguments)
    return insert(catalog, count, groups=[name] * count, group_size=size, **arguments)


async def claim(catalog, sampler=SKIPPING, max_wait=0.0, **arguments):
    request = asks(sampler=sampler, batch_size=4, **arguments)
    return (await catalog.claim("train", b"", request, max_wait)).answer


def pending(partition):
    task = partition.tasks["t"]
    assert task.backlog == np.count_nonzero(task.is_pending(slice(0, partition.table.count)))
    assert task.skipped_count == np.count_nonzero(task.skipped.data[: partition.table.count])
    return task.backlog, task.skipped_count


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("loss", ["failed", "cleared", "failed at once"])
async def test_the_rest_of_a_group_that_lost_a_member_is_not_pending(name, is_known, loss):
    catalog, train = catalog_of()
    catalog.task(train, "t")
    if is_known:  # by a request before the loss, else by the next one
        assert isinstance(await claim(catalog), NotYet)
    if loss == "failed at once":
        if name is None:
            pytest.skip("blocks are put whole")
        add_group(catalog, name, 3)
        insert(catalog, 1, groups=[name], group_size=4, state="failed")
    else:
        rows = add_group(catalog, name)
        assert pending(train) == (4, 0)
        if loss == "failed":
            update(catalog, rows[1:2], state="failed")
        else:
            clear(catalog, np.array(rows[1:2]))
    if not is_known:
        assert pending(train) == (3, 0)
        assert isinstance(await claim(catalog), NotYet)
    assert pending(train) == (0, 3)
    assert consumption_of(train, "t").skipped_count == 4
    add_group(catalog, None if name is None else "b")
    assert pending(train) == (4, 3)
    assert (await claim(catalog)).rows.tolist() == [4, 5, 6, 7]


async def test_members_that_come_after_the_loss_are_skipped_too():
    catalog, train = catalog_of()
    await claim(catalog)
    rows = add_group(catalog, "a", 2)
    update(catalog, rows[:1], state="failed")
    assert pending(train) == (0, 1)
    add_group(catalog, "a", 2)
    assert pending(train) == (0, 3)


async def test_a_group_that_was_delivered_may_be_cleared_in_parts():
    catalog, train = catalog_of()
    rows = add_group(catalog, "a")
    await claim(catalog)
    other = catalog.task(train, "other")
    clear(catalog, np.array(rows[:2]))
    assert pending(train) == (0, 0)
    assert (other.backlog, other.skipped_count) == (2, 0)  # which has not asked yet


async def test_a_request_that_takes_incomplete_groups_gets_the_rest_even_at_the_end():
    for sampler, expected in ((TAKING, [1, 2, 3]), (None, [1, 2, 3])):
        catalog, train = catalog_of()
        await claim(catalog)
        rows = add_group(catalog, "a")
        update(catalog, rows[:1], state="failed")
        assert pending(train) == (0, 3)
        if sampler is None:
            assert isinstance(await claim(catalog, sampler), NotYet)
            assert pending(train) == (0, 3)  # it takes samples one by one, and waits for a fourth: no plan yet
        seal(catalog)
        assert (await claim(catalog, sampler)).rows.tolist() == expected
        assert pending(train) == (0, 0)


async def test_a_reset_takes_the_skipped_back():
    for keep_consumed in (True, False):
        catalog, train = catalog_of()
        await claim(catalog)
        rows = add_group(catalog, "a")
        update(catalog, rows[:1], state="failed")
        reset(catalog, train.tasks["t"], keep_consumed=keep_consumed)
        assert pending(train) == (3, 0)
        await claim(catalog)
        assert pending(train) == (0, 3)


@pytest.mark.parametrize("name", ["a", None])
async def test_dead_letters_lose_the_rest_of_their_group_and_requeued_ones_bring_it_back(name):
    catalog, train = catalog_of()
    await claim(catalog)
    rows, task = add_group(catalog, name), train.tasks["t"]
    leased = claim_rows(catalog, task, np.array(rows[:2]), lease=LEASE)
    assert pending(train) == (2, 0)
    expire(catalog, task, leased.request_id)
    assert (task.dead_lettered_count, pending(train)) == (2, (0, 2))
    catalog.commit(DeadLettersRequeued(partition_id="train", task_name="t"))
    assert pending(train) == (4, 0)
    assert (await claim(catalog)).rows.tolist() == rows


async def test_what_comes_back_to_a_group_that_lost_a_member_meanwhile_is_skipped():
    catalog, train = catalog_of()
    await claim(catalog)
    task = train.tasks["t"]
    for give_back in (release, expire):
        rows = add_group(catalog, give_back.__name__)
        terms = LeaseTerms(seconds=60.0)
        leased = claim_rows(catalog, task, np.array(rows), lease=terms)
        update(catalog, rows[:1], state="failed")
        before = pending(train)[1]
        give_back(catalog, task, leased.request_id)
        assert pending(train) == (0, before + 3)
    rows = add_group(catalog, "acked")
    leased = claim_rows(catalog, task, np.array(rows), lease=terms)
    update(catalog, rows[:1], state="failed")
    assert ack(catalog, task, leased.request_id) == 3
    assert pending(train) == (0, 6)


async def test_a_round_is_complete_when_the_rest_of_it_is_lost():
    catalog, train = catalog_of(samples_per_round=8, tasks=("t",))
    await claim(catalog)
    add_group(catalog, "a")
    rows = add_group(catalog, "b")
    update(catalog, rows[:1], state="failed")
    assert (await claim(catalog)).rows.tolist() == [0, 1, 2, 3]
    assert consumption_of(train, "t").complete


async def test_one_call_clears_what_a_task_never_gets():
    catalog, train = catalog_of()
    await claim(catalog)
    for name in "abc":
        rows = add_group(catalog, name)
        if name != "b":
            update(catalog, rows[:1], state="failed")
    clearing = Clearing(catalog, "train", b"", Selection(is_all=True, skipped_by="t"))
    await clearing.begin()
    assert clearing.finish() == 8
    assert pending(train) == (4, 0)
    assert train.table.index.data[train.table.present_positions()].tolist() == [4, 5, 6, 7]
    assert len(train.groups) == 1


async def test_a_run_in_which_rollouts_fail_goes_on_for_ever():
    """Groups of 4, each twentieth rollout fails, 16 groups may be pending, 4 groups a step, delivered ones cleared."""
    catalog, train = catalog_of(admissions=(Admission("t", 16, "group"),), max_bytes=None)
    line, rng = catalog.admission_queue("train"), np.random.default_rng(0)
    delivered = made = failed = 0
    while made < 300:
        for _ in range(4):
            write = new_write(4, ["x"], groups=[f"g{made}"] * 4, group_size=4)
            with await line.enter(new_id(), write, 16, time.monotonic() + 5):
                rows = np.array(list(write_to(catalog, write).global_indexes))
            made += 1
            lost = rows[rng.random(4) < 0.05]
            if lost.size:
                update(catalog, lost.tolist(), state="failed")
                failed += 1
        while not isinstance(answer := await claim(catalog), NotYet):
            delivered += 1
            clear(catalog, answer.rows)
    assert (made, delivered, failed > 20) == (300, 300 - failed, True)
    clearing = Clearing(catalog, "train", b"", Selection(is_all=True, skipped_by="t"))
    await clearing.begin()
    assert clearing.finish() == 4 * failed
    assert (train.table.present_count, train.cells.used_bytes) == (0, 0)


async def test_few_rows_are_looked_at_however_many_there_are(monkeypatch):
    catalog, train = catalog_of()
    await claim(catalog)
    for number in range(200):
        add_group(catalog, f"g{number}")
    looked_at, find = [], type(train.groups).members_of

    def members_of(groups, slots, table, *unit):
        if slots.size:
            first, last = groups.first[slots].min(), groups.last[slots].max()
            looked_at.append(int(last - first) + 1)
        return find(groups, slots, table, *unit)

    monkeypatch.setattr(type(train.groups), "members_of", members_of)
    for row in (3, 400, 799):
        update(catalog, [row], state="failed")
    assert looked_at == [4, 4, 4]
    assert pending(train) == (788, 9)


# Against a look at every row

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add", "fail", "fail", "clear", "claim", "lease", "expire", "release", "requeue", "keep", "reset"]
        ),
        st.integers(0, 30),
        st.integers(1, 4),
    ),
    max_size=40,
)


def skipped_one_by_one(partition, task):
    """Return the positions that should be skipped, by the groups as claims see them."""
    if task.kept_groups is None:
        return []
    found = []
    for position in partition.table.present_positions().tolist():
        one = np.array([position])
        if not is_open(partition.state.data[one])[0] or task.claim.data[position] != UNCLAIMED:
            continue
        grouping = Grouping.of_code(partition, task, task.kept_groups)
        ids = grouping.ids(one)
        sizes = grouping._sizes(ids)
        if not partition.groups.in_use and task.kept_groups > 0:  # blocks that are not whole yet
            start = int(ids[0]) * task.kept_groups
            sizes = np.array([min(partition.table.next_index - start, task.kept_groups)])
        if grouping.left(ids)[0] < sizes[0]:
            found.append(position)
    return found


@examples(60)
@given(STEPS, st.booleans())
def test_it_is_what_a_look_at_every_row_finds(steps, is_named):
    async def run():
        catalog, train = catalog_of()
        task, leases = catalog.task(train, "t"), []
        for kind, number, count in steps:
            rows = train.table.index.data[train.table.present_positions()]
            some = rows[number % max(1, rows.size) :][:count]
            unclaimed = some[train.state.data[train.table.find(some)] == 1] if some.size else some
            unclaimed = unclaimed[task.claim.data[train.table.find(unclaimed)] == UNCLAIMED]
            match kind:
                case "add":
                    name, rollouts = f"g{number % 5}" if is_named else None, None
                    if is_named and number % 3:
                        rollout = f"{name}/{number % 2}"
                        slot = train.groups.rollout_slot_of.find([rollout])[0]
                        rollouts = [rollout if slot < 0 or not train.groups.closed[slot] else ""] * count
                    add_group(catalog, name, count, size=0, rollouts=rollouts)
                case "fail" if some.size:
                    update(catalog, some.tolist(), state="failed")
                case "clear" if some.size:
                    clear(catalog, some)
                case "claim" if unclaimed.size:
                    claim_rows(catalog, task, unclaimed)
                case "lease" if unclaimed.size:
                    leases.append(claim_rows(catalog, task, unclaimed, lease=LEASE).request_id)
                case "expire" | "release" if leases:
                    request_id = leases.pop()
                    if request_id in task.leases:
                        (expire if kind == "expire" else release)(catalog, task, request_id)
                case "requeue" if task.dead_lettered_count:
                    catalog.commit(DeadLettersRequeued(partition_id="train", task_name="t"))
                case "keep":
                    kept = [None, 0, 4, 2, KEPT_ROLLOUTS][number % 5]
                    catalog.commit(GroupsKept(partition_id="train", task_name="t", kept_groups=kept))
                case "reset":
                    reset(catalog, task, keep_consumed=number % 2 == 0)
                    leases.clear()
            pending(train)
            assert np.flatnonzero(task.skipped.data[: train.table.count]).tolist() == skipped_one_by_one(train, task)
            assert all(task.claim.data[each] != DEAD_LETTERED for each in np.flatnonzero(task.skipped.data))
        restored = Partition.restore(train.snapshot())
        assert digest(restored) == digest(train)

    asyncio.run(run())


@pytest.mark.parametrize("admission", [Admission("t", 4), Admission("t", 1, "group", "published")])
async def test_an_admission_does_not_count_what_is_skipped(admission):
    catalog, train = catalog_of(admissions=(admission,))
    await claim(catalog)
    rows = add_group(catalog, "a")
    write = new_write(4, ["x"], groups=["b"] * 4, group_size=4)
    waiting = asyncio.create_task(catalog.admission_queue("train").enter(new_id(), write, 16, None))
    await turns()
    assert not waiting.done()
    update(catalog, rows[:1], state="failed")
    assert (await waiting).demand.sample_count == 4
    assert train.tasks["t"].outstanding_count == 0
