"""`tq-service task`: shows and explains tasks, and starts them over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tq_service.cli.addresses import Partition, Task, TaskOrAll, open_client
from tq_service.cli.explain import explain
from tq_service.cli.options import Yes, make_group, verb
from tq_service.cli.output import AsJson, print_json
from tq_service.cli.partition import confirm
from tq_service.errors import TaskNotFoundError, nearest

if TYPE_CHECKING:
    from tq_service.client import TaskStatus

EXAMPLES = """\
  tq-service task show train@3
  tq-service task show train@3 update_actor --json
  tq-service task explain train@3 update_actor
  tq-service task reset train@3 update_actor --keep-consumed --yes"""

group = make_group("Show and explain tasks, and start them over.", EXAMPLES)
verb(group, "explain")(explain)


@verb(group, "show")
def show(partition: Partition, task: TaskOrAll = None, as_json: AsJson = False, **service: Any) -> None:
    """Show tasks of a partition: delivered, pending, unacknowledged, redelivered, and what they wait for."""
    with open_client(**service) as client:
        described = client.describe_partition(partition)
        waits = client.explain(partition, task)
    tasks = [each for each in described.tasks if task in {None, each.task_name}]
    if task is not None and not tasks:
        raise TaskNotFoundError(
            f"no task {task!r} has asked for samples of partition {partition!r}; "
            f"{nearest(task, [each.task_name for each in described.tasks])}",
            metadata={"partition_id": partition, "task_name": task},
        )
    if as_json:
        print_json({"tasks": tasks, "waits": waits})
        return
    if not tasks:
        typer.echo(f"no task has asked for samples of partition {partition!r}")
    for each in tasks:
        reasons = [reason for reason in waits if reason.task_name == each.task_name]
        facts: dict[str, object] = {
            "delivered": f"{each.consumed_count:,} of {described.summary.inserted_count:,} samples",
            "rate": f"{each.delivered_per_second:,.1f} samples/s",
            "pending": f"{each.pending_count:,}",
            "unacknowledged": f"{each.leased_count:,}",
            "redelivered": f"{each.redelivered_count:,}",
            "dead-lettered": f"{each.dead_lettered_count:,}",
            "skipped": f"{each.skipped_count:,}",
            "epoch": each.epoch,
            "batches planned": f"{each.planned_batch_count:,} for {each.dp_size} ranks" if each.dp_size else "-",
            "oldest version": _versions(each),
            "state": "complete" if each.complete else "active",
            "waiting": f"{each.waiting_count:,} calls",
        }
        typer.echo(f"task {each.task_name} of partition {partition}")
        for name, value in facts.items():
            typer.echo(f"  {name:<16}{value}")
        for lease in each.leases:
            name = f"{lease.claim_name} ({lease.claim_id})" if lease.claim_name else lease.claim_id
            since, left = lease.delivered_ago_seconds, lease.ends_in_seconds
            typer.echo(f"  {'leased to':<16}{name}: {lease.leased_count:,} for {since:,.0f} s, {left:,.0f} s left")
        if hidden_count := each.leasing_claim_count - len(each.leases):
            typer.echo(f"  {'leased to':<16}{hidden_count:,} claims more")
        for reason in reasons:
            typer.echo(f"  {'waiting for':<16}{reason.text} ({reason.code})")


def _versions(task: TaskStatus) -> str:
    """Return how old is what a task has left."""
    if task.oldest_version is None:
        return "-"
    ahead = task.staleness_versions or 0
    return f"{task.oldest_version:g}, the newest is {ahead:g} above it" if ahead else f"{task.oldest_version:g}"


@verb(group, "reset")
def reset(
    partition: Partition,
    task: Task,
    keep_consumed: Annotated[
        bool, typer.Option("--keep-consumed", help="Keep what is consumed, and only count batches from 0 again.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """Start the next epoch of a task: its samples can be claimed again, and batches count from 0."""
    with open_client(**service) as client:
        status = client.check_consumption(partition, task)
        what = (
            "keep what is consumed, and" if keep_consumed else f"deliver {status.consumed_count:,} samples again, and"
        )
        confirm(f"{what} start epoch {status.epoch + 1} of task {task} of partition {partition}?", yes)
        epoch = client.reset_consumption(partition, task, status.epoch, keep_consumed=keep_consumed)
    if as_json:
        print_json({"partition_id": partition, "task_name": task, "epoch": epoch})
        return
    typer.echo(f"task {task} of partition {partition} is at epoch {epoch}")
