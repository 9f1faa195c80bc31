"""The certificate of the port: what is refused, and how its files are followed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from certificates import Authority, replace
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509 import DNSName, IPAddress, SubjectAlternativeName, load_pem_x509_certificate

from tq_service.errors import InvalidArgumentError
from tq_service.server.credential_files import ServerCertificate, read_tokens


class TlsFiles(NamedTuple):
    cert: Path
    key: Path
    client_ca: Path | None = None


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return files_of(Authority(tmp_path / "own"), "service")


def files_of(authority: Authority, name: str) -> TlsFiles:
    issued = authority.issue(name)
    return TlsFiles(cert=Path(str(issued.cert)), key=Path(str(issued.key)), client_ca=authority.ca)


def test_a_pair_that_fits_is_taken(files: TlsFiles) -> None:
    assert ServerCertificate(*files).credentials() is not None


def test_a_key_of_another_certificate_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    other = files_of(Authority(tmp_path / "other"), "other")
    with pytest.raises(
        InvalidArgumentError, match=r"could not load .*service\.pem and .*other\.key for TLS: .*MISMATCH"
    ):
        ServerCertificate(files.cert, other.key)


@pytest.mark.parametrize("name", ["cert", "key", "client_ca"])
@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\nhalf", b"\xff" * 100])
def test_files_that_are_half_written_or_something_else_are_refused(files: TlsFiles, name: str, content: bytes) -> None:
    replace(getattr(files, name), content)
    with pytest.raises(InvalidArgumentError, match="for TLS: "):
        ServerCertificate(*files)


def test_a_file_that_is_missing_is_named(files: TlsFiles) -> None:
    files.cert.unlink()
    with pytest.raises(InvalidArgumentError, match=r"service\.pem: No such file"):
        ServerCertificate(*files)


def test_a_key_that_others_may_read_is_refused(files: TlsFiles) -> None:
    files.key.chmod(0o644)
    with pytest.raises(InvalidArgumentError, match=r"has mode 0644, .*chmod 0600"):
        ServerCertificate(*files)


def test_a_key_with_a_passphrase_is_refused_instead_of_asking_for_it(files: TlsFiles) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    replace(files.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"swordfish")))
    with pytest.raises(InvalidArgumentError, match="has a passphrase"):
        ServerCertificate(*files)


def look_twice(certificate: ServerCertificate) -> None:
    certificate.reload()
    certificate.reload()


def test_new_files_are_taken_once_they_fit_together(
    files: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = ServerCertificate(*files)
    look_twice(certificate)
    assert certificate._changed() is None
    other = files_of(Authority(tmp_path / "other"), "other")
    replace(files.cert, other.cert.read_bytes())
    look_twice(certificate)
    assert "the previous certificate stays in use" in caplog.text
    assert certificate._changed() is None
    caplog.clear()
    look_twice(certificate)
    assert not caplog.records  # it is said once
    replace(files.key, other.key.read_bytes())
    look_twice(certificate)
    assert certificate._changed() is not None
    assert certificate._changed() is None


def test_a_key_is_taken_once_it_is_private(files: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate = ServerCertificate(*files)
    other = files_of(Authority(tmp_path / "other"), "other")
    replace(files.cert, other.cert.read_bytes())
    replace(files.key, other.key.read_bytes())
    files.key.chmod(0o644)
    look_twice(certificate)
    assert certificate._changed() is None
    assert "chmod 0600" in caplog.text
    files.key.chmod(0o600)
    certificate.reload()
    assert certificate._changed() is not None


def test_the_script_makes_what_the_service_takes(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docker" / "make_certificates.sh"
    subprocess.run(["sh", script, tmp_path, "controller", "client"], check=True, capture_output=True, timeout=60)
    files = TlsFiles(cert=tmp_path / "controller.pem", key=tmp_path / "controller.key", client_ca=tmp_path / "ca.pem")
    assert ServerCertificate(*files).credentials() is not None
    first = files.cert.read_bytes()
    authority = files.client_ca.read_bytes() if files.client_ca else b""
    subprocess.run(["sh", script, tmp_path, "controller"], check=True, capture_output=True, timeout=60)
    assert files.cert.read_bytes() != first
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert ServerCertificate(*files).credentials() is not None


def test_the_script_makes_what_the_compose_file_mounts(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    credentials = tmp_path / "credentials"
    arguments = ["sh", root / "docker" / "make_credentials.sh", credentials, "tq.example", "10.0.0.7"]
    environment = {**os.environ, "TQ_SERVICE": f"{sys.executable} -m tq_service.cli"}
    subprocess.run(arguments, check=True, capture_output=True, timeout=60, env=environment)
    compose = (root / "compose.secure.yaml").read_text()
    services, clients = compose.split("\n  load:\n")
    for directory, part in (("services", services), ("clients", clients)):
        named = set(re.findall(r"/credentials/([\w.]+)", part))
        assert len(named) >= 4
        assert [name for name in named if not (credentials / directory / name).exists()] == []
    files = TlsFiles(
        cert=credentials / "services" / "storage.pem",
        key=credentials / "services" / "storage.key",
        client_ca=credentials / "services" / "ca.pem",
    )
    assert ServerCertificate(*files).credentials() is not None
    names = load_pem_x509_certificate(files.cert.read_bytes()).extensions.get_extension_for_class(
        SubjectAlternativeName
    )
    assert names.value.get_values_for_type(DNSName) == ["localhost", "storage", "tq.example"]
    assert [str(address) for address in names.value.get_values_for_type(IPAddress)] == ["127.0.0.1", "10.0.0.7"]
    tokens = read_tokens(credentials / "services" / "tokens.toml")
    assert [token.name for token in tokens.values()] == ["services", "load", "produce", "consume"]
    first = files.cert.read_bytes()
    subprocess.run(arguments, check=True, capture_output=True, timeout=60, env=environment)
    assert files.cert.read_bytes() != first
    assert read_tokens(credentials / "services" / "tokens.toml") == tokens
