"""Whether a run has shown what it should."""

from __future__ import annotations

from dataclasses import dataclass

from examples.demo.history import CLEAR_RISE, JUDGED_FROM_STEPS, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """A judgement of a run, and its text."""

    is_good: bool
    text: str


def judge_training(outcome: Outcome) -> TrainingResult:
    """Judge a training run: good where the reward rose clearly, or where it was too short to tell."""
    rewards = f"reward {outcome.reward_at_start:.3f} at the start, {outcome.reward_at_end:.3f} at the end"
    if outcome.has_risen:
        return TrainingResult(
            is_good=True, text=f"{rewards}, {outcome.solved_at_end:.0%} of the answers exact: it learned"
        )
    if not outcome.is_judged:
        return TrainingResult(
            is_good=True, text=f"{rewards}: {outcome.steps} steps are too few to judge, {JUDGED_FROM_STEPS} are not"
        )
    return TrainingResult(
        is_good=False,
        text=f"error: {rewards}: it rose by less than {CLEAR_RISE}; give the run more --steps and --seconds, or "
        "another --seed",
    )
