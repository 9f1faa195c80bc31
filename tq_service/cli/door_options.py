"""The options by which commands are let in by a service: TLS and token."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

# Each stands for the environment variable from which clients take it. There is none for the token itself: every user of
# a machine can read the arguments of its processes.
_VARIABLES: Final = {
    "tls_ca": ("TQ_TLS_CA", "Authorities (PEM) that the service's certificate is checked against; makes it TLS."),
    "tls_cert": ("TQ_TLS_CERT", "Certificate (PEM) of this client, for a service that asks for one."),
    "tls_key": ("TQ_TLS_KEY", "Private key (PEM) of that certificate."),
    "token_file": ("TQ_TOKEN_FILE", "File with the token; or TQ_TOKEN is the token."),
}


def with_door_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command options for TLS and token; they stand for this process's environment, which its clients read."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, typer.Option(metavar="FILE", help=f"{text} [env var: {variable}]", show_default=False)
            ],
        )
        for name, (variable, text) in _VARIABLES.items()
    ]
    parameters = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), *added]

    def command(**values: Any) -> None:
        for name, (variable, _) in _VARIABLES.items():
            path = values.pop(name)
            if path is not None:
                os.environ[variable] = path
                if name == "token_file":
                    os.environ.pop("TQ_TOKEN", None)  # which would win over the file
        function(**values)

    command.__doc__ = function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command
