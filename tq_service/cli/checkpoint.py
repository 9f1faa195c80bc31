"""`tq-service checkpoint`: writes a checkpoint of a running service."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from tq_service.cli.addresses import Address
from tq_service.cli.door_options import with_door_options

EXAMPLES = """\
  tq-service checkpoint /var/backups/tq
  tq-service checkpoint /var/backups/tq controller:50051 --json"""

Directory = Annotated[str, typer.Argument(help="The whole path of a folder on the controller's host.")]


@with_door_options
def command(
    directory: Directory,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until it is given up.")] = 3600.0,
) -> None:
    """Write a consistent copy of everything to a folder, while the service goes on.

    The folder has the new checkpoint whole, or is as it was.
    """
    from tq_service.client import Client  # noqa: PLC0415  (--help does without grpc)

    with Client(address) as client:
        copy = client.checkpoint(directory, timeout=timeout)
    if as_json:
        typer.echo(json.dumps(asdict(copy), indent=2))
        return
    typer.echo(
        f"{copy.sample_count} samples of {copy.partition_count} partitions, {copy.value_bytes} bytes, are in "
        f"{copy.directory}; the service paused for {copy.pause_seconds * 1e3:.1f} ms at most"
    )
