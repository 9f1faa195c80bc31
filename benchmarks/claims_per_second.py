"""How many batches per second can ranks claim, and at what cost, compared with TransferQueue and a gRPC echo?

The ranks are tasks of one or several client processes, each with one `tq.AsyncClient`. All ranks claim concurrently;
each claims one batch after another, singly or in ranges. Concurrent claims share a stream; in the case "alone" each is
a separate call. The echo gets one call per batch, with messages of the sizes of one claim; it uses no protobuf and
keeps no state. TransferQueue gets the same load from a separate process, with fewer claims. Its claims cost time in
proportion to the partition and get cheaper as it is consumed, so they are measured when half of it is consumed.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter

import grpc
import numpy as np
import psutil

import tq_service as tq
from benchmarks.echo_server import echo_call, request_of
from benchmarks.harness import Options, interleave, main, median, median_ratio, run_async, running
from benchmarks.peer import TRANSFER_QUEUE, Peer, peer
from benchmarks.report import Aim, Cell, Plot, Report
from tq_service.testing import ServiceProcess

SAMPLE_COUNT = 32_768
BATCH_SIZE = 8
_ECHO_SIZES = (110, 145)
_CLAIMS_A_REPEAT, _CLAIMS_OF_ONE_RANK, _QUICK_SHARE = 1_536, 512, 8
_PEER_CLAIMS_A_REPEAT = 192
_PEER_RANK_COUNTS = (8, 64)
_START_SECONDS = 0.2
_CLAIM, _ALONE, _ECHO, _PEER = "claim", "alone", "echo", "TransferQueue"

Call = Callable[[int, int], Awaitable[int]]
"""Makes a rank's call for its batches from an index on; returns the number of batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """Client processes, the ranks in each, and the number of batches per call."""

    process_count: int
    rank_count: int
    batch_count: int = 1

    @property
    def dp_size(self) -> int:
        """Ranks in all processes."""
        return self.process_count * self.rank_count

    @property
    def is_compared(self) -> bool:
        """Whether TransferQueue gets the same load."""
        return (self.process_count, self.batch_count) == (1, 1) and self.rank_count in _PEER_RANK_COUNTS

    def __str__(self) -> str:
        return f"{self.process_count} of {self.rank_count}" + f", ranges of {self.batch_count}" * (self.batch_count > 1)


