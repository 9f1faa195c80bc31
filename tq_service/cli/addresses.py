"""Where commands find the service, and how long they wait for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tq_service.addresses import DEFAULT_PORT, parse_address
from tq_service.errors import DeadlineError, InvalidArgumentError, TqError, UnavailableError

if TYPE_CHECKING:
    from tq_service.client import Client

Address = Annotated[
    str | None,
    typer.Argument(
        envvar="TQ_ADDRESS",
        help="The service, as host:port, or the host alone for port 50051. Default: localhost:50051.",
        show_default=False,
    ),
]

Timeout = Annotated[
    float,
    typer.Option(
        min=0.1, help="Seconds to wait for an answer; a service that cannot be reached is tried for one second."
    ),
]

_START_SECONDS: Final = 1.0
_ASK_AGAIN_SECONDS: Final = 0.1


@contextmanager
def open_client(address: str | None, timeout: float, **credentials: Any) -> Iterator[Client]:
    """Give a client of a service that answers; one that refuses connections is waited for a second at most.

    Args:
        address: the one given, None for the default.
        timeout: seconds that the first answer may take.
        **credentials: of the client.

    Raises:
        InvalidArgumentError: nothing can be reached at such an address.
        UnavailableError: the service cannot be reached.
        DeadlineError: it does not answer.
    """
    from tq_service.client import Client  # noqa: PLC0415  (--help does without grpc)

    with Client(address, **credentials) as client:
        given_up_at = time.monotonic() + min(timeout, _START_SECONDS)
        while True:
            try:
                client.health(timeout=timeout)
            except DeadlineError:
                raise
            except UnavailableError as error:
                if time.monotonic() >= given_up_at:
                    raise UnavailableError(f"{error}; is the service running there?", metadata=error.metadata) from None
            except TqError:  # something answers, and what is wrong is better said by the call that is to be made
                break
            else:
                break
            time.sleep(_ASK_AGAIN_SECONDS)
        yield client


def probed_address(address: str | None) -> str:
    """Return the address given, else that of a server with this environment's TQ_PORT on this machine.

    Raises:
        InvalidArgumentError: nothing can be reached at such an address.
    """
    if address:
        return parse_address(address)
    port = os.environ.get("TQ_PORT") or str(DEFAULT_PORT)
    if not port.isdecimal():
        raise InvalidArgumentError(
            f"TQ_PORT: got {port!r}, expected the port to listen on (Kubernetes sets this for a service named tq: use "
            "another name, or enableServiceLinks: false)"
        )
    return f"localhost:{port}"
