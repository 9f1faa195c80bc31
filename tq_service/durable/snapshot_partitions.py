"""Partitions of the domain as records of a snapshot, and back: what is known of each, its columns, its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tq_service.domain.aging_log import Entry, FrozenLog
from tq_service.domain.claims.ledger import Batch, QueueClaim
from tq_service.domain.frozen import (
    FrozenField,
    FrozenGroups,
    FrozenMeta,
    FrozenPartition,
    FrozenPuts,
    FrozenTable,
    FrozenTask,
)
from tq_service.domain.tables.column import FrozenColumn
from tq_service.durable.messages import decode_end, decode_settings, encode_end, encode_settings
from tq_service.durable.snapshot_columns import encode_numbers, encode_puts, encode_strings
from tq_service.durable.snapshot_reader import SnapshotReader
from tq_service.durable.snapshot_tasks import (
    PartEncoder,
    decode_batches,
    decode_claims,
    decode_ids,
    encode_batches,
    encode_ids,
    encode_records,
)
from tq_service.v1 import snapshot_pb2 as pb
from tq_service.wire.metadata import decode_spec, encode_spec

_META_TYPES: Final = {"i": np.int64, "f": np.float64, "b": np.bool_, "O": np.object_}


def encode_partition(partition: FrozenPartition) -> Iterator[pb.SnapshotRecord]:
    """Yield the records of a partition."""
    message = pb.SnapshotPartition(
        settings=encode_settings(partition.partition_id, partition.settings),
        incarnation=partition.incarnation,
        sealed=partition.sealed,
        insert_step=partition.insert_size_gcd,
        next_index=partition.table.next_index,
        row_count=partition.state.size,
        has_groups=partition.groups.in_use,
        group_slot_count=partition.groups.names.size,
        put_slot_count=partition.puts.puts.size,
        meta_columns=[
            pb.SnapshotMetaColumn(name=column.name, kind=column.values.dtype.kind) for column in partition.meta
        ],
        fields=[
            pb.SnapshotField(spec=encode_spec(field.spec), has_lengths=field.length is not None)
            for field in partition.fields
        ],
        task_count=len(partition.tasks),
    )
    yield pb.SnapshotRecord(partition=message)
    for column in _encode_columns(partition):
        yield pb.SnapshotRecord(column=column)
    for task in partition.tasks:
        yield from _encode_task(task)


def _encode_columns(partition: FrozenPartition) -> Iterator[pb.SnapshotColumn]:
    """Yield the columns in the order in which they are decoded."""
    yield from encode_numbers("index", partition.table.index)
    yield from encode_numbers("present", partition.table.present)
    yield from encode_numbers("state", partition.state)
    yield from encode_strings("key", partition.key)
    groups = partition.groups
    yield from encode_numbers("group", groups.slot_of_row)
    yield from encode_strings("group names", groups.names)
    yield from encode_numbers("group sizes", groups.declared)
    yield from encode_numbers("group members", groups.members)
    yield from encode_numbers("failed members", groups.failed)
    yield from encode_numbers("cleared members", groups.cleared)
    yield from encode_numbers("held members", groups.held)
    yield from encode_numbers("closed groups", groups.closed)
    for meta in partition.meta:
        encode = encode_strings if meta.values.dtype.kind == "O" else encode_numbers
        yield from encode(f"custom_meta {meta.name}", meta.values)
        yield from encode_numbers(f"presence of custom_meta {meta.name}", meta.present)
    yield from encode_puts("puts", partition.puts.puts)
    yield from encode_numbers("cells of puts", partition.puts.cell_counts)
    yield from encode_numbers("cells puts were made with", partition.puts.made_cell_counts)
    yield from encode_numbers("bytes of puts", partition.puts.value_bytes)
    for field in partition.fields:
        yield from encode_numbers(f"cells of field {field.spec.name}", field.cell)
        if field.length is not None:
            yield from encode_numbers(f"lengths of field {field.spec.name}", field.length)


def decode_partition(reader: SnapshotReader) -> FrozenPartition:
    """Return the partition that is next in a snapshot.

    Raises:
        SnapshotDamagedError, ValueError, LookupError: its records are not those of a partition.
    """
    message: pb.SnapshotPartition = reader.take("partition")
    rows = message.row_count
    return FrozenPartition(  # arguments are evaluated in the order of the records
        partition_id=message.settings.partition_id,
        incarnation=message.incarnation,
        settings=decode_settings(message.settings),
        sealed=message.sealed,
        insert_size_gcd=message.insert_step,
        table=_decode_table(message, reader),
        state=reader.column(rows, np.uint8),
        key=reader.column(rows, np.object_),
        groups=_decode_groups(message, reader),
        meta=[
            FrozenMeta(
                name=column.name,
                values=reader.column(rows, _META_TYPES[column.kind]),
                present=reader.column(rows, np.bool_),
            )
            for column in message.meta_columns
        ],
        puts=FrozenPuts(
            puts=reader.column(message.put_slot_count, np.object_),
            cell_counts=reader.column(message.put_slot_count, np.int64),
            made_cell_counts=reader.column(message.put_slot_count, np.int64),
            value_bytes=reader.column(message.put_slot_count, np.int64),
        ),
        fields=[
            FrozenField(
                spec=decode_spec(field.spec),
                cell=reader.column(rows, np.int64),
                length=reader.column(rows, np.int64) if field.has_lengths else None,
            )
            for field in message.fields
        ],
        tasks=[_decode_task(reader, rows) for _ in range(message.task_count)],
    )


def _decode_table(message: pb.SnapshotPartition, reader: SnapshotReader) -> FrozenTable:
    index = reader.column(message.row_count, np.int64)
    present = reader.column(message.row_count, np.bool_)
    return FrozenTable(
        next_index=message.next_index,
        present_count=int(np.count_nonzero(present.values())),
        index=index,
        present=present,
    )


def _decode_groups(message: pb.SnapshotPartition, reader: SnapshotReader) -> FrozenGroups:
    slots = message.group_slot_count

    def counter() -> FrozenColumn:
        return reader.column(slots, np.int64)

    return FrozenGroups(
        in_use=message.has_groups,
        slot_of_row=reader.column(message.row_count, np.int64),
        names=reader.column(slots, np.object_),
        declared=counter(),
        members=counter(),
        failed=counter(),
        cleared=counter(),
        held=counter(),
        closed=reader.column(slots, np.bool_),
    )


def _encode_task(task: FrozenTask) -> Iterator[pb.SnapshotRecord]:
    message = pb.SnapshotTask(
        name=task.name,
        epoch=task.epoch,
        dp_size=task.dp_size,
        next_batch_index=task.next_batch_index,
        end=None if task.end is None else encode_end(task.end),
        consumed_count=task.consumed_count,
        open_count=task.backlog,
        serial=task.serial,
        has_deliveries=task.deliveries is not None,
        set_aside_count=task.dead_lettered_count,
        claim_count=len(task.records) + len(task.batches_without_rows),
        rowless_count=len(task.batches_without_rows),
        released_count=sum(map(len, task.released.blocks)),
        expired_count=sum(map(len, task.expired.blocks)),
    )
    yield pb.SnapshotRecord(task=message)
    for column in encode_numbers("claims", task.claim):
        yield pb.SnapshotRecord(column=column)
    if task.deliveries is not None:
        for column in encode_numbers("deliveries", task.deliveries):
            yield pb.SnapshotRecord(column=column)
    encoder = PartEncoder()
    yield from encode_records(task.records, encoder)
    yield from encode_batches(task.batches_without_rows, encoder, have_rows=False)
    yield from encode_ids(task.released)
    yield from encode_ids(task.expired)


def _decode_task(reader: SnapshotReader, rows: int) -> FrozenTask:
    message: pb.SnapshotTask = reader.take("task")
    claim = reader.column(rows, np.int64)
    deliveries = reader.column(rows, np.int32) if message.has_deliveries else None
    records: list[Batch | QueueClaim] = []
    batches_without_rows: list[Batch] = []
    left = message.claim_count
    while left > 0:
        if reader.kind == "claims":
            claims = decode_claims(reader.take("claims"))
            records.extend(claims)
            left -= len(claims)
            continue
        batches = decode_batches(reader.take("batches"))
        left -= len(batches)
        records.extend(batch for batch in batches if batch.serial)
        batches_without_rows.extend(batch for batch in batches if not batch.serial)
    if left < 0 or len(batches_without_rows) != message.rowless_count:
        raise ValueError(f"task {message.name!r} has another number of claims than it says, {message.claim_count}")
    return FrozenTask(
        name=message.name,
        epoch=message.epoch,
        dp_size=message.dp_size if message.HasField("dp_size") else None,
        next_batch_index=message.next_batch_index,
        end=decode_end(message.end) if message.HasField("end") else None,
        consumed_count=message.consumed_count,
        backlog=message.open_count,
        serial=message.serial,
        claim=claim,
        records=records,
        batches_without_rows=batches_without_rows,
        deliveries=deliveries,
        dead_lettered_count=message.set_aside_count,
        released=_decode_ids(reader, message.released_count),
        expired=_decode_ids(reader, message.expired_count),
    )


def _decode_ids(reader: SnapshotReader, count: int) -> FrozenLog:
    blocks: list[list[Entry[Any]]] = []
    while (left := count - sum(map(len, blocks))) > 0:
        blocks.append(decode_ids(reader.take("ids")))
    if left < 0:
        raise ValueError(f"there are {-left} ids too many")
    return FrozenLog(blocks=blocks)
