"""The memory of a session that a client has mapped, and the ranges that its arrays use.

A region is mapped once to write to it again, and once or more to read it; mappings stay, with their page tables, for
the next puts and gets. Arrays that a program gets are on private mappings, in ranges that no other get uses at the
time: writes of a program to its arrays are in copies of pages of that range. When the last array is gone, the copies
are dropped, and the lease of the get is released. The shared mapping is for bytes that no program gets: those of puts,
and those of gets that are copied up to a device. It may be pinned, see `host_memory`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

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
    """The mappings of one region, and whether it was written before."""

    __slots__ = ("for_reading", "shared", "was_written")

    def __init__(self) -> None:
        self.was_written = False
        self.shared: Mapping | None = None
        self.for_reading: list[ReadMapping] = []


class MappedRegions:
    """The mappings of one session, of regions that the service has not dropped. May be used by several threads.

    Args:
        release: called when a lease is to be released, at any point of any thread.
    """

    def __init__(self, release: Callable[[bytes], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._regions: dict[int, _Region] = {}

    def shared(self, number: int) -> Mapping | None:
        """Return the shared mapping of a region, None if it is not mapped."""
        with self._lock:
            return self._region(number).shared

    def is_new(self, number: int) -> bool:
        """Whether a region is about to be written for the first time: mapping it pays once it comes back."""
        with self._lock:
            region = self._region(number)
            was_written, region.was_written = region.was_written, True
            return not was_written

    def map_shared(self, number: int, fd: int) -> Mapping:
        """Return the same, mapped now if it was not.

        Raises:
            OSError: the system refuses to map it.
        """
        with self._lock:
            region = self._region(number)
            # A child could write to it when the region has bytes of another put.
            region.shared = region.shared or Mapping(fd, is_shared=True, is_inherited=False)
            return region.shared

    def drop(self, numbers: Iterable[int]) -> None:
        """Unmap regions that the service has dropped; of some, arrays of other processes may keep the memory."""
        with self._lock:
            dropped = [self._regions.pop(number, None) for number in numbers]
        del dropped  # without the lock: the system takes 20 ms and more to unmap a GiB

    def begin_lease(self, offer_id: bytes) -> Lease:
        """Return the lease of a get that is about to take an offer."""
        return Lease(partial(self._release, offer_id))

    def find(self, lease: Lease, number: int, pages: Pages | None) -> Mapping | None:
        """Return a mapping of a region, see `map`; None: it has to be mapped."""
        if pages is None:
            return self.shared(number)
        with self._lock:
            for each in self._region(number).for_reading:
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
            with self._lock:
                self._region(number).for_reading.append(each)
        return each.mapping

    def _region(self, number: int) -> _Region:
        return self._regions.setdefault(number, _Region())
