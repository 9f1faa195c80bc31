"""Where commands find the service, how long they wait for it, and names that shells complete from it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tq_service.addresses import DEFAULT_PORT, parse_address
from tq_service.cli.options import given_credentials
from tq_service.errors import DeadlineError, InvalidArgumentError, TqError, UnavailableError

if TYPE_CHECKING:
    from tq_service.client import Client

_START_SECONDS: Final = 1.0
_ASK_AGAIN_SECONDS: Final = 0.1
_ANSWER_SECONDS: Final = 5.0
_COMPLETION_SECONDS: Final = 1.0
_MOST_COMPLETIONS: Final = 100


@contextmanager
def open_client(address: str | None, timeout: float, **credentials: Any) -> Iterator[Client]:
    """Give a client of a service that answers; one that refuses connections is waited for a second at most.

    Args:
        address: the one given, None for the default.
        timeout: seconds that a call may take.
        **credentials: of the client.

    Raises:
        InvalidArgumentError: nothing can be reached at such an address.
        UnavailableError: the service cannot be reached.
        DeadlineError: it does not answer.
    """
    from tq_service.client import Client  # noqa: PLC0415  (--help does without grpc)

    with Client(address, timeout, **credentials) as client:
        given_up_at = time.monotonic() + min(timeout, _START_SECONDS)
        while True:
            try:
                client.health(timeout=min(timeout, _ANSWER_SECONDS))
            except DeadlineError:
                raise
            except UnavailableError:
                if time.monotonic() >= given_up_at:
                    raise
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


def _completions(ctx: typer.Context, names: Callable[[Client], Iterable[str]]) -> list[str]:
    """Return the names that a shell shows; none if the service does not answer at once."""
    with contextlib.suppress(Exception):  # a shell that completes shows no errors
        from tq_service.client import Client  # noqa: PLC0415  (as in open_client)

        with Client(ctx.params.get("address"), _COMPLETION_SECONDS, **given_credentials(ctx.params)) as client:
            client.health()
            return list(names(client))
    return []


def _complete_partition(ctx: typer.Context, incomplete: str) -> list[str]:
    return _completions(
        ctx, lambda client: [each.partition_id for each in client.list_partitions(incomplete)[:_MOST_COMPLETIONS]]
    )


def _complete_task(ctx: typer.Context, incomplete: str) -> list[str]:
    def names(client: Client) -> Iterator[str]:
        tasks = client.describe_partition(ctx.params["partition"]).tasks
        return (each.task_name for each in tasks if each.task_name.startswith(incomplete))

    return _completions(ctx, names)


Partition = Annotated[str, typer.Argument(help="Name of the partition.", autocompletion=_complete_partition)]
Partitions = Annotated[
    list[str] | None,
    typer.Argument(help="Names of partitions.", show_default=False, autocompletion=_complete_partition),
]
Task = Annotated[str, typer.Argument(help="Name of the task.", autocompletion=_complete_task)]
TaskOrAll = Annotated[
    str | None, typer.Argument(help="Only this task.", show_default=False, autocompletion=_complete_task)
]
