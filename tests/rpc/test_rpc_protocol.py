"""What docs/protocol.md says of requests on the wire, by stubs alone: what clients in other languages see."""

from __future__ import annotations

import math
import re
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from live_server import AnyClient, LiveServer, StartServer
from rpc_samples import new_id, reason_of, status_of, violations_of

from chaos.cluster import free_ports
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import metadata_pb2 as meta_pb
from tq_service.v1 import storage_service_pb2 as storage_pb

CODE = grpc.StatusCode
PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
INT64 = 8


def refused(call: Callable[[], object]) -> Any:
    """Return the error of a call, which must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def facts_of(error: Any) -> dict[str, str]:
    """Return the metadata of the ErrorInfo of an error."""
    info = ErrorInfo()
    assert any(detail.Unpack(info) for detail in status_of(error).details)
    return dict(info.metadata)


def column(
    name: str, values: bytes, *, dtype: str = "int64", shape: tuple[int, ...] = (), extents: bytes = b"", **spec: Any
) -> tuple[meta_pb.ColumnHeader, bytes]:
    """Return a column of numbers, dense unless its shape has -1, or of objects where `encoding` is given."""
    layout = meta_pb.LAYOUT_JAGGED if -1 in shape else meta_pb.LAYOUT_DENSE
    if "encoding" in spec:
        dtype, layout = "", meta_pb.LAYOUT_OBJECT
    described = meta_pb.FieldSpec(name=name, dtype=dtype, layout=layout, row_shape=shape, row_shape_known=True, **spec)
    return meta_pb.ColumnHeader(spec=described, value_bytes=len(values), extents=extents), values


def numbers(*values: int) -> bytes:
    """Return int64 as bytes."""
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


def put_request(
    columns: list[tuple[meta_pb.ColumnHeader, bytes]], row_count: int, **write: Any
) -> storage_pb.PutInlineRequest:
    """Return a put to an embedded storage service, with its commit."""
    values = b"".join(data for _, data in columns)
    header = storage_pb.PutHeader(
        put_id=new_id(),
        partition_id="p",
        row_count=row_count,
        columns=[header for header, _ in columns],
        size_bytes=len(values),
        commit=commit_pb2.CommitRequest(
            request_id=new_id(), write=commit_pb2.SampleWrite(partition_id="p", row_count=row_count, **write)
        ),
    )
    return storage_pb.PutInlineRequest(header=header, values=values)


def put(server: LiveServer, *columns: tuple[meta_pb.ColumnHeader, bytes], row_count: int, **write: Any) -> Any:
    """Put columns and return the BatchMeta of the answer."""
    request = put_request(list(columns), row_count, **write)
    return server.storage.PutInline(request, timeout=20).put.commit.meta


def get_request(meta: meta_pb.BatchMeta) -> storage_pb.GetRequest:
    """Return the request for all cells of a batch that lies in one storage service."""
    locations = meta.locations
    return storage_pb.GetRequest(
        boot_id=locations.storages[0].boot_id, put_ids=[put.put_id for put in locations.puts], runs=locations.runs
    )


def get(server: LiveServer, meta: meta_pb.BatchMeta) -> storage_pb.GetInlineResponse:
    """Read all cells of a batch."""
    return server.storage.GetInline(storage_pb.GetInlineRequest(get=get_request(meta)), timeout=20)


def locate(server: LiveServer, **request: Any) -> meta_pb.BatchMeta:
    """Return where cells of partition p are."""
    return server.controller.Locate(pb.LocateRequest(partition_id="p", **request), timeout=20).meta


# Ids


def test_ids_of_the_service_that_are_none_are_refused_by_name(server: LiveServer) -> None:
    made = put(server, column("x", numbers(1)), row_count=1)
    request = get_request(locate(server, global_indexes=made.global_indexes))
    calls: list[tuple[str, Any, Any]] = []
    for wrong in (b"", b"short", b"x" * 17):
        of_boot, of_put = storage_pb.GetRequest(), storage_pb.GetRequest()
        of_boot.CopyFrom(request)
        of_boot.boot_id = wrong
        of_put.CopyFrom(request)
        of_put.put_ids[0] = wrong
        for each, field in ((of_boot, "boot_id"), (of_put, "put_ids")):
            calls.append((field, server.storage.GetInline, storage_pb.GetInlineRequest(get=each)))
        if wrong:
            calls += [
                ("incarnation", server.controller.SealPartition,
                 pb.SealPartitionRequest(request_id=new_id(), partition_id="p", incarnation=wrong)),
                ("incarnation", server.controller.GetMeta,
                 pb.GetMetaRequest(request_id=new_id(), partition_id="not there", task_name="t", data_fields=["x"],
                                   batch_size=1, incarnation=wrong)),
            ]  # fmt: skip
    for field, method, message in calls:
        error = refused(lambda method=method, message=message: method(message, timeout=20))
        assert (error.code(), violations_of(error)) == (CODE.INVALID_ARGUMENT, [field])
        assert facts_of(error)["expected"] == "16"


def test_ids_of_another_time_have_their_own_errors(server: LiveServer) -> None:
    made = put(server, column("x", numbers(1)), row_count=1)
    request = get_request(locate(server, global_indexes=made.global_indexes))
    request.boot_id = new_id()
    error = refused(lambda: server.storage.GetInline(storage_pb.GetInlineRequest(get=request), timeout=20))
    assert (error.code(), reason_of(error)) == (CODE.DATA_LOSS, "DATA_LOSS")
    seal = pb.SealPartitionRequest(request_id=new_id(), partition_id="p", incarnation=new_id())
    assert reason_of(refused(lambda: server.controller.SealPartition(seal, timeout=20))) == "STALE_INCARNATION"


# Puts


def test_a_put_names_the_controller_that_it_asked_or_none(server: LiveServer) -> None:
    own = server.controller.PlacePut(pb.PlacePutRequest(partition_id="p")).controller_id
    request = put_request([column("x", numbers(1))], 1)
    request.header.controller_id = new_id()
    other = refused(lambda: server.storage.PutInline(request, timeout=20))
    assert other.code() is CODE.UNAVAILABLE
    assert "PlacePut" in other.details()
    request.header.controller_id = b"x"
    assert violations_of(refused(lambda: server.storage.PutInline(request, timeout=20))) == ["controller_id"]
    for right in (b"", own):
        again = put_request([column("x", numbers(1))], 1)
        again.header.controller_id = right
        assert server.storage.PutInline(again, timeout=20).put.HasField("commit")
    assert server.client().describe_partition("p").summary.inserted_count == 2


def test_a_restart_that_keeps_nothing_is_noticed_by_a_repeated_put(start_server: StartServer) -> None:
    (port,) = free_ports(1)  # the system gives it to nobody meanwhile
    first = start_server(port=port)
    request = put_request([column("x", numbers(1))], 1)
    request.header.controller_id = first.controller.PlacePut(pb.PlacePutRequest(partition_id="p")).controller_id
    assert first.storage.PutInline(request, timeout=20).put.HasField("commit")
    first.stop()
    second = start_server(port=port)
    assert refused(lambda: second.storage.PutInline(request, timeout=20)).code() is CODE.UNAVAILABLE
    now = second.controller.PlacePut(pb.PlacePutRequest(partition_id="p")).controller_id
    assert now != request.header.controller_id
    assert second.client().list_partitions() == []


def test_the_commit_of_a_put_says_what_only_it_can(server: LiveServer) -> None:
    def wrong(change: Callable[[storage_pb.PutInlineRequest], object]) -> Any:
        request = put_request([column("x", numbers(1, 2))], 2)
        change(request)
        return refused(lambda: server.storage.PutInline(request, timeout=20))

    def without_write(request: storage_pb.PutInlineRequest) -> None:
        request.header.commit.ClearField("write")

    def with_rows(request: storage_pb.PutInlineRequest) -> None:
        request.header.commit.write.row_count = 3

    def with_values(request: storage_pb.PutInlineRequest) -> None:
        request.values += b"x"

    cases: list[tuple[str, Any]] = [
        ("placement", lambda request: request.header.commit.placement.SetInParent()),
        ("columns", lambda request: request.header.commit.columns.extend(request.header.columns)),
        ("write", without_write),
        ("row_count", with_rows),
        ("values", with_values),
        ("partition_id", lambda request: setattr(request.header.commit.write, "partition_id", "q")),
    ]
    for field, change in cases:
        error = wrong(change)
        assert (error.code(), violations_of(error)) == (CODE.INVALID_ARGUMENT, [field])
    assert facts_of(wrong(with_rows))["field_name"] == "x"
    assert server.client().list_partitions() == []
    assert server.client().storage_stat().put_count == 0


def test_an_embedded_storage_service_takes_a_commit_of_its_own(server: LiveServer) -> None:
    request = put_request([column("x", numbers(7))], 1)
    commit = commit_pb2.CommitRequest()
    commit.CopyFrom(request.header.commit)
    request.header.ClearField("commit")
    answer = server.storage.PutInline(request, timeout=20).put
    assert (answer.HasField("commit"), answer.receipt) == (False, b"")
    commit.columns.extend(request.header.columns)
    commit.placement.storage.CopyFrom(answer.storage)
    commit.placement.put_id = request.header.put_id
    commit.placement.receipt = b"made up"
    error = refused(lambda: server.controller.Commit(commit, timeout=20))
    assert (error.code(), violations_of(error)) == (CODE.INVALID_ARGUMENT, ["receipt"])
    commit.placement.receipt = b""
    made = server.controller.Commit(commit, timeout=20).meta
    assert get(server, locate(server, global_indexes=made.global_indexes)).values == numbers(7)


@pytest.mark.parametrize("is_embedded", [True, False])
def test_a_commit_has_the_columns_of_its_put(start_server: StartServer, is_embedded: bool) -> None:
    """Else tasks would be given samples that nobody can read."""
    server = storage = start_server(role="all" if is_embedded else "controller")
    if not is_embedded:
        storage = start_server(role="storage", controller=server.address, shared_memory="off")
        server.client().put("other", {"x": [1]})  # waits until it has registered
    request = put_request([column("x", numbers(7)), column("y", numbers(1, 2), shape=(-1,), extents=numbers(2))], 1)
    request.header.controller_id = server.controller.PlacePut(pb.PlacePutRequest(partition_id="p")).controller_id
    commit = commit_pb2.CommitRequest()
    commit.CopyFrom(request.header.commit)
    request.header.ClearField("commit")
    answer = storage.storage.PutInline(request, timeout=20).put
    again = storage_pb.PutInlineRequest()
    again.CopyFrom(request)
    again.header.columns[0].spec.name = "z"  # what a repeat says is not compared
    assert storage.storage.PutInline(again, timeout=20).put.storage == answer.storage
    commit.placement.storage.CopyFrom(answer.storage)
    commit.placement.put_id = request.header.put_id
    commit.placement.receipt = answer.receipt
    x, y = request.header.columns
    wrong = [
        column("z", numbers(7))[0],
        column("x", numbers(7), dtype="uint64")[0],
        column("x", numbers(7), shape=(1,))[0],
        column("x", numbers(7), shape=(-1,), extents=numbers(1))[0],
        column("x", numbers(7), encoding=meta_pb.ENCODING_TEXT, extents=numbers(8))[0],
    ]
    for columns in (*([each, y] for each in wrong), [x], [y, x], [x, y, column("z", numbers(7))[0]]):
        del commit.columns[:]
        commit.columns.extend(columns)
        error = refused(lambda: server.controller.Commit(commit, timeout=20))
        assert (error.code(), violations_of(error)) == (CODE.INVALID_ARGUMENT, ["columns"])
    del commit.columns[:]
    commit.columns.extend([x, y])
    meta = server.controller.Commit(commit, timeout=20).meta
    assert [spec.name for spec in meta.fields] == ["x", "y"]
    assert get(storage, locate(server, global_indexes=meta.global_indexes)).values == numbers(7, 1, 2)


def test_a_column_that_is_wrong_is_named(server: LiveServer) -> None:
    put(server, column("x", numbers(1)), row_count=1)
    plain = meta_pb.ENCODING_UNSPECIFIED
    cases = [
        ("columns", "FIELD_MISMATCH", column("x", numbers(1, 2), shape=(2,))),
        ("value_bytes", "INVALID_ARGUMENT", column("x", b"short")),
        ("dtype", "INVALID_ARGUMENT", column("x", numbers(1), dtype="int65")),
        ("encoding", "INVALID_ARGUMENT", column("x", b"ab", encoding=plain, extents=numbers(2))),
        ("encoding", "INVALID_ARGUMENT", column("x", b"ab", encoding=plain, extents=numbers(2, 1))),
    ]
    for field, reason, wrong in cases:
        error = refused(lambda wrong=wrong: put(server, wrong, row_count=1))
        assert (violations_of(error), reason_of(error)) == ([field], reason)
        assert facts_of(error)["field_name"] == "x"
    assert server.client().describe_partition("p").summary.inserted_count == 1


def test_a_column_of_custom_meta_that_is_wrong_is_named(server: LiveServer) -> None:
    two = meta_pb.Int64Values(values=[1, 2])
    cases = [
        meta_pb.MetaColumn(name="version", int64_values=two),
        meta_pb.MetaColumn(name="version"),
        meta_pb.MetaColumn(name="version", json_values=["{"]),
        meta_pb.MetaColumn(name="version", kinds=b"\x01\x01", int64_values=two),
    ]
    for wrong in cases:
        error = refused(lambda wrong=wrong: put(server, column("x", numbers(1)), row_count=1, custom_meta=[wrong]))
        assert (violations_of(error), facts_of(error)["column"]) == (["custom_meta"], "version")


@pytest.mark.parametrize("seconds", [0.2])
def test_a_stream_that_stalls_says_by_which_limit(start_server: StartServer, seconds: float) -> None:
    server = start_server(stall_seconds=seconds)
    request = put_request([column("x", numbers(1))], 1)
    call: Any = server.storage.Put.future(_never_ending(request.header), timeout=20)
    assert call.code() is CODE.DEADLINE_EXCEEDED
    assert facts_of(call)["limit_name"] == "stall_seconds"


def _never_ending(header: storage_pb.PutHeader) -> Any:
    yield storage_pb.PutRequest(header=header)
    threading.Event().wait(10)


def test_a_stream_of_python_waits_for_its_initial_metadata(server: LiveServer) -> None:
    """The program of the page, for a put, for one that is there already, and for one that is refused."""
    program = textwrap.dedent(re.findall(r"^   ```py\n(.*?)^   ```$", PAGE, re.DOTALL | re.MULTILINE)[0])
    names: dict[str, Any] = {"threading": threading, "PutRequest": storage_pb.PutRequest}
    exec(program, names)
    values = numbers(*range(100_000))
    request = put_request([column("x", values)], 100_000)
    frames = [values[start : start + (1 << 18)] for start in range(0, len(values), 1 << 18)]
    answers = [names["put"](server.storage, request.header, frames, 20).commit for _ in range(2)]
    assert answers[0] == answers[1]
    assert server.client().get_data("p", global_indexes=[99_999])["x"].tolist() == [99_999]
    request.header.size_bytes += 1
    request.header.put_id = request.header.commit.request_id = new_id()
    assert violations_of(refused(lambda: names["put"](server.storage, request.header, frames, 20))) == ["size_bytes"]


# What was written


def test_values_for_a_failed_sample_are_dropped_and_its_state_stays(server: LiveServer) -> None:
    one, both = ["a"], ["a", "b"]
    made = put(server, column("x", numbers(1, 2)), row_count=2, keys=both)
    put(server, column("x", numbers(1)), row_count=1, keys=one, state=meta_pb.SAMPLE_STATE_FAILED)
    again = put(server, column("v", numbers(5, 6)), row_count=2, keys=both)
    assert again.global_indexes == made.global_indexes
    error = refused(lambda: locate(server, keys=["b", "a"], data_fields=["v"]))
    assert (error.code(), reason_of(error)) == (CODE.NOT_FOUND, "CELL_NOT_FOUND")
    assert (
        "sample 0 (key 'a') of partition 'p' has no 'v' and never will, since the sample has failed" in error.details()
    )
    found = locate(server, keys=["b", "a"], data_fields=["v"], skip_missing=True)
    assert (found.global_indexes, get(server, found).values) == ([1], numbers(6))
    revived = put_request([column("v", numbers(5))], 1, keys=one, state=meta_pb.SAMPLE_STATE_LIVE)
    assert reason_of(refused(lambda: server.storage.PutInline(revived, timeout=20))) == "SAMPLE_FAILED"


@pytest.mark.parametrize("named", [{"keys": ["b", "a", "b"]}, {"global_indexes": [1, 0, 1]}])
@pytest.mark.parametrize("skip_missing", [False, True])
def test_samples_may_be_located_and_read_twice(
    server: LiveServer, client: AnyClient, named: dict[str, Any], skip_missing: bool
) -> None:
    put(server, column("x", numbers(1, 2)), row_count=2, keys=["a", "b"])
    found = locate(server, **named, skip_missing=skip_missing)
    assert (found.global_indexes, found.keys) == ([1, 0, 1], ["b", "a", "b"])
    assert get(server, found).values == numbers(2, 1, 2)
    assert client.get_data("p", **named)["x"].tolist() == [2, 1, 2]


def test_an_overwritten_cell_is_located_again(server: LiveServer) -> None:
    made = put(server, column("x", numbers(1, 2)), row_count=2)
    before = locate(server, global_indexes=made.global_indexes)
    put(server, column("x", numbers(3)), row_count=1, global_indexes=[0], incarnation=made.incarnation)
    error = refused(lambda: get(server, before))
    assert (error.code(), reason_of(error)) == (CODE.NOT_FOUND, "PUT_NOT_FOUND")
    assert get(server, locate(server, global_indexes=made.global_indexes)).values == numbers(3, 2)


def test_the_answer_of_a_get_describes_the_rows_that_were_asked_for(server: LiveServer) -> None:
    one = column("x", numbers(1, 2, 3), shape=(-1, 3), extents=numbers(1))
    made = put(server, one, row_count=1)
    alike = put(server, column("x", numbers(*range(12)), shape=(2, 3)), row_count=2)
    longer = put(server, column("x", numbers(*range(9)), shape=(3, 3)), row_count=1)
    wider = put(server, column("x", numbers(*range(8)), shape=(2, 4)), row_count=1)

    def read(*parts: meta_pb.BatchMeta) -> tuple[int, list[int], bytes]:
        located = locate(server, global_indexes=[index for part in parts for index in part.global_indexes])
        assert located.fields[0].layout == meta_pb.LAYOUT_JAGGED
        assert list(located.fields[0].row_shape) == [-1, -1]
        (header,) = get(server, located).header.columns
        return header.spec.layout, list(header.spec.row_shape), header.extents

    assert read(alike) == (meta_pb.LAYOUT_DENSE, [2, 3], b"")
    assert read(made) == (meta_pb.LAYOUT_JAGGED, [-1, 3], numbers(1))
    assert read(alike, longer) == (meta_pb.LAYOUT_JAGGED, [-1, 3], numbers(2, 2, 3))
    assert read(alike, wider) == (meta_pb.LAYOUT_JAGGED, [2, -1], numbers(3, 3, 4))
    assert read(made, wider) == (meta_pb.LAYOUT_JAGGED, [-1, -1], numbers(1, 3, 2, 4))


def test_what_a_field_takes_is_what_it_was_declared_as(server: LiveServer) -> None:
    spec = meta_pb.FieldSpec(name="dense", layout=meta_pb.LAYOUT_DENSE)
    server.controller.CreatePartition(
        pb.CreatePartitionRequest(request_id=new_id(), partition_id="p", fields=[spec]), timeout=20
    )
    for name in ("dense", "auto"):
        put(server, column(name, numbers(1, 2), shape=(2,)), row_count=1)
    others = {
        "shape": {"values": numbers(1, 2, 3), "shape": (3,)},
        "ragged": {"values": numbers(1), "shape": (-1,), "extents": numbers(1)},
        "dimensions": {"values": numbers(1, 2), "shape": (1, 2)},
        "dtype": {"values": numbers(1), "dtype": "int32", "shape": (2,)},
        "objects": {"values": b"hi", "encoding": meta_pb.ENCODING_TEXT, "extents": numbers(2)},
    }
    for name, taken in (("dense", set()), ("auto", {"shape", "ragged"})):
        for kind, arguments in others.items():
            request = put_request([column(name, **arguments)], 1)  # type: ignore[arg-type]
            if kind in taken:
                server.storage.PutInline(request, timeout=20)
            else:
                error = refused(lambda request=request: server.storage.PutInline(request, timeout=20))
                assert (reason_of(error), facts_of(error)["field_name"]) == ("FIELD_MISMATCH", name)
    made = locate(server, global_indexes=[1, 2, 3], data_fields=["auto"])
    assert (made.fields[0].layout, list(made.fields[0].row_shape)) == (meta_pb.LAYOUT_JAGGED, [-1])
    (header,) = get(server, made).header.columns
    assert header.extents == numbers(2, 3, 1)


def test_encodings_of_objects_are_in_the_header_of_a_get(server: LiveServer) -> None:
    text = column("o", b"hi", encoding=meta_pb.ENCODING_TEXT, extents=numbers(2))
    packed = column("o", b"\xc0", encoding=meta_pb.ENCODING_MSGPACK, extents=numbers(1))
    made = [put(server, each, row_count=1).global_indexes[0] for each in (text, packed)]
    one, both = locate(server, global_indexes=made[:1]), locate(server, global_indexes=made)
    assert one.fields[0].encoding == both.fields[0].encoding == meta_pb.ENCODING_UNSPECIFIED
    (header,) = get(server, one).header.columns
    assert (header.spec.encoding, header.extents) == (meta_pb.ENCODING_TEXT, numbers(2))
    (header,) = get(server, both).header.columns
    assert (header.spec.encoding, header.extents) == (meta_pb.ENCODING_UNSPECIFIED, numbers(2, 1, 1, 2))


def test_a_known_request_id_is_answered_whatever_else_is_said(server: LiveServer) -> None:
    first, second = put_request([column("x", numbers(1))], 1), put_request([column("x", numbers(5, 6))], 2)
    second.header.commit.request_id = first.header.commit.request_id
    answers = [server.storage.PutInline(request, timeout=20).put.commit for request in (first, second)]
    assert answers[0] == answers[1]
    assert server.client().describe_partition("p").summary.inserted_count == 1
    seal = pb.SealPartitionRequest(request_id=first.header.commit.request_id, partition_id="p")
    assert violations_of(refused(lambda: server.controller.SealPartition(seal, timeout=20))) == ["request_id"]


def test_the_incarnation_of_new_samples_is_compared(server: LiveServer) -> None:
    made = put(server, column("x", numbers(1)), row_count=1)
    put(server, column("x", numbers(2)), row_count=1, incarnation=made.incarnation)
    server.client().clear_partition("p")
    request = put_request([column("x", numbers(3))], 1, incarnation=made.incarnation)
    gone = refused(lambda: server.storage.PutInline(request, timeout=20))
    assert reason_of(gone) == "PARTITION_NOT_FOUND"
    server.client().create_partition("p")
    assert reason_of(refused(lambda: server.storage.PutInline(request, timeout=20))) == "STALE_INCARNATION"


# Claims


def claim(server: LiveServer, *, request_id: bytes = b"", partition_id: str = "p", **arguments: Any) -> Any:
    """Claim for task t and return the BatchMeta."""
    asked = {"task_name": "t", "data_fields": ["x"], "batch_size": 2, **arguments}
    request = pb.GetMetaRequest(request_id=request_id or new_id(), partition_id=partition_id, **asked)
    return server.controller.GetMeta(request, timeout=20).meta


def of_task(kind: Any, meta: meta_pb.BatchMeta | None = None, **arguments: Any) -> Any:
    """Return a request about a claim of task t."""
    if meta is not None:
        arguments["claim_request_id"] = meta.claim_request_id
    return kind(request_id=new_id(), partition_id="p", task_name="t", **arguments)


LEASE = {"lease": {"seconds": 60}}


def test_what_is_not_there_is_not_yet(server: LiveServer) -> None:
    early = claim(server, partition_id="not there")
    assert (early.status, early.incarnation) == (meta_pb.BATCH_STATUS_NOT_YET, b"")
    put(server, column("x", numbers(1, 2)), row_count=2)
    assert claim(server, data_fields=["y"]).status == meta_pb.BATCH_STATUS_NOT_YET


def test_a_release_may_come_before_its_claim(server: LiveServer) -> None:
    put(server, column("x", numbers(1, 2)), row_count=2)
    early, late = new_id(), new_id()
    release = of_task(pb.ReleaseClaimRequest, claim_request_id=early)
    assert server.controller.ReleaseClaim(release, timeout=20).released_count == 0
    assert reason_of(refused(lambda: claim(server, request_id=early))) == "CLAIM_RELEASED"
    assert claim(server, request_id=late).claim_request_id == b""
    release = of_task(pb.ReleaseClaimRequest, claim_request_id=late)
    assert server.controller.ReleaseClaim(release, timeout=20).released_count == 2
    assert reason_of(refused(lambda: claim(server, request_id=late))) == "CLAIM_RELEASED"


def test_acknowledgements_that_are_not_of_the_claim(server: LiveServer) -> None:
    put(server, column("x", numbers(*range(5))), row_count=5)
    leased = claim(server, **LEASE)

    def ack(*indexes: int, of: Any = leased) -> Any:
        return server.controller.AckClaim(of_task(pb.AckClaimRequest, of, global_indexes=indexes), timeout=20)

    foreign = refused(lambda: ack(4))
    assert (foreign.code(), violations_of(foreign)) == (CODE.INVALID_ARGUMENT, ["global_indexes"])
    never = meta_pb.BatchMeta(claim_request_id=new_id())
    assert reason_of(refused(lambda: ack(0, of=never))) == "LEASE_EXPIRED"
    back = claim(server, **LEASE)
    release = of_task(pb.ReleaseClaimRequest, back, global_indexes=back.global_indexes[:1])
    assert server.controller.ReleaseClaim(release, timeout=20).released_count == 1
    lost = refused(lambda: ack(*back.global_indexes, of=back))
    assert (reason_of(lost), facts_of(lost)["global_indexes"]) == ("LEASE_EXPIRED", str(back.global_indexes[0]))
    assert [ack(0).acked_count, ack().acked_count, ack().acked_count] == [1, 1, 0]  # without indexes: all that are left
    extend = of_task(pb.ExtendClaimRequest, leased, **LEASE)
    assert reason_of(refused(lambda: server.controller.ExtendClaim(extend, timeout=20))) == "FAILED_PRECONDITION"


def test_ranks_get_their_parts_by_batch_index(server: LiveServer) -> None:
    put(server, column("x", numbers(1, 2, 3)), row_count=3)
    server.client().seal_partition("p")
    same_id = new_id()

    def ask(rank: int, batch_index: int, request_id: bytes = b"", **changes: Any) -> Any:
        numbers_of_rank = {"dp_rank": rank, "dp_size": 4, "batch_index": batch_index}
        return claim(server, request_id=request_id, **{"batch_size": 1, **numbers_of_rank, **changes})

    parts = [ask(rank, 0, same_id) for rank in range(4)]
    assert [list(part.global_indexes) for part in parts] == [[0], [1], [2], []]
    assert [part.HasField("locations") for part in parts] == [True, True, True, False]
    assert [len(part.steps[0].packs) for part in parts] == [1, 1, 1, 1]
    assert [ask(rank, 0) for rank in range(4)] == parts  # replicas, under other ids
    assert reason_of(refused(lambda: ask(0, 0, batch_size=2))) == "RANKS_DISAGREE"
    assert [ask(rank, 1).status for rank in range(4)] == [meta_pb.BATCH_STATUS_END] * 4


def test_a_rank_goes_on_after_samples_that_were_cleared(server: LiveServer) -> None:
    put(server, column("x", numbers(1, 2, 3, 4)), row_count=4)

    def ask(rank: int, batch_index: int) -> Any:
        return claim(server, batch_size=1, dp_rank=rank, dp_size=2, batch_index=batch_index)

    assert ask(0, 2).status == meta_pb.BATCH_STATUS_NOT_YET  # it plans those before it, of the samples that are there
    assert list(ask(0, 0).global_indexes) == [0]
    server.client().clear_samples("p", global_indexes=[1])
    error = refused(lambda: ask(1, 0))
    assert (reason_of(error), facts_of(error)["next_batch_index"]) == ("SAMPLES_CLEARED", "2")
    assert list(ask(0, 0).global_indexes) == [0]
    assert [list(ask(rank, 1).global_indexes) for rank in range(2)] == [[2], [3]]


# What a refused commit leaves


def stored_alone(server: LiveServer, **write: Any) -> commit_pb2.CommitRequest:
    """Store a put of one column x of one row without a commit, and return the commit of it."""
    request = put_request([column("x", numbers(7))], 1, **write)
    commit = commit_pb2.CommitRequest()
    commit.CopyFrom(request.header.commit)
    request.header.ClearField("commit")
    answer = server.storage.PutInline(request, timeout=20).put
    commit.columns.extend(request.header.columns)
    commit.placement.storage.CopyFrom(answer.storage)
    commit.placement.put_id = request.header.put_id
    return commit


DROPPING: dict[str, dict[str, Any]] = {
    "KEY_NOT_FOUND": {"keys": ["no"], "key_mode": commit_pb2.KEY_MODE_EXISTING},
    "SAMPLE_NOT_FOUND": {"global_indexes": [99]},
    "STALE_INCARNATION": {"incarnation": b"another than this"[:16]},
    "FAILED_PRECONDITION": {"groups": ["full"], "group_size": 1},
    "INVALID_ARGUMENT": {"custom_meta": [meta_pb.MetaColumn(name="c", json_values=["{"])]},
}


@pytest.mark.parametrize("reason", DROPPING)
def test_a_commit_that_is_refused_for_what_it_writes_drops_its_put(server: LiveServer, reason: str) -> None:
    made = put(server, column("x", numbers(1)), row_count=1, groups=["full"], group_size=1)
    used_bytes = server.client().storage_stat().used_bytes
    commit = stored_alone(server, **{"incarnation": made.incarnation, **DROPPING[reason]})
    assert server.client().storage_stat().used_bytes > used_bytes
    assert reason_of(refused(lambda: server.controller.Commit(commit, timeout=20))) == reason
    assert server.client().storage_stat().used_bytes == used_bytes
    commit.write.CopyFrom(commit_pb2.SampleWrite(partition_id="p", row_count=1))
    assert reason_of(refused(lambda: server.controller.Commit(commit, timeout=20))) == "PUT_NOT_FOUND"


def test_a_commit_that_is_refused_for_what_it_names_leaves_its_put(server: LiveServer) -> None:
    commit = stored_alone(server)

    def wrong(change: Callable[[commit_pb2.CommitRequest], object]) -> Any:
        changed = commit_pb2.CommitRequest()
        changed.CopyFrom(commit)
        change(changed)
        return refused(lambda: server.controller.Commit(changed, timeout=20))

    def without_boot(each: commit_pb2.CommitRequest) -> None:
        each.placement.storage.boot_id = new_id()

    assert reason_of(wrong(without_boot)) == "DATA_LOSS"
    for change in (
        lambda each: each.placement.ClearField("put_id"),
        lambda each: setattr(each.placement, "receipt", b"made up"),
        lambda each: each.ClearField("columns"),
        lambda each: setattr(each.write, "row_count", 2),
        lambda each: setattr(each, "request_id", b"short"),
        lambda each: setattr(each.write, "partition_id", "another"),
    ):
        assert wrong(change).code() is CODE.INVALID_ARGUMENT
    made = server.controller.Commit(commit, timeout=20).meta
    assert get(server, locate(server, global_indexes=made.global_indexes)).values == numbers(7)


# custom_meta and claims


def tag(server: LiveServer, **values: Any) -> None:
    """Insert a sample with a value of custom_meta column c, typed or JSON."""
    put(server, column("x", numbers(1)), row_count=1, custom_meta=[meta_pb.MetaColumn(name="c", **values)])


def integer(value: int) -> dict[str, Any]:
    return {"int64_values": meta_pb.Int64Values(values=[value])}


def double(value: float) -> dict[str, Any]:
    return {"double_values": meta_pb.DoubleValues(values=[value])}


def kept(server: LiveServer) -> list[object]:
    """Return the values of column c as they are kept: JSON as its text."""
    found = server.controller.LookupSamples(pb.LookupSamplesRequest(partition_id="p", all_samples=True), timeout=20)
    (read,) = found.meta.custom_meta
    which = read.WhichOneof("values")
    typed, texts = iter(getattr(read, which).values if which else []), iter(read.json_values)
    return [next(texts) if kind == 2 else next(typed) for kind in read.kinds or b"\1" * len(found.meta.global_indexes)]


def test_int64_and_double_mix_as_the_page_says(server: LiveServer) -> None:
    for values in (integer(1), double(2.5), integer(3), integer(2**60 + 1), {"json_values": ["1e300"]}):
        tag(server, **values)
    described = server.client().describe_partition("p").custom_meta_columns
    assert [(each.kind, each.has_json) for each in described] == [("double", True)]
    assert kept(server) == [1.0, 2.5, 3.0, str(2**60 + 1), 1e300]


def test_a_column_with_a_large_integer_stays_int64(server: LiveServer) -> None:
    for values in (integer(2**60 + 1), double(2.5), {"json_values": ['"a"']}):
        tag(server, **values)
    assert kept(server) == [2**60 + 1, "2.5", '"a"']


def test_values_compare_as_the_page_says(server: LiveServer) -> None:
    for value in (1.0, math.nan, 2.0, -math.inf):
        tag(server, **double(value))
    tag(server, json_values=['"text"'])

    def ask(operator: Any = pb.OPERATOR_EQ, order_by: Any = (), **value: Any) -> list[int]:
        where = [pb.Condition(column="c", operator=operator, values=[pb.MetaValue(**value)])] if value else []
        answer = claim(server, task_name=new_id().hex(), batch_size=5, min_batch_size=1, where=where, order_by=order_by)
        return list(answer.global_indexes)

    assert ask(double_value=1.0) == ask(int64_value=1) == ask(bool_value=True) == [0]
    assert ask(double_value=math.nan) == []
    assert ask(pb.OPERATOR_NE, double_value=math.nan) == [0, 1, 2, 3]
    assert ask(order_by=[pb.Order(column="c")]) == [3, 0, 2, 1, 4]
    assert ask(order_by=[pb.Order(column="c", descending=True)]) == [1, 2, 0, 3, 4]
    assert violations_of(refused(lambda: ask(string_value="text"))) == ["where"]


def test_an_end_is_of_what_a_queue_worker_asked_for(server: LiveServer) -> None:
    tag(server, **integer(1))
    server.client().seal_partition("p")
    other = [pb.Condition(column="c", operator=pb.OPERATOR_EQ, values=[pb.MetaValue(int64_value=2)])]
    ended = claim(server, batch_size=1, where=other)
    assert (ended.status, ended.end.excluded_count) == (meta_pb.BATCH_STATUS_END, 1)
    assert list(claim(server, batch_size=1).global_indexes) == [0]


def test_a_partition_is_sealed_by_the_write_that_reaches_its_number(server: LiveServer) -> None:
    asked = pb.CreatePartitionRequest(request_id=new_id(), partition_id="p", expected_samples=2)
    server.controller.CreatePartition(asked, timeout=20)
    made = put(server, column("x", numbers(1, 2, 3)), row_count=3)
    assert len(made.global_indexes) == 3
    assert server.client().describe_partition("p").summary.sealed


def test_samples_without_a_group_are_groups_of_one(server: LiveServer) -> None:
    groups = ["a", "", "a", ""]
    put(server, column("x", numbers(1, 2, 3, 4)), row_count=4, groups=groups, group_size=2)
    found = claim(server, batch_size=2, batch_unit=pb.BATCH_UNIT_GROUP)
    assert sorted(found.global_indexes) == [0, 1, 2]
    with_another = put_request([column("x", numbers(5))], 1, groups=["a"])
    error = refused(lambda: server.storage.PutInline(with_another, timeout=20))
    assert (reason_of(error), facts_of(error)["group"]) == ("FAILED_PRECONDITION", "a")


def test_claims_without_a_lease_are_released_as_a_whole(server: LiveServer) -> None:
    made = put(server, column("x", numbers(1, 2)), row_count=2)
    names = {"partition_id": "p", "task_name": "t", "claim_request_id": new_id()}
    claim(server, batch_size=2, request_id=names["claim_request_id"])
    ack = pb.AckClaimRequest(request_id=new_id(), incarnation=made.incarnation, **names)
    assert reason_of(refused(lambda: server.controller.AckClaim(ack, timeout=20))) == "FAILED_PRECONDITION"
    part = pb.ReleaseClaimRequest(request_id=new_id(), global_indexes=[0], **names)
    assert reason_of(refused(lambda: server.controller.ReleaseClaim(part, timeout=20))) == "INVALID_ARGUMENT"
    whole = pb.ReleaseClaimRequest(request_id=new_id(), **names)
    assert server.controller.ReleaseClaim(whole, timeout=20).released_count == 2


def test_a_lease_that_is_none_is_named(server: LiveServer) -> None:
    put(server, column("x", numbers(1)), row_count=1)
    leased = claim(server, batch_size=1, max_deliveries=2, **LEASE)
    extend = pb.ExtendClaimRequest(
        request_id=new_id(), partition_id="p", task_name="t", claim_request_id=leased.claim_request_id
    )
    assert violations_of(refused(lambda: server.controller.ExtendClaim(extend, timeout=20))) == ["lease"]
    assert violations_of(refused(lambda: claim(server, batch_size=1, max_deliveries=2))) == ["max_deliveries"]
    assert violations_of(refused(lambda: claim(server, batch_size=1, order_by=[pb.Order()]))) == ["order_by"]


def test_what_is_wrong_in_a_request_is_named_by_its_own_field(server: LiveServer) -> None:
    def create(**settings: Any) -> Any:
        asked = pb.CreatePartitionRequest(request_id=new_id(), partition_id="q", **settings)
        return refused(lambda: server.controller.CreatePartition(asked, timeout=20))

    unknown: Any = 9
    spec = meta_pb.FieldSpec(name="f", row_shape=[2])
    assert violations_of(create(default_layout=unknown)) == ["default_layout"]
    assert violations_of(create(fields=[spec])) == ["row_shape_known"]
    assert violations_of(create(fields=[meta_pb.FieldSpec(name="n" * 513)])) == ["name"]
    names = [f"{number}-{'z' * 400}" for number in range(700)]
    too_large = refused(lambda: claim(server, batch_size=1, data_fields=names))
    assert violations_of(too_large) == ["data_fields"]
    assert facts_of(too_large)["limit"] == "262144"
    assert violations_of(refused(lambda: server.controller.PlacePut(pb.PlacePutRequest(), timeout=20))) == [
        "partition_id"
    ]
