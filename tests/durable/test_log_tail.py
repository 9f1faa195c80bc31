"""What is whole of a write-ahead log is what SQLite itself takes from it."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_support import commit_each, copy, opened
from property_settings import examples

from tq_service.durable.file_names import journal_path
from tq_service.durable.log_tail import LogTail, read_log_tail

FRAME_BYTES = 4096 + 24
HEADER_BYTES = 32


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database and its log as a kill leaves them, with commits of one page and of several."""
    directory = tmp_path_factory.mktemp("log")
    with opened(directory / "journal") as journal:
        commit_each(journal, [b"x" * size for size in (10, 9000, 10, 20_000, 10, 10)])
        copy(directory / "journal", directory / "image", journal)
    return journal_path(directory / "image", 1)


def log_of(database: Path) -> Path:
    return database.with_name(database.name + "-wal")


def sqlite_frames(database: Path, folder: Path) -> int:
    """Return how many frames SQLite finds in the log of a copy."""
    for path in (database, log_of(database)):
        shutil.copy(path, folder / path.name)
    with sqlite3.connect(folder / database.name) as connection:
        found: tuple[int, int, int] = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    connection.close()
    return found[1]


def test_a_whole_log_has_no_tail(image: Path, tmp_path: Path) -> None:
    tail = read_log_tail(log_of(image))
    size_bytes = log_of(image).stat().st_size
    assert tail == LogTail(whole_bytes=size_bytes)
    assert sqlite_frames(image, tmp_path) == (size_bytes - HEADER_BYTES) // FRAME_BYTES


def test_no_log_and_an_empty_one_have_no_tail(tmp_path: Path) -> None:
    assert read_log_tail(tmp_path / "missing") == LogTail()
    (tmp_path / "empty").touch()
    assert read_log_tail(tmp_path / "empty") == LogTail()


@examples(60)
@given(data=st.data())
def test_what_is_whole_is_what_sqlite_finds(
    image: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    database = folder / image.name
    shutil.copy(image, database)
    log = bytearray(log_of(image).read_bytes())
    if data.draw(st.booleans(), label="flip"):
        offset = data.draw(st.integers(0, len(log) - 1), label="offset")
        log[offset] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    if data.draw(st.booleans(), label="truncate"):
        del log[data.draw(st.integers(0, len(log)), label="size") :]
    log_of(database).write_bytes(log)
    (folder / "copy").mkdir()
    tail = read_log_tail(log_of(database))
    frames = sqlite_frames(database, folder / "copy")
    assert max(0, tail.whole_bytes - HEADER_BYTES) == frames * FRAME_BYTES
    assert tail.whole_bytes + tail.torn_bytes == len(log)
    assert tail.goes_on_after_commit <= (tail.torn_commit_count > 0) <= (tail.torn_bytes > 0)


def test_commits_behind_a_break_are_counted(image: Path, tmp_path: Path) -> None:
    log = bytearray(log_of(image).read_bytes())
    log[HEADER_BYTES + FRAME_BYTES + 100] ^= 1  # in the second commit, that of the file's start
    damaged = tmp_path / "damaged"
    damaged.write_bytes(log)
    tail = read_log_tail(damaged)
    assert tail.whole_bytes == HEADER_BYTES + FRAME_BYTES
    assert tail.torn_commit_count == 7
    assert tail.goes_on_after_commit


def test_a_break_in_the_last_commit_is_followed_by_nothing(image: Path, tmp_path: Path) -> None:
    log = bytearray(log_of(image).read_bytes())
    log[-1] ^= 1
    damaged = tmp_path / "damaged"
    damaged.write_bytes(log)
    tail = read_log_tail(damaged)
    assert (tail.torn_bytes, tail.torn_commit_count, tail.goes_on_after_commit) == (FRAME_BYTES, 1, False)
    damaged.write_bytes(log[:-1])
    assert read_log_tail(damaged).torn_commit_count == 0
