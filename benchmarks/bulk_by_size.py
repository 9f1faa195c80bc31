"""How fast do tensors of 1 KiB to 1 GiB go over the wire, into the service and back, beside raw TCP?

The service is a process of its own and shares no memory with clients of its host. One client puts one tensor after
the other, then gets each; raw TCP sends as many bytes and waits for one byte in answer.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import tq_service as tq
from benchmarks import tcp_sink
from benchmarks.harness import Options, interleave, main, median, median_ratio, running
from benchmarks.report import Cell, Plot, Report
from tq_service.testing import ServiceProcess

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
SIZES_QUICK = (KIB, MIB)
_LARGEST_ROW_BYTES = MIB
# So much in a turn, in tensors one after the other: a small one alone is over too soon to be measured.
_TURN_BYTES = 64 * MIB
_MOST_TENSORS_A_TURN = 64
_PARTITION = "bulk"


class RoundTrips:
    """Puts and gets of tensors of one size."""

    def __init__(self, client: tq.Client, size: int) -> None:
        row_bytes = min(size, _LARGEST_ROW_BYTES)
        self.count = max(1, min(_MOST_TENSORS_A_TURN, _TURN_BYTES // size))
        self.data = torch.rand(size // row_bytes, row_bytes // 4)
        self._client = client

    def __call__(self) -> tuple[float, float]:
        """Return the seconds of a put and of a get."""
        times = [time.perf_counter()]
        metas = [self._client.put({"x": self.data}, partition_id=_PARTITION) for _ in range(self.count)]
        times.append(time.perf_counter())
        for meta in metas:
            self._client.get_data(meta)
        times.append(time.perf_counter())
        self._client.clear_partition(_PARTITION)
        return (times[1] - times[0]) / self.count, (times[2] - times[1]) / self.count


def _send_seconds(connection: socket.socket, data: torch.Tensor, count: int) -> float:
    """Return the seconds of a send over TCP."""
    payload = data.numpy().reshape(-1).view(np.uint8).data
    started = time.perf_counter()
    for _ in range(count):
        tcp_sink.send(connection, payload)
    return (time.perf_counter() - started) / count


def _measure(options: Options, address: str, sink_address: str) -> Report:
    rows: list[list[Cell]] = []
    with tq.Client(address, timeout=60.0) as client, tcp_sink.connect(sink_address) as connection:
        for size in SIZES_QUICK if options.quick else SIZES:
            trips = RoundTrips(client, size)
            cases: dict[str, Callable[[], Any]] = {
                "service": trips,
                "tcp": partial(_send_seconds, connection, trips.data, trips.count),
            }
            times = interleave(cases, options.repeats)
            rows.append(_row(size, [put for put, _ in times["service"]], [get for _, get in times["service"]], times))
    return _report(rows)


def _row(size: int, puts: list[float], gets: list[float], times: dict[str, list[Any]]) -> list[Cell]:
    tcp = times["tcp"]
    cells: list[Cell] = [_size_text(size)]
    for seconds in (puts, gets):
        cells += [median(seconds) * 1e3, size / 1e9 / median(seconds), median_ratio(tcp, seconds)]
    return [*cells, size / 1e9 / median(tcp)]


def _size_text(size: int) -> str:
    unit, name = next((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if size >= unit)
    return f"{size // unit} {name}"


def _report(rows: list[list[Cell]]) -> Report:
    sizes = [size / MIB for size in SIZES]
    return Report(
        name="bulk_by_size",
        question="How fast do tensors of 1 KiB to 1 GiB go over the wire, into the service and back, beside raw TCP?",
        columns=["tensor", "put, ms", "put, GB/s", "of raw TCP", "get, ms", "get, GB/s", "of raw TCP", "raw TCP, GB/s"],
        rows=rows,
        notes=[
            "GB are 10^9 bytes; dense float32, in rows of up to 1 MiB; tq.Client, one call after the other",
            "small puts wait for the controller's commit and the answer, small sends over TCP for one byte",
        ],
        plots=[
            Plot(
                name="bulk_by_size",
                title="Throughput of one put or get after the other",
                x_label="MiB",
                y_label="GB/s",
                series={
                    name: [(size, float(row[column] or 0)) for size, row in zip(sizes, rows, strict=False)]
                    for name, column in (("put", 2), ("get", 5), ("raw TCP", 7))
                },
                log_x=True,
                log_y=True,
            )
        ],
    )


def run(options: Options) -> Report:
    """Measure."""
    with ServiceProcess("--shared-memory", "off") as server, running("benchmarks.tcp_sink") as sink:
        return _measure(options, server.address, sink.address)


if __name__ == "__main__":
    sys.exit(main(run))
