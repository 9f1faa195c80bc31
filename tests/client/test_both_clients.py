"""The calls of both clients against a real service."""

import asyncio
import pickle

import numpy as np
import pytest
import torch
from client_support import Awaited, make_client

import tq_service as tq
from tq_service.v1 import metadata_pb2


@pytest.fixture(params=["async", "sync"])
def kind(request):
    return request.param


def put_eight(client, partition_id="p", **more):
    data = {
        "ids": [torch.arange(i + 1) for i in range(8)],
        "score": torch.arange(8, dtype=torch.bfloat16),
        "text": [f"text {i}" for i in range(8)],
    }
    arguments = {"keys": [f"k{i}" for i in range(8)], "groups": [f"g{i // 2}" for i in range(8)], "group_size": 2}
    return client.put(partition_id, data, **(arguments | more))


async def test_put_answers_what_was_sent_and_get_data_gives_it_back(client):
    meta = await put_eight(client, custom_meta=[{"n": i} for i in range(8)])
    assert meta.global_indexes == list(range(8))
    assert meta.keys == [f"k{i}" for i in range(8)]
    assert meta.groups == [f"g{i // 2}" for i in range(8)]
    assert meta.custom_meta == [{"n": i} for i in range(8)]
    assert sorted(meta.data_fields) == ["ids", "score", "text"]
    batch = await client.get_data(meta.select_samples([5, 0, 2]))
    assert [row.tolist() for row in batch["ids"].unbind()] == [list(range(6)), [0], [0, 1, 2]]
    assert batch["score"].tolist() == [5, 0, 2]
    assert batch["score"].dtype == torch.bfloat16
    assert list(batch["text"]) == ["text 5", "text 0", "text 2"]


async def test_columns_metadata_and_state_of_existing_samples(client):
    meta = await put_eight(client, custom_meta=[{"n": i} for i in range(8)])
    part = meta.select_samples([3, 1])
    more = await client.put(part, {"reward": torch.tensor([3.0, 1.0])})
    assert more.global_indexes == [3, 1]
    assert set(more.data_fields) == {"ids", "score", "text", "reward"}
    assert (await client.get_data(more, data_fields=["reward"]))["reward"].tolist() == [3.0, 1.0]
    tagged = await client.put(more, custom_meta=[{"tag": "x"}, {"tag": "y"}], state="held")
    assert tagged.custom_meta == [{"n": 3, "tag": "x"}, {"n": 1, "tag": "y"}]
    await client.set_custom_meta(part, [{"n": 33}, {"n": 11}])
    found, missing = await client.lookup_samples("p", ["k1", "nobody", "k3"])
    assert found.custom_meta == [{"n": 11, "tag": "y"}, {"n": 33, "tag": "x"}]
    assert missing == ["nobody"]
    by_key = await client.put("p", {"reward": torch.zeros(1)}, keys=["k7"], key_mode="existing")
    assert by_key.global_indexes == [7]
    assert (await client.describe_partition("p")).held_count == 2
    assert (await client.check_production("p", ["reward"])).produced_count == 3


async def test_columns_of_other_samples_than_the_metadata_are_refused_before_they_are_sent(kind):
    client = make_client(kind, "no-such-host.invalid")
    batch = metadata_pb2.BatchMeta(status=metadata_pb2.BATCH_STATUS_BATCH, partition_id="p", global_indexes=[3, 1])
    with pytest.raises(
        tq.errors.InvalidArgumentError, match=r"^metadata has 2 samples, but field 'reward' has 5"
    ) as raised:
        await client.put(tq.BatchMeta.from_proto(batch), {"reward": torch.zeros(5)})
    await client.aclose()
    assert raised.value.field == "data"


async def test_data_by_key_and_by_index(client):
    await put_eight(client)
    by_key = await client.get_data("p", keys=["k2", "k0"], data_fields=["score"])
    assert by_key["score"].tolist() == [2, 0]
    by_index = await client.get_data("p", global_indexes=np.array([4, 1]), data_fields=["score"])
    assert by_index["score"].tolist() == [4, 1]
    skipped = await client.get_data("p", keys=["k2", "no"], data_fields=["score"], missing="skip")
    assert skipped["score"].tolist() == [2]
    with pytest.raises(tq.errors.KeyNotFoundError):
        await client.get_data("p", keys=["k2", "no"])
    with pytest.raises(tq.errors.FieldNotFoundError, match="score"):
        await client.get_data("p", keys=["k2"], data_fields=["scores"])


