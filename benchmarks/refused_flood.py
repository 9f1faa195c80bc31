"""Do well-behaved claims stay quick while a client floods the service with calls that are refused?

One process sends calls at a given rate, as far as the streams of its connection allow. All are beyond the waiting calls
that one client may have. Another process claims single samples, one after another, and times each claim.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass

import grpc
import numpy as np

import tq_service as tq
from benchmarks.harness import ROOT, Options, interleave, main, median, run_async
from benchmarks.report import Cell, Report
from tq_service.testing import ServiceProcess
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

_RATES = (0, 1_000, 2_500, 5_000)
_MOST_WAITING = 100
_TICK_SECONDS = 0.005
_UNCOUNTED = 50
_PARTITION = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claims:
    """Seconds that claims took, and refused calls per second during the claims."""

    p50: float
    p99: float
    refused_per_second: float


# The flood, run in a separate process


async def _flood(address: str, rate: int) -> None:
    """Hold all waiting calls allowed per client, then send `rate` more per second; print how many were refused."""
    counts = {grpc.StatusCode.RESOURCE_EXHAUSTED: 0}
    async with grpc.aio.insecure_channel(address) as channel:
        get_meta = ControllerServiceStub(channel).GetMeta

        def ask() -> grpc.aio.UnaryUnaryCall[pb.GetMetaRequest, pb.GetMetaResponse]:
            request = pb.GetMetaRequest(
                request_id=secrets.token_bytes(16), partition_id="never", task_name="flood", data_fields=["x"],
                batch_size=1, max_wait={"seconds": 50},
            )  # fmt: skip
            return get_meta(request, timeout=55)

        async def refused() -> None:
            try:
                await ask()
            except grpc.aio.AioRpcError as error:
                counts[error.code()] = counts.get(error.code(), 0) + 1

        held = [ask() for _ in range(_MOST_WAITING)]
        await asyncio.sleep(0.2)
        running: set[asyncio.Task[None]] = set()
        began_at, sent, shown_at = time.monotonic(), 0, time.monotonic()
        print("flooding", flush=True)
        while not held[0].done():
            due = int((time.monotonic() - began_at) * rate) - sent
            for _ in range(min(due, 4 * int(rate * _TICK_SECONDS) + 1)):
                call = asyncio.create_task(refused())
                running.add(call)
                call.add_done_callback(running.discard)
                sent += 1
            if len(running) > rate:  # the service does not keep up: skip the late calls
                began_at, sent = time.monotonic(), 0
            if time.monotonic() - shown_at > 0.1:
                shown_at = time.monotonic()
                print(shown_at, counts[grpc.StatusCode.RESOURCE_EXHAUSTED], flush=True)
            await asyncio.sleep(_TICK_SECONDS)


class _Flood:
    """A process that floods the service and counts the refused calls."""

    def __init__(self, address: str, rate: int) -> None:
        command = [sys.executable, "-m", "benchmarks.refused_flood", "--flood", address, "--rate", str(rate)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if self._process.stdout is None or self._process.stdout.readline().strip() != "flooding":
            raise RuntimeError("the flood did not start; its log is above")

    def end(self) -> float:
        """Stop the flood and return the refused calls per second."""
        self._process.terminate()
        output, _ = self._process.communicate()
        points = [tuple(map(float, line.split())) for line in output.splitlines() if line.count(" ") == 1]
        (first_at, first), (last_at, last) = points[0], points[-1]
        return (last - first) / max(last_at - first_at, 1e-3)


# The claims


async def _claim(address: str, count: int) -> list[float]:
    seconds = []
    async with tq.AsyncClient(address, timeout=60.0) as client:
        await client.put(_PARTITION, {"x": np.zeros(count + _UNCOUNTED)})
        for number in range(count + _UNCOUNTED):
            began_at = time.perf_counter()
            await client.get_meta(partition_id=_PARTITION, task_name="t", data_fields=["x"], batch_size=1)
            if number >= _UNCOUNTED:
                seconds.append(time.perf_counter() - began_at)
        await client.clear_partition(_PARTITION)
    return seconds


def _measured(address: str, rate: int, count: int) -> _Claims:
    flood = _Flood(address, rate) if rate else None
    seconds = run_async(_claim(address, count))
    refused = 0.0 if flood is None else flood.end()
    p50, p99 = np.percentile(seconds, [50, 99])
    return _Claims(p50=float(p50), p99=float(p99), refused_per_second=refused)


def run(options: Options) -> Report:
    """Measure."""
    count, repeats = (400, 1) if options.quick else (2_000, options.repeats)
    with ServiceProcess(
        "--max-waiting-calls-per-client", str(_MOST_WAITING), "--max-streams", str(2 * _MOST_WAITING)
    ) as server:
        cases = {
            f"{rate:,}": functools.partial(_measured, server.address, rate, count)
            for rate in (_RATES[::3] if options.quick else _RATES)
        }
        results = interleave(cases, repeats)
    alone = results["0"]
    rows: list[list[Cell]] = []
    for name, runs in results.items():
        ratio = median([one.p99 / other.p99 for one, other in zip(runs, alone, strict=True)])
        times = [1e3 * median([getattr(one, which) for one in runs]) for which in ("p50", "p99")]
        rows.append([name, median([one.refused_per_second for one in runs]), *times, ratio])
    return Report(
        name="refused_flood",
        question="Do well-behaved claims stay quick while a client floods the service with calls that are refused?",
        columns=[
            "calls sent a second",
            "refused a second",
            "claim p50 ms",
            "claim p99 ms",
            "p99 / p99 without a flood",
        ],
        rows=rows,
        notes=[
            f"The flooding client holds the {_MOST_WAITING} waiting calls it may have; its further calls are "
            "refused, and the number in flight is limited by max_streams. Server, flood and claiming "
            "client are three processes.",
        ],
    )


if __name__ == "__main__":
    if "--flood" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--flood")
        parser.add_argument("--rate", type=int)
        arguments = parser.parse_args()
        asyncio.run(_flood(arguments.flood, arguments.rate))
    else:
        sys.exit(main(run))
