"""What is outstanding for a task with an admission: when places are taken, and when they are given back."""

import random

import numpy as np
import pytest
from digest import digest
from domain_support import (
    ack,
    batch_spec,
    claim_rows,
    clear,
    commit,
    expire,
    insert,
    new_id,
    plan_of,
    release,
    reset,
    restart_ranks,
    task_of,
    update,
)

from tq_service.machine.claims import GroupsKept, SamplesClaimed, TaskAdvanced
from tq_service.machine.evictions import UnitsEvicted
from tq_service.machine.policies import VersionPublished
from tq_service.machine.samples import GroupsClosed
from tq_service.schema import Admission, EvictionCode
from tq_service.state.evictions import Evicted
from tq_service.state.ledger import KEPT_ROLLOUTS
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import LeaseTerms, Refill
from tq_service.state.table import DROPPED, HELD, LIVE, UNCLAIMED

LEASE = LeaseTerms(seconds=60.0)


def bounded(**admission):
    train = Partition("p", PartitionSettings(admissions=(Admission("t", 1 << 20, **admission),)))
    return train, task_of(train, "t")


def batch(train, *parts):
    change = SamplesClaimed(partition_id="p", task_name="t", plan=plan_of(*parts), batch_spec=batch_spec())
    return commit(train, change)[0]


def advance(train, trained):
    commit(train, TaskAdvanced(partition_id="p", task_name="t", trained=trained))


def publish(train, version, policy="default"):
    commit(train, VersionPublished(policy=policy, version=version))


@pytest.mark.parametrize("unit", ["sample", "group"])
@pytest.mark.parametrize(
    ("given_back", "delivered", "trained", "published"),
    [("delivered", 4, 4, 4), ("trained", 8, 6, 6), ("published", 8, 8, 6)],
)
def test_a_batch_gives_its_places_back_when_it_is_time(unit, given_back, delivered, trained, published):
    train, task = bounded(unit=unit, given_back=given_back)
    size = 1 if unit == "sample" else 3
    for group in range(8):
        insert(train, size, groups=[f"g{group}"] * size, group_size=size)
    rows = np.arange(8 * size).reshape(8, size)
    assert task.outstanding_count == 8
    batch(train, rows[0], rows[1])
    batch(train, rows[2], rows[3])
    assert task.outstanding_count == delivered
    clear(train, rows[0])  # what was delivered stays outstanding until its batch is done
    assert task.outstanding_count == delivered
    advance(train, 0)
    assert task.outstanding_count == trained
    publish(train, 1, policy="another")
    assert task.outstanding_count == trained
    publish(train, 1)
    assert task.outstanding_count == published
    update(train, rows[7].tolist(), state="failed")
    clear(train, rows[6])
    assert task.outstanding_count == published - 2


@pytest.mark.parametrize(
    ("given_back", "counts"), [("delivered", [2, 2, 2]), ("trained", [4, 3, 3]), ("published", [4, 4, 3])]
)
def test_a_queue_worker_gives_places_back_by_its_acknowledgement(given_back, counts):
    train, task = bounded(given_back=given_back)
    insert(train, 4)
    claim = claim_rows(train, task, np.arange(2), lease=LEASE)
    seen = [task.outstanding_count]
    ack(train, task, claim.request_id, np.array([0]))
    seen.append(task.outstanding_count)
    publish(train, 1)
    assert [*seen, task.outstanding_count] == counts
    expire(train, task, claim.request_id)
    assert task.outstanding_count == 3


def test_ranks_that_restart_hold_what_they_have_not_trained():
    train, task = bounded(given_back="published")
    insert(train, 8)
    for first in (0, 2, 4):
        batch(train, [first], [first + 1])
    advance(train, 0)
    restart_ranks(train, task, dp_size=1, trained=1)
    assert (task.outstanding_count, task.backlog) == (8, 4)
    publish(train, 1)
    assert task.outstanding_count == 4
    reset(train, task, keep_consumed=False)
    assert task.outstanding_count == 8


def test_samples_without_a_group_are_units_of_their_own():
    train, task = bounded(unit="group")
    insert(train, 5, groups=["a", "", "a", "", "b"])
    assert task.outstanding_count == 4
    claim_rows(train, task, np.array([0, 1]))
    assert task.outstanding_count == 3
    clear(train, np.array([2]))
    assert task.outstanding_count == 2


STEPS = (
    *["insert"] * 4, *["batch"] * 2, *["take"] * 3, *["end_lease"] * 3, *["write"] * 2, "clear", "advance", "publish",
    "restart", "reset", "keep_groups", "prompt", "evict", "evict", "close",
)  # fmt: skip


