"""Options that commands have in common, added to the signatures that typer reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

# Clients read the same variables. There is no option for the token itself: every user of a machine can read the
# arguments of its processes.
_TLS_FILES: Final = {
    "ca": "Authorities (PEM) that the service's certificate is checked against; makes it TLS.",
    "cert": "Certificate (PEM) of this client, for a service that asks for one.",
    "key": "Private key (PEM) of that certificate.",
}


def option(name: str, kind: Any, info: Any) -> inspect.Parameter:
    """Return an option as a parameter of a command; it is None where it is not given."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
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


def with_client_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command options for TLS and token; its `**` parameter gets the client's arguments `token` and `tls`."""
    files = [
        option(f"tls_{name}", str, typer.Option(metavar="FILE", envvar=f"TQ_TLS_{name.upper()}", help=text))
        for name, text in _TLS_FILES.items()
    ]
    # The client reads its variable, and TQ_TOKEN first.
    text = "File with the token; or TQ_TOKEN is the token. [env var: TQ_TOKEN_FILE]"
    return with_options(function, [*files, option("token_file", Path, typer.Option(metavar="FILE", help=text))], _given)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    files = {name: values[f"tls_{name}"] for name in _TLS_FILES}
    if not any(files.values()):
        return {"token": values["token_file"], "tls": None}
    from tq_service import Tls  # noqa: PLC0415  (--help does without grpc)

    return {"token": values["token_file"], "tls": Tls(**files)}
