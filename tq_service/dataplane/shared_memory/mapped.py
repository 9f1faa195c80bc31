"""Shared memory mapped by this process, and the page ranges used by its arrays.

A region is mapped once for writing and at least once for reading. All sessions in this process share these mappings.
The mappings and their page tables are kept for later puts and gets. An array that is returned to a program is backed by
a private mapping, in a page range that no other get uses. If the program writes to the array, the kernel first copies
the affected pages. When the last array is deleted, these copies are discarded, and the get's lease is released. Puts,
and gets that are copied to a device, use the shared mapping, because the program never receives their bytes. The shared
mapping can be pinned; see `host_memory`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakValueDictionary

from tq_service.wire.mapping import Mapping

_fork_count = 0


def _note_fork() -> None:
    global _fork_count  # noqa: PLW0603  (the hook counts per process)
    _fork_count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_fork)


class Pages(NamedTuple):
    """A range of pages in a mapping. `end` is exclusive."""

    first: int
    end: int


class Lease:
    """A lease on a get's regions that lasts until the last array in these regions is deleted.

    A lease can end at any time and in any thread, so it does not use locks. If the process forks during the lease, the
    child shares the arrays. The parent then cannot detect when the child stops using them. Such a lease is never
    released, and lasts until the session has ended in all processes.

    Args:
        release: function called when the lease ends, unless the process has forked during the lease.

    Attributes:
        pages: mappings that the arrays may use, each with a page range.
    """

    __slots__ = ("_fork_count", "_release", "pages")

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._fork_count = _fork_count
        self.pages: list[tuple[ReadMapping, Pages]] = []

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        for mapping, pages in self.pages:
            mapping.free(pages)
        if self._fork_count == _fork_count:
            self._release()


class ReadMapping:
    """A private mapping of a memfd, together with the page ranges that are in use.

    Attributes:
        mapping: mapped memory of the entire memfd.
    """

    __slots__ = ("_used", "mapping")

    def __init__(self, fd: int) -> None:
        self.mapping = Mapping(fd, is_shared=False)
        self._used: list[Pages] = []

    def take(self, pages: Pages) -> bool:
        """Mark a range as used, or return False if it overlaps a range in use. Not thread-safe."""
        # Iterate over a copy, because another thread may free a range at any time.
        if any(used.first < pages.end and pages.first < used.end for used in tuple(self._used)):
            return False
        self._used.append(pages)
        return True

    def free(self, pages: Pages) -> None:
        """Mark a range as unused, and discard any changes that the program made to it.

        Any thread may call this method at any time.
        """
        self.mapping.discard_changes(*pages)
        self._used.remove(pages)


class _Region:
    """A region's mappings, shared by all sessions in this process, and whether the region was ever written to.

    Attributes:
        lock: protects all attributes.
    """

    __slots__ = ("__weakref__", "for_reading", "lock", "shared", "was_written")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.was_written = False
        self.shared: Mapping | None = None
        self.for_reading: list[ReadMapping] = []


_regions: WeakValueDictionary[tuple[int, bytes, int], _Region] = WeakValueDictionary()
"""Regions of all sessions, by process id, run id and region number. After a fork, the child maps regions again."""


class MappedRegions:
    """The regions that a session has used and that the service has not dropped. Thread-safe.

    All sessions between this process and a service share the mappings of each region. A region stays mapped until every
    session that used it has either ended or learned that the service dropped the region.

    Args:
        run_id: id of the service process. If a service restarts with the same instance id, it numbers its regions from
            1 again. Without the run_id, a put could be written to an old region with the same number and be lost.
    """

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self._used: dict[int, _Region] = {}

    def shared(self, number: int) -> Mapping | None:
        """Return the shared mapping of a region, or None if the region has not been mapped."""
        return self._region(number).shared

    def is_new(self, number: int) -> bool:
        """Return whether a region is about to be written to for the first time, and mark it as written to.

        Mapping the region pays off only from the second write onward.
        """
        region = self._region(number)
        was_written, region.was_written = region.was_written, True
        return not was_written

    def map_shared(self, number: int, fd: int) -> Mapping:
        """Return the shared mapping of a region, mapping the region if necessary.

        Raises:
            OSError: the operating system refused to map the region.
        """
        region = self._region(number)
        with region.lock:
            # Not inherited, because a forked child could write to the mapping while it contains the bytes of another
            # put.
            region.shared = region.shared or Mapping(fd, is_shared=True, is_inherited=False)
            return region.shared

    def drop(self, numbers: Iterable[int]) -> None:
        """Unmap regions that the service has dropped. The memory of a region is freed once no process uses it."""
        for number in numbers:
            self._used.pop(number, None)

    def find(self, lease: Lease, number: int, pages: Pages | None) -> Mapping | None:
        """Return an existing mapping of a region for use by a lease, or None if the caller must call `map`."""
        if pages is None:
            return self.shared(number)
        region = self._region(number)
        with region.lock:
            for each in region.for_reading:
                if each.take(pages):
                    lease.pages.append((each, pages))
                    return each.mapping
        return None

    def map(self, lease: Lease, number: int, fd: int, pages: Pages | None) -> Mapping:
        """Map memory for use by a lease. Mappings of regions are kept for later leases.

        Args:
            lease: lease that will use the memory.
            number: number of the region, or 0 for sealed memory.
            fd: file descriptor of the memory.
            pages: range of pages that the lease uses in a private mapping. If None, the shared mapping is used, to
                which the caller must not write.
        """
        if pages is None:
            return self.map_shared(number, fd)
        each = ReadMapping(fd)
        each.take(pages)
        lease.pages.append((each, pages))
        if number:
            region = self._region(number)
            with region.lock:
                region.for_reading.append(each)
        return each.mapping

    def _region(self, number: int) -> _Region:
        found = self._used.get(number)
        if found is None:
            key = os.getpid(), self._run_id, number
            found = self._used.setdefault(number, _regions.setdefault(key, _Region()))
        return found
