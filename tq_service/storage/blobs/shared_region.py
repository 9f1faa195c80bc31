"""The region of a put whose values are in memory that its client has sent."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tq_service.errors import InvalidArgumentError
from tq_service.storage.blobs.region import Region
from tq_service.wire import shared_memory
from tq_service.wire.mapping import map_over

# The last one to close a memfd frees its pages, which takes the system 0.15 ms a MiB: too long for the event loop.
_CLOSED_ASIDE_FROM_BYTES: Final = 8 << 20
_CLOSING: Final = ThreadPoolExecutor(1, thread_name_prefix="tq-close")


class SharedRegion(Region):
    """One range of addresses: first the tables, this process's own, then the values, shared and read-only.

    So those who read a put need not know which kind of region it has. The range exists from the reservation on; the
    shared memory is put into its place when its file descriptors have come.

    Args:
        table_bytes: size of the tables.
        value_bytes: size of the shared memory.

    Attributes:
        fds: file descriptors of the shared memory; none until it is there, and after `close`.
        segment_bytes: size of each of its memfds but the last.
        shared_at: where the shared memory starts in the region.
    """

    __slots__ = ("fds", "segment_bytes", "shared_at")

    def __init__(self, table_bytes: int, value_bytes: int) -> None:
        self.fds: list[int] = []
        self.shared_at = shared_region_start(table_bytes)
        size = self.shared_at + value_bytes
        super().__init__(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), size)
        self.segment_bytes = shared_memory.segment_bytes(value_bytes)

    @property
    def memory_count(self) -> int:
        """Number of memfds that the shared memory has, or will have."""
        return len(shared_memory.segment_sizes(self.size - self.shared_at))

    def adopt(self, fds: Sequence[int]) -> None:
        """Take over file descriptors, whatever comes of it.

        Raises:
            InvalidArgumentError: they are not sealed memory of the sizes announced.
            OSError: the system refuses the mapping.
        """
        sizes = shared_memory.segment_sizes(self.size - self.shared_at)
        try:
            if len(fds) != len(sizes):
                raise InvalidArgumentError(f"{len(fds)} memfds were sent; expected {len(sizes)}", field="send_fds")
            for number, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
                shared_memory.check(fd, size)
                if not isinstance(self._memory, mmap.mmap):
                    raise OSError("the region is closed")
                map_over(self._memory, self.shared_at + number * self.segment_bytes, fd, size)
        except BaseException:
            shared_memory.close_all(fds)
            raise
        self.fds = list(fds)

    def read_into(self, target: memoryview, start: int) -> None:
        """Copy bytes from `start` on into `target`, all of tables or all of values.

        The system copies those in shared memory from its files: reading them where they are mapped costs a page fault
        for every few pages.

        Raises:
            OSError: the shared memory cannot be read.
        """
        if start < self.shared_at:
            target[:] = self.view()[start : start + len(target)]
            return
        at = start - self.shared_at
        while target:
            number, offset = divmod(at, self.segment_bytes)
            count = os.preadv(self.fds[number], [target[: self.segment_bytes - offset]], offset)
            if not count:
                raise OSError(errno.EIO, f"shared memory of a put ends {len(target)} bytes early")
            at, target = at + count, target[count:]

    def __del__(self) -> None:
        shared_memory.close_all(self.fds)  # of a service that was stopped with its puts

    def close(self) -> None:
        """Let go of the memory: it is freed when no reader has it mapped any more."""
        super().close()
        fds, self.fds = self.fds, []
        if self.size < _CLOSED_ASIDE_FROM_BYTES:
            shared_memory.close_all(fds)
        else:
            _CLOSING.submit(shared_memory.close_all, fds)


def shared_region_start(table_bytes: int) -> int:
    """Return where shared memory starts behind tables of this size: at the next page."""
    return -(-table_bytes // shared_memory.PAGE_BYTES) * shared_memory.PAGE_BYTES
