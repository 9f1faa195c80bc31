"""`tq-service partition`: lists, shows, seals and clears partitions, and peeks at their samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tq_service.cli.addresses import Partition, open_client
from tq_service.cli.options import Yes, make_group, verb
from tq_service.cli.output import AsJson, console, print_json, print_table, table
from tq_service.errors import FieldNotFoundError, InvalidArgumentError, SampleNotFoundError, StaleIncarnationError

if TYPE_CHECKING:
    from tq_service.client import BatchMeta, Client, PartitionDescription

EXAMPLES = """\
  tq-service partition ls train@
  tq-service partition show train@3
  tq-service partition peek train@3 --limit 3
  tq-service partition seal train@3
  tq-service partition clear train@3 --yes"""

group = make_group("List, show, seal and clear partitions, and peek at their samples.", EXAMPLES)

_MOST_SHOWN = 6  # values of a tensor
_MOST_LOOK_UPS = 5  # of samples that are cleared before they are read


@verb(group, "ls")
def ls(
    prefix: Annotated[str, typer.Argument(help="How their names begin.", show_default=False)] = "",
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """List partitions with their numbers of samples."""
    with open_client(**service) as client:
        found = list(client.list_partitions(prefix))
    if as_json:
        print_json(found)
        return
    rows = [
        (each.partition_id, "sealed" if each.sealed else "open", each.inserted_count, each.present_count)
        for each in found
    ]
    print_table("partition, state, >samples, >not cleared", rows)


@verb(group, "show")
def show(partition: Partition, as_json: AsJson = False, **service: Any) -> None:
    """Show a partition: its samples by state, fields, custom_meta, limits and tasks."""
    from tq_service.cli.status import read  # noqa: PLC0415  (--help does without)
    from tq_service.cli.status_view import as_document, blocks_of  # noqa: PLC0415  (as above)

    with open_client(**service) as client:
        status = read(client, [partition], "")
    if as_json:
        document = as_document(status)
        print_json({"partitions": document["partitions"], "waits": document["waits"]})
        return
    heading, blocks = blocks_of(status)
    for block in blocks:
        first, *tasks = block.lines
        typer.echo("\n".join([first, *([heading] if tasks else []), *tasks]))
    for described in status.partitions:
        typer.echo(f"incarnation {described.summary.incarnation.hex()}")
        for headings, rows_of in _TABLES:
            if rows := list(rows_of(described)):
                typer.echo()
                console().print(table(headings, rows))


@verb(group, "seal")
def seal(partition: Partition, as_json: AsJson = False, **service: Any) -> None:
    """Say that no new samples will come, so that its tasks come to their end."""
    with open_client(**service) as client:
        count = client.seal_partition(partition)
    if as_json:
        print_json({"partition_id": partition, "inserted_count": count})
        return
    typer.echo(f"sealed {partition} with {count:,} samples")


@verb(group, "clear", timeout=60.0)
def clear(
    partitions: Annotated[list[str], typer.Argument(help="Names of partitions.")],
    yes: Yes = False,
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """Remove partitions with all they hold; calls that wait on them end."""
    with open_client(**service) as client:
        counts = {name: client.describe_partition(name).summary.present_count for name in dict.fromkeys(partitions)}
        confirm(f"clear {', '.join(counts)} with {sum(counts.values()):,} samples?", yes)
        cleared = [{"partition_id": name, "cleared_count": client.clear_partition(name)} for name in counts]
    if as_json:
        print_json(cleared)
        return
    for each in cleared:
        typer.echo(f"cleared {each['partition_id']} with {each['cleared_count']:,} samples")


def confirm(question: str, yes: bool) -> None:
    """Ask before something that cannot be undone.

    Raises:
        InvalidArgumentError: there is no terminal to answer at.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgumentError(f"{question} give --yes, since there is no terminal to ask at", field="yes")
    typer.confirm(question, abort=True, err=True)


