"""`tq-service checkpoints`: the checkpoints that a running service can restore."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from tq_service.cli.addresses import Address, Timeout, open_client
from tq_service.cli.options import with_client_options
from tq_service.cli.output import AsJson, print_json, print_table
from tq_service.client import CheckpointSummary

EXAMPLES = """\
  tq-service checkpoints
  tq-service checkpoints controller:50051 --prefix nightly/ --json"""


@with_client_options
def command(
    address: Address = None,
    prefix: Annotated[str, typer.Option(help="How their names begin.")] = "",
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
    **credentials: Any,
) -> None:
    """List the checkpoints below the controller's checkpoint_dir, with what they were written with."""
    with open_client(address, timeout, **credentials) as client:
        found = client.list_checkpoints(prefix, timeout=timeout)
    if as_json:
        print_json(found)
        return
    print_table("checkpoint, written at (UTC), >partitions, >samples, >size, metadata", map(_row, found))


def _row(one: CheckpointSummary) -> tuple[object, ...]:
    if one.problem:
        return one.name, None, None, None, decimal(one.file_bytes), f"cannot be read: {one.problem}"
    written_at = datetime.fromtimestamp(one.written_at, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    metadata = json.dumps(one.metadata, ensure_ascii=False) if one.metadata else None
    return one.name, written_at, one.partition_count, one.sample_count, decimal(one.file_bytes), metadata
