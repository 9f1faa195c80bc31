"""The port and what the settings say of its security: TLS, tokens, the audit log, what the service shows to others."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import TYPE_CHECKING, Final

import grpc

from tq_service.config import ServeSettings, is_loopback, join_address
from tq_service.log_message import LogMessage
from tq_service.server.audit import Audit, AuditLine
from tq_service.server.internal_secret import ServiceCredentials, find_secret
from tq_service.server.reloading_files import ServerCertificate, check_authorities
from tq_service.server.rpc.auth import SCRAPE, AccessControl, refused_scrape
from tq_service.server.supervisor import regularly
from tq_service.server.tokens import TokenFile
from tq_service.wire.credentials import Tls

if TYPE_CHECKING:
    from tq_service.observe.endpoint import Access

_log = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 1.0


class Listener:
    """The port, and what secures it.

    Args:
        settings: how the service runs.

    Attributes:
        credentials: what this service shows to others.
        access: lets calls in.
        takes_services: whether other services can be distinguished from clients.

    Raises:
        InvalidArgumentError: a file that the settings name cannot be used, or they lack what services need to know each
            other from clients.
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

    def listen(self, server: grpc.aio.Server) -> int:
        """Open the port and return its number.

        Raises:
            OSError: the address is taken or cannot be listened on.
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
            raise OSError(f"cannot listen on {address}")
        if not settings.is_secured and not is_loopback(settings.host):
            # Critical, so that no log level hides it.
            risk = (
                "every machine that reaches this address may read, change and clear everything"
                if self._tokens is None
                else "every machine on the way to this address may read what is sent, tokens included"
            )
            _log.critical(
                LogMessage(
                    f"INSECURE: {risk}. Use TLS and tokens, see docs/security.md",
                    address=join_address(settings.host, port),
                )
            )
        return port

    def scrape_access(self, loop: asyncio.AbstractEventLoop) -> Access:
        """Return what secures the port for metrics, which show the names of all partitions and tasks."""
        from tq_service.observe.endpoint import Access  # noqa: PLC0415  (needs the extra `metrics`)

        certificate, tokens = self._certificate, self._tokens
        context = None if certificate is None else lambda: certificate.context
        if tokens is None:
            return Access(context=context)

        def refusal(authorization: str, peer: str) -> str | None:
            caller, reason = refused_scrape(tokens, authorization)
            if reason is None:
                return None
            line = AuditLine(decision="refused", method=SCRAPE, peer=peer, token=caller, reason=reason)
            loop.call_soon_threadsafe(self._audit.note, line)
            return f"{reason}; a scrape needs a token with the role read, for all partitions"

        return Access(context=context, refusal=refusal)

    async def watch(self) -> None:
        """Follow the files that the settings name, and write what the audit log counted, until cancelled."""
        await regularly(_LOOK_SECONDS, self._look)

    async def _look(self) -> None:
        for files in (self._certificate, self._tokens, self.credentials.secret):
            if files is not None:
                files.reload()
        self.access.end_revoked()
        self._audit.flush()

    def close(self) -> None:
        """Write the rest of the audit log."""
        self._audit.flush(everything=True)


def _check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, and say why, which gRPC writes to stderr instead.

    Raises:
        OSError: it is taken, or not of this machine.
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
        in_use = "; another process listens there, or give another --port" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"cannot listen on {join_address(host, port)}: {error.strerror}{in_use}") from None
