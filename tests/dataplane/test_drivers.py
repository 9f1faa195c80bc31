"""What every driver does alike: a new place for bytes is another entry of DRIVERS here, and passes all of this."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer, StartServer

from tq_service.client.transport import Deadline
from tq_service.dataplane.bulk.client import BulkLink
from tq_service.dataplane.receiving import Received
from tq_service.errors import (
    DataLossError,
    InvalidArgumentError,
    PutNotFoundError,
    QuotaExceededError,
)
from tq_service.server.storage_servicer import EngineDriver
from tq_service.storage.engine import StorageEngine
from tq_service.v1.storage_service_pb2 import GetRequest, StatRequest
from tq_service.wire.columns import Column, put_header
from tq_service.wire.encoding import encode_columns
from tq_service.wire.metadata import CellRuns

MAX_BYTES = 64 << 20
SECONDS = 20.0


class Driven:
    """A driver, called from a test.

    Args:
        driver: what is tested.
        call: calls a method of it, and waits for it.
        boot_id: of the place that it leads to.
        held: returns how many puts are there, and of how many bytes.
        has_quota: whether the place has no capacity for more than `MAX_BYTES`.
    """

    def __init__(
        self,
        driver: Any,
        call: Callable[..., Any],
        boot_id: bytes,
        held: Callable[[], tuple[int, int]],
        *,
        has_quota: bool = True,
    ) -> None:
        self._driver = driver
        self._call = call
        self._boot_id = boot_id
        self.held = held
        self.has_quota = has_quota

    def put(self, columns: Sequence[Column], put_id: bytes = b"", *, size_bytes: int | None = None) -> bytes:
        put_id = put_id or os.urandom(16)
        header = put_header(put_id, columns, partition_id="train")
        if size_bytes is not None:
            header.size_bytes = size_bytes
        self._call(self._driver.put, header, columns, Deadline.after(SECONDS))
        return put_id

    def get(
        self, put_ids: Sequence[bytes], runs: CellRuns, *, boot_id: bytes = b"", size_bytes: int | None = None
    ) -> list[Received]:
        request = GetRequest(boot_id=boot_id or self._boot_id, put_ids=put_ids, runs=[runs.to_proto()])
        row_count = runs.row_count
        got: list[Received] = self._call(self._driver.get, request, row_count, Deadline.after(SECONDS), size_bytes)
        return got


def of_engine(server: LiveServer, driver: Any, call: Callable[..., Any]) -> Driven:
    engine: StorageEngine = server.app.storage.engine  # type: ignore[union-attr]

    def held() -> tuple[int, int]:
        server.settle()
        stat = engine.stat()
        return stat.put_count, stat.used_bytes

    return Driven(driver, call, engine.boot_id, held)


def find_bulk_port(link: BulkLink, server: LiveServer) -> None:
    """Wait for what clients do beside their first calls."""
    link.probe(server.storage.Stat(StatRequest()))
    deadline = time.monotonic() + SECONDS
    while not link.is_up:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def on_loop(server: LiveServer) -> Callable[..., Any]:
    return lambda method, *given: server.loop.run(method(*given))


def over_grpc(server: LiveServer, kind: Any) -> Driven:
    calls = server.client(kind).real._calls

    async def made() -> Any:
        return calls.endpoint(server.address).driver  # a channel of asyncio belongs to a loop

    driver = calls.endpoint(server.address).driver if kind == "sync" else server.loop.run(made())
    if server.app.storage.bulk is not None:  # type: ignore[union-attr]
        find_bulk_port(driver._bulk, server)
    return of_engine(server, driver, on_loop(server) if kind == "async" else lambda method, *given: method(*given))


def in_process(server: LiveServer) -> Driven:
    driver = EngineDriver(server.app.storage.engine)  # type: ignore[union-attr]
    return of_engine(server, driver, on_loop(server))


DRIVERS: dict[str, Callable[[LiveServer], Driven]] = {
    "grpc of asyncio": lambda server: over_grpc(server, "async"),
    "grpc of threads": lambda server: over_grpc(server, "sync"),
    "local": in_process,
}


@pytest.fixture(params=["shared memory", "bulk", "frames"])
def server(request: pytest.FixtureRequest, start_server: StartServer) -> LiveServer:
    return start_server(
        max_bytes=MAX_BYTES,
        shared_memory="auto" if request.param == "shared memory" else "off",
        bulk="on" if request.param == "bulk" else "off",
    )


@pytest.fixture(params=DRIVERS)
def driven(request: pytest.FixtureRequest, server: LiveServer) -> Driven:
    return DRIVERS[request.param](server)


def rows(fields: Sequence[str], *triples: tuple[int, int, int]) -> CellRuns:
    """The runs of (put, first row, number of rows)."""
    puts, firsts, counts = (np.array(each, np.int64) for each in zip(*triples, strict=True))
    return CellRuns(field_names=tuple(fields), put_indexes=puts, first_rows=firsts, row_counts=counts)


def values_of(columns: Sequence[Column]) -> list[bytes]:
    return [b"".join(column.chunks) for column in columns]


def columns_of(row_bytes: int) -> list[Column]:
    """Four rows in every layout, of about so many bytes each."""
    generator = np.random.default_rng(7)
    floats = max(row_bytes // 4, 1)
    return encode_columns(
        {
            "dense": generator.integers(0, 1 << 32, (4, floats), np.uint32).view(np.float32),
            "jagged": [generator.integers(0, 99, size) for size in (floats // 2, 0, 1, floats // 4)],
            "object": ["a", {"b": [1, None]}, generator.bytes(row_bytes), 2**70],
        }
    )


# One message, a stream of one frame, a stream of several or shared memory.
@pytest.mark.parametrize("row_bytes", [8, 100_000, 900_000])
def test_what_was_put_comes_back_bit_for_bit(driven: Driven, row_bytes: int) -> None:
    columns = columns_of(row_bytes)
    put_id = driven.put(columns)
    names = [column.spec.name for column in columns]
    for _ in range(2):  # the second time it is known how large the answer is
        got = driven.get([put_id], rows(names, (0, 0, 4)))
        assert [shape.spec for shape, _ in got] == [column.spec for column in columns]
        assert [values.tobytes() for _, values in got] == values_of(columns)
        for (shape, _), column in zip(got, columns, strict=True):
            assert (shape.extents is None) == (column.extents is None)
            assert shape.extents is None or np.array_equal(shape.extents, column.extents)


@pytest.mark.parametrize("row_count", [16, 1 << 17])
def test_rows_of_several_puts_come_in_the_order_asked_for(driven: Driven, row_count: int) -> None:
    puts = [driven.put(encode_columns({"x": np.arange(row_count) + first})) for first in (0, row_count)]
    half = row_count // 2
    runs = rows(["x"], (1, half, half), (0, 0, 3), (1, 0, half))
    ((shape, values),) = driven.get(puts, runs, size_bytes=8 * (row_count + 3))
    expected = np.concatenate([np.arange(half) + row_count + half, np.arange(3), np.arange(half) + row_count])
    assert shape.row_count == row_count + 3
    assert np.array_equal(values.view(np.int64), expected)


@pytest.mark.parametrize("row_count", [16, 1 << 17, 1 << 19])
def test_what_is_got_is_the_callers_own(driven: Driven, row_count: int) -> None:
    put_id = driven.put(encode_columns({"x": np.arange(row_count)}))
    for _ in range(2):
        ((_, values),) = driven.get([put_id], rows(["x"], (0, 0, row_count)))
        assert np.array_equal(values.view(np.int64), np.arange(row_count))
        values[:] = 7


@pytest.mark.parametrize("row_count", [16, 1 << 17])
def test_a_put_that_is_sent_again_is_stored_once(driven: Driven, row_count: int) -> None:
    columns = encode_columns({"x": np.arange(row_count)})
    put_id = driven.put(columns)
    held = driven.held()
    assert held[0] == 1
    assert driven.put(columns, put_id) == put_id
    assert driven.held() == held


def test_a_put_larger_than_the_quota_is_refused(driven: Driven) -> None:
    if not driven.has_quota:
        pytest.skip("this place has no quota")
    with pytest.raises(QuotaExceededError, match="exceeds the limit"):
        driven.put(encode_columns({"x": np.zeros(MAX_BYTES // 8)}))
    assert driven.held() == (0, 0)


@pytest.mark.parametrize("row_count", [16, 1 << 16])
@pytest.mark.parametrize("more", [-8, 8])
def test_bytes_that_are_not_those_of_the_header_leave_nothing(driven: Driven, row_count: int, more: int) -> None:
    (column,) = encode_columns({"x": np.arange(row_count)})
    data = memoryview(bytes(column.value_bytes + more))
    wrong = Column(
        spec=column.spec,
        row_count=column.row_count,
        extents=column.extents,
        value_bytes=column.value_bytes,
        chunks=(data,),
    )
    with pytest.raises(InvalidArgumentError):
        driven.put([wrong])
    assert driven.held() == (0, 0)


def test_cells_that_are_not_there(driven: Driven) -> None:
    put_id = driven.put(encode_columns({"x": np.arange(4)}))
    with pytest.raises(PutNotFoundError):
        driven.get([os.urandom(16)], rows(["x"], (0, 0, 1)))
    with pytest.raises(InvalidArgumentError):
        driven.get([put_id], rows(["x"], (0, 3, 2)))
    with pytest.raises(DataLossError, match="has restarted"):
        driven.get([put_id], rows(["x"], (0, 0, 1)), boot_id=os.urandom(16))


def test_what_one_driver_of_an_engine_puts_all_others_get(server: LiveServer) -> None:
    columns = columns_of(900_000)
    names = [column.spec.name for column in columns]
    driven = [DRIVERS[name](server) for name in ("grpc of asyncio", "grpc of threads", "local")]  # of one engine
    for put_id in [each.put(columns) for each in driven]:
        for each in driven:
            assert [values.tobytes() for _, values in each.get([put_id], rows(names, (0, 0, 4)))] == values_of(columns)
