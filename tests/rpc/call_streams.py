"""A stream of calls whose messages a test makes by hand."""

from __future__ import annotations

import queue
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from rpc_methods import CONTROLLER

from tq_service.v1 import controller_service_pb2 as pb

CALL_MANY = CONTROLLER + "CallMany"


def call(call_id: int, method: str, request: Message | bytes, **more: Any) -> pb.BatchedCall:
    """Return a call of a message; `seconds` is its timeout."""
    seconds = more.pop("seconds", None)
    data = request if isinstance(request, bytes) else request.SerializeToString()
    asked = pb.BatchedCall(call_id=call_id, method=method, request=data, **more)
    if seconds is not None:
        asked.timeout.CopyFrom(Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9)))
    return asked


def claim(call_id: int, task_name: str = "t", **more: Any) -> pb.BatchedCall:
    """Return a claim of one sample of "train" by a queue worker, whose request id is made of the call's."""
    asked = {
        "request_id": call_id.to_bytes(16, "big"), "partition_id": "train", "data_fields": ["x"], "batch_size": 1,
        "min_batch_size": 1,
    }  # fmt: skip
    seconds, fields = more.pop("seconds", None), {**asked, "task_name": task_name, **more}
    return call(call_id, "GetMeta", pb.GetMetaRequest(**fields), **({} if seconds is None else {"seconds": seconds}))


def waiting_claim(call_id: int, **more: Any) -> pb.BatchedCall:
    """Return a claim that waits for samples which do not come."""
    return claim(call_id, data_fields=["later"], max_wait=Duration(seconds=50), **more)


def reason(answer: pb.BatchedAnswer) -> str:
    """Return the reason of a failed call, "" of one that has not failed."""
    status, info = Status.FromString(answer.status), ErrorInfo()
    return info.reason if any(detail.Unpack(info) for detail in status.details) else ""


class CallStream:
    """A stream on a channel; what is sent is in the order of `send`."""

    def __init__(self, channel: grpc.Channel, metadata: Any = None) -> None:
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        make = channel.stream_stream(CALL_MANY, response_deserializer=pb.CallManyResponse.FromString)
        self.call: Any = make(iter(self._sent.get, None), timeout=60, metadata=metadata)
        self._answers: list[pb.BatchedAnswer] = []

    def send(self, *calls: pb.BatchedCall, cancelled: tuple[int, ...] = ()) -> None:
        """Send a message."""
        self.send_raw(pb.CallManyRequest(calls=calls, cancelled_call_ids=cancelled).SerializeToString())

    def send_raw(self, data: bytes) -> None:
        """Send bytes as a message."""
        self._sent.put(data)

    def close(self) -> None:
        """Send nothing more."""
        self._sent.put(None)

    def read(self, count: int) -> dict[int, pb.BatchedAnswer]:
        """Return the next answers, by call."""
        while len(self._answers) < count:
            self._answers += next(self.call).answers
        taken, self._answers = self._answers[:count], self._answers[count:]
        return {answer.call_id: answer for answer in taken}

    def failure(self) -> Any:
        """Return the error with which the stream ends."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return error
        return None

    def __enter__(self) -> CallStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self.call.cancel()
