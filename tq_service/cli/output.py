"""Printing for people: tables that keep their width when they are piped."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 160


def console() -> Console:
    """Return a console for stdout: as wide as the terminal, or wide enough for our tables where there is none."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=_PIPED_WIDTH)


def print_table(table: Table) -> None:
    """Print a table to stdout."""
    console().print(table)
