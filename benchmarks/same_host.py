"""How fast do tensors go from one process to another on the same host, beside Ray's object store?

One process puts, another one gets. A get that maps memory costs next to nothing until the memory is read, so the time
until every byte was read, by a sum over the array, is shown as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

import tq_service as tq
from benchmarks.harness import Options, interleave, main, median, median_ratio, service
from benchmarks.peer import Peer, Program, peer, program
from benchmarks.peer_environment import RAY
from benchmarks.report import Aim, Cell, Plot, Report

ROW_COUNT, ROW_LENGTH = 256, 1 << 18
SIZE_BYTES = ROW_COUNT * ROW_LENGTH * 4
_VERBS = ("put", "get", "get and read every byte")
_PARTITION = "same-host"

# Seconds of a put, of a get, and of a get with reading every byte.
Times = tuple[float, float, float]


class _RoundTrip:
    """Puts here and gets in the reader."""

    def __init__(self, client: tq.Client, reader: Program) -> None:
        self._client = client
        self._reader = reader
        self._data = torch.rand(ROW_COUNT, ROW_LENGTH)
        self._total = float(self._data.numpy().sum())

    def __call__(self) -> Times:
        started = time.perf_counter()
        self._client.put({"x": self._data}, partition_id=_PARTITION)
        put_seconds = time.perf_counter() - started
        get_seconds, read_seconds, total = self._reader.ask(
            "read", partition_id=_PARTITION, task_name="read", sample_count=ROW_COUNT
        )
        if total != self._total:
            raise RuntimeError("what was got is not what was put")
        self._client.clear_partition(_PARTITION)
        return put_seconds, get_seconds, read_seconds


def _measure(options: Options, address: str, reader: Program, ray: Peer) -> Report:
    reader.ask("connect", address=address)
    with tq.Client(address, timeout=60.0) as client:
        cases: dict[str, Callable[[], Times]] = {"ours": _RoundTrip(client, reader)}
        if ray.is_there:
            ray.ask("load", row_count=ROW_COUNT, row_length=ROW_LENGTH)
            cases["ray"] = lambda: ray.ask("round_trip")
        times = interleave(cases, options.repeats)
    rows: list[list[Cell]] = []
    for column, verb in enumerate(_VERBS):
        rates = {name: [SIZE_BYTES / 1e9 / repeat[column] for repeat in repeats] for name, repeats in times.items()}
        peers: list[Cell] = [None, None]
        if "ray" in rates:
            peers = [median(rates["ray"]), median_ratio(rates["ours"], rates["ray"])]
        rows.append([verb, median(rates["ours"]), *peers])
    return _report(rows, ray)


def _report(rows: list[list[Cell]], ray: Peer) -> Report:
    size = f"{SIZE_BYTES >> 20} MiB"
    series = {"tq_service": [(str(row[0]), float(row[1] or 0)) for row in rows]}
    if ray.is_there:
        series["Ray"] = [(str(row[0]), float(row[2] or 0)) for row in rows]
    return Report(
        name="same_host",
        question="How fast do tensors go from one process to another on the same host, beside Ray's object store?",
        columns=["what", "GB/s", "Ray, GB/s", "ours / Ray"],
        rows=rows,
        notes=[
            f"{size} of dense float32 in {ROW_COUNT} rows; one process puts, another gets; GB are 10^9 bytes",
            "reading: numpy's sum over the array, on both sides",
            "Ray: numpy arrays, which its readers map without a copy",
            *ray.notes,
        ],
        aims=[
            Aim(
                what=f"{row[0]} of {size}, same host / Ray",
                measured=None if row[3] is None else float(row[3]),
                wanted=wanted,
            )
            for row, wanted in zip(rows, (1.8, 1.0), strict=False)
        ],
        plots=[
            Plot(
                name="same_host",
                title=f"{size} from one process to another on the same host",
                x_label="",
                y_label="GB/s",
                bars=True,
                series=series,
            )
        ],
        without=ray.absent,
    )


def run(options: Options) -> Report:
    """Measure."""
    with (
        service() as server,
        program("benchmarks.same_host_reader") as reader,
        peer(RAY, "benchmarks.ray_peer", options) as ray,
    ):
        return _measure(options, server.address, reader, ray)


if __name__ == "__main__":
    sys.exit(main(run))
