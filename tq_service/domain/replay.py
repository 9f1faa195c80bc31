"""Changes of one partition, made again."""

from __future__ import annotations

import numpy as np

from tq_service.domain.changes.claims import (
    BatchPlanned,
    ClaimAcked,
    ClaimExtended,
    ClaimReleased,
    ConsumptionReset,
    EndReached,
    LeaseExpired,
    QueueClaimed,
    TaskSeen,
)
from tq_service.domain.claims import queue_claims
from tq_service.domain.claims.ledger import TaskLedger
from tq_service.domain.claims.request import LeaseTerms
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes


def apply_change(partition: Partition, change: object) -> None:
    """Make a change of a partition that was told of before.

    Raises:
        TqError, LookupError, ValueError: it does not fit the state of the partition.
    """
    match change:
        case TaskSeen():
            partition.task(change.task_name)
        case _:
            _apply_to_task(partition, partition.known_task(getattr(change, "task_name", "")), change)


def _apply_to_task(partition: Partition, task: TaskLedger, change: object) -> None:
    match change:
        case BatchPlanned():
            rows = np.concatenate([part.rows for part in change.plan.ranks])
            partition.record_batch(task, change.batch_spec, change.plan, _found(partition, rows))
        case EndReached():
            partition.record_end(task, change.dp_size, change.end)
        case QueueClaimed():
            positions = _found(partition, change.part.rows)
            partition.record_queue_claim(task, change.request_id, change.part, positions, _terms(change))
        case ClaimReleased():
            if change.is_final:
                queue_claims.release(partition, task, change.request_id, change.global_indexes)
            else:
                queue_claims.undo(partition, task, change.request_id)
        case ClaimAcked():
            queue_claims.acknowledge(partition, task, change.request_id, change.global_indexes)
        case ClaimExtended():
            queue_claims.extend(partition, task, change.request_id, change.lease_seconds)
        case LeaseExpired():
            queue_claims.expire(partition, task, change.request_id)
        case ConsumptionReset():
            partition.reset(task, keep_consumed=change.keep_consumed)
        case _:
            raise ValueError(f"{type(change).__name__} is no change of a partition")


def _terms(change: QueueClaimed) -> LeaseTerms | None:
    if change.lease_seconds is None:
        return None
    return LeaseTerms(
        seconds=change.lease_seconds, max_deliveries=change.max_deliveries, group_block_size=change.group_block_size
    )


def _found(partition: Partition, rows: Indexes) -> Indexes:
    positions = partition.table.find(rows)
    if bool((positions < 0).any()):
        raise LookupError(f"partition {partition.partition_id!r} lacks {int((positions < 0).sum())} claimed samples")
    return positions
