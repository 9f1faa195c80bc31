"""The thread that does what takes longer than a commit: makes the next journal file, brings full ones to rest."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from tq_service.durable.journal_file import JournalFile
from tq_service.errors import DiskFullError, TqError

_log = logging.getLogger(__name__)
_MAKE_SECONDS: Final = 1.0
_READY_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0


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
        self._retry_at = 0.0
        self._is_ordered = False
        self._made = threading.Event()
        self._full: list[JournalFile] = []
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tq-journal-upkeep", daemon=True)
        self._thread.start()
        self._order()

    @property
    def is_ready(self) -> bool:
        """Whether `take` returns at once; where making the next file has failed, this has it tried again."""
        if self._next is None and time.monotonic() >= self._retry_at:
            self._order()
        return self._next is not None

    async def ready(self) -> None:
        """Return once `take` would return at once, without holding up the event loop.

        Raises:
            DiskFullError: there is none yet, since the disk is full or slow.
            DiskFailedError: it could not be made.
        """
        given_up_at = time.monotonic() + _READY_SECONDS
        while self._next is None:
            self._order()
            await asyncio.to_thread(self._made.wait, max(0.0, given_up_at - time.monotonic()))
            if self._next is None and (self._failure is not None or time.monotonic() >= given_up_at):
                raise self._why_none()

    def take(self, most_seconds: float | None = None) -> JournalFile:
        """Return the next file and have another one made; blocks where files are taken faster than they are made.

        On an event loop, call it where `is_ready` only.

        Args:
            most_seconds: how long to block; None: a second.

        Raises:
            DiskFullError: there is none yet, since the disk is full or slow.
            DiskFailedError: it could not be made.
        """
        self._order()
        self._made.wait(_MAKE_SECONDS if most_seconds is None else most_seconds)
        taken, self._next = self._next, None
        if taken is None:
            raise self._why_none()
        self._order()
        return taken

    def _why_none(self) -> TqError:
        return self._failure or DiskFullError(
            "the next file of the journal was not made in time; the disk of the data dir is slow: try again",
            retry_after_seconds=_RETRY_SECONDS,
        )

    def retire(self, file: JournalFile) -> None:
        """Bring a file to rest that nothing more is written to."""
        self._full.append(file)
        self.do(self._rest_all)

    def do(self, job: Callable[[], object]) -> None:
        """Do something after what was asked for before."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is to be done, and end the thread."""
        self._jobs.put(None)
        self._thread.join()
        if self._next is not None:
            self._next.abandon()
        for file in self._full:
            file.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("upkeep of the journal failed")

    def _order(self) -> None:
        """Have the next file made, where there is none."""
        if self._next is None and not self._is_ordered:
            self._is_ordered = True
            self._made.clear()
            self.do(self._make_next)

    def _make_next(self) -> None:
        try:
            self._next, self._failure = self._make(), None
        except TqError as error:
            self._failure, self._retry_at = error, time.monotonic() + _RETRY_SECONDS
            _log.warning("the next file of the journal cannot be made: %s", error)
        finally:
            self._is_ordered = False
            self._made.set()

    def _rest_all(self) -> None:
        while self._full:
            try:
                self._full[0].rest()
            except TqError as error:
                _log.warning("%s stays open until another one is full: %s", self._full[0].path.name, error)
                return
            del self._full[0]
