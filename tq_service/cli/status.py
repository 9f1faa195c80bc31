"""`tq-service status`: partitions, fields and tasks of a running service."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tq_service.cli.addresses import Address, Timeout, open_client
from tq_service.cli.options import with_client_options
from tq_service.cli.output import console, print_json

EXAMPLES = """\
  tq-service status
  tq-service status controller:50051 --partition train@3
  tq-service status --watch 2
  tq-service status --json | jq '.partitions[].tasks'"""


@with_client_options
def command(
    address: Address = None,
    partition: Annotated[str | None, typer.Option(help="Show this partition only.", show_default=False)] = None,
    watch: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.1, help="Show it again every so many seconds.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch one line each time.")] = False,
    timeout: Timeout = 5.0,
    **credentials: Any,
) -> None:
    """Show partitions, their fields, and how far each task has come."""
    from tq_service.cli.status_view import as_document, read_partitions, render  # noqa: PLC0415  (--help does without)

    with open_client(address, timeout, **credentials) as client:
        states = (read_partitions(client, partition, timeout) for _ in _moments(watch))
        if as_json:
            for state in states:
                print_json(as_document(state), indent=2 if watch is None else None)
            return
        screen = console()
        if watch is None or not screen.is_terminal:
            for state in states:
                screen.print(render(state))
            return
        from rich.live import Live  # noqa: PLC0415  (only for people)

        with Live(console=screen, auto_refresh=False) as live:
            for state in states:
                live.update(render(state), refresh=True)


def _moments(watch: float | None) -> Iterator[None]:
    """Yield at once, and every `watch` seconds after it."""
    yield
    while watch is not None:
        time.sleep(watch)
        yield
