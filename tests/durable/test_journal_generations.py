"""Generations: where a snapshot ends and the journal goes on, full files, and what is dropped when."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from journal_support import (
    commit_each,
    copy,
    opened,
    read,
    replayed,
    wait_for_the_next_file,
    wait_for_upkeep,
    write,
)
from open_files import open_files

from tq_service.durable import found_file, journal_file, upkeep
from tq_service.durable import journal as journal_module
from tq_service.durable.file_names import journal_numbers, journal_path, snapshot_path
from tq_service.durable.journal import Journal
from tq_service.durable.journal_file import JournalFile
from tq_service.errors import DiskFullError, JournalDamagedError

MODES = pytest.mark.parametrize("sync", [False, True], ids=["process", "disk"])


def snapshot(journal: Journal, directory: Path) -> int:
    """Do what taking a snapshot does to the journal."""
    generation = journal.start_generation()
    journal.flush()
    snapshot_path(directory, generation).write_bytes(b"snapshot")
    journal.finish_generation(generation)
    return generation


@MODES
def test_a_snapshot_parts_what_was_before_from_what_came_after(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path, sync=sync) as journal:
        assert journal.snapshots() == []
        commit_each(journal, [b"1", b"2"])
        journal.append(b"3")  # not durable yet, but made before
        generation = journal.start_generation()
        journal.append(b"4")
        journal.flush()
        snapshot_path(tmp_path, generation).touch()
        assert journal.snapshots() == [generation]
    assert read(tmp_path) == [b"4"]
    assert read(tmp_path, generation) == [b"4"]
    assert read(tmp_path, 0) == [b"1", b"2", b"3", b"4"]


@MODES
async def test_a_generation_has_begun_when_all_before_it_is_durable(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path / "journal", sync=sync) as journal:
        journal.append(b"before")
        generation = journal.start_generation()
        await journal.durable()
        copy(tmp_path / "journal", tmp_path / "image", journal)
    snapshot_path(tmp_path / "image", generation).touch()
    assert read(tmp_path / "image") == []
    assert read(tmp_path / "image", 0) == [b"before"]


@MODES
def test_what_no_recovery_needs_is_dropped(tmp_path: Path, sync: bool) -> None:
    generations = []
    for start in range(3):
        with opened(tmp_path, sync=sync) as journal:
            replayed(journal)
            for number in range(2):
                commit_each(journal, [b"%d %d" % (start, number)])
                generations.append(snapshot(journal, tmp_path))
            commit_each(journal, [b"%d last" % start])
    with opened(tmp_path) as journal:
        assert journal.snapshots() == generations[-2:]
        assert replayed(journal) == [b"2 last"]
    assert min(journal_numbers(tmp_path)) == generations[-2]
    assert read(tmp_path, generations[-2]) == [b"2 1", b"2 last"]
    with pytest.raises(JournalDamagedError, match="is missing, but the snapshot that it follows is there"):
        read(tmp_path, generations[-3])


def test_the_snapshot_before_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        commit_each(journal, [b"1"])
        first = snapshot(journal, tmp_path)
        commit_each(journal, [b"2"])
        second = snapshot(journal, tmp_path)
        commit_each(journal, [b"3"])
    with opened(tmp_path) as journal:
        journal.set_snapshot_aside(second)
        assert journal.snapshots() == [first]
        assert replayed(journal, first) == [b"2", b"3"]
        commit_each(journal, [b"4"])
        third = snapshot(journal, tmp_path)
        commit_each(journal, [b"5"])
    assert read(tmp_path) == [b"5"]
    assert read(tmp_path, first) == [b"2", b"3", b"4", b"5"]
    assert third > second


def test_numbers_of_snapshots_are_not_used_again(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        generation = snapshot(journal, tmp_path)
    snapshot_path(tmp_path, generation + 50).touch()
    with opened(tmp_path) as journal:
        with pytest.raises(JournalDamagedError, match="is missing"):
            replayed(journal)
        assert replayed(journal, generation) == []
        assert journal.start_generation() > generation + 50


@MODES
def test_full_files_follow_each_other(tmp_path: Path, sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_FULL_LOG_BYTES", 20_000)
    expected = [b"%d" % number + bytes(1000) for number in range(60)]
    before = open_files()
    with opened(tmp_path, sync=sync) as journal:
        for record in expected:
            commit_each(journal, [record])
            wait_for_the_next_file(journal)
    assert len(journal_numbers(tmp_path)) >= 10
    assert open_files() <= before
    assert read(tmp_path) == expected


def test_a_commit_is_never_kept_waiting_by_a_file_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_FULL_LOG_BYTES", 20_000)
    goes_on = threading.Event()
    make = JournalFile.__init__

    def stands(*arguments: Any, **options: Any) -> None:
        assert goes_on.wait(30)
        make(*arguments, **options)

    with opened(tmp_path) as journal:
        wait_for_the_next_file(journal)
        monkeypatch.setattr(JournalFile, "__init__", stands)
        number = journal.start_generation()
        commit_each(journal, [bytes(1000)] * 40)
        assert journal._newest.number == number
        monkeypatch.setattr(upkeep, "_MAKE_SECONDS", 0.01)
        with pytest.raises(DiskFullError, match="the disk of the data dir is slow") as caught:
            journal.start_generation()
        assert caught.value.retry_after_seconds is not None
        commit_each(journal, [b"later"])
        goes_on.set()
    assert read(tmp_path) == [*[bytes(1000)] * 40, b"later"]


def test_a_file_that_cannot_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "_RETRY_SECONDS", 0.0)
    with opened(tmp_path) as journal:
        journal.start_generation()
        with monkeypatch.context() as patched:
            patched.setattr(JournalFile, "__init__", refused)
            with pytest.raises(DiskFullError):
                for _ in range(3):  # at most two files had been made
                    journal.start_generation()
            wait_for_upkeep(journal)
            assert "cannot be made" in caplog.text
            commit_each(journal, [b"goes on"])
        assert journal.start_generation() > 2
    assert read(tmp_path) == [b"goes on"]


def refused(*_: object, **__: object) -> None:
    raise DiskFullError("the disk is full: free space", retry_after_seconds=1.0)


def lost_start(directory: Path, sync: bool) -> tuple[Path, int, int]:
    """Return a folder where the start of the newest generation is not there, and the last two generations."""
    with opened(directory / "journal", sync=sync) as journal:
        commit_each(journal, [b"1"])
        first = snapshot(journal, directory / "journal")
        commit_each(journal, [b"2"])
        second = journal.start_generation()
        journal.flush()
        commit_each(journal, [b"3"])
        copy(directory / "journal", directory / "image", journal)
    image = directory / "image"
    snapshot_path(image, second).touch()
    log = journal_path(image, second).with_name(journal_path(image, second).name + "-wal")
    with log.open("r+b") as file:
        file.truncate(32)
    return image, first, second


def test_a_loss_of_power_may_take_the_start_of_a_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    image, first, _ = lost_start(tmp_path, sync=False)
    for module in (found_file, journal_file):
        monkeypatch.setattr(module, "machine_boot_id", lambda: "another start")
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert read(image) == []  # the snapshot holds "2", the record after it is lost
    write(image, [b"4"])
    assert read(image) == [b"4"]
    with pytest.raises(JournalDamagedError, match="the next file begins"):
        read(image, first)  # the state that "4" follows is that of the newest snapshot


@MODES
def test_a_start_that_was_durable_cannot_be_missing(tmp_path: Path, sync: bool) -> None:
    image, _, second = lost_start(tmp_path, sync)
    with pytest.raises(JournalDamagedError, match=rf"journal-{second:08d}.sqlite3 was never begun"):
        read(image)
    assert read(image, accept_loss=True) == []
    write(image, [b"4"])
    assert read(image) == [b"4"]
