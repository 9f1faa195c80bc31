"""Runs as a process that is killed: appends records without end, and says which of them are durable.

Usage: journal_writer.py DIRECTORY process|disk FIRST SEGMENT_BYTES
"""

import asyncio
import random
import sys
from pathlib import Path

from tq_service.durable.data_dir import DataDir
from tq_service.durable.state_store import Stream
from tq_service.journal.files import FileBackend
from tq_service.journal.log import Log


def record(number: int) -> bytes:
    """Return a record that tells its number, of some bytes up to some pages."""
    return b"%d:" % number + bytes(random.Random(number).choice((1, 300, 300, 3000, 20_000)))


async def run(directory: Path, sync: bool, number: int) -> None:
    data_dir = DataDir.open(directory)
    journal = Log(FileBackend(data_dir.path, sync=sync))
    for _ in journal.read(0):
        pass
    print("ready", flush=True)
    rng = random.Random(number)
    while True:
        for _ in range(rng.choice((1, 1, 1, 5, 40))):
            journal.append(Stream.CHANGES, record(number))
            number += 1
        if rng.random() < 0.02:
            journal.rotate()
        await journal.wait_durable()
        print(number, flush=True)


if __name__ == "__main__":
    FileBackend.segment_bytes = int(sys.argv[4])
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2] == "disk", int(sys.argv[3])))
