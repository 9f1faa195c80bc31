"""Files of a data directory: their names, and that they survive a loss of power."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_SNAPSHOT: Final = re.compile(r"snapshot-(\d{12,})\.tqs")
PARTIAL_SUFFIX: Final = ".partial"


def snapshot_path(directory: Path, number: int) -> Path:
    """Return the path of the snapshot that holds all before a number of the journal."""
    return directory / f"snapshot-{number:012d}.tqs"


def snapshot_numbers(directory: Path) -> list[int]:
    """Return the numbers of the snapshots that are there, ascending."""
    return numbers_in(directory, _SNAPSHOT)


def numbers_in(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers in the names of files of a kind, ascending."""
    matches = (pattern.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match is not None)


def beside(path: Path, suffix: str) -> Path:
    """Return the path with something added to its name."""
    return path.with_name(path.name + suffix)


def quarantine(path: Path, suffix: str) -> None:
    """Rename a file so that it is not read again, to a name that no other has."""
    target = beside(path, suffix)
    for count in range(2, 1000):
        if not target.exists():
            break
        target = beside(path, f"{suffix}-{count}")
    path.rename(target)


class FileWriter:
    """Writes a file that is under its name only once it is whole and on the disk; in a `with`, by how that ends.

    Attributes:
        file: what is to be in it is written to this.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, buffering: int = -1) -> None:
        self._path = path
        self._partial = beside(path, PARTIAL_SUFFIX)
        self.file = self._partial.open("wb", buffering)

    def commit(self) -> None:
        """Give the file its name, in place of the one that had it."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        self._partial.rename(self._path)
        sync_path(self._path.parent)

    def abort(self) -> None:
        """Leave no trace; nothing where it was committed."""
        with contextlib.suppress(OSError):  # what is still in the buffer has no space on the disk
            self.file.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory where it is missing, and those that it is in; their names survive a loss of power.

    Args:
        path: of the directory.
        mode: its rights; those of the others are what is usual.

    Raises:
        OSError: it cannot be made.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for directory in missing:
        sync_path(directory.parent)


def sync_path(path: Path) -> None:
    """Return when the bytes of a file, or the names in a directory, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(directory: Path) -> int:
    """Return how much may still be written to the disk that a directory is on."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize
