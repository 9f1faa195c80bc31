"""The gRPC port, with TLS, access control, and limits on incoming connections.

gRPC limits the number of connections but cannot tell which of them are legitimate. A connection is admitted once one of
its calls passes access control. Every second, a sweep over this process's sockets closes connections that have not been
admitted within `first_call_seconds`. If an address has too many unadmitted connections, the sweep closes the oldest of
them immediately. Callers without a token therefore cannot use up all connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import grpc

from tq_service.config import ServeSettings, is_loopback, join_address
from tq_service.daemon_threads import run_in_daemon_thread
from tq_service.log_message import LogMessage
from tq_service.server.audit import Audit
from tq_service.server.credential_files import (
    ServerCertificate,
    ServiceCredentials,
    TokenFile,
    check_authorities,
    find_secret,
)
from tq_service.server.rpc.calls import AccessControl
from tq_service.server.supervisor import regularly
from tq_service.wire.connection import Tls

if TYPE_CHECKING:
    from tq_service.observe.endpoint import Access

_log = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 1.0
_SCARCE_SECONDS: Final = 0.1
_SETTLED_SECONDS: Final = 1.0
_SHARE: Final = 8
"""Each address may have at most 8 unadmitted connections, or 1/8 of the connection limit if that is more."""
_FILES: Final = Path("/proc/self/fd")


class Listener:
    """The gRPC port, including TLS and access control.

    Args:
        settings: configuration of the service.

    Attributes:
        credentials: credentials for calls to other services.
        access: access control for calls.
        takes_services: whether calls by other services can be distinguished from calls by clients.

    Raises:
        InvalidArgumentError: a configured file is unusable, or the service must distinguish services from clients but
            has neither an internal secret nor tokens.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._certificate: ServerCertificate | None = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            self._certificate = ServerCertificate(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._tokens = None if settings.auth_tokens_file is None else TokenFile(settings.auth_tokens_file)
        self._audit = Audit(settings.audit_repeat_seconds)
        tls = None
        if settings.tls_ca is not None or settings.tls_cert is not None:
            tls = Tls(ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key)
        if settings.tls_ca is not None:
            check_authorities("tls_ca", settings.tls_ca)
        self.credentials = ServiceCredentials(settings.peer_token_file, tls, settings.insecure)
        has_tokens = self._tokens is not None and self.credentials.has_token
        self.credentials.secret = find_secret(settings, has_tokens=has_tokens)
        self.takes_services = has_tokens or self.credentials.secret is not None
        self.access = AccessControl(
            self._audit, self._tokens, secret=self.credentials.secret, stall_seconds=settings.stall_seconds
        )

    @property
    def tls_context(self) -> Callable[[], ssl.SSLContext] | None:
        """Function that returns the current TLS context for non-gRPC connections, or None if TLS is off."""
        certificate = self._certificate
        return None if certificate is None else lambda: certificate.context

    def listen(self, server: grpc.aio.Server) -> int:
        """Open the port and return its number.

        Raises:
            OSError: the address is in use, or the process cannot listen on it.
        """
        settings = self._settings
        address = join_address(settings.host, settings.port)
        _check_free(settings.host, settings.port)
        try:
            if self._certificate is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._certificate.credentials())
        except RuntimeError:
            port = 0
        if port == 0:
            raise OSError(f"could not listen on {address}")
        if not settings.is_secured and not is_loopback(settings.host):
            # Log at level critical so that the message is visible at every log level.
            risk = (
                "every machine that can reach this address may read, change and clear everything"
                if self._tokens is None
                else "every machine on the network path to this address may read all data, including tokens"
            )
            _log.critical(
                LogMessage(
                    f"INSECURE: {risk}. Enable TLS and tokens; see docs/security.md",
                    address=join_address(settings.host, port),
                )
            )
        return port

    def scrape_access(self, loop: asyncio.AbstractEventLoop) -> Access:
        """Return the access control for the metrics port. The metrics reveal the names of all partitions and tasks."""
        from tq_service.observe.endpoint import Access  # noqa: PLC0415  (requires the extra `metrics`)

        return Access(context=self.tls_context, refusal=partial(self.access.refused_scrape, loop))

    async def watch(self) -> None:
        """Until cancelled, periodically reload changed files and flush the audit log."""
        await regularly(_LOOK_SECONDS, self._look)

    async def _look(self) -> None:
        for files in (self._certificate, self._tokens, self.credentials.secret):
            if files is not None:
                files.reload()
        self.access.end_revoked()
        self._audit.flush()

    def close(self) -> None:
        """Flush the audit log."""
        self._audit.flush(everything=True)


def _check_free(host: str, port: int) -> None:
    """Check that this process can listen on an address. Without this check, gRPC would report a failure only on stderr.

    Raises:
        OSError: the address is in use or does not belong to this machine.
    """
    if not port:
        return
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        in_use = (
            "; another process listens on this address: stop that process, or choose another --port"
            if error.errno == errno.EADDRINUSE
            else ""
        )
        raise OSError(f"could not listen on {join_address(host, port)}: {error.strerror}{in_use}") from None


