"""Time limits of calls: until when they may wait, and how slowly the other side of a stream may go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

import grpc

from tq_service.errors import DeadlineError

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Part = TypeVar("Part")

LEAST_PROGRESS_BYTES: Final = 64 * 1024
"""What must come, or go, within the time that a stream may stall; less is as good as nothing."""


class Progress:
    """Counts down while the other side of a stream is waited for, and starts again whenever enough bytes have moved.

    Args:
        seconds: how long it may take to move `LEAST_PROGRESS_BYTES`.
        what: what did not come or go, for the error.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._left_seconds = seconds
        self._moved_bytes = 0
        self._what = what

    async def wait_for(self, step: Awaitable[Part]) -> Part:
        """Return what a step of the stream returns.

        Raises:
            DeadlineError: the time is over.
        """
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(self._left_seconds):
                return await step
        except TimeoutError:
            raise DeadlineError(
                f"{self._what} within {self._seconds:g} s (stall_seconds); the call is ended so that it holds no "
                "memory of the service",
                metadata={"limit_name": "stall_seconds", "limit": f"{self._seconds:g}"},
            ) from None
        finally:
            self._left_seconds -= time.monotonic() - began_at

    def moved(self, size_bytes: int) -> None:
        """Count bytes."""
        self._moved_bytes += size_bytes
        if self._moved_bytes >= LEAST_PROGRESS_BYTES:
            self._moved_bytes = 0
            self._left_seconds = self._seconds


class received(AsyncIterator[Part]):  # noqa: N801  (reads as a function does)
    """The messages of a stream as they come; it keeps none of them, as a generator would that is not resumed.

    Args:
        parts: the stream.
        stall_seconds: how long it may take to send `LEAST_PROGRESS_BYTES`.
        size: returns the bytes of a message.

    Raises:
        DeadlineError: they come too slowly.
    """

    def __init__(self, parts: AsyncIterator[Part], stall_seconds: float, size: Callable[[Part], int]) -> None:
        self._progress = Progress(stall_seconds, f"fewer than {LEAST_PROGRESS_BYTES} bytes came")
        self._parts = aiter(parts)
        self._size = size

    async def __anext__(self) -> Part:
        part = await self._progress.wait_for(anext(self._parts))
        self._progress.moved(self._size(part))
        return part
