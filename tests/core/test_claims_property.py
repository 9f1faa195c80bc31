"""Random interleavings of producers, ranks, replicas, retries, leavers, failures, seals, resets and clears.

A step is a name and a seed. Each is done to a real partition and to the model; records are judged in the moment they
are made, everything else when the loop has come to rest.
"""

import asyncio
import random
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from claims_driver import NAME, Driver
from domain_support import (
    ack,
    clear,
    clear_fields,
    close_groups,
    extend,
    new_id,
    release,
    reset,
    restart_ranks,
    seal,
    turns,
)
from hypothesis import given
from hypothesis import strategies as st
from model import Asking
from property_settings import examples

from tq_service.custom_meta import JSON_NULL
from tq_service.errors import ClaimReleasedError, InvalidArgumentError, LeaseExpiredError, TqError
from tq_service.schema import EndCounts
from tq_service.state import ledger
from tq_service.state import table as table_module
from tq_service.state.ledger import Claim
from tq_service.state.plan import RankPlan

pytestmark = pytest.mark.usefixtures("judged_waiters")

STEPS = (
    *["insert"] * 6, *["columns"] * 5, *["ask"] * 8, "ask_ahead", "replay", "retry", "leave", "leave_late", "look",
    "disagree", "release", "fail", "hold", "free", "set_meta", "seal", "close_group", "reset", "restart", "clear",
    "clear_all", "overwrite", "turn", "turn", "ack", "ack", "ack", "extend", "pass_time", *["ask_named"] * 3,
    *["put_leased"] * 3, *["grow"] * 4, *["close_rollouts"] * 2, "clear_fields",
)  # fmt: skip
# Workers that lease, and crash, in partitions that soon come to their end.
LEASE_STEPS = (
    *["insert"] * 4, *["columns"] * 3, *["ask"] * 9, *["ack"] * 7, *["pass_time"] * 5, *["seal"] * 2, "look", "fail",
    "hold", "free", "release", "retry", "retry", *["extend"] * 4, "leave_late", "close_group", "clear", "reset", "turn",
    "ask_named", "ask_named", *["put_leased"] * 5, *["grow"] * 5, "close_rollouts", "clear_fields",
)  # fmt: skip
AGENT_STEPS = (
    *["insert"] * 12, *["ask"] * 10, *["close_rollouts"] * 4, *["ack"] * 3, *["pass_time"] * 2, "columns", "ask_ahead",
    "look", "fail", "hold", "free", "release", "retry", "leave", "close_group", "clear", "reset", "restart",
    "put_leased", "turn",
)  # fmt: skip
SHARING_STEPS = (*STEPS, *["put_groups"] * 8, *["clear_fields"] * 2)
GROUPS = ("a", "b", "c", "d")
ROLLOUTS = ("1", "2", "3")


def asking_for(rng, *, ranked):
    """Return one way of asking."""
    sampler = rng.choice(["sequential", "grpo_group_n", "seqlen_balanced", "rank_aware" if ranked else "sequential"])
    unit = rng.choice(["sample", "sample", "sample", "group", "group", "rollout"])
    if unit == "rollout" and sampler == "grpo_group_n":  # which is told how many rows a group has
        sampler = "sequential"
    block_size = rng.choice([2, 3]) if sampler == "grpo_group_n" else None
    if unit != "rollout" and sampler in ("rank_aware", "seqlen_balanced") and rng.random() < 0.5:
        block_size = 2
    grouped = sampler in ("grpo_group_n", "seqlen_balanced") or unit != "sample" or block_size is not None
    batch_size = rng.choice([1, 2, 4] if block_size is None or unit != "sample" else [block_size, 2 * block_size])
    finite = rng.random() < 0.2
    anywhere = block_size is not None and rng.random() < 0.4
    unmatched = rng.choice(["wait", "wait", "wait", "fail", "clear"])
    return Asking(
        sampler=sampler,
        fields=rng.choice([("x",), ("x", "y")]),
        batch_size=batch_size,
        min_size=batch_size if ranked else rng.randint(1, batch_size),
        dp_size=rng.choice([1, 2, 3]) if ranked else 0,
        unit=unit,
        grouped=grouped,
        block_size=block_size,
        anywhere=anywhere,
        take=sampler != "sequential" and not anywhere and rng.random() < 0.3,
        needs_length=sampler == "seqlen_balanced",
        least_version=1 if rng.random() < 0.3 else None,
        newest_first=rng.random() < 0.2,
        drop_last=rng.random() < 0.2,
        finite=finite,
        micro_batch_size=rng.choice([None, 1, 3]),
        slow=rng.random() < 0.3,
        lease=None if ranked or rng.random() < 0.4 else rng.choice([50.0, 200.0, 500.0]),
        max_deliveries=rng.choice([None, 1, 2, 3]),
        max_uses=rng.choice([1, 1, 1, 1, 2, 3]),
        unmatched=unmatched,
        least_members=0 if unmatched == "wait" else rng.choice([0, 2]),
    )


