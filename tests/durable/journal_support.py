"""Journals for tests, and copies of their files as a crash would leave them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tq_service.durable.state_store import Stream
from tq_service.journal import files
from tq_service.journal.files import FileBackend, segment_numbers, segment_path, snapshot_numbers
from tq_service.journal.log import Log

PREFIX = "tq-log"


@contextmanager
def opened(directory: Path, *, sync: bool = False) -> Iterator[Log]:
    """Open a journal in a directory that may be missing; a new one takes records at once."""
    directory.mkdir(exist_ok=True)
    journal = Log(FileBackend(directory, sync=sync))
    if not segment_numbers(directory):
        assert replayed(journal, 0) == []
    try:
        yield journal
    finally:
        journal.close()


def write(directory: Path, records: Sequence[bytes], *, sync: bool = False) -> None:
    """Write records, each in a frame of its own, and close."""
    with opened(directory, sync=sync) as journal:
        replayed(journal)
        commit_each(journal, records)


def commit_each(journal: Log, records: Sequence[bytes]) -> None:
    for record in records:
        journal.append(Stream.CHANGES, record)
        journal.flush()


def crashed(directory: Path, records: Sequence[bytes], *, sync: bool = False) -> Path:
    """Return a directory with what is there of a journal when its process is killed after these commits."""
    image = directory.with_name(directory.name + "-image")
    with opened(directory, sync=sync) as journal:
        replayed(journal)
        commit_each(journal, records)
        copy(directory, image, journal)
    return image


def copy(directory: Path, image: Path, journal: Log | None = None) -> None:
    """Copy a directory: what another process would find after a kill of the one whose journal this is."""
    if journal is not None:
        wait_for_worker(journal)
    shutil.copytree(directory, image, ignore=shutil.ignore_patterns("reserve"))


def wait_for_worker(journal: Log) -> None:
    """Return once all is done that the thread beside a journal was asked for before."""
    for worker in (journal._worker, journal.backend._background):  # type: ignore[attr-defined]
        worker.submit(lambda: None).result(30)


def replayed(journal: Log, number: int | None = None) -> list[bytes]:
    """Return what a journal holds since a snapshot, the newest where none is named; it takes new records then."""
    if number is None:
        number = max(snapshot_numbers(journal.backend._directory), default=0)  # type: ignore[attr-defined]
    found = list(journal.read(number))
    numbers = [record.number for record in found]
    assert numbers == sorted(set(numbers))
    return [record.data for record in found]


def read(directory: Path, number: int | None = None, *, accept_loss: bool = False) -> list[bytes]:
    """Return what the journal of a directory holds, and close it."""
    journal = Log(FileBackend(directory, sync=False, accept_loss=accept_loss))
    try:
        return replayed(journal, number)
    finally:
        journal.close()


def written(directory: Path) -> Path:
    """Return the segment that was written to last."""
    return segment_path(directory, segment_numbers(directory)[-1])


def flip(path: Path, offset: int, bit: int = 4) -> None:
    """Turn one bit of a file around."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(bytes(data))


def started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine be restarted since the journal was written."""
    monkeypatch.setattr(files, "machine_boot_id", lambda: "another start")


def journal_threads() -> list[str]:
    """Return the names of threads that a journal has started."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(PREFIX)]
