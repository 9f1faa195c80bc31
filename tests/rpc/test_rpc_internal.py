"""Calls between services: whatever the topology, with or without tokens, no client gets through, nothing changes."""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import add_token, bearer, replace
from google.protobuf.message import Message
from live_server import LiveServer, StartServer
from rpc_methods import CONTROL, CONTROLLER, DESCRIBED, INTERNAL, REGISTRY, call
from rpc_samples import new_id, reason_of

from tq_service.errors import InvalidArgumentError
from tq_service.internal.v1 import storage_control_pb2, storage_registry_pb2
from tq_service.server.audit import LOGGER_NAME, AuditLine
from tq_service.server.rpc.calls import Services
from tq_service.server.rpc.methods import METHODS
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import metadata_pb2
from tq_service.v1 import storage_service_pb2 as storage_pb

KEY = "tq-internal"
SECRET = b"0123456789abcdef0123456789abcdef"
TOPOLOGIES = ("all", "all tokens", "all tokens service", "split", "split tokens", "split file", "split file tokens")
CODE = grpc.StatusCode


def test_internal_is_what_services_alone_call() -> None:
    names = {name.rpartition("/")[2] for name in INTERNAL}
    assert {"RegisterStorage", "ReconcilePuts", "UpdatePuts"} <= names
    called_by_clients = {"Put", "PutInline", "Get", "GetInline", "Stat", "Commit", "Insert", "GetMeta", "PlacePut"}
    assert not names & called_by_clients


@dataclass
class Topology:
    """Services with some data, all started in one way."""

    controller: LiveServer
    storage: LiveServer
    client: Any
    put_id: bytes
    tokens: list[str]

    def server_of(self, method: str) -> LiveServer:
        return self.controller if method.startswith((CONTROLLER, REGISTRY)) else self.storage

    def is_served(self, method: str) -> bool:
        """Whether somebody could need it: the embedded storage is used without calls."""
        return self.controller is not self.storage or method.startswith(REGISTRY)

    def state(self) -> tuple[object, ...]:
        """Return all that clients see, and which storage services a put may go to."""
        meta, _ = self.client.lookup_samples("train")
        batch = self.client.get_data(meta)
        stat = self.storage.storage.Stat(storage_pb.StatRequest(), metadata=self._admin())
        placed = self.controller.controller.PlacePut(
            pb.PlacePutRequest(size_bytes=1, partition_id="train"), metadata=self._admin()
        )
        seen = [np.asarray(batch["x"]).tolist(), self.client.list_partitions()]
        return (*seen, stat.put_count, stat.uncommitted_put_count, stat.used_bytes, placed.storages[0].address)

    def _admin(self) -> Any:
        return bearer(self.tokens[0]) if self.tokens else None

    def request_of(self, method: str) -> Message:
        """Return a request that would do harm, if it were let in."""
        kind = DESCRIBED[method].input_type
        message = kind._concrete_class()
        for field, value in {
            "boot_id": self.storage.app.storage.engine.boot_id,
            "put_id": self.put_id,
            "partition_id": "train",
            "storage": metadata_pb2.StorageEndpoint(storage_id="evil", boot_id=new_id(), address="127.0.0.1:1"),
            "max_bytes": 1 << 60,
        }.items():
            if field in kind.fields_by_name:
                if isinstance(value, Message):
                    getattr(message, field).CopyFrom(value)
                else:
                    setattr(message, field, value)
        if kind.name == "UpdatePutsRequest":
            message.freed.add(put_id=self.put_id)  # what is freed; with none all others keep
        return message