def reusing(rng, asking):
    """Return a way of asking of which samples are delivered more than once."""
    if rng.random() < 0.5:
        return replace(asking, max_uses=rng.choice([2, 3]))
    singly = {"unit": "sample", "grouped": False, "block_size": None, "anywhere": False, "take": False}
    batch_size = rng.choice([1, 2, 4])
    min_size = batch_size if asking.dp_size else rng.randint(1, batch_size)
    singly |= {"batch_size": batch_size, "min_size": min_size, "needs_length": False}
    return replace(asking, sampler="drawing", **singly)


class Interleaving:
    """The steps, each with a random choice of its own."""

    shared = ()  # fields of groups

    def __init__(self, seed):
        rng = random.Random(seed)
        self.in_groups = rng.random() < 0.7
        self.in_rollouts = rng.random() < 0.4
        self.driver = Driver(
            self.ways(rng),
            shared=self.shared,
            expected=rng.choice([None, None, 20]),
            is_declared=rng.random() < 0.4,
            samples_per_round=rng.choice([None, None, 3, 8]),
            write_once=rng.choice([(), (), (), ("y",), ("x", "y")]),
        )
        self.key_count = 0

    def ways(self, rng):
        """Return the tasks, each with the ways in which it asks."""
        ways = {"trainer": [asking_for(rng, ranked=True)], "reward": [asking_for(rng, ranked=False)]}
        if rng.random() < 0.5:
            ways["critic"] = [asking_for(rng, ranked=True)]
        if rng.random() < 0.3:  # workers of one task that ask in two ways
            ways["mixed"] = [asking_for(rng, ranked=False), asking_for(rng, ranked=False)]
        return ways

    async def step(self, name, seed):
        self.driver.rng = random.Random(seed)
        await getattr(self, name)(random.Random(seed))
        await turns(3)

    # Producers

    async def insert(self, rng):
        count = rng.choice([1, 2, 2, 4, 6])
        keys = None
        if rng.random() < 0.5:
            keys = [f"k{self.key_count + i}" for i in range(count)]
            self.key_count += count
        groups, group_size = None, 0
        if self.in_groups and rng.random() < 0.9:
            groups = [rng.choice(GROUPS)] * count if rng.random() < 0.7 else rng.choices((*GROUPS, None), k=count)
            group_size = rng.choice([0, 2, 2, 3, 4])
        rollouts, ends_rollouts = None, False
        if self.in_rollouts and rng.random() < 0.8:
            rollouts = [rng.choice(ROLLOUTS)] * count if rng.random() < 0.5 else rng.choices((*ROLLOUTS, None), k=count)
            ends_rollouts = rng.random() < 0.5
            if rng.random() < 0.8:  # most often they have begun, or none of them
                known = self.driver.model.rollouts
                rollouts = [name for name in rollouts if name in known] or [f"r{self.driver.model.inserted}"]
                rollouts = (rollouts * count)[:count]
                groups = groups if rollouts[0] not in known else None
        self.driver.insert(
            count,
            state=rng.choice(["live", "live", "live", "held", "failed"]),
            keys=keys,
            groups=groups,
            group_size=group_size,
            rollouts=rollouts,
            ends_rollouts=ends_rollouts,
            fields=rng.choice([(), ("x",), ("x", "y"), ("x", "y")]),
            meta_entries=self._entries(rng, count),
        )

    def _entries(self, rng, count):
        if rng.random() < 0.2:
            return None
        return [
            {
                **({"total_lengths": rng.randint(0, 50)} if rng.random() < 0.9 else {}),
                **({"version": rng.choice([0, 1, 2, 3, 1, 2, 3, None, JSON_NULL, [1]])} if rng.random() < 0.8 else {}),
            }
            for _ in range(count)
        ]

    def _some(self, rng, matches=lambda row: True, most=4):
        rows = [index for index, row in self.driver.model.rows.items() if matches(row)]
        return rng.sample(rows, min(len(rows), rng.randint(1, most)))

    async def columns(self, rng):
        fields = rng.choice([("x",), ("y",), ("x", "y")])
        indexes = self._some(rng, lambda row: not row.fields >= set(fields), most=6)
        if indexes:
            self.driver.update(indexes, fields=fields, by_key=rng.random() < 0.5)

    async def overwrite(self, rng):
        indexes = self._some(rng)
        if indexes:
            self.driver.update(indexes, fields=("x",), meta_entries=self._entries(rng, len(indexes)))

    async def _set_state(self, rng, state, matches):
        indexes = self._some(rng, matches)
        if indexes:
            self.driver.update(indexes, state=state, fields=rng.choice([(), (), ("y",)]))

    async def fail(self, rng):
        await self._set_state(rng, "failed", lambda row: True)

    async def hold(self, rng):
        await self._set_state(rng, "held", lambda row: rng.random() < 0.9 or row.state == "live")

    async def free(self, rng):
        await self._set_state(rng, "live", lambda row: row.state == "held")

    async def set_meta(self, rng):
        indexes = self._some(rng)
        entries = self._entries(rng, len(indexes))
        if indexes and entries and any(entries):
            self.driver.set_meta(indexes, entries)

    async def seal(self, rng):
        if rng.random() < 0.5:
            self.driver.model.seal()
            seal(self.driver.catalog)

    async def close_group(self, rng):
        if self.driver.model.groups:
            name = rng.choice(sorted(self.driver.model.groups))
            self.driver.model.close_group(name)
            close_groups(self.driver.catalog, [name])

    async def close_rollouts(self, rng):
        names = sorted(name for name, rollout in self.driver.model.rollouts.items() if not rollout.closed)
        for name in rng.sample(names, min(len(names), rng.randint(1, 3))):
            self.driver.model.close_rollout(name)
            close_groups(self.driver.catalog, [], rollouts=[name])

    async def clear(self, rng):
        indexes = self._some(rng, most=8)
        if indexes:
            count, _ = clear(self.driver.catalog, np.array([*indexes, 10_000], np.int64))
            assert count == self.driver.model.clear(indexes)

    async def clear_fields(self, rng):
        """A field is dropped, maybe too early for some task."""
        indexes, names = self._some(rng, most=8), rng.choice([["x"], ["y"], ["y"], ["x", "y", "z"], ["p", "x"]])
        groups = rng.sample(GROUPS, rng.randint(0, 2))
        count, _ = clear_fields(self.driver.catalog, names, [*indexes, 10_000], groups=groups)
        assert count == self.driver.model.clear_fields(indexes, groups, names)

    async def clear_all(self, rng):
        if rng.random() < 0.5:
            return await self.clear(rng)
        if rng.random() < 0.5:
            await self.driver.check()
            count = self.driver.catalog.remove(NAME, self.driver.partition.incarnation)
            assert count == len(self.driver.model.rows)
            self.driver.open_life()
            return None
        rows = list(self.driver.model.rows)
        if rows:
            clear(self.driver.catalog, np.array(rows, np.int64))
            self.driver.model.clear(rows)
        return None

    # Consumers

    def _task(self, rng, *, ranked=None):
        names = [name for name, ways in self.driver.tasks.items() if ranked is None or (ways[0].dp_size > 0) == ranked]
        name = rng.choice(names)
        return name, rng.choice(self.driver.tasks[name]), self.driver.model.task(name)

    async def ask(self, rng, *, ahead=0, max_wait=1e6):
        name, asking, task = self._task(rng)
        epoch = rng.choice([None, task.epoch])
        if not asking.dp_size:
            self.driver.ask(name, asking, epoch=epoch, max_wait=max_wait)
            return
        index = len(task.batches) + rng.randint(0, ahead)
        ranks = rng.choices(range(asking.dp_size), k=rng.randint(1, asking.dp_size + 1))
        for dp_rank in ranks:
            self.driver.ask(name, asking, (dp_rank, asking.dp_size, index), epoch=epoch, max_wait=max_wait)

    async def ask_named(self, rng):
        """Several callers ask for one claim, maybe one that was made before."""
        name, asking, task = self._task(rng, ranked=False)
        known = len(task.names) + len(task.past_names)
        claim_name = f"{rng.randint(max(0, known - 3), known + 1)}"
        for _ in range(rng.randint(1, 3)):
            asking = rng.choice(self.driver.tasks[name])
            epoch, max_wait = rng.choice([None, task.epoch]), rng.choice([0, 1e6])
            call = self.driver.ask(name, asking, epoch=epoch, max_wait=max_wait, claim_name=claim_name)
            call.may_disagree = len(self.driver.tasks[name]) > 1
            await turns(rng.choice([0, 0, 2]))
        if rng.random() < 0.2:
            call.future.cancel()

    async def ask_ahead(self, rng):
        await self.ask(rng, ahead=3)

    async def look(self, rng):
        await self.ask(rng, max_wait=0)

    async def replay(self, rng):
        name, asking, task = self._task(rng, ranked=True)
        if task.batches:
            for dp_rank in range(asking.dp_size):
                index = rng.randrange(len(task.batches))
                self.driver.ask(name, asking, (dp_rank, asking.dp_size, index), max_wait=0)

    async def disagree(self, rng):
        name, asking, task = self._task(rng, ranked=True)
        if task.batches:
            index = rng.randrange(len(task.batches))
            other = Asking(**{**_facts(asking), "batch_size": asking.batch_size * 2, "min_size": 8})
            self.driver.ask(name, other, (0, asking.dp_size, index), max_wait=0).may_disagree = True
        if task.dp_size is not None:
            size = asking.dp_size + 1
            other = Asking(**{**_facts(asking), "dp_size": size})
            call = self.driver.ask(name, other, (asking.dp_size, size, len(task.batches)), max_wait=0)
            call.may_disagree = True

    async def retry(self, rng):
        name, asking, task = self._task(rng, ranked=False)
        waiting = [call for call in self.driver.calls if call.task == name and not call.future.done()]
        if task.expired and rng.random() < 0.3:
            call = self.driver.ask(name, asking, request_id=rng.choice(sorted(task.expired)), max_wait=0)
            await turns(3)
            assert isinstance(call.error, LeaseExpiredError | ClaimReleasedError)
        elif task.claims and rng.random() < 0.6:
            request_id = rng.choice(sorted(task.claims))
            rows = task.claims[request_id].rows
            call = self.driver.ask(name, asking, request_id=request_id, max_wait=0)
            await turns(3)
            if call.error is None:
                assert call.answer.rows.tolist() == rows
                assert set(rows) <= self.driver.model.rows.keys()
        elif waiting:
            call = rng.choice(waiting)
            again = self.driver.ask(name, call.asking, request_id=call.request_id, claim_name=call.name)
            again.may_disagree = call.may_disagree

    async def leave(self, rng):
        waiting = [call for call in self.driver.calls if not call.future.done()]
        if waiting:
            for call in rng.sample(waiting, rng.randint(1, len(waiting))):
                call.future.cancel()

    async def leave_late(self, rng):
        """Leave in the moment the answer comes."""
        name, asking, _ = self._task(rng, ranked=False)
        request_id, claim_name = new_id(), rng.choice(["", f"late {rng.random()}"])
        calls = [
            self.driver.ask(name, asking, request_id=request_id, claim_name=claim_name)
            for _ in range(rng.randint(1, 2))
        ]
        await turns(rng.randint(0, 5))
        calls[0].future.cancel()

    async def release(self, rng):
        name, asking, task = self._task(rng, ranked=False)
        known = [*sorted(task.claims), *[call.request_id for call in self.driver.calls if call.task == name]]
        if not known or name not in self.driver.partition.tasks:  # no call of the task was answered yet
            return
        request_id = rng.choice(known)
        real, model, claim = self.driver.partition.tasks[name], self.driver.model, task.claims.get(request_id)
        rows = None
        if claim is not None and rng.random() < 0.5:
            rows = np.array(rng.sample(claim.rows, rng.randint(1, len(claim.rows))), np.int64)
        named = set() if rows is None else set(rows.tolist()) & model.rows.keys()
        if named and request_id in task.expired and named - claim.held - claim.returned:
            with pytest.raises(LeaseExpiredError):
                release(self.driver.catalog, real, request_id, rows)
            return
        if claim is None:
            expected = set()
        elif claim.asking.lease:
            expected = claim.left if rows is None else claim.left & set(rows.tolist())
            if model.parts_a_group(claim, expected):
                expected = None
        else:
            delivered = set(claim.rows) & model.rows.keys()
            expected = delivered if claim.consumed is None else claim.consumed & model.rows.keys()
            if rows is not None and not delivered <= set(rows.tolist()):
                expected = None
        if expected is None:
            with pytest.raises(InvalidArgumentError):
                release(self.driver.catalog, real, request_id, rows)
            return
        if rows is None or expected or not claim.asking.lease:
            task.released.add(request_id)
        count = sum(model.rows[row].state == "live" for row in expected)
        assert release(self.driver.catalog, real, request_id, rows) == count
        self.driver.ask(name, asking, request_id=request_id, max_wait=0)

    async def ack(self, rng):
        name, _, task = self._task(rng, ranked=False)
        if not task.rows_of_claims:
            return
        request_id = self._known_claim(rng, task)
        rows = task.rows_of_claims[request_id]
        if rng.random() < 0.5:
            rows = rng.sample(rows, rng.randint(1, len(rows)))
        real, before = self.driver.partition.tasks[name], set(task.acked)
        expected = self.driver.model.ack(task, request_id, rows)
        try:
            count = ack(self.driver.catalog, real, request_id, np.array(rows, np.int64))
        except TqError as error:
            assert type(error).__name__ == expected
            assert task.acked == before
        else:
            assert count == expected

    def _known_claim(self, rng, task):
        """Return the id of a claim, most often of one that leases samples, or has lost some."""
        leased = [request_id for request_id, claim in task.claims.items() if claim.left]
        parted = [request_id for request_id, claim in task.claims.items() if claim.held < set(claim.rows)]
        known = next((some for some in rng.sample([leased, leased, parted], 3) if some), task.rows_of_claims)
        known = sorted(known if rng.random() < 0.8 else task.rows_of_claims)
        return rng.choice(known)

    async def put_leased(self, rng):
        name, _, task = self._task(rng, ranked=False)
        if not task.rows_of_claims:
            return
        request_id = self._known_claim(rng, task)
        rows = sorted(set(task.rows_of_claims[request_id]) & self.driver.model.rows.keys())
        if rng.random() < 0.5:
            rows = rng.sample(rows, rng.randint(0, len(rows)))
        if rows:
            self.driver.put_leased(
                name,
                request_id,
                rows,
                acks=rng.random() < 0.6,
                fields=rng.choice([(), ("y",), ("x", "y")]),
                state=rng.choice([None, None, None, "held", "live", "failed"]),
            )

    async def grow(self, rng):
        """A worker adds to unfinished samples that it leases, some times, and cuts some."""
        name, _, task = self._task(rng, ranked=False)
        if not task.rows_of_claims:
            return
        request_id, rows_of = self._known_claim(rng, task), task.rows_of_claims
        rows = sorted(set(rows_of[request_id]) & self.driver.model.rows.keys())
        if live := [row for row in rows if self.driver.model.rows[row].state == "live" and rng.random() < 0.95]:
            self.driver.update(live, state="held")
        for _ in range(rng.randint(1, 5) if rows else 0):
            some = rng.sample(rows, rng.randint(1, len(rows)))
            change = rng.choice([self.driver.append] * 3 + [self.driver.truncate])
            change(name, request_id, some, rng.choice([("x",), ("y",), ("y",), ("y", "x")]))

    async def put_groups(self, rng):
        """Put what samples of groups share; maybe some groups go that have had no samples."""
        names = rng.sample(GROUPS, rng.randint(1, len(GROUPS)))
        if rng.random() < 0.15:
            self.driver.remove_groups(names)
        else:
            self.driver.put_groups(names, rng.choice([("p",), ("p", "q"), ("q",)]), must_exist=rng.random() < 0.1)

    async def extend(self, rng):
        name, _, task = self._task(rng, ranked=False)
        leased = [request_id for request_id, claim in task.claims.items() if claim.left]
        if leased:
            request_id, seconds = rng.choice(sorted(leased)), rng.choice([10.0, 1000.0])
            claim, real = task.claims[request_id], self.driver.partition.tasks[name]
            assert extend(self.driver.catalog, real, request_id, seconds) == len(claim.left)
            claim.deadline = self.driver.now() + seconds

    async def pass_time(self, rng):
        """Workers that do not acknowledge in time have crashed."""
        await self.driver.pass_time(rng.choice([20.0, 60.0, 300.0, 2000.0]))

    async def reset(self, rng):
        name = rng.choice(list(self.driver.tasks))
        if name not in self.driver.partition.tasks:  # forgotten, as it had nothing on record
            return
        keep_consumed = rng.random() < 0.5
        self.driver.model.reset(name, keep_consumed=keep_consumed)
        reset(self.driver.catalog, self.driver.partition.tasks[name], keep_consumed=keep_consumed)

    async def restart(self, rng):
        """Ranks are replaced, or have crashed some batches after what they had trained."""
        ranked = [name for name, ways in self.driver.tasks.items() if ways[0].dp_size]
        known = [name for name in ranked if name in self.driver.partition.tasks]
        known = [name for name in known if not self.driver.model.task(name).reused_batches]
        if known:
            name = rng.choice(known)
            trained = rng.randint(-1, len(self.driver.model.task(name).batches) - 1)
            dp_size = self.driver.tasks[name][0].dp_size
            self.driver.model.restart_ranks(name, dp_size, trained)
            restart_ranks(self.driver.catalog, self.driver.partition.tasks[name], dp_size=dp_size, trained=trained)

    async def turn(self, rng):
        await turns(rng.randint(0, 3))

    # The end

    async def finish(self):
        """Produce what is missing; then every task comes to its end, and nothing is left when all is cleared."""
        driver = self.driver
        for call in driver.calls:
            call.future.cancel()
        await driver.check()
        await driver.pass_time(5000.0)
        await driver.check()
        model = driver.model
        held = [index for index, row in model.rows.items() if row.state == "held"]
        if held:
            driver.update(held, state="live")
        rows = [index for index, row in model.rows.items() if row.state == "live"]
        if rows:
            driver.set_meta(rows, [{"total_lengths": 1}] * len(rows))
        for name in ("x", "y"):
            some = [row for row in rows if name not in model.write_once or name not in model.rows[row].fields]
            if some:
                driver.update(some, fields=(name,), conforming=True)
        model.seal()
        seal(driver.catalog)
        for name, ways in driver.tasks.items():
            for asking in ways:
                await self._consume_to_the_end(name, asking)
        await driver.check()
        self._clear_and_look_for_leftovers()

    async def _consume_to_the_end(self, name, asking):
        driver, task = self.driver, self.driver.model.task(name)
        for _ in range(3 * len(driver.model.rows) + 2):
            index = len(task.batches)
            ranks = [(dp_rank, asking.dp_size, index) for dp_rank in range(asking.dp_size)] or [None]
            calls = [driver.ask(name, asking, rank) for rank in ranks]
            await driver.settle()
            assert all(call.future.done() for call in calls), "a wait that does not end"
            self._acknowledge(name)
            kinds = {type(call.error or call.answer) for call in calls}
            assert len(kinds) == 1, "ranks got answers of different kinds"
            if not kinds <= {RankPlan, Claim}:
                break
        await driver.check()
        assert all(isinstance(call.answer, EndCounts) or driver_refuses(call) for call in calls)

    def _acknowledge(self, name):
        task, partition = self.driver.model.task(name), self.driver.partition
        for request_id, claim in list(task.claims.items()):
            if claim.left:
                left = len(claim.left)
                assert self.driver.model.ack(task, request_id, claim.rows) == left
                assert ack(self.driver.catalog, partition.tasks[name], request_id) == left

    def _clear_and_look_for_leftovers(self):
        partition = self.driver.partition
        rows = np.array(list(self.driver.model.rows), np.int64)
        if rows.size:
            clear(partition, rows)
        self.driver.model.clear(rows.tolist())
        assert not partition.key_index
        assert not list(partition.cells.puts.all())
        assert len(partition.groups) == 0
        assert partition.state_counts == [0, 0, 0, 0]
        assert partition.groups.members.data.sum() == 0
        for task in partition.tasks.values():
            kept = {record.serial for record in task._reusing.values()}
            assert all(claim.serial in kept for claim in task.claims.values())
            left = [batch for batch in task.batches.values() if batch.serial not in kept]
            assert all(0 in batch.plan.sizes and not batch.remaining for batch in left)
            assert task._by_serial.keys() - kept == {batch.serial for batch in left}
            assert task.backlog == 0
            assert not task.leased_count
        for planner in self.driver.catalog._serving[partition].planners.values():
            assert planner.waiting_count == 0


