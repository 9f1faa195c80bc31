"""All partitions by name, with what serves each, their limits, and the calls that wait for a partition to appear.

`Limits` are compared when a request comes, never when a change is made again: what was let in under higher limits
stays. `LeaseTimer` has the deadlines of one partition's leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import os
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
)
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from tq_service.custom_meta import MetaColumn
from tq_service.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    LimitExceededError,
    PartitionClearedError,
    PreconditionError,
    StaleIncarnationError,
    TqError,
    UnavailableError,
)
from tq_service.machine.claims import LeaseExpired, TaskAdvanced, TaskForgotten, TaskSeen
from tq_service.machine.policies import VersionPublished, check_pace
from tq_service.machine.samples import (
    CheckedWrite,
    PartitionCleared,
    PartitionCreated,
    SamplesWritten,
    SampleWrite,
    Written,
    check_write,
)
from tq_service.machine.state_machine import Change, IdempotencyCache, RequestAnswered, State, StateMachine, Step
from tq_service.schema import EndCounts, check_name, check_passed_on
from tq_service.serving.admission import AdmissionQueue, starvation
from tq_service.serving.history import ChangeHistory
from tq_service.serving.planner import Answer, LoopYielder, NotYet, Planner, RunsPlans
from tq_service.serving.versions import Enders, VersionWaits
from tq_service.state.cells import CellsSnapshot, Freed
from tq_service.state.ledger import Claim, TaskLedger, check_epoch
from tq_service.state.partition import Listeners, Partition, PartitionSettings, PartitionSnapshot
from tq_service.state.plan import ClaimRequest, ClaimSpec, NotBefore, RankPlan
from tq_service.state.policies import Policies, Policy
from tq_service.wait_clock import Waiting, WhileWaiting

_LEAST_STALE_DEADLINES = 64
_MOST_EXPIRED_A_TURN = 64
_FREED_AT_ONCE: Final = 1 << 16  # samples

_NUMBER_BYTES = 8
_MOST_TRAINED: Final = 64  # tasks that one call names
# What is named in a partition, by argument: the limit of its number, what it is called, and what to do instead.
_NAMED = {
    "fields": ("max_fields", "fields", "put what differs from sample to sample as an object field"),
    "custom_meta": ("max_meta_columns", "custom_meta columns", "use one column for values of one kind"),
    "task_name": ("max_tasks", "tasks", "name tasks by what they do, not by process or step"),
    "tasks": ("max_tasks", "tasks", "name tasks by what they do, not by process or step"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one controller; each has the name of its setting.

    Attributes:
        max_partitions: partitions there may be.
        max_policies: policies there may be.
        max_samples: samples there may be in all of them.
        max_fields: fields of one partition.
        max_tasks: tasks of one partition.
        max_meta_columns: custom_meta columns of one partition.
        max_sample_meta_bytes: custom_meta that is written for one sample at once, its texts and JSON in UTF-8.
        max_name_length: characters of a key, or of the name of a group, field, task or custom_meta column.
    """

    max_partitions: int = 10_000
    max_policies: int = 1_000
    max_samples: int = 50_000_000
    max_fields: int = 1_024
    max_tasks: int = 256
    max_meta_columns: int = 256
    max_sample_meta_bytes: int = 16 * 1024
    max_name_length: int = 512

    def check_create(self, partition_id: str, settings: PartitionSettings, partition_count: int) -> None:
        """Refuse a new partition that is one too many, or declares too much."""
        self.check_count("max_partitions", "partitions", partition_count + 1, "clear some that are done")
        self._check_new("fields", partition_id, (), [spec.name for spec in settings.fields])
        self._check_new("tasks", partition_id, (), settings.tasks)

    def check_write(self, partition: Partition, write: SampleWrite) -> None:
        """Refuse a write that names too much; its partition may be one that it makes."""
        self._check_longest("keys", write.keys or ())
        self._check_longest("groups", write.groups or ())
        fields = [column.spec.name for column in write.columns]
        self._check_new("fields", partition.partition_id, partition.cells.fields, fields)
        if write.meta:
            self.check_meta(partition, write.meta)

    def check_meta(self, partition: Partition, columns: Sequence[MetaColumn]) -> None:
        """Refuse custom_meta of too many columns, or too large for one sample."""
        names = [column.name for column in columns]
        self._check_new("custom_meta", partition.partition_id, partition.meta.names(), names)
        numbers = [column for column in columns if column.values.dtype.kind != "O"]
        has_texts = len(numbers) < len(columns) or any(column.json is not None for column in columns)
        if not has_texts and len(columns) * _NUMBER_BYTES <= self.max_sample_meta_bytes:
            return
        sizes = np.sum([column.text_sizes(_utf8_size) for column in columns], axis=0)
        for column in numbers:
            sizes += column.present * _NUMBER_BYTES
        largest = int(sizes.max(initial=0))
        if largest > self.max_sample_meta_bytes:
            raise InvalidArgumentError(
                f"custom_meta of sample {int(sizes.argmax())} of the write has {largest} bytes, at most "
                f"{self.max_sample_meta_bytes} expected (max_sample_meta_bytes); put large values as an object field",
                field="custom_meta",
                metadata=self._metadata("max_sample_meta_bytes", largest),
            )

    def check_task(self, partition: Partition, task_name: str) -> None:
        """Refuse a task that is not there yet and one too many."""
        self._check_new("task_name", partition.partition_id, partition.tasks, (task_name,))

    def _check_new(self, what: str, partition_id: str, known: Collection[str], names: Iterable[str]) -> None:
        """Refuse names that are new to a partition where they are too long, or too many beside those it knows."""
        if new := [name for name in names if name not in known]:
            self._check_longest("name" if what == "fields" else what, new)
            limit_name, plural, remedy = _NAMED[what]
            self.check_count(limit_name, f"{plural} in partition {partition_id!r}", len(known) + len(new), remedy)

    def _check_longest(self, what: str, names: Iterable[str]) -> None:
        longest = max(map(len, names), default=0)
        if longest > self.max_name_length:
            raise InvalidArgumentError(
                f"{'a field' if what == 'name' else what} has a name of {longest} characters, at most "
                f"{self.max_name_length} expected (max_name_length)",
                field=what,
                metadata=self._metadata("max_name_length", longest),
            )

    def check_count(self, limit_name: str, what: str, got: int, remedy: str) -> None:
        """Refuse so many of something that has a limit."""
        limit = getattr(self, limit_name)
        if got > limit:
            raise LimitExceededError(
                f"there would be {got} {what}, at most {limit} expected ({limit_name}); {remedy}, or raise "
                f"{limit_name}",
                metadata=self._metadata(limit_name, got),
            )

    def _metadata(self, limit_name: str, got: int) -> dict[str, str]:
        return {"limit_name": limit_name, "got": str(got), "limit": str(getattr(self, limit_name))}


