"""Keeps the state of a service in its data folder.

It writes down every group of changes, and takes a snapshot when there are many, so that a start has few to apply again.

    state machine, engine --append--> journal --(when it is long)--> snapshot, and a new journal
    start: newest snapshot, then the journal after it, then append

Nobody is answered before what the answer says is durable: the servicers' boundary awaits `durable()` for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from tq_service.domain.catalog import Catalog
from tq_service.domain.changes.state_machine import Change
from tq_service.domain.idempotency import AnswerBlocks
from tq_service.domain.partition import PartitionSnapshot
from tq_service.durable.codec import encode_change, encode_group
from tq_service.durable.data_dir import DataDir
from tq_service.durable.log.commit_log import CommitLog, ReplayCost
from tq_service.durable.recovery import Recovered, Recovery, left_puts
from tq_service.durable.snapshot import ServiceSnapshot, write_snapshot
from tq_service.errors import DiskFullError, ServiceFailedError, TqError
from tq_service.storage.engine import StorageEngine
from tq_service.storage.kept import KeptPut
from tq_service.v1 import journal_pb2 as pb
from tq_service.wire.collection import no_collection
from tq_service.wire.frames import encode_varint

_log = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 0.05
_FIRST_RETRY_SECONDS: Final = 10.0
_LAST_RETRY_SECONDS: Final = 600.0
# Field number and wire type 2, a length and so many bytes: written by hand, since that copies the bytes of a put once.
_PUT_KEPT_TAG: Final = encode_varint(pb.JournalRecord.PUT_KEPT_FIELD_NUMBER << 3 | 2)
Append = Callable[[bytes], None]
AfterDurable = Callable[[Callable[[], None]], None]


class Keeper:
    """Keeps a controller, a storage engine, or both.

    open -> recover -> start -> append ... durable ... -> close

    Confined to one event loop.

    Attributes:
        data_dir: where; it is open, and closed with the rest.
        is_stuck: whether nothing could be written down when it was last tried.
        fatal: called with a reason and its cause where memory may differ from what is written down, so that the service
            must not go on; it calls `abandon` before it returns.
    """

    def __init__(self, data_dir: DataDir, journal: CommitLog) -> None:
        self.data_dir = data_dir
        self._journal = journal
        self._catalog: Catalog | None = None
        self._engine: PutRecords | None = None
        self._cost = ReplayCost()
        self._flush: asyncio.TimerHandle | None = None
        self._snapshot: asyncio.Task[None] | None = None
        self._retry_at, self._retry_seconds = 0.0, _FIRST_RETRY_SECONDS
        self._abandoned: TqError | None = None
        self.is_stuck = False
        self.fatal: Callable[[str, BaseException], None] = self._abandon_alone

    @classmethod
    def open(cls, path: Path, *, sync: bool, accept_loss: bool = False) -> Keeper:
        """Open a data folder.

        Args:
            path: of the folder.
            sync: whether what is durable survives the death of the machine, instead of that of the process alone.
            accept_loss: whether to go on without what follows a damaged record.

        Raises:
            DataDirError: another process has it open, or it cannot be used.
            DiskFullError: there is no room for a journal.
        """
        data_dir = DataDir.open(path)
        try:
            return cls(data_dir, data_dir.journal(sync=sync, accept_loss=accept_loss))
        except BaseException:
            data_dir.close()
            raise

    # Recovery

    def recover(
        self,
        *,
        catalog: Catalog | None = None,
        engine: PutRecords | None = None,
    ) -> Recovered:
        """Bring back what the data folder has; call it once, before anything is told.

        Args:
            catalog: takes the partitions, and the answers for retries; None in a service that has no controller.
            engine: takes the puts; None in a service that stores none.

        Raises:
            JournalDamagedError: a record is damaged, or does not fit what is before it.
            NewerVersionError: a newer version wrote the newest snapshot.
            DataDirError: the folder has what this service does not take, and would lose with its next snapshot.
        """
        self._catalog, self._engine = catalog, engine
        recovery = Recovery(
            self.data_dir,
            self._journal,
            self._cost,
            catalog=catalog,
            recover_puts=None if engine is None else engine.recover,
        )
        return recovery.run()

    # Writing down

    def start(self) -> None:
        """Write down every change from now on."""
        if self._catalog is not None:
            self._catalog.machine.log, self._catalog.machine.fatal = self, self.fatal
        if self._engine is not None:
            self._engine.start(self._append_put, self._journal.after_durable)

    def encode(self, change: Change) -> bytes:
        """Return the bytes of a change that is about to be made; raises what `abandon` was given."""
        if self._abandoned is not None:
            raise self._abandoned
        return encode_change(change)

    def append(self, at_seconds: float, changes: Sequence[bytes]) -> None:
        """Append a group of changes that were made, as one record."""
        record = encode_group(at_seconds, changes)
        self._cost.add_change(len(record))
        self._append(record)

    def _append_put(self, data: bytes) -> None:
        self._cost.add_put(len(data))
        self._append(data)

    def _append(self, record: bytes) -> None:
        try:
            self._journal.append(record)
            if self._flush is None:  # for changes that no call waits for, such as a lease that ran out
                self._flush = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._flush_later)
            if self._cost.is_too_long(self._sample_count) and self._may_snapshot:
                self._snapshot = asyncio.get_running_loop().create_task(self._try_snapshot())
        except Exception as error:
            self.fatal("a change was made and could not be appended to the journal", error)
            raise

    # What cannot go on

    def abandon(self, error: TqError) -> None:
        """Write nothing more, neither what was appended in this step of the loop nor later changes or snapshots.

        Args:
            error: raised from now on for each change, and where something is to be durable.
        """
        self._abandoned = error
        self.is_stuck = True
        self._journal.abandon(error)

    def _abandon_alone(self, reason: str, cause: BaseException) -> None:
        _log.critical("nothing is written down any more: %s", reason, exc_info=cause)
        self.abandon(ServiceFailedError(f"the service has failed: {reason}"))

    @property
    def _may_snapshot(self) -> bool:
        return self._snapshot is None and time.monotonic() >= self._retry_at

    def _sample_count(self) -> int:
        return 0 if self._catalog is None else self._catalog.sample_count()

    # Durability

    @property
    def is_behind(self) -> bool:
        """Whether something was written down that is not durable yet."""
        return self._journal.has_unflushed

    @property
    def is_short(self) -> bool:
        """Whether the disk has hardly any room left."""
        return self._journal.is_disk_low

    async def durable(self) -> None:
        """Return once all that was written down so far is durable.

        Raises:
            DiskFullError: it cannot be written now; it will be as soon as there is room.
            ServiceFailedError: it never will be.
        """
        try:
            await self._journal.durable()
        except TqError:
            self.is_stuck = True
            raise
        except Exception as error:
            self.fatal("the journal cannot be written", error)
            raise
        self.is_stuck = False

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call something once all that was written down so far is durable: now, or later in order."""
        self._journal.after_durable(callback)

    def _flush_later(self) -> None:
        self._flush = None
        if self._journal.has_unflushed:
            self._flushing = asyncio.get_running_loop().create_task(self._flush_now())

    async def _flush_now(self) -> None:
        with contextlib.suppress(TqError):  # who asks next gets the error
            await self.durable()

    # Snapshots

    async def take_snapshot(self) -> None:
        """Write a snapshot of now and begin a new journal.

        Raises:
            DiskFullError: there is no room for it; the journal goes on.
        """
        await self._snapshot_with(self._write_snapshot)

    async def keep_restored(
        self, partitions: Sequence[PartitionSnapshot], answers: Callable[[], AnswerBlocks], appear: Callable[[], None]
    ) -> None:
        """Write a snapshot of now in which a catalog that has none has partitions, before they are seen in it.

        Args:
            partitions: what will be in the catalog.
            answers: returns what will be in the request log, in the step in which the snapshot is taken.
            appear: puts it there; called once that is durable, before there can be another snapshot.

        Raises:
            DiskFullError: there is no room for it; nothing is kept of them.
        """
        try:
            await self._snapshot_with(lambda: self._write_snapshot(partitions, answers, appear))
        except OSError as error:
            raise DiskFullError(
                f"what was restored cannot be written to the data folder ({error}); free space, and restore it again"
            ) from error

    async def _snapshot_with(self, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while self._snapshot is not None:
            await asyncio.wait([self._snapshot])
        self._snapshot = asyncio.get_running_loop().create_task(write())
        await asyncio.shield(self._snapshot)

    async def _try_snapshot(self) -> None:
        self._retry_at = time.monotonic() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, _LAST_RETRY_SECONDS)  # each try begins another file
        try:
            await self._write_snapshot()
        except (OSError, TqError) as error:
            _log.warning("no snapshot can be written (%s); the journal grows until one can", error)
        except Exception:
            _log.exception("no snapshot can be written, which is a fault of the service; the journal grows")
        else:
            self._retry_at, self._retry_seconds = 0.0, _FIRST_RETRY_SECONDS

    def _answers(self) -> AnswerBlocks:
        return () if self._catalog is None else self._catalog.answers.snapshot()

    async def _write_snapshot(
        self,
        restored: Sequence[PartitionSnapshot] = (),
        answers: Callable[[], AnswerBlocks] | None = None,
        appear: Callable[[], None] = lambda: None,
    ) -> None:
        try:
            number = self._journal.rotate()
            snapshot = ServiceSnapshot(  # in one step with the new journal: whatever comes later is in that
                partitions=[*restored, *(() if self._catalog is None else self._catalog.snapshot())],
                answers=self._answers() if answers is None else answers(),
                puts=() if self._engine is None else self._engine.kept_records(),
            )
            before_seconds = self._cost.reset()
            started_at = time.monotonic()
            try:
                await self._journal.durable()
                await asyncio.to_thread(self._write_to_disk, number, snapshot)
            except BaseException:
                self._cost.add(before_seconds)
                raise
            appear()
            await asyncio.to_thread(self._remove_unneeded, number)
            self._cost.note_snapshot(time.monotonic() - started_at)
        finally:
            self._snapshot = None

    def _write_to_disk(self, number: int, snapshot: ServiceSnapshot) -> None:
        self._journal.sync_segment(number)  # a start that finds the snapshot refuses to go on without it
        write_snapshot(self.data_dir.snapshot_path(number), snapshot)

    def _remove_unneeded(self, number: int) -> None:
        try:
            self.data_dir.remove_unneeded(self._journal, number)
        except OSError as error:
            _log.warning("what the newest snapshot holds cannot be removed: %s", error)

    async def close(self) -> None:
        """Make everything durable and close the journal."""
        if self._flush is not None:
            self._flush.cancel()
        if self._snapshot is not None:
            await asyncio.wait([self._snapshot])
        await self._flush_now()
        try:
            self._journal.close()
        except TqError as error:
            _log.error("what was done last could not be written down: %s", error)
        self.data_dir.close()


