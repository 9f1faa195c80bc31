"""The log: an ordered sequence of numbered records, which a file or etcd backend commits in groups.

    read -> append ... wait_durable ... rotate -> close

The records appended in one event-loop step form a group, which becomes durable as a unit. Groups are queued until a
caller waits for one of them. All queued groups are then written in one call, because each write has a fixed cost.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple, Protocol, TypeAlias

from tq_service.errors import JournalUnreachableError, TqError
from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)
_RECORD: Final = struct.Struct("<IB")
_PAUSE_SECONDS: Final = 0.05

NewRecord: TypeAlias = tuple[int, Sequence[bytes | bytearray]]
"""A record to write: its stream number, and its bytes in one or more parts."""


class Record(NamedTuple):
    """A record read from the log.

    Attributes:
        number: position of the record in the log. The numbers increase from record to record but may have gaps.
        stream: number of the stream that the record belongs to.
        data: contents of the record.
    """

    number: int
    stream: int
    data: bytes


def packed(records: Sequence[NewRecord]) -> Iterator[bytes | bytearray]:
    """Yield the bytes of a group: the size (uint32), stream (uint8) and data of each record."""
    for stream, parts in records:
        yield _RECORD.pack(sum(map(len, parts)), stream)
        yield from parts


def unpacked(body: bytes, number: int) -> Iterator[Record]:
    """Yield the records in a group. `number` is the number of the group's first record."""
    at = 0
    while at < len(body):
        size, stream = _RECORD.unpack_from(body, at)
        at += _RECORD.size + size
        yield Record(number, stream, body[at - size : at])
        number += 1


class LogBackend(Protocol):
    """Stores the groups of one log and reads them back.

    Attributes:
        is_blocking: whether `write` waits for a disk or the network and must therefore be called in a thread.
        group_bytes: maximum total size, in bytes, of the groups joined into one write.
        segment_bytes: segment size that triggers an automatic rotation.
        patience_seconds: time in seconds for which writes to an unreachable backend are retried before callers receive
            an error.
    """

    is_blocking: bool
    group_bytes: int
    segment_bytes: float
    patience_seconds: float

    @property
    def last_number(self) -> int | None:
        """The last number in use, which is known once `read` is exhausted. None if this process may not write."""
        ...

    @property
    def is_disk_low(self) -> bool:
        """Whether too little space is left to accept writes that enlarge the state."""
        ...

    def read(self, number: int) -> Iterator[Record]:
        """Yield the records that follow rotation `number`, or all records if `number` is 0.

        Raises:
            JournalDamagedError: a record is damaged or missing.
        """
        ...

    def write(self, number: int, records: Sequence[NewRecord]) -> None:
        """Make a group durable, or begin a segment if `records` is empty. To retry, pass the same arguments again.

        Raises:
            DiskFullError, JournalUnreachableError: the write failed, but a retry may succeed.
            TqError: the write failed permanently. The group may or may not have been written.
        """
        ...

    def sync_rotated(self, number: int) -> None:
        """Block until all data needed to read from rotation `number` onward can survive a power loss."""
        ...

    def truncate_before(self, number: int) -> None:
        """Delete records that are not needed to read from `number` onward. This call blocks."""
        ...

    def close(self) -> None:
        """Close all files and stop all threads."""
        ...


