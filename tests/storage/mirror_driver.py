"""Engines with a mirror in a pool of memory, which die without a word and are taken over."""

import asyncio
import os
from dataclasses import replace

from engine_driver import begin, begin_shared, put_id, share
from memory_pool import MemoryPool, PoolObjects

from tq_service.storage.engine import StorageEngine
from tq_service.storage.mirror.adoption import find_left
from tq_service.storage.mirror.layout import Names
from tq_service.storage.mirror.mirror import Mirror
from tq_service.storage.mirror.writer import ObjectWriter
from tq_service.wire.columns import iter_frames

NODE_BYTES = 64 << 20


class ListingObjects(PoolObjects):
    """An engine that finds names by their beginning."""

    @property
    def abilities(self):
        return replace(super().abilities, lists_names=True)

    async def list_names(self, prefix):
        await self._begin()
        for name in list(self._pool.objects):
            if name.startswith(prefix):
                yield name


class Nodes:
    """A pool of nodes, and the engine that has its mirror there."""

    def __init__(self, *, copies=1, required=1, node_count=2, **settings):
        self.pool = MemoryPool({f"node-{number}": NODE_BYTES for number in range(node_count)})
        self.names = Names(storage_id="storage-1", boot_id=os.urandom(16))
        self.copies, self.required = copies, required
        self.settings = {"max_bytes": None, "put_ttl_seconds": 1e6, **settings}
        self.engine = self.mirror = self.writer = self._objects = self._running = None
        self.may_remove = True

    def successor(self):
        """Return one on other nodes with the same pool, which may take over while this one goes on."""
        other = Nodes(copies=self.copies, required=self.required, **self.settings)
        other.pool, other.names = self.pool, self.names
        return other

    async def start(self, generation=0, left=()):
        self._objects = PoolObjects(self.pool)
        await self._objects.open("service", 0)
        self.writer = ObjectWriter(
            self._objects, self.names, copies=self.copies, required=self.required, generation=generation,
            may_remove=lambda: self.may_remove,
        )  # fmt: skip
        if generation:
            await self.writer.begin_generation()
        self.mirror = Mirror(self.writer, required=self.required)
        self.engine = StorageEngine(
            storage_id="storage-1", boot_id=self.names.boot_id, backing=self.mirror, **self.settings
        )
        self.mirror.take_over(left)
        self._running = asyncio.create_task(self.mirror.run())
        return self.engine

    async def kill(self):
        """End the engine as a lost host does: what it has under way comes to nothing."""
        await self._objects.aclose()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.mirror.close()

    async def left(self):
        """Return what is found in the mirror: now by asking for names, now by listing them."""
        objects = (ListingObjects if len(self.pool.objects) % 2 else PoolObjects)(self.pool)
        await objects.open("successor", 0)
        return await find_left(objects, self.names, copies=self.copies)

    async def take_over(self):
        """Have another engine take over what the one that was killed has left."""
        left = await self.left()
        return await self.start(left.next_generation, left.objects)

    async def listed(self):
        """Wait until a list leads to all objects that were written so far."""
        await turns_until(lambda: self.writer._list_due.set() or not self.writer._is_list_due())

    async def removed(self):
        """Wait until what no put needs is removed."""
        await turns_until(lambda: not self.writer._remover.pending_count)

    def put_objects(self):
        """Return the names of objects that have puts."""
        return sorted(name for name in self.pool.objects if "/g" in name)


async def turns_until(condition):
    """Let others have their turns until something is so."""
    while not condition():  # noqa: ASYNC110  (what is waited for has no event)
        await asyncio.sleep(0)


async def put(engine, number, data, *, shared=False, confirm=True, deadline=None, owner=b""):
    if shared:
        pending, columns = await begin_shared(engine, number, data)
        await share(pending, columns)
    else:
        pending, chunks = await begin(engine, number, data, owner=owner)
        for parts in iter_frames(chunks, 1 << 16):
            await pending.write(b"".join(parts))
    try:
        await engine.flush(pending, deadline)
        pending.finish()
    except BaseException:
        pending.abort()
        raise
    if confirm:
        engine.confirm(put_id(number))
