"""Garbage on every RPC: the right error, nothing visible, bytes freed, and the service goes on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from live_server import LiveServer, StartServer
from rpc_methods import CONTROL, DESCRIBED, INTERNAL, REGISTRY
from rpc_samples import call_raw, new_id, put_train, reason_of, snapshot, still_works

import tq_service as tq
from tq_service.internal.v1 import storage_control_pb2
from tq_service.server.receipts import key_id
from tq_service.v1 import commit_pb2, metadata_pb2, storage_service_pb2
from tq_service.v1 import controller_service_pb2 as controller_pb

CODE = grpc.StatusCode
PUBLIC = [name for name in DESCRIBED if name not in INTERNAL]
GARBAGE = [
    b"\xff" * 40,
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x12\x03abc\x80",
    bytes(range(256)) * 4,
    b"\x0a\x02\xc3\x28\x07",
]

WRITE = commit_pb2.SampleWrite(
    partition_id="train",
    row_count=2,
    keys=["a", "b"],
    groups=["g", "g"],
    custom_meta=[
        metadata_pb2.MetaColumn(name="version", int64_values=metadata_pb2.Int64Values(values=[1, 2])),
    ],
)
COLUMN = metadata_pb2.ColumnHeader(
    spec=metadata_pb2.FieldSpec(
        name="score", dtype="float32", layout=metadata_pb2.LAYOUT_DENSE, row_shape=[3], row_shape_known=True
    ),
    value_bytes=24,
)

# What may come of bytes that happen to be a message: refusals whose cause is the caller.
REFUSALS = {CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.FAILED_PRECONDITION, CODE.DATA_LOSS, CODE.ALREADY_EXISTS}


@pytest.fixture
def internal_server(start_server: StartServer) -> Callable[[str], LiveServer]:
    """Returns a server that has an internal method."""

    def start(method: str) -> LiveServer:
        if method.startswith(REGISTRY):
            return start_server(role="controller")
        return start_server(role="storage", controller="127.0.0.1:1")

    return start


@pytest.mark.parametrize("method", INTERNAL)
def test_garbage_in_calls_between_services_is_an_invalid_argument(
    internal_server: Callable[[str], LiveServer], method: str
) -> None:
    server = internal_server(method)
    for garbage in GARBAGE:
        with pytest.raises(grpc.RpcError) as caught:
            call_raw(server, method, [garbage], metadata=server.as_service)
        call: Any = caught.value
        assert (call.code(), reason_of(call)) == (CODE.INVALID_ARGUMENT, "INVALID_ARGUMENT")


def test_garbled_calls_between_services_never_end_in_an_internal_error(
    internal_server: Callable[[str], LiveServer],
) -> None:
    random_ = random.Random(7)
    server = internal_server(CONTROL)
    cells = storage_control_pb2.PutCells(put_id=new_id(), field_names=["x"], first_rows=[0], row_counts=[2])
    boot_id = server.app.storage.engine.boot_id
    server.app.storage.keys.renew(b"c" * 16, b"k" * 32)
    for name, request in {
        "UpdatePuts": storage_control_pb2.UpdatePutsRequest(
            boot_id=boot_id,
            controller_id=b"c" * 16,
            key_id=key_id(b"k" * 32),
            committed_put_ids=[new_id()],
            freed=[cells],
        ),
        "ReconcilePuts": storage_control_pb2.ReconcilePutsRequest(
            boot_id=boot_id, controller_id=new_id(), key_id=b"k" * 8, cells=[cells]
        ),
    }.items():
        for _ in range(25):
            try:
                call_raw(
                    server, CONTROL + name, [garbled(random_, request.SerializeToString())], metadata=server.as_service
                )
            except grpc.RpcError as error:
                call: Any = error
                is_refused = call.code() in REFUSALS or "registered with" in call.details()
                assert is_refused, f"{name}: {call.code()} {call.details()}"
                assert reason_of(call)


@pytest.mark.parametrize("method", PUBLIC)
def test_bytes_that_are_no_message_are_an_invalid_argument(server: LiveServer, method: str) -> None:
    client = server.client()
    put_train(client)
    before = snapshot(client)
    for garbage in GARBAGE:
        with pytest.raises(grpc.RpcError) as caught:
            call_raw(server, method, [garbage])
        call: Any = caught.value
        assert call.code() == CODE.INVALID_ARGUMENT
        assert reason_of(call) == "INVALID_ARGUMENT"
        assert "cannot be read" in call.details() or "begin with its header" in call.details()
    assert snapshot(client) == before
    still_works(client)


def requests_of_all_methods(meta: tq.BatchMeta) -> dict[str, Message]:
    """Return a well-formed request for each method without a stream of requests, to be garbled."""
    requests = {"Commit": commit_request(), "PutInline": put_inline_request(), "GetMeta": get_meta_request()}
    for full_name in PUBLIC:
        described = DESCRIBED[full_name]
        if not described.client_streaming and described.name not in requests:
            requests[described.name] = example_of(described.input_type, meta)
    return requests


def commit_request() -> commit_pb2.CommitRequest:
    endpoint = metadata_pb2.StorageEndpoint(storage_id="other", boot_id=new_id(), address="127.0.0.1:1")
    placement = commit_pb2.PutPlacement(storage=endpoint, put_id=new_id())
    return commit_pb2.CommitRequest(request_id=new_id(), write=WRITE, placement=placement, columns=[COLUMN])


def put_inline_request() -> storage_service_pb2.PutInlineRequest:
    header = storage_service_pb2.PutHeader(
        put_id=new_id(),
        row_count=2,
        columns=[COLUMN],
        size_bytes=24,
        partition_id="train",
        commit=commit_pb2.CommitRequest(request_id=new_id(), write=WRITE),
    )
    return storage_service_pb2.PutInlineRequest(header=header, values=bytes(24))


def get_meta_request() -> controller_pb.GetMetaRequest:
    return controller_pb.GetMetaRequest(
        request_id=new_id(),
        partition_id="train",
        task_name="t",
        data_fields=["score"],
        batch_size=1,
        dp_rank=0,
        dp_size=1,
        batch_index=0,
    )


def example_of(kind: Descriptor, meta: tq.BatchMeta) -> Message:
    """Return a request whose fields, those that have a value below, say something sensible."""
    sensible: dict[str, Any] = {
        "partition_id": "train",
        "policy": "default",
        "version": 3,
        "dp_size": 2,
        "incarnation": meta.incarnation,
        "task_name": "t",
        "data_fields": ["score"],
        "global_indexes": [0, 1],
        "request_id": new_id(),
        "claim_request_id": new_id(),
        "lease": {"seconds": 5},
        "fields": [COLUMN.spec],
        "write": WRITE,
        "custom_meta": WRITE.custom_meta,
        "groups": ["g0"],
        "lengths": [0, 0],
        "keys": ["k0"],
        "prefix": "t",
        "page_size": 3,
        "name": "one",
        "size_bytes": 100,
        "boot_id": new_id(),
        "put_ids": [new_id()],
        "runs": [metadata_pb2.CellRuns(field_names=["score"], put_indexes=[0], first_rows=[0], row_counts=[1])],
    }
    values = {name: sensible[name] for name in kind.fields_by_name if name in sensible}
    if "global_indexes" in values:  # samples are named by these, by keys or by groups
        values.pop("keys", None)
        values.pop("groups", None)
    if "lengths" in values:
        values["claim"] = metadata_pb2.LeasedClaim(task_name="t", claim_request_id=new_id())
    if "get" in kind.fields_by_name:
        values["get"] = example_of(kind.fields_by_name["get"].message_type, meta)
    return GetMessageClass(kind)(**values)


def test_requests_say_something_sensible_before_they_are_garbled(start_server: StartServer) -> None:
    names = {DESCRIBED[name].name: name for name in PUBLIC if not DESCRIBED[name].client_streaming}
    for name, method in names.items():
        server = start_server()
        message = requests_of_all_methods(put_train(server.client()))[name].SerializeToString()
        assert message or not DESCRIBED[method].input_type.fields, name
        try:
            call_raw(server, method, [message])
        except grpc.RpcError as error:
            call: Any = error
            assert call.code() not in {CODE.INVALID_ARGUMENT, CODE.DEADLINE_EXCEEDED}, f"{name}: {call.details()}"


def garbled(random_: random.Random, data: bytes) -> bytes:
    """Return bytes with some of them changed, dropped or added."""
    changed = bytearray(data)
    for _ in range(random_.randint(1, 6)):
        place = random_.randrange(len(changed) + 1)
        match random_.randrange(3):
            case 0 if place < len(changed):
                changed[place] = random_.randrange(256)
            case 1:
                del changed[place : place + random_.randint(1, 4)]
            case _:
                changed[place:place] = random_.randbytes(random_.randint(1, 4))
    return bytes(changed)


def test_garbled_requests_never_end_in_an_internal_error(server: LiveServer) -> None:
    client = server.client()
    random_ = random.Random(7)
    for name in requests_of_all_methods(put_train(client)):
        (method,) = (full for full in PUBLIC if DESCRIBED[full].name == name)
        for _ in range(25):
            meta = client.lookup_samples("train", ["k0"])[0] if client.list_partitions("train") else put_train(client)
            message = garbled(random_, requests_of_all_methods(meta)[name].SerializeToString())
            try:
                call_raw(server, method, [message], timeout=0.2 if name == "Watch" else 20.0)
            except grpc.RpcError as error:
                call: Any = error
                if name == "Watch" and call.code() is CODE.DEADLINE_EXCEEDED:
                    continue  # it was taken, and goes on for as long as its caller likes
                # A garbled name may be that of a storage service which has yet to register.
                is_refused = call.code() in REFUSALS or "has not yet registered" in call.details()
                assert is_refused, f"{name}: {call.code()} {call.details()}"
                assert reason_of(call)
    still_works(client)


NO_JSON = ["", "nul", "NaN", "1e999", '"\\ud800"', "[" * 10_000, "[" * 33 + "]" * 33, '"' + "x" * 20_000 + '"']
EXTREME_WRITES: list[dict[str, Any]] = [
    {"row_count": 2**62},
    {"row_count": -1},
    {"row_count": -1, "custom_meta": [metadata_pb2.MetaColumn(name="v", string_values=metadata_pb2.StringValues())]},
    {"partition_id": "x" * 9999},
    {"partition_id": "a\nb"},
    {"partition_id": ""},
    {"row_count": 2, "global_indexes": [0, 0]},
    {"row_count": 2, "global_indexes": [0, -5]},
    {"global_indexes": [0], "incarnation": b""},
    {"global_indexes": [0], "keys": ["k0"]},
    {"group_size": -5, "groups": ["n"]},
    {"key_mode": 77, "keys": ["n"]},
    {"keys": [""]},
    {"keys": ["n", "m"]},
    {"row_count": 2, "keys": ["n", "n"]},
    {"groups": ["n", "m"]},
    {"row_count": 1 << 15, "keys": [str(number) for number in range(1 << 15)]},
    {"row_count": 1 << 15, "groups": ["g"] * (1 << 15)},
    {"custom_meta": [metadata_pb2.MetaColumn(name="n", string_values=metadata_pb2.StringValues(values=["n", "m"]))]},
    {"custom_meta": [metadata_pb2.MetaColumn(name="version")]},
    {"custom_meta": [metadata_pb2.MetaColumn(name="", int64_values=metadata_pb2.Int64Values(values=[1]))]},
    {"custom_meta": [metadata_pb2.MetaColumn(name="n", int64_values=metadata_pb2.Int64Values(values=[1, 2]))]},
    {"custom_meta": [metadata_pb2.MetaColumn(name="n", kinds=b"\1\1", bool_values=metadata_pb2.BoolValues())]},
    {"custom_meta": [metadata_pb2.MetaColumn(name="n", kinds=b"\4", json_values=["1"])]},
    {"custom_meta": [metadata_pb2.MetaColumn(name="n", kinds=b"\2")]},
    {"custom_meta": [metadata_pb2.MetaColumn(name="n", json_values=["1", "2"])]},
    *({"custom_meta": [metadata_pb2.MetaColumn(name="n", json_values=[text])]} for text in NO_JSON),
]
EXTREME_CLAIMS: list[dict[str, Any]] = [
    {"batch_size": 2**62},
    {"min_batch_size": -1},
    {"micro_batch_size": -(2**62)},
    {"max_wait": {"seconds": -1}},
    {"max_wait": {"nanos": -1}},
    {"max_wait": {"seconds": 315_576_000_001}},
    {"max_wait": {"seconds": 1, "nanos": -1}},
    {"max_wait": {"nanos": 10**9}},
    {"lease": {}},
    {"lease": {"seconds": -1}},
    {"lease": {"seconds": 86_401}},
    {"lease": {"seconds": -(2**63)}},
    {"lease": {"seconds": -1, "nanos": 1}},
    {"lease": {"seconds": 1, "nanos": -(2**31)}},
    {"dp_rank": 0, "dp_size": 2**31 - 1, "batch_index": 0},
    {"dp_rank": 0, "dp_size": 1, "batch_index": -(2**62)},
    {"batch_unit": 77},
    {"request_id": b""},
    {"request_id": bytes(17)},
    {"task_name": "x" * 9999},
    {"data_fields": [""]},
    {"where": [controller_pb.Condition(column="version")]},
    {"where": [controller_pb.Condition(operator=1, values=[controller_pb.MetaValue(int64_value=1)])]},
    {"where": [controller_pb.Condition(column="version", operator=1, values=[controller_pb.MetaValue()])]},
    {"sampler": "os:system"},
]
TRAIN_IDS = {"request_id": bytes(16), "partition_id": "train"}
EXTREME_REQUESTS: list[tuple[str, Message]] = [
    ("CreatePartition", controller_pb.CreatePartitionRequest(**{**TRAIN_IDS, "partition_id": ""})),
    (
        "CreatePartition",
        controller_pb.CreatePartitionRequest(**{**TRAIN_IDS, "partition_id": "n"}, expected_samples=-1),
    ),
    ("SealPartition", controller_pb.SealPartitionRequest(partition_id="train")),
    ("ClearPartition", controller_pb.ClearPartitionRequest(partition_id="train", request_id=b"short")),
    ("ClearSamples", controller_pb.ClearSamplesRequest(partition_id="train", global_indexes=[0])),
    ("ClearFields", controller_pb.ClearFieldsRequest(**TRAIN_IDS, global_indexes=[0])),
    ("ClearFields", controller_pb.ClearFieldsRequest(**TRAIN_IDS, global_indexes=[0], data_fields=["x" * 9999])),
    ("SetCustomMeta", controller_pb.SetCustomMetaRequest(**TRAIN_IDS)),
    ("SetCustomMeta", controller_pb.SetCustomMetaRequest(**TRAIN_IDS, global_indexes=[0, 0])),
    ("TruncateSamples", controller_pb.TruncateSamplesRequest(**TRAIN_IDS, global_indexes=[0], lengths=[0])),
    ("Locate", controller_pb.LocateRequest(partition_id="train", global_indexes=[0], keys=["k0"])),
    ("Locate", controller_pb.LocateRequest(partition_id="train", global_indexes=[-(2**63), 2**63 - 1])),
    ("CheckProduction", controller_pb.CheckProductionRequest(partition_id="train")),
    ("ReleaseClaim", controller_pb.ReleaseClaimRequest(**TRAIN_IDS, task_name="t")),
    ("PlacePut", controller_pb.PlacePutRequest(partition_id="p", size_bytes=-1)),
]


def test_requests_of_extreme_values_are_refused(server: LiveServer) -> None:
    client = server.client()
    meta = put_train(client)
    write = {"partition_id": "train", "row_count": 1, "incarnation": meta.incarnation}
    claim = {**TRAIN_IDS, "task_name": "t", "data_fields": ["score"], "batch_size": 1}
    requests: list[tuple[str, Message]] = [
        *(
            (name, kind(request_id=new_id(), write=commit_pb2.SampleWrite(**{**write, **changes})))
            for changes in EXTREME_WRITES
            for name, kind in (("Insert", controller_pb.InsertRequest), ("Commit", commit_pb2.CommitRequest))
        ),
        *(("GetMeta", controller_pb.GetMetaRequest(**{**claim, **changes})) for changes in EXTREME_CLAIMS),
        *EXTREME_REQUESTS,
    ]
    before = snapshot(client)
    for name, request in requests:
        with pytest.raises(grpc.RpcError) as caught:
            pytest.fail(f"{name} {request} was answered: {getattr(server.controller, name)(request, timeout=20)}")
        call: Any = caught.value
        assert call.code() in {CODE.INVALID_ARGUMENT, CODE.NOT_FOUND}, f"{request}: {call.code()} {call.details()}"
        assert snapshot(client) == before, str(request)
    still_works(client)
