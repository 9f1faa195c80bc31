"""`tq-service partition`, `task` and `deadletter`: commands for partitions, samples and tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tq_service.cli import explain
from tq_service.cli.options import Answer, Partition, Prefix, Task, TaskOrAll, Yes, make_group, table, verb
from tq_service.errors import (
    FieldNotFoundError,
    InvalidArgumentError,
    SampleNotFoundError,
    StaleIncarnationError,
    TaskNotFoundError,
    nearest,
)

if TYPE_CHECKING:
    from tq_service.client import BatchMeta, Client
    from tq_service.results import PartitionDescription, TaskStatus

PARTITION = make_group("""\
  tq-service partition ls train@
  tq-service partition show train@3
  tq-service partition peek train@3 --limit 3
  tq-service partition seal train@3
  tq-service partition clear train@3 --yes""")
TASK = make_group("""\
  tq-service task show train@3
  tq-service task show train@3 update_actor --json
  tq-service task explain train@3 update_actor
  tq-service task evicted train@3 update_actor --after 41
  tq-service task reset train@3 update_actor --keep-consumed --yes""")
DEADLETTER = make_group("""\
  tq-service deadletter ls
  tq-service deadletter ls train@3 --json
  tq-service deadletter requeue train@3 reward
  tq-service deadletter requeue train@3 reward 17 18""")

_MOST_SHOWN = 6  # maximum number of values of a tensor to show
_MOST_LOOK_UPS = 5  # maximum number of lookups if samples are cleared before they are read


def _confirm(question: str, yes: bool) -> None:
    """Ask for confirmation before an irreversible operation."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgumentError(f"{question} stdin is not a terminal; pass --yes to confirm", field="yes")
    typer.confirm(question, abort=True, err=True)


# Partitions


@verb(PARTITION, "ls")
def list_partitions(client: Client, prefix: Prefix = "") -> Answer:
    """List partitions with their sample counts."""
    found = list(client.list_partitions(prefix))
    yield found
    yield table(
        "partition, state, >samples, >not cleared",
        [
            (each.partition_id, "sealed" if each.sealed else "open", each.inserted_count, each.present_count)
            for each in found
        ],
    )


@verb(PARTITION, "show")
def show_partition(client: Client, partition: Partition) -> Answer:
    """Show a partition: sample counts by state, fields, custom_meta columns, limits and tasks."""
    from tq_service.cli.status import (  # noqa: PLC0415  (not needed by --help)
        as_document,
        blocks_of,
        read,
    )

    status = read(client, [partition], "")
    document = as_document(status)
    yield {"partitions": document["partitions"], "waits": document["waits"]}
    heading, blocks = blocks_of(status)
    for block in blocks:
        first, *tasks = block.lines
        yield "\n".join([first, *([heading] if tasks else []), *tasks])
    for described in status.partitions:
        yield f"incarnation {described.summary.incarnation.hex()}"
        for headings, rows_of in _TABLES:
            if rows := list(rows_of(described)):
                yield ""
                yield table(headings, rows)


@verb(PARTITION, "seal")
def seal(client: Client, partition: Partition) -> Answer:
    """Seal a partition so that it accepts no new samples and its tasks can complete."""
    count = client.seal_partition(partition)
    yield {"partition_id": partition, "inserted_count": count}
    yield f"sealed {partition} with {count:,} samples"


@verb(PARTITION, "clear", timeout=60.0)
def clear(
    client: Client, partitions: Annotated[list[str], typer.Argument(help="Names of the partitions.")], yes: Yes = False
) -> Answer:
    """Remove partitions with all their data, and end any calls that are waiting on them."""
    counts = {name: client.describe_partition(name).summary.present_count for name in dict.fromkeys(partitions)}
    _confirm(f"clear {', '.join(counts)} with {sum(counts.values()):,} samples?", yes)
    counts = {name: client.clear_partition(name) for name in counts}
    yield [{"partition_id": name, "cleared_count": count} for name, count in counts.items()]
    for name, count in counts.items():
        yield f"cleared {name} with {count:,} samples"


