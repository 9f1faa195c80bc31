"""Changes to a task's consumption: claims, acknowledgements, releases, leases and epochs.

Each change has a method `check`, which validates the change against the task and its claims, and finds the affected
rows. The method `make` then updates the task's ledger and records the consequences.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tq_service.errors import InvalidArgumentError, LeaseExpiredError, PreconditionError
from tq_service.machine.rows import clear_rows, release_due, reopen, set_state
from tq_service.machine.state_machine import Change, State, Step
from tq_service.planning.grouping import Grouping, groups_in_runs
from tq_service.schema import EndCounts, check_range
from tq_service.state.ledger import Claim, RecordedPlan, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import MOST_RANKS, BatchSpec, Indexes, LeasedClaim, LeaseTerms
from tq_service.state.table import DROPPED, FAILED, HELD, LIVE, STATE_NAMES

_MOST_NAMED = 20


class TaskChange(Change):
    """Base class of changes to one task of a partition."""

    partition_id: str
    task_name: str

    def prepare(self, state: State) -> tuple[Partition, TaskLedger, Any] | None:
        """Return the partition, the task and the result of `check`, or None if there is nothing to change."""
        partition = state.partition(self.partition_id)
        task = partition.known_task(self.task_name)
        found = self.check(partition, task)
        return None if found is None else (partition, task, found)

    def check(self, partition: Partition, task: TaskLedger) -> Any | None:
        """Validate the change, and return the `found` argument for `make`, or None if there is nothing to change."""
        return True

    def apply(self, state: State, prepared: tuple[Partition, TaskLedger, Any], step: Step) -> Any:
        """Apply the change and record that the task has progressed."""
        partition, task, found = prepared
        step.tasks.append((partition, task.name))
        return self.make(partition, task, found, step)

    @abstractmethod
    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> Any:
        """Apply the change and return its result (see `Change.apply`)."""


class TaskSeen(Change):
    """A task made its first request."""

    partition_id: str
    task_name: str

    def prepare(self, state: State) -> Partition | None:
        """Return the partition, or None if it already has a ledger for the task.

        Raises:
            TaskNotFoundError: the partition declares its tasks, and this task is not one of them.
        """
        partition = state.partition(self.partition_id)
        partition.check_task(self.task_name)
        return None if self.task_name in partition.tasks else partition

    def apply(self, state: State, prepared: Partition, step: Step) -> TaskLedger:
        """Create the task's ledger."""
        step.tasks.append((prepared, self.task_name))
        return prepared.open_task(self.task_name)


class TaskForgotten(TaskChange):
    """A task without history was removed, because all its requests had been rejected."""

    def check(self, partition: Partition, task: TaskLedger) -> Any | None:
        """Return True if the task can be forgotten, or None if it has a history or was declared with the partition."""
        is_declared = self.task_name in partition.settings.known_tasks
        return None if is_declared or not task.is_unused else True

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> None:
        """Remove the task's ledger."""
        partition.forget_task(task.name)


# Claims


class SamplesClaimed(TaskChange):
    """Samples were claimed according to a plan, either by a queue worker or as the next batch for all ranks.

    Attributes:
        plan: samples planned for each rank or for the queue worker.
        batch_spec: arguments of the request for a batch or a named claim, or None for an unnamed claim.
        request_id: id of a queue worker's request, or empty for the batch of all ranks.
        lease: lease terms of a queue worker's claim. None means that delivered samples need no acknowledgement.
        claim_name: name with which a queue worker can request the claim again; empty for an unnamed claim.
    """

    plan: RecordedPlan
    batch_spec: BatchSpec | None = None
    request_id: bytes = b""
    lease: LeaseTerms | None = None
    claim_name: str = ""

    def check(self, partition: Partition, task: TaskLedger) -> Indexes:
        """Return the positions of all rows in the plan. Raise SampleNotFoundError if a row no longer exists."""
        return partition.positions_of(self.plan.named)

    def make(self, partition: Partition, task: TaskLedger, found: Indexes, step: Step) -> Claim:
        """Record in the ledger that the plan was delivered, and return the claim.

        Delivery consumes the samples in the plan or leases them.
        """
        step.consumed[partition] = None
        claim = task.deliver(
            self.plan,
            found,
            request_id=self.request_id,
            batch_spec=self.batch_spec,
            lease=self.lease,
            name=self.claim_name,
        )
        if self.lease is not None:
            step.leases.append((partition, task.name, claim))
        if not self.request_id:
            step.batches.append((partition, task.name, claim))
        return claim


class EndReached(TaskChange):
    """The ranks of a task, or a queue worker's named claim, reached the end of the data.

    For the rest of this epoch, the ranks, or calls with the claim's name, receive no more batches.

    Attributes:
        end: sample counts returned to calls that reach the end of the data.
        dp_size: number of ranks; None if a queue worker's named claim reached the end.
        claim_name: name of the queue worker's claim. Every later call with this claim name also reports the end of the
            data.
    """

    end: EndCounts
    dp_size: int | None = None
    claim_name: str = ""

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> None:
        """Record the end of the data in the ledger."""
        if self.dp_size is None:
            task.reach_named_end(self.claim_name, self.end)
        else:
            task.reach_end(self.dp_size, self.end)


# Queue claims


class ClaimReleased(TaskChange):
    """A queue worker's claim was released, which made its remaining samples claimable again.

    Samples that have already been acknowledged or released are ignored. Unknown claims are also ignored, because a
    client may release a claim whose response it never received. If the claim shares its lease, the slots of unfinished
    prompts are removed (see `SharedLease`).

    Attributes:
        global_indexes: leased samples to release. None releases all remaining samples.
        is_final: whether to reject later calls with this request_id. False if the response reached no client, because a
            client may then retry the request with this id.
    """

    request_id: bytes
    global_indexes: Indexes | None = None
    is_final: bool = True

    def check(self, partition: Partition, task: TaskLedger) -> tuple[Claim | None, Indexes] | None:
        """Return the claim (None if unknown) and the positions to release, or None if there is nothing to change.

        Raises:
            LeaseExpiredError: the lease on a listed sample has expired.
            InvalidArgumentError: the list contains only some samples of an indivisible group or of a claim without a
                lease.
        """
        rows, claim = self.global_indexes, task.claims.get(self.request_id)
        if rows is not None and task.ended.has_expired(self.request_id):
            _check_leased(partition, task, self.request_id, rows)
        if claim is None:
            return (None, np.zeros(0, np.int64)) if self.is_final else None
        positions = _left(partition, task, claim, rows)
        return None if rows is not None and claim.lease is not None and not positions.size else (claim, positions)

    def make(self, partition: Partition, task: TaskLedger, found: tuple[Claim | None, Indexes], step: Step) -> int:
        """Release the samples, and return how many of them are live and can therefore be claimed again immediately."""
        claim, positions = found
        if self.is_final:
            task.ended.add(self.request_id, step.at_seconds, is_expired=False)
        if claim is None:
            return 0
        shared = SharedLease.of(partition, task, claim)
        if shared is not None and claim is shared.prompts.claim:
            positions = shared.acknowledge_finished(positions, step)
            shared.remove_slots(partition.table.index[positions], step)
        rows = partition.table.index[positions]
        count = _release(Leased(partition, task, claim), positions, step)
        if shared is not None and claim is shared.slots.claim:
            shared.leave_to_slots(rows, step)
        return count


class ClaimAcked(TaskChange):
    """Leased samples were acknowledged, and are now consumed or claimable for their next use.

    Samples that are done, failed or cleared are ignored, because no other worker will process them.

    Attributes:
        global_indexes: acknowledged samples. None acknowledges all remaining samples of the claim.
    """

    request_id: bytes
    global_indexes: Indexes | None = None

    def check(self, partition: Partition, task: TaskLedger) -> tuple[Claim, Indexes] | None:
        """Return the claim and the positions of the listed samples that the claim still leases.

        Return None if the claim leases none of the listed samples.

        Raises:
            LeaseExpiredError: the lease on some of the samples has ended, so no samples are acknowledged.
            InvalidArgumentError: some samples were never in the claim, or only some samples of an indivisible group are
                listed.
            PreconditionError: the claim was made without a lease.
        """
        return _find_acked(partition, task, self.request_id, self.global_indexes)

    def make(self, partition: Partition, task: TaskLedger, found: tuple[Claim, Indexes], step: Step) -> int:
        """Acknowledge the samples, and return their number."""
        count = _ack(partition, task, *found, step)
        finish_prompts(partition, Acked(task, *found), step)
        return count


class ClaimExtended(TaskChange):
    """The lease on a claim's unacknowledged samples was extended and now ends `lease_seconds` after this change."""

    request_id: bytes
    lease_seconds: float

    def check(self, partition: Partition, task: TaskLedger) -> tuple[Claim, LeaseTerms]:
        """Return the claim and its new lease terms.

        Raises:
            LeaseExpiredError: the lease has expired, or the claim was released.
            PreconditionError: the claim was made without a lease, or has no leased samples.
        """
        claim = task.claims.get(self.request_id)
        if claim is None or task.ended.has_expired(self.request_id):
            raise _lease_over_error(task)
        lease = replace(_lease_of(task, claim), seconds=self.lease_seconds)
        if claim.leased_count == 0:
            raise PreconditionError(
                f"could not extend the lease, because this claim of task {task.name!r} has no leased samples. All of "
                "its samples were acknowledged, failed, cleared or released",
                metadata={"task_name": task.name},
            )
        return claim, lease

    def make(self, partition: Partition, task: TaskLedger, found: tuple[Claim, LeaseTerms], step: Step) -> int:
        """Set the lease duration, restart the lease, and return how many samples are leased."""
        claim, lease = found
        shared = SharedLease.of(partition, task, claim)
        for side in (Leased(partition, task, claim),) if shared is None else shared:
            if side.claim.lease is not None and side.claim.leased_count:
                side.claim.lease = replace(side.claim.lease, seconds=lease.seconds)
                step.leases.append((side.partition, task.name, side.claim))
        return claim.leased_count


class LeaseExpired(TaskChange):
    """A claim's lease expired, so its remaining samples became claimable again or were dead-lettered."""

    request_id: bytes

    def check(self, partition: Partition, task: TaskLedger) -> tuple[Claim, Indexes]:
        """Return the claim and the positions of its leased samples. Raise LookupError if no samples are leased."""
        claim = task.claims.get(self.request_id)
        if claim is None or claim.leased_count == 0:
            raise LookupError(f"request_id {self.request_id.hex()} of task {task.name!r} has no leased samples")
        return claim, task.left(claim)

    def make(self, partition: Partition, task: TaskLedger, found: tuple[Claim, Indexes], step: Step) -> None:
        """End the lease on the samples and, if a second claim shares it, on that claim's samples."""
        claim, positions = found
        if (shared := SharedLease.of(partition, task, claim)) is not None:
            shared.expire(step)
        else:
            _expire(Leased(partition, task, claim), positions, step)


class ConsumptionReset(TaskChange):
    """A task's consumption was reset, and the task's next epoch began.

    Attributes:
        keep_consumed: whether consumed samples remain consumed. Leased and dead-lettered samples always become
            claimable.
        epoch: epoch that the caller intends to end. None means the current epoch.
    """

    keep_consumed: bool
    epoch: int | None = None

    def check(self, partition: Partition, task: TaskLedger) -> Any:
        """Validate the reset, and return True.

        Raises:
            StaleEpochError: the task is in a different epoch.
            PreconditionError: the task has a staleness limit, and the samples would be too old for another epoch.
        """
        task.check_epoch(self.epoch)
        bounded = partition.settings.bounded_admission
        if bounded is not None and bounded.task_name == self.task_name and not self.keep_consumed:
            raise PreconditionError(
                f"task {self.task_name!r} of partition {self.partition_id!r} has max_staleness "
                f"{bounded.max_staleness}, so trained samples would be too old for another epoch. Set "
                f"keep_consumed, or restart the ranks (RestartRanks)",
                reason="STALENESS_BOUNDED",
                metadata={"partition_id": self.partition_id, "task_name": self.task_name},
            )
        return True

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> int:
        """Start the next epoch, and return its number."""
        for claim in list(task.claims.values()):  # the reset drops the claims, so end shared leases first
            if (shared := SharedLease.of(partition, task, claim)) is not None:
                shared.expire(step)
        reopened = task.reset(keep_consumed=self.keep_consumed, open_count=partition.open_count)
        if self.keep_consumed:
            reopen(partition, task, reopened, reopened, step)
            release_due(partition, partition.table.present_positions(), step)
        else:
            partition.on_reset(task.name)
        step.note_change(partition)
        return task.epoch


class TaskAdvanced(TaskChange):
    """A trainer reported its progress in a task.

    Attributes:
        trained: batch_index of the last trained batch, or None if not reported. All earlier batches count as trained.
        saved: batch_index of the last batch covered by a trainer checkpoint, or None if not reported. The checkpoint
            also covers all earlier batches, and all covered batches count as trained.
    """

    trained: int | None = None
    saved: int | None = None

    def check(self, partition: Partition, task: TaskLedger) -> tuple[int, int] | None:
        """Return `trained` and `saved`, with -1 for an unreported value. If neither has increased, return None.

        Raises:
            InvalidArgumentError: a reported batch has not been planned.
        """
        last = task.next_batch_index - 1
        for name, index in (("trained", self.trained), ("saved", self.saved)):
            if index is not None and not 0 <= index <= last:
                planned = f"expected 0 to {last}" if last >= 0 else "expected no value, because no batch is planned"
                raise InvalidArgumentError(
                    f"{name} is {index}; {planned} (batches of task {task.name!r} in partition "
                    f"{self.partition_id!r}). Pass the batch_index of the last completed batch.",
                    field=name,
                    metadata={"got": str(index), "expected": f"0 to {last}"},
                )
        trained, saved = (-1 if index is None else index for index in (self.trained, self.saved))
        return (trained, saved) if trained > task.trained or saved > task.saved else None

    def make(self, partition: Partition, task: TaskLedger, found: tuple[int, int], step: Step) -> None:
        """Record the progress, and release samples that are no longer needed."""
        before = task.saved if partition.settings.keeps_until_saved else task.trained
        task.advance(*found)
        step.consumed[partition] = None  # the reported progress may have freed capacity
        if task.name in partition.settings.releasing_tasks:
            release_due(partition, task.rows_of_batches(before, max(found)), step)


class RanksRestarted(TaskChange):
    """The ranks of a task began a new epoch with the batch after the last trained batch.

    Calls from the old ranks are rejected.

    Attributes:
        dp_size: new number of ranks.
        trained: batch_index of the last trained batch; -1 if no batch was trained.
        epoch: epoch that ends when the ranks restart. The epoch ensures that a repeated call does not restart the ranks
            a second time. The ranks have already restarted if this epoch has ended, the task has `dp_size` ranks, and
            no batch after `trained` has been trained. If None, the ranks always restart.
    """

    dp_size: int
    trained: int
    epoch: int | None = None

    def check(self, partition: Partition, task: TaskLedger) -> Any | None:
        """Return True if the ranks have not restarted yet, otherwise None.

        Raises:
            StaleEpochError: the task has not reached `epoch`.
            InvalidArgumentError: `dp_size` or `trained` is out of range.
            SamplesClearedError: samples of a batch that follows batch `trained` have been released.
        """
        check_range("dp_size", self.dp_size, 1, MOST_RANKS)
        if self.epoch is not None and self.epoch != task.epoch:
            if self.epoch > task.epoch:
                task.check_epoch(self.epoch)
            # Ranks train each batch together, so a trained batch in the new epoch proves that all ranks have restarted.
            if task.dp_size == self.dp_size and task.trained <= self.trained:
                return None
        last = task.next_batch_index - 1
        if not -1 <= self.trained <= last:
            raise InvalidArgumentError(
                f"trained is {self.trained}; expected -1 to {last}, the last planned batch of task {task.name!r} in "
                f"partition {self.partition_id!r}. Pass the batch_index of the last trained batch.",
                field="trained",
                metadata={"got": str(self.trained), "expected": f"-1 to {last}"},
            )
        task.check_not_released(self.trained + 1)
        return True

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> tuple[int, int]:
        """Restart the ranks, and return how many already trained batches and samples will be planned again."""
        before = task.trained
        repeated = task.claim[task.rows_of_batches(self.trained, before)] != DROPPED
        later = task.rows_of_batches(min(before, self.trained), task.next_batch_index)
        reopened = task.restart_ranks(self.dp_size, self.trained)
        reopen(partition, task, reopened, reopened, step)
        step.note_change(partition)
        release_due(partition, later, step)  # these rows are now trained or no longer in any batch
        return max(0, before - self.trained), int(np.count_nonzero(repeated))


class DeadLettersRequeued(TaskChange):
    """Dead-lettered samples of a task were requeued, so they can be claimed as if they had never been delivered.

    Attributes:
        global_indexes: samples to requeue. Samples that are not dead-lettered are ignored. None requeues all
            dead-lettered samples.
    """

    global_indexes: Indexes | None = None

    def check(self, partition: Partition, task: TaskLedger) -> Indexes | None:
        """Return the positions of the listed samples that are dead-lettered, or None if none are.

        Raises:
            PreconditionError: the ranks of the task have reached the end of the data, so samples are no longer
                delivered.
        """
        positions = task.dead_lettered()
        if self.global_indexes is not None:
            positions = positions[np.isin(partition.table.index[positions], self.global_indexes)]
        if positions.size and task.end is not None:
            raise PreconditionError(
                f"task {task.name!r} of partition {self.partition_id!r} has reached the end of its data, so its ranks "
                "request no more batches. To deliver dead-lettered samples again, reset consumption with "
                "keep_consumed",
                metadata={"task_name": task.name},
            )
        return positions if positions.size else None

    def make(self, partition: Partition, task: TaskLedger, found: Indexes, step: Step) -> int:
        """Make the samples claimable, and return their number."""
        task.requeue(found)
        reopened = np.concatenate([found, task.unskip()])  # the samples' skipped groups may be complete again
        reopen(partition, task, reopened, None, step)
        return found.size


class GroupsKept(TaskChange):
    """The setting that keeps a task's groups together was changed.

    Attributes:
        kept_groups: new value of `TaskFacts.kept_groups`.
    """

    kept_groups: int | None

    def check(self, partition: Partition, task: TaskLedger) -> Any | None:
        """Return True if the value has changed, otherwise None."""
        return None if task.kept_groups == self.kept_groups else True

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> None:
        """Skip the remaining members of groups that have lost a member, and stop skipping all other samples."""
        task.kept_groups = self.kept_groups
        reopen(partition, task, task.unskip(), None, step)


def _without_data(partition: Partition, claim: Claim, positions: Indexes) -> Indexes:
    """Return the claimed rows that are held slots without data. Fields shared by a group are ignored."""
    if claim.lease is None or claim.lease.on_lost is None:
        return positions[:0]
    is_empty = partition.state[positions] == HELD
    for name in partition.cells.fields.keys() - partition.cells.shared:
        is_empty &= ~partition.cells.produced([name], positions)
    empty: Indexes = positions[is_empty]
    return empty


# Consequences


def acknowledge(partition: Partition, acked: Acked, step: Step) -> None:
    """Acknowledge the samples that `check_acked` found."""
    _ack(partition, acked.task, acked.claim, acked.positions, step)


def finish_prompts(partition: Partition, acked: Acked, step: Step) -> None:
    """Acknowledge the finished prompts, that is, the prompts whose slots are all live."""
    shared = SharedLease.of(partition, acked.task, acked.claim)
    if shared is not None and acked.claim is shared.slots.claim:
        shared.acknowledge_finished(shared.prompts.task.left(shared.prompts.claim), step)


def _ack(partition: Partition, task: TaskLedger, claim: Claim, positions: Indexes, step: Step) -> int:
    """Acknowledge samples, and end the slots of any prompts among them. Return the number of given samples."""
    shared, rows = SharedLease.of(partition, task, claim), partition.table.index[positions]
    _consume(Leased(partition, task, claim), positions, step)
    if shared is not None and claim is shared.prompts.claim:
        shared.end_slots(rows, step)
    return rows.size


class Leased(NamedTuple):
    """A leased claim together with its partition and task."""

    partition: Partition
    task: TaskLedger
    claim: Claim


def _consume(leased: Leased, positions: Indexes, step: Step) -> None:
    partition, task, claim = leased
    returned = task.ack(claim, positions)
    if returned.size:
        reopen(partition, task, returned, returned, step)
    release_due(partition, positions, step)
    step.tasks.append((partition, task.name))
    step.changed[partition] = None  # claims may reach the end of the data when no samples are leased


def _release(leased: Leased, positions: Indexes, step: Step) -> int:
    """Release samples of a claim, remove slots that have no data, and return the number of live samples released."""
    partition, task, claim = leased
    task.nack(claim, positions)
    empty = _without_data(partition, claim, positions)
    reopen(partition, task, positions, positions, step)
    step.tasks.append((partition, task.name))
    count = int(np.count_nonzero(partition.state[positions] == LIVE))
    release_due(partition, positions, step)
    if empty.size:
        clear_rows(partition, empty, step)
    return count


def _expire(leased: Leased, positions: Indexes, step: Step) -> None:
    partition, task, claim = leased
    step.note_change(partition)  # claims may now reach the end of the data or receive the rest of a group
    step.tasks.append((partition, task.name))
    reopen(partition, task, task.expire(claim, positions, step.at_seconds), positions, step)
    release_due(partition, positions, step)
    on_lost = None if claim.lease is None else claim.lease.on_lost
    if on_lost in {"fail", "remove"}:
        held = positions[partition.state[positions] == HELD]
        if on_lost == "fail":
            set_state(partition, FAILED, held, step)
        elif held.size:
            clear_rows(partition, held, step)


class SharedLease(NamedTuple):
    """A lease shared by a claim on prompts and a claim on slots in another partition (see `Admit`).

    The slots were created for the prompts. Each prompt has the same number of slots, and the slots are in prompt order.
    A prompt is finished when all its slots are live. A claimable prompt has no slots, so generating its group again
    does not create duplicates. One of the two claims may no longer exist, for example because its partition was
    cleared. In that case, the remaining claim has an ordinary lease.
    """

    prompts: Leased
    slots: Leased

    @classmethod
    def of(cls, partition: Partition, task: TaskLedger, claim: Claim) -> SharedLease | None:
        """Return a claim's shared lease, or None if it has none."""
        if claim.lease is None or not claim.lease.shared_with:
            return None
        other = partition.all_partitions.get(claim.lease.shared_with)
        other_task = None if other is None else other.tasks.get(task.name)
        other_claim = None if other_task is None else other_task.claims.get(claim.request_id)
        if other is None or other_task is None or other_claim is None or other_claim.lease is None:
            return None
        if other_claim.lease.shared_with != partition.partition_id:
            return None
        own, others = Leased(partition, task, claim), Leased(other, other_task, other_claim)
        return cls(own, others) if claim.lease.on_lost is None else cls(others, own)

    def _slots_by_prompt(self, rows: Indexes) -> Indexes:
        """Return the positions of each prompt's slots as an array of shape `(n, slots)`, with -1 for cleared slots."""
        positions = self.slots.partition.table.find(self.slots.claim.rows)
        return positions.reshape(self.prompts.claim.rows.size, -1)[np.isin(self.prompts.claim.rows, rows)]

    def _slots_of(self, rows: Indexes) -> Indexes:
        """Return the positions of the given prompts' slots, excluding cleared ones."""
        positions = self._slots_by_prompt(rows).ravel()
        return positions[positions >= 0]

    def _leased(self, positions: Indexes) -> Indexes:
        """Return the slots in `positions` that are still leased under this claim."""
        leased: Indexes = positions[self.slots.task.claim[positions] == self.slots.claim.mark]
        return leased

    def acknowledge_finished(self, positions: Indexes, step: Step) -> Indexes:
        """Acknowledge those prompts in `positions` that are finished, and their slots; return the other prompts."""
        rows = self.prompts.claim.rows
        by_prompt, states = self._slots_by_prompt(rows), self.slots.partition.state
        is_finished = ((by_prompt >= 0) & (states[by_prompt] == LIVE)).all(axis=1)
        finished = np.isin(self.prompts.partition.table.index[positions], rows[is_finished])
        if finished.any():
            slots = self._leased(by_prompt[is_finished].ravel())
            if slots.size:
                _consume(self.slots, slots, step)
            _consume(self.prompts, positions[finished], step)
        return positions[~finished]

    def end_slots(self, rows: Indexes, step: Step) -> None:
        """Acknowledge the live slots of the given prompts, and release their held slots."""
        leased = self._leased(self._slots_of(rows))
        is_live = self.slots.partition.state[leased] == LIVE
        if is_live.any():
            _consume(self.slots, leased[is_live], step)
        if not is_live.all():
            _release(self.slots, leased[~is_live], step)

    def remove_slots(self, rows: Indexes, step: Step) -> None:
        """Remove all slots of the given prompts, whether or not they have data."""
        if (positions := self._slots_of(rows)).size:
            step.tasks.append((self.slots.partition, self.slots.task.name))
            step.consumed[self.slots.partition] = None
            clear_rows(self.slots.partition, positions, step)

    def leave_to_slots(self, rows: Indexes, step: Step) -> None:
        """Acknowledge prompts whose released slots still exist, because other workers will fill these slots."""
        by_prompt = self.slots.claim.rows.reshape(self.prompts.claim.rows.size, -1)
        is_left = self.slots.partition.table.find(rows) >= 0
        kept = self.prompts.claim.rows[np.isin(by_prompt, rows[is_left]).any(axis=1)]
        positions = self.prompts.task.left(self.prompts.claim)
        done = positions[np.isin(self.prompts.partition.table.index[positions], kept)]
        if done.size:
            _consume(self.prompts, done, step)

    def expire(self, step: Step) -> None:
        """End the lease on unfinished prompts and slots, and acknowledge finished ones."""
        prompts, slots = self
        index = prompts.partition.table.index
        if not (prompts.claim.leased_count or slots.claim.leased_count):
            return
        left = self.acknowledge_finished(prompts.task.left(prompts.claim), step)
        if slots.claim.leased_count:
            _expire(slots, slots.task.left(slots.claim), step)
        if slots.claim.lease is not None and slots.claim.lease.on_lost != "remove":
            has_slots = (self._slots_by_prompt(prompts.claim.rows) >= 0).any(axis=1)
            is_kept = np.isin(index[left], prompts.claim.rows[has_slots])
            if is_kept.any():
                _consume(prompts, left[is_kept], step)
            left = left[~is_kept]
        else:
            self.remove_slots(index[left], step)
        if left.size:
            _expire(prompts, left, step)


# Checks


def check_claim(partition: Partition, claim: LeasedClaim | None, rows: Indexes) -> None:
    """Raise an error if the claim has lost its lease on any sample to be written.

    Acknowledged samples pass the check. Samples that have failed or been cleared are not checked, because no other
    worker will process them. If no claim is passed, nothing is checked.

    Raises:
        LeaseExpiredError: the lease on some of the samples has ended.
        InvalidArgumentError: some samples were never in the claim.
        PreconditionError: the claim was made without a lease.
        TaskNotFoundError: the task does not exist.
    """
    if claim is not None:
        _check_leased(partition, partition.known_task(claim.task_name), claim.request_id, rows)


def check_growing(partition: Partition, claim: LeasedClaim | None, positions: Indexes) -> None:
    """Raise an error if a sample to be extended or truncated is not held, or is not leased to the claim.

    If no claim is passed, leases are not checked.

    Raises:
        PreconditionError: a sample is not held.
        LeaseExpiredError: the lease on a sample has ended, for example because the sample was acknowledged.
    """
    other = positions[partition.state[positions] != HELD]
    if other.size:
        index, state = int(partition.table.index[other[0]]), STATE_NAMES[int(partition.state[other[0]])]
        raise PreconditionError(
            f"sample {index} of partition {partition.partition_id!r} is {state}; expected held, because finished "
            f"samples cannot grow or shrink ({other.size} of {positions.size} samples are not held). Put the entire "
            "field, or append to slots (Acquire) before they are finished",
            reason="SAMPLE_NOT_HELD",
            metadata={"partition_id": partition.partition_id, "global_index": str(index), "state": state},
        )
    if claim is not None:
        task = partition.known_task(claim.task_name)
        known = task.claims.get(claim.request_id)
        if known is None or (task.claim[positions] != -known.serial).any():
            raise _lease_over_error(task, partition.table.index[positions])


class Acked(NamedTuple):
    """The samples of a claim that a write acknowledges. `positions` lists only samples that the claim still leases."""

    task: TaskLedger
    claim: Claim
    positions: Indexes


def check_acked(partition: Partition, leased: LeasedClaim, rows: Indexes, *, is_gathered: bool) -> Acked | None:
    """Return the samples that a write acknowledges, including those that the claim's plan dropped.

    Args:
        partition: partition that contains the samples.
        leased: claim whose samples the write acknowledges.
        rows: global indexes of the written samples.
        is_gathered: whether the write combines several puts.

    Returns:
        The samples to acknowledge, or None if all of them have already been acknowledged.

    Raises:
        LeaseExpiredError, PreconditionError, TaskNotFoundError: see `check_claim`.
        InvalidArgumentError: some samples were never in the claim, or only some samples of an indivisible group are
            listed. The error is also raised if the write combines several puts and the claim keeps groups together.
    """
    task = partition.known_task(leased.task_name)
    claim = task.claims.get(leased.request_id)
    if claim is not None:
        rows = np.concatenate([rows, *claim.plan.dropped])
        if is_gathered and claim.lease is not None and claim.lease.group_block_size is not None:
            raise InvalidArgumentError(
                f"rows_per_put is set, but the write acknowledges a claim of task {task.name!r} that keeps groups "
                "together. Send each put separately",
                field="rows_per_put",
            )
    found = _find_acked(partition, task, leased.request_id, rows)
    return None if found is None else Acked(task, *found)


def _find_acked(
    partition: Partition, task: TaskLedger, request_id: bytes, rows: Indexes | None
) -> tuple[Claim, Indexes] | None:
    """Return the claim and the positions of the given samples that still belong to it, or None if none do."""
    _check_leased(partition, task, request_id, rows)
    claim = task.claims.get(request_id)
    if claim is None:
        return None
    positions = _left(partition, task, claim, rows)
    return (claim, positions) if positions.size else None


def _check_leased(partition: Partition, task: TaskLedger, request_id: bytes, rows: Indexes | None) -> None:
    """Raise an error unless each given sample is still leased under the claim or was acknowledged under it.

    If `rows` is None, all samples of the claim are checked.
    """
    claim, has_expired = task.claims.get(request_id), task.ended.has_expired(request_id)
    if claim is None:  # the claim may have been dropped after its samples were cleared
        if rows is None or rows.size == 0 or has_expired:
            raise _lease_over_error(task, rows)
        lost = rows[(partition.table.find(rows) >= 0) | (rows < 0) | (rows >= partition.inserted_count)]
    else:
        _lease_of(task, claim)
        if rows is None:
            if has_expired:
                raise _lease_over_error(task)
            return
        is_dropped = claim.plan.drops(rows)
        foreign = rows[~(np.isin(rows, claim.rows) | is_dropped)]
        if foreign.size:
            raise InvalidArgumentError(
                f"samples {_named(foreign)} were never in this claim of task {task.name!r}. Pass samples together "
                f"with the claim that delivered them",
                field="global_indexes",
            )
        positions = partition.table.find(rows)
        marks = task.claim[positions]
        is_lost = (positions >= 0) & (np.abs(marks) != claim.serial) & ~((marks == DROPPED) & is_dropped)
        if claim.returned is not None:
            is_lost &= ~np.isin(rows, claim.returned)
        lost = rows[is_lost]
    if lost.size:
        raise _lease_over_error(task, lost)


def _left(partition: Partition, task: TaskLedger, claim: Claim, rows: Indexes | None) -> Indexes:
    """Return the positions of the given samples that still belong to a claim (see `TaskLedger.left`).

    If `rows` is None, return all samples of the claim. A caller that lists only some of the plan's samples still lists
    every row that the plan dropped. Therefore, a dropped row is returned if and only if the remaining members of its
    group are returned. If the group of a dropped row has no remaining members, the row is returned if it is listed.

    Raises:
        InvalidArgumentError: the list contains only some samples of an indivisible group or of a claim without a lease.
            The remaining samples could never be delivered as a complete group.
    """
    table, positions = partition.table, task.left(claim)
    if rows is None:
        return positions
    if claim.lease is None:
        delivered = claim.rows[table.find(claim.rows) >= 0]
        if not np.isin(delivered, rows).all():
            raise InvalidArgumentError(
                f"got {rows.size} of the {delivered.size} samples in a claim without a lease; expected all of them. "
                "To release only some samples, claim with a lease",
                field="global_indexes",
            )
        return positions
    is_named = np.isin(table.index[positions], rows)
    ids = _group_ids(partition, task, claim, positions)
    if claim.plan.dropped:
        is_dropped = claim.plan.drops(table.index[positions])
        is_alone = is_dropped & ~np.isin(ids, ids[~is_dropped])
        is_named = np.where(is_dropped & ~is_alone, np.isin(ids, ids[is_named & ~is_dropped]), is_named)
    parted = np.intersect1d(ids[is_named], ids[~is_named])
    if parted.size:
        is_member = ids == parted[0]
        members = table.index[positions[is_member]]
        raise InvalidArgumentError(
            f"samples {_named(members)} form one group, but only {int(is_named[is_member].sum())} of its "
            f"{members.size} samples are listed. The claim keeps groups together; pass all samples of the group or "
            "none",
            field="global_indexes",
        )
    return positions[is_named]


def _group_ids(partition: Partition, task: TaskLedger, claim: Claim, positions: Indexes) -> Indexes:
    """Return a group id for each row of a leased claim. Rows outside indivisible groups get unique ids."""
    block_size = None if claim.lease is None else claim.lease.group_block_size
    if claim.lease is None or block_size is None:
        return positions
    if claim.lease.blocks == "anywhere":  # groups are runs of claimed rows, including done and cleared rows
        claimed = np.unique(np.concatenate([claim.rows, *claim.plan.dropped]))
        ids = groups_in_runs(claimed, block_size)
        return ids[np.searchsorted(claimed, partition.table.index[positions])]
    return Grouping.of_code(partition, task, block_size).ids(positions)


def _lease_of(task: TaskLedger, claim: Claim) -> LeaseTerms:
    if claim.lease is None:
        raise PreconditionError(
            f"this claim of task {task.name!r} was made without a lease, so its samples were consumed on delivery. "
            f"Claim with a lease to acknowledge samples, or write without passing a claim",
            metadata={"task_name": task.name},
        )
    return claim.lease


def _lease_over_error(task: TaskLedger, rows: Indexes | None = None) -> LeaseExpiredError:
    what = "samples of this claim" if rows is None else f"samples {_named(rows)}"
    return LeaseExpiredError(
        f"{what} are no longer leased to this worker of task {task.name!r}: the lease expired, the claim was "
        "released, or consumption was reset. Other workers may repeat the work, so discard these results. Next time, "
        "request a longer lease or extend the lease",
        metadata={"task_name": task.name} | ({} if rows is None else {"global_indexes": _named(rows)}),
    )


def _named(rows: Indexes) -> str:
    named = ", ".join(map(str, rows[:_MOST_NAMED].tolist()))
    return named if rows.size <= _MOST_NAMED else f"{named} and {rows.size - _MOST_NAMED} more"
