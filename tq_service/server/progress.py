"""Time limits of calls: until when they may wait, and how slowly the other side of a stream may go."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final, TypeVar

from tq_service.errors import DeadlineError

Part = TypeVar("Part")

LEAST_PROGRESS_BYTES: Final = 64 * 1024
"""What must come, or go, within the time that a stream may stall; less is as good as nothing."""


GRACE_SECONDS: Final = 10.0
"""How long the other side of a stream may be waited for before it must keep to a rate."""


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
        self._total_bytes = 0
        self._waited_seconds = 0.0
        self._step: tuple[asyncio.Timeout, float] | None = None  # the one under way, and when it began
        self._least_rate: float | None = None  # of a stream that was ended for being slower

    async def wait_for(self, step: Awaitable[Part]) -> Part:
        """Return what a step of the stream returns.

        Raises:
            DeadlineError: the time is over, or others need what the stream holds and it is too slow.
        """
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(self._left_seconds) as timeout:
                self._step = timeout, began_at
                return await step
        except TimeoutError:
            raise self._error() from None
        finally:
            self._step = None
            took = time.monotonic() - began_at
            self._left_seconds -= took
            self._waited_seconds += took

    def moved(self, size_bytes: int) -> None:
        """Count bytes."""
        self._total_bytes += size_bytes
        self._moved_bytes += size_bytes
        if self._moved_bytes >= LEAST_PROGRESS_BYTES:
            self._moved_bytes = 0
            self._left_seconds = self._seconds

    def end_if_slower(self, bytes_per_second: float) -> None:
        """End the step under way if the other side was slower than this, the grace period not counted."""
        if self._step is None or self._least_rate is not None:
            return
        timeout, began_at = self._step
        waited = self._waited_seconds + time.monotonic() - began_at
        if self._total_bytes < bytes_per_second * (waited - GRACE_SECONDS):
            self._least_rate = bytes_per_second
            timeout.reschedule(asyncio.get_running_loop().time())

    def _error(self) -> DeadlineError:
        if self._least_rate is None:
            return DeadlineError(
                f"{self._what} within {self._seconds:g} s (stall_seconds); the call is ended so that it holds no "
                "memory of the service",
                metadata={"limit_name": "stall_seconds", "limit": f"{self._seconds:g}"},
            )
        least = f"{self._least_rate:.0f}"
        return DeadlineError(
            f"{self._total_bytes} bytes moved in {self._waited_seconds:.1f} s while other puts wait for capacity; "
            f"expected {least} per second after {GRACE_SECONDS:g} s (min_stream_rate_bytes, shared by all streams). "
            "Use a faster connection, or lower the setting.",
            metadata={"limit_name": "min_stream_rate_bytes", "got": str(self._total_bytes), "limit": least},
        )


class LeastRate:
    """The rate that the streams of a storage service must keep together while puts wait for capacity.

    A stream holds the bytes that it sends or fills, so a slow one keeps them from those puts. Each of n streams must
    keep an nth of the rate: many that share a network are no slower than they can be. Confined to one event loop.

    Args:
        bytes_per_second: of all streams together; 0: any.
    """

    def __init__(self, bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._streams: set[Progress] = set()

    @contextlib.contextmanager
    def watching(self, progress: Progress) -> Iterator[None]:
        """Have a stream keep to the rate for the time of a `with`."""
        self._streams.add(progress)
        try:
            yield
        finally:
            self._streams.discard(progress)

    def enforce(self) -> None:
        """End the streams that are too slow; to be called every second or so while puts wait."""
        for progress in self._streams:
            progress.end_if_slower(self._bytes_per_second / len(self._streams))


class received(AsyncIterator[Part]):  # noqa: N801  (reads as a function does)
    """The messages of a stream as they come; it keeps none of them, as a generator would that is not resumed.

    Args:
        parts: the stream.
        progress: counts the time in which it is waited for.
        size: returns the bytes of a message.

    Raises:
        DeadlineError: they come too slowly.
    """

    def __init__(self, parts: AsyncIterator[Part], progress: Progress, size: Callable[[Part], int]) -> None:
        self._progress = progress
        self._parts = aiter(parts)
        self._size = size

    async def __anext__(self) -> Part:
        part = await self._progress.wait_for(anext(self._parts))
        self._progress.moved(self._size(part))
        return part
