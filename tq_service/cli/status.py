"""`tq-service status`: a running service, its partitions and tasks, and what they wait for."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tq_service.cli.options import Partitions, open_client, print_json, with_service
from tq_service.errors import DeadlineError, PartitionNotFoundError, TqError, UnavailableError, nearest

if TYPE_CHECKING:
    from tq_service.client import Client
    from tq_service.results import ServiceStatus

_ANSWER_SECONDS = 5.0

EXAMPLES = """\
  tq-service status
  tq-service status train@3 --address controller:50051
  tq-service status --prefix train@ --watch 2
  tq-service status --json | jq '.partitions[].tasks'"""


@with_service
def command(
    partitions: Partitions = None,
    prefix: Annotated[str, typer.Option(help="Show partitions whose names begin so.", show_default=False)] = "",
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch",
            "-w",
            metavar="SECONDS",
            min=0.1,
            help="Show it again every so many seconds; into a pipe, one after the other.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch one line each time.")] = False,
    **service: Any,
) -> None:
    """Show a service, its partitions and tasks, and what they wait for."""
    from tq_service.cli.status_view import as_document, blocks_of, header_of, print_blocks  # noqa: PLC0415  (as --help)

    with open_client(**service) as client:
        statuses = _statuses(client, partitions or (), prefix, watch)
        if watch is not None and not as_json and _is_screen():
            _show_on_screen(client.address, statuses)
            return
        for status in statuses:
            if isinstance(status, TqError):
                typer.echo(f"error: {status.message}; trying again", err=True)
            elif as_json:
                print_json(as_document(status), indent=2 if watch is None else None)
            else:
                print_blocks(header_of(status, client.address), *blocks_of(status))
                if watch is not None:
                    typer.echo()  # flushes too: a pipe's reader sees each status as soon as it is printed


def read(client: Client, names: list[str] | tuple[str, ...], prefix: str) -> ServiceStatus:
    """Return the status of all partitions whose names begin so, or of those that are named.

    Raises:
        PartitionNotFoundError: one that is named is not there, and nothing waits for it.
    """
    from dataclasses import replace  # noqa: PLC0415  (as --help)

    if not names:
        return client.status(prefix)
    shown = [client.status(name) for name in dict.fromkeys(names)]
    partitions, waits = [], []
    for name, status in zip(dict.fromkeys(names), shown, strict=True):
        there = [each for each in status.partitions if each.summary.partition_id == name]
        waiting = [each for each in status.waits if each.partition_id == name]
        if not there and not waiting:
            known = [each.partition_id for each in client.list_partitions()]
            raise PartitionNotFoundError(
                f"no partition {name!r}; {nearest(name, known)}", metadata={"partition_id": name}
            )
        partitions += there
        waits += waiting
    return replace(shown[0], partitions=tuple(partitions), waits=tuple(waits))


def _is_screen() -> bool:
    """Return whether stdout is a terminal that can show each status in place of the one before it."""
    from tq_service.cli.options import console  # noqa: PLC0415  (only for people)

    return sys.stdout.isatty() and not console().is_dumb_terminal


def _statuses(client: Client, names: Any, prefix: str, seconds: float | None) -> Iterator[ServiceStatus | TqError]:
    """Yield the status now, and every so many seconds, or why there is none."""
    while True:
        try:
            if seconds is not None:
                client.health(timeout=_ANSWER_SECONDS)  # one try, so that a service that is away is seen at once
            yield read(client, names, prefix)
        except (UnavailableError, DeadlineError, PartitionNotFoundError) as error:
            if seconds is None:
                raise
            yield error
        if seconds is None:
            return
        time.sleep(seconds)


def _show_on_screen(address: str, statuses: Iterator[ServiceStatus | TqError]) -> None:
    """Show each status in place of the one before; a service that is away is waited for, what it last said stays."""
    from rich.live import Live  # noqa: PLC0415  (only for people)
    from rich.text import Text  # noqa: PLC0415  (only for people)

    from tq_service.cli.options import console  # noqa: PLC0415  (only for people)
    from tq_service.cli.status_view import blocks_of, fitting, header_of  # noqa: PLC0415  (as --help)

    logging.getLogger("tq_service").propagate = False  # what the client logs would be written over the screen
    screen = console()
    header, heading, blocks, away_since = ["waiting for the first answer"], "", list[Any](), None
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        for status in statuses:
            note = ""
            if isinstance(status, PartitionNotFoundError):
                blocks, note = [], status.message
            elif isinstance(status, TqError):
                away_since = away_since or time.monotonic()
                away, message = time.monotonic() - away_since, status.message.partition(";")[0]
                note = f"reconnecting for {away:.0f} s, below is what it said before: {message}"
            else:
                header, away_since = header_of(status, address), None
                heading, blocks = blocks_of(status, screen.width)
            height = screen.height if screen.is_terminal else 1 << 30
            lines = fitting([*header, *([note] if note else [])], heading, blocks, height)
            live.update(Text("\n".join(lines), no_wrap=True, overflow="fold"), refresh=True)
