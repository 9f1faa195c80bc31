"""What stands in columns of rows: their states, one byte each, and what became of them for a task."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tq_service.schema import SampleState

CLEARED, LIVE, HELD, FAILED = 0, 1, 2, 3
STATE_CODES = {SampleState.LIVE: LIVE, SampleState.HELD: HELD, SampleState.FAILED: FAILED}
STATE_NAMES = ("cleared", "live", "held", "failed")

# In the `claim` column of a task, beside the serials of its claims; see `claims.ledger`.
UNCLAIMED = 0  # so that a new task costs the same however many rows there are
CONSUMED_EARLIER = 1
DEAD_LETTERED = -1
DROPPED = -2
LAST_RESERVED = 2  # serials are above it, so that the marks of leased rows are below all others


def is_open(states: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which rows are live or held, by their states: they can be claimed now, or later."""
    mask: NDArray[np.bool_] = states == LIVE
    mask |= states == HELD
    return mask
