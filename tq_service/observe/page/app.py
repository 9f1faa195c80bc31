"""The live page's web server. It serves assets and a stream of frames to requests with an allowed host name."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tq_service.errors import InvalidArgumentError
from tq_service.observe.page.feed import Feed

_MOST_STREAMS: Final = 100
_GRACE_SECONDS: Final = 2

# Security headers. Browsers may load scripts and styles only from this server. The scripts insert names as text, never
# as markup, so a partition name cannot inject a script.
_HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def make_app(feed: Feed, *, root_path: str = "", allowed_hosts: Iterable[str] = ()) -> ASGIApp:
    """Create the ASGI application that serves the live page.

    Args:
        feed: source of the frames that are streamed to browsers.
        root_path: URL path under which a proxy serves the page, such as "/tq". The proxy may strip this path from
            requests.
        allowed_hosts: host names to accept in requests, in addition to localhost and all IP addresses.

    Raises:
        InvalidArgumentError: `root_path` is not a valid path.
    """
    root_path = _checked_path(root_path)
    stream_count = 0

    async def stream(request: Request) -> Response:
        nonlocal stream_count
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must not buffer frames
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=headers)
        if stream_count >= _MOST_STREAMS:
            text = f"{_MOST_STREAMS} browsers are already connected to this page; close one of them\n"
            return PlainTextResponse(text, 503, headers={"Retry-After": "10", "Cache-Control": "no-store"})

        async def events() -> AsyncIterator[bytes]:
            nonlocal stream_count
            stream_count += 1
            try:
                yield b"retry: 2000\n\n"
                async for frame in feed.frames():
                    yield b"event: frame\ndata: " + frame + b"\n\n"
            finally:
                stream_count -= 1

        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    files = StaticFiles(packages=[(__package__, "assets")], html=True)
    routes: list[BaseRoute] = [Route("/events", stream), Mount("/assets", files), Mount("/", files)]
    if root_path:

        async def with_slash(request: Request) -> Response:
            return RedirectResponse(f"{root_path}/", 308)

        routes = [Route(root_path, with_slash), Mount(root_path, routes=routes), *routes]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # Starlette's redirect would contain the request's Host header
    return _Guarded(app, allowed_hosts)


def _checked_path(path: str) -> str:
    trimmed = path.rstrip("/")
    if trimmed and (not trimmed.startswith("/") or "//" in trimmed or any(each in trimmed for each in "{}?#\\ ")):
        raise InvalidArgumentError(f"root_path is {path!r}; expected a path such as '/tq'", field="root_path")
    return trimmed


class _Guarded:
    """ASGI middleware that rejects requests for unknown host names and adds security headers to responses.

    The host check prevents DNS rebinding: another site could otherwise make its name resolve to this server and read
    the page. The Host header of a rebinding request contains the other site's name. IP addresses are safe, because they
    are not resolved by DNS.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str]) -> None:
        self._app = app
        self._allowed = {"localhost", *(host.lower().rstrip(".") for host in allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = Headers(scope=scope).getlist("host")
        if len(hosts) == 1 and self._is_allowed(hosts[0]):
            await self._app(scope, receive, send_with_headers)
            return
        text = "this page is not served under this host name; start tq-service ui with --allowed-host NAME\n"
        await PlainTextResponse(text, 421)(scope, receive, send_with_headers)

    def _is_allowed(self, host: str) -> bool:
        name = _without_port(host).lower().rstrip(".")
        return name in self._allowed or name.endswith(".localhost") or _is_ip_address(name)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Server(uvicorn.Server):
    """A uvicorn server that ignores signals. At shutdown, it closes the feed, then waits for connections to end."""

    def __init__(self, config: uvicorn.Config, feed: Feed, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._feed = feed
        self._on_started = on_started

    def capture_signals(self) -> Any:
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens on a local address. If the port is 0, the system chooses a free port.

    Raises:
        InvalidArgumentError: the process cannot listen on this address.
    """
    is_ipv6 = ":" in host
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
        )
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port", field="port"
        ) from None


async def serve_page(
    feed: Feed, app: ASGIApp, bound: socket.socket, *, stop: asyncio.Event, on_started: Callable[[], None]
) -> None:
    """Run the feed and the web server of the live page until `stop` is set.

    Args:
        feed: feed that provides the page's frames. This function runs the feed.
        app: application returned by `make_app`.
        bound: listening socket returned by `listen`, which is closed before this function returns.
        stop: event that stops the server.
        on_started: function called when the page becomes reachable.
    """
    config = uvicorn.Config(
        app, lifespan="off", ws="none", access_log=False, log_config=None, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )  # fmt: skip
    server = _Server(config, feed, on_started)
    reading = asyncio.create_task(feed.run())
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([reading, serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:  # end the streams before the feed, because they wait for its frames
        server.should_exit = True
        await asyncio.wait([serving])
        reading.cancel()
        stopping.cancel()
        await asyncio.wait([reading, stopping])
    for task in (reading, serving):
        if not task.cancelled():
            task.result()
