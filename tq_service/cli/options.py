"""Options, service connections, command groups and output functions shared by all CLI commands."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from tq_service.addresses import DEFAULT_PORT, parse_address
from tq_service.errors import DeadlineError, InvalidArgumentError, TqError, UnavailableError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tq_service.client import Client

ADDRESS_HELP: Final = (
    "Service address as host:port, or host alone for port 50051; separate several controller addresses with commas. "
    "Default: localhost:50051."
)

# TLS options of the CLI. Clients read the same environment variables. There is no option for the token itself, because
# every user of a machine can read the command lines of all processes.
_TLS_FILES: Final = {
    "ca": "Certificate authority file (PEM) for verifying the service's certificate; enables TLS.",
    "cert": "Client certificate (PEM), if the service requires one.",
    "key": "Private key (PEM) of the client certificate.",
}

_WHOLE: Final = 10_000  # length limit in characters, which exceeds the length of every help text
_START_SECONDS: Final = 1.0
_ASK_AGAIN_SECONDS: Final = 0.1
_ANSWER_SECONDS: Final = 5.0
_COMPLETION_SECONDS: Final = 1.0
_MOST_COMPLETIONS: Final = 100

Prefix = Annotated[str, typer.Argument(help="List only names that begin with this prefix.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


# Options that commands accept in addition to their functions' parameters


def option(name: str, kind: Any, info: Any, default: Any = None) -> inspect.Parameter:
    """Create the signature parameter for a command option."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, info],
    )


def with_options(
    function: Callable[..., Any], options: Iterable[inspect.Parameter], call: Callable[..., None] | None = None
) -> Callable[..., None]:
    """Create a command that accepts `options` and the function's parameters, except `client` and `**` parameters.

    Args:
        function: function that implements the command.
        options: options to add.
        call: callable that receives the values of all parameters and must call `function`. If None, the command calls
            `function` directly.
    """
    signature = inspect.signature(
        function, eval_str=True, locals={"Client": object}
    )  # annotations are resolved without importing the client
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "client"
    ]
    parameters += options

    def command(**values: Any) -> None:
        (call or function)(**values)

    command.__doc__ = function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def _service_options(address_help: str = ADDRESS_HELP, timeout: float | None = None) -> Iterator[inspect.Parameter]:
    info = typer.Option("--address", "-a", envvar="TQ_ADDRESS", help=address_help)
    yield option("address", str, info)
    if timeout is not None:
        text = "Seconds to wait for a response; connection attempts stop after one second."
        yield option("timeout", float, typer.Option(min=0.1, help=text), timeout)
    for name, text in _TLS_FILES.items():
        info = typer.Option(metavar="FILE", envvar=f"TQ_TLS_{name.upper()}", help=text)
        yield option(f"tls_{name}", str, info)
    # Not set as `envvar`, because the client reads the variable and gives precedence to TQ_TOKEN.
    text = "File that contains the bearer token; alternatively, set TQ_TOKEN to the token. [env var: TQ_TOKEN_FILE]"
    yield option("token_file", Path, typer.Option(metavar="FILE", help=text))


def _take_credentials(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the TLS and token options from `values`, and return them as the client arguments `token` and `tls`."""
    files = {name: values.pop(f"tls_{name}", None) for name in _TLS_FILES}
    given = {"token": values.pop("token_file", None), "tls": None}
    if any(files.values()):
        from tq_service import Tls  # noqa: PLC0415  (--help does not need grpc)

        given["tls"] = Tls(**files)
    return given


def with_address(
    function: Callable[..., None], address_help: str = ADDRESS_HELP, timeout: float | None = None
) -> Callable[..., None]:
    """Add address, TLS and token options to a command, and pass their values as `address`, `token` and `tls`."""

    def call(**values: Any) -> None:
        function(**_take_credentials(values), **values)

    return with_options(function, _service_options(address_help, timeout), call)


def with_service(function: Callable[..., None]) -> Callable[..., None]:
    """Add connection options to a command, and pass their values as arguments for `open_client`."""
    return with_address(function, timeout=_ANSWER_SECONDS)


# Command groups (nouns) and their verbs


class GroupedOptions(TyperCommand):
    """A command whose help groups options by `rich_help_panel`. Options without a panel appear under "Options"."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options to the help text."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _VerbGroup(TyperGroup):
    """A command group whose help shows each command's full summary. Typer would truncate summaries to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands to the help text."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=_WHOLE)) for name, each in self.commands.items()])


def make_group(examples: str) -> typer.Typer:
    """Create a command group with examples in its help. Use `verb` to add commands to the group."""
    group = typer.Typer(
        cls=_VerbGroup,
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        epilog=f"\b\nExamples:\n{examples}",
    )
    group.callback()(lambda: None)  # without a callback, typer would omit the name of a single verb
    return group


def verb(
    group: typer.Typer, name: str, timeout: float | None = _ANSWER_SECONDS
) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Return a decorator that adds a function to a group as a command, with --json and connection options.

    The function receives a connected client as `client`, and yields its output for `show`. If `timeout` is None, the
    command does not connect to a service, and the function does not receive a client.
    """

    def add(function: Callable[..., Answer]) -> Callable[..., Answer]:
        def call(as_json: bool, **values: Any) -> None:
            if timeout is None:
                show(function(**values), as_json)
                return
            service = _take_credentials(values) | {each: values.pop(each) for each in ("address", "timeout")}
            with open_client(**service) as client:
                show(function(client, **values), as_json)

        options = [inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)]
        options += () if timeout is None else _service_options(timeout=timeout)
        group.command(name)(with_options(function, options, call))
        return function

    return add


