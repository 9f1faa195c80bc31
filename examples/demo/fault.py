"""Kills the service and a trainer rank in the middle of a step, halfway through the demo, and restarts both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tq_service as tq
from examples.demo.batch_notes import Redelivered, last_note, notes_file, redelivered
from examples.demo.processes import ProcessGroup
from examples.demo.progress import Progress, Step
from examples.demo.ranks import GENERATION_FILE
from examples.demo.reports import JOINED_STEP, Report
from examples.demo.settings import PARTITION_PREFIX, DemoSettings

KILLED_RANK = 1
_MID_STEP_SECONDS = 10.0
_LOOK_SECONDS = 0.002


@dataclass(slots=True, kw_only=True)
class Outage:
    """The effects of the kill.

    Attributes:
        step: the interrupted step.
        service_seconds: time from the kill until the service answered again, or None if the service was not killed.
        partition_count: partitions that the service recovered.
        sample_count: samples of these partitions.
        rank_seconds: time from the kill until another process had replaced the rank.
        resumed_seconds: time from the kill until the next step was complete.
        redelivered: the micro-batches that the rank received again.
    """

    step: int
    service_seconds: float | None = None
    partition_count: int = 0
    sample_count: int = 0
    rank_seconds: float | None = None
    resumed_seconds: float | None = None
    redelivered: Redelivered | None = None


class HalfwayFault:
    """Kills a trainer rank, and also the service if the demo started it, once, halfway through the run.

    Args:
        settings: settings of the run.
        settings_file: file with these settings, for the process that replaces the rank.
        processes: processes of the run.
        client: client of the service.
        progress: shows the events.
    """

    def __init__(
        self,
        settings: DemoSettings,
        settings_file: Path,
        processes: ProcessGroup,
        client: tq.Client,
        progress: Progress,
    ) -> None:
        self._output = Path(settings.output)
        self._settings = settings
        self._settings_file = settings_file
        self._processes = processes
        self._client = client
        self._progress = progress
        self._killed_at = 0.0
        self._joined_step: int | None = None
        self.outage: Outage | None = None

    def is_due(self, steps: Sequence[Step]) -> bool:
        """Whether half of the steps or of the time is over, a step is left, and nothing was killed yet."""
        if self.outage is not None or not steps or len(steps) + 2 > self._settings.steps:
            return False
        done = (len(steps) + 1) / self._settings.steps, steps[-1]["elapsed_seconds"] / self._settings.seconds
        return bool(max(done) >= 1 / 2)

    def inject(self) -> None:
        """Kill both in the middle of a step, and restart both."""
        if not self._holds_the_rank_mid_step():
            return
        outage = self.outage = Outage(step=last_note(self._output, KILLED_RANK)[0])
        self._killed_at = time.monotonic()
        names = f"trainer rank {KILLED_RANK}"
        if self._processes.has_service:
            self._processes.kill_service()
            names = f"the service and {names}"
        self._processes.kill_role("trainer", KILLED_RANK)
        self._progress.note(f"killed {names} in the middle of step {outage.step} (kill -9)")
        if self._processes.has_service:
            self._processes.restart_service()
            partitions = self._client.list_partitions(PARTITION_PREFIX)
            outage.service_seconds = time.monotonic() - self._killed_at
            outage.partition_count = len(partitions)
            outage.sample_count = sum(each.present_count for each in partitions)
            self._progress.note(
                f"the service is back after {outage.service_seconds:.1f} s with {outage.partition_count} partitions "
                f"and {outage.sample_count:,} samples"
            )
        (self._output / GENERATION_FILE).write_text("1", encoding="utf-8")
        self._processes.start_role("trainer", KILLED_RANK, self._settings_file)

    def take(self, report: Report) -> None:
        """Check a report for the return of the rank, and for the next complete step."""
        if self.outage is None or self.outage.resumed_seconds is not None:
            return
        seconds = time.monotonic() - self._killed_at
        if JOINED_STEP in report:
            self.outage.rank_seconds, self._joined_step = seconds, int(report[JOINED_STEP])
        elif self._joined_step is not None and report.get("step", -1) >= self._joined_step:
            again = redelivered(self._output, KILLED_RANK)
            self.outage.resumed_seconds, self.outage.redelivered = seconds, again
            self._progress.note(
                f"training resumed after {seconds:.1f} s; {again.equal_count} of {again.count} micro-batches that rank "
                f"{KILLED_RANK} got again are identical"
            )

    def _holds_the_rank_mid_step(self) -> bool:
        """Wait until the rank has the first micro-batch of a step but not the next, and pause it there.

        On a busy machine the notes may be stale when read, so they are read again after the pause.
        """
        file, give_up_at, looked_at = notes_file(self._output, KILLED_RANK), time.monotonic() + _MID_STEP_SECONDS, -1
        while time.monotonic() < give_up_at and self._processes.running("trainer"):
            if (size := file.stat().st_size) != looked_at and last_note(self._output, KILLED_RANK)[1] == 0:
                self._processes.pause_role("trainer", KILLED_RANK)
                if last_note(self._output, KILLED_RANK)[1] == 0:
                    return True
                self._processes.resume_role("trainer", KILLED_RANK)
            looked_at = size
            time.sleep(_LOOK_SECONDS)
        return False


def problems_of(steps: Sequence[Step], outage: Outage | None) -> list[str]:
    """Return the service's errors that the run reveals."""
    lost, twice = (sum(int(step[name]) for step in steps) for name in ("lost", "twice"))
    problems = [
        f"{count} samples were {what}" for count, what in ((lost, "lost"), (twice, "trained on twice")) if count
    ]
    again: Any = outage and outage.redelivered
    if outage is not None and outage.resumed_seconds is None:
        problems.append("the training did not resume after the kill")
    if again and again.equal_count < again.count:
        problems.append(f"{again.count - again.equal_count} micro-batches of the killed rank differ after the restart")
    return problems
