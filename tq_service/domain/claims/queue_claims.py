"""What becomes of the claims of queue workers: given back, acknowledged, given more time, run out.

Each is one change of the partition, told as such. What a lease means stands in `ledger`.
"""

from __future__ import annotations

import time

import numpy as np

from tq_service.domain.changes.claims import ClaimAcked, ClaimExtended, ClaimReleased, LeaseExpired
from tq_service.domain.claims.ledger import Lease, QueueClaim, TaskLedger
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes
from tq_service.domain.tables.groups import group_ids
from tq_service.errors import InvalidArgumentError, LeaseExpiredError, PreconditionError

_MOST_NAMED = 20


def release(partition: Partition, task: TaskLedger, request_id: bytes, rows: Indexes | None = None) -> int:
    """Give back what is left of a claim, or some samples of a leased one; its request_id is refused from now on.

    Return the number of samples that are claimable again. What the claim does not hold any more is ignored, as is an
    unknown claim: a client gives back what it may have got.

    Raises:
        InvalidArgumentError: only a part of a claim without a lease is named, or of a group that stays whole.
    """
    claim = task.claims.get(request_id)
    if claim is not None and rows is not None:
        rows = _part(partition, task, claim, rows)
        if rows is not None and rows.size == 0:
            return 0
    return _give_back(partition, task, request_id, rows, is_final=True)


def take_back(partition: Partition, task: TaskLedger, request_id: bytes) -> None:
    """Undo a claim whose answer reached nobody; the caller may ask again under the same request_id."""
    claim = task.claims.get(request_id)
    if claim is None:
        return
    claim.answer_count -= 1
    if claim.answer_count == 0:
        undo(partition, task, request_id)


def undo(partition: Partition, task: TaskLedger, request_id: bytes) -> None:
    """Give back what is left of a claim; its request_id may be used again."""
    _give_back(partition, task, request_id, None, is_final=False)


def _give_back(
    partition: Partition, task: TaskLedger, request_id: bytes, rows: Indexes | None, *, is_final: bool
) -> int:
    claim = task.claims.get(request_id)
    change = ClaimReleased(
        partition_id=partition.partition_id, task_name=task.name, request_id=request_id,
        global_indexes=rows, is_final=is_final,
    )  # fmt: skip
    with partition.recording(change):
        if is_final:
            task.released.add(request_id, time.time())
        if claim is None:
            return 0
        positions = task.left(claim)
        if rows is not None and claim.lease is not None:
            positions = positions[np.isin(partition.table.index.data[positions], rows)]
        task.nack(claim, positions)
        return partition.on_reopened(positions)


def _part(partition: Partition, task: TaskLedger, claim: QueueClaim, rows: Indexes) -> Indexes | None:
    """Return those of `rows` that can be given back, None for all that is left."""
    if claim.lease is None:
        left = claim.rows[partition.table.find(claim.rows) >= 0]
        if not np.isin(left, rows).all():
            raise InvalidArgumentError(
                f"got {rows.size} of the {left.size} samples of a claim without a lease, which is given back whole; "
                "ask with a lease to give back some",
                field="global_indexes",
            )
        return None
    left = partition.table.index.data[task.left(claim)]
    chosen = left[np.isin(left, rows)]
    _check_whole_groups(partition, claim.lease, left, chosen)
    return chosen


def acknowledge(partition: Partition, task: TaskLedger, request_id: bytes, rows: Indexes | None = None) -> int:
    """Have samples of a leased claim done for good, all that are left or those named; return how many were leased.

    Samples that are done, have failed or were cleared may be named: nobody else will do their work.

    Raises:
        LeaseExpiredError: samples are no longer the claim's; none is acknowledged.
        InvalidArgumentError: samples were never in the claim, or are a part of a group that stays whole.
        PreconditionError: the claim was made without a lease.
    """
    claim = task.claims.get(request_id)
    if claim is None:
        _check_cleared(partition, task, request_id, rows)
        return 0
    lease = _lease_of(task, claim)
    positions = task.left(claim)
    left = partition.table.index.data[positions]
    if rows is None:
        if request_id in task.expired:
            raise _is_over(task)
        chosen = left
    else:
        _check_held(partition, task, claim, rows)
        is_chosen = np.isin(left, rows)
        positions, chosen = positions[is_chosen], left[is_chosen]
        _check_whole_groups(partition, lease, left, chosen)
    if positions.size == 0:
        return 0
    change = ClaimAcked(
        partition_id=partition.partition_id, task_name=task.name, request_id=request_id,
        global_indexes=chosen if chosen.size < left.size else None,
    )  # fmt: skip
    with partition.recording(change):
        task.ack(lease, positions)
        partition.changed()
    return int(positions.size)


