"""What one step of the event loop appends is durable together: a change, and the answer that its retry is to get."""

import asyncio
import time
from pathlib import Path

import pytest
from journal_support import copy, journal_threads, opened, read

from tq_service.durable.state_store import Stream
from tq_service.journal.files import FileBackend, SegmentWriter
from tq_service.journal.log import Log

MODES = pytest.mark.parametrize("sync", [False, True], ids=["process", "disk"])


def idle(journal: Log) -> None:
    """Give the thread that commits, where there is one, time to commit whatever it takes for complete."""
    del journal
    if journal_threads():
        time.sleep(0.2)


@MODES
async def test_a_crash_within_a_step_leaves_all_of_it_or_nothing(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path / "journal", sync=sync) as journal:
        journal.append(Stream.CHANGES, b"of another call")
        waiting = asyncio.create_task(journal.wait_durable())
        await asyncio.sleep(0)
        journal.append(Stream.CHANGES, b"a change")
        journal.after_durable(lambda: None)  # as for the bytes that it frees
        idle(journal)
        copy(tmp_path / "journal", tmp_path / "image", journal)
        journal.append(Stream.CHANGES, b"its answer")
        await journal.wait_durable()
        await waiting
    assert read(tmp_path / "image") == [b"of another call"]
    assert read(tmp_path / "journal") == [b"of another call", b"a change", b"its answer"]


async def test_a_commit_of_many_calls_parts_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileBackend, "group_bytes", 8)
    sizes: list[int] = []
    write = SegmentWriter.append

    def counted(segment: SegmentWriter, first: int, records: list[bytes]) -> None:
        sizes.append(len(records))
        write(segment, first, records)

    monkeypatch.setattr(SegmentWriter, "append", counted)
    with opened(tmp_path, sync=True) as journal:

        async def call(number: int) -> None:
            for part in range(2):
                journal.append(Stream.CHANGES, b"%d %d" % (number, part))
            await journal.wait_durable()

        await asyncio.gather(*(call(number) for number in range(5)))
    assert sum(sizes) == 10
    assert len(sizes) > 1
    assert all(size % 2 == 0 for size in sizes)


@MODES
async def test_what_was_durable_before_anybody_waited_is_known_to_be(tmp_path: Path, sync: bool) -> None:
    with opened(tmp_path, sync=sync) as journal:
        journal.append(Stream.CHANGES, b"record")
        journal.rotate()  # with nobody waiting yet, as at the start of a service with a long journal
        idle(journal)
        async with asyncio.timeout(5):
            await journal.wait_durable()
        assert not journal.has_unflushed
