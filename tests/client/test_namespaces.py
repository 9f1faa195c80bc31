"""Namespaces: every call of a client names the partitions of its namespace, and answers name them as it does."""

import asyncio
import inspect
import pickle

import pytest
import torch
from certificates import add_token
from client_support import make_client, next_item, next_update, watching

import tq_service as tq
from tq_service.client.batch_meta import NAMESPACE_VARIABLE
from tq_service.config import ServeSettings
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.server.app import running

FIELDS = ["x"]
CLAIM = {"partition_id": "train", "task_name": "trainer", "data_fields": FIELDS, "batch_size": 2}


def rows(*values):
    return {"x": torch.tensor(values)}


@pytest.fixture
async def run(kind, service):
    client = make_client(kind, service, timeout=20, namespace="run-7")
    yield client
    await client.aclose()


async def test_runs_share_a_service_and_not_their_samples(run, client, kind, service):
    other = make_client(kind, service, timeout=20, namespace="run-8")
    for value, each in enumerate((run, other, client)):
        await each.put("train", rows(value, value), keys=["a", "b"])
    for value, each in enumerate((run, other, client)):
        meta = await each.get_meta(**CLAIM, max_wait=5)
        assert (meta.partition_id, meta.size) == ("train", 2)
        assert (await each.get_data(meta))["x"].tolist() == [value, value]
        assert (await each.get_meta(**CLAIM, max_wait=0)).status == "not_yet"
    await run.clear_partition("train")
    assert [one.partition_id for one in await other.list_partitions()] == ["train"]
    assert [one.partition_id for one in await client.list_partitions()] == ["run-8/train", "train"]
    await other.aclose()


async def test_every_call_is_about_partitions_of_the_namespace(kind, tmp_path):
    """A token for the names of the namespace is for all calls of its clients; new methods have to be added here."""
    tokens = tmp_path / "tokens.toml"
    token = add_token(tokens, "run", ["admin"], ("run-7/",))
    called = set()
    settings = ServeSettings(host="127.0.0.1", port=0, max_bytes=64 << 20, auth_tokens_file=tokens)
    async with running(settings) as app:
        client = make_client(kind, f"127.0.0.1:{app.port}", timeout=20, namespace="run-7", token=token)

        async def call(name, *arguments, **keywords):
            called.add(name)
            return await getattr(client, name)(*arguments, **keywords)

        await call(
            "create_partition", "train", fields=[tq.FieldSpec("x", dtype="int64"), tq.FieldSpec("image", scope="group")]
        )
        meta = await call("put", "train", rows(1, 2, 3, 4), keys=list("abcd"), groups=list("gggh"))
        await call("put", meta, {"big": torch.zeros(4, 100_000)})
        wide = tq.FieldSpec("wide", dtype="int64", row_shape=(1 << 16,))
        data = await call("allocate", "train", [wide], 4)
        data["wide"].fill_(1)
        await call("put", meta, data)
        inserted = await call("insert", "train", keys=["e"], state="held")
        await call("set_custom_meta", inserted, [{"version": 1}])
        await call("put_groups", "train", {"image": torch.ones(1, 2)}, groups=["g"])
        await call("close_groups", "train", ["g", "h"])
        await call("insert", "train", rollouts=["r"], state="failed")
        await call("close_rollouts", "train", ["r"])
        found, missing = await call("lookup_samples", "train", ["b", "z"])
        assert (await call("get_data", found))["x"].tolist() == [2]
        data = await call("get_data", "train", keys=["c"], data_fields=["x", "big"])
        assert (data["x"].tolist(), missing) == ([3], ["z"])
        leased = await call("get_meta", **CLAIM, lease=60)
        assert (await call("claim", "train", "other", FIELDS, batch_size=4)).full_partition_id == "run-7/train"
        data, batch = await call("get_batch", "train", "third", FIELDS, batch_size=4)
        assert (data["x"].tolist(), batch.full_partition_id) == ([1, 2, 3, 4], "run-7/train")
        assert await call("tags", "train", ["e"]) == {"e": {"version": 1}}
        await call("extend", leased, 30)
        await call("ack", leased)
        await call("release", await client.get_meta(**CLAIM))
        assert (await call("check_consumption", "train", "trainer")).consumed_count == 2
        assert (await call("check_production", "train", FIELDS)).produced_count == 4
        await call("reset_consumption", "train", "trainer", 0)
        assert await call("requeue_dead_lettered", "train", "trainer") == 0
        await call("get_meta", **CLAIM, dp_rank=0, dp_size=1, batch_index=0)
        assert (await call("advance", "train", "trainer", trained=0)).trained_batch_count == 1
        await call("publish_version", 1, trained={("train", "trainer"): 0})
        assert await call("get_version") == 1
        assert (await call("restart_ranks", "train", "trainer", dp_size=2)).batch_index == 1
        assert (await call("take_evicted", "train", "trainer")).units == ()
        slots = await call("acquire", "train", "rollout", policy="default", lease=60)
        assert (slots.full_partition_id, slots.custom_meta) == ("run-7/train", [{"start_version": 1}])
        grown = await call("append", slots, {"tokens": [[1, 2]]}, at=[0])
        await call("truncate", grown, to=[1], data_fields=["tokens"])
        assert (await client.get_data(grown))["tokens"][0].tolist() == [1]
        await client.put("prompts", rows(1), keys=["p"])
        asked = {"partition_id": "prompts", "task_name": "rollout", "data_fields": FIELDS, "batch_size": 1}
        prompt = await client.get_meta(**asked, lease=60, admit=tq.Admit("train", group_size=2, policy="default"))
        assert prompt.admitted.full_partition_id == "run-7/train"
        await client.release(prompt)
        await client.clear_partition("prompts")
        assert await call("remove_policy")
        assert await call("explain", "train") == []
        await call("seal_partition", "train")
        assert (await call("describe_partition", "train")).summary.partition_id == "train"
        assert [one.partition_id for one in await call("list_partitions", "tr")] == ["train"]
        assert [one.summary.partition_id for one in (await call("status", "tr")).partitions] == ["train"]
        called.add("watch")
        async with watching(client.watch("tr")) as watch:
            (update,) = (await next_update(watch)).partitions
            assert (update.partition_id, update.samples.full_partition_id) == ("train", "run-7/train")
        called.add("work")
        item = await next_item(client.work("train", "scorer", FIELDS, batch_size=1))
        assert (item.meta.full_partition_id, item.meta.partition_id) == ("run-7/train", "train")
        await item.put({"score": [0.5]})
        assert {one.partition_id for one in (meta, inserted, found, leased)} == {"train"}
        assert leased.full_partition_id == "run-7/train"
        assert await call("clear_fields", "train", keys=["d"], data_fields=["big"]) == 1
        assert await call("clear_samples", meta.select_samples([0, 1])) == 2
        assert await call("fail_samples", "train", keys=["c"]) == 1
        assert await call("clear_samples", "train", keys=["c"]) == 1
        await call("clear_partition", "train")
        await client.aclose()
    of_no_partition = {"checkpoint", "health", "list_checkpoints", "list_samplers", "restore", "storage_stat"}
    methods = {name for name, _ in inspect.getmembers(tq.Client, inspect.isfunction) if not name.startswith("_")}
    assert methods - called - of_no_partition - {"close"} == set()


