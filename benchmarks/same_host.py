"""How fast do tensors go from one process to another on the same host, compared with Ray's object store?

One process puts, another gets. A get that maps memory costs almost nothing until the memory is read, so the time until
every byte was read, by a sum over the array, is shown too. Memory that the system must allocate first costs more than
the copy, so two cases are shown: puts that replace a cleared one, as in the long run, and puts while all earlier ones
stay, as in the first steps after a start. Columns filled in place are put at the cost of calls, so they are compared
with unary calls of an echo.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial

import grpc
import numpy as np
import torch

import tq_service as tq
from benchmarks.echo_server import METHOD, request_of
from benchmarks.harness import Options, interleave, main, median, median_ratio, running
from benchmarks.peer import Peer, Program, peer, program
from benchmarks.peer_environment import RAY
from benchmarks.report import Aim, Cell, Plot, Report
from tq_service.schema import FieldSpec
from tq_service.testing import ServiceProcess

ROW_COUNT, ROW_LENGTH = 256, 1 << 18
SIZE_BYTES = ROW_COUNT * ROW_LENGTH * 4
_WANTED = {"put": 1.8, "get": 1.0, "get and read every byte": 1.0}
_MEMORIES = {"the last one was cleared": True, "nothing is cleared": False}
# Puts that are not cleared take memory until the end, on both sides.
_MOST_REPEATS = 7

_ECHO_SIZES = 200, 200
_ECHO_COUNT = 20

# Seconds of a put, of a get, and of a get with reading every byte.
Times = tuple[float, float, float]


class RoundTrip:
    """Puts in this process, and gets with `Reader.read` of `same_host_reader`, in this process or another."""

    def __init__(self, client: tq.Client, read: Callable[..., Times], row_count: int = ROW_COUNT) -> None:
        self._client = client
        self._read = read
        self._data = torch.rand(row_count, ROW_LENGTH)
        self._total = float(self._data.numpy().sum())
        self._numbers = itertools.count()
        self._has_put = False

    def __call__(self, reuse: bool) -> Times:
        """Put and get; with `reuse`, first clear the data of the last such put."""
        partition_id = "replaced" if reuse else f"kept-{next(self._numbers)}"
        if reuse and self._has_put:
            self._client.clear_partition(partition_id)
        started = time.perf_counter()
        self._client.put(partition_id, {"x": self._data})
        put_seconds = time.perf_counter() - started
        self._has_put = self._has_put or reuse
        get_seconds, read_seconds, total = self._read(
            partition_id=partition_id, task_name="read", sample_count=len(self._data)
        )
        if total != self._total:
            raise RuntimeError("the get returned other values than the put sent")
        return put_seconds, get_seconds, read_seconds


class InPlace:
    """Columns that are allocated, filled and put, and unary calls of an echo."""

    def __init__(self, client: tq.Client, channel: grpc.Channel) -> None:
        self._client = client
        self._fields = [FieldSpec("x", dtype="float32", row_shape=(ROW_LENGTH,))]
        self._echo = channel.unary_unary(METHOD)
        self._request = request_of(*_ECHO_SIZES)

    def allocate_and_put(self) -> float:
        """Return the seconds of both calls, without the time to fill the columns."""
        started = time.perf_counter()
        data = self._client.allocate("in place", self._fields, ROW_COUNT)
        seconds = time.perf_counter() - started
        data["x"].fill_(1.0)
        started = time.perf_counter()
        self._client.put("in place", data)
        seconds += time.perf_counter() - started
        self._client.clear_partition("in place")
        return seconds

    def echo(self) -> float:
        """Return the seconds of a call."""
        started = time.perf_counter()
        for _ in range(_ECHO_COUNT):
            self._echo(self._request)
        return (time.perf_counter() - started) / _ECHO_COUNT


def _measure(options: Options, address: str, channel: grpc.Channel, reader: Program, ray: Peer) -> Report:
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
        in_place = InPlace(client, channel)
        calls = interleave({"put": in_place.allocate_and_put, "echo": in_place.echo}, 3 * options.repeats)
    rates = {name: SIZE_BYTES / 1e9 / np.asarray(repeats) for name, repeats in times.items()}
    rows: list[list[Cell]] = []
    for memory, (column, verb) in itertools.product(_MEMORIES, enumerate(_WANTED)):
        ours = rates[f"ours, {memory}"][:, column]
        peers: list[Cell] = [None, None]
        if ray.is_there:
            theirs = rates[f"Ray, {memory}"][:, column]
            peers = [median(theirs), median_ratio(ours, theirs)]
        rows.append([memory, verb, median(ours), *peers])
    return _report(rows, median_ratio(calls["put"], calls["echo"]), ray)


def _report(rows: list[list[Cell]], echo_count: float, ray: Peer) -> Report:
    size = f"{SIZE_BYTES >> 20} MiB"
    series = {"tq_service": _bars(rows, 2), **({"Ray": _bars(rows, 3)} if ray.is_there else {})}
    return Report(
        name="same_host",
        question="How fast do tensors go from process to process on the same host, compared with Ray's object store?",
        columns=["memory", "what", "GB/s", "Ray, GB/s", "ours / Ray"],
        rows=rows,
        notes=[
            f"{size} of dense float32 in {ROW_COUNT} rows; one process puts, another gets; GB are 10^9 bytes",
            "reading: a numpy sum over the array, on both sides",
            f"allocating {size} and putting it, filled in place, took as long as {echo_count:.1f} unary echoes",
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
        ]
        + [
            Aim(
                what=f"allocate {size} and put it, in unary echoes",
                measured=echo_count,
                wanted=3.0,
                at_least=False,
            )
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
    """Return the rows that move or read bytes: a get alone does neither, and would dwarf the others."""
    return [(f"{row[1]},\n{row[0]}", float(row[column] or 0)) for row in rows if row[1] != "get"]


def run(options: Options) -> Report:
    """Measure."""
    with (
        ServiceProcess() as server,
        running("benchmarks.echo_server") as echo,
        grpc.insecure_channel(echo.address) as channel,
        program("benchmarks.same_host_reader") as reader,
        peer(RAY, "benchmarks.ray_peer", options) as ray,
    ):
        return _measure(options, server.address, channel, reader, ray)


if __name__ == "__main__":
    sys.exit(main(run))
