"""How much memory does an idle server take, and how soon is it healthy?

Compared with a Python process that imports grpc and numpy and does nothing, which is the lower limit.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness import Options, interleave, main, median
from benchmarks.report import Aim, Report
from tq_service.testing import ServiceProcess

_BARE = "import grpc.aio, numpy, sys; print('there', flush=True); sys.stdin.read()"
_SETTLED_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """One start: seconds until it was ready, and its resident memory in MB (10^6 bytes) soon after."""

    seconds: float
    resident_mb: float


def _server() -> _Started:
    started = time.perf_counter()
    with ServiceProcess() as process, grpc.insecure_channel(process.address) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
        seconds = time.perf_counter() - started
        time.sleep(_SETTLED_SECONDS)
        return _Started(seconds=seconds, resident_mb=_resident_mb(process.pid))


def _bare() -> _Started:
    started = time.perf_counter()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _BARE], stdin=pipe, stdout=pipe, text=True) as process:
        if process.stdout is not None:
            process.stdout.readline()
        seconds = time.perf_counter() - started
        resident_mb = _resident_mb(process.pid)
        process.communicate()
    return _Started(seconds=seconds, resident_mb=resident_mb)


def _resident_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6


def run(options: Options) -> Report:
    """Measure."""
    starts = interleave({"server": _server, "Python with grpc and numpy": _bare}, options.repeats)
    rows = [
        [name, median([start.resident_mb for start in repeats]), median([start.seconds for start in repeats])]
        for name, repeats in starts.items()
    ]
    return Report(
        name="idle_server",
        question="How much memory does an idle server take, and how soon is it healthy?",
        columns=["process", "resident, MB", "start to healthy, s"],
        rows=rows,
        notes=["MB are 10^6 bytes", "start: of the process, until a health check is answered with SERVING"],
        aims=[
            Aim(what="idle server, MB", measured=rows[0][1], wanted=80.0, at_least=False),
            Aim(what="start to healthy, s", measured=rows[0][2], wanted=1.0, at_least=False),
        ],
    )


if __name__ == "__main__":
    sys.exit(main(run))
