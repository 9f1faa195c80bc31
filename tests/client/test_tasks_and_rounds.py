"""Declared tasks, rounds of samples in one partition, and resets without an epoch."""

import asyncio

import pytest
import torch
from client_support import make_client

import tq_service as tq

CLAIM = {"partition_id": "p", "data_fields": ["x"], "max_wait": 0.0}


def put(client, count, first=0):
    return client.put("p", {"x": torch.arange(first, first + count)})


async def test_a_declared_task_has_consumed_nothing_before_it_asks(client):
    await client.create_partition("p", tasks=["train", "reward"])
    status = await client.check_consumption("p", "reward")
    assert (status.consumed_count, status.total_count, status.complete) == (0, 0, False)
    await put(client, 3)
    assert (await client.check_consumption("p", "reward")).total_count == 3
    described = await client.describe_partition("p")
    assert described.declared_tasks == ("reward", "train")
    assert [(task.task_name, task.consumed_count) for task in described.tasks] == [("reward", 0), ("train", 0)]
    await client.get_meta(task_name="reward", batch_size=2, **CLAIM)
    await client.seal_partition("p")
    assert (await client.check_consumption("p", "reward")).consumed_count == 2
    assert not (await client.check_consumption("p", "train")).complete
    assert (await client.reset_consumption("p", "train")) == 1


async def test_a_mistyped_task_is_refused_also_where_it_waited_for_the_partition(client, kind, service):
    other = make_client(kind, service, timeout=20)
    waits = asyncio.ensure_future(other.get_meta(task_name="trian", batch_size=1, **{**CLAIM, "max_wait": 20.0}))
    await client.create_partition("p", tasks=["train", "reward"])
    await put(client, 1)
    with pytest.raises(tq.errors.TaskNotFoundError, match=r"'trian'.*'train'") as raised:
        await waits
    assert raised.value.metadata["task_name"] == "trian"
    assert {task.task_name for task in (await client.describe_partition("p")).tasks} == {"train", "reward"}
    await other.aclose()


async def test_the_same_tasks_in_another_order_are_the_same_partition(client):
    incarnation = await client.create_partition("p", tasks=["train", "reward"])
    assert await client.create_partition("p", tasks=["reward", "train"]) == incarnation
    with pytest.raises(tq.errors.AlreadyExistsError, match="reward"):
        await client.create_partition("p", tasks=["train"])


async def test_what_cannot_be_declared_is_refused(client):
    for arguments, field in (
        ({"tasks": ["a", "a"]}, "tasks"),
        ({"tasks": [""]}, "tasks"),
        ({"tasks": "train"}, "tasks"),
        ({"tasks": ["train"], "admissions": [tq.Admission("t", 1)]},
         "admissions"),
        ({"samples_per_round": 0}, "samples_per_round"),
    ):  # fmt: skip
        with pytest.raises(tq.errors.InvalidArgumentError) as raised:
            await client.create_partition("p", **arguments)
        assert raised.value.field == field
    with pytest.raises(tq.errors.LimitExceededError, match="max_tasks"):
        await client.create_partition("p", tasks=[f"task {number}" for number in range(300)])
    assert await client.list_partitions() == []


async def test_a_partition_is_used_again_round_after_round(client):
    await client.create_partition("p", tasks=["train", "log"], samples_per_round=4)
    for index in range(3):
        first = 4 * index
        await put(client, 3, first)
        status = await client.check_consumption("p", "train")
        assert (status.expected_count, status.total_count, status.complete) == (first + 4, first + 3, False)
        part = await client.get_meta(task_name="train", batch_size=3, **CLAIM)
        assert part.size == 3  # all there is, and yet the round is not whole
        assert not (await client.check_consumption("p", "train")).complete
        assert not (await client.check_production("p", ["x"])).complete
        last = await put(client, 1, first + 3)
        assert (await client.check_production("p", ["x"])).complete
        assert not (await client.check_consumption("p", "train")).complete
        await client.get_meta(task_name="train", batch_size=1, **CLAIM)
        status = await client.check_consumption("p", "train")
        assert (status.complete, status.sealed, status.consumed_count) == (True, False, first + 4)
        assert not (await client.check_consumption("p", "log")).complete
        await client.get_meta(task_name="log", batch_size=4, **CLAIM)
        assert (await client.check_consumption("p", "log")).complete
        await client.clear_samples(part)
        await client.clear_samples(last)
        assert (await client.check_consumption("p", "train")).complete


async def test_failed_samples_count_for_their_round_and_a_seal_ends_a_short_one(client):
    await client.create_partition("p", tasks=["train"], samples_per_round=4)
    assert not (await client.check_consumption("p", "train")).complete
    await client.insert("p", 4, state="failed")
    status = await client.check_consumption("p", "train")
    assert (status.complete, status.skipped_count) == (True, 4)
    await client.insert("p", 1, state="failed")
    assert not (await client.check_consumption("p", "train")).complete
    await client.seal_partition("p")
    assert (await client.check_consumption("p", "train")).complete


async def test_leased_samples_of_a_round_are_not_done(client):
    await client.create_partition("p", tasks=["train"], samples_per_round=2)
    await put(client, 2)
    claim = await client.get_meta(task_name="train", batch_size=2, lease=60.0, **CLAIM)
    assert not (await client.check_consumption("p", "train")).complete
    await client.ack(claim)
    assert (await client.check_consumption("p", "train")).complete


async def test_without_rounds_no_number_is_expected(client):
    await client.create_partition("p", tasks=["train"])
    assert (await client.check_consumption("p", "train")).expected_count is None
    assert (await client.describe_partition("p")).samples_per_round is None


async def test_a_reset_without_an_epoch_ends_the_one_there_is(client):
    await put(client, 2)
    for epoch in range(3):
        assert (await client.get_meta(task_name="train", batch_size=2, **CLAIM)).epoch == epoch
        assert await client.reset_consumption("p", "train") == epoch + 1
    assert await client.reset_consumption("p", "train", 3, keep_consumed=True) == 4
    with pytest.raises(tq.errors.StaleEpochError):
        await client.reset_consumption("p", "train", 0)
    assert (await client.check_consumption("p", "train")).epoch == 4
