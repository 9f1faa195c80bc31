"""Puts of new samples that wait for capacity in a partition, in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tq_service.domain.admission.bounds import RETRY_AFTER_SECONDS, Demand, bounds_of, demand_of
from tq_service.domain.changes.samples import SampleWrite
from tq_service.domain.partition import Partition
from tq_service.errors import CallCancelledError, ResourceExhaustedError, TqError
from tq_service.wait_clock import Waiting


@dataclass(slots=True, eq=False, kw_only=True)
class Admission(contextlib.AbstractContextManager["Admission"]):
    """A write that waits for capacity, and once it is admitted has it: until the end of the `with` in which it is made.

    Attributes:
        demand: what the write takes, None where that is nothing.
        seen: the marks of the queue as of which it takes that: keys may become known, or unknown, while it waits.
        admitted: done once there is capacity, or none will be.
    """

    queue: AdmissionQueue
    request_id: bytes
    write: SampleWrite
    value_bytes: int
    demand: Demand | None = None
    seen: tuple[bool, int, int] | None = None
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __exit__(self, *exception: object) -> None:
        self.queue.leave(self)


class AdmissionQueue:
    """Lets writes with new samples into one partition as its bounds allow: first come, first served.

    No write overtakes another, however little it needs, so that a large put is not put off for ever. Only the first in
    the queue is looked at, and only when something has changed. A retry takes the place of the call that it repeats, in
    the queue or after it. Confined to the event loop of its partition.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._bounds = bounds_of(partition)
        self._waiting: OrderedDict[bytes, Admission] = OrderedDict()
        self._admitted: dict[bytes, Admission] = {}
        self._end_error: Callable[[], TqError] | None = None
        partition.on_change.append(self.wake)
        partition.on_consumed.append(self.wake)

    @property
    def waiting_count(self) -> int:
        """Number of writes that wait."""
        return len(self._waiting)

    def first_waits_for(self) -> str:
        """Return why the first write that waits has no capacity; empty where none waits."""
        first = next(iter(self._waiting.values()), None)
        refusal = None if first is None or first.demand is None else self._refusal(first.demand)
        return "" if refusal is None else str(refusal)

    async def enter(self, request_id: bytes, write: SampleWrite, value_bytes: int, deadline: float | None) -> Admission:
        """Return capacity for a write, as soon as all that came before have theirs; at once where it takes none.

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
        entering = Admission(queue=self, request_id=request_id, write=write, value_bytes=value_bytes)
        self._update_demand(entering)
        if entering.demand is None:
            return entering
        for bound in self._bounds:
            if (share := bound.share(entering.demand)) > bound.limit:
                raise bound.error(share, may_fit_later=False)
        if request_id in self._admitted:
            self._admitted[request_id] = entering
            return entering
        if (earlier := self._waiting.get(request_id)) is not None:
            earlier.admitted.set_exception(CallCancelledError("a retry of this call took its place in the queue"))
        self._waiting[request_id] = entering
        self.wake()
        if self._end_error is not None:
            self.end(self._end_error)
        try:
            if not entering.admitted.done():
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                with Waiting():
                    await asyncio.wait((entering.admitted,), timeout=timeout)
            if not entering.admitted.done():
                raise self._too_late(entering)
            entering.admitted.result()
            return entering
        except BaseException:  # a cancellation may come in the turn in which capacity did
            self.leave(entering)
            raise
        finally:
            del entering  # through which an error would hold this frame, and with it the partition

    def leave(self, admission: Admission) -> None:
        """Give up the place of a write, or its capacity; a retry that has taken it over keeps it."""
        for places in (self._waiting, self._admitted):
            if places.get(admission.request_id) is admission:
                del places[admission.request_id]
                self.wake()

    def wake(self) -> None:
        """Let those in, in order, for whom there is capacity now."""
        while self._waiting:
            first = next(iter(self._waiting.values()))
            try:
                self._update_demand(first)
            except TqError as error:
                first.admitted.set_exception(error)
            else:
                if first.demand is not None:
                    if self._refusal(first.demand) is not None:
                        return
                    self._admitted[first.request_id] = first
                first.admitted.set_result(None)
            del self._waiting[first.request_id]

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waits, and those to come, with an error."""
        self._end_error = error
        for admission in self._waiting.values():
            admission.admitted.set_exception(error())
        self._waiting.clear()

    def _update_demand(self, admission: Admission) -> None:
        """Find out what a write takes, where it may be more or less than before."""
        table = self._partition.table
        marks = self._partition.sealed, table.next_index, table.removed_count
        if admission.seen != marks:
            admission.demand = demand_of(self._partition, admission.write, admission.value_bytes)
            admission.seen = marks

    def _refusal(self, demand: Demand) -> ResourceExhaustedError | None:
        """Return why a write has no capacity now, None where it has."""
        others = [admission.demand for admission in self._admitted.values() if admission.demand is not None]
        for bound in self._bounds:
            if (total := bound.total(demand, others)) > bound.limit:
                return bound.error(total, may_fit_later=True)
        return None

    def _too_late(self, late: Admission) -> TqError:
        """Return the error of a write for which there was no capacity in time, or not for the one in front."""
        for each in (late, next(iter(self._waiting.values()))):
            if each.demand is not None and (refusal := self._refusal(each.demand)) is not None:
                return refusal
        return ResourceExhaustedError(
            "there was no capacity until the deadline", retry_after_seconds=RETRY_AFTER_SECONDS
        )
