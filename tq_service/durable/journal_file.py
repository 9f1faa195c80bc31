"""The files of the journal as they are written, and who commits to them: the caller, or a thread that waits for fsync.

A file is an SQLite database in WAL mode that no other connection has open.

A commit appends to the write-ahead log and to nothing else. The log is never begun anew, which would take an fsync in
the middle of a commit: when it is long enough, the journal goes on in its next file, and a thread brings this one to
rest.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from tq_service.durable.file_names import journal_path, making_path, remove_journal, remove_side_files, sync_directory
from tq_service.durable.machine import machine_boot_id
from tq_service.errors import DiskFailedError, DiskFullError, InternalError, TqError

_log = logging.getLogger(__name__)
PAGE_BYTES: Final = 4096
_FRAME_BYTES: Final = PAGE_BYTES + 24
_RETRY_SECONDS: Final = 1.0
_MAX_GROUP_RECORDS: Final = 4096
_SCHEMA: Final = (
    "CREATE TABLE made (machine_boot_id TEXT NOT NULL, is_synced INTEGER NOT NULL)",
    "CREATE TABLE start (number INTEGER NOT NULL)",
    "CREATE TABLE records (number INTEGER PRIMARY KEY, crc INTEGER NOT NULL, record BLOB NOT NULL)",
)
_INSERT: Final = "INSERT INTO records VALUES (?, ?, ?)"
_FSYNC_FAILED: Final = frozenset({sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC})


def checksum(number: int, record: bytes) -> int:
    """Return the CRC-32 of a record in its place: that of a record which has changed places differs too."""
    return zlib.crc32(record, number & 0xFFFFFFFF)


class JournalFile:
    """A file that is written to. Used by one thread at a time.

    Attributes:
        number: of the file.
        path: of the database.
        log_bytes: about how long its write-ahead log is.
    """

    def __init__(
        self, directory: Path, number: int, *, sync: bool, make_room: Callable[[], bool] = lambda: False
    ) -> None:
        """Make the file.

        Args:
            directory: of the journal.
            number: of the file, which is not there yet.
            sync: whether a commit survives a loss of power. Without it, a loss of power may take the last commits, but
                none before one that it leaves.
            make_room: called where there is no room for a commit; whether there may be some then.

        Raises:
            DiskFullError: there is no room for it.
            DiskFailedError: the disk fails.
        """
        self.number = number
        self.path = journal_path(directory, number)
        self.log_bytes = 0
        self._make_room = make_room
        self._failure: DiskFailedError | None = None
        try:
            _make(making_path(directory, number), self.path, sync=sync)
            self._connection = _opened(self.path, sync=sync)
        except (sqlite3.Error, OSError) as error:
            remove_journal(making_path(directory, number))
            remove_journal(self.path)
            raise write_error(error, self.path) from error
        self._execute = self._connection.cursor().execute

    def begin(self, number: int) -> None:
        """Write down that the file is in use; that has a number like a record, and the first record has the next.

        Raises:
            DiskFullError, DiskFailedError: see `write`.
        """
        self._commit(lambda: self._execute("INSERT INTO start VALUES (?)", (number,)))

    def write(self, first: int, records: Sequence[bytes]) -> None:
        """Commit records, all or none.

        Args:
            first: number of the first of them.
            records: what to write; not empty.

        Raises:
            DiskFullError: there is no room; nothing is written, and trying again later is right.
            DiskFailedError: an fsync failed, now or before; what the disk has is unknown.
        """
        if len(records) == 1:
            self._commit(lambda: self._execute(_INSERT, (first, checksum(first, records[0]), records[0])))
            self.log_bytes += _FRAME_BYTES + len(records[0])
        else:
            self._commit(lambda: self._write_group(first, records))
            self.log_bytes += _FRAME_BYTES + sum(map(len, records))

    def rest(self) -> None:
        """Bring all that is in the log into the database, synced, and close it; the log is gone then.

        Raises:
            DiskFullError: there is no room for that; the file stays open.
            DiskFailedError: the disk fails; the file stays open, with its log.
        """
        try:
            self._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            raise write_error(error, self.path) from error
        self.close()

    def close(self) -> None:
        """Close the file, which keeps its log where that cannot be brought into the database."""
        self._connection.close()

    def abandon(self) -> None:
        """Close and remove the file."""
        self.close()
        remove_journal(self.path)

    def _write_group(self, first: int, records: Sequence[bytes]) -> None:
        rows = [(number, checksum(number, record), record) for number, record in enumerate(records, start=first)]
        self._execute("BEGIN IMMEDIATE")
        self._connection.executemany(_INSERT, rows)
        self._execute("COMMIT")

    def _commit(self, change: Callable[[], object]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            change()
        except sqlite3.Error as error:
            self._roll_back()
            failure = write_error(error, self.path)
            if isinstance(failure, DiskFailedError):
                self._failure = failure
            elif self._make_room():
                self._commit(change)
                return
            raise failure from error

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.rollback()


def make_begun(directory: Path, number: int, start: int) -> None:
    """Make a file that holds its start and nothing else, in the place of the one that has its name, if any.

    A crash leaves the one or the other.

    Args:
        directory: of the journal.
        number: of the file.
        start: number of its start, see `JournalFile.begin`.

    Raises:
        DiskFullError: there is no room for it.
        DiskFailedError: the disk fails.
    """
    path = journal_path(directory, number)
    try:
        _make(making_path(directory, number), path, sync=True, start=start)
    except (sqlite3.Error, OSError) as error:
        remove_journal(making_path(directory, number))
        raise write_error(error, path) from error


def _make(making: Path, path: Path, *, sync: bool, start: int | None = None) -> None:
    """Make a database that no record was written to yet; it has its name once all else is on the disk."""
    remove_journal(making)
    with closing(sqlite3.connect(making, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO made VALUES (?, ?)", (machine_boot_id(), sync))
        if start is not None:
            connection.execute("INSERT INTO start VALUES (?)", (start,))
        connection.execute("COMMIT")
    with making.open("rb") as file:
        os.fsync(file.fileno())
    remove_side_files(path)  # of a file that it takes the place of: a log is read whatever database it is beside
    making.rename(path)
    sync_directory(path.parent)


def _opened(path: Path, *, sync: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # keeps the index of the log in memory
        connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        # The first write makes the log and syncs its header, so that no later one has to.
        connection.execute("PRAGMA user_version = 1")
        sync_directory(path.parent)
    except BaseException:
        connection.close()
        raise
    return connection


def write_error(error: sqlite3.Error | OSError, path: Path) -> TqError:
    """Return what it means that a file could not be written.

    After an fsync that failed, the system takes pages that never reached the disk for written: a second try would prove
    nothing.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code in _FSYNC_FAILED:
        return DiskFailedError(
            f"the disk of the data dir failed to sync {path.name} ({error}): what was not acknowledged may be lost; "
            "check the disk, then start the service again"
        )
    is_full = code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC
    reason = "is full" if is_full else f"does not take what is written ({error})"
    return DiskFullError(
        f"the disk of the data dir {reason}: {path.name} cannot grow; nothing that was acknowledged is lost; free "
        "space, the service goes on by itself",
        retry_after_seconds=_RETRY_SECONDS,
    )


