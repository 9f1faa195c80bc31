"""Options that commands have in common, added to the signatures that typer reads; and groups of commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

ADDRESS_HELP: Final = (
    "The service, as host:port, or the host alone for port 50051; of several controllers their addresses with commas "
    "between them. Default: localhost:50051."
)

# Clients read the same variables. There is no option for the token itself: every user of a machine can read the
# arguments of its processes.
_TLS_FILES: Final = {
    "ca": "Authorities (PEM) that the service's certificate is checked against; makes it TLS.",
    "cert": "Certificate (PEM) of this client, for a service that asks for one.",
    "key": "Private key (PEM) of that certificate.",
}

_WHOLE: Final = 10_000  # characters: more than any sentence has

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]


class GroupedOptions(TyperCommand):
    """Shows options under the titles of their `rich_help_panel`, as plain text; the others under Options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write them."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class VerbGroup(TyperGroup):
    """Lists its verbs with the first sentence of each, whole; typer would cut it to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write them."""
        verbs = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(limit=_WHOLE)) for name, each in verbs.items() if each is not None]
            )


def option(name: str, kind: Any, info: Any, default: Any = None) -> inspect.Parameter:
    """Return an option as a parameter of a command; without a default it is None where it is not given."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, info],
    )


def with_options(
    function: Callable[..., None],
    options: Sequence[inspect.Parameter],
    convert: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Callable[..., None]:
    """Return a command with the parameters of a function, and more options in place of its `**` parameter.

    Args:
        function: does the work.
        options: those that are added.
        convert: makes of their values what the function gets.
    """
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    names = [parameter.name for parameter in own]

    def command(**values: Any) -> None:
        given = {name: values.pop(name) for name in names}
        function(**given, **convert(values))

    parameters = [*own, *options]
    command.__doc__ = function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def _credentials() -> list[inspect.Parameter]:
    files = [
        option(f"tls_{name}", str, typer.Option(metavar="FILE", envvar=f"TQ_TLS_{name.upper()}", help=text))
        for name, text in _TLS_FILES.items()
    ]
    # The client reads its variable, and TQ_TOKEN first.
    text = "File with the token; or TQ_TOKEN is the token. [env var: TQ_TOKEN_FILE]"
    return [*files, option("token_file", Path, typer.Option(metavar="FILE", help=text))]


def with_address(function: Callable[..., None], address_help: str = ADDRESS_HELP) -> Callable[..., None]:
    """Give a command options for address, TLS and token; its `**` parameter gets `address`, `token` and `tls`."""
    return with_options(function, [_address(address_help), *_credentials()], _given)


def with_service(function: Callable[..., None], timeout: float = 5.0) -> Callable[..., None]:
    """Give a command options for the service; its `**` parameter gets what `open_client` takes."""
    text = "Seconds to wait for an answer; a service that cannot be reached is tried for one second."
    limit = option("timeout", float, typer.Option(min=0.1, help=text), timeout)
    return with_options(function, [_address(ADDRESS_HELP), limit, *_credentials()], _given)


def _address(help_text: str) -> inspect.Parameter:
    info = typer.Option("--address", "-a", envvar="TQ_ADDRESS", help=help_text, show_default=False)
    return option("address", str, info)


def make_group(summary: str, examples: str) -> typer.Typer:
    """Return a noun, whose verbs are added with `verb`."""
    return typer.Typer(
        cls=VerbGroup,
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        help=summary,
        epilog=f"\b\nExamples:\n{examples}",
    )


def verb(group: typer.Typer, name: str, timeout: float = 5.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to a group as a command that calls the service, see `with_service`."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        group.command(name, cls=GroupedOptions)(with_service(function, timeout))
        return function

    return add


def given_credentials(values: dict[str, Any]) -> dict[str, Any]:
    """Return the client's arguments `token` and `tls`, from the values of these options."""
    files = {name: values.get(f"tls_{name}") for name in _TLS_FILES}
    if not any(files.values()):
        return {"token": values.get("token_file"), "tls": None}
    from tq_service import Tls  # noqa: PLC0415  (--help does without grpc)

    return {"token": values.get("token_file"), "tls": Tls(**files)}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if name in {"address", "timeout"}}
    return kept | given_credentials(values)
