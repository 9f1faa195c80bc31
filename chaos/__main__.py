"""Run fault-injection scenarios and print a report: `python -m chaos --rounds 100`.

The exit code is 1 if a guarantee was broken. The service runs first as one process, and then as a controller and two
storage services. In each scenario, 8 producers, 8 trainer ranks, 4 queue workers and named callers in 6 processes share
a partition. Meanwhile, processes are killed and restarted at random moments. A run prints its seed; `--seed` repeats
its faults: the same targets after the same pauses.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

import tq_service as tq
from chaos.cluster import Cluster, Durability, Topology, without_torch
from chaos.scenario import Report, Scenario, Target
from chaos.table import table_of

_TOPOLOGIES: Final[tuple[Topology, ...]] = ("embedded", "split")
_START_SECONDS: Final = 60.0
_PREFILL_PUT_ROWS: Final = 500
_SHOWN_VIOLATIONS: Final = 50
_CLIENTS_ONLY: Final[tuple[Target, ...]] = ("client",)
_TARGETS: Final[dict[Topology, tuple[Target, ...]]] = {
    "embedded": ("controller", "controller", "twice", "client", "rolling restart"),
    "split": ("controller", "storage", "both", "twice", "client", "rolling restart"),
}


def _say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def _prefill(cluster: Cluster, sample_count: int) -> None:
    if not sample_count:
        return
    with tq.Client(cluster.address, timeout=_START_SECONDS) as client:
        for start in range(0, sample_count, _PREFILL_PUT_ROWS):
            rows = np.arange(start, min(start + _PREFILL_PUT_ROWS, sample_count))
            client.put("prefill", {"x": rows}, custom_meta=[{"version": 0}] * len(rows))
    _say(f"{sample_count:,} samples are stored before the first scenario")


def _prefill_violations(cluster: Cluster, sample_count: int) -> list[str]:
    if not sample_count:
        return []
    with tq.Client(cluster.address, timeout=_START_SECONDS) as client:
        count = client.describe_partition("prefill").live_count
        rows = list(range(0, sample_count, max(1, sample_count // 100)))
        batch = client.get_data("prefill", global_indexes=rows)
        wrong = count != sample_count or batch["x"].tolist() != rows
        return [f"of {sample_count} prefilled samples {count} are left, or some changed"] if wrong else []


def _trial(topology: Topology, given: argparse.Namespace, directory: Path) -> Report:
    rng = random.Random(f"{given.seed} {topology}")
    report = Report()
    targets = _CLIENTS_ONLY if given.durability == "memory" else _TARGETS[topology]
    cluster = Cluster(topology, given.durability, directory)
    try:
        cluster.start()
        with tq.Client(cluster.address, timeout=_START_SECONDS) as client:
            client.put("first", {"x": np.zeros(1)})  # waits until every service is ready
            client.clear_partition("first")
        _prefill(cluster, given.prefill)
        for number, start in enumerate(range(0, given.rounds, given.rounds_per_scenario)):
            scenario = Scenario(
                cluster=cluster,
                name=f"scenario-{number}",
                directory=directory / f"scenario-{number}",
                rng=rng,
                seed=given.seed,
                report=report,
                say=_say,
            )
            if not scenario.run(min(given.rounds_per_scenario, given.rounds - start), given.seconds, targets):
                break
        else:
            report.violations += _prefill_violations(cluster, given.prefill)
        report.violations += [f"log of {line}" for line in cluster.failures()]
    finally:
        cluster.close()
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=100, help="faults for each topology (default: 100)")
    parser.add_argument("--rounds-per-scenario", type=int, default=10, help="faults per partition")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="longest pause between faults in seconds (default: 2)"
    )
    parser.add_argument("--topology", choices=[*_TOPOLOGIES, "all"], default="all", help="how the service runs")
    durabilities: tuple[Durability, ...] = ("memory", "process", "disk")
    parser.add_argument("--durability", choices=durabilities, default="process", help="memory: only clients are killed")
    parser.add_argument(
        "--prefill", type=int, default=0, metavar="SAMPLES", help="samples put before the first scenario"
    )
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="repeats the faults of a run")
    parser.add_argument("--output", type=Path, default=Path("chaos-output"), help="directory for logs and data")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = _options(arguments)
    topologies = _TOPOLOGIES if given.topology == "all" else (given.topology,)
    output = given.output / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-{given.seed}"
    _say(f"seed {given.seed}, durability {given.durability}, logs and data in {output}")
    reports = {}
    for topology in topologies:
        directory = output / topology
        directory.mkdir(parents=True)
        reports[topology] = _trial(topology, given, directory)
    print(table_of(reports))
    broken = [violation for each in reports.values() for violation in each.violations]
    for violation in broken[:_SHOWN_VIOLATIONS]:
        print(f"violation: {violation[:1000]}")
    print(f"{len(broken)} violations; seed {given.seed}; logs and data in {output}")
    return 1 if broken else 0


if __name__ == "__main__":
    without_torch()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the started processes
    sys.exit(main())
