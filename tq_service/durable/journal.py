"""The journal: the changes of a service, one record after the other, to be applied again after a crash."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tq_service.durable.file_names import (
    beside,
    highest_number,
    journal_numbers,
    journal_path,
    remove_journal,
    remove_unfinished,
    snapshot_numbers,
    snapshot_path,
)
from tq_service.durable.journal_file import DirectCommit, GroupCommit, JournalFile
from tq_service.durable.journal_reader import JournalReader
from tq_service.durable.upkeep import Upkeep
from tq_service.errors import TqError

_log = logging.getLogger(__name__)
_FULL_LOG_BYTES: Final = 32 * 2**20
_LOOK_SECONDS: Final = 1.0
_START_SECONDS: Final = 60.0
RESERVE_BYTES: Final = 4 * 2**20

# What replaying a record, and restoring a sample of a snapshot, take, as measured.
_CHANGE_SECONDS: Final = 40e-6
_CHANGE_BYTE_SECONDS: Final = 100e-9
_PUT_SECONDS: Final = 20e-6
_PUT_BYTE_SECONDS: Final = 1e-9
_FILE_SECONDS: Final = 20e-3
_SAMPLE_SECONDS: Final = 0.7e-6
_LONGEST_START_SECONDS: Final = 1.1
_WORTH_SECONDS: Final = 0.4
_COUNT_AGAIN_SECONDS: Final = 0.01


class Journal:
    """Records in numbered files; a generation is the files from one that `start_generation` began to the next.

    open -> replay -> append ... durable ... start_generation ... finish_generation -> close

    Without `sync`, what is durable is with the operating system, and survives any end of any process; a loss of power
    may take the last records, never one before a record that it leaves. With `sync`, it is on the disk.

    All but the constructor runs on one event loop.
    """

    def __init__(self, directory: Path, *, sync: bool, accept_loss: bool = False) -> None:
        """Open the journal; see `open`."""
        self._directory = directory
        self._sync = sync
        self._appended = self._durable = 0
        self._reserve = Reserve(directory / "reserve")
        self._look_at = 0.0
        self._waiting: deque[tuple[int, Callable[[], None], Callable[[TqError], None] | None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: DirectCommit | GroupCommit | None = None
        self._is_closed = False
        self._abandoned: TqError | None = None
        remove_unfinished(directory)
        self._reserve.fill()
        self._reserve.give_up_to_start()
        is_new = highest_number(directory) == 0
        numbers = itertools.count(highest_number(directory) + 1)
        # The reader comes first: it takes note of the files that are there, and upkeep begins to make another one.
        self._reader = JournalReader(directory, accept_loss=accept_loss, do_later=self._do_aside)
        self._upkeep = Upkeep(lambda: JournalFile(directory, next(numbers), sync=sync, make_room=self._reserve.give_up))
        if is_new:
            try:
                self._start(0)
            except BaseException:
                self._upkeep.close()
                raise

    @classmethod
    def open(cls, directory: Path, *, sync: bool, accept_loss: bool = False) -> Journal:
        """Open the journal of a folder, which nobody else has open.

        Args:
            directory: where its files are; there.
            sync: whether durable means on the disk.
            accept_loss: whether `replay` goes on without what follows a damaged record, instead of raising.

        Raises:
            DiskFullError: there is no room for a file.
        """
        return cls(directory, sync=sync, accept_loss=accept_loss)

    def replay(self, from_generation: int | None = None) -> Iterator[bytes]:
        """Yield the records since a snapshot; once they are exhausted, the journal takes new ones.

        Args:
            from_generation: of the snapshot that was read; None: the newest that is there, 0: without one.

        Raises:
            JournalDamagedError: a record that had been written is damaged or missing.
            DiskFullError: there is no room for a file.
        """
        if from_generation is None:
            from_generation = max(self.snapshots(), default=0)
        if self._writer is None:
            yield from self._reader.records(from_generation)
            self._start(self._reader.last_number)

    def snapshots(self) -> list[int]:
        """Return the generations of the snapshots that are there, ascending; at most the last two have a journal."""
        return snapshot_numbers(self._directory)

    def snapshot_path(self, generation: int) -> Path:
        """Return where the snapshot of a generation is, or is to be put once it is whole."""
        return snapshot_path(self._directory, generation)

    def set_snapshot_aside(self, generation: int) -> None:
        """Rename a snapshot that turned out to be damaged, so that none goes on from it."""
        path = self.snapshot_path(generation)
        path.rename(beside(path, ".damaged"))

    @property
    def is_short(self) -> bool:
        """Whether the disk has been full, and has hardly any room still: what adds to the state had better be refused.

        There is room for some more records then, so that what makes room can be written down.
        """
        if self._reserve.is_there:
            return False
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._upkeep.do(self._reserve.fill)
        return True

    @property
    def is_behind(self) -> bool:
        """Whether something was appended that is not durable yet, or never will be."""
        return self._durable != self._appended or self._abandoned is not None

    def abandon(self, error: TqError) -> None:
        """Write nothing more, not even what was appended in this step of the loop, since memory may differ from it.

        Commits that were asked for before are whole; they may still happen, but nobody is told that they did.

        Args:
            error: raised from now on where something is appended, or is to be durable.
        """
        if self._abandoned is not None:
            return
        self._abandoned = error
        if self._writer is not None:
            self._writer.drop()
        self._fail_waiting(error)
        self._waiting.clear()

    def append(self, record: bytes) -> None:
        """Add a record, which is durable some time after, together with all that is added in the same step of the loop.

        Raises:
            RuntimeError: what is there was not replayed, or the journal is closed.
            TqError: the journal was abandoned.
        """
        self._check_not_abandoned()
        if self._writer is None:
            raise RuntimeError("the journal takes no records: exhaust replay() first, and append before close()")
        self._appended += 1
        self._writer.append(record)

    def flush(self) -> None:
        """Return once all that was appended is durable; with `sync`, that blocks for an fsync.

        Raises:
            DiskFullError: there is no room; all stays as it is, and the next flush tries again.
            DiskFailedError: the disk fails.
            TqError: the journal was abandoned.
        """
        self._check_not_abandoned()
        if self.is_behind and self._writer is not None:
            self._settle(self._writer.wait_for(self._appended))
            self._rotate_when_full()

    async def durable(self) -> None:
        """Return once all that was appended before is durable.

        Raises:
            DiskFullError, DiskFailedError: see `flush`.
        """
        if not self.is_behind:
            return
        self._check_not_abandoned()
        if not isinstance(self._writer, GroupCommit):
            self.flush()
            return
        self._loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self._appended, lambda: _succeed(done), lambda error: _fail(done, error)))
        self._ask(self._writer)
        await done

    def after_durable(self, callback: Callable[[], None]) -> None:
        """Call something once all that was appended before is durable: now, or later in the order of these calls.

        It is never called once the journal was abandoned.
        """
        if self._abandoned is not None:
            return
        if not self.is_behind:
            callback()
            return
        self._waiting.append((self._appended, callback, None))
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._commit_soon)  # not now: what one step of the loop appends is committed together

    @property
    def has_next_file(self) -> bool:
        """Whether `start_generation` returns at once, instead of waiting for the disk to make a file."""
        return self._upkeep.is_ready

    async def next_file(self) -> None:
        """Return once `has_next_file`, without holding up the event loop; whoever needs it takes it in the same step.

        Raises:
            DiskFullError, DiskFailedError: there is none now.
        """
        await self._upkeep.ready()

    def start_generation(self) -> int:
        """Go on in a new file, and return its number: a snapshot of what is now holds all that is in files before it.

        That snapshot must not be put into place before `durable` returned.

        Raises:
            DiskFullError, DiskFailedError: see `flush`; nothing has changed.
        """
        self._check_not_abandoned()
        if self._writer is None:
            raise RuntimeError("the journal has no generations: exhaust replay() first")
        return self._rotate(self._writer)

    def finish_generation(self, generation: int) -> None:
        """Drop what no recovery needs, now that the snapshot of a generation is in place.

        The snapshot before it stays, with the journal since then: should the new one turn out to be damaged.
        """
        self._upkeep.do(lambda: _drop_unneeded(self._directory, generation))

    def close(self) -> None:
        """Make durable what was appended, unless it was abandoned; bring all files to rest and end the threads.

        Raises:
            DiskFullError, DiskFailedError: what was appended last is not durable; all else is done.
        """
        if self._is_closed:
            return
        self._is_closed = True
        writer, self._writer = self._writer, None
        try:
            if writer is not None and self.is_behind and self._abandoned is None:
                self._settle(writer.wait_for(self._appended))
        finally:
            if writer is not None:
                self._upkeep.retire(writer.close())
            self._upkeep.close()

    def _start(self, last_number: int) -> None:
        file = self._upkeep.take(_START_SECONDS)
        file.begin(last_number + 1)
        self._newest = file
        self._appended = self._durable = last_number + 1
        if self._sync:
            self._writer = GroupCommit(
                file,
                last_number + 1,
                on_committed=self._tell_settled,
                on_failed=self._tell_failed,
                on_left=self._upkeep.retire,
            )
        else:
            self._writer = DirectCommit(file, last_number + 1, on_left=self._upkeep.retire)

    def _do_aside(self, job: Callable[[], object]) -> None:
        self._upkeep.do(job)

    def _rotate(self, writer: DirectCommit | GroupCommit) -> int:
        file = self._upkeep.take()
        try:
            writer.rotate(file)
        except TqError:
            file.abandon()
            raise
        self._newest = file
        self._appended += 1  # the start of a file has a number too
        if isinstance(writer, DirectCommit):
            self._settle(self._appended)
        return file.number

    def _check_not_abandoned(self) -> None:
        if self._abandoned is not None:
            raise self._abandoned

    def _rotate_when_full(self) -> None:
        if self._newest.log_bytes < _FULL_LOG_BYTES or self._writer is None or self._abandoned is not None:
            return
        if self._upkeep.is_ready:
            try:
                self._rotate(self._writer)
            except TqError as error:
                _log.warning("the journal stays in a file that is full: %s", error)

    def _settle(self, durable: int) -> None:
        self._durable = durable
        while self._waiting and self._waiting[0][0] <= durable:
            _, succeed, _ = self._waiting.popleft()
            try:
                succeed()
            except Exception:
                _log.exception("what waited for the journal failed")

    def _fail_waiting(self, error: TqError) -> None:
        """Fail who awaits; what is to be called once durable stays."""
        waiting, self._waiting = self._waiting, deque()
        for number, succeed, fail in waiting:
            if fail is None:
                self._waiting.append((number, succeed, fail))
            else:
                fail(error)

    def _commit_soon(self) -> None:
        if self._abandoned is not None:
            return
        if isinstance(self._writer, GroupCommit):
            self._ask(self._writer)
            return
        try:
            self.flush()
        except TqError as error:
            _log.warning("the journal is behind: %s", error)

    def _ask(self, writer: GroupCommit) -> None:
        """Have what was appended committed; what was so before there was a loop to be told of it is settled here."""
        writer.ask()
        self._settle(max(writer.committed, self._durable))

    def _tell_settled(self, durable: int) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settled, durable)

    def _settled(self, durable: int) -> None:
        self._settle(max(durable, self._durable))
        self._rotate_when_full()

    def _tell_failed(self, error: TqError) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_waiting, error)


class Reserve:
    """A file that only takes up space on the disk: removed when the disk is full, so that clears can be written down.

    May be used by any thread.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is set aside yet; see `fill`."""
        self._path = path
        self._lock = threading.Lock()
        self._is_there = path.exists() and path.stat().st_size == RESERVE_BYTES

    @property
    def is_there(self) -> bool:
        """Whether there is room set aside."""
        return self._is_there

    def fill(self) -> bool:
        """Set room aside where as much again stays free; return whether there is some now."""
        with self._lock:
            if self._is_there:
                return True
            try:
                free = os.statvfs(self._path.parent)
                if free.f_bavail * free.f_frsize < 2 * RESERVE_BYTES:
                    return False
                with self._path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            except OSError as error:
                _log.warning("no room can be set aside in the data dir: %s", error)
                self._path.unlink(missing_ok=True)
                return False
            self._is_there = True
            return True

    def give_up_to_start(self) -> None:
        """Make the room free where there is no other for a start, which has to make files before it can read any."""
        free = os.statvfs(self._path.parent)
        if free.f_bavail * free.f_frsize < RESERVE_BYTES:
            self.give_up()

    def give_up(self) -> bool:
        """Make the room free; return whether there was some."""
        with self._lock:
            was_there, self._is_there = self._is_there, False
            self._path.unlink(missing_ok=True)
        if was_there:
            _log.error(
                "the disk of the data dir is full; %d MiB that were set aside are given up, so that clears can still "
                "be written down: free space",
                RESERVE_BYTES >> 20,
            )
        return was_there


class ReplayCost:
    """Estimates how long a start would take to replay the journal, and when a snapshot is to save it that.

    A snapshot is due before restoring the last one and replaying the journal since then take longer, together, than a
    start may take; but not before the replay takes as long as writing a snapshot does, which grows with the state.

    Attributes:
        seconds: estimate for the records that are in the journal now.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count_at_seconds = _WORTH_SECONDS
        self._snapshot_seconds = 0.0

    def add_change(self, size: int) -> None:
        """Count a change, or an answer, of so many bytes."""
        self.seconds += _CHANGE_SECONDS + _CHANGE_BYTE_SECONDS * size

    def add_put(self, size: int) -> None:
        """Count the record of a put, of so many bytes."""
        self.seconds += _PUT_SECONDS + _PUT_BYTE_SECONDS * size

    def add_files(self, count: int) -> None:
        """Count files of the journal, of which every start leaves one."""
        self.seconds += _FILE_SECONDS * count

    def reset(self) -> float:
        """Begin with an empty journal; return the estimate for the one before it."""
        before, self.seconds = self.seconds, 0.0
        self._count_at_seconds = _WORTH_SECONDS
        return before

    def add(self, seconds: float) -> None:
        """Add the estimate of a journal again whose snapshot could not be written."""
        self.seconds += seconds

    def note_snapshot(self, seconds: float) -> None:
        """Note how long a snapshot took to write."""
        self._snapshot_seconds = seconds

    def is_too_long(self, sample_count: Callable[[], int]) -> bool:
        """Whether a snapshot of so many samples is due; they are counted now and then only."""
        if self.seconds < self._count_at_seconds:
            return False
        self._count_at_seconds = self.seconds + _COUNT_AGAIN_SECONDS  # counting takes a step for each partition
        worth = max(_WORTH_SECONDS, self._snapshot_seconds)
        return self.seconds >= max(_LONGEST_START_SECONDS - sample_count() * _SAMPLE_SECONDS, worth)


def _drop_unneeded(directory: Path, generation: int) -> None:
    *older, kept = [0, *(number for number in snapshot_numbers(directory) if number < generation)]
    for number in journal_numbers(directory):
        if number < kept:
            remove_journal(journal_path(directory, number))
    for number in filter(None, older):
        snapshot_path(directory, number).unlink()


def _succeed(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: TqError) -> None:
    if not future.done():
        future.set_exception(error)
