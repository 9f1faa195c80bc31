"""Runs all benchmarks, each in a separate process, and writes `benchmarks/results/<date>.md` with its plots."""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.machine import describe_machine
from benchmarks.peer_environment import PEER_NAMES
from benchmarks.plots import draw
from benchmarks.report import Report, aim_text

BENCHMARKS = (
    "claims_per_second",
    "stages",
    "claim_cost_by_partition_size",
    "latency",
    "waiting_clients",
    "commits_per_second",
    "insert_rate",
    "admitted_puts",
    "named_puts",
    "bulk_by_column",
    "bulk_by_size",
    "bulk_by_clients",
    "bulk_by_claims",
    "bulk_by_storages",
    "same_host",
    "neoproto",
    "data_loader",
    "context_parallel",
    "gpu_by_put",
    "gpu_by_get",
    "gpu_by_loader",
    "kv_calls",
    "memory",
    "put_memory",
    "memory_bounds",
    "back_pressure",
    "refused_flood",
    "watchers",
    "idle_server",
    "durability_cost",
    "object_stores",
    "metrics_cost",
    "recording_cost",
    "restart",
    "checkpoint_pause",
    "balancing",
    "packing",
    "planning_delay",
    "loop_stops",
)
BY_OPTION = re.compile("(bulk|gpu)_by_(.*)")  # a benchmark with its option --by
RESULTS = ROOT / "benchmarks" / "results"


def _run(name: str, flags: Sequence[str]) -> Report:
    by = BY_OPTION.fullmatch(name)
    module = [name] if by is None else [by[1], "--by", by[2]]
    command = [sys.executable, "-m", f"benchmarks.{module[0]}", *module[1:], "--json", *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Report.from_json(done.stdout)


def _without(peers: Iterable[str]) -> list[str]:
    return [flag for name in sorted(peers) for flag in ("--without", name)]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _summary(reports: Sequence[Report]) -> list[str]:
    """Return the lines that name missed aims, and aims that could not be measured."""
    aims = [(report.name, aim) for report in reports for aim in report.aims]
    lines: list[str] = []
    for heading, met in (("Missed aims:", False), ("Aims that could not be measured:", None)):
        found = [f"- {name}: {aim_text(aim)}" for name, aim in aims if aim.met is met]
        lines += [heading, "", *found, ""] if found else []
    return lines or ["All aims are met.", ""]


def _write(
    reports: Sequence[Report], machine: dict[str, str], flags: Sequence[str], directory: Path, date: str
) -> Path:
    plots = directory / date
    plots.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# Benchmarks of {date}",
        "",
        "Each section can run separately: `python -m benchmarks <its name>`.",
        "",
    ]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in machine.items()), ""]
    lines += [f"Command: `{' '.join(['python -m benchmarks', *flags])}`", ""]
    lines += _summary(reports)
    for report in reports:
        for plot in report.plots:
            draw(plot, plots)
        lines.append(report.to_markdown(date))
    path = directory / f"{date}.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    return path


def main() -> int:
    """Run the named benchmarks, or all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run: {', '.join(BENCHMARKS)}; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="a little of everything, to check that it works")
    parser.add_argument("--repeats", type=int, help="how often each case is measured")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the table and the plots")
    parser.add_argument("--without", action="append", default=[], choices=PEER_NAMES, help="peer to leave out")
    given = parser.parse_args()
    if unknown := set(given.names) - set(BENCHMARKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(BENCHMARKS)}")
    flags = [*(["--quick"] if given.quick else []), *(["--repeats", str(given.repeats)] if given.repeats else [])]
    without = set(given.without)
    machine = {**describe_machine(), "commit": _commit()}
    reports, failed = [], []
    for name in given.names or BENCHMARKS:
        started = time.monotonic()
        try:
            report = _run(name, [*flags, *_without(without)])
        except subprocess.CalledProcessError as error:
            print(f"{name} failed with exit code {error.returncode}", file=sys.stderr)
            failed.append(name)
            continue
        print(f"{report.to_text()}\n({name}: {time.monotonic() - started:.0f} s)\n", flush=True)
        reports.append(report)
        without.update(report.without)  # do not try again to install an unavailable peer
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    if reports:
        chosen = [*flags, *_without(given.without), *given.names]
        print(f"written: {_write(reports, machine, chosen, given.results, date)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
