"""`tq-service checkpoint`: writes, lists and restores checkpoints of a running service."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tq_service.cli.addresses import open_client
from tq_service.cli.options import make_group, verb
from tq_service.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from tq_service.client import CheckpointSummary

EXAMPLES = """\
  tq-service checkpoint write nightly
  tq-service checkpoint write nightly/2026-11-21 --metadata '{"step": 12}' --address controller:50051
  tq-service checkpoint ls nightly/
  tq-service checkpoint restore nightly --replace"""

_COPY_SECONDS = 3600.0

group = make_group("Write, list and restore checkpoints.", EXAMPLES)
Name = Annotated[str, typer.Argument(help="Name of the checkpoint: a place below the controller's checkpoint_dir.")]


@verb(group, "write", timeout=_COPY_SECONDS)
def write(
    name: Name,
    metadata: Annotated[
        str, typer.Option(help="A JSON object that restore and ls show again, such as '{\"step\": 12}'.")
    ] = "{}",
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """Write a consistent copy of everything to the controller's disk, while the service goes on.

    The name has the new checkpoint whole, or the one before it.
    """
    given = _object(metadata)
    with open_client(**service) as client:
        copy = client.checkpoint(name, metadata=given, timeout=service["timeout"])
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


@verb(group, "ls")
def ls(
    prefix: Annotated[str, typer.Argument(help="How their names begin.", show_default=False)] = "",
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """List the checkpoints below the controller's checkpoint_dir, with what they were written with."""
    with open_client(**service) as client:
        found = client.list_checkpoints(prefix)
    if as_json:
        print_json(found)
        return
    print_table("checkpoint, written at (UTC), >partitions, >samples, >size, metadata", map(_row, found))


def _row(one: CheckpointSummary) -> tuple[object, ...]:
    from rich.filesize import decimal  # noqa: PLC0415  (only for people)

    if one.problem:
        return one.name, None, None, None, decimal(one.file_bytes), f"cannot be read: {one.problem}"
    written_at = datetime.fromtimestamp(one.written_at, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    metadata = json.dumps(one.metadata, ensure_ascii=False) if one.metadata else None
    return one.name, written_at, one.partition_count, one.sample_count, decimal(one.file_bytes), metadata


@verb(group, "restore", timeout=_COPY_SECONDS)
def restore(
    name: Name,
    replace: Annotated[
        bool, typer.Option("--replace", help="Have it take the place of all partitions there are, which are cleared.")
    ] = False,
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """Bring back what a checkpoint holds, into a service that has no partitions, or in place of those it has.

    The checkpoint is checked whole before anything is done, and appears in one step.
    """
    with open_client(**service) as client:
        restored = client.restore(name, replace=replace, timeout=service["timeout"])
    if as_json:
        print_json(restored)
        return
    typer.echo(
        f"{restored.sample_count} samples of {restored.partition_count} partitions, {restored.value_bytes} bytes, are "
        "back"
    )
