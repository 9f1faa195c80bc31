"""The blob store interface and the in-memory blob stores. A blob contains the bytes of one put.

The index allocates a blob, writes it from start to end, pins it during reads, and releases it once. The store frees
the bytes when the blob has been released and is no longer pinned. To add a kind of store, implement `BlobStore` in a
new file, select it in `server/app.py`, and test it in `tests/storage/test_blob_stores.py`. A store declares its
capabilities:

- `is_shared`: clients on this host write and map the store's blobs (`Blob.shared`, in `shared.py`).
- `is_durable`: flushed blobs outlive the process, so each blob begins with the tables of its put.

Each blob declares whether its bytes are in this process's memory (`is_local`). The event loop reads and writes the
bytes of a local blob through `view`. The bytes of other blobs are read by threads and written by `BlobStore.write`.

Memory is reused because mapping new memory costs more than copying into existing memory.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

from tq_service.errors import QuotaExceededError

RETRY_AFTER_SECONDS: Final = 1.0
SMALL_BYTES: Final = 64 << 10
"""Blobs smaller than this size in bytes are allocated with malloc and, if there is a journal, stored in it."""

PIECE_BYTES: Final = 1 << 20
"""Number of text bytes that are validated in a single step. A step blocks all other threads for at most 2 ms."""

UNMAPPED_IN_BACKGROUND_FROM_BYTES: Final = 8 << 20
"""Minimum size in bytes of mappings that are unmapped in a background thread. Freeing 1 GiB takes at least 20 ms."""

BACKGROUND: Final = ThreadPoolExecutor(1, thread_name_prefix="tq-close")
_TEMPORARY: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
_HUGE_PAGES_FROM_BYTES: Final = 4 << 20
_CLASSES_PER_DOUBLING: Final = 8
_HALF_LIFE_SECONDS: Final = 2.5
NO_FD: Final = -1
"""Placeholder for a file descriptor that has been closed or has not been received yet."""

T = TypeVar("T")
Buffer: TypeAlias = memoryview | bytes | bytearray
Memory: TypeAlias = Buffer | mmap.mmap
Span: TypeAlias = tuple[int, int]
"""Start and size of a byte range in a blob."""


class Session(Protocol):
    """Interface of a session whose client might have mapped some regions."""

    def note_dropped(self, region: int) -> None:
        """Record that a region will not be used again."""


class SharedMemory:
    """Memory with a file descriptor, which clients can map for reading.

    Args:
        fd: file descriptor of the memory, owned by this object.
        size: size of the memory in bytes. The constructor reserves an address range of this size, into which the
            caller maps the memory.

    Attributes:
        fd: file descriptor of the memory.
        memory: the memory as mapped into this process.
        number: identifier of a region, or 0 for sealed memory.
    """

    __slots__ = ("fd", "memory", "number")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.number = 0
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def lease(self, session: Session) -> None:
        """Begin a client's lease. Sealed memory needs no lease, because its bytes never change."""

    def end_lease(self, *, is_released: bool) -> None:
        """End a lease. `is_released` is true if the client no longer uses the memory."""

    def remove(self) -> None:
        """Close and unmap the memory. The system frees the memory once no process maps it."""
        unmap(self.memory)
        fd, self.fd = self.fd, NO_FD
        if fd != NO_FD:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", NO_FD) != NO_FD:
            os.close(self.fd)  # the service stopped while a put was still stored in this memory


