"""Plans the batches of one (partition, task) and answers the claims that wait for them.

Waiting claims have their turns in order of arrival, whatever they ask for; a line that cannot be served is passed over,
and has another turn once something has changed. One dispatch loop gives the turns. It plans on the spot where a sampler
runs on the event loop; else it starts a plan off the loop, one for each line, and goes on with the next line. So a
sampler that hangs holds up no claims of another kind, and commits, status and replays never wait for a plan.

A plan is made on a view of the moment, and recorded on the loop in the step in which all its rows are seen to be ready
still. Nothing else serialises plans: of two that want the same rows the one that is recorded first has them, and the
other is made again. To keep slow samplers from starving, the plan after one that lost its rows looks past as many ready
rows as others took meanwhile. A short plan off the loop also has a head start, in which later claims have no turn; a
long one only after it has lost its rows several times in a row, so that there are too few rows to look past any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from tq_service.errors import (
    InternalError,
    InvalidArgumentError,
    LeaseExpiredError,
    SamplerError,
    SamplesClearedError,
    TqError,
)
from tq_service.log_message import LogMessage
from tq_service.machine.claims import (
    BatchPlanned,
    ClaimReleased,
    EndReached,
    GroupsKept,
    NamedEndReached,
    QueueClaimed,
)
from tq_service.machine.state_machine import Change
from tq_service.planning.grouping import Grouping
from tq_service.planning.readiness import Readiness
from tq_service.planning.view import PartitionView, ReadyIndex, Steps
from tq_service.results import RecentBatch
from tq_service.schema import EndCounts
from tq_service.serving.wait_queue import (
    NOT_LOOKED,
    Answer,
    EndFound,
    Line,
    LoopYielder,
    NoPlan,
    Waiter,
    WaitQueue,
)
from tq_service.state.ledger import QueueClaim, RecordedPlan, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import (
    Indexes,
    LengthSource,
    MustBeAwaited,
    Plan,
    PlanRequest,
    RankPlan,
    Sampler,
    View,
)
from tq_service.state.recent_batches import RecentBatches, describe_batch
from tq_service.state.request import BatchSpec, ClaimRequest, ClaimSpec
from tq_service.wait_clock import Waiting

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_BATCHES_A_TURN = 64
_MOST_PLANS = 4  # off the loop at a time, those that are long under way apart
_LONG_PLAN_SECONDS = 1.0
_LEAST_HEAD_START_SECONDS = 0.01
_LONG_HEAD_START_SECONDS = 0.05
_MOST_LOSSES = 2
_MOST_REPLANS = 8
_CLOSED_AT_ONCE = 1 << 12  # rows that changed, as many as gaps are closed for in a step
_MOST_BATCHES_AHEAD = 256  # loaders ask for prefetch_factor * num_workers; the batches before it are planned as well
_MOST_EXPLAINED = 1 << 16  # rows that a refused put has time to look at


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
        positions: of `plan.named`, in the table of this moment.
        grouping: what its groups are; None where its sampler took no whole ones.
        length: what its sampler needs of each sample.
    """

    plan: RecordedPlan
    positions: Indexes
    grouping: Grouping | None
    length: LengthSource | None


Found: TypeAlias = Planned | NoPlan
Run: TypeAlias = Callable[[Sampler, PartitionView, PlanRequest], Awaitable[Plan | None]]


class Planner:
    """Serves the claims of one task."""

    def __init__(
        self,
        partition: Partition,
        task: TaskLedger,
        runner: RunsPlans,
        commit: Callable[[Change, Any], Any],
        on_batch: Callable[[str, RecentBatch], None],
    ) -> None:
        """Serve a task from now on.

        Args:
            partition: that of the task.
            task: its ledger.
            runner: runs samplers.
            commit: makes a change of the partition, given what its `prepare` would return, or None; without effect
                once the partition was cleared.
            on_batch: called with the name of the sampler and each batch that was recorded for ranks.
        """
        self._partition = partition
        self._task = task
        self._commit = commit
        self._on_batch = on_batch
        self._recent = RecentBatches()
        self._last_request: ClaimRequest | None = None
        self._names: dict[str, Any] = {"partition_id": partition.partition_id, "task_name": task.name}
        self._search = PlanSearch(partition, task, runner, commit)
        self._queue = WaitQueue()
        self._to_answer: deque[tuple[Waiter, TqError | None]] = deque()  # calls that may be over, and why
        self._dispatching: asyncio.Task[None] | None = None
        self._has_changed = False  # since the lines had their turns
        self._may_bring_end = False  # whether some line's end may come with what others of the task consume
        self._serves_left = 0  # as many as lines were to have a turn when all were last looked at
        self._free_plans = asyncio.Semaphore(_MOST_PLANS)  # off the loop; those that are long under way have none
        self._gone: Callable[[], TqError] | None = None

    @property
    def waiting_count(self) -> int:
        """Number of calls that wait."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether no call waits, and no plan is made."""
        return not self._queue

    def close(self) -> None:
        """Serve no calls any more, while it is idle."""
        self._search.close()

    @property
    def last_request(self) -> ClaimRequest | None:
        """The claim that was made last, None where this process has seen none."""
        return self._last_request

    @property
    def recent_batches(self) -> tuple[RecentBatch, ...]:
        """The last batches that were recorded for ranks in this epoch, by this process."""
        return self._recent.of_epoch(self._task.epoch)

    def waiting_claims(self) -> list[tuple[ClaimRequest, int]]:
        """Return the first of the claims of each line, and how many wait in it, in order of arrival of the first."""
        lines = sorted(self._queue.lines, key=lambda line: line.order)
        return [(first.request, len(line)) for line in lines if (first := line.first()) is not None]

    @property
    def has_all_left(self) -> bool:
        """Whether the task has consumed nothing of what the partition still has."""
        return self._task.backlog == self._partition.table.present_count

    def starvation(self, asking: ClaimRequest | None = None) -> str:
        """Return, in words, why the task consumes nothing of what it has left; "" if that is unknown or it may.

        Either a claim waits which only new samples can serve, such as `asking` if it is of this task, or conditions
        rule out samples, which stay pending.
        """
        partition, task, rows = self._partition, self._task, slice(0, self._partition.table.count)
        waiting = [request for request, _ in self.waiting_claims()]
        if asking is not None and asking.task_name == task.name:
            waiting.insert(0, asking)
        request = waiting[0] if waiting else self._last_request
        if request is None or task.leased_count or rows.stop > _MOST_EXPLAINED:
            return ""
        try:
            readiness = Readiness(partition, task, request.batch_spec, self._search.length(request))
            pending, ready = task.is_pending(rows), readiness.ready(rows)
            excluded = pending & readiness.excluded(rows)
        except TqError:
            return ""
        ruled_out, names = int(np.count_nonzero(excluded)), {each.column for each in request.batch_spec.where}
        cause = f"{ruled_out} samples are ruled out by its where ({', '.join(sorted(names))}); clear these"
        if not waiting:
            return f"for task {task.name!r} {cause}" if ruled_out else ""
        if (pending & ~ready & ~excluded).any():  # held, or a field of them is still to come
            return ""
        return (
            f"this is a deadlock unless samples that fit still come: task {task.name!r} waits for more samples itself, "
            f"{int(np.count_nonzero(pending & ready))} are ready, too few for it{', and ' + cause if ruled_out else ''}"
        )

    async def claim(self, request: ClaimRequest, max_wait_seconds: float) -> Answer:
        """Return the recorded answer, or wait for one; `NotYet` when the time is over."""
        self._last_request = request
        recorded = self._recorded(request)
        if recorded is not None:
            return recorded
        if self._gone is not None:
            raise self._gone()
        try:
            found = self._search.plan_inline(request) if self._is_next(request) else NOT_LOOKED
        except MustBeAwaited:
            found = NOT_LOOKED
        if isinstance(found, NoPlan) and not isinstance(found, EndFound):
            return await self._wait(request, found, max_wait_seconds)
        if request.rank is None:
            answer: Answer = self._record_for_worker(request, found)
        else:
            self._record_for_ranks(request.spec, found)
            answer = found.plan.part(request.rank.dp_rank) if isinstance(found, Planned) else found.end
        self._start_dispatch()
        return answer

    def _is_next(self, request: ClaimRequest) -> bool:
        """Whether a call may be served before it joins a line: others have no turn now, and none asks alike.

        All waiting claims wait for a change then, so that no turn is taken away.
        """
        is_ahead = request.rank is not None and request.rank.batch_index > self._task.next_batch_index
        return not (is_ahead or self._is_serving or request.spec in self._queue.by_spec)

    async def _wait(self, request: ClaimRequest, found: NoPlan, max_wait_seconds: float) -> Answer:
        """Wait for an answer, given why there is none yet."""
        loop = asyncio.get_running_loop()
        removed_count = self._partition.table.removed_count
        waiter = Waiter(request, loop.create_future(), is_poll=max_wait_seconds <= 0)
        line = self._queue.join(waiter, found)
        timer = None
        try:
            if self._is_serving:
                self._queue.put(line)
            else:
                self._plan(line)
            self._start_dispatch()
            if waiter.is_waiting:
                self._listen()
                if not waiter.is_poll:
                    timer = loop.call_later(max_wait_seconds, waiter.expire)
            with Waiting():
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
            self._queue.leave(line, waiter)
            self._listen()
            del waiter  # through which an error would hold this frame, and with it the partition

    def _listen(self) -> None:
        """Hear of changes of the partition while a call waits; else they are nothing to a planner."""
        listeners = self._partition.on_change
        is_listening = self.wake in listeners
        if self._queue and not is_listening:
            listeners.append(self.wake)
        elif is_listening and not self._queue:
            listeners.remove(self.wake)

    def _recorded(self, request: ClaimRequest) -> RankPlan | QueueClaim | EndCounts | None:
        """Return the recorded answer of a call, or None; a queue claim counts the calls it answers.

        Raises:
            TqError: the call can have no answer.
        """
        self._task.check_epoch(request.epoch)
        recorded = self._task.recorded(request)
        if recorded is None and request.rank is not None:
            self._check_not_far_ahead(request.rank.batch_index)
        if isinstance(recorded, QueueClaim):
            recorded.answer_count += 1
        return recorded

    def _check_not_far_ahead(self, batch_index: int) -> None:
        """Refuse an index that no rank reaches by counting: all batches before it would be planned, and consumed."""
        next_index = self._task.next_batch_index
        if batch_index > next_index + _MOST_BATCHES_AHEAD:
            raise InvalidArgumentError(
                f"batch_index is {batch_index}; expected at most {next_index + _MOST_BATCHES_AHEAD}, which is "
                f"{_MOST_BATCHES_AHEAD} more than the next batch of task {self._task.name!r} in partition "
                f"{self._partition.partition_id!r}, {next_index}. Count batches from 0 in each partition and epoch.",
                field="batch_index",
                metadata={"got": str(batch_index), "expected": f"0 to {next_index + _MOST_BATCHES_AHEAD}"},
            )

    def _check_leased(self, claim: QueueClaim) -> None:
        """Refuse a claim that went between its record and the turn of the loop in which its call goes on."""
        if self._task.claims.get(claim.request_id) is not claim:
            raise LeaseExpiredError(
                f"the lease of this claim of task {self._task.name!r} ended before its answer was sent; ask again "
                f"under a new request_id",
                metadata={"task_name": self._task.name},
            )

    def wake(self) -> None:
        """Look at all waiting claims once more."""
        self._has_changed = True
        self._start_dispatch()

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waiting calls, and those to come, with an error."""
        self._gone = error
        for line in self._queue.lines:
            if line.planning is not None:
                line.planning.cancel()
        self._review(self._queue)
        self._start_dispatch()

    def _release_undelivered(self, waiter: Waiter) -> None:
        """Release the claim of a queue worker whose call ends without it."""
        answer = waiter.answer
        is_over = answer.done() and not answer.cancelled() and answer.exception() is None
        if is_over and isinstance(answer.result(), QueueClaim):
            self.retract(waiter.request.request_id)

    def retract(self, request_id: bytes) -> None:
        """Release a queue claim whose answer did not reach its client, unless a retry was given the same.

        The client may ask again under the same request_id. A claim with a name stays: others ask for it too.
        """
        claim = self._task.claims.get(request_id)
        if claim is None or claim.name:
            return
        claim.answer_count -= 1
        if claim.answer_count == 0:
            self._commit(ClaimReleased(**self._names, request_id=request_id, is_final=False), None)

    # The dispatch loop

    def _start_dispatch(self) -> None:
        has_work = self._queue.by_spec and (self._has_changed or self._to_answer or self._queue.has_turn)
        if has_work and self._dispatching is None:
            self._dispatching = asyncio.get_running_loop().create_task(self._dispatch())

    async def _dispatch(self) -> None:
        yielder = LoopYielder()
        try:
            while True:
                if self._is_behind_epoch:
                    self._search.epoch = self._task.epoch
                    self._review(self._queue)
                if self._to_answer:
                    waiter, error = self._to_answer.popleft()
                    if error is not None:
                        waiter.fail(error)
                    elif waiter.is_waiting:
                        self._answer_recorded(waiter)
                    await yielder.step(has_answered=not waiter.is_waiting)
                elif (line := self._next_line()) is not None:
                    first = line.first()
                    self._look(line)
                    await yielder.step(has_answered=first is not None and not first.is_waiting)
                else:
                    return
        except Exception:
            _log.exception(LogMessage("planning failed", task=self._task.name))
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
        """Whether it is worth while to look for a plan."""
        return not line.found.holds(self._partition, self._task)

    @property
    def _is_serving(self) -> bool:
        """Whether there are, or may be, lines whose turn it is."""
        return self._dispatching is not None or bool(self._queue.head_starts) or self._is_behind_epoch

    @property
    def _is_behind_epoch(self) -> bool:
        """Whether calls may wait that mean an epoch which is over."""
        return self._search.epoch != self._task.epoch

    def _review(self, waiters: Iterable[Waiter], error: TqError | None = None) -> None:
        """Have calls end, a few at a time: with an error, what is recorded for them, or why they can have nothing."""
        self._to_answer.extend((waiter, error) for waiter in waiters)

    def _answer_recorded(self, waiter: Waiter) -> bool:
        """Answer a call with what is recorded for it, or why it can have nothing; return whether it is over."""
        if self._gone is not None:
            waiter.fail(self._gone())
            return True
        try:
            recorded = self._recorded(waiter.request)
        except TqError as error:
            waiter.fail(error)
            return True
        if recorded is not None:
            waiter.resolve(recorded)
        return recorded is not None

    # A turn

    def _look(self, line: Line) -> None:
        """Give a line its turn, unless its first call is over."""
        waiter = line.first()
        if waiter is not None and self._answer_recorded(waiter):
            self._queue.put(line)
        else:
            self._plan(line)

    def _plan(self, line: Line) -> None:
        """Plan for the first call of a line here, or start a plan off the loop."""
        waiter = line.first()
        if waiter is None or line.planning is not None:
            return
        is_ahead = waiter.batch_index > self._task.next_batch_index
        if is_ahead and (earlier := self._queue.first_ranks(line)) is not line:
            self._give_way(line, earlier)
            return
        line.seen = self._queue.last_arrival
        try:
            self._conclude(line, self._search.plan_inline(waiter.request) if self._may_be_served(line) else line.found)
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
        """Serve a line with what was found in its turn, in the step in which it was found, or pass it over."""
        if isinstance(found, NoPlan):
            line.found = found
        if isinstance(found, Planned | EndFound):
            self._serve(line, found)
            return
        if not line.expire_polls():
            self._queue.put(line)  # for those that came while the plan was made
        self._may_bring_end |= found.consumed is not None
        # What has changed while the plan was made is for the next round: the others have their turns before.
        self._has_changed |= self._may_be_served(line)

    def _serve(self, line: Line, found: Planned | EndFound) -> None:
        """Record what was found for a line, and answer the queue worker whose turn it is.

        A rank may wait for a batch far ahead. So after many batches its line lets others have their turns, and those
        end that wait no longer than for theirs.
        """
        if line.is_ranked:
            self._record_for_ranks(line.spec, found)
            next_index = self._task.next_batch_index
            if isinstance(found, Planned) and next_index % _MOST_BATCHES_A_TURN == 0:
                line.expire_polls(next_index)
                self._queue.defer(line)
        elif (waiter := line.first()) is not None:  # else all have left meanwhile, and nothing is consumed
            waiter.resolve(self._record_for_worker(waiter.request, found))
        self._queue.put(line)

    def _record_for_ranks(self, spec: ClaimSpec, found: Planned | EndFound) -> None:
        """Record a batch, or the end, for all ranks; answer the claims that wait for it, reject those that disagree."""
        batch_index, is_end = self._task.next_batch_index, isinstance(found, EndFound)
        if isinstance(found, EndFound):
            end = EndReached(**self._names, dp_size=spec.plan_request.rank_count, end=found.end)
            self._commit(end, (self._partition, self._task))
        else:
            batch = BatchPlanned(**self._names, batch_spec=spec.batch_spec, plan=found.plan)
            self._commit(batch, (self._partition, self._task, found.positions))
            self._note_batch(batch_index, spec.batch_spec, found)
        self._count_serve()
        for line in self._queue.ranked_lines:
            disagrees = line.spec.dp_size != spec.dp_size
            self._review(each for each in line.waiters if each.batch_index == batch_index or is_end or disagrees)

    def _note_batch(self, batch_index: int, batch_spec: BatchSpec, found: Planned) -> None:
        """Keep in numbers a batch that was just recorded, unless its partition was cleared before."""
        if self._task.next_batch_index == batch_index:
            return
        is_plain = not (found.plan.is_reusing or found.plan.dropped)
        positions = found.positions if is_plain else self._partition.table.find(found.plan.rows)
        readiness = Readiness(self._partition, self._task, batch_spec, found.length)
        batch = describe_batch(batch_index, found.plan, readiness.known_lengths(positions))
        self._recent.add(self._task.epoch, batch)
        self._on_batch(batch_spec.sampler, batch)

    def _record_for_worker(self, request: ClaimRequest, found: Planned | EndFound) -> QueueClaim | EndCounts:
        """Record what a queue worker gets; an end is of this one only, or of all that ask under its name."""
        self._count_serve()
        name = request.claim_name
        if name:
            self._review(self._queue.named(name))
        if isinstance(found, EndFound):
            if name:
                self._commit(NamedEndReached(**self._names, claim_name=name, end=found.end), self._task)
            return found.end
        terms, grouping = request.lease, found.grouping
        if terms is not None and grouping is not None:
            terms = replace(terms, group_block_size=grouping.block_size or 0, blocks=grouping.blocks)
        change = QueueClaimed(
            **self._names,
            request_id=request.request_id,
            plan=found.plan,
            lease=terms,
            claim_name=name,
            batch_spec=request.batch_spec if name else None,
        )
        claim: QueueClaim = self._commit(change, (self._partition, self._task, found.positions))
        claim.answer_count = 1
        return claim

    def _count_serve(self) -> None:
        self._serves_left -= 1
        self._has_changed |= self._may_bring_end

    def _fail(self, line: Line, error: TqError) -> None:
        """End the first queue worker of a line; of ranks all that wait for the same batch, which would fail alike."""
        waiter, batch_index = line.first(), line.batch_index
        if line.is_ranked:
            self._review((each for each in line.waiters if each.batch_index == batch_index), error)
        elif waiter is not None:
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
        """Plan for a line and record the plan, in one step of the event loop, for the claim that is its first then.

        It waits until few others plan, but for those that take long, which may hang; and looks at the rows of the
        moment it starts.
        """
        loop, found = asyncio.get_running_loop(), None
        slot = contextlib.ExitStack()  # is closed when the plan is over, or has taken long
        try:
            try:
                await self._free_plans.acquire()
                slot.callback(self._free_plans.release)
                slot.callback(loop.call_later(_LONG_PLAN_SECONDS, slot.close).cancel)
                batch_index, waiter = self._task.next_batch_index, line.first()
                if waiter is not None and not self._answer_recorded(waiter):
                    self._give_head_start(line)
                    started_at, consumed_count = loop.time(), self._task.consumed_count
                    found = await self._search.plan(waiter.request, look_past=line.look_past)
                    # Twice what this one took, so that the next one is not late though it takes longer.
                    line.look_past = 2 * max(0, self._task.consumed_count - consumed_count)
                    line.loss_count = line.loss_count + 1 if found is None else 0
                    seconds = 2 * (loop.time() - started_at)
                    if line.loss_count < _MOST_LOSSES:
                        seconds = min(seconds, _LONG_HEAD_START_SECONDS)
                    line.head_start_seconds = max(seconds, _LEAST_HEAD_START_SECONDS)
            finally:
                line.planning = None
            while (waiter := line.first()) is not None and self._answer_recorded(waiter):
                pass  # it was released while the plan was made
            if found is None or (line.is_ranked and self._task.next_batch_index != batch_index):
                self._queue.put(line)  # it came too late
            else:
                self._conclude(line, found)
        except TqError as error:
            self._fail(line, error)
        except Exception:
            _log.exception(LogMessage("planning failed", task=self._task.name))
            self._fail_all(line.waiters)
        finally:
            slot.close()
            self._end_plan(line)

    def _end_plan(self, line: Line) -> None:
        """Have all go on that waited for a plan to be over."""
        if line.is_ranked:
            for each in self._queue.ranked_lines:
                self._queue.put(each)
        self._queue.drop_if_unused(line)
        self._listen()
        self._end_head_start(line)

    def _give_head_start(self, line: Line) -> None:
        """Have lines that come after this one wait for its plan, for as long as it is likely to take."""
        self._end_head_start(line)
        if line.head_start_seconds:
            timer = asyncio.get_running_loop().call_later(line.head_start_seconds, self._end_head_start, line)
            self._queue.head_starts[line] = timer

    def _end_head_start(self, line: Line) -> None:
        timer = self._queue.head_starts.pop(line, None)
        if timer is not None:
            timer.cancel()
        self._start_dispatch()


class PlanSearch:
    """Looks for the plans of one task, for any number of specs at the same time.

    What is recorded of the plans is left to the planner: a plan that is made off the event loop may lose its rows to
    another one that is recorded meanwhile.

    Attributes:
        epoch: whose plans are looked for; there are none for the next one before the planner has gone on to it.
    """

    def __init__(
        self, partition: Partition, task: TaskLedger, runner: RunsPlans, commit: Callable[[Change, object], Any]
    ) -> None:
        """Look for the plans of a task; `commit` records how they keep groups whole, see `TaskFacts`."""
        self._commit = commit
        self._partition = partition
        self._task = task
        self._runner = runner
        self._ready = ReadyIndex(partition, task.name)
        self.epoch = task.epoch

    def close(self) -> None:
        """Look for no plans any more."""
        self._ready.close()

    def _note_groups(self, kept_groups: int | None) -> None:
        """Record how the task keeps groups whole, if it did so in another way before."""
        partition, task = self._partition, self._task
        if kept_groups != task.kept_groups:
            names = {"partition_id": partition.partition_id, "task_name": task.name}
            self._commit(GroupsKept(**names, kept_groups=kept_groups), (partition, task))

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
        try:
            self._find(request, self._run_inline).send(None)  # never waits
        except StopIteration as stop:
            found: Found = stop.value  # never None: nothing has changed meanwhile
            return found
        raise AssertionError("a plan was awaited on the event loop")

    async def plan(self, request: ClaimRequest, *, look_past: int = 0) -> Found | None:
        """Return a plan, the end, why there is none yet, or None where another claim was quicker or a reset came.

        There is no await between the check of a plan's rows and the return, so that the caller can record it.

        Args:
            request: the claim.
            look_past: so many ready rows are left to others, if there is a plan of those behind them.
        """
        if look_past and self._view(request).has_ready(look_past + request.plan_request.total_size):
            found = await self._find(request, self._run_off_loop, look_past)
            if found is None or isinstance(found, Planned):
                return found
        begun_at = self._task.serial, self._task.epoch
        for _ in range(_MOST_REPLANS):
            await self._close_gaps()
            was_heavy = await self._prepare_rows(request)
            if self._is_over(begun_at[1]):
                return None
            if was_heavy:
                with contextlib.suppress(MustBeAwaited):
                    return self.plan_inline(request)
            found = await self._find(request, self._run_off_loop)
            if found is not None or (self._task.serial, self._task.epoch) != begun_at:
                return found
        raise SamplerError(
            f"sampler {request.sampler.name!r}: samples of {_MOST_REPLANS} plans in a row were cleared, failed or "
            f"reset while they were planned; ask again",
            metadata={"sampler": request.sampler.name},
        )

    async def _find(self, request: ClaimRequest, run: Run, look_past: int = 0) -> Found | None:
        """Return what the sampler's plans come to, each made by `run`; None: of rows that are not ready any more."""
        wanted, begun_at = request.plan_request, self.marks
        consumed = self._task.consumed_count, self._task.leased_count
        view = self._view(request, look_past=look_past)
        plan = await run(request.sampler, view, wanted)
        if plan is None and look_past:
            return NOT_LOOKED
        if plan is None:
            is_finished = request.batch_spec.finite and self._partition.may_end_finite
            is_closed = begun_at == self.marks and (self._partition.sealed or is_finished)
            is_inline = run == self._run_inline
            if is_closed:
                is_over = await self._in_steps(view.no_more_can_become_ready(), begun_at, is_inline=is_inline)
                if is_over is None:
                    return NOT_LOOKED
            if not (is_closed and is_over):
                view.check_length_field()
                failed = self._failed(request, view, begun_at, consumed)
                if self._task.kept_groups is None:  # else two that wait and differ in it would wake each other for ever
                    self._note_groups(view.kept_groups)
                return failed
            least = wanted.total_size if request.batch_spec.drop_last else 1
            view = self._view(request, no_more=True)
            plan = await run(request.sampler, view, replace(wanted, min_size=least))
            if plan is None:
                end = await self._in_steps(view.end(), begun_at, is_inline=is_inline)
                if end is None:
                    return NOT_LOOKED
                found = EndFound(begun_at[0], begun_at[1] + 1, consumed, end=end)
                self._note_groups(view.kept_groups)
                return found
        if self._is_over(begun_at[-1]):
            return None
        planned = self._checked(request, view, plan)
        if planned is not None:
            self._note_groups(view.kept_groups)
        state_version, _, *others = begun_at  # rows that are only written to stay ready
        if planned is None and (state_version, *others) == (self.marks[0], *self.marks[2:]):
            raise SamplerError(
                f"sampler {request.sampler.name!r} returned rows that were not ready for this claim; return rows of "
                f"view.ready() or view.ready_groups() only",
                metadata={"sampler": request.sampler.name},
            )
        return planned

    def _failed(
        self, request: ClaimRequest, view: PartitionView, begun_at: tuple[int, ...], consumed: tuple[int, int]
    ) -> NoPlan:
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
        return NoPlan(state_version, row_version + max(1, missing), consumed if is_closed else None)

    def _is_over(self, epoch: int) -> bool:
        """Whether plans that were begun in an epoch are of no use: what was left in it is not what there is now."""
        return not epoch == self.epoch == self._task.epoch

    def _checked(self, request: ClaimRequest, view: PartitionView, plan: Plan) -> Planned | None:
        """Return the plan with its positions, None where its rows have been changed while it was made."""
        batch_spec = request.batch_spec
        recorded = RecordedPlan.of(plan, batch_spec.micro_batch_size)
        positions = view.still_ready(recorded.named)
        if positions is None:
            return None
        if batch_spec.max_uses > 1 or recorded.is_reusing:
            recorded = recorded.consuming(self._spent(recorded.rows, batch_spec.max_uses))
            positions = self._partition.table.find(recorded.named)
        return Planned(recorded, positions, view.grouping, self._runner.length(request.sampler))

    def _spent(self, rows: Indexes, max_uses: int) -> Indexes:
        """Return the rows of a plan that were used often enough once it is recorded; of no number none."""
        if max_uses == 1:
            return rows[:0]
        rows, counts = np.unique(rows, return_counts=True)
        spent: Indexes = rows[self._task.uses.data[self._partition.table.find(rows)] + counts >= max_uses]
        return spent

    async def _run_inline(self, sampler: Sampler, view: PartitionView, wanted: PlanRequest) -> Plan | None:
        if view.is_heavy:
            raise MustBeAwaited
        return self._runner.run_inline(sampler, view, wanted)

    async def _run_off_loop(self, sampler: Sampler, view: PartitionView, wanted: PlanRequest) -> Plan | None:
        """Run the sampler while the positions of rows stay as they are."""
        view.leave_loop()
        with self._partition.table.pinned():
            plan = await self._runner.run(sampler, view, wanted)
        view.rejoin_loop()
        return plan

    def length(self, request: ClaimRequest) -> LengthSource | None:
        """Return the length that the sampler of a claim needs."""
        return self._runner.length(request.sampler)

    def _view(self, request: ClaimRequest, *, no_more: bool = False, look_past: int = 0) -> PartitionView:
        length = self._runner.length(request.sampler)
        return PartitionView(
            self._partition,
            self._task,
            self._ready,
            request.batch_spec,
            length,
            no_more=no_more,
            look_past=look_past,
        )

    async def _close_gaps(self) -> None:
        """Close gaps of the table if these are many, in short steps, once all plans of the partition are over.

        Else plans that overlap all the time would have the table grow without end. Plans have a time limit.
        """
        table = self._partition.table
        while table.has_many_gaps:
            if table.pin_count:
                unpinned = asyncio.Event()
                table.when_unpinned(unpinned.set)
                await unpinned.wait()
            else:
                table.close_gaps(_CLOSED_AT_ONCE)
                await asyncio.sleep(0)

    async def _prepare_rows(self, request: ClaimRequest) -> bool:
        """Sort the rows of a claim, or skip those that are not ready, in short steps; return whether it took any."""
        was_heavy = False
        while self.epoch == self._task.epoch and self._view(request).prepare_some():
            was_heavy = True
            await asyncio.sleep(0)
        return was_heavy

    async def _in_steps(self, steps: Steps[T], begun_at: tuple[int, ...], *, is_inline: bool) -> T | None:
        """Return what some steps come to, None if something has changed between them.

        Raises:
            MustBeAwaited: there are several of them, and the caller cannot wait.
        """
        with self._partition.table.pinned():
            while begun_at == self.marks:
                try:
                    work = next(steps)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                if is_inline:
                    raise MustBeAwaited
                await (asyncio.sleep(0) if work is None else asyncio.to_thread(work))
            return None
