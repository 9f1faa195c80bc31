"""Connections without an authenticated call are closed, and leave room for those of clients with a token."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from certificates import add_token
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from live_server import CLIENT_KINDS, ClientKind, LiveServer, LoopThread, StartServer

import tq_service as tq
from tq_service.client.connection_check import _HTTP2_HELLO
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

LONG = 600.0
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


class Guarded:
    """A service with tokens, and one that is valid."""

    def __init__(self, start_server: StartServer, directory: Path, **settings: object) -> None:
        tokens = directory / "tokens.toml"
        self.token = add_token(tokens, "boss", ["admin"])
        self.live: LiveServer = start_server(auth_tokens_file=str(tokens), shared_memory="off", **settings)

    @property
    def marked(self) -> dict[str, float]:
        return self.live.app._connections._admitted_at

    def sweep(self) -> None:
        self.live.loop.run(self.live.app._connections.sweep(self.live.app.port))


@contextlib.contextmanager
def strangers(address: str, count: int, greeting: bytes = _HTTP2_HELLO) -> Iterator[list[socket.socket]]:
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        for connection in connections:
            connection.settimeout(60)
            connection.sendall(greeting)
        yield connections


def wait_until_closed(connection: socket.socket) -> None:
    """Read until the other side ends the connection; a timeout fails the test."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            pass


@pytest.mark.parametrize("greeting", [b"", _HTTP2_HELLO], ids=["silent", "HTTP/2"])
def test_a_connection_without_a_call_is_closed_and_one_with_a_call_stays(
    start_server: StartServer, tmp_path: Path, greeting: bytes
) -> None:
    guarded = Guarded(start_server, tmp_path, first_call_seconds=0.5)
    client = guarded.live.client(token=guarded.token)
    client.list_partitions()
    (peer,) = guarded.marked
    with strangers(guarded.live.address, 3, greeting) as connections:
        for connection in connections:
            wait_until_closed(connection)
    client.list_partitions()
    assert list(guarded.marked) == [peer]


@pytest.mark.parametrize("kind", CLIENT_KINDS)
def test_strangers_of_one_address_do_not_keep_a_client_with_a_token_out(
    start_server: StartServer, tmp_path: Path, kind: ClientKind
) -> None:
    guarded = Guarded(start_server, tmp_path, max_connections=16, first_call_seconds=LONG)
    with strangers(guarded.live.address, 40):
        assert guarded.live.client(kind, token=guarded.token).list_partitions() == []


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer tq_unknown"),)], ids=["no token", "unknown"])
def test_probes_and_refused_calls_are_not_authenticated_calls(
    start_server: StartServer, tmp_path: Path, metadata: tuple[tuple[str, str], ...]
) -> None:
    guarded = Guarded(start_server, tmp_path, first_call_seconds=LONG)
    with grpc.insecure_channel(guarded.live.address, options=OWN_CONNECTION) as channel:
        assert HealthStub(channel).Check(HealthCheckRequest()).status
        with pytest.raises(grpc.RpcError) as refused:
            ControllerServiceStub(channel).ListPartitions(pb.ListPartitionsRequest(), metadata=metadata)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    assert not guarded.marked


def test_probes_count_if_nobody_needs_a_token(start_server: StartServer) -> None:
    """Else a monitor that keeps its connection would lose it, and the call on it, every few seconds."""
    live = start_server(shared_memory="off", first_call_seconds=0.5)
    with grpc.insecure_channel(live.address, options=OWN_CONNECTION) as channel:
        health = HealthStub(channel)
        assert health.Check(HealthCheckRequest()).status
        (peer,) = live.app._connections._admitted_at
        with strangers(live.address, 1) as (connection,):
            wait_until_closed(connection)
        live.loop.run(live.app._connections.sweep(live.app.port))
        assert health.Check(HealthCheckRequest()).status
        assert list(live.app._connections._admitted_at) == [peer]


def test_marks_go_with_their_connections(start_server: StartServer, tmp_path: Path) -> None:
    guarded = Guarded(start_server, tmp_path, first_call_seconds=LONG)
    for _ in range(20):
        with tq.Client(guarded.live.address, token=guarded.token) as client:
            client.list_partitions()
    assert guarded.marked
    # The time limit of the test ends this. The service sweeps too, and may have looked before the last one was closed.
    while guarded.marked or guarded.live.app._connections._connections:
        guarded.sweep()
    assert not guarded.marked


@pytest.mark.parametrize("host", ["::1", "::", "127.0.0.1", "0.0.0.0"])
def test_peers_are_named_as_grpc_names_them(loop_thread: LoopThread, host: str) -> None:
    with LiveServer(loop_thread, host=host, insecure=True) as live:
        target = f"[::1]:{live.app.port}" if host == "::1" else f"127.0.0.1:{live.app.port}"
        with tq.Client(target) as client:
            client.list_partitions()
            loop_thread.run(live.app._connections.sweep(live.app.port))
            seen = {each.peer for each in live.app._connections._connections.values()}
            assert set(live.app._connections._admitted_at) <= seen != set()


@pytest.mark.parametrize("kind", CLIENT_KINDS)
def test_an_idle_connection_is_closed_and_its_client_connects_again(
    start_server: StartServer, kind: ClientKind
) -> None:
    server = start_server(idle_connection_seconds=0.2, shared_memory="off")
    client = server.client(kind)
    client.list_partitions()
    (first,) = server.app._connections._admitted_at
    while first in server.app._connections._admitted_at:
        server.loop.run(server.app._connections.sweep(server.app.port))
    assert client.list_partitions() == []
    assert first not in server.app._connections._admitted_at
