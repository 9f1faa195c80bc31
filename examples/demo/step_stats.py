"""Statistics of a rank during a step, and their sums over the ranks for the report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One step, over all ranks.

    Attributes:
        step: number of the step.
        elapsed_seconds: time since the first rank began.
        reward: mean over the samples.
        solved: share of samples with reward 1.
        samples: number of samples.
        tokens: tokens of prompts and responses, by rank.
        imbalance: the heaviest rank's token count divided by the mean over the ranks, minus 1.
        waiting: mean share of the step's time that ranks spent waiting for data.
        samples_per_second: rate of this step.
        version_lag: mean age of the samples' weights, in versions.
        lost: samples of the step's partition that no rank trained on.
        twice: samples that were trained on more than once.
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
    lost: int
    twice: int


@dataclass(slots=True, kw_only=True)
class StepStats:
    """Statistics of one rank during one step.

    Attributes:
        trained: `(samples of the step,)`, how often this rank trained on each sample.
    """

    trained: Tensor
    started: float = field(default_factory=time.monotonic)
    samples: int = 0
    tokens: int = 0
    reward_sum: float = 0.0
    solved: int = 0
    lag_sum: float = 0.0
    waiting_seconds: float = 0.0

    def add(self, rewards: Tensor, *, indexes: Sequence[int], tokens: int, lag_sum: float = 0.0) -> None:
        """Count the samples of one micro-batch.

        Args:
            rewards: `(n,)`.
            indexes: the `global_index` of each sample.
            tokens: tokens of prompts and responses.
            lag_sum: sum of the ages of the samples' weights, in versions.
        """
        self.samples += rewards.numel()
        self.tokens += tokens
        self.reward_sum += rewards.sum().item()
        self.solved += int((rewards >= 1.0).sum().item())
        self.lag_sum += lag_sum
        self.trained.index_add_(0, torch.tensor(indexes), torch.ones(len(indexes), dtype=self.trained.dtype))

    def counts(self, rank: int, rank_count: int, *, begun: float) -> Tensor:
        """Return the counts to sum over the ranks, float64; the first is the number of samples.

        Args:
            rank: this rank.
            rank_count: number of ranks.
            begun: `time.monotonic()` at the start of this rank.
        """
        now = time.monotonic()
        tokens_by_rank = [float(self.tokens) if other == rank else 0.0 for other in range(rank_count)]
        totals = [self.samples, self.reward_sum, self.solved, self.lag_sum, self.waiting_seconds, now - self.started]
        begun_at = [now - begun if rank == 0 else 0.0]  # of the rank that is never replaced
        return torch.cat([torch.tensor([*totals, *begun_at, *tokens_by_rank], dtype=torch.float64), self.trained])


def summary_of(step: int, counts: Tensor, rank_count: int) -> StepSummary:
    """Return the summary of a step, from the sums of all ranks' `StepStats.counts`."""
    samples, reward_sum, solved, lag_sum, waiting, all_seconds, elapsed = counts[:7].tolist()
    tokens = [int(count) for count in counts[7 : 7 + rank_count].tolist()]
    trained = counts[7 + rank_count :]
    return StepSummary(
        step=step,
        elapsed_seconds=elapsed,
        reward=reward_sum / max(1.0, samples),
        solved=solved / max(1.0, samples),
        samples=int(samples),
        tokens=tokens,
        imbalance=imbalance_of(tokens),
        waiting=waiting / max(1e-9, all_seconds),
        samples_per_second=samples * rank_count / max(1e-9, all_seconds),
        version_lag=lag_sum / max(1.0, samples),
        lost=int((trained == 0).sum()),
        twice=int((trained > 1).sum()),
    )


def timed(items: Iterable[Item]) -> Iterator[tuple[Item, float]]:
    """Yield each item with the seconds spent waiting for it."""
    iterator = iter(items)
    while True:
        asked = time.monotonic()
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item, time.monotonic() - asked


def imbalance_of(tokens: Sequence[int]) -> float:
    """Return the relative excess of the heaviest rank over the mean: 0 is perfect balance.

    >>> imbalance_of([110, 90])
    0.1
    """
    total = sum(tokens)
    return round(max(tokens) * len(tokens) / total - 1.0, 6) if total else 0.0