def driver_refuses(call):
    """Blocks that do not fit, or a group that no batch holds: an error, and not silence."""
    return call.error is not None and call.asking.grouped


def _facts(asking):
    return {name: getattr(asking, name) for name in Asking.__dataclass_fields__}


class Leasing(Interleaving):
    """All tasks are queue workers that lease, of samples most of which are ready."""

    async def insert(self, rng):
        if rng.random() < 0.2:
            return await super().insert(rng)
        count = rng.choice([2, 4, 6])
        groups = [rng.choice(GROUPS)] * count if self.in_groups else None
        entries = [{"total_lengths": 1, "version": rng.choice([0, 1, 1])} for _ in range(count)]
        return self.driver.insert(count, groups=groups, fields=("x",), meta_entries=entries)

    def ways(self, rng):
        """Return one task, with one way of asking or two: the other with another lease, or sample by sample."""
        facts = {**_facts(asking_for(rng, ranked=False)), "slow": False, "fields": ("x",)}
        if not facts["grouped"]:
            facts |= {"batch_size": 4, "min_size": rng.choice([1, 3])}
        ways = [facts]
        if rng.random() < 0.5:
            singly = {"sampler": "sequential", "unit": "sample", "grouped": False, "block_size": None}
            singly |= {"anywhere": False, "take": False}
            ways.append({**facts, **rng.choice([{}, {**singly, "needs_length": False}])})
        leases = [rng.choice([(50.0, None), (200.0, 1), (200.0, 2), (500.0, 3)]) for _ in ways]
        return {
            "worker": [
                Asking(**{**way, "lease": span, "max_deliveries": most})
                for way, (span, most) in zip(ways, leases, strict=True)
            ]
        }