class Blob:
    """The bytes of a put, managed by a blob store. Blobs are confined to the event loop.

    Args:
        store: store that allocates the blob.
        size: allocated size in bytes.
        memory: memory of at least `size` bytes that contains the blob. The memory is empty if the blob is not local.
        backing: object, if any, that is returned to the store's pool when the blob is freed.

    Attributes:
        is_local: whether the bytes are in this process's memory.
        number: identifier that stays valid after a restart, or 0 if the blob does not outlive the process.
        checksum: XXH3 checksum of all bytes that have been written or filled so far, or 0 if the blob has no number.
        store, size, memory, backing: the constructor's arguments.
        charge: number of bytes that the blob counts against the quota until it is freed. The blob's owner can change
            this number.
        is_damaged: whether the backing is damaged and must not be reused.
        shared: memory that clients on this host can map, or None if they cannot map the blob.
        tables: tables of the put. The value is None if a local blob begins with the tables, or if a recovered blob has
            not been read.
        copy: persistent copy of the blob, which outlives the process. Freeing the blob also frees the copy.
    """

    __slots__ = (
        "_is_released",
        "_pin_count",
        "backing",
        "charge",
        "copy",
        "is_damaged",
        "memory",
        "size",
        "store",
        "tables",
    )

    is_local: ClassVar[bool] = True
    number: int = 0
    checksum: int = 0
    shared: SharedMemory | None = None

    def __init__(self, store: BlobStore, size: int, memory: Memory = b"", backing: Any = None) -> None:
        self.store = store
        self.size = self.charge = size
        self.memory = memory
        self.backing = backing
        self.tables: bytearray | None = None
        self.copy: Blob | None = None
        self.is_damaged = self._is_released = False
        self._pin_count = 0

    def view(self) -> memoryview:
        """Return the blob's bytes, which are writable while the put is being received. Requires `is_local`."""
        return memoryview(self.memory)[: self.size]

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` with the blob's bytes starting at `start`. Safe in any thread while the blob is pinned.

        Raises:
            OSError: the bytes cannot be read.
        """
        target[:] = self.view()[start : start + len(target)]

    def read_slices(self, slices: Iterable[tuple[int, memoryview]]) -> None:
        """Fill several targets with bytes, each from its own start position; see `read_into`."""
        for start, target in slices:
            self.read_into(target, start)

    def write_from(self, data: Buffer, start: int) -> None:
        """Copy `data` into the blob, starting at `start`. Safe in any thread while the blob is pinned.

        Raises:
            OSError: the bytes cannot be written.
        """
        self.view()[start : start + len(data)] = data

    def fill(self, start: int, end: int, receive: Callable[[memoryview], None]) -> None:
        """Receive bytes into a range of the blob. Threads may fill different ranges while the blob is pinned.

        Args:
            start: position of the first byte in the range.
            end: position after the last byte in the range.
            receive: function that fills a buffer with the next bytes of the range. The function may raise any error.

        Raises:
            UnavailableError, DiskFullError: the bytes cannot be written, and the put is aborted.
        """
        receive(self.view()[start:end])

    def read_back(self, start: int) -> Iterator[tuple[int, memoryview]]:
        """In a thread, read back all filled bytes from `start` onward, and add them to the blob's checksum, if any.

        Yields:
            The start and the bytes of each chunk, in order.

        Raises:
            UnavailableError: the bytes cannot be read.
        """
        view = self.view()
        for at in range(start, self.size, PIECE_BYTES):
            yield at, view[at : at + PIECE_BYTES]

    def keep_file(self) -> Path | None:
        """Keep the blob's file unchanged even after the blob is freed.

        Returns:
            The file's path, or None if the blob has no file.
        """
        return None

    @property
    def is_pinned(self) -> bool:
        """Whether a reader or a thread is using the bytes."""
        return self._pin_count > 0

    def pin(self) -> None:
        """Keep the bytes available to a reader or a thread, even if the blob is released."""
        self._pin_count += 1

    def unpin(self) -> None:
        """Undo one call to `pin`."""
        self._pin_count -= 1
        if self._is_released and not self._pin_count:
            self.store.free(self)

    def close(self) -> None:
        """Drop the reference to the memory while the blob is being freed. Existing views keep the memory alive."""
        self.memory = b""

    def release(self) -> None:
        """Free the bytes as soon as the blob is not pinned. Idempotent."""
        if not self._is_released:
            self._is_released = True
            if not self._pin_count:
                self.store.free(self)


class BlobStore(ABC):
    """A store for the bytes of puts. Each store is confined to one event loop.

    Attributes:
        on_freed: function called with the charge of each freed blob.
        pooled_bytes: number of bytes kept for reuse.
    """

    is_shared: ClassVar[bool] = False
    is_durable: ClassVar[bool] = False

    on_freed: Callable[[int], None] = staticmethod(lambda _: None)
    pooled_bytes = 0

    @abstractmethod
    async def allocate(self, size: int) -> Blob:
        """Return a blob of `size` bytes with undefined contents.

        Raises:
            QuotaExceededError, DiskFullError: there is not enough space.
            UnavailableError: the blob cannot be allocated at the moment.
        """

    async def write(self, blob: Blob, start: int, data: Buffer) -> None:
        """Write bytes to a blob. The caller may reuse `data` afterward.

        Raises:
            UnavailableError, DiskFullError: the bytes cannot be written, and the put is aborted.
        """
        blob.write_from(data, start)

    async def flush(self, blob: Blob) -> None:  # noqa: B027  (most stores are in memory)
        """Wait until all bytes of a blob would survive a process crash. Do nothing unless `is_durable` is set.

        Raises:
            OSError: the blob cannot be written.
        """

    @abstractmethod
    def free(self, blob: Blob) -> None:
        """Free a blob without readers, either now or later, and call `on_freed`. Called only by the blob itself."""

    def trim(self, elapsed_seconds: float) -> None:  # noqa: B027  (most stores have nothing to trim)
        """Free some of the pooled bytes that were not needed during the last `elapsed_seconds` seconds."""

    async def close(self) -> None:  # noqa: B027  (most stores have nothing to close)
        """Release the store's own resources, such as threads and connections. Existing blobs can still be released."""


def is_temporary(error: OSError) -> bool:
    """Return whether an error indicates a shortage of file descriptors or memory rather than a disk failure."""
    return error.errno in _TEMPORARY


async def in_thread(
    executor: Executor | None,
    work: Callable[..., T],
    *args: object,
    pinned: Sequence[Blob] = (),
    then: Callable[[T], None] | None = None,
) -> T:
    """Run a function in a thread and return its result. The thread continues even if the caller is cancelled.

    Args:
        executor: executor that provides the thread. Defaults to the event loop's default executor.
        work: function to run.
        args: arguments of the function.
        pinned: blobs used by the function. The blobs stay pinned until the function returns.
        then: function called on the event loop with the result, even if the caller is no longer waiting.
    """

    def end(done: asyncio.Future[T]) -> None:
        if done.exception() is None and then is not None:
            then(done.result())
        for blob in pinned:
            blob.unpin()

    for blob in pinned:
        blob.pin()
    future = asyncio.get_running_loop().run_in_executor(executor, work, *args)
    future.add_done_callback(end)
    return await asyncio.shield(future)


# Stores in this process's memory


class Removable(Protocol):
    """Interface of a backing that a thread creates for a blob and later removes."""

    capacity: int

    def remove(self) -> None:
        """Remove the backing. May block."""


BackingT = TypeVar("BackingT")
RemovableT = TypeVar("RemovableT", bound=Removable)


class PooledStore(BlobStore, Generic[BackingT]):
    """A store that recycles blob backings by size class.

    The sum of used and pooled bytes never exceeds the high-water mark of used bytes. Each call to `trim` lowers the
    mark, so unused memory or disk space is released over time.

    Attributes:
        used_bytes: total capacity of the backings in use.
    """

    def __init__(self) -> None:
        self._pool: dict[int, list[BackingT]] = {}
        self._high_water_bytes = 0
        self.used_bytes = 0

    @abstractmethod
    def _make(self, capacity: int) -> BackingT:
        """Create a backing."""

    @abstractmethod
    def _wrap(self, backing: BackingT, size: int) -> Blob:
        """Return a blob that uses the given backing. On failure, drop the backing."""

    @abstractmethod
    def _drop(self, backing: BackingT) -> None:
        """Drop a backing."""

    def allocate_now(self, size: int) -> Blob:
        """Return a blob of `size` bytes without waiting.

        Raises:
            OSError: there is not enough memory.
        """
        if size < SMALL_BYTES:
            return Blob(self, size, bytearray(size))
        capacity = size_class(size)
        return self._use(self._recycled(capacity) or self._make(capacity), size)

    def _recycled(self, capacity: int) -> BackingT | None:
        """Return a backing with the given capacity from the pool, or None if the pool has none."""
        pooled = self._pool.get(capacity)
        if pooled is None:
            return None
        self.pooled_bytes -= capacity
        backing = pooled.pop()
        if not pooled:
            del self._pool[capacity]
        return backing

    def _use(self, backing: BackingT, size: int) -> Blob:
        """Return a blob that uses a recycled or new backing."""
        blob = self._wrap(backing, size)
        self.used_bytes += size_class(size)
        self._high_water_bytes = max(self._high_water_bytes, self.used_bytes)
        self._shrink()
        return blob

    def recycle(self, backing: BackingT, capacity: int) -> None:
        """Add an unused backing to the pool."""
        self._pool.setdefault(capacity, []).append(backing)
        self.pooled_bytes += capacity

    def free(self, blob: Blob) -> None:
        blob.close()
        if blob.backing is not None:
            capacity = size_class(blob.size)
            self.used_bytes -= capacity
            if blob.is_damaged:
                self._drop(blob.backing)
            else:
                self.recycle(blob.backing, capacity)
                self._shrink()
        self.on_freed(blob.charge)

    def trim(self, elapsed_seconds: float) -> None:
        """Lower the high-water mark toward the number of used bytes, and drop pooled backings that exceed it."""
        kept = (self._high_water_bytes - self.used_bytes) * 0.5 ** (elapsed_seconds / _HALF_LIFE_SECONDS)
        self._high_water_bytes = self.used_bytes + int(kept)
        self._shrink()

    def _shrink(self) -> None:
        self.give_up(self.used_bytes + self.pooled_bytes - self._high_water_bytes)

    def give_up(self, size: int) -> None:
        """Drop pooled backings, largest first, until at least `size` bytes are dropped or the pool is empty."""
        target = self.pooled_bytes - size
        while self.pooled_bytes and self.pooled_bytes > target:
            backing = self._recycled(max(self._pool))
            if backing is not None:
                self._drop(backing)


class ThreadedStore(PooledStore[RemovableT]):
    """A pooled store that creates backings in threads, because creating one is slow."""

    _executor: ThreadPoolExecutor

    async def _backing(self, capacity: int) -> RemovableT:
        """Return a recycled or new backing. If creation fails, remove all pooled backings and retry.

        Raises:
            OSError: there is not enough space.
        """
        while (backing := self._recycled(capacity)) is None:
            try:
                await self._create(capacity)
            except OSError as error:
                unused = [each for pooled in self._pool.values() for each in pooled]
                if not unused or not self._may_help(error):
                    raise
                self._pool.clear()
                self.pooled_bytes = 0
                await in_thread(self._executor, _remove_all, unused)
                await self._create(capacity)
        return backing

    async def _create(self, capacity: int) -> None:
        """Create a backing and add it to the pool."""
        await in_thread(self._executor, self._make, capacity, then=lambda made: self.recycle(made, made.capacity))

    def _may_help(self, error: OSError) -> bool:
        """Return whether removing pooled backings could resolve the error."""
        return True

    async def close(self) -> None:
        await asyncio.to_thread(self._executor.shutdown)


def _remove_all(backings: Iterable[Removable]) -> None:
    for backing in backings:
        backing.remove()


class MemoryBlobs(PooledStore[mmap.mmap]):
    """Blobs in memory. Small blobs are allocated with malloc and larger ones as anonymous mappings."""

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

    def _wrap(self, backing: mmap.mmap, size: int) -> Blob:
        return Blob(self, size, backing, backing)

    def _drop(self, backing: mmap.mmap) -> None:
        if len(backing) >= UNMAPPED_IN_BACKGROUND_FROM_BYTES:  # smaller mappings are unmapped with their last reference
            BACKGROUND.submit(unmap, backing)


def size_class(size: int) -> int:
    """Return the backing capacity for `size` bytes.

    The capacity exceeds `size` by at most an eighth, rounded up to whole pages.
    """
    step = 1 << max((size - 1).bit_length() - _CLASSES_PER_DOUBLING.bit_length(), 12)
    return -(-size // step) * step


def unmap(memory: mmap.mmap) -> None:
    """Unmap memory immediately or, if views of it exist, when the last view is freed."""
    with suppress(BufferError):
        memory.close()


def no_memory(size: int, error: BaseException) -> QuotaExceededError:
    """Return the error for a put that needs more memory than the system has."""
    return QuotaExceededError(
        f"there is not enough memory for {size} bytes ({error}). Set max_bytes below the available memory.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
        metadata={"limit_name": "memory", "got": str(size)},
    )
