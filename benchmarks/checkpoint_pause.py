"""How much slower are claims while a checkpoint is written?

One client claims batches of 8 as the only rank of a task, with and without a checkpoint being written. The service
stores a million samples with keys, groups and metadata, 1 KiB each.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tq_service as tq
from benchmarks.harness import Options, interleave_async, main, median, median_ratio, p50_p99, run_async
from benchmarks.report import Aim, Report
from tq_service.testing import ServiceProcess

_SAMPLE_COUNT = 1_000_000
_QUICK_COUNT = 50_000
_SAMPLE_BYTES = 1_024
_PUT_COUNT = 1_000
_GROUP_SIZE = 8
_BATCH_SIZE = 8
_PARTITION = "train"
_QUIET_SECONDS = 2.0
_ALONE, _BESIDE = "nothing else", "a checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeat:
    """Latencies of the claims of one repeat, and the checkpoint written during it."""

    claims: list[float]
    seconds: float
    copy_seconds: float | None = None
    pause_seconds: float | None = None

    @property
    def rate(self) -> float:
        """Claims per second."""
        return len(self.claims) / self.seconds


async def _fill(client: tq.AsyncClient, count: int) -> None:
    values = np.zeros((_PUT_COUNT, _SAMPLE_BYTES // 4), np.float32)
    for start in range(0, count, _PUT_COUNT):
        rows = range(start, start + _PUT_COUNT)
        await client.put(
            _PARTITION,
            {"x": values},
            keys=[f"prompt-{row // _GROUP_SIZE}-{row % _GROUP_SIZE}" for row in rows],
            groups=[f"prompt-{row // _GROUP_SIZE}" for row in rows],
            group_size=_GROUP_SIZE,
            custom_meta=[{"total_lengths": row % 4096, "score": row / 7, "tag": f"t{row % 5}"} for row in rows],
        )


async def _claims_until(client: tq.AsyncClient, is_over: Callable[[], bool]) -> list[float]:
    task_name, latencies = secrets.token_hex(8), []
    while not is_over():
        started = time.perf_counter()
        await client.get_meta(
            partition_id=_PARTITION, task_name=task_name, data_fields=["x"], batch_size=_BATCH_SIZE,
            dp_rank=0, dp_size=1, batch_index=len(latencies),
        )  # fmt: skip
        latencies.append(time.perf_counter() - started)
    return latencies


async def _alone(client: tq.AsyncClient) -> _Repeat:
    started = time.perf_counter()
    claims = await _claims_until(client, lambda: time.perf_counter() - started > _QUIET_SECONDS)
    return _Repeat(claims=claims, seconds=time.perf_counter() - started)


async def _beside(client: tq.AsyncClient) -> _Repeat:
    started = time.perf_counter()
    copying = asyncio.get_running_loop().create_task(client.checkpoint("pause"))
    claims = await _claims_until(client, copying.done)
    seconds = time.perf_counter() - started
    copy = await copying
    return _Repeat(claims=claims, seconds=seconds, copy_seconds=seconds, pause_seconds=copy.pause_seconds)


async def _measure(options: Options, address: str) -> Report:
    count = _QUICK_COUNT if options.quick else _SAMPLE_COUNT
    async with tq.AsyncClient(address, timeout=120.0) as client:
        await _fill(client, count)
        cases: dict[str, Callable[[], Awaitable[_Repeat]]] = {
            _ALONE: lambda: _alone(client),
            _BESIDE: lambda: _beside(client),
        }
        return _report(count, await interleave_async(cases, options.repeats))


def _report(count: int, times: dict[str, list[_Repeat]]) -> Report:
    quiet = [repeat.rate for repeat in times[_ALONE]]
    rows: list[list[str | float | None]] = []
    for label, repeats in times.items():
        p50, p99 = p50_p99([repeat.claims for repeat in repeats])
        rates = [repeat.rate for repeat in repeats]
        copies = [repeat.copy_seconds for repeat in repeats if repeat.copy_seconds is not None]
        pauses = [repeat.pause_seconds * 1e3 for repeat in repeats if repeat.pause_seconds is not None]
        rows.append([
            label, median(rates), median_ratio(rates, quiet), p50, p99, median(copies) if copies else None,
            median(pauses) if pauses else None,
        ])  # fmt: skip
    return Report(
        name="checkpoint_pause",
        question="How much slower are claims while a checkpoint is written?",
        columns=["beside", "claims/s", "ratio", "p50, ms", "p99, ms", "checkpoint, s", "longest pause, ms"],
        rows=rows,
        notes=[
            f"{count:,} samples of {_SAMPLE_BYTES} bytes with keys, groups of {_GROUP_SIZE} and three custom_meta "
            "columns",
            f"one rank claims batches of {_BATCH_SIZE}, one at a time, on the machine of the service",
            "the longest pause is the longest delay of a sleep of 2 ms on the service's loop, including time that the "
            "system gave to other processes",
        ],
        aims=[Aim(what="longest pause, ms", measured=float(rows[1][6] or 0), wanted=10.0, at_least=False)],
        plots=[],
    )


def run(options: Options) -> Report:
    """Measure."""
    directory = Path(tempfile.mkdtemp(prefix="tq-checkpoint-"))
    try:
        with ServiceProcess("--checkpoint-dir", str(directory)) as server:
            return run_async(_measure(options, server.address))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(run))
