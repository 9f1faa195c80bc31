"""How many single samples a second can many small workers commit, compared with calls of an echo?

One client process with one event loop plays all workers; each puts one sample after the other. An insert names a sample
by its key and gives it custom_meta, without data: what a rollout worker does that announces a prompt.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

import grpc
import numpy as np

import tq_service as tq
from benchmarks.echo_server import echo_call, request_of
from benchmarks.harness import Options, interleave_async, main, median, run_async, running
from benchmarks.report import Cell, Plot, Report
from tq_service.testing import ServiceProcess

WORKER_COUNTS = (1, 8, 64, 256)
_CALLS_A_WORKER_LEAST, _CALLS = 4, 1_024
_ECHO_SIZES = (190, 140)
_PUT, _INSERT, _ECHO = "put of 1 sample", "insert of 1 sample with a key", "echo"

Call = Callable[[str], Awaitable[object]]


async def _rate(client: tq.AsyncClient, call: Call, worker_count: int, call_count: int) -> float:
    """Return calls a second, made into a partition of their own that is cleared afterwards."""
    partition_id = secrets.token_hex(8)
    calls_a_worker = max(_CALLS_A_WORKER_LEAST, call_count // worker_count)

    async def work() -> None:
        for _ in range(calls_a_worker):
            await call(partition_id)

    await client.create_partition(partition_id)
    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(worker_count)))
    seconds = time.perf_counter() - started
    await client.clear_partition(partition_id)
    return worker_count * calls_a_worker / seconds


async def _measure(options: Options, address: str, echo_address: str) -> Report:
    channel = grpc.aio.insecure_channel(echo_address)
    echo, request, row = echo_call(channel), request_of(*_ECHO_SIZES), {"x": np.arange(1)}
    async with tq.AsyncClient(address) as client:
        calls: dict[str, Call] = {
            _PUT: lambda partition_id: client.put(row, partition_id=partition_id),
            _INSERT: lambda partition_id: client.put(
                partition_id=partition_id, keys=[secrets.token_hex(8)], custom_meta=[{"version": 3}]
            ),
            _ECHO: lambda _: echo(request),
        }
        rows: list[list[Cell]] = []
        for worker_count in WORKER_COUNTS:
            call_count = _CALLS // 8 if options.quick or worker_count == 1 else _CALLS
            cases = {name: partial(_rate, client, call, worker_count, call_count) for name, call in calls.items()}
            rates = await interleave_async(cases, options.repeats)
            ratios = [
                median([one / other for one, other in zip(rates[name], rates[_ECHO], strict=True)])
                for name in (_PUT, _INSERT)
            ]
            rows.append([worker_count, *(median(rates[name]) for name in calls), *ratios])
    await channel.close()
    return Report(
        name="commits_per_second",
        question="How many single samples a second can many small workers commit, compared with calls of an echo?",
        columns=["workers", f"{_PUT}, 1/s", f"{_INSERT}, 1/s", "echo, calls/s", "put / echo", "insert / echo"],
        rows=rows,
        notes=[
            "one int64 a put; an insert has a key and one number of custom_meta; through tq.AsyncClient",
            f"one client process with one event loop; the echo's request has {_ECHO_SIZES[0]} bytes, its answer "
            f"{_ECHO_SIZES[1]}",
        ],
        plots=[
            Plot(
                name="commits_per_second",
                title="Single samples committed per second",
                x_label="workers",
                y_label="calls/s",
                series={
                    name: [(row[0], float(row[column] or 0)) for row in rows]
                    for column, name in enumerate(calls, start=1)
                },
                log_x=True,
            )
        ],
    )


def run(options: Options) -> Report:
    """Measure."""
    with ServiceProcess() as server, running("benchmarks.echo_server") as echo:
        return run_async(_measure(options, server.address, echo.address))


if __name__ == "__main__":
    sys.exit(main(run))
