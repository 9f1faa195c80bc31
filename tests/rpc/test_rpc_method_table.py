"""The table of methods: the protos say enough of each, and what has no complete rule is for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from live_server import StartServer
from rpc_methods import CONTROLLER, DESCRIBED, INTERNAL, SERVED, STORAGE, call, is_idempotent
from rpc_samples import new_id, put_train

import tq_service as tq
from tq_service.internal.v1 import cluster_pb2
from tq_service.server.rpc.methods import METHODS, method_of
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.v1.method_rule_pb2 import PARTITIONS_NONE, ROLE_READ, MethodRule, Role, rule
from tq_service.wire.columns import encode_header
from tq_service.wire.connection import ROLES
from tq_service.wire.encoding import encode_columns
from tq_service.wire.error_table import from_rpc_error, status_from_trailers


def test_every_method_of_the_protos_has_a_rule() -> None:
    (of_cluster,) = cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"].methods  # served by a cluster alone
    described_methods = {**DESCRIBED, "/tq_service.internal.v1.ClusterService/FetchSnapshot": of_cluster}
    for name, described in described_methods.items():
        options: Any = described.GetOptions()
        assert options.HasExtension(rule), name
        assert METHODS[name].roles, f"the rule of {name} says too little, so nobody may call it"
        assert is_idempotent(described), f"{name} has no idempotency_level"
    assert {name for name in METHODS if name.startswith("/tq_service.")} == described_methods.keys()
    assert METHODS["/tq_service.internal.v1.ClusterService/FetchSnapshot"].is_internal


def test_the_roles_of_the_protos_are_those_of_tokens() -> None:
    assert tuple(name.removeprefix("ROLE_").lower() for name in Role.keys()[1:]) == ROLES


def test_internal_methods_lose_data_in_other_hands() -> None:
    assert {METHODS[name].short_name for name in INTERNAL} == {
        "RegisterStorage",
        "Adopt",
        "ReconcilePuts",
        "UpdatePuts",
    }


def partition_fields(message: Descriptor) -> Iterator[str]:
    """Yield the paths to fields that name a partition, or a policy, which is named like one."""
    for field in message.fields:
        if field.name in ("partition_id", "policy"):
            yield field.name
        elif field.message_type is not None and field.message_type.file.package.startswith("tq_service"):
            yield from (f"{field.name}.{path}" for path in partition_fields(field.message_type))


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_partition_that_a_request_names_is_looked_at(name: str) -> None:
    described, method = DESCRIBED[name], METHODS[name]
    paths = list(partition_fields(described.input_type))
    if method.concerns_all:
        return
    for path in paths:
        request = message = described.input_type._concrete_class()
        *parents, last = path.split(".")
        for parent in parents:
            below = getattr(message, parent)
            message = below.add() if message.DESCRIPTOR.fields_by_name[parent].is_repeated else below
        setattr(message, last, "secret")
        assert "secret" in method.partitions(request), f"{name} does not look at {path}"
    assert bool(paths) == bool(method.partitions(described.input_type._concrete_class()))


def test_a_request_without_the_message_that_names_its_partition_names_none_that_a_token_could_be_for() -> None:
    assert METHODS[CONTROLLER + "Insert"].partitions(pb.InsertRequest()) == [""]
    for message in (storage_pb.PutRequest(frame=b"x"), memoryview(b"x"), None):
        assert METHODS[STORAGE + "Put"].partitions(message) == [""]


def test_a_part_that_is_decoded_instead_of_its_message_is_looked_at_like_it() -> None:
    header = storage_pb.PutHeader(partition_id="a")
    assert METHODS[STORAGE + "Put"].partitions(header) == ["a"]
    header.commit.write.partition_id = "b"
    for message in (header, storage_pb.PutRequest(header=header)):
        assert METHODS[STORAGE + "Put"].partitions(message) == ["a", "b"]
    put_ids = METHODS[STORAGE + "GetInline"].put_ids
    assert put_ids is not None
    assert list(put_ids(storage_pb.GetInlineRequest(get=storage_pb.GetRequest(put_ids=[b"1", b"2"])))) == [b"1", b"2"]
    assert list(put_ids(storage_pb.GetInlineRequest())) == []


def described_with(method_rule: MethodRule | None) -> Any:
    options: Any = MethodOptions()
    if method_rule is not None:
        options.Extensions[rule].CopyFrom(method_rule)
    return SimpleNamespace(
        GetOptions=lambda: options,
        containing_service=SimpleNamespace(full_name="test.Service"),
        name="Method",
        input_type=pb.InsertRequest.DESCRIPTOR,
        client_streaming=False,
        server_streaming=True,
    )


@pytest.mark.parametrize(
    "method_rule",
    [None, MethodRule(), MethodRule(roles=[ROLE_READ]), MethodRule(partitions=PARTITIONS_NONE)],
)
def test_a_method_of_which_too_little_is_said_is_for_nobody(method_rule: MethodRule | None) -> None:
    method = method_of(described_with(method_rule))
    assert not method.allowed_roles
    assert not method.is_open
    assert not method.is_answer_durable
    assert method.has_response_stream


@pytest.mark.parametrize(
    "path", ["partition_id", "write.partition", "write", "request_id", "write.partition_id.x", "x.y"]
)
def test_a_rule_that_names_no_field_stops_the_service_from_starting(path: str) -> None:
    with pytest.raises(ValueError, match=r"correct .* in its rule"):
        method_of(described_with(MethodRule(roles=[ROLE_READ], partition_fields=[path])))


def test_no_method_but_those_that_wait_is_refused_for_waiting_calls(start_server: StartServer) -> None:
    server = start_server(max_waiting_calls=1)
    client = server.client()
    put_train(client)
    column = encode_header(encode_columns({"x": np.zeros(1)})[0])
    filled: dict[str, Any] = {
        "partition_id": "train",
        "write": commit_pb2.SampleWrite(partition_id="train", row_count=1),
        "max_wait": {"seconds": 1},
        "task_name": "task",
        "data_fields": ["missing"],
        "batch_size": 1,
        "get": storage_pb.GetRequest(boot_id=server.app.storage.engine.boot_id),
    }
    server.app.waiting.count = 1
    refused = set()
    for name in SERVED:
        kind = DESCRIBED[name].input_type
        header = storage_pb.PutHeader(
            put_id=new_id(), partition_id="train", row_count=1, columns=[column], size_bytes=column.value_bytes
        )
        values = {**filled, "header": header, "request_id": new_id()}
        request = kind._concrete_class(**{field: values[field] for field in kind.fields_by_name.keys() & values.keys()})
        try:
            call(server.channel, name, request)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            meant = from_rpc_error(code, details, status_from_trailers(error.trailing_metadata()))
            if isinstance(meant, tq.errors.LimitExceededError):
                assert meant.metadata["limit_name"] == "max_waiting_calls"
                refused.add(name)
    assert {CONTROLLER + "GetMeta", STORAGE + "Put", STORAGE + "PutInline"} <= refused
    assert refused <= {method.name for method in METHODS.values() if method.waits}
