"""One process at a time: the lock of a data folder."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from tq_service.errors import DataDirError


class DirectoryLock:
    """Held from when it is made until `release`, or until the process ends in whatever way."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Args:
            path: of a file that is there for the lock alone, and stays.

        Raises:
            DataDirError: another process has it.
            OSError: the file cannot be written.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 256, 0).decode(errors="replace").strip() or "a process that is starting"
            raise DataDirError(
                f"the data dir {path.parent} is in use by {holder}; stop it first, or give this service a folder of "
                "its own"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
