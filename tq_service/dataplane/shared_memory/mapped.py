"""Shared memory mapped by this process, and the ranges used by its arrays.

A region is mapped once for writing, and once or more for reading; all sessions of this process share the mappings. They
stay, with their page tables, for the next puts and gets. Arrays that a program gets are on private mappings, in ranges
that no other get uses at the time: when a program writes to its arrays, it writes to copies of pages in that range.
When the last array is gone, the copies are dropped, and the lease of the get is released. The shared mapping is for
bytes that no program gets: those of puts, and those of gets that are copied to a device. It may be pinned, see
`host_memory`.
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
    global _fork_count  # noqa: PLW0603  (the hook is the process's, like the count)
    _fork_count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_fork)


class Pages(NamedTuple):
    """A range of pages of a mapping; `end` is exclusive."""

    first: int
    end: int


class Lease:
    """The regions of one get, until the last array on them is gone. That may be at any point of any thread: no locks.

    A child that is forked during the lease has the arrays too, and the end of its use cannot be known. Such a lease is
    not released, and lasts until the session has ended in all processes.

    Args:
        release: called at the end, unless there was a fork.

    Attributes:
        pages: ranges that its arrays may use.
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
        mapping: all of the memfd.
    """

    __slots__ = ("_used", "mapping")

    def __init__(self, fd: int) -> None:
        self.mapping = Mapping(fd, is_shared=False)
        self._used: list[Pages] = []

    def take(self, pages: Pages) -> bool:
        """Mark a range as used unless it overlaps a used one; return whether it was free. One thread at a time."""
        if any(used.first < pages.end and pages.first < used.end for used in tuple(self._used)):  # some may end now
            return False
        self._used.append(pages)
        return True

    def free(self, pages: Pages) -> None:
        """Mark a range as unused and drop what was written there; any thread may, at any point."""
        self.mapping.discard_changes(*pages)
        self._used.remove(pages)


class _Region:
    """The mappings of one region, shared by the sessions of this process, and whether it was written before.

    Attributes:
        lock: protects all of it.
    """

    __slots__ = ("__weakref__", "for_reading", "lock", "shared", "was_written")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.was_written = False
        self.shared: Mapping | None = None
        self.for_reading: list[ReadMapping] = []


_regions: WeakValueDictionary[tuple[int, bytes, int], _Region] = WeakValueDictionary()
"""Regions of all sessions by process, process of the service, and number: a forked child creates new mappings."""


class MappedRegions:
    """The regions that one session has used and the service has not dropped. Safe to use from several threads.

    Sessions of one process with the same service share the mappings of a region; it is unmapped when the last of them
    has ended, or has learned that it was dropped.

    Args:
        run_id: the process of the service. If it restarts with the same instance id, it numbers its regions from 1
            again; a put written to the old region with the same number would be lost.
    """

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self._used: dict[int, _Region] = {}

    def shared(self, number: int) -> Mapping | None:
        """Return the shared mapping of a region, None if it is not mapped."""
        return self._region(number).shared

    def is_new(self, number: int) -> bool:
        """Whether a region is about to be written for the first time: mapping it pays off from the second use."""
        region = self._region(number)
        was_written, region.was_written = region.was_written, True
        return not was_written

    def map_shared(self, number: int, fd: int) -> Mapping:
        """Return the shared mapping of a region, creating it if needed.

        Raises:
            OSError: the system refuses to map it.
        """
        region = self._region(number)
        with region.lock:
            # Not inherited: a child could write to it when the region has bytes of another put.
            region.shared = region.shared or Mapping(fd, is_shared=True, is_inherited=False)
            return region.shared

    def drop(self, numbers: Iterable[int]) -> None:
        """Unmap regions that the service has dropped; arrays of other processes may keep their memory."""
        for number in numbers:
            self._used.pop(number, None)

    def find(self, lease: Lease, number: int, pages: Pages | None) -> Mapping | None:
        """Return a mapping of a region, see `map`; None: it must be mapped first."""
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
            lease: uses the range from now on.
            number: number of the region; 0: sealed memory.
            fd: its file descriptor.
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
