"""The bound on staleness: the choice of a plan, and a simulation in which everything that can be late is late."""

import asyncio
import heapq
import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from domain_support import ack, asks, expire, new_id, new_write, release, restart_ranks, turns, update
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import InvalidArgumentError, PreconditionError, SampleNotFoundError, VersionError
from tq_service.machine.claims import ConsumptionReset, SamplesClaimed
from tq_service.machine.policies import PolicyRemoved, VersionPublished
from tq_service.planning.staleness import DueUnits
from tq_service.samplers import PlanRunner
from tq_service.schema import Admission, EndCounts
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import NotYet
from tq_service.state.ledger import RecordedPlan
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import LeaseTerms, Plan, RankPlan

GROUP_SIZE = 2
HELD = LeaseTerms(seconds=60.0, on_lost="fail")


# The choice of a plan


@examples(300)
@given(
    st.lists(st.tuples(st.integers(-2, 5), st.booleans()), max_size=9),
    st.integers(0, 3),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_a_plan_takes_as_many_units_as_any_that_is_permitted(units, max_staleness, batch_size, rng):
    due = DueUnits(np.array([deadline for deadline, _ in units], np.int64), 1, max_staleness, batch_size)
    ready = [unit for unit, (_, is_ready) in enumerate(units) if is_ready]
    rng.shuffle(ready)
    chosen = due.choose(ready).tolist()
    assert len(set(chosen)) == len(chosen) <= batch_size
    assert set(chosen) <= set(ready)
    possible = [some for some in itertools.combinations(ready, batch_size) if due.permits(np.array(some, np.int64))]
    is_whole = len(chosen) == batch_size and due.permits(np.array(chosen, np.int64))
    assert is_whole == bool(possible)
    assert bool(due.waits_for(np.array(ready, np.int64)).size) <= (not is_whole)
    if is_whole:  # greedy: no unit that is wanted more could take the place of one that was taken
        places = sorted(map(ready.index, chosen))
        assert places == min(sorted(map(ready.index, some)) for some in possible)


def test_what_is_due_before_any_plan_is_taken_first():
    """As after a trainer has gone back: nothing waits for ever."""
    due = DueUnits(np.array([9, 3, 9, 3, 3]), 10, 1, 2)
    assert due.choose([0, 1, 2, 3, 4]).tolist() == [0, 1]
    assert due.permits(np.array([0, 1]))
    late_and_later = DueUnits(np.array([12, 3, 3, 3]), 10, 2, 2)
    assert late_and_later.choose([0, 1, 2, 3]).tolist() == [1, 2]
    assert not late_and_later.permits(np.array([0, 1]))


# What a partition with the bound takes


def bounded(max_staleness=1, batch_size=2, unit="sample", late="wait", **settings):
    catalog = Catalog(PlanRunner())
    admission = Admission("t", max_staleness=max_staleness, global_batch=batch_size, unit=unit, late=late)
    catalog.create("train", PartitionSettings(admissions=(admission,), **settings))
    catalog.publish(VersionPublished(policy="default", version=0), [])
    return catalog


async def slots(catalog, count=1, **arguments):
    """Make slots of a rollout worker, which must find capacity, and return its claim."""
    version = catalog.policies["default"].version
    write = new_write(count, state="held", is_of_slots=True, start_version=version, **arguments)
    with await catalog.admission_queue("train").enter(new_id(), write, 0, 0.0):
        written = catalog.write("train", b"", write)
    catalog.task(catalog.get("train"), "rollout")
    plan = RecordedPlan.of(Plan.of([np.asarray(written.global_indexes)]))
    names = {"partition_id": "train", "task_name": "rollout"}
    return catalog.commit(SamplesClaimed(**names, plan=plan, request_id=new_id(), lease=HELD))


async def finished(catalog, count=1, **arguments):
    claim = await slots(catalog, count, **arguments)
    finish(catalog, claim)
    return claim


def finish(catalog, claim):
    update(catalog, claim.rows.tolist(), ["x"], state="live")
    ack(catalog, workers_of(catalog), claim.request_id)


def workers_of(catalog):
    return catalog.get("train").tasks["rollout"]


async def take(catalog, index, batch_size=2, **arguments):
    claimed = await catalog.claim("train", b"", asks((0, 1, index), batch_size=batch_size, **arguments), 0.0)
    return claimed.answer


def publish(catalog, version, trained, **arguments):
    catalog.publish(VersionPublished(policy="default", version=version, **arguments), [("train", "t", trained)])


async def test_a_plan_waits_for_what_would_become_too_old_and_takes_the_rest_in_order():
    catalog = bounded(max_staleness=1, batch_size=2)
    first, second, third, fourth = [await slots(catalog) for _ in range(4)]
    finish(catalog, second)
    finish(catalog, third)
    assert (await take(catalog, 0)).rows.tolist() == [1, 2]
    publish(catalog, 1, 0)
    later = [await finished(catalog) for _ in range(2)]
    assert isinstance(await take(catalog, 1), NotYet)  # 0 and 3 are due by version 1
    finish(catalog, fourth)
    assert isinstance(await take(catalog, 1), NotYet)
    finish(catalog, first)
    assert (await take(catalog, 1)).rows.tolist() == [0, 3]
    publish(catalog, 2, 1)
    assert (await take(catalog, 2)).rows.tolist() == [claim.rows[0] for claim in later]
    assert [batch.staleness for batch in catalog.get("train").tasks["t"].recent_batches] == [0, 1, 1]


@pytest.mark.parametrize("unmatched", ["wait", "clear"])
async def test_what_is_late_may_be_evicted_once_a_batch_could_be_planned_but_for_it(unmatched):
    catalog = bounded(max_staleness=1, batch_size=2, unit="group", late="evict")
    groups = [{"groups": [name] * GROUP_SIZE, "group_size": GROUP_SIZE} for name in "abcdef"]
    first, *others, fourth = [await slots(catalog, GROUP_SIZE, **each) for each in groups[:4]]
    for claim in others:
        finish(catalog, claim)
    asked = {"batch_unit": "group", "unmatched": unmatched}
    assert (await take(catalog, 0, **asked)).rows.tolist() == [2, 3, 4, 5]
    publish(catalog, 1, 0)
    last = await finished(catalog, GROUP_SIZE, **groups[4])
    finish(catalog, fourth)
    assert isinstance(await take(catalog, 1, **asked), RankPlan)  # with a free place for what is not late
    publish(catalog, 2, 1)
    task = catalog.get("train").tasks["t"]
    (evicted,) = task.evicted
    assert (task.late_count, evicted.reason, evicted.group, evicted.version) == (1, "late", "a", 1)
    assert sorted(task.batches[1].rows.tolist()) == sorted([*fourth.rows.tolist(), *last.rows.tolist()])
    with pytest.raises((PreconditionError, SampleNotFoundError)):
        finish(catalog, first)
    assert task.outstanding_count == 0


async def test_a_slot_that_is_lost_is_waited_for_no_longer():
    catalog = bounded(max_staleness=0, batch_size=2)
    lost, _ = await slots(catalog), await finished(catalog)
    assert isinstance(await take(catalog, 0), NotYet)
    expire(catalog, workers_of(catalog), lost.request_id)
    assert isinstance(await take(catalog, 0), NotYet)
    await finished(catalog)
    assert (await take(catalog, 0)).rows.tolist() == [1, 2]


async def test_versions_go_up_with_trained_batches_alone():
    catalog = bounded(max_staleness=1, batch_size=2)
    for _ in range(4):
        await finished(catalog)
    assert (await take(catalog, 0)).rows.tolist() == [0, 1]
    with pytest.raises(VersionError, match="has trained 0 batches"):
        catalog.publish(VersionPublished(policy="default", version=1), [])
    with pytest.raises(
        VersionError, match=r"2 more than the published version of policy 'default'.* has trained 1 batches"
    ):
        publish(catalog, 2, 0)
    assert catalog.get("train").tasks["t"].trained == -1
    publish(catalog, 1, 0)
    catalog.publish(VersionPublished(policy="other", version=9), [])
    catalog.publish(VersionPublished(policy="default", version=0, rewind=True), [])


async def test_what_could_evade_the_bound_is_refused():
    catalog = bounded(max_staleness=1, batch_size=2)
    with pytest.raises(PreconditionError, match="without slots"):
        catalog.write("train", b"", new_write(1, ["x"]))
    slot = await finished(catalog)
    with pytest.raises(InvalidArgumentError, match="'start_version'"):
        update(catalog, slot.rows.tolist(), [], meta=[{"start_version": 5}])
    for arguments, message in (
        ({"batch_size": 3}, "requires batches of 2 samples over all ranks; got 3"),
        ({"batch_unit": "group"}, "got 2 groups"),
        ({"max_uses": 2}, "trained on once"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            await take(catalog, 0, **{"batch_size": 2} | arguments)
    with pytest.raises(InvalidArgumentError, match="trainer ranks"):
        await catalog.claim("train", b"", asks(None), 0.0)
    with pytest.raises(PreconditionError, match="too old for another epoch"):
        catalog.commit(ConsumptionReset(partition_id="train", task_name="t", keep_consumed=False))
    assert catalog.commit(ConsumptionReset(partition_id="train", task_name="t", keep_consumed=True)) == 1
    with pytest.raises(InvalidArgumentError, match="2 tasks"):
        Partition("p", PartitionSettings(admissions=[Admission(n, max_staleness=1, global_batch=1) for n in "ab"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_staleness": -1, "global_batch": 1}, "at least 0 versions"),
        ({"max_staleness": 1}, "at least 1 unit"),
        ({"global_batch": 4, "most": 2}, "max_staleness is not set"),
        ({"most": 2, "late": "evict"}, "max_staleness is not set"),
        ({"max_staleness": 1, "global_batch": 2, "late": "never"}, "wait, evict"),
        ({"max_staleness": 1, "global_batch": 2, "most": 3}, "implies 4"),
        ({"max_staleness": 1, "global_batch": 2, "given_back": "trained"}, "implies 'published'"),
    ],
)
def test_what_contradicts_the_bound_is_refused(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Admission("t", **arguments)


def test_the_bound_sets_the_rest():
    admission = Admission("t", max_staleness=2, global_batch=3)
    assert (admission.most, admission.given_back) == (9, "published")
    assert admission == Admission("t", 9, given_back="published", max_staleness=2, global_batch=3)


async def test_the_last_batch_may_be_short():
    catalog = bounded(max_staleness=1, batch_size=2, expected_samples=3)
    claims = [await slots(catalog) for _ in range(3)]
    for claim in claims:
        finish(catalog, claim)
    assert (await take(catalog, 0)).rows.tolist() == [0, 1]
    assert (await take(catalog, 1)).rows.tolist() == [2]


async def test_the_last_batch_of_a_finite_claim_may_be_short_too():
    catalog = bounded(max_staleness=1, batch_size=2)
    first, second = await slots(catalog), await slots(catalog)
    finish(catalog, first)
    assert isinstance(await take(catalog, 0, finite=True), NotYet)  # for the second
    expire(catalog, workers_of(catalog), second.request_id)
    assert (await take(catalog, 0, finite=True)).rows.tolist() == [0]
    assert isinstance(await take(catalog, 1, finite=True), EndCounts)


async def test_a_claim_looks_again_once_what_it_waits_for_has_its_last_field():
    """Other rows are ready: one more is all that it takes, although none of them may be planned so far."""
    catalog = bounded(max_staleness=1, batch_size=3)
    claims = [await slots(catalog) for _ in range(4)]
    for claim in claims:
        finish(catalog, claim)
    fields = ("x", "reward")
    for claim in claims[:2]:
        update(catalog, claim.rows.tolist(), ["reward"])
    waiting = asyncio.ensure_future(
        catalog.claim("train", b"", asks((0, 1, 0), batch_size=3, data_fields=fields), 20.0)
    )
    await turns()
    assert not waiting.done()
    update(catalog, claims[2].rows.tolist(), ["reward"])
    assert (await waiting).answer.rows.tolist() == [0, 1, 2]
    publish(catalog, 1, 0)
    later = [await finished(catalog) for _ in range(3)]
    for claim in later:
        update(catalog, claim.rows.tolist(), ["reward"])
    waiting = asyncio.ensure_future(
        catalog.claim("train", b"", asks((0, 1, 1), batch_size=3, data_fields=fields), 20.0)
    )
    await turns()
    assert not waiting.done()  # the fourth is due by version 1
    update(catalog, claims[3].rows.tolist(), ["reward"])
    async with asyncio.timeout(10):
        assert (await waiting).answer.rows.tolist() == [3, 4, 5]


async def test_no_rewind_and_no_removal_evades_the_bound():
    catalog = bounded(max_staleness=1, batch_size=2)
    await slots(catalog)
    with pytest.raises(VersionError, match="trained 0 batches"):
        catalog.publish(VersionPublished(policy="default", version=9, rewind=True), [])
    with pytest.raises(PreconditionError, match="of 1 outstanding units") as refused:
        catalog.commit(PolicyRemoved(policy="default"))
    assert refused.value.reason == "STALENESS_BOUNDED"
    expire(catalog, workers_of(catalog), catalog.get("train").tasks["rollout"].leases.popitem()[0])
    catalog.commit(PolicyRemoved(policy="default"))
    assert not catalog.policies


# Everything that can be late


@dataclass(order=True)
class Event:
    """Something that happens at a time of the simulation."""

    at: float
    number: int
    happens: object = field(compare=False)


LEASE_SECONDS = 150.0


@dataclass(frozen=True)
class Outcome:
    """What becomes of a group, known to nobody before: how, and how long after its slots are made."""

    seconds: float
    fate: str

    @classmethod
    def draw(cls, rng):
        seconds = rng.uniform(0.2, 5.0) * (20 if rng.random() < 0.05 else 1)
        chance = rng.random()
        if chance < 0.03:
            return cls(LEASE_SECONDS, "lost")
        if chance < 0.05:
            return cls(seconds, "failed")
        return cls(seconds, rng.choice(("rejected", "trained")))  # as DAPO rejects groups whose rewards are all alike


class Run:
    """Rollout workers, and a trainer that takes a second a batch, on a simulated clock, over a real partition.

    Rollouts take 0.2 to 5 s, one in 20 takes 20 times as long. One in 20 fails, by its worker or with it. Half of the
    groups are rejected once they are there. Workers, the trainer and the service are killed at any moment.
    """

    batch_size = 3

    def __init__(self, seed, max_staleness, late="wait"):
        self.late = late
        self.rng = random.Random(seed)
        self.max_staleness = max_staleness
        self.catalog = bounded(max_staleness, self.batch_size, unit="group", late=late)
        self.now = 0.0
        self.events = []
        self.numbers = itertools.count()
        self.prompts = itertools.count()
        self.waiting_prompts = []  # whose group was lost, before new ones
        self.evicted_names = set()
        self.starts = {}  # version by prompt, of groups that were made and are not trained or lost
        self.ready = set()
        self.planned = []  # batches of prompts that were planned and whose publication has not come
        self.trained_count = 0  # of those
        self.trained = set()
        self.batch_index = 0
        self.epoch = 0
        self.is_training = False
        self.staleness = []

    @property
    def version(self):
        return self.catalog.policies["default"].version

    def after(self, seconds, happens):
        heapq.heappush(self.events, Event(self.now + seconds, next(self.numbers), happens))

    async def run(self, batch_count):
        """Go on until so many batches are trained."""
        self.after(0.0, self.fill)
        for _ in range(12):
            self.after(self.rng.uniform(0, 2 * batch_count), self.rng.choice([self.kill_trainer, self.kill_service]))
        while len(self.staleness) < batch_count * self.batch_size:
            event = heapq.heappop(self.events)
            self.now = event.at
            await event.happens()
            await self.plan()

    async def fill(self):
        """Have rollouts begin as long as there is capacity: workers are never lacking."""
        admission = self.catalog.get("train").tasks["t"].outstanding
        while self.catalog.get("train").tasks["t"].outstanding_count < admission.admission.most:
            prompt = self.waiting_prompts.pop() if self.waiting_prompts else next(self.prompts)
            name = f"{prompt}/{next(self.numbers)}"
            self.starts[prompt] = self.version
            claim = await slots(self.catalog, GROUP_SIZE, groups=[name] * GROUP_SIZE, group_size=GROUP_SIZE)
            outcome = self.next_outcome()
            happens = {"lost": self.expire, "failed": self.give_up, "rejected": self.reject, "trained": self.put}
            self.after(outcome.seconds, self.when(happens[outcome.fate], prompt, claim, name))

    def next_outcome(self):
        """Return what will become of the next slots."""
        return Outcome.draw(self.rng)

    def when(self, happens, prompt, claim, name):
        async def later():
            if name not in self.evicted_names:
                happens(prompt, claim)
                await self.fill()

        return later

    def expire(self, prompt, claim):
        expire(self.catalog, workers_of(self.catalog), claim.request_id)
        self.lose(prompt)

    def give_up(self, prompt, claim):
        if self.rng.random() < 0.5:  # one member fails, and the rest of its group with it
            update(self.catalog, claim.rows[:1].tolist(), [], state="failed")
            update(self.catalog, claim.rows[1:].tolist(), ["x"], state="failed")
        else:
            release(self.catalog, workers_of(self.catalog), claim.request_id)
        self.lose(prompt)

    def put(self, prompt, claim):
        finish(self.catalog, claim)
        self.ready.add(prompt)

    def reject(self, prompt, claim):
        finish(self.catalog, claim)
        update(self.catalog, claim.rows.tolist(), [], state="failed")
        self.lose(prompt)

    def lose(self, prompt):
        del self.starts[prompt]
        self.waiting_prompts.append(prompt)

    # The trainer

    async def plan(self):
        """Claim the next batch, and see that there is one as soon as the rule allows it."""
        may_plan = self.may_plan()
        request = asks((0, 1, self.batch_index), batch_size=self.batch_size, batch_unit="group", epoch=self.epoch)
        answer = (await self.catalog.claim("train", b"", request, 0.0)).answer
        assert isinstance(answer, RankPlan) == may_plan
        await self.note_evicted()
        if not may_plan:
            return
        partition = self.catalog.get("train")
        names = partition.groups.names_of(partition.table.find(answer.rows))
        prompts = [int(name.split("/")[0]) for name in dict.fromkeys(names)]
        assert len(prompts) == self.batch_size
        assert len(names) == self.batch_size * GROUP_SIZE
        assert self.ready.issuperset(prompts)
        self.planned.append(prompts)
        self.ready.difference_update(prompts)
        self.batch_index += 1
        self.train()

    async def note_evicted(self):
        """Have the prompts of evicted groups made again."""
        for unit in self.catalog.get("train").tasks["t"].evicted:
            if unit.group not in self.evicted_names:
                assert self.late == "evict"
                self.evicted_names.add(unit.group)
                self.lose(int(unit.group.split("/")[0]))
                await self.fill()

    def may_plan(self):
        """Whether there is a batch that leaves the others their time, by counting."""
        version = self.version + len(self.planned)
        unplanned = [prompt for prompt in self.starts if not any(prompt in batch for batch in self.planned)]
        ready = [prompt for prompt in unplanned if prompt in self.ready]
        if len(ready) < self.batch_size:
            return False
        if self.late == "evict":
            return True
        for later in range(self.max_staleness + 1):
            due = [each for each in unplanned if self.starts[each] + self.max_staleness <= version + later]
            must = len(due) - later * self.batch_size
            assert must <= self.batch_size, "more are due than can be trained in time"
            if sum(each in self.ready for each in due) < must:
                return False
        return True

    def train(self):
        if not self.is_training and self.trained_count < len(self.planned):
            self.is_training = True
            self.after(1.0, self.when_trained(self.epoch))

    def when_trained(self, epoch):
        async def trained():
            if epoch != self.epoch:  # the trainer was killed meanwhile
                return
            self.is_training = False
            prompts = self.planned[self.trained_count]
            assert self.trained.isdisjoint(prompts)
            self.trained.update(prompts)
            self.staleness += [self.version - self.starts[prompt] for prompt in prompts]
            self.trained_count += 1
            if self.rng.random() < 0.8 or self.trained_count == len(self.planned):
                self.publish()
            await self.fill()
            self.train()

        return trained

    def publish(self):
        last = self.batch_index - len(self.planned) + self.trained_count - 1
        publish(self.catalog, self.version + self.rng.randint(1, self.trained_count), last)
        for batch in self.planned[: self.trained_count]:
            for prompt in batch:
                del self.starts[prompt]
        del self.planned[: self.trained_count]
        self.trained_count = 0

    # Faults

    async def kill_trainer(self):
        """Have other ranks go on behind what was trained: what was planned beyond it is planned anew."""
        if self.batch_index:
            if self.trained_count:
                self.publish()
            trained = self.batch_index - len(self.planned) - 1
            restart_ranks(self.catalog, self.catalog.get("train").tasks["t"], dp_size=1, trained=trained)
            self.ready.update(itertools.chain.from_iterable(self.planned))
            self.batch_index, self.planned, self.is_training = trained + 1, [], False
            self.epoch += 1
            await self.fill()

    async def kill_service(self):
        """Have another service go on from the snapshot of this one."""
        before = self.catalog
        restored = Partition.restore(before.get("train").snapshot())
        self.catalog = Catalog(PlanRunner())
        self.catalog.adopt([restored], before.policies.values())
        assert restored.tasks["t"].outstanding_count == before.get("train").tasks["t"].outstanding_count


@pytest.mark.parametrize("late", ["wait", "evict"])
@pytest.mark.parametrize("max_staleness", [0, 2, *(pytest.param(bound, marks=pytest.mark.nightly) for bound in (1, 4))])
@examples(4)
@given(st.integers(0, 2**32))
def test_no_sample_is_trained_too_late_and_no_plan_later_than_it_may_be(max_staleness, late, seed):
    run = Run(seed, max_staleness, late)
    asyncio.run(run.run(40))
    assert max(run.staleness) <= max_staleness
    assert run.trained.isdisjoint(run.waiting_prompts)
    known = run.trained | run.starts.keys() | set(run.waiting_prompts)
    assert known == set(range(next(run.prompts)))  # none is lost
