"""Limits of the service: each is a setting, is refused with what was got and what is allowed, and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from live_server import AnyClient, LiveServer, StartServer
from rpc_samples import TRAIN, new_id, put_train, snapshot

import tq_service as tq
from tq_service.server.rpc.inbox import LEAST_PROGRESS_BYTES
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.wire.columns import encode_header
from tq_service.wire.encoding import encode_columns
from tq_service.wire.error_table import from_rpc_error, status_from_trailers

Call = Callable[[AnyClient], object]


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def put(partition_id: str = "train", **arguments: Any) -> Call:
    return lambda client: client.put(partition_id, **{"data": {"input_ids": [np.arange(3)]}, **arguments})


COUNTS: dict[str, tuple[dict[str, int], Call]] = {
    "partitions by create": ({"max_partitions": 1}, lambda client: client.create_partition("second")),
    "partitions by put": ({"max_partitions": 1}, put(partition_id="second")),
    "samples by put": ({"max_samples": 4}, put()),
    "samples of another partition": ({"max_samples": 4}, put(partition_id="second")),
    "samples by insert": ({"max_samples": 4}, lambda client: client.insert("train", 1)),
    "fields by put": ({"max_fields": 2}, put(data={"one_more": np.zeros(1)})),
    "fields by create": (
        {"max_fields": 2},
        lambda client: client.create_partition("p", fields=[tq.FieldSpec(name) for name in "abc"]),
    ),
    "meta columns by put": ({"max_meta_columns": 2}, put(custom_meta=[{"one_more": 1}])),
    "meta columns by set": (
        {"max_meta_columns": 2},
        lambda client: client.set_custom_meta(client.lookup_samples("train", keys=["k0"])[0], [{"one_more": 1}]),
    ),
    "puts": ({"max_puts": 1}, put()),
}  # fmt: skip
ARGUMENTS: dict[str, tuple[dict[str, int], Call]] = {
    "key": ({"max_name_length": 20}, put(keys=["k" * 21])),
    "group": ({"max_name_length": 20}, put(groups=["g" * 21])),
    "field": ({"max_name_length": 20}, put(data={"f" * 21: np.zeros(1)})),
    "meta column": ({"max_name_length": 20}, put(custom_meta=[{"c" * 21: 1}])),
    "task": (
        {"max_name_length": 20},
        lambda client: client.get_meta(**{**TRAIN, "task_name": "t" * 21}, batch_size=1, max_wait=0.0),
    ),
    "meta of a sample": ({"max_sample_meta_bytes": 64}, put(custom_meta=[{"total_lengths": 1, "text": "ä" * 40}])),
    "numbers of a sample": (
        {"max_sample_meta_bytes": 64},
        put(custom_meta=[{f"n{number}": number for number in range(9)}]),
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_one_too_many_is_refused(start_server: StartServer, name: str) -> None:
    flags, call = COUNTS[name]
    client = start_server(**flags).client()
    put_train(client)
    before = snapshot(client)
    with pytest.raises(tq.errors.LimitExceededError) as caught:
        call(client)
    ((limit_name, limit),) = flags.items()
    said = {"limit_name": limit_name, "got": str(limit + 1), "limit": str(limit)}
    assert said.items() <= caught.value.metadata.items()
    assert limit_name in caught.value.message
    assert snapshot(client) == before


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_too_large_is_refused(start_server: StartServer, name: str) -> None:
    flags, call = ARGUMENTS[name]
    client = start_server(**flags).client()
    put_train(client)
    before = snapshot(client)
    with pytest.raises(tq.errors.InvalidArgumentError) as caught:
        call(client)
    ((limit_name, limit),) = flags.items()
    assert caught.value.metadata["limit_name"] == limit_name
    assert caught.value.metadata["limit"] == str(limit)
    assert int(caught.value.metadata["got"]) > limit
    assert limit_name in caught.value.message
    assert snapshot(client) == before


def test_tasks_are_bounded_however_they_are_named(start_server: StartServer) -> None:
    server = start_server(max_tasks=1)
    client = server.client()
    put_train(client)
    client.get_meta(**TRAIN, batch_size=1)
    with pytest.raises(tq.errors.LimitExceededError):
        client.get_meta(**{**TRAIN, "task_name": "second"}, batch_size=1, max_wait=5.0)
    release = pb.ReleaseClaimRequest(
        request_id=new_id(), partition_id="train", task_name="second", claim_request_id=new_id()
    )
    with pytest.raises(grpc.RpcError) as caught:
        server.controller.ReleaseClaim(release)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert [task.task_name for task in client.describe_partition("train").tasks] == ["update_actor"]


def test_a_full_service_takes_columns_and_as_many_samples_as_were_cleared(start_server: StartServer) -> None:
    client = start_server(max_samples=5).client()
    meta = put_train(client)
    client.put(meta, {"reward": np.zeros(4)})
    upsert: dict[str, Any] = {"target": "train", "key_mode": "upsert"}
    client.put(data={"reward": np.ones(4)}, keys=["k0", "k1", "k2", "k3"], **upsert)
    client.put(data={"reward": np.ones(5)}, keys=["k0", "k1", "k2", "k3", "k4"], **upsert)
    with pytest.raises(tq.errors.LimitExceededError):
        client.put(data={"reward": np.ones(2)}, keys=["k4", "k5"], **upsert)
    client.clear_samples("train", keys=["k0", "k1"])
    client.insert("second", 2)
    with pytest.raises(tq.errors.LimitExceededError):
        client.insert("third", 1)
    client.clear_partition("second")
    client.insert("third", 2)


def waiting_claim(server: LiveServer, channel: grpc.Channel | None = None) -> Any:
    call = server.controller.GetMeta if channel is None else _get_meta(channel)
    return call.future(
        pb.GetMetaRequest(
            request_id=new_id(), partition_id="later", task_name="t", data_fields=["x"], batch_size=1,
            max_wait={"seconds": 60},
        ),
        timeout=60,
    )  # fmt: skip


def _get_meta(channel: grpc.Channel) -> Any:
    return channel.unary_unary(
        "/tq_service.v1.ControllerService/GetMeta",
        request_serializer=pb.GetMetaRequest.SerializeToString,
        response_deserializer=pb.GetMetaResponse.FromString,
    )


def error_of(call: Any) -> tq.TqError:
    error = call.exception(timeout=20)
    return from_rpc_error(error.code(), error.details(), status_from_trailers(error.trailing_metadata()))


@pytest.mark.parametrize(
    ("flags", "limit_name"),
    [
        ({"max_waiting_calls": 3}, "max_waiting_calls"),
        ({"max_waiting_calls_per_client": 3}, "max_waiting_calls_per_client"),
        ({"max_calls": 3}, "max_calls"),
    ],
)
def test_calls_beyond_what_may_wait_are_refused_and_the_others_go_on(
    start_server: StartServer, flags: dict[str, int], limit_name: str
) -> None:
    server = start_server(**flags)
    other = server.client()
    calls = [waiting_claim(server) for _ in range(3)]
    until(lambda: server.app.waiting.count == 3)
    refused = error_of(waiting_claim(server))
    assert isinstance(refused, tq.errors.LimitExceededError)
    assert refused.retry_after_seconds
    assert refused.metadata["limit_name"] == limit_name
    assert server.app.calls.rejected == {limit_name: 1}
    assert other.health()  # whatever there is too much of
    if limit_name == "max_waiting_calls_per_client":  # one client cannot take all
        with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            calls.append(waiting_claim(server, channel))
            until(lambda: server.app.waiting.count == 4)
            calls.pop().cancel()
    calls.pop().cancel()
    until(lambda: server.app.calls.count == 2)
    other.insert("later", 1)
    other.put("later", {"x": np.zeros(1)})
    until(lambda: any(call.done() for call in calls))
    assert [list(call.result().meta.global_indexes) for call in calls if call.done()] == [[1]]
    for call in calls:
        call.cancel()
    until(lambda: server.app.waiting.count == 0)


def test_a_claim_that_need_not_wait_is_answered_when_no_more_may_wait(start_server: StartServer) -> None:
    server = start_server(max_waiting_calls=1)
    client = server.client()
    client.insert("train", 1)
    client.put("train", {"x": np.zeros(2)})
    waiting = waiting_claim(server)
    until(lambda: server.app.waiting.count == 1)
    arguments = {"partition_id": "train", "task_name": "task", "data_fields": ["x"], "batch_size": 1}
    assert client.get_meta(**arguments, max_wait=5).size == 1
    with pytest.raises(tq.errors.LimitExceededError):
        client.get_meta(**arguments | {"batch_size": 9}, max_wait=5, timeout=1)
    assert server.app.waiting.count == 1
    waiting.cancel()
    until(lambda: server.app.waiting.count == 0)


def test_metadata_beyond_the_limit_is_refused_and_the_connection_stays(start_server: StartServer) -> None:
    server = start_server(max_metadata_bytes=4096)
    list_partitions = server.controller.ListPartitions
    for size in (6_000, 100_000):
        with pytest.raises(grpc.RpcError) as caught:
            list_partitions(pb.ListPartitionsRequest(), metadata=(("x-large", "a" * size),), timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert "metadata size" in caught.value.details()  # type: ignore[attr-defined]
    assert not list_partitions(pb.ListPartitionsRequest(), timeout=20).partitions


def test_connections_beyond_the_limit_are_closed_and_the_others_go_on(start_server: StartServer) -> None:
    server = start_server(max_connections=1, shared_memory="off")
    server.controller.ListPartitions(pb.ListPartitionsRequest(), timeout=20)
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            _get_meta(channel)(pb.GetMetaRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    server.controller.ListPartitions(pb.ListPartitionsRequest(), timeout=20)


# Slow streams


def header_of(data: dict[str, Any]) -> storage_pb.PutHeader:
    columns = encode_columns(data)
    return storage_pb.PutHeader(
        put_id=new_id(), row_count=columns[0].row_count, columns=[encode_header(column) for column in columns],
        size_bytes=sum(column.value_bytes for column in columns), partition_id="p",
    )  # fmt: skip


@pytest.mark.parametrize("what", ["nothing", "the header alone", "a drip"])
def test_a_put_that_stalls_is_ended_and_its_capacity_given_back(start_server: StartServer, what: str) -> None:
    server = start_server(stall_seconds=0.5)
    client = server.client()
    header = header_of({"x": np.zeros(2_000_000, np.uint8)})
    ended = []

    def parts() -> Iterator[storage_pb.PutRequest]:
        if what != "nothing":
            yield storage_pb.PutRequest(header=header)
        if what == "a drip":  # less than counts as progress, though never silent for long
            for _ in range(int(20 / 0.05)):
                if ended:
                    return
                yield storage_pb.PutRequest(frame=bytes(LEAST_PROGRESS_BYTES // 100))
                time.sleep(0.05)
        until(lambda: bool(ended))

    call = server.storage.Put.future(parts(), timeout=60)
    if what == "the header alone":
        until(lambda: client.storage_stat().used_bytes == 2_000_000)
    refused = error_of(call)
    ended.append(True)
    assert isinstance(refused, tq.errors.DeadlineError)
    assert "0.5 s" in refused.message
    until(lambda: client.storage_stat().used_bytes == 0)


def test_a_reader_that_does_not_read_pins_its_cells_only_for_so_long(start_server: StartServer) -> None:
    server = start_server(stall_seconds=2.0, shared_memory="off")
    client = server.client()
    meta = client.put("p", {"x": np.zeros((64, 1_000_000), np.uint8)})
    located = server.controller.Locate(pb.LocateRequest(partition_id="p", global_indexes=meta.global_indexes)).meta
    get = storage_pb.GetRequest(
        boot_id=located.locations.storages[0].boot_id,
        put_ids=[put.put_id for put in located.locations.puts],
        runs=located.locations.runs,
    )
    stream = server.storage.Get(get)  # without a deadline, and none of it is read
    until(lambda: server.app.calls.count == 1)
    client.clear_partition("p")
    assert client.storage_stat().used_bytes == 64_000_000  # pinned by the reader
    other = client.put("q", {"x": np.zeros((4, 1_000), np.uint8)})
    assert client.get_data(other)["x"].shape == (4, 1_000)  # others go on
    until(lambda: client.storage_stat().used_bytes == 4_000)
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    until(lambda: server.app.calls.count == 0)
