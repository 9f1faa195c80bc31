"""How long does a client wait for a fetch and for a consumption check, in small and large partitions?

One client makes one request after the other. Beside it TransferQueue, whose requests cost what the partition holds, and
a gRPC echo, the least that a request can cost.
"""

from __future__ import annotations

import itertools
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
    p50_p99,
)
from benchmarks.peer import Peer, run_beside_transfer_queue
from benchmarks.report import Aim, Cell, Plot, Report

SAMPLE_COUNTS = (1_024, 8_192, 65_536)
BATCH_SIZE = 16
_REQUESTS_A_REPEAT = SAMPLE_COUNTS[0] // BATCH_SIZE
_FETCH, _CHECK = f"fetch of {BATCH_SIZE}", "consumption check"
# A check of 65,536 samples takes TransferQueue some 0.3 s.
_PEER_CHECKS_A_REPEAT = {1_024: 64, 8_192: 32, 65_536: 6}
_ECHO_SIZES = (96, 160)
_WANTED = {_FETCH: 12.0, _CHECK: 300.0}

Request = Callable[[], Awaitable[object]]


async def _seconds(count: int, request: Request) -> list[float]:
    """Return the seconds of each of so many requests."""
    times = [time.perf_counter()]
    for _ in range(count):
        await request()
        times.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(times)]


class _Requests:
    """The same requests to the service and to TransferQueue; partitions are named by their size."""

    def __init__(self, client: tq.AsyncClient, transfer_queue: Peer) -> None:
        self._client = client
        self._transfer_queue = transfer_queue

    async def fill(self, sample_count: int) -> None:
        partition_id = str(sample_count)
        await self._client.put({"x": np.arange(sample_count)}, partition_id=partition_id)
        if self._transfer_queue.is_there:
            self._transfer_queue.ask("fill", partition_id=partition_id, sample_count=sample_count)

    async def fetch(self, sample_count: int, count: int) -> list[float]:
        """Claim batches of a new task: at first all samples are ready."""
        return await _seconds(count, partial(self._claim, str(sample_count), secrets.token_hex(8)))

    async def check(self, sample_count: int, count: int) -> list[float]:
        task = secrets.token_hex(8)
        await self._claim(str(sample_count), task)
        return await _seconds(
            count, partial(self._client.check_consumption, partition_id=str(sample_count), task_name=task)
        )

    async def _claim(self, partition_id: str, task: str) -> None:
        meta = await self._client.get_meta(
            partition_id=partition_id, task_name=task, data_fields=["x"], batch_size=BATCH_SIZE, max_wait=0.0
        )
        if meta.size != BATCH_SIZE:
            raise RuntimeError(f"got {meta.size} samples, expected {BATCH_SIZE}")

    async def peer_fetch(self, sample_count: int, count: int) -> list[float]:
        return list(
            self._transfer_queue.ask("fetch", partition_id=str(sample_count), batch_size=BATCH_SIZE, repeats=count)
        )

    async def peer_check(self, sample_count: int, count: int) -> list[float]:
        count = min(count, _PEER_CHECKS_A_REPEAT[sample_count])
        return list(self._transfer_queue.ask("check_consumption", partition_id=str(sample_count), repeats=count))


async def _measure(options: Options, address: str, echo_address: str, transfer_queue: Peer) -> Report:
    count = _REQUESTS_A_REPEAT // 8 if options.quick else _REQUESTS_A_REPEAT
    channel = grpc.aio.insecure_channel(echo_address)
    echo, echo_request = echo_call(channel), request_of(*_ECHO_SIZES)
    rows: list[list[Cell]] = []
    async with tq.AsyncClient(address) as client:
        requests = _Requests(client, transfer_queue)
        for sample_count in SAMPLE_COUNTS:
            await requests.fill(sample_count)
        for what, ours, theirs in (
            (_FETCH, requests.fetch, requests.peer_fetch),
            (_CHECK, requests.check, requests.peer_check),
        ):
            for sample_count in SAMPLE_COUNTS:
                cases = {
                    "ours": partial(ours, sample_count, count),
                    "echo": partial(_seconds, count, lambda: echo(echo_request)),
                }
                if transfer_queue.is_there:
                    cases["peer"] = partial(theirs, sample_count, count)
                rows.append([what, sample_count, *_cells(await interleave_async(cases, options.repeats))])
    await channel.close()
    return _report(rows, transfer_queue)


def _cells(times: dict[str, list[list[float]]]) -> list[Cell]:
    """Return p50 and p99 of ours, ours / echo, p50 and p99 of the peer, and peer / ours."""
    p50s = {name: [median(repeat) for repeat in repeats] for name, repeats in times.items()}
    cells: list[Cell] = [*p50_p99(times["ours"]), median_ratio(p50s["ours"], p50s["echo"])]
    if "peer" not in times:
        return [*cells, None, None, None]
    return [*cells, *p50_p99(times["peer"]), median_ratio(p50s["peer"], p50s["ours"])]


def _report(rows: list[list[Cell]], transfer_queue: Peer) -> Report:
    largest = [row for row in rows if row[1] == SAMPLE_COUNTS[-1]]
    return Report(
        name="request_latency",
        question="How long does a client wait for a fetch and for a consumption check, in small and large partitions?",
        columns=[
            "request",
            "samples",
            "p50, ms",
            "p99, ms",
            "p50 / echo",
            "TransferQueue: p50, ms",
            "TransferQueue: p99, ms",
            "TransferQueue / ours, p50",
        ],
        rows=rows,
        notes=[
            f"one client, one request after the other, {_REQUESTS_A_REPEAT} a repeat; of TransferQueue's checks fewer",
            "fetches by a task that is new in each repeat: its first one, which sets it up, is among them",
            *transfer_queue.notes,
        ],
        aims=[
            Aim(
                what=f"{row[0]}, {SAMPLE_COUNTS[-1]:,} samples, p50: TransferQueue / ours",
                measured=None if row[7] is None else float(row[7]),
                wanted=_WANTED[str(row[0])],
            )
            for row in largest
        ],
        plots=[
            Plot(
                name="request_latency",
                title="Latency of one request, p50",
                x_label="samples in the partition",
                y_label="ms",
                series={
                    f"{what}, {system}": [
                        (row[1], float(row[column])) for row in rows if row[0] == what and row[column]
                    ]
                    for what in _WANTED
                    for column, system in ((2, "tq_service"), (5, "TransferQueue"))
                    if any(row[column] for row in rows)
                },
                log_x=True,
                log_y=True,
            )
        ],
        without=transfer_queue.absent,
    )


def run(options: Options) -> Report:
    """Measure."""
    return run_beside_transfer_queue(_measure, options)


if __name__ == "__main__":
    sys.exit(main(run))
