"""Admission control for puts: byte quota, memory limit, and a queue of puts that wait for capacity."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from tq_service.admission_turn import AdmissionTurn
from tq_service.errors import QuotaExceededError, UnavailableError
from tq_service.storage.blobs.memory import RETRY_AFTER_SECONDS
from tq_service.wait_clock import Waiting

_SPARE_SHARE: Final = 16  # each spill frees an extra sixteenth of the memory limit, so not every put causes a spill


class Admission:
    """Tracks stored and reserved bytes, and queues puts that wait for capacity.

    A put that fits is admitted ahead of earlier puts that do not fit. Admitting such a put may complete a group that a
    trainer can then consume and clear. Admission alternates between tokens, and between the partitions of each token,
    so a token or partition with many puts does not delay other producers. `AdmissionTurn` prevents starvation of large
    puts.

    Puts of new rows cannot use the reserved share of the quota. A full store can therefore still accept columns for
    existing rows, and can be drained. If both new rows and columns for existing rows fit, the columns are admitted
    first. Each instance is confined to one event loop.

    Args:
        max_bytes: quota in bytes, or None if unlimited.
        reserve_share: share of the quota that is reserved for columns of existing rows.
        clock: time source for deadlines.
        on_shortage: function called when the first waiting put does not fit. The callback may `release` bytes.
        memory_bytes: maximum number of used bytes that may be in memory. If None, the entire quota may be in memory.

    Attributes:
        spilled_bytes: number of bytes that count toward the quota but are stored only in a mirror.
    """

    def __init__(
        self,
        max_bytes: int | None,
        reserve_share: float,
        clock: Callable[[], float],
        on_shortage: Callable[[], None] = lambda: None,
        memory_bytes: int | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = self.spilled_bytes = 0
        self._memory_bytes = memory_bytes
        self._new_rows_limit = None if max_bytes is None else int(max_bytes * (1 - reserve_share))
        self._clock = clock
        self._on_shortage = on_shortage
        self._is_relieving = False
        # Waiting puts by token and partition, both in the order of their turns. Puts of a partition are in arrival
        # order.
        self._waiting: OrderedDict[str, OrderedDict[str, dict[_Waiter, None]]] = OrderedDict()
        self._first: _Waiter | None = None  # first waiter at the last check, or None if the queue must be checked again
        self._fits_at = 0  # a waiting put fits if at most this number of bytes is used
        self._turn = AdmissionTurn(clock)
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False

    async def reserve(
        self,
        size: int,
        *,
        producer: tuple[str, str] = ("", ""),
        for_existing_rows: bool,
        deadline: float | None,
    ) -> None:
        """Reserve `size` bytes, waiting for capacity until the deadline.

        Args:
            size: number of bytes to reserve.
            producer: the token and the partition of the put.
            for_existing_rows: whether the put contains columns for existing rows.
            deadline: when to stop waiting, on the clock passed to the constructor. None means no deadline.

        Raises:
            QuotaExceededError: the put is larger than the quota, or no capacity became available by the deadline.
                `retry_after_seconds` is set only if the call waited.
            UnavailableError: there is not enough capacity, and the service is draining.
        """
        limit = self.max_bytes if for_existing_rows else self._new_rows_limit
        if limit is not None and size > limit:
            kind = "columns for existing rows" if for_existing_rows else "new rows"
            raise QuotaExceededError(
                f"a put of {size} bytes exceeds the limit of {limit} bytes for {kind}. Split the put, or raise "
                "max_bytes.",
                metadata={"limit_name": "max_bytes", "got": str(size), "limit": str(limit)},
            )
        if not self._waiting and (limit is None or self.used_bytes + size <= limit):
            self.used_bytes += size
            return
        waiter = _Waiter(size, limit, producer, for_existing_rows=for_existing_rows, since=self._clock())
        self._waiting.setdefault(waiter.token, OrderedDict()).setdefault(waiter.partition_id, {})[waiter] = None
        if limit is not None:
            self._fits_at = max(self._fits_at, limit - size)
        self.admit()
        if self._is_draining:
            self._end_waits()
        if not waiter.granted.done():
            await self._wait(waiter, deadline)
        waiter.granted.result()

    def drain(self) -> None:
        """Fail all current waits and reject new ones because the service is about to stop."""
        self._is_draining = True
        self._end_waits()

    def _end_waits(self) -> None:
        for waiter in list(self._waiters()):
            self._leave(waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(
                    UnavailableError("no capacity is left, and the service is draining. Retry after it has restarted.")
                )
        self._set_timer()

    def release(self, size: int) -> None:
        """Release bytes, and admit waiting puts that now fit."""
        self.used_bytes -= size
        self.admit()

    @property
    def has_waiting(self) -> bool:
        """Whether any puts are waiting for capacity."""
        return bool(self._waiting)

    def has_memory(self) -> bool:
        """Return whether total use is below the quota, and use of memory is below the memory limit."""
        limits = ((self.max_bytes, self.used_bytes), (self._memory_bytes, self.used_bytes - self.spilled_bytes))
        return all(limit is None or used < limit for limit, used in limits)

    def to_spill(self) -> int:
        """Return the number of bytes that should be spilled from memory."""
        if self._memory_bytes is None:
            return 0
        excess = self.used_bytes - self.spilled_bytes - self._memory_bytes
        return excess + self._memory_bytes // _SPARE_SHARE if excess > 0 else 0

    def add(self, size: int) -> None:
        """Count bytes as used without a reservation, for example bytes that the engine needs to compact a put."""
        self.used_bytes += size

    def admit(self) -> None:
        """Admit waiting puts that fit. If the first remaining put does not fit, call `on_shortage` and try again."""
        if not self._waiting:
            return
        if not self._admit_fitting() and not self._is_relieving:
            self._is_relieving = True
            try:
                self._on_shortage()
            finally:
                self._is_relieving = False
            self._admit_fitting()
        self._set_timer()

    def _admit_fitting(self) -> bool:
        """Admit waiting puts that fit. Return False if a put remains at the head of the queue and still does not fit.

        Bytes are freed in thousands of small steps, so the queue is examined only if a waiting put may fit.
        """
        holder = self._turn.holder
        if isinstance(holder, _Waiter) and self._lacking(holder) > 0:
            return False
        if self._first is not None and self.used_bytes > self._fits_at:
            return False
        for waiter in [each for each in self._waiters() if each.granted.done()]:
            self._leave(waiter)  # the wait has ended, but its task has not resumed yet
        by_kind = sorted(self._waiters(), key=lambda waiter: not waiter.for_existing_rows)  # stable
        holder = self._turn.begin(waiter for waiter in by_kind if self._lacking(waiter) > 0)
        for waiter in by_kind:
            if (holder is None or holder is waiter) and self._lacking(waiter) <= 0:
                self._leave(waiter)
                if waiter.token in self._waiting:
                    self._waiting.move_to_end(waiter.token)
                    if waiter.partition_id in (partitions := self._waiting[waiter.token]):
                        partitions.move_to_end(waiter.partition_id)
                self.used_bytes += waiter.size
                waiter.granted.set_result(None)
        left = [waiter for waiter in by_kind if not waiter.granted.done()]
        self._first = left[0] if left else None
        self._fits_at = max((each.limit - each.size for each in left if each.limit is not None), default=0)
        return self._first is None or self._lacking(self._first) <= 0

    def _lacking(self, waiter: _Waiter) -> int:
        """Return how many more bytes must be freed to admit a waiting put. The put fits if the result is at most 0."""
        return 0 if waiter.limit is None else self.used_bytes + waiter.size - waiter.limit

    def _waiters(self) -> Iterator[_Waiter]:
        """Yield waiting puts, alternating between tokens and, for each token, between its partitions."""
        return _alternating(_alternating(partitions.values()) for partitions in self._waiting.values())

    def _leave(self, waiter: _Waiter) -> None:
        partitions = self._waiting.get(waiter.token, OrderedDict())
        waiting = partitions.get(waiter.partition_id, {})
        waiting.pop(waiter, None)
        if not waiting:
            partitions.pop(waiter.partition_id, None)
        if not partitions:
            self._waiting.pop(waiter.token, None)
        self._turn.leave(waiter)
        if self._first is waiter:
            self._first = None

    def _set_timer(self) -> None:
        """Schedule a check of all waiting puts for the end of the current turn."""
        over_at = self._turn.over_at if self._waiting else None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if over_at is not None:
            seconds = max(0.0, over_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(seconds, self.admit)

    async def _wait(self, waiter: _Waiter, deadline: float | None) -> None:
        try:
            with Waiting():
                async with asyncio.timeout(None if deadline is None else deadline - self._clock()):
                    await waiter.granted
        except BaseException as error:
            in_front = self._in_front_of(waiter)
            # The put may have been admitted in the same event-loop iteration that ended the wait.
            granted = waiter.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.release(waiter.size)
            else:
                granted.cancel()
                self._leave(waiter)
                self.admit()
            if not isinstance(error, TimeoutError):
                raise
            raise QuotaExceededError(
                f"no capacity for {waiter.size} bytes became available by the deadline: {self.used_bytes} of "
                f"{self.max_bytes} bytes are in use{in_front}. Clear consumed samples, or raise max_bytes.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                metadata={
                    "limit_name": "max_bytes",
                    "got": str(self.used_bytes + waiter.size),
                    "limit": str(waiter.limit),
                },
            ) from None

    def _in_front_of(self, waiter: _Waiter) -> str:
        """Describe the put that delayed this one, for an error message. Return "" if this put itself lacks capacity."""
        holder = self._turn.holder
        if self._lacking(waiter) > 0 or not isinstance(holder, _Waiter) or holder is waiter:
            return ""
        whose = "this" if holder.partition_id == waiter.partition_id else "another"
        return f", and a put of {holder.size} bytes to {whose} partition, which has waited longest, is next"


def _alternating(sources: Iterable[Iterable[_Waiter]]) -> Iterator[_Waiter]:
    """Yield the first put of each source, followed by the second put of each source, and so on."""
    left = [iter(source) for source in sources]
    while left:
        found = [(each, waiter) for each in left if (waiter := next(each, None)) is not None]
        yield from (waiter for _, waiter in found)
        left = [each for each, _ in found]


class _Waiter:
    """A put that is waiting for capacity."""

    __slots__ = ("for_existing_rows", "granted", "limit", "partition_id", "since", "size", "token")

    def __init__(
        self, size: int, limit: int | None, producer: tuple[str, str], *, for_existing_rows: bool, since: float
    ) -> None:
        self.size = size
        self.limit = limit
        self.token, self.partition_id = producer
        self.for_existing_rows = for_existing_rows
        self.since = since
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
