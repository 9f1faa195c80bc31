"""Where commands find the service."""

from __future__ import annotations

import os
from typing import Annotated

import typer

Address = Annotated[
    str | None,
    typer.Argument(
        envvar="TQ_ADDRESS", help="The service, as host:port. Default: localhost:50051.", show_default=False
    ),
]


def probed_address(address: str | None) -> str:
    """Return the address given, else that of a server with this environment's TQ_PORT on this machine."""
    if address:
        return address
    return f"localhost:{os.environ.get('TQ_PORT') or 50051}"
