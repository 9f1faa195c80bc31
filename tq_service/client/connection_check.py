"""The check of an address that gRPC cannot reach: gRPC names the failure of the last address it tried, not the cause.

A name such as "localhost" has two addresses, ::1 and 127.0.0.1. If a service at the second one speaks TLS and the
client does not, gRPC reports "connection refused": ::1 refused last.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from typing import Final, TypeAlias

from tq_service.addresses import cause_of, hosts_and_ports
from tq_service.wire.connection import CA_VARIABLE, Tls

_EXPIRED: Final = 10  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED
_STEP_SECONDS: Final = 0.5  # to connect, and as long again for an answer
_MOST_ADDRESSES: Final = 4
_FRESH_SECONDS: Final = 5.0

# The beginning of a connection of HTTP/2 and an empty SETTINGS frame, RFC 9113, sections 3.4 and 6.5.
_HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_FRAME_HEADER_BYTES: Final = 9
_SETTINGS_FRAME: Final = 4

_Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ConnectionCheck:
    """Connects to an address in a separate thread, for which neither a call nor an event loop waits.

    Args:
        address: as gRPC takes it; an address without host and port is not checked.
        tls: with which the client reaches it, None for plaintext.

    Attributes:
        finding: the fault in plain words; None if the check found no more than gRPC reports.
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


def find_fault(address: str, tls: Tls | None) -> str | None:
    """Return the fault of the first that listens at one of the addresses; None if none listens, or it has no fault.

    Takes up to two seconds for each address of the name.
    """
    return asyncio.run(_find_fault(address, tls))


async def _find_fault(address: str, tls: Tls | None) -> str | None:
    for ip, port in _resolve(address):
        try:
            first = await _connect(ip, port)
        except OSError:
            continue
        try:
            return await _fault_of(first, ip, port, address, tls)
        except TimeoutError:
            return f"{_shown(ip, port)} takes connections and does not answer"
        except OSError:  # closed by the other side, which gRPC reports as well
            return None
    return None


async def _fault_of(first: _Connection, ip: str, port: int, address: str, tls: Tls | None) -> str | None:
    target = _shown(ip, port)
    if await _speaks_tls(first):
        if tls is None:
            return f"{target} speaks TLS and this client does not; give tls=, or set {CA_VARIABLE}"
        if tls.ca is None:
            return None  # the authorities that gRPC knows are not ours to ask
        return await _fault_of_certificate(await _connect(ip, port), hosts_and_ports(address)[0][0], tls)
    try:
        answer = await _greet(await _connect(ip, port))
    except ConnectionError:
        answer = b""
    if not answer:
        return f"{target} closes new connections without an answer; the service may have max_connections"
    if tls is not None:
        return f"{target} does not speak TLS and this client does; leave out tls= and {CA_VARIABLE}, or serve with TLS"
    is_http2 = len(answer) == _FRAME_HEADER_BYTES and answer[3] == _SETTINGS_FRAME
    return None if is_http2 else f"what listens at {target} does not speak gRPC"


async def _fault_of_certificate(connection: _Connection, host: str, tls: Tls) -> str | None:
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
        # With TLS 1.3 a server sees the client's certificate after the client's part of the handshake.
        is_accepted = len(await _greet(connection, context, host)) == _FRAME_HEADER_BYTES
    except ssl.SSLCertVerificationError as error:
        cause = cause_of(str(error))
        return cause if error.verify_code == _EXPIRED else f"{cause} ({error.verify_message})"
    except (ssl.SSLError, ConnectionError):
        is_accepted = False
    if is_accepted or tls.cert is not None:
        return None
    return "the service ends connections without a client's certificate; give cert and key in tls="


async def _speaks_tls(connection: _Connection) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        await _start_tls(connection, context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except ConnectionError:
        return False
    finally:
        connection[1].transport.abort()
    return True


async def _greet(connection: _Connection, context: ssl.SSLContext | None = None, host: str | None = None) -> bytes:
    """Return the header of the first frame that answers an HTTP/2 client; less if the connection ends before."""
    reader, writer = connection
    try:
        if context is not None:
            await _start_tls(connection, context, host)
        writer.write(_HTTP2_HELLO)
        async with asyncio.timeout(_STEP_SECONDS):
            return await reader.readexactly(_FRAME_HEADER_BYTES)
    except asyncio.IncompleteReadError as error:
        return error.partial
    finally:
        writer.transport.abort()


async def _connect(ip: str, port: int) -> _Connection:
    async with asyncio.timeout(_STEP_SECONDS):
        return await asyncio.open_connection(ip, port)


async def _start_tls(connection: _Connection, context: ssl.SSLContext, host: str | None = None) -> None:
    context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(_STEP_SECONDS):
        await connection[1].start_tls(context, server_hostname=host)


def _resolve(address: str) -> list[tuple[str, int]]:
    found: dict[tuple[str, int], None] = {}
    for host, port in hosts_and_ports(address):
        try:
            for *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found[str(target[0]), port] = None
        except OSError:
            continue
    return list(found)[:_MOST_ADDRESSES]


def _shown(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
