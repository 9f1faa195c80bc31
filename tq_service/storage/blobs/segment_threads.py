"""The threads that read and write segments, so that the event loop does not wait for a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from tq_service.storage.blobs.pool import RegionPool
from tq_service.storage.blobs.region import Region

T = TypeVar("T")
_THREAD_COUNT: Final = 2


class SegmentThreads:
    """A few threads, and the care for the regions that they work on."""

    def __init__(self, pool: RegionPool) -> None:
        self._pool = pool
        self._executor = ThreadPoolExecutor(_THREAD_COUNT, thread_name_prefix="tq-segment")

    def run(self, work: Callable[..., T], *args: object, pinned: Region | None = None) -> asyncio.Future[T]:
        """Do something in a thread; await it through `asyncio.shield`, since a thread cannot be cancelled.

        Args:
            work: what to do.
            args: what with.
            pinned: a region that it reads or writes: it stays as it is until the thread is done with it.
        """
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        if pinned is not None:
            self._pool.pin(pinned)
        future.add_done_callback(lambda done: self._end(done, pinned))
        return future

    def _end(self, done: asyncio.Future[T], pinned: Region | None) -> None:
        done.exception()  # where nobody waits any more, nobody is to be told of it
        if pinned is not None:
            self._pool.unpin(pinned)
