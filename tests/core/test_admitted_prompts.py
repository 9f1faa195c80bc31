"""Claims of prompts with their slots: whatever happens, a prompt is made once, and the journal makes the same again."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from digest import digest
from domain_support import asks, new_id, new_write, turns
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples
from test_replay_property import Journal, fail, replayed

from tq_service.errors import TqError
from tq_service.machine.claims import ClaimAcked, ClaimExtended, ClaimReleased, ConsumptionReset, LeaseExpired
from tq_service.machine.policies import VersionPublished
from tq_service.machine.samples import PartitionCleared, SamplesCleared, SamplesWritten
from tq_service.machine.state_machine import decode_group
from tq_service.samplers import PlanRunner
from tq_service.schema import Admission, Admit, SampleState
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import NotYet
from tq_service.serving.slots import PromptClaims
from tq_service.state.ledger import Claim
from tq_service.state.partition import Partition, PartitionSettings
from tq_service.state.plan import LeasedClaim, LeaseTerms
from tq_service.state.table import HELD

PROMPTS = 6
MOST, MOST_RUNNING = 4, 3


class Run:
    """Rollout workers that claim prompts with slots, finish them, fail, are late, and a service that may restart."""

    def __init__(self, group_size, on_lost):
        self.group_size = group_size
        self.admit = Admit("train", group_size=group_size, on_lost=on_lost, policy="default")
        self.catalog, self.journal = Catalog(PlanRunner()), Journal()
        self.catalog.machine.log, self.catalog.machine.fatal = self.journal, fail
        admission = Admission("t", MOST, unit="group", most_running=MOST_RUNNING)
        self.catalog.create("train", PartitionSettings(admissions=(admission,)))
        self.catalog.publish(VersionPublished(policy="default", version=3), [])
        keys = [f"p{number}" for number in range(PROMPTS)]
        self.catalog.write("prompts", b"", new_write(PROMPTS, ["x"], keys=keys))
        self.claimer = PromptClaims(self.catalog)
        self.claims = []  # request ids

    async def claim(self, batch_size=1, least=0, wait=0.0, request_id=None):
        request = asks(
            None, task="rollout", batch_size=batch_size, least=least, lease=LeaseTerms(seconds=60.0),
            request_id=request_id or new_id(),
        )  # fmt: skip
        request = replace(request, spec=replace(request.spec, admit=self.admit))
        claimed = await self.claimer.claim("prompts", b"", request, wait)
        if isinstance(claimed.answer, Claim):
            self.claims.append(claimed.answer.request_id)
        return claimed.answer

    def slots(self, request_id):
        """Return the indexes of the slots of a claim that are there."""
        claim = self.catalog.get("train").tasks["rollout"].claims.get(request_id)
        return [] if claim is None else [row for row in claim.rows.tolist() if self.find("train", row) >= 0]

    def find(self, partition_id, row):
        return int(self.catalog.get(partition_id).table.find(np.array([row]))[0])

    def is_held(self, row):
        return self.catalog.get("train").state[self.find("train", row)] == HELD

    def change(self, kind, partition_id, request_id, **facts):
        self.catalog.commit(kind(partition_id=partition_id, task_name="rollout", request_id=request_id, **facts))

    def finish(self, request_id, rows):
        leased = LeasedClaim(task_name="rollout", request_id=request_id)
        write = new_write(len(rows), ["x"], indexes=rows, acks=leased)
        self.catalog.commit(SamplesWritten(partition_id="train", write=write))

    def step(self, rng):
        """Do something that a worker, the clock or a user does, to a claim that may be over."""
        request_id = rng.choice(self.claims)
        slots = self.slots(request_id)
        some = rng.sample(slots, rng.randint(1, len(slots))) if slots else []
        claim = self.catalog.get("prompts").tasks["rollout"].claims.get(request_id)
        prompts = [] if claim is None else rng.sample(claim.rows.tolist(), rng.randint(1, claim.rows.size))
        where = rng.choice(("train", "prompts"))
        named = np.array(some if where == "train" else prompts, np.int64)
        match rng.choice(
            (
                "finish",
                "finish",
                "finish",
                "put",
                "hold",
                "fail",
                "clear",
                "ack",
                "release",
                "extend",
                "expire",
                "reset",
            )
        ):
            case "finish" if some:
                self.finish(request_id, some)
            case "put" if some:
                self.catalog.write("train", b"", new_write(len(some), ["x"], indexes=some, state="live"))
            case "hold" if some and all(self.is_held(row) for row in some):
                self.catalog.write("train", b"", new_write(len(some), ["x"], indexes=some, state="held"))
            case "fail" if some:
                self.catalog.write("train", b"", new_write(len(some), indexes=some, state="failed"))
            case "clear" if some:
                self.catalog.commit(SamplesCleared(partition_id="train", global_indexes=np.array(some, np.int64)))
            case "ack" if named.size:
                self.change(ClaimAcked, where, request_id, global_indexes=named)
            case "release" if named.size:
                self.change(ClaimReleased, where, request_id, global_indexes=named)
            case "extend":
                self.change(ClaimExtended, where, request_id, lease_seconds=50.0)
            case "expire" if where in self.catalog.names():
                leases = self.catalog.get(where).tasks["rollout"].leases
                if request_id in leases:
                    self.change(LeaseExpired, where, request_id)
            case "reset" if rng.random() < 0.3:
                change = ConsumptionReset(partition_id=where, task_name="rollout", keep_consumed=True)
                self.catalog.commit(change)

    def check(self):
        train, prompts = self.catalog.get("train"), self.catalog.get("prompts")
        task = prompts.tasks["rollout"]
        positions = np.arange(prompts.table.count)
        free = prompts.key[positions[task.claim[positions] == 0]].tolist()
        if self.group_size == 1:
            made = [key for key in train.key[train.table.present_positions()].tolist() if key]
        else:
            made = [name for name in train.groups.names_of(train.table.present_positions()) if name]
        assert not set(free) & set(made)
        assert all(made.count(name) <= self.group_size for name in made)
        assert task.consumed_count + task.backlog + task.dead_lettered_count == PROMPTS
        for request_id, claim in task.leases.items():
            other = train.tasks["rollout"].claims.get(request_id)
            if other is not None:
                assert other.lease.seconds == claim.lease.seconds or not other.leased_count
        assert train.tasks["t"].outstanding_count <= min(MOST, len(set(made)))
        held = train.table.present_positions()
        held = held[train.state[held] == HELD]
        groups = [name for name in train.groups.names_of(held) if name]
        assert train.held_count("group") == len(set(groups)) + held.size - len(groups) <= MOST_RUNNING


@pytest.mark.parametrize("on_lost", ["remove", "requeue", "fail"])
@examples(60, derandomize=True)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(5, 40))
def test_whatever_happens_a_prompt_that_can_be_claimed_has_no_slots(on_lost, seed, group_size, steps):
    async def drive():
        rng, run = random.Random(seed), Run(group_size, on_lost)
        for _ in range(steps):
            try:
                if rng.random() < 0.4 or not run.claims:
                    await run.claim(rng.randint(1, 2), rng.randint(0, 1))
                else:
                    run.step(rng)
            except TqError:
                pass
            run.check()
        return run.catalog, run.journal

    catalog, journal = asyncio.run(drive())
    again = replayed(journal)
    for name in ("prompts", "train"):
        assert digest(again.get(name)) == digest(catalog.get(name))
        restored = Partition.restore(catalog.get(name).snapshot())
        assert digest(restored) == digest(catalog.get(name))
        assert restored.held_count("group") == catalog.get(name).held_count("group")


async def test_prompts_and_slots_are_one_record():
    run = Run(2, "remove")
    await run.claim()
    before = len(run.journal)
    claim = await run.claim()
    assert len(run.journal) == before + 1
    made = [type(change).__name__ for change in decode_group(run.journal[-1])[1]]
    assert made == ["SamplesWritten", "SamplesClaimed", "SamplesClaimed"]
    before = len(run.journal)
    run.finish(claim.request_id, run.slots(claim.request_id))
    assert [type(change).__name__ for change in decode_group(run.journal[before])[1]] == ["SamplesWritten"]
    assert run.catalog.get("prompts").tasks["rollout"].leased_count == 1  # the first


async def test_calls_wait_for_capacity_in_order_and_hold_nothing_meanwhile():
    run = Run(2, "remove")
    held = [await run.claim() for _ in range(MOST_RUNNING)]
    calls = [asyncio.ensure_future(run.claim(wait=20.0)) for _ in range(2)]
    await turns()
    assert run.catalog.waiting_put_count("train") == 2
    assert run.catalog.waiting_count(run.catalog.get("prompts"), "rollout") == 2
    assert run.catalog.get("prompts").tasks["rollout"].leased_count == MOST_RUNNING
    run.finish(held[0].request_id, run.slots(held[0].request_id))
    await turns(20)
    assert [call.done() for call in calls] == [True, False]
    run.change(ClaimReleased, "prompts", held[1].request_id)
    await turns(20)
    assert [call.result().rows.tolist() for call in calls] == [[3], [1]]
    assert not run.catalog.capacity_waits
    assert isinstance(await run.claim(), NotYet)


async def test_capacity_without_prompts_goes_to_others():
    run = Run(2, "remove")
    claims = [await run.claim() for _ in range(MOST_RUNNING)]
    waiting = asyncio.ensure_future(run.claim(wait=20.0))
    await turns()
    others = [row for row in range(PROMPTS) if row > 2]
    run.catalog.commit(SamplesCleared(partition_id="prompts", global_indexes=np.array(others)))
    run.finish(claims[0].request_id, run.slots(claims[0].request_id))
    await turns(20)
    assert not waiting.done()  # it waits for prompts now
    queue = run.catalog.admission_queue("train")
    slots = new_write(2, state=SampleState.HELD, is_of_slots=True, groups=["other"] * 2, group_size=2)
    with await queue.enter(new_id(), slots, 0, 0.0):
        run.catalog.write("train", b"", slots)
    run.catalog.commit(PartitionCleared(partition_id="prompts"))
    with pytest.raises(TqError, match="cleared while the call waited"):
        await waiting


async def test_a_retry_takes_the_place_of_the_call_in_the_queue():
    run, request_id = Run(2, "remove"), new_id()
    held = [await run.claim() for _ in range(MOST_RUNNING)]
    first = asyncio.ensure_future(run.claim(wait=20.0, request_id=request_id))
    await turns()
    again = asyncio.ensure_future(run.claim(wait=20.0, request_id=request_id))
    await turns()
    with pytest.raises(TqError, match="a retry of this call took its place"):
        await first
    run.change(ClaimReleased, "prompts", held[0].request_id)
    assert (await again).rows.tolist() == [0]
    assert (await run.claim(request_id=request_id)).rows.tolist() == [0]
    assert len(run.slots(request_id)) == 2


@pytest.mark.parametrize("gone", ["prompts", "train"])
async def test_a_side_that_is_gone_leaves_the_lease_to_the_other(gone):
    run = Run(2, "remove")
    claim = await run.claim()
    run.catalog.commit(PartitionCleared(partition_id=gone))
    left = "train" if gone == "prompts" else "prompts"
    run.change(ClaimExtended, left, claim.request_id, lease_seconds=9.0)
    run.change(LeaseExpired, left, claim.request_id)
    assert run.catalog.get(left).tasks["rollout"].leased_count == 0
    assert run.catalog.get(left).table.present_count == (0 if left == "train" else PROMPTS)
