"""Reading a journal back: in order, each record checked, and stopping where one is missing."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tq_service.durable.file_names import beside, journal_numbers, journal_path, remove_journal, set_aside
from tq_service.durable.journal_file import checksum
from tq_service.durable.log_tail import LogTail, read_log_tail
from tq_service.durable.machine import machine_boot_id
from tq_service.errors import JournalDamagedError

_log = logging.getLogger(__name__)
_REMEDY = (
    "restore a checkpoint, or start with --accept-journal-loss to go on with what was written before it and forget all "
    "that came later"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A journal file that was in use.

    Attributes:
        path: of the database.
        start: number of its start; its records have the following ones.
        may_lose_tail: whether it was written without fsyncs before the machine was started anew.
        tail: what its log held when it was found.
    """

    path: Path
    start: int
    may_lose_tail: bool
    tail: LogTail


class JournalReader:
    """Reads what a journal holds from one of its files on.

    Attributes:
        last_number: of the last record or start that was read, once all were.
    """

    def __init__(self, directory: Path, *, accept_loss: bool) -> None:
        """Read nothing yet.

        Args:
            directory: of the journal.
            accept_loss: whether to go on without what follows a damaged place, instead of raising.
        """
        self._directory = directory
        self._accept_loss = accept_loss
        self.last_number = 0

    def records(self, generation: int) -> Iterator[bytes]:
        """Yield the records of the files from `generation` on; 0: from the beginning.

        What a crash or a loss of power may leave is cut and logged. Files behind a cut are renamed, to "*.lost".

        Raises:
            JournalDamagedError: a record is damaged or missing that had been written.
        """
        found = self._found(generation)
        self._check_beginning(found, generation)
        self.last_number = found[0].start - 1 if found else 0
        for index, file in enumerate(found):
            limit = found[index + 1].start if index + 1 < len(found) else None
            yield from self._read(file, limit)
            if limit is not None and self.last_number + 1 < limit:
                self._cut(file, found[index + 1 :])
                return

    def _found(self, generation: int) -> list[_Found]:
        found = []
        for number in journal_numbers(self._directory):
            path = journal_path(self._directory, number)
            if number < generation:
                continue
            try:
                file = self._open(path)
            except sqlite3.DatabaseError as error:
                self._damaged(path, f"is no database that can be read ({error})")
                set_aside(path)
                continue
            if file is None:
                remove_journal(path)
            else:
                found.append(file)
        return found

    def _open(self, path: Path) -> _Found | None:
        """Return what a file says of itself, None where it was made but never used."""
        tail = read_log_tail(beside(path, "-wal"))
        # Immutable: without its log, which closing would remove, and with it what shows the damage.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as connection:
            boot_id, is_synced = connection.execute("SELECT machine_boot_id, is_synced FROM made").fetchone()
        same_machine_run = boot_id == machine_boot_id()
        if _is_damage(tail, is_synced=bool(is_synced), same_machine_run=same_machine_run):
            self._damaged(
                path,
                f"breaks at byte {tail.whole_bytes} of its log: {tail.torn_bytes} bytes follow, with "
                f"{tail.torn_commit_count} commits or more that had been written",
            )
        with closing(_connect(path)) as connection:
            row = connection.execute("SELECT number FROM start").fetchone()
        if row is None:
            return None
        return _Found(path=path, start=row[0], may_lose_tail=not is_synced and not same_machine_run, tail=tail)

    def _check_beginning(self, found: list[_Found], generation: int) -> None:
        if generation:
            expected = journal_path(self._directory, generation)
            if not found or found[0].path != expected:
                self._damaged(expected, "is missing or was never begun, but the snapshot before it is there")
        elif found and found[0].start != 1:
            self._damaged(found[0].path, f"begins with record {found[0].start}, and no snapshot holds what was before")

    def _read(self, file: _Found, limit: int | None) -> Iterator[bytes]:
        self.last_number = file.start
        query = "SELECT number, crc, record FROM records WHERE number < ? ORDER BY number"
        with closing(_connect(file.path)) as connection:
            try:
                for number, crc, record in connection.execute(query, (2**62 if limit is None else limit,)):
                    if number != self.last_number + 1:
                        self._damaged(file.path, f"has no record {self.last_number + 1}, but record {number}")
                        return
                    if crc != checksum(number, record):
                        self._damaged(file.path, f"has a record {number} whose checksum is wrong")
                        return
                    self.last_number = number
                    yield record
            except sqlite3.DatabaseError as error:
                self._damaged(file.path, f"cannot be read after record {self.last_number} ({error})")
        if file.tail.torn_bytes:
            _log.warning(
                "%s: cut %d bytes and at least %d commits after record %d, which were not whole when the service or "
                "the machine stopped",
                file.path.name,
                file.tail.torn_bytes,
                file.tail.torn_commit_count,
                self.last_number,
            )

    def _cut(self, file: _Found, lost: list[_Found]) -> None:
        if not file.may_lose_tail:
            self._damaged(
                file.path, f"ends with record {self.last_number}, but the next file begins with {lost[0].start}"
            )
        for one in lost:
            _log.warning("%s is set aside: it follows what was lost of %s", one.path.name, file.path.name)
            set_aside(one.path)

    def _damaged(self, path: Path, what: str) -> None:
        if not self._accept_loss:
            raise JournalDamagedError(
                f"the journal is damaged: {path} {what}; {_REMEDY}",
                metadata={"file": path.name, "after_record": str(self.last_number)},
            )
        _log.error("the journal is damaged, and the loss was accepted: %s %s", path, what)


def _is_damage(tail: LogTail, *, is_synced: bool, same_machine_run: bool) -> bool:
    """Whether a torn log is more than what the end of a process, or else a loss of power, may leave.

    A process that ends leaves whole pages, so that at most the commit it was about to finish is not there. A loss of
    power leaves any of the pages since the last fsync: with one for each commit, those of the last commit.
    """
    if same_machine_run:
        return tail.torn_commit_count > 0
    return is_synced and tail.goes_on_after_commit


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection
