"""The reserve of a full store is for columns of existing samples, whatever a client says of its put."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from fault_seconds import FAULT_SECONDS
from live_server import LiveServer, StartServer
from rpc_samples import new_id

import tq_service as tq
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.wire.columns import encode_header, put_header
from tq_service.wire.encoding import encode_columns

QUOTA = 40_000_000  # of which new samples may use 36,000,000
SMALL, STREAMED, SHARED = 100_000, 600_000, 2_000_000
Service = tuple[LiveServer, LiveServer]


@pytest.fixture(params=["embedded", "split"])
def service(request: pytest.FixtureRequest, start_server: StartServer) -> Service:
    """Return the server that clients call, and the one that holds the bytes."""
    if request.param == "embedded":
        server = start_server(max_bytes=QUOTA)
        return server, server
    controller = start_server(role="controller")
    return controller, start_server(role="storage", controller=controller.address, max_bytes=QUOTA)


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes clients say of every put that it is for existing rows."""

    def lying(*given: Any, **more: Any) -> storage_pb.PutHeader:
        return put_header(*given, **more | {"for_existing_rows": True})

    def lie() -> None:
        monkeypatch.setattr("tq_service.client.gathering.put_header", lying)

    return lie


def fill(client: tq.Client) -> tq.BatchMeta:
    return client.put("train", {"x": np.zeros(35_950_000, np.uint8)[:, None].reshape(10, -1)})


@pytest.mark.parametrize("size", [SMALL, STREAMED, SHARED])
def test_new_samples_never_take_the_reserve(service: Service, liar: Callable[[], None], size: int) -> None:
    server, storage = service
    client = tq.Client(server.address, timeout=30)
    meta = fill(client)
    before = storage.storage.Stat(storage_pb.StatRequest())
    liar()
    with pytest.raises(tq.errors.QuotaExceededError):
        client.put("train", {"x": np.zeros((10, size // 10), np.uint8)}, timeout=FAULT_SECONDS)
    assert client.describe_partition("train").live_count == 10
    deadline = time.monotonic() + 60
    while (stat := storage.storage.Stat(storage_pb.StatRequest())).used_bytes > before.used_bytes:
        assert time.monotonic() < deadline, stat
        time.sleep(0.02)
    # Columns of existing samples do, so that a full store can be drained.
    client.put(meta, {"y": np.ones((10, size // 10), np.uint8)})
    assert int(client.get_data(meta, data_fields=["y"])["y"].sum()) == size
    client.close()


def test_where_there_is_capacity_a_put_that_says_it_is_for_existing_samples_makes_none(
    start_server: StartServer, liar: Callable[[], None]
) -> None:
    controller = start_server(role="controller")
    storage = start_server(role="storage", controller=controller.address)
    client = tq.Client(controller.address, timeout=30)
    liar()
    with pytest.raises(tq.errors.QuotaExceededError, match="without for_existing_rows"):
        client.put("train", {"x": np.zeros(10)}, keys=[f"k{number}" for number in range(10)])
    assert client.list_partitions() == []
    deadline = time.monotonic() + 60
    while storage.storage.Stat(storage_pb.StatRequest()).put_count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    client.close()


def test_a_sample_that_is_cleared_while_its_column_comes_is_not_made_again_from_the_reserve(
    start_server: StartServer,
) -> None:
    server = start_server()
    client = server.client()
    client.put("train", {"x": np.zeros(1)}, keys=["k"])
    columns = encode_columns({"x": np.ones(1)})
    commit = commit_pb2.CommitRequest(
        request_id=new_id(),
        write=commit_pb2.SampleWrite(partition_id="train", row_count=1, keys=["k"]),
    )
    header = storage_pb.PutHeader(
        put_id=new_id(),
        row_count=1,
        columns=[encode_header(column) for column in columns],
        size_bytes=8,
        for_existing_rows=True,
        partition_id="train",
        commit=commit,
    )
    parts: queue.Queue[storage_pb.PutRequest | None] = queue.Queue()

    def sent() -> Iterator[storage_pb.PutRequest]:
        while (part := parts.get()) is not None:
            yield part

    parts.put(storage_pb.PutRequest(header=header))
    call = server.storage.Put.future(sent(), timeout=30)
    call.initial_metadata()  # there is capacity for it
    client.clear_samples("train", keys=["k"])
    parts.put(storage_pb.PutRequest(frame=np.ones(1).tobytes()))
    parts.put(None)
    with pytest.raises(grpc.RpcError) as refused:
        call.result()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.describe_partition("train").live_count == 0
    assert server.storage.Stat(storage_pb.StatRequest()).put_count == 0


@pytest.mark.parametrize("has_columns", [True, False])
def test_existing_keys_must_be_named(service: Service, has_columns: bool) -> None:
    client = tq.Client(service[0].address, timeout=30)
    client.put("train", {"x": np.zeros(1)}, keys=["k"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="key_mode is 'existing'"):
        if has_columns:
            client.put("train", {"x": np.zeros(1)}, key_mode="existing")
        else:
            write = commit_pb2.SampleWrite(partition_id="train", row_count=1, key_mode=commit_pb2.KEY_MODE_EXISTING)
            try:
                service[0].controller.Insert(pb.InsertRequest(request_id=new_id(), write=write))
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                raise tq.errors.InvalidArgumentError(error.details()) from error
    assert client.describe_partition("train").live_count == 1
    client.close()
