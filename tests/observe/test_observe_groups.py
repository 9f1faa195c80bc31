"""Partitions by group: counts that never fall, also where partitions go while they are collected."""

import asyncio
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "core"))
from domain_support import ack, asks, claim_rows, clear, expire, new_write, reset, task_of

from tq_service.machine.evictions import UnitsEvicted
from tq_service.machine.policies import VersionPublished
from tq_service.machine.samples import SamplesExpired
from tq_service.observe.instruments import Instruments
from tq_service.observe.service import PartitionGroups, ServiceMetrics, group_of
from tq_service.samplers import PlanRunner
from tq_service.schema import EvictionCode, Published, Release
from tq_service.serving.backlogs import Backlogs
from tq_service.serving.catalog import Catalog
from tq_service.serving.sweep import Slices
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import TaskTotals
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import Condition, LeaseTerms

BACKLOG = ("task_ready_samples", "task_oldest_version", "task_staleness_versions")
LEASE = LeaseTerms(seconds=1e4, max_deliveries=2)


@pytest.fixture
async def catalog():
    return Catalog(PlanRunner())


@pytest.fixture
async def groups(catalog):
    return PartitionGroups(catalog)


def put(catalog, name, count, **arguments):
    catalog.write(name, b"", new_write(count, ("x",), **arguments))


async def collected(groups):
    return await groups.collect(Slices())


def numbers_of(numbers, *names, task=""):
    return tuple(numbers.get((task, name), None if name in BACKLOG else 0) for name in names)


def totals_of(numbers, task):
    return TaskTotals(
        delivered=numbers[task, "samples_delivered"],
        redelivered=numbers[task, "samples_redelivered"],
        expired=numbers[task, "leased_samples_expired"],
        dead_lettered=numbers[task, "samples_dead_lettered"],
        unmatched=numbers[task, "units_evicted_unmatched"],
        too_small=numbers[task, "units_evicted_too_small"],
        late=numbers[task, "units_evicted_late"],
    )


@pytest.mark.parametrize(
    ("name", "group"), [("train@3", "train"), ("train", "train"), ("run-7/train@a@b", "run-7/train"), ("@1", "")]
)
def test_a_group_is_a_name_up_to_its_first_at(name, group):
    assert group_of(name) == group


async def test_counts_outlive_partitions(catalog, groups):
    put(catalog, "train@0", 3)
    put(catalog, "train@1", 4, state="held")
    put(catalog, "train@1", 2, state="failed")
    numbers = (await collected(groups))["train"]
    assert numbers_of(numbers, "samples_inserted", "samples_cleared", "partitions") == (9, 0, 2)
    assert numbers_of(numbers, "live", "held", "failed") == (3, 4, 2)
    catalog.remove("train@0", b"")
    numbers = (await collected(groups))["train"]
    assert numbers_of(numbers, "samples_inserted", "samples_cleared", "partitions", "live") == (9, 3, 1, 0)
    put(catalog, "train@0", 1)
    catalog.remove("train@0", b"")
    catalog.remove("train@1", b"")
    numbers = (await collected(groups))["train"]
    assert numbers_of(numbers, "samples_inserted", "samples_cleared", "partitions") == (10, 10, 0)


async def test_what_partitions_released_by_themselves_is_counted_by_reason(catalog, groups):
    catalog.create("train@0", PartitionSettings(release=Release("trained", ["t"], 60.0)))
    put(catalog, "train@0", 5)
    train = catalog.get("train@0")
    claim = claim_rows(train, task_of(train, "t"), np.arange(2), lease=LEASE)
    ack(train, train.tasks["t"], claim.request_id)
    catalog.commit(SamplesExpired(partition_id="train@0", before=1e12))
    numbers = (await collected(groups))["train"]
    released = ("samples_cleared", "samples_released", "samples_aged_out", "live")
    assert numbers_of(numbers, *released) == (5, 2, 3, 0)
    catalog.remove("train@0", b"")
    assert numbers_of((await collected(groups))["train"], *released) == (5, 2, 3, 0)


