"""Samples that a partition releases by itself: by what its tasks have done with them, and by their age."""

import random

import numpy as np
import pytest
from digest import digest
from domain_support import (
    ack,
    batch_spec,
    claim_rows,
    clear,
    close_groups,
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

from tq_service.errors import InvalidArgumentError, SamplesClearedError
from tq_service.machine import rows, samples
from tq_service.machine.claims import SamplesClaimed, TaskAdvanced, TaskSeen
from tq_service.machine.samples import GroupsClosed, PartitionSealed, SamplesExpired
from tq_service.machine.state_machine import State, StateMachine, decode_group, encode_change, encode_group
from tq_service.schema import Admission, Release
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import LeaseTerms
from tq_service.state.table import DEAD_LETTERED, DROPPED, FAILED, HELD, UNCLAIMED

LEASE = LeaseTerms(seconds=60.0)


def releasing(when="trained", tasks=("actor",), **settings):
    ttl = settings.pop("ttl_seconds", None)
    train = Partition("p", PartitionSettings(release=Release(when, tasks, ttl), **settings))
    return train, *(train.tasks[name] for name in tasks)


def batch(train, *parts, task="actor"):
    commit(train, SamplesClaimed(partition_id="p", task_name=task, plan=plan_of(*parts), batch_spec=batch_spec()))


def advance(train, trained=None, saved=None, task="actor"):
    commit(train, TaskAdvanced(partition_id="p", task_name=task, trained=trained, saved=saved))


def age(train, before=1e12):
    return commit(train, SamplesExpired(partition_id="p", before=before))[0]


def left(train):
    return train.table.index[train.table.present_positions()].tolist()


@pytest.mark.parametrize("when", ["trained", "saved"])
def test_a_batch_is_released_in_the_change_that_says_it_is_done(when):
    train, _ = releasing(when)
    insert(train, 6, keys=[*"abcdef"])
    for first in (0, 2):
        batch(train, [first], [first + 1])
    assert left(train) == [0, 1, 2, 3, 4, 5]
    if when == "saved":
        advance(train, trained=1)
        assert train.released_count == 0
    advance(train, **{when: 0})
    assert (left(train), train.released_count, train.expired_count) == ([2, 3, 4, 5], 2, 0)
    insert(train, 1, keys=["a"])
    advance(train, saved=1)
    assert (left(train), train.released_count) == ([4, 5, 6], 4)


def test_what_is_saved_is_trained():
    train, actor = releasing("trained")
    insert(train, 2)
    batch(train, [0, 1])
    advance(train, saved=0)
    assert (actor.trained, left(train)) == (0, [])


def test_all_tasks_of_the_rule_have_to_be_done_and_others_do_not():
    train, *_ = releasing("saved", ("actor", "reward"))
    other = task_of(train, "other")
    insert(train, 4)
    batch(train, [0, 1])
    advance(train, saved=0)
    reward = train.tasks["reward"]
    claim = claim_rows(train, reward, np.arange(3), lease=LEASE)
    blocking = claim_rows(train, other, np.array([1]), lease=LEASE)
    ack(train, reward, claim.request_id, np.array([0, 1, 2]))
    assert left(train) == [1, 2, 3]  # a worker of another task has leased 1
    expire(train, other, blocking.request_id)
    assert left(train) == [2, 3]
    batch(train, [2, 3])
    advance(train, saved=1)
    assert (left(train), train.released_count) == ([3], 3)


@pytest.mark.parametrize("how", ["close", "last turn", "seal"])
def test_a_group_is_released_once_its_rollouts_are_closed(how):
    train, _ = releasing()
    insert(train, 3, groups=["a"] * 3, group_size=2, rollouts=["r", "r", "s"])
    insert(train, 2, rollouts=["t", "t"])
    batch(train, [0, 1, 2, 3, 4])
    advance(train, trained=0)
    assert left(train) == [0, 1, 2, 3, 4]
    if how == "close":
        commit(train, GroupsClosed(partition_id="p", names=[], rollouts=["r", "s"]))
        assert left(train) == [3, 4]
        commit(train, GroupsClosed(partition_id="p", names=[], rollouts=["t"]))
    elif how == "last turn":
        update(train, [0, 2, 3], ends_rollouts=True)
    else:
        commit(train, PartitionSealed(partition_id="p"))
    assert (left(train), train.released_count) == ([], 5)


@pytest.mark.parametrize("end", ["release", "ack"])
def test_a_lease_of_any_task_delays_the_release_until_its_end(end):
    train, _ = releasing()
    other = task_of(train, "other")
    insert(train, 2)
    claim = claim_rows(train, other, np.array([0]), lease=LEASE)
    batch(train, [0, 1])
    advance(train, trained=0)
    assert left(train) == [0]
    {"release": release, "ack": ack}[end](train, other, claim.request_id)
    assert left(train) == []


def test_held_samples_are_released_once_they_are_live():
    train, _ = releasing()
    insert(train, 2)
    batch(train, [0, 1])
    update(train, [0], state="held")
    advance(train, trained=0)
    assert left(train) == [0]
    update(train, [0], state="live")
    assert left(train) == []


def test_a_group_is_released_whole():
    train, actor = releasing()
    insert(train, 6, groups=[*"aaabb", ""], group_size=3)
    batch(train, [0, 1, 5])
    batch(train, [2, 3, 4])
    advance(train, trained=0)
    assert left(train) == [0, 1, 2, 3, 4]
    advance(train, trained=1)
    assert left(train) == [3, 4]  # of which a member is still to come
    close_groups(train, ["b"])
    assert (left(train), train.released_count, actor.released) == ([], 6, 1)
    insert(train, 1, groups=["a"])


def test_the_rest_of_a_group_is_released_when_the_one_that_was_missing_is_gone():
    train, _ = releasing()
    insert(train, 4, groups=[*"aabb"], group_size=2)
    batch(train, [0, 2])
    advance(train, trained=0)
    clear(train, np.array([1]))
    assert left(train) == [2, 3]
    update(train, [3], state="failed")
    assert left(train) == []


def test_what_a_task_never_gets_is_done_but_for_dead_letters():
    train, actor = releasing()
    actor.kept_groups = 0
    insert(train, 6, groups=[*"aabbcc"], group_size=2)
    update(train, [0], state="failed")
    assert (left(train), train.released_count) == ([2, 3, 4, 5], 2)
    claim = claim_rows(train, actor, np.array([2, 3]), lease=LeaseTerms(seconds=60.0, max_deliveries=1))
    ack(train, actor, claim.request_id, np.array([2]))
    expire(train, actor, claim.request_id)
    assert actor.claim[train.table.find(np.array([3]))] == DEAD_LETTERED
    assert left(train) == [2, 3, 4, 5]


def test_a_sample_that_failed_stays_while_a_resume_needs_its_batch():
    train, _ = releasing("saved")
    insert(train, 2, groups=["a", "a"], group_size=2)
    batch(train, [0, 1])
    update(train, [0], state="failed")
    assert left(train) == [0, 1]
    advance(train, saved=0)
    assert left(train) == []


def test_ranks_cannot_go_back_to_what_was_released_and_say_so():
    train, actor = releasing("saved")
    insert(train, 8)
    for first in (0, 2, 4):
        batch(train, [first, first + 1])
    advance(train, trained=2, saved=1)
    with pytest.raises(SamplesClearedError, match=r"batch_index is 1; expected 2 or more.*covers batch 1") as raised:
        restart_ranks(train, actor, dp_size=1, trained=0)
    assert (raised.value.metadata["got"], raised.value.metadata["expected"]) == ("1", "2")
    assert actor.epoch == 0
    assert restart_ranks(train, actor, dp_size=2, trained=1) == (1, 2)
    assert (left(train), actor.backlog, actor.trained, actor.saved) == ([4, 5, 6, 7], 4, 1, 1)


def test_ranks_that_go_back_say_what_is_trained_again():
    train, actor = releasing("saved")
    insert(train, 8)
    for first in (0, 2, 4, 6):
        batch(train, [first, first + 1])
    advance(train, trained=2, saved=0)
    assert restart_ranks(train, actor, dp_size=2, trained=0) == (2, 4)
    assert restart_ranks(train, actor, dp_size=2, trained=0) == (0, 0)


def test_a_restart_behind_a_later_batch_releases_what_it_calls_trained():
    train, actor = releasing()
    insert(train, 4)
    for first in (0, 2):
        batch(train, [first, first + 1])
    assert restart_ranks(train, actor, dp_size=2, trained=0) == (0, 0)
    assert left(train) == [2, 3]


def test_a_reset_that_keeps_what_was_consumed_releases_it():
    train, actor = releasing()
    insert(train, 3)
    batch(train, [0, 1])
    reset(train, actor, keep_consumed=True)
    assert (left(train), actor.released) == ([2], -1)


def test_what_a_plan_drops_goes_with_its_batch():
    train, actor = releasing("saved")
    insert(train, 3)
    plan = plan_of([0, 1])
    plan = type(plan)(rows=plan.rows, sizes=plan.sizes, steps=plan.steps, dropped=(np.array([2]),))
    commit(train, SamplesClaimed(partition_id="p", task_name="actor", plan=plan, batch_spec=batch_spec()))
    assert actor.claim[train.table.find(np.array([2]))] == DROPPED
    update(train, [2], state="failed")
    assert left(train) == [0, 1, 2]
    advance(train, saved=0)
    assert left(train) == []


@pytest.mark.parametrize("given_back", ["trained", "published"])
def test_what_is_released_gives_its_place_back_once(given_back):
    train, actor = releasing("saved", admissions=(Admission("actor", 8, given_back=given_back),))
    insert(train, 4)
    for first in (0, 2):
        batch(train, [first, first + 1])
    assert actor.outstanding_count == 4
    advance(train, saved=0)
    assert (left(train), actor.outstanding_count) == ([2, 3], 2 if given_back == "trained" else 4)
    if given_back == "published":
        actor.give_back_published()
    assert actor.outstanding_count == 2


def test_going_back_further_than_what_gave_its_place_back_leaves_no_batch_outstanding():
    train, actor = releasing("saved", admissions=(Admission("actor", 8, given_back="published"),))
    insert(train, 8)
    for first in (0, 2, 4, 6):
        batch(train, [first, first + 1])
    advance(train, trained=0)
    actor.give_back_published()
    assert actor.outstanding_count == 6
    restart_ranks(train, actor, dp_size=1, trained=-1)
    assert (actor.outstanding_count, actor.backlog) == (8, 8)


# Age


def test_old_samples_are_released_whatever_becomes_of_them():
    (train,) = releasing_by_age()
    insert(train, 2)
    insert(train, 2)
    middle = float(train.since[2:3][0])
    assert (age(train, middle), left(train), train.expired_count) == (2, [2, 3], 2)
    assert (age(train, middle), train.released_count) == (None, 0)


def releasing_by_age(*tasks):
    return releasing("saved" if tasks else None, tasks, ttl_seconds=10.0)


def test_age_spares_held_and_leased_samples_and_whole_groups():
    (train,) = releasing_by_age()
    insert(train, 6, groups=["a", "a", "b", "b", "", ""])
    claim_rows(train, task_of(train, "t"), np.array([0]), lease=LEASE)
    update(train, [4], state="held")
    assert (age(train), left(train)) == (3, [0, 1, 4])


def test_a_sample_ages_from_when_it_became_live():
    (train,) = releasing_by_age()
    insert(train, 2, state="held")
    put_at = float(train.since[0:1][0])
    update(train, [1], state="live")
    assert train.since[1:2][0] > put_at
    assert age(train, float(train.since[1:2][0])) is None
    assert (age(train), left(train)) == (1, [0])


def test_age_spares_what_a_resume_needs():
    train, actor = releasing_by_age("actor")
    insert(train, 4)
    batch(train, [0, 1])
    assert (age(train), left(train), actor.released) == (2, [0, 1], -1)
    advance(train, saved=0)
    assert left(train) == []


def test_a_task_without_a_rule_that_lost_samples_by_their_age_cannot_go_back_to_them():
    (train,) = releasing_by_age()
    actor = task_of(train, "actor")
    insert(train, 4)
    batch(train, [0, 1])
    age(train)
    with pytest.raises(SamplesClearedError, match="expected 1 or more"):
        restart_ranks(train, actor, dp_size=1, trained=-1)


# What may be asked for


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"when": "consumed"},
        {"ttl_seconds": 0},
        {"ttl_seconds": float("inf")},
        {"ttl_seconds": 1.0, "tasks": ["t"]},
        {"when": "saved", "tasks": ["t", "t"]},
        {"when": "saved", "tasks": [""]},
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(arguments):
    with pytest.raises(InvalidArgumentError) as raised:
        Release(**arguments)
    assert raised.value.field == "release"


