"""`tq-service version`: prints the versions of this program and of the service."""

from __future__ import annotations

import platform
from typing import Annotated, Any

import typer

from tq_service.cli.options import AsJson, open_client, print_json, with_service
from tq_service.errors import TqError
from tq_service.version import BUILD

EXAMPLES = """\
  tq-service version
  tq-service version --client
  tq-service version --json --address controller:50051"""


@with_service
def command(
    client_only: Annotated[
        bool, typer.Option("--client", help="Print only the version of this program, without connecting to a service.")
    ] = False,
    as_json: AsJson = False,
    **service: Any,
) -> None:
    """Print the versions of this program and of the service. The exit code is 1 if the service does not respond."""
    own = {"version": BUILD, "python": platform.python_version()}
    if client_only:
        _print(own, [], as_json)
        return
    try:
        with open_client(**service) as client:
            status = client.status(explain=False)
            address = client.address
    except TqError:
        if not as_json:
            _print(own, [], as_json)
        raise
    services = [{"address": address, "role": status.service.role, "version": status.service.version}]
    services += [
        {"address": each.address, "role": "storage", "version": each.version}
        for each in status.storages
        if each.address
    ]
    _print(own, services, as_json)


def _print(own: dict[str, str], services: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        print_json({"client": own, "services": services})
        return
    typer.echo(f"client   {own['version']}  (Python {own['python']})")
    for each in services:
        typer.echo(f"service  {each['version'] or 'unknown'}  ({each['role']} at {each['address']})")
