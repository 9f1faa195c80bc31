"""Both clients behind one awaited interface."""

import asyncio
import contextlib
import inspect
from functools import partial

import tq_service as tq
from tq_service.client import AsyncWatch, AsyncWork


class Awaited:
    """A sync client whose methods run in threads, so that one test serves both clients."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        attribute = getattr(self.client, name)
        return partial(asyncio.to_thread, attribute) if inspect.ismethod(attribute) else attribute

    async def aclose(self):
        await asyncio.to_thread(self.client.close)

    def watch(self, *arguments, **keywords):
        return self.client.watch(*arguments, **keywords)

    def work(self, *arguments, **keywords):
        return self.client.work(*arguments, **keywords)


@contextlib.asynccontextmanager
async def watching(watch):
    """Close a watch of either client at the end of a `with`."""
    try:
        yield watch
    finally:
        await (watch.aclose() if isinstance(watch, AsyncWatch) else asyncio.to_thread(watch.close))


async def next_update(watch):
    """Return the next update of a watch of either client, None at its end."""
    return await (anext(watch, None) if isinstance(watch, AsyncWatch) else asyncio.to_thread(next, watch, None))


async def next_item(work):
    """Return the next item of a worker's loop of either client, None at its end."""
    if isinstance(work, AsyncWork):
        return await anext(work, None)
    item = await asyncio.to_thread(next, work, None)
    return None if item is None else Awaited(item)


def make_client(kind, address, **options):
    return tq.AsyncClient(address, **options) if kind == "async" else Awaited(tq.Client(address, **options))
