"""What a crash leaves is cut; what only damage explains is an error that says where."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_support import commit_each, copy, crashed, flip, log_of, opened, read, replayed, write
from property_settings import examples

from tq_service.durable import found_file, journal_file
from tq_service.durable.file_names import journal_path
from tq_service.durable.journal import Journal
from tq_service.errors import JournalDamagedError

RECORDS = [b"%03d " % number + b"x" * size for number, size in enumerate((10, 9000, 10, 20_000, 300, 300, 5))]


LOG_BYTES: list[int] = []
"""How long the log is after each of the records."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a kill leaves of a journal."""
    directory = tmp_path_factory.mktemp("crash") / "journal"
    LOG_BYTES.clear()
    with opened(directory) as journal:
        for record in RECORDS:
            commit_each(journal, [record])
            LOG_BYTES.append(log_of(directory).stat().st_size)
        copy(directory, directory.with_name("image"), journal)
    return directory.with_name("image")


@pytest.fixture
def killed(image: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    copy(image, tmp_path / "killed")
    return tmp_path / "killed"


@pytest.fixture
def reboot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the machine be started anew since the journal was written."""
    return lambda: started_anew(monkeypatch)


def started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (found_file, journal_file):
        monkeypatch.setattr(module, "machine_boot_id", lambda: "another start")


def is_prefix(some: list[bytes], of: list[bytes]) -> bool:
    return some == of[: len(some)]


def test_a_kill_loses_nothing(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert log_of(killed).stat().st_size > 30_000
    assert read(killed) == RECORDS
    assert not caplog.records


@examples(20)
@given(data=st.data())
def test_a_log_cut_anywhere_leaves_a_beginning(
    image: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("cut") / "journal"
    copy(image, directory)
    log = log_of(directory)
    size_bytes = data.draw(st.integers(0, log.stat().st_size), label="size")
    with log.open("r+b") as file:
        file.truncate(size_bytes)
    with opened(directory) as journal:
        found = replayed(journal)
        assert is_prefix(found, RECORDS)
        assert len(found) == sum(size_bytes >= end for end in LOG_BYTES)
        commit_each(journal, [b"later"])
    assert read(directory) == [*found, b"later"]


def test_what_is_cut_is_logged(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = log_of(killed)
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 100)
    assert read(killed) == RECORDS[:-1]
    assert "journal-00000001.sqlite3: cut 4020 bytes with 0 commits after record 7" in caplog.text


@examples(15)
@given(data=st.data())
def test_a_flipped_bit_in_the_log_of_a_killed_process_is_damage(
    image: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("flip") / "journal"
    copy(image, directory)
    log = log_of(directory)
    flip(log, data.draw(st.integers(0, log.stat().st_size - 1), label="offset"))
    before = log.read_bytes()
    for _ in range(2):  # the refused start leaves what it found
        with pytest.raises(JournalDamagedError, match=r"journal-00000001\.sqlite3 .*--accept-journal-loss"):
            read(directory)
        assert log.read_bytes() == before
    found = read(directory, accept_loss=True)
    assert is_prefix(found, RECORDS)
    assert read(directory) == found


def test_a_loss_of_power_may_take_commits_that_were_not_synced(
    killed: Path, reboot: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    reboot()
    flip(log_of(killed), 32 + 4120 * 3 + 50)  # as a page that was not written before the power went
    found = read(killed)
    assert is_prefix(found, RECORDS)
    assert len(found) < len(RECORDS)
    assert "cut" in caplog.text
    assert read(killed) == found


def test_a_loss_of_power_takes_at_most_the_last_of_synced_commits(tmp_path: Path, reboot: Callable[[], None]) -> None:
    killed = crashed(tmp_path / "journal", RECORDS, sync=True)
    shutil.copytree(killed, tmp_path / "other")
    reboot()
    log = log_of(killed)
    flip(log, log.stat().st_size - 50)
    assert read(killed) == RECORDS[:-1]
    log = log_of(tmp_path / "other")
    flip(log, log.stat().st_size - 4120 - 50)
    with pytest.raises(JournalDamagedError, match="breaks at byte"):
        read(tmp_path / "other")


def test_nothing_behind_a_lost_tail_is_taken(
    tmp_path: Path, reboot: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    image = tmp_path / "image"
    with opened(tmp_path / "journal") as journal:
        commit_each(journal, RECORDS[:3])
        first = {path.name: path.read_bytes() for path in (tmp_path / "journal").glob("journal-00000001*")}
        journal.start_generation()
        commit_each(journal, RECORDS[3:])
        copy(tmp_path / "journal", image, journal)
    for name, data in first.items():  # the second file is written back, the end of the first is not
        (image / name).write_bytes(data[:-1])
    reboot()
    assert read(image) == RECORDS[:2]
    assert "set aside" in caplog.text
    assert [path.name for path in image.glob("*.lost")] != []
    write(image, [b"later"])
    assert read(image) == [*RECORDS[:2], b"later"]


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5, 0.8, 0.999])
def test_a_damaged_database_is_never_taken_for_whole(tmp_path: Path, fraction: float) -> None:
    write(tmp_path, RECORDS)
    path = journal_path(tmp_path, 1)
    flip(path, int(path.stat().st_size * fraction))
    try:
        assert read(tmp_path) == RECORDS  # what was hit holds no record
    except JournalDamagedError as error:
        assert error.metadata["file"] == path.name
        assert is_prefix(read(tmp_path, accept_loss=True), RECORDS)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    path = journal_path(tmp_path, 1)
    offset = path.read_bytes().index(RECORDS[4])
    flip(path, offset + 100)
    with pytest.raises(JournalDamagedError, match="has a record 6 whose checksum is wrong") as caught:
        read(tmp_path)
    assert caught.value.metadata == {"file": path.name, "after_record": "5"}
    assert read(tmp_path, accept_loss=True) == RECORDS[:4]
    write(tmp_path, [b"later"])
    assert read(tmp_path) == [*RECORDS[:4], b"later"]


def test_records_that_changed_places_are_damage(tmp_path: Path) -> None:
    write(tmp_path, [b"first", b"other"])
    with sqlite3.connect(journal_path(tmp_path, 1)) as connection:
        connection.execute("UPDATE records SET record = CASE number WHEN 2 THEN x'6f74686572' ELSE x'6669727374' END")
    connection.close()
    with pytest.raises(JournalDamagedError, match="record 2 whose checksum"):
        read(tmp_path)


@pytest.mark.parametrize(("number", "what"), [(3, "has no record 3, but record 4"), (8, "ends with record 7")])
def test_a_missing_record_is_damage(tmp_path: Path, number: int, what: str) -> None:
    write(tmp_path, RECORDS)
    write(tmp_path, [b"in the next file"])
    with sqlite3.connect(journal_path(tmp_path, 1)) as connection:
        connection.execute("DELETE FROM records WHERE number = ?", (number,))
    connection.close()
    with pytest.raises(JournalDamagedError, match=what):
        read(tmp_path)
    kept = RECORDS[: number - 2]
    assert read(tmp_path, accept_loss=True) == kept
    assert read(tmp_path) == kept


def test_a_missing_file_is_damage(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, [b"%d" % number])
    second = sorted(tmp_path.glob("journal-*.sqlite3"))[1]
    second.unlink()
    with pytest.raises(JournalDamagedError, match="next file begins"):
        read(tmp_path)
    assert read(tmp_path, accept_loss=True) == [b"0"]


def test_a_missing_beginning_is_damage(tmp_path: Path) -> None:
    write(tmp_path, [b"0"])
    write(tmp_path, [b"1"])
    journal_path(tmp_path, 1).unlink()
    with pytest.raises(JournalDamagedError, match="no snapshot holds what was before"):
        read(tmp_path)


def test_a_file_that_is_no_database_is_damage(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    journal_path(tmp_path, 1).write_bytes(b"no database at all" * 1000)
    with pytest.raises(JournalDamagedError, match="no database that can be read"):
        read(tmp_path)
    assert read(tmp_path, accept_loss=True) == []
    assert journal_path(tmp_path, 1).with_name("journal-00000001.sqlite3.lost").exists()
    write(tmp_path, [b"anew"])
    assert read(tmp_path) == [b"anew"]


def test_what_was_being_made_at_a_kill_is_removed(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    for name in ("making-00000009.sqlite3", "making-00000009.sqlite3-journal"):
        (tmp_path / name).write_bytes(b"half")
    assert read(tmp_path) == RECORDS
    assert not list(tmp_path.glob("making-*"))


def test_a_kill_during_recovery_changes_nothing(killed: Path, tmp_path: Path) -> None:
    journal = Journal.open(killed, sync=False)
    records = journal.replay()
    assert next(records) == RECORDS[0]
    copy(killed, tmp_path / "again", journal)
    assert list(records) == RECORDS[1:]
    journal.close()
    assert read(tmp_path / "again") == RECORDS
