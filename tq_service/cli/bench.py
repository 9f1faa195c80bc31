"""`tq-service bench`: a quick load from this machine."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated, Any

import typer

from tq_service.cli.addresses import open_client
from tq_service.cli.options import with_address
from tq_service.cli.output import AsJson, print_json, print_table
from tq_service.config import parse_size
from tq_service.errors import InvalidArgumentError

_ANSWER_SECONDS = 5.0

EXAMPLES = """\
  tq-service bench
  tq-service bench --address controller:50051 --seconds 5
  tq-service bench --size 256MiB --json"""


_ADDRESS_HELP = (
    "The service, as host:port, or the host alone for port 50051. Default: a service of its own, started for this and "
    "stopped after it."
)


def _command(
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="How long to measure, about.")] = 10.0,
    ranks: Annotated[int, typer.Option(min=1, max=512, help="Trainer ranks that claim at once.")] = 16,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of a bulk put, such as 64MiB.")] = "64MiB",
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Measure claims, puts and gets of one client process against a service.

    What it stores is removed again. The figures tell how client and service do on the machines they run on now.
    """
    size_bytes = _positive_bytes(size)
    from tq_service.cli.load import Figure, measure  # noqa: PLC0415  (--help does without grpc and numpy)
    from tq_service.client import AsyncClient  # noqa: PLC0415  (as above)
    from tq_service.testing import ServiceProcess  # noqa: PLC0415  (as above)

    async def run(target: str, **credentials: Any) -> list[Figure]:
        measuring = asyncio.current_task()
        if measuring is not None:  # SIGTERM too removes what the benchmark stored; SIGINT does by itself
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
        async with AsyncClient(target, **credentials) as client:
            return await measure(client, seconds=seconds, ranks=ranks, size_bytes=size_bytes)

    try:
        if given["address"]:
            with open_client(timeout=_ANSWER_SECONDS, **given):  # else a wrong address would be tried for a minute
                pass
            figures = asyncio.run(run(given.pop("address"), **given))
        else:
            with ServiceProcess() as service:
                figures = asyncio.run(run(service.address, token=False, tls=False))
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    if as_json:
        print_json(figures)
        return
    rows = [
        (figure.name, round(figure.rate), figure.unit, f"{figure.p50_ms:.2f}", f"{figure.p99_ms:.2f}", figure.count)
        for figure in figures
    ]
    print_table("measured, >rate, unit, >p50 ms, >p99 ms, >calls", rows)


command = with_address(_command, _ADDRESS_HELP)


def _positive_bytes(size: str) -> int:
    try:
        size_bytes = parse_size(size)
    except ValueError as error:
        raise InvalidArgumentError(f"--size: got {size!r}: {error}", field="size") from None
    if not isinstance(size_bytes, int) or size_bytes <= 0:
        raise InvalidArgumentError(f"--size: got {size!r}; expected more than 0 bytes, such as 64MiB", field="size")
    return size_bytes
