"""The catalog of all partitions, with their limits, the objects that serve them, and their waiting calls.

`Limits` are checked when a request arrives but not when a change is replayed. Data that was accepted under higher
limits is therefore kept. `LeaseTimer` tracks the lease deadlines of one partition.
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
from tq_service.machine.evictions import UnitsEvicted
from tq_service.machine.group_cells import GroupsWritten
from tq_service.machine.policies import VersionPublished, check_pace
from tq_service.machine.samples import (
    CheckedWrite,
    PartitionCleared,
    PartitionCreated,
    SamplesExpired,
    SamplesWritten,
    SampleWrite,
    Written,
    check_write,
)
from tq_service.machine.state_machine import Change, IdempotencyCache, RequestAnswered, State, StateMachine, Step
from tq_service.planning.eviction import lowest_units
from tq_service.schema import Admission, EndCounts, check_name, check_passed_on, check_unique
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
_MOST_TRAINED: Final = 64  # maximum number of tasks listed in one call
# Limits on the number of names in a partition, by argument name. Each entry contains the limit's name, the plural noun
# for messages, and a remedy.
_NAMED = {
    "fields": ("max_fields", "fields", "put data that differs between samples as an object field"),
    "custom_meta": ("max_meta_columns", "custom_meta columns", "use one column for values of one kind"),
    "task_name": ("max_tasks", "tasks", "name tasks after their purpose, not after a process or step"),
    "tasks": ("max_tasks", "tasks", "name tasks after their purpose, not after a process or step"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one controller. Each limit is named after the setting that configures it.

    Attributes:
        max_partitions: maximum number of partitions.
        max_policies: maximum number of policies.
        max_samples: maximum number of samples in all partitions.
        max_fields: maximum number of fields per partition.
        max_tasks: maximum number of tasks per partition.
        max_meta_columns: maximum number of custom_meta columns per partition.
        max_sample_meta_bytes: maximum size in bytes of the custom_meta that one write contains for a sample. The size
            of a string or JSON value is the size of its UTF-8 encoding.
        max_name_length: maximum number of characters in a key or in the name of a group, rollout, field, task or
            custom_meta column.
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
        """Reject a new partition that exceeds `max_partitions` or declares too many fields or tasks."""
        self.check_count("max_partitions", "partitions", partition_count + 1, "clear partitions that are done")
        self._check_new("fields", partition_id, (), [spec.name for spec in settings.fields])
        self._check_new("tasks", partition_id, (), settings.tasks)

    def check_write(self, partition: Partition, write: SampleWrite) -> None:
        """Reject a write with too many names or names that are too long. Its partition need not exist yet."""
        self._check_longest("keys", write.keys or ())
        self._check_longest("groups", write.groups or ())
        self._check_longest("rollouts", write.rollouts or ())
        fields = [column.spec.name for column in write.columns]
        self._check_new("fields", partition.partition_id, partition.cells.fields, fields)
        if write.meta:
            self.check_meta(partition, write.meta)

    def check_groups(self, names: Iterable[str]) -> None:
        """Reject group names that are too long."""
        self._check_longest("groups", names)

    def check_meta(self, partition: Partition, columns: Sequence[MetaColumn]) -> None:
        """Reject custom_meta with too many columns or with too many bytes for a single sample."""
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
                f"custom_meta of sample {int(sizes.argmax())} in this write has {largest} bytes; expected at most "
                f"{self.max_sample_meta_bytes} (max_sample_meta_bytes). Put large values into an object field.",
                field="custom_meta",
                metadata=self._metadata("max_sample_meta_bytes", largest),
            )

    def check_task(self, partition: Partition, task_name: str) -> None:
        """Reject a new task if its name is too long or its partition already has `max_tasks` tasks."""
        self._check_new("task_name", partition.partition_id, partition.tasks, (task_name,))

    def _check_new(self, what: str, partition_id: str, known: Collection[str], names: Iterable[str]) -> None:
        """Reject new names if any of them is too long, or if the total number of names would exceed the limit."""
        if new := [name for name in names if name not in known]:
            self._check_longest("name" if what == "fields" else what, new)
            limit_name, plural, remedy = _NAMED[what]
            self.check_count(limit_name, f"{plural} in partition {partition_id!r}", len(known) + len(new), remedy)

    def _check_longest(self, what: str, names: Iterable[str]) -> None:
        longest = max(map(len, names), default=0)
        if longest > self.max_name_length:
            raise InvalidArgumentError(
                f"{'a field' if what == 'name' else what} has a name of {longest} characters; expected at most "
                f"{self.max_name_length} (max_name_length). Use shorter names.",
                field=what,
                metadata=self._metadata("max_name_length", longest),
            )

    def check_count(self, limit_name: str, what: str, got: int, remedy: str) -> None:
        """Raise LimitExceededError if a count exceeds the named limit."""
        limit = getattr(self, limit_name)
        if got > limit:
            raise LimitExceededError(
                f"there would be {got} {what}; expected at most {limit} ({limit_name}). Remedy: {remedy}, or raise "
                f"{limit_name}.",
                metadata=self._metadata(limit_name, got),
            )

    def _metadata(self, limit_name: str, got: int) -> dict[str, str]:
        return {"limit_name": limit_name, "got": str(got), "limit": str(getattr(self, limit_name))}


def _utf8_size(text: str) -> int:
    return len(text.encode())


class LeaseTimer:
    """Expires the leases of one partition at their deadlines, on the running event loop.

    Deadlines are not persisted, so a recovered or restored lease restarts with its full duration. If a lease ends early
    or is extended, its old entry remains in the heap. Old entries are dropped when they are due, or all at once when
    they outnumber the leases.
    """

    def __init__(self, tasks: Mapping[str, TaskLedger], expire: Callable[[str, bytes], object]) -> None:
        """Create a timer that has no leases yet.

        Args:
            tasks: task ledgers of the partition, by task name.
            expire: function called when a lease expires, with the task name and the claim's request_id.
        """
        self._tasks = tasks
        self._expire = expire
        self._deadlines: list[tuple[float, str, bytes]] = []  # a heap of tuples: deadline, task name, request_id
        self._most_deadlines = _LEAST_STALE_DEADLINES
        self._timer: asyncio.Handle | None = None

    def start(self, task_name: str, claim: Claim) -> None:
        """Start a claim's lease with its full duration."""
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
        if self._deadlines[0][0] == claim.deadline:  # otherwise, an earlier timer is set and then sets the next one
            self._set_timer()

    def stop(self) -> None:
        """Stop the timer so that no more leases expire."""
        self._deadlines.clear()
        self._set_timer()

    def _is_leased(self, deadline: float, task_name: str, request_id: bytes) -> bool:
        """Whether an entry is current, meaning that its claim still has leased rows and an unchanged deadline."""
        claim = self._tasks[task_name].claims.get(request_id)
        return claim is not None and claim.leased_count > 0 and claim.deadline == deadline

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._deadlines:
            self._timer = asyncio.get_running_loop().call_at(self._deadlines[0][0], self._ring)

    def _ring(self) -> None:
        """Expire a limited number of due leases so that other work can run even if thousands of leases are due."""
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
    """The answer to a claim, with the answers for the later batches of its range in `more`.

    `partition` is None if the partition does not exist.
    """

    partition: Partition | None
    answer: Answer
    more: Sequence[RankPlan | EndCounts] = ()


class _Serving:
    """The objects that serve one partition, created on first use and never persisted."""

    def __init__(self, partition: Partition, expire: Callable[[str, bytes], object]) -> None:
        self._partition = partition
        self.planners: dict[str, Planner] = {}
        self.admission_queue = AdmissionQueue(partition, self._deadlock) if partition.settings.is_bounded else None
        self.lease_timer = LeaseTimer(partition.tasks, expire)
        self.enders: Enders = set()  # functions that end look-ups and claims that wait for a version

    def _deadlock(self, task_name: str, asking: ClaimRequest | None) -> str:
        """Return why a task cannot consume samples until more are inserted, or "" if it can already do so.

        If `task_name` is empty, check all tasks.
        """
        planners = [self.planners[task_name]] if task_name in self.planners else []
        if not task_name:
            count = self._partition.table.present_count
            planners = [each for each in self.planners.values() if each.task.backlog == count]
        return next(filter(None, (starvation(self._partition, planner, asking) for planner in planners)), "")

    def end(self, error: Callable[[], TqError]) -> None:
        """Fail all waiting and future calls with the error returned by `error`, and stop expiring leases."""
        for planner in self.planners.values():
            planner.end(error)
        for end in self.enders:
            end(error)
        if self.admission_queue is not None:
            self.admission_queue.end(error)
        self.lease_timer.stop()


class Catalog:
    """A controller's partitions and the claims waiting on them. All methods must run on the controller's event loop.

    Attributes:
        machine: state machine that applies all changes.
        answers: recorded answers to mutating requests, which allow retries to receive the same answer.
        policies: policies and their published versions, by policy name.
        versions: calls waiting for a policy version to be published.
        history: record of when each part of the state last changed.
        capacity_waits: claims waiting for capacity in another partition, by request_id. Each entry also contains the
            name of the partition from which the claim takes samples.
        on_freed: function called with cells that no longer belong to any sample, after the change that freed them has
            been appended to the log.
        on_batch: function called with the sampler name and the batch statistics for each batch recorded for ranks.
        on_planned: function called for each planned batch, with the partition, the task name and the claim.
            `on_planned` is called in the event-loop step that records the plan, before the plan's rows can change.
        on_partition: function called with a partition and "created", "restored" or "removed".
    """

    def __init__(
        self, runner: RunsPlans, limits: Limits | None = None, answers: IdempotencyCache | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.machine = StateMachine(State(answers))
        self.machine.listener = self._follow
        self.on_freed: Callable[[Sequence[Freed]], None] = lambda freed: None
        self.on_batch = Listeners()
        self.on_planned = Listeners()
        self.on_partition = Listeners()
        self._state = self.machine.state
        self._partitions = self._state.partitions
        self.policies: Policies = self._state.policies
        self.versions = VersionWaits(self._state.policies)
        self.history = ChangeHistory(self._state)
        self.answers = self._state.answers
        self._runner = runner
        self._serving: dict[Partition, _Serving] = {}  # existing partitions only
        self._most_samples = math.inf  # upper bound on the sample count
        # Calls that wait for missing partitions, by partition name, in order of arrival. The value is a claim's
        # request, or None for a look-up.
        self._arrivals: dict[str, dict[asyncio.Future[bool], ClaimRequest | None]] = {}
        self.capacity_waits: dict[bytes, tuple[str, ClaimRequest]] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._retracted: list[tuple[Partition, str, bytes]] = []  # claims to retract when changes are accepted again
        self._serving_since = math.inf  # infinite during recovery, so that samples do not expire
        self._is_draining = False
        self._closed_prefix: str | None = None

    # Changes

    def commit(self, change: Change) -> Any:
        """Apply a change; see `StateMachine.commit`."""
        return self.machine.commit(change)

    def run_once(self, request_id: bytes, make: Callable[[], Made], kind: type[object] = object) -> Made:
        """Return the recorded answer to a request. If there is none, apply the request's changes and record the answer.

        The changes and the answer form one group.

        Raises:
            InvalidArgumentError: the request_id is not 16 bytes long, or was used by a request of a different kind.
        """
        recorded: Made | None = self.recorded(request_id, kind)
        if recorded is not None:
            return recorded
        with self.machine.group():
            answer = make()
            self.commit(RequestAnswered(request_id=request_id, packed=self.answers.pack(answer)))
        return answer

    def recorded(self, request_id: bytes, kind: type[object] = object) -> Any | None:
        """Return the recorded answer to a request, or None if there is none; see `run_once`."""
        return self.answers.recorded(request_id, kind, self.machine.now_seconds())

    def _follow(self, step: Step) -> None:
        """Notify all listeners of the changes made in a step."""
        for partition in step.created:
            self._appear(partition)
            self.on_partition(partition, "created")
        for partition in step.cleared:
            self._disappear(partition)
        if self.on_planned:
            for planned in step.batches:
                self.on_planned(*planned)
        for partition, task_name, claim in step.leases:
            self._start_lease(partition, task_name, claim)
        for policy in step.policies:
            self.versions.wake(policy)
            for partition, serving in self._serving.items():
                if any(planner.compares_with(policy) for planner in serving.planners.values()):
                    step.note_change(partition)  # conditions on the version may now select different samples
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
        """Return a list of all partitions."""
        return list(self._partitions.values())

    def sample_count(self) -> int:
        """Return the number of samples in all partitions."""
        return sum(partition.table.present_count for partition in self._partitions.values())

    def snapshot_cells(self) -> list[CellsSnapshot]:
        """Return a snapshot of the cells of all samples. Another thread can read it with `live_cells`."""
        return [partition.cells.snapshot() for partition in self._partitions.values()]

    def get(self, partition_id: str, incarnation: bytes = b"") -> Partition:
        """Return an existing partition with the given incarnation. An empty incarnation matches any."""
        return self._state.partition(partition_id, incarnation)

    def find(self, partition_id: str, incarnation: bytes = b"", *, missing_ok: bool) -> Partition | None:
        """Behave like `get`, but return None if `missing_ok` is set and this incarnation does not exist."""
        partition = self._partitions.get(partition_id)
        if missing_ok and (partition is None or (incarnation and incarnation != partition.incarnation)):
            check_name("partition_id", partition_id)
            return None
        return self.get(partition_id, incarnation)

    def create(self, partition_id: str, settings: PartitionSettings) -> Partition:
        """Create a partition with the given settings, or return the existing partition if its settings are the same."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            created: Partition = self.machine.commit(*self._creation(partition_id, settings))
            return created
        if partition.settings != settings:
            difference = partition.settings.describe_difference(settings)
            raise AlreadyExistsError(
                f"partition {partition_id!r} already exists with different settings: {difference}. Create a partition "
                f"before putting its first samples, with the same settings in all clients.",
                metadata={"resource_type": "partition", "resource_name": partition_id},
            )
        return partition

    def _creation(
        self, partition_id: str, settings: PartitionSettings, made: Partition | None = None
    ) -> tuple[Change, Partition]:
        check_name("partition_id", partition_id)
        if self._closed_prefix is not None and partition_id.startswith(self._closed_prefix):
            raise UnavailableError("a checkpoint is being restored. Create new partitions once the restore is complete")
        self.limits.check_create(partition_id, settings, len(self._partitions))
        incarnation = os.urandom(16) if made is None else made.incarnation
        creation = PartitionCreated(partition_id=partition_id, incarnation=incarnation, settings=settings)
        return creation, made or creation.prepare(self._state)

    @contextlib.asynccontextmanager
    async def capacity_for(
        self, partition_id: str, incarnation: bytes, write: SampleWrite
    ) -> AsyncIterator[CheckedWrite | None]:
        """Reserve capacity for a write's new rows in short steps. The caller writes inside the `with` block.

        The write is checked first, so a rejected write uses no memory. The context manager yields the checked write,
        which the caller passes to `write`. When the block ends, unused capacity is released.
        """
        checked: CheckedWrite | None = None
        while True:
            checked = self._check_write(partition_id, incarnation, write, checked)[-1][1]
            partition, there = checked.partition, self._partitions.get(partition_id)
            try:
                columns = partition.cells.new_columns(checked.specs)
                for _ in partition.table.reserve_capacity(checked.new_count, columns):
                    await asyncio.sleep(0)
                    if self._partitions.get(partition_id) is not there:  # cleared, or created by another call
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
        """Write samples. The first accepted write creates the partition.

        If an admission drops samples beyond its limit, the drop is recorded as a separate change in the caller's group.

        Args:
            partition_id: name of the partition.
            incarnation: expected incarnation of the partition. An empty value matches any incarnation.
            write: samples to write.
            checked: result of `capacity_for`, or None if the write has not been checked.
        """
        written: Written = self.machine.commit_all(self._check_write(partition_id, incarnation, write, checked))
        for admission in written.partition.settings.admissions:
            if admission.overflow == "drop_lowest":
                self._drop_overflow(written, admission)
        return written

    def write_groups(self, incarnation: bytes, change: GroupsWritten) -> Written:
        """Write the values shared by all samples in a group, for one or more groups."""
        self.get(change.partition_id, incarnation)
        self.limits.check_groups(change.names)
        written: Written = self.machine.commit(change)
        return written

    def _drop_overflow(self, written: Written, admission: Admission) -> None:
        """In the write's group of changes, clear the lowest-priority units that exceed an admission's limit."""
        partition, task = written.partition, written.partition.tasks[admission.task_name]
        excess = (task.outstanding_count or 0) - admission.most
        if excess > 0:
            evicted = lowest_units(partition, task, admission, excess, written.global_indexes)
            if evicted is not None:
                self.commit(
                    UnitsEvicted(
                        partition_id=partition.partition_id, task_name=task.name, evicted=evicted, action="clear"
                    )
                )

    def _check_write(
        self, partition_id: str, incarnation: bytes, write: SampleWrite, checked: CheckedWrite | None
    ) -> list[tuple[Change, Any]]:
        """Check a write, unless `checked`, the result of an earlier check, is still valid.

        Return the changes to commit: the write, preceded by the creation of its partition if necessary.
        """
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
        """Reject new samples if the total would exceed `max_samples`.

        Counting the samples of thousands of partitions is slow. The catalog therefore recounts samples only if the
        samples added since the last count could exceed the limit.
        """
        if new_count and self._most_samples + new_count > self.limits.max_samples:
            self._most_samples = self.sample_count()
            count, remedy = self._most_samples + new_count, "clear samples that are done"
            self.limits.check_count("max_samples", "samples in all partitions", count, remedy)
        self._most_samples += new_count

    def knows_keys(self, partition_id: str, incarnation: bytes, keys: Sequence[str]) -> bool:
        """Return whether the partition exists and each key belongs, or once belonged, to one of its samples."""
        partition = self.find(partition_id, incarnation, missing_ok=True)
        return partition is not None and bool((partition.key_index.find(keys) >= 0).all())

    def remove(self, partition_id: str, incarnation: bytes, *, missing_ok: bool = False) -> int:
        """Remove a partition and return the number of samples that it contained."""
        if self.find(partition_id, incarnation, missing_ok=missing_ok) is None:
            return 0
        count: int = self.commit(PartitionCleared(partition_id=partition_id))
        return count

    def admission_queue(self, partition_id: str) -> AdmissionQueue | None:
        """Return a partition's queue of writes that add samples, or None if the partition is missing or unbounded."""
        partition = self._partitions.get(partition_id)
        return None if partition is None else self._serving_of(partition).admission_queue

    def waiting_put_count(self, partition_id: str) -> int:
        """Return the number of writes waiting for capacity to add samples to a partition."""
        queue = self.admission_queue(partition_id)
        return 0 if queue is None else queue.waiting_count

    # Policies

    def policy(self, name: str) -> Policy:
        """Return the policy with this name. Raise an error if none of its versions has been published."""
        return self._state.policy(name)

    def publish(self, published: VersionPublished, trained: Sequence[tuple[str, str, int]]) -> None:
        """Publish a version and record the progress of its trainers, given as (partition, task, last trained batch).

        Raises:
            TqError: a change was rejected, so no changes were made.
        """
        if len(trained) > _MOST_TRAINED:
            raise InvalidArgumentError(
                f"trained lists {len(trained)} tasks; expected at most {_MOST_TRAINED}. Call advance for the rest.",
                field="trained",
            )
        # All changes are prepared against the initial state, so a task must not appear twice. Repeating the call has no
        # effect.
        check_unique("trained", [f"{task_name} of {partition_id}" for partition_id, task_name, _ in trained])
        if published.policy not in self.policies:
            self.limits.check_count("max_policies", "policies", len(self.policies) + 1, "remove policies that are done")
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
        """Return a snapshot of all partitions that another thread can read."""
        return [partition.snapshot() for partition in self._partitions.values()]

    @contextlib.contextmanager
    def closed(self, prefix: str) -> Iterator[None]:
        """Reject new partitions with this name prefix during the `with` block, but still accept adopted partitions.

        Raises:
            PreconditionError: partitions with this prefix already exist.
        """
        count = sum(name.startswith(prefix) for name in self._partitions)
        if count or self._closed_prefix is not None:
            which = f" whose names begin with {prefix!r}" if prefix else ""
            raise PreconditionError(
                f"the service has {count} partitions{which}; expected 0 before a restore. Clear these partitions, "
                f"restore into a different service, or set replace."
            )
        self._closed_prefix = prefix
        try:
            yield
        finally:
            self._closed_prefix = None

    def adopt(self, restored: Sequence[Partition], policies: Iterable[Policy] = ()) -> None:
        """Add restored partitions and policies in a single step, without notifying listeners of individual changes."""
        self._most_samples = math.inf
        for policy in policies:
            self._state.policies[policy.name] = policy
            self.versions.wake(policy.name)
        for partition in restored:
            self._state.add_partition(partition)
            self._appear(partition)
            self.on_partition(partition, "restored")

    def prepare_replacement(self, restored: Sequence[Partition]) -> None:
        """Reject changes until `end_replacement` is called, because restored partitions will replace existing ones.

        If a restored and an existing partition have the same incarnation id, the restored partition receives a new id.
        Otherwise, older metadata could refer to the wrong samples, because global indexes assigned since the checkpoint
        are reused. Existing partitions with a different name are also checked, because they may come from the same
        checkpoint.
        """
        self.machine.refusal = _replacement_error
        known = {partition.incarnation for partition in self._partitions.values()}
        for partition in restored:
            if partition.incarnation in known:
                partition.incarnation = os.urandom(16)

    def end_replacement(self) -> None:
        """Resume accepting changes, and apply those that were postponed.

        Do nothing if no replacement is in progress.
        """
        self.machine.refusal = None
        retracted, self._retracted = self._retracted, []
        for each in retracted:
            self.retract(*each)

    def replace(self, restored: Sequence[Partition], prefix: str, policies: Iterable[Policy] = ()) -> None:
        """In a single step, replace all partitions and policies whose names begin with `prefix`.

        Calls waiting for a replaced partition fail with an error. Calls that wait for a version of a replaced policy
        continue to wait. The replacement is not logged, because the log continues from a snapshot that contains the new
        partitions.
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
        """Return a task's planner, creating the planner on first use."""
        planners = self._serving_of(partition).planners
        if task_name not in planners:
            task = self.task(partition, task_name)
            commit = partial(self._commit_in, partition)
            planners[task_name] = Planner(
                partition, task, self._runner, commit=commit, group=self.machine.group, on_batch=self.on_batch
            )
        return planners[task_name]

    def task(self, partition: Partition, task_name: str) -> TaskLedger:
        """Return a task's ledger, creating the ledger on first use."""
        task = partition.tasks.get(task_name)
        if task is None:
            self.limits.check_task(partition, task_name)
            task = self.commit(TaskSeen(partition_id=partition.partition_id, task_name=task_name))
        return task

    def _forget_unused(self, partition: Partition, task_name: str) -> None:
        """Forget a task whose call was rejected, unless the task has records or other waiting calls."""
        planner = self.known_planner(partition, task_name)
        is_over = planner is None or self._is_draining or self.machine.refusal is not None
        if is_over or planner is None or not planner.is_idle or not partition.tasks[task_name].is_unused:
            return
        self.commit(TaskForgotten(partition_id=partition.partition_id, task_name=task_name))
        if task_name not in partition.tasks:
            planner.close()
            del self._serving_of(partition).planners[task_name]

    def _commit_in(self, partition: Partition, change: Change, prepared: Any = None) -> Any:
        """Commit a change to a partition, unless the partition has been cleared.

        A new partition with the same name is left unchanged.
        """
        if self._partitions.get(partition.partition_id) is not partition:
            return None
        return self.machine.commit(change, prepared)

    def retract(self, partition: Partition, task_name: str, request_id: bytes) -> None:
        """Release a queue claim whose answer did not reach the client; see `Planner.retract`."""
        if self.machine.refusal is not None:
            self._retracted.append((partition, task_name, request_id))
        elif (planner := self.known_planner(partition, task_name)) is not None:
            planner.retract(request_id)

    def known_planner(self, partition: Partition, task_name: str) -> Planner | None:
        """Return the planner of a task, or None if this process has not received any calls for the task."""
        serving = self._serving.get(partition)
        return None if serving is None else serving.planners.get(task_name)

    # Leases

    def start_leases(self) -> None:
        """Start the timers of recovered or restored leases and samples. Each timer runs for its full duration."""
        self._serving_since = self.machine.now_seconds()
        for partition in self._partitions.values():
            for task in partition.tasks.values():
                for claim in task.leases.values():
                    self._start_lease(partition, task.name, claim)

    def _start_lease(self, partition: Partition, task_name: str, claim: Claim) -> None:
        if claim.lease is None or self._is_draining or self._partitions.get(partition.partition_id) is not partition:
            return
        self._serving_of(partition).lease_timer.start(task_name, claim)

    def _expire(self, partition: Partition, task_name: str, request_id: bytes) -> None:
        if self.machine.refusal is not None:  # changes are currently rejected, so restart the lease
            self._start_lease(partition, task_name, partition.tasks[task_name].claims[request_id])
            return
        self.commit(LeaseExpired(partition_id=partition.partition_id, task_name=task_name, request_id=request_id))

    def expire_samples(self) -> Iterator[tuple[str, int]]:
        """Release samples that have reached their partition's maximum age, one partition at a time.

        Call this method periodically. This method yields the name of each partition together with the number of samples
        released from it.
        """
        for partition in self.partitions():
            release, now = partition.settings.release, self.machine.now_seconds()
            if release is None or release.ttl_seconds is None or self.machine.refusal is not None:
                continue
            before = now - release.ttl_seconds
            if before < self._serving_since:
                continue
            count = self._commit_in(partition, SamplesExpired(partition_id=partition.partition_id, before=before))
            if count:
                yield partition.partition_id, count

    # Waiting

    def waiting_claims(self, partition: Partition, task_name: str) -> list[tuple[ClaimRequest, int]]:
        """Return one waiting claim from each set of equal claims, with the size of the set.

        If `task_name` is empty, return the claims of all tasks.
        """
        planners = self._serving_of(partition).planners
        names = [task_name] if task_name else list(planners)
        waiting = [each for name in names if name in planners for each in planners[name].waiting_claims()]
        alike: dict[tuple[str, ClaimSpec, NotBefore | None], list[ClaimRequest]] = {}
        for request in (*self.versions.claims(partition), *self._awaiting_capacity(partition)):
            if task_name in {"", request.task_name}:
                alike.setdefault((request.task_name, request.spec, request.not_before), []).append(request)
        return [*waiting, *((requests[0], len(requests)) for requests in alike.values())]

    def awaited_names(self) -> KeysView[str]:
        """Return the names of missing partitions for which calls are waiting."""
        return self._arrivals.keys()

    def awaiting(self, partition_id: str) -> list[ClaimRequest | None]:
        """Return the calls waiting for a missing partition, oldest first. Each look-up appears as None."""
        return list(self._arrivals.get(partition_id, {}).values())

    def waiting_count(self, partition: Partition, task_name: str) -> int:
        """Return the number of calls waiting for a task's samples."""
        planner = self.known_planner(partition, task_name)
        count = 0 if planner is None else planner.waiting_count
        others = (*self.versions.claims(partition), *self._awaiting_capacity(partition))
        return count + sum(request.task_name == task_name for request in others)

    def _awaiting_capacity(self, partition: Partition) -> list[ClaimRequest]:
        """Return the claims on this partition that are waiting for capacity in another partition."""
        return [request for name, request in self.capacity_waits.values() if name == partition.partition_id]

    async def claim(
        self,
        partition_id: str,
        incarnation: bytes,
        request: ClaimRequest,
        max_wait_seconds: float,
        while_waiting: WhileWaiting = nullcontext,
    ) -> Claimed:
        """Claim samples, waiting up to `max_wait_seconds` in total for the partition and its samples.

        Args:
            partition_id: name of the partition.
            incarnation: expected incarnation of the partition. An empty value matches any incarnation.
            request: claim to serve.
            max_wait_seconds: maximum wait, in seconds, after which the call returns `NotYet`.
            while_waiting: context manager that is active while the call waits. If the context manager cannot be
                entered, the call fails and changes nothing.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_seconds
        if incarnation and partition_id not in self._partitions:
            check_name("partition_id", partition_id)
            check_passed_on("incarnation", incarnation)
            raise StaleIncarnationError(
                f"incarnation {incarnation.hex()} of partition {partition_id!r} was cleared. Discard all metadata of "
                f"this incarnation.",
                metadata={"partition_id": partition_id, "got": incarnation.hex()},
            )
        partition = await self.arrival(partition_id, deadline, request, while_waiting)
        if partition is None:
            return Claimed(None, NotYet())
        partition.check_incarnation(incarnation)
        name, not_before = request.task_name, request.not_before
        if name in partition.settings.releasing_tasks and request.rank is None and request.lease is None:
            raise PreconditionError(
                f"task {name!r} of partition {partition_id!r} claims samples without a lease; expected a lease, "
                f"because the partition releases samples after this task has acknowledged them. Claim with a lease, "
                f"and acknowledge finished samples.",
                metadata={"task_name": name},
            )
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
        # If the epoch has ended while the call waited, do not return batches from the next epoch.
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
        """Wait until a partition exists and return it. Return None when a deadline in event-loop time has passed.

        Raises:
            UnavailableError: the server is shutting down.
        """
        loop = asyncio.get_running_loop()
        while (partition := self._partitions.get(partition_id)) is None:
            check_name("partition_id", partition_id)  # do not wait for a partition with an invalid name
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
        """Return the functions that end a partition's waiting calls when it is cleared or the server shuts down."""
        return self._serving_of(partition).enders

    def drain(self) -> None:
        """Fail all waiting and future calls with an error that makes clients retry with this server's successor."""
        self._is_draining = True
        for serving in self._serving.values():
            serving.end(_draining_error)
        self.versions.end(_draining_error)
        for arrivals in self._arrivals.values():
            for arrival in arrivals:
                if not arrival.done():
                    arrival.set_exception(_draining_error())

    def check_not_draining(self) -> None:
        """Raise UnavailableError if the server is shutting down, because no new call may wait during shutdown."""
        if self._is_draining:
            raise _draining_error()


async def _free(partition: Partition) -> None:
    """Free a cleared partition's memory in steps, because freeing millions of objects would block the event loop."""
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
        f"partition {partition_id!r} was cleared while the call waited. Repeat the call to wait for the next "
        f"incarnation.",
        metadata={"partition_id": partition_id},
    )


def _replacement_error() -> UnavailableError:
    return UnavailableError("a restored checkpoint is replacing partitions; retry the call")


def _draining_error() -> UnavailableError:
    return UnavailableError("the server is shutting down; retry the call on its successor")