class _Connection(NamedTuple):
    """The socket of an incoming connection.

    Attributes:
        inode: inode number of the socket. Sockets that use the same descriptor at different times have different
            inodes.
        peer: gRPC's name for the peer, such as "ipv4:10.0.0.1:4711".
        address: address of the peer, without the port.
        since: time at which the connection was first seen, as returned by `time.monotonic`.
    """

    inode: int
    peer: str
    address: str
    since: float


class Connections:
    """Closes unadmitted connections and, on request, connections of specified peers. Has no effect without /proc.

    The event loop owns `_admitted_at`, and the running sweep owns `_connections`.

    Args:
        admitted_at: time of each connection's first admitted call, keyed by peer. Entries of closed connections are
            removed.
        most: maximum number of connections to the server.
        first_call_seconds: number of seconds after which a connection without an admitted call is closed.
    """

    def __init__(self, admitted_at: dict[str, float], most: int, first_call_seconds: float) -> None:
        self._most = most
        self._share = max(_SHARE, most // _SHARE)
        self._first_call_seconds = first_call_seconds
        self._admitted_at = admitted_at
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._closed_count = 0

    async def sweep(self, port: int) -> None:
        """Close unadmitted connections to a port if they are too old, or if an address has too many of them.

        Call this method about once per second. If few connections remain available, the sweep is repeated at a shorter
        interval.
        """
        while True:
            if await self._sweep(port) <= self._most * 3 // 4:
                return
            await asyncio.sleep(_SCARCE_SECONDS)

    async def _sweep(self, port: int) -> int:
        """Close idle connections once, and return the number of connections that were found."""
        now, admitted = time.monotonic(), set(self._admitted_at)
        self._closed_count += await run_in_daemon_thread(
            lambda: self._close_idle(port, admitted, now), thread_name="tq-connections"
        )
        for peer in admitted.difference(each.peer for each in self._connections.values()):
            if (
                self._admitted_at.get(peer, now) < now - _SETTLED_SECONDS
            ):  # a newer entry may belong to a new connection
                del self._admitted_at[peer]
        return len(self._connections)

    async def end(self, port: int, peer: str) -> None:
        """Close the connection of a peer, ending all its calls even if the peer does not read the responses."""

        def close() -> None:
            for descriptor, each in _look(port, {}, time.monotonic()):
                if each.peer == peer:
                    _close(descriptor, each.inode)

        await run_in_daemon_thread(close, thread_name="tq-connections")

    def report(self) -> None:
        """Log the number of connections closed since the last report."""
        if self._closed_count:
            _log.warning(
                LogMessage("closed connections on which no authenticated call was made", count=self._closed_count)
            )
            self._closed_count = 0

    def _close_idle(self, port: int, admitted: set[str], now: float) -> int:
        """Close connections without an admitted call and return how many were closed.

        This method runs in a separate thread.
        """
        self._connections = dict(_look(port, self._connections, now))
        strangers: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for descriptor, each in self._connections.items():
            if each.peer not in admitted:
                strangers[each.address].append((each.since, descriptor))
        closed_count = 0
        for found in strangers.values():
            surplus = len(found) - self._share
            for place, (since, descriptor) in enumerate(sorted(found)):
                if place < surplus or since <= now - self._first_call_seconds:
                    closed_count += _close(descriptor, self._connections[descriptor].inode)
        return closed_count


def _look(port: int, known: dict[int, _Connection], now: float) -> Iterator[tuple[int, _Connection]]:
    """Yield the descriptor and connection of each socket connected to a port.

    Each connection in `known` requires only one system call.
    """
    try:
        names = os.listdir(_FILES)  # noqa: PTH208  (thousands of names, every second)
    except OSError:
        return
    for name in names:
        descriptor = int(name)
        try:
            status = os.fstat(descriptor)
        except OSError:  # the descriptor has been closed
            continue
        if not stat.S_ISSOCK(status.st_mode):
            continue
        before = known.get(descriptor)
        if before is not None and before.inode == status.st_ino:
            yield descriptor, before
        elif (place := _peer_of(descriptor, port)) is not None:
            yield descriptor, _Connection(status.st_ino, *place, now)


def _peer_of(descriptor: int, port: int) -> tuple[str, str] | None:
    """Return gRPC's name for the peer and the peer's address, or None if the socket is not a connection to the port."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in {socket.AF_INET, socket.AF_INET6} or connection.getsockname()[1] != port:
                return None
            host, peer_port = connection.getpeername()[:2]
    except OSError:  # the socket has been closed, or is listening
        return None
    address = ipaddress.ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if address.version == 4:
        return f"ipv4:{address}:{peer_port}", str(address)
    return f"ipv6:%5B{address}%5D:{peer_port}", str(address)


def _close(descriptor: int, inode: int) -> bool:
    """Shut down a connection so that gRPC closes its descriptor. Return False if the descriptor has been reused."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
