"""What the rpc tests have in common: a small partition, and what must not change."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import grpc
import torch
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from live_server import AnyClient, LiveServer
from rpc_methods import DESCRIBED, shape_of

import tq_service as tq
from tq_service.wire.error_table import code_of, status_from_trailers

TRAIN: dict[str, Any] = {"partition_id": "train", "task_name": "update_actor", "data_fields": ["input_ids"]}


def new_id() -> bytes:
    return secrets.token_bytes(16)


def put_train(client: AnyClient, name: str = "train") -> tq.BatchMeta:
    """Put four samples in two groups: a jagged field, one declared dense, keys and lengths."""
    client.create_partition(name, fields=[tq.FieldSpec("score", layout="dense")])
    rows = [torch.arange(length) + 10 * length for length in (5, 3, 8, 2)]
    meta: tq.BatchMeta = client.put(
        name,
        {"input_ids": rows, "score": torch.arange(12, dtype=torch.float32).reshape(4, 3)},
        keys=["k0", "k1", "k2", "k3"],
        groups=["g0", "g0", "g1", "g1"],
        group_size=2,
        custom_meta=[{"total_lengths": len(row), "version": 3} for row in rows],
    )
    return meta


def snapshot(client: AnyClient) -> Any:
    """Return all that a refused call must not change; tasks that have asked but got nothing are no change."""
    partitions = [client.describe_partition(one.partition_id) for one in client.list_partitions()]
    tasks = [
        (one.summary.partition_id, task.task_name, task.epoch, task.consumed_count, task.planned_batch_count,
         task.trained_batch_count)
        for one in partitions
        for task in one.tasks
        if task.consumed_count or task.planned_batch_count or task.epoch
    ]  # fmt: skip
    samples = [
        (one.summary, one.expected_samples, one.live_count, one.held_count, one.failed_count, one.group_count,
         one.fields, one.custom_meta_columns)
        for one in partitions
    ]  # fmt: skip
    stat = client.storage_stat()
    versions = [(each.policy, each.version) for each in client.status(explain=False).policies]
    return samples, tasks, versions, stat.used_bytes, stat.put_count, stat.uncommitted_put_count


def rpc_error_of(error: BaseException | None) -> grpc.RpcError | None:
    """Return the call's error behind a client's error; None where the client refused before a call."""
    while error is not None and not isinstance(error, grpc.RpcError):
        error = error.__cause__ or error.__context__
    return error


def wire_code(error: tq.TqError) -> grpc.StatusCode:
    """Return the status code as it came, or as the table has it where the client refused before a call."""
    call: Any = rpc_error_of(error)
    return code_of(error) if call is None else call.code()


def status_of(call: Any) -> Status:
    """Return the `google.rpc.Status` of a call's error."""
    status = status_from_trailers(call.trailing_metadata())
    assert status is not None, f"no status in the trailers of {call}"
    return status


def reason_of(call: Any) -> str:
    """Return the reason of a call's error."""
    info = ErrorInfo()
    assert any(detail.Unpack(info) for detail in status_of(call).details)
    assert info.domain == "tq_service"
    return info.reason


def violations_of(call: Any) -> list[str]:
    """Return the fields that a call's error names."""
    found = BadRequest()
    for detail in status_of(call).details:
        detail.Unpack(found)
    return [violation.field for violation in found.field_violations]


def has_retry_info(call: Any) -> bool:
    """Whether a call's error says when to try again."""
    return any(detail.Is(RetryInfo.DESCRIPTOR) for detail in status_of(call).details)


def call_raw(
    server: LiveServer, method: str, messages: Iterable[bytes], timeout: float = 20.0, metadata: Any = None
) -> bytes:
    """Send bytes as the messages of a call, and return the bytes of its response.

    A `Watch` never ends, so this returns its first message.
    """
    described = DESCRIBED[method]
    make = getattr(server.channel, shape_of(described))(method)
    answer = make(
        iter(messages) if described.client_streaming else next(iter(messages)), timeout=timeout, metadata=metadata
    )
    if described.name == "Watch":
        first: bytes = next(answer)
        answer.cancel()
        return first
    return b"".join(answer) if described.server_streaming else answer


def still_works(client: AnyClient) -> None:
    """Check that put, claim, get and clear work."""
    meta = client.put("after", {"x": torch.arange(3)})
    got = client.get_meta(partition_id="after", task_name="t", data_fields=["x"], batch_size=3)
    assert got.global_indexes == meta.global_indexes
    assert client.get_data(got)["x"].tolist() == [0, 1, 2]
    client.clear_partition("after")
