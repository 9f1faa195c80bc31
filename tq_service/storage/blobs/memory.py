"""Blobs, the bytes of one put each: what the index asks of a place for them, and the places in memory.

The index allocates a blob, writes it from its beginning to its end, pins it while it is read, and releases it once; the
store gives the bytes back when it is released and no longer pinned. A new place is a `BlobStore` in a file, which
`server/app.py` chooses and `tests/storage/test_blob_stores.py` tests. A store declares what else it can do:

- `is_shared`: clients of this host write its blobs, and map them (`Blob.shared`, in `shared.py`).
- `is_durable`: its blobs outlive the process once they are flushed; so each begins with the tables of its put.

And each blob says whether its bytes are memory of this process (`is_local`): the event loop reads and writes those
through `view`. All others are read by threads, and written with `BlobStore.write`.

Memory is used again: freshly mapped memory costs more than the copy into it.
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
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

from tq_service.errors import QuotaExceededError

RETRY_AFTER_SECONDS: Final = 1.0
SMALL_BYTES: Final = 64 << 10
"""Blobs of fewer bytes come from malloc, and go into the journal whole where there is one."""

PIECE_BYTES: Final = 1 << 20
"""Of text, checked in one step: some 2 ms at most, in which no other thread runs."""

UNMAPPED_IN_BACKGROUND_FROM_BYTES: Final = 8 << 20
"""The system takes 20 ms and more to free a GiB: too long for the event loop."""

BACKGROUND: Final = ThreadPoolExecutor(1, thread_name_prefix="tq-close")
_TEMPORARY: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
_HUGE_PAGES_FROM_BYTES: Final = 4 << 20
_CLASSES_PER_DOUBLING: Final = 8
_HALF_LIFE_SECONDS: Final = 2.5
NO_FD: Final = -1
"""In place of the file descriptor of memory that is closed, or has yet to come."""

T = TypeVar("T")
Buffer: TypeAlias = memoryview | bytes | bytearray
Memory: TypeAlias = Buffer | mmap.mmap
Span: TypeAlias = tuple[int, int]
"""Where bytes start in a blob, and how many they are."""


class Session(Protocol):
    """A session whose client may have mapped a region."""

    def note_dropped(self, region: int) -> None:
        """Take note that a region will not be used again."""


class SharedMemory:
    """Memory with a file descriptor, which clients may map to read it.

    Args:
        fd: belongs to this object.
        size: of the memory; its owner maps it over the range of addresses reserved here.

    Attributes:
        fd: as above.
        memory: this process's mapping.
        number: names a region; 0 for sealed memory.
    """

    __slots__ = ("fd", "memory", "number")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.number = 0
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def lease(self, session: Session) -> None:
        """Begin a lease of a client; sealed memory needs none, since its bytes never change."""

    def end_lease(self, *, is_released: bool) -> None:
        """End one; `is_released`: its client no longer uses the memory."""

    def remove(self) -> None:
        """Close and unmap it; the system frees the memory with its last mapping elsewhere."""
        unmap(self.memory)
        fd, self.fd = self.fd, NO_FD
        if fd != NO_FD:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", NO_FD) != NO_FD:
            os.close(self.fd)  # of a service that was stopped with its puts


class Blob:
    """The bytes of one put, as its store knows them. Confined to the event loop.

    Args:
        store: what allocates it.
        size: bytes allocated.
        memory: what has them, as large at least; of a subclass that is not local nothing.
        backing: what goes back to the pool of its store with it; None: nothing does.

    Attributes:
        is_local: whether its bytes are memory of this process.
        number: what names it after a restart; 0: nothing does.
        checksum: XXH3 of what was written and filled, from its beginning on, where it has a number; else 0.
        store, size, memory, backing: as above.
        charge: bytes of the quota that it takes until it is freed; its owner may change them.
        is_damaged: whether what is behind it is not to be used again.
        shared: what clients of this host map; None: they cannot.
        tables: memory of the tables of its put; None: it is local and begins with them, or was recovered and not read.
        copy: what outlives the process in its place, freed with it.
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
        """Return its bytes, writable while its put is received; only if it `is_local`."""
        return memoryview(self.memory)[: self.size]

    def read_into(self, target: memoryview, start: int) -> None:
        """Copy bytes from `start` on until `target` is full; any thread may while it is pinned.

        Raises:
            OSError: they cannot be read.
        """
        target[:] = self.view()[start : start + len(target)]

    def read_slices(self, slices: Iterable[tuple[int, memoryview]]) -> None:
        """Copy bytes into several targets, each from its own start on; see `read_into`."""
        for start, target in slices:
            self.read_into(target, start)

    def write_from(self, data: Buffer, start: int) -> None:
        """Copy bytes to `start` and beyond; any thread may while it is pinned.

        Raises:
            OSError: they cannot be written.
        """
        self.view()[start : start + len(data)] = data

    def fill(self, start: int, end: int, receive: Callable[[memoryview], None]) -> None:
        """Have bytes received into it; several threads may, each its own, while it is pinned.

        Args:
            start: where they begin.
            end: where they end.
            receive: fills memory with the next of them, and may raise.

        Raises:
            UnavailableError, DiskFullError: they cannot be written; the put is aborted.
        """
        receive(self.view()[start:end])

    def read_back(self, start: int) -> Iterator[tuple[int, memoryview]]:
        """Read all that was filled, from `start` on, in a thread; only then the checksum includes it.

        Yields:
            Where each piece starts, and its bytes, in order.

        Raises:
            UnavailableError: it cannot be read.
        """
        view = self.view()
        for at in range(start, self.size, PIECE_BYTES):
            yield at, view[at : at + PIECE_BYTES]

    @property
    def is_pinned(self) -> bool:
        """Whether its bytes are in use."""
        return self._pin_count > 0

    def pin(self) -> None:
        """Lease its bytes to a reader or a thread: they stay, even if it is released."""
        self._pin_count += 1

    def unpin(self) -> None:
        """End a lease."""
        self._pin_count -= 1
        if self._is_released and not self._pin_count:
            self.store.free(self)

    def close(self) -> None:
        """Let go of the memory, for its store; views that are left keep it."""
        self.memory = b""

    def release(self) -> None:
        """Give its bytes back, at once or when its last reader is done; a second call does nothing."""
        if not self._is_released:
            self._is_released = True
            if not self._pin_count:
                self.store.free(self)