class PutRecords:
    """The puts of a storage engine as records of the journal, and back.

    recover -> start -> kept_records, as often as snapshots are taken

    Args:
        engine: has files, and no puts yet.
    """

    def __init__(self, engine: StorageEngine) -> None:
        self._engine = engine

    def recover(self, records: Iterable[bytes]) -> int:
        """Take over the puts of records, in order; return how many there are."""
        with no_collection():  # so many new objects, none of them garbage
            return self._engine.recover(left_puts(records))

    def start(self, append: Append, after_durable: AfterDurable) -> None:
        """Write down what becomes of puts from now on.

        Args:
            append: writes down a record.
            after_durable: calls something once all that was written down before cannot be lost any more.
        """
        self._append = append
        self.after_durable = after_durable
        self._engine.start_keeping(self)

    def keep(self, put: KeptPut) -> None:
        """Write down that a put is complete, or that this is now what is left of it."""
        self._append(encode_put(put))

    def drop(self, put_id: bytes) -> None:
        """Write down that a put is gone."""
        self._append(pb.JournalRecord(put_dropped=pb.PutDropped(put_id=put_id)).SerializeToString())

    def kept_records(self) -> Iterable[bytes]:
        """Return a record of each put, as of now; they are encoded as they are read, which any thread may do, once."""
        return map(encode_put, self._engine.kept_puts())


def encode_put(put: KeptPut) -> bytes:
    """Return the record of a put."""
    parts = put.parts()
    return b"".join((_PUT_KEPT_TAG, encode_varint(sum(map(len, parts))), *parts))
