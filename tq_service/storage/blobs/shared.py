"""Blobs in memory mapped by clients on this host: regions created by the service, and memfds sealed by clients.

Reusing a region is fast because its pages, and the page tables of the processes that map it, already exist. A region is
reused only when no process can still read or write its bytes. Leases held by sessions determine when a region can be
reused:

    blob allocated -> region in use -> blob freed, no lease left ---------------------------------> pooled -> used again
                                    -> blob freed, leased -> last lease released ------------------> pooled, or dropped
                                                          -> memory needed -> abandoned, then dropped

If a session ends without releasing its leases, a process may still have the leased regions mapped. Such regions are
dropped rather than reused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from weakref import WeakSet

from tq_service.storage.blobs.memory import (
    BACKGROUND,
    NO_FD,
    UNMAPPED_IN_BACKGROUND_FROM_BYTES,
    Blob,
    BlobStore,
    Session,
    SharedMemory,
    ThreadedStore,
    no_memory,
    size_class,
)
from tq_service.wire import shared_memory

_THREAD_COUNT: Final = 2
# A reinforcement learning step takes minutes and begins with an empty store. If regions were dropped between steps,
# each step would begin with new pages, which take 5 to 20 times as long to fill as existing pages.
_KEPT_SECONDS: Final = 300.0
# Batch sizes vary. A reused region may be larger than requested by up to this factor, and the store keeps up to twice
# as many bytes in regions as are used.
_MOST_SLACK: Final = 1.25
_KEPT_SHARE: Final = 2


class SharedBlob(Blob):
    """A blob in shared memory."""

    __slots__ = ()

    backing: SharedMemory

    @property
    def shared(self) -> SharedMemory:  # type: ignore[override]
        return self.backing


class SharedStore(BlobStore):
    """A store of blobs in shared memory.

    Attributes:
        blob_count: number of blobs that have not been freed.
    """

    is_shared = True
    blob_count = 0

    @property
    def fd_count(self) -> int:
        """Number of file descriptors that the store has open."""
        return self.blob_count


# Regions


class Region(SharedMemory):
    """A memfd created by this service. Clients that run as the same user as the service write to it.

    Args:
        number: identifier of the region. This process never reuses an identifier.
        capacity: size in bytes, a multiple of the page size.
        on_unleased: function called when the region's last lease has ended.

    Attributes:
        capacity: size in bytes.
        lease_count: number of leases on the region that sessions hold.
        is_fit: whether the region is safe to reuse. This is set to False when a session ends without releasing its
            lease.
        pooled_at: time at which the region was last returned to the pool, in seconds on the store's clock.

    Raises:
        OSError: the system lacks memory for the region.
    """

    __slots__ = ("_on_unleased", "_sessions", "capacity", "is_fit", "lease_count", "pooled_at")

    def __init__(self, number: int, capacity: int, on_unleased: Callable[[Region], None]) -> None:
        super().__init__(shared_memory.new_region(capacity), capacity)
        shared_memory.map_over(self.memory, self.fd, capacity, is_writable=True)
        self.number = number
        self.capacity = capacity
        self.lease_count = 0
        self.is_fit = True
        self.pooled_at = 0.0
        self._on_unleased = on_unleased
        self._sessions: WeakSet[Session] = WeakSet()

    def note_dropped(self) -> None:
        """Report the region as dropped to all sessions that may have mapped it. A dropped region is not used again."""
        for session in self._sessions:
            session.note_dropped(self.number)

    def lease(self, session: Session) -> None:
        """Begin a lease. The region is not reused until the lease has ended."""
        self.lease_count += 1
        self._sessions.add(session)

    def end_lease(self, *, is_released: bool) -> None:
        """End a lease. The region can be reused only if the client released the lease."""
        self.lease_count -= 1
        self.is_fit &= is_released
        if not self.lease_count:
            self._on_unleased(self)

    def remove(self) -> None:
        """Close and unmap the region. Free its pages even if they are mapped, unless a client may still use them."""
        if self.is_fit:
            shared_memory.free_pages(self.memory)
        super().remove()


class RegionBlobs(ThreadedStore[Region], SharedStore):
    """A blob store that keeps each blob in a region.

    If a blob is freed while its region is leased, the region counts as used until its leases have ended. If the used
    bytes exceed `max_bytes` before then, the store abandons leased regions of freed blobs, starting with the blob that
    was freed first. The memory of an abandoned region no longer counts as used.

    Args:
        max_bytes: number of used bytes above which regions are abandoned, or None for no limit.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        super().__init__()
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._numbers = itertools.count(1)
        self._seconds = 0.0  # elapsed seconds since the start, as reported to `trim`
        self._freed: dict[Region, None] = {}  # leased regions, in the order in which their blobs were freed
        self._in_use: set[Region] = set()
        self._executor = ThreadPoolExecutor(_THREAD_COUNT, thread_name_prefix="tq-region")

    @property
    def fd_count(self) -> int:
        return len(self._in_use) + len(self._freed) + sum(map(len, self._pool.values()))

    async def allocate(self, size: int) -> Blob:
        try:
            region = await self._backing(size_class(max(size, 1)))
        except (OSError, MemoryError) as error:
            raise no_memory(size, error) from error
        return self._use(region, size)

    def _wrap(self, backing: Region, size: int) -> Blob:
        return SharedBlob(self, size, backing.memory, backing)

    def _use(self, backing: Region, size: int) -> Blob:
        self.blob_count += 1
        self._in_use.add(backing)
        self.used_bytes += backing.capacity
        while self._freed and self.used_bytes > self._max_bytes:
            abandoned = next(iter(self._freed))
            del self._freed[abandoned]
            self.used_bytes -= abandoned.capacity
        self._high_water_bytes = max(self._high_water_bytes, self.used_bytes)
        self._shrink()
        return self._wrap(backing, size)

    def _recycled(self, capacity: int) -> Region | None:
        """Return the smallest pooled region with at least this capacity, or None. Much larger regions are ignored."""
        fitting = (each for each in self._pool if capacity <= each <= capacity * _MOST_SLACK)
        return super()._recycled(min(fitting, default=capacity))

    def _shrink(self) -> None:
        self.give_up(self.used_bytes + self.pooled_bytes - _KEPT_SHARE * self._high_water_bytes)

    def _make(self, capacity: int) -> Region:
        return Region(next(self._numbers), capacity, self._on_unleased)

    def free(self, blob: Blob) -> None:
        region: Region = blob.backing
        blob.close()
        self._in_use.discard(region)
        self.blob_count -= 1
        self._freed[region] = None
        if not region.lease_count:
            self._on_unleased(region)
        if blob.copy is not None:
            blob.copy.release()
        self.on_freed(blob.charge)

    def recycle(self, backing: Region, capacity: int) -> None:
        backing.pooled_at = self._seconds
        super().recycle(backing, capacity)

    def trim(self, elapsed_seconds: float) -> None:
        """Drop regions that have been unused for several minutes, and lower the high-water mark accordingly."""
        self._seconds += elapsed_seconds
        for capacity, pooled in list(self._pool.items()):
            due = sum(each.pooled_at <= self._seconds - _KEPT_SECONDS for each in pooled)  # oldest regions first
            for region in pooled[:due]:
                self._drop(region)
            del pooled[:due]
            self.pooled_bytes -= due * capacity
            if not pooled:
                del self._pool[capacity]
        self._high_water_bytes = max(self.used_bytes, (self.used_bytes + self.pooled_bytes) // _KEPT_SHARE)

    def _on_unleased(self, region: Region) -> None:
        if region in self._freed:
            del self._freed[region]
            self.used_bytes -= region.capacity
            if region.is_fit:
                self.recycle(region, region.capacity)
                self._shrink()
            else:
                self._drop(region)
        elif region not in self._in_use:  # the region was abandoned
            self._drop(region)

    def _drop(self, backing: Region) -> None:
        backing.note_dropped()
        BACKGROUND.submit(backing.remove)


# Sealed memory


class MemfdBlob(SharedBlob):
    """Memory sealed by a client. `allocate` reserves an address range, and `map_fd` maps the memfd into this range."""

    __slots__ = ()

    def map_fd(self, fd: int) -> None:
        """Map the memory of a file descriptor. Take ownership of the descriptor, even on failure.

        Raises:
            InvalidArgumentError: the descriptor is not sealed memory of the declared size.
            OSError: the system refused the mapping.
        """
        self.backing.fd = fd
        shared_memory.check_sealed(fd, self.size)
        shared_memory.map_over(self.backing.memory, fd, self.size, is_writable=False)

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` with the blob's bytes starting at `start`; see `Blob.read_into`.

        The bytes are read from the memfd, because reading through the mapping causes a page fault every few pages.
        """
        shared_memory.read_into(self.backing.fd, target, start)


class MemfdBlobs(SharedStore):
    """A store of blobs in sealed memory, which is created and sealed by clients that run as other users."""

    async def allocate(self, size: int) -> MemfdBlob:
        try:
            backing = SharedMemory(NO_FD, max(size, 1))
        except (OSError, MemoryError) as error:
            raise no_memory(size, error) from error
        self.blob_count += 1
        return MemfdBlob(self, size, backing.memory, backing)

    def free(self, blob: Blob) -> None:
        self.blob_count -= 1
        blob.close()
        if blob.size >= UNMAPPED_IN_BACKGROUND_FROM_BYTES:  # the last process to close a memfd frees its pages
            BACKGROUND.submit(blob.backing.remove)
        else:
            blob.backing.remove()
        if blob.copy is not None:
            blob.copy.release()
        self.on_freed(blob.charge)
