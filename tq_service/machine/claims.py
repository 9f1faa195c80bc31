"""Changes of what tasks consume: samples claimed, acknowledged, released; leases extended and expired; epochs begun.

`check` sees whether a change fits the task and its claims, and finds the rows; `make` is one verb of the task's ledger,
and says what follows from it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tq_service.errors import InvalidArgumentError, LeaseExpiredError, PreconditionError
from tq_service.machine.rows import clear_rows, reopen, set_state
from tq_service.machine.state_machine import Change, State, Step
from tq_service.planning.grouping import Grouping, groups_in_runs
from tq_service.schema import EndCounts, check_range
from tq_service.state.ledger import Claim, RecordedPlan, TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import MOST_RANKS, BatchSpec, Indexes, LeasedClaim, LeaseTerms
from tq_service.state.table import DROPPED, FAILED, HELD, LIVE, STATE_NAMES

_MOST_NAMED = 20


class TaskChange(Change):
    """What becomes of one task of a partition."""

    partition_id: str
    task_name: str

    def prepare(self, state: State) -> tuple[Partition, TaskLedger, Any] | None:
        """Return the partition, the task, and what `check` finds; None where there is nothing to change."""
        partition = state.partition(self.partition_id)
        task = partition.known_task(self.task_name)
        found = self.check(partition, task)
        return None if found is None else (partition, task, found)

    def check(self, partition: Partition, task: TaskLedger) -> Any | None:
        """Find what is changed, and refuse what does not fit it; None where there is nothing to change."""
        return True

    def apply(self, state: State, prepared: tuple[Partition, TaskLedger, Any], step: Step) -> Any:
        """Make the change, of which those hear who watch the task."""
        partition, task, found = prepared
        step.tasks.append((partition, task.name))
        return self.make(partition, task, found, step)

    @abstractmethod
    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> Any:
        """Make the change, see `Change.apply`."""


class TaskSeen(Change):
    """A task asked for the first time."""

    partition_id: str
    task_name: str

    def prepare(self, state: State) -> Partition | None:
        """Find the partition, unless it knows the task; raises TaskNotFoundError where it was created for others."""
        partition = state.partition(self.partition_id)
        partition.check_task(self.task_name)
        return None if self.task_name in partition.tasks else partition

    def apply(self, state: State, prepared: Partition, step: Step) -> TaskLedger:
        """Open the task's ledger."""
        step.tasks.append((prepared, self.task_name))
        return prepared.open_task(self.task_name)


class TaskForgotten(TaskChange):
    """A task of which nothing is on record was forgotten: the calls that asked for it were refused."""

    def check(self, partition: Partition, task: TaskLedger) -> Any | None:
        """Return None if the task was declared with the partition, or something is on record."""
        is_declared = self.task_name in partition.settings.tasks or task.outstanding is not None
        return None if is_declared or not task.is_unused else True

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> None:
        """Drop the task's ledger."""
        partition.forget_task(task.name)


# Claims


class SamplesClaimed(TaskChange):
    """Samples were delivered by a plan: for all ranks as the next batch_index of the task, or to a queue worker.

    Attributes:
        batch_spec: what was asked for; None for a claim of a queue worker without a name.
        request_id: of the queue worker; empty: ranks asked.
        lease: how they are leased to the queue worker; None: they are done.
        claim_name: by which its claim can be asked for again; empty: it has none.
    """

    plan: RecordedPlan
    batch_spec: BatchSpec | None = None
    request_id: bytes = b""
    lease: LeaseTerms | None = None
    claim_name: str = ""

    def check(self, partition: Partition, task: TaskLedger) -> Indexes:
        """Find the positions of all rows of the plan; raises TqError where one is gone."""
        return partition.positions_of(self.plan.named)

    def make(self, partition: Partition, task: TaskLedger, found: Indexes, step: Step) -> Claim:
        """Record the plan and what it consumes."""
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
        return claim


class EndReached(TaskChange):
    """No further batch comes for the ranks of a task in this epoch, or for a claim of a queue worker by name.

    Attributes:
        dp_size: number of ranks; None: it is the end of a claim.
        claim_name: its name, under which all calls are answered with the end.
    """

    end: EndCounts
    dp_size: int | None = None
    claim_name: str = ""

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> None:
        """Record the end."""
        if self.dp_size is None:
            task.reach_named_end(self.claim_name, self.end)
        else:
            task.reach_end(self.dp_size, self.end)


# What becomes of the claim of a queue worker


class ClaimReleased(TaskChange):
    """A queue claim was released: what is left of it can be claimed again.

    Samples that the claim acknowledged or released before are ignored, as is an unknown claim: a client releases what
    it may have got. Prompts lose their slots, unless these are finished, see `SharedLease`.

    Attributes:
        global_indexes: samples of a leased claim; None: all that are left of it.
        is_final: whether its request_id is refused from now on. Not so where the answer reached no client, which then
            may ask again under the same one.
    """

    request_id: bytes
    global_indexes: Indexes | None = None
    is_final: bool = True

    def check(self, partition: Partition, task: TaskLedger) -> tuple[Claim | None, Indexes] | None:
        """Find the claim and what is released; None where nothing is, and the request_id stays as it is.

        Raises:
            LeaseExpiredError: the lease of samples that are named ran out.
            InvalidArgumentError: only a part of a claim without a lease is named, or of a group that stays whole.
        """
        rows, claim = self.global_indexes, task.claims.get(self.request_id)
        if rows is not None and task.ended.has_expired(self.request_id):
            _check_leased(partition, task, self.request_id, rows)
        if claim is None:
            return (None, np.zeros(0, np.int64)) if self.is_final else None
        positions = _left(partition, task, claim, rows)
        return None if rows is not None and claim.lease is not None and not positions.size else (claim, positions)

    def make(self, partition: Partition, task: TaskLedger, found: tuple[Claim | None, Indexes], step: Step) -> int:
        """Release the samples; return how many can be claimed again at once."""
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
    """Samples of a leased claim are done, for good or for this time; None: all that are left of it.

    Samples that are done, have failed or were cleared may be named: no other worker will process them.
    """

    request_id: bytes
    global_indexes: Indexes | None = None

    def check(self, partition: Partition, task: TaskLedger) -> tuple[Claim, Indexes] | None:
        """Find the samples that are leased; None where none of them is.

        Raises:
            LeaseExpiredError: samples are no longer the claim's; none is acknowledged.
            InvalidArgumentError: samples were never in the claim, or are a part of a group that stays whole.
            PreconditionError: the claim was made without a lease.
        """
        return _find_acked(partition, task, self.request_id, self.global_indexes)

    def make(self, partition: Partition, task: TaskLedger, found: tuple[Claim, Indexes], step: Step) -> int:
        """Consume the samples for good, or return them for their next use; return how many they are."""
        count = _ack(partition, task, *found, step)
        finish_prompts(partition, Acked(task, *found), step)
        return count


class ClaimExtended(TaskChange):
    """What is left of a leased claim was given more time, from then on."""

    request_id: bytes
    lease_seconds: float

    def check(self, partition: Partition, task: TaskLedger) -> tuple[Claim, LeaseTerms]:
        """Find the claim, and say how long it lasts.

        Raises:
            LeaseExpiredError: the lease ran out, or its samples were released.
            PreconditionError: nothing is left to be acknowledged, or the claim was made without a lease.
        """
        claim = task.claims.get(self.request_id)
        if claim is None or task.ended.has_expired(self.request_id):
            raise _lease_over_error(task)
        lease = replace(_lease_of(task, claim), seconds=self.lease_seconds)
        if claim.leased_count == 0:
            raise PreconditionError(
                f"nothing is left of this claim of task {task.name!r}: its samples are acknowledged, failed, cleared "
                f"or released; no more time is needed",
                metadata={"task_name": task.name},
            )
        return claim, lease

    def make(self, partition: Partition, task: TaskLedger, found: tuple[Claim, LeaseTerms], step: Step) -> int:
        """Change how long the lease lasts; return how many samples are left of it."""
        claim, lease = found
        shared = SharedLease.of(partition, task, claim)
        for side in (Leased(partition, task, claim),) if shared is None else shared:
            if side.claim.lease is not None and side.claim.leased_count:
                side.claim.lease = replace(side.claim.lease, seconds=lease.seconds)
                step.leases.append((side.partition, task.name, side.claim))
        return claim.leased_count


