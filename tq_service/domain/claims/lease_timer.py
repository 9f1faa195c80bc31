"""Has leases expire: by monotonic time, and with one timer a partition, however many leases it has."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping

from tq_service.domain.claims.ledger import Lease, TaskLedger

_MOST_A_TURN = 64
_LEAST_STALE = 64


class LeaseTimer:
    """Keeps the deadlines of the leases of one partition, on the running loop.

    Deadlines are of this instance of the service alone: they are not written down, and a lease that was recovered or
    restored is started anew. Leases that end early, or get more time, leave their old entry in the heap: it is dropped
    when its turn comes, or when such entries outnumber the leases.
    """

    def __init__(self, tasks: Mapping[str, TaskLedger], expire: Callable[[str, bytes], object]) -> None:
        """Make a timer without leases.

        Args:
            tasks: the ledgers of the partition, by name.
            expire: called with the name of a task and the request_id of a claim whose time is over.
        """
        self._tasks = tasks
        self._expire = expire
        self._deadlines: list[tuple[float, str, int]] = []  # a heap, with the task and the serial of the lease
        self._most_deadlines = _LEAST_STALE
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0  # uvloop's handles cannot tell, where the time had come when they were made

    def start(self, task_name: str, lease: Lease) -> None:
        """Have a lease expire after its full time from now on."""
        lease.deadline = asyncio.get_running_loop().time() + lease.terms.seconds
        if len(self._deadlines) > self._most_deadlines:
            self._deadlines = [entry for entry in self._deadlines if self._lease_of(*entry) is not None]
            heapq.heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines) + _LEAST_STALE
        heapq.heappush(self._deadlines, (lease.deadline, task_name, lease.serial))
        self._set_timer()

    def stop(self) -> None:
        """Have no lease expire any more."""
        self._deadlines.clear()
        self._set_timer()

    def _lease_of(self, deadline: float, task_name: str, serial: int) -> Lease | None:
        """Return the lease of an entry, None where it has ended or got another deadline."""
        lease = self._tasks[task_name].leases.get(serial)
        return lease if lease is not None and lease.deadline == deadline else None

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
                deadline, task_name, serial = heapq.heappop(self._deadlines)
                lease = self._lease_of(deadline, task_name, serial)
                if lease is not None:
                    self._expire(task_name, lease.request_id)
        finally:
            self._set_timer()
