"""`tq-service health`: queries the standard gRPC health service. Compose and Kubernetes use this command as a probe."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tq_service.addresses import cause_of, split_addresses
from tq_service.cli.options import AsJson, print_json, probed_address, with_address

if TYPE_CHECKING:
    from tq_service import Tls

EXAMPLES = """\
  tq-service health
  tq-service health --address controller:50051 --timeout 2
  tq-service health --address c1,c2,c3 --service tq_service.v1.ControllerService
  tq-service health --tls-ca ca.pem --json"""


_ADDRESS_HELP = (
    "Service address as host:port, or host alone for port 50051. Separate several addresses with commas; only one of "
    "them must be SERVING. Default: localhost, with the port in TQ_PORT or 50051."
)


def _command(
    service: Annotated[
        str,
        typer.Option(help="Check only this gRPC service, such as tq_service.v1.StorageService.", show_default=False),
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds to wait for a response.")] = 5.0,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Print a service's health. The exit code is 0 if the service is SERVING, and 1 otherwise."""
    answers, errors = _ask(split_addresses(probed_address(given["address"])), service, timeout, given["tls"])
    serving = [target for target, status in answers.items() if status == "SERVING"]
    if not serving:
        for error in errors:
            typer.echo(f"error: {error}", err=True)
    if answers:
        target = serving[0] if serving else next(iter(answers))
        if as_json:
            print_json({"address": target, "status": answers[target]})
        else:
            typer.echo(answers[target])
    if not serving:
        raise typer.Exit(1)


def _ask(targets: Sequence[str], service: str, timeout: float, tls: Tls | None) -> tuple[dict[str, str], list[str]]:
    """Query all services in parallel. Return a dict that maps addresses to statuses, and a list of errors."""
    import grpc  # noqa: PLC0415  (not needed by --help)
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415  (not needed by --help)

    answers: dict[str, str] = {}
    errors = []
    request = health_pb2.HealthCheckRequest(service=service)
    with contextlib.ExitStack() as channels:
        calls = {}
        for target in targets:  # no token is sent, because health checks do not need a token
            channel = channels.enter_context(
                grpc.insecure_channel(target) if tls is None else grpc.secure_channel(target, tls.channel_credentials())
            )
            calls[target] = health_pb2_grpc.HealthStub(channel).Check.future(request, timeout=timeout)
        for target, call in calls.items():
            try:
                status = call.result().status
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    errors.append(f"cannot reach {target}: {cause_of(error.details() or '')}")
                else:
                    errors.append(f"{target}: {error.code().name}: {error.details()}")
                continue
            answers[target] = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            if answers[target] == "SERVING":
                break
    return answers, errors


command = with_address(_command, _ADDRESS_HELP)