class Reusing(Interleaving):
    """All tasks are delivered samples more than once."""

    def ways(self, rng):
        return {name: [reusing(rng, way) for way in ways] for name, ways in super().ways(rng).items()}


class Agents(Interleaving):
    """Samples are turns of rollouts, most of them ready, and of groups of two rollouts."""

    async def insert(self, rng):
        if rng.random() < 0.1:
            return await super().insert(rng)
        count, group = rng.choice([1, 1, 2, 3]), rng.choice(GROUPS)
        known = self.driver.model.groups.get(group)
        if known is not None and (known.closed or known.size > 1):  # as workers, which begin other ones
            group = f"{group}{self.driver.model.inserted}"
        rollouts = sorted(name for name, rollout in self.driver.model.rollouts.items() if not rollout.closed)
        groups, rollout, group_size = None, f"r{self.driver.model.inserted}", 0
        if rollouts and rng.random() < 0.5:
            rollout = rng.choice(rollouts)
        elif rng.random() < 0.8:
            groups, group_size = [group] * count, 2
        return self.driver.insert(
            count,
            state=rng.choice([*["live"] * 9, "held", "failed"]),
            groups=groups,
            group_size=group_size,
            rollouts=[rollout] * count,
            ends_rollouts=rng.random() < 0.5,
            fields=("x", "y"),
            meta_entries=[{"total_lengths": 1, "version": rng.choice([0, 1, 1])} for _ in range(count)],
        )

    def ways(self, rng):
        """Return tasks, most of which keep rollouts, or groups of them, whole."""
        ways = super().ways(rng)
        return {name: [self.whole(rng, way) for way in some] for name, some in ways.items()}

    def whole(self, rng, asking):
        """Return a way of asking that keeps units whole, and finds enough of them."""
        unit, ranked = rng.choice(["group", "group", "rollout", "sample"]), asking.dp_size > 0
        batch_size = 12 if unit == "sample" else rng.choice([1, 2])
        sampler = "seqlen_balanced" if unit == "sample" else rng.choice(["sequential", "seqlen_balanced"])
        return replace(
            asking,
            unit=unit,
            batch_size=batch_size,
            min_size=batch_size if ranked else 1,
            dp_size=min(asking.dp_size, 2),
            grouped=True,
            sampler=sampler,
            block_size=None,
            anywhere=False,
            take=sampler == "seqlen_balanced" and rng.random() < 0.3,
            needs_length=sampler == "seqlen_balanced",
            least_version=None if rng.random() < 0.7 else 1,
            drop_last=False,
            max_uses=1,
        )


