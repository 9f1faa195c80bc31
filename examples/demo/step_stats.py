"""What a rank counts during a step, and the sums over the ranks that make a line of the report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One step, over all ranks.

    Attributes:
        step: number of the step.
        elapsed_seconds: since the first rank began.
        reward: mean over the samples.
        solved: share of samples with reward 1.
        samples: how many.
        tokens: of prompts and responses, for each rank.
        imbalance: the heaviest rank's tokens over the mean, minus 1.
        waiting: share of the step's time that ranks waited for data, their mean.
        samples_per_second: over this step.
        version_lag: how many versions old the weights of the samples were, their mean.
    """

    step: int
    elapsed_seconds: float
    reward: float
    solved: float
    samples: int
    tokens: list[int]
    imbalance: float
    waiting: float
    samples_per_second: float
    version_lag: float


@dataclass(slots=True)
class StepStats:
    """What one rank counts during one step."""

    started: float = field(default_factory=time.monotonic)
    samples: int = 0
    tokens: int = 0
    reward_sum: float = 0.0
    solved: int = 0
    lag_sum: float = 0.0
    waiting_seconds: float = 0.0

    def add(self, rewards: torch.Tensor, *, tokens: int, lag_sum: float = 0.0) -> None:
        """Count the samples of one micro-batch, rewards `(n,)`, and how many versions old their weights are in sum."""
        self.samples += rewards.numel()
        self.tokens += tokens
        self.reward_sum += rewards.sum().item()
        self.solved += int((rewards >= 1.0).sum().item())
        self.lag_sum += lag_sum

    def sum_over_ranks(self, step: int, *, begun: float) -> StepSummary:
        """Return the summary of the step, the same on all ranks; every rank calls it.

        Args:
            step: number of the step.
            begun: `time.monotonic()` when this rank began.
        """
        now = time.monotonic()
        seconds = now - self.started
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tokens_by_rank = [float(self.tokens) if other == rank else 0.0 for other in range(ranks)]
        totals = torch.tensor(
            [self.samples, self.reward_sum, self.solved, self.lag_sum, self.waiting_seconds, seconds, now - begun,
             *tokens_by_rank],
            dtype=torch.float64,
        )  # fmt: skip
        dist.all_reduce(totals)
        samples, reward_sum, solved, lag_sum, waiting, all_seconds, elapsed = totals[:7].tolist()
        tokens = [int(count) for count in totals[7:].tolist()]
        return StepSummary(
            step=step,
            elapsed_seconds=elapsed / ranks,
            reward=reward_sum / max(1.0, samples),
            solved=solved / max(1.0, samples),
            samples=int(samples),
            tokens=tokens,
            imbalance=imbalance_of(tokens),
            waiting=waiting / max(1e-9, all_seconds),
            samples_per_second=samples * ranks / max(1e-9, all_seconds),
            version_lag=lag_sum / max(1.0, samples),
        )


def timed(items: Iterable[Item]) -> Iterator[tuple[Item, float]]:
    """Yield each item with the seconds that it was waited for."""
    iterator = iter(items)
    while True:
        asked = time.monotonic()
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item, time.monotonic() - asked


def imbalance_of(tokens: Sequence[int]) -> float:
    """Return how far the heaviest rank is above the mean: 0 is perfect balance.

    >>> imbalance_of([110, 90])
    0.1
    """
    total = sum(tokens)
    return round(max(tokens) * len(tokens) / total - 1.0, 6) if total else 0.0
