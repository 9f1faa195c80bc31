"""How fast do tensors go from one process to another on the same host, beside Ray's object store?

One process puts, another one gets. A get that maps memory costs next to nothing until the memory is read, so the time
until every byte was read, by a sum over the array, is shown as well. Memory that the system must hand out first costs
more than the copy, so both are shown: puts that take the place of a cleared one, as in the long run, and puts beside
which all others stay, as in the first steps after a start.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

import tq_service as tq
from benchmarks.harness import Options, interleave, main, median, median_ratio
from benchmarks.peer import Peer, Program, peer, program
from benchmarks.peer_environment import RAY
from benchmarks.report import Aim, Cell, Plot, Report
from tq_service.testing import ServiceProcess

ROW_COUNT, ROW_LENGTH = 256, 1 << 18
SIZE_BYTES = ROW_COUNT * ROW_LENGTH * 4
_WANTED = {"put": 1.8, "get": 1.0, "get and read every byte": 1.0}
_MEMORIES = {"the last one was cleared": True, "nothing is cleared": False}
# What is not cleared takes memory until the end, on both sides.
_MOST_REPEATS = 7

# Seconds of a put, of a get, and of a get with reading every byte.
Times = tuple[float, float, float]


class RoundTrip:
    """Puts here, and gets with `Reader.read` of `same_host_reader`, in this process or in another."""

    def __init__(self, client: tq.Client, read: Callable[..., Times], row_count: int = ROW_COUNT) -> None:
        self._client = client
        self._read = read
        self._data = torch.rand(row_count, ROW_LENGTH)
        self._total = float(self._data.numpy().sum())
        self._numbers = itertools.count()
        self._has_put = False

    def __call__(self, reuse: bool) -> Times:
        """Put and get; with `reuse` after what the last such put has stored was cleared."""
        partition_id = "replaced" if reuse else f"kept-{next(self._numbers)}"
        if reuse and self._has_put:
            self._client.clear_partition(partition_id)
        started = time.perf_counter()
        self._client.put({"x": self._data}, partition_id=partition_id)
        put_seconds = time.perf_counter() - started
        self._has_put = self._has_put or reuse
        get_seconds, read_seconds, total = self._read(
            partition_id=partition_id, task_name="read", sample_count=len(self._data)
        )
        if total != self._total:
            raise RuntimeError("what was got is not what was put")
        return put_seconds, get_seconds, read_seconds


def _measure(options: Options, address: str, reader: Program, ray: Peer) -> Report:
    reader.ask("connect", address=address)
    with tq.Client(address, timeout=60.0) as client:
        round_trip = RoundTrip(client, partial(reader.ask, "read"))
        cases: dict[str, Callable[[], Times]] = {}
        if ray.is_there:
            ray.ask("load", row_count=ROW_COUNT, row_length=ROW_LENGTH)
        for memory, reuse in _MEMORIES.items():
            cases[f"ours, {memory}"] = partial(round_trip, reuse)
            if ray.is_there:
                cases[f"Ray, {memory}"] = partial(ray.ask, "round_trip", reuse=reuse)
        times = interleave(cases, min(options.repeats, _MOST_REPEATS))
    rates = {name: SIZE_BYTES / 1e9 / np.asarray(repeats) for name, repeats in times.items()}
    rows: list[list[Cell]] = []
    for memory, (column, verb) in itertools.product(_MEMORIES, enumerate(_WANTED)):
        ours = rates[f"ours, {memory}"][:, column]
        peers: list[Cell] = [None, None]
        if ray.is_there:
            theirs = rates[f"Ray, {memory}"][:, column]
            peers = [median(theirs), median_ratio(ours, theirs)]
        rows.append([memory, verb, median(ours), *peers])
    return _report(rows, ray)


def _report(rows: list[list[Cell]], ray: Peer) -> Report:
    size = f"{SIZE_BYTES >> 20} MiB"
    series = {"tq_service": _bars(rows, 2), **({"Ray": _bars(rows, 3)} if ray.is_there else {})}
    return Report(
        name="same_host",
        question="How fast do tensors go from one process to another on the same host, beside Ray's object store?",
        columns=["memory", "what", "GB/s", "Ray, GB/s", "ours / Ray"],
        rows=rows,
        notes=[
            f"{size} of dense float32 in {ROW_COUNT} rows; one process puts, another gets; GB are 10^9 bytes",
            "reading: numpy's sum over the array, on both sides",
            "Ray: numpy arrays, which its readers map without a copy",
            *ray.notes,
        ],
        aims=[
            Aim(
                what=f"{verb} of {size} where {memory}, same host / Ray",
                measured=None if ratio is None else float(ratio),
                wanted=_WANTED[str(verb)],
            )
            for memory, verb, _, _, ratio in rows
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


def _bars(rows: list[list[Cell]], column: int) -> list[tuple[str, float]]:
    """Return what moves or reads bytes: a get alone does neither, and would dwarf the others."""
    return [(f"{row[1]},\n{row[0]}", float(row[column] or 0)) for row in rows if row[1] != "get"]


def run(options: Options) -> Report:
    """Measure."""
    with (
        ServiceProcess() as server,
        program("benchmarks.same_host_reader") as reader,
        peer(RAY, "benchmarks.ray_peer", options) as ray,
    ):
        return _measure(options, server.address, reader, ray)


if __name__ == "__main__":
    sys.exit(main(run))
