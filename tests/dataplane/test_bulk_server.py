"""What goes over the bulk port: ranges of an authorized call, each once; and what others reach there: nothing."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from live_server import LiveServer, StartServer
from numpy.typing import NDArray

from tq_service.dataplane.bulk import server as bulk_server
from tq_service.storage.engine import StorageEngine
from tq_service.v1.storage_service_pb2 import BulkTicket, GetRequest, GetResponse, PutRequest
from tq_service.wire.columns import Column, put_header
from tq_service.wire.encoding import encode_columns
from tq_service.wire.metadata import CellRuns

MAX_BYTES = 64 << 20
ROWS = 1 << 14
WIDTH = 64
SIZE = 8 * ROWS * WIDTH
SECONDS = 20.0


class Peer:
    """A client of the bulk port that says what it likes."""

    def __init__(self, server: LiveServer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", bulk(server).port), timeout=SECONDS)
        self.greeting = self.receive(20)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def request(self, ticket: bytes, index: int, magic: bytes = b"TQB1") -> None:
        self.socket.sendall(struct.pack("<4s16sI8x", magic, ticket, index))

    def receive(self, size: int) -> bytes:
        data = bytearray()
        with suppress(ConnectionError):
            while len(data) < size and (part := self.socket.recv(size - len(data))):
                data += part
        return bytes(data)

    @property
    def is_closed(self) -> bool:
        """Whether the service closes the connection without a byte, soon."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


class BulkPut:
    """A put whose bytes are to go over the bulk port, of which the test sends what it likes."""

    def __init__(self, server: LiveServer, columns: list[Column], put_id: bytes = b"") -> None:
        self.columns = columns
        self.put_id = put_id or os.urandom(16)
        header = put_header(self.put_id, columns, partition_id="train", takes_bulk=True)
        self._messages: queue.SimpleQueue[PutRequest | None] = queue.SimpleQueue()
        self._messages.put(PutRequest(header=header))
        self.call = server.storage.Put.future(iter(self._messages.get, None), timeout=SECONDS)
        self.metadata: dict[str, Any] = dict(self.call.initial_metadata())
        self.ticket = BulkTicket.FromString(self.metadata.get("tq-ticket-bin", b""))

    @property
    def ranges(self) -> list[bytes]:
        """The bytes of each range."""
        data = b"".join(chunk for column in self.columns for chunk in column.chunks)
        return [data[at : at + self.ticket.range_bytes] for at in range(0, len(data), self.ticket.range_bytes)]

    def end(self) -> grpc.StatusCode:
        """End the stream and return how the call ended."""
        self._messages.put(None)
        return self.call.code()

    def send_frame(self) -> None:
        self._messages.put(PutRequest(frame=b"x"))

    def cancel(self) -> None:
        self._messages.put(None)
        self.call.cancel()


def bulk(server: LiveServer) -> bulk_server.BulkServer:
    found = server.app.storage.bulk  # type: ignore[union-attr]
    assert found is not None
    return found


def engine(server: LiveServer) -> StorageEngine:
    return server.app.storage.engine  # type: ignore[union-attr]


def numbers(value: int = 0) -> list[Column]:
    return encode_columns({"x": np.full((ROWS, WIDTH), value)})


def counting() -> NDArray[np.int64]:
    return np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)


def runs_of(runs: Sequence[tuple[int, int]]) -> CellRuns:
    """The runs of one put: first row and number of rows."""
    firsts, counts = (np.array(each, np.int64) for each in zip(*runs, strict=True))
    return CellRuns(field_names=("x",), put_indexes=np.zeros_like(firsts), first_rows=firsts, row_counts=counts)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_free(server: LiveServer) -> bool:
    server.settle()
    return engine(server).stat().used_bytes == 0 and not bulk(server)._transfers


def stored(server: LiveServer, put_id: bytes) -> bytes:
    runs = runs_of([(0, ROWS)])
    request = GetRequest(boot_id=engine(server).boot_id, put_ids=[put_id], runs=[runs.to_proto()])
    return b"".join(part.frame for part in server.storage.Get(request, timeout=SECONDS) if part.HasField("frame"))