class BlobStore(ABC):
    """A place for the bytes of puts. Confined to one event loop.

    Attributes:
        on_freed: called with the charge of each blob whose bytes are free again.
        pooled_bytes: bytes held for reuse.
    """

    is_shared: ClassVar[bool] = False
    is_durable: ClassVar[bool] = False

    on_freed: Callable[[int], None] = staticmethod(lambda _: None)
    pooled_bytes = 0

    @abstractmethod
    async def allocate(self, size: int) -> Blob:
        """Return a blob of `size` bytes; what they are is not defined.

        Raises:
            QuotaExceededError, DiskFullError: there is no space for them.
            UnavailableError: they cannot be had now.
        """

    async def write(self, blob: Blob, start: int, data: Buffer) -> None:
        """Write bytes of a blob, which may be reused when this returns.

        Raises:
            UnavailableError, DiskFullError: they cannot be written; the put is aborted.
        """
        blob.write_from(data, start)

    async def flush(self, blob: Blob) -> None:  # noqa: B027  (most stores are memory)
        """Wait until all that was written of a blob outlives the process, where the store `is_durable`.

        Raises:
            OSError: it cannot be written.
        """

    @abstractmethod
    def free(self, blob: Blob) -> None:
        """Give back a blob that is no longer read, now or soon; `on_freed` once it is. Called by the blob."""

    def trim(self, elapsed_seconds: float) -> None:  # noqa: B027  (most stores have nothing to trim)
        """Give back some of what is held for reuse and was not needed in this time."""

    async def close(self) -> None:  # noqa: B027  (most stores have nothing to close)
        """End what the store itself has, such as threads or connections; its blobs may still be released."""


def is_temporary(error: OSError) -> bool:
    """Whether an error says that the process lacks files or memory now, and nothing of what is on the disk."""
    return error.errno in _TEMPORARY


