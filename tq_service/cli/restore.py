"""`tq-service restore`: brings back a checkpoint, into a running service that is empty, or in place of what it has."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tq_service.cli.addresses import Address, Timeout, open_client
from tq_service.cli.checkpoint import Name
from tq_service.cli.options import with_client_options
from tq_service.cli.output import AsJson, print_json

EXAMPLES = """\
  tq-service restore nightly
  tq-service restore nightly/2026-11-21 controller:50051 --json
  tq-service restore nightly --replace"""


@with_client_options
def command(
    name: Name,
    address: Address = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Have it take the place of all partitions there are, which are cleared.")
    ] = False,
    as_json: AsJson = False,
    timeout: Timeout = 3600.0,
    **credentials: Any,
) -> None:
    """Bring back what a checkpoint holds, into a service that has no partitions, or in place of those it has.

    The checkpoint is checked whole before anything is done, and appears in one step.
    """
    with open_client(address, min(timeout, 5.0), **credentials) as client:
        restored = client.restore(name, replace=replace, timeout=timeout)
    if as_json:
        print_json(restored)
        return
    typer.echo(
        f"{restored.sample_count} samples of {restored.partition_count} partitions, {restored.value_bytes} bytes, are "
        "back"
    )
