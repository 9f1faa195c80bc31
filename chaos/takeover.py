"""Kill, stop and cut off the processes of a cluster: `python -m chaos.takeover --rounds 20`.

The cluster has three etcd members, three controllers and three storage services with a mirror, each on its own host in
a network of namespaces. The load is that of `python -m chaos`: 8 producers, 8 ranks, named callers and leased workers.
The checks are the same, with two additions: no superseded controller answers, and the puts of a lost storage service
can be read from the others. Two threads measure pauses: one makes small changes continuously, and the other reads
samples from all storage services. The exit code is 1 if a guarantee was broken.

Faults: a leader, a standby, an etcd member or a storage service is killed; stopped for 30 s and resumed; or cut off
from the others for 12 s, with packets dropped and neither side notified. Another fault cuts all etcd members off from
each other for twice as long. Afterwards, the cluster must resume without having declared a storage service lost.
Storage services keep puts in memory and in the mirror: a killed one loses all its bytes.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import grpc
import numpy as np

import tq_service as tq
from chaos.cluster import wait_until, without_torch
from chaos.hosts import Network, in_own_network
from chaos.probes import ChangeProbe, ReadProbe
from chaos.replicated import CONTROLLERS, FAILED_EXIT_CODE, STORAGES, ReplicatedCluster, answers
from chaos.scenario import Report, Scenario
from tq_service.v1.controller_service_pb2 import ListPartitionsRequest
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

_START_SECONDS: Final = 60.0
_SUPERSEDED_SECONDS: Final = 30.0
_STALE_CALLS: Final = 8
_SHOWN_VIOLATIONS: Final = 50
_MOST_READ_PAUSE_SECONDS: Final = 10.0
_HEARD_SECONDS: Final = 8.0  # a silent storage service would be declared lost within this time
_ETCD_OUTAGE: Final = "part all etcd"
_TARGETS: Final = (
    "kill leader",
    "stop leader",
    "cut leader from etcd",
    "cut leader from all but clients",
    "cut leader from all",
    "kill standby",
    "kill etcd",
    "stop etcd",
    "cut etcd",
    _ETCD_OUTAGE,
    "lose storage",
    "kill storage",
    "stop storage",
    "cut storage",
)


class TakeoverScenario(Scenario):
    """One partition under load while parts of the cluster fail."""

    _replayed_at_end: ClassVar[int | None] = 300  # each is a write to etcd, or waits for earlier ones

    def __init__(
        self,
        *,
        changes: ChangeProbe,
        reads: ReadProbe,
        stop_seconds: float,
        cut_seconds: float,
        lease_seconds: float,
        pauses: dict[str, list[tuple[float, float]]],
        cluster: ReplicatedCluster,
        **given: Any,
    ) -> None:
        super().__init__(cluster=cluster, **given)
        self._parts = cluster
        self._changes = changes
        self._reads = reads
        self._stop_seconds = stop_seconds
        self._cut_seconds = cut_seconds
        self._lease_seconds = lease_seconds
        self._pauses = pauses

    def _inject_fault(self, target: Any) -> None:
        self._report.faults[target] = self._report.faults.get(target, 0) + 1
        give_up_at = time.monotonic() + _START_SECONDS
        while (leader := self._parts.leader()) is None:  # on a busy machine a leader may answer late
            if time.monotonic() > give_up_at:
                self._violated(f"no controller leads within {_START_SECONDS:g} s")
                return
            time.sleep(0.02)
        self._reads.renew()
        name = self._rng.choice(self._candidates(target, leader))
        at, change_count = time.monotonic(), self._changes.count
        self._faults()[target.split()[0]](target, name)
        over_at = time.monotonic()
        if not wait_until(lambda: self._changes.count > change_count + 3, _START_SECONDS):
            self._violated(f"no change is acknowledged within {_START_SECONDS:g} s of {target} ({name})")
        if not wait_until(lambda: self._reads.has_read_all_since(over_at), _START_SECONDS):
            self._violated(f"not all samples are read within {_START_SECONDS:g} s of {target} ({name})")
        pauses = self._changes.pause_since(at), self._reads.pause_since(at)
        self._pauses.setdefault(target, []).append(pauses)
        self._report.back_seconds.append(max(pauses))
        self._say(f"{self._name}: {target} ({name}): pauses of changes {pauses[0]:.2f} s, of reads {pauses[1]:.2f} s")

    def _candidates(self, target: str, leader: str) -> Sequence[str]:
        if "leader" in target:
            return [leader]
        if "standby" in target:
            return [name for name in CONTROLLERS if name != leader]
        return self._parts.etcd_names if "etcd" in target else STORAGES

    def _faults(self) -> dict[str, Callable[[str, str], None]]:
        return {"kill": self._kill, "lose": self._lose, "stop": self._stop, "cut": self._cut, "part": self._part}

    def _kill(self, target: str, name: str) -> None:
        """Kill a process, which is restarted at once; a storage service restarts empty."""
        if name in self._parts.etcd_names:
            self._found(iter(self._parts.inject_fault([name], signal.SIGKILL)))
            return
        taken_count = self._parts.taken_over_count(name)
        self._parts.processes[name].send(signal.SIGKILL)
        if name in STORAGES:
            self._wait_until_taken_over(name, taken_count)

    def _lose(self, _: str, name: str) -> None:
        """Kill a storage service for good; an empty one replaces it once another storage service has its puts."""
        taken_count = self._parts.taken_over_count(name)
        self._parts.held.add(name)
        self._parts.processes[name].send(signal.SIGKILL)
        self._wait_until_taken_over(name, taken_count)
        self._parts.held.discard(name)

    def _wait_until_taken_over(self, name: str, taken_count: int) -> None:
        if not wait_until(lambda: self._parts.taken_over_count(name) > taken_count, _START_SECONDS, 0.2):
            self._violated(f"the puts of {name} were not taken over within {_START_SECONDS:g} s")

    def _stop(self, _: str, name: str) -> None:
        """Stop a process, and resume it once a leader has been superseded or a storage service taken over."""
        taken_count = self._parts.taken_over_count(name) if name in STORAGES else 0
        self._parts.held.add(name)
        calls: list[Any] = []
        channel = grpc.insecure_channel(self._parts.addresses.get(name, self._parts.address))
        with channel:
            if name in CONTROLLERS:
                stub: Any = ControllerServiceStub(channel)
                stub.ListPartitions(ListPartitionsRequest(), timeout=10)
            self._parts.processes[name].send(signal.SIGSTOP)
            if name in CONTROLLERS:  # calls that arrive while it is stopped
                timeout = self._stop_seconds + _START_SECONDS
                calls = [
                    stub.ListPartitions.future(ListPartitionsRequest(), timeout=timeout) for _ in range(_STALE_CALLS)
                ]
            time.sleep(self._stop_seconds)
            if name in STORAGES:
                self._wait_until_taken_over(name, taken_count)
            self._parts.processes[name].send(signal.SIGCONT)
            if name not in self._parts.etcd_names:
                self._expect_its_end(name)
            for call in calls:
                if call.exception() is None:
                    self._violated(f"{name} was superseded, but answered a call")
        self._parts.held.discard(name)

    def _cut(self, target: str, name: str) -> None:
        """Cut a process off from others and reconnect it."""
        others = self._cut_from(target, name)
        taken_count = self._parts.taken_over_count(name) if name in STORAGES else 0
        self._parts.held.add(name)
        self._parts.cut(name, others)
        try:
            begun = time.monotonic()
            if name in CONTROLLERS and "" not in others:
                time.sleep(self._lease_seconds + 0.5)
                while time.monotonic() < begun + self._cut_seconds:
                    if answers(self._parts.addresses[name]):
                        self._violated(f"{name} was cut off from etcd for longer than its lease, but answered a call")
                    time.sleep(0.2)
            time.sleep(max(0.0, begun + self._cut_seconds - time.monotonic()))
            if name in STORAGES:
                self._wait_until_taken_over(name, taken_count)
        finally:
            self._parts.mend(name, others)
        if name not in self._parts.etcd_names:
            self._expect_its_end(name)
        self._parts.held.discard(name)

    def _part(self, _: str, __: str) -> None:
        """Cut all etcd members off from each other, so that none of them can change anything."""
        ended_count, names = len(self._parts.ended), self._parts.etcd_names
        pairs = list(itertools.combinations(names, 2))
        for one, other in pairs:
            self._parts.cut(one, [other])
        try:
            time.sleep(2 * self._cut_seconds)
        finally:
            for one, other in pairs:
                self._parts.mend(one, [other])
        wait_until(lambda: self._parts.leader() is not None, _START_SECONDS)
        time.sleep(_HEARD_SECONDS)
        for name, code in self._parts.ended[ended_count:]:
            if name in STORAGES:
                self._violated(f"{name} ended with {code}, although only etcd was unavailable")

    def _cut_from(self, target: str, name: str) -> Sequence[str]:
        if name in STORAGES:
            return CONTROLLERS
        others = [each for each in self._parts.processes if each != name]
        if target == "cut etcd":
            return [each for each in self._parts.etcd_names if each != name]
        if target == "cut leader from etcd":
            return self._parts.etcd_names
        return [*others, ""] if target == "cut leader from all" else others

    def _expect_its_end(self, name: str) -> None:
        code = self._parts.processes[name].exit_code(_SUPERSEDED_SECONDS)
        if code != FAILED_EXIT_CODE:
            what = "superseded" if name in CONTROLLERS else "taken over"
            self._violated(f"{name} was {what}, but ended with {code} instead of {FAILED_EXIT_CODE}")

    def _answers(self) -> bool:
        return True

    def _leaks(self) -> Any:
        """Yield storage services that still have bytes. Since bytes move between services, all must be empty."""
        self._reads.clear()
        for name in STORAGES:
            if not wait_until(lambda name=name: self._stored(name) == (0, 0), _START_SECONDS, 0.2):  # type: ignore[misc]
                yield f"{name} has {self._stored(name)} bytes and puts after everything was cleared"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos.takeover", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=100, help="faults (default: 100)")
    parser.add_argument("--rounds-per-scenario", type=int, default=10, help="faults per partition")
    parser.add_argument("--seconds", type=float, default=3.0, help="longest pause between faults (default: 3)")
    parser.add_argument("--stop-seconds", type=float, default=30.0, help="duration of a stop (default: 30)")
    parser.add_argument("--cut-seconds", type=float, default=12.0, help="duration of a cut (default: 12)")
    parser.add_argument("--lease-seconds", type=float, default=5.0, help="lease of the leader (default: 5)")
    parser.add_argument("--mirror", metavar="URL", help="object store of the mirror (default: a shared directory)")
    parser.add_argument("--targets", nargs="+", default=list(_TARGETS), choices=_TARGETS)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="repeats the faults of a run")
    parser.add_argument("--output", type=Path, default=Path("chaos-output"), help="directory for logs and data")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def _wait_until_ready(address: str) -> None:
    with tq.Client(address, timeout=_START_SECONDS) as client:
        client.put("first", {"x": np.zeros(1)})
        client.clear_partition("first")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = _options(arguments)
    output = (given.output / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-takeover-{given.seed}").resolve()
    output.mkdir(parents=True)
    _say(f"seed {given.seed}, lease {given.lease_seconds:g} s, logs and data in {output}")
    rng, report = random.Random(given.seed), Report()
    pauses: dict[str, list[tuple[float, float]]] = {}
    with Network() as network:
        cluster = ReplicatedCluster(network, output, given.lease_seconds, given.mirror)
        try:
            cluster.start()
            _wait_until_ready(cluster.address)
            with ChangeProbe(cluster.address) as changes, ReadProbe(cluster.address) as reads:
                for number, start in enumerate(range(0, given.rounds, given.rounds_per_scenario)):
                    scenario = TakeoverScenario(
                        changes=changes,
                        reads=reads,
                        stop_seconds=given.stop_seconds,
                        cut_seconds=given.cut_seconds,
                        lease_seconds=given.lease_seconds,
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
                report.violations += changes.violations() + reads.violations
            report.violations += [f"log of {line}" for line in cluster.failures()] + cluster.wrong_ends()
        finally:
            cluster.close()
    _print_report(report, pauses, cluster, changes.count, given.lease_seconds + 1)
    print(f"{len(report.violations)} violations; seed {given.seed}; logs and data in {output}")
    return 1 if report.violations else 0


def _print_report(
    report: Report,
    pauses: dict[str, list[tuple[float, float]]],
    cluster: ReplicatedCluster,
    change_count: int,
    most_change_pause: float,
) -> None:
    print(f"{'':32} rounds   changes: median   most     reads: median   most")
    for target, both in sorted(pauses.items()):
        columns = [(statistics.median(column), max(column)) for column in zip(*both, strict=True)]
        (change_median, change_most), (read_median, read_most) = columns
        print(
            f"{target:32} {len(both):6} {change_median:17.2f} {change_most:6.2f} {read_median:17.2f} {read_most:6.2f}"
        )
    every = [pair for target, both in pauses.items() if target != _ETCD_OUTAGE for pair in both]
    long_changes = sum(change > most_change_pause for change, _ in every)
    long_reads = sum(read > _MOST_READ_PAUSE_SECONDS for _, read in every)
    print(f"pauses of changes over {most_change_pause:g} s: {long_changes}; of reads over 10 s: {long_reads}")
    codes = [code for _, code in cluster.ended]
    print(
        f"{report.acknowledged_count:,} samples acknowledged, {report.claim_count:,} claims, {report.replayed_count:,} "
        f"replayed, {report.read_count:,} read, {change_count:,} changes; processes killed: "
        f"{codes.count(-signal.SIGKILL)}, ended as superseded or taken over: {codes.count(FAILED_EXIT_CODE)}"
    )
    for violation in report.violations[:_SHOWN_VIOLATIONS]:
        print(f"violation: {violation[:1000]}")


if __name__ == "__main__":
    in_own_network("chaos.takeover", sys.argv[1:])
    without_torch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the started processes
    sys.exit(main())
