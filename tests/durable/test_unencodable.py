"""A change is encoded before it is made: memory and journal never differ, whatever fails in between."""

import asyncio
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "core"))

from digest import digest
from domain_support import asks, new_write, task_of

from tq_service.durable.state_store import StateStore
from tq_service.errors import InvalidArgumentError, ServiceFailedError, TqError
from tq_service.machine import state_machine
from tq_service.machine.claims import SamplesClaimed
from tq_service.machine.samples import SamplesWritten
from tq_service.machine.state_machine import IdempotencyCache
from tq_service.samplers import PlanRunner, Sampler
from tq_service.server.controller_servicer import pack_answer, unpack_answer
from tq_service.serving.catalog import Catalog
from tq_service.state.ledger import TaskLedger
from tq_service.state.plan import Pack, Plan, RankPlan
from tq_service.v1 import controller_service_pb2 as pb


class PacksOfFractions(Sampler):
    """A plug-in whose packs have lengths that no message can hold."""

    name = "packs_of_fractions"

    def plan(self, view, request):
        rows = view.ready(request.total_size)
        if not rows.size:
            return None
        pack = Pack(positions=np.arange(rows.size), lengths=np.full(rows.size, 1.5))
        return Plan(ranks=(RankPlan(rows=rows, steps=((pack,),)),))


class Service:
    """A catalog and a request log, written down."""

    def __init__(self, path, *, sync=False):
        self.store = StateStore.open(path, sync=sync)
        cache = IdempotencyCache(600.0, pack=pack_answer, unpack=unpack_answer)
        self.catalog = Catalog(PlanRunner(), answers=cache)
        self.store.recover(catalog=self.catalog)

    def state(self):
        return {name: digest(self.catalog.get(name)) for name in self.catalog.names()}


def runs(path, *stories, sync=False):
    """Run a service once for each story, in one data directory; return what each story returned."""
    outcomes = []

    async def run(story):
        service = Service(path, sync=sync)
        try:
            outcomes.append(await story(service))
        finally:
            await service.store.close()

    for story in stories:
        asyncio.run(run(story))
    return outcomes


async def look(service):
    return service.state()


def refuse_to_encode(monkeypatch, *kinds):
    real = state_machine.encode_change

    def encode(change):
        if isinstance(change, kinds):
            raise TypeError("1.5 is no integer")
        return real(change)

    monkeypatch.setattr(state_machine, "encode_change", encode)


async def claim(service, rank=(0, 1, 0), **arguments):
    claimed = await service.catalog.claim("train", b"", asks(rank, **arguments), 1.0)
    return claimed.answer.rows.tolist()


def test_a_plan_that_cannot_be_encoded_consumes_nothing_and_the_service_goes_on(tmp_path):
    async def claim_in_vain(service):
        service.catalog.write("train", b"", new_write(6, ("x",)))
        for _ in range(2):  # a retry fares no better, and costs nothing either
            with pytest.raises((TqError, TypeError)):
                await claim(service, sampler=PacksOfFractions())
        assert "t" not in service.catalog.get("train").tasks  # nothing is on record of it
        rows = await claim(service)
        await service.store.wait_durable()
        return rows, service.state()

    async def claim_again(service):
        state = service.state()
        return await claim(service), await claim(service, (0, 1, 1)), state

    (live, before), (replayed, following, after) = runs(tmp_path, claim_in_vain, claim_again)
    assert after == before
    assert replayed == live
    assert not set(live) & set(following)


@pytest.mark.parametrize("rank", [(0, 1, 0), None], ids=["ranked", "queue"])
def test_a_claim_is_encoded_before_it_is_made(tmp_path, monkeypatch, rank):
    async def claim_in_vain(service):
        service.catalog.write("train", b"", new_write(6, ("x",)))
        task_of(service.catalog, "t")
        before = service.state()
        with monkeypatch.context() as patch:
            refuse_to_encode(patch, SamplesClaimed)
            with pytest.raises((TqError, TypeError)):
                await claim(service, rank)
        assert service.state() == before
        rows = await claim(service, rank)
        await service.store.wait_durable()
        return rows, service.state()

    (rows, before), after = runs(tmp_path, claim_in_vain, look)
    assert rows
    assert after == before


