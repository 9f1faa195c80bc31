"""An answer that is larger than its client takes is an error of that call, and none of the service."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from live_server import LiveServer

import tq_service as tq
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub
from tq_service.wire.error_table import from_rpc_error

_ROWS = 100_000
_METHOD = "/tq_service.v1.ControllerService/GetMeta"


@pytest.fixture
def request_of_much(server: LiveServer) -> pb.GetMetaRequest:
    client = server.client()
    keys = [f"a key of some length {row}" for row in range(_ROWS)]
    for some in np.array_split(keys, 7):
        client.put("train", {"x": np.zeros((some.size, 1), np.uint8)}, keys=some)
    return pb.GetMetaRequest(
        partition_id="train", task_name="t", batch_size=_ROWS, data_fields=["x"], request_id=secrets.token_bytes(16)
    )


@pytest.fixture
def faults(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def check_no_fault(server: LiveServer, log: pytest.LogCaptureFixture) -> None:
    server.settle()
    client = server.client()
    assert [one.partition_id for one in client.list_partitions()] == ["train"]
    for record in log.records:
        assert record.levelno <= logging.WARNING, record.getMessage()
        assert record.exc_info is None


def test_the_error_says_both_sizes_and_what_to_do(
    server: LiveServer, request_of_much: pb.GetMetaRequest, faults: pytest.LogCaptureFixture
) -> None:
    options = [("grpc.max_receive_message_length", 4096), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as caught:
                ControllerServiceStub(channel).GetMeta(request_of_much, timeout=20)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            error = from_rpc_error(caught.value.code(), caught.value.details(), None)
            assert isinstance(error, tq.errors.ResourceExhaustedError)
            assert error.retry_after_seconds is None
            assert error.metadata["limit"] == "4096"
            assert int(error.metadata["got"]) > 4096
            assert "max_receive_message_length" in str(error)
    check_no_fault(server, faults)


def test_an_answer_that_its_client_gives_up_half_way_is_no_fault(
    server: LiveServer, request_of_much: pb.GetMetaRequest, faults: pytest.LogCaptureFixture
) -> None:
    """As clients of other languages do whose limit it passes: the service learns only that nobody takes it."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.lookahead_bytes", 65_535),
        ("grpc.http2.bdp_probe", 0),
    ]
    with grpc.insecure_channel(server.address, options=options) as channel:
        ask = channel.unary_stream(_METHOD, request_serializer=pb.GetMetaRequest.SerializeToString)  # reads on demand
        for _ in range(5):
            is_over = threading.Event()
            call = ask(request_of_much, timeout=20)
            call.add_callback(is_over.set)
            call.initial_metadata()
            call.cancel()
            assert is_over.wait(20)
    check_no_fault(server, faults)
