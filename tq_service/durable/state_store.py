"""The state store persists a controller's partitions, a storage engine's puts, or both, in a data directory.

The store appends changes to the log. When the log grows long, the store writes a snapshot so that the next startup is
fast.

    state machine, engine --append--> log --(when it is long)--> snapshot, and a new start of the log
    start: restore the newest intact snapshot, replay the log after it, then append

A response is sent only once the state that it reports is durable. Servicers therefore await `wait_durable` before they
respond.

The records of both streams form a single sequence in the log. A put becomes durable no later than the change that
refers to it, because the engine appends the put's record before the put can be committed. The change that frees a put
is appended before the put is removed, because the engine learns of freed cells only from appended changes. If the
controller and the storage service have separate logs, the order of their responses provides the same guarantee. A put
is acknowledged only when it is durable, and cells are freed remotely only when the change that frees them is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from tq_service.durable.data_dir import DataDir
from tq_service.durable.snapshot import ServiceSnapshot, read_snapshot, write_snapshot
from tq_service.errors import (
    DataDirError,
    DiskFullError,
    JournalDamagedError,
    JournalUnreachableError,
    NewerVersionError,
    ServiceFailedError,
    SnapshotDamagedError,
    TqError,
)
from tq_service.journal.files import FileBackend, quarantine, segment_numbers, snapshot_numbers, snapshot_path
from tq_service.journal.log import Log, Record
from tq_service.log_message import LogMessage
from tq_service.machine.samples import StateReplaced
from tq_service.machine.state_machine import decode_group
from tq_service.serving.catalog import Catalog
from tq_service.state.partition import Partition
from tq_service.storage.index.put_table import PutJournal, left_puts
from tq_service.wire.objects import no_collection

_log = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 0.05
_FIRST_RETRY_SECONDS: Final = 10.0
_LAST_RETRY_SECONDS: Final = 600.0


class Stream(enum.IntEnum):
    """The source of a record in the log. The log files identify each stream by its number.

    The records of both streams form a single sequence. A put is recorded before the change that refers to it, and its
    removal is recorded after the change that frees it. A single sync makes records of both streams durable.
    """

    CHANGES = 1
    """Changes made by the controller, without sample values. A record exceeds 1 MiB only if a single change does."""
    PUTS = 2
    """Puts of a storage service, including the values of small puts. Records of this stream never leave the host."""


# Measured cost of replaying a record, and of restoring a sample from a snapshot.
_RECORD_SECONDS: Final = {Stream.CHANGES: 40e-6, Stream.PUTS: 20e-6}
_BYTE_SECONDS: Final = {Stream.CHANGES: 85e-9, Stream.PUTS: 1e-9}
_FILE_SECONDS: Final = 1e-3
_SAMPLE_SECONDS: Final = 0.7e-6
_LONGEST_START_SECONDS: Final = 1.1
_WORTH_SECONDS: Final = 0.4
_RECORDS_A_TURN: Final = 64  # number of records that a standby applies before it yields to the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Number of items recovered from the data directory, and duration of the recovery."""

    partition_count: int
    sample_count: int
    put_count: int
    record_count: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class StartCost:
    """Estimates how long the next startup will take, and decides when a new snapshot is needed to shorten it.

    Startup restores the last snapshot and then replays the log that follows it. A new snapshot is due if startup would
    otherwise take too long. However, the cost of a snapshot grows with the size of the state. A snapshot is therefore
    due only once replaying the log would take at least as much CPU time as writing the snapshot.

    Attributes:
        log_seconds: time needed to replay the current log.
        restore_seconds: time needed to restore the last snapshot.
        snapshot_seconds: CPU time used to write the last snapshot.
    """

    log_seconds: float = 0.0
    restore_seconds: float = 0.0
    snapshot_seconds: float = 0.0

    def add(self, stream: Stream, size: int) -> None:
        """Account for a record of `size` bytes that was added to the log."""
        self.log_seconds += _RECORD_SECONDS[stream] + _BYTE_SECONDS[stream] * size

    @property
    def is_too_high(self) -> bool:
        """Whether a new snapshot is due."""
        return self.log_seconds >= max(
            _LONGEST_START_SECONDS - self.restore_seconds, _WORTH_SECONDS, self.snapshot_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLag:
    """How far the data on disk lags behind the state in memory.

    Attributes:
        unflushed_count: number of appended records that are not yet durable.
        replay_seconds: estimated time that the next start will need to replay the log on top of the last snapshot.
        snapshot_age_seconds: time since the last snapshot, or since startup if this process has not written a snapshot.
        is_failing: whether the last write attempt failed.
        is_disk_low: whether the disk is almost full.
    """

    unflushed_count: int
    replay_seconds: float
    snapshot_age_seconds: float
    is_failing: bool
    is_disk_low: bool


class StateStore:
    """Persists the changes appended by a controller, a storage engine, or both.

        open -> recover -> append ... wait_durable ... -> close

    A store must be used from a single event loop.

    Attributes:
        data_dir: open data directory. Closing the store also closes the directory.
        is_failing: whether the last write attempt failed.
        is_shared: whether other controllers follow the log.
        fatal: function called with a reason and a cause when the service must stop because its in-memory state may not
            match the log. The function must call `abandon` before it returns.
    """

    def __init__(self, data_dir: DataDir, log: Log) -> None:
        self.data_dir = data_dir
        self._log = log
        self._catalog: Catalog | None = None
        self._puts: PutJournal | None = None
        self._cost = StartCost()
        self._flush: asyncio.Task[None] | None = None
        self._snapshot: asyncio.Task[None] | None = None
        self._retry_at, self._retry_seconds = 0.0, _FIRST_RETRY_SECONDS
        self._abandoned: TqError | None = None
        self._next: int | None = None  # number of the next record to apply on a standby; None otherwise
        self._snapshot_at = time.monotonic()
        self.is_failing = False
        self.is_shared = False
        self.fatal: Callable[[str, BaseException], None] = self._abandon_alone

    @classmethod
    def open(cls, path: Path, *, sync: bool, accept_loss: bool = False) -> StateStore:
        """Open a data directory.

        Args:
            path: path of the directory.
            sync: whether durable records survive a machine crash. If false, records survive a process crash but not a
                machine crash.
            accept_loss: whether to continue if the journal is damaged, discarding the damaged record and all later
                records.

        Raises:
            DataDirError: the directory is in use by another process, or is unusable.
            DiskFullError: the disk has too little space for a journal.
        """
        data_dir = DataDir.open(path)
        try:
            return cls(data_dir, Log(FileBackend(path, sync=sync, accept_loss=accept_loss)))
        except BaseException:
            data_dir.close()
            raise

    # Recovery

    def recover(self, *, catalog: Catalog | None = None, puts: PutJournal | None = None) -> Recovered:
        """Recover the contents of the data directory and start logging changes. Call this method only once.

        Args:
            catalog: catalog that receives the recovered partitions and recorded answers. None if the service has no
                controller.
            puts: journal that receives the recovered puts. None if the service has no storage engine.

        Raises:
            JournalDamagedError: a record is damaged or does not match the preceding state.
            NewerVersionError: the newest snapshot or a record was written by a newer version.
            DataDirError: the directory contains data for a role that this service does not have. If the service started
                anyway, its next snapshot would lose this data.
        """
        self._catalog, self._puts = catalog, puts
        started_at = time.perf_counter()
        number, put_records = self._restore_newest()
        self._cost.log_seconds += _FILE_SECONDS * len(segment_numbers(self.data_dir.path))  # each start adds a segment
        record_count = self._replay(self._log.read(number), put_records)
        self._quarantine_after(number)
        put_count = self._recover_puts(put_records)
        self._begin_writing()
        return Recovered(
            partition_count=0 if catalog is None else len(catalog.names()),
            sample_count=self._sample_count(),
            put_count=put_count,
            record_count=record_count,
            seconds=time.perf_counter() - started_at,
        )

    def _quarantine_after(self, number: int) -> None:
        for damaged in snapshot_numbers(self.data_dir.path):
            if damaged > number:  # otherwise, the damaged snapshot would later be kept as a fallback
                quarantine(snapshot_path(self.data_dir.path, damaged), ".damaged")

    # Standby

    def restore(self, catalog: Catalog) -> int:
        """Restore the newest snapshot on a standby that will follow the log. Call this method only once.

        Returns:
            Number of the first record after the snapshot.

        Raises:
            SnapshotDamagedError: all snapshots are damaged.
            NewerVersionError: a newer version wrote the newest snapshot.
            DataDirError: the snapshot contains puts of a storage service.
        """
        self._catalog = catalog
        number, puts = self._restore_newest()
        self._recover_puts(puts)
        self._quarantine_after(number)
        self._next = max(number, 1)
        return self._next

    async def follow(self, records: AsyncIterator[Record]) -> None:
        """Apply the records that the leader appends to the log, and write snapshots when due. Runs until cancelled.

        Raises:
            PreconditionError: the log no longer contains the records that follow the snapshot.
            JournalDamagedError: a record is damaged or does not match the preceding state.
        """
        async with contextlib.aclosing(cast("AsyncGenerator[Record, None]", records)) as following:
            async for record in following:
                self._replay([record])
                self._next = record.number + 1
                self._begin_snapshot_when_due()
                if record.number % _RECORDS_A_TURN == 0:
                    await asyncio.sleep(0)

    async def take_over(self) -> int:
        """Become the leader: apply the rest of the log and start logging changes.

        Returns:
            Number of records applied.

        Raises:
            SupersededError: another controller has become the leader.
            JournalDamagedError: a record is damaged or does not match the preceding state.
        """
        while self._snapshot is not None:
            await asyncio.wait([self._snapshot])
        count = self._replay(await asyncio.to_thread(list, self._log.read(self._next or 1)))
        self._next = None
        self._begin_writing()
        return count

    def _restore_newest(self) -> tuple[int, list[bytes]]:
        """Restore the newest intact snapshot. Return the snapshot's number and puts.

        A snapshot written by a newer version counts as intact, so startup fails with NewerVersionError. Falling back to
        an older snapshot would lose all changes made since that snapshot.
        """
        damages: list[SnapshotDamagedError] = []
        for number in reversed(snapshot_numbers(self.data_dir.path)):
            try:
                snapshot = read_snapshot(snapshot_path(self.data_dir.path, number))
            except SnapshotDamagedError as error:
                _log.error(LogMessage("skipped a damaged snapshot; falling back to the previous one", error=error))
                damages.append(error)
                continue
            if self._catalog is not None:
                self._catalog.adopt(list(map(Partition.restore, snapshot.partitions)), snapshot.policies)
                self._catalog.answers.restore(snapshot.answers)
                self._catalog.machine.state.snapshot_number = number
            elif snapshot.partitions:
                raise self._of_another_role(f"{len(snapshot.partitions)} controller partitions")
            self._cost.restore_seconds = self._restore_seconds()
            return number, list(snapshot.puts)
        if damages:  # the journal no longer contains the records that precede the snapshots
            raise damages[0]
        return 0, []

    def _begin_writing(self) -> None:
        if self._catalog is not None:
            self._catalog.machine.log, self._catalog.machine.fatal = self, self.fatal

    def _replay(self, records: Iterable[Record], puts: list[bytes] | None = None) -> int:
        """Replay controller records and append storage engine records to `puts`. Return the total number of records."""
        count = 0
        for record in records:
            count += 1
            if record.stream not in _RECORD_SECONDS:
                raise NewerVersionError(
                    f"record {record.number} of the journal was written by a newer version (unknown stream "
                    f"{record.stream}). Install that version."
                )
            self._cost.add(Stream(record.stream), len(record.data))
            if record.stream == Stream.PUTS and puts is not None:
                puts.append(record.data)
            elif self._catalog is None:
                raise self._of_another_role("controller partitions")
            else:
                _apply_again(self._catalog, record)
        return count

    def _recover_puts(self, records: Iterable[bytes]) -> int:
        if self._puts is not None:
            with no_collection():  # this creates many objects, none of which are garbage
                return self._puts.recover(records, self)
        if left_count := len(left_puts(records)):
            raise self._of_another_role(f"{left_count} storage service puts")
        return 0

    def _of_another_role(self, what: str) -> DataDirError:
        return DataDirError(
            f"the data directory {self.data_dir.path} contains {what}, which this service does not serve. Start "
            f"the service with the role that wrote the directory, or use a different directory.",
            metadata={"path": str(self.data_dir.path)},
        )

    # Log of the state machine

    def check_open(self) -> None:
        """If `abandon` has been called, raise the error that was passed to it."""
        if self._abandoned is not None:
            raise self._abandoned

    def append(self, records: Sequence[bytes]) -> None:
        """Append the records of one group of changes to the log."""
        for record in records:
            self._append(Stream.CHANGES, record)

    # Log of the storage engine

    def append_put(self, record: bytes, values: bytes | bytearray = b"") -> None:
        """Append the record of a put or of its removal. The record of a small put includes its values."""
        self._append(Stream.PUTS, record, values)

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call `callback` when all records appended so far are durable.

        The callback may run immediately or later. Callbacks run in the order in which they were registered.
        """
        self._log.after_durable(callback)

    def _append(self, stream: Stream, *parts: bytes | bytearray) -> None:
        try:
            self._log.append(stream, *parts)
            self._cost.add(stream, sum(map(len, parts)))
            if self._flush is None:  # flushes changes that no call waits for, such as lease expirations
                self._flush = asyncio.get_running_loop().create_task(self._flush_later())
            self._begin_snapshot_when_due()
        except Exception as error:
            self.fatal("a change was made but could not be appended to the journal", error)
            raise

    def _begin_snapshot_when_due(self) -> None:
        if self._cost.is_too_high and self._snapshot is None and time.monotonic() >= self._retry_at:
            self._snapshot = asyncio.get_running_loop().create_task(self._try_snapshot())

    def _sample_count(self) -> int:
        return 0 if self._catalog is None else self._catalog.sample_count()

    def _restore_seconds(self) -> float:
        return _SAMPLE_SECONDS * self._sample_count()

    # Failure

    def abandon(self, error: TqError) -> None:
        """Stop writing. Discard the records appended in this event-loop step and any later changes and snapshots.

        Args:
            error: error to raise from all later changes and waits for durability.
        """
        self._abandoned = error
        self.is_failing = True
        self._log.abandon(error)

    def _abandon_alone(self, reason: str, cause: BaseException) -> None:
        _log.critical(LogMessage("stopped writing to the data directory", reason=reason), exc_info=cause)
        self.abandon(ServiceFailedError(f"the service has failed: {reason}", metadata={"cause": reason}))

    # Durability

    @property
    def has_unflushed(self) -> bool:
        """Whether some appended records are not yet durable."""
        return self._log.has_unflushed

    @property
    def is_disk_low(self) -> bool:
        """Whether the disk is almost full."""
        return self._log.backend.is_disk_low

    def lag(self) -> LogLag:
        """Return how far the data on disk lags behind the state in memory."""
        return LogLag(
            unflushed_count=self._log.unflushed_count,
            replay_seconds=self._cost.log_seconds,
            snapshot_age_seconds=time.monotonic() - self._snapshot_at,
            is_failing=self.is_failing,
            is_disk_low=self.is_disk_low,
        )

    async def wait_durable(self) -> None:
        """Wait until all records appended so far are durable.

        Raises:
            DiskFullError: the log cannot be written until the disk has free space.
            JournalUnreachableError: the log cannot be written until etcd responds.
            TqError: the log was abandoned or failed fatally, so the records will never become durable.
        """
        try:
            await self._log.wait_durable()
        except (DiskFullError, JournalUnreachableError):
            self.is_failing = True
            raise
        except Exception as error:
            if self._abandoned is None:
                self.fatal("could not write to the journal", error)
            raise
        self.is_failing = False

    async def _flush_later(self) -> None:
        await asyncio.sleep(_FLUSH_SECONDS)
        self._flush = None
        await self._flush_now()

    async def _flush_now(self) -> None:
        with contextlib.suppress(TqError):  # the next `wait_durable` call raises the error again
            await self.wait_durable()

    # Snapshots

    async def newest_snapshot(self, least_number: int) -> tuple[int, Path]:
        """Return the number and path of the newest snapshot.

        If the newest snapshot's number is below `least_number`, write a new snapshot first.
        """
        if max(snapshot_numbers(self.data_dir.path), default=-1) < least_number:
            await self.take_snapshot()
        number = snapshot_numbers(self.data_dir.path)[-1]
        return number, snapshot_path(self.data_dir.path, number)

    async def take_snapshot(
        self, contents: Callable[[], ServiceSnapshot] | None = None, appear: Callable[[], None] = lambda: None
    ) -> None:
        """Write a snapshot that later recoveries start from. Writing continues even if the caller is cancelled.

        Args:
            contents: function that returns the snapshot's contents, called in the event-loop step that takes the
                snapshot. If None, the service's current state is written.
            appear: function called when the snapshot is durable, before the next snapshot can be taken.

        Raises:
            OSError, DiskFullError: there is not enough disk space. The journal is unaffected.
        """
        while self._snapshot is not None:
            await asyncio.wait([self._snapshot])
        self._snapshot = asyncio.get_running_loop().create_task(self._write_snapshot(contents or self._now, appear))
        await asyncio.shield(self._snapshot)

    async def snapshot_restored(
        self,
        restored: Callable[[ServiceSnapshot], ServiceSnapshot],
        appear: Callable[[], None],
    ) -> None:
        """Write a snapshot of restored partitions before they become visible in the catalog.

        The catalog's partitions must not change between the step that takes the snapshot and the call to `appear`.
        Otherwise, the log would contain a change that does not match the preceding snapshot.

        Args:
            restored: function that receives the state at the time of the snapshot and returns the new state.
            appear: function that replaces the current state with the new state. The function is called when the
                snapshot is durable, before the next snapshot can be taken.

        Raises:
            DiskFullError: there is not enough disk space. The restore is not applied.
        """
        try:
            await self.take_snapshot(lambda: restored(self._now()), appear)
        except OSError as error:
            raise DiskFullError(
                f"could not write the restored state to the data directory ({error}). Free some disk space and "
                f"restore again.",
                metadata={"path": str(self.data_dir.path)},
            ) from error

    async def _try_snapshot(self) -> None:
        started_at = time.monotonic()
        self._retry_at = started_at + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, _LAST_RETRY_SECONDS)  # each attempt creates a new segment
        try:
            await self._write_snapshot(self._now, lambda: None)
        except (OSError, TqError) as error:
            _log.warning(
                LogMessage("could not write a snapshot; the journal keeps growing until one succeeds", error=error)
            )
        except Exception:
            _log.exception(LogMessage("could not write a snapshot because of a bug; the journal keeps growing"))
        else:
            # On a slow disk, do not start another snapshot until half the duration of this snapshot has passed.
            ended_at = time.monotonic()
            self._retry_at, self._retry_seconds = ended_at + (ended_at - started_at) / 2, _FIRST_RETRY_SECONDS

    async def _write_snapshot(self, contents: Callable[[], ServiceSnapshot], appear: Callable[[], None]) -> None:
        try:
            number = self._log.rotate() if self._next is None else self._next
            snapshot = contents()  # in the same step as `rotate`, so all later changes get higher record numbers
            restore_seconds, log_seconds, self._cost.log_seconds = self._restore_seconds(), self._cost.log_seconds, 0.0
            try:
                if self._next is None:  # a standby applies only durable changes
                    await self._log.wait_durable()
                snapshot_seconds = await asyncio.to_thread(self._write_to_disk, number, snapshot)
            except BaseException:
                self._cost.log_seconds += log_seconds
                raise
            try:
                if self.is_shared and contents != self._now and self._catalog is not None:
                    # Controllers that follow the log do not have the content of this snapshot.
                    self._catalog.machine.state.snapshot_number = number
                    self._catalog.machine.log_alone(StateReplaced(snapshot_number=number))
                appear()
            except BaseException as error:
                self.fatal("could not switch to the state contained in a snapshot", error)
                raise
            try:
                await asyncio.to_thread(self.data_dir.remove_unneeded, self._log.backend, number)
            except OSError as error:
                _log.warning(LogMessage("could not remove files made obsolete by the newest snapshot", error=error))
            self._cost.restore_seconds, self._cost.snapshot_seconds = restore_seconds, snapshot_seconds
            self._snapshot_at = time.monotonic()
        finally:
            self._snapshot = None

    def _now(self) -> ServiceSnapshot:
        return ServiceSnapshot(
            partitions=() if self._catalog is None else self._catalog.snapshot(),
            policies=() if self._catalog is None else list(self._catalog.policies.values()),
            answers=() if self._catalog is None else self._catalog.answers.snapshot(),
            puts=() if self._puts is None else self._puts.records(),
        )

    def _write_to_disk(self, number: int, snapshot: ServiceSnapshot) -> float:
        """Write a snapshot from a worker thread. Return the CPU time used, in seconds."""
        started_at = time.thread_time()
        self._log.backend.sync_rotated(number)  # a start from this snapshot needs the segment
        write_snapshot(snapshot_path(self.data_dir.path, number), snapshot)
        return time.thread_time() - started_at

    async def close(self) -> None:
        """Make all records durable, then close the journal and the data directory."""
        if self._flush is not None:
            self._flush.cancel()
        if self._snapshot is not None:
            await asyncio.wait([self._snapshot])
        await self._flush_now()
        try:
            self._log.close()
        except TqError as error:
            _log.error(LogMessage("could not write the last changes to the journal", error=error))
        self.data_dir.close()


def _apply_again(catalog: Catalog, record: Record) -> None:
    kind = "which cannot be decoded"
    try:
        at_seconds, changes = decode_group(record.data)
        for change in changes:
            kind = type(change).__name__
            catalog.machine.replay(change, at_seconds)
    except NewerVersionError:
        raise
    except (TqError, LookupError, ValueError, TypeError, struct.error) as error:
        raise JournalDamagedError(
            f"record {record.number} of the journal ({kind}) does not match the preceding state: {error}. Restore a "
            f"checkpoint into an empty data directory.",
            metadata={"record": str(record.number)},
        ) from error
