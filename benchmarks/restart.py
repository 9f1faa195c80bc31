"""How soon is a killed service back, and how much disk does its state take?

A service is filled, killed with SIGKILL, and restarted on its data directory, several times. The measured time is from
the start of the process until it listens, including the start of Python and all imports.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

import tq_service as tq
from benchmarks.harness import Options, main, median, run_async
from benchmarks.report import Aim, Cell, Report
from tq_service.testing import ServiceProcess

PRODUCER_COUNT = 8
SAMPLE_COUNT, PUT_SAMPLES = 1_000_000, 64
SMALL_PUT_COUNT = 10_000  # two records each: the put, and the controller's change
_GROUP_SIZE = 8
_CLAIM_SAMPLES = 512
_SMALL_VALUES = 16
_QUICK_PART = 20
_MOST_SECONDS, _MOST_MB = 2.0, 10.0
_TIMEOUT_SECONDS = 300.0

Fill = Callable[[tq.AsyncClient, int], Awaitable[int]]


async def _produce(put: Callable[[int], Awaitable[object]], put_count: int) -> None:
    """Make puts from several producers concurrently."""
    numbers = iter(range(put_count))

    async def producer() -> None:
        for number in numbers:
            await put(number)

    await asyncio.gather(*(producer() for _ in range(PRODUCER_COUNT)))


async def _nothing(client: tq.AsyncClient, part: int) -> int:
    return 0


async def _keyed(client: tq.AsyncClient, part: int) -> int:
    """Put samples with keys, groups and lengths; claim half of them."""
    values = np.zeros((PUT_SAMPLES, _SMALL_VALUES), np.int32)
    put_count = SAMPLE_COUNT // part // PUT_SAMPLES

    async def put(number: int) -> None:
        rows = range(number * PUT_SAMPLES, (number + 1) * PUT_SAMPLES)
        await client.put(
            "train",
            {"x": values},
            keys=[f"prompt-{row // _GROUP_SIZE}-{row % _GROUP_SIZE}" for row in rows],
            groups=[f"prompt-{row // _GROUP_SIZE}" for row in rows],
            group_size=_GROUP_SIZE,
            custom_meta=[{"total_lengths": row % 4_096} for row in rows],
        )

    await _produce(put, put_count)
    for batch_index in range(put_count * PUT_SAMPLES // 2 // _CLAIM_SAMPLES):
        await client.get_meta(
            partition_id="train", task_name="update_actor", data_fields=["x"], batch_size=_CLAIM_SAMPLES,
            dp_rank=0, dp_size=1, batch_index=batch_index,
        )  # fmt: skip
    return put_count * PUT_SAMPLES


async def _small(client: tq.AsyncClient, part: int) -> int:
    """Put single samples."""
    values = np.zeros((1, _SMALL_VALUES), np.int32)
    put_count = SMALL_PUT_COUNT // part
    await _produce(lambda _: client.put("train", {"x": values}), put_count)
    return put_count


CASES: dict[str, Fill] = {
    "nothing": _nothing,
    f"samples with keys, groups and lengths in puts of {PUT_SAMPLES}, half of them claimed": _keyed,
    "single samples": _small,
}


async def _fill(address: str, fill: Fill, part: int) -> int:
    async with tq.AsyncClient(address, timeout=_TIMEOUT_SECONDS) as client:
        return await fill(client, part)


def _measure(fill: Fill, options: Options) -> tuple[int, float, float]:
    """Return the number of samples, the seconds until a start listens, and the megabytes of the data directory."""
    with tempfile.TemporaryDirectory(prefix="tq-restart-") as directory:
        with ServiceProcess(data_dir=Path(directory)) as server:
            sample_count = run_async(_fill(server.address, fill, _QUICK_PART if options.quick else 1))
            server.kill()
            used_bytes = sum(file.stat().st_blocks * 512 for file in Path(directory).rglob("journal-*"))
            seconds = []
            for _ in range(options.repeats):
                started = time.perf_counter()
                server.start()
                seconds.append(time.perf_counter() - started)
                server.kill()
        return sample_count, median(seconds), used_bytes / 1e6


def run(options: Options) -> Report:
    """Measure."""
    found = {name: _measure(fill, options) for name, fill in CASES.items()}
    rows: list[list[Cell]] = [[name, *measured] for name, measured in found.items()]
    _, (keyed_count, keyed_seconds, _), (small_count, _, small_mb) = found.values()
    return Report(
        name="restart",
        question="How soon is a killed service back, and how much disk does its state take?",
        columns=["what it has", "samples", "back after, s", "journal, MB"],
        rows=rows,
        notes=[
            "durability process; back after SIGKILL, from the start of the process until it listens",
            "journal: at the first kill, as the file system counts it, without snapshots and the bytes of large puts",
        ],
        aims=[
            Aim(what=f"back with {keyed_count:,} samples, s", measured=keyed_seconds, wanted=_MOST_SECONDS,
                at_least=False),
            Aim(what=f"journal of {2 * small_count:,} small records, MB", measured=small_mb, wanted=_MOST_MB,
                at_least=False),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(run))
