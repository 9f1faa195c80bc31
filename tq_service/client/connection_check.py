"""Diagnoses unreachable addresses, because gRPC reports only the failure of the last address that it tried.

For example, "localhost" has two addresses, ::1 and 127.0.0.1. Suppose that a service listens only on 127.0.0.1 and uses
TLS, but the client does not. gRPC then reports "connection refused" for ::1, the address that it tried last.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from tq_service.addresses import cause_of, hosts_and_ports
from tq_service.wire.connection import CA_VARIABLE, Tls

_EXPIRED: Final = 10  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED
_STEP_SECONDS: Final = 0.5  # time limit for connecting, and for the response
_MOST_ADDRESSES: Final = 4

# The HTTP/2 connection preface with an empty SETTINGS frame; see RFC 9113, sections 3.4 and 6.5.
_HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_FRAME_HEADER_BYTES: Final = 9
_SETTINGS_FRAME: Final = 4


def find_fault(address: str, tls: Tls | None) -> str | None:
    """Check the first address that accepts connections, and return the problem found.

    Return None if no address accepts connections, or if no problem is found.

    Call this function in a thread, because it takes up to two seconds for each address of the host name.

    Args:
        address: the address in gRPC syntax. An address that lacks a host or a port is not checked.
        tls: TLS settings of the client, or None for plaintext.
    """
    targets: dict[tuple[str, int], str] = {}  # host names by address
    for host, port in hosts_and_ports(address):
        try:
            for *_, found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                targets.setdefault((str(found[0]), port), host)
        except OSError:
            continue
    for (ip, port), host in list(targets.items())[:_MOST_ADDRESSES]:
        shown = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        try:
            first = _connected(_any_service(), (ip, port))
        except OSError:
            continue
        try:
            with first:  # close the connection even if it is reset before any data is sent
                return _fault_of(first, shown, host, tls)
        except TimeoutError:
            return f"{shown} accepts connections but does not answer"
        except OSError:  # the server closed the connection; gRPC itself reports this
            return None
    return None


def _fault_of(first: ssl.SSLSocket, shown: str, host: str, tls: Tls | None) -> str | None:
    target = first.getpeername()[:2]
    speaks_tls = _speaks_tls(first)
    first.close()
    if speaks_tls:
        if tls is None:
            return f"{shown} speaks TLS and this client does not; pass tls=, or set {CA_VARIABLE}"
        # The CA certificates that gRPC uses by default cannot be loaded here.
        return None if tls.ca is None else _fault_of_certificate(target, host, tls)
    try:
        answer = _greet(socket.create_connection(target, _STEP_SECONDS))
    except ConnectionError:
        answer = b""
    if not answer:
        return f"{shown} closes new connections without an answer; it may have reached max_connections"
    if tls is not None:
        return f"{shown} does not speak TLS and this client does; omit tls= and {CA_VARIABLE}, or serve with TLS"
    is_http2 = len(answer) == _FRAME_HEADER_BYTES and answer[3] == _SETTINGS_FRAME
    return None if is_http2 else f"the server at {shown} does not speak gRPC"


def _fault_of_certificate(target: tuple[str, int], host: str, tls: Tls) -> str | None:
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
        context.set_alpn_protocols(["h2"])
        # With TLS 1.3, the server checks the client's certificate only after the client has completed its handshake.
        with _connected(context, target, host) as connection:
            connection.do_handshake()
            answer = _greet(connection)
    except ssl.SSLCertVerificationError as error:
        cause = cause_of(str(error))
        return cause if error.verify_code == _EXPIRED else f"{cause} ({error.verify_message})"
    except (ssl.SSLError, ConnectionError):
        answer = b""
    if len(answer) == _FRAME_HEADER_BYTES or tls.cert is not None:
        return None
    return "the service closes connections without a client certificate; pass cert and key in tls="


def _speaks_tls(connection: ssl.SSLSocket) -> bool:
    try:
        connection.do_handshake()
        return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except ConnectionError:
        return False


def _any_service() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no data is sent
    context.set_alpn_protocols(["h2"])
    return context


def _connected(context: ssl.SSLContext, target: tuple[str, int], host: str | None = None) -> ssl.SSLSocket:
    """Connect to the target, and return the connection before its TLS handshake.

    The handshake checks `host` if the context requires it.
    """
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    # Wrap the socket before connecting, because `wrap_socket` does not close a connection that is reset during the
    # call.
    secured = context.wrap_socket(socket.socket(family), server_hostname=host, do_handshake_on_connect=False)
    try:
        secured.settimeout(_STEP_SECONDS)
        secured.connect(target)
    except BaseException:
        secured.close()
        raise
    return secured


def _greet(connection: socket.socket) -> bytes:
    """Send an HTTP/2 preface, and return the header of the server's first frame.

    The returned header is incomplete if the connection ends before all of its bytes arrive.
    """
    with connection, connection.makefile("rb") as answers:
        connection.sendall(_HTTP2_HELLO)
        return answers.read(_FRAME_HEADER_BYTES)
