"""Fields whose cells take one value only: a second one is refused whole, whatever the way in which it comes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from live_server import AnyClient, LiveServer, StartServer
from rpc_samples import violations_of

import tq_service as tq
from tq_service.v1 import metadata_pb2, storage_service_pb2

ONCE = tq.FieldSpec("reward", dtype="float32", layout="dense", row_shape=(), write_once=True)  # type: ignore[arg-type]
ROWS = torch.arange(3, dtype=torch.float32)


def declare(client: AnyClient) -> tq.BatchMeta:
    """Return samples a, b and c, of which a has a reward."""
    client.create_partition("train", fields=[ONCE, tq.FieldSpec("x")])
    meta: tq.BatchMeta = client.put("train", {"x": ROWS}, keys=["a", "b", "c"])
    client.put(meta.select_samples([0]), {"reward": torch.ones(1)})
    return meta


def stored(client: AnyClient) -> Any:
    meta, _ = client.lookup_samples("train")
    x = client.get_data(meta, data_fields=["x"])["x"].tolist()
    first = client.get_data(meta.select_samples([0]), data_fields=["reward"])["reward"].tolist()
    return x, first, meta.produced["reward"].tolist(), meta.custom_meta, client.describe_partition("train").held_count


SECOND: dict[str, Callable[[AnyClient, tq.BatchMeta], Any]] = {
    "metadata": lambda c, m: c.put(m.select_samples([0]), {"reward": torch.zeros(1)}),
    "the same value": lambda c, m: c.put(m.select_samples([0]), {"reward": torch.ones(1)}),
    "among first ones": lambda c, m: c.put(m.select_samples([2, 1, 0]), {"reward": torch.zeros(3)}),
    "with others": lambda c, m: c.put(m,
        {"x": torch.zeros(3), "reward": torch.zeros(3)}, custom_meta=[{"n": 1}] * 3, state="held"
    ),
    "upsert": lambda c, m: c.put("train", {"reward": torch.zeros(2)}, keys=["new", "a"]),
    "existing": lambda c, m: c.put("train",
        {"reward": torch.zeros(1)}, keys=["a"], key_mode="existing"
    ),
    "failed": lambda c, m: c.put(m.select_samples([0]), {"reward": torch.zeros(1)}, state="failed"),
    "another dtype": lambda c, m: c.put(m.select_samples([0]), {"reward": torch.zeros(1).double()}),
}  # fmt: skip


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_second_value_is_refused_and_nothing_is_written(client: AnyClient, is_sealed: bool) -> None:
    meta = declare(client)
    if is_sealed:
        client.seal_partition("train")
    before = stored(client)
    for name, second in SECOND.items():
        if is_sealed and name == "upsert":  # which would make a sample
            continue
        with pytest.raises(
            tq.errors.AlreadyExistsError, match="'reward' is write-once, but sample 0 of partition 'train' already has"
        ):
            second(client, meta)
        assert stored(client) == before, name
    client.put(meta.select_samples([1, 2]), {"reward": torch.tensor([2.0, 3.0])})
    assert client.get_data(meta, data_fields=["reward"])["reward"].tolist() == [1, 2, 3]
    client.put(meta, {"x": torch.zeros(3)})  # another field is overwritten as ever


def test_the_error_names_the_cell(client: AnyClient) -> None:
    meta = declare(client)
    with pytest.raises(tq.errors.AlreadyExistsError, match=r"\(1 of 3 samples have one\)") as refused:
        client.put(meta.select_samples([2, 0, 1]), {"reward": torch.zeros(3)})
    names = {"resource_name": "reward of sample 0", "partition_id": "train", "field_name": "reward"}
    expected = {"resource_type": "cell", "global_index": "0", **names}
    assert refused.value.metadata.items() >= expected.items()


def test_a_sample_that_is_cleared_and_put_again_takes_a_value(client: AnyClient) -> None:
    meta = declare(client)
    client.clear_samples(meta.select_samples([0]))
    again = client.put("train", {"x": torch.zeros(1), "reward": torch.zeros(1)}, keys=["a"])
    assert client.get_data(again)["reward"].tolist() == [0]
    with pytest.raises(tq.errors.AlreadyExistsError, match="sample 3"):
        client.put(again, {"reward": torch.ones(1)})


def test_a_repeat_of_a_put_is_answered_alike(server: LiveServer, client: AnyClient) -> None:
    meta = declare(client)
    header = storage_service_pb2.PutHeader(put_id=os.urandom(16), row_count=1, size_bytes=4, partition_id="train")
    column = header.columns.add(value_bytes=4)
    column.spec.CopyFrom(
        metadata_pb2.FieldSpec(name="reward", dtype="float32", layout=metadata_pb2.LAYOUT_DENSE, row_shape_known=True)
    )
    header.commit.request_id = os.urandom(16)
    header.commit.write.partition_id, header.commit.write.incarnation = "train", meta.incarnation
    header.commit.write.row_count = 1
    header.commit.write.global_indexes[:] = [1]
    request = storage_service_pb2.PutInlineRequest(header=header, values=bytes(4))
    answer = server.storage.PutInline(request)
    assert server.storage.PutInline(request) == answer
    header.commit.request_id, header.put_id = os.urandom(16), os.urandom(16)
    request = storage_service_pb2.PutInlineRequest(header=header, values=bytes(4))
    with pytest.raises(grpc.RpcError, match="ALREADY_EXISTS"):
        server.storage.PutInline(request)


def test_a_column_of_a_put_does_not_declare_it(server: LiveServer, client: AnyClient) -> None:
    meta = declare(client)
    header = storage_service_pb2.PutHeader(put_id=os.urandom(16), row_count=1, size_bytes=4, partition_id="train")
    spec = {"name": "other", "dtype": "float32", "layout": metadata_pb2.LAYOUT_DENSE, "row_shape_known": True}
    header.columns.add(value_bytes=4, spec=metadata_pb2.FieldSpec(**spec, write_once=True))
    with pytest.raises(grpc.RpcError, match="declaring the field with CreatePartition") as refused:
        server.storage.PutInline(storage_service_pb2.PutInlineRequest(header=header, values=bytes(4)))
    assert violations_of(refused.value) == ["write_once"]
    assert client.lookup_samples("train")[0].data_fields == ["reward", "x"]
    assert meta.size == 3


def test_it_is_shown_and_part_of_what_the_partition_was_created_with(client: AnyClient) -> None:
    meta = declare(client)
    specs = {field.spec.name: field.spec for field in client.describe_partition("train").fields}
    assert specs["reward"] == ONCE
    assert not specs["x"].write_once
    assert {spec.name: spec.write_once for spec in client.lookup_samples("train")[0].fields} == {
        "reward": True, "x": False
    }  # fmt: skip
    with pytest.raises(tq.errors.AlreadyExistsError, match="reward: float32 dense"):
        client.create_partition("train", fields=[tq.FieldSpec("reward", "float32", "dense", ()), tq.FieldSpec("x")])
    # What the partition shows of its fields is what columns are allocated by, and what is put from there.
    filled = client.allocate("train", [specs["reward"]], 2)
    filled["reward"][:] = torch.tensor([4.0, 5.0])
    client.put(meta.select_samples([1, 2]), filled)
    assert client.get_data(meta, data_fields=["reward"])["reward"].tolist() == [1, 4, 5]


@pytest.mark.parametrize("spec", [ONCE, tq.FieldSpec("reward", write_once=True)])
def test_it_lasts_over_restarts_and_checkpoints(start_server: StartServer, tmp_path: Any, spec: tq.FieldSpec) -> None:
    settings = {"data_dir": str(tmp_path / "data"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    server = start_server(**settings)
    client = server.client()
    client.create_partition("train", fields=[spec])
    meta = client.put("train", {"x": ROWS})
    client.put(meta.select_samples([0]), {"reward": torch.ones(1)})
    client.checkpoint("one")
    client.put(meta.select_samples([1]), {"reward": torch.ones(1)})
    server.stop()
    client = start_server(**settings).client()
    with pytest.raises(tq.errors.AlreadyExistsError, match="sample 1"):
        client.put(meta.select_samples([1]), {"reward": torch.ones(1)})
    client.restore("one", replace=True)
    found, _ = client.lookup_samples("train")
    client.put(found.select_samples([1]), {"reward": torch.ones(1)})
    with pytest.raises(tq.errors.AlreadyExistsError, match="sample 0"):
        client.put(found.select_samples([0]), {"reward": torch.ones(1)})
    assert [field.spec.write_once for field in client.describe_partition("train").fields] == [True, False]
