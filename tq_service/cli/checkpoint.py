"""`tq-service checkpoint`: writes a checkpoint of a running service."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tq_service.cli.addresses import Address, Timeout, open_client
from tq_service.cli.options import with_client_options
from tq_service.cli.output import AsJson, print_json

EXAMPLES = """\
  tq-service checkpoint nightly
  tq-service checkpoint nightly/2026-11-21 controller:50051 --json
  tq-service checkpoint nightly --metadata '{"step": 12}'"""

Name = Annotated[str, typer.Argument(help="Name of the checkpoint: a place below the controller's checkpoint_dir.")]


@with_client_options
def command(
    name: Name,
    address: Address = None,
    metadata: Annotated[
        str, typer.Option(help="A JSON object that restore and checkpoints show again, such as '{\"step\": 12}'.")
    ] = "{}",
    as_json: AsJson = False,
    timeout: Timeout = 3600.0,
    **credentials: Any,
) -> None:
    """Write a consistent copy of everything to the controller's disk, while the service goes on.

    The name has the new checkpoint whole, or the one before it.
    """
    given = _object(metadata)
    with open_client(address, min(timeout, 5.0), **credentials) as client:
        copy = client.checkpoint(name, metadata=given, timeout=timeout)
    if as_json:
        print_json(copy)
        return
    typer.echo(
        f"{copy.sample_count} samples of {copy.partition_count} partitions, {copy.value_bytes} bytes, are in "
        f"checkpoint {copy.name}; the service paused for {copy.pause_seconds * 1e3:.1f} ms at most"
    )


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"it is no JSON ({error})", param_hint="--metadata") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("it is no JSON object such as '{\"step\": 12}'", param_hint="--metadata")
    return value
