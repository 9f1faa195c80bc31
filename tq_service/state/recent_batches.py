"""The last batches of a ranked task in numbers: how evenly their tokens were spread, and what padding they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import mul, sub
from typing import Final

import numpy as np

from tq_service.results import RecentBatch
from tq_service.state.ledger import RecordedPlan
from tq_service.state.plan import Indexes

MOST_BATCHES: Final = 16
_MOST_RANKS: Final = 128  # of which the tokens are kept


class RecentBatches:
    """Keeps the last batches of one epoch of a task, for as long as the process lives."""

    __slots__ = ("_batches", "_epoch")

    def __init__(self) -> None:
        self._batches: deque[RecentBatch] = deque(maxlen=MOST_BATCHES)
        self._epoch = 0

    def add(self, epoch: int, batch: RecentBatch) -> None:
        """Add a batch, the first one of its epoch in place of those of the epoch before."""
        if epoch != self._epoch:
            self._batches.clear()
            self._epoch = epoch
        self._batches.append(batch)

    def of_epoch(self, epoch: int) -> tuple[RecentBatch, ...]:
        """Return the batches of an epoch in the order in which they were planned."""
        return tuple(self._batches) if epoch == self._epoch else ()


def describe_batch(batch_index: int, plan: RecordedPlan, lengths: Indexes | None) -> RecentBatch:
    """Return a batch in numbers.

    Args:
        batch_index: its number.
        plan: what was recorded of it.
        lengths: token counts of `plan.rows` `(n,)`; None: they are not known.
    """
    if lengths is None or not lengths.size:
        return RecentBatch(batch_index=batch_index)
    ends = list(accumulate(plan.sizes))
    starts = [end - size for size, end in zip(plan.sizes, ends, strict=True) if size]
    sums = iter(np.add.reduceat(lengths, starts).tolist())
    tokens = [next(sums) if size else 0 for size in plan.sizes]
    total = sum(tokens)
    padding = _padding_of_steps(plan) if plan.steps else _padding_of_micro_batches(plan, lengths, ends, total)
    return RecentBatch(
        batch_index=batch_index,
        tokens_per_rank=tuple(tokens[:_MOST_RANKS]),
        imbalance=max(tokens) * len(tokens) / total - 1 if total else 0.0,
        padding_share=padding / (padding + total) if padding else 0.0,
    )


def _padding_of_steps(plan: RecordedPlan) -> int:
    packs = chain.from_iterable(chain.from_iterable(plan.steps))
    return sum(pack.padding_tokens for pack in packs)


def _padding_of_micro_batches(plan: RecordedPlan, lengths: Indexes, ends: Sequence[int], total: int) -> int:
    """Return how many tokens pad all samples to the longest one of their micro-batch."""
    largest = plan.micro_batch_size or max(plan.sizes)
    ranks = zip(plan.sizes, ends, strict=True)
    starts = list(chain.from_iterable(range(end - size, end, largest) for size, end in ranks))
    longest = np.maximum.reduceat(lengths, starts).tolist()
    counts = map(sub, [*starts[1:], ends[-1]], starts)
    return int(sum(map(mul, longest, counts))) - total