def test_the_tasks_of_a_rule_are_those_of_the_partition():
    assert PartitionSettings(tasks=("b", "a"), release=Release("saved")).release.tasks == ("a", "b")
    for settings in ({}, {"tasks": ("other",)}):
        with pytest.raises(InvalidArgumentError) as raised:
            PartitionSettings(release=Release("saved", ["t"] if settings else []), **settings)
        assert raised.value.field == "release"


# The rule in one sentence, against random changes


def due(train, when, tasks):
    """Return the samples that the rule says should be gone, looked up one by one."""
    groups, found = {}, set()
    for position in train.table.present_positions().tolist():
        index, slot = int(train.table.index[position]), int(train.groups.of_rows[position])
        is_leased = any(task.claim[position] < DROPPED for task in train.tasks.values())
        is_needed = is_leased or train.state[position] == HELD
        for task in (train.tasks[name] for name in tasks):
            mark = int(task.claim[position])
            is_done = mark > UNCLAIMED or mark == DROPPED or train.state[position] == FAILED or task.skipped[position]
            done = task.saved if when == "saved" else task.trained
            later = [each for each in task.batches.values() if each.batch_index > done and index in each.plan.named]
            is_needed |= not is_done or bool(later)
        groups.setdefault(slot if slot >= 0 else (index,), []).append((index, is_needed))
    for slot, members in groups.items():
        is_complete = isinstance(slot, tuple) or train.groups.closed[slot]
        is_complete = is_complete or train.groups.members[slot] >= train.groups.declared[slot]
        if is_complete and not any(is_needed for _, is_needed in members):
            found.update(index for index, _ in members)
    return found


