"""A partition with one task and its planner, and samplers that do what a test tells them."""

import asyncio

from domain_support import asks, insert

from tq_service.samplers import PlanRunner, Sampler
from tq_service.serving.catalog import Catalog
from tq_service.state.partition import PartitionSettings

LONG = 1e6


class Bench:
    """A partition with one task and its planner, on the running loop."""

    def __init__(self, *, timeout=LONG, **settings):
        self.catalog = Catalog(PlanRunner(timeout_seconds=timeout))
        self.partition = self.catalog.create("train", PartitionSettings(**settings))
        self.task = self.catalog.task(self.partition, "t")
        self.planner = self.catalog.planner(self.partition, "t")

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
        return insert(self.catalog, count, fields, **arguments)


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
