"""States of rows as they are kept in a column: one byte each."""

from __future__ import annotations

from tq_service.schema import SampleState

CLEARED, LIVE, HELD, FAILED = 0, 1, 2, 3
STATE_CODES = {SampleState.LIVE: LIVE, SampleState.HELD: HELD, SampleState.FAILED: FAILED}
STATE_NAMES = ("cleared", "live", "held", "failed")