def code_of(server: LiveServer, name: str, request: Message, metadata: Any = None) -> Any:
    """Return how a call ends: the error, None where it is answered."""
    try:
        call(server.channel, name, request, metadata)
    except grpc.RpcError as error:
        return error
    return None


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest, start_server: StartServer, tmp_path: Path) -> Iterator[Topology]:
    settings: dict[str, Any] = {"shared_memory": "off"}
    tokens: list[str] = []
    if "tokens" in request.param:
        path = tmp_path / "tokens.toml"
        roles = ("admin", "produce", "consume", "read")
        tokens = [add_token(path, role, [role]) for role in roles]
        service = add_token(path, "service", ["service"])
        settings["auth_tokens_file"] = str(path)
        if request.param in {"split tokens", "all tokens service"}:
            replace(tmp_path / "service.token", service.encode())
            settings["peer_token_file"] = str(tmp_path / "service.token")
    if "file" in request.param:
        replace(tmp_path / "internal.secret", SECRET)
        settings["internal_secret_file"] = str(tmp_path / "internal.secret")
    if request.param.startswith("split"):
        controller = start_server(role="controller", **settings)
        storage = start_server(role="storage", controller=controller.address, **settings)
        until(lambda: controller.app.controller.storages.count == 1)
    else:
        controller = storage = start_server(**settings)
    client = controller.client(token=tokens[0] if tokens else None)
    client.put("train", {"x": np.arange(8)}, keys=[f"k{row}" for row in range(8)])
    until(lambda: storage.app.storage.engine.stat().uncommitted_put_count == 0)
    located = controller.controller.Locate(
        pb.LocateRequest(partition_id="train", keys=["k0"], data_fields=["x"]),
        metadata=bearer(tokens[0]) if tokens else None,
    )
    yield Topology(controller, storage, client, located.meta.locations.puts[0].put_id, tokens)


def test_no_client_gets_through_and_nothing_changes(topology: Topology) -> None:
    """The proof script of the review, keepputs.py, reconciled without puts: all that was committed was dropped."""
    derived = hmac.new(SECRET, b"something else", hashlib.sha256).hexdigest()
    shown: list[Any] = [
        (),
        *(((KEY, value),) for value in ("", "0" * 64, SECRET.decode(), derived, "x" * 4000)),
        *(bearer(token) for token in topology.tokens),
        *((*bearer(token), (KEY, derived)) for token in topology.tokens),
    ]
    before = topology.state()
    for method in INTERNAL:
        server, request = topology.server_of(method), topology.request_of(method)
        for metadata in shown:
            error = code_of(server, method, request, metadata)
            assert error is not None, f"{method} was answered to {metadata}"
            if not topology.is_served(method):
                assert error.code() is CODE.UNIMPLEMENTED
                continue
            assert error.code() in {CODE.UNAUTHENTICATED, CODE.PERMISSION_DENIED}, f"{error.code()} {error.details()}"
            assert reason_of(error) == error.code().name
    assert topology.state() == before


def test_services_get_through(topology: Topology) -> None:
    request = storage_control_pb2.UpdatePutsRequest(boot_id=new_id())
    error = code_of(topology.storage, CONTROL + "UpdatePuts", request, topology.controller.as_service)
    assert (error is None) == (topology.storage is not topology.controller)
    name = REGISTRY + "RegisterStorage"
    error = code_of(
        topology.controller, name, storage_registry_pb2.RegisterStorageRequest(), topology.storage.as_service
    )
    assert (error.code(), reason_of(error)) == (CODE.INVALID_ARGUMENT, "INVALID_ARGUMENT")  # it was read


def test_an_embedded_storage_serves_no_internal_methods_to_services_either(start_server: StartServer) -> None:
    server = start_server()
    for method in INTERNAL:
        if method.startswith(CONTROL):
            error = code_of(server, method, DESCRIBED[method].input_type._concrete_class(), server.as_service)
            assert error.code() is CODE.UNIMPLEMENTED