@verb(group, "peek", timeout=30.0)
def peek(
    partition: Partition,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of samples.")] = 3,
    field: Annotated[
        list[str] | None, typer.Option(help="Only this field; may be repeated.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """Show the first samples of a partition: names, custom_meta and what their fields hold."""
    with open_client(**service) as client:
        rows = _first_samples(client, partition, limit, field)
    if as_json:
        print_json([{**row, "fields": {name: plain(value) for name, value in row["fields"].items()}} for row in rows])
        return
    if not rows:
        typer.echo(f"partition {partition!r} has no samples")
    for row in rows:
        names = "".join(f"  {what} {row[what]}" for what in ("key", "group") if row[what])
        typer.echo(f"sample {row['global_index']}{names}")
        shown = {**row["custom_meta"], **{name: readable(value) for name, value in row["fields"].items()}}
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            typer.echo(f"  {name:<{width}}  {value}")


def _first_samples(client: Client, partition: str, limit: int, wanted: list[str] | None) -> list[dict[str, Any]]:
    """Return the first samples of a partition, looked up again if a running job cleared some before they were read.

    The first read imports torch, which takes seconds; the next ones are quick.
    """
    for _ in range(_MOST_LOOK_UPS):
        meta, _cursor = client.lookup_samples(partition, limit=limit)
        rows = [_peeked(client, meta.select_samples([place]), wanted) for place in range(meta.size)]
        if None not in rows:
            break
    return [row for row in rows if row is not None]


def _peeked(client: Client, sample: BatchMeta, wanted: list[str] | None) -> dict[str, Any] | None:
    """Return a sample with its data, None if it has been cleared since it was looked up."""
    fields = [name for name, has in sample.produced.items() if has.all() and (wanted is None or name in wanted)]
    data: Any = {}
    if fields:
        try:
            data = client.get_data(sample, data_fields=fields, missing="skip")
        except (FieldNotFoundError, SampleNotFoundError, StaleIncarnationError):  # nothing is left, or all is new
            return None
        if not len(data[fields[0]]):
            return None
    return {
        "global_index": sample.global_indexes[0],
        "key": sample.keys[0] if sample.keys else None,
        "group": sample.groups[0] if sample.groups else None,
        "custom_meta": sample.custom_meta[0] if sample.custom_meta else {},
        "fields": {name: data[name][0] for name in fields},
    }


def plain(value: Any) -> Any:
    """Return a value of a field for JSON: arrays as lists, what JSON does not know as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | list | dict | None) else repr(value)


def readable(value: Any) -> str:
    """Return a value of a field in a line: of an array its dtype, shape and first values."""
    if not hasattr(value, "tolist"):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"
    dtype = str(value.dtype).removeprefix("torch.")
    flat = value.reshape(-1)
    first = ", ".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in flat[:_MOST_SHOWN].tolist())
    more = ", ..." if flat.shape[0] > _MOST_SHOWN else ""
    shape = "x".join(map(str, value.shape))
    return f"{first} ({dtype})" if not shape else f"[{first}{more}] ({dtype} {shape})"


Rows = Iterator[tuple[object, ...]]


def _fields(partition: PartitionDescription) -> Rows:
    for field in partition.fields:
        spec = field.spec
        shape = None if spec.row_shape is None else "x".join("*" if n < 0 else str(n) for n in spec.row_shape)
        yield (
            spec.name,
            spec.dtype or None,
            spec.layout,
            None if spec.layout == "object" else shape or ("scalar" if shape is not None else None),
            field.produced_count,
            partition.summary.present_count,
        )


def _meta_columns(partition: PartitionDescription) -> Rows:
    for column in partition.custom_meta_columns:
        yield column.name, " and ".join(filter(None, (column.kind, "json" if column.has_json else "")))


def _tasks(partition: PartitionDescription) -> Rows:
    for task in partition.tasks:
        yield (
            task.task_name, task.epoch, task.dp_size or None, task.planned_batch_count, task.consumed_count,
            task.pending_count, task.leased_count, task.waiting_count,
        )  # fmt: skip


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
            yield awaited, most, what


_TABLES = (
    ("field, dtype, layout, row shape, >samples, >of", _fields),
    ("custom_meta, type", _meta_columns),
    ("task, >epoch, >ranks, >batches, >consumed, >pending, >unacknowledged, >waiting", _tasks),
    ("puts wait for, >at most, of", _bounds),
)
