"""Memory for the bytes of puts, reused: freshly mapped memory costs more than the copy into it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final

from tq_service.storage.blobs.region import Backing, Region
from tq_service.storage.blobs.segments import Segment, SegmentFiles
from tq_service.storage.blobs.shared_region import SharedRegion

SMALL_BYTES: Final = 64 << 10
"""Puts of fewer bytes come from malloc, and go into the journal whole where there is one."""

_HUGE_PAGES_FROM_BYTES: Final = 4 << 20
_CLASSES_PER_DOUBLING: Final = 8
_HALF_LIFE_SECONDS: Final = 60.0


def size_class(size: int) -> int:
    """Return the capacity of the region that holds `size` bytes: at most an eighth larger."""
    step = 1 << max((size - 1).bit_length() - _CLASSES_PER_DOUBLING.bit_length(), 12)
    return -(-size // step) * step


class RegionPool:
    """Hands out regions and keeps returned ones for reuse.

    Small regions come from malloc. Larger ones, in size classes, are anonymous mappings, or mapped files where there is
    a folder for them. Used and kept bytes together never exceed the high-water mark of used bytes; the mark sinks with
    every `trim`, so memory, or disk, is given back in time.

    Args:
        on_return: called with the size of each region that came back, when nobody reads it any more.
        files: where larger regions are files; None: all are memory of this process alone.
    """

    def __init__(self, on_return: Callable[[int], None] | None = None, files: SegmentFiles | None = None) -> None:
        self._on_return = on_return
        self._files = files
        self._free: dict[int, list[Backing]] = {}
        self._high_water_bytes = 0
        self.mapped_bytes = 0
        self.pooled_bytes = 0
        self.shared_count = 0

    def needs_file(self, size: int) -> bool:
        """Whether a region of `size` bytes would need a file that is not there yet."""
        return self._files is not None and size >= SMALL_BYTES and size_class(size) not in self._free

    def take(self, size: int, fresh: Segment | None = None) -> Region:
        """Return a region of `size` bytes; what they are is not defined.

        Args:
            size: bytes.
            fresh: a file of its size class that was made for it.

        Raises:
            OSError: the disk is full, or the system refuses the mapping.
        """
        if size < SMALL_BYTES:
            return Region(bytearray(size), size)
        backing = self._take_backing(size_class(size), fresh)
        region = Region(None if isinstance(backing, Segment) else backing, size, backing)
        try:
            region.memory()
        except BaseException:
            self.mapped_bytes -= region.capacity
            self._drop(backing)
            raise
        return region

    def take_shared(
        self, table_bytes: int, value_bytes: int, backed_bytes: int = 0, fresh: Segment | None = None
    ) -> SharedRegion:
        """Return a region for shared memory that is yet to be sent.

        Args:
            table_bytes: size of its tables.
            value_bytes: size of the shared memory.
            backed_bytes: size of the copy that is to be made of both; 0: none.
            fresh: a file that was made for that copy.

        Raises:
            OSError: the disk is full, or the system refuses the mapping.
        """
        region = SharedRegion(table_bytes, value_bytes)
        if backed_bytes >= SMALL_BYTES and self._files is not None:
            region.backing = self._take_backing(size_class(backed_bytes), fresh)
        self.shared_count += region.memory_count
        return region

    def take_kept(self, size: int, segment: Segment) -> Region:
        """Return a region with the bytes that a segment has from an earlier life of this service."""
        self.mapped_bytes += segment.capacity
        self._high_water_bytes = max(self._high_water_bytes, self.mapped_bytes + self.pooled_bytes)
        return Region(None, size, segment)

    def keep(self, segment: Segment) -> None:
        """Keep a file that no put has its bytes in, for reuse."""
        self.pooled_bytes += segment.capacity
        self._high_water_bytes = max(self._high_water_bytes, self.mapped_bytes + self.pooled_bytes)
        self._free.setdefault(segment.capacity, []).append(segment)

    def take_all_kept(self) -> list[Segment]:
        """Return the files kept for reuse, to be removed since the disk is full."""
        kept = [segment for free in self._free.values() for segment in free if isinstance(segment, Segment)]
        self._free.clear()
        self.pooled_bytes = 0
        return kept

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

    def _take_backing(self, capacity: int, fresh: Segment | None) -> Backing:
        kept = self._free.get(capacity)
        if fresh is None and kept:
            self.pooled_bytes -= capacity
            backing = kept.pop()
            if not kept:
                del self._free[capacity]
        else:
            backing = fresh or self._make(capacity)
        self.mapped_bytes += capacity
        self._high_water_bytes = max(self._high_water_bytes, self.mapped_bytes)
        self._shrink()
        return backing

    def _make(self, capacity: int) -> Backing:
        if self._files is not None:
            return self._files.create(capacity)
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if capacity >= _HUGE_PAGES_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _return(self, region: Region) -> None:
        if isinstance(region, SharedRegion):
            self.shared_count -= region.memory_count
        backing, capacity, size = region.backing, region.capacity, region.size
        region.close()
        if backing is not None:
            self.mapped_bytes -= capacity
            if region.is_damaged:
                self._drop(backing)
            else:
                self.pooled_bytes += capacity
                self._free.setdefault(capacity, []).append(backing)
                self._shrink()
        if self._on_return is not None:
            self._on_return(size)

    def _shrink(self) -> None:
        """Drop what is kept, largest first, until the high-water mark holds."""
        while self.pooled_bytes and self.mapped_bytes + self.pooled_bytes > self._high_water_bytes:
            capacity = max(self._free)
            self._drop(self._free[capacity].pop())
            self.pooled_bytes -= capacity
            if not self._free[capacity]:
                del self._free[capacity]

    def _drop(self, backing: Backing) -> None:
        """Give up a backing: memory is unmapped with its last reference, files are removed."""
        if isinstance(backing, Segment) and self._files is not None:
            self._files.drop(backing)
