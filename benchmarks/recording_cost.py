"""What does a recording cost: training steps of services that record, and of the same ones that do not?

In a step samples are put, 8 ranks claim a batch and read it, and the partition is cleared. The same steps go to
services in memory and to services with a data directory. Each kind has one without a recording; a second one without,
which shows the variation between identical services; and one that records on the same file system. Files of a data
directory are hard-linked, not copied; bytes in memory are copied.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import psutil

import tq_service as tq
from benchmarks.harness import Options, interleave_async, main, median, run_async
from benchmarks.report import Aim, Cell, Report
from tq_service.testing import ServiceProcess

RANK_COUNT: Final = 8
_PUT_COUNT: Final = 8
_ROW_BYTES: Final = 256 << 10
_TIMEOUT_SECONDS: Final = 120.0
_KEPT_STEPS: Final = 4  # a long run must not fill the disk
_KINDS: Final = ("memory", "data directory")
_MODES: Final = ("off", "off again", "on")


class _Case:
    """Steps of one service: GB per second, and processor seconds of the service per GB."""

    def __init__(self, client: tq.AsyncClient, service: ServiceProcess, *, rows: int, steps: int) -> None:
        self._client = client
        self._process = psutil.Process(service.pid)
        self._columns = {"x": np.random.default_rng(0).random((rows, _ROW_BYTES // 8))}
        self._steps = steps
        self._number = 0

    async def measure(self) -> tuple[float, float]:
        before, began_at = sum(self._process.cpu_times()[:2]), time.perf_counter()
        for _ in range(self._steps):
            await self._step()
        seconds = time.perf_counter() - began_at
        size = self._steps * _PUT_COUNT * self._columns["x"].nbytes
        return size / seconds / 1e9, (sum(self._process.cpu_times()[:2]) - before) / size * 1e9

    async def _step(self) -> None:
        client, self._number = self._client, self._number + 1
        name = f"train@{self._number}"
        await asyncio.gather(*(client.put(name, self._columns) for _ in range(_PUT_COUNT)))

        async def train(rank: int) -> None:
            meta = await client.get_meta(
                partition_id=name, task_name="train", data_fields=["x"], dp_rank=rank, dp_size=RANK_COUNT,
                batch_index=0, batch_size=_PUT_COUNT * len(self._columns["x"]) // RANK_COUNT,
            )  # fmt: skip
            await client.get_data(meta)

        await asyncio.gather(*map(train, range(RANK_COUNT)))
        await client.clear_partition(name)


async def _measure(options: Options) -> list[list[Cell]]:
    with ExitStack() as processes:
        directory = Path(processes.enter_context(tempfile.TemporaryDirectory(prefix="tq-recording-")))
        async with AsyncExitStack() as stack:
            cases, clients = {}, {}
            for kind, mode in itertools.product(_KINDS, _MODES):
                place = directory / f"{kind}-{mode}".replace(" ", "-")
                record = ("--record", str(place / "recording"), "--record-steps", str(_KEPT_STEPS))
                data_dir = place / "data" if kind == "data directory" else None
                service = processes.enter_context(
                    ServiceProcess("--max-bytes", "1GiB", *(record if mode == "on" else ()), data_dir=data_dir)
                )
                client = await stack.enter_async_context(tq.AsyncClient(service.address, timeout=_TIMEOUT_SECONDS))
                rows, steps = (4, 1) if options.quick else (16, 2)
                clients[kind, mode] = client
                cases[kind, mode] = _Case(client, service, rows=rows, steps=steps).measure
            found = await interleave_async(cases, options.repeats)
            for kind in _KINDS:
                status = (await clients[kind, "on"].status(explain=False)).service.recording
                if status is None or not status.is_recording or status.skipped_step_count:
                    raise RuntimeError(f"the service with {kind} did not record all steps: {status}")
    rows_of_table: list[list[Cell]] = []
    for kind, (what, part) in itertools.product(_KINDS, (("GB/s", 0), ("processor of the service, s per GB", 1))):
        rounds = {mode: [each[part] for each in found[kind, mode]] for mode in _MODES}
        ratios = [
            median([on / off for on, off in zip(rounds[mode], rounds["off"], strict=True)]) for mode in _MODES[1:]
        ]
        rows_of_table.append([f"{kind}: {what}", *(median(rounds[mode]) for mode in _MODES), *ratios])
    return rows_of_table


def run(options: Options) -> Report:
    """Measure both kinds of services."""
    rows = run_async(_measure(options))
    ratio = rows[2][5]
    return Report(
        name="recording_cost",
        question="What does a recording cost: training steps of services with and without one?",
        columns=["what", *_MODES, "off again / off", "on / off"],
        rows=rows,
        notes=[
            f"a step: {_PUT_COUNT} puts at a time, {RANK_COUNT} ranks that claim and read, clear; rows of "
            f"{_ROW_BYTES >> 10} KiB, client and service on one host; the recording retains {_KEPT_STEPS} steps",
            "ratios are medians of those of each round",
        ],
        aims=[
            Aim(
                what="GB/s with a data directory, on / off",
                measured=ratio if isinstance(ratio, float) else None,
                wanted=0.97,
            )
        ],
        plots=[],
    )


if __name__ == "__main__":
    sys.exit(main(run))
