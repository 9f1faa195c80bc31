"""Columns that are allocated, filled in place and put: without a copy on one host, and with one anywhere else."""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from live_server import AnyClient, LiveServer, StartServer

import tq_service as tq
from tq_service.dataplane.shared_memory.client import FdChannel, HostLink
from tq_service.schema import FieldSpec, Layout
from tq_service.storage.blobs.shared import RegionBlobs
from tq_service.testing import ServiceProcess
from tq_service.v1.storage_service_pb2 import PutInlineRequest
from tq_service.wire import shared_memory
from tq_service.wire.columns import put_header
from tq_service.wire.encoding import encode_columns

pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="sealed memfds are there on Linux only")

ROWS = 64
LENGTHS = np.arange(ROWS) * 100
FIELDS = [
    FieldSpec("logits", dtype="float32", row_shape=(4096,)),
    FieldSpec("tokens", dtype="int64", row_shape=(-1,)),
    FieldSpec("scores", dtype="bfloat16", row_shape=(-1, 3)),
    FieldSpec("reward", dtype="float64", row_shape=()),
]


def allocated(client: AnyClient, partition_id: str = "p") -> Any:
    lengths = {"tokens": LENGTHS, "scores": LENGTHS // 10}
    return client.allocate(partition_id, FIELDS, ROWS, lengths=lengths)


def fill(data: Any, value: int = 3) -> None:
    data["logits"][:] = torch.arange(4096)
    data["tokens"].values()[:] = torch.arange(int(LENGTHS.sum())) + value
    data["scores"].values()[:] = value
    data["reward"].fill_(value)


def check(data: Any, value: int = 3) -> None:
    assert torch.equal(data["logits"], torch.arange(4096, dtype=torch.float32).expand(ROWS, 4096))
    assert torch.equal(data["tokens"].values(), torch.arange(int(LENGTHS.sum())) + value)
    assert data["tokens"].offsets().diff().tolist() == LENGTHS.tolist()
    assert set(data["scores"].values().flatten().tolist()) == {value}
    assert set(data["reward"].tolist()) == {value}


def is_shared(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "memfd:tq_service" in line
    raise AssertionError("the tensor has no memory")


def stored(server: LiveServer) -> RegionBlobs:
    found: RegionBlobs = server.app.storage.engine.regions  # type: ignore[union-attr]
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is copied into regions."""
    sizes: list[int] = []

    def noting(real: Any) -> Any:
        def note(target: Any, columns: Any) -> None:
            sizes.append(sum(column.value_bytes for column in columns))
            real(target, columns)

        return note

    for name in ("fill", "write"):
        monkeypatch.setattr(shared_memory, name, noting(getattr(shared_memory, name)))
    return sizes


def test_what_was_filled_in_place_is_put_without_a_copy(
    client: AnyClient, server: LiveServer, copies: list[int]
) -> None:
    data = allocated(client)
    assert is_shared(data["logits"])
    assert client.storage_stat().used_bytes > ROWS * 4096 * 4
    fill(data)
    meta = client.put("p", data, keys=[f"k{row}" for row in range(ROWS)])
    assert copies == []
    assert client.storage_stat().put_count == stored(server).blob_count == 1
    check(client.get_data(meta))
    check(server.client("sync").get_data(meta))
    check(client.get_data("p", keys=[f"k{row}" for row in range(ROWS)]))


def test_the_rows_of_existing_samples(client: AnyClient, copies: list[int]) -> None:
    meta = client.put("p", {"id": torch.arange(ROWS)})
    data = allocated(client)
    fill(data)
    client.put(meta, data)
    assert copies == []
    got = client.get_data(meta, data_fields=["id", *data.keys()])
    check(got)
    assert torch.equal(got["id"], torch.arange(ROWS))


@pytest.mark.parametrize("other", ["partition", "fewer fields", "a copy of a field", "another order", "a second put"])
def test_a_put_of_anything_else_copies(other: str, client: AnyClient, copies: list[int]) -> None:
    data = allocated(client)
    fill(data)
    columns = {name: data[name] for name in data.keys()}  # noqa: SIM118  (a TensorDict iterates over its rows)
    partition_id = "p"
    if other == "partition":
        partition_id = "q"
    elif other == "fewer fields":
        del columns["reward"]
    elif other == "a copy of a field":
        columns["logits"] = columns["logits"].clone()
    elif other == "another order":
        columns = dict(reversed(columns.items()))
    else:
        client.put("p", columns)
        assert copies == []
    meta = client.put(partition_id, columns)
    assert len(copies) == 1
    got = client.get_data(meta)
    assert torch.equal(got["logits"], data["logits"])
    assert torch.equal(got["tokens"].values(), data["tokens"].values())


def test_its_region_is_used_again_only_when_its_tensors_are_gone(client: AnyClient, server: LiveServer) -> None:
    data = allocated(client)
    region_bytes = stored(server).used_bytes
    fill(data)
    client.put("p", data)
    client.clear_partition("p")
    view = data["logits"][3:]
    assert stored(server).used_bytes == region_bytes
    other = allocated(client)
    assert other["logits"].data_ptr() != data["logits"].data_ptr()
    fill(other, 9)
    check(data)
    del data
    gc.collect()
    server.settle()
    assert stored(server).used_bytes == 2 * region_bytes
    assert torch.equal(view[0], torch.arange(4096, dtype=torch.float32))
    del view, other
    gc.collect()
    server.settle()
    assert stored(server).used_bytes == region_bytes  # of the other one, which waits for its put


def test_what_is_not_put_in_time_is_given_up_and_its_put_copies(
    client_kind: Any, start_server: StartServer, copies: list[int]
) -> None:
    server = start_server(shared_memory="on", put_ttl_seconds=600.0)
    client = server.client(client_kind)
    data = allocated(client)
    fill(data)
    engine = server.app.storage.engine  # type: ignore[union-attr]
    put_ids = list(engine.puts)

    async def expire() -> None:
        for put_id in put_ids:
            engine.delete_waiting(put_id)

    server.loop.run(expire())
    assert client.storage_stat().used_bytes == 0
    meta = client.put("p", data)
    assert len(copies) == 1
    check(client.get_data(meta))


@pytest.mark.parametrize("why", ["off", "another host", "data directory", "small"])
def test_without_shared_memory_it_is_ordinary_memory_and_the_put_copies(
    why: str, client_kind: Any, start_server: StartServer, tmp_path: Path, monkeypatch: Any
) -> None:
    flags: dict[str, Any] = {"shared_memory": "off" if why == "off" else "on"}
    if why == "data directory":
        flags["data_dir"] = str(tmp_path / "data")
    if why == "another host":
        monkeypatch.setattr(HostLink, "is_due", lambda _: False)
    client = start_server(**flags).client(client_kind)
    if why == "small":
        data = client.allocate("p", [FieldSpec("x", dtype="int64", row_shape=(5,))], 4)
        assert data["x"].shape == (4, 5)
    else:
        data = allocated(client)
        assert not is_shared(data["logits"])
        assert client.storage_stat().used_bytes == 0
        fill(data)
        check(client.get_data(client.put("p", data)))


def test_a_session_that_ends_meanwhile(client: AnyClient, copies: list[int], monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise tq.errors.UnavailableError("the session has ended")

    with monkeypatch.context() as patch:
        patch.setattr(FdChannel, "allocate", fail)
        data = allocated(client)
    assert not is_shared(data["logits"])
    fill(data)
    check(client.get_data(client.put("p", data)))


def test_a_storage_service_of_its_own(
    client_kind: Any, start_server: StartServer, tmp_path: Path, copies: list[int]
) -> None:
    controller = start_server(role="controller")
    directory = {"shared_memory_dir": str(tmp_path), "shared_memory": "on"}
    start_server(role="storage", storage_id="other", controller=controller.address, **directory)
    client = controller.client(client_kind)
    data = allocated(client)
    assert is_shared(data["logits"])
    fill(data)
    check(client.get_data(client.put("p", data)))
    assert copies == []


def test_more_than_the_quota(client_kind: Any, start_server: StartServer) -> None:
    client = start_server(shared_memory="on", max_bytes=4 << 20).client(client_kind)
    x = FieldSpec("x", dtype="uint8", row_shape=(1 << 20,))
    with pytest.raises(tq.errors.QuotaExceededError):
        client.allocate("p", [x], 5)
    kept = client.allocate("p", [x], 3)
    with pytest.raises(tq.errors.QuotaExceededError, match="no capacity"):
        client.allocate("p", [x], 3, timeout=2)
    client.put("p", kept)


@pytest.mark.parametrize(
    ("fields", "lengths", "message"),
    [
        ([], {}, "expected one or more distinct fields"),
        ([FieldSpec("x", dtype="int64", row_shape=())] * 2, {}, "expected one or more distinct fields"),
        ([FieldSpec("x", dtype="int64")], {}, "expected a dtype and a row shape"),
        ([FieldSpec("x", row_shape=(1,))], {}, "expected a dtype and a row shape"),
        ([FieldSpec("x", layout=Layout.OBJECT)], {}, "expected a dtype and a row shape"),
        ([FieldSpec("x", dtype="int64", row_shape=(-1,))], {}, "has no lengths"),
        ([FieldSpec("x", dtype="int64", row_shape=(-1,))], {"x": [1]}, "extents"),
        ([FieldSpec("x", dtype="int64", row_shape=(-1,))], {"x": [1, -1]}, "negative"),
        ([FieldSpec("x", dtype="int64", row_shape=(2,))], {"x": [1, 1]}, "is dense but has lengths"),
        ([FieldSpec("x", dtype="int64", row_shape=(2,))], {"y": [1, 1]}, "lengths contains fields"),
    ],
)
def test_what_is_not_described(fields: Any, lengths: Any, message: str, client: AnyClient) -> None:
    with pytest.raises(ValueError, match=message):
        client.allocate("p", fields, 2, lengths=lengths)


def request(session_id: bytes = b"", data: Any = None, values: bytes = b"") -> PutInlineRequest:
    header = put_header(
        b"p" * 16,
        encode_columns(data or {"x": np.zeros(1 << 18)}),
        allocates=True,
        partition_id="p",
        shared_memory_session=session_id,
    )
    return PutInlineRequest(header=header, values=values)


def test_who_has_no_session_or_sends_bytes_is_refused(server: LiveServer) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        server.storage.PutInline(request())
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    storage = server.app.storage
    assert storage is not None
    assert storage.shared_memory is not None
    session = FdChannel(storage.shared_memory.path, storage.engine.boot_id)
    for wrong in (
        request(session.session_id, values=b"x"),
        request(session.session_id, {"text": ["a" * (1 << 20)]}),
    ):
        with pytest.raises(grpc.RpcError) as failure:
            server.storage.PutInline(wrong)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "a put with allocates set must not contain" in str(failure.value.details())
    session.close()


def _allocate_and_die(address: str) -> None:
    client = tq.Client(address)
    data = client.allocate("p", [FieldSpec("x", dtype="int64", row_shape=(1 << 18,))], 2)
    data["x"].fill_(1)

    os._exit(9)


def test_a_client_that_dies_leaves_what_it_allocated_for_a_while() -> None:
    with (
        ServiceProcess("--shared-memory", "on", "--put-ttl-seconds", "1") as service,
        tq.Client(service.address) as client,
    ):
        process = multiprocessing.get_context("forkserver").Process(target=_allocate_and_die, args=(service.address,))
        process.start()
        process.join(60)
        assert process.exitcode == 9
        process.close()
        while client.storage_stat().used_bytes:
            pass
        assert client.list_partitions() == []
