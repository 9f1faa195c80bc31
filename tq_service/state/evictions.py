"""Evictions: samples and groups that claims gave up, in the same change as their plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq_service.state.plan import Indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """What a claim evicts at once: units, each of which is a sample or a group.

    Attributes:
        rows: global indexes, those of unit 0 first.
        sizes: number of samples of each unit `(units,)`.
        reasons: why each is evicted `(units,)`, as numbers of `EvictionCode`.
        is_group: which units are groups `(units,)`.
    """

    rows: Indexes
    sizes: Indexes
    reasons: NDArray[np.uint8]
    is_group: NDArray[np.bool_]
