"""The interface of a log: one order of records, of which some prefix cannot be lost any more."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple, Protocol

from tq_service.errors import TqError


class Stream(enum.IntEnum):
    """What a record is of; the number is in the file.

    The streams of one log have one order. So what a change names was written before it, and what it frees is written
    to be gone after it, with one sync for both.
    """

    CHANGES = 1
    """Changes of the controller: no values of samples, and each record below 1 MiB unless one change alone is larger,
    so that they can be replicated."""
    PUTS = 2
    """What became of the puts of a storage service, with the values of small ones: for this host alone."""


class Record(NamedTuple):
    """A record as it is read; numbers ascend through all streams, and some are of no record."""

    number: int
    stream: Stream
    data: bytes


class Log(Protocol):
    """Takes records into memory in order, and makes them durable in that order.

        read -> append ... wait_durable ... rotate ... truncate_before -> close

    All that one step of the event loop appends becomes durable together, or none of it. A log that cannot write for now
    keeps what it took, and tries again: `DiskFullError`. What else `wait_durable` raises says that the log refuses what
    it had taken; memory is ahead of it for good then, so the process that appended must not go on.

    Confined to one event loop, but for `sync_rotated` and `truncate_before`, which block and are for any thread.
    """

    @property
    def has_unflushed(self) -> bool:
        """Whether something was appended that is not durable yet, or never will be."""
        ...

    @property
    def unflushed_count(self) -> int:
        """Number of records that were appended and are not durable yet."""
        ...

    @property
    def is_disk_low(self) -> bool:
        """Whether there is hardly any space left to write to: what adds to the state had better be refused."""
        ...

    def read(self, number: int) -> Iterator[Record]:
        """Yield all records since a number that `rotate` returned, 0: all; the log takes new ones once it is exhausted.

        Raises:
            JournalDamagedError: a record that had been written is damaged or missing.
        """
        ...

    def follow(self, stream: Stream, number: int) -> AsyncIterator[Record]:
        """Yield the durable records of one stream from a number on, then each that becomes durable, without an end.

        Raises:
            PreconditionError: some of them were truncated; begin with a snapshot.
        """
        ...

    def append(self, stream: Stream, *parts: bytes | bytearray) -> int:
        """Take a record, whose parts must not change from now on, and return its number."""
        ...

    async def wait_durable(self, number: int | None = None) -> None:
        """Return once a record is durable, and all before it; None: the last that was appended.

        Raises:
            DiskFullError: not for now; all stays as it is, and the next call tries again.
            TqError: it never will be, see above; what `abandon` was given.
        """
        ...

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call something once all that was appended before is durable: now, or later in the order of these calls.

        It is called by a `wait_durable` at the latest, which somebody must call; never once the log was abandoned.
        """
        ...

    def rotate(self) -> int:
        """Return a number from which all that comes later can be read, for a snapshot of now that holds the rest.

        That snapshot must not be put into its place before `wait_durable` returned and `sync_rotated` did.
        """
        ...

    def sync_rotated(self, number: int) -> None:
        """Return when a loss of power cannot take what a reader from this number on needs."""
        ...

    def truncate_before(self, number: int) -> None:
        """Give up what only readers from before a number need."""
        ...

    def abandon(self, error: TqError) -> None:
        """Write nothing more, not even what was appended in this step of the loop, since memory may differ from it.

        What was appended before may still be written, but no call is answered from it.

        Args:
            error: raised from now on where something is appended, or is to be durable.
        """
        ...

    def close(self) -> None:
        """Make durable what was appended, unless it was abandoned.

        Raises:
            TqError: what was appended last is not durable; all else is done.
        """
        ...
