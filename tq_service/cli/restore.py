"""`tq-service restore`: brings back a checkpoint, into a running service that is empty."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from tq_service.cli.addresses import Address
from tq_service.cli.checkpoint import Directory
from tq_service.cli.door_options import with_door_options

EXAMPLES = """\
  tq-service restore /var/backups/tq
  tq-service restore /var/backups/tq controller:50051 --json"""


@with_door_options
def command(
    directory: Directory,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until it is given up.")] = 3600.0,
) -> None:
    """Bring back what a checkpoint holds, into a service that has no partitions.

    The checkpoint is checked whole before anything is done, and appears in one step.
    """
    from tq_service.client import Client  # noqa: PLC0415  (--help does without grpc)

    with Client(address) as client:
        restored = client.restore(directory, timeout=timeout)
    if as_json:
        typer.echo(json.dumps(asdict(restored), indent=2))
        return
    typer.echo(
        f"{restored.sample_count} samples of {restored.partition_count} partitions, {restored.value_bytes} bytes, are "
        "back"
    )
