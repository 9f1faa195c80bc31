"""Puts of new samples that wait for capacity in a partition, in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tq_service.domain.admission.bounds import RETRY_AFTER_SECONDS, AdmissionLimits, Demand, LimitViolation
from tq_service.domain.changes.samples import SampleWrite
from tq_service.domain.partition import Partition
from tq_service.errors import CallCancelledError, ResourceExhaustedError, TqError


class Reservation(contextlib.AbstractContextManager["Reservation"]):
    """Capacity for a write, kept for it until it is made or abandoned: the `with` in which it is made."""

    __slots__ = ("_release", "demand", "request_id")

    def __init__(self, request_id: bytes, demand: Demand, release: Callable[[Reservation], None]) -> None:
        self.request_id = request_id
        self.demand = demand
        self._release = release

    def __exit__(self, *exception: object) -> None:
        self._release(self)


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiter:
    """A write in the queue, and what it takes as of `seen`: keys may become known, or unknown, while it waits."""

    request_id: bytes
    write: SampleWrite
    value_bytes: int
    demand: Demand
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
        self._bounds = AdmissionLimits(partition)
        self._waiting: OrderedDict[bytes, _Waiter] = OrderedDict()
        self._reserved: dict[bytes, Reservation] = {}
        self._gone: Callable[[], TqError] | None = None
        partition.on_change.append(self.wake)
        partition.on_consumed.append(self.wake)

    @property
    def waiting_count(self) -> int:
        """Number of writes that wait."""
        return len(self._waiting)

    async def enter(
        self, request_id: bytes, write: SampleWrite, value_bytes: int, deadline: float | None
    ) -> Reservation | None:
        """Return room for a write, as soon as all that came before have theirs; None where it takes none.

        Args:
            request_id: the same over retries.
            write: what is to be written.
            value_bytes: bytes of its columns.
            deadline: until when to wait, by `time.monotonic`; None: until the caller is cancelled.

        Raises:
            QuotaExceededError, RunAheadError: larger than a bound (at once), or no room until the deadline (with
                `retry_after_seconds`).
            PartitionClearedError, UnavailableError: the partition or the service went away meanwhile.
            CallCancelledError: a retry took the place of this call.
            TqError: the partition would refuse the write whatever room there is.
        """
        demand = self._bounds.demand(write, value_bytes)
        if demand is None:
            return None
        self._bounds.check_possible(demand)
        earlier = self._waiting.get(request_id)
        if request_id in self._reserved or (not self._waiting and self._violation(demand) is None):
            return self._reserve(request_id, demand)
        if self._gone is not None:
            raise self._gone()
        waiter = _Waiter(request_id=request_id, write=write, value_bytes=value_bytes, demand=demand, seen=self._seen())
        self._waiting[request_id] = waiter
        if earlier is not None and not earlier.reserved.done():
            earlier.reserved.set_exception(CallCancelledError("a retry of this call took its place in the line"))
        self.wake()
        return await self._wait(waiter, deadline)

    def wake(self) -> None:
        """Let those in, in order, for whom there is room now."""
        while self._waiting:
            waiter = next(iter(self._waiting.values()))
            if not waiter.reserved.done():
                try:
                    self._look_again(waiter)
                except TqError as error:
                    waiter.reserved.set_exception(error)
            if not waiter.reserved.done():
                if self._violation(waiter.demand) is not None:
                    return
                waiter.reserved.set_result(self._reserve(waiter.request_id, waiter.demand))
            del self._waiting[waiter.request_id]

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waits, and those to come, with an error."""
        self._gone = error
        for waiter in self._waiting.values():
            if not waiter.reserved.done():
                waiter.reserved.set_exception(error())
        self._waiting.clear()

    def _look_again(self, waiter: _Waiter) -> None:
        """Find anew what a write takes where that may have changed; one that takes nothing now is let in."""
        if waiter.seen == self._seen() or (waiter.write.keys is None and not self._partition.sealed):
            return
        demand = self._bounds.demand(waiter.write, waiter.value_bytes)
        waiter.seen = self._seen()
        if demand is None:
            waiter.reserved.set_result(None)
        else:
            waiter.demand = demand

    def _seen(self) -> tuple[bool, int, int]:
        table = self._partition.table
        return self._partition.sealed, table.next_index, table.removed_count

    def _violation(self, demand: Demand) -> LimitViolation | None:
        return self._bounds.violation(demand, (reservation.demand for reservation in self._reserved.values()))

    def _reserve(self, request_id: bytes, demand: Demand) -> Reservation:
        reservation = self._reserved[request_id] = Reservation(request_id, demand, self._release)
        return reservation

    def _release(self, reservation: Reservation) -> None:
        if self._reserved.get(reservation.request_id) is reservation:  # else a retry has its own by now
            del self._reserved[reservation.request_id]
            self.wake()

    async def _wait(self, waiter: _Waiter, deadline: float | None) -> Reservation | None:
        reserved = waiter.reserved
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await reserved
        except TimeoutError:
            if reserved.cancelled():
                raise self._too_late(waiter) from None
            return reserved.result()  # room came in the very turn in which the time was over
        except asyncio.CancelledError:
            if (
                not reserved.cancelled()
                and reserved.exception() is None
                and (reservation := reserved.result()) is not None
            ):
                self._release(reservation)
            raise
        finally:
            self._leave(waiter)
            del waiter, reserved  # through which an error would hold this frame, and with it the partition

    def _leave(self, waiter: _Waiter) -> None:
        if self._waiting.get(waiter.request_id) is waiter:
            del self._waiting[waiter.request_id]
            self.wake()

    def _too_late(self, waiter: _Waiter) -> TqError:
        """Return the error of a write for which there was no room in time, or which was behind others like that."""
        demands = [waiter.demand, *(each.demand for each in itertools.islice(self._waiting.values(), 1))]
        violation = next((found for demand in demands if (found := self._violation(demand)) is not None), None)
        if violation is None:
            return ResourceExhaustedError(
                "there was no room until the deadline", retry_after_seconds=RETRY_AFTER_SECONDS
            )
        return violation.error(self._partition.partition_id, " and it stayed so until the deadline", may_fit_later=True)
