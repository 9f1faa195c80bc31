"""Kills and pauses leading controllers, members of etcd and storage services: `python -m chaos.takeover --rounds 20`.

Three members of etcd, three controllers and two storage services, under the load of `python -m chaos`: 8 producers, 8
ranks, callers by name and leased workers. What is checked is what is checked there, and besides that no controller
answers that was superseded; a process that ends is started again, as by what runs it elsewhere. A program beside them
makes a small change all the time: how long none of them was acknowledged is the pause of a fault. The exit code is 1
for a broken guarantee.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import random
import secrets
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

import tq_service as tq
from chaos.cluster import Cluster, Process, free_ports, wait_until, without_torch
from chaos.etcd import etcd_members
from chaos.scenario import Report, Scenario
from tq_service.testing import COMMAND
from tq_service.v1.controller_service_pb2 import ListPartitionsRequest
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

_CONTROLLERS: Final = ("controller-0", "controller-1", "controller-2")
_STORAGES: Final = ("one", "two")
_TARGETS: Final = ("kill leader", "stop leader", "etcd", "storage", "standby", "kill leader", "stop leader")
_PROBE: Final = "probe"
_START_SECONDS: Final = 60.0
_SUPERSEDED_SECONDS: Final = 20.0
_STALE_CALLS: Final = 8
_FAILED_EXIT_CODE: Final = 70


class ReplicatedCluster(Cluster):
    """Three controllers over three members of etcd, and two storage services."""

    def __init__(self, directory: Path, rng: random.Random, lease_seconds: float) -> None:
        ports = free_ports(6 + len(_CONTROLLERS) + len(_STORAGES), rng)
        etcd_ports = list(zip(ports[:3], ports[3:6], strict=True))
        self._ports = dict(zip((*_CONTROLLERS, *_STORAGES), ports[6:], strict=True))
        self.addresses = {name: f"127.0.0.1:{self._ports[name]}" for name in _CONTROLLERS}
        self.address = ",".join(self.addresses.values())
        self.controller_name = _CONTROLLERS[0]
        self.storage_names = _STORAGES
        journal = "etcd://" + ",".join(f"127.0.0.1:{client}" for client, _ in etcd_ports)
        secret = directory / "secret"  # there before any of them starts
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32) + "\n")
        self.processes = etcd_members(etcd_ports, directory)
        self.etcd_names = tuple(self.processes)
        for name in (*_CONTROLLERS, *_STORAGES):
            flags = {
                "port": str(self._ports[name]),
                "grace-seconds": "2",
                "log-level": "info",
                "internal-secret-file": str(secret),
                "data-dir": str(directory / f"data-{name}"),
            }
            if name in _STORAGES:
                flags |= {"role": "storage", "controller": self.address, "storage-id": name, "max-bytes": "1GiB"}
                flags |= {"put-ttl-seconds": "5"}
            else:
                flags |= {"role": "controller", "journal": journal, "cluster": "chaos"}
                flags |= {"lease-seconds": f"{lease_seconds:g}"}
            command = [*COMMAND, "serve", *(part for flag, value in flags.items() for part in (f"--{flag}", value))]
            self.processes[name] = Process(name, command, directory / f"{name}.log")
        self._is_closing = threading.Event()
        self._paused: set[str] = set()
        self._restarting = threading.Thread(target=self._restart_controllers, daemon=True)
        self.ended: list[tuple[str, int]] = []  # controllers, and the codes with which they ended by themselves

    def start(self) -> None:
        """Start all processes, etcd first, and what starts controllers again."""
        for process in self.processes.values():
            process.start()
        self._restarting.start()

    def _restart_controllers(self) -> None:
        """Start controllers again that have ended."""
        while not self._is_closing.wait(0.05):
            for name in _CONTROLLERS:
                process = self.processes[name]
                code = None if process.running is None else process.running.poll()
                if code is not None and name not in self._paused:
                    self.ended.append((name, code))
                    process.start()

    def leader(self) -> str | None:
        """Return the controller that leads, None where none does."""
        for name, address in self.addresses.items():
            if name in self._paused:
                continue
            with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
                ControllerServiceStub(channel).ListPartitions(ListPartitionsRequest(), timeout=0.5)
                return name
        return None

    def pause(self, name: str) -> None:
        """Stop a process, which stays."""
        self._paused.add(name)
        self.processes[name].send(signal.SIGSTOP)

    def resume(self, name: str) -> int | None:
        """Let a leader that was stopped go on; return the code with which it ends, None where it does not."""
        self.processes[name].send(signal.SIGCONT)
        code = self.processes[name].exit_code(_SUPERSEDED_SECONDS)
        self._paused.discard(name)
        return code

    def dead(self) -> list[str]:
        """Return the processes that ended by themselves and are not started again: none of them may."""
        return [name for name in super().dead() if name not in _CONTROLLERS]

    def failures(self) -> list[str]:
        """Return the lines of the logs of storage services that tell of faults; superseded controllers have some."""
        return [line for line in super().failures() if line.startswith(_STORAGES)]

    def close(self) -> None:
        """Kill what runs."""
        self._is_closing.set()
        if self._restarting.is_alive():
            self._restarting.join()
        for process in self.processes.values():
            process.send(signal.SIGCONT)
            process.end()


class Prober:
    """Makes a small change all the time, in a thread, and notes when each was acknowledged."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.done_at = [time.monotonic()]
        self.count = 0

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with tq.Client(self._address, timeout=_START_SECONDS) as client:
            while not self._stopping.wait(0.01):
                with contextlib.suppress(tq.TqError):
                    client.insert(_PROBE, 1, keys=[f"{self.count}"])
                    self.count += 1
                    self.done_at.append(time.monotonic())

    def pause_since(self, at: float) -> float:
        """Return the longest time without an acknowledged change since a moment."""
        done = [each for each in self.done_at if each >= at]
        before = max(each for each in self.done_at if each < at)
        times = [before, *done, time.monotonic()]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


