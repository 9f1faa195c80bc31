"""The thread that does what takes longer than a commit: makes the next journal file, brings full ones to rest."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tq_service.durable.file_names import remove_journal
from tq_service.durable.journal_file import JournalFile
from tq_service.errors import TqError

_log = logging.getLogger(__name__)
_MAKE_SECONDS: Final = 30.0


class Upkeep:
    """Has the next journal file ready before it is asked for, so that going on in it costs the loop no fsync."""

    def __init__(self, make: Callable[[], JournalFile]) -> None:
        """Start the thread, which makes a file.

        Args:
            make: makes the next file, every time it is called.
        """
        self._make = make
        self._next: JournalFile | None = None
        self._failure: TqError | None = None
        self._made = threading.Event()
        self._full: list[JournalFile] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tq-journal-upkeep", daemon=True)
        self._thread.start()
        self.order()

    @property
    def is_ready(self) -> bool:
        """Whether `take` returns at once."""
        return self._next is not None

    def order(self) -> None:
        """Have the next file made, where there is none."""
        self._made.clear()
        self._jobs.put(self._make_next)

    def take(self) -> JournalFile:
        """Return the next file and have another one made; waits for it where files are taken faster than they are made.

        Raises:
            DiskFullError, DiskFailedError: it could not be made; it is tried again at the next call.
        """
        if self._next is None and self._failure is not None:
            self.order()
        if not self._made.wait(_MAKE_SECONDS):
            raise TimeoutError(
                f"the next file of the journal was not made within {_MAKE_SECONDS:.0f} s: the disk stands"
            )
        taken, failure = self._next, self._failure
        if taken is None:
            raise failure or RuntimeError("the thread that makes journal files has ended")
        self._next = None
        self.order()
        return taken

    def retire(self, file: JournalFile) -> None:
        """Bring a file to rest that nothing more is written to."""
        self._full.append(file)
        self._jobs.put(self._rest_all)

    def remove(self, journals: Sequence[Path], snapshots: Sequence[Path]) -> None:
        """Remove files that nobody needs; journal files among them have been left before."""
        self._jobs.put(lambda: _remove(journals, snapshots))

    def close(self) -> None:
        """Finish what is to be done, and end the thread."""
        self._jobs.put(None)
        self._thread.join()
        if self._next is not None:
            self._next.abandon()
            self._next = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("upkeep of the journal failed")

    def _make_next(self) -> None:
        try:
            self._next, self._failure = self._make(), None
        except TqError as error:
            self._failure = error
            _log.warning("the next file of the journal cannot be made: %s", error)
        finally:
            self._made.set()

    def _rest_all(self) -> None:
        while self._full:
            try:
                self._full[0].rest()
            except TqError as error:
                _log.warning("%s stays open until the next one is full: %s", self._full[0].path.name, error)
                return
            del self._full[0]


def _remove(journals: Sequence[Path], snapshots: Sequence[Path]) -> None:
    for path in journals:
        remove_journal(path)
    for path in snapshots:
        path.unlink(missing_ok=True)
