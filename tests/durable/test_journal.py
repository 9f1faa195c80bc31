"""What was appended comes back in order, with and without fsync."""

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_support import (
    commit_each,
    crashed,
    journal_threads,
    opened,
    read,
    replayed,
    wait_for_the_next_file,
)
from open_files import open_files
from property_settings import examples

from tq_service.durable import journal as journal_module
from tq_service.durable.file_names import journal_path
from tq_service.durable.journal import Journal
from tq_service.durable.journal_file import JournalFile
from tq_service.durable.journal_reader import JournalReader

MODES = pytest.mark.parametrize("sync", [False, True], ids=["process", "disk"])


@MODES
def test_records_come_back_in_order(tmp_path: Path, sync: bool) -> None:
    records = [b"", b"one", bytes(300_000), b"\x00\xff" * 5000, "zwölf".encode()]
    with opened(tmp_path, sync=sync) as journal:
        for record in records:
            journal.append(record)
        assert journal.is_behind
        journal.flush()
        assert not journal.is_behind
    assert read(tmp_path) == records


@MODES
def test_what_was_appended_last_is_written_at_close(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path, sync=sync) as journal:
        journal.append(b"never flushed")
    assert read(tmp_path) == [b"never flushed"]


@MODES
def test_each_start_adds_to_what_was_there(tmp_path: Path, sync: bool) -> None:
    expected: list[bytes] = []
    for start in range(4):
        with opened(tmp_path, sync=sync) as journal:
            assert replayed(journal) == expected
            new = [b"%d %d" % (start, number) for number in range(start)]
            commit_each(journal, new)
            expected += new
    assert read(tmp_path) == expected


def test_modes_may_change_from_start_to_start(tmp_path: Path) -> None:
    for sync in (False, True, False):
        with opened(tmp_path, sync=sync) as journal:
            replayed(journal)
            commit_each(journal, [str(sync).encode()])
    assert read(tmp_path) == [b"False", b"True", b"False"]


