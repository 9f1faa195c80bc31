"""`tq-service deadletter`: samples that were delivered too often without being acknowledged."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tq_service.cli.addresses import Partition, Task, open_client
from tq_service.cli.options import make_group, verb
from tq_service.cli.output import AsJson, print_json, print_table

EXAMPLES = """\
  tq-service deadletter ls
  tq-service deadletter ls train@3 --json
  tq-service deadletter requeue train@3 reward
  tq-service deadletter requeue train@3 reward 17 18"""

group = make_group("List samples that were delivered too often, and deliver them once more.", EXAMPLES)


@verb(group, "ls")
def ls(
    partition: Annotated[str | None, typer.Argument(help="Only of this partition.", show_default=False)] = None,
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """List tasks with dead-lettered samples, and the indexes of the first hundred of each."""
    with open_client(**service) as client:
        if partition is None:
            partitions = client.status(explain=False).partitions
        else:
            partitions = (client.describe_partition(partition),)
    found: list[dict[str, Any]] = [
        {
            "partition_id": each.summary.partition_id,
            "task_name": task.task_name,
            "dead_lettered_count": task.dead_lettered_count,
            "dead_lettered_indexes": list(task.dead_lettered_indexes),
        }
        for each in partitions
        for task in each.tasks
        if task.dead_lettered_count
    ]
    if as_json:
        print_json(found)
        return
    if not found:
        typer.echo("no samples are dead-lettered")
        return
    rows = [
        (
            each["partition_id"],
            each["task_name"],
            each["dead_lettered_count"],
            " ".join(map(str, each["dead_lettered_indexes"])),
        )
        for each in found
    ]
    print_table("partition, task, >count, samples", rows)


@verb(group, "requeue")
def requeue(
    partition: Partition,
    task: Task,
    samples: Annotated[
        list[int] | None, typer.Argument(help="Global indexes of samples. Default: all.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """Have dead-lettered samples delivered again, as if they never had been."""
    with open_client(**service) as client:
        count = client.requeue_dead_lettered(partition, task, samples or None)
    if as_json:
        print_json({"partition_id": partition, "task_name": task, "requeued_count": count})
        return
    typer.echo(f"{count:,} samples of partition {partition} can be claimed by task {task} again")