def extend(partition: Partition, task: TaskLedger, request_id: bytes, seconds: float) -> Lease:
    """Give what is left of a leased claim more time, from now on; return the lease.

    Raises:
        LeaseExpiredError: the lease ran out, or its samples were given back.
        PreconditionError: nothing is left to be acknowledged, or the claim was made without a lease.
    """
    claim = task.claims.get(request_id)
    if claim is None or request_id in task.expired:
        raise _is_over(task)
    lease = _lease_of(task, claim)
    if lease.left_count == 0:
        raise PreconditionError(
            f"nothing is left of this claim of task {task.name!r}: its samples are acknowledged, failed, cleared or "
            f"given back; no more time is needed"
        )
    change = ClaimExtended(
        partition_id=partition.partition_id, task_name=task.name, request_id=request_id, lease_seconds=seconds
    )
    with partition.recording(change):
        lease.extend(seconds)
    return lease


def expire(partition: Partition, task: TaskLedger, request_id: bytes) -> None:
    """Let a lease run out: what is left is claimable again, or dead-lettered.

    Raises:
        LookupError: nothing is leased under this request_id.
    """
    claim = task.claims.get(request_id)
    if claim is None or claim.lease is None or claim.lease.left_count == 0:
        raise LookupError(f"task {task.name!r} has leased nothing under request_id {request_id.hex()}")
    change = LeaseExpired(partition_id=partition.partition_id, task_name=task.name, request_id=request_id)
    with partition.recording(change):
        partition.state_version += 1  # what is dead-lettered may bring the end, or let the rest of its group go
        partition.on_reopened(task.expire(claim.lease, task.left(claim), time.time()))
        partition.changed()


# Checks


def _lease_of(task: TaskLedger, claim: QueueClaim) -> Lease:
    if claim.lease is None:
        raise PreconditionError(
            f"this claim of task {task.name!r} has no lease, so its samples were done when they were handed out; ask "
            "with lease= to acknowledge them"
        )
    return claim.lease


def _check_cleared(partition: Partition, task: TaskLedger, request_id: bytes, rows: Indexes | None) -> None:
    """Refuse to acknowledge for a claim that is gone, unless it went with its samples when they were cleared."""
    if rows is None or rows.size == 0 or request_id in task.expired:
        raise _is_over(task, rows)
    there = rows[(partition.table.find(rows) >= 0) | (rows < 0) | (rows >= partition.inserted_count)]
    if there.size:
        raise _is_over(task, there)


def _check_held(partition: Partition, task: TaskLedger, claim: QueueClaim, rows: Indexes) -> None:
    foreign = rows[~np.isin(rows, claim.rows)]
    if foreign.size:
        raise InvalidArgumentError(
            f"samples {_named(foreign)} were never in this claim of task {task.name!r}; acknowledge each claim by the "
            f"batch it came with",
            field="global_indexes",
        )
    positions = partition.table.find(rows)
    is_there = positions >= 0
    lost = rows[is_there][np.abs(task.claim.data[positions[is_there]]) != claim.serial]
    if lost.size:
        raise _is_over(task, lost)


def _check_whole_groups(partition: Partition, lease: Lease, left: Indexes, chosen: Indexes) -> None:
    """Refuse a part of a group, of which the rest could never be handed out again as a whole one."""
    block_size = lease.terms.group_block_size
    if block_size is None or chosen.size in (0, left.size):
        return
    ids = group_ids(partition.groups, left, partition.table.find(left), block_size or None)
    is_chosen = np.isin(left, chosen)
    parted = np.intersect1d(ids[is_chosen], ids[~is_chosen])
    if parted.size:
        members = left[ids == parted[0]]
        raise InvalidArgumentError(
            f"samples {_named(members)} are a group, of which {int(np.isin(members, chosen).sum())} of {members.size} "
            f"are named; the claim is of whole groups, so name all of them or none",
            field="global_indexes",
        )


def _is_over(task: TaskLedger, rows: Indexes | None = None) -> LeaseExpiredError:
    what = "samples of this claim" if rows is None else f"samples {_named(rows)}"
    return LeaseExpiredError(
        f"{what} are no longer leased to this worker of task {task.name!r}: the lease ran out, was given back, or "
        f"consumption was reset; others may do the same work, so drop yours, and ask for a longer lease or extend it",
        metadata={} if rows is None else {"global_indexes": _named(rows)},
    )


def _named(rows: Indexes) -> str:
    named = ", ".join(map(str, rows[:_MOST_NAMED].tolist()))
    return named if rows.size <= _MOST_NAMED else f"{named} and {rows.size - _MOST_NAMED} more"
