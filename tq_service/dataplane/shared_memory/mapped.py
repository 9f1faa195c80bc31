"""Shared memory mapped by this process, and the ranges used by its arrays.

A region is mapped once for writing and at least once for reading; all sessions of this process share the mappings. The
mappings remain, with their page tables, for the next puts and gets. Arrays returned to a program are on private
mappings, in ranges that no other get uses at the time: a program that writes to its arrays writes to copies of the
pages in that range. When the last array is gone, the copies are dropped, and the get's lease is released. The shared
mapping is for bytes that a program never receives: those of puts, and those of gets that are copied to a device. The
shared mapping may be pinned; see `host_memory`.
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
    global _fork_count  # noqa: PLW0603  (the hook is per process, like the count)
    _fork_count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_fork)


class Pages(NamedTuple):
    """A range of pages of a mapping; `end` is exclusive."""

    first: int
    end: int


class Lease:
    """The lease on the regions of one get, until the last array on them is gone.

    A lease may end at any point in any thread, so it uses no locks. A child process that is forked during the lease
    also has the arrays, and it is unknown when the child stops using them. Such a lease is never released, and lasts
    until the session has ended in all processes.

    Args:
        release: called at the end, unless the process was forked.

    Attributes:
        pages: ranges of mappings that the arrays may use.
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
    """A private mapping of a memfd, with its used ranges.

    Attributes:
        mapping: mapping of the entire memfd.
    """

    __slots__ = ("_used", "mapping")

    def __init__(self, fd: int) -> None:
        self.mapping = Mapping(fd, is_shared=False)
        self._used: list[Pages] = []

    def take(self, pages: Pages) -> bool:
        """Mark a range as used unless it overlaps a used range; return whether it was free. Not thread-safe."""
        if any(used.first < pages.end and pages.first < used.end for used in tuple(self._used)):  # may shrink now
            return False
        self._used.append(pages)
        return True

    def free(self, pages: Pages) -> None:
        """Mark a range as unused and discard changes written there; safe in any thread, at any point."""
        self.mapping.discard_changes(*pages)
        self._used.remove(pages)


class _Region:
    """The mappings of one region, shared by the sessions of this process, and whether it was written before.

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
"""Regions of all sessions by process id, run id of the service, and number. A forked child creates new mappings."""


class MappedRegions:
    """The regions that one session has used and the service has not dropped. Safe to use from several threads.

    Sessions of one process with the same service share the mappings of a region. The region is unmapped once each of
    these sessions has ended, or has learned that the region was dropped.

    Args:
        run_id: identifies the service's process. A service that restarts with the same instance id numbers its regions
            from 1 again; without the run_id, a put written to an old region with the same number would be lost.
    """

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self._used: dict[int, _Region] = {}

    def shared(self, number: int) -> Mapping | None:
        """Return the shared mapping of a region, or None if the region is not mapped."""
        return self._region(number).shared

    def is_new(self, number: int) -> bool:
        """Whether a region is about to be written for the first time; mapping pays off only from the second use on."""
        region = self._region(number)
        was_written, region.was_written = region.was_written, True
        return not was_written

    def map_shared(self, number: int, fd: int) -> Mapping:
        """Return the shared mapping of a region, creating it if needed.

        Raises:
            OSError: the system refuses to map the region.
        """
        region = self._region(number)
        with region.lock:
            # Not inherited: a forked child could write to the mapping when the region contains another put's bytes.
            region.shared = region.shared or Mapping(fd, is_shared=True, is_inherited=False)
            return region.shared

    def drop(self, numbers: Iterable[int]) -> None:
        """Unmap regions that the service has dropped; arrays of other processes may keep the memory alive."""
        for number in numbers:
            self._used.pop(number, None)

    def find(self, lease: Lease, number: int, pages: Pages | None) -> Mapping | None:
        """Return an existing mapping of a region for a lease, or None if the region must be mapped first; see `map`."""
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
        """Map memory for a lease; the mapping of a region is kept for later leases.

        Args:
            lease: lease that uses the range from now on.
            number: number of the region; 0: sealed memory.
            fd: file descriptor of the memory.
            pages: the range; None: use the shared mapping, which must not be written to.
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
