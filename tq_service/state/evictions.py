"""Evictions: the samples and groups that a claim evicts in the same change that records its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.schema import BatchUnit
from tq_service.state.plan import Indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The units that a claim evicts in one change: single samples, or groups or rollouts.

    Attributes:
        rows: global indexes, those of unit 0 first.
        sizes: number of samples of each unit `(units,)`.
        reasons: reason for evicting each unit `(units,)`, as an `EvictionCode`.
        is_group: whether each unit is a group or rollout `(units,)`.
        unit: whether these are groups or rollouts.
    """

    rows: Indexes
    sizes: Indexes
    reasons: NDArray[np.uint8]
    is_group: NDArray[np.bool_]
    unit: BatchUnit = "group"