class TakeoverScenario(Scenario):
    """One partition under load, while leaders and members go."""

    def __init__(self, *, prober: Prober, stop_seconds: float, pauses: dict[str, list[float]], **given: Any) -> None:
        super().__init__(**given)
        self._prober = prober
        self._stop_seconds = stop_seconds
        self._pauses = pauses

    def _inject_fault(self, target: Any) -> None:
        self._report.faults[target] = self._report.faults.get(target, 0) + 1
        cluster: Any = self._cluster
        if not wait_until(lambda: cluster.leader() is not None, _START_SECONDS):
            self._violated(f"no controller leads within {_START_SECONDS:g} s")
            return
        leader = cluster.leader() or ""
        names = {
            "kill leader": leader,
            "stop leader": leader,
            "etcd": self._rng.choice(cluster.etcd_names),
            "storage": self._rng.choice(_STORAGES),
            "standby": self._rng.choice([name for name in _CONTROLLERS if name != leader]),
        }
        name, at = names[target], time.monotonic()
        if target == "stop leader":
            self._found(self._stop(name))
        elif target in {"etcd", "storage"}:
            self._found(iter(cluster.inject_fault([name], signal.SIGKILL)))
        else:
            cluster.processes[name].send(signal.SIGKILL)
        done = self._prober.count
        if not wait_until(lambda: self._prober.count > done + 3, _START_SECONDS):
            self._violated(f"no change is acknowledged within {_START_SECONDS:g} s of {target}")
        pause = self._prober.pause_since(at)
        self._pauses.setdefault(target, []).append(pause)
        self._report.back_seconds.append(pause)
        self._say(f"{self._name}: {target} ({name}): pause {pause:.2f} s")

    def _stop(self, name: str) -> Iterator[str]:
        """Stop the leader, ask it while it is stopped, let it go on: none of the calls may be answered."""
        cluster: Any = self._cluster
        with grpc.insecure_channel(cluster.addresses[name]) as channel:
            stub: Any = ControllerServiceStub(channel)
            stub.ListPartitions(ListPartitionsRequest(), timeout=10)
            cluster.pause(name)
            calls = [
                stub.ListPartitions.future(ListPartitionsRequest(), timeout=self._stop_seconds + 60)
                for _ in range(_STALE_CALLS)
            ]
            time.sleep(self._stop_seconds)
            code = cluster.resume(name)
            if code != _FAILED_EXIT_CODE:
                yield f"{name} was stopped for {self._stop_seconds:g} s, and ended with {code} instead of 70"
            for call in calls:
                if call.exception() is None:
                    yield f"{name} was superseded, and answered a call"

    def _answers(self) -> bool:
        return True


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos.takeover", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=100, help="faults (default: 100)")
    parser.add_argument("--rounds-per-scenario", type=int, default=10, help="faults per partition")
    parser.add_argument("--seconds", type=float, default=4.0, help="longest time between two faults (default: 4)")
    parser.add_argument("--stop-seconds", type=float, default=30.0, help="how long a leader is stopped (default: 30)")
    parser.add_argument("--lease-seconds", type=float, default=5.0, help="of the leader (default: 5)")
    parser.add_argument("--targets", nargs="+", default=list(_TARGETS), choices=sorted(set(_TARGETS)))
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="repeats the faults of a run")
    parser.add_argument("--output", type=Path, default=Path("chaos-output"), help="directory for logs and data")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def _wait_until_ready(address: str) -> None:
    with tq.Client(address, timeout=_START_SECONDS) as client:
        client.put({"x": np.zeros(1)}, partition_id="first")
        client.clear_partition("first")
        client.create_partition(_PROBE)