class Sharing(Interleaving):
    """Tasks want fields that the samples of groups share."""

    shared = ("p", "q")

    def ways(self, rng):
        fields = [("x", "p"), ("p",), ("x", "p", "q"), ("x",)]
        ways = super().ways(rng)
        return {name: [replace(way, fields=rng.choice(fields)) for way in each] for name, each in ways.items()}

    async def finish(self):
        """Give all groups what they lack; samples without one, which are never ready, fail."""
        groups, rows = self.driver.model.groups, self.driver.model.rows
        if ungrouped := [index for index, row in rows.items() if not row.group]:
            self.driver.update(ungrouped, state="failed")
        for field in self.shared:
            lacking = sorted(name for name in groups if groups[name].members and field not in groups[name].cells)
            if lacking:
                self.driver.put_groups(lacking, (field,), must_exist=True, conforming=True)
        await super().finish()


class Crowded(Interleaving):
    """One task, whose workers ask in three ways, so that plans under way take each other's rows."""

    def ways(self, rng):
        ways = [{**_facts(asking_for(rng, ranked=False)), "slow": slow} for slow in (True, True, rng.random() < 0.5)]
        return {"worker": [Asking(**way) for way in ways]}


async def interleave(seed, steps, kind=Interleaving):
    interleaving = kind(seed)
    for name, step_seed in steps:
        await interleaving.step(name, step_seed)
        if step_seed % 3:  # else the next step comes while plans are being made
            await interleaving.driver.check()
    await interleaving.finish()
    return interleaving.driver


