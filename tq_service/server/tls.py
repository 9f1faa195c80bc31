"""The certificate of the port, taken from files that may be replaced while the service runs."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.server.reloading_files import ReloadingFiles
from tq_service.server.tokens import check_private

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where the port's certificate is, all in PEM.

    Attributes:
        cert: the certificate with its chain.
        key: its private key, without a passphrase, readable by no others.
        client_ca: the authorities one of which must have signed the certificate of every client (mTLS); None: clients
            need none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None


class ServerCertificate(ReloadingFiles):
    """Credentials of a port that follow their files.

    gRPC asks for changes at each handshake, in a thread of its own, and gets what was read last and found good;
    connections that are open stay. Files that cannot be used, such as a certificate whose key has not been replaced
    yet, are logged, and the pair before stays.

    Args:
        files: where it is.

    Raises:
        InvalidArgumentError: the files cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        super().__init__(files.cert, files.key, files.client_ca, what_stays="the certificate before stays in use")
        self._delivered = self._current

    def credentials(self) -> grpc.ServerCredentials:
        """Return what the port is opened with."""
        return grpc.dynamic_ssl_server_credentials(
            self._current,
            self._changed,  # type: ignore[arg-type]  # grpc's own documentation has None for no change
            require_client_authentication=self._files.client_ca is not None,
        )

    def _read(self) -> None:
        self._current = _read(self._files)
        _log.info(LogMessage("new connections get the certificate", path=self._files.cert))

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        # gRPC's threads alone write `_delivered`, and the loop `_current`: neither can overwrite what the other wrote.
        current = self._current
        if current is self._delivered:
            return None
        self._delivered = current
        return current


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Read and check the files.

    Raises:
        InvalidArgumentError: one cannot be read, or they don't fit together.
    """
    try:
        check_private(files.key)
        cert, key = files.cert.read_bytes(), files.key.read_bytes()
        client_ca = None if files.client_ca is None else files.client_ca.read_bytes()
        _check(files, client_ca)
        if (cert, key) != (files.cert.read_bytes(), files.key.read_bytes()):
            raise InvalidArgumentError("they were replaced while they were read")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InvalidArgumentError(f"TLS cannot use {files.cert} and {files.key}: {_why(error)}") from None
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)


def check_authorities(path: Path) -> None:
    """Refuse a file of authorities that no certificate could be checked against.

    Raises:
        InvalidArgumentError: it cannot be read, or holds no certificates.
    """
    try:
        _check_authorities(path, path.read_bytes())
    except OSError as error:
        raise InvalidArgumentError(f"tls_ca cannot be used: {_why(error)}", field="tls_ca") from None


def _check_authorities(path: Path, data: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgumentError(f"{path} holds no certificates: {error}") from None


def _check(files: TlsFiles, client_ca: bytes | None) -> None:
    """Have Python's ssl read the pair: gRPC says only in its own log, and at the first handshake, what is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
    if client_ca is not None and files.client_ca is not None:
        _check_authorities(files.client_ca, client_ca)


def _no_passphrase() -> str:
    raise InvalidArgumentError("the key has a passphrase; give one without, that only this user may read")


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
