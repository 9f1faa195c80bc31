"""A recovery that is itself killed, at any step that changes files: the next one comes to the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from journal_support import commit_each, copy, opened, read, replayed, wait_for_the_next_file, wait_for_upkeep, write

from tq_service.durable import found_file, journal_file
from tq_service.durable.file_names import beside, journal_path, snapshot_path
from tq_service.durable.found_file import FoundFile
from tq_service.durable.journal import Journal
from tq_service.durable.journal_file import JournalFile
from tq_service.errors import DiskFullError


@contextmanager
def copied_at_each_step(journal: Journal, directory: Path, images: list[Path]) -> Iterator[None]:
    """Have the folder copied, as a kill would leave it, before all that this thread does to its files."""
    thread = threading.get_ident()

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not is_copying:
                is_copying.append(True)
                wait_for_upkeep(journal)
                images.append(directory.with_name(f"{directory.name}-step-{len(images)}"))
                copy(directory, images[-1])
                is_copying.clear()
            return step(*args, **kwargs)

        return call

    is_copying: list[bool] = []
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in (
            (Path, "unlink"),
            (Path, "rename"),
            (Path, "replace"),
            (FoundFile, "close"),
            (FoundFile, "rows"),
            (JournalFile, "begin"),
            (JournalFile, "rest"),
        ):
            patched.setattr(owner, name, watched(getattr(owner, name)))
        yield


def recovered_and_killed(directory: Path, expected: list[bytes]) -> list[Path]:
    """Recover a journal; return what kills at each step would have left of it."""
    images: list[Path] = []
    with opened(directory) as journal:
        wait_for_the_next_file(journal)
        with copied_at_each_step(journal, directory, images):
            assert replayed(journal) == expected
    return images


def power_lost(directory: Path, monkeypatch: pytest.MonkeyPatch, *, kept_bytes: int, goes_on: bool) -> Path:
    """Return what a loss of power leaves: a snapshot, and of the log of the file that follows it so many bytes.

    Args:
        directory: for all files.
        monkeypatch: lets the machine be started anew.
        kept_bytes: of the log.
        goes_on: whether another file, which is whole, follows.
    """
    with monkeypatch.context() as patched, opened(directory / "journal") as journal:
        patched.setattr(JournalFile, "rest", refused)  # logs stay
        commit_each(journal, [b"1"])
        generation = journal.start_generation()
        commit_each(journal, [b"2", b"3" * 5000])
        if goes_on:
            wait_for_the_next_file(journal)
            journal.start_generation()
            commit_each(journal, [b"4"])
        copy(directory / "journal", directory / "image", journal)
    image = directory / "image"
    snapshot_path(image, generation).touch()
    with beside(journal_path(image, generation), "-wal").open("ab") as log:
        log.truncate(kept_bytes)
    for module in (found_file, journal_file):
        monkeypatch.setattr(module, "machine_boot_id", lambda: "another start")
    return image


def refused(_: JournalFile) -> None:
    raise DiskFullError("the disk is full: free space")


@pytest.mark.parametrize("goes_on", [False, True])
def test_where_the_start_of_a_generation_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    image = power_lost(tmp_path, monkeypatch, kept_bytes=32, goes_on=goes_on)
    images = recovered_and_killed(image, [])
    assert len(images) > 3
    for killed in images:
        again = recovered_and_killed(killed, [])
        for twice in again:
            assert read(twice) == []
        write(killed, [b"5"])
        assert read(killed) == [b"5"]


def test_where_the_end_of_a_file_was_lost_that_another_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = power_lost(tmp_path, monkeypatch, kept_bytes=32 + 3 * 4120, goes_on=True)
    images = recovered_and_killed(image, [b"2"])
    assert len(images) > 3
    for killed in images:
        assert read(killed) == [b"2"]
        write(killed, [b"5"])
        assert read(killed) == [b"2", b"5"]


def test_of_what_was_being_written_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path, [b"1"])
    snapshot_path(tmp_path, 2).with_name(snapshot_path(tmp_path, 2).name + ".partial").write_bytes(bytes(1000))
    (tmp_path / "making-00000003.sqlite3").write_bytes(bytes(1000))
    assert read(tmp_path) == [b"1"]
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("making-*"))
