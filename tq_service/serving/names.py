"""Looks the names of a write through in a thread, where there are many."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tq_service.state.names import Names, look_through

_LEAST_IN_THREAD: Final = 1 << 14  # names that take the loop a millisecond


def looking_through(keys: Sequence[str], groups: Sequence[str]) -> asyncio.Future[Names]:
    """Return what `look_through` will find out: of many names in a thread, while the bytes of the samples come."""
    loop = asyncio.get_running_loop()
    if max(len(keys), len(groups)) >= _LEAST_IN_THREAD:
        return loop.run_in_executor(None, look_through, keys, groups)
    found: asyncio.Future[Names] = loop.create_future()
    found.set_result(look_through(keys, groups))
    return found
