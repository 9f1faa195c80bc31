"""Work on the event loop in short slices."""

from __future__ import annotations

import asyncio
import time
from typing import Final

_SLICE_SECONDS: Final = 0.001


class Slices:
    """Gives everything else on the event loop its turn about once a millisecond."""

    __slots__ = ("_began_at",)

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    async def turn(self) -> None:
        """End the slice where it has lasted long enough; called after each small piece of work."""
        if time.perf_counter() - self._began_at >= _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began_at = time.perf_counter()
