"""Commits that wait for an fsync, on a thread of their own: what comes during one is committed together by the next."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from tq_service.durable.journal_file import JournalFile
from tq_service.errors import InternalError, TqError

_log = logging.getLogger(__name__)
_MAX_GROUP_RECORDS: Final = 4096


class GroupCommit:
    """Writes records in the order in which they come, as many in a commit as have come since the last one began.

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

    def go_on_in(self, file: JournalFile) -> None:
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
