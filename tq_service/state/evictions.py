"""Evictions: samples and groups that claims gave up in the change that records their plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.schema import BatchUnit
from tq_service.state.plan import Indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The units that a claim evicts at once; each is a sample, or a group or rollout.

    Attributes:
        rows: global indexes, those of unit 0 first.
        sizes: number of samples of each unit `(units,)`.
        reasons: reason for each eviction `(units,)`, as a number of `EvictionCode`.
        is_group: whether each unit is a group or rollout `(units,)`.
        unit: "group" or "rollout" for these units.
    """

    rows: Indexes
    sizes: Indexes
    reasons: NDArray[np.uint8]
    is_group: NDArray[np.bool_]
    unit: BatchUnit = "group"
