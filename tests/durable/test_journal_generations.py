"""Rotations: where a snapshot ends and the journal goes on, full segments, and what is removed when."""

import os
import threading
from pathlib import Path

import pytest
from journal_support import commit_each, copy, flip, opened, read, replayed, wait_for_worker, write
from open_files import open_files

from tq_service.durable.state_store import Stream
from tq_service.errors import JournalDamagedError
from tq_service.journal.files import FileBackend, segment_numbers, segment_path, snapshot_path
from tq_service.journal.log import Log

MODES = pytest.mark.parametrize("sync", [False, True], ids=["process", "disk"])


def snapshot(journal: Log, directory: Path, kept: int = 0) -> int:
    """Do what taking a snapshot does to the journal; return its number."""
    number = journal.rotate()
    journal.flush()
    journal.backend.sync_rotated(number)
    snapshot_path(directory, number).write_bytes(b"snapshot")
    journal.backend.truncate_before(kept)
    return number


@MODES
def test_a_snapshot_parts_what_was_before_from_what_came_after(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path, sync=sync) as journal:
        commit_each(journal, [b"1", b"2"])
        journal.append(Stream.CHANGES, b"3")  # not durable yet, but made before
        number = journal.rotate()
        journal.append(Stream.CHANGES, b"4")
        journal.flush()
        snapshot_path(tmp_path, number).touch()
    assert read(tmp_path) == [b"4"]
    assert read(tmp_path, number) == [b"4"]
    assert read(tmp_path, 0) == [b"1", b"2", b"3", b"4"]


@MODES
async def test_a_segment_has_begun_when_all_before_it_is_durable(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path / "journal", sync=sync) as journal:
        journal.append(Stream.CHANGES, b"before")
        number = journal.rotate()
        await journal.wait_durable()
        copy(tmp_path / "journal", tmp_path / "image", journal)
    snapshot_path(tmp_path / "image", number).touch()
    assert read(tmp_path / "image") == []
    assert read(tmp_path / "image", 0) == [b"before"]


@MODES
def test_what_no_recovery_needs_is_removed(tmp_path: Path, sync: bool) -> None:
    numbers = [0]
    for start in range(3):
        with opened(tmp_path, sync=sync) as journal:
            replayed(journal)
            for number in range(2):
                commit_each(journal, [b"%d %d" % (start, number)])
                numbers.append(snapshot(journal, tmp_path, kept=numbers[-1]))
            commit_each(journal, [b"%d last" % start])
    with opened(tmp_path) as journal:
        assert replayed(journal) == [b"2 last"]
    assert segment_numbers(tmp_path)[0] == numbers[-2]
    assert read(tmp_path, numbers[-2]) == [b"2 1", b"2 last"]
    with pytest.raises(JournalDamagedError, match="is missing, but the snapshot before it exists"):
        read(tmp_path, numbers[-3])


def test_what_a_number_is_in_is_not_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        for record in (b"1", b"2", b"3"):
            commit_each(journal, [record])
            journal.rotate()
        journal.flush()
        first, second, third, last = segment_numbers(tmp_path)
        journal.backend.truncate_before(second + 1)
        assert segment_numbers(tmp_path) == [second, third, last]
        journal.backend.truncate_before(third)
        assert segment_numbers(tmp_path) == [third, last]
        journal.backend.truncate_before(last + 100)
        assert segment_numbers(tmp_path) == [last]
        commit_each(journal, [b"4"])
    assert first == 1
    assert read(tmp_path, last) == [b"4"]


def test_the_snapshot_before_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        commit_each(journal, [b"1"])
        first = snapshot(journal, tmp_path)
        commit_each(journal, [b"2"])
        second = snapshot(journal, tmp_path)
        commit_each(journal, [b"3"])
    snapshot_path(tmp_path, second).unlink()
    with opened(tmp_path) as journal:
        assert replayed(journal, first) == [b"2", b"3"]
        commit_each(journal, [b"4"])
        third = snapshot(journal, tmp_path)
        commit_each(journal, [b"5"])
    assert read(tmp_path) == [b"5"]
    assert read(tmp_path, first) == [b"2", b"3", b"4", b"5"]
    assert third > second


