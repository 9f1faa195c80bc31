"""`tq-service samplers`: the samplers that a running service knows."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tq_service.cli.addresses import TIMEOUT_HELP, Address, open_client
from tq_service.cli.options import with_client_options

EXAMPLES = """\
  tq-service samplers
  tq-service samplers controller:50051 --json"""


@with_client_options
def command(
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help=TIMEOUT_HELP)] = 5.0,
    **credentials: Any,
) -> None:
    """List the samplers that get_meta may name, with their options."""
    with open_client(address, timeout, **credentials) as client:
        samplers = client.list_samplers(timeout=timeout)
    if as_json:
        typer.echo(json.dumps([asdict(sampler) for sampler in samplers], indent=2))
        return
    from rich.table import Table  # noqa: PLC0415  (only for people)

    from tq_service.cli.output import print_table  # noqa: PLC0415  (only for people)

    table = Table("sampler", "what it does", "options", box=None, pad_edge=False)
    for sampler in samplers:
        table.add_row(sampler.name, sampler.summary, ", ".join(sampler.options))
    print_table(table)
