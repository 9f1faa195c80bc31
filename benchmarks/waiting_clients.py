"""What do thousands of waiting clients cost, and how soon are they served?

Four client processes with four connections each run up to 8,192 clients that claim one sample after another. As queue
workers: one put wakes all, or small puts each wake as many as they can serve. As ranks of one task: a batch has one
sample for each. For comparison, 64 clients in the same processes do the same at an otherwise idle server.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import grpc
import numpy as np
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tq_service as tq
from benchmarks.harness import Options, interleave, main, median, p50_p99
from benchmarks.report import Aim, Cell, Plot, Report
from benchmarks.waiting_crowd import CONNECTIONS_A_PROCESS, PROCESS_COUNT, CrowdProcesses, running_crowd
from tq_service.testing import ServiceProcess

CLIENT_COUNTS = (1_024, 4_096, 8_192)
CLIENT_COUNTS_QUICK = (128,)
FEW = 64
_CLAIMS_OF_FEW = 1_024
_TRICKLE, _TRICKLE_PAUSE_SECONDS = [8] * 32, 0.01
_LONGEST_SECONDS = 120.0
_POLL_SECONDS = 0.02
_LEAST_RATIO = 0.5
_PROBE_PAUSE_SECONDS = 0.002
_PROBE_TIMEOUT_SECONDS = 60.0

_WORKERS, _RANKS = "queue workers", "ranks"
_FEW, _WAKES_ALL, _OTHERS = "64 alone", "one put wakes all", "64 others claim"
_TRICKLE_FEW, _TRICKLE_MANY = "64 alone, small puts", "small puts"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """Results of one load: claims per second, seconds from put to receipt, and seconds of its health checks."""

    rate: float
    handed_out: list[float]
    health: list[float]


class _HealthProbe:
    """Makes health checks in a thread, on a separate connection."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = health_pb2_grpc.HealthStub(self._channel)
        self._check()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    @contextmanager
    def running(self) -> Iterator[list[float]]:
        """Check until the block ends; the list then has the seconds of each check."""
        seconds: list[float] = []
        stopping = threading.Event()

        def probe() -> None:
            while not stopping.wait(_PROBE_PAUSE_SECONDS):
                seconds.append(self._check())

        thread = threading.Thread(target=probe, name="health-probe")
        thread.start()
        try:
            yield seconds
        finally:
            stopping.set()
            thread.join()

    def _check(self) -> float:
        started = time.perf_counter()
        self._stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_SECONDS)
        return time.perf_counter() - started