class DirectCommit:
    """Commits without an fsync, by the thread that asks: such a commit takes less than handing it to another thread.

    Records are written in the order in which they come, all that have come in one commit.
    """

    def __init__(self, file: JournalFile, committed: int, *, on_left: Callable[[JournalFile], None]) -> None:
        """Begin without pending records.

        Args:
            file: where to begin; `begin` has been called.
            committed: number of the last record that is durable.
            on_left: given a file that nothing more is written to.
        """
        self._file = file
        self._committed = committed
        self._on_left = on_left
        self._pending: list[bytes] = []
        self.append = self._pending.append

    def rotate(self, file: JournalFile) -> None:
        """Write what is appended from now on into another file; commits all that is pending.

        Raises:
            DiskFullError, DiskFailedError: nothing has changed.
        """
        self.wait_for(self._committed + len(self._pending))
        file.begin(self._committed + 1)
        self._committed += 1
        left, self._file = self._file, file
        self._on_left(left)

    def wait_for(self, number: int) -> int:
        """Commit all that is pending; return the number of the last durable record, which is at least `number`.

        Raises:
            DiskFullError, DiskFailedError: the commit failed; what is pending stays so.
        """
        if self._pending:
            self._file.write(self._committed + 1, self._pending)
            self._committed += len(self._pending)
            self._pending.clear()
        return self._committed

    def drop(self) -> None:
        """Forget what is pending; it is never committed."""
        self._pending.clear()

    def close(self) -> JournalFile:
        """Return the file that was written to."""
        return self._file


