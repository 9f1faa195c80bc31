"""What `status` shows: the state of partitions as JSON for programs, and as tables for people."""

from __future__ import annotations

import contextlib
import dataclasses
import json

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

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


def to_json(descriptions: list[PartitionDescription], indent: int | None) -> str:
    """Return partitions as JSON: the fields of `tq.PartitionDescription`, those of its summary first."""
    documents = [dataclasses.asdict(one) for one in descriptions]
    partitions = [{**document.pop("summary"), **document} for document in documents]
    return json.dumps({"partitions": partitions}, indent=indent, default=bytes.hex)


def render(partitions: list[PartitionDescription]) -> RenderableType:
    """Return partitions in one table, and below it fields and tasks of each."""
    if not partitions:
        return Text("no partitions")
    parts: list[RenderableType] = [_partitions(partitions)]
    if any(partition.fields for partition in partitions):
        parts += [Text(), _fields(partitions)]
    if any(partition.tasks for partition in partitions):
        parts += [Text(), _tasks(partitions)]
    if any(partition.staleness_limits or partition.max_bytes is not None for partition in partitions):
        parts += [Text(), _bounds(partitions)]
    return Group(*parts)


def _table(*headings: str) -> Table:
    """Return a table whose columns are numbers, but for those whose heading ends in a full stop (left out)."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        is_text = heading.endswith(".")
        table.add_column(heading.rstrip("."), justify="left" if is_text else "right", no_wrap=is_text)
    return table


def _partitions(partitions: list[PartitionDescription]) -> Table:
    table = _table(
        "partition.", "inserted", "expected", "present", "live", "held", "failed", "groups", "bytes", "state."
    )
    for partition in partitions:
        summary = partition.summary
        expected = "-" if partition.expected_samples is None else f"{partition.expected_samples:,}"
        counts = (
            summary.present_count,
            partition.live_count,
            partition.held_count,
            partition.failed_count,
            partition.group_count,
        )
        table.add_row(
            Text(summary.partition_id),
            f"{summary.inserted_count:,}",
            expected,
            *(f"{count:,}" for count in counts),
            decimal(partition.used_bytes),
            "sealed" if summary.sealed else "open",
        )
    return table


def _bounds(partitions: list[PartitionDescription]) -> Table:
    """Return one line for each bound of each partition."""
    table = _table("partition.", "puts wait for.", "at most", "of.", "puts that wait")
    for partition in partitions:
        bounds = [] if partition.max_bytes is None else [("capacity", partition.max_bytes, "bytes")]
        for limit in partition.staleness_limits:
            task, column = f"task {limit.task_name}", limit.version_column
            most = [(limit.max_samples, "samples left"), (limit.max_versions, f"{column} ahead")]
            bounds += [(task, number, what) for number, what in most if number is not None]
        name, waiting = partition.summary.partition_id, f"{partition.waiting_put_count:,}"
        for task, number, what in bounds:
            table.add_row(Text(name), Text(task), f"{number:,}", Text(what), waiting)
    return table


def _fields(partitions: list[PartitionDescription]) -> Table:
    table = _table("partition.", "field.", "dtype.", "layout.", "row shape.", "produced", "of")
    for partition in partitions:
        for field in partition.fields:
            spec = field.spec
            shape = "-" if spec.row_shape is None else "x".join(map(str, spec.row_shape)) or "scalar"
            table.add_row(
                Text(partition.summary.partition_id),
                Text(spec.name),
                spec.dtype or "-",
                spec.layout or "-",
                "-" if spec.layout == "object" else shape,
                f"{field.produced_count:,}",
                f"{partition.summary.present_count:,}",
            )
    return table


def _tasks(partitions: list[PartitionDescription]) -> Table:
    table = _table(
        "partition.",
        "task.",
        "epoch",
        "ranks",
        "batches",
        "consumed",
        "of",
        "leased",
        "skipped",
        "dead-lettered",
        "waiting calls",
        "state.",
    )
    for partition in partitions:
        for task in partition.tasks:
            counts = (task.leased_count, task.skipped_count, task.dead_lettered_count, task.waiting_count)
            table.add_row(
                Text(partition.summary.partition_id),
                Text(task.task_name),
                str(task.epoch),
                str(task.dp_size or "-"),
                f"{task.planned_batch_count:,}",
                f"{task.consumed_count:,}",
                f"{partition.summary.inserted_count:,}",
                *(f"{count:,}" for count in counts),
                "complete" if task.complete else "active",
            )
    return table
