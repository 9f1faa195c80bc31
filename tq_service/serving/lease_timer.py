"""When leases run out: the deadlines of one partition's claims, on the event loop."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping

from tq_service.state.ledger import QueueClaim, TaskLedger

_LEAST_STALE_DEADLINES = 64
_MOST_EXPIRED_A_TURN = 64


class LeaseTimer:
    """Keeps the deadlines of the leases of one partition, on the running loop.

    Deadlines are of this instance of the service alone: they are not written down, and a lease that was recovered or
    restored starts again. Leases that end early, or get more time, leave their old entry in the heap: it is dropped
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
        self._deadlines: list[tuple[float, str, bytes]] = []  # a heap, with the task and the request_id of the claim
        self._most_deadlines = _LEAST_STALE_DEADLINES
        self._timer: asyncio.Handle | None = None

    def start(self, task_name: str, claim: QueueClaim) -> None:
        """Have what a claim has leased expire after its full time from now on."""
        if claim.lease is None:
            return
        now = asyncio.get_running_loop().time()
        claim.delivered_at = min(claim.delivered_at, now)
        claim.deadline = now + claim.lease.seconds
        if len(self._deadlines) > self._most_deadlines:
            self._deadlines = [entry for entry in self._deadlines if self._is_leased(*entry)]
            heapq.heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines) + _LEAST_STALE_DEADLINES
        heapq.heappush(self._deadlines, (claim.deadline, task_name, claim.request_id))
        if self._deadlines[0][0] == claim.deadline:  # else the timer rings before, and sets itself again
            self._set_timer()

    def stop(self) -> None:
        """Have no lease expire any more."""
        self._deadlines.clear()
        self._set_timer()

    def _is_leased(self, deadline: float, task_name: str, request_id: bytes) -> bool:
        """Whether the claim of an entry has leased rows, and no other deadline."""
        claim = self._tasks[task_name].claims.get(request_id)
        return claim is not None and claim.leased_count > 0 and claim.deadline == deadline

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._deadlines:
            self._timer = asyncio.get_running_loop().call_at(self._deadlines[0][0], self._ring)

    def _ring(self) -> None:
        """End what is due, a few at a time: thousands may be, and the loop has others to serve."""
        now = asyncio.get_running_loop().time()
        try:
            for _ in range(_MOST_EXPIRED_A_TURN):
                if not self._deadlines or self._deadlines[0][0] > now:
                    break
                due = heapq.heappop(self._deadlines)
                if self._is_leased(*due):
                    self._expire(*due[1:])
        finally:
            self._set_timer()
