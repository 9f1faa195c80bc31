"""A closed deployment: controller and storage service behind TLS, client certificates and tokens, which are renewed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import Authority, add_token, replace
from fault_seconds import FAULT_SECONDS
from live_server import AnyClient, ClientKind, LoopThread, StartServer

import tq_service as tq
from tq_service.server import listener
from tq_service.testing import COMMAND, ServiceProcess


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_LOOK_SECONDS", 0.05)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


class Deployment:
    """A controller without storage and a storage service, each with its certificate and token."""

    def __init__(self, directory: Path, start_server: StartServer) -> None:
        self.authority = Authority(directory)
        self.tokens = directory / "tokens.toml"
        service = directory / "service.token"
        replace(service, add_token(self.tokens, "services", ["service"]).encode())
        self.controller = start_server(role="controller", **self._settings("controller", service))
        self.address = f"localhost:{self.controller.app.port}"
        self.storage = start_server(
            role="storage", controller=self.address, storage_id="s1", **self._settings("storage", service)
        )

    def _settings(self, name: str, service: Path) -> dict[str, Any]:
        return self.settings_of(self.authority.issue(name), service)

    def settings_of(self, tls: tq.Tls, service: Path) -> dict[str, Any]:
        return {
            "tls_cert": str(tls.cert),
            "tls_key": str(tls.key),
            "tls_client_ca": str(self.authority.ca),
            "tls_ca": str(self.authority.ca),
            "auth_tokens_file": str(self.tokens),
            "peer_token_file": str(service),
        }

    def client(self, kind: ClientKind, loop: LoopThread, token: str) -> AnyClient:
        return AnyClient(kind, self.address, loop, token=token, tls=self.authority.issue("client"), timeout=30.0)


@pytest.fixture
def deployment(tmp_path: Path, start_server: StartServer) -> Deployment:
    return Deployment(tmp_path, start_server)


def test_the_way_of_a_sample(deployment: Deployment, client_kind: ClientKind, loop_thread: LoopThread) -> None:
    producer = deployment.client(client_kind, loop_thread, add_token(deployment.tokens, "p", ["produce"], ("train@",)))
    consumer = deployment.client(client_kind, loop_thread, add_token(deployment.tokens, "c", ["consume"], ("train@",)))
    large = np.arange(1 << 20, dtype=np.float32).reshape(16, -1)
    until(lambda: _works(lambda: producer.put("train@0", {"x": large})))  # the storage service is known
    producer.put("train@0", {"x": large + 1})
    producer.put("train@0", {"x": large[:1] + 2})
    with pytest.raises(tq.errors.PermissionDeniedError, match="begin with 'train@'; got 'eval'"):
        producer.put("eval", {"x": large})
    meta = consumer.get_meta(
        partition_id="train@0", task_name="t", data_fields=["x"], batch_size=33, min_batch_size=33, max_wait=20.0
    )
    values = np.asarray(consumer.get_data(meta)["x"])
    assert np.array_equal(values, np.concatenate([large, large + 1, large[:1] + 2]))
    with pytest.raises(tq.errors.PermissionDeniedError, match="needs one of the roles"):
        producer.get_data(meta)
    consumer.clear_partition("train@0")
    until(lambda: deployment.storage.app.storage.engine.stat().put_count == 0)  # the controller may free cells there
    producer.close()
    consumer.close()


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except (tq.errors.UnavailableError, tq.errors.UnauthenticatedError):  # the token may not have been read yet
        return False
    return True


def test_tokens_are_taken_back_and_given_without_a_restart(
    deployment: Deployment, client_kind: ClientKind, loop_thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    first = add_token(deployment.tokens, "first", ["admin"])
    client = deployment.client(client_kind, loop_thread, first)
    until(lambda: _works(client.list_partitions))
    before = deployment.tokens.read_text()
    replace(deployment.tokens, b"[[token")
    until(lambda: caplog.text.count("the previous tokens stay valid") == 2)  # controller and storage service
    assert _may(lambda: client.create_partition("a"))  # a broken file takes nothing back
    replace(deployment.tokens, before.replace('"first"', '"renamed"').replace("admin", "read").encode())
    until(lambda: not _may(lambda: client.create_partition("a")))
    assert [partition.partition_id for partition in client.list_partitions()] == ["a"]
    replace(deployment.tokens, before.partition('[[token]]\nname = "first"')[0].encode())
    until(lambda: not _works(client.list_partitions))
    second = deployment.client(client_kind, loop_thread, add_token(deployment.tokens, "second", ["admin"]))
    until(lambda: _works(second.list_partitions))
    assert _may(lambda: second.create_partition("b"))
    with pytest.raises(tq.errors.UnauthenticatedError):
        client.list_partitions()
    client.close()
    second.close()


def _may(call: Callable[[], object]) -> bool:
    try:
        call()
    except tq.errors.PermissionDeniedError:
        return False
    return True


def test_certificates_are_renewed_without_a_restart(
    tmp_path: Path, start_server: StartServer, client_kind: ClientKind, loop_thread: LoopThread
) -> None:
    deployment = Deployment(tmp_path / "old", start_server)
    token = add_token(deployment.tokens, "boss", ["admin"])
    client, prober = (deployment.client(client_kind, loop_thread, token) for _ in range(2))
    until(lambda: _works(lambda: client.put("a", {"x": np.arange(4)})))
    assert prober.health()
    # All are of a new authority from now on, whose files take the place of those of the old one.
    new = Authority(tmp_path / "new")
    for name in ("controller", "storage", "client"):
        issued = new.issue(name)
        for path in (issued.cert, issued.key):
            replace(tmp_path / "old" / Path(str(path)).name, Path(str(path)).read_bytes())
    replace(deployment.authority.ca, new.ca.read_bytes())
    outsider = {"token": token, "timeout": 1.0}
    with tq.Client(deployment.address, tls=new.issue("outsider"), **outsider) as newcomer:
        until(lambda: _works(newcomer.list_partitions))
    third = Authority(tmp_path / "third").issue("x")
    with tq.Client(deployment.address, tls=third, **outsider) as stranger, pytest.raises(tq.errors.UnavailableError):
        stranger.list_partitions()
    client.list_partitions()  # the connection of before stays
    # Connections that break are made again with the new files, by clients and between services.
    deployment.controller.stop()
    port = int(deployment.address.rpartition(":")[2])
    old = tmp_path / "old"
    renewed = tq.Tls(ca=old / "ca.pem", cert=old / "controller.pem", key=old / "controller.key")
    again = start_server(role="controller", port=port, **deployment.settings_of(renewed, old / "service.token"))
    until(lambda: _works(lambda: client.put("b", {"x": np.arange(4)})))
    until(lambda: _works(prober.health))  # which is one try each time
    assert again.app.port == port
    client.close()
    prober.close()


def test_clients_whose_tls_does_not_fit_are_told_to_look_there(
    deployment: Deployment, start_server: StartServer
) -> None:
    open_address = f"localhost:{start_server().app.port}"
    tls = deployment.authority.issue("client")
    for address, unfit, told in (
        (deployment.address, None, "speaks TLS and this client does not"),
        (deployment.address, tq.Tls(ca=tls.ca), "without a client certificate"),
        (open_address, tls, "does not speak TLS and this client does"),
    ):
        with (
            tq.Client(address, tls=unfit, timeout=2 * FAULT_SECONDS) as client,
            pytest.raises(tq.errors.UnavailableError, match=told),
        ):
            client.list_partitions()


def test_a_service_without_the_right_token_is_not_let_in(
    deployment: Deployment, start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = tmp_path / "wrong.token"
    replace(wrong, add_token(deployment.tokens, "worker", ["produce", "consume"]).encode())
    settings = deployment._settings("intruder", wrong)
    start_server(role="storage", controller=deployment.address, storage_id="s2", **settings)
    until(lambda: "controller rejects this service" in caplog.text)
    assert "s2" not in {each.storage_id for each in deployment.controller.app.controller.storages.statuses()}


def test_the_command_line(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    service, client = authority.issue("service"), authority.issue("client")
    tokens, token = tmp_path / "tokens.toml", tmp_path / "boss.token"
    made = subprocess.run(
        [*COMMAND, "token", "new", "--name", "boss", "--role", "admin", "--file", tokens, "--output", token],
        capture_output=True,
        text=True,
        check=True,
    )
    secret = token.read_text().strip()
    assert secret not in made.stdout + made.stderr
    assert token.stat().st_mode & 0o777 == 0o600
    audit = tmp_path / "audit.log"
    flags = {
        "--tls-cert": service.cert,
        "--tls-key": service.key,
        "--tls-client-ca": service.ca,
        "--auth-tokens-file": tokens,
        "--audit-file": audit,
        "--log-format": "json",
    }
    arguments = [str(part) for pair in flags.items() for part in pair]
    with ServiceProcess("--host", "0.0.0.0", *arguments) as server:
        target = f"localhost:{server.port}"
        tls = ["--tls-ca", client.ca, "--tls-cert", client.cert, "--tls-key", client.key]

        def run(*command: object) -> subprocess.CompletedProcess[str]:
            arguments = [*COMMAND, *map(str, command)]
            return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=60)

        assert run("health", "-a", target).returncode == 1
        assert run("health", "-a", target, *tls).stdout == "SERVING\n"
        refused = run("status", "-a", target, "--json", *tls)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: this service requires a bearer token")
        answer = run("status", "-a", target, "--json", *tls, "--token-file", token)
        assert json.loads(answer.stdout)["partitions"] == []
    (line,) = map(json.loads, audit.read_text().splitlines())
    assert (line["decision"], line["reason"], line["certificate"]) == ("refused", "no token", "client")
    assert line["method"].endswith("/GetStatus")
    assert line["time"].endswith("Z")


def test_an_open_port_is_refused_or_said_loudly(tmp_path: Path) -> None:
    everywhere = ("--host", "0.0.0.0", "--log-level", "error")
    with pytest.raises(tq.errors.UnavailableError, match="exited with code 1 before it started listening") as refused:
        ServiceProcess(*everywhere, cwd=tmp_path, log=tmp_path / "refused").start()
    assert "no tls_cert and no auth_tokens_file" in str(refused.value)
    with ServiceProcess(*everywhere, "--insecure", cwd=tmp_path, log=tmp_path / "warned") as warned:
        assert warned.address.startswith("0.0.0.0:")
        (line,) = [line for line in warned.read_log().splitlines() if "INSECURE" in line]
        assert "INSECURE: every machine that can reach this address may read, change and clear everything" in line
        assert f"address={warned.address}" in line
