"""Reading a journal back: in order, each record checked, and stopping where one is missing."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tq_service.durable.file_names import (
    journal_numbers,
    journal_path,
    journals_without_database,
    set_aside,
)
from tq_service.durable.found_file import FoundFile, TornFile, is_of_system, last_number, look_at
from tq_service.durable.journal_file import checksum, make_begun
from tq_service.errors import DiskFullError, JournalDamagedError

_log = logging.getLogger(__name__)
_NO_LIMIT: Final = 2**62
_REMEDY: Final = (
    "restore a checkpoint, or start with --accept-journal-loss to go on with what was written before it and forget all "
    "that came later"
)


class JournalReader:
    """Reads what a journal holds from one of its files on.

    What a crash or a loss of power may leave is cut and logged; files behind a cut are renamed, to "*.lost".

    Attributes:
        last_number: of the last record or start that was read.
    """

    def __init__(self, directory: Path, *, accept_loss: bool, do_later: Callable[[Callable[[], object]], None]) -> None:
        """Read nothing yet; what files are added from now on is not read.

        Args:
            directory: of the journal.
            accept_loss: whether to go on without what follows a damaged place, instead of raising.
            do_later: has another thread do what nobody waits for.
        """
        self._directory = directory
        self._numbers = journal_numbers(directory)
        self._accept_loss = accept_loss
        self._do_later = do_later
        self.last_number = 0

    def records(self, generation: int) -> Iterator[bytes]:
        """Yield the records of the files from `generation` on; 0: from the beginning.

        Raises:
            JournalDamagedError: a record is damaged or missing that had been written.
            DiskFullError: a file cannot be read now, for lack of room on the disk or of something else.
        """
        for path in journals_without_database(self._directory):
            self._damaged(path, "is missing, but its log is there")
        found: list[FoundFile] = []
        try:
            for number in self._numbers:
                found += self._look_at(number) if number >= generation else []
            used = [file for file in found if file.start]
            if self._has_beginning(found, used, generation):
                yield from self._read_all(used)
            else:
                self._lose(used)
                self._begin_anew(generation, found)
            self._remove_unused(found)
        finally:
            for file in found:
                self._do_later(file.close)

    def _remove_unused(self, found: Sequence[FoundFile]) -> None:
        for file in found:
            if not file.start:
                if not file.tail.whole_bytes:
                    _log.warning("%s has no log, and is taken for one that was never used", file.path.name)
                self._do_later(file.remove)

    def _look_at(self, number: int) -> list[FoundFile]:
        """Return the file, if it can be read at all."""
        path = journal_path(self._directory, number)
        try:
            return [look_at(path, accept_loss=self._accept_loss)]
        except TornFile as torn:
            self._damaged(path, str(torn))
        except (sqlite3.DatabaseError, TypeError) as error:  # TypeError: a row that should be there is not
            _check_damage(path, error)
            self._damaged(path, f"is no database that can be read ({error})")
            set_aside(path)
        return []

    def _has_beginning(self, found: Sequence[FoundFile], used: Sequence[FoundFile], generation: int) -> bool:
        """Whether nothing is missing before the first record; raises where only damage explains that."""
        path = journal_path(self._directory, generation)
        if generation == 0:
            if used and used[0].start != 1:
                self._damaged(
                    used[0].path, f"begins with number {used[0].start}, and no snapshot holds what was before"
                )
            return not used or used[0].start == 1
        first = found[0] if found and found[0].path == path else None
        if first is None:
            self._damaged(path, "is missing, but the snapshot that it follows is there")
        elif not first.start and not first.may_lose_tail:
            self._damaged(path, "was never begun, but the snapshot that it follows is there")
        return first is not None and first.start > 0

    def _read_all(self, used: Sequence[FoundFile]) -> Iterator[bytes]:
        for index, file in enumerate(used):
            rest = used[index + 1 :]
            yield from self._read(file, rest[0].start if rest else _NO_LIMIT)
            if rest and self.last_number + 1 < rest[0].start:
                # A file of a later run of the machine was begun when what a loss of power took was known.
                if not file.may_lose_tail or rest[0].machine_boot_id != file.machine_boot_id:
                    self._damaged(
                        file.path, f"ends with record {self.last_number}, but the next file begins with {rest[0].start}"
                    )
                self._lose(rest)
                return

    def _read(self, file: FoundFile, limit: int) -> Iterator[bytes]:
        """Yield records up to a limit; what is behind it was cut before, when the next file was begun."""
        self.last_number = file.start
        try:
            for number, crc, record in file.rows(limit):
                if number != self.last_number + 1:
                    self._damaged(file.path, f"has no record {self.last_number + 1}, but record {number}")
                    return
                if crc != checksum(number, record):
                    self._damaged(file.path, f"has a record {number} whose checksum is wrong")
                    return
                self.last_number = number
                yield record
        except sqlite3.DatabaseError as error:
            _check_damage(file.path, error)
            self._damaged(file.path, f"cannot be read after record {self.last_number} ({error})")
        if file.tail.torn_bytes:
            _log.warning(
                "%s: cut %d bytes with %d commits after record %d, which were not whole when the service or the "
                "machine stopped",
                file.path.name,
                file.tail.torn_bytes,
                file.tail.torn_commit_count,
                self.last_number,
            )

    def _lose(self, files: Sequence[FoundFile]) -> None:
        for file in files:
            _log.warning("%s is set aside: what was before it is lost", file.path.name)
            file.close()
            set_aside(file.path)

    def _begin_anew(self, generation: int, found: list[FoundFile]) -> None:
        """Have an empty file where the journal goes on from a snapshot, instead of the one whose start is lost.

        Its number tells who goes on from an older snapshot that records are missing before it.
        """
        if not generation:
            return
        path = journal_path(self._directory, generation)
        for unused in [file for file in found if file.path == path]:
            unused.close()
            found.remove(unused)
        before = [number for number in self._numbers if number < generation]
        self.last_number = 2 + (last_number(journal_path(self._directory, before[-1])) if before else 0)
        make_begun(self._directory, generation, self.last_number)

    def _damaged(self, path: Path, what: str) -> None:
        if not self._accept_loss:
            raise JournalDamagedError(
                f"the journal is damaged: {path} {what}; {_REMEDY}",
                metadata={"file": path.name, "after_record": str(self.last_number)},
            )
        _log.error("the journal is damaged, and the loss was accepted: %s %s", path, what)


def _check_damage(path: Path, error: Exception) -> None:
    """Refuse to take for damage what says nothing of the file: who accepts the loss of that would lose all of it."""
    if is_of_system(error):
        raise DiskFullError(
            f"{path} cannot be read now ({error}): the disk of the data dir is full, or this process lacks files or "
            "rights; nothing is lost: change that, and start the service again"
        ) from error
