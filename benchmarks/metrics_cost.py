"""How much do metrics cost: claims with and without them, and a scrape of many partitions and tasks?

The same load goes to services with metrics that are scraped, to services without metrics, and to a second group
without,
which shows the variation between identical services. Two processes of one program may differ by more than the effect,
so each group has several. The scraped service runs in this process, and its event loop is watched during scrapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack

import numpy as np
import psutil

import tq_service as tq
from benchmarks.durability_load import Load
from benchmarks.harness import Options, interleave_async, main, median, run_async
from benchmarks.report import Aim, Cell, Report
from tq_service.config import load_settings
from tq_service.server.app import App, running
from tq_service.testing import ServiceProcess

PARTITION_COUNT = 200
TASK_COUNT = 20
_PROCESS_COUNT = 5
_SCRAPES_A_REPEAT = 4
_SCRAPE_PERIOD_SECONDS = 5.0
_TIMEOUT_SECONDS = 120.0
_MODES = ("off", "off again", "on")


def _fetch(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_TIMEOUT_SECONDS) as answer:
        body: bytes = answer.read()
        return body


async def _scrape_often(port: int) -> None:
    """Scrape as Prometheus would, but three times as often."""
    while True:
        await asyncio.to_thread(_fetch, port)
        await asyncio.sleep(_SCRAPE_PERIOD_SECONDS)


class _Case:
    """Claims of one service: claims per second, and processor time of the service per claim."""

    def __init__(self, load: Load, pid: int) -> None:
        self._load = load
        self._process = psutil.Process(pid)

    async def measure(self) -> tuple[float, float]:
        before, began_at = sum(self._process.cpu_times()[:2]), time.perf_counter()
        rate = await self._load.ranked_claims()
        count = rate * (time.perf_counter() - began_at)
        return rate, (sum(self._process.cpu_times()[:2]) - before) / count


async def _claims(options: Options) -> list[list[Cell]]:
    count = _process_count(options)
    with ExitStack() as processes:
        ports = [_free_port() for _ in range(count)]
        flags = {mode: [("--metrics-port", str(port)) if mode == "on" else () for port in ports] for mode in _MODES}
        async with AsyncExitStack() as stack:
            cases = {}
            for mode, number in itertools.product(_MODES, range(count)):
                service = processes.enter_context(ServiceProcess(*flags[mode][number]))
                client = await stack.enter_async_context(tq.AsyncClient(service.address, timeout=_TIMEOUT_SECONDS))
                load = Load(client, 8 if options.quick else 4)
                await load.start()
                cases[mode, number] = _Case(load, service.pid).measure
            scraping = [asyncio.create_task(_scrape_often(port)) for port in ports]
            try:
                found = await interleave_async(cases, options.repeats)
            finally:
                for each in scraping:
                    each.cancel()
                await asyncio.wait(scraping)
    rates, costs = (
        {mode: [median([each[part] for each in found[mode, number]]) for number in range(count)] for mode in _MODES}
        for part in (0, 1)
    )
    return [
        [
            what,
            *(factor * _mean(figures[mode]) for mode in _MODES),
            _mean(figures["off again"]) / _mean(figures["off"]),
            _mean(figures["on"]) / _mean(figures["off"]),
        ]
        for what, figures, factor in (
            ("claims/s of 8 ranks", rates, 1.0),
            ("processor of the service, µs a claim", costs, 1e6),
        )
    ]


def _process_count(options: Options) -> int:
    return 1 if options.quick else _PROCESS_COUNT


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


async def _scrapes(options: Options) -> dict[str, float]:
    settings = load_settings({"port": 0, "metrics_port": 0}).settings
    async with running(settings) as app:
        async with tq.AsyncClient(f"127.0.0.1:{app.port}", timeout=_TIMEOUT_SECONDS) as client:
            tasks = [f"task-{number}" for number in range(TASK_COUNT)]
            for number in range(PARTITION_COUNT // (8 if options.quick else 1)):
                await client.create_partition(f"group-{number}@0", tasks=tasks)
                versions = [{"version": version} for version in range(16)]
                await client.put(f"group-{number}@0", {"x": np.arange(16)}, custom_meta=versions)
                await client.get_meta(
                    partition_id=f"group-{number}@0", task_name=tasks[0], data_fields=["x"], batch_size=4
                )
        return await _watch_scrapes(app, options.repeats * _SCRAPES_A_REPEAT)


async def _watch_scrapes(app: App, count: int) -> dict[str, float]:
    """Measure the duration of scrapes, and in separate scrapes for how long nothing else gets a turn."""
    assert app.metrics is not None
    seconds, cpu_seconds, held, busy, quiet, lines = [], [], [], [], [], 0
    for _ in range(count):
        began_at, cpu_began_at = time.perf_counter(), time.process_time()
        body = await asyncio.to_thread(_fetch, app.metrics.port)
        seconds.append(time.perf_counter() - began_at)
        cpu_seconds.append(time.process_time() - cpu_began_at)
        watching = asyncio.create_task(_longest_gap())  # takes half of the interpreter
        await asyncio.to_thread(_fetch, app.metrics.port)
        watching.cancel()
        for figures, longest in zip((held, busy), await watching, strict=True):
            figures.append(longest)
        lines = body.count(b"\n")
        watching = asyncio.create_task(_longest_gap())
        await asyncio.sleep(seconds[-1])
        watching.cancel()
        quiet.append((await watching)[0])
        await asyncio.sleep(0.1)
    return {
        "lines": lines,
        "p50_ms": 1e3 * median(seconds),
        "longest_ms": 1e3 * max(seconds),
        "cpu_ms": 1e3 * median(cpu_seconds),
        "held_ms": 1e3 * median(held),
        "busy_ms": 1e3 * median(busy),
        "quiet_ms": 1e3 * median(quiet),
    }


async def _longest_gap() -> tuple[float, float]:
    """Return the longest time between two turns of the event loop until this is cancelled, and the longest work.

    The time includes other programs and threads; the work is the processor time of the loop's thread.
    """
    longest, last = 0.0, time.perf_counter()
    longest_work, last_work = 0.0, time.thread_time()
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0)
            now, work = time.perf_counter(), time.thread_time()
            longest, last = max(longest, now - last), now
            longest_work, last_work = max(longest_work, work - last_work), work
    return longest, longest_work


def run(options: Options) -> Report:
    """Measure both."""
    scrapes = run_async(_scrapes(options))
    rows = run_async(_claims(options))
    claims_ratio = rows[0][5]
    return Report(
        name="metrics_cost",
        question="How much do metrics cost: claims with and without them, and a scrape of many partitions and tasks?",
        columns=["what", *_MODES, "off again / off", "on / off"],
        rows=rows,
        notes=[
            f"{_process_count(options)} processes of each kind, in turn; means of their medians; those with "
            f"metrics are scraped every {_SCRAPE_PERIOD_SECONDS:g} s",
            f"{PARTITION_COUNT} partitions of as many groups, {TASK_COUNT} tasks each: a scrape has "
            f"{scrapes['lines']:.0f} lines and takes {scrapes['p50_ms']:.1f} ms (p50; the longest took "
            f"{scrapes['longest_ms']:.1f} ms), and {scrapes['cpu_ms']:.1f} ms of processor time, including its client",
            f"longest time between two turns of the event loop during a scrape: {scrapes['held_ms']:.2f} ms (median), "
            f"without one: {scrapes['quiet_ms']:.2f} ms; both include other programs",
            f"the loop used at most {scrapes['busy_ms']:.2f} ms of processor time between turns (median over scrapes)",
        ],
        aims=[
            Aim(
                what="claims/s, on / off",
                measured=claims_ratio if isinstance(claims_ratio, float) else None,
                wanted=0.98,
            ),
            Aim(what="lines of a scrape", measured=scrapes["lines"], wanted=3_000, at_least=False),
            Aim(what="ms a scrape", measured=scrapes["p50_ms"], wanted=100, at_least=False),
            Aim(what="ms of work that hold the loop", measured=scrapes["busy_ms"], wanted=5, at_least=False),
        ],
        plots=[],
    )


if __name__ == "__main__":
    sys.exit(main(run))
