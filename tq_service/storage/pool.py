"""Memory for the bytes of puts, reused: freshly mapped memory costs more than the copy into it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final

from tq_service.storage.region import Region
from tq_service.storage.shared_region import SharedRegion

_SMALL_BYTES: Final = 64 << 10
_HUGE_PAGES_FROM_BYTES: Final = 4 << 20
_CLASSES_PER_DOUBLING: Final = 8
_HALF_LIFE_SECONDS: Final = 60.0


def size_class(size: int) -> int:
    """Return the capacity of the region that holds `size` bytes: at most an eighth larger."""
    step = 1 << max((size - 1).bit_length() - _CLASSES_PER_DOUBLING.bit_length(), 12)
    return -(-size // step) * step


class RegionPool:
    """Hands out regions and keeps returned ones for reuse.

    Small regions come from malloc, larger ones are anonymous mappings in size classes. Used and kept bytes together
    never exceed the high-water mark of used bytes; the mark sinks with every `trim`, so memory is given back in time.

    Args:
        on_return: called with the size of each region that came back, when nobody reads it any more.
    """

    def __init__(self, on_return: Callable[[int], None] | None = None) -> None:
        self._on_return = on_return
        self._free: dict[int, list[mmap.mmap]] = {}
        self._high_water_bytes = 0
        self.mapped_bytes = 0
        self.pooled_bytes = 0
        self.shared_count = 0

    def take(self, size: int) -> Region:
        """Return a region of `size` bytes; what they are is not defined."""
        if size < _SMALL_BYTES:
            return Region(bytearray(size), size, size)
        capacity = size_class(size)
        self.mapped_bytes += capacity
        self._high_water_bytes = max(self._high_water_bytes, self.mapped_bytes)
        kept = self._free.get(capacity)
        if kept:
            self.pooled_bytes -= capacity
            memory = kept.pop()
            if not kept:
                del self._free[capacity]
        else:
            self._shrink()
            memory = self._map(capacity)
        return Region(memory, size, capacity)

    def take_shared(self, table_bytes: int, value_bytes: int) -> SharedRegion:
        """Return a region for shared memory that is yet to be handed over."""
        region = SharedRegion(table_bytes, value_bytes)
        self.shared_count += region.memory_count
        return region

    def release(self, region: Region) -> None:
        """Take a region back, at once or when its last reader is done; a second call does nothing."""
        if not region._released:
            region._released = True
            if not region._pin_count:
                self._return(region)

    def pin(self, region: Region) -> None:
        """Keep a region as it is for a reader."""
        region._pin_count += 1

    def unpin(self, region: Region) -> None:
        """End what `pin` began."""
        region._pin_count -= 1
        if region._released and not region._pin_count:
            self._return(region)

    def trim(self, elapsed_seconds: float) -> None:
        """Let the high-water mark sink towards what is used, and unmap what is kept above it."""
        kept = (self._high_water_bytes - self.mapped_bytes) * 0.5 ** (elapsed_seconds / _HALF_LIFE_SECONDS)
        self._high_water_bytes = self.mapped_bytes + int(kept)
        self._shrink()

    def _map(self, capacity: int) -> mmap.mmap:
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if capacity >= _HUGE_PAGES_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _return(self, region: Region) -> None:
        if isinstance(region, SharedRegion):
            self.shared_count -= region.memory_count
        elif isinstance(region._memory, mmap.mmap):
            self.mapped_bytes -= region.capacity
            self.pooled_bytes += region.capacity
            self._free.setdefault(region.capacity, []).append(region._memory)
            self._shrink()
        region.close()
        if self._on_return is not None:
            self._on_return(region.size)

    def _shrink(self) -> None:
        """Drop kept regions, largest first, until the high-water mark holds; the last reference unmaps."""
        while self.pooled_bytes and self.mapped_bytes + self.pooled_bytes > self._high_water_bytes:
            capacity = max(self._free)
            self._free[capacity].pop()
            self.pooled_bytes -= capacity
            if not self._free[capacity]:
                del self._free[capacity]
