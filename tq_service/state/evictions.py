"""Samples, rollouts and groups that a claim evicts because its task can never consume them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.schema import BatchUnit
from tq_service.state.plan import Indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The units (single samples, rollouts or groups) that a claim evicts in one change.

    Attributes:
        rows: global indexes of the samples, sorted by unit.
        sizes: number of samples in each unit, of shape `(units,)`.
        reasons: reason for the eviction of each unit, as an `EvictionCode`, of shape `(units,)`.
        is_group: whether each unit is a group or rollout rather than a single sample, of shape `(units,)`.
        unit: kind of the units that are not single samples: group or rollout.
    """

    rows: Indexes
    sizes: Indexes
    reasons: NDArray[np.uint8]
    is_group: NDArray[np.bool_]
    unit: BatchUnit = "group"
