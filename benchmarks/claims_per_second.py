"""How many batches a second can ranks claim, beside TransferQueue and a gRPC echo?

One client process with one event loop plays all ranks: each asks for its batches one after the other, all ranks at the
same time. The echo gets the same load with messages of the same sizes; it knows no protobuf and keeps no state.
TransferQueue gets the same load from a process of its own, with fewer claims: its claims cost what the partition holds,
and become cheaper as it is consumed, so that they are measured when half of it is.
"""

from __future__ import annotations

import asyncio
import os
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
from tq_service.v1.controller_service_pb2 import GetMetaRequest
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

SAMPLE_COUNT = 32_768
BATCH_SIZE = 8
RANK_COUNTS = (1, 8, 64, 512)
PEER_RANK_COUNTS = (8, 64)
_CLAIMS_A_REPEAT = 1_536
_MOST_CLAIMS_OF_ONE_RANK = 512
_PEER_CLAIMS_A_REPEAT = 192

Call = Callable[[int, int], Awaitable[object]]


async def _rate(rank_count: int, claim_count: int, call: Call) -> float:
    """Return calls a second of `rank_count` ranks that make `claim_count` calls together."""
    batch_count = claim_count // rank_count

    async def consume(rank: int) -> None:
        for batch_index in range(batch_count):
            await call(rank, batch_index)

    started = time.perf_counter()
    await asyncio.gather(*(consume(rank) for rank in range(rank_count)))
    return batch_count * rank_count / (time.perf_counter() - started)


class _Load:
    """The ways to make the same load."""

    def __init__(self, address: str, echo_address: str, transfer_queue: Peer) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._echo_channel = grpc.aio.insecure_channel(echo_address)
        self._stub = ControllerServiceStub(self._channel)
        self._echo = echo_call(self._echo_channel)
        self._client = tq.AsyncClient(address)
        self._transfer_queue = transfer_queue
        self.message_sizes = (0, 0)

    async def start(self) -> None:
        await self._client.put({"x": np.arange(SAMPLE_COUNT)}, partition_id="claims")
        request = self._request("sizes", 1, 0, 0)
        answer = await self._stub.GetMeta(request)
        self.message_sizes = (request.ByteSize(), answer.ByteSize())
        if self._transfer_queue.is_there:
            self._transfer_queue.ask("fill", partition_id="claims", sample_count=SAMPLE_COUNT)

    async def stop(self) -> None:
        await self._client.aclose()
        await self._channel.close()
        await self._echo_channel.close()

    @staticmethod
    def _request(task: str, rank_count: int, rank: int, batch_index: int) -> GetMetaRequest:
        return GetMetaRequest(
            request_id=os.urandom(16),
            partition_id="claims",
            task_name=task,
            data_fields=["x"],
            batch_size=BATCH_SIZE,
            dp_rank=rank,
            dp_size=rank_count,
            batch_index=batch_index,
            max_wait={"seconds": 30},
        )

    async def stubs(self, rank_count: int, claim_count: int) -> float:
        """Claim through the generated stubs."""
        task = secrets.token_hex(8)

        async def call(rank: int, batch_index: int) -> None:
            answer = await self._stub.GetMeta(self._request(task, rank_count, rank, batch_index))
            if len(answer.meta.global_indexes) != BATCH_SIZE:
                raise RuntimeError(f"got {len(answer.meta.global_indexes)} samples, expected {BATCH_SIZE}")

        return await _rate(rank_count, claim_count, call)

    async def client(self, rank_count: int, claim_count: int) -> float:
        """Claim through `tq.AsyncClient`."""
        task = secrets.token_hex(8)

        async def call(rank: int, batch_index: int) -> None:
            await self._client.get_meta(
                partition_id="claims",
                task_name=task,
                data_fields=["x"],
                batch_size=BATCH_SIZE,
                dp_rank=rank,
                dp_size=rank_count,
                batch_index=batch_index,
                max_wait=30.0,
            )

        return await _rate(rank_count, claim_count, call)

    async def echo(self, rank_count: int, claim_count: int) -> float:
        """Make the same number of echo calls."""
        request = request_of(*self.message_sizes)

        async def call(_rank: int, _batch_index: int) -> None:
            await self._echo(request)

        return await _rate(rank_count, claim_count, call)

    async def transfer_queue(self, rank_count: int, claim_count: int) -> float:
        """Have TransferQueue's client claim; nothing else happens meanwhile."""
        claim_count = min(claim_count, _PEER_CLAIMS_A_REPEAT)
        seconds = self._transfer_queue.ask(
            "claims",
            partition_id="claims",
            rank_count=rank_count,
            claim_count=claim_count,
            batch_size=BATCH_SIZE,
            consumed_count=SAMPLE_COUNT // 2,
        )
        return claim_count / float(seconds)