async def test_located_data_that_was_overwritten_meanwhile_is_found_again(client):
    await put_eight(client)
    claim = await client.get_meta(partition_id="p", task_name="t", data_fields=["score"], batch_size=4)
    assert claim.locations is not None
    for value in range(3):
        await client.put(claim, {"score": torch.full((4,), value, dtype=torch.bfloat16)})
    assert (await client.get_data(claim))["score"].tolist() == [2] * 4


async def test_empty_batch_is_typed_and_takes_no_call(kind, service):
    client = make_client(kind, service, timeout=20)
    empty = (await put_eight(client)).select_samples([])
    await client.aclose()
    down = make_client(kind, "127.0.0.1:1", timeout=0.2)
    batch = await down.get_data(empty)
    assert batch.batch_size == torch.Size([0])
    assert (batch["score"].shape, batch["score"].dtype) == ((0,), torch.bfloat16)
    assert batch["ids"].is_nested
    assert batch["ids"].size(0) == 0
    assert batch["ids"].dtype == torch.int64
    assert list(batch["text"]) == []
    assert await down.put(empty, {"reward": torch.zeros(0)}) == empty
    assert await down.clear_samples(empty) == 0
    with pytest.raises(tq.errors.InvalidArgumentError, match="metadata contains no samples"):
        await down.put(empty, {"reward": torch.zeros(1)})
    await down.aclose()


async def test_rows_put_dense_into_a_jagged_field_come_back_jagged(client):
    await client.create_partition("p", fields=[tq.FieldSpec("ids", dtype="int64", layout="jagged")])
    meta = await client.put("p", {"ids": torch.ones(3, 4, dtype=torch.int64)})
    batch = await client.get_data(meta)
    assert batch["ids"].is_nested
    assert [row.tolist() for row in batch["ids"].unbind()] == [[1] * 4] * 3


async def test_ranks_queue_workers_and_the_end(client):
    await put_eight(client)
    ask = {"partition_id": "p", "data_fields": ["ids"]}
    rank = {"task_name": "train", "batch_size": 2, "micro_batch_size": 1, "dp_size": 2, "batch_index": 0}
    parts = [await client.get_meta(**ask, **rank, dp_rank=dp_rank) for dp_rank in (0, 1)]
    assert await client.get_meta(**ask, **rank, dp_rank=0) == parts[0]
    assert parts[0].micro_batches == [[0], [1]]
    assert not set(parts[0].global_indexes) & set(parts[1].global_indexes)
    queue = await client.get_meta(**ask, task_name="reward", batch_size=6)
    assert queue.size == 6
    assert await client.release(queue) == 6
    again = await client.get_meta(**ask, task_name="reward", batch_size=8)
    assert again.size == 8
    not_yet = await client.get_meta(**ask, task_name="reward", batch_size=8, max_wait=0)
    assert not_yet.status == "not_yet"
    with pytest.raises(tq.errors.InvalidArgumentError, match="not_yet"):
        await client.get_data(not_yet)
    assert await client.seal_partition("p") == 8
    end = await client.get_meta(**ask, task_name="reward", batch_size=8)
    assert (end.status, end.size) == ("end", 0)
    assert (await client.check_consumption("p", "reward")).complete
    assert await client.reset_consumption(partition_id="p", task_name="reward", epoch=0) == 1
    with pytest.raises(tq.errors.StaleEpochError):
        await client.reset_consumption("p", "reward", 0)


async def test_where_and_order_by(client):
    await put_eight(client, custom_meta=[{"version": i % 4, "tag": "a" if i < 6 else "b"} for i in range(8)])
    ask = {"partition_id": "p", "data_fields": ["ids"], "batch_size": 8, "min_batch_size": 1, "max_wait": 0}
    newest = await client.get_meta(
        **ask, task_name="one", where=[("version", ">=", 2), ("tag", "in", ["a"])], order_by=["-version"]
    )
    assert [row["version"] for row in newest.custom_meta] == [3, 2]
    with pytest.raises(tq.errors.InvalidArgumentError, match="operator"):
        await client.get_meta(**ask, task_name="one", where=["version"])


