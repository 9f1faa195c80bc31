"""Reads the segments of a log in order, checks each record, cuts a torn tail off and reports damage."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tq_service.errors import DiskFullError, JournalDamagedError
from tq_service.journal.files import beside, quarantine
from tq_service.journal.log import Record
from tq_service.journal.segment import Break, FoundSegment, machine_boot_id, segment_numbers, segment_path
from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)
_LOST_SUFFIX: Final = ".lost"
_REMEDY: Final = (
    "restore a checkpoint, or start with --accept-journal-loss to go on with what was written before it and forget all "
    "that came later"
)


class LogReader:
    """Reads a log from one of its segments on, and leaves it so that a writer can continue.

    Attributes:
        last_number: of the last record or opening that was read; the writer continues with the next one.
        last_segment: the one to close; None in an empty log.
    """

    def __init__(self, directory: Path, *, accept_loss: bool) -> None:
        self._directory = directory
        self._accept_loss = accept_loss
        self.last_number = 0
        self.last_segment: FoundSegment | None = None

    def records(self, number: int) -> Iterator[Record]:
        """Yield all records from a segment on.

        Args:
            number: of the segment's opening; 0 for the first one.

        Raises:
            JournalDamagedError: a written record is damaged or missing.
            DiskFullError: a file cannot be read now, for lack of something in the system.
        """
        try:
            found = [FoundSegment(self._directory, each) for each in segment_numbers(self._directory) if each >= number]
            if not self._has_beginning(found, number):
                self._lose(found)
                self.last_number = max(number, 1) - 1  # the log continues after the snapshot
                return
            for index, segment in enumerate(found):
                self.last_number, self.last_segment = segment.number, segment
                for record in segment.records():
                    self.last_number = record.number
                    yield record
                following = found[index + 1 :]
                if not self._continues(segment, following):
                    self._lose(following)
                    return
        except OSError as error:
            # Not damage: accepting a loss would also discard every record that cannot be read now.
            raise DiskFullError(
                f"{error.filename or self._directory} cannot be read now ({error}): the disk of the data dir is full, "
                "or this process lacks files or rights; nothing is lost: change that, and start the service again",
                metadata={"path": str(error.filename or self._directory)},
            ) from error

    def _has_beginning(self, found: Sequence[FoundSegment], number: int) -> bool:
        """Whether nothing is missing before the first record; raises if only damage explains the gap."""
        first = found[0] if found else None
        if first is None or first.number != (number or 1):
            if number:
                path = segment_path(self._directory, number)
                self._report(path, 0, "is missing, but the snapshot that it follows is there")
            elif first is not None:
                self._report(first.path, 0, f"begins with number {first.number}, and no snapshot holds what was before")
            return first is None and not number
        if not first.is_begun and (number or len(found) > 1 or not _was_being_made(first)):
            self._report(first.path, 0, f"{first.flaw}")
        return first.is_begun

    def _continues(self, segment: FoundSegment, following: Sequence[FoundSegment]) -> bool:
        """Whether the next segment begins at the end of this one; raises if not and only damage explains it."""
        number = segment.last_number + 1
        continues = bool(following) and following[0].is_begun and following[0].number == number
        if segment.flaw is not None:
            if not continues and _is_damage(segment, segment.flaw):
                self._report(segment.path, segment.end, f"{segment.flaw}")
                self._keep_copy(segment)
                return False
            _log.warning(
                LogMessage(
                    "cut a record that was not whole when the service or the machine stopped",
                    file=segment.path.name,
                    bytes=segment.size - segment.end,
                    after_record=segment.last_number,
                )
            )
        # A later run of the machine began its segment after it knew which bytes a loss of power had taken.
        is_of_later_run = bool(following) and following[0].machine_boot_id not in ("", segment.machine_boot_id)
        if continues or (segment.may_lose_tail and not is_of_later_run):
            return continues
        if not following:
            if segment.is_closed:
                path = segment_path(self._directory, number)
                self._report(path, 0, f"is missing, but {segment.path.name} says that it follows")
        elif following[0].number != number:
            self._report(
                segment.path,
                segment.end,
                f"ends with record {number - 1}, but the next file begins with number {following[0].number}",
            )
        elif segment.is_closed or len(following) > 1 or not _was_being_made(following[0]):
            self._report(following[0].path, 0, f"{following[0].flaw}")
        return False

    def _keep_copy(self, segment: FoundSegment) -> None:
        """Copy bytes that are about to be cut off, for an operator to inspect."""
        try:
            shutil.copyfile(segment.path, beside(segment.path, _LOST_SUFFIX))
        except OSError as error:
            _log.warning(LogMessage("no copy of the segment could be written", file=segment.path.name, error=error))

    def _lose(self, segments: Sequence[FoundSegment]) -> None:
        for segment in reversed(segments):  # a kill in between leaves a gap at the same position
            if _was_being_made(segment):
                _log.warning(LogMessage("removed a segment without records", file=segment.path.name))
                segment.path.unlink()
            else:
                _log.warning(LogMessage("quarantined a segment: records before it are lost", file=segment.path.name))
                quarantine(segment.path, _LOST_SUFFIX)

    def _report(self, path: Path, at: int, problem: str) -> None:
        """Raise JournalDamagedError, or log the damage if its loss is accepted."""
        place = f"{path}, byte {at}," if at else f"{path}"
        if not self._accept_loss:
            raise JournalDamagedError(
                f"the journal is damaged: {place} {problem}; {_REMEDY}",
                metadata={"file": path.name, "byte": str(at), "after_record": str(self.last_number)},
            )
        _log.error(
            LogMessage("the journal is damaged, and the loss was accepted", file=path, byte=at or None, problem=problem)
        )


def _is_damage(segment: FoundSegment, flaw: Break) -> bool:
    """Whether neither the end of a process nor a loss of power explains a flaw."""
    if flaw.is_torn or segment.may_lose_tail:
        return False
    # A loss of power may leave a part of the bytes that were not synced yet: those of the last commit.
    return segment.machine_boot_id == machine_boot_id() or segment.has_frame_after_flaw()


def _was_being_made(segment: FoundSegment) -> bool:
    """Whether a process was killed before it had written the opening."""
    return not segment.is_begun and segment.flaw is not None and segment.flaw.is_torn
