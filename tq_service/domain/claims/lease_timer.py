"""Has leases expire: by monotonic time, and with one timer a task, however many leases it has."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping

from tq_service.domain.claims.ledger import Lease

_MOST_A_TURN = 64
_LEAST_STALE = 64


class LeaseTimer:
    """Keeps the deadlines of the leases of one task, on the running loop.

    Leases that end early, or get more time, leave their old entry in the heap: it is dropped when its turn comes, or
    when such entries outnumber the leases.
    """

    def __init__(self, leases: Mapping[int, Lease], expire: Callable[[bytes], object]) -> None:
        self._leases = leases
        self._expire = expire
        self._deadlines: list[tuple[float, int]] = []  # a heap, with the serial of the lease
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0  # uvloop's handles cannot tell, where the time had come when they were made

    def start(self, lease: Lease) -> None:
        """Have a lease expire after its full time from now on."""
        lease.deadline = asyncio.get_running_loop().time() + lease.terms.seconds
        if len(self._deadlines) > 2 * len(self._leases) + _LEAST_STALE:
            self._deadlines = [(each.deadline, each.serial) for each in self._leases.values() if each is not lease]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (lease.deadline, lease.serial))
        self._set_timer()

    def stop(self) -> None:
        """Have no lease expire any more."""
        self._deadlines.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None and self._deadlines and self._rings_at <= self._deadlines[0][0]:
            return  # a timer that rings too early sets itself again
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._deadlines:
            self._rings_at = self._deadlines[0][0]
            self._timer = asyncio.get_running_loop().call_at(self._rings_at, self._ring)

    def _ring(self) -> None:
        """End what is due, a few at a time: thousands may be, and the loop has others to serve."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        try:
            for _ in range(_MOST_A_TURN):
                if not self._deadlines or self._deadlines[0][0] > now:
                    break
                deadline, serial = heapq.heappop(self._deadlines)
                lease = self._leases.get(serial)
                if lease is not None and lease.deadline == deadline:
                    self._expire(lease.request_id)
        finally:
            self._set_timer()
