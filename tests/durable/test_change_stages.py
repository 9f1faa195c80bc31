"""Every change, failing at every stage: what a start makes of the log is what the service was before, or still is."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "core"))

from digest import digest, facts_of
from domain_support import BOOT, batch_spec, jagged, new_write, plan_of

from tq_service.durable.state_store import StateStore
from tq_service.errors import ServiceFailedError
from tq_service.machine import state_machine
from tq_service.machine.claims import (
    ClaimAcked,
    ClaimExtended,
    ClaimReleased,
    ConsumptionReset,
    DeadLettersRequeued,
    EndReached,
    GroupsKept,
    LeaseExpired,
    RanksRestarted,
    SamplesClaimed,
    TaskAdvanced,
    TaskForgotten,
    TaskSeen,
)
from tq_service.machine.evictions import UnitsEvicted
from tq_service.machine.group_cells import GroupsRemoved, GroupsWritten
from tq_service.machine.policies import PolicyRemoved, VersionPublished
from tq_service.machine.samples import (
    CellsCleared,
    GroupsClosed,
    MetaSet,
    PartitionCleared,
    PartitionCreated,
    PartitionSealed,
    SamplesCleared,
    SamplesExpired,
    SamplesTruncated,
    SamplesWritten,
    StateReplaced,
)
from tq_service.machine.state_machine import Change, RequestAnswered
from tq_service.samplers import PlanRunner
from tq_service.schema import EndCounts, FieldSpec, Release
from tq_service.serving.catalog import Catalog
from tq_service.state.cells import Put
from tq_service.state.evictions import Evicted
from tq_service.state.partition import PartitionSettings
from tq_service.state.plan import LeaseTerms, Refill

TRAIN, AGING, SHARED = {"partition_id": "train"}, {"partition_id": "aging"}, {"partition_id": "shared"}
TASK = {**TRAIN, "task_name": "t"}
FIRST, SECOND, THIRD = b"1" * 16, b"2" * 16, b"5" * 16
ROWS = replace(
    new_write(
        10,
        ("x",),
        keys=[f"k{row}" for row in range(10)],
        groups=[f"g{row // 2}" for row in range(10)],
        meta=[{"v": row} for row in range(10)],
    ),
    put=Put("s0", BOOT, bytes(15) + b"\1"),  # whatever was made before: kept files have it
)


def grown(number, added, before):
    """Return an append to two slots."""
    write = new_write(2, [jagged("tokens", added)], indexes=[10, 11], append_at=np.array(before))
    return replace(write, put=Put("s0", BOOT, bytes(15) + bytes([number])))


def shared_by(names, number, lengths):
    """Return a put of what the samples of groups share."""
    put = Put("s0", BOOT, bytes(15) + bytes([number]))
    return GroupsWritten(names=names, put=put, columns=[jagged("pixels", lengths)], **SHARED)


LEASED = {"plan": plan_of(range(2, 6)), "lease": LeaseTerms(seconds=60.0, max_deliveries=1)}
STORY = [
    PartitionCreated(incarnation=b"i" * 16, settings=PartitionSettings(), **TRAIN),
    SamplesWritten(write=ROWS, **TRAIN),
    MetaSet(global_indexes=np.array([3, 1]), columns=new_write(2, meta=[{"v": 7}, {"w": "x"}]).meta, **TRAIN),
    MetaSet(
        global_indexes=np.array([3, 1, 4]),
        columns=new_write(3, meta=[{"v": None}, {"w": ["y"]}, {"v": "z"}]).meta,
        **TRAIN,
    ),
    GroupsClosed(names=["g1"], **TRAIN),
    TaskSeen(**TASK),
    TaskSeen(**TRAIN, task_name="refused"),
    TaskForgotten(**TRAIN, task_name="refused"),
    GroupsKept(kept_groups=0, **TASK),
    SamplesClaimed(
        batch_spec=batch_spec(totals=("w",)),
        plan=replace(plan_of(range(2)), totals=((2, 2, 1, None, (0.5,)),), summed=("w",)),
        **TASK,
    ),
    SamplesClaimed(request_id=FIRST, **LEASED, **TASK),
    ClaimExtended(request_id=FIRST, lease_seconds=90.0, **TASK),
    ClaimAcked(request_id=FIRST, global_indexes=np.array([2]), **TASK),
    ClaimReleased(request_id=FIRST, global_indexes=np.array([3]), **TASK),
    LeaseExpired(request_id=FIRST, **TASK),
    DeadLettersRequeued(**TASK),
    SamplesClaimed(
        request_id=SECOND, plan=plan_of(range(6, 8)), claim_name="rank0/batch0", batch_spec=batch_spec(), **TASK
    ),
    EndReached(claim_name="rank0/batch1", end=EndCounts(consumed_count=8), **TASK),
    SamplesCleared(global_indexes=np.array([0, 6]), **TRAIN),
    UnitsEvicted(
        evicted=Evicted(
            rows=np.array([9]), sizes=np.array([1]), reasons=np.array([1], np.uint8), is_group=np.array([False])
        ),
        action="fail",
        version=2,
        refill=Refill(**TASK),
        **TASK,
    ),
    SamplesWritten(write=new_write(2, keys=["s0", "s1"], state="held"), **TRAIN),
    SamplesClaimed(request_id=THIRD, plan=plan_of(range(10, 12)), lease=LeaseTerms(seconds=60.0), **TASK),
    SamplesWritten(write=grown(2, [2, 3], [0, 0]), **TRAIN),
    SamplesWritten(write=grown(3, [1, 4], [2, 3]), **TRAIN),
    SamplesTruncated(global_indexes=np.array([10, 11]), lengths=np.array([1, 5]), field_names=["tokens"], **TRAIN),
    CellsCleared(field_names=["x", "none"], global_indexes=np.array([3, 1, 99]), **TRAIN),
    TaskAdvanced(trained=0, saved=0, **TASK),
    VersionPublished(policy="default", version=3),
    VersionPublished(policy="default", version=2, rewind=True),
    VersionPublished(policy="gone", version=1),
    PolicyRemoved(policy="gone"),
    RanksRestarted(dp_size=2, trained=-1, **TASK),
    ConsumptionReset(keep_consumed=True, **TASK),
    SamplesWritten(write=new_write(3, groups=["a", "a", ""], rollouts=["a", "b", "c"], ends_rollouts=True), **TRAIN),
    SamplesWritten(write=new_write(2, groups=["", "b"], rollouts=["d", "e"]), **TRAIN),
    GroupsClosed(names=[], rollouts=["d"], **TRAIN),
    PartitionCreated(incarnation=b"a" * 16, settings=PartitionSettings(release=Release(ttl_seconds=1e6)), **AGING),
    SamplesWritten(write=new_write(2), **AGING),
    SamplesExpired(before=1e12, **AGING),
    PartitionCleared(**AGING),
    PartitionCreated(
        incarnation=b"g" * 16, settings=PartitionSettings(fields=(FieldSpec("pixels", scope="group"),)), **SHARED
    ),
    shared_by(["p", "q"], 4, [2, 3]),
    SamplesWritten(write=new_write(3, groups=["p", "p", ""]), **SHARED),
    shared_by(["p", "r"], 5, [4, 1]),
    CellsCleared(field_names=["pixels"], global_indexes=np.zeros(0, np.int64), groups=["r", "none"], **SHARED),
    GroupsRemoved(names=["q"], **SHARED),
    PartitionSealed(**TRAIN),
    StateReplaced(snapshot_number=0),
    EndReached(dp_size=1, end=EndCounts(consumed_count=10), **TASK),
    RequestAnswered(request_id=FIRST, packed=("SealPartitionResponse", b"")),
    PartitionCleared(**TRAIN),
]
KINDS = sorted({type(change) for change in STORY}, key=lambda kind: kind.__name__)


class Service:
    """A catalog that is written down."""

    def __init__(self, path, *, sync):
        self.store = StateStore.open(path, sync=sync)
        self.catalog = Catalog(PlanRunner())
        self.store.recover(catalog=self.catalog)

    def state(self):
        answers = [list(entry) for entry in self.catalog.answers.snapshot()]
        versions = {name: policy.version for name, policy in self.catalog.policies.items()}
        return answers, versions, {name: digest(self.catalog.get(name)) for name in self.catalog.names()}


def run(path, story, *, sync):
    async def whole():
        service = Service(path, sync=sync)
        try:
            return await story(service)
        finally:
            await service.store.close()

    return asyncio.run(whole())


async def look(service):
    return service.state()


class FaultError(Exception):
    """A fault of the service, put in by the test."""


def fail(*_arguments):
    raise FaultError


def fails_to_encode(monkeypatch, kind, service):
    real = state_machine.encode_change
    monkeypatch.setattr(state_machine, "encode_change", lambda change: fail() if type(change) is kind else real(change))


def fails_before_it_is_applied(monkeypatch, kind, service):
    monkeypatch.setattr(kind, "apply", fail)


def fails_once_it_is_applied(monkeypatch, kind, service):
    real = kind.apply
    monkeypatch.setattr(kind, "apply", lambda self, *arguments: fail(real(self, *arguments)))


def fails_to_append(monkeypatch, kind, service):
    monkeypatch.setattr(state_machine, "encode_group", fail)


def what_follows_fails(monkeypatch, kind, service):
    monkeypatch.setattr(service.catalog.machine, "listener", fail)


FATAL = [fails_before_it_is_applied, fails_once_it_is_applied, fails_to_append, what_follows_fails]


def name_of(value):
    return value.__name__


@pytest.fixture(params=[False, True], ids=["process", "disk"])
def sync(request):
    return request.param


async def until(service, kind):
    """Make the changes of the story before the first of a kind; return the others."""
    at = next(number for number, change in enumerate(STORY) if type(change) is kind)
    for change in STORY[:at]:
        service.catalog.commit(change)
    await service.store.wait_durable()
    return STORY[at:]


def test_the_story_has_every_change_there_is():
    assert {kind.__name__ for kind in KINDS} == set(Change.kinds)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_change_that_cannot_be_encoded_changes_nothing_and_the_service_goes_on(tmp_path, monkeypatch, kind, sync):
    async def story(service):
        left = await until(service, kind)
        before = service.state()
        with monkeypatch.context() as patch:
            fails_to_encode(patch, kind, service)
            with pytest.raises(FaultError):
                service.catalog.commit(left[0])
        assert service.state() == before
        for change in left:
            service.catalog.commit(change)
        assert service.state() != before
        await service.store.wait_durable()
        return service.state()

    live = run(tmp_path, story, sync=sync)
    assert run(tmp_path, look, sync=sync) == live


@pytest.mark.parametrize("stage", FATAL, ids=name_of)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_change_that_fails_later_ends_the_service_and_a_start_knows_nothing_of_it(tmp_path, monkeypatch, kind, stage):
    async def story(service):
        left = await until(service, kind)
        before = service.state()
        with monkeypatch.context() as patch:
            stage(patch, kind, service)
            with pytest.raises(FaultError):
                service.catalog.commit(left[0])
        with pytest.raises(ServiceFailedError):
            await service.store.wait_durable()
        for change in left:  # none is made any more, whatever it is
            with pytest.raises(ServiceFailedError):
                service.catalog.machine.commit_all(((change, None),))
        return before

    before = run(tmp_path, story, sync=False)
    assert run(tmp_path, look, sync=False) == before


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_fault_later_in_the_group_takes_the_change_back_with_it(tmp_path, kind, sync):
    async def story(service):
        left = await until(service, kind)
        before = service.state()
        with pytest.raises(FaultError), service.catalog.machine.group():
            service.catalog.commit(left[0])
            fail()
        with pytest.raises(ServiceFailedError):
            await service.store.wait_durable()
        return before

    before = run(tmp_path, story, sync=sync)
    assert run(tmp_path, look, sync=sync) == before


def test_the_story_is_the_same_when_it_is_read_from_the_log(tmp_path, sync):
    async def story(service):
        for change in STORY[:-1]:
            service.catalog.commit(change)
        await service.store.wait_durable()
        task = service.catalog.get("train").tasks["t"]
        assert facts_of(task.facts)["end"] == EndCounts(consumed_count=10)
        return service.state()

    live = run(tmp_path, story, sync=sync)
    assert run(tmp_path, look, sync=sync) == live
