"""A partition with one task and its planner, and samplers that do what a test tells them."""

import asyncio

from domain_support import asks, insert, partition

from tq_service.domain.claims.planner import Planner
from tq_service.samplers import PlanRunner, Sampler

LONG = 1e6


class Bench:
    """A partition with one task and its planner, on the running loop."""

    def __init__(self, *, timeout=LONG, **settings):
        self.partition = partition(**settings)
        self.task = self.partition.task("t")
        self.planner = Planner(self.partition, self.task, PlanRunner(timeout_seconds=timeout))

    def ask(self, rank=None, *, wait=LONG, **arguments):
        return asyncio.ensure_future(self.planner.claim(asks(rank, **arguments), wait))

    async def until_consumed(self, count):
        """Return in the moment in which so many are consumed, before those who asked hear of it."""
        for _ in range(100):
            if self.task.consumed_count == count:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{self.task.consumed_count} are consumed")

    def insert(self, count, fields=("x",), **arguments):
        return insert(self.partition, count, fields, **arguments)


class Whenever(Sampler):
    """Answers what it is told."""

    name = "whenever"

    def __init__(self, behave, *, quick=True):
        self.behave = behave
        self.quick = quick

    def runs_inline(self, request):
        return self.quick

    def plan(self, view, request):
        return self.behave(view, request)


def rows(call):
    return call.result().rows.tolist()


async def finished(call):
    await asyncio.wait([call])
    return call