class Walk:
    """Random changes of a partition in groups, and the units counted one by one."""

    def __init__(self, seed, admission):
        self.rng = random.Random(seed)
        self.train, self.task = bounded(**admission)
        self.version = 0

    def positions(self, is_wanted):
        table = self.train.table
        return [int(table.index[at]) for at in table.present_positions() if is_wanted(at)]

    def some(self, indexes):
        return self.rng.sample(indexes, self.rng.randint(1, min(4, len(indexes)))) if indexes else []

    def unclaimed(self):
        state, claim = self.train.state, self.task.claim
        return self.some(self.positions(lambda at: state[at] == LIVE and claim[at] == UNCLAIMED))

    def step(self):
        getattr(self, self.rng.choice(STEPS))()

    def insert(self):
        groups = [self.rng.choice(["a", "b", "c", "d", "e", ""]) for _ in range(self.rng.randint(1, 5))]
        rollouts = [self.rng.choice(["", *self.open_rollouts(group)]) for group in groups]
        names = {"groups": groups, "rollouts": rollouts if self.rng.random() < 0.7 else None}
        insert(self.train, len(groups), **names, state=self.rng.choice(["live", "live", "held"]))

    def open_rollouts(self, group):
        names, known = [f"{group}/{number}" for number in range(3)], self.train.groups
        slots = known.rollout_slot_of.find(names)
        return [name for name, slot in zip(names, slots, strict=True) if slot < 0 or not known.closed[slot]]

    def close(self):
        if rollouts := self.some(sorted(self.train.groups.rollout_slot_of)):
            commit(self.train, GroupsClosed(partition_id="p", names=(), rollouts=rollouts))

    def batch(self):
        if rows := self.unclaimed():
            batch(self.train, rows[:1], rows[1:])

    def take(self):
        if rows := self.unclaimed():
            lease = self.rng.choice([None, LeaseTerms(seconds=9.0, max_deliveries=2)])
            claim_rows(self.train, self.task, np.array(rows), new_id(), lease)

    def end_lease(self):
        if leased := list(self.task.leases.values()):
            self.rng.choice([ack, release, expire])(self.train, self.task, self.rng.choice(leased).request_id)

    def write(self):
        if rows := self.some(self.positions(lambda at: self.train.state[at] in (LIVE, HELD))):
            update(self.train, rows, state=self.rng.choice(["failed", "held", "live"]))

    def clear(self):
        if rows := self.some(self.positions(lambda at: True)):
            clear(self.train, np.array(rows))

    def advance(self):
        if self.task.next_batch_index:
            advance(self.train, self.rng.randrange(self.task.next_batch_index))

    def publish(self):
        self.version += 1
        publish(self.train, self.version)

    def restart(self):
        if self.rng.random() < 0.3:
            restart_ranks(
                self.train, self.task, dp_size=2, trained=self.rng.randint(-1, self.task.next_batch_index - 1)
            )

    def reset(self):
        if self.rng.random() < 0.2:
            reset(self.train, self.task, keep_consumed=self.rng.random() < 0.5)

    def keep_groups(self):
        commit(
            self.train,
            GroupsKept(partition_id="p", task_name="t", kept_groups=self.rng.choice([0, None, KEPT_ROLLOUTS])),
        )

    def prompt(self):
        """Add a sample whose key is the name of a group, so that it may be claimable again once that is evicted."""
        key = self.rng.choice("abcde")
        if self.train.key_index.positions_of([key])[0] < 0:
            insert(self.train, 1, keys=[key])

    def evict(self):
        rows = self.unclaimed()
        if not rows:
            return
        count = len(rows)
        evicted = Evicted(
            rows=np.array(rows),
            sizes=np.ones(count, np.int64),
            reasons=np.full(count, EvictionCode.UNMATCHED, np.uint8),
            is_group=np.ones(count, np.bool_),
        )
        action, refill = self.rng.choice(["fail", "clear"]), Refill(partition_id="p", task_name="t")
        change = UnitsEvicted(partition_id="p", task_name="t", evicted=evicted, action=action, refill=refill)
        commit(self.train, change)

    def held(self):
        """Return the units that the task holds, looked at one by one."""
        train, task, units = self.train, self.task, set()
        for at in train.table.present_positions():
            is_held = train.state[at] in (LIVE, HELD) and task.claim[at] == UNCLAIMED and not task.skipped[at]
            if task.outstanding.admission.given_back != "delivered":
                is_held |= train.state[at] in (LIVE, HELD) and task.claim[at] < DROPPED
            if is_held:
                unit = task.outstanding.admission.unit
                slot = int(train.groups.of_unit(unit, np.array([at]))[0])
                units.add(("slot", slot) if slot >= 0 and unit != "sample" else int(at))
        return len(units)


@pytest.mark.parametrize("given_back", ["delivered", "trained", "published"])
@pytest.mark.parametrize("unit", ["sample", "rollout", "group"])
def test_what_a_task_holds_is_counted_as_one_by_one_whatever_happens(unit, given_back):
    outcomes = set()
    for seed in range(30):
        walk = Walk(seed, {"unit": unit, "given_back": given_back})
        for _ in range(60):
            walk.step()
            task = walk.task
            table = walk.train.table
            is_pending = task.is_pending(slice(0, table.count))
            assert (task.backlog, task.consumed_count >= task.leased_count) == (is_pending.sum(), True)
            assert task.outstanding_count == walk.held() + sum(task.delivered_units) + task.done_units
            assert given_back != "delivered" or not (task.delivered_units or task.done_units)
        restored = Partition.restore(walk.train.snapshot())
        assert restored.tasks["t"].outstanding_count == walk.task.outstanding_count
        assert digest(restored) == digest(walk.train)
        outcomes |= {unit.refill for unit in walk.task.evicted}
    assert outcomes >= {"refilled", "pending", "unknown", "given_up"}
