"""Answers of the domain as answers of the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tq_service.domain.catalog import Catalog, Claimed
from tq_service.domain.changes.samples import Written
from tq_service.domain.claims.ledger import QueueClaim, TaskLedger
from tq_service.domain.partition import Partition
from tq_service.domain.plan import Indexes, RankPlan
from tq_service.domain.states import FAILED, HELD, LIVE
from tq_service.domain.tables.cells import CellRuns, Put
from tq_service.schema import EndCounts
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import metadata_pb2
from tq_service.wire.index_ranges import set_indexes
from tq_service.wire.mapper import to_message
from tq_service.wire.metadata import encode_meta_columns, encode_spec

_MOST_DEAD_LETTERED = 100  # named in a status

Endpoints = Mapping[str, metadata_pb2.StorageEndpoint]


def written_meta(written: Written) -> metadata_pb2.BatchMeta:
    """Return what a write answers: only what the client does not know already."""
    meta = metadata_pb2.BatchMeta(
        status=metadata_pb2.BATCH_STATUS_BATCH,
        partition_id=written.partition.partition_id,
        incarnation=written.partition.incarnation,
        fields=[encode_spec(spec) for spec in written.specs],
    )
    set_indexes(meta, written.global_indexes)
    return meta


def claim_meta(
    partition_id: str,
    claimed: Claimed,
    task_name: str,
    data_fields: Sequence[str],
    endpoints: Endpoints,
    *,
    now: float,
) -> metadata_pb2.BatchMeta:
    """Return what a claim answers; `now` by the clock of the event loop."""
    partition, answer = claimed.partition, claimed.answer
    if partition is None:
        return metadata_pb2.BatchMeta(status=metadata_pb2.BATCH_STATUS_NOT_YET, partition_id=partition_id)
    epoch = partition.tasks[task_name].epoch
    if isinstance(answer, RankPlan | QueueClaim):
        part = answer if isinstance(answer, RankPlan) else answer.plan.part()
        meta = samples_meta(partition, part.rows, data_fields, endpoints)
        meta.epoch = epoch
        _add_steps(meta, part)
        if isinstance(answer, QueueClaim) and answer.delivery_counts is not None:
            meta.claim_request_id = answer.request_id
            meta.lease_seconds = answer.leased_seconds(now)
            meta.delivery_counts.extend(answer.delivery_counts.tolist())
        return meta
    end = answer if isinstance(answer, EndCounts) else None
    return metadata_pb2.BatchMeta(
        status=metadata_pb2.BATCH_STATUS_END if end is not None else metadata_pb2.BATCH_STATUS_NOT_YET,
        partition_id=partition_id,
        incarnation=partition.incarnation,
        epoch=epoch,
        skipped=0 if end is None else end.skipped,
        end=None if end is None else to_message(metadata_pb2.EndCounts, end),
    )


def samples_meta(
    partition: Partition,
    rows: Indexes,
    data_fields: Sequence[str],
    endpoints: Endpoints,
) -> metadata_pb2.BatchMeta:
    """Return what is known of samples that are there, and where those of their fields are that all of them have."""
    positions = partition.table.find(rows)
    meta = located_meta(partition, positions, data_fields, endpoints)
    if partition.groups.in_use:
        meta.groups.extend(_names(partition.groups.names_of(positions)))
    meta.custom_meta.extend(encode_meta_columns(partition.meta.read_all(positions)))
    return meta


def located_meta(
    partition: Partition,
    positions: Indexes,
    data_fields: Sequence[str],
    endpoints: Endpoints,
) -> metadata_pb2.BatchMeta:
    """Return samples at positions, their keys, and where those of their fields are that all of them have."""
    known = [name for name in data_fields if name in partition.cells.fields]
    meta = metadata_pb2.BatchMeta(
        status=metadata_pb2.BATCH_STATUS_BATCH,
        partition_id=partition.partition_id,
        incarnation=partition.incarnation,
        keys=_names(partition.key.data[positions].tolist()) if not partition.key.is_blank else (),
        fields=[encode_spec(partition.cells.fields[name].spec) for name in known],
    )
    set_indexes(meta, partition.table.index.data[positions])
    _add_locations(meta.locations, partition.cells.locate(known, positions), endpoints)
    return meta


def _names(names: Sequence[str | None]) -> list[str]:
    return [name or "" for name in names] if any(names) else []


def _add_locations(message: metadata_pb2.Locations, runs: Iterable[CellRuns], endpoints: Endpoints) -> None:
    storage_indexes: dict[tuple[str, bytes], int] = {}
    put_indexes: dict[Put, int] = {}
    for run in runs:
        for put in run.puts:
            if put in put_indexes:
                continue
            storage = (put.storage_id, put.boot_id)
            if storage not in storage_indexes:
                storage_indexes[storage] = len(storage_indexes)
                known = endpoints.get(put.storage_id)
                storage_message = message.storages.add()
                if known is not None:
                    storage_message.CopyFrom(known)
                storage_message.storage_id, storage_message.boot_id = storage
                storage_message.is_away = known is None
            put_indexes[put] = len(put_indexes)
            message.puts.add(put_id=put.put_id, storage_index=storage_indexes[storage])
        numbers = [put_indexes[put] for put in run.puts]
        message.runs.add(
            field_names=run.field_names,
            put_indexes=[numbers[index] for index in run.put_indexes],
            first_rows=run.first_rows,
            row_counts=run.row_counts,
        )


def _add_steps(meta: metadata_pb2.BatchMeta, part: RankPlan) -> None:
    for packs in part.steps:
        step = meta.steps.add()
        for pack in packs:
            step.packs.add(
                rows=pack.positions.tolist(),
                lengths=() if pack.lengths is None else pack.lengths.tolist(),
                padding_tokens=pack.padding_tokens,
            )


def consumption(partition: Partition, task: TaskLedger) -> pb.CheckConsumptionResponse:
    """Return what a task has consumed."""
    return pb.CheckConsumptionResponse(
        consumed=task.consumed_count,
        total=partition.inserted_count,
        skipped=skipped_count(partition, task),
        sealed=partition.sealed,
        complete=is_complete(partition, task),
        epoch=task.epoch,
        leased=task.leased_count,
        dead_lettered=task.dead_lettered_count,
    )


def skipped_count(partition: Partition, task: TaskLedger) -> int:
    """Return how many samples a task will never get, as far as is known."""
    if task.end is not None:
        return task.end.skipped
    return partition.inserted_count - task.consumed_count - task.backlog


def is_complete(partition: Partition, task: TaskLedger) -> bool:
    """Return whether nothing is left for a task."""
    return task.end is not None or (partition.sealed and task.backlog == 0 and task.leased_count == 0)


def production(partition: Partition, names: Sequence[str]) -> pb.CheckProductionResponse:
    """Return how many samples have all of some fields."""
    if len(names) == 1:  # counted as they are written
        produced = partition.cells.fields[names[0]].produced_count
    else:
        produced = int(np.count_nonzero(partition.cells.produced(names, partition.table.present_positions())))
    total = partition.open_count
    return pb.CheckProductionResponse(produced=produced, total=total, complete=partition.sealed and produced == total)


def summary(partition: Partition) -> pb.PartitionSummary:
    """Return a partition in short."""
    return pb.PartitionSummary(
        partition_id=partition.partition_id,
        incarnation=partition.incarnation,
        inserted_count=partition.inserted_count,
        present_count=partition.table.present_count,
        sealed=partition.sealed,
    )


def description(catalog: Catalog, partition: Partition) -> pb.DescribePartitionResponse:
    """Return a partition with its fields and tasks."""
    return pb.DescribePartitionResponse(
        summary=summary(partition),
        expected_samples=partition.settings.expected_samples,
        live_count=partition.state_counts[LIVE],
        held_count=partition.state_counts[HELD],
        failed_count=partition.state_counts[FAILED],
        group_count=len(partition.groups),
        fields=[
            pb.FieldStatus(spec=encode_spec(field.spec), produced_count=field.produced_count)
            for field in partition.cells.fields.values()
        ],
        tasks=[
            pb.TaskStatus(
                task_name=task.name,
                epoch=task.epoch,
                consumed_count=task.consumed_count,
                skipped_count=skipped_count(partition, task),
                planned_batch_count=task.next_batch_index,
                dp_size=task.dp_size or 0,
                waiting_count=catalog.waiting_count(partition, task.name),
                complete=is_complete(partition, task),
                leased_count=task.leased_count,
                dead_lettered_count=task.dead_lettered_count,
                dead_lettered_indexes=partition.table.index.data[task.dead_lettered()[:_MOST_DEAD_LETTERED]].tolist(),
            )
            for task in partition.tasks.values()
        ],
        custom_meta_columns=partition.meta.names(),
        used_bytes=partition.cells.used_bytes,
        max_bytes=partition.settings.max_bytes,
        staleness_limits=[to_message(pb.StalenessLimit, limit) for limit in partition.settings.staleness_limits],
        waiting_put_count=catalog.waiting_put_count(partition.partition_id),
    )
