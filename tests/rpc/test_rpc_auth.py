"""Who may call what, at every method of every service: who is not let in learns nothing and changes nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import Authority, add_token, bearer, request_id
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from live_server import LiveServer, LoopThread, StartServer
from rpc_methods import CONTROLLER, DESCRIBED, LISTING, SERVED, STORAGE, call

import tq_service as tq
from tq_service.server.audit import LOGGER_NAME, AuditLine
from tq_service.server.credential_files import digest_of, format_entry, make_token, remove_token
from tq_service.server.rpc.methods import METHODS
from tq_service.serving.lookup import name_token
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.wire.columns import encode_header
from tq_service.wire.connection import ROLES
from tq_service.wire.encoding import encode_columns

_FOR_ANY_TOKEN = [name for name in SERVED if METHODS[name].roles == frozenset(ROLES)]
_GUARDED = [name for name in SERVED if name not in _FOR_ANY_TOKEN]
_BY_PREFIX = [name for name in _GUARDED if name not in LISTING and name != CONTROLLER + "CallMany"]
"""Without the one whose calls are refused one by one: test_rpc_call_many.py."""
_SECRET = "secret/train"
_NOT_REFUSALS = {
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
}


def test_no_role_but_those_of_admin_and_service_is_for_the_service_itself() -> None:
    whole = {method.short_name for method in METHODS.values() if method.concerns_all}
    assert whole == {
        "Checkpoint",
        "ListCheckpoints",
        "Restore",
        "RegisterStorage",
        "FetchSnapshot",
        "Adopt",
        "ReconcilePuts",
        "UpdatePuts",
    }
    for method in METHODS.values():
        if method.concerns_all:
            assert method.roles <= {"admin", "service"}, method


@dataclass
class Guarded:
    """A service with tokens, some data, and the tokens' file."""

    live: LiveServer
    tokens: Path
    admin: str
    put_id: bytes

    def token(self, name: str, prefixes: tuple[str, ...] = ("",), *, is_right: bool = True) -> str:
        """Return a new token with the roles of a method, or with all others but admin."""
        roles = METHODS[name].roles if is_right else frozenset(ROLES) - METHODS[name].roles - {"admin"}
        secret = add_token(self.tokens, f"t{request_id().hex()}", roles, prefixes)
        self.read_tokens()
        return secret

    def read_tokens(self) -> None:
        """Have the service read the tokens' file now, which takes two looks at it."""
        self.live.app.listener._tokens.reload()
        self.live.app.listener._tokens.reload()

    def state(self) -> list[bytes]:
        """Return all that can be seen of the service."""
        metadata = bearer(self.admin)
        listed = self.live.controller.ListPartitions(pb.ListPartitionsRequest(), metadata=metadata)
        described = [
            self.live.controller.DescribePartition(
                pb.DescribePartitionRequest(partition_id=summary.partition_id), metadata=metadata
            )
            for summary in listed.partitions
        ]
        for task in (task for each in described for task in each.tasks):
            task.ClearField("delivered_per_second")  # which falls with time
        stat = self.live.storage.Stat(storage_pb.StatRequest(), metadata=metadata)
        return [message.SerializeToString(deterministic=True) for message in (listed, *described, stat)]