async def _measure(options: Options, address: str, echo_address: str, transfer_queue: Peer) -> Report:
    load = _Load(address, echo_address, transfer_queue)
    await load.start()
    rows: list[list[Cell]] = []
    for rank_count in RANK_COUNTS:
        claim_count = _CLAIMS_A_REPEAT if rank_count > 1 else _MOST_CLAIMS_OF_ONE_RANK
        claim_count = max(claim_count // 8, rank_count) if options.quick else claim_count
        calls = {"stubs": load.stubs, "client": load.client, "echo": load.echo}
        if transfer_queue.is_there and rank_count in PEER_RANK_COUNTS:
            calls["peer"] = load.transfer_queue
        cases = {name: partial(call, rank_count, claim_count) for name, call in calls.items()}
        rates = await interleave_async(cases, options.repeats)
        stubs, client, echo = (median(rates[name]) for name in ("stubs", "client", "echo"))
        peers = [median(rates["peer"]), median_ratio(rates["client"], rates["peer"])] if "peer" in rates else [None] * 2
        rows.append([rank_count, stubs, client, echo, median_ratio(rates["stubs"], rates["echo"]), *peers])
    await load.stop()
    return _report(rows, load.message_sizes, transfer_queue)


def _report(rows: list[list[Cell]], message_sizes: tuple[int, int], transfer_queue: Peer) -> Report:
    of_ranks = {row[0]: row for row in rows}
    series = {
        name: [(row[0], float(row[column])) for row in rows if isinstance(row[column], float)]
        for column, name in (
            (1, "GetMeta, generated stubs"),
            (2, "GetMeta, tq.AsyncClient"),
            (3, "grpc.aio echo"),
            (5, "TransferQueue"),
        )
    }
    return Report(
        name="claims_per_second",
        question="How many batches a second can ranks claim, beside TransferQueue and a gRPC echo?",
        columns=[
            "ranks",
            "stubs, claims/s",
            "AsyncClient, claims/s",
            "echo, calls/s",
            "stubs / echo",
            "TransferQueue, claims/s",
            "AsyncClient / TransferQueue",
        ],
        rows=rows,
        notes=[
            f"{SAMPLE_COUNT:,} samples, batches of {BATCH_SIZE}, one client process with one event loop",
            f"request of {message_sizes[0]} bytes, answer of {message_sizes[1]} bytes",
            "TransferQueue: when half of the samples are consumed; before that its claims are dearer, later cheaper",
            *transfer_queue.notes,
        ],
        aims=[
            Aim(what="claims/s of 64 ranks", measured=_number(of_ranks[64][1]), wanted=2_000),
            Aim(what="claims/s of 64 ranks / echo", measured=_number(of_ranks[64][4]), wanted=0.6),
            *(
                Aim(
                    what=f"claims/s of {count} ranks / TransferQueue", measured=_number(of_ranks[count][6]), wanted=15.0
                )
                for count in PEER_RANK_COUNTS
            ),
        ],
        plots=[
            Plot(
                name="claims_per_second",
                title="Claims per second",
                x_label="ranks",
                y_label="calls/s",
                series={name: points for name, points in series.items() if points},
                log_x=True,
            )
        ],
        without=transfer_queue.absent,
    )


def _number(cell: Cell) -> float | None:
    return cell if isinstance(cell, float) else None


def run(options: Options) -> Report:
    """Measure."""
    return run_beside_transfer_queue(_measure, options)


if __name__ == "__main__":
    sys.exit(main(run))
