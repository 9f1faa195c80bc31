"""Puts of new samples that wait for room in a partition, in order of arrival."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from tq_service.domain.admission.bounds import RETRY_AFTER_SECONDS, Bounds, Need, Shortage
from tq_service.domain.changes.samples import SampleWrite
from tq_service.domain.partition import Partition
from tq_service.errors import CallCancelledError, ResourceExhaustedError, TqError


class Grant:
    """Room for a write, kept for it until it is made or given up: the `with` in which it is made."""

    __slots__ = ("_give_back", "need", "request_id")

    def __init__(self, request_id: bytes, need: Need, give_back: Callable[[Grant], None]) -> None:
        self.request_id = request_id
        self.need = need
        self._give_back = give_back

    def __enter__(self) -> Grant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._give_back(self)


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiter:
    """A write in the line, and what it takes as of `seen`: keys may become known, or unknown, while it waits."""

    request_id: bytes
    write: SampleWrite
    value_bytes: int
    need: Need
    seen: tuple[bool, int, int]
    granted: asyncio.Future[Grant | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PutLine:
    """Lets writes with new samples into one partition as its bounds allow: first come, first served.

    Nobody overtakes, however little he needs, so that a large put is not put off for ever. Only the first in the line
    is looked at, and only when something has changed. A retry takes the place of the call that it repeats, in the line
    or after it. Confined to the event loop of its partition.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._bounds = Bounds(partition)
        self._waiting: OrderedDict[bytes, _Waiter] = OrderedDict()
        self._granted: dict[bytes, Grant] = {}
        self._gone: Callable[[], TqError] | None = None
        partition.on_change.append(self.wake)
        partition.on_consumed.append(self.wake)

    @property
    def waiting_count(self) -> int:
        """Number of writes that wait."""
        return len(self._waiting)

    async def enter(
        self, request_id: bytes, write: SampleWrite, value_bytes: int, deadline: float | None
    ) -> Grant | None:
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
        need = self._bounds.need(write, value_bytes)
        if need is None:
            return None
        self._bounds.check_possible(need)
        earlier = self._waiting.get(request_id)
        if request_id in self._granted or (not self._waiting and self._shortage(need) is None):
            return self._grant(request_id, need)
        if self._gone is not None:
            raise self._gone()
        waiter = _Waiter(request_id=request_id, write=write, value_bytes=value_bytes, need=need, seen=self._seen())
        self._waiting[request_id] = waiter
        if earlier is not None and not earlier.granted.done():
            earlier.granted.set_exception(CallCancelledError("a retry of this call took its place in the line"))
        self.wake()
        return await self._wait(waiter, deadline)

    def wake(self) -> None:
        """Let those in, in order, for whom there is room now."""
        while self._waiting:
            waiter = next(iter(self._waiting.values()))
            if not waiter.granted.done():
                try:
                    self._look_again(waiter)
                except TqError as error:
                    waiter.granted.set_exception(error)
            if not waiter.granted.done():
                if self._shortage(waiter.need) is not None:
                    return
                waiter.granted.set_result(self._grant(waiter.request_id, waiter.need))
            del self._waiting[waiter.request_id]

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waits, and those to come, with an error."""
        self._gone = error
        for waiter in self._waiting.values():
            if not waiter.granted.done():
                waiter.granted.set_exception(error())
        self._waiting.clear()

    def _look_again(self, waiter: _Waiter) -> None:
        """Find anew what a write takes where that may have changed; one that takes nothing now is let in."""
        if waiter.seen == self._seen() or (waiter.write.keys is None and not self._partition.sealed):
            return
        need = self._bounds.need(waiter.write, waiter.value_bytes)
        waiter.seen = self._seen()
        if need is None:
            waiter.granted.set_result(None)
        else:
            waiter.need = need

    def _seen(self) -> tuple[bool, int, int]:
        table = self._partition.table
        return self._partition.sealed, table.next_index, table.removed_count

    def _shortage(self, need: Need) -> Shortage | None:
        return self._bounds.shortage(need, (grant.need for grant in self._granted.values()))

    def _grant(self, request_id: bytes, need: Need) -> Grant:
        grant = self._granted[request_id] = Grant(request_id, need, self._give_back)
        return grant

    def _give_back(self, grant: Grant) -> None:
        if self._granted.get(grant.request_id) is grant:  # else a retry has its own by now
            del self._granted[grant.request_id]
            self.wake()

    async def _wait(self, waiter: _Waiter, deadline: float | None) -> Grant | None:
        granted = waiter.granted
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await granted
        except TimeoutError:
            if granted.cancelled():
                raise self._too_late(waiter) from None
            return granted.result()  # room came in the very turn in which the time was over
        except asyncio.CancelledError:
            if not granted.cancelled() and granted.exception() is None and (grant := granted.result()) is not None:
                self._give_back(grant)
            raise
        finally:
            self._leave(waiter)
            del waiter, granted  # through which an error would hold this frame, and with it the partition

    def _leave(self, waiter: _Waiter) -> None:
        if self._waiting.get(waiter.request_id) is waiter:
            del self._waiting[waiter.request_id]
            self.wake()

    def _too_late(self, waiter: _Waiter) -> TqError:
        """Return the error of a write for which there was no room in time, or which was behind others like that."""
        needs = [waiter.need, *(each.need for each in itertools.islice(self._waiting.values(), 1))]
        shortage = next((found for need in needs if (found := self._shortage(need)) is not None), None)
        if shortage is None:
            return ResourceExhaustedError(
                "there was no room until the deadline", retry_after_seconds=RETRY_AFTER_SECONDS
            )
        return shortage.error(self._partition.partition_id, " and it stayed so until the deadline", may_fit_later=True)