async def in_thread(
    executor: Executor | None,
    work: Callable[..., T],
    *args: object,
    pinned: Sequence[Blob] = (),
    then: Callable[[T], None] | None = None,
) -> T:
    """Return what a thread returns; it goes on where the caller is cancelled.

    Args:
        executor: has the threads; None: those of the loop.
        work: what it does.
        args: what with.
        pinned: blobs that it works on, which stay until it is done.
        then: called with what it returns, in the event loop, even if the caller no longer waits.
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


# Memory of this process


class Removable(Protocol):
    """What a thread makes for a blob, and removes."""

    capacity: int

    def remove(self) -> None:
        """Give it up; it may block."""


BackingT = TypeVar("BackingT")
RemovableT = TypeVar("RemovableT", bound=Removable)


class PooledStore(BlobStore, Generic[BackingT]):
    """A store that recycles what is behind its blobs, in size classes.

    Used and pooled bytes together never exceed the high-water mark of used bytes; the mark sinks with every `trim`, so
    that memory, or disk, is given back in time.

    Attributes:
        used_bytes: capacity of what blobs use.
    """

    def __init__(self) -> None:
        self._pool: dict[int, list[BackingT]] = {}
        self._high_water_bytes = 0
        self.used_bytes = 0

    @abstractmethod
    def _make(self, capacity: int) -> BackingT:
        """Return a new backing."""

    @abstractmethod
    def _wrap(self, backing: BackingT, size: int) -> Blob:
        """Return a blob that uses a backing; where that fails, the backing is dropped."""

    @abstractmethod
    def _drop(self, backing: BackingT) -> None:
        """Give up a backing."""

    def allocate_now(self, size: int) -> Blob:
        """Return a blob of `size` bytes without waiting.

        Raises:
            OSError: there is no memory for them.
        """
        if size < SMALL_BYTES:
            return Blob(self, size, bytearray(size))
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

    def _use(self, backing: BackingT, size: int) -> Blob:
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
        """Let the high-water mark sink towards what is used, and give up what is pooled above it."""
        kept = (self._high_water_bytes - self.used_bytes) * 0.5 ** (elapsed_seconds / _HALF_LIFE_SECONDS)
        self._high_water_bytes = self.used_bytes + int(kept)
        self._shrink()

    def _shrink(self) -> None:
        self.give_up(self.used_bytes + self.pooled_bytes - self._high_water_bytes)

    def give_up(self, size: int) -> None:
        """Drop what is pooled, largest first, until that was at least so many bytes or nothing is left."""
        target = self.pooled_bytes - size
        while self.pooled_bytes and self.pooled_bytes > target:
            backing = self._recycled(max(self._pool))
            if backing is not None:
                self._drop(backing)


class ThreadedStore(PooledStore[RemovableT]):
    """One whose backings are made by threads, since that takes long."""

    _executor: ThreadPoolExecutor

    async def _backing(self, capacity: int) -> RemovableT:
        """Return a backing that was recycled or made; where none can be made, what is held for reuse is removed first.

        Raises:
            OSError: there is no space for it.
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
        """Have one more backing for reuse."""
        await in_thread(self._executor, self._make, capacity, then=lambda made: self.recycle(made, made.capacity))

    def _may_help(self, error: OSError) -> bool:
        """Whether a backing might be made after such an error if others were removed."""
        return True

    async def close(self) -> None:
        await asyncio.to_thread(self._executor.shutdown)


def _remove_all(backings: Iterable[Removable]) -> None:
    for backing in backings:
        backing.remove()


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

    def _wrap(self, backing: mmap.mmap, size: int) -> Blob:
        return Blob(self, size, backing, backing)

    def _drop(self, backing: mmap.mmap) -> None:
        if len(backing) >= UNMAPPED_IN_BACKGROUND_FROM_BYTES:  # a smaller one is unmapped with its last reference
            BACKGROUND.submit(unmap, backing)


def size_class(size: int) -> int:
    """Return the capacity of the backing that holds `size` bytes: at most an eighth larger."""
    step = 1 << max((size - 1).bit_length() - _CLASSES_PER_DOUBLING.bit_length(), 12)
    return -(-size // step) * step


def unmap(memory: mmap.mmap) -> None:
    """Give memory back to the system; where views of it are left it goes with the last of them."""
    with suppress(BufferError):
        memory.close()


def no_memory(size: int, error: BaseException) -> QuotaExceededError:
    """Return the error of a put for which the system has no memory."""
    return QuotaExceededError(
        f"the machine has no memory for {size} bytes ({error}); lower max_bytes below what it has",
        retry_after_seconds=RETRY_AFTER_SECONDS,
        metadata={"limit_name": "memory", "got": str(size)},
    )
