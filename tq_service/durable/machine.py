"""Whether the machine has been started anew: what was not synced may be lost only then."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def machine_boot_id() -> str:
    """Return what stays the same until the machine, not the process, is started again; "" where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
