"""A file that only takes up room: given up when the disk is full, so that what frees room can still be written down."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

RESERVE_BYTES: Final = 4 * 2**20


class Reserve:
    """Room on the disk of a data folder. May be used by any thread."""

    def __init__(self, path: Path) -> None:
        """Nothing is set aside yet; see `fill`."""
        self._path = path
        self._lock = threading.Lock()
        self._is_there = path.exists() and path.stat().st_size == RESERVE_BYTES

    @property
    def is_there(self) -> bool:
        """Whether there is room set aside."""
        return self._is_there

    def fill(self) -> bool:
        """Set room aside where as much again stays free; return whether there is some now."""
        with self._lock:
            if self._is_there:
                return True
            try:
                free = os.statvfs(self._path.parent)
                if free.f_bavail * free.f_frsize < 2 * RESERVE_BYTES:
                    return False
                with self._path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
            except OSError as error:
                _log.warning("no room can be set aside in the data dir: %s", error)
                self._path.unlink(missing_ok=True)
                return False
            self._is_there = True
            return True

    def give_up_to_start(self) -> None:
        """Make the room free where there is no other for a start, which has to make files before it can read any."""
        free = os.statvfs(self._path.parent)
        if free.f_bavail * free.f_frsize < RESERVE_BYTES:
            self.give_up()

    def give_up(self) -> bool:
        """Make the room free; return whether there was some."""
        with self._lock:
            was_there, self._is_there = self._is_there, False
            self._path.unlink(missing_ok=True)
        if was_there:
            _log.error(
                "the disk of the data dir is full; %d MiB that were set aside are given up, so that clears can still "
                "be written down: free space",
                RESERVE_BYTES >> 20,
            )
        return was_there