async def test_what_becomes_of_samples_is_counted_over_all_epochs(catalog, groups):
    put(catalog, "train", 4)
    task = task_of(catalog, "reward")
    first = claim_rows(catalog, task, [0, 1], lease=LEASE)
    expire(catalog, task, first.request_id)
    second = claim_rows(catalog, task, [0, 1], lease=LEASE)
    ack(catalog, task, second.request_id, np.array([0]))
    expire(catalog, task, second.request_id)
    for group, row, reason in (("a", 4, EvictionCode.UNMATCHED), ("b", 5, EvictionCode.TOO_SMALL)):
        put(catalog, "train", 1, groups=[group])
        evicted = Evicted(
            rows=np.array([row]),
            sizes=np.array([1]),
            reasons=np.array([reason], np.uint8),
            is_group=np.array([True]),
        )
        catalog.commit(UnitsEvicted(partition_id="train", task_name="reward", evicted=evicted, action="clear"))
    expected = TaskTotals(delivered=4, redelivered=2, expired=3, dead_lettered=1, unmatched=1, too_small=1)
    assert totals_of((await collected(groups))["train"], "reward") == expected
    reset(catalog, task, keep_consumed=False)
    claim_rows(catalog, task, [2])
    catalog.remove("train", b"")
    expected.delivered = 5
    assert totals_of((await collected(groups))["train"], "reward") == expected


async def test_what_was_there_at_the_start_is_not_counted(catalog):
    put(catalog, "train", 4)
    task = task_of(catalog, "reward")
    claim_rows(catalog, task, [0])
    clear(catalog, np.array([3]))
    groups = PartitionGroups(catalog)
    numbers = (await collected(groups))["train"]
    assert numbers_of(numbers, "samples_inserted", "samples_cleared", "live") == (0, 0, 3)
    assert totals_of(numbers, "reward") == TaskTotals()
    put(catalog, "train", 2)
    claim_rows(catalog, task, [1, 2])
    catalog.remove("train", b"")
    numbers = (await collected(groups))["train"]
    assert numbers_of(numbers, "samples_inserted", "samples_cleared") == (2, 5)
    assert totals_of(numbers, "reward").delivered == 2


async def test_what_is_restored_is_not_counted(catalog, groups):
    put(catalog, "train", 4)
    restored = Partition.restore(catalog.get("train").snapshot())
    catalog.replace([restored], "train")
    numbers = (await collected(groups))["train"]
    assert numbers_of(numbers, "samples_inserted", "samples_cleared", "live") == (4, 4, 4)


async def inserted(groups):
    return (await collected(groups))["train"]["", "samples_inserted"]


class Interrupted(Slices):
    """Has something done at one of the moments at which others have their turn."""

    def __init__(self, at_turn, act, *arguments):
        super().__init__()
        self.turns_left = at_turn
        self.act = lambda: act(*arguments)

    async def turn(self):
        if self.turns_left == 0:
            self.act()
        self.turns_left -= 1


async def test_a_partition_that_goes_while_they_are_collected_is_counted_once(catalog, groups):
    """At each of the moments at which others have their turn."""
    for number in range(4):
        put(catalog, f"train@{number}", 10)
    names = [f"train@{number}" for number in range(4)]
    for at_turn in range(8):
        victim = names[at_turn % 4]
        before = await inserted(groups)
        interrupted = Interrupted(at_turn, lambda name: catalog.remove(name, b""), victim)
        assert (await groups.collect(interrupted))["train"]["", "samples_inserted"] == before
        assert await inserted(groups) == before
        if catalog.find(victim, missing_ok=True) is None:
            put(catalog, victim, 10)
        assert await inserted(groups) in {before, before + 10}


async def test_of_groups_that_are_gone_the_last_are_kept(catalog, groups):
    for number in range(1_030):
        put(catalog, f"of{number}", 1)
        catalog.remove(f"of{number}", b"")
    found = await collected(groups)
    assert len(found) == 1_024
    assert ("of0" in found, "of1029" in found) == (False, True)


# Backlogs


async def with_backlogs(catalog, groups, shown):
    backlogs = Backlogs(catalog, PlanRunner())
    numbers = await collected(groups)
    await groups.add_backlogs(numbers, shown, backlogs, Slices())
    await backlogs.close()
    return numbers


async def test_ready_samples_and_their_age(catalog, groups):
    put(catalog, "train@0", 3, meta=[{"version": version} for version in (5, 2, 9)])
    put(catalog, "train@1", 2, meta=[{"version": 7}, {}], state="held")
    planner = catalog.planner(catalog.get("train@0"), "update")
    await planner.claim(asks((0, 1, 0), batch_size=1), 0)
    catalog.task(catalog.get("train@1"), "update")
    numbers = (await with_backlogs(catalog, groups, {"train": ["update"]}))["train"]
    assert numbers_of(numbers, "task_pending_samples", *BACKLOG, task="update") == (4, 2, 2.0, 7.0)


async def test_a_task_without_claims_or_samples_has_nothing_ready(catalog, groups):
    put(catalog, "train", 2)
    catalog.task(catalog.get("train"), "a")
    catalog.create("eval", PartitionSettings(tasks=("b",)))
    numbers = await with_backlogs(catalog, groups, {"train": ["a"], "eval": ["b"]})
    assert numbers_of(numbers["train"], "task_pending_samples", *BACKLOG, task="a") == (2, 0, None, None)
    assert numbers["eval"]["b", "task_ready_samples"] == 0


