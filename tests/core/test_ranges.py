"""Ranges of batches: each is recorded by itself, in one group with others of its call, and none is planned unasked."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from domain_support import SlowSampler, asks, clear, insert, reset, seal, turns
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import InvalidArgumentError, RankDisagreementError, SamplerError, SamplesClearedError
from tq_service.machine.policies import VersionPublished
from tq_service.machine.state_machine import State, StateMachine, decode_group
from tq_service.samplers import PlanRunner, Sampler, SequentialSampler
from tq_service.schema import EndCounts
from tq_service.serving import planner
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import NotYet
from tq_service.state.partition import PartitionSettings
from tq_service.state.plan import NotBefore, RankPlan

BATCH_SIZE = 2


class Groups:
    """A log that keeps the groups of changes."""

    def __init__(self):
        self.groups = []

    def check_open(self):
        pass

    def append(self, records):
        self.groups.append([change for record in records for change in decode_group(record)[1]])

    def claims(self):
        """Return how many batches each group has claimed, of those that have claimed any."""
        names = [[type(change).__name__ for change in group] for group in self.groups]
        counts = [group.count("SamplesClaimed") + group.count("EndReached") for group in names]
        return [count for count in counts if count]


@pytest.fixture(autouse=True)
def _ranges_are_whole(monkeypatch):
    """A garbage collection, or the first plan of the process, cuts no range short and takes no turn of the loop."""
    monkeypatch.setattr(planner, "_RANGE_SECONDS", 60.0)
    monkeypatch.setattr(planner, "_TURN_SECONDS", 60.0)


@pytest.fixture
async def catalog():
    return new_catalog()


def new_catalog():
    catalog = Catalog(PlanRunner())
    catalog.machine.log = Groups()
    catalog.create("train", PartitionSettings())
    return catalog


async def ask(catalog, first, count, *, rank=(0, 1), wait=0.0, not_before=None, **arguments):
    request = replace(asks((*rank, first), **arguments), batch_count=count, not_before=not_before)
    claimed = await catalog.claim("train", b"", request, wait)
    return [claimed.answer, *claimed.more]


def rows(answers):
    return [each.rows.tolist() if isinstance(each, RankPlan) else type(each).__name__ for each in answers]


async def test_a_range_has_the_batches_that_are_ready_in_one_group_and_no_more_than_are_asked_for(catalog):
    insert(catalog, 11)
    assert rows(await ask(catalog, 0, 3)) == [[0, 1], [2, 3], [4, 5]]
    assert catalog.get("train").tasks["t"].next_batch_index == 3
    assert rows(await ask(catalog, 3, 64)) == [[6, 7], [8, 9]]
    assert catalog.machine.log.claims() == [3, 2]


async def test_a_range_that_takes_long_is_cut_short(catalog, monkeypatch):
    monkeypatch.setattr(planner, "_RANGE_SECONDS", 0.0)
    insert(catalog, 11)
    short = rows(await ask(catalog, 0, 5))
    assert [0, 1] in short
    assert len(short) < 5
    monkeypatch.setattr(planner, "_RANGE_SECONDS", 60.0)
    assert rows(await ask(catalog, 0, 5)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


async def test_a_range_that_is_asked_for_again_begins_alike_and_may_have_more(catalog):
    insert(catalog, 5)
    first = rows(await ask(catalog, 0, 4))
    assert first == [[0, 1], [2, 3]]
    assert rows(await ask(catalog, 0, 4)) == first
    insert(catalog, 3)
    assert rows(await ask(catalog, 0, 4)) == [*first, [4, 5], [6, 7]]
    assert rows(await ask(catalog, 0, 2)) == first
    assert [rows(await ask(catalog, index, 1))[0] for index in range(4)] == [*first, [4, 5], [6, 7]]


async def test_all_ranks_get_their_parts_of_the_batches_that_one_of_them_planned(catalog):
    insert(catalog, 12)
    parts = [rows(await ask(catalog, 0, count, rank=(rank, 2))) for rank, count in ((0, 2), (1, 3))]
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [6, 7], [10, 11]]]
    assert catalog.machine.log.claims() == [2, 1]


async def test_the_first_batch_is_waited_for_and_what_is_ready_then_is_added(catalog):
    insert(catalog, 1)
    waiting = asyncio.ensure_future(ask(catalog, 0, 3, wait=1e6))
    await turns()
    assert not waiting.done()
    insert(catalog, 9)
    assert rows(await waiting) == [[0, 1], [2, 3], [4, 5]]
    assert rows(await ask(catalog, 5, 2)) == ["NotYet"]


async def test_the_end_ends_a_range(catalog):
    insert(catalog, 3)
    seal(catalog)
    assert rows(await ask(catalog, 0, 9)) == [[0, 1], [2], "EndCounts"]
    assert rows(await ask(catalog, 1, 9)) == [[2], "EndCounts"]
    assert rows(await ask(catalog, 2, 9)) == ["EndCounts"]


async def test_a_batch_that_was_cleared_ends_a_range_and_is_refused_by_itself(catalog):
    insert(catalog, 8)
    await ask(catalog, 0, 3)
    clear(catalog, np.array([2]))
    assert rows(await ask(catalog, 0, 4)) == [[0, 1]]
    with pytest.raises(SamplesClearedError):
        await ask(catalog, 1, 3)
    assert rows(await ask(catalog, 2, 3)) == [[4, 5], [6, 7]]


async def test_a_batch_that_others_have_asked_for_otherwise_ends_a_range(catalog):
    insert(catalog, 9)
    await ask(catalog, 0, 1)
    await ask(catalog, 1, 1, batch_size=1)
    assert rows(await ask(catalog, 0, 3)) == [[0, 1]]
    with pytest.raises(RankDisagreementError):
        await ask(catalog, 1, 3)


class FailsAtFour(Sampler):
    """Fails once a batch would begin with sample 4."""

    def runs_inline(self, request):
        return True

    def plan(self, view, request):
        if view.ready(1)[0] >= 4:
            raise RuntimeError("sample 4 is not for me")
        return SequentialSampler().plan(view, request)


async def test_a_sampler_that_fails_ends_a_range_and_its_error_is_that_of_the_batch(catalog):
    insert(catalog, 9)
    assert rows(await ask(catalog, 0, 3, sampler=FailsAtFour())) == [[0, 1], [2, 3]]
    with pytest.raises(SamplerError):
        await ask(catalog, 2, 3, sampler=FailsAtFour())


async def test_a_plan_that_must_be_awaited_ends_a_range(catalog):
    insert(catalog, 9)
    assert rows(await ask(catalog, 0, 3, sampler=SlowSampler(SequentialSampler(), turns=1), wait=1e6)) == [[0, 1]]


async def test_a_batch_of_an_epoch_that_ended_meanwhile_is_not_followed_by_those_of_the_next(catalog):
    def begin_again(*_):
        reset(catalog, catalog.get("train").tasks["t"], keep_consumed=False)
        clear(catalog, np.array([2]))
        following.append(asyncio.ensure_future(ask(catalog, 0, 3)))

    following = []
    catalog.on_batch.append(lambda *_: following or asyncio.get_running_loop().call_soon(begin_again))
    waiting = asyncio.ensure_future(ask(catalog, 0, 3, wait=1e6))
    await turns()
    insert(catalog, 9)
    assert rows(await waiting) == [[0, 1]]
    assert rows(await following[0]) == [[0, 1], [3, 4], [5, 6]]


async def test_batches_behind_one_that_was_planned_wait_for_their_version_too(catalog):
    insert(catalog, 9)
    await ask(catalog, 0, 1)
    not_before = NotBefore(policy="default", version=1)
    assert rows(await ask(catalog, 0, 3, not_before=not_before)) == [[0, 1]]
    assert rows(await ask(catalog, 1, 3, not_before=not_before)) == ["NotYet"]
    catalog.publish(VersionPublished(policy="default", version=1), [])
    assert rows(await ask(catalog, 0, 3, not_before=not_before)) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("count", [-1, 65])
async def test_a_range_has_1_to_64_batches(count):
    with pytest.raises(InvalidArgumentError, match=f"batch_count is {count}; expected 1 to 64"):
        replace(asks((0, 1, 0)), batch_count=count)


async def test_a_queue_worker_claims_one_by_one():
    with pytest.raises(InvalidArgumentError, match="batch_count is 2; expected 1 for a queue worker"):
        replace(asks(), batch_count=2)


@given(
    st.integers(1, 3),
    st.lists(
        st.one_of(
            st.integers(1, 9).map(lambda count: ("insert", count)),
            st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 9)),
            st.just(("seal", 0)),
        ),
        max_size=14,
    ),
)
@examples(60)
def test_ranges_and_single_claims_never_differ(dp_size, steps):
    """Whatever is asked for in which order: one answer for each rank and batch, each sample once, none unasked."""

    async def run():
        catalog = new_catalog()
        seen, last_asked, is_sealed = {}, -1, False
        for step in steps:
            if step[0] == "insert" and len(step) == 2:
                if not is_sealed:
                    insert(catalog, step[1])
            elif step[0] == "seal":
                seal(catalog)
                is_sealed = True
            else:
                rank, first, count = step[0] % dp_size, step[1], step[2]
                answers = await ask(catalog, first, count, rank=(rank, dp_size))
                assert len(answers) <= count
                last_asked = max(last_asked, first + count - 1)
                for index, answer in enumerate(answers, first):
                    if not isinstance(answer, NotYet):
                        assert seen.setdefault((rank, index), rows([answer])) == rows([answer])
                assert not any(isinstance(answer, EndCounts | NotYet) for answer in answers[:-1])
                assert len(answers) == 1 or not isinstance(answers[-1], NotYet)
                assert catalog.get("train").tasks["t"].next_batch_index <= last_asked + 1
        delivered = [row for found in seen.values() for part in found if part != "EndCounts" for row in part]
        assert len(delivered) == len(set(delivered))
        assert recorded(_replayed(catalog)) == recorded(catalog.get("train"))
        for (rank, index), found in seen.items():
            assert rows(await ask(catalog, index, 1, rank=(rank, dp_size))) == found

    asyncio.run(run())


def _replayed(catalog):
    """Return the partition that follows from what a catalog has logged."""
    machine = StateMachine(State())
    for group in catalog.machine.log.groups:
        for change in group:
            machine.replay(change, 0.0)
    return machine.state.partition("train")


def recorded(partition):
    """Return the batches of all tasks as they are recorded."""
    return {name: [batch.rows.tolist() for batch in task.batches.values()] for name, task in partition.tasks.items()}


async def test_batches_of_a_range_are_there_after_a_restart(catalog):
    insert(catalog, 7)
    answers = rows(await ask(catalog, 0, 3))
    batches = _replayed(catalog).tasks["t"].batches.values()
    assert [batch.rows.tolist() for batch in batches] == answers
