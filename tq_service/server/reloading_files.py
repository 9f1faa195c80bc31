"""Files that may be replaced while the service runs, read again but never half-written; the certificate of the port."""

from __future__ import annotations

import logging
import ssl
import stat
from abc import ABC, abstractmethod
from pathlib import Path

import grpc

from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.wire.credentials import Signature, file_signature

_log = logging.getLogger(__name__)


class ReloadingFiles(ABC):
    """Files that belong together, which are read once, and again when they have changed.

    They are read when they have changed and then stayed the same from one look to the next: a file that is written in
    its place is empty for a moment, and an empty file of tokens is a valid one. What cannot be used is logged once and
    tried again at each look, since what was wrong may not show in the files: their mode, or too many open files.

    Args:
        *paths: where they are; None for one that is not in use.
        what_stays: what is said of the time until they can be used.

    Raises:
        InvalidArgumentError: they cannot be used.
    """

    def __init__(self, *paths: Path | None, what_stays: str) -> None:
        self._paths = paths
        self._what_stays = what_stays
        self._taken = self._seen = self._signature()
        self._refused = ""
        self._read()

    def _signature(self) -> Signature:
        return tuple(map(file_signature, self._paths))

    @abstractmethod
    def _read(self) -> None:
        """Read the files, and use them from now on; raises InvalidArgumentError where that cannot be."""

    def reload(self) -> None:
        """Read the files again if they have changed since, and no longer change."""
        signature = self._signature()
        has_settled, self._seen = signature == self._seen, signature
        if not has_settled or signature == self._taken:
            return
        try:
            self._read()
        except InvalidArgumentError as error:
            if str(error) != self._refused:
                _log.error(LogMessage(f"a changed file cannot be used; {self._what_stays}", error=error))
            self._refused = str(error)
        else:
            self._taken, self._refused = signature, ""


def check_private(path: Path) -> None:
    """Refuse a file with secrets that others may read or change; its group may read it.

    Raises:
        OSError: it is not there.
        InvalidArgumentError: it is open to others.
    """
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise InvalidArgumentError(
            f"got mode {stat.S_IMODE(mode):04o} of {path}, which lets others read or change it; chmod 0600 or 0640"
        )


class ServerCertificate(ReloadingFiles):
    """Credentials of a port that follow their files.

    gRPC asks for changes at each handshake, in a thread of its own, and gets what was read last and found good;
    connections that are open stay. Files that cannot be used, such as a certificate whose key has not been replaced
    yet, are logged, and the pair before stays.

    Args:
        cert: file of the certificate with its chain, like the others in PEM.
        key: file of its private key, without a passphrase, readable by no others.
        client_ca: file of the authorities one of which must have signed the certificate of every client (mTLS); None:
            clients need none.

    Attributes:
        context: what a connection over TLS that is not gRPC's is accepted with; another one once the files changed.

    Raises:
        InvalidArgumentError: the files cannot be used.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        super().__init__(cert, key, client_ca, what_stays="the certificate before stays in use")
        self._delivered = self._current

    def credentials(self) -> grpc.ServerCredentials:
        """Return what the port is opened with."""
        return grpc.dynamic_ssl_server_credentials(
            self._current,
            self._changed,  # type: ignore[arg-type]  # grpc's own documentation has None for no change
            require_client_authentication=self._client_ca is not None,
        )

    def _read(self) -> None:
        try:
            check_private(self._key)
            contents = self._contents()
            # Python's ssl reads the pair: gRPC says only in its own log, and at the first handshake, what is wrong.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, password=_no_passphrase)
            if self._client_ca is not None:
                check_authorities("tls_client_ca", self._client_ca)
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
            if contents != self._contents():
                raise InvalidArgumentError("they were replaced while they were read")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidArgumentError(f"TLS cannot use {self._cert} and {self._key}: {_why(error)}") from None
        key, cert, *client_ca = contents
        self._current = grpc.ssl_server_certificate_configuration([(key, cert)], *client_ca)
        self.context = context
        _log.info(LogMessage("new connections get the certificate", path=self._cert))

    def _contents(self) -> list[bytes]:
        return [path.read_bytes() for path in (self._key, self._cert, self._client_ca) if path is not None]

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        # gRPC's threads alone write `_delivered`, and the loop `_current`: neither can overwrite what the other wrote.
        current = self._current
        if current is self._delivered:
            return None
        self._delivered = current
        return current


def check_authorities(setting: str, path: Path) -> None:
    """Refuse a file of authorities that no certificate could be checked against.

    Raises:
        InvalidArgumentError: it cannot be read, or holds no certificates.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=path.read_bytes().decode("ascii"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(
            f"{setting} cannot be used: {path}: {reason}; expected certificates in PEM", field=setting
        ) from None


def _no_passphrase() -> str:
    raise InvalidArgumentError("the key has a passphrase; give one without, that only this user may read")


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
