"""What `status` shows: the state of partitions as JSON for programs, and as tables for people."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text

from tq_service.cli.output import table
from tq_service.client import Client, PartitionDescription
from tq_service.errors import PartitionNotFoundError


def read_partitions(client: Client, partition: str | None, timeout: float) -> list[PartitionDescription]:
    """Return descriptions of all partitions, or of the one named.

    Raises:
        PartitionNotFoundError: the one named is unknown.
    """
    if partition is not None:
        return [client.describe_partition(partition, timeout=timeout)]
    descriptions = []
    for summary in client.list_partitions(timeout=timeout):
        with contextlib.suppress(PartitionNotFoundError):  # cleared since it was listed
            descriptions.append(client.describe_partition(summary.partition_id, timeout=timeout))
    return descriptions


def as_document(descriptions: list[PartitionDescription]) -> dict[str, Any]:
    """Return partitions for JSON: the fields of `tq.PartitionDescription`, those of its summary first."""
    documents = [asdict(one) for one in descriptions]
    return {"partitions": [{**document.pop("summary"), **document} for document in documents]}


def render(partitions: list[PartitionDescription]) -> RenderableType:
    """Return partitions in one table, and below it fields, tasks and bounds of each."""
    if not partitions:
        return Text("no partitions")
    parts: list[RenderableType] = []
    for headings, rows_of in _TABLES:
        rows = [row for partition in partitions for row in rows_of(partition)]
        if rows:
            parts += [Text(), table(headings, rows, no_wrap=True)]
    return Group(*parts[1:])


Rows = Iterator[tuple[object, ...]]


def _facts(partition: PartitionDescription) -> Rows:
    summary = partition.summary
    yield (
        summary.partition_id,
        summary.inserted_count,
        partition.expected_samples,
        summary.present_count,
        partition.live_count,
        partition.held_count,
        partition.failed_count,
        partition.group_count,
        decimal(partition.used_bytes),
        _state(partition),
    )


def _state(partition: PartitionDescription) -> str:
    if partition.summary.sealed:
        return "sealed"
    return "open" if partition.samples_per_round is None else f"rounds of {partition.samples_per_round:,}"


def _fields(partition: PartitionDescription) -> Rows:
    for field in partition.fields:
        spec = field.spec
        shape = None if spec.row_shape is None else "x".join(map(str, spec.row_shape)) or "scalar"
        yield (
            partition.summary.partition_id,
            spec.name,
            spec.dtype or None,
            spec.layout,
            None if spec.layout == "object" else shape,
            field.produced_count,
            partition.summary.present_count,
        )


def _meta_columns(partition: PartitionDescription) -> Rows:
    for column in partition.custom_meta_columns:
        types = " and ".join(filter(None, (column.kind, "json" if column.has_json else "")))
        yield partition.summary.partition_id, column.name, types


def _tasks(partition: PartitionDescription) -> Rows:
    for task in partition.tasks:
        yield (
            partition.summary.partition_id,
            task.task_name,
            task.epoch,
            task.dp_size or None,
            task.planned_batch_count,
            task.consumed_count,
            partition.summary.inserted_count,
            task.leased_count,
            task.skipped_count,
            task.dead_lettered_count,
            task.waiting_count,
            "complete" if task.complete else "active",
        )


def _bounds(partition: PartitionDescription) -> Rows:
    bounds = [("capacity", partition.max_bytes, "bytes")]
    for limit in partition.staleness_limits:
        task = f"task {limit.task_name}"
        bounds += [
            (task, limit.max_samples, "samples left"),
            (task, limit.max_versions, f"{limit.version_column} ahead"),
        ]
    for awaited, most, what in bounds:
        if most is not None:
            yield partition.summary.partition_id, awaited, most, what, partition.waiting_put_count


_TABLES = (
    ("partition, >inserted, >expected, >present, >live, >held, >failed, >groups, >bytes, state", _facts),
    ("partition, field, dtype, layout, row shape, >produced, >of", _fields),
    ("partition, custom_meta, type", _meta_columns),
    (
        "partition, task, >epoch, >ranks, >batches, >consumed, >of, >leased, >skipped, >dead-lettered, >waiting calls, "
        "state",
        _tasks,
    ),
    ("partition, puts wait for, >at most, of, >puts that wait", _bounds),
)