@pytest.fixture(scope="module")
def guarded(loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    tokens = tmp_path_factory.mktemp("auth") / "tokens.toml"
    admin = add_token(tokens, "boss", ["admin"])
    with LiveServer(loop_thread, auth_tokens_file=str(tokens)) as live:
        client = live.client(token=admin)
        client.put(_SECRET, {"x": np.arange(8)}, keys=[f"k{i}" for i in range(8)])
        located = live.controller.Locate(
            pb.LocateRequest(partition_id=_SECRET, keys=["k0"], data_fields=["x"]), metadata=bearer(admin)
        )
        yield Guarded(live, tokens, admin, located.meta.locations.puts[0].put_id)


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Callable[[], list[AuditLine]]:
    """Returns the lines written since it was called last."""
    caplog.set_level(logging.INFO, LOGGER_NAME)

    def lines() -> list[AuditLine]:
        written = [vars(record)["audit"] for record in caplog.records if record.name == LOGGER_NAME]
        caplog.clear()
        return written

    return lines


def request_of(name: str, live: LiveServer, partition_id: str, put_id: bytes) -> Message:
    """Return a request that would do something, if it were let in."""
    kind = DESCRIBED[name].input_type
    boot_id = live.app.storage.engine.boot_id
    header = storage_pb.PutHeader(put_id=request_id(), partition_id=partition_id)
    header.commit.write.partition_id = partition_id
    header.commit.request_id = request_id()
    get = storage_pb.GetRequest(boot_id=boot_id, put_ids=[put_id])
    write = commit_pb2.SampleWrite(partition_id=partition_id, row_count=4)
    special: dict[str, Message] = {
        "Insert": pb.InsertRequest(request_id=request_id(), write=write),
        "Commit": commit_pb2.CommitRequest(request_id=request_id(), write=write),
        "Put": storage_pb.PutRequest(header=header),
        "PutInline": storage_pb.PutInlineRequest(header=header),
        "Get": get,
        "GetInline": storage_pb.GetInlineRequest(get=get),
    }
    if kind.name.removesuffix("Request") in special:
        return special[kind.name.removesuffix("Request")]
    message = kind._concrete_class()
    for field, value in {
        "request_id": request_id(),
        "partition_id": partition_id,
        "policy": partition_id,  # which is named like one
        "task_name": "t",
        "data_fields": ["x"],
        "batch_size": 1,
        "keys": ["k0"],
    }.items():
        if field in kind.fields_by_name:
            if isinstance(value, list):
                getattr(message, field).extend(value)
            else:
                setattr(message, field, value)
    return message


def refused(live: LiveServer, name: str, request: Message, metadata: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(live.channel, name, request, metadata)
    return caught.value


@pytest.mark.parametrize("name", SERVED)
def test_without_a_valid_token_nothing_is_answered(
    guarded: Guarded, name: str, audit: Callable[[], list[AuditLine]]
) -> None:
    old = add_token(guarded.tokens, f"old{request_id().hex()}", ["admin"], expires=datetime(2020, 1, 1, tzinfo=UTC))
    guarded.read_tokens()
    before = guarded.state()
    audit()
    basic = (("authorization", f"Basic {guarded.admin}"),)
    messages = set()
    for metadata, reason, is_told in (
        (None, "no token", False),
        (basic, "no token", False),
        (bearer("tq_wrong"), "unknown token", True),
        (bearer(guarded.admin[:-1]), "unknown token", True),
        (bearer(old), "token has expired", True),
    ):
        error = refused(guarded.live, name, request_of(name, guarded.live, _SECRET, guarded.put_id), metadata)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        (line,) = audit()
        assert (line.decision, line.method, line.reason) == ("refused", name, reason)
        assert line.peer.startswith("ipv4:127.0.0.1:")
        assert guarded.admin not in str(line)
        if is_told:
            messages.add(error.details())
    assert len(messages) == 1  # an expired token is not told from one that never was
    assert guarded.state() == before


@pytest.mark.parametrize("name", _GUARDED)
def test_a_token_of_another_role_is_refused(guarded: Guarded, name: str, audit: Callable[[], list[AuditLine]]) -> None:
    secret = guarded.token(name, is_right=False)
    before = guarded.state()
    audit()
    error = refused(guarded.live, name, request_of(name, guarded.live, _SECRET, guarded.put_id), bearer(secret))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "needs one of the roles" in error.details()
    (line,) = audit()
    assert (line.decision, line.method) == ("refused", name)
    assert line.reason.startswith("none of the roles")
    assert line.token
    assert secret not in str(line)
    assert guarded.state() == before


@pytest.mark.parametrize("name", _BY_PREFIX)
def test_a_token_for_other_partitions_is_refused(
    guarded: Guarded, name: str, audit: Callable[[], list[AuditLine]]
) -> None:
    secret = guarded.token(name, ("mine/", "secret/trail"))
    before = guarded.state()
    audit()
    error = refused(guarded.live, name, request_of(name, guarded.live, _SECRET, guarded.put_id), bearer(secret))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    (line,) = audit()
    assert (line.decision, line.method) == ("refused", name)
    assert line.reason in {"outside its prefixes", "not for all partitions"}
    assert guarded.state() == before


@pytest.mark.parametrize("name", SERVED)
def test_a_token_of_the_right_role_and_prefix_gets_through(guarded: Guarded, name: str) -> None:
    secret = guarded.token(name, ("",) if METHODS[name].concerns_all else ("open/",))
    request = request_of(name, guarded.live, "open/train", request_id())
    try:
        call(guarded.live.channel, name, request, bearer(secret))
    except grpc.RpcError as error:  # what it asks for may not be there, but nobody was refused
        assert error.code() in _NOT_REFUSALS


def test_a_put_is_refused_for_the_partition_of_its_commit_too(guarded: Guarded) -> None:
    secret = add_token(guarded.tokens, "other", ["produce"], ("mine/",))
    guarded.read_tokens()
    before = guarded.state()
    header = storage_pb.PutHeader(put_id=request_id(), partition_id="mine/a")
    header.commit.CopyFrom(
        commit_pb2.CommitRequest(request_id=request_id(), write=commit_pb2.SampleWrite(partition_id=_SECRET))
    )
    put, small = storage_pb.PutRequest(header=header), storage_pb.PutInlineRequest(header=header)
    for name, request in (("Put", put), ("PutInline", small)):
        error = refused(guarded.live, STORAGE + name, request, bearer(secret))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert guarded.state() == before


def test_lists_show_only_what_a_token_is_for(guarded: Guarded) -> None:
    boss = guarded.live.client(token=guarded.admin)
    boss.create_partition("mine/a")
    secret = guarded.token(CONTROLLER + "ListPartitions", ("mine/",))
    mine = guarded.live.client(token=secret)
    assert [each.partition_id for each in mine.list_partitions()] == ["mine/a"]
    assert mine.list_partitions("secret/") == []
    assert {"mine/a", _SECRET} <= {each.partition_id for each in boss.list_partitions()}
    status = mine.status()
    assert [each.summary.partition_id for each in status.partitions] == ["mine/a"]
    assert {each.partition_id for each in status.waits} <= {"mine/a"}
    metadata = bearer(guarded.token(CONTROLLER + "Watch", ("mine/",)))
    for answer in guarded.live.controller.Watch(pb.WatchRequest(), metadata=metadata, timeout=20):
        assert {each.partition_id for each in answer.partitions} <= {"mine/a"}
        if answer.HasField("revision"):
            break
    assert {CONTROLLER + name for name in ("ListPartitions", "GetStatus", "Watch")} == LISTING
    boss.clear_partition("mine/a")


def test_pages_say_nothing_of_the_partitions_of_others(guarded: Guarded) -> None:
    """Neither their names nor how many there are: a page is made of those that the token is for."""
    boss = guarded.live.client(token=guarded.admin)
    others = [f"{place}{number}" for place in ("a", "mine", "n", "secret/b") for number in range(3)]
    mine = [f"mine/{number}" for number in range(3)]
    for name in [*others, *mine]:
        boss.create_partition(name)
    metadata = bearer(guarded.token(CONTROLLER + "ListPartitions", ("mine/",)))
    asked, found, tokens = pb.ListPartitionsRequest(page_size=1), [], []
    while not tokens or tokens[-1]:
        answer = guarded.live.controller.ListPartitions(asked, metadata=metadata, timeout=20)
        found.append([each.partition_id for each in answer.partitions])
        tokens.append(answer.next_page_token)
        asked.page_token = answer.next_page_token
    assert found == [[name] for name in mine]
    assert {token.partition("-")[2] for token in tokens} <= {*mine, ""}
    for prefix, name in (("secret/", ""), ("", "n"), ("", "secret/"), ("m", "mine0")):
        token = name_token(f"partitions/{prefix}", name) if name else ""
        asked = pb.ListPartitionsRequest(prefix=prefix, page_token=token, page_size=1)
        answer = guarded.live.controller.ListPartitions(asked, metadata=metadata, timeout=20)
        assert answer.partitions == [] or answer.partitions[0].partition_id in mine
        assert answer.next_page_token.partition("-")[2] in {*mine, ""}
    for name in [*others, *mine]:
        boss.clear_partition(name)


def test_errors_name_no_partitions_of_others(guarded: Guarded) -> None:
    for prefixes, is_named in ((("secret/",), False), (("",), True)):
        client = guarded.live.client(token=guarded.token(CONTROLLER + "DescribePartition", prefixes))
        with pytest.raises(tq.errors.PartitionNotFoundError) as caught:
            client.describe_partition("secret/trai")
        assert (_SECRET in str(caught.value)) is is_named


def test_reasons_of_waits_name_no_partitions_of_others(guarded: Guarded) -> None:
    boss = guarded.live.client(token=guarded.admin)
    boss.create_partition("secretly")
    for prefixes, is_named in ((("secret/",), False), (("",), True)):
        client = guarded.live.client(token=guarded.token(CONTROLLER + "GetMeta", prefixes))
        meta = client.get_meta(
            partition_id="secret/trai", task_name="t", data_fields=["x"], batch_size=1, max_wait=0.0, explain=True
        )
        assert _SECRET in meta.reason
        assert ("secretly" in meta.reason) is is_named
    boss.clear_partition("secretly")


@pytest.mark.parametrize("name", ["Put", "PutInline"])
@pytest.mark.parametrize(("prefix", "is_named"), [("secret/", False), ("", True)])
def test_errors_of_puts_name_no_partitions_of_others(guarded: Guarded, name: str, prefix: str, is_named: bool) -> None:
    column = encode_columns({"x": np.zeros(1)})[0]
    header = storage_pb.PutHeader(
        put_id=request_id(), row_count=1, partition_id="secret/trai", columns=[encode_header(column)], size_bytes=8
    )
    write = commit_pb2.SampleWrite(
        partition_id="secret/trai",
        row_count=1,
        keys=["k0"],
        key_mode=commit_pb2.KEY_MODE_EXISTING,
    )
    header.commit.CopyFrom(commit_pb2.CommitRequest(request_id=request_id(), write=write))
    small = storage_pb.PutInlineRequest(header=header, values=bytes(8))
    parts = [storage_pb.PutRequest(header=header), storage_pb.PutRequest(frame=bytes(8))]
    metadata = bearer(guarded.token(STORAGE + name, (prefix,)))
    with pytest.raises(grpc.RpcError) as caught:
        if name == "Put":
            guarded.live.storage.Put(iter(parts), metadata=metadata, timeout=20)
        else:
            guarded.live.storage.PutInline(small, metadata=metadata, timeout=20)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (_SECRET in caught.value.details()) is is_named


def test_a_stream_that_does_not_begin_is_ended(start_server: StartServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    secret = add_token(tokens, "rollouts", ["produce"])
    live = start_server(auth_tokens_file=str(tokens), stall_seconds=0.5)
    is_over = threading.Event()

    def nothing() -> Iterator[storage_pb.PutRequest]:
        is_over.wait(60)
        yield from ()

    try:
        with pytest.raises(grpc.RpcError) as caught:
            live.storage.Put(nothing(), metadata=bearer(secret), timeout=30)
    finally:
        is_over.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not arrive within 0.5 s" in caught.value.details()


def test_names_cannot_forge_lines(guarded: Guarded, audit: Callable[[], list[AuditLine]]) -> None:
    secret = guarded.token(CONTROLLER + "DescribePartition", ("mine/",))
    audit()
    evil = "x\nrefused method=\u202e\x1b[2J" + "y" * 5000
    with pytest.raises(grpc.RpcError):
        guarded.live.controller.DescribePartition(
            pb.DescribePartitionRequest(partition_id=evil), metadata=bearer(secret)
        )
    (line,) = audit()
    assert str(line).isascii()
    assert str(line).isprintable()
    assert len(str(line)) < 1000


def test_administrative_calls_are_in_the_audit_log(guarded: Guarded, audit: Callable[[], list[AuditLine]]) -> None:
    boss = guarded.live.client(token=guarded.admin)
    boss.create_partition("mine/b")
    boss.list_partitions()
    audit()
    boss.clear_partition("mine/b")
    (line,) = audit()
    assert (line.decision, line.token, line.partition) == ("allowed", "boss", "mine/b")
    assert line.method.endswith("/ClearPartition")


def test_who_is_not_let_in_does_not_learn_of_a_disk_that_is_full(
    start_server: StartServer,
    tmp_path: Path,
    audit: Callable[[], list[AuditLine]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never_durable() -> None:
        raise tq.errors.DiskFullError("full")

    tokens = tmp_path / "tokens.toml"
    reader, writer = add_token(tokens, "reader", ["read"]), add_token(tokens, "writer", ["produce"])
    live = start_server(auth_tokens_file=str(tokens), data_dir=str(tmp_path / "data"))
    monkeypatch.setattr(live.app.state_store, "is_failing", True)
    monkeypatch.setattr(live.app.state_store, "wait_durable", never_durable)
    name = CONTROLLER + "Insert"
    for metadata, code, line_count in (
        (None, grpc.StatusCode.UNAUTHENTICATED, 1),
        (bearer(reader), grpc.StatusCode.PERMISSION_DENIED, 1),
        (bearer(writer), grpc.StatusCode.RESOURCE_EXHAUSTED, 0),
    ):
        error = refused(live, name, request_of(name, live, "train", b""), metadata)
        assert error.code() is code
        assert len(audit()) == line_count


def test_a_stranger_is_refused_before_a_large_request_is_read(guarded: Guarded) -> None:
    request = pb.InsertRequest(request_id=b"x" * (32 << 20))
    error = refused(guarded.live, CONTROLLER + "Insert", request, None)
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


def test_clients_raise_at_once_and_do_not_try_again(
    guarded: Guarded, client_kind: Any, audit: Callable[[], list[AuditLine]]
) -> None:
    large = {"x": np.zeros((64, 1 << 14), np.float32)}
    for token, error in (
        ("tq_wrong", tq.errors.UnauthenticatedError),
        (guarded.token(STORAGE + "Get"), tq.errors.PermissionDeniedError),
    ):
        client = guarded.live.client(client_kind, token=token)
        for attempt in (
            lambda client=client: client.put("mine/c", large),
            lambda client=client: client.put("mine/c", {"x": np.zeros(1)}),
            lambda client=client: client.create_partition("mine/c"),
        ):
            audit()
            with pytest.raises(error) as caught:
                attempt()
            assert isinstance(caught.value, PermissionError)
            assert token not in str(caught.value)
            # A large put asks first where to go; the storage service that is asked for shared memory refuses, too.
            assert 1 <= len(audit()) <= 3


def test_health_is_open_and_reflection_asks_for_a_token(start_server: StartServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    secret = add_token(tokens, "reader", ["read"], ("mine/",))
    live = start_server(auth_tokens_file=str(tokens), reflection=True)
    health = health_pb2_grpc.HealthStub(live.channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
    assert next(health.Watch(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    ask = reflection_pb2_grpc.ServerReflectionStub(live.channel).ServerReflectionInfo
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as caught:
        next(ask(iter([question])))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    names = next(ask(iter([question]), metadata=bearer(secret))).list_services_response.service
    assert "tq_service.v1.ControllerService" in {service.name for service in names}


def test_reflection_is_off_unless_asked_for(guarded: Guarded) -> None:
    ask = reflection_pb2_grpc.ServerReflectionStub(guarded.live.channel).ServerReflectionInfo
    with pytest.raises(grpc.RpcError) as caught:
        next(ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=bearer(guarded.admin)))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_without_a_certificate_no_call_arrives(start_server: StartServer, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "own"), Authority(tmp_path / "other")
    own, stranger = authority.issue("service"), other.issue("stranger")
    tokens = tmp_path / "tokens.toml"
    secret = add_token(tokens, "boss", ["admin"])
    live = start_server(
        tls_cert=str(own.cert), tls_key=str(own.key), tls_client_ca=str(own.ca), auth_tokens_file=str(tokens)
    )
    target = f"localhost:{live.app.port}"
    ca = Path(str(own.ca)).read_bytes()
    key, cert = Path(str(stranger.key)).read_bytes(), Path(str(stranger.cert)).read_bytes()
    alone = [("grpc.use_local_subchannel_pool", 1)]
    with tq.Client(target, token=secret, tls=own) as client:
        client.create_partition("mine/a")
        before = client.describe_partition("mine/a"), client.storage_stat()
        for credentials in (None, grpc.ssl_channel_credentials(ca), grpc.ssl_channel_credentials(ca, key, cert)):
            with (
                grpc.insecure_channel(target, alone)
                if credentials is None
                else grpc.secure_channel(target, credentials, alone)
            ) as channel:
                for name in DESCRIBED:
                    request = request_of(name, live, "mine/a", request_id())
                    with pytest.raises(grpc.RpcError) as caught:
                        call(channel, name, request, bearer(secret))
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (client.describe_partition("mine/a"), client.storage_stat()) == before


@pytest.mark.parametrize("end", ["removed", "expired", "another role"])
@pytest.mark.parametrize("kind", ["watch", "wait", "put"])
def test_calls_that_last_end_with_their_token(guarded: Guarded, kind: str, end: str) -> None:
    live, name = guarded.live, f"t{request_id().hex()}"
    expires = datetime(2999, 1, 1, tzinfo=UTC) if end == "expired" else None
    secret = add_token(guarded.tokens, name, ["read", "produce", "consume"], (f"{name}/",), expires=expires)
    guarded.read_tokens()
    is_over = threading.Event()

    def parts() -> Iterator[storage_pb.PutRequest]:
        columns = encode_columns({"x": np.zeros(1_000_000)})
        header = storage_pb.PutHeader(
            put_id=request_id(), partition_id=f"{name}/p", row_count=columns[0].row_count,
            columns=[encode_header(column) for column in columns], size_bytes=sum(each.value_bytes for each in columns),
        )  # fmt: skip
        yield storage_pb.PutRequest(header=header)
        is_over.wait(60)

    wait = pb.GetMetaRequest(
        partition_id=f"{name}/p", task_name="t", data_fields=["x"], batch_size=1, request_id=request_id()
    )
    wait.max_wait.FromSeconds(50)
    calls: dict[str, Callable[[], Any]] = {
        "watch": lambda: list(live.controller.Watch(pb.WatchRequest(), metadata=bearer(secret), timeout=60)),
        "wait": lambda: live.controller.GetMeta(wait, metadata=bearer(secret), timeout=60),
        "put": lambda: live.storage.Put(parts(), metadata=bearer(secret), timeout=60),
    }
    ended: list[Any] = []

    def run() -> None:
        try:
            calls[kind]()
        except grpc.RpcError as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    access = live.app.listener.access
    while not access._lasting._owners:  # the time limit of the test ends this
        assert not ended
    live.loop.run(live.app.listener._look())
    assert not ended
    remove_token(guarded.tokens, name)
    if end != "removed":
        past = datetime(2020, 1, 1, tzinfo=UTC) if end == "expired" else None
        text = guarded.tokens.read_text()
        entry = make_token(name=name, sha256=digest_of(secret), roles=["read"], prefixes=[f"{name}/"], expires=past)
        guarded.tokens.write_text(text + format_entry(entry))
    for _ in range(2):  # a file is read once it has stayed the same for a look
        live.loop.run(live.app.listener._look())
    thread.join(60)
    is_over.set()
    (error,) = ended
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not access._lasting._owners