@pytest.fixture
def server(start_server: StartServer) -> LiveServer:
    return start_server(max_bytes=MAX_BYTES, shared_memory="off", stall_seconds=2.0)


@pytest.fixture(autouse=True)
def two_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server.BulkServer, "_streams_for", lambda *_: 2)


def test_a_range_that_comes_twice_completes_no_put(server: LiveServer) -> None:
    with Peer(server) as peer:
        other = BulkPut(server, numbers(7))  # what it leaves in memory is not to be read with the next one
        for index, data in enumerate(other.ranges):
            peer.request(other.ticket.ticket, index)
            peer.socket.sendall(data)
        assert other.end() is grpc.StatusCode.OK
        release_all(server)
        put = BulkPut(server, numbers(0))
        assert len(put.ranges) == 2
        for _ in range(2):
            peer.request(put.ticket.ticket, 0)
            try_to_send(peer, put.ranges[0])
        assert put.end() is grpc.StatusCode.UNAVAILABLE
        assert peer.is_closed
    wait_for(lambda: is_free(server))


def release_all(server: LiveServer) -> None:
    async def release() -> None:
        engine(server).release_all()

    server.loop.run(release())


def try_to_send(peer: Peer, data: bytes) -> None:
    try:
        peer.socket.sendall(data)
    except ConnectionError:
        return


@pytest.mark.parametrize("place", ["memory", "files"])
def test_text_is_checked_when_all_of_it_is_there(start_server: StartServer, tmp_path: Path, place: str) -> None:
    server = start_server(
        max_bytes=MAX_BYTES, shared_memory="off", **({"data_dir": str(tmp_path)} if place == "files" else {})
    )
    for last in (b"\xc3\xa4", b"a\xc3"):
        columns = encode_columns({"before": np.zeros((4, 1 << 18)), "x": ["\u00e4" * 500_000] * 4})
        numbers, text = sorted(columns, key=lambda column: column.spec.name)
        ending = memoryview(bytes(text.chunks[-1])[:-2] + last)
        put = BulkPut(server, [numbers, replace(text, chunks=(*text.chunks[:-1], ending))])
        with Peer(server) as peer:
            for index, data in enumerate(put.ranges):
                peer.request(put.ticket.ticket, index)
                peer.socket.sendall(data)
            if last == b"a\xc3":
                assert put.end() is grpc.StatusCode.INVALID_ARGUMENT
                assert "row 3 of field 'x' has invalid UTF-8 at byte 999999" in put.call.details()
            else:
                assert put.end() is grpc.StatusCode.OK
    wait_for(lambda: not bulk(server)._transfers)


def test_the_service_says_which_it_is(server: LiveServer) -> None:
    with Peer(server) as peer:
        assert peer.greeting == b"TQB1" + engine(server).boot_id


def test_ranges_come_in_any_order_over_any_connection(server: LiveServer) -> None:
    put = BulkPut(server, encode_columns({"x": counting()}))
    with Peer(server) as one, Peer(server) as two:
        two.request(put.ticket.ticket, 1)
        two.socket.sendall(put.ranges[1])
        one.request(put.ticket.ticket, 0)
        one.socket.sendall(put.ranges[0])
        assert put.end() is grpc.StatusCode.OK
    assert stored(server, put.put_id) == counting().tobytes()
    wait_for(lambda: not bulk(server)._transfers)


@pytest.mark.parametrize("index", [2, 1 << 31])
def test_a_range_that_there_is_not_ends_the_put(server: LiveServer, index: int) -> None:
    put = BulkPut(server, numbers())
    with Peer(server) as peer:
        peer.request(put.ticket.ticket, index)
        assert peer.is_closed
    assert put.end() is grpc.StatusCode.UNAVAILABLE
    wait_for(lambda: is_free(server))


