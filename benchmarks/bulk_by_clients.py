"""How much can 1 to 16 client processes put and get at once over the wire, beside raw TCP over as many connections?

One service, which shares no memory with clients of its host. Every client is a process of its own; they begin at the
same time, and it is over when the last one is done.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

import tq_service as tq
from benchmarks import tcp_sink
from benchmarks.harness import Options, interleave, main, median, median_ratio, running
from benchmarks.report import Cell, Plot, Report
from tq_service.testing import ServiceProcess

CLIENT_COUNTS = (1, 2, 4, 8, 16)
CLIENT_COUNTS_QUICK = (1, 2)
_TENSOR_BYTES = 16 << 20
_TENSORS_A_TURN = 4
_ROW_COUNT = 256
_LONGEST_SECONDS = 120.0


class _Clients:
    """Processes that run jobs, the first so many of them at the same time."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def seconds(self, action: str, count: int) -> float:
        """Return the seconds until the first `count` clients have all done something."""
        pipes = self._pipes[:count]
        started = time.perf_counter()
        for pipe in pipes:
            pipe.send(action)
        for pipe in pipes:
            if not pipe.poll(_LONGEST_SECONDS):
                raise RuntimeError(f"a client has not done its {action} in {_LONGEST_SECONDS:g} s")
            pipe.recv()
        return time.perf_counter() - started

    def round_trips(self, count: int) -> tuple[float, float]:
        """Return the seconds of all puts and of all gets; what was put is cleared."""
        times = self.seconds("put", count), self.seconds("get", count)
        self.seconds("clear", count)
        return times


def _client(pipe: Connection, name: str, address: str, sink_address: str) -> None:
    """Do what the pipe says until it is closed."""
    data = torch.rand(_ROW_COUNT, _TENSOR_BYTES // _ROW_COUNT // 4)
    payload = data.numpy().reshape(-1).view(np.uint8).data
    metas: list[tq.BatchMeta] = []
    with tq.Client(address, timeout=_LONGEST_SECONDS) as client, tcp_sink.connect(sink_address) as connection:
        actions: dict[str, Callable[[], object]] = {
            "put": lambda: metas.append(client.put({"x": data}, partition_id=name)),
            "get": lambda: client.get_data(metas.pop()),
            "tcp": partial(tcp_sink.send, connection, payload),
        }
        while (action := pipe.recv()) is not None:
            if action == "clear":
                client.clear_partition(name)
            else:
                for _ in range(_TENSORS_A_TURN):
                    actions[action]()
            pipe.send(None)


@contextmanager
def _running_clients(count: int, address: str, sink_address: str) -> Iterator[_Clients]:
    # A fork server that has imported torch starts clients in no time, and has no channel that they could inherit.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tensordict", __name__])
    pipes, processes = [], []
    for number in range(count):
        ours, theirs = context.Pipe()
        arguments = (theirs, f"client-{number}", address, sink_address)
        processes.append(context.Process(target=_client, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        yield _Clients(pipes)
    finally:
        for pipe in pipes:
            with suppress(BrokenPipeError):  # it has ended with an error, which is on stderr
                pipe.send(None)
        for process in processes:
            process.join(_LONGEST_SECONDS)


def _measure(options: Options, address: str, sink_address: str) -> Report:
    counts = CLIENT_COUNTS_QUICK if options.quick else CLIENT_COUNTS
    rows: list[list[Cell]] = []
    with _running_clients(counts[-1], address, sink_address) as clients:
        clients.round_trips(counts[-1])
        for count in counts:
            cases: dict[str, Callable[[], Any]] = {
                "service": partial(clients.round_trips, count),
                "tcp": partial(clients.seconds, "tcp", count),
            }
            times = interleave(cases, options.repeats)
            rows.append([count, *_cells(times, count * _TENSORS_A_TURN * _TENSOR_BYTES)])
    return _report(rows)


def _cells(times: dict[str, list[Any]], size: int) -> list[Cell]:
    cells: list[Cell] = []
    for column in (0, 1):
        seconds = [pair[column] for pair in times["service"]]
        cells += [size / 1e9 / median(seconds), median_ratio(times["tcp"], seconds)]
    return [*cells, size / 1e9 / median(times["tcp"])]


def _report(rows: list[list[Cell]]) -> Report:
    return Report(
        name="bulk_by_clients",
        question="How much can 1 to 16 client processes put and get at once over the wire, beside raw TCP?",
        columns=["clients", "puts, GB/s", "of raw TCP", "gets, GB/s", "of raw TCP", "raw TCP, GB/s"],
        rows=rows,
        notes=[
            f"GB are 10^9 bytes, of all clients together; {_TENSORS_A_TURN} tensors of {_TENSOR_BYTES >> 20} MiB each "
            f"client, {_ROW_COUNT} rows of dense float32; tq.Client",
            "raw TCP: as many processes, each with a connection of its own, received by a thread each",
        ],
        plots=[
            Plot(
                name="bulk_by_clients",
                title="Throughput of all clients together",
                x_label="clients",
                y_label="GB/s",
                series={
                    name: [(row[0], float(row[column] or 0)) for row in rows]
                    for name, column in (("puts", 1), ("gets", 3), ("raw TCP", 5))
                },
                log_x=True,
            )
        ],
    )


def run(options: Options) -> Report:
    """Measure."""
    with ServiceProcess("--shared-memory", "off") as server, running("benchmarks.tcp_sink") as sink:
        return _measure(options, server.address, sink.address)


if __name__ == "__main__":
    sys.exit(main(run))