# Connections to the service


@contextmanager
def open_client(address: str | None, timeout: float, **credentials: Any) -> Iterator[Client]:
    """Connect to the service, and yield a client once the service responds. Keep trying for up to one second.

    Args:
        address: address of the service, or None for the default address.
        timeout: timeout for each call, in seconds.
        **credentials: client arguments `token` and `tls`.

    Raises:
        InvalidArgumentError: the address is invalid.
        UnavailableError: the service cannot be reached.
        DeadlineError: the service does not respond.
    """
    from tq_service.client import Client  # noqa: PLC0415  (--help does not need grpc)

    with Client(address, timeout, **credentials) as client:
        given_up_at = time.monotonic() + min(timeout, _START_SECONDS)
        while True:
            try:
                client.health(timeout=min(timeout, _ANSWER_SECONDS))
                break
            except DeadlineError:
                raise
            except UnavailableError:
                if time.monotonic() >= given_up_at:
                    raise
            except TqError:  # the service responds, and the next call raises a better error
                break
            time.sleep(_ASK_AGAIN_SECONDS)
        yield client


def probed_address(address: str | None) -> str:
    """Return `address` if it is set; otherwise, return localhost with the port from TQ_PORT or the default port.

    Raises:
        InvalidArgumentError: the address is invalid.
    """
    if address:
        return parse_address(address)
    port = os.environ.get("TQ_PORT") or str(DEFAULT_PORT)
    if not port.isdecimal():
        raise InvalidArgumentError(
            f"TQ_PORT: got {port!r}, expected a port number. Kubernetes sets this variable if a Service is named tq; "
            "rename the Service, or set enableServiceLinks: false"
        )
    return f"localhost:{port}"


# Shell completion of partition and task names, read from the service


def _completions(ctx: typer.Context, names: Callable[[Client], Sequence[str]]) -> Sequence[str]:
    """Return the possible completions for a name. If the service does not respond immediately, return an empty list."""
    with contextlib.suppress(Exception):  # shell completion must not print errors
        from tq_service.client import Client  # noqa: PLC0415  (as in open_client)

        credentials = _take_credentials(dict(ctx.params))
        with Client(ctx.params.get("address"), _COMPLETION_SECONDS, **credentials) as client:
            client.health()
            return names(client)[:_MOST_COMPLETIONS]
    return []


def _complete_partition(ctx: typer.Context, incomplete: str) -> Sequence[str]:
    return _completions(ctx, lambda client: [each.partition_id for each in client.list_partitions(incomplete)])


def _complete_task(ctx: typer.Context, incomplete: str) -> Sequence[str]:
    def names(client: Client) -> list[str]:
        tasks = client.describe_partition(ctx.params["partition"]).tasks
        return [each.task_name for each in tasks if each.task_name.startswith(incomplete)]

    return _completions(ctx, names)


Partition = Annotated[str, typer.Argument(help="Name of the partition.", autocompletion=_complete_partition)]
Partitions = Annotated[
    list[str] | None,
    typer.Argument(help="Names of the partitions.", autocompletion=_complete_partition),
]
Task = Annotated[str, typer.Argument(help="Name of the task.", autocompletion=_complete_task)]
TaskOrAll = Annotated[
    str | None, typer.Argument(help="Show only this task. Default: all tasks.", autocompletion=_complete_task)
]


_PIPED_WIDTH = 160

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Answer = Iterator[Any]
"""Output of a command. The first item is the `--json` document. All other items are text or tables to print."""


def show(answer: Answer, as_json: bool) -> None:
    """Print a command's output, either as JSON or as text and tables."""
    document = next(answer)
    if as_json:
        print_json(document)
        return
    for each in answer:
        if isinstance(each, str):
            typer.echo(each)
        else:
            console().print(each)


def announce(line: str) -> None:
    """Print a line to stdout and flush it. If stdout is closed, do nothing."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def print_json(document: Any, indent: int | None = 2) -> None:
    """Print a document to stdout as JSON. Dataclasses become objects, and bytes become hexadecimal strings."""
    typer.echo(json.dumps(document, indent=indent, default=_json_value))


def _json_value(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value.hex()


def console() -> Console:
    """Return a console for stdout. If stdout is not a terminal, the console has `_PIPED_WIDTH` columns."""
    from rich.console import Console  # noqa: PLC0415  (not needed by --json)

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=_PIPED_WIDTH)


def table(headings: str, rows: Iterable[Sequence[object]], *, no_wrap: bool = False) -> Table:
    """Create a printable table.

    Args:
        headings: column headings, separated by commas. A heading that begins with ">" right-aligns its column.
        rows: cells of each row. None is shown as "-". Text is not interpreted as markup.
        no_wrap: whether to truncate long text instead of wrapping it.
    """
    from rich.table import Table  # noqa: PLC0415  (not needed by --json)
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
