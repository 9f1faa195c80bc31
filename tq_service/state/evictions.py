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
        rows: global indexes of the evicted samples, one unit after another.
        sizes: number of samples in each unit, as an array of shape `(units,)`.
        reasons: array of shape `(units,)` with the `EvictionCode` of each unit.
        is_group: mask of shape `(units,)` that selects groups and rollouts rather than single samples.
        unit: kind of the units that are not single samples: "group" or "rollout".
    """

    rows: Indexes
    sizes: Indexes
    reasons: NDArray[np.uint8]
    is_group: NDArray[np.bool_]
    unit: BatchUnit = "group"
