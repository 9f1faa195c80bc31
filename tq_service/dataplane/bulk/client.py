"""The client side of bulk transfers: a probe of the storage service's bulk port, and reusable connections to it.

Some clients cannot reach the bulk port, for example because the service is behind an ingress. A background thread
therefore probes the port. If the port is unreachable, the client uses frames.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from tq_service.addresses import hosts_and_ports
from tq_service.dataplane.bulk.connection import BulkConnection, Integers, Moved
from tq_service.errors import UnavailableError
from tq_service.v1.storage_service_pb2 import BulkTicket, StatResponse
from tq_service.wire.columns import C, SourceColumn
from tq_service.wire.connection import Tls
from tq_service.wire.device import Chunk, on_host

SWITCH_VARIABLE: Final = "TQ_BULK"
_CONNECT_SECONDS: Final = 1.0
_ASK_AGAIN_SECONDS: Final = 60.0
_TRY_AGAIN_SECONDS: Final = 5.0
_KEPT_SECONDS: Final = 50.0  # below 60 s, after which the service closes idle connections
_MOST_KEPT: Final = 8
# Number of threads in addition to the callers' own threads. If there are too few threads, transfers only become slower.
_STREAMS: Final = ThreadPoolExecutor(32, thread_name_prefix="tq-bulk")

Remaining: TypeAlias = Callable[[], float]
"""A function that returns the number of seconds left for a transfer to finish."""


class _Port(NamedTuple):
    """A bulk port, and the instance id of the storage service that listens on it."""

    host: str
    port: int
    boot_id: bytes


class BulkLink:
    """A client's link to the bulk port of a storage service. Thread-safe.

    Args:
        address: gRPC address of the service.
        tls: TLS settings for bulk connections. None: plaintext.
        is_enabled: whether to probe the service's bulk port. If None, the environment variable TQ_BULK decides.
    """

    def __init__(self, address: str, tls: Tls | None = None, *, is_enabled: bool | None = None) -> None:
        self._address = address
        self._tls = tls
        self._lock = threading.Lock()  # protects all attributes below
        self._is_enabled = os.environ.get(SWITCH_VARIABLE, "").lower() != "off" if is_enabled is None else is_enabled
        self._ask_at = time.monotonic()
        self._port: _Port | None = None
        self._idle: deque[tuple[float, BulkConnection]] = deque()
        weakref.finalize(self, _close_all, self._idle).atexit = False  # clients need not be closed

    @property
    def is_up(self) -> bool:
        """Whether the bulk port is known to be reachable."""
        return self._port is not None

    def is_due(self) -> bool:
        """Return whether the client should ask the service for its bulk port now."""
        with self._lock:
            return self._is_enabled and self._port is None and time.monotonic() >= self._ask_at

    def postpone(self, seconds: float = _TRY_AGAIN_SECONDS) -> None:
        """Stop using the bulk port for now. After the given time, the client asks the service for its port again."""
        with self._lock:
            self._port = None
            self._ask_at = time.monotonic() + seconds

    def probe(self, stat: StatResponse) -> None:
        """Check in a background thread whether the announced bulk port is reachable."""
        self.postpone(_ASK_AGAIN_SECONDS)
        target = _target(stat.bulk_address, self._address)
        if target is not None:
            port = _Port(*target, stat.storage.boot_id)
            threading.Thread(target=self._probe, args=(port,), name="tq-bulk-probe", daemon=True).start()

    def _probe(self, port: _Port) -> None:
        try:
            connection = self._connect(port)
        except UnavailableError:
            return
        with self._lock:
            if self._is_enabled:
                self._port = port
        self._give_back(connection)

    def close(self) -> None:
        """Close all connections and prevent new connections."""
        with self._lock:
            self._is_enabled, self._port = False, None
        _close_all(self._idle)

    def send(self, ticket: BulkTicket, columns: Sequence[SourceColumn], remaining: Remaining) -> None:
        """Send the bytes of a put over bulk connections.

        Raises:
            UnavailableError: some bytes were not sent. Later calls use frames instead. If the data caused the failure,
                these calls also fail.
        """

        def send(connection: BulkConnection, parts: Sequence[Chunk], moved: Moved) -> None:
            for views in on_host(parts):
                connection.send(views, moved)

        self._move(ticket, [chunk for column in columns for chunk in column.chunks if len(chunk)], send, remaining)

    def receive(self, ticket: BulkTicket, views: Sequence[memoryview], remaining: Remaining) -> None:
        """Receive a get's bytes into `views` over bulk connections.

        Raises:
            UnavailableError: some bytes did not arrive. See `send`.
        """

        def receive(connection: BulkConnection, parts: Sequence[memoryview], moved: Moved) -> None:
            connection.receive_all(parts, moved)

        self._move(ticket, views, receive, remaining)

    def _move(
        self,
        ticket: BulkTicket,
        chunks: Sequence[C],
        move: Callable[[BulkConnection, Sequence[C], Moved], None],
        remaining: Remaining,
    ) -> None:
        """Transfer all ranges using several threads. The bytes to transfer are the concatenated chunks."""
        ends = np.cumsum([len(chunk) for chunk in chunks])
        count = -(-ticket.size_bytes // ticket.range_bytes)
        indexes = iter(range(count))  # ranges that no thread has started to transfer yet
        failures: list[BaseException] = []  # errors from all threads; after the first error, the other threads stop

        def moved(_size: int) -> None:
            if failures or remaining() <= 0:
                raise UnavailableError("the bulk transfer was aborted")

        def run() -> None:
            connection = None
            try:
                while not failures and (index := next(indexes, None)) is not None:
                    start = index * ticket.range_bytes
                    parts = _clip(chunks, ends, start, min(start + ticket.range_bytes, ticket.size_bytes))
                    connection = connection or self._take()
                    connection.request(ticket.ticket, index, moved)
                    move(connection, parts, moved)
            except BaseException as error:
                failures.append(error)
                if connection is not None:
                    connection.close()
            else:
                if connection is not None:
                    self._give_back(connection)

        others = [_STREAMS.submit(run) for _ in range(min(ticket.stream_count, count) - 1)]
        run()
        for other in others:
            if not other.cancel():  # threads that have not started are not needed, because this thread did their work
                other.result()
        if failures:
            if remaining() > 0:  # otherwise, the cause is the deadline, not the port
                self.postpone()
            if isinstance(failures[0], OSError):
                raise UnavailableError(f"a bulk connection was lost: {failures[0]}") from failures[0]
            raise failures[0]

    def _take(self) -> BulkConnection:
        """Return a connection that no transfer is using.

        Raises:
            UnavailableError: the port is not reachable.
        """
        port = self._port
        if port is None:
            raise UnavailableError("the client no longer uses the bulk port; send the bytes in frames instead")
        oldest = time.monotonic() - _KEPT_SECONDS
        with suppress(IndexError):
            while True:
                since, connection = self._idle.pop()
                if since >= oldest and connection.is_idle():
                    return connection
                connection.close()
        return self._connect(port)

    def _give_back(self, connection: BulkConnection) -> None:
        self._idle.append((time.monotonic(), connection))
        with suppress(IndexError):
            while len(self._idle) > _MOST_KEPT or not self._is_enabled:
                self._idle.popleft()[1].close()

    def _connect(self, port: _Port) -> BulkConnection:
        connection = None
        try:
            connection = BulkConnection(socket.create_connection((port.host, port.port), timeout=_CONNECT_SECONDS))
            if self._context is not None:
                connection.open_tls(self._context, port.host, _CONNECT_SECONDS)
            connection.check_greeting(port.boot_id, _CONNECT_SECONDS)
        except (OSError, UnavailableError) as error:
            if connection is not None:
                connection.close()
            raise UnavailableError(f"could not reach the bulk port at {port.host}:{port.port}: {error}") from None
        return connection

    @cached_property
    def _context(self) -> ssl.SSLContext | None:
        """TLS context for bulk connections, or None for plaintext connections."""
        if self._tls is None:
            return None
        context = ssl.create_default_context(cafile=self._tls.ca)
        if self._tls.cert is not None:
            context.load_cert_chain(self._tls.cert, self._tls.key)
        return context


def _close_all(idle: deque[tuple[float, BulkConnection]]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop()[1].close()


def _target(announced: str, address: str) -> tuple[str, int] | None:
    """Return the host and port of the announced bulk port.

    Return None if no port was announced, or if only gRPC can resolve the host.
    """
    for host, port in hosts_and_ports(announced):
        hosts = [host] if host else [its_host for its_host, _ in hosts_and_ports(address)]
        return (hosts[0], port) if len(hosts) == 1 else None
    return None


def _clip(chunks: Sequence[C], ends: Integers, start: int, end: int) -> list[C]:
    """Return the bytes from `start` to `end` in the concatenated chunks. `ends` contains each chunk's end offset."""
    first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, end, "left"))
    parts = list(chunks[first : last + 1])
    parts[-1] = parts[-1][: len(parts[-1]) - (int(ends[last]) - end)]
    begin = int(ends[first]) - len(chunks[first])
    parts[0] = parts[0][start - begin :]
    return parts