@verb(PARTITION, "peek", timeout=30.0)
def peek(
    client: Client,
    partition: Partition,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of samples to show.")] = 3,
    field: Annotated[list[str] | None, typer.Option(help="Show only this field; may be repeated.")] = None,
) -> Answer:
    """Show the first samples of a partition: keys, groups, custom_meta and field values."""
    rows = _first_samples(client, partition, limit, field)
    yield [{**row, "fields": {name: _plain(value) for name, value in row["fields"].items()}} for row in rows]
    if not rows:
        yield f"partition {partition!r} has no samples"
    for row in rows:
        names = "".join(f"  {what} {row[what]}" for what in ("key", "group", "rollout") if row[what])
        yield f"sample {row['global_index']}{names}"
        shown = {**row["custom_meta"], **{name: _readable(value) for name, value in row["fields"].items()}}
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            yield f"  {name:<{width}}  {value}"


def _first_samples(client: Client, partition: str, limit: int, wanted: list[str] | None) -> list[dict[str, Any]]:
    """Return the first samples of a partition. If samples are cleared before they are read, repeat the lookup.

    The first read is slow because it imports torch, so samples may be cleared in the meantime. Later reads are fast.
    """
    for _ in range(_MOST_LOOK_UPS):
        meta, _cursor = client.lookup_samples(partition, limit=limit)
        rows = [_peeked(client, meta.select_samples([place]), wanted) for place in range(meta.size)]
        if None not in rows:
            break
    return [row for row in rows if row is not None]


def _peeked(client: Client, sample: BatchMeta, wanted: list[str] | None) -> dict[str, Any] | None:
    """Return a sample with its data, or None if the sample was cleared after the lookup."""
    fields = [name for name, has in sample.produced.items() if has.all() and (wanted is None or name in wanted)]
    data: Any = {}
    if fields:
        try:
            data = client.get_data(sample, data_fields=fields, missing="skip")
        except (FieldNotFoundError, SampleNotFoundError, StaleIncarnationError):  # the sample or partition was cleared
            return None
        if not len(data[fields[0]]):
            return None
    return {
        "global_index": sample.global_indexes[0],
        "key": sample.keys[0] if sample.keys else None,
        "group": sample.groups[0] if sample.groups else None,
        "rollout": sample.rollouts[0] if sample.rollouts else None,
        "custom_meta": sample.custom_meta[0] if sample.custom_meta else {},
        "fields": {name: data[name][0] for name in fields},
    }


