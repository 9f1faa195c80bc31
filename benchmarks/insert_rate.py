"""How many samples per second can be put, in one large put and in many small ones?

Compared with TransferQueue and an echo.

One client process with one event loop; small puts are made by 64 concurrent workers.
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
from benchmarks.harness import (
    Options,
    interleave_async,
    main,
    median,
    median_ratio,
)
from benchmarks.peer import Peer, run_beside_transfer_queue
from benchmarks.report import Aim, Cell, Plot, Report

LARGE_COUNT = 65_536
_NAMED_COUNT = 16_384
_LARGE_PUT = f"one put of {LARGE_COUNT:,}"
_PEER_PUT = f"TransferQueue, one put of {LARGE_COUNT:,}"
WORKER_COUNT = 64
_CALL_COUNT = 1_024
_ECHO_SIZES = (160, 64)


async def _seconds_of_calls(call_count: int, call: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds of a number of calls, made by concurrent workers."""

    async def work() -> None:
        for _ in range(call_count // WORKER_COUNT):
            await call()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(WORKER_COUNT)))
    return time.perf_counter() - started


async def put_rate(client: tq.AsyncClient, rows_a_put: int, put_count: int, *, with_keys: bool = False) -> float:
    """Return samples per second of puts into a separate partition, which is cleared afterwards."""
    partition_id = secrets.token_hex(8)
    columns = {"x": np.arange(rows_a_put)}
    lengths = [{"total_lengths": row} for row in range(rows_a_put)]

    async def put() -> None:
        if with_keys:
            start = secrets.token_hex(8)
            keys = [f"{start}_{row}" for row in range(rows_a_put)]
            await client.put(partition_id, columns, keys=keys, custom_meta=lengths)
        else:
            await client.put(partition_id, columns)

    await client.create_partition(partition_id)
    if put_count == 1:
        started = time.perf_counter()
        await put()
        seconds = time.perf_counter() - started
    else:
        seconds = await _seconds_of_calls(put_count, put)
    await client.clear_partition(partition_id)
    return rows_a_put * put_count / seconds


async def _measure(options: Options, address: str, echo_address: str, transfer_queue: Peer) -> Report:
    call_count = _CALL_COUNT // 8 if options.quick else _CALL_COUNT
    channel = grpc.aio.insecure_channel(echo_address)
    echo = echo_call(channel)
    request = request_of(*_ECHO_SIZES)

    async def echo_rate() -> float:
        return call_count / await _seconds_of_calls(call_count, lambda: echo(request))

    async def peer_rate() -> float:
        return LARGE_COUNT / float(transfer_queue.ask("insert", sample_count=LARGE_COUNT))

    async with tq.AsyncClient(address) as client:
        puts = {
            _LARGE_PUT: (LARGE_COUNT, 1, False),
            f"one put of {_NAMED_COUNT:,} with keys and custom_meta": (_NAMED_COUNT, 1, True),
            "many puts of 64": (64, call_count, False),
            "many puts of 1": (1, call_count, False),
        }
        cases: dict[str, Callable[[], Awaitable[float]]] = {"echo": echo_rate}
        for name, (rows, count, with_keys) in puts.items():
            cases[name] = partial(put_rate, client, rows, count, with_keys=with_keys)
        if transfer_queue.is_there:
            cases[_PEER_PUT] = peer_rate
        rates = await interleave_async(cases, options.repeats)
    await channel.close()
    table: list[list[Cell]] = []
    for name, (rows_a_put, count, _) in puts.items():
        call_rates = [rate / rows_a_put for rate in rates[name]]
        of_echo = median_ratio(call_rates, rates["echo"]) if count > 1 else None
        of_peer = median_ratio(rates[name], rates[_PEER_PUT]) if name == _LARGE_PUT and _PEER_PUT in rates else None
        table.append([name, median(rates[name]), median(call_rates), of_echo, of_peer])
    table += [[name, median(rates[name]), None, None, 1.0] for name in (_PEER_PUT,) if name in rates]
    table.append(["echo, unary", None, median(rates["echo"]), 1.0, None])
    return _report(table, transfer_queue)


def _report(table: list[list[Cell]], transfer_queue: Peer) -> Report:
    of_peer = table[0][4]
    return Report(
        name="insert_rate",
        question="How many samples per second can be put, in one large put and in many small ones?",
        columns=["how", "samples/s", "calls/s", "calls / echo calls", "samples / TransferQueue"],
        rows=table,
        notes=[
            f"one int64 per sample; small puts by {WORKER_COUNT} concurrent workers, in one client process",
            *transfer_queue.notes,
        ],
        aims=[
            Aim(
                what=f"samples/s, {_LARGE_PUT} / TransferQueue",
                measured=None if of_peer is None else float(of_peer),
                wanted=5.0,
            )
        ],
        plots=[
            Plot(
                name="insert_rate",
                title="Samples put per second",
                x_label="",
                y_label="samples/s",
                bars=True,
                series={"samples/s": [(row[0], float(row[1] or 0)) for row in table[:-1]]},
            )
        ],
        without=transfer_queue.absent,
    )


def run(options: Options) -> Report:
    """Measure."""
    return run_beside_transfer_queue(_measure, options)


if __name__ == "__main__":
    sys.exit(main(run))
