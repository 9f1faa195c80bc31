"""What the index asks of a place for bytes. A new one is a `BlobStore` in a file, and a line in the registry.

A blob has the bytes of one put. The index allocates it, writes it from its beginning to its end, pins it while it is
read, and releases it once; the store gives the bytes back when it is released and no longer pinned.

What a store can do beyond that, it says:

- `adopts`: its blobs take shared memory that a client has made (`Blob.adopt`), instead of being written.
- `DurableBlobStore`: its blobs outlive the process; so each begins with the tables of its put (`has_tables`).

And each blob says whether its bytes are memory of this process (`is_local`): the event loop reads and writes those
through `view`. All others are read by threads, and written with `BlobStore.write`.
"""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import ClassVar, Final, TypeAlias, TypeVar

RETRY_AFTER_SECONDS: Final = 1.0
_TEMPORARY: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
T = TypeVar("T")
Span: TypeAlias = tuple[int, int]
"""Where bytes start in a blob, and how many they are."""


class Blob:
    """The bytes of one put, as its store knows them. Confined to the event loop.

    Attributes:
        is_local: whether its bytes are memory of this process.
        store: what allocated it.
        size: bytes allocated.
        charge: bytes of the quota that it takes until it is freed; its owner may change them.
        is_damaged: whether what is behind it is not to be used again.
        fds: file descriptors of its memory, where that is shared.
        segment_bytes: size of what is behind each of them but the last.
        copy: what outlives the process in its place, freed with it.
    """

    __slots__ = ("_is_released", "_pin_count", "charge", "copy", "is_damaged", "size", "store")

    is_local: ClassVar[bool] = False
    fds: Sequence[int] = ()
    segment_bytes = 0

    @property
    def number(self) -> int:
        """What names it after a restart; 0: nothing does."""
        return 0

    def __init__(self, store: BlobStore, size: int) -> None:
        self.store = store
        self.size = size
        self.charge = size
        self.copy: Blob | None = None
        self.is_damaged = False
        self._pin_count = 0
        self._is_released = False

    def view(self) -> memoryview:
        """Return its bytes, writable while its put is received; only if it `is_local`."""
        raise TypeError(f"a blob of {type(self.store).__name__} has no local view")

    def tables(self) -> memoryview | bytearray:
        """Return what it begins with, the tables of its put, from memory; only if its store `has_tables`.

        Raises:
            UnavailableError: they are in a file that has not been read since the start.
        """
        return self.view()

    def hold_tables(self, size: int) -> None:
        """Have memory for the tables of a new put, which are written to the blob besides."""

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

    def write_from(self, data: memoryview | bytes | bytearray, start: int) -> None:
        """Copy bytes to `start` and beyond; any thread may while it is pinned.

        Raises:
            OSError: they cannot be written.
        """
        self.view()[start : start + len(data)] = data

    def adopt(self, fds: Sequence[int]) -> None:
        """Take over file descriptors of its memory, whatever comes of it; only where its store `adopts`.

        Raises:
            InvalidArgumentError: they are not sealed memory of the sizes announced.
            OSError: the system refuses the mapping.
        """
        raise TypeError(f"{type(self.store).__name__} takes no shared memory")

    def pin(self) -> None:
        """Keep its bytes for a reader, even if it is released."""
        self._pin_count += 1

    def unpin(self) -> None:
        """End what `pin` began."""
        self._pin_count -= 1
        if self._is_released and not self._pin_count:
            self.store.free(self)

    def release(self) -> None:
        """Give its bytes back, at once or when its last reader is done; a second call does nothing."""
        if not self._is_released:
            self._is_released = True
            if not self._pin_count:
                self.store.free(self)


CopySource: TypeAlias = tuple[memoryview, Blob, Sequence[Span]]
"""What a blob is a copy of: a beginning, and after it spans of another blob."""


class BlobStore(ABC):
    """A place for the bytes of puts. Confined to one event loop.

    Attributes:
        on_freed: called with the charge of each blob whose bytes are free again.
        pooled_bytes: bytes held for reuse.
    """

    adopts: ClassVar[bool] = False
    has_tables: ClassVar[bool] = False

    on_freed: Callable[[int], None] = staticmethod(lambda _: None)
    pooled_bytes = 0

    @abstractmethod
    async def allocate(self, size: int) -> Blob:
        """Return a blob of `size` bytes; what they are is not defined.

        Raises:
            QuotaExceededError, DiskFullError: there is no space for them.
            UnavailableError: they cannot be had now.
        """

    @abstractmethod
    async def write(self, blob: Blob, start: int, data: memoryview | bytes | bytearray) -> None:
        """Write bytes of a blob, which may be reused when this returns.

        Raises:
            UnavailableError, DiskFullError, DiskFailedError: they cannot be written; the put is aborted.
        """

    @abstractmethod
    def free(self, blob: Blob) -> None:
        """Give back a blob that is no longer read, now or soon; `on_freed` once it is. Called by the blob."""

    def allocate_now(self, size: int) -> Blob:
        """Return a blob of `size` bytes in memory without waiting; only if clients do not make them.

        Raises:
            OSError: there is no memory for them.
        """
        raise TypeError(f"{type(self).__name__} makes no blobs without waiting")

    def trim(self, elapsed_seconds: float) -> None:  # noqa: B027  (most stores have nothing to trim)
        """Give back some of what is held for reuse and was not needed in this time."""

    async def close(self) -> None:  # noqa: B027  (most stores have nothing to close)
        """End what the store itself has, such as threads or connections; its blobs may still be released."""


class DurableBlobStore(BlobStore):
    """A store whose blobs outlive the process: by their number, or, without one, with the record of their put.

    Blobs begin with the tables of their puts, so that one number and one checksum stand for all of a put.
    """

    has_tables = True

    @abstractmethod
    def inline(self, blob: Blob) -> bytes | bytearray:
        """Return all bytes of a blob that has no number."""

    @abstractmethod
    async def flush(self, blob: Blob, source: CopySource | None = None) -> int | None:
        """Wait until a blob outlives this process; where the caller is cancelled, the work ends by itself.

        Args:
            blob: all of it is written, but for a copy.
            source: what it is to be a copy of; None: of nothing.

        Returns:
            The checksum of a copy.

        Raises:
            OSError: the bytes cannot be written.
        """

    @abstractmethod
    async def checksum(self, blob: Blob, tables_bytes: int) -> int:
        """Return the checksum of a recovered blob that has a number, and have its tables in memory from now on.

        Args:
            blob: the blob; its bytes are read as they are stored.
            tables_bytes: size of the tables that it begins with.

        Raises:
            OSError: they cannot be read.
        """

    @abstractmethod
    def recover(self, blobs: Iterable[tuple[int, int]]) -> list[Blob | None]:
        """Take over the blobs of an earlier process; those that are not listed are there for reuse.

        Args:
            blobs: the number and size of each. Of those that have one number the first has the bytes.

        Returns:
            The blobs; None for one that is missing.
        """


def is_temporary(error: OSError) -> bool:
    """Whether an error says that the process lacks files or memory now, and nothing of what is on the disk."""
    return error.errno in _TEMPORARY


async def in_thread(
    executor: Executor | None,
    work: Callable[..., T],
    *args: object,
    pinned: Sequence[Blob],
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
