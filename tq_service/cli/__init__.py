"""The `tq-service` command line. Each command's module is imported only when it runs, so probes start fast."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tq_service.errors import TqError

# Commands and their summaries. Each command's module defines `command`, and `EXAMPLES` for the end of --help.
COMMANDS = {
    "serve": "Run the service until SIGTERM or SIGINT.",
    "status": "Show the status of a service, its partitions and tasks, and the reasons why calls are waiting.",
    "explain": "Explain why claims on a partition are waiting.",
    "ui": "Serve a live page that shows a service in the browser.",
    "partition": "List, show, seal and clear partitions, and peek at their samples.",
    "task": "Show, explain and reset tasks.",
    "deadletter": "List and requeue dead-lettered samples.",
    "storage": "List the storage services.",
    "sampler": "List a service's samplers and their options.",
    "checkpoint": "Write, list and restore checkpoints.",
    "replay": "Serve recorded batches read-only, or list the recorded steps.",
    "diff": "Compare the metadata of two recorded batches.",
    "token": "Create, list and revoke bearer tokens.",
    "health": "Print a service's health, and exit with code 0 only if the service is SERVING.",
    "version": "Print the versions of this program and of the service.",
    "plan": "Preview each sampler's plan for a file of sample lengths.",
    "bench": "Benchmark claims, puts and gets against a service for a few seconds.",
}
# Commands with verbs, by module. The module defines a constant for each command group, such as PARTITION.
_GROUPS = {
    "partition": "partitions", "task": "partitions", "deadletter": "partitions",
    "storage": "services", "sampler": "services", "checkpoint": "services",
    "token": "token",
}  # fmt: skip

_EXTRAS = {
    "torch": "data", "tensordict": "data", "starlette": "ui", "uvicorn": "ui",
    "prometheus_client": "metrics", "opentelemetry": "traces",
}  # fmt: skip


class _CommandsOnDemand(TyperGroup):
    """A command group that imports each command's module on first use.

    Signatures annotate click objects as Any because some versions of typer import click and others bundle a copy of
    click.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        from tq_service.cli.options import GroupedOptions  # noqa: PLC0415  (not needed by the overview)

        module = importlib.import_module(f"tq_service.cli.{_GROUPS.get(cmd_name, cmd_name)}")
        if cmd_name in _GROUPS:
            holder = getattr(module, cmd_name.upper())
        else:
            holder = typer.Typer(add_completion=False, rich_markup_mode=None)
            holder.command(cmd_name, cls=GroupedOptions, epilog=f"\b\nExamples:\n{module.EXAMPLES}")(module.command)
        command = typer.main.get_command(holder)
        command.name, command.help = cmd_name, command.help or COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=_CommandsOnDemand,
    no_args_is_help=True,
    rich_markup_mode=None,  # boxes truncate long option names, whereas plain text wraps
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success, 1 error, 2 usage error, 70 service failure, 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tq_service.version import BUILD  # noqa: PLC0415  (needed only by this flag)

        typer.echo(f"tq-service {BUILD}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run, inspect, repair and measure tq-service, the data service between rollout workers and trainer ranks."""


def main() -> None:
    """Run the command line. On error, print the message and any hint to stderr, and exit with a nonzero code."""
    try:
        sys.exit(app(standalone_mode=False))
    except (TqError, ConnectionError, TimeoutError) as error:
        _fail(str(error), _hint(error), 1)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        hint = f"install the extra {extra!r}, tq-service[{extra}]" if extra else f"pip install {error.name}"
        _fail(f"this command requires the Python module {error.name}, which is not installed", hint, 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        usage_error: Any = error  # from click or from typer's copy of click
        if not hasattr(usage_error, "format_message"):
            if type(error).__name__ == "Abort":  # the user declined a confirmation
                sys.exit(130)
            raise
        context = getattr(usage_error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{usage_error.format_message()}\n")
            sys.exit(usage_error.exit_code)
        hint = "" if context is None else f"{context.command_path} --help"
        _fail(usage_error.format_message().replace("\n", " "), hint, usage_error.exit_code)


def _fail(message: str, hint: str, exit_code: int) -> None:
    sys.stderr.write(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))
    sys.exit(exit_code)


def _hint(error: BaseException) -> str:
    """Return a hint to print after an error message, or an empty string if there is no hint."""
    reason, metadata = getattr(error, "reason", ""), getattr(error, "metadata", {})
    if reason == "UNAVAILABLE" and "address" in metadata:
        return 'start a service with "tq-service serve", or set another address with --address or TQ_ADDRESS'
    if reason == "PARTITION_NOT_FOUND" and _looks_like_address(name := metadata.get("partition_id", "")):
        return f"pass an address with --address: tq-service status --address {name}"
    return ""


def _looks_like_address(name: str) -> bool:
    host, colon, port = name.rpartition(":")
    return name == "localhost" or bool(colon and host and port.isdecimal())
