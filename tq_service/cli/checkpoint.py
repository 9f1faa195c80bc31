"""`tq-service checkpoint`: writes a checkpoint of a running service."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tq_service.cli.addresses import Address, Timeout, open_client
from tq_service.cli.options import with_client_options
from tq_service.cli.output import AsJson, print_json

EXAMPLES = """\
  tq-service checkpoint nightly
  tq-service checkpoint nightly/2026-11-21 controller:50051 --json"""

Name = Annotated[str, typer.Argument(help="Name of the checkpoint: a place below the controller's checkpoint_dir.")]


@with_client_options
def command(
    name: Name,
    address: Address = None,
    as_json: AsJson = False,
    timeout: Timeout = 3600.0,
    **credentials: Any,
) -> None:
    """Write a consistent copy of everything to the controller's disk, while the service goes on.

    The name has the new checkpoint whole, or the one before it.
    """
    with open_client(address, min(timeout, 5.0), **credentials) as client:
        copy = client.checkpoint(name, timeout=timeout)
    if as_json:
        print_json(copy)
        return
    typer.echo(
        f"{copy.sample_count} samples of {copy.partition_count} partitions, {copy.value_bytes} bytes, are in "
        f"checkpoint {copy.name}; the service paused for {copy.pause_seconds * 1e3:.1f} ms at most"
    )
