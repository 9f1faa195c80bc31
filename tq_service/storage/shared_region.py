"""The region of a put whose values are in memory that its client has handed over."""

from __future__ import annotations

import mmap
import os

from tq_service.storage.region import Region
from tq_service.wire import shared_memory


class SharedRegion(Region):
    """One range of addresses: first the tables, this process's own, then the values, shared and read-only.

    So those who read a put need not know which kind of region it has. The range exists from the reservation on; the
    shared memory is put into its place when it is handed over.

    Args:
        table_bytes: size of the tables.
        value_bytes: size of the shared memory.

    Attributes:
        fd: file descriptor of the shared memory; -1 until it is there, and after `close`.
        shared_at: where the shared memory starts in the region.
    """

    __slots__ = ("fd", "shared_at")

    def __init__(self, table_bytes: int, value_bytes: int) -> None:
        self.shared_at = shared_region_start(table_bytes)
        size = self.shared_at + value_bytes
        super().__init__(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), size, 0)
        self.fd = -1

    def adopt(self, fd: int) -> None:
        """Take over a file descriptor, whatever comes of it.

        Raises:
            InvalidArgumentError: it is not sealed memory of the size announced.
            OSError: the system refuses the mapping.
        """
        try:
            size = self.size - self.shared_at
            shared_memory.check(fd, size)
            if not isinstance(self._memory, mmap.mmap):
                raise OSError("the region is closed")
            shared_memory.map_over(self._memory, self.shared_at, fd, size)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd

    def close(self) -> None:
        """Let go of the memory: it is freed when no reader has it mapped any more."""
        super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def shared_region_start(table_bytes: int) -> int:
    """Return where shared memory starts behind tables of this size: at the next page."""
    return -(-table_bytes // shared_memory.PAGE_BYTES) * shared_memory.PAGE_BYTES
