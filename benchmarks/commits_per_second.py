"""How many single samples per second can many small workers commit, and at what cost, compared with calls of an echo?

The workers are tasks of one or several client processes, each with one client; each puts one sample after another.
Concurrent puts of one process are sent together; with `gathers_puts=False` each is a separate call. An insert names a
sample by its key and gives it custom_meta, without data, as a rollout worker does to announce a prompt. The service is
one process or, for one case, a controller and a storage service.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import grpc
import numpy as np
import psutil

import tq_service as tq
from benchmarks.echo_server import echo_call, request_of
from benchmarks.harness import Options, interleave, main, median, median_ratio, run_async, running
from benchmarks.report import Cell, Plot, Report
from tq_service.testing import ServiceProcess

CLIENTS = ((1, 1), (1, 64), (1, 256), (8, 8), (64, 1))
"""Client processes, and tasks in each."""

_SECONDS, _QUICK_SECONDS, _START_SECONDS = 1.0, 0.2, 0.2
_ECHO_SIZES = (190, 140)
_PUT, _ALONE, _REMOTE, _INSERT, _ECHO = "put", "put by itself", "put, two services", "insert", "echo"
_CASES = (_PUT, _ALONE, _REMOTE, _INSERT, _ECHO)
_TIMED = (_PUT, _ALONE, _REMOTE, _ECHO)
_ROW = {"x": np.arange(1)}

Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The called servers: addresses, and the processes that answer each case.

    Attributes:
        service: address of the service as one process.
        controller: address of the controller with a separate storage service.
        echo: address of the echo.
        processes: server processes by case.
    """

    service: str
    controller: str
    echo: str
    processes: Mapping[str, Sequence[psutil.Process]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Work for client processes: one case with a number of tasks each, between two times of the monotonic clock."""

    case: str
    task_count: int
    partition_id: str
    begin_at: float
    end_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of one or several processes: calls, and the processor seconds of clients and server."""

    call_count: int
    client_seconds: float
    seconds: float = 0.0
    server_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.call_count / self.seconds


def _serve_orders(orders: Connection, address: str, controller: str, echo_address: str) -> None:
    """Carry out orders until they end: the program of a client process."""
    run_async(_carry_out_all(orders, address, controller, echo_address))


async def _carry_out_all(orders: Connection, address: str, controller: str, echo_address: str) -> None:
    channel = grpc.aio.insecure_channel(echo_address)
    echo, request = echo_call(channel), request_of(*_ECHO_SIZES)
    async with (
        tq.AsyncClient(address) as client,
        tq.AsyncClient(address, gathers_puts=False) as alone,
        tq.AsyncClient(controller) as remote,
    ):

        def calls(partition_id: str) -> Mapping[str, Call]:
            return {
                _PUT: lambda: client.put(partition_id, _ROW),
                _ALONE: lambda: alone.put(partition_id, _ROW),
                _REMOTE: lambda: remote.put(partition_id, _ROW),
                _INSERT: lambda: client.put(partition_id, keys=[secrets.token_hex(8)], custom_meta=[{"version": 3}]),
                _ECHO: lambda: echo(request),
            }

        await asyncio.gather(*(call() for call in calls("warm").values()))
        orders.send(None)
        while (order := await asyncio.to_thread(orders.recv)) is not None:
            orders.send(await _carry_out(order, calls(order.partition_id)[order.case]))
    await channel.close()


async def _carry_out(order: Order, call: Call) -> Outcome:
    async def work() -> int:
        count = 0
        while time.monotonic() < order.end_at:
            await call()
            count += 1
        return count

    await asyncio.sleep(order.begin_at - time.monotonic())
    before = time.process_time()
    counts = await asyncio.gather(*(work() for _ in range(order.task_count)))
    return Outcome(call_count=sum(counts), client_seconds=time.process_time() - before)


@contextmanager
def _client_processes(count: int, servers: Servers) -> Iterator[list[Connection]]:
    """Run connected client processes; yield the connections for orders."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        ends = []
        for _ in range(count):
            own, other = spawn.Pipe()
            addresses = servers.service, servers.controller, servers.echo
            process = spawn.Process(target=_serve_orders, args=(other, *addresses), daemon=True)
            process.start()
            stack.callback(process.join)
            ends.append(own)
        for end in ends:
            end.recv()
        yield ends
        for end in ends:
            end.send(None)


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _measure(
    case: str, clients: list[Connection], task_count: int, processes: Sequence[psutil.Process], seconds: float
) -> Outcome:
    begin_at = time.monotonic() + _START_SECONDS
    order = Order(
        case=case,
        task_count=task_count,
        partition_id=secrets.token_hex(8),
        begin_at=begin_at,
        end_at=begin_at + seconds,
    )
    before = _cpu_seconds(processes)
    for client in clients:
        client.send(order)
    outcomes = [client.recv() for client in clients]
    return Outcome(
        call_count=sum(each.call_count for each in outcomes),
        client_seconds=sum(each.client_seconds for each in outcomes),
        seconds=time.monotonic() - begin_at,
        server_seconds=_cpu_seconds(processes) - before,
    )


@contextmanager
def _servers() -> Iterator[Servers]:
    """Run the servers."""
    with (
        ServiceProcess() as service,
        ServiceProcess("--role", "controller") as controller,
        ServiceProcess("--role", "storage", "--controller", controller.address) as storage,
        running("benchmarks.echo_server") as echo,
    ):
        own = [psutil.Process(service.pid)]
        processes = dict.fromkeys(_CASES, own) | {
            _REMOTE: [psutil.Process(controller.pid), psutil.Process(storage.pid)],
            _ECHO: [psutil.Process(echo.pid)],
        }
        yield Servers(service=service.address, controller=controller.address, echo=echo.address, processes=processes)


def _rows(options: Options, servers: Servers) -> Iterator[list[Cell]]:
    seconds = _QUICK_SECONDS if options.quick else _SECONDS
    with tq.Client(servers.service) as admin, tq.Client(servers.controller) as remote_admin:
        for process_count, task_count in CLIENTS[:2] if options.quick else CLIENTS:
            with _client_processes(process_count, servers) as clients:
                cases = {
                    case: partial(_measure, case, clients, task_count, processes, seconds)
                    for case, processes in servers.processes.items()
                }
                outcomes = interleave(cases, options.repeats)
            for each in (admin, remote_admin):
                for partition in each.list_partitions():
                    each.clear_partition(partition.partition_id)
            rates = {case: [each.rate for each in outcomes[case]] for case in _CASES}
            yield [
                f"{process_count} of {task_count}",
                *(median(rates[case]) for case in _CASES),
                *(median_ratio(rates[case], rates[_ECHO]) for case in _CASES[:-1]),
                *(median([each.server_seconds / each.call_count * 1e6 for each in outcomes[case]]) for case in _TIMED),
                *(median([each.client_seconds / each.call_count * 1e6 for each in outcomes[case]]) for case in _TIMED),
            ]


def run(options: Options) -> Report:
    """Measure."""
    with _servers() as servers:
        rows = list(_rows(options, servers))
    return Report(
        name="commits_per_second",
        question="How many single samples per second can many small workers commit, compared with calls of an echo?",
        columns=[
            "processes of tasks",
            *(f"{case}, 1/s" for case in _CASES),
            *(f"{case} / echo" for case in _CASES[:-1]),
            *(f"{case}: server, µs" for case in _TIMED),
            *(f"{case}: client, µs" for case in _TIMED),
        ],
        rows=rows,
        notes=[
            "one int64 per put; an insert has a key and one number of custom_meta; each process has one tq.AsyncClient",
            "concurrent puts of a process are sent together, and so are inserts; the separate ones are not",
            "two services: a controller and a storage service, each in a separate process",
            "µs are processor time of all threads and servers of a case, per call",
            f"the echo's request has {_ECHO_SIZES[0]} bytes, its answer {_ECHO_SIZES[1]}",
        ],
        plots=[
            Plot(
                name="commits_per_second",
                title="Single samples committed per second",
                x_label="",
                y_label="calls/s",
                series={
                    case: [(str(row[0]), float(row[column] or 0)) for row in rows]
                    for column, case in enumerate(_CASES, start=1)
                },
                bars=True,
            )
        ],
    )


if __name__ == "__main__":
    sys.exit(main(run))
