"""What the index asks of a place for bytes. A new one is a `BlobStore` in a file, and a line in the registry.

A blob has the bytes of one put. The index allocates it, writes it from its beginning to its end, pins it while it is
read, and releases it once; the store gives the bytes back when it is released and no longer pinned.

What a store can do beyond that, it says:

- `local_view`: its blobs are memory of this process. They are written and read through `Blob.view`, without a copy or a
  turn of the event loop; all others through `write` and `read`.
- `partial_free`: a blob can be replaced by a smaller one at once (`allocate_now`), so that puts with dead cells are
  compacted. Without it a put is freed when its last cell is.
- `adopts`: its blobs take shared memory that a client has made (`Blob.adopt`), instead of being written.
- `DurableBlobStore`: its blobs outlive the process; so each begins with the tables of its put (`has_tables`).
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import ClassVar, Final, TypeAlias

RETRY_AFTER_SECONDS: Final = 1.0
_TEMPORARY: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
Span: TypeAlias = tuple[int, int]
"""Where bytes start in a blob, and how many they are."""


class Blob:
    """The bytes of one put, as its store knows them. Confined to the event loop.

    Attributes:
        store: what allocated it.
        size: bytes allocated.
        charge: bytes of the quota that it takes until it is freed; its owner may change them.
        is_damaged: whether what is behind it is not to be used again.
        fds: file descriptors of its memory, where that is shared.
        segment_bytes: size of what is behind each of them but the last.
        copy: what outlives the process in its place, freed with it.
    """

    __slots__ = ("_is_released", "_pin_count", "charge", "copy", "is_damaged", "size", "store")

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
        """Return its bytes, writable while its put is received; only where its store has `local_view`.

        Raises:
            OSError: they cannot be mapped.
        """
        raise TypeError(f"{type(self.store).__name__} has no local view")

    def read_into(self, target: memoryview, start: int) -> None:
        """Copy bytes from `start` on until `target` is full; any thread may while it is pinned; as `view`."""
        target[:] = self.view()[start : start + len(target)]

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
"""What a blob is a copy of: a beginning, and after it spans of a blob with a local view."""


class BlobStore(ABC):
    """A place for the bytes of puts. Confined to one event loop.

    Attributes:
        on_freed: called with the charge of each blob whose bytes are free again.
        pooled_bytes: bytes held for reuse.
    """

    local_view: ClassVar[bool] = False
    partial_free: ClassVar[bool] = False
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
    async def write(self, blob: Blob, start: int, data: memoryview | bytes) -> None:
        """Write bytes of a blob, which may be reused when this returns.

        Raises:
            UnavailableError, DiskFullError, DiskFailedError: they cannot be written; the put is aborted.
        """

    @abstractmethod
    def read(self, blob: Blob, spans: Sequence[Span]) -> AsyncIterator[memoryview]:
        """Yield the bytes of spans one after the other, in pieces of any size, each to be used before the next.

        Raises:
            UnavailableError: they cannot be read now.
            DataLossError: they are lost.
        """

    @abstractmethod
    def free(self, blob: Blob) -> None:
        """Give back a blob that is no longer read, now or soon; `on_freed` once it is. Called by the blob."""

    def allocate_now(self, size: int) -> Blob:
        """Return a blob of `size` bytes without waiting, for a put to be compacted into; only with `partial_free`.

        Raises:
            OSError: there is no space for them.
        """
        raise TypeError(f"{type(self).__name__} cannot free parts")

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
    async def checksum(self, blob: Blob) -> int:
        """Return the checksum of a blob that has a number, of its bytes as they are stored.

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
