"""A journal file that somebody else has written: what it says of itself before its records are read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from tq_service.durable.file_names import beside, remove_journal
from tq_service.durable.log_tail import LogTail, read_log_tail
from tq_service.durable.machine import machine_boot_id

_OF_SYSTEM: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR}
)
_OF_CONTENT: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR_READ,
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
        sqlite3.SQLITE_IOERR_DATA,
    }
)


class FoundFile:
    """A journal file, as it was found.

    Attributes:
        path: of the database.
        start: number of its start, which its records follow; 0 in one that was made but never used.
        machine_boot_id: of the machine, while it was written.
        may_lose_tail: whether it was written without fsyncs before the machine was started anew.
        tail: what its log held.
    """

    def __init__(self, path: Path, made: tuple[str, bool], tail: LogTail) -> None:
        """Open a file whose log may be read.

        Args:
            path: of the database.
            made: where it was made: the machine's boot id, and whether it was written with fsyncs.
            tail: what its log holds.

        Raises:
            sqlite3.DatabaseError: it cannot be read.
        """
        self.path = path
        self.tail = tail
        self.machine_boot_id, is_synced = made
        self.may_lose_tail = not is_synced and self.machine_boot_id != machine_boot_id()
        self._connection: sqlite3.Connection | None = _connect(path)
        try:
            self.start = _start(self._connection)
        finally:
            if not tail.whole_bytes:  # there may be many such files, and opening one again costs little
                self.close()

    def rows(self, limit: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, checksum and record of what is before a number, in order.

        Raises:
            sqlite3.DatabaseError: the file cannot be read.
        """
        if self._connection is None:
            self._connection = _connect(self.path)
        query = "SELECT number, crc, record FROM records WHERE number < ? ORDER BY number"
        for row in self._connection.execute(query, (limit,)):
            if tuple(map(type, row)) != (int, int, bytes):  # SQLite keeps what is damaged as what it looks like
                raise sqlite3.DatabaseError("a record has values of other types")
            yield row

    def close(self) -> None:
        """Bring what is in its log into the database, which takes some fsyncs, and close it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def remove(self) -> None:
        """Close and remove the file."""
        self.close()
        remove_journal(self.path)


def is_of_system(error: Exception) -> bool:
    """Whether an error says that the system refuses something now, such as room on the disk, instead of damage."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code not in _OF_CONTENT and code & 0xFF in _OF_SYSTEM


class TornFile(Exception):  # noqa: N818  (a finding, which the reader turns into an error or a line of the log)
    """The log of a file breaks where it was whole once."""

    def __init__(self, tail: LogTail) -> None:
        super().__init__(
            f"breaks at byte {tail.whole_bytes} of its log, and {tail.torn_bytes} bytes follow, with at least "
            f"{tail.torn_commit_count} commits that had been written"
        )


def look_at(path: Path, *, accept_loss: bool) -> FoundFile:
    """Return what a file says of itself.

    Raises:
        TornFile: its log is damaged, and it is left as it is; not with `accept_loss`.
        sqlite3.DatabaseError: it cannot be read.
    """
    tail = read_log_tail(beside(path, "-wal"))
    # Read-only: closing would remove the log, and with it what shows the damage. Not without the log: a process that
    # was killed while it brought the log into the database leaves one that cannot be read alone.
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        boot_id, is_synced = connection.execute("SELECT machine_boot_id, is_synced FROM made").fetchone()
    is_same_run = boot_id == machine_boot_id()
    if not accept_loss and _is_damage(tail, is_synced=bool(is_synced), is_same_run=is_same_run):
        raise TornFile(tail)
    return FoundFile(path, (boot_id, bool(is_synced)), tail)


def _is_damage(tail: LogTail, *, is_synced: bool, is_same_run: bool) -> bool:
    """Whether a torn log is more than what the end of a process, or else a loss of power, may leave.

    A process that ends leaves whole pages, so that at most the commit is missing that it was about to finish. A loss of
    power may take any page since the last fsync: with one in each commit, those of the last commit.
    """
    if is_same_run:
        return tail.torn_commit_count > 0
    return is_synced and tail.goes_on_after_commit


def last_number(path: Path) -> int:
    """Return the highest number in a file; 0 in one without any, or that cannot be read."""
    query = "SELECT max(number) FROM (SELECT number FROM start UNION ALL SELECT max(number) FROM records)"
    try:
        with closing(_connect(path)) as connection:
            return int(connection.execute(query).fetchone()[0] or 0)
    except sqlite3.DatabaseError:
        return 0


def _start(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT number FROM start").fetchone()
    start = 0 if row is None else row[0]
    if not isinstance(start, int):
        raise sqlite3.DatabaseError(f"its start is {start!r}")
    return start


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection
