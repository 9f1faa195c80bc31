"""The shared memory that this process has mapped, and the ranges that its arrays use.

A region is mapped once to write to it again, and once or more to read it, by all sessions of this process together.
Mappings stay, with their page tables, for the next puts and gets. Arrays that a program gets are on private mappings,
in ranges that no other get uses at the time: writes of a program to its arrays are in copies of pages of that range.
When the last array is gone, the copies are dropped, and the lease of the get is released. The shared mapping is for
bytes that no program gets: those of puts, and those of gets that are copied up to a device. It may be pinned, see
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
    """A range of pages of a mapping; `end` is the first one behind it."""

    first: int
    end: int


class Lease:
    """The regions of one get, until the last array on them is gone. That may be at any point of any thread: no locks.

    A child that is forked during the lease has the arrays too, and nobody knows when it is done with them. So such a
    lease is not released, and lasts until the session has ended in all processes.

    Args:
        release: called then, unless there was a fork.

    Attributes:
        pages: what its arrays may use.
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
    """A private mapping of a memfd, and the ranges of it that are in use.

    Attributes:
        mapping: all of the memfd.
    """

    __slots__ = ("_used", "mapping")

    def __init__(self, fd: int) -> None:
        self.mapping = Mapping(fd, is_shared=False)
        self._used: list[Pages] = []

    def take(self, pages: Pages) -> bool:
        """Have a range used, unless a part of it is; return whether that was so. One thread at a time may."""
        if any(used.first < pages.end and pages.first < used.end for used in tuple(self._used)):  # some may end now
            return False
        self._used.append(pages)
        return True

    def free(self, pages: Pages) -> None:
        """Have a range unused, as if nothing had been written there; any thread may, at any point."""
        self.mapping.discard_changes(*pages)
        self._used.remove(pages)


class _Region:
    """The mappings of one region in this process, which its sessions share, and whether it was written before.

    Attributes:
        lock: of all of it.
    """

    __slots__ = ("__weakref__", "for_reading", "lock", "shared", "was_written")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.was_written = False
        self.shared: Mapping | None = None
        self.for_reading: list[ReadMapping] = []


_regions: WeakValueDictionary[tuple[int, bytes, int], _Region] = WeakValueDictionary()
"""Those of all sessions by process, process of the service, and number: a forked child maps anew."""


class MappedRegions:
    """The regions that one session has used, and that the service has not dropped. May be used by several threads.

    Sessions of one process with one service share the mappings of a region; it is unmapped when the last of them has
    ended, or has heard that it is dropped.

    Args:
        run_id: the process of the service. One that comes back in the same boot numbers its regions from 1 on again: a
            put that is written to the region of the one before would be lost.
    """

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self._used: dict[int, _Region] = {}

    def shared(self, number: int) -> Mapping | None:
        """Return the shared mapping of a region, None if it is not mapped."""
        return self._region(number).shared

    def is_new(self, number: int) -> bool:
        """Whether a region is about to be written for the first time: mapping it pays once it comes back."""
        region = self._region(number)
        was_written, region.was_written = region.was_written, True
        return not was_written

    def map_shared(self, number: int, fd: int) -> Mapping:
        """Return the same, mapped now if it was not.

        Raises:
            OSError: the system refuses to map it.
        """
        region = self._region(number)
        with region.lock:
            # A child could write to it when the region has bytes of another put.
            region.shared = region.shared or Mapping(fd, is_shared=True, is_inherited=False)
            return region.shared

    def drop(self, numbers: Iterable[int]) -> None:
        """Unmap regions that the service has dropped; of some, arrays of other processes may keep the memory."""
        for number in numbers:
            self._used.pop(number, None)

    def find(self, lease: Lease, number: int, pages: Pages | None) -> Mapping | None:
        """Return a mapping of a region, see `map`; None: it has to be mapped."""
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
        """Map memory for a lease, and keep the mapping of a region for later ones.

        Args:
            lease: uses the range from now on.
            number: of the region; 0: it is sealed memory.
            fd: its file descriptor.
            pages: the range; None: the shared mapping is meant, which is not written to.

        Raises:
            OSError: the system refuses to map it.
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
