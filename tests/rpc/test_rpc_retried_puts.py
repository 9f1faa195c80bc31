"""A put that is sent again while the call that it repeats is still there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from live_server import LiveServer
from rpc_samples import new_id

from tq_service.v1 import commit_pb2
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.wire.columns import encode_header
from tq_service.wire.encoding import encode_columns


@pytest.mark.parametrize("ends_by", ["its next frame", "its client leaving"])
def test_the_end_of_a_call_takes_nothing_from_its_retry(server: LiveServer, ends_by: str) -> None:
    client = server.client()
    columns = encode_columns({"x": np.arange(4)})
    header = storage_pb.PutHeader(
        put_id=new_id(), row_count=4, columns=map(encode_header, columns), size_bytes=32, partition_id="train"
    )
    values = np.arange(4).tobytes()
    goes_on = threading.Event()

    def parts() -> Iterator[storage_pb.PutRequest]:
        yield storage_pb.PutRequest(header=header)
        goes_on.wait(60)
        yield storage_pb.PutRequest(frame=values)

    first = server.storage.Put.future(parts(), timeout=60)
    deadline = time.monotonic() + 20
    while client.storage_stat().used_bytes == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    put = server.storage.PutInline(storage_pb.PutInlineRequest(header=header, values=values)).put
    if ends_by == "its client leaving":
        first.cancel()
    goes_on.set()
    assert first.code() is grpc.StatusCode.CANCELLED
    while server.app.calls.count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert client.storage_stat().put_count == 1
    commit = commit_pb2.CommitRequest(
        request_id=new_id(), write=commit_pb2.SampleWrite(partition_id="train", row_count=4)
    )
    commit.placement.storage.CopyFrom(put.storage)
    commit.placement.put_id = header.put_id
    commit.columns.extend(header.columns)
    server.controller.Commit(commit)
    assert client.get_data("train", global_indexes=range(4))["x"].tolist() == [0, 1, 2, 3]
