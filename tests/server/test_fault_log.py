"""The log line of a fault of the service says which request failed."""

from types import SimpleNamespace

import grpc
import pytest
from grpc._cython import cygrpc

from tq_service.server.rpc.calls import RunningCalls
from tq_service.server.rpc.methods import Caller, Method
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb


@pytest.mark.parametrize(
    ("request_message", "shown"),
    [
        (pb.SealPartitionRequest(request_id=b"\x01\xab"), " request_id=01ab"),
        (storage_pb.PutInlineRequest(header={"commit": {"request_id": b"\x02"}}), " request_id=02"),
        (pb.ListPartitionsRequest(), ""),
    ],
    ids=["change", "put", "read"],
)
async def test_a_fault_is_logged_with_the_request_id(request_message, shown, caplog):
    async def fail(request, context):
        raise KeyError("x")

    async def abort_with_status(status):
        raise grpc.aio.AbortError(status.details)

    async def only():
        return request_message

    requests = SimpleNamespace(first=request_message, only=only)
    call = RunningCalls().wrap(Method(name="/s/M"), Caller(), fail)
    with pytest.raises(grpc.aio.AbortError, match="the call failed with an internal error"):
        await call(requests, SimpleNamespace(abort_with_status=abort_with_status))
    (record,) = caplog.records
    assert record.getMessage() == f"a call failed method=/s/M{shown}"


@pytest.mark.parametrize("kind", [cygrpc._ServerStoppedError, grpc.aio.InternalError, grpc.aio.AbortError])
async def test_a_call_that_is_over_is_no_fault(kind, caplog):
    async def only():
        raise kind("Server already stopped.")

    call = RunningCalls().wrap(Method(name="/s/M"), Caller(), only)
    with pytest.raises(kind):
        await call(SimpleNamespace(first=None, only=only), SimpleNamespace())
    assert not caplog.records
