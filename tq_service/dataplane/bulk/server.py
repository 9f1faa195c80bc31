"""The server side of bulk transfers: the bulk port, one thread per connection, and the authorized transfers.

    a call opens a transfer   ->  its ticket is sent to the client  ->  threads move its ranges  ->  the call continues
    a call closes a transfer  ->  its threads are interrupted  ->  its memory is released once the last thread is done

An authorized call determines which bytes may be read or written. Until the call ends, its ticket allows these bytes to
be transferred in one direction. The service divides the bytes into ranges, and accepts each range only once. If a
repeated range counted in place of a missing one, the memory of the missing range would still contain bytes of another
put.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

from tq_service.dataplane.bulk.connection import TICKET_BYTES, BulkConnection, Moved
from tq_service.errors import TqError, UnavailableError
from tq_service.log_message import LogMessage
from tq_service.v1.storage_service_pb2 import BulkTicket
from tq_service.wire.columns import BULK_BYTES

_log = logging.getLogger(__name__)
_MOST_CONNECTIONS: Final = 1024
_MOST_UNPROVEN: Final = 128
_MOST_TRANSFERS: Final = 128
_BACKLOG: Final = 1024  # all clients in a large job probe the port at the same moment
_FIRST_REQUEST_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.1
_JOIN_SECONDS: Final = 1.0
_REPORT_SECONDS: Final = 0.5
_MOST_STREAMS: Final = 4
_LEAST_STREAM_BYTES: Final = 4 << 20
_LOAD_HALF_LIFE_SECONDS: Final = 1.0
_RANGE_GRAIN_BYTES: Final = 4096

Move: TypeAlias = Callable[[BulkConnection, int, int, Moved], None]
"""A function that transfers a byte range, from start to end, in the connection's thread, or raises an error."""
Context: TypeAlias = Callable[[], ssl.SSLContext]


