"""`tq-service health` against the standard health service."""

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
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
    assert "TQ_PORT: got 'tcp://10.0.0.1:50051', expected the port" in str(result.exception)


def test_nobody_there_is_one_line_and_exit_code_1() -> None:
    result = CliRunner().invoke(app, ["health", "--address", "127.0.0.1:1", "--timeout", "2"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: cannot reach 127.0.0.1:1: connection refused\n"
