"""Both clients behind one awaited interface."""

import asyncio
import inspect
from functools import partial

import tq_service as tq


class Awaited:
    """A sync client whose methods run in threads, so that one test serves both clients."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        attribute = getattr(self.client, name)
        return partial(asyncio.to_thread, attribute) if inspect.ismethod(attribute) else attribute

    async def aclose(self):
        await asyncio.to_thread(self.client.close)


def make_client(kind, address, **options):
    return tq.AsyncClient(address, **options) if kind == "async" else Awaited(tq.Client(address, **options))