def test_a_first_write_that_cannot_be_encoded_leaves_no_partition(tmp_path, monkeypatch):
    async def write_in_vain(service):
        with monkeypatch.context() as patch:
            refuse_to_encode(patch, SamplesWritten)
            with pytest.raises(TypeError):
                service.catalog.write("train", b"", new_write(6, ("x",)))
        assert not list(service.catalog.names())
        service.catalog.write("other", b"", new_write(1, ("x",)))
        await service.store.wait_durable()
        return service.state()

    before, after = runs(tmp_path, write_in_vain, look)
    assert after == before


@pytest.fixture(params=[False, True], ids=["process", "disk"])
def sync(request):
    return request.param


def test_a_fault_within_a_change_ends_the_service_and_its_step_is_not_written_down(tmp_path, monkeypatch, caplog, sync):
    def half_done(self, *_arguments, **_keywords):
        self.consumed_count += 1
        raise ZeroDivisionError("a fault of the service")

    async def fail_within(service):
        service.catalog.write("train", b"", new_write(6, ("x",)))
        await service.store.wait_durable()
        before = service.state()
        service.catalog.write("train", b"", new_write(3, ("x",)))  # of the same step, and nobody was answered
        unanswered = asyncio.ensure_future(service.store.wait_durable()) if sync else None
        monkeypatch.setattr(TaskLedger, "deliver", half_done)
        later = []
        service.store.after_durable(lambda: later.append("called"))
        with caplog.at_level(logging.CRITICAL), pytest.raises(ZeroDivisionError):
            await claim(service, None)
        monkeypatch.undo()
        for _ in range(2):
            with pytest.raises(ServiceFailedError, match="a change was only partially applied"):
                await service.store.wait_durable()
        assert service.store.has_unflushed
        assert service.store.is_failing
        with pytest.raises(ServiceFailedError):
            service.catalog.write("train", b"", new_write(1, ("x",)))
        with pytest.raises(ServiceFailedError):
            await service.store.take_snapshot()
        if unanswered is not None:
            with pytest.raises(ServiceFailedError):
                await unanswered
        await asyncio.sleep(0)
        assert not later
        assert len(caplog.records) == 1
        return before

    before, after = runs(tmp_path, fail_within, look, sync=sync)
    assert after == before


def test_a_fault_after_a_change_of_a_request_takes_the_change_back(tmp_path, caplog, sync):
    async def fail_after(service):
        service.catalog.write("train", b"", new_write(6, ("x",)))
        await service.store.wait_durable()
        before = service.state()

        def change():
            service.catalog.write("train", b"", new_write(3, ("x",)))
            raise ZeroDivisionError("the answer cannot be made")

        with pytest.raises(ZeroDivisionError):
            service.catalog.run_once(b"r" * 16, change)
        with pytest.raises(ServiceFailedError, match="failed after one of its changes"):
            await service.store.wait_durable()
        return before

    async def retry(service):
        state = service.state()
        service.catalog.run_once(b"r" * 16, lambda: pb.SealPartitionResponse(inserted_count=6))
        return state

    before, after = runs(tmp_path, fail_after, retry, sync=sync)
    assert after == before


def test_a_refusal_is_the_end_of_its_request_only(tmp_path):
    async def refuse(service):
        def change():
            raise InvalidArgumentError("no")

        def fail():
            raise ZeroDivisionError("before any change")

        for request in (change, fail):
            with pytest.raises((InvalidArgumentError, ZeroDivisionError)):
                service.catalog.run_once(b"r" * 16, request)
        service.catalog.write("train", b"", new_write(1, ("x",)))
        await service.store.wait_durable()
        return service.state()

    before, after = runs(tmp_path, refuse, look)
    assert after == before
