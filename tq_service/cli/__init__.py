"""The command line `tq-service`: one file a command, imported when it is called for, so that probes stay quick."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tq_service.errors import TqError

# The commands in a word; the module of that name here has a function `command`, and `EXAMPLES` which end its --help, or
# a `group` of commands.
_COMMANDS = {
    "serve": "Run the service until SIGTERM or SIGINT.",
    "health": "Print the health of a service; exit code 0 when it is SERVING.",
    "status": "Show partitions, fields and tasks of a service.",
    "samplers": "List the samplers of a service, with their options.",
    "checkpoint": "Write a checkpoint of a running service.",
    "checkpoints": "List the checkpoints of a service.",
    "restore": "Bring back a checkpoint, into a service that is empty, or in place of what it has.",
    "token": "Make bearer tokens, and list those of a file.",
    "plan": "Show what each sampler would do with the samples of a file of lengths.",
    "bench": "Measure claims, puts and gets against a service for a few seconds.",
}


class _GroupedOptions(TyperCommand):
    """Shows options under the titles of their `rich_help_panel`, as plain text; the others under Options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _CommandsOnDemand(TyperGroup):
    """Imports a command's module when the command is asked for.

    The signatures are loose since typer, by its version, uses click or a copy of it.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"tq_service.cli.{cmd_name}")
        holder = getattr(module, "group", None)  # of a command with commands of its own
        if holder is None:
            holder = typer.Typer(add_completion=False, rich_markup_mode=None)
            holder.command(cmd_name, cls=_GroupedOptions, epilog=f"\b\nExamples:\n{module.EXAMPLES}")(module.command)
        command = typer.main.get_command(holder)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


app = typer.Typer(
    cls=_CommandsOnDemand,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # boxes cut long option names; plain text wraps
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # noqa: PLC0415  (needed by this flag only)

        try:
            typer.echo(f"tq-service {metadata.version('tq-service')}")
        except metadata.PackageNotFoundError:
            typer.echo("tq-service, run from its sources without being installed")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run, inspect and benchmark the data service between rollout workers and trainer ranks."""


def main() -> None:
    """Run the command line; an error becomes one line on stderr and exit code 1, one of usage exit code 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except (TqError, ConnectionError, TimeoutError) as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        sys.exit(f"error: this needs the module {error.name}, which is not installed; see the extras in the README")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        usage_error: Any = error  # of click, or of typer's copy of it
        if not hasattr(usage_error, "format_message"):
            raise
        shown = io.StringIO()
        usage_error.show(file=shown)
        sys.stderr.write(shown.getvalue().replace("\nError: ", "\nerror: ", 1))
        sys.exit(usage_error.exit_code)
