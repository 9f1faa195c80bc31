"""Journals for tests, and copies of their files as a crash would leave them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tq_service.durable.journal import Journal

PREFIX = "tq-journal"


@contextmanager
def opened(directory: Path, *, sync: bool = False) -> Iterator[Journal]:
    """Open a journal in a folder that may be missing."""
    directory.mkdir(exist_ok=True)
    journal = Journal.open(directory, sync=sync)
    try:
        yield journal
    finally:
        journal.close()


def write(directory: Path, records: Sequence[bytes], *, sync: bool = False) -> None:
    """Write records, each in a commit of its own, and close."""
    with opened(directory, sync=sync) as journal:
        replayed(journal)
        commit_each(journal, records)


def commit_each(journal: Journal, records: Sequence[bytes]) -> None:
    for record in records:
        journal.append(record)
        journal.flush()


def crashed(directory: Path, records: Sequence[bytes], *, sync: bool = False) -> Path:
    """Return a folder with what is there of a journal when its process is killed after these commits."""
    image = directory.with_name(directory.name + "-image")
    with opened(directory, sync=sync) as journal:
        replayed(journal)
        commit_each(journal, records)
        copy(directory, image, journal)
    return image


def copy(directory: Path, image: Path, journal: Journal | None = None) -> None:
    """Copy a folder: what another process would find after a kill of the one whose journal this is."""
    if journal is not None:
        wait_for_upkeep(journal)
    shutil.copytree(directory, image, ignore=shutil.ignore_patterns("reserve"))


def wait_for_upkeep(journal: Journal) -> None:
    """Return once all is done that the thread beside a journal was asked for before."""
    is_idle = threading.Event()
    journal._upkeep.do(is_idle.set)
    assert is_idle.wait(30)


def wait_for_the_next_file(journal: Journal) -> None:
    """Return once the journal can go on in its next file at once."""
    assert journal._upkeep._made.wait(30)
    assert journal._upkeep.is_ready


def replayed(journal: Journal, from_generation: int | None = None) -> list[bytes]:
    """Return what a journal holds; it takes new records then."""
    return list(journal.replay(from_generation))


def read(directory: Path, from_generation: int | None = None, *, accept_loss: bool = False) -> list[bytes]:
    """Return what the journal of a folder holds, and close it."""
    journal = Journal.open(directory, sync=False, accept_loss=accept_loss)
    try:
        return replayed(journal, from_generation)
    finally:
        journal.close()


def log_of(directory: Path) -> Path:
    """Return the write-ahead log of the file that was written to last."""
    return max(
        (path for path in directory.glob("journal-*-wal") if path.stat().st_size > 4152), key=lambda path: path.name
    )


def flip(path: Path, offset: int) -> None:
    """Turn one bit of a file around."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


def journal_threads() -> list[str]:
    """Return the names of threads that a journal has started."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(PREFIX)]
