"""What `status` shows: the state of partitions as documents for programs, and as tables for people."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tq_service.client import Client, PartitionDescription
from tq_service.errors import PartitionNotFoundError

Document = dict[str, Any]


def read_partitions(client: Client, partition: str | None, timeout: float) -> list[Document]:
    """Return a document for each partition, or for the one named.

    Raises:
        PartitionNotFoundError: the one named is unknown.
    """
    if partition is not None:
        return [_document(client.describe_partition(partition, timeout=timeout))]
    documents = []
    for summary in client.list_partitions(timeout=timeout):
        try:
            documents.append(_document(client.describe_partition(summary.partition_id, timeout=timeout)))
        except PartitionNotFoundError:  # cleared since it was listed
            continue
    return documents


def _document(description: PartitionDescription) -> Document:
    summary = description.summary
    return {
        "partition_id": summary.partition_id,
        "incarnation": summary.incarnation.hex(),
        "sealed": summary.sealed,
        "expected": description.expected_samples,
        "inserted": summary.inserted_count,
        "present": summary.present_count,
        "live": description.live_count,
        "held": description.held_count,
        "failed": description.failed_count,
        "groups": description.group_count,
        "custom_meta": list(description.custom_meta_columns),
        "used_bytes": description.used_bytes,
        "max_bytes": description.max_bytes,
        "waiting_puts": description.waiting_put_count,
        "staleness_limits": [dataclasses.asdict(limit) for limit in description.staleness_limits],
        "fields": [
            {
                "name": field.spec.name,
                "dtype": field.spec.dtype,
                "layout": field.spec.layout.value if field.spec.layout else None,
                "row_shape": None if field.spec.row_shape is None else list(field.spec.row_shape),
                "produced": field.produced_count,
            }
            for field in description.fields
        ],
        "tasks": [
            {
                "task_name": task.task_name,
                "epoch": task.epoch,
                "consumed": task.consumed_count,
                "skipped": task.skipped_count,
                "leased": task.leased_count,
                "dead_lettered": task.dead_lettered_count,
                "dead_lettered_indexes": list(task.dead_lettered_indexes),
                "waiting": task.waiting_count,
                "planned_batches": task.planned_batch_count,
                "dp_size": task.dp_size,
                "complete": task.complete,
            }
            for task in description.tasks
        ],
    }


def render(documents: list[Document]) -> RenderableType:
    """Return partitions in one table, and below it fields and tasks of each."""
    if not documents:
        return Text("no partitions")
    parts: list[RenderableType] = [_partitions(documents)]
    if any(document["fields"] for document in documents):
        parts += [Text(), _fields(documents)]
    if any(document["tasks"] for document in documents):
        parts += [Text(), _tasks(documents)]
    if any(document["staleness_limits"] or document["max_bytes"] is not None for document in documents):
        parts += [Text(), _bounds(documents)]
    return Group(*parts)


def _table(*headings: str) -> Table:
    """Return a table whose columns are numbers, but for those whose heading ends in a full stop (left out)."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        is_text = heading.endswith(".")
        table.add_column(heading.rstrip("."), justify="left" if is_text else "right", no_wrap=is_text)
    return table


def _partitions(documents: list[Document]) -> Table:
    table = _table(
        "partition.", "inserted", "expected", "present", "live", "held", "failed", "groups", "bytes", "state."
    )
    for document in documents:
        expected = "-" if document["expected"] is None else f"{document['expected']:,}"
        counts = [f"{document[name]:,}" for name in ("present", "live", "held", "failed", "groups")]
        counts.append(decimal(document["used_bytes"]))
        state = "sealed" if document["sealed"] else "open"
        table.add_row(Text(document["partition_id"]), f"{document['inserted']:,}", expected, *counts, state)
    return table


def _bounds(documents: list[Document]) -> Table:
    """Return one line for each bound of each partition."""
    table = _table("partition.", "puts wait for.", "at most", "of.", "puts that wait")
    for document in documents:
        bounds = [] if document["max_bytes"] is None else [("room", document["max_bytes"], "bytes")]
        for limit in document["staleness_limits"]:
            task, column = f"task {limit['task_name']}", limit["version_column"]
            most = [(limit["max_samples"], "samples left"), (limit["max_versions"], f"{column} ahead")]
            bounds += [(task, number, what) for number, what in most if number is not None]
        for task, number, what in bounds:
            waiting = f"{document['waiting_puts']:,}"
            table.add_row(Text(document["partition_id"]), Text(task), f"{number:,}", Text(what), waiting)
    return table


def _fields(documents: list[Document]) -> Table:
    table = _table("partition.", "field.", "dtype.", "layout.", "row shape.", "produced", "of")
    for document in documents:
        for field in document["fields"]:
            shape = "-" if field["row_shape"] is None else "x".join(map(str, field["row_shape"])) or "scalar"
            table.add_row(
                Text(document["partition_id"]),
                Text(field["name"]),
                field["dtype"] or "-",
                field["layout"] or "-",
                "-" if field["layout"] == "object" else shape,
                f"{field['produced']:,}",
                f"{document['present']:,}",
            )
    return table


def _tasks(documents: list[Document]) -> Table:
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
    for document in documents:
        for task in document["tasks"]:
            counts = [f"{task[name]:,}" for name in ("leased", "skipped", "dead_lettered", "waiting")]
            table.add_row(
                Text(document["partition_id"]),
                Text(task["task_name"]),
                str(task["epoch"]),
                str(task["dp_size"] or "-"),
                f"{task['planned_batches']:,}",
                f"{task['consumed']:,}",
                f"{document['inserted']:,}",
                *counts,
                "complete" if task["complete"] else "active",
            )
    return table