def _probed_violations(address: str, count: int) -> list[str]:
    with tq.Client(address, timeout=_START_SECONDS) as client:
        found, _ = client.lookup_samples(_PROBE)
        keys = list(found.keys)
        wrong = [
            f"probe {number} was acknowledged and is not there" for number in range(count) if str(number) not in keys
        ]
        return wrong + (["a probe is there twice"] if len(keys) != len(set(keys)) else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    given = _options(arguments)
    output = given.output / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-takeover-{given.seed}"
    output.mkdir(parents=True)
    _say(f"seed {given.seed}, lease {given.lease_seconds:g} s, logs and data in {output}")
    rng, report, pauses = random.Random(given.seed), Report(), {}
    cluster = ReplicatedCluster(output, rng, given.lease_seconds)
    try:
        cluster.start()
        _wait_until_ready(cluster.address)
        with Prober(cluster.address) as prober:
            for number, start in enumerate(range(0, given.rounds, given.rounds_per_scenario)):
                scenario = TakeoverScenario(
                    prober=prober,
                    stop_seconds=given.stop_seconds,
                    pauses=pauses,
                    cluster=cluster,
                    name=f"scenario-{number}",
                    directory=output / f"scenario-{number}",
                    rng=rng,
                    seed=given.seed,
                    report=report,
                    say=_say,
                )
                rounds = min(given.rounds_per_scenario, given.rounds - start)
                if not scenario.run(rounds, given.seconds, given.targets):
                    break
        report.violations += _probed_violations(cluster.address, prober.count)
        report.violations += [f"log of {line}" for line in cluster.failures()]
    finally:
        cluster.close()
    _print_report(report, pauses, cluster, prober.count)
    print(f"{len(report.violations)} violations; seed {given.seed}; logs and data in {output}")
    return 1 if report.violations else 0


def _print_report(report: Report, pauses: dict[str, list[float]], cluster: ReplicatedCluster, probe_count: int) -> None:
    for target, seconds in sorted(pauses.items()):
        print(
            f"{target:12} {len(seconds):4} times: pause {statistics.median(seconds):6.2f} s median, "
            f"{max(seconds):6.2f} s most"
        )
    codes = [code for _, code in cluster.ended]
    print(
        f"{report.acknowledged_count:,} samples acknowledged, {report.claim_count:,} claims, {report.replayed_count:,} "
        f"replayed, {report.read_count:,} read, {probe_count:,} probes; controllers ended by themselves: "
        f"{codes.count(_FAILED_EXIT_CODE)}, killed: {codes.count(-signal.SIGKILL)}, "
        f"else: {[code for code in codes if code not in (_FAILED_EXIT_CODE, -signal.SIGKILL)]}"
    )
    for violation in report.violations[:50]:
        print(f"violation: {violation[:1000]}")


if __name__ == "__main__":
    without_torch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    sys.exit(main())
