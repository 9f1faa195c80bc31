"""Plans the batches of one (partition, task) and serves those who wait for them.

Those who wait have their turns in order of arrival, whatever they ask for; a line that cannot be served is passed over,
and has another turn once something has changed. One dispatch loop gives the turns. It plans on the spot where a sampler
runs on the event loop; else it starts a plan off the loop, one for each line, and goes on with the next line. So a
sampler that hangs holds up no claims of another kind, and commits, status and replays never wait for a plan.

A plan is made on a view of the moment, and recorded on the loop in the step in which all its rows are seen to be ready
still. Nothing else serialises plans: of two that want the same rows the one that is recorded first has them, and the
other is made again. Lest a slow sampler always comes second, a plan off the loop has a head start of the time that such
plans of its line take: meanwhile those who came later have no turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from tq_service.domain.changes.claims import BatchPlanned, ClaimReleased, EndReached, QueueClaimed
from tq_service.domain.changes.state_machine import Change
from tq_service.domain.claims.ledger import QueueClaim, RecordedPlan, TaskLedger
from tq_service.domain.claims.request import ClaimRequest, ClaimSpec
from tq_service.domain.claims.view import PartitionView, ReadyIndex
from tq_service.domain.claims.wait_queue import Answer, FailedPlan, Line, LoopYielder, Waiter, WaitQueue
from tq_service.domain.partition import Partition
from tq_service.domain.plan import (
    Indexes,
    LengthSource,
    MustBeAwaited,
    Plan,
    PlanRequest,
    RankPlan,
    Sampler,
    View,
)
from tq_service.errors import InternalError, LeaseExpiredError, SamplerError, SamplesClearedError, TqError
from tq_service.schema import EndCounts

_log = logging.getLogger(__name__)

_MOST_BATCHES_A_TURN = 64
_MOST_PLANS = 4  # off the loop at a time, those that are long under way apart
_LONG_PLAN_SECONDS = 1.0
_LEAST_HEAD_START_SECONDS = 0.01
_MOST_REPLANS = 8


class RunsPlans(Protocol):
    """Runs samplers so that one that fails, or hangs, harms its own request only."""

    def length(self, sampler: Sampler) -> LengthSource | None:
        """Return the length that a sampler needs; raises TqError only."""
        ...

    def run_inline(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a well-formed plan or None, at once.

        Raises:
            MustBeAwaited: the sampler does not run on the event loop.
            TqError: the sampler's fault, or its own.
        """
        ...

    async def run(self, sampler: Sampler, view: View, request: PlanRequest) -> Plan | None:
        """Return a well-formed plan or None, off the event loop and within a time limit; raises TqError only."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that may be recorded in the step of the event loop in which it is returned.

    Attributes:
        plan: as it is recorded.
        positions: of all its rows, in the table of this moment.
        group_block_size: what keeps its groups together, see `LeaseTerms`; None where its sampler took no whole ones.
    """

    plan: RecordedPlan
    positions: Indexes
    group_block_size: int | None


Found: TypeAlias = Planned | EndCounts | FailedPlan


@dataclass(slots=True)
class _HeadStart:
    """While it lasts, lines that come after this one have no turn; see `WaitQueue.before`."""

    line: Line
    timer: asyncio.TimerHandle


