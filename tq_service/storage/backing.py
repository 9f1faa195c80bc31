"""What lets the puts of an engine outlive its process: written down on a disk, or mirrored on other nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from tq_service.storage.blobs.base import Blob
from tq_service.storage.index.put import PendingPut, StoredPut


class Backing(Protocol):
    """What an engine asks for as its puts come and go: `PutJournal` and `Mirror`. Confined to its event loop."""

    @property
    def damaged(self) -> Mapping[bytes, str]:
        """Puts whose bytes are lost, and why; those that were not looked at yet are not known to be."""
        ...

    async def flush(self, pending: PendingPut, deadline: float | None) -> None:
        """Wait until the bytes of a put outlive this process, before it is finished.

        Args:
            pending: all of it is written.
            deadline: until when to wait, by the engine's clock; None: for as long as the caller is not cancelled.
        """
        ...

    def record(self, put_id: bytes, put: StoredPut, checksum: int | None) -> None:
        """Take note that a put is complete: it was flushed."""
        ...

    def drop(self, put_id: bytes, blob: Blob) -> None:
        """Forget a put, and release its blob when it may be."""
        ...

    def may_compact(self, put_id: bytes) -> bool:
        """Whether a put may be moved to a smaller blob now."""
        ...

    def move(self, put_id: bytes, old: Blob, moved: StoredPut, checksum: int | None) -> None:
        """Take note that a put was compacted and flushed, and release its old blob when it may be."""
        ...

    def is_unfetched(self, put_id: bytes) -> bool:
        """Whether the tables of a put are not in memory until `check` has read or fetched it."""
        ...

    def partition_of(self, put_id: bytes) -> str | None:
        """Return the partition of a put that is known by name and owner alone, None for others."""
        ...

    async def check(self, put_ids: Collection[bytes]) -> None:
        """Have the bytes of recovered puts here, and look at them, before they are read.

        Raises:
            UnavailableError: that cannot be done now.
        """
        ...

    def fetch_to_free(self, put_id: bytes) -> None:
        """Have an unfetched put checked soon, in the background, since cells of it are to be freed."""
        ...

    async def scrub(self) -> None:
        """Have the bytes of all recovered puts here, and look at them, slowly."""
        ...

    def mark_damaged(self, put_id: bytes, reason: str) -> None:
        """Take note of a put that cannot be read."""
        ...

    def forget(self, put_id: bytes) -> bool:
        """Forget whether a put is sound; return whether it was damaged."""
        ...

    async def close(self) -> None:
        """End what it has in the background."""
        ...