def test_more_than_a_range_is_no_range(server: LiveServer) -> None:
    put = BulkPut(server, numbers(3))
    with Peer(server) as peer:
        for index, data in enumerate(put.ranges):
            peer.request(put.ticket.ticket, index)
            peer.socket.sendall(data)
        peer.socket.sendall(b"x" * 64)
        assert peer.is_closed
    assert put.end() is grpc.StatusCode.OK
    assert stored(server, put.put_id) == b"".join(put.ranges)


def test_a_frame_beside_a_ticket_is_refused(server: LiveServer) -> None:
    put = BulkPut(server, numbers())
    with Peer(server) as peer:
        for index, data in enumerate(put.ranges):
            peer.request(put.ticket.ticket, index)
            peer.socket.sendall(data)
        put.send_frame()
        assert put.end() is grpc.StatusCode.INVALID_ARGUMENT
    wait_for(lambda: is_free(server))


@pytest.mark.parametrize("case", ["no ticket", "garbage", "half a request", "old ticket"])
def test_who_has_no_ticket_gets_nothing(server: LiveServer, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(bulk_server, "_FIRST_REQUEST_SECONDS", 0.3)
    with Peer(server) as peer:
        if case == "no ticket":
            peer.request(os.urandom(16), 0)
        elif case == "garbage":
            peer.request(os.urandom(16), 0, b"GET ")
        elif case == "half a request":
            peer.socket.sendall(b"TQB1")
        else:
            put = BulkPut(server, numbers())
            put.cancel()
            wait_for(lambda: is_free(server))
            peer.request(put.ticket.ticket, 0)
        assert peer.is_closed
    wait_for(lambda: not bulk(server)._unproven and not bulk(server)._proven)


def test_a_ticket_is_good_for_one_direction(server: LiveServer) -> None:
    put = BulkPut(server, numbers())
    with Peer(server) as peer:
        peer.request(put.ticket.ticket, 0)
        peer.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):  # the service waits for bytes, and sends none
            peer.socket.recv(1)
        put.cancel()
    wait_for(lambda: is_free(server))


@pytest.mark.parametrize("sent", ["nothing", "a request", "a little", "too slowly"])
def test_a_put_that_does_not_come_is_given_up(server: LiveServer, sent: str) -> None:
    put = BulkPut(server, numbers())
    with Peer(server) as peer:
        if sent != "nothing":
            peer.request(put.ticket.ticket, 0)
        if sent == "a little":
            peer.socket.sendall(bytes(1000))
        began = time.monotonic()
        while sent == "too slowly" and not put.call.done():
            try_to_send(peer, bytes(100))
            time.sleep(0.05)
        assert put.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "stall_seconds" in put.call.details()
        assert time.monotonic() - began < SECONDS / 2
        put.end()
        wait_for(lambda: is_free(server))
        assert sent == "nothing" or peer.is_closed


