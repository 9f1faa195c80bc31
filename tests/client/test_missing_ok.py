"""`missing_ok`: where a partition, task, key or field is not there, there is nothing, instead of an error."""

import pytest
import torch

import tq_service as tq
from tq_service.types import ConsumptionStatus, ProductionStatus

NOTHING_CONSUMED = ConsumptionStatus(
    consumed_count=0, total_count=0, skipped_count=0, sealed=False, complete=False, epoch=0
)


async def put_four(client):
    return await client.put("p", {"x": torch.arange(4)}, keys=["a", "b", "c", "d"])


async def test_a_partition_that_is_not_there_has_nothing(client):
    assert await client.clear_samples("p", keys=["a"], missing_ok=True) == 0
    assert await client.clear_samples("p", global_indexes=[3], missing_ok=True) == 0
    assert await client.clear_partition("p", missing_ok=True) == 0
    samples, missing = await client.lookup_samples("p", ["a", "b"], missing_ok=True)
    assert (samples.status, samples.size, samples.partition_id, missing) == ("batch", 0, "p", ["a", "b"])
    samples, missing = await client.lookup_samples("p", missing_ok=True)
    assert (samples.size, missing) == (0, [])
    assert await client.check_consumption("p", "t", missing_ok=True) == NOTHING_CONSUMED
    production = await client.check_production("p", ["x"], missing_ok=True)
    assert production == ProductionStatus(produced_count=0, total_count=0, complete=False)
    assert await client.list_partitions() == []


async def test_more_keys_than_one_call_names_are_all_missing(client):
    keys = [f"k{number}" for number in range(20_000)]
    samples, missing = await client.lookup_samples("p", keys, missing_ok=True)
    assert (samples.size, missing) == (0, keys)


async def test_names_that_cannot_be_are_refused_all_the_same(client):
    calls = {
        "partition_id": [
            lambda: client.clear_partition("", missing_ok=True),
            lambda: client.clear_samples("", keys=["a"], missing_ok=True),
            lambda: client.lookup_samples("", missing_ok=True),
            lambda: client.check_consumption("", "t", missing_ok=True),
            lambda: client.check_production("", ["x"], missing_ok=True),
        ],
        "task_name": [lambda: client.check_consumption("p", "", missing_ok=True)],
        "data_fields": [lambda: client.check_production("p", [], missing_ok=True)],
    }
    for field, some in calls.items():
        for call in some:
            with pytest.raises(tq.errors.InvalidArgumentError) as raised:
                await call()
            assert raised.value.field == field


async def test_a_task_that_has_not_asked_has_consumed_nothing(client):
    meta = await put_four(client)
    await client.put(meta.select_samples([1]), state="failed")
    assert (await client.clear_samples(meta.select_samples([2]))) == 1
    status = await client.check_consumption("p", "t", missing_ok=True)
    expected = {"consumed_count": 0, "total_count": 4, "skipped_count": 2, "sealed": False, "complete": False}
    assert status == ConsumptionStatus(**expected, epoch=0)
    claim = {"task_name": "t", "data_fields": ["x"], "batch_size": 1, "max_wait": 0.0}
    assert (await client.get_meta(partition_id="p", **claim)).size == 1
    assert (await client.check_consumption("p", "t", missing_ok=True)).consumed_count == 1
    with pytest.raises(tq.errors.TaskNotFoundError):
        await client.check_consumption("p", "other")


async def test_a_sealed_partition_without_samples_is_complete_for_a_task_that_has_not_asked(client):
    await client.create_partition("p", expected_samples=0)
    assert (await client.check_consumption("p", "t", missing_ok=True)).complete
    assert (await client.check_production("p", ["x"], missing_ok=True)).complete


async def test_a_field_that_is_not_there_is_produced_nowhere(client):
    await put_four(client)
    for fields in (["y"], ["x", "y"]):
        status = await client.check_production("p", fields, missing_ok=True)
        assert status == ProductionStatus(produced_count=0, total_count=4, complete=False)
    assert (await client.check_production("p", ["x"], missing_ok=True)).produced_count == 4
    with pytest.raises(tq.errors.FieldNotFoundError):
        await client.check_production("p", ["x", "y"])


async def test_an_incarnation_that_is_gone_has_nothing_to_clear(client):
    old = await put_four(client)
    await client.clear_partition("p")
    await put_four(client)
    assert await client.clear_samples(old, missing_ok=True) == 0
    assert await client.clear_partition("p", incarnation=old.incarnation, missing_ok=True) == 0
    assert (await client.list_partitions())[0].present_count == 4
    with pytest.raises(tq.errors.StaleIncarnationError):
        await client.clear_samples(old)


async def test_what_is_there_is_cleared_and_found_as_without(client):
    await put_four(client)
    samples, missing = await client.lookup_samples("p", ["d", "e"], missing_ok=True)
    assert (samples.keys, missing) == (["d"], ["e"])
    assert await client.clear_samples("p", keys=["a", "e"], missing_ok=True) == 1
    assert await client.clear_partition("p", missing_ok=True) == 3
    assert await client.list_partitions() == []
