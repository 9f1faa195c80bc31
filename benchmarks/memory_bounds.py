"""Does the service stay within its quota under any load: floods without a token, oversized frames, many connections?

Each case has a separate service with a quota of 64 MiB and tokens. Memory beyond the quota is bounded too: 64 MiB at
the peak, and 32 MiB ten seconds later, when only stored data should be left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil

import tq_service as tq
from benchmarks.harness import Options, main
from benchmarks.report import Aim, Cell, Report
from tq_service.schema import FieldSpec, Layout
from tq_service.server.credential_files import append_token, digest_of, make_token, new_secret
from tq_service.testing import COMMAND, ListeningProcess
from tq_service.v1.storage_service_pb2 import BulkTicket, PutHeader, StatRequest, StatResponse
from tq_service.v1.storage_service_pb2_grpc import StorageServiceStub
from tq_service.wire.columns import Column, encode_header, encode_part, put_header

_MIB = 2**20
_QUOTA_MIB = 64
_PEAK_MIB = 64
_LATER_MIB = 32
_LATER_SECONDS = 10.0
_LOOK_SECONDS = 0.005
_CALL_SECONDS = 60.0
_PUT_SECONDS = 15.0  # most puts that do not fit wait for this time
_OPEN = ("Check", "List", "Watch")
_OWN_CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))


@dataclass(frozen=True, slots=True)
class _Service:
    """A service under test: its address, its process, and a token with all permissions."""

    address: str
    process: psutil.Process
    token: str

    def resident(self) -> float:
        return float(self.process.memory_info().rss / _MIB)

    def channels(self, count: int) -> list[grpc.Channel]:
        return [grpc.insecure_channel(self.address, options=_OWN_CHANNEL) for _ in range(count)]

    def client(self, timeout: float = _CALL_SECONDS) -> tq.Client:
        return tq.Client(self.address, token=self.token, insecure=True, timeout=timeout)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)

    def stat(self) -> StatResponse:
        with grpc.insecure_channel(self.address, options=_OWN_CHANNEL) as channel:
            return StorageServiceStub(channel).Stat(StatRequest(), metadata=self.metadata, timeout=_CALL_SECONDS)

    def stored(self) -> float:
        """Return the MiB stored in the service."""
        return float(self.stat().used_bytes / _MIB)

    def bulk_connections(self, count: int) -> list[socket.socket]:
        """Open connections to the bulk port, up to the number that it accepts."""
        target = "127.0.0.1", int(self.stat().bulk_address.rpartition(":")[2])
        opened = []
        with contextlib.suppress(OSError):
            opened.extend(socket.create_connection(target, timeout=_CALL_SECONDS) for _ in range(count))
        return opened


Load = Callable[[_Service], None]


@contextlib.contextmanager
def _service() -> Iterator[_Service]:
    with tempfile.TemporaryDirectory() as directory:
        secret, tokens = new_secret(), Path(directory, "tokens.toml")
        append_token(tokens, make_token(name="all", sha256=digest_of(secret), roles=["admin"], prefixes=[""]))
        command = (
            *COMMAND, "serve", "--port", "0", "--max-bytes", f"{_QUOTA_MIB}MiB", "--shared-memory", "off",
            "--log-level", "error", "--auth-tokens-file", str(tokens),
        )  # fmt: skip
        with ListeningProcess(command, log=Path(directory, "log")) as process:
            yield _Service(process.address, psutil.Process(process.pid), secret)


def _at_once(count: int, call: Callable[[int], object]) -> None:
    """Make calls at the same time; their results do not matter here."""

    def one(number: int) -> None:
        with contextlib.suppress(grpc.RpcError, tq.TqError):
            call(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))


def _open_flood(method: str, count: int, size_mib: float) -> Load:
    """Return a load of calls of a method without a token, each with one message of a size."""

    def load(service: _Service) -> None:
        channels, message = service.channels(8), bytes(int(size_mib * _MIB))

        def call(number: int) -> None:
            ask = channels[number % len(channels)].unary_unary(method)
            ask(message, timeout=_CALL_SECONDS)

        _at_once(count, call)
        for channel in channels:
            channel.close()

    return load


def _oversized_frames(count: int, size_mib: float) -> Load:
    """Return a load of puts of 1,024 bytes, each with one frame that is far larger."""
    shape = Column(
        spec=FieldSpec("x", "uint8", Layout.DENSE, (1024,)), row_count=1, extents=None, value_bytes=1024, chunks=()
    )

    def load(service: _Service) -> None:
        channels, frame = service.channels(8), encode_part([memoryview(bytes(int(size_mib * _MIB)))])

        def call(number: int) -> None:
            header = PutHeader(put_id=os.urandom(16), partition_id="p", row_count=1, size_bytes=1024)
            header.columns.append(encode_header(shape))
            put = channels[number % len(channels)].stream_unary("/tq_service.v1.StorageService/Put")
            put(iter((encode_part(header), frame)), metadata=service.metadata, timeout=_CALL_SECONDS)

        _at_once(count, call)
        for channel in channels:
            channel.close()

    return load


def _large_requests(service: _Service) -> None:
    """Make 64 inserts at the same time, each with an empty message of 3 MiB."""
    channels, message = service.channels(8), bytes(3 * _MIB)

    def call(number: int) -> None:
        insert = channels[number % len(channels)].unary_unary("/tq_service.v1.ControllerService/Insert")
        insert(message, metadata=service.metadata, timeout=_CALL_SECONDS)

    _at_once(64, call)
    for channel in channels:
        channel.close()


def _connections(count: int) -> Load:
    def load(service: _Service) -> None:
        channels = service.channels(count)
        _at_once(64, lambda number: [_check(channel) for channel in channels[number::64]])
        for channel in channels:
            channel.close()

    return load


def _bulk_strangers(count: int) -> Load:
    """Return a load of connections to the bulk port without a ticket, each sending 1 MiB."""

    def load(service: _Service) -> None:
        def send(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                connection.sendall(b"TQB1" + os.urandom(16) + bytes(12))
                connection.sendall(bytes(_MIB))

        with ThreadPoolExecutor(64) as pool:
            list(pool.map(send, service.bulk_connections(count)))

    return load


def _bulk_idlers(count: int) -> Load:
    """Return a load of idle connections to the bulk port."""

    def load(service: _Service) -> None:
        for connection in service.bulk_connections(count):
            with contextlib.suppress(OSError), connection:
                while connection.recv(64):
                    pass

    return load


def _bulk_stallers(count: int) -> Load:
    """Return a load of puts of 2 MiB with a ticket: one byte less than declared is sent, and later far more."""
    shape = Column(
        spec=FieldSpec("x", "uint8", Layout.DENSE, (2 * _MIB,)),
        row_count=1,
        extents=None,
        value_bytes=2 * _MIB,
        chunks=(),
    )

    def load(service: _Service) -> None:
        (channel,) = service.channels(1)

        def call(number: int) -> None:
            header = put_header(os.urandom(16), [shape], partition_id=f"p{number}", takes_bulk=True)
            ask = channel.stream_unary("/tq_service.v1.StorageService/Put")
            put = ask.future(iter((encode_part(header),)), metadata=service.metadata, timeout=_PUT_SECONDS)
            ticket = BulkTicket.FromString(dict(put.initial_metadata())["tq-ticket-bin"])
            (connection,) = service.bulk_connections(1)
            with contextlib.suppress(OSError), connection:
                request = b"TQB1" + ticket.ticket + bytes(12)
                connection.sendall(request + bytes(2 * _MIB - 1))
                if number % 2:
                    connection.sendall(bytes(4 * _MIB))
                put.result()

        _at_once(count, call)
        channel.close()

    return load


def _check(channel: grpc.Channel) -> None:
    channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=_CALL_SECONDS)


def _puts(count: int, size_bytes: int) -> Load:
    """Return a load of concurrent puts by separate clients."""

    def load(service: _Service) -> None:
        data = {"x": np.ones((4, size_bytes // 4), np.uint8)}
        clients = [service.client(_PUT_SECONDS) for _ in range(count)]
        _at_once(count, lambda number: clients[number].put(f"p{number}", data))
        for client in clients:
            client.close()

    return load


def _cleared(count: int) -> Load:
    """Return a load of partitions with 64 keyed samples, consumed and cleared one after another."""

    def load(service: _Service) -> None:
        with service.client() as client:
            for number in range(count):
                partition_id = f"step_{number}"
                client.put(partition_id, {"x": np.zeros(64)}, keys=[f"k{row}" for row in range(64)])
                client.get_meta(partition_id=partition_id, task_name="t", data_fields=["x"], batch_size=64)
                client.clear_partition(partition_id)

    return load


def _cases(*, quick: bool) -> dict[str, Load]:
    count = 4 if quick else 64
    cases: dict[str, Load] = {}
    for method in _OPEN:
        name = f"/grpc.health.v1.Health/{method}"
        cases[f"{count} {method} of 64 MiB, no token"] = _open_flood(name, max(4, count // 4), 64)
        cases[f"{count} {method} of 3 MiB, no token"] = _open_flood(name, count, 3)
        cases[f"{10 * count} {method} of 60 KiB, no token"] = _open_flood(name, 10 * count, 60 / 1024)
    cases[f"{count // 4} Insert of 64 MiB, no token"] = _open_flood(
        "/tq_service.v1.ControllerService/Insert", max(4, count // 4), 64
    )
    return cases | {
        f"{count // 4} puts with a frame of 64 MiB": _oversized_frames(max(4, count // 4), 64),
        f"{count} puts with a frame of 3.9 MiB": _oversized_frames(count, 3.9),
        "64 inserts of 3 MiB": _large_requests,
        f"{8 * count} connections": _connections(8 * count),
        f"{16 * count} bulk connections of strangers": _bulk_strangers(16 * count),
        f"{4 * count} bulk connections that say nothing": _bulk_idlers(4 * count),
        f"{count // 4} bulk transfers too short or too long": _bulk_stallers(count // 4),
        f"{25 * count // 8} puts of 256 KiB at once": _puts(25 * count // 8, 272 * 1024),
        f"{25 * count // 8} puts of 4 MiB at once": _puts(25 * count // 8, 4 * _MIB),
        f"{10_000 if not quick else 20} partitions cleared": _cleared(10_000 if not quick else 20),
    }


def _measured(load: Load) -> tuple[float, float, float, float]:
    """Return the resident MiB of an idle service, at the peak of a load and some seconds later, and its stored MiB."""
    with _service() as service:
        with service.client() as client:
            client.put("first", {"x": np.zeros(1)})  # memory for the very first put is not growth
            client.clear_partition("first")
        idle = peak = service.resident()
        is_over = threading.Event()

        def look() -> None:
            nonlocal peak
            while not is_over.wait(_LOOK_SECONDS):
                peak = max(peak, service.resident())

        looking = threading.Thread(target=look)
        looking.start()
        load(service)
        is_over.set()
        looking.join()
        time.sleep(_LATER_SECONDS)
        return idle, peak, service.resident(), service.stored()


def run(options: Options) -> Report:
    """Measure."""
    rows: list[list[Cell]] = []
    beside_peak = beside_later = 0.0
    for name, load in _cases(quick=options.quick).items():
        idle, peak, later, stored = _measured(load)
        rows.append([name, idle, peak, later, stored, peak - idle, later - idle - stored])
        beside_peak = max(beside_peak, peak - idle - _QUOTA_MIB)
        beside_later = max(beside_later, later - idle - stored)
    return Report(
        name="memory_bounds",
        question="Does the service stay within its quota under any load?",
        columns=["load", "idle MiB", "peak MiB", "after 10 s MiB", "stored MiB", "peak above idle",
                 "left beside stored"],
        rows=rows,
        notes=[f"resident memory; each load has a separate service; quota {_QUOTA_MIB} MiB, tokens on"],
        aims=[
            Aim(what="MiB beside idle and quota at the peak", measured=beside_peak, wanted=_PEAK_MIB, at_least=False),
            Aim(what="MiB beside idle and stored 10 s later", measured=beside_later, wanted=_LATER_MIB, at_least=False),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(run))
