"""What lies in a data folder, by name: numbered journal files and snapshots."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_JOURNAL: Final = re.compile(r"journal-(\d{8,})\.sqlite3")
_SNAPSHOT: Final = re.compile(r"snapshot-(\d{8,})\.tqs")
_ANY: Final = re.compile(r"(?:journal|snapshot)-(\d{8,})\..*")
SIDE_SUFFIXES: Final = ("-wal", "-shm", "-journal")
LOST_SUFFIX: Final = ".lost"
PARTIAL_SUFFIX: Final = ".partial"


def journal_path(directory: Path, number: int) -> Path:
    """Return the path of a journal file."""
    return directory / f"journal-{number:08d}.sqlite3"


def making_path(directory: Path, number: int) -> Path:
    """Return the path of a journal file until it is whole."""
    return directory / f"making-{number:08d}.sqlite3"


def snapshot_path(directory: Path, generation: int) -> Path:
    """Return the path of a snapshot: all that is in no journal file of this number or a later one."""
    return directory / f"snapshot-{generation:08d}.tqs"


def journal_numbers(directory: Path) -> list[int]:
    """Return the numbers of the journal files that are there, ascending."""
    return _numbers(directory, _JOURNAL)


def snapshot_numbers(directory: Path) -> list[int]:
    """Return the generations of the snapshots that are there, ascending."""
    return _numbers(directory, _SNAPSHOT)


def highest_number(directory: Path) -> int:
    """Return the highest number that a file has, among them those that were set aside; 0 without any."""
    return max(_numbers(directory, _ANY), default=0)


def remove_unfinished(directory: Path) -> None:
    """Remove journal files and snapshots that a process was making when it ended."""
    for pattern in ("making-*.sqlite3*", f"snapshot-*.tqs{PARTIAL_SUFFIX}"):
        for path in directory.glob(pattern):
            path.unlink()


def beside(path: Path, suffix: str) -> Path:
    """Return the path with something added to its name, as SQLite names the files beside a database."""
    return path.with_name(path.name + suffix)


def journals_without_database(directory: Path) -> list[Path]:
    """Return the paths of journal files of which only the log is there, which no crash leaves."""
    return [
        path
        for log in sorted(directory.glob("journal-*.sqlite3-wal"))
        if not (path := log.with_name(log.name.removesuffix("-wal"))).exists()
    ]


def remove_journal(path: Path) -> None:
    """Remove a journal file: the database last, so that what is left of a crash in between is never a log alone."""
    remove_side_files(path)
    path.unlink(missing_ok=True)


def remove_side_files(path: Path) -> None:
    """Remove what SQLite has beside a journal file."""
    for suffix in SIDE_SUFFIXES:
        beside(path, suffix).unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Rename a journal file so that it is not read again; the database last, like `remove_journal`."""
    for suffix in (*SIDE_SUFFIXES, ""):
        part = beside(path, suffix)
        if part.exists():
            part.rename(beside(part, LOST_SUFFIX))


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder where it is missing, and those that it is in; their names survive a loss of power.

    Args:
        path: of the folder.
        mode: its rights; those of the others are what is usual.

    Raises:
        OSError: it cannot be made.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for folder in missing:
        sync_directory(folder.parent)


def sync_directory(directory: Path) -> None:
    """Return when the names in a folder survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbers(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    matches = (pattern.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match is not None)
