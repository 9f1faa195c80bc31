"""How long after its data is produced does a waiting rank have its batch, beside TransferQueue and a round trip?

A worker puts the samples while the ranks wait in `get_meta`. Time runs from the start of the put, which contains the
round trip of the put itself, until the last of the ranks has its batch. TransferQueue's consumers do not wait at the
server: they ask again each second, as its `StreamingDataset` does.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable

import grpc
import numpy as np

import tq_service as tq
from benchmarks.echo_server import echo_call, request_of
from benchmarks.harness import Options, interleave_async, main, p50_p99
from benchmarks.peer import Peer, run_beside_transfer_queue
from benchmarks.report import Aim, Report

RANK_COUNTS = (1, 64)
_PUTS_A_REPEAT = 64
_PUTS_A_REPEAT_QUICK = 10
# Each takes TransferQueue a second or so.
_PEER_PUTS_A_REPEAT = 2
_ANSWER_SIZES = (64, 144)
# Until all ranks wait: their requests take the client and the server some time to send and to take.
_PAUSE_SECONDS = 0.005
_PAUSE_SECONDS_A_RANK = 0.001


class WakeUp:
    """Ranks of one task that wait, and a worker on a connection of its own that produces what they wait for."""

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
            await self._worker.put(row, partition_id=partition_id)
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


def _puts_for(rank_count: int, put_count: int) -> int:
    """Return fewer puts for many ranks, whose start takes most of the time."""
    return put_count if rank_count == 1 else put_count // 2


async def _measure(options: Options, address: str, echo_address: str, transfer_queue: Peer) -> Report:
    put_count = _PUTS_A_REPEAT_QUICK if options.quick else _PUTS_A_REPEAT
    channel = grpc.aio.insecure_channel(echo_address)
    echo = echo_call(channel)

    async def echo_times() -> list[float]:
        request, latencies = request_of(*_ANSWER_SIZES), []
        for _ in range(put_count):
            await asyncio.sleep(_PAUSE_SECONDS)
            started = time.perf_counter()
            await echo(request)
            latencies.append(time.perf_counter() - started)
        return latencies

    async with tq.AsyncClient(address) as ranks, tq.AsyncClient(address) as worker:

        async def put_times() -> list[float]:
            latencies = []
            for _ in range(put_count):
                await asyncio.sleep(_PAUSE_SECONDS)
                started = time.perf_counter()
                await worker.put({"x": np.arange(1)}, partition_id="without-waiters")
                latencies.append(time.perf_counter() - started)
            return latencies

        wake_ups = {count: WakeUp(ranks, worker, count, _puts_for(count, put_count)) for count in RANK_COUNTS}
        names = {count: f"put → {count} waiting rank{'s' if count > 1 else ''} served" for count in RANK_COUNTS}

        async def peer_times() -> list[float]:
            return list(transfer_queue.ask("wake_up", count=_PEER_PUTS_A_REPEAT))

        cases: dict[str, Callable[[], Awaitable[list[float]]]] = {"echo": echo_times, "put alone": put_times}
        cases |= {names[count]: wake_up for count, wake_up in wake_ups.items()}
        if transfer_queue.is_there:
            cases["TransferQueue: put → 1 asking consumer served"] = peer_times
        times = await interleave_async(cases, options.repeats)
    await channel.close()
    echo_p50 = p50_p99(times["echo"])[0]
    rows = []
    for name, repeats in times.items():
        p50, p99 = p50_p99(repeats)
        rows.append([name, p50, p99, p50 / echo_p50])
    after = p50_p99(wake_ups[1].from_answer[1:])
    rows.append(["put answered → 1 waiting rank served", *after, after[0] / echo_p50])
    return Report(
        name="wake_latency",
        question="How long after its data is produced does a waiting rank have its batch?",
        columns=["what", "p50, ms", "p99, ms", "p50 / echo"],
        rows=rows,
        notes=[
            "time runs from the start of the put until the last waiting rank has its batch, one sample for each",
            "negative: the rank was served before the worker had the answer to its put",
            *transfer_queue.notes,
        ],
        aims=[Aim(what="put → 1 waiting rank served, p50 in ms", measured=rows[2][1], wanted=3.0, at_least=False)],
        without=transfer_queue.absent,
    )


def run(options: Options) -> Report:
    """Measure."""
    return run_beside_transfer_queue(_measure, options)


if __name__ == "__main__":
    sys.exit(main(run))
