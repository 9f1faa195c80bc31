"""How long the event loop keeps everybody waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

_STEP_SECONDS: Final = 0.002


class LoopWatch:
    """Measures by how much a short sleep takes longer than it should, again and again.

    Attributes:
        longest_seconds: the longest time so far for which the loop did something else, whatever that was.
    """

    def __init__(self) -> None:
        self.longest_seconds = 0.0

    async def _watch(self) -> None:
        while True:
            began_at = time.perf_counter()
            await asyncio.sleep(_STEP_SECONDS)
            late_seconds = time.perf_counter() - began_at - _STEP_SECONDS
            self.longest_seconds = max(self.longest_seconds, late_seconds)


@contextlib.asynccontextmanager
async def watching_loop() -> AsyncIterator[LoopWatch]:
    """Watch the loop until the end of the `async with`."""
    watch = LoopWatch()
    task = asyncio.get_running_loop().create_task(watch._watch())
    await asyncio.sleep(0)  # so that it is under way before anything else is done
    try:
        yield watch
    finally:
        task.cancel()
