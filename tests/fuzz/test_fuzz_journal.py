"""Recovery with damaged files: the state that was, a part of it that ends where a crash may end it, or a clear error.

Never records that were not written, never with one missing in between, and never fewer without a word in the log.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from pathlib import Path

import pytest
from damage import DAMAGES, damage
from fuzz_messages import EXAMPLES

from tq_service.durable.journal import Journal
from tq_service.durable.journal_file import PAGE_BYTES
from tq_service.errors import DiskFullError, JournalDamagedError

RECORD_COUNT = 300
RECORDS = [
    random.Random(number).randbytes(random.Random(-number).choice([0, 3, 90, 700, 9000]))
    for number in range(RECORD_COUNT)
]


@pytest.fixture(scope="module", params=["process", "disk"])
def crashed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is in the moment in which its service is killed: two files, the last one with its log."""
    folder: Path = tmp_path_factory.mktemp("journal")
    image = folder / "image"
    (folder / "live").mkdir()
    asyncio.run(_write(folder / "live", image, sync=request.param == "disk"))
    return image


async def _write(live: Path, image: Path, *, sync: bool) -> None:
    journal = Journal.open(live, sync=sync)
    assert list(journal.replay()) == []
    for number, record in enumerate(RECORDS):
        if number == RECORD_COUNT // 2:
            journal.start_generation()
        journal.append(record)
        if number % 3 == 0:
            await journal.durable()
    await journal.durable()
    while (live / "journal-00000001.sqlite3-wal").exists():  # noqa: ASYNC110  (a copy of what is written is like no crash)
        await asyncio.sleep(0.01)
    shutil.copytree(live, image, ignore=shutil.ignore_patterns("making-*"))
    journal.close()


def replayed(folder: Path) -> list[bytes]:
    async def replay() -> list[bytes]:
        journal = Journal.open(folder, sync=False)
        try:
            return list(journal.replay())
        finally:
            journal.close()

    return asyncio.run(replay())


def test_a_crash_alone_loses_nothing(crashed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(crashed, tmp_path / "copy")
    assert replayed(folder) == RECORDS
    assert replayed(folder) == RECORDS


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files(crashed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    caplog.set_level(logging.WARNING)
    for seed in range(max(2, EXAMPLES // 20)):
        caplog.clear()
        folder = shutil.copytree(crashed, tmp_path / "copy")
        what = damage(folder, kind, random.Random(f"{kind} {seed}"))
        try:
            records = replayed(folder)
        except (JournalDamagedError, DiskFullError) as error:
            assert str(folder) in str(error) or "journal-" in str(error), what
        else:
            assert records == RECORDS[: len(records)], what
            assert records == RECORDS or caplog.records, f"{what}: {len(records)} records, and no word about the rest"
            assert replayed(folder) == records, f"{what}: read again"
        shutil.rmtree(folder)


def test_a_crash_while_a_file_is_brought_to_rest_loses_nothing(tmp_path: Path) -> None:
    """SQLite brings pages from the log into the database in their order; a process may be killed after each."""
    live, image = tmp_path / "live", tmp_path / "image"
    live.mkdir()

    async def write() -> None:
        journal = Journal.open(live, sync=False)
        assert list(journal.replay()) == []
        for record in RECORDS:
            journal.append(record)
        await journal.durable()
        shutil.copytree(live, image, ignore=shutil.ignore_patterns("making-*"))
        journal.close()

    asyncio.run(write())
    name = "journal-00000001.sqlite3"
    before, after = (image / name).read_bytes(), (live / name).read_bytes()
    assert len(after) > len(before)
    for page in (1, 2, 3, 9, len(after) // PAGE_BYTES):
        folder = shutil.copytree(image, tmp_path / f"after-{page}")
        written = after[: page * PAGE_BYTES]
        (folder / name).write_bytes(written + before[len(written) :])
        assert replayed(folder) == RECORDS, f"killed after page {page}"
