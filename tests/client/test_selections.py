"""Look-ups and clears by index, by group and by condition; and what a task has done with each sample."""

import numpy as np
import pytest
import torch

import tq_service as tq
from tq_service.schema import SampleConsumption
from tq_service.v1 import controller_service_pb2 as pb


async def put_eight(client):
    return await client.put(
        "p",
        {"x": torch.arange(8)},
        keys=[f"k{number}" for number in range(8)],
        groups=["a", "a", "b", "b", None, "c", "a", "c"],
        custom_meta=[{"version": number // 2, "tag": "even" if number % 2 == 0 else "odd"} for number in range(8)],
    )


async def found(client, **arguments):
    """Return indexes of what is found, and what is missing."""
    samples, missing = await client.lookup_samples("p", **arguments)
    return samples.global_indexes, missing


async def test_samples_are_found_by_index_in_the_order_asked(client):
    meta = await put_eight(client)
    await client.clear_samples(meta.select_samples([3]))
    samples, missing = await client.lookup_samples("p", global_indexes=np.array([6, 3, 0, 99]))
    assert (samples.global_indexes, samples.keys, samples.groups) == ([6, 0], ["k6", "k0"], ["a", "a"])
    assert missing == [3, 99]
    assert (await client.get_data(samples))["x"].tolist() == [6, 0]


async def test_members_of_groups_are_found_in_the_order_of_insertion(client):
    await put_eight(client)
    assert await found(client, groups=["c", "a"]) == ([0, 1, 5, 6, 7], [])
    assert await found(client, groups=["nowhere", "b"]) == ([2, 3], ["nowhere"])
    assert await found(client, groups=[]) == ([], [])
    await client.clear_samples("p", groups=["b"])
    assert await found(client, groups=["b"]) == ([], ["b"])


async def test_groups_where_no_sample_has_one(client):
    await client.put("p", {"x": torch.arange(2)})
    assert await found(client, groups=["a"]) == ([], ["a"])


async def test_conditions_choose_among_all_and_among_those_that_are_named(client):
    await put_eight(client)
    assert await found(client, where=[("version", ">=", 2)]) == ([4, 5, 6, 7], [])
    assert await found(client, where=[("version", "in", [0, 3]), ("tag", "==", "odd")]) == ([1, 7], [])
    assert await found(client, keys=["k7", "k0", "none"], where=[("version", ">", 0)]) == ([7], ["none"])
    assert await found(client, global_indexes=[5, 4, 9], where=[("tag", "!=", "odd")]) == ([4], [9])
    assert await found(client, groups=["a", "none"], where=[("tag", "==", "even")]) == ([0, 6], ["none"])
    assert await found(client, where=[("unknown", "==", 1)]) == ([], [])


async def test_what_cannot_be_asked_is_refused(client):
    await put_eight(client)
    with pytest.raises(tq.errors.InvalidArgumentError, match="got keys and groups"):
        await client.lookup_samples("p", ["k0"], groups=["a"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="contains int64 values, got 'x'") as raised:
        await client.lookup_samples("p", where=[("version", "==", "x")])
    assert raised.value.field == "where"
    with pytest.raises(tq.errors.InvalidArgumentError, match="contains int64 values"):
        await client.clear_samples("p", where=[("version", "==", "x")])
    with pytest.raises(tq.errors.InvalidArgumentError, match="groups and samples are both set"):
        await client.clear_samples("p", keys=["k0"], groups=["a"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="task_name is ''"):
        await client.lookup_samples("p", task_name="")
    assert (await client.list_partitions())[0].present_count == 8


async def test_samples_are_cleared_by_group_and_by_condition(client):
    meta = await put_eight(client)
    assert await client.clear_samples("p", groups=["a", "none"], where=[("version", "<", 3)]) == 2
    assert await client.clear_samples(meta.select_samples([4, 5]), where=[("tag", "==", "odd")]) == 1
    assert await found(client) == ([2, 3, 4, 6, 7], [])
    assert await client.clear_samples("p", where=[("version", "<=", 1)]) == 2
    assert await client.clear_samples("p", groups=["c"]) == 1
    assert await found(client) == ([4, 6], [])


async def test_where_nothing_is_named_nothing_is_cleared(client):
    meta = await put_eight(client)
    every = [("version", ">=", 0)]
    for arguments in (
        {},
        {"where": []},
        {"keys": [], "where": every},
        {"global_indexes": [], "where": every},
        {"groups": [], "where": every},
        {"groups": []},
    ):
        assert await client.clear_samples("p", **arguments) == 0
    assert await client.clear_samples(meta.select_samples([]), where=every) == 0
    assert (await client.list_partitions())[0].present_count == 8


async def test_thousands_are_found_and_cleared_part_by_part(client, monkeypatch):
    """Neither the pages of a look-up nor the steps of a clear show in their results."""
    monkeypatch.setattr("tq_service.serving.lookup._MOST_SCANNED", 1000)
    monkeypatch.setattr("tq_service.serving.lookup._MOST_OF_A_PAGE", 300)
    monkeypatch.setattr("tq_service.serving.lookup._CLEARED_AT_ONCE", 700)
    count = 20_000
    for some in np.array_split(np.arange(count), 2):
        await client.put(
            "p",
            {"x": some},
            groups=[f"g{number // 5}" for number in some],
            custom_meta=[{"version": int(number % 10)} for number in some],
        )
    samples, _ = await client.lookup_samples("p", where=[("version", "==", 3)], task_name="t", missing_ok=True)
    assert samples.global_indexes == list(range(3, count, 10))
    assert samples.consumed.tolist() == [False] * 2000
    names = [f"g{number}" for number in reversed(range(18_000))]  # more than one call names, and than there are
    samples, missing = await client.lookup_samples("p", groups=names, where=[("version", "<", 2)])
    assert samples.global_indexes == [number for number in range(count) if number % 10 < 2]
    assert len(missing) == 14_000
    samples, missing = await client.lookup_samples("p", global_indexes=range(count + 5, 0, -1))
    assert samples.global_indexes == list(range(count - 1, 0, -1))
    assert missing == list(range(count + 5, count - 1, -1))
    assert await client.clear_samples("p", where=[("version", ">=", 5)]) == count // 2
    assert await client.clear_samples("p", groups=[f"g{number}" for number in range(0, 4000, 2)]) == 10_000
    assert (await client.list_partitions())[0].present_count == 0


async def test_what_a_task_has_done_with_each_sample(client):
    await put_eight(client)
    claim = {"partition_id": "p", "task_name": "t", "data_fields": ["x"], "max_wait": 5.0}
    await client.get_meta(batch_size=2, **claim)
    leased = await client.get_meta(batch_size=3, lease=60.0, **claim)
    await client.ack(leased.select_samples([0]))
    await client.get_meta(batch_size=1, lease=0.01, max_deliveries=1, **claim)
    while not (await client.check_consumption("p", "t")).dead_lettered_count:
        pass
    samples, _ = await client.lookup_samples("p", task_name="t")
    words = {"L": SampleConsumption.LEFT, "C": SampleConsumption.CONSUMED, "H": SampleConsumption.LEASED,
             "D": SampleConsumption.DEAD_LETTERED}  # fmt: skip
    assert samples.consumption.tolist() == [words[letter] for letter in "CCCHHDLL"]
    assert samples.consumed.tolist() == [True] * 5 + [False] * 3
    assert samples.leased.nonzero()[0].tolist() == [3, 4]
    assert samples.dead_lettered.nonzero()[0].tolist() == [5]
    status = await client.check_consumption("p", "t")
    assert (status.consumed_count, status.leased_count) == (samples.consumed.sum(), samples.leased.sum())
    other, _ = await client.lookup_samples("p", ["k6", "k1"], task_name="t")
    assert other.consumed.tolist() == [False, True]
    part = samples.select_samples([7, 0])
    assert part.consumed.tolist() == [False, True]
    joined = tq.BatchMeta.concat([part, other.select_samples([1])])
    assert joined.consumed.tolist() == [False, True, True]
    await client.reset_consumption("p", "t", keep_consumed=True)
    samples, _ = await client.lookup_samples("p", task_name="t")
    assert samples.consumed.tolist() == [True] * 3 + [False] * 5


async def test_a_task_that_is_not_there_and_a_look_up_without_one(client):
    await put_eight(client)
    with pytest.raises(tq.errors.TaskNotFoundError):
        await client.lookup_samples("p", task_name="t")
    samples, _ = await client.lookup_samples("p", task_name="t", missing_ok=True)
    assert samples.consumed.tolist() == [False] * 8
    samples, _ = await client.lookup_samples("p")
    assert (samples.consumed, samples.leased, samples.dead_lettered) == (None, None, None)
    samples, _ = await client.lookup_samples("q", task_name="t", missing_ok=True)
    assert samples.consumed.tolist() == []
    samples, missing = await client.lookup_samples("q", groups=["a"], where=[("version", "==", 1)], missing_ok=True)
    assert (samples.size, missing) == (0, ["a"])


def test_the_numbers_are_those_of_the_protos():
    numbers = {name.removeprefix("SAMPLE_CONSUMPTION_"): number for name, number in pb.SampleConsumption.items()}
    assert numbers == {"UNSPECIFIED": 0, **{each.name: each.value for each in SampleConsumption}}