class GroupCommit:
    """Commits that wait for an fsync, on a thread of their own: what comes during one is committed by the next.

    Records are written in the order in which they come, as many in a commit as have come since the last one began.

    What is appended between two calls of `ask` is never parted by the end of a commit: a change would be there after a
    crash without the answer that its retry is to get.

    What could not be committed stays first in the queue and is tried again when somebody asks, not by itself.
    """

    def __init__(
        self,
        file: JournalFile,
        committed: int,
        *,
        on_committed: Callable[[int], None],
        on_failed: Callable[[TqError], None],
        on_left: Callable[[JournalFile], None],
    ) -> None:
        """Start the thread.

        Args:
            file: where to begin; `begin` has been called.
            committed: number of the last record that is durable.
            on_committed: told the number of the last record that is durable.
            on_failed: told why a commit failed.
            on_left: given a file that nothing more is written to. All three are called by the thread.
        """
        self._file = file
        self._committed = committed
        self._on_committed, self._on_failed, self._on_left = on_committed, on_failed, on_left
        self._appended: list[bytes] = []
        self._queue: deque[list[bytes] | JournalFile] = deque()
        self._in_hand: list[bytes] = []
        self._failure: TqError | None = None
        self._is_closing = False
        self._asked = threading.Event()
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tq-journal-commit", daemon=True)
        self._thread.start()

    @property
    def committed(self) -> int:
        """Number of the last record that is durable."""
        return self._committed

    def append(self, record: bytes) -> None:
        """Take a record, for the queue when somebody asks."""
        self._appended.append(record)

    def rotate(self, file: JournalFile) -> None:
        """Write what is appended from now on into another file."""
        self._enqueue()
        self._queue.append(file)
        self._asked.set()

    def ask(self) -> None:
        """Have what was appended committed."""
        self._enqueue()
        self._asked.set()

    def _enqueue(self) -> None:
        if self._appended:
            self._queue.append(self._appended)
            self._appended = []

    def wait_for(self, number: int) -> int:
        """Return the number of the last durable record, once `number` is; blocks.

        Raises:
            DiskFullError, DiskFailedError: the commit failed.
        """
        with self._progress:
            self._failure = None
            self.ask()
            self._progress.wait_for(lambda: self._committed >= number or self._failure is not None)
            if self._committed < number and self._failure is not None:
                raise self._failure
            return self._committed

    def drop(self) -> None:
        """Forget what came since somebody asked last; it is never committed. What was asked for may be."""
        self._appended = []

    def close(self) -> JournalFile:
        """End the thread, after one more try to commit what is in the queue; return the file it wrote to."""
        self._is_closing = True
        self.ask()
        self._thread.join()
        for unused in self._queue:
            if isinstance(unused, JournalFile):
                unused.abandon()
        return self._file

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._asked.wait()
            self._asked.clear()
            is_last = self._is_closing
            self._commit_all()

    def _commit_all(self) -> None:
        try:
            while self._in_hand or self._queue:
                self._commit_next()
        except TqError as error:
            self._fail(error)
        except Exception:
            _log.exception("the journal cannot commit")
            self._fail(InternalError("the journal cannot commit; the log of the service has the details"))

    def _commit_next(self) -> None:
        if not self._in_hand and isinstance(self._queue[0], JournalFile):
            left, entered = self._file, self._queue[0]
            entered.begin(self._committed + 1)
            self._queue.popleft()
            self._file = entered
            self._on_left(left)
            self._advance(1)
            return
        while self._queue and len(self._in_hand) < _MAX_GROUP_RECORDS:
            records = self._queue[0]
            if isinstance(records, JournalFile):
                break
            self._in_hand += records
            self._queue.popleft()
        self._file.write(self._committed + 1, self._in_hand)
        count = len(self._in_hand)
        self._in_hand = []
        self._advance(count)

    def _advance(self, count: int) -> None:
        with self._progress:
            self._committed += count
            self._progress.notify_all()
        self._on_committed(self._committed)

    def _fail(self, error: TqError) -> None:
        with self._progress:
            self._failure = error
            self._progress.notify_all()
        self._on_failed(error)
