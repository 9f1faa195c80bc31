"""The HTTP server that Prometheus scrapes. The server uses separate threads, so slow peers cannot block the event loop.

The server handles GET and HEAD requests for /metrics. Depending on the Accept header, it responds in Prometheus's text
format or in OpenMetrics. Metrics are collected on the event loop and converted to text in the request's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from tq_service.log_message import LogMessage

_log = logging.getLogger(__name__)
_PATH: Final = "/metrics"
_IDLE_SECONDS: Final = 10.0
_SCRAPE_SECONDS: Final = 30.0
_MOST_CONNECTIONS: Final = 16
_ESTABLISHED: Final = "01"

Collect = Callable[[], Coroutine[Any, Any, Iterable[Metric]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Security settings of the metrics port.

    Attributes:
        context: function that returns the TLS context for the next connection, or None for plaintext.
        refusal: function that returns the reason for refusing a request, or None to allow it. The function's arguments
            are the Authorization header ("" if absent) and the peer's address. The function must be thread-safe.
    """

    context: Callable[[], ssl.SSLContext] | None = None
    refusal: Callable[[str, str], str | None] = lambda _authorization, _peer: None


class Endpoint:
    """The server of the metrics port. The port is open until `close` is called.

    Args:
        host: address to listen on.
        port: port to listen on, or 0 to let the system choose a free port.
        collect: coroutine function that returns the metrics and is called on the event loop.
        loop: event loop of the service.
        access: security settings of the port.
        service_port: gRPC port of the service. The number of client connections to this port is exposed as a metric.

    Attributes:
        port: port that the server listens on.
        places: semaphore that limits the number of concurrent connections.

    Raises:
        OSError: the address is in use, or the system does not allow the process to listen on it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        collect: Collect,
        loop: asyncio.AbstractEventLoop,
        access: Access,
        service_port: int,
    ) -> None:
        self._collect = collect
        self._loop = loop
        self.access = access
        self._service_port = service_port
        self._process = ProcessCollector(registry=None)
        self.places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        try:
            self._server = _Server(host.strip("[]"), port, self)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(
                    f"cannot listen on {host}:{port} for metrics: the port is in use; choose another port"
                ) from error
            raise OSError(f"cannot listen on {host}:{port} for metrics: {error}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="tq-metrics", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """Close the port, but let requests in progress complete."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()

    def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as text, and the text's content type. Do not call this method in the event loop's thread.

        Raises:
            TimeoutError: the event loop did not return the metrics in time.
        """
        collecting = asyncio.run_coroutine_threadsafe(self._collect(), self._loop)
        try:
            metrics = [*collecting.result(_SCRAPE_SECONDS)]
        except BaseException:
            collecting.cancel()
            raise
        metrics += self._process.collect()
        connections = count_connections(self._service_port)
        if connections is not None:
            metrics.append(GaugeMetricFamily("tq_service_connections", "Open client connections.", connections))
        encode, content_type = choose_encoder(accept)
        return encode(_Collected(metrics)), content_type


class _Collected(CollectorRegistry):
    """A registry that returns a fixed list of metrics, so that prometheus-client can encode them."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the registry's fixed list of metrics."""
        return self._metrics


class _Server(ThreadingHTTPServer):
    """An HTTP server that handles each connection in a thread, up to `_MOST_CONNECTIONS` at a time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind the socket without looking up the host name, which may be slow."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection's requests in a separate thread, or close the connection if too many are open."""
        if not self.endpoint.places.acquire(blocking=False):
            return
        with contextlib.ExitStack() as ending:
            ending.callback(self.endpoint.places.release)
            request.settimeout(_IDLE_SECONDS)
            if (context := self.endpoint.access.context) is not None:
                request = ending.enter_context(context().wrap_socket(request, server_side=True))
            super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection error, without the traceback if the peer caused the error."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            _log.info(LogMessage("connection to the metrics port failed", peer=client_address[0], error=error))
        else:
            _log.error(LogMessage("could not respond to a metrics request", peer=client_address[0]), exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    """Handles the metrics requests on one HTTP connection."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "tq-service"
    sys_version = ""
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        """Respond to a request with the metrics, omitting the body if the method is HEAD."""
        status, kind, body = self._scrape()
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Bearer realm="tq-service metrics"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  (a method's name in the base class)

    def _scrape(self) -> tuple[HTTPStatus, str, bytes]:
        endpoint, plain = self.server.endpoint, "text/plain; charset=utf-8"
        if self.path.partition("?")[0] != _PATH:
            return HTTPStatus.NOT_FOUND, plain, f"not found; metrics are served at {_PATH}\n".encode()
        peer = f"{self.client_address[0]}:{self.client_address[1]}"
        refusal = endpoint.access.refusal(self.headers.get("Authorization", ""), peer)
        if refusal is not None:
            return HTTPStatus.UNAUTHORIZED, plain, f"{refusal}\n".encode()
        try:
            body, kind = endpoint.scrape(self.headers.get("Accept", ""))
        except TimeoutError:
            return HTTPStatus.SERVICE_UNAVAILABLE, plain, b"the service is too busy to be scraped; retry later\n"
        return HTTPStatus.OK, kind, body

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (as in the base class)
        """Log a request at debug level, because metrics are scraped every few seconds."""
        _log.debug(LogMessage("received a metrics request", peer=self.client_address[0], request=format % args))


def count_connections(port: int) -> int | None:
    """Return the number of open TCP connections to a port on this host, or None if /proc is not available."""
    line = re.compile(rf"^ *\d+: [0-9A-F]+:{port:04X} [0-9A-F]+:[0-9A-F]{{4}} {_ESTABLISHED} ", re.MULTILINE)
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    try:
        return sum(len(line.findall(table.read_text())) for table in tables if table.exists() or table == tables[0])
    except OSError:
        return None