SEEDS = st.integers(0, 2**32 - 1)


def sequences(most, steps=STEPS):
    """Return sequences of steps, of all lengths alike: plain lists have six on average, too few to get far."""
    step = st.tuples(st.sampled_from(steps), SEEDS)
    return st.integers(1, most).flatmap(lambda count: st.lists(step, min_size=count, max_size=count))


@examples(120, derandomize=True)
@given(SEEDS, sequences(80))
def test_claims_are_what_the_model_says(seed, steps):
    driver = asyncio.run(interleave(seed, steps))  # which compares with the model after each step
    assert not driver.model.rows
    assert driver.partition.table.present_count == 0


# Gaps are closed as in large tables, a few rows in a step.
ROWS_ARE_MOVED = {"_LEAST_GAPS": 2, "_LEAST_CLOSED": 1, "_CLOSED_SHARE": 0}


@examples(60, derandomize=True)
@given(SEEDS, sequences(80))
def test_claims_are_what_the_model_says_as_rows_are_moved(seed, steps):
    with mock.patch.multiple(table_module, **ROWS_ARE_MOVED):
        driver = asyncio.run(interleave(seed, steps))
    assert not driver.model.rows
    assert driver.partition.table.present_count == 0


def spread(seed, steps):
    """Return another seed and other seeds of steps: those of hypothesis are often small or alike, and choose alike."""
    rng = random.Random(repr((seed, steps)))
    steps = [(name, rng.getrandbits(32)) for name, _ in steps]
    return rng.getrandbits(32), steps


