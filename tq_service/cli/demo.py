"""`tq-service demo`: hands over to `tq_service.demo`."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import typer

from tq_service.cli.own_server import door_set_aside
from tq_service.demo import run_demo

EXAMPLES = """\
  tq-service demo
  tq-service demo --steps 100 --output curves
  tq-service demo --input rollouts.jsonl"""


@functools.wraps(run_demo)
def command(**options: Any) -> None:
    """Run the demo; its result is the exit code."""
    with nullcontext() if options["address"] else door_set_aside():
        code = run_demo(**options)
    raise typer.Exit(code)


command.__doc__ = (run_demo.__doc__ or "").partition("\n\n")[0]  # what it returns is not for --help