def _utf8_size(text: str) -> int:
    return len(text.encode())


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

    def start(self, task_name: str, claim: Claim) -> None:
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


Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a claim, and those behind it of a range; no partition where it does not exist yet."""

    partition: Partition | None
    answer: Answer
    more: Sequence[RankPlan | EndCounts] = ()


class _Serving:
    """What serves the calls of one partition, made on first use; unlike its state it does not outlive the process."""

    def __init__(self, partition: Partition, expire: Callable[[str, bytes], object]) -> None:
        self._partition = partition
        self.planners: dict[str, Planner] = {}
        self.admission_queue = AdmissionQueue(partition, self._deadlock) if partition.settings.is_bounded else None
        self.lease_timer = LeaseTimer(partition.tasks, expire)
        self.enders: Enders = set()  # of look-ups, and claims, that wait for something else than a plan

    def _deadlock(self, task_name: str, asking: ClaimRequest | None) -> str:
        """Return why a task cannot consume before more samples come; of no task in particular, any such; "" if none."""
        planners = [self.planners[task_name]] if task_name in self.planners else []
        if not task_name:
            count = self._partition.table.present_count
            planners = [each for each in self.planners.values() if each.task.backlog == count]
        return next(filter(None, (starvation(self._partition, planner, asking) for planner in planners)), "")

    def end(self, error: Callable[[], TqError]) -> None:
        """End all waiting calls, and those to come, with an error; no lease expires any more."""
        for planner in self.planners.values():
            planner.end(error)
        for end in self.enders:
            end(error)
        if self.admission_queue is not None:
            self.admission_queue.end(error)
        self.lease_timer.stop()


class Catalog:
    """The partitions of a controller, and the claims that wait for their samples. All methods run on its event loop.

    Attributes:
        machine: what makes all changes.
        answers: of mutating requests, for retries.
        policies: the published versions, by the name of their policy.
        versions: the calls that wait for one.
        history: what has changed since when.
        capacity_waits: the claims that wait for capacity in another partition, with the name of their own one, by
            request id.
        on_freed: called with cells that no sample has any more, once that was appended to the log.
        on_batch: called with the name of the sampler and each batch that was recorded for ranks.
        on_partition: called with a partition and whether it was "created", "restored", or "removed".
    """

    def __init__(
        self, runner: RunsPlans, limits: Limits | None = None, answers: IdempotencyCache | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.machine = StateMachine(State(answers))
        self.machine.listener = self._follow
        self.on_freed: Callable[[Sequence[Freed]], None] = lambda freed: None
        self.on_batch = Listeners()
        self.on_partition = Listeners()
        self._state = self.machine.state
        self._partitions = self._state.partitions
        self.policies: Policies = self._state.policies
        self.versions = VersionWaits(self._state.policies)
        self.history = ChangeHistory(self._state)
        self.answers = self._state.answers
        self._runner = runner
        self._serving: dict[Partition, _Serving] = {}  # that are there
        self._most_samples = math.inf  # there are no more than that
        # What waits for partitions that are not there, in order of the calls: claims, and look-ups as None.
        self._arrivals: dict[str, dict[asyncio.Future[bool], ClaimRequest | None]] = {}
        self.capacity_waits: dict[bytes, tuple[str, ClaimRequest]] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._retracted: list[tuple[Partition, str, bytes]] = []  # claims, while no change is made
        self._is_draining = False
        self._closed_prefix: str | None = None

    # Changes

    def commit(self, change: Change) -> Any:
        """Make a change; see `StateMachine.commit`."""
        return self.machine.commit(change)

    def run_once(self, request_id: bytes, make: Callable[[], Made], kind: type[object] = object) -> Made:
        """Return the recorded answer of a request, or make its changes and record the answer, all in one group.

        Raises:
            InvalidArgumentError: the id has not 16 bytes, or the recorded answer is not of this kind: it is that of
                another method, to which the caller gave the same id.
        """
        recorded: Made | None = self.recorded(request_id, kind)
        if recorded is not None:
            return recorded
        with self.machine.group():
            answer = make()
            self.commit(RequestAnswered(request_id=request_id, packed=self.answers.pack(answer)))
        return answer

    def recorded(self, request_id: bytes, kind: type[object] = object) -> Any | None:
        """Return the recorded answer of a request, None where there is none; see `run_once`."""
        return self.answers.recorded(request_id, kind, self.machine.now_seconds())

    def _follow(self, step: Step) -> None:
        """Do what follows from changes that were made."""
        for partition in step.created:
            self._appear(partition)
            self.on_partition(partition, "created")
        for partition in step.cleared:
            self._disappear(partition)
        for partition, task_name, claim in step.leases:
            self._start_lease(partition, task_name, claim)
        for policy in step.policies:
            self.versions.wake(policy)
            for partition, serving in self._serving.items():
                if any(planner.compares_with(policy) for planner in serving.planners.values()):
                    step.note_change(partition)  # conditions may hold for other samples than before
        for partition in step.changed:
            partition.on_change()
        for partition in step.consumed:
            partition.on_consumed()
        if self.history.given_out:
            self.history.note(step)
        if step.freed:
            self.on_freed(step.freed)

    def _appear(self, partition: Partition) -> None:
        if waiting := self._arrivals.pop(partition.partition_id, None):
            self._start(_wake_all(waiting))

    def _start(self, what_follows: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(what_follows)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _disappear(self, partition: Partition) -> None:
        self.on_partition(partition, "removed")
        if (serving := self._serving.pop(partition, None)) is not None:
            serving.end(partial(_cleared_error, partition.partition_id))
        partition.forget_listeners()
        if partition.table.count > _FREED_AT_ONCE:
            self._start(_free(partition))

    def _serving_of(self, partition: Partition) -> _Serving:
        serving = self._serving.get(partition)
        if serving is None:
            serving = self._serving[partition] = _Serving(partition, partial(self._expire, partition))
            if self._is_draining:
                serving.end(_draining_error)
        return serving

    # Partitions

    def names(self) -> KeysView[str]:
        """Return the names of all partitions."""
        return self._partitions.keys()

    def partitions(self) -> list[Partition]:
        """Return all partitions of this moment."""
        return list(self._partitions.values())

    def sample_count(self) -> int:
        """Return the number of samples in all partitions."""
        return sum(partition.table.present_count for partition in self._partitions.values())

    def snapshot_cells(self) -> list[CellsSnapshot]:
        """Return which cells samples of all partitions have now, for `live_cells`, which another thread may read."""
        return [partition.cells.snapshot() for partition in self._partitions.values()]

    def get(self, partition_id: str, incarnation: bytes = b"") -> Partition:
        """Return a partition that must be there, in the incarnation the caller means; empty means whichever."""
        return self._state.partition(partition_id, incarnation)

    def find(self, partition_id: str, incarnation: bytes = b"", *, missing_ok: bool) -> Partition | None:
        """Return a partition as `get` does; with `missing_ok` None where it is not there in that incarnation."""
        partition = self._partitions.get(partition_id)
        if missing_ok and (partition is None or (incarnation and incarnation != partition.incarnation)):
            check_name("partition_id", partition_id)
            return None
        return self.get(partition_id, incarnation)

    def create(self, partition_id: str, settings: PartitionSettings) -> Partition:
        """Return the partition with these settings, made if it is not there."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            created: Partition = self.machine.commit(*self._creation(partition_id, settings))
            return created
        if partition.settings != settings:
            difference = partition.settings.describe_difference(settings)
            raise AlreadyExistsError(
                f"partition {partition_id!r} is there with other settings: {difference}; "
                f"create a partition before its first samples, and with the same settings everywhere",
                metadata={"resource_type": "partition", "resource_name": partition_id},
            )
        return partition

    def _creation(
        self, partition_id: str, settings: PartitionSettings, made: Partition | None = None
    ) -> tuple[Change, Partition]:
        check_name("partition_id", partition_id)
        if self._closed_prefix is not None and partition_id.startswith(self._closed_prefix):
            raise UnavailableError("a checkpoint is being restored; new partitions can be made once it is")
        self.limits.check_create(partition_id, settings, len(self._partitions))
        incarnation = os.urandom(16) if made is None else made.incarnation
        creation = PartitionCreated(partition_id=partition_id, incarnation=incarnation, settings=settings)
        return creation, made or creation.prepare(self._state)

    @contextlib.asynccontextmanager
    async def capacity_for(
        self, partition_id: str, incarnation: bytes, write: SampleWrite
    ) -> AsyncIterator[CheckedWrite | None]:
        """Reserve capacity for the new rows of a write in steps, which let others run; the `with` block writes it.

        The write is checked first, so that one which is refused takes no memory. Nothing else changes: unused capacity
        is returned. Yields the checked write, which `write` takes.
        """
        checked: CheckedWrite | None = None
        while True:
            checked = self._check_write(partition_id, incarnation, write, checked)[-1][1]
            partition, there = checked.partition, self._partitions.get(partition_id)
            try:
                columns = partition.cells.new_columns(checked.specs)
                for _ in partition.table.reserve_capacity(checked.new_count, columns):
                    await asyncio.sleep(0)
                    if self._partitions.get(partition_id) is not there:  # cleared, or made by another
                        break
                else:
                    yield checked
                    return
            finally:
                partition.table.return_capacity()
            checked = None if there is partition else checked

    def write(
        self, partition_id: str, incarnation: bytes, write: SampleWrite, checked: CheckedWrite | None = None
    ) -> Written:
        """Write samples; the first ones make their partition, and a refused write leaves none behind.

        Args:
            partition_id: where they are.
            incarnation: that is meant; empty: whichever.
            write: what is written.
            checked: what was found out of it before; see `capacity_for`.
        """
        written: Written = self.machine.commit_all(self._check_write(partition_id, incarnation, write, checked))
        return written

    def _check_write(
        self, partition_id: str, incarnation: bytes, write: SampleWrite, checked: CheckedWrite | None
    ) -> list[tuple[Change, Any]]:
        """Check a write, once as long as nothing changes; return its change, behind one that makes its partition."""
        changes: list[tuple[Change, Any]] = []
        if partition_id in self._partitions or incarnation or not write.may_add_samples:
            partition = self.get(partition_id, incarnation)
        else:
            made = None if checked is None else checked.partition
            creation, partition = self._creation(partition_id, PartitionSettings(), made)
            changes.append((creation, partition))
        if checked is None or checked.partition is not partition or not checked.is_current:
            self.limits.check_write(partition, write)
            checked = check_write(partition, write)
        self._check_samples(checked.new_count)
        return [*changes, (SamplesWritten(partition_id=partition_id, write=write), checked)]

    def _check_samples(self, new_count: int) -> None:
        """Refuse new samples that would be too many.

        All are counted only where those that were added since could be too many: there may be thousands of partitions.
        """
        if new_count and self._most_samples + new_count > self.limits.max_samples:
            self._most_samples = self.sample_count()
            count, remedy = self._most_samples + new_count, "clear those that are done"
            self.limits.check_count("max_samples", "samples in all partitions", count, remedy)
        self._most_samples += new_count

    def knows_keys(self, partition_id: str, incarnation: bytes, keys: Sequence[str]) -> bool:
        """Whether samples of a partition have these keys, or had them; not where it is not there."""
        partition = self.find(partition_id, incarnation, missing_ok=True)
        return partition is not None and bool((partition.key_index.find(keys) >= 0).all())

    def remove(self, partition_id: str, incarnation: bytes, *, missing_ok: bool = False) -> int:
        """Remove a partition; return how many samples it held."""
        if self.find(partition_id, incarnation, missing_ok=missing_ok) is None:
            return 0
        count: int = self.commit(PartitionCleared(partition_id=partition_id))
        return count

    def admission_queue(self, partition_id: str) -> AdmissionQueue | None:
        """Return where writes of new samples wait for capacity, None where nothing bounds them."""
        partition = self._partitions.get(partition_id)
        return None if partition is None else self._serving_of(partition).admission_queue

    def waiting_put_count(self, partition_id: str) -> int:
        """Return the number of writes of new samples that wait for capacity."""
        queue = self.admission_queue(partition_id)
        return 0 if queue is None else queue.waiting_count

    # Policies

    def policy(self, name: str) -> Policy:
        """Return a policy of which a version must be published."""
        return self._state.policy(name)

    def publish(self, published: VersionPublished, trained: Sequence[tuple[str, str, int]]) -> None:
        """Publish a version, and record how far its trainers have come: partition, task and last batch of each.

        Raises:
            TqError: one of them is refused; then nothing is changed.
        """
        if len(trained) > _MOST_TRAINED:
            raise InvalidArgumentError(
                f"trained names {len(trained)} tasks, expected at most {_MOST_TRAINED}; call advance for the others",
                field="trained",
            )
        if published.policy not in self.policies:
            self.limits.check_count("max_policies", "policies", len(self.policies) + 1, "remove those that are done")
        advances = [
            TaskAdvanced(partition_id=partition_id, task_name=task_name, trained=batch_index)
            for partition_id, task_name, batch_index in trained
        ]
        last_trained = {(each.partition_id, each.task_name): each.trained or 0 for each in advances}
        check_pace(self._state, published, last_trained)
        changes = [(change, change.prepare(self._state)) for change in (*advances, published)]
        self.machine.commit_all([(change, prepared) for change, prepared in changes if prepared is not None])

    # Snapshots

    def snapshot(self) -> list[PartitionSnapshot]:
        """Return all partitions as they are now, for another thread to read."""
        return [partition.snapshot() for partition in self._partitions.values()]

    @contextlib.contextmanager
    def closed(self, prefix: str) -> Iterator[None]:
        """Refuse new partitions whose names begin so until the end of the `with`, but those that are adopted.

        Raises:
            PreconditionError: there are such partitions.
        """
        count = sum(name.startswith(prefix) for name in self._partitions)
        if count or self._closed_prefix is not None:
            which = f" whose names begin with {prefix!r}" if prefix else ""
            raise PreconditionError(
                f"the service has {count} partitions{which}; a checkpoint is restored where there are none: "
                f"clear them, start another service, or have it take their place (replace)"
            )
        self._closed_prefix = prefix
        try:
            yield
        finally:
            self._closed_prefix = None

    def adopt(self, restored: Sequence[Partition], policies: Iterable[Policy] = ()) -> None:
        """Take over partitions and policies, all in one step; no listener is called."""
        self._most_samples = math.inf
        for policy in policies:
            self._state.policies[policy.name] = policy
            self.versions.wake(policy.name)
        for partition in restored:
            self._state.add_partition(partition)
            self._appear(partition)
            self.on_partition(partition, "restored")

    def prepare_replacement(self, restored: Sequence[Partition]) -> None:
        """Refuse changes until `end_replacement`: partitions are about to take the place of others that are there.

        One whose incarnation is there gets another: samples put since then had global indexes that will be those of
        others, and a partition of another name may be of the same checkpoint.
        """
        self.machine.refusal = _replacement_error
        known = {partition.incarnation for partition in self._partitions.values()}
        for partition in restored:
            if partition.incarnation in known:
                partition.incarnation = os.urandom(16)

    def end_replacement(self) -> None:
        """Make changes again, those first that could not be made meanwhile; nothing where there was no replacement."""
        self.machine.refusal = None
        retracted, self._retracted = self._retracted, []
        for each in retracted:
            self.retract(*each)

    def replace(self, restored: Sequence[Partition], prefix: str, policies: Iterable[Policy] = ()) -> None:
        """Take over partitions in place of those whose names begin so, in one step; what waits on these gets an error.

        Policies likewise, but for the errors: what waits for a version goes on waiting.

        It is not written down: the snapshot that has the new partitions is where the log goes on.
        """
        freed: list[Freed] = []
        replaced = [each for name, each in self._partitions.items() if name.startswith(prefix)]
        for partition in replaced:
            del self._partitions[partition.partition_id]
            freed += partition.cells.puts.all()
            self._disappear(partition)
        for name in [name for name in self.policies if name.startswith(prefix)]:
            del self._state.policies[name]
        self.adopt(restored, policies)
        if self.history.given_out:
            self.history.note(Step(self.machine.now_seconds(), created=[*restored], cleared=replaced))
        self.on_freed(freed)

    # Claims

    def planner(self, partition: Partition, task_name: str) -> Planner:
        """Return the planner of a task, made on its first use."""
        planners = self._serving_of(partition).planners
        if task_name not in planners:
            task = self.task(partition, task_name)
            commit = partial(self._commit_in, partition)
            planners[task_name] = Planner(
                partition, task, self._runner, commit=commit, group=self.machine.group, on_batch=self.on_batch
            )
        return planners[task_name]

    def task(self, partition: Partition, task_name: str) -> TaskLedger:
        """Return the ledger of a task, opened on its first use."""
        task = partition.tasks.get(task_name)
        if task is None:
            self.limits.check_task(partition, task_name)
            task = self.commit(TaskSeen(partition_id=partition.partition_id, task_name=task_name))
        return task

    def _forget_unused(self, partition: Partition, task_name: str) -> None:
        """Forget a task after a call of it was refused, if nothing is on record of it and no other call waits."""
        planner = self.known_planner(partition, task_name)
        is_over = planner is None or self._is_draining or self.machine.refusal is not None
        if is_over or planner is None or not planner.is_idle or not partition.tasks[task_name].is_unused:
            return
        self.commit(TaskForgotten(partition_id=partition.partition_id, task_name=task_name))
        if task_name not in partition.tasks:
            planner.close()
            del self._serving_of(partition).planners[task_name]

    def _commit_in(self, partition: Partition, change: Change, prepared: Any = None) -> Any:
        """Make a change of a partition, unless it was cleared: another may have its name by now."""
        if self._partitions.get(partition.partition_id) is not partition:
            return None
        return self.machine.commit(change, prepared)

    def retract(self, partition: Partition, task_name: str, request_id: bytes) -> None:
        """Release a queue claim whose answer did not reach its client; see `Planner.retract`."""
        if self.machine.refusal is not None:
            self._retracted.append((partition, task_name, request_id))
        elif (planner := self.known_planner(partition, task_name)) is not None:
            planner.retract(request_id)

    def known_planner(self, partition: Partition, task_name: str) -> Planner | None:
        """Return the planner of a task, None where this process has seen no call of it."""
        serving = self._serving.get(partition)
        return None if serving is None else serving.planners.get(task_name)

    # Leases

    def start_leases(self) -> None:
        """Have the leases expire that were recovered or restored, each after its full time."""
        for partition in self._partitions.values():
            for task in partition.tasks.values():
                for claim in task.leases.values():
                    self._start_lease(partition, task.name, claim)

    def _start_lease(self, partition: Partition, task_name: str, claim: Claim) -> None:
        if claim.lease is None or self._is_draining or self._partitions.get(partition.partition_id) is not partition:
            return
        self._serving_of(partition).lease_timer.start(task_name, claim)

    def _expire(self, partition: Partition, task_name: str, request_id: bytes) -> None:
        if self.machine.refusal is not None:  # it begins again, as after a restart
            self._start_lease(partition, task_name, partition.tasks[task_name].claims[request_id])
            return
        self.commit(LeaseExpired(partition_id=partition.partition_id, task_name=task_name, request_id=request_id))

    # Waiting

    def waiting_claims(self, partition: Partition, task_name: str) -> list[tuple[ClaimRequest, int]]:
        """Return one of the waiting claims that ask alike, and their number; empty `task_name`: of all tasks."""
        planners = self._serving_of(partition).planners
        names = [task_name] if task_name else list(planners)
        waiting = [each for name in names if name in planners for each in planners[name].waiting_claims()]
        alike: dict[tuple[str, ClaimSpec, NotBefore | None], list[ClaimRequest]] = {}
        for request in (*self.versions.claims(partition), *self._awaiting_capacity(partition)):
            if task_name in {"", request.task_name}:
                alike.setdefault((request.task_name, request.spec, request.not_before), []).append(request)
        return [*waiting, *((requests[0], len(requests)) for requests in alike.values())]

    def awaited_names(self) -> KeysView[str]:
        """Return the names of partitions that are not there and are waited for."""
        return self._arrivals.keys()

    def awaiting(self, partition_id: str) -> list[ClaimRequest | None]:
        """Return the calls that wait for a partition which is not there, in order: claims, and look-ups as None."""
        return list(self._arrivals.get(partition_id, {}).values())

    def waiting_count(self, partition: Partition, task_name: str) -> int:
        """Return the number of calls that wait for a task."""
        planner = self.known_planner(partition, task_name)
        count = 0 if planner is None else planner.waiting_count
        others = (*self.versions.claims(partition), *self._awaiting_capacity(partition))
        return count + sum(request.task_name == task_name for request in others)

    def _awaiting_capacity(self, partition: Partition) -> list[ClaimRequest]:
        """Return the claims of a partition that wait for capacity in another one."""
        return [request for name, request in self.capacity_waits.values() if name == partition.partition_id]

    async def claim(
        self,
        partition_id: str,
        incarnation: bytes,
        request: ClaimRequest,
        max_wait_seconds: float,
        while_waiting: WhileWaiting = nullcontext,
    ) -> Claimed:
        """Return a claim, waiting for the partition and for its samples up to `max_wait_seconds` together.

        Args:
            partition_id: the partition.
            incarnation: that of the partition; empty: any.
            request: the claim.
            max_wait_seconds: after them it is answered with `NotYet`.
            while_waiting: held while the call waits. If it cannot be entered, the call fails and nothing has changed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_seconds
        if incarnation and partition_id not in self._partitions:
            check_name("partition_id", partition_id)
            check_passed_on("incarnation", incarnation)
            raise StaleIncarnationError(
                f"partition {partition_id!r} of incarnation {incarnation.hex()} was cleared; drop what you hold of it",
                metadata={"partition_id": partition_id, "got": incarnation.hex()},
            )
        partition = await self.arrival(partition_id, deadline, request, while_waiting)
        if partition is None:
            return Claimed(None, NotYet())
        partition.check_incarnation(incarnation)
        name, not_before = request.task_name, request.not_before
        if name not in partition.tasks:
            check_epoch(name, 0, request.epoch)
        if not_before is not None and not self.planner(partition, name).has_planned(request):
            await self.versions.until(
                not_before.policy,
                not_before.version,
                deadline,
                while_waiting,
                claim=(partition, request),
                enders=self.enders(partition),
            )
            if not self.versions.is_published(not_before.policy, not_before.version):
                return Claimed(partition, NotYet())
        try:
            planner = self.planner(partition, name)
            epoch = planner.task.epoch
            answer = await planner.claim(request, max(0.0, deadline - loop.time()), while_waiting)
        except TqError:
            self._forget_unused(partition, name)
            raise
        # Where the epoch has ended since, its batch is not followed by those of the next one.
        is_followed = request.batch_count > 1 and isinstance(answer, RankPlan) and planner.task.epoch == epoch
        if not is_followed:
            return Claimed(partition, answer)
        may_plan = not_before is None or self.versions.is_published(not_before.policy, not_before.version)
        return Claimed(partition, answer, planner.following(request, may_plan=may_plan))

    async def arrival(
        self,
        partition_id: str,
        deadline: float,
        claim: ClaimRequest | None = None,
        while_waiting: WhileWaiting = nullcontext,
    ) -> Partition | None:
        """Return a partition once it exists, None if it does not by a time of the event loop.

        Raises:
            UnavailableError: the server is shutting down.
        """
        loop = asyncio.get_running_loop()
        while (partition := self._partitions.get(partition_id)) is None:
            check_name("partition_id", partition_id)  # lest one that can never appear is waited for
            self.check_not_draining()
            with while_waiting():
                arrival: asyncio.Future[bool] = loop.create_future()
                waiting = self._arrivals.setdefault(partition_id, {})
                waiting[arrival] = claim
                try:
                    with Waiting():
                        await asyncio.wait((arrival,), timeout=deadline - loop.time())
                    if not arrival.done() or not arrival.result():
                        return None
                finally:
                    waiting.pop(arrival, None)
                    if not waiting and self._arrivals.get(partition_id) is waiting:
                        del self._arrivals[partition_id]
        self.check_not_draining()
        return partition

    def enders(self, partition: Partition) -> Enders:
        """Return what is called with an error once a partition is cleared, or the server shuts down."""
        return self._serving_of(partition).enders

    def drain(self) -> None:
        """End all waiting calls, and those to come, so that their clients turn to the next server."""
        self._is_draining = True
        for serving in self._serving.values():
            serving.end(_draining_error)
        self.versions.end(_draining_error)
        for arrivals in self._arrivals.values():
            for arrival in arrivals:
                if not arrival.done():
                    arrival.set_exception(_draining_error())

    def check_not_draining(self) -> None:
        """Refuse a call that would wait, while the server ends."""
        if self._is_draining:
            raise _draining_error()


async def _free(partition: Partition) -> None:
    """Free what a cleared partition has, some at a time: to free millions of objects takes the loop a second."""
    for _ in partition.free():
        await asyncio.sleep(0)


async def _wake_all(arrivals: Iterable[asyncio.Future[bool]]) -> None:
    pace = LoopYielder()
    for arrival in tuple(arrivals):
        if not arrival.done():
            arrival.set_result(True)
            await pace.step()


def _cleared_error(partition_id: str) -> PartitionClearedError:
    return PartitionClearedError(
        f"partition {partition_id!r} was cleared while the call waited; ask again to wait for its next incarnation",
        metadata={"partition_id": partition_id},
    )


def _replacement_error() -> UnavailableError:
    return UnavailableError("a restored checkpoint is taking the place of all partitions; try again")


def _draining_error() -> UnavailableError:
    return UnavailableError("the server is shutting down; the call may be sent again to its successor")