class Planner:
    """Serves the claims of one task."""

    def __init__(
        self, partition: Partition, task: TaskLedger, runner: RunsPlans, commit: Callable[[Change, Any], Any]
    ) -> None:
        """Serve a task from now on.

        Args:
            partition: that of the task.
            task: its ledger.
            runner: runs samplers.
            commit: makes a change of the partition, given what its `prepare` would return, or None; without effect
                once the partition was cleared.
        """
        self._partition = partition
        self._task = task
        self._commit = commit
        self._names: dict[str, Any] = {"partition_id": partition.partition_id, "task_name": task.name}
        self._search = PlanSearch(partition, task, runner)
        self._queue = WaitQueue()
        self._dispatching: asyncio.Task[None] | None = None
        self._has_changed = False  # since the lines had their turns
        self._may_bring_end = False  # whether some line's end may come with what others of the task consume
        self._serves_left = 0  # as many as lines were to have a turn when all were last looked at
        self._to_answer: deque[tuple[Line, int, TqError | None]] = deque()  # ranks by line and batch_index
        self._free_plans = asyncio.Semaphore(_MOST_PLANS)
        self._plans: dict[Line, asyncio.TimerHandle] = {}  # off the loop, those that are long under way apart
        self._head_start: _HeadStart | None = None
        self._gone: Callable[[], TqError] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def waiting_count(self) -> int:
        """Number of calls that wait."""
        return len(self._queue)

    async def claim(self, request: ClaimRequest, max_wait_seconds: float) -> Answer:
        """Return the recorded answer, or wait for one; `NotYet` when the time is over."""
        self._task.check_epoch(request.epoch)
        recorded = self._recorded(request)
        if recorded is not None:
            return recorded
        if self._gone is not None:
            raise self._gone()
        found = self._look_at_once(request)
        if isinstance(found, Planned | EndCounts):
            return self._answer_at_once(request, found)
        loop = asyncio.get_running_loop()
        removed_count = self._partition.table.removed_count
        waiter = Waiter(request, loop.create_future(), is_poll=max_wait_seconds <= 0)
        if not self._queue:  # changes of the partition are nothing to a planner for which no call waits
            self._stop_listening()
            self._partition.on_change.append(self.wake)
        line = self._queue.join(waiter)
        timer = None
        try:
            self._enter(line, found)
            if waiter.is_waiting and not waiter.is_poll:
                timer = loop.call_later(max_wait_seconds, waiter.expire)
            answer = await waiter.answer
            if isinstance(answer, RankPlan | QueueClaim) and self._partition.table.removed_count != removed_count:
                self._task.check_present(answer.rows)
            if isinstance(answer, QueueClaim) and answer.lease is not None:
                self._check_leased(answer)
            return answer
        except (asyncio.CancelledError, SamplesClearedError):
            self._release_undelivered(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._queue.leave(waiter)
            if not self._queue:
                self._stop_listening()
            del waiter  # through which an error would hold this frame, and with it the partition

    def _look_at_once(self, request: ClaimRequest) -> Found | MustBeAwaited | None:
        """Return what a call finds, or that it must be awaited; None where others have their turns first.

        While no line is being served all who wait do so for a change, so that no turn is taken away. Where others ask
        alike it is for the first of them to look.
        """
        is_next = request.rank is None or request.rank.batch_index == self._task.next_batch_index
        if not is_next or self._is_serving or request.spec in self._queue.by_spec:
            return None
        try:
            return self._search.plan_inline(request)
        except MustBeAwaited as needs:
            return needs

    def _answer_at_once(self, request: ClaimRequest, found: Planned | EndCounts) -> Answer:
        """Record what a call has found, if that concerns others, and return its answer."""
        answer: Answer
        if request.rank is not None:
            self._record_for_ranks(request.spec, found)
        if isinstance(found, EndCounts):
            answer = found
        elif request.rank is not None:
            answer = found.plan.part(request.rank.dp_rank)
        else:
            answer = self._record_queue_claim(request, found)
        self._start_dispatch()
        return answer

    def _enter(self, line: Line, found: FailedPlan | MustBeAwaited | None) -> None:
        """Let a call that has joined a line have its turn, or what is left to do of it."""
        if found is not None:
            line.seen = self._queue.last_arrival
        if isinstance(found, FailedPlan):
            self._conclude(line, found)
        elif found is not None:
            self._start_plan(line)
        elif line.failed is not None and not self._is_serving:
            self._look(line)
        else:
            self._queue.put(line)
        self._start_dispatch()

    def _stop_listening(self) -> None:
        if self.wake in self._partition.on_change:
            self._partition.on_change.remove(self.wake)

    def _recorded(self, request: ClaimRequest) -> RankPlan | QueueClaim | EndCounts | None:
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

    def wake(self) -> None:
        """Have all who wait looked at once more."""
        if self._queue:
            self._has_changed = True
            self._start_dispatch()

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waiting calls, and those to come, with an error."""
        self._gone = error
        self._end_head_start()
        for line in self._queue.lines:
            if line.planning is not None:
                line.planning.cancel()
        if self._queue:
            self._ending = asyncio.get_running_loop().create_task(self._end_all(error))

    async def _end_all(self, error: Callable[[], TqError]) -> None:
        yielder = LoopYielder()
        for waiter in self._queue:
            waiter.fail(error())
            await yielder.step()

    def _release_undelivered(self, waiter: Waiter) -> None:
        """Release the claim of a queue worker whose call ends without it."""
        answer = waiter.answer
        is_over = answer.done() and not answer.cancelled() and answer.exception() is None
        if is_over and isinstance(answer.result(), QueueClaim):
            self.retract(waiter.request.request_id)

    def retract(self, request_id: bytes) -> None:
        """Release a queue claim whose answer did not reach its client, unless a retry was given the same.

        The client may ask again under the same request_id.
        """
        claim = self._task.claims.get(request_id)
        if claim is None:
            return
        claim.answer_count -= 1
        if claim.answer_count == 0:
            self._commit(ClaimReleased(**self._names, request_id=request_id, is_final=False), None)

    # The dispatch loop

    def _start_dispatch(self) -> None:
        has_turn = self._queue.by_spec and self._queue.has_turn
        has_work = has_turn or self._to_answer or self._has_changed
        if has_work and self._dispatching is None and self._gone is None:
            self._dispatching = asyncio.get_running_loop().create_task(self._dispatch())

    async def _dispatch(self) -> None:
        yielder = LoopYielder()
        try:
            while self._gone is None:
                if self._is_behind_epoch:
                    await self._end_stale(yielder)
                elif self._to_answer:
                    await self._answer_ranks(yielder)
                elif (line := self._next_line()) is not None:
                    first = line.first()
                    self._look(line)
                    await yielder.step(has_answered=first is not None and not first.is_waiting)
                else:
                    return
        except Exception:
            _log.exception("planning for task %r failed", self._task.name)
            self._to_answer.clear()
            self._fail_all(self._queue)
        finally:
            self._dispatching = None

    def _next_line(self) -> Line | None:
        """Return the line whose turn it is.

        After a change all lines that it may be of use to are to have a turn, also those that were passed over before.
        Where changes come all the time each line is looked at about once for each that is served, so that many lines
        cost each of them little.
        """
        line = None
        if not self._has_changed or self._serves_left > 0:
            line = self._queue.pop()
        if line is None and self._has_changed:
            self._has_changed = self._may_bring_end = False
            for each in self._queue.lines:
                if self._may_be_served(each):
                    self._queue.put(each)
            self._serves_left = self._queue.turn_count
            line = self._queue.pop()
        return line

    def _may_be_served(self, line: Line) -> bool:
        """Whether a turn of a line is worth while, for a plan or for a refusal."""
        failed = line.failed
        is_refused = line.is_ranked and self._task.dp_size not in (None, line.spec.dp_size)
        return failed is None or is_refused or not failed.cannot_succeed_yet(self._partition, self._task)

    @property
    def _is_serving(self) -> bool:
        """Whether there are, or may be, lines whose turn it is."""
        return self._dispatching is not None or self._head_start is not None or self._is_behind_epoch

    @property
    def _is_behind_epoch(self) -> bool:
        """Whether calls may wait that mean an epoch which is over."""
        return self._search.epoch != self._task.epoch

    async def _end_stale(self, yielder: LoopYielder) -> None:
        """End the calls that mean an epoch which is over."""
        self._search.epoch = self._task.epoch
        for waiter in self._queue:
            try:
                self._task.check_epoch(waiter.request.epoch)
            except TqError as error:
                waiter.fail(error)
                await yielder.step()

    async def _answer_ranks(self, yielder: LoopYielder) -> None:
        """Answer ranks whose batch or end is recorded, each by its own request, or whose line has failed."""
        while self._to_answer:
            line, batch_index, error = self._to_answer.popleft()
            while self._gone is None and (waiter := line.first(batch_index)) is not None:
                if error is not None:
                    waiter.fail(error)
                elif not self._answer_recorded(waiter):
                    break  # consumption was reset meanwhile
                await yielder.step()

    def _answer_recorded(self, waiter: Waiter) -> bool:
        """Answer a call with what is recorded for it, or why it can have nothing; return whether there is either."""
        try:
            self._task.check_epoch(waiter.request.epoch)  # a reset may have come since it joined
            recorded = self._recorded(waiter.request)
        except TqError as error:
            waiter.fail(error)
            return True
        if recorded is not None:
            waiter.resolve(recorded)
        return recorded is not None

    # A turn

    def _look(self, line: Line) -> None:
        """Give a line its turn: plan for its first call here, or start a plan off the loop."""
        waiter = line.first()
        if waiter is None or line.planning is not None:
            return
        if self._answer_recorded(waiter):
            self._queue.put(line)
            return
        is_ahead = line.is_ranked and line.lowest_batch_index > self._task.next_batch_index
        if is_ahead and (earlier := self._queue.ranks_before(line)) is not None:
            self._give_way(line, earlier)
            return
        line.seen = self._queue.last_arrival
        try:
            if line.failed is not None and line.failed.cannot_succeed_yet(self._partition, self._task):
                self._conclude(line, line.failed)
            elif line.end is not None and line.end[0] == self._search.marks:
                self._conclude(line, line.end[1])
            else:
                self._conclude(line, self._search.plan_inline(waiter.request))
        except MustBeAwaited:
            self._start_plan(line)
        except TqError as error:
            self._fail(line, error)

    def _give_way(self, line: Line, earlier: Line) -> None:
        """Let ranks go first that wait for an earlier batch_index, which is theirs to bind, or await their plan."""
        if earlier.planning is None:
            earlier.is_queued = False
            self._look(earlier)
            self._queue.put(line)

    def _conclude(self, line: Line, found: Found) -> None:
        """Record what was found in a turn, in the step in which it was found, and answer the first who waits for it."""
        if isinstance(found, FailedPlan):
            line.failed, line.turn_size = found, 0
            if not line.expire_polls():
                self._queue.put(line)  # for those that came while the plan was made
            self._may_bring_end |= found.consumed is not None
            # What has changed while the plan was made is for the next round: the others have their turns before.
            self._has_changed |= not found.cannot_succeed_yet(self._partition, self._task)
            return
        if line.is_ranked:
            self._serve_ranks(line, found)
        else:
            self._serve_worker(line, found)
        self._queue.put(line)

    def _serve_ranks(self, line: Line, found: Planned | EndCounts) -> None:
        """Record a batch, or the end, for all ranks; those that wait for it are answered one after the other.

        A rank may wait for a batch far ahead. So after many batches its line lets others have their turns, and those
        end that wait no longer than for theirs.
        """
        self._record_for_ranks(line.spec, found)
        line.turn_size += 1
        if line.turn_size == _MOST_BATCHES_A_TURN:
            line.turn_size = 0
            line.expire_polls()
            self._queue.defer(line)

    def _record_for_ranks(self, spec: ClaimSpec, found: Planned | EndCounts) -> None:
        lines, batch_index = self._queue.ranked_lines, self._task.next_batch_index
        if isinstance(found, EndCounts):
            end = EndReached(**self._names, dp_size=spec.plan_request.rank_count, end=found)
            self._commit(end, self._task)
        else:
            batch = BatchPlanned(**self._names, batch_spec=spec.batch_spec, plan=found.plan)
            self._commit(batch, (self._partition, self._task, found.positions))
            self._has_changed |= self._may_bring_end
        self._serves_left -= 1
        self._has_changed |= len(lines) > 1  # others may disagree with what holds for all ranks now
        for line in lines:
            indexes = line.batch_indexes if isinstance(found, EndCounts) else [batch_index]
            self._to_answer.extend((line, index, None) for index in indexes if line.first(index) is not None)

    def _serve_worker(self, line: Line, found: Planned | EndCounts) -> None:
        """Give the first of a line what was found; where all have left meanwhile, nothing is consumed."""
        while (waiter := line.first()) is not None and self._answer_recorded(waiter):
            pass  # it was released while the plan was made
        if waiter is None:
            return
        self._serves_left -= 1
        if isinstance(found, EndCounts):
            line.end = self._search.marks, found  # which holds for those behind too
            waiter.resolve(found)
        else:
            waiter.resolve(self._record_queue_claim(waiter.request, found))

    def _record_queue_claim(self, request: ClaimRequest, planned: Planned) -> QueueClaim:
        terms = request.lease
        if terms is not None:
            terms = replace(terms, group_block_size=planned.group_block_size)
        change = QueueClaimed(**self._names, request_id=request.request_id, plan=planned.plan, lease=terms)
        claim: QueueClaim = self._commit(change, (self._partition, self._task, planned.positions))
        claim.answer_count = 1
        self._has_changed |= self._may_bring_end
        return claim

    def _fail(self, line: Line, error: TqError) -> None:
        """End the first queue worker of a line; of ranks all that wait for the same batch, which would fail alike."""
        if line.is_ranked and line.batch_indexes:
            self._to_answer.append((line, line.lowest_batch_index, error))
        elif (waiter := line.first()) is not None:
            waiter.fail(error)
        self._queue.put(line)

    def _fail_all(self, waiters: Iterable[Waiter]) -> None:
        for waiter in waiters:
            waiter.fail(InternalError("planning failed; the server's log has the details"))

    # Plans off the loop

    def _start_plan(self, line: Line) -> None:
        if not self._free_plans.locked():
            self._give_head_start(line)  # before any other line has a turn
        line.planning = asyncio.get_running_loop().create_task(self._plan_off_loop(line))

    async def _plan_off_loop(self, line: Line) -> None:
        """Plan for a line and record the plan, in one step of the event loop, for whoever is the first of it then.

        It waits until few others plan, and looks at the rows of the moment it starts.
        """
        loop = asyncio.get_running_loop()
        found = None
        try:
            try:
                await self._free_plans.acquire()
                self._plans[line] = loop.call_later(_LONG_PLAN_SECONDS, self._count_off, line)
                batch_index, waiter = self._task.next_batch_index, line.first()
                if waiter is not None and not self._answer_recorded(waiter):
                    self._give_head_start(line)
                    started_at = loop.time()
                    found = await self._search.plan(waiter.request)
                    # Twice what this one took, so that the next one is not late though it takes longer.
                    line.head_start_seconds = max(2 * (loop.time() - started_at), _LEAST_HEAD_START_SECONDS)
            finally:
                line.planning = None
            if found is None or (line.is_ranked and self._task.next_batch_index != batch_index):
                self._queue.put(line)  # it came too late
            else:
                self._conclude(line, found)
        except TqError as error:
            self._fail(line, error)
        except Exception:
            _log.exception("planning for task %r failed", self._task.name)
            self._fail_all(line.waiters)
        finally:
            self._end_plan(line)

    def _end_plan(self, line: Line) -> None:
        """Have all go on that waited for a plan to be over."""
        if self._head_start is not None and self._head_start.line is line:
            self._end_head_start()
        if line.is_ranked:
            for each in self._queue.ranked_lines:
                self._queue.put(each)
        self._queue.drop_if_unused(line)
        self._count_off(line)
        self._start_dispatch()

    def _count_off(self, line: Line) -> None:
        """Let another plan start: one is over, or has taken so long that it may hang."""
        timer = self._plans.pop(line, None)
        if timer is not None:
            timer.cancel()
            self._free_plans.release()

    def _give_head_start(self, line: Line) -> None:
        if line.head_start_seconds and line.order < self._queue.before:
            self._end_head_start()
            self._queue.before = line.order
            timer = asyncio.get_running_loop().call_later(line.head_start_seconds, self._end_head_start)
            self._head_start = _HeadStart(line, timer)

    def _end_head_start(self) -> None:
        if self._head_start is not None:
            self._head_start.timer.cancel()
            self._head_start, self._queue.before = None, math.inf
            self._start_dispatch()


class PlanSearch:
    """Looks for the plans of one task, for any number of specs at the same time.

    What is recorded of the plans is left to the planner: a plan that is made off the event loop may lose its rows to
    another one that is recorded meanwhile.

    Attributes:
        epoch: whose plans are looked for; there are none for the next one before the planner has gone on to it.
    """

    def __init__(self, partition: Partition, task: TaskLedger, runner: RunsPlans) -> None:
        self._partition = partition
        self._task = task
        self._runner = runner
        self._ready = ReadyIndex(partition, task.name)
        self.epoch = task.epoch

    @property
    def marks(self) -> tuple[int, int, int, int, int]:
        """Versions of all that plans depend on; what is equal at two moments has not changed between them."""
        partition, task = self._partition, self._task
        return *partition.version, task.serial, task.leased_count, task.epoch

    def plan_inline(self, request: ClaimRequest) -> Found:
        """Return a plan, the end, or why there is none yet.

        Raises:
            MustBeAwaited: the sampler, or what it needs, does not run on the event loop; `plan` finds the plan.
            TqError: the sampler's fault, or its own.
        """
        steps = self._steps(request)
        wanted, no_more = next(steps)
        while True:
            view = self._view(request, no_more=no_more)
            if view.is_heavy:
                raise MustBeAwaited
            try:
                plan = self._runner.run_inline(request.sampler, view, wanted)
            except TqError:
                if not view.is_cut_short:
                    raise
            if view.is_cut_short:
                raise MustBeAwaited
            try:
                wanted, no_more = steps.send((view, plan))
            except StopIteration as stop:
                found: Found = stop.value  # never None: nothing has changed meanwhile
                return found

    async def plan(self, request: ClaimRequest) -> Found | None:
        """Return a plan, the end, why there is none yet, or None where another claim was quicker or a reset came.

        There is no await between the check of a plan's rows and the return, so that the caller can record it.
        """
        begun_at = self._task.serial, self._task.epoch
        for _ in range(_MOST_REPLANS):
            was_heavy = await self._sort_rows(request)
            if self._is_over(begun_at[1]):
                return None
            if was_heavy:
                with contextlib.suppress(MustBeAwaited):
                    return self.plan_inline(request)
            steps = self._steps(request)
            wanted, no_more = next(steps)
            try:
                while True:
                    wanted, no_more = steps.send(await self._run_off_loop(request, wanted, no_more=no_more))
            except StopIteration as stop:
                found: Found | None = stop.value
            if found is not None or (self._task.serial, self._task.epoch) != begun_at:
                return found
        raise SamplerError(
            f"sampler {request.sampler.name!r}: samples of {_MOST_REPLANS} plans in a row were cleared, failed or "
            f"reset while they were planned; ask again"
        )

    def _steps(
        self, request: ClaimRequest
    ) -> Generator[tuple[PlanRequest, bool], tuple[PartitionView, Plan | None], Found | None]:
        """Yield each run of the sampler, and whether nothing more comes; return what its plans come to.

        None is for a plan of rows that are not ready any more. How a run is made is up to the caller.
        """
        wanted, begun_at = request.plan_request, self.marks
        consumed = self._task.consumed_count, self._task.leased_count
        view, plan = yield wanted, False
        if plan is None:
            is_finished = request.batch_spec.finite and self._partition.inserted_count > 0
            is_closed = begun_at == self.marks and (self._partition.sealed or is_finished)
            if not (is_closed and view.no_more_can_become_ready()):
                view.check_lengths()
                return self._failed(request, view, begun_at, consumed)
            least = wanted.total_size if request.batch_spec.drop_last else 1
            view, plan = yield replace(wanted, min_size=least), True
            if plan is None:
                return view.end() if begun_at == self.marks else FailedPlan(begun_at[0], begun_at[1], consumed)
        if self._is_over(begun_at[-1]):
            return None
        planned = self._checked(request, view, plan)
        state_version, _, *others = begun_at  # rows that are only written to stay ready
        if planned is None and (state_version, *others) == (self.marks[0], *self.marks[2:]):
            raise SamplerError(
                f"sampler {request.sampler.name!r} returned rows that were not ready for this claim; return rows of "
                f"view.ready() or view.ready_groups() only"
            )
        return planned

    def _failed(
        self, request: ClaimRequest, view: PartitionView, begun_at: tuple[int, ...], consumed: tuple[int, int]
    ) -> FailedPlan:
        """Return how many rows must be written, after the view was made, before there can be more to find."""
        wanted = request.plan_request
        missing, is_closed = 1, self._partition.sealed or request.batch_spec.finite  # or soon closed, by a first sample
        # Of the class, where reading it runs no code of the sampler.
        needs_min_size = type(request.sampler).plans_below_min_size is not True
        if needs_min_size and view.exhausted and wanted.batch_unit == "sample":
            missing = wanted.min_size - view.seen_count
            if is_closed:  # the last, short batch takes less
                missing = min(missing, view.unready_count) if view.is_plain else 1
        state_version, row_version = begun_at[:2]
        return FailedPlan(state_version, row_version + max(1, missing), consumed if is_closed else None)

    def _is_over(self, epoch: int) -> bool:
        """Whether plans that were begun in an epoch are of no use: what was left in it is not what there is now."""
        return not epoch == self.epoch == self._task.epoch

    def _checked(self, request: ClaimRequest, view: PartitionView, plan: Plan) -> Planned | None:
        """Return the plan with its positions, None where its rows have been changed while it was made."""
        recorded = RecordedPlan.of(plan, request.batch_spec.micro_batch_size)
        positions = view.still_ready(recorded.rows)
        if positions is None:
            return None
        block_size = None if view.grouping is None else view.grouping.block_size or 0
        return Planned(recorded, positions, block_size)

    async def _run_off_loop(
        self, request: ClaimRequest, wanted: PlanRequest, *, no_more: bool
    ) -> tuple[PartitionView, Plan | None]:
        """Run the sampler while the positions of rows stay as they are."""
        view = self._view(request, no_more=no_more)
        view.leave_loop()
        table = self._partition.table
        table.pin_count += 1
        try:
            plan = await self._runner.run(request.sampler, view, wanted)
        finally:
            table.pin_count -= 1
        view.rejoin_loop()
        return view, plan

    def _view(self, request: ClaimRequest, *, no_more: bool = False) -> PartitionView:
        length = self._runner.length(request.sampler)
        return PartitionView(self._partition, self._task, self._ready, request.batch_spec, length, no_more=no_more)

    async def _sort_rows(self, request: ClaimRequest) -> bool:
        """Sort the rows of a claim in its order as far as it needs, in short steps; return whether it took any."""
        was_heavy = False
        while self.epoch == self._task.epoch and (view := self._view(request)).is_heavy:
            view.sort_some()
            was_heavy = True
            await asyncio.sleep(0)
        return was_heavy
