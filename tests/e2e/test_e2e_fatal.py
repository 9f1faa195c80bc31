"""A service that cannot go on: a process that ends by its own exit code, and is right when it is started again."""

import os
from pathlib import Path

import numpy as np
import pytest
from fault_seconds import FAULT_SECONDS

import tq_service as tq
from tq_service.server.supervisor import FAILED_EXIT_CODE
from tq_service.testing import ServiceProcess


@pytest.fixture
def server(request, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    flags = ("--data-dir", str(tmp_path / "data"), "--durability", request.param, "--grace-seconds", "600")
    with ServiceProcess(*flags, "--allow-sampler-import", log=tmp_path / "log") as server:
        yield server


def state(client, meta):
    (partition,) = client.list_partitions()
    return partition.inserted_count, client.get_data(meta)["x"].tolist()


@pytest.mark.parametrize("server", [pytest.param("process", marks=pytest.mark.nightly), "disk"], indirect=True)
@pytest.mark.parametrize("saboteur", ["LosesAnswers", "BreaksClaims"])
def test_a_fault_ends_the_process_and_the_next_one_has_what_was_answered(server, saboteur, tmp_path):
    asks = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 2}
    with tq.Client(server.address, timeout=20.0) as client:
        meta = client.put("train", {"x": np.arange(4.0)[:, None]})
        assert client.get_meta(**asks, max_wait=0, sampler=f"e2e_saboteurs:{saboteur}").status == "not_yet"
        before = state(client, meta)
    with tq.Client(server.address, timeout=2 * FAULT_SECONDS) as client, pytest.raises(tq.TqError):
        if saboteur == "LosesAnswers":
            client.put("train", {"x": np.full((3, 1), 9.0)})
        else:
            client.get_meta(**asks, max_wait=1.0)
    assert server.wait(timeout=60) == FAILED_EXIT_CODE
    lines = [line for line in server.read_log().splitlines() if "CRITICAL" in line]
    assert len(lines) == 1
    assert "the service has failed and is stopping reason=" in lines[0]
    server.restart()
    with tq.Client(server.address, timeout=20.0) as client:
        assert state(client, meta) == before
        client.put("train", {"x": np.full((3, 1), 9.0)})
        assert client.get_meta(**asks).global_indexes == [0, 1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--tls-ca", "typo.pem"), "tls_ca is typo.pem, which could not be loaded (No such file"),
        (("--peer-token-file", "token"), "the token would be sent to controller.example:50051 in plaintext"),
    ],
)
def test_a_storage_service_that_could_never_register_does_not_start(tmp_path, flags, reason):
    for name, content in (("token", "tq_abc"), ("secret", "s" * 32)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    flags = ("--controller", "controller.example:50051", "--internal-secret-file", "secret", *flags)
    service = ServiceProcess("--role", "storage", *flags, cwd=tmp_path, log=tmp_path / "log")
    with pytest.raises(tq.errors.UnavailableError, match="before it started listening"):
        service.start()
    assert service.exit_code != 0
    assert reason in service.read_log()
    assert "Traceback" not in service.read_log()