class RandomChanges:
    """Makes changes of a partition at random; each method is one, which may find nothing to do."""

    def __init__(self, train, rng):
        self.train, self.rng, self.cleared_count = train, rng, 0
        self.actor, self.reward, self.other = (task_of(train, name) for name in ("actor", "reward", "other"))

    def some(self, most=1):
        present = left(self.train)
        return np.array(sorted(self.rng.sample(present, min(len(present), self.rng.randint(1, most)))), np.int64)

    def put(self):
        size = self.rng.randint(1, 3)
        name = "" if size == 1 else f"g{self.train.table.next_index}"
        insert(self.train, size, groups=[name] * size, group_size=size + self.rng.randint(0, 1) if name else 0)

    def plan(self):
        positions = self.train.table.present_positions()
        free = self.train.table.index[positions[self.actor.is_pending(positions)]].tolist()[: self.rng.randint(1, 4)]
        if free:
            batch(self.train, free[::2], free[1::2])

    def trained(self):
        if self.actor.next_batch_index:
            advance(self.train, trained=self.rng.randrange(self.actor.next_batch_index))

    def saved(self):
        if self.actor.next_batch_index:
            advance(self.train, saved=self.rng.randrange(self.actor.next_batch_index))

    def lease(self):
        task, some = self.rng.choice([self.reward, self.other]), self.some(4)
        some = some[task.is_pending(self.train.table.find(some))]
        if some.size:
            claim_rows(self.train, task, some, new_id(), lease=LeaseTerms(seconds=60.0, max_deliveries=2))

    def end_lease(self):
        task = self.rng.choice([self.reward, self.other])
        for request_id in [*task.leases][:1]:
            self.rng.choice([ack, ack, expire, release])(self.train, task, request_id)

    def fail(self):
        if (some := self.some()).size:
            update(self.train, some.tolist(), state="failed")

    def clear(self):
        if (some := self.some()).size:
            clear(self.train, some)
            self.cleared_count += some.size

    def hold(self):
        some = self.some()
        if some.size and self.train.state[self.train.table.find(some)][0] != FAILED:
            update(self.train, some.tolist(), state=self.rng.choice(["held", "live"]))

    def close(self):
        if names := sorted(self.train.groups.slot_of):
            close_groups(self.train, [self.rng.choice(names)])

    def reset(self):
        if self.rng.random() < 0.3:
            reset(self.train, self.reward, keep_consumed=True)

    def restart(self):
        if self.actor.next_batch_index > self.actor.released + 1:
            trained = self.rng.randrange(self.actor.released, self.actor.next_batch_index)
            restart_ranks(self.train, self.actor, dp_size=self.rng.randint(1, 3), trained=trained)

    def expire(self):
        age(self.train)