def test_a_service_for_all_without_a_secret_takes_no_others(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(host="0.0.0.0", insecure=True)
    name = REGISTRY + "RegisterStorage"
    assert code_of(server, name, storage_registry_pb2.RegisterStorageRequest()).code() is CODE.UNIMPLEMENTED
    replace(tmp_path / "secret", SECRET)
    start_server(role="storage", controller=server.address, internal_secret_file=str(tmp_path / "secret"))
    until(lambda: "does not accept storage services" in caplog.text)
    assert "internal_secret_file" in caplog.text


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("proof", [None, "1" * 64])
def test_refusals_are_in_the_audit_log(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_tokens: bool, proof: str | None
) -> None:
    caplog.set_level(logging.INFO, LOGGER_NAME)
    settings = {}
    if has_tokens:
        add_token(tmp_path / "tokens.toml", "boss", ["admin"])
        settings["auth_tokens_file"] = str(tmp_path / "tokens.toml")
    server = start_server(role="controller", **settings)
    name = REGISTRY + "RegisterStorage"
    error = code_of(
        server, name, storage_registry_pb2.RegisterStorageRequest(), None if proof is None else ((KEY, proof),)
    )
    assert error.code() is CODE.UNAUTHENTICATED
    (line,) = [vars(record)["audit"] for record in caplog.records if record.name == LOGGER_NAME]
    assert isinstance(line, AuditLine)
    assert (line.decision, line.method) == ("refused", name)
    if proof is not None:
        assert line.reason == "another internal secret"
        assert "set the same internal_secret_file for all services of a deployment" in error.details()
        assert proof not in str(line)
    elif has_tokens:
        assert line.reason == "no token"
    else:
        assert line.reason == "no internal secret"
        assert "reserved for the services of a deployment" in error.details()


def test_a_method_without_a_rule_is_refused_without_tokens_too(start_server: StartServer, monkeypatch: Any) -> None:
    method = CONTROLLER + "Insert"
    without = {name: known for name, known in METHODS.items() if name != method}
    monkeypatch.setattr("tq_service.server.app.Services", functools.partial(Services, methods=without))
    server = start_server()
    assert code_of(server, method, pb.InsertRequest()).code() is CODE.UNAUTHENTICATED
    error = code_of(server, method, pb.InsertRequest(), server.as_service)
    assert error.code() is CODE.PERMISSION_DENIED
    assert "has no access rule" in error.details()


def test_a_storage_service_with_another_secret_says_so_once(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_service.server.heartbeat._REFUSED_SECONDS", 0.01)
    caplog.set_level(logging.INFO, LOGGER_NAME)
    controller = start_server(role="controller")
    secret = tmp_path / "secret"
    replace(secret, SECRET)
    storage = start_server(role="storage", controller=controller.address, internal_secret_file=str(secret))
    until(lambda: sum(record.name == LOGGER_NAME for record in caplog.records) >= 5)
    said = [record for record in caplog.records if "controller rejects this service" in record.getMessage()]
    assert len(said) == 1
    assert "caller's internal secret differs from this service's" in said[0].getMessage()
    assert controller.app.controller.storages.count == 0
    assert storage.storage.Stat(storage_pb.StatRequest()).put_count == 0  # it answers what it can


def test_a_secret_that_is_replaced_is_followed_while_puts_go_on(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_service.server.listener._LOOK_SECONDS", 0.02)
    monkeypatch.setattr("tq_service.server.credential_files._SEND_OLD_SECONDS", 0.3)
    secret = tmp_path / "secret"
    replace(secret, SECRET)
    settings: dict[str, Any] = {"internal_secret_file": str(secret)}
    controller = start_server(role="controller", **settings)
    storage = start_server(role="storage", controller=controller.address, **settings)
    until(lambda: controller.app.controller.storages.count == 1)
    client = controller.client(timeout=5.0)
    old = controller.as_service
    replace(secret, SECRET[::-1])
    count = 0
    while {old} & {controller.as_service, storage.as_service} or count < 20:
        client.put("train", {"x": np.arange(4)})
        count += 1
    client.put("train", {"x": np.arange(4)})
    assert client.lookup_samples("train")[0].size == 4 * (count + 1)


def test_no_service_is_split_without_a_secret_or_tokens(tmp_path: Path, start_server: StartServer) -> None:
    add_token(tmp_path / "tokens.toml", "boss", ["admin"])
    open_: dict[str, Any] = {"host": "0.0.0.0", "insecure": True}
    for settings in (
        {"role": "controller", **open_},
        {"role": "storage", "controller": "127.0.0.1:1", **open_},
        {"role": "storage", "controller": "elsewhere:1"},
        {"role": "storage", "controller": "127.0.0.1:1", "advertise": "elsewhere:1"},
        {"role": "controller", "auth_tokens_file": str(tmp_path / "tokens.toml"), **open_},  # and no token of its own
    ):
        with pytest.raises(InvalidArgumentError, match=r"TQ_INTERNAL_SECRET_FILE.*peer_token_file") as caught:
            start_server(**settings)
        assert caught.value.field == "internal_secret_file"


def test_a_storage_service_that_refuses_its_controller_holds_up_no_put(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    controller = start_server(role="controller")
    storage = start_server(role="storage", controller=controller.address, shared_memory="off")
    until(lambda: controller.app.controller.storages.count == 1)
    client = controller.client()
    monkeypatch.setattr(storage.app.listener.credentials.secret, "_proof", "0" * 64)
    meta = client.put("train", {"x": np.arange(4)})  # is committed on its receipt, without a call
    until(lambda: any("does not accept updates" in message for message in caplog.messages))
    assert client.get_data(meta)["x"].tolist() == [0, 1, 2, 3]
