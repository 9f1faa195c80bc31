"""Printing: JSON for programs, and for people texts, and tables that keep their width when they are piped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPED_WIDTH = 160

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Answer = Iterator[Any]
"""The output of a command: first a document, the only item that --json takes, then texts and tables for people."""


def show(answer: Answer, as_json: bool) -> None:
    """Print an answer."""
    document = next(answer)
    if as_json:
        print_json(document)
        return
    for each in answer:
        if isinstance(each, str):
            typer.echo(each)
        else:
            console().print(each)


def print_json(document: Any, indent: int | None = 2) -> None:
    """Print JSON to stdout; dataclasses are objects in it, and bytes hexadecimal digits."""
    typer.echo(json.dumps(document, indent=indent, default=_json_value))


def _json_value(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value.hex()


def console() -> Console:
    """Return a console for stdout: as wide as the terminal, or wide enough for our tables without one."""
    from rich.console import Console  # noqa: PLC0415  (only for people)

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=_PIPED_WIDTH)


def table(headings: str, rows: Iterable[Sequence[object]], *, no_wrap: bool = False) -> Table:
    """Return a table.

    Args:
        headings: of the columns, separated by commas; ">" is before those of numbers, which are justified right.
        rows: their cells. None is shown as "-", and nothing in a text is taken for markup.
        no_wrap: whether text that does not fit is cut instead of wrapped.
    """
    from rich.table import Table  # noqa: PLC0415  (only for people)
    from rich.text import Text  # noqa: PLC0415  (as above)

    shown = Table(box=None, pad_edge=False)
    for heading in headings.split(", "):
        is_right = heading.startswith(">")
        shown.add_column(
            heading.removeprefix(">"), justify="right" if is_right else "left", no_wrap=no_wrap and not is_right
        )
    for row in rows:
        shown.add_row(*(Text(_cell(value)) for value in row))
    return shown


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)
