"""The history of a run: its steps, their summary, and a JSON file with both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.demo.fault import Outage
from examples.demo.settings import DemoSettings

Step = Mapping[str, Any]
JUDGED_FROM_STEPS = 50
CLEAR_RISE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Summary of the steps. Values are means over all steps unless stated otherwise.

    Attributes:
        steps: number of steps.
        samples: total number of samples in all steps.
        seconds: time from the start of the first rank to the end of the last step.
        reward_at_start: mean reward of the first tenth of the steps.
        reward_at_end: mean reward of the last tenth.
        solved_at_end: share of samples with reward 1 in the last tenth.
        imbalance: tokens of the rank with the most tokens, divided by the mean per rank, minus 1; for steps with
            balanced batches.
        unbalanced_imbalance: the same for the first steps, which were not balanced. None if there were no such steps.
        waiting: share of the ranks' time spent waiting for data.
        samples_per_second: rate over the full run.
        version_lag: number of versions between sampling and learning.
    """

    steps: int
    samples: int
    seconds: float
    reward_at_start: float
    reward_at_end: float
    solved_at_end: float
    imbalance: float
    unbalanced_imbalance: float | None
    waiting: float
    samples_per_second: float
    version_lag: float

    @property
    def is_judged(self) -> bool:
        """Whether the run had enough steps to expect a rise."""
        return self.steps >= JUDGED_FROM_STEPS

    @property
    def has_risen(self) -> bool:
        """Whether the reward has clearly risen."""
        return self.reward_at_end >= self.reward_at_start + CLEAR_RISE


def outcome_of(steps: Sequence[Step], unbalanced_steps: int = 0) -> Outcome:
    """Return the summary of the steps.

    Args:
        steps: the steps, in order.
        unbalanced_steps: number of steps at the start that were not balanced.

    Raises:
        ValueError: `steps` is empty.
    """
    if not steps:
        raise ValueError("got no finished step, expected at least one; give the run more --seconds or --steps")
    unbalanced, balanced = steps[:unbalanced_steps], steps[unbalanced_steps:] or steps
    tenth = max(1, len(steps) // 10)
    samples, seconds = sum(step["samples"] for step in steps), float(steps[-1]["elapsed_seconds"])

    def mean(name: str, chosen: Sequence[Step] = steps) -> float:
        return fmean(float(step[name]) for step in chosen)

    return Outcome(
        steps=len(steps),
        samples=samples,
        seconds=seconds,
        reward_at_start=mean("reward", steps[:tenth]),
        reward_at_end=mean("reward", steps[-tenth:]),
        solved_at_end=mean("solved", steps[-tenth:]),
        imbalance=mean("imbalance", balanced),
        unbalanced_imbalance=mean("imbalance", unbalanced) if unbalanced else None,
        waiting=mean("waiting"),
        samples_per_second=samples / max(1e-9, seconds),
        version_lag=mean("version_lag"),
    )


def write_history(
    path: Path, settings: DemoSettings, steps: Sequence[Step], outcome: Outcome, outage: Outage | None = None
) -> None:
    """Write settings, outcome, outage and steps as JSON."""
    history = {
        "settings": asdict(settings),
        "outcome": asdict(outcome),
        "outage": None if outage is None else asdict(outage),
        "steps": [dict(step) for step in steps],
    }
    path.write_text(json.dumps(history, indent=2) + "\n", encoding="utf-8")
