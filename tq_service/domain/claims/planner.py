"""Plans the batches of one (partition, task) and serves those who wait for them.

One pump plans at a time, which makes it the lock of the task's claim cache: the first rank that asks for a batch causes
the plan, the others await the same record, and commits, status and replays never wait for it. The pump runs while it
makes progress; changes of the partition start it again. A plan is made on a view of the moment and may leave the event
loop. It is recorded on the loop, after checking in the same step that all its rows are still to be had.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial

from tq_service.domain.claims.end import End
from tq_service.domain.claims.lease_timer import LeaseTimer
from tq_service.domain.claims.ledger import QueueClaim, TaskLedger
from tq_service.domain.claims.micro_batches import cut_micro_batches
from tq_service.domain.claims.plan_search import Planned, PlanSearch, RunsPlans
from tq_service.domain.claims.queue_claims import expire, extend, take_back
from tq_service.domain.claims.request import ClaimRequest
from tq_service.domain.claims.wait_queue import Answer, LoopYielder, NotYet, Waiter, WaitQueue
from tq_service.domain.partition import Partition
from tq_service.domain.plan import RankPlan
from tq_service.errors import InternalError, LeaseExpiredError, SamplesClearedError, TqError

_log = logging.getLogger(__name__)

_MOST_BATCHES_A_ROUND = 64


class Planner:
    """Serves the claims of one task."""

    def __init__(self, partition: Partition, task: TaskLedger, runner: RunsPlans) -> None:
        self._partition = partition
        self._task = task
        self._ranks: WaitQueue[tuple[int, object]] = WaitQueue()  # by batch_index and way of asking
        self._queues: WaitQueue[object] = WaitQueue()  # by way of asking
        self._search = PlanSearch(partition, task, runner)
        self._pump: asyncio.Task[None] | None = None
        self._is_dirty = False
        self._polls: list[Waiter] = []  # whose time is over once the pump has looked at all, from now on, once
        self._gone: Callable[[], TqError] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._timer = LeaseTimer(task.leases, partial(expire, partition, task))
        self.start_leases()
        partition.on_change.append(self.wake)

    @property
    def waiting_count(self) -> int:
        """Number of calls that wait."""
        return len(self._ranks) + len(self._queues)

    async def claim(self, request: ClaimRequest, max_wait_seconds: float) -> Answer:
        """Return the recorded answer, or wait for one; `NotYet` when the time is over."""
        self._task.check_epoch(request.epoch)
        recorded = self._recorded(request)
        if recorded is not None:
            return recorded
        if self._gone is not None:
            raise self._gone()
        at_once = self._claim_at_once(request)
        if at_once is not None:
            return at_once
        loop = asyncio.get_running_loop()
        removed_count = self._partition.table.removed_count
        waiter = Waiter(request, loop.create_future())
        self._add(waiter)
        self._search.attempts.join(request)
        self.wake()
        timer = None
        if max_wait_seconds > 0:
            timer = loop.call_later(max_wait_seconds, waiter.expire)
        else:
            self._polls.append(waiter)
        try:
            answer = await waiter.answer
            if isinstance(answer, RankPlan | QueueClaim) and self._partition.table.removed_count != removed_count:
                self._task.check_present(answer.rows)
            if isinstance(answer, QueueClaim) and answer.lease is not None:
                self._check_leased(answer)
            return answer
        except (asyncio.CancelledError, SamplesClearedError):
            self._take_back(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._remove(waiter)
            self._search.attempts.leave(request)
            del waiter  # through which an error would hold this frame, and with it the partition

    def _claim_at_once(self, request: ClaimRequest) -> RankPlan | QueueClaim | None:
        """Return a claim that needs no wait and no pump: the next batch, by a quick sampler, of samples that are ready.

        While no pump runs those who wait have been looked after in vain, so that nobody's turn is taken.
        """
        rank = request.rank
        if self._pump is not None or (rank is not None and rank.batch_index != self._task.next_batch_index):
            return None
        planned = self._search.at_once(request)
        if planned is None:
            return None
        plan = cut_micro_batches(planned.plan, request.batch_spec.micro_batch_size)
        self.wake()  # others may disagree with this plan, or have waited for what was the last batch
        if rank is None:
            return self._record_queue_claim(request.request_id, plan.ranks[0], planned)
        self._partition.record_batch(self._task, request.batch_spec, plan, planned.positions)
        return plan.ranks[rank.dp_rank]

    def _recorded(self, request: ClaimRequest) -> RankPlan | QueueClaim | End | None:
        """Return the recorded answer of a call, None where there is none; a queue claim counts the calls it answers."""
        recorded = self._task.recorded(request)
        if isinstance(recorded, QueueClaim):
            recorded.answer_count += 1
        return recorded

    def _check_leased(self, claim: QueueClaim) -> None:
        """Refuse a claim that went between its record and the turn of the loop in which its call goes on."""
        if self._task.claims.get(claim.request_id) is not claim:
            raise LeaseExpiredError(
                f"the lease of this claim of task {self._task.name!r} ended before its answer was sent; ask again "
                f"under a new request_id"
            )

    def start_leases(self) -> None:
        """Have leases expire that the timer does not know: those of an earlier instance, after their full time."""
        for lease in self._task.leases.values():
            if math.isinf(lease.deadline):
                self._timer.start(lease)

    def extend(self, request_id: bytes, seconds: float) -> int:
        """Give a leased claim more time, from now on; return the number of samples left of it."""
        lease = extend(self._partition, self._task, request_id, seconds)
        self._timer.start(lease)
        return lease.left_count

    def wake(self) -> None:
        """Start the pump, or have it look once more."""
        self._is_dirty = True
        if self._pump is None and (self._ranks or self._queues):
            self._pump = asyncio.get_running_loop().create_task(self._run_pump())

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waiting calls, and those to come, with an error."""
        self._gone = error
        self._timer.stop()
        if self._ranks or self._queues:
            self._ending = asyncio.get_running_loop().create_task(self._end_all(error))

    async def _end_all(self, error: Callable[[], TqError]) -> None:
        pace = LoopYielder()
        for waiter in (*self._ranks, *self._queues):
            waiter.fail(error())
            await pace.step()

    # Waiters

    def _add(self, waiter: Waiter) -> None:
        request = waiter.request
        if request.rank is not None:
            self._ranks.add((request.rank.batch_index, request.signature), waiter)
        else:
            self._queues.add(request.signature, waiter)

    def _remove(self, waiter: Waiter) -> None:
        request = waiter.request
        if request.rank is not None:
            self._ranks.remove((request.rank.batch_index, request.signature), waiter)
        else:
            self._queues.remove(request.signature, waiter)

    def _take_back(self, waiter: Waiter) -> None:
        """Release what a queue worker was given and will not get."""
        answer = waiter.answer
        is_over = answer.done() and not answer.cancelled() and answer.exception() is None
        if waiter.request.rank is None and is_over and isinstance(answer.result(), QueueClaim):
            take_back(self._partition, self._task, waiter.request.request_id)

    async def _end_stale(self) -> None:
        """End the calls that mean an epoch which is over."""
        self._search.start_epoch()
        pace = LoopYielder()
        for waiter in (*self._ranks, *self._queues):
            try:
                self._task.check_epoch(waiter.request.epoch)
            except TqError as error:
                waiter.fail(error)
                self._remove(waiter)
                await pace.step()

    # The pump

    async def _run_pump(self) -> None:
        try:
            while self._is_dirty:
                self._is_dirty = False
                looking, self._polls = self._polls, []
                if self._search.epoch != self._task.epoch:
                    await self._end_stale()
                await self._serve_ranks()
                await self._serve_queues(is_whole=bool(looking))
                for waiter in looking:
                    waiter.expire()
        except Exception:
            _log.exception("planning for task %r failed", self._task.name)
            for waiter in (*self._ranks, *self._queues):
                waiter.fail(InternalError("planning failed; the server's log has the details"))
                self._remove(waiter)
            self._polls.clear()
        finally:
            self._pump = None

    async def _serve_ranks(self) -> None:
        """Make plans in order of batch_index while some rank waits for one that can be made.

        A rank may wait for a batch far ahead. So the loop turns between plans, and after so many of them other calls of
        the task have their turn; the pump goes on in its next round, unless the rank's time is over.
        """
        pace = LoopYielder()
        for _ in range(_MOST_BATCHES_A_ROUND):
            await self._answer_recorded()
            if not await self._plan_next(pace):
                return
        await self._answer_recorded()
        self._is_dirty = True

    async def _plan_next(self, pace: LoopYielder) -> bool:
        """Plan one batch for the first way of asking that can have one; return whether something came of it."""
        for leader in self._leaders():
            if self._gone is not None:
                return False
            try:
                has_progress = await self._plan_batch(leader.request)
            except TqError as error:
                await self._fail_alike(leader, error)
                has_progress = True
            await pace.step()
            if has_progress:
                return True
        return False

    def _leaders(self) -> Iterator[Waiter]:
        """Yield the first waiter of each way of asking, lowest batch_index first.

        Usually there is one way. Where ranks disagree, one that asks for too much must not keep the others waiting.
        """
        seen: set[object] = set()
        for batch_index, signature in sorted(self._ranks.names(), key=lambda name: name[0]):
            waiter = self._ranks.first((batch_index, signature))
            if signature not in seen and waiter is not None:
                seen.add(signature)
                yield waiter

    async def _answer_recorded(self) -> None:
        """Answer every waiting rank whose batch is recorded, each by its own request."""
        task, pace = self._task, LoopYielder()
        for name in self._ranks.names():
            while self._gone is None and (name[0] < task.next_batch_index or task.end is not None):
                waiter = self._ranks.first(name)
                if waiter is None:
                    break
                try:
                    recorded = task.recorded(waiter.request)
                except TqError as error:
                    waiter.fail(error)
                else:
                    if recorded is None:
                        break
                    waiter.resolve(recorded)
                await pace.step()

    async def _fail_alike(self, leader: Waiter, error: TqError) -> None:
        """End the ranks that asked as the leader did: they would fail as it did, one after the other."""
        rank, pace = leader.request.rank, LoopYielder()
        name = (0 if rank is None else rank.batch_index, leader.request.signature)
        while (waiter := self._ranks.first(name)) is not None:
            waiter.fail(error)
            await pace.step()

    async def _serve_queues(self, *, is_whole: bool) -> None:
        """Serve queue workers in order of arrival over all ways of asking, each way until one of it gets nothing.

        Those who come meanwhile wait for the next round, lest workers that come back at once keep all others waiting.
        A round that is not `is_whole` is over early once the partition has changed: those who got nothing may have
        come before all that are left. It serves one a line at least, so that a line is looked at once for each served.
        """
        queues, pace = self._queues, LoopYielder()
        heads, last_arrival = queues.heads(), queues.arrival_count  # no two arrivals have one number
        heapq.heapify(heads)
        least_count, counts = len(heads), self._partition.version
        while heads and self._gone is None:
            head = queues.head(heads[0][1])
            arrival, signature = heapq.heappop(heads)
            if head is None or head[0] > last_arrival:
                continue
            if head[0] > arrival:  # those before it have left; who waits in other lines may have come first
                heapq.heappush(heads, (head[0], signature))
                continue
            if not is_whole and least_count <= 0 and counts != self._partition.version:
                self._is_dirty = True
                return
            if await self._serve_queue(head[1], pace):
                least_count -= 1
                if (head := queues.head(signature)) is not None:
                    heapq.heappush(heads, (head[0], signature))

    async def _serve_queue(self, waiter: Waiter, pace: LoopYielder) -> bool:
        """Serve the first of a line; return False where nothing is there for it, nor for those behind."""
        try:
            answer = await self._plan_queue(waiter)
        except TqError as error:
            waiter.fail(error)
            answer = NotYet()
        if answer is not None:
            waiter.resolve(answer)
            if isinstance(answer, End):
                await self._end_line(waiter.request.signature, answer, pace)
        await pace.step()
        return answer is not None

    async def _end_line(self, signature: object, end: End, pace: LoopYielder) -> None:
        """Answer queue workers that ask alike with the end that one of them found, while nothing changes."""
        counts = self._partition.version
        while counts == self._partition.version and (waiter := self._queues.first(signature)) is not None:
            waiter.resolve(end)
            await pace.step()

    # Planning

    async def _plan_batch(self, request: ClaimRequest) -> bool:
        """Plan and record the next batch, or the end; return whether something was recorded."""
        batch_spec, rank = request.batch_spec, request.rank
        if rank is None:
            raise ValueError("a queue worker's request has no batch_index")
        planned = await self._search.plan(request)
        if planned is None:
            return False
        if isinstance(planned, End):
            self._partition.record_end(self._task, rank.dp_size, planned)
        else:
            plan = cut_micro_batches(planned.plan, batch_spec.micro_batch_size)
            self._partition.record_batch(self._task, batch_spec, plan, planned.positions)
        return True

    async def _plan_queue(self, waiter: Waiter) -> Answer | None:
        request = waiter.request
        recorded = self._recorded(request)
        if recorded is not None:  # a retry that came while the first call still waited
            return recorded
        planned = await self._search.plan(request)
        if self._gone is not None:
            raise self._gone()
        if planned is None or isinstance(planned, End):
            return planned
        self._task.recorded(request)  # refuses what was released while the plan was made
        part = cut_micro_batches(planned.plan, request.batch_spec.micro_batch_size).ranks[0]
        if not waiter.is_waiting:  # it left while its plan was made, and nothing is consumed
            return NotYet()
        self._is_dirty = True  # this may have been the last that others waited for
        return self._record_queue_claim(request.request_id, part, planned)

    def _record_queue_claim(self, request_id: bytes, part: RankPlan, planned: Planned) -> QueueClaim:
        claim = self._partition.record_queue_claim(self._task, request_id, part, planned.positions, planned.lease)
        claim.answer_count = 1
        if claim.lease is not None:
            self._timer.start(claim.lease)
        return claim
