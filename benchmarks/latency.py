"""How long does a client wait for a fetch, for a consumption check, and for data that is put while it waits?

One client makes fetches and checks in turn, in small and large partitions. For the wake-up a worker puts the samples
while the ranks wait in `get_meta`; time runs from the start of the put, with its round trip, until the last rank has
its batch. Both are compared with a gRPC echo, the minimum cost of a request, and with TransferQueue. Its requests scan
the partition, and its consumers poll once per second, like its `StreamingDataset`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc
import numpy as np

import tq_service as tq
from benchmarks.echo_server import echo_call, request_of
from benchmarks.harness import Options, interleave_async, main, median, median_ratio, p50_p99
from benchmarks.peer import Peer, run_beside_transfer_queue
from benchmarks.report import Aim, Cell, Plot, Report

SAMPLE_COUNTS = (1_024, 8_192, 65_536)
BATCH_SIZE = 16
_REQUESTS_A_REPEAT = SAMPLE_COUNTS[0] // BATCH_SIZE
_FETCH, _CHECK = f"fetch of {BATCH_SIZE}", "consumption check"
# TransferQueue takes about 0.3 s for a check of 65,536 samples.
_PEER_CHECKS_A_REPEAT = {1_024: 64, 8_192: 32, 65_536: 6}
_FETCH_SIZES, _WAKE_SIZES = (96, 160), (64, 144)  # of the echo's request and answer
_WANTED = {_FETCH: 12.0, _CHECK: 300.0}
RANK_COUNTS = (1, 64)
_PUTS_A_REPEAT = 64
_PUTS_A_REPEAT_QUICK = 10
# TransferQueue takes about a second for each.
_PEER_PUTS_A_REPEAT = 2
# Time until all ranks wait: the client must send their requests and the server must read them.
_PAUSE_SECONDS = 0.005
_PAUSE_SECONDS_A_RANK = 0.001
_SERVED = {count: f"put → {count} waiting rank{'s' if count > 1 else ''} served" for count in RANK_COUNTS}

Request = Callable[[], Awaitable[object]]


async def _seconds(count: int, request: Request) -> list[float]:
    """Return the seconds of each of `count` requests."""
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
        await self._client.put(partition_id, {"x": np.arange(sample_count)})
        if self._transfer_queue.is_there:
            self._transfer_queue.ask("fill", partition_id=partition_id, sample_count=sample_count)

    async def fetch(self, sample_count: int, count: int) -> list[float]:
        """Claim batches of a new task; all samples are ready at the start."""
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


class WakeUp:
    """Waiting ranks of one task, and a worker on a separate connection that puts their samples."""

    def __init__(self, ranks: tq.AsyncClient, worker: tq.AsyncClient, rank_count: int, put_count: int) -> None:
        self._ranks = ranks
        self._worker = worker
        self._rank_count = rank_count
        self._put_count = put_count
        self.from_answer: list[list[float]] = []

    async def __call__(self) -> list[float]:
        """Return the seconds from the start of each put until the last rank had its batch."""
        partition_id = secrets.token_hex(8)
        await self._worker.create_partition(partition_id)
        row = {"x": np.arange(self._rank_count)}
        handed_out: list[float] = []
        after_answer: list[float] = []
        for batch_index in range(self._put_count):
            waiting = [
                asyncio.ensure_future(self._wait(partition_id, rank, batch_index)) for rank in range(self._rank_count)
            ]
            await asyncio.sleep(_PAUSE_SECONDS + _PAUSE_SECONDS_A_RANK * self._rank_count)
            started = time.perf_counter()
            await self._worker.put(partition_id, row)
            answered = time.perf_counter()
            last = max(await asyncio.gather(*waiting))
            handed_out.append(last - started)
            after_answer.append(last - answered)
        await self._worker.clear_partition(partition_id)
        self.from_answer.append(after_answer)
        return handed_out

    async def _wait(self, partition_id: str, rank: int, batch_index: int) -> float:
        meta = await self._ranks.get_meta(
            partition_id=partition_id,
            task_name="waiting",
            data_fields=["x"],
            batch_size=1,
            dp_rank=rank,
            dp_size=self._rank_count,
            batch_index=batch_index,
            max_wait=30.0,
        )
        if meta.size != 1:
            raise RuntimeError(f"got {meta.size} samples, expected 1")
        return time.perf_counter()


async def _request_rows(options: Options, client: tq.AsyncClient, echo: Any, transfer_queue: Peer) -> list[list[Cell]]:
    """Return the rows of fetches and checks."""
    count = _REQUESTS_A_REPEAT // 8 if options.quick else _REQUESTS_A_REPEAT
    requests, rows = _Requests(client, transfer_queue), []
    for sample_count in SAMPLE_COUNTS:
        await requests.fill(sample_count)
    for what, ours, theirs in (
        (_FETCH, requests.fetch, requests.peer_fetch),
        (_CHECK, requests.check, requests.peer_check),
    ):
        for sample_count in SAMPLE_COUNTS:
            cases = {
                "ours": partial(ours, sample_count, count),
                "echo": partial(_seconds, count, partial(echo, request_of(*_FETCH_SIZES))),
            }
            if transfer_queue.is_there:
                cases["peer"] = partial(theirs, sample_count, count)
            times = await interleave_async(cases, options.repeats)
            rows.append([f"{what}, {sample_count:,} samples", *_cells(times["ours"], times)])
    return rows


async def _wake_up_rows(options: Options, ranks: tq.AsyncClient, echo: Any, transfer_queue: Peer) -> list[list[Cell]]:
    """Return the rows of waiting ranks."""
    put_count = _PUTS_A_REPEAT_QUICK if options.quick else _PUTS_A_REPEAT

    async def after_pauses(call: Request) -> list[float]:
        latencies = []
        for _ in range(put_count):
            await asyncio.sleep(_PAUSE_SECONDS)
            latencies += await _seconds(1, call)
        return latencies

    async def peer_times() -> list[float]:
        return list(transfer_queue.ask("wake_up", count=_PEER_PUTS_A_REPEAT))

    async with tq.AsyncClient(ranks.address) as worker:
        put = partial(worker.put, "without-waiters", {"x": np.arange(1)})
        # Fewer puts for many ranks, as starting the ranks takes most of the time.
        wake_ups = {count: WakeUp(ranks, worker, count, put_count // min(count, 2)) for count in RANK_COUNTS}
        cases: dict[str, Callable[[], Awaitable[list[float]]]] = {
            "echo": partial(after_pauses, partial(echo, request_of(*_WAKE_SIZES))),
            "put alone": partial(after_pauses, put),
            **{_SERVED[count]: wake_up for count, wake_up in wake_ups.items()},
        }
        if transfer_queue.is_there:
            cases["peer"] = peer_times
        times = await interleave_async(cases, options.repeats)
    times["put answered → 1 waiting rank served"] = wake_ups[1].from_answer[1:]
    without_peer = {name: repeats for name, repeats in times.items() if name != "peer"}
    return [
        [name, *_cells(repeats, times if name == _SERVED[1] else without_peer)]
        for name, repeats in without_peer.items()
    ]


def _cells(ours: list[list[float]], times: Mapping[str, list[list[float]]]) -> list[Cell]:
    """Return p50 and p99 of ours, ours / echo, p50 and p99 of the peer, and peer / ours."""
    p50s = {name: [median(repeat) for repeat in repeats] for name, repeats in {**times, "ours": ours}.items()}
    cells: list[Cell] = [*p50_p99(ours), median_ratio(p50s["ours"], p50s["echo"])]
    if "peer" not in times:
        return [*cells, None, None, None]
    return [*cells, *p50_p99(times["peer"]), median_ratio(p50s["peer"], p50s["ours"])]


async def _measure(options: Options, address: str, echo_address: str, transfer_queue: Peer) -> Report:
    async with grpc.aio.insecure_channel(echo_address) as channel, tq.AsyncClient(address) as client:
        echo = echo_call(channel)
        rows = await _request_rows(options, client, echo, transfer_queue)
        rows += await _wake_up_rows(options, client, echo, transfer_queue)
    by_name = {str(row[0]): row for row in rows}
    aims = []
    for what, wanted in _WANTED.items():
        name = f"{what}, {SAMPLE_COUNTS[-1]:,} samples"
        ratio = by_name[name][6]
        measured = None if ratio is None else float(ratio)
        aims.append(Aim(what=f"{name}, p50: TransferQueue / ours", measured=measured, wanted=wanted))
    served = float(by_name[_SERVED[1]][1] or 0)
    aims.append(Aim(what=f"{_SERVED[1]}, p50 in ms", measured=served, wanted=3.0, at_least=False))
    return Report(
        name="latency",
        question="How long does a client wait for a fetch, for a consumption check, and for data put while it waits?",
        columns=[
            "what",
            "p50, ms",
            "p99, ms",
            "p50 / echo",
            "TransferQueue: p50, ms",
            "TransferQueue: p99, ms",
            "TransferQueue / ours, p50",
        ],
        rows=rows,
        notes=[
            f"fetches and checks: one client, one request at a time, {_REQUESTS_A_REPEAT} per repeat; fewer of  "
            "TransferQueue's checks",
            "fetches by a new task in each repeat, including the first one, which creates it",
            "served: from the start of the put until the last waiting rank has its batch, one sample for each",
            "negative: the rank was served before the worker had the answer to its put",
            *transfer_queue.notes,
        ],
        aims=aims,
        plots=[
            Plot(
                name="latency",
                title="Latency of one request, p50",
                x_label="samples in the partition",
                y_label="ms",
                series={
                    f"{what}, {system}": points
                    for what in _WANTED
                    for column, system in ((1, "tq_service"), (4, "TransferQueue"))
                    if (
                        points := [
                            (count, float(cell))
                            for count in SAMPLE_COUNTS
                            if (cell := by_name[f"{what}, {count:,} samples"][column])
                        ]
                    )
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
