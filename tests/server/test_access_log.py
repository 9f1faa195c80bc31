"""At log level debug each call has its line: what was called, of what, how it ended; at others nothing is done."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import numpy as np
import pytest
from live_server import LiveServer, StartServer

import tq_service as tq
from tq_service.log_message import LogMessage
from tq_service.server.rpc.calls import ObservedCalls
from tq_service.server.rpc.methods import METHODS, Caller
from tq_service.v1 import controller_service_pb2 as pb

LOGGER = "tq_service.server.rpc.calls"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.DEBUG, LOGGER)

    def read() -> list[dict[str, Any]]:
        messages = [record.msg for record in caplog.records if record.name == LOGGER]
        return [message.fields for message in messages if isinstance(message, LogMessage)]

    return read


def test_each_call_has_its_line(lines: Any, start_server: StartServer) -> None:
    server: LiveServer = start_server()
    client = server.client()
    client.put("train", {"x": np.zeros((4, 1 << 17))})
    client.put("train", {"x": np.zeros((1, 1 << 17))})
    client.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=1, max_wait=0.0)
    with pytest.raises(tq.errors.PartitionNotFoundError):
        client.seal_partition("none")
    with pytest.raises(grpc.RpcError):
        server.channel.unary_unary("/tq_service.v1.ControllerService/SealPartition")(b"\xff", timeout=20)
    server.settle()
    found = {(line["method"], line["outcome"]): line for line in lines()}
    claim = found["GetMeta", "OK"]
    assert (claim["partition"], claim["task"]) == ("train", "t")
    assert len(bytes.fromhex(claim["request_id"])) == 16
    assert 0 <= claim["ms"] < 20_000
    assert found["SealPartition", "NOT_FOUND"]["partition"] == "none"
    assert "partition" not in found["SealPartition", "INVALID_ARGUMENT"]
    puts = [line for line in lines() if line["method"] in {"Put", "PutInline"}]
    assert {line["partition"] for line in puts} == {"train"}
    assert len({line["request_id"] for line in puts}) == 2


def test_each_call_of_a_stream_has_its_line(lines: Any, start_server: StartServer) -> None:
    server: LiveServer = start_server()
    request = pb.GetMetaRequest(request_id=b"i" * 16, partition_id="train", task_name="t", data_fields=["x"])
    calls = [
        pb.BatchedCall(call_id=1, method="GetMeta", request=request.SerializeToString()),
        pb.BatchedCall(call_id=2, method="AckClaim", request=b"\xff"),
    ]
    list(server.controller.CallMany(iter([pb.CallManyRequest(calls=calls)]), timeout=20))
    server.settle()
    found = {line["method"]: line for line in lines()}
    assert found.keys() == {"GetMeta", "AckClaim", "CallMany"}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "GetMeta": "INVALID_ARGUMENT", "AckClaim": "INVALID_ARGUMENT", "CallMany": "OK",
    }  # fmt: skip
    assert (found["GetMeta"]["partition"], found["GetMeta"]["task"]) == ("train", "t")
    assert found["GetMeta"]["request_id"] == (b"i" * 16).hex()
    assert found["GetMeta"]["peer"] == found["CallMany"]["peer"]


def test_at_other_levels_calls_do_not_pass_it(caplog: pytest.LogCaptureFixture) -> None:
    async def behavior(request: Any, context: Any) -> None: ...

    method = METHODS["/tq_service.v1.ControllerService/GetMeta"]
    caplog.set_level(logging.INFO, LOGGER)
    assert ObservedCalls().wrap(method, Caller(), behavior) is behavior
    caplog.set_level(logging.DEBUG, LOGGER)
    assert ObservedCalls().wrap(method, Caller(), behavior) is not behavior