class LeaseExpired(TaskChange):
    """What was left of a leased claim can be claimed again, or is dead-lettered."""

    request_id: bytes

    def check(self, partition: Partition, task: TaskLedger) -> tuple[Claim, Indexes]:
        """Find what is left; raises LookupError where that is nothing."""
        claim = task.claims.get(self.request_id)
        if claim is None or claim.leased_count == 0:
            raise LookupError(f"task {task.name!r} has leased nothing under request_id {self.request_id.hex()}")
        return claim, task.left(claim)

    def make(self, partition: Partition, task: TaskLedger, found: tuple[Claim, Indexes], step: Step) -> None:
        """Take the samples from the worker."""
        claim, positions = found
        if (shared := SharedLease.of(partition, task, claim)) is not None:
            shared.expire(step)
        else:
            _expire(Leased(partition, task, claim), positions, step)


class ConsumptionReset(TaskChange):
    """The next epoch of a task began.

    Attributes:
        keep_consumed: whether only what was not done can be claimed in it: leased and dead-lettered samples.
        epoch: the epoch that the caller means to end; None: whichever.
    """

    keep_consumed: bool
    epoch: int | None = None

    def check(self, partition: Partition, task: TaskLedger) -> Any:
        """Refuse it where the task is at another epoch (StaleEpochError), or may train its samples no more."""
        task.check_epoch(self.epoch)
        bounded = partition.settings.bounded_admission
        if bounded is not None and bounded.task_name == self.task_name and not self.keep_consumed:
            raise PreconditionError(
                f"task {self.task_name!r} of partition {self.partition_id!r} has max_staleness "
                f"{bounded.max_staleness}: samples that it has trained would be too old in another epoch; reset with "
                f"keep_consumed, or restart the ranks (RestartRanks)",
                reason="STALENESS_BOUNDED",
                metadata={"partition_id": self.partition_id, "task_name": self.task_name},
            )
        return True

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> int:
        """Start the epoch and return it."""
        for claim in list(task.claims.values()):  # whose records go: neither side may be left to be claimed again
            if (shared := SharedLease.of(partition, task, claim)) is not None:
                shared.expire(step)
        reopened = task.reset(keep_consumed=self.keep_consumed, open_count=partition.open_count)
        if self.keep_consumed:
            reopen(partition, task, reopened, reopened, step)
        else:
            partition.on_reset(task.name)
        step.note_change(partition)
        return task.epoch


class TaskAdvanced(TaskChange):
    """The trainer that is the task has come further.

    Attributes:
        trained: the last batch_index that was trained, with all before it; None: not said.
        saved: the last batch_index that a checkpoint of the trainer covers, with all before it; None: not said.
    """

    trained: int | None = None
    saved: int | None = None

    def check(self, partition: Partition, task: TaskLedger) -> tuple[int, int] | None:
        """Return both marks, -1 for one that is not given; None if neither is higher than before.

        Raises:
            InvalidArgumentError: a batch was never planned.
        """
        last = task.next_batch_index - 1
        for name, index in (("trained", self.trained), ("saved", self.saved)):
            if index is not None and not 0 <= index <= last:
                planned = f"expected 0 to {last}" if last >= 0 else "and no batch has been planned"
                raise InvalidArgumentError(
                    f"{name} is {index}; {planned}, the batches of task {task.name!r} in partition "
                    f"{self.partition_id!r}. Give the batch_index of the last batch that is done.",
                    field=name,
                    metadata={"got": str(index), "expected": f"0 to {last}"},
                )
        trained, saved = (-1 if index is None else index for index in (self.trained, self.saved))
        return (trained, saved) if trained > task.trained or saved > task.saved else None

    def make(self, partition: Partition, task: TaskLedger, found: tuple[int, int], step: Step) -> None:
        """Record them."""
        task.advance(*found)
        step.consumed[partition] = None  # work may have given its place back


class RanksRestarted(TaskChange):
    """Other ranks of a task go on behind what was trained; those before are refused, since the epoch is another one.

    Attributes:
        dp_size: number of the ranks.
        trained: the last batch_index that was trained; -1: none was.
        epoch: the epoch of the ranks before; if it has ended and its successor has as many ranks, they have restarted
            already. None: they restart in any case.
    """

    dp_size: int
    trained: int
    epoch: int | None = None

    def check(self, partition: Partition, task: TaskLedger) -> Any | None:
        """Return None if they have restarted already.

        Raises:
            StaleEpochError: the task has not reached that epoch.
            InvalidArgumentError: a number is out of its range.
        """
        check_range("dp_size", self.dp_size, 1, MOST_RANKS)
        if self.epoch is not None and self.epoch != task.epoch:
            if self.epoch > task.epoch:
                task.check_epoch(self.epoch)
            if task.dp_size == self.dp_size:
                return None
        last = task.next_batch_index - 1
        if not -1 <= self.trained <= last:
            raise InvalidArgumentError(
                f"trained is {self.trained}; expected -1 to {last}, the batches of task {task.name!r} in partition "
                f"{self.partition_id!r} that were planned. Give the batch_index of the last batch that was trained.",
                field="trained",
                metadata={"got": str(self.trained), "expected": f"-1 to {last}"},
            )
        return True

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> None:
        """Restart them."""
        reopened = task.restart_ranks(self.dp_size, self.trained)
        reopen(partition, task, reopened, reopened, step)
        step.note_change(partition)


class DeadLettersRequeued(TaskChange):
    """Dead-lettered samples of a task can be claimed again, as if they had never been delivered.

    Attributes:
        global_indexes: samples, of which those that are not dead-lettered are ignored; None: all that are.
    """

    global_indexes: Indexes | None = None

    def check(self, partition: Partition, task: TaskLedger) -> Indexes | None:
        """Find the samples; None where none of them is dead-lettered.

        Raises:
            PreconditionError: the ranks of the task have come to their end, so that nothing is delivered any more.
        """
        positions = task.dead_lettered()
        if self.global_indexes is not None:
            positions = positions[np.isin(partition.table.index[positions], self.global_indexes)]
        if positions.size and task.end is not None:
            raise PreconditionError(
                f"task {task.name!r} of partition {self.partition_id!r} is at its end, so its ranks ask for nothing "
                "more; reset its consumption with keep_consumed, which delivers dead-lettered samples again",
                metadata={"task_name": task.name},
            )
        return positions if positions.size else None

    def make(self, partition: Partition, task: TaskLedger, found: Indexes, step: Step) -> int:
        """Have them claimable; return how many they are."""
        task.requeue(found)
        reopened = np.concatenate([found, task.unskip()])  # their groups may be whole again
        reopen(partition, task, reopened, None, step)
        return found.size


class GroupsKept(TaskChange):
    """A task asks for whole groups in another way than before, or no longer does.

    Attributes:
        kept_groups: see `TaskFacts`.
    """

    kept_groups: int | None

    def check(self, partition: Partition, task: TaskLedger) -> Any | None:
        """Return None where the task asks as before."""
        return None if task.kept_groups == self.kept_groups else True

    def make(self, partition: Partition, task: TaskLedger, found: Any, step: Step) -> None:
        """Skip the rest of groups that lost a member, or have it pending again."""
        task.kept_groups = self.kept_groups
        reopen(partition, task, task.unskip(), None, step)


def _without_data(partition: Partition, claim: Claim, positions: Indexes) -> Indexes:
    """Return which rows of a claim are slots that are still held and have no data."""
    if claim.lease is None or claim.lease.on_lost is None:
        return positions[:0]
    is_empty = partition.state[positions] == HELD
    for name in partition.cells.fields:
        is_empty &= ~partition.cells.produced([name], positions)
    empty: Indexes = positions[is_empty]
    return empty


# Consequences


def acknowledge(partition: Partition, acked: Acked, step: Step) -> None:
    """Acknowledge what `check_acked` has found."""
    _ack(partition, acked.task, acked.claim, acked.positions, step)


def finish_prompts(partition: Partition, acked: Acked, step: Step) -> None:
    """Acknowledge the prompts whose last slots have become live."""
    shared = SharedLease.of(partition, acked.task, acked.claim)
    if shared is not None and acked.claim is shared.slots.claim:
        shared.acknowledge_finished(shared.prompts.task.left(shared.prompts.claim), step)


def _ack(partition: Partition, task: TaskLedger, claim: Claim, positions: Indexes, step: Step) -> int:
    """Consume samples for good, or have them claimable for their next use; return how many. Slots end with prompts."""
    shared, rows = SharedLease.of(partition, task, claim), partition.table.index[positions]
    _consume(Leased(partition, task, claim), positions, step)
    if shared is not None and claim is shared.prompts.claim:
        shared.end_slots(rows, step)
    return rows.size


class Leased(NamedTuple):
    """A leased claim, and where it is."""

    partition: Partition
    task: TaskLedger
    claim: Claim


def _consume(leased: Leased, positions: Indexes, step: Step) -> None:
    partition, task, claim = leased
    returned = task.ack(claim, positions)
    if returned.size:
        reopen(partition, task, returned, returned, step)
    step.tasks.append((partition, task.name))
    step.changed[partition] = None  # the end may have come with the last that was leased


def _release(leased: Leased, positions: Indexes, step: Step) -> int:
    """Have samples claimable again, and remove slots without data; return how many can be claimed at once."""
    partition, task, claim = leased
    task.nack(claim, positions)
    empty = _without_data(partition, claim, positions)
    reopen(partition, task, positions, positions, step)
    step.tasks.append((partition, task.name))
    count = int(np.count_nonzero(partition.state[positions] == LIVE))
    if empty.size:
        clear_rows(partition, empty, step)
    return count


def _expire(leased: Leased, positions: Indexes, step: Step) -> None:
    partition, task, claim = leased
    step.note_change(partition)  # what is dead-lettered may bring the end, or let the rest of its group go
    step.tasks.append((partition, task.name))
    reopen(partition, task, task.expire(claim, positions, step.at_seconds), positions, step)
    on_lost = None if claim.lease is None else claim.lease.on_lost
    if on_lost in {"fail", "remove"}:
        held = positions[partition.state[positions] == HELD]
        if on_lost == "fail":
            set_state(partition, FAILED, held, step)
        elif held.size:
            clear_rows(partition, held, step)


class SharedLease(NamedTuple):
    """The lease of prompts and of the slots that were made with their claim (`Admit`), in two partitions.

    Each prompt has as many slots, in the order of the prompts. It is finished when all of them are live. A prompt that
    can be claimed again has no slots: so its group can be made anew, and nobody makes it twice. A claim whose other
    side is gone, as with its partition, has the lease alone.
    """

    prompts: Leased
    slots: Leased

    @classmethod
    def of(cls, partition: Partition, task: TaskLedger, claim: Claim) -> SharedLease | None:
        """Return the lease that a claim shares, None if it shares none."""
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
        """Return the positions of the slots of prompts `(n, slots)`, -1 for slots that were cleared."""
        positions = self.slots.partition.table.find(self.slots.claim.rows)
        return positions.reshape(self.prompts.claim.rows.size, -1)[np.isin(self.prompts.claim.rows, rows)]

    def _slots_of(self, rows: Indexes) -> Indexes:
        """Return the positions of the slots of prompts that are there."""
        positions = self._slots_by_prompt(rows).ravel()
        return positions[positions >= 0]

    def _leased(self, positions: Indexes) -> Indexes:
        """Return which of some slots the claim still leases."""
        leased: Indexes = positions[self.slots.task.claim[positions] == self.slots.claim.mark]
        return leased

    def acknowledge_finished(self, positions: Indexes, step: Step) -> Indexes:
        """Acknowledge those of some prompts that are finished, and their slots; return the others."""
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
        """Acknowledge the slots of prompts that are live, and release those that are held."""
        leased = self._leased(self._slots_of(rows))
        is_live = self.slots.partition.state[leased] == LIVE
        if is_live.any():
            _consume(self.slots, leased[is_live], step)
        if not is_live.all():
            _release(self.slots, leased[~is_live], step)

    def remove_slots(self, rows: Indexes, step: Step) -> None:
        """Remove the slots of prompts, whatever they hold."""
        if (positions := self._slots_of(rows)).size:
            step.tasks.append((self.slots.partition, self.slots.task.name))
            step.consumed[self.slots.partition] = None
            clear_rows(self.slots.partition, positions, step)

    def leave_to_slots(self, rows: Indexes, step: Step) -> None:
        """Acknowledge the prompts of released slots that are there still: other workers go on with these."""
        by_prompt = self.slots.claim.rows.reshape(self.prompts.claim.rows.size, -1)
        is_left = self.slots.partition.table.find(rows) >= 0
        kept = self.prompts.claim.rows[np.isin(by_prompt, rows[is_left]).any(axis=1)]
        positions = self.prompts.task.left(self.prompts.claim)
        done = positions[np.isin(self.prompts.partition.table.index[positions], kept)]
        if done.size:
            _consume(self.prompts, done, step)

    def expire(self, step: Step) -> None:
        """Take from the worker what it has not finished, on both sides."""
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
    """Refuse a write to samples of a leased claim, if one is named, unless it holds or has acknowledged them.

    Samples that have failed or were cleared are no reason to refuse it: no other worker will process them.

    Raises:
        LeaseExpiredError: samples are no longer the claim's.
        InvalidArgumentError: samples were never in the claim.
        PreconditionError: the claim was made without a lease.
        TaskNotFoundError: there is no such task.
    """
    if claim is not None:
        _check_leased(partition, partition.known_task(claim.task_name), claim.request_id, rows)


def check_growing(partition: Partition, claim: LeasedClaim | None, positions: Indexes) -> None:
    """Refuse to add to samples, or to cut them, that are not held, or not leased to a claim that may write to them.

    Raises:
        PreconditionError: one is not held.
        LeaseExpiredError: one was acknowledged.
    """
    other = positions[partition.state[positions] != HELD]
    if other.size:
        index, state = int(partition.table.index[other[0]]), STATE_NAMES[int(partition.state[other[0]])]
        raise PreconditionError(
            f"sample {index} of partition {partition.partition_id!r} is {state}, expected a held one ({other.size} of "
            f"{positions.size} are not): finished samples neither grow nor shrink. Put the field whole, or grow slots "
            f"(Acquire) before they are finished",
            reason="SAMPLE_NOT_HELD",
            metadata={"partition_id": partition.partition_id, "global_index": str(index), "state": state},
        )
    if claim is not None:
        task = partition.known_task(claim.task_name)
        known = task.claims.get(claim.request_id)
        if known is None or (task.claim[positions] != -known.serial).any():
            raise _lease_over_error(task, partition.table.index[positions])


class Acked(NamedTuple):
    """Samples that a write acknowledges: positions `(n,)` of those that the claim still leases."""

    task: TaskLedger
    claim: Claim
    positions: Indexes


def check_acked(partition: Partition, leased: LeasedClaim, rows: Indexes, *, is_gathered: bool) -> Acked | None:
    """Find what a write to samples of a leased claim acknowledges, with what the claim's plan left out.

    Args:
        partition: theirs.
        leased: the claim.
        rows: the samples that are written to.
        is_gathered: whether the write is of several puts.

    Returns:
        None if all of them are acknowledged already.

    Raises:
        LeaseExpiredError, PreconditionError, TaskNotFoundError: see `check_claim`.
        InvalidArgumentError: samples were never in the claim, or are a part of a group that stays whole; or the claim
            is of whole groups, and each of several puts could have a part of one.
    """
    task = partition.known_task(leased.task_name)
    claim = task.claims.get(leased.request_id)
    if claim is not None:
        rows = np.concatenate([rows, *claim.plan.dropped])
        if is_gathered and claim.lease is not None and claim.lease.group_block_size is not None:
            raise InvalidArgumentError(
                f"rows_per_put is set in a write that acknowledges a claim of task {task.name!r} of whole groups; send "
                "each put by itself",
                field="rows_per_put",
            )
    found = _find_acked(partition, task, leased.request_id, rows)
    return None if found is None else Acked(task, *found)


