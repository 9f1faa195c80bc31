"""`python -m examples.demo`: starts the processes of a run, shows their progress, and judges the result."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

import tq_service as tq
from examples.demo.fault import HalfwayFault
from examples.demo.history import outcome_of, write_history
from examples.demo.plots import plot_history
from examples.demo.processes import ProcessGroup
from examples.demo.progress import Progress, make_progress
from examples.demo.ranks import GENERATION_FILE
from examples.demo.reports import EVENT, Report, ReportReader
from examples.demo.result import judge
from examples.demo.settings import PARTITION_PREFIX, ROLLOUT_WORKERS, TRAINER_RANKS, DemoSettings, step_partition
from tq_service.errors import NotFoundError, TqError

READ_SECONDS = 0.5
FINISH_SECONDS = 10.0
CONNECT_SECONDS = 5.0
INTERRUPTED_EXIT_CODE = 130
UNBALANCED_STEPS = 30
DATA_DIRECTORY = "data"  # of the service, in the output directory
RECORDING_DIRECTORY = "recording"  # likewise
NEEDED_MODULES = {"torch": "data", "tensordict": "data", "matplotlib": "plots"}  # with the extra that installs each


def run_demo(
    *,
    steps: int = 300,
    seconds: float = 75.0,
    output: Path = Path("demo-output"),
    seed: int = 0,
    plain: bool = False,
    address: str | None = None,
    fault: bool = True,
    record: bool = False,
) -> int:
    """Train a tiny policy with GRPO through the service.

    Args:
        steps: optimizer steps of the run.
        seconds: maximum training time in seconds.
        output: directory for the curves, the history and the logs.
        seed: seed of prompts, sampling and initial weights.
        plain: whether to print lines instead of a live table.
        address: a running service to use; None starts a service.
        fault: whether to kill a trainer rank halfway through the run, and also the service if the demo started it.
        record: whether the service started by the demo records the batches of the trainer ranks.

    Returns:
        The exit code: 0 if the reward rose clearly and no sample was lost or trained on twice; 1 if not, or if a
        process failed; 130 after Ctrl-C.
    """
    try:
        _check_modules()
        settings = DemoSettings(
            address=address or "",
            output=str(output.resolve()),
            steps=steps,
            seconds=seconds,
            seed=seed,
            unbalanced_steps=min(UNBALANCED_STEPS, steps // 5),
        )
        with _termination_as_interrupt():
            return _Run(settings, plain=plain, has_fault=fault, records=record).run()
    except KeyboardInterrupt:
        print("interrupted: ended all processes of the demo", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    except (TqError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


@dataclass(slots=True)
class _Run:
    """One run, from the first process to the result."""

    settings: DemoSettings
    plain: bool
    has_fault: bool
    records: bool
    steps: list[Report] = field(default_factory=list)
    fault: HalfwayFault | None = None

    def run(self) -> int:
        output = Path(self.settings.output)
        _prepare(output)
        env: dict[str, str] | None = None
        credentials: dict[str, Any] = {}
        if not self.settings.address:  # TLS and token variables are for other services
            env = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
            credentials = {"token": False, "tls": False}
        with (
            make_progress(self._title(), plain=self.plain) as progress,
            ProcessGroup(output / "logs", env) as processes,
        ):
            if not self.settings.address:
                progress.set_state("starting a service")
                recording = output / RECORDING_DIRECTORY if self.records else None
                address = processes.start_service(output / DATA_DIRECTORY, recording)
                self.settings = replace(self.settings, address=address)
                progress.note(f"a service listens at {address}; its state is in {output.name}/{DATA_DIRECTORY}")
            with tq.Client(self.settings.address, **credentials) as client:
                _clear_partitions(client)
                self._work(processes, client, output, progress)
                _clear_partitions(client)
        return self._conclude(output)

    def _work(self, processes: ProcessGroup, client: tq.Client, output: Path, progress: Progress) -> None:
        """Start the workers and show their reports until they have ended."""
        settings_file = output / "settings.json"
        self.settings.save(settings_file)
        for role, count in (("trainer", TRAINER_RANKS), ("rollout_worker", ROLLOUT_WORKERS), ("reward_worker", 1)):
            for index in range(count):
                processes.start_role(role, index, settings_file)
        progress.note("started the workers; importing torch takes some seconds")
        if self.has_fault:
            self.fault = HalfwayFault(self.settings, settings_file, processes, client, progress)
        reader = ReportReader(client)
        while processes.running("trainer"):
            self._take(reader, progress, READ_SECONDS, processes)
            if not self.steps:
                progress.set_state(_first_partition(client, self.settings))
            if self.fault is not None and self.fault.is_due(self.steps):
                self.fault.inject()
        self._take(reader, progress, 0.0, processes)
        if self.fault is not None and self.fault.outage is None:
            progress.note("nothing was killed: the training ended before a rank was seen in the middle of a step")
        processes.wait_for_workers(FINISH_SECONDS)
        processes.check()

    def _take(self, reader: ReportReader, progress: Progress, max_wait: float, processes: ProcessGroup) -> None:
        try:
            reports = reader.read(max_wait)
        finally:
            processes.check()  # the log of a dead service explains more than the error of the call
        for report in reports:
            if EVENT in report:
                progress.note(report[EVENT])
            else:
                self.steps.append(report)
                progress.show(report)
                if report["step"] == self.settings.unbalanced_steps > 0:
                    progress.note(f"step {report['step']}: from here on batches are balanced by tokens")
            if self.fault is not None:
                self.fault.take(report)

    def _title(self) -> str:
        return f"tq-service demo: {ROLLOUT_WORKERS} rollout workers, 1 reward worker, {TRAINER_RANKS} trainer ranks"

    def _conclude(self, output: Path) -> int:
        """Write the files, print the result, and return the exit code."""
        outcome = outcome_of(self.steps, self.settings.unbalanced_steps)
        outage = None if self.fault is None else self.fault.outage
        write_history(output / "history.json", self.settings, self.steps, outcome, outage)
        plot_history(output / "curves.png", self._title(), self.steps, self.settings.unbalanced_steps, outage)
        result = judge(outcome, self.steps, outage)
        console = Console(stderr=not result.is_good)
        console.print(result.text, soft_wrap=not console.is_terminal, highlight=False, markup=False)
        shown = output.relative_to(Path.cwd()) if output.is_relative_to(Path.cwd()) else output
        print(f"curves: {shown / 'curves.png'}   history: {shown / 'history.json'}")
        return 0 if result.is_good else 1


def _prepare(output: Path) -> None:
    """Create the output directory, or remove the files of an earlier run from it."""
    output.mkdir(parents=True, exist_ok=True)
    for directory in (DATA_DIRECTORY, RECORDING_DIRECTORY):
        shutil.rmtree(output / directory, ignore_errors=True)
    for file in (*output.glob("rendezvous*"), *output.glob("batches_*.jsonl")):
        file.unlink()
    (output / GENERATION_FILE).write_text("0", encoding="utf-8")


def _first_partition(client: tq.Client, settings: DemoSettings) -> str:
    """Return the progress of the first step's samples."""
    try:
        fields = client.describe_partition(step_partition(0), timeout=CONNECT_SECONDS).fields
    except NotFoundError:
        return "the workers are starting"
    produced = {field.spec.name: field.produced_count for field in fields}
    return (
        f"{step_partition(0)}: {produced.get('response', 0)} of {settings.samples_per_step} samples, "
        f"{produced.get('reward', 0)} of them with a reward"
    )


def _check_modules() -> None:
    missing = {module: extra for module, extra in NEEDED_MODULES.items() if importlib.util.find_spec(module) is None}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        raise ValueError(f"the demo needs {', '.join(missing)}; install them with: pip install '.[{extras}]'")


def _clear_partitions(client: tq.Client) -> None:
    """Clear partitions of an earlier run, which may remain in a service that the demo did not start."""
    for partition in client.list_partitions(PARTITION_PREFIX, timeout=CONNECT_SECONDS):
        client.clear_partition(partition.partition_id)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the run like Ctrl-C."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _arguments() -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Train a tiny policy with GRPO through the service.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--seconds", type=float, default=75.0, help="longest training time in seconds")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="directory for curves, history and logs"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, sampling and initial weights")
    parser.add_argument("--plain", action="store_true", help="print lines instead of a live table")
    parser.add_argument("--address", help="a running service to use; by default the demo starts one")
    parser.add_argument(
        "--fault", action=argparse.BooleanOptionalAction, default=True,
        help="kill a trainer rank, and the service started by the demo, halfway",
    )  # fmt: skip
    parser.add_argument(
        "--record", action="store_true", help="record the batches of the trainer ranks, for tq-service replay"
    )
    return vars(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_demo(**_arguments()))