def test_each_snapshot_has_a_number_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        numbers = [snapshot(journal, tmp_path) for _ in range(3)]
    with opened(tmp_path) as journal:
        assert replayed(journal) == []
        numbers += [snapshot(journal, tmp_path) for _ in range(3)]
    assert numbers == sorted(set(numbers))


def test_a_snapshot_without_its_segment_is_damage(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        number = snapshot(journal, tmp_path)
    snapshot_path(tmp_path, number + 50).touch()
    with opened(tmp_path) as journal:
        with pytest.raises(JournalDamagedError, match="is missing"):
            replayed(journal)
        assert replayed(journal, number) == []


@MODES
def test_full_segments_follow_each_other(tmp_path: Path, sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileBackend, "segment_bytes", 5_000)
    expected = [b"%d" % number + bytes(1000) for number in range(60)]
    before = open_files()
    with opened(tmp_path, sync=sync) as journal:
        commit_each(journal, expected[:50])
        for record in expected[50:]:  # in one step of the loop, which is not parted
            journal.append(Stream.CHANGES, record)
        wait_for_worker(journal)
    assert len(segment_numbers(tmp_path)) == 11
    assert max(path.stat().st_size for path in tmp_path.glob("journal-*")) > 10_000
    assert open_files() <= before
    assert read(tmp_path) == expected


@MODES
async def test_the_loop_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool) -> None:
    monkeypatch.setattr(FileBackend, "segment_bytes", 5_000)
    loop_thread, fsync = threading.get_ident(), os.fsync
    synced: list[int] = []

    def checked(descriptor: int) -> None:
        assert threading.get_ident() != loop_thread
        synced.append(descriptor)
        fsync(descriptor)

    with opened(tmp_path, sync=sync) as journal:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", checked)
            for _ in range(20):
                journal.append(Stream.CHANGES, bytes(1000))
                await journal.wait_durable()
            journal.rotate()
            await journal.wait_durable()
            wait_for_worker(journal)
        assert len(synced) >= 4
    assert read(tmp_path) == [bytes(1000)] * 20


def lost_opening(directory: Path, sync: bool) -> tuple[Path, int]:
    """Return a directory where the segment of the newest snapshot has no opening, and the number of that."""
    with opened(directory / "journal", sync=sync) as journal:
        commit_each(journal, [b"1"])
        snapshot(journal, directory / "journal")
        commit_each(journal, [b"2"])
        second = snapshot(journal, directory / "journal")
        commit_each(journal, [b"3"])
        copy(directory / "journal", directory / "image", journal)
    with segment_path(directory / "image", second).open("r+b") as file:
        file.truncate(12)
    return directory / "image", second


@MODES
def test_an_opening_that_was_durable_cannot_be_missing(tmp_path: Path, sync: bool) -> None:
    image, second = lost_opening(tmp_path, sync)
    with pytest.raises(JournalDamagedError, match=rf"journal-{second:012d}.tqj ends within a frame"):
        read(image)
    assert read(image, accept_loss=True) == []
    write(image, [b"4"])
    assert read(image) == [b"4"]


@MODES
def test_a_loss_of_the_segment_of_a_snapshot_can_be_accepted(tmp_path: Path, sync: bool) -> None:
    for damaged in (False, True):
        directory = tmp_path / f"{damaged}"
        with opened(directory, sync=sync) as journal:
            commit_each(journal, [b"1"])
            number = snapshot(journal, directory)
            commit_each(journal, [b"2"])
            journal.rotate()
            commit_each(journal, [b"3"])
        if damaged:
            flip(segment_path(directory, number), 40)
        else:
            segment_path(directory, number).unlink()
        with pytest.raises(JournalDamagedError, match=f"journal-{number:012d}"):
            read(directory)
        assert read(directory, accept_loss=True) == []
        assert len(list(directory.glob("*.lost"))) == (2 if damaged else 1)
        write(directory, [b"4"])
        assert read(directory) == [b"4"]
