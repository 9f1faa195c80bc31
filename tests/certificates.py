"""Authorities, certificates and tokens for tests of access."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import trustme

from tq_service.server.credential_files import append_token, digest_of, make_token, new_secret
from tq_service.wire.connection import Tls


class Authority:
    """An authority, and the files of what it issues."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._ca = trustme.CA()
        self.ca = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *hosts: str) -> Tls:
        """Return the files of a new certificate; where they are there they are replaced, each at once."""
        issued = self._ca.issue_cert(*(hosts or ("localhost", "127.0.0.1")), common_name=name)
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        replace(cert, b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        replace(key, issued.private_key_pem.bytes())
        return Tls(ca=self.ca, cert=cert, key=key)


def replace(path: Path, content: bytes) -> None:
    """Put a file for this user alone in the place of another."""
    unready = path.with_suffix(".new")
    unready.write_bytes(content)
    unready.chmod(0o600)
    unready.rename(path)


def add_token(path: Path, name: str, roles: Iterable[str], prefixes: tuple[str, ...] = ("",), **more: object) -> str:
    """Make a token, add its entry to a file, and return it."""
    secret = new_secret()
    append_token(
        path,
        make_token(name=name, sha256=digest_of(secret), roles=roles, prefixes=prefixes, **more),
    )
    return secret


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries a token."""
    return (("authorization", f"Bearer {secret}"),)


def request_id() -> bytes:
    """Return a new request_id or put_id."""
    return os.urandom(16)
