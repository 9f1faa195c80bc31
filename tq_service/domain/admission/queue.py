"""Puts of new samples that wait for capacity in a partition, in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tq_service.domain.admission.bounds import RETRY_AFTER_SECONDS, Bound, Demand, bounds_of, demand_of
from tq_service.domain.changes.samples import SampleWrite
from tq_service.domain.partition import Partition
from tq_service.errors import CallCancelledError, ResourceExhaustedError, TqError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reservation(contextlib.AbstractContextManager["Reservation"]):
    """Capacity for a write, kept for it until it is made or abandoned: the `with` in which it is made."""

    request_id: bytes
    demand: Demand
    release: Callable[[Reservation], None]

    def __exit__(self, *exception: object) -> None:
        self.release(self)


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiter:
    """A write in the queue, and what it takes as of `seen`: keys may become known, or unknown, while it waits."""

    request_id: bytes
    write: SampleWrite
    value_bytes: int
    demand: Demand | None
    seen: tuple[bool, int, int]
    reserved: asyncio.Future[Reservation | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class AdmissionQueue:
    """Lets writes with new samples into one partition as its bounds allow: first come, first served.

    No write overtakes another, however little it needs, so that a large put is not put off for ever. Only the first in
    the queue is looked at, and only when something has changed. A retry takes the place of the call that it repeats, in
    the queue or after it. Confined to the event loop of its partition.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._bounds = bounds_of(partition)
        self._waiting: OrderedDict[bytes, _Waiter] = OrderedDict()
        self._reserved: dict[bytes, Reservation] = {}
        self._end_error: Callable[[], TqError] | None = None
        partition.on_change.append(self.wake)
        partition.on_consumed.append(self.wake)

    @property
    def waiting_count(self) -> int:
        """Number of writes that wait."""
        return len(self._waiting)

    async def enter(
        self, request_id: bytes, write: SampleWrite, value_bytes: int, deadline: float | None
    ) -> Reservation | None:
        """Return capacity for a write, as soon as all that came before have theirs; None where it takes none.

        Args:
            request_id: the same over retries.
            write: what is to be written.
            value_bytes: bytes of its columns.
            deadline: until when to wait, by `time.monotonic`; None: until the caller is cancelled.

        Raises:
            QuotaExceededError, StalenessLimitError: larger than a bound (at once), or no capacity until the deadline
                (with `retry_after_seconds`).
            PartitionClearedError, UnavailableError: the partition or the service went away meanwhile.
            CallCancelledError: a retry took the place of this call.
            TqError: the partition would refuse the write whatever capacity there is.
        """
        demand = demand_of(self._partition, write, value_bytes)
        if demand is None:
            return None
        for bound in self._bounds:
            if (share := bound.share(demand)) > bound.limit:
                raise bound.error(share, may_fit_later=False)
        if request_id in self._reserved:
            return self._reserve(request_id, demand)
        waiter = _Waiter(request_id=request_id, write=write, value_bytes=value_bytes, demand=demand, seen=self._seen())
        if (earlier := self._waiting.get(request_id)) is not None:
            earlier.reserved.set_exception(CallCancelledError("a retry of this call took its place in the queue"))
        self._waiting[request_id] = waiter
        self.wake()
        if self._end_error is not None:
            self.end(self._end_error)
        return await self._wait(waiter, deadline)

    def wake(self) -> None:
        """Let those in, in order, for whom there is capacity now."""
        while self._waiting:
            request_id, waiter = next(iter(self._waiting.items()))
            try:
                if waiter.seen != self._seen():
                    waiter.demand = demand_of(self._partition, waiter.write, waiter.value_bytes)
                    waiter.seen = self._seen()
            except TqError as error:
                waiter.reserved.set_exception(error)
            else:
                if waiter.demand is None:
                    waiter.reserved.set_result(None)
                elif self._exceeded(waiter.demand) is None:
                    waiter.reserved.set_result(self._reserve(request_id, waiter.demand))
                else:
                    return
            del self._waiting[request_id]

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waits, and those to come, with an error."""
        self._end_error = error
        for waiter in self._waiting.values():
            waiter.reserved.set_exception(error())
        self._waiting.clear()

    def _seen(self) -> tuple[bool, int, int]:
        """Return what changes whenever a write may take more or less than before."""
        table = self._partition.table
        return self._partition.sealed, table.next_index, table.removed_count

    def _exceeded(self, demand: Demand) -> tuple[Bound, float] | None:
        """Return a bound that a write would go beyond, and how much there would be; None where there is capacity."""
        others = [reservation.demand for reservation in self._reserved.values()]
        totals = ((bound, bound.total(demand, others)) for bound in self._bounds)
        return next(((bound, total) for bound, total in totals if total > bound.limit), None)

    def _reserve(self, request_id: bytes, demand: Demand) -> Reservation:
        reservation = Reservation(request_id=request_id, demand=demand, release=self._release)
        self._reserved[request_id] = reservation
        return reservation

    def _release(self, reservation: Reservation) -> None:
        if self._reserved.get(reservation.request_id) is reservation:  # else a retry has its own by now
            del self._reserved[reservation.request_id]
            self.wake()

    async def _wait(self, waiter: _Waiter, deadline: float | None) -> Reservation | None:
        reserved = waiter.reserved
        try:
            if not reserved.done():
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                await asyncio.wait((reserved,), timeout=timeout)
            if not reserved.done():
                raise self._too_late(waiter)
            return reserved.result()
        except asyncio.CancelledError:  # it may have come in the turn in which capacity did
            if reserved.done() and reserved.exception() is None and (reservation := reserved.result()) is not None:
                self._release(reservation)
            raise
        finally:
            if self._waiting.get(waiter.request_id) is waiter:
                del self._waiting[waiter.request_id]
                self.wake()
            del waiter, reserved  # through which an error would hold this frame, and with it the partition

    def _too_late(self, waiter: _Waiter) -> TqError:
        """Return the error of a write for which there was no capacity in time, or not for the one in front."""
        for each in (waiter, next(iter(self._waiting.values()))):
            if each.demand is not None and (exceeded := self._exceeded(each.demand)) is not None:
                bound, total = exceeded
                return bound.error(total, may_fit_later=True)
        return ResourceExhaustedError(
            "there was no capacity until the deadline", retry_after_seconds=RETRY_AFTER_SECONDS
        )
