"""What was appended comes back in order, with and without fsync."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_support import commit_each, copy, crashed, journal_threads, opened, read, replayed, wait_for_worker
from open_files import open_files
from property_settings import examples

from tq_service.durable.state_store import Stream
from tq_service.journal.files import FileBackend, SegmentWriter, segment_numbers
from tq_service.journal.log import Log

MODES = pytest.mark.parametrize("sync", [False, True], ids=["process", "disk"])


@MODES
def test_records_come_back_in_order(tmp_path: Path, sync: bool) -> None:
    records = [b"", b"one", bytes(300_000), b"\x00\xff" * 5000, "zwölf".encode()]
    with opened(tmp_path, sync=sync) as journal:
        for record in records:
            journal.append(Stream.CHANGES, record)
        assert journal.has_unflushed
        journal.flush()
        assert not journal.has_unflushed
    assert read(tmp_path) == records


@MODES
def test_what_was_appended_last_is_written_at_close(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path, sync=sync) as journal:
        journal.append(Stream.CHANGES, b"never flushed")
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
        records = journal.read(0)
        assert next(records) == (2, Stream.CHANGES, b"first")
        with pytest.raises(RuntimeError, match="Exhaust read"):
            journal.append(Stream.CHANGES, b"too early")
        with pytest.raises(RuntimeError, match="Exhaust read"):
            journal.rotate()
        assert list(records) == [(3, Stream.CHANGES, b"second")]
        commit_each(journal, [b"third"])
    assert read(tmp_path) == [b"first", b"second", b"third"]


def test_a_closed_journal_takes_nothing_and_closes_again(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.close()
        with pytest.raises(RuntimeError, match="before close"):
            journal.append(Stream.CHANGES, b"late")


@MODES
async def test_durable_means_that_another_process_would_find_it(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path / "journal", sync=sync) as journal:
        for number in range(20):
            journal.append(Stream.CHANGES, b"%d" % number)
            await journal.wait_durable()
            assert not journal.has_unflushed
            copy(tmp_path / "journal", tmp_path / f"copy-{number}")
            assert read(tmp_path / f"copy-{number}") == [b"%d" % each for each in range(number + 1)]


@MODES
async def test_one_waits_for_a_number_and_not_for_what_came_later(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path, sync=sync) as journal:
        first = journal.append(Stream.CHANGES, b"first")
        await journal.wait_durable(first)
        second = journal.append(Stream.CHANGES, b"second")
        assert second == first + 1
        await journal.wait_durable(first)
        assert journal.has_unflushed
        await journal.wait_durable(second)
        assert not journal.has_unflushed


async def test_calls_at_once_share_few_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    is_free = threading.Event()
    write = SegmentWriter.append

    def counted(segment: SegmentWriter, first: int, records: list[bytes]) -> None:
        groups.append(len(records))
        assert is_free.wait(30)
        write(segment, first, records)

    monkeypatch.setattr(SegmentWriter, "append", counted)
    expected = [b"%d" % number for number in range(200)]
    with opened(tmp_path, sync=True) as journal:

        async def call(record: bytes) -> None:
            journal.append(Stream.CHANGES, record)
            await journal.wait_durable()

        calls = [asyncio.create_task(call(record)) for record in expected]
        await asyncio.sleep(0)  # all have appended; the first commit holds some of them, and waits
        is_free.set()
        await asyncio.gather(*calls)
    assert sum(groups) == 200
    assert len(groups) <= 2
    assert read(tmp_path) == expected


async def test_the_loop_goes_on_during_an_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = threading.Event()
    write = SegmentWriter.append

    def slow(segment: SegmentWriter, first: int, records: list[bytes]) -> None:
        assert is_free.wait(30)
        write(segment, first, records)

    monkeypatch.setattr(SegmentWriter, "append", slow)
    with opened(tmp_path, sync=True) as journal:
        journal.append(Stream.CHANGES, b"slow")
        waiting = asyncio.create_task(journal.wait_durable())
        for _ in range(100):
            await asyncio.sleep(0)
        assert journal.has_unflushed
        assert not waiting.done()
        is_free.set()
        await waiting
        assert not journal.has_unflushed


@MODES
async def test_callbacks_run_in_order_once_durable(tmp_path: Path, sync: bool) -> None:
    told: list[int] = []
    with opened(tmp_path, sync=sync) as journal:
        journal.after_durable(lambda: told.append(0))
        assert told == [0]  # nothing is behind
        for number in range(1, 6):
            journal.append(Stream.CHANGES, b"record")
            journal.after_durable(lambda number=number: told.append(number))
        assert told == [0]
        await journal.wait_durable()
        assert told == [0, 1, 2, 3, 4, 5]


@MODES
async def test_callbacks_run_for_who_gave_up_waiting(tmp_path: Path, sync: bool) -> None:
    called = asyncio.Event()
    with opened(tmp_path, sync=sync) as journal:
        journal.append(Stream.CHANGES, b"dropped")
        journal.after_durable(called.set)
        waiting = asyncio.create_task(journal.wait_durable())
        await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(30):
            await called.wait()
        assert not journal.has_unflushed


async def test_a_callback_may_append_and_a_failing_one_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def fail() -> None:
        raise ValueError("not mine")

    with opened(tmp_path) as journal:
        journal.append(Stream.CHANGES, b"first")
        journal.after_durable(lambda: journal.append(Stream.CHANGES, b"from a callback"))
        journal.after_durable(fail)
        journal.after_durable(lambda: told.append("last"))
        await journal.wait_durable()
        assert told == ["last"]
        assert journal.has_unflushed
        await journal.wait_durable()
    assert "not mine" in caplog.text
    assert read(tmp_path) == [b"first", b"from a callback"]


async def test_who_gives_up_waiting_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = threading.Event()
    write = SegmentWriter.append
    monkeypatch.setattr(SegmentWriter, "append", lambda *call: is_free.wait(30) and write(*call))
    with opened(tmp_path, sync=True) as journal:
        journal.append(Stream.CHANGES, b"record")
        waiting = asyncio.create_task(journal.wait_durable())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        is_free.set()
        await journal.wait_durable()
    assert read(tmp_path) == [b"record"]


@MODES
def test_threads_and_files_are_gone_after_close(tmp_path: Path, sync: bool) -> None:
    before = open_files()
    assert journal_threads() == []
    with opened(tmp_path, sync=sync) as journal:
        commit_each(journal, [b"record"] * 3)
        journal.rotate()
        journal.flush()
        assert journal_threads() != []
    with opened(tmp_path, sync=sync) as journal:
        replayed(journal)
    assert journal_threads() == []
    assert open_files() <= before


STEPS = st.lists(st.one_of(st.binary(max_size=50), st.sampled_from(["flush", "rotate", "close"])), max_size=40)


@examples(12)
@given(steps=STEPS, sync=st.booleans())
def test_any_order_of_calls_keeps_all_records(
    tmp_path_factory: pytest.TempPathFactory, steps: list[bytes | str], sync: bool
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    journal = Log(FileBackend(directory, sync=sync))
    assert replayed(journal) == []
    expected: list[bytes] = []
    since: dict[int, int] = {0: 0}
    for step in steps:
        if isinstance(step, bytes):
            journal.append(Stream.CHANGES, step)
            expected.append(step)
        elif step == "flush":
            journal.flush()
            assert not journal.has_unflushed
        elif step == "rotate":
            since[journal.rotate()] = len(expected)
        else:
            journal.close()
            journal = Log(FileBackend(directory, sync=sync))
            assert replayed(journal) == expected
    journal.close()
    for number, count in since.items():
        assert read(directory, number) == expected[count:]


@MODES
async def test_each_step_of_the_loop_is_one_call_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    calls: list[int] = []
    pwritev = os.pwritev

    def counted(descriptor: int, parts: list[bytes], at: int) -> int:
        calls.append(sum(map(len, parts)))
        return pwritev(descriptor, parts, at)

    with opened(tmp_path, sync=sync) as journal:
        monkeypatch.setattr(os, "pwritev", counted)
        for count in (1, 2, 50):
            calls.clear()
            for number in range(count):
                journal.append(Stream.CHANGES, b"%d" % number)
            await journal.wait_durable()
            assert len(calls) == 1


def test_what_a_run_without_sync_left_is_on_the_disk_before_a_run_with_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "journal") as journal:
        commit_each(journal, [b"1"])
        journal.rotate()
        commit_each(journal, [b"2"])
        copy(tmp_path / "journal", tmp_path / "image", journal)
    left = {path.name for path in (tmp_path / "image").glob("journal-*")}
    assert len(left) == 2
    fsync, synced = os.fsync, set()

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", noted)
    with opened(tmp_path / "image", sync=True) as journal:
        assert replayed(journal) == [b"1", b"2"]
        assert left | {"image"} <= synced


def test_many_small_records_take_little_space(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        commit_each(journal, [bytes(300)] * 2000)
    assert sum(path.stat().st_size for path in tmp_path.glob("journal-*")) <= 2000 * 330


def test_a_start_begins_a_segment_and_changes_nothing_before_it(tmp_path: Path) -> None:
    image = crashed(tmp_path / "journal", [b"one", b"two"])
    (number,) = segment_numbers(image)
    before = (image / f"journal-{number:012d}.tqj").read_bytes()
    with opened(image) as journal:
        assert replayed(journal) == [b"one", b"two"]
        wait_for_worker(journal)
        assert segment_numbers(image) == [number, number + 3]
        assert (image / f"journal-{number:012d}.tqj").read_bytes().startswith(before)