class _Line:
    """Clients that wait for the samples of one partition."""

    def __init__(self, server: ServiceProcess, crowd: CrowdProcesses, name: str, count: int, *, ranked: bool) -> None:
        self._crowd = crowd
        self._name = name
        self._producer = tq.Client(server.address)
        self._probe = _HealthProbe(server.address)
        self._produced = 0
        self.count = count
        self._producer.create_partition(name)
        crowd.join(server.address, name, count, ranked=ranked)
        self.wait_until_waiting()

    def close(self) -> None:
        """Seal the partition and check that every client sees the end."""
        self._producer.seal_partition(self._name)
        _until(lambda: self._crowd.ended_count(self._name) == self.count, f"{self.count} clients at their end")
        self._producer.clear_partition(self._name)
        self._probe.close()
        self._producer.close()

    def wait_until_waiting(self) -> None:
        """Return when all clients wait."""

        def all_wait() -> bool:
            return [task.waiting_count for task in self._producer.describe_partition(self._name).tasks] == [self.count]

        _until(all_wait, f"{self.count} clients waiting")

    def serve(self, put_sizes: Sequence[int], pause_seconds: float = 0.0) -> _Served:
        """Put samples; return when each has been delivered once and all clients wait again."""
        first, total = self._produced, sum(put_sizes)
        self._produced += total
        starts = []
        with self._probe.running() as health:
            for size in put_sizes:
                starts += [time.monotonic()] * size
                self._producer.put(self._name, {"x": np.arange(size)})
                time.sleep(pause_seconds)
            _until(lambda: self._crowd.got_count(self._name) >= total, f"{total} samples handed out")
        got = sorted(self._crowd.take(self._name))
        if [index for index, _ in got] != list(range(first, self._produced)):
            raise RuntimeError(f"{total} samples were put; got {len(got)}, some lost or delivered twice")
        self.wait_until_waiting()
        seconds = time.monotonic() - starts[0]
        latencies = [when - start for start, (_, when) in zip(starts, got, strict=True)]
        return _Served(rate=total / seconds, handed_out=latencies, health=health)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {_LONGEST_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def _resident_bytes(pids: Sequence[int]) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


def _loads(few: _Line, beside: _Line, many: _Line, *, ranked: bool) -> dict[str, Callable[[], _Served]]:
    """Return the loads to measure in turn, by their name in the table; `few` are at a separate server."""
    claims_of_few = min(many.count, _CLAIMS_OF_FEW)
    cases = {
        _FEW: partial(few.serve, [claims_of_few]),
        _WAKES_ALL: partial(many.serve, [many.count]),
        _OTHERS: partial(beside.serve, [claims_of_few]),
    }
    if not ranked:  # small puts would not fill a batch of all ranks
        cases |= {
            _TRICKLE_FEW: partial(few.serve, _TRICKLE, _TRICKLE_PAUSE_SECONDS),
            _TRICKLE_MANY: partial(many.serve, _TRICKLE, _TRICKLE_PAUSE_SECONDS),
        }
    return cases


def _measure(kind: str, count: int, options: Options) -> list[list[Cell]]:
    """Return the rows of one crowd: `count` clients of a kind."""
    ranked = kind == _RANKS
    with ServiceProcess() as calm, ServiceProcess() as crowded, running_crowd() as crowd:
        few = _Line(calm, crowd, "few", FEW, ranked=ranked)
        beside = _Line(crowded, crowd, "beside", FEW, ranked=ranked)
        servers, clients = _resident_bytes([crowded.pid]), _resident_bytes(crowd.pids)
        many = _Line(crowded, crowd, "many", count, ranked=ranked)
        memory = [
            (_resident_bytes([crowded.pid]) - servers) / count / 1e3,
            (_resident_bytes(crowd.pids) - clients) / count / 1e3,
        ]
        served = interleave(_loads(few, beside, many, ranked=ranked), options.repeats)
        for line in (few, beside, many):
            line.close()
    rows: list[list[Cell]] = []
    for name, each in served.items():
        waiting = FEW if name in (_FEW, _TRICKLE_FEW) else count
        is_paced = name in (_TRICKLE_FEW, _TRICKLE_MANY)
        rate = None if is_paced else median([one.rate for one in each])
        ratios = [one.rate / few.rate for one, few in zip(each, served[_FEW], strict=True)]
        ratio = None if is_paced else median(ratios)
        health = [p50_p99([one.health for one in each])[1], 1e3 * median([max(one.health) for one in each])]
        handed_out = p50_p99([one.handed_out for one in each])
        of_client = memory if name == _WAKES_ALL else [None, None]
        rows.append([kind, waiting, name, rate, ratio, *handed_out, *health, *of_client])
    return rows


def _report(rows: list[list[Cell]], counts: Sequence[int]) -> Report:
    by_load = {(row[0], row[1], row[2]): row for row in rows}
    woken = {count: by_load[_WORKERS, count, _WAKES_ALL] for count in counts}
    aims = [
        Aim(what=f"claims/s while {counts[-1]:,} {kind} are served, of those of {FEW}",
            measured=float(by_load[kind, counts[-1], _WAKES_ALL][4] or 0), wanted=_LEAST_RATIO)
        for kind in (_WORKERS, _RANKS)
    ]  # fmt: skip
    return Report(
        name="waiting_clients",
        question="What do thousands of waiting clients cost, and how soon are they served?",
        columns=[
            "clients", "waiting", "load", "claims/s", "of 64's", "put → handed out p50, ms", "p99, ms",
            "health check p99, ms", "longest, ms", "KB a client: server", "client",
        ],
        rows=rows,
        notes=[
            f"{PROCESS_COUNT} client processes with {CONNECTIONS_A_PROCESS} connections each",
            "every client claims one sample after another",
            "every sample was delivered once, and every client saw the end",
            "claims/s: until all samples are delivered and all clients wait again",
            f"of 64's: 64 clients of the same processes at a separate server take {_CLAIMS_OF_FEW:,} samples",
            f"small puts: {len(_TRICKLE)} of {_TRICKLE[0]} samples, one each {1e3 * _TRICKLE_PAUSE_SECONDS:g} ms",
            "health checks run all the time, on a separate connection",
        ],
        aims=aims,
        plots=[
            Plot(
                name="waiting_clients",
                title=f"Claims per second of many clients, of those of {FEW}",
                x_label="waiting queue workers",
                y_label="ratio",
                series={"one put wakes all": [(count, float(row[4] or 0)) for count, row in woken.items()]},
                log_x=True,
            )
        ],
    )  # fmt: skip


def run(options: Options) -> Report:
    """Measure."""
    counts = CLIENT_COUNTS_QUICK if options.quick else CLIENT_COUNTS
    rows = [row for count in counts for row in _measure(_WORKERS, count, options)]
    rows += _measure(_RANKS, counts[-1], options)
    return _report(rows, counts)


if __name__ == "__main__":
    sys.exit(main(run))