class Transfer:
    """A transfer of a put's or get's bytes over bulk connections.

    The event loop opens and closes the transfer, and threads move its ranges.

    Args:
        size_bytes: total size in bytes.
        stream_count: recommended number of connections for the client.
        move: function that transfers a range.
        on_moved: function called periodically on the event loop, with the number of bytes transferred since the last
            call.
        on_unused: function called on the event loop once the transfer is closed and no thread is using its memory any
            longer.

    Attributes:
        ticket: ticket that the client must send with each range.
    """

    def __init__(
        self,
        size_bytes: int,
        stream_count: int,
        move: Move,
        on_moved: Callable[[int], object],
        on_unused: Callable[[], object],
    ) -> None:
        grains = -(-size_bytes // (stream_count * _RANGE_GRAIN_BYTES))
        self.ticket = BulkTicket(
            ticket=os.urandom(TICKET_BYTES),
            size_bytes=size_bytes,
            range_bytes=grains * _RANGE_GRAIN_BYTES,
            stream_count=stream_count,
        )
        self._move = move
        self._on_moved = on_moved
        self._on_unused = on_unused
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._lock = threading.Lock()  # protects all attributes below
        self._is_closed = False
        self._handed_out: set[int] = set()
        self._count = self._left_count = -(-size_bytes // self.ticket.range_bytes)
        self._inside: set[BulkConnection] = set()
        self._unreported_bytes = 0
        self._report_at = time.monotonic() + _REPORT_SECONDS

    @property
    def is_complete(self) -> bool:
        """Whether all ranges have been transferred."""
        return not self._left_count

    async def done(self) -> None:
        """Wait until all ranges have been transferred.

        Raises:
            UnavailableError: a connection was lost, or the client requested a range twice.
            Exception: any exception raised by `move`.
        """
        await asyncio.shield(self._done)

    def close(self) -> None:
        """Close the transfer, and interrupt the threads that are moving its ranges. Repeated calls have no effect."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            inside = list(self._inside)
        for connection in inside:
            connection.end()
        self._finish(UnavailableError("the bulk transfer was closed"))
        self._done.exception()  # prevents a warning if no task waits for it
        if not inside:
            self._on_unused()

    def move(self, index: int, connection: BulkConnection) -> bool:
        """Transfer a range in the connection's thread, and return whether the connection can be reused."""
        start = index * self.ticket.range_bytes
        end = min(start + self.ticket.range_bytes, self.ticket.size_bytes)
        with self._lock:
            if self._is_closed:
                return False
            is_new = index < self._count and index not in self._handed_out
            self._handed_out.add(index)
            self._inside.add(connection)
        error: Exception | None = None
        try:
            if not is_new:
                raise UnavailableError(
                    f"range {index} of a bulk transfer does not exist or was already requested; expected one request "
                    f"for each of its {self._count} ranges"
                )
            self._move(connection, start, end, self._moved)
        except TqError as raised:
            error = raised
        except OSError as lost:
            error = UnavailableError(f"a bulk connection was lost: {lost}")
        except Exception as raised:  # the call reports any error
            error = raised
        self._leave(connection, error)
        return error is None

    def _moved(self, size: int) -> None:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the call of this bulk transfer has ended")
            self._unreported_bytes += size
            now = time.monotonic()
            if now < self._report_at:
                return
            self._report_at = now + _REPORT_SECONDS
            size, self._unreported_bytes = self._unreported_bytes, 0
        self._in_loop(lambda: self._on_moved(size))

    def _leave(self, connection: BulkConnection, error: Exception | None) -> None:
        with self._lock:
            self._inside.discard(connection)
            if error is None:
                self._left_count -= 1
            is_over = error is not None or not self._left_count
            is_unused = self._is_closed and not self._inside
        if is_over:
            self._in_loop(lambda: self._finish(error))
        if is_unused:
            self._in_loop(self._on_unused)

    def _finish(self, error: Exception | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    def _in_loop(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed because the process is exiting
            self._loop.call_soon_threadsafe(call)


def _listen(host: str, port: int) -> socket.socket:
    try:
        (family, _, _, _, target), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        dual = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(target[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot listen on the bulk port {port} at {host}: {error}; set a different bulk_port, or set bulk to off",
        ) from error


class BulkServer:
    """A server that accepts connections on the bulk port and tracks transfers.

    The server starts listening as soon as it is created.

    Args:
        host: address on which to listen.
        port: port on which to listen. With 0, the system selects a free port.
        boot_id: instance id of the storage service.
        context: function that returns the TLS context for the next connection, or None for plaintext connections.

    Attributes:
        port: port on which the server listens.
        moved_bytes: total size in bytes of all completed transfers.

    Raises:
        OSError: the server cannot listen on the port.
    """

    def __init__(self, host: str, port: int, boot_id: bytes, context: Context | None = None) -> None:
        self._boot_id = boot_id
        self._context = context
        self._listener = _listen(host.strip("[]"), port)
        self.port: int = self._listener.getsockname()[1]
        self.moved_bytes = 0
        self._transfers: dict[bytes, Transfer] = {}  # modified by the event loop; threads only look up transfers
        self._lock = threading.Lock()  # protects the next three attributes
        self._is_closed = False
        self._proven: dict[BulkConnection, None] = {}  # connections that have sent a valid ticket
        self._unproven: dict[BulkConnection, str] = {}  # all other connections with peer addresses, oldest first
        self._load = 0.0
        self._load_at = time.monotonic()
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._accepting = threading.Thread(target=self._accept_all, name="tq-bulk-accept", daemon=True)
        self._accepting.start()

    @property
    def connection_count(self) -> int:
        """Number of open connections that have sent a valid ticket."""
        return len(self._proven)

    def takes(self, size_bytes: int) -> bool:
        """Return whether a transfer of this size should use the bulk port, given the number of open transfers."""
        return size_bytes >= BULK_BYTES and len(self._transfers) < _MOST_TRANSFERS

    def open(
        self, size_bytes: int, move: Move, *, on_moved: Callable[[int], object], on_unused: Callable[[], object]
    ) -> Transfer:
        """Open a transfer, which the caller must close. See `Transfer`."""

        def unused() -> None:
            self._transfers.pop(transfer.ticket.ticket, None)
            if transfer.is_complete:
                self.moved_bytes += size_bytes
            on_unused()

        transfer = Transfer(size_bytes, self._streams_for(size_bytes), move, on_moved, unused)
        self._transfers[transfer.ticket.ticket] = transfer
        return transfer

    def _streams_for(self, size_bytes: int) -> int:
        """Return how many connections to use, given the transfer size and the number of cores per recent transfer."""
        now, count = time.monotonic(), len(self._transfers) + 1
        self._load *= 0.5 ** ((now - self._load_at) / _LOAD_HALF_LIFE_SECONDS)
        self._load, self._load_at = max(self._load, count), now
        return max(1, min(_MOST_STREAMS, int(self._cores / self._load), size_bytes // _LEAST_STREAM_BYTES))

    def close(self) -> None:
        """Close all connections and stop listening. Repeated calls have no effect."""
        with self._lock:
            self._is_closed = True
            connections = [*self._proven, *self._unproven]
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        for connection in connections:
            connection.end()
        self._accepting.join(_JOIN_SECONDS)

    def _accept_all(self) -> None:
        while not self._is_closed:
            try:
                accepted, peer = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    _log.warning(LogMessage("could not accept a bulk connection", error=error))
                    time.sleep(_PAUSE_SECONDS)
                continue
            connection = BulkConnection(accepted)
            if not self._admit(connection, peer[0]):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="tq-bulk", daemon=True).start()
            except RuntimeError as error:  # the operating system cannot start another thread
                _log.warning(LogMessage("could not start a thread for a bulk connection", error=error))
                self._dismiss(connection)

    def _admit(self, connection: BulkConnection, peer: str) -> bool:
        """Return whether to accept a connection. If there are too many, close one that has not sent a valid ticket."""
        with self._lock:
            is_full = len(self._proven) + len(self._unproven) >= _MOST_CONNECTIONS
            if self._is_closed or (is_full and not self._unproven):
                return False
            if is_full or len(self._unproven) >= _MOST_UNPROVEN:
                ((most, _),) = Counter(self._unproven.values()).most_common(1)
                oldest = next(each for each, its_peer in self._unproven.items() if its_peer == most)
                del self._unproven[oldest]
                oldest.end()
            self._unproven[connection] = peer
            return True

    def _dismiss(self, connection: BulkConnection) -> None:
        with self._lock:
            self._proven.pop(connection, None)
            self._unproven.pop(connection, None)
        connection.close()

    def _serve(self, connection: BulkConnection) -> None:
        try:
            if self._context is not None:
                connection.accept_tls(self._context(), _FIRST_REQUEST_SECONDS)
            connection.greet(self._boot_id)
            seconds = _FIRST_REQUEST_SECONDS
            while (request := connection.receive_request(seconds)) is not None:
                ticket, index = request
                transfer = self._transfers.get(ticket)
                if transfer is None:
                    break
                with self._lock:
                    self._unproven.pop(connection, None)
                    self._proven[connection] = None
                if not transfer.move(index, connection):
                    break
                seconds = _IDLE_SECONDS
        except (OSError, TqError, ValueError) as error:
            _log.debug(LogMessage("a bulk connection ended", error=error))
        finally:
            self._dismiss(connection)
