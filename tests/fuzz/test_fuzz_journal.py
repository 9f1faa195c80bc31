"""Recovery with damaged files: the state that was, a part of it that ends where a crash may end it, or a clear error.

Never records that were not written, and never with one missing in between. Fewer records are reported in the log,
except where the last segment was cut between two frames: nothing shows that it was longer.
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

from tq_service.durable.state_store import Stream
from tq_service.errors import DiskFullError, JournalDamagedError
from tq_service.journal.files import FileBackend, FoundSegment, segment_numbers, segment_path
from tq_service.journal.log import Log

RECORD_COUNT = 300
RECORDS = [
    random.Random(number).randbytes(random.Random(-number).choice([0, 3, 90, 700, 9000]))
    for number in range(RECORD_COUNT)
]


@pytest.fixture(scope="module", params=["process", "disk"])
def crashed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as it is in the moment in which its service is killed: two segments."""
    directory: Path = tmp_path_factory.mktemp("journal")
    image = directory / "image"
    (directory / "live").mkdir()
    asyncio.run(_write(directory / "live", image, sync=request.param == "disk"))
    return image


async def _write(live: Path, image: Path, *, sync: bool) -> None:
    journal = Log(FileBackend(live, sync=sync))
    assert list(journal.read(0)) == []
    for number, record in enumerate(RECORDS):
        if number == RECORD_COUNT // 2:
            journal.rotate()
        journal.append(Stream.CHANGES, record)
        if number % 3 == 0:
            await journal.wait_durable()
    await journal.wait_durable()
    shutil.copytree(live, image)
    journal.close()


def replayed(directory: Path) -> list[bytes]:
    async def replay() -> list[bytes]:
        journal = Log(FileBackend(directory, sync=False))
        try:
            return [record.data for record in journal.read(0)]
        finally:
            journal.close()

    return asyncio.run(replay())


def is_cut_between_frames(directory: Path, image: Path) -> bool:
    """Whether the last segment lost whole frames at its end, so that it looks like one that was never longer."""
    number = segment_numbers(image)[-1]
    if number not in segment_numbers(directory):
        return False
    segment = FoundSegment(directory, number)
    for _ in segment.records():
        pass
    return segment.flaw is None and segment.size < segment_path(image, number).stat().st_size


def test_a_crash_alone_loses_nothing(crashed: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(crashed, tmp_path / "copy")
    assert replayed(directory) == RECORDS
    assert replayed(directory) == RECORDS


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files(crashed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    caplog.set_level(logging.WARNING)
    for seed in range(max(2, EXAMPLES // 20)):
        caplog.clear()
        directory = shutil.copytree(crashed, tmp_path / "copy")
        what = damage(directory, kind, random.Random(f"{kind} {seed}"))
        may_be_silent = is_cut_between_frames(directory, crashed)
        try:
            records = replayed(directory)
        except (JournalDamagedError, DiskFullError) as error:
            assert str(directory) in str(error) or "journal-" in str(error), what
        else:
            assert records == RECORDS[: len(records)], what
            is_told = records == RECORDS or bool(caplog.records) or may_be_silent
            assert is_told, f"{what}: {len(records)} records, and no word about the rest"
            assert replayed(directory) == records, f"{what}: read again"
        shutil.rmtree(directory)
