"""Blobs in memory of this process, reused: freshly mapped memory costs more than the copy into it."""

from __future__ import annotations

import mmap
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Generic, TypeVar

from tq_service.errors import QuotaExceededError
from tq_service.storage.blobs.base import RETRY_AFTER_SECONDS, Blob, BlobStore

SMALL_BYTES: Final = 64 << 10
"""Blobs of fewer bytes come from malloc, and go into the journal whole where there is one."""

UNMAPPED_IN_BACKGROUND_FROM_BYTES: Final = 8 << 20
"""The system takes 20 ms and more to free a GiB: too long for the event loop."""

BACKGROUND: Final = ThreadPoolExecutor(1, thread_name_prefix="tq-close")
_HUGE_PAGES_FROM_BYTES: Final = 4 << 20
_CLASSES_PER_DOUBLING: Final = 8
_HALF_LIFE_SECONDS: Final = 2.5
BackingT = TypeVar("BackingT")


def size_class(size: int) -> int:
    """Return the capacity of the backing that holds `size` bytes: at most an eighth larger."""
    step = 1 << max((size - 1).bit_length() - _CLASSES_PER_DOUBLING.bit_length(), 12)
    return -(-size // step) * step


def unmap(memory: mmap.mmap) -> None:
    """Give memory back to the system; where views of it are left it goes with the last of them."""
    with suppress(BufferError):
        memory.close()


class LocalBlob(Blob):
    """A blob whose bytes are memory of this process."""

    __slots__ = ("_memory",)

    is_local = True

    def __init__(self, store: BlobStore, size: int, memory: bytes | bytearray | mmap.mmap) -> None:
        super().__init__(store, size)
        self._memory = memory

    def memory(self) -> bytes | bytearray | mmap.mmap:
        """Return what it holds, at least `size` bytes."""
        return self._memory

    def view(self) -> memoryview:
        return memoryview(self.memory())[: self.size]

    def close(self) -> None:
        """Let go of the memory; views that are left keep it."""
        self._memory = b""


class LocalStore(BlobStore):
    """A store whose blobs are written and read where they are."""

    async def write(self, blob: Blob, start: int, data: memoryview | bytes | bytearray) -> None:
        blob.write_from(data, start)


class PooledBlob(LocalBlob, Generic[BackingT]):
    """A blob with a backing that goes back to the pool of its store."""

    __slots__ = ("backing",)

    def __init__(self, store: BlobStore, size: int, memory: bytes | mmap.mmap, backing: BackingT) -> None:
        super().__init__(store, size, memory)
        self.backing = backing


class PooledStore(LocalStore, Generic[BackingT]):
    """A store that recycles what is behind its blobs, in size classes.

    Used and pooled bytes together never exceed the high-water mark of used bytes; the mark sinks with every `trim`, so
    that memory, or disk, is given back in time.
    """

    def __init__(self) -> None:
        self._pool: dict[int, list[BackingT]] = {}
        self._high_water_bytes = 0
        self.used_bytes = 0

    @abstractmethod
    def _make(self, capacity: int) -> BackingT:
        """Return a new backing."""

    @abstractmethod
    def _wrap(self, backing: BackingT, size: int) -> PooledBlob[BackingT]:
        """Return a blob that uses a backing; where that fails, the backing is dropped."""

    def _drop(self, backing: BackingT) -> None:
        """Give up a backing; memory is unmapped with its last reference."""

    def allocate_now(self, size: int) -> LocalBlob:
        if size < SMALL_BYTES:
            return LocalBlob(self, size, bytearray(size))
        capacity = size_class(size)
        return self._use(self._recycled(capacity) or self._make(capacity), size)

    def _recycled(self, capacity: int) -> BackingT | None:
        """Return a backing that is held for reuse, None where there is none of that capacity."""
        pooled = self._pool.get(capacity)
        if pooled is None:
            return None
        self.pooled_bytes -= capacity
        backing = pooled.pop()
        if not pooled:
            del self._pool[capacity]
        return backing

    def _use(self, backing: BackingT, size: int) -> PooledBlob[BackingT]:
        """Return a blob of a backing that was recycled or made for it."""
        blob = self._wrap(backing, size)
        self.used_bytes += size_class(size)
        self._high_water_bytes = max(self._high_water_bytes, self.used_bytes)
        self._shrink()
        return blob

    def recycle(self, backing: BackingT, capacity: int) -> None:
        """Hold a backing that no put uses for the next one."""
        self._pool.setdefault(capacity, []).append(backing)
        self.pooled_bytes += capacity

    def free(self, blob: Blob) -> None:
        if isinstance(blob, LocalBlob):
            blob.close()
        if isinstance(blob, PooledBlob):
            capacity = size_class(blob.size)
            self.used_bytes -= capacity
            if blob.is_damaged:
                self._drop(blob.backing)
            else:
                self.recycle(blob.backing, capacity)
                self._shrink()
        self.on_freed(blob.charge)

    def trim(self, elapsed_seconds: float) -> None:
        """Let the high-water mark sink towards what is used, and give up what is pooled above it."""
        kept = (self._high_water_bytes - self.used_bytes) * 0.5 ** (elapsed_seconds / _HALF_LIFE_SECONDS)
        self._high_water_bytes = self.used_bytes + int(kept)
        self._shrink()

    def _shrink(self) -> None:
        """Drop what is pooled, largest first, until the high-water mark holds."""
        while self.pooled_bytes and self.used_bytes + self.pooled_bytes > self._high_water_bytes:
            capacity = max(self._pool)
            backing = self._recycled(capacity)
            if backing is not None:
                self._drop(backing)


class MemoryBlobs(PooledStore[mmap.mmap]):
    """Blobs in memory: small ones from malloc, larger ones in anonymous mappings."""

    async def allocate(self, size: int) -> Blob:
        try:
            return self.allocate_now(size)
        except (OSError, MemoryError) as error:
            raise no_memory(size, error) from error

    def _make(self, capacity: int) -> mmap.mmap:
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if capacity >= _HUGE_PAGES_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _drop(self, backing: mmap.mmap) -> None:
        if len(backing) >= UNMAPPED_IN_BACKGROUND_FROM_BYTES:
            BACKGROUND.submit(unmap, backing)

    def _wrap(self, backing: mmap.mmap, size: int) -> PooledBlob[mmap.mmap]:
        return PooledBlob(self, size, backing, backing)


def no_memory(size: int, error: BaseException) -> QuotaExceededError:
    """Return the error of a put for which the machine has no memory."""
    return QuotaExceededError(
        f"the machine has no memory for {size} bytes ({error}); lower max_bytes below what it has",
        retry_after_seconds=RETRY_AFTER_SECONDS,
        metadata={"limit_name": "memory", "got": str(size)},
    )
