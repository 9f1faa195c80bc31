"""The history of a run: its steps, what they come to, and the JSON file of both."""

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
    """What the steps come to; means over all steps unless said otherwise.

    Attributes:
        steps: how many.
        samples: how many, over all steps.
        seconds: from the first rank's begin to the end of the last step.
        reward_at_start: mean reward of the first tenth of the steps.
        reward_at_end: mean reward of the last tenth.
        solved_at_end: share of samples with reward 1 in the last tenth.
        imbalance: heaviest rank's tokens over the mean, minus 1, where batches were balanced.
        unbalanced_imbalance: the same of the first steps, where they were not; None where there were none.
        waiting: share of the ranks' time that they waited for data.
        samples_per_second: over the whole run.
        version_lag: versions between sampling and learning.
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
        """Whether there were steps enough to expect a rise."""
        return self.steps >= JUDGED_FROM_STEPS

    @property
    def has_risen(self) -> bool:
        """Whether the reward rose clearly."""
        return self.reward_at_end >= self.reward_at_start + CLEAR_RISE


def outcome_of(steps: Sequence[Step], unbalanced_steps: int = 0) -> Outcome:
    """Return what the steps come to.

    Args:
        steps: in order.
        unbalanced_steps: how many of the first were not balanced.

    Raises:
        ValueError: there are none.
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
