"""The status of partitions and tasks, as reported to clients."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.results import (
    ClaimLease,
    ConsumptionStatus,
    EvictedUnits,
    FieldStatus,
    PartitionDescription,
    PartitionSummary,
    ProductionStatus,
    TaskStatus,
)
from tq_service.schema import SampleConsumption, check_range
from tq_service.serving.backlogs import NO_BACKLOG, Backlog, Backlogs, tasks_with_versions
from tq_service.serving.catalog import Catalog
from tq_service.serving.lookup import check_fields
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.plan import Indexes
from tq_service.state.table import DEAD_LETTERED, DROPPED, FAILED, HELD, LIVE, UNCLAIMED, is_open
from tq_service.step_times import StepTimes

_MOST_DEAD_LETTERED: Final = 100  # maximum number of dead-lettered samples listed in a status
_MOST_LEASES: Final = 20  # maximum number of leases listed in a status
_MOST_UNITS: Final = 1_024  # maximum number of evicted units per response
_MOST_CHARACTERS: Final = 1 << 19  # characters in the names of evicted units per response, which take up to 2 MiB
_CLAIM_ID_BYTES: Final = 4  # enough of the request_id to find a claim in the call log, but too little to acknowledge it


_NOTHING_CONSUMED: Final = ConsumptionStatus(
    consumed_count=0, total_count=0, skipped_count=0, sealed=False, complete=False, epoch=0
)


def consumption_of(partition: Partition | None, task_name: str, *, missing_ok: bool = False) -> ConsumptionStatus:
    """Return the consumption status of a task. If the partition is missing, no samples count as consumed.

    Raises:
        TaskNotFoundError: the partition declares its tasks and this task is not among them. Also raised if `missing_ok`
            is false, the task is not declared, and it has not requested samples yet.
    """
    if partition is None:
        return _NOTHING_CONSUMED
    consumed = replace(
        _NOTHING_CONSUMED,
        total_count=partition.inserted_count,
        skipped_count=partition.inserted_count - partition.open_count,
        sealed=partition.sealed,
        complete=partition.is_whole and partition.open_count == 0,
        expected_count=partition.expected_count,
    )
    if missing_ok and task_name not in partition.tasks:
        partition.check_task(task_name)
        return consumed
    task = partition.known_task(task_name)
    return replace(
        consumed,
        consumed_count=task.consumed_count,
        skipped_count=_skipped_count(partition, task),
        complete=_is_complete(partition, task),
        epoch=task.epoch,
        leased_count=task.leased_count,
        dead_lettered_count=task.dead_lettered_count,
    )


def consumption_states(
    partition: Partition, task_name: str, positions: Indexes, *, missing_ok: bool = False
) -> NDArray[np.uint8]:
    """Return each sample's consumption state for a task, as `SampleConsumption` values of shape `(n,)`.

    Raises:
        TaskNotFoundError: see `consumption_of`.
    """
    states = np.full(positions.size, SampleConsumption.LEFT, np.uint8)
    if missing_ok and task_name not in partition.tasks:
        partition.check_task(task_name)
        return states
    claims = partition.known_task(task_name).claim.data[positions]
    states[claims > UNCLAIMED] = SampleConsumption.CONSUMED
    states[claims < DROPPED] = SampleConsumption.LEASED
    states[claims == DEAD_LETTERED] = SampleConsumption.DEAD_LETTERED
    states[claims == DROPPED] = SampleConsumption.DROPPED
    return states


def _skipped_count(partition: Partition, task: TaskLedger) -> int:
    """Return the number of samples that will certainly never be delivered to a task."""
    if task.end is not None:
        return task.end.skipped_count
    return partition.inserted_count - task.consumed_count - task.backlog


def _is_complete(partition: Partition, task: TaskLedger) -> bool:
    """True if no samples are left for a task. If there are rounds, only those that have begun count."""
    if task.end is None:
        return partition.is_whole and task.backlog == 0 and task.leased_count == 0
    known_count = task.end.consumed_count + task.end.skipped_count
    return partition.settings.samples_per_round is None or known_count == partition.inserted_count


def production_of(partition: Partition | None, names: Sequence[str], *, missing_ok: bool = False) -> ProductionStatus:
    """Return how many samples have data in all given fields. The count is 0 if the partition is missing.

    Raises:
        InvalidArgumentError: `names` is empty.
        FieldNotFoundError: the partition lacks a field, and `missing_ok` is false.
    """
    if not names:
        raise InvalidArgumentError("data_fields is empty; specify at least one field", field="data_fields")
    if partition is None:
        return ProductionStatus(produced_count=0, total_count=0, complete=False)
    if not missing_ok:
        check_fields(partition, names)
    fields = [partition.cells.fields[name] for name in names if name in partition.cells.fields]
    if len(fields) < len(names):
        produced = 0
    elif len(fields) == 1:  # writes maintain this count
        produced = fields[0].row_count
    else:
        positions = partition.table.present_positions()
        is_produced = partition.cells.produced(names, positions) & is_open(partition.state[positions])
        produced = int(np.count_nonzero(is_produced))
    total = partition.open_count
    is_complete = partition.is_whole and produced == total
    return ProductionStatus(produced_count=produced, total_count=total, complete=is_complete)


def summary_of(partition: Partition) -> PartitionSummary:
    """Return the summary of a partition."""
    return PartitionSummary(
        partition_id=partition.partition_id,
        incarnation=partition.incarnation,
        inserted_count=partition.inserted_count,
        present_count=partition.table.present_count,
        sealed=partition.sealed,
    )


def description_of(catalog: Catalog, backlogs: Backlogs, partition: Partition) -> PartitionDescription:
    """Return a consistent description of a partition, its fields, and its tasks.

    Only the versions can be out of date, because they come from the last scan by `Backlogs.refresh`.
    """
    with_versions = {task for _, task in tasks_with_versions(partition)}
    return PartitionDescription(
        summary=summary_of(partition),
        expected_samples=partition.settings.expected_samples,
        live_count=partition.state_counts[LIVE],
        held_count=partition.state_counts[HELD],
        failed_count=partition.state_counts[FAILED],
        group_count=len(partition.groups),
        rollout_count=partition.groups.rollout_count,
        fields=tuple(
            FieldStatus(spec=field.spec, produced_count=field.row_count) for field in partition.cells.fields.values()
        ),
        tasks=tuple(
            status_of(
                catalog,
                partition,
                task,
                backlog=(backlogs.of(task) if task in with_versions else None) or NO_BACKLOG,
                leases=_leases_of(task),
            )
            for task in partition.tasks.values()
        ),
        custom_meta_columns=partition.meta.statuses,
        used_bytes=partition.cells.used_bytes,
        max_bytes=partition.settings.max_bytes,
        admissions=partition.settings.admissions,
        waiting_put_count=catalog.waiting_put_count(partition.partition_id),
        declared_tasks=partition.settings.tasks,
        samples_per_round=partition.settings.samples_per_round,
        release=partition.settings.release,
        released_count=partition.released_count,
        expired_count=partition.expired_count,
        revision=catalog.history.revision(),
    )


def status_of(
    catalog: Catalog,
    partition: Partition,
    task: TaskLedger,
    *,
    backlog: Backlog = NO_BACKLOG,
    leases: tuple[ClaimLease, ...] = (),
) -> TaskStatus:
    """Return the status of a task.

    Args:
        catalog: catalog that contains the partition.
        partition: partition that contains the task.
        task: the task's ledger.
        backlog: the task's backlog as of the last scan.
        leases: leases to list, oldest first.
    """
    dead_lettered = partition.table.index[task.dead_lettered()[:_MOST_DEAD_LETTERED]]
    planner = catalog.known_planner(partition, task.name)
    rate = 0.0 if planner is None else planner.deliveries.per_second(time.monotonic())
    admission = None if task.outstanding is None else task.outstanding.admission
    return TaskStatus(
        task_name=task.name,
        epoch=task.epoch,
        consumed_count=task.consumed_count,
        skipped_count=_skipped_count(partition, task),
        planned_batch_count=task.next_batch_index,
        dp_size=task.dp_size or 0,
        complete=_is_complete(partition, task),
        leased_count=task.leased_count,
        dead_lettered_count=task.dead_lettered_count,
        dead_lettered_indexes=tuple(dead_lettered.tolist()),
        pending_count=task.backlog,
        redelivered_count=task.redelivered_count,
        oldest_version=backlog.oldest_version,
        staleness_versions=backlog.staleness_versions,
        leasing_claim_count=len(task.leases),
        recent_batches=tuple(task.recent_batches),
        leases=leases,
        trained_batch_count=task.trained + 1,
        saved_batch_count=task.saved + 1,
        outstanding_count=task.outstanding_count,
        running_count=None if admission is None or not admission.most_running else partition.held_count(admission.unit),
        unmatched_count=task.unmatched_count,
        too_small_count=task.too_small_count,
        late_count=task.late_count,
        overflow_count=task.overflow_count,
        delivered_count=task.delivered_count,
        refilled_count=task.refilled_count,
        waiting_count=catalog.waiting_count(partition, task.name),
        delivered_per_second=rate,
        step_times=None if planner is None else _step_times(planner.step_times, task.dp_size or 0),
    )


def _step_times(by_rank: Mapping[int, StepTimes], dp_size: int) -> StepTimes | None:
    """Return the total step times of all current ranks. Ranks from an earlier, larger `dp_size` are ignored."""
    return StepTimes.sum(times for rank, times in by_rank.items() if rank < dp_size)


def evicted_by(task: TaskLedger, after: int, limit: int) -> EvictedUnits:
    """Return the units that a task's claims evicted after the given sequence number, limited to one response.

    Raises:
        InvalidArgumentError: `after` or `limit` is out of range.
    """
    check_range("after", after, 0)
    check_range("limit", limit, 0, _MOST_UNITS, hint="; 0 is the maximum")
    units = task.evicted_after(after, limit or _MOST_UNITS)
    sizes = accumulate(len(unit.group or "") + len(unit.key or "") for unit in units)
    fitting = [unit for unit, size in zip(units, sizes, strict=True) if size <= _MOST_CHARACTERS]
    dropped_count = fitting[0].serial - after - 1 if fitting else 0
    return EvictedUnits(units=tuple(fitting), dropped_count=dropped_count)


def _leases_of(task: TaskLedger) -> tuple[ClaimLease, ...]:
    """Return a task's oldest leases, starting with the oldest."""
    now, leases = asyncio.get_running_loop().time(), list[ClaimLease]()
    for claim in islice(task.leases.values(), _MOST_LEASES):
        ago, left = now - claim.delivered_at, claim.deadline - now
        if not math.isfinite(claim.deadline):  # the service is shutting down; its successor restarts all leases
            ago, left = 0.0, 0.0 if claim.lease is None else claim.lease.seconds
        leases.append(
            ClaimLease(
                claim_id=claim.request_id[:_CLAIM_ID_BYTES].hex(),
                claim_name=claim.name,
                leased_count=claim.leased_count,
                delivered_ago_seconds=max(0.0, ago),
                ends_in_seconds=max(0.0, left),
            )
        )
    return tuple(leases)
