"""Whether a run has shown what it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tq_service.demo.history import CLEAR_RISE, JUDGED_FROM_STEPS, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judgement of a run, and its text."""

    is_good: bool
    text: str


def judge_training(outcome: Outcome) -> Verdict:
    """Judge a training run: good where the reward rose clearly, or where it was too short to tell."""
    rewards = f"reward {outcome.reward_at_start:.3f} at the start, {outcome.reward_at_end:.3f} at the end"
    if outcome.has_risen:
        return Verdict(is_good=True, text=f"{rewards}, {outcome.solved_at_end:.0%} of the answers exact: it learned")
    if not outcome.is_judged:
        return Verdict(
            is_good=True, text=f"{rewards}: {outcome.steps} steps are too few to judge, {JUDGED_FROM_STEPS} are not"
        )
    return Verdict(
        is_good=False,
        text=f"error: {rewards}: it rose by less than {CLEAR_RISE}; give the run more --steps and --seconds, or "
        "another --seed",
    )


def judge_replay(replayed: Mapping[str, Any] | None) -> Verdict:
    """Judge a run on recorded rollouts: good where every sample came once, bit for bit, in a whole group."""
    if replayed is None:
        return Verdict(is_good=False, text="error: the trainer ranks ended without a summary; see their logs")
    text = (
        f"{replayed['received']:,} of {replayed['expected']:,} recorded samples received, "
        f"{replayed['missing']} missing, {replayed['repeated']} repeated, "
        f"{replayed['corrupt']} with a wrong checksum"
    )
    if replayed["has_text"]:
        text += (
            f", {replayed['whole_groups']:,} of {replayed['groups']:,} groups whole, "
            f"{replayed['reward_differences']} rewards that differ from the recorded"
        )
    faults = replayed["missing"] + replayed["repeated"] + replayed["corrupt"] + replayed["reward_differences"]
    is_good = faults == 0 and replayed["whole_groups"] == replayed["groups"]
    return Verdict(is_good=is_good, text=text if is_good else f"error: {text}")