ONE_RANK, RANGES, TOGETHER = Clients(process_count=1, rank_count=1), 16, Clients(process_count=1, rank_count=64)
SPREAD = Clients(process_count=8, rank_count=8)
CLIENTS = (
    ONE_RANK,
    Clients(process_count=1, rank_count=1, batch_count=4),
    Clients(process_count=1, rank_count=1, batch_count=RANGES),
    Clients(process_count=1, rank_count=8),
    TOGETHER,
    SPREAD,
    Clients(process_count=1, rank_count=512),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Work for a client process from a time of the monotonic clock on: calls of its ranks."""

    case: str
    clients: Clients
    task_name: str
    first_rank: int
    batches_of_a_rank: int
    begin_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of one or several processes: batches, and the processor seconds of clients and server."""

    batch_count: int
    client_seconds: float
    seconds: float = 0.0
    server_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batch_count / self.seconds


def _serve_orders(orders: Connection, address: str, echo_address: str) -> None:
    """Carry out orders until they end: the program of a client process."""
    run_async(_carry_out_all(orders, address, echo_address))


async def _carry_out_all(orders: Connection, address: str, echo_address: str) -> None:
    channel = grpc.aio.insecure_channel(echo_address)
    echo, request = echo_call(channel), request_of(*_ECHO_SIZES)

    async def call_echo(_rank: int, _batch_index: int) -> int:
        await echo(request)
        return 1

    async with tq.AsyncClient(address) as client, tq.AsyncClient(address) as alone:
        alone._calls.endpoint().unary._alone_until = math.inf
        await asyncio.gather(client.list_partitions(), alone.list_partitions(), call_echo(0, 0))
        orders.send(None)
        while (order := await asyncio.to_thread(orders.recv)) is not None:
            calls = call_echo if order.case == _ECHO else _claims(alone if order.case == _ALONE else client, order)
            orders.send(await _carry_out(order, calls))
    await channel.close()


def _claims(client: tq.AsyncClient, order: Order) -> Call:
    asks = partial(
        client.get_meta, partition_id="claims", task_name=order.task_name, data_fields=["x"], batch_size=BATCH_SIZE,
        dp_size=order.clients.dp_size,
    )  # fmt: skip

    async def claim(rank: int, batch_index: int) -> int:
        batches = await asks(dp_rank=rank, batch_index=batch_index)
        return len([batches])

    async def claim_range(rank: int, batch_index: int) -> int:
        batches = await asks(dp_rank=rank, batch_index=batch_index, batch_count=order.clients.batch_count)
        return len(batches)

    return claim if order.clients.batch_count == 1 else claim_range


async def _carry_out(order: Order, call: Call) -> Outcome:
    async def consume(rank: int) -> int:
        batch_index = 0
        while batch_index < order.batches_of_a_rank:
            batch_index += await call(rank, batch_index)
        return batch_index

    await asyncio.sleep(order.begin_at - time.monotonic())
    before = time.process_time()
    counts = await asyncio.gather(*(consume(order.first_rank + rank) for rank in range(order.clients.rank_count)))
    return Outcome(batch_count=sum(counts), client_seconds=time.process_time() - before)


@contextmanager
def _client_processes(count: int, address: str, echo_address: str) -> Iterator[list[Connection]]:
    """Run connected client processes; yield the connections for orders."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        ends = []
        for _ in range(count):
            own, other = spawn.Pipe()
            process = spawn.Process(target=_serve_orders, args=(other, address, echo_address), daemon=True)
            process.start()
            stack.callback(process.join)
            ends.append(own)
        for end in ends:
            end.recv()
        yield ends
        for end in ends:
            end.send(None)


def _measure(case: str, clients: Clients, ends: Sequence[Connection], server: psutil.Process, calls: int) -> Outcome:
    begin_at, task_name = time.monotonic() + _START_SECONDS, secrets.token_hex(8)
    before = sum(server.cpu_times()[:2])
    for number, end in enumerate(ends):
        end.send(
            Order(
                case=case,
                clients=clients,
                task_name=task_name,
                first_rank=number * clients.rank_count,
                batches_of_a_rank=calls // clients.dp_size,
                begin_at=begin_at,
            )
        )
    outcomes = [end.recv() for end in ends]
    return Outcome(
        batch_count=sum(each.batch_count for each in outcomes),
        client_seconds=sum(each.client_seconds for each in outcomes),
        seconds=time.monotonic() - begin_at,
        server_seconds=sum(server.cpu_times()[:2]) - before,
    )


def _ask_peer(transfer_queue: Peer, rank_count: int) -> Outcome:
    """Let TransferQueue's client claim while nothing else runs."""
    seconds = transfer_queue.ask(
        "claims",
        partition_id="claims",
        rank_count=rank_count,
        claim_count=_PEER_CLAIMS_A_REPEAT,
        batch_size=BATCH_SIZE,
        consumed_count=SAMPLE_COUNT // 2,
    )
    return Outcome(batch_count=_PEER_CLAIMS_A_REPEAT, client_seconds=0.0, seconds=float(seconds))


def _row(
    clients: Clients, options: Options, service: tuple[str, int], echo: tuple[str, int], transfer_queue: Peer
) -> list[Cell]:
    """Return a row of the table, given the address and the process id of both servers."""
    count = _CLAIMS_OF_ONE_RANK if clients.dp_size == 1 else _CLAIMS_A_REPEAT
    count = max(count // _QUICK_SHARE, clients.dp_size) if options.quick else count
    with _client_processes(clients.process_count, service[0], echo[0]) as ends:
        cases = {
            case: partial(_measure, case, clients, ends, psutil.Process(pid), count)
            for case, (_, pid) in ((_CLAIM, service), (_ECHO, echo), (_ALONE, service))
        }
        if transfer_queue.is_there and clients.is_compared:
            cases[_PEER] = partial(_ask_peer, transfer_queue, clients.rank_count)
        outcomes = interleave(cases, options.repeats)
    rates = {case: [each.rate for each in found] for case, found in outcomes.items()}
    server, client = (
        {case: median([value(each) / each.batch_count * 1e6 for each in found]) for case, found in outcomes.items()}
        for value in (attrgetter("server_seconds"), attrgetter("client_seconds"))
    )
    peers = [median(rates[_PEER]), median_ratio(rates[_CLAIM], rates[_PEER])] if _PEER in rates else [None] * 2
    return [
        str(clients),
        median(rates[_CLAIM]),
        median(rates[_ECHO]),
        median_ratio(rates[_CLAIM], rates[_ECHO]),
        server[_CLAIM],
        server[_ECHO],
        client[_CLAIM],
        *peers,
        median(rates[_ALONE]),
        median_ratio(rates[_CLAIM], rates[_ALONE]),
        server[_ALONE],
        client[_ALONE],
    ]


def run(options: Options) -> Report:
    """Measure."""
    with (
        ServiceProcess() as service,
        running("benchmarks.echo_server") as echo,
        peer(TRANSFER_QUEUE, "benchmarks.transfer_queue_peer", options) as transfer_queue,
    ):
        with tq.Client(service.address) as client:
            client.put("claims", {"x": np.arange(SAMPLE_COUNT)})
        if transfer_queue.is_there:
            transfer_queue.ask("fill", partition_id="claims", sample_count=SAMPLE_COUNT)
        rows = [
            _row(clients, options, (service.address, service.pid), (echo.address, echo.pid), transfer_queue)
            for clients in CLIENTS
        ]
        return _report(rows, transfer_queue)


def _report(rows: list[list[Cell]], transfer_queue: Peer) -> Report:
    by_clients = dict(zip(CLIENTS, rows, strict=True))
    of_range = by_clients[Clients(process_count=1, rank_count=1, batch_count=RANGES)]
    return Report(
        name="claims_per_second",
        question="How many batches per second can ranks claim, and at what cost?",
        columns=[
            "processes of ranks",
            "claims/s",
            "echo, calls/s",
            "claims / echo",
            "service, µs",
            "echo, µs",
            "client, µs",
            "TransferQueue, claims/s",
            "claims / TransferQueue",
            "alone, claims/s",
            "claims / alone",
            "service alone, µs",
            "client alone, µs",
        ],
        rows=rows,
        notes=[
            f"{SAMPLE_COUNT:,} samples, batches of {BATCH_SIZE}; each process has one tq.AsyncClient",
            "a claim is one batch of one rank; in ranges, one call claims several; the echo gets one call for each",
            "concurrent claims of a process share a stream; alone: each is a separate call",
            "µs are processor time of all threads per batch",
            f"the echo's request has {_ECHO_SIZES[0]} bytes, its answer {_ECHO_SIZES[1]}",
            "TransferQueue: when half of the samples are consumed; earlier claims cost more, later ones less",
            *transfer_queue.notes,
        ],
        aims=[
            Aim(what="claims/s of 64 ranks", measured=_number(by_clients[TOGETHER][1]), wanted=2_000),
            Aim(what=f"claims/s of {SPREAD} / alone", measured=_number(by_clients[SPREAD][10]), wanted=1.3),
            Aim(what=f"claims/s of one rank in ranges of {RANGES} / echo", measured=_number(of_range[3]), wanted=1.5),
            *(
                Aim(what=f"claims/s of {clients.rank_count} ranks / TransferQueue", measured=_number(row[8]), wanted=15)
                for clients, row in by_clients.items()
                if clients.is_compared
            ),
        ],
        plots=[
            Plot(
                name="claims_per_second",
                title="Claims per second",
                x_label="",
                y_label="calls/s",
                series={
                    name: [(str(row[0]), float(row[column])) for row in rows if isinstance(row[column], float)]
                    for column, name in ((1, "get_meta, tq.AsyncClient"), (2, "grpc.aio echo"))
                },
                bars=True,
            )
        ],
        without=transfer_queue.absent,
    )


def _number(cell: Cell) -> float | None:
    return cell if isinstance(cell, float) else None


if __name__ == "__main__":
    sys.exit(main(run))