def _find_acked(
    partition: Partition, task: TaskLedger, request_id: bytes, rows: Indexes | None
) -> tuple[Claim, Indexes] | None:
    """Return the claim and the positions of those of its samples that are leased; None where none of them is."""
    _check_leased(partition, task, request_id, rows)
    claim = task.claims.get(request_id)
    if claim is None:
        return None
    positions = _left(partition, task, claim, rows)
    return (claim, positions) if positions.size else None


def _check_leased(partition: Partition, task: TaskLedger, request_id: bytes, rows: Indexes | None) -> None:
    """Refuse a worker that does not hold, and has not acknowledged, samples of its claim; None: all of them."""
    claim, has_expired = task.claims.get(request_id), task.ended.has_expired(request_id)
    if claim is None:  # unless it went with its samples when they were cleared
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
                f"samples {_named(foreign)} were never in this claim of task {task.name!r}; name the samples of a "
                f"claim by the batch it came with",
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
    """Return the positions of what a claim holds of some samples, of all where none are named.

    A row that its plan drops goes with the other members of its group that are left: all parts of a batch name
    everything that it drops, whichever samples they are of.

    Raises:
        InvalidArgumentError: they are only a part of a claim without a lease, or of a group that stays whole, of which
            the rest could never be delivered again as a whole one.
    """
    table, positions = partition.table, task.left(claim)
    if rows is None:
        return positions
    if claim.lease is None:
        delivered = claim.rows[table.find(claim.rows) >= 0]
        if not np.isin(delivered, rows).all():
            raise InvalidArgumentError(
                f"got {rows.size} of the {delivered.size} samples of a claim without a lease, which is released whole; "
                "ask with a lease to release some",
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
            f"samples {_named(members)} are a group, of which {int(is_named[is_member].sum())} of {members.size} are "
            f"named; the claim is of whole groups, so name all of them or none",
            field="global_indexes",
        )
    return positions[is_named]


def _group_ids(partition: Partition, task: TaskLedger, claim: Claim, positions: Indexes) -> Indexes:
    """Return the id of the group that each row of a leased claim is in; without groups each row has its own."""
    block_size = None if claim.lease is None else claim.lease.group_block_size
    if claim.lease is None or block_size is None:
        return positions
    if claim.lease.blocks == "anywhere":  # found among what was claimed, of which some may be acknowledged or gone
        claimed = np.unique(np.concatenate([claim.rows, *claim.plan.dropped]))
        ids = groups_in_runs(claimed, block_size)
        return ids[np.searchsorted(claimed, partition.table.index[positions])]
    return Grouping(partition, task, block_size or None).ids(positions)


def _lease_of(task: TaskLedger, claim: Claim) -> LeaseTerms:
    if claim.lease is None:
        raise PreconditionError(
            f"this claim of task {task.name!r} has no lease, so its samples were done when they were delivered; ask "
            "with a lease to acknowledge them, or name none with a write",
            metadata={"task_name": task.name},
        )
    return claim.lease


def _lease_over_error(task: TaskLedger, rows: Indexes | None = None) -> LeaseExpiredError:
    what = "samples of this claim" if rows is None else f"samples {_named(rows)}"
    return LeaseExpiredError(
        f"{what} are no longer leased to this worker of task {task.name!r}: the lease ran out, was released, or "
        f"consumption was reset; others may do the same work, so drop yours, and ask for a longer lease or extend it",
        metadata={"task_name": task.name} | ({} if rows is None else {"global_indexes": _named(rows)}),
    )


def _named(rows: Indexes) -> str:
    named = ", ".join(map(str, rows[:_MOST_NAMED].tolist()))
    return named if rows.size <= _MOST_NAMED else f"{named} and {rows.size - _MOST_NAMED} more"
