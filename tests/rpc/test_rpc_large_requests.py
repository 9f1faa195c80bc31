"""Writes and look-ups that are larger than one message go in parts of one call: one put stays one commit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import grpc
import numpy as np
import pytest
from live_server import AnyClient, ClientKind, LiveServer, StartServer
from rpc_samples import call_raw, new_id, still_works

import tq_service as tq
from tq_service.schema import MOST_NAMED_PER_WRITE, FieldSpec, Layout
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.wire.columns import ColumnShape, encode_header
from tq_service.wire.connection import MAX_REQUEST_BYTES, PART_BYTES, in_parts

ROWS = MOST_NAMED_PER_WRITE
KEYS = [f"a key of two hundred characters: {row:0166d}." for row in range(ROWS)]  # 3.3 MB


SPEC = FieldSpec("x", "uint8", Layout.DENSE, ())


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, start_server: StartServer) -> AnyClient:
    kind: ClientKind = request.param
    return start_server(max_message_bytes=4 << 20).client(kind)


@pytest.mark.parametrize("row_bytes", [1, 9], ids=["of a put in one message", "of a stream"])
def test_a_put_with_many_names_is_one_commit(client: AnyClient, row_bytes: int) -> None:
    values = np.arange(ROWS * row_bytes, dtype=np.uint8).reshape(ROWS, row_bytes)
    texts = [key[::-1] for key in KEYS]
    made = client.put("p", {"x": values}, keys=KEYS, groups=KEYS, custom_meta={"text": texts})
    assert made.size == ROWS
    found, missing = client.lookup_samples("p", keys=KEYS)
    assert not missing
    assert (list(found.keys), list(found.groups)) == (KEYS, KEYS)
    assert found.custom_meta[-1]["text"] == texts[-1]
    order = list(np.random.default_rng(0).permutation(ROWS))
    got = client.get_data("p", global_indexes=order, data_fields=["x"])
    assert np.array_equal(got["x"].numpy(), values[order])


def test_writes_without_data_go_in_parts_too(client: AnyClient) -> None:
    made = client.insert("p", keys=KEYS)
    client.set_custom_meta(made, {"text": KEYS})
    found, _ = client.lookup_samples("p", keys=KEYS)
    assert [each["text"] for each in found.custom_meta] == KEYS
    assert client.clear_samples("p", keys=KEYS) == ROWS


def test_a_request_that_is_too_large_is_refused_before_it_is_sent(client: AnyClient) -> None:
    texts = [f"{row:0512d}" for row in range(MAX_REQUEST_BYTES // 512 + 1)]
    with pytest.raises(tq.errors.InvalidArgumentError, match="fewer samples at once"):
        client.insert("p", custom_meta={"text": texts})
    assert not client.list_partitions()


@pytest.mark.parametrize("name", ["keys", "groups"])
def test_more_samples_with_names_than_one_step_takes_are_refused_with_the_remedy(client: AnyClient, name: str) -> None:
    names, values = [*KEYS, "one more"], np.zeros((ROWS + 1, 100), np.uint8)
    refusal = rf"{name} contains {ROWS + 1} samples; expected at most {ROWS} per call. Write them in several calls"
    for write in (partial(client.put, "p", {"x": values}), partial(client.insert, "p")):
        with pytest.raises(tq.errors.InvalidArgumentError, match=refusal) as caught:
            write(**{name: names})
        assert caught.value.metadata.items() >= {"got": str(ROWS + 1), "limit": str(ROWS)}.items()
    assert not client.list_partitions()
    for part in (slice(0, ROWS), slice(ROWS, None)):
        client.put("p", {"x": values[part]}, **{name: names[part]})
    assert client.describe_partition("p").summary.inserted_count == ROWS + 1


@pytest.mark.parametrize("name", ["keys", "groups"])
def test_the_service_refuses_them_before_it_reads_the_bytes_of_a_put(server: LiveServer, name: str) -> None:
    write = commit_pb2.SampleWrite(partition_id="p", row_count=ROWS + 1, **{name: [*map(str, range(ROWS + 1))]})
    commit = commit_pb2.CommitRequest(request_id=new_id(), write=write)
    column = ColumnShape(spec=SPEC, row_count=ROWS + 1, extents=None, value_bytes=ROWS + 1)
    header = storage_pb.PutHeader(
        put_id=new_id(),
        partition_id="p",
        row_count=ROWS + 1,
        columns=[encode_header(column)],
        size_bytes=ROWS + 1,
        commit=commit,
    )

    def requests() -> Iterator[storage_pb.PutRequest]:
        yield storage_pb.PutRequest(header=header)
        time.sleep(20)  # the bytes never come

    for call in (
        lambda: server.storage.Put(requests(), timeout=10),
        lambda: server.controller.Insert(pb.InsertRequest(request_id=new_id(), write=write), timeout=10),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"expected at most {ROWS} per call" in str(caught.value.details())
    assert not server.client().list_partitions()


def insert() -> bytes:
    request = pb.InsertRequest(request_id=new_id())
    request.write.partition_id, request.write.row_count = "p", ROWS
    request.write.keys.extend(KEYS)
    return request.SerializeToString()


def test_parts_that_break_off_write_nothing(server: LiveServer) -> None:
    def breaking_off() -> Iterator[bytes]:
        yield in_parts(insert(), "Insert")[0]
        raise ConnectionResetError("the producer died")

    call = server.channel.stream_unary("/tq_service.v1.ControllerService/Insert")
    with pytest.raises(grpc.RpcError):
        call(breaking_off(), timeout=20)
    with pytest.raises(grpc.RpcError) as caught:  # the end comes before the last part
        call(iter([insert()[:PART_BYTES]]), timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    client = server.client()
    assert not client.list_partitions()
    still_works(client)


def test_a_frame_as_large_as_a_part_is_a_frame(server: LiveServer) -> None:
    client = server.client()
    values = np.ones(2 * PART_BYTES - 5, np.uint8)  # 5 bytes in front of each frame of `PART_BYTES`
    client.put("p", {"x": values[None]})
    assert client.get_data("p", global_indexes=[0], data_fields=["x"])["x"].shape == (1, values.size)


def test_frames_of_gets_are_the_smaller_the_more_run(server: LiveServer) -> None:
    client = server.client()
    client.put("p", {"x": np.ones((1, 32 << 20), np.uint8)})
    found = server.controller.Locate(
        pb.LocateRequest(partition_id="p", global_indexes=[0], data_fields=["x"]), timeout=20
    ).meta
    request = storage_pb.GetRequest(
        boot_id=found.locations.storages[0].boot_id,
        put_ids=[put.put_id for put in found.locations.puts],
        runs=found.locations.runs,
    )
    gets = [server.storage.Get(request, timeout=60) for _ in range(24)]
    for get in gets:
        next(get)  # its header; the frames wait for their client
    frames = [len(part.frame) for part in server.storage.Get(request, timeout=60) if part.frame]
    assert sum(frames) == 32 << 20
    assert max(frames) <= 1 << 20
    for get in gets:
        get.cancel()


def test_an_open_call_is_small(server: LiveServer) -> None:
    for size in (5 << 20, 3 << 20, 5000):
        with pytest.raises(grpc.RpcError) as caught:
            server.channel.unary_unary("/grpc.health.v1.Health/Check")(bytes(size), timeout=20)
        assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
        if size == 5000:
            assert "at most 4096" in str(caught.value.details())
    assert call_raw(server, "/tq_service.v1.StorageService/Stat", [b""])
