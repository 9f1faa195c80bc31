"""What a probe costs: it runs every few seconds in each container, so it imports no client and no numpy."""

import json
import os
import subprocess
import sys
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_PROGRAM = """
import json, resource, sys
from tq_service.cli import main
code = 0
try:
    main()
except SystemExit as ended:
    code = ended.code or 0
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"code": code, "modules": sorted(sys.modules), "seconds": used.ru_utime + used.ru_stime}))
"""


@pytest.fixture
def port():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


@pytest.mark.parametrize("tls", [False, True], ids=["plaintext", "tls"])
def test_a_probe_imports_neither_the_client_nor_numpy(port, tls, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    if tls:  # that the authorities are none is seen at the handshake, when all is imported
        (tmp_path / "ca.pem").write_text("none")
        environment["TQ_TLS_CA"] = str(tmp_path / "ca.pem")
    command = [sys.executable, "-c", _PROGRAM, "health", "-a", f"127.0.0.1:{port}", "--timeout", "5"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    *printed, last = ended.stdout.splitlines()
    found = json.loads(last)
    assert (printed, found["code"]) == (([], 1) if tls else (["SERVING"], 0))
    loaded = set(found["modules"])
    assert "tq_service.cli.health" in loaded
    for heavy in ("numpy", "tq_service.client", "tq_service.server", "tq_service.config"):
        assert heavy not in loaded


def test_all_that_the_package_offers_is_there():
    import tq_service as tq

    for name in tq.__all__:
        assert getattr(tq, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        _ = tq.Clint