def test_nothing_is_taken_before_what_is_there_was_read(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        commit_each(journal, [b"first", b"second"])
    with opened(tmp_path) as journal:
        records = journal.replay()
        assert next(records) == b"first"
        with pytest.raises(RuntimeError, match="exhaust replay"):
            journal.append(b"too early")
        with pytest.raises(RuntimeError, match="exhaust replay"):
            journal.start_generation()
        assert list(records) == [b"second"]
        commit_each(journal, [b"third"])
    assert read(tmp_path) == [b"first", b"second", b"third"]


def test_a_closed_journal_takes_nothing_and_closes_again(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.close()
        with pytest.raises(RuntimeError, match="before close"):
            journal.append(b"late")


@MODES
async def test_durable_means_that_another_process_would_find_it(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path / "journal", sync=sync) as journal:
        for number in range(20):
            journal.append(b"%d" % number)
            await journal.durable()
            assert not journal.is_behind
            log = journal_path(tmp_path / "journal", 1)
            with open_copy(log, tmp_path / f"copy-{number}") as connection:
                assert connection.execute("SELECT count(*) FROM records").fetchone() == (number + 1,)


def open_copy(database: Path, folder: Path) -> sqlite3.Connection:
    folder.mkdir()
    for path in (database, database.with_name(database.name + "-wal")):
        (folder / path.name).write_bytes(path.read_bytes())
    return sqlite3.connect(folder / database.name)


async def test_calls_at_once_share_few_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    is_free = threading.Event()
    write = JournalFile.write

    def counted(file: JournalFile, first: int, records: list[bytes]) -> None:
        groups.append(len(records))
        assert is_free.wait(30)
        write(file, first, records)

    monkeypatch.setattr(JournalFile, "write", counted)
    expected = [b"%d" % number for number in range(200)]
    with opened(tmp_path, sync=True) as journal:

        async def call(record: bytes) -> None:
            journal.append(record)
            await journal.durable()

        calls = [asyncio.create_task(call(record)) for record in expected]
        await asyncio.sleep(0)  # all have appended; the first commit holds some of them, and waits
        is_free.set()
        await asyncio.gather(*calls)
    assert sum(groups) == 200
    assert len(groups) <= 2
    assert read(tmp_path) == expected


async def test_the_loop_goes_on_during_an_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = threading.Event()
    write = JournalFile.write

    def slow(file: JournalFile, first: int, records: list[bytes]) -> None:
        assert is_free.wait(30)
        write(file, first, records)

    monkeypatch.setattr(JournalFile, "write", slow)
    with opened(tmp_path, sync=True) as journal:
        journal.append(b"slow")
        waiting = asyncio.create_task(journal.durable())
        for _ in range(100):
            await asyncio.sleep(0)
        assert journal.is_behind
        assert not waiting.done()
        is_free.set()
        await waiting
        assert not journal.is_behind


@MODES
async def test_callbacks_run_in_order_once_durable(tmp_path: Path, sync: bool) -> None:
    told: list[int] = []
    with opened(tmp_path, sync=sync) as journal:
        journal.after_durable(lambda: told.append(0))
        assert told == [0]  # nothing is behind
        for number in range(1, 6):
            journal.append(b"record")
            journal.after_durable(lambda number=number: told.append(number))
        assert told == [0]
        await journal.durable()
        assert told == [0, 1, 2, 3, 4, 5]


@MODES
async def test_callbacks_run_without_anybody_who_waits(tmp_path: Path, sync: bool) -> None:
    called = asyncio.Event()
    with opened(tmp_path, sync=sync) as journal:
        journal.append(b"dropped")
        journal.after_durable(called.set)
        async with asyncio.timeout(30):
            await called.wait()
        assert not journal.is_behind


async def test_a_callback_may_append_and_a_failing_one_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def fail() -> None:
        raise ValueError("not mine")

    with opened(tmp_path) as journal:
        journal.append(b"first")
        journal.after_durable(lambda: journal.append(b"from a callback"))
        journal.after_durable(fail)
        journal.after_durable(lambda: told.append("last"))
        await journal.durable()
        assert told == ["last"]
        assert journal.is_behind
        await journal.durable()
    assert "not mine" in caplog.text
    assert read(tmp_path) == [b"first", b"from a callback"]


async def test_who_gives_up_waiting_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = threading.Event()
    write = JournalFile.write
    monkeypatch.setattr(JournalFile, "write", lambda *call: is_free.wait(30) and write(*call))
    with opened(tmp_path, sync=True) as journal:
        journal.append(b"record")
        waiting = asyncio.create_task(journal.durable())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        is_free.set()
        await journal.durable()
    assert read(tmp_path) == [b"record"]


@MODES
def test_threads_and_files_are_gone_after_close(tmp_path: Path, sync: bool) -> None:
    before = open_files()
    assert journal_threads() == []
    with opened(tmp_path, sync=sync) as journal:
        commit_each(journal, [b"record"] * 3)
        journal.start_generation()
        assert journal_threads() != []
    with opened(tmp_path, sync=sync) as journal:
        replayed(journal)
    assert journal_threads() == []
    assert open_files() <= before
    assert not list(tmp_path.glob("*-wal"))
    assert not list(tmp_path.glob("making-*"))


STEPS = st.lists(
    st.one_of(st.binary(max_size=50), st.sampled_from(["flush", "start generation", "close"])), max_size=40
)


@examples(12)
@given(steps=STEPS, sync=st.booleans())
def test_any_order_of_calls_keeps_all_records(
    tmp_path_factory: pytest.TempPathFactory, steps: list[bytes | str], sync: bool
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    journal = Journal.open(directory, sync=sync)
    expected: list[bytes] = []
    since: dict[int, int] = {0: 0}
    for step in steps:
        if isinstance(step, bytes):
            journal.append(step)
            expected.append(step)
        elif step == "flush":
            journal.flush()
            assert not journal.is_behind
        elif step == "start generation":
            wait_for_the_next_file(journal)
            since[journal.start_generation()] = len(expected)
        else:
            journal.close()
            journal = Journal.open(directory, sync=sync)
            assert replayed(journal) == expected
    journal.close()
    for generation, count in since.items():
        assert read(directory, generation) == expected[count:]


def test_the_file_that_is_made_meanwhile_is_not_taken_for_one_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = crashed(tmp_path / "journal", [b"one", b"two"])

    class LateReader(JournalReader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.5)  # upkeep, had it begun, would have made its file by now, and keeps it locked
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(journal_module, "JournalReader", LateReader)
    with opened(image) as journal:
        assert replayed(journal) == [b"one", b"two"]