async def test_versions_that_are_no_numbers_have_no_age(catalog, groups):
    put(catalog, "train", 2, meta=[{"version": "a"}, {"version": "b"}])
    catalog.task(catalog.get("train"), "a")
    numbers = (await with_backlogs(catalog, groups, {"train": ["a"]}))["train"]
    assert numbers_of(numbers, *BACKLOG, task="a") == (0, None, None)


async def test_a_backlog_is_looked_at_again_only_where_it_has_changed(catalog, groups):
    put(catalog, "train", 4)
    partition = catalog.get("train")
    task = catalog.task(partition, "a")
    backlogs = Backlogs(catalog, PlanRunner())
    await backlogs.refresh([(partition, task)])
    seen = backlogs.of(task)
    await backlogs.refresh([(partition, task)])
    assert backlogs.of(task) is seen
    await backlogs.close()


async def test_a_backlog_is_looked_at_again_once_its_claims_compare_with_another_version(catalog, groups):
    put(catalog, "train", 3, meta=[{"version": version} for version in (5, 2, 9)])
    partition = catalog.get("train")
    task, fresh = catalog.task(partition, "a"), Condition("version", ">=", published=Published("actor"))
    await catalog.planner(partition, "a").claim(asks(where=(fresh,)), 0)
    backlogs = Backlogs(catalog, PlanRunner())
    await backlogs.refresh([(partition, task)])
    counts = [backlogs.of(task).ready_count]
    for version in (1, 6):
        catalog.publish(VersionPublished(policy="actor", version=version), ())
        async with asyncio.timeout(30):  # the next look may have to wait
            while backlogs.of(task).ready_count == counts[-1]:
                await backlogs.refresh([(partition, task)])
        counts.append(backlogs.of(task).ready_count)
    assert counts == [0, 3, 1]
    await backlogs.close()


async def test_those_who_ask_at_once_share_a_look(catalog, groups):
    put(catalog, "train", 40_000, meta=[{"version": 1}] * 40_000)
    put(catalog, "eval", 2, meta=[{"version": 3}, {"version": 5}])
    of_train, of_eval = ((each, catalog.task(each, "a")) for each in map(catalog.get, ("train", "eval")))
    backlogs = Backlogs(catalog, PlanRunner())
    await asyncio.gather(backlogs.refresh([of_train]), backlogs.refresh([of_train, of_eval]))
    seen = backlogs.of(of_train[1]), backlogs.of(of_eval[1])
    assert [(each.oldest_version, each.staleness_versions) for each in seen] == [(1.0, 0.0), (3.0, 2.0)]
    await backlogs.close()


async def test_nothing_is_looked_at_once_it_is_closed(catalog, groups):
    put(catalog, "train", 4)
    partition = catalog.get("train")
    task = catalog.task(partition, "a")
    backlogs = Backlogs(catalog, PlanRunner())
    await backlogs.close()
    await backlogs.refresh([(partition, task)])
    assert backlogs.of(task) is None


async def test_a_partition_that_is_gone_is_not_looked_at(catalog, groups):
    put(catalog, "train", 4)
    partition = catalog.get("train")
    task = catalog.task(partition, "a")
    catalog.remove("train", b"")
    backlogs = Backlogs(catalog, PlanRunner())
    await backlogs.refresh([(partition, task)])
    assert backlogs.of(task) is None
    await backlogs.close()


async def test_a_look_ends_with_the_service(catalog, groups):
    put(catalog, "train", 100_000)
    partition = catalog.get("train")
    backlogs = Backlogs(catalog, PlanRunner())
    looking = asyncio.ensure_future(backlogs.refresh([(partition, catalog.task(partition, "a"))]))
    await asyncio.sleep(0)
    await backlogs.close()
    await looking
    assert partition.table.pin_count == 0


async def test_the_tasks_that_were_seen_first_keep_their_series(catalog, groups):
    """Whichever partition goes; a task that is gone does not displace one that is there."""
    metrics = ServiceMetrics(Instruments(), facts={}, running_count=int, waiting_count=int)

    async def shown(tasks):
        numbers = {("", "partitions"): 1} | {(task, "samples_delivered"): 1 for task in tasks}
        return (await metrics._choose({"g": defaultdict(float, numbers)}, 60, Slices()))[0]["g"]

    first = await shown("abcdef")
    assert first == list("abcdef")[: len(first)]
    assert 0 < len(first) < 6
    assert await shown("fedcba") == first
    assert await shown("fedcb") == list("bcdef")[: len(first)]
