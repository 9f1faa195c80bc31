"""A repeat of a mutating request under its request_id has one effect and gets the recorded answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.message import Message
from live_server import LiveServer, StartServer
from rpc_methods import DESCRIBED, changes_state
from rpc_samples import new_id, put_train, reason_of, snapshot

import tq_service as tq
from tq_service.internal.v1 import storage_control_pb2, storage_registry_pb2
from tq_service.server.receipts import key_id
from tq_service.v1 import commit_pb2, metadata_pb2, storage_service_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.columns import encode_header
from tq_service.wire.encoding import encode_columns

CLAIM: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["score"]}
WRITE = commit_pb2.SampleWrite(partition_id="train", row_count=2, keys=["a", "b"], key_mode=commit_pb2.KEY_MODE_NEW)


def ids(request_id: bytes, **more: Any) -> dict[str, Any]:
    return {"request_id": request_id, "partition_id": "train", **more}


def mutating_requests(meta: tq.BatchMeta, request_id: bytes) -> dict[str, Message]:
    column = metadata_pb2.MetaColumn(name="version", int64_values=metadata_pb2.Int64Values(values=[8, 9]))
    return {
        "CreatePartition": pb.CreatePartitionRequest(request_id=request_id, partition_id="new", expected_samples=5),
        "SealPartition": pb.SealPartitionRequest(**ids(request_id)),
        "Insert": pb.InsertRequest(request_id=request_id, write=WRITE),
        "Commit": commit_pb2.CommitRequest(request_id=request_id, write=WRITE),
        "GetMeta": pb.GetMetaRequest(**CLAIM, request_id=request_id, batch_size=2),
        "Acquire": pb.AcquireRequest(
            request_id=request_id,
            write=commit_pb2.SampleWrite(partition_id="train", row_count=2),
            task_name="rollout",
            lease={"seconds": 90},
        ),
        "ReleaseClaim": pb.ReleaseClaimRequest(**ids(request_id, task_name="held", claim_request_id=bytes(16))),
        "AckClaim": pb.AckClaimRequest(**ids(request_id, task_name="leased", claim_request_id=bytes(16))),
        "ExtendClaim": pb.ExtendClaimRequest(
            **ids(request_id, task_name="leased", claim_request_id=bytes(16), lease={"seconds": 90})
        ),
        "ResetConsumption": pb.ResetConsumptionRequest(**ids(request_id, task_name="held", epoch=0)),
        "RequeueDeadLettered": pb.RequeueDeadLetteredRequest(**ids(request_id, task_name="held")),
        "Advance": pb.AdvanceRequest(**ids(request_id, task_name="ranked", trained=1)),
        "RestartRanks": pb.RestartRanksRequest(**ids(request_id, task_name="ranked", dp_size=3, trained=0)),
        "PublishVersion": pb.PublishVersionRequest(
            request_id=request_id,
            policy="default",
            version=3,
            trained=[pb.TrainedBatches(partition_id="train", task_name="ranked", batch_index=1)],
        ),
        "RemovePolicy": pb.RemovePolicyRequest(request_id=request_id, policy="actor"),
        "SetCustomMeta": pb.SetCustomMetaRequest(**ids(request_id, global_indexes=[0, 2], custom_meta=[column])),
        "TruncateSamples": pb.TruncateSamplesRequest(
            **ids(
                request_id,
                global_indexes=[len(meta.global_indexes)],
                lengths=[1],
                data_fields=["tokens"],
                claim={"task_name": "slots", "claim_request_id": b"s" * 16},
            )
        ),
        "CloseGroups": pb.CloseGroupsRequest(**ids(request_id, groups=["g0"])),
        "ClearFields": pb.ClearFieldsRequest(**ids(request_id, keys=["k1"], data_fields=["score"])),
        "ClearSamples": pb.ClearSamplesRequest(**ids(request_id, keys=["k0", "k3"])),
        "FailSamples": pb.FailSamplesRequest(**ids(request_id, keys=["k1"])),
        "ClearPartition": pb.ClearPartitionRequest(**ids(request_id, incarnation=meta.incarnation)),
    }


# By what DescribePartition tells; and nothing is dead-lettered.
CHANGED_NOTHING_SEEN = {
    "SetCustomMeta", "CloseGroups", "AckClaim", "ExtendClaim", "RequeueDeadLettered"
}  # fmt: skip


def test_every_request_with_an_id_is_here() -> None:
    with_id = {
        method.name
        for method in DESCRIBED.values()
        if changes_state(method) and "request_id" in method.input_type.fields_by_name
    }
    # Restore takes a service without partitions.
    assert mutating_requests(tq.BatchMeta(), b"").keys() == with_id - {"Restore"}


def make_claims(server: LiveServer) -> None:
    """Claim samples for two tasks, one of them with a lease, and for ranks; publish a version; have a slot grow."""
    for task_name, lease in (("held", None), ("leased", {"seconds": 60})):
        asked = {**CLAIM, "task_name": task_name, "lease": lease}
        server.controller.GetMeta(pb.GetMetaRequest(**asked, request_id=bytes(16), batch_size=2))
    for index in range(2):
        rank = {"task_name": "ranked", "dp_rank": 0, "dp_size": 2, "batch_index": index, "batch_size": 1}
        server.controller.GetMeta(pb.GetMetaRequest(**CLAIM | rank, request_id=bytes(16)))
    server.controller.PublishVersion(pb.PublishVersionRequest(request_id=b"p" * 16, policy="actor", version=1))
    write = commit_pb2.SampleWrite(partition_id="train", row_count=1)
    terms = {"task_name": "slots", "lease": {"seconds": 60}}
    answer = server.controller.Acquire(pb.AcquireRequest(request_id=b"s" * 16, write=write, **terms))
    slots = tq.BatchMeta.from_proto(answer.meta, claim_id=b"s" * 16, task_name="slots")
    for at in range(2):
        server.client().append(slots, {"tokens": [[at]]}, at=[at])


@pytest.mark.parametrize("name", mutating_requests(tq.BatchMeta(), b""))
def test_a_repeat_has_one_effect_and_the_same_answer(server: LiveServer, name: str) -> None:
    client = server.client()
    meta = put_train(client)
    make_claims(server)
    before = snapshot(client)
    request = mutating_requests(meta, new_id())[name]
    call = getattr(server.controller, name)
    first = call(request)
    after = snapshot(client)
    assert (after != before) == (name not in CHANGED_NOTHING_SEEN)
    for _ in range(3):
        assert call(request) == first
    assert snapshot(client) == after


@pytest.mark.parametrize("name", ["Insert", "ClearPartition", "ResetConsumption", "ClearSamples"])
def test_a_repeat_under_another_id_is_another_request(server: LiveServer, name: str) -> None:
    client = server.client()
    meta = put_train(client)
    make_claims(server)
    call = getattr(server.controller, name)
    call(mutating_requests(meta, new_id())[name])
    after = snapshot(client)
    if name == "ClearSamples":  # idempotent whatever the id: what is gone is ignored
        assert call(mutating_requests(meta, new_id())[name]).cleared_count == 0
    else:
        with pytest.raises(grpc.RpcError):
            call(mutating_requests(meta, new_id())[name])
    assert snapshot(client) == after


@pytest.mark.parametrize("name", sorted(mutating_requests(tq.BatchMeta(), b"").keys() - {"GetMeta"}))
def test_an_id_of_another_call_is_refused_and_nothing_changes(server: LiveServer, name: str) -> None:
    client = server.client()
    meta, request_id = put_train(client), new_id()
    other = "ExtendClaim" if name == "AckClaim" else "AckClaim"
    answer = getattr(pb, f"{other}Response")
    server.app.controller.catalog.run_once(request_id, answer)
    before = snapshot(client)
    request = mutating_requests(meta, request_id)[name]
    with pytest.raises(grpc.RpcError) as caught:
        getattr(server.controller, name)(request)
    assert reason_of(caught.value) == "INVALID_ARGUMENT"
    assert f"{other}Response" in caught.value.details()
    assert snapshot(client) == before
    assert getattr(server.controller, other)(mutating_requests(meta, request_id)[other]) == answer()


def test_a_refused_request_is_not_recorded(server: LiveServer) -> None:
    client = server.client()
    put_train(client)
    write = commit_pb2.SampleWrite(partition_id="train", row_count=1, keys=["k1"], key_mode=commit_pb2.KEY_MODE_NEW)
    request = pb.InsertRequest(request_id=new_id(), write=write)
    with pytest.raises(grpc.RpcError):
        server.controller.Insert(request)
    client.clear_samples("train", keys=["k1"])
    assert server.controller.Insert(request).meta.global_indexes == [4]


def test_a_large_insert_that_is_sent_twice_is_made_once(server: LiveServer) -> None:
    count = 1 << 19
    write = commit_pb2.SampleWrite(partition_id="train", row_count=count)
    request = pb.InsertRequest(request_id=new_id(), write=write)
    calls = [server.controller.Insert.future(request, timeout=60) for _ in range(4)]
    server.controller.Insert(
        pb.InsertRequest(request_id=new_id(), write=commit_pb2.SampleWrite(partition_id="train", row_count=5))
    )
    answers = [call.result() for call in calls]
    assert all(answer == answers[0] for answer in answers)
    assert list(answers[0].meta.index_ranges.index_counts) == [count]
    assert server.client().describe_partition("train").summary.present_count == count + 5


def test_a_released_claim_refuses_its_retry(server: LiveServer) -> None:
    put_train(server.client())
    claim = pb.GetMetaRequest(**CLAIM, request_id=new_id(), batch_size=3)
    assert list(server.controller.GetMeta(claim).meta.global_indexes) == [0, 1, 2]
    release = pb.ReleaseClaimRequest(request_id=new_id(), partition_id="train", task_name="t",
                                     claim_request_id=claim.request_id)  # fmt: skip
    assert server.controller.ReleaseClaim(release).released_count == 3
    with pytest.raises(grpc.RpcError) as caught:
        server.controller.GetMeta(claim)
    call: Any = caught.value
    assert (call.code(), reason_of(call)) == (grpc.StatusCode.FAILED_PRECONDITION, "CLAIM_RELEASED")
    # A claim that is released before it was made is refused too: its client has left already.
    early = pb.GetMetaRequest(**CLAIM, request_id=new_id(), batch_size=3)
    release = pb.ReleaseClaimRequest(request_id=new_id(), partition_id="train", task_name="t",
                                     claim_request_id=early.request_id)  # fmt: skip
    assert server.controller.ReleaseClaim(release).released_count == 0
    with pytest.raises(grpc.RpcError):
        server.controller.GetMeta(early)
    assert server.client().check_consumption("train", "t").consumed_count == 0


def put_stream(
    *, commit: commit_pb2.CommitRequest | None = None, put_id: bytes = b""
) -> list[storage_service_pb2.PutRequest]:
    """Return the messages of a put of four samples."""
    columns = encode_columns({"x": torch.arange(4), "j": [torch.arange(n) for n in (2, 0, 3, 1)]})
    header = storage_service_pb2.PutHeader(
        put_id=put_id or new_id(),
        row_count=4,
        columns=[encode_header(column) for column in columns],
        size_bytes=sum(column.value_bytes for column in columns),
        partition_id="train",
        commit=commit,
    )
    data = b"".join(bytes(chunk) for column in columns for chunk in column.chunks)
    frames = [data[:7], data[7:8], data[8:]]
    return [
        storage_service_pb2.PutRequest(header=header),
        *(storage_service_pb2.PutRequest(frame=frame) for frame in frames),
    ]


def stream_put(server: LiveServer, messages: list[storage_service_pb2.PutRequest]) -> storage_service_pb2.PutResponse:
    return server.storage.Put(iter(messages))


def send_small_put(
    server: LiveServer, messages: list[storage_service_pb2.PutRequest]
) -> storage_service_pb2.PutResponse:
    values = b"".join(message.frame for message in messages)
    request = storage_service_pb2.PutInlineRequest(header=messages[0].header, values=values)
    return server.storage.PutInline(request).put


SendPut = Callable[[LiveServer, list[storage_service_pb2.PutRequest]], storage_service_pb2.PutResponse]
WAYS: list[SendPut] = [stream_put, send_small_put]


@pytest.fixture(params=WAYS)
def send_put(request: pytest.FixtureRequest) -> SendPut:
    """Each test of a put runs with a stream and with one message."""
    way: SendPut = request.param
    return way


def commit_of_four(request_id: bytes) -> commit_pb2.CommitRequest:
    return commit_pb2.CommitRequest(
        request_id=request_id, write=commit_pb2.SampleWrite(partition_id="train", row_count=4)
    )


def test_a_repeated_put_with_its_commit_is_one_put(server: LiveServer, send_put: SendPut) -> None:
    client = server.client()
    messages = put_stream(commit=commit_of_four(new_id()))
    first = send_put(server, messages)
    after = snapshot(client)
    assert send_put(server, messages) == first
    assert snapshot(client) == after
    assert client.get_data("train", global_indexes=range(4))["x"].tolist() == [0, 1, 2, 3]


def test_a_repeated_put_without_a_commit_is_one_put(server: LiveServer, send_put: SendPut) -> None:
    client = server.client()
    messages = put_stream()
    first = send_put(server, messages)
    assert client.list_partitions() == []  # not visible before its commit
    assert client.storage_stat().uncommitted_put_count == 1
    after = snapshot(client)
    assert send_put(server, messages) == first
    assert snapshot(client) == after
    commit = commit_of_four(new_id())
    commit.placement.storage.CopyFrom(first.storage)
    commit.placement.put_id = messages[0].header.put_id
    commit.columns.extend(messages[0].header.columns)
    answer = server.controller.Commit(commit)
    assert client.storage_stat().uncommitted_put_count == 0
    after = snapshot(client)
    assert server.controller.Commit(commit) == answer
    assert snapshot(client) == after
    rows = client.get_data("train", global_indexes=range(4))["j"].unbind()
    assert [row.tolist() for row in rows] == [[0, 1], [], [0, 1, 2], [0]]


@pytest.mark.parametrize("first_way", WAYS)
def test_a_put_may_be_repeated_the_other_way(server: LiveServer, send_put: SendPut, first_way: SendPut) -> None:
    client = server.client()
    for messages in (put_stream(), put_stream(commit=commit_of_four(new_id()))):
        first = first_way(server, messages)
        after = snapshot(client)
        assert send_put(server, messages) == first
        assert snapshot(client) == after


def test_a_put_is_committed_once(server: LiveServer, send_put: SendPut) -> None:
    """A second commit of a put, and a refused one, leave the first as it is."""
    client = server.client()
    messages = put_stream(commit=commit_of_four(new_id()))
    stored = send_put(server, messages)
    after = snapshot(client)
    second = commit_of_four(new_id())
    second.placement.storage.CopyFrom(stored.storage)
    second.placement.put_id = messages[0].header.put_id
    second.columns.extend(messages[0].header.columns)
    again = put_stream(commit=commit_of_four(new_id()), put_id=messages[0].header.put_id)
    for call in (lambda: server.controller.Commit(second), lambda: send_put(server, again)):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        error: Any = caught.value
        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
        assert snapshot(client) == after
    assert client.get_data("train", global_indexes=range(4))["x"].tolist() == [0, 1, 2, 3]


def test_a_put_whose_commit_has_the_id_of_another_call_is_refused(server: LiveServer, send_put: SendPut) -> None:
    client, request_id = server.client(), new_id()
    server.controller.Insert(pb.InsertRequest(request_id=request_id, write=WRITE))
    before = snapshot(client)
    with pytest.raises(grpc.RpcError) as caught:
        send_put(server, put_stream(commit=commit_of_four(request_id)))
    assert reason_of(caught.value) == "INVALID_ARGUMENT"
    assert "InsertResponse" in caught.value.details()
    assert snapshot(client) == before


def test_a_refused_commit_leaves_a_put_that_was_there_before(server: LiveServer, send_put: SendPut) -> None:
    client, messages = server.client(), put_stream()
    stored = send_put(server, messages)
    after = snapshot(client)
    refused = commit_of_four(new_id())
    refused.write.key_mode = commit_pb2.KEY_MODE_EXISTING
    refused.write.keys.extend([*"abcd"])
    with pytest.raises(grpc.RpcError):
        send_put(server, put_stream(commit=refused, put_id=messages[0].header.put_id))
    assert snapshot(client) == after
    assert client.storage_stat().uncommitted_put_count == 1
    commit = commit_of_four(new_id())
    commit.placement.storage.CopyFrom(stored.storage)
    commit.placement.put_id = messages[0].header.put_id
    commit.columns.extend(messages[0].header.columns)
    server.controller.Commit(commit)
    assert client.get_data("train", global_indexes=range(4))["x"].tolist() == [0, 1, 2, 3]


def test_a_retry_of_a_commit_with_another_put_frees_that_put(server: LiveServer, send_put: SendPut) -> None:
    """As a client makes it that sent its data again, to another storage service, while its first commit was made."""
    client, request_id, answers = server.client(), new_id(), []
    for _ in range(2):
        messages = put_stream()
        stored = send_put(server, messages)
        commit = commit_of_four(request_id)
        commit.placement.storage.CopyFrom(stored.storage)
        commit.placement.put_id = messages[0].header.put_id
        commit.columns.extend(messages[0].header.columns)
        answers.append(server.controller.Commit(commit))
    assert answers[0] == answers[1]
    assert client.storage_stat().put_count == 1
    assert client.get_data("train", global_indexes=range(4))["x"].tolist() == [0, 1, 2, 3]


def test_a_commit_for_another_partition_does_not_free_a_put(server: LiveServer, send_put: SendPut) -> None:
    client, messages, made = server.client(), put_stream(), commit_of_four(new_id())
    stored = send_put(server, messages)
    client.create_partition("narrow", max_bytes=1)
    server.controller.Insert(pb.InsertRequest(request_id=made.request_id, write=made.write))
    for request_id in (new_id(), made.request_id):
        commit = commit_of_four(request_id)
        commit.write.partition_id = "narrow"
        commit.placement.storage.CopyFrom(stored.storage)
        commit.placement.put_id = messages[0].header.put_id
        commit.columns.extend(messages[0].header.columns)
        with pytest.raises(grpc.RpcError) as caught:
            server.controller.Commit(commit)
        assert reason_of(caught.value) == "INVALID_ARGUMENT"
        assert client.storage_stat().put_count == 1
    commit.write.partition_id, commit.request_id = "train", new_id()
    server.controller.Commit(commit)
    assert client.get_data("train", global_indexes=range(4, 8))["x"].tolist() == [0, 1, 2, 3]


def test_puts_without_a_commit_expire(start_server: StartServer, send_put: SendPut) -> None:
    server = start_server(put_ttl_seconds=0.01)
    client = server.client()
    messages = put_stream()
    stored = send_put(server, messages)

    async def expire() -> int:
        return sum(server.app.controller.storages.expire())

    while not server.loop.run(expire()):
        pass
    assert client.storage_stat().used_bytes == 0
    commit = commit_of_four(new_id())
    commit.placement.storage.CopyFrom(stored.storage)
    commit.placement.put_id = messages[0].header.put_id
    commit.columns.extend(messages[0].header.columns)
    with pytest.raises(grpc.RpcError) as caught:
        server.controller.Commit(commit)
    call: Any = caught.value
    assert (call.code(), reason_of(call)) == (grpc.StatusCode.NOT_FOUND, "PUT_NOT_FOUND")
    assert client.list_partitions() == []


def test_a_put_for_another_partition_is_not_committed(server: LiveServer, send_put: SendPut) -> None:
    client = server.client()
    messages = put_stream()
    stored = send_put(server, messages)
    placement = commit_pb2.PutPlacement(storage=stored.storage, put_id=messages[0].header.put_id)
    commit = commit_pb2.CommitRequest(
        request_id=new_id(),
        write=commit_pb2.SampleWrite(partition_id="other", row_count=4),
        placement=placement,
        columns=messages[0].header.columns,
    )
    with pytest.raises(grpc.RpcError) as caught:
        server.controller.Commit(commit)
    call: Any = caught.value
    assert call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert client.list_partitions() == []


def test_confirming_and_freeing_again_changes_nothing(start_server: StartServer, send_put: SendPut) -> None:
    server = start_server(role="storage", controller="127.0.0.1:1")
    server.app.storage.keys.renew(b"c" * 16, b"k" * 32)
    as_service, stat = server.as_service, lambda: server.storage.Stat(storage_service_pb2.StatRequest())
    messages = put_stream()
    messages[0].header.controller_id = b"c" * 16
    stored = send_put(server, messages)
    put_id, boot_id = messages[0].header.put_id, stored.storage.boot_id
    cells = storage_control_pb2.PutCells(put_id=put_id)

    def update(**changes):
        request = storage_control_pb2.UpdatePutsRequest(
            **{"controller_id": b"c" * 16, "key_id": key_id(b"k" * 32), "boot_id": boot_id, **changes}
        )
        server.control.UpdatePuts(request, metadata=as_service)

    update(committed_put_ids=[put_id], boot_id=new_id())
    assert stat().uncommitted_put_count == 1  # it was another boot
    for _ in range(2):
        update(committed_put_ids=[put_id])
        assert (stat().put_count, stat().uncommitted_put_count) == (1, 0)
    update(freed=[cells], boot_id=new_id())
    server.app.storage.keys.renew(b"d" * 16, b"l" * 32)
    update(freed=[cells], controller_id=b"d" * 16, key_id=key_id(b"l" * 32))  # it is the put of another controller
    assert stat().put_count == 1
    for _ in range(2):
        update(freed=[cells])
        assert stat().used_bytes == 0
    update(committed_put_ids=[put_id])
    assert stat().put_count == 0


@pytest.mark.parametrize("wrong", [{"controller_id": b"d" * 16}, {"key_id": key_id(b"l" * 32)}, {"key_id": b""}])
def test_cells_are_freed_under_the_present_key_of_a_controller_only(
    start_server: StartServer, send_put: SendPut, wrong: dict[str, bytes]
) -> None:
    """As by a controller that has ended, or that the storage service has not heard of yet."""
    server = start_server(role="storage", controller="127.0.0.1:1")
    server.app.storage.keys.renew(b"c" * 16, b"k" * 32)
    messages = put_stream()
    messages[0].header.controller_id = b"c" * 16
    stored = send_put(server, messages)
    said = {"controller_id": b"c" * 16, "key_id": key_id(b"k" * 32), **wrong}
    cells = storage_control_pb2.PutCells(put_id=messages[0].header.put_id)
    free = storage_control_pb2.UpdatePutsRequest(boot_id=stored.storage.boot_id, freed=[cells], **said)
    with pytest.raises(grpc.RpcError) as caught:
        server.control.UpdatePuts(free, metadata=server.as_service)
    call: Any = caught.value
    assert call.code() == grpc.StatusCode.UNAVAILABLE
    assert "is not registered with controller" in call.details()
    assert server.storage.Stat(storage_service_pb2.StatRequest()).put_count == 1


def test_placing_and_announcing_change_nothing_that_is_stored(server: LiveServer) -> None:
    client = server.client()
    put_train(client)
    before = snapshot(client)
    placed = server.controller.PlacePut(pb.PlacePutRequest(partition_id="p", size_bytes=100))
    assert placed.max_granted_put_bytes > 1 << 60  # there is no other
    assert placed.embedded
    assert placed.storages[0].boot_id == client.storage_stat().boot_id
    endpoint = metadata_pb2.StorageEndpoint(storage_id="other", boot_id=new_id(), address="127.0.0.1:1")
    announced = storage_registry_pb2.RegisterStorageRequest(storage=endpoint, max_bytes=1 << 50)
    answers = [server.registry.RegisterStorage(announced, metadata=server.as_service) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].heartbeat_interval.ToNanoseconds() > 0
    placed = server.controller.PlacePut(pb.PlacePutRequest(partition_id="p", size_bytes=100))
    assert list(placed.storages) == [endpoint]  # it has more capacity
    assert not placed.embedded
    assert placed.max_granted_put_bytes == 1 << 20
    assert snapshot(client) == before


def test_a_reset_without_an_epoch_that_is_sent_twice_ends_one_epoch(server: LiveServer) -> None:
    put_train(server.client())
    make_claims(server)
    request = pb.ResetConsumptionRequest(**ids(new_id(), task_name="held"))
    assert [server.controller.ResetConsumption(request).epoch for _ in range(3)] == [1, 1, 1]
    request.request_id = new_id()
    assert server.controller.ResetConsumption(request).epoch == 2


def test_an_epoch_of_zero_is_not_one_left_out(server: LiveServer) -> None:
    put_train(server.client())
    make_claims(server)
    server.controller.ResetConsumption(pb.ResetConsumptionRequest(**ids(new_id(), task_name="held")))
    with pytest.raises(grpc.RpcError) as caught:
        server.controller.ResetConsumption(pb.ResetConsumptionRequest(**ids(new_id(), task_name="held", epoch=0)))
    assert reason_of(caught.value) == "STALE_EPOCH"


def test_a_publication_that_names_a_task_twice_is_refused_and_changes_nothing(server: LiveServer) -> None:
    """Made again from the log, the second of the two would change nothing."""
    put_train(server.client())
    rank = {"task_name": "ranked", "dp_rank": 0, "dp_size": 1, "batch_index": 0, "batch_size": 1}
    server.controller.GetMeta(pb.GetMetaRequest(**CLAIM | rank, request_id=bytes(16)))
    trained = [pb.TrainedBatches(partition_id="train", task_name="ranked", batch_index=0)] * 2
    with pytest.raises(grpc.RpcError) as raised:
        server.controller.PublishVersion(
            pb.PublishVersionRequest(request_id=new_id(), version=1, policy="p", trained=trained)
        )
    assert reason_of(raised.value) == "INVALID_ARGUMENT"
    with pytest.raises(tq.errors.PolicyNotFoundError):
        server.client().get_version(policy="p")
