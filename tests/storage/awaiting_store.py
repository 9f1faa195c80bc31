"""A store of blobs that can do no more than every store must: not in memory, no parts freed; it takes turns."""

import asyncio
import errno

from tq_service.errors import UnavailableError
from tq_service.storage.blobs.base import Blob, BlobStore


class AwaitingBlob(Blob):
    def read_into(self, target, start):
        self.store._fail()
        if self not in self.store.values:
            raise OSError(errno.EIO, "the blob is gone")
        target[:] = self.store.values[self][start : start + len(target)]


class AwaitingStore(BlobStore):
    """Bytes in a dict, as on another host: each call takes turns of the loop, and a blob is freed some turns later.

    Attributes:
        values: the bytes of each blob that is there.
        failures: errors of the next calls that write or read, None for those that go well.
    """

    def __init__(self):
        self.values = {}
        self.failures = []
        self._freeing = set()

    async def allocate(self, size):
        await asyncio.sleep(0)
        blob = AwaitingBlob(self, size)
        self.values[blob] = bytearray(size)
        return blob

    async def write(self, blob, start, data):
        data = bytes(data)
        await asyncio.sleep(0)
        self._fail()
        self.values[blob][start : start + len(data)] = data
        await asyncio.sleep(0)

    def free(self, blob):
        task = asyncio.get_running_loop().create_task(self._free(blob))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _free(self, blob):
        await asyncio.sleep(0)
        del self.values[blob]
        self.on_freed(blob.charge)

    async def idle(self):
        """Wait until what was released is free."""
        while self._freeing:
            await asyncio.wait(self._freeing)

    def _fail(self):
        error = self.failures.pop(0) if self.failures else None
        if error is not None:
            raise error


def outage():
    return UnavailableError("the store cannot be reached")
