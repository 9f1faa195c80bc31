"""Claims of whole groups in a large partition: the event loop looks at few rows, however many wait to become ready."""

import asyncio
import threading

import numpy as np
import pytest
from domain_support import seal, turns, update
from planner_bench import Bench, finished, rows

from tq_service.planning.grouping import Grouping
from tq_service.planning.view import Readiness
from tq_service.samplers import GRPOGroupNSampler

MANY = 200_000
SIZE = 8
FEW = 40_000
SAMPLER = GRPOGroupNSampler(n_samples_per_prompt=SIZE)


@pytest.fixture
async def bench():
    return Bench()


class Looks:
    """The most rows that the event loop looks at one by one in a call; stretches of a table cost it next to nothing."""

    def __init__(self, monkeypatch):
        self.most = 0
        for kind, name in ((Readiness, "ready"), (Grouping, "whole"), (Grouping, "is_dead")):
            monkeypatch.setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, inner):
        def counted(looker, some, **options):
            if threading.current_thread() is threading.main_thread() and not isinstance(some, slice):
                self.most = max(self.most, some.size)
            return inner(looker, some, **options)

        return counted


@pytest.mark.parametrize("named", [True, False])
async def test_a_sealed_partition_is_not_looked_through_for_each_column_that_comes(bench, monkeypatch, named):
    names = [f"p{row // SIZE}" for row in range(MANY)] if named else None
    bench.insert(MANY, groups=names, group_size=SIZE if named else 0)
    seal(bench.catalog)
    call = bench.ask((0, 1, 0), sampler=SAMPLER, batch_size=24, data_fields=("x", "r"))
    await turns()
    looks = Looks(monkeypatch)
    for first in range(0, 24, SIZE):
        assert not call.done()
        update(bench.catalog, np.arange(first, first + SIZE), fields=("r",))
        await turns()
    assert rows(await finished(call)) == list(range(24))
    assert looks.most < FEW


@pytest.mark.parametrize("ranked", [True, False])
async def test_groups_whose_members_lie_far_apart_are_looked_for_off_the_loop(bench, monkeypatch, ranked):
    names = [f"p{row % (MANY // SIZE)}" for row in range(MANY)]
    bench.insert(MANY - 100, groups=names[:-100], group_size=SIZE)
    looks = Looks(monkeypatch)
    asked = {"sampler": SAMPLER, "batch_size": 2 * SIZE}
    call = bench.ask((0, 1, 0) if ranked else None, **asked)
    await finished(call)
    stride = MANY // SIZE
    assert rows(call) == [first + stride * member for first in (0, 1) for member in range(SIZE)]
    assert looks.most < FEW
    assert await asyncio.wait_for(bench.ask(wait=0.0, **asked), 30) is not None


async def test_the_end_is_found_behind_many_groups_that_are_dead(bench):
    count = 4 * SIZE * 1024
    bench.insert(count, fields=(), groups=[f"p{row // SIZE}" for row in range(count)], group_size=SIZE)
    update(bench.catalog, np.arange(0, count - SIZE, SIZE), state="failed")
    seal(bench.catalog)
    call = bench.ask((0, 1, 0), sampler=SAMPLER, batch_size=SIZE)
    await turns()
    assert not call.done()
    update(bench.catalog, np.arange(count - SIZE, count), fields=("x",))
    assert rows(await finished(call)) == list(range(count - SIZE, count))
    end = (await finished(bench.ask((0, 1, 1), sampler=SAMPLER, batch_size=SIZE))).result()
    assert (end.consumed_count, end.failed_count) == (SIZE, count // SIZE - 1)
    assert end.in_incomplete_groups_count == count - SIZE - end.failed_count