async def test_a_batch_is_taken_for_what_it_is_by_clients_of_any_namespace(run, client):
    meta = await run.put("train", rows(1, 2), keys=["a", "b"])
    seen, _ = await client.lookup_samples("run-7/train")
    assert seen.partition_id == "run-7/train"
    assert pickle.loads(pickle.dumps(meta)) == meta
    for each in (run, client):
        assert (await each.get_data(meta))["x"].tolist() == (await each.get_data(seen, data_fields=FIELDS))[
            "x"
        ].tolist()
    again = await run.put(seen, rows(5, 6))
    assert again.full_partition_id == "run-7/train"
    assert (await client.put(meta, rows(7, 8))).partition_id == "train"
    with pytest.raises(tq.errors.InvalidArgumentError, match="differ in full_partition_id"):
        tq.BatchMeta.concat([meta, await client.put("train", rows(1, 2))])


async def test_errors_name_the_partition_as_the_client_does_and_show_the_namespace(run):
    await run.put("train", rows(1))
    with pytest.raises(tq.errors.PartitionNotFoundError) as error:
        await run.seal_partition("trian")
    assert error.value.metadata["partition_id"] == "trian"
    assert "'run-7/trian'" in error.value.message
    assert error.value.message.endswith("('run-7/' is this client's namespace)")
    empty = (await run.lookup_samples("train", []))[0]
    with pytest.raises(tq.errors.FieldNotFoundError) as error:
        await run.get_data(empty, data_fields=["y"])
    assert error.value.metadata["partition_id"] == "train"
    with pytest.raises(tq.errors.PartitionNotFoundError, match="no partition ''"):
        await run.seal_partition("")
    with pytest.raises(tq.errors.InvalidArgumentError, match="partition_id"):
        await run.seal_partition(None)


def test_the_environment_says_which(monkeypatch):
    assert tq.Client("localhost").namespace == ""
    monkeypatch.setenv(NAMESPACE_VARIABLE, "run-9")
    client = tq.Client("localhost")
    assert client.namespace == "run-9"
    assert repr(client) == "Client('localhost:50051', timeout=60, namespace='run-9')"
    assert tq.Client("localhost", namespace=False).namespace == ""
    assert tq.AsyncClient("localhost", namespace="team/run-7").namespace == "team/run-7"
    kept = pickle.dumps([client, tq.Client("localhost", namespace=False)])
    monkeypatch.setenv(NAMESPACE_VARIABLE, "run-10")
    assert [each.namespace for each in pickle.loads(kept)] == ["run-9", ""]
    monkeypatch.setenv(NAMESPACE_VARIABLE, "run-9/")
    with pytest.raises(tq.errors.InvalidArgumentError, match="TQ_NAMESPACE is 'run-9/'; expected printable text"):
        tq.Client("localhost")


@pytest.mark.parametrize("name", ["", "/run", "run/", "a\nb", 7, True])
def test_names_that_are_none(name):
    with pytest.raises(tq.errors.InvalidArgumentError, match=r"namespace is .*; expected printable text"):
        tq.Client("localhost", namespace=name)


@pytest.mark.parametrize("kind", ["sync"])
async def test_a_dataset_reads_its_namespace(run, service):
    await run.put("train", rows(1, 2, 3, 4))
    await run.seal_partition("train")
    asked = {"batch_size": 2, "data_fields": FIELDS, "partition_id": "train", "task_name": "trainer"}
    dataset = StreamingDataset(service, **asked, namespace="run-7")
    batches = await asyncio.to_thread(list, StreamingDataLoader(dataset))
    seen = [(data["x"].tolist(), meta.partition_id) for data, meta in batches]
    assert seen == [([1, 2], "train"), ([3, 4], "train")]
    with pytest.raises(tq.errors.InvalidArgumentError, match="namespace: got 'run-7'"):
        StreamingDataset(service, **asked, namespace="run-7", client_factory=tq.Client)
