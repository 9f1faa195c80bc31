"""`tq-service demo`: starts the processes of a run, shows their progress, judges what came of it."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

import tq_service as tq
from tq_service.demo.history import outcome_of, write_history
from tq_service.demo.plots import plot_history
from tq_service.demo.processes import Crew
from tq_service.demo.progress import Progress, make_progress
from tq_service.demo.recorded import open_recording
from tq_service.demo.reports import Report, ReportReader
from tq_service.demo.settings import PARTITION_PREFIX, RENDEZVOUS_FILE, ROLLOUT_WORKERS, TRAINER_RANKS, DemoSettings
from tq_service.demo.verdict import judge_replay, judge_training
from tq_service.errors import TqError

READ_SECONDS = 0.5
FINISH_SECONDS = 10.0
CONNECT_SECONDS = 5.0
INTERRUPTED_EXIT_CODE = 130
TRAINING_ROLES = ("rollout_worker", "trainer")
REPLAY_ROLES = ("replay_worker", "replay_trainer")
NEEDED_MODULES = {"torch": "data", "tensordict": "data", "matplotlib": "demo"}  # and the extra that brings each


def run_demo(
    *,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the training run.")] = 300,
    seconds: Annotated[float, typer.Option(help="End the training after so many seconds, whatever the step.")] = 75.0,
    output: Annotated[Path, typer.Option(help="Folder for the curves, the history and the logs.")] = Path(
        "demo-output"
    ),
    input: Annotated[  # noqa: A002  (the name of the flag)
        Path | None,
        typer.Option(help="Recorded rollouts, .jsonl of solutions or .csv trace, instead of training on a task."),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="Replay a trace so many times faster than recorded; 0: as fast as it goes.")
    ] = 100.0,
    limit: Annotated[int | None, typer.Option(help="Replay so many groups at most.", show_default="all")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, sampling and first weights.")] = 0,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of a live table.")] = False,
    address: Annotated[
        str | None, typer.Option(help="A running service to use.", show_default="starts one of its own")
    ] = None,
) -> int:
    """Train a tiny policy with GRPO through the service, or send recorded rollouts the same way.

    Returns:
        The exit code: 0 where the reward rose clearly (or every recorded sample came through whole), 1 where not or
        where a process failed, 130 after Ctrl-C.
    """
    try:
        _check_modules()
        settings = DemoSettings(
            address=address or "", output=str(output), steps=steps, seconds=seconds, seed=seed,
            input=None if input is None else str(input), speed=speed, limit=limit,
        )  # fmt: skip
        if input is not None:
            open_recording(input, limit)  # before any process is started
        with _termination_as_interrupt():
            return _Run(settings, plain=plain).run()
    except KeyboardInterrupt:
        print("interrupted: all processes of the demo have been ended", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    except (TqError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


@dataclass(slots=True)
class _Run:
    """One run, from the first process to the verdict."""

    settings: DemoSettings
    plain: bool
    steps: list[Report] = field(default_factory=list)
    replayed: dict[str, Any] | None = None

    def run(self) -> int:
        output = Path(self.settings.output)
        output.mkdir(parents=True, exist_ok=True)
        (output / RENDEZVOUS_FILE).unlink(missing_ok=True)
        with Crew(output / "logs") as crew:
            if not self.settings.address:
                self.settings = replace(self.settings, address=crew.start_service())
            with tq.Client(self.settings.address) as client:
                _clear_partitions(client)
                self._work(crew, client, output)
                _clear_partitions(client)
        return self._conclude(output)

    def _work(self, crew: Crew, client: tq.Client, output: Path) -> None:
        """Start the workers and show their reports until they have ended."""
        settings_file = output / "settings.json"
        self.settings.save(settings_file)
        rollouts, trainer = TRAINING_ROLES if self.settings.input is None else REPLAY_ROLES
        for role, count in ((trainer, TRAINER_RANKS), (rollouts, ROLLOUT_WORKERS), ("reward_worker", 1)):
            for index in range(count):
                crew.start_role(role, index, settings_file)
        reader = ReportReader(client)
        with make_progress(self._title(), plain=self.plain) as progress:
            while crew.running(trainer):
                self._take(reader, progress, READ_SECONDS, crew)
            self._take(reader, progress, 0.0, crew)
        crew.wait_for_workers(FINISH_SECONDS)
        crew.check()

    def _take(self, reader: ReportReader, progress: Progress, max_wait: float, crew: Crew) -> None:
        try:
            reports = reader.read(max_wait)
        finally:
            crew.check()  # a service that is gone explains itself better than the error of calling it
        for report in reports:
            if report["kind"] == "step":
                self.steps.append(report)
                progress.show(report)
            else:
                self.replayed = report

    def _title(self) -> str:
        what = "training on additions" if self.settings.input is None else f"replaying {Path(self.settings.input).name}"
        return (
            f"tq-service demo: {what}, service at {self.settings.address}, {ROLLOUT_WORKERS} rollout workers, "
            f"1 reward worker, {TRAINER_RANKS} trainer ranks"
        )

    def _conclude(self, output: Path) -> int:
        """Write the files, print the verdict, return the exit code."""
        outcome = outcome_of(self.steps)
        write_history(output / "history.json", self.settings, self.steps, outcome, self.replayed)
        plot_history(output / "curves.png", self._title(), self.steps)
        print(
            f"{outcome.samples:,} samples in {outcome.steps} steps and {outcome.seconds:.1f} s: "
            f"{outcome.samples_per_second:,.0f} samples/s, imbalance {outcome.imbalance:.2%}, "
            f"ranks waited {outcome.waiting:.0%} of their time, version lag {outcome.version_lag:.1f}"
        )
        print(f"curves: {output / 'curves.png'}   history: {output / 'history.json'}")
        verdict = judge_training(outcome) if self.settings.input is None else judge_replay(self.replayed)
        print(verdict.text, file=sys.stdout if verdict.is_good else sys.stderr)
        return 0 if verdict.is_good else 1


def _check_modules() -> None:
    missing = {module: extra for module, extra in NEEDED_MODULES.items() if importlib.util.find_spec(module) is None}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        raise ValueError(f"the demo needs {', '.join(missing)}; install them with: pip install 'tq-service[{extras}]'")


def _clear_partitions(client: tq.Client) -> None:
    """Clear what an earlier run left in a service that is not the demo's own."""
    for partition in client.list_partitions(PARTITION_PREFIX, timeout=CONNECT_SECONDS):
        client.clear_partition(partition.partition_id)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the run like Ctrl-C does."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
