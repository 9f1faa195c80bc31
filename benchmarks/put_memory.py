"""How much memory of the service does a sample take that was put alone, and which files allocate it?

Samples of one int64 each are put one by one, and for comparison in one put. The memory per sample is the growth of the
service's process. The files are found by `tracemalloc`, with a service in this process: Python's heap by allocating
file, without malloc's overhead. Long numeric columns are mapped memory, which is not included.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

import tq_service as tq
from benchmarks.harness import Options, main, median, run_async
from benchmarks.report import Cell, Report
from tq_service.config import load_settings
from tq_service.server.app import running
from tq_service.testing import ServiceProcess

_COUNT, _QUICK_COUNT = 1 << 14, 1 << 10
_TASK_COUNT: Final = 64
_PARTITION: Final = "alone"
_PACKAGE: Final = str(Path(tq.__file__).parent)
_LEAST_BYTES: Final = 1.0
_SETTLED_SECONDS: Final = 6.0  # housekeeping returns freed memory every 5 s

Put = Callable[[tq.AsyncClient, int], Awaitable[None]]


async def _alone(client: tq.AsyncClient, count: int) -> None:
    """Put samples one by one, from several concurrent tasks."""
    row = {"x": np.arange(1)}

    async def work(first: int) -> None:
        for _ in range(first, count, _TASK_COUNT):
            await client.put(_PARTITION, row)

    await asyncio.gather(*map(work, range(_TASK_COUNT)))


async def _together(client: tq.AsyncClient, count: int) -> None:
    """Put all samples in one put."""
    await client.put(_PARTITION, {"x": np.arange(count)})


def _flags(durability: str, directory: str) -> dict[str, Any]:
    kept = {} if durability == "none" else {"durability": durability, "data_dir": Path(directory)}
    return {"shared_memory": "off", **kept}


async def _resident(address: str, pid: int, put: Put, count: int) -> float:
    """Return the growth of a service in bytes per sample."""

    async def settled() -> int:
        await asyncio.sleep(_SETTLED_SECONDS)
        return int(psutil.Process(pid).memory_info().rss)

    async with tq.AsyncClient(address, gathers_puts=False, timeout=120.0) as client:
        await _alone(client, count // 4)  # leaves out memory for the first calls of a service
        before = await settled()
        await put(client, count)
        return (await settled() - before) / count


def _measure(put: Put, count: int, durability: str, *more: str) -> float:
    with tempfile.TemporaryDirectory() as directory:
        flags = [
            argument
            for name, value in _flags(durability, directory).items()
            for argument in (f"--{name.replace('_', '-')}", str(value))
        ]
        with ServiceProcess(*flags, *more) as server:
            return run_async(_resident(server.address, server.pid, put, count))


async def _heap(count: int, durability: str) -> dict[str, float]:
    """Return the bytes of Python's heap per sample put alone, by allocating file."""
    with tempfile.TemporaryDirectory() as directory:
        settings = load_settings({"port": 0, **_flags(durability, directory)}).settings
        async with running(settings) as app, tq.AsyncClient(f"127.0.0.1:{app.port}", gathers_puts=False) as client:
            await _alone(client, count)  # starts the growth of the tables
            tracemalloc.start()
            try:
                await _alone(client, count)
                gc.collect()
                traces = tracemalloc.take_snapshot().statistics("filename")
            finally:
                tracemalloc.stop()
    found: dict[str, float] = {}
    for each in traces:  # largest first
        name = each.traceback[0].filename
        if name.startswith(_PACKAGE):
            found[name.removeprefix(f"{_PACKAGE}/")] = each.size / count
        elif name == "<string>":  # generates their methods
            found["named tuples"] = each.size / count
    return found


def run(options: Options) -> Report:
    """Measure."""
    count = _QUICK_COUNT if options.quick else _COUNT
    cases: dict[str, tuple[Put, tuple[str, ...]]] = {
        "resident: put alone": (_alone, ()),
        "resident: put alone, answers for retries forgotten": (_alone, ("--request-record-seconds", "1")),
        "resident: in one put": (_together, ()),
    }
    rows: list[list[Cell]] = []
    for durability in ("none", "process"):
        grown: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(1 if options.quick else options.repeats):
            for name, (put, more) in cases.items():
                grown[name].append(_measure(put, count, durability, *more))
        rows += [[durability, name, median(each)] for name, each in grown.items()]
        heap = run_async(_heap(count, durability))
        rows += [[durability, f"Python's heap: {name}", size] for name, size in heap.items() if size >= _LEAST_BYTES]
        rows.append([durability, "Python's heap: all", sum(heap.values())])
    return Report(
        name="put_memory",
        question="How much memory of the service does a sample take that was put alone, and which files allocate it?",
        columns=["durability", "what", "bytes a sample"],
        rows=rows,
        notes=[
            f"{count} samples of 8 bytes, one per put; by {_TASK_COUNT} tasks, not gathered",
            "answers for retries are kept for request_record_seconds, 600 by default",
            "Python's heap: by allocating file, without malloc's overhead",
        ],
    )


if __name__ == "__main__":
    sys.exit(main(run))