def test_a_put_that_comes_slowly_but_surely_is_taken(server: LiveServer) -> None:
    put = BulkPut(server, numbers(5))
    with Peer(server) as peer:
        for index, data in enumerate(put.ranges):
            peer.request(put.ticket.ticket, index)
            for at in range(0, len(data), SIZE // 8):  # half a second each: longer than stall_seconds in all
                peer.socket.sendall(data[at : at + SIZE // 8])
                time.sleep(0.4)
    assert put.end() is grpc.StatusCode.OK


def test_a_client_that_is_lost_gives_its_bytes_back(server: LiveServer) -> None:
    put = BulkPut(server, numbers())
    with Peer(server) as peer:
        peer.request(put.ticket.ticket, 0)
        peer.socket.sendall(put.ranges[0][:1000])
    assert put.call.code() is grpc.StatusCode.UNAVAILABLE
    put.end()
    wait_for(lambda: is_free(server))


def test_another_attempt_takes_over(server: LiveServer) -> None:
    with Peer(server) as late, Peer(server) as peer:
        first = BulkPut(server, numbers(1))
        late.request(first.ticket.ticket, 0)
        late.socket.sendall(first.ranges[0][:1000])
        second = BulkPut(server, numbers(2), first.put_id)
        assert first.call.code() is grpc.StatusCode.CANCELLED
        assert late.is_closed  # it writes no more into memory of the first one
        for index, data in enumerate(second.ranges):
            peer.request(second.ticket.ticket, index)
            peer.socket.sendall(data)
        assert second.end() is grpc.StatusCode.OK
        first.end()
    assert stored(server, first.put_id) == b"".join(second.ranges)
    wait_for(lambda: not bulk(server)._transfers)


def test_memory_is_kept_until_the_last_thread_has_left_it(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    leaving: queue.SimpleQueue[None] = queue.SimpleQueue()
    real = bulk_server.Transfer._leave

    def leave(*arguments: Any) -> None:
        leaving.get()
        real(*arguments)

    monkeypatch.setattr(bulk_server.Transfer, "_leave", leave)
    put = BulkPut(server, numbers())
    with Peer(server) as peer:
        peer.request(put.ticket.ticket, 0)
        wait_for(lambda: any(transfer._inside for transfer in bulk(server)._transfers.values()))
        put.cancel()
        wait_for(
            lambda: not bulk(server)._transfers or all(each._is_closed for each in bulk(server)._transfers.values())
        )
        server.settle()
        assert engine(server).stat().used_bytes >= SIZE
        leaving.put(None)
        wait_for(lambda: is_free(server))


class BulkGet:
    """A get whose bytes are to come over the bulk port."""

    def __init__(self, server: LiveServer, put_id: bytes, runs: Sequence[tuple[int, int]]) -> None:
        request = GetRequest(
            boot_id=engine(server).boot_id, put_ids=[put_id], runs=[runs_of(runs).to_proto()], takes_bulk=True
        )
        self.call = server.storage.Get(request, timeout=SECONDS)
        first: GetResponse = next(self.call)
        self.ticket = first.header.bulk

    @property
    def range_sizes(self) -> Iterator[int]:
        size = self.ticket.range_bytes
        return (min(size, self.ticket.size_bytes - at) for at in range(0, self.ticket.size_bytes, size))


def put_numbers(server: LiveServer) -> bytes:
    put = BulkPut(server, encode_columns({"x": counting()}))
    with Peer(server) as peer:
        for index, data in enumerate(put.ranges):
            peer.request(put.ticket.ticket, index)
            peer.socket.sendall(data)
        assert put.end() is grpc.StatusCode.OK
    return put.put_id


@pytest.mark.parametrize("order", ["in order", "scattered"])
def test_a_get_is_read_to_its_end(server: LiveServer, order: str) -> None:
    rows = np.arange(ROWS) if order == "in order" else np.random.default_rng(3).permutation(ROWS)
    get = BulkGet(server, put_numbers(server), [(row, 1) for row in rows.tolist()])
    with Peer(server) as peer:
        data = b""
        for index, size in enumerate(get.range_sizes):
            peer.request(get.ticket.ticket, index)
            data += peer.receive(size)
        assert next(get.call, None) is None
        assert get.call.code() is grpc.StatusCode.OK
        peer.request(get.ticket.ticket, 0)
        assert peer.is_closed
    assert np.array_equal(np.frombuffer(data, np.int64).reshape(ROWS, WIDTH), counting()[rows])


def test_what_is_read_stays_when_it_is_cleared(server: LiveServer) -> None:
    put_id = put_numbers(server)
    get = BulkGet(server, put_id, [(0, ROWS)])
    with Peer(server) as peer:
        peer.request(get.ticket.ticket, 0)
        data = peer.receive(1000)
        release_all(server)
        other = put_numbers(server)
        assert other != put_id
        sizes = list(get.range_sizes)
        data += peer.receive(sizes[0] - 1000)
        peer.request(get.ticket.ticket, 1)
        data += peer.receive(sizes[1])
    assert data == counting().tobytes()
    assert next(get.call, None) is None


@pytest.mark.parametrize("taken", ["nothing", "a little"])
def test_a_get_that_is_not_taken_is_given_up(server: LiveServer, taken: str) -> None:
    get = BulkGet(server, put_numbers(server), [(0, ROWS)] * 6)
    with Peer(server) as peer:
        if taken == "a little":
            peer.request(get.ticket.ticket, 0)
            peer.receive(1000)
        with pytest.raises(grpc.RpcError, match="stall_seconds"):
            next(get.call)
    wait_for(lambda: not bulk(server)._transfers)


def test_a_client_that_is_lost_ends_its_get(server: LiveServer) -> None:
    get = BulkGet(server, put_numbers(server), [(0, ROWS)] * 6)
    with Peer(server) as peer:
        peer.request(get.ticket.ticket, 0)
        peer.receive(1000)
    with pytest.raises(grpc.RpcError) as caught:
        next(get.call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    wait_for(lambda: not bulk(server)._transfers)


def test_connections_without_a_ticket_make_way(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server, "_MOST_UNPROVEN", 3)
    put = BulkPut(server, numbers(4))
    with Peer(server) as good:
        good.request(put.ticket.ticket, 0)
        good.socket.sendall(put.ranges[0])
        wait_for(lambda: len(bulk(server)._proven) == 1)
        idle = [Peer(server) for _ in range(5)]
        assert [peer.is_closed for peer in idle[:2]] == [True, True]
        assert len(bulk(server)._unproven) == 3
        good.request(put.ticket.ticket, 1)
        good.socket.sendall(put.ranges[1])
        assert put.end() is grpc.StatusCode.OK
    for peer in idle:
        peer.socket.close()


def test_a_full_port_refuses_others(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server, "_MOST_CONNECTIONS", 1)
    put = BulkPut(server, numbers(4))
    with Peer(server) as good:
        good.request(put.ticket.ticket, 0)
        wait_for(lambda: len(bulk(server)._proven) == 1)
        with Peer(server) as refused:
            assert refused.is_closed
        good.socket.sendall(put.ranges[0])
        good.request(put.ticket.ticket, 1)
        good.socket.sendall(put.ranges[1])
        assert put.end() is grpc.StatusCode.OK


def test_too_many_transfers_go_in_frames(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server, "_MOST_TRANSFERS", 1)
    first = BulkPut(server, numbers(1))
    second = BulkPut(server, numbers(2))
    assert (first.metadata["tq-send-as"], second.metadata["tq-send-as"]) == ("bulk", "frames")
    first.cancel()
    second.cancel()
    wait_for(lambda: is_free(server))


def test_the_service_ends_with_a_transfer_under_way(start_server: StartServer) -> None:
    server = start_server(max_bytes=MAX_BYTES, shared_memory="off", grace_seconds=0.2)
    put = BulkPut(server, numbers())
    with Peer(server) as peer, Peer(server) as idle:
        peer.request(put.ticket.ticket, 0)
        peer.socket.sendall(bytes(1000))
        server.stop()
        assert peer.is_closed
        assert idle.is_closed
    assert put.end() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}


def test_streams_follow_the_load_and_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    clock = itertools.count()
    monkeypatch.setattr(bulk_server.time, "monotonic", lambda: next(clock) * 1e-6)
    port = bulk_server.BulkServer("127.0.0.1", 0, bytes(16))
    try:
        port._cores = 16
        assert [port._streams_for(size << 20) for size in (2, 4, 8, 16, 64, 4096)] == [1, 1, 2, 4, 4, 4]
        port._transfers.update({bytes([number]): None for number in range(7)})  # type: ignore[dict-item]
        assert port._streams_for(64 << 20) == 2
        port._transfers.clear()
        assert port._streams_for(64 << 20) == 2  # of late there were eight
        clock = itertools.count(10**7)
        assert port._streams_for(64 << 20) == 4
    finally:
        port.close()
