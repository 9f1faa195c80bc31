"""A service that keeps its state: killed at any moment, it comes back with all that it had acknowledged."""

import dataclasses
import os

import grpc
import pytest

import tq_service as tq
from tq_service.testing import ServiceProcess
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceStub

torch = pytest.importorskip("torch")


@pytest.fixture(params=["process", pytest.param("disk", marks=pytest.mark.nightly)])
def server(request, tmp_path):
    with ServiceProcess("--data-dir", str(tmp_path / "data"), "--durability", request.param) as server:
        yield server


def kill(server: ServiceProcess) -> None:
    server.restart()


def lasting(described):
    """Return what outlives the process that says it."""
    live = {"delivered_per_second": 0.0, "recent_batches": ()}
    tasks = tuple(dataclasses.replace(task, **live) for task in described.tasks)
    return dataclasses.replace(described, revision=None, tasks=tasks)


def rollouts(first, count, *, scale=1):
    generator = torch.Generator().manual_seed(first)
    lengths = torch.randint(1, 40 * scale, (count,), generator=generator).tolist()
    return {
        "input_ids": [torch.randint(0, 50_000, (length,), generator=generator) for length in lengths],
        "image": torch.rand(count, 8, 8, generator=generator),
        "grid": torch.full((count, 2, 3 if first < 16 else 4), first),  # dense at first, and then jagged
        "text": [f"answer {first + row}" for row in range(count)],
    }


def put(client, first, count, *, scale=1):
    data = rollouts(first, count, scale=scale)
    meta = client.put(
        "train@0",
        data,
        keys=[f"u{first + row}" for row in range(count)],
        groups=[f"g{(first + row) // 4}" for row in range(count)],
        group_size=4,
        custom_meta=[{"total_lengths": len(ids), "tag": f"t{row % 3}"} for row, ids in enumerate(data["input_ids"])],
    )
    return data, meta


def claim(client, batch_index, dp_rank):
    return client.get_meta(
        partition_id="train@0",
        task_name="train",
        data_fields=["input_ids", "image", "text"],
        batch_size=4,
        micro_batch_size=2,
        sampler="seqlen_balanced",
        sampler_config={"n_samples_per_prompt": 4},
        dp_rank=dp_rank,
        dp_size=2,
        batch_index=batch_index,
        max_wait=5.0,
    )


def rows_of(column):
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def test_all_that_was_acknowledged_is_there_after_a_kill(server):
    with tq.Client(server.address, timeout=30.0) as client:
        client.create_partition("train@0", expected_samples=48, fields=[tq.FieldSpec("input_ids", layout="jagged")])
        small, _ = put(client, 0, 16)
        large, large_meta = put(client, 16, 16, scale=200)
        late = client.insert("train@0", 16, keys=[f"u{32 + row}" for row in range(16)], state="held")
        client.set_custom_meta(late, [{"tag": "late", "any": any_tag} for any_tag in 4 * [1, "a", None, [{"b": None}]]])
        batches = {(index, rank): claim(client, index, rank) for index in range(2) for rank in range(2)}
        worker = client.get_meta(
            partition_id="train@0", task_name="reward", data_fields=["text"], batch_size=8, min_batch_size=8
        )
        client.put(worker, {"reward": torch.arange(8.0)})
        client.put(large_meta.select_samples([0, 3]), {"forgotten": torch.arange(2)})
        client.clear_samples(large_meta.select_samples([0, 1, 2, 3]))
        client.set_custom_meta(late.select_samples([1]), [{"any": tq.JSON_NULL}])
        tags = client.lookup_samples("train@0")[0].custom_meta
        before = lasting(client.describe_partition("train@0"))
        counts = client.check_consumption(partition_id="train@0", task_name="train")

        kill(server)

        assert lasting(client.describe_partition("train@0")) == before
        assert client.lookup_samples("train@0")[0].custom_meta == tags
        assert tags[-16:-12] == [
            {"tag": "late", "any": 1}, {"tag": "late", "any": None}, {"tag": "late"},
            {"tag": "late", "any": [{"b": None}]},
        ]  # fmt: skip
        assert client.check_consumption(partition_id="train@0", task_name="train") == counts
        for (index, rank), meta in batches.items():
            if not set(meta.global_indexes) & set(large_meta.global_indexes[:4]):
                assert claim(client, index, rank) == meta
        whole = {name: [*small[name], *large[name]] for name in small}
        left = [row for row in range(32) if not 16 <= row < 20]
        found = client.get_data("train@0", keys=[f"u{row}" for row in left], data_fields=list(whole))
        for name, rows in whole.items():
            assert same([rows[row] for row in left], rows_of(found[name])), name
        rewards = client.get_data(worker, data_fields=["reward"])
        assert torch.equal(rewards["reward"], torch.arange(8.0))
        _, missing = client.lookup_samples("train@0", keys=["u16", "u19", "u20", "u47"])
        assert missing == ["u16", "u19"]
        again, _ = client.lookup_samples("train@0", keys=["u40"])
        assert again.custom_meta[0]["tag"] == "late"


def test_a_retry_after_a_kill_gets_the_answer_of_before(server):
    insert = pb.InsertRequest(request_id=os.urandom(16))
    insert.write.partition_id, insert.write.row_count = "train@0", 6
    ask = pb.GetMetaRequest(
        request_id=os.urandom(16), partition_id="train@0", task_name="t", data_fields=["x"], batch_size=2
    )
    with grpc.insecure_channel(server.address) as channel, tq.Client(server.address, timeout=30.0) as client:
        stub = ControllerServiceStub(channel)
        inserted = stub.Insert(insert, timeout=10)
        client.put("train@0", {"x": torch.arange(4.0)})
        claimed = stub.GetMeta(ask, timeout=10)
        seal = pb.SealPartitionRequest(request_id=os.urandom(16), partition_id="train@0")
        sealed = stub.SealPartition(seal, timeout=10)

        kill(server)

        assert stub.Insert(insert, timeout=10, wait_for_ready=True) == inserted
        assert stub.SealPartition(seal, timeout=10) == sealed
        assert stub.GetMeta(ask, timeout=10) == claimed
        assert client.describe_partition("train@0").summary.inserted_count == 10


def test_a_partition_that_was_cleared_stays_cleared(server):
    with tq.Client(server.address, timeout=30.0) as client:
        for life in range(3):
            meta = client.put("train", {"x": torch.full((4, 20_000), float(life))})
            if life < 2:
                client.clear_partition("train")
        kill(server)
        assert [each.partition_id for each in client.list_partitions()] == ["train"]
        assert client.describe_partition("train").summary.inserted_count == 4
        assert torch.equal(client.get_data(meta)["x"], torch.full((4, 20_000), 2.0))


def test_it_comes_back_as_often_as_it_is_killed(server):
    with tq.Client(server.address, timeout=30.0) as client:
        metas = []
        for life in range(4):
            metas.append(client.put("train", {"x": torch.full((3, 5), float(life))}))
            kill(server)
        for life, meta in enumerate(metas):
            assert torch.equal(client.get_data(meta)["x"], torch.full((3, 5), float(life)))
        assert client.describe_partition("train").summary.inserted_count == 12


def test_a_second_service_cannot_use_the_directory(server, tmp_path):
    with pytest.raises(tq.errors.UnavailableError, match=f"exited with code 1 (.|\n)*in use by process {server.pid}"):
        ServiceProcess(data_dir=tmp_path / "data", log=tmp_path / "log").start()
    with tq.Client(server.address, timeout=30.0) as client:  # the first one has not noticed
        assert client.insert("train", 2).global_indexes == [0, 1]
