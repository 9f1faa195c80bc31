"""Commits without an fsync: made by who asks, since they take less than handing them to a thread."""

from __future__ import annotations

from collections.abc import Callable

from tq_service.durable.journal_file import JournalFile


class DirectCommit:
    """Writes records in the order in which they come, all that have come in one commit."""

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

    def go_on_in(self, file: JournalFile) -> None:
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