def _plain(value: Any) -> Any:
    """Convert a field value to a JSON value. Arrays become lists, and unsupported types become strings."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | list | dict | None) else repr(value)


def _readable(value: Any) -> str:
    """Format a field value as a single line. For an array, the line shows the first values, the dtype and the shape."""
    if not hasattr(value, "tolist"):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"
    dtype = str(value.dtype).removeprefix("torch.")
    flat = value.reshape(-1)
    first = ", ".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in flat[:_MOST_SHOWN].tolist())
    more = ", ..." if flat.shape[0] > _MOST_SHOWN else ""
    shape = "x".join(map(str, value.shape))
    return f"{first} ({dtype})" if not shape else f"[{first}{more}] ({dtype} {shape})"


_Rows = Iterator[tuple[object, ...]]


def _fields(partition: PartitionDescription) -> _Rows:
    for field in partition.fields:
        spec = field.spec
        of_groups = "one per group" if spec.scope == "group" else ""
        shape = None if spec.row_shape is None else "x".join("*" if n < 0 else str(n) for n in spec.row_shape)
        yield (
            spec.name,
            spec.dtype or None,
            ", ".join(filter(None, (spec.layout, "write-once" if spec.write_once else "", of_groups))) or None,
            None if spec.layout == "object" else shape or ("scalar" if shape is not None else None),
            field.produced_count,
            partition.summary.present_count,
        )


def _meta_columns(partition: PartitionDescription) -> _Rows:
    for column in partition.custom_meta_columns:
        yield column.name, " and ".join(filter(None, (column.kind, "json" if column.has_json else "")))


def _tasks(partition: PartitionDescription) -> _Rows:
    for task in partition.tasks:
        yield (
            task.task_name, task.epoch, task.dp_size or None, task.planned_batch_count, task.consumed_count,
            task.pending_count, task.leased_count, task.waiting_count,
        )  # fmt: skip


def _bounds(partition: PartitionDescription) -> _Rows:
    if partition.max_bytes is not None:
        yield "capacity", partition.max_bytes, "bytes"
    for admission in partition.admissions:
        what = f"{admission.unit}s until {admission.given_back}"
        if admission.max_staleness is not None:
            what += f", at most {admission.max_staleness} versions late"
        if admission.most_running:
            what += f", at most {admission.most_running:,} held"
        if admission.overflow == "drop_lowest":
            what += f", then the lowest by {admission.priority_key or 'age'} are dropped"
        if admission.samples_per_insert:
            what += f", {admission.samples_per_insert:g} deliveries per insert"
        yield f"task {admission.task_name}", admission.most, what


def _released(partition: PartitionDescription) -> _Rows:
    release = partition.release
    if release is None:
        return
    if release.when is not None:
        yield f"{release.when} by {', '.join(release.tasks)}", partition.released_count
    if release.ttl_seconds is not None:
        yield f"{release.ttl_seconds:g} s old", partition.expired_count


_TABLES = (
    ("field, dtype, layout, row shape, >samples, >of", _fields),
    ("custom_meta, type", _meta_columns),
    ("task, >epoch, >ranks, >batches, >consumed, >pending, >unacknowledged, >waiting", _tasks),
    ("puts wait for, >at most, of", _bounds),
    ("released once, >samples", _released),
)


# Tasks

TASK.command("explain")(explain.command)


@verb(TASK, "show")
def show_tasks(client: Client, partition: Partition, task: TaskOrAll = None) -> Answer:
    """Show each task's counts of delivered, pending and unacknowledged samples, and why calls are waiting."""
    described = client.describe_partition(partition)
    waits = client.explain(partition, task)
    tasks = [each for each in described.tasks if task in {None, each.task_name}]
    if task is not None and not tasks:
        raise TaskNotFoundError(
            f"no task {task!r} has requested samples from partition {partition!r}; "
            f"{nearest(task, [each.task_name for each in described.tasks])}",
            metadata={"partition_id": partition, "task_name": task},
        )
    yield {"tasks": tasks, "waits": waits}
    if not tasks:
        yield f"no task has requested samples from partition {partition!r}"
    for each in tasks:
        yield f"task {each.task_name} of partition {partition}"
        for name, value in _facts(each, described):
            yield f"  {name:<16}{value}"
        for reason in waits:
            if reason.task_name == each.task_name:
                yield f"  {'waiting for':<16}{reason.text} ({reason.code})"


def _facts(task: TaskStatus, partition: PartitionDescription) -> Iterator[tuple[str, str]]:
    yield "delivered", f"{task.consumed_count:,} of {partition.summary.inserted_count:,} samples"
    if task.delivered_count > task.consumed_count:
        yield "deliveries", f"{task.delivered_count:,}, including repeated deliveries"
    yield "rate", f"{task.delivered_per_second:,.1f} samples/s"
    yield "pending", f"{task.pending_count:,}"
    yield "unacknowledged", f"{task.leased_count:,}"
    yield "redelivered", f"{task.redelivered_count:,}"
    yield "dead-lettered", f"{task.dead_lettered_count:,}"
    yield "skipped", f"{task.skipped_count:,}"
    yield "epoch", f"{task.epoch}"
    yield "batches planned", f"{task.planned_batch_count:,} for {task.dp_size} ranks" if task.dp_size else "-"
    if task.trained_batch_count or task.saved_batch_count:
        yield "batches trained", f"{task.trained_batch_count:,}, {task.saved_batch_count:,} in a checkpoint"
    if task.outstanding_count is not None:
        yield "outstanding", f"{task.outstanding_count:,}"
    if task.running_count is not None:
        yield "running", f"{task.running_count:,}"
    if task.unmatched_count or task.too_small_count or task.late_count:
        too_small, late = f"{task.too_small_count:,} groups with too few members", f"{task.late_count:,} late"
        yield "evicted", f"{task.unmatched_count:,} by where, {too_small}, {late}"
    if task.overflow_count:
        yield "dropped", f"{task.overflow_count:,} of the lowest priority"
    if task.refilled_count:
        yield "refilled", f"{task.refilled_count:,}"
    oldest, ahead = task.oldest_version, task.staleness_versions
    version = "-" if oldest is None else f"{oldest:g}"
    yield "oldest version", f"{version}, {ahead:g} below the newest" if ahead else version
    if task.step_times is not None:
        yield "steps", f"{task.step_times} ({task.step_times.rank_count:,} ranks)"
        yield "", task.step_times.advice
    yield "state", "complete" if task.complete else "active"
    yield "waiting", f"{task.waiting_count:,} calls"
    for lease in task.leases:
        name = f"{lease.claim_name} ({lease.claim_id})" if lease.claim_name else lease.claim_id
        since, left = lease.delivered_ago_seconds, lease.ends_in_seconds
        yield "leased to", f"{name}: {lease.leased_count:,} for {since:,.0f} s, {left:,.0f} s left"
    if hidden_count := task.leasing_claim_count - len(task.leases):
        yield "leased to", f"{hidden_count:,} more claims"


