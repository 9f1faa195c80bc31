"""Blobs in memory that clients of this host have made and sent: sealed memfds."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from tq_service.errors import InvalidArgumentError
from tq_service.storage.blobs.base import Blob
from tq_service.storage.blobs.memory import (
    BACKGROUND,
    UNMAPPED_IN_BACKGROUND_FROM_BYTES,
    LocalBlob,
    LocalStore,
    no_memory,
    unmap,
)
from tq_service.wire import shared_memory
from tq_service.wire.shared_memory import map_over


class MemfdBlob(LocalBlob):
    """Shared, read-only memory. Its range of addresses exists from `allocate` on; memfds are mapped there by `map_fds`.

    Attributes:
        fds: file descriptors of its memory; none before `map_fds` and after `close`.
        segment_bytes: size of each of its memfds but the last.
    """

    __slots__ = ("fds", "segment_bytes")

    def __init__(self, store: MemfdBlobs, size: int) -> None:
        self.fds: list[int] = []
        super().__init__(store, size, mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.segment_bytes = shared_memory.segment_bytes(size)

    @property
    def memory_count(self) -> int:
        """Number of memfds that it has, or will have."""
        return len(shared_memory.segment_sizes(self.size))

    def map_fds(self, fds: Sequence[int]) -> None:
        """Map file descriptors, see `Blob.map_fds`."""
        sizes = shared_memory.segment_sizes(self.size)
        try:
            if len(fds) != len(sizes):
                raise InvalidArgumentError(f"{len(fds)} memfds were sent; expected {len(sizes)}", field="send_fds")
            for number, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
                shared_memory.check(fd, size)
                memory = self.memory()
                if not isinstance(memory, mmap.mmap):
                    raise OSError("the blob is closed")
                map_over(memory, number * self.segment_bytes, fd, size)
        except BaseException:
            shared_memory.close_all(fds)
            raise
        self.fds = list(fds)

    def read_into(self, target: memoryview, start: int) -> None:
        """Copy bytes from `start` on into `target`.

        The system copies them from its files: reading them where they are mapped costs a page fault for every few
        pages.

        Raises:
            OSError: the shared memory cannot be read.
        """
        while target:
            number, offset = divmod(start, self.segment_bytes)
            part = target[: self.segment_bytes - offset]
            shared_memory.read_into(self.fds[number], part, offset)
            start, target = start + len(part), target[len(part) :]

    def __del__(self) -> None:
        shared_memory.close_all(self.fds)  # of a service that was stopped with its puts

    def close(self) -> None:
        """Let go of the memory: it is freed when no reader has it mapped any more."""
        memory, fds = self.memory(), self.fds
        super().close()
        self.fds = []
        if self.size >= UNMAPPED_IN_BACKGROUND_FROM_BYTES and isinstance(memory, mmap.mmap):
            BACKGROUND.submit(unmap, memory)
            BACKGROUND.submit(shared_memory.close_all, fds)  # the last one to close a memfd frees its pages
        else:
            shared_memory.close_all(fds)


class MemfdBlobs(LocalStore):
    """Blobs in shared memory.

    Attributes:
        memory_count: number of their memfds.
    """

    maps_fds = True
    memory_count = 0

    async def allocate(self, size: int) -> MemfdBlob:
        try:
            blob = MemfdBlob(self, size)
        except (OSError, MemoryError) as error:
            raise no_memory(size, error) from error
        self.memory_count += blob.memory_count
        return blob

    def free(self, blob: Blob) -> None:
        if isinstance(blob, MemfdBlob):
            self.memory_count -= blob.memory_count
            blob.close()
        if blob.copy is not None:
            blob.copy.release()
        self.on_freed(blob.charge)
