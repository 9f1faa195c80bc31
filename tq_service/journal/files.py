"""Files of a data directory: their names, and writes that survive a loss of power."""

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
    """Return the path of the snapshot that holds all records before a number of the log."""
    return directory / f"snapshot-{number:012d}.tqs"


def snapshot_numbers(directory: Path) -> list[int]:
    """Return the numbers of the stored snapshots, ascending."""
    return numbers_in(directory, _SNAPSHOT)


def numbers_in(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers in the file names that match a pattern, ascending."""
    matches = (pattern.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match is not None)


def beside(path: Path, suffix: str) -> Path:
    """Return the path with a suffix added to its name."""
    return path.with_name(path.name + suffix)


def quarantine(path: Path, suffix: str) -> None:
    """Rename a file to a free name, so that it is not read again."""
    target = beside(path, suffix)
    for count in range(2, 1000):
        if not target.exists():
            break
        target = beside(path, f"{suffix}-{count}")
    path.rename(target)


class FileWriter:
    """Writes a file that appears under its name once it is complete and on the disk, or when its `with` succeeds.

    Attributes:
        file: takes the content.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, buffering: int = -1) -> None:
        self._path = path
        self._partial = beside(path, PARTIAL_SUFFIX)
        self.file = self._partial.open("wb", buffering)

    def commit(self) -> None:
        """Give the file its name, in place of a file of this name."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        self._partial.rename(self._path)
        sync_path(self._path.parent)

    def abort(self) -> None:
        """Remove the partial file; does nothing after `commit`."""
        with contextlib.suppress(OSError):  # the disk has no space for buffered bytes
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
    """Make a directory and its missing parents; their names survive a loss of power.

    Args:
        path: of the directory.
        mode: its rights; parents get the usual ones.

    Raises:
        OSError: it cannot be made.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for directory in missing:
        sync_path(directory.parent)


def sync_path(path: Path) -> None:
    """Return once the bytes of a file, or the names in a directory, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(directory: Path) -> int:
    """Return the bytes that may still be written to the disk of a directory."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize
