"""`tq-service health` against the standard health service."""

import json
from collections.abc import Iterator
from concurrent import futures
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from tq_service.cli import app

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def probed() -> Iterator[tuple[health.HealthServicer, int]]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, port
    server.stop(None).wait()


def test_serving_is_exit_code_0(probed: tuple[health.HealthServicer, int]) -> None:
    servicer, port = probed
    servicer.set("", SERVING)
    result = CliRunner().invoke(app, ["health", "--address", f"127.0.0.1:{port}"])
    assert (result.exit_code, result.stdout) == (0, "SERVING\n")


def test_draining_is_exit_code_1(probed: tuple[health.HealthServicer, int]) -> None:
    servicer, port = probed
    servicer.set("", NOT_SERVING)
    result = CliRunner().invoke(app, ["health", "--address", f"127.0.0.1:{port}"])
    assert (result.exit_code, result.stdout) == (1, "NOT_SERVING\n")


def test_one_service_may_be_asked_for(probed: tuple[health.HealthServicer, int]) -> None:
    servicer, port = probed
    servicer.set("", NOT_SERVING)
    servicer.set("tq_service.v1.StorageService", SERVING)
    address = f"127.0.0.1:{port}"
    assert (
        CliRunner().invoke(app, ["health", "--address", address, "--service", "tq_service.v1.StorageService"]).exit_code
        == 0
    )
    unknown = CliRunner().invoke(app, ["health", "--address", address, "--service", "other"])
    assert unknown.exit_code == 1
    assert "NOT_FOUND" in unknown.stderr


def test_the_address_comes_from_the_environment(
    probed: tuple[health.HealthServicer, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, port = probed
    servicer.set("", SERVING)
    monkeypatch.setenv("TQ_PORT", str(port))
    assert CliRunner().invoke(app, ["health"]).exit_code == 0
    monkeypatch.setenv("TQ_PORT", "1")
    monkeypatch.setenv("TQ_ADDRESS", f"127.0.0.1:{port}")
    assert CliRunner().invoke(app, ["health"]).exit_code == 0


def test_an_address_may_lack_its_port_and_be_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["health", "--address", "no-such-host.invalid", "--timeout", "60"])
    assert result.stderr == "error: cannot reach no-such-host.invalid:50051: name not found\n"
    result = CliRunner().invoke(app, ["health", "--address", "http://localhost"])
    assert "address: got 'http://localhost', expected 'host:port'" in str(result.exception)
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    monkeypatch.setenv("TQ_PORT", "tcp://10.0.0.1:50051")
    result = CliRunner().invoke(app, ["health"])
    assert "TQ_PORT: got 'tcp://10.0.0.1:50051', expected a port number" in str(result.exception)


def test_of_several_addresses_one_that_serves_is_enough(probed: tuple[health.HealthServicer, int]) -> None:
    servicer, port = probed
    address = f"127.0.0.1:{port}"
    servicer.set("", SERVING)
    result = CliRunner().invoke(app, ["health", "--address", f"127.0.0.1:1,{address}", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {"address": address, "status": "SERVING"}
    servicer.set("", NOT_SERVING)
    result = CliRunner().invoke(app, ["health", "--address", f"127.0.0.1:1,{address}"])
    assert (result.exit_code, result.stdout) == (1, "NOT_SERVING\n")
    assert result.stderr == "error: cannot reach 127.0.0.1:1: connection refused\n"
    result = CliRunner().invoke(app, ["health", "--address", "127.0.0.1:1,127.0.0.1:2"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("connection refused") == 2


def test_an_expired_certificate_is_called_so(tmp_path: Path) -> None:
    authority = trustme.CA()
    yesterday = datetime.now(UTC) - timedelta(days=1)
    issued = authority.issue_cert("127.0.0.1", not_before=yesterday - timedelta(days=1), not_after=yesterday)
    pair = issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        result = CliRunner().invoke(
            app, ["health", "--address", f"127.0.0.1:{port}", "--tls-ca", str(tmp_path / "ca.pem")]
        )
    finally:
        server.stop(None).wait()
    assert result.stderr == f"error: cannot reach 127.0.0.1:{port}: the certificate of the service has expired\n"


def test_nobody_there_is_one_line_and_exit_code_1() -> None:
    result = CliRunner().invoke(app, ["health", "--address", "127.0.0.1:1", "--timeout", "2"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: cannot reach 127.0.0.1:1: connection refused\n"
