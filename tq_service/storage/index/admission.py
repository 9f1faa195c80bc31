"""The byte quota, and the queue of puts that wait for capacity."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tq_service.errors import QuotaExceededError, UnavailableError
from tq_service.storage.blobs.base import RETRY_AFTER_SECONDS
from tq_service.wait_clock import Waiting


class Admission:
    """Counts the bytes stored and reserved, and lets puts wait for capacity in order of arrival.

    Puts for new rows leave a reserve that columns for existing rows may use, so that a full store can be drained. Each
    of the two kinds is served first come, first served, however small a later put is, and new rows wait while existing
    ones do. Confined to one event loop.

    Args:
        max_bytes: the quota; None: no bound.
        reserve_share: share of the quota that new rows leave free.
        clock: what deadlines are measured with.
        on_shortage: called with the bytes that the first in the queue lacks; may `release` what it can do without.
    """

    def __init__(
        self,
        max_bytes: int | None,
        reserve_share: float,
        clock: Callable[[], float],
        on_shortage: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._new_rows_limit = None if max_bytes is None else int(max_bytes * (1 - reserve_share))
        self._clock = clock
        self._on_shortage = on_shortage
        self._is_relieving = False
        self._new: deque[_Waiter] = deque()
        self._existing: deque[_Waiter] = deque()
        self._is_draining = False

    async def reserve(self, size: int, *, for_existing_rows: bool, deadline: float | None) -> None:
        """Count `size` bytes as used, waiting for capacity until the deadline.

        Raises:
            QuotaExceededError: larger than the quota (at once), or no capacity until the deadline (with retry-after).
            UnavailableError: no capacity, and the service is draining.
        """
        limit = self.max_bytes if for_existing_rows else self._new_rows_limit
        if limit is not None and size > limit:
            kind = "columns for existing rows" if for_existing_rows else "new rows"
            raise QuotaExceededError(
                f"a put of {size} bytes is larger than the {limit} bytes that {kind} may ever use; split it, or raise "
                "max_bytes",
                metadata={"limit_name": "max_bytes", "got": str(size), "limit": str(limit)},
            )
        waiter = _Waiter(size, limit)
        queue = self._existing if for_existing_rows else self._new
        queue.append(waiter)
        self.admit()
        if self._is_draining:
            self._end_waits()
        if not waiter.granted.done():
            await self._wait(waiter, deadline)
        waiter.granted.result()

    def drain(self) -> None:
        """End the waits, and allow no more: the service is about to stop."""
        self._is_draining = True
        self._end_waits()

    def _end_waits(self) -> None:
        for waiter in (*self._existing, *self._new):
            if not waiter.granted.done():
                waiter.granted.set_exception(
                    UnavailableError("there is no capacity, and the service is draining; put it again when it is back")
                )

    def release(self, size: int) -> None:
        """Count bytes as free again, and admit the puts that fit now."""
        self.used_bytes -= size
        self.admit()

    @property
    def has_waiting(self) -> bool:
        """Whether puts wait for capacity."""
        return any(not waiter.granted.done() for waiter in (*self._existing, *self._new))

    def has_free(self) -> bool:
        """Whether there is capacity at all."""
        return self.max_bytes is None or self.used_bytes < self.max_bytes

    def add(self, size: int) -> None:
        """Count bytes as used that the engine itself needs, such as for moving a put."""
        self.used_bytes += size

    def admit(self) -> None:
        """Admit puts, in order, for which there is capacity, or can be made."""
        lacking = self._admit_fitting()
        if lacking and not self._is_relieving:
            self._is_relieving = True
            try:
                self._on_shortage(lacking)
            finally:
                self._is_relieving = False
            self._admit_fitting()

    def _admit_fitting(self) -> int:
        """Admit puts for which there is capacity; return how many bytes the next one lacks, 0 where none waits."""
        for queue in (self._existing, self._new):
            while queue:
                waiter = queue[0]
                if waiter.granted.done():  # its wait has ended, but its task has not run since
                    queue.popleft()
                    continue
                if waiter.limit is not None and self.used_bytes + waiter.size > waiter.limit:
                    return self.used_bytes + waiter.size - waiter.limit
                queue.popleft()
                self.used_bytes += waiter.size
                waiter.granted.set_result(None)
        return 0

    async def _wait(self, waiter: _Waiter, deadline: float | None) -> None:
        try:
            with Waiting():
                async with asyncio.timeout(None if deadline is None else deadline - self._clock()):
                    await waiter.granted
        except BaseException as error:
            # Capacity may have been granted in the very turn in which the wait was given up.
            if waiter.is_granted:
                self.release(waiter.size)
            else:
                waiter.granted.cancel()
                self.admit()
            if not isinstance(error, TimeoutError):
                raise
            raise QuotaExceededError(
                f"no capacity for {waiter.size} bytes until the deadline: {self.used_bytes} of {self.max_bytes} bytes "
                "are used; clear consumed samples, or raise max_bytes",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                metadata={
                    "limit_name": "max_bytes",
                    "got": str(self.used_bytes + waiter.size),
                    "limit": str(waiter.limit),
                },
            ) from None


class _Waiter:
    """A put that waits for capacity."""

    __slots__ = ("granted", "limit", "size")

    def __init__(self, size: int, limit: int | None) -> None:
        self.size = size
        self.limit = limit
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_granted(self) -> bool:
        """Whether it has its capacity."""
        return self.granted.done() and not self.granted.cancelled() and self.granted.exception() is None
