"""How long tests wait if a fault lasts until the deadline of a call: a service that hangs, is down, or is full."""

from __future__ import annotations

import os
from typing import Final

FAULT_SECONDS: Final = float(os.environ.get("TQ_TEST_FAULT_SECONDS", "1"))
"""The deadline of such a call. The first tries of the call must get through within it, on a busy machine too."""
