"""The result of a run, and whether it is as expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.demo.fault import KILLED_RANK, Outage, problems_of
from examples.demo.history import CLEAR_RISE, JUDGED_FROM_STEPS, Outcome, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A judgement of a run, and its text."""

    is_good: bool
    text: str


def judge(outcome: Outcome, steps: Sequence[Step], outage: Outage | None) -> Result:
    """Judge a run: good if no sample was lost or trained on twice, and the reward rose clearly.

    The reward of a run with few steps is not judged.
    """
    lines = [
        f"{outcome.samples:,} samples in {outcome.steps} steps and {outcome.seconds:.1f} s: "
        f"{outcome.samples_per_second:,.0f} samples/s, ranks waited {outcome.waiting:.0%} of their time, version lag "
        f"{outcome.version_lag:.1f}",
        _balance(outcome),
    ]
    if outage is not None:
        lines.append(_outage(outage))
    problems = problems_of(steps, outage)
    if not problems:
        lines.append("0 samples lost, 0 trained on twice")
    rewards = (
        f"reward {outcome.reward_at_start:.3f} in the first tenth of the steps, {outcome.reward_at_end:.3f} in the last"
    )
    if not outcome.is_judged:
        lines.append(
            f"{rewards}; {outcome.steps} steps are too few to judge the learning; it needs {JUDGED_FROM_STEPS}"
        )
    elif outcome.has_risen:
        lines.append(
            f"{rewards}, {outcome.solved_at_end:.0%} of the answers exact: the policy learned from data that went "
            "through the service (one seed, one toy task)"
        )
    else:
        problems.append(
            f"{rewards}: it rose by less than {CLEAR_RISE}; give the run more --steps and --seconds, or another --seed"
        )
    lines += [f"error: {problem}" for problem in problems]
    return Result(is_good=not problems, text="\n".join(lines))


def _balance(outcome: Outcome) -> str:
    balanced = f"imbalance {outcome.imbalance:.2%}"
    if outcome.unbalanced_imbalance is None:
        return balanced
    return (
        f"{balanced} with batches balanced by tokens, {outcome.unbalanced_imbalance:.2%} in the first steps without "
        "balancing"
    )


def _outage(outage: Outage) -> str:
    service = ""
    if outage.service_seconds is not None:
        service = (
            f"the service was back after {outage.service_seconds:.1f} s with {outage.partition_count} partitions and "
            f"{outage.sample_count:,} samples, "
        )
    if outage.rank_seconds is None or outage.resumed_seconds is None or outage.redelivered is None:
        return f"killed in step {outage.step}: {service}the training did not resume"
    again = outage.redelivered
    return (
        f"killed in step {outage.step}: {service}rank {KILLED_RANK} after {outage.rank_seconds:.1f} s, the next step "
        f"was complete after {outage.resumed_seconds:.1f} s; {again.equal_count} of {again.count} micro-batches that "
        f"the rank got again had the same bytes ({again.size_bytes:,})"
    )
