"""Clients find the bulk port beside their calls, use it by themselves, and do without it where it is not reached."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from certificates import Authority, Tls
from live_server import AnyClient, ClientKind, LiveServer, StartServer

from tq_service.dataplane.bulk import client as bulk_client
from tq_service.dataplane.bulk import connection as bulk_connection
from tq_service.dataplane.bulk import server as bulk_server
from tq_service.dataplane.bulk.client import BulkLink
from tq_service.dataplane.bulk.connection import BulkConnection
from tq_service.errors import UnavailableError
from tq_service.v1.metadata_pb2 import StorageEndpoint
from tq_service.v1.storage_service_pb2 import BulkTicket, StatResponse

SECONDS = 20.0
ROW_BYTES = 256 << 10
ROWS = 16


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the transfers of all services, in their order."""
    sizes: list[int] = []
    real = bulk_server.BulkServer.open

    def open_(self: bulk_server.BulkServer, size_bytes: int, *args: object, **options: object) -> object:
        sizes.append(size_bytes)
        return real(self, size_bytes, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(bulk_server.BulkServer, "open", open_)
    return sizes


def samples(seed: int = 0) -> dict[str, object]:
    generator = np.random.default_rng(seed)
    return {
        "dense": generator.integers(0, 255, (ROWS, ROW_BYTES), np.uint8),
        "jagged": [generator.integers(0, 99, size) for size in generator.integers(0, 9000, ROWS).tolist()],
        "text": ["ä" * size for size in generator.integers(0, 90_000, ROWS).tolist()],
    }


def same(got: object, put: dict[str, object]) -> bool:
    return all(
        np.array_equal(np.asarray(one), np.asarray(other))
        for name, rows in put.items()
        for one, other in zip(got[name], rows, strict=True)  # type: ignore[index, call-overload]
    )


def round_trips(client: AnyClient, count: int = 3) -> None:
    """Put and get, the first time before the port is found."""
    for number in range(count):
        put = samples(number)
        meta = client.put("train", put)
        assert same(client.get_data(meta), put)
        client.clear_partition("train")
        if not number:
            time.sleep(0.3)


def test_clients_use_it_by_themselves(start_server: StartServer, client_kind: ClientKind, moved: list[int]) -> None:
    server = start_server(shared_memory="off")
    round_trips(server.client(client_kind))
    assert len(moved) >= 4
    server.settle()
    bulk = server.app.storage.bulk  # type: ignore[union-attr]
    assert bulk.moved_bytes == sum(moved)
    assert bulk.connection_count >= 1


def test_shared_memory_goes_first(start_server: StartServer, client_kind: ClientKind, moved: list[int]) -> None:
    server = start_server(shared_memory="on")
    round_trips(server.client(client_kind))
    assert moved == []


@pytest.mark.parametrize("switch", ["service", "client"])
def test_it_can_be_switched_off(
    start_server: StartServer, moved: list[int], monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    if switch == "client":
        monkeypatch.setenv("TQ_BULK", "off")
    server = start_server(shared_memory="off", bulk="off" if switch == "service" else "on")
    round_trips(server.client("sync"))
    assert moved == []


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port that takes no connection: its queue is full, and the system drops what comes."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_port_that_is_not_reached_costs_calls_no_time(
    start_server: StartServer, client_kind: ClientKind, moved: list[int]
) -> None:
    with deaf_port() as port:
        server = start_server(shared_memory="off", bulk_advertise=f"127.0.0.1:{port}")
        client = server.client(client_kind)
        began = time.monotonic()
        round_trips(client)
        assert time.monotonic() - began < 30
        assert moved == []


def test_an_advertised_address_is_used(start_server: StartServer, moved: list[int]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start_server(shared_memory="off", bulk_port=port, bulk_advertise="localhost")
    assert server.app.storage.bulk.port == port  # type: ignore[union-attr]
    round_trips(server.client("sync"))
    assert len(moved) >= 4


def test_a_port_that_is_taken_is_said(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="set a different bulk_port"):
        start_server(bulk_port=taken.getsockname()[1])


@pytest.mark.parametrize("asks_clients", [False, True])
def test_it_is_secured_as_the_service_is(
    start_server: StartServer, client_kind: ClientKind, moved: list[int], tmp_path: Path, asks_clients: bool
) -> None:
    authority = Authority(tmp_path)
    own, theirs = authority.issue("service"), authority.issue("client")
    server = start_server(
        shared_memory="off",
        tls_cert=str(own.cert),
        tls_key=str(own.key),
        **({"tls_client_ca": str(own.ca)} if asks_clients else {}),
    )
    client = AnyClient(
        client_kind,
        f"localhost:{server.app.port}",
        server.loop,
        tls=theirs if asks_clients else Tls(ca=theirs.ca),
    )
    try:
        round_trips(client)
        assert len(moved) >= 4
        plain = socket.create_connection(("127.0.0.1", server.app.storage.bulk.port), timeout=SECONDS)  # type: ignore[union-attr]
        with plain, contextlib.suppress(ConnectionError):
            plain.sendall(b"TQB1" + bytes(28))
            answer = plain.recv(100) + plain.recv(100)  # an alert of TLS at most, and the end
            assert len(answer) < 10
        if asks_clients:
            stranger = BulkLink(f"localhost:{server.app.port}", Tls(ca=own.ca))
            stranger.probe(stat_of(server))
            assert not is_up_soon(stranger, 1.5)
    finally:
        client.close()


def is_up_soon(link: BulkLink, seconds: float = SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not link.is_up and time.monotonic() < deadline:
        time.sleep(0.01)
    return link.is_up


def stat_of(server: LiveServer) -> StatResponse:
    storage = server.app.storage
    assert storage is not None
    assert storage.bulk is not None
    return StatResponse(storage=storage.endpoint, bulk_address=f":{storage.bulk.port}")


@pytest.mark.parametrize("address", ["unix:/tmp/socket", "10.0.0.1:1,10.0.0.2:1", "dns:///[::1]:1"])
def test_where_the_port_is_follows_from_the_address_of_the_service(address: str) -> None:
    expected = ("::1", 7) if "::1" in address else None
    assert bulk_client._target(":7", address) == expected
    assert bulk_client._target("bulk.example:8", address) == ("bulk.example", 8)
    assert bulk_client._target("", address) is None


def test_a_service_without_a_port_is_asked_again_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(bulk_client.time, "monotonic", lambda: now[0])
    link = BulkLink("127.0.0.1:1")
    assert link.is_due()
    link.probe(StatResponse())
    assert not link.is_due()
    now[0] += 61
    assert link.is_due()
    link.close()
    assert not link.is_due()


BOOT_ID = bytes(range(100, 116))


class Port:
    """A bulk port that does with each connection what the test says, after a greeting."""

    def __init__(self, serve: Callable[[BulkConnection], None], greeting: bytes = BOOT_ID) -> None:
        self._greeting = greeting
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._serve = serve
        self.accepted_count = 0
        self.link = BulkLink(f"127.0.0.1:{self._listener.getsockname()[1]}")
        threading.Thread(target=self._accept, daemon=True).start()
        endpoint = StorageEndpoint(boot_id=BOOT_ID)
        self.link.probe(StatResponse(storage=endpoint, bulk_address=f":{self._listener.getsockname()[1]}"))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                self.accepted_count += 1
                threading.Thread(target=self._run, args=(BulkConnection(accepted),), daemon=True).start()

    def _run(self, connection: BulkConnection) -> None:
        with contextlib.suppress(OSError, UnavailableError):
            if self._greeting:
                connection.greet(self._greeting)
            self._serve(connection)
        connection.close()

    def close(self) -> None:
        self.link.close()
        self._listener.close()


@contextlib.contextmanager
def port(serve: Callable[[BulkConnection], None]) -> Iterator[Port]:
    opened = Port(serve)
    try:
        assert is_up_soon(opened.link)
        yield opened
    finally:
        opened.close()


def ticket_of(size: int, range_bytes: int, streams: int = 1) -> BulkTicket:
    return BulkTicket(ticket=bytes(range(16)), size_bytes=size, range_bytes=range_bytes, stream_count=streams)


def send_ranges(data: bytes, range_bytes: int) -> Callable[[BulkConnection], None]:
    def serve(connection: BulkConnection) -> None:
        while (request := connection.receive_request(SECONDS)) is not None:
            start = request[1] * range_bytes
            connection.send([memoryview(data)[start : start + range_bytes]], lambda _: None)

    return serve


@pytest.mark.parametrize(("range_bytes", "streams"), [(1000, 1), (700, 3), (100, 4)])
def test_ranges_land_where_they_belong(range_bytes: int, streams: int) -> None:
    data = np.random.default_rng(1).bytes(1000)
    buffers = [np.zeros(size, np.uint8) for size in (3, 600, 397)]
    views = [buffer.data for buffer in buffers]
    with port(send_ranges(data, range_bytes)) as opened:
        opened.link.receive(ticket_of(1000, range_bytes, streams), views, lambda: SECONDS)
        assert b"".join(buffer.tobytes() for buffer in buffers) == data
        assert opened.accepted_count <= streams
        opened.link.receive(ticket_of(1000, range_bytes, streams), views, lambda: SECONDS)
        assert opened.accepted_count <= streams  # connections are used again


def test_a_connection_that_was_closed_meanwhile_is_not_used() -> None:
    closing = threading.Event()

    def serve(connection: BulkConnection) -> None:
        if not closing.is_set():
            closing.set()
            return
        send_ranges(bytes(10), 10)(connection)

    with port(serve) as opened:
        assert closing.wait(SECONDS)
        time.sleep(0.1)
        opened.link.receive(ticket_of(10, 10), [np.zeros(10, np.uint8).data], lambda: SECONDS)
        assert opened.accepted_count == 2


@pytest.mark.parametrize("streams", [1, 3])
def test_a_transfer_that_breaks_off_is_said_and_the_port_given_up(streams: int) -> None:
    def serve(connection: BulkConnection) -> None:
        connection.receive_request(SECONDS)
        connection.send([memoryview(bytes(5))], lambda _: None)

    with port(serve) as opened:
        with pytest.raises(UnavailableError, match="bulk connection"):
            opened.link.receive(ticket_of(300, 100, streams), [np.zeros(300, np.uint8).data], lambda: SECONDS)
        assert not opened.link.is_up
        with pytest.raises(UnavailableError, match="send the bytes in frames"):
            opened.link.receive(ticket_of(10, 10), [np.zeros(10, np.uint8).data], lambda: SECONDS)


@pytest.mark.parametrize("greeting", [b"", bytes(16)])
def test_another_program_behind_the_port_is_not_taken_for_it(greeting: bytes) -> None:
    other = Port(lambda connection: time.sleep(0.1), greeting)
    assert not is_up_soon(other.link, 1.5)
    assert other.accepted_count == 1
    other.close()


def test_a_port_that_swallows_what_comes_delays_one_put(
    start_server: StartServer, client_kind: ClientKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that closes connections after the greeting: the call is repeated in frames, and not waited for."""
    monkeypatch.setattr(bulk_server.BulkServer, "_serve", greet_and_leave)
    client = start_server(shared_memory="off").client(client_kind)
    began = time.monotonic()
    round_trips(client)
    assert time.monotonic() - began < SECONDS


def greet_and_leave(server: bulk_server.BulkServer, connection: BulkConnection) -> None:
    connection.greet(server._boot_id)
    with contextlib.suppress(OSError, UnavailableError):
        connection.receive_request(SECONDS)
    server._dismiss(connection)


def test_a_transfer_ends_with_its_deadline() -> None:
    with port(lambda connection: time.sleep(SECONDS)) as opened:
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="aborted"):
            opened.link.receive(
                ticket_of(10, 10), [np.zeros(10, np.uint8).data], lambda: 0.5 - (time.monotonic() - began)
            )
        assert time.monotonic() - began < 10


def test_slices_and_chunks_arrive_however_slowly_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_connection, "_STEP_SECONDS", 0.02)
    monkeypatch.setattr(bulk_connection, "_MOST_SLICES", 8)  # so that there are several messages and calls
    generator = np.random.default_rng(2)
    memory = generator.integers(0, 255, 8 << 20, np.uint8)
    sizes = generator.integers(1, 9000, 1500)
    starts = generator.integers(0, memory.size - 9000, 1500)
    expected = b"".join(memory[at : at + size].tobytes() for at, size in zip(starts, sizes, strict=True))
    for way in ("slices", "chunks"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname())
            right, _ = listener.accept()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
        left = BulkConnection(one)
        steps: list[int] = []

        def send(left: BulkConnection = left, way: str = way, steps: list[int] = steps) -> None:
            if way == "slices":
                left.send_slices(memory.ctypes.data + starts, sizes, steps.append)
            else:
                views = [memory.data[at : at + size] for at, size in zip(starts, sizes, strict=True)]
                left.send(views, steps.append)

        sender = threading.Thread(target=send)
        sender.start()
        got, deadline = bytearray(), time.monotonic() + SECONDS
        while len(got) < len(expected):
            zeros = steps.count(0)
            while len(steps) < 50 and steps.count(0) == zeros and sender.is_alive() and time.monotonic() < deadline:
                time.sleep(0.001)  # until it waits; then it goes on where it was
            got += right.recv(200_000)
        sender.join(SECONDS)
        assert bytes(got) == expected, way
        assert 0 in steps
        assert sum(steps) == len(expected)
        left.close()
        right.close()


def test_puts_in_files_outlive_the_service(start_server: StartServer, moved: list[int], tmp_path: Path) -> None:
    settings = {"shared_memory": "off", "data_dir": str(tmp_path / "data"), "durability": "process"}
    server = start_server(**settings)
    client = server.client("sync")
    for number in range(3):
        meta = client.put(f"p{number}", samples(number))
        assert same(client.get_data(meta), samples(number))
        time.sleep(0.3)
    assert len(moved) >= 4
    client.close()
    server.stop()
    client = start_server(**settings).client("sync")
    for number in range(3):
        meta, _ = client.lookup_samples(f"p{number}")
        assert same(client.get_data(meta), samples(number))
