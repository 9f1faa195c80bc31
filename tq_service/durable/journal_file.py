"""One file of the journal, as it is written: an SQLite database in WAL mode that no other connection has open.

A commit appends to the write-ahead log and to nothing else. The log is never begun anew, which would take an fsync in
the middle of a commit: when it is long enough, the journal goes on in its next file, and a thread brings this one to
rest.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tq_service.durable.file_names import journal_path, remove_journal, sync_directory
from tq_service.durable.machine import machine_boot_id
from tq_service.errors import DiskFailedError, DiskFullError, TqError

PAGE_BYTES: Final = 4096
_FRAME_BYTES: Final = PAGE_BYTES + 24
_RETRY_SECONDS: Final = 1.0
_SCHEMA: Final = """
CREATE TABLE made (machine_boot_id TEXT NOT NULL, is_synced INTEGER NOT NULL);
CREATE TABLE start (number INTEGER NOT NULL);
CREATE TABLE records (number INTEGER PRIMARY KEY, crc INTEGER NOT NULL, record BLOB NOT NULL);
"""
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

    def __init__(self, directory: Path, number: int, *, sync: bool) -> None:
        """Make the file.

        Args:
            directory: of the journal.
            number: of the file, which is not there yet.
            sync: whether a commit survives a loss of power. Without it, a loss of power may take the last commits, but
                none before one that it leaves.

        Raises:
            DiskFullError: there is no room for it.
            DiskFailedError: the disk fails.
        """
        self.number = number
        self.path = journal_path(directory, number)
        self.log_bytes = 0
        self._sync = sync
        try:
            self._connection = self._made()
            sync_directory(directory)
        except sqlite3.Error as error:
            remove_journal(self.path)
            raise write_error(error, self.path) from error
        self._execute = self._connection.cursor().execute

    def _made(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            for pragma in (
                f"page_size = {PAGE_BYTES}",
                "locking_mode = EXCLUSIVE",  # keeps the index of the log in memory, and others out
                "synchronous = FULL",
            ):
                connection.execute(f"PRAGMA {pragma}")
            connection.executescript(_SCHEMA)
            connection.execute("INSERT INTO made VALUES (?, ?)", (machine_boot_id(), self._sync))
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._sync else 'NORMAL'}")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            # The first write makes the log and syncs its header, so that no later one has to.
            connection.execute("PRAGMA user_version = 1")
        except BaseException:
            connection.close()
            raise
        return connection

    def begin(self, number: int) -> None:
        """Write down that the file is in use; that has a number like a record, and the first record has the next.

        Raises:
            DiskFullError, DiskFailedError: see `write`.
        """
        self._run("INSERT INTO start VALUES (?)", (number,))

    def write(self, first: int, records: Sequence[bytes]) -> None:
        """Commit records, all or none.

        Args:
            first: number of the first of them.
            records: what to write; not empty.

        Raises:
            DiskFullError: there is no room; nothing is written, and trying again later is right.
            DiskFailedError: an fsync failed; what the disk has is unknown.
        """
        if len(records) == 1:
            self._run(_INSERT, (first, checksum(first, records[0]), records[0]))
            self.log_bytes += _FRAME_BYTES + len(records[0])
            return
        rows = [(number, checksum(number, record), record) for number, record in enumerate(records, start=first)]
        try:
            self._execute("BEGIN IMMEDIATE")
            self._connection.executemany(_INSERT, rows)
            self._execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise write_error(error, self.path) from error
        self.log_bytes += _FRAME_BYTES + sum(map(len, records))

    def rest(self) -> None:
        """Bring all that is in the log into the database, synced, and close it; the log is gone then.

        Raises:
            DiskFullError, DiskFailedError: see `write`; the file stays open, and nothing is lost.
        """
        self._run("PRAGMA wal_checkpoint(TRUNCATE)", ())
        self._connection.close()

    def abandon(self) -> None:
        """Close and remove the file."""
        self._connection.close()
        remove_journal(self.path)

    def _run(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            self._execute(statement, values).fetchall()
        except sqlite3.Error as error:
            self._roll_back()
            raise write_error(error, self.path) from error

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.rollback()


def write_error(error: sqlite3.Error, path: Path) -> TqError:
    """Return what it means that SQLite could not write.

    After an fsync that failed, the system takes pages that never reached the disk for written: a second try would prove
    nothing.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code in _FSYNC_FAILED:
        return DiskFailedError(
            f"the disk of the data dir failed to sync {path.name} ({error}): what was not acknowledged may be lost; "
            "check the disk, then start the service again"
        )
    reason = "is full" if code == sqlite3.SQLITE_FULL else f"does not take what is written ({error})"
    return DiskFullError(
        f"the disk of the data dir {reason}: {path.name} cannot grow; nothing that was acknowledged is lost; free "
        "space, the service goes on by itself",
        retry_after_seconds=_RETRY_SECONDS,
    )
