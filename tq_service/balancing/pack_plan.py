"""A plan of packs with its figures."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Which samples form which pack of which optimizer step on which rank.

    Attributes:
        packs: `packs[dp_rank][step][pack]` are indexes of samples; an empty list is a pack of padding only. All ranks
            have the same number of steps, and within a step the same number of packs, at least 1.
        lengths: the token count of every sample in its pack, `(n,)`: cut where `truncated`, 0 where `dropped`.
        pack_max_length: tokens that every pack is filled up to.
        truncated: indexes of the samples that were cut to `pack_max_length`, ascending.
        dropped: indexes of the samples that are in no pack since they are too long, ascending.
        rank_costs: cost of the samples of each rank, `(dp_size,)`, in the units of the cost function or a multiple.
        pack_count_lower_bound: packs, over all ranks and steps, that no plan for these ranks and steps can do without.
        seconds: what the planning took.
    """

    packs: list[list[list[list[int]]]] = field(repr=False)
    lengths: Int64s
    pack_max_length: int
    truncated: Int64s
    dropped: Int64s
    rank_costs: Int64s
    pack_count_lower_bound: int
    seconds: float

    @property
    def dp_size(self) -> int:
        """Number of ranks."""
        return len(self.packs)

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.packs[0])

    @property
    def tokens(self) -> Int64s:
        """Tokens of samples by rank and step, `(dp_size, optimizer_steps)`."""
        return np.array(
            [[sum(self.pack_tokens(pack) for pack in step) for step in steps] for steps in self.packs], np.int64
        )

    @property
    def packs_by_step(self) -> list[int]:
        """Packs in each step of each rank."""
        return [len(step) for step in self.packs[0]]

    @property
    def pack_count(self) -> int:
        """Packs over all ranks and steps."""
        return self.dp_size * sum(self.packs_by_step)

    @property
    def padding_tokens(self) -> int:
        """Tokens of padding over all packs, those of padding only included."""
        return self.pack_count * self.pack_max_length - int(self.lengths.sum())

    @property
    def fill_ratio(self) -> float:
        """Share of the packs' tokens that are samples'; 0.0 to 1.0."""
        return float(self.lengths.sum()) / (self.pack_count * self.pack_max_length)

    @property
    def imbalance(self) -> float:
        """How far the cost of the heaviest rank is above the mean: 0.01 is 1 %."""
        return _above_mean(self.rank_costs)

    @property
    def step_imbalance(self) -> float:
        """How far, in the worst step, the tokens of the heaviest rank are above the mean of the step."""
        return max(_above_mean(of_ranks) for of_ranks in self.tokens.T)

    def pack_tokens(self, pack: list[int]) -> int:
        """Return the tokens of a pack's samples."""
        return int(self.lengths[pack].sum()) if pack else 0


def _above_mean(values: Int64s) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean - 1 if mean else 0.0
