"""Does the service stay as small as it was, over an hour's worth of put, claim and clear compressed into five minutes?

    python -m benchmarks.soak --seconds 300 --mode memory --mode process

The time settings of the service, such as how long answers are kept for retries, are shortened like the hour. Resident
memory, open files, threads and disk of the service are sampled all the time. They count as flat if the last third of
the time has on average no more than the middle third; the first third is for warming up.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

import tq_service as tq
from benchmarks import soak_load
from benchmarks.harness import run_async
from benchmarks.machine import describe_machine
from benchmarks.plots import draw
from benchmarks.report import Aim, Cell, Plot, Report
from tq_service.testing import ServiceProcess

MODES = ("memory", "process", "disk")
RESULTS = Path(__file__).parent / "results"
_HOUR_SECONDS = 3_600.0
_RECORD_SECONDS = 600.0
_PUT_TTL_SECONDS = 300.0
SAMPLING_COUNT = 90
_MOST_GROWTH = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The resources of the service at one moment.

    Attributes:
        seconds: time since the start.
        resident_mb: resident memory, in 10^6 bytes.
        open_files: number of file descriptors.
        threads: number of threads.
        disk_mb: size of the data directory, in 10^6 bytes.
    """

    seconds: float
    resident_mb: float
    open_files: float
    threads: float
    disk_mb: float


MEASURES = {
    "resident_mb": "resident memory, MB",
    "open_files": "open files",
    "threads": "threads",
    "disk_mb": "disk, MB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The samples of one mode over time."""

    mode: str
    samples: Sequence[Sample]
    step_count: int
    sample_count: int

    def thirds(self, measure: str) -> tuple[float, float, float]:
        """Return the means of a measure over the three thirds of the time."""
        values = [getattr(sample, measure) for sample in self.samples]
        bounds = [round(len(values) * part / 3) for part in range(4)]
        first, middle, last = (sum(values[start:end]) / (end - start) for start, end in pairwise(bounds))
        return first, middle, last


def _disk_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # just replaced by a newer file
            continue
    return total


async def _sample(process: psutil.Process, directory: Path, seconds: float, samples: list[Sample]) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    for number in range(1, SAMPLING_COUNT + 1):
        await asyncio.sleep(started + seconds * number / SAMPLING_COUNT - loop.time())
        samples.append(
            Sample(
                seconds=loop.time() - started,
                resident_mb=process.memory_info().rss / 1e6,
                open_files=process.num_fds(),
                threads=process.num_threads(),
                disk_mb=_disk_bytes(directory) / 1e6,
            )
        )


@contextmanager
def _server(mode: str, directory: Path, seconds: float) -> Iterator[ServiceProcess]:
    shorter = min(1.0, seconds / _HOUR_SECONDS)
    times = (
        "--request-record-seconds",
        str(_RECORD_SECONDS * shorter),
        "--put-ttl-seconds",
        str(_PUT_TTL_SECONDS * shorter),
    )
    kept = () if mode == "memory" else ("--data-dir", str(directory), "--durability", mode)
    with ServiceProcess(*times, *kept) as process:
        yield process


def soak(mode: str, seconds: float) -> Course:
    """Run a service in a mode under load for some seconds."""
    with tempfile.TemporaryDirectory(prefix="tq-soak-") as name, _server(mode, Path(name), seconds) as server:

        async def run() -> Course:
            samples: list[Sample] = []
            async with tq.AsyncClient(server.address, timeout=60.0) as client:
                load = soak_load.Load(client)
                sampling = _sample(psutil.Process(server.pid), Path(name), seconds, samples)
                await asyncio.gather(load.run(seconds), sampling)
            return Course(mode=mode, samples=samples, step_count=load.step_count, sample_count=load.sample_count)

        return run_async(run())


def _plot(courses: Sequence[Course], attribute: str, measure: str) -> Plot:
    """Return the plot of a measure over time, in the modes that have it."""
    return Plot(
        name=f"soak-{attribute.replace('_', '-')}",
        title=measure,
        x_label="seconds",
        y_label=measure,
        series={
            course.mode: [(sample.seconds, getattr(sample, attribute)) for sample in course.samples]
            for course in courses
            if any(getattr(sample, attribute) for sample in course.samples)
        },
    )


def report(courses: Sequence[Course], seconds: float) -> Report:
    """Return the table, the aims and the plots of the results."""
    rows: list[list[Cell]] = []
    aims = []
    for course in courses:
        for attribute, measure in MEASURES.items():
            first, middle, last = course.thirds(attribute)
            if not middle:
                continue  # memory mode uses no disk
            rows.append([course.mode, measure, first, middle, last, last / middle])
            aims.append(
                Aim(what=f"{measure}, durability {course.mode}: last third / middle third", measured=last / middle,
                    wanted=_MOST_GROWTH, at_least=False)
            )  # fmt: skip
    return Report(
        name="soak",
        question="Does the service stay as small as it was, over an hour's worth of put, claim and clear?",
        columns=["durability", "what", "first third", "middle third", "last third", "last / middle"],
        rows=rows,
        notes=[
            f"{seconds:g} s each; the service's times are shortened likewise: answers are kept for retries for "
            f"{_RECORD_SECONDS * min(1.0, seconds / _HOUR_SECONDS):.3g} s instead of {_RECORD_SECONDS:g}",
            *(
                f"{course.mode}: {course.step_count:,} steps of {soak_load.SAMPLES_OF_A_STEP} samples, each in  "
                f"a separate partition; {course.sample_count:,} samples put, claimed, fetched and cleared"
                for course in courses
            ),
            f"a step: {soak_load.PRODUCER_COUNT} producers, {soak_load.RANK_COUNT} ranks, a reward worker with leases; "
            f"{soak_load.STEPS_AT_ONCE} steps at once; and a long-lived partition that is cleared sample by sample",
        ],
        aims=aims,
        plots=[plot for attribute, measure in MEASURES.items() if (plot := _plot(courses, attribute, measure)).series],
    )


def write(found: Report, directory: Path, date: str) -> Path:
    """Write `<directory>/<date>-soak.md` and its plots; return the path."""
    plots = directory / f"{date}-soak"
    plots.mkdir(parents=True, exist_ok=True)
    for plot in found.plots:
        draw(plot, plots)
    machine = [f"| {name} | {value} |" for name, value in describe_machine().items()]
    lines = [f"# Soak of {date}", "", "| | |", "|---|---|", *machine, "", found.to_markdown(plots.name)]
    path = directory / f"{date}-soak.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    return path


def main() -> int:
    """Soak, print the table and write it; return 1 if something has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds in each mode")
    parser.add_argument("--mode", action="append", choices=MODES, help="a durability; default: memory and process")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the table and the plots")
    given = parser.parse_args()
    found = report([soak(mode, given.seconds) for mode in given.mode or MODES[:2]], given.seconds)
    print(found.to_text())
    print(f"written: {write(found, given.results, datetime.datetime.now(datetime.UTC).date().isoformat())}")
    return 0 if all(aim.met for aim in found.aims) else 1


if __name__ == "__main__":
    sys.exit(main())
