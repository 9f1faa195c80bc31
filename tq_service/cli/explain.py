"""`tq-service explain` and `tq-service task explain`: show why claims on a partition are waiting."""

from __future__ import annotations

from typing import Any

import typer

from tq_service.cli.options import AsJson, Partition, TaskOrAll, open_client, print_json, with_service

EXAMPLES = """\
  tq-service explain train
  tq-service explain train update_actor -a controller:50051 --json"""


def explain(partition: Partition, task: TaskOrAll = None, as_json: AsJson = False, **service: Any) -> None:
    """Explain why claims are waiting: how many samples of a partition are ready, and why the others are not."""
    with open_client(**service) as client:
        reasons = client.explain(partition, task)
    if as_json:
        print_json(reasons)
        return
    if not reasons:
        typer.echo(f"no claim waits for partition {partition!r}")
    for reason in reasons:
        consumer = f"task {reason.task_name}: " if reason.task_name else ""
        calls = "1 call waits" if reason.waiting_count == 1 else f"{reason.waiting_count} calls wait"
        typer.echo(f"{consumer}{calls}: {reason.text} ({reason.code})")


command = with_service(explain)
