"""`tq-service ui`: serves a live page that shows a running service in the browser."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import Annotated, Any, Final

import typer

from tq_service.cli.log_lines import configure_logging
from tq_service.cli.options import announce, with_address
from tq_service.errors import DeadlineError, UnavailableError

_FIRST_ANSWER_SECONDS: Final = 2.0

EXAMPLES = """\
  tq-service ui
  tq-service ui --address controller:50051 --port 8080
  tq-service ui --host 0.0.0.0 --allowed-host tq.example
  tq-service ui --root-path /tq --prefix train@"""


@with_address
def command(
    *,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. With 0.0.0.0 or ::, any machine can open the page without a token."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 8080,
    prefix: Annotated[
        str, typer.Option(help="Show only partitions whose names begin with this prefix.", show_default=False)
    ] = "",
    root_path: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="URL path under which a proxy serves the page, such as /tq.", show_default=False
        ),
    ] = "",
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name to accept in requests, in addition to localhost and IP addresses; may be repeated.",
            show_default=False,
        ),
    ] = None,
    **service: Any,
) -> None:
    """Serve a live page that shows a service in the browser. Runs until SIGTERM or SIGINT.

    The page server only reads from the service, so a token with the read role is sufficient. The page server can start
    before the service, and reconnects when the service restarts.
    """
    from tq_service.client import AsyncClient  # noqa: PLC0415  (--help does not need grpc)
    from tq_service.config import is_loopback, join_address  # noqa: PLC0415  (as above)
    from tq_service.observe.page.app import listen, make_app, serve_page  # noqa: PLC0415  (as above)
    from tq_service.observe.page.feed import Feed  # noqa: PLC0415  (as above)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with AsyncClient(**service) as client:
            with contextlib.suppress(
                UnavailableError, DeadlineError
            ):  # an unreachable service may start later, but wrong credentials end the command
                await client.health(timeout=_FIRST_ANSWER_SECONDS)

            feed = Feed(client, prefix=prefix)
            app = make_app(feed, root_path=root_path, allowed_hosts=allowed_host or ())
            bound = listen(host, port)
            configure_logging("warning", "text")
            logging.getLogger("tq_service.client").setLevel(logging.ERROR)  # the page shows outages
            where = join_address(*bound.getsockname()[:2])
            page = f"http://{where}{root_path.rstrip('/')}/"
            line = f"listening on {where} (open {page}), for the service at {client.address}"
            await serve_page(feed, app, bound, stop=stop, on_started=lambda: announce(line))

    if not is_loopback(host):
        typer.echo(f"warning: every machine that can reach {host} can open the page without a token", err=True)
    asyncio.run(run())