async def test_partitions_and_services(client):
    incarnation = await client.create_partition("p", expected_samples=8)
    assert await client.create_partition("p", expected_samples=8) == incarnation
    with pytest.raises(tq.errors.AlreadyExistsError):
        await client.create_partition("p", expected_samples=9)
    inserted = await client.insert("p", 2, keys=["a", "b"], groups=["g", "g"], state="held")
    assert (inserted.global_indexes, inserted.keys, inserted.groups) == ([0, 1], ["a", "b"], ["g", "g"])
    assert inserted.incarnation == incarnation
    await client.close_groups("p", ["g"])
    assert await client.clear_samples("p", keys=["a", "nobody"]) == 1
    assert await client.clear_samples(inserted) == 1
    (summary,) = await client.list_partitions("p")
    assert (summary.inserted_count, summary.present_count) == (2, 0)
    await client.clear_partition("p", incarnation=incarnation)
    with pytest.raises(tq.errors.PartitionNotFoundError):
        await client.describe_partition("p")
    assert await client.health()
    assert "sequential" in {sampler.name for sampler in await client.list_samplers()}
    assert (await client.storage_stat()).max_bytes == 64 << 20


@pytest.mark.parametrize(
    ("arguments", "kind_of_error", "words"),
    [
        ({"target": 7}, tq.errors.InvalidArgumentError, "target is of type int, expected a partition name"),
        ({"target": "p", "keys": "k0"}, tq.errors.InvalidArgumentError, "list of strings"),
        ({"target": "p", "state": "alive"}, tq.errors.InvalidArgumentError, "live, held, failed"),
        ({"target": "p", "key_mode": "old"}, tq.errors.InvalidArgumentError, "upsert, new, existing"),
        (
            {"target": "p", "custom_meta": [{"a": 1}]},
            tq.errors.InvalidArgumentError,
            r"covers 1 sample\(s\), expected 2",
        ),
        ({"target": "p", "timeout": float("inf")}, tq.errors.InvalidArgumentError, "finite"),
        ({"target": "p", "data": {"o": [object(), 1]}}, TypeError, "object"),
    ],
)
async def test_what_cannot_be_sent_is_refused_before_anything_is_sent(kind, arguments, kind_of_error, words):
    client = make_client(kind, "127.0.0.1:1", timeout=0.2)
    with pytest.raises(kind_of_error, match=words):
        await client.put(**({"data": {"x": torch.zeros(2)}} | arguments))
    await client.aclose()


@pytest.mark.parametrize("seconds", [1e10, float(1 << 63), 1e308])
async def test_any_finite_timeout_is_waited_for(client, seconds):
    await put_eight(client)
    assert len(await client.list_partitions(timeout=seconds)) == 1
    claim = await client.get_meta(
        partition_id="p", task_name="t", data_fields=["score"], batch_size=8, max_wait=seconds, timeout=seconds
    )
    assert (claim.size, (await client.get_data(claim, timeout=seconds)).batch_size) == (8, torch.Size([8]))


async def test_a_closed_client_says_so(client):
    await client.list_partitions()
    await client.aclose()
    with pytest.raises(tq.errors.PreconditionError, match="closed"):
        await client.list_partitions()


async def test_clients_are_pickled_by_their_address(service):
    with tq.Client(service, timeout=7) as client:
        await asyncio.to_thread(client.list_partitions)
        with pickle.loads(pickle.dumps(client)) as copy:
            assert (copy.address, copy.timeout) == (service, 7)
            assert await asyncio.to_thread(copy.list_partitions) == []
    copy = pickle.loads(pickle.dumps(tq.AsyncClient(service, timeout=7)))
    assert (copy.address, copy.timeout) == (service, 7)


def test_the_address_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    assert tq.Client().address == "localhost:50051"
    monkeypatch.setenv("TQ_ADDRESS", "elsewhere:1")
    assert tq.Client().address == tq.AsyncClient().address == "elsewhere:1"
    assert tq.Client("here:2").address == "here:2"


async def test_one_sync_client_serves_many_threads(service):
    client = Awaited(tq.Client(service, timeout=20))
    metas = await asyncio.gather(*(put_eight(client, partition_id=f"p{i}") for i in range(8)))
    batches = await asyncio.gather(*(client.get_data(meta) for meta in metas))
    assert all(batch["score"].tolist() == list(range(8)) for batch in batches)
    await client.aclose()