@verb(TASK, "evicted")
def list_evicted(
    client: Client,
    partition: Partition,
    task: Task,
    after: Annotated[int, typer.Option(min=0, help="List only units with a serial number above this one.")] = 0,
) -> Answer:
    """List up to 1,024 units (samples, rollouts or groups) evicted by a task's claims, and show which were refilled."""
    found = client.take_evicted(partition, task, after)
    yield found
    if found.dropped_count:
        yield f"{found.dropped_count:,} earlier evicted units are no longer listed"
    if not found.units:
        yield f"claims of task {task} have not evicted any units after serial {after}"
        return
    rows = [
        (
            *(each.serial, each.unit, each.group, each.rollout, each.key),
            *(each.reason, each.version, each.sample_count, each.refill),
        )
        for each in found.units
    ]
    yield table(">serial, unit, group, rollout, key, reason, >version, >samples, refill", rows)


@verb(TASK, "reset")
def reset(
    client: Client,
    partition: Partition,
    task: Task,
    keep_consumed: Annotated[
        bool, typer.Option("--keep-consumed", help="Restart only the batch numbers; consumed samples stay consumed.")
    ] = False,
    yes: Yes = False,
) -> Answer:
    """Start the next epoch of a task: its samples can be claimed again, and batch numbers restart at 0."""
    status = client.check_consumption(partition, task)
    what = "keep samples consumed" if keep_consumed else f"deliver {status.consumed_count:,} samples again"
    _confirm(f"{what}, and start epoch {status.epoch + 1} of task {task} of partition {partition}?", yes)
    epoch = client.reset_consumption(partition, task, status.epoch, keep_consumed=keep_consumed)
    yield {"partition_id": partition, "task_name": task, "epoch": epoch}
    yield f"task {task} of partition {partition} is now in epoch {epoch}"


# Dead-lettered samples, which were delivered too often without being acknowledged


@verb(DEADLETTER, "ls")
def list_dead_lettered(
    client: Client,
    partition: Annotated[str | None, typer.Argument(help="List only this partition. Default: all.")] = None,
) -> Answer:
    """List tasks that have dead-lettered samples, with the indexes of each task's first hundred such samples."""
    found: list[dict[str, Any]] = [
        {
            "partition_id": each.summary.partition_id,
            "task_name": task.task_name,
            "dead_lettered_count": task.dead_lettered_count,
            "dead_lettered_indexes": task.dead_lettered_indexes,
        }
        for each in (
            client.status(explain=False).partitions if partition is None else (client.describe_partition(partition),)
        )
        for task in each.tasks
        if task.dead_lettered_count
    ]
    yield found
    if not found:
        yield "no dead-lettered samples"
        return
    rows = [(*facts, " ".join(map(str, indexes))) for *facts, indexes in map(dict.values, found)]
    yield table("partition, task, >count, samples", rows)


@verb(DEADLETTER, "requeue")
def requeue(
    client: Client,
    partition: Partition,
    task: Task,
    samples: Annotated[
        list[int] | None, typer.Argument(help="Global indexes of the samples. Default: all dead-lettered samples.")
    ] = None,
) -> Answer:
    """Make dead-lettered samples claimable again, and reset their delivery counts."""
    count = client.requeue_dead_lettered(partition, task, samples or None)
    yield {"partition_id": partition, "task_name": task, "requeued_count": count}
    yield f"requeued {count:,} samples of partition {partition}; task {task} can claim them again"
