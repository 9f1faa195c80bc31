"""`tq-service health`: asks the standard health service, for probes of Compose and Kubernetes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tq_service.addresses import cause_of
from tq_service.cli.addresses import probed_address
from tq_service.cli.options import with_address
from tq_service.cli.output import AsJson, print_json

EXAMPLES = """\
  tq-service health
  tq-service health --address controller:50051 --timeout 2
  tq-service health --tls-ca ca.pem --json"""


_ADDRESS_HELP = (
    "The service, as host:port, or the host alone for port 50051. Default: the port of TQ_PORT, else 50051, on this "
    "machine."
)


def _command(
    service: Annotated[
        str, typer.Option(help="One service, such as tq_service.v1.StorageService, instead of all.", show_default=False)
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds to wait for the answer.")] = 5.0,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Print the health of the service; exit code 0 when it is SERVING, else 1."""
    import grpc  # noqa: PLC0415  (`--help` does without)
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415  (`--help` does without)

    target = probed_address(given["address"])
    tls = given["tls"]  # no token: health is open
    with (
        grpc.insecure_channel(target) if tls is None else grpc.secure_channel(target, tls.channel_credentials())
    ) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                reason = f"cannot reach {target}: {cause_of(error.details() or '')}"
            else:
                reason = f"{target}: {error.code().name}: {error.details()}"
            typer.echo(f"error: {reason}", err=True)
            raise typer.Exit(1) from None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if as_json:
        print_json({"address": target, "status": status})
    else:
        typer.echo(status)
    if status != "SERVING":
        raise typer.Exit(1)


command = with_address(_command, _ADDRESS_HELP)