WEIGHTS = {"put": 3, "plan": 2, "lease": 2, "end_lease": 2}
STEPS = [name for name in vars(RandomChanges) if not name.startswith("_") and name != "some"]


@pytest.fixture
def journal(monkeypatch):
    """Return what is written down of each change, with its time."""
    records, real = [], StateMachine.commit_all

    def commit_all(machine, changes):
        is_in_group = machine._group is not None
        result = real(machine, changes)
        if is_in_group:
            records.extend(encode_group(machine._last_seconds, [encode_change(change) for change, _ in changes]))
        return result

    monkeypatch.setattr(StateMachine, "commit_all", commit_all)
    return records


@pytest.mark.parametrize("seed", range(24))
def test_what_is_due_is_released_and_nothing_else_is(seed, monkeypatch, journal):
    rng = random.Random(seed)
    when, tasks = rng.choice(["trained", "saved"]), rng.choice([("actor",), ("actor", "reward")])
    train, *_ = releasing(when, tasks, ttl_seconds=rng.choice([None, 10.0]))
    changes = RandomChanges(train, rng)
    changes.actor.kept_groups = kept_groups = rng.choice([0, None])
    real = samples.release_rows

    def release_due(partition, positions, step):
        assert set(partition.table.index[positions].tolist()) <= due(partition, when, tasks)
        real(partition, positions, step)

    monkeypatch.setattr(rows, "release_rows", release_due)
    for name in rng.choices(STEPS, [WEIGHTS.get(name, 1) for name in STEPS], k=120):
        getattr(changes, name)()
        assert due(train, when, tasks) == set()
        gone = train.released_count + train.expired_count + changes.cleared_count
        assert gone + train.table.present_count == train.table.next_index
    monkeypatch.undo()
    restored = Partition.restore(train.snapshot())
    assert digest(restored) == digest(train)
    again = Partition("p", train.settings, train.incarnation)
    machine = StateMachine(State())
    machine.state.add_partition(again)
    for name in ("reward", "other"):
        task_of(again, name)
    again.tasks["actor"].kept_groups = kept_groups
    for record in journal:
        at_seconds, recorded = decode_group(record)
        for change in recorded:
            if not isinstance(change, TaskSeen):
                machine.replay(change, at_seconds)
    assert digest(again) == digest(train)
