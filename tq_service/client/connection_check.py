"""What really listens at an address that gRPC cannot reach: gRPC tells of the last address it tried, not of the cause.

A name such as "localhost" has two addresses, ::1 and 127.0.0.1. Where a service at the second one speaks TLS and the
client does not, gRPC says "connection refused": ::1 refused last.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from tq_service.addresses import cause_of, hosts_and_ports
from tq_service.wire.credentials import CA_VARIABLE, Tls

_EXPIRED: Final = 10  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED
_STEP_SECONDS: Final = 0.5  # to connect, and as long again for an answer
_MOST_ADDRESSES: Final = 4
_FRESH_SECONDS: Final = 5.0

# The beginning of a connection of HTTP/2 and an empty SETTINGS frame, RFC 9113, sections 3.4 and 6.5.
_HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_FRAME_HEADER_BYTES: Final = 9
_PIECE_BYTES: Final = 1 << 16
_SETTINGS_FRAME: Final = 4
T = TypeVar("T")


class ConnectionCheck:
    """Connects to an address in a thread of its own, so that neither a call nor an event loop waits for it.

    Args:
        address: as gRPC takes it; one that is no host and port is not checked.
        tls: with which the client reaches it, None for plaintext.

    Attributes:
        finding: what is wrong there in plain words; None where nothing is known that gRPC's own words do not tell.
    """

    def __init__(self, address: str, tls: Tls | None) -> None:
        self.finding: str | None = None
        self._address = address
        self._tls = tls
        self._lock = threading.Lock()
        self._is_running = False
        self._done_at = float("-inf")

    def begin(self) -> None:
        """Check now, unless a check is under way or has just been made."""
        with self._lock:
            if self._is_running or time.monotonic() < self._done_at + _FRESH_SECONDS:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="tq-connection-check", daemon=True).start()

    def clear(self) -> None:
        """Forget what was found: the service has answered."""
        with self._lock:
            self.finding, self._done_at = None, float("-inf")

    def _run(self) -> None:
        finding = None
        try:
            finding = find_fault(self._address, self._tls)
        finally:
            with self._lock:
                self.finding, self._is_running, self._done_at = finding, False, time.monotonic()


class _Target(NamedTuple):
    """One address of a name."""

    family: socket.AddressFamily
    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.family == socket.AF_INET6 else f"{self.ip}:{self.port}"

    def connect(self) -> socket.socket:
        connection = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            connection.settimeout(_STEP_SECONDS)
            connection.connect((self.ip, self.port))
        except BaseException:
            connection.close()
            raise
        return connection


def find_fault(address: str, tls: Tls | None) -> str | None:
    """Return what is wrong with the first that listens at one of the addresses; None where none does, or it is right.

    Takes up to two seconds for each address of the name.
    """
    for target in _resolve(address):
        try:
            first = target.connect()
        except OSError:
            continue
        try:
            with first:
                return _fault_of(first, target, address, tls)
        except TimeoutError:
            return f"{target} takes connections and does not answer"
        except OSError:  # closed by the other side: gRPC's words say as much
            return None
    return None


def _fault_of(first: socket.socket, target: _Target, address: str, tls: Tls | None) -> str | None:
    speaks_tls = _speaks_tls(first)
    answer = b"" if speaks_tls else _greeting(target)
    if not speaks_tls and not answer:
        return f"{target} closes new connections without an answer; the service may have max_connections"
    if tls is None:
        if speaks_tls:
            return f"{target} speaks TLS and this client does not; give tls=, or set {CA_VARIABLE}"
        return None if _is_http2(answer) else f"what listens at {target} does not speak gRPC"
    if not speaks_tls:
        return f"{target} does not speak TLS and this client does; leave out tls= and {CA_VARIABLE}, or serve with TLS"
    return _fault_of_certificate(target, hosts_and_ports(address)[0][0], tls)


def _speaks_tls(connection: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent but the greeting
    context.set_alpn_protocols(["h2"])
    try:
        _Secured(connection, context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    return True


def _greeting(target: _Target) -> bytes:
    """Return the beginning of what answers an HTTP/2 client; nothing if the connection is closed before."""
    try:
        with target.connect() as connection:
            return _greet(connection)
    except ConnectionError:
        return b""


def _is_http2(header: bytes) -> bool:
    return len(header) == _FRAME_HEADER_BYTES and header[3] == _SETTINGS_FRAME


class _Secured:
    """A connection with TLS, without a socket of Python's ssl: that is left open where it is reset at this moment.

    Raises:
        OSError: the handshake fails.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, host: str | None = None) -> None:
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._run(self._tls.do_handshake)

    def sendall(self, data: bytes) -> None:
        self._run(lambda: self._tls.write(data))

    def recv(self, size: int) -> bytes:
        return self._run(lambda: self._tls.read(size))

    def _run(self, step: Callable[[], T]) -> T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._connection.sendall(self._outgoing.read())
                if received := self._connection.recv(_PIECE_BYTES):
                    self._incoming.write(received)
                else:
                    self._incoming.write_eof()
            else:
                self._connection.sendall(self._outgoing.read())
                return result


def _greet(connection: socket.socket | _Secured) -> bytes:
    """Return the header of the first frame that answers the greeting, less where the connection ends before."""
    connection.sendall(_HTTP2_HELLO)
    header = b""
    while len(header) < _FRAME_HEADER_BYTES:
        received = connection.recv(_FRAME_HEADER_BYTES - len(header))
        if not received:
            break
        header += received
    return header


def _fault_of_certificate(target: _Target, host: str, tls: Tls) -> str | None:
    if tls.ca is None:
        return None  # the authorities that gRPC knows are not ours to ask
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
        context.set_alpn_protocols(["h2"])
        with target.connect() as connection:
            # With TLS 1.3 a server sees the client's certificate after the client's part of the handshake.
            is_accepted = len(_greet(_Secured(connection, context, host))) == _FRAME_HEADER_BYTES
    except ssl.SSLCertVerificationError as error:
        cause = cause_of(str(error))
        return cause if error.verify_code == _EXPIRED else f"{cause} ({error.verify_message})"
    except (ssl.SSLError, ConnectionError):
        is_accepted = False
    if is_accepted or tls.cert is not None:
        return None
    return "the service ends connections without a client's certificate; give cert and key in tls="


def _resolve(address: str) -> list[_Target]:
    found: dict[_Target, None] = {}
    for host, port in hosts_and_ports(address):
        try:
            for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found[_Target(family, str(target[0]), port)] = None
        except OSError:
            continue
    return list(found)[:_MOST_ADDRESSES]