class Log:
    """A log that commits groups of records through a backend.

    A log must be used from a single event loop. A blocking backend is called from a single worker thread. Groups are
    written only when a caller waits for durability. A group that could not be written keeps its place in the queue, and
    the write is retried.

    Args:
        backend: backend that stores the groups; closed together with the log.

    Attributes:
        backend: the backend passed to the constructor.
    """

    def __init__(self, backend: LogBackend) -> None:
        self.backend = backend
        self._is_open = False
        self._abandoned: TqError | None = None
        self._appended = self._durable = 0  # last appended and last durable number, as seen by the event loop
        self._group: list[NewRecord] = []  # records appended in this event-loop step
        self._group_bytes = 0
        self._rotated_bytes = 0  # bytes queued since the last rotation
        self._futures: deque[tuple[int, asyncio.Future[None]]] = deque()  # each with the record number it waits for
        self._callbacks: deque[tuple[int, Callable[[], None]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The event loop appends groups to the queue, and an empty group for each rotation. The committer removes the
        # groups. The committer is the event loop, or a worker thread if the backend is blocking. Only the committer
        # uses `_taken` and `_committed`.
        self._queue: deque[tuple[list[NewRecord], int]] = deque()  # each group with its size in bytes
        self._committing: Future[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tq-log")
        self._taken: list[NewRecord] | None = None  # the group that is being written or could not be written
        self._committed = 0

    def read(self, number: int) -> Iterator[Record]:
        """Yield the records that follow rotation `number`, then start accepting new records.

        If `number` is 0, all records are yielded.

        Raises:
            JournalDamagedError: a record is damaged or missing.
            TqError: this process could not write its first segment.
        """
        if self._is_open:
            return
        yield from self.backend.read(number)
        last = self.backend.last_number
        if last is not None:
            self._committed, self._is_open = last, True
            try:
                self._write([])
            except BaseException:
                self._is_open = False
                raise
            self._appended = self._durable = self._committed

    # Appending

    @property
    def has_unflushed(self) -> bool:
        """Whether any appended record is not durable, including records that never will be."""
        return self._durable != self._appended or self._abandoned is not None

    @property
    def unflushed_count(self) -> int:
        """Number of appended records that are not durable yet."""
        return self._appended - self._durable

    def append(self, stream: int, *parts: bytes | bytearray) -> int:
        """Append a record to the current group and return its number. The caller must not modify the parts afterward.

        Raises:
            RuntimeError: `read` has not yielded all records yet, this process is not allowed to write, or the log is
                closed.
            TqError: the log was abandoned.
        """
        self._check_open()
        if self._rotated_bytes >= self.backend.segment_bytes and not self._group:
            self.rotate()
        self._group.append((stream, parts))
        self._group_bytes += sum(map(len, parts))
        self._appended += 1
        return self._appended

    def rotate(self) -> int:
        """Return the number to assign to a snapshot of the current state.

        Reading from this number yields all later changes. The snapshot may replace the previous snapshot only after
        `wait_durable` and `backend.sync_rotated` have returned.
        """
        self._check_open()
        self._end_group()
        self._rotated_bytes = 0
        self._appended += 1
        self._queue.append(([], 0))
        return self._appended

    def abandon(self, error: TqError) -> None:
        """Stop writing. Discard the records appended in this event-loop step, which may not match the state in memory.

        Earlier groups may still be written, but callers that wait for those groups get the error.

        Args:
            error: error raised by all current and later appends and waits.
        """
        if self._abandoned is None:
            self._abandoned = error
            self._group.clear()
            self._callbacks.clear()
            self._wake(error)

    def close(self) -> None:
        """Flush the log, unless it was abandoned, and close the backend.

        Raises:
            TqError: the last records could not be made durable. The log is closed even if this error is raised.
        """
        try:
            if self._is_open and self.has_unflushed and self._abandoned is None:
                self.flush()
        finally:
            self._is_open = False
            self._worker.shutdown()
            self.backend.close()

    def _check_open(self) -> None:
        if self._abandoned is not None:
            raise self._abandoned
        if not self._is_open:
            raise RuntimeError("the journal is not open for appends. Exhaust read() first, and append before close()")

    def _end_group(self) -> None:
        if self._group:
            self._queue.append((self._group, self._group_bytes))
            self._rotated_bytes += self._group_bytes
            self._group, self._group_bytes = [], 0

    # Waiting

    async def wait_durable(self, number: int | None = None) -> None:
        """Wait until a record and all earlier records are durable. If `number` is None, wait for all appended records.

        Raises:
            DiskFullError, JournalUnreachableError: the write failed, and the next call will retry the write.
            TqError: the records can no longer become durable. The process must exit, because its memory contains
                changes that are missing from the log.
        """
        number = self._appended if number is None else number
        if self._durable >= number and self._abandoned is None:
            return
        self._loop = asyncio.get_running_loop()  # set this before the worker can notify the event loop
        if self._commit_soon() is not None:
            done: asyncio.Future[None] = self._loop.create_future()
            self._futures.append((number, done))
            await done

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call `callback` when all records appended so far are durable.

        The callback runs either immediately or during a later `wait_durable`. Callbacks run in the order in which they
        were registered. After `abandon`, no callback runs.
        """
        if not self.has_unflushed:
            callback()
        elif self._abandoned is None:
            self._callbacks.append((self._appended, callback))

    def flush(self) -> None:
        """Block until all appended records are durable, raising the same errors as `wait_durable`."""
        committing = self._commit_soon()
        if committing is not None:
            try:
                committing.result()
            finally:
                self._wake()

    def _wake(self, error: BaseException | None = None) -> None:
        """On the event loop, wake the callers whose records are durable. If `error` is set, fail all other callers."""
        self._durable = self._committed
        while self._futures and (error is not None or self._futures[0][0] <= self._durable):
            _, done = self._futures.popleft()
            if done.done():
                continue  # the caller was cancelled
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        while self._callbacks and self._callbacks[0][0] <= self._durable:
            _, callback = self._callbacks.popleft()
            try:
                callback()
            except Exception:
                _log.exception(LogMessage("a callback failed after its changes became durable"))

    # Committing

    def _commit_soon(self) -> Future[None] | None:
        """Commit the queue. For a blocking backend, return the future of the commit job."""
        self._check_open()
        self._end_group()
        if not self.backend.is_blocking:
            self._commit_queue()
            return None
        job = self._committing
        if job is None or job.running() or job.done():  # otherwise, a pending job has not read the queue yet
            job = self._committing = self._worker.submit(self._commit_queue)
        return job

    def _commit_queue(self) -> None:
        try:
            while self._taken is not None or self._queue:
                if self._taken is None:
                    self._taken = self._join_groups()
                self._write(self._taken)
                self._taken = None
                self._notify()
        except BaseException as error:
            self._notify(error)
            raise

    def _join_groups(self) -> list[NewRecord]:
        """Combine the records of the next groups in the queue, up to the next rotation or the maximum size."""
        records, size = self._queue.popleft()
        while records and size < self.backend.group_bytes and self._queue and self._queue[0][0]:
            group, group_bytes = self._queue.popleft()
            records += group
            size += group_bytes
        return records

    def _write(self, records: Sequence[NewRecord]) -> None:
        give_up_at = time.monotonic() + self.backend.patience_seconds
        while True:
            self._check_open()
            try:
                self.backend.write(self._committed + 1, records)
                break
            except JournalUnreachableError as error:
                if time.monotonic() >= give_up_at or not self._is_open:
                    raise JournalUnreachableError(f"could not write to the journal: {error.message}") from None
                time.sleep(_PAUSE_SECONDS)
        self._committed += len(records) or 1

    def _notify(self, error: BaseException | None = None) -> None:
        if not self.backend.is_blocking:
            self._wake(error)
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, error)
