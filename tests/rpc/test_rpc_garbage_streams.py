"""Bulk streams of all wrong forms: the right error, nothing visible, bytes freed, and the service goes on."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from live_server import LiveServer
from rpc_samples import call_raw, new_id, put_train, reason_of, snapshot, still_works

from tq_service.v1 import commit_pb2, metadata_pb2, storage_service_pb2
from tq_service.wire.columns import INLINE_BYTES

CODE = grpc.StatusCode


def column(name: str = "x", **changes: Any) -> metadata_pb2.ColumnHeader:
    """Return the header of four rows of one int64."""
    spec: dict[str, Any] = {
        "name": name,
        "dtype": "int64",
        "layout": metadata_pb2.LAYOUT_DENSE,
        "row_shape_known": True,
    }
    parts: dict[str, Any] = {"value_bytes": 32, "extents": b""}
    for key, value in changes.items():
        (parts if key in parts else spec)[key] = value
    return metadata_pb2.ColumnHeader(spec=metadata_pb2.FieldSpec(**spec), **parts)


def header(*columns: metadata_pb2.ColumnHeader, **changes: Any) -> bytes:
    """Return the first message of a put of four rows with its commit."""
    commit = commit_pb2.CommitRequest(
        request_id=new_id(), write=commit_pb2.SampleWrite(partition_id="garbage", row_count=4)
    )
    columns = columns or (column(),)
    size = sum(one.value_bytes for one in columns)
    parts: dict[str, Any] = {
        "put_id": new_id(),
        "row_count": 4,
        "columns": columns,
        "size_bytes": size,
        "commit": commit,
        "partition_id": "garbage",
    }
    return storage_service_pb2.PutRequest(
        header=storage_service_pb2.PutHeader(**{**parts, **changes})
    ).SerializeToString()


def frame(data: bytes) -> bytes:
    return storage_service_pb2.PutRequest(frame=data).SerializeToString()


def extents(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


JAGGED = {"layout": metadata_pb2.LAYOUT_JAGGED, "row_shape": [-1]}
OBJECT = {"layout": metadata_pb2.LAYOUT_OBJECT, "dtype": ""}
GOOD = frame(bytes(32))

BAD_STREAMS: dict[str, list[bytes]] = {
    "nothing": [],
    "no partition": [header(partition_id=""), GOOD],
    "a partition that cannot be printed": [header(partition_id="a\nb"), GOOD],
    "another partition than its commit": [header(partition_id="other"), GOOD],
    "frames first": [GOOD, header()],
    "frames only": [GOOD],
    "truncated": [header(), frame(bytes(31))],
    "no frames": [header()],
    "oversized": [header(), frame(bytes(33))],
    "oversized by a frame": [header(), GOOD, frame(b"x")],
    "header twice": [header(), header(), GOOD],
    "header at the end": [header(), GOOD, header()],
    "garbled frame": [header(), b"\x12\xff\xff\x01ab"],
    "garbled after a frame": [header(), frame(bytes(16)), b"\xff\xfe\xfd"],
    "empty message": [header(), b"", GOOD],
    "empty message first": [b"", header(), GOOD],
    "size_bytes too small": [header(size_bytes=31), frame(bytes(31))],
    "size_bytes too large": [header(size_bytes=33), frame(bytes(33))],
    "size_bytes huge": [header(size_bytes=2**62), GOOD],
    "size_bytes below 0": [header(size_bytes=-32), GOOD],
    "value_bytes huge": [header(column(value_bytes=2**62)), GOOD],
    "value_bytes below 0": [header(column(value_bytes=-8)), GOOD],
    "value_bytes of other rows": [header(column(value_bytes=24)), frame(bytes(24))],
    "row_count 0": [header(row_count=0), GOOD],
    "row_count below 0": [header(row_count=-4), GOOD],
    "row_count huge": [header(row_count=2**62), GOOD],
    "row_count of the write": [header(column(value_bytes=24), row_count=3), frame(bytes(24))],
    "no columns": [header(columns=[])],
    "column twice": [header(column(), column()), frame(bytes(64))],
    "column without name": [header(column("")), GOOD],
    "put_id short": [header(put_id=b"abc"), GOOD],
    "put_id missing": [header(put_id=b""), GOOD],
    "dtype unknown": [header(column(dtype="int65")), GOOD],
    "dtype missing": [header(column(dtype="")), GOOD],
    "layout missing": [header(column(layout=metadata_pb2.LAYOUT_UNSPECIFIED)), GOOD],
    "layout unknown": [header(column(layout=9)), GOOD],
    "shape unknown": [header(column(row_shape_known=False)), GOOD],
    "shape below 0 in a dense column": [header(column(row_shape=[-1])), GOOD],
    "shape huge": [header(column(row_shape=[2**40, 2**40])), GOOD],
    "shape overflows": [header(column(row_shape=[2**32, 2**32, 0])), GOOD],
    "shape of many dims": [header(column(row_shape=[1] * 5000)), GOOD],
    "extents in a dense column": [header(column(extents=extents(1, 1, 1, 1))), GOOD],
    "no extents": [header(column(**JAGGED)), GOOD],
    "extents of three rows": [header(column(**JAGGED, extents=extents(1, 1, 2))), GOOD],
    "extents cut": [header(column(**JAGGED, extents=extents(1, 1, 1, 1)[:-1])), GOOD],
    "extents below 0": [header(column(**JAGGED, extents=extents(5, -1, 0, 0))), GOOD],
    "extents huge": [header(column(**JAGGED, extents=extents(2**61, 2**61, 2**61, 2**61))), GOOD],
    "extents overflow to the size": [header(column(**JAGGED, extents=extents(2**61, 4, 0, 0))), GOOD],
    "extents of other bytes": [header(column(**JAGGED, extents=extents(1, 1, 1, 2))), GOOD],
    "jagged without a ragged dim": [header(column(layout=metadata_pb2.LAYOUT_JAGGED, row_shape=[1])), GOOD],
    "object extents below 0": [header(column(**OBJECT, extents=extents(40, -8, 0, 0))), GOOD],
    "object extents of other bytes": [header(column(**OBJECT, extents=extents(8, 8, 8, 9))), GOOD],
    "object with a dtype": [header(column(layout=metadata_pb2.LAYOUT_OBJECT, extents=extents(8, 8, 8, 8))), GOOD],
    "commit without request_id": [header(commit=commit_pb2.CommitRequest()), GOOD],
    "commit of no partition": [
        header(commit=commit_pb2.CommitRequest(request_id=new_id(), write=commit_pb2.SampleWrite(row_count=4))),
        GOOD,
    ],
    "commit of fewer rows": [
        header(commit=commit_pb2.CommitRequest(
            request_id=new_id(), write=commit_pb2.SampleWrite(partition_id="garbage", row_count=3))),
        GOOD,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_a_bad_put_stream_is_refused_and_leaves_nothing(server: LiveServer, name: str) -> None:
    client = server.client()
    put_train(client)
    before = snapshot(client)
    with pytest.raises(grpc.RpcError) as caught:
        call_raw(server, "/tq_service.v1.StorageService/Put", BAD_STREAMS[name])
    call: Any = caught.value
    assert call.code() == CODE.INVALID_ARGUMENT, call.details()
    assert reason_of(call) == "INVALID_ARGUMENT"
    assert snapshot(client) == before
    still_works(client)


def small_put(messages: list[bytes]) -> bytes | None:
    """Return the same put in one message; None where it is no header with frames after it."""
    request = storage_service_pb2.PutInlineRequest()
    for position, data in enumerate(messages):
        try:
            part = storage_service_pb2.PutRequest.FromString(data)
        except DecodeError:
            return None
        if part.WhichOneof("part") != ("frame" if position else "header"):
            return None
        if not position:
            request.header.CopyFrom(part.header)
        request.values += part.frame
    return request.SerializeToString() if messages else None


BAD_INLINE_PUTS: dict[str, bytes] = {
    name: message for name, messages in BAD_STREAMS.items() if (message := small_put(messages)) is not None
} | {
    "no header": storage_service_pb2.PutInlineRequest(values=bytes(32)).SerializeToString(),
    "nothing": b"",
    "too large for one message": small_put(
        [
            header(column(value_bytes=INLINE_BYTES + 4, row_shape=[INLINE_BYTES // 4 + 1], dtype="uint8")),
            frame(bytes(INLINE_BYTES + 4)),
        ]
    )
    or b"",
}


@pytest.mark.parametrize("name", BAD_INLINE_PUTS)
def test_a_bad_small_put_is_refused_and_leaves_nothing(server: LiveServer, name: str) -> None:
    client = server.client()
    put_train(client)
    before = snapshot(client)
    with pytest.raises(grpc.RpcError) as caught:
        call_raw(server, "/tq_service.v1.StorageService/PutInline", [BAD_INLINE_PUTS[name]])
    call: Any = caught.value
    assert call.code() == CODE.INVALID_ARGUMENT, call.details()
    assert reason_of(call) == "INVALID_ARGUMENT"
    assert ("Put" in call.details()) == (name == "too large for one message")
    assert snapshot(client) == before
    still_works(client)


def test_the_bad_small_puts_are_bad_for_one_reason_each(server: LiveServer) -> None:
    good = small_put([header(), GOOD])
    assert good is not None
    call_raw(server, "/tq_service.v1.StorageService/PutInline", [good])
    assert len(BAD_INLINE_PUTS) > 40
    assert server.client().describe_partition("garbage").live_count == 4


def test_random_put_streams_leave_nothing(server: LiveServer) -> None:
    client = server.client()
    put_train(client)
    random_ = random.Random(11)
    before = snapshot(client)
    for round_ in range(150):
        messages = [header(), frame(bytes(16)), frame(bytes(16))]
        if round_ % 2:
            messages[random_.randrange(3)] = random_.randbytes(random_.randint(0, 60))
        else:
            random_.shuffle(messages)
            messages = messages[: random_.randint(0, 3)]
            if len(messages) == 3 and len(messages[0]) > 20:  # in order after all
                continue
        with pytest.raises(grpc.RpcError) as caught:
            call_raw(server, "/tq_service.v1.StorageService/Put", messages)
        call: Any = caught.value
        assert call.code() == CODE.INVALID_ARGUMENT, call.details()
    assert snapshot(client) == before
    still_works(client)


def breaking_off(messages: list[bytes]) -> Iterator[bytes]:
    yield from messages
    raise ConnectionResetError("the producer died")


def test_a_put_whose_client_leaves_gives_its_bytes_back(server: LiveServer) -> None:
    client = server.client()
    put_train(client)
    before = snapshot(client)
    for messages in ([header()], [header(), frame(bytes(8))]):
        with pytest.raises(grpc.RpcError):
            call_raw(server, "/tq_service.v1.StorageService/Put", breaking_off(messages))
    while snapshot(client) != before:  # the server hears of it a moment later
        server.settle()
    still_works(client)


def test_a_message_above_the_limit_is_refused(server: LiveServer) -> None:
    client = server.client()
    before = snapshot(client)
    for method in ("/tq_service.v1.ControllerService/Insert", "/tq_service.v1.StorageService/Put"):
        with pytest.raises(grpc.RpcError) as caught:
            call_raw(server, method, [bytes(5 << 20)])
        call: Any = caught.value
        assert call.code() == CODE.RESOURCE_EXHAUSTED
    assert snapshot(client) == before
    still_works(client)


# Gets


def runs(**changes: Any) -> metadata_pb2.CellRuns:
    parts = {"field_names": ["score"], "put_indexes": [0], "first_rows": [0], "row_counts": [2]}
    return metadata_pb2.CellRuns(**{**parts, **changes})


GETS = (
    lambda server, request: list(server.storage.Get(request, timeout=20)),
    lambda server, request: server.storage.GetInline(storage_service_pb2.GetInlineRequest(get=request), timeout=20),
)
BAD_RUNS: dict[str, tuple[list[metadata_pb2.CellRuns], grpc.StatusCode]] = {
    "none": ([], CODE.INVALID_ARGUMENT),
    "no field": ([runs(field_names=[])], CODE.INVALID_ARGUMENT),
    "field twice": ([runs(), runs()], CODE.INVALID_ARGUMENT),
    "unknown field": ([runs(field_names=["scores"])], CODE.NOT_FOUND),
    "no rows": ([runs(put_indexes=[], first_rows=[], row_counts=[])], CODE.INVALID_ARGUMENT),
    "runs cut": ([runs(row_counts=[])], CODE.INVALID_ARGUMENT),
    "put outside": ([runs(put_indexes=[7])], CODE.INVALID_ARGUMENT),
    "rows outside": ([runs(first_rows=[3])], CODE.INVALID_ARGUMENT),
    "rows huge": ([runs(first_rows=[2**32 - 1])], CODE.INVALID_ARGUMENT),
    "count 0": ([runs(row_counts=[0])], CODE.INVALID_ARGUMENT),
    "count huge": ([runs(row_counts=[2**32 - 1])], CODE.INVALID_ARGUMENT),
    "counts overflow": (
        [runs(put_indexes=[0] * 3, first_rows=[0] * 3, row_counts=[2**31, 2**31, 2])],
        CODE.INVALID_ARGUMENT,
    ),
    "counts differ": ([runs(), runs(field_names=["input_ids"], row_counts=[3])], CODE.INVALID_ARGUMENT),
    "unknown put": ([runs(put_indexes=[1])], CODE.NOT_FOUND),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_bad_get_is_refused(server: LiveServer, name: str) -> None:
    client = server.client()
    meta = put_train(client)
    located = client.lookup_samples("train", meta.keys)[0].locations
    (put,) = located.puts
    wanted, code = BAD_RUNS[name]
    before = snapshot(client)
    request = storage_service_pb2.GetRequest(boot_id=put.storage.boot_id, put_ids=[put.put_id, new_id()], runs=wanted)
    for get in GETS:
        with pytest.raises(grpc.RpcError) as caught:
            get(server, request)
        call: Any = caught.value
        assert call.code() == code, call.details()
        assert reason_of(call)
    assert snapshot(client) == before
    assert client.get_data(meta)["score"].shape == (4, 3)


def test_a_get_of_another_boot_is_data_loss(server: LiveServer) -> None:
    client = server.client()
    put_train(client)
    request = storage_service_pb2.GetRequest(boot_id=new_id(), put_ids=[new_id()], runs=[runs()])
    for get in GETS:
        with pytest.raises(grpc.RpcError) as caught:
            get(server, request)
        call: Any = caught.value
        assert call.code() == CODE.DATA_LOSS
        assert reason_of(call) == "DATA_LOSS"


def test_a_reader_that_leaves_lets_go_of_what_it_read(server: LiveServer) -> None:
    client = server.client()
    meta = client.put("large", {"x": torch.zeros(4, 4 << 20, dtype=torch.uint8)}, keys=list("abcd"))
    (put,) = client.lookup_samples("large", meta.keys)[0].locations.puts
    request = storage_service_pb2.GetRequest(
        boot_id=put.storage.boot_id, put_ids=[put.put_id], runs=[runs(field_names=["x"], row_counts=[4])]
    )
    stream = server.storage.Get(request, timeout=20)
    next(stream)
    stream.cancel()
    client.clear_partition("large")
    for _ in range(200):  # a busy service may notice later that the reader has left
        if client.storage_stat().used_bytes == 0:
            break
    assert client.storage_stat().used_bytes == 0
