"""How many samples a second can be put, in one large put and in many small ones, compared with calls of an echo?

One client process with one event loop; small puts are made by 64 workers at the same time.
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
from benchmarks.harness import Options, echo_server, interleave_async, main, median, run_async, service
from benchmarks.report import Plot, Report

LARGE_COUNT = 65_536
WORKER_COUNT = 64
_CALL_COUNT = 2_048
_ECHO_SIZES = (160, 64)


async def _seconds_of_calls(call_count: int, call: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds that so many calls take, made by the workers at the same time."""

    async def work() -> None:
        for _ in range(call_count // WORKER_COUNT):
            await call()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(WORKER_COUNT)))
    return time.perf_counter() - started


async def _put_rate(client: tq.AsyncClient, rows_a_put: int, put_count: int, *, with_keys: bool = False) -> float:
    """Return samples a second of puts into a partition of their own, which is cleared afterwards."""
    partition_id = secrets.token_hex(8)
    columns = {"x": np.arange(rows_a_put)}
    lengths = [{"total_lengths": row} for row in range(rows_a_put)]

    async def put() -> None:
        if with_keys:
            start = secrets.token_hex(8)
            keys = [f"{start}_{row}" for row in range(rows_a_put)]
            await client.put(columns, partition_id=partition_id, keys=keys, custom_meta=lengths)
        else:
            await client.put(columns, partition_id=partition_id)

    await client.create_partition(partition_id)
    if put_count == 1:
        started = time.perf_counter()
        await put()
        seconds = time.perf_counter() - started
    else:
        seconds = await _seconds_of_calls(put_count, put)
    await client.clear_partition(partition_id)
    return rows_a_put * put_count / seconds


async def _measure(options: Options, address: str, echo_address: str) -> Report:
    call_count = _CALL_COUNT // 8 if options.quick else _CALL_COUNT
    channel = grpc.aio.insecure_channel(echo_address)
    echo = echo_call(channel)
    request = request_of(*_ECHO_SIZES)

    async def echo_rate() -> float:
        return call_count / await _seconds_of_calls(call_count, lambda: echo(request))

    async with tq.AsyncClient(address) as client:
        puts = {
            f"one put of {LARGE_COUNT:,}": (LARGE_COUNT, 1, False),
            f"one put of {LARGE_COUNT:,} with keys and custom_meta": (LARGE_COUNT, 1, True),
            "many puts of 64": (64, call_count, False),
            "many puts of 1": (1, call_count, False),
        }
        cases = {
            name: partial(_put_rate, client, rows, count, with_keys=with_keys)
            for name, (rows, count, with_keys) in puts.items()
        }
        rates = await interleave_async({"echo": echo_rate, **cases}, options.repeats)
    await channel.close()
    table = []
    for name, (rows_a_put, count, _) in puts.items():
        ratios = [rate / rows_a_put / limit for rate, limit in zip(rates[name], rates["echo"], strict=True)]
        calls = median(rates[name]) / rows_a_put
        table.append([name, median(rates[name]), calls, median(ratios) if count > 1 else None])
    table.append(["echo, unary", None, median(rates["echo"]), 1.0])
    return Report(
        name="insert_rate",
        question="How many samples a second can be put, in one large put and in many small ones?",
        columns=["how", "samples/s", "calls/s", "calls / echo calls"],
        rows=table,
        notes=[f"one int64 a sample; small puts by {WORKER_COUNT} workers at the same time, in one client process"],
        plots=[
            Plot(
                name="insert_rate",
                title="Samples put per second",
                x_label="",
                y_label="samples/s",
                bars=True,
                series={"samples/s": [(row[0], row[1]) for row in table[:-1]]},
            )
        ],
    )


def run(options: Options) -> Report:
    """Measure."""
    with service() as server, echo_server() as echo:
        return run_async(_measure(options, server.address, echo.address))


if __name__ == "__main__":
    sys.exit(main(run))