@pytest.mark.parametrize("kind", [Leasing, Crowded])
@examples(80, derandomize=True)
@given(seed=SEEDS, steps=sequences(90, LEASE_STEPS))
def test_leases_are_what_the_model_says(kind, seed, steps):
    driver = asyncio.run(interleave(*spread(seed, steps), kind))
    assert not driver.model.rows
    assert driver.partition.table.present_count == 0


@examples(100, derandomize=True)
@given(SEEDS, sequences(80))
def test_claims_that_reuse_samples_are_what_the_model_says(seed, steps):
    with mock.patch.object(ledger, "_MOST_REUSING", 3):
        driver = asyncio.run(interleave(seed, steps, Reusing))
    assert not driver.model.rows


@examples(100, derandomize=True)
@given(SEEDS, sequences(80, SHARING_STEPS), st.booleans())
def test_claims_of_fields_that_groups_share_are_what_the_model_says(seed, steps, rows_are_moved):
    with mock.patch.multiple(table_module, **ROWS_ARE_MOVED if rows_are_moved else {"_LEAST_GAPS": 1024}):
        driver = asyncio.run(interleave(seed, steps, Sharing))
    assert not driver.model.rows


@examples(80, derandomize=True)
@given(SEEDS, sequences(90, AGENT_STEPS))
def test_claims_of_rollouts_are_what_the_model_says(seed, steps):
    driver = asyncio.run(interleave(*spread(seed, steps), Agents))
    assert not driver.model.rows
    assert driver.partition.table.present_count == 0
